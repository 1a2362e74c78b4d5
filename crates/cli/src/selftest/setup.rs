//! The tested cache configurations, and the files of each of them.

use std::fs::File;
use std::path::PathBuf;

use anyhow::Context;
use hob_nbd::NbdUri;
use hob_nbd::uri::Address;
use tempfile::TempDir;

/// A tested cache configuration.
#[derive(Debug)]
pub(super) struct Setup {
    /// Name for the option `--setup`.
    pub(super) name: &'static str,
    /// The mode that the daemon must report.
    pub(super) mode: &'static str,
    /// Number of pool files.
    devices: usize,
    /// Lines of `[disk.cache]` in hob.toml.
    settings: &'static str,
}

/// All configurations. Together they cover both modes that put written data on flash (write-through
/// and write-back), caches with and without a journal, one and two copies of data, evicted and
/// overwritten blocks, and the presets `fast-cache`, `vsan` and `zbs`.
pub(super) const SETUPS: &[Setup] = &[
    Setup { name: "write-through", mode: "write-through", devices: 1, settings: r#"block_size = "4K""# },
    Setup {
        name: "write-back",
        mode: "write-back",
        devices: 1,
        settings: r#"mode = "write-back"
            block_size = "4K"
            dirty_start = 20
            dirty_stop = 10
            dirty_age_max = 1"#,
    },
    Setup {
        name: "two-copies",
        mode: "write-back",
        devices: 2,
        settings: r#"mode = "write-back"
            block_size = "8K"
            copies = "2-dirty"
            dirty_age_max = 2"#,
    },
    Setup {
        name: "large-blocks",
        mode: "write-back",
        devices: 2,
        settings: r#"mode = "write-back"
            block_size = "64K"
            dirty_start = 50
            dirty_stop = 20"#,
    },
    Setup {
        name: "ordered",
        mode: "write-back",
        devices: 1,
        settings: r#"mode = "write-back"
            block_size = "4K"
            ordered = true
            dirty_age_max = 1"#,
    },
    Setup {
        name: "persistent",
        mode: "write-through",
        devices: 2,
        settings: r#"block_size = "16K"
            persistent = true"#,
    },
    Setup { name: "fast-cache", mode: "write-back", devices: 2, settings: r#"preset = "fast-cache""# },
    Setup { name: "vsan", mode: "write-back", devices: 1, settings: r#"preset = "vsan""# },
    Setup { name: "zbs", mode: "write-back", devices: 2, settings: r#"preset = "zbs""# },
];

/// Directories in which one cache configuration is tested.
#[derive(Debug)]
pub(super) struct Stage {
    dir: PathBuf,
    /// Directory of the sockets. This directory is outside the test directory, because a socket
    /// path is limited to 107 bytes.
    sockets: TempDir,
}

impl Stage {
    /// Creates `dir` with a disk image and a hob.toml. `dir` must not exist.
    pub(super) fn make(dir: PathBuf, setup: &Setup, disk_bytes: u64, ring: &str) -> anyhow::Result<Stage> {
        std::fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let dir = dir.canonicalize()?;
        let sockets = tempfile::Builder::new().prefix("hob-selftest-").tempdir()?;
        let stage = Stage { dir, sockets };
        let disk = File::create_new(stage.disk()).context("cannot make the disk")?;
        disk.set_len(disk_bytes).context("cannot make the disk")?;
        std::fs::write(stage.config(), stage.toml(setup, disk_bytes, ring))
            .context("cannot write hob.toml")?;
        Ok(stage)
    }

    fn toml(&self, setup: &Setup, disk_bytes: u64, ring: &str) -> String {
        let path = |path: PathBuf| toml::Value::String(path.to_string_lossy().into_owned());
        let unix = |path: PathBuf| toml::Value::String(format!("unix:{}", path.display()));
        let devices: Vec<String> = (0..setup.devices).map(|at| path(self.flash(at)).to_string()).collect();
        // The cache is smaller than the written data, so that blocks are evicted; the pool has
        // space for copies and a journal.
        let cache_bytes = disk_bytes / 2;
        format!(
            "state_dir = {}\nlisten = [{}]\nring = \"{ring}\"\n[control]\nlisten = [{}]\n\
             [[pool]]\nname = \"pool\"\ndevices = [{}]\nsize = {}\nsegment_size = \"1M\"\n\
             [[disk]]\nname = \"disk\"\nbacking = {}\n[disk.cache]\npool = \"pool\"\nsize = {cache_bytes}\n{}\n",
            path(self.dir.join("state")),
            unix(self.nbd_socket()),
            unix(self.control_socket()),
            devices.join(", "),
            cache_bytes + (32 << 20),
            path(self.disk()),
            setup.settings,
        )
    }

    /// Returns the path of the backing.
    pub(super) fn disk(&self) -> PathBuf {
        self.dir.join("disk.img")
    }

    fn flash(&self, at: usize) -> PathBuf {
        self.dir.join(format!("flash{at}"))
    }

    /// Returns the path of hob.toml.
    pub(super) fn config(&self) -> PathBuf {
        self.dir.join("hob.toml")
    }

    /// Creates an empty directory for crash logs, which a power cut loses.
    pub(super) fn empty_memory(&self) -> std::io::Result<PathBuf> {
        let memory = self.dir.join("memory");
        match std::fs::remove_dir_all(&memory) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => std::fs::create_dir(&memory)?,
        }
        Ok(memory)
    }

    /// Log file of all daemons.
    pub(super) fn log(&self) -> PathBuf {
        self.dir.join("daemon.log")
    }

    /// Returns the last error in the log.
    pub(super) fn last_complaint(&self) -> String {
        let log = std::fs::read_to_string(self.log()).unwrap_or_default();
        let last = log.lines().rev().find_map(|line| line.split_once(" ERROR "));
        last.map_or("its log has no error".to_owned(), |(_, what)| format!("its log says: {what}"))
    }

    pub(super) fn nbd_socket(&self) -> PathBuf {
        self.sockets.path().join("nbd.sock")
    }

    pub(super) fn control_socket(&self) -> PathBuf {
        self.sockets.path().join("control.sock")
    }

    pub(super) fn uri(&self) -> NbdUri {
        NbdUri::new(Address::Unix { path: self.nbd_socket() }, "disk")
    }
}
