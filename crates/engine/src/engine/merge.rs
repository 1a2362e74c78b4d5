//! Merges adjacent writes to the backing, on disks whose memory tier serves reads.
//!
//! While a write to the backing is in flight, a later write waits if it begins at the byte where
//! the first write ends. Further writes that continue the range wait too. All waiting writes are
//! sent together when the first write ends. So the only write in flight of a guest never waits, and
//! the more writes are in flight, the larger are the merged I/Os. No timer is needed (after J.
//! Nagle, "Congestion Control in IP/TCP Internetworks", RFC 896, 1984).
//!
//! If the size of a full stripe of the backing is known, a merged I/O that reaches the end of a
//! stripe ends there, so a RAID gets whole stripes. Writes that begin the next stripe and do not
//! fill it wait until that I/O ends.
//!
//! Each write of a merged I/O is acknowledged when that I/O has ended. If a merged I/O fails, its
//! writes are sent one by one, so that no write fails because of another write. FUA writes are not
//! merged.

use std::collections::BTreeMap;

use super::destage_buffers::DestageBuffer;
use super::{Active, Engine, Owner};
use crate::io::{BufferCopy, BufferSlice, CopyEnd, Durability, IoError, IoOp, Op, Target};
use crate::range_locks::Range;
use crate::units::{DiskId, Instant, SECTOR_BYTES, sector_floor};

/// No merged I/O crosses a multiple of this number of bytes. If the stripe size is known, the
/// boundaries are instead multiples of the largest whole number of stripes that fits into this
/// number of bytes (at least one stripe).
const WINDOW_BYTES: u64 = 1 << 20;

/// The writes of one disk in flight to the backing, and the writes that wait behind each of them. A
/// write is identified by the number of its range lock.
#[derive(Debug, Default)]
pub(super) struct Merger {
    chains: BTreeMap<u32, Chain>,
    /// Range lock of each write in flight, keyed by the end of the last write that waits behind it.
    /// Range locks exclude overlapping writes, so no two writes end at the same byte.
    ends: BTreeMap<u64, u32>,
    /// The requests of each merged write in flight.
    members: BTreeMap<u32, Vec<u32>>,
}

#[derive(Debug)]
struct Chain {
    end: u64,
    /// Waiting requests, in the order of their offsets.
    waiting: Vec<u32>,
}

impl Merger {
    /// Records a write that was sent to the backing and ends at byte `end`.
    fn begin(&mut self, lock: u32, end: u64) {
        let twice = self.ends.insert(end, lock).is_some()
            | self.chains.insert(lock, Chain { end, waiting: Vec::new() }).is_some();
        assert!(!twice, "range locks exclude overlapping writes");
    }

    /// Queues the write of `offset..end` behind the write that ends at `offset`. Returns false if
    /// no write in flight or queued ends there.
    fn follow(&mut self, slot: u32, offset: u64, end: u64) -> bool {
        let Some(lock) = self.ends.remove(&offset) else { return false };
        let chain = self.chains.get_mut(&lock).expect("each entry of `ends` has a chain");
        chain.waiting.push(slot);
        chain.end = end;
        self.ends.insert(end, lock);
        true
    }

    /// Removes a write that has ended. Returns the writes that waited behind it.
    fn end(&mut self, lock: u32) -> Vec<u32> {
        let Some(chain) = self.chains.remove(&lock) else { return Vec::new() };
        self.ends.remove(&chain.end);
        chain.waiting
    }
}

impl Engine {
    /// Sets the size of a full stripe of a disk's backing: the data of one stripe, without parity,
    /// in bytes. The size is a multiple of 4 KiB, and need not be a power of two. 0 means an
    /// unknown size. Applies to writes that are merged or destaged from now on.
    pub fn set_stripe(&mut self, disk: DiskId, bytes: u32) {
        assert!(u64::from(bytes).is_multiple_of(SECTOR_BYTES), "a stripe of {bytes} bytes");
        if let Some(Some(disk)) = self.disks.get_mut(disk.0 as usize) {
            disk.stripe_bytes = bytes;
        }
    }

    /// Queues a write behind an adjacent write in flight. Returns false if no write in flight or
    /// queued ends where this write begins.
    pub(super) fn follows_another(&mut self, slot: u32) -> bool {
        let Active { request, .. } = self.requests[slot];
        let is_plain = request.op == Op::Write(Durability::Volatile) && !self.requests[slot].sends_edges();
        let disk = self.disk_mut(request.disk);
        let merges = disk.memory.is_some() && disk.memory_uses().serves;
        merges && is_plain && disk.merger.follow(slot, request.offset, request.offset + request.len)
    }

    /// Sends one write to the backing. On disks with a memory tier, later writes that continue this
    /// one wait until it ends, and are then merged.
    pub(super) fn write_alone(&mut self, now: Instant, slot: u32) {
        let Active { request, .. } = self.requests[slot];
        let Op::Write(durability) = request.op else { panic!("{:?} is not a write", request.op) };
        let sends_edges = self.requests[slot].sends_edges();
        let disk = self.disk_mut(request.disk);
        if disk.memory.is_some() && !sends_edges {
            disk.merger.begin(slot, request.offset + request.len);
        }
        self.issue_backing(now, slot, IoOp::Write(durability));
    }

    /// Sends to the backing the writes that waited behind a completed write.
    pub(super) fn send_followers(&mut self, now: Instant, slot: u32) {
        let disk = self.requests[slot].request.disk;
        let waiting = self.disk_mut(disk).merger.end(slot);
        self.send(now, disk, waiting);
    }

    fn send(&mut self, now: Instant, disk: DiskId, mut rest: Vec<u32>) {
        while !rest.is_empty() {
            match self.room_for(&rest) {
                Some((count, buffer)) => {
                    let more = rest.split_off(count);
                    self.write_merged(now, disk, std::mem::replace(&mut rest, more), buffer);
                    if self.waits_for_stripe(disk, &rest) {
                        return self.wait_again(disk, &rest);
                    }
                }
                None => self.write_alone(now, rest.remove(0)),
            }
        }
    }

    /// Returns true if adjacent writes begin a stripe and do not fill it. Writes to the end of the
    /// disk do not wait, because nothing can follow them.
    fn waits_for_stripe(&self, disk: DiskId, slots: &[u32]) -> bool {
        let (Some(first), Some(last)) = (slots.first(), slots.last()) else { return false };
        let it = self.disk(disk);
        let stripe = u64::from(it.stripe_bytes);
        let start = self.requests[*first].request.offset;
        let last = self.requests[*last].request;
        let end = last.offset + last.len;
        stripe > 0 && start.is_multiple_of(stripe) && end < (start + stripe).min(it.config.size_bytes)
    }

    /// Queues adjacent writes behind the write that was just sent.
    fn wait_again(&mut self, disk: DiskId, slots: &[u32]) {
        for slot in slots {
            let request = self.requests[*slot].request;
            let end = request.offset + request.len;
            let follows = self.disk_mut(disk).merger.follow(*slot, request.offset, end);
            assert!(follows, "the writes of a chain are adjacent");
        }
    }

    /// Returns how many of the first `slots` fit into one I/O, and a buffer for them. `None` means
    /// that the first write is sent by itself.
    fn room_for(&mut self, slots: &[u32]) -> Option<(usize, DestageBuffer)> {
        let start = self.requests[slots[0]].request.offset;
        let disk = self.requests[slots[0]].request.disk;
        let stripe = u64::from(self.disk(disk).stripe_bytes);
        let window = WINDOW_BYTES.checked_div(stripe).map_or(WINDOW_BYTES, |count| stripe * count.max(1));
        let (base, window_end) = (sector_floor(start), (start / window + 1) * window);
        let requests = &self.requests;
        let end_of = |slot: &u32| requests[*slot].request.offset + requests[*slot].request.len;
        // Up to this number of bytes of the disk, and to the end of a stripe if there is one.
        let count_to = |end_max: u64| {
            let count_below = |limit: u64| slots.iter().take_while(|slot| end_of(slot) <= limit).count();
            let count = count_below(end_max);
            let end = slots[..count].last().map_or(start, end_of);
            match end.checked_rem(stripe) {
                Some(beyond) if end - beyond > start => count_below(end - beyond),
                _ => count,
            }
        };
        let count = count_to(window_end);
        if count < 2 || !self.has_job_to_spare(disk) {
            return None;
        }
        let mut buffer = self.destage_buffers.take_spare(disk, end_of(&slots[count - 1]) - base)?;
        let count = count_to(window_end.min(base + u64::from(buffer.len)));
        if count < 2 {
            self.destage_buffers.give_back(&buffer);
            return None;
        }
        self.destage_buffers.shorten(&mut buffer, end_of(&slots[count - 1]) - base);
        Some((count, buffer))
    }

    fn write_merged(&mut self, now: Instant, disk: DiskId, slots: Vec<u32>, buffer: DestageBuffer) {
        let (first, last) = (self.requests[slots[0]].range, self.requests[slots[slots.len() - 1]].range);
        let job = self.begin_merged(Range { disk, first: first.first, end: last.end }, buffer);
        let start = self.requests[slots[0]].request.offset;
        let base = sector_floor(start);
        let mut end = start;
        for slot in &slots {
            let request = self.requests[*slot].request;
            assert_eq!(request.offset, end, "merged writes are adjacent");
            end += request.len;
            let from = request.buffer.expect("writes have a buffer");
            let from =
                CopyEnd::Buffer { id: from, offset: (request.offset - sector_floor(request.offset)) as u32 };
            let to =
                CopyEnd::Buffer { id: buffer.id, offset: buffer.offset + (request.offset - base) as u32 };
            self.copy_out.push_back(BufferCopy { from, to, len: request.len as u32 });
        }
        let lock = self.limits.requests_max + job;
        let it = self.disk_mut(disk);
        it.stats.writes_merged += slots.len() as u64;
        it.merger.members.insert(job, slots);
        it.merger.begin(lock, end);
        let offset = buffer.offset + (start - base) as u32;
        let slice = BufferSlice { id: buffer.id, offset, len: (end - start) as u32 };
        let op = IoOp::Write(Durability::Volatile);
        let at = (start, end - start);
        self.issue(now, Owner::Job(job), disk, Target::Backing(disk), op, at, Some(slice), 0);
    }

    /// Handles the end of a merged write.
    pub(super) fn merged_done(&mut self, now: Instant, job: u32, result: Result<(), IoError>) {
        let disk = self.jobs[job].disk;
        let lock = self.limits.requests_max + job;
        let merger = &mut self.disk_mut(disk).merger;
        let slots = merger.members.remove(&job).expect("a merged write has members");
        let waiting = merger.end(lock);
        self.end_job(now, job, result);
        for slot in slots {
            match result {
                Ok(()) => self.backing_change_done(now, slot, Ok(())),
                Err(_) => self.write_alone(now, slot),
            }
        }
        self.send(now, disk, waiting);
    }
}
