//! Parses hob's trace format from its specification in docs/TRACE.md, without code of hob.

use std::path::Path;

/// One request of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// R, W, D or F.
    pub op: char,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// A whole trace.
#[derive(Debug, Clone)]
pub struct Trace {
    /// Number of records in the header.
    pub records: u64,
    /// Number of missing requests in the header.
    pub dropped: u64,
    /// The recorded requests.
    pub requests: Vec<Request>,
    /// Times of the requests, nanoseconds from the start.
    pub at_ns: Vec<u64>,
}

/// The byte that distinguishes a seal, which has a checksum, from a record.
const SEAL: u8 = 0xFF;

impl Trace {
    /// Reads a trace of one disk.
    ///
    /// # Panics
    /// Panics if the file cannot be read or breaks the specification.
    #[must_use]
    #[track_caller]
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()));
        assert!(
            bytes.len() >= 64 && (bytes.len() - 64).is_multiple_of(24),
            "{} bytes are no trace",
            bytes.len()
        );
        let (head, body) = bytes.split_at(64);
        assert_eq!((&head[..8], number(&head[8..12])), (&b"hobtrace"[..], 2), "magic and version");
        let mut trace = Self {
            records: number(&head[16..24]),
            dropped: number(&head[24..32]),
            requests: Vec::new(),
            at_ns: Vec::new(),
        };
        for (i, record) in body.chunks_exact(24).enumerate() {
            let is_last = i + 1 == body.len() / 24;
            assert_eq!(record[20] == SEAL, i % 1024 == 1023 || is_last, "a seal ends each group of records");
            if record[20] == SEAL {
                assert_eq!(number(&record[..8]), trace.requests.len() as u64, "records before the seal");
                assert_eq!(record[21], u8::from(is_last), "the last seal");
                continue;
            }
            assert_eq!(record[21..], [0; 3], "reserved bytes, and the disk's number");
            trace.at_ns.push(number(&record[..8]));
            trace.requests.push(Request {
                op: *['R', 'W', 'D', 'F'].get(usize::from(record[20])).expect("an operation of the format"),
                offset: number(&record[8..16]),
                len: number(&record[16..20]) as u32,
            });
        }
        trace
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
