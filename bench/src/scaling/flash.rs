//! Flash of the measured pools. hob reserves the space of a pool file, so a file cannot be larger
//! than the free space of its file system. A loop device on a sparse file can be larger.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use conformance::Loop;

use crate::fio;

/// Kind of a pool's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A file, whose space hob reserves.
    File,
    /// A loop device on a sparse file.
    Loop,
}

impl Kind {
    /// Returns the kind of device for pools of at most `largest` bytes in a file system with `free`
    /// free bytes. All pools of a part have the same kind, so that their results are comparable.
    pub(super) fn new(largest: u64, free: u64, has_loops: bool) -> Self {
        if has_loops && !fits(largest, free) { Self::Loop } else { Self::File }
    }

    /// Returns true if a pool of `bytes` can be created in a file system with `free` free bytes.
    pub(super) fn allows(self, bytes: u64, free: u64) -> bool {
        self == Self::Loop || fits(bytes, free)
    }
}

/// Returns true if a file of this size leaves half of the free space to others.
fn fits(bytes: u64, free: u64) -> bool {
    bytes <= free / 2
}

/// Returns true if this process may create loop devices.
pub(super) fn has_loops() -> bool {
    rustix::process::geteuid().is_root() && Path::new("/dev/loop-control").exists()
}

/// Returns the free bytes of a directory's file system.
pub(super) fn free_bytes(directory: &Path) -> Result<u64> {
    let status = rustix::fs::statvfs(directory)
        .with_context(|| format!("find the free space of {}", directory.display()))?;
    Ok(status.f_bavail.saturating_mul(status.f_frsize))
}

/// The device of a pool.
#[derive(Debug)]
pub(super) struct Flash {
    path: PathBuf,
    /// Size of the file that hob creates, bytes; `None` for a loop device.
    size: Option<u64>,
    _device: Option<Loop>,
}

impl Flash {
    /// Prepares a pool device with its data in `directory`. hob creates a pool file itself.
    pub(super) fn new(directory: &Path, bytes: u64, kind: Kind) -> Result<Self> {
        let path = directory.join("flash");
        if kind == Kind::File {
            return Ok(Self { path, size: Some(bytes), _device: None });
        }
        crate::require(&["losetup"])?;
        File::create(&path)
            .and_then(|file| file.set_len(bytes))
            .with_context(|| format!("create {}", path.display()))?;
        let device = Loop::try_on(&path, fio::direct_works(directory))
            .with_context(|| format!("create a loop device on {}", path.display()))?;
        Ok(Self { path: device.device().into(), size: None, _device: Some(device) })
    }

    /// Returns the lines of `[[pool]]` in hob.toml for this device.
    pub(super) fn config(&self) -> String {
        let size = self.size.map_or_else(String::new, |size| format!("size = {size}\n"));
        format!("devices = [{:?}]\n{size}", self.path.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pools_that_do_not_fit_are_on_loop_devices() {
        assert_eq!(Kind::new(50, 100, true), Kind::File);
        assert_eq!(Kind::new(51, 100, true), Kind::Loop);
        assert_eq!(Kind::new(51, 100, false), Kind::File);
        assert!(Kind::File.allows(50, 100) && !Kind::File.allows(51, 100) && Kind::Loop.allows(51, 100));
    }

    #[test]
    fn hob_creates_only_files() {
        let flash = Flash::new(Path::new("/nowhere"), 4096, Kind::File).unwrap();
        assert_eq!(flash.config(), "devices = [\"/nowhere/flash\"]\nsize = 4096\n");
        let flash = Flash { path: "/dev/loop9".into(), size: None, _device: None };
        assert_eq!(flash.config(), "devices = [\"/dev/loop9\"]\n");
    }
}
