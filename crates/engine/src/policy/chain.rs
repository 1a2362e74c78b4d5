//! A doubly linked list of frames, for policies that take frames out of the middle. Lists of one policy
//! share the array of links: 8 bytes a frame.

use crate::units::FrameNo;

const NONE: u32 = u32::MAX;

/// A frame's neighbours in its list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    older: u32,
    younger: u32,
}

/// For each frame, its place in its list.
pub(crate) type Links = Vec<Link>;

/// Links for that many frames.
pub(crate) fn links(frames: u32) -> Links {
    vec![Link { older: NONE, younger: NONE }; frames as usize]
}

/// Oldest at the front.
#[derive(Debug)]
pub(crate) struct Chain {
    oldest: u32,
    youngest: u32,
    len: u32,
}

impl Chain {
    pub(crate) const fn new() -> Self {
        Chain { oldest: NONE, youngest: NONE, len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn oldest(&self) -> Option<FrameNo> {
        (self.oldest != NONE).then_some(FrameNo(self.oldest))
    }

    /// Adds a frame that is in no list, as the youngest.
    pub(crate) fn push(&mut self, links: &mut Links, frame: FrameNo) {
        links[frame.0 as usize] = Link { older: self.youngest, younger: NONE };
        match self.youngest {
            NONE => self.oldest = frame.0,
            youngest => links[youngest as usize].younger = frame.0,
        }
        self.youngest = frame.0;
        self.len += 1;
    }

    /// Takes a frame out of this list.
    pub(crate) fn remove(&mut self, links: &mut Links, frame: FrameNo) {
        let Link { older, younger } = links[frame.0 as usize];
        match older {
            NONE => self.oldest = younger,
            older => links[older as usize].younger = younger,
        }
        match younger {
            NONE => self.youngest = older,
            younger => links[younger as usize].older = older,
        }
        self.len -= 1;
    }

    /// Makes a frame of this list the youngest.
    pub(crate) fn renew(&mut self, links: &mut Links, frame: FrameNo) {
        if self.youngest != frame.0 {
            self.remove(links, frame);
            self.push(links, frame);
        }
    }

    /// Oldest to youngest.
    pub(crate) fn iter<'a>(&self, links: &'a Links) -> impl Iterator<Item = FrameNo> + 'a {
        let frame = |at: u32| (at != NONE).then_some(at);
        std::iter::successors(frame(self.oldest), move |at| frame(links[*at as usize].younger)).map(FrameNo)
    }
}
