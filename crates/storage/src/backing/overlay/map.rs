//! Records which objects of a clone are its own, and splits reads between clone and parent.
//!
//! An object is one of the equal parts into which the clone's backing divides the disk. The map has
//! one bit per object, and bits are never cleared. An object that was never written in the clone
//! has its parent's data. All data after the part that the clone has in common with its parent is
//! the clone's own.
//!
//! A thread may fill the map while the clone is served. The thread marks own objects first, and
//! then notes up to which byte the map is known. Data that the map does not know yet counts as the
//! clone's own, because the clone's own backing can read everything. Objects that the clone writes
//! before the map knows them stay marked.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Map of the objects that are a clone's own. Copies of a map share the marks, but not the length
/// of the part in common with the parent.
#[derive(Clone, Debug)]
pub struct OwnMap {
    object_bytes: u64,
    objects: Arc<Objects>,
    /// Length of the part in common with the parent, bytes, whole sectors. Everything after it is
    /// the clone's own.
    common_bytes: u64,
}

/// The marks of a map.
#[derive(Debug)]
struct Objects {
    /// One bit per object of the part in common with the parent.
    own: Box<[AtomicU64]>,
    /// First byte of the objects that are not known yet; `u64::MAX` if all are known.
    known_bytes: AtomicU64,
}

impl PartialEq for OwnMap {
    fn eq(&self, other: &OwnMap) -> bool {
        let marks = |map: &OwnMap| {
            let own: Vec<u64> = map.objects.own.iter().map(|word| word.load(Ordering::Relaxed)).collect();
            (map.object_bytes, map.common_bytes, map.known_bytes(), own)
        };
        marks(self) == marks(other)
    }
}

impl Eq for OwnMap {}

/// The origin of a part of a read: clone or parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockOrigin {
    /// The data is the clone's own.
    Own,
    /// The data is the parent's, because nothing was written to the clone there.
    Parent,
}

/// A part of a read with one origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Origin of the part: clone or parent.
    pub whose: BlockOrigin,
    /// First byte of the part on the disk.
    pub offset: u64,
    /// Length of the part, bytes.
    pub len: u64,
}

const SECTOR_BYTES: u64 = hob_engine::units::SECTOR_BYTES;

impl OwnMap {
    /// Creates the map of a clone to which nothing was written. `object_bytes` is a power of two,
    /// at least a sector. The first `common_bytes` are in common with the parent.
    ///
    /// # Panics
    /// Panics if `object_bytes` is invalid.
    #[must_use]
    pub fn new(object_bytes: u64, common_bytes: u64) -> OwnMap {
        let map = OwnMap::unknown(object_bytes, common_bytes);
        map.note_known(u64::MAX);
        map
    }

    /// Creates a map like [`new`](Self::new), but one in which no object is known yet.
    pub(crate) fn unknown(object_bytes: u64, common_bytes: u64) -> OwnMap {
        assert!(object_bytes.is_power_of_two() && object_bytes >= SECTOR_BYTES, "objects of {object_bytes}");
        let common_bytes = common_bytes / SECTOR_BYTES * SECTOR_BYTES;
        let words = common_bytes.div_ceil(object_bytes).div_ceil(64);
        let own = (0..words).map(|_| AtomicU64::new(0)).collect();
        OwnMap {
            object_bytes,
            objects: Arc::new(Objects { own, known_bytes: AtomicU64::new(0) }),
            common_bytes,
        }
    }

    /// Records that all own objects before this byte are marked; `u64::MAX` means all of the map.
    /// An object that is known in part counts as unknown.
    pub(crate) fn note_known(&self, bytes: u64) {
        let known_bytes =
            if bytes == u64::MAX { bytes } else { bytes / self.object_bytes * self.object_bytes };
        // A reader that sees the new value also sees the marks.
        self.objects.known_bytes.store(known_bytes, Ordering::Release);
    }

    fn known_bytes(&self) -> u64 {
        self.objects.known_bytes.load(Ordering::Acquire)
    }

    /// Returns true if the origin of all objects is known.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.known_bytes() == u64::MAX
    }

    /// Marks all objects in a range as the clone's own, because the range was written or is about
    /// to be.
    pub fn take(&mut self, offset: u64, len: u64) {
        // Only a part of the last object may be shared with the parent.
        let end = offset.saturating_add(len).min(self.common_bytes.next_multiple_of(self.object_bytes));
        if offset >= end {
            return;
        }
        for object in offset / self.object_bytes..=(end - 1) / self.object_bytes {
            self.objects.own[(object / 64) as usize].fetch_or(1 << (object % 64), Ordering::Relaxed);
        }
    }

    /// Shrinks the part in common with the parent to `common_bytes`. The part never grows again.
    pub fn cut(&mut self, common_bytes: u64) {
        self.common_bytes = self.common_bytes.min(common_bytes / SECTOR_BYTES * SECTOR_BYTES);
    }

    /// Returns true if the clone has nothing in common with a parent any more.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.common_bytes == 0
    }

    /// Returns the number of bytes that are known to be the parent's.
    #[must_use]
    pub fn parent_bytes(&self) -> u64 {
        let end = self.common_bytes.min(self.known_bytes());
        let objects = end.div_ceil(self.object_bytes);
        let of = |object: u64| self.object_bytes.min(end - object * self.object_bytes);
        (0..objects).filter(|object| !self.is_own(*object)).map(of).sum()
    }

    fn is_own(&self, object: u64) -> bool {
        self.objects.own[(object / 64) as usize].load(Ordering::Relaxed) >> (object % 64) & 1 == 1
    }

    /// Returns the origin of the byte at `offset` (clone or parent), and the offset of the first
    /// byte that may have another origin. Everything from `end` on is the clone's own.
    fn whose(&self, offset: u64, end: u64) -> (BlockOrigin, u64) {
        if offset >= end {
            return (BlockOrigin::Own, u64::MAX);
        }
        let object = offset / self.object_bytes;
        let whose = if self.is_own(object) { BlockOrigin::Own } else { BlockOrigin::Parent };
        (whose, ((object + 1) * self.object_bytes).min(end))
    }

    /// Splits a range into parts by their origin, in order.
    pub fn split(&self, offset: u64, len: u64) -> impl Iterator<Item = Part> + '_ {
        let end = offset + len;
        let end_of_parent = self.common_bytes.min(self.known_bytes());
        let mut at = offset;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let from = at;
            let (whose, mut to) = self.whose(at, end_of_parent);
            while to < end {
                match self.whose(to, end_of_parent) {
                    (other, until) if other == whose => to = until,
                    _ => break,
                }
            }
            at = to.min(end);
            Some(Part { whose, offset: from, len: at - from })
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OBJECT: u64 = 4 << 20;

    fn parts(map: &OwnMap, offset: u64, len: u64) -> Vec<(bool, u64, u64)> {
        map.split(offset, len).map(|part| (part.whose == BlockOrigin::Own, part.offset, part.len)).collect()
    }

    #[test]
    fn unwritten_ranges_are_the_parents() {
        let mut map = OwnMap::new(OBJECT, 4 * OBJECT);
        assert_eq!(parts(&map, 100, 3 * OBJECT), [(false, 100, 3 * OBJECT)]);
        map.take(OBJECT + 5, 1);
        assert_eq!(map.parent_bytes(), 3 * OBJECT);
        let expected = [(false, 0, OBJECT), (true, OBJECT, OBJECT), (false, 2 * OBJECT, OBJECT)];
        assert_eq!(parts(&map, 0, 3 * OBJECT), expected);
        assert_eq!(parts(&map, OBJECT, 4096), [(true, OBJECT, 4096)]);
        // A range across the border takes both objects, and nothing beyond.
        map.take(2 * OBJECT - 1, 2);
        assert_eq!(parts(&map, 0, 4 * OBJECT)[2], (false, 3 * OBJECT, OBJECT));
        map.take(0, u64::MAX);
        assert_eq!(map.parent_bytes(), 0);
    }

    #[test]
    fn past_the_common_part_all_is_the_clones() {
        let mut map = OwnMap::new(OBJECT, OBJECT + 10_000);
        let sectors = OBJECT + 8192;
        assert_eq!(parts(&map, 0, 2 * OBJECT), [(false, 0, sectors), (true, sectors, OBJECT - 8192)]);
        assert_eq!(parts(&map, 7 * OBJECT, 512), [(true, 7 * OBJECT, 512)]);
        map.take(9 * OBJECT, 9 * OBJECT);
        map.cut(OBJECT);
        assert_eq!(parts(&map, OBJECT - 1, 2), [(false, OBJECT - 1, 1), (true, OBJECT, 1)]);
        map.cut(3 * OBJECT);
        assert_eq!(map.parent_bytes(), OBJECT, "it does not grow again");
        map.cut(0);
        assert!(map.is_empty());
        assert_eq!(parts(&OwnMap::new(OBJECT, 0), 5, 5), [(true, 5, 5)]);
    }

    /// While a thread fills the map of a served clone, unknown objects count as the clone's own.
    #[test]
    fn what_is_not_known_yet_is_the_clones() {
        let mut served = OwnMap::unknown(OBJECT, 4 * OBJECT + 4096);
        let mut filled = served.clone();
        assert!(!served.is_complete() && !served.is_empty());
        assert_eq!((parts(&served, 0, OBJECT), served.parent_bytes()), (vec![(true, 0, OBJECT)], 0));
        // The clone writes to an object before the thread has asked about it.
        served.take(OBJECT, 4096);
        filled.take(0, 1);
        filled.note_known(3 * OBJECT + 4096);
        let expected = [(true, 0, 2 * OBJECT), (false, 2 * OBJECT, OBJECT), (true, 3 * OBJECT, OBJECT)];
        assert_eq!(parts(&served, 0, 4 * OBJECT), expected);
        assert_eq!(served.parent_bytes(), OBJECT);
        filled.note_known(u64::MAX);
        assert!(served.is_complete());
        assert_eq!(served.parent_bytes(), 2 * OBJECT + 4096);
    }

    proptest! {
        /// Compares the map with a plain list of written sectors. Written objects are the clone's
        /// own, all other common data is the parent's, and the parts cover the range once.
        #[test]
        fn parts_are_right(
            shift in 12u32..16, common in 0u64..40, cut in 0u64..60,
            takes in prop::collection::vec((0u64..200_000, 1u64..40_000), 0..6),
            offset in 0u64..300_000, len in 1u64..200_000,
        ) {
            let object = 1u64 << shift;
            let mut map = OwnMap::new(object, common * 4096 + 100);
            takes.iter().for_each(|(offset, len)| map.take(*offset, *len));
            map.cut(cut * 4096 + 7);
            let common_bytes = common.min(cut) * 4096;
            let is_parents = |byte: u64| {
                let first = byte / object * object;
                let touches = |&(at, len): &(u64, u64)| at < first + object && first < at + len;
                byte < common_bytes && !takes.iter().any(touches)
            };
            let mut at = offset;
            let mut last = None;
            for part in map.split(offset, len) {
                prop_assert_eq!(part.offset, at);
                prop_assert!(part.len > 0 && last != Some(part.whose));
                for byte in [part.offset, part.offset + part.len / 2, part.offset + part.len - 1] {
                    prop_assert_eq!(is_parents(byte), part.whose == BlockOrigin::Parent, "byte {}", byte);
                }
                for byte in (part.offset..part.offset + part.len).step_by(2048) {
                    prop_assert_eq!(is_parents(byte), part.whose == BlockOrigin::Parent, "byte {}", byte);
                }
                at += part.len;
                last = Some(part.whose);
            }
            prop_assert_eq!(at, offset + len);
            let counted = (0..common_bytes).step_by(4096).filter(|byte| is_parents(*byte)).count() as u64;
            prop_assert_eq!(map.parent_bytes(), counted * 4096);
        }
    }
}
