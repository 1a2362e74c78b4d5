//! Quality of service: shares, limits and reservations of single disks or of all disks with a
//! storage policy. Reservations above the capacity of their datastore are refused.

mod agreement;
mod datastores;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hob_control::{DiskQos, Qos, QosPatch, StoragePolicy, check_name};
use hob_engine::command::CommandError;
use hob_engine::qos::{self, Entitlement};

use super::registry::{DiskEntry, Inner, Registry, StatePart};
use super::tasks::Tasks;
use crate::api_error::{ApiError, Result, conflict, invalid, not_found};
use crate::config::{Config, PolicyEntry};
use crate::shard_api::ShardError;
use crate::state::{ControlSpec, DiskQosSpec, PolicyState, State, patched_qos};
pub(super) use agreement::AGREE_EVERY;
use datastores::DatastoreEntry;
pub(super) use datastores::{DatastoreUse, datastore_of, plain};

/// Maximum number of storage policies.
const POLICIES_MAX: usize = 1024;

service! {
    /// The QoS service: shares, limits and reservations of disks, storage policies, and datastores.
    #[derive(Clone, Debug)]
    pub(crate) struct QosService {
        registry: Arc<Registry>,
        tasks: Tasks,
    } with {
        /// State of the service. The lock of this state is taken before that of the registry.
        rules: Arc<Mutex<Rules>>,
    }
}

/// The state of the QoS service.
#[derive(Debug, Default)]
struct Rules {
    /// Storage policies by name.
    policies: BTreeMap<String, Qos>,
    /// Datastores by their ids on the shards.
    datastores: BTreeMap<u16, DatastoreEntry>,
}

impl StatePart for Mutex<Rules> {
    fn add_to(&self, state: &mut State) {
        let rules = self.lock().unwrap_or_else(PoisonError::into_inner);
        state.policies = rules.policy_states();
        state.datastores = rules.datastore_states();
    }
}

impl QosService {
    /// Returns the service's part of the state file.
    pub(super) fn state_part(&self) -> Arc<dyn StatePart> {
        self.rules.clone()
    }

    /// Restores the service's part of the state file.
    pub(super) fn restore(&self, kept: &State) {
        let mut rules = self.rules();
        rules.policies = kept.policies.iter().map(|policy| (policy.name.clone(), policy.qos)).collect();
        rules.datastores = (0..).zip(kept.datastores.iter().cloned().map(DatastoreEntry::new)).collect();
    }

    fn rules(&self) -> MutexGuard<'_, Rules> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the settings of a storage policy.
    pub(super) fn policy_rules(&self, name: &str) -> Option<Qos> {
        self.rules().policies.get(name).copied()
    }

    /// Returns the entitlement of a new disk from hob.toml.
    pub(super) fn first_of(&self, patch: &QosPatch) -> Result<DiskQosSpec> {
        self.rules().first_of(patch)
    }

    /// Returns the current entitlement of a disk; `None` if none was configured.
    pub(super) fn rules_of(&self, disk: &str) -> Option<Qos> {
        let rules = self.rules();
        let inner = self.registry.inner();
        inner.disk(disk).ok().filter(|disk| disk.wanted.qos.is_some()).map(|disk| rules.due(disk))
    }

    pub(crate) fn disks(&self) -> Vec<DiskQos> {
        let rules = self.rules();
        self.registry.inner().disks.values().map(|disk| rules.disk_view(disk)).collect()
    }

    pub(crate) fn disk(&self, disk: &str) -> Result<DiskQos> {
        let rules = self.rules();
        Ok(rules.disk_view(self.registry.inner().disk(disk)?))
    }

    /// Returns a note for each datastore whose disks have shares or reservations without effect.
    pub(super) fn without_effect(&self) -> Vec<String> {
        let rules = self.rules();
        rules.all_without_effect(self.registry.inner().disks.values())
    }

    pub(crate) fn policies(&self) -> Vec<StoragePolicy> {
        let rules = self.rules();
        let inner = self.registry.inner();
        rules.policies.iter().map(|(name, qos)| policy_view(&inner, name, *qos)).collect()
    }

    /// Changes the entitlement of a disk.
    pub(crate) async fn set(&self, disk: String, patch: QosPatch) -> Result<DiskQos> {
        let service = self.clone();
        self.tasks
            .run("qos set", disk.clone(), async move { service.set_disk_qos(&disk, &patch).await })
            .await
    }

    /// Creates a storage policy, or changes it for all its disks.
    pub(crate) async fn policy_set(&self, name: String, patch: QosPatch) -> Result<StoragePolicy> {
        let service = self.clone();
        self.tasks
            .run("policy set", name.clone(), async move { service.set_policy(&name, &patch).await })
            .await
    }

    /// Removes a storage policy that no disk follows.
    pub(crate) async fn policy_remove(&self, name: String) -> Result<StoragePolicy> {
        let service = self.clone();
        self.tasks
            .run("policy remove", name.clone(), async move {
                let view = {
                    let mut rules = service.rules();
                    let qos = rules.policy(&name)?;
                    let view = policy_view(&service.registry.inner(), &name, qos);
                    if let Some(disk) = view.disks.first() {
                        return Err(conflict!("disk {disk} has the storage policy {name}")
                            .hint("first give its disks another policy, or none with --policy ''"));
                    }
                    rules.policies.remove(&name);
                    view
                };
                service.registry.save().await?;
                Ok(view)
            })
            .await
    }

    /// Applies the storage policies and datastores of hob.toml that no command has changed.
    pub(super) fn start(&self, config: &Config) -> Result<()> {
        let mut rules = self.rules();
        for PolicyEntry { name, qos } in &config.policies {
            if rules.policies.contains_key(name) {
                continue;
            }
            let named = |error: ApiError| invalid!("storage policy {name} of hob.toml: {error}");
            if qos.policy.is_some() {
                return Err(named(ApiError::invalid("a storage policy cannot use another storage policy")));
            }
            let qos = patched_qos(Qos::default(), qos).map_err(ApiError::invalid).map_err(named)?;
            rules.policies.insert(name.clone(), qos);
        }
        for store in &config.datastores {
            if rules.find_datastore(&store.name).is_ok() {
                continue;
            }
            let name = &store.name;
            let spec = store.settings().map_err(|error| invalid!("datastore {name} of hob.toml: {error}"))?;
            rules.add_datastore(DatastoreEntry::new(spec))?;
        }
        Ok(())
    }

    async fn set_disk_qos(&self, name: &str, patch: &QosPatch) -> Result<DiskQos> {
        let _guard = self.registry.guard_qos_for_command(name).await?;
        self.look_at_peaks().await;
        let (before, mut notes) = {
            let rules = self.rules();
            let mut inner = self.registry.inner();
            // A migration may have begun in the meantime.
            inner.disk(name)?.check_qos_change()?;
            let before = inner.disk(name)?.wanted.qos.clone();
            let mut wanted = before.clone().unwrap_or_default();
            if wanted.policy.is_some() && patch.policy.is_none() {
                return Err(conflict!("{name} has the storage policy {}", wanted.policy.unwrap_or_default())
                    .hint("change the policy, or detach the disk from it with --policy ''"));
            }
            match patch.policy.as_deref() {
                None => {}
                Some("") => wanted = DiskQosSpec { policy: None, own: rules.due(inner.disk(name)?) },
                Some(policy) => {
                    if (QosPatch { policy: None, ..patch.clone() }) != QosPatch::default() {
                        return Err(two_rules());
                    }
                    wanted = DiskQosSpec { policy: Some(policy.to_owned()), own: rules.policy(policy)? };
                }
            }
            wanted.own = patched_qos(wanted.own, patch).map_err(ApiError::invalid)?;
            inner.disk_mut(name)?.wanted.qos = Some(wanted);
            match rules.check_reservations(&inner) {
                Ok(notes) => (before, notes),
                Err(error) => {
                    inner.disk_mut(name)?.wanted.qos = before;
                    return Err(error);
                }
            }
        };
        if let Err(error) = self.apply(name).await {
            self.registry.inner().disk_mut(name)?.wanted.qos = before;
            return Err(error);
        }
        self.registry.save().await?;
        notes.extend(self.rules().without_effect(self.registry.inner().disk(name)?));
        Ok(DiskQos { notes, ..self.disk(name)? })
    }

    async fn set_policy(&self, name: &str, patch: &QosPatch) -> Result<StoragePolicy> {
        check_name(name).map_err(|error| invalid!("'{name}' cannot be a storage policy's name: {error}"))?;
        if patch.policy.is_some() {
            return Err(ApiError::invalid("a storage policy has no policy of its own"));
        }
        self.look_at_peaks().await;
        let disks = {
            let mut rules = self.rules();
            let inner = self.registry.inner();
            let before = rules.policies.get(name).copied();
            if before.is_none() && rules.policies.len() >= POLICIES_MAX {
                return Err(conflict!("there are {POLICIES_MAX} storage policies, which is the maximum"));
            }
            let wanted = patched_qos(before.unwrap_or_default(), patch).map_err(ApiError::invalid)?;
            rules.policies.insert(name.to_owned(), wanted);
            if let Err(error) = rules.check_reservations(&inner) {
                match before {
                    Some(before) => _ = rules.policies.insert(name.to_owned(), before),
                    None => _ = rules.policies.remove(name),
                }
                return Err(error);
            }
            policy_view(&inner, name, wanted).disks
        };
        for disk in disks {
            if let Err(error) = self.apply(&disk).await {
                tracing::warn!("disk {disk}: cannot apply the storage policy {name} yet: {error}");
            }
        }
        self.registry.save().await?;
        let rules = self.rules();
        let inner = self.registry.inner();
        let notes = rules.all_without_effect(inner.disks.values().filter(|disk| follows(disk, name)));
        Ok(StoragePolicy { notes, ..policy_view(&inner, name, rules.policy(name)?) })
    }

    /// Sends the entitlement of an online disk to its shard. Several changes and the opening of the
    /// disk may call this function at the same time. The shard gets the latest entitlement last,
    /// because each call compares what it has sent with the present entitlement.
    pub(super) async fn apply(&self, name: &str) -> Result<()> {
        let mut sent = None;
        loop {
            let (shard, id, due) = {
                let rules = self.rules();
                let inner = self.registry.inner();
                let disk = inner.disk(name)?;
                let Ok(shard) = disk.shard() else { return Ok(()) };
                (shard, disk.id, rules.due(disk))
            };
            if sent == Some(due) {
                self.apply_control_of(name);
                return Ok(());
            }
            match shard.set_qos(id, engine_qos(due)).await {
                // The disk was closed in the meantime. The entitlement applies when it is opened.
                Err(ShardError::Command(CommandError::NoSuchDisk)) => return Ok(()),
                other => other?,
            }
            sent = Some(due);
        }
    }
}

impl Rules {
    /// Returns the entitlement of a new disk from hob.toml.
    fn first_of(&self, patch: &QosPatch) -> Result<DiskQosSpec> {
        let own = match patch.policy.as_deref() {
            Some(policy) => self.policy(policy)?,
            None => Qos::default(),
        };
        if patch.policy.is_some() && (QosPatch { policy: None, ..patch.clone() }) != QosPatch::default() {
            return Err(two_rules());
        }
        let own = patched_qos(own, patch).map_err(ApiError::invalid)?;
        Ok(DiskQosSpec { policy: patch.policy.clone(), own })
    }

    fn policy(&self, name: &str) -> Result<Qos> {
        self.policies.get(name).copied().ok_or_else(|| {
            not_found!("there is no storage policy '{name}'").hint("'hob qos policy list' shows all")
        })
    }

    /// Returns the storage policies for the state file.
    fn policy_states(&self) -> Vec<PolicyState> {
        let state = |(name, qos): (&String, &Qos)| PolicyState { name: name.clone(), qos: *qos };
        self.policies.iter().map(state).collect()
    }

    /// Checks that the sum of the reservations of each datastore's disks is not above the
    /// datastore's capacity. Returns a note about each datastore that has reservations and no known
    /// capacity.
    fn check_reservations(&self, inner: &Inner) -> Result<Vec<String>> {
        let mut notes = Vec::new();
        let mut reserved = BTreeMap::new();
        for disk in inner.disks.values() {
            let units = u64::from(self.due(disk).reservation);
            *reserved.entry(disk.datastore.as_deref()).or_insert(0) += units;
        }
        for store in self.datastores.values() {
            let reserved = reserved.get(&Some(store.spec.name.as_str())).copied().unwrap_or(0);
            let (capacity, how) = match (store.spec.capacity, store.peak) {
                (Some(capacity), _) => (capacity, "has a configured capacity of"),
                (None, peak) if peak > 0 => (peak, "has a measured capacity of"),
                _ => {
                    if reserved > 0 {
                        notes.push(format!(
                            "the capacity of datastore {0} is unknown, so it may be less than \
                            {reserved} units a second; set it with 'hob datastore set {0} \
                            --capacity', or measure it with --throttle auto",
                            store.spec.name
                        ));
                    }
                    continue;
                }
            };
            if reserved > u64::from(capacity) {
                return Err(conflict!(
                    "reservations on datastore {} would total {reserved} units a second, and it \
                    {how} {capacity}",
                    store.spec.name
                )
                .hint(
                    "reserve less, or set the capacity of the datastore with 'hob datastore set --capacity'",
                ));
            }
        }
        Ok(notes)
    }

    /// Returns a note if a disk has shares or a reservation, and its datastore is not throttled, so
    /// that shares and reservation have no effect.
    fn without_effect(&self, disk: &DiskEntry) -> Option<String> {
        let due = self.due(disk);
        let has_part = due.shares != Qos::default().shares || due.reservation > 0;
        let store = disk.datastore.as_deref().filter(|_| has_part)?;
        let spec = self.datastores.values().map(|entry| &entry.spec).find(|spec| spec.name == store)?;
        matches!(spec.control, ControlSpec::Off).then(|| {
            format!(
                "shares and reservations have no effect yet: datastore {store} is not throttled; \
                enable them with 'hob datastore set {store} --throttle auto'"
            )
        })
    }

    /// Returns the notes of [`without_effect`](Self::without_effect), one for each datastore.
    fn all_without_effect<'a>(&self, disks: impl Iterator<Item = &'a DiskEntry>) -> Vec<String> {
        let notes: BTreeSet<String> = disks.filter_map(|disk| self.without_effect(disk)).collect();
        notes.into_iter().collect()
    }

    /// Returns the sum of all reservations on a datastore, in units per second.
    fn reserved(&self, inner: &Inner, datastore: &str) -> u64 {
        let on_it = inner.disks.values().filter(|disk| disk.datastore.as_deref() == Some(datastore));
        on_it.map(|disk| u64::from(self.due(disk).reservation)).sum()
    }

    /// Returns the current entitlement of a disk.
    fn due(&self, disk: &DiskEntry) -> Qos {
        let Some(spec) = &disk.wanted.qos else { return Qos::default() };
        let of_policy = spec.policy.as_ref().and_then(|policy| self.policies.get(policy));
        of_policy.copied().unwrap_or(spec.own)
    }

    fn disk_view(&self, disk: &DiskEntry) -> DiskQos {
        DiskQos {
            disk: disk.wanted.name.clone(),
            datastore: disk.datastore.clone(),
            policy: disk.wanted.qos.as_ref().and_then(|spec| spec.policy.clone()),
            qos: self.due(disk),
            notes: Vec::new(),
        }
    }
}

fn policy_view(inner: &Inner, name: &str, qos: Qos) -> StoragePolicy {
    let disks = inner.disks.values().filter(|disk| follows(disk, name));
    let disks = disks.map(|disk| disk.wanted.name.clone()).collect();
    StoragePolicy { name: name.to_owned(), qos, disks, notes: Vec::new() }
}

/// Returns true if the disk follows this storage policy.
fn follows(disk: &DiskEntry, policy: &str) -> bool {
    disk.wanted.qos.as_ref().is_some_and(|spec| spec.policy.as_deref() == Some(policy))
}

fn two_rules() -> ApiError {
    ApiError::invalid("a disk with a storage policy cannot have its own shares, reservation or limits")
        .hint("pass either a storage policy, or shares, reservation and limits")
}

/// Converts an entitlement into the engine's type.
pub(super) fn engine_qos(qos: Qos) -> qos::DiskQos {
    let Qos { shares, reservation, limit, bytes_limit, flash_limit } = qos;
    let bytes_limit = bytes_limit.map(|limit| limit.bytes());
    qos::DiskQos {
        backing: Entitlement { shares, reservation, limit, bytes_limit },
        flash: Entitlement { shares, reservation: 0, limit: flash_limit, bytes_limit: None },
    }
}
