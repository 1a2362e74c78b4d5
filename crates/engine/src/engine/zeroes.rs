//! Zero writes under write-back, which are written to flash from a buffer of the engine
//! (docs/decisions/0067).
//!
//! | zero write | its buffer |
//! |---|---|
//! | up to [`BUFFER_SECTORS`] whole sectors | all of its sectors |
//! | longer, up to [`ZEROES_BYTES_MAX`] bytes of whole sectors | [`BUFFER_SECTORS`] sectors; several I/Os write the same sectors |
//! | parts of sectors, up to [`SHORT_BYTES_MAX`] bytes | all of its sectors, merged like those of a partial write (`partial.rs`) |
//!
//! Other zero writes go to the backing. When no buffer is free, all zero writes go to the backing.

use super::destage_buffers::Least;
use super::{Active, Engine};
use crate::cache::FlashRun;
use crate::io::{BufferCopy, CopyEnd, Op, Request};
use crate::units::{BufferId, SECTOR_BYTES};

/// Maximum length of a zero write that goes to flash, bytes. A longer zero write is sent to the
/// backing, which can deallocate the range.
const ZEROES_BYTES_MAX: u64 = 8 << 20;

/// A zero write of more than [`SHORT_BYTES_MAX`] bytes may take at most 1/`CACHE_PART` of a cache.
const CACHE_PART: u64 = 4;

/// Maximum length of a zero write that goes to flash in a cache of any size, bytes. Also the
/// maximum length of a zero write to flash that covers sectors partly.
const SHORT_BYTES_MAX: u64 = 64 << 10;

/// Maximum number of zero sectors in the buffer of a zero write.
const BUFFER_SECTORS: u64 = 16;

/// Maximum total length of all zero writes to flash in progress, bytes. This limits the number of
/// their I/Os.
const IN_PROGRESS_BYTES_MAX: u64 = 32 << 20;

impl Active {
    /// Returns true if the request is a zero write that a cache of `cache_sectors` sectors may take.
    pub(super) fn is_zeroes_for_flash(&self, cache_sectors: u64) -> bool {
        let Request { op, len, .. } = self.request;
        let most = cache_sectors * SECTOR_BYTES / CACHE_PART;
        let is_short = match self.covers_whole_sectors() {
            true => len <= SHORT_BYTES_MAX || len <= ZEROES_BYTES_MAX.min(most),
            false => len <= SHORT_BYTES_MAX,
        };
        matches!(op, Op::WriteZeroes(..)) && is_short
    }

    fn covers_whole_sectors(&self) -> bool {
        (self.request.offset | self.request.len).is_multiple_of(SECTOR_BYTES)
    }

    /// Returns the buffer that holds a change's first sector, and the offset in this buffer.
    /// Returns `None` for a zero write that has no buffer yet.
    pub(super) fn payload(&self) -> Option<(BufferId, u32)> {
        let zeroes = self.zeroes.map(|piece| (piece.id, piece.offset));
        self.request.buffer.map(|id| (id, 0)).or(zeroes)
    }
}

impl Engine {
    /// Gives a zero write a buffer of zeroes. Returns false if no buffer is free. Does nothing for
    /// other requests.
    pub(super) fn take_zeroes(&mut self, slot: u32) -> bool {
        let Active { request, zeroes, .. } = self.requests[slot];
        if request.op.has_buffer() || zeroes.is_some() {
            return true;
        }
        let is_whole = self.requests[slot].covers_whole_sectors();
        let sectors = sectors_of(&request);
        let bytes = if is_whole { sectors.min(BUFFER_SECTORS) } else { sectors } * SECTOR_BYTES;
        if self.zeroing_bytes + sectors * SECTOR_BYTES > IN_PROGRESS_BYTES_MAX {
            return false;
        }
        let Some(mut piece) = self.destage_buffers.take_spare(request.disk, bytes) else { return false };
        // Reading a partly covered sector needs another buffer. This check ensures that the newest
        // zero write in progress can have such a buffer, so that no zero write waits for ever.
        let can_merge = is_whole || self.destage_buffers.has(request.disk, SECTOR_BYTES, Least::All);
        if u64::from(piece.len) < bytes || !can_merge {
            self.destage_buffers.give_back(&piece);
            return false;
        }
        self.destage_buffers.shorten(&mut piece, bytes);
        let to = CopyEnd::Buffer { id: piece.id, offset: piece.offset };
        self.copy_out.push_back(BufferCopy { from: CopyEnd::Zeroes, to, len: bytes as u32 });
        self.zeroing_bytes += sectors * SECTOR_BYTES;
        self.requests[slot].zeroes = Some(piece);
        true
    }

    /// Makes `runs` of a zero write refer to the write's buffer of zeroes. Long runs are split into
    /// several runs that write the same zeroes.
    pub(super) fn place_zeroes(&mut self, slot: u32) {
        let Active { range, zeroes: Some(piece), .. } = self.requests[slot] else { return };
        let start = piece.first_sector();
        if range.end - range.first <= BUFFER_SECTORS || !self.requests[slot].covers_whole_sectors() {
            return self.runs.iter_mut().for_each(|run| run.buffer_sector += start);
        }
        for FlashRun { extent, .. } in std::mem::take(&mut self.runs) {
            for first in (0..extent.count).step_by(BUFFER_SECTORS as usize) {
                let mut part = extent;
                part.sector += first;
                part.offset += first * SECTOR_BYTES;
                part.count = (extent.count - first).min(BUFFER_SECTORS);
                self.runs.push(FlashRun { extent: part, buffer_sector: start });
            }
        }
    }

    /// Releases the buffer of a zero write, if the write has one. The caller does this after the
    /// write's flash I/O has ended.
    pub(super) fn give_back_zeroes(&mut self, slot: u32) {
        if let Some(piece) = self.requests[slot].zeroes.take() {
            self.zeroing_bytes -= sectors_of(&self.requests[slot].request) * SECTOR_BYTES;
            self.destage_buffers.give_back(&piece);
            self.wake_all();
        }
    }
}

/// Returns the number of sectors that a request covers at least partly.
fn sectors_of(request: &Request) -> u64 {
    (request.offset + request.len).div_ceil(SECTOR_BYTES) - request.offset / SECTOR_BYTES
}
