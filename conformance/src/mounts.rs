//! Mounts and loop devices that are removed when the test ends, even if the test fails. A mount
//! that remained would block every process that accesses it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::scratch::{text, wait_for};
use crate::tool::Tool;

/// Timeout of a mount operation.
const MOUNT_MAX: Duration = Duration::from_secs(120);

/// Unmounts a path when it is dropped, even if it is in use.
#[derive(Debug)]
pub struct Unmount(PathBuf);

impl Unmount {
    /// Returns a value that, when it is dropped, unmounts all mounts on `path`.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }
}

impl Drop for Unmount {
    fn drop(&mut self) {
        // Several mounts may be stacked.
        while Tool::new("umount").arg("-l").arg(&self.0).limit(MOUNT_MAX).output().success() {}
    }
}

/// Unmounts a file system that the test does not use any more. A process that another thread has just
/// started may have a file of this process open until it executes its own program.
///
/// # Panics
/// Panics if the file system stays in use.
#[track_caller]
pub fn unmount(at: &Path) {
    wait_for("the end of a mount's use", || {
        let output = Tool::new("umount").arg(at).limit(MOUNT_MAX).output();
        assert!(output.success() || output.all().contains("busy"), "{}", output.all());
        output.success()
    });
}

/// A lock of this host's free loop devices. Test processes hold it while they choose a free device,
/// or while a device that they still need is free.
#[derive(Debug)]
pub struct FreeLoops {
    _locked: File,
}

impl FreeLoops {
    /// Waits for the lock. Returns an error if the kernel has no loop devices.
    fn lock() -> io::Result<Self> {
        let control = File::open("/dev/loop-control")?;
        rustix::fs::flock(&control, rustix::fs::FlockOperation::LockExclusive)?;
        Ok(Self { _locked: control })
    }
}

/// A loop device on a file.
#[derive(Debug)]
pub struct Loop {
    device: String,
}

impl Loop {
    /// Creates a loop device on `file`, with or without O_DIRECT.
    #[must_use]
    #[track_caller]
    pub fn on(file: &Path, direct: bool) -> Self {
        Self::try_on(file, direct).unwrap_or_else(|e| panic!("a loop device on {}: {e}", file.display()))
    }

    /// Creates a loop device like [`on`](Self::on). losetup must be installed.
    ///
    /// # Errors
    /// Returns an error if the kernel has no loop devices, or the output of losetup if it fails.
    pub fn try_on(file: &Path, direct: bool) -> io::Result<Self> {
        let direct = if direct { "--direct-io=on" } else { "--direct-io=off" };
        let tool = Tool::new("losetup").args(["--find", "--show", direct]).arg(file);
        let _free = FreeLoops::lock()?;
        // Ctrl-C must not end losetup after it has created a device whose name is not known yet.
        let device = tool.in_own_group().limit(MOUNT_MAX).try_run()?;
        Ok(Self { device: device.trim().to_owned() })
    }

    /// Detaches the device from its file. If a program has the device open, the device works until
    /// the program closes it. No other test process takes the device before it is attached again.
    #[must_use]
    #[track_caller]
    pub fn detach(&self) -> FreeLoops {
        let free = FreeLoops::lock().expect("the kernel has loop devices");
        Tool::new("losetup").args(["--detach", &self.device]).limit(MOUNT_MAX).run();
        free
    }

    /// Attaches a device that [`detach`](Loop::detach) has detached to `file` again.
    #[track_caller]
    pub fn attach(&self, file: &Path, direct: bool, _free: FreeLoops) {
        let direct = if direct { "--direct-io=on" } else { "--direct-io=off" };
        Tool::new("losetup").args([direct, &self.device]).arg(file).limit(MOUNT_MAX).run();
    }

    /// Returns the path of the device, `/dev/loop…`.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Returns a column of `losetup`'s output for the device.
    #[must_use]
    #[track_caller]
    pub fn column(&self, name: &str) -> String {
        let tool = Tool::new("losetup").args(["--list", "--noheadings", "--output", name]);
        tool.arg(&self.device).run().trim().to_owned()
    }

    /// Mounts the file system of the device on the new directory `at`.
    #[must_use]
    #[track_caller]
    pub fn mount(&self, at: &Path, options: &str) -> Mounted<'_> {
        std::fs::create_dir_all(at).expect("a directory to mount on");
        Tool::new("mount").args(["-o", options, &self.device, &text(at)]).limit(MOUNT_MAX).run();
        Mounted { at: at.to_owned(), _on: self }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // A second Ctrl-C must not leave the device.
        let detach = Tool::new("losetup").args(["--detach", &self.device]).in_own_group();
        let _ = detach.limit(MOUNT_MAX).output();
    }
}

/// A file system on a loop device.
#[derive(Debug)]
pub struct Mounted<'a> {
    at: PathBuf,
    _on: &'a Loop,
}

impl Mounted<'_> {
    /// Unmounts the filesystem, which writes all data to the device.
    #[track_caller]
    pub fn unmount(self) {
        unmount(&self.at);
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = Tool::new("umount").arg("-l").arg(&self.at).limit(MOUNT_MAX).output();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_device_that_cannot_be_created_is_an_error() {
        Loop::try_on(Path::new("/nowhere"), false).unwrap_err();
    }
}
