//! TLS of the control API's client: trusted CA certificates and the client's own certificate.
//!
//! Files are in PEM format. The client has no default CA, because public CAs seldom sign a daemon's
//! certificate. For a self-signed certificate, pass the certificate itself as the CA.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::pem::{self, PemError};

/// TLS settings of a client. Clones share one configuration.
#[derive(Clone, Debug)]
pub struct ClientTls(Arc<ClientConfig>);

/// Why the client's TLS files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClientTlsError {
    /// A TLS file could not be read or parsed.
    #[error(transparent)]
    Pem(#[from] PemError),
    /// The client's certificate, key or CA certificates are invalid.
    #[error("cannot use {path}: {source}")]
    Unusable {
        /// Path of the file.
        path: PathBuf,
        /// Why the TLS library refuses the file's contents.
        source: rustls::Error,
    },
}

impl ClientTls {
    /// Trusts the CA certificates in the file `authorities`. Presents the certificate and key in
    /// `own`, if any.
    ///
    /// # Errors
    /// Returns an error that names the file if a file cannot be used.
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

    /// Performs the TLS handshake with the daemon at `host`.
    pub(crate) async fn connect(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, "the host is not a valid name in a certificate")
        })?;
        TlsConnector::from(Arc::clone(&self.0)).connect(name, stream).await
    }
}

/// Returns the TLS error that caused an error, if any. If the daemon refuses the client's
/// certificate, the client's first request fails, not the handshake.
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
