//! Sockets that are listened on: which of them the program before has left open, and which are to be left open for the next.
//!
//! A door that is left open refuses nobody: who connects meanwhile waits in the kernel. For that the file of a Unix socket must stay when its
//! listener goes, and nobody may be half-way in.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_control::Endpoint;
use tokio::sync::watch;

/// How often it is looked whether somebody is still half-way in.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Which door: what is spoken there, and where.
pub(crate) fn name(spoken: &str, endpoint: &Endpoint) -> String {
    format!("{spoken} {endpoint}")
}

/// All doors. Clones are of the same ones.
#[derive(Clone, Debug)]
pub(crate) struct Doors {
    table: Arc<Mutex<Table>>,
    shut: Arc<watch::Sender<bool>>,
    /// Cloned for each client that is half-way in.
    threshold: Arc<()>,
}

#[derive(Debug, Default)]
struct Table {
    inherited: BTreeMap<String, OwnedFd>,
    /// A second descriptor of each.
    open: BTreeMap<String, OwnedFd>,
    /// Those that stay open when they are closed here, once that is so: their listeners may go later.
    stay: Option<BTreeSet<String>>,
}

/// Somebody is half-way in.
#[derive(Debug)]
pub(crate) struct HalfWay {
    _threshold: Arc<()>,
}

impl Default for Doors {
    fn default() -> Doors {
        Doors::inherited(Vec::new())
    }
}

impl Doors {
    /// Doors, of which these are open already.
    pub(crate) fn inherited(open: Vec<(String, OwnedFd)>) -> Doors {
        let table = Table { inherited: open.into_iter().collect(), ..Table::default() };
        Doors {
            table: Arc::new(Mutex::new(table)),
            shut: Arc::new(watch::Sender::new(false)),
            threshold: Arc::default(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The socket of that door, if it was left open. One whose file is gone was left open in vain.
    pub(crate) fn take(&self, name: &str) -> Option<OwnedFd> {
        let socket = self.table().inherited.remove(name)?;
        let is_there = path_of(name).is_none_or(|path| is_socket(&path));
        let listens = rustix::net::sockopt::socket_acceptconn(&socket).unwrap_or(false);
        (is_there && listens).then_some(socket)
    }

    /// A door was opened.
    pub(crate) fn opened(&self, name: String, socket: impl AsFd) {
        match socket.as_fd().try_clone_to_owned() {
            Ok(second) => drop(self.table().open.insert(name, second)),
            Err(error) => tracing::warn!("{name} cannot be kept open in an upgrade: {error}"),
        }
    }

    /// A door is gone, and its socket's file is to go too; unless it stays.
    pub(crate) fn closed(&self, name: &str) {
        let mut table = self.table();
        if table.stay.as_ref().is_some_and(|stay| stay.contains(name)) {
            return;
        }
        table.open.remove(name);
        drop(table);
        if let Some(path) = path_of(name) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// From now on doors that are closed here stay open for the next program.
    pub(crate) fn leave_open(&self) {
        let mut table = self.table();
        table.stay = Some(table.open.keys().cloned().collect());
    }

    /// What was left open.
    pub(crate) fn left_open(&self) -> Vec<(String, OwnedFd)> {
        std::mem::take(&mut self.table().open).into_iter().collect()
    }

    /// Closes what the program before has left and nobody wanted.
    pub(crate) fn close_unwanted(&self) {
        let unwanted = std::mem::take(&mut self.table().inherited);
        for (name, socket) in unwanted {
            tracing::info!("{name} is not listened on any more");
            drop(socket);
            if let Some(path) = path_of(&name).filter(|path| is_socket(path)) {
                let _ = std::fs::remove_file(path);
            }
        }
    }

    /// Lets nobody in until they are opened again.
    pub(crate) fn shut(&self) {
        self.shut.send_replace(true);
    }

    /// Lets clients in again.
    pub(crate) fn open(&self) {
        self.shut.send_replace(false);
    }

    /// Waits until clients are let in.
    pub(crate) async fn until_open(&self) {
        // The sender is here.
        let _ = self.shut.subscribe().wait_for(|shut| !shut).await;
    }

    /// Waits until nobody is let in.
    pub(crate) async fn until_shut(&self) {
        let _ = self.shut.subscribe().wait_for(|shut| *shut).await;
    }

    /// Somebody is let in, and for as long as this is kept half-way.
    pub(crate) fn half_way(&self) -> HalfWay {
        HalfWay { _threshold: self.threshold.clone() }
    }

    /// Waits until nobody is half-way in, for at most that long.
    pub(crate) async fn until_clear(&self, time_max: Duration) {
        let clear = async {
            while Arc::strong_count(&self.threshold) > self.handles() {
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        if tokio::time::timeout(time_max, clear).await.is_err() {
            tracing::info!("clients that had not chosen an export have to connect again");
        }
    }

    /// Each clone of this has the threshold too.
    fn handles(&self) -> usize {
        Arc::strong_count(&self.table)
    }
}

/// Where the file of a Unix socket is.
fn path_of(name: &str) -> Option<PathBuf> {
    name.split_once(" unix:").map(|(_, path)| path.into())
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_door_that_is_left_open_keeps_its_file_and_whoever_came_meanwhile() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let name = name("nbd", &Endpoint::Unix(path.clone()));
        let doors = Doors::default();
        let listener = UnixListener::bind(&path).unwrap();
        doors.opened(name.clone(), &listener);
        doors.leave_open();
        let next = Doors::inherited(doors.left_open());
        drop(listener);
        doors.closed(&name);
        let _client = UnixStream::connect(&path).unwrap();
        assert!(next.take("nbd unix:/another").is_none());
        let listener = UnixListener::from(next.take(&name).unwrap());
        assert!(next.take(&name).is_none(), "it is there once");
        listener.accept().unwrap();
        // It goes as it usually does.
        next.opened(name.clone(), &listener);
        drop(listener);
        next.closed(&name);
        assert!(!path.exists());
        assert!(next.left_open().is_empty());
    }

    #[test]
    fn what_nobody_wants_and_what_is_no_door_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |file: &str| dir.path().join(file);
        let inherit = |file: &str, fd: OwnedFd| {
            let name = name("nbd", &Endpoint::Unix(at(file)));
            (name.clone(), Doors::inherited(vec![(name, fd)]))
        };
        let (_, doors) = inherit("a", UnixListener::bind(at("a")).unwrap().into());
        doors.close_unwanted();
        assert!(!at("a").exists());
        // Its file was removed, so nobody can come in there.
        let (name, doors) = inherit("b", UnixListener::bind(at("b")).unwrap().into());
        std::fs::remove_file(at("b")).unwrap();
        assert!(doors.take(&name).is_none());
        // Another kind of descriptor.
        let _other = UnixListener::bind(at("c")).unwrap();
        let (name, doors) = inherit("c", UnixStream::pair().unwrap().0.into());
        assert!(doors.take(&name).is_none());
        let (name, doors) = inherit("c", tempfile::tempfile().unwrap().into());
        assert!(doors.take(&name).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_half_way_in_before_the_wait_ends() {
        let doors = Doors::default();
        let clone = doors.clone();
        let guest = doors.half_way();
        let start = tokio::time::Instant::now();
        doors.until_clear(Duration::from_secs(3)).await;
        assert!(start.elapsed() >= Duration::from_secs(3));
        let leaving = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            drop(guest);
        };
        let start = tokio::time::Instant::now();
        tokio::join!(leaving, clone.until_clear(Duration::from_secs(60)));
        assert!(start.elapsed() < Duration::from_secs(2));
        doors.shut();
        clone.until_shut().await;
        assert!(tokio::time::timeout(Duration::from_secs(1), clone.until_open()).await.is_err());
        doors.open();
        clone.until_open().await;
    }
}
