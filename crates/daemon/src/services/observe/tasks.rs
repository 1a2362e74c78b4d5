//! API views of tasks, with the amount of dirty data for drains.

use hob_control::{Task, TaskState};

use super::Observe;
use crate::services::registry::DiskEntry;

impl Observe {
    /// Returns the tasks in progress, and those that ended after their client stopped waiting; the
    /// oldest first.
    pub(in crate::services) fn tasks_view(&self) -> Vec<Task> {
        let mut shown = self.tasks.all();
        let inner = self.registry.inner();
        for task in shown.iter_mut().filter(|task| task.state == TaskState::Running) {
            let disk = inner.disks.get(&task.subject).filter(|_| is_of_disk(&task.what));
            // A cache that shrinks writes only the dirty data of some segments to the backing.
            let waits = |disk: &DiskEntry| disk.dirty().filter(|dirty| dirty.draining || disk.pushes());
            task.dirty = disk.and_then(waits);
            task.can_cancel = task.dirty.is_some();
        }
        shown
    }
}

/// Returns true if tasks of this kind act on a disk.
fn is_of_disk(what: &str) -> bool {
    ["disk ", "cache ", "drain", "migrate", "qos "].iter().any(|kind| what.starts_with(kind))
}
