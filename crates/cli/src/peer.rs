//! `hob peer …`: flash that hosts lend to each other for replicas.

use clap::Subcommand;
use hob_control::{FlashLease, Peers, RemoteFlash};

use super::Global;
use super::output::{print, table, with_notes, word};
use super::remote::ask;

/// Show and end loans of flash between hosts
#[derive(Debug, Subcommand)]
pub(crate) enum Peer {
    /// List flash that this host exports to other hosts, and flash that it uses of theirs
    List,
    /// End a flash lease of this host, so that the other host can no longer use this host's flash:
    /// its caches continue without replicas here
    End {
        /// Name of the host that uses the flash, as shown by `peer list`
        borrower: String,
        /// Allow the host to ask for flash again. Without this option the host gets no more flash
        #[arg(long)]
        forget: bool,
    },
}

pub(super) fn run(command: Peer, global: &Global) -> anyhow::Result<()> {
    match command {
        Peer::List => {
            let peers = ask(global, async |client| client.peers().await)?;
            print(global.output, &peers, show)
        }
        Peer::End { borrower, forget } => {
            let notes = ask(global, async |client| client.flash_lease_end(&borrower, forget).await)?;
            print(global.output, &notes, |notes| with_notes("ended".to_owned(), notes))
        }
    }
}

fn show(peers: &Peers) -> String {
    let columns = "LENT TO|BORROWER|SIZE:|STATE|FILE";
    let row = |lease: &FlashLease| {
        vec![
            lease.name.clone(),
            lease.borrower.clone(),
            lease.size.human(),
            word(&lease.state),
            lease.path.clone(),
        ]
    };
    let lent = table(columns, peers.lent.iter().map(row));
    let columns = "BORROWED FROM|POOL|SIZE:|STATE|SECOND COPIES OF|REASON";
    let row = |borrowed: &RemoteFlash| {
        vec![
            borrowed.peer.clone(),
            borrowed.pool.clone(),
            borrowed.size.human(),
            word(&borrowed.state),
            borrowed.disks.join(", "),
            borrowed.reason.clone().unwrap_or_default(),
        ]
    };
    format!("{lent}\n\n{}", table(columns, peers.borrowed.iter().map(row)))
}
