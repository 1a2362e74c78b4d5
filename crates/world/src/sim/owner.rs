//! The pool's table of persistent caches: the owner and purpose of each segment. The table survives
//! every crash.
//!
//! The simulation assumes that the table is always correct. Tests of the storage crate cover errors
//! of the table.

use std::collections::BTreeMap;

use hob_engine::command::{CacheConfig, Copies, DataSegment, NewRing, Segment};
use hob_engine::journal;
use hob_engine::units::DeviceId;

use super::{Sabotage, Simulation};

/// The entry of a persistent cache in the pool's table. The engine may or may not use the cache at
/// present.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) cache: [u8; 16],
    /// The daemon's configuration of the cache.
    pub(super) config: CacheConfig,
    /// Data segments of the cache by ordinal.
    pub(super) data: BTreeMap<u32, Segment>,
    /// Journal rings of the cache by number: the segments of each copy.
    pub(super) rings: BTreeMap<u32, Vec<Vec<Segment>>>,
    /// Highest journal ring number of the cache so far.
    number: u32,
    /// True if the engine has reported a complete journal ring of the cache. From then on, a
    /// recovery must find a complete journal ring.
    pub(super) exists: bool,
    /// True if the cache was removed before an earlier command for it ended.
    pub(super) gone: bool,
    /// True if the journal was closed, and the cache has not been in service since.
    pub(super) closed: bool,
    /// True if the backing may have refused a flush when the journal was closed. The journal may
    /// then not be marked as closed.
    pub(super) left_unclean: bool,
    /// Highest journal ring number when the journal was closed.
    pub(super) closed_at: u32,
    /// True if dirty data and journal have always had two copies.
    pub(super) doubled: bool,
    /// The pool's table declares the journal rings up to this number invalid.
    void_upto: u32,
    /// Last version of the backing that the daemon recorded while all cached data was verified.
    pub(super) evidence: Option<u64>,
    /// True if the engine reported that the cache's journal cannot be written any more.
    pub(super) journal_lost: bool,
    /// Recovery must not use clean data of journal rings up to this number, because one of these
    /// rings was lost.
    lost_upto: u32,
    /// Recovery must discard the dirty data of journal rings up to this number, because one of
    /// these rings was lost and a command then discarded the dirty data.
    discarded_upto: u32,
    /// Number of the newest journal ring at the time when a ring lost one of its copies, although
    /// the device of this copy still works. `None` after a later ring is complete.
    lacks_copy_upto: Option<u32>,
    /// True if a flush failed on a device that has copies of dirty data or journal, and no new
    /// journal has recorded since then that no data is dirty.
    pub(super) has_volatile_copies: bool,
    /// Journal rings up to this number may have lost both copies, because another device failed
    /// before a ring without a copy was replaced.
    doubtful_upto: u32,
}

impl Owner {
    pub(super) fn new(cache: [u8; 16], config: CacheConfig) -> Self {
        Owner {
            cache,
            config,
            data: BTreeMap::new(),
            rings: BTreeMap::new(),
            number: 0,
            exists: false,
            gone: false,
            closed: false,
            left_unclean: false,
            closed_at: 0,
            doubled: false,
            void_upto: 0,
            evidence: None,
            journal_lost: false,
            lost_upto: 0,
            discarded_upto: 0,
            lacks_copy_upto: None,
            has_volatile_copies: false,
            doubtful_upto: 0,
        }
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// Invalidates the cache's journal rings, so that no later life recovers data from them.
    pub(super) fn make_void(&mut self) {
        (self.void_upto, self.exists, self.closed) = (self.number, false, false);
    }

    /// Removes invalid journal rings and returns their segments.
    pub(super) fn drop_void(&mut self) -> Vec<Segment> {
        let upto = self.void_upto;
        self.drop_rings(|number| number <= upto)
    }

    /// Records that the current ring was lost.
    pub(super) fn record_loss(&mut self) {
        self.lost_upto = self.number;
    }

    /// Returns true if the loss of this journal ring is recorded.
    pub(super) fn has_recorded_loss(&self, ring: u32) -> bool {
        ring <= self.lost_upto
    }

    /// Records that the dirty data of the rings up to this number is discarded.
    pub(super) fn record_discard(&mut self, ring: u32) {
        self.discarded_upto = self.discarded_upto.max(ring);
    }

    /// Returns true if the dirty data of this journal ring was discarded.
    pub(super) fn has_recorded_discard(&self, ring: u32) -> bool {
        ring <= self.discarded_upto
    }

    /// Records that a copy of a journal ring is not written any more. The ring may not be complete
    /// yet.
    pub(super) fn note_lost_copy(&mut self) {
        self.lacks_copy_upto = Some(self.number);
    }

    /// Records that a journal ring is complete. This ring replaces the earlier rings.
    pub(super) fn note_new_ring(&mut self, number: u32) {
        self.lacks_copy_upto.take_if(|upto| *upto < number);
    }

    pub(super) fn forget_lost_copies(&mut self) {
        self.lacks_copy_upto = None;
    }

    /// Returns true if the journal has lost a copy and was not replaced yet.
    pub(super) fn lacks_copy(&self) -> bool {
        self.lacks_copy_upto.is_some()
    }

    /// Records that a device has failed. Returns true if the device may have had the only good copy
    /// of the journal.
    pub(super) fn lose_other_copy(&mut self) -> bool {
        let Some(upto) = self.lacks_copy_upto else { return false };
        (self.doubled, self.doubtful_upto) = (false, upto);
        true
    }

    /// Records that a device has failed. Copies on another device may be lost at the next power cut.
    pub(super) fn lose_durable_copies(&mut self) {
        self.doubled &= !self.has_volatile_copies;
    }

    /// Returns true if this journal ring may have lost both of its copies.
    pub(super) fn is_doubtful(&self, ring: u32) -> bool {
        ring <= self.doubtful_upto
    }

    /// Records that the cache's journal was closed, unless it is lost. Rings in `pending` belong to
    /// later commands, and may be complete before these commands end.
    pub(super) fn close(&mut self, pending: &[u32]) {
        let in_service = self.rings.keys().rev().find(|number| !pending.contains(number));
        (self.closed, self.closed_at) = (!self.journal_lost, in_service.copied().unwrap_or(0));
        self.left_unclean = false;
    }

    /// Returns true if the segment belongs to one of the cache's journal rings.
    pub(super) fn has_in_ring(&self, segment: &Segment) -> bool {
        self.rings.values().flatten().flatten().any(|other| other == segment)
    }

    /// Removes a segment from the cache's journal rings. Returns false if no ring has the segment.
    pub(super) fn take_from_ring(&mut self, segment: &Segment) -> bool {
        let before: usize = self.rings.values().flatten().map(Vec::len).sum();
        self.rings.values_mut().flatten().for_each(|copy| copy.retain(|other| other != segment));
        before > self.rings.values().flatten().map(Vec::len).sum()
    }

    /// Removes each journal ring for which `which` returns true, and returns the segments of the
    /// removed rings. The argument of `which` is the ring's number.
    pub(super) fn drop_rings(&mut self, which: impl Fn(u32) -> bool) -> Vec<Segment> {
        let gone: Vec<u32> = self.rings.keys().copied().filter(|number| which(*number)).collect();
        gone.iter().filter_map(|number| self.rings.remove(number)).flatten().flatten().collect()
    }

    pub(super) fn all_segments(&self) -> Vec<Segment> {
        self.data.values().chain(self.rings.values().flatten().flatten()).copied().collect()
    }
}

impl Simulation<'_> {
    /// Returns true if the sabotage of this history makes the pool keep old journal rings.
    pub(super) fn keeps_old_rings(&self) -> bool {
        self.options.sabotage == Some(Sabotage::IgnoredNewestRing)
    }

    /// Allocates data segments to the disk's cache, with unused ordinals.
    pub(super) fn own(&mut self, disk: usize, segments: Vec<Segment>) -> Vec<DataSegment> {
        let reuse = self.rng.chance(500);
        let owner = self.disks[disk].owner.as_mut().expect("persistent");
        let mut own = vec![];
        for place in segments {
            let next = owner.data.last_key_value().map_or(0, |(ordinal, _)| ordinal + 1);
            let gap = (0..next).find(|ordinal| !owner.data.contains_key(ordinal));
            let ordinal = gap.filter(|_| reuse).unwrap_or(next);
            owner.data.insert(ordinal, place);
            own.push(DataSegment { place, ordinal, seconds_only: false });
        }
        for segment in &mut own {
            segment.seconds_only = self.takes_seconds_only(segment.place.device);
        }
        own
    }

    /// Returns true if the device holds only replicas, as remote flash does.
    pub(super) fn takes_seconds_only(&self, device: DeviceId) -> bool {
        self.options.peer && self.flash.len() > 1 && usize::from(device.0) + 1 == self.flash.len()
    }

    /// Returns segments for a new journal ring that is large enough for the cache. Returns `None`
    /// if the pool is too full.
    pub(super) fn make_ring(&mut self, disk: usize, config: &CacheConfig) -> Option<NewRing> {
        let owner = self.disks[disk].owner.as_ref().expect("persistent");
        let (cache, identity) = (owner.cache, self.disks[disk].identity());
        let segment_bytes = self.scenario.segment_bytes;
        let block_bytes = config.block_bytes.max(512);
        let frames = owner.data.len() as u64 * segment_bytes / u64::from(block_bytes);
        let workable = block_bytes.is_power_of_two() && (4096..=1 << 20).contains(&block_bytes) && frames > 0;
        let pages = if workable { journal::ring_pages_min(frames, block_bytes, segment_bytes) } else { 1 };
        let in_segment = segment_bytes / journal::PAGE_BYTES as u64;
        let count = (pages.div_ceil(in_segment) + self.rng.below(2)) as usize;
        let two = config.copies != Copies::One || self.flash.len() > 1 && self.rng.chance(100);
        let mut devices: Vec<usize> = (0..self.flash.len()).collect();
        let mut copies = vec![];
        let careless = self.rng.chance(20);
        while copies.len() < 1 + usize::from(two) {
            if devices.is_empty() {
                return None;
            }
            let device = DeviceId(devices.swap_remove(self.rng.below(devices.len() as u64) as usize) as u16);
            if self.fenced.contains(&device) && !careless {
                continue;
            }
            let mut on: Vec<Segment> = self.free.iter().filter(|s| s.device == device).copied().collect();
            if on.len() < count {
                continue;
            }
            let draw = (0..count).map(|_| on.swap_remove(self.rng.below(on.len() as u64) as usize));
            copies.push(draw.collect::<Vec<_>>());
        }
        copies.iter().flatten().for_each(|segment| assert!(self.free.remove(segment)));
        let owner = self.disks[disk].owner.as_mut().expect("persistent");
        owner.number += 1;
        owner.rings.insert(owner.number, copies.clone());
        Some(NewRing { cache, number: owner.number, identity, copies })
    }

    /// Frees all segments of a removed cache.
    pub(super) fn disown(&mut self, disk: usize) {
        // Journal rings of another cache record the present version of the backing.
        self.disks[disk].changed_behind = None;
        if let Some(owner) = self.disks[disk].owner.take() {
            for segment in owner.all_segments() {
                assert!(self.free.insert(segment), "{segment:?} has one owner");
            }
        }
    }

    /// Returns true if flash may lose dirty data of this disk. Flash may lose the data if the
    /// history has a bad device. If dirty data and journal have always had two copies, the history
    /// must have two bad devices.
    pub(super) fn may_lose(&self, disk: usize) -> bool {
        let bad = self.scenario.devices.iter().filter(|plan| plan.is_bad()).count();
        let doubled = self.disks[disk].owner.as_ref().is_some_and(|owner| owner.doubled);
        bad > usize::from(doubled)
    }
}
