//! The first lines of a plan: the image of the disk, the size and mode of its cache, and the data
//! that can be lost. The losses are those of docs/WRITE_BACK.md, for an image file or block device.

use hob_control::{Admission, CacheSettings, Disk, Pool, Size};
use hob_engine::command::{Copies, Mode};
use hob_engine::preset::{COPIES, MODES, OneDevice, PRESETS, Word};

use super::record::Record;
use crate::output::word;

/// Number of devices for two copies of dirty data.
const DEVICES_FOR_COPIES: usize = 2;

/// Returns the first lines of the plan of an attachment.
pub(super) fn of_attachment(record: &Record, pools: &[Pool]) -> Vec<String> {
    let Record { label, file, format, disk, cache, .. } = record;
    let pool = pools.iter().find(|pool| pool.name == cache.pool);
    let (mode, copies) = safety(&cache.settings, pool.map_or(0, local_devices));
    let method = word(&record.method);
    let kept = match (mode, copies) {
        (Mode::WriteBack, Copies::One) => ", with one copy of dirty data",
        (Mode::WriteBack, Copies::Peer) => ", with a replica of dirty data on a peer",
        (Mode::WriteBack, _) => ", with two copies of dirty data",
        _ => "",
    };
    vec![
        format!("{label}: {} ({format}) becomes hob's disk {disk}, by the method '{method}'", file.display()),
        format!(
            "{label}: the cache has {} in pool {}, in the mode {}{kept}",
            cache.size.unwrap_or_default().human(),
            cache.pool,
            name(MODES, mode)
        ),
        format!("{label}: {}", losses(mode, copies)),
    ]
}

/// Returns the first line of the plan of a detachment.
pub(super) fn of_detachment(record: &Record, disks: &[Disk]) -> String {
    let Record { label, file, disk, .. } = record;
    let cache = disks.iter().find(|found| found.name == *disk).and_then(|disk| disk.cache.as_ref());
    let dirty = cache.and_then(|cache| cache.dirty.as_ref()).map_or(Size(0), |dirty| dirty.size);
    let first = match dirty {
        Size(0) => "nothing is lost".to_owned(),
        dirty => {
            format!("{} of dirty data are written to the image first, so nothing is lost", dirty.human())
        }
    };
    format!("{label}: hob's disk {disk} becomes {} again; {first}", file.display())
}

/// Returns the write mode and the number of copies that the daemon will choose. `devices` is the
/// number of flash devices in the pool.
fn safety(settings: &CacheSettings, devices: usize) -> (Mode, Copies) {
    let named = settings.preset.as_deref().and_then(|name| PRESETS.iter().find(|row| row.name == name));
    let row = named.unwrap_or(&PRESETS[0]);
    let has_one_copy = devices < DEVICES_FOR_COPIES && row.one_device == OneDevice::OneCopy;
    let copies = if has_one_copy { Copies::One } else { row.copies };
    (
        value(MODES, settings.mode.as_deref()).unwrap_or(row.mode),
        value(COPIES, settings.copies.as_deref()).unwrap_or(copies),
    )
}

fn losses(mode: Mode, copies: Copies) -> String {
    const KILLED: &str = "if hob is killed, nothing, or unflushed writes while 'hob health' reports that the cache has \
                          no crash log";
    let flash = match (mode, copies) {
        (Mode::WriteBack, Copies::One) => "dirty data, if a flash device fails or this host is lost",
        (Mode::WriteBack, Copies::Peer) => {
            "dirty data, if a flash device or this host is lost, and the peer's replica too"
        }
        (Mode::WriteBack, _) => "dirty data, if two flash devices fail or this host is lost",
        _ => {
            return "hob adds no risk of data loss: the image has every write before hob acknowledges the \
                    write"
                .to_owned();
        }
    };
    format!(
        "what can be lost: {flash}; {KILLED}; if this host loses power, unflushed writes, as without hob. Dirty data is \
         data that flash has and the image does not have yet"
    )
}

fn local_devices(pool: &Pool) -> usize {
    let is_used = |device: &&hob_control::Device| device.peer.is_none() && device.admission == Admission::In;
    pool.devices.iter().filter(is_used).count()
}

fn value<T: Copy + 'static>(table: &[Word<T>], name: Option<&str>) -> Option<T> {
    table.iter().find(|row| Some(row.name) == name).map(|row| row.value)
}

fn name<T: PartialEq + 'static>(table: &'static [Word<T>], value: T) -> &'static str {
    table.iter().find(|row| row.value == value).map_or("", |row| row.name)
}

#[cfg(test)]
mod tests {
    use super::super::record::example;
    use super::*;

    fn settings(json: &str) -> CacheSettings {
        serde_json::from_str::<hob_control::CachePatch>(json).unwrap().settings
    }

    #[test]
    fn the_mode_and_the_copies_are_those_of_the_daemon() {
        for (json, devices, expected) in [
            ("{}", 2, (Mode::WriteThrough, Copies::One)),
            (r#"{"preset":"auto"}"#, 1, (Mode::WriteBack, Copies::One)),
            (r#"{"preset":"auto"}"#, 2, (Mode::WriteBack, Copies::TwoOfDirty)),
            (r#"{"preset":"auto","mode":"write-around"}"#, 1, (Mode::WriteAround, Copies::One)),
            (r#"{"mode":"write-back"}"#, 2, (Mode::WriteBack, Copies::One)),
            (r#"{"preset":"auto","copies":"peer"}"#, 1, (Mode::WriteBack, Copies::Peer)),
            (r#"{"preset":"zbs"}"#, 2, (Mode::WriteBack, Copies::TwoOfDirty)),
        ] {
            assert_eq!(safety(&settings(json), devices), expected, "{json} with {devices} devices");
        }
    }

    #[test]
    fn each_mode_says_what_can_be_lost() {
        for row in MODES {
            for copies in COPIES {
                let said = losses(row.value, copies.value);
                assert_eq!(said.contains("dirty data"), row.value == Mode::WriteBack, "{}: {said}", row.name);
            }
        }
        assert!(losses(Mode::WriteBack, Copies::One).contains("a flash device fails"));
        assert!(losses(Mode::WriteBack, Copies::TwoOfDirty).contains("two flash devices"));
        assert!(losses(Mode::WriteBack, Copies::Peer).contains("replica"));
    }

    #[test]
    fn a_plan_shows_image_size_mode_and_losses() {
        let cache = serde_json::json!({ "pool": "fast", "size": 64 << 20, "mode": "write-back" });
        let cache = serde_json::from_value(cache).unwrap();
        let record = Record { file: "/srv/web.qcow2".into(), format: "qcow2".to_owned(), cache, ..example() };
        let said = of_attachment(&record, &[]).join("\n");
        for part in [
            "/srv/web.qcow2 (qcow2)",
            "web-vda",
            "64 MiB in pool fast",
            "write-back",
            "one copy",
            "can be lost: dirty",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
}
