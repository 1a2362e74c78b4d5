//! Two-level LRU: the replacement policy of SmartX ZBS. New blocks are Inactive, and become Active
//! when they are used again. When there are more Active than Inactive blocks, the least used Active
//! blocks become Inactive until the numbers are equal. The block that has been Inactive for longest
//! is evicted.
//!
//! ZBS has two more states, which concern its write-back cache. A Clean block is an Inactive block
//! whose data is on the backing, and a Free frame has no block. In a cache that writes through, all
//! blocks are clean, and the block that has been Inactive for longest is evicted first. If data can
//! be dirty, only clean blocks may be evicted. The caller's `look` function says which frames are
//! evictable.
//!
//! A block counts its uses since its insertion, at most 15. All counts are halved after ten
//! requests for each frame of the cache. The least used block is the one with the lowest count, and
//! among equal counts the one used longest ago. An Active block whose count falls to zero becomes
//! Inactive too. Otherwise a loop that fits into the cache but not into half of it would not
//! displace formerly popular blocks. A list for each count gives the ranking, so each use takes a
//! few steps. Only the halving of all counts reads one byte for each frame. Memory use is 9 bytes
//! per frame.

use super::list::{self, Links, List};
use super::{BUSY_MAX, Candidate, Policy, PolicyInfo};
use crate::units::{BlockNo, FrameNo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "two-level-lru",
    summary: "blocks used again become Active; only Inactive blocks are evicted; at most half of the blocks are Active",
    source: "SmartX ZBS",
    serves: true,
    build: |frames| Box::new(TwoLevelLru::new(frames)),
};

/// Number of lists. List 0 is Inactive, and counts of Active blocks begin at 1.
const LISTS: usize = 16;
const COUNT_MAX: u8 = LISTS as u8 - 1;
/// Flag in the usage value, beside the count: the block is Active.
const ACTIVE: u8 = 1 << 7;
/// Number of requests, for each frame of the cache, after which counts are halved.
const REQUESTS_PER_FRAME: u64 = 10;

struct TwoLevelLru {
    links: Links,
    /// For each frame, its count and whether it is Active.
    heats: Vec<u8>,
    /// List 0 has the Inactive blocks. List N, from 1 to 15, has the Active blocks whose use count
    /// is N.
    lists: [List; LISTS],
    /// One bit for each Active list that has frames.
    occupied: u16,
    active: u32,
    /// Number of requests since counts were last halved.
    requests: u64,
}

/// Returns the list of a frame with this usage value.
fn list_of(heat: u8) -> usize {
    if heat & ACTIVE == 0 { 0 } else { usize::from(heat & !ACTIVE) }
}

impl TwoLevelLru {
    fn new(frames: u32) -> Self {
        TwoLevelLru {
            links: list::links(frames as usize),
            heats: vec![0; frames as usize],
            lists: [List::new(); LISTS],
            occupied: 0,
            active: 0,
            requests: 0,
        }
    }

    fn push(&mut self, frame: u32, heat: u8) {
        self.heats[frame as usize] = heat;
        let list = list_of(heat);
        self.lists[list].push(&mut self.links, frame);
        if list > 0 {
            self.active += 1;
            self.occupied |= 1 << list;
        }
    }

    /// Removes a frame, and returns its usage value.
    fn remove(&mut self, frame: u32) -> u8 {
        let heat = self.heats[frame as usize];
        let list = list_of(heat);
        self.lists[list].remove(&mut self.links, frame);
        if list > 0 {
            self.active -= 1;
            self.occupied &= !(u16::from(self.lists[list].len() == 0) << list);
        }
        heat
    }

    /// Returns the numbers of the Active lists that have frames, lowest use count first.
    fn active_lists(&self) -> impl Iterator<Item = usize> + use<> {
        let mut left = self.occupied;
        std::iter::from_fn(move || {
            (left != 0).then(|| {
                let list = left.trailing_zeros();
                left &= left - 1;
                list as usize
            })
        })
    }

    /// Makes blocks Inactive until at most half of all blocks are Active.
    fn balance(&mut self) {
        while self.active > self.lists[0].len() {
            let least = self.active_lists().next().expect("Active is not empty");
            let frame = self.lists[least].oldest().expect("its bit says so");
            let heat = self.remove(frame);
            self.push(frame, heat & !ACTIVE);
        }
    }

    /// Counts a request. When counts are halved, Active blocks whose count falls to zero become
    /// Inactive.
    fn tick(&mut self) {
        self.requests += 1;
        if self.requests < REQUESTS_PER_FRAME * self.heats.len() as u64 {
            return;
        }
        self.requests = 0;
        for heat in &mut self.heats {
            let count = (*heat & !ACTIVE) / 2;
            *heat = if count > 0 { *heat & ACTIVE | count } else { 0 };
        }
        self.active -= self.lists[1].len();
        for list in 1..LISTS {
            let mut from = std::mem::replace(&mut self.lists[list], List::new());
            self.lists[list / 2].append(&mut self.links, &mut from);
        }
        let lists = self.lists.iter().enumerate().skip(1);
        self.occupied = lists.map(|(i, list)| u16::from(list.len() > 0) << i).sum();
    }
}

impl Policy for TwoLevelLru {
    fn hit(&mut self, frame: FrameNo) {
        let old = self.heats[frame.0 as usize];
        let new = ACTIVE | ((old & !ACTIVE) + 1).min(COUNT_MAX);
        if old == new {
            self.lists[list_of(new)].renew(&mut self.links, frame.0);
        } else {
            self.remove(frame.0);
            self.push(frame.0, new);
        }
        if old & ACTIVE == 0 {
            self.balance();
        }
        self.tick();
    }

    fn insert(&mut self, frame: FrameNo, _: BlockNo) {
        self.push(frame.0, 0);
        self.tick();
    }

    fn evict(&mut self, look: &mut dyn FnMut(FrameNo) -> Candidate) -> Option<FrameNo> {
        let mut patience = BUSY_MAX;
        let mut lists = std::iter::once(0).chain(self.active_lists());
        let (frame, _) = lists.find_map(|i| self.lists[i].victim(&self.links, &mut patience, look))?;
        self.remove(frame);
        Some(FrameNo(frame))
    }

    fn is_hot(&self, frame: FrameNo) -> bool {
        self.heats[frame.0 as usize] & ACTIVE != 0
    }

    fn order(&self) -> Vec<(FrameNo, u8)> {
        let frames = self.lists.iter().flat_map(|list| list.iter(&self.links));
        frames.map(|frame| (FrameNo(frame), self.heats[frame as usize])).collect()
    }

    fn restore(&mut self, frame: FrameNo, heat: u8) {
        self.push(frame.0, heat);
    }

    fn bytes(&self) -> u64 {
        list::bytes(&self.links) + self.heats.capacity() as u64
    }
}
