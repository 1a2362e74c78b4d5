//! 2Q: new blocks enter a FIFO, and a block that is missed again soon after it left the FIFO enters
//! an LRU. Johnson and Shasha: "2Q: a low overhead high performance buffer management replacement
//! algorithm", VLDB 1994. The module implements the paper's full version.
//!
//! The FIFO (A1in in the paper) is limited to a quarter of the cache. Uses of a block in the FIFO
//! do not count, because they are mostly part of one operation. Blocks that leave the FIFO are
//! remembered (A1out), and blocks that leave the LRU (Am) are not.
//!
//! The implementation differs from the paper in three ways, so that 10.4 bytes per frame suffice,
//! few enough for the daemon. The number of identifiers in A1out is 48 % of the number of frames,
//! instead of 50 %. A1out stores fingerprints ([`Ghost`]), so an identifier is kept for that number
//! of evictions, even if other identifiers were removed meanwhile. An identifier stays for one more
//! eviction, because a returning block is looked up after the eviction that makes room for it.

use super::ghost::Ghost;
use super::list::{self, Links, List, NONE};
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "2q",
    summary: "new blocks pass through a FIFO queue; blocks requested again after they left it join an LRU list",
    source: "Johnson and Shasha, VLDB 1994",
    serves: true,
    build: |frames| Box::new(TwoQ::new(frames)),
};

/// Link value of a frame that is in the FIFO, which needs links in one direction only. No frame has
/// this number.
const IN_FIFO: u32 = NONE - 1;
const HEAT_LRU: u8 = 1;

struct TwoQ {
    links: Links,
    fifo_oldest: u32,
    fifo_youngest: u32,
    fifo_len: u32,
    /// Number of frames above which the FIFO evicts before the LRU does.
    fifo_max: u32,
    lru: List,
    ghost: Ghost,
}

impl TwoQ {
    fn new(frames: u32) -> Self {
        TwoQ {
            links: list::links(frames as usize),
            fifo_oldest: NONE,
            fifo_youngest: NONE,
            fifo_len: 0,
            fifo_max: frames / 4,
            lru: List::new(),
            ghost: Ghost::new((u64::from(frames) * 48).div_ceil(100) as u32 + 1),
        }
    }

    fn push_fifo(&mut self, frame: u32) {
        self.links[frame as usize] = (IN_FIFO, NONE);
        match self.fifo_len {
            0 => self.fifo_oldest = frame,
            _ => self.links[self.fifo_youngest as usize].1 = frame,
        }
        self.fifo_youngest = frame;
        self.fifo_len += 1;
    }

    fn fifo(&self) -> impl Iterator<Item = u32> + '_ {
        let mut at = self.fifo_oldest;
        (0..self.fifo_len).map(move |_| {
            let frame = at;
            at = self.links[frame as usize].1;
            frame
        })
    }

    /// Evicts the oldest frame of the FIFO, and requeues busy frames.
    fn evict_fifo(
        &mut self,
        patience: &mut u32,
        look: &mut dyn FnMut(FrameNo) -> Candidate,
    ) -> Option<FrameNo> {
        for _ in 0..self.fifo_len.min(*patience) {
            let frame = self.fifo_oldest;
            self.fifo_oldest = self.links[frame as usize].1;
            self.fifo_len -= 1;
            match look(FrameNo(frame)) {
                Candidate::Busy => {
                    *patience -= 1;
                    self.push_fifo(frame);
                    continue;
                }
                Candidate::Block(block) => self.ghost.insert(block),
                Candidate::Empty => {}
            }
            return Some(FrameNo(frame));
        }
        None
    }

    fn evict_lru(
        &mut self,
        patience: &mut u32,
        look: &mut dyn FnMut(FrameNo) -> Candidate,
    ) -> Option<FrameNo> {
        let (frame, _) = self.lru.victim(&self.links, patience, look)?;
        self.lru.remove(&mut self.links, frame);
        Some(FrameNo(frame))
    }
}

impl Policy for TwoQ {
    fn hit(&mut self, frame: FrameNo) {
        if self.links[frame.0 as usize].0 != IN_FIFO {
            self.lru.renew(&mut self.links, frame.0);
        }
    }

    fn insert(&mut self, frame: FrameNo, block: BlockNo) {
        if self.ghost.take(block) {
            self.lru.push(&mut self.links, frame.0);
        } else {
            self.push_fifo(frame.0);
        }
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let mut patience = BUSY_MAX;
        if self.fifo_len > self.fifo_max {
            let frame = self.evict_fifo(&mut patience, look);
            frame.or_else(|| self.evict_lru(&mut patience, look))
        } else {
            let frame = self.evict_lru(&mut patience, look);
            frame.or_else(|| self.evict_fifo(&mut patience, look))
        }
    }

    fn order(&self) -> Vec<(FrameNo, u8)> {
        let fifo = self.fifo().map(|frame| (FrameNo(frame), 0));
        fifo.chain(self.lru.iter(&self.links).map(|frame| (FrameNo(frame), HEAT_LRU))).collect()
    }

    fn restore(&mut self, frame: FrameNo, heat: u8) {
        match heat {
            HEAT_LRU => self.lru.push(&mut self.links, frame.0),
            _ => self.push_fifo(frame.0),
        }
    }

    fn bytes(&self) -> u64 {
        list::bytes(&self.links) + self.ghost.bytes()
    }
}
