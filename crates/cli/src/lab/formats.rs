//! `hob lab formats`: the trace formats.

use clap::Args;
use hob_trace::FORMATS;
use serde::Serialize;

use crate::Global;
use crate::output::{print, table};

/// List the trace formats that can be read
#[derive(Debug, Args)]
pub(crate) struct Formats {}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    summary: &'static str,
    source: &'static str,
}

pub(super) fn run(_: &Formats, global: &Global) -> anyhow::Result<()> {
    let rows: Vec<Row> = FORMATS
        .iter()
        .map(|format| Row { name: format.name, summary: format.summary, source: format.source })
        .collect();
    print(global.output, &rows, |rows| {
        table(
            "NAME|WHAT|SOURCE",
            rows.iter().map(|row| vec![row.name.to_owned(), row.summary.to_owned(), row.source.to_owned()]),
        )
    })
}
