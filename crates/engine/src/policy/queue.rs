//! A FIFO queue of frames. The queues of one policy share an array of links, with 4 bytes per
//! frame.

use crate::units::FrameNo;

const NONE: u32 = u32::MAX;

/// For each frame, the next younger frame in its queue.
pub(crate) type Links = Vec<u32>;

/// Creates links for this number of frames.
pub(crate) fn links(frames: u32) -> Links {
    vec![NONE; frames as usize]
}

/// A queue with the oldest frame at its front.
#[derive(Debug)]
pub(crate) struct Queue {
    oldest: u32,
    youngest: u32,
    len: u32,
}

impl Queue {
    pub(crate) const fn new() -> Self {
        Queue { oldest: NONE, youngest: NONE, len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Adds a frame that is in no queue, as the youngest one.
    pub(crate) fn push(&mut self, links: &mut Links, frame: FrameNo) {
        links[frame.0 as usize] = NONE;
        if self.len == 0 {
            self.oldest = frame.0;
        } else {
            links[self.youngest as usize] = frame.0;
        }
        self.youngest = frame.0;
        self.len += 1;
    }

    /// Removes and returns the oldest frame; `None` if the queue is empty.
    pub(crate) fn pop(&mut self, links: &Links) -> Option<FrameNo> {
        if self.len == 0 {
            return None;
        }
        let frame = self.oldest;
        self.oldest = links[frame as usize];
        self.len -= 1;
        Some(FrameNo(frame))
    }

    /// Returns the frames from oldest to youngest.
    pub(crate) fn iter<'a>(&self, links: &'a Links) -> impl Iterator<Item = FrameNo> + 'a {
        let mut at = self.oldest;
        (0..self.len).map(move |_| {
            let frame = FrameNo(at);
            at = links[at as usize];
            frame
        })
    }
}
