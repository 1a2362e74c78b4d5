//! `hob cluster …`: a cluster of hosts that agree which host serves which disk.

mod advise;
mod evacuate;
mod moves;

use clap::Subcommand;
use hob_control::{Cluster as View, ClusterDisk, ClusterHost, ClusterState, DiskState, Preview, Size};

use super::Global;
use super::confirmation::Confirmation;
use super::output::{pairs, print, table, word};
use super::remote::{ask, converse, explain};

/// Manage a cluster of hosts that agree through etcd which host serves which disk
#[derive(Debug, Subcommand)]
pub(crate) enum Cluster {
    /// Show this host's state as a member of its cluster
    Status,
    /// List the hosts that are members of the cluster now
    Hosts,
    /// List the disks of all hosts, with the current or last owner of each
    Disks,
    /// Let this host take over a disk that it is configured with
    Take {
        /// The disk
        disk: String,
        /// Take the disk even if a failed host has its dirty data; that data is lost
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        consent: Confirmation,
    },
    Move(moves::Move),
    Evacuate(evacuate::Evacuate),
    Advise(advise::Advise),
}

pub(super) fn run(command: Cluster, global: &Global) -> anyhow::Result<()> {
    match command {
        Cluster::Status => {
            let cluster = ask(global, async |client| client.cluster().await)?;
            print(global.output, &cluster, status)
        }
        Cluster::Hosts => {
            let hosts = ask(global, async |client| client.cluster_hosts().await)?;
            print(global.output, &hosts, |hosts| list_hosts(hosts))
        }
        Cluster::Disks => {
            let disks = ask(global, async |client| client.cluster_disks().await)?;
            print(global.output, &disks, |disks| list_disks(disks))
        }
        Cluster::Move(args) => moves::run(&args, global),
        Cluster::Evacuate(args) => evacuate::run(&args, global),
        Cluster::Advise(args) => advise::run(&args, global),
        Cluster::Take { disk, force, consent } => {
            let taken = converse(global, async |client| {
                let here = client.cluster().await.map_err(explain)?.host;
                let mut disks = client.cluster_disks().await.map_err(explain)?.into_iter();
                let is_lost = |found: &ClusterDisk| found.dirty && found.host != here && force;
                match disks.find(|found| found.name == disk && is_lost(found)) {
                    Some(found) => consent.check_elsewhere(&disk, &found.host)?,
                    None => drop(consent.rehearsal().say(&disk, Preview::default())?),
                }
                let taken = client.cluster_take(&disk, force).await.map_err(explain)?;
                match (taken.state, &taken.reason) {
                    (DiskState::Online, _) => Ok(taken),
                    (state, why) => {
                        let why = why.as_deref().unwrap_or("see the daemon's log");
                        Err(anyhow::anyhow!("{disk} is {}: {why}", word(&state)))
                    }
                }
            })?;
            print(global.output, &taken, |taken| format!("{} is served on this host", taken.name))
        }
    }
}

fn status(cluster: &View) -> String {
    let state = match cluster.state {
        ClusterState::Member => "member".to_owned(),
        ClusterState::Joining => "joining: disks of the cluster are not served".to_owned(),
        ClusterState::Suspended => "suspended: etcd does not answer, so replies of disks wait".to_owned(),
    };
    let mut rows = vec![
        ("state", state),
        ("host", format!("{} ({})", cluster.host, cluster.id)),
        ("etcd", cluster.etcd.join(", ")),
        ("prefix", cluster.prefix.clone()),
        (
            "lease",
            format!("{} s; expires in {:.1} s", cluster.lease_seconds, cluster.left_ms as f64 / 1000.0),
        ),
        ("disks held", cluster.disks_held.to_string()),
    ];
    if let Some(why) = &cluster.why {
        rows.push(("trouble", why.clone()));
    }
    pairs(rows)
}

fn list_hosts(hosts: &[ClusterHost]) -> String {
    let columns = "HOST|DISKS:|FLASH:|FREE:|VERSION|ADDRESS|ID";
    let row = |host: &ClusterHost| {
        let sum = |of: fn(&hob_control::ClusterPool) -> Size| {
            Size(host.pools.iter().map(|pool| of(pool).bytes()).sum()).human()
        };
        vec![
            host.name.clone(),
            host.disks.to_string(),
            sum(|pool| pool.size),
            sum(|pool| pool.free),
            host.version.clone(),
            host.address.clone().unwrap_or_else(|| "-".to_owned()),
            host.id.clone(),
        ]
    };
    table(columns, hosts.iter().map(row))
}

fn list_disks(disks: &[ClusterDisk]) -> String {
    let columns = "DISK|STATE|HOST|GENERATION:|DIRTY THERE|COPY AT";
    let row = |disk: &ClusterDisk| {
        vec![
            disk.name.clone(),
            word(&disk.state),
            disk.host.clone(),
            disk.generation.to_string(),
            if disk.dirty { "perhaps" } else { "no" }.to_owned(),
            disk.copy.clone().unwrap_or_else(|| "-".to_owned()),
        ]
    };
    table(columns, disks.iter().map(row))
}
