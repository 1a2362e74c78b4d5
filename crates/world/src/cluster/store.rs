//! A model of etcd. The model is linearizable and has transactions, leader terms, and leases that
//! use etcd's own clock.
//!
//! A deposed leader that does not know of its successor answers lease renewals for a while. The new
//! leader answers the read that follows each renewal. The reply to this read has another leader
//! term than the reply to the renewal, so the host can notice the change of the leader.

use std::collections::BTreeMap;

use hob_engine::cluster::{
    Answer, Change, ClusterEvent, Found, Is, Key, LeaseId, Member, OwnershipRecord, OwnershipSnapshot, Txn,
    Value,
};
use hob_engine::units::Instant;

/// A host's request to etcd.
#[derive(Clone, Debug)]
pub enum Request {
    /// Grants a lease of this many nanoseconds.
    Grant(u64),
    /// Reads the membership record of the host with this name.
    LookUp(String),
    /// Writes the host's membership record.
    Register(Txn),
    /// Renews a lease. Then reads the membership record of the host with this name, to check that
    /// the record is still bound to the lease.
    Renew(LeaseId, String),
    /// Ends a lease.
    Revoke(LeaseId),
    /// Reads a disk's ownership record and ownership lock.
    OwnershipSnapshot(String),
    /// Executes a transaction.
    Txn(Txn),
}

/// etcd's response to a request.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a simulation has few at a time")]
pub enum Response {
    /// Answer of etcd to a call of the lease manager.
    Lease(Answer),
    /// The ownership record and the ownership lock of a disk.
    OwnershipSnapshot(OwnershipSnapshot),
    /// Revision of the transaction, or `None` if a condition of the transaction was false.
    Txn(Option<u64>),
}

#[derive(Clone, Debug)]
struct Entry {
    value: Value,
    revision: u64,
    lease: LeaseId,
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    lease_ns: u64,
    due: Instant,
}

/// The model of etcd.
#[derive(Debug)]
pub struct Store {
    entries: BTreeMap<Key, Entry>,
    leases: BTreeMap<LeaseId, Lease>,
    revision: u64,
    last_lease: u64,
    /// Rate by which etcd's clock is faster than the simulation's clock, parts per million.
    fast_ppm: u64,
    /// Time from a lease's expiry until etcd deletes the lease and its keys, nanoseconds.
    late_ns: u64,
    /// Time until which the deposed etcd leader answers lease renewals.
    deposed_until: Instant,
    pub(super) leases_ended: u64,
    /// Watch events since the last `take_news`: disk, revision and event.
    news: Vec<(String, u64, ClusterEvent)>,
}

impl Store {
    /// Creates an empty store. `fast_ppm` is the rate by which etcd's clock is fast, and `late_ns`
    /// is the time from a lease's expiry until etcd deletes the lease and its keys.
    pub fn new(fast_ppm: u64, late_ns: u64) -> Self {
        Store {
            entries: BTreeMap::new(),
            leases: BTreeMap::new(),
            revision: 1,
            last_lease: 0,
            fast_ppm,
            late_ns,
            deposed_until: Instant(0),
            leases_ended: 0,
            news: Vec::new(),
        }
    }

    /// Returns the watch events since the last call: changes of ownership records and removals of
    /// ownership locks, in order.
    pub fn take_news(&mut self) -> Vec<(String, u64, ClusterEvent)> {
        std::mem::take(&mut self.news)
    }

    fn due(&self, now: Instant, lease_ns: u64) -> Instant {
        now + lease_ns * 1_000_000 / (1_000_000 + self.fast_ppm)
    }

    /// Elects another leader. The former leader answers until `until`. The new leader restarts the
    /// full length of every lease.
    pub(super) fn depose(&mut self, now: Instant, until: Instant) {
        self.deposed_until = until;
        let ids: Vec<LeaseId> = self.leases.keys().copied().collect();
        for id in ids {
            let due = self.due(now, self.leases[&id].lease_ns);
            if let Some(lease) = self.leases.get_mut(&id) {
                lease.due = due;
            }
        }
    }

    /// Handles a request. If `by_deposed` is set, the deposed leader, if there is one, answers a
    /// lease renewal. If `believed` is set, the leader's term in the reply is not checked.
    pub fn handle(&mut self, now: Instant, request: Request, by_deposed: bool, believed: bool) -> Response {
        self.end_leases(now);
        match request {
            Request::Grant(lease_ns) => {
                self.last_lease += 1;
                let id = LeaseId(self.last_lease);
                let due = self.due(now, lease_ns);
                self.leases.insert(id, Lease { lease_ns, due });
                Response::Lease(Answer::Granted { lease: id, lease_ns })
            }
            Request::LookUp(name) => {
                let found = self.entries.get(&Key::Host(name));
                let found = found.and_then(|entry| match &entry.value {
                    Value::Host(member) => Some((member.clone(), entry.revision, entry.lease)),
                    _ => None,
                });
                Response::Lease(Answer::LookedUp(found))
            }
            Request::Register(txn) => Response::Lease(match self.commit(&txn) {
                Some(_) => Answer::Registered,
                None => Answer::NotRegistered,
            }),
            Request::Renew(..) if by_deposed && now < self.deposed_until => {
                let Request::Renew(lease, _) = request else { unreachable!("matched") };
                let lease_ns = self.leases.get(&lease).map_or(10_000_000_000, |lease| lease.lease_ns);
                Response::Lease(if believed { Answer::Renewed(lease_ns) } else { Answer::Lost })
            }
            Request::Renew(id, name) => {
                let Some(Lease { lease_ns, .. }) = self.leases.get(&id).copied() else {
                    return Response::Lease(Answer::NoLease);
                };
                let due = self.due(now, lease_ns);
                self.leases.insert(id, Lease { lease_ns, due });
                let is_there = self.entries.get(&Key::Host(name)).is_some_and(|entry| entry.lease == id);
                Response::Lease(if is_there { Answer::Renewed(lease_ns) } else { Answer::Lost })
            }
            Request::Revoke(id) => {
                self.end(id);
                Response::Lease(Answer::Done)
            }
            Request::OwnershipSnapshot(disk) => Response::OwnershipSnapshot(self.look(&disk)),
            Request::Txn(txn) => Response::Txn(self.commit(&txn)),
        }
    }

    /// Returns a disk's ownership record and ownership lock.
    pub fn look(&self, disk: &str) -> OwnershipSnapshot {
        let title = self.entries.get(&Key::OwnershipRecord(disk.to_owned()));
        let hold = self.entries.get(&Key::OwnershipLock(disk.to_owned()));
        OwnershipSnapshot {
            title: title.and_then(|entry| {
                found(entry, |value| match value {
                    Value::OwnershipRecord(title) => Some::<OwnershipRecord>(title.clone()),
                    _ => None,
                })
            }),
            hold: hold.and_then(|entry| {
                found(entry, |value| match value {
                    Value::OwnershipLock(member) => Some::<Member>(member.clone()),
                    _ => None,
                })
            }),
        }
    }

    fn end_leases(&mut self, now: Instant) {
        let late_ns = self.late_ns;
        let ended: Vec<LeaseId> =
            self.leases.iter().filter(|(_, lease)| lease.due + late_ns <= now).map(|(id, _)| *id).collect();
        for id in ended {
            self.leases_ended += 1;
            self.end(id);
        }
    }

    fn end(&mut self, id: LeaseId) {
        if self.leases.remove(&id).is_some() {
            self.revision += 1;
            let ended = self.entries.iter().filter(|(_, entry)| entry.lease == id);
            for key in ended.map(|(key, _)| key.clone()).collect::<Vec<_>>() {
                self.entries.remove(&key);
                self.note(&key, None);
            }
        }
    }

    fn commit(&mut self, txn: &Txn) -> Option<u64> {
        let holds = txn.conditions.iter().all(|(key, is)| match (self.entries.get(key), is) {
            (None, Is::Absent) => true,
            (Some(entry), Is::At(revision)) => entry.revision == *revision,
            (Some(entry), Is::Under(lease)) => entry.lease == *lease,
            _ => false,
        });
        let has_lease = |change: &Change| match change {
            Change::Put(_, _, Some(lease)) => self.leases.contains_key(lease),
            _ => true,
        };
        if !holds || !txn.changes.iter().all(has_lease) {
            return None;
        }
        self.revision += 1;
        for change in &txn.changes {
            match change {
                Change::Put(key, value, lease) => {
                    self.note(key, Some(value));
                    let entry = Entry {
                        value: value.clone(),
                        revision: self.revision,
                        lease: lease.unwrap_or_default(),
                    };
                    self.entries.insert(key.clone(), entry);
                }
                Change::Delete(key) => {
                    if self.entries.remove(key).is_some() {
                        self.note(key, None);
                    }
                }
            }
        }
        Some(self.revision)
    }

    fn note(&mut self, key: &Key, value: Option<&Value>) {
        let news = match (key, value) {
            (Key::OwnershipRecord(disk), Some(Value::OwnershipRecord(title))) => {
                (disk, ClusterEvent::OwnershipRecord { taken: title.taken })
            }
            (Key::OwnershipLock(disk), None) => (disk, ClusterEvent::HoldGone),
            _ => return,
        };
        self.news.push((news.0.clone(), self.revision, news.1));
    }
}

fn found<T>(entry: &Entry, value: impl FnOnce(&Value) -> Option<T>) -> Option<Found<T>> {
    Some(Found { value: value(&entry.value)?, revision: entry.revision, lease: entry.lease })
}
