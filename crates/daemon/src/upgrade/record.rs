//! The record of an upgrade, which describes the open descriptors that one hob process hands over
//! to the next.
//!
//! Bytes: 16 of [`MAGIC`], the version (u32), the length of the table (u32), the table (JSON), and
//! then the unprocessed bytes that clients had sent, one client after the other in the table's
//! order. All numbers are little-endian. The descriptors are passed with the record, in the order
//! of the table: listening sockets, files, clients. Any deviation makes the whole record invalid.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// First bytes of a record.
const MAGIC: [u8; 16] = *b"hob hand-over\r\n\0";

/// Version of the record format. A hob that supports a different version starts without the record.
pub(crate) const VERSION: u32 = 1;

/// Length of magic, version and table length.
const HEAD_BYTES: usize = 24;

/// Maximum length of the table in bytes.
const TABLE_BYTES_MAX: usize = 64 << 20;

/// Maximum number of entries of each kind in the table.
const ENTRIES_MAX: usize = 65_536;

/// Maximum number of unprocessed bytes per client.
const RECEIVED_BYTES_MAX: usize = 1 << 20;

/// Maximum length of a name or path in bytes.
const TEXT_BYTES_MAX: usize = 4096;

const SECOND_NS: u64 = 1_000_000_000;

/// The record of an upgrade: its table, and the bytes that clients had sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    /// Table that describes the file descriptors passed to the new process.
    pub(crate) table: Table,
    /// Unprocessed bytes of each client.
    pub(crate) received: Vec<Vec<u8>>,
}

/// Description of the descriptors, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    /// Path of the program that was started first.
    pub(crate) program: PathBuf,
    /// Names of the listening sockets.
    #[serde(rename = "doors")]
    pub(crate) listening: Vec<String>,
    pub(crate) files: Vec<FileEntry>,
    pub(crate) clients: Vec<ClientEntry>,
}

/// A mounted file that is handed over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileEntry {
    /// Name of the export. A disk's own export has the disk's name.
    pub(crate) disk: String,
    /// Path at which the file is mounted.
    pub(crate) path: PathBuf,
    /// True if hob created the covered file for this mount.
    pub(crate) made: bool,
    /// True if writes are refused.
    pub(crate) read_only: bool,
    /// Size of the mounted file in bytes.
    pub(crate) size: u64,
    /// Permission bits of the mounted file.
    pub(crate) mode: u32,
    /// User id of the mounted file's owner.
    pub(crate) uid: u32,
    /// Group id of the mounted file.
    pub(crate) gid: u32,
    /// Time of the file in seconds since 1970, rounded up, so that the file's times never go back.
    /// The record has no nanoseconds, because earlier versions refuse unknown fields.
    pub(crate) seconds: u64,
}

impl FileEntry {
    /// Returns [`seconds`](Self::seconds) of a file with the time `time_ns`, nanoseconds since
    /// 1970.
    pub(crate) fn seconds_of(time_ns: u64) -> u64 {
        time_ns.div_ceil(SECOND_NS)
    }

    /// Returns the time of the file, nanoseconds since 1970.
    pub(crate) fn time_ns(&self) -> u64 {
        self.seconds.saturating_mul(SECOND_NS)
    }
}

/// An NBD client whose connection is handed over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClientEntry {
    /// Name of the export that the client requested.
    pub(crate) export: String,
    /// Size of the export that was announced to the client, bytes.
    pub(crate) size: u64,
    /// Transmission flags of the export that were announced to the client.
    pub(crate) flags: u16,
    /// Minimum block size that was announced to the client, bytes.
    pub(crate) block_min: u32,
    /// Maximum request length that was announced to the client, bytes.
    pub(crate) block_max: u32,
    /// True if structured replies were negotiated.
    pub(crate) structured_replies: bool,
    /// True if the metadata context base:allocation was negotiated.
    pub(crate) base_allocation: bool,
    /// Further negotiated metadata contexts, in this order.
    #[serde(default)]
    pub(crate) contexts: Vec<String>,
    /// Number of received but unprocessed bytes.
    pub(crate) received: u32,
    /// True if the client is the kernel, for a block device of this host. Absent otherwise, so that
    /// earlier versions accept the record.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) is_kernel: bool,
}

/// Why a record is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RecordError {
    /// The bytes are not a record.
    #[error("the received bytes are not a hand-over record of an upgrade")]
    Magic,
    /// The record has a different version than this hob supports.
    #[error("the hand-over record has version {0}, and this hob supports version {VERSION}")]
    Version(u32),
    /// The content of the record is invalid.
    #[error("the hand-over record is invalid: {0}")]
    Broken(String),
}

impl Table {
    /// Returns the number of descriptors in the table.
    pub(crate) fn descriptors(&self) -> usize {
        self.listening.len() + self.files.len() + self.clients.len()
    }

    fn check(&self) -> Result<(), RecordError> {
        let fits = |text: &str| text.len() <= TEXT_BYTES_MAX && !text.contains('\0');
        let paths = self.files.iter().map(|file| &file.path).chain([&self.program]);
        let names = self.files.iter().map(|file| &file.disk);
        let texts = names.chain(&self.listening).chain(self.clients.iter().map(|client| &client.export));
        if [self.listening.len(), self.files.len(), self.clients.len()]
            .iter()
            .any(|count| *count > ENTRIES_MAX)
        {
            return Err(broken("the record has too many entries"));
        }
        if !texts.into_iter().all(|text| fits(text))
            || !paths.into_iter().all(|path| fits(&path.to_string_lossy()))
        {
            return Err(broken("a name in the record is too long"));
        }
        if self.files.iter().any(|file| !file.path.is_absolute() || file.mode > 0o7777) {
            return Err(broken("a file in the record is invalid"));
        }
        if self.clients.iter().any(|client| client.received as usize > RECEIVED_BYTES_MAX) {
            return Err(broken("a client in the record has too many bytes"));
        }
        Ok(())
    }
}

impl Record {
    pub(crate) fn encode(&self) -> Result<Vec<u8>, RecordError> {
        let lengths = self.table.clients.iter().map(|client| client.received as usize);
        assert!(lengths.eq(self.received.iter().map(Vec::len)), "the table says what clients have sent");
        self.table.check()?;
        let table = serde_json::to_vec(&self.table).map_err(|error| broken(&error.to_string()))?;
        if table.len() > TABLE_BYTES_MAX {
            return Err(broken("the table of the record is too long"));
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((table.len() as u32).to_le_bytes());
        bytes.extend(table);
        self.received.iter().for_each(|received| bytes.extend(received));
        Ok(bytes)
    }

    /// Decodes bytes that were received with `descriptors` descriptors.
    pub(crate) fn decode(bytes: &[u8], descriptors: usize) -> Result<Record, RecordError> {
        let Some((head, rest)) = bytes.split_at_checked(HEAD_BYTES) else { return Err(RecordError::Magic) };
        if head[..16] != MAGIC {
            return Err(RecordError::Magic);
        }
        let number = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
        if number(16) != VERSION {
            return Err(RecordError::Version(number(16)));
        }
        let length = number(20) as usize;
        if length > TABLE_BYTES_MAX {
            return Err(broken("the table of the record is too long"));
        }
        let Some((table, mut rest)) = rest.split_at_checked(length) else {
            return Err(broken("the table of the record ends too early"));
        };
        let table: Table = serde_json::from_slice(table).map_err(|error| broken(&error.to_string()))?;
        table.check()?;
        if table.descriptors() != descriptors {
            return Err(broken(&format!(
                "the record lists {} descriptors, and {descriptors} were received",
                table.descriptors()
            )));
        }
        let mut received = Vec::with_capacity(table.clients.len());
        for client in &table.clients {
            let Some((own, others)) = rest.split_at_checked(client.received as usize) else {
                return Err(broken("the record ends too early"));
            };
            received.push(own.to_vec());
            rest = others;
        }
        if !rest.is_empty() {
            return Err(broken("the record has bytes after its end"));
        }
        Ok(Record { table, received })
    }
}

fn broken(what: &str) -> RecordError {
    RecordError::Broken(what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let file = FileEntry {
            disk: "vm1".into(),
            path: "/srv/vm1.img".into(),
            made: true,
            read_only: false,
            size: 1 << 30,
            mode: 0o640,
            uid: 1,
            gid: 2,
            seconds: 3,
        };
        let client = |export: &str, received| ClientEntry {
            export: export.into(),
            size: 1 << 20,
            flags: 0x56d,
            block_min: 512,
            block_max: 32 << 20,
            structured_replies: true,
            base_allocation: false,
            contexts: vec!["qemu:dirty-bitmap:nightly".into()],
            received,
            is_kernel: false,
        };
        let table = Table {
            program: "/usr/bin/hob".into(),
            listening: vec!["nbd unix:/run/hob/nbd.sock".into(), "control unix:/run/hob/control.sock".into()],
            files: vec![file],
            clients: vec![client("vm1", 3), client("", 0), client("vm2", 5)],
        };
        Record { table, received: vec![b"abc".to_vec(), Vec::new(), b"01234".to_vec()] }
    }

    #[test]
    fn a_record_survives_encoding() {
        let bytes = record().encode().unwrap();
        assert_eq!(Record::decode(&bytes, 6), Ok(record()));
        let empty = Record::default().encode().unwrap();
        assert_eq!(Record::decode(&empty, 0), Ok(Record::default()));
    }

    /// The next program makes the times of a changed file later than the time in the record.
    #[test]
    fn the_time_of_a_file_does_not_go_back() {
        let mut file = record().table.files.remove(0);
        for time_ns in [0, 1, SECOND_NS - 1, SECOND_NS, SECOND_NS + 1, 1_700_000_100_123_456_789] {
            file.seconds = FileEntry::seconds_of(time_ns);
            assert!((time_ns..time_ns + SECOND_NS).contains(&file.time_ns()), "{time_ns}");
        }
        file.seconds = u64::MAX;
        assert_eq!(file.time_ns(), u64::MAX, "a record may have any number");
    }

    #[test]
    fn a_record_of_another_version_or_with_other_descriptors_is_refused() {
        let bytes = record().encode().unwrap();
        assert!(matches!(Record::decode(&bytes, 5), Err(RecordError::Broken(_))));
        assert!(matches!(Record::decode(&bytes, 7), Err(RecordError::Broken(_))));
        let mut later = bytes.clone();
        later[16] = 2;
        assert_eq!(Record::decode(&later, 6), Err(RecordError::Version(2)));
        let mut other = bytes;
        other[0] = b'H';
        assert_eq!(Record::decode(&other, 6), Err(RecordError::Magic));
    }

    #[test]
    fn impossible_records_are_refused() {
        let refused = |change: fn(&mut Record)| {
            let mut record = record();
            change(&mut record);
            assert!(record.encode().is_err());
        };
        refused(|record| record.table.listening = vec![String::new(); ENTRIES_MAX + 1]);
        refused(|record| record.table.files[0].path = "relative".into());
        refused(|record| record.table.files[0].mode = 0o170_000);
        refused(|record| record.table.clients[0].export = "x".repeat(TEXT_BYTES_MAX + 1));
        refused(|record| {
            record.table.clients[0].received = 1 << 21;
            record.received[0] = vec![0; 1 << 21];
        });
    }

    /// A changed byte, a truncated record or random bytes only cause an error.
    #[test]
    fn bytes_from_anywhere_never_panic() {
        let bytes = record().encode().unwrap();
        for len in 0..bytes.len() {
            assert!(Record::decode(&bytes[..len], 6).is_err(), "cut at {len}");
        }
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for _ in 0..20_000 {
            let mut changed = bytes.clone();
            for _ in 0..=next() % 4 {
                let at = next() as usize % changed.len();
                changed[at] = next() as u8;
            }
            if next() % 4 == 0 {
                changed.truncate(next() as usize % changed.len());
            }
            // The record may stay valid if only a letter of a name changes.
            if let Ok(record) = Record::decode(&changed, 6) {
                assert_eq!(record.table.descriptors(), 6);
            }
            let noise: Vec<u8> = (0..next() % 200).map(|_| next() as u8).collect();
            assert!(Record::decode(&noise, 6).is_err());
            let mut headed = bytes[..HEAD_BYTES].to_vec();
            headed.extend(noise);
            assert!(Record::decode(&headed, 6).is_err());
        }
    }
}
