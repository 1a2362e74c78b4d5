//! What the engine keeps of one disk.

use std::collections::VecDeque;

use crate::cache::Cache;
use crate::command::{CacheChange, DiskConfig};
use crate::io::Request;
use crate::outcome::Outcome;
use crate::stats::{CacheState, DiskStats};
use crate::units::{CommandId, Instant};

pub(super) struct Disk {
    pub(super) config: DiskConfig,
    pub(super) cache: Option<Cache>,
    /// The cache was lost with its last device.
    pub(super) fenced: bool,
    /// A device of the cache is silent.
    pub(super) stalled: bool,
    /// Changes that wait for flash I/O to end, with the command that asked; none for a fence.
    pub(super) changes: VecDeque<(Option<CommandId>, CacheChange)>,
    /// The command that removes the disk.
    pub(super) removing: Option<CommandId>,
    /// Requests, fills included.
    pub(super) in_flight: u32,
    pub(super) flash_in_flight: u32,
    pub(super) stats: DiskStats,
    pub(super) stats_since: Instant,
}

impl Disk {
    pub(super) fn new(config: DiskConfig, now: Instant) -> Self {
        Disk {
            config,
            cache: None,
            fenced: false,
            stalled: false,
            changes: VecDeque::new(),
            removing: None,
            in_flight: 0,
            flash_in_flight: 0,
            stats: DiskStats::new(),
            stats_since: now,
        }
    }

    /// The cache, if flash I/O may be started now; else why not.
    #[inline]
    pub(super) fn serving(&mut self) -> Result<&mut Cache, Outcome> {
        match &mut self.cache {
            _ if !self.changes.is_empty() => Err(Outcome::BypassChanging),
            Some(_) if self.stalled => Err(Outcome::BypassStalled),
            Some(cache) => Ok(cache),
            None if self.fenced => Err(Outcome::BypassFenced),
            None => Err(Outcome::CacheOff),
        }
    }

    /// Counts an answered request.
    pub(super) fn record(&mut self, now: Instant, arrived: Instant, request: &Request, outcome: Outcome) {
        let at = Instant(now - self.stats_since);
        self.stats.record(at, request.op, request.len, outcome, now - arrived);
    }

    /// Counts the blocks that one request evicted.
    pub(super) fn record_eviction(&mut self, now: Instant, blocks: u64) {
        let evictions = &mut self.stats.evictions;
        evictions.operations += 1;
        evictions.blocks += blocks;
        evictions.last_blocks = blocks;
        evictions.last_operation_ns = now - self.stats_since;
    }

    pub(super) fn snapshot(&self, now: Instant) -> DiskStats {
        let mut stats = self.stats.clone();
        stats.elapsed_ns = now - self.stats_since;
        stats.in_flight = u64::from(self.in_flight);
        if let Some(cache) = &self.cache {
            stats.blocks = u64::from(cache.index.frames());
            stats.blocks_cached = cache.index.blocks_holding_data();
            stats.sectors_valid = cache.index.sectors_valid();
            stats.index_bytes = cache.bytes();
        }
        stats.cache = match &self.cache {
            _ if !self.changes.is_empty() => CacheState::Changing,
            Some(_) if self.stalled => CacheState::Stalled,
            Some(_) => CacheState::Active,
            None if self.fenced => CacheState::Fenced,
            None => CacheState::None,
        };
        stats
    }
}
