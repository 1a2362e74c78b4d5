//! What operators and other hosts ask for: checked, and handed to the task of the disk.

use std::sync::Arc;
use std::time::Duration;

use hob_control::peer::call_path;
use hob_control::{
    Arrival, CallAnswer, CallRefusal, CarrySession, Disk, DiskChanged, DiskState, Migration, MigrationStart,
    MigrationState, Side, Switch,
};
use hob_engine::migration::{
    Call, Destination, Message, Order, Record, Refusal as Refused, Session, Source, SourceOptions, Ticket,
};
use hob_engine::units::Instant;
use tokio::sync::{mpsc, oneshot};

use super::super::claim::Claim;
use super::super::refusal::{Kind, Refusal};
use super::super::{Life, Manager};
use super::destination::{self, CallIn, Coming};
use super::flow::Bandwidth;
use super::hook::{Doors, Ready};
use super::source::{self, Leaving, serves_after};
use super::status::Shared;
use super::{Handle, Inputs, MIGRATING, awaited, calls};
use crate::daemon::state::RecordSpec;

/// A guest waits no longer than this for a host that does not answer, nanoseconds.
const FREEZE_NS_MAX: u64 = 3_000_000_000;

/// The other host says whether it is there within this.
const LOOK_MAX: Duration = Duration::from_secs(10);

/// A call is answered within this, or said to be lost.
const CALL_MAX: Duration = Duration::from_secs(27);

impl Manager {
    /// Begins to move a disk.
    pub(crate) async fn migrate(
        self: &Arc<Self>,
        name: String,
        start: MigrationStart,
    ) -> Result<Migration, Refusal> {
        let manager = self.clone();
        self.change(async move {
            let claim = manager.claim_disk(&name, MIGRATING)?;
            manager.end_filling(&name);
            manager.check_leaving(&name, &start).await?;
            let spec = manager.spec_to_leave(&name)?;
            let session = next_session(spec.record.record());
            let leaving = manager.leaving(&name, spec.lineage.clone(), start.clone(), session)?;
            leaving.meet(session).await?;
            if let Ok(disk) = manager.inner().disk_mut(&name) {
                let record = spec.record;
                disk.wanted.migration = Some(crate::daemon::state::MigrationSpec {
                    peer: start.to.clone(),
                    cache: start.cache,
                    plan: Some(start),
                    record,
                    ..spec
                });
            }
            manager.begin_attempt(leaving, session, Some(claim));
            manager.migration(&name)
        })
        .await
    }

    /// A disk that has come, and whose cache is still pulled, has what it has.
    fn end_filling(&self, name: &str) {
        let before = self.handles().remove(name);
        if let Some(Handle { task, .. }) = before {
            task.abort();
        }
        if let Ok((shard, id)) = self.shard_of(name) {
            shard.leave_peer(id);
        }
    }

    /// What can be said before another host is asked.
    async fn check_leaving(self: &Arc<Self>, name: &str, start: &MigrationStart) -> Result<(), Refusal> {
        awaited::check_directory(&self.carriage()?.directory)?;
        let backing = {
            let inner = self.inner();
            let disk = inner.disk(name)?;
            disk.shard()?;
            disk.wanted.backing.clone()
        };
        for backing in std::iter::once(&backing).chain(&start.backing) {
            self.check_two_can_open(backing).await?;
        }
        match start.bandwidth {
            Some(bandwidth) if bandwidth.bytes() < 1 << 16 => {
                Err(Refusal::invalid("a bandwidth below 64K a second would take for ever"))
            }
            _ => Ok(()),
        }
    }

    /// Everything that a migration away needs.
    pub(super) fn leaving(
        self: &Arc<Self>,
        name: &str,
        lineage: String,
        plan: MigrationStart,
        session: Session,
    ) -> Result<Leaving, Refusal> {
        let (host, port, tls) = self.other_daemon(&plan.to)?;
        let to = (host, port);
        let shared = Leaving::new_shared(&plan, session);
        let bandwidth = Arc::new(Bandwidth::new(plan.bandwidth.map(hob_control::Size::bytes)));
        Ok(Leaving {
            manager: self.clone(),
            name: name.to_owned(),
            lineage,
            plan,
            shared,
            bandwidth,
            to,
            tls,
        })
    }

    /// Starts the task of an attempt.
    pub(super) fn begin_attempt(&self, leaving: Leaving, session: Session, claim: Option<Claim>) {
        let options = SourceOptions {
            on_demand: leaving.plan.switch == Switch::OnWrite,
            freeze_ns_max: FREEZE_NS_MAX,
            serves_after: serves_after(leaving.plan.cache),
        };
        self.run_source(leaving, Source::start(session, options), claim);
    }

    pub(super) fn run_source(&self, leaving: Leaving, source: Source, claim: Option<Claim>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let (name, shared) = (leaving.name.clone(), leaving.shared.clone());
        let task = tokio::spawn(source::run(leaving, source, claim, sender.clone(), receiver));
        self.handles().insert(name, Handle { inputs: Inputs::Source(sender), shared, task });
    }

    /// How far a disk's migration is, or how the last one went.
    pub(crate) fn migration(&self, name: &str) -> Result<Migration, Refusal> {
        if let Some(handle) = self.handles().get(name) {
            return Ok(handle.shared.view(name));
        }
        let inner = self.inner();
        let disk = inner.disk(name)?;
        let none = || {
            Refusal::not_found(format!("{name} is not moving"))
                .hint(format!("'hob migrate {name} --to HOST:PORT' moves it"))
        };
        let spec = disk.wanted.migration.as_ref().ok_or_else(none)?;
        match spec.record.record() {
            Record::Away { session, .. } => {
                let shared = Shared::new(Side::Source, spec.peer.clone(), spec.cache, session);
                shared.facts().end(MigrationState::Away);
                let view = shared.view(name);
                Ok(Migration { total_ms: 0, ..view })
            }
            _ => Err(none()),
        }
    }

    /// Adds what is known of a disk's migration while it has one.
    pub(in super::super) fn show_migration(&self, disk: &mut Disk) {
        let is_over = |state| matches!(state, MigrationState::Over | MigrationState::Kept);
        disk.migration = self
            .migration(&disk.name)
            .ok()
            .filter(|migration| !is_over(migration.state) || matches!(disk.state, DiskState::Away));
        let awaits = disk.migration.as_ref().is_some_and(|migration| {
            matches!(migration.state, MigrationState::Awaiting | MigrationState::Preparing)
                && migration.side == Side::Destination
        });
        if awaits && matches!(disk.state, DiskState::Online | DiskState::Away) {
            disk.state = DiskState::Awaited;
            disk.reason = None;
        }
    }

    /// Hands a disk over now, or keeps it.
    pub(crate) async fn order(self: &Arc<Self>, name: &str, order: Order) -> Result<Migration, Refusal> {
        self.inner().disk(name)?;
        let (in_time, answer) = oneshot::channel();
        {
            let handles = self.handles();
            let handle = handles.get(name).filter(|handle| handle.is_under_way());
            match handle.map(|handle| &handle.inputs) {
                Some(Inputs::Source(sender)) => drop(sender.send(source::Input::Order(order, in_time))),
                Some(Inputs::Destination(..)) => {
                    return Err(Refusal::conflict(format!(
                        "{name} comes to this host; its owner is another"
                    ))
                    .hint(format!("ask there, or give it up with 'hob disk remove {name}'")));
                }
                None => return Err(Refusal::conflict(format!("{name} is not moving"))),
            }
        }
        match answer.await {
            Ok(true) => self.migration(name),
            _ => Err(Refusal::conflict(format!(
                "it is too late for that: {name} is handed over, or stays already"
            ))),
        }
    }

    /// Takes a disk back whose new host will never serve it again, as the operator says.
    pub(crate) async fn migration_take_back(
        self: &Arc<Self>,
        name: String,
        force: bool,
    ) -> Result<DiskChanged, Refusal> {
        let manager = self.clone();
        self.change(async move {
            let spec = manager.inner().disk(&name)?.wanted.migration.clone();
            let Some((spec, Record::Away { session, .. })) =
                spec.map(|spec| (spec.clone(), spec.record.record()))
            else {
                return Err(Refusal::conflict(format!("{name} is not away")));
            };
            if !force {
                return Err(Refusal::conflict(format!(
                    "{name} is {}'s: if that host still serves it, two hosts write one disk, and it is lost",
                    spec.peer
                ))
                .hint("make sure that it never does again, and say --force"));
            }
            if let Some(handle) = manager.handles().remove(&name) {
                handle.task.abort();
            }
            manager.give_cache_up(&name, &spec.peer).await?;
            manager.own_again(&name, session.generation + 2).await?;
            manager.restore_wanted_mode(&name)?;
            tracing::warn!("{name} was taken back by command; {} must not serve it any more", spec.peer);
            if let Ok(disk) = manager.inner().disk_mut(&name) {
                disk.life = Life::Offline("it was taken back".to_owned());
                disk.busy = None;
            }
            manager.save().await?;
            manager.bring_online(&name).await;
            let note =
                format!("{} must never serve it again: what it has of it is not {name} any more", spec.peer);
            manager.disk_changed(&name, vec![note])
        })
        .await
    }

    /// A disk that is away, or has not come, is removed: the tombstone goes, or the other host keeps the disk. `None` if it is
    /// neither.
    pub(in super::super) async fn remove_absent(
        self: &Arc<Self>,
        name: &str,
    ) -> Result<Option<DiskChanged>, Refusal> {
        let record = {
            let inner = self.inner();
            inner.disk(name)?.wanted.migration.as_ref().map(|spec| spec.record)
        };
        match record {
            Some(RecordSpec::Awaiting { .. }) => {
                if let Some(Handle { inputs: Inputs::Destination(sender, ..), .. }) = self.handles().get(name)
                {
                    let _ = sender.send(destination::Input::GiveUp);
                }
                let note = "the host that has it keeps it".to_owned();
                Ok(Some(DiskChanged { disk: None, notes: vec![note] }))
            }
            Some(RecordSpec::Away { taken: true, .. }) => {
                let is_serving = self.handles().get(name).is_some_and(Handle::is_under_way);
                if is_serving {
                    return Err(Refusal::conflict(format!(
                        "{name} has moved, and its new host still reads its cache"
                    ))
                    .hint("it is given up by itself when that is done"));
                }
                self.handles().remove(name);
                self.inner().disks.remove(name);
                self.save().await?;
                Ok(Some(DiskChanged { disk: None, notes: Vec::new() }))
            }
            Some(RecordSpec::Away { taken: false, .. }) => Err(Refusal::conflict(format!(
                "{name} was handed over, and its new host has not said so yet: without this record it would have no owner"
            ))),
            _ => Ok(None),
        }
    }

    /// How the last migration of a disk went is not shown any more.
    pub(in super::super) fn forget_migration(&self, name: &str) {
        let mut handles = self.handles();
        if handles.get(name).is_some_and(|handle| !handle.is_under_way()) {
            handles.remove(name);
        }
    }

    /// Another host calls.
    pub(crate) async fn call_in(
        self: &Arc<Self>,
        name: String,
        of: CarrySession,
        call: CallIn,
    ) -> Result<CallAnswer, Refusal> {
        self.carriage()?;
        let session = calls::session(&of).ok_or_else(|| Refusal::invalid("there can be no such session"))?;
        if matches!(call, CallIn::Arrive(_)) {
            self.let_rest(&name).await;
        }
        if let Some(refused) = self.refuse_stranger(&name, &of.lineage, session, &call) {
            return Ok(refused);
        }
        let sender = match self.task_for(&name, &of.lineage, session, &call) {
            Some(sender) => sender,
            None => return Ok(self.answer_without_task(&name, &of.lineage, session, &call)),
        };
        let (answer, answered) = oneshot::channel();
        let lost = || Refusal::busy("the call was not answered in time");
        sender.send(destination::Input::Call(session, call, answer)).map_err(|_| lost())?;
        tokio::time::timeout(CALL_MAX, answered).await.map_err(|_| lost())?.map_err(|_| lost())
    }

    /// Calls about another disk than the one that is known here by that name, and arrivals that cannot be.
    fn refuse_stranger(
        &self,
        name: &str,
        lineage: &str,
        session: Session,
        call: &CallIn,
    ) -> Option<CallAnswer> {
        let gives_way = matches!(call, CallIn::Arrive(_)) && self.gives_way(name);
        let never = |why: String| Some(calls::to_wire(Err(Refused::Never), Some(why)));
        let known = self.inner().disk(name).ok().map(|disk| disk.wanted.migration.clone());
        let is_stranger =
            !gives_way && known.is_some_and(|spec| spec.is_none_or(|spec| spec.lineage != lineage));
        match call {
            CallIn::Arrive(_) if is_stranger => never(format!(
                "it has another disk of the name {name}; remove that one or its tombstone first"
            )),
            _ if is_stranger => Some(calls::to_wire(Err(Refused::NotAwaited), None)),
            CallIn::Arrive(arrival) => self.check_arrival(name, arrival).err().and_then(|refusal| {
                tracing::warn!("{name} ({session:?}) is not awaited: {refusal}");
                never(refusal.to_string())
            }),
            _ => None,
        }
    }

    fn check_arrival(&self, name: &str, arrival: &Arrival) -> Result<(), Refusal> {
        awaited::check_directory(&self.carriage()?.directory)?;
        if let Some(path) = &arrival.fuse
            && self.inner().disk(name).is_err()
        {
            self.check_file(path)?;
        }
        if let Ok(disk) = self.inner().disk(name)
            && disk.busy.is_some_and(|busy| busy != MIGRATING)
        {
            return Err(Refusal { kind: Kind::Busy, ..Refusal::busy(format!("{name} is being changed")) });
        }
        self.awaited_state(name, arrival).map(drop)
    }

    /// Who hears a call, if it is a task; one that was asked to await the disk is started.
    fn task_for(
        self: &Arc<Self>,
        name: &str,
        lineage: &str,
        session: Session,
        call: &CallIn,
    ) -> Option<mpsc::UnboundedSender<destination::Input>> {
        {
            let handles = self.handles();
            match handles.get(name).filter(|handle| handle.is_under_way()).map(|handle| &handle.inputs) {
                Some(Inputs::Destination(sender, _)) => return Some(sender.clone()),
                // It has not ended here; whoever calls tries again.
                Some(Inputs::Source(_)) => return None,
                None => {}
            }
        }
        let CallIn::Arrive(arrival) = call else { return None };
        let record = match self.gives_way(name) && self.lineage_of(name).as_deref() != Some(lineage) {
            true => self.record_besides(name, lineage),
            false => self.record_of_lineage(name, lineage),
        };
        match record {
            Some(Record::Owner { .. } | Record::Leaving(_)) => return None,
            Some(Record::Away { session: past, .. }) if session <= past => return None,
            _ => {}
        }
        let shared = Shared::new(Side::Destination, arrival.from.clone(), arrival.mode, session);
        Some(self.run_destination(name, lineage, record, shared))
    }

    pub(super) fn run_destination(
        self: &Arc<Self>,
        name: &str,
        lineage: &str,
        record: Option<Record>,
        shared: Shared,
    ) -> mpsc::UnboundedSender<destination::Input> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let (shared, doors) = (Arc::new(shared), Arc::new(Doors::default()));
        let coming = Coming {
            manager: self.clone(),
            name: name.to_owned(),
            lineage: lineage.to_owned(),
            shared: shared.clone(),
            doors: doors.clone(),
            sender: sender.clone(),
        };
        let task = tokio::spawn(destination::run(coming, record, receiver));
        let inputs = Inputs::Destination(sender.clone(), doors);
        self.handles().insert(name.to_owned(), Handle { inputs, shared, task });
        sender
    }

    fn record_of_lineage(&self, name: &str, lineage: &str) -> Option<Record> {
        let other_gone = || self.inner().gone.iter().any(|gone| gone.name == name && gone.lineage != lineage);
        self.record_of(name).filter(|_| !other_gone())
    }

    /// Of a disk that nothing is done about: what the record says.
    fn answer_without_task(&self, name: &str, lineage: &str, session: Session, call: &CallIn) -> CallAnswer {
        let call = match call {
            CallIn::Yours => Call::Yours,
            CallIn::Cancel => Call::Cancel,
            CallIn::Arrive(_) => Call::Arrive,
            CallIn::Changed(_) => Call::Changed(Vec::new()),
            // Whoever asks how far it is need not wait any more.
            CallIn::Look | CallIn::List { .. } => return calls::to_wire(Err(Refused::NotAwaited), None),
        };
        if self.is_leaving(name) && matches!(call, Call::Arrive | Call::Changed(_) | Call::Yours) {
            let why = format!("{name} is leaving this host still");
            return calls::to_wire(Err(Refused::Failed), Some(why));
        }
        let mut machine = Destination::new(self.record_of_lineage(name, lineage));
        machine.handle_call(Instant(0), Ticket(0), Message { session, call });
        let answer = machine.poll_answer().map_or(Err(Refused::NotAwaited), |(_, answer)| answer);
        calls::to_wire(answer, None)
    }

    /// Is it handed over, or on the way, and its task not at its end?
    fn is_leaving(&self, name: &str) -> bool {
        let handles = self.handles();
        let source = handles.get(name).filter(|handle| handle.is_under_way());
        source.is_some_and(|handle| {
            use MigrationState::{HandingOver, Over, Serving};
            matches!(handle.inputs, Inputs::Source(_))
                && matches!(handle.shared.facts().state, HandingOver | Serving | Over)
        })
    }

    /// Where a data connection of another host goes.
    pub(crate) fn data_in(&self, name: &str, of: &CarrySession, is_former: bool) -> Result<DataIn, Refusal> {
        let not_awaited = || Refusal::conflict(format!("{name} is not awaited in that session"));
        let session = calls::session(of).ok_or_else(not_awaited)?;
        if self.lineage_of(name).as_ref() != Some(&of.lineage) {
            return Err(not_awaited());
        }
        let handles = self.handles();
        let handle = handles.get(name).filter(|handle| handle.is_under_way()).ok_or_else(not_awaited)?;
        match &handle.inputs {
            Inputs::Destination(_, doors) => {
                let known = handle.shared.facts().session;
                match is_former {
                    true if session == known => Ok(DataIn(doors.former.clone())),
                    // The owner is heard of whatever it began last: what waits for it may be in the way of that.
                    false if session >= known => Ok(DataIn(doors.owner.clone())),
                    _ => Err(not_awaited()),
                }
            }
            _ => Err(not_awaited()),
        }
    }

    /// A change waits for an awaited disk. False if it is no such disk.
    pub(in super::super) fn note_wanted(&self, disk: hob_engine::units::DiskId) -> bool {
        let name = {
            let inner = self.inner();
            inner.disks.values().find(|entry| entry.id == disk).map(|entry| entry.wanted.name.clone())
        };
        let handles = self.handles();
        match name.and_then(|name| handles.get(&name)).filter(|handle| handle.is_under_way()) {
            Some(Handle { inputs: Inputs::Destination(sender, _), .. }) => {
                sender.send(destination::Input::Wanted).is_ok()
            }
            _ => false,
        }
    }
}

/// Takes a data connection.
#[derive(Clone, Debug)]
pub(crate) struct DataIn(Arc<Ready>);

impl DataIn {
    /// Keeps it ready.
    pub(crate) fn put(&self, connection: super::DataConnection) {
        self.0.put(connection);
    }
}

impl Leaving {
    /// Is the other host there, and will it hear us?
    async fn meet(&self, session: Session) -> Result<(), Refusal> {
        let path = call_path(&self.name, "look", &self.session(session), "");
        let answer = self.peer().call(&path, Vec::new(), LOOK_MAX).await.map_err(|error| {
            Refusal::failed(format!("{} cannot take {}: {error}", self.plan.to, self.name))
        })?;
        match answer.refused {
            None | Some(CallRefusal::NotAwaited | CallRefusal::Failed { .. }) => Ok(()),
            Some(CallRefusal::Owner { .. }) => {
                Err(Refusal::conflict(format!("{} has a disk {} already", self.plan.to, self.name)))
            }
            Some(CallRefusal::Never { why }) => Err(Refusal::conflict(why)),
        }
    }
}

/// The next attempt of an owner.
pub(super) fn next_session(record: Record) -> Session {
    match record {
        Record::Owner { generation, attempts } => Session { generation, attempt: attempts + 1 },
        Record::Leaving(Session { generation, attempt }) => Session { generation, attempt: attempt + 1 },
        Record::Away { session, .. } | Record::Awaiting(session) | Record::Gone(session) => session,
    }
}
