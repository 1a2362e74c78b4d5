//! Queue of future events, ordered by virtual time. Events with the same time keep their order of
//! insertion.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use hob_engine::units::Instant;

/// Queue of future events.
#[derive(Debug)]
pub struct Queue<E> {
    events: BinaryHeap<Entry<E>>,
    entered: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Instant,
    entered: u64,
    event: E,
}

/// The order is reversed, because a heap returns the greatest entry and the earliest event must be
/// first.
impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.entered).cmp(&(self.at, self.entered))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.entered == other.entered
    }
}

impl<E> Eq for Entry<E> {}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Queue { events: BinaryHeap::new(), entered: 0 }
    }
}

impl<E> Queue<E> {
    /// Adds an event at this time.
    pub fn push(&mut self, at: Instant, event: E) {
        self.entered += 1;
        self.events.push(Entry { at, entered: self.entered, event });
    }

    /// Returns the number of queued events.
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Returns true if the queue has no event.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Returns the time of the next event.
    pub fn next_at(&self) -> Option<Instant> {
        self.events.peek().map(|entry| entry.at)
    }

    /// Removes the events for which `keep` returns false.
    pub fn retain(&mut self, mut keep: impl FnMut(&E) -> bool) {
        self.events.retain(|entry| keep(&entry.event));
    }

    /// Removes and returns the next event.
    pub fn pop(&mut self) -> Option<(Instant, E)> {
        self.events.pop().map(|entry| (entry.at, entry.event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_time_then_by_entry() {
        let mut queue = Queue::default();
        for (at, name) in [(5, "c"), (3, "a"), (5, "d"), (4, "b"), (5, "e")] {
            queue.push(Instant(at), name);
        }
        assert_eq!(queue.next_at(), Some(Instant(3)));
        queue.push(Instant(4), "x");
        queue.retain(|name| *name != "x");
        let names: String = std::iter::from_fn(|| queue.pop()).map(|(_, name)| name).collect();
        assert_eq!(names, "abcde");
    }
}
