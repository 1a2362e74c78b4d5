//! QEMU's block graph: devices of the guest, and the nodes below them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::qmp::{Monitor, Refused, one_line};

/// Maximum number of block nodes from the root node of a device down to the image file.
const DEPTH_MAX: usize = 16;

/// A disk of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    /// Name of the device's block backend in the graph: the name in `-drive`, or the path of the
    /// device in QOM.
    pub(super) backend: String,
    /// A short name for users.
    pub(super) label: String,
    pub(super) read_only: bool,
    pub(super) removable: bool,
}

/// A block node.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) driver: String,
    /// The file, or a description of what the node opens.
    pub(super) file: String,
    /// Description of the node by `query-named-block-nodes`.
    pub(super) info: Value,
}

/// The state of QEMU's block layer at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Graph {
    pub(super) devices: Vec<Device>,
    pub(super) nodes: BTreeMap<String, Node>,
    /// Edges of the graph: parent, kind, child.
    edges: Vec<(String, String, String)>,
    /// Block jobs: identifier and type.
    pub(super) jobs: Vec<(String, String)>,
}

impl Graph {
    /// Reads the block graph from QEMU.
    pub(super) async fn read(monitor: &mut Monitor) -> anyhow::Result<Graph> {
        let nodes = monitor.ask("query-named-block-nodes", json!({ "flat": true })).await?;
        let graph = edges(monitor).await?;
        let jobs = monitor.ask("query-block-jobs", json!({})).await?;
        let blocks = monitor.ask("query-block", json!({})).await?;
        Ok(Graph::new(&nodes, &graph, &jobs, &blocks))
    }

    /// Reads only the edges of the block graph, while the VM is paused. The function sends one QMP
    /// command, for which QEMU opens no file and sends no request.
    pub(super) async fn read_edges(monitor: &mut Monitor) -> anyhow::Result<Graph> {
        let graph = edges(monitor).await?;
        Ok(Graph::new(&Value::Null, &graph, &Value::Null, &Value::Null))
    }

    pub(super) fn new(nodes: &Value, graph: &Value, jobs: &Value, blocks: &Value) -> Graph {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let nodes = list(nodes).into_iter().map(|info| {
            let node = Node { driver: text(&info["drv"]), file: text(&info["file"]), info: info.clone() };
            (text(&info["node-name"]), node)
        });
        let names: BTreeMap<u64, String> = list(&graph["nodes"])
            .iter()
            .filter_map(|node| Some((node["id"].as_u64()?, text(&node["name"]))))
            .collect();
        let name = |id: &Value| id.as_u64().and_then(|id| names.get(&id).cloned()).unwrap_or_default();
        let edges = list(&graph["edges"])
            .iter()
            .map(|edge| (name(&edge["parent"]), text(&edge["name"]), name(&edge["child"])))
            .collect();
        let jobs = list(jobs).iter().map(|job| (text(&job["device"]), text(&job["type"]))).collect();
        let devices =
            list(blocks).iter().filter(|block| block.get("inserted").is_some()).map(device).collect();
        Graph { devices, nodes: nodes.collect(), edges, jobs }
    }

    /// Returns the names of the nodes below a device, from its root node to the image file.
    ///
    /// # Errors
    /// Returns an error if the device has no medium, or nodes that hob does not know.
    pub(super) fn chain(&self, backend: &str) -> anyhow::Result<Vec<String>> {
        let mut chain = Vec::new();
        let mut next = self.child(backend, "root");
        while let Some(node) = next {
            next = self.child(&node, "file");
            chain.push(node);
            if chain.len() > DEPTH_MAX {
                bail!(
                    "QEMU's disk {backend} has more than {DEPTH_MAX} block nodes down to its image file, and \
                     hob supports no more"
                );
            }
        }
        if chain.is_empty() {
            bail!("QEMU has no disk at {backend}");
        }
        Ok(chain)
    }

    /// Returns true if QEMU has a device with this block backend, and a medium in it.
    pub(super) fn has_device(&self, backend: &str) -> bool {
        self.child(backend, "root").is_some()
    }

    /// Returns the child of a block node. `kind` is the role of the child, such as `file`.
    pub(super) fn child(&self, parent: &str, kind: &str) -> Option<String> {
        let edge = self.edges.iter().find(|(from, name, _)| from == parent && name == kind)?;
        Some(edge.2.clone())
    }

    /// Returns all nodes below a device, including backing files and their files.
    pub(super) fn below<'a>(&'a self, backend: &'a str) -> BTreeSet<&'a str> {
        let mut found = BTreeSet::new();
        let mut todo = vec![backend];
        while let Some(parent) = todo.pop() {
            let children = self.edges.iter().filter(|(from, ..)| from == parent);
            todo.extend(children.map(|(.., child)| child.as_str()).filter(|child| found.insert(*child)));
        }
        found
    }

    /// Returns the option `detect-zeroes` of a node, or `None` if it is off.
    pub(super) fn detect_zeroes(&self, node: &str) -> Option<&str> {
        self.nodes.get(node)?.info["detect_zeroes"].as_str().filter(|value| *value != "off")
    }

    /// Returns how many nodes and devices use a node.
    pub(super) fn users(&self, node: &str) -> usize {
        self.edges.iter().filter(|(_, _, child)| child == node).count()
    }

    /// Returns the absolute paths of the image files that QEMU has open for writing.
    pub(super) fn written_files(&self) -> Vec<PathBuf> {
        let is_written = |node: &&Node| {
            matches!(node.driver.as_str(), "file" | "host_device") && node.info["ro"] == json!(false)
        };
        let files = self.nodes.values().filter(is_written).map(|node| PathBuf::from(&node.file));
        files.filter(|file| file.is_absolute()).collect()
    }

    /// Refuses a VM with a block job that is not hob's.
    pub(super) fn check_jobs(&self) -> anyhow::Result<()> {
        if let Some((id, kind)) = self.jobs.iter().find(|(id, _)| !id.starts_with("hob-")) {
            bail!(
                "a block job is running in the VM: {kind} '{id}' (a backup, snapshot or copy); \
                 repeat the command when it has ended, or end it with 'block-job-cancel'"
            );
        }
        Ok(())
    }

    pub(super) fn has(&self, node: &str) -> bool {
        self.nodes.contains_key(node)
    }

    /// Returns a block node.
    ///
    /// # Errors
    /// Returns an error if QEMU does not describe the node. The edges and the descriptions of the
    /// nodes come from different QMP commands, and QEMU may remove a node between them.
    pub(super) fn node(&self, name: &str) -> anyhow::Result<&Node> {
        let found = self.nodes.get(name);
        found
            .with_context(|| format!("QEMU has just removed the node {}; repeat the command", one_line(name)))
    }
}

async fn edges(monitor: &mut Monitor) -> anyhow::Result<Value> {
    let graph = monitor.ask("x-debug-query-block-graph", json!({})).await;
    graph.map_err(|error| match error.is::<Refused>() {
        true => error.context("QEMU 5.2 or later is needed"),
        false => error,
    })
}

/// Returns true if QEMU has a node of this name. Sends one QMP command.
pub(super) async fn has_node(monitor: &mut Monitor, node: &str) -> anyhow::Result<bool> {
    Ok(has_name(&edges(monitor).await?, node))
}

fn has_name(graph: &Value, node: &str) -> bool {
    graph["nodes"].as_array().into_iter().flatten().any(|found| found["name"] == node)
}

/// Converts a device that `query-block` describes.
fn device(block: &Value) -> Device {
    let of = |key: &str| block[key].as_str().unwrap_or_default().to_owned();
    let (device, qdev) = (of("device"), of("qdev"));
    let backend = if device.is_empty() { qdev.clone() } else { device.clone() };
    let last = |path: &str| {
        let id = path.trim_end_matches("/virtio-backend").rsplit('/').next().unwrap_or_default().to_owned();
        id.replace(['[', ']'], "")
    };
    let label = if device.is_empty() { last(&qdev) } else { device };
    Device {
        label: one_line(&label),
        backend,
        read_only: block.pointer("/inserted/ro").and_then(Value::as_bool).unwrap_or(false),
        removable: block["removable"].as_bool().unwrap_or(false),
    }
}

/// Returns true if QEMU generated the name of this node. `blockdev-reopen` and `blockdev-del` do
/// not accept such names.
pub(super) fn is_made_up(node: &str) -> bool {
    node.starts_with('#')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_images_that_are_written_are_flushed() {
        let node = |name: &str, driver: &str, file: &str, ro: bool| json!({ "node-name": name, "drv": driver, "file": file, "ro": ro });
        let nodes = json!([
            node("a", "file", "/a", false),
            node("b", "host_device", "/dev/b", false),
            node("q", "qcow2", "/q", false),
            node("base", "file", "/base", true),
            node("relative", "file", "image", false),
            node("hob", "nbd", "/n", false),
        ]);
        let graph = Graph::new(&nodes, &Value::Null, &Value::Null, &Value::Null);
        assert_eq!(graph.written_files(), [PathBuf::from("/a"), PathBuf::from("/dev/b")]);
    }

    #[test]
    fn the_chain_leads_from_the_device_to_the_file() {
        let node = |name: &str, driver: &str| json!({ "node-name": name, "drv": driver, "file": "a" });
        let nodes = json!([node("q", "qcow2"), node("f", "file"), node("base", "raw")]);
        let graph = json!({
            "nodes": [{ "id": 1, "name": "vda" }, { "id": 2, "name": "q" }, { "id": 3, "name": "f" }, { "id": 4, "name": "base" }],
            "edges": [
                { "parent": 1, "child": 2, "name": "root" },
                { "parent": 2, "child": 4, "name": "backing" },
                { "parent": 2, "child": 3, "name": "file" },
            ],
        });
        let blocks = json!([
            { "device": "", "qdev": "/machine/peripheral/vd/virtio-backend", "inserted": { "ro": false } },
            { "device": "cd", "removable": true },
        ]);
        assert!(has_name(&graph, "base") && !has_name(&graph, "other"));
        let edges = Graph::new(&Value::Null, &graph, &Value::Null, &Value::Null);
        assert_eq!(edges.chain("vda").unwrap(), ["q", "f"]);
        let graph = Graph::new(&nodes, &graph, &json!([]), &blocks);
        assert_eq!(graph.chain("vda").unwrap(), ["q", "f"]);
        assert_eq!(graph.child("q", "backing").as_deref(), Some("base"));
        assert_eq!(graph.below("vda").into_iter().collect::<Vec<_>>(), ["base", "f", "q"]);
        assert!(graph.below("other").is_empty());
        assert_eq!((graph.users("f"), graph.users("vda")), (1, 0));
        assert!(graph.chain("other").is_err());
        assert_eq!(graph.node("q").unwrap().driver, "qcow2");
        let error = edges.node("q").unwrap_err().to_string();
        assert!(error.contains("has just removed the node q"), "{error}");
        assert_eq!(graph.devices.len(), 1);
        assert_eq!(graph.devices[0].label, "vd");
    }
}
