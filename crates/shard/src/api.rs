//! The interface between the control thread and a shard's thread: calls to the shard, and events
//! from it. The table in `calls.rs` defines the calls ([`ShardCall`]).
//!
//! A call is a value sent through a channel, followed by a wake-up. If the call has an answer, the
//! shard sends it through the call's own one-shot channel. Changes have no time-out here: a change
//! that has started must finish, because it returns segments that must not be lost. The services
//! run each change as a task, and the caller of that task may stop waiting after [`PATIENCE`].
//! Queries fail after [`PATIENCE`].

mod cache_transfer;
mod calls;
mod error;
mod event;
mod handle;
mod surviving;
mod vhost_user;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use hob_engine::command::{Bitmap, Command, CommandError, Segment};
use hob_engine::io::Promote;
use hob_engine::partition::DiskCounts;
use hob_engine::units::DiskId;
use hob_frontends::fuse::Attributes;
use hob_nbd::server::handshake::Negotiated;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

pub use cache_transfer::{PeerAttachment, Progress, TransferCall};
pub use calls::ShardCall;
pub use error::ShardError;
pub use event::{EventSender, ShardEvent};
pub use handle::{PATIENCE, ShardHandle, in_time};
use hob_storage::area::Area;
use hob_storage::backing::{ChangeDetector, ChangeMark};
pub use vhost_user::VhostUserCall;

/// Permit for one of the connections that a listener may have at the same time. Further clients
/// wait in the kernel's queue. The shard and the TLS relay of a connection each have a clone of the
/// permit, and may close their sides at different times. The permit is released when its last clone
/// is dropped.
pub type ConnectionPermit = Arc<OwnedSemaphorePermit>;

/// The peer of a shard's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// The socket of the client itself, without a relay.
    Direct,
    /// A thread of this process that relays the connection of a TLS client.
    Relayed,
    /// The kernel, for a block device of this host.
    Kernel,
}

/// Sends a shard's answer to a call. A dropped sender means that the shard has ended.
pub type Answer<T> = oneshot::Sender<Result<T, ShardError>>;

/// Answers a call. The caller may have stopped waiting, which is not an error.
pub(crate) fn reply<T>(answer: Answer<T>, result: Result<T, ShardError>) {
    let _ = answer.send(result);
}

/// The answer to a call that names an unknown disk.
pub(crate) const NO_SUCH_DISK: ShardError = ShardError::Command(CommandError::NoSuchDisk);

/// Asks for the counts of one disk; see [`hob_engine::Engine::disk_counts`].
#[derive(Clone, Copy, Debug)]
pub struct CountsAsked {
    /// The disk.
    pub id: DiskId,
    /// Number of the disk's reads when the pool was last divided among its caches; `None` before
    /// the first division.
    pub known_reads: Option<u64>,
    /// Block size of the disk's cache, bytes.
    pub block_bytes: u64,
}

impl CountsAsked {
    /// Returns the disk's counts; `None` if the engine does not have the disk.
    pub fn of(self, engine: &hob_engine::Engine) -> Option<DiskCounts> {
        engine.disk_counts(self.id, self.known_reads, self.block_bytes)
    }
}

/// A statistic that can be reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// Histograms of requests.
    Histograms,
    /// The live miss-ratio curve.
    Sizing,
}

impl Counter {
    /// Returns the engine's command that resets this statistic.
    pub fn command(self) -> Command {
        match self {
            Counter::Histograms => Command::ResetHistograms,
            Counter::Sizing => Command::ResetSizing,
        }
    }
}

/// Resources that a removed disk leaves behind.
#[derive(Debug, Default)]
pub struct Gone {
    /// Segments that the disk's cache no longer uses.
    pub released: Vec<Segment>,
    /// Size and modification time of the backing after all writes of hob.
    pub changed: Option<ChangeMark>,
    /// Detects changes of the backing by other programs, and keeps the backing open.
    pub witness: Option<ChangeDetector>,
    /// Memory of the disk's RAM tier.
    pub memory: Option<Area>,
    /// The disk's dirty bitmaps, which include all acknowledged writes.
    pub bitmaps: Vec<Bitmap>,
    /// Number of guests to which an error must still be reported, because acknowledged writes may
    /// be lost.
    pub failures_owed: u32,
    /// True if the backing was not flushed after its last change, because the backing failed or did
    /// not answer. In this case the journal of a persistent cache is complete, but not marked as
    /// closed.
    pub is_unflushed: bool,
    /// True if the backing may still execute changes of this host, because it has not replied to
    /// them.
    pub is_unanswered: bool,
    /// True if the abandoned backing is still open. The disk's id can be reused after
    /// [`ShardEvent::BackingClosed`].
    pub is_closing: bool,
}

/// Counters of a disk's dirty bitmaps, and the content of one bitmap.
#[derive(Debug, Default)]
pub struct Noted {
    /// Counters of all bitmaps, in the order of their creation.
    pub all: Vec<BitmapFigures>,
    /// Whole content of the requested bitmap; `None` if none was requested or the disk does not
    /// have it.
    pub whole: Option<Bitmap>,
}

/// Counters of a dirty bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapFigures {
    /// Name of the bitmap.
    pub name: String,
    /// Number of bytes that one bit stands for.
    pub granule_bytes: u64,
    /// Number of bytes of the disk that the bitmap marks as changed.
    pub dirty_bytes: u64,
}

impl Noted {
    /// Collects the counters of these bitmaps, and the content of the bitmap called `whole`.
    pub fn of(bitmaps: &[Bitmap], whole: Option<&str>) -> Noted {
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
pub struct AtRest {
    /// NBD clients.
    pub clients: Vec<ClientAtRest>,
    /// Mounted files.
    pub files: Vec<FileAtRest>,
}

/// An NBD client without unanswered requests.
#[derive(Debug)]
pub struct ClientAtRest {
    /// The connection to the client.
    pub socket: OwnedFd,
    /// Settings that the NBD client and hob agreed on in the NBD handshake.
    pub negotiated: Negotiated,
    /// Bytes received after the client's last complete request.
    pub received: Vec<u8>,
    /// True if the client is the kernel, for a block device of this host.
    pub is_kernel: bool,
}

/// A mounted file without unanswered requests.
#[derive(Debug)]
pub struct FileAtRest {
    /// The connection to the FUSE driver of the kernel.
    pub device: OwnedFd,
    /// Attributes of the file.
    pub file: Attributes,
    /// Access rights of the file.
    pub rights: FileRights,
}

/// Access rights of a mounted file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRights {
    /// Name of the export: the disk's name, or an additional export.
    pub export: String,
    /// True if writes are refused.
    pub read_only: bool,
    /// Which data reads of this file promote into the cache.
    pub promote: Promote,
}
