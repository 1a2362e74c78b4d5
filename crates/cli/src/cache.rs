//! `hob cache …`: the caches of disks.

use clap::{ArgGroup, Subcommand};
use hob_control::client::Client;
use hob_control::{
    AdoptCache, CacheEnable, CachePatch, CacheSettings, DiskChanged, DrainFor, ExportDirty, OnDirty,
    PlannedChange, Size,
};

use super::Global;
use super::confirmation::{Confirmation, DryRun};
use super::disk::print_change;
use super::drain::drain_first;
use super::pool::absolute;
use super::remote::{ask, converse, explain};
use super::settings::{Settings, Sharing, ids};

/// Returns the options of `hob cache set`; at least one is required.
fn set_group() -> ArgGroup {
    let group = ArgGroup::new("setting").required(true).multiple(true);
    group.args(ids::<Settings>()).arg("shared").args(ids::<Sharing>())
}

/// Give caches to disks, change and remove caches; guests do not notice these changes
#[derive(Debug, Subcommand)]
pub(crate) enum Cache {
    /// Give a disk a cache
    Enable {
        /// The disk
        disk: String,
        /// The pool that has the flash for the cache
        #[arg(long)]
        pool: String,
        /// Size of the cache; rounded up to whole segments of the pool. Without a size, the cache
        /// shares the rest of the pool with other such caches, and hob chooses their sizes
        #[arg(long)]
        size: Option<Size>,
        #[command(flatten)]
        settings: Settings,
        #[command(flatten)]
        sharing: Sharing,
    },
    /// Remove a disk's cache after writing its dirty data to the backing
    Disable {
        /// The disk
        disk: String,
        /// Discard dirty data: writes that were acknowledged to the guest are undone; needs --yes
        #[arg(long)]
        discard_dirty: bool,
        #[command(flatten)]
        consent: Confirmation,
    },
    /// Make a cache larger or smaller; blocks that fit stay cached. A shared cache then has a fixed
    /// size
    Resize {
        /// The disk
        disk: String,
        /// New size of the cache; rounded up to whole segments of the pool
        size: Size,
        #[command(flatten)]
        rehearsal: DryRun,
    },
    /// Change a cache's settings; a new block size, layout or persistence empties the cache
    #[command(group = set_group())]
    Set {
        /// The disk
        disk: String,
        #[command(flatten)]
        settings: Settings,
        /// Share the rest of the pool with other shared caches, instead of a fixed size
        #[arg(long, value_name = "YES", num_args = 0..=1, default_missing_value = "true")]
        shared: Option<bool>,
        #[command(flatten)]
        sharing: Sharing,
        #[command(flatten)]
        rehearsal: DryRun,
    },
    /// Discard the dirty data of a cache: writes that were acknowledged to the guest are lost
    ///
    /// Completes within 10 seconds, even if the backing hangs or is dead: requests that wait for
    /// the backing fail. The next flush of each connected client fails once.
    DiscardDirty {
        /// The disk
        disk: String,
        #[command(flatten)]
        consent: Confirmation,
    },
    /// Write the dirty data of an offline disk to a sparse file, for rescue
    ExportDirty {
        /// The disk
        disk: String,
        /// The file, on the daemon's host, which must not exist. FILE.map lists the ranges of the file that have dirty data
        file: String,
    },
    /// Give an offline disk a cache that belongs to no disk, with the cache's dirty data
    ///
    /// If the daemon's state was lost, the caches in its pools belong to no disk. A disk stays
    /// offline while such a cache has dirty data of its backing.
    Adopt {
        /// The disk
        disk: String,
        /// Owner id of the cache, as shown by 'hob pool show'
        owner: String,
    },
    /// Empty a cache
    Clear {
        /// The disk
        disk: String,
        #[command(flatten)]
        rehearsal: DryRun,
    },
}

/// Returns the names of all policies as values for clap.
pub(super) fn policy_names() -> clap::builder::PossibleValuesParser {
    use clap::builder::PossibleValue;

    let values = hob_engine::policy::POLICIES
        .iter()
        .filter(|row| row.serves)
        .map(|row| PossibleValue::new(row.name).help(row.summary));
    clap::builder::PossibleValuesParser::new(values)
}

pub(super) fn run(command: Cache, global: &Global) -> anyhow::Result<()> {
    let changed = match command {
        Cache::Enable { disk, pool, size, settings, sharing } => {
            let enable = CacheEnable { pool, size, settings: sharing.add_to(settings) };
            ask(global, async |client| client.cache_enable(&disk, &enable).await)?
        }
        Cache::Disable { disk, discard_dirty, consent } => converse(global, async |client| {
            let change = PlannedChange::Disable { discard_dirty };
            consent.check(&client, &disk, &change).await?;
            let dirty = on_dirty(&client, &disk, discard_dirty, DrainFor::CacheDisable).await?;
            client.cache_disable(&disk, dirty).await.map_err(explain)
        })?,
        Cache::Resize { disk, size, rehearsal } => {
            let patch = CachePatch { size: Some(size), ..CachePatch::default() };
            converse(global, async |client| {
                rehearsal.announce(&client, &disk, &set_change(&patch)).await?;
                client.cache_patch(&disk, &patch).await.map_err(explain)
            })?
        }
        Cache::Set { disk, settings, shared, sharing, rehearsal } => {
            let settings = CacheSettings { shared, ..sharing.add_to(settings) };
            let patch = CachePatch { size: None, settings };
            converse(global, async |client| {
                rehearsal.announce(&client, &disk, &set_change(&patch)).await?;
                set(&client, &disk, &patch).await
            })?
        }
        Cache::Clear { disk, rehearsal } => converse(global, async |client| {
            rehearsal.announce(&client, &disk, &PlannedChange::Clear).await?;
            client.cache_clear(&disk).await.map_err(explain)
        })?,
        Cache::DiscardDirty { disk, consent } => converse(global, async |client| {
            let dirty = consent.check(&client, &disk, &PlannedChange::DiscardDirty).await?;
            let shown = client.disk(&disk).await.map_err(explain)?;
            // Data that became dirty after the check is discarded only with the operator's consent.
            if dirty == OnDirty::Drain && shown.cache.is_some() {
                let note = format!("{disk} has no dirty data, so nothing was discarded");
                return Ok(DiskChanged { disk: Some(shown), notes: vec![note] });
            }
            client.discard_dirty(&disk).await.map_err(explain)
        })?,
        Cache::ExportDirty { disk, file } => {
            let export = ExportDirty { path: absolute(file) };
            ask(global, async |client| client.export_dirty(&disk, &export).await)?
        }
        Cache::Adopt { disk, owner } => {
            ask(global, async |client| client.cache_adopt(&disk, &AdoptCache { owner: owner.clone() }).await)?
        }
    };
    print_change(global.output, &changed)
}

fn set_change(patch: &CachePatch) -> PlannedChange {
    PlannedChange::Set { patch: Box::new(patch.clone()) }
}

/// Changes a cache. A cache that leaves write-back is drained first, with visible progress.
async fn set(client: &Client, disk: &str, patch: &CachePatch) -> anyhow::Result<DiskChanged> {
    let write_back = |mode: &Option<String>| mode.as_deref() == Some("write-back");
    let settings = &patch.settings;
    let leaves = settings.mode.is_some() && !write_back(&settings.mode)
        || settings.persistent == Some(false)
        || settings.preset.is_some();
    if leaves {
        drain_first(client, disk, DrainFor::CacheSet).await?;
    }
    client.cache_patch(disk, patch).await.map_err(explain)
}

/// Drains dirty data with visible progress before an operation, unless it is to be discarded.
pub(super) async fn on_dirty(
    client: &Client,
    disk: &str,
    discard: bool,
    operation: DrainFor,
) -> anyhow::Result<OnDirty> {
    if discard {
        return Ok(OnDirty::Discard);
    }
    drain_first(client, disk, operation).await?;
    Ok(OnDirty::Drain)
}
