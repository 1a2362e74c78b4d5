//! What disks are due: set for one disk, or for all that have a storage policy; refused where reservations would
//! exceed what their datastore can do.

use std::collections::BTreeMap;
use std::sync::Arc;

use hob_control::{DiskQos, Qos, QosPatch, Size, StoragePolicy, check_name};
use hob_engine::qos::{self, Entitlement, SHARES_MAX};

use super::api_error::ApiError;
use super::definitions::datastore_patch;
use super::{DiskEntry, Inner, Manager};
use crate::daemon::config::{Config, PolicyEntry};
use crate::daemon::state::{DatastoreState, DiskQosSpec, PolicyState, check_qos};

/// Storage policies there can be.
const POLICIES_MAX: usize = 1024;

impl Manager {
    /// What all disks are due.
    pub(crate) fn disks_qos(&self) -> Vec<DiskQos> {
        let inner = self.inner();
        inner.disks.values().map(|disk| disk.qos_view(&inner)).collect()
    }

    /// What a disk is due.
    pub(crate) fn disk_qos(&self, disk: &str) -> Result<DiskQos, ApiError> {
        let inner = self.inner();
        Ok(inner.disk(disk)?.qos_view(&inner))
    }

    /// All storage policies.
    pub(crate) fn policies(&self) -> Vec<StoragePolicy> {
        let inner = self.inner();
        inner.policies.iter().map(|(name, qos)| inner.policy_view(name, *qos)).collect()
    }

    /// Says what a disk is due.
    pub(crate) async fn qos_set(
        self: &Arc<Self>,
        disk: String,
        patch: QosPatch,
    ) -> Result<DiskQos, ApiError> {
        let manager = self.clone();
        self.change("qos set", disk.clone(), async move { manager.set_disk_qos(&disk, &patch).await }).await
    }

    /// Makes a storage policy, or changes it for all its disks.
    pub(crate) async fn policy_set(
        self: &Arc<Self>,
        name: String,
        patch: QosPatch,
    ) -> Result<StoragePolicy, ApiError> {
        let manager = self.clone();
        self.change("policy set", name.clone(), async move { manager.set_policy(&name, &patch).await }).await
    }

    /// Removes a storage policy that no disk has.
    pub(crate) async fn policy_remove(self: &Arc<Self>, name: String) -> Result<StoragePolicy, ApiError> {
        let manager = self.clone();
        self.change("policy remove", name.clone(), async move {
            let view = {
                let mut inner = manager.inner();
                let qos = inner.policy(&name)?;
                let view = inner.policy_view(&name, qos);
                if let Some(disk) = view.disks.first() {
                    return Err(ApiError::conflict(format!("disk {disk} has the storage policy {name}"))
                        .hint("give its disks another one first, or none with --policy ''"));
                }
                inner.policies.remove(&name);
                view
            };
            manager.save().await?;
            Ok(view)
        })
        .await
    }

    /// Takes over what hob.toml says of storage policies and datastores that nobody has said anything of since.
    pub(super) fn start_qos(&self, config: &Config) -> Result<(), ApiError> {
        let mut inner = self.inner();
        for PolicyEntry { name, qos } in &config.policies {
            if inner.policies.contains_key(name) {
                continue;
            }
            let named =
                |error: ApiError| ApiError::invalid(format!("storage policy {name} of hob.toml: {error}"));
            if qos.policy.is_some() {
                return Err(named(ApiError::invalid("a storage policy has no policy of its own")));
            }
            let qos = patched(Qos::default(), qos).map_err(named)?;
            inner.policies.insert(name.clone(), qos);
        }
        for store in &config.datastores {
            if inner.datastores.iter().any(|known| known.spec.name == store.name) {
                continue;
            }
            let name = &store.name;
            let spec = DatastoreState::new(name)
                .patched(&datastore_patch(store))
                .map_err(|error| ApiError::invalid(format!("datastore {name} of hob.toml: {error}")))?;
            inner.datastores.push(super::datastores::DatastoreEntry::new(spec));
        }
        Ok(())
    }

    async fn set_disk_qos(self: &Arc<Self>, name: &str, patch: &QosPatch) -> Result<DiskQos, ApiError> {
        let _guard = self.guard_disk_for_command(name, "given other shares").await?;
        self.look_at_peaks().await;
        let (before, notes) = {
            let mut inner = self.inner();
            let before = inner.disk(name)?.wanted.qos.clone();
            let mut wanted = before.clone().unwrap_or_default();
            if wanted.policy.is_some() && patch.policy.is_none() {
                return Err(ApiError::conflict(format!(
                    "{name} has the storage policy {}",
                    wanted.policy.unwrap_or_default()
                ))
                .hint("change that one, or let the disk go its own way with --policy ''"));
            }
            match patch.policy.as_deref() {
                None => {}
                Some("") => wanted = DiskQosSpec { policy: None, own: inner.disk(name)?.due(&inner) },
                Some(policy) => {
                    if (QosPatch { policy: None, ..patch.clone() }) != QosPatch::default() {
                        return Err(two_rules());
                    }
                    wanted = DiskQosSpec { policy: Some(policy.to_owned()), own: inner.policy(policy)? };
                }
            }
            wanted.own = patched(wanted.own, patch)?;
            inner.disk_mut(name)?.wanted.qos = Some(wanted);
            match inner.check_reservations() {
                Ok(notes) => (before, notes),
                Err(error) => {
                    inner.disk_mut(name)?.wanted.qos = before;
                    return Err(error);
                }
            }
        };
        if let Err(error) = self.apply_qos(name).await {
            self.inner().disk_mut(name)?.wanted.qos = before;
            return Err(error);
        }
        self.save().await?;
        Ok(DiskQos { notes, ..self.disk_qos(name)? })
    }

    async fn set_policy(self: &Arc<Self>, name: &str, patch: &QosPatch) -> Result<StoragePolicy, ApiError> {
        check_name(name).map_err(|error| {
            ApiError::invalid(format!("'{name}' cannot be a storage policy's name: {error}"))
        })?;
        if patch.policy.is_some() {
            return Err(ApiError::invalid("a storage policy has no policy of its own"));
        }
        self.look_at_peaks().await;
        let disks = {
            let mut inner = self.inner();
            let before = inner.policies.get(name).copied();
            if before.is_none() && inner.policies.len() >= POLICIES_MAX {
                return Err(ApiError::conflict(format!("there are {POLICIES_MAX} storage policies")));
            }
            let wanted = patched(before.unwrap_or_default(), patch)?;
            inner.policies.insert(name.to_owned(), wanted);
            if let Err(error) = inner.check_reservations() {
                match before {
                    Some(before) => _ = inner.policies.insert(name.to_owned(), before),
                    None => _ = inner.policies.remove(name),
                }
                return Err(error);
            }
            inner.policy_view(name, wanted).disks
        };
        for disk in disks {
            if let Err(error) = self.apply_qos(&disk).await {
                tracing::warn!("{disk} does not follow the storage policy {name} yet: {error}");
            }
        }
        self.save().await?;
        let inner = self.inner();
        Ok(inner.policy_view(name, inner.policy(name)?))
    }

    /// Tells the shard of a disk that is online what the disk is due.
    pub(super) async fn apply_qos(self: &Arc<Self>, name: &str) -> Result<(), ApiError> {
        let (shard, id, due) = {
            let inner = self.inner();
            let disk = inner.disk(name)?;
            let Ok(shard) = disk.shard() else { return Ok(()) };
            (shard, disk.id, engine_qos(disk.due(&inner)))
        };
        shard.set_qos(id, due).await?;
        self.apply_control_of(name);
        Ok(())
    }
}

impl Inner {
    /// What a new disk of hob.toml is due.
    pub(super) fn first_qos(&self, patch: &QosPatch) -> Result<DiskQosSpec, ApiError> {
        let own = match patch.policy.as_deref() {
            Some(policy) => self.policy(policy)?,
            None => Qos::default(),
        };
        if patch.policy.is_some() && (QosPatch { policy: None, ..patch.clone() }) != QosPatch::default() {
            return Err(two_rules());
        }
        Ok(DiskQosSpec { policy: patch.policy.clone(), own: patched(own, patch)? })
    }

    fn policy(&self, name: &str) -> Result<Qos, ApiError> {
        self.policies.get(name).copied().ok_or_else(|| {
            ApiError::not_found(format!("there is no storage policy '{name}'"))
                .hint("'hob qos policy list' shows all")
        })
    }

    fn policy_view(&self, name: &str, qos: Qos) -> StoragePolicy {
        let has = |disk: &&DiskEntry| {
            disk.wanted.qos.as_ref().is_some_and(|spec| spec.policy.as_deref() == Some(name))
        };
        let disks = self.disks.values().filter(has).map(|disk| disk.wanted.name.clone()).collect();
        StoragePolicy { name: name.to_owned(), qos, disks }
    }

    /// Storage policies as they are kept.
    pub(super) fn policy_states(&self) -> Vec<PolicyState> {
        let state = |(name, qos): (&String, &Qos)| PolicyState { name: name.clone(), qos: *qos };
        self.policies.iter().map(state).collect()
    }

    /// Can every datastore do what its disks have reserved? Notes where nobody knows.
    fn check_reservations(&self) -> Result<Vec<String>, ApiError> {
        let mut notes = Vec::new();
        let mut reserved = BTreeMap::new();
        for disk in self.disks.values() {
            let units = u64::from(disk.due(self).reservation);
            *reserved.entry(disk.datastore.as_deref()).or_insert(0) += units;
        }
        for store in &self.datastores {
            let reserved = reserved.get(&Some(store.spec.name.as_str())).copied().unwrap_or(0);
            let (capacity, how) = match (store.spec.capacity, store.peak) {
                (Some(capacity), _) => (capacity, "is said to do"),
                (None, peak) if peak > 0 => (peak, "has been seen to do"),
                _ => {
                    if reserved > 0 {
                        notes.push(format!(
                            "what datastore {0} can do is not known, so {reserved} units a second may be more than it has; \
                             say it with 'hob datastore set {0} --capacity', or have it measured under --throttle auto",
                            store.spec.name
                        ));
                    }
                    continue;
                }
            };
            if reserved > u64::from(capacity) {
                return Err(ApiError::conflict(format!(
                    "reservations on datastore {} would come to {reserved} units a second, and it {how} {capacity}",
                    store.spec.name
                ))
                .hint("reserve less, or say what it can do with 'hob datastore set --capacity'"));
            }
        }
        Ok(notes)
    }

    /// Units a second that the disks of a datastore have reserved.
    pub(super) fn reserved(&self, datastore: &str) -> u64 {
        let on_it = self.disks.values().filter(|disk| disk.datastore.as_deref() == Some(datastore));
        on_it.map(|disk| u64::from(disk.due(self).reservation)).sum()
    }
}

impl DiskEntry {
    /// What it is due now.
    pub(super) fn due(&self, inner: &Inner) -> Qos {
        let Some(spec) = &self.wanted.qos else { return Qos::default() };
        let of_policy = spec.policy.as_ref().and_then(|policy| inner.policies.get(policy));
        of_policy.copied().unwrap_or(spec.own)
    }

    fn qos_view(&self, inner: &Inner) -> DiskQos {
        DiskQos {
            disk: self.wanted.name.clone(),
            datastore: self.datastore.clone(),
            policy: self.wanted.qos.as_ref().and_then(|spec| spec.policy.clone()),
            qos: self.due(inner),
            notes: Vec::new(),
        }
    }
}

fn two_rules() -> ApiError {
    ApiError::invalid("a disk with a storage policy has no rules of its own")
        .hint("say either the policy or the rules")
}

/// As the engine takes it.
pub(super) fn engine_qos(qos: Qos) -> qos::DiskQos {
    let Qos { shares, reservation, limit, bytes_limit, flash_limit } = qos;
    let bytes_limit = bytes_limit.map(|limit| limit.bytes());
    qos::DiskQos {
        backing: Entitlement { shares, reservation, limit, bytes_limit },
        flash: Entitlement { shares, reservation: 0, limit: flash_limit, bytes_limit: None },
    }
}

pub(super) fn patched(before: Qos, patch: &QosPatch) -> Result<Qos, ApiError> {
    // 0 takes a limit away.
    let rate = |value: Option<u32>, before: Option<u32>| value.or(before).filter(|rate| *rate > 0);
    let shares = match patch.shares.as_deref() {
        None => before.shares,
        Some("low") => 500,
        Some("normal") => 1000,
        Some("high") => 2000,
        Some(number) => number.parse().map_err(|_| {
            ApiError::invalid(format!("shares are low, normal, high or 1 to {SHARES_MAX}, not '{number}'"))
        })?,
    };
    let wanted = Qos {
        shares,
        reservation: patch.reservation.unwrap_or(before.reservation),
        limit: rate(patch.limit, before.limit),
        bytes_limit: patch.bytes_limit.or(before.bytes_limit).filter(|limit| *limit > Size(0)),
        flash_limit: rate(patch.flash_limit, before.flash_limit),
    };
    check_qos(&wanted).map_err(ApiError::invalid)?;
    Ok(wanted)
}
