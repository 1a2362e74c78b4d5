//! The host that is to have the disk: it awaits it, forgets what changes, and serves once it is told that the disk is its own.
//!
//! Of a disk of which nothing was heard it records that it awaits it before it says so; so a restart finds out, believes nothing of
//! what flash holds, and answers the source's calls as before. Whatever is cached here of an awaited disk was read from the owner since
//! this machine was made, and everything that the owner changed after that is forgotten before `changed` is answered.
//!
//! A disk that was given up here, and is handed over in that very attempt all the same, is taken: who says `yours` will never serve it again.
//!
//! Call order: any `handle_*`; then `poll_act` and `poll_answer` until they have nothing. One act is under way at most, besides any
//! number of `Forget`s, which end in any order.

use super::{Answer, Call, Message, Record, Refusal, Session, Ticket, View};
use crate::units::Instant;

/// A question to which nothing new is to be said is held back for so long, nanoseconds.
const HOLD_NS: u64 = 1_000_000_000;

/// Calls that wait for their answers, at most; the oldest is refused for the newest.
const CALLS_MAX: usize = 16;

/// What the destination's owner is to do. Each ends with [`Destination::handle_done`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DestinationAct {
    /// Make this durable.
    Record(Record),
    /// The disk is there, in `Role::Standby`, with an empty cache into which it may pull. It may be there already, for an earlier
    /// session: nothing is pulled for that one any more, and nothing is left of what was. In a life that began with the record
    /// `Awaiting`, the backing is flushed first: the life before it may have served the disk, and have acknowledged changes, and a
    /// flush in standby is answered at once.
    Prepare,
    /// `Op::Forget` of these ranges of sectors, and later pull them again if they were there. An error: not all was forgotten.
    Forget(Vec<(u64, u64)>),
    /// The backing is this host's: `Role::Here`.
    Activate,
    /// Everything that was forgotten is durably so.
    Commit,
    /// The mode that the cache is to have; whatever is pulled after a hand-over is pulled now. It cannot fail.
    Settle,
    /// Take the disk out of service: it does not come.
    Remove,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing is known of the disk, or it is another's: what the record says.
    Not,
    /// Awaited; the disk is being prepared.
    Preparing(Session),
    /// Awaited, and in standby.
    Ready(Session),
    /// It is this host's, and serves; that is not durable yet.
    Serving(Session),
    /// It is this host's, of this generation.
    Owner(u64),
}

/// See the module's text.
pub struct Destination {
    state: State,
    record: Option<Record>,
    /// The session that this life was the first to await.
    begun: Option<Session>,
    /// It may be on record that the disk did not come, though it is awaited.
    doubtful: bool,
    /// It is not to come, once what is being done has ended.
    gives_up: bool,
    /// The latest session that was to be recorded, and may have been, as awaited.
    tried: Option<Session>,
    act: Option<(Ticket, DestinationAct)>,
    /// Acts to be polled.
    acts_out: Vec<(Ticket, DestinationAct)>,
    answers_out: Vec<(Ticket, Answer)>,
    /// `Forget`s under way, each with the call that it serves.
    forgetting: Vec<(Ticket, Ticket)>,
    /// Calls that wait for what is being done.
    calls: Vec<(Ticket, Message)>,
    /// A call that is held back until then.
    held: Option<(Ticket, Instant)>,
    next: u64,
    view: View,
}

impl Destination {
    /// Of a disk of which the state says this. One that is awaited is prepared anew.
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
                // What was changed here since the hand-over is not known any more: nothing is read from the former owner.
                destination.view.done = true;
            }
            Some(Record::Away { .. } | Record::Gone(_)) | None => {}
        }
        destination
    }

    /// The next act, to be told of in `handle_done`.
    pub fn poll_act(&mut self) -> Option<(Ticket, DestinationAct)> {
        if self.acts_out.is_empty() { None } else { Some(self.acts_out.remove(0)) }
    }

    /// The next answer, and to which call.
    pub fn poll_answer(&mut self) -> Option<(Ticket, Answer)> {
        self.answers_out.pop()
    }

    /// When `handle_timeout` wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.held.map(|(_, at)| at)
    }

    /// Of a disk that is about to be served: is all known that was changed here since the hand-over? A life before this one may have served
    /// it, and crashed before that was on record; then the former owner's flash may be older than the backing.
    pub fn knows_changes(&self) -> bool {
        matches!((self.record, self.begun), (Some(Record::Awaiting(now)), Some(begun)) if now == begun)
    }

    /// In which session the disk is awaited, if it is.
    pub fn awaits(&self) -> Option<Session> {
        match self.state {
            State::Preparing(session) | State::Ready(session) => Some(session),
            _ => None,
        }
    }

    /// Is the disk nothing to this host, as far as it knows, and nothing being done about it? A call may change that.
    pub fn is_idle(&self) -> bool {
        self.state == State::Not && self.act.is_none()
    }

    /// Does this host own the disk, durably?
    pub fn is_owner(&self) -> bool {
        matches!(self.state, State::Owner(_))
    }

    /// A guest's change waits for the disk.
    pub fn handle_wanted(&mut self) {
        self.view.wants = self.awaits().is_some();
        self.answer_held();
    }

    /// How far pulling is.
    pub fn handle_progress(&mut self, pulled_bytes: u64, left_bytes: u64, done: bool) {
        self.view = View { pulled_bytes, left_bytes, done, ..self.view };
    }

    /// The disk was removed here, or the operator says that it does not come.
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

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.held.is_some_and(|(_, at)| at <= now) {
            self.answer_held();
        }
    }

    /// The source calls. `ticket` names the call in its answer: of this life of the machine, each is new.
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

    /// The answer to a call, if it can be given; or what has to be done for it begins.
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
            // Whoever calls has been overtaken: his disk was taken, and perhaps handed on. He may not have heard that it was.
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
                    // One of an earlier attempt, or that was repeated: nobody waits for it any more.
                    self.answer_held();
                    self.held = Some((ticket, now + HOLD_NS));
                }
                None
            }
            (Call::Look, State::Ready(awaited)) if awaited == session => Some(Ok(self.view)),
            (Call::Yours, State::Ready(awaited)) if awaited == session => {
                // Whoever says so has been told that all is forgotten. What is being forgotten yet is so for a call that was repeated, and
                // waits perhaps for a read that nobody answers before the disk is this host's.
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
            // It is about to be awaited.
            (Call::Cancel, State::Not) if self.act.is_some() => None,
            (Call::Cancel, State::Not) => Some(Ok(self.view)),
            (_, State::Serving(taken)) => Some(Err(Refusal::Owner(taken.generation + 1))),
            _ => Some(Err(Refusal::NotAwaited)),
        }
    }

    fn await_first(&mut self, session: Session) -> Option<Answer> {
        match self.record {
            // A call that was long on its way: who has the disk now is further than that.
            Some(Record::Away { session: past, .. } | Record::Gone(past)) if session <= past => {
                Some(Err(Refusal::NotAwaited))
            }
            // A later one may be on record, though writing it failed.
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

    /// An act has ended.
    pub fn handle_done(&mut self, now: Instant, ticket: Ticket, result: Result<(), ()>) {
        if let Some(at) = self.forgetting.iter().position(|(act, _)| *act == ticket) {
            let (_, call) = self.forgetting.swap_remove(at);
            // A call that nobody remembers was answered already.
            if let Some(at) = self.calls.iter().position(|(waiting, _)| *waiting == call) {
                self.calls.remove(at);
                let answer = result.map(|()| self.view).map_err(|()| Refusal::Failed);
                self.answers_out.push((call, answer));
            }
            return self.go_on(now);
        }
        let Some((_, act)) = self.act.take_if(|(under_way, _)| *under_way == ticket) else { return };
        match (act, result) {
            (DestinationAct::Record(record @ Record::Awaiting(session)), Ok(())) => {
                // The source had the disk when it first asked; not so if the disk was awaited before, and perhaps given up.
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
                    // No record is replaced by one of an earlier session.
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
            // Whoever asked for it is told, and asks again.
            (_, Err(())) => self.refuse_all(),
            (DestinationAct::Forget(_), Ok(())) => {}
        }
        self.go_on(now);
    }

    /// Looks at the calls that wait again.
    fn go_on(&mut self, now: Instant) {
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
