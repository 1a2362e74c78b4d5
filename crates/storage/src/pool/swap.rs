//! Segments of swap areas. The segments of an area are consecutive on one device. After a restart,
//! hob finds them by their owner id.
//!
//! A swap area is allocated on the device with the most free space among the devices that have a
//! large enough free range. The area is at the end of the smallest such range. Caches use the
//! lowest free segments, so that caches and swap areas stay apart as long as possible.

use std::collections::BTreeMap;

use hob_engine::command::Segment;
use hob_engine::units::DeviceId;

use super::error::PoolError;
use super::format::{Entry, Features, Kind, OwnerId};
use super::segments::segment_at;
use super::{Pool, admits_all};

/// A swap area of the host: consecutive segments on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwapArea {
    /// Owner id of the swap area, which no cache has.
    pub owner: OwnerId,
    /// The device that has the segments.
    pub device: DeviceId,
    /// First byte of the swap area on its device.
    pub offset: u64,
    /// Number of segments of the swap area that were found.
    pub segments: u64,
    /// Whether the area is complete and contiguous. If not, a crash left parts of the area, and
    /// nothing was ever written to it.
    pub whole: bool,
}

impl Pool {
    /// Allocates a swap area of `segments` on the given device, or on any device with allocation on
    /// that is not in `but`.
    ///
    /// # Errors
    /// Returns `NoSuchDevice`, `InPieces`, or an error of a device. Returns `Unworkable` for a
    /// device with allocation off, and if `segments` is 0.
    pub fn allocate_swap(
        &mut self,
        owner: OwnerId,
        segments: u64,
        device: Option<DeviceId>,
        but: &[DeviceId],
    ) -> Result<SwapArea, PoolError> {
        let unworkable = |reason: &str| PoolError::Unworkable { reason: reason.to_owned() };
        let of = u32::try_from(segments).ok().filter(|count| *count > 0);
        let of = of.ok_or_else(|| unworkable("a swap area must have 1 to 2³² − 1 segments"))?;
        let chosen: Vec<usize> = match device {
            Some(id) => vec![self.position(id)?],
            None => (0..self.devices.len()).collect(),
        };
        let mut chosen: Vec<usize> = chosen
            .into_iter()
            .filter(|at| admits_all(&self.devices[*at]))
            .filter(|at| !but.contains(&DeviceId(self.devices[*at].superblock.ordinal)))
            .collect();
        if chosen.is_empty() {
            return Err(unworkable("no device of the pool allows the allocation of new segments"));
        }
        chosen.sort_by_key(|at| std::cmp::Reverse(self.devices[*at].table.free()));
        let holes = chosen.iter().map(|at| (*at, holes(self.devices[*at].table.entries())));
        let holes: Vec<(usize, Vec<(usize, u64)>)> = holes.collect();
        let fitting = holes.iter().find_map(|(at, holes)| {
            let fitting = holes.iter().filter(|(_, len)| *len >= segments);
            fitting.min_by_key(|(start, len)| (*len, std::cmp::Reverse(*start))).map(|hole| (*at, *hole))
        });
        let Some((at, (start, len))) = fitting else {
            let longest = |(at, holes): &(usize, Vec<(usize, u64)>)| {
                let longest = holes.iter().map(|(_, len)| *len).max().unwrap_or(0);
                (longest, self.devices[*at].table.free())
            };
            let (longest, free) = holes.iter().map(longest).max().expect("there is a device");
            return Err(PoolError::InPieces { wanted: segments, free, longest });
        };
        self.require(Features::SWAP)?;
        let device = &mut self.devices[at];
        let first = start + (len - segments) as usize;
        let mut taken = Vec::with_capacity(segments as usize);
        for ordinal in 0..of {
            let index = first + ordinal as usize;
            device.table.set(index, Entry::Owned { owner, ordinal, kind: Kind::Swap { of } });
            taken.push(segment_at(device, index));
        }
        self.store_or_release(&taken)?;
        let Segment { device, offset } = taken[0];
        Ok(SwapArea { owner, device, offset, segments, whole: true })
    }

    /// Returns the swap areas on the present devices, by owner.
    pub fn swap_areas(&self) -> Vec<SwapArea> {
        let mut found: BTreeMap<OwnerId, Vec<(u32, u32, Segment)>> = BTreeMap::new();
        for (owner, kind, ordinal, place) in self.rows() {
            if let Kind::Swap { of } = kind {
                found.entry(owner).or_default().push((ordinal, of, place));
            }
        }
        found.into_iter().map(|(owner, parts)| self.swap_area(owner, parts)).collect()
    }

    fn swap_area(&self, owner: OwnerId, mut parts: Vec<(u32, u32, Segment)>) -> SwapArea {
        parts.sort_unstable();
        let (_, of, Segment { device, offset }) = parts[0];
        let follows = |(number, (ordinal, whole, place)): (u32, &(u32, u32, Segment))| {
            let expected = offset + u64::from(number) * self.segment_bytes;
            *ordinal == number && *whole == of && place.device == device && place.offset == expected
        };
        let whole = parts.len() as u64 == u64::from(of) && (0..).zip(&parts).all(follows);
        SwapArea { owner, device, offset, segments: parts.len() as u64, whole }
    }
}

/// Returns the ranges of consecutive free segments: first segment, and length.
fn holes(entries: &[Entry]) -> Vec<(usize, u64)> {
    let mut holes: Vec<(usize, u64)> = Vec::new();
    for (index, _) in entries.iter().enumerate().filter(|(_, entry)| **entry == Entry::Free) {
        match holes.last_mut() {
            Some((start, len)) if *start + *len as usize == index => *len += 1,
            _ => holes.push((index, 1)),
        }
    }
    holes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{Admission, DeviceSpec, Overwrite, device_bytes_for};

    const MIB: u64 = 1 << 20;
    const SWAP: OwnerId = OwnerId(0x5A);
    const CACHE: OwnerId = OwnerId(0xCA);

    fn pool(dir: &tempfile::TempDir, devices: &[(&str, u64)]) -> Pool {
        let spec = |(name, segments): &(&str, u64)| DeviceSpec {
            path: dir.path().join(name),
            size_bytes: Some(device_bytes_for(segments * MIB, MIB)),
        };
        let specs: Vec<DeviceSpec> = devices.iter().map(spec).collect();
        Pool::create("p", &specs, MIB, Overwrite::Refuse).unwrap()
    }

    /// Returns device, first segment and length of an area.
    fn place(pool: &Pool, area: SwapArea) -> (u16, u64, u64) {
        let data = pool.devices[usize::from(area.device.0)].superblock.layout.data_offset;
        (area.device.0, (area.offset - data) / MIB, area.segments)
    }

    #[test]
    fn an_area_takes_the_end_of_the_smallest_hole_that_is_large_enough() {
        let dir = tempfile::tempdir().unwrap();
        let mut pool = pool(&dir, &[("a", 20)]);
        let all = pool.allocate(CACHE, 20, 0).unwrap();
        // Holes of 3, 6 and 4 segments.
        for gap in [1..4, 6..12, 15..19] {
            pool.release(&all[gap]).unwrap();
        }
        let area = pool.allocate_swap(SWAP, 4, None, &[]).unwrap();
        assert_eq!((place(&pool, area), area.whole), ((0, 15, 4), true));
        let area = pool.allocate_swap(OwnerId(2), 4, None, &[]).unwrap();
        assert_eq!(place(&pool, area), (0, 8, 4));
        let error = pool.allocate_swap(OwnerId(3), 4, None, &[]).unwrap_err();
        assert!(matches!(error, PoolError::InPieces { wanted: 4, free: 5, longest: 3 }), "{error}");
        assert_eq!(pool.allocate(CACHE, 5, 0).unwrap().len(), 5, "what is left is for caches");
        assert!(pool.allocate(CACHE, 1, 0).is_err());
        pool.release(&pool.segments_of(SWAP)).unwrap();
        assert_eq!((pool.free_segments(), pool.swap_areas().len()), (4, 1));
    }

    #[test]
    fn an_area_stays_and_is_no_cache() {
        let dir = tempfile::tempdir().unwrap();
        let mut made = pool(&dir, &[("a", 300), ("b", 400)]);
        made.allocate(CACHE, 10, 0).unwrap();
        let area = made.allocate_swap(SWAP, 290, None, &[]).unwrap();
        assert_eq!(place(&made, area), (1, 110, 290), "more than two pages of the table");
        assert_eq!(made.devices[0].superblock.features, Features::SWAP, "on all devices");
        drop(made);
        let mut pool = Pool::open(&[dir.path().join("a"), dir.path().join("b")]).unwrap();
        assert_eq!((pool.swap_areas(), pool.owners()), (vec![area], vec![]));
        assert_eq!((pool.data_of(SWAP), pool.rings_of(SWAP)), (vec![], vec![]));
        assert_eq!(pool.free_segments(), 410);
        assert!(matches!(pool.remove_device(DeviceId(1)), Err(PoolError::DeviceBusy { segments: 290, .. })));
        // A device that is added later records the feature too.
        let spec = DeviceSpec { path: dir.path().join("c"), size_bytes: Some(device_bytes_for(MIB, MIB)) };
        pool.add_device(&spec, Overwrite::Refuse).unwrap();
        assert!(pool.devices[2].superblock.features.contains(Features::SWAP));
    }

    #[test]
    fn devices_can_be_named_left_out_and_be_out() {
        let dir = tempfile::tempdir().unwrap();
        let mut pool = pool(&dir, &[("a", 4), ("b", 8), ("c", 6)]);
        let on = |pool: &mut Pool, owner, device: Option<u16>, but: &[u16]| {
            let but: Vec<DeviceId> = but.iter().map(|id| DeviceId(*id)).collect();
            pool.allocate_swap(OwnerId(owner), 2, device.map(DeviceId), &but).map(|area| area.device.0)
        };
        assert_eq!(on(&mut pool, 1, None, &[]).unwrap(), 1, "where most is free");
        assert_eq!(on(&mut pool, 2, None, &[1]).unwrap(), 2);
        assert_eq!(on(&mut pool, 3, Some(0), &[]).unwrap(), 0);
        pool.set_admission(DeviceId(1), Admission::Out).unwrap();
        assert_eq!(on(&mut pool, 4, None, &[]).unwrap(), 2);
        assert!(matches!(on(&mut pool, 5, Some(1), &[]), Err(PoolError::Unworkable { .. })));
        assert!(matches!(on(&mut pool, 5, Some(9), &[]), Err(PoolError::NoSuchDevice { .. })));
        assert!(matches!(pool.allocate_swap(SWAP, 0, None, &[]), Err(PoolError::Unworkable { .. })));
    }

    /// Simulates a crash during the write of the segment table. The area has entries in two table
    /// pages, of which only one is written.
    #[test]
    fn incomplete_areas_are_distinguished_from_complete_ones() {
        for lost in [0..126, 126..200] {
            let dir = tempfile::tempdir().unwrap();
            let mut pool = pool(&dir, &[("a", 200)]);
            let area = pool.allocate_swap(SWAP, 200, None, &[]).unwrap();
            let all = pool.segments_of(SWAP);
            assert_eq!(pool.swap_areas(), [area]);
            pool.release(&all[lost.clone()]).unwrap();
            let left = pool.swap_areas();
            assert_eq!((left[0].whole, left[0].segments), (false, 200 - lost.len() as u64));
            pool.release(&pool.segments_of(SWAP)).unwrap();
            assert_eq!((pool.swap_areas(), pool.free_segments()), (vec![], 200));
        }
    }
}
