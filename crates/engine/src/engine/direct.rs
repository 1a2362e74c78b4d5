//! Direct reads: the engine reads likely hits from flash into guest memory, without a copy.
//!
//! The guest or its VMM may write to guest memory during the read, and may unmap it. So a wrong
//! result of a direct read does not show that flash failed. A wrong checksum or an error makes no
//! sector invalid, does not count against a device, and does not make dirty data lost. The engine
//! does not record missing checksums from a direct read. If a direct read fails or returns data
//! with a wrong checksum, the engine declines the read. The front end then retries the read with a
//! buffer of the daemon, and this retry reveals real errors of flash. The engine never copies data
//! out of guest memory, so a direct read fills neither flash nor the memory tier.

use super::{Engine, Owner, Pending};
use crate::command::{Mode, Role};
use crate::io::{IoError, Op, PayloadMemory, Request};
use crate::units::{DiskId, Instant, SECTOR_BYTES};

/// Returns true if the request's kind and alignment permit its payload to be in guest memory.
pub(super) fn may_have(request: &Request) -> bool {
    let is_whole = (request.offset | request.len).is_multiple_of(SECTOR_BYTES);
    request.memory == PayloadMemory::Daemon || request.op == Op::Read && is_whole
}

impl Engine {
    /// Returns true if flash would serve a read of these bytes now, so that offering guest memory
    /// is worthwhile. The call changes nothing, and a concurrent change may make its result wrong.
    /// Returns false if the memory tier could serve the read or keep its data.
    pub fn would_read_flash(&self, disk: DiskId, offset: u64, len: u64) -> bool {
        let Some(disk) = self.disks.get(disk.0 as usize).and_then(Option::as_ref) else { return false };
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= disk.config.size_bytes);
        let is_whole = (offset | len).is_multiple_of(SECTOR_BYTES);
        let is_here = disk.ownership.role == Role::Here;
        if !is_here || !is_inside || !is_whole || disk.memory.is_some() || disk.holds {
            return false;
        }
        let Ok(cache) = disk.looked_up() else { return false };
        let mut spans = cache.spans(offset / SECTOR_BYTES, (offset + len) / SECTOR_BYTES);
        let is_valid = |sector, count| cache.index.count_servable(sector, count) == count;
        let (first, end) = (offset / SECTOR_BYTES, (offset + len) / SECTOR_BYTES);
        cache.config.mode != Mode::PassThrough
            && cache.index.part_in(first, end).is_none()
            && spans.all(|span| cache.find(span).is_some_and(|sector| is_valid(sector, span.count)))
    }

    /// Returns true if the request's buffer is guest memory.
    #[inline]
    pub(super) fn is_direct(&self, slot: u32) -> bool {
        self.requests[slot].request.memory == PayloadMemory::Guest
    }

    /// Returns true if an error of this I/O must not count as an error of its device.
    #[inline]
    pub(super) fn is_doubtful(&self, io: &Pending) -> bool {
        matches!(io.owner, Owner::Request(slot) if self.is_direct(slot))
    }

    /// Handles the end of an I/O of a direct read.
    pub(super) fn direct_read_done(
        &mut self,
        now: Instant,
        slot: u32,
        io: &Pending,
        result: Result<(), IoError>,
        sums: &[u32],
    ) {
        let disk = self.requests[slot].request.disk;
        let index = &self.disk(disk).cache.as_ref().expect("changes wait for flash I/O").index;
        let is_right = result.is_ok() && {
            assert_eq!(sums.len() as u64, io.sectors, "one checksum for each sector read");
            (io.sector..).zip(sums).all(|(sector, sum)| index.is_known_as(sector, *sum))
        };
        let active = &mut self.requests[slot];
        active.failed |= !is_right;
        match (active.pending, active.failed) {
            (0, true) => self.decline(slot),
            (0, false) => {
                self.reply(now, slot, Ok(()));
                self.finish(slot);
            }
            _ => {}
        }
    }

    /// Declines a read into guest memory that is not a hit, or whose flash read failed. The request
    /// ends without a reply and without effects, except that the statistics have counted it.
    pub(super) fn decline(&mut self, slot: u32) {
        let request = self.requests[slot].request;
        self.disk_mut(request.disk).histograms.go_back(request.op);
        self.declined_out.push_back(request.id);
        self.finish(slot);
    }
}
