//! The boundary between the control thread and a shard's thread: calls in, events out.
//!
//! A call is a value put into a channel, then a wake-up; the shard answers through the call's own
//! one-shot channel when the engine has finished. Changes have no time-out here, because a change
//! that was begun ends some day and releases segments that must not be lost: the manager runs each
//! change as a task of its own, and it is the *asker* that stops waiting ([`PATIENCE`]). Questions
//! that change nothing give up after [`PATIENCE`].

mod carry;
mod lease;

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use hob_engine::command::{
    Bitmap, BitmapChange, CacheChange, Command, CommandError, DiskConfig, MemoryConfig, Segment,
};
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
use super::hardware::{Area, Backing, ChangeMark, DeviceCounts, FlashDevice};
use super::listen::{Line, Place};
use super::shard::{CarryCall, MachineCall};
use super::tape::Recorder;

/// How long anybody waits for a shard.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Where a shard puts the answer to a call. Dropping it says that the shard is gone.
pub(crate) type Answer<T> = oneshot::Sender<Result<T, ShardError>>;

/// A question or an instruction to a shard. Each is answered once; [`ShardCall::Attach`], [`ShardCall::AttachFile`],
/// [`ShardCall::CloseExport`], [`ShardCall::GiveUpDevice`], [`ShardCall::Resume`], [`ShardCall::Control`], [`ShardCall::SetLease`], [`ShardCall::Lose`] and
/// [`ShardCall::EndRecording`] never.
#[derive(Debug)]
pub(crate) enum ShardCall {
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
        line: Line,
        /// Held for as long as the connection lasts.
        place: Place,
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
    /// Memory above its cache.
    pub(crate) memory: Option<Area>,
    /// Its bitmaps, which have noted everything that was acknowledged.
    pub(crate) bitmaps: Vec<Bitmap>,
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

/// Something a shard reports unasked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ShardEvent {
    /// A device failed too often; its caches give it up.
    Fenced {
        /// Which.
        device: DeviceId,
        /// Failed I/Os.
        errors: u32,
    },
    /// A cache stopped using segments of a fenced device.
    Lost {
        /// Whose cache.
        disk: DiskId,
        /// Which.
        segments: Vec<Segment>,
    },
    /// A device does not answer in time; its caches bypass it.
    Stalled(DeviceId),
    /// A stalled device answers again.
    Resumed(DeviceId),
    /// A device on another host has not answered for long. What it was asked waits until it is given up.
    PeerSilent(DeviceId),
    /// Dirty data cannot be read from flash any more.
    DirtyLost {
        /// Whose.
        disk: DiskId,
        /// Sectors that cannot be read, in all.
        sectors: u64,
    },
    /// A change waits for a cache that is being recovered, and could pass if the rings were made void.
    ChangeWaits(DiskId),
    /// The journal of a cache cannot be written any more.
    JournalLost(DiskId),
    /// Somebody else has taken a disk's backing over. The disk serves nothing any more.
    BackingLost(DiskId),
}

/// Where shards put their events.
pub(crate) type EventSender = tokio::sync::mpsc::UnboundedSender<ShardEvent>;

/// Why a shard did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ShardError {
    /// The engine refused; nothing was changed.
    #[error("{}", explain_refusal(*.0))]
    Command(CommandError),
    /// It could not open what it was given.
    #[error("{0}")]
    Unusable(String),
    /// It did not answer in time. A change goes on in the background.
    #[error("the shard did not finish in time; the change goes on in the background")]
    Busy,
    /// Its thread ended.
    #[error("the thread that serves this disk has ended")]
    Gone,
}

fn explain_refusal(error: CommandError) -> &'static str {
    match error {
        CommandError::NoSuchDisk => "the shard does not know this disk",
        CommandError::DiskExists => "the shard has this disk already",
        CommandError::NoCache => "the disk has no cache",
        CommandError::CacheExists => "the disk has a cache already",
        CommandError::Removing => "the disk is being removed",
        CommandError::TooSmall => "a cache cannot get smaller than one segment",
        CommandError::Dirty => {
            "the cache holds data that is not on the backing yet: drain it with 'hob drain', or give that data up with \
             'hob cache discard-dirty'"
        }
        CommandError::NoJournal => "the cache keeps no journal, which this needs; make it persistent first",
        CommandError::Lost => {
            "some of the data that only flash has cannot be read from it; the rest is on the backing. Give up what is lost \
             with 'hob cache discard-dirty'"
        }
        CommandError::BackingFailed => "the backing cannot be flushed; try again when it works",
        CommandError::WrongRole => "the disk is being handed over to another host, or belongs to one",
        CommandError::Shrinks => "a disk cannot get smaller",
        CommandError::Recovering => "its cache is being recovered; try again when it is there",
        CommandError::NoSuchBitmap => "the disk has no bitmap of that name",
        CommandError::BitmapExists => "the disk has a bitmap of that name already",
        CommandError::BitmapFrozen => "the bitmap is frozen: it does not record",
        CommandError::Stopped => "it was stopped before it was done; begin it again when you like",
        CommandError::JournalFailed => {
            "the journal of the cache cannot be written; 'hob pool show' tells which device fails"
        }
        CommandError::Unworkable => {
            "these settings cannot work together: a cache block is a power of two from 4K to 1M and at most a \
             segment, and a disk or cache has less than 2^32 blocks; use a larger block"
        }
    }
}

/// Talks to one shard. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ShardHandle {
    calls: mpsc::Sender<ShardCall>,
    wake: Arc<dyn Fn() + Send + Sync>,
}

impl ShardHandle {
    /// A handle, and the end that the shard reads. `wake` makes a sleeping shard look.
    pub(crate) fn new(wake: impl Fn() + Send + Sync + 'static) -> (ShardHandle, mpsc::Receiver<ShardCall>) {
        let (calls, receiver) = mpsc::channel();
        (ShardHandle { calls, wake: Arc::new(wake) }, receiver)
    }

    /// Opens a flash device.
    pub(crate) async fn add_device(&self, id: DeviceId, device: FlashDevice) -> Result<(), ShardError> {
        self.ask(|answer| ShardCall::AddDevice { id, device: Box::new(device), answer }).await
    }

    /// Closes a flash device that no cache uses.
    pub(crate) async fn remove_device(&self, id: DeviceId) -> Result<(), ShardError> {
        self.ask(|answer| ShardCall::RemoveDevice { id, answer }).await
    }

    /// Serves a disk.
    pub(crate) async fn add_disk(
        &self,
        id: DiskId,
        config: DiskConfig,
        backing: Backing,
    ) -> Result<(), ShardError> {
        self.ask(|answer| ShardCall::AddDisk { id, config, backing, answer }).await
    }

    /// Stops serving a disk. A persistent cache is closed and keeps its segments.
    pub(crate) async fn remove_disk(&self, id: DiskId) -> Result<Gone, ShardError> {
        self.ask(|answer| ShardCall::RemoveDisk { id, answer }).await
    }

    /// Changes a disk's cache; gives back the segments that it does not use any more.
    /// Fails whatever is asked of a device on another host from now on, and was before.
    pub(crate) fn give_up_device(&self, id: DeviceId) {
        // A shard that is gone asks for nothing.
        let _ = self.send(ShardCall::GiveUpDevice { id });
    }

    /// Changes a disk's cache.
    pub(crate) async fn change_cache(
        &self,
        id: DiskId,
        change: CacheChange,
    ) -> Result<Vec<Segment>, ShardError> {
        self.ask(|answer| ShardCall::ChangeCache { id, change, answer }).await
    }

    /// Gives a disk other memory above its cache, or none; gives back what it had.
    pub(crate) async fn set_memory(
        &self,
        id: DiskId,
        memory: Option<(MemoryConfig, Area)>,
    ) -> Result<Option<Area>, ShardError> {
        self.ask(|answer| ShardCall::SetMemory { id, memory, answer }).await
    }

    /// Lets another disk of the shard serve what a clone has of its parent, or none.
    pub(crate) fn link_parent(&self, id: DiskId, parent: Option<DiskId>) {
        // A shard that is gone serves nothing.
        let _ = self.send(ShardCall::LinkParent { id, parent });
    }

    /// Says what a disk is due.
    pub(crate) async fn set_qos(&self, id: DiskId, qos: DiskQos) -> Result<(), ShardError> {
        self.ask(|answer| ShardCall::SetQos { id, qos, answer }).await
    }

    /// Bounds what is in a resource at once, or stops doing so.
    pub(crate) fn control(&self, resource: Resource, control: Control) {
        // A shard that is gone has nothing in it.
        let _ = self.send(ShardCall::Control { resource, control });
    }

    /// How a resource is doing.
    pub(crate) async fn resource(&self, resource: Resource) -> Result<ResourceState, ShardError> {
        let question = self.ask(|answer| ShardCall::Resource { resource, answer });
        tokio::time::timeout(PATIENCE, question).await.unwrap_or(Err(ShardError::Busy))
    }

    /// What it says of a resource to those that share it.
    pub(crate) async fn report_on(
        &self,
        resource: Resource,
        level: Option<f64>,
    ) -> Result<Option<Report>, ShardError> {
        let question = self.ask(|answer| ShardCall::ReportOn { resource, level, answer });
        tokio::time::timeout(PATIENCE, question).await.unwrap_or(Err(ShardError::Busy))
    }

    /// Gives it its part of a resource.
    pub(crate) fn take_part(&self, resource: Resource, in_flight: f64) {
        // A shard that is gone has nothing in it.
        let _ = self.send(ShardCall::TakePart { resource, in_flight });
    }

    /// Changes a disk's bitmaps.
    pub(crate) async fn change_bitmaps(&self, id: DiskId, change: BitmapChange) -> Result<(), ShardError> {
        self.ask(|answer| ShardCall::ChangeBitmaps { id, change, answer }).await
    }

    /// What a disk's bitmaps have noted, and one of them whole.
    pub(crate) async fn bitmaps(&self, id: DiskId, whole: Option<String>) -> Result<Noted, ShardError> {
        let question = self.ask(|answer| ShardCall::Bitmaps { id, whole, answer });
        tokio::time::timeout(PATIENCE, question).await.unwrap_or(Err(ShardError::Busy))
    }

    /// A disk's figures.
    pub(crate) async fn stats(&self, id: DiskId) -> Result<Box<DiskStats>, ShardError> {
        let question = self.ask(|answer| ShardCall::Stats { id, answer });
        tokio::time::timeout(PATIENCE, question).await.unwrap_or(Err(ShardError::Busy))
    }

    /// What a disk was asked for, and the time.
    pub(crate) async fn histograms(&self, id: DiskId) -> Result<(Instant, Box<Histograms>), ShardError> {
        let question = self.ask(|answer| ShardCall::Histograms { id, answer });
        tokio::time::timeout(PATIENCE, question).await.unwrap_or(Err(ShardError::Busy))
    }

    /// What caches of other sizes would do for a disk.
    pub(crate) async fn sizing(&self, id: DiskId) -> Result<Box<Sizing>, ShardError> {
        let question = self.ask(|answer| ShardCall::Sizing { id, answer });
        tokio::time::timeout(PATIENCE, question).await.unwrap_or(Err(ShardError::Busy))
    }

    /// How many clients and machines use a disk. Files count when they are open for requests, which nobody here knows.
    pub(crate) async fn users(&self, id: DiskId) -> Result<u64, ShardError> {
        let question = self.ask(|answer| ShardCall::Users { id, answer });
        tokio::time::timeout(PATIENCE, question).await.unwrap_or(Err(ShardError::Busy))
    }

    /// Begins to count anew.
    pub(crate) async fn reset(&self, id: DiskId, counter: Counter) -> Result<(), ShardError> {
        let change = self.ask(|answer| ShardCall::Reset { id, counter, answer });
        tokio::time::timeout(PATIENCE, change).await.unwrap_or(Err(ShardError::Busy))
    }

    /// What its flash devices have done; nothing if it does not answer within `patience`.
    pub(crate) async fn devices(&self, patience: Duration) -> Option<Vec<(DeviceId, DeviceCounts)>> {
        let question = self.ask(|answer| ShardCall::Devices { answer });
        tokio::time::timeout(patience, question).await.ok()?.ok()
    }

    /// Where a disk was changed while its cache is being recovered.
    pub(crate) async fn changed_meanwhile(&self, id: DiskId) -> Result<Option<Box<Regions>>, ShardError> {
        self.ask(|answer| ShardCall::ChangedMeanwhile { id, answer }).await
    }

    /// Records a disk's requests from now on.
    pub(crate) async fn record(&self, id: DiskId, recorder: Recorder) -> Result<(), ShardError> {
        let begin = self.ask(|answer| ShardCall::Record { id, recorder, answer });
        tokio::time::timeout(PATIENCE, begin).await.unwrap_or(Err(ShardError::Busy))
    }

    /// Lets go of a disk's recorder, whose reader is gone.
    pub(crate) fn end_recording(&self, id: DiskId) {
        // A shard that is gone records nothing.
        let _ = self.send(ShardCall::EndRecording { id });
    }

    /// Hands over a client that has negotiated.
    pub(crate) fn attach(
        &self,
        id: DiskId,
        socket: OwnedFd,
        negotiated: Negotiated,
        leftover: Vec<u8>,
        promote: Promote,
        (line, place): (Line, Place),
    ) -> Result<(), ShardError> {
        self.send(ShardCall::Attach {
            id,
            socket,
            negotiated: Box::new(negotiated),
            leftover,
            promote,
            line,
            place,
        })
    }

    /// Hands over a file that the kernel has mounted.
    pub(crate) fn attach_file(
        &self,
        id: DiskId,
        device: OwnedFd,
        file: Attributes,
        rights: FileRights,
    ) -> Result<(), ShardError> {
        self.send(ShardCall::AttachFile { id, device, file, rights })
    }

    /// Closes the connections to an export.
    pub(crate) fn close_export(&self, id: DiskId, export: String) {
        // A shard that is gone has none.
        let _ = self.send(ShardCall::CloseExport { id, export });
    }

    /// Serves a machine. The answer comes through the call's own channel.
    pub(crate) fn machine(&self, call: MachineCall) -> Result<(), ShardError> {
        self.send(ShardCall::Machine(call))
    }

    /// Answers everything and takes nothing new, until [`ShardHandle::resume`].
    pub(crate) async fn rest(&self) -> Result<(), ShardError> {
        self.ask(|answer| ShardCall::Rest { answer }).await
    }

    /// Takes requests again.
    pub(crate) fn resume(&self) {
        // A shard that is gone takes none.
        let _ = self.send(ShardCall::Resume);
    }

    /// Lets go of the connections of a shard that rests.
    pub(crate) async fn hand_over(&self) -> Result<AtRest, ShardError> {
        let connections = self.ask(|answer| ShardCall::HandOver { answer });
        tokio::time::timeout(PATIENCE, connections).await.unwrap_or(Err(ShardError::Busy))
    }

    /// Ends the shard, waiting for at most [`PATIENCE`].
    pub(crate) async fn stop(&self) -> Result<(), ShardError> {
        let end = self.ask(|answer| ShardCall::Stop { answer });
        tokio::time::timeout(PATIENCE, end).await.unwrap_or(Err(ShardError::Busy))
    }

    /// Is it a handle of the same shard?
    pub(crate) fn is_same(&self, other: &ShardHandle) -> bool {
        Arc::ptr_eq(&self.wake, &other.wake)
    }

    async fn ask<T>(&self, call: impl FnOnce(Answer<T>) -> ShardCall) -> Result<T, ShardError> {
        let (answer, receiver) = oneshot::channel();
        self.send(call(answer))?;
        receiver.await.unwrap_or(Err(ShardError::Gone))
    }

    fn send(&self, call: ShardCall) -> Result<(), ShardError> {
        self.calls.send(call).map_err(|_| ShardError::Gone)?;
        (self.wake)();
        Ok(())
    }
}

impl std::fmt::Debug for ShardHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ShardHandle")
    }
}
