//! Starts the servers that a benchmark compares, and reads their CPU time and hob's hit counters.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use conformance::Unmount;
use conformance::process::{Process, descendants};
use conformance::stats::Stats;

use super::fio::Target;
use super::vhost::DriverKind;
use crate::shell::Interrupt;

/// Maximum time until a server opens its socket.
const READY_MAX: Duration = Duration::from_secs(60);

/// A server that fio measures.
#[derive(Debug)]
pub(crate) struct Server {
    /// Name of the server in the table.
    pub(crate) name: &'static str,
    /// Target for fio.
    pub(crate) target: Target,
    /// Process of the server; `None` for a bare file, and for librbd, which runs inside fio.
    process: Option<Process>,
    /// hob binary and control address, if the server is hob.
    control: Option<(PathBuf, String)>,
    /// True if the server's cache is emptied before each run.
    is_cold: bool,
    /// Unmounts the server's file when this value is dropped. A killed server leaves its file
    /// mounted, so this field is dropped after `process`.
    unmount: Option<Unmount>,
}

/// Name of hob, with which all other servers are compared.
pub(crate) const HOB: &str = "hob";

/// Name of an earlier hob binary.
pub(crate) const HOB_BEFORE: &str = "hob before";

/// Name of qemu-storage-daemon with FUSE exports.
pub(crate) const QEMU_FUSE: &str = "qemu fuse";

impl Server {
    /// Starts `hob serve` with all files in `dir`: the disk `data`, and a pool that is larger than
    /// the data.
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
        let server = Self::start(HOB, &mut command, &socket, "disk", interrupt)?;
        Ok(server.controlled(binary, control))
    }

    /// Starts `hob serve` for use through vhost-user-blk, with a memory tier of `ram_bytes` bytes.
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
        server.target = Target::VhostUser(socket, DriverKind::Own);
        Ok(server.controlled(binary, control))
    }

    /// Starts `qemu-storage-daemon` with O_DIRECT and io_uring on `data`, for use through
    /// vhost-user-blk.
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
        server.target = Target::VhostUser(socket, DriverKind::Own);
        Ok(server)
    }

    /// Starts hob in write-back mode on one or two pool devices, with one copy of dirty data on
    /// each device.
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
        // Each device has room for the cache, its journal, and the journal of a cache change.
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
        let server = Self::start(name, &mut command, &at("sock"), "disk", interrupt)?;
        Ok(server.controlled(binary, control))
    }

    /// Starts `qemu-nbd` with O_DIRECT and io_uring on `data`.
    pub(crate) fn qemu_nbd(dir: &Path, data: &Path, interrupt: &Interrupt) -> Result<Self> {
        let socket = dir.join("qemu.sock");
        let mut command = Command::new("/usr/bin/env");
        command.args(["qemu-nbd", "--persistent", "--shared=8", "--export-name=disk"]);
        command.args(["--cache=none", "--aio=io_uring", "--format=raw"]);
        command.arg("--socket").arg(&socket).arg(data);
        Self::start("qemu-nbd", &mut command, &socket, "disk", interrupt)
    }

    /// Starts `nbdkit file` on `data`, with or without nbdkit's cache.
    pub(crate) fn nbdkit(dir: &Path, data: &Path, cache: bool, interrupt: &Interrupt) -> Result<Self> {
        let (name, file) = if cache { ("nbdkit cache", "kitc.sock") } else { ("nbdkit file", "kit.sock") };
        let socket = dir.join(file);
        let mut command = Command::new("/usr/bin/env");
        // nbdkit's cache filter stores its file in TMPDIR.
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

    /// Starts hob with the disk as a FUSE file.
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
        // hob mounts the file before it accepts NBD clients.
        let server = Self::mounted(HOB, &mut command, &file, &socket, interrupt)?;
        Ok(server.controlled(binary, control))
    }

    /// Starts `qemu-storage-daemon` with O_DIRECT and io_uring on `data`, exported as a FUSE file.
    pub(crate) fn qemu_fuse(dir: &Path, data: &Path, interrupt: &Interrupt) -> Result<Self> {
        let (file, pid) = (dir.join("qemu.img"), dir.join("qemu.pid"));
        fs::write(&file, []).context("make a file to mount on")?;
        let mut command = Command::new("/usr/bin/env");
        command.arg("qemu-storage-daemon").arg("--pidfile").arg(&pid);
        let blockdev = "driver=file,node-name=data,cache.direct=on,aio=io_uring,filename=";
        command.arg("--blockdev").arg(format!("{blockdev}{}", data.display()));
        let export = "type=fuse,id=export,node-name=data,writable=on,mountpoint=";
        command.arg("--export").arg(format!("{export}{}", file.display()));
        // qemu-storage-daemon writes its pid file just before it is ready.
        Self::mounted(QEMU_FUSE, &mut command, &file, &pid, interrupt)
    }

    /// Starts a server that mounts `file` and is ready when the file `sign` exists.
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

    /// Returns the bare file `data` as a target without a server.
    pub(crate) fn bare(data: &Path) -> Self {
        Self::of("bare file", Target::File(data.display().to_string()), None)
    }

    /// Returns an image of a Ceph cluster as a target, through librbd in fio.
    pub(crate) fn librbd(name: &'static str, image: &'static str, conf: &Path) -> Self {
        Self::of(name, Target::Rbd { image, conf: conf.display().to_string() }, None)
    }

    fn of(name: &'static str, target: Target, process: Option<Process>) -> Self {
        Self { name, target, process, control: None, is_cold: false, unmount: None }
    }

    /// Returns the server as the hob of this binary with this control address.
    fn controlled(self, binary: &Path, control: String) -> Self {
        Self { control: Some((binary.to_owned(), control)), ..self }
    }

    /// Returns the server with its cache emptied before each run.
    pub(crate) fn cold(self) -> Self {
        Self { is_cold: true, ..self }
    }

    /// Returns the server with another name in the table.
    pub(crate) fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// Returns the server with another driver for its vhost-user socket.
    pub(crate) fn driven_by(mut self, kind: DriverKind) -> Self {
        if let Target::VhostUser(_, driver) = &mut self.target {
            *driver = kind;
        }
        self
    }

    /// Prepares a run: empties hob's cache if the server is [cold](Self::cold).
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
        Ok(Self::of(name, Target::Uri(uri), Some(process)))
    }

    /// Returns the user and system CPU time of the server and all its child processes.
    pub(crate) fn cpu(&self) -> Result<Option<Duration>> {
        self.process.as_ref().map(|process| cpu(process.pid())).transpose()
    }

    /// Returns hob's counters, or `None` for other servers.
    pub(crate) fn stats(&self) -> Result<Option<Stats>> {
        let Some((binary, control)) = &self.control else { return Ok(None) };
        let args = ["stats", "disk", "-o", "json", "--control", control];
        let text = crate::shell::output(Command::new(binary).args(args))?;
        Stats::parse(&text).map(Some).map_err(|e| anyhow::anyhow!("hob stats: {e}"))
    }
}

/// Returns the command `hob serve` without front ends, and the control address.
fn serve(binary: &Path, dir: &Path, data: &Path, cache_bytes: u64) -> (Command, String) {
    let control = format!("unix:{}", dir.join("hob.ctl").display());
    let mut command = Command::new(binary);
    command.arg("serve").arg("--disk").arg(data).arg("--pool").arg(dir.join("hob.pool"));
    command.args(["--size", &cache_bytes.to_string(), "--block-size", "4K", "--control", &control]);
    (command, control)
}

/// Returns the user and system CPU time of a process and all its child processes.
pub(crate) fn cpu(pid: u32) -> Result<Duration> {
    let mut ticks = 0;
    for pid in std::iter::once(pid).chain(descendants(pid)) {
        ticks += cpu_ticks(pid)?;
    }
    let seconds = ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
    Ok(Duration::from_secs_f64(seconds))
}

/// Returns `utime + stime` of a process, including threads that have ended: fields 14 and 15 of
/// `/proc/PID/stat`.
fn cpu_ticks(pid: u32) -> Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).context("a server has died")?;
    // The second field is the process name in parentheses, which may contain spaces.
    let (_, rest) = stat.rsplit_once(')').context("a name in /proc/PID/stat")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let field =
        |n: usize| -> Result<u64> { Ok(fields.get(n - 3).context("a short /proc/PID/stat")?.parse()?) };
    Ok(field(14)? + field(15)?)
}
