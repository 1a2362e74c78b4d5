//! A model of an array of mechanical disks. The model computes when each request completes.
//!
//! The model stores no data. The caller passes the virtual time in nanoseconds. The same sequence
//! of calls gives the same completion times on every host. `submit` returns the completion time
//! immediately, so the model cannot reorder requests. Instead, the model shortens the positioning
//! time by the average gain of an elevator that reorders ([`QueueGain`]).
//!
//! The model includes seek time by distance, rotational latency by the current angle, media rate by
//! zone and read-ahead of sequential streams. The model includes adjacent writes without a seek,
//! one queue per disk, striping, mirrors, and the read-modify-write of RAID 5. The model does not
//! include reordering across disks, coalescing of adjacent writes, rebuilds and retries. The
//! controller has no cache unless [`ArrayConfig::write_cache`] or [`ArrayConfig::read_cache`] is
//! set.
//!
//! Units: bytes and nanoseconds. Names with `permille` are in thousandths.

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

/// Operation of a request to the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads bytes from the controller's read cache if it has all of them, or else from the media.
    Read,
    /// Writes bytes to the media, or to the controller's write cache if there is one.
    Write,
    /// Makes completed writes durable. Offset and length are ignored.
    Flush,
}

/// RAID level: how the disks form one address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Striping without redundancy.
    Raid0,
    /// Mirrored pairs, with striping over the pairs if there are several ("RAID 10").
    Raid1,
    /// Striping with one rotating parity chunk per row (left-asymmetric).
    Raid5,
}

/// A battery-backed write cache in the array controller. Writes complete in the cache while it has
/// room. A flush does not wait for the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteCache {
    /// Maximum number of bytes in the write cache that the disks have not written yet.
    pub bytes_max: u64,
    /// Latency of a write for which the write cache has room, nanoseconds.
    pub latency_ns: u64,
}

/// Configuration of a modelled array.
#[derive(Clone, Debug)]
pub struct ArrayConfig {
    /// Number of disks, all of the same model.
    pub disks: usize,
    /// Rotations per minute of each disk.
    pub rpm: u32,
    /// RAID level of the array.
    pub level: Level,
    /// Size of a stripe chunk: contiguous bytes on one disk.
    pub stripe_bytes: u64,
    /// Usable capacity in bytes. The capacity is spread over the full stroke of every disk. The
    /// average seek between random addresses is thus the data sheet's value at any capacity.
    pub capacity_bytes: u64,
    /// Seek times, media rate and read-ahead of each disk.
    pub drive: DriveConfig,
    /// Reduction of the positioning time when a disk's queue is longer.
    pub queue_gain: QueueGain,
    /// Time of controller and bus per request, nanoseconds. The disks are not busy during this
    /// time.
    pub controller_ns: u64,
    /// The controller's write cache. With `None`, the default, writes complete on the media.
    pub write_cache: Option<WriteCache>,
    /// The controller's read cache. With `None`, the default, every read comes from the media.
    pub read_cache: Option<ReadCache>,
}

impl ArrayConfig {
    /// Returns a RAID 5 array of four 7200 rpm enterprise SATA disks. The Oracle I/O calibration of
    /// the Flash Read Cache study used such an array: 576–608 random 8 KB reads per second at high
    /// queue depth. The elevator is on, the write cache is off, and stripe chunks have 64 KiB.
    pub fn raid5_of_four_7200(capacity_bytes: u64) -> Self {
        Self::raid5(4, 7_200, DriveConfig::enterprise_sata_7200(), capacity_bytes)
    }

    /// Returns a RAID 5 array of five 15K SAS disks, as in the study's decision-support database.
    pub fn raid5_of_five_15k(capacity_bytes: u64) -> Self {
        Self::raid5(5, 15_000, DriveConfig::sas_15k(), capacity_bytes)
    }

    /// Returns a RAID 5 array of ten 10K SAS disks, as in the study's DVD Store benchmark.
    pub fn raid5_of_ten_10k(capacity_bytes: u64) -> Self {
        Self::raid5(10, 10_000, DriveConfig::sas_10k(), capacity_bytes)
    }

    /// Returns a RAID 5 array of five 15K SAS disks with a mirrored write cache, as in the FAST
    /// Cache study of 200 virtual desktops. Arrays of that class have a write cache of several
    /// hundred megabytes, with a latency below a millisecond.
    pub fn raid5_of_five_15k_vdi(capacity_bytes: u64) -> Self {
        let write_cache = Some(WriteCache { bytes_max: 512 << 20, latency_ns: 300_000 });
        ArrayConfig { write_cache, ..Self::raid5_of_five_15k(capacity_bytes) }
    }

    /// Returns a RAID 5 array with the settings of all presets: elevator on, write cache off,
    /// stripe chunks of 64 KiB.
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

    /// Returns the number of bytes on each disk, including parity and mirror copies.
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
            Level::Raid0 => assert!(self.disks >= 1, "RAID 0 needs at least one disk"),
            Level::Raid1 => {
                assert!(self.disks >= 2 && self.disks.is_multiple_of(2), "RAID 1 needs pairs of disks")
            }
            Level::Raid5 => assert!(self.disks >= 3, "RAID 5 needs at least three disks"),
        }
        assert!(self.stripe_bytes > 0 && self.capacity_bytes > 0, "stripe size and capacity must not be 0");
        assert!(self.rpm > 0, "the rotational speed must not be 0");
        self.drive.check();
        self.queue_gain.check();
    }
}

/// Model of a disk array. Call [`ArrayModel::submit`] for each request, in the order of arrival.
#[derive(Clone, Debug)]
pub struct ArrayModel {
    config: ArrayConfig,
    disks: Vec<Disk>,
    /// Writes in the controller's cache, as completion time on the media and number of bytes.
    cached_writes: BinaryHeap<Reverse<(u64, u64)>>,
    cached_bytes: u64,
    dram: Option<Dram>,
    reads_on_disks: u64,
    writes_on_disks: u64,
}

impl ArrayModel {
    /// Creates an idle array.
    ///
    /// # Panics
    /// Panics if the configuration is invalid: too few disks for the RAID level, or a size or rate
    /// of zero.
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

    /// Returns the configuration of the array.
    pub fn config(&self) -> &ArrayConfig {
        &self.config
    }

    /// Returns the numbers of reads and writes that the disks themselves have done. One small RAID
    /// 5 write is two reads and two writes.
    pub fn disk_ios(&self) -> (u64, u64) {
        (self.reads_on_disks, self.writes_on_disks)
    }

    /// Returns the time that all disks together were busy so far, nanoseconds. The time for work
    /// that is still in the queue of a disk is included.
    pub fn busy_ns(&self) -> u64 {
        self.disks.iter().map(Disk::busy_ns).sum()
    }

    /// Submits a request that arrives at `now_ns` and returns its completion time, both in
    /// nanoseconds of virtual time. Arrival times should not decrease: the disks serve requests in
    /// the order of the calls.
    ///
    /// # Panics
    /// Panics if a read or write extends beyond the capacity. The caller must check the range of a
    /// guest request.
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

    /// Reads a range, and reads ahead if the range continues a stream. The data read ahead counts
    /// as cached immediately.
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

    /// Returns the disk of a mirrored pair that is free first.
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

    /// Writes a range row by row. A full-row write needs no reads. Any other write first reads the
    /// old data and the old parity.
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

    /// Writes through the controller's cache: the disks are busy immediately, and the guest waits
    /// only for room in the cache.
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
