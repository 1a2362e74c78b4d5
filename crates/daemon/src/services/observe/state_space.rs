//! Reads the free space of the state directory's filesystem. `hob health` reports a filesystem that
//! is nearly full.
//!
//! A saved state takes the space of an earlier one, so a full filesystem does not prevent a save of
//! a state that does not grow. Dirty bitmaps, the accounts of flash writes and additional disks
//! need more space, and the operator should know of the lack of space before these writes fail.

use std::path::Path;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use hob_control::Size;

use super::Observe;

/// Interval between two checks of the filesystem's free space.
pub(in crate::services) const SPACE_EVERY: Duration = Duration::from_secs(10);

/// Free space below which a filesystem may be nearly full, bytes. A state with the maximum number
/// of disks, 4,096 with about 2 KiB each, and its spare file take 16 MiB.
const FREE_BYTES_MIN: u64 = 16 << 20;

/// A filesystem may be nearly full if its free space is less than its size divided by this number.
/// On a small filesystem that only hob uses, less than 16 MiB is normal.
const FREE_PART_MIN: u64 = 100;

/// The latest check of the free space of the filesystem with the state directory.
#[derive(Debug, Default)]
pub(super) struct StateSpace {
    /// Message for `hob health`; `None` while enough space is free.
    problem: Option<String>,
    /// True while a thread asks the filesystem, which may hang.
    is_asked: bool,
}

impl StateSpace {
    /// Returns the problem for health, if the filesystem is nearly full.
    pub(super) fn problem(&self) -> Option<String> {
        self.problem.clone()
    }
}

/// Space of a filesystem, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::services) struct Space {
    /// Free space for this process, bytes.
    pub(in crate::services) free_bytes: u64,
    /// Size of the filesystem, bytes.
    pub(in crate::services) total_bytes: u64,
}

impl Space {
    /// Reads the space of a directory's filesystem, which may hang.
    fn of(directory: &Path) -> std::io::Result<Space> {
        let status = rustix::fs::statvfs(directory)?;
        let free = if rustix::process::geteuid().is_root() { status.f_bfree } else { status.f_bavail };
        let bytes = |blocks: u64| blocks.saturating_mul(status.f_frsize);
        Ok(Space { free_bytes: bytes(free), total_bytes: bytes(status.f_blocks) })
    }

    /// Returns the problem for health, if the filesystem is nearly full.
    fn problem(self, directory: &Path) -> Option<String> {
        let Space { free_bytes, total_bytes } = self;
        let is_low = free_bytes < FREE_BYTES_MIN && free_bytes < total_bytes / FREE_PART_MIN;
        is_low.then(|| {
            format!(
                "the filesystem of {} is nearly full: {free_bytes} bytes of {} are free. hob can save its \
                 present state, but may fail to save dirty bitmaps and additional disks. Free space there, or \
                 enlarge the filesystem",
                directory.display(),
                Size(total_bytes).human()
            )
        })
    }
}

impl Observe {
    /// Reads the free space of the state directory's filesystem for health, on a thread that may
    /// block.
    pub(in crate::services) fn look_at_state_space(&self) {
        if std::mem::replace(&mut self.state_space().is_asked, true) {
            return;
        }
        let service = self.clone();
        tokio::task::spawn_blocking(move || {
            if let Some(directory) = service.registry.directory() {
                match Space::of(&directory) {
                    Ok(space) => service.note_space(&directory, space),
                    Err(error) => tracing::debug!("{}: {error}", directory.display()),
                }
            }
            service.state_space().is_asked = false;
        });
    }

    /// Records the space of the state directory's filesystem for health.
    pub(in crate::services) fn note_space(&self, directory: &Path, space: Space) {
        let problem = space.problem(directory);
        let mut known = self.state_space();
        if let (Some(new), None) = (&problem, &known.problem) {
            tracing::warn!("{new}");
        }
        known.problem = problem;
    }

    /// Locks and returns the result of the latest check of the free space.
    pub(super) fn state_space(&self) -> MutexGuard<'_, StateSpace> {
        self.state_space.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filesystem_is_nearly_full_if_little_of_it_is_free() {
        const MIB: u64 = 1 << 20;
        let low = |free_bytes, total_bytes| Space { free_bytes, total_bytes }.problem(Path::new("/s"));
        for (free, total) in [(16 * MIB, 1 << 40), (MIB, 100 * MIB), (3 * MIB, 4 * MIB), (0, 0)] {
            assert_eq!(low(free, total), None, "{free} of {total}");
        }
        for (free, total) in [(16 * MIB - 1, 1 << 40), (MIB - 1, 100 * MIB), (0, 4 * MIB)] {
            let said = low(free, total).unwrap_or_else(|| panic!("{free} of {total}"));
            assert!(said.contains("/s ") && said.contains(&format!("{free} bytes of ")), "{said}");
        }
    }

    #[test]
    fn the_filesystem_reports_its_space() {
        let directory = tempfile::tempdir().unwrap();
        let space = Space::of(directory.path()).unwrap();
        assert!(space.free_bytes <= space.total_bytes && space.total_bytes > 0, "{space:?}");
        assert!(Space::of(&directory.path().join("none")).is_err());
    }
}
