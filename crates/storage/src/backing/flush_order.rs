//! The order in which the results of overlapping flushes are passed on.
//!
//! A kernel or a server may report a loss to one flush only. If two flushes are in flight, one may
//! fail, and the other may succeed although its data is lost. The success may arrive first, because
//! servers answer in any order. A guest that got this success would rely on lost data. So the
//! success of a flush is held back until all flushes that were in flight with it have ended. A
//! failure is passed on at once, and so before the success. A durable write (FUA) counts as a
//! flush: servers flush to make it durable.

use std::collections::VecDeque;

/// Flushes in flight, and flushes whose success is held back. `K` names a flush.
#[derive(Debug)]
pub(super) struct FlushOrder<K> {
    /// Flushes in flight, with their numbers.
    in_flight: Vec<(K, u64)>,
    /// Number of flushes so far.
    begun: u64,
    /// Successful flushes, each with the value of `begun` when it ended: it waits for all flushes in
    /// flight with lower numbers.
    held: VecDeque<(K, u64)>,
}

impl<K> Default for FlushOrder<K> {
    fn default() -> Self {
        Self { in_flight: Vec::new(), begun: 0, held: VecDeque::new() }
    }
}

impl<K: Copy + PartialEq> FlushOrder<K> {
    /// Records that a flush was sent.
    pub(super) fn begin(&mut self, key: K) {
        self.in_flight.push((key, self.begun));
        self.begun += 1;
    }

    /// Records the end of a flush. Returns true if its success is held back until
    /// [`poll_released`](Self::poll_released) returns it. Returns false for anything else than a
    /// flush in flight.
    pub(super) fn end(&mut self, key: K, is_success: bool) -> bool {
        let Some(at) = self.in_flight.iter().position(|(it, _)| *it == key) else { return false };
        self.in_flight.swap_remove(at);
        let is_held = is_success && !self.in_flight.is_empty();
        if is_held {
            self.held.push_back((key, self.begun));
        }
        is_held
    }

    /// Returns a successful flush that was held back and need not wait any more.
    pub(super) fn poll_released(&mut self) -> Option<K> {
        let (key, upto) = *self.held.front()?;
        if self.in_flight.iter().any(|(_, number)| *number < upto) {
            return None;
        }
        self.held.pop_front();
        Some(key)
    }

    /// Forgets a flush, in flight or held back.
    pub(super) fn forget(&mut self, key: K) {
        self.in_flight.retain(|(it, _)| *it != key);
        self.held.retain(|(it, _)| *it != key);
    }

    /// Returns the flushes whose success is held back, and forgets them.
    pub(super) fn take_held(&mut self) -> impl Iterator<Item = K> + use<K> {
        std::mem::take(&mut self.held).into_iter().map(|(key, _)| key)
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
        (1..=3).for_each(|key| order.begin(key));
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
        (1..=3).for_each(|key| order.begin(key));
        assert!(order.end(1, true) && order.end(2, true));
        order.forget(1);
        order.forget(3);
        assert_eq!(order.poll_released(), Some(2));
        (4..=5).for_each(|key| order.begin(key));
        assert!(order.end(4, true));
        assert_eq!(order.take_held().collect::<Vec<_>>(), [4]);
        assert_eq!(order.poll_released(), None);
        assert!(!order.end(5, true), "it is alone");
    }
}
