//! Etcd of the model: one question after the other, each for some time. A question whose asker has given up is dropped when its turn comes.
//!
//! Bytes are those that a daemon's questions and etcd's answers take in HTTP with JSON, heads included, as counted with etcd
//! 3.4 and names of ten letters.

use std::collections::VecDeque;

use hob_engine::cluster::Look;
use hob_engine::units::Instant;
use hob_world::cluster::store::{Request, Response, Store};

use super::EtcdCosts;

/// Etcd looks so often for leases that have run out.
const LEASE_LATE_NS: u64 = 500_000_000;

/// Of one HTTP question and its answer, with nothing in them.
const HEADS_BYTES: f64 = 600.0;

/// A key to be read; a title or a hold as it is answered; a transaction that takes a disk, and what is answered; a change that is told.
const KEY_BYTES: f64 = 58.0;
const ENTRY_BYTES: f64 = 310.0;
const TAKE_BYTES: f64 = 500.0;
const NEWS_BYTES: f64 = 400.0;

/// What hosts ask.
#[derive(Clone, Debug)]
pub(super) enum Question {
    /// For the keeper.
    Lease(Request),
    /// About these disks.
    Looks(Vec<String>),
    /// To take one.
    Take(hob_engine::cluster::Txn),
}

/// A question on its way, and until when its asker waits.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) host: usize,
    pub(super) number: u64,
    pub(super) question: Question,
    pub(super) until: Instant,
}

impl Asked {
    /// Is anything changed by it, so that the majority has to agree?
    pub(super) fn changes(&self) -> bool {
        match &self.question {
            Question::Lease(request) => !matches!(request, Request::Renew(..) | Request::LookUp(_)),
            Question::Looks(_) => false,
            Question::Take(_) => true,
        }
    }

    /// HTTP questions that it is.
    pub(super) fn parts(&self) -> u64 {
        if matches!(self.question, Question::Lease(Request::Renew(..))) { 2 } else { 1 }
    }

    pub(super) fn bytes(&self) -> f64 {
        let heads = self.parts() as f64 * HEADS_BYTES;
        match &self.question {
            Question::Lease(_) => heads + ENTRY_BYTES,
            Question::Looks(disks) => heads + disks.len() as f64 * 2.0 * KEY_BYTES,
            Question::Take(_) => heads + TAKE_BYTES,
        }
    }
}

/// Of an answer; its head counts with the question's.
pub(super) fn answer_bytes(asked: &Asked, looks: &[Look]) -> f64 {
    let entries =
        looks.iter().map(|look| usize::from(look.title.is_some()) + usize::from(look.hold.is_some()));
    match asked.question {
        Question::Looks(_) => entries.sum::<usize>() as f64 * ENTRY_BYTES,
        Question::Lease(_) | Question::Take(_) => ENTRY_BYTES,
    }
}

/// Of so many changes that are told.
pub(super) fn news_bytes(changes: usize) -> f64 {
    changes as f64 * NEWS_BYTES
}

/// A question with its answer.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) asked: Asked,
    pub(super) response: Response,
    pub(super) looks: Vec<Look>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) store: Store,
    costs: EtcdCosts,
    waiting: VecDeque<(Asked, Instant)>,
    serving: Option<(Asked, Instant)>,
    /// What it owes to those it tells, nanoseconds.
    tells_ns: u64,
    pub(super) longest_ns: u64,
}

impl Server {
    pub(super) fn new(costs: EtcdCosts) -> Server {
        Server {
            store: Store::new(0, LEASE_LATE_NS),
            costs,
            waiting: VecDeque::new(),
            serving: None,
            tells_ns: 0,
            longest_ns: 0,
        }
    }

    /// A question is there. Is nothing else?
    pub(super) fn arrive(&mut self, now: Instant, asked: Asked) -> bool {
        self.waiting.push_back((asked, now));
        self.serving.is_none()
    }

    /// Begins with the next question, and says how long that takes.
    pub(super) fn begin(&mut self, now: Instant) -> Option<u64> {
        let (asked, arrived) = loop {
            let next = self.waiting.pop_front()?;
            if next.0.until > now {
                break next;
            }
        };
        let EtcdCosts { question_ns, change_ns, key_ns, .. } = self.costs;
        let change = if asked.changes() { change_ns } else { 0 };
        let keys = match &asked.question {
            Question::Looks(disks) => 2 * disks.len() as u64,
            Question::Lease(_) | Question::Take(_) => 1,
        };
        self.serving = Some((asked.clone(), arrived));
        Some(asked.parts() * question_ns + change + keys * key_ns + std::mem::take(&mut self.tells_ns))
    }

    /// It has done it.
    pub(super) fn end(&mut self, now: Instant) -> Option<Work> {
        let (asked, arrived) = self.serving.take()?;
        self.longest_ns = self.longest_ns.max(now.nanos_since(arrived));
        let mut looks = Vec::new();
        let request = match &asked.question {
            Question::Lease(request) => request.clone(),
            Question::Take(txn) => Request::Txn(txn.clone()),
            Question::Looks(disks) => {
                looks = disks.iter().map(|disk| self.store.look(disk)).collect();
                // It only makes leases end that have run out.
                Request::LookUp(String::new())
            }
        };
        let response = self.store.handle(now, request, false, false);
        Some(Work { asked, response, looks })
    }

    /// Tells somebody of so many changes; says when it comes to that, nanoseconds from now.
    pub(super) fn tell(&mut self, changes: usize) -> u64 {
        self.tells_ns += changes as u64 * self.costs.news_ns;
        self.tells_ns
    }
}
