//! The startup service: opens the pools and disks of the state file, of hob.toml, or of the `hob
//! serve` command line. In a daemon, an object that cannot be opened does not stop the others.

mod new_disks;
mod serve;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hob_control::PoolCreate;
use hob_storage::pool::{SEGMENT_BYTES_DEFAULT, is_segment_size};

use super::disks::Disks;
use super::exports::ExportService;
use super::flash::{Flash, Opened};
use super::hob_toml::HobToml;
use super::migration::Migrations;
use super::pools::{Known, Pools};
use super::qos::QosService;
use super::registry::{EndedCaches, Registry};
use super::remote_flash::RemoteFlash;
use super::swap::Swaps;
use super::tasks::Tasks;
use crate::api_error::{Result, failed};
use crate::background::spawn;
use crate::config::Config;
use crate::state::{PoolState, State};
pub(super) use new_disks::told_apart;

/// Maximum time that the listeners and the control API wait at the start for slow disks. Clients of
/// such a disk wait longer.
const OPENING_MAX: Duration = Duration::from_secs(3);

service! {
    /// The startup service; see the module.
    #[derive(Debug)]
    pub(crate) struct Startup {
        registry: Arc<Registry>,
        tasks: Tasks,
        qos: QosService,
        swap: Swaps,
        exports: ExportService,
        remote_flash: RemoteFlash,
        pools: Pools,
        disks: Disks,
        migrations: Arc<Migrations>,
        hob_toml: HobToml,
    } with {}
}

impl Startup {
    /// Opens the pools and disks of a daemon.
    pub(crate) async fn start(&self, kept: State, config: &Config) -> Result<()> {
        {
            let mut inner = self.registry.inner();
            let names =
                config.pools.iter().map(|pool| &pool.name).chain(config.disks.iter().map(|disk| &disk.name));
            inner.defined = names.cloned().collect();
            // An object that was removed by command stays removed while hob.toml defines it. If its
            // entry was deleted from the file and later written again, hob creates the object
            // again.
            let defined = |names: &[String]| {
                names.iter().filter(|name| inner.defined.contains(*name)).cloned().collect()
            };
            (inner.pools_removed, inner.disks_removed) =
                (defined(&kept.pools_removed), defined(&kept.disks_removed));
        }
        {
            let mut inner = self.registry.inner();
            inner.caches_refused = kept.caches_refused.clone();
            inner.gone = kept.gone.clone();
            inner.ended = EndedCaches::restore(&kept);
            inner.waited = kept.waited.iter().map(|disk| (disk.name.clone(), disk.clone())).collect();
        }
        self.hob_toml.restore(&kept);
        self.tasks.restore(&kept.failed_tasks);
        self.qos.restore(&kept);
        self.swap.restore(&kept.swaps);
        self.qos.start(config)?;
        // hob.toml may have a corrected definition of a pool that could not be created. Without a
        // saved state, missing devices may have dirty data, so a definition without them waits for
        // 'hob config apply --yes'.
        let is_tried_again = |pool: &PoolState| {
            let defined = config.pools.iter().find(|it| it.name == pool.name);
            let has =
                |it: &PoolCreate, path: &Path| it.devices.iter().any(|device| Path::new(device) == path);
            defined.is_some_and(|it| pool.devices.iter().all(|path| has(it, path)))
        };
        let kept_pools: Vec<&PoolState> =
            kept.pools.iter().filter(|&pool| pool.was_created() || !is_tried_again(pool)).collect();
        // The devices of all pools are asked at the same time, because a hung one takes seconds.
        let opening: Vec<_> =
            kept_pools.iter().map(|pool| pool.peers.is_empty().then(|| open_pool(pool))).collect();
        for (pool, opening) in kept_pools.iter().zip(opening) {
            self.start_pool(pool, opening).await?;
        }
        for pool in &config.pools {
            let known = kept_pools.iter().any(|kept| kept.name == pool.name);
            if kept.pools_removed.contains(&pool.name) {
                tracing::info!(
                    "pool {} of hob.toml is not created, because it was removed by command",
                    pool.name
                );
            } else if !known {
                self.hob_toml.start_new_pool(pool).await?;
            }
        }
        let mut new = Vec::new();
        for disk in &config.disks {
            let known = kept.disks.iter().any(|kept| kept.name == disk.name);
            if kept.disks_removed.contains(&disk.name) {
                tracing::info!(
                    "disk {} of hob.toml is not added, because it was removed by command",
                    disk.name
                );
            } else if !known {
                new.push(self.first_state(disk));
            }
        }
        // All disks are known before the first one is opened: only then is it known which caches
        // belong to no disk.
        let mut to_open = Vec::new();
        for disk in told_apart(kept.disks, new) {
            let name = disk.name.clone();
            let names: Vec<String> = disk.exports.iter().map(|export| export.name.clone()).collect();
            if self.migrations.enter_kept(disk)? {
                to_open.push((name, names));
            }
        }
        let mut opening = Vec::new();
        for (name, names) in to_open {
            let disks = self.disks.clone();
            let is_opening =
                self.exports.table().begin_opening(&name, names.into_iter().chain([name.clone()]));
            opening.push(spawn(async move {
                let started = tokio::time::Instant::now();
                disks.bring_online(&name).await;
                if started.elapsed() > OPENING_MAX {
                    tracing::info!(
                        "disk {name}: opening it took {} s, and its clients waited",
                        started.elapsed().as_secs()
                    );
                }
                drop(is_opening);
            }));
        }
        self.registry.set_restored();
        // A hung disk is listed as offline until it is open. Other disks do not wait for it, but
        // its own clients do.
        let deadline = tokio::time::Instant::now() + OPENING_MAX;
        for task in opening {
            let _ = tokio::time::timeout_at(deadline, task).await;
        }
        self.migrations.resume();
        self.hob_toml.apply_at_start(config).await;
        Ok(())
    }

    /// Adds a pool of the state file to the daemon, after its devices were opened. Pools with
    /// devices on other hosts are opened here.
    async fn start_pool(&self, pool: &PoolState, opening: Option<OpeningPool>) -> Result<()> {
        for peer in &pool.peers {
            let asked = match self.remote_flash.open_socket(peer) {
                Ok(()) => self.remote_flash.ask_lease(peer).await.map(drop),
                Err(error) => Err(error),
            };
            if let Err(error) = asked {
                tracing::error!("pool {}: cannot open the remote flash at {}: {error}", pool.name, peer.host);
            }
        }
        let opening = opening.unwrap_or_else(|| open_pool(pool));
        let opened =
            opening.await.map_err(|error| failed!("an internal task ended unexpectedly: {error}"))??;
        // A pool that was never opened may have devices that hob.toml does not list.
        let device_ids = pool.device_ids.or((!pool.was_created()).then_some(0));
        let known = Known { out: &pool.devices_out, peers: &pool.peers, device_ids };
        self.pools.take_pool_in(&pool.name, opened, known).await?;
        self.pools.restore_flash_writes(&pool.name, pool.flash_writes).await;
        let mut inner = self.registry.inner();
        let entry = inner.pool_mut(&pool.name)?;
        entry.is_unseen = pool.is_unseen && !entry.is_whole();
        Ok(())
    }
}

type OpeningPool = tokio::task::JoinHandle<Result<Opened>>;

/// Begins to open the devices of a pool.
fn open_pool(pool: &PoolState) -> OpeningPool {
    // Earlier versions saved an invalid segment size for a pool of hob.toml that could not be
    // created.
    let segment_bytes = Some(pool.segment_size.bytes())
        .filter(|bytes| is_segment_size(*bytes))
        .unwrap_or(SEGMENT_BYTES_DEFAULT);
    let PoolState { name, devices, uuid, .. } = pool.clone();
    spawn(Flash::open(name, devices, uuid, segment_bytes))
}
