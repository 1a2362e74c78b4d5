//! The boundary between the control thread and a shard's thread: calls in, events out. Here are the calls; [`ShardHandle`] has a function
//! for each.
//!
//! A call is a value put into a channel, then a wake-up; the shard answers through the call's own
//! one-shot channel when the engine has finished. Changes have no time-out here, because a change
//! that was begun ends some day and releases segments that must not be lost: the manager runs each
//! change as a task of its own, and it is the *asker* that stops waiting ([`PATIENCE`]). Questions
//! that change nothing give up after [`PATIENCE`].

mod abandon;
mod carry;
mod error;
mod event;
mod handle;
mod lease;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use hob_engine::command::{Bitmap, BitmapChange, CacheChange, Command, DiskConfig, MemoryConfig, Segment};
use hob_engine::io::Promote;
use hob_engine::qos::{Control, DiskQos, Report, Resource, ResourceState};
use hob_engine::regions::Regions;
use hob_engine::sizing::Sizing;
use hob_engine::stats::DiskStats;
use hob_engine::units::{DeviceId, DiskId, Instant};
use hob_engine::vscsi::Histograms;
use hob_frontends::fuse::Attributes;
use hob_nbd::server::handshake::Negotiated;
use tokio::sync::oneshot;

use super::cluster::LeaseClock;
use super::hardware::{Area, Backing, ChangeDetector, ChangeMark, DeviceCounts, FlashDevice};
use super::nbd_listener::{ConnectionPermit, Transport};
use super::request_recorder::Recorder;
use super::shard::{CarryCall, MachineCall};
pub(crate) use error::ShardError;
pub(crate) use event::{EventSender, ShardEvent};
pub(crate) use handle::{PATIENCE, ShardHandle};

/// Sends a shard's answer to a call. Dropping it means that the shard has ended.
pub(crate) type Answer<T> = oneshot::Sender<Result<T, ShardError>>;

/// A question or an instruction to a shard. Each is answered once; [`ShardCall::Attach`], [`ShardCall::AttachFile`],
/// [`ShardCall::CloseExport`], [`ShardCall::GiveUpDevice`], [`ShardCall::Resume`], [`ShardCall::Control`], [`ShardCall::SetLease`], [`ShardCall::Lose`],
/// [`ShardCall::ExpireRequests`], [`ShardCall::Abandon`] and
/// [`ShardCall::EndRecording`] never.
#[derive(Debug)]
pub(crate) enum ShardCall {
    /// Answer, to show that the shard's loop runs.
    Ping {
        /// At once.
        answer: Answer<()>,
    },
    /// Open a flash device for the caches of this shard.
    AddDevice {
        /// Its name from now on.
        id: DeviceId,
        /// Its device and segments.
        device: Box<FlashDevice>,
        /// When it can be used.
        answer: Answer<()>,
    },
    /// Close a flash device. No cache uses it any more.
    RemoveDevice {
        /// The device.
        id: DeviceId,
        /// When it is closed.
        answer: Answer<()>,
    },
    /// Fail all I/O to a flash device on another host, in flight and later. Its content is not
    /// trusted any more.
    GiveUpDevice {
        /// The device.
        id: DeviceId,
    },
    /// Serve a disk.
    AddDisk {
        /// Its name from now on.
        id: DiskId,
        /// Its properties for the guest.
        config: DiskConfig,
        /// Its backing.
        backing: Backing,
        /// Sent when requests may be submitted.
        answer: Answer<()>,
    },
    /// Fail the next flush of this many guests once: acknowledged writes may have been lost before
    /// the disk was opened.
    OweFailures {
        /// The disk.
        id: DiskId,
        /// Number of guests.
        count: u32,
    },
    /// Close a disk's connections and its backing.
    RemoveDisk {
        /// The disk.
        id: DiskId,
        /// The remains of the disk, when the last request has been answered.
        answer: Answer<Gone>,
    },
    /// Serve a disk under this lease.
    SetLease {
        /// The disk.
        id: DiskId,
        /// Until when.
        clock: Arc<LeaseClock>,
    },
    /// A disk is another host's: refuse everything.
    Lose {
        /// The disk.
        id: DiskId,
    },
    /// Let another disk of this shard serve the blocks of a disk's parent; `None` ends that.
    LinkParent {
        /// The clone.
        id: DiskId,
        /// Its parent's disk.
        parent: Option<DiskId>,
    },
    /// Change a disk's cache, or let the disk be larger, as its backing is already.
    ChangeCache {
        /// The disk.
        id: DiskId,
        /// How.
        change: CacheChange,
        /// Segments that the cache does not use any more, when the change has taken effect.
        answer: Answer<Vec<Segment>>,
    },
    /// Give a disk other memory above its cache, or none.
    SetMemory {
        /// The disk.
        id: DiskId,
        /// Its settings and its memory.
        memory: Option<(MemoryConfig, Area)>,
        /// The memory that it had.
        answer: Answer<Option<Area>>,
    },
    /// Fail the requests that wait for a disk's backing now.
    ExpireRequests {
        /// The disk.
        id: DiskId,
    },
    /// Close a disk's connections, refuse everything, and ask its backing for nothing more: requests that it does not end within a second are
    /// given up. The disk is removed next.
    Abandon {
        /// The disk.
        id: DiskId,
    },
    /// Change how long requests wait for a disk's backing.
    SetWaitMax {
        /// The disk.
        id: DiskId,
        /// How long.
        wait_max: Duration,
    },
    /// Set a disk's entitlement.
    SetQos {
        /// The disk.
        id: DiskId,
        /// Its entitlement.
        qos: DiskQos,
        /// When it is so.
        answer: Answer<()>,
    },
    /// Throttle a resource, or stop that.
    Control {
        /// The resource.
        resource: Resource,
        /// How.
        control: Control,
    },
    /// How a resource is doing.
    Resource {
        /// The resource.
        resource: Resource,
        /// The current value.
        answer: Answer<ResourceState>,
    },
    /// The shard's report about a resource to the hosts that share it.
    ReportOn {
        /// The resource.
        resource: Resource,
        /// The level of the last agreement.
        level: Option<f64>,
        /// Nothing where there is nothing to agree on.
        answer: Answer<Option<Report>>,
    },
    /// Take the part of a resource that was agreed on.
    TakePart {
        /// The resource.
        resource: Resource,
        /// I/Os in flight.
        in_flight: f64,
    },
    /// Change a disk's bitmaps.
    ChangeBitmaps {
        /// The disk.
        id: DiskId,
        /// How.
        change: BitmapChange,
        /// When it is so.
        answer: Answer<()>,
    },
    /// Counters of a disk's bitmaps.
    Bitmaps {
        /// The disk.
        id: DiskId,
        /// Return the whole content of this bitmap, and only the counters of the others.
        whole: Option<String>,
        /// The current value.
        answer: Answer<Noted>,
    },
    /// Figures of a disk.
    Stats {
        /// The disk.
        id: DiskId,
        /// The current value.
        answer: Answer<Box<DiskStats>>,
    },
    /// Histograms of a disk's requests.
    Histograms {
        /// The disk.
        id: DiskId,
        /// The current values, and the time.
        answer: Answer<(Instant, Box<Histograms>)>,
    },
    /// Predicted hit ratios of other cache sizes for a disk.
    Sizing {
        /// The disk.
        id: DiskId,
        /// The current value.
        answer: Answer<Box<Sizing>>,
    },
    /// How many clients and machines use a disk.
    Users {
        /// The disk.
        id: DiskId,
        /// The current value.
        answer: Answer<u64>,
    },
    /// Reset a counter.
    Reset {
        /// For which disk.
        id: DiskId,
        /// The counter.
        counter: Counter,
        /// When it has begun.
        answer: Answer<()>,
    },
    /// Counters of the flash devices. The loop that serves disks answers in turn, which shows that
    /// it is alive.
    Devices {
        /// The current values of the devices that it has open.
        answer: Answer<Vec<(DeviceId, DeviceCounts)>>,
    },
    /// The regions of a disk that were changed while its cache is being recovered; `None` if it is
    /// not.
    ChangedMeanwhile {
        /// The disk.
        id: DiskId,
        /// The current value.
        answer: Answer<Option<Box<Regions>>>,
    },
    /// Record a disk's requests from now on, instead of what recorded them before.
    Record {
        /// The disk.
        id: DiskId,
        /// The recorder.
        recorder: Recorder,
        /// When it has begun.
        answer: Answer<()>,
    },
    /// Drop a disk's recorder if nothing reads it.
    EndRecording {
        /// The disk.
        id: DiskId,
    },
    /// A client has negotiated and sends requests now.
    Attach {
        /// For which disk.
        id: DiskId,
        /// Its connection.
        socket: OwnedFd,
        /// Result of the negotiation.
        negotiated: Box<Negotiated>,
        /// Bytes that were received after the negotiation.
        leftover: Vec<u8>,
        /// What its reads promote into the cache.
        promote: Promote,
        /// The peer of the socket.
        transport: Transport,
        /// Held for as long as the connection lasts.
        permit: ConnectionPermit,
    },
    /// The kernel has mounted a disk as a file.
    AttachFile {
        /// The disk.
        id: DiskId,
        /// The connection, not blocking.
        device: OwnedFd,
        /// Attributes for programs.
        file: Attributes,
        /// Its rights.
        rights: FileRights,
    },
    /// A machine that speaks vhost-user.
    Machine(MachineCall),
    /// A disk that moves between hosts.
    Carry(DiskId, CarryCall),
    /// An export was removed: close the connections of its NBD clients.
    CloseExport {
        /// The disk.
        id: DiskId,
        /// Its name.
        export: String,
    },
    /// Take no new request from anybody, and answer all that there are.
    Rest {
        /// When all have been answered.
        answer: Answer<()>,
    },
    /// Take requests again.
    Resume,
    /// Let go of connections that are at rest. Those that are not, or cannot be kept, stay.
    HandOver {
        /// The quiesced connections.
        answer: Answer<AtRest>,
    },
    /// Stop: close every connection, finish requests in flight, close everything.
    Stop {
        /// When it is done.
        answer: Answer<()>,
    },
}

/// A counter that can be reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counter {
    /// Histograms of a disk's requests.
    Histograms,
    /// Predicted hit ratios of other cache sizes.
    Sizing,
}

impl Counter {
    /// The engine's command for it.
    pub(crate) fn command(self) -> Command {
        match self {
            Counter::Histograms => Command::ResetHistograms,
            Counter::Sizing => Command::ResetSizing,
        }
    }
}

/// The remains of a disk that is not served any more.
#[derive(Debug, Default)]
pub(crate) struct Gone {
    /// Segments that its cache does not use any more.
    pub(crate) released: Vec<Segment>,
    /// When its backing was last changed, after everything that hob did.
    pub(crate) changed: Option<ChangeMark>,
    /// Keeps its backing open, and tells whether it was changed since.
    pub(crate) witness: Option<ChangeDetector>,
    /// Memory above its cache.
    pub(crate) memory: Option<Area>,
    /// Its bitmaps, which have noted everything that was acknowledged.
    pub(crate) bitmaps: Vec<Bitmap>,
    /// Number of guests that were not told that acknowledged writes may be lost.
    pub(crate) failures_owed: u32,
    /// Its backing was abandoned and is not closed: [`ShardEvent::BackingClosed`] tells when, and the disk's id is not free before.
    pub(crate) is_closing: bool,
}

/// Counters and content of a disk's bitmaps.
#[derive(Debug, Default)]
pub(crate) struct Noted {
    /// In the order in which they were made.
    pub(crate) all: Vec<BitmapFigures>,
    /// The one that was asked for.
    pub(crate) whole: Option<Bitmap>,
}

/// A bitmap in figures, bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BitmapFigures {
    /// Its name.
    pub(crate) name: String,
    /// Bytes that one bit stands for.
    pub(crate) granule_bytes: u64,
    /// Bytes marked as changed.
    pub(crate) dirty_bytes: u64,
}

impl Noted {
    /// The counters of these bitmaps, and the whole content of one.
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
    /// NBD clients.
    pub(crate) clients: Vec<ClientAtRest>,
    /// Mounted files.
    pub(crate) files: Vec<FileAtRest>,
}

/// An NBD client of which no request is unanswered.
#[derive(Debug)]
pub(crate) struct ClientAtRest {
    /// Its connection.
    pub(crate) socket: OwnedFd,
    /// Result of the negotiation.
    pub(crate) negotiated: Negotiated,
    /// Bytes received after its last request.
    pub(crate) received: Vec<u8>,
}

/// A mounted file of which no request is unanswered.
#[derive(Debug)]
pub(crate) struct FileAtRest {
    /// Its connection.
    pub(crate) device: OwnedFd,
    /// Attributes for programs.
    pub(crate) file: Attributes,
    /// Its rights.
    pub(crate) rights: FileRights,
}

/// Rights of a mounted file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileRights {
    /// The export that it is: that of the disk's own name, or a further one.
    pub(crate) export: String,
    /// Changes are refused.
    pub(crate) read_only: bool,
    /// What its reads promote into the cache.
    pub(crate) promote: Promote,
}
