//! Plays traces through the caches of Linux: dm-cache with its policy smq, bcache and dm-writecache.
//!
//! The caches run in a guest of QEMU without KVM. The guest's clock counts instructions, so results
//! do not depend on the speed of the host, and waiting takes no time. A guest runs all chosen
//! caches in all sizes. The cached disks store no data. The guest boots Debian's cloud kernel with
//! [`INIT`] as first process, which builds the caches and starts [`PLAYER`].

mod archive;
mod console;
mod conversion;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hob_trace::Record;
use xtask::packages::present;

use super::results::Played;
use crate::shell;
use archive::Archive;
use conversion::{Converted, Pace, convert};

const INIT: &str = include_str!("linux/init.sh");
const PLAYER: &str = include_str!("linux/player.c");

/// Programs that must be installed.
const PROGRAMS: [&str; 6] = ["qemu-system-x86_64", "busybox", "dmsetup", "gcc", "modprobe", "apt-get"];
/// Programs of busybox that [`INIT`] uses.
const APPLETS: [&str; 11] =
    ["sh", "awk", "basename", "cat", "dmesg", "grep", "insmod", "mount", "readlink", "sleep", "tail"];
/// Modules of the kernel that the caches need, without the modules on which they depend.
const MODULES: [&str; 7] =
    ["brd", "dm-zero", "dm-flakey", "dm-cache", "dm-cache-smq", "dm-writecache", "bcache"];
/// The package with make-bcache is unpacked and not installed, because an installation would let
/// the host use every device with a header of bcache.
const BCACHE_TOOLS: &str = "bcache-tools";

/// Block size of dm-cache, bytes: the smallest that dm-cache supports.
pub(super) const DM_CACHE_BLOCK_BYTES: u64 = 32 << 10;
/// Smallest and largest bucket of bcache, bytes. The largest one is bcache's usual size.
const BUCKET_BYTES: (u64, u64) = (8 << 10, 512 << 10);
/// Minimum number of buckets of a cache, unless the buckets would be smaller than the minimum
/// bucket size.
const BUCKETS_MIN: u64 = 1024;
const RAM_DISKS_PER_CACHE: usize = 2;
/// Memory of the guest without the contents of its caches, bytes.
const GUEST_BYTES: u64 = 384 << 20;

/// A cache of Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(super) enum Kind {
    DmCache,
    Bcache,
    DmWritecache,
}

impl Kind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::DmCache => "dm-cache",
            Self::Bcache => "bcache",
            Self::DmWritecache => "dm-writecache",
        }
    }

    /// Returns the line of the plan from which the guest builds this cache.
    fn plan(self, size: usize, bytes: u64) -> String {
        let sectors = bytes / 512;
        let name = self.instance(size);
        match self {
            Self::DmCache => format!("dm_cache {name} {sectors} {}\n", DM_CACHE_BLOCK_BYTES / 512),
            Self::Bcache => format!("bcache {name} {sectors} {}\n", bucket_bytes(bytes)),
            Self::DmWritecache => format!("dm_writecache {name} {sectors} -\n"),
        }
    }

    /// Returns the name in the guest of a cache of this kind. `size` is the number of the size.
    fn instance(self, size: usize) -> String {
        format!("{}.{size}", self.name())
    }
}

/// Returns the size of bcache's buckets: the largest power of two that leaves enough buckets.
fn bucket_bytes(cache_bytes: u64) -> u64 {
    let most = (cache_bytes / BUCKETS_MIN).max(1);
    (1 << most.ilog2()).clamp(BUCKET_BYTES.0, BUCKET_BYTES.1)
}

/// Options for the caches of Linux, which run in guests.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Options {
    /// Caches of Linux to compare with
    #[arg(long, value_delimiter = ',', value_name = "NAME", default_value = "dm-cache,bcache,dm-writecache")]
    pub(super) linux: Vec<Kind>,
    /// Do not run caches of Linux
    #[arg(long)]
    pub(super) without_linux: bool,
    /// Maximum time between two requests in the guest, seconds
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS")]
    gap_s_max: f64,
    /// Maximum duration of a trace in the guest, seconds; longer ones are sped up
    #[arg(long, default_value_t = 300.0, value_name = "SECONDS")]
    duration_s_max: f64,
    /// Maximum duration of a guest on the host, seconds
    #[arg(long, default_value_t = 3600, value_name = "SECONDS")]
    guest_s_max: u64,
}

/// Results of a guest.
#[derive(Debug, Default)]
pub(super) struct Guest {
    /// Results by cache and number of the size.
    pub(super) played: BTreeMap<(Kind, usize), Played>,
    /// Failures, for the user.
    pub(super) troubles: Vec<String>,
    /// Virtual duration of the trace, and the factor by which the trace was sped up.
    pub(super) seconds: f64,
    pub(super) speed_up: f64,
    /// Longest time by which a request started later than the trace says, milliseconds of virtual
    /// time.
    pub(super) late_ms: u64,
}

/// The kernel, programs and options that all guests use.
#[derive(Debug)]
pub(super) struct LinuxCaches {
    kernel: PathBuf,
    /// Programs and modules of the guest.
    archive: Archive,
    options: Options,
    /// Version of the kernel, of QEMU and of bcache-tools.
    pub(super) versions: String,
}

impl LinuxCaches {
    /// Collects programs and modules.
    ///
    /// # Errors
    /// Returns an error that says what is missing and how to get it.
    pub(super) fn prepare(options: &Options, scratch: &Path) -> Result<Self> {
        let missing: Vec<_> = PROGRAMS.into_iter().filter(|program| !present(program)).collect();
        let kernel = newest_kernel();
        let (Some(release), true) = (kernel, missing.is_empty()) else {
            let what = if missing.is_empty() { "a cloud kernel in /boot" } else { &missing.join(", ") };
            bail!("{what} is missing: cargo xtask install");
        };
        let mut archive = Archive::default();
        ["dev", "proc", "sys", "tmp"].iter().for_each(|path| archive.directory(path));
        archive.file("init", INIT.as_bytes());
        archive.copy("bin/busybox", &find("busybox")?)?;
        APPLETS.iter().for_each(|name| archive.link(&format!("bin/{name}"), "busybox"));
        let (tools, tools_version) = unpack_bcache_tools(scratch)?;
        let programs = [find("dmsetup")?, tools.join("usr/sbin/make-bcache")];
        add_programs(&mut archive, &programs)?;
        let player = scratch.join("linux-player");
        let source = player.with_extension("c");
        fs::write(&source, PLAYER)?;
        let mut gcc = Command::new("gcc");
        shell::output(gcc.args(["-O2", "-static", "-o"]).arg(&player).arg(&source))
            .context("compile the player (apt-get install gcc libc6-dev)")?;
        archive.copy("bin/player", &player)?;
        add_modules(&mut archive, &release)?;
        let qemu = shell::output(Command::new("qemu-system-x86_64").arg("--version"))?;
        let qemu = qemu.split_whitespace().nth(3).unwrap_or("?").to_owned();
        let versions = format!("Linux {release}, QEMU {qemu}, bcache-tools {tools_version}");
        let kernel = Path::new("/boot").join(format!("vmlinuz-{release}"));
        Ok(Self { kernel, archive, options: options.clone(), versions })
    }

    /// Runs a guest that sends the requests of a trace to the chosen caches in these sizes.
    ///
    /// # Errors
    /// Returns an error if the guest cannot run. The failure of a cache is not an error, but is
    /// recorded in [`Guest::troubles`].
    pub(super) fn play(
        &self,
        records: &[Record],
        sizes: &[u64],
        scratch: &Path,
        interrupt: &shell::Interrupt,
    ) -> Result<Guest> {
        let Options { gap_s_max, duration_s_max, .. } = self.options;
        let trace = convert(records, Pace { gap_s_max, duration_s_max })?;
        let sizes: Vec<u64> = sizes.iter().map(|&bytes| whole_blocks(bytes)).collect();
        let memory = self.memory_bytes(&trace, &sizes);
        let available = available_bytes()?;
        ensure!(
            memory <= available,
            "the guest needs {} MiB of memory: choose fewer or smaller sizes",
            memory >> 20
        );
        let initramfs = scratch.join("initramfs");
        fs::write(&initramfs, self.initramfs(&trace, &sizes))?;
        let text = self.boot(&initramfs, memory, scratch, interrupt)?;
        fs::remove_file(&initramfs)?;

        let mut console = console::parse(&text);
        if !console.is_complete {
            let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
            console.troubles.push(format!("the guest did not finish; its last line: {}", last.trim()));
        }
        let mut guest = Guest {
            troubles: console.troubles,
            seconds: trace.seconds,
            speed_up: trace.speed_up,
            ..Guest::default()
        };
        for (size, &cache_bytes) in sizes.iter().enumerate() {
            for &kind in &self.options.linux {
                let Some(counters) = console.caches.get(&kind.instance(size)) else { continue };
                let played = Played {
                    cache: kind.name(),
                    cache_bytes,
                    reads: counters.reads,
                    read_hits: counters.hits,
                    flash_write_bytes: counters.flash_write_bytes,
                    metadata_write_bytes: counters.metadata_write_bytes,
                    memory_bytes_per_block: None,
                    ns_per_request: None,
                };
                guest.played.insert((kind, size), played);
                guest.late_ms = guest.late_ms.max(counters.late_ms);
            }
        }
        Ok(guest)
    }

    /// Returns an estimate of the guest's memory. The data of bcache and of dm-writecache is in
    /// RAM disks. The trace exists three times while the guest boots.
    fn memory_bytes(&self, trace: &Converted, sizes: &[u64]) -> u64 {
        let mut bytes = GUEST_BYTES + 3 * trace.bytes.len() as u64;
        for &kind in &self.options.linux {
            for size in sizes {
                bytes += if kind == Kind::DmCache { size / 50 } else { size + size / 20 } + (16 << 20);
            }
        }
        bytes
    }

    fn initramfs(&self, trace: &Converted, sizes: &[u64]) -> Vec<u8> {
        let kinds = &self.options.linux;
        let caches = sizes.iter().enumerate().flat_map(|at| kinds.iter().map(move |kind| (at, kind)));
        let plan: String = caches.map(|((size, &bytes), kind)| kind.plan(size, bytes)).collect();
        let ram_disks = RAM_DISKS_PER_CACHE * kinds.len() * sizes.len();
        let mut archive = self.archive.clone();
        archive.file("plan", plan.as_bytes());
        archive.file("ramdisks", ram_disks.to_string().as_bytes());
        archive.file("span", (trace.disk_bytes / 512).to_string().as_bytes());
        archive.file("trace", &trace.bytes);
        archive.finish()
    }

    /// Runs a guest until it ends. Returns the output of its console.
    fn boot(
        &self,
        initramfs: &Path,
        memory: u64,
        scratch: &Path,
        interrupt: &shell::Interrupt,
    ) -> Result<String> {
        let log = scratch.join("console");
        let mut qemu = Command::new("qemu-system-x86_64");
        // Each instruction takes 1 ns of virtual time, and an idle guest skips to its next timer.
        qemu.args(["-accel", "tcg", "-icount", "shift=0,sleep=off", "-smp", "1"])
            .args(["-machine", "pc", "-cpu", "Nehalem,+rdrand", "-m", &(memory >> 20).to_string()])
            .args(["-nodefaults", "-no-reboot", "-display", "none", "-monitor", "none"])
            .arg("-serial")
            .arg(format!("file:{}", log.display()))
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(initramfs)
            // The guest's kernel takes random numbers from rdrand. Without rdrand it would wait for
            // interrupts. Without ACPI, the clock is simple. Bit 112 is REP_GOOD: string
            // instructions are slow without KVM.
            .args([
                "-append",
                "console=ttyS0 quiet panic=-1 mitigations=off nowatchdog acpi=off tsc=reliable \
                   random.trust_cpu=on clearcpuid=112 rdinit=/init",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let mut child = qemu.spawn().context("start qemu-system-x86_64")?;
        let end = Instant::now() + Duration::from_secs(self.options.guest_s_max);
        let ended = loop {
            if let Some(status) = child.try_wait()? {
                break Ok(status);
            }
            if let Err(error) = interrupt.check() {
                break Err(error);
            }
            if Instant::now() > end {
                break Err(anyhow::anyhow!(
                    "the guest ran for {} s: --guest-s-max",
                    self.options.guest_s_max
                ));
            }
            std::thread::sleep(Duration::from_millis(200));
        };
        if ended.is_err() {
            child.kill()?;
            child.wait()?;
        }
        let status = ended?;
        ensure!(status.success(), "qemu-system-x86_64: {status}");
        let text = fs::read(&log).context("read the guest's console")?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// Rounds the size of a cache to whole blocks of dm-cache.
fn whole_blocks(bytes: u64) -> u64 {
    let blocks = (bytes + DM_CACHE_BLOCK_BYTES / 2) / DM_CACHE_BLOCK_BYTES;
    blocks.max(1) * DM_CACHE_BLOCK_BYTES
}

/// Returns the release of the newest cloud kernel.
fn newest_kernel() -> Option<String> {
    let entries = fs::read_dir("/boot").ok()?.flatten();
    let releases = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_prefix("vmlinuz-").filter(|release| release.contains("cloud")).map(str::to_owned)
    });
    let number = |release: &String| -> Vec<u64> {
        let numbers = release.split(|c: char| !c.is_ascii_digit());
        numbers.filter_map(|number| number.parse().ok()).collect()
    };
    releases.max_by_key(number)
}

fn find(program: &str) -> Result<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let directories = path.split(':').chain(["/usr/sbin", "/sbin", "/bin"]);
    let mut files = directories.map(|directory| Path::new(directory).join(program));
    files.find(|file| file.is_file()).with_context(|| format!("{program} is missing: cargo xtask install"))
}

/// Downloads and unpacks bcache-tools. Returns the directory and the version.
fn unpack_bcache_tools(scratch: &Path) -> Result<(PathBuf, String)> {
    let tree = scratch.join(BCACHE_TOOLS);
    fs::create_dir(&tree)?;
    let download = Command::new("apt-get")
        .args(["--quiet", "--quiet", "download", BCACHE_TOOLS])
        .current_dir(&tree)
        .stdin(Stdio::null())
        .output()
        .context("start apt-get")?;
    let package = fs::read_dir(&tree)?.flatten().map(|entry| entry.path()).next();
    let (true, Some(package)) = (download.status.success(), package) else {
        bail!("'apt-get download {BCACHE_TOOLS}' failed: apt-get update, or check the network");
    };
    let version = shell::output(Command::new("dpkg-deb").arg("--field").arg(&package).arg("Version"))?;
    shell::output(Command::new("dpkg-deb").arg("--extract").arg(&package).arg(&tree))?;
    Ok((tree, version.trim().to_owned()))
}

/// Adds programs with their libraries. All libraries are in one directory.
fn add_programs(archive: &mut Archive, programs: &[PathBuf]) -> Result<()> {
    let mut libraries = BTreeMap::new();
    for program in programs {
        let name = program.file_name().and_then(|name| name.to_str()).context("a program has a name")?;
        archive.copy(&format!("bin/{name}"), program)?;
        let list = shell::output(Command::new("ldd").arg(program))?;
        ensure!(!list.contains("not found"), "{name} lacks a library: {list}");
        for library in list.split_whitespace().filter(|word| word.starts_with('/')) {
            let name = library.rsplit('/').next().unwrap_or(library);
            libraries.insert(name.to_owned(), PathBuf::from(library));
        }
    }
    for (name, path) in libraries {
        archive.copy(&format!("lib64/{name}"), &path)?;
    }
    archive.link("lib", "lib64");
    Ok(())
}

/// Adds the kernel modules to the archive. The file `modules/order` lists them in the order in
/// which the guest must load them.
fn add_modules(archive: &mut Archive, release: &str) -> Result<()> {
    let mut files: Vec<PathBuf> = Vec::new();
    for module in MODULES {
        let mut modprobe = Command::new(find("modprobe")?);
        let list = shell::output(modprobe.args(["--set-version", release, "--show-depends", module]))?;
        for line in list.lines().filter_map(|line| line.strip_prefix("insmod ")) {
            let file = PathBuf::from(line.split_whitespace().next().unwrap_or(line));
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }
    let mut order = String::new();
    for file in &files {
        let name = file.file_name().and_then(|name| name.to_str()).context("a module has a name")?;
        archive.copy(&format!("modules/{name}"), file)?;
        order.push_str(name);
        order.push('\n');
    }
    archive.file("modules/order", order.as_bytes());
    Ok(())
}

fn available_bytes() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    Ok(kib.context("/proc/meminfo has no MemAvailable")? << 10)
}

#[cfg(test)]
mod tests {
    use super::{Kind, bucket_bytes, whole_blocks};

    #[test]
    fn bcache_has_enough_buckets_if_possible() {
        assert_eq!(bucket_bytes(100 << 10), 8 << 10);
        assert_eq!(bucket_bytes(8 << 20), 8 << 10);
        assert_eq!(bucket_bytes(100 << 20), 64 << 10);
        assert_eq!(bucket_bytes(1 << 40), 512 << 10);
    }

    #[test]
    fn the_plan_has_a_line_for_each_cache() {
        assert_eq!(whole_blocks(100_000), 98_304);
        assert_eq!(Kind::DmCache.plan(0, 98_304), "dm_cache dm-cache.0 192 64\n");
        assert_eq!(Kind::Bcache.plan(1, 16 << 20), "bcache bcache.1 32768 16384\n");
        assert_eq!(Kind::DmWritecache.plan(2, 98_304), "dm_writecache dm-writecache.2 192 -\n");
    }
}
