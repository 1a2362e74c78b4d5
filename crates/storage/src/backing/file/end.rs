//! Detects files that have shrunk, so that writes do not enlarge them again.

use hob_engine::units::Instant;
use rustix::fs::{AtFlags, StatxFlags};

use super::FileBacking;

/// Last known size of a file.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FileEnd {
    /// Time at which hob last read the file's size; `None` if it has to be read again.
    pub(super) asked: Option<Instant>,
    /// Size of the file, bytes, if the file is shorter than its disk; `None` otherwise.
    pub(super) short: Option<u64>,
}

impl FileBacking {
    /// Returns true if a change that ends at `end` would enlarge the file.
    pub(super) fn is_past_the_end(&mut self, now: Instant, end: u64) -> bool {
        if self.is_block_device {
            return false;
        }
        if self.end.asked != Some(now) {
            self.end.asked = Some(now);
            // Uses the kernel's cached attributes, to avoid waiting for a filesystem that hangs.
            let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
            if let Ok(found) = rustix::fs::statx(self.buffered(), "", flags, StatxFlags::SIZE) {
                self.note_end(found.stx_size);
            }
        }
        self.end.short.is_some_and(|size_bytes| end > size_bytes)
    }

    pub(super) fn note_end(&mut self, size_bytes: u64) {
        let full = self.info.size_bytes;
        let short = (size_bytes < full).then_some(size_bytes);
        if short.is_some() && self.end.short.is_none() {
            tracing::error!(
                "{}: the file has shrunk from {full} to {size_bytes} bytes. Data past its end is \
                lost, and I/O there fails until you restore the size with 'truncate --size={full}'",
                self.info.description
            );
        }
        self.end.short = short;
    }
}
