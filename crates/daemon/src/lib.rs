//! The daemon: shards that serve I/O, and a control thread with the services, the control API and
//! the NBD listeners. `hob serve` runs the same parts with the settings of its command line, and
//! saves no state.

mod allow;
mod api_error;
mod background;
mod cache_settings;
mod cluster;
mod config;
mod descriptors;
mod exports;
#[cfg(test)]
mod fake_shard;
mod half_open;
mod hardware;
mod host_device;
mod host_memory;
mod http;
mod image;
mod lifecycle;
mod listening_sockets;
mod metrics;
mod mount;
mod nbd_listener;
mod notify;
mod one_disk;
pub mod power_cut;
pub mod psk;
mod relay;
mod services;
mod socket_access;
mod state;
mod stripe;
mod swap;
mod tls;
mod upgrade;
mod vhost_user;
mod watchdog;
mod writable;

pub use allow::{AllowEntry, ClientMatch};
pub use cache_settings::simulated as simulated_cache;
pub use config::{
    CONTROL_SOCKET, Config, ConfigError, ControlConfig, NbdEntry, NbdSecrets, NbdTlsFiles, Role, ring_kind,
};
pub use http::{Loopback, openapi_json};
pub use metrics::docs_page as metrics_page;
pub use one_disk::OneDisk;
pub use socket_access::SocketSettings;
pub use swap::turn_off_as_child;
pub use tls::{CertificateMatch, TlsFiles};
pub use upgrade::{abandon as abandon_hand_over, can_take_over};

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use hob_control::{CacheEnable, DiskAdd, Endpoint};
use hob_shard::api as shard_api;
use hob_shard::{ShardOptions, lease_clock, request_recorder};
use hob_storage::backing::qemu_nbd;
use hob_storage::ring::RingConfig;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use allow::AllowList;
use cluster::Cluster;
use config::Limits;
use exports::Exports;
use hardware::{BackingOptions, RingKind};
use http::{ControlListener, Guard};
use lifecycle::{Lifecycle, Signals};
use nbd_listener::{ListenAddress, Listener, ListenerContext, NbdSession, NbdTls};
use relay::{Relays, Spawner};
use services::{FlashExports, MigrationTransport, Services, wait_max};
use shard_api::{ShardEvent, ShardHandle};
use socket_access::{MissingDirectory, SocketAccess};
use state::{State, Store};
use tls::{Tls, WithoutCertificate};
use upgrade::{HandOff, InheritedState};

/// The checked configuration of a daemon, with the contents of the files that it names.
#[derive(Debug)]
pub struct Plan {
    /// Addresses of the NBD listeners.
    listen: Vec<ListenAddress>,
    /// Which clients may see which exports.
    allow: AllowList,
    /// Addresses of the control API.
    control: Vec<Endpoint>,
    guard: Guard,
    ring: RingKind,
    shards: usize,
    limits: Limits,
    /// True if all dirty data is destaged before the daemon exits.
    drain_on_shutdown: bool,
    /// Owner and mode of disks' sockets.
    sockets: SocketAccess,
    content: Content,
}

/// The disks that the daemon serves, and where their settings come from.
#[derive(Debug)]
enum Content {
    /// Disks of the saved state and of hob.toml.
    Kept { store: Store, state: State, config: Box<Config> },
    /// One disk, from the command line.
    One { disk: Box<DiskAdd>, cache: Option<(String, CacheEnable)>, force: bool },
}

impl Content {
    /// Returns what hob does if the directory of an NBD socket does not exist.
    fn missing_directory(&self) -> MissingDirectory {
        match self {
            Content::Kept { .. } => MissingDirectory::Create,
            Content::One { .. } => MissingDirectory::Refuse,
        }
    }
}

/// The arguments of `hob serve`.
#[derive(Debug)]
pub struct Serving {
    /// The disk to serve.
    pub disk: DiskAdd,
    /// Path of the pool's device, and the settings of the cache on this device.
    pub cache: Option<(String, CacheEnable)>,
    /// True if the device is used even if it contains other data.
    pub force: bool,
    /// Listeners for NBD clients.
    pub listen: Vec<NbdEntry>,
    /// Clients that may connect; all if empty.
    pub allow: Vec<AllowEntry>,
    /// The control API: addresses and authentication.
    pub control: ControlConfig,
    /// Kind of I/O ring.
    pub ring: RingKind,
    /// True if all dirty data is destaged before the daemon exits.
    pub drain_on_shutdown: bool,
    /// Owner and mode of the disk's sockets.
    pub sockets: SocketSettings,
}

impl Plan {
    /// Returns how long this host waits for a silent peer before the peer's flash counts as failed.
    fn peer_wait(&self) -> Duration {
        match &self.content {
            Content::Kept { config, .. } => config.peers.wait(),
            Content::One { .. } => hob_storage::flash::REMOTE_WAIT_DEFAULT,
        }
    }

    /// Creates the plan of a daemon from the configuration file at `path`. If the file is invalid,
    /// uses the last configuration that was accepted. `complete` adds the settings of the command
    /// line to the configuration.
    pub fn of_file(path: &Path, complete: impl Fn(&mut Config)) -> anyhow::Result<Plan> {
        let plan = |mut config: Config| {
            complete(&mut config);
            Plan::of_config(config)
        };
        let refused = match Config::load(path).map_err(anyhow::Error::from).and_then(plan) {
            Ok(plan) => return Ok(plan),
            Err(refused) => refused,
        };
        match Config::load_accepted(path, &format!("{refused:#}")).and_then(|config| plan(config).ok()) {
            Some(plan) => Ok(plan),
            None => Err(refused),
        }
    }

    /// Creates the plan of a daemon from a configuration, and locks the state directory.
    fn of_config(config: Config) -> anyhow::Result<Plan> {
        let guard = control_guard(&config)?;
        check_cluster(&config)?;
        // Sockets that this program takes over work also if the host has lost their addresses. The
        // check of this program knew these sockets.
        if !upgrade::is_takeover() {
            config.refuse(unusable_addresses(&config, listening_sockets::check_port))?;
        }
        lending(&config, prepare_lending)?;
        let (store, state) = Store::open(&config.state_dir)?;
        Ok(Plan {
            sockets: SocketAccess::of(&config.sockets())?,
            listen: addresses_of(&config)?,
            allow: AllowList::new(config.allow.clone()),
            control: config.control.listen.clone(),
            guard,
            ring: config.ring,
            shards: config.shards,
            limits: config.limits,
            drain_on_shutdown: config.drain_on_shutdown,
            content: Content::Kept { store, state, config: Box::new(config) },
        })
    }

    /// Checks that a daemon could start with this configuration and the saved state, and could save
    /// its state. Changes nothing, so this check may run while a daemon runs.
    ///
    /// # Errors
    /// Returns all errors of the configuration, one on each line.
    pub fn check_config(config: &Config) -> Result<(), ConfigError> {
        let mut outside: Vec<ConfigError> = Vec::new();
        let control = control_guard(config).err();
        // Without `cert`, the certificate is that of the control API, whose errors are reported
        // once.
        let is_reported = control.is_some() && config.migrate.cert.is_none();
        outside.extend(control);
        outside.extend(addresses_of(config).err());
        if !is_reported {
            outside.extend(check_migrate(config).err());
        }
        outside.extend(check_cluster(config).err());
        outside.extend(unusable_addresses(config, listening_sockets::check_address));
        outside.extend(lending(config, writable::check).err());
        // A directory whose state cannot be read is reported once.
        let state = State::read(&config.state_dir).and_then(|_| Store::check_writable(&config.state_dir));
        outside.extend(state.err().map(|error| config.error_at("state_dir", &error.into())));
        config.refuse(outside)?;
        config.check_host()
    }

    /// Checks that the files, users and groups that a configuration names can be read, as a start
    /// does.
    fn check_names(config: &Config) -> anyhow::Result<()> {
        control_guard(config)?;
        addresses_of(config)?;
        check_cluster(config)?;
        SocketAccess::of(&config.sockets())?;
        Ok(())
    }

    /// Creates the plan of `hob serve` with one disk.
    pub fn of_serving(serving: Serving) -> anyhow::Result<Plan> {
        let Serving { disk, cache, force, listen, allow, control, ring, drain_on_shutdown, sockets } =
            serving;
        let mut wrong = None;
        config::check_nbd(&listen, &allow, &mut |_, what| wrong = Some(what));
        if let Some(what) = wrong {
            anyhow::bail!(what);
        }
        let content = Content::One { disk: Box::new(disk), cache, force };
        // A wrong path is reported before hob opens the disk and creates the file of its pool.
        for NbdEntry { listen, .. } in &listen {
            let Endpoint::Unix(path) = listen else { continue };
            let prepared = content.missing_directory().prepare(path);
            prepared.with_context(|| format!("cannot listen on {listen}"))?;
        }
        Ok(Plan {
            sockets: SocketAccess::of(&sockets)?,
            listen: listen_addresses(&[], &listen)?,
            allow: AllowList::new(allow),
            guard: Guard::of_config(&control)?,
            control: control.listen,
            ring,
            shards: 1,
            limits: Limits::default(),
            drain_on_shutdown,
            content,
        })
    }
}

/// Loads the access rules of the control API.
fn control_guard(config: &Config) -> Result<Guard, ConfigError> {
    Guard::of_config(&config.control).map_err(|error| config.error_at("control", &error))
}

/// Reads the TLS files of `[migrate]`. A daemon reads these files when it connects to another host.
fn check_migrate(config: &Config) -> Result<(), ConfigError> {
    let tls = config.migrate.tls(&config.control).filter(|_| config.migrate.names_files());
    let Some(tls) = tls else { return Ok(()) };
    tls.load().map(drop).map_err(|error| config.error_at("migrate", &error.into()))
}

/// Reads the TLS files of `[cluster]`.
fn check_cluster(config: &Config) -> Result<(), ConfigError> {
    let Some(cluster) = &config.cluster else { return Ok(()) };
    cluster.tls().map(drop).map_err(|error| config.error_at("cluster", &error.into()))
}

/// Calls `prepare` for the directory of lent flash.
fn lending(config: &Config, prepare: impl Fn(&Path) -> io::Result<()>) -> Result<(), ConfigError> {
    let Some(directory) = &config.peers.lend else { return Ok(()) };
    prepare(directory).map_err(|error| {
        let what = format!("cannot lend flash in {}", directory.display());
        config.error_at("peers.lend", &anyhow::Error::from(error).context(what))
    })
}

/// Creates the directory of lent flash, and checks that it can be read.
fn prepare_lending(directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    std::fs::read_dir(directory).map(drop)
}

/// Returns an error for each address of a configuration at which this host cannot listen according
/// to `check`.
fn unusable_addresses(
    config: &Config,
    check: impl Fn(&str, &Endpoint, Option<&str>) -> io::Result<()>,
) -> Vec<ConfigError> {
    let daemon = std::env::var(listening_sockets::VARIABLE).ok();
    let name = listening_sockets::name;
    let control = config.control.listen.iter().enumerate();
    let control = control.map(|(number, endpoint)| (format!("control.listen.{number}"), "control", endpoint));
    let plain = config.listen.iter().enumerate();
    let plain = plain.map(|(number, endpoint)| (format!("listen.{number}"), "nbd", endpoint));
    let nbd = config.nbd.iter().enumerate();
    let nbd = nbd.map(|(number, entry)| (format!("nbd.{number}.listen"), "nbd", &entry.listen));
    let addresses: Vec<(String, &str, &Endpoint)> = control.chain(plain).chain(nbd).collect();
    let used: BTreeSet<String> =
        addresses.iter().map(|(_, protocol, endpoint)| name(protocol, endpoint)).collect();
    // The daemon keeps its sockets at the other addresses of this configuration, so their ports
    // stay in use.
    let known = |own: String| {
        let names = daemon.as_ref()?.lines().filter(|name| *name == own || !used.contains(*name));
        Some(names.collect::<Vec<_>>().join("\n"))
    };
    let errors = addresses.iter().filter_map(|(at, protocol, endpoint)| {
        let error = check(protocol, endpoint, known(name(protocol, endpoint)).as_deref()).err()?;
        let error = anyhow::Error::from(error).context(format!("cannot listen on {endpoint}"));
        Some(config.error_at(at, &error))
    });
    errors.collect()
}

/// Returns the NBD addresses of a configuration. Reads certificates and keys.
fn addresses_of(config: &Config) -> Result<Vec<ListenAddress>, ConfigError> {
    let mut addresses =
        listen_addresses(&config.listen, &[]).map_err(|error| config.error_at("listen", &error))?;
    for (number, entry) in config.nbd.iter().enumerate() {
        let address = listen_addresses(&[], std::slice::from_ref(entry));
        addresses.extend(address.map_err(|error| config.error_at(&format!("nbd.{number}.tls"), &error))?);
    }
    Ok(addresses)
}

/// Returns the NBD addresses without and with TLS. Reads certificates and keys.
fn listen_addresses(plain: &[Endpoint], more: &[NbdEntry]) -> anyhow::Result<Vec<ListenAddress>> {
    let with_tls = |files: &NbdTlsFiles| -> anyhow::Result<NbdTls> {
        let session = match files.secrets().map_err(anyhow::Error::msg)? {
            NbdSecrets::Certificates(files) => {
                NbdSession::Certificates(Arc::new(Tls::load(files, WithoutCertificate::Refused)?))
            }
            NbdSecrets::Keys(file) => NbdSession::Keys(Arc::new(psk::Keys::load(file)?)),
        };
        Ok(NbdTls { session, required: files.required })
    };
    let plain = plain.iter().map(|endpoint| Ok(ListenAddress { endpoint: endpoint.clone(), tls: None }));
    let more = more.iter().map(|entry| {
        let tls = entry.tls.as_ref().map(with_tls).transpose()?;
        Ok(ListenAddress { endpoint: entry.listen.clone(), tls })
    });
    plain.chain(more).collect()
}

/// Runs the daemon until a signal ends it. A second signal ends the process immediately.
pub fn run(plan: Plan) -> anyhow::Result<()> {
    power_cut::obey()?;
    watchdog::abort_on_panic();
    descriptors::raise_limit();
    // When hob allocates memory, the kernel must not wait for a write to a block device that hob
    // itself serves. This call needs a capability. Without that capability, hob serves no block
    // device.
    let _ = rustix::process::configure_io_flusher_behavior(true);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the control thread")?;
    let result = runtime.block_on(live(plan));
    // A hung device or backing must not keep the process alive.
    runtime.shutdown_background();
    power_cut::end_in_peace();
    match result? {
        None => Ok(()),
        Some(leaving) => Err(upgrade::become_next(leaving)),
    }
}

/// Runs the daemon until its end. If another program takes over, returns the descriptors and state
/// for that program.
async fn live(plan: Plan) -> anyhow::Result<Option<HandOff>> {
    let mut signals = Signals::new()?;
    let mut inherited = InheritedState::take();
    tokio::task::spawn_blocking(qemu_nbd::remove_leftovers).await.context("cannot look for leftovers")?;
    let (event_sender, events) = mpsc::unbounded_channel();
    let shards = start_shards(&plan, &event_sender)?;
    drop(event_sender);
    watchdog::start(&shards, Duration::from_secs(plan.limits.shard_silence_s_max))?;
    let drain = plan.drain_on_shutdown;
    let has_tls = plan.listen.iter().any(|address| address.tls.is_some());
    let relays =
        has_tls.then(|| Relays::start(plan.shards)).transpose().context("cannot start threads for TLS")?;
    let spawner = relays.as_ref().map(Relays::spawner);
    let lifecycle = Lifecycle::new(shards, &mut inherited);
    let end = lifecycle.until_end(serve(plan, &lifecycle, events, spawner, inherited), &mut signals).await;
    lifecycle.close(end, drain, relays, &mut signals).await
}

/// Starts all parts of the daemon, listeners last, and serves until dropped.
async fn serve(
    plan: Plan,
    lifecycle: &Lifecycle,
    events: mpsc::UnboundedReceiver<ShardEvent>,
    relays: Option<Spawner>,
    mut inherited: InheritedState,
) -> anyhow::Result<()> {
    let Lifecycle { shards, listening, notifier, .. } = lifecycle;
    let Plan { listen, allow, control, guard, limits, content, sockets, .. } = plan;
    let missing = content.missing_directory();
    let backing_options =
        BackingOptions { wait_max: wait_max(limits.backing_timeout()), ..BackingOptions::default() };
    let exports = Exports::default();
    let mut tasks = JoinSet::new();
    let controls = control.iter().map(|endpoint| listening_sockets::name("control", endpoint));
    let nbd = listen.iter().map(|address| listening_sockets::name("nbd", &address.endpoint));
    let used: BTreeSet<String> = controls.chain(nbd).collect();
    listening.close_unused(&used);
    // The API sockets are bound first, so that a second daemon with the same configuration stops
    // here.
    let mut controls = Vec::new();
    for endpoint in control {
        controls.push(ControlListener::bind(endpoint, &guard, listening).await?);
    }
    let context =
        ListenerContext { exports: exports.clone(), allow, connections_max: limits.connections_max };
    let (files, goes_on) = (inherited.files(), inherited.goes_on);
    let inherited_max = limits.connections_max.saturating_mul(listen.len().max(1)).min(1 << 16);
    lifecycle.waiting.fill(inherited, &Arc::new(tokio::sync::Semaphore::new(inherited_max)));
    tokio::spawn(lifecycle.waiting.clone().attach_clients(context.clone()));
    let mut accepted = None;
    let services = match content {
        Content::Kept { store, state, config } => {
            let services = Services::new(shards.to_vec(), exports, backing_options, store);
            services.exports.set_socket_access(sockets);
            let _ = lifecycle.services.set(services.clone());
            services.pools.set_flash_stall_max(Duration::from_millis(limits.flash_stall_ms_max));
            services.exports.inherit_files(files);
            let tls = config.migrate.tls(&config.control);
            services.set_migration_transport(MigrationTransport { tls, directory: config.state_dir.clone() });
            if let Some(directory) = &config.peers.lend {
                let lending = FlashExports::open(directory, config.peers.lend_max.bytes());
                let lending =
                    lending.with_context(|| format!("cannot lend flash in {}", directory.display()))?;
                services.remote_flash.set_exports(lending);
            }
            services.set_peer_name(config.peers.name.clone());
            tasks.spawn(services.events.clone().tend(events));
            if let Some(joined) = &config.cluster {
                services.set_cluster(Cluster::join(joined, &config.state_dir, shards)?);
                tasks.spawn(services.cluster.clone().tend());
            }
            services.startup.start(state, &config).await?;
            accepted = config.to_keep();
            services.hob_toml.set(config);
            services
        }
        Content::One { disk, cache, force } => {
            let services = Services::new(shards.to_vec(), exports, backing_options, Store::Memory);
            services.exports.set_socket_access(sockets);
            let _ = lifecycle.services.set(services.clone());
            services.pools.set_flash_stall_max(Duration::from_millis(limits.flash_stall_ms_max));
            services.exports.inherit_files(files);
            tasks.spawn(services.events.clone().tend(events));
            // After an upgrade, the device has the cache of the previous program, which `force`
            // must not discard.
            services.startup.start_serving(*disk, cache, force && !goes_on).await?;
            services
        }
    };
    services.exports.drop_unwanted_files().await;
    for address in &listen {
        let listener = Listener::bind(address, sockets, missing, listening)
            .await
            .with_context(|| format!("cannot listen on {}", address.endpoint))?;
        tracing::info!("NBD clients connect to {}", listener.endpoint());
        tasks.spawn(listener.run(context.clone(), relays.clone()));
    }
    // The listeners have clones; relay threads end when the last clone is dropped.
    drop(relays);
    spawn_controls(&mut tasks, controls, &services);
    let _ = lifecycle.ready.set(());
    notifier.ready(&services);
    if let Some(accepted) = accepted {
        background::spawn(services.hob_toml.clone().keep_started(accepted));
    }
    // No task ends by itself; if a task does, the daemon exits.
    match tasks.join_next().await {
        Some(Err(error)) => Err(anyhow::anyhow!("an essential task of the daemon failed: {error}")),
        _ => Err(anyhow::anyhow!("an essential task of the daemon ended unexpectedly")),
    }
}

fn spawn_controls(tasks: &mut JoinSet<()>, controls: Vec<ControlListener>, services: &Arc<Services>) {
    for listener in controls {
        tracing::info!("the control API is at {}", listener.endpoint());
        tasks.spawn(listener.serve(http::router(services.clone())));
    }
}

fn start_shards(plan: &Plan, events: &mpsc::UnboundedSender<ShardEvent>) -> anyhow::Result<Vec<ShardHandle>> {
    let arena_bytes = usize::try_from(plan.limits.buffer_bytes_max.bytes()).unwrap_or(usize::MAX);
    let start = |number| {
        let options = ShardOptions {
            ring: RingConfig { kind: plan.ring, arena_bytes, ..RingConfig::default() },
            limits: plan.limits.of_engine(),
            peer_wait: plan.peer_wait(),
            ..ShardOptions::new(number)
        };
        hob_shard::spawn(options, events.clone()).map_err(anyhow::Error::from)
    };
    (0..plan.shards).map(start).collect()
}
