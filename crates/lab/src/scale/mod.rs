//! Models many hosts and a shared datastore in virtual time, to test whether each disk gets its
//! entitlement.
//!
//! Of the engine, the hosts use only the scheduler and the throttle. The datastore consists of
//! several servers behind one queue, and does not distinguish hosts and disks. The disks are
//! distributed unevenly over the hosts, and differ in entitlement and demand. The model computes
//! the *entitlement* of each disk (`entitlement.rs`): the rate that the disk should get by its
//! shares, limit and reservation. A *reservation* is a rate that a disk gets even if other disks
//! have more shares. The model compares the entitlement with the disk's actual rate.
//!
//! Rates are in units per second, and times in nanoseconds of virtual time.

mod entitlement;
mod host;
pub mod owners;
mod store;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use hob_engine::qos::{Entitlement, Report, agree};

use crate::prng::Prng;
use host::Host;
use store::Store;

const SECOND_NS: u64 = 1_000_000_000;

/// Information that the hosts have about each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knowledge {
    /// Hosts do not throttle. A host with more requests in flight gets a larger part of the rate.
    Unthrottled,
    /// Hosts exchange no reports. Each host throttles by the latency that it measures itself.
    Latency,
    /// The hosts send reports to each other.
    Reports {
        /// Interval of a host's reports, nanoseconds.
        every_ns: u64,
        /// Delay of a report to another host, nanoseconds.
        delay_ns: u64,
    },
}

/// Parameters of a modelled datastore with its hosts and disks.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Number of hosts.
    pub hosts: usize,
    /// Total number of disks on all hosts.
    pub disks: usize,
    /// Number of I/Os that the datastore serves in parallel.
    pub servers: usize,
    /// Mean of the exponentially distributed service time, nanoseconds.
    pub service_ns: u64,
    /// Latency above which the hosts throttle, nanoseconds.
    pub threshold_ns: u64,
    /// Information that the hosts have about each other.
    pub knowledge: Knowledge,
    /// Duration of the warm-up, seconds.
    pub warm_s: u64,
    /// Duration of the measurement, seconds.
    pub seconds: u64,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Demand of a modelled disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    /// A constant queue depth.
    Depth(u32),
    /// A constant mean rate of I/Os per second, independent of completions.
    Rate(u32),
}

/// A disk of the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Disk {
    pub(crate) host: usize,
    pub(crate) due: Entitlement,
    pub(crate) demand: Demand,
}

/// Results of a model: rates and latency of a datastore with many hosts.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Total rate of all disks, I/O units per second.
    pub rate: f64,
    /// Mean latency of the datastore, milliseconds.
    pub latency_ms: f64,
    /// Relative deviation of each disk's rate from its entitlement, sorted.
    pub errors: Vec<f64>,
    /// Number of disks that got less than nine tenths of their reservation, among `reserved`.
    pub missed: usize,
    /// Number of disks that have a reservation and a demand above it.
    pub reserved: usize,
    /// Number of reports per second of all hosts.
    pub reports: f64,
    /// Number of reports per second that hosts receive. Each report goes to all other hosts.
    pub deliveries: f64,
}

impl Outcome {
    /// Returns the deviation that `percent` % of the disks do not exceed.
    pub fn error_at(&self, percent: usize) -> f64 {
        let last = self.errors.len().saturating_sub(1);
        self.errors.get(self.errors.len() * percent / 100).or(self.errors.get(last)).copied().unwrap_or(0.0)
    }
}

/// Runs the model of a datastore with its hosts and disks. `check` is called at intervals, and the
/// run ends if it returns an error.
///
/// # Errors
/// Returns the errors of `check`.
pub fn play<E>(scale: &Scale, mut check: impl FnMut() -> Result<(), E>) -> Result<Outcome, E> {
    let disks = disks(scale);
    let mut dice = Prng::new(scale.seed ^ 1);
    let mut hosts: Vec<Host> = (0..scale.hosts).map(|host| Host::new(host, scale, &disks)).collect();
    let mut store = Store::new(scale.servers, scale.service_ns);
    for disk in 0..disks.len() {
        hosts[disks[disk].host].begin(disk, &mut store, &mut dice);
    }
    let end = (scale.warm_s + scale.seconds) * SECOND_NS;
    let mut counted = Counted::new(disks.len());
    let mut reports = Reports::new(scale);
    let mut steps = 0_u64;
    while let Some((now, event)) = store.next().filter(|(now, _)| *now < end) {
        steps += 1;
        if steps.is_multiple_of(1 << 16) {
            check()?;
        }
        reports.exchange(now, scale, &mut hosts, &mut store);
        match event {
            store::Event::Arrival(disk) => hosts[disks[disk].host].arrive(now, disk, &mut store, &mut dice),
            store::Event::Done { disk, began } => {
                if now >= scale.warm_s * SECOND_NS {
                    counted.units[disk] += 1;
                    counted.latency_ns += now - began;
                }
                hosts[disks[disk].host].ended(now, disk, now - began, &mut store, &mut dice);
            }
            store::Event::Look(host) => hosts[host].pump(now, &mut store),
        }
    }
    Ok(counted.outcome(scale, &disks, &reports))
}

/// Creates the disks of a model with common numbers of shares. One disk in ten has a reservation,
/// one in ten has a limit, and one in four has a small demand. The last host has about seven times
/// as many disks as the first.
fn disks(scale: &Scale) -> Vec<Disk> {
    let mut dice = Prng::new(scale.seed);
    let fair = (scale.servers as f64 * 1e9 / scale.service_ns as f64 / scale.disks as f64).max(1.0);
    let of_fair = |part: f64| (fair * part).ceil() as u32;
    let places: Vec<usize> = (0..scale.hosts).map(|host| 4 * scale.hosts + 24 * host).collect();
    let all: usize = places.iter().sum();
    let disk = |_| {
        let mut place = dice.below(all as u64) as usize;
        let is_there = |places: &usize| {
            let is_there = place < *places;
            place = place.saturating_sub(*places);
            is_there
        };
        let host = places.iter().position(is_there).expect("one host has this place");
        let shares = [500, 1000, 1000, 2000][dice.below(4) as usize];
        let mut due = Entitlement { shares, ..Entitlement::default() };
        match dice.below(10) {
            0 => due.reservation = of_fair(2.5),
            1 => due.limit = Some(of_fair(0.5)),
            _ => {}
        }
        let demand = match dice.below(4) {
            0 => Demand::Rate(of_fair(0.25)),
            _ => Demand::Depth([4, 8, 16, 32][dice.below(4) as usize]),
        };
        Disk { host, due, demand }
    };
    (0..scale.disks).map(disk).collect()
}

/// The demand reports that hosts send to each other, with their delay.
struct Reports {
    every_ns: u64,
    delay_ns: u64,
    /// Time of each host's next report.
    next_at: Vec<u64>,
    first_at: u64,
    /// The last report of each host that the other hosts have received. `coming` has the reports in
    /// transit: arrival time, sender and report.
    known: Vec<Report>,
    coming: VecDeque<(u64, usize, Report)>,
    made: u64,
}

impl Reports {
    fn new(scale: &Scale) -> Reports {
        let (every_ns, delay_ns) = match scale.knowledge {
            Knowledge::Reports { every_ns, delay_ns } => (every_ns, delay_ns),
            Knowledge::Unthrottled | Knowledge::Latency => (u64::MAX, 0),
        };
        // The hosts report at different times.
        let hosts = scale.hosts as u64;
        let at = |host| if every_ns == u64::MAX { u64::MAX } else { every_ns + every_ns / hosts * host };
        let known = vec![Report::default(); scale.hosts];
        Reports {
            every_ns,
            delay_ns,
            next_at: (0..hosts).map(at).collect(),
            first_at: every_ns,
            known,
            coming: VecDeque::new(),
            made: 0,
        }
    }

    /// Sends the hosts' reports that are due, and applies the agreement on the reports that have
    /// arrived.
    fn exchange(&mut self, now: u64, scale: &Scale, hosts: &mut [Host], store: &mut Store) {
        if now < self.first_at {
            return;
        }
        for host in 0..hosts.len() {
            if self.next_at[host] > now {
                continue;
            }
            self.next_at[host] += self.every_ns;
            while let Some((_, from, report)) = self.coming.front().copied().filter(|(at, ..)| *at <= now) {
                self.coming.pop_front();
                self.known[from] = report;
            }
            let Some(report) = hosts[host].report(now) else { continue };
            self.made += 1;
            self.coming.push_back((now + self.delay_ns, host, report));
            let mut reports = self.known.clone();
            reports[host] = report;
            if let Some(agreement) = agree(&reports, scale.threshold_ns) {
                hosts[host].settle(now, &report, &agreement);
                hosts[host].pump(now, store);
            }
        }
        self.first_at = self.next_at.iter().copied().min().unwrap_or(u64::MAX);
    }
}

/// Counts of the I/O during the measurement.
struct Counted {
    /// Number of units by disk.
    units: Vec<u64>,
    latency_ns: u64,
}

impl Counted {
    fn new(disks: usize) -> Counted {
        Counted { units: vec![0; disks], latency_ns: 0 }
    }

    fn outcome(&self, scale: &Scale, disks: &[Disk], reports: &Reports) -> Outcome {
        let seconds = scale.seconds as f64;
        let rates: Vec<f64> = self.units.iter().map(|units| *units as f64 / seconds).collect();
        let rate: f64 = rates.iter().sum();
        let due = entitlement::due(disks, rate);
        let mut errors: Vec<f64> =
            rates.iter().zip(&due).map(|(rate, due)| (rate - due).abs() / due).collect();
        errors.sort_by(f64::total_cmp);
        let reserved = |(disk, _): &(&Disk, &f64)| {
            disk.due.reservation > 0 && entitlement::wants(disk) > disk.due.reservation as f64
        };
        let reserved: Vec<_> = disks.iter().zip(&rates).filter(reserved).collect();
        let is_missed = |(disk, rate): &&(&Disk, &f64)| **rate < f64::from(disk.due.reservation) * 0.9;
        let made = reports.made as f64 / (scale.warm_s + scale.seconds) as f64;
        Outcome {
            rate,
            latency_ms: self.latency_ns as f64 / 1e6 / self.units.iter().sum::<u64>().max(1) as f64,
            errors,
            missed: reserved.iter().filter(is_missed).count(),
            reserved: reserved.len(),
            reports: made,
            deliveries: made * (scale.hosts as f64 - 1.0),
        }
    }
}
