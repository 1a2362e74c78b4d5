//! Deletes in the background the objects that crashes leave in the store. They are found by
//! listing.
//!
//! An object is deleted if an epoch before ours made it, and neither the map nor the durable
//! manifest refers to it; the durable manifest still needs objects that become garbage with the
//! next one. No earlier epoch can refer to it any more: its next manifest finds the number taken.
//! Objects of later epochs are not touched; if there is one, the disk is not ours.
//!
//! Manifests older than the newest one are deleted, unless they fence.

use std::sync::Arc;

use super::disk::Disk;
use super::format::{Manifest, Name};
use super::store::StoreError;

/// Maximum number of names in memory.
const BATCH_MAX: usize = 10_000;

impl Disk {
    /// Deletes what nothing refers to, if there may be such. What cannot be done now is done after the next opening.
    pub(super) async fn sweep(self: &Arc<Self>) {
        if self.here.is_none() {
            return;
        }
        if self.state().inherited {
            match self.sweep_objects().await {
                Ok(count) => {
                    self.state().inherited = false;
                    if count > 0 {
                        tracing::info!("{count} objects that an interrupted writer had left were deleted");
                    }
                }
                Err(error) => {
                    tracing::warn!("objects that an interrupted writer had left stay for now: {error}");
                }
            }
        }
        if let Err(error) = self.sweep_manifests().await {
            tracing::debug!("old manifests stay for now: {error}");
        }
    }

    async fn sweep_objects(&self) -> Result<u64, StoreError> {
        let mut count = 0;
        for folder in ["data", "pages"] {
            loop {
                let (mut idle, mut more) = (Vec::new(), false);
                let mut note = |name| {
                    if self.is_idle(name) {
                        match idle.len() < BATCH_MAX {
                            true => idle.push(name),
                            false => more = true,
                        }
                    }
                };
                self.store.list(folder, &mut note).await?;
                for name in idle {
                    self.check_ours().map_err(|_| StoreError::Refused("the disk is another's".into()))?;
                    self.store.delete(name).await?;
                    count += 1;
                }
                if !more {
                    break;
                }
            }
        }
        Ok(count)
    }

    /// Returns true if nothing refers to it, now and later.
    fn is_idle(&self, name: Name) -> bool {
        let state = self.state();
        let (made, current) = match name {
            Name::Data(index, made) if index < self.shape.objects() => (made, state.map.get(index)),
            Name::Page(page, made) if (page as usize) < state.pages.len() => {
                (made, state.pages[page as usize])
            }
            _ => return false,
        };
        made != current && made.epoch() < self.epoch && !state.garbage.contains(&name)
    }

    async fn sweep_manifests(&self) -> Result<(), StoreError> {
        let newest = self.state().sequence;
        for number in self.store.manifests().await?.into_iter().filter(|number| *number < newest) {
            let name = Name::Manifest(number);
            let bytes = match self.store.get(name, None).await {
                Err(StoreError::Absent) => continue,
                bytes => bytes?,
            };
            // One that cannot be read may be one that fences.
            if Manifest::decode(&bytes, number).is_ok_and(|manifest| !manifest.stays) {
                self.store.delete(name).await?;
            }
        }
        Ok(())
    }
}
