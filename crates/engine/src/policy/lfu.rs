//! Least frequently used, with ageing: LFU-DA, "dynamic ageing". Arlitt, Cherkasova, Dilley, Friedrich,
//! Jin: "Evaluating content management techniques for web proxy caches", ACM SIGMETRICS Performance
//! Evaluation Review 27(4), 2000.
//!
//! A block's value is the number of its uses (the one that brought it included) plus the cache's age
//! at its last use. The block of the least value leaves, and the cache's age becomes that value. So a
//! block that was used a hundred times long ago gives way as soon as the age has risen by a hundred.
//! Uses are counted up to 255, which bounds how long an old favourite can stay.
//!
//! No value is below the age or more than 255 above it: values modulo 256 number a ring of queues, and
//! a byte is enough for one. A hit writes the new value and leaves the frame where it is; a frame
//! found in the queue of an old value moves when the search for a victim reaches it. Each hit causes
//! one such move at most, so an operation is O(1) on average. Of equal values, the frame that came
//! first to its queue leaves first. Memory: 6 bytes a frame.

use super::queue::{self, Links, Queue};
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "lfu",
    summary: "the block used least often leaves; old uses count for less as the cache ages (LFU-DA)",
    source: "Arlitt et al., SIGMETRICS PER 2000",
    serves: true,
    build: |frames| Box::new(Lfu::new(frames)),
};

/// Values there may be at one time: from the cache's age to 255 above it.
const VALUES: usize = 256;

#[derive(Clone, Copy, Default)]
struct Worth {
    /// Uses, 255 at most.
    uses: u8,
    /// Uses plus the age at the last use, modulo [`VALUES`].
    value: u8,
}

struct Lfu {
    links: Links,
    worth: Vec<Worth>,
    /// By value. A frame may stand in the queue of a value it has outgrown.
    queues: Vec<Queue>,
    /// The value of the last victim, modulo [`VALUES`].
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
            // A busy frame returns to this queue: nothing is looked at twice here.
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

    /// A heat is a value, counted from the age.
    fn order(&self) -> Vec<(FrameNo, u8)> {
        let queues = (0..=u8::MAX).map(|above| &self.queues[self.age.wrapping_add(above) as usize]);
        let mut order: Vec<_> = queues
            .flat_map(|queue| queue.iter(&self.links))
            .map(|frame| (frame, self.worth[frame.0 as usize].value.wrapping_sub(self.age)))
            .collect();
        order.sort_by_key(|(_, heat)| *heat);
        order
    }

    /// What a block was worth above the age becomes its uses.
    fn restore(&mut self, frame: FrameNo, heat: u8) {
        self.push(frame, Worth { uses: heat.max(1), value: self.age.wrapping_add(heat) });
    }

    fn bytes(&self) -> u64 {
        let queues = self.queues.capacity() * size_of::<Queue>();
        (queues + self.links.capacity() * 4 + self.worth.capacity() * size_of::<Worth>()) as u64
    }
}
