//! Servers that tests start and kill.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A child process that ends with its test.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn spawn(program: &str, arguments: &[&str]) -> Process {
    let child = Command::new(program).args(arguments).stderr(Stdio::null()).spawn();
    Process(child.unwrap_or_else(|error| panic!("{program} (cargo xtask test installs it): {error}")))
}

pub fn await_socket(path: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::os::unix::net::UnixStream::connect(path).is_err() {
        assert!(Instant::now() < deadline, "{} does not appear", path.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends SIGKILL to the `qemu-nbd` of an image.
pub fn kill_qemu(image: &str) {
    let children = children_of_qemu(image);
    assert_eq!(children.len(), 1);
    for child in children {
        let pid = rustix::process::Pid::from_raw(child).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }
}

/// Returns the `qemu-nbd` processes with the image on their command line.
pub fn children_of_qemu(image: &str) -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let named = processes.filter_map(|process| {
        let line = std::fs::read_to_string(process.path().join("cmdline")).ok()?;
        let pid = process.file_name().to_str()?.parse().ok()?;
        (line.starts_with("qemu-nbd") && line.contains(image)).then_some(pid)
    });
    named.collect()
}
