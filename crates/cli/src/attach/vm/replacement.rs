//! The block nodes of a VM that hob can replace: the methods that are possible for a disk, the
//! conditions of each, and the options that a replaced node keeps.

use anyhow::{Context, bail};
use serde_json::Value;

use super::Vm;
use crate::attach::graph::{Device, Node, is_made_up};
use crate::attach::options::{drive_discards, given as given_options, not_repeatable, of_parent};
use crate::attach::record::Method;
use crate::output::word;

/// Drivers of images that can be attached: raw images, also without a format node, and qcow2. For
/// other growing formats, qemu-img cannot tell the maximum size of the file.
const FORMATS: [&str; 4] = ["raw", "file", "host_device", "qcow2"];

impl Vm {
    /// Refuses an image whose file hob cannot serve alone, or whose maximum size hob cannot find out.
    pub(super) fn check_format(&self, node: &str) -> anyhow::Result<()> {
        let Node { driver, info, .. } = self.graph.node(node)?;
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

    pub(super) fn method(
        &self,
        parent: Option<&String>,
        depth: usize,
        device: &Device,
        wanted: Option<Method>,
    ) -> anyhow::Result<Method> {
        let is_raw = match parent {
            Some(parent) => self.graph.node(parent)?.driver == "raw",
            None => true,
        };
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
    pub(super) fn reopened(&self, parent: &str, method: Method) -> anyhow::Result<Option<Value>> {
        if method != Method::Reopen {
            return Ok(None);
        }
        let node = self.graph.node(parent)?;
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
    pub(super) fn check_mirrored(&self, root: &str) -> anyhow::Result<()> {
        self.check_replaceable(root)?;
        if let Some(option) = not_repeatable(self.graph.node(root)?) {
            bail!(
                "QEMU opens the image with the option '{option}', which the method 'mirror' cannot keep. Start \
                 the VM with '-blockdev' and a 'node-name' for each node"
            );
        }
        Ok(())
    }

    /// Refuses to replace a node that other parts of QEMU depend on.
    pub(super) fn check_replaceable(&self, root: &str) -> anyhow::Result<()> {
        if self.graph.users(root) != 1 {
            bail!(
                "QEMU also exports the node {root}, or another block node uses it. End that, and repeat the command"
            );
        }
        let bitmaps =
            self.graph.node(root)?.info["dirty-bitmaps"].as_array().is_some_and(|list| !list.is_empty());
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
    pub(super) fn is_inline(&self, root: &str) -> bool {
        given_options(&self.command_line, root).is_some_and(|options| options["file"].is_object())
    }

    /// Returns the option `detect-zeroes` for a node that replaces the root node. QEMU accepts `unmap`
    /// only for a node with discards.
    pub(super) fn zeroes(&self, node: &str, file: &str) -> Option<&str> {
        match self.graph.detect_zeroes(node)? {
            "unmap" if !self.discards(node, file) => Some("on"),
            value => Some(value),
        }
    }

    pub(super) fn discards(&self, node: &str, file: &str) -> bool {
        let given = given_options(&self.command_line, node);
        given.is_some_and(|options| options["discard"] == "unmap") || drive_discards(&self.command_line, file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::vm::tests::empty_vm;

    #[test]
    fn a_method_that_is_not_possible_is_refused_with_the_possible_ones() {
        let vm = empty_vm("web");
        let device =
            Device { backend: "vda".to_owned(), label: "vda".to_owned(), read_only: false, removable: false };
        let method = |wanted| vm.method(None, 0, &device, wanted);
        assert_eq!(method(None).unwrap(), Method::Mirror);
        assert_eq!(
            method(Some(Method::Reopen)).unwrap_err().to_string(),
            "vda: '--method reopen' is not possible for this disk; possible: mirror"
        );
    }

    /// QEMU names the nodes in one QMP command, and describes them in another.
    #[test]
    fn a_node_that_qemu_does_not_describe_is_refused() {
        let vm = empty_vm("web");
        let device =
            Device { backend: "vda".to_owned(), label: "vda".to_owned(), read_only: false, removable: false };
        let gone = "gone".to_owned();
        for error in [
            vm.check_format(&gone).unwrap_err(),
            vm.method(Some(&gone), 1, &device, None).unwrap_err(),
            vm.reopened(&gone, Method::Reopen).unwrap_err(),
        ] {
            assert!(error.to_string().contains("has just removed the node gone"), "{error}");
        }
    }
}
