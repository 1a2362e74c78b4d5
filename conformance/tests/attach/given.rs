//! The disks of the VMs that the tests attach, as QEMU's options.

use conformance::Scratch;
use serde_json::json;

/// QEMU's options for the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Given {
    /// A raw image in `-blockdev`.
    Nodes,
    /// A raw image in `-drive`.
    Drive,
    /// A qcow2 image in `-blockdev`, with an I/O thread.
    NodesQcow2,
    /// A qcow2 image in `-drive`.
    DriveQcow2,
    /// A raw image in `-blockdev`, with the nodes of Proxmox VE 9.
    Proxmox,
    /// Like [`Given::Nodes`], with the second disk `vdb`, whose image is [`SECOND`].
    TwoDisks,
}

/// The image of a VM's second disk in the scratch directory.
pub(super) const SECOND: &str = "second.img";
/// Size of the second disk in bytes: a tenth of it is more than the minimum size of a cache.
pub(super) const SECOND_BYTES: u64 = 1 << 30;

impl Given {
    pub(super) fn format(self) -> &'static str {
        if matches!(self, Given::NodesQcow2 | Given::DriveQcow2) { "qcow2" } else { "raw" }
    }

    /// The path of the QMP socket in the scratch directory.
    pub(super) fn qmp(self) -> &'static str {
        if self == Given::Proxmox { "var/run/qemu-server/100.qmp" } else { "qmp.sock" }
    }

    /// The name of hob's disk.
    pub(super) fn disk(self) -> &'static str {
        if self == Given::Proxmox { "cached-vm-100-disk-0" } else { "web-vda" }
    }

    /// The size of the pool in hob.toml.
    pub(super) fn pool_size(self) -> &'static str {
        if self == Given::TwoDisks { "256M" } else { "96M" }
    }

    pub(super) fn args(self, file: &str) -> Vec<String> {
        let format = self.format();
        let args: Vec<String> = match self {
            Given::Nodes | Given::NodesQcow2 | Given::TwoDisks => [
                "-blockdev",
                &format!("driver=file,node-name=image-file,filename={file},cache.direct=on"),
                "-blockdev",
                &format!("driver={format},node-name=image,file=image-file,discard=unmap,cache.direct=on"),
                "-object",
                "iothread,id=io",
                "-device",
                match self {
                    Given::NodesQcow2 => "virtio-blk-pci,drive=image,id=vda,iothread=io",
                    _ => "virtio-blk-pci,drive=image,id=vda",
                },
            ]
            .map(str::to_owned)
            .into(),
            Given::Drive | Given::DriveQcow2 => {
                let drive = format!("file={file},format={format},if=virtio,id=vda,cache=none,discard=unmap");
                ["-drive".to_owned(), drive].into()
            }
            Given::Proxmox => proxmox_args(file),
        };
        args
    }
}

/// Returns the options of the second disk.
pub(super) fn second_disk(scratch: &Scratch) -> [String; 6] {
    let file = format!("driver=file,node-name=second-file,filename={},cache.direct=on", scratch.text(SECOND));
    let node = "driver=raw,node-name=second,file=second-file,discard=unmap,cache.direct=on";
    ["-blockdev", &file, "-blockdev", node, "-device", "virtio-blk-pci,drive=second,id=vdb"]
        .map(str::to_owned)
}

/// Returns the options of a disk `virtio0` as in `PVE::QemuServer::Blockdev` of Proxmox VE 9.
fn proxmox_args(file: &str) -> Vec<String> {
    let cache = json!({ "direct": true, "no-flush": false });
    let image = json!({
        "driver": "file", "node-name": "e4f3a1bd04a9ff6ce1b31c4ba2d9d7c", "filename": file, "aio": "io_uring",
        "cache": cache, "discard": "unmap", "detect-zeroes": "unmap", "read-only": false,
    });
    let format = json!({
        "driver": "raw", "node-name": "f4f3a1bd04a9ff6ce1b31c4ba2d9d7c", "file": image, "cache": cache,
        "read-only": false,
    });
    let group = "throttle-drive-virtio0";
    let top = json!({
        "driver": "throttle", "node-name": "drive-virtio0", "throttle-group": group, "file": format,
    });
    let object = json!({ "qom-type": "throttle-group", "id": group, "limits": {} });
    let device = "virtio-blk-pci,drive=drive-virtio0,id=virtio0,write-cache=on";
    [["-object", &object.to_string()], ["-blockdev", &top.to_string()], ["-device", device]]
        .as_flattened()
        .iter()
        .map(|text| (*text).to_owned())
        .collect()
}
