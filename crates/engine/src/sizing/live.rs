//! The sampler of a disk's live miss-ratio curves: estimates the hits of LRU caches of any size for
//! the guest's requests, for three block sizes.
//!
//! Each block size has a [`Sampler`] of [`SAMPLES`] blocks that tracks the sectors of its samples,
//! so that the curves count hits as the engine does. A read hits if all its sectors are valid. A
//! miss makes valid exactly the sectors that the request reads. Sectors that are completely written
//! become valid. Sectors that are partly written, discarded or zeroed become invalid or stay
//! invalid. A read of several blocks counts once for each of them. Writes fill the cache, as in
//! write-through and write-back.
//!
//! Block sizes above 64 KiB are not sampled, because their sector maps would need too much memory.
//! All memory, less than 1 MB, is allocated when the disk is added. The kernel provides a page of
//! this memory only when it is first used. Most requests cost a multiplication and a comparison per
//! block size.

use super::curve::Curve;
use super::shards::Sampler;
use crate::io::{Op, Request};
use crate::units::{Instant, SECTOR_BYTES};

/// Maximum number of samples per block size.
pub const SAMPLES: u32 = 4096;

/// Sampled block sizes, bytes.
pub const BLOCK_SIZES: [u64; 3] = [sized::<1>(), sized::<4>(), sized::<16>()];

/// Returns the size of a block of `SECTORS` sectors in bytes.
const fn sized<const SECTORS: usize>() -> u64 {
    SECTORS as u64 * SECTOR_BYTES
}

/// Counts of a disk's requests since it was opened, or since its miss-ratio curves were last
/// cleared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Number of reads.
    pub reads: u64,
    /// Total length of all reads, bytes.
    pub read_bytes: u64,
    /// Number of reads that flash or memory served completely.
    pub read_hits: u64,
    /// Number of writes.
    pub writes: u64,
    /// Total length of all writes, bytes.
    pub write_bytes: u64,
}

/// Number of reads in a window. Recent reads are those of the last complete window and of the
/// current one.
pub const WINDOW_READS: u64 = 16_384;

/// Counts of recent reads, which show whether a cache is still warming up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Recent {
    /// Number of recent reads: all reads at first, later between one and two times
    /// [`WINDOW_READS`].
    pub reads: u64,
    /// Number of recent reads that flash or memory served completely.
    pub read_hits: u64,
    /// Total length of the recent reads, bytes.
    pub read_bytes: u64,
    /// Total length of the writes since the first of the recent reads, bytes.
    pub write_bytes: u64,
    /// Estimated share of recent read accesses whose 4 KiB block was not read or written earlier
    /// since the disk was opened or its curves were last cleared.
    pub first_share: f64,
}

/// Counts of one window of reads.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    reads: u64,
    read_hits: u64,
    read_bytes: u64,
    write_bytes: u64,
    /// Total weight of the sampler at the start of the window.
    weight: u64,
    first_weight: f64,
}

/// Miss-ratio curve of a disk for one block size, and the sample that it was estimated from.
#[derive(Clone, Debug)]
pub struct BlockSizing {
    /// Block size in bytes.
    pub block_bytes: u64,
    /// Number of read accesses: a read counts once for each block that it touches. The curve is the
    /// miss ratio of these accesses.
    pub accesses: u64,
    /// Number of sampled blocks.
    pub samples: u32,
    /// Share of all blocks that is sampled.
    pub rate: f64,
    /// Estimated number of different blocks that were read or written.
    pub blocks: u64,
    /// Miss-ratio curve of reads.
    pub curve: Curve,
}

/// Miss-ratio curves of a disk for all sampled block sizes, and counts of its requests.
#[derive(Clone, Debug)]
pub struct Sizing {
    /// Time since the counts began, nanoseconds.
    pub elapsed_ns: u64,
    /// Counts of requests.
    pub seen: Seen,
    /// Counts of recent reads.
    pub recent: Recent,
    /// Memory use of the disk's sampler, bytes.
    pub bytes: u64,
    /// Results for each block size, smallest first.
    pub block_sizes: Vec<BlockSizing>,
}

/// The live sampler of one disk.
#[derive(Clone, Debug)]
pub struct Live {
    since: Instant,
    seen: Seen,
    /// The previous window of reads, and the current one.
    windows: [Window; 2],
    small: Sampler<1>,
    medium: Sampler<4>,
    large: Sampler<16>,
}

impl Live {
    /// Creates the sampler of a disk, which counts from `now` on.
    pub fn new(now: Instant) -> Live {
        Live {
            since: now,
            seen: Seen::default(),
            windows: [Window::default(); 2],
            small: Sampler::fixed_size(SAMPLES),
            medium: Sampler::fixed_size(SAMPLES),
            large: Sampler::fixed_size(SAMPLES),
        }
    }

    /// Records a request of the guest that is not refused.
    pub fn note(&mut self, request: &Request) {
        match request.op {
            Op::Read => {
                self.count_read();
                self.seen.reads += 1;
                self.seen.read_bytes += request.len;
                self.windows[1].read_bytes += request.len;
            }
            Op::Write(_) => {
                self.seen.writes += 1;
                self.seen.write_bytes += request.len;
                self.windows[1].write_bytes += request.len;
            }
            Op::Flush | Op::Pull | Op::Forget | Op::Settle | Op::DaemonFlush | Op::ReadForPeer => return,
            Op::Prefetch | Op::Discard(_) | Op::WriteZeroes(..) => {}
        }
        let end = request.offset + request.len;
        let covered = (request.offset / SECTOR_BYTES, end.div_ceil(SECTOR_BYTES));
        match request.op {
            Op::Read => self.access(covered, 1),
            Op::Prefetch => self.access(covered, 0),
            Op::Write(_) => {
                let whole = (request.offset.div_ceil(SECTOR_BYTES), end / SECTOR_BYTES);
                if whole.0 >= whole.1 {
                    return self.invalidate(covered);
                }
                self.invalidate((covered.0, whole.0));
                self.invalidate((whole.1, covered.1));
                self.access(whole, 0);
            }
            _ => self.invalidate(covered),
        }
    }

    fn access(&mut self, sectors: (u64, u64), weight: u32) {
        let (first, end) = sectors;
        if end - first > 1 {
            access(&mut self.small, sectors, weight);
            access(&mut self.medium, sectors, weight);
            return access(&mut self.large, sectors, weight);
        }
        // All three samplers look up the sector before any of them changes, so that the processor
        // waits for memory only once.
        let [medium, large] = [4, 16].map(|sectors| (first / sectors, (first % sectors) as usize));
        let small_found = self.small.find(first);
        let medium_found = self.medium.find(medium.0);
        let large_found = self.large.find(large.0);
        self.small.access_found(first, small_found, 0..1, weight);
        self.medium.access_found(medium.0, medium_found, medium.1..medium.1 + 1, weight);
        self.large.access_found(large.0, large_found, large.1..large.1 + 1, weight);
    }

    fn invalidate(&mut self, sectors: (u64, u64)) {
        if sectors.0 < sectors.1 {
            invalidate(&mut self.small, sectors);
            invalidate(&mut self.medium, sectors);
            invalidate(&mut self.large, sectors);
        }
    }

    /// Records that a read was a hit.
    pub fn hit(&mut self) {
        self.seen.read_hits += 1;
        self.windows[1].read_hits += 1;
    }

    /// Counts a read, and begins the next window if the current one is complete.
    fn count_read(&mut self) {
        if self.windows[1].reads == WINDOW_READS {
            let (weight, first_weight) = (self.small.weight(), self.small.first_weight());
            self.windows = [self.windows[1], Window { weight, first_weight, ..Window::default() }];
        }
        self.windows[1].reads += 1;
    }

    fn recent(&self) -> Recent {
        let [before, current] = self.windows;
        let accesses = self.small.weight() - before.weight;
        let first = self.small.first_weight() - before.first_weight;
        let reads = before.reads + current.reads;
        Recent {
            reads,
            // Hits are counted when reads end, possibly in the next window.
            read_hits: (before.read_hits + current.read_hits).min(reads),
            read_bytes: before.read_bytes + current.read_bytes,
            write_bytes: before.write_bytes + current.write_bytes,
            first_share: if accesses == 0 { 0.0 } else { (first / accesses as f64).min(1.0) },
        }
    }

    /// Returns the counts of requests so far.
    pub fn seen(&self) -> Seen {
        self.seen
    }

    /// Returns the current result for the largest blocks that are not larger than `block_bytes`.
    pub fn report_of(&self, block_bytes: u64) -> BlockSizing {
        if block_bytes >= sized::<16>() {
            report(&self.large)
        } else if block_bytes >= sized::<4>() {
            report(&self.medium)
        } else {
            report(&self.small)
        }
    }

    /// Returns the current result. The call takes time in proportion to the length of the curves,
    /// some ten thousand steps.
    pub fn report(&self, now: Instant) -> Sizing {
        Sizing {
            elapsed_ns: now - self.since,
            seen: self.seen,
            recent: self.recent(),
            bytes: size_of::<Self>() as u64
                + [self.small.bytes(), self.medium.bytes(), self.large.bytes()].iter().sum::<u64>()
                - (size_of::<Sampler<1>>() + size_of::<Sampler<4>>() + size_of::<Sampler<16>>()) as u64,
            block_sizes: vec![report(&self.small), report(&self.medium), report(&self.large)],
        }
    }
}

fn report<const SECTORS: usize>(sampler: &Sampler<SECTORS>) -> BlockSizing {
    BlockSizing {
        block_bytes: sized::<SECTORS>(),
        accesses: sampler.weight(),
        samples: sampler.samples(),
        rate: sampler.rate(),
        blocks: sampler.blocks(),
        curve: sampler.curve(),
    }
}

#[inline]
fn access<const SECTORS: usize>(sampler: &mut Sampler<SECTORS>, sectors: (u64, u64), weight: u32) {
    for (block, inside) in spans::<SECTORS>(sectors) {
        sampler.access_sectors(block, inside, weight);
    }
}

fn invalidate<const SECTORS: usize>(sampler: &mut Sampler<SECTORS>, sectors: (u64, u64)) {
    for (block, inside) in spans::<SECTORS>(sectors) {
        sampler.invalidate(block, inside);
    }
}

/// Returns the touched blocks, and the touched sectors of each.
#[inline]
fn spans<const SECTORS: usize>(
    (first, end): (u64, u64),
) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let sectors = SECTORS as u64;
    let blocks = if first < end { first / sectors..(end - 1) / sectors + 1 } else { 0..0 };
    blocks.map(move |block| {
        let start = block * sectors;
        (block, (first.max(start) - start) as usize..(end.min(start + sectors) - start) as usize)
    })
}
