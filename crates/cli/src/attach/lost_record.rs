//! Detachment of a disk without a record: its file was lost, or is in another directory. QEMU names
//! hob's socket and disk, and the daemon names the image of the disk. So `hob detach` makes the
//! record again.

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
use super::record::Record;
use super::target::Target;
use super::vm::{Connected, Vm};
use crate::remote::explain;

/// Returns true if `hob detach` must look for disks without a record. `names` has the disks in the
/// command, and `known` has the records of the VM.
pub(super) fn is_needed(names: &[String], known: &[Record]) -> bool {
    known.is_empty() || names.iter().any(|name| !known.iter().any(|record| record.is_named(name)))
}

/// Returns the records of attached disks of a running VM that have no record. Without names, these
/// are the disks that `hob attach` connected since the VM's start. A disk of the VM's start must be
/// named, because the operator may have added it to hob and to the VM.
///
/// # Errors
/// Returns an error that says what to do if a chosen disk cannot be detached without its record.
pub(super) async fn find(
    client: &Client,
    target: &Target,
    names: &[String],
    known: &[Record],
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
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let chosen: Vec<&Connected> = found.iter().filter(|found| is_chosen(found, names, &disks)).collect();
    match (&chosen[..], names) {
        ([], []) => return Err(of_start(&found[0], target)),
        ([], _) => return Ok(Vec::new()),
        _ => check_complete(&vm, &mut monitor, chosen[0]).await?,
    }
    let persistent = Persistent::read(target).await?;
    let mut records = Vec::new();
    for found in chosen {
        let disk = served(found, &disks)?;
        check_socket(client, found).await?;
        check_clients(client, found).await?;
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
        records.push(record);
    }
    Ok(records)
}

/// Prints the disks that `hob attach` connected since the VM's start and that have no record.
pub(super) fn note_others(vm: &Vm, known: &[Record], target: &Target) {
    for found in unrecorded(vm, known).iter().filter(|found| found.is_attached) {
        let label = &found.device.label;
        tell(&format!(
            "{label}: note: the VM uses hob's disk {} too, without a record of its attachment; 'hob detach {} {label}' \
             detaches it",
            found.export, target.text
        ));
    }
}

/// Refuses to attach a disk that an earlier `hob attach` has connected to hob. `node` is the lowest
/// block node of the disk, with this driver.
pub(super) fn check_absent(node: &str, driver: &str) -> anyhow::Result<()> {
    if driver == "nbd" && node.starts_with(OWN) {
        bail!(
            "the VM uses hob already, by an earlier 'hob attach' whose record is missing in the directory of records. \
             Run 'hob detach' for this VM first, or name the directory with --records"
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

fn is_chosen(found: &Connected, names: &[String], disks: &[Disk]) -> bool {
    let Connected { device, export, is_attached, .. } = found;
    let backing = disks.iter().find(|disk| disk.name == *export).map(|disk| Path::new(&disk.backing));
    let is_named = |name: &String| {
        [&device.label, &device.backend, export].contains(&name)
            || backing.is_some_and(|backing| is_same_path(backing, Path::new(name)))
    };
    if names.is_empty() { *is_attached } else { names.iter().any(is_named) }
}

/// Returns the message for a VM that was started with hob's disk, if the user names no disk.
fn of_start(found: &Connected, target: &Target) -> anyhow::Error {
    let Connected { device, export, .. } = found;
    anyhow!(
        "{0}: the VM uses the NBD export {export} since its start, and hob has no record of an attachment. To return the \
         VM to the disk's image, and to remove the disk {export} from hob, name the disk: 'hob detach {1} {0}'",
        device.label,
        target.text
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
    let Connected { device, export, socket, .. } = found;
    let disk = disks.iter().find(|disk| disk.name == *export).with_context(|| {
        format!(
            "{}: QEMU is connected to the NBD export {export} at {socket}, and the daemon has no disk of this name; \
             choose its daemon with --control",
            device.label
        )
    })?;
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
/// socket. Another daemon may have a disk of the same name.
async fn check_socket(client: &Client, found: &Connected) -> anyhow::Result<()> {
    let Connected { device, export, socket, .. } = found;
    let label = &device.label;
    let Endpoint::Unix(control) = client.endpoint() else {
        bail!(
            "{label}: without a record of the attachment of {export}, 'hob detach' must run on the daemon's host, with \
             its control socket (--control unix:PATH)"
        );
    };
    let server = listener(Path::new(socket)).await?;
    if server.is_none() || server != listener(control).await? {
        bail!(
            "{label}: QEMU is connected to the disk {export} at {socket}, and the daemon at {} does not listen there; \
             choose its daemon with --control",
            control.display()
        );
    }
    Ok(())
}

/// Checks that hob's disk has one client, which must be the VM.
async fn check_clients(client: &Client, found: &Connected) -> anyhow::Result<()> {
    let Connected { device, export, .. } = found;
    let change = PlannedChange::Remove { discard_dirty: false };
    let clients = client.preview(export, &change).await.map_err(explain)?.clients;
    if clients != 1 {
        bail!(
            "{}: {clients} clients are connected to hob's disk {export}, and without a record of the attachment it must \
             be one, which is the VM. Wait until the VM has connected again, or disconnect the other clients, and \
             repeat the command",
            device.label
        );
    }
    Ok(())
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
    fn a_disk_of_the_start_must_be_named() {
        let chosen = |is_attached, names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            is_chosen(&found(is_attached), &names, &[disk()])
        };
        assert!(chosen(true, &[]) && !chosen(false, &[]));
        for name in ["vda", "web-vda", "/srv/web.img", "/machine/peripheral/vda/virtio-backend"] {
            assert!(chosen(false, &[name]), "{name}");
        }
        assert!(!chosen(true, &["vdb"]));
        assert!(is_hobs(&found(true), &[]) && is_hobs(&found(false), &[disk()]));
        assert!(!is_hobs(&found(false), &[]), "another NBD server");
        let target: Target = "qmp:/nowhere/web.qmp".parse().unwrap();
        let error = of_start(&found(false), &target).to_string();
        assert!(error.contains("'hob detach qmp:/nowhere/web.qmp vda'"), "{error}");
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
            check_socket(&client, &found).await.unwrap();
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
        assert!(error.contains("Run 'hob detach' for this VM first"), "{error}");
    }
}
