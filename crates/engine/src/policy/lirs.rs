//! LIRS: ranks blocks by how many other blocks were used between their last two uses. Jiang and
//! Zhang: "LIRS: an efficient low inter-reference recency set replacement policy to improve buffer
//! cache performance", SIGMETRICS 2002.
//!
//! Most frames hold blocks that were reused soon (LIR). The other frames, a hundredth of the cache
//! but at least two, hold new blocks and blocks that were reused late (HIR). HIR blocks are evicted
//! in the order of a queue (Q). A stack by recency (S) ends at the least recent LIR block. An HIR
//! block that is used while it is still in S was reused sooner than the least recent LIR block. So
//! the HIR block becomes LIR, and that LIR block becomes HIR. HIR blocks stay in S after their
//! eviction, until they reach its end.
//!
//! The paper does not limit S. Here S remembers as many evicted blocks as the cache has frames, and
//! forgets the earliest first. The stack takes 45 bytes per frame: too many for the daemon.

use super::list::{self, Links, List};
use super::remembered::{self, Remembered};
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "lirs",
    summary: "keeps the blocks with the fewest different blocks between their last two uses",
    source: "Jiang and Zhang, SIGMETRICS 2002",
    serves: false,
    build: |frames| Box::new(Lirs::new(frames)),
};

/// One in this number of frames holds an HIR block.
const FRAMES_PER_HIR: u32 = 100;
/// Minimum number of HIR frames, if the cache has at least twice as many frames.
const HIR_MIN: u32 = 2;
/// Maximum number of nodes of S that are examined, from its end on, when every frame of Q is busy.
const STACK_STEPS_MAX: usize = 8 * BUSY_MAX as usize;
const HEAT_LIR: u8 = 1;

/// Which of LIRS's two lists (stack S, queue Q) contain a frame's block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// A LIR block, which is in S and not in Q.
    Lir,
    /// A HIR block that is in S and Q.
    HirInStack,
    /// A HIR block that is only in Q.
    Hir,
}

struct Lirs {
    /// State of each frame.
    state: Vec<State>,
    /// Nodes: the frames, then the remembered blocks by their number in the directory.
    stack_links: Links,
    stack: List,
    /// Links of the frames in Q, and of the remembered blocks in the order of their eviction.
    queue_links: Links,
    queue: List,
    left: List,
    remembered: Remembered,
    remembered_max: u32,
    lirs: u32,
    lirs_max: u32,
}

impl Lirs {
    fn new(frames: u32) -> Self {
        let hirs = (frames / FRAMES_PER_HIR).max(HIR_MIN).min(frames.div_ceil(2));
        // One more entry is needed, because a returning block keeps its entry until the block that
        // it displaces has one.
        let capacity = remembered::room(frames, frames.saturating_add(1));
        let nodes = frames as usize + capacity as usize;
        Lirs {
            state: vec![State::Hir; frames as usize],
            stack_links: list::links(nodes),
            stack: List::new(),
            queue_links: list::links(nodes),
            queue: List::new(),
            left: List::new(),
            remembered: Remembered::new(capacity),
            remembered_max: capacity.saturating_sub(1),
            lirs: 0,
            lirs_max: frames - hirs,
        }
    }

    fn frames(&self) -> u32 {
        self.state.len() as u32
    }

    /// Makes a frame LIR, on top of S. The frame must be in neither S nor Q.
    fn push_lir(&mut self, frame: u32) {
        self.state[frame as usize] = State::Lir;
        self.stack.push(&mut self.stack_links, frame);
        self.lirs += 1;
        if self.lirs > self.lirs_max {
            self.demote_oldest();
        }
    }

    /// Makes a frame HIR, on top of S and last in Q. The frame must be in neither S nor Q.
    fn push_hir(&mut self, frame: u32) {
        self.queue.push(&mut self.queue_links, frame);
        if self.lirs == 0 {
            // S ends in a LIR block, or is empty.
            self.state[frame as usize] = State::Hir;
        } else {
            self.state[frame as usize] = State::HirInStack;
            self.stack.push(&mut self.stack_links, frame);
        }
    }

    /// Moves the least recent LIR block from the end of S to the end of Q.
    fn demote_oldest(&mut self) {
        let frame = self.stack.oldest().expect("LIR blocks are in S");
        debug_assert!(self.is_lir(frame));
        self.stack.remove(&mut self.stack_links, frame);
        self.state[frame as usize] = State::Hir;
        self.queue.push(&mut self.queue_links, frame);
        self.lirs -= 1;
        self.prune();
    }

    /// Removes blocks that are not LIR from the end of S.
    fn prune(&mut self) {
        while let Some(node) = self.stack.oldest()
            && !self.is_lir(node)
        {
            if node < self.frames() {
                self.stack.remove(&mut self.stack_links, node);
                self.state[node as usize] = State::Hir;
            } else {
                self.forget(node);
            }
        }
    }

    fn is_lir(&self, node: u32) -> bool {
        self.state.get(node as usize) == Some(&State::Lir)
    }

    fn forget(&mut self, node: u32) {
        self.stack.remove(&mut self.stack_links, node);
        self.left.remove(&mut self.queue_links, node);
        self.remembered.remove(node - self.frames());
    }

    /// If too many evicted blocks are remembered, forgets the one that was evicted first.
    fn forget_surplus(&mut self) {
        if self.remembered.len() > self.remembered_max
            && let Some(oldest) = self.left.oldest()
        {
            self.forget(oldest);
        }
    }

    /// Keeps the evicted block of a frame in S.
    fn remember(&mut self, frame: u32, block: BlockNo) {
        self.forget_surplus();
        let node = self.frames() + self.remembered.insert(block);
        self.stack.replace(&mut self.stack_links, frame, node);
        self.left.push(&mut self.queue_links, node);
    }

    fn evict_hir(&mut self, frame: u32, candidate: Candidate) {
        self.queue.remove(&mut self.queue_links, frame);
        match (self.state[frame as usize], candidate) {
            (State::HirInStack, Candidate::Block(block)) => self.remember(frame, block),
            (State::HirInStack, _) => self.stack.remove(&mut self.stack_links, frame),
            _ => {}
        }
    }

    /// Evicts the least recent LIR block that is not busy. Called when all resident HIR blocks
    /// (queue Q) are busy. Returns `None` if all examined LIR blocks are busy, too.
    fn evict_lir(&mut self, patience: u32, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let near_the_end = self.stack.iter(&self.stack_links).take(STACK_STEPS_MAX);
        let frame = near_the_end
            .filter(|node| self.is_lir(*node))
            .take(patience as usize)
            .find(|frame| look(FrameNo(*frame)) != Candidate::Busy)?;
        self.stack.remove(&mut self.stack_links, frame);
        self.lirs -= 1;
        self.prune();
        Some(FrameNo(frame))
    }
}

impl Policy for Lirs {
    fn hit(&mut self, frame: FrameNo) {
        let frame = frame.0;
        match self.state[frame as usize] {
            State::Lir => {
                self.stack.renew(&mut self.stack_links, frame);
                self.prune();
            }
            State::HirInStack => {
                self.stack.remove(&mut self.stack_links, frame);
                self.queue.remove(&mut self.queue_links, frame);
                self.push_lir(frame);
            }
            State::Hir => {
                self.queue.remove(&mut self.queue_links, frame);
                self.push_hir(frame);
            }
        }
    }

    /// Inserts a block. The block becomes LIR if it was still in S, or while there are too few LIR
    /// blocks.
    fn insert(&mut self, frame: FrameNo, block: BlockNo) {
        let returning = self.remembered.find(block);
        if let Some(number) = returning {
            self.forget(self.frames() + number);
        }
        if returning.is_some() || self.lirs < self.lirs_max {
            self.push_lir(frame.0);
        } else {
            self.push_hir(frame.0);
        }
        self.forget_surplus();
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let mut patience = BUSY_MAX;
        match self.queue.victim(&self.queue_links, &mut patience, look) {
            Some((frame, candidate)) => {
                self.evict_hir(frame, candidate);
                Some(FrameNo(frame))
            }
            None => self.evict_lir(patience, look),
        }
    }

    fn order(&self) -> Vec<(FrameNo, u8)> {
        let hirs = self.queue.iter(&self.queue_links).map(|frame| (FrameNo(frame), 0));
        let lirs = self.stack.iter(&self.stack_links).filter(|node| self.is_lir(*node));
        hirs.chain(lirs.map(|frame| (FrameNo(frame), HEAT_LIR))).collect()
    }

    /// HIR blocks are restored without their position in S. Remembered blocks are not restored.
    fn restore(&mut self, frame: FrameNo, heat: u8) {
        match heat {
            HEAT_LIR => self.push_lir(frame.0),
            _ => self.push_hir(frame.0),
        }
    }

    fn bytes(&self) -> u64 {
        let links = list::bytes(&self.stack_links) + list::bytes(&self.queue_links);
        links + self.state.capacity() as u64 + self.remembered.bytes()
    }
}
