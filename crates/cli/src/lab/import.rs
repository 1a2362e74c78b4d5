//! `hob lab import TRACE OUT`: converts a trace into one of hob's formats.
//!
//! The number of disks in a trace is known only at its end. If a CSV file turns out to need a
//! column for the disk, it is written again.

use std::path::PathBuf;

use clap::Args;
use hob_trace::{Record, TraceReader};

use super::out::{Columns, Out, SeveralDisks, To};
use super::{Source, interruption, read_all, remarks};
use crate::output::tell;

/// Convert a trace into hob's own format
#[derive(Debug, Args)]
pub(crate) struct Import {
    #[command(flatten)]
    source: Source,
    /// File to write; - is standard output
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// Format of the trace
    #[arg(long, value_enum, default_value_t)]
    to: To,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
}

pub(super) fn run(args: &Import) -> anyhow::Result<()> {
    let stop = interruption()?;
    let convert = |columns: Columns| -> anyhow::Result<(TraceReader, u64)> {
        let mut reader = args.source.open()?;
        let mut out = Out::create(&args.out, args.to, args.force, columns)?;
        // A part of a trace becomes a trace of one disk.
        let only = args.source.disk.is_some();
        let records = read_all(&mut reader, &stop, |record| {
            out.push(&Record { disk: if only { 0 } else { record.disk }, ..*record })
        })?;
        out.finish()?;
        Ok((reader, records))
    };
    // The number of disks is known only at the end, and a stream cannot be read again.
    let again = args.source.trace.as_os_str() != "-" && args.out.as_os_str() != "-";
    let first = if again || args.source.disk.is_some() { Columns::OneDisk } else { Columns::Disks };
    let (reader, records) = match convert(first) {
        Err(error) if again && error.is::<SeveralDisks>() => convert(Columns::Disks)?,
        result => result?,
    };
    let name = reader.format().name;
    tell(&format!("{records} requests of {} in the format {name}", args.source.trace.display()));
    if reader.disks().len() > 1 {
        let names = reader.disks().iter().enumerate().take(DISKS_SHOWN);
        names.for_each(|(disk, name)| tell(&format!("  disk {disk}: {name}")));
        if reader.disks().len() > DISKS_SHOWN {
            tell(&format!("  … {} disks", reader.disks().len()));
        }
    }
    if reader.ignored() > 0 {
        tell(&format!("{} other entries are not requests", reader.ignored()));
    }
    remarks(&reader).iter().for_each(|remark| tell(remark));
    Ok(())
}

const DISKS_SHOWN: usize = 16;
