//! The memory tier above a disk's cache: which data it serves, stores and drops during requests.
//!
//! The memory tier is read and changed only under the request's range lock. Memory forgets the
//! sectors of a change when the change starts. When a write succeeds, its data is copied into the
//! pages that memory already has. While the change is in progress, no request reads these sectors.
//! docs/decisions/0007-memory-tier.md has the reasons.

use super::disk::Disk;
use super::{Active, Engine};
use crate::command::{CommandError, MemoryConfig, Mode, Role};
use crate::io::{BufferCopy, CopyEnd, IoError, Op, PayloadMemory};
use crate::memory::{Memory, PageRange};
use crate::outcome::Outcome;
use crate::units::{BufferId, DiskId, Instant, SECTOR_BYTES};

/// What the memory tier may do in the cache's present mode: serve reads, keep data of reads, keep
/// written data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Uses {
    /// The memory tier serves reads.
    pub(super) serves: bool,
    /// The memory tier keeps data that reads returned, and reads ahead.
    pub(super) keeps_reads: bool,
    /// Written data is copied into the pages that memory already has.
    pub(super) keeps_writes: bool,
}

/// Returns the two ends and the length of a copy between a page range in memory and a buffer.
/// Sector positions in the page range are counted from the start of the buffer.
fn ends(disk: DiskId, id: BufferId, piece: PageRange) -> (CopyEnd, CopyEnd, u32) {
    let memory = CopyEnd::Memory { disk, offset: piece.offset };
    let buffer = CopyEnd::Buffer { id, offset: (piece.at * SECTOR_BYTES) as u32 };
    (memory, buffer, (piece.count * SECTOR_BYTES) as u32)
}

/// Returns the copy of a page range into memory.
pub(super) fn into_memory(disk: DiskId, id: BufferId, piece: PageRange) -> BufferCopy {
    let (to, from, len) = ends(disk, id, piece);
    BufferCopy { from, to, len }
}

fn out_of_memory(disk: DiskId, id: BufferId, piece: PageRange) -> BufferCopy {
    let (from, to, len) = ends(disk, id, piece);
    BufferCopy { from, to, len }
}

impl Disk {
    /// Gives the disk an empty memory tier, or removes the memory tier.
    pub(super) fn set_memory(&mut self, config: Option<MemoryConfig>) -> Result<(), CommandError> {
        let size = self.config.size_bytes;
        self.memory = config.map(|config| Memory::new(config, size).map(Box::new)).transpose()?;
        Ok(())
    }

    /// Empties the disk's memory tier.
    pub(super) fn empty_memory(&mut self) {
        if let Some(memory) = &mut self.memory {
            memory.clear();
        }
    }

    /// Returns the uses of the memory tier in the cache's current mode.
    pub(super) fn memory_uses(&self) -> Uses {
        let mode = self.cache.as_ref().map_or(Mode::default(), |cache| cache.config.mode);
        Uses {
            serves: mode != Mode::PassThrough,
            keeps_reads: !matches!(mode, Mode::ReadOnlyCache | Mode::PassThrough),
            keeps_writes: matches!(mode, Mode::WriteThrough | Mode::WriteBack),
        }
    }
}

impl Engine {
    /// Returns true if all of a read is in memory.
    pub(super) fn is_in_memory(&self, slot: u32) -> bool {
        let Active { request, range, .. } = &self.requests[slot];
        let disk = self.disk(request.disk);
        let Some(memory) = &disk.memory else { return false };
        request.op == Op::Read
            && disk.ownership.role == Role::Here
            && disk.memory_uses().serves
            && memory.holds(range.first, range.end)
    }

    /// Answers a read from the memory tier.
    pub(super) fn serve_from_memory(&mut self, now: Instant, slot: u32) {
        let Active { request, range, .. } = self.requests[slot];
        let id = request.buffer.expect("reads have a buffer");
        let Engine { disks, copy_out, .. } = self;
        let disk = disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        let memory = disk.memory.as_mut().expect("memory holds the data");
        let copy = |piece| copy_out.push_back(out_of_memory(request.disk, id, piece));
        let was_ahead = memory.read(range.first, range.end, request.promote, copy);
        self.requests[slot].outcome = if was_ahead { Outcome::HitPrefetched } else { Outcome::HitMemory };
        self.reply(now, slot, Ok(()));
        self.finish(slot);
    }

    /// Removes the sectors of a change from the memory tier when the change begins.
    pub(super) fn forget_in_memory(&mut self, slot: u32) {
        let Active { request, range, .. } = self.requests[slot];
        if let Some(memory) = &mut self.disk_mut(request.disk).memory {
            memory.invalidate(range.first, range.end);
        }
    }

    /// Updates the memory tier when a request is answered. The memory tier stores the data of a
    /// read. The data of a write only updates pages that the memory tier already has.
    #[inline]
    pub(super) fn keep_in_memory(&mut self, slot: u32, result: Result<(), IoError>) {
        let held = self.requests[slot].held_sectors();
        let Active { request, range, seen, outcome, doubts, .. } = &self.requests[slot];
        let Engine { disks, copy_out, .. } = self;
        let disk = disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        if disk.memory.is_none() || result.is_err() || disk.ownership.role != Role::Here {
            return;
        }
        let uses = disk.memory_uses();
        let memory = disk.memory.as_mut().expect("checked above");
        let Some(id) = request.buffer else { return };
        match request.op {
            // The guest may have changed its memory after the checksum was computed.
            Op::Read if request.memory == PayloadMemory::Guest => {}
            Op::Read
                if uses.keeps_reads
                    && !request.passes_by()
                    && !seen.is_run
                    && !outcome.is_from_memory()
                    && *outcome != Outcome::BypassShared
                    && *doubts == disk.backed.doubts =>
            {
                let copy = |piece| copy_out.push_back(into_memory(request.disk, id, piece));
                memory.keep(range.first, range.end, copy);
            }
            Op::Write(_) if uses.keeps_writes && *doubts == disk.backed.doubts => {
                let (first, end) = held;
                let copy = |mut piece: PageRange| {
                    piece.at += first - range.first;
                    copy_out.push_back(into_memory(request.disk, id, piece));
                };
                memory.renew(first, end, copy);
            }
            _ => {}
        }
    }
}
