//! Signals that ask `hob attach` or `hob detach` to end. A command must not end while it has the VM
//! paused, for example because an SSH connection is lost (SIGHUP).

use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The command's reaction to a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnSignal {
    /// The command undoes what it has done.
    Undo,
    /// The command ends, and the user can repeat it to continue. If hob has paused the VM, the
    /// command first completes or undoes its steps.
    End,
}

/// Records whether the user asked the command to end, and whether the command has the VM paused.
#[derive(Debug, Default)]
pub(super) struct Interrupt {
    is_requested: AtomicBool,
    /// True while QEMU has the object which records that hob paused the VM.
    is_pausing: AtomicBool,
}

impl Interrupt {
    /// Listens for SIGINT, SIGTERM and SIGHUP.
    pub(super) fn listen(reaction: OnSignal) -> anyhow::Result<Arc<Interrupt>> {
        let interrupt = Arc::new(Interrupt::default());
        for (kind, reaction) in [
            // The drain of `hob detach` handles Ctrl-C itself: it prints that the drain continues,
            // and ends.
            (SignalKind::interrupt(), OnSignal::Undo),
            (SignalKind::terminate(), reaction),
            (SignalKind::hangup(), reaction),
        ] {
            let signals = signal(kind).context("cannot listen for signals")?;
            tokio::spawn(interrupt.clone().receive(signals, kind.as_raw_value(), reaction));
        }
        Ok(interrupt)
    }

    async fn receive(self: Arc<Interrupt>, mut signals: Signal, number: i32, reaction: OnSignal) {
        while signals.recv().await.is_some() {
            if self.ends_now(reaction) {
                exit(128 + number);
            }
        }
    }

    /// Handles a signal. Returns true if the command ends immediately.
    fn ends_now(&self, reaction: OnSignal) -> bool {
        self.is_requested.store(true, Ordering::Relaxed);
        reaction == OnSignal::End && !self.is_pausing.load(Ordering::Relaxed)
    }

    /// Returns true if the command has received a signal.
    pub(super) fn is_requested(&self) -> bool {
        self.is_requested.load(Ordering::Relaxed)
    }

    pub(super) fn set_pausing(&self, is_pausing: bool) {
        self.is_pausing.store(is_pausing, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_ends_no_command_that_has_the_vm_paused() {
        let interrupt = Interrupt::default();
        interrupt.set_pausing(true);
        assert!(!interrupt.ends_now(OnSignal::End) && interrupt.is_requested());
        interrupt.set_pausing(false);
        assert!(interrupt.ends_now(OnSignal::End));
        assert!(!interrupt.ends_now(OnSignal::Undo));
    }
}
