//! One shard: a thread, its ring, the engine of the disks it owns, and their connections.
//!
//! The loop hands what ended in the ring to whoever started it, carries the engine's wishes into
//! the ring, moves requests and replies between connections and engine, and sleeps when nothing is
//! left to do. It decides nothing.

mod abandon;
mod areas;
mod carry;
mod clients;
mod commands;
mod files;
mod held;
mod machines;
mod maps;
mod parents;
mod recorders;
mod rest;

use std::io;
use std::sync::mpsc;
use std::time::Duration;

use hob_engine::command::Role;
use hob_engine::io::{Io, IoError, IoOp, Reply, Target};
use hob_engine::units::{DiskId, Instant, IoId};
use hob_engine::{Engine, Limits};
use hob_frontends::fuse::Session;
use hob_nbd::Extent;
use hob_storage::backing::{Backing, StatusExtent};
use hob_storage::flash::Flash;
use hob_storage::ring::{Completion, Ring, RingConfig, RingError};
use hob_storage::token::Token;

use super::shard_api::{Answer, EventSender, ShardCall, ShardEvent, ShardHandle};
use areas::Areas;
use carry::Carriers;
pub(crate) use carry::{CarryCall, PeerAttachment, Progress};
use clients::Clients;
use commands::Commands;
use files::Files;
use held::Leases;
pub(crate) use machines::MachineCall;
use machines::Machines;
use parents::Parents;

/// Longest time for which events are left to gather. docs/decisions/0004 has the measurement.
const NAP_MAX: Duration = Duration::from_micros(30);

/// Rounds between two looks at the clock, and at what the ring has to report: some drivers keep a shard busy by themselves.
const TURNS_MAX: u32 = 32;

/// A sleep is short below that many nanoseconds.
const QUICK_NS_MAX: u64 = 50_000;

/// I/Os of the engine that are started in one turn: a disk whose I/O ends at once, and is asked for anew, keeps nobody else waiting.
const IOS_MAX: usize = 1024;

/// Buffers that the engine destages with. They are its own for good.
const DESTAGE_BUFFERS: usize = 4;

/// Bytes of each: a whole block of the largest size.
const DESTAGE_BUFFER_BYTES: u32 = 1 << 20;

/// Memory for sectors that guests write in parts.
const EDGE_BUFFER_BYTES: u32 = 256 << 10;

/// How a shard is set up.
#[derive(Clone, Debug)]
pub(crate) struct ShardOptions {
    /// For the thread's name.
    pub(crate) number: usize,
    /// Its ring and its buffers.
    pub(crate) ring: RingConfig,
    /// Its engine's bounds.
    pub(crate) limits: Limits,
    /// How long a device on another host may be silent before that is said.
    pub(crate) peer_wait: Duration,
    /// How long it watches for the next event before it sleeps, while one request follows another
    /// without any in parallel: a wake-up would take longer than the wait.
    pub(crate) spin_max: Duration,
}

impl ShardOptions {
    /// What suits most hosts.
    pub(crate) fn new(number: usize) -> ShardOptions {
        ShardOptions {
            number,
            ring: RingConfig::default(),
            limits: Limits::default(),
            peer_wait: hob_storage::flash::REMOTE_WAIT_DEFAULT,
            spin_max: Duration::from_micros(50),
        }
    }
}

/// Starts a shard's thread. It ends after [`ShardCall::Stop`].
pub(crate) fn spawn(options: ShardOptions, events: EventSender) -> Result<ShardHandle, RingError> {
    let (ready, started) = mpsc::channel();
    let thread = std::thread::Builder::new().name(format!("hob-shard-{}", options.number));
    let run = move || {
        let ring = match Ring::new(&options.ring) {
            Ok(ring) => ring,
            Err(error) => return drop(ready.send(Err(error))),
        };
        let waker = ring.waker();
        let (handle, calls) = ShardHandle::new(move || waker.wake());
        let _ = ready.send(Ok(handle));
        Shard::new(ring, options, calls, events).run();
    };
    thread.spawn(run).expect("threads can be started");
    started.recv().expect("a shard says whether it started")
}

struct Shard {
    ring: Ring,
    engine: Engine,
    flash: Flash,
    /// By disk id.
    backings: Vec<Option<Backing>>,
    areas: Areas,
    clients: Clients,
    files: Files,
    machines: Machines,
    carriers: Carriers,
    parents: Parents,
    leases: Leases,
    commands: Commands,
    /// Who wants to know that nothing is unanswered.
    at_rest: Option<Answer<()>>,
    calls: mpsc::Receiver<ShardCall>,
    origin: std::time::Instant,
    spin_max: Duration,
    /// The last sleep was short. One for sleeps in which only clients can make anything happen, one
    /// for those in which devices work.
    quick: [bool; 2],
}

impl Shard {
    fn new(
        mut ring: Ring,
        options: ShardOptions,
        calls: mpsc::Receiver<ShardCall>,
        events: EventSender,
    ) -> Shard {
        let mut engine = Engine::new(options.limits);
        for _ in 0..DESTAGE_BUFFERS {
            // An arena that is too small for that is refused where it is configured.
            if let Some(buffer) = ring.arena_mut().alloc(DESTAGE_BUFFER_BYTES as usize) {
                engine.lend(buffer, DESTAGE_BUFFER_BYTES);
            }
        }
        if let Some(buffer) = ring.arena_mut().alloc(EDGE_BUFFER_BYTES as usize) {
            engine.lend_for_edges(buffer, EDGE_BUFFER_BYTES);
        }
        let mut flash = Flash::new(0);
        flash.set_remote_wait(options.peer_wait);
        Shard {
            ring,
            engine,
            flash,
            backings: Vec::new(),
            areas: Areas::default(),
            clients: Clients::default(),
            files: Files::default(),
            machines: Machines::default(),
            carriers: Carriers::default(),
            parents: Parents::default(),
            leases: Leases::default(),
            commands: Commands::new(events),
            at_rest: None,
            calls,
            origin: std::time::Instant::now(),
            spin_max: options.spin_max,
            quick: [false; 2],
        }
    }

    fn run(mut self) {
        while !self.commands.is_over() {
            let now = self.now();
            let is_busy = (0..TURNS_MAX).all(|_| self.turn(now));
            // Everybody else has a turn before the next question.
            match self.answer_query(now) | is_busy {
                true => self.look_up(),
                false => self.sleep(),
            }
        }
    }

    /// One round. False when nothing happened.
    fn turn(&mut self, now: Instant) -> bool {
        let mut progress = false;
        self.flash.set_now(now);
        // Before anything that has ended makes room for changes that wait to be sent: the lease may be over, if this thread was stopped.
        progress |= self.release_held(now);
        while let Some(completion) = self.ring.next_completion() {
            progress = true;
            self.complete(now, completion);
        }
        while let Ok(call) = self.calls.try_recv() {
            progress = true;
            self.call(now, call);
        }
        progress |= self.check_time(now);
        // Before clients: they would take all room there is in the engine, and then wait for what these are to bring about.
        progress |= self.carriers.pump_jobs(now, &mut self.engine);
        progress |= self.clients.pump(now, &mut self.ring, &mut self.engine);
        if self.files.pump(now, &mut self.ring, &mut self.engine, &mut self.clients.recorders) {
            progress = true;
            self.clients.retry_refused();
        }
        let nobody_waits = self.clients.nobody_waits();
        if nobody_waits {
            progress |= self.carriers.pump_pulls(now, &mut self.ring, &mut self.engine);
        }
        progress |= self.machines.pump(
            now,
            &mut self.ring,
            &mut self.engine,
            &mut self.clients.recorders,
            nobody_waits,
        );
        progress |= self.drain_engine(now);
        self.machines.flush(&mut self.ring);
        self.end_sessions();
        self.check_rest();
        progress
    }

    fn complete(&mut self, now: Instant, completion: Completion) {
        let token = completion.token;
        match token.kind() {
            Token::FLASH => {
                let done = self.flash.handle_completion(&mut self.ring, &completion);
                self.engine.handle_completion(now, done.io, done.result, done.sums);
            }
            Token::FLASH_REMOTE => {
                self.flash.handle_remote_completion(&mut self.ring, completion);
                self.collect_flash(now);
            }
            Token::BACKING | Token::PEER..=Token::PEER_LAST => {
                let disk = DiskId(u32::from(token.owner()));
                if let Some(backing) = self.backings[disk.0 as usize].as_mut() {
                    backing.handle_completion(&mut self.ring, now, completion);
                    self.collect(now, disk);
                }
            }
            files::MESSAGE => self.files.handle_completion(&completion),
            machines::KICK | machines::SIGNAL => self.machines.handle_completion(&completion, &mut self.ring),
            _ => {
                self.clients.handle_completion(now, completion, &mut self.ring);
                self.files.retry_refused();
                self.carriers.retry();
            }
        }
    }

    /// Takes what devices on other hosts have finished to the engine, and says which of them are silent.
    fn collect_flash(&mut self, now: Instant) {
        while let Some(done) = self.flash.poll_remote(&mut self.ring) {
            self.engine.handle_completion(now, done.io, done.result, done.sums);
        }
        while let Some(device) = self.flash.poll_silent() {
            self.commands.report(ShardEvent::PeerSilent(device));
        }
    }

    /// Takes what a backing has finished to whoever asked for it.
    fn collect(&mut self, now: Instant, disk: DiskId) {
        self.collect_done(now, disk);
        // What cannot be asked of a parent's disk may end at once.
        while self.ask_parent(now, disk) {
            self.collect_done(now, disk);
        }
        while let Some((id, status)) = self.backings[disk.0 as usize].as_mut().and_then(Backing::poll_status)
        {
            self.answer_status(
                disk,
                id,
                status.map(|extents| extents.iter().flat_map(wire_extents).collect()),
            );
        }
        let Some(backing) = self.backings[disk.0 as usize].as_mut() else { return };
        if backing.is_lost() && self.engine.role(disk) != Some(Role::Away) {
            self.engine.revoke(now, disk);
            self.commands.report(ShardEvent::BackingLost(disk));
        }
        if backing.is_closed() {
            let changed = backing.change_mark();
            self.backings[disk.0 as usize] = None;
            self.leases.forget(disk);
            self.commands.backing_closed(disk, changed);
        }
    }

    fn collect_done(&mut self, now: Instant, disk: DiskId) {
        let Some(backing) = self.backings[disk.0 as usize].as_mut() else { return };
        if backing.take_loss() {
            self.engine.handle_loss(now, disk);
        }
        let mut sums = Vec::new();
        while let Some(io) = backing.poll_abandoned() {
            self.engine.handle_abandoned(now, io);
        }
        while let Some((io, result)) = backing.poll_done() {
            sums.clear();
            if let (Ok(()), Some(slice)) = (result, self.engine.wants_sums(io)) {
                self.ring.arena().sector_sums(slice, &mut sums);
            }
            match backing.take_shared(io) {
                shared if shared.is_empty() => self.engine.handle_completion(now, io, result, &sums),
                shared => self.engine.handle_shared(now, io, &shared, &sums),
            }
        }
        while let Some(slice) = backing.poll_returned() {
            self.engine.handle_returned(now, slice);
            self.ring.arena_mut().release(slice.id);
        }
    }

    /// Carries out what the engine wants.
    fn drain_engine(&mut self, now: Instant) -> bool {
        let mut progress = false;
        progress |= self.make_copies();
        for _ in 0..IOS_MAX {
            let Some(io) = self.engine.poll_io() else { break };
            progress = true;
            self.submit(now, &io);
            // What ends at once may want copies.
            self.make_copies();
        }
        let mut look = None;
        while let Some(reply) = self.engine.poll_reply() {
            progress = true;
            look = look.or_else(|| self.leases.look());
            if let Some(reply) = self.leases.pass(look, reply) {
                self.deliver(now, &reply);
            }
        }
        while let Some(id) = self.engine.poll_declined() {
            progress = true;
            self.machines.handle_declined(id, &mut self.ring);
        }
        while let Some(buffer) = self.engine.poll_release() {
            progress = true;
            self.ring.arena_mut().release(buffer);
            self.clients.retry_refused();
            self.files.retry_refused();
            self.carriers.retry();
        }
        progress |= self.drain_events(now);
        progress
    }

    /// Hands a reply to whoever asked.
    fn deliver(&mut self, now: Instant, reply: &Reply) {
        self.clients.retry_refused();
        self.files.retry_refused();
        if Machines::owns(reply.id) {
            self.machines.handle_reply(reply, &mut self.ring);
        } else if Carriers::owns(reply.id) {
            let is_standby = self.engine.role(reply.disk) == Some(Role::Standby);
            self.carriers.handle_reply(now, reply, is_standby);
        } else if Parents::owns(reply.id) {
            self.parent_replied(now, reply);
        } else if let Some(number) = Session::number_of(reply.id) {
            self.files.handle_reply(number, reply, &mut self.ring);
        } else {
            self.clients.handle_reply(reply, &mut self.ring);
        }
    }

    fn drain_events(&mut self, now: Instant) -> bool {
        let mut progress = false;
        while let Some(event) = self.engine.poll_event() {
            progress = true;
            self.handle_event(now, event);
            self.make_copies();
        }
        progress
    }

    /// Copies what the engine wants copied. Nothing else may be taken from the engine before.
    fn make_copies(&mut self) -> bool {
        let mut progress = false;
        while let Some(copy) = self.engine.poll_copy() {
            progress = true;
            self.areas.copy(self.ring.arena_mut(), &copy);
        }
        progress
    }

    fn submit(&mut self, now: Instant, io: &Io) {
        if !self.may_submit(now, io) {
            return;
        }
        match io.target {
            Target::Flash(_) => {
                let is_journal = io.op == IoOp::WriteJournal;
                let pages = if is_journal { self.engine.journal_pages(io.id) } else { &[] };
                self.flash.submit(&mut self.ring, io, pages);
                self.collect_flash(now);
            }
            Target::Backing(disk) => match self.backings[disk.0 as usize].as_mut() {
                Some(backing) => {
                    backing.submit(&mut self.ring, now, io);
                    self.collect(now, disk);
                }
                None => self.fail(now, io.id),
            },
        }
    }

    fn fail(&mut self, now: Instant, io: IoId) {
        self.engine.handle_completion(now, io, Err(IoError::ShuttingDown), &[]);
    }

    /// Takes one question about a range from a client to its backing. False if there is none. One at a time: a file is asked on the
    /// spot, with thousands of system calls where it has many holes.
    fn answer_query(&mut self, now: Instant) -> bool {
        let Some((disk, query)) = self.clients.poll_status() else { return false };
        let allocation = match self.backings[disk.0 as usize].as_mut() {
            Some(_) if !query.allocation => Ok(Vec::new()),
            // A hole of the backing may be dirty data in flash: whoever skips it loses that. What becomes dirty after the
            // question is not the question's matter.
            Some(_) if !self.engine.backing_has_all(disk) => {
                let all = StatusExtent { len: query.len, hole: false, zero: false };
                Ok(wire_extents(&all).collect())
            }
            Some(backing) => {
                backing.submit_status(&mut self.ring, now, query.id.0, query.offset, query.len);
                self.collect(now, disk);
                return true;
            }
            None => Err(IoError::ShuttingDown),
        };
        self.answer_status(disk, query.id.0, allocation);
        true
    }

    /// Does what is due.
    fn check_time(&mut self, now: Instant) -> bool {
        let mut progress = false;
        if self.engine.poll_timeout().is_some_and(|at| at <= now) {
            progress = true;
            self.engine.handle_timeout(now);
        }
        if self.flash.poll_timeout().is_some_and(|at| at <= now) {
            progress = true;
            self.flash.handle_timeout(&mut self.ring);
            self.collect_flash(now);
        }
        for disk in 0..self.backings.len() {
            if let Some(backing) = self.backings[disk].as_mut()
                && backing.poll_timeout().is_some_and(|at| at <= now)
            {
                progress = true;
                backing.handle_timeout(&mut self.ring, now);
                self.collect(now, DiskId(disk as u32));
            }
        }
        if self.clients.poll_timeout().is_some_and(|at| at <= now) {
            progress = true;
            self.clients.handle_timeout(now, &mut self.ring);
        }
        progress
    }

    /// Passes on what was started, and takes what has ended, without sleeping.
    fn look_up(&mut self) {
        note_failed(self.ring.submit_and_wait(Duration::ZERO, Some(Duration::ZERO)));
    }

    /// Sleeps until something happens. How, depends on what the last sleeps of the kind were like.
    fn sleep(&mut self) {
        let backings = self.backings.iter().flatten().filter_map(Backing::poll_timeout);
        let timers = [
            self.engine.poll_timeout(),
            self.flash.poll_timeout(),
            self.clients.poll_timeout(),
            self.carriers.poll_timeout(),
        ];
        let due = backings.chain(timers.into_iter().flatten()).min();
        let before = self.now();
        let due = due.into_iter().chain(self.leases.poll_timeout(before)).min();
        let timeout = due.map(|at| Duration::from_nanos(at - before));
        let working = self.engine.in_flight() as usize;
        let kind = usize::from(working > 0);
        if self.machines.are_polled() && self.wait_for_machines(working) {
            self.quick[kind] = self.now() - before < QUICK_NS_MAX;
            return;
        }
        let overlap = self.clients.requests_overlap() || self.files.requests_overlap();
        let waited = match (self.quick[kind], overlap) {
            // Events come one by one, and many. Taking several at a time saves more than it costs:
            // what clients send while nothing else is under way, or an eighth of what is.
            (true, true) => {
                let events = if working == 0 { usize::MAX } else { 1 + working / 8 };
                self.ring.submit_and_nap(events, timeout.unwrap_or(NAP_MAX).min(NAP_MAX))
            }
            // A client answers sooner than a wake-up takes. A device does not.
            (true, false) if working == 0 => self.ring.submit_and_wait(self.spin_max, timeout),
            _ => self.ring.submit_and_wait(Duration::ZERO, timeout),
        };
        note_failed(waited);
        self.quick[kind] = self.now() - before < QUICK_NS_MAX;
    }

    /// Waits in a way in which machines need not tell of new chains, if that is worth while. Otherwise they are asked to; false if
    /// nothing has come since, and the shard may sleep.
    fn wait_for_machines(&mut self, working: usize) -> bool {
        let machines = &self.machines;
        if working == 0 && self.quick[0] {
            // A driver that was answered has more sooner than it could tell of it.
            if self.ring.watch(self.spin_max, || machines.has_work()) {
                return true;
            }
            // It has been watched for long enough.
            self.quick[0] = false;
        }
        !self.machines.prepare_sleep()
    }

    fn now(&self) -> Instant {
        Instant(self.origin.elapsed().as_nanos() as u64)
    }
}

/// A ring that cannot wait is not asked to at once again.
fn note_failed(waited: io::Result<()>) {
    if let Err(error) = waited {
        tracing::error!(%error, "waiting for I/O completions failed; retrying");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A backing's extent as NBD says it, whose lengths are shorter.
fn wire_extents(extent: &StatusExtent) -> impl Iterator<Item = Extent> + use<> {
    const LENGTH_MAX: u64 = 1 << 31;
    let hole = if extent.hole { Extent::HOLE } else { 0 };
    let zero = if extent.zero { Extent::ZERO } else { 0 };
    let len = extent.len;
    (0..len.div_ceil(LENGTH_MAX))
        .map(move |i| Extent { length: (len - i * LENGTH_MAX).min(LENGTH_MAX) as u32, state: hole | zero })
}
