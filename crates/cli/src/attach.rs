//! `hob attach` and `hob detach`: hob's cache for the disks of a running VM (docs/decisions/0054).

mod definition;
mod execution;
#[cfg(test)]
mod fake_qemu;
mod graph;
mod image;
mod interrupt;
mod libvirt;
mod list;
mod locks;
mod lost_record;
mod options;
mod overlay;
mod plan;
mod proxmox;
mod qmp;
mod reconnect;
mod record;
mod retries;
mod summary;
mod survey;
mod target;
pub(super) mod targets;
mod test_stop;
mod threads;
mod virsh;

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use execution::{Work, drain_if_present, tell};
use hob_control::client::Client;
use hob_control::{CacheEnable, CacheSettings, Disk, Pool, Size};
use image::is_same_file;
use interrupt::{Interrupt, OnSignal};
use locks::Locks;
use plan::{Goal, State, Step, steps};
use qmp::{Absence, Monitor, NotRunning};
use record::{Method, Record, Records};
use survey::{Persistent, Vm, Wanted};
use target::{Kind, Target};
use threads::in_thread;
use tokio::time::timeout;

use super::pool::absolute;
use super::remote::{converse, explain};
use super::settings::Settings;
use super::{DryRunEnded, Global};

/// Default directory of the records of attached disks; `--records` names another one.
pub(super) const RECORDS: &str = "/var/lib/hob/attach";
/// Minimum size of a cache if `--size` is absent, bytes.
const CACHE_MIN_BYTES: u64 = 64 << 20;
/// Maximum time for the comparison of an image with the backings of hob's disks.
const BACKINGS_MAX: Duration = Duration::from_secs(2);
/// If `--size` is absent, the size of the cache is the image size divided by this number.
const CACHE_PART: u64 = 10;

/// Options that `hob attach` and `hob detach` have in common.
#[derive(Debug, Args)]
struct Common {
    /// Print the plan, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Directory with the records of attached disks
    #[arg(long, value_name = "DIRECTORY", default_value = RECORDS)]
    records: PathBuf,
}

/// Cache the disks of a running VM, without stopping it
///
/// The VM pauses for some milliseconds while its requests are redirected to hob. If a step fails,
/// or the user interrupts the command, the command undoes all its changes. If the command was
/// killed, repeat it: the new command continues with the next step.
#[derive(Debug, Args)]
pub(crate) struct Attach {
    /// The VM: qmp:PATH (QEMU's QMP socket), libvirt:NAME, or pve:VMID (Proxmox VE)
    #[arg(required_unless_present = "list", value_name = "TARGET")]
    target: Option<Target>,
    /// Disks: the name of the device, drive or node, or the path of the image; all writable disks
    /// if absent
    #[arg(value_name = "DISK")]
    disks: Vec<String>,
    /// List attached disks, and how their VMs use them
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
    /// Name of the VM in the names of hob's disks; QEMU's name of the VM if absent. Volumes on a
    /// storage of the type hob (Proxmox VE) keep the names that the storage plugin gives them
    #[arg(long, value_name = "NAME", conflicts_with = "list")]
    name: Option<String>,
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
/// Dirty data is written to the image first. If the command was interrupted, repeat it: the new
/// command continues with the next step.
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

pub(super) fn run_attach(args: Attach, global: &Global) -> anyhow::Result<()> {
    if args.list {
        return list::run(&args.common.records, global);
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
    let (mut locks, target, known) = lock(&records, &args.common, "attach", target).await?;
    let target = &target;
    let mut monitor = connect(target).await.map_err(|error| match known.is_empty() {
        true => error,
        false => not_running(error, target),
    })?;
    let mut vm = Vm::look(&mut monitor, &default_name(target)).await?;
    if let Some(name) = &args.name {
        vm.name.clone_from(name);
    }
    Vm::check(&mut monitor, Goal::Attached).await?;
    check_jobs(&vm, &mut monitor, client, &records, if args.common.dry_run { &[] } else { &known }).await?;
    let persistent = Rc::new(persistent(target).await?);
    if let (Kind::Libvirt(domain), Persistent::None) = (&target.kind, &*persistent) {
        tell(&format!(
            "warning: the domain {domain} has no persistent XML. After it has stopped, run 'hob detach --stopped {}' \
             before its next start",
            target.text
        ));
    }
    let pools = client.pools().await.map_err(explain)?;
    let pool = pool(&pools, args.pool.as_deref())?;
    let others = records.all()?.into_iter().filter(|record| !known.contains(record));
    let others: Vec<Record> = others.collect();
    let (mut wanted, mut left_over) = (Vec::new(), Vec::new());
    let devices = vm.choose(&args.disks)?;
    let is_one_of_all = args.disks.is_empty() && devices.len() > 1;
    for device in devices {
        if wanted.iter().any(|record: &Record| record.backend == device.backend) {
            // The user named the disk twice.
            continue;
        }
        if let Some(record) = vm.attached_by(&device.backend, &others) {
            let error = already_attached(&device.label, record);
            return Err(error.context(not_attachable(&device.label, is_one_of_all)));
        }
        let earlier = known.iter().find(|record| record.backend == device.backend);
        if let Some(record) = earlier {
            let mut work = Work::new(&mut monitor, client, &records, record, &Arc::default());
            if work.is_started_with_hob().await {
                tell(&format!(
                    "{}: nothing to do: the VM uses hob's disk {1} since its start; 'hob disk show {1}' shows its cache",
                    record.label, record.disk
                ));
                continue;
            }
            if !work.is_left_over().await {
                // The record of an interrupted attachment already has the settings, so its cache
                // keeps them.
                if has_cache_options(&args) {
                    tell(&format!(
                        "note: the attachment of {} exists already, and keeps its cache; 'hob cache resize' and 'hob \
                         cache set' change the cache",
                        record.label
                    ));
                }
                wanted.push(record.clone());
                continue;
            }
            left_over.push(record.clone());
        }
        let cache = cache(&args, pool, earlier);
        let nbd = absolute(args.nbd.to_string_lossy().into_owned()).into();
        let how = Wanted {
            target: target.text.clone(),
            method: args.method,
            socket: nbd,
            cache,
            persistent: persistent.clone(),
        };
        let mut record =
            vm.record(&device, &how).with_context(|| not_attachable(&device.label, is_one_of_all))?;
        warn_of_next_start(&persistent, &record);
        reconnect::warn(&persistent, &record).await;
        if record.cache.size.is_none() {
            record.cache.size = Some(usual_size(&record.file));
        }
        check_distinct(&wanted, &record)?;
        locks.add_disk(&record.disk)?;
        let disks = client.disks().await.map_err(explain)?;
        let is_taken = disks.iter().any(|disk| disk.name == record.disk);
        let is_own = earlier.is_some_and(|earlier| earlier.disk == record.disk);
        if is_taken && !is_own {
            bail!(
                "hob already has a disk {0}, which would be the name of {1} in hob. 'hob disk show {0}' shows it: if no \
                 VM uses it, remove it with 'hob disk remove {0}'; if another VM of the same name uses it, choose \
                 another name with --name",
                record.disk,
                record.label
            );
        }
        if records.has(&record.disk) && !is_own {
            bail!(
                "another VM has an attached disk {}, which would be the name of {} in hob; 'hob attach --list' shows \
                 it. Detach it, or choose another name with --name",
                record.disk,
                record.label
            );
        }
        // Otherwise hob would find this out while the VM is paused, when hob cannot lock the image.
        let others = disks.iter().filter(|disk| !known.iter().any(|record| record.disk == disk.name));
        if let Some(other) = disk_of_image(others, &record.file).await {
            bail!(
                "hob already serves {} as the disk {other}, so {} cannot be attached. Start the VM with that disk, or \
                 remove it with 'hob disk remove {other}'",
                record.file.display(),
                record.label
            );
        }
        wanted.push(record);
    }
    let new = wanted.iter().filter(|record| !records.has(&record.disk));
    let new: u64 = new.filter_map(|record| record.cache.size).map(Size::bytes).sum();
    if new > pool.free.bytes() {
        bail!(
            "the caches need {}, and pool {} has {} free; choose a --size or another --pool",
            Size(new).human(),
            pool.name,
            pool.free.human()
        );
    }
    let interrupt = listen(&args.common, OnSignal::Undo)?;
    for record in &left_over {
        let mut work = Work::new(&mut monitor, client, &records, record, &interrupt);
        remove_left_over(&mut work, &args.common).await?;
    }
    if !args.common.dry_run {
        for record in &wanted {
            Work::new(&mut monitor, client, &records, record, &interrupt).check(Goal::Attached).await?;
        }
    }
    for record in &wanted {
        summary::of_attachment(record, &pools).iter().for_each(|line| tell(line));
        let mut work = Work::new(&mut monitor, client, &records, record, &interrupt);
        if args.common.dry_run {
            let state = work.look(Goal::Attached).await?;
            let is_removed = left_over.iter().any(|earlier: &Record| earlier.disk == record.disk);
            let state = if is_removed { state.without_hob() } else { state };
            print_plan(record, Goal::Attached, state).await?;
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

async fn detach(client: &Client, mut args: Detach) -> anyhow::Result<()> {
    let records = Records::open(&args.common.records)?;
    let (mut locks, target, mut known) = lock(&records, &args.common, "detach", &args.target).await?;
    args.target = target;
    if !args.stopped && lost_record::is_needed(&args.disks, &known) {
        let found = Box::pin(lost_record::find(client, &args.target, &args.disks, &known)).await?;
        found.iter().try_for_each(|record| locks.add_disk(&record.disk))?;
        known.extend(found);
    }
    if known.is_empty() {
        bail!(lost_record::not_attached(&args.target));
    }
    if let Some(name) = args.disks.iter().find(|name| !known.iter().any(|record| record.is_named(name))) {
        let labels: Vec<&str> = known.iter().map(|record| record.label.as_str()).collect();
        bail!(
            "no such disk of {} is attached: {name}; attached are: {}",
            args.target.text,
            labels.join(", ")
        );
    }
    let is_chosen =
        |record: &&Record| args.disks.is_empty() || args.disks.iter().any(|name| record.is_named(name));
    let chosen: Vec<Record> = known.iter().filter(is_chosen).cloned().collect();
    let interrupt = listen(&args.common, OnSignal::End)?;
    if args.stopped {
        if args.common.dry_run {
            bail!("--stopped has no plan to print; omit --dry-run");
        }
        match connect(&args.target).await {
            Ok(_) => bail!("the VM of {} is running: omit --stopped, or stop the VM", args.target.text),
            Err(error) if error.is::<NotRunning>() => {}
            Err(error) => return Err(error.context("cannot check that the VM is stopped")),
        }
        check_next_start(&args.target, &chosen).await?;
        let mut none = Monitor::None;
        for record in &chosen {
            Work::new(&mut none, client, &records, record, &interrupt).detach_stopped().await?;
            tell(&format!("{} is detached; its image {} has all data", record.label, record.file.display()));
        }
        return Ok(());
    }
    let (mut monitor, vm) = connect_to_detach(client, &args, &records, &known).await?;
    if args.disks.is_empty() {
        lost_record::note_others(&vm, &known, &args.target);
    }
    let adapt = |record| -> anyhow::Result<Record> { Ok(vm.started(&record)?.unwrap_or(record)) };
    let chosen = chosen.into_iter().map(adapt).collect::<anyhow::Result<Vec<Record>>>()?;
    if matches!(args.target.kind, Kind::Proxmox(_)) && !args.common.dry_run {
        check_each(&mut monitor, client, &records, &chosen, &interrupt).await?;
        // Programs of Proxmox VE wait while hob is connected to QEMU, and a drain takes long.
        drop(monitor);
        for record in &chosen {
            drain_if_present(client, &record.disk).await?;
        }
        (monitor, _) = connect_to_detach(client, &args, &records, &known).await?;
    }
    if !args.common.dry_run {
        check_each(&mut monitor, client, &records, &chosen, &interrupt).await?;
    }
    for record in &chosen {
        let mut work = Work::new(&mut monitor, client, &records, record, &interrupt);
        if args.common.dry_run {
            tell(&summary::of_detachment(record, &client.disks().await.map_err(explain)?));
            let state = work.look(Goal::Detached).await?;
            print_plan(record, Goal::Detached, state).await?;
            continue;
        }
        if !known.contains(record) || !records.has(&record.disk) {
            records.save(record)?;
        }
        work.detach().await?;
        let pause = work.paused;
        tell(&format!("{} is detached; the VM was paused for {}", record.label, milliseconds(pause)));
        warn_of_removed_disk(record);
    }
    end(args.common.dry_run)
}

/// Refuses to detach disks if one of them cannot be detached now.
async fn check_each(
    monitor: &mut Monitor,
    client: &Client,
    records: &Records,
    chosen: &[Record],
    interrupt: &Arc<Interrupt>,
) -> anyhow::Result<()> {
    for record in chosen {
        let mut work = Work::new(monitor, client, records, record, interrupt);
        work.check(Goal::Detached).await?;
        work.check_image().await?;
    }
    Ok(())
}

/// Connects to a VM with attached disks, and examines it. Refuses a VM whose disks cannot be changed now.
async fn connect_to_detach(
    client: &Client,
    args: &Detach,
    records: &Records,
    known: &[Record],
) -> anyhow::Result<(Monitor, Vm)> {
    let mut monitor = connect(&args.target).await.map_err(|error| match error.is::<NotRunning>() {
        true => anyhow!("{error:#}. If the VM is stopped, use 'hob detach --stopped {}'", args.target.text),
        false => error,
    })?;
    let vm = Vm::look(&mut monitor, "").await?;
    Vm::check(&mut monitor, Goal::Detached).await?;
    check_jobs(&vm, &mut monitor, client, records, if args.common.dry_run { &[] } else { known }).await?;
    Ok((monitor, vm))
}

/// Refuses to remove hob's disks of a stopped VM whose next start needs them in its present state:
/// libvirt has saved the VM with the disks, or an operation of Proxmox VE has locked the VM.
async fn check_next_start(target: &Target, chosen: &[Record]) -> anyhow::Result<()> {
    match &target.kind {
        Kind::Qmp(_) => {}
        Kind::Libvirt(domain) => {
            if let Some(saved) = libvirt::saved(domain).await? {
                libvirt::check_saved(domain, &saved, chosen)?;
            }
        }
        Kind::Proxmox(vmid) => {
            let has_volumes = chosen.iter().any(|record| record.volumes.is_some());
            if has_volumes && !proxmox::is_gone(*vmid) {
                proxmox::Settings::read(*vmid)?.check_lock(*vmid)?;
            }
        }
    }
    Ok(())
}

/// Refuses a VM with a block job of another program. `known` has the records of the VM's disks. If
/// a killed command left the VM paused, this function continues the VM first. Otherwise the VM
/// could stay paused until the job ends, or while the command changes other disks.
async fn check_jobs(
    vm: &Vm,
    monitor: &mut Monitor,
    client: &Client,
    records: &Records,
    known: &[Record],
) -> anyhow::Result<()> {
    let jobs = vm.graph.check_jobs();
    let Some(record) = known.first() else { return jobs };
    let mut work = Work::new(monitor, client, records, record, &Arc::default());
    match jobs {
        Err(error) => return Err(work.refusal(error).await),
        Ok(()) if known.len() == 1 => {}
        Ok(()) => match work.resume().await {
            said if said.is_empty() => {}
            said => {
                tell(&format!("a command was interrupted while it had the VM paused. {}", said.trim_end()))
            }
        },
    }
    Ok(())
}

/// Returns the settings of a cache: those of the command, or else those of the earlier attachment.
fn cache(args: &Attach, pool: &Pool, earlier: Option<&Record>) -> CacheEnable {
    match earlier {
        Some(record) if !has_cache_options(args) => record.cache.clone(),
        _ => CacheEnable { pool: pool.name.clone(), size: args.size, settings: args.settings.clone().into() },
    }
}

/// Returns true if the command has an option for the cache.
fn has_cache_options(args: &Attach) -> bool {
    let settings: CacheSettings = args.settings.clone().into();
    args.pool.is_some() || args.size.is_some() || settings != CacheSettings::default()
}

/// Returns the disk that serves an image. Returns `None` if the filesystem of a backing does not
/// answer.
async fn disk_of_image<'a>(disks: impl Iterator<Item = &'a Disk>, image: &Path) -> Option<String> {
    let paths = disks.filter(|disk| disk.backing.starts_with('/'));
    let paths: Vec<(String, PathBuf)> =
        paths.map(|disk| (disk.name.clone(), PathBuf::from(&disk.backing))).collect();
    let image = image.to_owned();
    let found = in_thread(move || paths.into_iter().find(|(_, path)| is_same_file(path, &image)));
    let (disk, _) = timeout(BACKINGS_MAX, found).await.ok()?.ok()??;
    Some(disk)
}

/// Refuses a disk that would have the same name in hob as another disk of the same command.
fn check_distinct(wanted: &[Record], record: &Record) -> anyhow::Result<()> {
    if let Some(other) = wanted.iter().find(|other| other.disk == record.disk) {
        bail!(
            "{} and {} would both have the name {} in hob; give one of the devices another id, and attach the other \
             one alone until then",
            other.label,
            record.label,
            record.disk
        );
    }
    Ok(())
}

/// Returns the message that the VM uses hob's disk of a record with another target.
fn already_attached(label: &str, record: &Record) -> anyhow::Error {
    let Record { disk, target, .. } = record;
    anyhow!(
        "{label} is hob's disk {disk} already, which was attached as a disk of {target}. Use this name of the VM, for \
         example in 'hob detach {target}'"
    )
}

/// Returns the start of the message that a disk cannot be attached. `is_one_of_all` is true if the
/// user named no disks.
fn not_attachable(label: &str, is_one_of_all: bool) -> String {
    let next = if is_one_of_all { " (to attach the other disks, name them in the command)" } else { "" };
    format!("the disk {label} cannot be attached{next}")
}

/// Listens for signals, except during a dry run, which can end at any time.
fn listen(common: &Common, reaction: OnSignal) -> anyhow::Result<Arc<Interrupt>> {
    if common.dry_run { Ok(Arc::default()) } else { Interrupt::listen(reaction) }
}

/// Removes hob's disk of an attachment of which QEMU has no node, object or job. With `--dry-run`,
/// prints the plan of the removal instead.
async fn remove_left_over(work: &mut Work<'_>, common: &Common) -> anyhow::Result<()> {
    let record = work.record;
    let Record { label, disk, file, .. } = record;
    let image = file.display();
    tell(&format!(
        "{label}: the attachment of {image} as hob's disk {disk} is left over from an earlier command or an earlier \
         start of the VM, and is removed first"
    ));
    if common.dry_run {
        let state = work.look(Goal::Detached).await?;
        return print_plan(record, Goal::Detached, state).await;
    }
    let removed = match work.check(Goal::Detached).await {
        Ok(()) => work.pursue(Goal::Detached).await,
        refused => refused,
    };
    removed
        .with_context(|| format!("{label} is not attached: hob's disk {disk} of {image} cannot be removed"))
}

/// Prints the steps from a state to a goal.
async fn print_plan(record: &Record, goal: Goal, state: State) -> anyhow::Result<()> {
    let no_daemon = "the hob daemon does not answer; start it with 'systemctl start hob'";
    let steps = steps(goal, state).map_err(|_| anyhow!(no_daemon))?;
    if steps.is_empty() {
        tell(&format!("{}: nothing to do: the disk is attached", record.label));
    }
    for (step, number) in steps.iter().zip(1..) {
        tell(&format!("{number:>3}. {step}"));
    }
    if steps.contains(&Step::AddNode)
        && let Err(error) = tokio::net::UnixStream::connect(record.socket()).await
    {
        bail!(
            "{}: the step '{}' would fail: nothing listens on hob's NBD socket {} ({error}); add it to 'listen' \
             in hob's configuration, or name another socket with --nbd",
            record.label,
            Step::AddNode,
            record.socket()
        );
    }
    Ok(())
}

fn end(is_dry: bool) -> anyhow::Result<()> {
    if is_dry { Err(DryRunEnded.into()) } else { Ok(()) }
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
            settings.check_lock(*vmid)?;
            Persistent::Proxmox(settings)
        }
    })
}

/// Warns if the VM's next start will not use hob's disk.
fn warn_of_next_start(persistent: &Persistent, record: &Record) {
    let (label, target) = (&record.label, &record.target);
    let reason = match persistent {
        Persistent::Proxmox(settings) => settings.volumes(label).err(),
        Persistent::Libvirt(_) if record.definition.is_none() => {
            Some(format!("the domain's persistent XML has no disk with the image {}", record.file.display()))
        }
        Persistent::Libvirt(_) | Persistent::None => None,
    };
    if let Some(reason) = reason {
        tell(&format!(
            "{label}: warning: the VM's configuration keeps its image: {reason}. After the VM has stopped, \
             run 'hob detach --stopped {target}' before its next start"
        ));
    }
}

/// Warns if the VM's next start would use hob's disk, which a detachment has removed.
fn warn_of_removed_disk(record: &Record) {
    let is_defined = record.definition.is_some() || record.volumes.is_some();
    if record.has_own_node() || is_defined {
        return;
    }
    let Record { label, disk, file, .. } = record;
    tell(&format!(
        "{label}: warning: the VM was started with hob's disk {disk}, which does not exist any more. Start the VM with its \
         image {} next time",
        file.display()
    ));
}

fn default_name(target: &Target) -> String {
    match &target.kind {
        Kind::Qmp(path) => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        Kind::Libvirt(domain) => domain.clone(),
        Kind::Proxmox(vmid) => format!("vm-{vmid}"),
    }
}

/// Locks a VM and the names of its attached disks. Returns the locks, the VM as its records name
/// it, and the records.
async fn lock(
    records: &Records,
    common: &Common,
    verb: &str,
    target: &Target,
) -> anyhow::Result<(Locks, Target, Vec<Record>)> {
    let names = target.names().await?;
    let command = format!("hob {verb} {}", target.text);
    let mut locks = Locks::of_vm(&common.records, &target.locked(&names), &command)?;
    let known = of_names(records, &names)?;
    known.iter().try_for_each(|record| locks.add_disk(&record.disk))?;
    let recorded = known.first().and_then(|record| record.target.parse::<Target>().ok());
    Ok((locks, recorded.unwrap_or_else(|| target.clone()), known))
}

/// Returns the records of a VM with these names.
fn of_names(records: &Records, names: &[String]) -> anyhow::Result<Vec<Record>> {
    let is_same =
        |record: &Record| record.target.parse::<Target>().is_ok_and(|found| names.contains(&found.text));
    Ok(records.all()?.into_iter().filter(is_same).collect())
}

/// Returns the message that a VM with attached disks does not run, with what to do.
fn not_running(error: anyhow::Error, target: &Target) -> anyhow::Error {
    let keeps = "hob keeps the attached disks of this VM";
    let detach = format!("'hob detach --stopped {}'", target.text);
    let why = error.downcast_ref::<NotRunning>().map(|error| error.why);
    match why {
        None => error,
        Some(Absence::Stopped) => anyhow!("{error:#}. {keeps}: start it with these, or run {detach}"),
        Some(Absence::Saved) => {
            anyhow!("{error:#}. {keeps}; 'hob attach --list' shows whether the saved VM needs them")
        }
        Some(Absence::Gone) => anyhow!("{error:#}. {keeps}; remove them with {detach}"),
    }
}

/// Returns the pool for the caches.
fn pool<'a>(pools: &'a [Pool], name: Option<&str>) -> anyhow::Result<&'a Pool> {
    let names = || pools.iter().map(|pool| pool.name.as_str()).collect::<Vec<_>>().join(", ");
    match (name, pools) {
        (_, []) => bail!("hob has no pool; create one with 'hob pool create NAME DEVICE'"),
        (Some(name), _) => {
            let found = pools.iter().find(|pool| pool.name == name);
            found.ok_or_else(|| anyhow!("hob has no pool {name}; it has: {}", names()))
        }
        (None, [only]) => Ok(only),
        (None, _) => bail!("hob has several pools; choose one with --pool: {}", names()),
    }
}

fn usual_size(file: &Path) -> Size {
    use std::io::{Seek, SeekFrom};
    let length = std::fs::File::open(file).and_then(|mut file| file.seek(SeekFrom::End(0))).unwrap_or(0);
    Size((length / CACHE_PART).max(CACHE_MIN_BYTES))
}

fn milliseconds(time: Duration) -> String {
    format!("{:.0} ms", time.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(target: &str, label: &str, disk: &str) -> Record {
        serde_json::from_value(serde_json::json!({
            "version": 1, "target": target, "disk": disk, "label": label, "backend": label,
            "file": "/image", "format": "raw", "method": "reopen", "cache": { "pool": "fast" },
            "node": {}, "spare": [],
        }))
        .unwrap()
    }

    #[test]
    fn two_disks_of_a_vm_do_not_get_one_name() {
        let record = |label: &str, disk: &str| record("qmp:/run/web.qmp", label, disk);
        let wanted = [record("device[0]", "web-device-0-")];
        check_distinct(&wanted, &record("vda", "web-vda")).unwrap();
        let error = check_distinct(&wanted, &record("device-0-", "web-device-0-")).unwrap_err().to_string();
        assert!(error.contains("device[0] and device-0-"), "{error}");
    }

    #[test]
    fn a_disk_of_another_target_is_refused_with_the_name_of_that_target() {
        let error = already_attached("vda", &record("qmp:/run/web.qmp", "vda", "web-vda")).to_string();
        assert!(error.contains("disk web-vda") && error.contains("'hob detach qmp:/run/web.qmp'"), "{error}");
    }

    #[test]
    fn the_records_of_a_domain_are_found_by_all_its_names() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path()).unwrap();
        for (target, disk) in [("libvirt:web", "a"), ("libvirt:0b1c", "b"), ("libvirt:db", "c")] {
            records.save(&record(target, "vda", disk)).unwrap();
        }
        let found = of_names(&records, &["libvirt:0b1c", "libvirt:web"].map(str::to_owned)).unwrap();
        let disks: Vec<&str> = found.iter().map(|record| record.disk.as_str()).collect();
        assert_eq!(disks, ["b", "a"]);
    }

    #[test]
    fn an_image_that_hob_serves_already_is_found() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let [image, link] = ["image", "link"].map(|name| dir.path().join(name));
        std::fs::write(&image, "x").unwrap();
        std::os::unix::fs::symlink(&image, &link).unwrap();
        let disk = |name: &str, backing: &Path| Disk {
            name: name.to_owned(),
            backing: backing.display().to_string(),
            ..Disk::default()
        };
        let disks = [disk("nbd", Path::new("nbd://host/image")), disk("web", &link)];
        let found = |disks: &[Disk]| runtime.block_on(disk_of_image(disks.iter(), &image));
        assert_eq!(found(&disks).as_deref(), Some("web"));
        assert_eq!(found(&disks[..1]), None);
    }

    #[test]
    fn a_vm_that_does_not_run_has_advice() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let target: Target = "qmp:/nowhere/web.qmp".parse().unwrap();
        let error = runtime.block_on(connect(&target)).unwrap_err();
        let error = not_running(error, &target).to_string();
        assert!(error.contains("start it with these") && error.contains("hob detach --stopped"), "{error}");
        let other = not_running(anyhow!("cannot run virsh"), &target).to_string();
        assert_eq!(other, "cannot run virsh");
    }
}
