//! Small zero writes under write-back, which are written to flash from a buffer of the engine.
//!
//! Zero writes of more than [`ZEROES_BYTES_MAX`] bytes go to the backing, which can deallocate the
//! range. Zero writes that cover a sector partly also go to the backing, and so do all zero writes
//! when no buffer is free.

use super::{Active, Engine};
use crate::io::{BufferCopy, CopyEnd, Op, Request};
use crate::units::SECTOR_BYTES;

/// Maximum length of a zero write that goes to flash, bytes. A longer one is worth a request to the
/// backing and saves wear of flash.
const ZEROES_BYTES_MAX: u64 = 64 << 10;

impl Active {
    /// Returns true if the request is a zero write that flash may take.
    pub(super) fn is_small_zeroes(&self) -> bool {
        let Request { op, offset, len, .. } = self.request;
        let is_whole = (offset | len).is_multiple_of(SECTOR_BYTES);
        matches!(op, Op::WriteZeroes(..)) && len <= ZEROES_BYTES_MAX && is_whole
    }
}

impl Engine {
    /// Gives a zero write a buffer of zeroes, and sets the start of `runs` in it. Returns false if
    /// no buffer is free. Does nothing for other requests.
    pub(super) fn take_zeroes(&mut self, slot: u32) -> bool {
        let Active { request, range, .. } = self.requests[slot];
        if request.op.has_buffer() {
            return true;
        }
        let bytes = (range.end - range.first) * SECTOR_BYTES;
        let Some(mut piece) = self.destage_buffers.take_spare(request.disk, bytes) else { return false };
        if u64::from(piece.len) < bytes {
            self.destage_buffers.give_back(&piece);
            return false;
        }
        self.destage_buffers.shorten(&mut piece, bytes);
        let to = CopyEnd::Buffer { id: piece.id, offset: piece.offset };
        self.copy_out.push_back(BufferCopy { from: CopyEnd::Zeroes, to, len: bytes as u32 });
        self.runs.iter_mut().for_each(|run| run.buffer_sector += piece.first_sector());
        self.requests[slot].zeroes = Some(piece);
        true
    }

    /// Releases the buffer of a zero write, if the write has one. The caller does this after the
    /// write's flash I/O has ended.
    pub(super) fn give_back_zeroes(&mut self, slot: u32) {
        if let Some(piece) = self.requests[slot].zeroes.take() {
            self.destage_buffers.give_back(&piece);
            self.wake_all();
        }
    }
}
