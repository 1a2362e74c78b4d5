//! Replacement policies. Each policy is one file and one line in [`POLICIES`].
//!
//! A policy orders frames. A *frame* is the place of one block in a cache. The caller reports
//! insertions and hits, and asks for victims. For each candidate frame, the policy asks the caller
//! which block the frame has, and whether it may be evicted now ([`Candidate`]).

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
    AUTO,
    two_level_lru::INFO,
];

/// An automatic policy, which starts as the default policy. A cache that uses it has a
/// [`chooser`](crate::chooser).
const AUTO: PolicyInfo = PolicyInfo {
    name: "auto",
    summary: "simulates several policies beside the cache, and uses the one with the best hit ratio",
    source: "Waldspurger et al., USENIX ATC 2017",
    serves: true,
    build: s3_fifo::INFO.build,
};

/// Properties of one replacement policy: a row of [`POLICIES`].
#[derive(Debug)]
pub struct PolicyInfo {
    /// The name that users type.
    pub name: &'static str,
    /// A one-line summary.
    pub summary: &'static str,
    /// The publication that describes the policy.
    pub source: &'static str,
    /// True if the daemon may use the policy. Such a policy and the index together take at most 24
    /// bytes per 4 KiB block.
    pub serves: bool,
    /// Creates the policy for a cache of `frames` frames.
    pub build: fn(frames: u32) -> Box<dyn Policy>,
}

/// Name of a policy: a row of [`POLICIES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyKind(u8);

impl PolicyKind {
    /// Returns all policies.
    pub fn all() -> impl Iterator<Item = PolicyKind> {
        (0..POLICIES.len() as u8).map(PolicyKind)
    }

    /// Returns the name, the summary and the other properties of this policy.
    pub fn info(self) -> &'static PolicyInfo {
        &POLICIES[self.0 as usize]
    }

    /// Returns true if the cache chooses its policy itself, by simulations.
    pub fn is_auto(self) -> bool {
        self.info().name == AUTO.name
    }

    /// Creates the policy for a cache of `frames` frames whose admission remembers blocks too. The
    /// policy `s3-fifo` then remembers fewer blocks, so that both stay within 24 bytes per block.
    pub(crate) fn build_beside_admission(self, frames: u32) -> Box<dyn Policy> {
        if self.info().name == s3_fifo::INFO.name {
            s3_fifo::lean(frames)
        } else {
            (self.info().build)(frames)
        }
    }

    /// Returns the policy of that name, in which hyphens may be omitted; `None` if there is none.
    pub fn from_name(name: &str) -> Option<PolicyKind> {
        let letters = |name: &str| name.replace('-', "");
        Self::all().find(|kind| letters(kind.info().name) == letters(name))
    }
}

/// State of a frame that a policy would evict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Candidate {
    /// The frame may be evicted, and holds this block.
    Block(BlockNo),
    /// The frame may be evicted without loss, because it has no valid sector.
    Empty,
    /// The frame must stay, because I/O on it is in flight.
    Busy,
}

/// The replacement order of one cache.
pub trait Policy: Send {
    /// Records that a request read or wrote the block in this frame.
    fn hit(&mut self, frame: FrameNo);

    /// Records an access to a block that is not in the cache, and returns true if the block is
    /// admitted. The caller then calls `evict` if no frame is free, and `insert`, unless every
    /// candidate was busy. In this call, policies learn from misses.
    fn admit(&mut self, _block: BlockNo) -> bool {
        true
    }

    /// Adds a frame that now holds this block. The policy must not have the frame already: the
    /// frame was never added, or `evict` has returned it after it was last added.
    fn insert(&mut self, frame: FrameNo, block: BlockNo);

    /// Chooses a frame to evict and removes it. Returns `None` if all candidates are busy.
    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo>;

    /// Returns true if the frame is in a protected class. All other frames are evicted before
    /// protected ones.
    fn is_hot(&self, _frame: FrameNo) -> bool {
        false
    }

    /// Returns every frame with its usage value (the policy's own measure), least used first.
    fn order(&self) -> Vec<(FrameNo, u8)>;

    /// Adds a frame with the usage value that [`order`](Self::order) of an earlier instance of the
    /// same policy returned. The caller adds the least used frame first.
    fn restore(&mut self, frame: FrameNo, heat: u8);

    /// Returns the memory use, bytes.
    fn bytes(&self) -> u64;
}

/// Maximum number of busy frames that a policy skips before an eviction fails.
const BUSY_MAX: u32 = 128;
