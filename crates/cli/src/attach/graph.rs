//! QEMU's block graph: devices of the guest, and the nodes below them.

use std::collections::BTreeMap;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::qmp::Monitor;

/// Maximum number of nodes below a device, down to the image file.
const DEPTH_MAX: usize = 16;

/// A disk of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    /// Name of the device's block backend in the graph: that of `-drive`, or the path of the device
    /// in QOM.
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
        let graph = monitor
            .ask("x-debug-query-block-graph", json!({}))
            .await
            .context("QEMU 5.2 or later is needed")?;
        let jobs = monitor.ask("query-block-jobs", json!({})).await?;
        let blocks = monitor.ask("query-block", json!({})).await?;
        Ok(Graph::new(&nodes, &graph, &jobs, &blocks))
    }

    fn new(nodes: &Value, graph: &Value, jobs: &Value, blocks: &Value) -> Graph {
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
    /// The device has no medium, or nodes that hob does not know.
    pub(super) fn chain(&self, backend: &str) -> anyhow::Result<Vec<String>> {
        let mut chain = Vec::new();
        let mut next = self.child(backend, "root");
        while let Some(node) = next {
            next = self.child(&node, "file");
            chain.push(node);
            if chain.len() > DEPTH_MAX {
                bail!("more than {DEPTH_MAX} nodes below {backend}");
            }
        }
        if chain.is_empty() {
            bail!("QEMU has no disk at {backend}");
        }
        Ok(chain)
    }

    /// Returns the node below another one.
    pub(super) fn child(&self, parent: &str, kind: &str) -> Option<String> {
        let edge = self.edges.iter().find(|(from, name, _)| from == parent && name == kind)?;
        Some(edge.2.clone())
    }

    /// Returns how many nodes and devices use a node.
    pub(super) fn users(&self, node: &str) -> usize {
        self.edges.iter().filter(|(_, _, child)| child == node).count()
    }

    pub(super) fn has(&self, node: &str) -> bool {
        self.nodes.contains_key(node)
    }
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
    Device {
        label: if device.is_empty() { last(&qdev) } else { device },
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
        let graph = Graph::new(&nodes, &graph, &json!([]), &blocks);
        assert_eq!(graph.chain("vda").unwrap(), ["q", "f"]);
        assert_eq!(graph.child("q", "backing").as_deref(), Some("base"));
        assert_eq!((graph.users("f"), graph.users("vda")), (1, 0));
        assert!(graph.chain("other").is_err());
        assert_eq!(graph.devices.len(), 1);
        assert_eq!(graph.devices[0].label, "vd");
    }
}
