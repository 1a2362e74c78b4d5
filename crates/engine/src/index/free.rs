//! The free frames of a cache, which hold no block. There is one linked list for each *device
//! group* (called place in the code). The links are in the block numbers of the free frames, which
//! are not used otherwise.
//!
//! All frames of one device group are on one device. Only a cache with second copies, which are on
//! other devices, has more than one device group. Some device groups may be for second copies only;
//! these have the highest numbers. The last list has the free frames of segments that are being
//! vacated, which are never allocated.

use std::ops::Range;

use super::Leaving;

const NONE: u32 = u32::MAX;

/// Allocation moves to another device group if that group has at least this many free frames more
/// than the current group. A large number keeps adjacent blocks close together on flash.
const STAY: u32 = 256;

/// The free frames of an index. The index stores the links.
#[derive(Clone, Debug)]
pub(super) struct FreeFrames {
    lists: Vec<List>,
    /// The device group of each segment. Without second copies, there is one entry for all
    /// segments.
    places: Vec<u8>,
    frame_shift: u32,
    /// Number of device groups for first copies.
    firsts: usize,
    /// The device groups for second copies.
    seconds: Range<usize>,
    turn: usize,
    /// Segments that are being vacated; their free frames are in the last list.
    leaving: Option<Leaving>,
}

/// The device groups of a cache's segments.
#[derive(Clone, Debug)]
pub(crate) struct SegmentPlaces {
    /// The device group of each segment.
    pub(crate) of_segments: Vec<u8>,
    /// Base-2 logarithm of the number of frames in a segment.
    pub(crate) frame_shift: u32,
    /// Number of device groups.
    pub(crate) count: usize,
    /// Number of device groups for first copies, which have the lowest numbers. The other device
    /// groups are for second copies only.
    pub(crate) firsts: usize,
    /// True if second copies are only in device groups that have no first copies.
    pub(crate) apart: bool,
}

#[derive(Clone, Copy, Debug)]
struct List {
    head: u32,
    tail: u32,
    len: u32,
}

const EMPTY: List = List { head: NONE, tail: NONE, len: 0 };

impl FreeFrames {
    /// Creates an empty list with one device group.
    pub(super) fn none() -> FreeFrames {
        let places = Vec::new();
        FreeFrames {
            lists: vec![EMPTY; 2],
            places,
            frame_shift: 0,
            firsts: 1,
            seconds: 0..1,
            turn: 0,
            leaving: None,
        }
    }

    /// Creates empty lists for these device groups.
    pub(super) fn with_places(places: SegmentPlaces) -> FreeFrames {
        let SegmentPlaces { of_segments, frame_shift, count, firsts, apart } = places;
        assert!(firsts <= count && of_segments.iter().all(|place| usize::from(*place) < count));
        let seconds = if apart { firsts..count } else { 0..firsts };
        FreeFrames {
            lists: vec![EMPTY; count.max(1) + 1],
            places: of_segments,
            frame_shift,
            firsts,
            seconds,
            turn: 0,
            leaving: None,
        }
    }

    /// Returns true if second copies are only in device groups that have no first copies.
    pub(super) fn are_seconds_apart(&self) -> bool {
        self.seconds.start > 0 || self.seconds.is_empty()
    }

    /// Excludes the frames of these segments from allocation. The lists must be empty.
    pub(super) fn park(&mut self, leaving: Option<Leaving>) {
        debug_assert!(self.lists.iter().all(|list| list.head == NONE));
        self.leaving = leaving;
    }

    /// Returns the index of the list that this free frame is in.
    #[inline]
    fn list_of(&self, frame: u32) -> usize {
        match &self.leaving {
            Some(leaving) if leaving.has(frame) => self.lists.len() - 1,
            _ => self.place(frame),
        }
    }

    fn place(&self, frame: u32) -> usize {
        self.places.get((frame >> self.frame_shift) as usize).map_or(0, |place| usize::from(*place))
    }

    /// Returns true if no frame is free.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.lists[..self.firsts].iter().all(|list| list.head == NONE)
    }

    /// Allocates a frame for a first copy.
    #[inline]
    pub(super) fn pop(&mut self, links: &[u32]) -> Option<u32> {
        if self.firsts != 1 {
            let most = (0..self.firsts).max_by_key(|place| self.lists[*place].len)?;
            let here = self.lists[self.turn].len;
            if here == 0 || here + STAY < self.lists[most].len {
                self.turn = most;
            }
        }
        self.pop_from(self.turn, links)
    }

    /// Allocates a frame for a second copy, in another device group than frame `other`.
    pub(super) fn pop_apart(&mut self, links: &[u32], other: u32) -> Option<u32> {
        let not = self.place(other);
        let places = self.seconds.clone().filter(|place| *place != not);
        let place = places.max_by_key(|place| self.lists[*place].len)?;
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

    /// Frees a frame, and makes it the next one to be allocated in its list.
    #[inline]
    pub(super) fn push(&mut self, links: &mut [u32], frame: u32) {
        let place = self.list_of(frame);
        let list = &mut self.lists[place];
        links[frame as usize] = list.head;
        if list.head == NONE {
            list.tail = frame;
        }
        list.head = frame;
        list.len += 1;
    }

    /// Frees a frame, and makes it the last one to be allocated in its list.
    pub(super) fn push_last(&mut self, links: &mut [u32], frame: u32) {
        let place = self.list_of(frame);
        let list = &mut self.lists[place];
        links[frame as usize] = NONE;
        match list.tail {
            NONE => list.head = frame,
            tail => links[tail as usize] = frame,
        }
        list.tail = frame;
        list.len += 1;
    }

    /// Removes all frames, in the order of allocation, one device group after the other.
    pub(super) fn drain(&mut self, links: &[u32]) -> Vec<u32> {
        let mut frames = Vec::new();
        for place in 0..self.lists.len() {
            frames.extend(std::iter::from_fn(|| self.pop_from(place, links)));
        }
        frames.sort_unstable();
        frames
    }
}
