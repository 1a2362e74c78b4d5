//! Mounts and loop devices that go away with the test, also when it fails: one that stayed would hang whatever looks at it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::scratch::text;
use crate::tool::Tool;

/// How long the kernel's part of such a thing may take.
const MOUNT_MAX: Duration = Duration::from_secs(30);

/// Unmounts a path when it is dropped, whoever still uses it.
#[derive(Debug)]
pub struct Unmount(PathBuf);

impl Unmount {
    /// Of whatever is mounted on `path` by then.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }
}

impl Drop for Unmount {
    fn drop(&mut self) {
        // Several may lie on each other.
        while Tool::new("umount").arg("-l").arg(&self.0).limit(MOUNT_MAX).output().success() {}
    }
}

/// A loop device on a file.
#[derive(Debug)]
pub struct Loop {
    device: String,
}

impl Loop {
    /// On `file`, which the device opens with O_DIRECT or not.
    #[must_use]
    #[track_caller]
    pub fn on(file: &Path, direct: bool) -> Self {
        let direct = if direct { "--direct-io=on" } else { "--direct-io=off" };
        let tool = Tool::new("losetup").args(["--find", "--show", direct]).arg(file);
        Self { device: tool.limit(MOUNT_MAX).run().trim().to_owned() }
    }

    /// `/dev/loop…`.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// What the kernel says about one of its columns.
    #[must_use]
    #[track_caller]
    pub fn column(&self, name: &str) -> String {
        let tool = Tool::new("losetup").args(["--list", "--noheadings", "--output", name]);
        tool.arg(&self.device).run().trim().to_owned()
    }

    /// Mounts the file system on it on the directory `at`, which is made.
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
        let _ = Tool::new("losetup").args(["--detach", &self.device]).limit(MOUNT_MAX).output();
    }
}

/// A file system on a loop device.
#[derive(Debug)]
pub struct Mounted<'a> {
    at: PathBuf,
    _on: &'a Loop,
}

impl Mounted<'_> {
    /// Unmounts it, which writes out everything.
    #[track_caller]
    pub fn unmount(self) {
        Tool::new("umount").arg(&self.at).limit(MOUNT_MAX).run();
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = Tool::new("umount").arg("-l").arg(&self.at).limit(MOUNT_MAX).output();
    }
}
