//! Requests while a cache is being recovered: what may pass to the backing, and what must be remembered of that.
//!
//! | | something may be dirty | nothing is | nothing is, and no ring vouches for anything |
//! |---|---|---|---|
//! | read of what may be dirty | waits | | |
//! | other read | passes | passes | passes |
//! | change | waits | waits, and is reported | passes, and is remembered |
//! | flush | waits | passes | passes |
//!
//! When the cache is there and its new ring is being written, its index says exactly what is dirty: other reads pass, and all else
//! waits.
//!
//! A change that passed makes what flash has of it stale. If all ends well, the recovered index gives it up before it serves; if
//! there is a crash before that, the rings must not be believed any more. So its owner makes them void first
//! (docs/decisions/0008).

use super::Engine;
use crate::cache::Cache;
use crate::command::{CommandError, Event, Expect};
use crate::io::{IoError, Op};
use crate::journal::Recovered;
use crate::outcome::Outcome;
use crate::regions::Regions;
use crate::units::{DiskId, Instant};

/// A cache that is being recovered.
pub(super) struct RecoveringCache {
    expect: Expect,
    /// What changes passed it.
    changed: Regions,
    /// It was said that a change waits.
    reported: bool,
}

impl RecoveringCache {
    /// Takes out of a recovered cache what was changed since.
    pub(super) fn forget_changed(&self, recovered: &mut Recovered) {
        if !self.changed.is_empty() {
            recovered.drop_regions(&self.changed);
        }
    }
}

impl Engine {
    /// Hears more of a cache that is being recovered.
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

    /// A disk with such a cache is removed: nobody waits for it any more.
    pub(super) fn release_recovering(&mut self, id: DiskId) {
        if self.disk(id).recovering.is_some() {
            self.try_held_again(id);
        }
    }

    /// Those that wait for a change of structure go on waiting.
    fn try_held_again(&mut self, id: DiskId) {
        let disk = self.disk_mut(id);
        if !disk.holds {
            let held = std::mem::take(&mut disk.held);
            self.runnable.extend(held);
        }
    }

    /// Where a disk's backing has been changed while its cache is being recovered.
    pub fn changed_meanwhile(&self, disk: DiskId) -> Option<&Regions> {
        let disk = self.disks.get(disk.0 as usize)?.as_ref()?;
        disk.recovering.as_ref().map(|recovering| &recovering.changed)
    }

    /// May a read, which has its claim, go on? If not it waits, or is refused.
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

    /// While the new ring of a recovered cache is written, its index is known already: what is not dirty is on the backing.
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

    /// May a request, which has its claim, go on? If not it waits, or is refused as its disk is being removed.
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
            Op::Flush => expect.doubtful.is_empty(),
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
