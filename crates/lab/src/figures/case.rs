//! Runs one case of a figure: a generator's plan on modelled devices, with its measurements.

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
use hob_world::service::{FixedModel, LunModel, ServiceModel};

use crate::generate::{Clients, GeneratorInfo, Load, Plan, Turn};

/// One run of a figure; see the module documentation.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) generator: &'static str,
    /// Parameters of the generator, as `key=value`.
    pub(super) settings: Vec<String>,
    /// Cache of the run.
    pub(super) cache: CaseCache,
    /// Backing of all disks.
    pub(super) backing: Backing,
    /// True to combine all disks into one, as an array with a single cache sees them.
    pub(super) on_one_disk: bool,
    /// True to run the whole load once before the measurement.
    pub(super) twice: bool,
    /// Changes the settings of the cache before the run.
    pub(super) adjust: Option<fn(&mut CacheSetup)>,
}

impl Case {
    /// Creates a run of a generator with these `key=value` settings.
    pub(super) fn new(
        generator: &'static str,
        settings: &[&str],
        cache: CaseCache,
        backing: Backing,
    ) -> Case {
        let settings = settings.iter().map(|&setting| setting.to_owned()).collect();
        Case { generator, settings, cache, backing, on_one_disk: false, twice: false, adjust: None }
    }

    /// Returns the case with all disks combined into one.
    pub(super) fn on_one_disk(self) -> Case {
        Case { on_one_disk: true, ..self }
    }

    /// Returns the case with a run of the load before the measurement.
    pub(super) fn twice(self) -> Case {
        Case { twice: true, ..self }
    }

    /// Adds a generator setting.
    pub(super) fn set(mut self, setting: &str) -> Case {
        self.settings.push(setting.to_owned());
        self
    }

    /// Adds a setting that omits the warm-up, for a run without a cache.
    pub(super) fn cold(mut self, setting: &str) -> Case {
        self.settings.push(setting.to_owned());
        self
    }
}

/// The cache of a run.
#[derive(Clone, Copy, Debug)]
pub(super) enum CaseCache {
    /// No cache: every request goes to the backing.
    Off,
    /// The plan's own cache.
    Planned(FlashConfig),
    /// A cache of the plan's size with blocks of this many bytes.
    Blocks(FlashConfig, u32),
    /// A cache with this share of the plan's size.
    Share(FlashConfig, f64),
    /// A cache with the preset of this name. If the preset keeps two copies of all data, the cache
    /// has twice the plan's size.
    Preset(FlashConfig, &'static str),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Backing {
    /// A device with this fixed latency in nanoseconds, for sources that publish only a mean.
    FixedNs(u64),
    /// A disk array. The function returns the array's configuration for the total size of the
    /// disks.
    Array(fn(u64) -> ArrayConfig),
    /// This many LUNs of an array. The function returns the configuration for the size of a LUN.
    /// The plan's disks are distributed over the LUNs in turn.
    Luns(usize, fn(u64) -> ArrayConfig),
}

/// Measurements of a run after the warm-up.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    /// Number of answered requests.
    pub(super) requests: u64,
    latency_ns: u128,
    /// Time from the first request to the end of the last I/O, nanoseconds.
    elapsed_ns: u64,
    /// Statistics of the first disk. Plans that use them have only one disk.
    pub(super) stats: DiskStats,
    /// Results by tag, a number that the workload generator gives each request.
    pub(super) tags: BTreeMap<u32, Tagged>,
    /// Results of reads, and of writes.
    pub(super) by_op: [Part; 2],
    /// Results by the plan's disks, even if the disks were combined into one.
    pub(super) parts: Vec<Part>,
    /// Results of writes: one entry for each hundredth ([`PORTIONS`]) of the total size of the
    /// disks that was written.
    pub(super) portions: Vec<Portion>,
    /// Samples of a preset's cache, one per [`SAMPLED_REQUESTS`] replies.
    pub(super) samples: Vec<Sample>,
    /// Maximum number of requests answered within one second of the run, and the mean latency of
    /// that second, seconds.
    pub(super) peak: (u64, f64),
    transactions: Transactions,
}

/// Number of portions into which written bytes are divided.
pub(super) const PORTIONS: u64 = 100;

/// Number of requests between two samples of a cache.
const SAMPLED_REQUESTS: u64 = 500;

/// Results of a part of the requests: those of one disk of the plan, or of one operation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Part {
    pub(super) requests: u64,
    pub(super) latency_ns: u128,
}

/// Results of one portion of the written bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Portion {
    pub(super) bytes: u64,
    pub(super) requests: u64,
    /// Number of bytes of the portion that went to flash.
    pub(super) to_flash: u64,
    /// Time to write the portion, nanoseconds.
    pub(super) ns: u64,
}

impl Part {
    /// Returns the mean latency in seconds; 0 without requests.
    pub(super) fn mean_s(&self) -> f64 {
        self.latency_ns as f64 / self.requests.max(1) as f64 / 1e9
    }
}

impl Portion {
    /// Returns the write rate in bytes per second.
    pub(super) fn rate(&self) -> f64 {
        self.bytes as f64 / (self.ns as f64 / 1e9)
    }
}

/// Sums of the answered requests during a run.
struct Tally {
    starts: Vec<u64>,
    portion_bytes: u64,
    /// Start time of the current portion.
    portion_began: u64,
    portion: Portion,
    /// The current second: its number, its requests, and the sum of their latencies.
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
            by_op: [Part::default(); 2],
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
        let is_write = matches!(served.ask.op, Op::Write(_));
        for part in [&mut measured.parts[part], &mut measured.by_op[usize::from(is_write)]] {
            part.requests += 1;
            part.latency_ns += latency_ns;
        }
        self.count_second(ended_ns / 1_000_000_000, latency_ns);
        if is_write {
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

/// Results of the requests with one tag.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tagged {
    pub(super) requests: u64,
    pub(super) hits: u64,
    /// Time of the last reply, nanoseconds of virtual time.
    pub(super) ended_ns: u64,
}

/// Transactions. The last request of a transaction has the tag 1.
#[derive(Clone, Debug, Default)]
struct Transactions {
    count: u64,
    /// End of each client's last transaction.
    ended: BTreeMap<u32, u64>,
    /// Number of transactions that began and ended during the measurement.
    whole: u64,
    response_ns: u128,
}

impl Transactions {
    /// Records the end of a transaction. A client continues immediately, so a transaction begins at
    /// the end of the previous one.
    fn end(&mut self, client: u32, at: u64) {
        self.count += 1;
        if let Some(began) = self.ended.insert(client, at) {
            self.whole += 1;
            self.response_ns += u128::from(at - began);
        }
    }
}

impl Measured {
    pub(super) fn mean_s(&self) -> f64 {
        self.latency_ns as f64 / self.requests as f64 / 1e9
    }

    /// Returns the number of transactions per minute.
    pub(super) fn per_minute(&self) -> f64 {
        self.transactions.count as f64 / (self.elapsed_ns as f64 / 60e9)
    }

    /// Returns the mean duration of a transaction in seconds, including think time.
    pub(super) fn response_s(&self) -> f64 {
        self.transactions.response_ns as f64 / self.transactions.whole as f64 / 1e9
    }

    /// Returns requests per second and hit ratio of each tag. The requests of a tag must follow
    /// those of the previous tag, and the run must begin at virtual time 0.
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

/// Runs the case. `requests` counts all requests, including the warm-up.
///
/// # Errors
/// Returns an error if the case is inconsistent or `stop` was set.
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
    let setup = case.setup(&plan, starts.len() as u64)?;
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
    /// Returns the set-up of a plan whose `disks` disks of equal size may be combined into one.
    fn setup(&self, plan: &Plan, disks: u64) -> Result<Setup> {
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
        let cache = cache.map(|mut cache| {
            self.adjust.iter().for_each(|adjust| adjust(&mut cache));
            cache
        });
        let backing: ServiceModel = match self.backing {
            Backing::FixedNs(ns) => FixedModel::new(ns, ns, usize::MAX).into(),
            Backing::Array(config) => ArrayModel::new(config(plan.disks_bytes())).into(),
            Backing::Luns(count, config) => {
                let bytes = plan.disks_bytes().div_ceil(disks) * disks.div_ceil(count as u64);
                let luns = (0..count).map(|_| ArrayModel::new(config(bytes))).collect();
                LunModel::new(luns, plan.disks_bytes().div_ceil(disks)).into()
            }
        };
        Ok(plan.setup(cache, FlashModel::new(flash), backing))
    }
}

/// Returns the value of the `scale` setting, or 1.
pub(super) fn scale_of(settings: &[String]) -> u64 {
    let scale = settings.iter().rev().find_map(|setting| setting.strip_prefix("scale="));
    scale.and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Returns the plan with a load that counts its requests and ends when `stop` is set.
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
