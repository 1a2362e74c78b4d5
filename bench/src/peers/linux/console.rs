//! Parses what the guest prints on its serial console.
//!
//! | line | meaning |
//! |---|---|
//! | `played NAME reads=N hits=N errors=N late_ms=N` | counters of the requests to a cache |
//! | `counted NAME sectors=N [metadata_sectors=N]` | units of 512 bytes written to a cache's devices |
//! | `trouble TEXT` | a failure; the text often begins with the name of a cache |
//! | `complete` | the guest printed everything |
//!
//! Other lines, such as messages of the kernel, are ignored.

use std::collections::BTreeMap;

/// Counters of one cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) reads: u64,
    pub(super) hits: u64,
    /// Bytes written to the cache device.
    pub(super) flash_write_bytes: u64,
    /// Bytes written to a separate device for metadata, if the cache has one.
    pub(super) metadata_write_bytes: Option<u64>,
    /// Longest time by which a request started later than the trace says, milliseconds of virtual
    /// time.
    pub(super) late_ms: u64,
}

/// The guest's console output, parsed: counters of the caches, and failures.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Console {
    /// Counters by name of the cache. Only caches that served the whole trace without an error have
    /// counters.
    pub(super) caches: BTreeMap<String, Counters>,
    /// Failures that the guest printed or that its output shows.
    pub(super) troubles: Vec<String>,
    /// True if the guest printed everything.
    pub(super) is_complete: bool,
}

/// Parses the console's output.
pub(super) fn parse(text: &str) -> Console {
    let mut console = Console::default();
    let (mut played, mut counted) = (BTreeMap::new(), BTreeMap::new());
    for line in text.lines().map(str::trim) {
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        match kind {
            "complete" => console.is_complete = true,
            "trouble" => console.troubles.push(rest.to_owned()),
            "played" | "counted" => {
                let to = if kind == "played" { &mut played } else { &mut counted };
                match numbers(rest) {
                    Some((name, numbers)) => drop(to.insert(name, numbers)),
                    None => console.troubles.push(format!("unreadable line of the guest: {line}")),
                }
            }
            _ => {}
        }
    }
    for (name, played) in &played {
        let written = counted.get(name).and_then(|counted| counted.get("sectors"));
        let player = |key| played.get(key).copied();
        let (Some(reads), Some(hits), Some(0), Some(late_ms), Some(sectors)) =
            (player("reads"), player("hits"), player("errors"), player("late_ms"), written)
        else {
            console.troubles.push(format!("{name}: counters are missing, or requests failed"));
            continue;
        };
        let metadata = counted[name].get("metadata_sectors");
        let counters = Counters {
            reads,
            hits,
            flash_write_bytes: sectors * 512,
            metadata_write_bytes: metadata.map(|sectors| sectors * 512),
            late_ms,
        };
        console.caches.insert((*name).to_owned(), counters);
    }
    console
}

/// Splits `NAME KEY=N KEY=N …`. Returns `None` for any other text.
fn numbers(text: &str) -> Option<(&str, BTreeMap<&str, u64>)> {
    let mut words = text.split_whitespace();
    let name = words.next()?;
    let mut numbers = BTreeMap::new();
    for word in words {
        let (key, value) = word.split_once('=')?;
        numbers.insert(key, value.parse().ok()?);
    }
    Some((name, numbers))
}

#[cfg(test)]
mod tests {
    use super::{Console, Counters, parse};

    #[test]
    fn counters_of_both_kinds_belong_together() {
        let text = "[    0.5] something of the kernel\r\n\
            played dm-cache.0 reads=100 hits=40 errors=0 late_ms=3\r\n\
            played bcache.0 reads=100 hits=50 errors=0 late_ms=3\r\n\
            counted dm-cache.0 sectors=64 metadata_sectors=8\r\n\
            counted bcache.0 sectors=2\r\n\
            complete\r\n";
        let console = parse(text);
        assert!(console.is_complete);
        assert_eq!(console.troubles, Vec::<String>::new());
        let dm_cache = Counters {
            reads: 100,
            hits: 40,
            flash_write_bytes: 64 * 512,
            metadata_write_bytes: Some(8 * 512),
            late_ms: 3,
        };
        assert_eq!(console.caches["dm-cache.0"], dm_cache);
        let bcache = Counters { hits: 50, flash_write_bytes: 1024, metadata_write_bytes: None, ..dm_cache };
        assert_eq!(console.caches["bcache.0"], bcache);
    }

    #[test]
    fn caches_with_errors_or_without_counters_have_no_result() {
        let text = "trouble dm-cache.0: I/O error at byte 0: too short\n\
            played dm-cache.0 reads=100 hits=40 errors=1 late_ms=0\n\
            counted dm-cache.0 sectors=1\n\
            played bcache.0 reads=100 hits=40 errors=0 late_ms=0\n";
        let console = parse(text);
        assert!(!console.is_complete);
        assert!(console.caches.is_empty());
        let expected = [
            "dm-cache.0: I/O error at byte 0: too short",
            "bcache.0: counters are missing, or requests failed",
            "dm-cache.0: counters are missing, or requests failed",
        ];
        assert_eq!(console.troubles, expected);
    }

    #[test]
    fn damaged_lines_are_reported() {
        for line in ["played", "played x reads=many", "counted x sectors"] {
            let console = parse(line);
            assert!(console.caches.is_empty());
            assert_eq!(console.troubles, [format!("unreadable line of the guest: {line}")]);
        }
        assert_eq!(parse(""), Console::default());
    }
}
