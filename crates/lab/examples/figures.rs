//! Runs figures like `hob lab figures`. This program takes much less time to build, because it does
//! not need the rest of hob. Run it with `cargo run --release -p hob-lab --example figures
//! [NAME…]`. Prints the rows of the figures and the tables of docs/LAB.md. The tables are complete
//! only after a run of all figures. The program writes the HTML page to target/figures. `--quick`
//! runs the small workloads.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use hob_lab::figures::{Options, Size, run, section};
use hob_lab::page::Check;

fn main() -> anyhow::Result<ExitCode> {
    let (flags, names): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|argument| argument == "--quick");
    let options = Options {
        out: PathBuf::from("target/figures"),
        threads: 2,
        size: if flags.is_empty() { Size::Full } else { Size::Quick },
        made_by: "Made by the example figures of hob-lab".to_owned(),
    };
    let report = run(&names, &options, &Arc::default(), |_| {})?;
    for figure in &report.figures {
        for line in &figure.lines {
            println!(
                "{} | {} | {} | {} | {} | {}",
                figure.name,
                line.what,
                line.published_text(),
                line.measured_text(),
                line.expected,
                line.check.map_or("", Check::text)
            );
        }
    }
    if options.size == Size::Full {
        print!("\n{}", section(&report));
    }
    Ok(if report.count(Check::Fails) == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
