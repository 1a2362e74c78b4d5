//! The record of a new attachment, or the reason why a disk cannot be attached.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use hob_control::{CacheEnable, check_name};
use serde_json::{Value, json};

use super::Vm;
use crate::attach::definition::Persistent;
use crate::attach::graph::{Device, Node, is_made_up};
use crate::attach::image::{Image, is_same_file};
use crate::attach::libvirt;
use crate::attach::lost_record;
use crate::attach::options::{name_or, node_name, of_hob, of_image};
use crate::attach::record::{Method, Record};

/// The user's options for each disk.
pub(in crate::attach) struct Wanted<'a> {
    pub(in crate::attach) target: String,
    pub(in crate::attach) method: Option<Method>,
    pub(in crate::attach) socket: PathBuf,
    pub(in crate::attach) cache: CacheEnable,
    pub(in crate::attach) persistent: &'a Persistent,
}

impl Vm {
    /// Returns the record that `hob attach` saves about a device before it changes anything.
    ///
    /// # Errors
    /// Returns the reason why the device cannot be attached.
    pub(in crate::attach) fn record(&self, device: &Device, wanted: &Wanted<'_>) -> anyhow::Result<Record> {
        let (xml, volumes) = match wanted.persistent {
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
        self.check_only_user(image, &given)?;
        let parent = parents.last();
        self.check_format(parent.unwrap_or(image))?;
        let method = self.method(parent, parents.len(), device, wanted.method)?;
        let text = given.to_str().context("the image file has a name that is not UTF-8")?;
        let (spare, options) = self.image_nodes(device, image, parent, method, text, &disk)?;
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
            format: graph.node(top)?.driver.clone(),
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
        let name = node;
        let node = self.graph.node(name)?;
        lost_record::check_absent(name, &node.driver)?;
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
    pub(super) fn other_node(&self, image: &str, file: &Path) -> Option<&String> {
        let directory = self.directory.as_deref().unwrap_or(Path::new(""));
        let has_file = |node: &Node| {
            matches!(node.driver.as_str(), "file" | "host_device")
                && is_same_file(&directory.join(file_name(node)), file)
        };
        self.graph.nodes.iter().find(|(name, node)| *name != image && has_file(node)).map(|(name, _)| name)
    }

    /// Refuses an image that another part of QEMU uses besides the device.
    fn check_only_user(&self, image: &str, file: &Path) -> anyhow::Result<()> {
        if self.graph.users(image) != 1 {
            bail!(
                "several block nodes of QEMU use {}, and hob can replace only one user. End the export, the backup or \
                 the other device that uses it, and repeat the command",
                file.display()
            );
        }
        if let Some(other) = self.other_node(image, file) {
            bail!(
                "QEMU opens {} a second time, as the block node {other}, whose reads and writes would bypass hob. Remove the \
                 other device or block node, and repeat the command",
                file.display()
            );
        }
        Ok(())
    }

    /// Returns the options of the image's nodes for the record, lowest first, and the options by which
    /// hob reopens the format node `parent`. `file` is the path by which QEMU opens the image.
    fn image_nodes(
        &self,
        device: &Device,
        image: &str,
        parent: Option<&String>,
        method: Method,
        file: &str,
        disk: &str,
    ) -> anyhow::Result<(Vec<Value>, Option<Value>)> {
        let node = self.graph.node(image)?;
        let open = |name: &str| of_image(node, file, image, name, &self.command_line);
        Ok(match (method, parent) {
            (Method::Mirror, Some(root)) => {
                self.check_mirrored(root)?;
                let name = name_or(root, disk, "-raw");
                let mut below = open(image);
                let lower = match is_made_up(image) || self.is_inline(root) {
                    true => {
                        below.as_object_mut().expect("options").remove("node-name");
                        Vec::new()
                    }
                    false => vec![below.clone()],
                };
                let child = if lower.is_empty() { below } else { json!(image) };
                let mut raw = json!({ "driver": "raw", "node-name": name, "file": child });
                if self.discards(root, file) {
                    raw["discard"] = json!("unmap");
                }
                if let Some(zeroes) = self.zeroes(root, file) {
                    raw["detect-zeroes"] = json!(zeroes);
                }
                ([lower, vec![raw]].concat(), None)
            }
            (Method::Mirror, None) => {
                self.check_replaceable(image)?;
                (vec![open(&name_or(image, disk, "-image"))], None)
            }
            (_, Some(parent)) => {
                (vec![open(&name_or(image, disk, "-image"))], self.reopened(parent, method)?)
            }
            (_, None) => bail!("{}: QEMU has no node above the image file", device.label),
        })
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

#[cfg(test)]
mod tests {
    use hob_control::CacheSettings;

    use super::*;
    use crate::attach::vm::tests::{node, vm};

    fn record(vm: &Vm) -> anyhow::Result<Record> {
        let wanted = Wanted {
            target: "qmp:/run/web.qmp".to_owned(),
            method: None,
            socket: "/run/hob/nbd.sock".into(),
            cache: CacheEnable { pool: "fast".to_owned(), size: None, settings: CacheSettings::default() },
            persistent: &Persistent::None,
        };
        vm.record(&vm.graph.devices[0], &wanted)
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
}
