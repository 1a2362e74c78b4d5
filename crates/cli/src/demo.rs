//! `hob demo`: shows the effect of a cache with a slow array, a pool on this host's disk, and a
//! client.
//!
//! Only the slowness of the array is simulated: the model `hob_world::disk_model` computes the delay
//! of each request, and the demo waits for that time. The data is in files, and the requests go over
//! an NBD socket to a real shard.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use comfy_table::Table;
use hob_daemon::OneDisk;
use hob_engine::admission::Admission;
use hob_engine::command::{Access, CacheConfig, DiskConfig};
use hob_engine::policy::PolicyKind;
use hob_engine::units::{DatastoreId, DeviceId};
use hob_lab::driver::{self, Run};
use hob_lab::picture::{ChartText, Phase, latency_over_time};
use hob_lab::summary::Summary;
use hob_lab::workload::{Workload, WorkloadConfig};
use hob_nbd::NbdUri;
use hob_storage::backing::{Backing, BackingOptions, ModelledOp, ServiceTime};
use hob_storage::pool::{DeviceSpec, Overwrite, OwnerId, Pool, device_bytes_for};
use hob_world::disk_model::{self, ArrayConfig, ArrayModel};
use indicatif::{ProgressBar, ProgressStyle};

use super::output::line;
use super::replay::stop_on_signals;

const FLASH: DeviceId = DeviceId(0);
const DISK_BYTES: u64 = 512 << 20;
const CACHE_BYTES: u64 = 128 << 20;
const SEGMENT_BYTES: u64 = 1 << 20;
const REQUEST_BYTES: u32 = 8 << 10;
const REQUESTS: usize = 4_000;
const DEPTH: usize = 16;
/// Minimum duration of the warm pass. The pass is repeated for this time, so that the chart shows
/// it beside the slow passes.
const WARM_FOR: Duration = Duration::from_secs(3);

/// Show the effect of a cache on this host, within a minute
#[derive(Debug, Args)]
pub(crate) struct Demo {
    /// Continue to serve the disk afterwards until Ctrl-C, and print how to connect
    #[arg(long)]
    keep: bool,
    /// File for the chart
    #[arg(long, value_name = "FILE", default_value = "hob-demo.svg")]
    picture: PathBuf,
    /// Directory for the disk and the pool [default: a new temporary directory]
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
}

pub(crate) fn run(args: Demo) -> anyhow::Result<()> {
    let stop = stop_on_signals()?;
    check_picture(&args.picture)?;
    let scratch = match &args.scratch {
        Some(dir) => tempfile::Builder::new().prefix("hob-demo-").tempdir_in(dir),
        None => tempfile::Builder::new().prefix("hob-demo-").tempdir(),
    }
    .context("cannot create a scratch directory; name another place with --scratch")?;
    let host = Host::start(scratch.path(), &stop)?;
    line(&format!(
        "A {} disk on a modelled RAID 5 of four 7200 rpm disks; {} reads of {} KiB, a few blocks much more popular\n\
         than the rest, {} at a time, over NBD. First without a cache, then with {} of flash.\n",
        mib(DISK_BYTES),
        REQUESTS,
        REQUEST_BYTES >> 10,
        DEPTH,
        mib(CACHE_BYTES),
    ))?;
    let measured = match host.measure() {
        Ok(measured) => measured,
        Err(error) => {
            // The directory can be removed when the socket is closed.
            let _ = host.end();
            // A signal can also end an operation with an error of its own.
            check_stop(&stop)?;
            return Err(error);
        }
    };
    line(&format!("{}\n", table(&measured)))?;
    draw(&args.picture, &measured)?;
    line(&format!("Latency over time, cold pass and warm: {}", args.picture.display()))?;
    if args.keep {
        line(&format!(
            "\nServing until Ctrl-C. Connect with, for example:\n  nbdinfo '{uri}'\n  qemu-img info '{uri}'\n  \
             fio --name=try --ioengine=nbd --uri='{uri}' --rw=randread --bs=8k --iodepth=16 --runtime=5 --time_based",
            uri = host.uri
        ))?;
        while !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    host.end()
}

/// Result of one pass over the requests.
struct Pass {
    name: &'static str,
    run: Run,
    hits: f64,
}

/// The parts of a daemon that the demonstration needs.
struct Host {
    uri: NbdUri,
    disk: OneDisk,
    pool: RefCell<Pool>,
    stop: Arc<AtomicBool>,
}

impl Host {
    fn start(scratch: &Path, stop: &Arc<AtomicBool>) -> anyhow::Result<Host> {
        let (disk, flash, socket) =
            (scratch.join("disk.img"), scratch.join("flash.pool"), scratch.join("nbd.sock"));
        make_disk(&disk, stop)?;
        let spec = DeviceSpec { path: flash, size_bytes: Some(device_bytes_for(CACHE_BYTES, SEGMENT_BYTES)) };
        let pool = Pool::create("demo", &[spec], SEGMENT_BYTES, Overwrite::Refuse)?;
        let backing = Backing::open(path_text(&disk)?, Access::ReadWrite, &BackingOptions::default())?
            .modelled(Box::new(Array(ArrayModel::new(ArrayConfig::raid5_of_four_7200(DISK_BYTES)))));

        let config =
            DiskConfig { size_bytes: DISK_BYTES, access: Access::ReadWrite, datastore: DatastoreId(0) };
        let uri = format!("nbd+unix:///demo?socket={}", path_text(&socket)?).parse()?;
        let flash = (FLASH, pool.file(FLASH)?);
        let disk = OneDisk::serve("demo", &socket, (config, backing), flash)?;
        Ok(Host { uri, disk, pool: RefCell::new(pool), stop: Arc::clone(stop) })
    }

    /// Measures without a cache, with an empty one, and with a full one.
    fn measure(&self) -> anyhow::Result<Vec<Pass>> {
        let workload = Workload::new(&WorkloadConfig {
            footprint_bytes: DISK_BYTES,
            request_bytes: REQUEST_BYTES,
            theta: 1.1,
            read_permille: 1000,
            seed: 1,
        });
        let accesses: Vec<_> = workload.take(REQUESTS).collect();
        let without = self.pass("without cache", &accesses)?;
        self.enable_cache()?;
        let cold = self.pass("cold cache", &accesses)?;
        // Measures the list of requests once, to compute how often the warm pass must repeat it.
        let once = self.pass("warm cache, once", &accesses)?;
        let times = WARM_FOR.as_nanos() as u64 / once.run.elapsed_ns.max(1);
        let repeated = accesses.repeat((times as usize).clamp(1, 200));
        let warm = self.pass("warm cache", &repeated)?;
        Ok(vec![without, cold, warm])
    }

    fn enable_cache(&self) -> anyhow::Result<()> {
        let count = CACHE_BYTES / SEGMENT_BYTES;
        let segments = self.pool.borrow_mut().allocate(OwnerId(1), count, 0)?;
        let config = CacheConfig::write_through(
            REQUEST_BYTES,
            SEGMENT_BYTES,
            PolicyKind::default(),
            Admission::default(),
        );
        self.disk.enable_cache(config, segments)
    }

    fn pass(&self, name: &'static str, accesses: &[hob_lab::workload::Access]) -> anyhow::Result<Pass> {
        let style = ProgressStyle::with_template("{prefix:16} {bar:40} {percent:>3} %  {msg}")?;
        let bar = ProgressBar::new(accesses.len() as u64).with_style(style).with_prefix(name);
        let before = self.disk.stats()?;
        let run = driver::drive(&self.uri, accesses, DEPTH, &self.stop, |done, _| bar.set_position(done))?;
        check_stop(&self.stop)?;
        let after = self.disk.stats()?;
        let hits = (after.read_hits - before.read_hits) as f64 / (after.reads - before.reads).max(1) as f64;
        bar.finish_with_message(format!("{:.1} s", run.elapsed_ns as f64 / 1e9));
        if bar.is_hidden() {
            line(&format!("{name}: {} requests in {:.1} s", run.samples.len(), run.elapsed_ns as f64 / 1e9))?;
        }
        ensure!(run.errors == 0, "{} requests failed: {:?}", run.errors, run.first_error);
        Ok(Pass { name, run, hits })
    }

    fn end(self) -> anyhow::Result<()> {
        self.disk.end()
    }
}

/// The simulated array, which determines how long the backing takes for each I/O.
struct Array(ArrayModel);

impl ServiceTime for Array {
    fn submit(&mut self, now_ns: u64, op: ModelledOp, offset: u64, len: u64) -> u64 {
        let access = match op {
            ModelledOp::Read => disk_model::Access::Read,
            ModelledOp::Write => disk_model::Access::Write,
            ModelledOp::Flush | ModelledOp::Other => disk_model::Access::Flush,
        };
        self.0.submit(now_ns, access, offset, len)
    }
}

/// Returns an error if a signal has asked the demonstration to end.
fn check_stop(stop: &AtomicBool) -> anyhow::Result<()> {
    ensure!(!stop.load(Ordering::Relaxed), "interrupted; nothing was left behind");
    Ok(())
}

/// Checks that the chart can be written, before the demonstration takes a minute.
fn check_picture(path: &Path) -> anyhow::Result<()> {
    let exists = path.exists();
    let opened = std::fs::File::options().write(true).create(true).truncate(false).open(path);
    let at = path.display();
    opened.with_context(|| format!("cannot write the picture to {at}; name another file with --picture"))?;
    if !exists {
        std::fs::remove_file(path).with_context(|| format!("cannot remove {at}"))?;
    }
    Ok(())
}

/// Creates a disk of non-zero data, because zeroes would be sent as holes.
fn make_disk(path: &Path, stop: &AtomicBool) -> anyhow::Result<()> {
    use std::io::Write;

    let mut file = std::fs::File::create_new(path)?;
    let mut chunk = vec![0u8; 1 << 20];
    for mib in 0..DISK_BYTES >> 20 {
        check_stop(stop)?;
        for (i, word) in chunk.chunks_exact_mut(8).enumerate() {
            let value = ((mib << 17) + i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            word.copy_from_slice(&value.to_le_bytes());
        }
        file.write_all(&chunk).with_context(|| {
            format!(
                "cannot write {}; name a place with {} to spare with --scratch",
                path.display(),
                mib_free()
            )
        })?;
    }
    Ok(())
}

fn table(passes: &[Pass]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["", "mean", "p50", "p99", "IOPS", "hits"]);
    for pass in passes {
        let summary = Summary::of(&pass.run.samples);
        table.add_row([
            pass.name.to_owned(),
            latency(summary.mean_ns),
            latency(summary.p50_ns),
            latency(summary.p99_ns),
            format!("{:.0}", summary.iops),
            format!("{:.1} %", pass.hits * 100.0),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(comfy_table::CellAlignment::Right);
    }
    table
}

fn draw(path: &Path, passes: &[Pass]) -> anyhow::Result<()> {
    let notes: Vec<String> = passes.iter().map(|pass| format!("{:.1} % hits", pass.hits * 100.0)).collect();
    let phases: Vec<Phase<'_>> = passes
        .iter()
        .zip(&notes)
        .map(|(pass, note)| Phase { name: pass.name, samples: &pass.run.samples, note })
        .collect();
    let subtitle = format!(
        "{} KiB random reads (Zipf), {DEPTH} in flight, over NBD; RAID 5 of 4 × 7200 rpm (modelled), {} cache",
        REQUEST_BYTES >> 10,
        mib(CACHE_BYTES)
    );
    latency_over_time(path, &ChartText::new("The same reads without and with hob", &subtitle), &phases)
}

fn latency(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{:.0} µs", ns as f64 / 1e3),
        _ => format!("{:.2} ms", ns as f64 / 1e6),
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

fn mib_free() -> String {
    mib(DISK_BYTES + CACHE_BYTES + (16 << 20))
}

fn path_text(path: &Path) -> anyhow::Result<&str> {
    path.to_str()
        .with_context(|| format!("{} is not UTF-8; name another place with --scratch", path.display()))
}
