//! LRU miss-ratio curves for each block size. The curves are the start of the search for the best
//! cache.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};
use hob_engine::sizing::Curve;

use super::input::{REGION_BYTES, Sample};
use super::reporter::Reporter;
use super::{BlockSize, POINT, SizePoint, WriteBack};
use crate::jobs::run_all;
use crate::mrc::{self, Mode};
use hob_trace::Op;

/// Maximum number of sectors in the blocks of one curve; larger block sizes are left out. Memory
/// use grows with the number of sectors. The blocks of a curve for 256 KiB can have 64 times as
/// many sectors as the sample touches.
const BLOCK_SECTORS_MAX: u64 = 32 << 20;
/// Number of points of a curve in the report.
const POINTS: u32 = 64;

/// Miss-ratio curve of one block size, scaled from the sample to the whole trace.
pub(super) struct BlockCurve<'a> {
    pub(super) block_bytes: u64,
    sample: &'a Sample<'a>,
    misses: Curve,
}

/// Start of the search for the best cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start {
    pub(super) block_bytes: u64,
    pub(super) cache_bytes: u64,
    /// Largest block size that the search considers.
    pub(super) block_bytes_max: u64,
}

/// Computes the LRU miss-ratio curve of a write-through cache for each block size. A read is a hit
/// only if the cache has all its blocks. Block sizes whose blocks would have more than
/// [`BLOCK_SECTORS_MAX`] sectors are left out.
pub(super) fn by_block_size<'a>(
    sample: &'a Sample<'a>,
    threads: usize,
    reporter: &Reporter<'_>,
) -> Result<Vec<BlockCurve<'a>>> {
    let sizes: Vec<u64> = (12..=REGION_BYTES.ilog2()).map(|shift| 1 << shift).collect();
    let blocks = sample.blocks(&sizes);
    let sectors = |index: usize| blocks[index] * (sizes[index] / sizes[0]);
    let count =
        (0..sizes.len()).take_while(|index| *index == 0 || sectors(*index) <= BLOCK_SECTORS_MAX).count();
    let stop = AtomicBool::new(false);
    let work = |block_bytes: &u64| -> Result<BlockCurve<'a>> {
        let records = sample.records.iter().copied().take_while(|_| !stop.load(Ordering::Relaxed));
        let curves = mrc::exact(records, *block_bytes, Mode::WriteThrough)?;
        Ok(BlockCurve { block_bytes: *block_bytes, sample, misses: curves.read_misses() })
    };
    let tell = |_| stop.store(!reporter.report(), Ordering::Relaxed);
    let Some(curves) = run_all(&sizes[..count], threads, &stop, work, tell) else { bail!("interrupted") };
    reporter.end_run()?;
    curves.into_iter().collect()
}

/// Returns the cache sizes of a curve in the report, in blocks. Each doubling of the size has the
/// same number of points. The last size is the size above which more blocks add no hits.
pub(super) fn report_sizes(misses: &Curve) -> impl Iterator<Item = u64> + use<> {
    let end = misses.points().last().map_or(1, |point| point.blocks).max(1);
    let blocks = move |i: u32| (end as f64).powf(f64::from(i) / f64::from(POINTS - 1)).round() as u64;
    let mut sizes: Vec<u64> = (0..POINTS).map(blocks).collect();
    sizes.dedup();
    sizes.into_iter()
}

impl BlockCurve<'_> {
    fn bytes(&self, blocks: u64) -> u64 {
        ((blocks as f64 / self.sample.rate).round() as u64).saturating_mul(self.block_bytes)
    }

    /// Returns the hit ratio of a cache of unlimited size.
    pub(super) fn best(&self) -> f64 {
        let points = self.misses.points();
        match points.len() {
            1 => 0.0,
            _ => self.sample.corrected(1.0 - points[points.len() - 1].miss_ratio),
        }
    }

    /// Returns the hit ratio of a cache of `cache_bytes` bytes.
    pub(super) fn hit_ratio(&self, cache_bytes: u64) -> f64 {
        let blocks = (cache_bytes / self.block_bytes) as f64 * self.sample.rate;
        match blocks.round() as u64 {
            0 => 0.0,
            blocks => self.sample.corrected(1.0 - self.misses.miss_ratio_at(blocks)),
        }
    }

    /// Returns the size of the smallest cache whose hit ratio is at least `hit_ratio`, bytes;
    /// `None` if no size has it.
    fn size_for(&self, hit_ratio: f64) -> Option<u64> {
        // The margin compensates rounding of hit ratios that come from the curve itself.
        let wanted = self.sample.uncorrected(hit_ratio) - 1e-12;
        self.misses.size_for(wanted).map(|blocks| self.bytes(blocks.max(1)))
    }

    pub(super) fn knee(&self) -> Option<SizePoint> {
        let knee = self.misses.knee()?;
        let read_hit_ratio = self.sample.corrected(1.0 - knee.miss_ratio);
        Some(SizePoint { cache_bytes: self.bytes(knee.blocks), read_hit_ratio })
    }

    /// Returns the report of one block size, with the hit ratio at `cache_bytes`. If `cache_bytes`
    /// is 0, the report has the hit ratio at the smallest size that reaches the target.
    pub(super) fn report(&self, target: f64, cache_bytes: u64) -> BlockSize {
        let target_bytes = self.size_for(target).filter(|_| self.best() > 0.0);
        let at = if cache_bytes == 0 { target_bytes.unwrap_or(0) } else { cache_bytes };
        let point = |blocks: u64| {
            let miss_ratio = self.misses.miss_ratio_at(blocks);
            SizePoint {
                cache_bytes: self.bytes(blocks),
                read_hit_ratio: self.sample.corrected(1.0 - miss_ratio),
            }
        };
        BlockSize {
            block_bytes: self.block_bytes,
            target_bytes,
            knee: self.knee(),
            read_hit_ratio: self.hit_ratio(at),
            curve: report_sizes(&self.misses).map(point).collect(),
        }
    }
}

/// Returns the smallest cache size that reaches the target, and a block size. The block size is the
/// largest one whose hit ratio at that cache size is at most half a percentage point below the
/// best. Larger blocks need less memory for the index. Returns `None` if no read is ever a hit.
pub(super) fn start(curves: &[BlockCurve<'_>], target: f64) -> Option<Start> {
    let target = curves.iter().map(BlockCurve::best).fold(0.0, f64::max).min(target);
    let reaching = curves.iter().filter(|curve| curve.best() > 0.0);
    let cache_bytes = reaching.filter_map(|curve| curve.size_for(target)).min()?;
    let hits = |curve: &BlockCurve<'_>| curve.hit_ratio(cache_bytes);
    let best = curves.iter().map(hits).fold(0.0, f64::max);
    let as_good = curves.iter().filter(|curve| hits(curve) >= best - POINT / 2.0);
    let block_bytes = as_good.map(|curve| curve.block_bytes).max().expect("the best curve qualifies");
    let block_bytes_max = curves.iter().map(|curve| curve.block_bytes).max().expect("there are curves");
    Some(Start { block_bytes, cache_bytes, block_bytes_max })
}

/// Returns how many writes to the backing write-back saves, or `None` for a trace without writes.
pub(super) fn write_back(
    sample: &Sample<'_>,
    block_bytes: u64,
    cache_bytes: u64,
    reporter: &Reporter<'_>,
) -> Result<Option<WriteBack>> {
    if !sample.records.iter().any(|record| record.op == Op::Write) {
        return Ok(None);
    }
    let records = sample.records.iter().copied().take_while(|_| reporter.next_request());
    let curves = mrc::exact(records, block_bytes, Mode::WriteBack)?;
    reporter.end_run()?;
    let blocks = (cache_bytes / block_bytes) as f64 * sample.rate;
    let (at, totals) = (curves.at((blocks.round() as u64).max(1)), curves.totals());
    let ratio = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
    Ok(Some(WriteBack {
        absorbed_ratio: ratio(at.absorbed_bytes, totals.write_bytes),
        writes_saved_ratio: 1.0 - ratio(at.backing_writes.min(totals.writes), totals.writes),
    }))
}
