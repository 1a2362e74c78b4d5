//! Memory above a disk's cache in a request's way: what is served from it, what it keeps, what it has to forget.
//!
//! Everything happens under the request's claim, so that nobody reads sectors between a change's beginning, when memory forgets
//! them, and its good end, when pages that are there take over what it wrote. docs/decisions/0007 has the reasons.

use super::disk::Disk;
use super::{Active, Engine};
use crate::command::{CommandError, MemoryConfig, Mode, Role};
use crate::io::{BufferCopy, CopyEnd, IoError, Op, PayloadMemory};
use crate::memory::{Memory, PageRange};
use crate::outcome::Outcome;
use crate::units::{BufferId, DiskId, Instant, SECTOR_BYTES};

/// What memory does with what passes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Uses {
    /// It serves reads.
    pub(super) serves: bool,
    /// It keeps what reads returned, and reads ahead.
    pub(super) keeps_reads: bool,
    /// Pages that are there take over what is written.
    pub(super) keeps_writes: bool,
}

/// Both ends of a copy between a piece of a disk's memory and a buffer, in this order. The buffer begins at the sector from which the
/// piece counts.
fn ends(disk: DiskId, id: BufferId, piece: PageRange) -> (CopyEnd, CopyEnd, u32) {
    let memory = CopyEnd::Memory { disk, offset: piece.offset };
    let buffer = CopyEnd::Buffer { id, offset: (piece.at * SECTOR_BYTES) as u32 };
    (memory, buffer, (piece.count * SECTOR_BYTES) as u32)
}

/// The copy of a piece into memory.
pub(super) fn into_memory(disk: DiskId, id: BufferId, piece: PageRange) -> BufferCopy {
    let (to, from, len) = ends(disk, id, piece);
    BufferCopy { from, to, len }
}

fn out_of_memory(disk: DiskId, id: BufferId, piece: PageRange) -> BufferCopy {
    let (from, to, len) = ends(disk, id, piece);
    BufferCopy { from, to, len }
}

impl Disk {
    /// Gives it memory, empty, or none.
    pub(super) fn set_memory(&mut self, config: Option<MemoryConfig>) -> Result<(), CommandError> {
        let size = self.config.size_bytes;
        self.memory = config.map(|config| Memory::new(config, size).map(Box::new)).transpose()?;
        Ok(())
    }

    /// Forgets what memory holds.
    pub(super) fn empty_memory(&mut self) {
        if let Some(memory) = &mut self.memory {
            memory.clear();
        }
    }

    /// As the cache's mode has it.
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
    /// Is all of a read in memory?
    pub(super) fn is_in_memory(&self, slot: u32) -> bool {
        let Active { request, range, .. } = &self.requests[slot];
        let disk = self.disk(request.disk);
        let Some(memory) = &disk.memory else { return false };
        request.op == Op::Read
            && disk.ownership.role == Role::Here
            && disk.memory_uses().serves
            && memory.holds(range.first, range.end)
    }

    /// Answers a read with what memory holds.
    pub(super) fn serve_from_memory(&mut self, now: Instant, slot: u32) {
        let Active { request, range, .. } = self.requests[slot];
        let id = request.buffer.expect("reads have one");
        let Engine { disks, copy_out, .. } = self;
        let disk = disks[request.disk.0 as usize].as_mut().expect("disks outlive their requests");
        let memory = disk.memory.as_mut().expect("it has been looked at");
        let copy = |piece| copy_out.push_back(out_of_memory(request.disk, id, piece));
        let was_ahead = memory.read(range.first, range.end, request.promote, copy);
        self.requests[slot].outcome = if was_ahead { Outcome::HitPrefetched } else { Outcome::HitMemory };
        self.reply(now, slot, Ok(()));
        self.finish(slot);
    }

    /// A change begins: memory forgets its sectors.
    pub(super) fn forget_in_memory(&mut self, slot: u32) {
        let Active { request, range, .. } = self.requests[slot];
        if let Some(memory) = &mut self.disk_mut(request.disk).memory {
            memory.invalidate(range.first, range.end);
        }
    }

    /// A request ends: memory keeps what a read has returned, and pages that are there take over what a write wrote.
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
        let memory = disk.memory.as_mut().expect("looked at");
        let Some(id) = request.buffer else { return };
        match request.op {
            // Behind the checksum a guest's memory may have become anything.
            Op::Read if request.memory == PayloadMemory::Guest => {}
            Op::Read
                if uses.keeps_reads
                    && !request.passes_by()
                    && !seen.is_run
                    && !outcome.is_from_memory()
                    && *outcome != Outcome::BypassShared
                    && (*outcome == Outcome::Hit || *doubts == disk.backed.doubts) =>
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
