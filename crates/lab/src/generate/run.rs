//! Runs an experiment through the engine in virtual time, after a warm-up.

use hob_engine::io::{self, Durability};
use hob_engine::policy::PolicyKind;
use hob_engine::stats::DiskStats;
use hob_world::replay::{Ask, CacheSetup, DiskSetup, Replay, Run, Served, Setup, SetupError};
use hob_world::service::ServiceModel;

use super::{Clients, Experiment, Load, Turn};
use hob_trace::{Op, Record};

/// Measurements of a run without its warm-up.
#[derive(Clone, Debug)]
pub struct Played {
    /// Requests and times of the run.
    pub run: Run,
    /// Statistics of each disk in the engine.
    pub disks: Vec<DiskStats>,
}

impl Experiment {
    /// Returns the cache of the published set-up: a volatile cache with the size for all disks
    /// together.
    pub fn cache(&self, policy: PolicyKind) -> CacheSetup {
        CacheSetup::volatile(self.cache_bytes, self.block_bytes, policy)
    }

    /// Returns the set-up of a replay. The disks follow each other on the backing, share flash, and
    /// share the cache in proportion to their sizes.
    pub fn setup(
        &self,
        cache: Option<CacheSetup>,
        flash: impl Into<ServiceModel>,
        backing: impl Into<ServiceModel>,
    ) -> Setup {
        let total: u64 = self.disks_bytes();
        let mut backing_offset = 0;
        let disks = self.disks.iter().map(|&size_bytes| {
            let share = |cache: CacheSetup| {
                let bytes = u128::from(cache.bytes) * u128::from(size_bytes) / u128::from(total);
                cache.with_bytes(bytes as u64)
            };
            let disk = DiskSetup { size_bytes, backing_offset, cache: cache.map(share) };
            backing_offset += size_bytes;
            disk
        });
        Setup::of_disks(disks.collect(), flash, backing)
    }

    /// Returns the total size of the disks, which the backing must hold, bytes.
    pub fn disks_bytes(&self) -> u64 {
        self.disks.iter().sum()
    }

    /// Combines all disks into one disk, as an array with a single cache sees them.
    pub fn on_one_disk(self) -> Experiment {
        let starts: Vec<u64> = self.starts().collect();
        let disks = vec![self.disks_bytes()];
        let load = match self.load {
            Load::Open(records) => Load::Open(Box::new(records.map(move |record| {
                let offset = starts[usize::from(record.disk)] + record.offset;
                Record { offset, disk: 0, ..record }
            }))),
            Load::Closed(clients) => Load::Closed(Box::new(Moved { clients, starts })),
        };
        Experiment { disks, load, ..self }
    }

    /// Returns the offset of each disk when the disks are combined.
    pub fn starts(&self) -> impl Iterator<Item = u64> + '_ {
        self.disks.iter().scan(0, |end, bytes| {
            *end += bytes;
            Some(*end - bytes)
        })
    }

    /// Runs the experiment. `served` is called for each measured request. Times of an open load are
    /// divided by `acceleration`.
    pub fn play(
        self,
        setup: Setup,
        acceleration: f64,
        served: impl FnMut(&Served),
    ) -> Result<Played, SetupError> {
        let disks = setup.disks.len() as u32;
        let mut replay = Replay::new(setup)?;
        let run = self.play_on(&mut replay, acceleration, served);
        let disks = (0..disks).filter_map(|disk| replay.stats(disk)).collect();
        Ok(Played { run, disks })
    }

    /// Runs the experiment on an existing replay, which continues from its current state.
    pub fn play_on(self, replay: &mut Replay, acceleration: f64, mut served: impl FnMut(&Served)) -> Run {
        match self.load {
            Load::Open(records) => play_open(replay, records, self.warmup, acceleration, &mut served),
            Load::Closed(clients) => play_closed(replay, clients, self.warmup, &mut served),
        }
    }
}

/// Clients of a closed load whose disks are combined into one.
struct Moved {
    clients: Box<dyn Clients + Send>,
    starts: Vec<u64>,
}

impl Clients for Moved {
    fn count(&self) -> u32 {
        self.clients.count()
    }

    fn next(&mut self, client: u32) -> Option<Turn> {
        let turn = self.clients.next(client)?;
        Some(Turn { offset: self.starts[usize::from(turn.disk)] + turn.offset, disk: 0, ..turn })
    }
}

fn play_open(
    replay: &mut Replay,
    mut records: impl Iterator<Item = Record>,
    warmup: u64,
    acceleration: f64,
    served: &mut impl FnMut(&Served),
) -> Run {
    let ask = |start_ns: u64| {
        move |record: Record| {
            let at_ns = record.at_ns.saturating_sub(start_ns) as f64 / acceleration;
            (at_ns as u64, ask(record))
        }
    };
    let mut start_ns = 0;
    if warmup > 0 {
        let warming = records.by_ref().take(usize::try_from(warmup).unwrap_or(usize::MAX));
        replay.open(warming.inspect(|record| start_ns = record.at_ns).map(ask(0)), |_| {});
        replay.reset_stats();
    }
    replay.open(records.map(ask(start_ns)), served)
}

fn play_closed(
    replay: &mut Replay,
    mut clients: Box<dyn Clients + Send>,
    mut warmup: u64,
    served: &mut impl FnMut(&Served),
) -> Run {
    let count = clients.count();
    let mut next = |client| {
        let Turn { think_ns, op, offset, len, disk, tag } = clients.next(client)?;
        Some((think_ns, Ask { tag, ..ask(Record { at_ns: 0, offset, len, op, disk }) }))
    };
    if warmup > 0 {
        replay.closed(
            count,
            |_, client| {
                warmup = warmup.checked_sub(1)?;
                next(client)
            },
            |_| {},
        );
        replay.reset_stats();
    }
    replay.closed(count, |_, client| next(client), served)
}

/// Converts a trace record to a request of a replay.
pub fn ask(record: Record) -> Ask {
    let op = match record.op {
        Op::Read => io::Op::Read,
        Op::Write => io::Op::Write(Durability::Volatile),
        Op::Discard => io::Op::Discard(Durability::Volatile),
        Op::Flush => io::Op::Flush,
    };
    Ask { disk: record.disk.into(), op, offset: record.offset, len: record.len.into(), tag: 0 }
}
