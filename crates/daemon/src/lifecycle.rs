//! The lifecycle of the daemon: signals, and the two ways to end. At a stop, all disks and
//! connections are closed. At an upgrade, another program takes over in this process, and the
//! clients' sockets stay open ([`upgrade`]).

use std::cell::OnceCell;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use hob_storage::backing::{objects, qemu_nbd};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::SetOnce;
use tokio::task::JoinSet;

use super::listening_sockets::ListeningSockets;
use super::notify::Notifier;
use super::relay::Relays;
use super::services::{Ending, Services};
use super::shard_api::ShardHandle;
use super::upgrade::{self, HandOff, InheritedState, WaitingClients};

/// Maximum time to wait for the end of the daemon's start, if a signal arrives during the start.
const START_MAX: Duration = Duration::from_secs(10);

/// Maximum time for TLS connections to close.
const FAREWELL_MAX: Duration = Duration::from_secs(2);

/// The signals that the daemon handles.
pub(super) struct Signals {
    /// SIGHUP: upgrade.
    upgrade: Signal,
    end: Ends,
}

/// Signals that end the daemon: SIGTERM and SIGINT; and SIGHUP if the log goes to a terminal,
/// because then the terminal was closed.
struct Ends {
    term: Signal,
    int: Signal,
    terminal: Option<Signal>,
    /// Number of these signals that were received so far.
    count: u32,
}

impl Signals {
    pub(super) fn new() -> anyhow::Result<Signals> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        let has_terminal = std::io::stderr().is_terminal();
        let end = Ends {
            term: listen(SignalKind::terminate())?,
            int: listen(SignalKind::interrupt())?,
            terminal: has_terminal.then(|| listen(SignalKind::hangup())).transpose()?,
            count: 0,
        };
        let signals = Signals { upgrade: listen(SignalKind::hangup())?, end };
        // The previous program in this process may have left pending signals for this program.
        hob_storage::signals::release();
        Ok(signals)
    }

    /// Lets the next program in this process handle the signals that end the daemon: signals that
    /// arrive later, and a signal that has already arrived.
    async fn leave_to_next_program(&mut self) {
        hob_storage::signals::hold();
        // The runtime reports a signal that its handler has received within this time.
        let _ = tokio::time::timeout(Duration::from_millis(1), self.end.next()).await;
        if self.end.count > 0 {
            hob_storage::signals::stop_next_program();
        }
    }
}

impl Ends {
    /// Waits for the next signal. The second signal ends the process immediately.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
            Some(_) = async { Some(self.terminal.as_mut()?.recv().await) } => {}
        }
        self.count += 1;
        if self.count > 1 {
            tracing::warn!("exiting immediately");
            std::process::exit(1);
        }
    }
}

/// Why the daemon stops serving.
pub(super) enum End {
    /// A signal or an error ends the daemon.
    Ended(anyhow::Result<()>),
    /// Another program takes over, at an upgrade.
    HandOver,
}

/// Objects that exist from the daemon's start to its end.
pub(super) struct Lifecycle {
    pub(super) shards: Vec<ShardHandle>,
    pub(super) listening: ListeningSockets,
    /// Inherited clients whose disks are not open yet.
    pub(super) waiting: WaitingClients,
    pub(super) notifier: Arc<Notifier>,
    /// The daemon's services, set after the start. At the end of the daemon, they close the disks,
    /// files and sockets that they opened.
    pub(super) services: OnceCell<Arc<Services>>,
    /// Set when the start is complete.
    pub(super) ready: SetOnce<()>,
    /// The program that takes over at an upgrade.
    program: PathBuf,
}

impl Lifecycle {
    /// Creates the lifecycle before the first disk is served. `inherited` is the state of the
    /// previous program.
    pub(super) fn new(shards: Vec<ShardHandle>, inherited: &mut InheritedState) -> Lifecycle {
        let notifier = Notifier::from_env();
        if inherited.goes_on {
            notifier.going_on(shards.clone());
        }
        Lifecycle {
            shards,
            listening: inherited.listening(),
            waiting: WaitingClients::default(),
            notifier,
            services: OnceCell::new(),
            ready: SetOnce::new(),
            program: inherited.program.clone(),
        }
    }

    /// Serves until a signal ends the daemon, or until all shards are quiesced for an upgrade.
    pub(super) async fn until_end(
        &self,
        serving: impl Future<Output = anyhow::Result<()>>,
        signals: &mut Signals,
    ) -> End {
        tokio::pin!(serving);
        let Signals { upgrade, end } = signals;
        loop {
            let upgraded = async {
                upgrade.recv().await;
                self.prepare().await
            };
            let why = tokio::select! {
                biased;
                result = &mut serving => return End::Ended(result),
                () = end.next() => {
                    tracing::info!("ending");
                    // The signal may have arrived in the middle of an upgrade.
                    self.shards.iter().for_each(ShardHandle::resume);
                    return End::Ended(self.finish_start(serving, end).await);
                }
                prepared = upgraded => match prepared {
                    Ok(()) => {
                        self.listening.keep_open();
                        return End::HandOver;
                    }
                    Err(why) => why,
                },
            };
            tracing::error!("not upgraded, and this daemon continues: {why}");
            if let Some(services) = self.services.get() {
                services.hob_toml.note_failed_reload(&why);
            }
            if self.ready.get().is_some() {
                self.notifier.not_reloading(&why);
            }
        }
    }

    /// Waits until the start is finished, because only then all opened disks and sockets are known.
    async fn finish_start(
        &self,
        serving: impl Future<Output = anyhow::Result<()>>,
        end: &mut Ends,
    ) -> anyhow::Result<()> {
        tokio::select! {
            biased;
            _ = self.ready.wait() => Ok(()),
            result = serving => result,
            () = end.next() => Ok(()),
            () = tokio::time::sleep(START_MAX) => {
                tracing::warn!("ending although the start is not finished after {} s", START_MAX.as_secs());
                Ok(())
            }
        }
    }

    /// Checks that another program can take over, and quiesces all shards for it.
    async fn prepare(&self) -> Result<(), String> {
        let (Some(services), Some(())) = (self.services.get(), self.ready.get()) else {
            return Err("the daemon is still starting".to_owned());
        };
        tracing::info!("upgrading to {}", self.program.display());
        self.notifier.reloading();
        upgrade::check(self.program.clone(), &self.listening).await?;
        upgrade::prepare(services, &self.shards, &self.listening).await
    }

    /// Closes all disks and connections, and returns the descriptors that stay open at an upgrade.
    /// A signal during a stop ends the process immediately. In an upgrade, the first signal is
    /// passed to the next program, which ends after its start.
    pub(super) async fn close(
        self,
        end: End,
        drain: bool,
        relays: Option<Relays>,
        signals: &mut Signals,
    ) -> anyhow::Result<Option<HandOff>> {
        let (ending, outcome) = match end {
            End::HandOver => (Ending::HandOver, Ok(())),
            End::Ended(outcome) if drain => (Ending::Drain, outcome),
            End::Ended(outcome) => (Ending::Plain, outcome),
        };
        let goes_on = ending == Ending::HandOver;
        if !goes_on {
            self.notifier.stopping();
        }
        let closing = self.close_all(ending, relays);
        tokio::pin!(closing);
        let leaving = loop {
            tokio::select! {
                leaving = &mut closing => break leaving,
                () = signals.end.next() => {
                    if goes_on {
                        tracing::info!("the next daemon process will end, because a signal arrived");
                    }
                }
            }
        };
        if let Some(leaving) = &leaving {
            tracing::info!("handing over to the next daemon process: {}", leaving.summary());
            signals.leave_to_next_program().await;
        }
        outcome.map(|()| leaving)
    }

    async fn close_all(self, ending: Ending, relays: Option<Relays>) -> Option<HandOff> {
        let Lifecycle { shards, listening, waiting, services, program, .. } = self;
        let services = services.into_inner();
        let leaving = match &services {
            Some(services) if ending == Ending::HandOver => {
                Some(HandOff::collect(program, services, &shards, &listening, &waiting).await)
            }
            _ => None,
        };
        if let Some(services) = &services {
            services.shutdown.close(ending).await;
        }
        stop(shards).await;
        if leaving.is_none() {
            listening.close_inherited();
        }
        // Backings that are still being opened belong to no disk yet, so closing the disks does not
        // end them.
        qemu_nbd::end_starting();
        // Waits for disks in object stores that were opened but never served.
        let _ = tokio::task::spawn_blocking(objects::await_closed).await;
        if let Some(services) = services {
            services.cluster.leave(ending).await;
        }
        if let Some(relays) = relays {
            relays.finish(FAREWELL_MAX).await;
        }
        leaving
    }
}

/// Stops all shards: finishes requests in flight and closes connections.
async fn stop(shards: Vec<ShardHandle>) {
    let mut ending = JoinSet::new();
    for shard in shards {
        ending.spawn(async move { shard.stop().await });
    }
    while let Some(ended) = ending.join_next().await {
        if let Ok(Err(error)) = ended {
            tracing::warn!("a shard did not stop cleanly: {error}");
        }
    }
}
