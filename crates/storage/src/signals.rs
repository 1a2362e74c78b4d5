//! Handling of signals while an upgrade replaces the program of this process.
//!
//! The new program has no signal handlers at first. A signal would end the new program, or be lost
//! in a handler of the old program. Therefore [`hold`] blocks the signals that stop the daemon.
//! These signals wait in the kernel until the new program calls [`release`].
#![allow(unsafe_code)]

/// Signals that stop the daemon.
const STOP: [libc::c_int; 2] = [libc::SIGTERM, libc::SIGINT];

/// Blocks the stop signals in this thread, and ignores SIGHUP, which requests an upgrade. The
/// caller must be the main thread, the only thread that continues in the new program. Other threads
/// pass stop signals on to the main thread.
pub fn hold() {
    extern "C" fn pass_on(signal: libc::c_int) {
        send_to_main_thread(signal);
    }
    let pass_on: extern "C" fn(libc::c_int) = pass_on;
    mask(libc::SIG_BLOCK);
    // SAFETY: the handler only makes system calls; the previous handlers are not used.
    unsafe {
        STOP.into_iter().for_each(|signal| _ = libc::signal(signal, pass_on as libc::sighandler_t));
        libc::signal(libc::SIGHUP, libc::SIG_IGN);
    }
}

/// Makes the new program stop after its start: sends SIGTERM, which waits until the new program
/// calls [`release`]. Call [`hold`] first.
pub fn stop_next_program() {
    send_to_main_thread(libc::SIGTERM);
}

fn send_to_main_thread(signal: libc::c_int) {
    // SAFETY: system calls without pointers. The main thread's id is that of the process.
    unsafe {
        let process = libc::getpid();
        libc::syscall(libc::SYS_tgkill, process, process, signal);
    }
}

/// Delivers the stop signals that have waited. The program must have installed its handlers.
pub fn release() {
    mask(libc::SIG_UNBLOCK);
}

fn mask(how: libc::c_int) {
    // SAFETY: `sigset_t` is plain data that sigemptyset initializes, and the set outlives the
    // calls.
    unsafe {
        let mut signals = std::mem::zeroed();
        libc::sigemptyset(&raw mut signals);
        STOP.into_iter().for_each(|signal| _ = libc::sigaddset(&raw mut signals, signal));
        libc::pthread_sigmask(how, &raw const signals, std::ptr::null_mut());
    }
}
