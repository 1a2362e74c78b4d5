//! One run of a figure: a generator's plan on modelled devices, and its measurements.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use hob_engine::command::Copies;
use hob_engine::io::Op;
use hob_engine::outcome::Outcome;
use hob_engine::policy::PolicyKind;
use hob_engine::preset::preset;
use hob_engine::stats::DiskStats;
use hob_engine::units::Instant;
use hob_world::disk_model::{ArrayConfig, ArrayModel};
use hob_world::flash_model::{FlashConfig, FlashModel};
use hob_world::replay::{CacheSetup, Replay, Sample, Served, Setup};
use hob_world::service::{FixedModel, ServiceModel};

use crate::generate::{Clients, GeneratorInfo, Load, Plan, Turn};

/// A run; see the module documentation.
#[derive(Clone, Debug)]
pub(super) struct Case {
    /// Row of [`GENERATORS`](crate::generate::GENERATORS).
    pub(super) generator: &'static str,
    /// Its parameters, `key=value`.
    pub(super) settings: Vec<String>,
    /// The cache.
    pub(super) cache: CaseCache,
    /// The backing of all disks.
    pub(super) backing: Backing,
    /// All disks are combined into one, as an array sees them that caches for all.
    pub(super) on_one_disk: bool,
    /// The whole load is run once before it is measured.
    pub(super) twice: bool,
}

impl Case {
    /// Creates a run of that generator with these `key=value` settings.
    pub(super) fn new(
        generator: &'static str,
        settings: &[&str],
        cache: CaseCache,
        backing: Backing,
    ) -> Case {
        let settings = settings.iter().map(|&setting| setting.to_owned()).collect();
        Case { generator, settings, cache, backing, on_one_disk: false, twice: false }
    }

    /// Combines all disks into one.
    pub(super) fn on_one_disk(self) -> Case {
        Case { on_one_disk: true, ..self }
    }

    /// Runs the load once before it is measured.
    pub(super) fn twice(self) -> Case {
        Case { twice: true, ..self }
    }

    /// Adds a setting.
    pub(super) fn set(mut self, setting: &str) -> Case {
        self.settings.push(setting.to_owned());
        self
    }

    /// Adds the setting that omits the warm-up: without a cache none is needed.
    pub(super) fn cold(mut self, setting: &str) -> Case {
        self.settings.push(setting.to_owned());
        self
    }
}

/// The cache of a run.
#[derive(Clone, Copy, Debug)]
pub(super) enum CaseCache {
    /// None: every request goes to the backing.
    Off,
    /// The plan's own.
    Planned(FlashConfig),
    /// With blocks of this many bytes, and the plan's size.
    Blocks(FlashConfig, u32),
    /// With this share of the plan's size.
    Share(FlashConfig, f64),
    /// With the preset of that name. The plan's size does not include permanent second copies.
    Preset(FlashConfig, &'static str),
}

/// The backing.
#[derive(Clone, Copy, Debug)]
pub(super) enum Backing {
    /// A fixed latency in nanoseconds: the source gives only the mean of its array.
    FixedNs(u64),
    /// Disks, by the number of bytes they must hold.
    Array(fn(u64) -> ArrayConfig),
}

/// Measurements after the warm-up.
#[derive(Debug)]
pub(super) struct Measured {
    /// Number of answered requests.
    pub(super) requests: u64,
    latency_ns: u128,
    /// From the first request to the end of the last I/O.
    elapsed_ns: u64,
    /// Statistics of the first disk, the only one in all these plans.
    pub(super) stats: DiskStats,
    /// By the generator's mark.
    pub(super) tags: BTreeMap<u32, Tagged>,
    /// By the plan's disks, also if they were combined into one.
    pub(super) parts: Vec<Part>,
    /// The written bytes, in [`PORTIONS`] equal portions of the disks' size.
    pub(super) portions: Vec<Portion>,
    /// Samples of a preset's cache, one after every [`SAMPLED_REQUESTS`] answers.
    pub(super) samples: Vec<Sample>,
    /// Maximum number of requests answered within one second of the run, and their mean latency, seconds.
    pub(super) peak: (u64, f64),
    transactions: Transactions,
}

/// Number of portions into which written bytes are divided.
pub(super) const PORTIONS: u64 = 100;

/// Number of requests between two samples of a cache.
const SAMPLED_REQUESTS: u64 = 500;

/// Requests of one of the plan's disks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Part {
    pub(super) requests: u64,
    pub(super) latency_ns: u128,
}

/// A portion of the written bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Portion {
    pub(super) bytes: u64,
    pub(super) requests: u64,
    /// Bytes of it that went to flash.
    pub(super) to_flash: u64,
    /// Time from the end of the portion before to the end of this one, nanoseconds.
    pub(super) ns: u64,
}

impl Portion {
    /// Returns bytes a second.
    pub(super) fn rate(&self) -> f64 {
        self.bytes as f64 / (self.ns as f64 / 1e9)
    }
}

/// Sums of the served requests during a run.
struct Tally {
    starts: Vec<u64>,
    portion_bytes: u64,
    /// Start of the present portion.
    portion_began: u64,
    portion: Portion,
    /// The present second: its number, requests, and sum of their latencies.
    second: (u64, u64, u128),
    measured: Measured,
}

impl Tally {
    fn new(starts: Vec<u64>, disks_bytes: u64, began: Instant, stats: DiskStats) -> Tally {
        let measured = Measured {
            requests: 0,
            latency_ns: 0,
            elapsed_ns: 0,
            stats,
            tags: BTreeMap::new(),
            parts: vec![Part::default(); starts.len()],
            portions: vec![],
            samples: vec![],
            peak: (0, 0.0),
            transactions: Transactions::default(),
        };
        let portion_bytes = disks_bytes.div_ceil(PORTIONS).max(1);
        let (portion, portion_began) = (Portion::default(), began.0);
        Tally { starts, portion_bytes, portion_began, portion, second: (0, 0, 0), measured }
    }

    fn add(&mut self, served: &Served, on_one_disk: bool) {
        let ended_ns = served.at.0 + served.latency_ns;
        let latency_ns = u128::from(served.latency_ns);
        let measured = &mut self.measured;
        measured.latency_ns += latency_ns;
        let tagged: &mut Tagged = measured.tags.entry(served.ask.tag).or_default();
        tagged.requests += 1;
        tagged.hits += u64::from(served.outcome == Outcome::Hit);
        tagged.ended_ns = tagged.ended_ns.max(ended_ns);
        if served.ask.tag == 1 {
            measured.transactions.end(served.client, ended_ns);
        }
        let part = match on_one_disk {
            true => self.starts.partition_point(|start| *start <= served.ask.offset) - 1,
            false => served.ask.disk as usize,
        };
        measured.parts[part].requests += 1;
        measured.parts[part].latency_ns += latency_ns;
        self.count_second(ended_ns / 1_000_000_000, latency_ns);
        if matches!(served.ask.op, Op::Write(_)) {
            self.count_written(ended_ns, served);
        }
    }

    fn count_written(&mut self, ended_ns: u64, served: &Served) {
        let portion = &mut self.portion;
        portion.bytes += served.ask.len;
        portion.requests += 1;
        portion.to_flash += if served.outcome == Outcome::WriteBack { served.ask.len } else { 0 };
        if portion.bytes >= self.portion_bytes {
            portion.ns = ended_ns - self.portion_began;
            self.portion_began = ended_ns;
            self.measured.portions.push(std::mem::take(portion));
        }
    }

    fn count_second(&mut self, second: u64, latency_ns: u128) {
        let (number, requests, sum) = &mut self.second;
        if second != *number {
            (*number, *requests, *sum) = (second, 0, 0);
        }
        *requests += 1;
        *sum += latency_ns;
        if *requests > self.measured.peak.0 {
            self.measured.peak = (*requests, *sum as f64 / *requests as f64 / 1e9);
        }
    }
}

/// Requests of one mark.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tagged {
    pub(super) requests: u64,
    pub(super) hits: u64,
    /// When the last of them was answered, nanoseconds of the run.
    pub(super) ended_ns: u64,
}

/// Transactions, marked by 1 on their last request.
#[derive(Debug, Default)]
struct Transactions {
    count: u64,
    /// When each client's last one ended.
    ended: BTreeMap<u32, u64>,
    /// Number of transactions that began and ended while measured.
    whole: u64,
    response_ns: u128,
}

impl Transactions {
    /// A client starts again immediately, so a transaction begins where its predecessor ended.
    fn end(&mut self, client: u32, at: u64) {
        self.count += 1;
        if let Some(began) = self.ended.insert(client, at) {
            self.whole += 1;
            self.response_ns += u128::from(at - began);
        }
    }
}

impl Measured {
    /// Returns the mean latency in seconds.
    pub(super) fn mean_s(&self) -> f64 {
        self.latency_ns as f64 / self.requests as f64 / 1e9
    }

    /// Returns transactions a minute.
    pub(super) fn per_minute(&self) -> f64 {
        self.transactions.count as f64 / (self.elapsed_ns as f64 / 60e9)
    }

    /// Returns the mean duration of a transaction in seconds, think time included.
    pub(super) fn response_s(&self) -> f64 {
        self.transactions.response_ns as f64 / self.transactions.whole as f64 / 1e9
    }

    /// Returns requests a second and hit ratio of each mark, for consecutive marks.
    pub(super) fn passes(&self) -> Vec<(f64, f64)> {
        let mut began = 0;
        let pass = |tagged: &Tagged| {
            let seconds = (tagged.ended_ns - began) as f64 / 1e9;
            began = tagged.ended_ns;
            (tagged.requests as f64 / seconds, tagged.hits as f64 / tagged.requests as f64)
        };
        self.tags.values().map(pass).collect()
    }
}

/// Runs the case; `requests` counts the requests handed out, warm-up included.
///
/// # Errors
/// The case is inconsistent, or `stop` was set.
pub(super) fn play(case: &Case, stop: &Arc<AtomicBool>, requests: &Arc<AtomicU64>) -> Result<Measured> {
    let fresh = || -> Result<Plan> {
        let plan = GeneratorInfo::find(case.generator)?.plan(&case.settings)?;
        Ok(watched(plan, stop, requests))
    };
    let mut plan = fresh()?;
    let starts: Vec<u64> = plan.starts().collect();
    if case.on_one_disk {
        plan = plan.on_one_disk();
    }
    let setup = case.setup(&plan)?;
    let mut replay = Replay::new(setup)?;
    if case.twice {
        let before = fresh()?;
        let before = if case.on_one_disk { before.on_one_disk() } else { before };
        before.play_on(&mut replay, 1.0, |_| {});
        replay.reset_stats();
    }
    let bytes = plan.disks_bytes();
    let stats = replay.stats(0).context("a plan has a disk")?;
    let mut tally = Tally::new(starts, bytes, replay.now(), stats);
    if let CaseCache::Preset(..) = case.cache {
        replay.watch(0, SAMPLED_REQUESTS);
    }
    let run = plan.play_on(&mut replay, 1.0, |served| tally.add(served, case.on_one_disk));
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    let stats = replay.stats(0).context("a plan has a disk")?;
    Ok(Measured {
        requests: run.requests,
        elapsed_ns: run.ended - run.began,
        stats,
        samples: replay.samples().to_vec(),
        ..tally.measured
    })
}

impl Case {
    fn setup(&self, plan: &Plan) -> Result<Setup> {
        let planned = plan.cache(PolicyKind::default());
        let (cache, flash) = match self.cache {
            CaseCache::Off => (None, FlashConfig::sata_ssd()),
            CaseCache::Planned(flash) => (Some(planned), flash),
            CaseCache::Blocks(flash, block_bytes) => {
                (Some(CacheSetup::volatile(planned.bytes, block_bytes, PolicyKind::default())), flash)
            }
            CaseCache::Share(flash, share) => {
                (Some(planned.with_bytes((planned.bytes as f64 * share) as u64)), flash)
            }
            CaseCache::Preset(flash, name) => {
                let preset = preset(name).context("a figure's preset")?;
                let copies = if preset.copies == Copies::TwoOfAll { 2 } else { 1 };
                (Some(CacheSetup::preset(planned.bytes * copies, preset)), flash)
            }
        };
        let backing: ServiceModel = match self.backing {
            Backing::FixedNs(ns) => FixedModel::new(ns, ns, usize::MAX).into(),
            Backing::Array(config) => ArrayModel::new(config(plan.disks_bytes())).into(),
        };
        Ok(plan.setup(cache, FlashModel::new(flash), backing))
    }
}

/// Returns the `scale` of the settings.
pub(super) fn scale_of(settings: &[String]) -> u64 {
    let scale = settings.iter().rev().find_map(|setting| setting.strip_prefix("scale="));
    scale.and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Returns the plan with a load that counts its requests and ends when it is stopped.
fn watched(plan: Plan, stop: &Arc<AtomicBool>, requests: &Arc<AtomicU64>) -> Plan {
    let watch = Watch { stop: Arc::clone(stop), requests: Arc::clone(requests) };
    let load = match plan.load {
        Load::Open(records) => Load::Open(Box::new(records.take_while(move |_| watch.goes_on()))),
        Load::Closed(clients) => Load::Closed(Box::new(Watched { clients, watch })),
    };
    Plan { load, ..plan }
}

struct Watch {
    stop: Arc<AtomicBool>,
    requests: Arc<AtomicU64>,
}

impl Watch {
    fn goes_on(&self) -> bool {
        self.requests.fetch_add(1, Ordering::Relaxed);
        !self.stop.load(Ordering::Relaxed)
    }
}

struct Watched {
    clients: Box<dyn Clients + Send>,
    watch: Watch,
}

impl Clients for Watched {
    fn count(&self) -> u32 {
        self.clients.count()
    }

    fn next(&mut self, client: u32) -> Option<Turn> {
        self.watch.goes_on().then(|| self.clients.next(client)).flatten()
    }
}
