//! Splits transfers between the direct and the buffered descriptor of a file.

use hob_engine::io::{BufferSlice, Durability, IoOp};
use hob_engine::units::{SECTOR_BYTES, sector_ceil, sector_floor};

use super::{Attached, FileBacking};
use crate::ring::{Fd, Ring};

impl FileBacking {
    /// Returns true if the offset in the file, the length and the slice's offset in the buffer are
    /// multiples of the file's block size, so that the direct descriptor can do the whole transfer.
    /// In the buffer of a request, each byte has the same offset in its 4 KiB sector as in the
    /// file.
    pub(super) fn is_direct(&self, offset: u64, slice: BufferSlice) -> bool {
        let mask = u64::from(self.info.block_bytes) - 1;
        (offset | u64::from(slice.len) | u64::from(slice.offset)) & mask == 0
    }

    pub(super) fn transfer(
        &self,
        ring: &mut Ring,
        index: u32,
        op: IoOp,
        fd: Fd,
        offset: u64,
        slice: BufferSlice,
    ) {
        let token = self.attached().tokens.token(index);
        let durability = match op {
            IoOp::Read => return ring.read(token, fd, offset, slice),
            _ if self.gate.is_some() && fd == self.attached().buffered => Durability::Durable,
            IoOp::Write(durability) => durability,
            _ => Durability::Volatile,
        };
        ring.write(token, fd, offset, slice, durability);
    }

    /// Splits a transfer so that its aligned part is direct I/O. Returns the number of operations.
    pub(super) fn transfer_parts(
        &self,
        ring: &mut Ring,
        index: u32,
        op: IoOp,
        offset: u64,
        slice: BufferSlice,
    ) -> u32 {
        let Attached { direct, buffered, .. } = self.attached();
        if let Some(direct) = direct.filter(|_| self.is_direct(offset, slice)) {
            self.transfer(ring, index, op, direct, offset, slice);
            return 1;
        }
        let end = offset + u64::from(slice.len);
        let (from, to) = (sector_ceil(offset), sector_floor(end));
        let same_phase = offset % SECTOR_BYTES == u64::from(slice.offset) % SECTOR_BYTES;
        let Some(direct) = direct.filter(|_| same_phase && from < to) else {
            self.transfer(ring, index, op, buffered, offset, slice);
            return 1;
        };
        let mut count = 0;
        for (fd, first, last) in [(buffered, offset, from), (direct, from, to), (buffered, to, end)] {
            if first < last {
                let start = slice.offset + (first - offset) as u32;
                let part = BufferSlice { id: slice.id, offset: start, len: (last - first) as u32 };
                self.transfer(ring, index, op, fd, first, part);
                count += 1;
            }
        }
        count
    }
}
