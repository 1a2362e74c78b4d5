//! `hob explain DISK`: explains why flash serves, or does not serve, the I/O of a disk.

use clap::Args;
use hob_control::Explanation;

use super::Global;
use super::output::print;
use super::remote::ask;

/// Explain why flash serves, or does not serve, a disk's I/O
#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// The disk
    disk: String,
}

pub(super) fn run(args: &Explain, global: &Global) -> anyhow::Result<()> {
    let explanation = ask(global, async |client| client.explain(&args.disk).await)?;
    print(global.output, &explanation, show)
}

fn show(explanation: &Explanation) -> String {
    let mut lines = explanation.sentences.clone();
    lines.extend(explanation.not_served.iter().map(|share| format!("  {}", share.sentence)));
    lines.join("\n")
}
