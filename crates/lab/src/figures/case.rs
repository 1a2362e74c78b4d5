//! One run of a figure: a generator's plan on modelled devices, and what was measured.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use hob_engine::outcome::Outcome;
use hob_engine::policy::PolicyKind;
use hob_engine::stats::DiskStats;
use hob_world::disk_model::{ArrayConfig, ArrayModel};
use hob_world::flash_model::{FlashConfig, FlashModel};
use hob_world::replay::Served;
use hob_world::service::{FixedModel, ServiceModel};

use crate::generate::run::Cache;
use crate::generate::{Clients, GeneratorInfo, Load, Plan, Turn};

/// See the module's text.
#[derive(Clone, Debug)]
pub(super) struct Case {
    /// Row of [`GENERATORS`](crate::generate::GENERATORS).
    pub(super) generator: &'static str,
    /// Its parameters, `key=value`.
    pub(super) settings: Vec<String>,
    /// What caches.
    pub(super) cache: CaseCache,
    /// What all disks lie on.
    pub(super) backing: Backing,
}

impl Case {
    /// A run of that generator with these `key=value` settings.
    pub(super) fn new(
        generator: &'static str,
        settings: &[&str],
        cache: CaseCache,
        backing: Backing,
    ) -> Case {
        let settings = settings.iter().map(|&setting| setting.to_owned()).collect();
        Case { generator, settings, cache, backing }
    }

    /// With the setting that leaves the warm-up out: without a cache there is nothing to warm.
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
    /// With blocks of that many bytes, in the plan's space.
    Blocks(FlashConfig, u32),
    /// With that share of the plan's space.
    Share(FlashConfig, f64),
}

/// What lies below.
#[derive(Clone, Copy, Debug)]
pub(super) enum Backing {
    /// Each request takes that many nanoseconds: a source that gives the mean of its array and not the array.
    FixedNs(u64),
    /// Disks, by the bytes they have to hold.
    Array(fn(u64) -> ArrayConfig),
}

/// What was measured, after the warm-up.
#[derive(Debug)]
pub(super) struct Measured {
    /// Answered.
    pub(super) requests: u64,
    latency_ns: u128,
    /// From the first request to the end of the last I/O.
    elapsed_ns: u64,
    /// Of the first disk, which is the only one of all plans here.
    pub(super) stats: DiskStats,
    /// By the generator's mark.
    pub(super) tags: BTreeMap<u32, Tagged>,
    transactions: Transactions,
}

/// Requests of one mark.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tagged {
    pub(super) requests: u64,
    pub(super) hits: u64,
    /// When the last of them was answered, nanoseconds of the run.
    pub(super) ended_ns: u64,
}

/// Transactions, told by the mark 1 on their last request.
#[derive(Debug, Default)]
struct Transactions {
    count: u64,
    /// When each client's last one ended.
    ended: BTreeMap<u32, u64>,
    /// Of those that began and ended while measured.
    whole: u64,
    response_ns: u128,
}

impl Transactions {
    /// A client starts over at once, so a transaction begins where its predecessor ended.
    fn end(&mut self, client: u32, at: u64) {
        self.count += 1;
        if let Some(began) = self.ended.insert(client, at) {
            self.whole += 1;
            self.response_ns += u128::from(at - began);
        }
    }
}

impl Measured {
    /// Seconds from a request's arrival to its answer, the mean.
    pub(super) fn mean_s(&self) -> f64 {
        self.latency_ns as f64 / self.requests as f64 / 1e9
    }

    /// Transactions a minute.
    pub(super) fn per_minute(&self) -> f64 {
        self.transactions.count as f64 / (self.elapsed_ns as f64 / 60e9)
    }

    /// Seconds of a transaction, thought included, the mean.
    pub(super) fn response_s(&self) -> f64 {
        self.transactions.response_ns as f64 / self.transactions.whole as f64 / 1e9
    }

    /// Requests a second and share of hits of each mark, for marks that follow each other.
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

/// Plays a run; `requests` counts those handed out, warm-up included.
///
/// # Errors
/// The case contradicts itself, or `stop` was set.
pub(super) fn play(case: &Case, stop: &Arc<AtomicBool>, requests: &Arc<AtomicU64>) -> Result<Measured> {
    let plan = GeneratorInfo::find(case.generator)?.plan(&case.settings)?;
    let plan = watched(plan, stop, requests);
    let planned = plan.cache(PolicyKind::default());
    let (cache, flash) = match case.cache {
        CaseCache::Off => (None, FlashConfig::sata_ssd()),
        CaseCache::Planned(flash) => (Some(planned), flash),
        CaseCache::Blocks(flash, block_bytes) => (Some(Cache { block_bytes, ..planned }), flash),
        CaseCache::Share(flash, share) => {
            (Some(Cache { bytes: (planned.bytes as f64 * share) as u64, ..planned }), flash)
        }
    };
    let backing: ServiceModel = match case.backing {
        Backing::FixedNs(ns) => FixedModel::new(ns, ns, usize::MAX).into(),
        Backing::Array(config) => ArrayModel::new(config(plan.disks_bytes())).into(),
    };
    let setup = plan.setup(cache, FlashModel::new(flash), backing);
    let (mut latency_ns, mut tags, mut transactions) = (0u128, BTreeMap::new(), Transactions::default());
    let played = plan.play(setup, 1.0, |served: &Served| {
        let ended_ns = served.at.0 + served.latency_ns;
        latency_ns += u128::from(served.latency_ns);
        let tagged: &mut Tagged = tags.entry(served.ask.tag).or_default();
        tagged.requests += 1;
        tagged.hits += u64::from(served.outcome == Outcome::Hit);
        tagged.ended_ns = tagged.ended_ns.max(ended_ns);
        if served.ask.tag == 1 {
            transactions.end(served.client, ended_ns);
        }
    })?;
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    let elapsed_ns = played.run.ended - played.run.began;
    let stats = played.disks.into_iter().next().context("a plan has a disk")?;
    Ok(Measured { requests: played.run.requests, latency_ns, elapsed_ns, stats, tags, transactions })
}

/// The `scale` among the settings.
pub(super) fn scale_of(settings: &[String]) -> u64 {
    let scale = settings.iter().rev().find_map(|setting| setting.strip_prefix("scale="));
    scale.and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// The plan with a load that counts what it hands out and ends when it is told to.
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
