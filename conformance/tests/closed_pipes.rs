//! The reader of hob's output may close its end at any time: commands exit quietly, and a daemon continues.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use conformance::Scratch;
use conformance::data::empty_file;
use conformance::hob::{binary, command};
use conformance::scratch::wait_for;

/// Runs hob, reads at most `lines` lines of its output, and closes the pipe. Returns the status and
/// standard error.
fn headed(args: &[&str], lines: usize) -> (Option<i32>, String) {
    let mut hob = Command::new(binary())
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(hob.stdout.take().unwrap());
    for _ in 0..lines {
        out.read_line(&mut String::new()).unwrap();
    }
    drop(out);
    let output = hob.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_command_with_a_closed_pipe_ends_quietly() {
    let scratch = Scratch::new();
    let trace = scratch.text("t.hob");
    assert!(command(&["lab", "generate", "zipf", "requests=200000", "--out", &trace]).success());
    for (args, lines) in [
        (&["completions", "bash"][..], 0),
        (&["--help"], 0),
        (&["lab", "generate", "--list"], 0),
        (&["lab", "import", &trace, "-", "--to", "csv"], 1),
        (&["lab", "import", &trace, "-"], 0),
    ] {
        let (status, said) = headed(args, lines);
        assert_eq!(status, Some(0), "hob {args:?}: {said}");
        assert!(!said.contains("panicked") && !said.contains("ipe"), "hob {args:?}: {said}");
    }
}

#[test]
fn a_daemon_continues_when_the_reader_of_its_log_is_gone() {
    let scratch = Scratch::new();
    let (control, image) = (scratch.text("ctl.sock"), scratch.path("disk.img"));
    empty_file(&image, 1 << 20);
    scratch.configure("");
    let mut daemon = Command::new(binary())
        .args(["daemon", "--config", &scratch.text("hob.toml")])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(daemon.stderr.take());
    let at = format!("unix:{control}");
    let ask = |args: &[&str]| command(&[args, &["--control", &at]].concat());
    wait_for("the daemon answers", || ask(&["disk", "list"]).success());
    let image = image.to_string_lossy().into_owned();
    assert!(ask(&["disk", "add", "vm", "--backing", &image]).success(), "it logs that");
    assert!(!ask(&["disk", "add", "no", "--backing", "/nonexistent"]).success(), "and that");
    assert!(ask(&["disk", "show", "vm"]).success());
    assert!(daemon.try_wait().unwrap().is_none(), "it runs");
    daemon.kill().unwrap();
    daemon.wait().unwrap();
}
