//! State of disks that migrate or have migrated: only the owner of a disk may serve it
//! (docs/decisions/0013).

use hob_control::{CarryMode, MigrationStart};
use hob_engine::migration::{Record, Session};
use serde::{Deserialize, Serialize};

/// Migration state of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MigrationSpec {
    /// Distinguishes the disk from others of the same name: 32 random hexadecimal digits, generated
    /// at its first migration.
    pub(crate) lineage: String,
    /// This host's role in the migration: whether it owns the disk.
    pub(crate) record: RecordSpec,
    /// HOST:PORT of the other host of the migration.
    pub(crate) peer: String,
    /// How the cache moves to the destination.
    pub(crate) cache: CarryMode,
    /// Mode that the cache gets after the migration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mode_due: Option<String>,
    /// At the source: the requested migration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) plan: Option<MigrationStart>,
}

/// An incoming disk that did not arrive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GoneState {
    pub(crate) name: String,
    /// The disk's [`MigrationSpec::lineage`].
    pub(crate) lineage: String,
    /// Generation of the migration session.
    pub(crate) generation: u64,
    /// Attempt of the migration session.
    pub(crate) attempt: u32,
}

/// [`Record`] in the state file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is", deny_unknown_fields)]
pub(crate) enum RecordSpec {
    /// This host owns the disk.
    Owner { generation: u64, attempts: u32 },
    /// This host owns the disk and is migrating it to another host.
    Leaving { generation: u64, attempt: u32 },
    /// The disk was handed over to another host, or may have been.
    Away { generation: u64, attempt: u32, taken: bool },
    /// The disk is to migrate to this host.
    Awaiting { generation: u64, attempt: u32 },
}

impl RecordSpec {
    /// Converts a record into the form of the state file; `None` for [`Record::Gone`], which is
    /// saved elsewhere.
    pub(crate) fn of(record: Record) -> Option<RecordSpec> {
        Some(match record {
            Record::Owner { generation, attempts } => RecordSpec::Owner { generation, attempts },
            Record::Leaving(Session { generation, attempt }) => RecordSpec::Leaving { generation, attempt },
            Record::Away { session: Session { generation, attempt }, taken } => {
                RecordSpec::Away { generation, attempt, taken }
            }
            Record::Awaiting(Session { generation, attempt }) => RecordSpec::Awaiting { generation, attempt },
            Record::Gone(_) => return None,
        })
    }

    /// Converts the record into the type of the state machines.
    pub(crate) fn record(self) -> Record {
        match self {
            RecordSpec::Owner { generation, attempts } => Record::Owner { generation, attempts },
            RecordSpec::Leaving { generation, attempt } => Record::Leaving(Session { generation, attempt }),
            RecordSpec::Away { generation, attempt, taken } => {
                Record::Away { session: Session { generation, attempt }, taken }
            }
            RecordSpec::Awaiting { generation, attempt } => Record::Awaiting(Session { generation, attempt }),
        }
    }
}
