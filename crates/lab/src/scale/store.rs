//! The modelled datastore that all hosts share, and the queue of future events, which is the
//! model's clock. The datastore has several servers behind one queue.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::prng::Prng;

/// A future event of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// The guest of this disk sends a new I/O.
    Arrival(usize),
    /// An I/O of a disk, sent at `began`, completes.
    Done { disk: usize, began: u64 },
    /// The rate limits of a host's disks may allow more I/O, so the host must try to send.
    Look(usize),
}

/// The modelled datastore: several servers behind one queue.
pub(super) struct Store {
    idle: usize,
    service_ns: u64,
    queue: VecDeque<(usize, u64)>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    serial: u64,
    /// Random number generator for the service times. A free server starts the next I/O
    /// immediately.
    dice: Prng,
}

impl Store {
    pub(super) fn new(servers: usize, service_ns: u64) -> Store {
        Store {
            idle: servers,
            service_ns,
            queue: VecDeque::new(),
            events: BinaryHeap::new(),
            serial: 0,
            dice: Prng::new(7),
        }
    }

    /// Schedules an event at this time.
    pub(super) fn at(&mut self, at: u64, event: Event) {
        self.serial += 1;
        self.events.push(Reverse((at, self.serial, event)));
    }

    /// Sends an I/O to the datastore.
    pub(super) fn send(&mut self, now: u64, disk: usize) {
        if self.idle == 0 {
            return self.queue.push_back((disk, now));
        }
        self.idle -= 1;
        self.serve(now, disk, now);
    }

    pub(super) fn next(&mut self) -> Option<(u64, Event)> {
        let Reverse((now, _, event)) = self.events.pop()?;
        if matches!(event, Event::Done { .. }) {
            match self.queue.pop_front() {
                Some((disk, began)) => self.serve(now, disk, began),
                None => self.idle += 1,
            }
        }
        Some((now, event))
    }

    fn serve(&mut self, now: u64, disk: usize, began: u64) {
        let takes = -(1.0 - self.dice.unit()).ln() * self.service_ns as f64;
        self.at(now + takes as u64, Event::Done { disk, began });
    }
}
