//! Once a second, all who have disks on a datastore say what they want of it, and take their parts: the shards of this daemon,
//! and the hosts of its cluster ([0021](../../../../../docs/decisions/0021-qos-across-hosts.md)).

use std::sync::Arc;
use std::time::Duration;

use hob_engine::qos::{Report, Resource, agree};

use super::Manager;
use super::api_error::ApiError;
use crate::daemon::shard_api::ShardHandle;

/// Pause between agreements.
pub(super) const AGREE_EVERY: Duration = Duration::from_secs(1);

impl Manager {
    /// Begins to agree on all datastores that are bounded by their latency and have somebody to agree with.
    pub(super) fn agree_on_datastores(self: &Arc<Self>) {
        let shared: Vec<String> = {
            let inner = self.inner();
            let by_latency = inner.datastores.iter().filter(|store| store.spec.control.is_by_latency());
            let names = by_latency.map(|store| store.spec.name.clone());
            let is_shared = |name: &String| match self.shards_of(&inner, name).len() {
                0 => false,
                1 => self.cluster().is_some(),
                _ => true,
            };
            names.filter(is_shared).collect()
        };
        for name in shared {
            let manager = self.clone();
            tokio::spawn(async move {
                if let Err(error) = manager.agree_on(&name).await {
                    tracing::debug!("datastore {name}: {error}");
                }
            });
        }
    }

    async fn agree_on(self: &Arc<Self>, datastore: &str) -> Result<(), ApiError> {
        let (id, latency_ms, level, shards) = {
            let inner = self.inner();
            let (id, store) = inner.find_datastore(datastore)?;
            (id, store.spec.latency_ms, store.level, self.shards_of(&inner, datastore))
        };
        let resource = Resource::Datastore(id);
        let mut threshold_ns = u64::from(latency_ms) * 1_000_000;
        let mut own: Vec<(ShardHandle, Report)> = Vec::new();
        for (shard, _) in shards {
            if let Some(knee_ns) = shard.resource(resource).await?.window.knee_ns {
                threshold_ns = knee_ns;
            }
            if let Some(report) = shard.report_on(resource, level).await? {
                own.push((shard, report));
            }
        }
        let mut reports: Vec<Report> = own.iter().map(|(_, report)| *report).collect();
        if let Some(cluster) = self.cluster() {
            // Without the others there is nothing to agree on: each goes by what it sees.
            let told = cluster.exchange(datastore, &together(&reports)).await;
            reports.extend(told.map_err(|error| ApiError::failed(error.to_string()))?);
        }
        let Some(agreement) = agree(&reports, threshold_ns) else { return Ok(()) };
        if let Some(store) = self.inner().datastores.get_mut(usize::from(id.0)) {
            store.level = Some(agreement.level);
        }
        for (shard, report) in own {
            shard.take_part(resource, report.wanted_shares * agreement.in_flight_per_share);
        }
        Ok(())
    }
}

/// What several say, as one says it.
fn together(reports: &[Report]) -> Report {
    let sum = |of: fn(&Report) -> f64| reports.iter().map(of).sum::<f64>();
    let rate = sum(|report| report.rate);
    Report {
        wanted_shares: sum(|report| report.wanted_shares),
        rate,
        in_flight: sum(|report| report.in_flight),
        latency_ns: if rate > 0.0 { sum(|report| report.latency_ns * report.rate) / rate } else { 0.0 },
        waits: reports.iter().any(|report| report.waits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_speak_as_one() {
        let one = Report { wanted_shares: 500.0, rate: 10.0, in_flight: 2.0, latency_ns: 4e6, waits: false };
        let other = Report { wanted_shares: 100.0, rate: 30.0, in_flight: 1.0, latency_ns: 8e6, waits: true };
        let both = Report { wanted_shares: 600.0, rate: 40.0, in_flight: 3.0, latency_ns: 7e6, waits: true };
        assert_eq!(together(&[one, other]), both);
        assert_eq!(together(&[]), Report::default());
    }
}
