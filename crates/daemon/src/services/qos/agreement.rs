//! Rate agreement for latency-controlled datastores. Once a second, each shard with disks of a
//! datastore reports the demand of these disks, and receives its part of the datastore's rate. The
//! hosts of a cluster agree in the same way
//! ([0021](../../../../../docs/decisions/0021-qos-across-hosts.md)).

use std::sync::Arc;
use std::time::Duration;

use hob_engine::qos::{Report, Resource, agree};

use super::QosService;
use crate::api_error::{ApiError, Result};
use crate::background::spawn;
use crate::cluster::Cluster;
use crate::shard_api::ShardHandle;

/// Interval between two agreements.
pub(in crate::services) const AGREE_EVERY: Duration = Duration::from_secs(1);

impl QosService {
    /// Starts an agreement on every latency-controlled datastore that several shards or hosts use.
    pub(in crate::services) fn agree_on_datastores(&self, cluster: Option<&Arc<Cluster>>) {
        let shards_min = if cluster.is_some() { 1 } else { 2 };
        for name in self.latency_controlled(shards_min) {
            let (service, cluster) = (self.clone(), cluster.cloned());
            spawn(async move {
                let exchange = async |report| match &cluster {
                    Some(cluster) => {
                        let told = cluster.exchange(&name, &report).await;
                        told.map_err(|error| ApiError::failed(error.to_string()))
                    }
                    None => Ok(Vec::new()),
                };
                if let Err(error) = service.agree_on(&name, exchange).await {
                    tracing::debug!("datastore {name}: {error}");
                }
            });
        }
    }

    /// Returns the latency-controlled datastores with disks on at least `shards_min` shards.
    fn latency_controlled(&self, shards_min: usize) -> Vec<String> {
        let rules = self.rules();
        let inner = self.registry.inner();
        let by_latency = rules.datastores.values().filter(|store| store.spec.control.is_by_latency());
        let names = by_latency.map(|store| &store.spec.name);
        names.filter(|name| rules.shards_of(&inner, name).len() >= shards_min).cloned().collect()
    }

    /// Lets the shards and hosts that use a datastore agree on their parts of its rate. `exchange`
    /// sends this host's report to the peer hosts and returns their reports. If the exchange fails,
    /// there is no agreement, and each host uses its own measurements.
    async fn agree_on(
        &self,
        datastore: &str,
        exchange: impl AsyncFnOnce(Report) -> Result<Vec<Report>>,
    ) -> Result<()> {
        let (id, latency_ms, level, shards) = {
            let rules = self.rules();
            let (id, store) = rules.find_datastore(datastore)?;
            let shards = rules.shards_of(&self.registry.inner(), datastore);
            (id, store.spec.latency_ms, store.level, shards)
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
        reports.extend(exchange(together(&reports)).await?);
        let Some(agreement) = agree(&reports, threshold_ns) else { return Ok(()) };
        if let Some(store) = self.rules().datastores.get_mut(&id.0) {
            store.level = Some(agreement.level);
        }
        for (shard, report) in own {
            shard.take_part(resource, report.wanted_shares * agreement.in_flight_per_share);
        }
        Ok(())
    }
}

/// Combines the reports of several shards about a datastore into the report of this host.
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
