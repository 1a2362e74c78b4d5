//! Histories of two or three hosts that see one backing and hand a disk, with its cache, from one to the other (docs/decisions/0013).
//!
//! Each host has an engine, flash, a durable record, and the two machines of [`hob_engine::migration`]; the world performs their acts, and
//! carries their calls over a network that loses, delays, repeats, reorders and parts. A machine (the *guest*) runs on one host, moves,
//! comes back, and its reads are held against a model of the disk. What is checked on the way:
//!
//! - reads return what the model of a disk allows, and what the backing holds, on whichever host (`model`, `media`);
//! - an acknowledged change is on the backing, a FUA or flushed one survives a power cut (`model`);
//! - only the host that owns the disk, by the durable records, sends a change to the backing, and none of another is in flight then;
//! - no two hosts serve the disk, no two records say that they own it, and generations grow;
//! - each request is answered once, and no guest hears an error for which there is no reason;
//! - when faults have ceased, one host has the disk and serves it, the others have let go of it, and everything has ended.
//!
//! Refused: caches that are recovered after a crash (`sim` has those); a host begins with an empty cache.

mod acts;
mod data;
mod finish;
mod guest;
mod host;
mod network;
mod operator;
mod owner;
mod plan;
mod report;
mod traffic;

use std::collections::BTreeMap;

use hob_engine::migration::Session;
use hob_engine::units::{Instant, IoId};

use crate::content::tag;
use crate::dice::Dice;
use crate::media::Backing;
use crate::model::Model;
use crate::queue::Queue;
use crate::{Violation, ensure};
use guest::Guest;
use host::Host;
use network::{Network, Packet};
use plan::Plan;
pub use report::Report;

/// No history takes longer, nanoseconds of virtual time.
const TIME_MAX: Instant = Instant(3_600_000_000_000);

/// No history takes more steps for each of its requests, and so many besides.
const STEPS_MAX: u64 = 4000;

/// Tells the dice for journals from those of everything else.
const JOURNAL_SALT: u64 = 0x6a6f_7572;

/// What histories may contain.
#[derive(Clone, Debug)]
pub struct Options {
    /// Guest requests.
    pub requests: u32,
    /// Hosts crash, the network is bad, devices and backings fail, acts and records fail.
    pub faults: bool,
    /// This host crashes at this step, in place of the crashes that the seed has.
    pub crash: Option<Crash>,
    /// Something is broken on purpose: the run must fail.
    pub sabotage: Option<Sabotage>,
    /// Hears of everything that happens, one line each.
    pub trace: Option<Trace>,
}

/// A host crashes at a step of its own: an act begins or ends, a record becomes durable, a call or an answer goes or comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crash {
    /// Which host.
    pub host: usize,
    /// At which of its steps, from 1 on.
    pub step: u64,
}

/// Takes a line of a trace.
pub type Trace = fn(std::fmt::Arguments<'_>);

/// Tells the trace, if there is one.
macro_rules! trace {
    ($world:expr, $($what:tt)+) => {
        if let Some(trace) = $world.options.trace {
            trace(format_args!("{:>14} {}", $world.now.0, format_args!($($what)+)));
        }
    };
}
use trace;

impl Default for Options {
    fn default() -> Self {
        Options { requests: 80, faults: true, crash: None, sabotage: None, trace: None }
    }
}

/// Ways to break the hosts, to see whether the checkers notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The destination says that it has forgotten before it has.
    EarlyForgotten,
    /// The destination forgets nothing.
    NothingForgotten,
    /// The source says that its record is durable before it is.
    EarlyRecord,
    /// The source serves again after its record that the disk has departed.
    LateThaw,
    /// Reads in standby are answered with what was pulled before.
    StandbyFromCache,
    /// A destination that has restarted believes what it had pulled before.
    BelievedAwaited,
    /// The source answers reads of a standby after the disk has departed.
    AwayServesStandby,
    /// What was written here after the hand-over is read from the former owner nevertheless.
    FormerOwnerForAll,
    /// It is where a page of the former owner's list names it that comes later.
    LatePages,
    /// The source does not wait for what is in flight when it freezes.
    HastyFreeze,
    /// Changes are not noted while the cache is copied.
    Unwatched,
    /// A destination that has restarted answers flushes without one of the backing.
    UnflushedStandby,
}

/// Lives the history of this seed.
pub fn run(seed: u64, options: &Options) -> Result<Report, Violation> {
    let mut world = World::new(seed, options);
    trace!(world, "{:?}", world.plan);
    world.live().map_err(|Violation(what)| Violation(format!("{what} (HOB_SEED={seed})")))?;
    world.report.took_ns = world.now.0;
    Ok(world.report)
}

/// What happens next.
#[derive(Debug)]
enum Event {
    /// An I/O of flash ends, on a host in this life of it.
    Flash(usize, u32, IoId),
    /// An I/O of the backing ends.
    Backing(IoId),
    /// A packet reaches a host.
    Arrives(usize, Packet),
    /// No answer came to a call.
    Unanswered(usize, u32, u64),
    /// The host begins its next act.
    Act(usize, u32),
    /// A record was written, or was not.
    Recorded(usize, u32),
    /// A read of another host's flash was not answered in time.
    ReadAgain(usize, u32, u64),
    /// More may be pulled.
    Pull(usize, u32),
    /// This page of the list of what to pull is wanted, or did not come.
    ListAgain(usize, u32, usize),
    /// The guest's turn.
    Guest,
    /// The guest goes on, on this host.
    Resume(usize),
    /// The guest, which only reads since it moved, goes back or stays.
    Decide,
    /// Somebody uses a host on which the guest does not run.
    Rogue,
    /// The operator has a look.
    Operator,
    Crash(usize),
    Restart(usize),
    PowerCut,
    /// The network is parted, or whole again after this time.
    Part(u64),
    Heal,
}

/// Whose an I/O of the backing is.
#[derive(Clone, Copy, Debug)]
struct Owned {
    host: usize,
    id: IoId,
    changes: bool,
}

struct World<'a> {
    options: &'a Options,
    plan: Plan,
    dice: Dice,
    now: Instant,
    steps: u64,
    queue: Queue<Event>,
    hosts: Vec<Host>,
    network: Network,
    backing: Backing,
    /// I/Os of the backing, by the name that it knows them by.
    backing_ios: BTreeMap<IoId, Owned>,
    submitted: u32,
    model: Model,
    /// On which host each change was made, by its serial.
    changed_on: BTreeMap<u32, usize>,
    /// Whose attempt each was.
    attempts: BTreeMap<Session, usize>,
    guest: Guest,
    /// Migrations that the operator may still begin.
    migrations: u32,
    /// Faults have ceased.
    ending: bool,
    report: Report,
}

impl<'a> World<'a> {
    fn new(seed: u64, options: &'a Options) -> Self {
        let mut dice = Dice::new(seed);
        let mut plan = Plan::draw(options, &mut dice);
        if Dice::new(seed ^ JOURNAL_SALT).chance(300) {
            plan.add_journals();
        }
        let content = (0..plan.units).map(|unit| tag(1, 0, unit)).collect();
        let mut backing = Backing::new(content, plan.backing_faults, None);
        backing.share();
        World {
            options,
            hosts: (0..plan.hosts).map(|_| Host::new(&plan)).collect(),
            network: Network::new(plan.hosts),
            backing,
            backing_ios: BTreeMap::new(),
            submitted: 0,
            model: Model::new(0, plan.units),
            changed_on: BTreeMap::new(),
            attempts: BTreeMap::new(),
            guest: Guest::draw(&plan, options.requests, &mut dice),
            migrations: plan.migrations,
            dice,
            now: Instant(0),
            steps: 0,
            queue: Queue::default(),
            ending: false,
            report: Report::default(),
            plan,
        }
    }

    fn live(&mut self) -> Result<(), Violation> {
        self.begin()?;
        let end = Instant(self.plan.span_ns);
        while self.now < end && !(self.guest.left == 0 && self.migrations == 0 && self.is_calm()) {
            self.turn()?;
        }
        self.finish()
    }

    /// The disk is the first host's, and everybody begins.
    fn begin(&mut self) -> Result<(), Violation> {
        self.hosts[0].record = Some(hob_engine::migration::Record::Owner { generation: 1, attempts: 0 });
        for host in 0..self.hosts.len() {
            self.start(host)?;
        }
        self.queue.push(self.now, Event::Guest);
        self.queue.push(self.now + self.plan.operator_ns / 4, Event::Operator);
        if self.plan.rogue {
            self.queue.push(self.now + self.dice.below(self.plan.span_ns / 4), Event::Rogue);
        }
        for (at, host) in std::mem::take(&mut self.plan.crashes) {
            self.queue.push(at, Event::Crash(host));
        }
        for (at, ns) in std::mem::take(&mut self.plan.partitions) {
            self.queue.push(at, Event::Part(ns));
        }
        if let Some(at) = self.plan.power_cut {
            self.queue.push(at, Event::PowerCut);
        }
        Ok(())
    }

    /// Lets the next thing happen.
    fn turn(&mut self) -> Result<(), Violation> {
        self.steps += 1;
        let steps_max = STEPS_MAX * (50 + u64::from(self.options.requests));
        ensure!(self.now < TIME_MAX && self.steps < steps_max, "never ends: {}", self.state());
        let due = (0..self.hosts.len()).filter_map(|host| Some((self.hosts[host].due()?, host))).min();
        let next = self.queue.next_at();
        if let Some((at, host)) = due
            && next.is_none_or(|next| at < next)
        {
            self.now = self.now.max(at);
            let now = self.now;
            if let Some(ram) = &mut self.hosts[host].ram {
                ram.handle_timeout(now);
                let again = ram.due();
                ensure!(again.is_none_or(|again| again > now), "timeout {again:?} of host {host} at {now:?}");
            }
            return self.drain(host);
        }
        let Some((at, event)) = self.queue.pop() else {
            return Err(Violation(format!("nothing happens any more: {}", self.state())));
        };
        self.now = at;
        self.happen(event)
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Flash(host, life, id) if self.lives(host, life) => self.flash_done(host, id),
            Event::Backing(id) => self.backing_done(id),
            Event::Arrives(host, packet) => self.arrives(host, packet),
            Event::Unanswered(host, life, call) if self.lives(host, life) => self.answered(host, call, None),
            Event::Act(host, life) if self.lives(host, life) => self.begin_act(host),
            Event::Recorded(host, life) if self.lives(host, life) => self.recorded(host),
            Event::ReadAgain(host, life, nonce) if self.lives(host, life) => self.read_again(host, nonce),
            Event::Pull(host, life) if self.lives(host, life) => self.pull_due(host),
            Event::ListAgain(host, life, page) if self.lives(host, life) => self.ask_list(host, page),
            Event::Guest => self.guest_turn(),
            Event::Resume(host) => self.resume(host),
            Event::Decide => self.decide(),
            Event::Rogue => self.rogue(),
            Event::Operator => self.operate(),
            Event::Crash(host) => self.crash(host),
            Event::Restart(host) => self.start(host),
            Event::PowerCut => self.cut_power(),
            Event::Part(ns) => self.part(ns),
            Event::Heal => {
                self.network.heal();
                Ok(())
            }
            // Of a life that is over.
            _ => Ok(()),
        }
    }

    fn lives(&self, host: usize, life: u32) -> bool {
        self.hosts[host].life == life && self.hosts[host].ram.is_some()
    }

    /// Should the sabotage, if it is this one, strike?
    fn strikes(&self, sabotage: Sabotage) -> bool {
        self.options.sabotage == Some(sabotage)
    }

    /// Who has what, in words.
    fn state(&self) -> String {
        let hosts = self.hosts.iter().map(|host| {
            let ram = host.ram.as_ref();
            let role = ram.and_then(|ram| ram.engine.role(host::DISK));
            let phase = ram.and_then(|ram| ram.source.as_ref()).map(|source| source.phase());
            let requests = ram.map_or(0, |ram| ram.requests.len());
            format!("[up {} {:?} {role:?} {phase:?} {requests} requests]", ram.is_some(), host.record)
        });
        format!("{} guest {:?}", hosts.collect::<String>(), self.guest)
    }
}
