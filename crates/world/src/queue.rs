//! What happens next: events by virtual time, and those of one moment in the order they were entered.

use std::collections::BTreeMap;

use hob_engine::units::Instant;

/// Events to come.
#[derive(Debug)]
pub struct Queue<E> {
    events: BTreeMap<(Instant, u64), E>,
    entered: u64,
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Queue { events: BTreeMap::new(), entered: 0 }
    }
}

impl<E> Queue<E> {
    /// Enters an event.
    pub fn push(&mut self, at: Instant, event: E) {
        self.entered += 1;
        self.events.insert((at, self.entered), event);
    }

    /// When the next event is due.
    pub fn next_at(&self) -> Option<Instant> {
        self.events.keys().next().map(|(at, _)| *at)
    }

    /// Takes the next event.
    pub fn pop(&mut self) -> Option<(Instant, E)> {
        self.events.pop_first().map(|((at, _), event)| (at, event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_time_then_by_entry() {
        let mut queue = Queue::default();
        for (at, name) in [(5, "c"), (3, "a"), (5, "d"), (4, "b")] {
            queue.push(Instant(at), name);
        }
        assert_eq!(queue.next_at(), Some(Instant(3)));
        let names: String = std::iter::from_fn(|| queue.pop()).map(|(_, name)| name).collect();
        assert_eq!(names, "abcd");
    }
}
