//! A VM that was started with hob's disk after an attachment. The block nodes of such a VM have other
//! names than those in the record, so `hob detach` first adapts the record to the present nodes.

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::Vm;
use crate::attach::graph::Device;
use crate::attach::options::{OWN, export_discards, node_name};
use crate::attach::overlay::is_connected;
use crate::attach::record::{Method, Record};

impl Vm {
    /// Returns the record of a disk for the VM's present block nodes. Returns `None` if the VM was not
    /// started with hob's disk, or not through hob's NBD socket.
    ///
    /// # Errors
    /// Returns the reason why hob cannot replace its disk while the VM runs.
    pub(in crate::attach) fn started(&self, record: &Record) -> anyhow::Result<Option<Record>> {
        // While a block job of an interrupted command runs, the record is adapted already.
        let has_job = self.graph.jobs.iter().any(|(id, _)| *id == record.job());
        let Ok(chain) = self.graph.chain(&record.backend) else { return Ok(None) };
        let (image, parents) = chain.split_last().expect("a chain has a node");
        let is_hobs = self.graph.nodes.get(image).is_some_and(|node| is_connected(node, record));
        if has_job || !is_hobs || image.starts_with(OWN) {
            return Ok(None);
        }
        let Record { label, disk, target, .. } = record;
        let adapted = self.adapted(record, image, parents);
        adapted.map(Some).with_context(|| {
            format!(
                "{label}: the VM uses hob's disk {disk} since its start, and hob cannot detach this disk while the VM \
                 runs. Stop the VM, and run 'hob detach --stopped {target}'. The reason"
            )
        })
    }

    /// Returns the record of a disk for the node `image`, which is connected to hob, and the nodes
    /// `parents` above it.
    pub(super) fn adapted(&self, record: &Record, image: &str, parents: &[String]) -> anyhow::Result<Record> {
        let graph = &self.graph;
        if graph.users(image) != 1 {
            bail!("several block nodes of QEMU use it, and hob can replace only one user");
        }
        let mut nodes = graph.nodes.iter();
        if let Some((other, _)) = nodes.find(|(name, node)| *name != image && is_connected(node, record)) {
            bail!("QEMU is connected to it a second time, through the block node {other}");
        }
        let parent = parents.last();
        let mut driver = "raw";
        if let Some(parent) = parent {
            self.check_format(parent)?;
            driver = &graph.node(parent)?.driver;
        }
        // A guest with another driver sees other data than with the image's own format.
        let is_raw = |driver: &str| matches!(driver, "raw" | "file" | "host_device");
        if driver != record.format && !(is_raw(driver) && is_raw(&record.format)) {
            bail!(
                "QEMU opens it with the driver '{driver}', and its image has the format '{}'",
                record.format
            );
        }
        let device = Device {
            backend: record.backend.clone(),
            label: record.label.clone(),
            read_only: false,
            removable: false,
        };
        let method = self.method(parent, parents.len(), &device, None)?;
        let mut file = record.image_options().context("hob's record has no options of the image's node")?;
        let (spare, options) = match (method, parent) {
            (Method::Mirror, Some(root)) => {
                self.check_mirrored(root)?;
                (self.raw(record, root, file), None)
            }
            (_, parent) => {
                file["node-name"] = json!(node_name(&record.disk, "-image"));
                let options = parent.map(|parent| self.reopened(parent, method)).transpose()?;
                (file, options.flatten())
            }
        };
        if parent.is_none() {
            self.check_replaceable(image)?;
        }
        let mut node = record.node.clone();
        node["node-name"] = json!(image);
        Ok(Record { method, node, spare: vec![spare], parent: options, ..record.clone() })
    }

    /// Returns the options of a raw node that replaces `root` above the image. `file` has the options
    /// of the image's file node.
    pub(super) fn raw(&self, record: &Record, root: &str, file: Value) -> Value {
        let mut raw = json!({ "driver": "raw", "node-name": node_name(&record.disk, "-raw"), "file": file });
        let discards = self.discards(root, "") || export_discards(&self.command_line, &record.disk);
        if discards {
            raw["discard"] = json!("unmap");
        }
        if let Some(zeroes) = self.graph.detect_zeroes(root) {
            // QEMU accepts `unmap` only for a node with discards.
            raw["detect-zeroes"] = json!(if zeroes == "unmap" && !discards { "on" } else { zeroes });
        }
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::record::example;
    use crate::attach::vm::tests::vm_of_chain as vm;

    const FILE: &str = "nbd+unix:///web-vda?socket=/run/hob/nbd.sock";

    /// Returns the record of the attachment before the VM's restart.
    fn record() -> Record {
        let server = json!({ "type": "unix", "path": "/run/hob/nbd.sock" });
        let node = json!({ "driver": "nbd", "node-name": "hob-1", "export": "web-vda", "server": server });
        let image =
            json!({ "driver": "file", "node-name": "started", "filename": "/image", "aio": "native" });
        let parent = Some(json!({ "driver": "raw", "node-name": "image" }));
        Record { node, spare: vec![image], parent, ..example() }
    }

    /// The name `started` belonged to the image's node before the restart, as with libvirt.
    #[test]
    fn a_record_is_adapted_to_the_nodes_of_the_vms_start() {
        let image = node_name("web-vda", "-image");
        let nbd = ("started", "nbd", FILE);
        let found = vm(&[("image", "raw", FILE), nbd], &[]).started(&record()).unwrap().unwrap();
        assert_eq!((found.node_name(), found.image_node()), ("started", image.as_str()));
        assert_eq!(found.spare[0]["aio"], "native", "{:?}", found.spare);
        assert_eq!(
            (found.method, &found.parent.as_ref().unwrap()["node-name"]),
            (Method::Reopen, &json!("image"))
        );
        assert!(found.job().starts_with("hob-"), "{}", found.job());
        // A command that continues an interrupted one finds the same record.
        let again = vm(&[("image", "raw", FILE), nbd], &[]).started(&found).unwrap();
        assert_eq!(again, Some(found));

        let qcow2 = Record { format: "qcow2".to_owned(), ..record() };
        let found = vm(&[("#block1", "qcow2", FILE), ("#block2", "nbd", FILE)], &[]).started(&qcow2);
        let found = found.unwrap().unwrap();
        assert_eq!((found.method, found.node_name()), (Method::Device, "#block2"));
        assert_eq!((found.image_node(), found.parent.as_ref()), (image.as_str(), None));

        let found = vm(&[nbd], &[]).started(&record()).unwrap().unwrap();
        assert_eq!((found.method, found.image_node()), (Method::Mirror, image.as_str()));
    }

    #[test]
    fn a_raw_node_of_a_drive_keeps_discards_and_the_detection_of_zeroes() {
        let chain = [("#block1", "raw", FILE), ("#block2", "nbd", FILE)];
        let drive = format!("file={FILE},format=raw,discard=unmap");
        for (line, discard, zeroes) in
            [(&["-drive", drive.as_str()][..], json!("unmap"), "unmap"), (&[] as &[&str], Value::Null, "on")]
        {
            let found = vm(&chain, line).started(&record()).unwrap().unwrap();
            assert_eq!((found.method, found.spare.len()), (Method::Mirror, 1));
            let raw = &found.spare[0];
            assert_eq!((&raw["discard"], &raw["detect-zeroes"]), (&discard, &json!(zeroes)), "{raw}");
            assert_eq!(
                (&raw["file"]["filename"], &raw["file"]["node-name"]),
                (&json!("/image"), &Value::Null)
            );
        }
    }

    #[test]
    fn only_hobs_socket_is_replaced() {
        for file in [
            "nbd+unix:///web-vdb?socket=/run/hob/nbd.sock",
            "nbd+unix:///web-vda?socket=/run/other.sock",
            "nbd://host:10809/web-vda",
            r#"json:{"driver": "nbd", "export": "web-vda", "server.path": "/run/other.sock"}"#,
        ] {
            let vm = vm(&[("image", "raw", file), ("started", "nbd", file)], &[]);
            assert_eq!(vm.started(&record()).unwrap(), None, "{file}");
        }
        for file in [
            r#"json:{"driver": "nbd", "export": "web-vda", "server.path": "/run/hob/nbd.sock"}"#,
            r#"json:{"driver": "nbd", "export": "web-vda", "server": {"path": "/run/hob/nbd.sock"}}"#,
        ] {
            let vm = vm(&[("image", "raw", FILE), ("started", "nbd", file)], &[]);
            assert!(vm.started(&record()).unwrap().is_some(), "{file}");
        }
        // hob itself has attached the disk, or the VM uses its image.
        for last in [("hob-1", "nbd", FILE), ("started", "file", "/image")] {
            assert_eq!(vm(&[("image", "raw", FILE), last], &[]).started(&record()).unwrap(), None);
        }
    }

    #[test]
    fn nodes_that_hob_cannot_replace_are_refused_with_the_reason() {
        let nbd = ("started", "nbd", FILE);
        let part = r#"json:{"driver": "raw", "offset": 1048576, "file": {"driver": "nbd"}}"#;
        for (chain, reason) in [
            (vec![("image", "raw", part), nbd], "'offset'"),
            (vec![("#block1", "raw", part), nbd], "'offset'"),
            (vec![("image", "luks", FILE), nbd], "'luks'"),
            (vec![("image", "qcow2", FILE), nbd], "the format 'raw'"),
            (vec![("top", "throttle", FILE), ("#block1", "raw", FILE), nbd], "without names"),
        ] {
            let error = format!("{:#}", vm(&chain, &[]).started(&record()).unwrap_err());
            assert!(error.contains(reason), "{error}");
            assert!(
                error.contains("Stop the VM, and run 'hob detach --stopped qmp:/run/web.qmp'"),
                "{error}"
            );
        }
    }
}
