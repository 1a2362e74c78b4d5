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

/// Where a shard puts the answer to a call. Dropping it says that the shard is gone.
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
        /// What to read and write.
        device: Box<FlashDevice>,
        /// When it can be used.
        answer: Answer<()>,
    },
    /// Close a flash device. No cache uses it any more.
    RemoveDevice {
        /// Which.
        id: DeviceId,
        /// When it is closed.
        answer: Answer<()>,
    },
    /// Fail whatever is asked of a flash device on another host, and was. Nobody believes any more what is there.
    GiveUpDevice {
        /// Which.
        id: DeviceId,
    },
    /// Serve a disk.
    AddDisk {
        /// Its name from now on.
        id: DiskId,
        /// As its guest sees it.
        config: DiskConfig,
        /// Where its data lives.
        backing: Backing,
        /// When requests may come.
        answer: Answer<()>,
    },
    /// Fail the next flush of so many guests once: acknowledged writes may have been lost before the disk was opened.
    OweFailures {
        /// Which disk.
        id: DiskId,
        /// Number of guests.
        count: u32,
    },
    /// Close a disk's connections and its backing.
    RemoveDisk {
        /// Which.
        id: DiskId,
        /// What it leaves, when the last request has been answered.
        answer: Answer<Gone>,
    },
    /// Serve a disk under this lease, and what was held of it.
    SetLease {
        /// Which.
        id: DiskId,
        /// Until when.
        clock: Arc<LeaseClock>,
    },
    /// A disk is another host's: refuse everything.
    Lose {
        /// Which.
        id: DiskId,
    },
    /// What a disk has of its parent, another disk of this shard serves from now on; or none any more.
    LinkParent {
        /// The clone.
        id: DiskId,
        /// Its parent's disk.
        parent: Option<DiskId>,
    },
    /// Change a disk's cache, or let the disk be larger, as its backing is already.
    ChangeCache {
        /// Whose.
        id: DiskId,
        /// How.
        change: CacheChange,
        /// Segments that the cache does not use any more, when the change has taken effect.
        answer: Answer<Vec<Segment>>,
    },
    /// Give a disk other memory above its cache, or none.
    SetMemory {
        /// Whose.
        id: DiskId,
        /// How it is to be used, and what it is.
        memory: Option<(MemoryConfig, Area)>,
        /// What it had before.
        answer: Answer<Option<Area>>,
    },
    /// Fail what waits for a disk's backing at this moment.
    ExpireRequests {
        /// Whose.
        id: DiskId,
    },
    /// Close a disk's connections, refuse everything, and ask its backing for nothing more: requests that it does not end within a second are
    /// given up. The disk is removed next.
    Abandon {
        /// Which.
        id: DiskId,
    },
    /// Change how long requests wait for a disk's backing.
    SetWaitMax {
        /// Whose.
        id: DiskId,
        /// How long.
        wait_max: Duration,
    },
    /// Say what a disk is due.
    SetQos {
        /// Whose.
        id: DiskId,
        /// What.
        qos: DiskQos,
        /// When it is so.
        answer: Answer<()>,
    },
    /// Bound what is in a resource at once, or stop doing so.
    Control {
        /// Which.
        resource: Resource,
        /// How.
        control: Control,
    },
    /// How a resource is doing.
    Resource {
        /// Which.
        resource: Resource,
        /// As of now.
        answer: Answer<ResourceState>,
    },
    /// What the shard says of a resource to those that share it.
    ReportOn {
        /// Which.
        resource: Resource,
        /// Of the last agreement.
        level: Option<f64>,
        /// Nothing where there is nothing to agree on.
        answer: Answer<Option<Report>>,
    },
    /// Take the part of a resource that was agreed on.
    TakePart {
        /// Which.
        resource: Resource,
        /// I/Os in it at once.
        in_flight: f64,
    },
    /// Change a disk's bitmaps.
    ChangeBitmaps {
        /// Whose.
        id: DiskId,
        /// How.
        change: BitmapChange,
        /// When it is so.
        answer: Answer<()>,
    },
    /// What a disk's bitmaps have noted.
    Bitmaps {
        /// Whose.
        id: DiskId,
        /// Of one of them the whole, of the others their figures.
        whole: Option<String>,
        /// As of now.
        answer: Answer<Noted>,
    },
    /// Figures of a disk.
    Stats {
        /// Which.
        id: DiskId,
        /// As of now.
        answer: Answer<Box<DiskStats>>,
    },
    /// What a disk was asked for.
    Histograms {
        /// Which.
        id: DiskId,
        /// As of now, and the time.
        answer: Answer<(Instant, Box<Histograms>)>,
    },
    /// What caches of other sizes would do for a disk.
    Sizing {
        /// Which.
        id: DiskId,
        /// As of now.
        answer: Answer<Box<Sizing>>,
    },
    /// How many clients and machines use a disk.
    Users {
        /// Which.
        id: DiskId,
        /// As of now.
        answer: Answer<u64>,
    },
    /// Begin to count anew.
    Reset {
        /// For which disk.
        id: DiskId,
        /// What.
        counter: Counter,
        /// When it has begun.
        answer: Answer<()>,
    },
    /// What have the flash devices done? Answered in its turn by the loop that serves disks, which shows that it is alive.
    Devices {
        /// As of now, of those that it has open.
        answer: Answer<Vec<(DeviceId, DeviceCounts)>>,
    },
    /// Where a disk was changed while its cache is being recovered; nothing if none is.
    ChangedMeanwhile {
        /// Which.
        id: DiskId,
        /// As of now.
        answer: Answer<Option<Box<Regions>>>,
    },
    /// Record a disk's requests from now on, instead of what recorded them before.
    Record {
        /// Which.
        id: DiskId,
        /// Where to.
        recorder: Recorder,
        /// When it has begun.
        answer: Answer<()>,
    },
    /// Let go of a disk's recorder if nobody reads what it writes.
    EndRecording {
        /// Which.
        id: DiskId,
    },
    /// A client has negotiated and sends requests now.
    Attach {
        /// For which disk.
        id: DiskId,
        /// Its connection.
        socket: OwnedFd,
        /// What was agreed.
        negotiated: Box<Negotiated>,
        /// Bytes that came after the negotiation and have been read.
        leftover: Vec<u8>,
        /// What its reads leave behind in the cache.
        promote: Promote,
        /// Who is at the other end of the socket.
        transport: Transport,
        /// Held for as long as the connection lasts.
        permit: ConnectionPermit,
    },
    /// The kernel has mounted a disk as a file.
    AttachFile {
        /// Which disk.
        id: DiskId,
        /// The connection, not blocking.
        device: OwnedFd,
        /// As programs see it.
        file: Attributes,
        /// What it may do.
        rights: FileRights,
    },
    /// A machine that speaks vhost-user.
    Machine(MachineCall),
    /// A disk that moves between hosts.
    Carry(DiskId, CarryCall),
    /// An export is gone: close the connections of its NBD clients.
    CloseExport {
        /// Of which disk.
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
        /// Those that were let go of.
        answer: Answer<AtRest>,
    },
    /// End: close every connection, finish what is in flight, close everything.
    Stop {
        /// When it is done.
        answer: Answer<()>,
    },
}

/// What can be counted anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counter {
    /// What a disk is asked for.
    Histograms,
    /// What caches of other sizes would do for it.
    Sizing,
}

impl Counter {
    /// As the engine knows it.
    pub(crate) fn command(self) -> Command {
        match self {
            Counter::Histograms => Command::ResetHistograms,
            Counter::Sizing => Command::ResetSizing,
        }
    }
}

/// What a disk leaves that is not served any more.
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
    /// Guests that were not told that acknowledged writes may be lost.
    pub(crate) failures_owed: u32,
    /// Its backing was abandoned and is not closed: [`ShardEvent::BackingClosed`] tells when, and the disk's id is not free before.
    pub(crate) is_closing: bool,
}

/// What a disk's bitmaps have noted.
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
    /// What is noted as one.
    pub(crate) granule_bytes: u64,
    /// What counts as changed.
    pub(crate) dirty_bytes: u64,
}

impl Noted {
    /// Of these bitmaps, and one of them whole.
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

/// Connections at rest, for whoever goes on with them.
#[derive(Debug, Default)]
pub(crate) struct AtRest {
    /// Of NBD clients.
    pub(crate) clients: Vec<ClientAtRest>,
    /// Of files.
    pub(crate) files: Vec<FileAtRest>,
}

/// An NBD client of which no request is unanswered.
#[derive(Debug)]
pub(crate) struct ClientAtRest {
    /// Its connection.
    pub(crate) socket: OwnedFd,
    /// What was agreed.
    pub(crate) negotiated: Negotiated,
    /// What it has sent since its last request.
    pub(crate) received: Vec<u8>,
}

/// A mounted file of which no request is unanswered.
#[derive(Debug)]
pub(crate) struct FileAtRest {
    /// Its connection.
    pub(crate) device: OwnedFd,
    /// As programs see it.
    pub(crate) file: Attributes,
    /// What it may do.
    pub(crate) rights: FileRights,
}

/// What a mounted file is to its disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileRights {
    /// The export that it is: that of the disk's own name, or a further one.
    pub(crate) export: String,
    /// Changes are refused.
    pub(crate) read_only: bool,
    /// What its reads leave behind in the cache.
    pub(crate) promote: Promote,
}
