//! `hob serve`: one disk, no configuration file.

use clap::Args;
use hob_control::{CacheEnable, CacheSettings, DiskAdd, Endpoint, Size};

use super::Global;
use super::settings::Settings;
use crate::daemon::config::ring_kind;
use crate::daemon::hardware::RingKind;
use crate::daemon::{Plan, Serving};

/// Serve one disk over NBD, through a cache on flash if a pool is given
#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// A raw file, a block device, nbd://host/export, nbd+unix:///export?socket=PATH, or a qcow2,
    /// VMDK, VDI or VHDX file
    #[arg(long, value_name = "SPEC")]
    disk: String,
    /// Where NBD clients connect, unix:/path or tcp:host:port; may be given more than once
    #[arg(long, value_name = "ADDRESS", required = true)]
    listen: Vec<Endpoint>,
    /// Name of the export
    #[arg(long, default_value = "disk")]
    name: String,
    /// File or block device on flash for the cache; a file is made when absent
    #[arg(long, value_name = "FILE", requires = "size")]
    pool: Option<String>,
    /// Size of the cache; the pool file is sized to hold it
    #[arg(long, requires = "pool")]
    size: Option<Size>,
    #[command(flatten)]
    settings: Settings,
    /// Bring what is dirty to the backing before ending
    #[arg(long, requires = "pool")]
    drain_on_shutdown: bool,
    /// Refuse changes
    #[arg(long)]
    read_only: bool,
    /// How I/O is done: auto, io_uring or threads
    #[arg(long, default_value = "auto", value_parser = ring_name)]
    ring: RingKind,
    /// Use a pool device that holds other data, which is lost
    #[arg(long, requires = "pool")]
    force: bool,
}

fn ring_name(name: &str) -> Result<RingKind, String> {
    ring_kind(name).ok_or_else(|| "it can be auto, io_uring or threads".to_owned())
}

pub(super) fn run(args: Serve, global: &Global) -> anyhow::Result<()> {
    let cache = match (args.pool, args.size) {
        (Some(device), Some(size)) => {
            let settings = args.settings.into();
            let enable = CacheEnable { pool: "default".to_owned(), size, settings };
            Some((device, enable))
        }
        _ if !CacheSettings::from(args.settings).is_empty() => {
            anyhow::bail!("settings of a cache need one: give it --pool and --size")
        }
        _ => None,
    };
    crate::daemon::run(Plan::of_serving(Serving {
        disk: DiskAdd { name: args.name, backing: args.disk, read_only: args.read_only, datastore: None },
        cache,
        force: args.force,
        listen: args.listen,
        control: global.control.clone(),
        token_file: global.token_file.clone(),
        ring: args.ring,
        drain_on_shutdown: args.drain_on_shutdown,
    })?)
}
