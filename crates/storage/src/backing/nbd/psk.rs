//! TLS 1.3 to an NBD server with a pre-shared key, by OpenSSL, because rustls does not support such
//! keys (docs/decisions/0010-tls.md).

use std::path::Path;
use std::time::Instant;

use openssl::ssl::{ErrorCode, Ssl, SslContext, SslMethod, SslMode, SslRef, SslStream, SslVersion};

use super::socket::{Socket, in_time};
use super::tls::check_secret;

pub(super) type Stream = SslStream<Socket>;

/// Performs the TLS handshake with the key of `user` in `file`.
pub(super) fn connect(socket: Socket, file: &Path, user: &str, deadline: Instant) -> Result<Stream, String> {
    let context = context(key(file, user)?, user.to_owned()).map_err(|error| error.to_string())?;
    let ssl = Ssl::new(&context).map_err(|error| error.to_string())?;
    let mut stream = SslStream::new(ssl, socket).map_err(|error| error.to_string())?;
    loop {
        stream.get_ref().wait_until(deadline)?;
        match stream.connect() {
            Ok(()) => return Ok(stream),
            Err(error) if matches!(error.code(), ErrorCode::WANT_READ | ErrorCode::WANT_WRITE) => {}
            Err(error) => {
                return Err(match error.io_error() {
                    Some(error) => in_time(error),
                    None => format!("no TLS: {error}"),
                });
            }
        }
    }
}

fn context(key: Vec<u8>, user: String) -> Result<SslContext, openssl::error::ErrorStack> {
    let mut builder = SslContext::builder(SslMethod::tls_client())?;
    builder.set_min_proto_version(Some(SslVersion::TLS1_3))?;
    // Keys without their own hash function use SHA-256.
    builder.set_ciphersuites("TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256")?;
    builder.set_mode(SslMode::ENABLE_PARTIAL_WRITE | SslMode::ACCEPT_MOVING_WRITE_BUFFER);
    builder.set_psk_client_callback(move |_: &mut SslRef, _, name: &mut [u8], place: &mut [u8]| {
        // The name ends with a zero byte. An empty result tells OpenSSL that there is no key.
        if user.len() >= name.len() || key.len() > place.len() {
            return Ok(0);
        }
        name[..user.len()].copy_from_slice(user.as_bytes());
        name[user.len()] = 0;
        place[..key.len()].copy_from_slice(&key);
        Ok(key.len())
    });
    Ok(builder.build())
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
