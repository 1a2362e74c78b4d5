//! `hob peer …`: flash that hosts lend to each other for replicas.

use anyhow::bail;
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
            let peers = ask(global, async |client| client.peers().await)?;
            let borrower = identity(&peers.lent, &borrower)?;
            let notes = ask(global, async |client| client.flash_lease_end(&borrower, forget).await)?;
            print(global.output, &notes, |notes| with_notes("ended".to_owned(), notes))
        }
    }
}

/// Returns the identity of the borrower with this name. A text that is no borrower's name counts as
/// an identity.
fn identity(lent: &[FlashLease], host: &str) -> anyhow::Result<String> {
    let mut named = lent.iter().filter(|lease| lease.name == host);
    match (named.next(), named.next()) {
        (Some(one), None) => Ok(one.borrower.clone()),
        (None, _) => Ok(host.to_owned()),
        (Some(_), Some(_)) => bail!(
            "several hosts named {host} have flash leases; pass the identity of one, from the column \
             BORROWER of 'hob peer list'"
        ),
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

#[cfg(test)]
mod tests {
    use hob_control::{FlashLeaseState, Size};

    use super::*;

    #[test]
    fn a_borrower_is_found_by_its_name_or_identity() {
        let lease = |borrower: &str, name: &str| FlashLease {
            borrower: borrower.to_owned(),
            name: name.to_owned(),
            lender: "c".to_owned(),
            size: Size(64 << 20),
            state: FlashLeaseState::Open,
            path: String::new(),
            epoch: None,
        };
        let lent = [lease("11", "a"), lease("22", "b"), lease("33", "b")];
        assert_eq!(identity(&lent, "a").unwrap(), "11");
        assert_eq!(identity(&lent, "33").unwrap(), "33");
        assert_eq!(identity(&lent, "unknown").unwrap(), "unknown");
        assert!(identity(&lent, "b").unwrap_err().to_string().contains("several hosts named b"));
    }
}
