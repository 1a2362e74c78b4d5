//! Protects dirty data of other pools on devices that `pool create --force` and `pool add-device
//! --force` overwrite. hob overwrites a device with such data only if the caller allows the loss.

use std::path::PathBuf;
use std::time::Duration;

use hob_control::{OnDirty, Preview, Size};
use hob_storage::pool::{ForeignCache, caches_on};

use crate::api_error::{ApiError, Result};
use crate::services::flash::blocking;
use crate::watchdog::contained;

/// Maximum time for reading the journals on the devices.
const READ_MAX: Duration = Duration::from_secs(10);

/// Returns a preview of the data that is lost if these devices are overwritten.
pub(in crate::services) async fn overwritten(paths: &[String]) -> Preview {
    let devices: Vec<PathBuf> = paths.iter().map(PathBuf::from).collect();
    let reading = blocking(move || contained(|| caches_on(&devices)));
    match tokio::time::timeout(READ_MAX, reading).await {
        Ok(Ok(caches)) => preview_of(&caches),
        _ => Preview {
            effects: vec![format!(
                "{} may have dirty data of another pool's caches; its journals cannot be read",
                paths.join(", ")
            )],
            dirty_unknown: true,
            ..Preview::default()
        },
    }
}

/// Refuses to overwrite devices that have dirty data of another pool, unless `dirty` allows
/// discarding that data.
pub(super) async fn check_overwritten(paths: &[String], dirty: OnDirty) -> Result<()> {
    if dirty == OnDirty::Discard {
        return Ok(());
    }
    let preview = overwritten(paths).await;
    if !preview.loses_dirty() {
        return Ok(());
    }
    Err(ApiError::conflict(preview.effects.join("; ")).hint(
        "nothing was changed; add the devices to their own pool again to keep the data, or discard it with \
         --force --yes (API: discard_dirty=true)",
    ))
}

fn preview_of(caches: &[ForeignCache]) -> Preview {
    let mut preview = Preview::default();
    for cache in caches {
        let of = cache.owner.map_or(String::new(), |owner| format!(" of the cache {:032x}", owner.0));
        let pool = &cache.pool;
        match cache.dirty_bytes {
            Some(0) => {
                preview.effects.push(format!("pool {pool}: the data{of} is lost; none of it is dirty"))
            }
            Some(dirty) => {
                preview.dirty_lost = Size(preview.dirty_lost.bytes() + dirty);
                preview.effects.push(format!(
                    "pool {pool}: {} of dirty data{of} is lost: writes that were acknowledged to a guest",
                    Size(dirty).human()
                ));
            }
            None => {
                preview.dirty_unknown = true;
                preview.effects.push(format!(
                    "pool {pool}: all dirty data{of} is lost; the amount is unknown, because its journal cannot \
                     be read from these devices"
                ));
            }
        }
    }
    preview
}
