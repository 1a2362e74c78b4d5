//! State that the previous program left in this process, and attaching its clients to their disks
//! again.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_frontends::fuse::Attributes;
use hob_nbd::server::handshake::Negotiated;
use tokio::sync::Semaphore;

use super::message;
use super::record::{ClientEntry, FileEntry, Record};
use crate::allow::{Peer, Visible};
use crate::listening_sockets::ListeningSockets;
use crate::mount::Mount;
use crate::nbd_listener::ListenerContext;
use crate::services::InheritedFile;
use crate::shard_api::{ConnectionPermit, Transport};

/// Interval between two checks whether the disks of waiting clients are open.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Maximum time that a client waits for its disk. After that time, the client must reconnect.
const DISK_MAX: Duration = Duration::from_secs(60);

/// The inherited state. Empty in a program that was not started by an upgrade.
#[derive(Debug, Default)]
pub(crate) struct InheritedState {
    /// Path of the program that takes over at the next upgrade.
    pub(crate) program: PathBuf,
    /// True if this program was started by an upgrade.
    pub(crate) goes_on: bool,
    pub(super) listening: Vec<(String, OwnedFd)>,
    pub(super) files: Vec<(String, InheritedFile)>,
    clients: Vec<InheritedClient>,
}

/// An NBD client whose connection this program has inherited.
#[derive(Debug)]
struct InheritedClient {
    entry: ClientEntry,
    socket: OwnedFd,
    received: Vec<u8>,
}

impl InheritedState {
    /// Reads the inherited state. Later calls return an empty state. If the state is unreadable,
    /// its descriptors are closed, clients must reconnect, and only `goes_on` still records the
    /// upgrade.
    pub(crate) fn take() -> InheritedState {
        let program = std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into());
        match message::take() {
            Ok(None) => InheritedState { program, ..InheritedState::default() },
            Ok(Some((record, fds))) => {
                tracing::info!("taking over {}", record.table.summary());
                InheritedState::sort(record, fds)
            }
            Err(error) => {
                tracing::error!(
                    "cannot take over the state of the previous program, so its clients must \
                    reconnect: {error}"
                );
                InheritedState { program, goes_on: true, ..InheritedState::default() }
            }
        }
    }

    fn sort(record: Record, fds: Vec<OwnedFd>) -> InheritedState {
        let Record { table, received } = record;
        let mut fds = fds.into_iter();
        let mut next = || fds.next().expect("there are as many as the table says");
        let listening = table.listening.into_iter().map(|name| (name, next())).collect();
        let files = table.files.into_iter().map(|file| {
            let time_ns = file.time_ns();
            let FileEntry { disk, path, made, read_only, size, mode, uid, gid, .. } = file;
            let attributes = Attributes { size, mode, uid, gid, time_ns };
            let mount = Mount::left(path.clone(), made);
            (disk, InheritedFile { path, device: next(), mount, attributes, read_only })
        });
        let files = files.collect();
        let clients = table.clients.into_iter().zip(received);
        let clients =
            clients.map(|(entry, received)| InheritedClient { entry, socket: next(), received }).collect();
        InheritedState { program: table.program, goes_on: true, listening, files, clients }
    }

    /// Removes and returns the inherited listening sockets.
    pub(crate) fn listening(&mut self) -> ListeningSockets {
        ListeningSockets::inherited(std::mem::take(&mut self.listening))
    }

    /// Removes and returns the inherited mounted files, with the name of the export of each.
    pub(crate) fn files(&mut self) -> Vec<(String, InheritedFile)> {
        std::mem::take(&mut self.files)
    }
}

/// Inherited clients whose disks are not open yet. Clones share the same clients.
#[derive(Clone, Debug, Default)]
pub(crate) struct WaitingClients(Arc<Mutex<Vec<(InheritedClient, ConnectionPermit)>>>);

impl WaitingClients {
    fn clients(&self) -> MutexGuard<'_, Vec<(InheritedClient, ConnectionPermit)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn fill(&self, inherited: InheritedState, permits: &Arc<Semaphore>) {
        for client in inherited.clients {
            match Arc::clone(permits).try_acquire_owned() {
                Ok(permit) => self.clients().push((client, Arc::new(permit))),
                Err(_) => {
                    tracing::warn!(
                        "a client must reconnect: the maximum number of connections is lower than before"
                    )
                }
            }
        }
    }

    /// Attaches each client to its disk when the disk is open.
    pub(crate) async fn attach_clients(self, context: ListenerContext) {
        let end = tokio::time::Instant::now() + DISK_MAX;
        while !self.clients().is_empty() {
            {
                let mut clients = self.clients();
                let all = std::mem::take(&mut *clients).into_iter();
                *clients = all.filter_map(|(client, permit)| client.attach(&context, permit)).collect();
            }
            if tokio::time::Instant::now() >= end {
                for (client, _) in std::mem::take(&mut *self.clients()) {
                    tracing::warn!(
                        "a client of '{}' must reconnect: the export does not exist, or its disk was not \
                         opened within {} s",
                        client.entry.export,
                        DISK_MAX.as_secs()
                    );
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Removes and returns the inherited clients whose disks are still not open, for the hand-over
    /// to the next program.
    pub(super) fn leave(&self) -> impl Iterator<Item = (ClientEntry, OwnedFd, Vec<u8>)> + use<> {
        let clients = std::mem::take(&mut *self.clients());
        clients.into_iter().map(|(client, _)| (client.entry, client.socket, client.received))
    }
}

impl InheritedClient {
    /// Attaches the client if its disk is open and has the properties that the client negotiated.
    /// Returns the client if its disk is not open yet.
    fn attach(
        self,
        context: &ListenerContext,
        permit: ConnectionPermit,
    ) -> Option<(InheritedClient, ConnectionPermit)> {
        let peer = Peer { address: address_of(&self.socket), ..Peer::default() };
        let visible = Visible { exports: context.exports.clone(), allow: context.allow.clone(), peer };
        // The allow-list does not apply to the kernel, because every disk may be a block device.
        let found = match self.entry.is_kernel {
            true => context.exports.get(&self.entry.export),
            false => visible.get(&self.entry.export),
        };
        let Some(export) = found else { return Some((self, permit)) };
        let InheritedClient { entry, socket, received } = self;
        let negotiated = Negotiated {
            export: entry.export.clone(),
            info: export.info,
            structured_replies: entry.structured_replies,
            base_allocation: entry.base_allocation,
            contexts: entry.contexts.clone(),
        };
        if !is_unchanged(&entry, &negotiated) {
            tracing::warn!(
                "an NBD client of export '{}' must reconnect: the properties of the export have changed",
                entry.export
            );
            return None;
        }
        let transport = if entry.is_kernel { Transport::Kernel } else { Transport::Direct };
        let attachment = (transport, permit);
        if let Err(error) =
            export.shard.attach(export.disk, socket, negotiated, received, export.promote, attachment)
        {
            tracing::warn!("an NBD client of export '{}' must reconnect: {error}", entry.export);
        }
        None
    }
}

/// Returns true if the export still has the properties that a client negotiated.
fn is_unchanged(told: &ClientEntry, now: &Negotiated) -> bool {
    let info = &now.info;
    info.size_bytes >= told.size
        && now.transmission_flags().0 == told.flags
        && info.block_size_min <= told.block_min
        && info.block_size_max >= told.block_max
}

fn address_of(socket: &OwnedFd) -> Option<IpAddr> {
    let socket = std::net::TcpStream::from(socket.try_clone().ok()?);
    socket.peer_addr().ok().map(|address| address.ip().to_canonical())
}

#[cfg(test)]
mod tests {
    use hob_nbd::ExportInfo;

    use super::*;

    #[test]
    fn a_client_continues_only_with_the_announced_properties() {
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
            is_kernel: false,
        };
        let with = |change: fn(&mut ExportInfo)| {
            let mut info = was.info.clone();
            change(&mut info);
            is_unchanged(&told, &now(info))
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
