//! Tests of the work on a disk, with a simulated QEMU whose replies come from a function.

use super::super::fake_qemu::FakeQemu;
use super::super::record::{Method, example};
use super::*;

fn record(method: &str) -> Record {
    let method: Method = serde_json::from_value(json!(method)).unwrap();
    let parent = (method == Method::Reopen).then(|| json!({ "node-name": "image" }));
    Record { method, parent, ..example() }
}

/// Calls `test` with the [`Work`] on one disk of a VM. `answer` returns QEMU's replies; no daemon
/// runs.
fn with_work(
    record: &Record,
    answer: impl FnMut(&str) -> Value + Send + 'static,
    test: impl AsyncFnOnce(&mut Work<'_>),
) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::open(dir.path()).unwrap();
    let client = Client::new(hob_control::Endpoint::Unix("/nowhere".into()), None);
    let qemu = FakeQemu::start(answer);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut monitor = Monitor::connect(&qemu.path()).await.unwrap();
        let mut work = Work::new(&mut monitor, &client, &records, record, &Arc::default());
        work.has_no_daemon = true;
        work.root = Some("image".to_owned());
        test(&mut work).await;
    });
    qemu.asked()
}

/// Returns the answer of a running VM, whose device `vda` has the nodes `chain` below it.
fn answer(command: &str, chain: &[&str]) -> Value {
    let names: Vec<&str> = std::iter::once("vda").chain(chain.iter().copied()).collect();
    match command {
        "x-debug-query-block-graph" => {
            let nodes: Vec<Value> =
                names.iter().zip(0..).map(|(name, id)| json!({ "id": id, "name": name })).collect();
            let edge = |id: usize| {
                let kind = match names[id] {
                    "vda" => "root",
                    "overlay" if names[id + 1] == "image" => "backing",
                    _ => "file",
                };
                json!({ "parent": id, "name": kind, "child": id + 1 })
            };
            let edges: Vec<Value> = (0..names.len() - 1).map(edge).collect();
            json!({ "nodes": nodes, "edges": edges })
        }
        "query-named-block-nodes" => {
            let node = |name: &&str| {
                let driver = match *name {
                    "hob-1" => "nbd",
                    name if name.ends_with("-file") => "file",
                    _ => "raw",
                };
                json!({ "node-name": name, "drv": driver, "file": "/image", "ro": true })
            };
            chain.iter().map(node).collect()
        }
        "query-status" => json!({ "running": true, "status": "running" }),
        "query-block-jobs" | "query-block" | "qom-list" => json!([]),
        _ => json!({}),
    }
}

fn has(asked: &[String], command: &str) -> bool {
    asked.iter().any(|found| found == command)
}

const DIRECT: [&str; 2] = ["image", "image-file"];

/// Returns the answer of a VM that a killed command of hob left paused.
fn paused_answer(command: &str, chain: &[&str]) -> Value {
    match command {
        "query-status" => json!({ "running": false, "status": "paused" }),
        "qom-list" => json!([{ "name": MARK }]),
        _ => answer(command, chain),
    }
}

/// A terminal that accepts no output must not keep the VM paused.
#[test]
fn messages_wait_for_the_end_of_the_pause() {
    with_work(
        &record("reopen"),
        |command| answer(command, &DIRECT),
        async |work| {
            work.say("before".to_owned());
            assert!(work.untold.is_empty());
            work.paused_at = Some(Instant::now());
            work.say("meanwhile".to_owned());
            assert_eq!(work.untold, ["meanwhile"]);
            work.tell_rest();
            assert!(work.untold.is_empty());
        },
    );
}

#[test]
fn an_unchanged_vm_is_paused() {
    let asked = with_work(
        &record("reopen"),
        |command| answer(command, &DIRECT),
        async |work| {
            work.pause(Path::Image).await.unwrap();
        },
    );
    assert!(has(&asked, "stop") && !has(&asked, "object-del"), "{asked:?}");
}

/// hob would otherwise continue the VM while the other program relies on the pause.
#[test]
fn a_vm_that_another_program_has_paused_is_left_to_it() {
    let direct: &'static [&'static str] = &DIRECT;
    let overlay: &'static [&'static str] = &["overlay", "image", "image-file"];
    let backup = json!([{ "device": "backup1", "type": "backup" }]);
    let refused = json!({ "error": { "class": "GenericError", "desc": "busy" } });
    for (jobs, chain, expected) in [
        (json!([]), direct, "another program has paused the VM"),
        (backup, direct, "backup 'backup1'"),
        (json!([]), overlay, "vda now uses"),
        (refused, direct, "QEMU refuses query-block-jobs: busy"),
    ] {
        let paused = move |command: &str| match command {
            "query-status" => json!({ "running": false, "status": "paused" }),
            "query-block-jobs" => jobs.clone(),
            _ => answer(command, chain),
        };
        let asked = with_work(&record("reopen"), paused, async |work| {
            let error = work.pause(Path::Image).await.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        });
        assert!(!has(&asked, "stop") && has(&asked, "object-del"), "{expected}: {asked:?}");
    }
}

#[test]
fn a_job_or_snapshot_that_begins_before_the_pause_is_noticed() {
    let job = |command: &str| match command {
        "query-block-jobs" => json!([{ "device": "backup1", "type": "backup" }]),
        _ => answer(command, &DIRECT),
    };
    let asked = with_work(&record("reopen"), job, async |work| {
        let error = work.pause(Path::Image).await.unwrap_err().to_string();
        assert!(error.contains("backup 'backup1'"), "{error}");
    });
    assert!(!has(&asked, "stop"), "{asked:?}");
    for method in ["reopen", "mirror", "device"] {
        let snapshot = |command: &str| answer(command, &["overlay", "image", "image-file"]);
        let asked = with_work(&record(method), snapshot, async |work| {
            assert!(work.pause(Path::Image).await.is_err(), "{method}");
        });
        assert!(!has(&asked, "stop"), "{method}: {asked:?}");
    }
}

/// The methods `mirror` and `device` replace or reopen the root node. After a snapshot, the root
/// node is the overlay, which has the guest's latest writes.
#[test]
fn an_overlay_is_not_replaced() {
    for method in ["mirror", "device"] {
        let snapshot = |command: &str| answer(command, &["overlay", "image", "image-file"]);
        let asked = with_work(&record(method), snapshot, async |work| {
            let error = work.send_to("hob-1").await.unwrap_err().to_string();
            assert!(error.contains("another program has changed"), "{error}");
        });
        assert_eq!(
            asked.last().map(String::as_str),
            Some("x-debug-query-block-graph"),
            "{method}: {asked:?}"
        );
    }
}

/// Returns the record of another disk of the same VM, which has the device `vda` in the tests.
fn other_record(method: &str) -> Record {
    Record { disk: "web-other".to_owned(), label: "other".to_owned(), ..record(method) }
}

/// An earlier command was killed between the steps of another disk, whose image has no lock now.
#[test]
fn a_vm_stays_paused_while_another_disk_has_no_lock() {
    let attached = |command: &str| paused_answer(command, &["image", "hob-1"]);
    let asked = with_work(&record("reopen"), attached, async |work| {
        work.records.save(&other_record("reopen")).unwrap();
        let error = format!("{:#}", work.continue_guest().await.unwrap_err());
        assert!(error.contains("between its steps for the disk other"), "{error}");
        assert!(error.contains("the hob daemon does not answer"), "{error}");
    });
    assert!(!has(&asked, "cont"), "{asked:?}");
    let asked = with_work(&record("reopen"), attached, async |work| {
        work.records.save(&other_record("reopen")).unwrap();
        // This command has paused the VM, while no step of the other disk was open.
        work.paused_at = Some(Instant::now());
        work.continue_guest().await.unwrap();
    });
    assert!(has(&asked, "cont"), "{asked:?}");
}

/// After the VM continues, a block job of hob would copy old data over the guest's writes, because
/// source and target of the job are the same image.
#[test]
fn a_job_of_another_disk_is_cancelled_before_the_vm_continues() {
    let mut has_job = true;
    let vm = move |command: &str| match command {
        "query-block-jobs" if has_job => json!([{ "device": "hob-1-job", "type": "mirror" }]),
        "block-job-cancel" => {
            has_job = false;
            json!({})
        }
        _ => paused_answer(command, &DIRECT),
    };
    let asked = with_work(&record("mirror"), vm, async |work| {
        work.records.save(&other_record("mirror")).unwrap();
        work.continue_guest().await.unwrap();
    });
    let at = |command: &str| asked.iter().position(|found| found == command);
    assert!(at("block-job-cancel").is_some() && at("block-job-cancel") < at("cont"), "{asked:?}");
}

/// The job of another program may last for hours, and hob must not keep the VM paused until then.
#[test]
fn a_refused_command_continues_a_vm_that_a_killed_command_left_paused() {
    let vm = |command: &str| match command {
        "query-block-jobs" => json!([{ "device": "backup1", "type": "backup" }]),
        _ => paused_answer(command, &DIRECT),
    };
    let asked = with_work(&record("reopen"), vm, async |work| {
        let error = work.refusal(anyhow!("a block job is running")).await.to_string();
        assert_eq!(error, "a block job is running. The VM continues.");
    });
    assert!(has(&asked, "cont"), "{asked:?}");
}

/// After a migration, the VM runs on another host, and its copy here must not continue.
#[test]
fn only_a_paused_vm_continues() {
    for (status, is_continued) in [("paused", true), ("postmigrate", false), ("io-error", false)] {
        let vm = move |command: &str| match command {
            "query-status" => json!({ "running": false, "status": status }),
            _ => paused_answer(command, &DIRECT),
        };
        let asked = with_work(&record("reopen"), vm, async |work| {
            assert_eq!(work.continue_vm().await.unwrap(), is_continued);
        });
        assert_eq!(has(&asked, "cont"), is_continued, "{status}: {asked:?}");
        assert!(has(&asked, "object-del"), "{status}: {asked:?}");
    }
}

/// While a job of an interrupted command runs, it is unknown whether the VM uses hob.
#[test]
fn after_a_cancelled_job_the_vm_is_examined_again() {
    let mut has_job = true;
    let vm = move |command: &str| match command {
        "query-block-jobs" if has_job => json!([{ "device": "hob-1-job", "type": "mirror" }]),
        "block-job-cancel" => {
            has_job = false;
            json!({})
        }
        _ => paused_answer(command, &["hob-1"]),
    };
    let asked = with_work(&record("mirror"), vm, async |work| {
        // The VM uses hob, so the next step needs the daemon.
        assert!(work.pursue(Goal::Detached).await.is_err());
    });
    assert!(has(&asked, "block-job-cancel") && !has(&asked, "cont"), "{asked:?}");
}

#[test]
fn a_job_that_ends_by_itself_counts_as_cancelled() {
    let ending = |command: &str| match command {
        "block-job-cancel" => json!({ "error": { "class": "DeviceNotActive", "desc": "not found" } }),
        _ => answer(command, &DIRECT),
    };
    with_work(&record("mirror"), ending, async |work| work.cancel_job().await.unwrap());
}

/// The VM is paused when the connection ends.
#[test]
fn a_vm_whose_connection_was_lost_continues() {
    for verb in ["attach", "detach"] {
        let mut is_lost = false;
        let vm = move |command: &str| match command {
            "x-debug-query-block-graph" if !std::mem::replace(&mut is_lost, true) => Value::Null,
            _ => paused_answer(command, &DIRECT),
        };
        let asked = with_work(&record("reopen"), vm, async |work| {
            let result = if verb == "attach" { work.attach().await } else { work.detach().await };
            assert!(result.is_err(), "{verb}");
        });
        assert!(has(&asked, "cont") && has(&asked, "object-del"), "{verb}: {asked:?}");
    }
}

/// If libvirt's daemon restarts, hob repeats the command in progress, which QEMU may have carried out.
#[test]
fn a_command_that_was_carried_out_twice_has_succeeded() {
    let refuse = |command: &str, chain: &[&str], objects: Value| match command {
        "object-add" | "object-del" | "blockdev-add" | "blockdev-del" => {
            json!({ "error": { "class": "GenericError", "desc": "refused" } })
        }
        "qom-list" => objects,
        _ => answer(command, chain),
    };
    let done = move |command: &str| refuse(command, &["image", "hob-1"], json!([{ "name": MARK }]));
    with_work(&record("reopen"), done, async |work| {
        work.mark().await.unwrap();
        work.add_node().await.unwrap();
        assert!(work.unmark().await.is_err(), "QEMU still has the mark");
        assert!(work.delete_node("hob-1").await.is_err(), "QEMU still has the node");
    });
    let undone = move |command: &str| refuse(command, &DIRECT, json!([]));
    with_work(&record("reopen"), undone, async |work| {
        work.unmark().await.unwrap();
        work.delete_node("hob-1").await.unwrap();
        assert!(work.mark().await.is_err(), "QEMU has no mark");
    });
}

#[test]
fn the_message_names_the_command_for_a_vm_that_has_ended() {
    for verb in ["attach", "detach"] {
        let ends = |command: &str| match command {
            "x-debug-query-block-graph" => Value::Null,
            _ => answer(command, &DIRECT),
        };
        with_work(&record("reopen"), ends, async |work| {
            let result = if verb == "attach" { work.attach().await } else { work.detach().await };
            let error = result.unwrap_err().to_string();
            assert!(error.contains("run 'hob detach --stopped qmp:/run/web.qmp'"), "{error}");
        });
    }
}

/// The VM may have started again with another image, so hob's disk of the earlier image must not
/// replace it.
#[test]
fn an_attachment_that_qemu_has_nothing_of_is_left_over() {
    let direct: &'static [&'static str] = &DIRECT;
    let hob: &'static [&'static str] = &["image", "hob-1"];
    for (chain, expected) in [(direct, true), (hob, false)] {
        with_work(
            &record("reopen"),
            move |command| answer(command, chain),
            async |work| assert_eq!(work.is_left_over().await, expected),
        );
    }
    with_work(
        &record("reopen"),
        |command| paused_answer(command, &DIRECT),
        async |work| assert!(!work.is_left_over().await, "hob has paused this VM"),
    );
}

/// QEMU deletes a node of its start that has no name of its own together with the last user.
#[test]
fn an_attachment_whose_node_cannot_be_added_again_is_left_over() {
    for (node, expected) in [("#block1", true), ("started", false)] {
        let mut record = record("reopen");
        record.node = json!({ "node-name": node });
        with_work(
            &record,
            |command| paused_answer(command, &DIRECT),
            async |work| assert_eq!(work.is_left_over().await, expected, "{node}"),
        );
    }
}

/// libvirt gives QEMU no access to an image that the VM did not have at its start.
#[test]
fn an_image_that_qemu_cannot_open_is_noticed_before_any_step() {
    let names: &'static [&'static str] = &["image", "started"];
    let mut record = record("reopen");
    record.node = json!({ "node-name": "started" });
    record.spare = vec![json!({ "driver": "file", "node-name": "hob-1-image", "filename": "/image" })];
    for is_refused in [true, false] {
        let vm = move |command: &str| match command {
            "blockdev-add" if is_refused => {
                json!({ "error": { "class": "GenericError", "desc": "Could not open '/image': Permission denied" } })
            }
            _ => answer(command, names),
        };
        let asked = with_work(&record, vm, async |work| {
            let result = work.check_image().await;
            assert_eq!(result.is_err(), is_refused);
            if let Err(error) = result {
                let error = error.to_string();
                for part in ["Permission denied", "'chown ", "'hob detach --stopped qmp:/run/web.qmp'"] {
                    assert!(error.contains(part), "{error}");
                }
            }
        });
        assert!(!has(&asked, "stop"), "{asked:?}");
        let is_closed = asked.last().is_some_and(|command| command == "blockdev-del");
        assert_eq!(is_closed, !is_refused, "{asked:?}");
    }
}

#[test]
fn a_disk_of_hob_that_the_vm_was_started_with_is_recognized() {
    let names: &'static [&'static str] = &["image", "started"];
    for (file, expected) in [
        ("nbd+unix:///web-vda?socket=/run/hob/nbd.sock", true),
        (r#"json:{"driver": "nbd", "export": "web-vda", "server": {"type": "unix"}}"#, true),
        ("nbd+unix:///web-vdb?socket=/run/hob/nbd.sock", false),
    ] {
        let vm = move |command: &str| match command {
            "query-named-block-nodes" => json!([
                { "node-name": "image", "drv": "raw", "file": file, "ro": false },
                { "node-name": "started", "drv": "nbd", "file": file, "ro": false },
            ]),
            _ => answer(command, names),
        };
        let asked = with_work(&record("reopen"), vm, async |work| {
            assert_eq!(work.is_started_with_hob().await, expected, "{file}");
            let error = work.check(Goal::Detached).await.unwrap_err().to_string();
            assert!(error.contains("'hob detach --stopped qmp:/run/web.qmp'"), "{error}");
            assert!(error.to_lowercase().contains("stop the vm"), "{error}");
        });
        assert!(!has(&asked, "stop"), "{asked:?}");
    }
    with_work(
        &record("reopen"),
        |command| answer(command, &["image", "hob-1"]),
        async |work| assert!(!work.is_started_with_hob().await, "hob has attached this disk"),
    );
}
