//! TLS to an NBD server.

use std::io::{self, Read, Write};
use std::time::Instant;

use hob_storage::backing::nbd_psk::{KeyStream, Socket, in_time};
use openssl::error::ErrorStack;
use openssl::ssl::{ErrorCode, Ssl, SslContext, SslMethod, SslMode, SslRef, SslStream, SslVersion};

use super::CIPHERSUITES;

struct Stream(SslStream<Socket>);

impl KeyStream for Stream {
    fn socket(&self) -> &Socket {
        self.0.get_ref()
    }

    fn shutdown(&mut self) {
        let _ = self.0.shutdown();
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Performs the TLS handshake with the key of `user`.
pub(super) fn connect(
    socket: Socket,
    key: Vec<u8>,
    user: &str,
    deadline: Instant,
) -> Result<Box<dyn KeyStream>, String> {
    let context = context(key, user.to_owned()).map_err(|error| error.to_string())?;
    let ssl = Ssl::new(&context).map_err(|error| error.to_string())?;
    let mut stream = SslStream::new(ssl, socket).map_err(|error| error.to_string())?;
    loop {
        stream.get_ref().wait_until(deadline)?;
        match stream.connect() {
            Ok(()) => return Ok(Box::new(Stream(stream))),
            Err(error) if matches!(error.code(), ErrorCode::WANT_READ | ErrorCode::WANT_WRITE) => {}
            Err(error) => {
                return Err(match error.io_error() {
                    Some(error) => in_time(error),
                    None => format!("the TLS handshake failed: {error}"),
                });
            }
        }
    }
}

fn context(key: Vec<u8>, user: String) -> Result<SslContext, ErrorStack> {
    let mut builder = SslContext::builder(SslMethod::tls_client())?;
    builder.set_min_proto_version(Some(SslVersion::TLS1_3))?;
    builder.set_ciphersuites(CIPHERSUITES)?;
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
