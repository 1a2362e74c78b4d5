//! The destination of a migration: prepares for the disk, invalidates cached ranges that change,
//! and serves the disk after the hand-over.
//!
//! When the source announces a disk that the destination does not know, the destination first
//! records durably that it awaits the disk, and then answers. So after a restart the destination
//! still awaits the disk, trusts no cached data, and answers the source's calls as before. All
//! cached data of an awaited disk was read from the source after this state machine was created.
//! Before the destination answers the call `changed`, it invalidates the ranges that the source
//! changed after the destination had read them.
//!
//! The destination accepts the hand-over of a disk even if it stopped waiting for the disk earlier
//! in the same attempt. A source that has sent `yours` never serves the disk again.
//!
//! After any `handle_*`, call `poll_act` and `poll_answer` until they return nothing. At most one
//! action other than `Forget` is in progress. Any number of `Forget` actions can be in progress,
//! and they end in any order.

use super::{Answer, Call, Message, Record, Refusal, Session, Ticket, View};
use crate::units::Instant;

/// Maximum delay of the answer to a call that reports no changed ranges, nanoseconds.
const HOLD_NS: u64 = 1_000_000_000;

/// Maximum number of the source's calls that the destination has not answered yet. Beyond this
/// number, the oldest call is refused.
const CALLS_MAX: usize = 16;

/// An action that the destination requests from its caller (the daemon on the destination host).
/// When an action has ended, the caller calls [`Destination::handle_done`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DestinationAct {
    /// Store this record durably.
    Record(Record),
    /// Add the disk in `Role::Standby`, with an empty cache that can pull data. If the disk exists
    /// already for an earlier session, stop pulling for that session and drop its data. In a
    /// process that started with the record `Awaiting`, flush the backing first. The previous
    /// process may have served the disk and acknowledged changes, and a flush in standby is
    /// answered immediately.
    Prepare,
    /// Run `Op::Forget` on these ranges of sectors, and pull them again later if they were cached.
    /// An error means that some data was not invalidated.
    Forget(Vec<(u64, u64)>),
    /// Set the disk's role to `Role::Here`, because this host owns the backing now.
    Activate,
    /// Make all invalidations durable.
    Commit,
    /// Restore the cache's mode. End all pulls, unless the migration's cache setting lets the
    /// destination pull after the hand-over. This action cannot fail.
    Settle,
    /// Remove the disk, because it is not handed over.
    Remove,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// This host neither awaits nor owns the disk.
    Not,
    /// The disk is awaited and is being prepared.
    Preparing(Session),
    /// The disk is awaited, and is in standby.
    Ready(Session),
    /// This host owns and serves the disk, but the record of the ownership is not durable yet.
    Serving(Session),
    /// The disk is owned, with this generation.
    Owner(u64),
}

/// The state machine of a migration's destination.
pub struct Destination {
    state: State,
    record: Option<Record>,
    /// The latest session that this process, and no earlier process, began to await.
    begun: Option<Session>,
    /// True if the record may say that the disk did not arrive, although this host still waits for
    /// the disk.
    doubtful: bool,
    /// True if the destination stops waiting for the disk and removes it once the action in
    /// progress has ended.
    gives_up: bool,
    /// The latest session whose `Awaiting` record was written durably, or may have been.
    tried: Option<Session>,
    act: Option<(Ticket, DestinationAct)>,
    /// Actions that the caller has not polled yet.
    acts_out: Vec<(Ticket, DestinationAct)>,
    answers_out: Vec<(Ticket, Answer)>,
    /// The `Forget` actions in progress, each with the call that it serves.
    forgetting: Vec<(Ticket, Ticket)>,
    /// Calls that wait for the action in progress.
    calls: Vec<(Ticket, Message)>,
    /// A call whose answer is delayed, and the time until which it is delayed.
    held: Option<(Ticket, Instant)>,
    next: u64,
    view: View,
}

impl Destination {
    /// Creates the state machine from a stored record. An awaited disk is prepared again.
    pub fn new(record: Option<Record>) -> Destination {
        let mut destination = Destination {
            state: State::Not,
            record,
            begun: None,
            doubtful: false,
            gives_up: false,
            tried: None,
            act: None,
            acts_out: vec![],
            answers_out: vec![],
            forgetting: vec![],
            calls: vec![],
            held: None,
            next: 0,
            view: View::default(),
        };
        match record {
            Some(Record::Awaiting(session)) => {
                destination.state = State::Preparing(session);
                destination.act(DestinationAct::Prepare);
            }
            Some(Record::Owner { generation, .. } | Record::Leaving(Session { generation, .. })) => {
                destination.state = State::Owner(generation);
                // Changes on this host since the hand-over are not known any more, so nothing is
                // read from the former owner.
                destination.view.done = true;
            }
            Some(Record::Away { .. } | Record::Gone(_)) | None => {}
        }
        destination
    }

    /// Returns the next action that the caller must execute; `None` if there is none now. The
    /// caller passes the action's result to `handle_done`.
    pub fn poll_act(&mut self) -> Option<(Ticket, DestinationAct)> {
        if self.acts_out.is_empty() { None } else { Some(self.acts_out.remove(0)) }
    }

    /// Returns the next answer to send to the source, and the ticket of the call; `None` if there
    /// is none now.
    pub fn poll_answer(&mut self) -> Option<(Ticket, Answer)> {
        self.answers_out.pop()
    }

    /// Returns the time at which the caller must call `handle_timeout`; `None` if no answer is
    /// delayed.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.held.map(|(_, at)| at)
    }

    /// Returns true if this process has seen all changes of the disk on this host since the
    /// hand-over. The caller asks before it serves the disk. An earlier process may have served the
    /// disk, and crashed before it recorded its ownership. Then the former owner's flash may be
    /// older than the backing.
    pub fn knows_changes(&self) -> bool {
        matches!((self.record, self.begun), (Some(Record::Awaiting(now)), Some(begun)) if now == begun)
    }

    /// Returns the session in which this host awaits the disk; `None` if this host does not await
    /// it.
    pub fn awaits(&self) -> Option<Session> {
        match self.state {
            State::Preparing(session) | State::Ready(session) => Some(session),
            _ => None,
        }
    }

    /// Returns true if this host neither awaits nor owns the disk, and no action is in progress. A
    /// later call of the source may change that.
    pub fn is_idle(&self) -> bool {
        self.state == State::Not && self.act.is_none()
    }

    /// Returns true if this host owns the disk, and the record of the ownership is durable.
    pub fn is_owner(&self) -> bool {
        matches!(self.state, State::Owner(_))
    }

    /// Handles the first write or other change that the guest makes at this host. The guest's
    /// request waits until this host owns the disk.
    pub fn handle_wanted(&mut self) {
        self.view.wants = self.awaits().is_some();
        self.answer_held();
    }

    /// Stores the progress of pulling, which the next answer to the source reports.
    pub fn handle_progress(&mut self, pulled_bytes: u64, left_bytes: u64, done: bool) {
        self.view = View { pulled_bytes, left_bytes, done, ..self.view };
    }

    /// Handles the removal of the disk on this host, or the operator's decision that the disk will
    /// not arrive.
    pub fn handle_give_up(&mut self) {
        self.gives_up = self.awaits().is_some();
        self.go_on_giving_up();
    }

    fn go_on_giving_up(&mut self) {
        if self.gives_up && self.awaits().is_some() && self.act.is_none() {
            self.gives_up = false;
            self.act(DestinationAct::Remove);
        }
    }

    /// Sends the delayed answer if its time has come.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.held.is_some_and(|(_, at)| at <= now) {
            self.answer_held();
        }
    }

    /// Handles a call of the source. `ticket` identifies the call in its answer, and is unique in
    /// this process.
    pub fn handle_call(&mut self, now: Instant, ticket: Ticket, message: Message) {
        match self.immediately(now, ticket, &message) {
            Some(answer) => self.answers_out.push((ticket, answer)),
            None if self.is_held(ticket) => {}
            None => {
                if self.calls.len() >= CALLS_MAX {
                    let (oldest, _) = self.calls.remove(0);
                    self.answers_out.push((oldest, Err(Refusal::Failed)));
                }
                self.calls.push((ticket, message));
            }
        }
    }

    /// Returns the answer to a call if it is already known, or else starts the necessary action.
    fn immediately(&mut self, now: Instant, ticket: Ticket, message: &Message) -> Option<Answer> {
        let session = message.session;
        if let State::Owner(generation) = self.state {
            let is_answer = matches!(message.call, Call::Yours | Call::Look);
            return Some(match is_answer && generation == session.generation + 1 {
                true => Ok(self.view),
                false => Err(Refusal::Owner(generation)),
            });
        }
        let tried = self.tried.map(|tried| tried.generation);
        if let Some(generation) = self.record.map(Record::generation).max(tried)
            && session.generation < generation
        {
            // The caller is outdated: its disk was taken, and perhaps handed on, without its
            // knowledge.
            return Some(Err(Refusal::Owner(generation)));
        }
        match (&message.call, self.state) {
            (Call::Arrive, State::Not) => self.await_first(session),
            (Call::Arrive, State::Ready(awaited)) if awaited == session => Some(Ok(self.view)),
            (Call::Arrive, State::Ready(awaited) | State::Preparing(awaited)) if awaited < session => {
                if self.act.is_none() && self.forgetting.is_empty() {
                    self.await_next(session);
                }
                None
            }
            (Call::Cancel, State::Ready(awaited) | State::Preparing(awaited)) if awaited <= session => {
                if self.act.is_none() {
                    self.act(DestinationAct::Remove);
                }
                None
            }
            (_, State::Preparing(awaited)) if awaited == session => {
                if self.act.is_none() {
                    self.act(match self.doubtful {
                        true => DestinationAct::Record(Record::Awaiting(session)),
                        false => DestinationAct::Prepare,
                    });
                }
                None
            }
            (Call::Yours, State::Not) if self.record == Some(Record::Gone(session)) => {
                if self.act.is_none() {
                    self.act(DestinationAct::Record(Record::Awaiting(session)));
                }
                None
            }
            (Call::Changed(ranges), State::Ready(awaited)) if awaited == session => {
                if !ranges.is_empty() {
                    self.forget(ticket, ranges.clone());
                } else if self.view.wants {
                    return Some(Ok(self.view));
                } else if !self.is_held(ticket) {
                    // The delayed call is of an earlier attempt or was repeated, so its caller does
                    // not wait any more.
                    self.answer_held();
                    self.held = Some((ticket, now + HOLD_NS));
                }
                None
            }
            (Call::Look, State::Ready(awaited)) if awaited == session => Some(Ok(self.view)),
            (Call::Yours, State::Ready(awaited)) if awaited == session => {
                // This host has reported to the source that all ranges are invalidated. A `Forget` still in progress
                // belongs to a repeated call. That `Forget` may wait for a read that is answered
                // only when this host owns the disk.
                if self.act.is_none() {
                    self.answer_held();
                    self.act(DestinationAct::Activate);
                }
                None
            }
            (Call::Yours, State::Serving(taken)) if taken == session => {
                if self.act.is_none() {
                    self.act(DestinationAct::Commit);
                }
                None
            }
            // The disk will be awaited when the act in progress ends.
            (Call::Cancel, State::Not) if self.act.is_some() => None,
            (Call::Cancel, State::Not) => Some(Ok(self.view)),
            (_, State::Serving(taken)) => Some(Err(Refusal::Owner(taken.generation + 1))),
            _ => Some(Err(Refusal::NotAwaited)),
        }
    }

    fn await_first(&mut self, session: Session) -> Option<Answer> {
        match self.record {
            // The call is delayed: the current owner has already left that session.
            Some(Record::Away { session: past, .. } | Record::Gone(past)) if session <= past => {
                Some(Err(Refusal::NotAwaited))
            }
            // A later session may have been recorded, although its write failed.
            _ if self.tried > Some(session) => Some(Err(Refusal::NotAwaited)),
            _ => {
                if self.act.is_none() {
                    self.act(DestinationAct::Record(Record::Awaiting(session)));
                }
                None
            }
        }
    }

    fn await_next(&mut self, session: Session) {
        self.answer_held();
        self.act(DestinationAct::Record(Record::Awaiting(session)));
    }

    /// Handles the result of the action that has this ticket.
    pub fn handle_done(&mut self, now: Instant, ticket: Ticket, result: Result<(), ()>) {
        if let Some(at) = self.forgetting.iter().position(|(act, _)| *act == ticket) {
            let (_, call) = self.forgetting.swap_remove(at);
            // A call that is not found was answered already.
            if let Some(at) = self.calls.iter().position(|(waiting, _)| *waiting == call) {
                self.calls.remove(at);
                let answer = result.map(|()| self.view).map_err(|()| Refusal::Failed);
                self.answers_out.push((call, answer));
            }
            return self.resume(now);
        }
        let Some((_, act)) = self.act.take_if(|(under_way, _)| *under_way == ticket) else { return };
        match (act, result) {
            (DestinationAct::Record(record @ Record::Awaiting(session)), Ok(())) => {
                // The source had the disk when it first called, unless this destination waited for
                // the disk in an earlier process.
                if !matches!(self.record, Some(Record::Awaiting(past) | Record::Gone(past)) if past == session)
                {
                    self.begun = Some(session);
                }
                self.record = Some(record);
                self.doubtful = false;
                self.state = State::Preparing(session);
                self.view = View { wants: self.view.wants, ..View::default() };
                self.act(DestinationAct::Prepare);
            }
            (DestinationAct::Prepare, Ok(())) => {
                if let State::Preparing(session) = self.state {
                    self.state = State::Ready(session);
                }
            }
            (DestinationAct::Activate, Ok(())) => {
                if let State::Ready(session) = self.state {
                    self.state = State::Serving(session);
                    self.gives_up = false;
                    self.view.wants = false;
                    self.act(DestinationAct::Commit);
                }
            }
            (DestinationAct::Commit, Ok(())) => {
                if let State::Serving(Session { generation, .. }) = self.state {
                    let record = Record::Owner { generation: generation + 1, attempts: 0 };
                    self.act(DestinationAct::Record(record));
                }
            }
            (DestinationAct::Record(record @ Record::Owner { generation, .. }), Ok(())) => {
                self.record = Some(record);
                self.state = State::Owner(generation);
                self.act(DestinationAct::Settle);
            }
            (DestinationAct::Remove, Ok(())) => {
                if let Some(session) = self.awaits() {
                    self.state = State::Preparing(session);
                    self.doubtful = true;
                    // A record of a later session is never replaced by one of an earlier session.
                    let latest = self.tried.map_or(session, |tried| tried.max(session));
                    self.act(DestinationAct::Record(Record::Gone(latest)));
                }
            }
            (DestinationAct::Record(record), Ok(())) => {
                self.record = Some(record);
                self.doubtful = false;
                self.state = State::Not;
                self.view = View::default();
            }
            (DestinationAct::Settle, _) => {}
            // The host that sent the call receives an error and repeats the call.
            (_, Err(())) => self.refuse_all(),
            (DestinationAct::Forget(_), Ok(())) => {}
        }
        self.resume(now);
    }

    /// Retries the calls that wait for an action.
    fn resume(&mut self, now: Instant) {
        for (ticket, message) in std::mem::take(&mut self.calls) {
            let is_forgetting = self.forgetting.iter().any(|(_, call)| *call == ticket);
            match if is_forgetting { None } else { self.immediately(now, ticket, &message) } {
                Some(answer) => self.answers_out.push((ticket, answer)),
                None if self.is_held(ticket) => {}
                None => self.calls.push((ticket, message)),
            }
        }
        self.go_on_giving_up();
    }

    fn refuse_all(&mut self) {
        let (forgetting, waiting) = std::mem::take(&mut self.calls)
            .into_iter()
            .partition(|(ticket, _)| self.forgetting.iter().any(|(_, call)| call == ticket));
        self.calls = forgetting;
        let waiting: Vec<(Ticket, Message)> = waiting;
        self.answers_out.extend(waiting.into_iter().map(|(ticket, _)| (ticket, Err(Refusal::Failed))));
    }

    fn is_held(&self, ticket: Ticket) -> bool {
        self.held.is_some_and(|(held, _)| held == ticket)
    }

    fn answer_held(&mut self) {
        if let Some((ticket, _)) = self.held.take() {
            self.answers_out.push((ticket, Ok(self.view)));
        }
    }

    fn ticket(&mut self) -> Ticket {
        self.next += 1;
        Ticket(self.next)
    }

    fn act(&mut self, act: DestinationAct) {
        if let DestinationAct::Record(Record::Awaiting(session)) = act {
            self.tried = Some(session);
        }
        let ticket = self.ticket();
        self.act = Some((ticket, act.clone()));
        self.acts_out.push((ticket, act));
    }

    fn forget(&mut self, call: Ticket, ranges: Vec<(u64, u64)>) {
        let ticket = self.ticket();
        self.forgetting.push((ticket, call));
        self.acts_out.push((ticket, DestinationAct::Forget(ranges)));
    }
}
