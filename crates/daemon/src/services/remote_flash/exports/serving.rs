//! An open flash lease: its file, which a shard serves, and the connections of its borrower.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use hob_engine::command::{Access, DiskConfig};
use hob_engine::io::Promote;
use hob_engine::units::DiskId;
use hob_storage::pool::REMOTE_EXPORT;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, oneshot};

use crate::allow::{AllowList, Peer, Visible};
use crate::api_error::{Result, open_error};
use crate::exports::{Export, Exports, export_info};
use crate::hardware::Backing;
use crate::nbd_listener::negotiate_with_peer;
use crate::relay;
use crate::services::flash::blocking;
use crate::services::qos::{DatastoreUse, datastore_of};
use crate::services::remote_flash::RemoteFlash;
use crate::shard_api::{ShardHandle, Transport};
use crate::state::CacheOwner;

/// Maximum number of connections per borrower: one for each of its shards, and one for metadata. If
/// the borrower opens one more connection, hob closes the oldest.
pub(in crate::services) const CONNECTIONS_MAX: usize = 130;

/// A flash lease that a shard serves.
#[derive(Clone, Debug)]
pub(super) struct Open {
    pub(super) disk: DiskId,
    pub(super) shard: ShardHandle,
    pub(super) epoch: String,
    pub(super) exports: Exports,
    permits: Arc<Semaphore>,
    /// The connections, oldest first. Dropping a sender closes its connection.
    connections: Arc<Mutex<VecDeque<oneshot::Sender<()>>>>,
    _datastore: DatastoreUse,
}

/// An accepted connection of a borrower.
#[derive(Debug)]
pub(crate) struct Admitted(pub(super) Open);

impl RemoteFlash {
    /// Opens the file of a flash lease, and lets a shard serve it to the borrower.
    pub(super) async fn open_export(&self, file: PathBuf) -> Result<Open> {
        let options = self.backing_options.clone();
        let name = file.to_string_lossy().into_owned();
        let spec = name.clone();
        let (backing, datastore) = blocking(move || {
            let backing = Backing::open_file(&spec, Access::ReadWrite, &options)?;
            Ok::<_, hob_storage::backing::OpenError>((backing, datastore_of(&spec)))
        })
        .await?
        .map_err(|error| open_error(&error))?;
        let info = backing.info().clone();
        let (datastore, datastore_use) = self.qos.datastore_id(&datastore, false)?;
        let shard = self.qos.shard_for(datastore);
        let disk = self.registry.inner().new_lease_id();
        let config = DiskConfig { size_bytes: info.size_bytes, access: Access::ReadWrite, datastore };
        if let Err(error) = shard.add_disk(disk, config, backing).await {
            self.registry.inner().lease_disks.remove(&disk);
            return Err(error.into());
        }
        let exports = Exports::default();
        let info = export_info(&info, Access::ReadWrite);
        exports.insert(
            REMOTE_EXPORT,
            Export { of: name, disk, shard: shard.clone(), info, promote: Promote::Never },
        );
        let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let epoch = CacheOwner::random().to_string();
        let connections = Arc::default();
        Ok(Open { disk, shard, epoch, exports, permits, connections, _datastore: datastore_use })
    }
}

impl Open {
    /// Registers a connection, and closes the oldest connection if the borrower has too many. The
    /// returned receiver completes when this connection must close.
    fn enter(&self) -> oneshot::Receiver<()> {
        let (stay, over) = oneshot::channel();
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|stay| !stay.is_closed());
        connections.push_back(stay);
        if connections.len() > CONNECTIONS_MAX {
            connections.pop_front();
        }
        over
    }
}

impl Admitted {
    /// Serves a borrower over this connection until one side closes it or newer connections replace
    /// it.
    pub(crate) async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<()> {
        let over = self.0.enter();
        tokio::select! {
            served = self.serve_here(stream) => served,
            _ = over => Err(std::io::Error::other("the borrower has opened too many connections since")),
        }
    }

    async fn serve_here(self, mut stream: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<()> {
        let Admitted(open) = self;
        // The shard returns the permit as soon as it has closed a connection.
        let permit = open.permits.clone().acquire_owned().await.map_err(std::io::Error::other)?;
        let visible =
            Visible { exports: open.exports.clone(), allow: AllowList::default(), peer: Peer::default() };
        let Some((negotiated, leftover)) = negotiate_with_peer(&mut stream, &visible).await? else {
            return Ok(());
        };
        // The lease may have ended meanwhile.
        let Some(Export { disk, shard, promote, .. }) = visible.get(&negotiated.export) else {
            return Ok(());
        };
        let (near, far) = UnixStream::pair()?;
        let attachment = (Transport::Relayed, Arc::new(permit));
        shard
            .attach(disk, OwnedFd::from(far.into_std()?), negotiated, leftover, promote, attachment)
            .map_err(std::io::Error::other)?;
        relay::relay(stream, near).await;
        Ok(())
    }
}
