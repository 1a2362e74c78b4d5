//! `cargo xtask bench data-path` measures the cost of hob's data path when every read is a hit.
//!
//! The benchmark has several settings. In the *device-bound* setting, data and pool are on a disk
//! and opened with O_DIRECT. hob is compared with `qemu-nbd` on a copy of the data, and both
//! programs are compared with fio on the bare file. In the *software-bound* setting, data and pool
//! are in memory (tmpfs), so that only software is measured. hob is compared with `nbdkit`, with
//! and without nbdkit's cache. There are two *vhost-user* settings through vhost-user-blk,
//! device-bound and software-bound. In these settings, hob is compared with `qemu-storage-daemon`.
//! The requests come from the driver of the black-box tests or from libblkio. In the *write-back*
//! setting, hob writes to a pool on a disk. hob is compared with `qemu-nbd` and fio on files on the
//! same disk. The *file* setting is the device-bound setting through FUSE, compared with
//! `qemu-storage-daemon`.
//!
//! All servers of a setting run at the same time. Each round measures every workload on every
//! server, one after the other, in a rotating order. The result is the median over the rounds.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use conformance::data::noise_file;
use conformance::stats::Stats;
use tempfile::TempDir;

use super::fio::{self, Workload};
use super::report::{Bar, Limit, Measure, Report, Run, Setting};
use super::server::{HOB, HOB_BEFORE, QEMU_FUSE, Server};
use super::vhost::DriverKind;
use crate::shell::{self, Interrupt};

const MIB: u64 = 1 << 20;

const DEPTH_1: &str = "4 KiB random read, depth 1";
const DEPTH_16: &str = "4 KiB random read, depth 16";
const DEPTH_64: &str = "4 KiB random read, depth 64";

const WORKLOADS: [Workload; 5] = [
    Workload { name: DEPTH_1, rw: "randread", block: "4k", depth: 1, flushes: false },
    Workload { name: DEPTH_16, rw: "randread", block: "4k", depth: 16, flushes: false },
    Workload { name: DEPTH_64, rw: "randread", block: "4k", depth: 64, flushes: false },
    Workload { name: "64 KiB sequential read, depth 8", rw: "read", block: "64k", depth: 8, flushes: false },
    Workload {
        name: "4 KiB random write, depth 16",
        rw: "randwrite",
        block: "4k",
        depth: 16,
        flushes: false,
    },
];

const WRITE_16: &str = "4 KiB random write, depth 16";
const FLUSH_1: &str = "the same, depth 1, a flush each";
const FLUSH_16: &str = "the same, depth 16, a flush each";

const WRITES: [Workload; 3] = [
    Workload { name: WRITE_16, rw: "randwrite", block: "4k", depth: 16, flushes: false },
    Workload { name: FLUSH_1, rw: "randwrite", block: "4k", depth: 1, flushes: true },
    Workload { name: FLUSH_16, rw: "randwrite", block: "4k", depth: 16, flushes: true },
];

/// Required ratios of hob's write-back to qemu-nbd on a flash file, and maximum factor by which the
/// journal increases flash writes.
const WRITE_BARS: [Bar; 4] = [
    Bar { workload: WRITE_16, measure: Measure::Iops, against: "qemu-nbd", limit: Limit::AtLeast(0.8) },
    Bar { workload: FLUSH_1, measure: Measure::Iops, against: "qemu-nbd", limit: Limit::AtLeast(0.8) },
    Bar { workload: FLUSH_16, measure: Measure::Iops, against: "qemu-nbd", limit: Limit::AtLeast(0.8) },
    Bar { workload: WRITE_16, measure: Measure::Journal, against: "bare file", limit: Limit::AtMost(1.10) },
];

/// Required ratios of hob to qemu-nbd on a device.
const DEVICE_BARS: [Bar; 6] = [
    Bar { workload: DEPTH_16, measure: Measure::Iops, against: "qemu-nbd", limit: Limit::AtLeast(1.2) },
    Bar { workload: DEPTH_64, measure: Measure::Iops, against: "qemu-nbd", limit: Limit::AtLeast(1.2) },
    Bar { workload: DEPTH_1, measure: Measure::Mean, against: "qemu-nbd", limit: Limit::AtMost(0.9) },
    Bar { workload: DEPTH_1, measure: Measure::Cpu, against: "qemu-nbd", limit: Limit::AtMost(0.5) },
    Bar { workload: DEPTH_16, measure: Measure::Cpu, against: "qemu-nbd", limit: Limit::AtMost(0.5) },
    Bar { workload: DEPTH_64, measure: Measure::Cpu, against: "qemu-nbd", limit: Limit::AtMost(0.5) },
];

/// Required ratios of hob to each nbdkit configuration in memory.
const SOFTWARE_BARS: [Bar; 10] = [
    Bar { workload: DEPTH_16, measure: Measure::Iops, against: "nbdkit file", limit: Limit::AtLeast(1.1) },
    Bar { workload: DEPTH_64, measure: Measure::Iops, against: "nbdkit file", limit: Limit::AtLeast(1.1) },
    Bar { workload: DEPTH_16, measure: Measure::Iops, against: "nbdkit cache", limit: Limit::AtLeast(1.1) },
    Bar { workload: DEPTH_64, measure: Measure::Iops, against: "nbdkit cache", limit: Limit::AtLeast(1.1) },
    Bar { workload: DEPTH_16, measure: Measure::Cpu, against: "nbdkit file", limit: Limit::AtMost(0.6) },
    Bar { workload: DEPTH_64, measure: Measure::Cpu, against: "nbdkit file", limit: Limit::AtMost(0.6) },
    Bar { workload: DEPTH_16, measure: Measure::Cpu, against: "nbdkit cache", limit: Limit::AtMost(0.6) },
    Bar { workload: DEPTH_64, measure: Measure::Cpu, against: "nbdkit cache", limit: Limit::AtMost(0.6) },
    Bar { workload: DEPTH_1, measure: Measure::Mean, against: "nbdkit file", limit: Limit::AtMost(0.9) },
    Bar { workload: DEPTH_1, measure: Measure::Mean, against: "nbdkit cache", limit: Limit::AtMost(0.9) },
];

/// Required ratios of hob's FUSE file to the FUSE file of qemu-storage-daemon.
const FUSE_BARS: [Bar; 3] = [
    Bar { workload: DEPTH_16, measure: Measure::Iops, against: QEMU_FUSE, limit: Limit::AtLeast(1.0) },
    Bar { workload: DEPTH_64, measure: Measure::Iops, against: QEMU_FUSE, limit: Limit::AtLeast(1.0) },
    Bar { workload: DEPTH_16, measure: Measure::Cpu, against: QEMU_FUSE, limit: Limit::AtMost(1.0) },
];

/// Required ratios of hob to qemu-storage-daemon through vhost-user-blk, with flash on a device.
const VHOST_USER_BARS: [Bar; 6] = [
    against_storage_daemon(DEPTH_1, Measure::Iops, Limit::AtLeast(1.05)),
    against_storage_daemon(DEPTH_16, Measure::Iops, Limit::AtLeast(1.05)),
    against_storage_daemon(DEPTH_64, Measure::Iops, Limit::AtLeast(1.05)),
    against_storage_daemon(DEPTH_1, Measure::Cpu, Limit::AtMost(0.8)),
    against_storage_daemon(DEPTH_16, Measure::Cpu, Limit::AtMost(0.8)),
    against_storage_daemon(DEPTH_64, Measure::Cpu, Limit::AtMost(0.8)),
];

/// Required ratios of hob to qemu-storage-daemon through vhost-user-blk, with flash in memory.
const VHOST_USER_MEMORY_BARS: [Bar; 6] = [
    against_storage_daemon(DEPTH_1, Measure::Iops, Limit::AtLeast(2.0)),
    against_storage_daemon(DEPTH_16, Measure::Iops, Limit::AtLeast(2.0)),
    against_storage_daemon(DEPTH_64, Measure::Iops, Limit::AtLeast(3.0)),
    against_storage_daemon(DEPTH_1, Measure::Cpu, Limit::AtMost(0.7)),
    against_storage_daemon(DEPTH_16, Measure::Cpu, Limit::AtMost(0.4)),
    against_storage_daemon(DEPTH_64, Measure::Cpu, Limit::AtMost(0.3)),
];

const fn against_storage_daemon(workload: &'static str, measure: Measure, limit: Limit) -> Bar {
    Bar { workload, measure, against: "storage-daemon", limit }
}

/// Minimum hit ratio of the last warm-up pass.
const WARM_MIN: f64 = 0.999;
/// Maximum number of warm-up passes.
const WARM_PASSES_MAX: u32 = 8;

/// Options of benchmarks that compare servers.
#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Write all results to this JSON file
    #[arg(long)]
    json: Option<PathBuf>,
    /// Run one short round on little data, to test the benchmark itself
    #[arg(long)]
    quick: bool,
    /// Number of rounds
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Duration of each run, seconds
    #[arg(long, default_value_t = 4)]
    seconds: u32,
    /// Directory on a disk for data and pools [default: the target directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// hob binary to measure [default: HOB_BIN, or a new release build]
    #[arg(long)]
    hob: Option<PathBuf>,
    /// Fail if a required ratio is missed
    #[arg(long)]
    strict: bool,
}

impl Options {
    /// Creates a benchmark of all workloads. A quick benchmark has one short round.
    pub(super) fn bench(&self) -> Result<Bench> {
        let (rounds, seconds) = if self.quick { (1, 1) } else { (self.rounds.max(1), self.seconds.max(1)) };
        Ok(Bench {
            hob: super::hob(self.hob.as_deref())?,
            rounds,
            seconds,
            quick: self.quick,
            workload: String::new(),
            before: None,
            driver: DriverKind::Own,
            interrupt: Interrupt::listen()?,
        })
    }

    /// Returns the directory for data and pools.
    pub(super) fn dir(&self) -> Result<PathBuf> {
        self.dir.clone().map_or_else(shell::target_dir, Ok)
    }

    /// Prints and writes a report, and checks the required ratios.
    pub(super) fn finish(&self, report: &Report) -> Result<()> {
        report.finish(self.json.as_deref(), self.strict)
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    options: Options,
    /// Run only this part of the benchmark
    #[arg(long, value_enum)]
    only: Option<Which>,
    /// Measure only the workloads whose name contains this text, for example "depth 16"
    #[arg(long, value_name = "TEXT")]
    workload: Option<String>,
    /// Earlier hob binary to measure as well
    #[arg(long, value_name = "HOB")]
    before: Option<PathBuf>,
    /// Driver that sends the requests through vhost-user-blk
    #[arg(long, value_enum, default_value_t = DriverKind::Own)]
    driver: DriverKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Which {
    /// Data and pool on a disk
    Device,
    /// Data and pool in memory
    Software,
    /// Writes to flash, with the pool on a disk
    WriteBack,
    /// The disk as a FUSE file, with data and pool on a disk
    Fuse,
    /// Data and pool on a disk, through vhost-user-blk
    VhostUser,
    /// Data and pool in memory, through vhost-user-blk
    VhostUserMemory,
}

/// Parameters of a measurement: hob binary, number and duration of runs.
pub(super) struct Bench {
    pub(super) hob: PathBuf,
    pub(super) rounds: u32,
    pub(super) seconds: u32,
    pub(super) quick: bool,
    /// Text that the names of all measured workloads contain.
    pub(super) workload: String,
    /// Earlier hob binary that is measured as well.
    pub(super) before: Option<PathBuf>,
    /// Driver that sends the requests through vhost-user-blk.
    driver: DriverKind,
    pub(super) interrupt: Interrupt,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    super::require(&["fio", "qemu-nbd", "qemu-storage-daemon", "nbdkit", "setpriv"])?;
    let Arguments { options, driver, .. } = arguments;
    let bench = Bench {
        workload: arguments.workload.clone().unwrap_or_default(),
        before: arguments.before.clone(),
        driver: *driver,
        ..options.bench()?
    };
    let wanted = |which| arguments.only.is_none_or(|only| only == which);
    let mut report = Report::of("data-path");
    if wanted(Which::Device) {
        report.settings.push(bench.device(&options.dir()?)?);
    }
    if wanted(Which::Software) {
        report.settings.push(bench.software(Path::new("/dev/shm"))?);
    }
    if wanted(Which::WriteBack) {
        report.settings.push(bench.write_back(&options.dir()?)?);
    }
    if wanted(Which::Fuse) {
        report.settings.push(bench.fuse(&options.dir()?)?);
    }
    if wanted(Which::VhostUser) {
        let names = ["vhost-user", "vhost-user, libblkio"];
        report.settings.push(bench.vhost_user(names, &options.dir()?, 512 * MIB, &VHOST_USER_BARS)?);
    }
    if wanted(Which::VhostUserMemory) {
        let names = ["vhost-user in memory", "vhost-user in memory, libblkio"];
        let dir = Path::new("/dev/shm");
        report.settings.push(bench.vhost_user(names, dir, 256 * MIB, &VHOST_USER_MEMORY_BARS)?);
    }
    options.finish(&report)
}

pub(super) fn scratch(dir: &Path) -> Result<TempDir> {
    std::fs::create_dir_all(dir)?;
    let made = tempfile::Builder::new().prefix("hob-bench-").tempdir_in(dir);
    made.with_context(|| format!("make a directory in {}", dir.display()))
}

impl Bench {
    /// Creates a directory in `dir` with files of noise, one for each server of a setting. Returns
    /// the directory, the files and their size, which is `size` unless the benchmark is quick.
    fn files<const N: usize>(
        &self,
        setting: &str,
        dir: &Path,
        size: u64,
        names: [&str; N],
    ) -> Result<(TempDir, [PathBuf; N], u64)> {
        let scratch = scratch(dir)?;
        let size = if self.quick { 64 * MIB } else { size };
        println!("{setting}: {} MiB in {}", size / MIB, scratch.path().display());
        let files = names.map(|name| scratch.path().join(name));
        files.iter().for_each(|file| noise_file(file, size, 1));
        Ok((scratch, files, size))
    }

    fn device(&self, dir: &Path) -> Result<Setting> {
        let name = "device-bound";
        let (scratch, [data, copy, bare], size) =
            self.files(name, dir, 512 * MIB, ["data", "copy", "bare"])?;
        if !fio::direct_works(scratch.path()) {
            bail!("files in {} cannot be opened with O_DIRECT; pass another --dir", dir.display());
        }
        let hob = |binary: &Path, dir: &Path, data: &Path| {
            Server::hob(binary, dir, data, cache_bytes(size), &self.interrupt)
        };
        let mut servers = vec![
            hob(&self.hob, scratch.path(), &data)?,
            Server::qemu_nbd(scratch.path(), &copy, &self.interrupt)?,
            Server::bare(&bare),
        ];
        servers.extend(self.earlier(scratch.path(), size, hob)?);
        let runs = self.measure(&servers, &WORKLOADS, size)?;
        Ok(Setting { name, size, seconds: self.seconds, runs, bars: &DEVICE_BARS })
    }

    fn software(&self, dir: &Path) -> Result<Setting> {
        let name = "software-bound";
        let (scratch, [data, kit, kit_cache], size) =
            self.files(name, dir, 256 * MIB, ["data", "kit", "kitc"])?;
        let hob = |binary: &Path, dir: &Path, data: &Path| {
            Server::hob(binary, dir, data, cache_bytes(size), &self.interrupt)
        };
        let mut servers = vec![
            hob(&self.hob, scratch.path(), &data)?,
            Server::nbdkit(scratch.path(), &kit, false, &self.interrupt)?,
            Server::nbdkit(scratch.path(), &kit_cache, true, &self.interrupt)?,
        ];
        servers.extend(self.earlier(scratch.path(), size, hob)?);
        let runs = self.measure(&servers, &WORKLOADS, size)?;
        Ok(Setting { name, size, seconds: self.seconds, runs, bars: &SOFTWARE_BARS })
    }

    /// Starts the earlier hob binary, if there is one, with its own directory and data.
    fn earlier(
        &self,
        scratch: &Path,
        size: u64,
        start: impl FnOnce(&Path, &Path, &Path) -> Result<Server>,
    ) -> Result<Option<Server>> {
        let Some(binary) = &self.before else { return Ok(None) };
        let dir = scratch.join("before");
        std::fs::create_dir(&dir)?;
        let data = dir.join("data");
        noise_file(&data, size, 1);
        Ok(Some(start(binary, &dir, &data)?.named(HOB_BEFORE)))
    }

    /// Measures reads and writes through vhost-user-blk, with data and pool in `dir`. `names`: the
    /// setting's name with the driver of the black-box tests, and with libblkio.
    fn vhost_user(
        &self,
        names: [&'static str; 2],
        dir: &Path,
        size: u64,
        bars: &'static [Bar],
    ) -> Result<Setting> {
        let name = match self.driver {
            DriverKind::Own => names[0],
            DriverKind::Blkio => names[1],
        };
        let (scratch, [data, copy, bare], size) = self.files(name, dir, size, ["data", "copy", "bare"])?;
        let hob = |binary: &Path, dir: &Path, data: &Path| {
            Server::hob_vhost_user(binary, dir, data, cache_bytes(size), 0, &self.interrupt)
        };
        let mut servers = vec![
            hob(&self.hob, scratch.path(), &data)?,
            Server::storage_daemon(scratch.path(), &copy, &self.interrupt)?,
            Server::bare(&bare),
        ];
        servers.extend(self.earlier(scratch.path(), size, hob)?);
        let servers: Vec<Server> = servers.into_iter().map(|it| it.driven_by(self.driver)).collect();
        let runs = self.measure(&servers, &WORKLOADS, size)?;
        Ok(Setting { name, size, seconds: self.seconds, runs, bars })
    }

    /// Measures writes to flash with one and two copies, compared with a file on the same disk. The
    /// backing is in memory, so that destaging does not use the disk.
    fn write_back(&self, dir: &Path) -> Result<Setting> {
        let (scratch, memory) = (scratch(dir)?, scratch(Path::new("/dev/shm"))?);
        let size = if self.quick { 64 } else { 256 } * MIB;
        println!("write-back: {} MiB in {}", size / MIB, scratch.path().display());
        let data = ["one", "two"].map(|name| memory.path().join(name));
        let (copy, bare) = (scratch.path().join("copy"), scratch.path().join("bare"));
        for file in data.iter().chain([&copy, &bare]) {
            noise_file(file, size, 3);
        }
        let cache = cache_bytes(size);
        let servers = [
            Server::write_back(&self.hob, scratch.path(), &data[0], cache, 1, &self.interrupt)?,
            Server::write_back(&self.hob, scratch.path(), &data[1], cache, 2, &self.interrupt)?,
            Server::qemu_nbd(scratch.path(), &copy, &self.interrupt)?,
            Server::bare(&bare),
        ];
        let runs = self.rounds(&servers, &WRITES, size)?;
        Ok(Setting { name: "write-back", size, seconds: self.seconds, runs, bars: &WRITE_BARS })
    }

    /// Measures disks as FUSE files. All files are opened with O_DIRECT. fio uses libaio for the
    /// FUSE files, and io_uring for the bare file.
    fn fuse(&self, dir: &Path) -> Result<Setting> {
        let name = "a file";
        let (scratch, [data, copy, bare], size) =
            self.files(name, dir, 512 * MIB, ["data", "copy", "bare"])?;
        let servers = [
            Server::hob_fuse(&self.hob, scratch.path(), &data, cache_bytes(size), &self.interrupt)?,
            Server::qemu_fuse(scratch.path(), &copy, &self.interrupt)?,
            Server::bare(&bare),
        ];
        let runs = self.measure(&servers, &WORKLOADS, size)?;
        Ok(Setting { name, size, seconds: self.seconds, runs, bars: &FUSE_BARS })
    }

    /// Runs all workloads on all servers after a warm-up.
    pub(super) fn measure(&self, servers: &[Server], workloads: &[Workload], size: u64) -> Result<Vec<Run>> {
        for server in servers {
            self.warm(server, size)?;
        }
        self.rounds(servers, workloads, size)
    }

    /// Runs all workloads on all servers without a warm-up.
    pub(super) fn rounds(&self, servers: &[Server], workloads: &[Workload], size: u64) -> Result<Vec<Run>> {
        let mut runs = Vec::new();
        for round in 0..self.rounds {
            for workload in workloads.iter().filter(|workload| workload.name.contains(&self.workload)) {
                for turn in 0..servers.len() {
                    let server = &servers[(turn + round as usize) % servers.len()];
                    let run = self.one(server, workload, size, round)?;
                    println!("round {}/{}  {run}", round + 1, self.rounds);
                    runs.push(run);
                }
            }
        }
        Ok(runs)
    }

    /// Reads all data of a server once. hob is read again until nearly all reads of a pass are
    /// hits, because hob fills its cache after the replies.
    fn warm(&self, server: &Server, size: u64) -> Result<()> {
        for pass in 1..=WARM_PASSES_MAX {
            let before = server.stats()?;
            let figures = fio::read_once(&server.target, size, &self.interrupt)?;
            let Some(share) = hit_share(server, before.as_ref(), figures.ios)? else { return Ok(()) };
            println!("warming {}: pass {pass}, {:.2} % hits", server.name, share * 100.0);
            if share >= WARM_MIN {
                return Ok(());
            }
        }
        bail!("the cache of {} is not warm after {WARM_PASSES_MAX} passes", server.name)
    }

    fn one(&self, server: &Server, workload: &Workload, size: u64, round: u32) -> Result<Run> {
        server.prepare()?;
        let (stats, cpu) = (server.stats()?, server.cpu()?);
        let figures = fio::run(&server.target, workload, size, self.seconds, &self.interrupt)?;
        let used = server.cpu()?.zip(cpu).map(|(after, before)| after.saturating_sub(before));
        let cpu_us = used.map(|used| used.as_secs_f64() * 1e6 / figures.ios as f64);
        let journal = journal_factor(server, stats.as_ref(), figures.ios)?;
        let reads = workload.rw.ends_with("read");
        let hits = if reads { hit_share(server, stats.as_ref(), figures.ios)? } else { None };
        Ok(Run { round, workload: workload.name, server: server.name, figures, cpu_us, hits, journal })
    }
}

/// Returns the factor by which the journal increases the bytes written to flash, for `ios` writes
/// of 4 KiB since `before`.
fn journal_factor(server: &Server, before: Option<&Stats>, ios: u64) -> Result<Option<f64>> {
    let (Some(before), Some(after)) = (before, server.stats()?) else { return Ok(None) };
    let bytes = |stats: &Stats| stats.number("journal_bytes").unwrap_or(0.0);
    let written = bytes(&after) - bytes(before);
    Ok((written > 0.0).then(|| 1.0 + written / (ios as f64 * 4096.0)))
}

/// Returns the cache size: 25 % more than the working set.
pub(super) fn cache_bytes(size: u64) -> u64 {
    size / 4 * 5
}

/// Returns the share of `ios` requests that were hits in flash or memory since `before`. Returns
/// `None` if the server does not count hits.
fn hit_share(server: &Server, before: Option<&Stats>, ios: u64) -> Result<Option<f64>> {
    let (Some(before), Some(after)) = (before, server.stats()?) else { return Ok(None) };
    debug_assert!(server.name.starts_with(HOB));
    let hits = |stats: &Stats| stats.class("hit");
    Ok(Some((hits(&after) - hits(before)) as f64 / ios as f64))
}
