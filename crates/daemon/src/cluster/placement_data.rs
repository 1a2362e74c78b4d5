//! Placement data: each host publishes the size of its flash and the miss-ratio curves of its disks
//! under the etcd key `learnt/HOST`. The key is bound to the host's lease. Only placement advice
//! uses this data ([`hob_engine::placement`]).

use hob_control::check_name;
use hob_control::etcd::{EtcdChange, EtcdEntry, EtcdError};
use hob_engine::sizing::{Curve, CurvePoint};
use serde::{Deserialize, Serialize};

use super::{Cluster, LIST_MAX, QUESTION_MAX};

/// Maximum length of a value in bytes. Etcd accepts 1.5 MiB per request, and a request contains the
/// value in base64, which is longer.
const VALUE_BYTES_MAX: usize = 768 << 10;

/// Maximum number of points of all miss-ratio curves of a host. `POINTS_OF_ONE` limits the points
/// of one curve.
const POINTS_MAX: usize = 16 << 10;
const POINTS_OF_ONE: std::ops::RangeInclusive<usize> = 4..=24;

/// Miss ratios are published in units of 1/`PARTS`.
const PARTS: f64 = 10_000.0;

/// Placement data of a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct HostPlacement {
    #[serde(skip)]
    pub(crate) name: String,
    /// Flash for caches of the host's disks, used or not, in bytes.
    pub(crate) flash: u64,
    /// Part of this flash that no cache uses, in bytes.
    pub(crate) free: u64,
    /// Disks that the host serves as their owner.
    pub(crate) disks: Vec<DiskPlacement>,
}

/// Placement data of a disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct DiskPlacement {
    pub(crate) name: String,
    /// Size of the cache in bytes; 0 for none.
    pub(crate) cache: u64,
    /// Block size to which the miss-ratio curve applies, in bytes.
    pub(crate) block: u64,
    /// Number of NBD and vhost-user clients of the disk.
    pub(crate) users: u64,
    /// Reads of the disk per second, a moving average.
    pub(crate) reads: f64,
    /// Requests of the disk per second, a moving average.
    pub(crate) load: f64,
    /// Fraction of reads served from flash or memory since the disk was opened, 0 to 1.
    pub(crate) hits: f64,
    /// Reason why the disk cannot move.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fixed: Option<String>,
    /// Points of the miss-ratio curve: cache size in blocks, and miss ratio in units of 1/10 000.
    pub(crate) curve: Vec<(u64, u32)>,
}

impl DiskPlacement {
    /// Sets the miss-ratio curve, reduced to the number of points that a host with `disks` disks
    /// may publish for each disk.
    pub(crate) fn set_curve(&mut self, curve: &Curve, disks: usize) {
        let most = (POINTS_MAX / disks.max(1)).clamp(*POINTS_OF_ONE.start(), *POINTS_OF_ONE.end());
        let mut off_max = 0.002;
        let mut thin = curve.thinned(off_max);
        while thin.points().len() > most && off_max < 1.0 {
            off_max *= 2.0;
            thin = curve.thinned(off_max);
        }
        let point = |point: &CurvePoint| (point.blocks, (point.miss_ratio * PARTS).round() as u32);
        self.curve = thin.points().iter().map(point).collect();
    }

    /// Returns the miss-ratio curve. If the points form no valid curve, returns a curve without
    /// hits at any size.
    pub(crate) fn curve(&self) -> Curve {
        let point =
            |&(blocks, parts): &(u64, u32)| CurvePoint { blocks, miss_ratio: f64::from(parts) / PARTS };
        let none = || Curve::new(vec![CurvePoint { blocks: 0, miss_ratio: 1.0 }]);
        Curve::checked(self.curve.iter().map(point).collect()).unwrap_or_else(|_| none())
    }
}

/// Parses the placement data of a host. Returns `None` if the data or the host's name is invalid.
/// Leaves out disks with invalid data.
fn learnt(name: &str, entry: &EtcdEntry) -> Option<HostPlacement> {
    check_name(name).ok()?;
    let small = Some(&entry.value).filter(|value| value.len() <= VALUE_BYTES_MAX)?;
    let mut host: HostPlacement = serde_json::from_slice(small).ok()?;
    let is_amount = |number: f64| number.is_finite() && number >= 0.0;
    host.disks.retain(|disk| {
        check_name(&disk.name).is_ok()
            && disk.block > 0
            && [disk.reads, disk.load, disk.hits].into_iter().all(is_amount)
    });
    Some(HostPlacement { name: name.to_owned(), ..host })
}

impl Cluster {
    /// Publishes the placement data for the other hosts. Does nothing while this host is not a
    /// member of the cluster.
    pub(crate) async fn tell(&self, host: &HostPlacement) -> Result<(), EtcdError> {
        let Some(membership) = self.membership.borrow().clone() else { return Ok(()) };
        let mut json = encode(host);
        if json.len() > VALUE_BYTES_MAX {
            // The data is too long for one key, so the least active disks are left out.
            let mut fewer = host.clone();
            fewer.disks.sort_by(|one, other| other.load.total_cmp(&one.load));
            fewer.disks.truncate(host.disks.len() * VALUE_BYTES_MAX / json.len() / 2);
            json = encode(&fewer);
        }
        let key = format!("{}{}", self.names.learnt(), self.me.name);
        let put = EtcdChange::Put(key, json, membership.lease.0);
        self.etcd.txn(&[], &[put], QUESTION_MAX).await.map(drop)
    }

    /// Returns the placement data of all hosts, by name.
    pub(crate) async fn told(&self) -> Result<Vec<HostPlacement>, EtcdError> {
        let prefix = self.names.learnt();
        let entries = self.etcd.list(&prefix, LIST_MAX).await?;
        Ok(entries.iter().filter_map(|entry| learnt(entry.key.strip_prefix(&prefix)?, entry)).collect())
    }
}

fn encode(host: &HostPlacement) -> Vec<u8> {
    serde_json::to_vec(host).unwrap_or_else(|error| panic!("plain values are JSON: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(value: Vec<u8>) -> EtcdEntry {
        EtcdEntry { key: String::new(), value, revision: 1, lease: 7 }
    }

    #[test]
    fn a_curve_survives_in_few_points() {
        let point = |blocks: u64| CurvePoint { blocks, miss_ratio: 1.0 / (1.0 + blocks as f64 / 50.0) };
        let curve = Curve::new((0..2000).map(point).collect());
        for disks in [1, 4096] {
            let mut disk = DiskPlacement { name: "d".into(), block: 4096, ..DiskPlacement::default() };
            disk.set_curve(&curve, disks);
            assert!(disk.curve.len() <= 24 && (disks == 1 || disk.curve.len() <= 4), "{:?}", disk.curve);
            let back = disk.curve();
            let off = |blocks: u64| (back.miss_ratio_at(blocks) - curve.miss_ratio_at(blocks)).abs();
            let off_max = (0..3000).map(off).fold(0.0, f64::max);
            assert!(off_max < if disks == 1 { 0.02 } else { 0.2 }, "{off_max}");
            let host = HostPlacement { name: "h".into(), flash: 9, free: 1, disks: vec![disk] };
            assert_eq!(learnt("h", &entry(encode(&host))), Some(host));
        }
    }

    #[test]
    fn impossible_values_are_ignored() {
        for text in ["", "[]", r#"{"flash":-1,"free":0,"disks":[]}"#] {
            assert_eq!(learnt("h", &entry(text.into())), None, "{text}");
        }
        let odd = r#"{"flash":1,"free":1,"disks":[{"name":"a/b","cache":0,"block":1,"users":0,"reads":1,"load":1,"hits":0,"curve":[]},
            {"name":"d","cache":0,"block":0,"users":0,"reads":1,"load":1,"hits":0,"curve":[]},
            {"name":"e","cache":0,"block":1,"users":0,"reads":-1,"load":1,"hits":0,"curve":[]},
            {"name":"f","cache":0,"block":1,"users":0,"reads":1,"load":1,"hits":0,"curve":[[3,4],[2,99999]]}]}"#;
        let host = learnt("h", &entry(odd.into())).unwrap();
        let names: Vec<&str> = host.disks.iter().map(|disk| disk.name.as_str()).collect();
        assert_eq!(names, ["f"]);
        assert_eq!(host.disks[0].curve().miss_ratio_at(1 << 40), 1.0);
    }
}
