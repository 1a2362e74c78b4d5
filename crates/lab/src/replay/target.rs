//! Target of a replay: an NBD export, a file or a block device.

use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use hob_nbd::TransmissionFlags;

use super::Changes;
use super::file::FileTarget;
use crate::driver::{Connection, DEPTH_MAX, Done, Timed};

/// Properties of a replay target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetInfo {
    /// Name of the target as the user gave it.
    pub name: String,
    /// Size of the target, bytes.
    pub size_bytes: u64,
    /// Alignment of offsets and lengths, bytes.
    pub unit_bytes: u32,
    /// Maximum length of a read or write, bytes.
    pub payload_bytes_max: u32,
    /// True if the target refuses changes.
    pub read_only: bool,
    /// True if the target supports discards.
    pub can_discard: bool,
    /// True if the target supports flushes.
    pub can_flush: bool,
}

/// Tells whether I/O to a file or block device uses the kernel's page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileAccess {
    /// Buffered I/O: the kernel's page cache serves many requests.
    #[default]
    Buffered,
    /// Direct I/O (O_DIRECT) without the page cache, in units of at least 512 bytes.
    Direct,
}

/// An open replay target.
pub struct Target {
    info: TargetInfo,
    way: Way,
}

enum Way {
    Nbd(Box<Connection>),
    File(FileTarget),
}

impl Target {
    /// Opens the target `spec`: an NBD URI, or the path of a file or block device. A file is opened
    /// for writing only if changes are allowed.
    ///
    /// # Errors
    /// Returns an error if the target does not exist or cannot be used.
    pub fn open(spec: &str, access: FileAccess, changes: Changes) -> Result<Target> {
        match spec.split_once("://") {
            Some(_) => {
                ensure!(
                    access == FileAccess::Buffered,
                    "{spec} is not a file or block device, so direct I/O cannot be chosen"
                );
                Self::open_nbd(spec)
            }
            None => Self::open_file(spec, access, changes),
        }
    }

    fn open_nbd(spec: &str) -> Result<Target> {
        let connection = Connection::open(&spec.parse()?)?;
        let negotiated = connection.negotiated();
        let has = |flag| negotiated.flags.contains(flag);
        let info = TargetInfo {
            name: spec.to_owned(),
            size_bytes: negotiated.size_bytes,
            unit_bytes: negotiated.block_size_min,
            payload_bytes_max: negotiated.block_size_max,
            read_only: has(TransmissionFlags::READ_ONLY),
            can_discard: has(TransmissionFlags::SEND_TRIM),
            can_flush: has(TransmissionFlags::SEND_FLUSH),
        };
        Ok(Target { info, way: Way::Nbd(Box::new(connection)) })
    }

    fn open_file(spec: &str, access: FileAccess, changes: Changes) -> Result<Target> {
        let writes = changes == Changes::Allow;
        let open = || FileTarget::open(Path::new(spec), access, writes);
        let mut file = open().with_context(|| format!("cannot open {spec}"))?;
        let kind = file.file().metadata()?.file_type();
        ensure!(!kind.is_dir(), "{spec} is a directory, not a file or block device");
        let size_bytes = file
            .file()
            .seek(SeekFrom::End(0))
            .with_context(|| format!("{spec} is not a file or block device"))?;
        let info = TargetInfo {
            name: spec.to_owned(),
            size_bytes,
            unit_bytes: file.unit_bytes(),
            payload_bytes_max: super::file::PAYLOAD_BYTES_MAX,
            read_only: !writes,
            can_discard: false,
            can_flush: true,
        };
        Ok(Target { info, way: Way::File(file) })
    }

    /// Returns the properties of the target.
    pub fn info(&self) -> &TargetInfo {
        &self.info
    }

    /// Returns the maximum queue depth of the target.
    pub fn depth_max(&self) -> usize {
        match self.way {
            Way::Nbd(_) => DEPTH_MAX,
            Way::File(_) => super::file::DEPTH_MAX,
        }
    }

    /// Sends all requests; see [`Connection::run`].
    pub(super) fn run(
        self,
        source: impl Iterator<Item = Result<Timed>> + Send,
        depth: usize,
        stop: &AtomicBool,
        done: impl FnMut(&Done),
    ) -> Result<()> {
        match self.way {
            Way::Nbd(connection) => connection.run(source, depth, stop, done),
            Way::File(file) => file.run(source, depth, stop, done),
        }
    }
}
