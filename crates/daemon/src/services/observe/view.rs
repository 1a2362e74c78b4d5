//! API views of pools and disks. The functions here send no request to a shard or a device.

use std::collections::BTreeMap;

use hob_control::{
    Admission, Cache, CacheState, Device, DeviceState, Dirty, Disk, DiskChanged, DiskState as DiskLife,
    IoMode, Pool, Size, Version,
};
use hob_engine::command::Copies;

use super::Observe;
use crate::api_error::Result;
use crate::cache_settings::preset_of;
use crate::services::registry::{DRAINING, MIGRATING, REPARTITIONING, SHRINKING};
use crate::services::registry::{DeviceEntry, DiskEntry, DiskPhase, Inner, PoolEntry};
use crate::state::CacheSpec;
use crate::stripe;

impl Observe {
    pub(crate) fn disks(&self) -> Vec<Disk> {
        let inner = self.registry.inner();
        let mut disks = inner.disk_views();
        drop(inner);
        disks.iter_mut().for_each(|disk| self.add_detail(disk));
        disks
    }

    pub(crate) fn disk(&self, name: &str) -> Result<Disk> {
        let mut disk = {
            let inner = self.registry.inner();
            inner.disk(name)?.view(&inner)
        };
        self.add_detail(&mut disk);
        Ok(disk)
    }

    pub(in crate::services) fn disk_changed(&self, name: &str, notes: Vec<String>) -> Result<DiskChanged> {
        Ok(DiskChanged { disk: Some(self.disk(name)?), notes })
    }

    /// Returns the daemon's version.
    pub(crate) fn version(&self) -> Version {
        Version {
            name: "hob".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            api: "v1".to_owned(),
            pid: std::process::id(),
            shards: self.registry.shards.len(),
        }
    }

    pub(crate) fn pools(&self) -> Vec<Pool> {
        let mut pools: Vec<Pool> = {
            let inner = self.registry.inner();
            inner.pools.iter().map(|(name, pool)| pool.view(name, &inner)).collect()
        };
        pools.iter_mut().for_each(|pool| pool.swap = self.swap.rooms(&pool.name));
        pools
    }

    pub(crate) fn pool(&self, name: &str) -> Result<Pool> {
        let pool = {
            let inner = self.registry.inner();
            inner.pool(name)?.view(name, &inner)
        };
        Ok(Pool { swap: self.swap.rooms(name), ..pool })
    }
}

impl PoolEntry {
    /// Returns the API view of the pool, without its swap areas.
    pub(in crate::services) fn view(&self, name: &str, inner: &Inner) -> Pool {
        Pool {
            name: name.to_owned(),
            segment_size: Size(self.segment_bytes),
            size: Size(self.segments() * self.segment_bytes),
            free: Size(self.free_segments() * self.segment_bytes),
            devices: self.devices.iter().map(|device| device.view(self.segment_bytes)).collect(),
            caches: inner.users_of(name),
            shared: inner.shared_capacity(name, self),
            flash_writes: Some(self.flash_writes.usage(self.local_bytes())),
            orphans: self.orphan_views(inner),
            swap: Vec::new(),
        }
    }
}

impl DeviceEntry {
    fn view(&self, segment_bytes: u64) -> Device {
        Device {
            path: self.path.to_string_lossy().into_owned(),
            state: self.state,
            reason: self.reason.clone(),
            peer: self.peer.as_ref().map(|peer| peer.host.clone()),
            admission: if self.gives_segments() { Admission::In } else { Admission::Out },
            size: Size(self.segments * segment_bytes),
            free: Size(self.free_segments * segment_bytes),
            io: match self.access {
                "direct" => Some(IoMode::Direct),
                "buffered" => Some(IoMode::Buffered),
                "memory" => Some(IoMode::Memory),
                "remote" => Some(IoMode::Remote),
                _ => None,
            },
            stalls: self.stalls.count,
        }
    }
}

impl Inner {
    /// Returns the views of all disks in the order of their names. One pass over the disks finds
    /// the clones of all parents.
    pub(in crate::services) fn disk_views(&self) -> Vec<Disk> {
        let mut clones: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for disk in self.disks.values() {
            if let Some(parent) = disk.wanted_parent() {
                clones.entry(parent).or_default().push(disk.wanted.name.clone());
            }
        }
        let view = |disk: &DiskEntry| {
            let clones = clones.remove(disk.wanted.name.as_str()).unwrap_or_default();
            Disk { clones, ..disk.view_without_clones(self) }
        };
        self.disks.values().map(view).collect()
    }

    /// Returns the path of a flash device of the disk's cache that does not answer; `None` if none
    /// hangs.
    pub(in crate::services) fn silent_flash(&self, disk: &str) -> Option<String> {
        let device = self.disk(disk).ok()?.stalled_device(self)?;
        Some(device.path.display().to_string())
    }
}

impl DiskEntry {
    pub(in crate::services) fn view(&self, inner: &Inner) -> Disk {
        Disk { clones: inner.clones_of(&self.wanted.name), ..self.view_without_clones(inner) }
    }

    /// Returns the view with an empty list of clones. The list takes time in proportion to the
    /// number of all disks.
    pub(in crate::services) fn view_without_clones(&self, inner: &Inner) -> Disk {
        let (state, reason) = match &self.phase {
            DiskPhase::Online(_) => (DiskLife::Online, None),
            DiskPhase::Offline(reason) => (DiskLife::Offline, Some(reason.clone())),
            DiskPhase::Away(why) => (DiskLife::Away, Some(why.clone())),
            DiskPhase::Removing => (DiskLife::Removing, None),
        };
        let cache = self.cache().map(|spec| {
            let segment_bytes = inner.pools.get(&spec.pool).map_or(0, |pool| pool.segment_bytes);
            let state = self.cache_state(inner);
            let offline = || "the disk is offline".to_owned();
            Cache {
                pool: spec.pool.clone(),
                state,
                reason: if matches!(self.phase, DiskPhase::Online(_)) {
                    let stalled = || self.silent_device(inner);
                    let copies = || self.one_copy(spec).or_else(|| self.on_one_device(spec));
                    self.cache_reason.clone().or_else(stalled).or_else(copies).or_else(|| self.quality.low())
                } else {
                    Some(offline())
                },
                size: spec.size,
                shared: self.shared_cache(segment_bytes),
                room: Size(self.held.len() as u64 * segment_bytes),
                journal: Size(self.ring.len() as u64 * segment_bytes),
                preset: preset_of(spec).map(str::to_owned),
                block_size: spec.block_size,
                policy: spec.policy.clone(),
                mode: spec.mode.to_string(),
                mode_in_effect: self.mode_in_effect(),
                persistent: spec.journal.is_some(),
                layout: spec.layout.to_string(),
                admission: spec.admission.to_string(),
                fill: spec.fill.to_string(),
                destage_order: spec.destage.order.to_string(),
                dirty_start: spec.destage.dirty_start,
                dirty_stop: spec.destage.dirty_stop,
                dirty_full: spec.destage.dirty_full,
                dirty_age_max: spec.destage.dirty_age_max,
                copies: spec.copies.to_string(),
                ordered: spec.destage.ordered,
                verify: spec.verify.to_string(),
                ram: spec.ram,
                dirty: self.dirty_view(inner),
                verification: self.verification(),
                flash_writes: inner.pools.get(&spec.pool).and_then(|pool| pool.flash_writes.part_of(self.id)),
            }
        });
        Disk {
            name: self.wanted.name.clone(),
            state,
            reason,
            backing: self.wanted.backing.clone(),
            backing_state: self.backing_state(),
            format: self.wanted.format_name(),
            backing_timeout: self.wanted.backing_timeout,
            backing_timeout_in_effect: Some(inner.backing_timeout_in_effect(self.wanted.backing_timeout)),
            backing_timeout_reason: self.wanted.backing_timeout_reason().map(str::to_owned),
            stripe: self.wanted.stripe,
            stripe_in_effect: match &self.measure {
                Some(measure) => stripe::in_effect(self.wanted.stripe, &measure.info),
                None => self.wanted.stripe,
            },
            size: Size(self.size_bytes),
            read_only: self.wanted.read_only,
            unlocked: self.wanted.unlocked,
            vhost_user: self.wanted.vhost_user.clone(),
            cache,
            exports: self.wanted.exports.clone(),
            fuse: self.wanted.fuse.clone(),
            fuse_reason: self.files_reason().or_else(|| self.displaced_files()),
            device: self.device_path(),
            device_reason: self.device_reason(),
            recording: self.recording.read(),
            migration: None,
            parent: self.parent_view().0,
            parent_reason: self.parent_view().1,
            clones: Vec::new(),
        }
    }

    fn on_one_device(&self, spec: &CacheSpec) -> Option<String> {
        self.surplus().map(|_| {
            format!(
                "too little of the cache is on a second device, so most writes go to the backing; \
                hob moves a part of the cache when pool {} has space on another device",
                spec.pool
            )
        })
    }

    fn one_copy(&self, spec: &CacheSpec) -> Option<String> {
        let waits_for_peer = spec.copies == Copies::Peer && self.has_cache && self.apart.is_empty();
        if waits_for_peer {
            return Some(format!(
                "no peer lends flash to pool {} now: writes go to the backing, and dirty data has one copy",
                spec.pool
            ));
        }
        self.lacks_copies().then(|| {
            format!("dirty data has one copy until pool {} has a second device with space", spec.pool)
        })
    }

    /// Returns the amount of dirty data, and the reason why it stays dirty.
    fn dirty_view(&self, inner: &Inner) -> Option<Dirty> {
        let mut dirty = self.dirty()?;
        if dirty.draining
            && dirty.size > Size(0)
            && let Some(device) = self.stalled_device(inner)
        {
            dirty.why = Some(format!("{} does not answer", device.path.display()));
        }
        Some(dirty)
    }

    /// Returns a device of the cache or of its journal that hangs; `None` if none does.
    fn stalled_device<'a>(&self, inner: &'a Inner) -> Option<&'a DeviceEntry> {
        let all = || self.held.iter().chain(&self.apart).chain(&self.ring);
        let on_it = |id| all().any(|segment| segment.device == id);
        inner.pools.values().flat_map(|pool| &pool.devices).find(|device| {
            device.state == DeviceState::Stalled && device.ids.is_some_and(|ids| on_it(ids.on_shards))
        })
    }

    /// Describes the effect of a hung device on the disk.
    fn silent_device(&self, inner: &Inner) -> Option<String> {
        let device = self.stalled_device(inner)?;
        let path = device.path.display();
        if self.cache().is_none_or(|spec| spec.journal.is_none()) {
            return Some(format!("{path} does not answer, and requests go to the backing"));
        }
        let has_journal =
            device.ids.is_some_and(|ids| self.ring.iter().any(|segment| segment.device == ids.on_shards));
        Some(match has_journal {
            true => format!(
                "{path} does not answer: reads of dirty data that only this device has wait for it, \
                and so do flushes if the device has data that is not durable yet; writes, discards and \
                zeroes may wait too, because the journal of the cache is on this device; all other \
                requests go to the backing"
            ),
            false => format!(
                "{path} does not answer: reads of dirty data that only this device has wait for it, \
                and so do flushes and changes if the device has data that is not durable yet; all \
                other requests go to the backing"
            ),
        })
    }

    /// Returns the state of the cache, without asking its shard.
    fn cache_state(&self, inner: &Inner) -> CacheState {
        if !matches!(self.phase, DiskPhase::Online(_)) {
            CacheState::None
        } else if self.recovering.is_some() {
            CacheState::Recovering
        } else if !self.watch.has_pending_drain()
            && self.busy.is_some_and(|busy| ![DRAINING, SHRINKING, MIGRATING, REPARTITIONING].contains(&busy))
        {
            // The cache serves requests during the drain before a change.
            CacheState::Changing
        } else if !self.has_cache {
            CacheState::None
        } else if !self.holds_any() {
            CacheState::Fenced
        } else if self.stalled_device(inner).is_some() {
            CacheState::Stalled
        } else {
            CacheState::Active
        }
    }
}
