//! The server side of TLS for the control API and for NBD: certificates from files, and client
//! certificates.
//!
//! hob supports TLS 1.3, and TLS 1.2 with forward secrecy. The TLS files are in PEM format. The
//! files are checked at each new connection and read again if they have changed, so a renewed
//! certificate needs no restart. If a new certificate is unusable, hob continues with the previous
//! certificate. Sessions are never resumed: each connection authenticates again, so an expired
//! client is refused. A file with a private key, pre-shared keys or a token is refused if all users
//! of the host can access it. hob does not use revocation lists: to revoke a certificate, remove
//! its name from hob.toml.

mod certificate;
mod subject;

use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use hob_control::pem::{self, PemError};
use hob_control::{ClientTls, ClientTlsError};
use hob_storage::backing::{OpenError, check_regular_file};
use rustls::RootCertStore;
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

pub use certificate::CertificateMatch;
pub(crate) use certificate::PeerCertificate;

/// Maximum time for a client to finish the TLS handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(15);

/// Paths of a listener's TLS files. In hob.toml: `tls = { cert, key, client_ca }`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// This host's certificate with its chain, PEM.
    pub cert: PathBuf,
    /// Private key of the certificate, PEM.
    pub key: PathBuf,
    /// CA certificates for client certificates, PEM.
    #[serde(default)]
    pub client_ca: Option<PathBuf>,
}

/// How clients without a certificate are handled if there is a `client_ca`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WithoutCertificate {
    /// Refuse clients without a certificate.
    Refused,
    /// Accept clients without a certificate. Another check must authenticate them.
    Welcome,
}

/// Why TLS cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    /// A PEM file is unreadable or invalid.
    #[error(transparent)]
    Pem(#[from] PemError),
    /// The path leads to a FIFO, a directory or another object that is not a regular file, or its
    /// filesystem does not answer.
    #[error(transparent)]
    NotRegular(OpenError),
    /// Every user can read a secret file.
    #[error("every user can read {0}; chmod it to 0600, or 0640 for a group")]
    Exposed(PathBuf),
    /// The content of the files is unusable.
    #[error("cannot use {cert} with {key}: {source}")]
    Unusable {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        source: rustls::Error,
    },
    /// The files of a client are unreadable or unusable.
    #[error(transparent)]
    Client(#[from] ClientTlsError),
    /// The certificate authorities are unusable.
    #[error("cannot use the CA certificates in {path}: {why}")]
    Authorities {
        /// The file with the certificate authorities.
        path: PathBuf,
        why: String,
    },
}

/// TLS with loaded certificates.
#[derive(Debug)]
pub(crate) struct Tls {
    files: TlsFiles,
    without: WithoutCertificate,
    current: Mutex<Current>,
}

#[derive(Debug)]
struct Current {
    parts: Parts,
    /// Stamps of the files when they were last read.
    stamps: Vec<Option<Stamp>>,
}

#[derive(Clone, Debug)]
struct Parts {
    config: Arc<ServerConfig>,
    /// The daemon's own certificate.
    own: CertificateDer<'static>,
}

/// Identifies a version of a file. If two stamps of a file differ, the file was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    modified: Option<SystemTime>,
    inode: u64,
    bytes: u64,
}

impl Stamp {
    /// Returns the stamp of a file, if the file exists.
    pub(crate) fn of(path: &Path) -> Option<Stamp> {
        let metadata = std::fs::metadata(path).ok()?;
        let modified = metadata.modified().ok();
        Some(Stamp { modified, inode: metadata.ino(), bytes: metadata.len() })
    }
}

impl Tls {
    /// Reads and checks the files.
    pub(crate) fn load(files: TlsFiles, without: WithoutCertificate) -> Result<Tls, TlsError> {
        // The stamps are taken first, so that a change during the reading is found with the next
        // connection.
        let stamps = files.stamps();
        let parts = files.read(without)?;
        Ok(Tls { files, without, current: Mutex::new(Current { parts, stamps }) })
    }

    /// Performs the TLS handshake with a client.
    pub(crate) async fn accept<S>(&self, stream: S) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let accepting = TlsAcceptor::from(self.parts().config).accept(stream);
        match tokio::time::timeout(HANDSHAKE_MAX, accepting).await {
            Ok(accepted) => accepted.map_err(|error| io::Error::other(format!("no TLS: {error}"))),
            Err(_) => Err(io::Error::other("the TLS handshake took too long")),
        }
    }

    /// Returns true if the daemon's certificate is valid for this name or address.
    pub(crate) fn is_for(&self, name: &str) -> bool {
        names(&self.parts().own, name)
    }

    /// Returns the current TLS settings, read again if the files have changed and are usable.
    fn parts(&self) -> Parts {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let stamps = self.files.stamps();
        if stamps != current.stamps {
            current.stamps = stamps;
            match self.files.read(self.without) {
                Ok(parts) => {
                    tracing::info!("read {} again", self.files.cert.display());
                    current.parts = parts;
                }
                Err(error) => tracing::warn!("{error}; the previous certificate stays in use"),
            }
        }
        current.parts.clone()
    }
}

impl TlsFiles {
    fn stamps(&self) -> Vec<Option<Stamp>> {
        let all = [Some(&self.cert), Some(&self.key), self.client_ca.as_ref()];
        all.into_iter().flatten().map(|path| Stamp::of(path)).collect()
    }

    fn read(&self, without: WithoutCertificate) -> Result<Parts, TlsError> {
        check_file(&self.cert)?;
        let chain = pem::certificates(&self.cert)?;
        let own = chain[0].clone();
        let key = pem::private_key(&self.key, &secret(&self.key)?)?;
        let unusable = |source| TlsError::Unusable { cert: self.cert.clone(), key: self.key.clone(), source };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(unusable)?;
        let builder = match &self.client_ca {
            Some(path) => builder.with_client_cert_verifier(verifier(path, without)?),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_single_cert(chain, key).map_err(unusable)?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Parts { config: Arc::new(config), own })
    }
}

fn verifier(path: &Path, without: WithoutCertificate) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let wrong = |why: String| TlsError::Authorities { path: path.to_owned(), why };
    let mut roots = RootCertStore::empty();
    check_file(path)?;
    for certificate in pem::certificates(path)? {
        roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    let builder = match without {
        WithoutCertificate::Refused => builder,
        WithoutCertificate::Welcome => builder.allow_unauthenticated(),
    };
    builder.build().map_err(|error| wrong(error.to_string()))
}

/// Parses hexadecimal digits; `None` for other characters and for an odd number of digits.
pub(crate) fn hex(digits: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8);
    let (pairs, rest) = digits.as_chunks::<2>();
    let bytes = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
    if rest.is_empty() { bytes } else { None }
}

/// Reads a file that must not be readable by every user.
pub(crate) fn secret(path: &Path) -> Result<Vec<u8>, TlsError> {
    check_file(path)?;
    let unreadable = |source| PemError::Unreadable { path: path.to_owned(), source };
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    if metadata.permissions().mode() & 0o007 != 0 {
        return Err(TlsError::Exposed(path.to_owned()));
    }
    Ok(pem::read(path)?)
}

/// Reads the TLS files of this host as a client: the trusted CA certificates, and this host's
/// certificate with its key.
pub(crate) fn client_tls(ca: &Path, own: Option<(&Path, &Path)>) -> Result<ClientTls, TlsError> {
    check_file(ca)?;
    if let Some((cert, key)) = own {
        check_file(cert)?;
        check_file(key)?;
    }
    Ok(ClientTls::load(ca, own)?)
}

/// Checks that a file with certificates, a key or a token is a regular file: reading a FIFO would
/// wait forever. Returns no error for a missing file, because reading it reports the error.
pub(crate) fn check_file(path: &Path) -> Result<(), TlsError> {
    match check_regular_file(path) {
        Ok(()) | Err(OpenError::System { .. }) => Ok(()),
        Err(error) => Err(TlsError::NotRegular(error)),
    }
}

/// Returns true if a certificate is valid for this DNS name or address.
fn names(certificate: &CertificateDer<'_>, name: &str) -> bool {
    let Ok(name) = ServerName::try_from(name) else { return false };
    let Ok(certificate) = ParsedCertificate::try_from(certificate) else { return false };
    rustls::client::verify_server_name(&certificate, &name).is_ok()
}

#[cfg(test)]
pub(crate) mod tests;
