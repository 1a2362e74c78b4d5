//! Sets up a replay: disks, caches and modelled devices.
//!
//! Segments of each cache are allocated from all flash devices in turn. The journal is on the first
//! device. If dirty data has two copies, the journal's second copy is on the second device.

use std::fmt;

use hob_engine::admission::Admission;
use hob_engine::command::{
    self, CacheChange, CacheConfig, Command, Copies, DataSegment, DiskConfig, Enable, NewRing, Segment,
};
use hob_engine::policy::PolicyKind;
use hob_engine::preset::Preset;
use hob_engine::units::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, BufferId, DatastoreId, DeviceId, Instant};
use hob_engine::{Engine, Limits, journal};

use super::{LENT, LENT_BYTES, Replay, Run};
use crate::queue::Queue;
use crate::service::ServiceModel;

/// Size of a segment in large caches, bytes.
const SEGMENT_BYTES: u64 = 1 << 20;

/// Returns the segment size for a cache: 1 MiB, or one block for caches below 64 MiB.
pub fn segment_bytes(bytes: u64, block_bytes: u32) -> u64 {
    if bytes >= 64 * SEGMENT_BYTES { SEGMENT_BYTES } else { block_bytes.into() }
}

/// Size and settings of one disk's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSetup {
    /// Size of the cache on all devices together, bytes. The size includes replicas and does not
    /// include the journal. The value is rounded down to whole segments.
    pub bytes: u64,
    /// Settings of the cache.
    pub config: CacheConfig,
    /// True if the cache has a journal. A write-back cache needs one.
    pub journal: bool,
}

impl CacheSetup {
    /// Returns the settings of a volatile write-through cache that admits all data.
    pub fn volatile(bytes: u64, block_bytes: u32, policy: PolicyKind) -> CacheSetup {
        let segment_bytes = segment_bytes(bytes, block_bytes);
        let config = CacheConfig::write_through(block_bytes, segment_bytes, policy, Admission::default());
        CacheSetup { bytes, config, journal: false }
    }

    /// Returns the cache settings of a preset.
    pub fn preset(bytes: u64, preset: &Preset) -> CacheSetup {
        let config = preset.config(segment_bytes(bytes, preset.block_bytes));
        CacheSetup { bytes, config, journal: preset.persistent }
    }

    /// Returns the same cache settings with a different cache size.
    pub fn with_bytes(self, bytes: u64) -> CacheSetup {
        let segment_bytes = segment_bytes(bytes, self.config.block_bytes);
        CacheSetup { bytes, config: CacheConfig { segment_bytes, ..self.config }, ..self }
    }
}

/// Size, backing range and cache of one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskSetup {
    /// Size of the disk in bytes; a multiple of 512.
    pub size_bytes: u64,
    /// Offset of the disk on the backing, which all disks share, bytes.
    pub backing_offset: u64,
    /// Cache of the disk. With `None`, every request goes to the backing.
    pub cache: Option<CacheSetup>,
}

/// Configuration of a replay.
#[derive(Clone, Debug)]
pub struct Setup {
    /// All disks, numbered from 0.
    pub disks: Vec<DiskSetup>,
    /// Flash devices, which all caches share: at least one, and two if any data has two copies.
    pub flash: Vec<ServiceModel>,
    /// Backing of all disks.
    pub backing: ServiceModel,
    /// Limits of the engine.
    pub limits: Limits,
}

impl Setup {
    /// Sets up one disk at the start of the backing, with the engine's default limits. The replay
    /// gets two flash devices if the cache has two copies of any data.
    pub fn one_disk(
        size_bytes: u64,
        cache: Option<CacheSetup>,
        flash: impl Into<ServiceModel>,
        backing: impl Into<ServiceModel>,
    ) -> Self {
        let disk = DiskSetup { size_bytes, backing_offset: 0, cache };
        Setup::of_disks(vec![disk], flash, backing)
    }

    /// Sets up several disks with the engine's default limits. The replay gets two flash devices if
    /// any cache has two copies of any data.
    pub fn of_disks(
        disks: Vec<DiskSetup>,
        flash: impl Into<ServiceModel>,
        backing: impl Into<ServiceModel>,
    ) -> Self {
        let doubles = |disk: &DiskSetup| disk.cache.is_some_and(|cache| cache.config.copies != Copies::One);
        let devices = 1 + usize::from(disks.iter().any(doubles));
        let flash = vec![flash.into(); devices];
        Setup { disks, flash, backing: backing.into(), limits: Limits::default() }
    }
}

/// Reason why a set-up is invalid, as a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetupError(pub String);

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SetupError {}

impl Replay {
    /// Creates a replay with idle disks and empty caches. The virtual time does not begin at 0,
    /// because the journals of the caches were written first.
    pub fn new(setup: Setup) -> Result<Self, SetupError> {
        let Setup { disks, flash, backing, limits } = setup;
        let mut engine = Engine::new(limits);
        (1..=LENT).for_each(|buffer| engine.lend(BufferId(buffer), LENT_BYTES));
        let mut flash_at = vec![0; flash.len()];
        let mut replay = Replay {
            engine,
            disks,
            flash,
            backing,
            queue: Queue::default(),
            now: Instant(0),
            in_flight: Vec::new(),
            free: Vec::new(),
            run: Run::default(),
            done: None,
            watched: None,
            samples: Vec::new(),
        };
        for index in 0..replay.disks.len() {
            replay.add_disk(index, &mut flash_at)?;
        }
        Ok(replay)
    }

    fn add_disk(&mut self, index: usize, flash_at: &mut [u64]) -> Result<(), SetupError> {
        let DiskSetup { size_bytes, backing_offset, cache } = self.disks[index];
        let end = backing_offset.checked_add(size_bytes);
        if end.is_none_or(|end| end > self.backing.capacity_bytes()) {
            return Err(SetupError(format!("disk {index} reaches beyond its backing's end")));
        }
        if !size_bytes.is_multiple_of(512) {
            return Err(SetupError(format!("disk {index}: {size_bytes} bytes are not a multiple of 512")));
        }
        let config = DiskConfig { size_bytes, access: command::Access::ReadWrite, datastore: DatastoreId(0) };
        self.set_up(index, Command::AddDisk(config))?;
        let Some(cache) = cache else { return Ok(()) };
        let devices = 1 + usize::from(cache.config.copies != Copies::One);
        if flash_at.len() < devices {
            return Err(SetupError(format!("disk {index}: its cache needs {devices} flash devices")));
        }
        let enable = enable(cache, index, flash_at);
        self.set_up(index, Command::Cache(CacheChange::Enable(Box::new(enable))))
    }

    fn set_up(&mut self, index: usize, command: Command) -> Result<(), SetupError> {
        self.command(index as u32, command).map_err(|why| {
            let cache = self.disks[index].cache;
            SetupError(format!("disk {index} cannot be set up ({why:?}) with {cache:?}"))
        })
    }
}

/// Allocates segments for a cache. `flash_at` is the first free byte of each device.
fn enable(cache: CacheSetup, index: usize, flash_at: &mut [u64]) -> Enable {
    let CacheSetup { bytes, config, journal } = cache;
    let CacheConfig { block_bytes, segment_bytes, .. } = config;
    let mut segment = |device: usize| {
        let offset = flash_at[device];
        flash_at[device] += segment_bytes;
        Segment { device: DeviceId(device as u16), offset }
    };
    let devices = if config.copies == Copies::One { 1 } else { 2 };
    let count = bytes.checked_div(segment_bytes).unwrap_or(0);
    let all = 0..count as u32;
    let segments: Vec<DataSegment> = all
        .map(|ordinal| DataSegment {
            place: segment(ordinal as usize % devices),
            ordinal,
            seconds_only: false,
        })
        .collect();
    // An invalid cache gets no journal ring; the engine reports the reason.
    let sized = block_bytes.is_power_of_two()
        && (BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&u64::from(block_bytes))
        && segment_bytes >= u64::from(block_bytes);
    let journal = (journal && sized && count > 0).then(|| {
        let pages = journal::ring_pages_min(bytes / u64::from(block_bytes), block_bytes, segment_bytes);
        let ring = pages.div_ceil(segment_bytes / journal::PAGE_BYTES as u64);
        let copies = (0..devices).map(|device| (0..ring).map(|_| segment(device)).collect()).collect();
        let mut cache = [0; 16];
        cache[..8].copy_from_slice(&(index as u64).to_le_bytes());
        NewRing { cache, number: 1, identity: [0; 32], copies }
    });
    Enable { config, segments, journal, recovered: None }
}
