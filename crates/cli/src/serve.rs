//! `hob serve`: serves one disk without a configuration file.

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use hob_control::{CacheEnable, CacheSettings, DiskAdd, Endpoint, Size};
use hob_daemon::{
    AllowEntry, ClientMatch, ControlConfig, NbdEntry, NbdSecrets, NbdTlsFiles, Plan, Serving, TlsFiles,
    ring_kind,
};
use hob_storage::ring::RingKind;

use super::Global;
use super::pool::absolute;
use super::settings::Settings;
use super::sockets::Sockets;

/// Serve one disk over NBD or vhost-user, through a cache on flash if a pool is given
#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// A raw file, a block device, nbd://host/export, nbd+unix:///export?socket=PATH,
    /// objects+file:///DIRECTORY or s3://BUCKET/PREFIX (see 'hob objects'), or a qcow2, VMDK, VDI,
    /// VHDX or VPC image
    #[arg(long, value_name = "SPEC")]
    disk: String,
    /// Image format of a file or block device: raw, qcow2, vmdk, vdi, vhdx or vpc; by its extension
    /// if absent, otherwise raw
    #[arg(long, value_name = "FORMAT")]
    format: Option<String>,
    /// Also serve the disk at this vhost-user socket
    #[arg(long, value_name = "PATH")]
    vhost_user: Option<String>,
    /// Address for NBD clients, unix:/path or tcp:host:port; may be given more than once. The
    /// system chooses the port if it is 0; the log names the port
    #[arg(long, value_name = "ADDRESS", required_unless_present = "vhost_user")]
    listen: Vec<Endpoint>,
    /// Accept NBD only over TLS, with this certificate, PEM
    #[arg(long, value_name = "FILE", requires = "nbd_key")]
    nbd_cert: Option<PathBuf>,
    /// The private key of --nbd-cert, PEM
    #[arg(long, value_name = "FILE", requires = "nbd_cert")]
    nbd_key: Option<PathBuf>,
    /// Require NBD clients to present a certificate of this authority, PEM
    #[arg(long, value_name = "FILE", requires = "nbd_cert")]
    nbd_client_ca: Option<PathBuf>,
    /// Accept NBD only over TLS with the pre-shared keys in this file: lines of name:hexadecimal,
    /// as psktool writes them; needs a build with the feature psk
    #[arg(long, value_name = "FILE", conflicts_with = "nbd_cert")]
    nbd_psk: Option<PathBuf>,
    /// Let only these NBD clients see the disk: an address, a network, unix, sha256:FINGERPRINT,
    /// cn:COMMON-NAME, san:DNS-NAME or psk:NAME; may be given more than once
    #[arg(long, value_name = "CLIENT")]
    allow: Vec<ClientMatch>,
    /// Also make the disk available as a file (FUSE) for loop devices and other programs: a new
    /// name, or an existing regular file, which is hidden until hob exits
    #[arg(long, value_name = "PATH")]
    fuse: Option<String>,
    /// Name of the export
    #[arg(long, default_value = "disk")]
    name: String,
    /// File or block device on flash for the cache; a missing file is created
    #[arg(long, value_name = "FILE", requires = "size")]
    pool: Option<String>,
    /// Size of the cache; the pool file is sized for it
    #[arg(long, requires = "pool")]
    size: Option<Size>,
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    sockets: Sockets,
    /// Write dirty data to the backing before exiting
    #[arg(long, requires = "pool")]
    drain_on_shutdown: bool,
    /// Refuse changes
    #[arg(long)]
    read_only: bool,
    /// Interface for I/O: auto, io_uring or threads
    #[arg(long, default_value = "auto", value_parser = ring_kind)]
    ring: RingKind,
    /// Use a pool device that contains other data; that data is lost
    #[arg(long, requires = "pool")]
    force: bool,
    /// Check whether the disk could be served, and exit; an upgrade asks the new program this way
    #[arg(long, hide = true)]
    check: bool,
}

pub(super) fn run(args: Serve, global: &Global) -> anyhow::Result<()> {
    let cache = match (args.pool, args.size) {
        (Some(device), Some(size)) => {
            let settings = args.settings.into();
            let enable = CacheEnable { pool: "default".to_owned(), size: Some(size), settings };
            Some((device, enable))
        }
        _ if !CacheSettings::from(args.settings).is_empty() => {
            bail!("cache settings need a cache: pass --pool and --size")
        }
        _ => None,
    };
    let certificates = args
        .nbd_cert
        .zip(args.nbd_key)
        .map(|(cert, key)| NbdSecrets::Certificates(TlsFiles { cert, key, client_ca: args.nbd_client_ca }));
    let tls = certificates.or(args.nbd_psk.map(NbdSecrets::Keys)).map(NbdTlsFiles::required);
    let with_tls = |listen| NbdEntry { listen, tls: tls.clone() };
    let everywhere = |clients| AllowEntry { disks: vec!["*".to_owned()], clients };
    let mut control = ControlConfig { listen: Vec::new(), ..ControlConfig::default() };
    global.say_in(&mut control);
    let plan = Plan::of_serving(Serving {
        disk: DiskAdd {
            name: args.name,
            backing: args.disk,
            format: args.format,
            read_only: args.read_only,
            datastore: None,
            fuse: args.fuse.map(absolute),
            vhost_user: args.vhost_user.map(absolute),
            ..DiskAdd::default()
        },
        cache,
        force: args.force,
        listen: args.listen.into_iter().map(with_tls).collect(),
        allow: Some(args.allow).filter(|clients| !clients.is_empty()).map(everywhere).into_iter().collect(),
        control,
        ring: args.ring,
        drain_on_shutdown: args.drain_on_shutdown,
        sockets: args.sockets.into(),
    })?;
    if args.check {
        return super::output::write(format!("{}\n", hob_daemon::can_take_over()).as_bytes());
    }
    hob_daemon::run(plan)
}
