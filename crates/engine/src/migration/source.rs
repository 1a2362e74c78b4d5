//! The source of a migration: decides when the disk is frozen and handed over, and repeats calls to
//! the destination that were lost.
//!
//! ```text
//! record "leaving" → prepare (write through, drain, watch) → arrive ┐
//!      ┌────────────────────────────────────────────────────────────┘
//!      ├→ take changes → changed … ─┐  until the destination wants the disk, or the operator says so
//!      └────────────────────────────┘
//! freeze → settle → take changes → changed ┬→ record "away" → leave → yours … → serve what is cached → give up
//!                                          └→ (no answer in time) thaw, and go on as before
//! ```
//! The calls are the variants of [`Call`], and the records those of [`Record`]. *Watch* means that
//! changes by guests are recorded, and the source tells the destination about them with `changed`.
//! In a *frozen* disk no request is in flight, and new requests wait. *Settle* flushes the backing.
//!
//! Until the record "away" (the departure record) is written, the source keeps the disk after any
//! failure. From then on, this host never serves the disk again.
//!
//! After any `handle_*`, call `poll_act` and `poll_call` until they return nothing. Then wait for
//! an answer, the end of an action, or `poll_timeout`. At most one action and one call are in
//! progress. Results of abandoned actions and calls are ignored.

use super::{Answer, Call, Message, Record, Refusal, Session, Ticket};
use crate::regions::Regions;
use crate::units::Instant;

/// Pause after the first lost call, nanoseconds. The pause doubles with each further lost call.
const PAUSE_NS_MIN: u64 = 50_000_000;

/// Maximum pause after a lost call, nanoseconds.
const PAUSE_NS_MAX: u64 = 2_000_000_000;

/// Interval of progress calls to a destination that still reads this host's cache, nanoseconds.
/// With the same interval, the source sends changes while it waits for the operator's order to hand
/// over.
const LOOK_NS: u64 = 500_000_000;

/// Time during which changes are collected before the destination is notified, nanoseconds.
const GATHER_NS: u64 = 50_000_000;

/// Time during which the call that cancels the hand-over is repeated, nanoseconds.
const CANCEL_NS_MAX: u64 = 30_000_000_000;

/// Settings of a migration that affect its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceOptions {
    /// True if a guest's write or other change that waits at the destination triggers the
    /// hand-over.
    pub on_demand: bool,
    /// Maximum time for which the guest's requests wait for an answer of the destination,
    /// nanoseconds. After this time the source ends the freeze, and the guest's requests continue
    /// on the source.
    pub freeze_ns_max: u64,
    /// True if this host's cache stays readable for the destination after the hand-over, until the
    /// destination has pulled all data that it needs.
    pub serves_after: bool,
}

/// An order of the operator about a migration in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Hand the disk over now, even if the destination has not asked for it.
    Finish,
    /// Keep the disk on the source, and end the migration.
    Cancel,
}

/// An action that the source requests from its caller (the daemon on the source host). When an
/// action has ended, the caller calls [`Source::handle_done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceAct {
    /// Store this record durably.
    Record(Record),
    /// Write through and drain the cache. Then record which regions of the disk change.
    Prepare,
    /// Report the changes since the last report with [`Source::handle_changes`], then call
    /// `handle_done`.
    TakeChanges,
    /// Set the disk's role to `Role::Frozen`.
    Freeze,
    /// Run `Op::Settle`, which flushes the backing.
    Settle,
    /// Set the disk's role to `Role::Here`, because this host keeps the disk.
    Thaw,
    /// Set the disk's role to `Role::Away`, and release the backing.
    Leave,
    /// Stop recording which regions change, and restore the cache's mode from before the migration.
    Restore,
    /// Release this host's cache of the disk, which the destination no longer reads.
    GiveUp,
}

/// Phase of the migration at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The record [`Record::Leaving`] is being written to stable storage.
    Recording,
    /// Dirty data is being destaged.
    Preparing,
    /// The destination is preparing for the disk.
    Announcing,
    /// The destination is pulling cached data.
    Copying,
    /// The guest's requests wait for the hand-over.
    Frozen,
    /// The destination owns the disk, but may not know that yet.
    HandingOver,
    /// The destination has the disk, and reads this host's cache.
    Serving,
    /// The migration has ended, and the disk was handed over.
    Over,
    /// The disk is not handed over, and the destination is being notified.
    Cancelling,
    /// The migration has ended, and this host keeps the disk.
    Kept,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Act(SourceAct),
    Call(Kind),
    /// The source waits until `due`.
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

/// The state machine of a migration's source.
pub struct Source {
    session: Session,
    options: SourceOptions,
    phase: Phase,
    step: Step,
    /// The action or call in progress.
    under_way: Option<Ticket>,
    act_out: Option<(Ticket, SourceAct)>,
    call_out: Option<(Ticket, Message)>,
    next: u64,
    /// Time at which the present pause ends; `None` if there is no pause.
    due: Option<Instant>,
    pause_ns: u64,
    /// Time at which the freeze times out, or the repetition of a cancel ends.
    limit: Option<Instant>,
    order: Option<Order>,
    /// True if a guest's write or other change waits at the destination, according to its last
    /// answer.
    wanted: bool,
    /// Changed regions of which the destination was not notified yet.
    changed: Option<Regions>,
    /// Regions of which the destination was notified, but whose invalidation the destination has
    /// not confirmed yet.
    told: Option<Regions>,
    /// The refusal that made this host keep the disk.
    refused: Option<Refusal>,
    view: super::View,
}

impl Source {
    /// Begins an attempt to hand the disk over. `session.attempt` must be greater than in any
    /// earlier record of this host.
    pub fn start(session: Session, options: SourceOptions) -> Source {
        let mut source = Source::new(session, options, Phase::Recording);
        source.act(SourceAct::Record(Record::Leaving(session)));
        source
    }

    /// Continues after a restart with an unconfirmed [`Record::Away`]. The disk has already left,
    /// and this host caches nothing of it.
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

    /// Returns the session, which names this attempt in all calls.
    pub fn session(&self) -> Session {
        self.session
    }

    /// Returns the present phase of the migration.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns the destination's last reported progress.
    pub fn view(&self) -> super::View {
        self.view
    }

    /// Returns the destination's refusal that made this host keep the disk, if any.
    pub fn refused(&self) -> Option<Refusal> {
        self.refused
    }

    /// Returns true if the migration has ended.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over | Phase::Kept) && self.step == Step::Nothing
    }

    /// Returns the next action that the caller must execute; `None` if there is none now. The
    /// caller passes the result to `handle_done`.
    pub fn poll_act(&mut self) -> Option<(Ticket, SourceAct)> {
        self.act_out.take()
    }

    /// Returns the next call that the caller must send to the destination; `None` if there is none
    /// now. The caller passes the answer, or `None` for a lost call, to `handle_answer`.
    pub fn poll_call(&mut self) -> Option<(Ticket, Message)> {
        self.call_out.take()
    }

    /// Returns the time at which the caller must call `handle_timeout`; `None` if there is none.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.due.into_iter().chain(self.limit).min()
    }

    /// Handles an operator's order. Returns false, without effect, if the migration is past the
    /// point at which the order is possible.
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
            // Acts of the engine and writes of the record must end first, but calls need not.
            (Order::Cancel, Step::Act(_)) => {}
            (Order::Cancel, _) => self.keep(),
            (Order::Finish, Step::Pause(_) | Step::Call(Kind::Changed)) if self.phase == Copying => {
                self.step(now, false);
            }
            _ => {}
        }
        true
    }

    /// Continues the migration if a pause has ended. If a time limit is reached, thaws the disk or
    /// ends a cancellation.
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

    /// Handles the changes that [`SourceAct::TakeChanges`] requested. `None` means that nothing
    /// changed.
    pub fn handle_changes(&mut self, changes: Option<Regions>) {
        self.changed = joined(self.changed.take(), changes);
    }

    /// Handles the result of the action that has this ticket. `Err` means that the action failed. A
    /// record may have been written nevertheless.
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
            // The record may have been written nevertheless. The guest may continue only when the
            // record certainly has different content.
            (SourceAct::Record(Record::Away { .. } | Record::Leaving(_)), Err(()))
                if self.phase == Phase::Frozen =>
            {
                self.act(SourceAct::Record(Record::Leaving(self.session)));
            }
            (SourceAct::Record(Record::Leaving(_)), Ok(())) if self.phase == Phase::Frozen => self.thaw(),
            (SourceAct::Record(Record::Owner { .. }), Err(())) => {
                // The record "leaving" is still correct: after a restart, the source would try
                // again.
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

    /// Handles the answer to a call. `None` means that no answer arrived. It is then unknown
    /// whether the call arrived.
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
            // The destination has the disk, and does not need this session any more.
            (Kind::Look, Some(Err(_))) => self.end_handed_over(),
            (Kind::Arrive, Some(Ok(_))) => {
                self.phase = Phase::Copying;
                self.act(SourceAct::TakeChanges);
            }
            (Kind::Changed, Some(Ok(_))) => {
                let had_some = self.told.take().is_some();
                self.step(now, had_some);
            }
            // The state of this host is outdated: the disk was handed over, and this host has lost
            // the record of the hand-over. So this host must not serve the disk.
            (Kind::Arrive | Kind::Changed, Some(Err(Refusal::Owner(generation))))
                if generation > self.session.generation =>
            {
                self.limit = None;
                match std::mem::replace(&mut self.phase, Phase::Frozen) {
                    Phase::Frozen => self.step(now, false),
                    _ => self.act(SourceAct::Freeze),
                }
            }
            // The destination was restarted, or the disk was offered from another host.
            (Kind::Arrive | Kind::Changed, Some(Err(refusal)))
                if self.phase != Phase::Frozen && refusal != Refusal::Failed =>
            {
                self.refused = Some(refusal);
                self.keep();
            }
            (_, _) => self.pause(now, kind),
        }
    }

    /// Continues after the destination has confirmed all reported changes. `had_some` is true if
    /// the last confirmed report contained changes.
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
        // The answer of a destination without new ranges is delayed, unless the destination wants
        // the disk.
        match (had_some, self.wanted) {
            (true, _) => self.pause_for(now, Kind::Changed, GATHER_NS),
            (false, true) => self.pause_for(now, Kind::Changed, LOOK_NS),
            (false, false) => self.act(SourceAct::TakeChanges),
        }
    }

    fn thaw(&mut self) {
        self.limit = None;
        // Calls in flight and acts in progress count as not done.
        self.wanted = false;
        if let Step::Act(SourceAct::Record(_)) = self.step
            && self.under_way.is_some()
        {
            // The result of the record's write decides.
            return;
        }
        self.act(SourceAct::Thaw);
    }

    /// Keeps the disk on this host.
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
                    // The guest waits, and the answer to an empty list of changes would be delayed.
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
