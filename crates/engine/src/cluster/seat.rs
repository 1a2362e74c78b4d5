//! One disk at one host: may it be taken, is it held, is it lost; and the transactions for all of that.
//!
//! | title | hold | another member may take it | the member that it names may |
//! |---|---|---|---|
//! | none | none | yes | – |
//! | given back | none | yes | yes |
//! | taken, nothing dirty | none: it vanished | after `settle_ns` without a hold | yes |
//! | dirty | none | with force, after `settle_ns` | yes |
//! | any | another member's | no | no |
//! | any | its own | – | yes |
//!
//! A cache that a host has of a disk counts if the title names this host with the generation that it kept with the cache.

use super::{Change, Found, Is, Key, LeaseId, Member, Title, Txn, Value};
use crate::units::Instant;

/// What the store has of a disk, all of one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Who had it last.
    pub title: Option<Found<Title>>,
    /// Who has it.
    pub hold: Option<Found<Member>>,
}

/// What a host wants of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The generation that is kept with what this host has of the disk, if it ever had it.
    pub known: Option<u64>,
    /// Dirty data may be in its flash, now or as soon as it serves.
    pub dirty: bool,
    /// Take it even if what another host has not destaged is lost.
    pub force: bool,
}

/// What becomes of that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is held already, under this lease, in this generation.
    Mine(Found<Title>),
    /// This may take it.
    Take(Box<Taking>),
    /// Its owner vanished: not before this moment.
    Wait(Instant),
    /// It cannot be taken.
    Refused(Refusal),
}

/// An attempt to take a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taking {
    /// What is asked of the store. If it does not happen, look again.
    pub txn: Txn,
    /// What the title is then.
    pub title: Title,
    /// Nobody else has had the disk since this host had it: what its flash holds counts.
    pub continued: bool,
    /// Who may have data that is lost by this.
    pub lost_by: Option<Member>,
}

/// Why a disk cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// This member has it.
    Held(Member, u64),
    /// Only this member's flash may have all of it.
    Dirty(Member, u64),
}

/// One disk at one host.
#[derive(Clone, Debug)]
pub struct Seat {
    disk: String,
    settle_ns: u64,
    /// Since when there has been no hold, as far as was seen, with that revision of the title.
    absent: Option<(u64, Instant)>,
}

impl Seat {
    /// A disk of which nothing was seen. Whoever vanishes is given `settle_ns` for what it has sent to the backing.
    pub fn new(disk: String, settle_ns: u64) -> Self {
        Seat { disk, settle_ns, absent: None }
    }

    /// Decides about a disk at which was looked just now.
    pub fn decide(&mut self, now: Instant, me: &Member, lease: LeaseId, look: &Look, wish: Wish) -> Verdict {
        if let (Some(hold), Some(title)) = (&look.hold, &look.title) {
            self.absent = None;
            if hold.value.id != me.id {
                return Verdict::Refused(Refusal::Held(hold.value.clone(), title.value.generation));
            }
            if hold.lease == lease && title.value.member.id == me.id {
                return Verdict::Mine(title.clone());
            }
        }
        let Some(title) = &look.title else {
            // A hold without a title was put by nobody; whoever wants the disk finds out when it is gone.
            let continued = wish.known.is_none();
            let generation = wish.known.unwrap_or(0) + 1;
            return self.take(me, lease, look, wish.dirty, generation, continued, None);
        };
        let Title { member, generation, taken, dirty } = &title.value;
        if member.id == me.id {
            let continued = wish.known == Some(*generation);
            return self.take(me, lease, look, wish.dirty || *dirty, *generation, continued, None);
        }
        if *dirty && !wish.force {
            self.note_absent(now, title.revision);
            return Verdict::Refused(Refusal::Dirty(member.clone(), *generation));
        }
        if *taken {
            let since = self.note_absent(now, title.revision);
            if now.nanos_since(since) < self.settle_ns {
                return Verdict::Wait(since + self.settle_ns);
            }
        }
        let lost_by = dirty.then(|| member.clone());
        self.take(me, lease, look, wish.dirty, generation + 1, false, lost_by)
    }

    /// Since when the hold has been absent with a title of that revision.
    fn note_absent(&mut self, now: Instant, revision: u64) -> Instant {
        match self.absent {
            Some((known, since)) if known == revision => since,
            _ => {
                self.absent = Some((revision, now));
                now
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "all of it makes one transaction")]
    fn take(
        &self,
        me: &Member,
        lease: LeaseId,
        look: &Look,
        dirty: bool,
        generation: u64,
        continued: bool,
        lost_by: Option<Member>,
    ) -> Verdict {
        let title = Title { member: me.clone(), generation, taken: true, dirty };
        let is = |revision: Option<u64>| revision.map_or(Is::Absent, Is::At);
        let txn = Txn {
            conditions: vec![
                (Key::Host(me.name.clone()), Is::Under(lease)),
                (self.hold(), is(look.hold.as_ref().map(|hold| hold.revision))),
                (self.title(), is(look.title.as_ref().map(|title| title.revision))),
            ],
            changes: vec![
                Change::Put(self.hold(), Value::Hold(me.clone()), Some(lease)),
                Change::Put(self.title(), Value::Title(title.clone()), None),
            ],
        };
        Verdict::Take(Box::new(Taking { txn, title, continued, lost_by }))
    }

    /// Gives the disk back. `title` is as it was last seen or put; `dirty` says whether data stays in this host's flash.
    pub fn give_back(&self, lease: LeaseId, title: &Found<Title>, dirty: bool) -> Txn {
        let conditions = self.as_known(lease, title.revision);
        let title = Title { taken: false, dirty, ..title.value.clone() };
        let changes = vec![Change::Delete(self.hold()), Change::Put(self.title(), Value::Title(title), None)];
        Txn { conditions, changes }
    }

    /// Says whether dirty data may be in this host's flash, while it has the disk. Where it is not known whether that happened, look first:
    /// it may still happen.
    pub fn mark(&self, lease: LeaseId, title: &Found<Title>, dirty: bool) -> Txn {
        let conditions = self.as_known(lease, title.revision);
        let title = Title { dirty, ..title.value.clone() };
        Txn { conditions, changes: vec![Change::Put(self.title(), Value::Title(title), None)] }
    }

    /// The disk is held, and nothing was put since: what was sent before and arrives late does nothing.
    fn as_known(&self, lease: LeaseId, revision: u64) -> Vec<(Key, Is)> {
        vec![(self.hold(), Is::Under(lease)), (self.title(), Is::At(revision))]
    }

    fn hold(&self) -> Key {
        Key::Hold(self.disk.clone())
    }

    fn title(&self) -> Key {
        Key::Title(self.disk.clone())
    }
}
