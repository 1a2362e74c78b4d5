//! Output files of trace commands.
//!
//! The file appears when it is complete. After Ctrl-C or an error there is no file.

use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::ValueEnum;
use hob_trace::{Record, binary, csv};

use crate::output::StdoutError;

/// Format of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum To {
    /// hob's binary format, which the other commands read fastest.
    #[default]
    Binary,
    /// CSV: ts_us,op,offset,size and, if the trace has several disks, the disk.
    Csv,
}

/// Error of a trace that has a second disk, and should have only one.
#[derive(Debug, thiserror::Error)]
#[error("the trace has several disks")]
pub(super) struct SeveralDisks;

/// Columns of the CSV file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Columns {
    OneDisk,
    Disks,
}

/// Destination of the records.
pub(super) enum Out {
    BinaryFile(binary::Writer<tempfile::NamedTempFile>, Target),
    CsvFile(csv::Writer<tempfile::NamedTempFile>, Columns, Target),
    BinaryPipe(binary::Writer<io::Stdout>),
    CsvPipe(csv::Writer<io::Stdout>),
}

impl Out {
    /// Creates the output; `-` is standard output.
    ///
    /// # Errors
    /// Returns an error if the file exists and `force` is not given, if it is not a regular file,
    /// or if it cannot be created.
    pub(super) fn create(out: &Path, to: To, force: bool, columns: Columns) -> anyhow::Result<Out> {
        let cannot = || format!("cannot write {}", out.display());
        if out.as_os_str() == "-" {
            return Ok(match to {
                To::Binary => Out::BinaryPipe(binary::Writer::new(io::stdout()).map_err(StdoutError)?),
                To::Csv => Out::CsvPipe(writer(io::stdout(), columns).map_err(StdoutError)?),
            });
        }
        check_target(out, force)?;
        let target = Target { out: out.to_owned(), force };
        let directory = out.parent().filter(|parent| !parent.as_os_str().is_empty());
        let file = tempfile::Builder::new()
            .prefix(".hob-trace-")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(directory.unwrap_or(Path::new(".")))
            .with_context(cannot)?;
        Ok(match to {
            To::Binary => Out::BinaryFile(binary::Writer::new(file).with_context(cannot)?, target),
            To::Csv => Out::CsvFile(writer(file, columns).with_context(cannot)?, columns, target),
        })
    }

    /// Adds a record.
    ///
    /// # Errors
    /// Returns [`SeveralDisks`], or an error if the file cannot be written.
    pub(super) fn push(&mut self, record: &Record) -> anyhow::Result<()> {
        if let Out::CsvFile(_, Columns::OneDisk, _) = self
            && record.disk != 0
        {
            return Err(SeveralDisks.into());
        }
        match self {
            Out::BinaryFile(writer, _) => writer.push(record),
            Out::CsvFile(writer, ..) => writer.push(record),
            Out::BinaryPipe(writer) => return Ok(writer.push(record).map_err(StdoutError)?),
            Out::CsvPipe(writer) => return Ok(writer.push(record).map_err(StdoutError)?),
        }
        .context("cannot write the records")
    }

    /// Completes the trace, after which the file appears.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        let (file, target) = match self {
            Out::BinaryFile(writer, target) => (writer.finish_counted(0), target),
            Out::CsvFile(writer, _, target) => (writer.finish(), target),
            Out::BinaryPipe(writer) => return Ok(writer.finish().map(drop).map_err(StdoutError)?),
            Out::CsvPipe(writer) => return Ok(writer.finish().map(drop).map_err(StdoutError)?),
        };
        let file = file.context("cannot write the records")?;
        let Target { out, force } = target;
        // Another program may have created the file meanwhile.
        let kept = if force { file.persist(&out) } else { file.persist_noclobber(&out) };
        kept.map(drop).with_context(|| format!("cannot make {}", out.display()))
    }
}

/// The output file.
pub(super) struct Target {
    out: PathBuf,
    force: bool,
}

fn writer<W: Write>(out: W, columns: Columns) -> io::Result<csv::Writer<W>> {
    if columns == Columns::Disks { csv::Writer::with_disks(out) } else { csv::Writer::new(out) }
}

/// Refuses to replace an object that is not a regular file, such as a disk.
fn check_target(out: &Path, force: bool) -> anyhow::Result<()> {
    if let Ok(metadata) = out.symlink_metadata() {
        ensure!(
            metadata.is_file(),
            "{} exists and is not a regular file; choose another name",
            out.display()
        );
        ensure!(force, "{} exists already; --force replaces it", out.display());
    }
    Ok(())
}
