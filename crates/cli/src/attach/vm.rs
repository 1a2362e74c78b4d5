//! A VM: its state, its block nodes and its disks.
//!
//! [`attachment`] makes the record of a disk that can be attached, and [`replacement`] checks which
//! block nodes of the VM hob can replace. [`started`] adapts a record to a later start of the VM, and
//! [`rebuilt`] makes a lost record again.

mod attachment;
mod rebuilt;
mod replacement;
mod started;

use std::path::PathBuf;

use anyhow::{Context, bail};
pub(super) use attachment::Wanted;
use hob_control::{NAME_CHARS_MAX, check_name};
pub(super) use rebuilt::Connected;
use serde_json::json;

use super::graph::{Device, Graph};
use super::overlay::is_connected;
use super::plan::Goal;
use super::qmp::{Monitor, one_line};
use super::record::Record;

/// VM states, as QEMU reports them, in which hob attaches and detaches the VM's disks. hob also
/// detaches in the state `io-error`.
const STATES: [&str; 2] = ["running", "paused"];

/// A VM with its block graph.
pub(super) struct Vm {
    /// Name of the VM, used in the names of hob's disks.
    pub(super) name: String,
    pub(super) graph: Graph,
    command_line: Vec<String>,
    directory: Option<PathBuf>,
    /// Process id of QEMU, if it is known.
    pub(super) pid: Option<i32>,
}

impl Vm {
    /// Examines a VM.
    pub(super) async fn look(monitor: &mut Monitor, default_name: &str) -> anyhow::Result<Vm> {
        let graph = Graph::read(monitor).await?;
        let name = monitor.ask("query-name", json!({})).await?;
        let name = one_line(name["name"].as_str().unwrap_or(default_name));
        let pid = monitor.pid();
        let process = pid.map(|pid| PathBuf::from(format!("/proc/{pid}")));
        let command_line = process.as_ref().and_then(|process| std::fs::read(process.join("cmdline")).ok());
        let command_line = command_line.unwrap_or_default();
        let words =
            command_line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        let directory = process.and_then(|process| std::fs::read_link(process.join("cwd")).ok());
        Ok(Vm { name, graph, command_line: words.collect(), directory, pid })
    }

    /// Refuses a VM that neither runs nor is paused, and a VM that is migrating. A VM that QEMU has stopped
    /// after an I/O error may be detached: its image may have the space that hob's disk lacks.
    pub(super) async fn check(monitor: &mut Monitor, goal: Goal) -> anyhow::Result<()> {
        let status = monitor.ask("query-status", json!({})).await?;
        let status = status["status"].as_str().unwrap_or_default();
        let is_detached_after_error = goal == Goal::Detached && status == "io-error";
        if !STATES.contains(&status) && !is_detached_after_error {
            bail!(
                "the VM is in the state '{}'; hob changes disks only while the VM runs or is paused",
                one_line(status)
            );
        }
        let migration = monitor.ask("query-migrate", json!({})).await?;
        let migration = migration["status"].as_str().unwrap_or_default();
        if matches!(
            migration,
            "setup" | "active" | "device" | "pre-switchover" | "wait-unplug" | "cancelling"
        ) || migration.starts_with("postcopy")
        {
            bail!("the VM is migrating or being saved; repeat the command afterwards");
        }
        Ok(())
    }

    /// Returns the devices that the user names, or all that can be attached.
    pub(super) fn choose(&self, names: &[String]) -> anyhow::Result<Vec<Device>> {
        let devices = &self.graph.devices;
        if names.is_empty() {
            let usual = devices.iter().filter(|device| !device.read_only && !device.removable);
            let usual: Vec<Device> = usual.cloned().collect();
            if usual.is_empty() {
                bail!("the VM has no disk that can be attached: all its drives are read-only or removable");
            }
            return Ok(usual);
        }
        let named = |name: &String| {
            let is_it = |device: &&Device| {
                device.label == *name
                    || device.backend == *name
                    || self.graph.chain(&device.backend).is_ok_and(|chain| {
                        chain.iter().any(|node| {
                            let file = self.graph.nodes.get(node).map(|found| &found.file);
                            node == name || file == Some(name)
                        })
                    })
            };
            let known = || devices.iter().map(|device| device.label.as_str()).collect::<Vec<_>>().join(", ");
            devices
                .iter()
                .find(is_it)
                .cloned()
                .with_context(|| format!("the VM has no disk {name}; it has: {}", known()))
        };
        names.iter().map(named).collect()
    }

    /// Returns the record of hob's disk that the VM uses as the device `backend`. `others` has the
    /// records of other targets, which may be other names of this VM.
    pub(super) fn attached_by<'a>(&self, backend: &str, others: &'a [Record]) -> Option<&'a Record> {
        let chain = self.graph.chain(backend).ok()?;
        let image = self.graph.nodes.get(chain.last()?)?;
        others.iter().find(|record| is_connected(image, record))
    }

    /// Returns the name of hob's disk for a device.
    fn disk_name(&self, device: &Device) -> anyhow::Result<String> {
        let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
        let name: String = format!("{}-{}", self.name, device.label).chars().map(plain).collect();
        match check_name(&name) {
            Ok(()) => Ok(name),
            // Even a VM's name of one character would be too long.
            Err(error) if device.label.chars().count() + 2 > NAME_CHARS_MAX => bail!(
                "'{name}' cannot be the name of a disk of hob: {error}. Restart the VM with a shorter id of the \
                 device {}, and repeat the command",
                device.label
            ),
            Err(error) => bail!(
                "'{name}' cannot be the name of a disk of hob: {error}. Choose another name of the VM, such as \
                 '--name vm1'"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::fake_qemu::FakeQemu;
    use super::super::record::example;
    use super::*;

    /// Returns a VM with a device `vda` above a raw node and a file node, and with one more node.
    pub(super) fn vm(raw: &Value, file: &Value, other: &Value, command_line: &[&str]) -> Vm {
        vm_of(&[raw.clone(), file.clone()], std::slice::from_ref(other), command_line)
    }

    /// Returns a VM with a device `vda` and these nodes below each other (name, driver, file).
    pub(super) fn vm_of_chain(chain: &[(&str, &str, &str)], command_line: &[&str]) -> Vm {
        let mut nodes = Vec::new();
        for (name, driver, file) in chain {
            nodes.push(json!({ "node-name": name, "drv": driver, "file": file, "detect_zeroes": "unmap" }));
        }
        vm_of(&nodes, &[], command_line)
    }

    /// Returns a VM with a device `vda`, the nodes `chain` below each other, and nodes that no device
    /// uses.
    fn vm_of(chain: &[Value], others: &[Value], command_line: &[&str]) -> Vm {
        let names = std::iter::once(json!("vda")).chain(chain.iter().map(|node| node["node-name"].clone()));
        let ids: Vec<Value> = names.zip(0..).map(|(name, id)| json!({ "id": id, "name": name })).collect();
        let edge = |id: usize| {
            let kind = if id == 0 { "root" } else { "file" };
            json!({ "parent": id, "name": kind, "child": id + 1 })
        };
        let edges: Vec<Value> = (0..chain.len()).map(edge).collect();
        let blocks = json!([{ "device": "vda", "inserted": { "ro": false } }]);
        let graph = json!({ "nodes": ids, "edges": edges });
        Vm {
            name: "web".to_owned(),
            graph: Graph::new(&json!([chain, others].concat()), &graph, &Value::Null, &blocks),
            command_line: command_line.iter().map(|word| (*word).to_owned()).collect(),
            directory: None,
            pid: None,
        }
    }

    /// Returns a VM without disks.
    pub(super) fn empty_vm(name: &str) -> Vm {
        Vm {
            name: name.to_owned(),
            graph: Graph::default(),
            command_line: Vec::new(),
            directory: None,
            pid: None,
        }
    }

    pub(super) fn node(name: &str, driver: &str, file: &str) -> Value {
        json!({ "node-name": name, "drv": driver, "file": file, "ro": false })
    }

    fn checked_vm(status: &str, migration: &Value) -> Result<(), String> {
        checked_for(Goal::Attached, status, migration)
    }

    /// Returns the result of [`Vm::check`] for a VM with these replies to `query-status` and
    /// `query-migrate`.
    fn checked_for(goal: Goal, status: &str, migration: &Value) -> Result<(), String> {
        let (status, migration) = (json!({ "status": status }), migration.clone());
        let qemu = FakeQemu::start(move |command| match command {
            "query-status" => status.clone(),
            "query-migrate" => migration.clone(),
            _ => json!({}),
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut monitor = Monitor::connect(&qemu.path()).await.unwrap();
            Vm::check(&mut monitor, goal).await.map_err(|error| error.to_string())
        })
    }

    /// `virsh save` is a migration to a file.
    #[test]
    fn a_vm_that_is_migrating_or_being_saved_is_refused() {
        for status in [
            "setup",
            "active",
            "device",
            "pre-switchover",
            "wait-unplug",
            "cancelling",
            "postcopy-active",
            "postcopy-paused",
            "postcopy-recover",
        ] {
            let error = checked_vm("running", &json!({ "status": status })).unwrap_err();
            assert!(error.contains("is migrating or being saved"), "{status}: {error}");
        }
        // QEMU reports no state before the first migration, and the last one's result afterwards.
        for migration in [json!({}), json!({ "status": "completed" }), json!({ "status": "failed" })] {
            assert_eq!(checked_vm("running", &migration), Ok(()), "{migration}");
            assert_eq!(checked_vm("paused", &migration), Ok(()), "{migration}");
        }
        for status in ["inmigrate", "postmigrate", "finish-migrate", "save-vm", "shutdown"] {
            let error = checked_vm(status, &json!({})).unwrap_err();
            assert!(error.contains(&format!("in the state '{status}'")), "{error}");
        }
    }

    /// For example, a snapshot inside the image needs more space than hob's disk has.
    #[test]
    fn a_vm_that_stopped_after_an_error_is_only_detached() {
        let error = checked_for(Goal::Attached, "io-error", &json!({})).unwrap_err();
        assert!(error.contains("in the state 'io-error'"), "{error}");
        assert_eq!(checked_for(Goal::Detached, "io-error", &json!({})), Ok(()));
        assert!(checked_for(Goal::Detached, "shutdown", &json!({})).is_err());
    }

    /// QEMU may have a second QMP socket.
    #[test]
    fn a_disk_that_was_attached_by_another_name_of_the_vm_is_found() {
        let server = json!({ "type": "unix", "path": "/run/hob/nbd.sock" });
        let record = Record { node: json!({ "node-name": "hob-1", "server": server }), ..example() };
        let others = [Record { disk: "db-vda".to_owned(), ..record.clone() }, record];
        let found = |driver: &str, file: &str| {
            let (raw, other) = (node("image", "raw", file), node("other", "null-co", ""));
            let vm = vm(&raw, &node("hob-1", driver, file), &other, &[]);
            vm.attached_by("vda", &others).map(|record| record.disk.clone())
        };
        let uri = "nbd+unix:///web-vda?socket=/run/hob/nbd.sock";
        assert_eq!(found("nbd", uri).as_deref(), Some("web-vda"));
        assert_eq!(found("nbd", "nbd+unix:///web-vda?socket=/run/other.sock"), None);
        assert_eq!(found("file", "/image"), None);
    }

    #[test]
    fn a_name_that_hobs_disk_cannot_have_is_refused_with_what_to_do() {
        let name_of = |vm: &str, label: &str| {
            let (backend, label) = (label.to_owned(), label.to_owned());
            empty_vm(vm)
                .disk_name(&Device { backend, label, read_only: false, removable: false })
                .map_err(|error| error.to_string())
        };
        assert_eq!(name_of("w e b", "vda"), Ok("w-e-b-vda".to_owned()));
        for vm in ["x".repeat(NAME_CHARS_MAX), "äpfel".to_owned(), "_web".to_owned()] {
            let error = name_of(&vm, "vda").unwrap_err();
            assert!(error.contains("1 to 64 letters") && error.contains("'--name vm1'"), "{error}");
        }
        let error = name_of("web", &"x".repeat(NAME_CHARS_MAX)).unwrap_err();
        assert!(error.contains("shorter id of the device"), "{error}");
    }
}
