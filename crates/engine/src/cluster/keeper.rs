//! The lease of a host: granted, put to the host's name, renewed, lost, and had again.
//!
//! Call order: [`Keeper::poll_call`] until it has nothing, [`Keeper::handle_answer`] when a call has ended, however, and
//! [`Keeper::poll_call`] again at [`Keeper::poll_timeout`]. One call is under way at a time; whoever makes it gives up in time by itself
//! ([`Keeper::call_ns_max`]) and answers [`Answer::Lost`].
//!
//! Times are counted from when a call was *sent*: what the store did, it did after that.

use super::{Change, Is, Key, LeaseId, Member, Tenure, Txn, Value, usable_ns};
use crate::units::Instant;

/// Pause after a call that had no answer, nanoseconds.
const AGAIN_NS: u64 = 200_000_000;

/// Pause after the name was taken, nanoseconds.
const TAKEN_NS: u64 = 1_000_000_000;

/// What is asked of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// A lease of so many nanoseconds.
    Grant(u64),
    /// Read what the host's key has.
    LookUp,
    /// Put the host's key.
    Register(Txn),
    /// Keep the lease alive; then read the host's key, with a read that the majority of the store confirms, and see that both answers come from one
    /// term of the store and that the key goes with the lease.
    Renew(LeaseId),
    /// End a lease that is of no use any more. How that ends does not matter.
    Revoke(LeaseId),
}

/// One call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Tells it from others.
    pub number: u64,
    /// What is asked.
    pub ask: Ask,
}

/// How a call ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// There is a lease.
    Granted {
        /// Which.
        lease: LeaseId,
        /// How long it is, nanoseconds.
        lease_ns: u64,
    },
    /// What the host's key has: whose it is, its revision, and its lease.
    LookedUp(Option<(Member, u64, LeaseId)>),
    /// The key is put.
    Registered,
    /// The conditions did not hold.
    NotRegistered,
    /// It is alive, and was put to its full length, nanoseconds.
    Renewed(u64),
    /// There is no such lease.
    NoLease,
    /// Something that is of no consequence has ended.
    Done,
    /// No answer, or none that says anything.
    Lost,
}

/// What others should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// There is a lease: disks can be taken under it.
    Joined(Tenure),
    /// It holds for longer.
    Renewed(Tenure),
    /// It has ended: what was taken under it is not held any more.
    Ended(LeaseId),
    /// Another host has this host's name.
    NameTaken(Member),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It has none.
    Without,
    /// It has one that nobody knows of yet: it is to be put to the name.
    Granted(Tenure),
    /// As before, and what has the name now is this: nothing, or a key of its own earlier life.
    Found(Tenure, Option<(u64, LeaseId)>),
    /// It is a member.
    Member(Tenure),
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Keeper {
    me: Member,
    lease_ns: u64,
    state: State,
    /// The length that the store granted.
    granted_ns: u64,
    /// Leases of earlier lives.
    to_revoke: Option<LeaseId>,
    number: u64,
    in_flight: Option<(Call, Instant)>,
    next_at: Instant,
    events: Vec<Event>,
}

impl Keeper {
    /// A host that is no member yet.
    pub fn new(me: Member, lease_ns: u64) -> Self {
        Keeper {
            me,
            lease_ns,
            state: State::Without,
            granted_ns: lease_ns,
            to_revoke: None,
            number: 0,
            in_flight: None,
            next_at: Instant(0),
            events: Vec::new(),
        }
    }

    /// Who this is.
    pub fn me(&self) -> &Member {
        &self.me
    }

    /// A call without an answer for so long has none.
    pub fn call_ns_max(&self) -> u64 {
        self.lease_ns / 6
    }

    /// The lease, if the host is a member; it may have run out.
    pub fn tenure(&self) -> Option<Tenure> {
        match self.state {
            State::Member(tenure) => Some(tenure),
            _ => None,
        }
    }

    /// What is to be asked now, if anything.
    pub fn poll_call(&mut self, now: Instant) -> Option<Call> {
        if self.in_flight.is_some() || now < self.next_at {
            return None;
        }
        let ask = match (&self.state, self.to_revoke) {
            (State::Member(_), Some(lease)) => Ask::Revoke(lease),
            (State::Without, _) => Ask::Grant(self.lease_ns),
            (State::Granted(_), _) => Ask::LookUp,
            (State::Found(tenure, known), _) => Ask::Register(self.register(*tenure, *known)),
            (State::Member(tenure), None) => Ask::Renew(tenure.lease),
        };
        self.number += 1;
        let call = Call { number: self.number, ask };
        self.in_flight = Some((call.clone(), now));
        Some(call)
    }

    /// When [`poll_call`](Self::poll_call) has something, if nothing is under way.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.in_flight.is_none().then_some(self.next_at)
    }

    /// What others should know, first things first.
    pub fn poll_event(&mut self) -> Option<Event> {
        (!self.events.is_empty()).then(|| self.events.remove(0))
    }

    /// A call has ended. Answers to calls that are not under way are ignored.
    pub fn handle_answer(&mut self, now: Instant, number: u64, answer: Answer) {
        let Some((call, sent_at)) = self.in_flight.take_if(|(call, _)| call.number == number) else { return };
        self.next_at = now;
        match (call.ask, answer) {
            (Ask::Grant(_), Answer::Granted { lease, lease_ns }) if lease != LeaseId(0) => {
                // Whoever grants longer ones has its reasons; ours are renewed as if they were what was asked for.
                self.granted_ns = lease_ns.min(self.lease_ns);
                self.state = State::Granted(self.tenure_of(lease, sent_at, self.granted_ns));
            }
            (Ask::LookUp, Answer::LookedUp(found)) => self.looked_up(now, found),
            (Ask::Register(_), Answer::Registered) => {
                let State::Found(tenure, known) = self.state else { return };
                self.to_revoke = known.map(|(_, lease)| lease).filter(|lease| *lease != tenure.lease);
                self.state = State::Member(tenure);
                self.events.push(Event::Joined(tenure));
            }
            (Ask::Register(_), _) => {
                // It may have been put all the same: then the next look finds it.
                let State::Found(tenure, _) = self.state else { return };
                self.state = State::Granted(tenure);
                self.next_at = now + AGAIN_NS;
                self.give_up_late(now);
            }
            (Ask::Renew(lease), Answer::Renewed(lease_ns)) => {
                let State::Member(before) = self.state else { return };
                let renewed = self.tenure_of(lease, sent_at, lease_ns.min(self.granted_ns));
                // A late answer to an early call says nothing new.
                let until = renewed.until.max(before.until);
                self.state = State::Member(Tenure { lease, until });
                self.events.push(Event::Renewed(Tenure { lease, until }));
                self.next_at = (sent_at + self.granted_ns / 4).max(now);
            }
            (Ask::Renew(lease), Answer::NoLease) => {
                self.state = State::Without;
                self.events.push(Event::Ended(lease));
            }
            (Ask::Revoke(_), _) => self.to_revoke = None,
            _ => {
                self.next_at = now + AGAIN_NS;
                self.give_up_late(now);
            }
        }
    }

    fn looked_up(&mut self, now: Instant, found: Option<(Member, u64, LeaseId)>) {
        let State::Granted(tenure) = self.state else { return };
        match found {
            Some((member, ..)) if member.id != self.me.id => {
                self.events.push(Event::NameTaken(member));
                self.next_at = now + TAKEN_NS;
                self.give_up_late(now);
            }
            // An earlier life put it, or this one, whose answer was lost.
            Some((_, revision, lease)) => self.state = State::Found(tenure, Some((revision, lease))),
            None => self.state = State::Found(tenure, None),
        }
    }

    /// A lease that was never put to use and has nearly run out is left alone.
    fn give_up_late(&mut self, now: Instant) {
        if let State::Granted(tenure) = self.state
            && !tenure.is_valid(now)
        {
            self.state = State::Without;
        }
    }

    fn tenure_of(&self, lease: LeaseId, sent_at: Instant, lease_ns: u64) -> Tenure {
        Tenure { lease, until: sent_at + usable_ns(lease_ns) }
    }

    fn register(&self, tenure: Tenure, known: Option<(u64, LeaseId)>) -> Txn {
        let key = Key::Host(self.me.name.clone());
        let is = known.map_or(Is::Absent, |(revision, _)| Is::At(revision));
        let put = Change::Put(key.clone(), Value::Host(self.me.clone()), Some(tenure.lease));
        Txn { conditions: vec![(key, is)], changes: vec![put] }
    }
}
