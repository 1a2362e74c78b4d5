//! Frames in no use: a list for each *place*, linked through the block numbers that free frames do not have.
//!
//! Frames of one place lie on one device. Only a cache that keeps second copies, on other devices, has more than one.

const NONE: u32 = u32::MAX;

/// A place is left for one that has so many more free frames: long enough for neighbours to stay together.
const STAY: u32 = 256;

/// The free frames of an index, whose links their owner keeps.
#[derive(Clone, Debug)]
pub(super) struct FreeFrames {
    lists: Vec<List>,
    /// The place of each segment; one segment for all without places.
    places: Vec<u8>,
    frame_shift: u32,
    turn: usize,
}

#[derive(Clone, Copy, Debug)]
struct List {
    head: u32,
    tail: u32,
    len: u32,
}

const EMPTY: List = List { head: NONE, tail: NONE, len: 0 };

impl FreeFrames {
    /// None free, and one place.
    pub(super) fn none() -> FreeFrames {
        FreeFrames { lists: vec![EMPTY], places: Vec::new(), frame_shift: 0, turn: 0 }
    }

    /// None free. `places` has the place of each segment of `1 << frame_shift` frames.
    pub(super) fn with_places(frame_shift: u32, places: Vec<u8>) -> FreeFrames {
        let lists = places.iter().max().map_or(1, |last| usize::from(*last) + 1);
        FreeFrames { lists: vec![EMPTY; lists], places, frame_shift, turn: 0 }
    }

    fn place(&self, frame: u32) -> usize {
        self.places.get((frame >> self.frame_shift) as usize).map_or(0, |place| usize::from(*place))
    }

    /// Is none free?
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.lists.iter().all(|list| list.head == NONE)
    }

    /// Takes a frame out.
    #[inline]
    pub(super) fn pop(&mut self, links: &[u32]) -> Option<u32> {
        if self.lists.len() > 1 {
            let most =
                (0..self.lists.len()).max_by_key(|place| self.lists[*place].len).expect("one at least");
            let here = self.lists[self.turn].len;
            if here == 0 || here + STAY < self.lists[most].len {
                self.turn = most;
            }
        }
        self.pop_from(self.turn, links)
    }

    /// Takes a frame out that lies elsewhere than `other`.
    pub(super) fn pop_apart(&mut self, links: &[u32], other: u32) -> Option<u32> {
        let not = self.place(other);
        let place =
            (0..self.lists.len()).filter(|place| *place != not).max_by_key(|place| self.lists[*place].len)?;
        self.pop_from(place, links)
    }

    fn pop_from(&mut self, place: usize, links: &[u32]) -> Option<u32> {
        let list = &mut self.lists[place];
        let frame = list.head;
        if frame == NONE {
            return None;
        }
        list.head = links[frame as usize];
        list.len -= 1;
        if list.head == NONE {
            list.tail = NONE;
        }
        Some(frame)
    }

    /// Gives a frame back; it is the next to be taken.
    #[inline]
    pub(super) fn push(&mut self, links: &mut [u32], frame: u32) {
        let place = self.place(frame);
        let list = &mut self.lists[place];
        links[frame as usize] = list.head;
        if list.head == NONE {
            list.tail = frame;
        }
        list.head = frame;
        list.len += 1;
    }

    /// Gives a frame back; it is the last to be taken.
    pub(super) fn push_last(&mut self, links: &mut [u32], frame: u32) {
        let place = self.place(frame);
        let list = &mut self.lists[place];
        links[frame as usize] = NONE;
        match list.tail {
            NONE => list.head = frame,
            tail => links[tail as usize] = frame,
        }
        list.tail = frame;
        list.len += 1;
    }

    /// Takes all frames out, into an order in which they would have been taken from one place after the other.
    pub(super) fn drain(&mut self, links: &[u32]) -> Vec<u32> {
        let mut frames = Vec::new();
        for place in 0..self.lists.len() {
            frames.extend(std::iter::from_fn(|| self.pop_from(place, links)));
        }
        frames.sort_unstable();
        frames
    }
}
