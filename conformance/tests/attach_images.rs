//! `hob attach` and `hob detach` with different images and options of QEMU: a VM that was started with
//! another image, images that cannot be attached, options that must survive, and an unplugged disk.
//! The VMs have no operating system. Each write goes through the guest's device.

use conformance::Tool;
use conformance::attach_stage::{SIZE_BYTES, STEP_MAX, Stage};
use conformance::scratch::wait_until;
use serde_json::json;

/// The image of an attached disk stays locked, so the operator may start the VM with a copy of it. hob's
/// disk of the first image must not replace the copy, also if the copy has the same path.
#[test]
fn a_vm_that_was_started_with_another_image_keeps_this_image() {
    let stage = Stage::new();
    for (name, second) in [("one.img", "two.img"), ("same.img", "same.img")] {
        stage.image(name, "raw", &[]);
        let vm = stage.start(name, "raw", "");
        stage.run("attach", &["--size", "16M"]);
        stage.write(1);
        stage.kill(vm);
        let old = stage.scratch.path("old.img");
        std::fs::rename(stage.scratch.path(name), &old).unwrap();
        if second != name {
            std::fs::rename(&old, stage.scratch.path(name)).unwrap();
        }
        stage.image(second, "raw", &[]);
        let vm = stage.start(second, "raw", "");
        stage.write(2);

        let dry = stage.run("attach", &["--dry-run"]);
        assert!(
            dry.stderr.contains("is left over") && dry.stderr.contains("delete the record"),
            "{}",
            dry.all()
        );
        let output = stage.run("attach", &[]);
        assert!(output.stderr.contains("is left over"), "{}", output.all());
        assert!(output.stderr.contains("16 MiB in pool fast"), "the settings are kept: {}", output.all());
        let shown = stage.daemon.disk("web-vda");
        assert_eq!(shown["backing"], stage.scratch.text(second).as_str(), "{shown}");
        stage.write(3);
        stage.run("detach", &[]);
        stage.assert_has_no_disk();
        stage.quit(vm);
        let first = if second == name { "old.img" } else { name };
        assert_eq!((stage.first(first), stage.first(second)), (1, 3), "{name}, {second}");
    }
}

#[test]
fn an_image_that_cannot_be_attached_is_refused_before_any_step() {
    let stage = Stage::new();
    stage.image("disk.vdi", "vdi", &[]);
    let data = format!("data_file={}", stage.scratch.text("disk.data"));
    stage.image("data.qcow2", "qcow2", &["-o", &data]);
    stage.image("served.img", "raw", &[]);
    stage.daemon.ctl(&["disk", "add", "served", "--backing", &stage.scratch.text("served.img")]);
    // hob has locked the image that it serves.
    for (name, format, more, reason) in [
        ("disk.vdi", "vdi", "", "only raw and qcow2 images"),
        ("data.qcow2", "qcow2", "", "data_file"),
        ("served.img", "raw", ",locking=off", "as the disk served"),
    ] {
        let vm = stage.start(name, format, more);
        let ways: [&[&str]; 2] = [&["--dry-run"], &[]];
        for more in ways {
            let said = stage.refused("attach", more);
            assert!(said.contains(reason) && !said.contains("record the attachment"), "{said}");
        }
        stage.quit(vm);
    }
}

/// Options of QEMU for the disk `vda` with a raw image. `file` has the options of the node
/// `image-file`.
fn disk_options(file: &str) -> [&str; 6] {
    let raw = "driver=raw,node-name=image,file=image-file";
    ["-blockdev", file, "-blockdev", raw, "-device", "virtio-blk-pci,drive=image,id=vda"]
}

#[test]
fn a_vm_is_recognized_at_its_second_socket() {
    let stage = Stage::new();
    stage.image("disk.img", "raw", &[]);
    let file = format!("driver=file,node-name=image-file,filename={}", stage.scratch.text("disk.img"));
    let second = stage.scratch.text("second.sock");
    let socket = format!("unix:{second},server=on,wait=off");
    let vm = stage.start_with(&[&["-qmp", socket.as_str()], &disk_options(&file)[..]].concat());
    stage.run("attach", &[]);
    let output = stage.output_for(&format!("qmp:{second}"), "attach", &[]);
    assert!(!output.success(), "{}", output.all());
    assert!(output.stderr.contains("hob's disk web-vda already"), "{}", output.stderr);
    assert!(output.stderr.contains("/qmp.sock'"), "the name of the first socket: {}", output.stderr);
    stage.run("detach", &[]);
    stage.quit(vm);
}

#[test]
fn a_vm_whose_name_is_too_long_is_attached_by_another_name() {
    let stage = Stage::new();
    stage.image("disk.img", "raw", &[]);
    let file = format!("driver=file,node-name=image-file,filename={}", stage.scratch.text("disk.img"));
    let long = "x".repeat(64);
    let vm = stage.start_with(&[&["-name", long.as_str()], &disk_options(&file)[..]].concat());
    let said = stage.refused("attach", &[]);
    assert!(said.contains("--name"), "{said}");
    stage.run("attach", &["--name", "web"]);
    assert!(stage.daemon.disks().contains(&"web-vda".to_owned()));
    stage.run("detach", &[]);
    stage.assert_has_no_disk();
    stage.quit(vm);
}

/// When hob makes QEMU open the image again, the value of the option `locking` must be the text
/// `off`.
#[test]
fn a_disk_with_the_option_locking_is_detached() {
    let stage = Stage::new();
    stage.image("disk.img", "raw", &[]);
    let vm = stage.start("disk.img", "raw", ",locking=off");
    stage.run("attach", &[]);
    stage.write(1);
    stage.run("detach", &[]);
    stage.write(2);
    stage.quit(vm);
    assert_eq!(stage.first("disk.img"), 2);
}

#[test]
fn an_image_is_not_extended_again_by_the_next_attachment() {
    let stage = Stage::new();
    stage.image("disk.qcow2", "qcow2", &[]);
    let vm = stage.start("disk.qcow2", "qcow2", "");
    for pattern in 1..=3 {
        stage.run("attach", &[]);
        stage.write(pattern);
        stage.run("detach", &[]);
        let length = stage.length("disk.qcow2");
        assert!((SIZE_BYTES..2 * SIZE_BYTES).contains(&length), "attachment {pattern}: {length} bytes");
    }
    stage.quit(vm);
    Tool::new("qemu-img").args(["check", "-f", "qcow2", &stage.scratch.text("disk.qcow2")]).run();
}

/// After the image was renamed, another file is at its path. After a detach, the VM would use this
/// file.
#[test]
fn a_disk_is_not_detached_to_another_file_at_the_path_of_its_image() {
    let stage = Stage::new();
    stage.image("disk.img", "raw", &[]);
    let vm = stage.start("disk.img", "raw", "");
    stage.run("attach", &[]);
    stage.write(1);
    let (path, renamed) = (stage.scratch.path("disk.img"), stage.scratch.path("renamed.img"));
    std::fs::rename(&path, &renamed).unwrap();
    stage.image("disk.img", "raw", &[]);
    let said = stage.refused("detach", &[]);
    assert!(said.contains("another file is there now") && said.contains("still attached"), "{said}");
    assert_eq!(stage.ask("query-status", json!({}))["status"], "running");
    stage.write(2);
    std::fs::rename(&renamed, &path).unwrap();
    stage.run("detach", &[]);
    stage.quit(vm);
    assert_eq!(stage.first("disk.img"), 2);
}

/// QEMU keeps nodes of `-blockdev` when their device is unplugged. A guest without an operating system
/// unplugs the device at a reset.
#[test]
fn an_unplugged_disk_is_detached() {
    let stage = Stage::new();
    stage.image("disk.img", "raw", &[]);
    let vm = stage.start("disk.img", "raw", "");
    stage.run("attach", &["--mode", "write-back"]);
    stage.write(1);
    stage.ask("device_del", json!({ "id": "vda" }));
    stage.ask("system_reset", json!({}));
    wait_until("the end of the device", STEP_MAX, || {
        stage.ask("query-block", json!({})).as_array().is_some_and(Vec::is_empty)
    });
    stage.run("detach", &[]);
    stage.assert_has_no_disk();
    let nodes = stage.ask("query-named-block-nodes", json!({ "flat": true })).to_string();
    assert!(nodes.contains("\"image-file\"") && !nodes.contains("nbd"), "{nodes}");
    stage.quit(vm);
    assert_eq!(stage.first("disk.img"), 1);
}

/// QEMU has no block node for a disk that it uses over vhost-user. Here, the test is the disk's client.
#[test]
fn a_disk_with_a_client_that_is_no_block_node_keeps_its_cache() {
    let stage = Stage::new();
    stage.image("disk.img", "raw", &[]);
    let vm = stage.start("disk.img", "raw", "");
    stage.run("attach", &[]);
    stage.kill(vm);
    let vm = stage.start_with(&[]);
    let client = stage.scratch.connect("web-vda");
    let said = stage.refused("detach", &[]);
    assert!(said.contains("a client is connected to hob's disk web-vda"), "{said}");
    assert!(said.contains("stop the VM, and run 'hob detach --stopped"), "{said}");
    let shown = stage.daemon.disk("web-vda");
    assert!(shown["cache"].is_object(), "the cache is kept: {shown}");
    drop(client);
    stage.run("detach", &[]);
    stage.assert_has_no_disk();
    stage.quit(vm);
}

/// The methods `mirror` and `device` replace or reopen the root node, which has the option
/// `detect-zeroes`.
#[test]
fn writes_of_zeroes_are_detected_as_before() {
    let stage = Stage::new();
    for format in ["raw", "qcow2"] {
        let name = format!("disk.{format}");
        stage.image(&name, format, &[]);
        let file = stage.scratch.text(&name);
        let drive = format!("file={file},format={format},if=virtio,id=vda,discard=unmap,detect-zeroes=unmap");
        let vm = stage.start_with(&["-drive", &drive]);
        let root = || stage.ask("query-block", json!({}))[0]["inserted"]["detect_zeroes"].clone();
        assert_eq!(root(), "unmap");
        for verb in ["attach", "detach"] {
            stage.run(verb, &[]);
            assert_eq!(root(), "unmap", "{format}, hob {verb}");
        }
        stage.quit(vm);
    }
}

#[test]
fn names_of_disks_and_sockets_are_checked() {
    let stage = Stage::new();
    stage.image("disk.img", "raw", &[]);
    let vm = stage.start("disk.img", "raw", "");
    // Other names of the socket.
    std::os::unix::fs::symlink(".", stage.scratch.path("link")).unwrap();
    let other = format!("qmp:{}", stage.scratch.text("link/qmp.sock"));
    let output = stage.output_for(&other, "attach", &[]);
    assert!(output.success(), "{}", output.all());
    let again = stage.run("attach", &["--size", "32M"]);
    assert!(again.stderr.contains("keeps its cache"), "{}", again.all());
    let said = stage.refused("detach", &["vda", "vdb"]);
    assert!(said.contains("vdb; attached are: vda"), "{said}");
    // The VM runs, and its socket is gone.
    std::fs::rename(stage.scratch.path("qmp.sock"), stage.scratch.path("gone.sock")).unwrap();
    let said = stage.refused("detach", &["--stopped"]);
    assert!(said.contains("the VM seems to run"), "{said}");
    let shown = stage.daemon.disk("web-vda");
    assert!(shown["cache"].is_object(), "the cache is kept: {shown}");
    std::fs::rename(stage.scratch.path("gone.sock"), stage.scratch.path("qmp.sock")).unwrap();
    stage.run("detach", &["vda"]);
    stage.quit(vm);
}
