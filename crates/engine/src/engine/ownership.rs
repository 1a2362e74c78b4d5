//! Handles requests according to this host's role for a disk that can move between hosts
//! (docs/decisions/0013-migration.md). The table lists how each request is handled in each role.
//!
//! | | here | standby | frozen | migrated away |
//! |---|---|---|---|---|
//! | read of a guest | served | bypasses the cache | waits | refused |
//! | change of a guest | served | waits, and is reported | waits | refused |
//! | flush of a guest | served | answered | waits | refused |
//! | prefetch of a guest | served | answered without effect | waits | refused |
//! | `Pull` | served | served | refused | refused |
//! | `Forget` | refused | served | refused | refused |
//! | `Settle` | refused | refused | served | refused |
//! | `DaemonFlush` | served | answered without effect | waits | refused |
//! | `ReadForPeer` | served | refused | served | served from flash only |
//!
//! In standby, the owner of the disk takes the place of the backing: the owner serves reads that
//! bypass the cache, and `Pull` requests. The caller of the engine, which performs the I/O, sends
//! these reads to the owner. Waiting requests have no range lock, so no other request waits for
//! them.

use super::{Active, Engine};
use crate::command::{CommandError, Event, Mode, Role};
use crate::io::{IoError, Op, Reply, Request};
use crate::outcome::Outcome;
use crate::regions::Regions;
use crate::units::{CommandId, DiskId, Instant};

/// This host's role for a disk, and the requests that wait for another role.
#[derive(Default)]
pub(super) struct Ownership {
    pub(super) role: Role,
    /// The command in progress that freezes the disk. It ends when no guest's request is in flight.
    freezing: Option<CommandId>,
    /// Requests that wait for a change of role, with their arrival times.
    waiting: Vec<(Instant, Request)>,
    /// True if the engine has already reported to the daemon that a guest's change waits.
    reported: bool,
    /// Number of guests' requests in flight.
    pub(super) guests: u32,
    /// Regions of the disk that changed since the last query, if changes are watched.
    changed: Option<Box<Regions>>,
}

impl Ownership {
    /// Returns true if changes are watched.
    pub(super) fn is_watched(&self) -> bool {
        self.changed.is_some()
    }

    /// Records the range of a change whose range lock was granted, if changes are watched.
    #[inline]
    pub(super) fn note_change(&mut self, first: u64, end: u64) {
        if let Some(changed) = &mut self.changed {
            changed.insert(first, end);
        }
    }
}

/// The handling of a new request in the present role.
enum OwnershipDecision {
    Served,
    /// The request is answered with success and has no effect.
    Answered,
    Waits,
    Refused,
}

/// Returns the handling of a request according to the table at the start of this module.
fn decide(role: Role, op: Op) -> OwnershipDecision {
    use OwnershipDecision::*;
    match (role, op) {
        (Role::Here, Op::Forget | Op::Settle) => Refused,
        (Role::Here, _) => Served,
        (Role::Standby, Op::Read | Op::Pull | Op::Forget) => Served,
        (Role::Standby, Op::Flush | Op::DaemonFlush | Op::Prefetch) => Answered,
        (Role::Standby, Op::Settle | Op::ReadForPeer) => Refused,
        (Role::Frozen, Op::Settle | Op::ReadForPeer) => Served,
        (Role::Frozen, Op::Pull | Op::Forget) => Refused,
        (Role::Standby | Role::Frozen, _) => Waits,
        (Role::Away, Op::ReadForPeer) => Served,
        (Role::Away, _) => Refused,
    }
}

impl Engine {
    /// Starts a valid request that arrived at `arrived`, makes the request wait, or answers it.
    #[inline]
    pub(super) fn check_ownership(&mut self, now: Instant, arrived: Instant, request: Request) {
        let role = self.disk(request.disk).ownership.role;
        if role == Role::Here && !request.op.is_own() {
            return self.admit(now, arrived, request);
        }
        match decide(role, request.op) {
            OwnershipDecision::Served => self.admit(now, arrived, request),
            OwnershipDecision::Answered => {
                let disk = self.disk_mut(request.disk);
                disk.record(now, arrived, &request, Outcome::BypassStandby);
                let Request { id, disk, .. } = request;
                self.reply_out.push_back(Reply { id, disk, result: Ok(()), outcome: Outcome::BypassStandby });
                self.release_out.extend(request.buffer);
            }
            OwnershipDecision::Waits => {
                let ownership = &mut self.disk_mut(request.disk).ownership;
                ownership.waiting.push((arrived, request));
                let is_first = role == Role::Standby && !std::mem::replace(&mut ownership.reported, true);
                self.owner_waits += 1;
                self.slots.take(request.disk, 1);
                if is_first {
                    self.event_out.push_back(Event::ChangeWaits(request.disk));
                }
            }
            OwnershipDecision::Refused => self.refuse(now, &request, IoError::ShuttingDown),
        }
    }

    /// Returns true if a request would wait for a change of role, and other requests of its disk
    /// already wait for such a change.
    pub(super) fn joins_waiting(&self, request: &Request) -> bool {
        let Some(Some(disk)) = self.disks.get(request.disk.0 as usize) else { return false };
        let Ownership { role, waiting, .. } = &disk.ownership;
        !waiting.is_empty() && matches!(decide(*role, request.op), OwnershipDecision::Waits)
    }

    /// Gives this host another role for a disk. Returns `None` if the change takes effect later.
    pub(super) fn set_role(
        &mut self,
        now: Instant,
        id: CommandId,
        disk_id: DiskId,
        role: Role,
    ) -> Option<Result<(), CommandError>> {
        let disk = self.disk_mut(disk_id);
        let dirty = disk
            .cache
            .as_ref()
            .is_some_and(|cache| cache.config.mode == Mode::WriteBack || cache.index.dirty_sectors() > 0);
        let result = match (disk.ownership.role, role) {
            (Role::Here, Role::Standby) if disk.in_flight == 0 && disk.cache.is_none() => Ok(()),
            (Role::Here, Role::Frozen) if dirty || !disk.lost.is_empty() => Err(CommandError::Dirty),
            (Role::Here, Role::Frozen) | (Role::Standby, Role::Here) => Ok(()),
            (Role::Frozen, Role::Here) => Ok(()),
            (Role::Frozen, Role::Away) if disk.ownership.freezing.is_none() => Ok(()),
            // Another host has owned the disk in the meantime, and may have changed data that is in
            // the cache.
            (Role::Away, Role::Here) if disk.cache.is_none() => Ok(()),
            _ => Err(CommandError::WrongRole),
        };
        if result.is_err() {
            return Some(result);
        }
        if matches!((disk.ownership.role, role), (Role::Standby | Role::Away, Role::Here)) {
            // Another host has owned the disk in the meantime, and may have changed any data.
            disk.note_everything();
        }
        let ownership = &mut disk.ownership;
        ownership.role = role;
        ownership.reported = false;
        let stopped = ownership.freezing.take();
        if role == Role::Frozen {
            ownership.freezing = Some(id);
        }
        if let Some(command) = stopped {
            self.done(command, disk_id, Err(CommandError::Stopped));
        }
        self.pass_waiting(now, disk_id);
        if role != Role::Frozen {
            return Some(Ok(()));
        }
        self.end_freezing(disk_id);
        None
    }

    /// Handles a takeover of the disk's backing by another host: from now on this host serves no
    /// request to the disk, whatever its role was.
    pub fn revoke(&mut self, now: Instant, id: DiskId) {
        let Some(Some(disk)) = self.disks.get_mut(id.0 as usize) else { return };
        disk.ownership.role = Role::Away;
        if let Some(command) = disk.ownership.freezing.take() {
            self.done(command, id, Err(CommandError::Stopped));
        }
        self.pass_waiting(now, id);
        // Requests that waited for older data to reach the backing are refused.
        self.end_order_wait(id);
        self.run(now);
    }

    /// Retries the requests that waited for a change of role.
    pub(super) fn pass_waiting(&mut self, now: Instant, id: DiskId) {
        let disk = self.disk_mut(id);
        let waiting = std::mem::take(&mut disk.ownership.waiting);
        let removing = disk.removing.is_some();
        self.owner_waits -= waiting.len() as u32;
        self.slots.give_back(id, waiting.len() as u64);
        for (arrived, request) in waiting {
            match removing {
                true => self.refuse(now, &request, IoError::ShuttingDown),
                false => self.check_ownership(now, arrived, request),
            }
        }
    }

    /// Completes the freezing of a disk if no guest's request is in flight.
    pub(super) fn end_freezing(&mut self, id: DiskId) {
        let ownership = &mut self.disk_mut(id).ownership;
        if ownership.guests == 0
            && let Some(command) = ownership.freezing.take()
        {
            self.done(command, id, Ok(Vec::new()));
        }
    }

    /// Returns the role of this host for a disk.
    pub fn role(&self, disk: DiskId) -> Option<Role> {
        self.disks.get(disk.0 as usize)?.as_ref().map(|disk| disk.ownership.role)
    }

    /// Starts or stops recording which regions of a disk change.
    pub(super) fn watch(&mut self, id: DiskId, watch: bool) {
        let disk = self.disk_mut(id);
        let size = disk.config.size_bytes;
        disk.ownership.changed = watch.then(|| Box::new(Regions::new(size)));
    }

    /// Returns the regions of a [watched](crate::command::Command::Watch) disk that changed since
    /// the last call. Data that a peer read from these regions may be outdated. Returns `None` if
    /// no region changed.
    pub fn take_changed(&mut self, disk: DiskId) -> Option<Regions> {
        let disk = self.disks.get_mut(disk.0 as usize)?.as_mut()?;
        let size = disk.config.size_bytes;
        let changed = disk.ownership.changed.as_mut().filter(|changed| !changed.is_empty())?;
        Some(std::mem::replace(changed, Regions::new(size)))
    }

    /// Invalidates cached data of a locked range.
    pub(super) fn start_forget(&mut self, now: Instant, slot: u32) {
        let Active { request, range, .. } = self.requests[slot];
        let disk = self.disk_mut(request.disk);
        if disk.holds {
            return self.hold(slot);
        }
        let result = if disk.ownership.role == Role::Standby { Ok(()) } else { Err(IoError::ShuttingDown) };
        if result.is_ok() {
            let dirty = disk.cache.as_ref().map_or(0, |cache| cache.index.dirty_sectors());
            assert_eq!(dirty, 0, "a disk in standby has no dirty data");
            self.forget_in_memory(slot);
            self.drop_clean(now, request.disk, range.first, range.end);
        }
        self.requests[slot].outcome = Outcome::BypassStandby;
        self.reply(now, slot, result);
        self.finish(slot);
    }

    /// Drops the clean cached data of these sectors.
    pub(super) fn drop_clean(&mut self, now: Instant, id: DiskId, first: u64, end: u64) {
        let disk = self.disk_mut(id);
        let Some(cache) = disk.cache.as_mut() else { return };
        let Some(journal) = &mut disk.journal else { return cache.invalidate(first, end) };
        // The next flush must commit these records. Otherwise a crash would bring back the outdated
        // clean data.
        journal.urgent = true;
        let mut runs = cache.cached_runs(first, end);
        while let Some((sector, count)) = runs.next(cache) {
            for sector in sector..sector + count {
                let second = cache.index.second_sector(sector);
                let copies = [Some(sector), second].into_iter().flatten();
                if copies.clone().any(|copy| cache.index.is_dirty(copy)) {
                    continue;
                }
                for copy in copies {
                    journal.drop_sector(now, &mut cache.index, copy);
                }
            }
        }
        self.wake(id);
    }

    /// Flushes the backing of a frozen disk before the hand-over.
    pub(super) fn start_settle(&mut self, now: Instant, slot: u32) {
        self.flush_request(now, slot);
    }

    /// Returns true if a peer's read must not go to the backing, because this host does not own the
    /// disk any more.
    pub(super) fn is_cached_only(&self, slot: u32) -> bool {
        let request = &self.requests[slot].request;
        request.op == Op::ReadForPeer && self.disk(request.disk).ownership.role == Role::Away
    }

    /// Returns the numbers of a disk's cached blocks, hottest first.
    /// [`valid_extents`](Self::valid_extents) takes these numbers.
    pub fn hottest_blocks(&self, disk: DiskId) -> Vec<u64> {
        let disk = self.disks.get(disk.0 as usize).and_then(Option::as_ref);
        let Some(cache) = disk.and_then(|disk| disk.cache.as_ref()) else { return Vec::new() };
        let mut blocks: Vec<u64> =
            cache.order().map(|(frame, _)| cache.index.block(frame).0.into()).collect();
        blocks.reverse();
        blocks
    }

    /// Returns the valid sectors of some blocks of a disk's cache, as `(first, end)` on the disk,
    /// block by block.
    pub fn valid_extents(&self, disk: DiskId, blocks: &[u64]) -> Vec<(u64, u64)> {
        let mut extents: Vec<(u64, u64)> = Vec::new();
        let disk = self.disks.get(disk.0 as usize).and_then(Option::as_ref);
        let Some(cache) = disk.and_then(|disk| disk.cache.as_ref()) else { return extents };
        for block in blocks {
            let first = block << cache.block_shift();
            for span in cache.spans(first, first + (1 << cache.block_shift())) {
                let Some(sector) = cache.find(span) else { continue };
                let valid = (0..span.count).filter(|i| cache.index.is_valid(sector + i));
                for at in valid.map(|i| first + span.first + i) {
                    match extents.last_mut() {
                        Some((_, end)) if *end == at => *end += 1,
                        _ => extents.push((at, at + 1)),
                    }
                }
            }
        }
        extents
    }
}
