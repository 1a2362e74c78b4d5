//! Where this host's shards find the data connections that another host has opened: a socket of its own.
//!
//! Whoever connects there gets the newest connection that is ready, or waits for one.

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
use tokio::task::{JoinHandle, JoinSet};

use super::flow::{self, Bandwidth};
use crate::daemon::nbd_listener::bind_socket;
use crate::daemon::socket_access::SocketAccess;

/// Connections that are kept ready; the oldest gives way.
const READY_MAX: usize = 2;

/// Who connects waits no longer for a connection.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// A connection in which the other host is the server.
pub(crate) type DataConnection = TokioIo<Upgraded>;

/// Where connections of the owner, and of who had the disk, come in.
#[derive(Debug, Default)]
pub(super) struct Doors {
    pub(super) owner: Arc<Ready>,
    pub(super) former: Arc<Ready>,
}

/// Connections that are ready.
#[derive(Debug, Default)]
pub(super) struct Ready {
    connections: Mutex<VecDeque<DataConnection>>,
    came: Notify,
}

impl Ready {
    /// Another one.
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

/// The socket. It goes when this is dropped.
#[derive(Debug)]
pub(super) struct Hook {
    path: PathBuf,
    tasks: Vec<JoinHandle<()>>,
}

impl Hook {
    pub(super) fn open(path: &Path, ready: Arc<Ready>) -> io::Result<Hook> {
        // One that an earlier process left.
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::from_std(bind_socket(path, SocketAccess::default())?)?;
        Ok(Hook { path: path.to_owned(), tasks: vec![tokio::spawn(accept(listener, ready))] })
    }

    /// Does that too, until it is dropped.
    pub(super) fn also(&mut self, work: impl Future<Output = ()> + Send + 'static) {
        self.tasks.push(tokio::spawn(work));
    }

    /// The backing that is found there.
    pub(super) fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{}?socket={}", escaped(export), escaped(&self.path.to_string_lossy()))
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        let _ = std::fs::remove_file(&self.path);
    }
}

async fn accept(listener: UnixListener, ready: Arc<Ready>) {
    let mut joined = JoinSet::new();
    loop {
        while joined.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                let ready = ready.clone();
                joined.spawn(async move { serve(stream, &ready).await });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve(stream: UnixStream, ready: &Ready) {
    let Ok(connection) = tokio::time::timeout(WAIT_MAX, ready.get()).await else { return };
    // The other host bounds and counts.
    flow::join(stream, connection, &Bandwidth::new(None), &AtomicU64::new(0)).await;
}

/// As a part of a URI.
fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { (byte as char).to_string() } else { format!("%{byte:02X}") })
        .collect()
}
