//! Clock2Q+: a policy with the three queues of S3-FIFO, one reference bit, and a *correlation
//! window*. Zhai et al.: "Clock2Q+: a simple and efficient replacement algorithm for metadata cache
//! in VMware vSAN", arXiv 2511.21958, 2025 (VLDB 2026).
//!
//! A new block enters the small queue, which is a tenth of the cache. Uses soon after the first one
//! are often part of the same operation and do not show popularity. So a hit does not set the
//! reference bit while the block is among the newest half of the small queue. At the end of the
//! small queue, a block with its bit set moves to the main clock. Any other block is evicted, and
//! its number is remembered. The policy remembers half as many numbers as the cache has frames.
//! When a remembered block is missed, it enters the main clock directly. The main clock spares a
//! used block once.
//!
//! Where the paper gives no details, this policy follows S3-FIFO. Victims come from the small queue
//! while it has at least a tenth of the cache, otherwise from the main clock. A block enters the
//! main clock behind the clock hand, with its bit clear. The small queue may exceed its tenth while
//! the cache fills. A busy frame moves to the young end of its queue without entering the window
//! again. Memory use is 7½ bytes per frame.

use super::ghost::Ghost;
use super::queue::{self, Links, Queue};
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "clock2qplus",
    summary: "like s3-fifo, but uses soon after a block's insertion do not count",
    source: "Zhai et al., arXiv 2511.21958 (VLDB 2026)",
    serves: true,
    build: |frames| Box::new(Clock2QPlus::new(frames, Ghost::new(frames / 2))),
};

/// Flag of a block that was used since it entered its queue, or since the clock hand of the main
/// clock last passed it.
const USED: u8 = 1;
/// Flag of a block among the newest blocks of the small queue. Uses of such a block do not count.
const IN_WINDOW: u8 = 2;
/// Flag in the usage value that `order` returns: the block is in the main clock.
const HEAT_MAIN: u8 = 4;

pub(super) struct Clock2QPlus {
    small: Queue,
    main: Queue,
    links: Links,
    flags: Vec<u8>,
    ghost: Ghost,
    small_max: u32,
    window_max: u32,
    /// Number of frames at the young end of the small queue that the window covers, and the oldest
    /// of them.
    window_len: u32,
    window_end: u32,
}

impl Clock2QPlus {
    pub(super) fn new(frames: u32, ghost: Ghost) -> Self {
        let small_max = (frames / 10).max(1);
        Clock2QPlus {
            small: Queue::new(),
            main: Queue::new(),
            links: queue::links(frames),
            flags: vec![0; frames as usize],
            ghost,
            small_max,
            window_max: small_max / 2,
            window_len: 0,
            window_end: 0,
        }
    }

    /// Adds a frame to the small queue, and advances the window by one frame.
    fn push_small(&mut self, frame: FrameNo, flags: u8) {
        self.flags[frame.0 as usize] = flags;
        self.small.push(&mut self.links, frame);
        if self.window_len == 0 {
            self.window_end = frame.0;
        }
        self.window_len += 1;
        if self.window_len > self.window_max {
            self.flags[self.window_end as usize] &= !IN_WINDOW;
            self.shorten_window();
        }
    }

    fn shorten_window(&mut self) {
        self.window_end = self.links[self.window_end as usize];
        self.window_len -= 1;
    }

    fn pop_small(&mut self) -> Option<FrameNo> {
        if self.small.len() == self.window_len {
            self.shorten_window();
        }
        self.small.pop(&self.links)
    }

    /// Handles the oldest frame of the small queue: evicts it, moves it to the main clock, or
    /// requeues a busy frame.
    fn evict_small(&mut self, frame: FrameNo, candidate: Candidate) -> bool {
        let flags = self.flags[frame.0 as usize];
        match candidate {
            Candidate::Empty => return true,
            Candidate::Block(block) if flags & USED == 0 => {
                self.ghost.insert(block);
                return true;
            }
            Candidate::Block(_) => {
                self.flags[frame.0 as usize] = 0;
                self.main.push(&mut self.links, frame);
            }
            Candidate::Busy => self.push_small(frame, flags & !IN_WINDOW),
        }
        false
    }

    /// Handles the frame at the clock hand of the main clock: evicts or spares it.
    fn evict_main(&mut self, frame: FrameNo, candidate: Candidate) -> bool {
        let flags = &mut self.flags[frame.0 as usize];
        match candidate {
            Candidate::Empty => return true,
            Candidate::Block(_) if *flags & USED == 0 => return true,
            Candidate::Block(_) => *flags = 0,
            Candidate::Busy => {}
        }
        self.main.push(&mut self.links, frame);
        false
    }
}

impl Policy for Clock2QPlus {
    fn hit(&mut self, frame: FrameNo) {
        let flags = &mut self.flags[frame.0 as usize];
        *flags |= u8::from(*flags & IN_WINDOW == 0) * USED;
    }

    fn insert(&mut self, frame: FrameNo, block: BlockNo) {
        if self.ghost.take(block) {
            self.flags[frame.0 as usize] = 0;
            self.main.push(&mut self.links, frame);
        } else {
            self.push_small(frame, IN_WINDOW);
        }
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let mut busy = 0;
        // If all frames of one queue are busy, the other queue is searched.
        let mut busy_in_small = 0;
        while busy < BUSY_MAX.min(2 * (self.small.len() + self.main.len())) {
            let small_is_full = self.small.len() >= self.small_max && busy_in_small < self.small.len();
            let from_small = small_is_full || self.main.len() == 0;
            let frame = if from_small { self.pop_small() } else { self.main.pop(&self.links) }?;
            let candidate = look(frame);
            busy += u32::from(candidate == Candidate::Busy);
            busy_in_small += u32::from(from_small && candidate == Candidate::Busy);
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
        let heat = |frame: &FrameNo| self.flags[frame.0 as usize];
        let small = self.small.iter(&self.links).map(|frame| (frame, heat(&frame)));
        let main = self.main.iter(&self.links).map(|frame| (frame, heat(&frame) | HEAT_MAIN));
        small.chain(main).collect()
    }

    fn restore(&mut self, frame: FrameNo, heat: u8) {
        if heat & HEAT_MAIN == 0 {
            self.push_small(frame, heat);
        } else {
            self.flags[frame.0 as usize] = heat & USED;
            self.main.push(&mut self.links, frame);
        }
    }

    fn bytes(&self) -> u64 {
        4 * self.links.capacity() as u64 + self.flags.capacity() as u64 + self.ghost.bytes()
    }
}
