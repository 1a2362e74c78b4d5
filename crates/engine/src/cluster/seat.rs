//! One disk at one host: may it be taken, is it held, is it lost; and the transactions for all of that.
//!
//! | title | hold | another member may take it | the member that it names may |
//! |---|---|---|---|
//! | none | none | yes | – |
//! | given back | none | yes | yes |
//! | taken, nothing dirty | none: it vanished | after `settle_ns` without a hold | yes |
//! | dirty | none | with force, after `settle_ns` | yes |
//! | dirty, with a second copy at a member | none | that member may adopt it after `settle_ns`; others with force | yes |
//! | being adopted | none | with force, after `settle_ns` | it goes on adopting |
//! | any | another member's | no | no |
//! | any | its own | – | yes; where it is opened anew and the title names a second copy, by a title that names none |
//!
//! A cache that a host has of a disk counts if the title names this host with the generation that it kept with the cache.
//!
//! # Adopting
//! A member that has the second copy of what is dirty takes the hold, and puts the title as it is ([`Verdict::Adopt`]): as long as it merely looks at the copy, its owner's
//! flash counts as before, and [`Seat::leave_alone`] undoes everything. Before the first byte goes to the backing the title becomes the adopter's
//! ([`Seat::begin_adopting`]), and when the backing has everything durably, [`Seat::end_adopting`] says so. Whoever is
//! interrupted in between begins anew.

use super::{ADOPTED_MAX, Change, Found, Is, Key, LeaseId, Member, SecondCopy, Served, Title, Txn, Value};
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
    /// It is served already, and nothing was acknowledged without the second copy that its title names.
    pub keeps_copy: bool,
}

/// What becomes of that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is held already, under this lease, in this generation, and its title says what is wished.
    Mine(Found<Title>),
    /// This may take it.
    Take(Box<Taking>),
    /// This takes the hold; then the second copy that is here has to be brought to the backing.
    Adopt(Box<Adopting>),
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
    /// Who brought to the backing what this host's flash has of it and was dirty.
    pub outdated_by: Option<Member>,
    /// Who may have data that is lost by this.
    pub lost_by: Option<Member>,
}

/// An attempt to have a disk for the sake of its second copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopting {
    /// What is asked of the store. If it does not happen, look again.
    pub txn: Txn,
    /// The title, which stays as it is so far, but for its revision.
    pub title: Found<Title>,
    /// Where the copy is.
    pub copy: SecondCopy,
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
            let is_mine = title.value.member.id == me.id && title.value.adopts.is_none();
            // It may have been closed with its hold kept: opened anew, it begins without a copy.
            let is_current = wish.keeps_copy || title.value.copy.is_none();
            if hold.lease == lease && is_mine && is_current {
                return Verdict::Mine(title.clone());
            }
        }
        let Some(title) = &look.title else {
            // A hold without a title was put by nobody; whoever wants the disk finds out when it is gone.
            let continued = wish.known.is_none();
            let title = Title::new(me, wish.known.unwrap_or(0) + 1, wish.dirty);
            return self.take(me, lease, look, title, continued, None);
        };
        let Title { member, generation, taken, dirty, copy, adopts, .. } = &title.value;
        let here = copy.as_ref().filter(|copy| *dirty && copy.member.id == me.id && !wish.force);
        if member.id == me.id && adopts.is_none() {
            let continued = wish.known == Some(*generation);
            let copy = copy.clone().filter(|_| wish.keeps_copy && continued);
            let taken = Title { taken: true, dirty: wish.dirty || *dirty, copy, ..title.value.clone() };
            return self.take(me, lease, look, taken, continued, None);
        }
        if *dirty && !wish.force && here.is_none() {
            self.note_absent(now, title.revision);
            return Verdict::Refused(Refusal::Dirty(member.clone(), *generation));
        }
        // One's own earlier life sends nothing any more that this one does not send too.
        if *taken && member.id != me.id && !holds(look, me) {
            let since = self.note_absent(now, title.revision);
            if now.nanos_since(since) < self.settle_ns {
                return Verdict::Wait(since + self.settle_ns);
            }
        }
        if let Some(copy) = here {
            let txn = Txn {
                conditions: self.as_seen(me, lease, look),
                // As it is, but anew: no hold is put without its title.
                changes: vec![
                    Change::Put(self.hold(), Value::Hold(me.clone()), Some(lease)),
                    Change::Put(self.title(), Value::Title(title.value.clone()), None),
                ],
            };
            return Verdict::Adopt(Box::new(Adopting { txn, title: title.clone(), copy: copy.clone() }));
        }
        let lost_by = dirty.then(|| adopts.as_ref().map_or(member, |from| &from.by).clone());
        let adopted = title.value.adopted.clone();
        let taken = Title { adopted, ..Title::new(me, generation + 1, wish.dirty) };
        let mut verdict = self.take(me, lease, look, taken, false, lost_by);
        if let Verdict::Take(taking) = &mut verdict {
            let is_outdated = |it: &&Served| it.by.id == me.id && Some(it.generation) == wish.known;
            taking.outdated_by =
                title.value.adopted.iter().any(|it| is_outdated(&it)).then(|| member.clone());
        }
        verdict
    }

    /// Somebody has heard that the hold was deleted, and heard it at that moment, at a revision after that of the title.
    ///
    /// It has been absent since if the title is still that one: no hold is put without its title, in one transaction. If it is not, this
    /// says nothing.
    pub fn saw_gone(&mut self, title_revision: u64, at: Instant) {
        if self
            .absent
            .is_none_or(|(known, since)| known < title_revision || (known == title_revision && at < since))
        {
            self.absent = Some((title_revision, at));
        }
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

    fn take(
        &self,
        me: &Member,
        lease: LeaseId,
        look: &Look,
        title: Title,
        continued: bool,
        lost_by: Option<Member>,
    ) -> Verdict {
        let txn = Txn {
            conditions: self.as_seen(me, lease, look),
            changes: vec![
                Change::Put(self.hold(), Value::Hold(me.clone()), Some(lease)),
                Change::Put(self.title(), Value::Title(title.clone()), None),
            ],
        };
        Verdict::Take(Box::new(Taking { txn, title, continued, outdated_by: None, lost_by }))
    }

    /// Gives the disk back. `title` is as it was last seen or put; `dirty` says whether data stays in this host's flash.
    pub fn give_back(&self, lease: LeaseId, title: &Found<Title>, dirty: bool) -> Txn {
        let Txn { conditions, mut changes } = self.put(lease, title, title.value.clone().with_dirty(dirty));
        changes.iter_mut().for_each(|change| {
            if let Change::Put(_, Value::Title(title), _) = change {
                title.taken = false;
            }
        });
        changes.insert(0, Change::Delete(self.hold()));
        Txn { conditions, changes }
    }

    /// Says whether dirty data may be in this host's flash, while it has the disk. Where it is not known whether that happened, look first:
    /// it may still happen.
    pub fn mark(&self, lease: LeaseId, title: &Found<Title>, dirty: bool) -> Txn {
        self.put(lease, title, title.value.clone().with_dirty(dirty))
    }

    /// Says who has a second copy of all that is dirty, or that nobody has, while this host has the disk. The former after it is so, the
    /// latter before it is not so any more, and that is known to have happened. As for [`Seat::mark`], it may still happen later.
    pub fn say_copy(&self, lease: LeaseId, title: &Found<Title>, copy: Option<SecondCopy>) -> Txn {
        self.put(lease, title, Title { copy, ..title.value.clone() })
    }

    /// What the title says from when the second copy counts, which this host holds the disk for, and no other: before the backing is changed.
    /// Nothing where it says so already.
    pub fn begin_adopting(&self, me: &Member, lease: LeaseId, title: &Found<Title>) -> Option<(Txn, Title)> {
        let Title { member, generation, .. } = &title.value;
        if title.value.adopts.is_some() {
            return None;
        }
        let from = Served { by: member.clone(), generation: *generation };
        let begun = Title {
            member: me.clone(),
            generation: generation + 1,
            taken: true,
            adopts: Some(from),
            ..title.value.clone()
        };
        Some((self.put(lease, title, begun.clone()), begun))
    }

    /// What it says when the backing has everything, durably: before the disk is served. `dirty` as in a [`Wish`].
    pub fn end_adopting(&self, lease: LeaseId, title: &Found<Title>, dirty: bool) -> (Txn, Title) {
        let mut ended = Title { dirty, copy: None, adopts: None, ..title.value.clone() };
        if let Some(from) = &title.value.adopts {
            ended.adopted.retain(|it| it.by.id != from.by.id);
            ended.adopted.push(from.clone());
            let surplus = ended.adopted.len().saturating_sub(ADOPTED_MAX);
            ended.adopted.drain(..surplus);
        }
        (self.put(lease, title, ended.clone()), ended)
    }

    /// Lets go of a disk that was held for the sake of its second copy and is not adopted: its title is what it was.
    pub fn leave_alone(&self, lease: LeaseId, title: &Found<Title>) -> Txn {
        let conditions = self.as_known(lease, title.revision);
        Txn { conditions, changes: vec![Change::Delete(self.hold())] }
    }

    /// Another title, while this host has the disk.
    fn put(&self, lease: LeaseId, known: &Found<Title>, title: Title) -> Txn {
        let conditions = self.as_known(lease, known.revision);
        Txn { conditions, changes: vec![Change::Put(self.title(), Value::Title(title), None)] }
    }

    /// This host is a member, and nothing changed since that look.
    fn as_seen(&self, me: &Member, lease: LeaseId, look: &Look) -> Vec<(Key, Is)> {
        let is = |revision: Option<u64>| revision.map_or(Is::Absent, Is::At);
        vec![
            (Key::Host(me.name.clone()), Is::Under(lease)),
            (self.hold(), is(look.hold.as_ref().map(|hold| hold.revision))),
            (self.title(), is(look.title.as_ref().map(|title| title.revision))),
        ]
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

impl Title {
    /// Of a disk that this member takes, of which nothing else is to be said.
    fn new(member: &Member, generation: u64, dirty: bool) -> Title {
        Title {
            member: member.clone(),
            generation,
            taken: true,
            dirty,
            copy: None,
            adopts: None,
            adopted: Vec::new(),
        }
    }

    /// Where nothing is dirty, nobody has a copy of it either: what becomes dirty later may have none.
    fn with_dirty(self, dirty: bool) -> Title {
        Title { dirty, copy: self.copy.filter(|_| dirty), ..self }
    }
}

/// Does this member hold the disk, under whatever lease?
fn holds(look: &Look, me: &Member) -> bool {
    look.hold.as_ref().is_some_and(|hold| hold.value.id == me.id)
}
