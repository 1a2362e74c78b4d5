//! LRU: evicts the least recently used block.

use super::list::{self, Links, List};
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "lru",
    summary: "evicts the block that was not used for the longest time",
    source: "the baseline",
    serves: true,
    build: |frames| Box::new(Lru { links: list::links(frames as usize), list: List::new() }),
};

struct Lru {
    links: Links,
    list: List,
}

impl Policy for Lru {
    fn hit(&mut self, frame: FrameNo) {
        self.list.renew(&mut self.links, frame.0);
    }

    fn insert(&mut self, frame: FrameNo, _: BlockNo) {
        self.list.push(&mut self.links, frame.0);
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let (frame, _) = self.list.victim(&self.links, &mut { BUSY_MAX }, look)?;
        self.list.remove(&mut self.links, frame);
        Some(FrameNo(frame))
    }

    fn order(&self) -> Vec<(FrameNo, u8)> {
        self.list.iter(&self.links).map(|frame| (FrameNo(frame), 0)).collect()
    }

    fn restore(&mut self, frame: FrameNo, _: u8) {
        self.list.push(&mut self.links, frame.0);
    }

    fn bytes(&self) -> u64 {
        list::bytes(&self.links)
    }
}
