//! `cargo xtask bench rbd` compares a disk on Ceph RBD with librbd itself.
//!
//! A cluster of one monitor and three OSDs runs on this host. Three images have the same data: for
//! hob, for librbd with its cache (`rbd_cache`), and for librbd without a cache. fio uses its rbd
//! engine for librbd, and its nbd engine for hob. The setting *hits* measures reads from flash. The
//! same reads are measured through vhost-user-blk, with and without a memory tier that has all
//! data. The setting *write-back* measures writes to flash. The setting *cold* starts each run with
//! an empty cache: hob reads nearly all data from the cluster and also writes it to flash. OSDs,
//! hob and fio share the processors, so absolute results are those of a small host.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use conformance::Cluster;
use conformance::data::noise_file;

use super::data_path::{Bench, Options, cache_bytes, scratch};
use super::fio::Workload;
use super::report::{Bar, Limit, Measure, Report, Setting};
use super::server::Server;

const MIB: u64 = 1 << 20;

/// Names of librbd with and without its cache.
const CACHED: &str = "librbd, cache";
const PLAIN: &str = "librbd";

const READ_1: &str = "4 KiB random read, depth 1";
const READ_16: &str = "4 KiB random read, depth 16";
const WRITE_16: &str = "4 KiB random write, depth 16";
const COLD_1: &str = "4 KiB random cold read, depth 1";
const COLD_16: &str = "4 KiB random cold read, depth 16";

const HITS: [Workload; 2] = [reads(READ_1, 1), reads(READ_16, 16)];
const COLD: [Workload; 2] = [reads(COLD_1, 1), reads(COLD_16, 16)];
const WRITES: [Workload; 1] =
    [Workload { name: WRITE_16, rw: "randwrite", block: "4k", depth: 16, flushes: false }];

const fn reads(name: &'static str, depth: u32) -> Workload {
    Workload { name, rw: "randread", block: "4k", depth, flushes: false }
}

const fn bar(workload: &'static str, against: &'static str, ratio: f64) -> Bar {
    Bar { workload, measure: Measure::Iops, against, limit: Limit::AtLeast(ratio) }
}

const HIT_BARS: [Bar; 2] = [bar(READ_1, PLAIN, 10.0), bar(READ_1, CACHED, 10.0)];
const WRITE_BARS: [Bar; 2] = [bar(WRITE_16, PLAIN, 10.0), bar(WRITE_16, CACHED, 10.0)];
const COLD_BARS: [Bar; 4] =
    [bar(COLD_1, PLAIN, 0.9), bar(COLD_1, CACHED, 0.9), bar(COLD_16, PLAIN, 0.9), bar(COLD_16, CACHED, 0.9)];

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    options: Options,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    super::require(&["fio", "ceph-mon", "ceph-osd", "rbd", "setpriv"])?;
    let (bench, dir) = (arguments.options.bench()?, arguments.options.dir()?);
    let mut report = Report::of("rbd");
    for way in [Way::Nbd, Way::Machine, Way::Memory] {
        report.settings.push(hits(&bench, &dir, way)?);
    }
    report.settings.push(write_back(&bench, &dir)?);
    report.settings.push(cold(&bench, &dir)?);
    arguments.options.finish(&report)
}

/// A cluster with three images of the same data, and configurations for fio.
struct Stage {
    cluster: Cluster,
    size: u64,
    conf: [PathBuf; 2],
}

impl Stage {
    fn new(dir: &Path, size: u64) -> Result<Stage> {
        let cluster = Cluster::start(3);
        let data = dir.join("data");
        noise_file(&data, size, 1);
        for image in ["hob", "plain", "cached"] {
            cluster.import(&data, image);
        }
        std::fs::remove_file(&data).context("remove what was imported")?;
        let base = std::fs::read_to_string(cluster.conf()).context("read the cluster's configuration")?;
        let conf = [("plain", "false"), ("cached", "true")].map(|(name, cache)| {
            let file = dir.join(format!("{name}.conf"));
            std::fs::write(&file, format!("{base}\n[client]\nrbd_cache = {cache}\n")).map(|()| file)
        });
        let [plain, cached] = conf;
        Ok(Stage { cluster, size, conf: [plain?, cached?] })
    }

    fn librbd(&self) -> [Server; 2] {
        [Server::librbd(PLAIN, "plain", &self.conf[0]), Server::librbd(CACHED, "cached", &self.conf[1])]
    }

    fn disk(&self) -> PathBuf {
        self.cluster.spec("hob").into()
    }
}

fn size(bench: &Bench) -> u64 {
    if bench.quick { 32 * MIB } else { 256 * MIB }
}

/// Protocol and location of hits.
#[derive(Clone, Copy)]
enum Way {
    /// Hits in flash through NBD.
    Nbd,
    /// Hits in flash through vhost-user-blk.
    Machine,
    /// Hits in memory through vhost-user-blk.
    Memory,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Nbd => "hits",
            Way::Machine => "hits, vhost-user",
            Way::Memory => "hits in memory, vhost-user",
        }
    }

    fn server(self, bench: &Bench, dir: &Path, stage: &Stage) -> Result<Server> {
        let (hob, disk, cache) = (&bench.hob, stage.disk(), cache_bytes(stage.size));
        match self {
            Way::Nbd => Server::hob(hob, dir, &disk, cache, &bench.interrupt),
            Way::Machine => Server::hob_vhost_user(hob, dir, &disk, cache, 0, &bench.interrupt),
            Way::Memory => Server::hob_vhost_user(hob, dir, &disk, cache, cache, &bench.interrupt),
        }
    }
}

fn hits(bench: &Bench, dir: &Path, way: Way) -> Result<Setting> {
    let scratch = scratch(dir)?;
    let stage = Stage::new(scratch.path(), size(bench))?;
    println!("{}: {} MiB", way.name(), stage.size / MIB);
    let hob = way.server(bench, scratch.path(), &stage)?;
    let [plain, cached] = stage.librbd();
    let runs = bench.measure(&[hob, plain, cached], &HITS, stage.size)?;
    Ok(Setting { name: way.name(), size: stage.size, seconds: bench.seconds, runs, bars: &HIT_BARS })
}

fn write_back(bench: &Bench, dir: &Path) -> Result<Setting> {
    let scratch = scratch(dir)?;
    let stage = Stage::new(scratch.path(), size(bench))?;
    println!("write-back: {} MiB", stage.size / MIB);
    let cache = cache_bytes(stage.size);
    let hob = Server::write_back(&bench.hob, scratch.path(), &stage.disk(), cache, 1, &bench.interrupt)?;
    let [plain, cached] = stage.librbd();
    let runs = bench.rounds(&[hob, plain, cached], &WRITES, stage.size)?;
    Ok(Setting { name: "write-back", size: stage.size, seconds: bench.seconds, runs, bars: &WRITE_BARS })
}

fn cold(bench: &Bench, dir: &Path) -> Result<Setting> {
    let scratch = scratch(dir)?;
    let stage = Stage::new(scratch.path(), size(bench))?;
    println!("cold: {} MiB", stage.size / MIB);
    let cache = cache_bytes(stage.size);
    let hob = Server::hob(&bench.hob, scratch.path(), &stage.disk(), cache, &bench.interrupt)?.cold();
    let [plain, cached] = stage.librbd();
    let runs = bench.rounds(&[hob, plain, cached], &COLD, stage.size)?;
    Ok(Setting { name: "cold", size: stage.size, seconds: bench.seconds, runs, bars: &COLD_BARS })
}
