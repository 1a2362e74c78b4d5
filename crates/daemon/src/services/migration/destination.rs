//! The destination of a migration: handles the calls of the source, executes the actions of the
//! migration state machine, and receives the list of data to pull.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hob_control::{Arrival, CallAnswer, CarryMode, MigrationState};
use hob_engine::migration::{Call, Destination, DestinationAct, Message, Record, Session, Ticket};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::super::registry::OperationGuard;
use super::Migrations;
use super::data_socket::{DataConnections, DataSocket};
use super::source::serves_after;
use super::status::Shared;
use super::{Clock, calls};
use crate::background::spawn;
use crate::shard_api::Progress;

/// Interval between two checks of the pull's progress.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Time without an answer of the former owner after which this host no longer reads from it.
const SILENCE_MAX: Duration = Duration::from_secs(90);

/// Maximum time for the former owner to let this host read its flash. After this time, this host
/// reads the remaining data from the backing.
const FORMER_MAX: Duration = Duration::from_secs(3);

/// Maximum time from the end of the pull to the former owner's question whether the pull is
/// complete. After this time, this host ends the migration.
const TELL_MAX: Duration = Duration::from_secs(3);

/// Time without a call of the source after which this host reports its silence. The source calls
/// about once a second while this host awaits the disk.
const CALL_SILENCE_MAX: Duration = Duration::from_secs(30);

/// A call of the source host.
#[derive(Debug)]
pub(crate) enum CallIn {
    /// Prepare to receive the disk.
    Arrive(Box<Arrival>),
    /// Invalidate the cached data of these ranges of the disk, which have changed at the source.
    /// The ranges are encoded in pages.
    Changed(Vec<u8>),
    /// Become the owner of the disk. The source, now the former owner, also sends the disk's
    /// settings, in case the destination has dropped the disk.
    Yours(Option<Box<Arrival>>),
    /// Cancel the migration.
    Cancel,
    /// Return the progress.
    Look,
    /// One page of the list of cached data that this host reads from the source.
    List {
        /// Page number, from 0.
        page: u32,
        /// True for the last page.
        last: bool,
        /// Encoded ranges of the disk's sectors, in the order in which this host reads them from
        /// the source.
        body: Vec<u8>,
    },
}

/// Input of the destination's task.
#[derive(Debug)]
pub(super) enum Input {
    /// A call of the source host.
    Call(Session, CallIn, oneshot::Sender<CallAnswer>),
    /// The result of an action that the state machine requested.
    Acted(Ticket, Result<Option<DataSocket>, String>),
    /// A guest's write is waiting for the disk.
    Wanted,
    /// Progress of reading the disk's cached data from the source host.
    Progress(Progress),
    /// The operator cancels the migration on this host.
    GiveUp,
}

/// A migration to this host.
pub(super) struct IncomingDisk {
    pub(super) migrations: Arc<Migrations>,
    pub(super) name: String,
    pub(super) lineage: String,
    pub(super) shared: Arc<Shared>,
    pub(super) connections: Arc<DataConnections>,
    pub(super) sender: mpsc::UnboundedSender<Input>,
}

struct Task {
    incoming: Arc<IncomingDisk>,
    destination: Destination,
    clock: Clock,
    guard: Option<OperationGuard>,
    arrival: Option<Box<Arrival>>,
    /// Local sockets for reading the disk from the source, which is first the owner and later the
    /// former owner.
    data_sockets: Vec<DataSocket>,
    callers: BTreeMap<Ticket, oneshot::Sender<CallAnswer>>,
    tickets: u64,
    /// True after the task has received an [`Input`]. A new task must receive its first input
    /// before it may end.
    has_input: bool,
    acts: BTreeMap<Ticket, DestinationAct>,
    /// Reason for the latest failure.
    why: Option<String>,
    list: List,
    progress: Progress,
    is_open: bool,
    wanted_at: Option<Instant>,
    heard: Instant,
    settled: bool,
    /// Time at which this host became the owner.
    taken_at: Option<Instant>,
    /// True while the remaining cached data is being pulled, from the former owner or from the
    /// backing.
    pulls_rest: bool,
    /// Time at which the pull was complete after the hand-over.
    done_at: Option<Instant>,
    /// True after this host has reported to the former owner that the pull is complete.
    done_told: bool,
    over: bool,
}

/// Received part of the list of data to pull.
#[derive(Default)]
struct List {
    next: u32,
    complete: bool,
    bytes: u64,
}

/// Runs the destination's state machine until the disk's cache is filled, or until the migration is
/// cancelled.
pub(super) async fn run(
    incoming: IncomingDisk,
    record: Option<Record>,
    mut inputs: mpsc::UnboundedReceiver<Input>,
) {
    let mut task = Task {
        destination: Destination::new(record),
        incoming: Arc::new(incoming),
        clock: Clock::start(),
        guard: None,
        arrival: None,
        data_sockets: Vec::new(),
        callers: BTreeMap::new(),
        tickets: 0,
        has_input: false,
        acts: BTreeMap::new(),
        why: None,
        list: List::default(),
        progress: Progress::default(),
        is_open: false,
        wanted_at: None,
        heard: Instant::now(),
        settled: false,
        taken_at: None,
        pulls_rest: false,
        done_at: None,
        done_told: false,
        over: false,
    };
    let mut look = tokio::time::interval(LOOK_EVERY);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    task.go_on();
    while !task.over && !task.is_idle() {
        tokio::select! {
            Some(input) = inputs.recv() => task.take(input).await,
            () = task.clock.sleep_until(task.destination.poll_timeout()) => {
                let now = task.clock.now();
                task.destination.handle_timeout(now);
            }
            _ = look.tick() => task.look(),
        }
        task.go_on();
    }
    task.end();
}

impl Task {
    fn mode(&self) -> CarryMode {
        self.incoming.shared.facts().cache
    }

    /// Returns true if the task has handled its first input, no call waits for an answer, and this
    /// host neither waits for the disk nor owns it. A task whose disk is served while the ownership
    /// is not recorded yet is not idle, because it tries again to write the ownership record at the
    /// next `Yours` call.
    fn is_idle(&self) -> bool {
        self.has_input && self.destination.is_idle() && self.acts.is_empty() && self.callers.is_empty()
    }

    fn go_on(&mut self) {
        while let Some((ticket, act)) = self.destination.poll_act() {
            self.begin(ticket, act);
        }
        while let Some((ticket, answer)) = self.destination.poll_answer() {
            let wire = calls::to_wire(answer, self.why.clone());
            let wire = self.complete(wire);
            if let Some(caller) = self.callers.remove(&ticket) {
                // The caller may have stopped waiting.
                let _ = caller.send(wire);
            }
        }
        self.show();
    }

    /// Adds to an answer the fields that the state machine does not know, such as the progress.
    fn complete(&self, answer: CallAnswer) -> CallAnswer {
        let wants_list = self.is_open && !self.list.complete && self.mode() != CarryMode::Drop;
        CallAnswer {
            again_bytes: self.progress.again_bytes,
            page: wants_list.then_some(self.list.next),
            ranges: self.progress.ranges,
            ..answer
        }
    }

    fn begin(&mut self, ticket: Ticket, act: DestinationAct) {
        match &act {
            DestinationAct::Record(Record::Awaiting(session)) => {
                let mut facts = self.incoming.shared.facts();
                facts.session = *session;
                if let Some(arrival) = &self.arrival {
                    (facts.cache, facts.peer) = (arrival.mode, arrival.from.clone());
                }
            }
            DestinationAct::Prepare => {
                (self.list, self.progress, self.is_open) = (List::default(), Progress::default(), false);
            }
            DestinationAct::Activate => {
                self.destination.handle_progress(self.progress.pulled_bytes, self.progress.left_bytes, false)
            }
            _ => {}
        }
        let (incoming, arrival, sent) = (self.incoming.clone(), self.arrival.clone(), act.clone());
        if self.guard.is_none() && matches!(act, DestinationAct::Prepare) {
            self.guard = Some(incoming.migrations.guard_awaited(&incoming.name));
        }
        self.acts.insert(ticket, act);
        spawn(async move {
            let result = incoming.act(sent, arrival.as_deref()).await;
            let _ = incoming.sender.send(Input::Acted(ticket, result.map_err(|error| error.to_string())));
        });
    }

    async fn take(&mut self, input: Input) {
        self.has_input = true;
        let now = self.clock.now();
        match input {
            Input::Call(session, call, answer) => {
                self.heard = Instant::now();
                // The source calls again, so a report of its silence ends.
                self.incoming.shared.facts().why = self.why.clone();
                self.hear(session, call, answer).await;
            }
            Input::Acted(ticket, result) => self.acted(ticket, result),
            Input::Wanted => {
                self.wanted_at.get_or_insert_with(Instant::now);
                self.destination.handle_wanted();
            }
            Input::Progress(progress) => self.note(progress),
            Input::GiveUp => self.destination.handle_give_up(),
        }
        self.destination.handle_timeout(now);
    }

    async fn hear(&mut self, session: Session, call: CallIn, answer: oneshot::Sender<CallAnswer>) {
        let sectors = || {
            let size = self
                .incoming
                .migrations
                .registry
                .inner()
                .disk(&self.incoming.name)
                .map_or(0, |disk| disk.size_bytes);
            size.div_ceil(hob_engine::units::SECTOR_BYTES)
        };
        let call = match call {
            CallIn::List { page, last, body } => {
                let wire = self.listed(session, page, last, &body, sectors()).await;
                let _ = answer.send(wire);
                return;
            }
            CallIn::Arrive(arrival) => {
                self.arrival = Some(arrival);
                Call::Arrive
            }
            CallIn::Changed(body) => match calls::decode_ranges(&body, sectors()) {
                Ok(ranges) => Call::Changed(ranges),
                Err(_) => {
                    let why = Some("the list of changes is invalid".to_owned());
                    let refused = Err(hob_engine::migration::Refusal::Failed);
                    let _ = answer.send(calls::to_wire(refused, why));
                    return;
                }
            },
            CallIn::Yours(arrival) => {
                self.arrival = self.arrival.take().or(arrival);
                Call::Yours
            }
            CallIn::Cancel => Call::Cancel,
            CallIn::Look => {
                self.done_told |= self.done_at.is_some();
                Call::Look
            }
        };
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        self.callers.insert(ticket, answer);
        let now = self.clock.now();
        self.destination.handle_call(now, ticket, Message { session, call });
    }

    /// Handles a page of the source's list of cached data. An unexpected page is ignored, but page
    /// 0 restarts the list.
    async fn listed(
        &mut self,
        session: Session,
        page: u32,
        last: bool,
        body: &[u8],
        sectors: u64,
    ) -> CallAnswer {
        let refuse =
            |why: &str| calls::to_wire(Err(hob_engine::migration::Refusal::Failed), Some(why.to_owned()));
        if !self.is_open || self.incoming.shared.facts().session != session {
            return refuse("the destination does not need a list now");
        }
        let expected = !self.list.complete && (page == self.list.next || page == 0);
        if expected {
            let Ok(ranges) = hob_engine::migration::heat::decode(body, sectors) else {
                return refuse("the list is invalid");
            };
            let room = self.incoming.migrations.cache_room(&self.incoming.name);
            let bytes: u64 =
                ranges.iter().map(|(first, end)| (end - first) * hob_engine::units::SECTOR_BYTES).sum();
            // Data beyond the cache size would evict hotter data.
            let fits = self.list.bytes + bytes <= room;
            if fits
                && let Ok((shard, id)) = self.incoming.migrations.registry.shard_of(&self.incoming.name)
                && let Err(error) = shard.listed(id, ranges).await
            {
                return refuse(&error.to_string());
            }
            self.list.bytes += if fits { bytes } else { 0 };
            (self.list.next, self.list.complete) = (page + 1, last || !fits);
        }
        let view = hob_engine::migration::View::default();
        self.complete(calls::to_wire(Ok(view), None))
    }

    fn acted(&mut self, ticket: Ticket, result: Result<Option<DataSocket>, String>) {
        let Some(act) = self.acts.remove(&ticket) else { return };
        let name = &self.incoming.name;
        match &result {
            Ok(_) => {
                self.why = None;
                // The reason of an earlier failure does not apply any more.
                self.incoming.shared.facts().why = None;
            }
            Err(why) => {
                tracing::warn!("{name}: {why}");
                self.incoming.shared.trouble(why.clone());
                self.why = Some(why.clone());
            }
        }
        let is_ok = result.is_ok();
        match act {
            DestinationAct::Prepare => {
                self.is_open = is_ok;
                self.data_sockets.extend(result.ok().flatten());
            }
            DestinationAct::Activate if is_ok => {
                self.data_sockets.clear();
                self.taken_at = Some(Instant::now());
                if self.destination.knows_changes() && serves_after(self.mode()) {
                    self.data_sockets.extend(self.incoming.read_former());
                }
                let waited = self.wanted_at.map(|at| at.elapsed().as_secs_f64() * 1e3);
                self.incoming.shared.facts().waited_ms = waited;
                tracing::info!(
                    "disk {name}: its migration to this host is complete; this host serves the disk now"
                );
            }
            DestinationAct::Settle => {
                self.settled = true;
                self.guard = None;
                if matches!(self.mode(), CarryMode::Drop | CarryMode::HeatMap) {
                    self.list.complete = true;
                }
            }
            DestinationAct::Remove if is_ok => {
                self.is_open = false;
                self.data_sockets.clear();
            }
            _ => {}
        }
        let now = self.clock.now();
        self.destination.handle_done(now, ticket, if is_ok { Ok(()) } else { Err(()) });
    }

    fn look(&mut self) {
        if !self.is_open {
            return;
        }
        let Ok((shard, id)) = self.incoming.migrations.registry.shard_of(&self.incoming.name) else {
            // The disk was removed.
            self.over |= self.settled;
            return;
        };
        let sender = self.incoming.sender.clone();
        spawn(async move {
            if let Ok(progress) = shard.progress(id).await {
                let _ = sender.send(Input::Progress(progress));
            }
        });
    }

    fn note(&mut self, progress: Progress) {
        self.progress = progress;
        let mode = self.mode();
        let listed = self.list.complete || mode == CarryMode::Drop;
        let none_left = progress.left_bytes == 0;
        let is_silent = self.heard.elapsed() > SILENCE_MAX;
        let done = match self.settled {
            true => none_left && (listed || is_silent),
            false => self.destination.awaits().is_some() && listed && (none_left || mode != CarryMode::Copy),
        };
        self.destination.handle_progress(progress.pulled_bytes, progress.left_bytes, done);
        {
            let mut facts = self.incoming.shared.facts();
            facts.note_pulled(progress.pulled_bytes, progress.left_bytes);
            facts.resent = progress.again_bytes;
            facts.valid = self.list.bytes;
            facts.warm = done;
        }
        let waits_for_peer = !self.data_sockets.is_empty()
            && !progress.has_peer
            && self.taken_at.is_some_and(|at| at.elapsed() < FORMER_MAX);
        if self.settled && !self.pulls_rest && !waits_for_peer {
            self.pulls_rest = true;
            if let Ok((shard, id)) = self.incoming.migrations.registry.shard_of(&self.incoming.name) {
                shard.pull(id);
            }
        }
        if self.settled && done {
            if let Ok((shard, id)) = self.incoming.migrations.registry.shard_of(&self.incoming.name) {
                shard.leave_peer(id);
            }
            let since = *self.done_at.get_or_insert_with(Instant::now);
            self.over = self.done_told || !serves_after(mode) || since.elapsed() > TELL_MAX;
        }
    }

    fn show(&self) {
        let mut facts = self.incoming.shared.facts();
        facts.wanted = self.wanted_at.is_some() && self.destination.awaits().is_some();
        facts.state = match (self.destination.awaits(), self.destination.is_owner()) {
            (Some(_), _) if self.is_open => MigrationState::Awaiting,
            (Some(_), _) => MigrationState::Preparing,
            (None, true) => MigrationState::Filling,
            (None, false) if self.is_open => MigrationState::Arrived,
            (None, false) => facts.state,
        };
        let silence = self.heard.elapsed();
        if self.destination.awaits().is_some() && silence > CALL_SILENCE_MAX {
            facts.why = Some(format!(
                "{} has not called for {} s; if its migration was cancelled, 'hob disk remove {}' \
                 removes the disk on this host",
                facts.peer,
                silence.as_secs(),
                self.incoming.name
            ));
        }
    }

    fn end(&self) {
        let mut facts = self.incoming.shared.facts();
        match self.destination.is_owner() {
            true => {
                facts.end(MigrationState::Over);
                facts.warm = true;
            }
            false => facts.end(MigrationState::Kept),
        }
    }
}

impl IncomingDisk {
    /// Starts to read the data that the former owner has on flash. The reads begin when the former
    /// owner allows them. Returns the local socket through which this host reads the data.
    fn read_former(&self) -> Option<DataSocket> {
        let (shard, id) = self.migrations.registry.shard_of(&self.name).ok()?;
        self.migrations.read_peer(&self.name, shard, id, "former", self.connections.former.clone()).ok()
    }

    async fn act(
        &self,
        act: DestinationAct,
        arrival: Option<&Arrival>,
    ) -> Result<Option<DataSocket>, crate::api_error::ApiError> {
        use crate::api_error::ApiError;
        let (migrations, name) = (&self.migrations, &self.name);
        match act {
            DestinationAct::Record(Record::Awaiting(session)) => {
                let arrival = arrival.ok_or_else(|| {
                    ApiError::failed("the migration request has no description of the disk")
                })?;
                migrations.enter_awaited(name, &self.lineage, session, arrival)?;
                migrations.registry.save_first().await?;
            }
            DestinationAct::Record(Record::Gone(session)) => {
                migrations.keep_gone(name, &self.lineage, session).await?
            }
            DestinationAct::Record(record) => migrations.keep_record(name, record).await?,
            DestinationAct::Prepare => {
                let size = arrival.map_or(0, |arrival| arrival.size_bytes);
                let data_socket = migrations.open_awaited(name, size, self.connections.owner.clone()).await?;
                if self.shared.facts().cache == CarryMode::Copy {
                    let (shard, id) = migrations.registry.shard_of(name)?;
                    shard.pull(id);
                }
                return Ok(data_socket);
            }
            DestinationAct::Forget(ranges) => {
                let (shard, id) = migrations.registry.shard_of(name)?;
                shard.forget(id, ranges).await?;
            }
            DestinationAct::Activate => migrations.activate(name).await?,
            DestinationAct::Commit => {
                let (shard, id) = migrations.registry.shard_of(name)?;
                shard.flush(id).await?;
            }
            DestinationAct::Settle => {
                let (shard, id) = migrations.registry.shard_of(name)?;
                let mode = self.shared.facts().cache;
                if matches!(mode, CarryMode::Drop | CarryMode::HeatMap) {
                    shard.leave_peer(id);
                }
                migrations.restore_mode(name).await?;
            }
            DestinationAct::Remove => migrations.remove_awaited(name).await?,
        }
        Ok(None)
    }
}
