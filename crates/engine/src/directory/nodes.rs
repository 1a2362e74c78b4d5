//! Translates between the frames of a cache and the numbers (*names*) by which its replacement
//! policy knows them. The name of a frame is its own number until a block moves.
//!
//! A policy keeps its order by frame. A block that moves to another frame keeps its place in the
//! policy's order, because the two frames exchange their names in that order. Only a cache that
//! releases segments moves blocks. All other caches have no entries here.

use std::collections::BTreeMap;

use crate::units::FrameNo;

/// The names of frames in a cache's replacement policy. A frame without an entry has its own number
/// as its name.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    of_frame: BTreeMap<FrameNo, FrameNo>,
    of_node: BTreeMap<FrameNo, FrameNo>,
}

impl Nodes {
    /// Returns the policy's name for a frame.
    #[inline]
    pub(super) fn node(&self, frame: FrameNo) -> FrameNo {
        if self.of_frame.is_empty() {
            return frame;
        }
        self.of_frame.get(&frame).copied().unwrap_or(frame)
    }

    /// Returns the frame that has this name in the policy.
    #[inline]
    pub(super) fn frame(&self, node: FrameNo) -> FrameNo {
        if self.of_node.is_empty() {
            return node;
        }
        self.of_node.get(&node).copied().unwrap_or(node)
    }

    /// Exchanges the names of two frames.
    pub(super) fn exchange(&mut self, one: FrameNo, other: FrameNo) {
        let (of_one, of_other) = (self.node(one), self.node(other));
        self.name(one, of_other);
        self.name(other, of_one);
    }

    fn name(&mut self, frame: FrameNo, node: FrameNo) {
        if frame == node {
            self.of_frame.remove(&frame);
            self.of_node.remove(&node);
        } else {
            self.of_frame.insert(frame, node);
            self.of_node.insert(node, frame);
        }
    }

    /// Returns the memory use in bytes. Trees count as 1.5 times the size of their entries.
    pub(super) fn bytes(&self) -> u64 {
        (self.of_frame.len() * 2 * size_of::<(FrameNo, FrameNo)>() * 3 / 2) as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_frame_has_one_name(swaps in prop::collection::vec((0u32..6, 0u32..6), 0..40)) {
            let mut nodes = Nodes::default();
            let mut names: Vec<u32> = (0..6).collect();
            for (one, other) in swaps {
                nodes.exchange(FrameNo(one), FrameNo(other));
                names.swap(one as usize, other as usize);
                for (frame, name) in (0..).zip(&names) {
                    prop_assert_eq!(nodes.node(FrameNo(frame)), FrameNo(*name));
                    prop_assert_eq!(nodes.frame(FrameNo(*name)), FrameNo(frame));
                }
            }
        }
    }
}
