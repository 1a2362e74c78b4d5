//! Decisions that a seed makes in advance, and counts of a history's events.

use hob_engine::cluster::{DRIFT_ONE_IN, SCHEDULING_NS_MAX};
use hob_engine::units::Instant;

use super::{Options, Sabotage};
use crate::rng::SimRng;

/// Nanoseconds of a millisecond.
pub(super) const MS: u64 = 1_000_000;

/// The plan of one history.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) hosts: usize,
    pub(super) disks: usize,
    pub(super) blocks: u32,
    pub(super) lease_ns: u64,
    pub(super) settle_ns: u64,
    /// The backing refuses changes that an owner of an earlier generation sends.
    pub(super) fences: bool,
    /// Parts per million by which the hosts' clocks are slow, and etcd's is fast.
    pub(super) slow_ppm: Vec<u64>,
    pub(super) fast_ppm: u64,
    pub(super) lease_late_ns: u64,
    pub(super) network_ns: u64,
    pub(super) lost: u32,
    pub(super) very_late: u32,
    pub(super) backing_ns: u64,
    pub(super) flash_ns: u64,
    pub(super) think_ns: u64,
    pub(super) poll_ns: u64,
    /// Per mille of the clock checks that are followed by a pause.
    pub(super) hesitates: u32,
    pub(super) hesitation_ns_max: u64,
    /// Per mille of the changes that wait in their process before they start.
    pub(super) queued: u32,
    /// Watchdog time: a process whose shard hangs ends after it.
    pub(super) silence_ns: u64,
    pub(super) span_ns: u64,
    pub(super) write_back: bool,
    /// Each host has replicas of its dirty data at the next one.
    pub(super) copies: bool,
    /// Timeout of the lending host.
    pub(super) peer_wait_ns: u64,
    pub(super) faults: Vec<(Instant, Fault)>,
}

/// Faults of hosts, etcd and networks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// A host's process is stopped for a while.
    Pause(usize, u64),
    /// A host's process dies; it restarts after that time.
    Kill(usize, u64),
    /// A host loses power.
    PowerCut(usize, u64),
    /// A host does not reach etcd for a while.
    Partition(usize, u64),
    /// A host does not reach the backing.
    NoBacking(usize, u64),
    /// No host reaches etcd.
    StoreAway(u64),
    /// A new leader; the old one continues to answer for a while.
    Depose(u64),
    /// A host's wall clock jumps by this many seconds.
    WallJump(usize, i64),
    /// An operator takes a disk by force.
    Force(usize, usize),
    /// A disk is given back, and not taken for a while.
    GiveBack(usize, usize, u64),
    /// A cache starts or stops writing back.
    Mode(usize, usize),
    /// A host does not reach the lending host.
    NoPeer(usize, u64),
    /// A host's shard hangs.
    Hang(usize),
    /// A host is destroyed with its flash; another one replaces it.
    Destroy(usize, u64),
}

impl Plan {
    pub(super) fn draw(options: &Options, rng: &mut SimRng) -> Self {
        let hosts = rng.pick(&[2, 2, 3]);
        let disks = rng.pick(&[1, 1, 2]);
        let lease_ns = rng.pick(&[3_000, 5_000, 10_000]) * MS;
        let think_ns = rng.pick(&[20, 100, 300]) * MS;
        let span_ns = (u64::from(options.requests) * think_ns).max(6 * lease_ns) + rng.below(30_000 * MS);
        // Both clocks together stay within the lease's margin.
        let drift_ppm = 1_000_000 / DRIFT_ONE_IN / 2 - 200;
        let drift = |rng: &mut SimRng| rng.pick(&[0, 0, drift_ppm / 2, drift_ppm]);
        let mut plan = Plan {
            hosts,
            disks,
            blocks: rng.pick(&[2, 4, 8]),
            lease_ns,
            settle_ns: rng.pick(&[1_000, 5_000]) * MS,
            fences: rng.chance(400),
            slow_ppm: (0..hosts).map(|_| drift(rng)).collect(),
            fast_ppm: drift(rng),
            lease_late_ns: rng.pick(&[0, 0, 500 * MS]),
            network_ns: rng.pick(&[1, 5, 50]) * MS,
            lost: if options.faults { rng.pick(&[0, 10, 100]) } else { 0 },
            very_late: if options.faults { rng.pick(&[0, 10, 50]) } else { 0 },
            backing_ns: rng.pick(&[1, 10, 60]) * MS,
            flash_ns: rng.pick(&[1, 5]) * MS / 5,
            think_ns,
            poll_ns: rng.pick(&[300, 1_000]) * MS,
            hesitates: if options.faults { rng.pick(&[0, 5, 50]) } else { 0 },
            // The rest is for later delays.
            hesitation_ns_max: SCHEDULING_NS_MAX - 10 * MS,
            queued: if options.faults { rng.pick(&[0, 0, 100]) } else { 0 },
            silence_ns: if options.faults { rng.pick(&[lease_ns / 2, 3 * lease_ns]) } else { lease_ns },
            span_ns,
            write_back: rng.chance(600),
            copies: rng.chance(600),
            peer_wait_ns: rng.pick(&[300, 1_000, 2_500]) * MS,
            faults: Vec::new(),
        };
        plan.suit(options.sabotage);
        if options.faults {
            plan.add_faults(rng);
        }
        plan
    }

    /// Adapts the plan so that a sabotage has an effect in many histories.
    fn suit(&mut self, sabotage: Option<Sabotage>) {
        if sabotage == Some(Sabotage::NoMargin) {
            // The settling time of other hosts would hide that an owner has no margin.
            self.settle_ns = 0;
        }
    }

    fn add_faults(&mut self, rng: &mut SimRng) {
        let lease = self.lease_ns;
        for _ in 0..rng.between(1, 10) {
            let host = rng.below(self.hosts as u64) as usize;
            let disk = rng.below(self.disks as u64) as usize;
            // The time around the length of a lease is decisive.
            let time = match rng.below(4) {
                0 => rng.below(lease / 2),
                1 | 2 => lease / 2 + rng.below(lease),
                _ => rng.below(5 * lease),
            };
            let fault = match rng.below(if self.copies { 21 } else { 16 }) {
                0..3 => Fault::Pause(host, time),
                3 | 4 => Fault::Kill(host, time),
                5 => Fault::PowerCut(host, time),
                6 | 7 => Fault::Partition(host, time),
                8 => Fault::NoBacking(host, time),
                9 => Fault::StoreAway(time),
                10 => Fault::Depose(time.min(2 * lease)),
                11 => Fault::WallJump(host, rng.pick(&[-3600, -60, -5, 5, 3600])),
                12 => Fault::Force(host, disk),
                13 => Fault::GiveBack(host, disk, time),
                15 => Fault::Hang(host),
                16 | 17 => Fault::NoPeer(host, time),
                18.. => Fault::Destroy(host, time),
                _ => Fault::Mode(host, disk),
            };
            self.faults.push((Instant(rng.below(self.span_ns)), fault));
        }
    }
}

/// Counts of events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Guest requests that were acknowledged.
    pub acknowledged: u64,
    /// Requests that were refused, or lost with their host.
    pub refused: u64,
    /// Disks taken for the first time, or from another host that gave them back.
    pub taken: u64,
    /// Disks taken that this host had last.
    pub taken_again: u64,
    /// Disks taken from a failed host.
    pub failed_over: u64,
    /// Disks taken by force, with dirty data.
    pub forced: u64,
    /// Disks not taken because dirty data is elsewhere.
    pub kept_dirty: u64,
    /// Disks given back.
    pub given_back: u64,
    /// Disks that another host had when their owner checked again.
    pub lost: u64,
    /// Disks closed without their backing, to be opened again while they are held.
    pub reopened: u64,
    /// Leases that ended in the store.
    pub leases_ended: u64,
    /// Renewals that a deposed leader answered.
    pub false_renewals: u64,
    /// Replies held because the lease had expired.
    pub answers_held: u64,
    /// Changes held because the lease had expired.
    pub changes_held: u64,
    /// Held replies and changes that were released later.
    pub released: u64,
    /// Caches that were invalid because another host had the disk.
    pub not_believed: u64,
    /// Late changes that the backing refused.
    pub fenced: u64,
    /// Processes that died, and hosts that lost power.
    pub crashes: u64,
    /// Processes that were stopped for a while.
    pub pauses: u64,
    /// Shards that hung.
    pub hangs: u64,
    /// Changes that had waited in their process, and were stopped because the lease had expired.
    pub changes_stopped: u64,
    /// Hosts that were destroyed with their data.
    pub destroyed: u64,
    /// Times that a record named a new replica.
    pub copies_said: u64,
    /// Replicas that were lost, as far as their owner knew.
    pub copies_broken: u64,
    /// Disks failed over from their replicas.
    pub adopted: u64,
    /// Caches with dirty data from which a failover had been made meanwhile.
    pub outdated: u64,
    /// Duration in nanoseconds of virtual time.
    pub took_ns: u64,
}

impl Report {
    /// Returns all counts with names.
    pub fn counts(&self) -> [(&'static str, u64); 26] {
        [
            ("requests acknowledged", self.acknowledged),
            ("requests refused or lost", self.refused),
            ("disks taken", self.taken),
            ("disks taken again", self.taken_again),
            ("disks failed over", self.failed_over),
            ("disks taken by force", self.forced),
            ("disks left alone: dirty elsewhere", self.kept_dirty),
            ("disks given back", self.given_back),
            ("disks lost", self.lost),
            ("disks opened anew", self.reopened),
            ("leases ended", self.leases_ended),
            ("false renewals", self.false_renewals),
            ("answers held", self.answers_held),
            ("changes held", self.changes_held),
            ("released later", self.released),
            ("caches not believed", self.not_believed),
            ("late changes fenced by the backing", self.fenced),
            ("crashes", self.crashes),
            ("pauses", self.pauses),
            ("shards that hung", self.hangs),
            ("waiting changes stopped", self.changes_stopped),
            ("hosts destroyed", self.destroyed),
            ("second copies said", self.copies_said),
            ("second copies broken", self.copies_broken),
            ("disks adopted", self.adopted),
            ("caches outdated by adoption", self.outdated),
        ]
    }

    /// Adds another history's counts.
    pub fn add(&mut self, other: &Report) {
        macro_rules! sum {
            ($($field:ident)+) => { $(self.$field += other.$field;)+ };
        }
        sum!(acknowledged refused taken taken_again failed_over forced kept_dirty given_back lost reopened leases_ended);
        sum!(false_renewals answers_held changes_held released not_believed fenced crashes pauses took_ns);
        sum!(hangs changes_stopped destroyed copies_said copies_broken adopted outdated);
    }
}
