//! Whether a daemon can do all that it is there for, and if not, why.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `GET /v1/health`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// The verdict.
    pub status: HealthStatus,
    /// The problems; empty if there are none.
    pub problems: Vec<HealthProblem>,
}

/// The verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum HealthStatus {
    /// Nothing is wrong.
    Ok,
    /// Something is. What is not named among the problems works.
    Degraded,
}

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HealthProblem {
    /// Kind of problem.
    pub kind: ProblemKind,
    /// The subject: a disk, a pool with the path of a device, a swap area, a shard, this host's name in its cluster, the daemon's state or
    /// configuration, or what a task was to change.
    pub subject: String,
    /// In words.
    pub reason: String,
}

/// Kinds of what can be wrong, each of them one reaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProblemKind {
    /// A thread that serves disks does not answer.
    ShardSilent,
    /// A disk is not served.
    DiskOffline,
    /// A flash device could not be opened.
    DeviceOffline,
    /// A flash device failed too often and is not used any more.
    DeviceFenced,
    /// A flash device does not answer in time.
    DeviceStalled,
    /// A cache works with less than its configuration asks for.
    CacheDegraded,
    /// The journal of a cache cannot be written.
    JournalLost,
    /// Flash returned other data than was written.
    ChecksumMismatch,
    /// Data that only flash has cannot be read from it.
    DirtyLost,
    /// Dirty data does not get to the backing.
    DestageStuck,
    /// The connection to a backing is lost.
    BackingUnreachable,
    /// A backing answers slowly, or not at all.
    BackingSlow,
    /// A backing has no flush: nothing makes writes durable there.
    FlushMissing,
    /// A swap area of the host that is to be on is not.
    SwapOff,
    /// This host has no lease of its cluster: its disks do not answer.
    ClusterAway,
    /// The daemon's state cannot be saved: changes since are lost at the next start.
    StateNotSaved,
    /// A change that continued in the background failed, and no operator has acknowledged that.
    TaskFailed,
    /// hob.toml was refused at the start: the daemon uses the one that it started with before.
    ConfigRefused,
}

impl ProblemKind {
    /// All kinds.
    pub const ALL: [ProblemKind; 18] = [
        ProblemKind::ShardSilent,
        ProblemKind::DiskOffline,
        ProblemKind::DeviceOffline,
        ProblemKind::DeviceFenced,
        ProblemKind::DeviceStalled,
        ProblemKind::CacheDegraded,
        ProblemKind::JournalLost,
        ProblemKind::ChecksumMismatch,
        ProblemKind::DirtyLost,
        ProblemKind::DestageStuck,
        ProblemKind::BackingUnreachable,
        ProblemKind::BackingSlow,
        ProblemKind::FlushMissing,
        ProblemKind::SwapOff,
        ProblemKind::ClusterAway,
        ProblemKind::StateNotSaved,
        ProblemKind::TaskFailed,
        ProblemKind::ConfigRefused,
    ];

    /// Name in the API and in metrics.
    pub fn name(self) -> &'static str {
        match self {
            ProblemKind::ShardSilent => "shard-silent",
            ProblemKind::DiskOffline => "disk-offline",
            ProblemKind::DeviceOffline => "device-offline",
            ProblemKind::DeviceFenced => "device-fenced",
            ProblemKind::DeviceStalled => "device-stalled",
            ProblemKind::CacheDegraded => "cache-degraded",
            ProblemKind::JournalLost => "journal-lost",
            ProblemKind::ChecksumMismatch => "checksum-mismatch",
            ProblemKind::DirtyLost => "dirty-lost",
            ProblemKind::DestageStuck => "destage-stuck",
            ProblemKind::BackingUnreachable => "backing-unreachable",
            ProblemKind::BackingSlow => "backing-slow",
            ProblemKind::FlushMissing => "flush-missing",
            ProblemKind::SwapOff => "swap-off",
            ProblemKind::ClusterAway => "cluster-away",
            ProblemKind::StateNotSaved => "state-not-saved",
            ProblemKind::TaskFailed => "task-failed",
            ProblemKind::ConfigRefused => "config-refused",
        }
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
