//! A modelled cluster host: the cluster state machines, and the daemon's pacing of etcd requests.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use hob_engine::cluster::{
    Answer, Ask, Event as Told, LeaseManager, LeaseTerm, Member, OwnershipRequest, OwnershipSnapshot,
    OwnershipState, Tried, Txn, Verdict, Waiting,
};
use hob_engine::units::Instant;
use hob_world::cluster::store::{Request, Response};

use super::etcd::{Asked, Question};
use super::{Event, Looks, Owners, Pacing, Play, SECOND_NS};

/// Timeout of an etcd request, as in the daemon, nanoseconds. The other constants are the daemon's
/// limits: `LOOK_DISKS_MAX` disks per read request, `LOOKS_MAX` parallel read requests,
/// `COMMITS_MAX` parallel transactions, and `GOES` attempts per disk.
const QUESTION_NS_MAX: u64 = 2 * SECOND_NS;
const LOOK_DISKS_MAX: usize = 60;
const LOOKS_MAX: usize = 2;
const COMMITS_MAX: usize = 16;
const GOES: u32 = 5;

/// Purpose of an etcd request.
#[derive(Debug)]
enum Purpose {
    /// A request of the lease manager, with its call number.
    Lease(u64),
    /// A read of the etcd keys of these disks.
    Looks(Vec<String>),
    /// A transaction that acquires this disk.
    Take(String),
}

/// A modelled cluster host with its state machines and its requests to etcd.
pub(super) struct Host {
    me: Member,
    settle_ns: u64,
    pub(super) is_up: bool,
    pub(super) lost_lease: bool,
    keeper: LeaseManager,
    term: Option<LeaseTerm>,
    pub(super) waiting: Waiting,
    /// Disks for which this host waits while other hosts serve them.
    told: BTreeSet<String>,
    pub(super) held: Vec<String>,
    seats: BTreeMap<String, OwnershipState>,
    asked: BTreeMap<u64, Purpose>,
    /// Disks whose etcd keys are read when a request slot is free.
    to_look: VecDeque<String>,
    /// Disks that the host tries to acquire, with the remaining attempts.
    trying: BTreeMap<String, u32>,
    looks: usize,
    /// Transactions to send, with the disk and the revision of the ownership record that was read.
    to_commit: VecDeque<(String, Txn, u64)>,
    commits: usize,
    looks_at: Instant,
}

impl Host {
    pub(super) fn new(number: usize, owners: &Owners, told: Vec<String>, held: Vec<String>) -> Host {
        let me = Member { name: format!("host-{number:02}"), id: format!("{number:032x}") };
        Host {
            keeper: LeaseManager::new(me.clone(), owners.lease_ns),
            waiting: Waiting::new(&me, owners.settle_ns),
            settle_ns: owners.settle_ns,
            me,
            is_up: true,
            lost_lease: false,
            term: None,
            told: told.into_iter().collect(),
            held,
            seats: BTreeMap::new(),
            asked: BTreeMap::new(),
            to_look: VecDeque::new(),
            trying: BTreeMap::new(),
            looks: 0,
            to_commit: VecDeque::new(),
            commits: 0,
            looks_at: Instant(u64::MAX),
        }
    }

    fn decide(&mut self, now: Instant, disk: &str, look: &OwnershipSnapshot) -> Option<Verdict> {
        let term = self.term.filter(|term| term.is_valid(now))?;
        let settle_ns = self.settle_ns;
        let seat = self
            .seats
            .entry(disk.to_owned())
            .or_insert_with(|| OwnershipState::new(disk.to_owned(), settle_ns));
        if let Some((revision, at)) = self.waiting.gone(disk) {
            seat.saw_gone(revision, at);
        }
        let wish = OwnershipRequest { known: None, dirty: false, force: false, keeps_copy: false };
        Some(seat.decide(now, &self.me, term.lease, look, wish))
    }
}

impl Play {
    // Lease handling.

    pub(super) fn keep(&mut self, number: usize) {
        let now = self.now;
        let host = &mut self.hosts[number];
        if !host.is_up {
            return;
        }
        while let Some(told) = host.keeper.poll_event() {
            match told {
                Told::Joined(term) | Told::Renewed(term) => host.term = Some(term),
                Told::Ended(_) => (host.term, host.lost_lease) = (None, true),
                Told::NameTaken(_) => unreachable!("each host has its own name"),
            }
        }
        let name = host.me.name.clone();
        if let Some(call) = host.keeper.poll_call(now) {
            let wait_max = host.keeper.call_ns_max();
            let request = match call.ask {
                Ask::Grant(lease_ns) => Request::Grant(lease_ns),
                Ask::LookUp => Request::LookUp(name),
                Ask::Register(txn) => Request::Register(txn),
                Ask::Renew(lease) => Request::Renew(lease, name),
                Ask::Revoke(lease) => Request::Revoke(lease),
            };
            self.ask(number, Question::Lease(request), Purpose::Lease(call.number), wait_max);
        } else if let Some(at) = host.keeper.poll_timeout() {
            self.queue.push(at.max(now + 1), Event::Keep(number));
        }
    }

    fn ask(&mut self, host: usize, question: Question, purpose: Purpose, wait_ns_max: u64) {
        self.number += 1;
        let (number, until) = (self.number, self.now + wait_ns_max);
        let asked = Asked { host, number, question, until };
        let parts = asked.parts() as f64;
        self.count(|traffic| {
            traffic.bytes += asked.bytes();
            match &asked.question {
                Question::Lease(_) => traffic.renewals += parts,
                Question::Looks(_) => traffic.looks += parts,
                Question::Take(_) => traffic.takes += parts,
            }
        });
        self.hosts[host].asked.insert(number, purpose);
        let at = self.now + self.way();
        self.queue.push(at, Event::Arrives(asked));
        self.queue.push(until, Event::Answer { host, number, answer: None, looks: Vec::new() });
    }

    pub(super) fn answered(&mut self, host: usize, number: u64, answer: Option<Response>, looks: Looks) {
        let Some(purpose) = self.hosts[host].asked.remove(&number) else { return };
        match (purpose, answer) {
            (Purpose::Lease(call), answer) => {
                let answer = match answer {
                    Some(Response::Lease(answer)) => answer,
                    _ => Answer::Lost,
                };
                self.hosts[host].keeper.handle_answer(self.now, call, answer);
                self.keep(host);
            }
            (Purpose::Looks(disks), answer) => {
                self.hosts[host].looks -= 1;
                if answer.is_some() {
                    for (disk, look) in disks.iter().zip(&looks) {
                        self.looked(host, disk, look);
                    }
                } else {
                    disks.iter().for_each(|disk| self.tried(host, disk, Tried::Unknown));
                }
            }
            (Purpose::Take(disk), answer) => {
                self.hosts[host].commits -= 1;
                match answer {
                    Some(Response::Txn(Some(_))) => self.took(host, &disk),
                    // Another host acquired the disk, or the result is unknown. The next read shows
                    // which.
                    _ => self.look_again(host, disk),
                }
            }
        }
        self.go_on(host);
    }

    // Disks.

    /// Gives all disks their first owners. The other hosts start to wait for the disks.
    pub(super) fn settle(&mut self) {
        for number in 0..self.hosts.len() {
            for disk in std::mem::take(&mut self.hosts[number].held) {
                let verdict = self.hosts[number].decide(self.now, &disk, &OwnershipSnapshot::default());
                let Some(Verdict::Take(taking)) = verdict else {
                    unreachable!("disk {disk} has no owner yet")
                };
                let done = self.server.store.handle(self.now, Request::Txn(taking.txn), false, false);
                assert!(matches!(done, Response::Txn(Some(_))), "{} is a member", self.hosts[number].me.name);
                self.hosts[number].held.push(disk);
            }
        }
        self.server.store.take_news();
        for number in 0..self.hosts.len() {
            let host = &mut self.hosts[number];
            if self.owners.pacing == Pacing::ClusterEvent {
                host.waiting.handle_waits(self.now, host.told.iter().map(String::as_str));
                host.waiting.handle_hearing(self.now, true);
                self.look_when_due(number);
            } else {
                let at = self.now + self.dice.below(SECOND_NS);
                self.queue.push(at, Event::OwnershipSnapshot(number));
            }
        }
    }

    /// Schedules the next attempt to acquire disks.
    pub(super) fn look_when_due(&mut self, number: usize) {
        let host = &mut self.hosts[number];
        if let Some(at) = host.waiting.poll_timeout().filter(|at| *at < host.looks_at) {
            host.looks_at = at.max(self.now + 1);
            self.queue.push(host.looks_at, Event::OwnershipSnapshot(number));
        }
    }

    pub(super) fn look(&mut self, number: usize) {
        let now = self.now;
        let host = &mut self.hosts[number];
        if !host.is_up {
            return;
        }
        match self.owners.pacing {
            Pacing::ClusterEvent => {
                if host.looks_at > now {
                    return;
                }
                host.looks_at = Instant(u64::MAX);
                while let Some(disk) = host.waiting.poll(now) {
                    if host.trying.insert(disk.clone(), GOES).is_none() {
                        host.to_look.push_back(disk);
                    }
                }
                self.look_when_due(number);
            }
            Pacing::Looks => {
                for disk in &host.told {
                    if !host.trying.contains_key(disk) {
                        host.trying.insert(disk.clone(), GOES);
                        host.to_look.push_back(disk.clone());
                    }
                }
                self.queue.push(now + SECOND_NS, Event::OwnershipSnapshot(number));
            }
        }
        self.go_on(number);
    }

    /// Sends etcd requests while request slots are free.
    fn go_on(&mut self, number: usize) {
        let (looks_max, disks_max, commits_max) = match self.owners.pacing {
            Pacing::ClusterEvent => (LOOKS_MAX, LOOK_DISKS_MAX, COMMITS_MAX),
            Pacing::Looks => (usize::MAX, 1, usize::MAX),
        };
        loop {
            let host = &mut self.hosts[number];
            if host.looks < looks_max && !host.to_look.is_empty() {
                host.looks += 1;
                let count = host.to_look.len().min(disks_max);
                let disks: Vec<String> = host.to_look.drain(..count).collect();
                self.ask(number, Question::Looks(disks.clone()), Purpose::Looks(disks), QUESTION_NS_MAX);
            } else if host.commits < commits_max
                && let Some((disk, txn, seen)) = host.to_commit.pop_front()
            {
                if host.waiting.has_moved(&disk, seen) {
                    self.look_again(number, disk);
                    continue;
                }
                host.commits += 1;
                self.takes += 1;
                self.ask(number, Question::Take(txn), Purpose::Take(disk), QUESTION_NS_MAX);
            } else {
                return;
            }
        }
    }

    fn looked(&mut self, number: usize, disk: &str, look: &OwnershipSnapshot) {
        let host = &mut self.hosts[number];
        host.waiting.handle_look(disk, look);
        match host.decide(self.now, disk, look) {
            Some(Verdict::Take(taking)) => {
                let seen = look.title.as_ref().map_or(0, |title| title.revision);
                host.to_commit.push_back((disk.to_owned(), taking.txn, seen));
            }
            Some(Verdict::Mine(_)) => self.took(number, disk),
            Some(Verdict::Wait(at)) => self.tried(number, disk, Tried::Settles(at)),
            // The model has no dirty data, so there is no failover from a replica.
            Some(Verdict::Refused(_) | Verdict::Adopt(_)) => self.tried(number, disk, Tried::OtherOwner),
            None => self.tried(number, disk, Tried::Unknown),
        }
    }

    fn look_again(&mut self, number: usize, disk: String) {
        let goes = self.hosts[number].trying.get_mut(&disk).expect("the host tries to acquire the disk");
        *goes -= 1;
        match goes {
            0 => self.tried(number, &disk, Tried::Unknown),
            _ => self.hosts[number].to_look.push_back(disk),
        }
    }

    fn tried(&mut self, number: usize, disk: &str, tried: Tried) {
        let now = self.now;
        let host = &mut self.hosts[number];
        host.trying.remove(disk);
        host.waiting.handle_tried(now, disk, tried);
        if self.owners.pacing == Pacing::ClusterEvent {
            self.look_when_due(number);
        }
    }

    fn took(&mut self, number: usize, disk: &str) {
        let now = self.now;
        let host = &mut self.hosts[number];
        host.trying.remove(disk);
        host.told.remove(disk);
        host.held.push(disk.to_owned());
        host.waiting.handle_tried(now, disk, Tried::Taken);
        if let Some(taken) = self.orphans.get_mut(disk) {
            taken.get_or_insert(now);
        }
    }
}
