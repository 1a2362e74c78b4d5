//! Segments: allocates them to caches, finds them after a restart, and releases them.
//!
//! A volatile cache has data segments without order. A persistent cache has data segments with
//! permanent numbers, and rings for its journal with one or two copies on different devices.
//! docs/FORMAT.md specifies the table's content and the order of writes.

use std::collections::{BTreeMap, BTreeSet};

use hob_engine::command::{DataSegment, Segment};
use hob_engine::units::DeviceId;

use super::device::Device;
use super::error::PoolError;
use super::format::{Entry, Features, Kind, OwnerId, RING_COPIES_MAX};
use super::{Pool, admits, admits_all};

/// A ring of a journal, with the copies on present devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingOnFlash {
    /// Number of the journal ring. The finished journal with the highest number is valid.
    pub number: u32,
    /// Segments of each copy, in order. All copies have the same number of segments.
    pub copies: Vec<Vec<Segment>>,
}

impl Pool {
    /// Allocates `count` free segments to a volatile cache, from all devices with allocation on, in
    /// turn. Leaves `spare` segments free on each device.
    ///
    /// # Errors
    /// Returns `Full` if the pool has too few free segments, or an error of a device.
    pub fn allocate(&mut self, owner: OwnerId, count: u64, spare: u64) -> Result<Vec<Segment>, PoolError> {
        let first = self.segments_of(owner).len() as u32;
        let ordinals = (first..).take(count as usize);
        let segments = self.allocate_in_turn(owner, Kind::Volatile, ordinals, spare)?;
        Ok(segments.into_iter().map(|segment| segment.place).collect())
    }

    /// Allocates `count` free data segments to a persistent cache, from all devices with allocation
    /// on, in turn. The segments get the lowest numbers that the owner does not use. Leaves `spare`
    /// segments free on each device.
    ///
    /// # Errors
    /// Returns `Full` if the pool has too few free segments, or an error of a device.
    pub fn allocate_data(
        &mut self,
        owner: OwnerId,
        count: u64,
        spare: u64,
    ) -> Result<Vec<DataSegment>, PoolError> {
        let (kind, ordinals) = self.new_data(owner)?;
        self.allocate_in_turn(owner, kind, ordinals.take(count as usize), spare)
    }

    /// Allocates up to `most` free data segments to a persistent cache, from all devices of this
    /// host with allocation on, except `besides`. The device with the most free segments is used
    /// first.
    ///
    /// # Errors
    /// Returns an error of a device if its segment table cannot be written.
    pub fn allocate_data_besides(
        &mut self,
        owner: OwnerId,
        most: u64,
        besides: DeviceId,
    ) -> Result<Vec<DataSegment>, PoolError> {
        let (kind, ordinals) = self.new_data(owner)?;
        let mut segments = Vec::new();
        for ordinal in ordinals.take(most as usize) {
            let others = self.devices.iter_mut().filter(|device| {
                let is_it = DeviceId(device.superblock.ordinal) == besides;
                admits_all(device) && !is_it && device.table.free() > 0
            });
            let Some(device) = others.max_by_key(|device| device.table.free()) else { break };
            let place = take_segment(device, Entry::Owned { owner, ordinal, kind });
            segments.push(DataSegment { place, ordinal, seconds_only: false });
        }
        self.store_data(segments)
    }

    /// Allocates up to `most` free segments for the replica of a persistent cache of this host. The
    /// segments are on the pool's remote devices, which other hosts export. At least `spare`
    /// segments stay free on each device. The segments get the lowest numbers that the owner does
    /// not use.
    ///
    /// # Errors
    /// Returns an error of a device if its segment table cannot be written.
    pub fn allocate_seconds(
        &mut self,
        owner: OwnerId,
        most: u64,
        spare: u64,
    ) -> Result<Vec<DataSegment>, PoolError> {
        let (kind, mut ordinals) = self.new_data(owner)?;
        let mut segments = Vec::new();
        for device in self.devices.iter_mut().filter(|device| admits(device) && device.is_remote()) {
            let count = device.table.free().saturating_sub(spare).min(most - segments.len() as u64);
            for ordinal in ordinals.by_ref().take(count as usize) {
                let place = take_segment(device, Entry::Owned { owner, ordinal, kind });
                segments.push(DataSegment { place, ordinal, seconds_only: true });
            }
        }
        self.store_data(segments)
    }

    /// Allocates a journal ring to a persistent cache, with the given number of copies and
    /// segments. Each copy of the journal ring is on a different device of this host. Devices with
    /// the most free space are used first, those in `avoid` last. The caller
    /// chooses a number above [`Pool::ring_number_max`].
    ///
    /// # Errors
    /// Returns `TooFewDevices`, or an error of a device. Returns `Unworkable` if the ring number is
    /// in use, or if the number of copies is neither one nor two.
    pub fn allocate_ring(
        &mut self,
        owner: OwnerId,
        number: u32,
        copies: usize,
        segments: u64,
        avoid: &[DeviceId],
    ) -> Result<Vec<Vec<Segment>>, PoolError> {
        let here = self.with_room(segments, avoid, admits_all);
        self.allocate_ring_on(owner, number, copies, segments, here)
    }

    /// Allocates a journal ring like [`Pool::allocate_ring`], but also on devices with allocation
    /// off. Such devices are used last. Call this for a cache that has data on flash and cannot be
    /// used without a journal.
    ///
    /// # Errors
    /// Returns the same errors as [`Pool::allocate_ring`].
    pub fn allocate_ring_anywhere(
        &mut self,
        owner: OwnerId,
        number: u32,
        copies: usize,
        segments: u64,
        avoid: &[DeviceId],
    ) -> Result<Vec<Vec<Segment>>, PoolError> {
        let mut here = self.with_room(segments, avoid, |device| !device.is_remote());
        here.sort_by_key(|at| !admits(&self.devices[*at]));
        self.allocate_ring_on(owner, number, copies, segments, here)
    }

    /// Allocates a journal ring like [`Pool::allocate_ring`], but with a copy on another host: the
    /// second of two copies, or the only one.
    ///
    /// # Errors
    /// Returns the same errors as [`Pool::allocate_ring`].
    pub fn allocate_ring_far(
        &mut self,
        owner: OwnerId,
        number: u32,
        copies: usize,
        segments: u64,
        avoid: &[DeviceId],
    ) -> Result<Vec<Vec<Segment>>, PoolError> {
        let here = self.with_room(segments, avoid, admits_all);
        let far = self.with_room(segments, avoid, |device| admits(device) && device.is_remote());
        let devices = here.first().filter(|_| copies > 1).into_iter().chain(far.first()).copied().collect();
        self.allocate_ring_on(owner, number, copies, segments, devices)
    }

    /// Returns the indices of the devices for which `which` returns true and that have space for
    /// `segments`, in order of preference.
    fn with_room(&self, segments: u64, avoid: &[DeviceId], which: impl Fn(&Device) -> bool) -> Vec<usize> {
        let fits = |at: &usize| {
            let device = &self.devices[*at];
            which(device) && device.table.free() >= segments
        };
        let mut devices: Vec<usize> = (0..self.devices.len()).filter(fits).collect();
        let is_avoided = |at: usize| avoid.contains(&DeviceId(self.devices[at].superblock.ordinal));
        devices.sort_by_key(|at| (is_avoided(*at), std::cmp::Reverse(self.devices[*at].table.free())));
        devices
    }

    fn allocate_ring_on(
        &mut self,
        owner: OwnerId,
        number: u32,
        copies: usize,
        segments: u64,
        devices: Vec<usize>,
    ) -> Result<Vec<Vec<Segment>>, PoolError> {
        if copies == 0 || copies > usize::from(RING_COPIES_MAX) || segments == 0 {
            let reason = format!(
                "a journal has one or two copies of at least one segment, not {copies} of {segments}"
            );
            return Err(PoolError::Unworkable { reason });
        }
        if self.ring_numbers(owner).contains(&number) {
            return Err(PoolError::Unworkable { reason: format!("the cache has a ring {number} already") });
        }
        if devices.len() < copies {
            return Err(PoolError::TooFewDevices { copies, segments, devices: devices.len() });
        }
        self.require(Features::JOURNAL)?;
        let devices: Vec<usize> = devices.into_iter().take(copies).collect();
        // A device that fails writes must not prevent a journal on the other devices.
        self.require_on(&devices, Features::INCOMPLETE_SECTORS)?;
        let mut ring = Vec::with_capacity(copies);
        for (copy, at) in (0..).zip(devices) {
            let device = &mut self.devices[at];
            let kind = Kind::Ring { number, copy };
            let take = |ordinal| take_segment(device, Entry::Owned { owner, ordinal, kind });
            ring.push((0..segments as u32).map(take).collect::<Vec<Segment>>());
        }
        self.store_or_release(&ring.concat())?;
        Ok(ring)
    }

    /// Returns the kind of new data segments of a persistent cache, and the segment numbers that
    /// the cache does not use yet.
    fn new_data(&mut self, owner: OwnerId) -> Result<(Kind, impl Iterator<Item = u32> + use<>), PoolError> {
        self.require(Features::JOURNAL)?;
        let taken: BTreeSet<u32> = self.data_of(owner).iter().map(|segment| segment.ordinal).collect();
        let kind = Kind::Data { since: self.ring_number_max(owner) };
        Ok((kind, (0..).filter(move |ordinal| !taken.contains(ordinal))))
    }

    fn allocate_in_turn(
        &mut self,
        owner: OwnerId,
        kind: Kind,
        ordinals: impl Iterator<Item = u32>,
        spare: u64,
    ) -> Result<Vec<DataSegment>, PoolError> {
        let ordinals: Vec<u32> = ordinals.collect();
        let (wanted, free) = (ordinals.len() as u64, self.free_segments_beyond(spare));
        if wanted > free {
            return Err(PoolError::Full { wanted, free });
        }
        let mut segments = Vec::with_capacity(ordinals.len());
        for ordinal in ordinals {
            let place = take_segment(self.next_device(spare), Entry::Owned { owner, ordinal, kind });
            segments.push(DataSegment { place, ordinal, seconds_only: false });
        }
        self.store_data(segments)
    }

    /// Writes the segment tables of the devices with these data segments, and returns the segments.
    fn store_data(&mut self, segments: Vec<DataSegment>) -> Result<Vec<DataSegment>, PoolError> {
        self.store_or_release(&segments.iter().map(|segment| segment.place).collect::<Vec<_>>())?;
        Ok(segments)
    }

    fn next_device(&mut self, spare: u64) -> &mut Device {
        let count = self.devices.len();
        let start = self.turn;
        let usable = |at: &usize| admits_all(&self.devices[*at]) && self.devices[*at].table.free() > spare;
        let at = (start..start + count).map(|at| at % count).find(usable).expect("there are free segments");
        self.turn = at + 1;
        &mut self.devices[at]
    }

    /// Writes the segment tables of the devices that have `segments`. A segment table records the
    /// cache, journal ring or swap area that owns each segment. Other devices are not written, so
    /// that a fault of another device causes no error. If a write fails, frees `segments` and
    /// returns the error.
    pub(super) fn store_or_release(&mut self, segments: &[Segment]) -> Result<(), PoolError> {
        let stored = self.devices.iter_mut().filter(|device| has_any(device, segments));
        let stored = stored.map(Device::store_table).find(Result::is_err).unwrap_or(Ok(()));
        stored.inspect_err(|_| {
            // Segments that were not recorded are free again; recorded ones are freed as soon as
            // their device permits.
            let _ = self.release(segments);
        })
    }

    /// Frees segments of any kind. Segments on missing devices are ignored.
    ///
    /// # Errors
    /// Returns an error if the segment table of a device that has some of the segments cannot be
    /// written. The segments are free even after an error. The next successful write of the
    /// device's segment table records that they are free.
    ///
    /// # Panics
    /// Panics if a segment is free already or does not exist.
    pub fn release(&mut self, segments: &[Segment]) -> Result<(), PoolError> {
        for segment in segments {
            let Ok(at) = self.position(segment.device) else { continue };
            let device = &mut self.devices[at];
            let layout = device.superblock.layout;
            let distance =
                segment.offset.checked_sub(layout.data_offset).expect("segments lie behind the table");
            assert!(distance.is_multiple_of(self.segment_bytes), "{segment:?} is where no segment starts");
            let index = (distance / self.segment_bytes) as usize;
            assert!(device.table.entries()[index] != Entry::Free, "{segment:?} is free already");
            device.table.set(index, Entry::Free);
        }
        // All devices are tried; the first error is returned.
        let mut told = Ok(());
        for device in &mut self.devices {
            let stored = device.store_table();
            if told.is_ok() && has_any(device, segments) {
                told = stored;
            }
        }
        told
    }

    /// Returns all segments of an owner, of any kind, including those of changes that a crash
    /// interrupted. Data segments come first, in their order.
    pub fn segments_of(&self, owner: OwnerId) -> Vec<Segment> {
        let order = |kind| match kind {
            Kind::Volatile | Kind::Data { .. } | Kind::Swap { .. } => (0, 0),
            Kind::Ring { number, copy } => (number.saturating_add(1), copy),
        };
        let mut found: Vec<_> =
            self.rows_of(owner).map(|(kind, ordinal, place)| (order(kind), ordinal, place)).collect();
        found.sort_unstable();
        found.into_iter().map(|(.., place)| place).collect()
    }

    /// Returns the segments of a persistent cache on one device, without those `in_use`. Returns
    /// `None` if the cache already had `ring`, its present journal ring, when it got one of these
    /// segments.
    pub fn outdated_on(
        &self,
        device: DeviceId,
        owner: OwnerId,
        ring: u32,
        in_use: &[Segment],
    ) -> Option<Vec<Segment>> {
        let is_older = |kind: Kind| match kind {
            Kind::Ring { number, .. } => number < ring,
            Kind::Data { since } => since < ring,
            Kind::Volatile | Kind::Swap { .. } => false,
        };
        let unused =
            self.rows_of(owner).filter(|(.., place)| place.device == device && !in_use.contains(place));
        unused.map(|(kind, _, place)| is_older(kind).then_some(place)).collect()
    }

    /// Returns the data segments of a persistent cache, by number. If a device was missing and has
    /// a segment whose number was given to another segment meanwhile, the device's segment is left
    /// out.
    pub fn data_of(&self, owner: OwnerId) -> Vec<DataSegment> {
        let data = |(kind, ordinal, place)| match kind {
            Kind::Data { since } => Some((ordinal, std::cmp::Reverse(since), place)),
            _ => None,
        };
        let is_far =
            |place: Segment| self.position(place.device).is_ok_and(|at| self.devices[at].is_remote());
        let mut found: Vec<(u32, _, Segment)> = self.rows_of(owner).filter_map(data).collect();
        found.sort_unstable();
        found.dedup_by_key(|(ordinal, ..)| *ordinal);
        let segment = |(ordinal, _, place)| DataSegment { place, ordinal, seconds_only: is_far(place) };
        found.into_iter().map(segment).collect()
    }

    /// Returns the journal rings of a persistent cache, highest number first. A copy on a missing
    /// device is left out. A ring of which a crash left only parts is left out too, because nothing
    /// was ever written to it.
    pub fn rings_of(&self, owner: OwnerId) -> Vec<RingOnFlash> {
        let mut rings: BTreeMap<u32, [Vec<(u32, Segment)>; RING_COPIES_MAX as usize]> = BTreeMap::new();
        for (kind, ordinal, place) in self.rows_of(owner) {
            if let Kind::Ring { number, copy } = kind {
                rings.entry(number).or_default()[usize::from(copy)].push((ordinal, place));
            }
        }
        rings.into_iter().rev().filter_map(|(number, copies)| whole_ring(number, copies)).collect()
    }

    /// Invalidates the journal rings of a persistent cache up to this number. No later recovery can
    /// use them, even after a crash. The rings' segments still belong to the cache. Call this only
    /// while all devices of the pool are present, because missing devices are not changed.
    ///
    /// # Errors
    /// Returns an error of a device. After an error, the journal rings may be valid or invalid.
    pub fn make_void(&mut self, owner: OwnerId, upto: u32) -> Result<(), PoolError> {
        // The rings get a number that no page on flash has, so the pages on flash belong to no
        // journal ring any more.
        let number = self.ring_number_max(owner).saturating_add(1);
        self.change_rings(owner, |ordinal, old, copy| {
            let kind = Kind::Ring { number, copy };
            (old <= upto).then_some(Entry::Owned { owner, ordinal, kind })
        });
        self.devices.iter_mut().try_for_each(Device::store_table)
    }

    /// Frees all journal rings of a persistent cache except the ring `in_use`. A device records
    /// this with the next write of its segment table. After a crash before that write, the rings
    /// still belong to the cache.
    pub fn free_rings_besides(&mut self, owner: OwnerId, in_use: u32) {
        self.change_rings(owner, |_, number, _| (number != in_use).then_some(Entry::Free));
    }

    /// Replaces the entries of an owner's journal rings for which `change` returns a new entry. Its
    /// arguments are a segment's place in its ring, the ring's number, and the number of the copy.
    fn change_rings(&mut self, owner: OwnerId, change: impl Fn(u32, u32, u8) -> Option<Entry>) {
        for device in &mut self.devices {
            for index in 0..device.table.entries().len() {
                if let Entry::Owned { owner: other, ordinal, kind: Kind::Ring { number, copy } } =
                    device.table.entries()[index]
                    && other == owner
                    && let Some(entry) = change(ordinal, number, copy)
                {
                    device.table.set(index, entry);
                }
            }
        }
    }

    /// Returns the numbers of all journal rings of an owner that have a segment, lowest first.
    fn ring_numbers(&self, owner: OwnerId) -> Vec<u32> {
        let number = |(kind, ..): (Kind, u32, Segment)| match kind {
            Kind::Ring { number, .. } => Some(number),
            _ => None,
        };
        let numbers: BTreeSet<u32> = self.rows_of(owner).filter_map(number).collect();
        numbers.into_iter().collect()
    }

    /// Returns the highest ring number of an owner on the present devices; 0 without a journal
    /// ring.
    pub fn ring_number_max(&self, owner: OwnerId) -> u32 {
        self.ring_numbers(owner).last().copied().unwrap_or(0)
    }

    /// Returns the owners of persistent caches.
    pub fn owners(&self) -> Vec<OwnerId> {
        let owner =
            |(owner, kind, ..): (OwnerId, Kind, u32, Segment)| is_of_persistent_cache(kind).then_some(owner);
        let owners: BTreeSet<OwnerId> = self.rows().filter_map(owner).collect();
        owners.into_iter().collect()
    }

    /// Returns every segment in use: its owner, kind and number, and its place.
    pub(super) fn rows(&self) -> impl Iterator<Item = (OwnerId, Kind, u32, Segment)> {
        self.devices.iter().flat_map(|device| {
            let row = move |(index, entry): (usize, &Entry)| match *entry {
                Entry::Free => None,
                Entry::Owned { owner, ordinal, kind } => {
                    Some((owner, kind, ordinal, segment_at(device, index)))
                }
            };
            device.table.entries().iter().enumerate().filter_map(row)
        })
    }

    fn rows_of(&self, wanted: OwnerId) -> impl Iterator<Item = (Kind, u32, Segment)> {
        let row = move |(owner, kind, ordinal, place)| (owner == wanted).then_some((kind, ordinal, place));
        self.rows().filter_map(row)
    }
}

fn is_of_persistent_cache(kind: Kind) -> bool {
    matches!(kind, Kind::Data { .. } | Kind::Ring { .. })
}

/// Returns the journal ring if each of its copies is complete or absent; `None` otherwise.
fn whole_ring(number: u32, copies: [Vec<(u32, Segment)>; RING_COPIES_MAX as usize]) -> Option<RingOnFlash> {
    let mut ring = RingOnFlash { number, copies: Vec::new() };
    for mut copy in copies {
        copy.sort_unstable();
        if !copy.iter().map(|(ordinal, _)| *ordinal).eq(0..copy.len() as u32) {
            return None;
        }
        if !copy.is_empty() {
            ring.copies.push(copy.into_iter().map(|(_, place)| place).collect());
        }
    }
    let len = ring.copies.first()?.len();
    ring.copies.iter().all(|copy| copy.len() == len).then_some(ring)
}

fn has_any(device: &Device, segments: &[Segment]) -> bool {
    segments.iter().any(|segment| segment.device.0 == device.superblock.ordinal)
}

/// Allocates a device's lowest free segment, whose table entry becomes `entry`.
fn take_segment(device: &mut Device, entry: Entry) -> Segment {
    let index = device.table.find_free().expect("the device has a free segment");
    device.table.set(index, entry);
    segment_at(device, index)
}

pub(super) fn segment_at(device: &Device, index: usize) -> Segment {
    let superblock = &device.superblock;
    Segment {
        device: DeviceId(superblock.ordinal),
        offset: superblock.layout.data_offset + index as u64 * superblock.segment_bytes,
    }
}
