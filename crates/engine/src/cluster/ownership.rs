//! The ownership of one disk, as one host sees it. This module decides whether the host may take
//! the disk, owns the disk, or has lost the disk, and creates the etcd transactions that change the
//! ownership.
//!
//! | ownership record | ownership lock | another member | the recorded member |
//! |---|---|---|---|
//! | none | none | yes | – |
//! | given back | none | yes | yes |
//! | taken, no dirty data | none, so the owner failed | after `settle_ns` without a lock | yes |
//! | dirty | none | with force, after `settle_ns` | yes |
//! | dirty, with a replica | none | by failover, or with force; after `settle_ns` | yes |
//! | failover in progress | none | with force, after `settle_ns` | yes, to continue the failover |
//! | any | another member's | no | no |
//! | any | the recorded member's | – | yes |
//!
//! The last two columns tell whether a member may take the disk. Only the member that has the
//! replica may fail over. If the recorded member opens the disk again while its lock exists, the
//! record must not name a replica.
//!
//! A host's cache of a disk is valid if the record names this host, with the generation that is
//! stored in the cache.
//!
//! # Failover from a replica
//! A member that has the replica of the dirty data takes the lock, and writes the record with
//! unchanged content ([`Verdict::Adopt`]). While the member only reads the replica, the former
//! owner's flash stays valid, and [`OwnershipState::leave_alone`] undoes the attempt. Before its
//! first write to the backing, the member writes itself into the record as the new owner
//! ([`OwnershipState::begin_adopting`]). When all data is durable on the backing,
//! [`OwnershipState::end_adopting`] records the end of the failover. If the member is interrupted
//! before that, it starts the failover again.

use super::{
    ADOPTED_MAX, Change, Found, Is, Key, LeaseId, Member, OwnershipRecord, SecondCopy, Served, Txn, Value,
};
use crate::units::Instant;

/// The keys of a disk in etcd, all read at one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnershipSnapshot {
    /// The ownership record.
    pub title: Option<Found<OwnershipRecord>>,
    /// The ownership lock.
    pub hold: Option<Found<Member>>,
}

/// A host's request for a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnershipRequest {
    /// The generation stored with this host's data of the disk; `None` if the host never had the
    /// disk.
    pub known: Option<u64>,
    /// True if this host's flash may have dirty data of the disk, now or as soon as the host serves
    /// the disk.
    pub dirty: bool,
    /// True to take the disk even if data that another host has not destaged is lost.
    pub force: bool,
    /// True if this host serves the disk already, and every acknowledged write reached the replica
    /// that the record names.
    pub keeps_copy: bool,
}

/// The decision on an [`OwnershipRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// This host owns the disk already, under this lease and in this generation, and the record has
    /// the requested content.
    Mine(Found<OwnershipRecord>),
    /// This host may take the disk with this transaction.
    Take(Box<Taking>),
    /// This host may lock the disk with this transaction. After that, the host must write its
    /// replica of the dirty data to the backing.
    Adopt(Box<Adopting>),
    /// The owner failed, and the disk cannot be taken before this time.
    Wait(Instant),
    /// The disk cannot be taken.
    Refused(Refusal),
}

/// An attempt to take a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taking {
    /// The transaction. If its conditions do not hold, read the keys again.
    pub txn: Txn,
    /// The ownership record after the transaction.
    pub title: OwnershipRecord,
    /// True if no other host had the disk since this host had it, so that this host's flash content
    /// is valid.
    pub continued: bool,
    /// The member that wrote this host's dirty data to the backing by failover, if a member did.
    pub outdated_by: Option<Member>,
    /// The member whose dirty data may be lost when the disk is taken.
    pub lost_by: Option<Member>,
}

/// An attempt to take a disk by failover from the replica in this host's flash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopting {
    /// The transaction. If its conditions do not hold, read the keys again.
    pub txn: Txn,
    /// The ownership record as read. The transaction keeps its content and gives it a new revision.
    pub title: Found<OwnershipRecord>,
    /// The replica of the disk's dirty data.
    pub copy: SecondCopy,
}

/// Reason why a disk cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// This member owns the disk, in this generation.
    Held(Member, u64),
    /// This member's flash may have data of the disk that exists nowhere else. The member last
    /// served the disk in this generation.
    Dirty(Member, u64),
}

/// The ownership state of one disk at one host.
#[derive(Clone, Debug)]
pub struct OwnershipState {
    disk: String,
    settle_ns: u64,
    /// Revision of the record, and the time since which no lock was seen with that record.
    absent: Option<(u64, Instant)>,
}

impl OwnershipState {
    /// Creates the state of a disk whose keys in etcd were not read yet. After a failure of the
    /// disk's owner, other hosts wait `settle_ns`, until the owner's writes in flight have reached
    /// the backing or are lost.
    pub fn new(disk: String, settle_ns: u64) -> Self {
        OwnershipState { disk, settle_ns, absent: None }
    }

    /// Decides whether this host may take or keep the disk, may fail over from its replica, must
    /// wait, or is refused. `look` has the disk's ownership record and ownership lock, which have
    /// just been read from etcd.
    pub fn decide(
        &mut self,
        now: Instant,
        me: &Member,
        lease: LeaseId,
        look: &OwnershipSnapshot,
        wish: OwnershipRequest,
    ) -> Verdict {
        if let (Some(hold), Some(title)) = (&look.hold, &look.title) {
            self.absent = None;
            if hold.value.id != me.id {
                return Verdict::Refused(Refusal::Held(hold.value.clone(), title.value.generation));
            }
            let is_mine = title.value.member.id == me.id && title.value.adopts.is_none();
            // The disk may have been closed while its lock was kept. A disk that is opened again
            // starts without a replica.
            let is_current = wish.keeps_copy || title.value.copy.is_none();
            if hold.lease == lease && is_mine && is_current {
                return Verdict::Mine(title.clone());
            }
        }
        let Some(title) = &look.title else {
            // No transaction writes a lock without a record. A host that wants the disk learns of
            // the lock's end later.
            let continued = wish.known.is_none();
            let title = OwnershipRecord::new(me, wish.known.unwrap_or(0) + 1, wish.dirty);
            return self.take(me, lease, look, title, continued, None);
        };
        let OwnershipRecord { member, generation, taken, dirty, copy, adopts, .. } = &title.value;
        let here = copy.as_ref().filter(|copy| *dirty && copy.member.id == me.id && !wish.force);
        if member.id == me.id && adopts.is_none() {
            let continued = wish.known == Some(*generation);
            let copy = copy.clone().filter(|_| wish.keeps_copy && continued);
            let taken =
                OwnershipRecord { taken: true, dirty: wish.dirty || *dirty, copy, ..title.value.clone() };
            return self.take(me, lease, look, taken, continued, None);
        }
        if *dirty && !wish.force && here.is_none() {
            self.note_absent(now, title.revision);
            return Verdict::Refused(Refusal::Dirty(member.clone(), *generation));
        }
        // Requests of this host's own earlier process need no time to settle.
        if *taken && member.id != me.id && !holds(look, me) {
            let since = self.note_absent(now, title.revision);
            if now.nanos_since(since) < self.settle_ns {
                return Verdict::Wait(since + self.settle_ns);
            }
        }
        if let Some(copy) = here {
            let txn = Txn {
                conditions: self.as_seen(me, lease, look),
                // The record is written with the same content and a new revision, because no lock
                // is written without its record.
                changes: vec![
                    Change::Put(self.hold(), Value::OwnershipLock(me.clone()), Some(lease)),
                    Change::Put(self.title(), Value::OwnershipRecord(title.value.clone()), None),
                ],
            };
            return Verdict::Adopt(Box::new(Adopting { txn, title: title.clone(), copy: copy.clone() }));
        }
        let lost_by = dirty.then(|| adopts.as_ref().map_or(member, |from| &from.by).clone());
        let adopted = title.value.adopted.clone();
        let taken = OwnershipRecord { adopted, ..OwnershipRecord::new(me, generation + 1, wish.dirty) };
        let mut verdict = self.take(me, lease, look, taken, false, lost_by);
        if let Verdict::Take(taking) = &mut verdict {
            let is_outdated = |it: &&Served| it.by.id == me.id && Some(it.generation) == wish.known;
            taking.outdated_by =
                title.value.adopted.iter().any(|it| is_outdated(&it)).then(|| member.clone());
        }
        verdict
    }

    /// Records that etcd reported the deletion of the ownership lock at the time `at`. The lock was
    /// deleted at a later revision than the record's last change.
    ///
    /// If the record still has the revision `title_revision`, the lock has been absent since `at`,
    /// because a lock is always written together with the record, in one transaction. If the record
    /// has a different revision, the call has no effect.
    pub fn saw_gone(&mut self, title_revision: u64, at: Instant) {
        if self
            .absent
            .is_none_or(|(known, since)| known < title_revision || (known == title_revision && at < since))
        {
            self.absent = Some((title_revision, at));
        }
    }

    /// Returns the time at which the lock was first known to be absent, while the ownership record
    /// had this revision. At the first call for a revision, the result is `now`.
    fn note_absent(&mut self, now: Instant, revision: u64) -> Instant {
        match self.absent {
            Some((known, since)) if known == revision => since,
            _ => {
                self.absent = Some((revision, now));
                now
            }
        }
    }

    fn take(
        &self,
        me: &Member,
        lease: LeaseId,
        look: &OwnershipSnapshot,
        title: OwnershipRecord,
        continued: bool,
        lost_by: Option<Member>,
    ) -> Verdict {
        let txn = Txn {
            conditions: self.as_seen(me, lease, look),
            changes: vec![
                Change::Put(self.hold(), Value::OwnershipLock(me.clone()), Some(lease)),
                Change::Put(self.title(), Value::OwnershipRecord(title.clone()), None),
            ],
        };
        Verdict::Take(Box::new(Taking { txn, title, continued, outdated_by: None, lost_by }))
    }

    /// Returns the transaction that gives the disk back. `title` is the record as last read or
    /// written. `dirty` is true if dirty data stays in this host's flash.
    pub fn give_back(&self, lease: LeaseId, title: &Found<OwnershipRecord>, dirty: bool) -> Txn {
        let Txn { conditions, mut changes } = self.put(lease, title, title.value.clone().with_dirty(dirty));
        changes.iter_mut().for_each(|change| {
            if let Change::Put(_, Value::OwnershipRecord(title), _) = change {
                title.taken = false;
            }
        });
        changes.insert(0, Change::Delete(self.hold()));
        Txn { conditions, changes }
    }

    /// Returns the transaction that records whether this host's flash may have dirty data, while
    /// this host has the disk. If the result of an earlier transaction is unknown, read the keys
    /// first, because that transaction may still take effect.
    pub fn mark(&self, lease: LeaseId, title: &Found<OwnershipRecord>, dirty: bool) -> Txn {
        self.put(lease, title, title.value.clone().with_dirty(dirty))
    }

    /// Returns the transaction with which this host, as the owner, records that a replica has all
    /// dirty data, or that the disk has no replica. Record a replica only after it is complete.
    /// Before the replica becomes incomplete, a transaction must have recorded that the disk has no
    /// replica. Like the transaction of [`OwnershipState::mark`], this transaction may still take
    /// effect after an error.
    pub fn say_copy(&self, lease: LeaseId, title: &Found<OwnershipRecord>, copy: Option<SecondCopy>) -> Txn {
        self.put(lease, title, OwnershipRecord { copy, ..title.value.clone() })
    }

    /// Returns the transaction that makes the replica valid instead of the former owner's flash,
    /// and the record after the transaction. This host keeps the ownership lock of the disk during
    /// the failover. The transaction must succeed before this host writes to the backing. Returns
    /// `None` if the record already shows a failover in progress.
    pub fn begin_adopting(
        &self,
        me: &Member,
        lease: LeaseId,
        title: &Found<OwnershipRecord>,
    ) -> Option<(Txn, OwnershipRecord)> {
        let OwnershipRecord { member, generation, .. } = &title.value;
        if title.value.adopts.is_some() {
            return None;
        }
        let from = Served { by: member.clone(), generation: *generation };
        let begun = OwnershipRecord {
            member: me.clone(),
            generation: generation + 1,
            taken: true,
            adopts: Some(from),
            ..title.value.clone()
        };
        Some((self.put(lease, title, begun.clone()), begun))
    }

    /// Returns the transaction that ends a failover, and the record after the transaction. Call
    /// this when all data is durable on the backing, before the disk is served. `dirty` is as in an
    /// [`OwnershipRequest`].
    pub fn end_adopting(
        &self,
        lease: LeaseId,
        title: &Found<OwnershipRecord>,
        dirty: bool,
    ) -> (Txn, OwnershipRecord) {
        let mut ended = OwnershipRecord { dirty, copy: None, adopts: None, ..title.value.clone() };
        if let Some(from) = &title.value.adopts {
            ended.adopted.retain(|it| it.by.id != from.by.id);
            ended.adopted.push(from.clone());
            let surplus = ended.adopted.len().saturating_sub(ADOPTED_MAX);
            ended.adopted.drain(..surplus);
        }
        (self.put(lease, title, ended.clone()), ended)
    }

    /// Returns the transaction that releases a disk which was locked for a failover that does not
    /// happen. The record keeps its content.
    pub fn leave_alone(&self, lease: LeaseId, title: &Found<OwnershipRecord>) -> Txn {
        let conditions = self.as_known(lease, title.revision);
        Txn { conditions, changes: vec![Change::Delete(self.hold())] }
    }

    /// Returns the transaction that writes another record while this host has the disk.
    fn put(&self, lease: LeaseId, known: &Found<OwnershipRecord>, title: OwnershipRecord) -> Txn {
        let conditions = self.as_known(lease, known.revision);
        Txn { conditions, changes: vec![Change::Put(self.title(), Value::OwnershipRecord(title), None)] }
    }

    /// Returns the conditions that this host is a member, and that the disk's keys in etcd have not
    /// changed since they were read.
    fn as_seen(&self, me: &Member, lease: LeaseId, look: &OwnershipSnapshot) -> Vec<(Key, Is)> {
        let is = |revision: Option<u64>| revision.map_or(Is::Absent, Is::At);
        vec![
            (Key::Host(me.name.clone()), Is::Under(lease)),
            (self.hold(), is(look.hold.as_ref().map(|hold| hold.revision))),
            (self.title(), is(look.title.as_ref().map(|title| title.revision))),
        ]
    }

    /// Returns the conditions of a transaction: this host has the ownership lock, and the ownership
    /// record still has this revision. So an earlier transaction that arrives late has no effect.
    fn as_known(&self, lease: LeaseId, revision: u64) -> Vec<(Key, Is)> {
        vec![(self.hold(), Is::Under(lease)), (self.title(), Is::At(revision))]
    }

    fn hold(&self) -> Key {
        Key::OwnershipLock(self.disk.clone())
    }

    fn title(&self) -> Key {
        Key::OwnershipRecord(self.disk.clone())
    }
}

impl OwnershipRecord {
    /// Creates the record of a disk that this member takes, with default values for the other
    /// fields.
    fn new(member: &Member, generation: u64, dirty: bool) -> OwnershipRecord {
        OwnershipRecord {
            member: member.clone(),
            generation,
            taken: true,
            dirty,
            copy: None,
            adopts: None,
            adopted: Vec::new(),
        }
    }

    /// Sets `dirty`. Without dirty data, the record names no replica, because later dirty data may
    /// have none.
    fn with_dirty(self, dirty: bool) -> OwnershipRecord {
        OwnershipRecord { dirty, copy: self.copy.filter(|_| dirty), ..self }
    }
}

/// Returns true if this member has the disk's lock, under any lease.
fn holds(look: &OwnershipSnapshot, me: &Member) -> bool {
    look.hold.as_ref().is_some_and(|hold| hold.value.id == me.id)
}
