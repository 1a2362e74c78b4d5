//! Measurements of one run of a figure, computed from its answered requests.

use std::collections::BTreeMap;

use hob_engine::io::Op;
use hob_engine::outcome::Outcome;
use hob_engine::stats::DiskStats;
use hob_engine::units::Instant;
use hob_world::replay::{Sample, Served};

/// Measurements of a run after the warm-up.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    /// Number of answered requests.
    pub(super) requests: u64,
    pub(super) latency_ns: u128,
    /// Time from the first request to the end of the last I/O, nanoseconds.
    pub(super) elapsed_ns: u64,
    /// Statistics of the first disk. Most experiments have only one disk.
    pub(super) stats: DiskStats,
    /// Share of the time that the disks of the backing were busy, including a warm-up that is part
    /// of the experiment. 0 if the backing is not an array.
    pub(super) utilisation: f64,
    /// Results by tag, a number that the workload generator gives each request.
    pub(super) tags: BTreeMap<u32, Tagged>,
    /// Results of all reads, and of all writes.
    pub(super) by_op: [Part; 2],
    /// Results by the disks of the experiment, even if the disks were combined into one.
    pub(super) parts: Vec<Part>,
    /// Results of writes. Each entry covers writes of as many bytes as one hundredth ([`PORTIONS`])
    /// of the total size of the disks.
    pub(super) portions: Vec<Portion>,
    /// Valid data of the first disk's cache, `(first, end)` in sectors, if the case lists it.
    pub(super) extents: Vec<(u64, u64)>,
    /// Samples of a preset's cache, one per [`SAMPLED_REQUESTS`] replies.
    pub(super) samples: Vec<Sample>,
    /// Maximum number of requests answered within one second of the run, and the mean latency of
    /// that second, seconds.
    pub(super) peak: (u64, f64),
    pub(super) transactions: Transactions,
}

/// Number of portions into which the total size of the disks is divided for results of writes.
pub(super) const PORTIONS: u64 = 100;

/// Results of a part of the requests: those of one disk of the experiment, or of one operation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Part {
    pub(super) requests: u64,
    pub(super) latency_ns: u128,
}

/// Shares of all requests that did not need the backing.
#[derive(Clone, Copy, Debug)]
pub(super) struct BySource {
    /// Share of the requests that the memory tier served.
    pub(super) memory: f64,
    /// Share of the requests that flash served.
    pub(super) flash: f64,
}

impl BySource {
    /// Returns the share that memory or flash served.
    pub(super) fn both(self) -> f64 {
        self.memory + self.flash
    }
}

/// Results of one portion (a hundredth) of the bytes that a run writes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Portion {
    pub(super) bytes: u64,
    pub(super) requests: u64,
    /// Number of bytes of the portion that were written to flash.
    pub(super) to_flash: u64,
    /// Time in which the portion was written, nanoseconds.
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

/// Sums over the requests that were answered so far in a run.
pub(super) struct Tally {
    starts: Vec<u64>,
    portion_bytes: u64,
    /// Start time of the current portion.
    portion_began: u64,
    portion: Portion,
    /// The current second of virtual time: the number of the second, the number of replies in it,
    /// and the sum of the latencies of these replies in nanoseconds.
    second: (u64, u64, u128),
    pub(super) measured: Measured,
}

impl Tally {
    pub(super) fn new(starts: Vec<u64>, disks_bytes: u64, began: Instant, stats: DiskStats) -> Tally {
        let measured = Measured {
            requests: 0,
            latency_ns: 0,
            elapsed_ns: 0,
            stats,
            utilisation: 0.0,
            tags: BTreeMap::new(),
            by_op: [Part::default(); 2],
            parts: vec![Part::default(); starts.len()],
            portions: vec![],
            samples: vec![],
            extents: vec![],
            peak: (0, 0.0),
            transactions: Transactions::default(),
        };
        let portion_bytes = disks_bytes.div_ceil(PORTIONS).max(1);
        let (portion, portion_began) = (Portion::default(), began.0);
        Tally { starts, portion_bytes, portion_began, portion, second: (0, 0, 0), measured }
    }

    pub(super) fn add(&mut self, served: &Served, on_one_disk: bool) {
        let ended_ns = served.at.0 + served.latency_ns;
        let latency_ns = u128::from(served.latency_ns);
        let measured = &mut self.measured;
        measured.latency_ns += latency_ns;
        let tagged: &mut Tagged = measured.tags.entry(served.ask.tag).or_default();
        tagged.requests += 1;
        tagged.hits += u64::from(served.outcome == Outcome::Hit);
        tagged.ended_ns = tagged.ended_ns.max(ended_ns);
        // The last request of a transaction has an odd tag: twice the type of the transaction plus 1.
        if !served.ask.tag.is_multiple_of(2) {
            measured.transactions.end(served.client, ended_ns, served.ask.tag / 2);
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

/// Results of the requests with one tag. A tag is a number that the workload generator gives each
/// request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tagged {
    pub(super) requests: u64,
    pub(super) hits: u64,
    /// Time of the last reply, nanoseconds of virtual time.
    pub(super) ended_ns: u64,
}

/// Transactions, which the generator marks with tags.
#[derive(Clone, Debug, Default)]
pub(super) struct Transactions {
    count: u64,
    /// Time at which each client's last transaction ended, nanoseconds of virtual time.
    ended: BTreeMap<u32, u64>,
    /// Number of transactions that began and ended during the measurement.
    whole: u64,
    response_ns: u128,
    /// Number of whole transactions and sum of their durations, nanoseconds, by type.
    types: BTreeMap<u32, (u64, u128)>,
}

impl Transactions {
    /// Records the end of a transaction. A client continues immediately, so a transaction begins at
    /// the end of the previous one.
    fn end(&mut self, client: u32, at: u64, of_type: u32) {
        self.count += 1;
        if let Some(began) = self.ended.insert(client, at) {
            self.whole += 1;
            self.response_ns += u128::from(at - began);
            let (count, sum) = self.types.entry(of_type).or_default();
            *count += 1;
            *sum += u128::from(at - began);
        }
    }
}

impl Measured {
    pub(super) fn mean_s(&self) -> f64 {
        self.latency_ns as f64 / self.requests as f64 / 1e9
    }

    /// Returns the shares of all requests that memory and flash served, as reads that hit and as
    /// writes to flash.
    pub(super) fn served(&self) -> BySource {
        let share = |outcomes: &[Outcome]| {
            let count = |outcome: &Outcome| self.stats.outcomes[*outcome as usize].count;
            outcomes.iter().map(count).sum::<u64>() as f64 / self.requests as f64
        };
        BySource {
            memory: share(&[Outcome::HitMemory, Outcome::HitPrefetched]),
            flash: share(&[Outcome::Hit, Outcome::WriteBack]),
        }
    }

    pub(super) fn per_minute(&self) -> f64 {
        self.transactions.count as f64 / (self.elapsed_ns as f64 / 60e9)
    }

    /// Returns the mean duration of a transaction in seconds, including think time.
    pub(super) fn response_s(&self) -> f64 {
        self.transactions.response_ns as f64 / self.transactions.whole as f64 / 1e9
    }

    /// Returns the mean duration of transactions, seconds, and their hit ratio, by type.
    pub(super) fn by_type(&self) -> Vec<(f64, f64)> {
        let hits = |of_type: &u32| {
            let tags = [2 * of_type, 2 * of_type + 1].map(|tag| self.tags.get(&tag).copied());
            let sum = |of: fn(&Tagged) -> u64| tags.iter().flatten().map(of).sum::<u64>() as f64;
            sum(|tagged| tagged.hits) / sum(|tagged| tagged.requests)
        };
        let types = self.transactions.types.iter();
        types.map(|(of_type, (count, ns))| (*ns as f64 / *count as f64 / 1e9, hits(of_type))).collect()
    }

    /// Returns the number of requests per second of one disk of the experiment.
    pub(super) fn rate(&self, disk: usize) -> f64 {
        self.parts[disk].requests as f64 / (self.elapsed_ns as f64 / 1e9)
    }

    /// Returns the requests per second and the hit ratio of each tag. All requests of a tag must
    /// come after the requests of the previous tag, and the run must begin at virtual time 0.
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
