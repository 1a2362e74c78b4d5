//! Histories of two or three hosts that agree through a store with leases on who serves which disk (docs/decisions/0019).
//!
//! Each host has the machines of [`hob_engine::cluster`], and carries out what a daemon does around them: it opens disks, holds answers and changes
//! while its lease is in doubt, takes disks again, gives them back. Around them are a model of etcd, a network that loses and delays, hosts that are
//! stopped, killed and cut off, clocks that drift as far as they may, and wall clocks that jump. A guest on each host writes and reads
//! whatever its host serves, also where no machine should run. What is checked on the way:
//!
//! - nothing is acknowledged under a generation after anything was under a later one, nor by two hosts under one;
//! - no two hosts may acknowledge at the same moment;
//! - nothing changes a backing that was sent under an earlier generation than anything was acknowledged under;
//! - reads return what was acknowledged last, or what is in doubt since;
//! - what is dirty in a host's flash is lost by an operator's force only, also if that host is destroyed and another one has a second copy;
//! - nobody takes a disk of an owner that vanished before it has settled;
//! - when faults have ceased, every disk is served.
//!
//! Refused: engines with their flash and journals (`sim` and `hosts` have those): a cache here is a table that survives its process.

mod adopt;
mod checker;
mod copies;
mod daemon;
mod data;
mod host;
mod plan;
pub mod store;

use std::collections::BTreeMap;

use hob_engine::cluster::News;
use hob_engine::units::Instant;

use crate::dice::Dice;
use crate::queue::Queue;
use crate::{Violation, ensure};
use checker::Checker;
use copies::PeerOp;
use data::Backing;
use data::Change;
use host::{Host, Op, Phase};
pub use plan::Report;
use plan::{Fault, MS, Plan};
use store::{Request, Response, Store};

/// So long after the last fault everything must be served, nanoseconds, leases and settling besides.
const HEALING_NS: u64 = 60_000 * MS;

/// No history takes more steps for each of its requests, and so many besides.
const STEPS_MAX: u64 = 20_000;

/// What histories may contain.
#[derive(Clone, Debug)]
pub struct Options {
    /// Guest requests, about.
    pub requests: u32,
    /// Anything goes wrong.
    pub faults: bool,
    /// Something is broken on purpose: some run must fail.
    pub sabotage: Option<Sabotage>,
    /// Hears of everything that happens, one line each.
    pub trace: Option<Trace>,
}

/// Takes a line of a trace.
pub type Trace = fn(std::fmt::Arguments<'_>);

impl Default for Options {
    fn default() -> Self {
        Options { requests: 200, faults: true, sabotage: None, trace: None }
    }
}

/// Ways to break the hosts, to see whether the checkers notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The lease is counted from the answer to its renewal.
    CountsFromAnswer,
    /// It is counted in full.
    NoMargin,
    /// Nobody looks at the clock before answers.
    UncheckedAnswers,
    /// Nobody looks at the clock before changes.
    UncheckedChanges,
    /// Time is that of the wall clock.
    WallClock,
    /// A disk is taken though somebody holds it.
    TakesHeld,
    /// Whoever vanished is given no time for what it has sent.
    NoSettling,
    /// A disk is taken though another host's flash has its newest data.
    IgnoresDirty,
    /// What flash has is believed, whoever had the disk meanwhile.
    BelievesFlash,
    /// Writing back begins before the title says so.
    EarlyWriteBack,
    /// What was held is let go with the next lease, and the disk taken again afterwards.
    ReleasesEarly,
    /// A renewal counts whoever answers it.
    BelievesDeposed,
    /// A lease that has ended is not the end of what was taken under it.
    IgnoresEnd,
    /// Who loses its second copy goes on without it before the title says so.
    FailsEarly,
    /// The title has the word of a second copy before that is complete.
    SaysCopyEarly,
    /// A host that takes its disk anew leaves the word of the copy in the title.
    KeepsWord,
    /// The same where it holds the disk still.
    KeepsWordOfHeld,
    /// A disk counts as adopted when everything was sent to the backing.
    EndsEarly,
    /// What flash has is believed although another host has adopted it.
    BelievesAdopted,
    /// Nobody looks at the clock when a change begins that has waited in its process.
    UncheckedQueue,
    /// The lease is renewed although a shard hangs.
    RenewsWhileHung,
    /// A process whose shard hangs goes on.
    NoWatchdog,
}

/// Tells the trace, if there is one.
macro_rules! trace {
    ($world:expr, $($what:tt)+) => {
        if let Some(trace) = $world.options.trace {
            trace(format_args!("{:>14} {}", $world.now.0, format_args!($($what)+)));
        }
    };
}
use trace;

/// A disk that a host wants though what is dirty elsewhere is lost by that.
#[derive(Debug)]
struct Forced {
    host: usize,
    /// In which it has the disk if that happens.
    generation: u64,
    /// It has happened, whether that host has heard of it or not.
    happened: bool,
}

/// What is to happen. Of a process, by its host and life.
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
    /// The keeper has something to do.
    Keep {
        host: usize,
        life: u32,
        at: Instant,
    },
    /// It hears that something happened to a disk.
    News {
        host: usize,
        life: u32,
        disk: String,
        revision: u64,
        news: News,
    },
    /// It is time to look at a disk.
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
    /// A change that has waited for its system call begins.
    Begin {
        host: usize,
        life: u32,
        disk: usize,
        change: Change,
        op: u64,
    },
    /// The watchdog of a process whose shard hangs ends it.
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
    /// A borrower's word reaches its lender.
    ToLender {
        host: usize,
        from: usize,
        life: u32,
        disk: usize,
        loan: u64,
        op: u64,
        what: PeerOp,
    },
    /// The lender has done it.
    FromLender {
        host: usize,
        life: u32,
        disk: usize,
        loan: u64,
        op: u64,
        what: PeerOp,
    },
    /// It should have.
    LenderSilent {
        host: usize,
        life: u32,
        disk: usize,
        loan: u64,
        op: u64,
    },
    /// An I/O has ended, with what was read.
    Done {
        host: usize,
        life: u32,
        disk: usize,
        op: u64,
        result: Option<u64>,
    },
    /// An answer is on the wire.
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

struct World<'a> {
    options: &'a Options,
    plan: Plan,
    dice: Dice,
    now: Instant,
    queue: Queue<Event>,
    store: Store,
    store_away_until: Instant,
    backings: Vec<Backing>,
    hosts: Vec<Host>,
    checkers: Vec<Checker>,
    /// By disk: who asked for it by force.
    forced: Vec<Option<Forced>>,
    /// By disk: when its hold was deleted last.
    gone_at: Vec<Option<Instant>>,
    /// Numbers of requests and values are used once.
    last: u64,
    healed: bool,
    report: Report,
}

/// Lives one history.
///
/// # Errors
/// When a promise is broken.
pub fn run(seed: u64, options: &Options) -> Result<Report, Violation> {
    let mut dice = Dice::new(seed);
    let plan = Plan::draw(options, &mut dice);
    let mut world = World::new(options, plan, dice);
    world.begin();
    let outcome = world.live();
    outcome.map_err(|Violation(what)| Violation(format!("at {} ns: {what}", world.now.0)))?;
    world.report.leases_ended = world.store.leases_ended;
    world.report.took_ns = world.now.0;
    Ok(world.report)
}

impl<'a> World<'a> {
    fn new(options: &'a Options, plan: Plan, dice: Dice) -> Self {
        let host =
            |number| Host::new(number, plan.disks, plan.lease_ns, plan.settle_ns, plan.slow_ppm[number]);
        World {
            store: Store::new(plan.fast_ppm, plan.lease_late_ns),
            hosts: (0..plan.hosts).map(host).collect(),
            backings: (0..plan.disks).map(|_| Backing::default()).collect(),
            checkers: (0..plan.disks).map(|_| Checker::default()).collect(),
            forced: (0..plan.disks).map(|_| None).collect(),
            gone_at: vec![None; plan.disks],
            options,
            plan,
            dice,
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
            let at = Instant(self.dice.below(self.plan.think_ns));
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

    /// Until when the process that an event is for is stopped.
    fn stopped(&self, event: &Event) -> Option<Instant> {
        let host = match event {
            Event::FromStore { host, .. }
            | Event::Keep { host, .. }
            | Event::News { host, .. }
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
            Event::News { host, life, disk, revision, news } if self.lives(host, life) => {
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
            // What waits for a system call is in the kernel or another thread: a shard that hangs does not stop it.
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

    /// The same, and its shard does not hang.
    fn runs(&self, host: usize, life: u32) -> bool {
        self.lives(host, life) && !self.hosts[host].is_hung
    }

    /// A host's shard hangs until its process ends.
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
        // A renewal may have been on its way when it began to hang.
        let is_long = self.plan.silence_ns >= 2 * self.plan.lease_ns;
        let holds = self.hosts[host].tenure.is_some_and(|tenure| tenure.is_valid(self.clock(host)));
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
            // A machine takes its time to start.
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

    /// Faults cease. Says when everything must be in order.
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

    /// Reads of a host that has a block in its flash do not see what somebody's late change did to the backing.
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

    /// A new number.
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

/// What a backing's blocks have.
type Blocks = BTreeMap<u32, u64>;
