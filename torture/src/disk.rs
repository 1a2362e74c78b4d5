//! The disks of a round: their backings, and the guests that use them.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use conformance::scratch::wait_for;
use conformance::{Loop, Tool};
use rustix::process::{Pid, Signal};

use crate::behaviour::Behaviour;
use crate::files::{File, Files};
use crate::guest::Shared;
use crate::medium::{Medium, Sabotage};
use crate::server::Server;
use crate::setup::{BackingKind, DISK_BYTES, Plan};

/// Backing of a disk.
pub(crate) enum Backing {
    Server(Server),
    File(PathBuf),
    /// A file on the test file system, with a loop device if the daemon uses the file through one.
    /// The loop device is dropped before its file.
    Volatile(Option<Loop>, Arc<File>, Files),
    /// A qcow2 image.
    Image(PathBuf),
}

impl Backing {
    /// Creates the backing of disk number `at` of a round in the directory `dir`.
    pub(crate) fn create(plan: &Plan, at: usize, dir: &Path, sabotage: Option<Sabotage>) -> Result<Self> {
        let medium = || {
            let mut medium = Medium::new(DISK_BYTES, plan.seed ^ at as u64);
            medium.sabotage = sabotage;
            medium
        };
        Ok(match plan.disks[at].backing {
            BackingKind::VolatileNbd { fua } => {
                let path = dir.join(format!("backing{at}.sock"));
                Backing::Server(Server::start(&path, medium(), fua).context("start a backing")?)
            }
            BackingKind::File => {
                let path = dir.join(format!("disk{at}.raw"));
                std::fs::File::create_new(&path)?.set_len(DISK_BYTES)?;
                Backing::File(path)
            }
            kind @ (BackingKind::VolatileFile | BackingKind::Loop) => {
                let files = Files::mount(&dir.join(format!("files{at}")), plan.seed)
                    .context("mount the test file system")?;
                let file = files.add("disk", medium());
                let device = (kind == BackingKind::Loop).then(|| Loop::on(&files.path("disk"), true));
                Backing::Volatile(device, file, files)
            }
            BackingKind::Image => {
                let path = dir.join(format!("disk{at}.qcow2"));
                let create = Tool::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&path);
                let created = create.arg(DISK_BYTES.to_string()).output();
                anyhow::ensure!(created.success(), "create an image: {}", created.all());
                Backing::Image(path)
            }
        })
    }

    /// Returns the faults of the backing; `None` if the test cannot inject faults.
    pub(crate) fn behaviour(&self) -> Option<&Behaviour> {
        match self {
            Backing::Server(server) => Some(server.behaviour()),
            Backing::Volatile(_, file, _) => Some(file.behaviour()),
            Backing::File(_) | Backing::Image(_) => None,
        }
    }

    /// Returns the backing's location for the daemon's configuration.
    pub(crate) fn location(&self) -> String {
        match self {
            Backing::Server(server) => server.uri(),
            Backing::File(path) | Backing::Image(path) => path.display().to_string(),
            Backing::Volatile(None, _, files) => files.path("disk").display().to_string(),
            Backing::Volatile(Some(device), ..) => device.device().to_owned(),
        }
    }

    /// Writes durably to the backing, bypassing the daemon.
    pub(crate) fn change(&self, offset: u64, bytes: &[u8]) {
        match self {
            Backing::Server(server) => server.medium().write(offset, bytes, true),
            Backing::File(path) => {
                let file = std::fs::OpenOptions::new().write(true).open(path).expect("the backing is there");
                file.write_all_at(bytes, offset).and_then(|()| file.sync_all()).expect("write a backing");
            }
            Backing::Volatile(_, file, _) => {
                file.medium().write(offset, bytes, true);
                file.touch();
            }
            Backing::Image(_) => unreachable!("the plan gives no such fault to images"),
        }
    }

    /// Returns the durable content of the backing, which the daemon does not use any more.
    pub(crate) fn contents(&self) -> Vec<u8> {
        match self {
            Backing::Server(server) => server.medium().durable().to_vec(),
            Backing::File(path) => std::fs::read(path).expect("the backing is there"),
            Backing::Volatile(_, file, _) => file.medium().durable().to_vec(),
            Backing::Image(path) => {
                // The image is locked until its `qemu-nbd` has ended.
                wait_for("the end of qemu-nbd", || image_servers(path).is_empty());
                let raw = path.with_extension("raw");
                Tool::new("qemu-img").args(["convert", "-f", "qcow2", "-O", "raw"]).arg(path).arg(&raw).run();
                std::fs::read(raw).expect("qemu-img has written the file")
            }
        }
    }
}

/// Returns the `qemu-nbd` processes that have an image on their command lines.
pub(crate) fn image_servers(image: &Path) -> Vec<Pid> {
    let image = image.as_os_str().as_bytes();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let servers = processes.filter_map(|process| {
        let id = process.file_name().to_str()?.parse().ok()?;
        let line = std::fs::read(process.path().join("cmdline")).ok()?;
        let is_server =
            line.starts_with(b"qemu-nbd\0") && line.windows(image.len()).any(|part| part == image);
        Pid::from_raw(id).filter(|_| is_server)
    });
    servers.collect()
}

/// Kills processes with SIGKILL. A process that has just ended is no error.
pub(crate) fn kill_all(processes: &[Pid]) {
    for process in processes {
        let _ = rustix::process::kill_process(*process, Signal::KILL);
    }
}

/// A disk of the daemon under test.
pub(crate) struct Disk {
    pub(crate) name: String,
    pub(crate) backing: Backing,
    pub(crate) guests: Vec<Arc<Shared>>,
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use conformance::process::Process;

    use super::*;

    #[test]
    fn the_server_of_an_image_is_found_and_killed() {
        let dir = tempfile::tempdir().unwrap();
        let [image, other] = ["disk2.qcow2", "disk3.qcow2"].map(|name| dir.path().join(name));
        Tool::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("1M").run();
        let mut command = Command::new("qemu-nbd");
        command.arg("--persistent").arg("--socket").arg(dir.path().join("socket"));
        command.args(["--format", "qcow2"]).arg(&image);
        let mut server = Process::start("qemu-nbd", &mut command).unwrap();
        wait_for("qemu-nbd", || !image_servers(&image).is_empty());
        assert_eq!(image_servers(&image), [Pid::from_raw(server.pid() as i32).unwrap()]);
        assert!(image_servers(&other).is_empty());
        kill_all(&image_servers(&image));
        assert!(!server.finish(Duration::from_secs(60)).success());
        assert!(image_servers(&image).is_empty());
    }
}
