//! The source of a migration: executes the actions of the migration state machine, sends its calls,
//! and reports the progress.

use std::sync::Arc;
use std::time::Duration;

use hob_control::peer::{Peer, PeerError, call_path};
use hob_control::{CallAnswer, CarryMode, CarrySession, MigrationStart, MigrationState};
use hob_engine::migration::{
    Answer, Message, Order, Phase, Refusal as Refused, Session, Source, SourceAct, Ticket, View,
};
use hob_engine::regions::Regions;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::super::registry::OperationGuard;
use super::Migrations;
use super::flow::Bandwidth;
use super::status::Shared;
use super::{Clock, calls, data, list};
use crate::background::spawn;

/// Maximum time without an answer of the destination while the destination reads this host's cache
/// after the hand-over. After this time, this host no longer serves its cached data.
const SERVING_SILENCE_MAX: Duration = Duration::from_secs(60);

/// Maximum time that this host serves its cached data after the hand-over.
const SERVING_MAX: Duration = Duration::from_secs(4 * 3600);

/// Input of the source's task.
#[derive(Debug)]
pub(super) enum Input {
    /// The result of an action that the state machine requested. The last field has the changed
    /// regions, if the action was to read them.
    Acted(Ticket, Result<(), String>, Option<Box<Regions>>),
    /// The answer to a call, or its failure.
    Answered(Ticket, Result<CallAnswer, PeerError>),
    /// A command of the operator. The channel gets false if it is too late for the command.
    Order(Order, oneshot::Sender<bool>),
}

/// A migration from this host.
pub(super) struct Leaving {
    pub(super) migrations: Arc<Migrations>,
    pub(super) name: String,
    pub(super) lineage: String,
    pub(super) plan: MigrationStart,
    pub(super) shared: Arc<Shared>,
    pub(super) bandwidth: Arc<Bandwidth>,
    /// Address of the destination host.
    pub(super) to: (String, u16),
    pub(super) tls: hob_control::ClientTls,
}

/// Kind of this host's last call to the destination, as far as the handling of the answer depends
/// on the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Look,
    Yours,
    Other,
}

/// State of the source's task.
struct Task {
    leaving: Arc<Leaving>,
    source: Source,
    clock: Clock,
    sender: mpsc::UnboundedSender<Input>,
    /// Two connections to the destination, because one may still be busy with an abandoned call.
    peers: [Arc<tokio::sync::Mutex<Peer>>; 2],
    /// The task of the call to the destination that is in progress.
    call: Option<JoinHandle<()>>,
    /// Kind of the call in progress.
    asked: Asked,
    /// Tasks that run beside the migration's task, such as the one that keeps data connections
    /// ready.
    helpers: Vec<JoinHandle<()>>,
    cancelled: bool,
    frozen_at: Option<Instant>,
    preparing_since: Option<Instant>,
    serving: Option<(Instant, Instant)>,
}

impl Leaving {
    /// Returns the session parameters for a call's path.
    pub(super) fn session(&self, session: Session) -> CarrySession {
        let Session { generation, attempt } = session;
        CarrySession { generation, attempt, lineage: self.lineage.clone() }
    }

    pub(super) fn peer(&self) -> Peer {
        Peer::new(self.to.0.clone(), self.to.1, self.tls.clone())
    }
}

/// Runs the source's state machine to its end. Holds the disk's operation guard for this time.
pub(super) async fn run(
    leaving: Leaving,
    source: Source,
    guard: Option<OperationGuard>,
    sender: mpsc::UnboundedSender<Input>,
    mut inputs: mpsc::UnboundedReceiver<Input>,
) {
    let leaving = Arc::new(leaving);
    let mut task = Task {
        peers: [(); 2].map(|()| Arc::new(tokio::sync::Mutex::new(leaving.peer()))),
        leaving,
        source,
        clock: Clock::start(),
        sender,
        call: None,
        asked: Asked::Other,
        helpers: Vec::new(),
        cancelled: false,
        frozen_at: None,
        preparing_since: None,
        serving: None,
    };
    while !task.source.is_over() {
        task.begin_what_is_due();
        task.show();
        if task.source.is_over() {
            break;
        }
        tokio::select! {
            Some(input) = inputs.recv() => task.take(input),
            () = task.clock.sleep_until(task.source.poll_timeout()) => {
                let now = task.clock.now();
                task.source.handle_timeout(now);
            }
        }
    }
    task.helpers.iter().chain(&task.call).for_each(JoinHandle::abort);
    // Shows the effect of the input that was handled last.
    task.show();
    task.end();
    drop(guard);
}

impl Task {
    fn begin_what_is_due(&mut self) {
        while let Some((ticket, act)) = self.source.poll_act() {
            self.note_act(act);
            let (leaving, sender) = (self.leaving.clone(), self.sender.clone());
            spawn(async move {
                let (result, changes) = leaving.act(act).await;
                // The task may have ended with the daemon.
                let _ = sender.send(Input::Acted(ticket, result, changes));
            });
        }
        while let Some((ticket, message)) = self.source.poll_call() {
            self.call(ticket, &message);
        }
    }

    fn call(&mut self, ticket: Ticket, message: &Message) {
        use hob_engine::migration::Call;
        // The task does not wait for an abandoned call, which may still use a connection.
        let idle = self.peers.iter().position(|peer| peer.try_lock().is_ok());
        if let (Some(before), None) = (self.call.take(), idle) {
            before.abort();
        }
        self.asked = match message.call {
            Call::Look => Asked::Look,
            Call::Yours => Asked::Yours,
            _ => Asked::Other,
        };
        let wait_max = Duration::from_secs(match message.call {
            Call::Arrive => 25,
            Call::Changed(_) | Call::Yours => 10,
            Call::Cancel | Call::Look => 5,
        });
        let session = self.leaving.session(message.session);
        let path = call_path(&self.leaving.name, calls::name(&message.call), &session, "");
        let body = match &message.call {
            Call::Arrive => self.leaving.arrival(),
            // A former owner may no longer know the disk's settings.
            Call::Yours => Ok(self.leaving.arrival().unwrap_or_default()),
            Call::Changed(ranges) => Ok(calls::encode_ranges(ranges)),
            _ => Ok(Vec::new()),
        };
        if matches!(message.call, Call::Arrive) && self.helpers.is_empty() {
            self.helpers = vec![
                spawn(data::keep_connected(self.leaving.clone(), message.session, data::As::Owner)),
                spawn(list::send(self.leaving.clone(), message.session)),
            ];
            // Connects early, so that no guest waits for the connection.
            let (peer, look) = (self.peers[1].clone(), call_path(&self.leaving.name, "look", &session, ""));
            spawn(async move { peer.lock().await.call(&look, Vec::new(), Duration::from_secs(5)).await });
        }
        let (peer, sender) = (self.peers[idle.unwrap_or(0)].clone(), self.sender.clone());
        self.call = Some(spawn(async move {
            let answer = match body {
                Ok(body) => peer.lock().await.call(&path, body, wait_max).await,
                Err(error) => Err(PeerError::Lost(error.to_string())),
            };
            let _ = sender.send(Input::Answered(ticket, answer));
        }));
    }

    fn take(&mut self, input: Input) {
        let now = self.clock.now();
        match input {
            Input::Acted(ticket, result, changes) => {
                if let Err(why) = &result {
                    tracing::warn!("{}: {why}", self.leaving.name);
                    self.leaving.shared.trouble(why.clone());
                }
                if result.is_ok() && changes.is_some() {
                    self.source.handle_changes(changes.map(|changes| *changes));
                }
                self.source.handle_done(now, ticket, result.map_err(drop));
            }
            Input::Answered(ticket, answer) => {
                let answer = self.read(answer);
                self.source.handle_answer(now, ticket, answer);
            }
            Input::Order(order, in_time) => {
                let is_taken = self.source.handle_order(now, order);
                if is_taken && order == Order::Cancel {
                    self.cancelled = true;
                    if self.source.phase() == Phase::Preparing {
                        self.leaving.clone().stop_draining();
                    }
                }
                let _ = in_time.send(is_taken);
            }
        }
    }

    /// Converts the destination's answer, or the failure of a call, for the state machine. Returns
    /// `None` if the state machine must not handle it.
    fn read(&mut self, answer: Result<CallAnswer, PeerError>) -> Option<Answer> {
        let shared = self.leaving.shared.clone();
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                let why = error.to_string();
                tracing::debug!("{}: {why}", self.leaving.name);
                shared.trouble(why);
                let is_final = matches!(error, PeerError::Refused { status: 400..=407 | 409..500, .. });
                return match self.source.phase() {
                    Phase::Announcing if is_final => Some(Err(Refused::Never)),
                    Phase::Serving if self.has_served_enough() => {
                        Some(Ok(View { done: true, ..self.source.view() }))
                    }
                    _ => None,
                };
            }
        };
        let (read, why) = calls::answer(&answer);
        if self.asked == Asked::Yours && read.is_ok() {
            self.note_pause();
        }
        {
            let mut facts = shared.facts();
            // The answers to a cancellation do not replace the reason for the cancellation.
            if facts.why.is_none() || self.source.phase() != Phase::Cancelling {
                facts.why = why;
            }
            if let Ok(view) = &read {
                facts.note_view(view);
                facts.resent = answer.again_bytes;
                facts.warm = view.done && self.source.phase() != Phase::Announcing;
            }
        }
        if answer.refused.is_none() && answer.page.is_some() {
            shared.list_wanted.notify_one();
        }
        if let Some((_, heard)) = &mut self.serving {
            *heard = Instant::now();
        }
        match read {
            Ok(view) if self.asked == Asked::Look && self.has_served_enough() => {
                Some(Ok(View { done: true, ..view }))
            }
            read => Some(read),
        }
    }

    fn has_served_enough(&self) -> bool {
        self.serving.is_some_and(|(since, heard)| {
            since.elapsed() > SERVING_MAX || heard.elapsed() > SERVING_SILENCE_MAX
        })
    }

    fn note_act(&mut self, act: SourceAct) {
        match act {
            SourceAct::Prepare => self.preparing_since = Some(Instant::now()),
            SourceAct::Freeze => self.frozen_at = Some(Instant::now()),
            SourceAct::Thaw => self.frozen_at = None,
            // From here on reads from this host may be outdated. The shard closes the open
            // connections.
            SourceAct::Leave => self.helpers.iter().take(1).for_each(JoinHandle::abort),
            _ => {}
        }
    }

    /// Records how long guests waited during the hand-over. The caller does this after the
    /// destination has started to serve the disk.
    fn note_pause(&mut self) {
        if let Some(since) = self.frozen_at.take() {
            let pause = since.elapsed().as_secs_f64() * 1e3;
            let mut facts = self.leaving.shared.facts();
            facts.pause_ms = Some(pause);
            tracing::info!(
                "disk {}: handed over to {}; writes paused for {pause:.1} ms",
                self.leaving.name,
                facts.peer
            );
        }
    }

    /// Updates the progress that the API shows.
    fn show(&mut self) {
        let phase = self.source.phase();
        let mut facts = self.leaving.shared.facts();
        if !matches!(phase, Phase::Recording | Phase::Preparing)
            && let Some(since) = self.preparing_since.take()
        {
            facts.drain_ms = Some(since.elapsed().as_millis() as u64);
        }
        if phase == Phase::Serving && self.serving.is_none() {
            let now = Instant::now();
            self.serving = Some((now, now));
            let (leaving, session) = (self.leaving.clone(), self.source.session());
            self.helpers.push(spawn(data::keep_connected(leaving, session, data::As::Former)));
        }
        let state = match phase {
            Phase::Recording | Phase::Preparing => MigrationState::Preparing,
            Phase::Announcing => MigrationState::Announcing,
            Phase::Copying => MigrationState::Copying,
            Phase::Frozen => MigrationState::Frozen,
            Phase::HandingOver => MigrationState::HandingOver,
            Phase::Serving => MigrationState::Serving,
            // The state is `Over` only after all resources are released.
            Phase::Over => MigrationState::Over,
            Phase::Cancelling | Phase::Kept => MigrationState::Cancelling,
        };
        if !matches!(phase, Phase::Over | Phase::Kept) {
            facts.state = state;
        }
    }

    fn end(&self) {
        let Leaving { name, shared, plan, .. } = &*self.leaving;
        let mut facts = shared.facts();
        match self.source.phase() {
            Phase::Kept => {
                facts.end(MigrationState::Kept);
                if self.cancelled {
                    facts.why = Some("the migration was cancelled".to_owned());
                }
                let why = facts.why.clone().unwrap_or_default();
                tracing::info!("disk {name}: its migration failed; this host still serves the disk: {why}");
            }
            _ => {
                facts.end(MigrationState::Over);
                facts.why = None;
                tracing::info!("disk {name}: its migration to {} is complete", plan.to);
            }
        }
    }
}

/// Returns true if a former owner continues to serve its cached data in this mode.
pub(super) fn serves_after(mode: CarryMode) -> bool {
    matches!(mode, CarryMode::Copy | CarryMode::Remote)
}
