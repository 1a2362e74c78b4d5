//! Sorts the requests of a trace by time, within a window of a few thousand requests.
//!
//! Trace records are written when requests complete, or by several processors, so times may
//! decrease slightly. The window keeps requests sorted, and requests with equal times in the order
//! of the file. Insertion starts at the end, so sorted traces need no extra work.

use std::collections::VecDeque;

use super::Record;
use super::input::Place;

/// A request in the window, and its position in the trace file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    /// The request. The time `at_ns` of the request is that of the trace file, which need not begin
    /// at 0.
    pub(super) record: Record,
    pub(super) place: Place,
}

/// Window of requests that are sorted by time.
#[derive(Debug)]
pub(super) struct Window {
    waiting: VecDeque<Waiting>,
    room: usize,
}

impl Window {
    pub(super) fn new(room: usize) -> Window {
        Window { waiting: VecDeque::new(), room: room.max(1) }
    }

    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() >= self.room
    }

    pub(super) fn push(&mut self, new: Waiting) {
        let later =
            self.waiting.iter().rev().take_while(|other| other.record.at_ns > new.record.at_ns).count();
        if later == 0 {
            self.waiting.push_back(new);
        } else {
            self.waiting.insert(self.waiting.len() - later, new);
        }
    }

    /// Removes and returns the earliest request.
    pub(super) fn pop(&mut self) -> Option<Waiting> {
        self.waiting.pop_front()
    }

    /// Returns the median time of the waiting requests.
    pub(super) fn median_ns(&self) -> Option<u64> {
        self.waiting.get(self.waiting.len() / 2).map(|waiting| waiting.record.at_ns)
    }

    pub(super) fn retain(&mut self, keep: impl FnMut(&Waiting) -> bool) {
        self.waiting.retain(keep);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Op;

    #[test]
    fn order_is_restored_and_equal_times_stay() {
        let mut window = Window::new(4);
        let times = [5, 3, 5, 3, 9, 1];
        for (n, at_ns) in times.into_iter().enumerate() {
            let record = Record { at_ns, offset: n as u64, len: 1, op: Op::Read, disk: 0 };
            window.push(Waiting { record, place: Place::Line(n as u64) });
        }
        assert!(window.is_full());
        assert_eq!(window.median_ns(), Some(5));
        let order: Vec<_> =
            std::iter::from_fn(|| window.pop()).map(|next| (next.record.at_ns, next.record.offset)).collect();
        assert_eq!(order, [(1, 5), (3, 1), (3, 3), (5, 0), (5, 2), (9, 4)]);
    }
}
