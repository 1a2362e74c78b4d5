//! Datastores: the storage that holds the backings of disks, and the limits on I/O in flight to it.
//!
//! The datastore of a file is its filesystem, named after the mount point. The datastore of an NBD
//! export is its server. An operator may name another datastore for a disk.
//!
//! Shares and reservations work among the disks of one shard. All disks of a datastore with a name
//! or a setting therefore go to the same shard. Disks that were already open on other shards stay
//! on these shards. Then each shard has its own window of I/O in flight, and the shards agree on
//! their parts ([`agreement`](super::agreement)).

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use hob_control::{Datastore, DatastorePatch};
use hob_engine::qos::{Control, Late, Resource};
use hob_engine::units::DatastoreId;
use hob_nbd::uri::{Address, NbdUri};
use hob_storage::backing::objects;

use super::{QosService, Rules};
use crate::api_error::{ApiError, Result, conflict, not_found};
use crate::services::registry::{DiskPhase, Inner};
use crate::shard_api::ShardHandle;
use crate::state::{ControlSpec, DatastoreState};

/// Maximum number of datastores.
const DATASTORES_MAX: u16 = 4096;

/// A datastore.
#[derive(Debug)]
pub(super) struct DatastoreEntry {
    pub(super) spec: DatastoreState,
    /// Highest rate that was measured while the datastore was throttled, units per second.
    pub(super) peak: u32,
    /// True if an operator assigned a disk to this datastore by name.
    is_named: bool,
    /// Shard of the datastore's first disk, if its disks must share a shard.
    pub(super) home: Option<ShardHandle>,
    /// Rate per share in the last agreement.
    pub(super) level: Option<f64>,
    /// Counts the users of the datastore: each [`DatastoreUse`] has a clone.
    uses: Arc<()>,
}

/// Keeps a datastore and its id in existence while a disk of the datastore is being opened, or
/// while a flash lease is served. An open disk needs no such value, because its entry has the name
/// of the datastore.
#[derive(Clone, Debug)]
pub(in crate::services) struct DatastoreUse {
    _of: Arc<()>,
}

impl DatastoreEntry {
    /// Creates the entry of a datastore (storage that several backings share) with these settings.
    pub(super) fn new(spec: DatastoreState) -> DatastoreEntry {
        DatastoreEntry { spec, peak: 0, is_named: false, home: None, level: None, uses: Arc::default() }
    }

    /// Returns true if an operator assigned a disk to the datastore by name, or changed the
    /// datastore's settings.
    pub(super) fn is_meant(&self) -> bool {
        self.is_named || self.is_tuned()
    }

    /// Returns true if the settings of the datastore are not the default.
    fn is_tuned(&self) -> bool {
        self.spec != DatastoreState::new(&self.spec.name)
    }

    fn has_uses(&self) -> bool {
        Arc::strong_count(&self.uses) > 1
    }
}

impl QosService {
    pub(in crate::services) fn datastore_settings(&self, name: &str) -> Option<DatastoreState> {
        self.rules().find_datastore(name).ok().map(|(_, store)| store.spec.clone())
    }

    /// Returns the names of the datastores whose settings are not the default.
    pub(in crate::services) fn tuned_datastores(&self) -> Vec<String> {
        let rules = self.rules();
        let tuned = rules.datastores.values().filter(|store| store.is_tuned());
        tuned.map(|store| store.spec.name.clone()).collect()
    }

    /// Returns the id of a datastore, which is valid while the [`DatastoreUse`] exists, and then as
    /// long as a disk names the datastore. Creates the datastore if it does not exist. `is_named`
    /// is true if an operator assigned a disk to the datastore by name.
    pub(in crate::services) fn datastore_id(
        &self,
        name: &str,
        is_named: bool,
    ) -> Result<(DatastoreId, DatastoreUse)> {
        let mut rules = self.rules();
        let id = rules.datastore_id(name, is_named)?;
        Ok((id, DatastoreUse { _of: rules.datastores[&id.0].uses.clone() }))
    }

    /// Removes the datastores with default settings that no disk uses any more.
    pub(in crate::services) fn drop_unused_datastores(&self) {
        let mut rules = self.rules();
        let inner = self.registry.inner();
        let used: BTreeSet<&str> =
            inner.disks.values().filter_map(|disk| disk.datastore.as_deref()).collect();
        let is_unused = |store: &DatastoreEntry| {
            !store.is_tuned() && !store.has_uses() && !used.contains(store.spec.name.as_str())
        };
        let unused = rules.datastores.iter().filter(|(_, store)| is_unused(store));
        let unused: Vec<u16> = unused.map(|(id, _)| *id).collect();
        for id in unused {
            rules.datastores.remove(&id);
            // The next datastore with this id starts without a throttle.
            for shard in &self.registry.shards {
                shard.control(Resource::Datastore(DatastoreId(id)), Control::Off);
            }
        }
    }

    /// Returns the shard for another disk of a datastore. Shares work among the disks of one shard.
    /// Therefore disks of a named or configured datastore go to the shard of its first disk; other
    /// disks go to the shard with the fewest disks.
    pub(in crate::services) fn shard_for(&self, datastore: DatastoreId) -> ShardHandle {
        let mut rules = self.rules();
        let quietest = self.registry.quietest_shard();
        let Some(store) = rules.datastores.get_mut(&datastore.0) else { return quietest };
        if store.is_meant() { store.home.get_or_insert(quietest).clone() } else { quietest }
    }

    pub(crate) async fn datastores(&self) -> Result<Vec<Datastore>> {
        let names: Vec<String> = {
            let rules = self.rules();
            rules.datastores.values().map(|store| store.spec.name.clone()).collect()
        };
        let mut views = Vec::new();
        for name in names {
            match self.datastore(&name).await {
                Ok(view) => views.push(view),
                // The datastore was removed in the meantime.
                Err(_) if self.datastore_settings(&name).is_none() => {}
                Err(error) => return Err(error),
            }
        }
        views.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(views)
    }

    pub(crate) async fn datastore(&self, name: &str) -> Result<Datastore> {
        let (mut view, id, shards) = {
            let rules = self.rules();
            let inner = self.registry.inner();
            let (id, store) = rules.find_datastore(name)?;
            let spec = &store.spec;
            let on_it = inner.disks.values().filter(|disk| disk.datastore.as_deref() == Some(name));
            let view = Datastore {
                name: name.to_owned(),
                control: spec.control.to_string(),
                latency_ms: spec.latency_ms,
                capacity: spec.capacity,
                peak: store.peak,
                reserved: u32::try_from(rules.reserved(&inner, name)).unwrap_or(u32::MAX),
                disks: on_it.map(|disk| disk.wanted.name.clone()).collect(),
                window: None,
                in_flight: 0,
                waiting: 0,
                latency_ns: 0,
                knee_ns: None,
            };
            (view, id, rules.shards_of(&inner, name))
        };
        let mut peak = 0;
        for (shard, _) in shards {
            let state = shard.resource(Resource::Datastore(id)).await?;
            view.in_flight += state.window.in_flight;
            view.waiting += state.waiting as u64;
            view.latency_ns = view.latency_ns.max(state.window.latency_ns);
            peak += state.window.peak;
            view.knee_ns = view.knee_ns.max(state.window.knee_ns);
            if let Some(size) = state.window.size {
                view.window = Some(view.window.unwrap_or(0) + size);
            }
        }
        view.peak = view.peak.max(peak);
        if let Some(store) = self.rules().datastores.get_mut(&id.0).filter(|store| store.spec.name == name) {
            store.peak = view.peak;
        }
        Ok(view)
    }

    /// Changes the control and the capacity of a datastore.
    pub(crate) async fn datastore_set(&self, name: String, patch: DatastorePatch) -> Result<Datastore> {
        let service = self.clone();
        self.tasks
            .run("datastore set", name.clone(), async move {
                let _use = {
                    let mut rules = service.rules();
                    let (id, store) = rules.find_datastore(&name)?;
                    let in_use = DatastoreUse { _of: store.uses.clone() };
                    let spec = store.spec.patched(&patch).map_err(ApiError::invalid)?;
                    let reserved = rules.reserved(&service.registry.inner(), &name);
                    if let Some(capacity) = spec.capacity.filter(|capacity| u64::from(*capacity) < reserved) {
                        return Err(conflict!(
                            "the disks of the datastore have reservations of {reserved} units a \
                            second, which is more than {capacity}"
                        )
                        .hint("lower their reservations first; 'hob qos show' lists them"));
                    }
                    rules.datastores.get_mut(&id.0).expect("it was just found").spec = spec;
                    in_use
                };
                service.apply_control(&name);
                service.registry.save().await?;
                service.datastore(&name).await
            })
            .await
    }

    /// Applies the control of a disk's datastore after the disk was opened or its shares changed.
    pub(in crate::services) fn apply_control_of(&self, disk: &str) {
        let datastore = self.registry.inner().disk(disk).ok().and_then(|disk| disk.datastore.clone());
        datastore.into_iter().for_each(|datastore| self.apply_control(&datastore));
    }

    /// Sends the limits of a datastore to all shards that serve disks of the datastore.
    pub(in crate::services) fn apply_control(&self, datastore: &str) {
        let rules = self.rules();
        let Ok((id, store)) = rules.find_datastore(datastore) else { return };
        let shards = rules.shards_of(&self.registry.inner(), datastore);
        let all: u64 = shards.iter().map(|(_, shares)| shares).sum();
        for (shard, shares) in &shards {
            let threshold_ns = u64::from(store.spec.latency_ms) * 1_000_000;
            let part = |whole: u64| (whole * shares).div_ceil(all.max(1));
            let control = match store.spec.control {
                ControlSpec::Off => Control::Off,
                ControlSpec::Depth(depth) => Control::Depth(part(u64::from(depth)) as u32),
                ControlSpec::Auto => {
                    Control::Latency { late: Late::Above(threshold_ns), weight_milli: part(1000) as u32 }
                }
                ControlSpec::Knee => {
                    Control::Latency { late: Late::PastKnee(threshold_ns), weight_milli: part(1000) as u32 }
                }
            };
            shard.control(Resource::Datastore(id), control);
        }
    }

    /// Measures the highest rate of datastores with control `auto` or `knee` and no configured
    /// capacity.
    pub(super) async fn look_at_peaks(&self) {
        let measured: Vec<String> = {
            let rules = self.rules();
            let is_measured =
                |spec: &&DatastoreState| spec.control.is_by_latency() && spec.capacity.is_none();
            let specs = rules.datastores.values().map(|store| &store.spec);
            specs.filter(is_measured).map(|spec| spec.name.clone()).collect()
        };
        for name in measured {
            if let Err(error) = self.datastore(&name).await {
                tracing::debug!("datastore {name}: {error}");
            }
        }
    }
}

impl Rules {
    /// Returns the shards that have disks of a datastore, with the sums of their shares.
    pub(super) fn shards_of(&self, inner: &Inner, datastore: &str) -> Vec<(ShardHandle, u64)> {
        let mut shards: Vec<(ShardHandle, u64)> = Vec::new();
        for disk in inner.disks.values().filter(|disk| disk.datastore.as_deref() == Some(datastore)) {
            let DiskPhase::Online(shard) = &disk.phase else { continue };
            let shares = u64::from(self.due(disk).shares);
            match shards.iter_mut().find(|(other, _)| other.is_same(shard)) {
                Some((_, sum)) => *sum += shares,
                None => shards.push((shard.clone(), shares)),
            }
        }
        shards
    }

    pub(super) fn find_datastore(&self, name: &str) -> Result<(DatastoreId, &DatastoreEntry)> {
        let found = self.datastores.iter().find(|(_, store)| store.spec.name == name);
        let (id, store) = found.ok_or_else(|| {
            not_found!("there is no datastore '{name}'").hint("'hob datastore list' shows all")
        })?;
        Ok((DatastoreId(*id), store))
    }

    fn datastore_id(&mut self, name: &str, is_named: bool) -> Result<DatastoreId> {
        if let Ok((id, _)) = self.find_datastore(name) {
            self.datastores.get_mut(&id.0).expect("it was just found").is_named |= is_named;
            return Ok(id);
        }
        let entry = DatastoreEntry::new(DatastoreState::new(name));
        self.add_datastore(DatastoreEntry { is_named, ..entry })
    }

    /// Adds a datastore with the lowest unused id.
    pub(super) fn add_datastore(&mut self, entry: DatastoreEntry) -> Result<DatastoreId> {
        let id = (0..DATASTORES_MAX).find(|id| !self.datastores.contains_key(id));
        let id =
            id.ok_or_else(|| conflict!("there are {DATASTORES_MAX} datastores, which is the maximum"))?;
        self.datastores.insert(id, entry);
        Ok(DatastoreId(id))
    }

    /// Returns the datastores with changed settings, for the state file.
    pub(super) fn datastore_states(&self) -> Vec<DatastoreState> {
        let tuned = self.datastores.values().filter(|store| store.is_tuned());
        tuned.map(|store| store.spec.clone()).collect()
    }
}

/// Returns the datastore of a backing to which no operator assigned a datastore. May block, because
/// it examines the filesystem.
pub(in crate::services) fn datastore_of(backing: &str) -> String {
    let named = match backing.parse().map(|uri: NbdUri| uri.address) {
        Ok(Address::Tcp { host, port }) => Some(format!("nbd-{host}-{port}")),
        Ok(Address::Unix { path }) => Some(format!("nbd{}", path.display())),
        Err(_) => match backing.split_once("://") {
            Some(("objects+file", path)) => mount_point(Path::new(path)),
            // All disks in a bucket are on one datastore, whatever their prefixes.
            Some((scheme, rest)) if objects::recognise(backing) => {
                Some(format!("{scheme}-{}", rest.split('/').next().unwrap_or_default()))
            }
            _ => mount_point(Path::new(backing)),
        },
    };
    plain(named.as_deref().unwrap_or(backing))
}

/// Returns the mount point of a file's filesystem.
fn mount_point(path: &Path) -> Option<String> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};

    let path = path.canonicalize().ok()?;
    let metadata = path.metadata().ok()?;
    if metadata.file_type().is_block_device() {
        return Some(path.to_string_lossy().into_owned());
    }
    let is_on_it = |path: &&Path| path.metadata().is_ok_and(|other| other.dev() == metadata.dev());
    let top = path.ancestors().take_while(is_on_it).last()?;
    Some(if top == Path::new("/") { "root".to_owned() } else { top.to_string_lossy().into_owned() })
}

/// Converts text into a valid name of a datastore: letters, digits, `.`, `_` and `-`.
pub(in crate::services) fn plain(text: &str) -> String {
    let sign = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    let name: String = text.trim_start_matches('/').chars().map(sign).collect();
    let name = name.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
    // The end of a long path identifies the file best.
    let start = name.len().saturating_sub(hob_control::NAME_CHARS_MAX);
    let name = name[start..].trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
    if name.is_empty() { "unknown".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datastores_have_names_that_can_be_typed() {
        for (text, name) in [
            ("/mnt/array1", "mnt-array1"),
            ("root", "root"),
            ("/dev/sdb", "dev-sdb"),
            ("nbd-::1-10809", "nbd---1-10809"),
            ("///", "unknown"),
        ] {
            assert_eq!(plain(text), name, "{text}");
            assert!(hob_control::check_name(&plain(text)).is_ok());
        }
        assert!(hob_control::check_name(&plain(&"/xy".repeat(100))).is_ok());
    }

    #[test]
    fn files_of_one_file_system_share_a_datastore() {
        let directory = tempfile::tempdir().unwrap();
        let paths = ["a", "b"].map(|name| directory.path().join(name));
        paths.iter().for_each(|path| std::fs::write(path, "x").unwrap());
        let stores = paths.map(|path| datastore_of(&path.to_string_lossy()));
        assert_eq!(stores[0], stores[1]);
        assert_ne!(datastore_of("nbd://one/disk"), datastore_of("nbd://other/disk"));
        assert_eq!(datastore_of("nbd://one/disk"), datastore_of("nbd://one/second"));
        assert_eq!(datastore_of("s3://vms/one?region=x"), datastore_of("s3://vms/two"));
        assert_eq!(datastore_of("objects+file:///etc"), datastore_of("/etc/passwd"));
    }
}
