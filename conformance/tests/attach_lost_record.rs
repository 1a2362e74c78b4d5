//! `hob detach` for running VMs whose attached disks have no record: the record was deleted, or is of
//! another version of hob. The VMs have no operating system. Each write goes through the guest's device.

use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::{fs, io, thread};

use conformance::attach_stage::{IMAGE, Stage, VDA};

/// Attaches the disk of a running VM, writes to the disk, and deletes the record.
#[track_caller]
fn attach_and_lose_the_record(stage: &Stage) {
    stage.run("attach", &["--size", "16M", "--mode", "write-back"]);
    stage.write(1);
    lose_the_record(stage);
}

#[track_caller]
fn lose_the_record(stage: &Stage) {
    fs::remove_file(stage.scratch.path("records/web-vda.json")).expect("a record");
}

#[test]
fn an_attached_disk_without_a_record_is_detached() {
    let stage = Stage::new();
    for (format, is_drive) in [("raw", false), ("qcow2", false), ("raw", true), ("qcow2", true)] {
        stage.image(IMAGE, format, &[]);
        let vm = match is_drive {
            false => stage.start(IMAGE, format, ""),
            true => stage.start_drive(&stage.scratch.text(IMAGE), format),
        };
        attach_and_lose_the_record(&stage);
        let said = stage.refused("attach", &[]);
        assert!(said.contains("whose record is missing"), "{format} {is_drive}: {said}");
        let said = stage.refused("detach", &[]);
        assert!(said.contains(" web-vda'") && said.contains("name it"), "{format} {is_drive}: {said}");
        let output = stage.run("detach", &["vda", "--dry-run"]);
        assert!(output.stderr.contains("open the image in QEMU"), "{format} {is_drive}: {}", output.all());
        assert!(!stage.has_record(), "a dry run writes no record");
        let output = stage.run("detach", &["vda"]);
        assert!(output.stderr.contains("hob has no record of this attachment"), "{}", output.all());
        stage.end(vm, format);
    }
}

/// The command saves the record before its first step, so the next command continues as usual.
#[test]
fn a_detachment_without_a_record_can_be_killed() {
    let stage = Stage::new();
    for step in [1, 4, 6] {
        stage.image(IMAGE, "qcow2", &[]);
        let vm = stage.start(IMAGE, "qcow2", "");
        attach_and_lose_the_record(&stage);
        assert!(stage.killed_after_with("detach", &["vda"], step), "the command has only {step} steps");
        assert!(stage.has_record());
        stage.run("detach", &[]);
        stage.end(vm, "qcow2");
    }
}

/// The operator may have added such a disk to hob and to the VM without `hob attach`.
#[test]
fn a_disk_of_the_vms_start_without_a_record_is_detached() {
    let stage = Stage::new();
    stage.image(IMAGE, "raw", &[]);
    let vm = stage.start(IMAGE, "raw", "");
    stage.run("attach", &["--size", "16M", "--mode", "write-back"]);
    stage.kill(vm);
    let socket = stage.scratch.text("nbd.sock");
    let node = format!(
        "driver=nbd,node-name=started,server.type=unix,server.path={socket},export=web-vda,reconnect-delay=300"
    );
    let format = "driver=raw,node-name=vda,file=started,discard=unmap";
    let vm = stage.start_with(&["-blockdev", &node, "-blockdev", format, "-device", VDA]);
    stage.write(1);
    lose_the_record(&stage);
    let said = stage.refused("detach", &[]);
    assert!(said.contains("'hob detach qmp:") && said.contains(" web-vda'"), "{said}");
    assert!(stage.daemon.ctl(&["disk", "list"]).contains("web-vda"));
    let said = stage.refused("detach", &["vdb"]);
    assert!(said.contains("no such disk of"), "{said}");
    stage.run("detach", &["web-vda"]);
    stage.end(vm, "raw");
}

/// Forwards QMP connections, so that the VM has a second name. The process at this socket is the test.
fn forward(from: PathBuf, to: PathBuf) {
    let listener = UnixListener::bind(from).expect("a socket");
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.expect("a client"), UnixStream::connect(&to).expect("QEMU"));
            thread::scope(|scope| {
                scope.spawn(|| {
                    let _ = io::copy(&mut &server, &mut &client);
                    let _ = client.shutdown(Shutdown::Both);
                });
                let _ = io::copy(&mut &client, &mut &server);
                let _ = server.shutdown(Shutdown::Both);
            });
        }
    });
}

/// A process that a guest controls may name the disk of another VM. The disk's client is the other
/// VM.
#[test]
fn a_disk_of_another_process_is_not_detached() {
    let stage = Stage::new();
    stage.image(IMAGE, "raw", &[]);
    let vm = stage.start(IMAGE, "raw", "");
    let socket = stage.scratch.path("other.sock");
    let other = format!("qmp:{}", socket.display());
    forward(socket, stage.scratch.path("qmp.sock"));
    stage.run("attach", &["--size", "16M", "--mode", "write-back"]);
    stage.write(1);
    let path = stage.scratch.path("records/web-vda.json");
    let record = fs::read(&path).expect("a record");
    // The record belongs to the name by which the VM was attached.
    for disks in [vec![], vec!["vda"], vec!["web-vda"]] {
        let output = stage.output_for(&other, "detach", &disks);
        let said = &output.stderr;
        assert!(!output.success() && said.contains("was attached as the disk vda of qmp:"), "{said}");
        assert_eq!(fs::read(&path).expect("a record"), record);
    }
    lose_the_record(&stage);
    let output = stage.output_for(&other, "detach", &["vda"]);
    let said = &output.stderr;
    assert!(!output.success() && said.contains("the client is the process"), "{said}");
    assert!(!path.exists(), "a refused command writes no record");
    let disk = stage.daemon.json(&["disk", "show", "web-vda"]);
    assert_eq!(disk["cache"]["mode"], "write-back", "{disk}");
    stage.run("detach", &["vda"]);
    stage.end(vm, "raw");
}

#[test]
fn without_a_record_each_refusal_says_what_to_do() {
    let stage = Stage::new();
    stage.image(IMAGE, "raw", &[]);
    let vm = stage.start(IMAGE, "raw", "");
    // The VM does not use hob.
    let said = stage.refused("detach", &[]);
    assert!(said.contains("no such disk of") && said.contains("hob attach --list"), "{said}");
    stage.run("attach", &["--size", "16M"]);
    // The record of another version of hob.
    let path = stage.scratch.path("records/web-vda.json");
    let record = fs::read_to_string(&path).expect("a record");
    fs::write(&path, record.replacen("\"version\": 1", "\"version\": 999", 1)).expect("a file");
    let said = stage.refused("detach", &[]);
    let renamed = path.with_extension("json.bad");
    assert!(said.contains("has version 999") && said.contains(renamed.to_str().expect("a path")), "{said}");
    fs::rename(&path, &renamed).expect("a file");
    stage.run("detach", &["vda"]);
    // The VM is stopped.
    stage.run("attach", &["--size", "16M"]);
    lose_the_record(&stage);
    stage.kill(vm);
    let said = stage.refused("detach", &["--stopped"]);
    assert!(said.contains("'hob disk list'") && said.contains("'hob disk remove DISK'"), "{said}");
    // QEMU was killed, and the daemon may not have noticed it yet.
    stage.daemon.ctl_when_unused(&["disk", "remove", "web-vda"]);
    stage.assert_has_no_disk();
}
