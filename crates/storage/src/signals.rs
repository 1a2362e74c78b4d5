//! A signal that must not end the program while it executes its new version.
#![allow(unsafe_code)]

/// Ignores SIGHUP, also in the program that is executed next, until that installs a handler. Otherwise a
/// second request for an upgrade could end that program before it can handle it.
pub fn ignore_hang_up() {
    // SAFETY: no handler is installed, so no code of ours runs in a signal context; the previous handler is
    // not used.
    unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
}
