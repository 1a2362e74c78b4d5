//! A queue that the device serves: its parameters at the start, and its state.

use std::collections::VecDeque;
use std::sync::Arc;

use super::block::Features;
use super::inflight::QueueInflight;
use super::log::ChangeLog;
use super::memory::GuestMap;
use super::queue::{Layout, Queue};

/// Parameters with which the device starts to serve a queue, after the client has set the queue up.
#[derive(Debug)]
pub struct Start {
    pub(crate) queue: u16,
    pub(crate) map: Arc<GuestMap>,
    pub(crate) layout: Layout,
    /// Index in the available ring at which the device starts.
    pub(crate) base: u16,
    /// Virtio features that the driver acknowledged.
    pub(crate) features: Features,
    pub(crate) inflight: Option<QueueInflight>,
    /// Dirty log in which the device records changes of guest memory.
    pub(crate) log: Option<Arc<ChangeLog>>,
}

impl Start {
    /// Creates a queue without in-flight memory, for tests.
    pub fn new(queue: u16, map: Arc<GuestMap>, layout: Layout, base: u16, features: Features) -> Start {
        Start { queue, map, layout, base, features, inflight: None, log: None }
    }

    /// Returns the number of the queue.
    pub fn queue(&self) -> u16 {
        self.queue
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Running,
    /// Requests in flight are completed, but no further chain is taken.
    Stopping,
    Broken,
}

/// A queue that the device serves.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) queue: Queue,
    pub(super) map: Arc<GuestMap>,
    pub(super) features: Features,
    pub(super) inflight: Option<QueueInflight>,
    pub(super) log: Option<Arc<ChangeLog>>,
    /// Guest address of the used ring, and its length in bytes.
    pub(super) used: (u64, u64),
    /// Heads of chains that an earlier daemon took and did not answer.
    pub(super) again: VecDeque<u16>,
    pub(super) state: State,
    /// Number of chains of the queue that were taken and not answered.
    pub(super) taken: u32,
    /// Size of the buffer for which the next chain waits, bytes.
    pub(super) needs_room: Option<usize>,
    /// True if `told` contains the queue, because the queue's driver must be notified of answers.
    pub(super) listed: bool,
}

impl Served {
    pub(super) fn may_take(&self) -> bool {
        match self.state {
            State::Running => true,
            State::Stopping => !self.again.is_empty(),
            State::Broken => false,
        }
    }

    /// Records in the dirty log that guest memory was written.
    pub(super) fn note(&self, address: u64, len: u64) {
        if let Some(log) = &self.log {
            log.note(address, len);
        }
    }

    /// Records that a chain was taken and is in flight.
    pub(super) fn begin_chain(&mut self, head: u16) {
        if self.again.front() == Some(&head) {
            // The chain was in flight before the daemon restarted.
            self.again.pop_front();
        } else {
            if let Some(inflight) = &mut self.inflight {
                inflight.take(head);
            }
            self.queue.advance();
        }
        self.taken += 1;
    }
}
