//! FIFO: evicts the block that was inserted first.

use super::queue::{self, Links, Queue};
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "fifo",
    summary: "evicts the block that was inserted first, however often it was used",
    source: "the baseline",
    serves: true,
    build: |frames| Box::new(Fifo { queue: Queue::new(), links: queue::links(frames) }),
};

struct Fifo {
    queue: Queue,
    links: Links,
}

impl Policy for Fifo {
    fn hit(&mut self, _: FrameNo) {}

    fn insert(&mut self, frame: FrameNo, _: BlockNo) {
        self.queue.push(&mut self.links, frame);
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        for _ in 0..self.queue.len().min(BUSY_MAX) {
            let frame = self.queue.pop(&self.links)?;
            if look(frame) != Candidate::Busy {
                return Some(frame);
            }
            self.queue.push(&mut self.links, frame);
        }
        None
    }

    fn order(&self) -> Vec<(FrameNo, u8)> {
        self.queue.iter(&self.links).map(|frame| (frame, 0)).collect()
    }

    fn restore(&mut self, frame: FrameNo, _: u8) {
        self.queue.push(&mut self.links, frame);
    }

    fn bytes(&self) -> u64 {
        4 * self.links.capacity() as u64
    }
}
