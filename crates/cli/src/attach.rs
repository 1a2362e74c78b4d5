//! `hob attach` and `hob detach`: hob's cache for the disks of a running VM (docs/decisions/0054).

mod graph;
mod libvirt;
mod options;
mod plan;
mod proxmox;
mod qmp;
mod record;
mod survey;
mod work;

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{anyhow, bail};
use clap::Args;
use hob_control::client::Client;
use hob_control::{CacheEnable, Size};
use plan::{Goal, steps};
use qmp::Monitor;
use record::{Method, Record, Records};
use serde::Serialize;
use survey::{Persistent, Vm, Wanted};
use work::{Work, stop_after, tell};

use super::drain::drain_first;
use super::output::{print, table, word, words};
use super::pool::absolute;
use super::remote::{converse, explain};
use super::settings::Settings;
use super::{DryRunEnded, Global};

/// Smallest cache without `--size`.
const CACHE_MIN_BYTES: u64 = 64 << 20;
/// Size of the cache without `--size`: the image size divided by this.
const CACHE_PART: u64 = 10;

/// The VM whose disks are attached or detached.
#[derive(Clone, Debug)]
struct Target {
    text: String,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Qmp(PathBuf),
    Libvirt(String),
    Proxmox(u32),
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Target, String> {
        let kind = match text.split_once(':') {
            Some(("qmp", path)) if !path.is_empty() => Kind::Qmp(absolute(path.to_owned()).into()),
            Some(("libvirt", name)) if !name.is_empty() => Kind::Libvirt(name.to_owned()),
            Some(("pve", id)) if id.parse::<u32>().is_ok() => Kind::Proxmox(id.parse().unwrap_or_default()),
            _ => {
                return Err("a VM is qmp:PATH (the QMP socket of QEMU), libvirt:NAME or pve:VMID".to_owned());
            }
        };
        let text = match &kind {
            Kind::Qmp(path) => format!("qmp:{}", path.display()),
            Kind::Libvirt(name) => format!("libvirt:{name}"),
            Kind::Proxmox(vmid) => format!("pve:{vmid}"),
        };
        Ok(Target { text, kind })
    }
}

/// Options that `hob attach` and `hob detach` have in common.
#[derive(Debug, Args)]
struct Common {
    /// Print the plan, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Directory with the records of attached disks
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/hob/attach")]
    records: PathBuf,
}

/// Cache the disks of a running VM, without stopping it
///
/// The VM pauses for some milliseconds while its requests are redirected to hob. If a step fails,
/// everything is undone. Repeat a command that was interrupted: it continues where it was.
#[derive(Debug, Args)]
pub(crate) struct Attach {
    /// The VM: qmp:PATH (QEMU's QMP socket), libvirt:NAME, or pve:VMID (Proxmox VE)
    #[arg(required_unless_present = "list", value_name = "TARGET")]
    target: Option<Target>,
    /// Disks: the name of the device, drive or node, or the path of the image; all writable disks
    /// if absent
    #[arg(value_name = "DISK")]
    disks: Vec<String>,
    /// List attached disks
    #[arg(long, conflicts_with = "target")]
    list: bool,
    /// Pool for the caches; not needed if there is only one
    #[arg(long)]
    pool: Option<String>,
    /// Size of each cache; a tenth of the image if absent
    #[arg(long)]
    size: Option<Size>,
    #[command(flatten)]
    settings: Settings,
    /// Method to redirect the VM's requests to hob; chosen by hob if absent
    #[arg(long, value_enum)]
    method: Option<Method>,
    /// hob's NBD socket
    #[arg(long, value_name = "PATH", default_value = "/run/hob/nbd.sock")]
    nbd: PathBuf,
    #[command(flatten)]
    common: Common,
}

/// Return the disks of a running VM to their images, without stopping it
///
/// Dirty data is written to the image first. Repeat a command that was interrupted: it continues
/// where it was.
#[derive(Debug, Args)]
pub(crate) struct Detach {
    /// The VM: qmp:PATH (QEMU's QMP socket), libvirt:NAME, or pve:VMID (Proxmox VE)
    target: Target,
    /// Disks: the name of the device, of hob's disk, or the path of the image; all attached disks
    /// of the VM if absent
    #[arg(value_name = "DISK")]
    disks: Vec<String>,
    /// Detach from a stopped VM: write dirty data to the image, and remove hob's disk
    #[arg(long)]
    stopped: bool,
    #[command(flatten)]
    common: Common,
}

/// An attached disk, for `--list`.
#[derive(Debug, Serialize)]
struct Row {
    target: String,
    device: String,
    disk: String,
    file: String,
    method: Method,
    state: String,
}

pub(super) fn run_attach(args: Attach, global: &Global) -> anyhow::Result<()> {
    if args.list {
        return list(&args.common.records, global);
    }
    let target =
        args.target.clone().ok_or_else(|| anyhow!("name a VM: qmp:PATH, libvirt:NAME or pve:VMID"))?;
    converse(global, async |client| attach(&client, &target, args).await)
}

pub(super) fn run_detach(args: Detach, global: &Global) -> anyhow::Result<()> {
    converse(global, async |client| detach(&client, args).await)
}

async fn attach(client: &Client, target: &Target, args: Attach) -> anyhow::Result<()> {
    let records = Records::open(&args.common.records)?;
    let known = of_target(&records, target)?;
    let mut monitor = connect(target).await?;
    let vm = Vm::look(&mut monitor, &default_name(target)).await?;
    vm.check(&mut monitor).await?;
    let persistent = Rc::new(persistent(target).await?);
    let (pool, free) = pool(client, args.pool.as_deref()).await?;
    let mut wanted = Vec::new();
    for device in vm.choose(&args.disks)? {
        // An interrupted attachment continues with its record.
        if let Some(record) = known.iter().find(|record| record.backend == device.backend) {
            wanted.push(record.clone());
            continue;
        }
        let cache = CacheEnable { pool: pool.clone(), size: None, settings: args.settings.clone().into() };
        let nbd = absolute(args.nbd.to_string_lossy().into_owned()).into();
        let how = Wanted {
            target: target.text.clone(),
            method: args.method,
            socket: nbd,
            cache,
            persistent: persistent.clone(),
        };
        let mut record = vm.record(&device, &how)?;
        warn_of_next_start(&persistent, target, &device.label);
        record.cache.size = Some(args.size.unwrap_or_else(|| usual_size(&record.file)));
        let is_taken = client.disks().await.map_err(explain)?.iter().any(|disk| disk.name == record.disk);
        if is_taken {
            bail!("hob already has a disk {}; 'hob disk show {0}' shows it", record.disk);
        }
        wanted.push(record);
    }
    let new = wanted.iter().filter(|record| !records.has(&record.disk));
    let new: u64 = new.filter_map(|record| record.cache.size).map(Size::bytes).sum();
    if new > free {
        bail!(
            "the caches need {}, and pool {pool} has {} free; choose a --size",
            Size(new).human(),
            Size(free).human()
        );
    }
    let interrupted = on_interrupt();
    for record in &wanted {
        let mut work = work(&mut monitor, client, &records, record, &interrupted);
        if args.common.dry_run {
            dry_run(&mut work, Goal::Attached).await?;
            continue;
        }
        work.attach().await?;
        let pause = work.paused;
        tell(&format!(
            "{} is attached as hob's disk {}; the VM was paused for {}",
            record.label,
            record.disk,
            milliseconds(pause)
        ));
    }
    end(args.common.dry_run)
}

async fn detach(client: &Client, args: Detach) -> anyhow::Result<()> {
    let records = Records::open(&args.common.records)?;
    let known = of_target(&records, &args.target)?;
    let is_named = |record: &&Record| {
        args.disks.is_empty()
            || args.disks.iter().any(|name| {
                [record.label.as_str(), &record.disk, &record.backend].contains(&name.as_str())
                    || record.file == Path::new(name)
            })
    };
    let chosen: Vec<Record> = known.iter().filter(is_named).cloned().collect();
    if chosen.is_empty() {
        bail!("no such disk of {} is attached; 'hob attach --list' shows all", args.target.text);
    }
    let interrupted = on_interrupt();
    if args.stopped {
        let monitor = connect(&args.target).await;
        if monitor.is_ok() {
            bail!("the VM is running; omit --stopped");
        }
        let mut none = Monitor::None;
        for record in &chosen {
            work(&mut none, client, &records, record, &interrupted).detach_stopped().await?;
            tell(&format!(
                "{} is detached; the VM uses {} when it starts",
                record.label,
                record.file.display()
            ));
        }
        return Ok(());
    }
    if matches!(args.target.kind, Kind::Proxmox(_)) && !args.common.dry_run {
        // Programs of Proxmox VE wait while hob is connected to QEMU, and a drain takes long.
        for record in &chosen {
            drain_if_present(client, &record.disk).await?;
        }
    }
    let mut monitor = connect(&args.target)
        .await
        .map_err(|error| anyhow!("{error:#}; if the VM does not run, use 'hob detach --stopped'"))?;
    Vm::look(&mut monitor, "").await?.check(&mut monitor).await?;
    for record in &chosen {
        let mut work = work(&mut monitor, client, &records, record, &interrupted);
        if args.common.dry_run {
            dry_run(&mut work, Goal::Detached).await?;
            continue;
        }
        work.pursue(Goal::Detached).await?;
        let pause = work.paused;
        tell(&format!("{} is detached; the VM was paused for {}", record.label, milliseconds(pause)));
    }
    end(args.common.dry_run)
}

/// Writes the dirty data of a disk to its image, if hob has the disk.
async fn drain_if_present(client: &Client, disk: &str) -> anyhow::Result<()> {
    let disks = client.disks().await.map_err(explain)?;
    match disks.iter().find(|found| found.name == disk) {
        Some(found) if found.cache.is_some() => drain_first(client, disk).await,
        _ => Ok(()),
    }
}

fn work<'a>(
    monitor: &'a mut Monitor,
    client: &'a Client,
    records: &'a Records,
    record: &'a Record,
    interrupted: &Arc<AtomicBool>,
) -> Work<'a> {
    Work {
        monitor,
        client,
        records,
        record,
        interrupted: interrupted.clone(),
        paused_at: None,
        paused: Duration::ZERO,
        stop_after: stop_after(),
    }
}

async fn dry_run(work: &mut Work<'_>, goal: Goal) -> anyhow::Result<()> {
    let state = work.look().await?;
    let steps = steps(goal, state).map_err(|_| anyhow!("the hob daemon does not answer"))?;
    let record = work.record;
    tell(&format!(
        "{}: {} ({}), as hob's disk {} with a cache of {} in pool {}, by {}",
        record.label,
        record.file.display(),
        record.format,
        record.disk,
        record.cache.size.unwrap_or_default().human(),
        record.cache.pool,
        word(&record.method)
    ));
    for (step, number) in steps.iter().zip(1..) {
        tell(&format!("{number:>3}. {step}"));
    }
    Ok(())
}

fn end(is_dry: bool) -> anyhow::Result<()> {
    if is_dry { Err(DryRunEnded.into()) } else { Ok(()) }
}

fn list(directory: &Path, global: &Global) -> anyhow::Result<()> {
    let records = Records::list(directory)?;
    let rows = converse(global, async |client| {
        let disks = client.disks().await.map_err(explain)?;
        let state = |record: &Record| match disks.iter().find(|disk| disk.name == record.disk) {
            None => "hob does not have the disk".to_owned(),
            Some(disk) if disk.cache.is_none() => {
                "not complete; repeat 'hob attach' or 'hob detach'".to_owned()
            }
            Some(disk) => word(&disk.state),
        };
        Ok(records.iter().map(|record| row(record, state(record))).collect::<Vec<_>>())
    })?;
    let columns = ["TARGET", "DEVICE", "DISK", "IMAGE", "METHOD", "STATE"].map(words);
    print(global.output, &rows, |rows| {
        let cells = |row: &Row| {
            let Row { target, device, disk, file, method, state } = row;
            vec![target.clone(), device.clone(), disk.clone(), file.clone(), word(method), state.clone()]
        };
        table(&columns, rows.iter().map(cells))
    })
}

fn row(record: &Record, state: String) -> Row {
    Row {
        target: record.target.clone(),
        device: record.label.clone(),
        disk: record.disk.clone(),
        file: record.file.display().to_string(),
        method: record.method,
        state,
    }
}

async fn connect(target: &Target) -> anyhow::Result<Monitor> {
    match &target.kind {
        Kind::Qmp(path) => Monitor::connect(path).await,
        Kind::Libvirt(domain) => Monitor::of_domain(domain).await,
        Kind::Proxmox(vmid) => Monitor::of_proxmox(*vmid).await,
    }
}

/// Reads the persistent definition of a VM.
async fn persistent(target: &Target) -> anyhow::Result<Persistent> {
    Ok(match &target.kind {
        Kind::Qmp(_) => Persistent::None,
        Kind::Libvirt(domain) => {
            libvirt::definition(domain).await?.map_or(Persistent::None, Persistent::Libvirt)
        }
        Kind::Proxmox(vmid) => {
            let settings = proxmox::Settings::read(*vmid)?;
            if let Some(lock) = settings.lock() {
                bail!("VM {vmid} has the lock '{lock}'; repeat the command when this operation has ended");
            }
            Persistent::Proxmox(settings)
        }
    })
}

/// Warns if hob cannot change a disk in the configuration of Proxmox VE.
fn warn_of_next_start(persistent: &Persistent, target: &Target, label: &str) {
    if let Persistent::Proxmox(settings) = persistent
        && let Err(reason) = settings.volumes(label)
    {
        tell(&format!(
            "{label}: warning: the VM's configuration keeps its image: {reason}. After the VM has stopped, \
             run 'hob detach --stopped {}' before its next start",
            target.text
        ));
    }
}

fn default_name(target: &Target) -> String {
    match &target.kind {
        Kind::Qmp(path) => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        Kind::Libvirt(domain) => domain.clone(),
        Kind::Proxmox(vmid) => format!("vm-{vmid}"),
    }
}

fn of_target(records: &Records, target: &Target) -> anyhow::Result<Vec<Record>> {
    Ok(records.all()?.into_iter().filter(|record| record.target == target.text).collect())
}

/// Returns the pool, and its free bytes.
async fn pool(client: &Client, name: Option<&str>) -> anyhow::Result<(String, u64)> {
    let pools = client.pools().await.map_err(explain)?;
    let found = match (name, &pools[..]) {
        (Some(name), _) => {
            pools.iter().find(|pool| pool.name == name).ok_or_else(|| anyhow!("there is no pool {name}"))?
        }
        (None, [only]) => only,
        (None, []) => bail!("there is no pool; create one with 'hob pool create NAME DEVICE'"),
        (None, _) => bail!("there are several pools; choose one with --pool"),
    };
    Ok((found.name.clone(), found.free.bytes()))
}

fn usual_size(file: &Path) -> Size {
    use std::io::{Seek, SeekFrom};
    let length = std::fs::File::open(file).and_then(|mut file| file.seek(SeekFrom::End(0))).unwrap_or(0);
    Size((length / CACHE_PART).max(CACHE_MIN_BYTES))
}

/// Sets the flag on the first Ctrl-C. The command then undoes what it has done.
fn on_interrupt() -> Arc<AtomicBool> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    tokio::spawn(async move {
        while tokio::signal::ctrl_c().await.is_ok() {
            set.store(true, Ordering::Relaxed);
        }
    });
    flag
}

fn milliseconds(time: Duration) -> String {
    format!("{:.0} ms", time.as_secs_f64() * 1e3)
}
