//! `hob.toml`: listeners, I/O, limits, and the objects to create at start.
//!
//! Pools and disks defined here are created at start if they do not exist, and stored in the state
//! directory. Later changes of the file are applied by a reload and by `hob config apply`.

mod check;
mod cluster;
mod control;
mod definitions;
mod file;
mod last_valid;
mod migrate;
mod nbd;
mod peers;
mod source;

use std::path::{Path, PathBuf};
use std::time::Duration;

use hob_control::{
    BackingTimeout, CacheEnable, DatastorePatch, Endpoint, Export, PoolCreate, QosPatch, Size,
};
use hob_engine::qos::UNIT_BYTES_DEFAULT as QOS_UNIT_BYTES_DEFAULT;
use serde::{Deserialize, Serialize};

use super::allow::AllowEntry;
use super::hardware::{ARENA_BYTES_DEFAULT, RingKind};
use super::socket_access::{SocketSettings, mode_of};
use super::state::{DatastoreState, State};
use check::Findings;
pub(crate) use cluster::ClusterConfig;
pub use control::{ControlConfig, Role};
pub(crate) use last_valid::Accepted;
pub(crate) use migrate::{MigrateConfig, MigrationTls};
pub(crate) use nbd::check_nbd;
pub use nbd::{NbdEntry, NbdSecrets, NbdTlsFiles};
pub(crate) use peers::PeersConfig;
pub(crate) use source::{Finding, Lines};

/// Default state directory.
const STATE_DIR: &str = "/var/lib/hob";

/// Default socket of the control API.
pub const CONTROL_SOCKET: &str = "/run/hob/control.sock";

/// The contents of hob.toml.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Directory of state.json. Default: `/var/lib/hob`.
    #[serde(default = "default_state_dir")]
    pub(crate) state_dir: PathBuf,
    /// Addresses for NBD clients without TLS: `unix:PATH` or `tcp:HOST:PORT`.
    #[serde(default)]
    pub(crate) listen: Vec<Endpoint>,
    /// Listeners for NBD clients, optionally with TLS.
    #[serde(default)]
    pub(crate) nbd: Vec<NbdEntry>,
    /// Owner of the Unix sockets at which disks are served, by name or number.
    #[serde(default)]
    socket_owner: Option<String>,
    /// Group of the Unix sockets at which disks are served, by name or number.
    #[serde(default)]
    socket_group: Option<String>,
    /// Permission bits of the Unix sockets at which disks are served, octal.
    #[serde(default, deserialize_with = "mode_of")]
    socket_mode: Option<String>,
    /// Restricts disks to some NBD clients.
    #[serde(default)]
    pub(crate) allow: Vec<AllowEntry>,
    /// Interface for I/O: `auto` (the default), `io_uring` or `threads`.
    #[serde(default, deserialize_with = "ring_by_name")]
    pub(crate) ring: RingKind,
    /// Number of threads that serve I/O. Default: 1.
    #[serde(default = "default_shards")]
    pub(crate) shards: usize,
    /// Write all dirty data to the backings before the daemon exits. Default: false.
    #[serde(default)]
    pub(crate) drain_on_shutdown: bool,
    /// The control API.
    #[serde(default)]
    pub control: ControlConfig,
    /// Credentials of this host for migrations to other hosts.
    #[serde(default)]
    pub(crate) migrate: MigrateConfig,
    /// Flash that this host lends to other hosts, and settings for hosts that lend to it.
    #[serde(default)]
    pub(crate) peers: PeersConfig,
    /// The cluster that decides which host serves which disk.
    #[serde(default)]
    pub(crate) cluster: Option<ClusterConfig>,
    /// Limits of connections, memory and waiting times.
    #[serde(default)]
    pub(crate) limits: Limits,
    /// Pools to create at start if they do not exist.
    #[serde(default, rename = "pool")]
    pub(crate) pools: Vec<PoolCreate>,
    /// Disks to create at start if they do not exist.
    #[serde(default, rename = "disk")]
    pub(crate) disks: Vec<DiskEntry>,
    /// Storage policies to create at start if they do not exist.
    #[serde(default, rename = "storage_policy")]
    pub(crate) policies: Vec<PolicyEntry>,
    /// Initial settings of datastores.
    #[serde(default, rename = "datastore")]
    pub(crate) datastores: Vec<DatastoreEntry>,
    /// Line numbers of the file's keys.
    #[serde(skip)]
    lines: Lines,
    /// Path of the file, if there is one.
    #[serde(skip)]
    path: Option<PathBuf>,
    /// The text that was read.
    #[serde(skip)]
    text: String,
    /// Reason why the daemon does not use the current hob.toml; set if this `Config` is the last
    /// one that the daemon accepted.
    #[serde(skip)]
    refused: Option<String>,
}

/// Environment variable by which hob's own tests set the default of `flash_stall_ms_max`, and the
/// minimum of other times within which flash must answer. Flash of a test host may stall longer
/// than usual, because the host runs many tests at once.
const FLASH_STALL_VARIABLE: &str = "HOB_TEST_FLASH_STALL_MS_MAX";

/// Limits of clients, backings and flash. Fixed at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Limits {
    /// Maximum number of NBD connections of each listener; further connections wait in the kernel.
    /// Default: 256.
    pub(crate) connections_max: usize,
    /// Memory for data in flight, for each shard. Default: 64M.
    pub(crate) buffer_bytes_max: Size,
    /// Time that requests wait for their backing during an outage, for disks without a limit of
    /// their own: a duration or `forever`. Does not apply to RBD images, and to files and block
    /// devices only after `ESTALE`. Default: `forever`.
    pub(crate) backing_timeout: Option<BackingTimeout>,
    /// `backing_timeout` in milliseconds, as in earlier versions.
    pub(crate) backing_wait_ms_max: Option<u64>,
    /// Time that a flash I/O may take before caches bypass the device, milliseconds. Default: 1000.
    pub(crate) flash_stall_ms_max: u64,
    /// Number of failed I/Os after which a flash device is fenced. Default: 16.
    pub(crate) flash_errors_max: u32,
    /// Seconds after which a shard that does not respond ends the daemon, which systemd restarts; 0
    /// means never. Default: 20.
    pub(crate) shard_silence_s_max: u64,
    /// Rate at which hob compares each recovered cache with its backing if the backing may have
    /// changed, bytes per second. While guests wait for the backing, a quarter of this rate applies.
    /// Default: 128M.
    pub(crate) verify_bytes_per_s: Size,
    /// Unit of I/O in which shares, limits and reservations count. Default: 32K.
    pub(crate) qos_unit: Size,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections_max: 256,
            buffer_bytes_max: Size(ARENA_BYTES_DEFAULT as u64),
            backing_timeout: None,
            backing_wait_ms_max: None,
            flash_stall_ms_max: flash_stall_ms_default(),
            flash_errors_max: 16,
            // The time is less than the 30 s after which guests' SCSI and NVMe drivers reset a
            // disk, and less than WatchdogSec in packaging/hob.service. A turn of a shard takes
            // less than a hundredth of this time.
            shard_silence_s_max: 20,
            verify_bytes_per_s: Size(hob_engine::Limits::default().verify_bytes_per_s),
            qos_unit: Size(u64::from(QOS_UNIT_BYTES_DEFAULT)),
        }
    }
}

/// Returns the default of `flash_stall_ms_max`.
pub(crate) fn flash_stall_ms_default() -> u64 {
    flash_stall_ms(std::env::var(FLASH_STALL_VARIABLE).ok().as_deref())
}

/// Returns the default with this value of [`FLASH_STALL_VARIABLE`].
fn flash_stall_ms(of_tests: Option<&str>) -> u64 {
    of_tests.and_then(|text| text.parse().ok()).unwrap_or(1_000)
}

impl Limits {
    /// Returns the default backing timeout, for disks whose settings have none
    /// (docs/decisions/0045).
    pub(crate) fn backing_timeout(&self) -> BackingTimeout {
        let older =
            self.backing_wait_ms_max.map(|millis| BackingTimeout::Limit(Duration::from_millis(millis)));
        self.backing_timeout.or(older).unwrap_or(BackingTimeout::Forever)
    }

    /// Returns the limits of the engine of each shard.
    pub(crate) fn of_engine(&self) -> hob_engine::Limits {
        hob_engine::Limits {
            flash_errors_max: self.flash_errors_max,
            qos_unit_bytes: self.qos_unit.bytes() as u32,
            flash_stall_ms_max: self.flash_stall_ms_max,
            verify_bytes_per_s: self.verify_bytes_per_s.bytes(),
            ..hob_engine::Limits::default()
        }
    }
}

/// A disk to create at start if it does not exist.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiskEntry {
    /// Name of the disk.
    pub(crate) name: String,
    /// Path or URI of the disk's data.
    pub(crate) backing: String,
    /// Image format, if the backing is a path. Default: that of the file's extension, otherwise
    /// raw.
    pub(crate) format: Option<String>,
    /// Refuse writes. Default: false.
    #[serde(default)]
    pub(crate) read_only: bool,
    /// The cache of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cache: Option<CacheEnable>,
    /// Share cached blocks of the parent (backing file or RBD snapshot) with other clones of it.
    /// Default: false.
    #[serde(default)]
    pub(crate) share_parent: bool,
    /// Size of the parent's cache, if adding this disk creates that cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) parent_cache: Option<Size>,
    /// Time that requests of the disk wait for its backing during an outage. Does not apply to RBD
    /// images, and to files and block devices only after `ESTALE`. Default: as in `[limits]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) backing_timeout: Option<BackingTimeout>,
    /// Size of a full stripe of the backing's storage: the data of one stripe, without parity, such
    /// as `192K`. A multiple of 4K, at most 16M. Detected by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) stripe: Option<Size>,
    /// Name of the datastore: the storage that this backing shares with other backings. Detected by
    /// default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) datastore: Option<String>,
    /// Absolute path of the disk's vhost-user socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) vhost_user: Option<String>,
    /// Additional exports.
    #[serde(default, rename = "export")]
    pub(crate) exports: Vec<Export>,
    /// Absolute path at which the disk appears as a file, through FUSE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fuse: Option<String>,
    /// Make the disk a block device of this host, `/dev/hob/NAME`. Default: false.
    #[serde(default)]
    pub(crate) device: bool,
    /// Shares, limits and reservation of the disk, or the name of a storage policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) qos: Option<QosPatch>,
}

/// A storage policy to create at start if it does not exist.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PolicyEntry {
    /// Name of the storage policy.
    pub(crate) name: String,
    /// Shares, limits and reservation of each disk with this policy.
    pub(crate) qos: QosPatch,
}

/// Initial settings of a datastore.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DatastoreEntry {
    /// Name of the datastore.
    pub(crate) name: String,
    /// Throttling of the datastore: `off`, `auto`, `knee` or `depth:N`.
    pub(crate) throttle: Option<String>,
    /// Latency above which hob throttles the datastore, milliseconds. Default: 30.
    pub(crate) latency_ms: Option<u32>,
    /// Capacity of the datastore, units per second. Default: measured.
    pub(crate) capacity: Option<u32>,
}

impl DatastoreEntry {
    /// Returns the settings; those that the entry omits have their defaults.
    pub(crate) fn settings(&self) -> Result<DatastoreState, String> {
        let DatastoreEntry { name, throttle, latency_ms, capacity } = self.clone();
        let patch = DatastorePatch { control: throttle, latency_ms, capacity };
        DatastoreState::new(&name).patched(&patch)
    }
}

/// All errors in a configuration file, one per line.
#[derive(Debug, thiserror::Error)]
pub struct ConfigError {
    /// The file, if the text was read from one.
    path: Option<PathBuf>,
    findings: Vec<Finding>,
}

impl std::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (number, Finding { line, what }) in self.findings.iter().enumerate() {
            if number > 0 {
                writeln!(f)?;
            }
            match (&self.path, line) {
                (Some(path), Some(line)) => write!(f, "{}:{line}: {what}", path.display())?,
                (Some(path), None) => write!(f, "{}: {what}", path.display())?,
                (None, Some(line)) => write!(f, "line {line}: {what}")?,
                (None, None) => f.write_str(what)?,
            }
        }
        Ok(())
    }
}

impl Config {
    /// Reads and checks a hob.toml.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or all errors in it.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let in_file = |findings| ConfigError { path: Some(path.to_owned()), findings };
        let text = file::read(path).map_err(|error| {
            in_file(vec![Finding { line: None, what: format!("cannot be read: {error}") }])
        })?;
        let config = Config::read(&text, true).map_err(|error| in_file(error.findings))?;
        Ok(Config { path: Some(path.to_owned()), text, ..config })
    }

    /// Parses and checks the text of a hob.toml, but not the files that the text names.
    #[cfg(test)]
    pub(crate) fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::read(text, false)
    }

    fn read(text: &str, with_state: bool) -> Result<Config, ConfigError> {
        let (config, mut findings) = source::read(text);
        // After an entry that could not be parsed, errors in others may be spurious.
        let is_whole = findings.iter().all(Finding::is_unknown_key);
        if let Some(config) = config.as_ref().filter(|_| is_whole) {
            let mut found = Findings::new(&config.lines);
            check::check(config, &mut found);
            if with_state {
                // Unreadable state is reported separately when it is opened.
                let state = State::read(&config.state_dir).unwrap_or_default();
                check::check_with(config, &state, &mut found);
            }
            findings.extend(found.finish());
        }
        match config {
            Some(config) if findings.is_empty() => Ok(config),
            _ => Err(ConfigError { path: None, findings }),
        }
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns why the current file is not in use, if this is the last configuration that was
    /// accepted.
    pub(crate) fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// Returns the file's path as text.
    pub(crate) fn file_name(&self) -> String {
        self.path.as_ref().map(|path| path.display().to_string()).unwrap_or_default()
    }

    /// Returns the settings that take effect when the daemon starts or reloads. Each item is the
    /// key of a setting, and a text that differs if the setting differs.
    pub(crate) fn daemon_settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("state_dir", format!("{:?}", self.state_dir)),
            ("listen", format!("{:?}", self.listen)),
            ("nbd", format!("{:?}", self.nbd)),
            ("socket_owner, socket_group, socket_mode", format!("{:?}", self.sockets())),
            ("allow", format!("{:?}", self.allow)),
            ("ring", format!("{:?}", self.ring)),
            ("shards", self.shards.to_string()),
            ("drain_on_shutdown", self.drain_on_shutdown.to_string()),
            ("control", format!("{:?}", self.control)),
            ("migrate", format!("{:?}", self.migrate)),
            ("peers", format!("{:?}", self.peers)),
            ("cluster", format!("{:?}", self.cluster)),
            ("limits", format!("{:?}", self.limits)),
        ]
    }

    /// Returns the permissions of the disks' sockets.
    pub(crate) fn sockets(&self) -> SocketSettings {
        SocketSettings {
            owner: self.socket_owner.clone(),
            group: self.socket_group.clone(),
            mode: self.socket_mode.clone(),
        }
    }

    /// Overrides the socket settings of hob.toml with the given settings.
    pub fn set_sockets(&mut self, settings: SocketSettings) {
        let SocketSettings { owner, group, mode } = settings.or(self.sockets());
        (self.socket_owner, self.socket_group, self.socket_mode) = (owner, group, mode);
    }

    /// Checks the file together with the saved state and the files that it names.
    #[cfg(test)]
    pub(crate) fn check_with(&self, state: &State) -> Result<(), ConfigError> {
        let mut found = Findings::new(&self.lines);
        check::check_with(self, state, &mut found);
        self.outcome(found.finish())
    }

    /// Checks that the sockets of the file can be created, and that this host can serve its disks
    /// and pools.
    pub(crate) fn check_host(&self) -> Result<(), ConfigError> {
        let mut found = Findings::new(&self.lines);
        check::check_places(self, &mut found);
        // Unreadable state is reported separately.
        let state = State::read(&self.state_dir).unwrap_or_default();
        check::check_host(self, &state, &mut found);
        self.outcome(found.finish())
    }

    /// Returns an error about a file, user or group that hob.toml names, with the line of the key
    /// at `path`.
    pub(crate) fn error_at(&self, path: &str, error: &anyhow::Error) -> ConfigError {
        let mut what = error.to_string();
        for cause in error.chain().skip(1).map(ToString::to_string) {
            // Most messages contain their cause already.
            if !what.contains(&cause) {
                what = format!("{what}: {cause}");
            }
        }
        ConfigError { path: self.path.clone(), findings: vec![Finding { line: self.lines.of(path), what }] }
    }

    /// Returns one error with the messages of these errors, if there are any.
    pub(crate) fn refuse(&self, errors: Vec<ConfigError>) -> Result<(), ConfigError> {
        self.outcome(errors.into_iter().flat_map(|error| error.findings).collect())
    }

    fn outcome(&self, findings: Vec<Finding>) -> Result<(), ConfigError> {
        if findings.is_empty() { Ok(()) } else { Err(ConfigError { path: self.path.clone(), findings }) }
    }
}

/// Returns the interface for I/O with this name.
pub fn ring_kind(name: &str) -> Result<RingKind, String> {
    match name {
        "auto" => Ok(RingKind::Auto),
        "io_uring" => Ok(RingKind::IoUring),
        "threads" => Ok(RingKind::Threads),
        _ => Err("the value must be auto, io_uring or threads".to_owned()),
    }
}

fn ring_by_name<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<RingKind, D::Error> {
    let name = String::deserialize(deserializer)?;
    ring_kind(&name).map_err(|why| serde::de::Error::custom(format!("ring = '{name}': {why}")))
}

fn default_state_dir() -> PathBuf {
    STATE_DIR.into()
}

fn default_shards() -> usize {
    1
}

#[cfg(test)]
mod doc_examples;
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_file_has_the_defaults() {
        let config = Config::parse("").unwrap();
        assert_eq!(config.state_dir, Path::new("/var/lib/hob"));
        assert_eq!(config.control.listen, [Endpoint::Unix("/run/hob/control.sock".into())]);
        assert_eq!(config.limits, Limits::default());
        assert_eq!(config.shards, 1);
    }

    #[test]
    fn only_tests_change_the_default_of_a_flash_stall() {
        for (variable, default) in [(None, 1_000), (Some("120000"), 120_000), (Some("long"), 1_000)] {
            assert_eq!(flash_stall_ms(variable), default, "{variable:?}");
        }
    }

    #[test]
    fn everything_can_be_said() {
        let config = Config::parse(
            r#"
            state_dir = "/s"
            listen = ["unix:/n.sock", "tcp:0.0.0.0:10809"]
            ring = "threads"
            shards = 2
            drain_on_shutdown = true
            [control]
            listen = ["unix:/c.sock", "tcp:127.0.0.1:1"]
            token_file = "/t"
            socket_group = "hob"
            tls = { cert = "/c.crt", key = "/c.key", client_ca = "/ca.crt" }
            [[control.token]]
            file = "/r"
            role = "read-only"
            [[control.client]]
            certificate = "cn:ops"
            role = "admin"
            [[nbd]]
            listen = "tcp:0.0.0.0:10810"
            tls = { cert = "/c.crt", key = "/c.key", client_ca = "/ca.crt", required = false }
            [[nbd]]
            listen = "tcp:0.0.0.0:10811"
            tls = { cert = "/c.crt", key = "/c.key" }
            [[allow]]
            disks = ["d", "*"]
            clients = ["unix", "10.0.0.0/8", "cn:host7"]
            [limits]
            connections_max = 64
            buffer_bytes_max = "128M"
            flash_stall_ms_max = 2000
            flash_errors_max = 5
            verify_bytes_per_s = "16M"
            qos_unit = "4K"
            [[storage_policy]]
            name = "gold"
            qos = { shares = "high", reservation = 100 }
            [[datastore]]
            name = "array"
            throttle = "knee"
            capacity = 2000
            [[pool]]
            name = "p"
            devices = ["/a", "/b"]
            size = "1G"
            [[disk]]
            name = "d"
            backing = "/d.img"
            format = "vpc"
            fuse = "/run/d.img"
            vhost_user = "/run/d.sock"
            datastore = "array"
            qos = { policy = "gold" }
            [[disk.export]]
            name = "d-backup"
            read_only = true
            no_promote = true
            [disk.cache]
            pool = "p"
            size = "64M"
            block_size = "8K"
            policy = "lru"
            mode = "write-back"
            layout = "split:70"
            admission = "nth-access:3+not-sequential:512K"
            fill = "auto"
            destage_order = "coldest"
            dirty_start = 20
            dirty_stop = 10
            dirty_full = 60
            dirty_age_max = 0
            copies = "2-dirty"
            ordered = true
            persistent = true
            preset = "zbs"
            "#,
        )
        .unwrap();
        assert_eq!(config.ring, RingKind::Threads);
        let required = config.nbd.iter().map(|entry| entry.tls.as_ref().unwrap().required);
        assert_eq!(required.collect::<Vec<_>>(), [false, true]);
        assert_eq!((config.limits.buffer_bytes_max, config.limits.qos_unit), (Size(128 << 20), Size(4096)));
        let limits = config.limits.of_engine();
        assert_eq!((limits.flash_stall_ms_max, limits.flash_errors_max), (2000, 5));
        assert_eq!((limits.verify_bytes_per_s, limits.qos_unit_bytes), (16 << 20, 4096));
        assert_eq!(config.pools[0].size, Some(Size(1 << 30)));
        let settings = &config.disks[0].cache.as_ref().unwrap().settings;
        assert_eq!((settings.block_size, settings.dirty_age_max), (Some(Size(8192)), Some(0)));
        assert_eq!((settings.copies.as_deref(), settings.ordered), (Some("2-dirty"), Some(true)));
        assert!(config.drain_on_shutdown);
        assert_eq!(config.policies[0].qos.reservation, Some(100));
        assert_eq!(config.datastores[0].throttle.as_deref(), Some("knee"));
        assert_eq!(config.disks[0].qos.as_ref().unwrap().policy.as_deref(), Some("gold"));
        let backup =
            Export { name: "d-backup".into(), read_only: true, no_promote: true, ..Export::default() };
        assert_eq!(config.disks[0].exports, [backup]);
        assert_eq!(config.disks[0].fuse.as_deref(), Some("/run/d.img"));
        assert_eq!(config.disks[0].format.as_deref(), Some("vpc"));
    }

    #[test]
    fn words_of_commands_are_words_of_the_file() {
        let config = Config::parse(
            r#"
            [[pool]]
            name = "p"
            devices = ["/a"]
            flash_writes = "off"
            [[disk]]
            name = "d"
            backing = "/d.img"
            cache = { pool = "p", shares = "high" }
            "#,
        )
        .unwrap();
        assert_eq!(config.pools[0].flash_writes, None);
        assert_eq!(config.disks[0].cache.as_ref().unwrap().settings.shares, Some(2000));
        let text = "[[disk]]\nname = \"d\"\nbacking = \"/d\"\ncache = { pool = \"p\", shares = \"many\" }";
        let error = Config::parse(text).unwrap_err().to_string();
        assert!(error.contains("low, normal, high"), "{error}");
    }

    #[test]
    fn errors_have_one_line_with_the_line_number() {
        for (text, parts) in [
            ("listen = [\n", &["line "][..]),
            ("\nshard = 2\n", &["line 2", "shard"]),
            ("shards = \"two\"", &["line 1", "two"]),
            ("shards = 0", &["shards = 0"]),
            ("\n\nring = \"best\"", &["line 3", "best", "io_uring"]),
            ("listen = [\"/x.sock\"]", &["line 1", "unix:"]),
            ("[control]\nlisten = [\"tcp:h:1\"]", &["tcp:h:1", "control.tls"]),
            ("[limits]\nflash_errors_max = 0", &["flash_errors_max"]),
            ("[limits]\nverify_bytes_per_s = 0", &["verify_bytes_per_s = 0", "1M to 64G"]),
            ("[limits]\nverify_bytes_per_s = \"65G\"", &["verify_bytes_per_s = 65G", "1M to 64G"]),
            ("[[pool]]\nname = \"a\"\ndevices = []\nsise = 1", &["line 4", "sise"]),
            (
                "[[disk]]\nname = \"a\"\nbacking = \"/x\"\n[disk.cache]\npool = \"p\"\nsize = 1\nmod = \"x\"",
                &["line ", "mod"],
            ),
            ("[[pool]]\nname = \"a b\"\ndevices = []", &["a b"]),
            (
                "[[pool]]\nname = \"a\"\ndevices = []\nsegment_size = 0",
                &["'a'", "segment_size = 0", "1M to 1G"],
            ),
            ("[[pool]]\nname = \"a\"\ndevices = []\nsegment_size = \"3M\"", &["power of two"]),
            ("[[pool]]\nname = \"a\"\ndevices = []\nsegment_size = \"2G\"", &["1M to 1G"]),
            ("[[disk]]\nname = \"a\"\nbacking = \"/x\"\nvhost_user = \"vm.sock\"", &["vm.sock", "absolute"]),
            ("[[disk]]\nname = \"a\"\nbacking = \"/x\"\nformat = \"qcow3\"", &["disk a", "qcow3", "qcow2"]),
            ("[[disk]]\nname = \"a\"\nbacking = \"nbd://h/e\"\nformat = \"raw\"", &["disk a", "nbd://h/e"]),
            (
                "[[disk]]\nname = \"a\"\nbacking = \"/x\"\nexport = [{ name = \"b\", vhost_user = \"b.sock\" }]",
                &["b.sock", "absolute"],
            ),
            (
                "[[disk]]\nname = \"a\"\nbacking = \"/x\"\nexport = [{ name = \"b\", fuse = \"b.img\" }]",
                &["b.img", "absolute"],
            ),
            (
                "[[disk]]\nname = \"a\"\nbacking = \"/x\"\n[[disk]]\nname = \"a\"\nbacking = \"/y\"",
                &["'a' appears twice"],
            ),
            (
                "[[disk]]\nname = \"a\"\nbacking = \"/x\"\n[[disk.export]]\nname = \"b\"\n[[disk]]\nname = \"b\"\nbacking = \"/y\"",
                &["'b' appears twice"],
            ),
        ] {
            let error = Config::parse(text).unwrap_err().to_string();
            for part in parts {
                assert!(error.contains(part), "{text:?}: {error}");
            }
            assert!(error.lines().all(|line| line.starts_with("line ")), "{error}");
        }
        let error = Config::load(Path::new("/nonexistent/hob.toml")).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/hob.toml"), "{error}");
    }
}
