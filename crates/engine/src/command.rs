//! Commands of the daemon to an engine, and events that the engine reports.
//!
//! Commands take effect while requests are in flight. A change to a cache waits until none of that
//! cache's flash I/O is in flight. During this wait, requests bypass a volatile cache. The requests
//! of a disk wait if its cache is persistent, or if the change is [`CacheChange::GrowDisk`]. The
//! change is complete when [`Event::Done`] returns its id.

use crate::admission::Admission;
use crate::granularity::Fill;
use crate::granules::Granules;
use crate::policy::PolicyKind;
use crate::qos::DiskQos;
use crate::regions::Regions;
use crate::units::{CommandId, DatastoreId, DeviceId, DiskId};

/// A contiguous range of flash that belongs to one cache. All segments of one cache have the same
/// length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Segment {
    /// Flash device.
    pub device: DeviceId,
    /// First byte of the segment on the device; sector-aligned.
    pub offset: u64,
}

/// A segment for cache data, with its number in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DataSegment {
    /// Position of the segment on flash.
    pub place: Segment,
    /// Number that is unique among the cache's current data segments. Volatile caches ignore it.
    pub ordinal: u32,
    /// True if the segment has only replicas, because it is on another host's flash.
    pub seconds_only: bool,
}

/// A cache's handling of writes and misses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Writes go to the backing, and a copy goes to flash.
    #[default]
    WriteThrough,
    /// Writes go to flash first, and to the backing later. Needs a journal.
    WriteBack,
    /// Writes go to the backing only, and invalidate the cached data of the written range.
    WriteAround,
    /// Writes go to the backing as with `WriteAround`. Flash serves reads, but reads promote
    /// nothing.
    ReadOnlyCache,
    /// All requests go to the backing. The cache keeps its data, except data that writes change.
    PassThrough,
}

/// The order in which dirty data is destaged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DestageOrder {
    /// By position on the disk: repeated passes in ascending order.
    #[default]
    Elevator,
    /// In the order in which blocks became dirty. A block that was used after it became dirty
    /// returns to the end of the queue. This order approximates the order of least recent use.
    Coldest,
}

/// Settings of destaging. Shares of dirty data are per mille of the cache's capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destage {
    /// Order of destaging.
    pub order: DestageOrder,
    /// Destaging starts when more than this share of the cache is dirty.
    pub start_permille: u16,
    /// Destaging stops when at most this share of the cache is dirty.
    pub stop_permille: u16,
    /// When at least this share of a cache with the layout unified is dirty, writes to uncached
    /// blocks go to the backing. In a split cache, the size of the write buffer sets this limit
    /// instead.
    pub full_permille: u16,
    /// Maximum age of dirty data, milliseconds. With 0, only the shares above apply.
    pub dirty_age_ms_max: u64,
    /// Maximum length of one I/O that destages adjacent dirty data, bytes.
    pub io_bytes_max: u32,
    /// True if the backing must always have content that the disk had at some time. Then data
    /// written after a guest's flush is destaged only after all data written before the flush.
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

/// Whether data that guests read and data that guests write share the blocks of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// Read and written data share all blocks. Destaged data stays in the cache as clean data.
    #[default]
    Unified,
    /// A read cache has this share of the blocks, per mille, and a write buffer has the rest.
    /// Destaged data leaves the cache, and a later read brings it into the read cache.
    Split {
        /// Share of the read cache, per mille.
        read_permille: u16,
    },
}

/// Number of copies on flash, and the data to which it applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Copies {
    /// One copy of all data.
    #[default]
    One,
    /// Two copies of dirty data, on different devices.
    TwoOfDirty,
    /// Two copies of all data, on different devices.
    TwoOfAll,
    /// Two copies of dirty data, the second one in segments for replicas only. Without such
    /// segments, no data becomes dirty.
    Peer,
}

/// Settings of one cache. A change of `policy`, `admission`, `fill`, `mode`, `destage` or `copies`
/// keeps the contents of the cache. A change of `block_bytes` or `layout` empties the cache.
/// `segment_bytes` cannot change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Size of a cache block in bytes: a power of two from 4 KiB to 1 MiB, at most `segment_bytes`.
    pub block_bytes: u32,
    /// Size of a segment in bytes: a power of two.
    pub segment_bytes: u64,
    /// Replacement policy.
    pub policy: PolicyKind,
    /// Admission rule.
    pub admission: Admission,
    /// Fill granularity of read misses.
    pub fill: Fill,
    /// Write mode.
    pub mode: Mode,
    /// Division of the blocks between read and written data.
    pub layout: Layout,
    /// Settings of destaging.
    pub destage: Destage,
    /// Number of copies on flash, and the data to which it applies.
    pub copies: Copies,
}

impl CacheConfig {
    /// Returns the settings of a volatile write-through cache.
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
            fill: Fill::default(),
            mode: Mode::WriteThrough,
            layout: Layout::Unified,
            destage: Destage::default(),
            copies: Copies::One,
        }
    }
}

/// Settings of a disk's memory tier, an area of the daemon's memory to which
/// [`BufferCopy`](crate::io::BufferCopy) refers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryConfig {
    /// Size of the memory area in bytes: at least [`MEMORY_PAGES_MIN`] pages.
    pub bytes: u64,
    /// Unit of replacement in bytes: a power of two from 4 KiB to 64 KiB.
    pub page_bytes: u32,
}

/// Minimum number of pages of a memory tier.
pub const MEMORY_PAGES_MIN: u64 = 4;

/// Maximum page size of a memory tier in bytes.
pub const MEMORY_PAGE_BYTES_MAX: u32 = 64 << 10;

/// A new journal ring for the journal of a persistent cache. See docs/FORMAT.md.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewRing {
    /// Id of the cache that owns the segments.
    pub cache: [u8; 16],
    /// Number of the journal ring, higher than that of any earlier ring of the cache.
    pub number: u32,
    /// The daemon's identifier of the backing.
    pub identity: [u8; 32],
    /// Segments of the one or two copies of the journal ring, in order. Two copies have equal
    /// numbers of segments on different devices. Each copy holds at least
    /// [`ring_pages_min`](crate::journal::ring_pages_min) pages.
    pub copies: Vec<Vec<Segment>>,
}

/// Properties of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Size of the disk in bytes; a multiple of 512.
    pub size_bytes: u64,
    /// Access rights of guests.
    pub access: Access,
    /// Datastore of the disk's backing.
    pub datastore: DatastoreId,
}

/// Access rights of guests to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Guests may read and change the disk.
    ReadWrite,
    /// Changes are refused with [`IoError::ReadOnly`](crate::io::IoError::ReadOnly).
    ReadOnly,
}

/// The host that owns a disk. The table in `Engine`'s module `ownership` lists the consequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// This host owns the disk.
    #[default]
    Here,
    /// Another host owns the disk and will hand it over to this host. A disk can get this role only
    /// while it has no cache and no request in flight.
    Standby,
    /// This host owns the disk and is about to hand it over. The disk has no dirty data, and its
    /// cache does not write back.
    Frozen,
    /// Another host has taken over the disk.
    Away,
}

/// A command to the engine.
#[derive(Clone, Debug)]
pub enum Command {
    /// Adds a disk without a cache.
    AddDisk(DiskConfig),
    /// Refuses new requests, and removes the disk when its last request has ended. The segments of
    /// a volatile cache are released. A persistent cache is closed and stays on flash.
    RemoveDisk,
    /// Changes the disk's cache.
    Cache(CacheChange),
    /// Replaces the disk's memory tier by an empty one, or removes it. The command completes
    /// immediately. Memory copies that the engine requested before the command refer to the old
    /// memory area, and later copies do not.
    Memory(Option<MemoryConfig>),
    /// Sets the disk's shares, limits and reservations. The new values apply immediately, also to
    /// queued requests.
    Qos(DiskQos),
    /// Changes the disk's role. A change to [`Role::Frozen`] is complete when no guest request is
    /// in flight.
    Own(Role),
    /// Starts recording which regions of the disk change, for
    /// [`take_changed`](crate::Engine::take_changed). The record starts empty. `false` stops the
    /// recording.
    Watch(bool),
    /// Changes the disk's dirty bitmaps. The command completes immediately.
    Bitmap(BitmapChange),
    /// Resets all counters, but not the histograms and the sampler of the miss-ratio curves.
    ResetStats,
    /// Resets the histograms.
    ResetHistograms,
    /// Resets the sampler of the disk's miss-ratio curves.
    ResetSizing,
}

/// A dirty bitmap: the parts of a disk that changed, for incremental backups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Name of the bitmap, unique for its disk.
    pub name: String,
    /// Changed parts of the disk.
    pub granules: Granules,
    /// True if the bitmap records changes. A bitmap that does not record is *frozen* and does not
    /// change.
    pub is_recording: bool,
}

/// A change to a disk's bitmaps. The daemon limits the number of bitmaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BitmapChange {
    /// Adds a bitmap, empty or with stored content.
    Add(Box<Bitmap>),
    /// Removes a bitmap.
    Remove(String),
    /// Clears a recording bitmap.
    Clear(String),
    /// Moves the content of `name` to a new frozen bitmap `frozen`. Bitmap `name` becomes empty and
    /// keeps recording. No change is lost between the two bitmaps.
    Rotate {
        /// Name of a recording bitmap.
        name: String,
        /// Name of the new frozen bitmap. No other bitmap of the disk has this name.
        frozen: String,
    },
    /// Adds the content of `from` to the recording bitmap `into`, and removes `from`.
    Merge {
        /// Name of a recording or frozen bitmap.
        from: String,
        /// Name of the recording bitmap that receives the content.
        into: String,
    },
    /// Marks the whole disk as changed in a recording bitmap, because the caller knows of a change
    /// that the engine did not see.
    InsertAll(String),
}

/// A change to one disk's cache. A change with a [`NewRing`] replaces the journal ring of a
/// persistent cache. The engine then releases the segments of the old journal ring.
#[derive(Clone, Debug)]
pub enum CacheChange {
    /// Tells the engine that a cache is being recovered, and which requests may go to the backing
    /// until the recovery ends. `None` ends this state. Takes effect immediately. A later `Expect`
    /// replaces the earlier one.
    Expect(Option<Box<Expect>>),
    /// Adds a cache, which is empty and volatile, has a new journal, or was recovered.
    Enable(Box<Enable>),
    /// Removes the cache. Refused while the cache has dirty data.
    Disable,
    /// Adds segments and keeps the contents.
    Grow(Vec<DataSegment>, Option<NewRing>),
    /// Releases this number of segments, the emptiest first. Blocks in other segments are kept.
    /// Refused if dirty data would be lost.
    Shrink(u32, Option<NewRing>),
    /// Replaces all segments on a device by other segments. Refused if dirty data would be lost.
    Leave(DeviceId, Vec<DataSegment>, Option<NewRing>),
    /// Sets the disk's size in bytes, which must not shrink. The caller resizes the backing before.
    /// The cache keeps its contents, and the dirty bitmaps record the new part of the disk as
    /// changed. The caller passes a journal ring if, and only if, the cache is persistent.
    GrowDisk(u64, Option<NewRing>),
    /// Changes block size, layout, policy or admission. The cache keeps its segments and is
    /// emptied. Refused while there is dirty data.
    Configure(CacheConfig, Option<NewRing>),
    /// Invalidates the contents. Refused while there is dirty data.
    Clear(Option<NewRing>),
    /// Changes mode, destaging or copies, immediately. Dirty data stays until it is destaged.
    Tune(Mode, Destage, Copies),
    /// Changes policy and admission, immediately. Contents and eviction order are kept, but usage
    /// counts are lost. Takes time proportional to the number of blocks.
    Replace(PolicyKind, Admission),
    /// Changes the fill granularity, immediately. Contents and eviction order are kept.
    Fill(Fill),
    /// Destages until no data is dirty. Until then, writes go to the backing.
    Drain,
    /// Destages the dirty data in these segments, and lets no new data become dirty there.
    /// Write-back continues in the other segments. The command completes when the segments have no
    /// dirty data and a flush of the backing has succeeded since. The segments stay without dirty
    /// data until `Shrink` or `Leave` removes them, or `StopDrain` cancels the command.
    Vacate(Vacate),
    /// Stops a drain or a `Vacate` in progress, which ends with [`CommandError::Stopped`].
    StopDrain,
    /// Discards dirty data, so that acknowledged writes are lost. hob sends no I/O to the backing.
    DiscardDirty(Discard),
    /// The daemon has durably recorded that recovery must not use clean data of journal rings up to
    /// this number. From the loss of its journal until this command, a cache destages only data
    /// that the journal ring durably records as dirty. For other dirty data, the journal ring may
    /// describe older, clean data, which recovery would use after a crash. Takes effect
    /// immediately.
    LossRecorded(u32),
    /// The daemon has durably recorded that recovery must discard the dirty data of journal rings up
    /// to this number. A discard of dirty data waits for this command if the journal cannot be
    /// written ([`Event::DiscardUnrecorded`]). Takes effect immediately, also while the disk is being
    /// removed.
    DiscardRecorded(u32),
    /// Closes the journal: makes all records durable and marks the journal ring as cleanly closed.
    /// From then on, all requests of the disk wait, without a reply.
    Close,
}

/// Whether a discard of dirty data is reported to guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    /// The next flush of each session fails once.
    Told,
    /// The discard is not reported to guests, because no guest relies on the dirty data: the disk
    /// was reset to a snapshot.
    Silent,
}

/// Segments that a cache will release soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vacate {
    /// The segments with the fewest blocks; the value is the number of segments.
    Emptiest(u32),
    /// All segments on a device.
    Device(DeviceId),
}

/// Known facts about a cache that is being recovered. During recovery, hob sends reads outside of
/// the `doubtful` regions directly to the backing. Changes wait until the recovered cache is in
/// use, or `is_void` is true. When the recovered cache is enabled, hob drops the cached data of the
/// ranges that changed during the recovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expect {
    /// Regions for which flash may have data that the backing lacks. While there are such regions,
    /// all changes and flushes wait.
    pub doubtful: Regions,
    /// True if the cache's journal rings were durably invalidated, so that no later crash can
    /// recover the cache from them. If true, `doubtful` must be empty, because recovery uses no
    /// data of an invalidated journal.
    pub is_void: bool,
}

/// A cache to enable.
#[derive(Clone, Debug)]
pub struct Enable {
    /// Settings of the cache.
    pub config: CacheConfig,
    /// Segments for data. For a recovered cache, exactly the segments that recovery found.
    pub segments: Vec<DataSegment>,
    /// Journal ring of a persistent cache; `None` for a volatile cache.
    pub journal: Option<NewRing>,
    /// Content of the recovered journal.
    pub recovered: Option<crate::journal::Recovered>,
}

impl CacheChange {
    /// Returns the change that enables an empty volatile cache.
    pub fn enable_volatile(config: CacheConfig, segments: Vec<Segment>) -> CacheChange {
        let segments = DataSegment::without_order(segments);
        CacheChange::Enable(Box::new(Enable { config, segments, journal: None, recovered: None }))
    }

    /// Returns true if the change empties the cache or alters the data that reads of the disk
    /// return. Such a change also empties the memory tier.
    pub(crate) fn empties_memory(&self) -> bool {
        use CacheChange::*;
        matches!(self, Enable(_) | Disable | Configure(..) | Clear(_) | DiscardDirty(_))
    }

    /// Returns the journal ring that the change provides.
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
    /// Makes data segments for a volatile cache. All ordinals are 0, because a volatile cache
    /// ignores them.
    pub fn without_order(segments: Vec<Segment>) -> Vec<DataSegment> {
        segments.into_iter().map(|place| DataSegment { place, ordinal: 0, seconds_only: false }).collect()
    }
}

/// Reason why a command failed. A failed command has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandError {
    /// The disk does not exist.
    NoSuchDisk,
    /// A disk with that id exists.
    DiskExists,
    /// The disk has no cache.
    NoCache,
    /// The disk already has a cache.
    CacheExists,
    /// The disk is being removed.
    Removing,
    /// The cache would have no segment left, or the command provides no segment.
    TooSmall,
    /// Dirty data would be lost. Drain or discard it first.
    Dirty,
    /// The mode needs a journal, or the change needs a new journal ring.
    NoJournal,
    /// Some of the dirty data cannot be read from flash.
    Lost,
    /// Another command ended this one.
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
    /// The configuration is invalid. Examples: the block size is not a power of two in range, a
    /// segment is smaller than a block, or the segment size of a cache would change. More examples:
    /// the disk has more than 2³² blocks, the cache has more than 2³² − 2 blocks, or a bitmap or
    /// recovered cache has another size than the disk. A cache that writes back is also invalid if
    /// the engine has no destage buffer.
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
        /// Segments that the cache no longer uses.
        result: Result<Vec<Segment>, CommandError>,
    },
    /// Number of a disk's guests that have not received a report that acknowledged writes may be
    /// lost. The event is sent when the number changes, and before the end of the command that
    /// removes the disk.
    FailuresOwed {
        /// The disk.
        disk: DiskId,
        /// Number of guests.
        count: u32,
    },
    /// A device had too many errors. The engine makes caches stop using segments on the device
    /// ([`Event::Lost`]).
    Fenced {
        /// The device.
        device: DeviceId,
        /// Number of failed I/Os before the fence.
        errors: u32,
    },
    /// A cache stopped using segments of a fenced device.
    Lost {
        /// The disk that the cache belongs to.
        disk: DiskId,
        /// The segments.
        segments: Vec<Segment>,
    },
    /// An I/O of a flash device exceeds the time limit, so caches bypass the device.
    Stalled(DeviceId),
    /// A stalled device completed its overdue I/O.
    Resumed(DeviceId),
    /// Dirty data cannot be read from flash or from its second copy. Reads of its sectors fail
    /// until the sectors are overwritten or discarded.
    DirtyLost {
        /// The disk.
        disk: DiskId,
        /// Total number of unreadable sectors of the disk.
        sectors: u64,
    },
    /// The journal cannot be written any more. No more data becomes dirty, and the engine destages
    /// the dirty data. Until [`CacheChange::LossRecorded`], the engine destages only data that the
    /// journal durably records as dirty. Changes and flushes wait until the daemon provides a new
    /// journal. If the daemon cannot provide a new journal, it drains the cache, records the end of
    /// the cache and disables the cache. Changes and flushes that have waited for half a minute
    /// fail.
    JournalLost(DiskId),
    /// A discard of a disk's dirty data waits for [`CacheChange::DiscardRecorded`] with the number of
    /// this journal ring, because the lost journal still describes the data as dirty. Without the
    /// record, the discarded data would be back after a restart.
    DiscardUnrecorded(DiskId, u32),
    /// The engine does not write one copy of a cache's journal ring any more, so this copy becomes
    /// older than the other copies.
    JournalCopyLost(DiskId),
    /// A flush of the backing failed, or the backing reported a restart, so acknowledged changes of
    /// guests may be lost. The next flush of each session fails.
    WritesInDoubt(DiskId),
    /// Final bitmaps of a disk that is being removed, which contain every acknowledged change. The
    /// event is sent just before the removal is complete.
    Bitmaps {
        /// The disk.
        disk: DiskId,
        /// All bitmaps of the disk.
        bitmaps: Vec<Bitmap>,
    },
    /// A change waits for a recovering cache, or for another host that will hand the disk over. For
    /// a recovering cache, the engine sends the event only if no region may have dirty data. The
    /// change can then continue as soon as the journal rings are [invalidated](Expect::is_void).
    /// The event is sent at most once for each recovery and each standby.
    ChangeWaits(DiskId),
}
