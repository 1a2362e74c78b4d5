//! Signals while another program takes over in this process at an upgrade.
//!
//! A new program has no handlers at first, so a signal would end it, or be lost in a handler of
//! the old program. Therefore [`hold`] takes over the signals that stop the daemon. They wait in
//! the kernel until the new program calls [`release`].
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

/// Signals that stop the daemon.
const STOP: [libc::c_int; 2] = [libc::SIGTERM, libc::SIGINT];

/// Another thread received a stop signal after [`hold`].
static STOPPED: AtomicBool = AtomicBool::new(false);

/// Blocks the stop signals in this thread, which is the only one that continues in the new
/// program, and ignores SIGHUP, which requests an upgrade. Signals that other threads receive are
/// remembered for [`stopped`].
pub fn hold() {
    extern "C" fn remember(_: libc::c_int) {
        STOPPED.store(true, Ordering::Relaxed);
    }
    let remember: extern "C" fn(libc::c_int) = remember;
    mask(libc::SIG_BLOCK);
    // SAFETY: the handler only stores an atomic; the previous handlers are not used.
    unsafe {
        STOP.into_iter().for_each(|signal| _ = libc::signal(signal, remember as libc::sighandler_t));
        libc::signal(libc::SIGHUP, libc::SIG_IGN);
    }
}

/// Returns true if a stop signal arrived since [`hold`]. From now on such a signal ends the process
/// if it arrives before the new program starts.
pub fn stopped() -> bool {
    // SAFETY: the default action runs no code of ours.
    STOP.into_iter().for_each(|signal| _ = unsafe { libc::signal(signal, libc::SIG_DFL) });
    STOPPED.load(Ordering::Relaxed)
}

/// Delivers the stop signals that have waited. The program must have installed its handlers.
pub fn release() {
    mask(libc::SIG_UNBLOCK);
}

fn mask(how: libc::c_int) {
    // SAFETY: `sigset_t` is plain data that sigemptyset initializes, and the set outlives the calls.
    unsafe {
        let mut signals = std::mem::zeroed();
        libc::sigemptyset(&raw mut signals);
        STOP.into_iter().for_each(|signal| _ = libc::sigaddset(&raw mut signals, signal));
        libc::pthread_sigmask(how, &raw const signals, std::ptr::null_mut());
    }
}
