//! The scenario of a history of several hosts, generated from the seed.

use hob_engine::admission::Admission;
use hob_engine::command::CacheConfig;
use hob_engine::journal;
use hob_engine::policy::PolicyKind;
use hob_engine::units::Instant;

use super::{Crash, Options};
use crate::media::{BackingFaults, FlashFaults};
use crate::rng::SimRng;

pub(super) const MS: u64 = 1_000_000;

/// Number that is combined with the seed, so that the random numbers of pauses are independent of
/// all others.
const STOP_SALT: u64 = 0x7374_6f70;

/// Parameters of a history of several hosts.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) hosts: usize,
    pub(super) units: u32,
    pub(super) segments: u64,
    pub(super) config: CacheConfig,
    /// Number of segments of a cache's journal ring, if caches have a journal.
    pub(super) ring: Option<u64>,
    /// Mean latency of flash, nanoseconds.
    pub(super) flash_ns: u64,
    pub(super) backing_ns: u64,
    pub(super) network_ns: u64,
    pub(super) record_ns: u64,
    pub(super) act_ns: u64,
    /// Mean time between two pages of the list of cached data that the source sends, nanoseconds.
    pub(super) page_ns: u64,
    /// Mean time between guest requests, nanoseconds.
    pub(super) think_ns: u64,
    /// Mean time between actions of the operator, nanoseconds.
    pub(super) operator_ns: u64,
    /// Timeout of a call of the source host to the destination host, nanoseconds.
    pub(super) call_ns: u64,
    /// Maximum time that the guest waits while the disk is frozen, nanoseconds.
    pub(super) freeze_ns: u64,
    /// Time after which all faults end, nanoseconds.
    pub(super) span_ns: u64,
    /// Share of packets that are lost, per mille. `repeated` and `late` are the shares of repeated
    /// and of very late packets.
    pub(super) lost: u32,
    pub(super) repeated: u32,
    pub(super) late: u32,
    /// Share of actions that fail, per mille. `record_error` is the share of record writes that
    /// fail.
    pub(super) act_error: u32,
    pub(super) record_error: u32,
    pub(super) backing_faults: BackingFaults,
    pub(super) flash_faults: FlashFaults,
    pub(super) crashes: Vec<(Instant, usize)>,
    pub(super) crash_step: Option<Crash>,
    /// The step after which a host's process pauses, and the pause in nanoseconds.
    pub(super) stop: Option<(Crash, u64)>,
    pub(super) partitions: Vec<(Instant, u64)>,
    pub(super) power_cut: Option<Instant>,
    pub(super) migrations: u32,
    /// True if a rogue client sends requests to a host on which the guest does not run.
    pub(super) rogue: bool,
    /// True if a read in standby fails after the owner has not answered four attempts. If false,
    /// the host retries such a read without limit, unless the read is a pull or the host has hung
    /// up.
    pub(super) gives_up: bool,
    /// True if a destination that already has the disk removes the disk and adds it again. If
    /// false, the destination empties the disk's cache instead.
    pub(super) removes: bool,
}

impl Plan {
    pub(super) fn draw(options: &Options, rng: &mut SimRng) -> Self {
        let hosts = rng.pick(&[2, 2, 2, 3]);
        let think_ns = rng.pick(&[MS, 10 * MS, 40 * MS, 150 * MS]);
        let segment_bytes = rng.pick(&[16 << 10, 64 << 10]);
        let policies: Vec<PolicyKind> = PolicyKind::all().collect();
        let policy = rng.pick(&policies);
        let block_bytes = rng.pick(&[4 << 10, 8 << 10, 16 << 10]);
        let span_ns = (u64::from(options.requests) * think_ns).max(5_000 * MS) + rng.below(20_000 * MS);
        let mut rate = |often: u32, rates: &[u32]| {
            let rate = if rng.chance(often) { rng.pick(rates) } else { 0 };
            if options.faults { rate } else { 0 }
        };
        let (lost, repeated, late) =
            (rate(500, &[10, 100, 300]), rate(500, &[20, 200]), rate(400, &[5, 30, 100]));
        let (act_error, record_error) = (rate(300, &[10, 100]), rate(300, &[50, 300]));
        let backing_faults = BackingFaults {
            read_error: rate(150, &[30]),
            write_error: rate(150, &[30]),
            flush_error: rate(150, &[100]),
        };
        let flash_faults = FlashFaults {
            flush_error: 0,
            read_error: rate(150, &[30]),
            write_error: rate(150, &[30]),
            corruption: rate(150, &[30]),
            lost_write: rate(150, &[30]),
            stuck: 0,
        };
        let mut plan = Plan {
            hosts,
            units: rng.pick(&[64, 64, 256, 512]) + rng.pick(&[0, 0, 1, 7]),
            segments: rng.between(2, 12),
            config: CacheConfig::write_through(block_bytes, segment_bytes, policy, Admission::default()),
            ring: None,
            flash_ns: rng.pick(&[20_000, 80_000, 2 * MS]),
            backing_ns: rng.pick(&[100_000, MS, 8 * MS]),
            network_ns: rng.pick(&[50_000, MS, 20 * MS]),
            record_ns: rng.pick(&[MS, 5 * MS, 100 * MS]),
            act_ns: rng.pick(&[10_000, MS, 20 * MS]),
            page_ns: rng.pick(&[10_000, 50 * MS, 1_000 * MS]),
            think_ns,
            operator_ns: rng.pick(&[200 * MS, 1_000 * MS, 4_000 * MS]),
            call_ns: rng.pick(&[1_500 * MS, 3_000 * MS, 10_000 * MS]),
            freeze_ns: rng.pick(&[100 * MS, 1_000 * MS, 5_000 * MS]),
            span_ns,
            lost,
            repeated,
            late,
            act_error,
            record_error,
            backing_faults,
            flash_faults,
            crashes: vec![],
            crash_step: None,
            stop: None,
            partitions: vec![],
            power_cut: None,
            migrations: rng.pick(&[1, 1, 2, 4]),
            rogue: rng.chance(200),
            gives_up: rng.chance(200),
            removes: rng.chance(300),
        };
        if options.faults {
            plan.add_crashes(options, rng);
        }
        plan
    }

    /// Gives the caches journals.
    pub(super) fn add_journals(&mut self) {
        let CacheConfig { block_bytes, segment_bytes, .. } = self.config;
        let frames = self.segments * segment_bytes / u64::from(block_bytes);
        let pages = journal::ring_pages_min(frames, block_bytes, segment_bytes);
        self.ring = Some(pages.div_ceil(segment_bytes / journal::PAGE_BYTES as u64));
        // Only histories of one host (`sim`) test journals that flash loses.
        self.flash_faults = FlashFaults::default();
    }

    /// Returns the pause of a process in the history of this seed. The pause is drawn from separate
    /// random numbers, so that the rest of the history does not change.
    pub(super) fn draw_stop(seed: u64) -> Option<(Crash, u64)> {
        let mut rng = SimRng::new(seed ^ STOP_SALT);
        let at = Crash { host: rng.below(2) as usize, step: rng.between(1, 60) };
        let mean = rng.pick(&[100, 2_000, 12_000, 60_000]) * MS;
        let ns = rng.latency(mean);
        rng.chance(300).then_some((at, ns))
    }

    fn add_crashes(&mut self, options: &Options, rng: &mut SimRng) {
        let span = self.span_ns;
        for _ in 0..rng.pick(&[0, 0, 1, 3]) {
            let mean = rng.pick(&[100, 1_000, 6_000]) * MS;
            self.partitions.push((Instant(rng.below(span)), rng.latency(mean)));
        }
        let crashes: Vec<_> = (0..rng.pick(&[0, 0, 1, 1, 4]))
            .map(|_| (Instant(rng.below(span)), rng.below(self.hosts as u64) as usize))
            .collect();
        let step = Crash { host: rng.below(2) as usize, step: rng.between(1, 60) };
        let at_a_step = rng.chance(400);
        let power_cut = rng.chance(100).then(|| Instant(rng.below(span)));
        if options.crash.is_some() {
            return self.crash_step = options.crash;
        }
        (self.crashes, self.power_cut) = (crashes, power_cut);
        self.crash_step = at_a_step.then_some(step);
    }
}
