//! The random parameters of one simulated history of a cluster, generated from its seed, and the
//! counts of the history's events.

use hob_engine::cluster::{DRIFT_ONE_IN, SCHEDULING_NS_MAX};
use hob_engine::units::Instant;

use super::{Options, Sabotage};
use crate::rng::SimRng;

/// Nanoseconds per millisecond.
pub(super) const MS: u64 = 1_000_000;

/// Random parameters of one history of the cluster simulation.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) hosts: usize,
    pub(super) disks: usize,
    pub(super) blocks: u32,
    pub(super) lease_ns: u64,
    pub(super) settle_ns: u64,
    /// True if the backing refuses writes that were sent before the last time that a host opened
    /// the backing.
    pub(super) fences: bool,
    /// Rates by which the hosts' clocks are slow, parts per million. `fast_ppm` is the rate by
    /// which etcd's clock is fast.
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
    /// Share of lease checks after which the host pauses before it acts, per mille.
    pub(super) hesitates: u32,
    pub(super) hesitation_ns_max: u64,
    /// Share of writes, per mille, that the simulated hob process delays before their system call.
    pub(super) queued: u32,
    /// Timeout of the watchdog, which ends a process after one of its shards has hung for this
    /// long, nanoseconds.
    pub(super) silence_ns: u64,
    pub(super) span_ns: u64,
    pub(super) write_back: bool,
    /// True if each host has replicas of its dirty data at the next host.
    pub(super) copies: bool,
    /// Timeout of replica requests, nanoseconds.
    pub(super) peer_wait_ns: u64,
    pub(super) faults: Vec<(Instant, Fault)>,
}

/// Faults of hosts, etcd and networks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// A host's process is paused for this time.
    Pause(usize, u64),
    /// A host's process dies and restarts after this time.
    Kill(usize, u64),
    /// A host loses power for this time.
    PowerCut(usize, u64),
    /// A host does not reach etcd for this time.
    Partition(usize, u64),
    /// A host does not reach the backing for this time.
    NoBacking(usize, u64),
    /// No host reaches etcd for this time.
    StoreAway(u64),
    /// etcd elects a new leader, and the old leader continues to answer for this time.
    Depose(u64),
    /// A host's wall clock jumps by this many seconds.
    WallJump(usize, i64),
    /// An operator forces a host to take a disk.
    Force(usize, usize),
    /// A host gives a disk back and does not acquire it for this time.
    GiveBack(usize, usize, u64),
    /// A cache changes to or from write-back mode.
    Mode(usize, usize),
    /// A host does not reach the lending host for this time.
    NoPeer(usize, u64),
    /// A host's shard hangs.
    Hang(usize),
    /// A host is destroyed with its flash, and a new host replaces it after this time.
    Destroy(usize, u64),
}

impl Plan {
    pub(super) fn draw(options: &Options, rng: &mut SimRng) -> Self {
        let hosts = rng.pick(&[2, 2, 3]);
        let disks = rng.pick(&[1, 1, 2]);
        let lease_ns = rng.pick(&[3_000, 5_000, 10_000]) * MS;
        let think_ns = rng.pick(&[20, 100, 300]) * MS;
        let span_ns = (u64::from(options.requests) * think_ns).max(6 * lease_ns) + rng.below(30_000 * MS);
        // The drift of both clocks together stays within the lease's safety margin.
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
            // The rest of the permitted delay is left for delays that happen after this one.
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

    /// Changes the scenario so that a sabotage has an effect in many histories.
    fn suit(&mut self, sabotage: Option<Sabotage>) {
        if sabotage == Some(Sabotage::NoMargin) {
            // If other hosts waited for the settling time, the missing safety margin would have no
            // effect.
            self.settle_ns = 0;
        }
    }

    fn add_faults(&mut self, rng: &mut SimRng) {
        let lease = self.lease_ns;
        for _ in 0..rng.between(1, 10) {
            let host = rng.below(self.hosts as u64) as usize;
            let disk = rng.below(self.disks as u64) as usize;
            // Pauses that are about as long as a lease reveal the most errors.
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

/// Event counts of cluster histories.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of guest requests that were acknowledged.
    pub acknowledged: u64,
    /// Number of guest requests that a host refused, or that were lost because their host failed.
    pub refused: u64,
    /// Number of times that a disk was acquired for the first time, or after another host gave it
    /// back.
    pub taken: u64,
    /// Number of times that a host acquired a disk that it had owned last.
    pub taken_again: u64,
    /// Number of times that a disk was taken over from a failed host.
    pub failed_over: u64,
    /// Number of forced takeovers of disks with dirty data.
    pub forced: u64,
    /// Number of times that a disk was not taken over because another host had dirty data.
    pub kept_dirty: u64,
    /// Number of times that a disk was given back.
    pub given_back: u64,
    /// Number of times that a host checked a disk that it had owned, and found that another host
    /// owns the disk.
    pub lost: u64,
    /// Number of times that a host closed and reopened a locked disk because the backing did not
    /// answer.
    pub reopened: u64,
    /// Number of leases that expired in etcd.
    pub leases_ended: u64,
    /// Number of lease renewals that a deposed etcd leader answered. Such a renewal extends no
    /// lease.
    pub false_renewals: u64,
    /// Number of replies that were delayed because the lease had expired.
    pub answers_held: u64,
    /// Number of writes that were delayed because the lease had expired.
    pub changes_held: u64,
    /// Number of delayed replies and writes that were sent after the host had renewed its lease.
    pub released: u64,
    /// Number of caches that were dropped because another host had served the disk.
    pub not_believed: u64,
    /// Number of late writes that the backing refused.
    pub fenced: u64,
    /// Number of processes that died and hosts that lost power.
    pub crashes: u64,
    /// Number of paused processes.
    pub pauses: u64,
    /// Number of shards that hung.
    pub hangs: u64,
    /// Number of delayed writes that a simulated hob process did not send to the backing, because
    /// the host's lease in etcd had expired.
    pub changes_stopped: u64,
    /// Number of hosts that were destroyed with their data.
    pub destroyed: u64,
    /// Number of times that an ownership record was changed to name a new replica.
    pub copies_said: u64,
    /// Number of times that an owner gave up a replica as lost.
    pub copies_broken: u64,
    /// Number of completed failovers in which the new owner wrote the dirty data of its replica to
    /// the backing.
    pub adopted: u64,
    /// Number of caches whose dirty data became outdated because another host took the disk over
    /// from the replica.
    pub outdated: u64,
    /// Duration of the histories, nanoseconds of virtual time.
    pub took_ns: u64,
}

impl Report {
    /// Returns all counts with their names.
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
            ("disks opened again", self.reopened),
            ("leases ended", self.leases_ended),
            ("false renewals", self.false_renewals),
            ("answers held", self.answers_held),
            ("changes held", self.changes_held),
            ("released later", self.released),
            ("caches not trusted", self.not_believed),
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

    /// Adds the counts of another history.
    pub fn add(&mut self, other: &Report) {
        macro_rules! sum {
            ($($field:ident)+) => { $(self.$field += other.$field;)+ };
        }
        sum!(acknowledged refused taken taken_again failed_over forced kept_dirty given_back lost reopened leases_ended);
        sum!(false_renewals answers_held changes_held released not_believed fenced crashes pauses took_ns);
        sum!(hangs changes_stopped destroyed copies_said copies_broken adopted outdated);
    }
}
