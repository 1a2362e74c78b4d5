//! Small zeroes under write-back: they are written to flash from a lent buffer, as a guest's own zeroes would be.
//!
//! Longer ones go to the backing, which can deallocate the range: [`ZEROES_BYTES_MAX`]. So do zeroes that cover a sector in part, and
//! those for which there is no buffer to spare.

use super::{Active, Engine};
use crate::io::{BufferCopy, CopyEnd, Op, Request};
use crate::units::SECTOR_BYTES;

/// Longest request for zeroes that flash takes, bytes. Longer ones are worth a request to the backing, and flash is not worn for them.
const ZEROES_BYTES_MAX: u64 = 64 << 10;

impl Active {
    /// Is it a request for zeroes that flash may take?
    pub(super) fn is_small_zeroes(&self) -> bool {
        let Request { op, offset, len, .. } = self.request;
        let is_whole = (offset | len).is_multiple_of(SECTOR_BYTES);
        matches!(op, Op::WriteZeroes(..)) && len <= ZEROES_BYTES_MAX && is_whole
    }
}

impl Engine {
    /// Gives a request for zeroes a buffer that holds them, and lets `runs` begin there. False if there is none to spare. Nothing
    /// is to be done for other requests.
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

    /// Flash has taken a request's zeroes, or has not: others may have the buffer.
    pub(super) fn give_back_zeroes(&mut self, slot: u32) {
        if let Some(piece) = self.requests[slot].zeroes.take() {
            self.destage_buffers.give_back(&piece);
            self.wake_all();
        }
    }
}
