//! What disks are asked for, as the API gives it.

use std::sync::Arc;

use hob_control::{DiskHistograms, RequestBucket, RequestHistogram};
use hob_engine::units::Instant;
use hob_engine::vscsi::{CLASSES, Histograms, METRICS};

use super::Manager;
use super::refusal::Refusal;
use crate::daemon::shard_api::Counter;

impl Manager {
    /// What a disk is asked for.
    pub(crate) async fn histograms(self: &Arc<Self>, name: &str) -> Result<DiskHistograms, Refusal> {
        let (shard, id) = {
            let inner = self.inner();
            let disk = inner.disk(name)?;
            (disk.shard()?, disk.id)
        };
        let (now, histograms) = shard.histograms(id).await?;
        Ok(report(name, now, &histograms))
    }

    /// Begins them anew.
    pub(crate) async fn histograms_reset(self: &Arc<Self>, name: &str) -> Result<DiskHistograms, Refusal> {
        self.count_anew(name, Counter::Histograms).await?;
        self.histograms(name).await
    }

    async fn count_anew(self: &Arc<Self>, name: &str, counter: Counter) -> Result<(), Refusal> {
        let (shard, id) = {
            let inner = self.inner();
            let disk = inner.disk(name)?;
            (disk.shard()?, disk.id)
        };
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
