//! `hob cache …`: a disk's part of the flash.

use clap::Subcommand;
use hob_control::{CacheEnable, CachePatch, Size};

use super::Global;
use super::disk::print_change;
use super::remote::ask;

/// Give disks caches, change them, take them away; guests notice nothing
#[derive(Debug, Subcommand)]
pub(crate) enum Cache {
    /// Give a disk a cache
    Enable {
        /// The disk
        disk: String,
        /// From which pool
        #[arg(long)]
        pool: String,
        /// How large; rounded up to whole segments of the pool
        #[arg(long)]
        size: Size,
        /// Unit of fill and eviction, a power of two from 4K to 1M [default: 4K]
        #[arg(long, value_name = "SIZE")]
        block_size: Option<Size>,
        /// Replacement policy [default: s3-fifo]
        #[arg(long, value_parser = policy_names())]
        policy: Option<String>,
    },
    /// Take a disk's cache away
    Disable {
        /// The disk
        disk: String,
    },
    /// Make a cache larger or smaller; what fits is kept
    Resize {
        /// The disk
        disk: String,
        /// New size; rounded up to whole segments of the pool
        size: Size,
    },
    /// Change block size or policy; the cache starts empty
    #[command(group = clap::ArgGroup::new("setting").required(true).multiple(true))]
    Set {
        /// The disk
        disk: String,
        /// Unit of fill and eviction, a power of two from 4K to 1M
        #[arg(long, value_name = "SIZE", group = "setting")]
        block_size: Option<Size>,
        /// Replacement policy
        #[arg(long, value_parser = policy_names(), group = "setting")]
        policy: Option<String>,
    },
    /// Empty a cache
    Clear {
        /// The disk
        disk: String,
    },
}

/// The names of all policies, for clap.
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
        Cache::Enable { disk, pool, size, block_size, policy } => {
            let enable = CacheEnable { pool, size, block_size, policy };
            ask(global, async |client| client.cache_enable(&disk, &enable).await)?
        }
        Cache::Disable { disk } => ask(global, async |client| client.cache_disable(&disk).await)?,
        Cache::Resize { disk, size } => {
            let patch = CachePatch { size: Some(size), ..CachePatch::default() };
            ask(global, async |client| client.cache_patch(&disk, &patch).await)?
        }
        Cache::Set { disk, block_size, policy } => {
            let patch = CachePatch { size: None, block_size, policy };
            ask(global, async |client| client.cache_patch(&disk, &patch).await)?
        }
        Cache::Clear { disk } => ask(global, async |client| client.cache_clear(&disk).await)?,
    };
    print_change(global.output, &changed)
}
