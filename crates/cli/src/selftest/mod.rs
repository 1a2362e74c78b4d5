//! `hob selftest`: checks that this host and this binary lose no flushed data at a power failure.
//!
//! The command runs a separate daemon. This daemon serves a scratch disk through a cache, over a
//! layer that keeps unflushed writes in memory (`hob_storage::volatile`). The daemon is killed
//! under load, by kill -9 from outside or by the layer in the middle of an I/O, and started again.
//! Then the whole disk is read twice and compared with the client's model. After the last cut the
//! daemon ends cleanly, and the backing must have the last writes.
//!
//! Only scratch files are used, and no disk or pool of the user.

mod child;
mod load;
mod model;
mod setup;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, anyhow, ensure};
use clap::Args;
use hob_control::{CacheState, DiskState, DrainFor, Endpoint, Size};
use hob_lab::prng::Prng;
use hob_storage::volatile::{Flushes, VolatileOptions};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::Global;
use super::output::{pairs, print, table};
use super::remote::converse;
use super::replay::stop_on_signals;
use child::Daemon;
use load::{Client, Counts, Trouble};
use model::{Model, UNIT_BYTES};
use setup::{SETUPS, Setup, Stage};

/// Number of requests that are sent before each setup's daemon is stopped cleanly.
const LAST_REQUESTS: u64 = 2_000;

/// Maximum time of the last drain, which has little data and a file as its backing.
const DRAIN_MAX: Duration = Duration::from_secs(60);

/// Duration of the load before a kill from outside, milliseconds: the minimum, and the limit of the
/// random time that is added.
const LOAD_MS: (u64, u64) = (10, 250);

/// Binary logarithm of the maximum number of I/O steps after which the layer cuts the power.
const STEPS_LOG2_MAX: u64 = 15;

/// Cut the power of a daemon under load repeatedly, and check that no flushed data is lost
///
/// A separate daemon serves scratch files over a layer that loses unflushed data, as a power cut
/// does. The daemon is killed under load and started again N times. After each start, every sector is
/// read twice and must have the data of its last flushed write or of a later write. The test does not
/// use your disks and pools. Ctrl-C ends the test early.
#[derive(Debug, Args)]
pub(crate) struct Selftest {
    /// Number of power cuts, over all setups together
    #[arg(long, value_name = "N", required = true, value_parser = clap::value_parser!(u64).range(1..))]
    power_cut: u64,
    /// Setups of the cache to test; may be given more than once [default: all, in turn]
    #[arg(long, value_name = "NAME", value_parser = setup_names())]
    setup: Vec<String>,
    /// Directory for the scratch files [default: a new temporary directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Size of the disk, from 4M to 1G
    #[arg(long, value_name = "SIZE", default_value = "16M")]
    size: Size,
    /// Seed of the load and of the lost writes, to repeat a run; exact timing still differs
    /// [default: the time]
    #[arg(long)]
    seed: Option<u64>,
    /// I/O interface of the daemon: auto, io_uring or threads
    #[arg(long, default_value = "auto", value_parser = ["auto", "io_uring", "threads"])]
    ring: String,
    /// Simulate a device that ignores flushes, to show that the test detects it
    #[arg(long, hide = true)]
    ignore_flushes: bool,
}

fn setup_names() -> clap::builder::PossibleValuesParser {
    SETUPS.iter().map(|setup| setup.name).collect::<Vec<_>>().into()
}

/// The report of `hob selftest`, as `-o json` prints it.
#[derive(Debug, Serialize)]
struct Report {
    seed: u64,
    seconds: f64,
    interrupted: bool,
    setups: Vec<SetupReport>,
}

/// Test result of one cache configuration.
#[derive(Clone, Debug, Default, Serialize)]
struct SetupReport {
    setup: &'static str,
    cuts: Cuts,
    #[serde(flatten)]
    counts: Counts,
}

/// Number of power cuts in each phase of the test.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Cuts {
    /// Cuts during the daemon's start, before it served its disk.
    starting: u64,
    /// Cuts while the disk was read.
    checking: u64,
    /// Cuts under load.
    under_load: u64,
}

impl Cuts {
    fn all(self) -> u64 {
        self.starting + self.checking + self.under_load
    }
}

pub(super) fn run(args: &Selftest, global: &Global) -> anyhow::Result<()> {
    let size = args.size.bytes();
    ensure!(
        (4 << 20..=1 << 30).contains(&size) && size.is_multiple_of(1 << 20),
        "--size is a whole number of MiB from 4M to 1G, not {}",
        args.size
    );
    let stop = stop_on_signals()?;
    let seed = args.seed.unwrap_or_else(|| {
        SystemTime::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos() as u64 % 1_000_000_000)
    });
    let chosen: Vec<&Setup> = SETUPS
        .iter()
        .filter(|setup| args.setup.is_empty() || args.setup.iter().any(|name| name == setup.name))
        .take(args.power_cut.try_into().unwrap_or(usize::MAX))
        .collect();
    let mut scratch = tempfile::Builder::new();
    scratch.prefix("hob-selftest-");
    let scratch = match &args.dir {
        Some(dir) => scratch.tempdir_in(dir).with_context(|| format!("cannot use {}", dir.display()))?,
        None => scratch.tempdir()?,
    };
    tracing::info!("seed {seed}, scratch files in {}", scratch.path().display());
    let style = ProgressStyle::with_template("{bar:40} {pos} of {len} power cuts, {eta} left  {msg}")?;
    let bar = ProgressBar::new(args.power_cut).with_style(style);
    let start = Instant::now();
    let mut report = Report { seed, seconds: 0.0, interrupted: false, setups: Vec::new() };
    for (at, setup) in (0u64..).zip(&chosen) {
        let (count, sharing) = (args.power_cut, chosen.len() as u64);
        let cuts = count / sharing + u64::from(at < count % sharing);
        bar.set_message(setup.name);
        let trial = Trial::new(args, setup, seed, scratch.path(), &stop, &bar);
        let result = trial.and_then(|mut trial| trial.run(cuts).map(|()| trial.report));
        match result {
            Ok(tested) => report.setups.push(tested),
            Err(error) => {
                bar.finish_and_clear();
                let kept = scratch.keep();
                return Err(error.context(failure(args, setup, seed, &kept)));
            }
        }
        if stop.load(Ordering::Relaxed) {
            report.interrupted = true;
            break;
        }
    }
    bar.finish_and_clear();
    report.seconds = start.elapsed().as_secs_f64();
    print(global.output, &report, show)
}

/// Returns the text that precedes the error of a failed test: the place of the files, and the
/// command that repeats the test.
fn failure(args: &Selftest, setup: &Setup, seed: u64, kept: &Path) -> String {
    let Selftest { power_cut, size, ring, .. } = args;
    let name = setup.name;
    format!(
        "FAILED. Files and the daemon's log are in {}; repeat with 'hob selftest --power-cut {power_cut} --setup {name} \
         --size {size} --ring {ring} --seed {seed}'",
        kept.join(name).display()
    )
}

/// The test of one setup.
struct Trial<'a> {
    setup: &'a Setup,
    stage: Stage,
    flushes: Flushes,
    model: Model,
    dice: Prng,
    report: SetupReport,
    stop: &'a AtomicBool,
    bar: &'a ProgressBar,
}

impl<'a> Trial<'a> {
    fn new(
        args: &Selftest,
        setup: &'a Setup,
        seed: u64,
        scratch: &Path,
        stop: &'a AtomicBool,
        bar: &'a ProgressBar,
    ) -> anyhow::Result<Trial<'a>> {
        let size = args.size.bytes();
        // The seed is derived from the name, so that a setup tested alone has the same seed.
        let seed = setup.name.bytes().fold(seed, |seed, byte| seed.wrapping_mul(31) ^ u64::from(byte));
        Ok(Trial {
            setup,
            stage: Stage::make(scratch.join(setup.name), setup, size, &args.ring)?,
            flushes: if args.ignore_flushes { Flushes::Ignored } else { Flushes::Honest },
            model: Model::new(seed, size / UNIT_BYTES as u64),
            dice: Prng::new(seed),
            report: SetupReport { setup: setup.name, ..SetupReport::default() },
            stop,
            bar,
        })
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Runs `cuts` cuts, and a clean shutdown at the end.
    fn run(&mut self, cuts: u64) -> anyhow::Result<()> {
        while self.report.cuts.all() < cuts && !self.stopped() {
            let number = self.report.cuts.all() + 1;
            self.one_life().with_context(|| format!("setup {}, power cut {number}", self.report.setup))?;
        }
        match self.stopped() {
            true => Ok(()),
            false => self.peace().with_context(|| format!("setup {}, after the last cut", self.report.setup)),
        }
    }

    fn start(&mut self, cut_after: Option<u64>) -> anyhow::Result<Daemon> {
        let seed = self.dice.next_u64();
        Daemon::start(&self.stage, &VolatileOptions { seed, flushes: self.flushes, cut_after })
    }

    fn client(&mut self, nbd: hob_lab::driver::NbdClient) -> Client<'_> {
        Client::new(nbd, &mut self.model, &mut self.dice, &mut self.report.counts)
    }

    /// Runs a daemon from its start to its power cut.
    fn one_life(&mut self) -> anyhow::Result<()> {
        let first = self.report.cuts.all() == 0;
        // The first start must succeed, so that the setup can be checked.
        let steps = (!first && self.dice.below(2) == 0).then(|| {
            let most = 1 << (1 + self.dice.below(STEPS_LOG2_MAX));
            1 + self.dice.below(most)
        });
        let time = Duration::from_millis(LOAD_MS.0 + self.dice.below(LOAD_MS.1));
        let mut daemon = self.start(steps)?;
        let phase = self.live(&mut daemon, first, time)?;
        if self.stopped() {
            return Ok(());
        }
        daemon.bury()?;
        self.model.cut();
        match phase {
            Phase::Starting => self.report.cuts.starting += 1,
            Phase::Checking => self.report.cuts.checking += 1,
            Phase::Load => self.report.cuts.under_load += 1,
        }
        self.bar.inc(1);
        Ok(())
    }

    /// Uses a daemon until its power is cut, and returns the phase of the cut.
    fn live(&mut self, daemon: &mut Daemon, first: bool, time: Duration) -> anyhow::Result<Phase> {
        let Some(nbd) = daemon.connect(&self.stage)? else { return Ok(Phase::Starting) };
        if first {
            self.look()?;
        }
        let stop = self.stop;
        let mut client = self.client(nbd);
        // The first reading after a cut determines the version of each unit. The second reading
        // must return the same versions.
        match client.check_disk().and_then(|()| client.check_disk()) {
            Ok(()) => {}
            Err(Trouble::Cut) => return Ok(Phase::Checking),
            Err(Trouble::Wrong(error)) => return Err(error),
        }
        match daemon.killed_after(time, || client.load(u64::MAX, stop)) {
            Err(Trouble::Wrong(error)) => Err(error),
            Ok(()) | Err(Trouble::Cut) => Ok(Phase::Load),
        }
    }

    /// Checks that the disk is served as configured. Otherwise the test would be meaningless.
    fn look(&self) -> anyhow::Result<()> {
        let disk = converse(&self.global(), async |client| Ok(client.disk("disk").await?))?;
        let cache = disk.cache.context("the daemon did not set up the cache; see its log")?;
        ensure!(disk.state == DiskState::Online, "the disk is not online: {:?}", disk.reason);
        ensure!(cache.state != CacheState::None, "the cache is not active: {:?}", cache.reason);
        ensure!(cache.mode == self.setup.mode, "the cache's mode is {}, not {}", cache.mode, self.setup.mode);
        Ok(())
    }

    /// Drains the dirty data to the backing.
    fn drain(&self) -> anyhow::Result<()> {
        converse(&self.global(), async |client| {
            client.drain("disk", DrainFor::Drain).await?;
            let start = Instant::now();
            loop {
                let dirty = client.disk("disk").await?.cache.and_then(|cache| cache.dirty);
                match dirty {
                    Some(dirty) if dirty.size.bytes() > 0 || dirty.draining => {
                        let (size, why) = (dirty.size, dirty.why.unwrap_or_default());
                        ensure!(start.elapsed() < DRAIN_MAX, "{size} were not drained: {why}");
                    }
                    _ => return Ok(()),
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
    }

    fn global(&self) -> Global {
        Global { control: Some(Endpoint::Unix(self.stage.control_socket())), ..Global::default() }
    }

    /// Ends the daemon cleanly two times. After a clean end, no acknowledged write may be missing,
    /// flushed or not.
    /// After the first end, the next daemon must have all data and drains it. After the second end,
    /// the backing must have all data.
    fn peace(&mut self) -> anyhow::Result<()> {
        self.live_in_peace(LAST_REQUESTS, |_| Ok(()))?;
        let drain = |trial: &Self| match trial.setup.mode {
            "write-back" => trial.drain(),
            _ => Ok(()),
        };
        self.live_in_peace(0, drain).context("after a clean restart")?;
        self.check_backing().context("the backing after a clean end")
    }

    /// Runs a daemon from its start to a requested end.
    fn live_in_peace(
        &mut self,
        requests: u64,
        then: impl FnOnce(&Self) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut daemon = self.start(None)?;
        let nbd = daemon.connect(&self.stage)?.context("another process killed the daemon")?;
        let stop = self.stop;
        let mut client = self.client(nbd);
        match client.check_disk().and_then(|()| client.load(requests, stop)) {
            Ok(()) => {}
            Err(Trouble::Cut) => return Err(anyhow!("the daemon closed the connection unexpectedly")),
            Err(Trouble::Wrong(error)) => return Err(error),
        }
        drop(client);
        then(self)?;
        daemon.stop()
    }

    fn check_backing(&mut self) -> anyhow::Result<()> {
        let mut file = File::open(self.stage.disk())?;
        let mut bytes = vec![0; 1 << 20];
        for first in (0..self.model.units()).step_by(bytes.len() / UNIT_BYTES) {
            file.read_exact(&mut bytes)?;
            self.model.check(first, &bytes).map_err(|wrong| anyhow!("{wrong}"))?;
        }
        Ok(())
    }
}

/// Phase of a daemon when its power was cut.
#[derive(Clone, Copy, Debug)]
enum Phase {
    Starting,
    Checking,
    Load,
}

fn show(report: &Report) -> String {
    let all: u64 = report.setups.iter().map(|setup| setup.cuts.all()).sum();
    let verdict = match report.interrupted {
        true => "interrupted; no error was found until then",
        false => "passed: all flushed data was read back, and no other data",
    };
    let facts = [
        ("power cuts", all.to_string()),
        ("seed", report.seed.to_string()),
        ("time", format!("{:.1} s", report.seconds)),
        ("verdict", verdict.to_owned()),
    ];
    let columns = "SETUP|STARTING:|CHECKING:|UNDER LOAD:|WRITES:|FUA:|FLUSHES:|MIB CHECKED:";
    let row = |setup: &SetupReport| {
        let SetupReport { cuts, counts, .. } = setup;
        let figures = [
            cuts.starting,
            cuts.checking,
            cuts.under_load,
            counts.writes,
            counts.fua,
            counts.flushes,
            counts.bytes_checked >> 20,
        ];
        [vec![setup.setup.to_owned()], figures.iter().map(u64::to_string).collect()].concat()
    };
    format!("{}\n\n{}", pairs(facts), table(columns, report.setups.iter().map(row)))
}
