//! The operation for which a client drains a disk. `hob tasks` shows it beside the drain.

/// The operation for which a client drains a disk. The client carries out the operation after the
/// drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainFor {
    /// No other operation: `hob drain`.
    Drain,
    /// A change of the cache's settings: `hob cache set`.
    CacheSet,
    /// The removal of the cache: `hob cache disable`.
    CacheDisable,
    /// The removal of the disk: `hob disk remove`.
    DiskRemove,
    /// An event of the VM: `hob disk event`.
    DiskEvent,
    /// The return of the VM to its image: `hob detach`.
    Detach,
}

/// The operations, with their values of the query parameter `operation` and the names of their tasks.
const OPERATIONS: [(DrainFor, &str, &str); 6] = [
    (DrainFor::Drain, "drain", "drain"),
    (DrainFor::CacheSet, "cache-set", "drain for cache set"),
    (DrainFor::CacheDisable, "cache-disable", "drain for cache disable"),
    (DrainFor::DiskRemove, "disk-remove", "drain for disk remove"),
    (DrainFor::DiskEvent, "disk-event", "drain for disk event"),
    (DrainFor::Detach, "detach", "drain for detach"),
];

impl DrainFor {
    /// Returns the operation with this value of the query parameter.
    pub fn of_name(name: &str) -> Option<DrainFor> {
        OPERATIONS.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// Returns the value of the query parameter `operation`.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Returns the name of the task that drains.
    pub fn task(self) -> &'static str {
        self.row().2
    }

    fn row(self) -> &'static (DrainFor, &'static str, &'static str) {
        OPERATIONS.iter().find(|row| row.0 == self).expect("every operation has a row")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_has_a_name_and_a_task() {
        for (operation, name, task) in OPERATIONS {
            assert_eq!((operation.name(), operation.task()), (name, task));
            assert_eq!(DrainFor::of_name(name), Some(operation));
            assert!(task.starts_with("drain"), "{task}");
        }
        assert_eq!(DrainFor::of_name("cache set"), None);
    }
}
