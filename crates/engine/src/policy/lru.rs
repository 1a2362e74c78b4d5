//! Least recently used.

use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "lru",
    summary: "the block not used for the longest time leaves",
    source: "the baseline",
    build: |frames| {
        Box::new(Lru { links: vec![(NONE, NONE); frames as usize], oldest: NONE, youngest: NONE })
    },
};

const NONE: u32 = u32::MAX;

struct Lru {
    /// Per frame: next older, next younger.
    links: Vec<(u32, u32)>,
    oldest: u32,
    youngest: u32,
}

impl Lru {
    fn unlink(&mut self, frame: u32) {
        let (older, younger) = self.links[frame as usize];
        match older {
            NONE => self.oldest = younger,
            older => self.links[older as usize].1 = younger,
        }
        match younger {
            NONE => self.youngest = older,
            younger => self.links[younger as usize].0 = older,
        }
    }

    fn push(&mut self, frame: u32) {
        self.links[frame as usize] = (self.youngest, NONE);
        match self.youngest {
            NONE => self.oldest = frame,
            youngest => self.links[youngest as usize].1 = frame,
        }
        self.youngest = frame;
    }
}

impl Policy for Lru {
    fn hit(&mut self, frame: FrameNo) {
        if self.youngest != frame.0 {
            self.unlink(frame.0);
            self.push(frame.0);
        }
    }

    fn insert(&mut self, frame: FrameNo, _: BlockNo) {
        self.push(frame.0);
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let mut at = self.oldest;
        for _ in 0..BUSY_MAX {
            if at == NONE {
                return None;
            }
            if look(FrameNo(at)) != Candidate::Busy {
                self.unlink(at);
                return Some(FrameNo(at));
            }
            at = self.links[at as usize].1;
        }
        None
    }

    fn order(&self) -> Vec<(FrameNo, u8)> {
        let mut at = self.oldest;
        std::iter::from_fn(|| {
            (at != NONE).then(|| {
                let frame = FrameNo(at);
                at = self.links[at as usize].1;
                (frame, 0)
            })
        })
        .collect()
    }

    fn restore(&mut self, frame: FrameNo, _: u8) {
        self.push(frame.0);
    }

    fn bytes(&self) -> u64 {
        8 * self.links.capacity() as u64
    }
}
