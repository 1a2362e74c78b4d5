//! Calls of source hosts about migrations to this host. Each call is checked, and then passed to
//! the disk's task or answered from the disk's record.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hob_control::{Arrival, CallAnswer, CarrySession, MigrationState, Side};
use hob_engine::migration::{Call, Destination, Message, Record, Refusal as Refused, Session, Ticket};
use hob_engine::units::Instant;
use tokio::sync::{mpsc, oneshot};

use super::super::registry::MIGRATING;
use super::Migrations;
use super::data_socket::{DataConnections, ReadyConnections};
use super::destination::{self, CallIn, IncomingDisk};
use super::status::Shared;
use super::{Handle, Inputs, calls, incoming};
use crate::api_error::{ApiError, ErrorKind, Result, conflict};
use crate::background::spawn;

/// Maximum time to answer a call of a source host. After that time, this host answers the call with
/// an error.
const CALL_MAX: Duration = Duration::from_secs(27);

impl Migrations {
    /// Handles a call of another host.
    pub(crate) async fn call_in(
        self: &Arc<Self>,
        name: String,
        of: CarrySession,
        call: CallIn,
    ) -> Result<CallAnswer> {
        self.peers.transport()?;
        self.check_not_stopped()?;
        let invalid = || ApiError::invalid("the session number of the migration is invalid");
        let session = calls::session(&of).ok_or_else(invalid)?;
        if self.brought(&name, &of.lineage, session, &call).is_some() {
            self.let_rest(&name).await;
        }
        if let Some(refused) = self.refuse_stranger(&name, &of.lineage, session, &call) {
            return Ok(refused);
        }
        let sender = match self.task_for(&name, &of.lineage, session, &call)? {
            Some(sender) => sender,
            // The answer from the record alone would be that this host does not await the disk.
            None if matches!(self.record_of_lineage(&name, &of.lineage), Some(Record::Awaiting(_))) => {
                return Err(ApiError::busy(format!(
                    "this host awaits {name}, and does not continue the migration yet; repeat the call"
                )));
            }
            None => return Ok(self.answer_without_task(&name, &of.lineage, session, &call)),
        };
        let (answer, answered) = oneshot::channel();
        let lost = || ApiError::busy("the call was not answered in time");
        sender.send(destination::Input::Call(session, call, answer)).map_err(|_| lost())?;
        tokio::time::timeout(CALL_MAX, answered).await.map_err(|_| lost())?.map_err(|_| lost())
    }

    fn check_not_stopped(&self) -> Result<()> {
        match self.stopped.load(Ordering::SeqCst) {
            true => Err(ApiError::busy("this daemon is ending; the next daemon continues the migration")),
            false => Ok(()),
        }
    }

    /// Returns the disk settings in a source's call from which this host can create the disk;
    /// `None` if the call has none. The call announces a disk, or hands over a disk that this host
    /// has dropped.
    fn brought<'a>(
        &self,
        name: &str,
        lineage: &str,
        session: Session,
        call: &'a CallIn,
    ) -> Option<&'a Arrival> {
        match call {
            CallIn::Arrive(arrival) => Some(arrival),
            CallIn::Yours(arrival) => {
                let was_given_up = self.record_for(name, lineage) == Some(Record::Gone(session));
                arrival.as_deref().filter(|_| was_given_up)
            }
            _ => None,
        }
    }

    /// Refuses a source's calls about another disk of the same name, and about disks that cannot
    /// migrate to this host.
    fn refuse_stranger(
        &self,
        name: &str,
        lineage: &str,
        session: Session,
        call: &CallIn,
    ) -> Option<CallAnswer> {
        let brought = self.brought(name, lineage, session, call);
        let gives_way = brought.is_some() && self.gives_way(name);
        let refuse = |why: String| {
            let refused = match call {
                CallIn::Arrive(_) => Refused::Never,
                // This host refuses other calls only for now. For example, a source that has sent
                // `Yours` cannot give the disk to another host, so it must send the call again.
                _ => Refused::Failed,
            };
            Some(calls::to_wire(Err(refused), Some(why)))
        };
        let known = self.registry.inner().disk(name).ok().map(|disk| disk.wanted.migration.clone());
        let is_stranger =
            !gives_way && known.is_some_and(|spec| spec.is_none_or(|spec| spec.lineage != lineage));
        match call {
            CallIn::Arrive(_) if is_stranger && self.keeps_dirty(name) => {
                refuse(format!("this host {}", kept_dirty(name)))
            }
            CallIn::Arrive(_) if is_stranger => refuse(format!(
                "this host has another disk named {name}; remove that disk or its tombstone first"
            )),
            CallIn::Look if self.asking().contains(lineage) => {
                Some(never(format!("this is the address of the host that has {name} now")))
            }
            CallIn::Look if is_stranger && self.keeps_dirty(name) => {
                Some(never(format!("that host {}", kept_dirty(name))))
            }
            // A disk that waits for the cluster gives way when the disk arrives.
            CallIn::Look if is_stranger && !self.gives_way(name) && !self.may_wait_for_cluster(name) => {
                Some(never(format!(
                    "that host has another disk named {name}; remove that disk or its tombstone there first"
                )))
            }
            _ if is_stranger => Some(calls::to_wire(Err(Refused::NotAwaited), None)),
            _ => brought.and_then(|arrival| self.check_arrival(name, arrival).err()).and_then(|error| {
                tracing::warn!("disk {name}: this host refuses its migration ({session:?}): {error}");
                refuse(error.to_string())
            }),
        }
    }

    fn check_arrival(&self, name: &str, arrival: &Arrival) -> Result<()> {
        incoming::check_directory(&self.peers.transport()?.directory)?;
        if let Some(path) = &arrival.fuse
            && self.registry.inner().disk(name).is_err()
        {
            self.exports.check_file(path)?;
        }
        if let Ok(disk) = self.registry.inner().disk(name)
            && disk.busy.is_some_and(|busy| busy != MIGRATING)
        {
            return Err(ApiError {
                kind: ErrorKind::Busy,
                ..ApiError::busy(format!("{name} is being changed"))
            });
        }
        self.awaited_state(name, arrival).map(drop)
    }

    /// Returns the task that handles a source's call. Starts a task if the call announces a new
    /// disk.
    fn task_for(
        self: &Arc<Self>,
        name: &str,
        lineage: &str,
        session: Session,
        call: &CallIn,
    ) -> Result<Option<mpsc::UnboundedSender<destination::Input>>> {
        {
            let handles = self.handles();
            match handles.get(name).filter(|handle| handle.is_under_way()).map(|handle| &handle.inputs) {
                Some(Inputs::Destination(sender, _)) => return Ok(Some(sender.clone())),
                // This host is still migrating the disk to another host. The caller of this call
                // tries again later.
                Some(Inputs::Source(_)) => return Ok(None),
                None => {}
            }
        }
        let Some(arrival) = self.brought(name, lineage, session, call) else { return Ok(None) };
        let record = self.record_for(name, lineage);
        match record {
            Some(Record::Owner { .. } | Record::Leaving(_)) => return Ok(None),
            Some(Record::Away { session: past, .. }) if session <= past => return Ok(None),
            _ => {}
        }
        let shared = Shared::new(Side::Destination, arrival.from.clone(), arrival.mode, session);
        self.run_destination(name, lineage, record, shared).map(Some)
    }

    /// Starts the task of a migration to this host. Fails if the daemon is ending.
    pub(super) fn run_destination(
        self: &Arc<Self>,
        name: &str,
        lineage: &str,
        record: Option<Record>,
        shared: Shared,
    ) -> Result<mpsc::UnboundedSender<destination::Input>> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let (shared, connections) = (Arc::new(shared), Arc::new(DataConnections::default()));
        let incoming = IncomingDisk {
            migrations: self.clone(),
            name: name.to_owned(),
            lineage: lineage.to_owned(),
            shared: shared.clone(),
            connections: connections.clone(),
            sender: sender.clone(),
        };
        let mut handles = self.handles();
        // The end of the daemon stops the tasks under this lock, so no task starts after that.
        self.check_not_stopped()?;
        let task = spawn(destination::run(incoming, record, receiver));
        let inputs = Inputs::Destination(sender.clone(), connections);
        handles.insert(name.to_owned(), Handle { inputs, shared, task });
        Ok(sender)
    }

    /// Returns the migration record of the disk that a call names. Ignores another disk of the same
    /// name that waits on this host for the cluster.
    fn record_for(&self, name: &str, lineage: &str) -> Option<Record> {
        match self.gives_way(name) && self.lineage_of(name).as_deref() != Some(lineage) {
            true => self.record_besides(name, lineage),
            false => self.record_of_lineage(name, lineage),
        }
    }

    fn record_of_lineage(&self, name: &str, lineage: &str) -> Option<Record> {
        let other_gone =
            || self.registry.inner().gone.iter().any(|gone| gone.name == name && gone.lineage != lineage);
        self.registry.record_of(name).filter(|_| !other_gone())
    }

    /// Answers a source's call about a disk that has no task on this host, from the disk's record.
    fn answer_without_task(&self, name: &str, lineage: &str, session: Session, call: &CallIn) -> CallAnswer {
        let call = match call {
            CallIn::Yours(_) => Call::Yours,
            CallIn::Cancel => Call::Cancel,
            CallIn::Arrive(_) => Call::Arrive,
            CallIn::Changed(_) => Call::Changed(Vec::new()),
            // A caller that asks for the progress need not wait any longer.
            CallIn::Look | CallIn::List { .. } => return calls::to_wire(Err(Refused::NotAwaited), None),
        };
        if self.is_leaving(name) && matches!(call, Call::Arrive | Call::Changed(_) | Call::Yours) {
            let why = format!("{name} is still being migrated away from this host");
            return calls::to_wire(Err(Refused::Failed), Some(why));
        }
        let mut machine = Destination::new(self.record_of_lineage(name, lineage));
        machine.handle_call(Instant(0), Ticket(0), Message { session, call });
        let answer = machine.poll_answer().map_or(Err(Refused::NotAwaited), |(_, answer)| answer);
        calls::to_wire(answer, None)
    }

    /// Returns true if the disk is leaving this host and its task has not ended.
    fn is_leaving(&self, name: &str) -> bool {
        let handles = self.handles();
        let source = handles.get(name).filter(|handle| handle.is_under_way());
        source.is_some_and(|handle| {
            use MigrationState::{HandingOver, Over, Serving};
            matches!(handle.inputs, Inputs::Source(_))
                && matches!(handle.shared.facts().state, HandingOver | Serving | Over)
        })
    }

    /// Returns the queue for a data connection that the source has opened to this host.
    pub(crate) fn data_in(&self, name: &str, of: &CarrySession, is_former: bool) -> Result<DataIn> {
        let not_awaited = || conflict!("{name} is not migrating to this host in this session");
        let session = calls::session(of).ok_or_else(not_awaited)?;
        if self.lineage_of(name).as_ref() != Some(&of.lineage) {
            return Err(not_awaited());
        }
        let handles = self.handles();
        let handle = handles.get(name).filter(|handle| handle.is_under_way()).ok_or_else(not_awaited)?;
        match &handle.inputs {
            Inputs::Destination(_, connections) => {
                let known = handle.shared.facts().session;
                match is_former {
                    true if session == known => Ok(DataIn(connections.former.clone())),
                    // The owner's connections are accepted for any session, because the session's
                    // end may wait for this data.
                    false if session >= known => Ok(DataIn(connections.owner.clone())),
                    _ => Err(not_awaited()),
                }
            }
            _ => Err(not_awaited()),
        }
    }

    /// Notes that a write waits for an incoming disk. Returns false if the disk is not incoming.
    pub(in super::super) fn note_wanted(&self, disk: hob_engine::units::DiskId) -> bool {
        let name = {
            let inner = self.registry.inner();
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

/// Returns why a host that keeps dirty data of its own does not take a disk.
pub(in super::super) fn kept_dirty(name: &str) -> String {
    format!(
        "may have dirty data of {name} on its flash; save it there with 'hob cache export-dirty {name} \
         FILE', and discard it with 'hob cache discard-dirty {name} --yes'"
    )
}

/// Returns the answer that this host never takes the disk.
fn never(why: String) -> CallAnswer {
    calls::to_wire(Err(Refused::Never), Some(why))
}

/// Queue of ready data connections, to which the caller adds a connection of the source.
#[derive(Clone, Debug)]
pub(crate) struct DataIn(Arc<ReadyConnections>);

impl DataIn {
    /// Adds a connection to the queue of ready data connections.
    pub(crate) fn put(&self, connection: super::DataConnection) {
        self.0.put(connection);
    }
}
