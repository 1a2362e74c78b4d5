//! Requests I/O from storage, and counts completed I/O.

use super::{Engine, Owner, Pending, sync_order};
use crate::cache::FlashRun;
use crate::device;
use crate::io::{BufferSlice, Io, IoError, IoOp, Target};
use crate::qos;
use crate::units::{BufferId, DiskId, Instant, IoId, SECTOR_BYTES, sector_ceil, sector_floor};

impl Engine {
    /// Sends an I/O to the backing of a request's disk.
    pub(super) fn issue_backing(&mut self, now: Instant, slot: u32, op: IoOp) {
        let request = self.requests[slot].request;
        let (offset, end) = match op {
            IoOp::Flush => (0, 0),
            IoOp::Read => {
                let doubts = self.disk(request.disk).backed.doubts;
                self.requests[slot].doubts = doubts;
                let size = self.disk(request.disk).config.size_bytes;
                let end = sector_ceil(request.offset + request.len).min(size);
                (sector_floor(request.offset), end)
            }
            IoOp::Write(_) if self.requests[slot].sends_edges() => {
                let (first, end) = self.requests[slot].held_sectors();
                let (offset, end) = (first * SECTOR_BYTES, end * SECTOR_BYTES);
                (offset.min(request.offset), end.max(request.offset + request.len))
            }
            _ => (request.offset, request.offset + request.len),
        };
        let slice = match op {
            IoOp::Read | IoOp::Write(_) => self.requests[slot].payload().map(|(id, start)| BufferSlice {
                id,
                offset: start + (offset - sector_floor(request.offset)) as u32,
                len: (end - offset) as u32,
            }),
            _ => None,
        };
        let target = Target::Backing(request.disk);
        self.issue(now, Owner::Request(slot), request.disk, target, op, (offset, end - offset), slice, 0);
    }

    /// Sends one I/O of a request to flash for each entry of `runs`.
    pub(super) fn issue_runs(&mut self, now: Instant, slot: u32, op: IoOp) {
        let active = &self.requests[slot];
        let (request, (buffer, _)) = (active.request, active.payload().expect("flash I/O moves payload"));
        self.issue_runs_of(now, Owner::Request(slot), request.disk, buffer, op);
    }

    /// Sends one I/O to flash for each entry of `runs`. Buffer positions in `runs` are counted from
    /// the start of the buffer `id`.
    pub(super) fn issue_runs_of(&mut self, now: Instant, owner: Owner, disk: DiskId, id: BufferId, op: IoOp) {
        let runs = std::mem::take(&mut self.runs);
        for FlashRun { extent, buffer_sector } in &runs {
            let len = extent.count * SECTOR_BYTES;
            let slice = BufferSlice { id, offset: (buffer_sector * SECTOR_BYTES) as u32, len: len as u32 };
            let target = Target::Flash(extent.device);
            self.issue(now, owner, disk, target, op, (extent.offset, len), Some(slice), extent.sector);
        }
        self.disk_mut(disk).flash_in_flight += runs.len() as u32;
        self.runs = runs;
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of an I/O, passed at few places")]
    pub(super) fn issue(
        &mut self,
        now: Instant,
        owner: Owner,
        disk: DiskId,
        target: Target,
        op: IoOp,
        (offset, len): (u64, u64),
        slice: Option<BufferSlice>,
        sector: u64,
    ) -> IoId {
        self.serial += 1;
        let serial = self.serial;
        match owner {
            Owner::Request(slot) => {
                self.requests[slot].pending += 1;
                self.disk_mut(disk).backing_in_flight += u32::from(matches!(target, Target::Backing(_)));
            }
            Owner::Job(job) => self.jobs[job].pending += 1,
            Owner::Journal(_) => self.disk_mut(disk).journal_in_flight += 1,
        }
        if matches!(target, Target::Flash(_)) && op != IoOp::Read {
            self.disk_mut(disk).flash_budget.wrote(len);
        }
        let is_sync = sync_order::is_sync(target, op);
        if is_sync {
            self.disk_mut(disk).sync_order.begin(serial);
        }
        let id = IoId(self.ios.insert(Pending {
            owner,
            disk,
            serial,
            target,
            is_write: op != IoOp::Read,
            is_sync,
            wanted: now,
            issued: now,
            is_counted: false,
            bytes: len,
            slice,
            sector,
            sectors: len / SECTOR_BYTES,
        }));
        self.send_io(now, Io { id, target, op, offset, len, slice });
        id
    }

    /// Counts a completed I/O for its disk and its device. Journal I/O is not counted in the disk's
    /// statistics.
    pub(super) fn account(&mut self, now: Instant, io: &Pending, result: Result<(), IoError>) {
        let result = if self.is_doubtful(io) { Ok(()) } else { result };
        let units = qos::units(io.bytes, self.limits.qos_unit_bytes);
        let disk = self.disk_mut(io.disk);
        let stats = match (io.owner, io.target) {
            (Owner::Journal(_), _) => {
                disk.journal_in_flight -= 1;
                None
            }
            (_, Target::Backing(_)) => {
                // A read that another disk served does not count as I/O of the backing.
                (io.is_write || io.bytes > 0).then_some(&mut disk.stats.backing)
            }
            (_, Target::Flash(_)) => {
                disk.flash_in_flight -= 1;
                Some(&mut disk.stats.flash)
            }
        };
        if let Some(stats) = stats {
            stats.ios += 1;
            stats.units += u64::from(units);
            stats.waited_ns += io.issued - io.wanted;
            stats.total_ns += now - io.issued;
            stats.errors += u64::from(result.is_err());
            match io.is_write {
                true => stats.write_bytes += io.bytes,
                false => stats.read_bytes += io.bytes,
            }
        }
        if let Target::Flash(device) = io.target {
            if result.is_err() {
                let change = self.devices.get(device).failed(now, &self.health);
                self.device_changed(device, change);
            }
            let ios = &self.ios;
            let is_outstanding = |id: IoId, serial| ios.contains(id.0) && ios[id.0].serial == serial;
            let change = self.devices.get(device).check(now, &self.health, is_outstanding);
            self.device_changed(device, change);
        }
    }

    pub(super) fn check_devices(&mut self, now: Instant) {
        let (ios, health) = (&self.ios, &self.health);
        let is_outstanding = |id: IoId, serial| ios.contains(id.0) && ios[id.0].serial == serial;
        let changes: Vec<_> = self
            .devices
            .iter_mut()
            .map(|(id, device)| (id, device.check(now, health, is_outstanding)))
            .filter(|(_, change)| *change != device::Change::None)
            .collect();
        changes.into_iter().for_each(|(id, change)| self.device_changed(id, change));
    }
}
