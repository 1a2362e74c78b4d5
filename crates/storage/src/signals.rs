//! A signal that a program must not end of while it becomes another.
#![allow(unsafe_code)]

/// Ignores SIGHUP, also in the program that is executed next, until something handles it there. Otherwise a second wish for an upgrade
/// could end that program before it is able to understand it.
pub fn ignore_hang_up() {
    // SAFETY: no handler is installed, and what was before is not looked at: nothing of ours runs in a signal's context.
    unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
}
