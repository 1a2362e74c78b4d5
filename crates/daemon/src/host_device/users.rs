//! The users of a block device: file systems and other exclusive users, loop devices, and programs
//! that have it open. The kernel counts the users of a device, but does not report the count to
//! programs.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use hob_storage::device_number;
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags, makedev, statx};

use crate::swap::{FileId, loops_over};

/// Number of attempts to find a device unused. udev opens each new device for a moment.
const TRIES: u32 = 10;

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(200);

/// Opens the device exclusively. While the result is open, no program can mount the device.
///
/// # Errors
/// Returns the users of the device as text if programs use it.
pub(super) fn claim(devices: &Path, index: u32) -> Result<File, String> {
    let mut result = claim_now(devices, index);
    for _ in 1..TRIES {
        if result.is_ok() {
            break;
        }
        std::thread::sleep(PAUSE);
        result = claim_now(devices, index);
    }
    result
}

fn claim_now(devices: &Path, index: u32) -> Result<File, String> {
    let numbers = numbers(devices, index);
    if let Some(program) = program_with(Path::new("/proc"), &numbers) {
        return Err(format!("{program} has it open"));
    }
    let flags = (OFlags::EXCL | OFlags::NONBLOCK).bits() as i32;
    let device = OpenOptions::new().read(true).custom_flags(flags).open(format!("/dev/nbd{index}"));
    let device = device.map_err(|error| match error.kind() {
        io::ErrorKind::ResourceBusy => {
            "it is mounted, or used for swap, LVM, RAID or a device mapper".to_owned()
        }
        _ => format!("it cannot be opened: {error}"),
    })?;
    match FileId::of(&device).and_then(loops_over).ok().and_then(|mut over| over.pop()) {
        Some(over) => Err(format!("the loop device {} is on it", over.display())),
        None => Ok(device),
    }
}

/// Returns the device numbers of a device and its partitions.
fn numbers(devices: &Path, index: u32) -> BTreeSet<u64> {
    let dir = devices.join(format!("nbd{index}"));
    let partitions = fs::read_dir(&dir).into_iter().flatten().filter_map(|entry| {
        let entry = entry.ok()?;
        entry.file_name().to_str()?.starts_with(&format!("nbd{index}p")).then(|| entry.path())
    });
    let number = |dir: std::path::PathBuf| device_number::parse(&fs::read_to_string(dir.join("dev")).ok()?);
    partitions.chain([dir.clone()]).filter_map(number).collect()
}

/// Returns the name and process id of a process that has one of these devices open.
fn program_with(proc: &Path, numbers: &BTreeSet<u64>) -> Option<String> {
    let processes = fs::read_dir(proc).ok()?.filter_map(|entry| {
        let name = entry.ok()?.file_name().into_string().ok()?;
        name.bytes().all(|byte| byte.is_ascii_digit()).then_some(name)
    });
    for process in processes {
        let Ok(files) = fs::read_dir(proc.join(&process).join("fd")) else { continue };
        let is_open = files.filter_map(Result::ok).any(|file| {
            // With `STATX_DONT_SYNC`, a hung network file system cannot block this call.
            let found =
                statx(rustix::fs::CWD, file.path(), AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS);
            found.is_ok_and(|found| {
                FileType::from_raw_mode(found.stx_mode.into()) == FileType::BlockDevice
                    && numbers.contains(&makedev(found.stx_rdev_major, found.stx_rdev_minor))
            })
        });
        if is_open {
            let name = fs::read_to_string(proc.join(&process).join("comm")).unwrap_or_default();
            return Some(format!("process {process} ({})", name.trim()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_its_number_and_those_of_its_partitions() {
        let dir = tempfile::tempdir().unwrap();
        for (path, number) in
            [("nbd1", "43:32"), ("nbd1/nbd1p1", "43:33"), ("nbd1/queue", "9:9"), ("nbd10", "43:320")]
        {
            fs::create_dir_all(dir.path().join(path)).unwrap();
            fs::write(dir.path().join(path).join("dev"), format!("{number}\n")).unwrap();
        }
        assert_eq!(numbers(dir.path(), 1), BTreeSet::from([makedev(43, 32), makedev(43, 33)]));
        assert_eq!(numbers(dir.path(), 2), BTreeSet::new());
    }

    #[test]
    fn only_open_block_devices_count() {
        let (_file, null) = (tempfile::tempfile().unwrap(), File::open("/dev/null").unwrap());
        let number = rustix::fs::fstat(&null).unwrap().st_rdev;
        assert_eq!(
            program_with(Path::new("/proc"), &BTreeSet::from([number])),
            None,
            "it is no block device"
        );
    }
}
