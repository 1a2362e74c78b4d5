//! Differences between hob.toml and the running configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use hob_control::{
    ConfigDifference, ConfigRemedy, DatastorePatch, DeviceAdd, FlashWrites, FlashWritesChange, PoolCreate,
    PoolPatch, Qos, QosPatch, Size,
};
use hob_storage::pool::device_bytes_for;

use super::super::qos::QosService;
use super::super::registry::{DiskEntry, DiskPhase, Inner, PoolEntry, Registry};
use super::UNAPPLIED;
use super::changes::Change;
use crate::config::Config;
use crate::state::{DatastoreState, patched_qos};

/// A difference, and the change that resolves the difference, if one exists.
pub(super) struct Found {
    /// The difference. If hob makes the change only under a condition, the text of the action ends
    /// with `, unless CONDITION`.
    pub(super) difference: ConfigDifference,
    /// The change that resolves the difference; `None` if an operator must act.
    pub(super) change: Option<Change>,
}

impl Found {
    /// Sets how the difference can be resolved.
    pub(super) fn by(mut self, remedy: ConfigRemedy) -> Found {
        self.difference.by = remedy;
        self
    }
}

/// Returns the differences in an order in which they can be resolved: an object is created after
/// the objects that it depends on, and removed before them.
///
/// `running` is hob.toml at the daemon's start, and `config` is the present hob.toml. `before` has
/// the definitions at the last reload, and `files` has the pool devices that are regular files.
pub(super) fn differences(
    registry: &Registry,
    qos: &QosService,
    running: &Config,
    config: &Config,
    before: &BTreeMap<String, String>,
    files: &BTreeSet<String>,
) -> Vec<Found> {
    let policies = policy_differences(qos, config);
    let tuned = tuned_by(qos);
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
    inner.pool_differences(config, before, files, &mut found);
    found.extend(policies);
    for disk in &config.disks {
        match inner.disks.get(&disk.name) {
            None => {
                found.push(added("disk", &disk.name, &disk.backing, Change::AddDisk(Box::new(disk.clone()))))
            }
            Some(served) => {
                let before = before.get(&format!("disk {}", disk.name));
                inner.disk_differences(disk, served, before, &mut found);
            }
        }
    }
    inner.deleted(config, before, &tuned, &mut found);
    found
}

/// Returns the kind and name of each storage policy, and of each datastore whose settings are not
/// the default.
pub(super) fn tuned_by(qos: &QosService) -> BTreeSet<String> {
    let policies = qos.policies().into_iter().map(|policy| format!("storage-policy {}", policy.name));
    let stores = qos.tuned_datastores().into_iter().map(|name| format!("datastore {name}"));
    policies.chain(stores).collect()
}

/// Returns the key in the saved definitions for a device that hob.toml does not list any more.
pub(super) fn dropped_device(pool: &str, path: &str) -> String {
    format!("device {pool} {path}")
}

impl Inner {
    /// Returns true if an object of hob.toml exists in the daemon. `tuned` is the result of
    /// [`tuned_by`].
    pub(super) fn is_served(&self, subject: &str, tuned: &BTreeSet<String>) -> bool {
        match subject.split_once(' ') {
            Some(("disk", name)) => self.disks.contains_key(name),
            Some(("pool", name)) => self.pools.contains_key(name),
            Some(("device", device)) => {
                device.split_once(' ').is_some_and(|(pool, path)| self.has_device(pool, path))
            }
            _ => tuned.contains(subject),
        }
    }

    fn has_device(&self, pool: &str, path: &str) -> bool {
        let devices = self.pools.get(pool).map(|entry| entry.devices.iter());
        devices.is_some_and(|mut devices| devices.any(|device| device.path == Path::new(path)))
    }

    /// Returns true if the object of a difference cannot be changed for now: an operation is in
    /// progress on it, or it is offline. A change of a pool is also impossible while an operation
    /// on a disk with a cache in the pool is in progress.
    pub(super) fn is_unavailable(&self, it: &ConfigDifference) -> bool {
        match it.subject.split_once(' ') {
            Some(("disk", name)) => self
                .disks
                .get(name)
                .is_some_and(|disk| disk.busy.is_some() || matches!(disk.phase, DiskPhase::Offline(_))),
            Some(("pool", name)) => {
                let is_in_pool = |disk: &DiskEntry| disk.cache().is_some_and(|spec| spec.pool == name);
                self.pools.get(name).is_some_and(|pool| pool.busy.is_some())
                    || self.disks.values().any(|disk| disk.busy.is_some() && is_in_pool(disk))
            }
            _ => false,
        }
    }

    /// Returns true if a change that the last reload did not make may still be necessary.
    pub(in crate::services) fn is_pending(&self, it: &ConfigDifference) -> bool {
        match it.subject.split_once(' ') {
            Some(("disk", name)) => self.disks.get(name).is_some_and(|disk| !disk.agrees_with(it)),
            Some(("pool", name)) if it.key == "devices" => {
                it.running.as_ref().is_some_and(|path| self.has_device(name, path))
            }
            Some(("pool", name)) if it.is_added() => !self.pools.get(name).is_some_and(PoolEntry::was_opened),
            Some(("pool", name)) => self.pools.contains_key(name),
            _ => true,
        }
    }

    fn pool_differences(
        &self,
        config: &Config,
        before: &BTreeMap<String, String>,
        files: &BTreeSet<String>,
        found: &mut Vec<Found>,
    ) {
        for pool in &config.pools {
            let name = &pool.name;
            let Some(entry) = self.pools.get(name).filter(|entry| entry.was_opened()) else {
                found.push(self.new_pool(pool));
                continue;
            };
            let subject = format!("pool {name}");
            if let Some(segment) = pool.segment_size.filter(|size| size.bytes() != entry.segment_bytes) {
                let action = "the segment size of a pool cannot change; remove the pool and create it again";
                let running = Size(entry.segment_bytes);
                found.push(by_command(&subject, "segment_size", segment, running, action));
            }
            found.extend(budget_difference(&subject, pool, entry.flash_writes.wanted()));
            found.extend(size_differences(pool, entry, files));
            let has: Vec<String> = entry
                .devices
                .iter()
                .filter(|device| device.peer.is_none())
                .map(|device| device.path.to_string_lossy().into_owned())
                .collect();
            if pool.devices.iter().all(|path| has.contains(path)) {
                found.extend(force_difference(&subject, pool, before));
            }
            for path in pool.devices.iter().filter(|path| !has.contains(path)) {
                let add = DeviceAdd { path: path.clone(), peer: None, size: pool.size, force: pool.force };
                let change = Change::AddDevice(name.clone(), add);
                found.push(one_side(&subject, "devices", Some(path), None, "the device is added", change));
            }
            for path in has.iter().filter(|path| !pool.devices.contains(path)) {
                let action = "the device is removed; caches on it move to others, or shrink";
                let change = Change::RemoveDevice(name.clone(), path.clone());
                found.push(one_side(&subject, "devices", None, Some(path), action, change));
            }
        }
    }

    /// Returns the difference for a pool of hob.toml that does not exist. If hob would create the
    /// pool without some of its devices, which may have dirty data, the creation needs `--yes`.
    fn new_pool(&self, pool: &PoolCreate) -> Found {
        let found = added("pool", &pool.name, &pool.devices.join(", "), Change::CreatePool(pool.clone()));
        let given_up: Vec<String> = match self.pools.get(&pool.name).filter(|entry| entry.is_unseen) {
            Some(entry) => entry
                .devices
                .iter()
                .filter(|device| !pool.devices.iter().any(|path| device.path == Path::new(path)))
                .map(|device| device.path.display().to_string())
                .collect(),
            None => Vec::new(),
        };
        if given_up.is_empty() {
            return found;
        }
        let mut found = found.by(ConfigRemedy::ApplyWithYes);
        found.difference.action = format!(
            "the pool is created without {}, which hob could never open; if the pool existed before hob's state \
             was lost, dirty data there is lost",
            given_up.join(", ")
        );
        found
    }

    /// Returns the entries that were deleted from hob.toml and whose objects still exist. `before`
    /// has the definitions of these entries.
    fn deleted(
        &self,
        config: &Config,
        before: &BTreeMap<String, String>,
        tuned: &BTreeSet<String>,
        found: &mut Vec<Found>,
    ) {
        let now: BTreeSet<String> = definitions_of(config).into_keys().collect();
        let is_gone = |subject: &&String| !now.contains(*subject) && self.is_served(subject, tuned);
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
                // The pool's differences include the device.
                "device" => continue,
                "datastore" => {
                    let patch = whole_datastore(&DatastoreState::new(&name));
                    ("the datastore gets the default settings", Change::Datastore(name, patch))
                }
                _ => ("the storage policy is removed, unless disks have it", Change::RemovePolicy(name)),
            };
            found.push(one_side(subject, "", None, Some(&"served".to_owned()), action, change));
        }
        // Disks are removed before the pools that hold their caches.
        found.sort_by_key(|it| matches!(it.change, Some(Change::RemovePool(_) | Change::RemovePolicy(_))));
    }
}

/// Returns a difference for each file of a pool whose size differs from the size in hob.toml.
fn size_differences(pool: &PoolCreate, entry: &PoolEntry, files: &BTreeSet<String>) -> Vec<Found> {
    let Some(size) = pool.size else { return Vec::new() };
    let segment = entry.segment_bytes;
    // The sizes with which a file has this number of segments.
    let fits = |segments: u64| {
        let least = device_bytes_for(segments * segment, segment);
        (least..device_bytes_for((segments + 1) * segment, segment)).contains(&size.bytes())
    };
    let mut found = Vec::new();
    for device in entry.devices.iter().filter(|device| device.ids.is_some() && device.peer.is_none()) {
        let path = device.path.to_string_lossy().into_owned();
        if !files.contains(&path) || !pool.devices.contains(&path) || fits(device.segments) {
            continue;
        }
        let name = &pool.name;
        let running = format!("{path} with {} for caches", Size(device.segments * segment).human());
        let action = format!(
            "devices of a pool keep their size. For more space, 'hob pool add-device {name}' adds one. For \
             another size, 'hob pool remove-device {name} {path}', delete the file, then 'hob config apply'"
        );
        found.push(by_command(&format!("pool {name}"), "size", size, running, &action));
    }
    found
}

/// Returns a difference if hob.toml sets `force` for an existing pool and adds no device to the
/// pool. `before` has the definitions at the last reload.
fn force_difference(subject: &str, pool: &PoolCreate, before: &BTreeMap<String, String>) -> Option<Found> {
    let had_force = |text: &String| {
        serde_json::from_str::<serde_json::Value>(text).is_ok_and(|pool| pool["force"] == true)
    };
    let is_new = before.get(subject).is_some_and(|text| !had_force(text));
    let is_reported = before.contains_key(&format!("{UNAPPLIED}{subject}: force"));
    (pool.force && (is_new || is_reported)).then(|| {
        let name = &pool.name;
        let action = format!(
            "force has no effect on present devices: hob uses it only when it creates the pool or \
             adds a device. Remove it from hob.toml, or use 'hob pool add-device {name} --force'"
        );
        by_command(subject, "force", true, false, &action)
    })
}

fn budget_difference(subject: &str, pool: &PoolCreate, running: Option<FlashWrites>) -> Option<Found> {
    let change = |budget: Option<FlashWrites>| budget.map_or(FlashWritesChange::Off, FlashWritesChange::Set);
    let (file, running) = (change(pool.flash_writes), change(running));
    let patch = PoolPatch { flash_writes: Some(file) };
    (file != running).then(|| {
        let (file, running) = (file.to_string(), running.to_string());
        let change = Change::PatchPool(pool.name.clone(), patch);
        apply(subject, "flash_writes", file, running, "the flash write budget changes at once", change)
    })
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
                let action = "the setting is changed for all disks of the policy";
                found.push(apply(&subject, "qos", json(&wanted), json(&now), action, change()));
            }
            Some(_) => {}
        }
    }
    for store in &config.datastores {
        let known = qos.datastore_settings(&store.name);
        let now = known.unwrap_or_else(|| DatastoreState::new(&store.name));
        let Ok(wanted) = store.settings() else { continue };
        if wanted != now {
            let patch = whole_datastore(&wanted);
            let subject = format!("datastore {}", store.name);
            let change = Change::Datastore(store.name.clone(), patch);
            found.push(apply(&subject, "", json(&wanted), json(&now), "the setting is changed", change));
        }
    }
    found
}

/// Returns the patch that gives a datastore all settings of `wanted`. If `wanted` has no capacity,
/// the patch removes the capacity.
fn whole_datastore(wanted: &DatastoreState) -> DatastorePatch {
    DatastorePatch {
        control: Some(wanted.control.to_string()),
        latency_ms: Some(wanted.latency_ms),
        capacity: Some(wanted.capacity.unwrap_or(0)),
    }
}

/// Returns the definition of each object in hob.toml as text, by kind and name.
pub(super) fn definitions_of(config: &Config) -> BTreeMap<String, String> {
    let pools = config.pools.iter().map(|pool| (format!("pool {}", pool.name), json(pool)));
    let disks = config.disks.iter().map(|disk| (format!("disk {}", disk.name), json(disk)));
    let policies =
        config.policies.iter().map(|policy| (format!("storage-policy {}", policy.name), json(&policy.qos)));
    let stores = config.datastores.iter().map(|store| (format!("datastore {}", store.name), json(store)));
    pools.chain(disks).chain(policies).chain(stores).collect()
}

/// Returns the patch that gives a disk all settings of `qos`, and removes the limits that `qos`
/// does not have.
pub(super) fn whole_patch(qos: Qos) -> QosPatch {
    QosPatch {
        policy: None,
        shares: Some(qos.shares.to_string()),
        reservation: Some(qos.reservation),
        limit: Some(qos.limit.unwrap_or(0)),
        bytes_limit: Some(qos.bytes_limit.unwrap_or(Size(0))),
        flash_limit: Some(qos.flash_limit.unwrap_or(0)),
    }
}

pub(super) fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

fn added(kind: &str, name: &str, file: &str, change: Change) -> Found {
    let action = format!("the {} is added", kind.replace('-', " "));
    one_side(&format!("{kind} {name}"), "", Some(&file.to_owned()), None, &action, change)
}

/// Returns the difference for an object that exists only in hob.toml or only in the daemon.
pub(super) fn one_side(
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

pub(super) fn apply(
    subject: &str,
    key: &str,
    file: String,
    running: String,
    action: &str,
    change: Change,
) -> Found {
    one_side(subject, key, Some(&file), Some(&running), action, change).by(ConfigRemedy::Apply)
}

pub(super) fn by_command(
    subject: &str,
    key: &str,
    file: impl ToString,
    running: impl ToString,
    action: &str,
) -> Found {
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
