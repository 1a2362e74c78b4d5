//! A hash table that finds the frame of a block, with 5.3 bytes per frame.
//!
//! Each bucket is a cache line: 15 entries and a count. An entry is a frame number. The bits that
//! frame numbers do not need hold a tag of the block's hash, so that a search seldom reads another
//! block's number. An entry whose home bucket is full goes to the next bucket with room, and each
//! full bucket on the way increments its count. A search continues only past buckets with a count
//! above 0. So an entry is removed without moving others, and most searches read one cache line.

use crate::units::{BlockNo, FrameNo};

const EMPTY: u32 = u32::MAX;
const ENTRIES: usize = 15;

/// A bucket: 15 entries, and the number of entries that were placed in later buckets instead.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Bucket([u32; ENTRIES + 1]);

const VACANT: Bucket = {
    let mut words = [EMPTY; ENTRIES + 1];
    words[ENTRIES] = 0;
    Bucket(words)
};

impl Bucket {
    /// Returns a bit mask of the entries that equal `tag` in the bits of `mask`.
    #[inline]
    fn matching(&self, mask: u32, tag: u32) -> u32 {
        let mut bits = 0;
        for (i, entry) in self.0[..ENTRIES].iter().enumerate() {
            bits |= u32::from(entry & mask == tag) << i;
        }
        bits
    }

    fn passed_by(&self) -> u32 {
        self.0[ENTRIES]
    }
}

/// The hash table of an index. The table stores frame numbers, and the index stores the block of
/// each frame.
#[derive(Clone, Debug)]
pub(super) struct Table {
    buckets: Vec<Bucket>,
    /// Bit mask of the frame number in an entry.
    frame_mask: u32,
}

impl Table {
    /// Creates a table for frames `0..frames`.
    pub(super) fn new(frames: u32) -> Table {
        // The table is four fifths full when all frames are in use.
        let buckets = (u64::from(frames) * 5).div_ceil(4 * ENTRIES as u64);
        let frame_bits = 32 - frames.leading_zeros();
        Table { buckets: vec![VACANT; buckets as usize], frame_mask: ((1u64 << frame_bits) - 1) as u32 }
    }

    /// Returns the frame with this hash for which `is_it` returns true.
    #[inline]
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(FrameNo) -> bool) -> Option<FrameNo> {
        let tag = self.tag(hash);
        let mut at = self.home(hash);
        // In a small table every bucket may have a count, so the search ends where it started.
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            let mut bits = bucket.matching(!self.frame_mask, tag);
            while bits != 0 {
                let entry = bucket.0[bits.trailing_zeros() as usize];
                let frame = FrameNo(entry & self.frame_mask);
                if entry != EMPTY && is_it(frame) {
                    return Some(frame);
                }
                bits &= bits - 1;
            }
            if bucket.passed_by() == 0 {
                break;
            }
            at = self.next(at);
        }
        None
    }

    /// Adds the frame of a block that has none yet.
    #[inline]
    pub(super) fn insert(&mut self, hash: u64, frame: FrameNo) {
        let entry = self.tag(hash) | frame.0;
        let mut at = self.home(hash);
        loop {
            let bits = self.buckets[at].matching(u32::MAX, EMPTY);
            let bucket = &mut self.buckets[at];
            if bits != 0 {
                bucket.0[bits.trailing_zeros() as usize] = entry;
                return;
            }
            bucket.0[ENTRIES] += 1;
            at = self.next(at);
        }
    }

    /// Removes an existing entry.
    #[inline]
    pub(super) fn remove(&mut self, hash: u64, frame: FrameNo) {
        let entry = self.tag(hash) | frame.0;
        let mut at = self.home(hash);
        loop {
            let bits = self.buckets[at].matching(u32::MAX, entry);
            let bucket = &mut self.buckets[at];
            if bits != 0 {
                bucket.0[bits.trailing_zeros() as usize] = EMPTY;
                return;
            }
            assert!(bucket.passed_by() > 0, "a frame is removed once");
            bucket.0[ENTRIES] -= 1;
            at = self.next(at);
        }
    }

    /// Reads a word of the bucket where a search starts.
    #[inline]
    pub(super) fn peek(&self, hash: u64) -> u32 {
        self.buckets[self.home(hash)].0[0]
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.buckets.capacity() * size_of::<Bucket>()) as u64
    }

    fn tag(&self, hash: u64) -> u32 {
        hash as u32 & !self.frame_mask
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        (((hash >> 32) * self.buckets.len() as u64) >> 32) as usize
    }

    #[inline]
    fn next(&self, at: usize) -> usize {
        if at + 1 == self.buckets.len() { 0 } else { at + 1 }
    }
}

/// Hashes a block number to 64 bits (the finalizer of SplitMix64).
#[inline]
pub(crate) fn hash(block: BlockNo) -> u64 {
    let mut x = u64::from(block.0).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds entries until each bucket has a count, and then more entries.
    #[test]
    fn a_search_ends_when_every_bucket_counts_someone() {
        let frames = 24;
        let mut table = Table::new(frames);
        let mut blocks: Vec<u32> = (0..frames).collect();
        (0..frames).for_each(|frame| table.insert(hash(BlockNo(frame)), FrameNo(frame)));
        for step in 0..1_000_000 {
            let frame = step * 7 % frames;
            let old = std::mem::replace(&mut blocks[frame as usize], step + frames);
            table.remove(hash(BlockNo(old)), FrameNo(frame));
            table.insert(hash(BlockNo(step + frames)), FrameNo(frame));
            if table.buckets.iter().all(|bucket| bucket.passed_by() > 0) {
                let absent = table.find(hash(BlockNo(old)), |frame| blocks[frame.0 as usize] == old);
                assert_eq!(absent, None);
                return;
            }
        }
        panic!("the buckets were never all passed by: the test proves nothing");
    }
}
