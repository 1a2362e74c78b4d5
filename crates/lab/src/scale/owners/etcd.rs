//! A model of etcd with one server. The server queues requests and serves one at a time; each
//! request takes a service time. If the sender has timed out before the server starts its request,
//! the server drops the request. A dropped request takes no service time.
//!
//! Byte counts are for HTTP with JSON, including headers. The byte counts were measured with a
//! daemon, etcd 3.4 and names of ten letters.

use std::collections::VecDeque;

use hob_engine::cluster::OwnershipSnapshot;
use hob_engine::units::Instant;
use hob_world::cluster::store::{Request, Response, Store};

use super::EtcdCosts;

/// Time from the expiry of a lease until etcd ends it, nanoseconds. etcd checks leases only at
/// intervals.
const LEASE_LATE_NS: u64 = 500_000_000;

/// Size of an HTTP request and its response without content, bytes.
const HEADS_BYTES: f64 = 600.0;

/// Size of a key in a read request, bytes. `ENTRY_BYTES` is the size of a record or lock in a
/// response, `TAKE_BYTES` is the size of a transaction, and `NEWS_BYTES` is the size of a watch
/// event.
const KEY_BYTES: f64 = 58.0;
const ENTRY_BYTES: f64 = 310.0;
const TAKE_BYTES: f64 = 500.0;
const NEWS_BYTES: f64 = 400.0;

/// A host's request to etcd.
#[derive(Clone, Debug)]
pub(super) enum Question {
    /// A request of the lease manager.
    Lease(Request),
    /// A read of the keys of these disks.
    Looks(Vec<String>),
    /// A transaction that acquires a disk.
    Take(hob_engine::cluster::Txn),
}

/// A request in flight with the timeout of its sender.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) host: usize,
    pub(super) number: u64,
    pub(super) question: Question,
    pub(super) until: Instant,
}

impl Asked {
    /// Returns true if the request changes data, so that a majority must store the change.
    pub(super) fn changes(&self) -> bool {
        match &self.question {
            Question::Lease(request) => !matches!(request, Request::Renew(..) | Request::LookUp(_)),
            Question::Looks(_) => false,
            Question::Take(_) => true,
        }
    }

    /// Returns the number of HTTP requests.
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

/// Returns the size of a response without its header, bytes. The size of the header is included in
/// the size of the request.
pub(super) fn answer_bytes(asked: &Asked, looks: &[OwnershipSnapshot]) -> f64 {
    let entries =
        looks.iter().map(|look| usize::from(look.title.is_some()) + usize::from(look.hold.is_some()));
    match asked.question {
        Question::Looks(_) => entries.sum::<usize>() as f64 * ENTRY_BYTES,
        Question::Lease(_) | Question::Take(_) => ENTRY_BYTES,
    }
}

/// Returns the size of this many watch events, bytes.
pub(super) fn news_bytes(changes: usize) -> f64 {
    changes as f64 * NEWS_BYTES
}

/// A request with its response.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) asked: Asked,
    pub(super) response: Response,
    pub(super) looks: Vec<OwnershipSnapshot>,
}

/// The server of the modelled etcd, with its queue of requests.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) store: Store,
    costs: EtcdCosts,
    waiting: VecDeque<(Asked, Instant)>,
    serving: Option<(Asked, Instant)>,
    /// Time that the server still needs to send queued watch events, nanoseconds.
    tells_ns: u64,
    /// Longest time from the arrival of a request to the end of its execution, nanoseconds.
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

    /// Adds a request. Returns true if the server is idle.
    pub(super) fn arrive(&mut self, now: Instant, asked: Asked) -> bool {
        self.waiting.push_back((asked, now));
        self.serving.is_none()
    }

    /// Starts the next request and returns its service time, nanoseconds.
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

    /// Completes the current request.
    pub(super) fn end(&mut self, now: Instant) -> Option<Work> {
        let (asked, arrived) = self.serving.take()?;
        self.longest_ns = self.longest_ns.max(now.nanos_since(arrived));
        let mut looks = Vec::new();
        let request = match &asked.question {
            Question::Lease(request) => request.clone(),
            Question::Take(txn) => Request::Txn(txn.clone()),
            Question::Looks(disks) => {
                looks = disks.iter().map(|disk| self.store.look(disk)).collect();
                // The model executes this request only to end expired leases.
                Request::LookUp(String::new())
            }
        };
        let response = self.store.handle(now, request, false, false);
        Some(Work { asked, response, looks })
    }

    /// Sends this many watch events. Returns the delay until they are sent, nanoseconds.
    pub(super) fn tell(&mut self, changes: usize) -> u64 {
        self.tells_ns += changes as u64 * self.costs.news_ns;
        self.tells_ns
    }
}
