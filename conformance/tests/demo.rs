//! `hob demo`, the first command that a new user runs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use conformance::process::{Process, descendants};
use conformance::scratch::wait_until;
use conformance::{Scratch, hob};
use rustix::process::Signal;

fn svgs(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            svgs(&path, found);
        } else if path.extension().is_some_and(|e| e == "svg") {
            found.push(path);
        }
    }
}

#[test]
fn demo_ends_in_a_minute_with_a_table_and_a_picture() {
    let scratch = Scratch::new();
    for dir in ["here", "tmp"] {
        std::fs::create_dir(scratch.path(dir)).unwrap();
    }
    let start = Instant::now();
    let mut command = Command::new(hob::binary());
    command.arg("demo").current_dir(scratch.path("here")).env("TMPDIR", scratch.path("tmp"));
    let mut demo = Process::start("hob demo", &mut command).unwrap();
    let pid = demo.pid();
    // Alone, the demonstration takes less than a minute. This host runs other tests at the same
    // time.
    let output = demo.finish(Duration::from_secs(240));
    assert!(output.success(), "{:?} after {:?}: {}", output.status, start.elapsed(), output.all());
    println!("{}", output.stdout);
    let said = output.stdout.to_lowercase();
    for word in ["mean", "p50", "p99", "iops", "hit"] {
        assert!(said.contains(word), "no {word} in: {}", output.stdout);
    }
    let mut pictures = Vec::new();
    svgs(scratch.dir(), &mut pictures);
    let named = output.stdout.split_whitespace().find(|w| w.trim_end_matches('.').ends_with(".svg"));
    let named = named.unwrap_or_else(|| panic!("the picture is not named: {}", output.stdout));
    let picture = pictures.first().unwrap_or_else(|| panic!("no picture; it said {named}"));
    let text = std::fs::read_to_string(picture).unwrap();
    assert!(text.contains("<svg") && text.contains("</svg>"), "{} is no picture", picture.display());
    assert!(descendants(pid).is_empty(), "something is left running");
}

/// The disk and the pool of the demonstration have 640 MiB.
#[test]
fn an_interrupted_demo_leaves_no_files() {
    for (signal, is_measuring) in [(Signal::INT, false), (Signal::TERM, false), (Signal::TERM, true)] {
        let scratch = Scratch::new();
        std::fs::create_dir(scratch.path("tmp")).unwrap();
        let files = || std::fs::read_dir(scratch.path("tmp")).unwrap().count();
        let mut command = Command::new(hob::binary());
        command.arg("demo").current_dir(scratch.dir()).env("TMPDIR", scratch.path("tmp"));
        let mut demo = Process::start("hob demo", &mut command).unwrap();
        wait_until("the start", Duration::from_secs(120), || {
            files() > 0 && (!is_measuring || demo.stdout().contains("A 512 MiB disk"))
        });
        demo.signal(signal);
        let output = demo.finish(Duration::from_secs(120));
        let said = output.all();
        assert!(output.status.is_some() && !output.success(), "{signal:?}: {said}");
        assert!(said.contains("nothing was left behind"), "{signal:?}: {said}");
        assert_eq!(files(), 0, "{signal:?}: {said}");
    }
}

#[test]
fn a_demo_that_cannot_write_its_picture_ends_before_it_measures() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("tmp")).unwrap();
    let mut command = Command::new(hob::binary());
    command.args(["demo", "--picture", "/proc/demo.svg"]).env("TMPDIR", scratch.path("tmp"));
    let output = Process::start("hob demo", &mut command).unwrap().finish(Duration::from_secs(240));
    let said = output.all();
    assert!(!output.success() && said.contains("cannot write the picture to /proc/demo.svg"), "{said}");
    assert!(!said.contains("requests in"), "{said}");
}
