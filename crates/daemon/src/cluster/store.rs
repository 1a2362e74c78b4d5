//! Keys and values in etcd that the cluster's state machines use. Each key is a name under a
//! prefix, and each value is JSON.

use std::collections::BTreeMap;
use std::time::Duration;

use hob_control::etcd::{Etcd, EtcdChange, EtcdEntry, EtcdError, EtcdEvent, EtcdIs};
use hob_control::{ClusterHost, ClusterPool};
use hob_engine::cluster::{
    ADOPTED_MAX, Change, ClusterEvent, Found, Is, Key, LeaseId, Member, OwnershipRecord, OwnershipSnapshot,
    SecondCopy, Served, Txn, Value,
};
use serde::{Deserialize, Serialize};

/// Maximum length of a valid value in bytes.
const VALUE_BYTES_MAX: usize = 256 << 10;

/// Names of hob's keys in etcd.
#[derive(Clone, Debug)]
pub(super) struct Names {
    /// Prefix with a trailing slash.
    prefix: String,
}

/// Value of the key `host/NAME`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct HostValue {
    id: String,
    name: String,
    #[serde(default)]
    address: Option<String>,
    #[serde(default)]
    version: String,
    #[serde(default)]
    pools: Vec<ClusterPool>,
}

/// Value of the key `hold/DISK`, the ownership lock of a disk: id and name of the host that serves
/// the disk now.
#[derive(Serialize, Deserialize)]
struct HoldValue {
    id: String,
    host: String,
}

/// Value of the key `title/DISK`, the ownership record of a disk ([`OwnershipRecord`]). `id` and
/// `host` are the id and name of its last owner.
#[derive(Serialize, Deserialize)]
struct TitleValue {
    id: String,
    host: String,
    generation: u64,
    taken: bool,
    dirty: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    copy: Option<CopyValue>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    adopts: Option<ServedValue>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    adopted: Vec<ServedValue>,
}

/// Location of the replica of the disk's dirty data, as part of an ownership record.
#[derive(Serialize, Deserialize)]
struct CopyValue {
    id: String,
    host: String,
    loan: String,
    cache: String,
}

/// A former owner with its generation, as part of an ownership record.
#[derive(Serialize, Deserialize)]
struct ServedValue {
    id: String,
    host: String,
    generation: u64,
}

impl ServedValue {
    fn of(served: &Served) -> ServedValue {
        let Served { by: Member { name, id }, generation } = served;
        ServedValue { id: id.clone(), host: name.clone(), generation: *generation }
    }

    fn served(self) -> Served {
        Served { by: Member { name: self.host, id: self.id }, generation: self.generation }
    }
}

/// Information that a host publishes about itself, except its identity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct About {
    pub(crate) address: Option<String>,
    pub(crate) pools: Vec<ClusterPool>,
}

/// Error of reading the cluster's state in etcd.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum StoreError {
    /// The request to etcd failed.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// The value of this etcd key is not one that this hob can have written. It is from another
    /// program or an incompatible version of hob.
    #[error(
        "etcd's key {0} has a value that this hob does not understand; is another program using the prefix?"
    )]
    Strange(String),
}

impl Names {
    pub(super) fn new(prefix: &str) -> Names {
        Names { prefix: format!("{}/", prefix.trim_end_matches('/')) }
    }

    pub(super) fn of(&self, key: &Key) -> String {
        match key {
            Key::Host(name) => format!("{}host/{name}", self.prefix),
            Key::OwnershipLock(disk) => format!("{}hold/{disk}", self.prefix),
            Key::OwnershipRecord(disk) => format!("{}title/{disk}", self.prefix),
        }
    }

    /// Returns the prefix of all keys of a kind.
    fn kind(&self, kind: &str) -> String {
        format!("{}{kind}/", self.prefix)
    }

    /// Returns the prefix of orders to move disks.
    pub(super) fn moves(&self) -> String {
        self.kind("move")
    }

    /// Returns the prefix of the keys with the hosts' placement data.
    pub(super) fn learnt(&self) -> String {
        self.kind("learnt")
    }

    /// Returns the prefix of the keys with the hosts' reports about a datastore.
    pub(super) fn wants(&self, datastore: &str) -> String {
        format!("{}wants/{datastore}/", self.prefix)
    }

    pub(super) fn txn(&self, txn: &Txn, about: &About) -> (Vec<(String, EtcdIs)>, Vec<EtcdChange>) {
        let is = |is: &Is| match is {
            Is::Absent => EtcdIs::Absent,
            Is::At(revision) => EtcdIs::At(*revision),
            Is::Under(LeaseId(lease)) => EtcdIs::Under(*lease),
        };
        let change = |change: &Change| match change {
            Change::Put(key, value, lease) => {
                EtcdChange::Put(self.of(key), encode(value, about), lease.map_or(0, |lease| lease.0))
            }
            Change::Delete(key) => EtcdChange::Delete(self.of(key)),
        };
        let conditions = txn.conditions.iter().map(|(key, of)| (self.of(key), is(of)));
        (conditions.collect(), txn.changes.iter().map(change).collect())
    }

    /// Reads the ownership keys of several disks with one request, and returns them in the order of
    /// `disks`.
    pub(super) async fn looks(
        &self,
        etcd: &Etcd,
        disks: &[String],
        wait_max: Duration,
    ) -> Result<Vec<Result<OwnershipSnapshot, StoreError>>, EtcdError> {
        let keys = |disk: &String| {
            [Key::OwnershipRecord(disk.clone()), Key::OwnershipLock(disk.clone())].map(|key| self.of(&key))
        };
        let keys: Vec<[String; 2]> = disks.iter().map(keys).collect();
        let all: Vec<&str> = keys.iter().flatten().map(String::as_str).collect();
        let found = etcd.get(&all, wait_max).await?;
        let found: BTreeMap<&str, &EtcdEntry> =
            found.iter().map(|entry| (entry.key.as_str(), entry)).collect();
        let look = |[of_title, of_hold]: &[String; 2]| {
            Ok(OwnershipSnapshot {
                title: found.get(of_title.as_str()).map(|entry| title(entry)).transpose()?,
                hold: found.get(of_hold.as_str()).map(|entry| hold(entry)).transpose()?,
            })
        };
        Ok(keys.iter().map(look).collect())
    }

    /// Returns the prefixes of ownership records and of ownership locks.
    pub(super) fn titles_and_holds(&self) -> [String; 2] {
        [self.kind("title"), self.kind("hold")]
    }

    /// Returns the disk that an event concerns, and what the event means. The event comes from a
    /// watch on [`titles_and_holds`](Self::titles_and_holds).
    pub(super) fn news<'a>(&self, event: &'a EtcdEvent) -> Option<(&'a str, ClusterEvent)> {
        let [titles, holds] = self.titles_and_holds();
        match (event.key.strip_prefix(&titles), event.key.strip_prefix(&holds), &event.value) {
            (Some(disk), _, Some(value)) => {
                let TitleValue { taken, .. } = serde_json::from_slice(value).ok()?;
                Some((disk, ClusterEvent::OwnershipRecord { taken }))
            }
            // Only an operator deletes an ownership record; then no host counts as an earlier
            // owner.
            (Some(disk), _, None) => Some((disk, ClusterEvent::OwnershipRecord { taken: false })),
            (_, Some(disk), None) => Some((disk, ClusterEvent::HoldGone)),
            _ => None,
        }
    }

    /// Returns true if the event concerns an order to move a disk.
    pub(super) fn is_of_order(&self, event: &EtcdEvent) -> bool {
        event.key.starts_with(&self.moves())
    }

    /// Returns the member with this host name.
    pub(super) async fn look_up(
        &self,
        etcd: &Etcd,
        name: &str,
        wait_max: Duration,
    ) -> Result<Option<(Member, u64, LeaseId)>, StoreError> {
        let key = self.of(&Key::Host(name.to_owned()));
        let found = etcd.get(&[&key], wait_max).await?;
        let Some(entry) = found.first() else { return Ok(None) };
        let HostValue { id, name, .. } = value(entry)?;
        Ok(Some((Member { name, id }, entry.revision, LeaseId(entry.lease))))
    }

    /// Returns all hosts, without malformed entries.
    pub(super) async fn hosts(&self, etcd: &Etcd, wait_max: Duration) -> Result<Vec<ClusterHost>, EtcdError> {
        let host = |entry: &EtcdEntry| {
            let HostValue { id, name, address, version, pools } = value(entry).ok()?;
            Some(ClusterHost { name, id, address, version, pools, disks: 0 })
        };
        Ok(etcd.list(&self.kind("host"), wait_max).await?.iter().filter_map(host).collect())
    }

    /// Returns all disks that have or had an owner, by name.
    pub(super) async fn disks(
        &self,
        etcd: &Etcd,
        wait_max: Duration,
    ) -> Result<Vec<(String, OwnershipRecord, Option<Member>)>, EtcdError> {
        let (titles, holds) = (self.kind("title"), self.kind("hold"));
        let held = etcd.list(&holds, wait_max).await?;
        let held: BTreeMap<&str, &EtcdEntry> =
            held.iter().filter_map(|entry| Some((entry.key.strip_prefix(&holds)?, entry))).collect();
        let all = etcd.list(&titles, wait_max).await?;
        let disk = |entry: &EtcdEntry| {
            let name = entry.key.strip_prefix(&titles)?;
            let by = held.get(name).and_then(|entry| hold(entry).ok()).map(|found| found.value);
            Some((name.to_owned(), title(entry).ok()?.value, by))
        };
        Ok(all.iter().filter_map(disk).collect())
    }
}

fn encode(value: &Value, about: &About) -> Vec<u8> {
    let json = match value {
        Value::Host(Member { name, id }) => serde_json::to_vec(&HostValue {
            id: id.clone(),
            name: name.clone(),
            address: about.address.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pools: about.pools.clone(),
        }),
        Value::OwnershipLock(Member { name, id }) => {
            serde_json::to_vec(&HoldValue { id: id.clone(), host: name.clone() })
        }
        Value::OwnershipRecord(title) => serde_json::to_vec(&TitleValue {
            id: title.member.id.clone(),
            host: title.member.name.clone(),
            generation: title.generation,
            taken: title.taken,
            dirty: title.dirty,
            copy: title.copy.as_ref().map(|SecondCopy { member, loan, cache }| CopyValue {
                id: member.id.clone(),
                host: member.name.clone(),
                loan: loan.clone(),
                cache: cache.clone(),
            }),
            adopts: title.adopts.as_ref().map(ServedValue::of),
            adopted: title.adopted.iter().map(ServedValue::of).collect(),
        }),
    };
    json.unwrap_or_else(|error| panic!("plain values are JSON: {error}"))
}

fn value<T: serde::de::DeserializeOwned>(entry: &EtcdEntry) -> Result<T, StoreError> {
    let strange = || StoreError::Strange(entry.key.clone());
    if entry.value.len() > VALUE_BYTES_MAX {
        return Err(strange());
    }
    serde_json::from_slice(&entry.value).map_err(|_| strange())
}

fn title(entry: &EtcdEntry) -> Result<Found<OwnershipRecord>, StoreError> {
    let TitleValue { id, host, generation, taken, dirty, copy, adopts, adopted } = value(entry)?;
    if generation >= u64::MAX / 2 || adopted.len() > ADOPTED_MAX {
        return Err(StoreError::Strange(entry.key.clone()));
    }
    let copy = copy.map(|CopyValue { id, host, loan, cache }| SecondCopy {
        member: Member { name: host, id },
        loan,
        cache,
    });
    let title = OwnershipRecord {
        member: Member { name: host, id },
        generation,
        taken,
        dirty,
        copy,
        adopts: adopts.map(ServedValue::served),
        adopted: adopted.into_iter().map(ServedValue::served).collect(),
    };
    Ok(Found { value: title, revision: entry.revision, lease: LeaseId(entry.lease) })
}

fn hold(entry: &EtcdEntry) -> Result<Found<Member>, StoreError> {
    let HoldValue { id, host } = value(entry)?;
    let member = Member { name: host, id };
    Ok(Found { value: member, revision: entry.revision, lease: LeaseId(entry.lease) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str, value: &str) -> EtcdEntry {
        EtcdEntry { key: key.to_owned(), value: value.as_bytes().to_vec(), revision: 3, lease: 7 }
    }

    #[test]
    fn values_come_back() {
        let member = Member { name: "a".to_owned(), id: "x".to_owned() };
        let plain = OwnershipRecord {
            member: member.clone(),
            generation: 4,
            taken: true,
            dirty: true,
            copy: None,
            adopts: None,
            adopted: Vec::new(),
        };
        let served = Served { by: member.clone(), generation: 3 };
        let copy = SecondCopy { member: member.clone(), loan: "l".to_owned(), cache: "c".to_owned() };
        let full = OwnershipRecord {
            copy: Some(copy),
            adopts: Some(served.clone()),
            adopted: vec![served; ADOPTED_MAX],
            ..plain.clone()
        };
        for given in [plain, full] {
            let text =
                String::from_utf8(encode(&Value::OwnershipRecord(given.clone()), &About::default())).unwrap();
            assert_eq!(title(&entry("t", &text)).unwrap().value, given);
        }
        // A record as a version of hob without replicas writes it.
        let old = r#"{"id":"x","host":"a","generation":4,"taken":true,"dirty":true}"#;
        assert_eq!(title(&entry("t", old)).unwrap().value.copy, None);
        let text =
            String::from_utf8(encode(&Value::OwnershipLock(member.clone()), &About::default())).unwrap();
        let found = hold(&entry("h", &text)).unwrap();
        assert_eq!((found.value, found.revision, found.lease), (member, 3, LeaseId(7)));
    }

    #[test]
    fn an_invalid_record_does_not_count_as_absent() {
        for text in ["", "{}", "7", r#"{"id":"x","host":"a","generation":-1,"taken":true,"dirty":false}"#] {
            let error = title(&entry("/hob/title/d", text)).unwrap_err().to_string();
            assert!(error.contains("/hob/title/d"), "{error}");
        }
        let huge = r#"{"id":"x","host":"a","generation":18446744073709551615,"taken":true,"dirty":false}"#;
        assert!(title(&entry("t", huge)).is_err());
    }

    #[test]
    fn events_are_news_of_disks() {
        let names = Names::new("/hob");
        let event = |key: &str, value: Option<&str>| EtcdEvent {
            key: key.to_owned(),
            value: value.map(|text| text.as_bytes().to_vec()),
            revision: 3,
        };
        let taken = r#"{"id":"x","host":"a","generation":1,"taken":true,"dirty":false}"#;
        for (key, value, expected) in [
            ("/hob/title/d", Some(taken), Some(("d", ClusterEvent::OwnershipRecord { taken: true }))),
            ("/hob/title/d", None, Some(("d", ClusterEvent::OwnershipRecord { taken: false }))),
            ("/hob/hold/d", None, Some(("d", ClusterEvent::HoldGone))),
            ("/hob/hold/d", Some("{}"), None),
            ("/hob/title/d", Some("{}"), None),
            ("/other/title/d", Some(taken), None),
        ] {
            assert_eq!(names.news(&event(key, value)), expected, "{key} {value:?}");
        }
    }

    #[test]
    fn keys_lie_under_the_prefix() {
        for prefix in ["/hob", "/hob/"] {
            let names = Names::new(prefix);
            assert_eq!(names.of(&Key::OwnershipRecord("vm1".to_owned())), "/hob/title/vm1");
        }
    }
}
