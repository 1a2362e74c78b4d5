//! `hob detach` for a running VM that was started with hob's disk, after an earlier attachment. The VMs
//! have no operating system. Each write goes through the guest's device.

use conformance::attach_stage::{IMAGE, Stage, VDA};
use conformance::process::Process;
use serde_json::json;

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
    let (image, socket) = (stage.scratch.text(IMAGE), stage.scratch.text("nbd.sock"));
    stage.image(IMAGE, format, &[]);
    let vm = match given {
        Given::Drive => stage.start_drive(&image, format),
        _ => stage.start(IMAGE, format, ""),
    };
    stage.run("attach", &["--size", "16M", "--mode", "write-back"]);
    stage.kill(vm);

    let nbd = format!("server.type=unix,server.path={socket},export=web-vda,reconnect-delay=300");
    let node = format!("driver=nbd,node-name=started,{nbd}");
    let vm = match given {
        Given::Nodes => {
            let format = format!("driver={format},node-name=vda,file=started,discard=unmap");
            stage.start_with(&["-blockdev", &node, "-blockdev", &format, "-device", VDA])
        }
        Given::Inline => {
            let inline: Vec<String> = nbd.split(',').map(|option| format!("file.{option}")).collect();
            let inline = inline.join(",");
            let node = format!("driver={format},node-name=vda,discard=unmap,file.driver=nbd,{inline}");
            stage.start_with(&["-blockdev", &node, "-device", VDA])
        }
        Given::Root => stage.start_with(&["-blockdev", &node.replace("started", "vda"), "-device", VDA]),
        Given::Drive => stage.start_drive(&format!("nbd+unix:///web-vda?socket={socket}"), format),
    };
    stage.write(1);
    vm
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
        stage.end(vm, format);
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
            if stage.has_record() {
                stage.run("detach", &[]);
            }
            stage.end(vm, "raw");
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
    stage.end(vm, "raw");
}
