//! A doubly linked list of nodes. The lists of a policy share one array, with 8 bytes per node.
//!
//! Nodes are small numbers. A policy uses the first numbers for its frames, and the others for
//! remembered blocks, if it has any. A node is in at most one list of its array.

use super::Candidate;
use crate::units::FrameNo;

pub(super) const NONE: u32 = u32::MAX;

/// For each node, the next older and the next younger node in its list.
pub(super) type Links = Vec<(u32, u32)>;

/// Creates links for `nodes` nodes.
pub(super) fn links(nodes: usize) -> Links {
    vec![(NONE, NONE); nodes]
}

/// Returns the size of links in bytes.
pub(super) fn bytes(links: &Links) -> u64 {
    8 * links.capacity() as u64
}

/// Nodes in order of age, with new nodes at the young end.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    oldest: u32,
    youngest: u32,
    len: u32,
}

impl List {
    pub(super) const fn new() -> Self {
        List { oldest: NONE, youngest: NONE, len: 0 }
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// Adds a node that is in no list, as the youngest one.
    #[inline]
    pub(super) fn push(&mut self, links: &mut Links, node: u32) {
        links[node as usize] = (self.youngest, NONE);
        match self.youngest {
            NONE => self.oldest = node,
            youngest => links[youngest as usize].1 = node,
        }
        self.youngest = node;
        self.len += 1;
    }

    /// Removes a node, which must be in this list.
    #[inline]
    pub(super) fn remove(&mut self, links: &mut Links, node: u32) {
        let (older, younger) = links[node as usize];
        self.join(links, older, younger);
        self.len -= 1;
    }

    /// Moves a node, which must be in this list, to the young end.
    #[inline]
    pub(super) fn renew(&mut self, links: &mut Links, node: u32) {
        if self.youngest != node {
            self.remove(links, node);
            self.push(links, node);
        }
    }

    /// Replaces `old` by `new`, which is in no list. `old` is then in no list.
    pub(super) fn replace(&mut self, links: &mut Links, old: u32, new: u32) {
        let (older, younger) = links[old as usize];
        links[new as usize] = (older, younger);
        self.join(links, older, new);
        self.join(links, new, younger);
    }

    /// Appends all nodes of `other` after the youngest node of this list.
    pub(super) fn append(&mut self, links: &mut Links, other: &mut List) {
        let other = std::mem::replace(other, List::new());
        if other.len == 0 {
            return;
        }
        match self.youngest {
            NONE => self.oldest = other.oldest,
            youngest => {
                links[youngest as usize].1 = other.oldest;
                links[other.oldest as usize].0 = youngest;
            }
        }
        self.youngest = other.youngest;
        self.len += other.len;
    }

    /// Links two nodes, so that `younger` follows `older`. `NONE` in place of a node stands for the
    /// end of the list.
    #[inline]
    fn join(&mut self, links: &mut Links, older: u32, younger: u32) {
        match older {
            NONE => self.oldest = younger,
            older => links[older as usize].1 = younger,
        }
        match younger {
            NONE => self.youngest = older,
            younger => links[younger as usize].0 = older,
        }
    }

    /// Returns the nodes from oldest to youngest.
    pub(super) fn iter<'a>(&self, links: &'a Links) -> impl Iterator<Item = u32> + use<'a> {
        let mut at = self.oldest;
        std::iter::from_fn(move || {
            let node = at;
            (node != NONE).then(|| {
                at = links[node as usize].1;
                node
            })
        })
    }

    /// Returns the oldest frame that may be evicted, or `None` if there is none. Skips at most
    /// `patience` busy frames, and reduces `patience` by their number.
    pub(super) fn victim(
        &self,
        links: &Links,
        patience: &mut u32,
        look: &mut dyn FnMut(FrameNo) -> Candidate,
    ) -> Option<(u32, Candidate)> {
        for node in self.iter(links) {
            if *patience == 0 {
                return None;
            }
            match look(FrameNo(node)) {
                Candidate::Busy => *patience -= 1,
                candidate => return Some((node, candidate)),
            }
        }
        None
    }
}
