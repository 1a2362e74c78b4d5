//! A VM that was started with hob's disk after an attachment, so that QEMU has none of the block nodes
//! in the record.

use anyhow::bail;

use super::{HobDisk, Work};
use crate::attach::overlay::{NotDirect, SINCE_START};
use crate::attach::plan::{Goal, Path, State};
use crate::attach::record::Record;

impl Work<'_> {
    /// Returns true if the VM was started with hob's disk, for example by the definition that an
    /// earlier command has changed.
    pub(in crate::attach) async fn is_started_with_hob(&mut self) -> bool {
        // `check` reports other errors.
        let Err(error) = self.look(Goal::Attached).await else { return false };
        error.downcast_ref::<NotDirect>().is_some_and(|error| error.short == SINCE_START)
    }

    /// Refuses a disk that a client uses although QEMU has no block node for it, before the cache is
    /// disabled. The VM may have been started with hob's disk over vhost-user.
    pub(super) async fn check_users(&self, state: State) -> anyhow::Result<()> {
        let is_in_qemu = state.path == Path::Hob || state.node || state.job || state.marked;
        if is_in_qemu || state.disk != HobDisk::Cached || self.is_unused().await {
            return Ok(());
        }
        let Record { label, disk, target, .. } = self.record;
        bail!(
            "{label}: a client is connected to hob's disk {disk}, although QEMU has no block node for it. If the VM was \
             started with hob's disk, stop the VM, and run 'hob detach --stopped {target}'. Otherwise disconnect the \
             client, and repeat the command"
        )
    }
}
