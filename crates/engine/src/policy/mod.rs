//! Replacement: which block gives way. One policy is one file and one line in [`POLICIES`].
//!
//! A policy orders frames. It is told of insertions and hits, and asked for a victim; what a frame
//! holds and whether it may leave now, it learns from its caller.

mod arc;
mod bits;
mod clock;
mod clock2q_plus;
mod fifo;
pub(crate) mod ghost;
mod larc;
mod lfu;
mod lirs;
mod list;
mod lru;
mod queue;
mod remembered;
mod s3_fifo;
mod sieve;
mod sketch;
#[cfg(test)]
mod tests;
mod two_level_lru;
mod two_q;
mod wtinylfu;

use crate::units::{BlockNo, FrameNo};

/// Every policy, the default first.
pub const POLICIES: &[PolicyInfo] = &[
    s3_fifo::INFO,
    lru::INFO,
    fifo::INFO,
    clock::INFO,
    sieve::INFO,
    lfu::INFO,
    wtinylfu::INFO,
    clock2q_plus::INFO,
    two_q::INFO,
    arc::INFO,
    lirs::INFO,
    larc::INFO,
    two_level_lru::INFO,
];

/// A row of [`POLICIES`].
#[derive(Debug)]
pub struct PolicyInfo {
    /// As users type it.
    pub name: &'static str,
    /// One line on what it does.
    pub summary: &'static str,
    /// Where it was published.
    pub source: &'static str,
    /// May run in the daemon: within the promise of 24 bytes per 4 KiB block, index included.
    pub serves: bool,
    /// Makes one for a cache of that many frames.
    pub build: fn(frames: u32) -> Box<dyn Policy>,
}

/// Names a policy: a row of [`POLICIES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyKind(u8);

impl PolicyKind {
    /// Each policy once.
    pub fn all() -> impl Iterator<Item = PolicyKind> {
        (0..POLICIES.len() as u8).map(PolicyKind)
    }

    /// The row of [`POLICIES`].
    pub fn info(self) -> &'static PolicyInfo {
        &POLICIES[self.0 as usize]
    }

    /// The policy of that name; hyphens may be left out.
    pub fn from_name(name: &str) -> Option<PolicyKind> {
        let letters = |name: &str| name.replace('-', "");
        Self::all().find(|kind| letters(kind.info().name) == letters(name))
    }
}

/// What the caller knows of a frame that a policy would evict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Candidate {
    /// It may leave. It holds this block.
    Block(BlockNo),
    /// It may leave, and nobody will miss it: no sector of it is valid.
    Empty,
    /// I/O on it is in flight: it must stay.
    Busy,
}

/// One cache's replacement order.
pub trait Policy: Send {
    /// A request used the block in this frame.
    fn hit(&mut self, frame: FrameNo);

    /// A block that is not in the cache was asked for. May it come in? If so, room is made with `evict`
    /// where no frame is free, and `insert` follows, unless every candidate was busy. A policy that
    /// learns from misses learns here.
    fn admit(&mut self, _block: BlockNo) -> bool {
        true
    }

    /// A block came into this frame, which the policy did not know or has given up since.
    fn insert(&mut self, frame: FrameNo, block: BlockNo);

    /// Chooses a frame and forgets it. `None` when those it would choose are busy.
    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo>;

    /// Is this frame, which the policy knows, in a class of its own that others have to leave before?
    fn is_hot(&self, _frame: FrameNo) -> bool {
        false
    }

    /// Every frame with its heat (the policy's own measure), coldest first.
    fn order(&self) -> Vec<(FrameNo, u8)>;

    /// Takes a frame over from another instance of the same policy. Called coldest first.
    fn restore(&mut self, frame: FrameNo, heat: u8);

    /// Bytes of memory.
    fn bytes(&self) -> u64;
}

/// Busy frames that a policy steps over before it gives up.
const BUSY_MAX: u32 = 128;
