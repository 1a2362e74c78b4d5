//! Progress of an operation of the daemon, shown by a command that waits for it and that the user
//! can interrupt.
//!
//! A terminal gets one updated line, other outputs separate lines. The output is on stderr, so that
//! stdout has only the result.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Interval between two queries.
const ASK_EVERY: Duration = Duration::from_millis(250);

/// Interval between two lines without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Exit status of a command that Ctrl-C ends, as in shells.
pub(super) const STATUS_INTERRUPTED: i32 = 130;

/// Shows the progress of an operation of the daemon. While this value exists, Ctrl-C does not end
/// the command.
pub(super) struct Watch {
    interrupt: Signal,
    on_terminal: bool,
    last_line: Option<Instant>,
    /// True if the last line on the terminal is not complete: no newline was written after it.
    stands: bool,
}

impl Watch {
    pub(super) fn new() -> std::io::Result<Watch> {
        let interrupt = signal(SignalKind::interrupt())?;
        let on_terminal = std::io::stderr().is_terminal();
        Ok(Watch { interrupt, on_terminal, last_line: None, stands: false })
    }

    /// Shows the progress as a sentence; a terminal also shows `picture` before it, if it is not
    /// empty.
    pub(super) fn show(&mut self, picture: &str, sentence: &str) {
        let mut stderr = std::io::stderr();
        // stderr may be closed; this is not an error.
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

    /// Waits until the next query, and for the result of the query. If the user presses Ctrl-C,
    /// prints what continues, and ends the command.
    pub(super) async fn wait<T>(
        &mut self,
        query: impl Future<Output = T>,
        goes_on: impl FnOnce() -> String,
    ) -> T {
        let next = async {
            tokio::time::sleep(ASK_EVERY).await;
            query.await
        };
        tokio::select! {
            result = next => result,
            _ = self.interrupt.recv() => {
                self.end();
                let _ = writeln!(std::io::stderr(), "{}", goes_on());
                std::process::exit(STATUS_INTERRUPTED)
            }
        }
    }

    /// Ends the output, so that later text starts on its own line.
    pub(super) fn end(&mut self) {
        if std::mem::take(&mut self.stands) {
            let _ = writeln!(std::io::stderr());
        }
    }
}
