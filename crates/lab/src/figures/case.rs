//! Runs one case of a figure: a generator's experiment on modelled devices, with its measurements.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, anyhow, bail};
use hob_engine::command::{CommandError, Copies, MemoryConfig};
use hob_engine::policy::PolicyKind;
use hob_engine::preset::preset;
use hob_world::disk_model::{ArrayConfig, ArrayModel};
use hob_world::flash_model::{FlashConfig, FlashModel};
use hob_world::remote_model::{RemoteConfig, RemoteModel};
use hob_world::replay::{CacheSetup, Replay, Setup};
use hob_world::service::{FixedModel, LunModel, ServiceModel};

use super::measured::Tally;
pub(super) use super::measured::{Measured, Portion};
use crate::generate::{Clients, Experiment, GeneratorInfo, Load, Turn};

/// Function that changes a replay before its first request.
pub(super) type Begin = fn(&mut Replay) -> Result<(), CommandError>;

/// One run of a figure: a generator's experiment on modelled devices.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) generator: &'static str,
    /// Parameters of the generator, as `key=value`.
    pub(super) settings: Vec<String>,
    /// Cache of the disks in this run.
    pub(super) cache: CaseCache,
    /// Backing of all disks.
    pub(super) backing: Backing,
    /// True if all disks are combined into one disk, as an array with a single cache sees them.
    pub(super) on_one_disk: bool,
    /// True if the whole load runs once before the measurement.
    pub(super) twice: bool,
    /// Function that changes the settings of the cache before the run.
    pub(super) adjust: Option<fn(&mut CacheSetup)>,
    /// Size of the memory tier above the cache of the first disk, bytes before scaling. 0 means no
    /// memory tier.
    pub(super) memory_bytes: u64,
    /// True if the results of the run list the valid data of the first disk's cache.
    pub(super) lists_extents: bool,
    /// Function that changes disks and devices before the run, for example the cache of one disk.
    pub(super) arrange: Option<fn(&mut Setup)>,
    /// Function that changes the replay before the first request, for example shares of disks.
    pub(super) begin: Option<Begin>,
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
        Case {
            generator,
            settings,
            cache,
            backing,
            on_one_disk: false,
            twice: false,
            adjust: None,
            memory_bytes: 0,
            lists_extents: false,
            arrange: None,
            begin: None,
        }
    }

    pub(super) fn on_one_disk(self) -> Case {
        Case { on_one_disk: true, ..self }
    }

    /// Returns the case with one more run of the whole load, before the measurement.
    pub(super) fn twice(self) -> Case {
        Case { twice: true, ..self }
    }

    /// Returns the case with a memory tier of this size before scaling, bytes, above the cache of
    /// the first disk.
    pub(super) fn memory(self, memory_bytes: u64) -> Case {
        Case { memory_bytes, ..self }
    }

    /// Returns the case with a function that changes the replay before the first request.
    pub(super) fn begin(self, change: Begin) -> Case {
        Case { begin: Some(change), ..self }
    }

    pub(super) fn set(mut self, setting: &str) -> Case {
        self.settings.push(setting.to_owned());
        self
    }
}

/// The cache of a run.
#[derive(Clone, Copy, Debug)]
pub(super) enum CaseCache {
    /// The run has no cache: every request goes to the backing.
    Off,
    /// The cache of the published set-up
    /// ([`Experiment::cache`](crate::generate::Experiment::cache)).
    Planned(FlashConfig),
    /// A cache of the published size with blocks of this many bytes.
    Blocks(FlashConfig, u32),
    /// A cache with this share of the published size.
    Share(FlashConfig, f64),
    /// A cache with the preset of this name. If the preset keeps two copies of all data, the cache
    /// has twice the published size.
    Preset(FlashConfig, &'static str),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Backing {
    /// A device with this fixed latency in nanoseconds, for sources that publish only a mean.
    FixedNs(u64),
    /// A disk array. The function returns the array's configuration for the total size of the
    /// disks.
    Array(fn(u64) -> ArrayConfig),
    /// The backing consists of this many LUNs of an array. The function returns the array's
    /// configuration for the size of a LUN. The experiment's disks are distributed over the LUNs in
    /// turn.
    Luns(usize, fn(u64) -> ArrayConfig),
    /// As `Luns`, with one more LUN for the last disk of the experiment. The second function
    /// returns the configuration of that LUN's array.
    LunsAndOne(usize, fn(u64) -> ArrayConfig, fn(u64) -> ArrayConfig),
    /// A volume that is accessed through a network.
    Remote(RemoteConfig),
}

/// Number of replies between two samples of a preset's cache.
const SAMPLED_REQUESTS: u64 = 500;

/// Runs the case. `requests` counts all requests, including the warm-up.
///
/// # Errors
/// Returns an error if the case is inconsistent or `stop` was set.
pub(super) fn play(case: &Case, stop: &Arc<AtomicBool>, requests: &Arc<AtomicU64>) -> Result<Measured> {
    let fresh = || -> Result<Experiment> {
        let experiment = GeneratorInfo::find(case.generator)?.experiment(&case.settings)?;
        Ok(watched(experiment, stop, requests))
    };
    let mut experiment = fresh()?;
    let starts: Vec<u64> = experiment.starts().collect();
    if case.on_one_disk {
        experiment = experiment.on_one_disk();
    }
    let setup = case.setup(&experiment, starts.len() as u64)?;
    let mut replay = Replay::new(setup)?;
    let memory = MemoryConfig { bytes: case.memory_bytes / scale_of(&case.settings), page_bytes: 4096 };
    let memory = (memory.bytes > 0).then(|| replay.set_memory(0, memory)).transpose();
    let begun = memory.and_then(|_| case.begin.map(|begin| begin(&mut replay)).transpose());
    begun.map_err(|error| anyhow!("the replay cannot begin: {error:?}"))?;
    if case.twice {
        let before = fresh()?;
        let before = if case.on_one_disk { before.on_one_disk() } else { before };
        before.play_on(&mut replay, 1.0, |_| {});
        replay.reset_stats();
    }
    let bytes = experiment.disks_bytes();
    let stats = replay.stats(0).context("an experiment has a disk")?;
    let (began, busy_before) = (replay.now(), replay.backing_busy_ns().0);
    let mut tally = Tally::new(starts, bytes, began, stats);
    if let CaseCache::Preset(..) = case.cache {
        replay.watch(0, SAMPLED_REQUESTS);
    }
    let run = experiment.play_on(&mut replay, 1.0, |served| tally.add(served, case.on_one_disk));
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    let (busy, disks) = replay.backing_busy_ns();
    let lasted = (replay.now() - began) * disks as u64;
    let stats = replay.stats(0).context("an experiment has a disk")?;
    Ok(Measured {
        requests: run.requests,
        elapsed_ns: run.ended - run.began,
        stats,
        utilisation: (busy - busy_before) as f64 / lasted.max(1) as f64,
        samples: replay.samples().to_vec(),
        extents: if case.lists_extents { replay.hottest_extents(0) } else { vec![] },
        ..tally.measured
    })
}

impl Case {
    /// Returns the set-up of an experiment whose `disks` disks of equal size may be combined into one.
    fn setup(&self, experiment: &Experiment, disks: u64) -> Result<Setup> {
        let planned = experiment.cache(PolicyKind::default());
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
            Backing::Remote(config) => RemoteModel::new(config).into(),
            Backing::FixedNs(ns) => FixedModel::new(ns, ns, usize::MAX).into(),
            Backing::Array(config) => ArrayModel::new(config(experiment.disks_bytes())).into(),
            Backing::Luns(count, config) => {
                luns(experiment.disks_bytes().div_ceil(disks), disks as usize, count, config, None)
            }
            Backing::LunsAndOne(count, config, last) => {
                luns(experiment.disks_bytes().div_ceil(disks), disks as usize, count, config, Some(last))
            }
        };
        let mut setup = experiment.setup(cache, FlashModel::new(flash), backing);
        self.arrange.iter().for_each(|arrange| arrange(&mut setup));
        Ok(setup)
    }
}

/// Returns an array for this number of disks of `range_bytes` bytes. The disks are distributed over
/// `count` LUNs in turn. If the LUN `last` is given, the last disk lies on this LUN.
fn luns(
    range_bytes: u64,
    disks: usize,
    count: usize,
    config: fn(u64) -> ArrayConfig,
    last: Option<fn(u64) -> ArrayConfig>,
) -> ServiceModel {
    let in_turn = if last.is_some() { disks - 1 } else { disks };
    let bytes = range_bytes * in_turn.div_ceil(count) as u64;
    let mut luns: Vec<ArrayModel> = (0..count).map(|_| ArrayModel::new(config(bytes))).collect();
    let mut lun_of: Vec<usize> = (0..in_turn).map(|disk| disk % count).collect();
    if let Some(last) = last {
        luns.push(ArrayModel::new(last(range_bytes)));
        lun_of.push(count);
    }
    LunModel::new(luns, range_bytes, &lun_of).into()
}

/// Returns the value of the `scale` setting, or 1.
pub(super) fn scale_of(settings: &[String]) -> u64 {
    let scale = settings.iter().rev().find_map(|setting| setting.strip_prefix("scale="));
    scale.and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Returns the experiment with a load that counts its requests and ends when `stop` is set.
fn watched(experiment: Experiment, stop: &Arc<AtomicBool>, requests: &Arc<AtomicU64>) -> Experiment {
    let watch = Watch { stop: Arc::clone(stop), requests: Arc::clone(requests) };
    let load = match experiment.load {
        Load::Open(records) => Load::Open(Box::new(records.take_while(move |_| watch.goes_on()))),
        Load::Closed(clients) => Load::Closed(Box::new(Watched { clients, watch })),
    };
    Experiment { load, ..experiment }
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
