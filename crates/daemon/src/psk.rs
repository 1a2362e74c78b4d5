//! TLS for NBD with pre-shared keys (external PSK, RFC 8446 section 2.2), by OpenSSL.
//!
//! Clients with GnuTLS, such as qemu and libnbd, can use such keys. rustls does not support them
//! (docs/decisions/0010-tls.md). The key file has a line `name:hexadecimal` for each client, as
//! `psktool` writes it. The key file is checked at each new connection, and read again if it has
//! changed.
//!
//! Only TLS 1.3 is accepted, with an additional key exchange, so that a key that leaks later cannot
//! decrypt recorded traffic. Sessions are not resumed. Keys that every user can read, and keys
//! shorter than [`KEY_BYTES_MIN`], are refused.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use openssl::error::ErrorStack;
use openssl::ex_data::Index;
use openssl::ssl::{
    Ssl, SslContext, SslMethod, SslMode, SslOptions, SslRef, SslSessionCacheMode, SslVersion,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_openssl::SslStream;

use super::tls::{self, Stamp, TlsError};

/// Maximum time for a client to finish the TLS handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(15);

/// Minimum length of a key in bytes.
const KEY_BYTES_MIN: usize = 16;

/// Maximum length of a key that OpenSSL accepts, in bytes.
const KEY_BYTES_MAX: usize = 256;

/// Why keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeysError {
    /// The file is unreadable or gives permissions to too many users.
    #[error("the keys for TLS: {0}")]
    File(#[from] TlsError),
    /// A line is not a valid key.
    #[error("{}, line {line}: write a name, a colon, and 32 to 512 hexadecimal digits, as psktool does", path.display())]
    Line {
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
    },
    /// A name occurs twice, or the file has no key.
    #[error("{}: {what}", path.display())]
    Names {
        path: PathBuf,
        /// The error.
        what: String,
    },
    /// OpenSSL cannot be used.
    #[error("cannot use OpenSSL: {0}")]
    Library(#[from] ErrorStack),
}

type Table = BTreeMap<Vec<u8>, Vec<u8>>;

/// The keys, and the TLS context that uses them.
pub(crate) struct Keys {
    path: PathBuf,
    context: SslContext,
    name: Index<Ssl, String>,
    current: Arc<Mutex<Current>>,
}

/// The current keys, shared with the callbacks of OpenSSL.
struct Current {
    table: Table,
    stamp: Option<Stamp>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keys").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Keys {
    /// Reads and checks the file.
    pub(crate) fn load(path: PathBuf) -> Result<Keys, KeysError> {
        let stamp = Stamp::of(&path);
        let current = Arc::new(Mutex::new(Current { table: read(&path)?, stamp }));
        let name = Ssl::new_ex_index()?;
        let mut builder = SslContext::builder(SslMethod::tls_server())?;
        builder.set_min_proto_version(Some(SslVersion::TLS1_3))?;
        // Keys without their own hash function use SHA-256.
        builder.set_ciphersuites("TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256")?;
        builder.set_session_cache_mode(SslSessionCacheMode::OFF);
        builder.set_options(SslOptions::NO_TICKET);
        builder.set_num_tickets(0)?;
        builder.set_mode(
            SslMode::ENABLE_PARTIAL_WRITE | SslMode::ACCEPT_MOVING_WRITE_BUFFER | SslMode::RELEASE_BUFFERS,
        );
        let known = Arc::clone(&current);
        builder.set_psk_server_callback(move |ssl: &mut SslRef, identity: Option<&[u8]>, room: &mut [u8]| {
            let identity = identity.unwrap_or_default();
            let known = lock(&known);
            // An empty result tells OpenSSL that the name is unknown.
            let Some(key) = known.table.get(identity).filter(|key| key.len() <= room.len()) else {
                return Ok(0);
            };
            room[..key.len()].copy_from_slice(key);
            ssl.set_ex_data(name, String::from_utf8_lossy(identity).into_owned());
            Ok(key.len())
        });
        Ok(Keys { path, context: builder.build(), name, current })
    }

    /// Performs the TLS handshake with a client. Returns the name of its key.
    pub(crate) async fn accept<S>(&self, stream: S) -> io::Result<(SslStream<S>, String)>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        self.refresh();
        let mut stream = SslStream::new(Ssl::new(&self.context)?, stream)?;
        match tokio::time::timeout(HANDSHAKE_MAX, Pin::new(&mut stream).accept()).await {
            Ok(accepted) => accepted.map_err(|error| io::Error::other(format!("no TLS: {error}")))?,
            Err(_) => return Err(io::Error::other("the TLS handshake took too long")),
        }
        match stream.ssl().ex_data(self.name).cloned() {
            Some(name) => Ok((stream, name)),
            None => Err(io::Error::other("no TLS: the client did not show that it has a key")),
        }
    }

    /// Reads the file again if it has changed. An invalid file is ignored.
    fn refresh(&self) {
        let stamp = Stamp::of(&self.path);
        let mut current = lock(&self.current);
        if stamp == current.stamp {
            return;
        }
        current.stamp = stamp;
        match read(&self.path) {
            Ok(table) => {
                tracing::info!("read {} again", self.path.display());
                current.table = table;
            }
            Err(error) => tracing::warn!("{error}; the previous keys stay in use"),
        }
    }
}

fn lock(current: &Mutex<Current>) -> MutexGuard<'_, Current> {
    current.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Parses names and keys. Ignores empty lines and lines that begin with #.
fn read(path: &Path) -> Result<Table, KeysError> {
    let bytes = tls::secret(path)?;
    let names = |what: String| KeysError::Names { path: path.to_owned(), what };
    let mut table = Table::new();
    for (number, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() || line[0] == b'#' {
            continue;
        }
        let wrong = || KeysError::Line { path: path.to_owned(), line: number + 1 };
        let colon = line.iter().rposition(|byte| *byte == b':').ok_or_else(wrong)?;
        let (name, key) = (&line[..colon], hex(&line[colon + 1..]).ok_or_else(wrong)?);
        if name.is_empty() || name.contains(&0) || !(KEY_BYTES_MIN..=KEY_BYTES_MAX).contains(&key.len()) {
            return Err(wrong());
        }
        if table.insert(name.to_vec(), key).is_some() {
            return Err(names(format!(
                "the name '{}' appears twice",
                String::from_utf8_lossy(name).escape_debug()
            )));
        }
    }
    if table.is_empty() { Err(names("the file has no key".to_owned())) } else { Ok(table) }
}

fn hex(digits: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8);
    let (pairs, rest) = digits.as_chunks::<2>();
    let bytes = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
    if rest.is_empty() { bytes } else { None }
}

#[cfg(test)]
mod tests {
    use openssl::ssl::{SslConnector, SslVerifyMode};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::tls::tests::write_secret;

    const KEY: &str = "000102030405060708090a0b0c0d0e0f";

    #[test]
    fn the_file_is_what_psktool_writes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        let of = |text: &str| {
            write_secret(&path, text);
            read(&path).map_err(|error| error.to_string())
        };
        let table = of(&format!("# two\nhost7:{KEY}\n\n a:b :{}\n", KEY.to_uppercase())).unwrap();
        assert_eq!(table.len(), 2);
        assert_eq!(table[&b"host7"[..]], (0..16).collect::<Vec<u8>>());
        assert_eq!(table[&b"a:b "[..]], table[&b"host7"[..]]);
        for (text, part) in [
            (String::new(), "no key"),
            ("host7".to_owned(), "line 1"),
            (format!(":{KEY}"), "line 1"),
            (format!("a:{KEY}\nb:{}", &KEY[1..]), "line 2"),
            (format!("a:{}", &KEY[2..]), "line 1"),
            (format!("a:{}zz", &KEY[2..]), "line 1"),
            (format!("a:{}", "00".repeat(257)), "line 1"),
            (format!("a:{KEY}\na:{KEY}"), "'a' appears twice"),
        ] {
            let error = of(&text).unwrap_err();
            assert!(error.contains(part) && !error.contains(&KEY[2..]), "{text}: {error}");
        }
    }

    /// The result of the server's handshake with a client of that name and key.
    async fn meet(keys: &Keys, name: &'static str, key: &'static [u8]) -> io::Result<String> {
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
            let (mut stream, name) = keys.accept(far).await?;
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
        const OTHER: &[u8] = &[7; 32];
        let own: &'static [u8] = Box::leak((0..16).collect::<Vec<u8>>().into_boxed_slice());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        write_secret(&path, &format!("host7:{KEY}\nhost8:{}\n", "07".repeat(32)));
        let keys = Keys::load(path.clone()).unwrap();
        assert_eq!(meet(&keys, "host7", own).await.unwrap(), "host7");
        assert_eq!(meet(&keys, "host8", OTHER).await.unwrap(), "host8");
        meet(&keys, "host7", OTHER).await.unwrap_err();
        meet(&keys, "host9", own).await.unwrap_err();
        // The key of host8 is removed from the file, and the key of host9 is added.
        std::fs::remove_file(&path).unwrap();
        write_secret(&path, &format!("host7:{KEY}\nhost9:{KEY}\n"));
        assert_eq!(meet(&keys, "host9", own).await.unwrap(), "host9");
        meet(&keys, "host8", OTHER).await.unwrap_err();
        // An unusable file changes nothing.
        write_secret(&path, "nothing");
        assert_eq!(meet(&keys, "host9", own).await.unwrap(), "host9");
    }
}
