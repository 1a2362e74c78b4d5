//! `hob attach --list`: the attached disks, with the state of hob's disk and the VM's use of it.
//!
//! The list asks each VM, because only QEMU knows of snapshots. Several VMs are asked at the same
//! time. A VM that does not answer in time is listed too.

use std::future::poll_fn;
use std::path::Path as FilePath;
use std::pin::Pin;
use std::slice;
use std::task::Poll;
use std::time::Duration;

use anyhow::anyhow;
use hob_control::Disk;
use serde::Serialize;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::definition;
use super::execution::{MARK, tell};
use super::graph::Graph;
use super::libvirt;
use super::locks;
use super::overlay::{NotDirect, SINCE_START, path};
use super::plan::{Definition, Goal, Path};
use super::qmp::{Absence, NotRunning};
use super::record::{Method, Record, Records};
use super::target::Target;
use crate::Global;
use crate::output::{Format, print, table, word};
use crate::remote::{converse, explain};

/// Maximum time for the replies of one VM.
const VM_MAX: Duration = Duration::from_secs(2);
/// Maximum number of VMs that are asked at the same time. Each VM of libvirt needs processes.
const VMS_MAX: usize = 16;

/// A VM's use of hob's disk, if nothing is wrong.
const USES_HOB: &str = "uses hob";
/// A VM's use of hob's disk while a command is working on the VM. QEMU answers only that command.
const CHANGING: &str = "being changed";

/// An attached disk.
#[derive(Debug, Serialize)]
struct Row {
    target: String,
    device: String,
    disk: String,
    file: String,
    method: Method,
    /// State of hob's disk.
    state: String,
    /// The VM's use of hob's disk.
    vm: &'static str,
    /// Explanation of a problem, and its remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

/// A VM's use of hob's disk, with an explanation if something is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Use {
    vm: &'static str,
    note: Option<String>,
}

/// The state of a VM's CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cpus {
    Running,
    Paused,
    /// An interrupted command of hob has paused the VM.
    PausedByHob,
}

/// Prints the attached disks of all VMs.
pub(super) fn run(directory: &FilePath, global: &Global) -> anyhow::Result<()> {
    let records = Records::list(directory)?;
    let rows = converse(global, async |client| {
        let client = client.with_liveness_check();
        let disks = client.disks().await.map_err(explain);
        if let Err(error) = &disks {
            tell(&format!("note: the state of hob's disks is unknown: {error}"));
        }
        let disks = disks.ok();
        let uses = uses_of_all(directory, &records).await;
        let rows = records.iter().zip(uses).map(|(record, its)| row(record, disks.as_deref(), its));
        Ok(rows.collect::<Vec<Row>>())
    })?;
    let columns = "TARGET|DEVICE|DISK|IMAGE|METHOD|STATE|VM";
    print(global.output, &rows, |rows| {
        let cells = |row: &Row| {
            let Row { target, device, disk, file, method, state, vm, note: _ } = row;
            let [target, device, disk, file, state] = [target, device, disk, file, state].map(String::clone);
            vec![target, device, disk, file, word(method), state, (*vm).to_owned()]
        };
        table(columns, rows.iter().map(cells))
    })?;
    if global.output == Format::Table {
        let mut notes: Vec<&String> = rows.iter().filter_map(|row| row.note.as_ref()).collect();
        // Several disks of a VM can have the same note.
        notes.dedup();
        notes.into_iter().for_each(|note| tell(&format!("note: {note}")));
    }
    Ok(())
}

/// Describes an attached disk. `disks` has all disks of the daemon; `None` if the daemon does not
/// answer.
fn row(record: &Record, disks: Option<&[Disk]>, its: Use) -> Row {
    let found = disks.map(|disks| disks.iter().find(|disk| disk.name == record.disk));
    let state = match found {
        None => "unknown".to_owned(),
        Some(None) => "hob does not have the disk".to_owned(),
        Some(Some(disk)) if disk.cache.is_none() && ![SINCE_START, CHANGING].contains(&its.vm) => {
            "not complete; repeat 'hob attach' or 'hob detach'".to_owned()
        }
        Some(Some(disk)) => word(&disk.state),
    };
    Row {
        target: record.target.clone(),
        device: record.label.clone(),
        disk: record.disk.clone(),
        file: record.file.display().to_string(),
        method: record.method,
        state,
        vm: its.vm,
        note: its.note,
    }
}

/// Returns the use of each attached disk, in the order of the records. Asks up to [`VMS_MAX`] VMs at
/// the same time.
async fn uses_of_all(directory: &FilePath, records: &[Record]) -> Vec<Use> {
    let places = &Semaphore::new(VMS_MAX);
    let vms = records.chunk_by(|one, other| one.target == other.target);
    let of_vms = vms.map(|records| async move {
        let _place = places.acquire().await;
        uses(directory, records).await
    });
    at_the_same_time(of_vms).await.into_iter().flatten().collect()
}

/// Waits for all futures at the same time, and returns their results in the order of the futures.
async fn at_the_same_time<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<Pin<Box<F>>> = futures.map(Box::pin).collect();
    let mut results: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    poll_fn(|context| {
        for (future, result) in futures.iter_mut().zip(&mut results) {
            if result.is_none()
                && let Poll::Ready(value) = future.as_mut().poll(context)
            {
                *result = Some(value);
            }
        }
        if results.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    results.into_iter().flatten().collect()
}

/// Returns how one VM uses its attached disks. `directory` has the records.
async fn uses(directory: &FilePath, records: &[Record]) -> Vec<Use> {
    let target = &records[0].target;
    let all = |vm, note: Option<String>| vec![Use { vm, note }; records.len()];
    match timeout(VM_MAX, ask(target, records)).await {
        Ok(Ok(mut uses)) => {
            for (record, its) in records.iter().zip(&mut uses).filter(|(_, its)| its.note.is_none()) {
                if let Ok(Ok(definition)) = timeout(VM_MAX, definition::read(record)).await {
                    its.note = of_next_start(record, its.vm, definition);
                }
            }
            uses
        }
        Ok(Err(error)) if error.is::<NotRunning>() => {
            let why = error.downcast_ref::<NotRunning>().map_or(Absence::Stopped, |error| error.why);
            let mut uses = Vec::new();
            for record in records {
                let next_start = timeout(VM_MAX, next_start(record, why)).await;
                uses.push(absent(record, why, next_start.ok().and_then(Result::ok)));
            }
            uses
        }
        Ok(Err(error)) => all("unknown", Some(format!("{target}: {error:#}"))),
        Err(_) => {
            if let Some(command) = working(directory, target) {
                return all(CHANGING, Some(format!("{target}: {command} is working on the VM")));
            }
            let note = match target.starts_with("libvirt:") {
                true => "libvirt or QEMU did not answer in time; repeat the command",
                false => "QEMU does not answer; another program may be connected to its QMP socket",
            };
            all("unknown", Some(format!("{target}: {note}")))
        }
    }
}

/// Returns the command that is working on a VM, if there is one.
fn working(directory: &FilePath, target: &str) -> Option<String> {
    let target: Target = target.parse().ok()?;
    locks::holder(directory, &target.locked(slice::from_ref(&target.text)))
}

async fn ask(target: &str, records: &[Record]) -> anyhow::Result<Vec<Use>> {
    let target: Target = target.parse().map_err(|reason: String| anyhow!(reason))?;
    let mut monitor = target.connect().await?;
    let graph = Graph::read(&mut monitor).await?;
    let status = monitor.ask("query-status", json!({})).await?;
    let is_marked = monitor.objects().await?.iter().any(|name| name == MARK);
    let cpus = match (status["running"].as_bool(), is_marked) {
        (Some(true), _) => Cpus::Running,
        (_, true) => Cpus::PausedByHob,
        _ => Cpus::Paused,
    };
    Ok(records.iter().map(|record| use_of(&graph, record, cpus)).collect())
}

/// Returns the disk that the next start of a VM uses.
async fn next_start(record: &Record, why: Absence) -> anyhow::Result<Definition> {
    let (Absence::Saved, Some(domain)) = (why, record.domain()) else {
        return definition::read(record).await;
    };
    let saved = libvirt::saved(domain).await?.unwrap_or_default();
    let has_hob = libvirt::is_saved_with_hob(&saved, record);
    Ok(if has_hob { Definition::Hob } else { Definition::Image })
}

/// Returns the use of a disk by a VM that does not run, with what to do. `next_start` is `None` if
/// it is unknown which disk the VM's next start uses.
fn absent(record: &Record, why: Absence, next_start: Option<Definition>) -> Use {
    let target = &record.target;
    let detach = format!("'hob detach --stopped {target}'");
    let (vm, what) = match why {
        Absence::Stopped => ("stopped", "is stopped"),
        Absence::Saved => ("saved", "is saved ('virsh managedsave')"),
        Absence::Gone => ("gone", "does not exist on this host any more"),
    };
    let todo = match (why, next_start) {
        (Absence::Gone, _) => {
            format!("{detach} writes dirty data to the images, and removes hob's disks")
        }
        (Absence::Saved, Some(Definition::Hob)) => {
            format!("its restore needs hob's disks. To remove them, restore and stop it, and run {detach}")
        }
        (_, Some(Definition::Hob)) => {
            format!("its next start uses hob's disks. To remove them before that, run {detach}")
        }
        (Absence::Stopped, Some(Definition::None)) if target.starts_with("qmp:") => {
            format!(
                "hob has locked its images. Start it with hob's disks, or run {detach} before its next start"
            )
        }
        _ => format!("hob has locked its images. Run {detach} before its next start"),
    };
    Use { vm, note: Some(format!("{target}: the VM {what}; {todo}")) }
}

/// Returns a note if the VM's next start does not use the disk that the VM uses now: a command was
/// interrupted before it changed the VM's definition.
fn of_next_start(record: &Record, vm: &str, definition: Definition) -> Option<String> {
    let Record { target, disk, file, .. } = record;
    match (vm.starts_with(USES_HOB), definition) {
        (true, Definition::Image) => Some(format!(
            "{target}: the VM's definition still has {}, so its next start fails or bypasses hob. Repeat \
             'hob attach {target}', or run 'hob detach {target}'",
            file.display()
        )),
        (false, Definition::Hob) => Some(format!(
            "{target}: the VM's definition still has hob's disk {disk}. Repeat 'hob detach {target}', or run \
             'hob attach {target}'"
        )),
        _ => None,
    }
}

/// Returns the use of one disk in the block graph of its VM.
fn use_of(graph: &Graph, record: &Record, cpus: Cpus) -> Use {
    let target = &record.target;
    if cpus == Cpus::PausedByHob {
        let note = format!(
            "{target}: hob has paused the VM. If no command is working on it, a command was interrupted: repeat \
             'hob attach {target}', or run 'hob detach {target}'. Both continue the VM"
        );
        return Use { vm: "paused by hob", note: Some(note) };
    }
    if !graph.has_device(&record.backend) {
        let note = format!(
            "{target}: the VM does not have the disk {} any more. Run 'hob detach {target}'",
            record.label
        );
        return Use { vm: "unplugged", note: Some(note) };
    }
    let plain = |vm| Use { vm, note: None };
    match (path(graph, record, Goal::Detached), cpus) {
        (Ok(Path::Hob), Cpus::Paused) => plain("uses hob, paused"),
        (Ok(Path::Hob), _) => plain(USES_HOB),
        (Ok(Path::Image), _) => plain("uses its image"),
        (Err(error), _) => {
            let vm = error.downcast_ref::<NotDirect>().map_or("unknown", |error| error.short);
            Use { vm, note: Some(error.to_string()) }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::record::example;
    use super::*;

    /// Returns a graph of a device `vda` with these nodes below each other.
    fn graph(chain: &[(&str, &str, &str)]) -> Graph {
        let ids: Vec<Value> =
            chain.iter().zip(0..).map(|((name, ..), id)| json!({ "id": id, "name": name })).collect();
        let edges: Vec<Value> = chain
            .windows(2)
            .zip(0..)
            .map(|(pair, id)| json!({ "parent": id, "name": pair[1].2, "child": id + 1 }))
            .collect();
        let node = |(name, driver, _): &(&str, &str, &str)| json!({ "node-name": name, "drv": driver, "file": format!("/{name}") });
        let nodes: Vec<Value> = chain.iter().skip(1).map(node).collect();
        Graph::new(&json!(nodes), &json!({ "nodes": ids, "edges": edges }), &Value::Null, &Value::Null)
    }

    fn record() -> Record {
        Record { file: "/image-file".into(), parent: Some(json!({ "node-name": "image" })), ..example() }
    }

    #[test]
    fn the_list_says_how_the_vm_uses_the_disk() {
        let (vda, image) = (("vda", "", ""), ("image", "raw", "root"));
        let attached = [vda, image, ("hob-1", "nbd", "file")];
        let direct = [vda, image, ("image-file", "file", "file")];
        for (chain, cpus, expected) in [
            (attached, Cpus::Running, "uses hob"),
            (attached, Cpus::Paused, "uses hob, paused"),
            (direct, Cpus::Running, "uses its image"),
        ] {
            let found = use_of(&graph(&chain), &record(), cpus);
            assert_eq!(found, Use { vm: expected, note: None });
        }
        let found = use_of(&graph(&[("vdb", "", ""), image]), &record(), Cpus::Running);
        assert_eq!(found.vm, "unplugged");
        let found = use_of(&graph(&attached), &record(), Cpus::PausedByHob);
        assert_eq!(found.vm, "paused by hob");
        assert!(found.note.unwrap().contains("hob detach qmp:/run/web.qmp"));
    }

    #[test]
    fn the_list_says_that_the_next_start_uses_another_disk() {
        for (vm, definition, expected) in [
            (USES_HOB, Definition::Image, Some("Repeat 'hob attach")),
            ("uses hob, paused", Definition::Image, Some("Repeat 'hob attach")),
            ("uses its image", Definition::Hob, Some("Repeat 'hob detach")),
            (USES_HOB, Definition::Hob, None),
            ("uses its image", Definition::Image, None),
            (USES_HOB, Definition::None, None),
        ] {
            let note = of_next_start(&record(), vm, definition);
            assert_eq!(note.is_some(), expected.is_some(), "{vm}, {definition:?}: {note:?}");
            assert!(note.is_none_or(|note| note.contains(expected.unwrap_or_default())), "{vm}");
        }
    }

    #[test]
    fn the_list_shows_a_disk_below_a_snapshot_and_says_what_to_do() {
        // The VM writes to `overlay-file`; hob's disk is below the backing file.
        let nodes = json!([
            { "node-name": "overlay", "drv": "qcow2", "file": "/overlay" },
            { "node-name": "overlay-file", "drv": "file", "file": "/overlay" },
            { "node-name": "image", "drv": "raw", "file": "/image" },
            { "node-name": "hob-1", "drv": "nbd", "file": "nbd" },
        ]);
        let names = ["vda", "overlay", "overlay-file", "image", "hob-1"];
        let ids: Vec<Value> =
            names.iter().zip(0..).map(|(name, id)| json!({ "id": id, "name": name })).collect();
        let edges = json!([
            { "parent": 0, "name": "root", "child": 1 },
            { "parent": 1, "name": "file", "child": 2 },
            { "parent": 1, "name": "backing", "child": 3 },
            { "parent": 3, "name": "file", "child": 4 },
        ]);
        let graph = Graph::new(&nodes, &json!({ "nodes": ids, "edges": edges }), &Value::Null, &Value::Null);
        let found = use_of(&graph, &record(), Cpus::Running);
        assert_eq!(found.vm, "below a snapshot");
        assert!(found.note.unwrap().contains("Commit the overlay"));
        let row = row(&record(), None, use_of(&graph, &record(), Cpus::Running));
        assert_eq!((row.vm, row.state.as_str()), ("below a snapshot", "unknown"));
    }

    /// The cache of such a disk can be disabled while the VM runs.
    #[test]
    fn a_disk_that_the_vm_was_started_with_is_complete_without_a_cache() {
        let disk = Disk { name: "web-vda".to_owned(), ..Disk::default() };
        let state = |vm| row(&record(), Some(slice::from_ref(&disk)), Use { vm, note: None }).state;
        assert!(state(USES_HOB).starts_with("not complete"), "{}", state(USES_HOB));
        assert_eq!(state(SINCE_START), word(&disk.state));
        assert_eq!(state(CHANGING), word(&disk.state), "its command is not interrupted");
    }

    #[test]
    fn a_vm_that_does_not_run_is_listed_with_what_to_do() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let records = [Record { target: "qmp:/nowhere/web.qmp".to_owned(), ..record() }];
        let uses = runtime.block_on(uses(FilePath::new("/nowhere"), &records));
        assert_eq!((uses.len(), uses[0].vm), (1, "stopped"));
        let note = uses[0].note.as_deref().unwrap();
        assert!(
            note.contains("with hob's disks, or run 'hob detach --stopped qmp:/nowhere/web.qmp'"),
            "{note}"
        );
    }

    /// Nothing accepts the connections to these sockets, so no greeting of QEMU arrives.
    #[test]
    fn vms_that_do_not_answer_are_asked_at_the_same_time() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (mut records, mut sockets) = (Vec::new(), Vec::new());
        for number in 0..5 {
            let socket = dir.path().join(format!("{number}.qmp"));
            sockets.push(std::os::unix::net::UnixListener::bind(&socket).unwrap());
            records.push(Record { target: format!("qmp:{}", socket.display()), ..record() });
        }
        records.insert(1, Record { target: "qmp:/nowhere/web.qmp".to_owned(), ..record() });
        let start = std::time::Instant::now();
        let uses = runtime.block_on(uses_of_all(dir.path(), &records));
        assert!(start.elapsed() < 3 * VM_MAX, "{:?}", start.elapsed());
        let states: Vec<&str> = uses.iter().map(|its| its.vm).collect();
        assert_eq!(states, ["unknown", "stopped", "unknown", "unknown", "unknown", "unknown"]);
    }

    #[test]
    fn each_reason_for_a_vm_that_does_not_run_has_advice() {
        let record = Record { target: "libvirt:web".to_owned(), ..record() };
        for (why, next_start, vm, advice) in [
            (Absence::Stopped, Some(Definition::Hob), "stopped", "next start uses hob's disks"),
            (Absence::Stopped, Some(Definition::Image), "stopped", "hob has locked its images. Run"),
            (Absence::Stopped, Some(Definition::None), "stopped", "hob has locked its images. Run"),
            (Absence::Stopped, None, "stopped", "hob has locked its images. Run"),
            (Absence::Saved, Some(Definition::Hob), "saved", "restore and stop it, and run"),
            (Absence::Saved, Some(Definition::Image), "saved", "hob has locked its images. Run"),
            (Absence::Gone, Some(Definition::None), "gone", "writes dirty data to the images"),
        ] {
            let found = absent(&record, why, next_start);
            let note = found.note.unwrap_or_default();
            assert_eq!(found.vm, vm, "{note}");
            assert!(note.contains(advice) && note.contains("'hob detach --stopped libvirt:web'"), "{note}");
        }
    }
}
