//! `hob export …`: the exports of disks.

use clap::Subcommand;
use hob_control::{Disk, Export as Spec};

use super::Global;
use super::disk::print_change;
use super::output::{print, table};
use super::pool::absolute;
use super::remote::ask;

/// Manage additional exports of a disk, with fewer rights or without effect on its cache
#[derive(Debug, Subcommand)]
pub(crate) enum Export {
    /// Add an export to a disk
    Add {
        /// The disk
        disk: String,
        /// Name of the export, by which NBD clients find it
        name: String,
        /// Refuse writes through this export
        #[arg(long)]
        read_only: bool,
        /// Do not let reads through this export change the cache: for backups and scans
        #[arg(long)]
        no_promote: bool,
        /// Also show the export as a raw-image file. Needs root
        #[arg(long, value_name = "PATH")]
        fuse: Option<String>,
        /// Also serve the export at this vhost-user socket
        #[arg(long, value_name = "PATH")]
        vhost_user: Option<String>,
    },
    /// Remove an additional export and disconnect its clients. Fails if a program has the export's
    /// file open
    Remove {
        /// The disk
        disk: String,
        /// Name of the export
        name: String,
    },
    /// List all exports
    List,
}

pub(super) fn run(command: Export, global: &Global) -> anyhow::Result<()> {
    let changed = match command {
        Export::List => {
            let disks = ask(global, async |client| client.disks().await)?;
            return print(global.output, &disks, |disks| list(disks));
        }
        Export::Add { disk, name, read_only, no_promote, fuse, vhost_user } => {
            let (fuse, vhost_user) = (fuse.map(absolute), vhost_user.map(absolute));
            let export = Spec { name, read_only, no_promote, fuse, vhost_user };
            ask(global, async |client| client.export_add(&disk, &export).await)?
        }
        Export::Remove { disk, name } => {
            ask(global, async |client| client.export_remove(&disk, &name).await)?
        }
    };
    print_change(global.output, &changed)
}

/// Describes an additional export.
pub(super) fn words_of(export: &Spec) -> String {
    let rights = [(export.read_only, "read-only"), (export.no_promote, "promotes nothing")];
    let rights = rights.iter().filter(|(is, _)| *is).map(|(_, what)| *what);
    let places = [("file", &export.fuse), ("vhost-user", &export.vhost_user)];
    let places = places.iter().filter_map(|(what, path)| Some(format!("{what} {}", path.as_deref()?)));
    let all = std::iter::once(export.name.as_str()).chain(rights).map(str::to_owned);
    all.chain(places).collect::<Vec<_>>().join(", ")
}

fn list(disks: &[Disk]) -> String {
    let own = |disk: &Disk| Spec {
        name: disk.name.clone(),
        read_only: disk.read_only,
        no_promote: false,
        fuse: disk.fuse.clone(),
        vhost_user: disk.vhost_user.clone(),
    };
    let all = disks.iter().flat_map(|disk| {
        let exports = std::iter::once(own(disk)).chain(disk.exports.iter().cloned());
        exports.map(move |export| (disk, export))
    });
    let all: Vec<(&Disk, Spec)> = all.collect();
    // Most exports have neither a file nor a vhost-user socket.
    let has_places = all.iter().any(|(_, export)| export.fuse.is_some() || export.vhost_user.is_some());
    let columns =
        if has_places { "EXPORT|DISK|ACCESS|READS|FILE|VHOST-USER" } else { "EXPORT|DISK|ACCESS|READS" };
    let row = |(disk, export): (&Disk, Spec)| {
        let access = if export.read_only || disk.read_only { "read-only" } else { "read-write" };
        let reads = if export.no_promote { "promote nothing" } else { "promote" };
        let mut row = vec![export.name, disk.name.clone(), access.to_owned(), reads.to_owned()];
        if has_places {
            row.extend([export.fuse, export.vhost_user].map(Option::unwrap_or_default));
        }
        row
    };
    table(columns, all.into_iter().map(row))
}
