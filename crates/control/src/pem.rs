//! Certificates and keys in PEM files, as the client and the daemon read them.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Longest PEM file that hob reads, bytes. It has space for thousands of certificates.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Why a PEM file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PemError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why the file cannot be read.
        source: io::Error,
    },
    /// The file does not contain the expected object.
    #[error("{path} has no {what} in PEM form")]
    Empty {
        /// The file.
        path: PathBuf,
        /// Object that the file should contain.
        what: &'static str,
    },
}

/// Reads a file of at most 4 MiB.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn read(path: &Path) -> Result<Vec<u8>, PemError> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX).read_to_end(&mut bytes))
        .map_err(|source| PemError::Unreadable { path: path.to_owned(), source })?;
    Ok(bytes)
}

/// Reads the certificates in a file.
///
/// # Errors
/// Returns an error if the file cannot be read, or contains no certificate.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        _ => Err(PemError::Empty { path: path.to_owned(), what: "certificate" }),
    }
}

/// Parses the private key in the contents of a file.
///
/// # Errors
/// Returns an error if the file contains no private key.
pub fn private_key(path: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, PemError> {
    PrivateKeyDer::from_pem_slice(bytes)
        .map_err(|_| PemError::Empty { path: path.to_owned(), what: "private key" })
}
