//! Range locks on sectors, granted in order of arrival.
//!
//! Each request claims its range of sectors. A claim waits for every *earlier* claim that overlaps and
//! conflicts with it, granted or not; so there is no starvation and no deadlock. Claims ensure that a miss
//! is fetched once, a write takes precedence over a fill, and a read never sees half of a write.
//!
//! | | Read | Fill | Change |
//! |---|---|---|---|
//! | Read (served from flash, or past the cache) | – | – | waits |
//! | Fill (a read that will fill flash) | – | waits | waits |
//! | Change (write, discard, zeroes) | waits | waits | waits |
//!
//! Claims are found through zones of 1 MiB that hash to buckets, so adding and removing a claim checks only
//! nearby claims.

use crate::units::{DiskId, SECTOR_BYTES};

const ZONE_SECTORS: u64 = (1 << 20) / SECTOR_BYTES;
const NONE: u32 = u32::MAX;

/// Purpose of a claim; the table above lists the conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Fill,
    Change,
}

impl Kind {
    fn conflicts(self, other: Kind) -> bool {
        match (self, other) {
            (Kind::Change, _) | (_, Kind::Change) | (Kind::Fill, Kind::Fill) => true,
            (Kind::Read, _) | (_, Kind::Read) => false,
        }
    }
}

/// Sectors of one disk, `first <= … < end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) disk: DiskId,
    pub(crate) first: u64,
    pub(crate) end: u64,
}

impl Range {
    #[inline]
    fn overlaps(&self, other: &Range) -> bool {
        self.first < other.end && other.first < self.end && self.disk == other.disk
    }
}

#[derive(Clone, Copy, Debug)]
struct RangeLock {
    range: Range,
    kind: Kind,
    order: u64,
    /// Number of conflicts with earlier claims, counted once per pair of links that share a bucket.
    blockers: u32,
    links: u32,
}

/// An entry of a claim in one bucket.
#[derive(Clone, Copy, Debug)]
struct Link {
    claim: u32,
    bucket: u32,
    prev: u32,
    next: u32,
    /// Next link of the same claim; next free link when free.
    sibling: u32,
}

/// All claims of one engine.
#[derive(Debug)]
pub(crate) struct RangeLocks {
    range_locks: Vec<RangeLock>,
    buckets: Vec<u32>,
    links: Vec<Link>,
    free: u32,
    order: u64,
}

impl RangeLocks {
    /// Allocates room for claims numbered 0 … `claims_max` − 1.
    pub(crate) fn new(claims_max: u32) -> Self {
        let empty = RangeLock {
            range: Range { disk: DiskId(0), first: 0, end: 0 },
            kind: Kind::Read,
            order: 0,
            blockers: 0,
            links: NONE,
        };
        RangeLocks {
            range_locks: vec![empty; claims_max as usize],
            buckets: vec![NONE; (claims_max as usize).next_power_of_two()],
            links: Vec::with_capacity(2 * claims_max as usize),
            free: NONE,
            order: 0,
        }
    }

    /// Adds claim `id`. Returns true if it is granted immediately; otherwise a later [`leave`](Self::leave)
    /// grants it. Its kind is `kind` if nothing conflicts, and `waiting` if something does.
    pub(crate) fn acquire(&mut self, id: u32, range: Range, kind: Kind, waiting: Kind) -> bool {
        debug_assert!(range.first < range.end && self.range_locks[id as usize].links == NONE);
        self.order += 1;
        let mut claim = RangeLock { range, kind, order: self.order, blockers: 0, links: NONE };
        if self.count_conflicts(&claim) > 0 {
            claim.kind = waiting;
            claim.blockers = self.count_conflicts(&claim);
        }
        self.range_locks[id as usize] = claim;
        for bucket in self.buckets_of(&range) {
            self.link(id, bucket);
        }
        self.range_locks[id as usize].blockers == 0
    }

    /// Returns true if claim `id` is of kind Read.
    pub(crate) fn only_reads(&self, id: u32) -> bool {
        self.range_locks[id as usize].kind == Kind::Read
    }

    /// Removes claim `id` and reports each claim that is granted by this.
    pub(crate) fn leave(&mut self, id: u32, mut granted: impl FnMut(u32)) {
        let leaving = self.range_locks[id as usize];
        assert!(leaving.links != NONE && leaving.blockers == 0, "claim {id} leaves without being granted");
        let mut link = leaving.links;
        self.range_locks[id as usize].links = NONE;
        while link != NONE {
            let Link { bucket, sibling, .. } = self.links[link as usize];
            self.unlink(link);
            let mut at = self.buckets[bucket as usize];
            while at != NONE {
                let other = self.links[at as usize];
                let claim = &mut self.range_locks[other.claim as usize];
                if other.claim != id
                    && claim.order > leaving.order
                    && claim.kind.conflicts(leaving.kind)
                    && claim.range.overlaps(&leaving.range)
                {
                    claim.blockers -= 1;
                    if claim.blockers == 0 {
                        granted(other.claim);
                    }
                }
                at = other.next;
            }
            link = sibling;
        }
    }

    /// Returns true if a granted claim overlaps any of these sectors.
    pub(crate) fn is_busy(&self, range: &Range) -> bool {
        self.buckets_of(range).any(|bucket| {
            self.in_bucket(bucket).any(|claim| claim.blockers == 0 && claim.range.overlaps(range))
        })
    }

    /// Returns true if a granted claim other than `id` overlaps any of these sectors.
    pub(crate) fn is_shared(&self, id: u32, range: &Range) -> bool {
        let order = self.range_locks[id as usize].order;
        self.buckets_of(range).any(|bucket| {
            self.in_bucket(bucket)
                .any(|claim| claim.blockers == 0 && claim.order != order && claim.range.overlaps(range))
        })
    }

    fn count_conflicts(&self, claim: &RangeLock) -> u32 {
        let conflicts = |bucket| {
            self.in_bucket(bucket)
                .filter(|other| other.kind.conflicts(claim.kind) && other.range.overlaps(&claim.range))
                .count() as u32
        };
        self.buckets_of(&claim.range).map(conflicts).sum()
    }

    fn in_bucket(&self, bucket: u32) -> impl Iterator<Item = &RangeLock> {
        let mut at = self.buckets[bucket as usize];
        std::iter::from_fn(move || {
            (at != NONE).then(|| {
                let link = &self.links[at as usize];
                at = link.next;
                &self.range_locks[link.claim as usize]
            })
        })
    }

    fn buckets_of(&self, range: &Range) -> impl Iterator<Item = u32> + use<> {
        let (mask, disk) = (self.buckets.len() as u64 - 1, range.disk.0);
        (range.first / ZONE_SECTORS..=(range.end - 1) / ZONE_SECTORS).map(move |zone| {
            // Consecutive zones of one disk take consecutive buckets: no collisions within a claim.
            let scatter = (u64::from(disk) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            (zone.wrapping_add(scatter) & mask) as u32
        })
    }

    fn link(&mut self, id: u32, bucket: u32) {
        let head = self.buckets[bucket as usize];
        let new =
            Link { claim: id, bucket, prev: NONE, next: head, sibling: self.range_locks[id as usize].links };
        let at = if self.free != NONE {
            let at = self.free;
            self.free = self.links[at as usize].sibling;
            self.links[at as usize] = new;
            at
        } else {
            self.links.push(new);
            self.links.len() as u32 - 1
        };
        if head != NONE {
            self.links[head as usize].prev = at;
        }
        self.buckets[bucket as usize] = at;
        self.range_locks[id as usize].links = at;
    }

    fn unlink(&mut self, at: u32) {
        let Link { bucket, prev, next, .. } = self.links[at as usize];
        if prev == NONE {
            self.buckets[bucket as usize] = next;
        } else {
            self.links[prev as usize].next = next;
        }
        if next != NONE {
            self.links[next as usize].prev = prev;
        }
        self.links[at as usize].sibling = self.free;
        self.free = at;
    }
}

#[cfg(test)]
mod tests;
