//! Manages the lease of a host in etcd. The lease manager acquires a lease, registers the host's
//! name under this lease, and renews the lease. After the loss of a lease it acquires a new one.
//!
//! Call [`LeaseManager::poll_call`] until it returns `None`, and again at
//! [`LeaseManager::poll_timeout`]. Call [`LeaseManager::handle_answer`] when a call to etcd has
//! ended, with or without success. One call is in flight at a time. The caller limits a call's
//! duration to [`LeaseManager::call_ns_max`], and then answers [`Answer::Lost`].
//!
//! The time of a lease is counted from the moment at which the host *sent* the call. etcd handled
//! the call later, so the host never relies on a lease for longer than etcd keeps the lease.

use super::{Change, Is, Key, LeaseId, LeaseTerm, Member, Txn, Value, usable_ns};
use crate::units::Instant;

/// Pause after a call without an answer, nanoseconds.
const AGAIN_NS: u64 = 200_000_000;

/// Pause after another host was found to have the same name, nanoseconds.
const TAKEN_NS: u64 = 1_000_000_000;

/// A request of the lease manager to etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Grants a lease of this many nanoseconds.
    Grant(u64),
    /// Reads the membership record of the host.
    LookUp,
    /// Writes the membership record of the host.
    Register(Txn),
    /// Renews the lease, and then reads the host's membership record with a read that the majority
    /// of the etcd members confirms. The caller checks that the same etcd leader gave both answers
    /// (equal terms), and that the record is bound to the lease.
    Renew(LeaseId),
    /// Revokes a lease that is not needed any more. The result does not matter.
    Revoke(LeaseId),
}

/// A request of the lease manager to etcd, with its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Number of the call.
    pub number: u64,
    /// The request.
    pub ask: Ask,
}

/// The answer of etcd to a call of the lease manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A lease was granted.
    Granted {
        /// The lease.
        lease: LeaseId,
        /// Length of the lease, nanoseconds.
        lease_ns: u64,
    },
    /// The host's membership record was read: the member, the record's revision, and its lease.
    LookedUp(Option<(Member, u64, LeaseId)>),
    /// The host's membership record was written.
    Registered,
    /// The conditions of the transaction of [`Ask::Register`] did not hold.
    NotRegistered,
    /// The lease was renewed to this length, nanoseconds.
    Renewed(u64),
    /// The lease does not exist.
    NoLease,
    /// The call ended, and its result does not matter.
    Done,
    /// The call got no answer, or an error that does not show whether etcd carried the call out.
    Lost,
}

/// A change of the host's membership.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The host became a member, and may take disks under this lease.
    Joined(LeaseTerm),
    /// The lease was extended.
    Renewed(LeaseTerm),
    /// The lease has ended, so locks that were taken under it are lost.
    Ended(LeaseId),
    /// Another host uses this host's name.
    NameTaken(Member),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The host has no lease.
    Without,
    /// The host has a lease, but its key is not registered under the lease yet.
    Granted(LeaseTerm),
    /// The host has a lease, and looked up the key of its name. The key is absent or belongs to an
    /// earlier process of this host.
    Found(LeaseTerm, Option<(u64, LeaseId)>),
    /// The host is a member.
    Member(LeaseTerm),
}

/// The lease manager of one host.
#[derive(Clone, Debug)]
pub struct LeaseManager {
    me: Member,
    lease_ns: u64,
    state: State,
    /// The lease length that etcd granted.
    granted_ns: u64,
    /// Lease of an earlier process, which must be revoked.
    to_revoke: Option<LeaseId>,
    number: u64,
    in_flight: Option<(Call, Instant)>,
    next_at: Instant,
    events: Vec<Event>,
}

impl LeaseManager {
    /// Creates the lease manager of a host that is not a member yet.
    pub fn new(me: Member, lease_ns: u64) -> Self {
        LeaseManager {
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

    /// Returns this host's member identity.
    pub fn me(&self) -> &Member {
        &self.me
    }

    /// Returns the time limit of a call, nanoseconds. After this time, the call counts as lost.
    pub fn call_ns_max(&self) -> u64 {
        self.lease_ns / 6
    }

    /// Returns the lease term if the host is a member. The term may have expired.
    pub fn term(&self) -> Option<LeaseTerm> {
        match self.state {
            State::Member(term) => Some(term),
            _ => None,
        }
    }

    /// Returns the next call, if there is one.
    pub fn poll_call(&mut self, now: Instant) -> Option<Call> {
        if self.in_flight.is_some() || now < self.next_at {
            return None;
        }
        let ask = match (&self.state, self.to_revoke) {
            (State::Member(_), Some(lease)) => Ask::Revoke(lease),
            (State::Without, _) => Ask::Grant(self.lease_ns),
            (State::Granted(_), _) => Ask::LookUp,
            (State::Found(term, known), _) => Ask::Register(self.register(*term, *known)),
            (State::Member(term), None) => Ask::Renew(term.lease),
        };
        self.number += 1;
        let call = Call { number: self.number, ask };
        self.in_flight = Some((call.clone(), now));
        Some(call)
    }

    /// Returns the time of the next call, if none is in flight.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.in_flight.is_none().then_some(self.next_at)
    }

    /// Returns the next event, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        (!self.events.is_empty()).then(|| self.events.remove(0))
    }

    /// Handles the result of a call. Results of calls that are not in flight are ignored.
    pub fn handle_answer(&mut self, now: Instant, number: u64, answer: Answer) {
        let Some((call, sent_at)) = self.in_flight.take_if(|(call, _)| call.number == number) else { return };
        self.next_at = now;
        match (call.ask, answer) {
            (Ask::Grant(_), Answer::Granted { lease, lease_ns }) if lease != LeaseId(0) => {
                // etcd may grant a longer lease than requested. The host treats such a lease as if
                // it had the requested length.
                self.granted_ns = lease_ns.min(self.lease_ns);
                self.state = State::Granted(self.tenure_of(lease, sent_at, self.granted_ns));
            }
            (Ask::LookUp, Answer::LookedUp(found)) => self.looked_up(now, found),
            (Ask::Register(_), Answer::Registered) => {
                let State::Found(term, known) = self.state else { return };
                self.to_revoke = known.map(|(_, lease)| lease).filter(|lease| *lease != term.lease);
                self.state = State::Member(term);
                self.events.push(Event::Joined(term));
            }
            (Ask::Register(_), _) => {
                // etcd may have written the key although the host received no answer. Then the next
                // lookup finds the key.
                let State::Found(term, _) = self.state else { return };
                self.state = State::Granted(term);
                self.next_at = now + AGAIN_NS;
                self.give_up_late(now);
            }
            (Ask::Renew(lease), Answer::Renewed(lease_ns)) => {
                let State::Member(before) = self.state else { return };
                let renewed = self.tenure_of(lease, sent_at, lease_ns.min(self.granted_ns));
                // A late answer to an earlier call must not shorten the term.
                let until = renewed.until.max(before.until);
                self.state = State::Member(LeaseTerm { lease, until });
                self.events.push(Event::Renewed(LeaseTerm { lease, until }));
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
        let State::Granted(term) = self.state else { return };
        match found {
            Some((member, ..)) if member.id != self.me.id => {
                self.events.push(Event::NameTaken(member));
                self.next_at = now + TAKEN_NS;
                self.give_up_late(now);
            }
            // An earlier process of this host has written the key, or this process has written it
            // and did not receive the answer.
            Some((_, revision, lease)) => self.state = State::Found(term, Some((revision, lease))),
            None => self.state = State::Found(term, None),
        }
    }

    /// Abandons a lease that is about to expire although the host has not become a member under
    /// this lease yet.
    fn give_up_late(&mut self, now: Instant) {
        if let State::Granted(term) = self.state
            && !term.is_valid(now)
        {
            self.state = State::Without;
        }
    }

    fn tenure_of(&self, lease: LeaseId, sent_at: Instant, lease_ns: u64) -> LeaseTerm {
        LeaseTerm { lease, until: sent_at + usable_ns(lease_ns) }
    }

    fn register(&self, term: LeaseTerm, known: Option<(u64, LeaseId)>) -> Txn {
        let key = Key::Host(self.me.name.clone());
        let is = known.map_or(Is::Absent, |(revision, _)| Is::At(revision));
        let put = Change::Put(key.clone(), Value::Host(self.me.clone()), Some(term.lease));
        Txn { conditions: vec![(key, is)], changes: vec![put] }
    }
}
