//! The engine's buffers for destaging. A buffer can be divided, so that many small transfers need
//! no more memory than a few large ones.
//!
//! A buffer is divided into 64 grains of at least 4 KiB. A *part* is a contiguous range of grains
//! of one buffer, which one transfer uses. Small parts are taken from the first buffers, so that
//! the others stay whole.
//!
//! Each disk has a share of the buffer bytes ([`Shares`]). Transfers to a hung backing keep their
//! parts of buffers, and the rest of the memory stays available to other disks.

use crate::io::BufferSlice;
use crate::shares::Shares;
use crate::units::{BufferId, DiskId, SECTOR_BYTES};

const GRAINS: u32 = 64;

/// All buffers, and which of their grains (64ths of a buffer) are free.
#[derive(Debug)]
pub(super) struct DestageBuffers {
    buffers: Vec<Buffer>,
    withheld: Vec<Withheld>,
    /// Buffer bytes in use by each disk.
    pub(super) shares: Shares,
}

/// The minimum buffer size that a transfer needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Least {
    /// All bytes that the transfer requests.
    All,
    /// At least this number of bytes. A disk without any buffer may get less, so that its destaging
    /// continues.
    Bytes(u64),
    /// All bytes that the transfer requests, or a whole number of stripes of the backing.
    Stripes {
        /// Size of a stripe, bytes.
        stripe: u64,
        /// The minimum size of a useful buffer, bytes; a multiple of `stripe`.
        least: u64,
    },
}

impl Default for DestageBuffers {
    fn default() -> DestageBuffers {
        DestageBuffers { buffers: Vec::new(), withheld: Vec::new(), shares: Shares::new(0) }
    }
}

#[derive(Debug)]
struct Buffer {
    id: BufferId,
    grain_bytes: u32,
    grains: u32,
    /// Free grains (64ths) of the buffer, one bit each.
    free: u64,
}

/// Memory of an abandoned I/O. Storage may still use this memory, so it is not given to other
/// transfers.
#[derive(Debug)]
struct Withheld {
    disk: DiskId,
    id: BufferId,
    /// Withheld grains (64ths of the buffer), one bit each.
    grains: u64,
    /// Grains among `grains` whose job does not need them any more, one bit each. These grains
    /// become free when storage has ended the abandoned I/O.
    kept: u64,
}

/// A part of one of the engine's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DestageBuffer {
    /// The disk that uses this part of the buffer.
    pub(super) disk: DiskId,
    pub(super) id: BufferId,
    /// Position of the part in its buffer, bytes; a multiple of a sector, as is `len`.
    pub(super) offset: u32,
    pub(super) len: u32,
}

impl DestageBuffer {
    /// Returns the index of this part's first sector in its buffer.
    pub(super) fn first_sector(&self) -> u64 {
        u64::from(self.offset) / SECTOR_BYTES
    }

    /// Returns the number of sectors that fit into this part of a buffer.
    pub(super) fn sectors(&self) -> u64 {
        u64::from(self.len) / SECTOR_BYTES
    }
}

impl DestageBuffers {
    /// Adds a buffer for destaging. `bytes` is its size, a multiple of 4 KiB.
    pub(super) fn add(&mut self, id: BufferId, bytes: u32) {
        let grain_bytes = (bytes / GRAINS).next_multiple_of(SECTOR_BYTES as u32).max(SECTOR_BYTES as u32);
        let grains = bytes / grain_bytes;
        self.buffers.push(Buffer { id, grain_bytes, grains, free: mask(0, grains) });
        self.shares.enlarge(u64::from(grains) * u64::from(grain_bytes));
    }

    /// Returns the size of the longest buffer, bytes.
    pub(super) fn longest(&self) -> u64 {
        self.at_most(u64::MAX)
    }

    /// Returns true if any part of a buffer is in use.
    pub(super) fn is_any_used(&self) -> bool {
        self.buffers.iter().any(|buffer| buffer.free != mask(0, buffer.grains))
    }

    /// Returns true if the engine has at least one destage buffer.
    pub(super) fn is_any(&self) -> bool {
        !self.buffers.is_empty()
    }

    /// Returns true if a buffer of `bytes` bytes, or of at least `least` bytes, is available to a
    /// disk now. If `least` exceeds the size of the longest buffer, a buffer of this longest size
    /// is enough.
    pub(super) fn has(&self, disk: DiskId, bytes: u64, least: Least) -> bool {
        let Some((_, least)) = self.granted(disk, bytes, least) else { return false };
        self.longest_free().is_some_and(|(_, free)| free >= self.at_most(least).max(1))
    }

    /// Hands out a buffer of `bytes` bytes to a disk. If no free range is long enough, the buffer
    /// is shorter, but at least `least` bytes. If `least` exceeds the size of the longest buffer, a
    /// buffer of this longest size is enough.
    pub(super) fn take(&mut self, disk: DiskId, bytes: u64, least: Least) -> Option<DestageBuffer> {
        let (bytes, least) = self.granted(disk, bytes, least)?;
        self.cut(disk, bytes, least)
    }

    /// Returns the length of the buffer to look for and its minimum length, bytes. The disk's share
    /// of the buffers limits both. Returns `None` if the share is less than the minimum.
    fn granted(&self, disk: DiskId, bytes: u64, least: Least) -> Option<(u64, u64)> {
        let bytes = self.at_most(bytes);
        let allowed = self.shares.allowance(disk, bytes);
        let has_none = self.shares.held(disk) == 0;
        match least {
            Least::All if allowed == bytes => Some((bytes, bytes)),
            Least::All => None,
            Least::Bytes(least) if allowed >= least.min(bytes) => Some((allowed, least.min(bytes))),
            Least::Bytes(_) if has_none => Some((allowed.max(1), allowed.min(1))),
            Least::Bytes(_) => None,
            Least::Stripes { stripe, least } => {
                let most = if allowed == bytes { bytes } else { allowed / stripe * stripe };
                let least = least.min(bytes);
                (most > 0 && most >= least).then_some((most, least))
            }
        }
    }

    fn cut(&mut self, disk: DiskId, bytes: u64, least: u64) -> Option<DestageBuffer> {
        let whole = self.buffers.iter().position(|buffer| {
            let (_, count) = buffer.longest(buffer.grains_of(bytes));
            count > 0 && count >= buffer.grains_of(bytes)
        });
        let longest = || self.longest_free().filter(|(_, free)| *free >= self.at_most(least).max(1));
        let at = whole.or_else(|| longest().map(|(at, _)| at))?;
        let buffer = &mut self.buffers[at];
        let (first, count) = buffer.longest(buffer.grains_of(bytes));
        buffer.free &= !mask(first, count);
        let grain = buffer.grain_bytes;
        let piece = DestageBuffer { disk, id: buffer.id, offset: first * grain, len: count * grain };
        self.shares.take(disk, piece.len.into());
        Some(piece)
    }

    /// Returns the bytes available to optional transfers, which hob can omit or replace by smaller
    /// ones. Half of the memory is reserved for all other transfers.
    pub(super) fn spare(&self) -> u64 {
        let bytes = |grains: fn(&Buffer) -> u32| -> u64 {
            self.buffers.iter().map(|buffer| u64::from(grains(buffer) * buffer.grain_bytes)).sum()
        };
        let (all, free) = (bytes(|buffer| buffer.grains), bytes(|buffer| buffer.free.count_ones()));
        free.saturating_sub(all / 2)
    }

    /// Hands out a buffer of at most `bytes` bytes for an optional transfer, such as read-ahead or
    /// a merged write. The buffer is shorter than `bytes` if the limit for optional transfers, the
    /// disk's share or the longest free range is smaller. Returns `None` if no byte is available.
    pub(super) fn take_spare(&mut self, disk: DiskId, bytes: u64) -> Option<DestageBuffer> {
        let bytes = self.shares.allowance(disk, bytes.min(self.spare()));
        if bytes == 0 { None } else { self.cut(disk, bytes, 0) }
    }

    /// Frees all but the first `bytes` bytes of a part of a buffer. `bytes` is at least 1.
    pub(super) fn shorten(&mut self, piece: &mut DestageBuffer, bytes: u64) {
        let buffer = self.buffer(piece);
        let (first, count) = buffer.place(piece);
        let kept = buffer.grains_of(bytes).clamp(1, count);
        let len = kept * buffer.grain_bytes;
        self.free(piece, mask(first + kept, count - kept));
        piece.len = len;
    }

    /// Frees a part of a buffer.
    pub(super) fn give_back(&mut self, piece: &DestageBuffer) {
        let buffer = self.buffer(piece);
        let (first, count) = buffer.place(piece);
        assert_eq!(buffer.free & mask(first, count), 0, "{piece:?} is given back once");
        self.free(piece, mask(first, count));
    }

    /// Frees grains (64ths of a buffer), except withheld grains: storage may still use their
    /// memory.
    fn free(&mut self, piece: &DestageBuffer, mut grains: u64) {
        for withheld in self.withheld.iter_mut().filter(|withheld| withheld.id == piece.id) {
            withheld.kept |= withheld.grains & grains;
            grains &= !withheld.grains;
        }
        let buffer = self.buffer(piece);
        buffer.free |= grains;
        let bytes = u64::from(grains.count_ones() * buffer.grain_bytes);
        self.shares.give_back(piece.disk, bytes);
    }

    /// Withholds memory that storage continues to use after the I/O of a disk has ended. The memory
    /// is not handed out before [`returned`](Self::returned), and counts as used by the disk.
    /// Memory outside the engine's buffers is ignored.
    pub(super) fn withhold(&mut self, disk: DiskId, slice: BufferSlice) {
        if let Some(grains) = self.grains(slice) {
            self.withheld.push(Withheld { disk, id: slice.id, grains, kept: 0 });
        }
    }

    /// Handles a report that storage no longer uses withheld memory. Frees the grains that the job
    /// of the I/O has already given back.
    pub(super) fn returned(&mut self, slice: BufferSlice) {
        let Some(grains) = self.grains(slice) else { return };
        let is_it = |withheld: &Withheld| withheld.id == slice.id && withheld.grains == grains;
        let at = self.withheld.iter().position(is_it).expect("returned memory was withheld before");
        let Withheld { disk, kept, .. } = self.withheld.swap_remove(at);
        let buffer =
            self.buffers.iter_mut().find(|buffer| buffer.id == slice.id).expect("the buffer was just found");
        buffer.free |= kept;
        let bytes = u64::from(kept.count_ones() * buffer.grain_bytes);
        self.shares.give_back(disk, bytes);
    }

    /// Returns the grains (64ths of a buffer) of a slice, one bit each. Returns `None` if the slice
    /// is not in one of these buffers.
    fn grains(&self, slice: BufferSlice) -> Option<u64> {
        let buffer = self.buffers.iter().find(|buffer| buffer.id == slice.id)?;
        let first = slice.offset / buffer.grain_bytes;
        let end = (slice.offset + slice.len).div_ceil(buffer.grain_bytes);
        Some(mask(first, end - first))
    }

    /// Returns the longest free range: the buffer's index, and the length in bytes.
    fn longest_free(&self) -> Option<(usize, u64)> {
        let free = |buffer: &Buffer| u64::from(buffer.longest(GRAINS).1 * buffer.grain_bytes);
        self.buffers.iter().map(free).enumerate().max_by_key(|(_, free)| *free)
    }

    fn at_most(&self, bytes: u64) -> u64 {
        let whole = |buffer: &Buffer| u64::from(buffer.grains * buffer.grain_bytes);
        self.buffers.iter().map(whole).max().unwrap_or(0).min(bytes)
    }

    fn buffer(&mut self, piece: &DestageBuffer) -> &mut Buffer {
        self.buffers
            .iter_mut()
            .find(|buffer| buffer.id == piece.id)
            .expect("the part belongs to one of these buffers")
    }
}

impl Buffer {
    /// Returns the number of grains (64ths of a buffer) for `bytes`. This number may exceed 64.
    fn grains_of(&self, bytes: u64) -> u32 {
        bytes.div_ceil(self.grain_bytes.into()).clamp(1, u64::from(u32::MAX)) as u32
    }

    fn place(&self, piece: &DestageBuffer) -> (u32, u32) {
        (piece.offset / self.grain_bytes, piece.len / self.grain_bytes)
    }

    /// Returns the first run of `wanted` free grains, or else the longest run: its position and
    /// length, in grains.
    fn longest(&self, wanted: u32) -> (u32, u32) {
        let (mut best, mut at) = ((0, 0), 0);
        while at < self.grains {
            let run = (!(self.free >> at)).trailing_zeros().min(self.grains - at).min(wanted);
            if run > best.1 {
                best = (at, run);
            }
            if run == wanted {
                break;
            }
            at += run.max(1);
        }
        best
    }
}

fn mask(first: u32, count: u32) -> u64 {
    match count {
        0 => 0,
        count => (u64::MAX >> (64 - count)) << first,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::DatastoreId;

    const MIB: u32 = 1 << 20;
    const DISK: DiskId = DiskId(0);

    #[test]
    fn many_small_pieces_leave_a_buffer_whole() {
        let mut destage_buffers = DestageBuffers::default();
        [1, 2].into_iter().for_each(|id| destage_buffers.add(BufferId(id), MIB));
        let small: Vec<DestageBuffer> =
            (0..64).map(|_| destage_buffers.cut(DISK, 4096, 0).expect("a range is free")).collect();
        assert!(small.iter().all(|piece| piece.id == BufferId(1) && piece.sectors() == 4));
        let large = destage_buffers.cut(DISK, MIB.into(), MIB.into()).expect("the other one");
        assert_eq!((large.id, large.offset, large.len), (BufferId(2), 0, MIB));
        assert!(!destage_buffers.has(DISK, 1, Least::All) && destage_buffers.cut(DISK, 1, 0).is_none());
        destage_buffers.give_back(&small[7]);
        assert_eq!(
            destage_buffers.cut(DISK, MIB.into(), 4096),
            Some(small[7]),
            "a shorter buffer than requested is handed out"
        );
        destage_buffers.give_back(&small[7]);
        assert_eq!(destage_buffers.cut(DISK, MIB.into(), 65_536), None, "no range has the minimum length");
        assert!(
            destage_buffers.cut(DISK, 16_385, 16_385).is_none()
                && destage_buffers.cut(DISK, 16_384, 16_384).is_some()
        );
    }

    #[test]
    fn half_is_reserved_for_transfers_that_requests_depend_on() {
        let mut destage_buffers = DestageBuffers::default();
        assert_eq!((destage_buffers.spare(), destage_buffers.take_spare(DISK, 1)), (0, None));
        destage_buffers.add(BufferId(1), MIB);
        let first = destage_buffers.take_spare(DISK, 300 << 10).expect("less than half");
        assert_eq!(
            destage_buffers.take_spare(DISK, MIB.into()).map(|piece| piece.len),
            Some(512 * 1024 - first.len)
        );
        assert_eq!((destage_buffers.spare(), destage_buffers.take_spare(DISK, 1)), (0, None));
        assert_eq!(destage_buffers.cut(DISK, MIB.into(), 0).map(|piece| piece.len), Some(MIB / 2));
    }

    #[test]
    fn small_buffers_have_grains_of_a_sector() {
        let mut destage_buffers = DestageBuffers::default();
        destage_buffers.add(BufferId(1), 12 << 10);
        let mut piece = destage_buffers.cut(DISK, 1 << 20, 0).expect("all of it");
        assert_eq!(piece.sectors(), 3);
        destage_buffers.shorten(&mut piece, 4097);
        assert_eq!(
            (piece.sectors(), destage_buffers.cut(DISK, 1, 0).map(|piece| piece.first_sector())),
            (2, Some(2))
        );
    }

    /// Disks with hung backings keep their buffers. Each further disk gets less memory, but never
    /// none.
    #[test]
    fn hung_disks_leave_pieces_to_others() {
        let mut destage_buffers = DestageBuffers::default();
        (0..4).for_each(|id| destage_buffers.add(BufferId(id), MIB));
        (0..32).for_each(|disk| destage_buffers.shares.join(DiskId(disk), DatastoreId(disk as u16)));
        let least = Least::Bytes(256 << 10);
        for disk in (0..32).map(DiskId) {
            assert!(destage_buffers.has(disk, MIB.into(), least), "disk {disk}");
            while destage_buffers.has(disk, MIB.into(), least) {
                destage_buffers.take(disk, MIB.into(), least).expect("`has` and `take` agree");
            }
            assert!(destage_buffers.take(disk, MIB.into(), least).is_none());
        }
    }

    /// With the rest of its share, a disk gets as many whole stripes as fit, or waits.
    #[test]
    fn a_share_is_used_in_whole_stripes() {
        let mut destage_buffers = DestageBuffers::default();
        destage_buffers.add(BufferId(1), MIB);
        destage_buffers.shares.join(DISK, DatastoreId(0));
        let least = Least::Stripes { stripe: 192 << 10, least: 192 << 10 };
        let first = destage_buffers.take(DISK, 384 << 10, least).expect("the buffer is free");
        assert_eq!(destage_buffers.shares.allowance(DISK, MIB.into()), 512 << 10);
        let second = destage_buffers.take(DISK, 576 << 10, least).expect("two stripes of three");
        assert_eq!((first.len, second.len), (384 << 10, 384 << 10));
        assert!(!destage_buffers.has(DISK, 192 << 10, least));
        destage_buffers.give_back(&first);
        assert!(destage_buffers.has(DISK, 192 << 10, least));
    }

    /// An I/O hangs in the kernel, and its disk is removed. The memory is used again when the
    /// kernel has returned it.
    #[test]
    fn memory_in_use_by_storage_is_not_handed_out() {
        let mut destage_buffers = DestageBuffers::default();
        destage_buffers.add(BufferId(1), MIB);
        destage_buffers.shares.join(DISK, DatastoreId(0));
        let hung = destage_buffers.cut(DISK, 100 << 10, 0).expect("a range is free");
        let slice = BufferSlice { id: BufferId(1), offset: hung.offset, len: 99 << 10 };
        destage_buffers.withhold(DISK, slice);
        destage_buffers.withhold(DISK, BufferSlice { id: BufferId(9), ..slice });
        let rest = destage_buffers.cut(DISK, MIB.into(), 0).expect("the rest of the buffer is free");
        destage_buffers.give_back(&hung);
        assert!(destage_buffers.cut(DISK, 1, 0).is_none(), "the kernel still uses the memory");
        assert_eq!(destage_buffers.shares.held(DISK), MIB.into(), "withheld memory counts for its disk");
        destage_buffers.returned(slice);
        assert_eq!(destage_buffers.shares.held(DISK), u64::from(rest.len));
        assert_eq!(destage_buffers.cut(DISK, 100 << 10, 0), Some(hung));
        // The kernel may return the memory before the transfer gives it back.
        destage_buffers.withhold(DISK, slice);
        destage_buffers.returned(slice);
        assert!(destage_buffers.cut(DISK, 1, 0).is_none());
        destage_buffers.give_back(&hung);
        assert_eq!(destage_buffers.cut(DISK, 100 << 10, 0), Some(hung));
    }

    proptest! {
        /// No byte is handed out twice, and all are returned.
        #[test]
        fn pieces_do_not_overlap(sizes in prop::collection::vec(1u32..300, 1..4),
            steps in prop::collection::vec((any::<u8>(), 1u64..2_000_000), 0..200)) {
            let mut destage_buffers = DestageBuffers::default();
            for (id, sectors) in sizes.iter().enumerate() {
                destage_buffers.add(BufferId(id as u32), sectors * 4096);
            }
            let all = destage_buffers.buffers.iter().map(|buffer| buffer.free).collect::<Vec<_>>();
            let mut out: Vec<DestageBuffer> = Vec::new();
            for (choice, bytes) in steps {
                match choice % 3 {
                    0 if !out.is_empty() => destage_buffers.give_back(&out.swap_remove(choice as usize % out.len())),
                    1 if !out.is_empty() => {
                        let at = choice as usize % out.len();
                        destage_buffers.shorten(&mut out[at], bytes);
                    }
                    _ => out.extend(destage_buffers.cut(DISK, bytes, 0)),
                }
                for (i, piece) in out.iter().enumerate() {
                    prop_assert!(piece.len > 0 && piece.offset + piece.len <= sizes[piece.id.0 as usize] * 4096);
                    let apart = |other: &DestageBuffer| other.id != piece.id
                        || other.offset >= piece.offset + piece.len
                        || piece.offset >= other.offset + other.len;
                    prop_assert!(out[..i].iter().all(apart), "{:?}", out);
                }
            }
            out.iter().for_each(|piece| destage_buffers.give_back(piece));
            prop_assert_eq!(destage_buffers.buffers.iter().map(|buffer| buffer.free).collect::<Vec<_>>(), all);
        }
    }
}
