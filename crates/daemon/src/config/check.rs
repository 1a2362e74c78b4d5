//! The check of hob.toml, which finds all errors in one pass.
//!
//! [`check`] needs only the file. [`check_with`] also needs the saved state, because the file may
//! refer to pools and storage policies that were created by command. `check_with` also examines
//! files on this host.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hob_control::{Endpoint, Size, check_name};
use hob_storage::backing::below::{Object, Share, below};
use hob_storage::pool::is_segment_size;

use super::definitions::{self, PoolShape};
use super::source::{FINDINGS_MAX, Finding, Lines};
use super::{ClusterConfig, Config, DiskEntry, check_nbd};
use crate::exports::EXPORTS_MAX;
use crate::hardware::ARENA_BYTES_MAX;
use crate::image::check_format;
use crate::mount;
use crate::socket_access::SocketAccess;
use crate::state::State;
use crate::stripe;
use crate::vhost_user;

/// Maximum time for examining all files that hob.toml names.
const LOOK_MAX: Duration = Duration::from_secs(2);

/// Maximum length of a backing's address, such as `nbd://HOST/EXPORT`, in bytes.
const BACKING_CHARS_MAX: usize = 4096;

/// The errors that were found until now.
#[derive(Debug)]
pub(super) struct Findings<'a> {
    lines: &'a Lines,
    list: Vec<Finding>,
}

impl<'a> Findings<'a> {
    pub(super) fn new(lines: &'a Lines) -> Findings<'a> {
        Findings { lines, list: Vec::new() }
    }

    /// Adds an error, with the line of the key at `path`.
    pub(super) fn add(&mut self, path: &str, what: impl Into<String>) {
        if !self.is_full() {
            self.list.push(Finding { line: self.lines.of(path), what: what.into() });
        }
    }

    /// Returns true if no further error is kept.
    fn is_full(&self) -> bool {
        self.list.len() >= FINDINGS_MAX
    }

    /// Returns the errors in the order of their lines.
    pub(super) fn finish(mut self) -> Vec<Finding> {
        self.list.sort();
        self.list.dedup();
        self.list
    }
}

/// Checks hob.toml alone, without other files.
pub(super) fn check(config: &Config, found: &mut Findings<'_>) {
    if !(1..=64).contains(&config.shards) {
        found.add("shards", format!("shards = {}: the value must be 1 to 64", config.shards));
    }
    config.control.check(found);
    config.migrate.check(found);
    config.peers.check(found);
    if let Some(cluster) = &config.cluster {
        ClusterConfig::check(cluster, found);
    }
    check_nbd(&config.nbd, &config.allow, &mut |path, what| found.add(path, what));
    check_limits(config, found);
    check_sockets(config, found);
    check_pools(config, found);
    for (number, disk) in config.disks.iter().enumerate() {
        check_disk(number, disk, found);
    }
    for (number, policy) in config.policies.iter().enumerate() {
        let at = format!("storage_policy.{number}");
        if policy.qos.policy.is_some() {
            let what = "a storage policy cannot use another storage policy";
            found.add(&format!("{at}.qos.policy"), format!("storage policy {}: {what}", policy.name));
        } else if let Err(what) = definitions::qos_fault(&policy.qos) {
            found.add(&format!("{at}.qos"), format!("storage policy {}: {what}", policy.name));
        }
    }
    for (number, store) in config.datastores.iter().enumerate() {
        if let Err(what) = store.settings() {
            found.add(&format!("datastore.{number}"), format!("datastore {}: {what}", store.name));
        }
    }
    check_all_names(config, found);
}

/// Checks the file together with the saved state, and with the files on this host that it names.
pub(super) fn check_with(config: &Config, state: &State, found: &mut Findings<'_>) {
    let mut pools: BTreeMap<&str, PoolShape> = BTreeMap::new();
    for pool in &config.pools {
        pools.insert(&pool.name, PoolShape { devices: pool.devices.len(), peers: 0 });
    }
    for pool in &state.pools {
        let peers = pool.peers.len();
        pools.insert(
            &pool.name,
            PoolShape { devices: pool.devices.len() - peers.min(pool.devices.len()), peers },
        );
    }
    let policies: BTreeSet<&str> = config
        .policies
        .iter()
        .map(|policy| policy.name.as_str())
        .chain(state.policies.iter().map(|policy| policy.name.as_str()))
        .collect();
    for (number, disk) in config.disks.iter().enumerate() {
        let name = &disk.name;
        if let Some(cache) = &disk.cache {
            let at = format!("disk.{number}.cache.pool");
            match pools.get(cache.pool.as_str()) {
                None => found
                    .add(&at, format!("disk {name}: there is no pool '{}'; {}", cache.pool, known(&pools))),
                Some(shape) => {
                    if let Some(what) = definitions::fault_in_pool(cache, *shape) {
                        found.add(&format!("disk.{number}.cache"), format!("disk {name}: {what}"));
                    }
                }
            }
        }
        if let Some(policy) = disk.qos.as_ref().and_then(|qos| qos.policy.as_deref())
            && !policies.contains(policy)
        {
            let at = format!("disk.{number}.qos.policy");
            found.add(&at, format!("disk {name}: there is no storage policy '{policy}'"));
        }
    }
    check_files(config, state, found);
}

fn known(pools: &BTreeMap<&str, PoolShape>) -> String {
    if pools.is_empty() {
        return "define the pool as a [[pool]], or create it with 'hob pool create'".to_owned();
    }
    format!("there are {}", pools.keys().copied().collect::<Vec<_>>().join(", "))
}

fn check_limits(config: &Config, found: &mut Findings<'_>) {
    let limits = &config.limits;
    let table = [
        ("connections_max", limits.connections_max as u64, 1, 65_536),
        ("buffer_bytes_max", limits.buffer_bytes_max.bytes(), 64 << 20, ARENA_BYTES_MAX as u64),
        ("backing_wait_ms_max", limits.backing_wait_ms_max.unwrap_or_default(), 0, 86_400_000),
        ("flash_stall_ms_max", limits.flash_stall_ms_max, 10, 600_000),
        ("flash_errors_max", u64::from(limits.flash_errors_max), 1, 1_000_000),
        ("verify_bytes_per_s", limits.verify_bytes_per_s.bytes(), 1 << 20, 64 << 30),
        ("qos_unit", limits.qos_unit.bytes(), 512, 1 << 30),
    ];
    for (name, value, least, most) in table {
        if !(least..=most).contains(&value) {
            let text = |value: u64| match name {
                "buffer_bytes_max" | "verify_bytes_per_s" | "qos_unit" => Size(value).to_string(),
                _ => value.to_string(),
            };
            let (value, least, most) = (text(value), text(least), text(most));
            let what = format!("limits.{name} = {value}: the value must be {least} to {most}");
            found.add(&format!("limits.{name}"), what);
        }
    }
    if limits.backing_timeout.is_some() && limits.backing_wait_ms_max.is_some() {
        let what = "backing_timeout and backing_wait_ms_max are the same limit: set backing_timeout only";
        found.add("limits.backing_wait_ms_max", what);
    }
}

fn check_pools(config: &Config, found: &mut Findings<'_>) {
    let mut devices: BTreeMap<&str, &str> = BTreeMap::new();
    for (number, pool) in config.pools.iter().enumerate() {
        let name = &pool.name;
        if let Some(size) = pool.segment_size.filter(|size| !is_segment_size(size.bytes())) {
            found.add(
                &format!("pool.{number}.segment_size"),
                format!(
                    "[[pool]] '{name}': segment_size = {size}: the value must be a power of two \
                    from 1M to 1G"
                ),
            );
        }
        if pool.devices.is_empty() {
            found.add(
                &format!("pool.{number}.devices"),
                format!("[[pool]] '{name}': the list of devices is empty"),
            );
        }
        for (place, path) in pool.devices.iter().enumerate() {
            let at = format!("pool.{number}.devices.{place}");
            if !path.starts_with('/') {
                found.add(&at, format!("[[pool]] '{name}': device '{path}' is not an absolute path"));
            }
            if let Some(other) = devices.insert(path, name) {
                let whom = if other == name { "it".to_owned() } else { format!("pool '{other}'") };
                found.add(&at, format!("[[pool]] '{name}': {whom} already has the device {path}"));
            }
        }
    }
}

fn check_disk(number: usize, disk: &DiskEntry, found: &mut Findings<'_>) {
    let (name, at) = (&disk.name, format!("disk.{number}"));
    let mut add = |key: &str, what: String| found.add(&format!("{at}.{key}"), format!("disk {name}: {what}"));
    match disk.backing.len() {
        0 => add("backing", "the disk needs a backing: a path or a URI".to_owned()),
        bytes if bytes > BACKING_CHARS_MAX => add(
            "backing",
            format!(
                "the path or URI of the backing has {bytes} bytes; hob accepts at most {BACKING_CHARS_MAX} bytes"
            ),
        ),
        _ => {}
    }
    if let Err(what) = check_format(&disk.backing, disk.format.as_deref()) {
        add("format", what);
    }
    if disk.parent_cache.is_some() && !disk.share_parent {
        add("parent_cache", "parent_cache needs share_parent = true".to_owned());
    }
    if let Err(what) = stripe::chosen(disk.stripe) {
        add("stripe", what);
    }
    if let Some(store) = &disk.datastore
        && let Err(error) = check_name(store)
    {
        add("datastore", format!("'{store}' cannot be a datastore's name: {error}"));
    }
    if let Some(path) = &disk.vhost_user
        && let Err(what) = vhost_user::check_path(path)
    {
        add("vhost_user", what);
    }
    if let Some(path) = &disk.fuse
        && let Err(what) = mount::check_path(path)
    {
        add("fuse", format!("{path} cannot be a disk's file: {what}"));
    }
    if disk.exports.len() > EXPORTS_MAX {
        let (count, at) = (disk.exports.len(), format!("export.{EXPORTS_MAX}"));
        add(&at, format!("it has {count} additional exports, and {EXPORTS_MAX} is the maximum"));
    }
    for (place, export) in disk.exports.iter().enumerate() {
        if let Some(path) = &export.vhost_user
            && let Err(what) = vhost_user::check_path(path)
        {
            add(&format!("export.{place}.vhost_user"), what);
        }
        if let Some(path) = &export.fuse
            && let Err(what) = mount::check_path(path)
        {
            add(&format!("export.{place}.fuse"), format!("{path} cannot be an export's file: {what}"));
        }
    }
    if let Some(qos) = &disk.qos
        && let Err(what) = definitions::qos_fault(qos)
    {
        add("qos", what);
    }
    if let Some(cache) = &disk.cache {
        for (key, what) in definitions::cache_faults(cache) {
            add(&format!("cache.{key}"), what);
        }
    }
}

fn check_all_names(config: &Config, found: &mut Findings<'_>) {
    let numbered = |kind: &'static str, names: Vec<&str>| {
        let at = |(number, name): (usize, &str)| (format!("{kind}.{number}.name"), name.to_owned());
        names.into_iter().enumerate().map(at).collect::<Vec<_>>()
    };
    let pools = numbered("pool", config.pools.iter().map(|pool| pool.name.as_str()).collect());
    check_names("pool", pools, found);
    let policies = config.policies.iter().map(|policy| policy.name.as_str()).collect();
    check_names("storage_policy", numbered("storage_policy", policies), found);
    let stores = config.datastores.iter().map(|store| store.name.as_str()).collect();
    check_names("datastore", numbered("datastore", stores), found);
    // Disks and additional exports share one set of names.
    let mut disks = numbered("disk", config.disks.iter().map(|disk| disk.name.as_str()).collect());
    for (number, disk) in config.disks.iter().enumerate() {
        let exports = disk.exports.iter().enumerate();
        disks.extend(
            exports.map(|(at, export)| (format!("disk.{number}.export.{at}.name"), export.name.clone())),
        );
    }
    check_names("disk", disks, found);
}

fn check_names(kind: &str, names: Vec<(String, String)>, found: &mut Findings<'_>) {
    let mut seen = BTreeSet::new();
    for (at, name) in names {
        let kind = if at.contains(".export.") { "disk.export" } else { kind };
        if let Err(error) = check_name(&name) {
            found.add(&at, format!("[[{kind}]] '{name}': {error}"));
        }
        if !seen.insert(name.clone()) {
            let why = if kind == "disk.export" { ": disks and exports need different names" } else { "" };
            found.add(&at, format!("[[{kind}]] '{name}' appears twice{why}"));
        }
    }
}

/// Checks that each address, and each path of a socket or a disk's file, is used once.
fn check_sockets(config: &Config, found: &mut Findings<'_>) {
    if let Err(what) = SocketAccess::of(&config.sockets()) {
        found.add(what.key, what.to_string());
    }
    let mut uses: Vec<(String, String)> = Vec::new();
    let text = |endpoint: &Endpoint| match endpoint {
        Endpoint::Unix(path) => path.to_string_lossy().into_owned(),
        tcp @ Endpoint::Tcp { .. } => tcp.to_string(),
    };
    let numbered = |key: &str, all: &[Endpoint]| {
        let at = |(number, endpoint): (usize, &Endpoint)| (format!("{key}.{number}"), text(endpoint));
        all.iter().enumerate().map(at).collect::<Vec<_>>()
    };
    uses.extend(numbered("listen", &config.listen));
    uses.extend(numbered("control.listen", &config.control.listen));
    let nbd = config.nbd.iter().enumerate();
    uses.extend(nbd.map(|(number, entry)| (format!("nbd.{number}.listen"), text(&entry.listen))));
    for (number, disk) in config.disks.iter().enumerate() {
        let mut add = |key: String, path: &Option<String>| {
            uses.extend(path.clone().map(|path| (format!("disk.{number}.{key}"), path)));
        };
        add("vhost_user".to_owned(), &disk.vhost_user);
        add("fuse".to_owned(), &disk.fuse);
        for (place, export) in disk.exports.iter().enumerate() {
            add(format!("export.{place}.vhost_user"), &export.vhost_user);
            add(format!("export.{place}.fuse"), &export.fuse);
        }
    }
    let mut seen: BTreeMap<String, String> = BTreeMap::new();
    for (at, path) in uses {
        if let Some(other) = seen.insert(path.clone(), at.clone()) {
            found.add(
                &at,
                format!("{} and {} both use {path}", readable(config, &other), readable(config, &at)),
            );
        }
    }
}

/// Returns a key in the words of the file's author: `disk.0.vhost_user` becomes `vhost_user of disk
/// web`.
fn readable(config: &Config, at: &str) -> String {
    let disk = at.strip_prefix("disk.").and_then(|rest| rest.split_once('.'));
    match disk.and_then(|(number, key)| Some((config.disks.get(number.parse::<usize>().ok()?)?, key))) {
        Some((disk, key)) => format!("{key} of disk {}", disk.name),
        None => at.to_owned(),
    }
}

/// Checks that two disks share a file only if both are read-only, and that no disk is on a pool's
/// device. Finds files that are shared through loop devices and partitions too.
fn check_files(config: &Config, state: &State, found: &mut Findings<'_>) {
    struct Use {
        at: String,
        what: String,
        path: PathBuf,
        /// True if this disk only reads the file, so that other disks may read the file too.
        shares: bool,
    }
    let mut uses = Vec::new();
    for (number, pool) in config.pools.iter().enumerate() {
        uses.extend(pool.devices.iter().enumerate().map(|(place, path)| Use {
            at: format!("pool.{number}.devices.{place}"),
            what: format!("pool '{}'", pool.name),
            path: path.into(),
            shares: false,
        }));
    }
    let file = |backing: &str| Some(PathBuf::from(backing)).filter(|path| path.is_absolute());
    for (number, disk) in config.disks.iter().enumerate() {
        uses.extend(file(&disk.backing).map(|path| Use {
            at: format!("disk.{number}.backing"),
            what: format!("disk {}", disk.name),
            path,
            shares: disk.read_only,
        }));
    }
    // Disks and pools that were added by command count too. If hob.toml has an entry of the same
    // name, the entry in hob.toml decides.
    for pool in state.pools.iter().filter(|pool| !config.pools.iter().any(|own| own.name == pool.name)) {
        let peers: Vec<&Path> = pool.peers.iter().map(|peer| peer.path.as_path()).collect();
        let own = pool.devices.iter().filter(|path| !peers.contains(&path.as_path()));
        uses.extend(own.map(|path| Use {
            at: String::new(),
            what: format!("pool '{}'", pool.name),
            path: path.clone(),
            shares: false,
        }));
    }
    let own: BTreeSet<&str> = config.disks.iter().map(|disk| disk.name.as_str()).collect();
    for disk in state.disks.iter().filter(|disk| !own.contains(disk.name.as_str())) {
        uses.extend(file(&disk.backing).map(|path| Use {
            at: String::new(),
            what: format!("disk {}", disk.name),
            path,
            shares: disk.read_only,
        }));
    }
    let identities = identities(uses.iter().map(|entry| entry.path.clone()).collect());
    // Readers are separate, because thousands of disks may read one file.
    let (mut readers, mut exclusive) = (LocationIndex::default(), LocationIndex::default());
    for (number, (this, location)) in uses.iter().zip(&identities).enumerate() {
        let mut overlapping = exclusive.overlapping(location);
        if this.shares {
            readers.add(number, location);
        } else {
            overlapping.extend(readers.overlapping(location));
            exclusive.add(number, location);
        }
        for other in overlapping.into_iter().map(|other| &uses[other]) {
            if this.at.starts_with("pool.") && other.at.starts_with("pool.") && this.path == other.path {
                // `check_pools` reports this error.
                continue;
            }
            let at = if this.at.is_empty() { &other.at } else { &this.at };
            found.add(
                at,
                format!("{} and {} are on the same file: {}", other.what, this.what, this.path.display()),
            );
            if found.is_full() {
                return;
            }
        }
    }
}

/// Returns the identities of files, which do not depend on their names. A file that is missing, or
/// whose filesystem does not answer in time, is identified by its path.
fn identities(paths: Vec<PathBuf>) -> Vec<DataLocation> {
    // A hung filesystem must not prevent the daemon's start.
    let found = query_all(paths.clone(), LOOK_MAX, |path| place_of(path));
    let by_path = |path| DataLocation::of(Identity::Path(path));
    found.into_iter().zip(paths).map(|(place, path)| place.unwrap_or_else(|| by_path(path))).collect()
}

/// Returns the location of an existing file or block device.
fn place_of(path: &Path) -> Option<DataLocation> {
    let metadata = std::fs::metadata(path).ok()?;
    let mut place = DataLocation::of(Identity::of(&metadata));
    if metadata.file_type().is_block_device() {
        for (object, share) in below(metadata.rdev()) {
            let identity = match object {
                Object::Device(number) => Some(Identity::Device(number)),
                Object::Path(path) => std::fs::metadata(path).ok().as_ref().map(Identity::of),
            };
            match share {
                Share::Whole => place.whole.extend(identity),
                Share::Part => place.part.extend(identity),
            }
        }
    }
    Some(place)
}

/// Where the data of a disk or pool device is stored: a file or block device, and the objects below
/// it.
#[derive(Clone, Debug)]
struct DataLocation {
    /// Files and block devices that have exactly this data.
    whole: Vec<Identity>,
    /// Larger files and block devices that contain this data, such as the disk of a partition.
    part: Vec<Identity>,
}

impl DataLocation {
    fn of(identity: Identity) -> DataLocation {
        DataLocation { whole: vec![identity], part: Vec::new() }
    }
}

/// The numbers of the users of objects, by object.
#[derive(Debug, Default)]
struct LocationIndex {
    whole: BTreeMap<Identity, Vec<usize>>,
    part: BTreeMap<Identity, Vec<usize>>,
}

impl LocationIndex {
    fn add(&mut self, user: usize, location: &DataLocation) {
        for (index, identities) in [(&mut self.whole, &location.whole), (&mut self.part, &location.part)] {
            identities.iter().for_each(|it| index.entry(it.clone()).or_default().push(user));
        }
    }

    /// Returns the users that have data in common with `location`. Two parts of one object are
    /// assumed to have no data in common.
    fn overlapping(&self, location: &DataLocation) -> BTreeSet<usize> {
        let with_whole = location.whole.iter().chain(&location.part).filter_map(|it| self.whole.get(it));
        let with_part = location.whole.iter().filter_map(|it| self.part.get(it));
        with_whole.chain(with_part).flatten().copied().collect()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Identity {
    Path(PathBuf),
    File(u64, u64),
    Device(u64),
}

impl Identity {
    fn of(metadata: &Metadata) -> Identity {
        match metadata.rdev() {
            0 => Identity::File(metadata.dev(), metadata.ino()),
            device => Identity::Device(device),
        }
    }
}

mod answers;
mod host;
mod places;
#[cfg(test)]
mod tests;

use answers::query_all;
pub(super) use host::check_host;
pub(super) use places::check_places;
