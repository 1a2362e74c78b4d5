//! TLS with NBD clients.

use std::io;
use std::pin::Pin;

use hob_daemon::psk::{Accepted, FindKey, KeyServer, Stream};
use openssl::error::ErrorStack;
use openssl::ex_data::Index;
use openssl::ssl::{
    Ssl, SslContext, SslMethod, SslMode, SslOptions, SslRef, SslSessionCacheMode, SslVersion,
};
use tokio_openssl::SslStream;

use super::CIPHERSUITES;

/// Creates a server whose keys are those that `find` returns.
pub(super) fn new(find: FindKey) -> Result<Box<dyn KeyServer>, String> {
    match Server::new(find) {
        Ok(server) => Ok(Box::new(server)),
        Err(error) => Err(error.to_string()),
    }
}

struct Server {
    context: SslContext,
    name: Index<Ssl, String>,
}

impl Server {
    fn new(find: FindKey) -> Result<Server, ErrorStack> {
        let name = Ssl::new_ex_index()?;
        let mut builder = SslContext::builder(SslMethod::tls_server())?;
        builder.set_min_proto_version(Some(SslVersion::TLS1_3))?;
        builder.set_ciphersuites(CIPHERSUITES)?;
        builder.set_session_cache_mode(SslSessionCacheMode::OFF);
        builder.set_options(SslOptions::NO_TICKET);
        builder.set_num_tickets(0)?;
        builder.set_mode(
            SslMode::ENABLE_PARTIAL_WRITE | SslMode::ACCEPT_MOVING_WRITE_BUFFER | SslMode::RELEASE_BUFFERS,
        );
        builder.set_psk_server_callback(move |ssl: &mut SslRef, identity: Option<&[u8]>, room: &mut [u8]| {
            let identity = identity.unwrap_or_default();
            // An empty result tells OpenSSL that the name is unknown.
            let Some(key) = find(identity).filter(|key| key.len() <= room.len()) else {
                return Ok(0);
            };
            room[..key.len()].copy_from_slice(&key);
            ssl.set_ex_data(name, String::from_utf8_lossy(identity).into_owned());
            Ok(key.len())
        });
        Ok(Server { context: builder.build(), name })
    }
}

impl KeyServer for Server {
    fn accept(&self, stream: Box<dyn Stream>) -> Pin<Box<dyn Future<Output = Accepted> + Send + '_>> {
        Box::pin(async move {
            let mut stream = SslStream::new(Ssl::new(&self.context)?, stream)?;
            let accepted = Pin::new(&mut stream).accept().await;
            accepted.map_err(|error| io::Error::other(format!("the TLS handshake failed: {error}")))?;
            match stream.ssl().ex_data(self.name).cloned() {
                Some(name) => Ok((Box::new(stream) as Box<dyn Stream>, name)),
                None => Err(io::Error::other(
                    "the TLS handshake failed: the client did not prove that it has a key",
                )),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use openssl::ssl::{SslConnector, SslVerifyMode};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const KEY: &[u8] = &[1; 16];
    const OTHER: &[u8] = &[7; 32];

    /// Returns the result of the server's handshake with a client that has this name and key.
    async fn meet(server: &Server, name: &'static str, key: &'static [u8]) -> io::Result<String> {
        let (near, far) = tokio::io::duplex(1 << 16);
        let mut builder = SslConnector::builder(SslMethod::tls_client()).unwrap();
        builder.set_verify(SslVerifyMode::NONE);
        builder.set_psk_client_callback(move |_, _, identity, room| {
            identity[..name.len()].copy_from_slice(name.as_bytes());
            identity[name.len()] = 0;
            room[..key.len()].copy_from_slice(key);
            Ok(key.len())
        });
        let ssl = builder.build().configure().unwrap().into_ssl("hob.example").unwrap();
        let client = tokio::spawn(async move {
            let mut stream = SslStream::new(ssl, near).unwrap();
            if Pin::new(&mut stream).connect().await.is_ok() {
                let _ = stream.write_all(b"hello").await;
                let _ = stream.shutdown().await;
            }
        });
        let met = async {
            let (mut stream, name) = server.accept(Box::new(far)).await?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await?;
            assert_eq!(text, "hello");
            Ok(name)
        };
        let met = met.await;
        client.await.unwrap();
        met
    }

    #[tokio::test]
    async fn a_client_with_a_key_is_admitted_under_its_name() {
        let find = |name: &[u8]| match name {
            b"host7" => Some(KEY.to_vec()),
            b"host8" => Some(OTHER.to_vec()),
            _ => None,
        };
        let server = Server::new(Box::new(find)).unwrap();
        assert_eq!(meet(&server, "host7", KEY).await.unwrap(), "host7");
        assert_eq!(meet(&server, "host8", OTHER).await.unwrap(), "host8");
        meet(&server, "host7", OTHER).await.unwrap_err();
        meet(&server, "host9", KEY).await.unwrap_err();
    }
}
