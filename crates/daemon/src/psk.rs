//! TLS for NBD with pre-shared keys (external PSK, RFC 8446 section 2.2): the keys, and the
//! interface to the TLS library.
//!
//! Clients with GnuTLS, such as qemu and libnbd, can use such keys. rustls does not support them
//! (docs/decisions/0010-tls.md), so the program installs another library ([`install`]). The key
//! file has a line `name:hexadecimal` for each client, as `psktool` writes it. The key file is
//! checked at each new connection, and read again if it has changed.
//!
//! Keys that every user can read, and keys shorter than [`KEY_BYTES_MIN`], are refused.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};

use super::tls::{self, Stamp, TlsError};

/// Maximum time for a client to finish the TLS handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(15);

/// Minimum length of a key in bytes.
pub const KEY_BYTES_MIN: usize = 16;

/// Maximum length of a key that OpenSSL accepts, in bytes.
pub const KEY_BYTES_MAX: usize = 256;

/// A connection of a client.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Returns the key with a name, if it exists.
pub type FindKey = Box<dyn Fn(&[u8]) -> Option<Vec<u8>> + Send + Sync>;

/// The result of a TLS handshake: the encrypted stream, and the name of the client's key.
pub type Accepted = io::Result<(Box<dyn Stream>, String)>;

/// A TLS server with pre-shared keys.
pub trait KeyServer: Send + Sync {
    /// Performs the TLS handshake with a client.
    fn accept(&self, stream: Box<dyn Stream>) -> Pin<Box<dyn Future<Output = Accepted> + Send + '_>>;
}

/// Creates a TLS server. The error is a text for users.
pub type NewKeyServer = fn(FindKey) -> Result<Box<dyn KeyServer>, String>;

static NEW_SERVER: OnceLock<NewKeyServer> = OnceLock::new();

/// Installs the TLS library. Later calls have no effect.
pub fn install(new_server: NewKeyServer) {
    let _ = NEW_SERVER.set(new_server);
}

/// Why keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeysError {
    /// The program was built without the TLS library.
    #[error(
        "this hob cannot use the keys in {}: it was built without the feature 'psk', which needs OpenSSL; use \
         certificates",
        .0.display()
    )]
    Absent(PathBuf),
    /// The file is unreadable or gives permissions to too many users.
    #[error("the keys for TLS: {0}")]
    File(#[from] TlsError),
    /// A line is not a valid key.
    #[error("{path}, line {line}: write a name, a colon, and 32 to 512 hexadecimal digits, as psktool does")]
    Line {
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
    },
    /// A name occurs twice, or the file has no key.
    #[error("{path}: {what}")]
    Names {
        path: PathBuf,
        /// Error text for users.
        what: String,
    },
    /// The TLS library cannot be used.
    #[error("cannot use OpenSSL: {0}")]
    Library(String),
}

type Table = BTreeMap<Vec<u8>, Vec<u8>>;

/// The keys, and the TLS server that uses them.
pub(crate) struct Keys {
    path: PathBuf,
    server: Box<dyn KeyServer>,
    current: Arc<Mutex<Current>>,
}

/// The current keys, shared with the TLS library.
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
        match NEW_SERVER.get() {
            Some(new_server) => Keys::load_for(path, *new_server),
            None => Err(KeysError::Absent(path)),
        }
    }

    fn load_for(path: PathBuf, new_server: NewKeyServer) -> Result<Keys, KeysError> {
        let stamp = Stamp::of(&path);
        let current = Arc::new(Mutex::new(Current { table: read(&path)?, stamp }));
        let known = Arc::clone(&current);
        let find: FindKey = Box::new(move |name| lock(&known).table.get(name).cloned());
        let server = new_server(find).map_err(KeysError::Library)?;
        Ok(Keys { path, server, current })
    }

    /// Performs the TLS handshake with a client. Returns the name of its key.
    pub(crate) async fn accept(&self, stream: impl Stream + 'static) -> Accepted {
        self.refresh();
        match tokio::time::timeout(HANDSHAKE_MAX, self.server.accept(Box::new(stream))).await {
            Ok(accepted) => accepted,
            Err(_) => Err(io::Error::other("the TLS handshake took too long")),
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
        let (name, key) = (&line[..colon], tls::hex(&line[colon + 1..]).ok_or_else(wrong)?);
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

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;
    use crate::tls::tests::{make_fifo, write_secret};

    const KEY: &str = "000102030405060708090a0b0c0d0e0f";

    /// A server without encryption for tests. The client sends the length of a name, and the name.
    /// The server's answer to [`Keys::accept`] is that name with the first byte of its key.
    struct Plain(FindKey);

    impl KeyServer for Plain {
        fn accept(&self, mut stream: Box<dyn Stream>) -> Pin<Box<dyn Future<Output = Accepted> + Send + '_>> {
            Box::pin(async move {
                let mut name = vec![0; usize::from(stream.read_u8().await?)];
                stream.read_exact(&mut name).await?;
                let key = self.0(&name).ok_or_else(|| io::Error::other("no such key"))?;
                Ok((stream, format!("{} {}", String::from_utf8_lossy(&name), key[0])))
            })
        }
    }

    /// Returns the result of the handshake with a client that sends this name.
    async fn meet(keys: &Keys, name: &'static str) -> io::Result<String> {
        let sent: Vec<u8> = [&[name.len() as u8][..], name.as_bytes()].concat();
        keys.accept(io::Cursor::new(sent)).await.map(|(_, name)| name)
    }

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
        let fifo = dir.path().join("fifo");
        make_fifo(&fifo);
        assert!(read(&fifo).unwrap_err().to_string().contains("leads to a FIFO"));
    }

    #[tokio::test]
    async fn the_file_is_read_again_when_it_has_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        write_secret(&path, &format!("host7:{KEY}\nhost8:{}\n", "07".repeat(32)));
        let keys = Keys::load_for(path.clone(), |find| Ok(Box::new(Plain(find)))).unwrap();
        assert_eq!(meet(&keys, "host7").await.unwrap(), "host7 0");
        assert_eq!(meet(&keys, "host8").await.unwrap(), "host8 7");
        meet(&keys, "host9").await.unwrap_err();
        // The key of host8 is removed from the file, and the key of host9 is added.
        std::fs::remove_file(&path).unwrap();
        write_secret(&path, &format!("host7:{KEY}\nhost9:{KEY}\n"));
        assert_eq!(meet(&keys, "host9").await.unwrap(), "host9 0");
        meet(&keys, "host8").await.unwrap_err();
        // An unusable file changes nothing.
        write_secret(&path, "nothing");
        assert_eq!(meet(&keys, "host9").await.unwrap(), "host9 0");
    }

    #[test]
    fn without_the_library_the_missing_feature_is_named() {
        let error = Keys::load("/keys".into()).unwrap_err().to_string();
        assert!(error.contains("/keys") && error.contains("built without the feature 'psk'"), "{error}");
    }
}
