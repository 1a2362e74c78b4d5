//! Ignores a signal that must not end the program during an upgrade.
#![allow(unsafe_code)]

/// Ignores SIGHUP, also in the next executed program until it installs a handler. By default, a
/// second upgrade request could end that program before it can handle the signal.
pub fn ignore_hang_up() {
    // SAFETY: no handler is installed, so no code of ours runs in a signal context; the previous handler is
    // not used.
    unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
}
