//! Tests that `torture --plan` succeeds if the reader closes the pipe early, as `head` does.

use std::process::{Command, Stdio};

#[test]
fn a_plan_with_a_closed_pipe_ends_quietly() {
    let mut torture = Command::new(env!("CARGO_BIN_EXE_torture"))
        .args(["--plan", "--seed", "1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(torture.stdout.take());
    let output = torture.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{:?}: {said}", output.status);
}
