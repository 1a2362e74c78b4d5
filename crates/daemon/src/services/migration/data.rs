//! Data connections through which the destination reads the disk from this host, the source. The
//! source opens these connections, and serves NBD on them.
//!
//! One connection is always ready. When the destination uses this connection, the source opens
//! another one. All connections end when the disk is handed over. The source opens new connections
//! after the destination has confirmed that it owns the disk.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use hob_control::peer::call_path;
use hob_engine::io::Promote;
use hob_engine::migration::Session;
use hob_nbd::ExportInfo;
use tokio::net::UnixStream;
use tokio::sync::Semaphore;

use super::flow;
use super::source::Leaving;
use crate::allow::{AllowList, Peer, Visible};
use crate::exports::{Export, Exports};
use crate::nbd_listener::negotiate_with_peer;
use crate::shard_api::PeerAttachment;

/// Pause after a failed attempt to open a connection.
const RETRY_EVERY: Duration = Duration::from_millis(250);

/// Maximum number of data connections in use.
const CONNECTIONS_MAX: usize = 4;

/// Role of this host, from which the destination reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum As {
    /// This host owns the disk.
    Owner,
    /// This host is the former owner of the disk.
    Former,
}

/// Keeps one data connection ready, until the future is dropped.
pub(super) async fn keep_connected(leaving: Arc<Leaving>, session: Session, role: As) {
    let more = if role == As::Former { "&former=true" } else { "" };
    let path = call_path(&leaving.name, "data", &leaving.session(session), more);
    let peer = leaving.peer();
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut joined = tokio::task::JoinSet::new();
    loop {
        while joined.try_join_next().is_some() {}
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Some(visible) = leaving.visible() else { return };
        let stream = match peer.data(&path).await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::debug!(
                    "disk {}: cannot open a data connection to the other host: {error}",
                    leaving.name
                );
                tokio::time::sleep(RETRY_EVERY).await;
                continue;
            }
        };
        match leaving.attach(stream, &visible, place).await {
            Ok(Some((stream, near))) => {
                let leaving = leaving.clone();
                joined.spawn(async move {
                    flow::join(near, stream, &leaving.bandwidth, &leaving.shared.sent).await;
                });
            }
            Ok(None) => tokio::time::sleep(RETRY_EVERY).await,
            Err(error) => {
                tracing::debug!("disk {}: lost a data connection to the other host: {error}", leaving.name);
                tokio::time::sleep(RETRY_EVERY).await;
            }
        }
    }
}

impl Leaving {
    /// Returns the only export that the destination may use: the migrating disk, read-only.
    fn visible(&self) -> Option<Visible> {
        let inner = self.migrations.registry.inner();
        let disk = inner.disk(&self.name).ok()?;
        let shard = disk.shard().ok()?;
        let info = ExportInfo { read_only: true, ..ExportInfo::new(disk.size_bytes) };
        let export = Export { of: self.name.clone(), disk: disk.id, shard, info, promote: Promote::Never };
        let exports = Exports::default();
        exports.insert(&self.name, export);
        Some(Visible { exports, allow: AllowList::default(), peer: Peer::default() })
    }

    /// Waits until the destination uses the connection, and passes this host's end of the
    /// connection to the shard.
    async fn attach<S>(
        &self,
        mut stream: S,
        visible: &Visible,
        place: tokio::sync::OwnedSemaphorePermit,
    ) -> std::io::Result<Option<(S, UnixStream)>>
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    {
        let Some((negotiated, leftover)) = negotiate_with_peer(&mut stream, visible).await? else {
            return Ok(None);
        };
        let Some(Export { disk, shard, .. }) = visible.get(&negotiated.export) else { return Ok(None) };
        let (near, far) = UnixStream::pair()?;
        let seat = PeerAttachment {
            socket: OwnedFd::from(far.into_std()?),
            negotiated,
            leftover,
            permit: Arc::new(place),
        };
        shard.attach_peer(disk, seat).map_err(std::io::Error::other)?;
        Ok(Some((stream, near)))
    }
}
