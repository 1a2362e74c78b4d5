//! LARC: an LRU that admits a block only on its second miss within a short time, which avoids most
//! writes to flash. Huang, Wei, Chen, Chen, Feng: "Improving flash-based disk cache with lazy
//! adaptive replacement", MSST 2013.
//!
//! Missed blocks enter a queue of remembered blocks (Qr in the paper). The target for the queue's
//! length (Cr) is between a tenth and nine tenths of the cache. Each miss raises the target, by
//! more if the queue is short, and each hit lowers the target. So when hits are few, new blocks
//! have more time to be missed again. The paper does not say how a queue above its target shrinks.
//! Here the next new block removes as many entries as necessary.
//!
//! The policy remembers blocks exactly. The exact queue takes 26 bytes per frame, more than the
//! daemon allows.

use super::list::{self, Links, List};
use super::remembered::Remembered;
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "larc",
    summary: "LRU that admits a block only at its second miss in a short time, which saves flash writes",
    source: "Huang et al., MSST 2013",
    serves: false,
    build: |frames| Box::new(Larc::new(frames)),
};

struct Larc {
    frame_links: Links,
    held: List,
    remembered: Remembered,
    /// Links of the remembered blocks, by their numbers.
    queue_links: Links,
    queue: List,
    frames: f64,
    target: f64,
    target_min: f64,
    target_max: f64,
}

impl Larc {
    fn new(frames: u32) -> Self {
        let all = f64::from(frames);
        // With fewer than ten frames, a tenth of the cache would be less than one block.
        let target_min = (0.1 * all).max(1.0);
        let target_max = (0.9 * all).max(1.0);
        // One more entry is needed, because a new block is added before the oldest is removed.
        let remembered_max = target_max as u32 + 1;
        Larc {
            frame_links: list::links(frames as usize),
            held: List::new(),
            remembered: Remembered::new(remembered_max),
            queue_links: list::links(remembered_max as usize),
            queue: List::new(),
            frames: all,
            target: target_min,
            target_min,
            target_max,
        }
    }

    fn forget(&mut self, number: u32) {
        self.queue.remove(&mut self.queue_links, number);
        self.remembered.remove(number);
    }
}

impl Policy for Larc {
    fn hit(&mut self, frame: FrameNo) {
        self.held.renew(&mut self.frame_links, frame.0);
        let step = self.frames / (self.frames - self.target);
        self.target = (self.target - step).max(self.target_min);
    }

    fn admit(&mut self, block: BlockNo) -> bool {
        self.target = (self.target + self.frames / self.target).min(self.target_max);
        if self.remembered.find(block).is_some() {
            return true;
        }
        let number = self.remembered.insert(block);
        self.queue.push(&mut self.queue_links, number);
        while f64::from(self.queue.len()) > self.target
            && let Some(oldest) = self.queue.oldest()
        {
            self.forget(oldest);
        }
        false
    }

    fn insert(&mut self, frame: FrameNo, block: BlockNo) {
        // The block leaves the queue only now. If the block could not be inserted because every
        // candidate for eviction was busy, it must stay remembered.
        if let Some(number) = self.remembered.find(block) {
            self.forget(number);
        }
        self.held.push(&mut self.frame_links, frame.0);
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let (frame, _) = self.held.victim(&self.frame_links, &mut { BUSY_MAX }, look)?;
        self.held.remove(&mut self.frame_links, frame);
        Some(FrameNo(frame))
    }

    fn order(&self) -> Vec<(FrameNo, u8)> {
        self.held.iter(&self.frame_links).map(|frame| (FrameNo(frame), 0)).collect()
    }

    fn restore(&mut self, frame: FrameNo, _: u8) {
        self.held.push(&mut self.frame_links, frame.0);
    }

    fn bytes(&self) -> u64 {
        list::bytes(&self.frame_links) + list::bytes(&self.queue_links) + self.remembered.bytes()
    }
}
