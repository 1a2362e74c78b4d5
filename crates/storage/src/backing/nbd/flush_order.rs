//! The order in which overlapping flushes of a server end.
//!
//! A server may report a loss to one flush only. If two flushes are in flight, one may fail, and
//! the other may succeed although its data is lost. The success may arrive first, because servers
//! answer in any order. The engine orders the flushes that it sends (`engine/sync_order.rs`), but
//! does not know those that hob sends without an I/O. If one of these failed after the success, the
//! guest would already rely on lost data. So the success of a flush is held back until all flushes
//! that were in flight with it have ended. A failure is passed on immediately, so it arrives before
//! the success that was held back. A durable write (FUA) counts as a flush: servers flush to make
//! it durable.

use std::collections::VecDeque;

/// The slots of flushes in flight, and of flushes whose success is held back.
#[derive(Debug, Default)]
pub(super) struct FlushOrder {
    /// Flushes in flight, with their numbers.
    in_flight: Vec<(u32, u64)>,
    /// Number of flushes so far.
    begun: u64,
    /// Successful flushes, each with the value of `begun` when it ended: it waits for all flushes in
    /// flight with lower numbers.
    held: VecDeque<(u32, u64)>,
}

impl FlushOrder {
    /// Records that a flush was sent.
    pub(super) fn begin(&mut self, slot: u32) {
        self.in_flight.push((slot, self.begun));
        self.begun += 1;
    }

    /// Records the end of a flush. Returns true if its success is held back until
    /// [`poll_released`](Self::poll_released) returns it. Returns false for anything else than a
    /// flush in flight.
    pub(super) fn end(&mut self, slot: u32, is_success: bool) -> bool {
        let Some(at) = self.in_flight.iter().position(|(it, _)| *it == slot) else { return false };
        self.in_flight.swap_remove(at);
        let is_held = is_success && !self.in_flight.is_empty();
        if is_held {
            self.held.push_back((slot, self.begun));
        }
        is_held
    }

    /// Returns a successful flush that was held back and need not wait any more.
    pub(super) fn poll_released(&mut self) -> Option<u32> {
        let (slot, upto) = *self.held.front()?;
        if self.in_flight.iter().any(|(_, number)| *number < upto) {
            return None;
        }
        self.held.pop_front();
        Some(slot)
    }

    /// Forgets a flush, in flight or held back.
    pub(super) fn forget(&mut self, slot: u32) {
        self.in_flight.retain(|(it, _)| *it != slot);
        self.held.retain(|(it, _)| *it != slot);
    }
}

#[cfg(test)]
mod tests {
    use super::FlushOrder;

    #[test]
    fn a_flush_alone_is_passed_on_at_once() {
        let mut order = FlushOrder::default();
        order.begin(1);
        assert!(!order.end(1, true));
        assert!(!order.end(7, true), "not a flush");
        assert_eq!(order.poll_released(), None);
    }

    #[test]
    fn a_success_waits_for_the_flushes_that_were_in_flight_when_it_ended() {
        let mut order = FlushOrder::default();
        (1..=3).for_each(|slot| order.begin(slot));
        assert!(order.end(2, true));
        order.begin(4);
        assert!(!order.end(1, false), "failures are passed on at once");
        assert_eq!(order.poll_released(), None, "3 is in flight");
        assert!(order.end(3, true), "4 is in flight");
        assert_eq!(order.poll_released(), Some(2), "it need not wait for 4");
        assert_eq!(order.poll_released(), None);
        assert!(!order.end(4, true));
        assert_eq!(order.poll_released(), Some(3));
    }

    #[test]
    fn forgotten_flushes_hold_nothing_back() {
        let mut order = FlushOrder::default();
        (1..=3).for_each(|slot| order.begin(slot));
        assert!(order.end(1, true) && order.end(2, true));
        order.forget(1);
        order.forget(3);
        assert_eq!(order.poll_released(), Some(2));
    }
}
