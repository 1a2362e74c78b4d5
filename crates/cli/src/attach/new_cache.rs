//! The cache of a new attachment: its pool, its size and its settings.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;

use anyhow::{anyhow, bail};
use hob_control::{CacheEnable, CacheSettings, Pool, Size};

use super::Attach;
use super::record::Record;

/// Minimum size of a cache if `--size` is absent, bytes.
const CACHE_MIN_BYTES: u64 = 64 << 20;
/// If `--size` is absent, the size of the cache is the image size divided by this number.
const CACHE_PART: u64 = 10;

/// Returns the pool for the caches.
pub(super) fn pool<'a>(pools: &'a [Pool], name: Option<&str>) -> anyhow::Result<&'a Pool> {
    let names = || pools.iter().map(|pool| pool.name.as_str()).collect::<Vec<_>>().join(", ");
    match (name, pools) {
        (_, []) => bail!("hob has no pool; create one with 'hob pool create NAME DEVICE'"),
        (Some(name), _) => {
            let found = pools.iter().find(|pool| pool.name == name);
            found.ok_or_else(|| anyhow!("hob has no pool {name}; it has: {}", names()))
        }
        (None, [only]) => Ok(only),
        (None, _) => bail!("hob has several pools; choose one with --pool: {}", names()),
    }
}

/// Returns the settings of a cache: those of the command, or else those of the earlier attachment.
pub(super) fn settings(args: &Attach, pool: &Pool, earlier: Option<&Record>) -> CacheEnable {
    match earlier {
        Some(record) if !has_options(args) => record.cache.clone(),
        _ => CacheEnable { pool: pool.name.clone(), size: args.size, settings: args.settings.clone().into() },
    }
}

/// Returns true if the command has an option for the cache.
pub(super) fn has_options(args: &Attach) -> bool {
    let settings: CacheSettings = args.settings.clone().into();
    args.pool.is_some() || args.size.is_some() || settings != CacheSettings::default()
}

/// Returns the size of the cache of an image if `--size` is absent.
pub(super) fn usual_size(file: &Path) -> Size {
    let length = File::open(file).and_then(|mut file| file.seek(SeekFrom::End(0))).unwrap_or(0);
    Size((length / CACHE_PART).max(CACHE_MIN_BYTES))
}

/// Refuses attachments whose caches together need more than the free space of the pool.
pub(super) fn check_space<'a>(new: impl Iterator<Item = &'a Record>, pool: &Pool) -> anyhow::Result<()> {
    let new: u64 = new.filter_map(|record| record.cache.size).map(Size::bytes).sum();
    if new > pool.free.bytes() {
        bail!(
            "the caches need {}, and pool {} has {} free; choose a --size or another --pool",
            Size(new).human(),
            pool.name,
            pool.free.human()
        );
    }
    Ok(())
}
