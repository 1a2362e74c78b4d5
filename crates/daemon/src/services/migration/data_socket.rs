//! Local socket through which the shards of the destination use the data connections to the source.
//!
//! A *ready* connection is one that the source has opened and that no client of the socket uses
//! yet. A client of the socket gets the newest ready connection, or waits for one.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::flow::{self, Bandwidth};
use crate::background::spawn;
use crate::socket_access::{SocketAccess, bind_socket, serve_each};

/// Maximum number of ready connections: data connections to the source that no client of the socket
/// uses yet. If the source opens one more, the oldest ready connection is closed.
const READY_MAX: usize = 2;

/// Maximum time that a client of the socket waits for a connection.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// A data connection on which the source is the NBD server.
pub(crate) type DataConnection = TokioIo<Upgraded>;

/// Data connections that the source opened as the disk's owner, and that it opened later as the
/// former owner.
#[derive(Debug, Default)]
pub(super) struct DataConnections {
    pub(super) owner: Arc<ReadyConnections>,
    pub(super) former: Arc<ReadyConnections>,
}

/// Queue of ready data connections.
#[derive(Debug, Default)]
pub(super) struct ReadyConnections {
    connections: Mutex<VecDeque<DataConnection>>,
    came: Notify,
}

impl ReadyConnections {
    /// Adds a ready connection to the queue.
    pub(super) fn put(&self, connection: DataConnection) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.push_back(connection);
        if connections.len() > READY_MAX {
            connections.pop_front();
        }
        self.came.notify_one();
    }

    async fn get(&self) -> DataConnection {
        loop {
            let newest = self.connections.lock().unwrap_or_else(PoisonError::into_inner).pop_back();
            match newest {
                Some(connection) => return connection,
                None => self.came.notified().await,
            }
        }
    }
}

/// The local socket, which is closed when this value is dropped.
#[derive(Debug)]
pub(super) struct DataSocket {
    path: PathBuf,
    tasks: Vec<JoinHandle<()>>,
}

impl DataSocket {
    pub(super) fn open(path: &Path, ready: Arc<ReadyConnections>) -> io::Result<DataSocket> {
        // An earlier process may have left a socket.
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::from_std(bind_socket(path, SocketAccess::default())?)?;
        let serving = serve_each(listener, "migration", move |stream| serve(stream, ready.clone()));
        Ok(DataSocket { path: path.to_owned(), tasks: vec![spawn(serving)] })
    }

    /// Spawns a task for `work`, which is aborted when the socket is dropped.
    pub(super) fn also(&mut self, work: impl Future<Output = ()> + Send + 'static) {
        self.tasks.push(spawn(work));
    }

    /// Returns the URI with which a shard opens an export of the source through the socket, as a
    /// backing.
    pub(super) fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{}?socket={}", escaped(export), escaped(&self.path.to_string_lossy()))
    }
}

impl Drop for DataSocket {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        let _ = std::fs::remove_file(&self.path);
    }
}

async fn serve(stream: UnixStream, ready: Arc<ReadyConnections>) {
    let Ok(connection) = tokio::time::timeout(WAIT_MAX, ready.get()).await else { return };
    // The source limits and counts the bytes, so this host does neither.
    flow::join(stream, connection, &Bandwidth::new(None), &AtomicU64::new(0)).await;
}

/// Escapes text for a URI.
fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { (byte as char).to_string() } else { format!("%{byte:02X}") })
        .collect()
}
