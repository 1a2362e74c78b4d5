//! One disk of a modelled array: head position, busy time and queue.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::drive::{DriveConfig, QueueGain};

const NS_PER_S: u128 = 1_000_000_000;

#[derive(Clone, Debug)]
pub(super) struct Disk {
    drive: DriveConfig,
    bytes: u64,
    rotation_ns: u64,
    /// Rotation angle of the disk at time zero, nanoseconds. The spindles of an array are not
    /// synchronised.
    phase_ns: u64,
    /// Time at which the disk has completed all accesses so far.
    busy_until: u64,
    /// Sum of the times of all accesses so far, nanoseconds.
    busy_ns: u64,
    /// Head position: the first byte after the last access.
    head: u64,
    /// Completion times of accesses that may still be in progress.
    waiting: BinaryHeap<Reverse<u64>>,
    /// Number of requests at the disk when the current request arrived, including the current
    /// request.
    depth: usize,
    /// Positioning time of the last read of a read-modify-write, nanoseconds.
    last_positioning_ns: u64,
    arrived_at: u64,
}

impl Disk {
    pub(super) fn new(index: usize, rotation_ns: u64, bytes: u64, drive: &DriveConfig) -> Self {
        Disk {
            drive: *drive,
            bytes,
            rotation_ns,
            phase_ns: mix(index as u64) % rotation_ns,
            busy_until: 0,
            busy_ns: 0,
            head: 0,
            waiting: BinaryHeap::new(),
            depth: 1,
            last_positioning_ns: 0,
            arrived_at: 0,
        }
    }

    pub(super) fn free_at(&self) -> u64 {
        self.busy_until
    }

    pub(super) fn busy_ns(&self) -> u64 {
        self.busy_ns
    }

    /// Handles the arrival of a request at the array: updates the disk's queue depth. The parts of
    /// one request do not count as queued requests for each other, so a large request gains nothing
    /// from the elevator.
    pub(super) fn arrive(&mut self, now: u64) {
        while self.waiting.peek().is_some_and(|&Reverse(done)| done <= now) {
            self.waiting.pop();
        }
        self.depth = self.waiting.len() + 1;
        self.arrived_at = now;
    }

    pub(super) fn read(&mut self, now: u64, position: u64, len: u64, gain: &QueueGain) -> u64 {
        let start = now.max(self.busy_until);
        let gap = position.checked_sub(self.head);
        let positioning = match gap {
            Some(gap) if gap <= self.drive.read_ahead_bytes => self.transfer_ns(self.head, gap),
            _ => self.geometric_ns(start, position) * gain.remaining(self.depth) / 1000,
        };
        self.occupy(start, positioning, position, len)
    }

    pub(super) fn write(&mut self, now: u64, position: u64, len: u64, gain: &QueueGain) -> u64 {
        let start = now.max(self.busy_until);
        let positioning = self.geometric_ns(start, position) * gain.remaining(self.depth) / 1000;
        // A request that waited for the previous one, and starts shortly after its end, needs no
        // seek: the head passes over the gap.
        let follows_without_pause = start == self.busy_until && start > 0;
        let gap = position.checked_sub(self.head).filter(|_| follows_without_pause);
        let gap_ns = gap.map(|gap| self.transfer_ns(self.head, gap)).filter(|ns| *ns < self.rotation_ns);
        let positioning = gap_ns.map_or(positioning, |ns| ns.min(positioning));
        self.occupy(start, positioning, position, len)
    }

    /// Performs the read of a read-modify-write. The read is not part of a stream, because the head
    /// returns to write.
    pub(super) fn read_before_write(&mut self, now: u64, position: u64, len: u64, gain: &QueueGain) -> u64 {
        let start = now.max(self.busy_until);
        let positioning = self.geometric_ns(start, position) * gain.remaining(self.depth) / 1000;
        self.last_positioning_ns = positioning;
        self.occupy(start, positioning, position, len)
    }

    /// Performs the write of a read-modify-write, at `ready` at the earliest. At `ready`, the old
    /// data and parity of the whole row are known. A disk with no other request waits until the
    /// sectors return under the head. A disk with a queue serves other requests in the meantime, so
    /// it positions again for as long as for the read.
    pub(super) fn write_after_read(&mut self, ready: u64, position: u64, len: u64, gain: &QueueGain) -> u64 {
        let start = ready.max(self.busy_until);
        if self.depth == 1 {
            let positioning = self.geometric_ns(start, position);
            return self.occupy(start, positioning, position, len);
        }
        let rotation = self.rotation_ns / 2 * gain.remaining(self.depth) / 1000;
        let work = self.last_positioning_ns.max(rotation) + self.transfer_ns(position, len);
        self.busy_until = self.busy_until.max(self.arrived_at) + work;
        self.busy_ns += work;
        self.head = position + len;
        self.waiting.push(Reverse(start + work));
        start + work
    }

    fn occupy(&mut self, start: u64, positioning: u64, position: u64, len: u64) -> u64 {
        let done = start + positioning + self.transfer_ns(position, len);
        self.busy_until = done;
        self.busy_ns += done - start;
        self.head = position + len;
        self.waiting.push(Reverse(done));
        done
    }

    /// Returns the time to seek to a position and to wait for the first sector, nanoseconds.
    fn geometric_ns(&self, start: u64, position: u64) -> u64 {
        let distance = self.head.abs_diff(position) as f64 / self.bytes as f64;
        let seek = self.drive.seek.seek_ns(distance);
        let angle_there = (start + seek + self.phase_ns) % self.rotation_ns;
        let angle_wanted = self.angle_ns(position);
        seek + (angle_wanted + self.rotation_ns - angle_there) % self.rotation_ns
    }

    /// Returns the rotation angle of a byte on its track, as nanoseconds of rotation. Tracks are
    /// skewed, so a sequential stream loses no time between tracks.
    fn angle_ns(&self, position: u64) -> u64 {
        let (zone_start, rate) = self.zone(position);
        let since_zone = u128::from(position - zone_start) * NS_PER_S / u128::from(rate);
        (since_zone % u128::from(self.rotation_ns)) as u64
    }

    fn transfer_ns(&self, position: u64, len: u64) -> u64 {
        let (_, rate) = self.zone(position);
        (u128::from(len) * NS_PER_S / u128::from(rate)) as u64
    }

    /// Returns the first byte of the zone (ring of tracks with one media rate) that contains a
    /// byte, and the zone's media rate in bytes per second. All zones have the same number of
    /// bytes.
    fn zone(&self, position: u64) -> (u64, u64) {
        let zones = self.drive.zones;
        let zone_bytes = self.bytes.div_ceil(zones);
        let zone = (position / zone_bytes).min(zones - 1);
        let fall = self.drive.outer_bytes_per_s - self.drive.inner_bytes_per_s;
        let lost = if zones == 1 { 0 } else { fall * zone / (zones - 1) };
        (zone * zone_bytes, self.drive.outer_bytes_per_s - lost)
    }
}

/// Returns the SplitMix64 finalizer of a disk index, which scatters small numbers.
fn mix(index: u64) -> u64 {
    let mut word = (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}
