//! The files of a loan: what is lent, and beside it what is kept of the loan. All of this may wait for a disk.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use hob_control::{Problem, Size};
use serde::{Deserialize, Deserializer, Serialize};

use crate::daemon::manager::api_error::{ApiError, ErrorKind};
use crate::daemon::state::create_private;

/// What is kept of a loan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Kept {
    pub(super) name: String,
    /// Of the borrower.
    pub(super) certificate: String,
    pub(super) size: Size,
    #[serde(deserialize_with = "who_ended")]
    pub(super) ended: Option<EndedBy>,
}

/// Who ended a loan, which says when its borrower may have another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum EndedBy {
    /// This host's operator: when that is forgotten.
    Operator,
    /// This host, to adopt a disk of the borrower's: when nobody needs its bytes and the borrower has nothing dirty.
    Adoption,
    /// The borrower, which gave it back, or an operator who forgets it: when nobody needs its bytes.
    Return,
}

/// Records of before say only whether it is ended; that was what operators had done.
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

/// Replaces what is kept of a loan, durably.
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

/// Makes the file of a loan, all of its room reserved.
pub(super) fn make_file(path: &Path, size: Size) -> Result<(), ApiError> {
    let file = fs::OpenOptions::new().write(true).create(true).truncate(true).open(path);
    let file = file.map_err(|error| failed("make the loan's file", &error))?;
    let made = rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o600))
        .and_then(|()| rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size.bytes()))
        .map_err(std::io::Error::from)
        .and_then(|()| file.sync_all());
    made.map_err(|error| {
        let _ = fs::remove_file(path);
        failed("reserve the loan's room", &error)
    })
}

/// Removes a file, if it is there.
pub(super) fn remove(file: &Path) -> std::io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Can its beginning be read, if it is there?
pub(super) fn check_readable(file: &Path) -> std::io::Result<()> {
    match fs::File::open(file).and_then(|file| file.read_exact_at(&mut [0; 4096], 0)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

pub(super) fn failed(what: &str, error: &std::io::Error) -> ApiError {
    ApiError { kind: ErrorKind::Failed, problem: Problem::new(format!("cannot {what}: {error}")) }
}
