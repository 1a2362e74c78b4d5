//! TLS to an NBD server: certificates from files, the handshake, and the encrypted stream.
//!
//! hob reads certificates as libnbd and QEMU do, from a directory with `ca-cert.pem`, and
//! optionally `client-cert.pem` and `client-key.pem`. The files are read for each connection, so
//! renewed certificates need no restart. TLS 1.3 and 1.2 are allowed. Pre-shared keys are in
//! [`psk`](super::psk).

use std::fs::Metadata;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use hob_nbd::uri::{Address, Credentials, NbdUri, UriTls};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use super::psk::{self, KeyStream};
use super::socket::{Socket, in_time};
use crate::backing::path::not_regular;

/// An encrypted stream over a socket that may block or not. If it does not block, its functions
/// return [`WouldBlock`](io::ErrorKind::WouldBlock) as a socket does.
pub(super) enum Session {
    Certificates(Box<ClientConnection>, Socket),
    PreSharedKey(Box<dyn KeyStream>),
}

impl Session {
    /// Performs the TLS handshake that `uri` requests. The error is a sentence for users.
    pub(super) fn start(
        socket: Socket,
        uri: &NbdUri,
        tls: &UriTls,
        deadline: Instant,
    ) -> Result<Session, String> {
        match &tls.credentials {
            Credentials::Certificates(directory) => {
                let name = server_name(uri, tls)?;
                let connection = ClientConnection::new(Arc::new(config(directory)?), name)
                    .map_err(|error| error.to_string())?;
                handshake(connection, socket, deadline)
            }
            Credentials::PreSharedKey { file, user } => {
                psk::connect(socket, file, user, deadline).map(Session::PreSharedKey)
            }
        }
    }

    pub(super) fn socket(&self) -> &Socket {
        match self {
            Session::Certificates(_, socket) => socket,
            Session::PreSharedKey(stream) => stream.socket(),
        }
    }

    /// Returns true if encrypted bytes wait for [`flush`](Write::flush).
    pub(super) fn wants_write(&self) -> bool {
        match self {
            Session::Certificates(connection, _) => connection.wants_write(),
            Session::PreSharedKey(_) => false,
        }
    }

    /// Tells the server that no more data follows.
    pub(super) fn close(&mut self) {
        match self {
            Session::Certificates(connection, _) => connection.send_close_notify(),
            Session::PreSharedKey(stream) => stream.shutdown(),
        }
        let _ = self.flush();
    }
}

impl Read for Session {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Session::Certificates(connection, socket) => loop {
                // Also after the last byte from the socket, there may be decrypted data left.
                match connection.reader().read(into) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    read => return read,
                }
                connection.read_tls(socket)?;
                connection.process_new_packets().map_err(io::Error::other)?;
            },
            Session::PreSharedKey(stream) => stream.read(into),
        }
    }
}

impl Write for Session {
    /// Encrypts bytes. Some of the encrypted bytes may wait for [`flush`](Write::flush).
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Session::Certificates(connection, _) => connection.writer().write(bytes),
            Session::PreSharedKey(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Session::Certificates(connection, socket) => {
                while connection.wants_write() {
                    connection.write_tls(socket)?;
                }
                Ok(())
            }
            Session::PreSharedKey(stream) => stream.flush(),
        }
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket().as_fd()
    }
}

/// Returns the name that the server's certificate must have.
fn server_name(uri: &NbdUri, tls: &UriTls) -> Result<ServerName<'static>, String> {
    let name = match (&tls.hostname, &uri.address) {
        (Some(name), _) => name,
        (None, Address::Tcp { host, .. }) => host,
        (None, Address::Unix { .. }) => {
            return Err("the certificate's name is unknown; append &tls-hostname=NAME".to_owned());
        }
    };
    ServerName::try_from(name.clone())
        .map_err(|_| format!("{name:?} cannot be the name in a certificate; append tls-hostname=NAME"))
}

fn config(directory: &Path) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    let authorities = directory.join("ca-cert.pem");
    for certificate in certificates(&authorities)? {
        roots.add(certificate).map_err(|error| unusable(&authorities, &error))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    let (certificate, key) = (directory.join("client-cert.pem"), directory.join("client-key.pem"));
    if !certificate.exists() {
        return Ok(builder.with_no_client_auth());
    }
    check_secret(&key)?;
    let private = PrivateKeyDer::from_pem_file(&key).map_err(|error| unusable(&key, &error))?;
    builder
        .with_client_auth_cert(certificates(&certificate)?, private)
        .map_err(|error| unusable(&certificate, &error))
}

fn certificates(path: &PathBuf) -> Result<Vec<CertificateDer<'static>>, String> {
    regular_file(path)?;
    let all = CertificateDer::pem_file_iter(path).map_err(|error| unusable(path, &error))?;
    let all: Vec<_> = all.collect::<Result<_, _>>().map_err(|error| unusable(path, &error))?;
    if all.is_empty() {
        return Err(format!("{} has no certificate in PEM form", path.display()));
    }
    Ok(all)
}

fn unusable(path: &Path, why: &dyn std::fmt::Display) -> String {
    format!("cannot use {}: {why}", path.display())
}

/// Refuses a file with a secret if every user of the host can read the file.
pub(super) fn check_secret(path: &Path) -> Result<(), String> {
    if regular_file(path)?.permissions().mode() & 0o004 != 0 {
        return Err(format!("every user can read {}; chmod it to 0600, or 0640 for a group", path.display()));
    }
    Ok(())
}

/// Returns the metadata of a regular file, and refuses other files: reading a FIFO could wait
/// forever.
fn regular_file(path: &Path) -> Result<Metadata, String> {
    let metadata = std::fs::metadata(path).map_err(|error| unusable(path, &error))?;
    match metadata.is_file() {
        true => Ok(metadata),
        false => Err(not_regular(path, metadata.file_type()).to_string()),
    }
}

/// Performs the TLS handshake with timeouts, so that a server that sends single bytes cannot delay
/// it beyond the deadline.
fn handshake(
    mut connection: ClientConnection,
    mut socket: Socket,
    deadline: Instant,
) -> Result<Session, String> {
    while connection.is_handshaking() {
        socket.wait_until(deadline)?;
        let step = if connection.wants_write() {
            connection.write_tls(&mut socket)
        } else {
            connection.read_tls(&mut socket)
        };
        match step {
            Ok(0) => return Err("the server closed the connection during the TLS handshake".to_owned()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(in_time(&error)),
        }
        if let Err(error) = connection.process_new_packets() {
            // The alert tells the server why.
            let _ = connection.write_tls(&mut socket);
            return Err(format!("the TLS handshake failed: {error}"));
        }
    }
    let mut session = Session::Certificates(Box::new(connection), socket);
    session.flush().map_err(|error| in_time(&error))?;
    Ok(session)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifo_as_certificate_or_key_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let refused = format!("{}: the path leads to a FIFO, not to a regular file", fifo.display());
        assert_eq!(certificates(&fifo).unwrap_err(), refused);
        assert_eq!(check_secret(&fifo).unwrap_err(), refused);
        assert!(check_secret(dir.path()).unwrap_err().contains("leads to a directory"));
    }
}
