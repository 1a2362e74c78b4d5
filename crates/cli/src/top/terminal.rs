//! The terminal during `hob top`. The terminal is restored at the end, whether by key, signal,
//! error or panic.

use std::io;

use anyhow::Context;
use ratatui::crossterm::event::{self, Event};
use ratatui::{DefaultTerminal, Frame};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// A terminal in raw mode on its alternate screen. Dropping it restores the terminal; a panic
/// restores it before its message.
pub(super) struct Guard {
    terminal: DefaultTerminal,
    events: UnboundedReceiver<io::Result<Event>>,
    signals: [Signal; 3],
}

impl Guard {
    /// Takes over the terminal. The caller must be in a Tokio runtime.
    pub(super) fn enter() -> anyhow::Result<Guard> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        let signals = [
            listen(SignalKind::terminate())?,
            listen(SignalKind::interrupt())?,
            listen(SignalKind::hangup())?,
        ];
        let terminal = ratatui::try_init().context("cannot use this terminal")?;
        let (sender, events) = unbounded_channel();
        // Reading a key blocks, so a thread does it. The thread ends with the process, or at the
        // first key after the screen was closed.
        let read = move || {
            loop {
                let event = event::read();
                let is_last = event.is_err();
                if sender.send(event).is_err() || is_last {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("hob-keys".to_owned()).spawn(read);
        let guard = Guard { terminal, events, signals };
        thread.context("cannot start a thread")?;
        Ok(guard)
    }

    /// Draws the screen again.
    pub(super) fn draw(&mut self, picture: impl FnOnce(&mut Frame<'_>)) -> anyhow::Result<()> {
        self.terminal.draw(picture).context("cannot draw")?;
        Ok(())
    }

    /// Returns the next key or change of size; `None` after a signal to end.
    pub(super) async fn next_event(&mut self) -> anyhow::Result<Option<Event>> {
        let [term, int, hup] = &mut self.signals;
        tokio::select! {
            event = self.events.recv() => match event {
                Some(event) => Ok(Some(event.context("cannot read keys")?)),
                None => Ok(None),
            },
            _ = term.recv() => Ok(None),
            _ = int.recv() => Ok(None),
            _ = hup.recv() => Ok(None),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        ratatui::restore();
    }
}
