//! A backing that is given up: its disk is removed, whether it answers or not.
//!
//! From then on nothing is asked of it. What it can call back ends at once ([`Driver::revoke`](super::Driver::revoke)); a request that the kernel or
//! a library has cannot be called back. It is *abandoned* after [`WAIT_NS`]: whoever asked hears that it failed, and its memory is not used
//! again until it really ends. Then the backing can be closed. If the request is a write, it may be done at any time until
//! then; nobody else can write a file meanwhile, because the lock is held.

use std::collections::VecDeque;

use hob_engine::io::{BufferSlice, IoError};
use hob_engine::units::{Instant, IoId};

use super::Backing;
use super::monitor::{InFlight, Monitor};
use crate::ring::Ring;

/// Time for requests that can be called back, nanoseconds.
const WAIT_NS: u64 = 1_000_000_000;

/// See the module's text.
pub(super) struct Abandonment {
    /// When requests without an answer are abandoned, unless that has happened.
    gives_up_at: Option<Instant>,
    refused: VecDeque<IoId>,
    /// Requests that were abandoned and have not ended.
    open: Vec<(IoId, Option<BufferSlice>)>,
    /// Of these, those that nobody has been told of.
    untold: VecDeque<IoId>,
    /// Memory of those that have ended.
    returned: VecDeque<BufferSlice>,
}

impl Abandonment {
    pub(super) fn refuse(&mut self, io: IoId) {
        self.refused.push_back(io);
    }

    pub(super) fn poll_refused(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        Some((self.refused.pop_front()?, Err(IoError::ShuttingDown)))
    }

    /// A request of the driver has ended. Returns whether it was abandoned before.
    pub(super) fn ended(&mut self, io: IoId) -> bool {
        let Some(at) = self.open.iter().position(|(id, _)| *id == io) else { return false };
        let (_, slice) = self.open.swap_remove(at);
        self.returned.extend(slice);
        true
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.gives_up_at
    }

    /// Abandons what is in flight, if it is time.
    pub(super) fn handle_timeout(
        &mut self,
        ring: &mut Ring,
        now: Instant,
        in_flight: &mut InFlight,
        monitor: &Monitor,
    ) {
        if self.gives_up_at.take_if(|at| *at <= now).is_none() {
            return;
        }
        for (id, slice) in in_flight.give_up(monitor) {
            if let Some(slice) = slice {
                ring.arena_mut().retain(slice.id);
            }
            self.open.push((id, slice));
            self.untold.push_back(id);
        }
    }

    /// Has everything ended, and been told?
    pub(super) fn is_over(&self) -> bool {
        self.open.is_empty() && self.returned.is_empty()
    }
}

impl Backing {
    /// Ends all use of the backing except for what cannot be called back: requests in flight fail within about a second, later ones at once.
    /// Afterwards [`close`](Self::close) it when nothing is in flight.
    pub fn abandon(&mut self, ring: &mut Ring, now: Instant) {
        if self.abandonment.is_some() {
            return;
        }
        self.driver.revoke(ring, now);
        self.abandonment = Some(Box::new(Abandonment {
            gives_up_at: Some(now + WAIT_NS),
            refused: VecDeque::new(),
            open: Vec::new(),
            untold: VecDeque::new(),
            returned: VecDeque::new(),
        }));
    }

    /// Was it abandoned?
    pub fn is_abandoned(&self) -> bool {
        self.abandonment.is_some()
    }

    /// A request that was abandoned: it failed, and its memory is used until [`poll_returned`](Self::poll_returned) has it.
    pub fn poll_abandoned(&mut self) -> Option<IoId> {
        self.abandonment.as_mut()?.untold.pop_front()
    }

    /// The memory of an abandoned request that has ended. The caller releases it: the backing has kept one reference. To be asked after
    /// [`poll_done`](Self::poll_done).
    pub fn poll_returned(&mut self) -> Option<BufferSlice> {
        self.abandonment.as_mut()?.returned.pop_front()
    }
}

#[cfg(test)]
mod tests;
