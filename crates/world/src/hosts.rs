//! Simulates two or three hosts that share a backing and migrate a disk and its cache between them
//! (docs/decisions/0013).
//!
//! Each host has an engine, flash, a durable record, and the source and destination state machines
//! of [`hob_engine::migration`]. The simulation performs the actions that the state machines
//! request. The simulation sends their messages over a network that loses, delays, repeats and
//! reorders messages and is sometimes partitioned. A guest runs on one host and moves between the
//! hosts. The guest's reads are compared with a model of the disk. The checkers verify:
//!
//! - on every host, reads return data that the model of the disk allows and that the backing has
//!   (`model`, `media`);
//! - an acknowledged write is on the backing, and a FUA or flushed write survives a power cut
//!   (`model`);
//! - only the host that owns the disk according to the durable records writes to the backing, and
//!   no other host has a write in flight at that time;
//! - only one host at a time serves the disk, only one record names an owner, and generations grow;
//! - each request is answered once, and each error of a guest request has a valid reason;
//! - after the faults have ended, one host serves the disk, the other hosts have released it, and
//!   no work is left.
//!
//! This simulation does not recover caches after a crash; the module `sim` does. A restarted host
//! begins with an empty cache.

mod actions;
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
use crate::media::Backing;
use crate::model::Model;
use crate::queue::Queue;
use crate::rng::SimRng;
use crate::{Violation, ensure};
use guest::Guest;
use host::Host;
use network::{Network, Packet};
use plan::Plan;
pub use report::Report;

/// Maximum duration of a simulated history, nanoseconds of virtual time.
const TIME_MAX: Instant = Instant(3_600_000_000_000);

/// Maximum number of simulation steps of a history, divided by the number of guest requests plus
/// 50.
const STEPS_MAX: u64 = 4000;

/// Number that is combined with the seed of a history, to seed separate random numbers for
/// histories with journals.
const JOURNAL_SALT: u64 = 0x6a6f_7572;

/// Options of a history of several hosts.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of guest requests in the history.
    pub requests: u32,
    /// True if the simulation injects faults: crashes of hosts, lost messages, errors of devices
    /// and backings, and failures of actions and record writes.
    pub faults: bool,
    /// The only crash of the history, instead of the random crashes that the seed would select.
    pub crash: Option<Crash>,
    /// The only pause of a process: the step after which a host's process pauses, and the length of
    /// the pause in nanoseconds. This pause replaces the pause that the seed would select.
    pub stop: Option<(Crash, u64)>,
    /// Deliberate defect of the simulated hosts, to test the checkers, which must then report a
    /// violation. `None` simulates correct hosts.
    pub sabotage: Option<Sabotage>,
    /// Function that receives one line of text for every event. `None` prints nothing.
    pub trace: Option<Trace>,
}

/// A crash of a host at one of its steps. A step is the start or end of an action, the write of a
/// durable record, or a message sent or received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crash {
    /// Index of the crashing host.
    pub host: usize,
    /// Number of the step at which the host crashes, counted from 1.
    pub step: u64,
}

/// Function that prints one line of text about an event.
pub type Trace = fn(std::fmt::Arguments<'_>);

/// Formats one line about an event and passes it to the trace function, if the options have one.
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
        Options { requests: 80, faults: true, crash: None, stop: None, sabotage: None, trace: None }
    }
}

/// Deliberate defects of the hosts. Each defect tests whether the checkers notice a violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The destination reports that it has invalidated ranges of its cache, before it invalidates
    /// them.
    EarlyForgotten,
    /// The destination reports that it has invalidated ranges of its cache, and never invalidates
    /// them.
    NothingForgotten,
    /// The source reports a record as durable before the record is durable.
    EarlyRecord,
    /// The source serves the disk again after recording the hand-over.
    LateThaw,
    /// The destination answers standby reads from data that it pulled earlier.
    StandbyFromCache,
    /// A restarted destination trusts data that it had pulled before the restart.
    BelievedAwaited,
    /// The source answers standby reads after the hand-over of the disk.
    AwayServesStandby,
    /// The new owner reads all data from the former owner, even data that the new owner has written
    /// since the hand-over.
    FormerOwnerForAll,
    /// The new owner receives further pages of the list of cached data after the hand-over. The new
    /// owner reads all data that these pages name from the former owner, even data that the new
    /// owner has written since the hand-over.
    LatePages,
    /// The source freezes the disk without waiting for requests in flight.
    HastyFreeze,
    /// The source does not record which ranges guests write while the destination copies the cache.
    Unwatched,
    /// A restarted destination acknowledges flushes without flushing the backing.
    UnflushedStandby,
}

/// Simulates the history of this seed.
pub fn run(seed: u64, options: &Options) -> Result<Report, Violation> {
    let mut world = Simulation::new(seed, options);
    trace!(world, "{:?}", world.plan);
    world.live().map_err(|Violation(what)| Violation(format!("{what} (HOB_SEED={seed})")))?;
    world.report.took_ns = world.now.0;
    Ok(world.report)
}

/// A future event of the simulation.
#[derive(Debug)]
enum Event {
    /// Completion of a flash I/O: host, process number of the host, I/O.
    Flash(usize, u32, IoId),
    /// Completion of a backing I/O.
    Backing(IoId),
    /// Arrival of a packet at a host.
    Arrives(usize, Packet),
    /// A call from one host to another timed out: calling host, process number of this host, call
    /// number.
    Unanswered(usize, u32, u64),
    /// A host begins its next action: host, process number of the host.
    Act(usize, u32),
    /// The write of a record has ended, with success or failure.
    Recorded(usize, u32),
    /// A read that was sent to another host timed out.
    ReadAgain(usize, u32, u64),
    /// A host may start the next pull of cached data.
    Pull(usize, u32),
    /// A host requests this page of the list of cached data again, unless the page has arrived.
    ListAgain(usize, u32, usize),
    /// The guest makes its next request.
    Guest,
    /// The guest resumes on this host.
    Resume(usize),
    /// A guest that has written nothing since its move decides whether to stay or to move back.
    Decide,
    /// A rogue client sends a request to a host on which the guest does not run.
    Rogue,
    /// The operator performs a random action.
    Operator,
    Crash(usize),
    Restart(usize),
    PowerCut,
    /// The network is partitioned for this many nanoseconds, until the event `Heal`.
    Part(u64),
    Heal,
}

/// A backing I/O: the host that sent the I/O, the I/O's id in the host's engine, and whether the
/// I/O changes data.
#[derive(Clone, Copy, Debug)]
struct Owned {
    host: usize,
    id: IoId,
    changes: bool,
}

struct Simulation<'a> {
    options: &'a Options,
    plan: Plan,
    rng: SimRng,
    now: Instant,
    steps: u64,
    queue: Queue<Event>,
    hosts: Vec<Host>,
    network: Network,
    backing: Backing,
    /// Backing I/Os in flight, by their ids on the backing.
    backing_ios: BTreeMap<IoId, Owned>,
    submitted: u32,
    model: Model,
    /// Host of each change, by the change's serial number.
    changed_on: BTreeMap<u32, usize>,
    /// Source host of each migration attempt.
    attempts: BTreeMap<Session, usize>,
    guest: Guest,
    /// Number of migrations that the operator may still start.
    migrations: u32,
    /// True if all faults of the history have ended.
    ending: bool,
    report: Report,
}

impl<'a> Simulation<'a> {
    fn new(seed: u64, options: &'a Options) -> Self {
        let mut rng = SimRng::new(seed);
        let mut plan = Plan::draw(options, &mut rng);
        if SimRng::new(seed ^ JOURNAL_SALT).chance(300) {
            plan.add_journals();
        }
        plan.stop = match options.stop {
            None if options.faults && options.crash.is_none() => Plan::draw_stop(seed),
            given => given,
        };
        let content = (0..plan.units).map(|unit| tag(1, 0, unit)).collect();
        let mut backing = Backing::new(content, plan.backing_faults, None);
        backing.share();
        Simulation {
            options,
            hosts: (0..plan.hosts).map(|_| Host::new(&plan)).collect(),
            network: Network::new(plan.hosts),
            backing,
            backing_ios: BTreeMap::new(),
            submitted: 0,
            model: Model::new(0, plan.units),
            changed_on: BTreeMap::new(),
            attempts: BTreeMap::new(),
            guest: Guest::draw(&plan, options.requests, &mut rng),
            migrations: plan.migrations,
            rng,
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

    /// Gives the disk to the first host, and starts all hosts.
    fn begin(&mut self) -> Result<(), Violation> {
        self.hosts[0].record = Some(hob_engine::migration::Record::Owner { generation: 1, attempts: 0 });
        for host in 0..self.hosts.len() {
            self.start(host)?;
        }
        self.queue.push(self.now, Event::Guest);
        self.queue.push(self.now + self.plan.operator_ns / 4, Event::Operator);
        if self.plan.rogue {
            self.queue.push(self.now + self.rng.below(self.plan.span_ns / 4), Event::Rogue);
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

    fn turn(&mut self) -> Result<(), Violation> {
        self.steps += 1;
        let steps_max = STEPS_MAX * (50 + u64::from(self.options.requests));
        ensure!(self.now < TIME_MAX && self.steps < steps_max, "the history never ends: {}", self.state());
        let due = |host: usize| Some((self.hosts[host].due()?.max(self.hosts[host].stopped_until), host));
        let due = (0..self.hosts.len()).filter_map(due).min();
        let next = self.queue.next_at();
        if let Some((at, host)) = due
            && next.is_none_or(|next| at < next)
        {
            self.now = self.now.max(at);
            let now = self.now;
            if let Some(ram) = &mut self.hosts[host].ram {
                ram.handle_timeout(now);
                let again = ram.due();
                ensure!(
                    again.is_none_or(|again| again > now),
                    "host {host} has a timeout at {again:?} that was due by {now:?}"
                );
            }
            return self.drain(host);
        }
        let Some((at, event)) = self.queue.pop() else {
            return Err(Violation(format!(
                "no event is left, but the history has not ended: {}",
                self.state()
            )));
        };
        self.now = at;
        let until = self.stopped_until(&event);
        if until > at {
            // Events of a paused process keep their order: the event that has waited longest runs
            // first.
            self.queue.push(until, event);
            return Ok(());
        }
        self.happen(event)
    }

    /// Returns the time at which the paused processes of an event's hosts continue.
    fn stopped_until(&self, event: &Event) -> Instant {
        let until = |host: &usize| self.hosts[*host].stopped_until;
        match event {
            Event::Flash(host, ..)
            | Event::Arrives(host, _)
            | Event::Unanswered(host, ..)
            | Event::Act(host, _)
            | Event::Recorded(host, _)
            | Event::ReadAgain(host, ..)
            | Event::Pull(host, _)
            | Event::ListAgain(host, ..)
            | Event::Resume(host) => until(host),
            Event::Backing(id) => self.backing_ios.get(id).map_or(self.now, |owned| until(&owned.host)),
            Event::Guest | Event::Decide => until(&self.guest.host),
            Event::Rogue | Event::Operator => {
                (0..self.hosts.len()).map(|host| until(&host)).max().unwrap_or(self.now)
            }
            Event::Crash(_) | Event::Restart(_) | Event::PowerCut | Event::Part(_) | Event::Heal => self.now,
        }
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
            // The event belongs to a process that has ended.
            _ => Ok(()),
        }
    }

    fn lives(&self, host: usize, life: u32) -> bool {
        self.hosts[host].life == life && self.hosts[host].ram.is_some()
    }

    /// Returns true if the options of the history select this sabotage.
    fn strikes(&self, sabotage: Sabotage) -> bool {
        self.options.sabotage == Some(sabotage)
    }

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
