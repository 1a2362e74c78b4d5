//! Validation of the settings that the source sends for a migrating disk, and their conversion into
//! this host's configuration.

use std::sync::Arc;

use hob_control::{Arrival, ArrivingCache, check_name};
use hob_engine::command::Mode;
use hob_engine::granularity::Fill;
use hob_engine::migration::{Record, Session};
use hob_storage::backing::Format;

use super::super::disks::image_asked;
use super::super::disks::{BACKING_CHARS_MAX, no_backing};
use super::super::registry::{DiskEntry, DiskPhase, Inner, MIGRATING};
use super::Migrations;
use crate::api_error::{ApiError, Result, conflict, invalid};
use crate::cache_settings::new_spec;
use crate::state::{
    CacheSpec, DiskQosSpec, DiskState, FormatName, ImageSpec, MigrationSpec, RecordSpec, check_qos,
};
use crate::stripe;
use crate::vhost_user::check_path;

/// Maximum length of another host's name, in characters.
const HOST_CHARS_MAX: usize = 256;

impl Migrations {
    /// Creates or updates the entry of an incoming disk, in memory only.
    pub(super) fn enter_awaited(
        self: &Arc<Self>,
        name: &str,
        lineage: &str,
        session: Session,
        arrival: &Arrival,
    ) -> Result<()> {
        let mut wanted = self.awaited_state(name, arrival)?;
        let mode_due = wanted.cache.as_mut().filter(|spec| spec.mode != Mode::WriteThrough).map(|spec| {
            let due = spec.mode.to_string();
            spec.mode = Mode::WriteThrough;
            due
        });
        wanted.migration = Some(MigrationSpec {
            lineage: lineage.to_owned(),
            record: RecordSpec::of(Record::Awaiting(session)).expect("kept with the disk"),
            peer: arrival.from.clone(),
            cache: arrival.mode,
            mode_due,
            plan: None,
        });
        let waited = match self.waits_for_cluster(name) {
            true => self.registry.inner().disk(name).ok().map(|disk| disk.wanted.clone()),
            false => None,
        };
        self.registry.inner().gone.retain(|gone| gone.name != name);
        self.registry.inner().waited.extend(waited.map(|waited| (name.to_owned(), waited)));
        if self.registry.inner().disk(name).is_err() {
            self.disks.enter(wanted.clone(), None)?;
        }
        let mut inner = self.registry.inner();
        let disk = inner.disk_mut(name)?;
        // An earlier cache keeps the owner id of its segments, so that they are found.
        if let (Some(known), Some(new)) = (disk.cache().cloned(), wanted.cache.as_mut())
            && known.pool == new.pool
            && known.journal.is_some()
            && new.journal.is_some()
        {
            new.journal = known.journal;
        }
        if matches!(disk.phase, DiskPhase::Online(_)) && !is_alike(&disk.wanted, &wanted) {
            return Err(conflict!(
                "{name} is already migrating to this host, as another disk or with another cache; cancel \
                 that migration first"
            ));
        }
        wanted.keep_what_stayed(&disk.wanted);
        disk.wanted = wanted;
        disk.busy = Some(MIGRATING);
        if matches!(disk.phase, DiskPhase::Offline(_)) {
            disk.phase = DiskPhase::Away("the disk has not arrived yet".to_owned());
        }
        Ok(())
    }

    /// Returns this host's configuration for an incoming disk.
    pub(in super::super) fn awaited_state(&self, name: &str, arrival: &Arrival) -> Result<DiskState> {
        check_name(name).map_err(|error| invalid!("'{name}' cannot be a disk's name: {error}"))?;
        if arrival.backing.is_empty() || arrival.backing.len() > BACKING_CHARS_MAX {
            return Err(no_backing(&arrival.backing));
        }
        if arrival.from.len() > HOST_CHARS_MAX || arrival.from.chars().any(char::is_control) {
            return Err(ApiError::invalid("the name of the other host is not valid"));
        }
        if let Some(datastore) = &arrival.datastore {
            check_name(datastore)
                .map_err(|error| invalid!("'{datastore}' cannot be a datastore's name: {error}"))?;
        }
        arrival.qos.as_ref().map_or(Ok(()), check_qos).map_err(ApiError::invalid)?;
        self.ownership.check_cluster(arrival.cluster.as_deref())?;
        let inner = self.registry.inner();
        let is_same = |disk: &&DiskEntry| disk.wanted.name == name;
        let others = || inner.disks.values().filter(|disk| !is_same(disk));
        let mut files = others().flat_map(|disk| disk.wanted.files());
        if let Some(path) = &arrival.fuse
            && let Some((export, _)) = files.find(|(_, known)| known == path)
        {
            return Err(conflict!("{path} is the file of {export}"));
        }
        if let Some(path) = &arrival.vhost_user {
            check_path(path).map_err(ApiError::invalid)?;
        }
        for export in &arrival.exports {
            check_name(&export.name)
                .map_err(|error| invalid!("'{}' cannot be an export's name: {error}", export.name))?;
        }
        for named in std::iter::once(name).chain(arrival.exports.iter().map(|export| export.name.as_str())) {
            let has_it = |disk: &DiskEntry| {
                disk.wanted.name == named || disk.wanted.exports.iter().any(|export| export.name == named)
            };
            if let Some(disk) = others().find(|disk| has_it(disk)) {
                return Err(conflict!("disk {} has an export '{named}' already", disk.wanted.name));
            }
        }
        let cache = arrival.cache.as_ref().map(|cache| inner.awaited_cache(name, cache)).transpose()?;
        let format = match &arrival.format {
            Some(name) => image_asked(&arrival.backing, Some(name))?.format,
            // The name on the source host decides, because the guest may have written the content.
            None => Some(FormatName(Format::assumed(std::path::Path::new(&arrival.backing)))),
        };
        Ok(DiskState {
            image: Some(ImageSpec { format, files: None }),
            cache,
            backing_timeout: arrival.backing_timeout,
            stripe: stripe::chosen(arrival.stripe).map_err(ApiError::invalid)?,
            datastore: arrival.datastore.clone(),
            qos: arrival.qos.map(|own| DiskQosSpec { policy: None, own }),
            exports: arrival.exports.iter().map(hob_control::Export::elsewhere).collect(),
            fuse: arrival.fuse.clone(),
            vhost_user: arrival.vhost_user.clone(),
            flush_failures_owed: arrival.flush_failures_owed,
            is_new: false,
            ..DiskState::new(name.to_owned(), arrival.backing.clone(), arrival.read_only)
        })
    }
}

impl DiskState {
    /// Keeps the settings of `known`, the disk's earlier configuration on this host, that do not
    /// migrate. The disk's bitmaps did not record writes on other hosts, so they mark the whole
    /// disk as changed.
    fn keep_what_stayed(&mut self, known: &DiskState) {
        (self.share_parent, self.bitmaps) = (known.share_parent.clone(), known.bitmaps.clone());
        for spec in self.bitmaps.iter_mut().filter(|spec| !spec.frozen) {
            spec.everything.get_or_insert_with(|| "another host owned the disk".to_owned());
        }
    }
}

/// Returns true if a disk that is open with one configuration can be served with the other without
/// opening it again.
fn is_alike(one: &DiskState, other: &DiskState) -> bool {
    let part = |disk: &DiskState| {
        let cache = disk.cache.as_ref();
        let cache = cache.map(|spec| {
            let size = Some(spec.size).filter(|_| spec.shared.is_none());
            (spec.pool.clone(), size, spec.block_size, spec.policy.clone(), spec.journal.is_some())
        });
        let format = disk.image.as_ref().and_then(|image| image.format);
        let sockets = (disk.vhost_user.clone(), disk.fuse.clone());
        (disk.backing.clone(), format, disk.read_only, disk.stripe, sockets, cache)
    };
    part(one) == part(other)
}

impl Inner {
    fn awaited_cache(&self, name: &str, cache: &ArrivingCache) -> Result<CacheSpec> {
        let pool = match &cache.pool {
            Some(pool) => pool.clone(),
            None if self.pools.contains_key(&cache.like_pool) => cache.like_pool.clone(),
            None => {
                let mut pools = self.pools.keys();
                match (pools.next(), pools.next()) {
                    (Some(only), None) => only.clone(),
                    (None, _) => {
                        return Err(ApiError::conflict("this host has no pool for the disk's cache")
                            .hint("create a pool with 'hob pool create'"));
                    }
                    _ => {
                        return Err(conflict!(
                            "this host has no pool '{}' but several others; choose a pool",
                            cache.like_pool
                        ));
                    }
                }
            }
        };
        // A sender omits the fill granularity `sectors`, which older versions of hob do not know.
        let mut settings = cache.settings.0.clone();
        settings.fill.get_or_insert_with(|| Fill::Sectors.to_string());
        let settings = &settings;
        let size = Some(cache.size).filter(|_| settings.shared != Some(true));
        let (spec, _) = new_spec(pool.clone(), size, settings, self.context(&pool)?)?;
        self.check_memory(name, &spec)?;
        Ok(spec)
    }
}
