//! TLS to an NBD server with a pre-shared key. The program installs the implementation
//! ([`install`]), because rustls does not support such keys (docs/decisions/0010-tls.md).

use std::io::{Read, Write};
use std::path::Path;
use std::sync::OnceLock;
use std::time::Instant;

pub use super::socket::{Socket, in_time};
use super::tls::check_secret;

/// An encrypted stream over a [`Socket`] that may block or not.
pub trait KeyStream: Read + Write + Send {
    /// Returns the socket below the stream.
    fn socket(&self) -> &Socket;

    /// Tells the server that no more data follows.
    fn shutdown(&mut self);
}

/// Performs the TLS handshake over a blocking socket. The parameters are the socket, the key, the
/// name of the key, and the time at which an unfinished handshake fails. The error is a sentence
/// for users.
pub type Connect = fn(Socket, Vec<u8>, &str, Instant) -> Result<Box<dyn KeyStream>, String>;

static CONNECT: OnceLock<Connect> = OnceLock::new();

/// Installs the implementation. Later calls have no effect.
pub fn install(connect: Connect) {
    let _ = CONNECT.set(connect);
}

/// Performs the TLS handshake with the key of `user` in `file`.
pub(super) fn connect(
    socket: Socket,
    file: &Path,
    user: &str,
    deadline: Instant,
) -> Result<Box<dyn KeyStream>, String> {
    let connect = CONNECT.get().ok_or(
        "this hob was built without pre-shared keys; build it with the feature psk, or use \
         tls-certificates",
    )?;
    connect(socket, key(file, user)?, user, deadline)
}

/// Reads the key of `user` from a file with lines `name:hexadecimal`, as `psktool` writes it.
fn key(file: &Path, user: &str) -> Result<Vec<u8>, String> {
    check_secret(file)?;
    let text =
        std::fs::read_to_string(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    let digits = text
        .lines()
        .find_map(|line| line.strip_prefix(user)?.strip_prefix(':'))
        .ok_or_else(|| format!("{} has no key with the name {user:?}", file.display()))?
        .trim();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let key: Option<Vec<u8>> = match digits.len() {
        32..=512 if digits.len().is_multiple_of(2) => digits.as_bytes().chunks(2).map(byte).collect(),
        _ => None,
    };
    key.ok_or_else(|| {
        format!("the key {user:?} in {} must have 32 to 512 hexadecimal digits", file.display())
    })
}
