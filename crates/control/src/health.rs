//! API types of the daemon's health: the problems that keep it from doing everything it is
//! configured to do.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::named::named;

/// `GET /v1/health`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// Whether the daemon has problems.
    pub status: HealthStatus,
    /// The problems; empty if the daemon is healthy.
    pub problems: Vec<HealthProblem>,
}

/// Whether the daemon has problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum HealthStatus {
    /// The daemon has no problem.
    Ok,
    /// There are problems. Objects that no problem names work normally.
    Degraded,
}

/// A problem that the daemon reports. It concerns one object, for example a disk, a flash device or
/// the daemon itself: see `subject`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HealthProblem {
    /// Kind of problem.
    pub kind: ProblemKind,
    /// The subject of the problem: a disk, a pool with a device path or a cache, a swap area, a shard, this
    /// host in its cluster, the daemon's state, its configuration, or the subject of a task.
    pub subject: String,
    /// Description of the problem.
    pub reason: String,
}

named! {
    /// Kinds of problems. Each kind of problem needs another reaction of the operator.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
    #[serde(rename_all = "kebab-case")]
    pub enum ProblemKind {
        /// A shard, a thread that serves disks, does not answer.
        ShardSilent = "shard-silent",
        /// A disk is not served.
        DiskOffline = "disk-offline",
        /// A flash device could not be opened.
        DeviceOffline = "device-offline",
        /// A flash device failed too often, and hob stopped using it.
        DeviceFenced = "device-fenced",
        /// A flash device does not answer in time.
        DeviceStalled = "device-stalled",
        /// A cache works with less flash or fewer copies than configured.
        CacheDegraded = "cache-degraded",
        /// The journal of a cache cannot be written.
        JournalLost = "journal-lost",
        /// The checksum of data read from flash did not match.
        ChecksumMismatch = "checksum-mismatch",
        /// Flash cannot return dirty data, and no other copy exists.
        DirtyLost = "dirty-lost",
        /// A cache that belongs to no disk of this daemon has dirty data, or may have some.
        OrphanDirty = "orphan-dirty",
        /// hob cannot write dirty data to the backing.
        DestageStuck = "destage-stuck",
        /// The flash writes of a pool exceed its budget, by writes that hob does not refuse.
        FlashWritesExceeded = "flash-writes-exceeded",
        /// The connection to a backing is lost.
        BackingUnreachable = "backing-unreachable",
        /// A backing answers slowly, or not at all.
        BackingSlow = "backing-slow",
        /// A backing answered requests with errors within the last minute.
        BackingErrors = "backing-errors",
        /// A backing does not support FLUSH, so hob cannot make its writes durable.
        FlushMissing = "flush-missing",
        /// The crash log of a write-back cache, or the mark of a disk's unflushed changes, is missing or
        /// cannot be written. If hob is killed, acknowledged writes may be lost.
        CrashLogMissing = "crash-log-missing",
        /// The block device of a disk on this host is missing, or the kernel has no connection to hob.
        HostDeviceMissing = "host-device-missing",
        /// A disk's file (FUSE) or vhost-user socket cannot be served.
        ExportFailed = "export-failed",
        /// The file of a pool, of a backing, or below an image was removed, renamed or replaced while
        /// hob uses it.
        FileMissing = "file-missing",
        /// A swap area that should be on is off.
        SwapOff = "swap-off",
        /// This host has no lease in its cluster, so its disks do not answer.
        ClusterAway = "cluster-away",
        /// The daemon's state cannot be saved. A restart loses the changes since the state was saved
        /// last.
        StateNotSaved = "state-not-saved",
        /// The filesystem of the state directory is nearly full. The state can still be saved.
        StateSpaceLow = "state-space-low",
        /// A change that continued in the background failed, and no operator has acknowledged the
        /// failure.
        TaskFailed = "task-failed",
        /// The daemon refused hob.toml when it started, or could not reload, and uses the previous
        /// configuration.
        ConfigRefused = "config-refused",
        /// The last reload did not make a change of hob.toml: it waits for `hob config apply --yes`,
        /// needs commands, or failed.
        ConfigPending = "config-pending",
    }
}

impl From<Vec<HealthProblem>> for Health {
    fn from(problems: Vec<HealthProblem>) -> Health {
        let status = if problems.is_empty() { HealthStatus::Ok } else { HealthStatus::Degraded };
        Health { status, problems }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_the_names_that_json_gives_them() {
        for kind in ProblemKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
    }

    #[test]
    fn one_problem_is_enough() {
        let problem = HealthProblem {
            kind: ProblemKind::DiskOffline,
            subject: "web".to_owned(),
            reason: "no such file".to_owned(),
        };
        assert_eq!(Health::from(vec![]).status, HealthStatus::Ok);
        assert_eq!(Health::from(vec![problem]).status, HealthStatus::Degraded);
    }
}
