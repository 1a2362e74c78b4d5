//! The identity of a backing, to which a persistent cache is bound.
//!
//! The identity is a text that names the backing's parts, and a hash of 32 bytes of that text.
//! docs/FORMAT.md defines the hash function; journals store the hash. Equal texts mean the same
//! backing, as far as the system can tell. The hash guards against mistakes, not against forgery.
//!
//! Values that change at every boot, such as a filesystem's device number, are included only if the
//! system provides no permanent value.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::device_number;

/// Directory in which the kernel describes its block devices.
pub(super) const SYS_BLOCK: &str = "/sys/dev/block";

/// Beginning of the identity text of a block device.
const BLOCK_DEVICE: &str = "block device ";

/// Beginning of the name of a block device that has no name but its number.
const NUMBER: &str = "number ";

/// Kernel files that permanently identify a block device, and the prefix of each name. The first
/// non-empty file counts.
const NAMES: &[(&str, &str)] = &[
    ("dm/uuid", "device-mapper"),
    ("md/uuid", "array"),
    ("wwid", "wwid"),
    ("device/wwid", "wwid"),
    ("uuid", "uuid"),
    ("serial", "serial"),
    ("device/serial", "serial"),
    ("loop/backing_file", "loop of"),
];

/// Size and last modification time of a backing, as the system reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeMark {
    /// Size of the backing, bytes.
    pub size_bytes: u64,
    /// Time of the last modification, nanoseconds since 1970.
    pub modified_ns: i64,
}

impl ChangeMark {
    pub(super) fn of(metadata: &Metadata) -> ChangeMark {
        let modified_ns =
            metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec());
        ChangeMark { size_bytes: metadata.len(), modified_ns }
    }
}

/// Returns the 32-byte hash of an identity text.
pub(super) fn hash(sentence: &str) -> [u8; 32] {
    let mut hash = [0; 32];
    let (lanes, _) = hash.as_chunks_mut::<8>();
    for (lane, bytes) in (1u64..).zip(lanes) {
        let mut state = mix(lane.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        for word in sentence.as_bytes().chunks(8) {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            state = mix(state ^ u64::from_le_bytes(padded));
        }
        *bytes = mix(state ^ sentence.len() as u64).to_le_bytes();
    }
    hash
}

/// The finalizer of SplitMix64: G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number
/// Generators" (2014).
fn mix(word: u64) -> u64 {
    let word = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ word >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ word >> 31
}

/// Returns the identity text of a file. For an image file, `size_bytes` is the disk's size, because
/// the file itself grows.
pub(super) fn of_file(kind: &str, metadata: &Metadata, size_bytes: u64) -> String {
    let born = metadata.created().ok().and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    let whose = match born {
        Some(born) => format!("created at {}.{:09}", born.as_secs(), born.subsec_nanos()),
        None => format!("on device {}", device_number::text(metadata.dev())),
    };
    format!("{kind} with inode {} {whose}, {size_bytes} bytes", metadata.ino())
}

/// Returns the identity text of a block device from the kernel's description in `sys`.
pub(super) fn of_block_device(sys: &Path, number: u64, size_bytes: u64) -> String {
    let number = device_number::text(number);
    let name = name_in(&sys.join(&number)).unwrap_or(format!("{NUMBER}{number}"));
    format!("{BLOCK_DEVICE}{name}, {size_bytes} bytes")
}

/// Returns the permanent name of a block device from its identity text. `None` for other backings,
/// and for a device whose only name is its number, which may change at every boot.
pub(super) fn device_name(sentence: &str) -> Option<&str> {
    let (name, _size) = sentence.strip_prefix(BLOCK_DEVICE)?.rsplit_once(", ")?;
    (!name.starts_with(NUMBER)).then_some(name)
}

/// Returns the identity text for another disk size; `None` if the text does not end with the
/// present size.
pub(super) fn resized(sentence: &str, size_bytes: u64, other_bytes: u64) -> Option<String> {
    let whose = sentence.strip_suffix(&format!(", {size_bytes} bytes"))?;
    Some(format!("{whose}, {other_bytes} bytes"))
}

fn name_in(directory: &Path) -> Option<String> {
    let line = |directory: &Path, file: &str| {
        let text = std::fs::read_to_string(directory.join(file)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let named = |directory: &Path| {
        NAMES.iter().find_map(|(file, what)| line(directory, file).map(|name| format!("{what} {name}")))
    };
    // In sysfs, the directory of a partition is inside the directory of its disk.
    let Some(partition) = line(directory, "partition") else { return named(directory) };
    let real: PathBuf = directory.canonicalize().ok()?;
    let start = line(directory, "start")?;
    Some(format!("{}, partition {partition} from sector {start}", named(real.parent()?)?))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Journals on flash contain these hashes, so they must not change.
    #[test]
    fn hashes_are_stable() {
        let text = |sentence| hash(sentence).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(text(""), "bfd43cff2682214826ac75e93dfe73cdecd033535a6c477b759b535f1a8f5939");
        let device = "74462170d2f54dca4704b8f33b8849745bb9818feec43f73b43e87904c52d78d";
        assert_eq!(text("block device serial S1, 4096 bytes"), device);
    }

    #[test]
    fn a_sentence_can_be_that_of_another_size() {
        let other = resized("block device serial S1, 4096 bytes", 4096, 8192);
        assert_eq!(other.as_deref(), Some("block device serial S1, 8192 bytes"));
        for sentence in
            ["", "4096 bytes", "image 4096 bytes", "image, 14096 bytes", "image, 4096 bytes, or so"]
        {
            assert_eq!(resized(sentence, 4096, 8192), None, "{sentence}");
        }
    }

    #[test]
    fn only_a_permanent_name_of_a_device_counts() {
        for (sentence, name) in [
            ("block device wwid naa.5000c500, 4096 bytes", Some("wwid naa.5000c500")),
            (
                "block device serial S1, partition 1 from sector 2048, 4096 bytes",
                Some("serial S1, partition 1 from sector 2048"),
            ),
            ("block device loop of /srv/a, b, 4096 bytes", Some("loop of /srv/a, b")),
            ("block device number 8:0, 4096 bytes", None),
            ("file with inode 7 created at 1.000000000, 4096 bytes", None),
            ("", None),
        ] {
            assert_eq!(device_name(sentence), name, "{sentence}");
        }
    }

    #[test]
    fn hashes_are_spread_in_every_part() {
        let sentences =
            (0..2000).map(|n| format!("file with inode {n} created at {}.000000000, 512 bytes", n / 3));
        let mut parts: [HashSet<[u8; 8]>; 4] = Default::default();
        let mut ones = 0;
        for sentence in sentences {
            let hash = hash(&sentence);
            ones += hash.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>();
            for (part, seen) in hash.as_chunks::<8>().0.iter().zip(&mut parts) {
                assert!(seen.insert(*part));
            }
        }
        let share = ones as f64 / (2000.0 * 256.0);
        assert!((0.49..0.51).contains(&share), "{share}");
        // Zeroes at the end are part of the identity, not padding.
        assert_ne!(hash("a"), hash("a\0"));
    }

    #[test]
    fn block_devices_are_known_by_their_best_name() {
        let sys = tempfile::tempdir().unwrap();
        let device = |number: &str, files: &[(&str, &str)]| {
            for (file, text) in files {
                let path = sys.path().join(number).join(file);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
        };
        let name = |major, minor| of_block_device(sys.path(), rustix::fs::makedev(major, minor), 8192);
        assert_eq!(name(8, 0), "block device number 8:0, 8192 bytes");
        device("8:0", &[("device/serial", "  S1 \n"), ("serial", "\n")]);
        assert_eq!(name(8, 0), "block device serial S1, 8192 bytes");
        device("8:0", &[("wwid", "naa.5000c500\n")]);
        assert_eq!(name(8, 0), "block device wwid naa.5000c500, 8192 bytes");
        device("253:1", &[("dm/uuid", "LVM-abc\n"), ("serial", "S2\n")]);
        assert_eq!(name(253, 1), "block device device-mapper LVM-abc, 8192 bytes");
        device("8:0", &[("sda1/partition", "1\n"), ("sda1/start", "2048\n")]);
        std::os::unix::fs::symlink("8:0/sda1", sys.path().join("8:1")).unwrap();
        assert_eq!(name(8, 1), "block device wwid naa.5000c500, partition 1 from sector 2048, 8192 bytes");
    }
}
