//! Disks of hob.toml that the state file does not have yet.

use std::collections::BTreeMap;

use hob_storage::backing::Format;

use super::Startup;
use crate::cache_settings::new_spec;
use crate::config::DiskEntry;
use crate::state::{DiskState, ImageSpec, ShareSpec};
use crate::stripe;

impl Startup {
    /// Returns the state of a new disk from hob.toml, with its cache.
    pub(super) fn first_state(&self, disk: &DiskEntry) -> DiskState {
        let name = &disk.name;
        let share_parent = disk.share_parent.then_some(ShareSpec { cache: disk.parent_cache, disk: None });
        let spec = disk.cache.clone().and_then(|cache| {
            let context = self.registry.inner().context(&cache.pool);
            let spec = context.and_then(|context| new_spec(cache.pool, cache.size, &cache.settings, context));
            let spec = spec.and_then(|(spec, notes)| {
                self.registry.inner().check_memory(name, &spec)?;
                Ok((spec, notes))
            });
            match spec {
                Ok((spec, notes)) => {
                    notes.iter().for_each(|note| tracing::info!("{name}: {note}"));
                    Some(spec)
                }
                Err(error) => {
                    tracing::error!("disk {name} of hob.toml: cannot create its cache: {error}");
                    self.registry.inner().caches_refused.insert(name.clone(), error.to_string());
                    None
                }
            }
        });
        let qos = disk.qos.as_ref().and_then(|qos| match self.qos.first_of(qos) {
            Ok(qos) => Some(qos),
            Err(error) => {
                tracing::error!("disk {name} of hob.toml: using default shares, because its QoS settings are invalid: {error}");
                None
            }
        });
        // The file was checked already.
        let format = disk.format.as_deref().and_then(Format::from_name);
        DiskState {
            share_parent,
            image: Some(ImageSpec::of(format)),
            cache: spec,
            backing_timeout: disk.backing_timeout,
            stripe: stripe::chosen(disk.stripe).unwrap_or_default(),
            datastore: disk.datastore.clone(),
            exports: disk.exports.clone(),
            qos,
            fuse: disk.fuse.clone(),
            device: disk.device,
            vhost_user: disk.vhost_user.clone(),
            ..DiskState::new(name.clone(), disk.backing.clone(), disk.read_only)
        }
    }
}

/// Resolves name conflicts between disks and exports. Names given by command take precedence over
/// hob.toml, disk names over export names, and earlier entries over new ones. Conflicting entries
/// are left out; all other entries are served.
pub(in super::super) fn told_apart(kept: Vec<DiskState>, new: Vec<DiskState>) -> Vec<DiskState> {
    let own = |disk: &DiskState| (disk.name.clone(), disk.name.clone());
    let mut owners: BTreeMap<String, String> = kept.iter().map(own).collect();
    let mut disks: Vec<DiskState> = kept.into_iter().chain(new).collect();
    disks.retain_mut(|DiskState { name, exports, .. }| {
        let owner = owners.entry(name.clone()).or_insert_with(|| name.clone());
        if owner != name {
            tracing::error!(
                "disk {name} of hob.toml is not served, because disk {owner} has an export '{name}'; rename \
                the disk, or run 'hob export remove {owner} {name}' and start the daemon again"
            );
            return false;
        }
        exports.retain(|export| {
            let of = &export.name;
            let owner = owners.entry(of.clone()).or_insert_with(|| name.clone());
            if owner != name {
                tracing::error!(
                    "{name} is served without its export '{of}', because disk {owner} has that \
                    name; add an export with another name by 'hob export add'"
                );
            }
            owner == name
        });
        true
    });
    disks
}
