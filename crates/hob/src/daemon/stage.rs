//! The life of the daemon as a whole: what it is told by signals, and its end, of which there are two kinds. Mostly everything is closed. But another
//! program may be to go on in this process ([`upgrade`]): then what clients hold on to stays open.

use std::cell::OnceCell;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use hob_storage::backing::objects;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;

use super::doors::Doors;
use super::manager::{Ending, Manager};
use super::notify::Notifier;
use super::relay::Relays;
use super::shard_api::ShardHandle;
use super::upgrade::{self, Leaving, Legacy, WaitingRoom};

/// TLS clients are told of the end for that long.
const FAREWELL_MAX: Duration = Duration::from_secs(2);

/// What the daemon is told by signals.
pub(super) struct Signals {
    /// SIGHUP.
    upgrade: Signal,
    end: Ends,
}

/// SIGTERM and SIGINT; and SIGHUP where the log goes to a terminal, which that signal says is gone.
struct Ends {
    term: Signal,
    int: Signal,
    terminal: Option<Signal>,
}

impl Signals {
    pub(super) fn new() -> anyhow::Result<Signals> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        let has_terminal = std::io::stderr().is_terminal();
        let end = Ends {
            term: listen(SignalKind::terminate())?,
            int: listen(SignalKind::interrupt())?,
            terminal: has_terminal.then(|| listen(SignalKind::hangup())).transpose()?,
        };
        Ok(Signals { upgrade: listen(SignalKind::hangup())?, end })
    }
}

impl Ends {
    async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
            Some(_) = async { Some(self.terminal.as_mut()?.recv().await) } => {}
        }
    }
}

/// Why serving ends.
pub(super) enum End {
    /// Somebody said so, or something broke.
    Ended(anyhow::Result<()>),
    /// Another program is to go on.
    HandOver,
}

/// What is there from the daemon's first moment to its last.
pub(super) struct Stage {
    pub(super) shards: Vec<ShardHandle>,
    pub(super) doors: Doors,
    /// Clients whose disks are not there yet.
    pub(super) waiting: WaitingRoom,
    pub(super) notifier: Arc<Notifier>,
    /// It has to close what it opened.
    pub(super) manager: OnceCell<Arc<Manager>>,
    /// Everything was started.
    pub(super) ready: OnceCell<()>,
    /// What goes on at an upgrade.
    program: PathBuf,
}

impl Stage {
    /// Before anything is served, with what the program before has left.
    pub(super) fn new(shards: Vec<ShardHandle>, legacy: &mut Legacy) -> Stage {
        let notifier = Notifier::from_env();
        if legacy.goes_on {
            notifier.going_on(shards.clone());
        }
        Stage {
            shards,
            doors: legacy.doors(),
            waiting: WaitingRoom::default(),
            notifier,
            manager: OnceCell::new(),
            ready: OnceCell::new(),
            program: legacy.program.clone(),
        }
    }

    /// Serves until it is to end, or another program is to go on and everything is at rest for that.
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
                    // It may have come in the middle of an upgrade.
                    self.shards.iter().for_each(ShardHandle::resume);
                    return End::Ended(Ok(()));
                }
                prepared = upgraded => match prepared {
                    Ok(()) => {
                        self.doors.leave_open();
                        return End::HandOver;
                    }
                    Err(why) => why,
                },
            };
            tracing::error!("not upgraded: {why}");
            if self.ready.get().is_some() {
                self.notifier.not_reloading(&why);
            }
        }
    }

    /// Finds out whether another program can go on, and brings everything to rest for it.
    async fn prepare(&self) -> Result<(), String> {
        let (Some(manager), Some(())) = (self.manager.get(), self.ready.get()) else {
            return Err("the daemon is still starting".to_owned());
        };
        tracing::info!("upgrading to {}", self.program.display());
        self.notifier.reloading();
        upgrade::check(self.program.clone()).await?;
        upgrade::prepare(manager, &self.shards, &self.doors).await
    }

    /// Closes everything. A signal that comes meanwhile ends the process at once; or, if another program was to go on, makes this an end like any other.
    /// What stays open comes back if there is to be another program.
    pub(super) async fn close(
        self,
        end: End,
        drain: bool,
        relays: Option<Relays>,
        signals: &mut Signals,
    ) -> anyhow::Result<Option<Leaving>> {
        let (ending, outcome) = match end {
            End::HandOver => (Ending::HandOver, Ok(())),
            End::Ended(outcome) if drain => (Ending::Drain, outcome),
            End::Ended(outcome) => (Ending::Plain, outcome),
        };
        let mut goes_on = ending == Ending::HandOver;
        if !goes_on {
            self.notifier.stopping();
        }
        let notifier = self.notifier.clone();
        let closing = self.close_all(ending, relays);
        tokio::pin!(closing);
        let leaving = loop {
            tokio::select! {
                leaving = &mut closing => break leaving,
                () = signals.end.next() => match std::mem::take(&mut goes_on) {
                    true => {
                        tracing::info!("ending instead of handing over");
                        notifier.stopping();
                    }
                    false => leave_at_once(),
                },
            }
        };
        match leaving {
            Some(leaving) if goes_on => {
                tracing::info!("leaves {}", leaving.summary());
                Ok(Some(leaving))
            }
            Some(leaving) => {
                leaving.end_here();
                Ok(None)
            }
            None => outcome.map(|()| None),
        }
    }

    async fn close_all(self, ending: Ending, relays: Option<Relays>) -> Option<Leaving> {
        let Stage { shards, doors, waiting, manager, program, .. } = self;
        let manager = manager.into_inner();
        let leaving = match &manager {
            Some(manager) if ending == Ending::HandOver => {
                Some(Leaving::collect(program, manager, &shards, &doors, &waiting).await)
            }
            _ => None,
        };
        if let Some(manager) = &manager {
            manager.close(ending).await;
        }
        stop(shards).await;
        // Those that were opened and not served after all: nobody has waited for them yet.
        let _ = tokio::task::spawn_blocking(objects::await_closed).await;
        if let Some(manager) = manager {
            manager.leave_cluster(ending).await;
        }
        if let Some(relays) = relays {
            relays.finish(FAREWELL_MAX).await;
        }
        leaving
    }
}

/// Ends all shards: connections are closed, what is in flight is finished.
async fn stop(shards: Vec<ShardHandle>) {
    let mut ending = JoinSet::new();
    for shard in shards {
        ending.spawn(async move { shard.stop().await });
    }
    while let Some(ended) = ending.join_next().await {
        if let Ok(Err(error)) = ended {
            tracing::warn!("a shard did not end well: {error}");
        }
    }
}

fn leave_at_once() -> ! {
    tracing::warn!("ending at once");
    std::process::exit(1)
}
