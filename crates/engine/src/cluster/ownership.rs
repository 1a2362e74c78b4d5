//! Ownership of one disk at one host: whether it can be taken, is held, or is lost; and the transactions
//! for each change.
//!
//! | record (title) | lock (hold) | may another member take it? | may the recorded member take it? |
//! |---|---|---|---|
//! | none | none | yes | – |
//! | given back | none | yes | yes |
//! | taken, nothing dirty | none: the owner failed | after `settle_ns` without a lock | yes |
//! | dirty | none | with force, after `settle_ns` | yes |
//! | dirty, with a replica at a member | none | that member may fail over after `settle_ns`; others with force | yes |
//! | failover in progress | none | with force, after `settle_ns` | it continues the failover |
//! | any | another member's | no | no |
//! | any | its own | – | yes; if it is opened again and the record names a replica, by a record that names none |
//!
//! A host's cache of a disk is valid if the record names this host, with the generation that is stored with
//! the cache.
//!
//! # Failover from a replica
//! A member that has the replica of the dirty data takes the lock, and puts the record unchanged
//! ([`Verdict::Adopt`]). While it only reads the replica, its owner's flash stays valid, and
//! [`OwnershipState::leave_alone`] undoes everything. Before the first byte goes to the backing, the record changes
//! to the new owner ([`OwnershipState::begin_adopting`]). When the backing has everything durably,
//! [`OwnershipState::end_adopting`] records that. A member that is interrupted in between starts again.

use super::{
    ADOPTED_MAX, Change, Found, Is, Key, LeaseId, Member, OwnershipRecord, SecondCopy, Served, Txn, Value,
};
use crate::units::Instant;

/// The store's keys of a disk, all read at one revision.
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
    /// The generation stored with this host's data of the disk, if it ever had the disk.
    pub known: Option<u64>,
    /// Its flash may hold dirty data, now or as soon as it serves.
    pub dirty: bool,
    /// Take the disk even if data that another host has not destaged is lost.
    pub force: bool,
    /// The disk is served already, and every acknowledged write reached the replica that the record names.
    pub keeps_copy: bool,
}

/// The decision on a [`OwnershipRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// This host holds the disk already, under this lease, in this generation, and the record has the
    /// wished content.
    Mine(Found<OwnershipRecord>),
    /// The disk may be taken with this transaction.
    Take(Box<Taking>),
    /// The disk may be locked with this transaction; then the replica at this host must be written to the
    /// backing.
    Adopt(Box<Adopting>),
    /// The owner failed: not before this instant.
    Wait(Instant),
    /// It cannot be taken.
    Refused(Refusal),
}

/// An attempt to take a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taking {
    /// The transaction. If its conditions do not hold, read the keys again.
    pub txn: Txn,
    /// The ownership record after it.
    pub title: OwnershipRecord,
    /// No other host had the disk since this host had it: its flash content is valid.
    pub continued: bool,
    /// The member that wrote this host's dirty data to the backing, if one did.
    pub outdated_by: Option<Member>,
    /// The member whose dirty data may be lost by this.
    pub lost_by: Option<Member>,
}

/// An attempt to fail a disk over from its replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopting {
    /// The transaction. If its conditions do not hold, read the keys again.
    pub txn: Txn,
    /// The ownership record, unchanged so far except for its revision.
    pub title: Found<OwnershipRecord>,
    /// The replica.
    pub copy: SecondCopy,
}

/// Why a disk cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// This member holds it, in this generation.
    Held(Member, u64),
    /// Only this member's flash may have all of its data; last in this generation.
    Dirty(Member, u64),
}

/// One disk at one host.
#[derive(Clone, Debug)]
pub struct OwnershipState {
    disk: String,
    settle_ns: u64,
    /// Revision of the record, and since when there has been no lock with it, as far as was seen.
    absent: Option<(u64, Instant)>,
}

impl OwnershipState {
    /// Creates the state of a disk that was not read yet. After an owner's failure, its writes in flight to
    /// the backing get `settle_ns` to arrive or be lost.
    pub fn new(disk: String, settle_ns: u64) -> Self {
        OwnershipState { disk, settle_ns, absent: None }
    }

    /// Decides about a disk whose keys were just read.
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
            // The disk may have been closed while its lock was kept. Opened again, it starts without a
            // replica.
            let is_current = wish.keeps_copy || title.value.copy.is_none();
            if hold.lease == lease && is_mine && is_current {
                return Verdict::Mine(title.clone());
            }
        }
        let Some(title) = &look.title else {
            // No transaction puts a lock without a record. A host that wants the disk finds out when the
            // lock is gone.
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
                // The same content with a new revision: no lock is put without its record.
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

    /// Records that the deletion of the lock was heard of at `at`, at a revision after that of the record.
    ///
    /// If the record still has that revision, the lock has been absent since: no lock is put without its
    /// record, in one transaction. If it has another revision, this has no effect.
    pub fn saw_gone(&mut self, title_revision: u64, at: Instant) {
        if self
            .absent
            .is_none_or(|(known, since)| known < title_revision || (known == title_revision && at < since))
        {
            self.absent = Some((title_revision, at));
        }
    }

    /// Returns since when the lock has been absent with a record of that revision.
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

    /// Returns the transaction that gives the disk back. `title` is as it was last read or put; `dirty`
    /// says whether data stays in this host's flash.
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

    /// Returns the transaction that records, while this host has the disk, whether its flash may hold dirty
    /// data. If the result of an earlier one is unknown, read the keys first: it may still happen.
    pub fn mark(&self, lease: LeaseId, title: &Found<OwnershipRecord>, dirty: bool) -> Txn {
        self.put(lease, title, title.value.clone().with_dirty(dirty))
    }

    /// Returns the transaction that records, while this host has the disk, the replica of all dirty data,
    /// or that there is none. Record a replica only after it is complete. Record its absence, and know that
    /// this has happened, before it becomes incomplete. As for [`OwnershipState::mark`], it may still happen later.
    pub fn say_copy(&self, lease: LeaseId, title: &Found<OwnershipRecord>, copy: Option<SecondCopy>) -> Txn {
        self.put(lease, title, OwnershipRecord { copy, ..title.value.clone() })
    }

    /// Returns the transaction, and the record after it, that makes the replica valid, instead of the
    /// former owner's flash. This host holds the disk for the failover. It comes before any change of the
    /// backing. Returns `None` if the record has this content already.
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

    /// Returns the transaction, and the record after it, for when the backing has everything durably:
    /// before the disk is served. `dirty` as in a [`OwnershipRequest`].
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

    /// Returns the transaction that releases a disk that was locked for a failover that does not happen;
    /// its record stays as it was.
    pub fn leave_alone(&self, lease: LeaseId, title: &Found<OwnershipRecord>) -> Txn {
        let conditions = self.as_known(lease, title.revision);
        Txn { conditions, changes: vec![Change::Delete(self.hold())] }
    }

    /// Puts another record while this host has the disk.
    fn put(&self, lease: LeaseId, known: &Found<OwnershipRecord>, title: OwnershipRecord) -> Txn {
        let conditions = self.as_known(lease, known.revision);
        Txn { conditions, changes: vec![Change::Put(self.title(), Value::OwnershipRecord(title), None)] }
    }

    /// Conditions: this host is a member, and nothing changed since the keys were read.
    fn as_seen(&self, me: &Member, lease: LeaseId, look: &OwnershipSnapshot) -> Vec<(Key, Is)> {
        let is = |revision: Option<u64>| revision.map_or(Is::Absent, Is::At);
        vec![
            (Key::Host(me.name.clone()), Is::Under(lease)),
            (self.hold(), is(look.hold.as_ref().map(|hold| hold.revision))),
            (self.title(), is(look.title.as_ref().map(|title| title.revision))),
        ]
    }

    /// Conditions: the disk is held, and no record was put since. A transaction that was sent before and
    /// arrives late then has no effect.
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
    /// Creates the record of a disk that this member takes, with default values for the rest.
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

    /// Sets `dirty`. Without dirty data there is no replica either: later dirty data may have none.
    fn with_dirty(self, dirty: bool) -> OwnershipRecord {
        OwnershipRecord { dirty, copy: self.copy.filter(|_| dirty), ..self }
    }
}

/// Returns true if this member holds the disk, under any lease.
fn holds(look: &OwnershipSnapshot, me: &Member) -> bool {
    look.hold.as_ref().is_some_and(|hold| hold.value.id == me.id)
}
