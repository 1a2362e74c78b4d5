//! The host that has the disk: when it is frozen, when it is the other's, and what to do if nobody answers.
//!
//! ```text
//! record "leaving" → prepare (write through, drain, watch) → arrive ┐
//!      ┌────────────────────────────────────────────────────────────┘
//!      ├→ take changes → changed … ─┐  until the destination wants the disk, or the operator says so
//!      └────────────────────────────┘
//! freeze → settle → take changes → changed ┬→ record "away" → leave → yours … → serve what is cached → give up
//!                                          └→ (no answer in time) thaw, and go on as before
//! ```
//! Up to the record "away" every failure ends in "this host owns the disk and serves it"; from there on in "it never does again".
//!
//! Call order: any `handle_*`; then `poll_act` and `poll_call` until they have nothing; then wait for an answer, the end of an act,
//! or `poll_timeout`. One act and one call are under way at most; what was given up is not listened to any more.

use super::{Answer, Call, Message, Record, Refusal, Session, Ticket};
use crate::regions::Regions;
use crate::units::Instant;

/// First pause after a call that was lost, nanoseconds. It doubles each time.
const PAUSE_NS_MIN: u64 = 50_000_000;

/// Longest pause after a call that was lost, nanoseconds.
const PAUSE_NS_MAX: u64 = 2_000_000_000;

/// Time between looks at a destination that still reads what is cached here, nanoseconds.
const LOOK_NS: u64 = 500_000_000;

/// Changes are gathered for so long before the destination is told of them, nanoseconds.
const GATHER_NS: u64 = 50_000_000;

/// A call that takes the disk back at the destination is repeated for so long, nanoseconds.
const CANCEL_NS_MAX: u64 = 30_000_000_000;

/// What may be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceOptions {
    /// A change that waits at the destination makes this host hand over.
    pub on_demand: bool,
    /// The guest waits no longer than this for a destination that does not answer, nanoseconds.
    pub freeze_ns_max: u64,
    /// What is cached here is served to the destination after the hand-over, until it has all it wants.
    pub serves_after: bool,
}

/// What the operator wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Hand over now.
    Finish,
    /// Keep the disk.
    Cancel,
}

/// What the source's owner is to do. Each ends with [`Source::handle_done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceAct {
    /// Make this durable.
    Record(Record),
    /// Let writes go through, and nothing be dirty; then watch where the disk is changed.
    Prepare,
    /// Say what was changed since the last time: [`Source::handle_changes`], then `handle_done`.
    TakeChanges,
    /// `Role::Frozen`.
    Freeze,
    /// `Op::Settle`.
    Settle,
    /// `Role::Here`.
    Thaw,
    /// `Role::Away`, and no hold on the backing any more.
    Leave,
    /// Watch no more, and let the cache have the mode again that it had.
    Restore,
    /// Give the cache up.
    GiveUp,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The state is being written.
    Recording,
    /// Dirty data goes to the backing.
    Preparing,
    /// The destination prepares.
    Announcing,
    /// The destination pulls.
    Copying,
    /// The guest waits.
    Frozen,
    /// The disk is the other host's, which may not know yet.
    HandingOver,
    /// The other host has it, and reads what is cached here.
    Serving,
    /// It has ended: handed over.
    Over,
    /// The disk stays; the destination is being told.
    Cancelling,
    /// It has ended: the disk is this host's.
    Kept,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Act(SourceAct),
    Call(Kind),
    /// Until `due`.
    Pause(Kind),
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Arrive,
    Changed,
    Yours,
    Cancel,
    Look,
}

/// See the module's text.
pub struct Source {
    session: Session,
    options: SourceOptions,
    phase: Phase,
    step: Step,
    /// What was asked for and has not ended.
    under_way: Option<Ticket>,
    act_out: Option<(Ticket, SourceAct)>,
    call_out: Option<(Ticket, Message)>,
    next: u64,
    /// When to go on.
    due: Option<Instant>,
    pause_ns: u64,
    /// When the guest has waited for too long, or the destination has been told often enough.
    limit: Option<Instant>,
    order: Option<Order>,
    /// The destination wants the disk.
    wanted: bool,
    /// Changed, and not told to the destination.
    changed: Option<Regions>,
    /// Told to the destination, and not known to be forgotten there.
    told: Option<Regions>,
    /// Why it was kept.
    refused: Option<Refusal>,
    view: super::View,
}

impl Source {
    /// Begins an attempt; `session.attempt` is greater than in any record before.
    pub fn start(session: Session, options: SourceOptions) -> Source {
        let mut source = Source::new(session, options, Phase::Recording);
        source.act(SourceAct::Record(Record::Leaving(session)));
        source
    }

    /// Goes on after a restart whose state said [`Record::Away`] and not taken. The disk is away already, and nothing is cached.
    pub fn resume_away(session: Session) -> Source {
        let options = SourceOptions { on_demand: false, freeze_ns_max: 0, serves_after: false };
        let mut source = Source::new(session, options, Phase::HandingOver);
        source.call(Kind::Yours);
        source
    }

    fn new(session: Session, options: SourceOptions, phase: Phase) -> Source {
        Source {
            session,
            options,
            phase,
            step: Step::Nothing,
            under_way: None,
            act_out: None,
            call_out: None,
            next: 0,
            due: None,
            pause_ns: PAUSE_NS_MIN,
            limit: None,
            order: None,
            wanted: false,
            changed: None,
            told: None,
            refused: None,
            view: super::View::default(),
        }
    }

    /// Which attempt it is.
    pub fn session(&self) -> Session {
        self.session
    }

    /// How far it is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// What the destination said last.
    pub fn view(&self) -> super::View {
        self.view
    }

    /// What the destination refused, if that is why the disk was kept.
    pub fn refused(&self) -> Option<Refusal> {
        self.refused
    }

    /// It has nothing to do any more.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over | Phase::Kept) && self.step == Step::Nothing
    }

    /// The next act, to be told of in `handle_done`.
    pub fn poll_act(&mut self) -> Option<(Ticket, SourceAct)> {
        self.act_out.take()
    }

    /// The next call; its answer, or that there was none, goes to `handle_answer`.
    pub fn poll_call(&mut self) -> Option<(Ticket, Message)> {
        self.call_out.take()
    }

    /// When `handle_timeout` wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.due.into_iter().chain(self.limit).min()
    }

    /// The operator has a wish. False if it comes too late.
    pub fn handle_order(&mut self, now: Instant, order: Order) -> bool {
        use Phase::*;
        match (order, self.phase) {
            (_, HandingOver | Serving | Over | Cancelling | Kept) => return false,
            (Order::Cancel, _) if matches!(self.step, Step::Act(SourceAct::Record(Record::Away { .. }))) => {
                return false;
            }
            _ => self.order = Some(order),
        }
        match (order, self.step) {
            // What was asked for of the engine or the state must end first; calls need not.
            (Order::Cancel, Step::Act(_)) => {}
            (Order::Cancel, _) => self.keep(),
            (Order::Finish, Step::Pause(_) | Step::Call(Kind::Changed)) if self.phase == Copying => {
                self.step(now, false);
            }
            _ => {}
        }
        true
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.limit.is_some_and(|at| at <= now) {
            self.limit = None;
            match self.phase {
                Phase::Frozen => self.thaw(),
                Phase::Cancelling => self.kept(),
                _ => {}
            }
        }
        if self.due.is_some_and(|at| at <= now) {
            self.due = None;
            if let Step::Pause(kind) = self.step {
                match kind {
                    Kind::Changed => self.act(SourceAct::TakeChanges),
                    kind => self.call(kind),
                }
            }
        }
    }

    /// What was changed, in answer to [`SourceAct::TakeChanges`]. `None`: nothing.
    pub fn handle_changes(&mut self, changes: Option<Regions>) {
        self.changed = joined(self.changed.take(), changes);
    }

    /// An act has ended. `Err`: nothing was done.
    pub fn handle_done(&mut self, now: Instant, ticket: Ticket, result: Result<(), ()>) {
        if self.under_way != Some(ticket) {
            return;
        }
        let Step::Act(act) = self.step else { return };
        self.under_way = None;
        let cancelled = self.order == Some(Order::Cancel);
        match (act, result) {
            (SourceAct::Record(Record::Away { taken: true, .. }), _) => self.act(SourceAct::GiveUp),
            (SourceAct::Record(Record::Away { .. }), Ok(())) => {
                self.phase = Phase::HandingOver;
                self.limit = None;
                self.act(SourceAct::Leave);
            }
            // Perhaps it was written nevertheless: only when the state says otherwise for certain may the guest go on.
            (SourceAct::Record(Record::Away { .. } | Record::Leaving(_)), Err(()))
                if self.phase == Phase::Frozen =>
            {
                self.act(SourceAct::Record(Record::Leaving(self.session)));
            }
            (SourceAct::Record(Record::Leaving(_)), Ok(())) if self.phase == Phase::Frozen => self.thaw(),
            (SourceAct::Record(Record::Owner { .. }), Err(())) => {
                // It says "leaving", which is true for the time being: a restart would try again.
                self.act(SourceAct::Restore);
            }
            (SourceAct::Record(Record::Owner { .. }), Ok(())) => self.act(SourceAct::Restore),
            (SourceAct::Restore, _) => self.tell_kept(now),
            (SourceAct::Leave, _) => self.call(Kind::Yours),
            (SourceAct::GiveUp, _) => {
                self.phase = Phase::Over;
                self.step = Step::Nothing;
            }
            (SourceAct::Thaw, _) => {
                self.phase = Phase::Copying;
                if cancelled {
                    return self.keep();
                }
                self.pause(now, Kind::Changed);
            }
            (_, _) if cancelled => self.keep(),
            (SourceAct::Record(Record::Leaving(_)), Ok(())) => {
                self.phase = Phase::Preparing;
                self.act(SourceAct::Prepare);
            }
            (SourceAct::Prepare, Ok(())) => {
                self.phase = Phase::Announcing;
                self.call(Kind::Arrive);
            }
            (SourceAct::TakeChanges, Ok(())) => self.call(Kind::Changed),
            (SourceAct::Freeze, Ok(())) => self.act(SourceAct::Settle),
            (SourceAct::Settle, Ok(())) => self.act(SourceAct::TakeChanges),
            (SourceAct::Freeze | SourceAct::Settle | SourceAct::TakeChanges, Err(()))
                if self.phase == Phase::Frozen =>
            {
                self.thaw();
            }
            (_, _) => self.keep(),
        }
    }

    /// A call was answered; `None`: no answer came, and whether it was heard is not known.
    pub fn handle_answer(&mut self, now: Instant, ticket: Ticket, answer: Option<Answer>) {
        if self.under_way != Some(ticket) {
            return;
        }
        let Step::Call(kind) = self.step else { return };
        self.under_way = None;
        if let Some(Ok(view)) = answer {
            self.view = view;
            self.wanted = view.wants;
            self.pause_ns = PAUSE_NS_MIN;
        }
        match (kind, answer) {
            (Kind::Cancel, Some(Ok(_) | Err(Refusal::NotAwaited))) => self.kept(),
            (Kind::Yours, Some(Ok(_))) if self.options.serves_after => {
                self.phase = Phase::Serving;
                self.look_later(now);
            }
            (Kind::Yours, Some(Ok(_))) => self.end_handed_over(),
            (Kind::Yours, Some(Err(Refusal::Owner(generation)))) if generation > self.session.generation => {
                self.end_handed_over();
            }
            (Kind::Look, Some(Ok(view))) if view.done => self.end_handed_over(),
            (Kind::Look, Some(Ok(_))) => self.look_later(now),
            // It has it, and wants nothing more of this session.
            (Kind::Look, Some(Err(_))) => self.end_handed_over(),
            (Kind::Arrive, Some(Ok(_))) => {
                self.phase = Phase::Copying;
                self.act(SourceAct::TakeChanges);
            }
            (Kind::Changed, Some(Ok(_))) => {
                let had_some = self.told.take().is_some();
                self.step(now, had_some);
            }
            // What this host knows is old: it was handed over, and the state that said so is gone. It must not be served here.
            (Kind::Arrive | Kind::Changed, Some(Err(Refusal::Owner(generation))))
                if generation > self.session.generation =>
            {
                self.limit = None;
                match std::mem::replace(&mut self.phase, Phase::Frozen) {
                    Phase::Frozen => self.step(now, false),
                    _ => self.act(SourceAct::Freeze),
                }
            }
            // It has begun anew, or another attempt was made from elsewhere.
            (Kind::Arrive | Kind::Changed, Some(Err(refusal)))
                if self.phase != Phase::Frozen && refusal != Refusal::Failed =>
            {
                self.refused = Some(refusal);
                self.keep();
            }
            (_, _) => self.pause(now, kind),
        }
    }

    /// The destination has heard of all changes that were taken, of some just now.
    fn step(&mut self, now: Instant, had_some: bool) {
        if self.phase == Phase::Frozen {
            let record = Record::Away { session: self.session, taken: false };
            return self.act(SourceAct::Record(record));
        }
        let is_wanted = self.wanted && self.options.on_demand;
        if is_wanted || self.order == Some(Order::Finish) {
            self.phase = Phase::Frozen;
            self.limit = Some(now + self.options.freeze_ns_max);
            return self.act(SourceAct::Freeze);
        }
        // A destination that is told nothing new holds its answer back, unless it wants the disk.
        match (had_some, self.wanted) {
            (true, _) => self.pause_for(now, Kind::Changed, GATHER_NS),
            (false, true) => self.pause_for(now, Kind::Changed, LOOK_NS),
            (false, false) => self.act(SourceAct::TakeChanges),
        }
    }

    fn thaw(&mut self) {
        self.limit = None;
        // Calls in flight and acts that have not ended count as not done.
        self.wanted = false;
        if let Step::Act(SourceAct::Record(_)) = self.step
            && self.under_way.is_some()
        {
            // How that ends decides.
            return;
        }
        self.act(SourceAct::Thaw);
    }

    /// The disk stays here.
    fn keep(&mut self) {
        if self.phase == Phase::Frozen {
            self.order = Some(Order::Cancel);
            return self.thaw();
        }
        self.phase = Phase::Cancelling;
        self.limit = None;
        let Session { generation, attempt } = self.session;
        self.act(SourceAct::Record(Record::Owner { generation, attempts: attempt }));
    }

    fn tell_kept(&mut self, now: Instant) {
        self.limit = Some(now + CANCEL_NS_MAX);
        self.call(Kind::Cancel);
    }

    fn kept(&mut self) {
        self.phase = Phase::Kept;
        self.step = Step::Nothing;
        (self.limit, self.due, self.under_way, self.call_out) = (None, None, None, None);
    }

    fn end_handed_over(&mut self) {
        self.due = None;
        self.act(SourceAct::Record(Record::Away { session: self.session, taken: true }));
    }

    fn look_later(&mut self, now: Instant) {
        self.pause_for(now, Kind::Look, LOOK_NS);
    }

    fn pause(&mut self, now: Instant, kind: Kind) {
        self.pause_for(now, kind, self.pause_ns);
        self.pause_ns = (self.pause_ns * 2).min(PAUSE_NS_MAX);
    }

    fn pause_for(&mut self, now: Instant, kind: Kind, ns: u64) {
        self.step = Step::Pause(kind);
        self.due = Some(now + ns);
    }

    fn ticket(&mut self) -> Ticket {
        self.next += 1;
        self.due = None;
        self.under_way = Some(Ticket(self.next));
        Ticket(self.next)
    }

    fn act(&mut self, act: SourceAct) {
        self.step = Step::Act(act);
        self.call_out = None;
        self.act_out = Some((self.ticket(), act));
    }

    fn call(&mut self, kind: Kind) {
        self.step = Step::Call(kind);
        let call = match kind {
            Kind::Arrive => Call::Arrive,
            Kind::Changed => {
                self.told = joined(self.told.take(), self.changed.take());
                match &self.told {
                    // The guest waits, and an empty list would be held back.
                    None if self.phase == Phase::Frozen => Call::Look,
                    told => Call::Changed(told.iter().flat_map(Regions::ranges).collect()),
                }
            }
            Kind::Yours => Call::Yours,
            Kind::Cancel => Call::Cancel,
            Kind::Look => Call::Look,
        };
        self.call_out = Some((self.ticket(), Message { session: self.session, call }));
    }
}

fn joined(one: Option<Regions>, other: Option<Regions>) -> Option<Regions> {
    match (one, other) {
        (Some(mut one), Some(other)) => {
            one.insert_those_of(&other);
            Some(one)
        }
        (one, other) => one.or(other),
    }
}
