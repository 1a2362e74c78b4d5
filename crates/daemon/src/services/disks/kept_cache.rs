//! Puts a recovered cache into service, and frees the segments on flash that the cache does not use
//! any more.

use std::sync::Mutex;

use hob_engine::command::{CacheChange, CacheConfig, DataSegment, Enable, NewRing, Segment};
use hob_engine::journal::Recovered;
use hob_storage::pool::OwnerId;

use super::Disks;
use super::recovery_memory::Reservation;
use crate::cache_settings::engine_config;
use crate::services::pools::{Restructure, no_cache, places};
use crate::state::CacheSpec;

/// A recovered cache that passed all checks.
pub(super) struct Kept {
    pub(super) recovered: Box<Recovered>,
    /// Highest number of a journal ring of the cache when the recovery started.
    pub(super) upto: u32,
    /// Data segments of the cache with the shards' device ids, in the order of the frame numbers.
    pub(super) data: Vec<DataSegment>,
    /// The same data segments with the pool's device ids.
    pub(super) in_pool: Vec<DataSegment>,
    /// The reserved memory for the recovery and for the index of the cache.
    pub(super) memory: Reservation,
}

impl Disks {
    /// Gives the recovered cache to its disk, which is already on a shard. The caller holds the
    /// operation guard of the disk.
    pub(super) async fn enable_kept(&self, name: &str, kept: Kept) -> Result<(), Restructure> {
        let Kept { recovered, upto, data, in_pool: _, memory } = kept;
        let (was_block_bytes, ring) = (recovered.summary.block_bytes, recovered.summary.ring);
        let is_verified = recovered.sectors_unverified() == 0;
        let known = self.registry.inner().disk(name)?.cache().and_then(|spec| spec.journal);
        let (spec, config, flash) = {
            let mut inner = self.registry.inner();
            let (segment_bytes, flash) = {
                let spec = inner.disk(name)?.cache().ok_or_else(|| no_cache(name))?;
                let pool = inner.pool(&spec.pool)?;
                (pool.segment_bytes, pool.flash.clone())
            };
            let disk = inner.disk_mut(name)?;
            let Some(spec) = disk.wanted.cache.as_mut() else { return Ok(()) };
            if let Some(journal) = &mut spec.journal {
                // The backing changes from now on, so the recorded state of the closed cache is not
                // valid any more. The state is saved together with the number of the new ring.
                journal.closed = None;
                // The number of an unfinished ring, which is freed, must not be used again.
                journal.ring = journal.ring.max(upto);
                if !is_verified {
                    journal.evidence = None;
                }
            }
            (spec.clone(), engine_config(spec, segment_bytes)?, flash)
        };
        // Only one cache of a pool makes its new ring at a time, so that free space for one ring is
        // enough.
        let _turn = self.pools.turn(&spec.pool).await;
        // A start that was interrupted left an unfinished ring. The pool may have no space for
        // another one.
        if let Some(journal) = spec.journal {
            flash.free_rings_besides(OwnerId(journal.owner.0), ring).await?;
        }
        // The cache starts with the settings that it had when its journal was written. Settings
        // that were changed later are applied afterwards.
        let as_it_was = CacheConfig { block_bytes: was_block_bytes, ..config };
        let (segments, recovered) = (data.clone(), Mutex::new(Some(*recovered)));
        let enable = |ring: &Option<NewRing>| {
            CacheChange::Enable(Box::new(Enable {
                config: as_it_was,
                segments: segments.clone(),
                journal: ring.clone(),
                recovered: recovered.lock().ok().and_then(|mut recovered| recovered.take()),
            }))
        };
        let enabled = self.pools.restructure(name, data.len() as u64, enable).await;
        if let (Err(Restructure::Refused(_)), Some(known)) = (&enabled, known) {
            // The shard was not asked, so the backing is still in the recorded state.
            if let Some(spec) = self.registry.inner().disk_mut(name)?.wanted.cache.as_mut() {
                let journals = spec.journal.iter_mut();
                journals.for_each(|it| (it.closed, it.evidence) = (known.closed, known.evidence));
            }
            self.registry.save_first().await?;
        }
        enabled?;
        memory.keep_index();
        {
            let mut inner = self.registry.inner();
            let disk = inner.disk_mut(name)?;
            let (apart, here): (Vec<DataSegment>, Vec<DataSegment>) =
                data.iter().copied().partition(|segment| segment.seconds_only);
            (disk.held, disk.apart) = (places(&here), places(&apart));
            disk.has_cache = true;
            disk.retry_after = None;
            inner.set_shared_size(name, here.len() as u64);
        }
        self.release_leftovers(name, &spec).await;
        if as_it_was.block_bytes != config.block_bytes {
            self.pools.configure(name).await?;
        }
        Ok(())
    }

    /// Frees unused segments of a cache: old rings, and leftovers of changes that a crash
    /// interrupted.
    async fn release_leftovers(&self, name: &str, spec: &CacheSpec) {
        let Some(journal) = spec.journal else { return };
        let Ok(flash) = self.registry.inner().pool(&spec.pool).map(|entry| entry.flash.clone()) else {
            return;
        };
        let leftovers = match flash.segments_of(OwnerId(journal.owner.0)).await {
            Ok(all) => {
                let inner = self.registry.inner();
                let (Ok(entry), Ok(disk)) = (inner.pool(&spec.pool), inner.disk(name)) else { return };
                let is_used = |segment: &Segment| {
                    [&disk.held, &disk.apart, &disk.ring].iter().any(|list| list.contains(segment))
                };
                all.into_iter()
                    .filter_map(|segment| entry.on_shards(segment))
                    .filter(|s| !is_used(s))
                    .collect::<Vec<_>>()
            }
            Err(error) => return tracing::warn!("pool {}: {error}", spec.pool),
        };
        self.registry.give_back(&spec.pool, &leftovers).await;
    }
}
