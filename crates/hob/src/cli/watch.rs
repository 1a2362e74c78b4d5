//! Progress of an operation of the daemon in a command that waits for it, and a user who does not
//! want to wait.
//!
//! One updated line on a terminal, otherwise separate lines; on stderr, so that stdout has only the
//! result.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Pause between two questions.
const ASK_EVERY: Duration = Duration::from_millis(250);

/// Without a terminal, a line is written that often at most.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// See the module's text. From its making on Ctrl-C does not end the command.
pub(super) struct Watch {
    interrupt: Signal,
    on_terminal: bool,
    last_line: Option<Instant>,
    /// A line stands on the terminal that is not ended.
    stands: bool,
}

impl Watch {
    pub(super) fn new() -> std::io::Result<Watch> {
        let interrupt = signal(SignalKind::interrupt())?;
        let on_terminal = std::io::stderr().is_terminal();
        Ok(Watch { interrupt, on_terminal, last_line: None, stands: false })
    }

    /// Says how far it is; on a terminal with a picture before it, which may be empty.
    pub(super) fn show(&mut self, picture: &str, sentence: &str) {
        let mut stderr = std::io::stderr();
        // stderr may be closed: there is no one to tell then.
        if self.on_terminal {
            let gap = if picture.is_empty() { "" } else { " " };
            let _ = write!(stderr, "\r\x1b[2K{picture}{gap}{sentence}");
            self.stands = true;
        } else if self.last_line.is_none_or(|at| at.elapsed() >= LINE_EVERY) {
            let _ = writeln!(stderr, "{sentence}");
            self.last_line = Some(Instant::now());
        }
        let _ = stderr.flush();
    }

    /// Waits until the next poll. Returns false if the user does not want to wait, after telling
    /// them what continues.
    pub(super) async fn wait(&mut self, goes_on: impl FnOnce() -> String) -> bool {
        tokio::select! {
            () = tokio::time::sleep(ASK_EVERY) => true,
            _ = self.interrupt.recv() => {
                self.end();
                let _ = writeln!(std::io::stderr(), "{}", goes_on());
                false
            }
        }
    }

    /// Nothing more is shown: what others write begins on a line of its own.
    pub(super) fn end(&mut self) {
        if std::mem::take(&mut self.stands) {
            let _ = writeln!(std::io::stderr());
        }
    }
}
