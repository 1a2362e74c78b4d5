//! A state directory on a filesystem that fills while the daemon runs. The test mounts a tmpfs, and
//! needs root.

use std::time::Duration;

use conformance::mounts::Unmount;
use conformance::scratch::wait_until;
use conformance::{Scratch, Tool};

/// Maximum time until `hob health` shows how much space is left: hob looks every 10 s.
const VISIBLE_MAX: Duration = Duration::from_secs(60);

/// hob can still save its state, and says what to do before a save fails.
#[test]
fn a_nearly_full_state_directory_is_in_health_until_it_has_space() {
    let scratch = Scratch::new();
    let state = scratch.path("state");
    std::fs::create_dir(&state).unwrap();
    let _unmount = Unmount::at(&state);
    Tool::new("mount").args(["-t", "tmpfs", "-o", "size=64M", "tmpfs", &scratch.text("state")]).run();
    scratch.configure("");
    let daemon = scratch.start_daemon();
    let health = || daemon.try_ctl(&["health"]).all();
    assert!(!health().contains("state-space-low"), "{}", health());
    // 192 KiB at most stay free.
    std::fs::write(state.join("other"), vec![1; (64 << 20) - (192 << 10)]).unwrap();
    wait_until("the problem in health", VISIBLE_MAX, || health().contains("state-space-low"));
    let said = health();
    assert!(said.contains(&scratch.text("state")) && said.contains("bytes of 64 MiB are free"), "{said}");
    std::fs::File::create(scratch.path("disk.img")).unwrap().set_len(1 << 20).unwrap();
    daemon.ctl(&["disk", "add", "vm", "--backing", &scratch.text("disk.img")]);
    assert!(!health().contains("state-not-saved"), "{}", health());
    std::fs::remove_file(state.join("other")).unwrap();
    wait_until("health with space", VISIBLE_MAX, || !health().contains("state-space-low"));
    daemon.stop();
}
