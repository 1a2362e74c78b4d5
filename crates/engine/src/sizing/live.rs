//! The sampler that each disk has, always on: what LRU caches of any size would do with the requests of its guests, for
//! three block sizes.
//!
//! Each block size has a [`Sampler`] of [`SAMPLES`] blocks that follows the sectors of its samples, so that the curves
//! count as the engine does: a read hits where all its sectors are valid, a miss makes valid what was read and no
//! more, whole sectors of writes become valid, sectors written in part, discarded or zeroed do not. A read that touches
//! several blocks counts once for each of them. Writes come into the cache, as in write-through and write-back.
//!
//! Larger blocks than 64 KiB are left out: their samples would need a sector map each that there is no room for. All
//! memory, less than 1 MB, is taken when the disk comes; what no request has touched of it is zeroes that the system
//! need not back. Most requests cost a multiplication and a comparison for each block size.

use super::curve::Curve;
use super::shards::Sampler;
use crate::io::{Op, Request};
use crate::units::{Instant, SECTOR_BYTES};

/// Most samples of each block size.
pub const SAMPLES: u32 = 4096;

/// The block sizes, bytes.
pub const BLOCK_SIZES: [u64; 3] = [sized::<1>(), sized::<4>(), sized::<16>()];

/// Bytes of a block of that many sectors.
const fn sized<const SECTORS: usize>() -> u64 {
    SECTORS as u64 * SECTOR_BYTES
}

/// What a disk's requests were, since counting began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Reads.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Of the reads, how many flash or memory above it served whole, of those answered so far.
    pub read_hits: u64,
    /// Writes.
    pub writes: u64,
    /// Their bytes.
    pub write_bytes: u64,
}

/// Reads of one window. The latest complete window and the current one are the recent reads.
pub const WINDOW_READS: u64 = 16_384;

/// Reads of late, which say whether a cache is still being warmed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Recent {
    /// Reads: fewer than [`WINDOW_READS`] while there were no more in all, and less than twice as many later.
    pub reads: u64,
    /// Of the reads, how many flash or memory above it served whole.
    pub read_hits: u64,
    /// Share of the accesses that read a block of 4 KiB which was never read or written before, estimated.
    pub first_share: f64,
}

/// Counts of a window.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    reads: u64,
    read_hits: u64,
    /// The sampler's counts when the window began.
    weight: u64,
    first_weight: f64,
}

/// What is known for one block size.
#[derive(Clone, Debug)]
pub struct BlockSizing {
    /// The block.
    pub block_bytes: u64,
    /// Reads, counted once for each block they touch: of these the curve tells the misses.
    pub accesses: u64,
    /// Blocks followed now.
    pub samples: u32,
    /// Their share of all blocks.
    pub rate: f64,
    /// Different blocks that were read or written, estimated.
    pub blocks: u64,
    /// Misses of reads.
    pub curve: Curve,
}

/// Everything that is known.
#[derive(Clone, Debug)]
pub struct Sizing {
    /// Counting for so long, nanoseconds.
    pub elapsed_ns: u64,
    /// The requests.
    pub seen: Seen,
    /// The latest of the reads.
    pub recent: Recent,
    /// Memory that this takes, bytes.
    pub bytes: u64,
    /// By block size, smallest first.
    pub block_sizes: Vec<BlockSizing>,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Live {
    since: Instant,
    seen: Seen,
    /// The window before, and the current one.
    windows: [Window; 2],
    small: Sampler<1>,
    medium: Sampler<4>,
    large: Sampler<16>,
}

impl Live {
    /// Of a disk that comes.
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

    /// A request comes, and makes sense.
    pub fn note(&mut self, request: &Request) {
        match request.op {
            Op::Read => {
                self.count_read();
                self.seen.reads += 1;
                self.seen.read_bytes += request.len;
            }
            Op::Write(_) => {
                self.seen.writes += 1;
                self.seen.write_bytes += request.len;
            }
            Op::Flush | Op::Pull | Op::Forget | Op::Settle | Op::ReadForPeer => return,
            Op::Prefetch | Op::Discard(_) | Op::WriteZeroes(..) => {}
        }
        note(&mut self.small, request);
        note(&mut self.medium, request);
        note(&mut self.large, request);
    }

    /// A read was a hit.
    pub fn hit(&mut self) {
        self.seen.read_hits += 1;
        self.windows[1].read_hits += 1;
    }

    /// Begins the next window where the current one is complete.
    fn count_read(&mut self) {
        if self.windows[1].reads == WINDOW_READS {
            let (weight, first_weight) = (self.small.weight(), self.small.first_weight());
            self.windows = [self.windows[1], Window { reads: 0, read_hits: 0, weight, first_weight }];
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
            // Hits are counted when they end, perhaps in the next window.
            read_hits: (before.read_hits + current.read_hits).min(reads),
            first_share: if accesses == 0 { 0.0 } else { (first / accesses as f64).min(1.0) },
        }
    }

    /// What is known now. Takes time in proportion to the curves, some ten thousand steps.
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

/// Shows a request to one sampler.
#[inline]
fn note<const SECTORS: usize>(sampler: &mut Sampler<SECTORS>, request: &Request) {
    let end = request.offset + request.len;
    let covered = (request.offset / SECTOR_BYTES, end.div_ceil(SECTOR_BYTES));
    match request.op {
        Op::Read => access(sampler, covered, 1),
        Op::Prefetch => access(sampler, covered, 0),
        Op::Write(_) => {
            let whole = (request.offset.div_ceil(SECTOR_BYTES), end / SECTOR_BYTES);
            if whole.0 >= whole.1 {
                return invalidate(sampler, covered);
            }
            invalidate(sampler, (covered.0, whole.0));
            invalidate(sampler, (whole.1, covered.1));
            access(sampler, whole, 0);
        }
        Op::Discard(_) | Op::WriteZeroes(..) => invalidate(sampler, covered),
        Op::Flush | Op::Pull | Op::Forget | Op::Settle | Op::ReadForPeer => {}
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

/// Blocks, and the sectors of each.
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
