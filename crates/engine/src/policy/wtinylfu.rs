//! W-TinyLFU: an LRU with a small window. A block that leaves the window stays only if it was
//! requested more often than the block that it would displace. Einziger, Friedman, Manes: "TinyLFU:
//! a highly efficient cache admission policy", ACM Transactions on Storage 13(4), 2017.
//!
//! A new block enters the window, an LRU list of a hundredth of the cache. The rest is a segmented
//! LRU: *probation*, and *protected* (four fifths of the rest) for blocks that were used in
//! probation. When the window is full, its oldest block competes with the oldest block in
//! probation. The block that was requested less often is evicted. In a tie, the block from the
//! window is evicted. Requests are counted up to 15, both hits and misses. After ten requests per
//! frame, all counts are halved, and so is the number of requests. After the first halving, counts
//! are therefore halved again after every five requests per frame. The paper's doorkeeper, which
//! saves counters, is left out.
//!
//! The implementation differs from the paper in where it stores counts. A block in the cache has
//! its own count beside its frame, so a hit needs no hash. The sketch counts only blocks that are
//! not in the cache. A count is copied from the sketch when a block is inserted, and returns to the
//! sketch when the block is evicted. If no two blocks share counters in the sketch, the counts are
//! those of the paper.
//!
//! Memory use per frame: 8 bytes for links, 1 for list and count, 1.35 for the sketch.

use super::list::{self, Links, List};
use super::sketch::{COUNT_BITS, COUNT_MAX, Sketch};
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "wtinylfu",
    summary: "a small LRU window; a block that leaves it stays in the cache if it was requested more often than the block it replaces",
    source: "Einziger, Friedman, Manes, ToS 2017",
    serves: true,
    build: |frames| Box::new(WTinyLfu::new(frames, Sketch::new(frames.div_ceil(FRAMES_PER_SKETCH_LINE)))),
};

/// Frames per cache line of the sketch, which gives 2⅔ counters per frame.
const FRAMES_PER_SKETCH_LINE: u32 = 48;
/// Number of requests per frame after which all counts are halved.
const SAMPLE: u64 = 10;
/// Number of frames whose counts are halved together, when the first of them is next used.
const GROUP: usize = 64;

/// The lists, as stored in the byte of a frame, least used first.
const PROBATION: u8 = 0;
const WINDOW: u8 = 1;
const PROTECTED: u8 = 2;
const LISTS: [u8; 3] = [PROBATION, WINDOW, PROTECTED];

/// One byte for each frame: its count of accesses in the low four bits, and its list in the bits
/// above. [`Policy::order`] returns this byte as the frame's usage value.
struct Marks {
    marks: Vec<u8>,
    /// For each group of frames, how many times its counts were halved, modulo 256.
    halvings_done: Vec<u8>,
    halvings: u8,
}

impl Marks {
    fn new(frames: u32) -> Self {
        let groups = (frames as usize).div_ceil(GROUP);
        Marks { marks: vec![0; frames as usize], halvings_done: vec![0; groups], halvings: 0 }
    }

    /// Returns a frame's list and count, after halving the count as often as is overdue.
    fn at(&mut self, frame: FrameNo) -> &mut u8 {
        let group = frame.0 as usize / GROUP;
        let missed = self.halvings.wrapping_sub(self.halvings_done[group]);
        if missed != 0 {
            let end = self.marks.len().min((group + 1) * GROUP);
            let shift = missed.min(COUNT_BITS as u8);
            for mark in &mut self.marks[group * GROUP..end] {
                *mark = *mark & !COUNT_MAX | (*mark & COUNT_MAX) >> shift;
            }
            self.halvings_done[group] = self.halvings;
        }
        &mut self.marks[frame.0 as usize]
    }

    /// Returns a frame's list and count as stored, without halving an overdue count.
    fn peek(&self, frame: FrameNo) -> u8 {
        let mark = self.marks[frame.0 as usize];
        let missed = self.halvings.wrapping_sub(self.halvings_done[frame.0 as usize / GROUP]);
        mark & !COUNT_MAX | (mark & COUNT_MAX) >> missed.min(COUNT_BITS as u8)
    }

    fn list(&self, frame: FrameNo) -> u8 {
        self.marks[frame.0 as usize] >> COUNT_BITS
    }

    fn set_list(&mut self, frame: FrameNo, list: u8) {
        let mark = self.at(frame);
        *mark = *mark & COUNT_MAX | list << COUNT_BITS;
    }

    fn count(&mut self, frame: FrameNo) -> u8 {
        *self.at(frame) & COUNT_MAX
    }
}

pub(super) struct WTinyLfu {
    lists: [List; LISTS.len()],
    links: Links,
    marks: Marks,
    /// Approximate number of requests of each block that is not in the cache. `marks` has the
    /// counts of the blocks in the cache.
    sketch: Sketch,
    /// Number of counted requests, which is halved whenever the counts are halved.
    requests: u64,
    requests_max: u64,
    window_max: u32,
    protected_max: u32,
}

/// The oldest frame in a list, apart from busy frames.
enum Coldest {
    Block(FrameNo, BlockNo),
    Empty(FrameNo),
    /// The list is empty, or the frames at its old end are busy.
    None,
}

impl WTinyLfu {
    pub(super) fn new(frames: u32, sketch: Sketch) -> Self {
        let window_max = (frames / 100).max(1);
        WTinyLfu {
            lists: LISTS.map(|_| List::new()),
            links: list::links(frames as usize),
            marks: Marks::new(frames),
            sketch,
            requests: 0,
            requests_max: SAMPLE * u64::from(frames),
            window_max,
            protected_max: (u64::from(frames - window_max) * 4 / 5) as u32,
        }
    }

    fn len(&self, list: u8) -> u32 {
        self.lists[list as usize].len()
    }

    fn push(&mut self, list: u8, frame: FrameNo) {
        self.marks.set_list(frame, list);
        self.lists[list as usize].push(&mut self.links, frame.0);
    }

    fn remove(&mut self, frame: FrameNo) {
        let list = self.marks.list(frame);
        self.lists[list as usize].remove(&mut self.links, frame.0);
    }

    /// Moves the oldest frames of a list to probation, until the list has at most `len_max` frames.
    fn trim(&mut self, list: u8, len_max: u32) {
        while self.len(list) > len_max {
            let frame = FrameNo(self.lists[list as usize].oldest().expect("the list has frames"));
            self.remove(frame);
            self.push(PROBATION, frame);
        }
    }

    /// Counts a request, and halves all counts when enough requests were counted.
    fn grow_older(&mut self) {
        self.requests += 1;
        if self.requests >= self.requests_max {
            self.requests /= 2;
            self.sketch.halve();
            self.marks.halvings = self.marks.halvings.wrapping_add(1);
        }
    }

    /// Returns the oldest frame in a list, apart from busy frames.
    fn coldest(&self, list: u8, busy: &mut u32, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Coldest {
        for frame in self.lists[list as usize].iter(&self.links).map(FrameNo) {
            match look(frame) {
                Candidate::Block(block) => return Coldest::Block(frame, block),
                Candidate::Empty => return Coldest::Empty(frame),
                Candidate::Busy => *busy += 1,
            }
            if *busy >= BUSY_MAX {
                break;
            }
        }
        Coldest::None
    }

    /// Removes the block from this policy, and adds its count to the sketch. Returns the frame.
    fn give_up(&mut self, frame: FrameNo, block: BlockNo) -> Option<FrameNo> {
        let count = self.marks.count(frame);
        self.sketch.raise(block, count);
        self.remove(frame);
        Some(frame)
    }

    /// Evicts a frame without valid data.
    fn drop_empty(&mut self, frame: FrameNo) -> Option<FrameNo> {
        self.remove(frame);
        Some(frame)
    }
}

impl Policy for WTinyLfu {
    fn hit(&mut self, frame: FrameNo) {
        let mark = self.marks.at(frame);
        if *mark & COUNT_MAX < COUNT_MAX {
            *mark += 1;
        }
        self.grow_older();
        let list = self.marks.list(frame);
        if list == PROBATION {
            self.remove(frame);
            self.push(PROTECTED, frame);
            self.trim(PROTECTED, self.protected_max);
        } else {
            self.lists[list as usize].renew(&mut self.links, frame.0);
        }
    }

    fn admit(&mut self, block: BlockNo) -> bool {
        self.sketch.add(block);
        self.grow_older();
        true
    }

    fn insert(&mut self, frame: FrameNo, block: BlockNo) {
        *self.marks.at(frame) = self.sketch.estimate(block);
        self.push(WINDOW, frame);
        self.trim(WINDOW, self.window_max);
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let mut busy = 0;
        let mut candidate = Coldest::None;
        if self.len(WINDOW) >= self.window_max {
            candidate = self.coldest(WINDOW, &mut busy, look);
            if let Coldest::Empty(frame) = candidate {
                return self.drop_empty(frame);
            }
        }
        for list in [PROBATION, PROTECTED] {
            match (self.coldest(list, &mut busy, look), &candidate) {
                (Coldest::Empty(frame), _) => return self.drop_empty(frame),
                (Coldest::Block(victim, block), Coldest::Block(rival, rival_block)) => {
                    if self.marks.count(*rival) <= self.marks.count(victim) {
                        return self.give_up(*rival, *rival_block);
                    }
                    self.remove(*rival);
                    self.push(PROBATION, *rival);
                    return self.give_up(victim, block);
                }
                (Coldest::Block(victim, block), _) => return self.give_up(victim, block),
                (Coldest::None, _) => {}
            }
        }
        if let Coldest::None = candidate {
            candidate = self.coldest(WINDOW, &mut busy, look);
        }
        match candidate {
            Coldest::Block(frame, block) => self.give_up(frame, block),
            Coldest::Empty(frame) => self.drop_empty(frame),
            Coldest::None => None,
        }
    }

    fn order(&self) -> Vec<(FrameNo, u8)> {
        let frames = LISTS.iter().flat_map(|list| self.lists[*list as usize].iter(&self.links)).map(FrameNo);
        frames.map(|frame| (frame, self.marks.peek(frame))).collect()
    }

    fn restore(&mut self, frame: FrameNo, heat: u8) {
        *self.marks.at(frame) = heat & COUNT_MAX;
        self.push(heat >> COUNT_BITS, frame);
    }

    fn bytes(&self) -> u64 {
        let marks = self.marks.marks.capacity() + self.marks.halvings_done.capacity();
        list::bytes(&self.links) + marks as u64 + self.sketch.bytes()
    }
}
