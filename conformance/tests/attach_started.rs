//! `hob detach` for a running VM that was started with hob's disk, after an earlier attachment. The VMs
//! have no operating system. Each write goes through the guest's device.

use conformance::Tool;
use conformance::attach_stage::Stage;
use conformance::process::Process;
use serde_json::json;

/// Name of the image.
const IMAGE: &str = "disk.img";

/// QEMU's options for hob's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Given {
    /// A format node and an NBD node, as with libvirt.
    Nodes,
    /// A format node whose options contain the NBD node, as in docs/ATTACH.md.
    Inline,
    /// Only an NBD node.
    Root,
    /// `-drive`, also for the image.
    Drive,
}

/// Attaches a disk to a VM and ends the VM. Starts the VM again with hob's disk, and writes to the
/// disk.
#[track_caller]
fn start_with_hob(stage: &Stage, given: Given, format: &str) -> Process {
    let device = "virtio-blk-pci,drive=vda,id=vda";
    let drive = |file: &str| format!("if=none,id=vda,file={file},format={format},discard=unmap");
    let (image, socket) = (stage.scratch.text(IMAGE), stage.scratch.text("nbd.sock"));
    stage.image(IMAGE, format, &[]);
    let vm = match given {
        Given::Drive => stage.start_with(&["-drive", &drive(&image), "-device", device]),
        _ => stage.start(IMAGE, format, ""),
    };
    stage.run("attach", &["--size", "16M", "--mode", "write-back"]);
    stage.kill(vm);

    let nbd = format!("server.type=unix,server.path={socket},export=web-vda,reconnect-delay=300");
    let node = format!("driver=nbd,node-name=started,{nbd}");
    let vm = match given {
        Given::Nodes => {
            let format = format!("driver={format},node-name=vda,file=started,discard=unmap");
            stage.start_with(&["-blockdev", &node, "-blockdev", &format, "-device", device])
        }
        Given::Inline => {
            let inline: Vec<String> = nbd.split(',').map(|option| format!("file.{option}")).collect();
            let inline = inline.join(",");
            let node = format!("driver={format},node-name=vda,discard=unmap,file.driver=nbd,{inline}");
            stage.start_with(&["-blockdev", &node, "-device", device])
        }
        Given::Root => stage.start_with(&["-blockdev", &node.replace("started", "vda"), "-device", device]),
        Given::Drive => {
            let uri = format!("nbd+unix:///web-vda?socket={socket}");
            stage.start_with(&["-drive", &drive(&uri), "-device", device])
        }
    };
    stage.write(1);
    vm
}

/// Checks that the VM runs with its image, and that hob does not have the disk. Then ends the VM, and
/// checks the image.
#[track_caller]
fn end(stage: &Stage, vm: Process, format: &str) {
    stage.assert_has_no_disk();
    let nodes = stage.ask("query-named-block-nodes", json!({ "flat": true })).to_string();
    assert!(nodes.contains(IMAGE) && !nodes.contains("\"drv\":\"nbd\""), "{nodes}");
    assert_eq!(stage.ask("query-status", json!({}))["status"], "running");
    stage.write(2);
    stage.quit(vm);
    let read = ["-f", format, "-c", "read -P 2 0 1M", &stage.scratch.text(IMAGE)];
    let said = Tool::new("qemu-io").args(read).run();
    assert!(!said.contains("verification failed"), "{said}");
}

fn is_recorded(stage: &Stage) -> bool {
    stage.scratch.path("records/web-vda.json").exists()
}

#[track_caller]
fn assert_cached(stage: &Stage) {
    let shown = stage.daemon.disk("web-vda");
    assert!(shown["cache"].is_object(), "no cache: {shown}");
}

#[test]
fn a_vm_that_was_started_with_hobs_disk_is_detached_while_it_runs() {
    let stage = Stage::new();
    for (given, format) in [
        (Given::Nodes, "raw"),
        (Given::Inline, "qcow2"),
        (Given::Root, "raw"),
        (Given::Drive, "raw"),
        (Given::Drive, "qcow2"),
    ] {
        let vm = start_with_hob(&stage, given, format);
        let output = stage.run("attach", &[]);
        assert!(output.stderr.contains("nothing to do"), "{given:?} {format}: {}", output.all());
        let output = stage.run("detach", &["--dry-run"]);
        assert!(output.stderr.contains("open the image in QEMU"), "{given:?} {format}: {}", output.all());
        assert_cached(&stage);
        let output = stage.run("detach", &[]);
        assert!(
            output.stderr.contains("Start the VM with its image"),
            "{given:?} {format}: {}",
            output.all()
        );
        end(&stage, vm, format);
    }
}

/// The same command completes a detachment that was killed, and `hob attach` undoes it.
#[test]
fn a_detachment_that_is_killed_at_any_step_is_continued_or_undone() {
    let stage = Stage::new();
    for (given, remainder) in [(Given::Nodes, 0), (Given::Drive, 1)] {
        for step in 1.. {
            let vm = start_with_hob(&stage, given, "raw");
            let is_killed = stage.killed_after("detach", step);
            if is_killed && step % 2 == remainder {
                stage.run("attach", &[]);
                assert_cached(&stage);
            }
            if is_recorded(&stage) {
                stage.run("detach", &[]);
            }
            end(&stage, vm, "raw");
            if !is_killed {
                assert!(step > 5, "{given:?}: the command has only {step} steps");
                break;
            }
        }
    }
}

/// QEMU opens the image by its path, which leads to no file, or to another file.
#[test]
fn a_detachment_without_the_image_changes_nothing() {
    let stage = Stage::new();
    let vm = start_with_hob(&stage, Given::Nodes, "raw");
    let (path, renamed) = (stage.scratch.path(IMAGE), stage.scratch.path("renamed.img"));
    std::fs::rename(&path, &renamed).unwrap();
    let said = stage.refused("detach", &[]);
    assert!(said.contains("QEMU cannot open the image") && said.contains("hob detach --stopped"), "{said}");
    assert!(!said.contains("disable the cache"), "the command began: {said}");
    assert_cached(&stage);

    stage.image(IMAGE, "raw", &[]);
    let said = stage.refused("detach", &[]);
    assert!(said.contains("another file is there now") && said.contains("still attached"), "{said}");
    assert_cached(&stage);
    assert_eq!(stage.ask("query-status", json!({}))["status"], "running");

    std::fs::rename(&renamed, &path).unwrap();
    stage.run("detach", &[]);
    end(&stage, vm, "raw");
}
