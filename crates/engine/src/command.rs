//! Commands of the daemon to an engine, and events that an engine reports.
//!
//! Commands take effect under load. A change to a cache waits until none of that cache's flash I/O is in
//! flight; meanwhile the disk's requests go to the backing. The change is finished when [`Event::Done`] has
//! its id.

use crate::admission::Admission;
use crate::granules::Granules;
use crate::policy::PolicyKind;
use crate::qos::DiskQos;
use crate::regions::Regions;
use crate::units::{CommandId, DatastoreId, DeviceId, DiskId};

/// A contiguous part of flash that belongs to one cache. All segments of one cache have the same length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Segment {
    /// The device.
    pub device: DeviceId,
    /// Its first byte on the device; sector-aligned.
    pub offset: u64,
}

/// A segment for cache data, with its number in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DataSegment {
    /// Position on flash.
    pub place: Segment,
    /// Unique among the cache's data segments while the cache has it. Ignored in a volatile cache.
    pub ordinal: u32,
    /// It holds only replicas: it lies on another host's flash.
    pub seconds_only: bool,
}

/// How a cache treats writes, and reads that it does not hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Writes go to the backing, and a copy to flash.
    #[default]
    WriteThrough,
    /// Writes go to flash, and to the backing later. Needs a journal.
    WriteBack,
    /// Writes go to the backing only; flash content of their range is invalidated.
    WriteAround,
    /// As `WriteAround`; reads are served from flash but never promoted.
    ReadOnlyCache,
    /// Everything goes to the backing; the cache holds nothing.
    PassThrough,
}

/// The order in which dirty data is destaged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DestageOrder {
    /// By position on the disk, in ascending rounds.
    #[default]
    Elevator,
    /// Oldest first, unless used since: least recently used, or earliest Inactive.
    Coldest,
}

/// When and how dirty data is destaged. Shares are per mille of the cache's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destage {
    /// The order.
    pub order: DestageOrder,
    /// Destaging starts when more than this share is dirty…
    pub start_permille: u16,
    /// … and stops when at most this share is.
    pub stop_permille: u16,
    /// Above this share, writes to blocks that are not in the cache go through to the backing.
    pub full_permille: u16,
    /// Maximum age of dirty data, milliseconds; 0: only the shares above apply.
    pub dirty_age_ms_max: u64,
    /// Adjacent dirty data is written in one I/O of up to this many bytes.
    pub io_bytes_max: u32,
    /// The backing always holds a state that existed: data written after a guest's flush is destaged only
    /// after all data written before it.
    pub ordered: bool,
}

impl Default for Destage {
    fn default() -> Self {
        Destage {
            order: DestageOrder::Elevator,
            start_permille: 100,
            stop_permille: 50,
            full_permille: 700,
            dirty_age_ms_max: 30_000,
            io_bytes_max: 1 << 20,
            ordered: false,
        }
    }
}

/// How a cache's blocks are divided between read and written data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// Shared. Destaged data stays in the cache as clean data.
    #[default]
    Unified,
    /// A read cache with this share of the blocks, per mille, and a write buffer with the rest. Destaged
    /// data leaves the cache; a later read brings it into the read cache.
    Split {
        /// Share of the read cache.
        read_permille: u16,
    },
}

/// How many copies flash keeps, and of which data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Copies {
    /// One of everything.
    #[default]
    One,
    /// Two copies of dirty data, on different devices.
    TwoOfDirty,
    /// Two copies of all data, on different devices.
    TwoOfAll,
    /// Two copies of dirty data, the second in segments for replicas only. Without such segments no data
    /// becomes dirty.
    Peer,
}

/// Settings of one cache. Its contents survive only changes of `policy`, `admission`, `mode`,
/// `destage` and `copies`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Size of a cache block in bytes: a power of two, 4 KiB to 1 MiB, at most `segment_bytes`.
    pub block_bytes: u32,
    /// Size of a segment in bytes: a power of two.
    pub segment_bytes: u64,
    /// Replacement policy.
    pub policy: PolicyKind,
    /// Admission.
    pub admission: Admission,
    /// Write mode.
    pub mode: Mode,
    /// One part for reads and writes, or two.
    pub layout: Layout,
    /// When dirty data is destaged.
    pub destage: Destage,
    /// Number of copies on flash.
    pub copies: Copies,
}

impl CacheConfig {
    /// Settings of a volatile write-through cache.
    pub fn write_through(
        block_bytes: u32,
        segment_bytes: u64,
        policy: PolicyKind,
        admission: Admission,
    ) -> CacheConfig {
        CacheConfig {
            block_bytes,
            segment_bytes,
            policy,
            admission,
            mode: Mode::WriteThrough,
            layout: Layout::Unified,
            destage: Destage::default(),
            copies: Copies::One,
        }
    }
}

/// A disk's memory tier: an area of the owner's memory, to which [`BufferCopy`](crate::io::BufferCopy)
/// refers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryConfig {
    /// Size of the area in bytes: at least [`MEMORY_PAGES_MIN`] pages.
    pub bytes: u64,
    /// Unit of replacement, bytes: a power of two, 4 KiB to 64 KiB.
    pub page_bytes: u32,
}

/// Minimum number of pages of a memory tier.
pub const MEMORY_PAGES_MIN: u64 = 4;

/// Maximum page size of a memory tier in bytes.
pub const MEMORY_PAGE_BYTES_MAX: u32 = 64 << 10;

/// A new ring for a persistent cache's journal. See docs/FORMAT.md.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewRing {
    /// Id of the cache that owns the segments.
    pub cache: [u8; 16],
    /// Higher than the number of any earlier ring of the cache.
    pub number: u32,
    /// The daemon's identity of the backing.
    pub identity: [u8; 32],
    /// The segments of each copy, one or two copies, in order; as many in each, on different devices.
    /// Together they hold at least [`ring_pages_min`](crate::journal::ring_pages_min) pages.
    pub copies: Vec<Vec<Segment>>,
}

/// Properties of a disk that the guest sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Size in bytes; a multiple of 512.
    pub size_bytes: u64,
    /// Whether guests may write.
    pub access: Access,
    /// The datastore of its backing.
    pub datastore: DatastoreId,
}

/// Access of guests to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Everything.
    ReadWrite,
    /// Changes are refused with [`IoError::ReadOnly`](crate::io::IoError::ReadOnly).
    ReadOnly,
}

/// Which host owns a disk. The table in `Engine`'s module `ownership` lists the consequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// This host owns it.
    #[default]
    Here,
    /// Another host owns it and will hand it over to this one. Only for a disk without a cache that has had
    /// no requests yet.
    Standby,
    /// This host owns it and is about to hand it over. Only for a disk without dirty data whose cache does
    /// not write back.
    Frozen,
    /// Another host owns it now.
    Away,
}

/// A command to the engine.
#[derive(Clone, Debug)]
pub enum Command {
    /// Adds a disk without a cache.
    AddDisk(DiskConfig),
    /// Refuses new requests; done when the last request in flight has been answered. The cache's segments
    /// are released.
    RemoveDisk,
    /// Changes the disk's cache.
    Cache(CacheChange),
    /// Replaces the disk's memory tier by an empty one, or by none. Done immediately: copies requested
    /// before refer to the old area, later ones never do.
    Memory(Option<MemoryConfig>),
    /// Sets the disk's shares, limits and reservations. Takes effect immediately, also for queued requests.
    Qos(DiskQos),
    /// Changes the disk's role; done when it has changed. [`Role::Frozen`]: when no guest request is in
    /// flight.
    Own(Role),
    /// Starts recording where the disk is changed, for [`take_changed`](crate::Engine::take_changed), from
    /// an empty state; or stops.
    Watch(bool),
    /// Changes the disk's dirty bitmaps. Done immediately.
    Bitmap(BitmapChange),
    /// Resets all counters except the histograms and the working-set sampler.
    ResetStats,
    /// Resets the histograms.
    ResetHistograms,
    /// Resets the working-set sampler.
    ResetSizing,
}

/// A dirty bitmap of a disk: the granules that were changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Unique among the disk's bitmaps.
    pub name: String,
    /// The changed granules.
    pub granules: Granules,
    /// True if it records changes. If false, it is *frozen* and stays as it is.
    pub is_recording: bool,
}

/// A change to a disk's bitmaps. The owner limits their number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BitmapChange {
    /// Adds a bitmap, empty or with stored content.
    Add(Box<Bitmap>),
    /// Removes a bitmap.
    Remove(String),
    /// Clears a recording bitmap.
    Clear(String),
    /// Moves the content of `name` to a new frozen bitmap `frozen`; `name` goes on recording, empty. No
    /// change is lost between the two.
    Rotate {
        /// A recording bitmap.
        name: String,
        /// An unused name.
        frozen: String,
    },
    /// Adds the content of `from` to `into`, which records; removes `from`.
    Merge {
        /// Recording or frozen.
        from: String,
        /// Another bitmap.
        into: String,
    },
    /// Marks the whole disk as changed, for reasons that the engine cannot know.
    InsertAll(String),
}

/// A change to one disk's cache. Structural changes of a persistent cache provide a new journal ring; the
/// old ring's segments are among those that are released.
#[derive(Clone, Debug)]
pub enum CacheChange {
    /// Announces a cache that is being recovered, and which requests may go to the backing meanwhile.
    /// `None` withdraws it. Takes effect immediately, and can be repeated when more is known.
    Expect(Option<Box<Expect>>),
    /// Adds a cache: empty and volatile, with a journal, or as recovered.
    Enable(Box<Enable>),
    /// Removes the cache. Refused while it holds dirty data.
    Disable,
    /// Adds segments; contents stay.
    Grow(Vec<DataSegment>, Option<NewRing>),
    /// Releases this many segments, the emptiest first; blocks elsewhere stay. Refused if dirty data would
    /// be lost.
    Shrink(u32, Option<NewRing>),
    /// Releases every segment on a device, and uses these instead. Refused if dirty data would be lost.
    Leave(DeviceId, Vec<DataSegment>, Option<NewRing>),
    /// Sets the disk's size in bytes, which must not shrink; its backing has that size already. Contents
    /// stay. Bitmaps mark the new part as changed. A ring is given if, and only if, there is a persistent
    /// cache.
    GrowDisk(u64, Option<NewRing>),
    /// Changes block size, layout, policy or admission; the cache keeps its segments and is emptied. Refused while
    /// there is dirty data.
    Configure(CacheConfig, Option<NewRing>),
    /// Invalidates the contents. Refused while there is dirty data.
    Clear(Option<NewRing>),
    /// Changes mode, destage or copies, immediately. Dirty data stays until it is destaged.
    Tune(Mode, Destage, Copies),
    /// Changes policy and admission, immediately. Contents and eviction order stay, heats do not. O(blocks).
    Replace(PolicyKind, Admission),
    /// Destages until nothing is dirty; meanwhile writes go to the backing.
    Drain,
    /// Destage the dirty data in these segments, and let no new data become dirty there; write-back
    /// continues in the others. Completes when nothing is dirty there and a flush of the backing
    /// has succeeded since. The segments stay so until a `Shrink` by as many or a `Leave` removes
    /// them, or `StopDrain` cancels it.
    Vacate(Vacate),
    /// Stop a drain or a `Vacate` that is under way, which ends with [`CommandError::Stopped`].
    StopDrain,
    /// Discard dirty data: acknowledged writes are lost. Does not use the backing.
    DiscardDirty(Discard),
    /// The owner has durably recorded that clean data of rings up to this number is not to be used. After
    /// a loss of its journal, a cache destages only data that the ring durably calls dirty until this has
    /// been sent: the ring may describe older, clean data there. Takes effect immediately.
    LossRecorded(u32),
    /// Close the journal: make all records durable and mark the ring as cleanly closed. From then
    /// on the cache bypasses requests, or keeps them waiting if they need dirty data.
    Close,
}

/// Whether guests are told that dirty data is discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    /// The next flush of each session fails once.
    Told,
    /// Nothing: no guest counts on that data any more, as its disk was put back to a snapshot.
    Silent,
}

/// Segments that a cache is about to give back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vacate {
    /// So many, the emptiest.
    Emptiest(u32),
    /// All on a device.
    Device(DeviceId),
}

/// Known facts about a cache in recovery. Reads outside of `doubtful` go to the backing. Changes
/// wait for the cache, or until `is_void`; then the cache invalidates what they changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expect {
    /// Regions for which flash may hold data that the backing does not. While it is not empty, all changes
    /// and flushes wait.
    pub doubtful: Regions,
    /// The cache's rings were invalidated durably: no later crash leaves a journal from which it could be
    /// recovered. Only if nothing is doubtful.
    pub is_void: bool,
}

/// A cache to enable.
#[derive(Clone, Debug)]
pub struct Enable {
    /// Settings.
    pub config: CacheConfig,
    /// Segments for data. With `recovered`: exactly the segments that were found.
    pub segments: Vec<DataSegment>,
    /// Makes it persistent.
    pub journal: Option<NewRing>,
    /// Content of the recovered journal.
    pub recovered: Option<crate::journal::Recovered>,
}

impl CacheChange {
    /// Enables an empty volatile cache.
    pub fn enable_volatile(config: CacheConfig, segments: Vec<Segment>) -> CacheChange {
        let segments = DataSegment::without_order(segments);
        CacheChange::Enable(Box::new(Enable { config, segments, journal: None, recovered: None }))
    }

    /// Returns true if the disk reads differently afterwards, or the cache is to be emptied. Then the
    /// memory tier is emptied too.
    pub(crate) fn empties_memory(&self) -> bool {
        use CacheChange::*;
        matches!(self, Enable(_) | Disable | Configure(..) | Clear(_) | DiscardDirty(_))
    }

    /// Returns the ring that the change provides.
    pub fn ring(&self) -> Option<&NewRing> {
        match self {
            CacheChange::Enable(enable) => enable.journal.as_ref(),
            CacheChange::Grow(_, ring)
            | CacheChange::Shrink(_, ring)
            | CacheChange::Leave(_, _, ring)
            | CacheChange::GrowDisk(_, ring)
            | CacheChange::Configure(_, ring)
            | CacheChange::Clear(ring) => ring.as_ref(),
            _ => None,
        }
    }
}

impl DataSegment {
    /// Makes segments of a volatile cache, numbered in order.
    pub fn without_order(segments: Vec<Segment>) -> Vec<DataSegment> {
        segments.into_iter().map(|place| DataSegment { place, ordinal: 0, seconds_only: false }).collect()
    }
}

/// Why a command failed. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandError {
    /// The disk does not exist.
    NoSuchDisk,
    /// A disk with that id exists.
    DiskExists,
    /// The disk has no cache.
    NoCache,
    /// The disk has a cache already.
    CacheExists,
    /// The disk is being removed.
    Removing,
    /// The cache has no more segments than would be released, or no segments are given.
    TooSmall,
    /// Dirty data would be lost: drain or discard first.
    Dirty,
    /// The mode needs a journal, or the change a new ring for it.
    NoJournal,
    /// Some of the dirty data cannot be read from flash.
    Lost,
    /// Another command ended it.
    Stopped,
    /// The disk's role does not allow the change.
    WrongRole,
    /// A disk cannot shrink.
    Shrinks,
    /// The cache is being recovered.
    Recovering,
    /// The bitmap does not exist.
    NoSuchBitmap,
    /// A bitmap with that name exists, or a bitmap would be merged with itself.
    BitmapExists,
    /// The bitmap does not record.
    BitmapFrozen,
    /// The journal could not be written.
    JournalFailed,
    /// The backing could not be flushed.
    BackingFailed,
    /// The configuration is invalid: block size not a power of two in range, segment smaller than a block,
    /// a disk of more than 2³² blocks, or more than 2³² − 2 blocks of cache. Or it writes back, and the
    /// engine has no buffer of its own.
    Unworkable,
}

/// An event for the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A command ended.
    Done {
        /// The command.
        command: CommandId,
        /// The disk.
        disk: DiskId,
        /// Segments that the cache no longer uses, free for reuse.
        result: Result<Vec<Segment>, CommandError>,
    },
    /// Number of a disk's guests that were not told yet that acknowledged writes may be lost. Sent
    /// when the number changes, and before the end of the command that removes the disk.
    FailuresOwed {
        /// The disk.
        disk: DiskId,
        /// Number of guests.
        count: u32,
    },
    /// A device failed too often. Caches give its segments up by themselves ([`Event::Lost`]).
    Fenced {
        /// The device.
        device: DeviceId,
        /// Number of failed I/Os before the fence.
        errors: u32,
    },
    /// A cache stopped using segments of a fenced device.
    Lost {
        /// The cache's disk.
        disk: DiskId,
        /// The segments.
        segments: Vec<Segment>,
    },
    /// An I/O of a flash device exceeds the time limit; its caches bypass the device.
    Stalled(DeviceId),
    /// A stalled device completed its I/O.
    Resumed(DeviceId),
    /// Dirty data cannot be read from flash, nor from its second copy. Its sectors fail until they are
    /// written again, or discarded.
    DirtyLost {
        /// The disk.
        disk: DiskId,
        /// Number of unreadable sectors in all.
        sectors: u64,
    },
    /// The journal cannot be written any more: no data becomes dirty, and dirty data is destaged, all of it
    /// only after [`CacheChange::LossRecorded`]. Changes and flushes wait until the owner provides a new
    /// journal, or drains the cache, records that it is gone and disables it. They fail after half a
    /// minute.
    JournalLost(DiskId),
    /// A flush of the backing failed, or the backing reported a restart: acknowledged changes of guests may
    /// be lost. The next flush of each session fails.
    WritesInDoubt(DiskId),
    /// A disk is removed, and had these bitmaps, which contain every acknowledged change. Reported just
    /// before the removal is done.
    Bitmaps {
        /// The disk.
        disk: DiskId,
        /// All its bitmaps.
        bitmaps: Vec<Bitmap>,
    },
    /// A change waits: for a recovering cache without dirty data, past which it could be sent if the rings
    /// were [invalidated](Expect::is_void); or for another host to hand the disk over. Reported once for
    /// each.
    ChangeWaits(DiskId),
}
