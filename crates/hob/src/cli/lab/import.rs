//! `hob lab import TRACE OUT`: any trace becomes one of hob's.
//!
//! The file appears when it is complete; Ctrl-C or an error leaves nothing behind.

use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use hob_lab::trace::{Record, TraceReader, binary, csv};

use super::{Source, interruption, read_all, remarks};

/// Turn a trace into hob's own format
#[derive(Debug, Args)]
pub(crate) struct Import {
    #[command(flatten)]
    source: Source,
    /// File to write; - is standard output
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// What to write
    #[arg(long, value_enum, default_value_t)]
    to: To,
    /// Replace a file that is there
    #[arg(long)]
    force: bool,
}

/// What to write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum To {
    /// hob's binary format, which the other commands read fastest.
    #[default]
    Binary,
    /// ts_us,op,offset,size and, of several disks, the disk.
    Csv,
}

/// A second disk came along in a trace that was taken for one of a single disk.
#[derive(Debug, thiserror::Error)]
#[error("the trace has several disks")]
struct SeveralDisks;

pub(super) fn run(args: &Import) -> anyhow::Result<()> {
    let stop = interruption()?;
    let convert = |columns: Columns| -> anyhow::Result<(TraceReader, u64)> {
        let mut reader = args.source.open()?;
        let mut out = Out::create(args, columns)?;
        // What is cut out of a trace is a trace of one disk.
        let only = args.source.disk.is_some();
        let records = read_all(&mut reader, &stop, |record| {
            out.push(&Record { disk: if only { 0 } else { record.disk }, ..*record })
        })?;
        out.finish(args)?;
        Ok((reader, records))
    };
    // How many disks there are is known at the end; a stream cannot be read again.
    let again = args.source.trace.as_os_str() != "-" && args.out.as_os_str() != "-";
    let first = if again || args.source.disk.is_some() { Columns::OneDisk } else { Columns::Disks };
    let (reader, records) = match convert(first) {
        Err(error) if again && error.is::<SeveralDisks>() => convert(Columns::Disks)?,
        result => result?,
    };
    let name = reader.format().name;
    eprintln!("{records} requests of {} in the format {name}", args.source.trace.display());
    if reader.disks().len() > 1 {
        let names = reader.disks().iter().enumerate().take(DISKS_SHOWN);
        names.for_each(|(disk, name)| eprintln!("  disk {disk}: {name}"));
        if reader.disks().len() > DISKS_SHOWN {
            eprintln!("  … {} disks", reader.disks().len());
        }
    }
    if reader.ignored() > 0 {
        eprintln!("{} other entries are no requests", reader.ignored());
    }
    remarks(&reader).iter().for_each(|remark| eprintln!("{remark}"));
    Ok(())
}

const DISKS_SHOWN: usize = 16;

/// Which CSV to write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Columns {
    OneDisk,
    Disks,
}

/// Where the records go.
enum Out {
    BinaryFile(binary::Writer<tempfile::NamedTempFile>),
    CsvFile(csv::Writer<tempfile::NamedTempFile>, Columns),
    BinaryPipe(binary::Writer<io::Stdout>),
    CsvPipe(csv::Writer<io::Stdout>),
}

impl Out {
    fn create(args: &Import, columns: Columns) -> anyhow::Result<Out> {
        let cannot = || format!("cannot write {}", args.out.display());
        if args.out.as_os_str() == "-" {
            return Ok(match args.to {
                To::Binary => Out::BinaryPipe(binary::Writer::new(io::stdout()).with_context(cannot)?),
                To::Csv => Out::CsvPipe(writer(io::stdout(), columns).with_context(cannot)?),
            });
        }
        check_target(&args.out, args.force)?;
        let directory = args.out.parent().filter(|parent| !parent.as_os_str().is_empty());
        let file = tempfile::Builder::new()
            .prefix(".hob-import-")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(directory.unwrap_or(Path::new(".")))
            .with_context(cannot)?;
        Ok(match args.to {
            To::Binary => Out::BinaryFile(binary::Writer::new(file).with_context(cannot)?),
            To::Csv => Out::CsvFile(writer(file, columns).with_context(cannot)?, columns),
        })
    }

    fn push(&mut self, record: &Record) -> anyhow::Result<()> {
        if let Out::CsvFile(_, Columns::OneDisk) = self
            && record.disk != 0
        {
            return Err(SeveralDisks.into());
        }
        match self {
            Out::BinaryFile(writer) => writer.push(record),
            Out::CsvFile(writer, _) => writer.push(record),
            Out::BinaryPipe(writer) => writer.push(record),
            Out::CsvPipe(writer) => writer.push(record),
        }
        .context("cannot write the records")
    }

    fn finish(self, args: &Import) -> anyhow::Result<()> {
        let file = match self {
            Out::BinaryFile(writer) => writer.finish_counted(0),
            Out::CsvFile(writer, _) => writer.finish(),
            Out::BinaryPipe(writer) => return writer.finish().map(drop).context("cannot write the records"),
            Out::CsvPipe(writer) => return writer.finish().map(drop).context("cannot write the records"),
        }
        .context("cannot write the records")?;
        let out = &args.out;
        // Somebody may have made the file meanwhile.
        let kept = if args.force { file.persist(out) } else { file.persist_noclobber(out) };
        kept.map(drop).with_context(|| format!("cannot make {}", out.display()))
    }
}

fn writer<W: Write>(out: W, columns: Columns) -> io::Result<csv::Writer<W>> {
    if columns == Columns::Disks { csv::Writer::with_disks(out) } else { csv::Writer::new(out) }
}

/// A trace never takes the place of something that is no file, like a disk.
fn check_target(out: &Path, force: bool) -> anyhow::Result<()> {
    if let Ok(metadata) = out.symlink_metadata() {
        ensure!(metadata.is_file(), "{} is there and no plain file; name another", out.display());
        ensure!(force, "{} is there already; --force replaces it", out.display());
    }
    Ok(())
}
