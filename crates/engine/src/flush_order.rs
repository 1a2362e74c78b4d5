//! Holds the success of a flush back until all flushes that overlapped with it have ended.
//!
//! Flushes of one device or server may overlap. If some data is lost, only one of these flushes may
//! report the loss. Another flush then finds no data left to write, and its success may arrive
//! before the failure. So a success is handled only after all flushes have ended that were in
//! flight when it arrived. A failure is handled at once, and so before the success of a flush that
//! overlapped with it. A durable write (FUA) counts as a flush.

use std::collections::VecDeque;

/// Flushes in flight, and successful flushes that are held back. `K` identifies a flush. `T` is the
/// caller's data of a flush that is held back.
#[derive(Debug)]
pub struct FlushOrder<K, T> {
    /// The entry of a flush in flight has no data (`None`), and is queued when the flush begins. A
    /// success that is held back is queued when the flush ends, and so behind all flushes for which
    /// it waits.
    queue: VecDeque<(K, Option<T>)>,
}

impl<K, T> Default for FlushOrder<K, T> {
    fn default() -> Self {
        FlushOrder { queue: VecDeque::new() }
    }
}

impl<K: Copy + PartialEq, T> FlushOrder<K, T> {
    /// Records the start of a flush.
    pub fn begin(&mut self, key: K) {
        self.queue.push_back((key, None));
    }

    /// Records the end of a flush in flight. Returns true if other flushes are in flight. The
    /// caller must then [`hold`](Self::hold) a success. Call [`poll_released`](Self::poll_released)
    /// afterwards.
    pub fn end(&mut self, key: K) -> bool {
        let at = self.queue.iter().position(|(it, held)| *it == key && held.is_none());
        self.queue.remove(at.expect("the flush was in flight"));
        self.queue.iter().any(|(_, held)| held.is_none())
    }

    /// Holds the success of a flush back until the flushes that are in flight now have ended.
    pub fn hold(&mut self, key: K, data: T) {
        self.queue.push_back((key, Some(data)));
    }

    /// Returns true if the success of this flush is held back.
    pub fn is_held(&self, key: K) -> bool {
        self.queue.iter().any(|(it, held)| *it == key && held.is_some())
    }

    /// Returns a success that was held back and need not wait any more: the one that arrived first.
    pub fn poll_released(&mut self) -> Option<(K, T)> {
        let data = self.queue.front_mut()?.1.take()?;
        self.queue.pop_front().map(|(key, _)| (key, data))
    }

    /// Forgets a flush, in flight or held back.
    pub fn forget(&mut self, key: K) {
        self.queue.retain(|(it, _)| *it != key);
    }
}

#[cfg(test)]
mod tests {
    use super::FlushOrder;

    type Order = FlushOrder<u32, char>;

    /// Begins flushes with these keys.
    fn in_flight(keys: impl IntoIterator<Item = u32>) -> Order {
        let mut order = Order::default();
        keys.into_iter().for_each(|key| order.begin(key));
        order
    }

    /// Ends a flush successfully. Returns true if it is held back.
    fn succeed(order: &mut Order, key: u32) -> bool {
        let is_held = order.end(key);
        if is_held {
            order.hold(key, 'x');
        }
        assert_eq!(order.is_held(key), is_held);
        is_held
    }

    fn released(order: &mut Order) -> Vec<u32> {
        std::iter::from_fn(|| order.poll_released()).map(|(key, _)| key).collect()
    }

    #[test]
    fn a_flush_alone_is_passed_on_at_once() {
        let mut order = Order::default();
        assert_eq!(order.poll_released(), None);
        order.begin(1);
        assert_eq!(order.poll_released(), None);
        assert!(!succeed(&mut order, 1));
        assert_eq!(order.poll_released(), None);
    }

    #[test]
    #[should_panic(expected = "the flush was in flight")]
    fn only_a_flush_in_flight_ends() {
        let mut order = in_flight([1, 2]);
        assert!(succeed(&mut order, 1));
        order.end(1);
    }

    #[test]
    fn a_success_waits_for_the_flushes_that_were_in_flight_when_it_ended() {
        let mut order = in_flight(1..=3);
        assert!(succeed(&mut order, 2));
        order.begin(4);
        order.end(1);
        assert_eq!(order.poll_released(), None, "3 is in flight");
        assert!(succeed(&mut order, 3), "4 is in flight");
        assert_eq!(released(&mut order), [2], "it need not wait for 4");
        assert!(!succeed(&mut order, 4));
        assert_eq!(released(&mut order), [3]);
    }

    #[test]
    fn a_failure_is_handled_before_the_success_that_waits_for_it() {
        // The failure arrives last.
        let mut order = in_flight([1, 2]);
        assert!(succeed(&mut order, 1));
        assert_eq!(order.poll_released(), None);
        order.end(2);
        assert_eq!(order.poll_released(), Some((1, 'x')));
        assert!(!order.is_held(1));
        // The failure arrives first: the caller has handled it, and the success waits for nothing.
        let mut order = in_flight([1, 2]);
        order.end(2);
        assert!(!succeed(&mut order, 1));
        assert_eq!(order.poll_released(), None);
    }

    #[test]
    fn successes_are_released_in_the_order_of_their_arrival() {
        let mut order = in_flight(1..=4);
        for key in [3, 1, 4] {
            assert!(succeed(&mut order, key));
            assert_eq!(order.poll_released(), None);
        }
        assert!(!succeed(&mut order, 2));
        assert_eq!(released(&mut order), [3, 1, 4]);
    }

    /// Flush 1 overlaps with flush 2, and 2 with 3, but 1 and 3 do not overlap.
    #[test]
    fn a_success_waits_for_no_flush_that_began_after_it_ended() {
        for is_success in [true, false] {
            let mut order = in_flight([1, 2]);
            assert!(succeed(&mut order, 1));
            order.begin(3);
            match is_success {
                true => assert!(succeed(&mut order, 2)),
                false => assert!(order.end(2)),
            }
            assert_eq!(released(&mut order), [1]);
            assert!(!succeed(&mut order, 3));
            assert_eq!(released(&mut order), if is_success { vec![2] } else { vec![] });
        }
    }

    #[test]
    fn forgotten_flushes_hold_nothing_back() {
        let mut order = in_flight(1..=3);
        assert!(succeed(&mut order, 1) && succeed(&mut order, 2));
        order.forget(1);
        order.forget(3);
        assert_eq!(released(&mut order), [2]);
    }
}
