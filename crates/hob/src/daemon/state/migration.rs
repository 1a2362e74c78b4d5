//! State of disks that migrate or have migrated: the owner decides which host may serve them
//! (docs/decisions/0013).

use hob_control::{CarryMode, MigrationStart};
use hob_engine::migration::{Record, Session};
use serde::{Deserialize, Serialize};

/// A disk's way from host to host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MigrationSpec {
    /// Tells it from other disks of its name: random, 32 hexadecimal digits, made when it moved first.
    pub(crate) lineage: String,
    /// The ownership.
    pub(crate) record: RecordSpec,
    /// The other host.
    pub(crate) peer: String,
    /// What happens to its cache.
    pub(crate) cache: CarryMode,
    /// The mode that the cache is to have when it is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mode_due: Option<String>,
    /// At the source: the requested migration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) plan: Option<MigrationStart>,
}

/// A disk that was expected and did not arrive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GoneState {
    /// Its name.
    pub(crate) name: String,
    /// Id of the disk.
    pub(crate) lineage: String,
    /// In which session.
    pub(crate) generation: u64,
    /// Likewise.
    pub(crate) attempt: u32,
}

/// [`Record`] in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is", deny_unknown_fields)]
pub(crate) enum RecordSpec {
    /// This host's.
    Owner { generation: u64, attempts: u32 },
    /// This host's, and on its way.
    Leaving { generation: u64, attempt: u32 },
    /// Handed over, or perhaps.
    Away { generation: u64, attempt: u32, taken: bool },
    /// It is to arrive.
    Awaiting { generation: u64, attempt: u32 },
}

impl RecordSpec {
    /// For the state. [`Record::Gone`] is kept elsewhere.
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

    /// In the types of the state machines.
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
