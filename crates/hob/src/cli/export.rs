//! `hob export …`: under which names NBD clients find a disk.

use clap::Subcommand;
use hob_control::{Disk, Export as Spec};

use super::Global;
use super::disk::print_change;
use super::output::{print, table, words};
use super::remote::ask;

/// Further exports of a disk: other names for NBD clients, with fewer rights or without effect on its cache
#[derive(Debug, Subcommand)]
pub(crate) enum Export {
    /// Give a disk another export
    Add {
        /// The disk
        disk: String,
        /// Name of the export
        name: String,
        /// Refuse changes that come this way
        #[arg(long)]
        read_only: bool,
        /// Let reads that come this way bring nothing into the cache: for backups and scans
        #[arg(long)]
        no_promote: bool,
    },
    /// Take a further export away; its clients are disconnected
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
        Export::Add { disk, name, read_only, no_promote } => {
            let export = Spec { name, read_only, no_promote };
            ask(global, async |client| client.export_add(&disk, &export).await)?
        }
        Export::Remove { disk, name } => {
            ask(global, async |client| client.export_remove(&disk, &name).await)?
        }
    };
    print_change(global.output, &changed)
}

/// A further export in words.
pub(super) fn words_of(export: &Spec) -> String {
    let rights = [(export.read_only, "read-only"), (export.no_promote, "promotes nothing")];
    let rights = rights.iter().filter(|(is, _)| *is).map(|(_, what)| *what);
    std::iter::once(export.name.as_str()).chain(rights).collect::<Vec<_>>().join(", ")
}

fn list(disks: &[Disk]) -> String {
    let columns = [words("EXPORT"), words("DISK"), words("ACCESS"), words("READS")];
    let row = |disk: &Disk, export: &Spec| {
        let access = if export.read_only || disk.read_only { "read-only" } else { "read-write" };
        let reads = if export.no_promote { "promote nothing" } else { "promote" };
        vec![export.name.clone(), disk.name.clone(), access.to_owned(), reads.to_owned()]
    };
    let rows = disks.iter().flat_map(|disk| {
        let own = Spec { name: disk.name.clone(), read_only: disk.read_only, no_promote: false };
        let further = disk.exports.iter().map(|export| row(disk, export));
        std::iter::once(row(disk, &own)).chain(further).collect::<Vec<_>>()
    });
    table(&columns, rows)
}
