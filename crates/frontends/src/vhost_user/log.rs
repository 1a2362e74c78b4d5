//! The dirty log of guest memory: pages that the daemon wrote, which a live migration of the guest
//! must send again.
//!
//! The log has one bit for each 4 KiB page, by guest address, in memory that the vhost-user client
//! shares. The daemon sets a bit after writing to the page, as the protocol requires. Pages beyond
//! the end of the log are not recorded.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use vm_memory::{MmapRegion, VolatileMemory};

use super::memory::{MapError, Mapping, map_file};

const PAGE_BYTES: u64 = 4096;

/// The mapped dirty log of guest memory.
#[derive(Debug)]
pub(crate) struct ChangeLog {
    memory: MmapRegion,
    /// The mapping of the log's file; `memory` points into it, so it is dropped later.
    _mapping: Mapping,
}

impl ChangeLog {
    /// Maps the dirty log that a vhost-user client shares.
    pub(super) fn map(file: &File, offset: u64, len: u64) -> Result<Arc<ChangeLog>, MapError> {
        let (mapping, memory) = map_file(file, offset, len)?;
        Ok(Arc::new(ChangeLog { memory, _mapping: mapping }))
    }

    /// Marks the pages of these bytes of guest memory as written.
    pub(super) fn note(&self, address: u64, len: u64) {
        let Some(last) = len.checked_sub(1).and_then(|more| address.checked_add(more)) else { return };
        for page in address / PAGE_BYTES..=last / PAGE_BYTES {
            let byte = usize::try_from(page / 8).ok().filter(|byte| *byte < self.memory.size());
            let Some(byte) = byte.and_then(|byte| self.memory.get_atomic_ref::<AtomicU8>(byte).ok()) else {
                return;
            };
            byte.fetch_or(1 << (page % 8), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn each_page_that_was_written_has_its_bit() {
        let file = File::from(rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        // 24 pages: an odd length, as clients share them.
        file.set_len(4096 + 3).unwrap();
        let log = ChangeLog::map(&file, 4096, 3).unwrap();
        for (address, len) in [
            (0, 1),
            (2 * 4096 - 1, 2),
            (9 * 4096, 4096),
            (23 * 4096, 1 << 40),
            (u64::MAX - 10, 100),
            (8192 * 4, 0),
        ] {
            log.note(address, len);
        }
        let mut bits = [0; 3];
        file.read_exact_at(&mut bits, 4096).unwrap();
        assert_eq!(bits, [0b111, 0b10, 0b1000_0000]);
        assert!(ChangeLog::map(&file, 4096, 4).is_err(), "longer than its file");
    }
}
