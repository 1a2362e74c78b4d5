//! A modelled array of mechanical disks: when would this request have completed?
//!
//! The model says *when*, never *what*: it holds no data and refuses to know any. Time is nanoseconds handed in
//! by the caller; the same sequence of calls gives the same completions on every machine. `submit` answers at
//! once with the completion time, so the model cannot reorder what it has already answered. What an elevator
//! would have gained by reordering is charged as shorter positioning instead ([`QueueGain`]).
//!
//! What is modelled: seek by distance, rotation by the angle at that instant, media rate by zone, read-ahead of
//! sequential streams, writes that wait in the order of the track, one queue per disk, striping, mirrors, and RAID 5's read-modify-write. What is not:
//! reordering across disks, coalescing of neighbouring writes, rebuilds and retries. The controller's memory is off
//! unless [`ArrayConfig::write_cache`] or [`ArrayConfig::read_cache`] names it.
//!
//! Units: bytes, nanoseconds, and thousandths where a name says `permille`.

mod disk;
mod dram;
mod drive;
mod raid;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use disk::Disk;
use dram::Dram;
pub use dram::ReadCache;
pub use drive::{DriveConfig, QueueGain, SeekCurve};
use raid::{Chunk, chunks};

/// What a request does to the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Bytes come from the media.
    Read,
    /// Bytes go to the media, or to the controller's write cache when there is one.
    Write,
    /// Writes that completed before are made durable; offset and length are ignored.
    Flush,
}

/// How the disks form one address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Striped, no redundancy.
    Raid0,
    /// Mirrored pairs, striped over when there is more than one pair ("RAID 10").
    Raid1,
    /// Striped with one rotating parity chunk per row (left-asymmetric).
    Raid5,
}

/// A battery-backed write cache in the controller: writes complete in it while it has room, and a flush need not
/// wait for the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteCache {
    /// Bytes that may wait for the disks.
    pub bytes_max: u64,
    /// Time for a write that finds room.
    pub latency_ns: u64,
}

/// Everything that is fixed when the array is built.
#[derive(Clone, Debug)]
pub struct ArrayConfig {
    /// Number of disks, all alike.
    pub disks: usize,
    /// Rotations per minute.
    pub rpm: u32,
    /// How the disks form one address space.
    pub level: Level,
    /// Bytes that lie together on one disk before the next disk's turn.
    pub stripe_bytes: u64,
    /// Usable bytes. They are spread over the whole stroke of every disk, so the average seek between random
    /// addresses is the data sheet's, whatever the capacity.
    pub capacity_bytes: u64,
    /// Seek, media rate and read-ahead of each disk.
    pub drive: DriveConfig,
    /// How positioning shrinks as a disk's queue grows.
    pub queue_gain: QueueGain,
    /// Controller and bus, added to each request but occupying no disk.
    pub controller_ns: u64,
    /// `None`: writes complete on the media (the default).
    pub write_cache: Option<WriteCache>,
    /// `None`: every read comes from the media (the default).
    pub read_cache: Option<ReadCache>,
}

impl ArrayConfig {
    /// RAID 5 of four 7200 rpm enterprise SATA disks, the array of the Oracle I/O calibration in the Flash Read
    /// Cache study: 576–608 random 8 KB reads a second at depth. Elevator on, write cache off, 64 KiB stripes.
    pub fn raid5_of_four_7200(capacity_bytes: u64) -> Self {
        Self::raid5(4, 7_200, DriveConfig::enterprise_sata_7200(), capacity_bytes)
    }

    /// RAID 5 of five 15K SAS disks, the array of the study's decision-support database.
    pub fn raid5_of_five_15k(capacity_bytes: u64) -> Self {
        Self::raid5(5, 15_000, DriveConfig::sas_15k(), capacity_bytes)
    }

    /// RAID 5 of ten 10K SAS disks, the array of the study's DVD Store.
    pub fn raid5_of_ten_10k(capacity_bytes: u64) -> Self {
        Self::raid5(10, 10_000, DriveConfig::sas_10k(), capacity_bytes)
    }

    /// RAID 5 of five 15K SAS disks behind a mirrored write cache, the array below the 200 virtual desktops of the
    /// FAST Cache study. Arrays of that class keep several hundred megabytes for writes and answer from it in a
    /// fraction of a millisecond.
    pub fn raid5_of_five_15k_vdi(capacity_bytes: u64) -> Self {
        let write_cache = Some(WriteCache { bytes_max: 512 << 20, latency_ns: 300_000 });
        ArrayConfig { write_cache, ..Self::raid5_of_five_15k(capacity_bytes) }
    }

    /// RAID 5 as all presets have it: elevator on, write cache off, 64 KiB stripes.
    fn raid5(disks: usize, rpm: u32, drive: DriveConfig, capacity_bytes: u64) -> Self {
        ArrayConfig {
            disks,
            rpm,
            level: Level::Raid5,
            stripe_bytes: 64 << 10,
            capacity_bytes,
            drive,
            queue_gain: QueueGain::SHORTEST_POSITIONING,
            controller_ns: 100_000,
            write_cache: None,
            read_cache: None,
        }
    }

    /// Bytes each disk holds, parity and mirror copies included.
    fn disk_bytes(&self) -> u64 {
        let rows = self.capacity_bytes.div_ceil(self.stripe_bytes * self.data_chunks_per_row() as u64);
        rows * self.stripe_bytes
    }

    fn data_chunks_per_row(&self) -> usize {
        match self.level {
            Level::Raid0 => self.disks,
            Level::Raid1 => self.disks / 2,
            Level::Raid5 => self.disks - 1,
        }
    }

    fn check(&self) {
        match self.level {
            Level::Raid0 => assert!(self.disks >= 1, "RAID 0 needs a disk"),
            Level::Raid1 => {
                assert!(self.disks >= 2 && self.disks.is_multiple_of(2), "RAID 1 needs pairs of disks")
            }
            Level::Raid5 => assert!(self.disks >= 3, "RAID 5 needs three disks"),
        }
        assert!(self.stripe_bytes > 0 && self.capacity_bytes > 0, "an array has stripes and a capacity");
        assert!(self.rpm > 0, "a disk that does not turn is not mechanical");
        self.drive.check();
        self.queue_gain.check();
    }
}

/// The array. Call [`ArrayModel::submit`] for each request, in the order they arrive.
#[derive(Clone, Debug)]
pub struct ArrayModel {
    config: ArrayConfig,
    disks: Vec<Disk>,
    /// Writes in the controller's cache: (time they are on the media, bytes).
    cached_writes: BinaryHeap<Reverse<(u64, u64)>>,
    cached_bytes: u64,
    dram: Option<Dram>,
    reads_on_disks: u64,
    writes_on_disks: u64,
}

impl ArrayModel {
    /// An idle array.
    ///
    /// # Panics
    /// When the configuration contradicts itself: too few disks for the level, or a size or rate of zero.
    pub fn new(config: ArrayConfig) -> Self {
        config.check();
        let rotation_ns = 60_000_000_000 / u64::from(config.rpm);
        let disk_bytes = config.disk_bytes();
        let disks =
            (0..config.disks).map(|index| Disk::new(index, rotation_ns, disk_bytes, &config.drive)).collect();
        let cached_writes = BinaryHeap::new();
        let dram = config.read_cache.map(Dram::new);
        let (reads_on_disks, writes_on_disks) = (0, 0);
        ArrayModel { config, disks, cached_writes, cached_bytes: 0, dram, reads_on_disks, writes_on_disks }
    }

    /// What the array was built with.
    pub fn config(&self) -> &ArrayConfig {
        &self.config
    }

    /// Reads and writes the disks themselves have done: one small RAID 5 write is two of each.
    pub fn disk_ios(&self) -> (u64, u64) {
        (self.reads_on_disks, self.writes_on_disks)
    }

    /// Takes a request that arrives at `now_ns` and returns when it completes, in nanoseconds of the same clock.
    /// Arrivals should not go backwards; one that does is treated as late, not refused.
    ///
    /// # Panics
    /// When a read or write reaches beyond the capacity: the caller checks the guest's range.
    pub fn submit(&mut self, now_ns: u64, op: Access, offset: u64, len: u64) -> u64 {
        if op == Access::Flush {
            return now_ns + self.config.controller_ns;
        }
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.config.capacity_bytes);
        assert!(inside, "request {offset}+{len} is beyond the array's capacity");
        for disk in &mut self.disks {
            disk.arrive(now_ns);
        }
        if let (Some(dram), Some(cache)) = (&mut self.dram, self.config.read_cache) {
            if op == Access::Read && dram.hit(offset, len) {
                return now_ns + cache.latency_ns;
            }
            if op == Access::Write {
                dram.take(offset, len);
            }
        }
        let done = match op {
            Access::Read => self.read_ahead(now_ns, offset, len),
            _ => match self.config.write_cache {
                None => self.write(now_ns, offset, len),
                Some(cache) => return self.write_cached(now_ns, offset, len, cache),
            },
        };
        done + self.config.controller_ns
    }

    /// Reads what is asked for, and keeps the disks reading if that is part of a stream: the rest is done later, but
    /// counts as there from now on.
    fn read_ahead(&mut self, now: u64, offset: u64, len: u64) -> u64 {
        let done = self.read(now, offset, len);
        let Some(dram) = &mut self.dram else { return done };
        let more = dram.read_len(offset, len, self.config.capacity_bytes);
        dram.take(offset, more);
        if more > len {
            self.read(now, offset + len, more - len);
        }
        done
    }

    fn read(&mut self, now: u64, offset: u64, len: u64) -> u64 {
        let config = &self.config;
        let mut done = now;
        for chunk in chunks(config, offset, len) {
            let disk = match config.level {
                Level::Raid1 => self.nearer_mirror(chunk.disk),
                Level::Raid0 | Level::Raid5 => chunk.disk,
            };
            let end = self.disks[disk].read(now, chunk.position, chunk.len, &config.queue_gain);
            self.reads_on_disks += 1;
            done = done.max(end);
        }
        done
    }

    /// The copy whose disk is free first.
    fn nearer_mirror(&self, first: usize) -> usize {
        if self.disks[first + 1].free_at() < self.disks[first].free_at() { first + 1 } else { first }
    }

    fn write(&mut self, now: u64, offset: u64, len: u64) -> u64 {
        match self.config.level {
            Level::Raid0 => self.write_copies(now, offset, len, 1),
            Level::Raid1 => self.write_copies(now, offset, len, 2),
            Level::Raid5 => self.write_with_parity(now, offset, len),
        }
    }

    fn write_copies(&mut self, now: u64, offset: u64, len: u64, copies: usize) -> u64 {
        let mut done = now;
        for chunk in chunks(&self.config, offset, len) {
            for disk in chunk.disk..chunk.disk + copies {
                let end = self.disks[disk].write(now, chunk.position, chunk.len, &self.config.queue_gain);
                self.writes_on_disks += 1;
                done = done.max(end);
            }
        }
        done
    }

    /// Row by row: a row that is written whole needs no reads; any other reads old data and old parity first.
    fn write_with_parity(&mut self, now: u64, offset: u64, len: u64) -> u64 {
        let row_bytes = self.config.stripe_bytes * self.config.data_chunks_per_row() as u64;
        let (mut at, end, mut done) = (offset, offset + len, now);
        while at < end {
            let row_end = ((at / row_bytes + 1) * row_bytes).min(end);
            done = done.max(self.write_row(now, at, row_end - at, row_bytes));
            at = row_end;
        }
        done
    }

    fn write_row(&mut self, now: u64, offset: u64, len: u64, row_bytes: u64) -> u64 {
        let mut parts: Vec<Chunk> = chunks(&self.config, offset, len).collect();
        parts.push(raid::parity_of(&self.config, &parts));
        let gain = &self.config.queue_gain;
        if len == row_bytes {
            self.writes_on_disks += parts.len() as u64;
            let ends =
                parts.iter().map(|part| self.disks[part.disk].write(now, part.position, part.len, gain));
            return ends.fold(now, u64::max);
        }
        let old_known = parts
            .iter()
            .map(|part| self.disks[part.disk].read_before_write(now, part.position, part.len, gain))
            .fold(now, u64::max);
        self.reads_on_disks += parts.len() as u64;
        self.writes_on_disks += parts.len() as u64;
        parts
            .iter()
            .map(|part| self.disks[part.disk].write_after_read(old_known, part.position, part.len, gain))
            .fold(old_known, u64::max)
    }

    /// The disks' work is charged at once; the guest waits only for room.
    fn write_cached(&mut self, now: u64, offset: u64, len: u64, cache: WriteCache) -> u64 {
        let mut room_at = now;
        while let Some(&Reverse((on_media, bytes))) = self.cached_writes.peek() {
            let full = self.cached_bytes + len > cache.bytes_max;
            if on_media > now && !full {
                break;
            }
            room_at = room_at.max(on_media);
            self.cached_bytes -= bytes;
            self.cached_writes.pop();
        }
        let on_media = self.write(now, offset, len);
        self.cached_bytes += len;
        self.cached_writes.push(Reverse((on_media, len)));
        room_at + cache.latency_ns
    }
}
