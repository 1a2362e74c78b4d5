//! Histories of two or three hosts that decide through a store with leases which of them serves which disk
//! (docs/decisions/0019).
//!
//! Each host has the state machines of [`hob_engine::cluster`], and acts as a daemon does: it opens disks,
//! holds replies and changes while its lease is in doubt, takes disks again, and gives them back. The
//! environment is a model of etcd, a network that loses and delays messages, hosts that are stopped, killed
//! and partitioned, clocks that drift up to the limit, and wall clocks that jump. A guest on each host
//! writes and reads the disks that its host serves, also where no guest should run. The checkers verify:
//!
//! - nothing is acknowledged under a generation after anything was under a later one, nor by two hosts
//!   under one;
//! - no two hosts may acknowledge at the same moment;
//! - no change reaches a backing that was sent under an earlier generation than the last acknowledgement's;
//! - reads return the value acknowledged last, or one in doubt since;
//! - dirty data in a host's flash is lost only by an operator's force, also if that host is destroyed and
//!   another one has a replica;
//! - no host takes a disk of a failed owner before the settling time is over;
//! - when faults have ceased, every disk is served.
//!
//! Not included: engines with their flash and journals (`sim` and `hosts` have those). A cache here is a
//! table that survives its process.

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

/// Time after the last fault by which everything must be served, nanoseconds, in addition to leases and
/// settling.
const HEALING_NS: u64 = 60_000 * MS;

/// Maximum number of steps per request of a history, and in addition to that.
const STEPS_MAX: u64 = 20_000;

/// Options of a history.
#[derive(Clone, Debug)]
pub struct Options {
    /// Approximate number of guest requests.
    pub requests: u32,
    /// Injects faults.
    pub faults: bool,
    /// Breaks something on purpose: some run must fail.
    pub sabotage: Option<Sabotage>,
    /// Called for every event with one line.
    pub trace: Option<Trace>,
}

/// Prints a line of a trace.
pub type Trace = fn(std::fmt::Arguments<'_>);

impl Default for Options {
    fn default() -> Self {
        Options { requests: 200, faults: true, sabotage: None, trace: None }
    }
}

/// Defects of the hosts, to test whether the checkers notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The lease is counted from the answer to its renewal.
    CountsFromAnswer,
    /// The lease is used in full length, without a margin.
    NoMargin,
    /// The clock is not checked before replies.
    UncheckedAnswers,
    /// The clock is not checked before changes.
    UncheckedChanges,
    /// Leases use the wall clock.
    WallClock,
    /// A disk is taken although another host holds it.
    TakesHeld,
    /// A failed owner's writes get no time to settle.
    NoSettling,
    /// A disk is taken although another host's flash has its newest data.
    IgnoresDirty,
    /// Flash content is trusted, whichever host had the disk meanwhile.
    BelievesFlash,
    /// Write-back begins before the ownership record says so.
    EarlyWriteBack,
    /// Held replies are released with the next lease, before the disk is taken again.
    ReleasesEarly,
    /// A renewal counts even if a deposed leader answers it.
    BelievesDeposed,
    /// The end of a lease does not end what was taken under it.
    IgnoresEnd,
    /// A host that loses its replica continues without it before the record says so.
    FailsEarly,
    /// The record names a replica before that is complete.
    SaysCopyEarly,
    /// A host that takes its disk again leaves the replica in the record.
    KeepsWord,
    /// The same while it still holds the disk.
    KeepsWordOfHeld,
    /// A failover counts as complete when everything was sent to the backing.
    EndsEarly,
    /// Flash content is trusted although another host has failed over from its replica.
    BelievesAdopted,
    /// The clock is not checked when a change that waited in its process starts.
    UncheckedQueue,
    /// The lease is renewed although a shard hangs.
    RenewsWhileHung,
    /// A process whose shard hangs keeps running.
    NoWatchdog,
}

/// Calls the trace, if there is one.
macro_rules! trace {
    ($world:expr, $($what:tt)+) => {
        if let Some(trace) = $world.options.trace {
            trace(format_args!("{:>14} {}", $world.now.0, format_args!($($what)+)));
        }
    };
}
use trace;

/// A disk that a host takes by force, with the loss of another host's dirty data.
#[derive(Debug)]
struct Forced {
    host: usize,
    /// Generation of the disk if that happens.
    generation: u64,
    /// It has happened, whether that host knows it or not.
    happened: bool,
}

/// A future event. Processes are identified by host and process number.
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
    /// The lease manager has work to do.
    Keep {
        host: usize,
        life: u32,
        at: Instant,
    },
    /// A host gets a watch event of a disk.
    Watched {
        host: usize,
        life: u32,
        disk: String,
        revision: u64,
        news: ClusterEvent,
    },
    /// A host checks a disk.
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
    /// A change that waited for its system call starts.
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
    /// A change arrives at the backing.
    Land {
        host: usize,
        life: u32,
        disk: usize,
        change: Change,
        op: u64,
    },
    /// A request reaches the lending host.
    ToLender {
        host: usize,
        from: usize,
        life: u32,
        disk: usize,
        loan: u64,
        op: u64,
        what: PeerOp,
    },
    /// The lending host has completed it.
    FromLender {
        host: usize,
        life: u32,
        disk: usize,
        loan: u64,
        op: u64,
        what: PeerOp,
    },
    /// The timeout of such a request.
    LenderSilent {
        host: usize,
        life: u32,
        disk: usize,
        loan: u64,
        op: u64,
    },
    /// An I/O has ended, with the value that was read.
    Done {
        host: usize,
        life: u32,
        disk: usize,
        op: u64,
        result: Option<u64>,
    },
    /// A reply is on the wire.
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
    /// For each disk: the host that takes it by force.
    forced: Vec<Option<Forced>>,
    /// For each disk: when its lock was deleted last.
    gone_at: Vec<Option<Instant>>,
    /// Numbers of requests and values are unique.
    last: u64,
    healed: bool,
    report: Report,
}

/// Runs one history.
///
/// # Errors
/// If a promise is broken.
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
        Err(Violation("it does not end".to_owned()))
    }

    /// Returns until when the event's process is stopped.
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
            // Changes that wait for a system call are in the kernel or another thread: a hanging shard does
            // not stop them.
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

    /// Makes a host's shard hang until its process ends.
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
        // A renewal may have been in flight when the shard began to hang.
        let is_long = self.plan.silence_ns >= 2 * self.plan.lease_ns;
        let holds = self.hosts[host].term.is_some_and(|term| term.is_valid(self.clock(host)));
        ensure!(!is_long || !holds, "host {host} holds its lease, and its shard has hung for two leases");
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
            // A host takes time to boot.
            Fault::PowerCut(host, time) => {
                self.crash(host, time + self.plan.settle_ns + self.plan.hesitation_ns_max, true)?;
            }
            Fault::Partition(host, time) => self.hosts[host].no_store_until = now + time,
            Fault::NoBacking(host, time) => {
                self.hosts[host].no_backing_until = now + time;
                if self.plan.fences {
                    // Its lock on the backing may be broken meanwhile.
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

    /// Ends all faults. Returns when everything must be in order.
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
            ensure!(serving.len() == 1, "disk {disk} is served by {serving:?} in the end");
            self.check_backing(disk, serving[0])?;
        }
        Ok(())
    }

    /// A host with a cached block does not notice another host's late change of the backing; this check
    /// does.
    fn check_backing(&self, disk: usize, owner: usize) -> Result<(), Violation> {
        let cache = &self.hosts[owner].kept[disk].cache;
        for (block, value) in self.backings[disk].blocks() {
            let is_newer_there = cache.get(block).is_some_and(|(_, dirty)| *dirty);
            ensure!(
                is_newer_there || self.checkers[disk].may_have(*block, *value),
                "the backing of disk {disk} has {value} in block {block} in the end, which was overwritten"
            );
        }
        Ok(())
    }

    /// Returns a new number.
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

/// Values of a backing's blocks.
type Blocks = BTreeMap<u32, u64>;
