//! A disk of the database benchmark, from its backing to the mounted file system, and the limit of
//! its page cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use conformance::{Daemon, Delays, Loop, Postgres, SlowServer, Unmount};

use super::workload::Scale;
use crate::shell;

/// Storage of a benchmark disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// hob without a cache, on the slow backing.
    NoCache,
    /// hob with a cache of preset `vfrc`.
    Vfrc,
    /// hob with a cache of preset `auto`.
    Auto,
    /// A local file without hob.
    Flash,
}

impl Way {
    pub(crate) const ALL: [Self; 4] = [Self::NoCache, Self::Vfrc, Self::Auto, Self::Flash];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::NoCache => "no cache",
            Self::Vfrc => "vfrc",
            Self::Auto => "auto",
            Self::Flash => "local flash",
        }
    }

    /// Returns the name of the disk's directory.
    pub(crate) fn key(self) -> &'static str {
        match self {
            Self::NoCache => "none",
            Self::Vfrc => "vfrc",
            Self::Auto => "auto",
            Self::Flash => "flash",
        }
    }
}

/// A mounted disk with a PostgreSQL cluster whose server is stopped. The fields are dropped in
/// their order.
pub(crate) struct Disk {
    pub(crate) way: Way,
    pub(crate) postgres: Option<Postgres>,
    pub(crate) group: MemoryGroup,
    at: PathBuf,
    _unmount: Unmount,
    device: Loop,
    _unmount_file: Option<Unmount>,
    daemon: Option<Daemon>,
    _backing: Option<SlowServer>,
}

/// Maximum time to create the database. A backing with slow flushes and no cache needs minutes.
const INITIALIZE_MAX: Duration = Duration::from_secs(900);

impl Disk {
    /// Creates the disk in `dir`. The file `backing` has the data of the disk's backing.
    pub(crate) fn new(
        way: Way,
        hob: &Path,
        dir: &Path,
        backing: &Path,
        delays: Delays,
        scale: &Scale,
    ) -> Result<Self> {
        fs::create_dir(dir).with_context(|| format!("create {}", dir.display()))?;
        let image = if way == Way::Flash { dir.join("image") } else { backing.to_owned() };
        fs::File::create(&image)?.set_len(scale.disk_bytes)?;
        let (mut server, mut daemon, mut unmount_file) = (None, None, None);
        let file = if way == Way::Flash {
            image
        } else {
            server = Some(SlowServer::start(&dir.join("backing.sock"), &image, delays));
            fs::write(dir.join("hob.toml"), config(way, dir, scale))?;
            unmount_file = Some(Unmount::at(&dir.join("file")));
            let started =
                Daemon::start_program(hob, &dir.join("hob.toml"), &dir.join("ctl.sock")).with_client(hob);
            // The daemon answers only when its disks are present.
            started.ctl(&["disk", "list"]);
            daemon = Some(started);
            dir.join("file")
        };
        let device = Loop::on(&file, true);
        shell::run(Command::new("mkfs.ext4").args(["-q", "-F", "-E", "nodiscard", device.device()]))?;
        let at = dir.join("mnt");
        fs::create_dir(&at)?;
        let group = MemoryGroup::new(way.key(), scale.memory_bytes)?;
        let unmount = Unmount::at(&at);
        let mut disk = Self {
            way,
            postgres: None,
            group,
            at,
            _unmount: unmount,
            device,
            _unmount_file: unmount_file,
            daemon,
            _backing: server,
        };
        disk.mount()?;
        let mut postgres = Postgres::create(&disk.at.join("postgres"));
        let rows = scale.pgbench_scale.to_string();
        let pgbench = postgres.client("pgbench").limit(INITIALIZE_MAX);
        pgbench.args(["--initialize", "--quiet", "--scale", &rows, "postgres"]).run();
        postgres.stop();
        disk.postgres = Some(postgres);
        Ok(disk)
    }

    /// Returns a path on the disk's file system.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.at.join(name)
    }

    /// Remounts the file system, which empties its page cache.
    pub(crate) fn forget_page_cache(&mut self) -> Result<()> {
        shell::output(Command::new("umount").arg(&self.at))?;
        self.mount()
    }

    /// Returns the bytes that hob has destaged, if hob serves the disk.
    pub(crate) fn destaged_bytes(&self) -> Option<f64> {
        self.daemon.as_ref()?.stats("db").number("destaged_bytes")
    }

    fn mount(&self) -> Result<()> {
        let mut command = Command::new("mount");
        shell::output(command.args(["-o", "noatime", self.device.device()]).arg(&self.at)).map(|_| ())
    }
}

fn config(way: Way, dir: &Path, scale: &Scale) -> String {
    let at = |name: &str| dir.join(name).display().to_string();
    let disk = format!(
        "state_dir = {:?}\n[control]\nlisten = [\"unix:{}\"]\n[[disk]]\nname = \"db\"\n\
         backing = \"nbd+unix:///?socket={}\"\nfuse = {:?}\n",
        at("state"),
        at("ctl.sock"),
        at("backing.sock"),
        at("file"),
    );
    if way == Way::NoCache {
        return disk;
    }
    let cache_bytes = scale.cache_bytes;
    // The pool has room for the cache, its journal, and the journal of a cache change.
    let pool_bytes = cache_bytes + cache_bytes / 4 + (256 << 20);
    let cache = format!("[disk.cache]\npool = \"flash\"\nsize = {cache_bytes}\npreset = {:?}\n", way.name());
    let pool = format!("[[pool]]\nname = \"flash\"\ndevices = [{:?}]\nsize = {pool_bytes}\n", at("pool"));
    disk + &cache + &pool
}

/// A control group that limits the page cache of its processes. Dropping this value removes the
/// group.
pub(crate) struct MemoryGroup(PathBuf);

impl MemoryGroup {
    fn new(name: &str, bytes: u64) -> Result<Self> {
        let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        let (root, limit) = if unified { ("", "memory.max") } else { ("memory/", "memory.limit_in_bytes") };
        if unified {
            // The memory controller may be enabled already.
            let _ = fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
        }
        let group = Self(format!("/sys/fs/cgroup/{root}hob-bench-{}-{name}", std::process::id()).into());
        fs::create_dir(&group.0).with_context(|| format!("make the control group {}", group.0.display()))?;
        fs::write(group.0.join(limit), bytes.to_string()).context("limit the memory of a control group")?;
        Ok(group)
    }

    /// Moves a process and its future children into the control group.
    pub(crate) fn take(&self, pid: u32) -> Result<()> {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).context("move a process to a control group")
    }

    /// Returns a command that runs in the control group.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.0.join("cgroup.procs")).arg(program);
        command
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // All processes of the group have ended.
        let _ = fs::remove_dir(&self.0);
    }
}
