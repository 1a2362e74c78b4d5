//! Decides which requests may go to the backing while a cache is being recovered, and which of
//! their changes must be recorded.
//!
//! | request | some data may be dirty | no data is dirty | no data is dirty, and no ring is valid |
//! |---|---|---|---|
//! | read of data that may be dirty | waits | | |
//! | other read | passes | passes | passes |
//! | change | waits | waits, and is reported | passes, and is recorded |
//! | flush | waits | passes | passes |
//!
//! While the new journal ring of a recovered cache is being written, the cache's index knows all
//! dirty data. During this time reads of clean data continue, and all other requests wait.
//!
//! A change that goes to the backing makes the copy of its range on flash stale. Normally the
//! recovered index drops this copy before the cache serves requests. If the host crashes before
//! that, the journal rings must not be used any more. So the daemon invalidates the journal rings
//! first (docs/decisions/0008-requests-during-recovery.md).

use super::Engine;
use crate::cache::Cache;
use crate::command::{CommandError, Event, Expect};
use crate::io::{IoError, Op};
use crate::journal::Recovered;
use crate::outcome::Outcome;
use crate::regions::Regions;
use crate::units::{DiskId, Instant};

/// State of a cache that is being recovered.
pub(super) struct RecoveringCache {
    expect: Expect,
    /// Regions of the disk that requests changed on the backing during the recovery.
    changed: Regions,
    /// True if the engine reported that a change waits.
    reported: bool,
}

impl RecoveringCache {
    /// Removes from a recovered cache the data of ranges that requests changed on the backing
    /// during the recovery.
    pub(super) fn forget_changed(&self, recovered: &mut Recovered) {
        if !self.changed.is_empty() {
            recovered.drop_regions(&self.changed);
        }
    }
}

impl Engine {
    /// Stores what the daemon knows now about the dirty data of a cache that is being recovered,
    /// and retries waiting requests. `None` ends the recovery. Fails if the disk already has a
    /// cache, or if `expect` does not fit the disk.
    pub(super) fn expect(&mut self, id: DiskId, expect: Option<Box<Expect>>) -> Result<(), CommandError> {
        let disk = self.disk_mut(id);
        let size = disk.config.size_bytes;
        if disk.cache.is_some() {
            return Err(CommandError::CacheExists);
        }
        match (expect, &mut disk.recovering) {
            (None, recovering) => *recovering = None,
            (Some(expect), _)
                if expect.doubtful.disk_bytes() != size || expect.is_void && !expect.doubtful.is_empty() =>
            {
                return Err(CommandError::Unworkable);
            }
            (Some(expect), Some(recovering)) => recovering.expect = *expect,
            (Some(expect), recovering @ None) => {
                *recovering = Some(Box::new(RecoveringCache {
                    expect: *expect,
                    changed: Regions::new(size),
                    reported: false,
                }));
            }
        }
        self.try_held_again(id);
        Ok(())
    }

    /// Resumes the waiting requests of a disk that is being removed during the recovery of its
    /// cache.
    pub(super) fn release_recovering(&mut self, id: DiskId) {
        if self.disk(id).recovering.is_some() {
            self.try_held_again(id);
        }
    }

    /// Retries the requests that wait for the recovery. Requests that wait for a structural change
    /// keep waiting.
    fn try_held_again(&mut self, id: DiskId) {
        let disk = self.disk_mut(id);
        if !disk.holds {
            let held = std::mem::take(&mut disk.held);
            self.runnable.extend(held);
        }
    }

    /// Returns the regions of a disk's backing that changed during the recovery of its cache.
    pub fn changed_meanwhile(&self, disk: DiskId) -> Option<&Regions> {
        let disk = self.disks.get(disk.0 as usize)?.as_ref()?;
        disk.recovering.as_ref().map(|recovering| &recovering.changed)
    }

    /// Returns true if a read that has its range lock may continue. Otherwise the read waits, or is
    /// refused.
    #[inline]
    pub(super) fn may_read(&mut self, now: Instant, slot: u32) -> bool {
        if !self.disk(self.requests[slot].request.disk).holds {
            return self.passes_recovering(now, slot);
        }
        let passes = self.passes_opening(slot);
        if !passes {
            self.hold(slot);
        }
        passes
    }

    /// Returns true if a read's range has no dirty data while the new journal ring of a recovered
    /// cache is being written. At that time the index has all dirty data, and the backing has all
    /// clean data.
    fn passes_opening(&self, slot: u32) -> bool {
        let range = self.requests[slot].range;
        let disk = self.disk(range.disk);
        let is_dirty = |cache: &Cache| {
            cache.spans(range.first, range.end).any(|span| {
                let sectors = cache.find(span).map_or(0..0, |first| first..first + span.count);
                sectors.into_iter().any(|sector| cache.index.is_dirty(sector))
            })
        };
        disk.recovering.is_some() && disk.opening.is_some() && !disk.cache.as_ref().is_some_and(is_dirty)
    }

    /// Returns true if a request that has its range lock may continue. Otherwise the request waits,
    /// or is refused because its disk is being removed.
    #[inline]
    pub(super) fn passes_recovering(&mut self, now: Instant, slot: u32) -> bool {
        self.disk(self.requests[slot].request.disk).recovering.is_none()
            || self.passes_recovering_now(now, slot)
    }

    fn passes_recovering_now(&mut self, now: Instant, slot: u32) -> bool {
        let (request, range) = (self.requests[slot].request, self.requests[slot].range);
        let disk = self.disk_mut(request.disk);
        let Some(RecoveringCache { expect, changed, reported }) = disk.recovering.as_deref_mut() else {
            return true;
        };
        let is_change = request.op.modifies();
        let passes = match request.op {
            Op::Prefetch => true,
            Op::Read => !expect.doubtful.meets(range.first, range.end),
            Op::Flush | Op::DaemonFlush => expect.doubtful.is_empty(),
            _ => expect.is_void,
        };
        if passes {
            if is_change {
                changed.insert(range.first, range.end);
            }
            return true;
        }
        if disk.removing.is_some() {
            self.requests[slot].outcome = Outcome::Refused;
            self.reply(now, slot, Err(IoError::ShuttingDown));
            self.finish(slot);
            return false;
        }
        if is_change && expect.doubtful.is_empty() && !std::mem::replace(reported, true) {
            self.event_out.push_back(Event::ChangeWaits(request.disk));
        }
        self.hold(slot);
        false
    }
}
