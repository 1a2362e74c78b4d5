//! Deletes in the background the objects that crashes left in the object store. Listing the object
//! store finds them.
//!
//! Each time a writer takes the disk, a new *epoch* begins. An object is deleted if an earlier
//! epoch created it, and neither the map nor the durable manifest refers to it. The durable
//! manifest still needs objects that become garbage when the next manifest is durable. A writer of
//! an earlier epoch can no longer refer to the object, because that writer's next manifest number
//! is taken. Objects of this epoch and of later epochs are kept. An object of a later epoch means
//! that another writer has taken the disk.
//!
//! Manifests older than the newest one are deleted, unless they fence a writer.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::disk::Disk;
use super::format::{Manifest, Name};
use super::store::StoreError;

/// Maximum number of object names in memory.
const BATCH_MAX: usize = 10_000;

impl Disk {
    /// Deletes unreferenced objects, if there may be any. Failed deletions are repeated after the
    /// next opening.
    pub(super) async fn sweep(self: &Arc<Self>) {
        if self.here.is_none() {
            return;
        }
        if self.state().inherited {
            match self.sweep_objects().await {
                Ok(count) => {
                    self.state().inherited = false;
                    if count > 0 {
                        tracing::info!("deleted {count} unreferenced objects of an interrupted writer");
                    }
                }
                Err(error) => {
                    tracing::warn!(
                        "cannot delete the unreferenced objects of an interrupted writer now: {error}"
                    );
                }
            }
        }
        if let Err(error) = self.sweep_manifests().await {
            tracing::debug!("cannot delete old manifests yet: {error}");
        }
    }

    async fn sweep_objects(&self) -> Result<u64, StoreError> {
        let mut count = 0;
        for folder in ["data", "pages"] {
            loop {
                let (mut idle, mut more) = (BTreeSet::new(), false);
                let mut note = |name| {
                    if self.is_idle(name) {
                        match idle.len() < BATCH_MAX {
                            true => _ = idle.insert(name),
                            false => more = true,
                        }
                    }
                };
                self.store.list(folder, &mut note).await?;
                for name in idle {
                    self.check_ours()
                        .map_err(|_| StoreError::Refused("another writer has taken the disk".into()))?;
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

    /// Returns true if an object is unreferenced, and no manifest can refer to it again.
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
            // An object that cannot be read may be one that fences a host.
            if Manifest::decode(&bytes, number).is_ok_and(|manifest| !manifest.stays) {
                self.store.delete(name).await?;
            }
        }
        Ok(())
    }
}
