//! Snapshot of the whole daemon for the dashboard.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use hob_control::{
    DeviceFigures, DiskFigures, DiskNow, DiskQos, IoFigures, OutcomeFigures, PoolNow, Snapshot,
};
use hob_engine::outcome::OUTCOMES;
use hob_engine::stats::{DeviceIoStats, DiskStats};
use hob_engine::units::SECTOR_BYTES;

use super::Observe;
use super::health::{PING_MAX, sum};
use crate::hardware::DeviceCounts;

impl Observe {
    /// Returns the state of all pools, disks and datastores. Values of a hung shard are missing.
    pub(crate) async fn snapshot(&self) -> Snapshot {
        let answers = self.ask_shards(PING_MAX).await;
        let shards: Vec<bool> = answers.iter().map(Option::is_some).collect();
        let mut due: BTreeMap<String, DiskQos> =
            self.qos.disks().into_iter().map(|qos| (qos.disk.clone(), qos)).collect();
        let mut disks = Vec::new();
        self.round(&shards, |disk, stats| {
            let block_bytes = disk.cache.as_ref().map_or(0, |cache| cache.block_size.bytes());
            let figures = stats.map(|stats| figures(stats, block_bytes));
            disks.push(DiskNow { disk: disk.clone(), qos: due.remove(&disk.name), figures });
        })
        .await;
        let datastores = self.datastores_now(&shards).await;
        let counts = sum(answers);
        let pools = self.pools_with(counts.as_ref()).into_iter().map(|(pool, devices)| PoolNow {
            pool,
            devices: devices.into_iter().map(|counts| counts.map(device)).collect(),
        });
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Snapshot {
            at_ms: u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX),
            version: self.version(),
            health: self.problems(&shards).into(),
            pools: pools.collect(),
            disks,
            datastores,
            cluster: self.cluster_view(),
            tasks: self.tasks_view(),
        }
    }
}

fn device(counts: DeviceCounts) -> DeviceFigures {
    let DeviceCounts { ios, errors, read_bytes, written_bytes, in_flight } = counts;
    DeviceFigures { ios, errors, read_bytes, written_bytes, in_flight }
}

fn figures(stats: &DiskStats, block_bytes: u64) -> DiskFigures {
    let happened = stats.outcomes.iter().zip(OUTCOMES).filter(|(outcome, _)| outcome.count > 0);
    let outcomes = happened.map(|(outcome, row)| OutcomeFigures {
        class: row.class.to_owned(),
        reason: row.reason.to_owned(),
        count: outcome.count,
        latency_sum_ns: outcome.latency.sum_ns(),
    });
    DiskFigures {
        elapsed_ns: stats.elapsed_ns,
        reads: stats.reads,
        writes: stats.writes,
        read_bytes: stats.read_bytes,
        write_bytes: stats.write_bytes,
        read_hits: stats.read_hits,
        memory_hits: stats.memory_hits,
        in_flight: stats.in_flight,
        outcomes: outcomes.collect(),
        latency: stats.latency().buckets().map(|(up_to_ns, count)| [up_to_ns, count]).collect(),
        flash: io(&stats.flash),
        backing: io(&stats.backing),
        cache_bytes: stats.blocks * block_bytes,
        used_bytes: stats.blocks_cached * block_bytes,
        dirty_bytes: stats.sectors_dirty * SECTOR_BYTES,
        destaged_bytes: stats.destaged_bytes,
        is_draining: stats.draining,
    }
}

fn io(stats: &DeviceIoStats) -> IoFigures {
    let &DeviceIoStats { ios, errors, units, waited_ns, read_bytes, write_bytes, total_ns } = stats;
    IoFigures { ios, errors, units, waited_ns, total_ns, read_bytes, write_bytes }
}
