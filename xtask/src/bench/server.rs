//! The servers a bench compares, the CPU time they use, and hob's own word on its hits.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use conformance::Unmount;
use conformance::process::{Process, descendants};
use conformance::stats::Stats;

use super::fio::Target;
use crate::shell::Interrupt;

/// How long a server may take to open its socket.
const READY_MAX: Duration = Duration::from_secs(60);

/// Something fio can be pointed at.
#[derive(Debug)]
pub(crate) struct Server {
    /// As it stands in the table.
    pub(crate) name: &'static str,
    /// What fio is told.
    pub(crate) target: Target,
    /// The process behind it; a bare file has none.
    process: Option<Process>,
    /// hob's binary and control address, when this is hob.
    control: Option<(PathBuf, String)>,
    /// Its cache is emptied before each run.
    is_cold: bool,
    /// Takes a file away that a process which is killed leaves behind; dropped after the process.
    unmount: Option<Unmount>,
}

/// The name of the server everything else is compared with.
pub(crate) const HOB: &str = "hob";

/// The name of qemu-storage-daemon, whose disks are files as hob's are.
pub(crate) const QEMU_FUSE: &str = "qemu fuse";

impl Server {
    /// `hob serve` with everything in `dir`: the disk `data`, a pool that holds all of it and more.
    pub(crate) fn hob(
        binary: &Path,
        dir: &Path,
        data: &Path,
        cache_bytes: u64,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let (mut command, control) = serve(binary, dir, data, cache_bytes);
        let socket = dir.join("hob.sock");
        command.arg("--listen").arg(format!("unix:{}", socket.display()));
        let mut server = Self::start(HOB, &mut command, &socket, "disk", interrupt)?;
        server.control = Some((binary.to_owned(), control));
        Ok(server)
    }

    /// The same, used through vhost-user-blk, with `ram_bytes` of memory above flash.
    pub(crate) fn hob_vhost_user(
        binary: &Path,
        dir: &Path,
        data: &Path,
        cache_bytes: u64,
        ram_bytes: u64,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let (mut command, control) = serve(binary, dir, data, cache_bytes);
        let socket = dir.join("hob-vhost.sock");
        command.arg("--vhost-user").arg(&socket).args(["--ram", &ram_bytes.to_string()]);
        let mut server = Self::start(HOB, &mut command, &socket, "disk", interrupt)?;
        server.control = Some((binary.to_owned(), control));
        server.target = Target::VhostUser(socket);
        Ok(server)
    }

    /// `qemu-storage-daemon` with O_DIRECT and io_uring on `data`, used through vhost-user-blk.
    pub(crate) fn storage_daemon(dir: &Path, data: &Path, interrupt: &Interrupt) -> Result<Self> {
        let socket = dir.join("storage-daemon.sock");
        let mut command = Command::new("/usr/bin/env");
        let file =
            format!("driver=file,node-name=data,filename={},cache.direct=on,aio=io_uring", data.display());
        let export = format!(
            "type=vhost-user-blk,id=e,node-name=data,writable=on,addr.type=unix,addr.path={}",
            socket.display()
        );
        command.args(["qemu-storage-daemon", "--blockdev", &file, "--export", &export]);
        let mut server = Self::start("storage-daemon", &mut command, &socket, "", interrupt)?;
        server.target = Target::VhostUser(socket);
        Ok(server)
    }

    /// `hob` writing back to one pool device or to two, with as many copies of what is dirty.
    pub(crate) fn write_back(
        binary: &Path,
        dir: &Path,
        data: &Path,
        cache_bytes: u64,
        copies: u64,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let at = |name: &str| dir.join(format!("hob-{copies}.{name}"));
        let control = format!("unix:{}", at("ctl").display());
        let listen = format!("unix:{}", at("sock").display());
        let pools = ["a", "b"].map(at);
        // Room for the cache, its journals, and those of a change.
        let device_bytes = cache_bytes + cache_bytes / 4 + (256 << 20);
        let devices: Vec<String> =
            pools[..copies as usize].iter().map(|p| format!("{:?}", p.display().to_string())).collect();
        let config = format!(
            "listen = [\"{listen}\"]\nstate_dir = {:?}\n\n[control]\nlisten = [\"{control}\"]\n\n[[pool]]\nname = \"flash\"\ndevices = [{}]\nsize = \"{device_bytes}\"\n\n\
             [[disk]]\nname = \"disk\"\nbacking = {:?}\n[disk.cache]\npool = \"flash\"\nsize = \"{}\"\npreset = \"auto\"\ncopies = \"{}\"\n",
            at("state").display().to_string(),
            devices.join(", "),
            data.display().to_string(),
            cache_bytes * copies,
            if copies == 2 { "2-dirty" } else { "1" },
        );
        std::fs::write(at("toml"), config).context("write a configuration")?;
        let mut command = Command::new(binary);
        command.arg("daemon").arg("--config").arg(at("toml"));
        let name = if copies == 2 { "hob, 2 copies" } else { HOB };
        let mut server = Self::start(name, &mut command, &at("sock"), "disk", interrupt)?;
        server.control = Some((binary.to_owned(), control));
        Ok(server)
    }

    /// `qemu-nbd` with O_DIRECT and io_uring on `data`.
    pub(crate) fn qemu_nbd(dir: &Path, data: &Path, interrupt: &Interrupt) -> Result<Self> {
        let socket = dir.join("qemu.sock");
        let mut command = Command::new("/usr/bin/env");
        command.args(["qemu-nbd", "--persistent", "--shared=8", "--export-name=disk"]);
        command.args(["--cache=none", "--aio=io_uring", "--format=raw"]);
        command.arg("--socket").arg(&socket).arg(data);
        Self::start("qemu-nbd", &mut command, &socket, "disk", interrupt)
    }

    /// `nbdkit file` on `data`, with nbdkit's cache in front of it or without.
    pub(crate) fn nbdkit(dir: &Path, data: &Path, cache: bool, interrupt: &Interrupt) -> Result<Self> {
        let (name, file) = if cache { ("nbdkit cache", "kitc.sock") } else { ("nbdkit file", "kit.sock") };
        let socket = dir.join(file);
        let mut command = Command::new("/usr/bin/env");
        // The cache filter keeps its file in TMPDIR.
        command.env("TMPDIR", dir);
        command.args(["nbdkit", "--foreground", "--exit-with-parent", "--unix"]).arg(&socket);
        if cache {
            command.arg("--filter=cache");
        }
        command.arg("file").arg(data);
        if cache {
            command.arg("cache-on-read=true");
        }
        Self::start(name, &mut command, &socket, "", interrupt)
    }

    /// As [`Server::hob`], its disk a file.
    pub(crate) fn hob_fuse(
        binary: &Path,
        dir: &Path,
        data: &Path,
        cache_bytes: u64,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let file = dir.join("hob.img");
        let (mut command, control) = serve(binary, dir, data, cache_bytes);
        let socket = dir.join("hob.sock");
        command.arg("--fuse").arg(&file).arg("--listen").arg(format!("unix:{}", socket.display()));
        // It is mounted before NBD clients are let in.
        let mut server = Self::mounted(HOB, &mut command, &file, &socket, interrupt)?;
        server.control = Some((binary.to_owned(), control));
        Ok(server)
    }

    /// `qemu-storage-daemon` with O_DIRECT and io_uring on `data`, exported as a file.
    pub(crate) fn qemu_fuse(dir: &Path, data: &Path, interrupt: &Interrupt) -> Result<Self> {
        let (file, pid) = (dir.join("qemu.img"), dir.join("qemu.pid"));
        fs::write(&file, []).context("make a file to mount on")?;
        let mut command = Command::new("/usr/bin/env");
        command.arg("qemu-storage-daemon").arg("--pidfile").arg(&pid);
        let blockdev = "driver=file,node-name=data,cache.direct=on,aio=io_uring,filename=";
        command.arg("--blockdev").arg(format!("{blockdev}{}", data.display()));
        let export = "type=fuse,id=export,node-name=data,writable=on,mountpoint=";
        command.arg("--export").arg(format!("{export}{}", file.display()));
        // Its process number is the last thing that it writes before it serves.
        Self::mounted(QEMU_FUSE, &mut command, &file, &pid, interrupt)
    }

    /// A server that mounts `file`, and has done so when `sign` is there.
    fn mounted(
        name: &'static str,
        command: &mut Command,
        file: &Path,
        sign: &Path,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let unmount = Unmount::at(file);
        let mut server = Self::start(name, command, sign, "", interrupt)?;
        server.target = Target::Mounted(file.display().to_string());
        server.unmount = Some(unmount);
        Ok(server)
    }

    /// `data` itself, without any server.
    pub(crate) fn bare(data: &Path) -> Self {
        let target = Target::File(data.display().to_string());
        Self { name: "bare file", target, process: None, control: None, is_cold: false, unmount: None }
    }

    /// An image of a Ceph cluster, through librbd in fio itself.
    pub(crate) fn librbd(name: &'static str, image: &'static str, conf: &Path) -> Self {
        let target = Target::Rbd { image, conf: conf.display().to_string() };
        Self { name, target, process: None, control: None, is_cold: false, unmount: None }
    }

    /// The same, whose cache is emptied before each run.
    pub(crate) fn cold(self) -> Self {
        Self { is_cold: true, ..self }
    }

    /// What is to be done before a run.
    pub(crate) fn prepare(&self) -> Result<()> {
        let (true, Some((binary, control))) = (self.is_cold, &self.control) else { return Ok(()) };
        let args = ["cache", "clear", "disk", "--control", control];
        crate::shell::output(Command::new(binary).args(args)).map(drop)
    }

    fn start(
        name: &'static str,
        command: &mut Command,
        socket: &Path,
        export: &str,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let mut process = Process::start(name, command).with_context(|| format!("start {name}"))?;
        let start = Instant::now();
        while !socket.exists() {
            interrupt.check()?;
            if let Some(status) = process.poll() {
                bail!("{name} ended ({status}) instead of serving: {}", process.stderr());
            }
            if start.elapsed() > READY_MAX {
                bail!("{name} opened no socket in {READY_MAX:?}: {}", process.stderr());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
        let (target, process) = (Target::Uri(uri), Some(process));
        Ok(Self { name, target, process, control: None, is_cold: false, unmount: None })
    }

    /// CPU time of the server and everything it started, all threads, user and system.
    pub(crate) fn cpu(&self) -> Result<Option<Duration>> {
        let Some(process) = &self.process else { return Ok(None) };
        let mut ticks = 0;
        for pid in std::iter::once(process.pid()).chain(descendants(process.pid())) {
            ticks += cpu_ticks(pid)?;
        }
        let seconds = ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
        Ok(Some(Duration::from_secs_f64(seconds)))
    }

    /// hob's counters; nothing for other servers.
    pub(crate) fn stats(&self) -> Result<Option<Stats>> {
        let Some((binary, control)) = &self.control else { return Ok(None) };
        let args = ["stats", "disk", "-o", "json", "--control", control];
        let text = crate::shell::output(Command::new(binary).args(args))?;
        Stats::parse(&text).map(Some).map_err(|e| anyhow::anyhow!("hob stats: {e}"))
    }
}

/// `hob serve` but for its ways in, and where it is controlled.
fn serve(binary: &Path, dir: &Path, data: &Path, cache_bytes: u64) -> (Command, String) {
    let control = format!("unix:{}", dir.join("hob.ctl").display());
    let mut command = Command::new(binary);
    command.arg("serve").arg("--disk").arg(data).arg("--pool").arg(dir.join("hob.pool"));
    command.args(["--size", &cache_bytes.to_string(), "--block-size", "4K", "--control", &control]);
    (command, control)
}

/// `utime + stime` of a process: fields 14 and 15 of `/proc/PID/stat`, the time of threads that
/// have ended included.
fn cpu_ticks(pid: u32) -> Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).context("a server has died")?;
    // The second field is a name in parentheses that may hold spaces; the third comes after it.
    let (_, rest) = stat.rsplit_once(')').context("a name in /proc/PID/stat")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let field =
        |n: usize| -> Result<u64> { Ok(fields.get(n - 3).context("a short /proc/PID/stat")?.parse()?) };
    Ok(field(14)? + field(15)?)
}
