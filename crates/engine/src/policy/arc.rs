//! ARC (adaptive replacement cache): divides the cache between blocks used once and blocks used
//! more often. The division adapts to which of these blocks are missed. Megiddo and Modha: "ARC: a
//! self-tuning, low overhead replacement cache", FAST 2003.
//!
//! The policy has four lists by recency: frames used once (T1 in the paper), frames used more often
//! (T2), and the blocks last evicted from each (B1 and B2). B1 and B2 remember as many blocks as
//! the cache has frames. A miss of a block in B1 shows that T1 is too small, and a miss of a block
//! in B2 that T1 is too large. Each such miss changes the target length of T1, by more if the list
//! of the block (B1 or B2) is short. An eviction takes a block from T1 if T1 is longer than its
//! target, and otherwise from T2.
//!
//! The policy remembers evicted blocks exactly and in order. The exact order takes 30 bytes per
//! frame, more than the daemon allows.

use super::list::{self, Links, List};
use super::remembered::{self, Remembered};
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "arc",
    summary: "divides the cache between recently and frequently used blocks; evicted blocks that are requested again shift the division",
    source: "Megiddo and Modha, FAST 2003",
    serves: false,
    build: |frames| Box::new(Arc::new(frames)),
};

/// Indexes in the pairs of lists: used once, or more often.
const ONCE: usize = 0;
const OFTEN: usize = 1;

struct Arc {
    /// Nodes: the frames, then the remembered blocks by their number in the directory.
    links: Links,
    /// For each node, `ONCE` or `OFTEN`.
    side: Vec<u8>,
    /// The paper's lists T1 and T2.
    held: [List; 2],
    /// The paper's lists B1 and B2.
    left: [List; 2],
    remembered: Remembered,
    remembered_max: u32,
    frames: u32,
    /// Target length of T1.
    target: f64,
    /// True if the last admitted block was in B2.
    returns_to_often: bool,
    /// True if the last admitted block was in neither B1 nor B2.
    is_stranger: bool,
}

impl Arc {
    fn new(frames: u32) -> Self {
        // One more entry is needed, because a returning block keeps its entry until the block that
        // it displaces has one.
        let remembered_max = remembered::room(frames, frames.saturating_add(1));
        let nodes = frames as usize + remembered_max as usize;
        Arc {
            links: list::links(nodes),
            side: vec![0; nodes],
            held: [List::new(); 2],
            left: [List::new(); 2],
            remembered: Remembered::new(remembered_max),
            remembered_max,
            frames,
            target: 0.0,
            returns_to_often: false,
            is_stranger: true,
        }
    }

    /// Returns the list to evict from (the paper's REPLACE).
    fn side_to_shrink(&self) -> usize {
        let once = f64::from(self.held[ONCE].len());
        let above = once > self.target || (once == self.target && self.returns_to_often);
        if once > 0.0 && above { ONCE } else { OFTEN }
    }

    /// Prepares an eviction for a block in neither B1 nor B2: keeps |T1| + |B1| within the cache's
    /// size, and all four lists within twice that size. Returns false if the block that is evicted
    /// from T1 must not be remembered.
    fn make_room_for_a_stranger(&mut self) -> bool {
        let side = |side: usize| u64::from(self.held[side].len()) + u64::from(self.left[side].len());
        let (once, often, frames) = (side(ONCE), side(OFTEN), u64::from(self.frames));
        if once >= frames {
            return self.forget_oldest(ONCE);
        }
        if once + often >= 2 * frames {
            self.forget_oldest(OFTEN);
        }
        true
    }

    fn forget_oldest(&mut self, side: usize) -> bool {
        let oldest = self.left[side].oldest();
        if let Some(node) = oldest {
            self.forget(node);
        }
        oldest.is_some()
    }

    fn forget(&mut self, node: u32) {
        self.left[usize::from(self.side[node as usize])].remove(&mut self.links, node);
        self.remembered.remove(node - self.frames);
    }

    fn remember(&mut self, block: BlockNo, side: usize) {
        if self.remembered.len() == self.remembered_max {
            let longer = if self.left[ONCE].len() > self.left[OFTEN].len() { ONCE } else { OFTEN };
            self.forget_oldest(longer);
        }
        let node = self.frames + self.remembered.insert(block);
        self.side[node as usize] = side as u8;
        self.left[side].push(&mut self.links, node);
    }
}

impl Policy for Arc {
    fn hit(&mut self, frame: FrameNo) {
        let side = &mut self.side[frame.0 as usize];
        if usize::from(*side) == OFTEN {
            self.held[OFTEN].renew(&mut self.links, frame.0);
        } else {
            *side = OFTEN as u8;
            self.held[ONCE].remove(&mut self.links, frame.0);
            self.held[OFTEN].push(&mut self.links, frame.0);
        }
    }

    fn admit(&mut self, block: BlockNo) -> bool {
        let side = self.remembered.find(block).map(|i| self.side[(self.frames + i) as usize]);
        let [once, often] = [ONCE, OFTEN].map(|side| f64::from(self.left[side].len()));
        match side.map(usize::from) {
            None => {}
            Some(ONCE) => self.target = (self.target + (often / once).max(1.0)).min(f64::from(self.frames)),
            Some(_) => self.target = (self.target - (once / often).max(1.0)).max(0.0),
        }
        self.returns_to_often = side.map(usize::from) == Some(OFTEN);
        self.is_stranger = side.is_none();
        true
    }

    fn insert(&mut self, frame: FrameNo, block: BlockNo) {
        let returning = self.remembered.find(block);
        if let Some(number) = returning {
            self.forget(self.frames + number);
        }
        let side = if returning.is_some() { OFTEN } else { ONCE };
        self.side[frame.0 as usize] = side as u8;
        self.held[side].push(&mut self.links, frame.0);
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let mut patience = BUSY_MAX;
        let first = self.side_to_shrink();
        let (side, frame, candidate) = [first, 1 - first].into_iter().find_map(|side| {
            let (frame, candidate) = self.held[side].victim(&self.links, &mut patience, look)?;
            Some((side, frame, candidate))
        })?;
        if let Candidate::Block(block) = candidate
            && (!self.is_stranger || self.make_room_for_a_stranger() || side == OFTEN)
        {
            self.remember(block, side);
        }
        self.held[side].remove(&mut self.links, frame);
        Some(FrameNo(frame))
    }

    fn order(&self) -> Vec<(FrameNo, u8)> {
        let side =
            |side: usize| self.held[side].iter(&self.links).map(move |frame| (FrameNo(frame), side as u8));
        side(ONCE).chain(side(OFTEN)).collect()
    }

    /// Restores a frame into its list. The target length of T1 is not saved, so it becomes the
    /// length of the restored T1.
    fn restore(&mut self, frame: FrameNo, heat: u8) {
        let side = usize::from(heat).min(OFTEN);
        self.side[frame.0 as usize] = side as u8;
        self.held[side].push(&mut self.links, frame.0);
        self.target = f64::from(self.held[ONCE].len());
    }

    fn bytes(&self) -> u64 {
        list::bytes(&self.links) + self.side.capacity() as u64 + self.remembered.bytes()
    }
}
