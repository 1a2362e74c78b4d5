//! Request histograms and miss-ratio curves of disks, converted into API types.

use hob_control::{
    BlockCurve, CurveCache, CurvePoint, DiskCurve, DiskHistograms, RequestBucket, RequestHistogram, Size,
};
use hob_engine::sizing::{BlockSizing, Sizing};
use hob_engine::units::{DiskId, Instant};
use hob_engine::vscsi::{CLASSES, Histograms, METRICS};

use super::Observe;
use super::figures::{percent, recent};
use super::quality::Latest;
use crate::api_error::Result;
use crate::shard_api::{Counter, ShardHandle};

/// Maximum difference between the hit ratios of a miss-ratio curve and of its simplified form.
const OFF_MAX: f64 = 0.001;

impl Observe {
    pub(crate) async fn histograms(&self, name: &str) -> Result<DiskHistograms> {
        let (shard, id) = self.place_of(name)?;
        let (now, histograms) = shard.histograms(id).await?;
        Ok(report(name, now, &histograms))
    }

    pub(crate) async fn histograms_reset(&self, name: &str) -> Result<DiskHistograms> {
        self.count_anew(name, Counter::Histograms).await?;
        self.histograms(name).await
    }

    /// Returns the predicted hit ratios of other cache sizes for a disk.
    pub(crate) async fn curve(&self, name: &str) -> Result<DiskCurve> {
        let (shard, id) = self.place_of(name)?;
        let sizing = shard.sizing(id).await?;
        let (cache, latest) = {
            let inner = self.registry.inner();
            let disk = inner.disk(name)?;
            (disk.view(&inner).cache, disk.quality.latest())
        };
        let cache = cache.map(|cache| CurveCache {
            expected_hit_percent: 100.0 * expected(&sizing, cache.room, cache.block_size),
            size: cache.room,
            block_size: cache.block_size,
            policy: cache.policy,
            mode: cache.mode,
        });
        Ok(curves(name, &sizing, cache, latest))
    }

    /// Clears the miss-ratio curves of a disk, which are then estimated from new requests only.
    pub(crate) async fn curve_reset(&self, name: &str) -> Result<DiskCurve> {
        self.count_anew(name, Counter::Sizing).await?;
        self.curve(name).await
    }

    fn place_of(&self, name: &str) -> Result<(ShardHandle, DiskId)> {
        let inner = self.registry.inner();
        let disk = inner.disk(name)?;
        Ok((disk.shard()?, disk.id))
    }

    async fn count_anew(&self, name: &str, counter: Counter) -> Result<()> {
        let (shard, id) = self.place_of(name)?;
        Ok(shard.reset(id, counter).await?)
    }
}

fn report(disk: &str, now: Instant, histograms: &Histograms) -> DiskHistograms {
    let one = |row: &hob_engine::vscsi::MetricInfo, (class, name)| {
        let found = histograms.get(class, row.metric);
        let buckets = found.buckets().map(|(up_to, count)| RequestBucket { up_to, count });
        RequestHistogram {
            metric: row.name.to_owned(),
            title: row.title.to_owned(),
            unit: row.unit.to_owned(),
            class: String::from(name),
            count: found.count(),
            min: found.min(),
            max: found.max(),
            mean: found.mean(),
            buckets: buckets.collect(),
        }
    };
    let all = METRICS.iter().flat_map(|row| CLASSES.map(|class| one(row, class)));
    DiskHistograms { disk: disk.to_owned(), elapsed_ns: now - histograms.since(), histograms: all.collect() }
}

/// Returns the hit ratio that the curves predict for a cache.
pub(in crate::services) fn expected(sizing: &Sizing, room: Size, block_size: Size) -> f64 {
    let not_larger = sizing.block_sizes.iter().rfind(|size| size.block_bytes <= block_size.0);
    not_larger.map_or(0.0, |size| 1.0 - size.curve.miss_ratio_at(room.0 / size.block_bytes))
}

fn curves(disk: &str, sizing: &Sizing, cache: Option<CurveCache>, latest: Latest) -> DiskCurve {
    let Sizing { elapsed_ns, seen, recent: newest, bytes, block_sizes } = sizing;
    let one = |size: &BlockSizing| BlockCurve {
        block_size: Size(size.block_bytes),
        accesses: size.accesses,
        samples: size.samples.into(),
        sample_rate: size.rate,
        footprint_bytes: size.blocks.saturating_mul(size.block_bytes),
        points: size
            .curve
            .thinned(OFF_MAX)
            .points()
            .iter()
            .map(|point| CurvePoint {
                cache_bytes: point.blocks.saturating_mul(size.block_bytes),
                miss_ratio: point.miss_ratio,
            })
            .collect(),
    };
    DiskCurve {
        disk: disk.to_owned(),
        elapsed_ns: *elapsed_ns,
        reads: seen.reads,
        read_bytes: seen.read_bytes,
        hit_percent: percent(seen.read_hits, seen.reads),
        writes: seen.writes,
        write_bytes: seen.write_bytes,
        recent: recent(newest, latest),
        memory_bytes: *bytes,
        cache,
        block_sizes: block_sizes.iter().map(one).collect(),
    }
}
