//! The interface between the control thread and a shard's thread: calls to the shard, and events
//! from it. A table has the calls ([`ShardCall`]).
//!
//! A call is a value sent through a channel, followed by a wake-up. The shard answers through the
//! call's own one-shot channel. Changes have no time-out here: a change that has started must
//! finish, because it returns segments that must not be lost. The services run each change as a
//! task, and the caller of that task may stop waiting after [`PATIENCE`]. Queries fail after
//! [`PATIENCE`].

mod cache_transfer;
mod calls;
mod error;
mod event;
mod handle;
mod surviving;
mod vhost_user;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use hob_engine::command::{Bitmap, Command, Segment};
use hob_engine::io::Promote;
use hob_engine::partition::DiskCounts;
use hob_engine::units::DiskId;
use hob_frontends::fuse::Attributes;
use hob_nbd::server::handshake::Negotiated;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::hardware::{Area, ChangeDetector, ChangeMark};
pub(crate) use cache_transfer::{PeerAttachment, Progress, TransferCall};
pub(crate) use calls::ShardCall;
pub(crate) use error::ShardError;
pub(crate) use event::{EventSender, ShardEvent};
pub(crate) use handle::{PATIENCE, ShardHandle};
pub(crate) use vhost_user::VhostUserCall;

/// One of the connections that a listener may have; further clients wait in the kernel's queue.
/// Released when the last clone is dropped: a shard may close its side of a connection before the
/// TLS relay does.
pub(crate) type ConnectionPermit = Arc<OwnedSemaphorePermit>;

/// The peer of a shard's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    /// The client.
    Direct,
    /// A TLS relay thread of this process.
    Relayed,
}

/// Sends a shard's answer to a call. A dropped sender means that the shard has ended.
pub(crate) type Answer<T> = oneshot::Sender<Result<T, ShardError>>;

/// A disk whose counts are asked for; see [`hob_engine::Engine::disk_counts`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct CountsAsked {
    pub(crate) id: DiskId,
    /// Number of reads in the previous round, if there was one.
    pub(crate) known_reads: Option<u64>,
    /// Block size of the cache, bytes.
    pub(crate) block_bytes: u64,
}

impl CountsAsked {
    /// Returns the disk's counts.
    pub(crate) fn of(self, engine: &hob_engine::Engine) -> Option<DiskCounts> {
        engine.disk_counts(self.id, self.known_reads, self.block_bytes)
    }
}

/// A statistic that can be reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counter {
    Histograms,
    Sizing,
}

impl Counter {
    /// Returns the engine's command that resets this statistic.
    pub(crate) fn command(self) -> Command {
        match self {
            Counter::Histograms => Command::ResetHistograms,
            Counter::Sizing => Command::ResetSizing,
        }
    }
}

/// Resources that a removed disk leaves behind.
#[derive(Debug, Default)]
pub(crate) struct Gone {
    /// Segments that the disk's cache no longer uses.
    pub(crate) released: Vec<Segment>,
    /// Time of the last change of the backing, after all writes of hob.
    pub(crate) changed: Option<ChangeMark>,
    /// Keeps the backing open and detects changes by other programs.
    pub(crate) witness: Option<ChangeDetector>,
    /// Memory of the disk's RAM tier.
    pub(crate) memory: Option<Area>,
    /// The disk's dirty bitmaps, which include all acknowledged writes.
    pub(crate) bitmaps: Vec<Bitmap>,
    /// Number of guests that have not received a report that acknowledged writes may be lost.
    pub(crate) failures_owed: u32,
    /// True if the abandoned backing is still open. The disk's id can be reused after
    /// [`ShardEvent::BackingClosed`].
    pub(crate) is_closing: bool,
}

/// Counters and content of a disk's dirty bitmaps.
#[derive(Debug, Default)]
pub(crate) struct Noted {
    /// Counters of all bitmaps, in the order of their creation.
    pub(crate) all: Vec<BitmapFigures>,
    /// Whole content of the requested bitmap.
    pub(crate) whole: Option<Bitmap>,
}

/// Counters of a dirty bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BitmapFigures {
    pub(crate) name: String,
    /// Number of bytes that one bit stands for.
    pub(crate) granule_bytes: u64,
    pub(crate) dirty_bytes: u64,
}

impl Noted {
    /// Collects the counters of these bitmaps, and the content of the bitmap called `whole`.
    pub(crate) fn of(bitmaps: &[Bitmap], whole: Option<&str>) -> Noted {
        let figures = |bitmap: &Bitmap| BitmapFigures {
            name: bitmap.name.clone(),
            granule_bytes: bitmap.granules.granule_bytes(),
            dirty_bytes: bitmap.granules.bytes(),
        };
        let whole = whole.and_then(|name| bitmaps.iter().find(|bitmap| bitmap.name == name)).cloned();
        Noted { all: bitmaps.iter().map(figures).collect(), whole }
    }
}

/// Quiesced connections, to be continued by another process.
#[derive(Debug, Default)]
pub(crate) struct AtRest {
    pub(crate) clients: Vec<ClientAtRest>,
    pub(crate) files: Vec<FileAtRest>,
}

/// An NBD client without unanswered requests.
#[derive(Debug)]
pub(crate) struct ClientAtRest {
    pub(crate) socket: OwnedFd,
    /// Settings that the NBD client and hob agreed on in the NBD handshake.
    pub(crate) negotiated: Negotiated,
    /// Bytes received after the client's last complete request.
    pub(crate) received: Vec<u8>,
}

/// A mounted file without unanswered requests.
#[derive(Debug)]
pub(crate) struct FileAtRest {
    pub(crate) device: OwnedFd,
    /// Attributes of the file.
    pub(crate) file: Attributes,
    pub(crate) rights: FileRights,
}

/// Access rights of a mounted file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileRights {
    /// Name of the export: the disk's name, or an additional export.
    pub(crate) export: String,
    /// True if writes are refused.
    pub(crate) read_only: bool,
    /// What reads of this file promote into the cache.
    pub(crate) promote: Promote,
}
