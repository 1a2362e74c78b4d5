//! Finds out where the requests of a VM's disk go: to hob, to the image, or to an overlay. After an
//! external snapshot, the VM writes to an overlay, and the node that hob would replace is below the
//! overlay. hob does not attach such a disk. hob detaches such a disk only if the disk's attachment
//! is incomplete.

use std::path::Path as FilePath;

use anyhow::Context;
use serde_json::Value;

use super::graph::{Graph, Node};
use super::libvirt::is_same_path;
use super::plan::{Goal, Path};
use super::record::{Record, name_of};

/// Directory of the block devices of hob's disks on this host.
const DEVICES: &str = "/dev/hob";

/// Short reason for a disk of hob that the VM has used since its start.
pub(super) const SINCE_START: &str = "uses hob since its start";

/// The reason why hob cannot attach or detach a VM's disk now. Either the VM does not have the disk
/// any more, or the disk's requests go neither directly to hob nor directly to the image, for
/// example because a snapshot's overlay is above hob.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct NotDirect {
    /// The reason in a few words, for tables.
    pub(super) short: &'static str,
    message: String,
}

/// Returns where the requests of a VM's disk go: to hob or to the image.
///
/// # Errors
/// Returns [`NotDirect`] if the VM does not have the disk any more, or if the disk's requests go
/// neither directly to hob nor directly to the image. An incomplete attachment of an image below an
/// overlay can be detached, but not continued.
pub(super) fn path(graph: &Graph, record: &Record, goal: Goal) -> anyhow::Result<Path> {
    let refuse = |short, message| -> anyhow::Result<Path> { Err(NotDirect { short, message }.into()) };
    if !graph.has_device(&record.backend) {
        if goal == Goal::Detached && is_unused_chain(graph, record) {
            return Ok(Path::Hob);
        }
        let Record { label, disk, target, .. } = record;
        let message = match (goal, is_used_otherwise(graph, record)) {
            (Goal::Detached, false) => return Ok(Path::Image),
            (Goal::Attached, false) => {
                format!("{label}: the VM does not have this disk any more. Run 'hob detach {target}'")
            }
            (_, true) => format!(
                "{label}: the VM does not have this disk any more, and another device or block node of QEMU uses \
                 hob's disk {disk}. Stop the VM, and run 'hob detach --stopped {target}'"
            ),
        };
        return refuse("does not have the disk", message);
    }
    let chain = graph.chain(&record.backend)?;
    let last = chain.last().expect("a chain has a node");
    let has_hobs_node = has_hobs_node(graph, record);
    if has_hobs_node && last == record.node_name() {
        return Ok(Path::Hob);
    }
    let node = graph.nodes.get(last).with_context(|| format!("QEMU has just removed the node {last}"))?;
    let (label, file, target) = (&record.label, &node.file, &record.target);
    if has_hobs_node && graph.below(&record.backend).contains(record.node_name()) {
        let commit = match record.domain() {
            Some(domain) => format!("'virsh blockcommit {domain} DISK --active --pivot'"),
            None => "block-commit and block-job-complete of QMP".to_owned(),
        };
        let message = format!(
            "{label}: hob's disk {} is below a snapshot: the VM writes to the overlay {file}. Commit the \
             overlay with {commit}, and repeat the command; or stop the VM, run 'qemu-img commit {file}', \
             and then 'hob detach --stopped {target}'",
            record.disk
        );
        return refuse("below a snapshot", message);
    }
    let device = || FilePath::new(DEVICES).join(&record.disk);
    let is_started_with_hob = match node.driver.as_str() {
        "nbd" => is_export(&node.file, &record.disk),
        "host_device" => is_same_path(FilePath::new(&node.file), &device()),
        _ => false,
    };
    if is_started_with_hob {
        let disk = &record.disk;
        let message = match is_connected(node, record) {
            true => format!(
                "{label}: the VM uses hob's disk {disk} since its start. 'hob detach {target}' returns it to its image"
            ),
            false => format!(
                "{label}: the VM uses hob's disk {disk} since its start, as {file}. While the VM runs, hob can replace only \
                 a connection to its NBD socket {}. Stop the VM, and run 'hob detach --stopped {target}'. \
                 'hob cache disable {disk}' removes only the cache, while the VM runs",
                record.socket()
            ),
        };
        return refuse(SINCE_START, message);
    }
    if !matches!(node.driver.as_str(), "file" | "host_device") {
        let message = format!(
            "{label} now uses {file} ({}); if the VM was started with hob's disk, stop the VM and use \
             'hob detach --stopped {target}'",
            node.driver
        );
        return refuse("has used hob since its start, or uses another image", message);
    }
    if has_hobs_node && graph.users(record.node_name()) > 0 {
        let message = format!(
            "{label}: the VM uses {file}, and another block node or export of QEMU uses hob's disk {}. Remove \
             it, and repeat the command; or stop the VM, and run 'hob detach --stopped {target}'",
            record.disk
        );
        return refuse("uses its image; another part of QEMU uses hob's disk", message);
    }
    if goal == Goal::Attached && is_below_overlay(graph, record, &chain) {
        let message = format!(
            "{label}: the attachment of {} is not complete, and the VM uses {file} now. Run 'hob detach {target}', \
             and then 'hob attach {target}'",
            record.file.display()
        );
        return refuse("not complete, below a snapshot", message);
    }
    Ok(Path::Image)
}

/// Returns true if only the format node of an unplugged disk uses hob's disk, and nothing uses the
/// format node. QEMU keeps the nodes of `-blockdev` when the device is unplugged.
fn is_unused_chain(graph: &Graph, record: &Record) -> bool {
    let Some(parent) = record.parent.as_ref().map(name_of) else { return false };
    let is_above_hob = graph.child(parent, "file").is_some_and(|child| child == record.node_name());
    has_hobs_node(graph, record)
        && is_above_hob
        && graph.users(record.node_name()) == 1
        && graph.users(parent) == 0
}

/// Returns true if a part of QEMU other than the attached device uses hob's disk.
fn is_used_otherwise(graph: &Graph, record: &Record) -> bool {
    let is_hobs = |(name, node): (&String, &Node)| {
        name != record.node_name() && node.driver == "nbd" && is_export(&node.file, &record.disk)
    };
    let is_used = has_hobs_node(graph, record) && graph.users(record.node_name()) > 0;
    is_used || graph.nodes.iter().any(is_hobs)
}

/// Returns true if QEMU has the record's node, which is connected to hob. If hob did not choose the
/// name of the node, another node may have this name after another start of the VM.
pub(super) fn has_hobs_node(graph: &Graph, record: &Record) -> bool {
    let node = graph.nodes.get(record.node_name());
    node.is_some_and(|node| {
        node.driver == "nbd" && (record.has_own_node() || is_export(&node.file, &record.disk))
    })
}

/// Returns true if a node is connected to the record's disk through hob's NBD socket.
pub(super) fn is_connected(node: &Node, record: &Record) -> bool {
    let is_hobs = |socket: String| is_same_path(FilePath::new(&socket), FilePath::new(record.socket()));
    node.driver == "nbd" && is_export(&node.file, &record.disk) && socket(&node.file).is_some_and(is_hobs)
}

/// Returns the export and the Unix socket to which an NBD node is connected.
pub(super) fn server(node: &Node) -> Option<(String, String)> {
    if node.driver != "nbd" {
        return None;
    }
    let export = match node.file.strip_prefix("json:") {
        Some(options) => {
            let options: Value = serde_json::from_str(options).ok()?;
            options["export"].as_str()?.to_owned()
        }
        None => node.file.strip_prefix("nbd+unix:///")?.split('?').next()?.to_owned(),
    };
    Some((export, socket(&node.file)?))
}

/// Returns the path of the Unix socket in the file name of an NBD node.
fn socket(file: &str) -> Option<String> {
    let Some(options) = file.strip_prefix("json:") else {
        return file.split_once("?socket=").map(|(_, path)| path.to_owned());
    };
    let options: Value = serde_json::from_str(options).ok()?;
    let path = options.pointer("/server/path").or_else(|| options.get("server.path"))?;
    path.as_str().map(str::to_owned)
}

/// Returns true if the file name of an NBD node, a URI or JSON, names this export.
pub(super) fn is_export(file: &str, export: &str) -> bool {
    let end = format!("/{export}");
    file.ends_with(&end) || file.contains(&format!("{end}?")) || file.contains(&format!("\"{export}\""))
}

/// Returns true if the nodes of the record are not those that the VM writes to. `chain` leads from
/// the device to the file that the VM writes to.
fn is_below_overlay(graph: &Graph, record: &Record, chain: &[String]) -> bool {
    let is_in_chain = |name: &str| chain.iter().any(|node| node == name);
    if let Some(parent) = &record.parent {
        return !is_in_chain(name_of(parent));
    }
    let is_image = |name: &str| {
        let node = graph.nodes.get(name);
        node.is_some_and(|node| is_same_path(FilePath::new(&node.file), &record.file))
    };
    let below = graph.below(&record.backend);
    !chain.iter().any(|name| is_image(name)) && below.into_iter().any(is_image)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::record::{Method, example};
    use super::*;

    /// Returns a graph with these edges (parent, kind, child) and the image `/a` or `/overlay` in
    /// each node.
    fn graph(edges: &[(&str, &str, &str)]) -> Graph {
        let mut names = vec!["vda", "image", "image-file", "hob-1", "overlay", "overlay-file", "other"];
        // Only a VM that was started with hob's disk has the node `started`.
        names.extend(edges.iter().any(|(.., child)| *child == "started").then_some("started"));
        let id = |name: &str| names.iter().position(|found| *found == name).expect("a node");
        let node = |name: &&str| {
            let driver = match *name {
                "hob-1" | "started" => "nbd",
                "image-file" | "overlay-file" => "file",
                _ => "qcow2",
            };
            let file = match *name {
                "overlay" | "overlay-file" => "/overlay",
                "started" => "nbd+unix:///web-vda?socket=/run/hob/nbd.sock",
                _ => "/a",
            };
            json!({ "node-name": name, "drv": driver, "file": file })
        };
        let nodes: Vec<Value> = names.iter().map(node).collect();
        let ids: Vec<Value> = names.iter().map(|name| json!({ "id": id(name), "name": name })).collect();
        let edges: Vec<Value> = edges
            .iter()
            .map(|(parent, kind, child)| json!({ "parent": id(parent), "name": kind, "child": id(child) }))
            .collect();
        Graph::new(&json!(nodes), &json!({ "nodes": ids, "edges": edges }), &json!([]), &json!([]))
    }

    fn record(method: Method) -> Record {
        let parent = (method == Method::Reopen).then(|| json!({ "node-name": "image" }));
        let spare = vec![json!({ "node-name": "image-file", "filename": "/a" })];
        Record { file: "/a".into(), format: "qcow2".to_owned(), method, spare, parent, ..example() }
    }

    #[test]
    fn the_vm_uses_its_image_or_hob() {
        let direct = graph(&[("vda", "root", "image"), ("image", "file", "image-file")]);
        let attached = graph(&[("vda", "root", "image"), ("image", "file", "hob-1")]);
        for method in [Method::Reopen, Method::Device] {
            for goal in [Goal::Attached, Goal::Detached] {
                assert_eq!(path(&direct, &record(method), goal).unwrap(), Path::Image);
                assert_eq!(path(&attached, &record(method), goal).unwrap(), Path::Hob);
            }
        }
    }

    /// libvirt or the operator connected QEMU to hob, with nodes that hob does not know.
    #[test]
    fn a_vm_that_was_started_with_hobs_disk_is_detached_when_it_has_stopped() {
        let started = graph(&[("vda", "root", "image"), ("image", "file", "started")]);
        for goal in [Goal::Attached, Goal::Detached] {
            let error = path(&started, &record(Method::Reopen), goal).unwrap_err();
            assert!(error.to_string().contains("hob detach --stopped qmp:/run/web.qmp"), "{error}");
            let short = error.downcast_ref::<NotDirect>().map(|error| error.short);
            assert_eq!(short, Some(SINCE_START));
        }
    }

    /// libvirt gives the same names to the nodes of each start.
    #[test]
    fn the_node_of_an_earlier_start_is_not_confused_with_another_node() {
        let started = graph(&[("vda", "root", "image"), ("image", "file", "started")]);
        let direct = graph(&[("vda", "root", "image"), ("image", "file", "image-file")]);
        let with = |disk: &str, node: &str| Record {
            disk: disk.to_owned(),
            node: json!({ "node-name": node, "server": { "path": "/run/hob/nbd.sock" } }),
            ..record(Method::Reopen)
        };
        for goal in [Goal::Attached, Goal::Detached] {
            assert_eq!(path(&started, &with("web-vda", "started"), goal).unwrap(), Path::Hob);
            assert_eq!(path(&direct, &with("web-vda", "image-file"), goal).unwrap(), Path::Image);
            assert!(path(&started, &with("web-vdb", "started"), goal).is_err());
            // `hob detach` adapts the record before it asks for the path.
            let error = path(&started, &with("web-vda", "hob-1"), goal).unwrap_err().to_string();
            assert!(error.contains("'hob detach qmp:/run/web.qmp' returns it to its image"), "{error}");
        }
    }

    #[test]
    fn a_vm_that_was_started_with_hobs_block_device_does_not_use_its_image() {
        let edges = json!([
            { "parent": 0, "name": "root", "child": 1 },
            { "parent": 1, "name": "file", "child": 2 },
        ]);
        let ids =
            json!([{ "id": 0, "name": "vda" }, { "id": 1, "name": "raw" }, { "id": 2, "name": "file" }]);
        for (file, is_hobs) in [("/dev/hob/web-vda", true), ("/dev/hob/web-vdb", false)] {
            let nodes = json!([
                { "node-name": "raw", "drv": "raw", "file": file },
                { "node-name": "file", "drv": "host_device", "file": file },
            ]);
            let edges = json!({ "nodes": ids, "edges": edges });
            let graph = Graph::new(&nodes, &edges, &json!([]), &json!([]));
            let found = path(&graph, &record(Method::Device), Goal::Detached);
            let short = found.as_ref().err().and_then(|error| error.downcast_ref::<NotDirect>());
            assert_eq!(short.is_some_and(|error| error.short == SINCE_START), is_hobs, "{file}: {found:?}");
        }
    }

    #[test]
    fn a_disk_below_a_snapshot_is_refused() {
        let overlay = [("vda", "root", "overlay"), ("overlay", "file", "overlay-file")];
        let below = [("overlay", "backing", "image"), ("image", "file", "hob-1")];
        let root = [("overlay", "backing", "hob-1")];
        let reopened = graph(&[overlay, below].concat());
        let mirrored = graph(&[&overlay[..], &root[..]].concat());
        for (graph, method) in [(reopened, Method::Reopen), (mirrored, Method::Mirror)] {
            for goal in [Goal::Attached, Goal::Detached] {
                let error = path(&graph, &record(method), goal).unwrap_err().to_string();
                assert!(error.contains("below a snapshot") && error.contains("/overlay"), "{error}");
            }
        }
    }

    #[test]
    fn an_incomplete_attachment_below_a_snapshot_is_only_detached() {
        let edges = [
            ("vda", "root", "overlay"),
            ("overlay", "file", "overlay-file"),
            ("overlay", "backing", "image"),
            ("image", "file", "image-file"),
        ];
        for method in [Method::Reopen, Method::Device, Method::Mirror] {
            let record = record(method);
            let error = path(&graph(&edges), &record, Goal::Attached).unwrap_err().to_string();
            assert!(error.contains("not complete"), "{error}");
            assert_eq!(path(&graph(&edges), &record, Goal::Detached).unwrap(), Path::Image);
        }
    }

    #[test]
    fn a_disk_that_was_unplugged_is_only_detached() {
        for method in [Method::Reopen, Method::Mirror] {
            let unplugged = graph(&[("image", "file", "image-file")]);
            assert_eq!(path(&unplugged, &record(method), Goal::Detached).unwrap(), Path::Image);
            let error = path(&unplugged, &record(method), Goal::Attached).unwrap_err().to_string();
            assert!(error.contains("Run 'hob detach"), "{error}");
            let in_use = graph(&[("other", "file", "image"), ("image", "file", "hob-1")]);
            let error = path(&in_use, &record(method), Goal::Detached).unwrap_err().to_string();
            assert!(error.contains("hob detach --stopped"), "{error}");
        }
        // The nodes of `-blockdev` outlive the device.
        let kept = graph(&[("image", "file", "hob-1")]);
        assert_eq!(path(&kept, &record(Method::Reopen), Goal::Detached).unwrap(), Path::Hob);
        for (method, goal) in [(Method::Reopen, Goal::Attached), (Method::Mirror, Goal::Detached)] {
            let error = path(&kept, &record(method), goal).unwrap_err().to_string();
            assert!(error.contains("hob detach --stopped"), "{error}");
        }
    }

    #[test]
    fn a_disk_is_not_confused_with_one_of_a_longer_name() {
        for file in [
            "nbd+unix:///web-disk1?socket=/run/hob/nbd.sock",
            "nbd://host:10809/web-disk1",
            r#"json:{"driver": "nbd", "server": {"type": "unix"}, "export": "web-disk1"}"#,
        ] {
            assert!(is_export(file, "web-disk1"), "{file}");
            assert!(!is_export(&file.replace("disk1", "disk10"), "web-disk1"), "{file}");
            assert!(!is_export(&file.replace("web", "a-web"), "web-disk1"), "{file}");
        }
    }

    #[test]
    fn the_server_of_a_node_has_an_export_and_a_socket() {
        let node = |driver: &str, file: &str| Node {
            driver: driver.to_owned(),
            file: file.to_owned(),
            info: json!({}),
        };
        let found = Some(("web-vda".to_owned(), "/run/hob/nbd.sock".to_owned()));
        for file in [
            "nbd+unix:///web-vda?socket=/run/hob/nbd.sock",
            r#"json:{"driver": "nbd", "export": "web-vda", "server.path": "/run/hob/nbd.sock"}"#,
            r#"json:{"driver": "nbd", "export": "web-vda", "server": {"path": "/run/hob/nbd.sock"}}"#,
        ] {
            assert_eq!(server(&node("nbd", file)), found, "{file}");
        }
        assert_eq!(server(&node("nbd", "nbd://host:10809/web-vda")), None);
        assert_eq!(server(&node("raw", "nbd+unix:///web-vda?socket=/run/hob/nbd.sock")), None);
    }

    #[test]
    fn a_disk_of_hob_that_another_node_uses_is_refused() {
        let edges =
            [("vda", "root", "overlay"), ("overlay", "file", "overlay-file"), ("other", "file", "hob-1")];
        let error = path(&graph(&edges), &record(Method::Device), Goal::Detached).unwrap_err().to_string();
        assert!(error.contains("another block node"), "{error}");
    }
}
