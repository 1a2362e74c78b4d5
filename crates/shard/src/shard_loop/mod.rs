//! A shard: one thread with its I/O ring, the engine of its disks, and their connections.
//!
//! The loop dispatches completions of the I/O ring, submits the engine's I/O, moves requests and
//! replies between connections and engine, and sleeps when there is no work. The shard's loop
//! contains no policy.

mod abandon;
mod areas;
mod backings;
mod cache_transfer;
mod clients;
mod commands;
mod files;
mod gate;
mod lease_gate;
mod maps;
mod parents;
mod quiesce;
mod recorders;
mod vhost_user_clients;

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc;
use std::time::Duration;

use hob_engine::command::Role;
use hob_engine::io::{Io, IoError, IoOp, Reply, Target};
use hob_engine::units::{DiskId, Instant, IoId};
use hob_engine::{Engine, Limits};
use hob_frontends::fuse::Session;
use hob_nbd::Extent;
use hob_storage::backing::StatusExtent;
use hob_storage::flash::Flash;
use hob_storage::ring::{Completion, Ring, RingConfig, RingError};
use hob_storage::token::Token;
use hob_storage::unflushed_mark::UnflushedMark;

use crate::api::{Answer, EventSender, ShardCall, ShardEvent, ShardHandle};
use areas::Areas;
use backings::Backings;
use cache_transfer::CacheTransfers;
use clients::Clients;
use commands::Commands;
use files::Files;
use lease_gate::Leases;
use parents::Parents;
use vhost_user_clients::VhostUserClients;

/// Maximum time the shard waits for more events to arrive together. docs/decisions/0004 has the
/// measurement.
const NAP_MAX: Duration = Duration::from_micros(30);

/// Maximum number of turns of the shard loop between two checks of the clock and the I/O ring. Some
/// guest drivers poll, and would keep the shard busy without such checks.
const TURNS_MAX: u32 = 32;

/// When this number of device reads and writes has been started, they are submitted immediately.
/// Otherwise the device would wait until the shard has handled all requests that arrived together.
/// The kernel passes three or more I/Os that are submitted together to the device in one batch,
/// with one notification.
const EARLY_IOS: usize = 4;

/// Number of turns without device I/O after which the shard handles all received requests in one
/// turn again, because memory serves them.
const MEMORY_BOUND_TURNS: u32 = 64;

/// Maximum length of a short sleep, in nanoseconds.
const QUICK_NS_MAX: u64 = 50_000;

/// Maximum number of engine I/Os started per turn, so that a disk with instant I/O cannot delay
/// other disks.
const IOS_MAX: usize = 1024;

/// Number of buffers that the engine uses for destage.
const DESTAGE_BUFFERS: usize = 4;

/// Size of a destage buffer in bytes: one block of the largest size.
const DESTAGE_BUFFER_BYTES: u32 = 1 << 20;

/// Memory for partial sectors of guest writes, in bytes.
const EDGE_BUFFER_BYTES: u32 = 256 << 10;

/// Configuration of a shard.
#[derive(Clone, Debug)]
pub struct ShardOptions {
    /// Number of the shard, used in its thread's name.
    pub number: usize,
    /// Configuration of the I/O ring and its buffers.
    pub ring: RingConfig,
    /// Limits of the engine.
    pub limits: Limits,
    /// Time after which a silent flash device on another host is reported.
    pub peer_wait: Duration,
    /// Maximum time to poll for the next event before sleeping, while requests arrive one at a
    /// time. A wake-up would take longer than the wait.
    pub spin_max: Duration,
}

impl ShardOptions {
    /// Returns the default options of shard `number`.
    pub fn new(number: usize) -> ShardOptions {
        ShardOptions {
            number,
            ring: RingConfig::default(),
            limits: Limits::default(),
            peer_wait: hob_storage::flash::REMOTE_WAIT_DEFAULT,
            spin_max: Duration::from_micros(50),
        }
    }
}

/// Starts a shard's thread, which ends after [`ShardCall::Stop`].
pub fn spawn(options: ShardOptions, events: EventSender) -> Result<ShardHandle, RingError> {
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
    backings: Backings,
    /// Marks of the disks whose unflushed changes are lost if this process is killed.
    marks: BTreeMap<DiskId, UnflushedMark>,
    areas: Areas,
    clients: Clients,
    files: Files,
    vhost_user: VhostUserClients,
    transfers: CacheTransfers,
    parents: Parents,
    leases: Leases,
    commands: Commands,
    /// Answer to [`ShardCall::Rest`], sent when the shard is quiesced.
    at_rest: Option<Answer<()>>,
    calls: mpsc::Receiver<ShardCall>,
    origin: std::time::Instant,
    spin_max: Duration,
    /// Number of turns since the last turn that started a read or write of a device.
    turns_without_device: u32,
    /// True if the last sleep was short. The first value is for sleeps without device I/O, the
    /// second for sleeps during device I/O.
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
            // The configuration rejects an arena that is too small for these buffers.
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
            backings: Backings::default(),
            marks: BTreeMap::new(),
            areas: Areas::default(),
            clients: Clients::default(),
            files: Files::default(),
            vhost_user: VhostUserClients::default(),
            transfers: CacheTransfers::default(),
            parents: Parents::default(),
            leases: Leases::default(),
            commands: Commands::new(events),
            at_rest: None,
            calls,
            origin: std::time::Instant::now(),
            spin_max: options.spin_max,
            quick: [false; 2],
            turns_without_device: 0,
        }
    }

    fn run(mut self) {
        while !self.commands.is_over() {
            let now = self.now();
            let is_busy = (0..TURNS_MAX).all(|turn| self.turn(now, turn == 0));
            // Only one query is handled in each turn, so that all other work has a turn before the
            // next query.
            match self.answer_query(now) | is_busy {
                true => self.look_up(),
                false => self.sleep(),
            }
        }
    }

    /// Runs one turn of the loop. Returns false if there was no work. `is_first` is true for the
    /// first turn with this value of `now`; only this turn checks the timers of all disks.
    fn turn(&mut self, now: Instant, is_first: bool) -> bool {
        let mut progress = false;
        self.flash.set_now(now);
        // This call comes before the completions: a completion may be the reply to a read from a
        // parent's disk, and such a reply is ignored after a pause.
        self.notice_pause(now);
        // This check comes first. If this thread was stopped for a while, the lease may have
        // expired. No completion may release waiting writes before this check.
        progress |= self.release_held(now);
        while let Some(completion) = self.ring.next_completion() {
            progress = true;
            self.complete(now, completion);
        }
        while let Some(done) = self.flash.poll_flushed(&mut self.ring) {
            progress = true;
            self.engine.handle_completion(now, done.io, done.result, done.sums);
        }
        while let Ok(call) = self.calls.try_recv() {
            progress = true;
            self.call(now, call);
        }
        progress |= is_first && self.check_time(now);
        // These jobs come before the clients, because clients would fill the engine and then wait
        // for these jobs.
        progress |= self.transfers.pump_jobs(now, &mut self.engine);
        let is_device_bound = self.turns_without_device < MEMORY_BOUND_TURNS;
        progress |= self.clients.pump(now, &mut self.ring, &mut self.engine, is_device_bound);
        if self.files.pump(now, &mut self.ring, &mut self.engine, &mut self.clients.recorders) {
            progress = true;
            self.clients.retry_refused();
        }
        let nobody_waits = self.clients.nobody_waits();
        if nobody_waits {
            progress |= self.transfers.pump_pulls(now, &mut self.ring, &mut self.engine);
        }
        progress |= self.vhost_user.pump(
            now,
            &mut self.ring,
            &mut self.engine,
            &mut self.clients.recorders,
            nobody_waits,
            is_device_bound,
        );
        progress |= self.drain_engine(now);
        for (disk, mark) in &mut self.marks {
            set_mark(&self.engine, &self.commands, *disk, mark);
        }
        self.vhost_user.flush(&mut self.ring);
        let is_without_device = self.ring.unsubmitted() == 0;
        self.turns_without_device =
            if is_without_device { self.turns_without_device.saturating_add(1) } else { 0 };
        note_failed(self.ring.submit_early(EARLY_IOS));
        self.end_sessions();
        self.check_rest();
        progress
    }

    fn complete(&mut self, now: Instant, completion: Completion) {
        let token = completion.token;
        match token.kind() {
            Token::FLASH => {
                if let Some(done) = self.flash.handle_completion(&mut self.ring, &completion) {
                    self.engine.handle_completion(now, done.io, done.result, done.sums);
                }
            }
            Token::FLASH_REMOTE => {
                self.flash.handle_remote_completion(&mut self.ring, completion);
                self.collect_flash(now);
            }
            Token::BACKING | Token::PEER..=Token::PEER_LAST => {
                let disk = DiskId(u32::from(token.owner()));
                if let Some(backing) = self.backings.get_mut(disk) {
                    backing.handle_completion(&mut self.ring, now, completion);
                    self.collect(now, disk);
                }
            }
            files::MESSAGE => self.files.handle_completion(&completion),
            vhost_user_clients::KICK | vhost_user_clients::SIGNAL => {
                self.vhost_user.handle_completion(&completion, &mut self.ring)
            }
            _ => {
                self.clients.handle_completion(now, completion, &mut self.ring);
                self.files.retry_refused();
                self.transfers.retry();
            }
        }
    }

    /// Passes I/O completed by flash devices on other hosts to the engine, and reports silent
    /// devices.
    fn collect_flash(&mut self, now: Instant) {
        while let Some(done) = self.flash.poll_remote(&mut self.ring) {
            self.engine.handle_completion(now, done.io, done.result, done.sums);
        }
        while let Some(device) = self.flash.poll_silent() {
            self.commands.report(ShardEvent::PeerSilent(device));
        }
    }

    /// Passes the completed I/O of a backing to the engine or to the client that waits for it.
    fn collect(&mut self, now: Instant, disk: DiskId) {
        self.report_exposure(disk);
        self.collect_done(now, disk);
        // A read that the parent's disk cannot serve may complete immediately.
        while self.ask_parent(now, disk) {
            self.collect_done(now, disk);
        }
        while let Some((id, status)) = self.backings.get_mut(disk).and_then(|backing| backing.poll_status()) {
            self.answer_status(
                disk,
                id,
                status.map(|extents| extents.iter().flat_map(wire_extents).collect()),
            );
        }
        let Some(backing) = self.backings.get_mut(disk) else { return };
        if backing.is_lost() && self.engine.role(disk) != Some(Role::Away) {
            let why = backing.loss_reason();
            self.engine.revoke(now, disk);
            self.commands.report(ShardEvent::BackingLost { disk, why });
        }
        if backing.is_closed() {
            let (changed, has_lost) = (backing.change_mark(), backing.has_lost());
            let description = backing.info().description.clone();
            self.backings.remove(disk);
            match self.marks.remove(&disk) {
                // The mark stays, so that the next daemon reports the loss to the guests.
                Some(mark) if has_lost && mark.has_guests() => tracing::error!(
                    "{description}: acknowledged writes could not be stored and are lost; the next flush of \
                     each guest that wrote them fails"
                ),
                mark => mark.into_iter().for_each(UnflushedMark::remove),
            }
            self.leases.forget(disk);
            self.commands.backing_closed(disk, changed);
        }
    }

    fn collect_done(&mut self, now: Instant, disk: DiskId) {
        let Some(backing) = self.backings.get_mut(disk) else { return };
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

    /// Executes the I/O and copies that the engine ordered.
    fn drain_engine(&mut self, now: Instant) -> bool {
        let mut progress = false;
        progress |= self.make_copies();
        for _ in 0..IOS_MAX {
            let Some(io) = self.engine.poll_io() else { break };
            progress = true;
            self.submit(now, &io);
            // An I/O that completes immediately may need copies between buffers.
            self.make_copies();
        }
        let mut look = None;
        while let Some(reply) = self.engine.poll_reply() {
            progress = true;
            self.mark_unflushed(reply.disk);
            look = look.or_else(|| self.leases.look());
            if let Some(reply) = self.leases.pass(look, reply) {
                self.deliver(now, &reply);
            }
        }
        while let Some(id) = self.engine.poll_declined() {
            progress = true;
            self.vhost_user.handle_declined(id, &mut self.ring);
        }
        while let Some(buffer) = self.engine.poll_release() {
            progress = true;
            self.ring.arena_mut().release(buffer);
            self.clients.retry_refused();
            self.files.retry_refused();
            self.transfers.retry();
        }
        progress |= self.drain_events(now);
        progress
    }

    /// Records whether a kill of this process would lose changes of a disk. The caller replies to a
    /// change only after this function.
    fn mark_unflushed(&mut self, disk: DiskId) {
        if let Some(mark) = self.marks.get_mut(&disk) {
            set_mark(&self.engine, &self.commands, disk, mark);
        }
    }

    /// Delivers a reply to the front end that sent the request.
    fn deliver(&mut self, now: Instant, reply: &Reply) {
        self.clients.retry_refused();
        self.files.retry_refused();
        if VhostUserClients::owns(reply.id) {
            self.vhost_user.handle_reply(reply, &mut self.ring);
        } else if CacheTransfers::owns(reply.id) {
            let is_standby = self.engine.role(reply.disk) == Some(Role::Standby);
            self.transfers.handle_reply(now, reply, is_standby);
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

    /// Executes the copies that the engine ordered. Copies must precede everything else that the
    /// engine orders.
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
            Target::Backing(disk) => match self.backings.get_mut(disk) {
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

    /// Passes one block status query from a client to its backing. Returns false if there is none.
    /// Each turn handles one query, because a query of a sparse file can take thousands of system
    /// calls.
    fn answer_query(&mut self, now: Instant) -> bool {
        let Some((disk, query)) = self.clients.poll_status() else { return false };
        let allocation = match self.backings.get_mut(disk) {
            Some(_) if !query.allocation => Ok(Vec::new()),
            // A hole of the backing may be dirty data in flash; a client that skips the hole would
            // lose data. Writes after the query do not matter.
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

    /// Runs the timers that have expired.
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
        for disk in self.backings.expired(now) {
            // The timeout of another disk may have changed this one.
            if let Some(backing) = self.backings.get_mut(disk)
                && backing.poll_timeout().is_some_and(|at| at <= now)
            {
                progress = true;
                backing.handle_timeout(&mut self.ring, now);
                self.collect(now, disk);
            }
        }
        if self.clients.poll_timeout().is_some_and(|at| at <= now) {
            progress = true;
            self.clients.handle_timeout(now, &mut self.ring);
        }
        if self.parents.poll_timeout().is_some_and(|at| at <= now) {
            progress = true;
            self.give_up_parents(now);
        }
        progress
    }

    /// Submits I/O and collects completions without sleeping.
    fn look_up(&mut self) {
        note_failed(self.ring.submit_and_wait(Duration::ZERO, Some(Duration::ZERO)));
    }

    /// Sleeps until an event. If the previous sleep was short, the shard may first poll for
    /// `spin_max`, or wait until several events have arrived. Sleeps during I/O of the engine and
    /// other sleeps are remembered separately: the previous sleep is the last one of the same kind.
    fn sleep(&mut self) {
        let timers = [
            self.backings.poll_timeout(),
            self.engine.poll_timeout(),
            self.flash.poll_timeout(),
            self.clients.poll_timeout(),
            self.transfers.poll_timeout(),
            self.parents.poll_timeout(),
        ];
        let due = timers.into_iter().flatten().min();
        let before = self.now();
        let due = due.into_iter().chain(self.leases.poll_timeout(before)).min();
        let timeout = due.map(|at| Duration::from_nanos(at - before));
        let working = self.engine.in_flight() as usize;
        let kind = usize::from(working > 0);
        if self.vhost_user.are_polled() && self.poll_vhost_user(working) {
            self.quick[kind] = self.now() - before < QUICK_NS_MAX;
            return;
        }
        let overlap = self.clients.requests_overlap() || self.files.requests_overlap();
        let waited = match (self.quick[kind], overlap) {
            // Many events arrive one by one. Handling several of them together saves wake-ups. If
            // there is no device I/O, the shard gathers all events. Otherwise it gathers an eighth
            // of the I/Os in flight.
            (true, true) => {
                let events = if working == 0 { usize::MAX } else { 1 + working / 8 };
                self.ring.submit_and_nap(events, timeout.unwrap_or(NAP_MAX).min(NAP_MAX))
            }
            // A client answers faster than a wake-up takes. A device does not.
            (true, false) if working == 0 => self.ring.submit_and_wait(self.spin_max, timeout),
            _ => self.ring.submit_and_wait(Duration::ZERO, timeout),
        };
        note_failed(waited);
        self.quick[kind] = self.now() - before < QUICK_NS_MAX;
    }

    /// Polls vhost-user queues without driver notifications, if new requests are likely soon.
    /// Otherwise enables the driver notifications. `working` is the number of I/Os of the engine in
    /// flight. Returns true if a queue has new requests. Returns false if the shard may sleep,
    /// because the notifications will wake it.
    fn poll_vhost_user(&mut self, working: usize) -> bool {
        let vhost_user = &self.vhost_user;
        if working == 0 && self.quick[0] {
            // After a reply, a driver queues its next request sooner than a notification could
            // arrive.
            if self.ring.watch(self.spin_max, || vhost_user.has_work()) {
                return true;
            }
            // The queues were polled long enough without a new request.
            self.quick[0] = false;
        }
        !self.vhost_user.prepare_sleep()
    }

    fn now(&self) -> Instant {
        Instant(self.origin.elapsed().as_nanos() as u64)
    }
}

/// Logs the error if the I/O ring could not wait for completions, and pauses before the next
/// attempt.
fn note_failed(waited: io::Result<()>) {
    if let Err(error) = waited {
        tracing::error!(%error, "io_uring cannot wait for completions; trying again every 10 ms");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Updates the mark of a disk whose unflushed changes are lost if the process is killed.
fn set_mark(engine: &Engine, commands: &Commands, disk: DiskId, mark: &mut UnflushedMark) {
    if let Some(guests) = engine.guests_at_risk(disk) {
        let unreported = engine.failures_owed(disk);
        mark.set(guests.saturating_add(unreported), unreported.max(commands.failures_owed(disk)));
    }
}

/// Splits a backing's extent into extents that fit NBD's 32-bit lengths.
fn wire_extents(extent: &StatusExtent) -> impl Iterator<Item = Extent> + use<> {
    const LENGTH_MAX: u64 = 1 << 31;
    let hole = if extent.hole { Extent::HOLE } else { 0 };
    let zero = if extent.zero { Extent::ZERO } else { 0 };
    let len = extent.len;
    (0..len.div_ceil(LENGTH_MAX))
        .map(move |i| Extent { length: (len - i * LENGTH_MAX).min(LENGTH_MAX) as u32, state: hole | zero })
}
