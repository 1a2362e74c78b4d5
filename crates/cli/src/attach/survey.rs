//! The disks of a VM that can be attached, each with the record of its attachment or the reason why
//! it cannot be attached.

mod rebuilt;
mod started;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::rc::Rc;

use anyhow::{Context, bail};
use hob_control::{CacheEnable, NAME_CHARS_MAX, check_name};
use serde_json::{Value, json};

use super::graph::{Device, Graph, Node, is_made_up};
use super::image::{Image, is_same_file};
use super::libvirt;
use super::lost_record;
use super::options::{
    drive_discards, given as given_options, name_or, node_name, not_repeatable, of_hob, of_image, of_parent,
};
use super::overlay::is_connected;
use super::plan::Goal;
use super::proxmox;
use super::qmp::{Monitor, one_line};
use super::record::{Method, Record};
use super::threads::in_thread;
use crate::output::word;

pub(super) use rebuilt::Connected;

/// Drivers of images that can be attached: raw images, also without a format node, and qcow2. For
/// other growing formats, qemu-img cannot tell the maximum size of the file.
const FORMATS: [&str; 4] = ["raw", "file", "host_device", "qcow2"];

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
    pid: Option<i32>,
}

/// The user's options for each disk.
pub(super) struct Wanted {
    pub(super) target: String,
    pub(super) method: Option<Method>,
    pub(super) socket: PathBuf,
    pub(super) cache: CacheEnable,
    pub(super) persistent: Rc<Persistent>,
}

/// The persistent definition of a VM.
pub(super) enum Persistent {
    /// hob does not know the VM's definition.
    None,
    /// The XML of a libvirt domain.
    Libvirt(String),
    Proxmox(proxmox::Settings),
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
                        chain.iter().any(|node| node == name || self.graph.nodes[node].file == *name)
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
    pub(super) fn disk_name(&self, device: &Device) -> anyhow::Result<String> {
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

    /// Returns the record that `hob attach` saves about a device before it changes anything.
    ///
    /// # Errors
    /// Returns the reason why the device cannot be attached.
    pub(super) fn record(&self, device: &Device, wanted: &Wanted) -> anyhow::Result<Record> {
        let (xml, volumes) = match &*wanted.persistent {
            Persistent::None => (None, None),
            Persistent::Libvirt(xml) => (Some(xml), None),
            Persistent::Proxmox(settings) => (None, settings.volumes(&device.label).ok()),
        };
        let disk = match &volumes {
            Some(volumes) => checked(volumes.disk())?,
            None => self.disk_name(device)?,
        };
        let graph = &self.graph;
        if device.read_only {
            bail!("{} is read-only", device.label);
        }
        let chain = graph.chain(&device.backend)?;
        let (image, parents) = chain.split_last().expect("a chain has a node");
        let Image { given, stored: file } = self.file(image)?;
        if graph.users(image) != 1 {
            bail!(
                "several block nodes of QEMU use {}, and hob can replace only one user. End the export, the backup or \
                 the other device that uses it, and repeat the command",
                given.display()
            );
        }
        if let Some(other) = self.other_node(image, &given) {
            bail!(
                "QEMU opens {} a second time, as the block node {other}, whose reads and writes would bypass hob. Remove the \
                 other device or block node, and repeat the command",
                given.display()
            );
        }
        let parent = parents.last();
        self.check_format(parent.unwrap_or(image))?;
        let method = self.method(parent, parents.len(), device, wanted.method)?;
        let text = given.to_str().context("the image file has a name that is not UTF-8")?;
        let node = &graph.nodes[image];
        let open = |name: &str| of_image(node, text, image, name, &self.command_line);
        let (spare, options) = match (method, parent) {
            (Method::Mirror, Some(root)) => {
                self.check_mirrored(root)?;
                let name = name_or(root, &disk, "-raw");
                let mut below = open(image);
                let lower = match is_made_up(image) || self.is_inline(root) {
                    true => {
                        below.as_object_mut().expect("options").remove("node-name");
                        Vec::new()
                    }
                    false => vec![below.clone()],
                };
                let file = if lower.is_empty() { below } else { json!(image) };
                let mut raw = json!({ "driver": "raw", "node-name": name, "file": file });
                if self.discards(root, text) {
                    raw["discard"] = json!("unmap");
                }
                if let Some(zeroes) = self.zeroes(root, text) {
                    raw["detect-zeroes"] = json!(zeroes);
                }
                ([lower, vec![raw]].concat(), None)
            }
            (Method::Mirror, None) => {
                self.check_replaceable(image)?;
                (vec![open(&name_or(image, &disk, "-image"))], None)
            }
            (_, Some(parent)) => {
                (vec![open(&name_or(image, &disk, "-image"))], self.reopened(parent, method)?)
            }
            (_, None) => bail!("{}: QEMU has no node above the image file", device.label),
        };
        let top = parent.unwrap_or(image);
        let discard = method != Method::Mirror || self.discards(top, text);
        let socket = wanted.socket.to_str().context("the socket has a name that is not UTF-8")?;
        let mut hobs = of_hob(&node_name(&disk, ""), socket, &disk, discard);
        if method == Method::Mirror
            && let Some(zeroes) = self.zeroes(top, text)
        {
            hobs["detect-zeroes"] = json!(zeroes);
        }
        let definition = xml.and_then(|xml| image_element(xml, &file, &disk));
        if let Some(element) = &definition {
            // Checks the XML element now, because otherwise the last step of the plan would fail.
            libvirt::with_hob(element, &disk, socket)?;
        }
        Ok(Record {
            version: Record::VERSION,
            target: wanted.target.clone(),
            label: device.label.clone(),
            backend: device.backend.clone(),
            file: file.clone(),
            format: graph.nodes[top].driver.clone(),
            method,
            cache: wanted.cache.clone(),
            node: hobs,
            spare,
            parent: options,
            definition,
            volumes,
            disk,
        })
    }

    /// Returns the image file of a node, which QEMU must have open.
    fn file(&self, node: &str) -> anyhow::Result<Image> {
        lost_record::check_absent(node, &self.graph.nodes[node].driver)?;
        let node = &self.graph.nodes[node];
        if !matches!(node.driver.as_str(), "file" | "host_device") {
            bail!(
                "QEMU opens {} with the driver '{}'; only files and block devices can be attached. 'hob disk add' \
                 serves other images, and then the VM needs a restart with hob's disk",
                node.file,
                node.driver
            );
        }
        let file = file_name(node);
        if file.starts_with("/dev/fdset/") || file.is_empty() {
            bail!("QEMU was given the image as an open file, so hob does not know its path");
        }
        let image = Image::find(&file, self.directory.as_deref())?;
        if let Some(pid) = self.pid {
            image.check_opened_by(pid)?;
        }
        Ok(image)
    }

    /// Returns another node that has the same file open.
    fn other_node(&self, image: &str, file: &Path) -> Option<&String> {
        let directory = self.directory.as_deref().unwrap_or(Path::new(""));
        let has_file = |node: &Node| {
            matches!(node.driver.as_str(), "file" | "host_device")
                && is_same_file(&directory.join(file_name(node)), file)
        };
        self.graph.nodes.iter().find(|(name, node)| *name != image && has_file(node)).map(|(name, _)| name)
    }

    /// Refuses an image whose file hob cannot serve alone, or whose maximum size hob cannot find out.
    fn check_format(&self, node: &str) -> anyhow::Result<()> {
        let Node { driver, info, .. } = &self.graph.nodes[node];
        if !FORMATS.contains(&driver.as_str()) {
            bail!(
                "QEMU opens the image with the driver '{driver}'; only raw and qcow2 images can be attached. 'qemu-img \
                 convert' converts the image of a stopped VM"
            );
        }
        if info["encrypted"] == true {
            bail!("the image is encrypted, and qemu-img cannot measure it without its key");
        }
        if self.graph.child(node, "data-file").is_some() {
            bail!("the image keeps its data in another file (data_file), which hob would not cache");
        }
        Ok(())
    }

    fn method(
        &self,
        parent: Option<&String>,
        depth: usize,
        device: &Device,
        wanted: Option<Method>,
    ) -> anyhow::Result<Method> {
        let is_raw = parent.is_none_or(|parent| self.graph.nodes[parent].driver == "raw");
        let is_named = parent.is_some_and(|parent| !is_made_up(parent));
        let possible: Vec<Method> = [
            (Method::Reopen, is_named),
            (Method::Mirror, is_raw && depth <= 1),
            (Method::Device, depth == 1 && !is_named && !device.backend.starts_with('/')),
        ]
        .into_iter()
        .filter_map(|(method, is_possible)| is_possible.then_some(method))
        .collect();
        let first = possible.first().with_context(|| {
            format!(
                "QEMU has the image below {depth} block nodes without names, which it cannot reopen. Start the VM with \
                 '-blockdev' and a 'node-name' for each node"
            )
        })?;
        match wanted {
            None => Ok(*first),
            Some(method) if possible.contains(&method) => Ok(method),
            Some(method) => {
                let possible = possible.iter().map(word).collect::<Vec<_>>().join(", ");
                bail!(
                    "{}: '--method {}' is not possible for this disk; possible: {possible}",
                    device.label,
                    word(&method)
                )
            }
        }
    }

    /// Returns the options by which hob reopens the format node `parent`, for the method `reopen`.
    fn reopened(&self, parent: &str, method: Method) -> anyhow::Result<Option<Value>> {
        if method != Method::Reopen {
            return Ok(None);
        }
        let node = &self.graph.nodes[parent];
        let is_given = given_options(&self.command_line, parent).is_some();
        if !is_given && let Some(option) = not_repeatable(node) {
            bail!(
                "QEMU opened the block node {parent} after its start, with the option '{option}', which hob \
                 cannot repeat. Restart the VM, and repeat the command"
            );
        }
        let backing = self.graph.child(parent, "backing");
        Ok(Some(of_parent(parent, node, backing.as_deref(), &self.command_line)))
    }

    /// Refuses a format node that the method `mirror` cannot replace.
    fn check_mirrored(&self, root: &str) -> anyhow::Result<()> {
        self.check_replaceable(root)?;
        if let Some(option) = not_repeatable(&self.graph.nodes[root]) {
            bail!(
                "QEMU opens the image with the option '{option}', which the method 'mirror' cannot keep. Start \
                 the VM with '-blockdev' and a 'node-name' for each node"
            );
        }
        Ok(())
    }

    /// Refuses to replace a node that other parts of QEMU depend on.
    fn check_replaceable(&self, root: &str) -> anyhow::Result<()> {
        if self.graph.users(root) != 1 {
            bail!(
                "QEMU also exports the node {root}, or another block node uses it. End that, and repeat the command"
            );
        }
        let bitmaps =
            self.graph.nodes[root].info["dirty-bitmaps"].as_array().is_some_and(|list| !list.is_empty());
        if bitmaps {
            bail!(
                "the node {root} has dirty bitmaps for backups, which would be lost. Remove them with \
                 'block-dirty-bitmap-remove', and repeat the command; the next backup is then a full one"
            );
        }
        Ok(())
    }

    /// Returns true if the file node was created inside the options of its parent. An inline file
    /// node is deleted together with the parent.
    fn is_inline(&self, root: &str) -> bool {
        given_options(&self.command_line, root).is_some_and(|options| options["file"].is_object())
    }

    /// Returns the option `detect-zeroes` for a node that replaces the root node. QEMU accepts `unmap`
    /// only for a node with discards.
    fn zeroes(&self, node: &str, file: &str) -> Option<&str> {
        match self.graph.detect_zeroes(node)? {
            "unmap" if !self.discards(node, file) => Some("on"),
            value => Some(value),
        }
    }

    fn discards(&self, node: &str, file: &str) -> bool {
        let given = given_options(&self.command_line, node);
        given.is_some_and(|options| options["discard"] == "unmap") || drive_discards(&self.command_line, file)
    }
}

/// Returns the name of the file that a node opens.
fn file_name(node: &Node) -> String {
    // If a name cannot express all options, QEMU shows JSON.
    match node.file.strip_prefix("json:").map(serde_json::from_str::<Value>) {
        Some(Ok(options)) => options["filename"].as_str().unwrap_or_default().to_owned(),
        _ => node.file.clone(),
    }
}

/// Returns the name if a disk of hob can have it.
fn checked(name: String) -> anyhow::Result<String> {
    check_name(&name).with_context(|| format!("'{name}' cannot be the name of a disk of hob"))?;
    Ok(name)
}

fn image_element(xml: &str, file: &Path, disk: &str) -> Option<String> {
    match libvirt::find(xml, file, disk)? {
        libvirt::Defined::Image(element) => Some(element),
        libvirt::Defined::Hob(_) => None,
    }
}

/// Returns the necessary length of a file in bytes so that its image can grow to the full size,
/// because QEMU cannot enlarge hob's disk. The added part is a hole. Returns `None` for formats
/// that do not grow.
pub(super) async fn room(record: &Record) -> anyhow::Result<Option<u64>> {
    if matches!(record.format.as_str(), "raw" | "file" | "host_device") {
        return Ok(None);
    }
    let length = std::fs::metadata(&record.file)?.len();
    let full = measure(&record.file, &record.format).await?;
    // An earlier attachment may have extended the file. Its hole is not part of the image.
    let end = if length < full { length } else { end(&record.file, &record.format).await?.unwrap_or(length) };
    // Snapshots inside the image keep the present data, so the full size is added to the present
    // end.
    Ok(Some((end + full).next_multiple_of(1 << 20)))
}

/// Returns the size of a completely allocated image in bytes.
async fn measure(file: &Path, format: &str) -> anyhow::Result<u64> {
    let output = qemu_img(&["measure", "-O", format, "-f", format], file).await?;
    if !output.status.success() {
        bail!("qemu-img measure: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let sizes: Value = serde_json::from_slice(&output.stdout).context("qemu-img measure")?;
    sizes["fully-allocated"].as_u64().context("qemu-img measure does not say how large the image can become")
}

/// Returns the offset in bytes after the last allocated cluster of an image, or `None` if qemu-img
/// does not show it. QEMU may still keep newer allocations in memory. [`room`] leaves space for
/// these allocations, because it adds the full size of the active image to the offset.
async fn end(file: &Path, format: &str) -> anyhow::Result<Option<u64>> {
    // The exit status is an error if QEMU has not written all metadata yet.
    let output = qemu_img(&["check", "-f", format], file).await?;
    let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    Ok(found["image-end-offset"].as_u64())
}

/// Runs a command of qemu-img for an image that QEMU has open. The output is JSON.
async fn qemu_img(command: &[&str], file: &Path) -> anyhow::Result<Output> {
    let mut process = Command::new("qemu-img");
    process.args(command).args(["-U", "--output=json"]).arg(file);
    in_thread(move || process.output())
        .await?
        .context("cannot run qemu-img, which is in the package qemu-utils")
}

#[cfg(test)]
mod tests {
    use hob_control::CacheSettings;

    use super::super::fake_qemu::FakeQemu;
    use super::*;

    /// Returns a VM with a device `vda` above a raw node and a file node, and with one more node.
    fn vm(raw: &Value, file: &Value, other: &Value, command_line: &[&str]) -> Vm {
        let edges = json!([
            { "parent": 0, "name": "root", "child": 1 },
            { "parent": 1, "name": "file", "child": 2 },
        ]);
        let ids = json!([
            { "id": 0, "name": "vda" },
            { "id": 1, "name": raw["node-name"] },
            { "id": 2, "name": file["node-name"] },
        ]);
        let blocks = json!([{ "device": "vda", "inserted": { "ro": false } }]);
        let graph = json!({ "nodes": ids, "edges": edges });
        Vm {
            name: "web".to_owned(),
            graph: Graph::new(&json!([raw, file, other]), &graph, &Value::Null, &blocks),
            command_line: command_line.iter().map(|word| (*word).to_owned()).collect(),
            directory: None,
            pid: None,
        }
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

    fn record(vm: &Vm) -> anyhow::Result<Record> {
        let wanted = Wanted {
            target: "qmp:/run/web.qmp".to_owned(),
            method: None,
            socket: "/run/hob/nbd.sock".into(),
            cache: CacheEnable { pool: "fast".to_owned(), size: None, settings: CacheSettings::default() },
            persistent: Rc::new(Persistent::None),
        };
        vm.record(&vm.graph.devices[0], &wanted)
    }

    fn node(name: &str, driver: &str, file: &str) -> Value {
        json!({ "node-name": name, "drv": driver, "file": file, "ro": false })
    }

    #[test]
    fn an_image_that_qemu_opens_twice_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
        for name in ["it's a disk, 1.img", "other.img"] {
            std::fs::write(path(name), "x").unwrap();
        }
        let image = path("it's a disk, 1.img");
        std::os::unix::fs::symlink(&image, path("link")).unwrap();
        let (raw, file) = (node("image", "raw", &image), node("image-file", "file", &image));
        let found = record(&vm(&raw, &file, &node("other", "file", &path("other.img")), &[])).unwrap();
        assert_eq!(found.file, Path::new(&image));
        for name in ["it's a disk, 1.img", "link"] {
            let other = node("other", "file", &path(name));
            let error = record(&vm(&raw, &file, &other, &[])).unwrap_err().to_string();
            assert!(error.contains("second time, as the block node other"), "{error}");
        }
    }

    #[test]
    fn an_image_that_cannot_grow_below_hob_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image").to_str().expect("UTF-8").to_owned();
        std::fs::write(&image, "x").unwrap();
        let (file, other) = (node("image-file", "file", &image), node("other", "null-co", ""));
        let mut encrypted = node("image", "qcow2", &image);
        encrypted["encrypted"] = json!(true);
        for (top, reason) in [
            (node("image", "qcow2", &image), None),
            (node("image", "vdi", &image), Some("'vdi'; only raw and qcow2")),
            (node("image", "luks", &image), Some("'luks'; only raw and qcow2")),
            (encrypted, Some("is encrypted")),
        ] {
            let error = record(&vm(&top, &file, &other, &[])).err().map(|error| error.to_string());
            let is_expected = match (&error, reason) {
                (Some(error), Some(reason)) => error.contains(reason),
                (error, reason) => error.is_none() && reason.is_none(),
            };
            assert!(is_expected, "{top}: {error:?}");
        }
    }

    #[test]
    fn a_part_of_a_file_is_attached_only_if_its_offset_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image").to_str().expect("UTF-8").to_owned();
        std::fs::write(&image, "x").unwrap();
        let below = json!({ "driver": "file", "filename": image });
        let shown = json!({ "driver": "raw", "offset": 1 << 20, "file": below });
        let (file, other) = (node("image-file", "file", &image), node("other", "null-co", ""));
        let raw = |name: &str| node(name, "raw", &format!("json:{shown}"));
        let error = record(&vm(&raw("#block123"), &file, &other, &[])).unwrap_err().to_string();
        assert!(error.contains("'offset'") && error.contains("mirror"), "{error}");
        let error = record(&vm(&raw("image"), &file, &other, &[])).unwrap_err().to_string();
        assert!(error.contains("'offset'") && error.contains("after its start"), "{error}");
        let line = ["qemu", "-blockdev", "driver=raw,node-name=image,file=image-file,offset=1048576"];
        let found = record(&vm(&raw("image"), &file, &other, &line)).unwrap();
        assert_eq!(found.parent.unwrap()["offset"], 1 << 20);
    }

    /// QEMU may have a second QMP socket.
    #[test]
    fn a_disk_that_was_attached_by_another_name_of_the_vm_is_found() {
        let record: Record = serde_json::from_value(json!({
            "version": 1, "target": "qmp:/run/web.qmp", "disk": "web-vda", "label": "vda", "backend": "vda",
            "file": "/image", "format": "raw", "method": "reopen", "cache": { "pool": "fast" },
            "node": { "node-name": "hob-1", "server": { "type": "unix", "path": "/run/hob/nbd.sock" } },
            "spare": [{ "node-name": "image-file" }],
        }))
        .unwrap();
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
            let vm = Vm {
                name: vm.to_owned(),
                graph: Graph::default(),
                command_line: Vec::new(),
                directory: None,
                pid: None,
            };
            let (backend, label) = (label.to_owned(), label.to_owned());
            vm.disk_name(&Device { backend, label, read_only: false, removable: false })
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

    #[test]
    fn a_method_that_is_not_possible_is_refused_with_the_possible_ones() {
        let vm = Vm {
            name: "web".to_owned(),
            graph: Graph::default(),
            command_line: Vec::new(),
            directory: None,
            pid: None,
        };
        let device =
            Device { backend: "vda".to_owned(), label: "vda".to_owned(), read_only: false, removable: false };
        let method = |wanted| vm.method(None, 0, &device, wanted);
        assert_eq!(method(None).unwrap(), Method::Mirror);
        assert_eq!(
            method(Some(Method::Reopen)).unwrap_err().to_string(),
            "vda: '--method reopen' is not possible for this disk; possible: mirror"
        );
    }
}
