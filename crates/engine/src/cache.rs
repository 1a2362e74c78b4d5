//! One disk's cache: its index, its replacement policy, and where its frames lie on flash.

use crate::command::{CacheConfig, CommandError, Segment};
use crate::index::Index;
use crate::policy::{Candidate, Policy};
use crate::units::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, BlockNo, DeviceId, FrameNo, SECTOR_BYTES};

/// A part of one block, in sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) block: BlockNo,
    /// First sector inside the block.
    pub(crate) first: u64,
    pub(crate) count: u64,
}

/// A run of a cache's sectors that lies on flash in one piece. Sectors are numbered through all
/// frames, as [`Index::first_sector`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) sector: u64,
    pub(crate) count: u64,
    pub(crate) device: DeviceId,
    /// Byte offset on the device.
    pub(crate) offset: u64,
}

/// An extent, and the sector of the request's buffer that goes to or comes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) extent: Extent,
    pub(crate) buffer_sector: u64,
}

/// Adds an extent to a list of runs, as part of the last one if it continues it on flash and in the
/// buffer.
#[inline]
pub(crate) fn push_run(runs: &mut Vec<Run>, extent: Extent, buffer_sector: u64) {
    if let Some(Run { extent: last, buffer_sector: start }) = runs.last_mut()
        && last.sector + last.count == extent.sector
        && last.device == extent.device
        && last.offset + last.count * SECTOR_BYTES == extent.offset
        && *start + last.count == buffer_sector
    {
        last.count += extent.count;
    } else {
        runs.push(Run { extent, buffer_sector });
    }
}

pub(crate) struct Cache {
    pub(crate) config: CacheConfig,
    pub(crate) segments: Vec<Segment>,
    pub(crate) index: Index,
    policy: Box<dyn Policy>,
    block_shift: u32,
    segment_shift: u32,
}

impl Cache {
    /// An empty cache for a disk of `disk_bytes`.
    pub(crate) fn new(
        config: CacheConfig,
        segments: Vec<Segment>,
        disk_bytes: u64,
    ) -> Result<Cache, CommandError> {
        let block_bytes = u64::from(config.block_bytes);
        let workable = block_bytes.is_power_of_two()
            && (BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&block_bytes)
            && config.segment_bytes.is_power_of_two()
            && config.segment_bytes >= block_bytes
            && disk_bytes.div_ceil(block_bytes) <= 1 << 32;
        if segments.is_empty() {
            return Err(CommandError::TooSmall);
        }
        let frames = (segments.len() as u64).checked_mul(config.segment_bytes / block_bytes.max(1));
        match frames {
            Some(frames) if workable && frames < u64::from(u32::MAX) => {
                let block_shift = (block_bytes / SECTOR_BYTES).ilog2();
                Ok(Cache {
                    index: Index::new(frames as u32, block_shift),
                    policy: (config.policy.info().build)(frames as u32),
                    segment_shift: (config.segment_bytes / SECTOR_BYTES).ilog2(),
                    block_shift,
                    config,
                    segments,
                })
            }
            _ => Err(CommandError::Unworkable),
        }
    }

    /// Memory of everything that grows with the cache, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.index.bytes() + self.policy.bytes() + std::mem::size_of_val(self.segments.as_slice()) as u64
    }

    /// Splits a range of the disk's sectors at block boundaries.
    #[inline]
    pub(crate) fn spans(&self, first: u64, end: u64) -> impl Iterator<Item = Span> + use<> {
        let shift = self.block_shift;
        let mut at = first;
        std::iter::from_fn(move || {
            (at < end).then(|| {
                let block = at >> shift;
                let stop = end.min((block + 1) << shift);
                let span =
                    Span { block: BlockNo(block as u32), first: at - (block << shift), count: stop - at };
                at = stop;
                span
            })
        })
    }

    /// The cache sector at which a span starts, if its block has a frame.
    #[inline]
    pub(crate) fn find(&self, span: Span) -> Option<u64> {
        self.index.find(span.block).map(|frame| self.index.first_sector(frame) + span.first)
    }

    /// Tells the policy that a request used the block of this cache sector.
    #[inline]
    pub(crate) fn touch(&mut self, sector: u64) {
        self.policy.hit(self.frame_of(sector));
    }

    /// Gives a frame to the block of `span`, which has none. Evicts if need be; `is_busy` says
    /// whether I/O on a range of the disk's sectors is in flight. Returns the cache sector at which the span starts and
    /// the number of blocks evicted; `None` if no block can leave.
    pub(crate) fn allocate(&mut self, span: Span, is_busy: impl Fn(u64, u64) -> bool) -> Option<(u64, u64)> {
        let mut evicted = 0;
        let frame = match self.index.insert(span.block) {
            Some(frame) => frame,
            None => {
                evicted = self.evict(is_busy)?;
                self.index.insert(span.block).expect("a frame was freed")
            }
        };
        self.policy.insert(frame, span.block);
        Some((self.index.first_sector(frame) + span.first, evicted))
    }

    /// Frees one frame. Returns how many blocks with data that cost: 0 or 1.
    fn evict(&mut self, is_busy: impl Fn(u64, u64) -> bool) -> Option<u64> {
        let (index, shift) = (&self.index, self.block_shift);
        let frame = self.policy.evict(&mut |frame| {
            let block = index.block(frame);
            let first = u64::from(block.0) << shift;
            if is_busy(first, first + (1 << shift)) {
                Candidate::Busy
            } else if index.block_is_empty(index.first_sector(frame)) {
                Candidate::Empty
            } else {
                Candidate::Block(block)
            }
        })?;
        let first = self.index.first_sector(frame);
        let held_data = !self.index.block_is_empty(first);
        self.index.clear_valid(first, 1 << self.block_shift);
        self.index.remove(self.index.block(frame));
        Some(u64::from(held_data))
    }

    /// The piece of flash that holds `count` cache sectors from `sector` on; shorter where a segment
    /// ends.
    #[inline]
    pub(crate) fn extent(&self, sector: u64, count: u64) -> Extent {
        let segment = self.segments[(sector >> self.segment_shift) as usize];
        let inside = sector & ((1 << self.segment_shift) - 1);
        Extent {
            sector,
            count: count.min((1 << self.segment_shift) - inside),
            device: segment.device,
            offset: segment.offset + inside * SECTOR_BYTES,
        }
    }

    /// Does any of the cache lie on this device?
    pub(crate) fn is_on(&self, device: DeviceId) -> bool {
        self.segments.iter().any(|segment| segment.device == device)
    }

    /// The `count` segments that hold the fewest blocks, and of equals the last.
    pub(crate) fn emptiest_segments(&self, count: usize) -> Vec<Segment> {
        let mut blocks = vec![0u32; self.segments.len()];
        for (frame, _) in self.policy.order() {
            let sector = self.index.first_sector(frame);
            if !self.index.block_is_empty(sector) {
                blocks[(sector >> self.segment_shift) as usize] += 1;
            }
        }
        let mut order: Vec<usize> = (0..self.segments.len()).rev().collect();
        order.sort_by_key(|&i| blocks[i]);
        order[..count].iter().map(|&i| self.segments[i]).collect()
    }

    /// The same cache on other segments: blocks on segments that stay keep their contents and their
    /// place in the replacement order, the others are forgotten. O(blocks).
    pub(crate) fn relocated(&self, segments: Vec<Segment>, disk_bytes: u64) -> Result<Cache, CommandError> {
        let mut new = Cache::new(self.config, segments, disk_bytes)?;
        let mut places: Vec<(Segment, u64)> =
            new.segments.iter().enumerate().map(|(i, segment)| (*segment, i as u64)).collect();
        places.sort_unstable();
        let frames_per_segment = self.segment_shift - self.block_shift;
        let moved_to = |frame: FrameNo| {
            let segment = self.segments[(frame.0 >> frames_per_segment) as usize];
            let place = places.binary_search_by_key(&segment, |(segment, _)| *segment).ok()?;
            let inside = frame.0 & ((1 << frames_per_segment) - 1);
            Some(FrameNo((places[place].1 << frames_per_segment) as u32 | inside))
        };
        let mut kept: Vec<(FrameNo, FrameNo, u8)> = self
            .policy
            .order()
            .into_iter()
            .filter(|(frame, _)| !self.index.block_is_empty(self.index.first_sector(*frame)))
            .filter_map(|(frame, heat)| moved_to(frame).map(|to| (frame, to, heat)))
            .collect();
        kept.iter().for_each(|(_, to, heat)| new.policy.restore(*to, *heat));
        kept.sort_unstable_by_key(|(_, to, _)| *to);
        new.index.adopt(&self.index, kept.iter().map(|(from, to, _)| (*from, *to)));
        Ok(new)
    }

    #[inline]
    fn frame_of(&self, sector: u64) -> FrameNo {
        FrameNo((sector >> self.block_shift) as u32)
    }
}
