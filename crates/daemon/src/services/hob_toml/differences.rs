//! Differences between hob.toml and the running configuration.

use std::collections::{BTreeMap, BTreeSet};

use hob_control::{
    BackingTimeoutChange, CachePatch, CacheSettings, ConfigDifference, ConfigRemedy, DatastorePatch,
    DeviceAdd, DiskPatch, Qos, QosPatch, Size,
};
use hob_storage::pool::SEGMENT_BYTES_DEFAULT;

use super::super::qos::QosService;
use super::super::registry::{DiskEntry as Served, Inner, Registry};
use super::changes::Change;
use crate::cache_settings::new_spec;
use crate::config::{Config, DiskEntry};
use crate::state::{CacheSpec, DatastoreState, patched_qos};

/// A difference, and the change that resolves the difference, if one exists.
pub(super) struct Found {
    pub(super) difference: ConfigDifference,
    pub(super) change: Option<Change>,
}

/// Returns the differences in an order in which they can be resolved: dependencies first,
/// dependent objects last when removing.
///
/// `running` is the file at the daemon's start, `config` the present one, and `before` has the
/// definitions at the last reload.
pub(super) fn differences(
    registry: &Registry,
    qos: &QosService,
    running: &Config,
    config: &Config,
    before: &BTreeMap<String, String>,
) -> Vec<Found> {
    let policies = policy_differences(qos, config);
    let named: BTreeSet<String> = qos.policies().into_iter().map(|policy| policy.name).collect();
    let inner = registry.inner();
    let mut found = Vec::new();
    for (key, _) in config.daemon_settings().iter().zip(running.daemon_settings()).filter(|(a, b)| *a != b) {
        found.push(Found {
            difference: ConfigDifference {
                subject: "daemon".to_owned(),
                key: key.0.to_owned(),
                file: Some("changed".to_owned()),
                running: None,
                by: ConfigRemedy::Reload,
                action: "'systemctl reload hob' applies the change".to_owned(),
            },
            change: None,
        });
    }
    inner.pool_differences(config, &mut found);
    found.extend(policies);
    for disk in &config.disks {
        match inner.disks.get(&disk.name) {
            None => {
                found.push(added("disk", &disk.name, &disk.backing, Change::AddDisk(Box::new(disk.clone()))))
            }
            Some(served) => inner.disk_differences(disk, served, &mut found),
        }
    }
    inner.deleted(config, before, &named, &mut found);
    found
}

impl Inner {
    pub(super) fn is_served(&self, subject: &str, policies: &BTreeSet<String>) -> bool {
        match subject.split_once(' ') {
            Some(("disk", name)) => self.disks.contains_key(name),
            Some(("pool", name)) => self.pools.contains_key(name),
            Some(("storage-policy", name)) => policies.contains(name),
            _ => false,
        }
    }

    fn pool_differences(&self, config: &Config, found: &mut Vec<Found>) {
        for pool in &config.pools {
            let name = &pool.name;
            let Some(entry) = self.pools.get(name) else {
                found.push(added("pool", name, &pool.devices.join(", "), Change::CreatePool(pool.clone())));
                continue;
            };
            let subject = format!("pool {name}");
            let segment = pool.segment_size.map_or(SEGMENT_BYTES_DEFAULT, Size::bytes);
            if segment != entry.segment_bytes {
                let action = "the segment size of a pool cannot change; remove the pool and create it \
                 again";
                found.push(by_command(
                    &subject,
                    "segment_size",
                    Size(segment),
                    Size(entry.segment_bytes),
                    action,
                ));
            }
            let has: Vec<String> = entry
                .devices
                .iter()
                .filter(|device| device.peer.is_none())
                .map(|device| device.path.to_string_lossy().into_owned())
                .collect();
            for path in pool.devices.iter().filter(|path| !has.contains(path)) {
                let add = DeviceAdd { path: path.clone(), peer: None, size: pool.size, force: pool.force };
                found.push(one_side(
                    &subject,
                    "devices",
                    Some(path),
                    None,
                    "the device is added",
                    Change::AddDevice(name.clone(), add),
                ));
            }
            for path in has.iter().filter(|path| !pool.devices.contains(path)) {
                let action = "the device is removed; caches on it move to others, or shrink";
                found.push(one_side(
                    &subject,
                    "devices",
                    None,
                    Some(path),
                    action,
                    Change::RemoveDevice(name.clone(), path.clone()),
                ));
            }
        }
    }

    fn disk_differences(&self, disk: &DiskEntry, served: &Served, found: &mut Vec<Found>) {
        let (name, subject) = (&disk.name, format!("disk {}", disk.name));
        let again = format!("stop its guest, 'hob disk remove {name}', then 'hob config apply'");
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".to_owned());
        let recorded = served.wanted.image.as_ref().and_then(|image| image.format);
        let format = recorded.map_or("none", |format| format.0.name()).to_owned();
        let fixed = [
            ("backing", disk.backing.clone(), served.wanted.backing.clone()),
            ("format", disk.format.clone().unwrap_or_else(|| format.clone()), format),
            ("read_only", disk.read_only.to_string(), served.wanted.read_only.to_string()),
            ("vhost_user", text(&disk.vhost_user), text(&served.wanted.vhost_user)),
            ("fuse", text(&disk.fuse), text(&served.wanted.fuse)),
            ("datastore", text(&disk.datastore), text(&served.wanted.datastore)),
            ("share_parent", disk.share_parent.to_string(), served.wanted.share_parent.is_some().to_string()),
        ];
        for (key, file, running) in fixed {
            if file != running {
                found.push(by_command(&subject, key, file, running, &again));
            }
        }
        if let Some(timeout) = disk.backing_timeout
            && served.wanted.backing_timeout != Some(timeout)
        {
            let now = served.wanted.backing_timeout;
            let now = self.backing_timeout_in_effect(now).to_string();
            let change = Some(BackingTimeoutChange::Set(timeout));
            let patch = DiskPatch { backing_timeout: change, ..DiskPatch::default() };
            let change = Change::PatchDisk(name.clone(), patch);
            found.push(apply(
                &subject,
                "backing_timeout",
                timeout.to_string(),
                now,
                "the setting is changed, also for waiting requests",
                change,
            ));
        }
        for export in &disk.exports {
            let now = served.wanted.exports.iter().find(|known| known.name == export.name);
            if now.is_none() {
                let change = Change::AddExport(name.clone(), export.clone());
                found.push(one_side(
                    &subject,
                    "export",
                    Some(&export.name),
                    None,
                    "the export is added",
                    change,
                ));
            } else if now != Some(export) {
                let action = format!("'hob export remove {name} {0}', then 'hob config apply'", export.name);
                found.push(by_command(&subject, "export", json(export), json(&now), &action));
            }
        }
        for export in
            served.wanted.exports.iter().filter(|now| !disk.exports.iter().any(|it| it.name == now.name))
        {
            let change = Change::RemoveExport(name.clone(), export.name.clone());
            let action = "the export is removed, and its clients are disconnected";
            found.push(one_side(&subject, "export", None, Some(&export.name), action, change));
        }
        self.qos_difference(disk, served, found);
        self.cache_differences(disk, served, found);
    }

    fn qos_difference(&self, disk: &DiskEntry, served: &Served, found: &mut Vec<Found>) {
        // If the file omits QoS settings, only commands change them.
        let Some(patch) = &disk.qos else { return };
        let subject = format!("disk {}", disk.name);
        let now = served.wanted.qos.clone().unwrap_or_default();
        let change = match &patch.policy {
            Some(policy) if now.policy.as_ref() == Some(policy) => return,
            Some(_) => patch.clone(),
            None => match patched_qos(Qos::default(), patch) {
                Ok(wanted) if now.policy.is_none() && now.own == wanted => return,
                Ok(wanted) if now.policy.is_none() => whole_patch(wanted),
                Ok(wanted) => QosPatch { policy: Some(String::new()), ..whole_patch(wanted) },
                Err(_) => return,
            },
        };
        let action = "the shares and limits of the disk are set";
        found.push(apply(
            &subject,
            "qos",
            json(patch),
            json(&now),
            action,
            Change::Qos(disk.name.clone(), change),
        ));
    }

    fn cache_differences(&self, disk: &DiskEntry, served: &Served, found: &mut Vec<Found>) {
        let (name, subject) = (disk.name.clone(), format!("disk {}", disk.name));
        let (enable, now) = match (&disk.cache, served.cache()) {
            (None, None) => return,
            (Some(enable), None) => {
                let file = json(enable);
                let change = Change::EnableCache(name, enable.clone());
                return found.push(one_side(
                    &subject,
                    "cache",
                    Some(&file),
                    None,
                    "the cache is enabled",
                    change,
                ));
            }
            (None, Some(now)) => {
                let running = format!("{} of pool {}", now.size, now.pool);
                let action = "the cache is drained and disabled";
                let change = Change::DisableCache(name);
                return found.push(one_side(&subject, "cache", None, Some(&running), action, change));
            }
            (Some(enable), Some(now)) => (enable, now),
        };
        if enable.pool != now.pool {
            let action =
                "the cache is drained, disabled, and enabled in the other pool, where it starts empty";
            let change = Change::MoveCache(name, enable.clone());
            let found_one =
                apply(&subject, "cache.pool", enable.pool.clone(), now.pool.clone(), action, change);
            return found.push(with_yes(found_one));
        }
        let Ok(context) = self.context(&enable.pool) else { return };
        let Ok((wanted, _)) = new_spec(enable.pool.clone(), enable.size, &enable.settings, context) else {
            return;
        };
        for (key, file, running) in settings_of(&wanted)
            .into_iter()
            .zip(settings_of(now))
            .filter_map(|((key, a), (_, b))| (a != b).then_some((key, a, b)))
        {
            let patch = CachePatch {
                size: (key == "size" && wanted.shared.is_none()).then_some(wanted.size),
                settings: if key == "size" && wanted.shared.is_none() {
                    CacheSettings::default()
                } else {
                    whole_settings(&wanted)
                },
            };
            let empties = ["block_size", "layout", "persistent"].contains(&key);
            let shrinks = key == "size" && wanted.shared.is_none() && wanted.size < now.size;
            let action = match key {
                "size" if wanted.shared.is_some() => "the cache shares its pool, and hob chooses its size",
                "size" if shrinks => "the cache shrinks; data that does not fit is dropped",
                "size" => "the cache grows",
                _ if empties => "the cache is drained and starts empty",
                "mode" => "the mode is changed; leaving write-back drains the cache first",
                _ => "the setting is changed while the cache is in use",
            };
            let change = Change::PatchCache(name.clone(), Box::new(patch));
            let one = apply(&subject, &format!("cache.{key}"), file, running, action, change);
            found.push(if empties || shrinks { with_yes(one) } else { one });
        }
    }

    /// Returns deleted entries of the file, which had the definitions `before`, whose objects still exist.
    fn deleted(
        &self,
        config: &Config,
        before: &BTreeMap<String, String>,
        policies: &BTreeSet<String>,
        found: &mut Vec<Found>,
    ) {
        let now: BTreeSet<String> = definitions_of(config).into_keys().collect();
        let is_gone = |subject: &&String| !now.contains(*subject) && self.is_served(subject, policies);
        let gone = before.keys().filter(is_gone);
        for subject in gone {
            let Some((kind, name)) = subject.split_once(' ') else { continue };
            let name = name.to_owned();
            let (action, change) = match kind {
                "disk" => (
                    "the disk is drained and removed, unless clients are connected",
                    Change::RemoveDisk(name),
                ),
                "pool" => ("the pool is removed, unless caches use it", Change::RemovePool(name)),
                _ => ("the storage policy is removed, unless disks have it", Change::RemovePolicy(name)),
            };
            found.push(one_side(subject, "", None, Some(&"served".to_owned()), action, change));
        }
        // Disks are removed before the pools that hold their caches.
        found.sort_by_key(|it| matches!(it.change, Some(Change::RemovePool(_) | Change::RemovePolicy(_))));
    }
}

/// Returns the differences in storage policies and datastores.
fn policy_differences(qos: &QosService, config: &Config) -> Vec<Found> {
    let mut found = Vec::new();
    for policy in &config.policies {
        let Ok(wanted) = patched_qos(Qos::default(), &policy.qos) else { continue };
        let change = || Change::Policy(policy.name.clone(), whole_patch(wanted));
        match qos.policy_rules(&policy.name) {
            None => found.push(added("storage-policy", &policy.name, &json(&wanted), change())),
            Some(now) if now != wanted => {
                let subject = format!("storage-policy {}", policy.name);
                found.push(apply(
                    &subject,
                    "qos",
                    json(&wanted),
                    json(&now),
                    "the setting is changed for all disks of the policy",
                    change(),
                ));
            }
            Some(_) => {}
        }
    }
    for store in &config.datastores {
        let known = qos.datastore_settings(&store.name);
        let now = known.unwrap_or_else(|| DatastoreState::new(&store.name));
        let Ok(wanted) = store.settings() else { continue };
        if wanted != now {
            // A capacity that the file omits is removed.
            let patch = DatastorePatch {
                control: Some(wanted.control.to_string()),
                latency_ms: Some(wanted.latency_ms),
                capacity: Some(wanted.capacity.unwrap_or(0)),
            };
            let subject = format!("datastore {}", store.name);
            let change = Change::Datastore(store.name.clone(), patch);
            found.push(apply(&subject, "", json(&wanted), json(&now), "the setting is changed", change));
        }
    }
    found
}

/// Returns the text of each entry, by kind and name.
pub(super) fn definitions_of(config: &Config) -> BTreeMap<String, String> {
    let pools = config.pools.iter().map(|pool| (format!("pool {}", pool.name), json(pool)));
    let disks = config.disks.iter().map(|disk| (format!("disk {}", disk.name), json(disk)));
    let policies =
        config.policies.iter().map(|policy| (format!("storage-policy {}", policy.name), json(&policy.qos)));
    let stores = config.datastores.iter().map(|store| (format!("datastore {}", store.name), json(store)));
    pools.chain(disks).chain(policies).chain(stores).collect()
}

/// Returns the settings of a cache as keys and values of hob.toml.
fn settings_of(spec: &CacheSpec) -> [(&'static str, String); 21] {
    let limits = spec.shared.unwrap_or_default();
    [
        ("size", spec.shared.map_or_else(|| spec.size.to_string(), |_| "shared".to_owned())),
        ("min", limits.min.to_string()),
        ("max", limits.max.to_string()),
        ("shares", limits.shares.to_string()),
        ("pin", limits.pin.to_string()),
        ("block_size", spec.block_size.to_string()),
        ("policy", spec.policy.clone()),
        ("persistent", spec.journal.is_some().to_string()),
        ("layout", spec.layout.to_string()),
        ("admission", spec.admission.to_string()),
        ("fill", spec.fill.to_string()),
        ("mode", spec.mode.to_string()),
        ("destage_order", spec.destage.order.to_string()),
        ("dirty_start", spec.destage.dirty_start.to_string()),
        ("dirty_stop", spec.destage.dirty_stop.to_string()),
        ("dirty_full", spec.destage.dirty_full.to_string()),
        ("dirty_age_max", spec.destage.dirty_age_max.to_string()),
        ("copies", spec.copies.to_string()),
        ("ordered", spec.destage.ordered.to_string()),
        ("ram", spec.ram.to_string()),
        ("verify", spec.verify.to_string()),
    ]
}

fn whole_settings(spec: &CacheSpec) -> CacheSettings {
    CacheSettings {
        preset: None,
        block_size: Some(spec.block_size),
        policy: Some(spec.policy.clone()),
        mode: Some(spec.mode.to_string()),
        persistent: Some(spec.journal.is_some()),
        layout: Some(spec.layout.to_string()),
        admission: Some(spec.admission.to_string()),
        fill: Some(spec.fill.to_string()),
        destage_order: Some(spec.destage.order.to_string()),
        dirty_start: Some(spec.destage.dirty_start),
        dirty_stop: Some(spec.destage.dirty_stop),
        dirty_full: Some(spec.destage.dirty_full),
        dirty_age_max: Some(spec.destage.dirty_age_max),
        copies: Some(spec.copies.to_string()),
        ordered: Some(spec.destage.ordered),
        ram: Some(spec.ram),
        verify: Some(spec.verify.to_string()),
        shared: Some(spec.shared.is_some()),
        min: spec.shared.map(|limits| limits.min),
        max: spec.shared.map(|limits| limits.max),
        shares: spec.shared.map(|limits| limits.shares),
        pin: spec.shared.map(|limits| limits.pin),
    }
}

/// Returns a patch that sets every value, and removes limits that are not set.
fn whole_patch(qos: Qos) -> QosPatch {
    QosPatch {
        policy: None,
        shares: Some(qos.shares.to_string()),
        reservation: Some(qos.reservation),
        limit: Some(qos.limit.unwrap_or(0)),
        bytes_limit: Some(qos.bytes_limit.unwrap_or(Size(0))),
        flash_limit: Some(qos.flash_limit.unwrap_or(0)),
    }
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

fn added(kind: &str, name: &str, file: &str, change: Change) -> Found {
    let action = format!("the {} is added", kind.replace('-', " "));
    one_side(&format!("{kind} {name}"), "", Some(&file.to_owned()), None, &action, change)
}

/// Returns a difference in an object that only hob.toml or only the daemon has.
fn one_side(
    subject: &str,
    key: &str,
    file: Option<&String>,
    running: Option<&String>,
    action: &str,
    change: Change,
) -> Found {
    let by = if file.is_none() { ConfigRemedy::ApplyWithYes } else { ConfigRemedy::Apply };
    let difference = ConfigDifference {
        subject: subject.to_owned(),
        key: key.to_owned(),
        file: file.cloned(),
        running: running.cloned(),
        by,
        action: action.to_owned(),
    };
    Found { difference, change: Some(change) }
}

fn apply(subject: &str, key: &str, file: String, running: String, action: &str, change: Change) -> Found {
    let found = one_side(subject, key, Some(&file), Some(&running), action, change);
    Found { difference: ConfigDifference { by: ConfigRemedy::Apply, ..found.difference }, ..found }
}

fn with_yes(found: Found) -> Found {
    Found { difference: ConfigDifference { by: ConfigRemedy::ApplyWithYes, ..found.difference }, ..found }
}

fn by_command(subject: &str, key: &str, file: impl ToString, running: impl ToString, action: &str) -> Found {
    let difference = ConfigDifference {
        subject: subject.to_owned(),
        key: key.to_owned(),
        file: Some(file.to_string()),
        running: Some(running.to_string()),
        by: ConfigRemedy::Command,
        action: action.to_owned(),
    };
    Found { difference, change: None }
}
