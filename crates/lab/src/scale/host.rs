//! A modelled host: the engine's scheduler and throttle, and disks with a demand.

use std::collections::BTreeMap;

use hob_engine::qos::{
    Control, FlowId, Late, Report, Scheduler, SharedDatastore, UNIT_BYTES_DEFAULT, Window,
};
use hob_engine::units::Instant;

use super::store::{Event, Store};
use super::{Demand, Disk, Knowledge, SECOND_NS, Scale};
use crate::prng::Prng;

/// A modelled host with the engine's scheduler and throttle.
pub(super) struct Host {
    number: usize,
    scheduler: Scheduler<usize>,
    window: Window,
    /// Flow and demand of each disk, by disk number.
    disks: BTreeMap<usize, (FlowId, Demand)>,
    level: Option<f64>,
    /// Time at which a rate limit will allow more I/O and the host must try to send again.
    looks_at: u64,
}

impl Host {
    pub(super) fn new(number: usize, scale: &Scale, all: &[Disk]) -> Host {
        let mut scheduler = Scheduler::default();
        let own = all.iter().enumerate().filter(|(_, disk)| disk.host == number);
        let disks = own.enumerate().map(|(flow, (disk, of))| {
            let flow = FlowId(flow as u32);
            scheduler.set(Instant(0), flow, of.due);
            (disk, (flow, of.demand))
        });
        let disks = disks.collect();
        let mut window = Window::default();
        if scale.knowledge != Knowledge::Unthrottled {
            let control = Control::Latency { late: Late::Above(scale.threshold_ns), weight_milli: 1000 };
            window.set(Instant(0), control);
        }
        Host { number, scheduler, window, disks, level: None, looks_at: u64::MAX }
    }

    /// Creates the first I/Os of a disk.
    pub(super) fn begin(&mut self, disk: usize, store: &mut Store, dice: &mut Prng) {
        let first = match self.disks[&disk].1 {
            Demand::Depth(depth) => depth,
            Demand::Rate(_) => 1,
        };
        (0..first).for_each(|_| store.at(dice.below(SECOND_NS), Event::Arrival(disk)));
    }

    /// Handles a new I/O of a disk.
    pub(super) fn arrive(&mut self, now: u64, disk: usize, store: &mut Store, dice: &mut Prng) {
        let (flow, demand) = self.disks[&disk];
        if let Demand::Rate(rate) = demand {
            let mean = SECOND_NS / u64::from(rate);
            store.at(now + mean / 2 + dice.below(mean + 1), Event::Arrival(disk));
        }
        self.scheduler.push(Instant(now), flow, 1, u64::from(UNIT_BYTES_DEFAULT), disk);
        self.pump(now, store);
    }

    /// Handles the completion of a disk's I/O.
    pub(super) fn ended(
        &mut self,
        now: u64,
        disk: usize,
        latency_ns: u64,
        store: &mut Store,
        dice: &mut Prng,
    ) {
        self.window.ended(Instant(now), 1, latency_ns, !self.scheduler.is_empty());
        match self.disks[&disk].1 {
            Demand::Depth(_) => self.arrive(now, disk, store, dice),
            Demand::Rate(_) => self.pump(now, store),
        }
    }

    /// Sends all I/O that scheduler and throttle allow.
    pub(super) fn pump(&mut self, now: u64, store: &mut Store) {
        if self.looks_at <= now {
            self.looks_at = u64::MAX;
        }
        while self.window.has_room()
            && let Some((_, _, disk)) = self.scheduler.pop(Instant(now))
        {
            self.window.began();
            store.send(now, disk);
        }
        if self.window.has_room()
            && let Some(at) = self.scheduler.next_at().filter(|at| at.0 < self.looks_at)
        {
            self.looks_at = at.0.max(now + 1);
            store.at(self.looks_at, Event::Look(self.number));
        }
    }

    /// Returns the host's report to its peer hosts.
    pub(super) fn report(&mut self, now: u64) -> Option<Report> {
        let Host { scheduler, window, level, .. } = self;
        window
            .take_report(Instant(now), |seconds| scheduler.take_wanted_shares(Instant(now), *level, seconds))
    }

    /// Applies the agreement of the hosts, which sets the rate per share and the number of I/Os
    /// that this host may have in flight.
    pub(super) fn settle(&mut self, now: u64, report: &Report, agreement: &SharedDatastore) {
        self.level = Some(agreement.level);
        self.window.settle(Instant(now), report.wanted_shares * agreement.in_flight_per_share);
    }
}
