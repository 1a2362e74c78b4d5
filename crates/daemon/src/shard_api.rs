//! The interface between the control thread and a shard's thread: calls to the shard, and events
//! from it. [`ShardHandle`] has a function for each call.
//!
//! A call is a value sent through a channel, followed by a wake-up. The shard answers through the
//! call's own one-shot channel. Changes have no time-out here: a change that has started must
//! finish, because it returns segments that must not be lost. The manager runs each change as a
//! task, and the caller of that task may stop waiting after [`PATIENCE`]. Queries fail after
//! [`PATIENCE`].

mod abandon;
mod cache_transfer;
mod error;
mod event;
mod handle;
mod lease;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use hob_engine::command::{Bitmap, BitmapChange, CacheChange, Command, DiskConfig, MemoryConfig, Segment};
use hob_engine::io::Promote;
use hob_engine::journal::SurvivingMemory;
use hob_engine::partition::DiskCounts;
use hob_engine::qos::{Control, DiskQos, Report, Resource, ResourceState};
use hob_engine::regions::Regions;
use hob_engine::sizing::Sizing;
use hob_engine::stats::DiskStats;
use hob_engine::units::{DeviceId, DiskId, Instant};
use hob_engine::vscsi::Histograms;
use hob_frontends::fuse::Attributes;
use hob_nbd::server::handshake::Negotiated;
use hob_storage::unflushed_mark::UnflushedMark;
use tokio::sync::oneshot;

use super::cluster::LeaseClock;
use super::hardware::{Area, Backing, ChangeDetector, ChangeMark, DeviceCounts, FlashDevice};
use super::nbd_listener::{ConnectionPermit, Transport};
use super::request_recorder::Recorder;
use super::shard::{TransferCall, VhostUserCall};
pub(crate) use error::ShardError;
pub(crate) use event::{EventSender, ShardEvent};
pub(crate) use handle::{PATIENCE, ShardHandle};

/// Sends a shard's answer to a call. A dropped sender means that the shard has ended.
pub(crate) type Answer<T> = oneshot::Sender<Result<T, ShardError>>;

/// A call to a shard. Each call is answered once, except for these, which have no answer:
/// [`ShardCall::Attach`], [`ShardCall::AttachFile`], [`ShardCall::CloseExport`],
/// [`ShardCall::GiveUpDevice`], [`ShardCall::Resume`], [`ShardCall::Control`],
/// [`ShardCall::SetLease`], [`ShardCall::Lose`], [`ShardCall::ExpireRequests`],
/// [`ShardCall::Abandon`] and [`ShardCall::EndRecording`].
#[derive(Debug)]
pub(crate) enum ShardCall {
    /// Answer, to show that the shard's loop runs.
    Ping {
        answer: Answer<()>,
    },
    /// Open a flash device for the caches of this shard.
    AddDevice {
        id: DeviceId,
        /// The flash device and its segments.
        device: Box<FlashDevice>,
        answer: Answer<()>,
    },
    /// Close a flash device that no cache uses any more.
    RemoveDevice {
        id: DeviceId,
        answer: Answer<()>,
    },
    /// Fail all I/O to a flash device on another host, and do not trust its content any more.
    GiveUpDevice {
        id: DeviceId,
    },
    AddDisk {
        id: DiskId,
        /// Properties of the disk for the guest.
        config: DiskConfig,
        backing: Backing,
        /// Records unflushed changes of a backing that loses them if the process is killed.
        mark: Option<UnflushedMark>,
        /// Sent when the disk accepts requests.
        answer: Answer<()>,
    },
    /// Fail the next flush of this many guests once, because acknowledged writes may have been lost
    /// before the disk was opened.
    OweFailures {
        id: DiskId,
        count: u32,
    },
    /// Close a disk's connections and its backing.
    RemoveDisk {
        id: DiskId,
        /// Receives the resources of the disk when its last request has been answered.
        answer: Answer<Gone>,
    },
    /// Serve a disk under this lease of the host in etcd.
    SetLease {
        id: DiskId,
        clock: Arc<LeaseClock>,
    },
    /// Fail all requests of a disk that another host owns.
    Lose {
        id: DiskId,
    },
    /// Let another disk of this shard serve the blocks of a clone's parent; `None` if no disk
    /// serves them any more.
    LinkParent {
        id: DiskId,
        /// The parent's disk.
        parent: Option<DiskId>,
    },
    /// Change a disk's cache, or grow the disk to the size of its backing.
    ChangeCache {
        id: DiskId,
        change: CacheChange,
        /// Memory for the crash log of a new journal ring.
        crash_log: Option<Box<dyn SurvivingMemory>>,
        /// Receives the segments that the cache no longer uses, when the change is complete.
        answer: Answer<Vec<Segment>>,
    },
    /// Replace or remove the RAM tier of a disk's cache.
    SetMemory {
        id: DiskId,
        /// Settings and memory of the RAM tier.
        memory: Option<(MemoryConfig, Area)>,
        /// Receives the previous memory.
        answer: Answer<Option<Area>>,
    },
    /// Fail the requests that wait for a disk's backing now.
    ExpireRequests {
        id: DiskId,
    },
    /// Close a disk's connections, refuse new requests and stop using its backing. Requests that
    /// the backing does not complete within a second are abandoned. The disk is removed next.
    Abandon {
        id: DiskId,
    },
    /// Change how long requests wait for a disk's backing.
    SetWaitMax {
        id: DiskId,
        wait_max: Duration,
    },
    SetQos {
        id: DiskId,
        qos: DiskQos,
        answer: Answer<()>,
    },
    /// Set or remove the throttle of a resource.
    Control {
        resource: Resource,
        control: Control,
    },
    /// Return the load and the state of a resource.
    Resource {
        resource: Resource,
        answer: Answer<ResourceState>,
    },
    /// Return the shard's report about a resource, for the hosts that share it.
    ReportOn {
        resource: Resource,
        /// Rate per share in the latest round between the hosts.
        level: Option<f64>,
        /// Receives `None` if the resource is not shared.
        answer: Answer<Option<Report>>,
    },
    /// Set the shard's part of a shared resource.
    TakePart {
        resource: Resource,
        /// Number of I/Os in flight.
        in_flight: f64,
    },
    /// Change a disk's dirty bitmaps.
    ChangeBitmaps {
        id: DiskId,
        change: BitmapChange,
        answer: Answer<()>,
    },
    /// Return the counters of a disk's dirty bitmaps.
    Bitmaps {
        id: DiskId,
        /// Name of a bitmap whose whole content is returned.
        whole: Option<String>,
        answer: Answer<Noted>,
    },
    /// Return a disk's statistics.
    Stats {
        id: DiskId,
        answer: Answer<Box<DiskStats>>,
    },
    /// Return the histograms of a disk's requests.
    Histograms {
        id: DiskId,
        /// Receives the histograms and the current time.
        answer: Answer<(Instant, Box<Histograms>)>,
    },
    /// Return predicted hit ratios of other cache sizes for a disk.
    Sizing {
        id: DiskId,
        answer: Answer<Box<Sizing>>,
    },
    /// Return the counts of disks for the division of their pool.
    DiskCounts {
        asked: Vec<CountsAsked>,
        /// Receives the counts in the order of `asked`; `None` for a disk that does not exist.
        answer: Answer<Vec<Option<DiskCounts>>>,
    },
    /// Return the number of NBD and vhost-user clients of a disk.
    Users {
        id: DiskId,
        answer: Answer<u64>,
    },
    Reset {
        id: DiskId,
        counter: Counter,
        answer: Answer<()>,
    },
    /// Return the counters of the flash devices. The answer also shows that the shard's loop runs.
    Devices {
        /// Receives the counters of the devices that the shard has open.
        answer: Answer<Vec<(DeviceId, DeviceCounts)>>,
    },
    /// Return the regions of a disk that were written while its cache recovers; `None` without a
    /// recovery.
    ChangedMeanwhile {
        id: DiskId,
        answer: Answer<Option<Box<Regions>>>,
    },
    /// Start to record a disk's requests, with this recorder instead of an earlier one.
    Record {
        id: DiskId,
        recorder: Recorder,
        answer: Answer<()>,
    },
    /// Drop a disk's recorder if no client reads it.
    EndRecording {
        id: DiskId,
    },
    /// Serve an NBD client that has completed the negotiation.
    Attach {
        id: DiskId,
        socket: OwnedFd,
        /// Settings that the NBD client and hob agreed on in the NBD handshake.
        negotiated: Box<Negotiated>,
        /// Bytes received after the NBD handshake.
        leftover: Vec<u8>,
        /// How reads of this client promote blocks into the cache.
        promote: Promote,
        transport: Transport,
        /// Connection permit, returned when the connection ends.
        permit: ConnectionPermit,
    },
    /// Serve a disk through a file that the kernel has mounted.
    AttachFile {
        id: DiskId,
        /// The non-blocking FUSE connection.
        device: OwnedFd,
        /// Attributes of the file.
        file: Attributes,
        rights: FileRights,
    },
    /// A call of a vhost-user session.
    VhostUser(VhostUserCall),
    /// A call about a migrating disk.
    Transfer(DiskId, TransferCall),
    /// Close the NBD connections to an export that was removed.
    CloseExport {
        id: DiskId,
        /// Name of the export.
        export: String,
    },
    /// Quiesce: accept no new request, and answer all accepted ones.
    Rest {
        /// Sent when all requests have been answered.
        answer: Answer<()>,
    },
    /// End the quiesced state and accept requests again.
    Resume,
    /// Hand over the quiesced connections. The shard keeps connections that are busy or that cannot
    /// be handed over.
    HandOver {
        answer: Answer<AtRest>,
    },
    /// Stop the shard: close every connection, finish requests in flight, close all devices and
    /// backings.
    Stop {
        answer: Answer<()>,
    },
}

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
