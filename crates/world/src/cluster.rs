//! Simulates two or three hosts of a cluster. The hosts decide through etcd which of them serves
//! which disk (docs/decisions/0019).
//!
//! Each host runs the state machines of [`hob_engine::cluster`] and acts as the daemon does. A
//! simulated host opens disks, acquires them again after it has lost its lease in etcd, and gives
//! them back. While the host does not know whether its lease is still valid, the host delays
//! replies and writes. The simulated environment has a model of etcd and a network that loses and
//! delays messages. Hosts are paused, killed and partitioned, clocks drift up to the limit, and
//! wall clocks jump. A guest on each host writes and reads the disks that the host serves, even on
//! hosts where no guest should run. The checkers verify:
//!
//! - after a host acknowledged a request in one generation of the disk, no host acknowledges a
//!   request in an earlier generation, and in each generation only one host acknowledges requests;
//! - only one host at a time is allowed to acknowledge requests of a disk;
//! - after an acknowledgement in one generation, no write of an earlier generation reaches a
//!   backing;
//! - reads return the last acknowledged value, or an unacknowledged later one;
//! - dirty data in a host's flash is lost only if the operator forces a takeover, even if the host
//!   is destroyed while another host has a replica;
//! - no host takes over a disk of a failed owner before the settling time is over;
//! - after the faults have ended, every disk is served.
//!
//! This simulation has no engines, flash devices or journals; the modules `sim` and `hosts`
//! simulate them. A simulated cache is a table that survives the daemon process.

mod adopt;
mod checker;
mod copies;
mod daemon;
mod data;
mod host;
mod plan;
pub mod store;

use std::collections::BTreeMap;

use hob_engine::cluster::ClusterEvent;
use hob_engine::units::Instant;

use crate::queue::Queue;
use crate::rng::SimRng;
use crate::{Violation, ensure};
use checker::Checker;
use copies::PeerOp;
use data::Backing;
use data::Change;
use host::{Host, Op, Phase};
pub use plan::Report;
use plan::{Fault, MS, Plan};
use store::{Request, Response, Store};

/// Part of the time limit within which every disk must be served after the last fault, nanoseconds.
/// The limit also includes three times the length of a lease, and the settling time.
const HEALING_NS: u64 = 60_000 * MS;

/// Maximum number of simulation steps per guest request of a history.
const STEPS_MAX: u64 = 20_000;

/// Options of a history of a cluster.
#[derive(Clone, Debug)]
pub struct Options {
    /// Approximate number of guest requests in the history.
    pub requests: u32,
    /// True if the simulation injects faults.
    pub faults: bool,
    /// Deliberate defect of the simulated hosts, to test the checkers, which must then report a
    /// violation in some histories. `None` simulates correct hosts.
    pub sabotage: Option<Sabotage>,
    /// Function that receives one line of text for every event. `None` prints nothing.
    pub trace: Option<Trace>,
}

/// Function that prints one line of text about an event.
pub type Trace = fn(std::fmt::Arguments<'_>);

impl Default for Options {
    fn default() -> Self {
        Options { requests: 200, faults: true, sabotage: None, trace: None }
    }
}

/// Deliberate defects of the hosts. Each defect tests whether the checkers notice a violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The host counts the length of its etcd lease from the arrival of etcd's reply to the
    /// renewal, not from the sending of the request.
    CountsFromAnswer,
    /// The host uses the full length of its etcd lease, without a safety margin.
    NoMargin,
    /// Before it replies to a guest, the host does not check that its lease is still valid.
    UncheckedAnswers,
    /// Before it writes to the backing, the host does not check that its lease is still valid.
    UncheckedChanges,
    /// The host measures its etcd lease with the wall clock.
    WallClock,
    /// The host takes a disk although another host has the ownership lock.
    TakesHeld,
    /// The host does not wait until a failed owner's writes have settled.
    NoSettling,
    /// The host takes a disk although another host's flash has the newest data.
    IgnoresDirty,
    /// The host trusts its flash content, even if another host owned the disk in the meantime.
    BelievesFlash,
    /// The host starts write-back before the ownership record permits it.
    EarlyWriteBack,
    /// The host sends delayed replies when it gets a new etcd lease, before the disk's ownership is
    /// confirmed.
    ReleasesEarly,
    /// The host accepts a renewal that a deposed etcd leader answered.
    BelievesDeposed,
    /// The host keeps the disks that it acquired under an etcd lease that has expired.
    IgnoresEnd,
    /// A host that loses its replica acknowledges writes before the ownership record ceases to name
    /// the replica.
    FailsEarly,
    /// The ownership record names a replica before the replica is complete.
    SaysCopyEarly,
    /// When a host acquires a disk that it owned last, the host leaves an incomplete replica in the
    /// ownership record.
    KeepsWord,
    /// When a host confirms that it still has the ownership lock of a disk, the host leaves an
    /// incomplete replica in the ownership record.
    KeepsWordOfHeld,
    /// The host records a failover as complete when it has sent the replica's dirty data to the
    /// backing, and does not wait until the data has arrived.
    EndsEarly,
    /// The host trusts its flash content although another host has since taken the disk over from a
    /// replica of this content.
    BelievesAdopted,
    /// When a write that has waited in the daemon process starts, the host does not check again
    /// that its lease is still valid.
    UncheckedQueue,
    /// The host renews its etcd lease although a shard of its daemon hangs.
    RenewsWhileHung,
    /// No watchdog ends a daemon process whose shard hangs.
    NoWatchdog,
}

/// Formats one line about an event and passes it to the trace function, if the options have one.
macro_rules! trace {
    ($world:expr, $($what:tt)+) => {
        if let Some(trace) = $world.options.trace {
            trace(format_args!("{:>14} {}", $world.now.0, format_args!($($what)+)));
        }
    };
}
use trace;

/// A forced takeover of a disk. The dirty data in the former owner's flash is lost.
#[derive(Debug)]
struct Forced {
    host: usize,
    /// Generation of the disk after the forced takeover.
    generation: u64,
    /// True if etcd has executed the forced takeover. The host may not have received etcd's reply
    /// yet.
    happened: bool,
}

/// A future event of the simulation. Processes are identified by host and process number.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a simulation has few at a time")]
enum Event {
    ToStore {
        host: usize,
        life: u32,
        disk: Option<usize>,
        number: u64,
        request: Request,
    },
    FromStore {
        host: usize,
        life: u32,
        disk: Option<usize>,
        number: u64,
        response: Option<Response>,
    },
    /// The lease manager of a host must be called.
    Keep {
        host: usize,
        life: u32,
        at: Instant,
    },
    /// A watch event of etcd about a disk arrives at a host.
    Watched {
        host: usize,
        life: u32,
        disk: String,
        revision: u64,
        news: ClusterEvent,
    },
    /// A host checks the state of a disk and starts the actions that the disk needs.
    Poll {
        host: usize,
        life: u32,
        disk: usize,
    },
    Opened {
        host: usize,
        life: u32,
        disk: usize,
    },
    Think {
        host: usize,
    },
    /// The system call of a delayed write to the backing starts.
    Begin {
        host: usize,
        life: u32,
        disk: usize,
        change: Change,
        op: u64,
    },
    /// The watchdog ends a process whose shard hangs.
    Watchdog {
        host: usize,
        life: u32,
    },
    /// A write arrives at the backing.
    Land {
        host: usize,
        life: u32,
        disk: usize,
        change: Change,
        op: u64,
    },
    /// A replica request reaches the lending host.
    ToLender {
        host: usize,
        from: usize,
        life: u32,
        disk: usize,
        loan: u64,
        op: u64,
        what: PeerOp,
    },
    /// The lending host's reply to a replica request arrives.
    FromLender {
        host: usize,
        life: u32,
        disk: usize,
        loan: u64,
        op: u64,
        what: PeerOp,
    },
    /// The lending host has not answered a replica request in time.
    LenderSilent {
        host: usize,
        life: u32,
        disk: usize,
        loan: u64,
        op: u64,
    },
    /// An I/O of a request has completed. `result` is the value that a read returned.
    Done {
        host: usize,
        life: u32,
        disk: usize,
        op: u64,
        result: Option<u64>,
    },
    /// A host's reply to a guest request is sent.
    Answer {
        host: usize,
        life: u32,
        disk: usize,
        generation: u64,
        number: u64,
        op: Op,
        value: u64,
    },
    Fault(Fault),
    Restart {
        host: usize,
    },
    End,
}

struct Simulation<'a> {
    options: &'a Options,
    plan: Plan,
    rng: SimRng,
    now: Instant,
    queue: Queue<Event>,
    store: Store,
    store_away_until: Instant,
    backings: Vec<Backing>,
    hosts: Vec<Host>,
    checkers: Vec<Checker>,
    /// The last forced takeover that was requested for each disk, until the model has recorded the
    /// dirty data that this takeover loses.
    forced: Vec<Option<Forced>>,
    /// Time at which the ownership lock of each disk was last deleted.
    gone_at: Vec<Option<Instant>>,
    /// The highest number that a request or a value of a block has so far. Each number is used
    /// once.
    last: u64,
    healed: bool,
    report: Report,
}

/// Simulates the history of a seed.
///
/// # Errors
/// Returns a [`Violation`] if a guarantee is violated.
pub fn run(seed: u64, options: &Options) -> Result<Report, Violation> {
    let mut rng = SimRng::new(seed);
    let plan = Plan::draw(options, &mut rng);
    let mut world = Simulation::new(options, plan, rng);
    world.begin();
    let outcome = world.live();
    outcome.map_err(|Violation(what)| Violation(format!("at {} ns: {what}", world.now.0)))?;
    world.report.leases_ended = world.store.leases_ended;
    world.report.took_ns = world.now.0;
    Ok(world.report)
}

impl<'a> Simulation<'a> {
    fn new(options: &'a Options, plan: Plan, rng: SimRng) -> Self {
        let host =
            |number| Host::new(number, plan.disks, plan.lease_ns, plan.settle_ns, plan.slow_ppm[number]);
        Simulation {
            store: Store::new(plan.fast_ppm, plan.lease_late_ns),
            hosts: (0..plan.hosts).map(host).collect(),
            backings: (0..plan.disks).map(|_| Backing::default()).collect(),
            checkers: (0..plan.disks).map(|_| Checker::default()).collect(),
            forced: (0..plan.disks).map(|_| None).collect(),
            gone_at: vec![None; plan.disks],
            options,
            plan,
            rng,
            now: Instant(0),
            queue: Queue::default(),
            store_away_until: Instant(0),
            last: 0,
            healed: false,
            report: Report::default(),
        }
    }

    fn begin(&mut self) {
        for (at, fault) in std::mem::take(&mut self.plan.faults) {
            self.queue.push(at, Event::Fault(fault));
        }
        let writes_back = self.plan.write_back;
        for host in 0..self.plan.hosts {
            self.hosts[host].kept.iter_mut().for_each(|kept| kept.writes_back = writes_back);
            self.start(host);
            let at = Instant(self.rng.below(self.plan.think_ns));
            self.queue.push(at, Event::Think { host });
        }
        self.queue.push(Instant(self.plan.span_ns), Event::End);
    }

    fn live(&mut self) -> Result<(), Violation> {
        let steps_max = STEPS_MAX * (u64::from(self.options.requests) + 50);
        let mut end = None;
        for _ in 0..steps_max {
            let Some((at, event)) = self.queue.pop() else { break };
            self.now = at.max(self.now);
            if end.is_some_and(|end| self.now >= end) {
                return self.conclude();
            }
            if matches!(event, Event::End) {
                end = Some(self.heal());
            } else if let Some(until) = self.stopped(&event) {
                self.queue.push(until, event);
            } else {
                self.handle(event)?;
            }
        }
        Err(Violation("the history does not end within the maximum number of steps".to_owned()))
    }

    /// Returns the time at which the process that handles the event continues, if this process is
    /// paused.
    fn stopped(&self, event: &Event) -> Option<Instant> {
        let host = match event {
            Event::FromStore { host, .. }
            | Event::Keep { host, .. }
            | Event::Watched { host, .. }
            | Event::Poll { host, .. }
            | Event::Opened { host, .. }
            | Event::ToLender { host, .. }
            | Event::FromLender { host, .. }
            | Event::LenderSilent { host, .. }
            | Event::Begin { host, .. }
            | Event::Watchdog { host, .. }
            | Event::Done { host, .. } => *host,
            _ => return None,
        };
        let until = self.hosts[host].paused_until;
        (until > self.now).then_some(until)
    }

    fn handle(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::ToStore { host, life, disk, number, request } => {
                self.reach_store(host, life, disk, number, request)?;
            }
            Event::Watched { host, life, disk, revision, news } if self.lives(host, life) => {
                let clock = self.clock(host);
                self.hosts[host].waiting.handle_news(clock, &disk, revision, news);
            }
            Event::FromStore { host, life, disk, number, response } if self.lives(host, life) => match disk {
                None => self.keeper_answered(host, number, response)?,
                Some(disk) => self.disk_answered(host, disk, number, response)?,
            },
            Event::Keep { host, life, at } if self.lives(host, life) && self.hosts[host].keep_at == at => {
                self.keep(host)?;
            }
            Event::Poll { host, life, disk } if self.lives(host, life) => self.poll(host, disk)?,
            Event::Opened { host, life, disk } if self.runs(host, life) => self.opened(host, disk)?,
            Event::Think { host } => self.think(host)?,
            #[expect(clippy::collapsible_match, reason = "it does something besides saying so")]
            Event::ToLender { host, from, life, disk, loan, op, what } => {
                if !self.hosts[host].is_hung && self.reach_lender(host, from, disk, loan, what) {
                    let at = self.now + self.way();
                    self.queue.push(at, Event::FromLender { host: from, life, disk, loan, op, what });
                }
            }
            Event::FromLender { host, life, disk, loan, op, what }
                if self.runs(host, life) && self.hosts[host].no_peer_until <= self.now =>
            {
                self.lender_answered(host, disk, loan, op, what)?;
            }
            Event::LenderSilent { host, life, disk, loan, op } if self.runs(host, life) => {
                self.lender_silent(host, disk, loan, op)?;
            }
            // Writes that wait for a system call are in the kernel or another thread, so a hanging
            // shard does not stop them.
            Event::Begin { host, life, disk, change, op } if self.lives(host, life) => {
                self.begin_change(host, disk, change, op)?;
            }
            Event::Watchdog { host, life } if self.lives(host, life) => self.end_hung(host)?,
            Event::Land { host, life, disk, change, op } => self.land(host, life, disk, change, op)?,
            Event::Done { host, life, disk, op, result } if self.runs(host, life) => {
                self.done(host, disk, op, result)?;
            }
            Event::Answer { host, life, disk, generation, number, op, value } if self.runs(host, life) => {
                self.answer(host, disk, generation, number, op, value)?;
            }
            Event::Fault(fault) => self.fault(fault)?,
            Event::Restart { host } => {
                self.hosts[host].restart(self.plan.lease_ns, self.plan.settle_ns);
                self.start(host);
            }
            _ => {}
        }
        Ok(())
    }

    fn lives(&self, host: usize, life: u32) -> bool {
        self.hosts[host].up && self.hosts[host].life == life
    }

    /// Returns true if the process lives and its shard does not hang.
    fn runs(&self, host: usize, life: u32) -> bool {
        self.lives(host, life) && !self.hosts[host].is_hung
    }

    /// Makes a host's shard hang until the process ends.
    fn hang(&mut self, host: usize) {
        if !self.hosts[host].up || self.hosts[host].is_hung {
            return;
        }
        self.report.hangs += 1;
        self.hosts[host].is_hung = true;
        if !self.is(Sabotage::NoWatchdog) {
            let life = self.hosts[host].life;
            self.queue.push(self.now + self.plan.silence_ns, Event::Watchdog { host, life });
        }
    }

    fn end_hung(&mut self, host: usize) -> Result<(), Violation> {
        // A renewal that was in flight when the shard began to hang may extend the lease once more,
        // so the lease ends after at most two lease lengths.
        let is_long = self.plan.silence_ns >= 2 * self.plan.lease_ns;
        let holds = self.hosts[host].term.is_some_and(|term| term.is_valid(self.clock(host)));
        ensure!(
            !is_long || !holds,
            "host {host} holds its lease, but its shard has hung for two lease lengths"
        );
        self.crash(host, MS, false)
    }

    fn fault(&mut self, fault: Fault) -> Result<(), Violation> {
        if self.healed {
            return Ok(());
        }
        trace!(self, "{fault:?}");
        let now = self.now;
        match fault {
            Fault::Pause(host, time) => {
                self.report.pauses += 1;
                let host = &mut self.hosts[host];
                host.paused_until = host.paused_until.max(now + time);
            }
            Fault::Kill(host, time) => self.crash(host, time, false)?,
            // Booting a host takes longer than the settling time and the longest pause before a
            // write.
            Fault::PowerCut(host, time) => {
                self.crash(host, time + self.plan.settle_ns + self.plan.hesitation_ns_max, true)?;
            }
            Fault::Partition(host, time) => self.hosts[host].no_store_until = now + time,
            Fault::NoBacking(host, time) => {
                self.hosts[host].no_backing_until = now + time;
                if self.plan.fences {
                    // Another host may have opened the fencing backing, which then refuses this
                    // host's writes.
                    self.reopen(host);
                }
            }
            Fault::StoreAway(time) => self.store_away_until = now + time,
            Fault::Depose(time) => self.store.depose(now, now + time),
            Fault::WallJump(host, seconds) => self.hosts[host].wall_ahead += seconds * 1_000_000_000,
            Fault::Force(host, disk) => self.hosts[host].local[disk].force = true,
            Fault::GiveBack(host, disk, time) => {
                let host = &mut self.hosts[host];
                let until = host.clock(now) + time;
                let local = &mut host.local[disk];
                local.not_before = until;
                if local.phase == Phase::Serving {
                    local.phase = Phase::Leaving;
                }
            }
            Fault::Mode(host, disk) => self.change_mode(host, disk),
            Fault::Hang(host) => self.hang(host),
            Fault::NoPeer(host, time) => self.hosts[host].no_peer_until = now + time,
            Fault::Destroy(host, time) => self.destroy(host, time)?,
        }
        Ok(())
    }

    fn crash(&mut self, host: usize, down_ns: u64, power: bool) -> Result<(), Violation> {
        if !self.hosts[host].up {
            return Ok(());
        }
        self.report.crashes += 1;
        self.report.refused += self.hosts[host].local.iter().map(|local| local.ops.len() as u64).sum::<u64>();
        self.hosts[host].up = false;
        self.hosts[host].paused_until = self.now;
        if !power {
            self.end_io(host)?;
        }
        self.queue.push(self.now + down_ns.max(1), Event::Restart { host });
        Ok(())
    }

    /// Ends all faults. Returns the time by which every disk must be served.
    fn heal(&mut self) -> Instant {
        trace!(self, "faults cease");
        self.healed = true;
        (self.plan.lost, self.plan.very_late, self.plan.hesitates) = (0, 0, 0);
        self.store_away_until = self.now;
        self.store.depose(self.now, self.now);
        for host in &mut self.hosts {
            (host.no_store_until, host.no_backing_until) = (self.now, self.now);
            host.no_peer_until = self.now;
            host.paused_until = host.paused_until.min(self.now);
            host.local.iter_mut().for_each(|local| local.not_before = Instant(0));
        }
        self.now + 3 * self.plan.lease_ns + self.plan.settle_ns + HEALING_NS
    }

    fn conclude(&mut self) -> Result<(), Violation> {
        for disk in 0..self.plan.disks {
            let serving: Vec<usize> = (0..self.plan.hosts).filter(|host| self.serves(*host, disk)).collect();
            ensure!(serving.len() == 1, "at the end, disk {disk} is served by {serving:?}, not by one host");
            self.check_backing(disk, serving[0])?;
        }
        Ok(())
    }

    /// Checks that late writes of other hosts have not changed the backing. Reads do not show such
    /// a write if the owner has the block in its cache.
    fn check_backing(&self, disk: usize, owner: usize) -> Result<(), Violation> {
        let cache = &self.hosts[owner].kept[disk].cache;
        for (block, value) in self.backings[disk].blocks() {
            let is_newer_there = cache.get(block).is_some_and(|(_, dirty)| *dirty);
            ensure!(
                is_newer_there || self.checkers[disk].may_have(*block, *value),
                "at the end, block {block} of the backing of disk {disk} has the overwritten value {value}"
            );
        }
        Ok(())
    }

    /// Returns a new unique number.
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

/// Values of a backing's blocks, by block number.
type Blocks = BTreeMap<u32, u64>;
