//! Reports of hosts about shared datastores (docs/decisions/0021): a key for each host and
//! datastore, under the host's lease. A report that its host has not written again for 4 seconds is
//! ignored, as if the host had no disks on the datastore.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use hob_control::etcd::{EtcdChange, EtcdEntry, EtcdError};
use hob_engine::qos::Report;
use serde::{Deserialize, Serialize};

use super::{Cluster, lock};

/// Maximum time for the writes and reads of one exchange.
const EXCHANGE_MAX: Duration = Duration::from_millis(800);

/// Maximum age of a valid report.
const FRESH: Duration = Duration::from_secs(4);

/// Maximum length of a valid value in bytes.
const VALUE_BYTES_MAX: usize = 4096;

#[derive(Serialize, Deserialize)]
struct Value {
    wanted_shares: f64,
    rate: f64,
    in_flight: f64,
    latency_ns: f64,
    waits: bool,
}

/// Keys of reports with their last revision, and the time at which that revision was first seen.
#[derive(Debug, Default)]
pub(super) struct ReportAges(Mutex<BTreeMap<String, (u64, Instant)>>);

impl ReportAges {
    /// Returns the reports of other hosts that are at most [`FRESH`] old. `prefix` is the key
    /// prefix of the datastore, `own` the key of this host.
    fn fresh(&self, now: Instant, prefix: &str, own: &str, entries: &[EtcdEntry]) -> Vec<Report> {
        let mut heard = lock(&self.0);
        heard.retain(|key, _| !key.starts_with(prefix) || entries.iter().any(|entry| entry.key == *key));
        let is_fresh = |entry: &&EtcdEntry| {
            let known = heard.entry(entry.key.clone()).or_insert((entry.revision, now));
            if known.0 != entry.revision {
                *known = (entry.revision, now);
            }
            entry.key != own && now - known.1 < FRESH
        };
        entries.iter().filter(is_fresh).filter_map(|entry| report(&entry.value)).collect()
    }
}

/// Parses a report; `None` if the report is malformed, or contains a number that is negative or not
/// finite.
fn report(value: &[u8]) -> Option<Report> {
    if value.len() > VALUE_BYTES_MAX {
        return None;
    }
    let Value { wanted_shares, rate, in_flight, latency_ns, waits } = serde_json::from_slice(value).ok()?;
    let is_possible = [wanted_shares, rate, in_flight, latency_ns].iter().all(|x| x.is_finite() && *x >= 0.0);
    is_possible.then_some(Report { wanted_shares, rate, in_flight, latency_ns, waits })
}

impl Cluster {
    /// Publishes this host's demand on a datastore, and returns the reports of the other hosts.
    /// Returns no reports while this host is not a member.
    pub(crate) async fn exchange(&self, datastore: &str, own: &Report) -> Result<Vec<Report>, EtcdError> {
        let Some(membership) = self.membership.borrow().clone() else { return Ok(Vec::new()) };
        let Report { wanted_shares, rate, in_flight, latency_ns, waits } = *own;
        let value = Value { wanted_shares, rate, in_flight, latency_ns, waits };
        let json =
            serde_json::to_vec(&value).unwrap_or_else(|error| panic!("plain values are JSON: {error}"));
        let prefix = self.names.wants(datastore);
        let key = format!("{prefix}{}", self.me.name);
        let put = EtcdChange::Put(key.clone(), json, membership.lease.0);
        self.etcd.txn(&[], &[put], EXCHANGE_MAX).await?;
        let entries = self.etcd.list(&prefix, EXCHANGE_MAX).await?;
        Ok(self.heard.fresh(Instant::now(), &prefix, &key, &entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        r#"{"wanted_shares":1000.0,"rate":50.5,"in_flight":3.0,"latency_ns":1e7,"waits":true}"#;

    fn entry(key: &str, value: &str, revision: u64) -> EtcdEntry {
        EtcdEntry { key: key.to_owned(), value: value.as_bytes().to_vec(), revision, lease: 7 }
    }

    #[test]
    fn reports_of_others_count_while_they_are_fresh() {
        let heard = ReportAges::default();
        let begin = Instant::now();
        let at = |seconds: u64, revision: u64| {
            let entries = [entry("/q/a", TEXT, 9), entry("/q/b", TEXT, revision)];
            heard.fresh(begin + Duration::from_secs(seconds), "/q/", "/q/a", &entries).len()
        };
        assert_eq!([at(0, 1), at(3, 1), at(4, 1), at(5, 2), at(8, 2), at(9, 2)], [1, 1, 0, 1, 1, 0]);
        assert!(heard.fresh(begin, "/q/", "/q/a", &[]).is_empty() && lock(&heard.0).is_empty());
    }

    #[test]
    fn impossible_values_are_ignored() {
        assert_eq!(report(TEXT.as_bytes()).map(|report| (report.rate, report.waits)), Some((50.5, true)));
        let negative = TEXT.replace("50.5", "-1");
        let long = format!("{}{}", " ".repeat(VALUE_BYTES_MAX), TEXT);
        for text in ["", "{}", "null", &negative, &TEXT.replace("50.5", "null"), &long] {
            assert!(report(text.as_bytes()).is_none(), "{text}");
        }
    }
}
