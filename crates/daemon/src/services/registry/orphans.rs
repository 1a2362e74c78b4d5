//! Orphans: persistent caches in a pool that belong to no disk of this daemon,
//! for example because the state directory was lost (docs/decisions/0064).

use std::collections::BTreeMap;

use hob_control::{Orphan, Size};
use hob_storage::pool::OwnerId;
use tokio::time::Instant;

use super::{DiskEntry, Inner, PoolEntry};
use crate::hardware::BackingInfo;
use crate::state::CacheOwner;

/// The content of an orphan, according to its journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::services) struct OrphanContent {
    /// Identity of the backing.
    pub(in crate::services) identity: [u8; 32],
    /// Size of the disk in bytes.
    pub(in crate::services) disk_bytes: u64,
    /// Dirty data in bytes. More may be on missing devices.
    pub(in crate::services) dirty_bytes: u64,
    /// Number of the journal ring.
    pub(in crate::services) ring: u32,
    /// Number of copies of the journal ring.
    pub(in crate::services) copies: usize,
    /// Block size in bytes.
    pub(in crate::services) block_bytes: u32,
    /// Number of data segments.
    pub(in crate::services) segments: u64,
}

/// Result of reading the journal of an orphan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::services) enum OrphanJournal {
    /// hob has been reading the journal since this time.
    Reading(Instant),
    /// The cache has no data segments on the present devices.
    Empty,
    Read(OrphanContent),
    /// The reason why the journal cannot be read.
    Unreadable(String),
}

/// An orphan whose journal was read, or is being read.
#[derive(Clone, Debug)]
pub(in crate::services) struct OrphanRecord {
    pub(in crate::services) journal: OrphanJournal,
    /// Number of devices of the pool that were present. Other devices may have more of the cache.
    devices: usize,
}

impl OrphanContent {
    /// Returns true if the cache belonged to this backing, possibly at a smaller size.
    pub(in crate::services) fn is_of(&self, info: &BackingInfo) -> bool {
        if info.size_bytes == self.disk_bytes {
            return info.identity == self.identity;
        }
        info.size_bytes > self.disk_bytes && info.identity_at(self.disk_bytes) == Some(self.identity)
    }
}

impl OrphanJournal {
    /// Returns the dirty data in bytes; `None` if it is unknown.
    pub(in crate::services) fn dirty_bytes(&self, is_whole: bool) -> Option<u64> {
        match self {
            OrphanJournal::Empty if is_whole => Some(0),
            OrphanJournal::Read(content) if is_whole || content.dirty_bytes > 0 => Some(content.dirty_bytes),
            _ => None,
        }
    }
}

impl PoolEntry {
    /// Returns true if all devices of the pool are present.
    pub(in crate::services) fn is_whole(&self) -> bool {
        self.devices.iter().all(|device| device.ids.is_some())
    }

    /// Returns the orphans whose journals must be read now, and marks them as being read.
    pub(in crate::services) fn begin_reading(&mut self, known: &[OwnerId]) -> Vec<OwnerId> {
        self.begin_reading_besides(known, &[])
    }

    /// Returns the orphans whose journals must be read now, but only those that were orphans at the
    /// previous call too. Marks them as being read. Newer orphans are not read, because a cache
    /// belongs to no disk for a moment while a command replaces or removes it.
    pub(in crate::services) fn begin_reading_old(&mut self, known: &[OwnerId]) -> Vec<OwnerId> {
        let owners = self.owners.iter().map(|(owner, _)| *owner);
        let unknown: Vec<OwnerId> = owners.filter(|owner| !known.contains(owner)).collect();
        let before = std::mem::replace(&mut self.orphans_before, unknown.clone());
        let young: Vec<OwnerId> = unknown.into_iter().filter(|owner| !before.contains(owner)).collect();
        self.begin_reading_besides(known, &young)
    }

    fn begin_reading_besides(&mut self, known: &[OwnerId], young: &[OwnerId]) -> Vec<OwnerId> {
        let devices = self.devices.iter().filter(|device| device.ids.is_some()).count();
        let owners = self.owners.iter().map(|(owner, _)| *owner);
        let orphans: Vec<OwnerId> = owners.filter(|owner| !known.contains(owner)).collect();
        self.orphans.retain(|owner, _| orphans.contains(owner));
        let is_read = |owner: &OwnerId| {
            let of = self.orphans.get(owner);
            of.is_some_and(|of| of.devices == devices || matches!(of.journal, OrphanJournal::Reading(_)))
        };
        let unread: Vec<OwnerId> =
            orphans.into_iter().filter(|owner| !young.contains(owner) && !is_read(owner)).collect();
        for owner in &unread {
            let journal = OrphanJournal::Reading(Instant::now());
            self.orphans.insert(*owner, OrphanRecord { journal, devices });
        }
        unread
    }

    /// Returns the orphans of the pool, with what is known about their journals.
    pub(in crate::services) fn orphans(&self, inner: &Inner) -> Vec<(OwnerId, Option<&OrphanJournal>)> {
        let known = inner.settled_owners();
        let orphans = self.owners.iter().filter(|(owner, _)| !known.contains(owner));
        orphans.map(|(owner, _)| (*owner, self.orphans.get(owner).map(|of| &of.journal))).collect()
    }

    pub(in crate::services) fn orphan_views(&self, inner: &Inner) -> Vec<Orphan> {
        let sizes: BTreeMap<OwnerId, u64> = self.owners.iter().copied().collect();
        let view = |(owner, journal): (OwnerId, Option<&OrphanJournal>)| Orphan {
            owner: CacheOwner(owner.0).to_string(),
            size: Size(sizes.get(&owner).copied().unwrap_or(0) * self.segment_bytes),
            dirty: journal.and_then(|journal| journal.dirty_bytes(self.is_whole())).map(Size),
            disk: journal.and_then(|journal| inner.disk_of(journal)),
        };
        self.orphans(inner).into_iter().map(view).collect()
    }
}

impl Inner {
    /// Returns the disk whose backing an orphan belonged to, if that backing was opened.
    pub(in crate::services) fn disk_of(&self, journal: &OrphanJournal) -> Option<String> {
        let OrphanJournal::Read(content) = journal else { return None };
        let is_of =
            |disk: &&DiskEntry| disk.measure.as_ref().is_some_and(|measure| content.is_of(&measure.info));
        let disk = self.disks.values().find(is_of)?;
        Some(disk.wanted.name.clone())
    }
}
