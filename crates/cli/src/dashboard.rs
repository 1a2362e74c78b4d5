//! `hob dashboard`: serves the daemon's dashboard to a browser on this host. The command is for a
//! daemon that listens only on a Unix socket, which browsers cannot open.
//!
//! `hob dashboard` listens on a loopback address until Ctrl-C and requires the printed token.

use anyhow::Context;
use clap::Args;
use hob_daemon::{Loopback, Role};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use super::Global;
use super::output::print;
use super::remote::{converse, explain};

/// Serve the daemon's dashboard to a browser on this host until Ctrl-C, and print its address
#[derive(Debug, Args)]
pub(crate) struct Dashboard {
    /// Port of 127.0.0.1 for the dashboard; 0 for a free port
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    port: u16,
    /// Serve the dashboard with the role read-only
    #[arg(long)]
    read_only: bool,
}

/// Address of the page.
#[derive(Debug, Serialize)]
struct Place {
    url: String,
}

pub(super) fn run(args: &Dashboard, global: &Global) -> anyhow::Result<()> {
    converse(global, async |client| {
        // An unreachable daemon is reported now, and not only in the browser.
        client.clone().with_liveness_check().version().await.map_err(explain)?;
        let role = if args.read_only { Role::ReadOnly } else { Role::Admin };
        let loopback = Loopback::bind(args.port, role)
            .await
            .with_context(|| format!("cannot listen on port {} of 127.0.0.1", args.port))?;
        let place = Place { url: loopback.url()? };
        print(global.output, &place, |place| {
            format!("Open this in a browser on this host; Ctrl-C ends it.\n{}\n", place.url)
        })?;
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        tokio::select! {
            () = loopback.serve(client) => {}
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        Ok(())
    })
}
