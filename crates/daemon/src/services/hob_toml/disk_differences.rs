//! Differences between a disk of hob.toml and the served disk.

use hob_control::{
    BackingTimeoutChange, CachePatch, CacheSettings, ConfigDifference, ConfigRemedy, DiskPatch, Qos, QosPatch,
};

use super::super::registry::{DiskEntry as Served, Inner};
use super::changes::Change;
use super::differences::{Found, apply, by_command, json, one_side, whole_patch};
use crate::cache_settings::{CacheContext, changed_spec, new_spec, whole_settings};
use crate::config::DiskEntry;
use crate::state::{CacheSpec, patched_qos};
use crate::stripe;

/// Settings of a cache whose change empties the cache.
const EMPTYING: [&str; 3] = ["block_size", "layout", "persistent"];

impl Inner {
    /// Adds the differences of a disk. `before` is the text of the disk's entry when hob.toml was
    /// last read.
    pub(super) fn disk_differences(
        &self,
        disk: &DiskEntry,
        served: &Served,
        before: Option<&String>,
        found: &mut Vec<Found>,
    ) {
        self.fixed_differences(disk, served, found);
        open_differences(disk, served, found);
        front_end_differences(disk, served, found);
        self.timeout_difference(disk, served, before, found);
        stripe_difference(disk, served, before, found);
        export_differences(disk, served, found);
        qos_difference(disk, served, before, found);
        self.cache_differences(disk, served, found);
    }

    /// Adds the differences that an operator can resolve only by removing the disk. The pattern
    /// below lists all fields, so a new setting does not compile until it is added to the pattern.
    fn fixed_differences(&self, disk: &DiskEntry, served: &Served, found: &mut Vec<Found>) {
        let DiskEntry {
            name,
            backing,
            format,
            share_parent,
            parent_cache,
            // The other functions of this file compare these settings.
            read_only: _,
            datastore: _,
            vhost_user: _,
            fuse: _,
            device: _,
            backing_timeout: _,
            stripe: _,
            exports: _,
            qos: _,
            cache: _,
        } = disk;
        let subject = format!("disk {name}");
        let again = format!(
            "stop its guest, then 'hob disk remove {name}', which first writes dirty data to the present backing, then \
             'hob config apply', which adds the disk"
        );
        if *backing != served.wanted.backing {
            let action = format!("a disk keeps its backing, because another backing has other data: {again}");
            found.push(by_command(&subject, "backing", backing, &served.wanted.backing, &action));
        }
        let recorded = served.wanted.image.as_ref().and_then(|image| image.format);
        let recorded = recorded.map_or("none", |format| format.0.name());
        if let Some(format) = format.as_deref().filter(|format| *format != recorded) {
            found.push(by_command(&subject, "format", format, recorded, &again));
        }
        let share = served.wanted.share_parent.as_ref();
        if *share_parent != share.is_some() {
            found.push(by_command(&subject, "share_parent", share_parent, share.is_some(), &again));
        }
        let (Some(size), Some(share)) = (parent_cache, share) else { return };
        let parent = share.disk.as_deref().unwrap_or("PARENT");
        let present = self.disks.get(parent).and_then(|disk| disk.cache()).map(|spec| spec.size);
        if share.cache != Some(*size) && present != Some(*size) {
            let action = format!("'hob cache resize {parent} {size}' changes the cache of the parent's disk");
            let present = present.map_or_else(|| "none".to_owned(), |size| size.to_string());
            found.push(by_command(&subject, "parent_cache", size, present, &action));
        }
    }

    fn timeout_difference(
        &self,
        disk: &DiskEntry,
        served: &Served,
        before: Option<&String>,
        found: &mut Vec<Found>,
    ) {
        let now = served.wanted.backing_timeout;
        let (change, action) = match disk.backing_timeout {
            Some(timeout) if now == Some(timeout) => return,
            Some(timeout) => {
                (BackingTimeoutChange::Set(timeout), "the setting is changed, also for waiting requests")
            }
            // If hob.toml never had this setting, only commands change the setting.
            None if now.is_none() || !had_key(before, "backing_timeout") => return,
            None => (BackingTimeoutChange::Default, "the disk has the limit of the daemon again"),
        };
        let patch = DiskPatch { backing_timeout: Some(change), ..DiskPatch::default() };
        let file = disk.backing_timeout.map(|timeout| timeout.to_string());
        let running = Some(self.backing_timeout_in_effect(now).to_string());
        found.push(patched(disk, "backing_timeout", (file, running), action, patch));
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
            return found.push(found_one.by(ConfigRemedy::ApplyWithYes));
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
            let (settings, empties) = match key {
                "size" if wanted.shared.is_none() => (CacheSettings::default(), false),
                _ => settings_for(key, now, &wanted, context),
            };
            let patch = CachePatch {
                size: (key == "size" && wanted.shared.is_none()).then_some(wanted.size),
                settings,
            };
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
            found.push(if empties || shrinks { one.by(ConfigRemedy::ApplyWithYes) } else { one });
        }
    }
}

impl Served {
    /// Returns true if the setting of a difference now has the value that hob.toml states.
    pub(super) fn agrees_with(&self, it: &ConfigDifference) -> bool {
        let now = match it.key.as_str() {
            "backing" => Some(self.wanted.backing.clone()),
            "read_only" => Some(self.wanted.read_only.to_string()),
            "datastore" => self.wanted.datastore.clone(),
            "vhost_user" => self.wanted.vhost_user.clone(),
            "fuse" => self.wanted.fuse.clone(),
            _ => return false,
        };
        now == it.file
    }
}

/// Adds the differences in settings that hob can change only by closing the disk and opening it
/// again.
fn open_differences(disk: &DiskEntry, served: &Served, found: &mut Vec<Found>) {
    let wanted = &served.wanted;
    let is_emptied = served.cache().is_some_and(|spec| spec.journal.is_none());
    let action = match is_emptied {
        true => {
            "the disk is closed and opened again, and its volatile cache is emptied, unless clients are connected"
        }
        false => "the disk is closed and opened again, unless clients are connected",
    };
    let mut add = |one: Found| found.push(if is_emptied { one.by(ConfigRemedy::ApplyWithYes) } else { one });
    if disk.read_only != wanted.read_only {
        let patch = DiskPatch { read_only: Some(disk.read_only), ..DiskPatch::default() };
        let sides = (Some(disk.read_only.to_string()), Some(wanted.read_only.to_string()));
        add(patched(disk, "read_only", sides, action, patch));
    }
    if disk.datastore != wanted.datastore {
        let datastore = Some(disk.datastore.clone().unwrap_or_default());
        let patch = DiskPatch { datastore, ..DiskPatch::default() };
        let sides = (disk.datastore.clone(), wanted.datastore.clone());
        add(patched(disk, "datastore", sides, action, patch));
    }
}

/// Adds the differences in the front ends of a disk: its socket, its file, its device and its
/// exports.
fn front_end_differences(disk: &DiskEntry, served: &Served, found: &mut Vec<Found>) {
    let wanted = &served.wanted;
    if disk.vhost_user != wanted.vhost_user {
        let action = match (&disk.vhost_user, &wanted.vhost_user) {
            (_, None) => "the socket is created",
            (Some(_), _) => "the new socket replaces the present one, unless a guest is connected to it",
            (None, _) => "the socket is removed, unless a guest is connected to it",
        };
        let vhost_user = Some(disk.vhost_user.clone().unwrap_or_default());
        let patch = DiskPatch { vhost_user, ..DiskPatch::default() };
        let sides = (disk.vhost_user.clone(), wanted.vhost_user.clone());
        found.push(patched(disk, "vhost_user", sides, action, patch));
    }
    if disk.fuse != wanted.fuse {
        let action = match (&disk.fuse, &wanted.fuse) {
            (_, None) => "the file is mounted",
            (Some(_), _) => "the new file replaces the present one, unless a program has it open",
            (None, _) => "the file is unmounted, unless a program has it open",
        };
        let fuse = Some(disk.fuse.clone().unwrap_or_default());
        let patch = DiskPatch { fuse, ..DiskPatch::default() };
        let sides = (disk.fuse.clone(), wanted.fuse.clone());
        found.push(patched(disk, "fuse", sides, action, patch));
    }
    if disk.device != wanted.device {
        let action = match disk.device {
            true => "the block device is created",
            false => "the block device is removed, unless it is in use",
        };
        let patch = DiskPatch { device: Some(disk.device), ..DiskPatch::default() };
        let sides = (Some(disk.device.to_string()), Some(wanted.device.to_string()));
        found.push(patched(disk, "device", sides, action, patch));
    }
}

fn stripe_difference(disk: &DiskEntry, served: &Served, before: Option<&String>, found: &mut Vec<Found>) {
    // The file was checked already.
    let (wanted, now) = (stripe::chosen(disk.stripe).unwrap_or_default(), served.wanted.stripe);
    // If the file never had the setting, only commands change it.
    if wanted == now || disk.stripe.is_none() && !had_key(before, "stripe") {
        return;
    }
    let action = match wanted {
        Some(_) => "the stripe size is set",
        None => "the disk has the detected stripe size again",
    };
    let patch = DiskPatch { stripe: Some(wanted.unwrap_or_default()), ..DiskPatch::default() };
    let sides = (wanted.map(|size| size.to_string()), now.map(|size| size.to_string()));
    found.push(patched(disk, "stripe", sides, action, patch));
}

fn export_differences(disk: &DiskEntry, served: &Served, found: &mut Vec<Found>) {
    let (name, subject, present) = (&disk.name, format!("disk {}", disk.name), &served.wanted.exports);
    for export in &disk.exports {
        match present.iter().find(|known| known.name == export.name) {
            Some(known) if known == export => {}
            Some(known) => {
                let action = "the export is removed and added again, and its clients are disconnected";
                let (disk, before, wanted) = (name.clone(), known.clone(), export.clone());
                let change = Change::ReplaceExport { disk, before, wanted };
                let one = apply(&subject, "export", json(export), json(known), action, change);
                found.push(one.by(ConfigRemedy::ApplyWithYes));
            }
            None => {
                let change = Change::AddExport(name.clone(), export.clone());
                let file = Some(&export.name);
                found.push(one_side(&subject, "export", file, None, "the export is added", change));
            }
        }
    }
    for known in present.iter().filter(|known| !disk.exports.iter().any(|it| it.name == known.name)) {
        let change = Change::RemoveExport(name.clone(), known.clone());
        let action = "the export is removed, and its clients are disconnected";
        found.push(one_side(&subject, "export", None, Some(&known.name), action, change));
    }
}

fn qos_difference(disk: &DiskEntry, served: &Served, before: Option<&String>, found: &mut Vec<Found>) {
    let now = served.wanted.qos.clone().unwrap_or_default();
    let own = |wanted: Qos| match now.policy {
        None => whole_patch(wanted),
        Some(_) => QosPatch { policy: Some(String::new()), ..whole_patch(wanted) },
    };
    let is_default = now.policy.is_none() && now.own == Qos::default();
    let change = match &disk.qos {
        // If hob.toml never had these settings, only commands change them.
        None if is_default || !had_key(before, "qos") => return,
        None => own(Qos::default()),
        Some(patch) => match &patch.policy {
            Some(policy) if now.policy.as_ref() == Some(policy) => return,
            Some(_) => patch.clone(),
            None => match patched_qos(Qos::default(), patch) {
                Ok(wanted) if now.policy.is_none() && now.own == wanted => return,
                Ok(wanted) => own(wanted),
                Err(_) => return,
            },
        },
    };
    let action = match disk.qos {
        Some(_) => "the shares and limits of the disk are set",
        None => "the disk has the default shares and no limits again",
    };
    let file = disk.qos.as_ref().map(json);
    let (subject, change) = (format!("disk {}", disk.name), Change::Qos(disk.name.clone(), change));
    let one = one_side(&subject, "qos", file.as_ref(), Some(&json(&now)), action, change);
    // If the key was removed from the file, hob resets the settings to their defaults. This removes
    // no object.
    found.push(one.by(ConfigRemedy::Apply));
}

/// Returns true if the disk's entry in the previous hob.toml had the key `key`. `before` is the
/// text of this entry.
fn had_key(before: Option<&String>, key: &str) -> bool {
    let entry = before.and_then(|text| serde_json::from_str::<serde_json::Value>(text).ok());
    entry.is_some_and(|entry| entry.get(key).is_some_and(|value| !value.is_null()))
}

/// Returns the settings that bring the setting `key` of a cache to its value in hob.toml, and
/// whether they empty the cache. Some settings, such as the limits of dirty data, are valid only
/// together, so the result has all settings of hob.toml. If possible, the result leaves out the
/// settings that empty the cache, because these need the operator's consent.
fn settings_for(
    key: &str,
    now: &CacheSpec,
    wanted: &CacheSpec,
    context: CacheContext,
) -> (CacheSettings, bool) {
    let whole = whole_settings(wanted);
    if EMPTYING.contains(&key) {
        return (whole, true);
    }
    let without_emptying =
        CacheSettings { block_size: None, layout: None, persistent: None, ..whole.clone() };
    // Write-back and copies can require a journal, which a volatile cache does not have.
    let without_journal = match key {
        "mode" | "copies" => None,
        _ => Some(CacheSettings { mode: None, copies: None, ..without_emptying.clone() }),
    };
    let keeps_data = |settings: &CacheSettings| {
        changed_spec(now, None, settings, context).is_ok_and(|(after, _)| {
            after.block_size == now.block_size
                && after.layout == now.layout
                && after.journal.is_some() == now.journal.is_some()
        })
    };
    let found = [Some(without_emptying), without_journal].into_iter().flatten().find(keeps_data);
    found.map_or((whole, true), |settings| (settings, false))
}

/// Returns a difference in a setting that `PATCH /v1/disks/{disk}` changes. `sides` has the values
/// of hob.toml and of the daemon.
fn patched(
    disk: &DiskEntry,
    key: &str,
    sides: (Option<String>, Option<String>),
    action: &str,
    patch: DiskPatch,
) -> Found {
    let (subject, change) = (format!("disk {}", disk.name), Change::PatchDisk(disk.name.clone(), patch));
    let one = one_side(&subject, key, sides.0.as_ref(), sides.1.as_ref(), action, change);
    // If the key was removed from the file, hob resets the setting to its default. This removes no
    // object.
    one.by(ConfigRemedy::Apply)
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
