//! API views of tasks, with the amount of dirty data for drains.

use hob_control::{Dirty, Task, TaskState};

use super::Observe;
use crate::services::registry::{DiskEntry, Inner};

/// Name of tasks that remove a device from a pool. Such a task moves one cache after the other off
/// the device.
pub(in crate::services) const REMOVE_DEVICE: &str = "pool remove-device";

impl Observe {
    /// Returns the tasks in progress, and those that ended after their client stopped waiting; the
    /// oldest first.
    pub(in crate::services) fn tasks_view(&self) -> Vec<Task> {
        let mut shown = self.tasks.all();
        let inner = self.registry.inner();
        for task in shown.iter_mut().filter(|task| task.state == TaskState::Running) {
            task.dirty = inner.dirty_of_task(task);
            task.can_cancel = task.dirty.is_some();
            task.waits_for = inner.flash_of_task(task);
        }
        shown
    }
}

impl Inner {
    /// Returns the disk whose dirty data a task may have to write to the backing, and its name.
    pub(in crate::services) fn disk_of_task(&self, task: &Task) -> Option<(&str, &DiskEntry)> {
        let name = match task.what.as_str() {
            REMOVE_DEVICE => self.pools.get(&task.subject)?.leaving_disk.as_deref()?,
            what if is_of_disk(what) => task.subject.as_str(),
            _ => return None,
        };
        self.disks.get_key_value(name).map(|(name, disk)| (name.as_str(), disk))
    }

    /// Returns the flash device for which a change of a disk may wait, because the device does not
    /// answer.
    fn flash_of_task(&self, task: &Task) -> Option<String> {
        let (name, _) = self.disk_of_task(task)?;
        if task.dirty.as_ref().is_some_and(|dirty| dirty.why.is_some()) {
            return None;
        }
        Some(format!("the flash device {}, which does not answer", self.silent_flash(name)?))
    }

    /// Returns the dirty data for which a task waits.
    fn dirty_of_task(&self, task: &Task) -> Option<Dirty> {
        let (name, disk) = self.disk_of_task(task)?;
        // A cache that shrinks writes only the dirty data of some segments to the backing.
        let dirty = disk.dirty().filter(|dirty| dirty.draining || disk.pushes())?;
        if task.what != REMOVE_DEVICE {
            return Some(dirty);
        }
        let why = match (disk.silent_backing(), dirty.why) {
            (Some(silent), _) => {
                format!("waits for the backing of {name}, which does not answer: {silent}")
            }
            (None, Some(why)) => format!("moves the cache of {name}: {why}"),
            (None, None) => format!("moves the cache of {name}"),
        };
        Some(Dirty { why: Some(why), ..dirty })
    }
}

/// Returns true if tasks of this kind act on a disk.
fn is_of_disk(what: &str) -> bool {
    ["disk ", "cache ", "drain", "migrate", "qos "].iter().any(|kind| what.starts_with(kind))
}
