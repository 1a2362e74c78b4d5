//! `cargo xtask docs` builds the documentation site from docs/ with mdBook. The tidy tests check
//! the site's links.

use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::shell;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Open the site in a browser
    #[arg(long)]
    open: bool,
}

/// Builds the site into target/book.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let found = Command::new("mdbook").arg("--version").output();
    if !found.is_ok_and(|output| output.status.success()) {
        bail!("mdbook is not installed: run `cargo install mdbook --locked`, then `cargo xtask docs` again");
    }
    let mut command = Command::new("mdbook");
    command.arg("build").arg(shell::root().join("docs"));
    if arguments.open {
        command.arg("--open");
    }
    shell::run(&mut command).context("mdbook could not build docs/")?;
    println!("The site is in {}.", shell::root().join("target/book/index.html").display());
    Ok(())
}
