//! The disks of a round: their backings, and the guests that use them.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use conformance::Loop;

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
        })
    }

    /// Returns the faults of the backing; `None` if the test cannot inject faults.
    pub(crate) fn behaviour(&self) -> Option<&Behaviour> {
        match self {
            Backing::Server(server) => Some(server.behaviour()),
            Backing::Volatile(_, file, _) => Some(file.behaviour()),
            Backing::File(_) => None,
        }
    }

    /// Returns the backing's location for the daemon's configuration.
    pub(crate) fn location(&self) -> String {
        match self {
            Backing::Server(server) => server.uri(),
            Backing::File(path) => path.display().to_string(),
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
        }
    }

    /// Returns the durable content of the backing.
    pub(crate) fn contents(&self) -> Vec<u8> {
        match self {
            Backing::Server(server) => server.medium().durable().to_vec(),
            Backing::File(path) => std::fs::read(path).expect("the backing is there"),
            Backing::Volatile(_, file, _) => file.medium().durable().to_vec(),
        }
    }
}

/// A disk of the daemon under test.
pub(crate) struct Disk {
    pub(crate) name: String,
    pub(crate) backing: Backing,
    pub(crate) guests: Vec<Arc<Shared>>,
}
