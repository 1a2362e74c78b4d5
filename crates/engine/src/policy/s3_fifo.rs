//! S3-FIFO: a small queue for new blocks, a main queue for popular blocks, and a memory of blocks
//! evicted from the small queue. Yang, Zhang, Qiu, Yue, Vinayak: "FIFO queues are all you need for
//! cache eviction", SOSP 2023.
//!
//! A new block enters the small queue (a tenth of the cache). At the end of the small queue, a
//! block that was used more than once moves to the main queue. Any other block is evicted and
//! remembered. When a remembered block is missed, it enters the main queue directly. At the end of
//! the main queue, a block is requeued as often as it was used (at most three times) before it is
//! evicted. The memory makes the policy adaptive: after a change of the workload, returning blocks
//! reach the main queue directly.

use super::ghost::Ghost;
use super::queue::{self, Links, Queue};
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "s3-fifo",
    summary: "evicts blocks that were used once early, and keeps popular blocks; remembers recently evicted blocks",
    source: "Yang et al., SOSP 2023",
    serves: true,
    build: |frames| Box::new(S3Fifo::new(frames)),
};

const USES_MAX: u8 = 3;
/// Number of uses, beyond the first one, that a block in the small queue needs to stay in the
/// cache.
const USES_TO_STAY: u8 = 2;
/// Flag in the usage value that `order` returns: the block was in the main queue.
const HEAT_MAIN: u8 = 4;

struct S3Fifo {
    small: Queue,
    main: Queue,
    links: Links,
    uses: Vec<u8>,
    ghost: Ghost,
    small_max: u32,
}

/// Creates a form of the policy that remembers half as many evicted blocks as usual.
pub(super) fn lean(frames: u32) -> Box<dyn Policy> {
    let ghosts = (frames - small_max(frames)).div_ceil(2);
    Box::new(S3Fifo::with_ghost(frames, Ghost::new(ghosts)))
}

fn small_max(frames: u32) -> u32 {
    (frames / 10).max(1)
}

impl S3Fifo {
    fn new(frames: u32) -> Self {
        Self::with_ghost(frames, Ghost::new(frames - small_max(frames)))
    }

    fn with_ghost(frames: u32, ghost: Ghost) -> Self {
        let small_max = small_max(frames);
        S3Fifo {
            small: Queue::new(),
            main: Queue::new(),
            links: queue::links(frames),
            uses: vec![0; frames as usize],
            ghost,
            small_max,
        }
    }

    /// Handles the frame that was just removed from the old end of the small queue. Returns true if
    /// the frame is to be evicted; otherwise the frame was added to the main queue, or again to the
    /// small queue if it is busy.
    fn evict_small(&mut self, frame: FrameNo, candidate: Candidate) -> bool {
        match candidate {
            Candidate::Empty => return true,
            Candidate::Block(block) if self.uses[frame.0 as usize] < USES_TO_STAY => {
                self.ghost.insert(block);
                return true;
            }
            Candidate::Block(_) => {
                self.uses[frame.0 as usize] = 0;
                self.main.push(&mut self.links, frame);
            }
            Candidate::Busy => self.small.push(&mut self.links, frame),
        }
        false
    }

    /// Handles the frame that was just removed from the old end of the main queue. Returns true if
    /// the frame is to be evicted; otherwise the frame was added to the main queue again.
    fn evict_main(&mut self, frame: FrameNo, candidate: Candidate) -> bool {
        let uses = &mut self.uses[frame.0 as usize];
        match candidate {
            Candidate::Empty => return true,
            Candidate::Block(_) if *uses == 0 => return true,
            Candidate::Block(_) => *uses -= 1,
            Candidate::Busy => {}
        }
        self.main.push(&mut self.links, frame);
        false
    }
}

impl Policy for S3Fifo {
    fn hit(&mut self, frame: FrameNo) {
        let uses = &mut self.uses[frame.0 as usize];
        *uses = (*uses + 1).min(USES_MAX);
    }

    fn insert(&mut self, frame: FrameNo, block: BlockNo) {
        self.uses[frame.0 as usize] = 0;
        let queue = if self.ghost.take(block) { &mut self.main } else { &mut self.small };
        queue.push(&mut self.links, frame);
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let (mut busy, mut busy_small) = (0, 0);
        while busy < BUSY_MAX.min(self.small.len() + self.main.len()) {
            // If all frames of the small queue are busy, the main queue is searched.
            let small_is_due = self.small.len() >= self.small_max && busy_small < self.small.len();
            let from_small = small_is_due || self.main.len() == 0;
            let queue = if from_small { &mut self.small } else { &mut self.main };
            let frame = queue.pop(&self.links)?;
            let candidate = look(frame);
            busy += u32::from(candidate == Candidate::Busy);
            busy_small += u32::from(from_small && candidate == Candidate::Busy);
            let out = if from_small {
                self.evict_small(frame, candidate)
            } else {
                self.evict_main(frame, candidate)
            };
            if out {
                return Some(frame);
            }
        }
        None
    }

    fn order(&self) -> Vec<(FrameNo, u8)> {
        let heat = |frame: &FrameNo| self.uses[frame.0 as usize];
        let small = self.small.iter(&self.links).map(|frame| (frame, heat(&frame)));
        let main = self.main.iter(&self.links).map(|frame| (frame, heat(&frame) | HEAT_MAIN));
        small.chain(main).collect()
    }

    fn restore(&mut self, frame: FrameNo, heat: u8) {
        self.uses[frame.0 as usize] = heat & USES_MAX;
        let queue = if heat & HEAT_MAIN != 0 { &mut self.main } else { &mut self.small };
        queue.push(&mut self.links, frame);
    }

    fn bytes(&self) -> u64 {
        4 * self.links.capacity() as u64 + self.uses.capacity() as u64 + self.ghost.bytes()
    }
}
