//! Least frequently used, with ageing: LFU-DA, "dynamic ageing". Arlitt, Cherkasova, Dilley,
//! Friedrich, Jin: "Evaluating content management techniques for web proxy caches", ACM SIGMETRICS
//! Performance Evaluation Review 27(4), 2000.
//!
//! A block's value is the number of its uses, including the first one, plus the cache's age at its
//! last use. The block with the least value is evicted, and the cache's age becomes that value. So
//! a block that was used a hundred times long ago is evicted when the age has risen by a hundred.
//! Uses are counted up to 255, which limits how long a formerly popular block can stay.
//!
//! No value is below the age or more than 255 above it. So values modulo 256 number a ring of
//! queues, and one byte is enough for a value. A hit writes the new value and leaves the frame in
//! the queue of its old value. If the search for a victim finds a frame in the queue of an old
//! value, it moves the frame to the queue of its present value. Each hit causes at most one such
//! move, so an operation takes O(1) on average. Among equal values, the frame that entered its
//! queue first is evicted first. Memory use is 6 bytes per frame.

use super::queue::{self, Links, Queue};
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "lfu",
    summary: "evicts the block used least often; uses long ago count for less (LFU-DA)",
    source: "Arlitt et al., SIGMETRICS PER 2000",
    serves: true,
    build: |frames| Box::new(Lfu::new(frames)),
};

/// Number of different values at one time: from the cache's age to 255 above it.
const VALUES: usize = 256;

#[derive(Clone, Copy, Default)]
struct Worth {
    /// Number of uses, at most 255.
    uses: u8,
    /// Number of uses plus the age at the last use, modulo [`VALUES`].
    value: u8,
}

struct Lfu {
    links: Links,
    worth: Vec<Worth>,
    /// Queues by value. A frame may be in the queue of an old value.
    queues: Vec<Queue>,
    /// Value of the last victim, modulo [`VALUES`].
    age: u8,
}

impl Lfu {
    fn new(frames: u32) -> Self {
        Lfu {
            links: queue::links(frames),
            worth: vec![Worth::default(); frames as usize],
            queues: (0..VALUES).map(|_| Queue::new()).collect(),
            age: 0,
        }
    }

    fn push(&mut self, frame: FrameNo, worth: Worth) {
        self.worth[frame.0 as usize] = worth;
        self.queues[worth.value as usize].push(&mut self.links, frame);
    }
}

impl Policy for Lfu {
    fn hit(&mut self, frame: FrameNo) {
        let worth = &mut self.worth[frame.0 as usize];
        worth.uses = worth.uses.saturating_add(1);
        worth.value = self.age.wrapping_add(worth.uses);
    }

    fn insert(&mut self, frame: FrameNo, _: BlockNo) {
        self.push(frame, Worth { uses: 1, value: self.age.wrapping_add(1) });
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let mut busy = 0;
        for above_age in 0..=u8::MAX {
            let value = self.age.wrapping_add(above_age);
            // A busy frame returns to this queue, so each frame is examined at most once.
            for _ in 0..self.queues[value as usize].len() {
                let frame = self.queues[value as usize].pop(&self.links)?;
                let candidate = look(frame);
                let worth = self.worth[frame.0 as usize];
                if candidate == Candidate::Empty {
                    return Some(frame);
                }
                if candidate != Candidate::Busy && worth.value == value {
                    self.age = value;
                    return Some(frame);
                }
                self.push(frame, worth);
                busy += u32::from(candidate == Candidate::Busy);
                if busy == BUSY_MAX {
                    return None;
                }
            }
        }
        None
    }

    /// The usage value of a block is its `value` minus the cache's age.
    fn order(&self) -> Vec<(FrameNo, u8)> {
        let queues = (0..=u8::MAX).map(|above| &self.queues[self.age.wrapping_add(above) as usize]);
        let mut order: Vec<_> = queues
            .flat_map(|queue| queue.iter(&self.links))
            .map(|frame| (frame, self.worth[frame.0 as usize].value.wrapping_sub(self.age)))
            .collect();
        order.sort_by_key(|(_, heat)| *heat);
        order
    }

    /// Adds a block with as many uses as its usage value, at least 1.
    fn restore(&mut self, frame: FrameNo, heat: u8) {
        self.push(frame, Worth { uses: heat.max(1), value: self.age.wrapping_add(heat) });
    }

    fn bytes(&self) -> u64 {
        let queues = self.queues.capacity() * size_of::<Queue>();
        (queues + self.links.capacity() * 4 + self.worth.capacity() * size_of::<Worth>()) as u64
    }
}
