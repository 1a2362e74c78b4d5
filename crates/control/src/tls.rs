//! The client's side of TLS: whom to trust, and what to show.
//!
//! Files are PEM. There is no default for whom to trust: a daemon's certificate is seldom one that browsers know, so its
//! authority is named. A certificate that is its own authority is named itself.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::pem::{self, PemError};

/// How to speak TLS with a daemon. Clones share one configuration.
#[derive(Clone, Debug)]
pub struct ClientTls(Arc<ClientConfig>);

/// Why files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClientTlsError {
    /// One of them, whatever for.
    #[error(transparent)]
    Pem(#[from] PemError),
    /// Certificate, key or authorities are unusable.
    #[error("cannot use {}: {source}", path.display())]
    Unusable {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: rustls::Error,
    },
}

impl ClientTls {
    /// Trusts the certificates in `authorities`, and shows a certificate with its key if there is one.
    ///
    /// # Errors
    /// Says which file cannot be used.
    pub fn load(authorities: &Path, own: Option<(&Path, &Path)>) -> Result<ClientTls, ClientTlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in pem::certificates(authorities)? {
            roots
                .add(certificate)
                .map_err(|source| ClientTlsError::Unusable { path: authorities.to_owned(), source })?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|source| ClientTlsError::Unusable { path: authorities.to_owned(), source })?
            .with_root_certificates(roots);
        let config = match own {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = pem::certificates(certificate)?;
                let key = pem::private_key(key, &pem::read(key)?)?;
                builder
                    .with_client_auth_cert(chain, key)
                    .map_err(|source| ClientTlsError::Unusable { path: certificate.to_owned(), source })?
            }
        };
        Ok(ClientTls(Arc::new(config)))
    }

    /// The TLS handshake with the daemon at `host`.
    pub(crate) async fn connect(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, "no certificate can be for that name")
        })?;
        TlsConnector::from(Arc::clone(&self.0)).connect(name, stream).await
    }
}

/// The TLS error behind an error, if there is one. A client whose certificate is refused learns of
/// it only with its first request.
pub(crate) fn cause(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return io.get_ref()?.downcast_ref::<rustls::Error>().map(ToString::to_string);
        }
        next = error.source();
    }
    None
}
