//! Abandoning a backing, when its disk is removed although the backing does not answer.
//!
//! No further I/O is submitted to an abandoned backing. Requests that can be cancelled end
//! immediately ([`Driver::revoke`](super::Driver::revoke)). A request in the kernel or in a library
//! cannot be cancelled. After [`WAIT_NS`] that request is reported as failed. Until the request
//! ends, its memory is not reused, and the backing cannot be closed. An abandoned write may still
//! take effect until it ends. Until then, the lock on the backing's file stops other processes from
//! writing the file.

use std::collections::VecDeque;

use hob_engine::io::{BufferSlice, IoError};
use hob_engine::units::{Instant, IoId};

use super::monitor::{InFlight, Monitor};
use super::{Backing, WaitMax};
use crate::ring::Ring;

/// Time that cancelled requests have to end before they are abandoned, nanoseconds.
const WAIT_NS: u64 = 1_000_000_000;

/// State of an abandoned backing.
pub(super) struct Abandonment {
    /// Time at which the requests in flight will be abandoned; `None` after that.
    gives_up_at: Option<Instant>,
    refused: VecDeque<IoId>,
    /// Abandoned requests that have not ended, with their memory.
    open: Vec<(IoId, Option<BufferSlice>)>,
    /// Abandoned requests that were not yet reported to the caller as failed.
    untold: VecDeque<IoId>,
    /// Memory of abandoned requests that have ended, which the caller may reuse.
    returned: VecDeque<BufferSlice>,
}

impl Abandonment {
    pub(super) fn refuse(&mut self, io: IoId) {
        self.refused.push_back(io);
    }

    pub(super) fn poll_refused(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        Some((self.refused.pop_front()?, Err(IoError::ShuttingDown)))
    }

    /// Handles the end of a request. Returns true if the request was abandoned before.
    pub(super) fn ended(&mut self, io: IoId) -> bool {
        let Some(at) = self.open.iter().position(|(id, _)| *id == io) else { return false };
        let (_, slice) = self.open.swap_remove(at);
        self.returned.extend(slice);
        true
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.gives_up_at
    }

    /// Abandons the requests in flight once the waiting time has passed.
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

    /// Returns true if all abandoned requests have ended, and the caller has taken their memory.
    pub(super) fn is_over(&self) -> bool {
        self.open.is_empty() && self.returned.is_empty()
    }
}

impl Backing {
    /// Stops all use of the backing. Requests in flight fail within about a second, and later
    /// requests fail immediately. Call [`close`](super::Driver::close) when nothing is in flight.
    pub fn abandon(&mut self, ring: &mut Ring, now: Instant) {
        if self.abandonment.is_some() {
            return;
        }
        self.revoke(ring, now);
        self.abandonment = Some(Box::new(Abandonment {
            gives_up_at: Some(now + WAIT_NS),
            refused: VecDeque::new(),
            open: Vec::new(),
            untold: VecDeque::new(),
            returned: VecDeque::new(),
        }));
    }

    /// Ends the use of the backing; see [`Driver::revoke`](super::Driver::revoke).
    pub fn revoke(&mut self, ring: &mut Ring, now: Instant) {
        if !std::mem::replace(&mut self.is_revoked, true) {
            self.left_requests |= self.in_flight.has_changes()
                || self.driver.is_repeating()
                || self.monitor.is_disconnected() && self.flush_state.is_unflushed();
        }
        self.driver.revoke(ring, now);
    }

    /// Changes how long requests wait; see [`Driver::set_wait_max`](super::Driver::set_wait_max).
    pub fn set_wait_max(&mut self, now: Instant, change: WaitMax) {
        self.left_requests |= matches!(change, WaitMax::Expired) && self.in_flight.has_changes();
        self.driver.set_wait_max(now, change);
    }

    /// Returns true if the backing may still execute changes of this host that hob no longer waits
    /// for. The result is true if hob ended a change without a reply of the backing, if the
    /// connection is lost and no flush has covered the last change, or if the driver is repeating
    /// changes.
    pub fn may_change_later(&self) -> bool {
        let is_cut_off = !self.is_revoked && self.monitor.is_disconnected();
        self.left_requests || self.driver.is_repeating() || is_cut_off && self.flush_state.is_unflushed()
    }

    /// Returns true if the backing was abandoned.
    pub fn is_abandoned(&self) -> bool {
        self.abandonment.is_some()
    }

    /// Returns the next abandoned request, which the caller reports as failed; `None` if there is
    /// none. The memory of the request stays in use until [`poll_returned`](Self::poll_returned)
    /// returns it.
    pub fn poll_abandoned(&mut self) -> Option<IoId> {
        self.abandonment.as_mut()?.untold.pop_front()
    }

    /// Returns the memory of an abandoned request that has ended; `None` if there is none. The
    /// caller releases the backing's reference to this memory. Call this after
    /// [`poll_done`](Self::poll_done).
    pub fn poll_returned(&mut self) -> Option<BufferSlice> {
        self.abandonment.as_mut()?.returned.pop_front()
    }
}

#[cfg(test)]
mod tests;
