//! The files of a flash lease: its data file and its record. The functions here may block.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use hob_control::{Problem, Size};
use serde::{Deserialize, Deserializer, Serialize};

use crate::api_error::{ApiError, ErrorKind, Result};
use crate::state::create_private;

/// The record of a flash lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kept {
    pub(super) name: String,
    pub(super) certificate: String,
    pub(super) size: Size,
    #[serde(deserialize_with = "who_ended")]
    pub(super) ended: Option<EndedBy>,
}

/// The party that ended a flash lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum EndedBy {
    /// The operator of this host. The borrower may get a new flash lease after `hob peer end
    /// BORROWER --forget`.
    Operator,
    /// This host, which ended the flash lease to fail over a disk of the borrower. The borrower may
    /// get a new flash lease when no disk of the cluster needs the data on the flash, and the
    /// borrower has no dirty data.
    Adoption,
    /// The borrower, which returned the flash lease, or an operator with `--forget`. The borrower
    /// may get a new flash lease when no disk of the cluster needs the data on the returned flash.
    Return,
}

/// Reads the field `ended`. Earlier versions wrote only whether the operator had ended the flash
/// lease.
fn who_ended<'de, D: Deserializer<'de>>(value: D) -> Result<Option<EndedBy>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Word {
        Is(bool),
        By(Option<EndedBy>),
    }
    Ok(match Word::deserialize(value)? {
        Word::Is(ended) => ended.then_some(EndedBy::Operator),
        Word::By(who) => who,
    })
}

/// Replaces the record of a flash lease durably.
pub(super) fn write_record(directory: &Path, borrower: &str, kept: &Kept) -> std::io::Result<()> {
    let temporary = directory.join(format!("{borrower}.new"));
    let mut file = create_private(&temporary)?;
    file.write_all(&serde_json::to_vec_pretty(kept)?)?;
    file.sync_all()?;
    fs::rename(&temporary, directory.join(format!("{borrower}.json")))?;
    fs::File::open(directory)?.sync_all()
}

pub(super) fn remove_record(directory: &Path, borrower: &str) -> std::io::Result<()> {
    fs::remove_file(directory.join(format!("{borrower}.json")))?;
    fs::File::open(directory)?.sync_all()
}

/// Creates the file of a flash lease, and allocates all its space.
pub(super) fn make_file(path: &Path, size: Size) -> Result<()> {
    let file = fs::OpenOptions::new().write(true).create(true).truncate(true).open(path);
    let file = file.map_err(|error| failed("create the file of the flash lease", &error))?;
    let made = rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o600))
        .and_then(|()| rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size.bytes()))
        .map_err(std::io::Error::from)
        .and_then(|()| file.sync_all());
    made.map_err(|error| {
        let _ = fs::remove_file(path);
        failed("allocate the space of the flash lease", &error)
    })
}

/// Removes a file, if it exists.
pub(super) fn remove(file: &Path) -> std::io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Checks that the beginning of a file is readable, if the file exists.
pub(super) fn check_readable(file: &Path) -> std::io::Result<()> {
    match fs::File::open(file).and_then(|file| file.read_exact_at(&mut [0; 4096], 0)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

pub(super) fn failed(what: &str, error: &std::io::Error) -> ApiError {
    ApiError { kind: ErrorKind::Failed, problem: Problem::new(format!("cannot {what}: {error}")) }
}
