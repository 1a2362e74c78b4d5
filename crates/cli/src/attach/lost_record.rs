//! Detachment of a disk without a record: its file was lost, or is in another directory. QEMU names
//! hob's socket and disk, and the daemon names the image of the disk. So `hob detach` makes the
//! record again. A guest may control its QEMU. So the user must name the disk, and QEMU's process
//! must be the disk's only client.

use std::path::Path;

use anyhow::{Context, anyhow, bail};
use hob_control::client::Client;
use hob_control::{Disk, Endpoint, PlannedChange};
use tokio::net::UnixStream;

use super::definition::Persistent;
use super::execution::{MARK, tell};
use super::libvirt::{self, Defined, is_same_path};
use super::options::OWN;
use super::qmp::{Monitor, NotRunning};
use super::record::{Record, Records};
use super::target::Target;
use super::vm::{Connected, Vm};
use crate::remote::explain;

/// Returns true if `hob detach` must look for disks without a record. `names` has the disks in the
/// command, and `known` has the records of the VM.
pub(super) fn is_needed(names: &[String], known: &[Record]) -> bool {
    known.is_empty() || names.iter().any(|name| !known.iter().any(|record| record.is_named(name)))
}

/// Returns the records of the named disks of a running VM that have no record.
///
/// # Errors
/// Returns an error that says what to do if a named disk cannot be detached without its record, or if
/// the user names no disk.
pub(super) async fn find(
    client: &Client,
    target: &Target,
    names: &[String],
    known: &[Record],
    records: &Records,
) -> anyhow::Result<Vec<Record>> {
    let mut monitor = match target.connect().await {
        Ok(monitor) => monitor,
        // The caller says that no such disk is attached.
        Err(error) if error.is::<NotRunning>() || !known.is_empty() => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let vm = Vm::look(&mut monitor, "").await?;
    let mut found = unrecorded(&vm, known);
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let disks = client.disks().await.map_err(explain)?;
    found.retain(|found| is_hobs(found, &disks));
    let is_chosen = |found: &Connected| names.is_empty() || is_named(found, names, &disks);
    found.retain(is_chosen);
    let Some(first) = found.first() else { return Ok(Vec::new()) };
    let all = records.all()?;
    found.iter().try_for_each(|found| check_unrecorded(found, &all))?;
    if names.is_empty() {
        return Err(unnamed(&found, &disks, target));
    }
    check_complete(&vm, &mut monitor, first).await?;
    let persistent = Persistent::read(target).await?;
    let mut made = Vec::new();
    for found in &found {
        let disk = served(found, &disks)?;
        let daemon = check_socket(client, found).await?;
        check_client(client, found, vm.pid, daemon).await?;
        let rebuilt = vm.rebuilt(found, disk, &target.text);
        let mut record = rebuilt.with_context(|| refusal(found, disk))?;
        record.definition = definition(&persistent, &record).with_context(|| refusal(found, disk))?;
        tell(&format!(
            "{}: note: hob has no record of this attachment; QEMU uses hob's disk {}, whose image is {}",
            record.label, record.disk, disk.backing
        ));
        if let Persistent::Proxmox(_) = &persistent {
            tell(&format!(
                "{}: warning: the VM's configuration is not changed. If it has a volume on a storage of the type 'hob', \
                 the VM's next start uses hob again",
                record.label
            ));
        }
        made.push(record);
    }
    Ok(made)
}

/// Prints the disks that `hob attach` connected since the VM's start and that have no record.
pub(super) fn note_others(
    vm: &Vm,
    known: &[Record],
    records: &Records,
    target: &Target,
) -> anyhow::Result<()> {
    let all = records.all()?;
    let is_other = |found: &&Connected| found.is_attached && check_unrecorded(found, &all).is_ok();
    for found in unrecorded(vm, known).iter().filter(is_other) {
        let label = &found.device.label;
        tell(&format!(
            "{label}: note: the VM uses hob's disk {} too, without a record of its attachment; 'hob detach {} {label}' \
             detaches it",
            found.export, target.text
        ));
    }
    Ok(())
}

/// Refuses to attach a disk that an earlier `hob attach` has connected to hob. `node` is the lowest
/// block node of the disk, with this driver.
pub(super) fn check_absent(node: &str, driver: &str) -> anyhow::Result<()> {
    if driver == "nbd" && node.starts_with(OWN) {
        bail!(
            "the VM uses hob already, by an earlier 'hob attach' whose record is missing in the directory of records. \
             Run 'hob detach' for this disk first, or name the directory with --records"
        );
    }
    Ok(())
}

/// Returns the message for a disk of a VM that is not running, or not connected to hob.
pub(super) fn not_attached(target: &Target) -> String {
    format!(
        "no such disk of {} is attached; 'hob attach --list' shows all. If hob has a disk of this VM without a record of \
         its attachment ('hob disk list'), stop the VM, run 'hob disk remove DISK', which writes dirty data to the image, \
         and start the VM with its image",
        target.text
    )
}

/// Returns the connected disks that have no record.
fn unrecorded(vm: &Vm, known: &[Record]) -> Vec<Connected> {
    let mut found = vm.connected();
    found.retain(|found| !known.iter().any(|record| record.backend == found.device.backend));
    found
}

/// Returns false if the disk is probably one of another NBD server.
fn is_hobs(found: &Connected, disks: &[Disk]) -> bool {
    found.is_attached || disks.iter().any(|disk| disk.name == found.export)
}

fn is_named(found: &Connected, names: &[String], disks: &[Disk]) -> bool {
    let Connected { device, export, .. } = found;
    let backing = disks.iter().find(|disk| disk.name == *export).map(|disk| Path::new(&disk.backing));
    let is_named = |name: &String| {
        [&device.label, &device.backend, export].contains(&name)
            || backing.is_some_and(|backing| is_same_path(backing, Path::new(name)))
    };
    names.iter().any(is_named)
}

/// Refuses a disk that has a record. The record may have another name of the VM, or another VM may
/// use the disk.
fn check_unrecorded(found: &Connected, all: &[Record]) -> anyhow::Result<()> {
    let Connected { device, export, .. } = found;
    let Some(Record { label, target, .. }) = all.iter().find(|record| record.disk == *export) else {
        return Ok(());
    };
    bail!(
        "{}: hob's disk {export} was attached as the disk {label} of {target}, and only a command with this name of the \
         VM detaches it. If it is this VM, run 'hob detach {target}'. Otherwise this VM uses a disk of another VM: stop \
         this VM",
        device.label
    )
}

/// Returns the message for disks without a record, if the user names no disk.
fn unnamed(found: &[Connected], disks: &[Disk], target: &Target) -> anyhow::Error {
    let of_hob = |found: &Connected| {
        let disk = disks.iter().find(|disk| disk.name == found.export)?;
        Some((format!("{} (image {})", disk.name, disk.backing), disk.name.as_str()))
    };
    let (uses, names): (Vec<String>, Vec<&str>) = found.iter().filter_map(of_hob).unzip();
    if names.is_empty()
        && let Some(found) = found.first()
    {
        return absent(found);
    }
    anyhow!(
        "hob has no record of an attachment, and QEMU uses hob's disk {}. If this is a disk of this VM, name it, to \
         return the VM to the image and to remove the disk from hob: 'hob detach {} {}'",
        uses.join(" and "),
        target.text,
        names.join(" ")
    )
}

/// Returns the message for an NBD export that is not a disk of the daemon.
fn absent(found: &Connected) -> anyhow::Error {
    let Connected { device, export, socket, .. } = found;
    anyhow!(
        "{}: QEMU is connected to the NBD export {export} at {socket}, and the daemon has no disk of this name; choose its \
         daemon with --control",
        device.label
    )
}

/// Refuses a VM in which a command was killed between its steps: without a record, hob does not
/// know these steps.
async fn check_complete(vm: &Vm, monitor: &mut Monitor, found: &Connected) -> anyhow::Result<()> {
    let has_job = vm.graph.jobs.iter().any(|(id, _)| id.starts_with(OWN));
    let is_marked = monitor.objects().await?.iter().any(|name| name == MARK);
    if has_job || is_marked {
        bail!(
            "{}: a command of hob was killed between its steps, and its record is missing. Stop the VM, run 'hob disk \
             remove {}', and start the VM with its image",
            found.device.label,
            found.export
        );
    }
    Ok(())
}

/// Returns hob's disk of a connected device, if the VM can use the disk's image instead.
fn served<'a>(found: &Connected, disks: &'a [Disk]) -> anyhow::Result<&'a Disk> {
    let disk = disks.iter().find(|disk| disk.name == found.export).ok_or_else(|| absent(found))?;
    let is_raw = disk.format.as_deref().is_none_or(|format| format == "raw");
    let reason = match disk {
        disk if !disk.backing.starts_with('/') => "its backing is not a file or block device of this host",
        _ if !is_raw => "hob reads the image format, and QEMU has no block node for it",
        disk if disk.read_only => "it is read-only",
        disk if disk.unlocked => "a command was killed before hob locked the image",
        _ => return Ok(disk),
    };
    Err(anyhow!("{reason}").context(refusal(found, disk)))
}

/// Returns the start of the message that a disk cannot be detached while the VM runs.
fn refusal(found: &Connected, disk: &Disk) -> String {
    format!(
        "{}: hob cannot detach its disk {2} without a record while the VM runs. Stop the VM, run 'hob disk remove {2}', \
         and start the VM with the image {1}. The reason",
        found.device.label, disk.backing, disk.name
    )
}

/// Checks that the process that listens on the NBD socket is the daemon that answers on the control
/// socket. Another daemon may have a disk of the same name. Returns the daemon's process id.
async fn check_socket(client: &Client, found: &Connected) -> anyhow::Result<i32> {
    let Connected { device, export, socket, .. } = found;
    let label = &device.label;
    let Endpoint::Unix(control) = client.endpoint() else {
        bail!(
            "{label}: without a record of the attachment of {export}, 'hob detach' must run on the daemon's host, with \
             its control socket (--control unix:PATH)"
        );
    };
    let (server, daemon) = (listener(Path::new(socket)).await?, listener(control).await?);
    let Some(daemon) = known_process(daemon) else {
        bail!(
            "{label}: hob cannot see the process of the daemon at {}, which may run in a container; run this command where \
             the daemon runs",
            control.display()
        );
    };
    if server != Some(daemon) {
        bail!(
            "{label}: QEMU is connected to the disk {export} at {socket}, and the daemon at {} does not listen there; \
             choose its daemon with --control",
            control.display()
        );
    }
    Ok(daemon)
}

/// Checks that hob's disk has one client, which is QEMU. `qemu` and `daemon` are processes as this
/// command sees them.
async fn check_client(
    client: &Client,
    found: &Connected,
    qemu: Option<i32>,
    daemon: i32,
) -> anyhow::Result<()> {
    let Connected { device, export, .. } = found;
    let change = PlannedChange::Remove { discard_dirty: false };
    let preview = client.preview(export, &change).await.map_err(explain)?;
    let clients = preview.clients;
    if clients != 1 {
        bail!(
            "{}: {clients} clients are connected to hob's disk {export}, and without a record of the attachment it must \
             be one, which is the VM. Wait until the VM has connected again, or disconnect the other clients, and \
             repeat the command",
            device.label
        );
    }
    let mismatch = match has_same_processes(daemon) {
        true => mismatch(qemu, &preview.client_pids),
        false => Some("the daemon's process id namespace is another one, or unknown".to_owned()),
    };
    let Some(reason) = mismatch else { return Ok(()) };
    bail!(
        "{}: hob cannot verify that the client of its disk {export} is this VM: {reason}. If another VM uses the disk, detach \
         the disk there. Otherwise stop this VM, run 'hob disk remove {export}', and start the VM with its image",
        device.label
    )
}

/// Returns the reason why the only client of a disk may not be QEMU; `None` if it is QEMU. `clients`
/// has the process ids of the clients, as far as they are known.
fn mismatch(qemu: Option<i32>, clients: &[u32]) -> Option<String> {
    let Some(qemu) = known_process(qemu) else {
        return Some("the process id of QEMU is unknown".to_owned());
    };
    match clients {
        [client] if i64::from(*client) == i64::from(qemu) => None,
        [client] => Some(format!("the client is the process {client}, and QEMU is the process {qemu}")),
        _ => Some(
            "the process id of the client is unknown, as of a client outside the daemon's container"
                .to_owned(),
        ),
    }
}

/// Returns a process id of SO_PEERCRED if it is one. 0 means a process outside this process's
/// namespace.
fn known_process(pid: Option<i32>) -> Option<i32> {
    pid.filter(|pid| *pid > 0)
}

/// Returns true if a process has the process id namespace of this command.
fn has_same_processes(pid: i32) -> bool {
    let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/pid")).ok();
    namespace("self").is_some_and(|own| namespace(&pid.to_string()) == Some(own))
}

/// Returns the process that listens on a Unix socket.
async fn listener(socket: &Path) -> anyhow::Result<Option<i32>> {
    let cannot = || format!("cannot connect to {}", socket.display());
    let stream = UnixStream::connect(socket).await.with_context(cannot)?;
    Ok(stream.peer_cred().with_context(cannot)?.pid())
}

/// Returns the XML element of the disk with its image, for the next start of a libvirt domain.
fn definition(persistent: &Persistent, record: &Record) -> anyhow::Result<Option<String>> {
    let Persistent::Libvirt(xml) = persistent else { return Ok(None) };
    match libvirt::find(xml, &record.file, &record.disk) {
        None => Ok(None),
        Some(Defined::Image(element)) => Ok(Some(element)),
        Some(Defined::Hob(element)) => libvirt::with_image(&element, &record.file).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::super::graph::Device;
    use super::super::record::example;
    use super::*;

    fn found(is_attached: bool) -> Connected {
        Connected {
            device: Device {
                backend: "/machine/peripheral/vda/virtio-backend".to_owned(),
                label: "vda".to_owned(),
                read_only: false,
                removable: false,
            },
            export: "web-vda".to_owned(),
            socket: "/run/hob/nbd.sock".to_owned(),
            is_attached,
        }
    }

    fn disk() -> Disk {
        Disk { name: "web-vda".to_owned(), backing: "/srv/web.img".to_owned(), ..Disk::default() }
    }

    #[test]
    fn a_disk_without_a_record_must_be_named() {
        let named = |name: &str| is_named(&found(true), &[name.to_owned()], &[disk()]);
        for name in ["vda", "web-vda", "/srv/web.img", "/machine/peripheral/vda/virtio-backend"] {
            assert!(named(name), "{name}");
        }
        assert!(!named("vdb"));
        assert!(is_hobs(&found(true), &[]) && is_hobs(&found(false), &[disk()]));
        assert!(!is_hobs(&found(false), &[]), "another NBD server");
        let target: Target = "qmp:/nowhere/web.qmp".parse().unwrap();
        let other = Connected { export: "web-vdb".to_owned(), ..found(true) };
        let disks = [disk(), Disk { name: "web-vdb".to_owned(), ..disk() }];
        let error = unnamed(&[found(true), other], &disks, &target).to_string();
        assert!(error.contains("'hob detach qmp:/nowhere/web.qmp web-vda web-vdb'"), "{error}");
        assert!(error.contains("web-vda (image /srv/web.img)"), "{error}");
        let error = unnamed(&[found(true)], &[], &target).to_string();
        assert!(error.contains("has no disk of this name"), "{error}");
    }

    /// The record of another VM, or of this VM by another name, stays valid.
    #[test]
    fn a_disk_with_the_record_of_another_name_is_refused() {
        let other = Record { disk: "web-vdb".to_owned(), ..example() };
        check_unrecorded(&found(true), std::slice::from_ref(&other)).unwrap();
        let error = check_unrecorded(&found(true), &[other, example()]).unwrap_err().to_string();
        assert!(error.contains("as the disk vda of qmp:/run/web.qmp"), "{error}");
        assert!(error.contains("run 'hob detach qmp:/run/web.qmp'") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn only_qemu_may_be_the_client() {
        assert_eq!(mismatch(Some(7), &[7]), None);
        for (qemu, clients, reason) in [
            (None, vec![7], "of QEMU is unknown"),
            (Some(0), vec![0], "of QEMU is unknown"),
            (Some(7), vec![8], "the client is the process 8, and QEMU is the process 7"),
            (Some(7), vec![], "of the client is unknown"),
            (Some(7), vec![7, 8], "of the client is unknown"),
        ] {
            let found = mismatch(qemu, &clients).unwrap();
            assert!(found.contains(reason), "{qemu:?} {clients:?}: {found}");
        }
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(has_same_processes(own) && !has_same_processes(0));
        assert_eq!((known_process(Some(0)), known_process(Some(own))), (None, Some(own)));
    }

    #[test]
    fn records_are_made_only_for_unknown_names() {
        let record: Record = serde_json::from_value(serde_json::json!({
            "version": 1, "target": "qmp:/run/web.qmp", "disk": "web-vda", "label": "vda", "backend": "vda",
            "file": "/image", "format": "raw", "method": "reopen", "cache": { "pool": "fast" },
            "node": {}, "spare": [],
        }))
        .unwrap();
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
        let known = [record];
        assert!(is_needed(&names(&[]), &[]) && is_needed(&names(&["vda", "vdb"]), &known));
        assert!(!is_needed(&names(&[]), &known) && !is_needed(&names(&["/image", "web-vda"]), &known));
    }

    #[test]
    fn a_disk_whose_image_the_vm_cannot_use_is_refused_with_the_steps() {
        assert_eq!(served(&found(true), &[disk()]).unwrap().backing, "/srv/web.img");
        for (disk, reason) in [
            (Disk { backing: "nbd://host/web".to_owned(), ..disk() }, "not a file"),
            (Disk { format: Some("qcow2".to_owned()), ..disk() }, "hob reads the image format"),
            (Disk { read_only: true, ..disk() }, "read-only"),
            (Disk { unlocked: true, ..disk() }, "was killed"),
        ] {
            let error = format!("{:#}", served(&found(true), &[disk]).unwrap_err());
            assert!(error.contains(reason) && error.contains("'hob disk remove web-vda'"), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
        let error = served(&found(true), &[]).unwrap_err().to_string();
        assert!(error.contains("has no disk of this name"), "{error}");
    }

    #[test]
    fn the_daemon_must_listen_on_the_socket_of_qemu() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let [control, nbd] = ["control.sock", "nbd.sock"].map(|name| dir.path().join(name));
        let _sockets = [&control, &nbd].map(|path| std::os::unix::net::UnixListener::bind(path).unwrap());
        let found = Connected { socket: nbd.display().to_string(), ..found(true) };
        runtime.block_on(async {
            let client = Client::new(Endpoint::Unix(control), None);
            let daemon = check_socket(&client, &found).await.unwrap();
            assert_eq!(u32::try_from(daemon), Ok(std::process::id()));
            let gone = Connected { socket: "/nowhere/nbd.sock".to_owned(), ..found.clone() };
            let error = check_socket(&client, &gone).await.unwrap_err().to_string();
            assert!(error.contains("cannot connect to /nowhere/nbd.sock"), "{error}");
            let remote = Client::new(Endpoint::Tcp { host: "10.0.0.1".to_owned(), port: 1 }, None);
            let error = check_socket(&remote, &found).await.unwrap_err().to_string();
            assert!(error.contains("--control unix:PATH"), "{error}");
        });
    }

    #[test]
    fn the_next_start_of_a_domain_gets_the_image() {
        let persistent = Persistent::Libvirt(
            "<disk type='network' device='disk'><source protocol='nbd' name='web-vda'/></disk>".to_owned(),
        );
        let record: Record = serde_json::from_value(serde_json::json!({
            "version": 1, "target": "libvirt:web", "disk": "web-vda", "label": "vda", "backend": "vda",
            "file": "/nowhere/image", "format": "raw", "method": "reopen", "cache": { "pool": "fast" },
            "node": {}, "spare": [],
        }))
        .unwrap();
        let element = "<disk type='file' device='disk'><source file='/nowhere/image'/></disk>";
        assert_eq!(definition(&persistent, &record).unwrap().as_deref(), Some(element));
        assert_eq!(definition(&Persistent::None, &record).unwrap(), None);
    }

    #[test]
    fn attaching_a_disk_without_its_record_says_what_to_do() {
        check_absent("started", "nbd").unwrap();
        // An earlier detachment has given this name to the image's node.
        check_absent("hob-0b1c2d3e-image", "file").unwrap();
        let error = check_absent("hob-0b1c2d3e", "nbd").unwrap_err().to_string();
        assert!(error.contains("Run 'hob detach' for this disk first"), "{error}");
    }
}
