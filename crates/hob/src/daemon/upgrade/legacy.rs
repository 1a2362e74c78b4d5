//! What the program before has left in this process, and how it gets to whom it belongs.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_frontends::fuse::Attributes;
use hob_nbd::server::handshake::Negotiated;
use tokio::sync::Semaphore;

use super::parcel;
use super::record::{ClientEntry, Record};
use crate::daemon::allow::{Peer, Visible};
use crate::daemon::doors::Doors;
use crate::daemon::listen::{Hall, Line, Place};
use crate::daemon::manager::LeftFile;
use crate::daemon::mount::Mount;

/// How often clients are looked at whose disks are not there yet.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A client whose disk is not there by then has to connect again.
const DISK_MAX: Duration = Duration::from_secs(60);

/// What was left. Empty in a program that was started in the usual way.
#[derive(Debug, Default)]
pub(crate) struct Legacy {
    /// Where the program lies that goes on at an upgrade.
    pub(crate) program: PathBuf,
    /// This process was another program before.
    pub(crate) goes_on: bool,
    pub(super) doors: Vec<(String, OwnedFd)>,
    pub(super) files: Vec<(String, LeftFile)>,
    clients: Vec<LeftClient>,
}

/// An NBD client.
#[derive(Debug)]
struct LeftClient {
    entry: ClientEntry,
    socket: OwnedFd,
    received: Vec<u8>,
}

impl Legacy {
    /// Takes what was left, once. What cannot be understood is closed, and the start is a usual one.
    pub(crate) fn take() -> Legacy {
        let program = std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into());
        match parcel::take() {
            Ok(None) => Legacy { program, ..Legacy::default() },
            Ok(Some((record, fds))) => {
                tracing::info!("goes on with {}", record.table.summary());
                Legacy::sort(record, fds)
            }
            Err(error) => {
                tracing::error!(
                    "what the hob before has left cannot be taken over, so its clients have to connect again: {error}"
                );
                Legacy { program, goes_on: true, ..Legacy::default() }
            }
        }
    }

    pub(super) fn sort(record: Record, fds: Vec<OwnedFd>) -> Legacy {
        let Record { table, received } = record;
        let mut fds = fds.into_iter();
        let mut next = || fds.next().expect("there are as many as the table says");
        let doors = table.doors.into_iter().map(|name| (name, next())).collect();
        let files = table.files.into_iter().map(|file| {
            let attributes = Attributes {
                size: file.size,
                mode: file.mode,
                uid: file.uid,
                gid: file.gid,
                seconds: file.seconds,
            };
            let mount = Mount::left(file.path.clone(), file.made);
            let left =
                LeftFile { path: file.path, device: next(), mount, attributes, read_only: file.read_only };
            (file.disk, left)
        });
        let files = files.collect();
        let clients = table.clients.into_iter().zip(received);
        let clients =
            clients.map(|(entry, received)| LeftClient { entry, socket: next(), received }).collect();
        Legacy { program: table.program, goes_on: true, doors, files, clients }
    }

    /// The doors that were left open.
    pub(crate) fn doors(&mut self) -> Doors {
        Doors::inherited(std::mem::take(&mut self.doors))
    }

    /// The files that were left mounted, by export.
    pub(crate) fn files(&mut self) -> Vec<(String, LeftFile)> {
        std::mem::take(&mut self.files)
    }
}

/// Clients whose disks are not there yet. Clones are of the same ones.
#[derive(Clone, Debug, Default)]
pub(crate) struct WaitingRoom(Arc<Mutex<Vec<(LeftClient, Place)>>>);

impl WaitingRoom {
    fn clients(&self) -> MutexGuard<'_, Vec<(LeftClient, Place)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes those in that were left.
    pub(crate) fn fill(&self, legacy: Legacy, places: &Arc<Semaphore>) {
        for client in legacy.clients {
            match Arc::clone(places).try_acquire_owned() {
                Ok(place) => self.clients().push((client, Arc::new(place))),
                Err(_) => {
                    tracing::warn!("a client has to connect again: there are not as many places any more")
                }
            }
        }
    }

    /// Gives each to the shard of its disk as soon as that is there.
    pub(crate) async fn let_in(self, hall: Hall) {
        let end = tokio::time::Instant::now() + DISK_MAX;
        while !self.clients().is_empty() {
            {
                let mut clients = self.clients();
                let all = std::mem::take(&mut *clients).into_iter();
                *clients = all.filter_map(|(client, place)| client.let_in(&hall, place)).collect();
            }
            if tokio::time::Instant::now() >= end {
                for (client, _) in std::mem::take(&mut *self.clients()) {
                    tracing::warn!(
                        "a client of '{}' has to connect again: it is not there",
                        client.entry.export
                    );
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Those who still wait, for the next program.
    pub(super) fn leave(&self) -> impl Iterator<Item = (ClientEntry, OwnedFd, Vec<u8>)> + use<> {
        let clients = std::mem::take(&mut *self.clients());
        clients.into_iter().map(|(client, _)| (client.entry, client.socket, client.received))
    }
}

impl LeftClient {
    /// Lets it in if its disk is there, and still is what the client was told. It comes back if it has to wait.
    fn let_in(self, hall: &Hall, place: Place) -> Option<(LeftClient, Place)> {
        let peer = Peer { address: address_of(&self.socket), ..Peer::default() };
        let visible = Visible { exports: hall.exports.clone(), allow: hall.allow.clone(), peer };
        let Some(export) = visible.get(&self.entry.export) else { return Some((self, place)) };
        let LeftClient { entry, socket, received } = self;
        let negotiated = Negotiated {
            export: entry.export.clone(),
            info: export.info,
            structured_replies: entry.structured_replies,
            base_allocation: entry.base_allocation,
            contexts: entry.contexts.clone(),
        };
        if !is_as_told(&entry, &negotiated) {
            tracing::warn!("a client of '{}' has to connect again: it is not what it was", entry.export);
            return None;
        }
        let seat = (Line::Direct, place);
        if let Err(error) =
            export.shard.attach(export.disk, socket, negotiated, received, export.promote, seat)
        {
            tracing::warn!("a client of '{}' has to connect again: {error}", entry.export);
        }
        None
    }
}

/// Can a client go on that believes this of its export?
fn is_as_told(told: &ClientEntry, now: &Negotiated) -> bool {
    let info = &now.info;
    info.size_bytes >= told.size
        && now.transmission_flags().0 == told.flags
        && info.block_size_min <= told.block_min
        && info.block_size_max >= told.block_max
}

/// Where a client is; `None` on a Unix socket.
fn address_of(socket: &OwnedFd) -> Option<IpAddr> {
    let socket = std::net::TcpStream::from(socket.try_clone().ok()?);
    socket.peer_addr().ok().map(|address| address.ip().to_canonical())
}

#[cfg(test)]
mod tests {
    use hob_nbd::ExportInfo;

    use super::*;

    #[test]
    fn a_client_goes_on_only_with_what_it_was_told() {
        let now = |info: ExportInfo| Negotiated {
            export: "vm".into(),
            info,
            structured_replies: true,
            base_allocation: true,
            contexts: vec![],
        };
        let was = now(ExportInfo { block_size_min: 512, ..ExportInfo::new(1 << 20) });
        let told = ClientEntry {
            export: "vm".into(),
            size: was.info.size_bytes,
            flags: was.transmission_flags().0,
            block_min: was.info.block_size_min,
            block_max: was.info.block_size_max,
            structured_replies: true,
            base_allocation: true,
            contexts: vec![],
            received: 0,
        };
        let with = |change: fn(&mut ExportInfo)| {
            let mut info = was.info.clone();
            change(&mut info);
            is_as_told(&told, &now(info))
        };
        assert!(with(|_| {}));
        assert!(with(|info| info.size_bytes *= 2), "it may have grown");
        assert!(with(|info| info.block_size_min = 1));
        assert!(!with(|info| info.size_bytes -= 512));
        assert!(!with(|info| info.read_only = true));
        assert!(!with(|info| info.can_trim = false));
        assert!(!with(|info| info.block_size_min = 4096));
        assert!(!with(|info| info.block_size_max = 1 << 20));
    }
}
