//! What the daemon tells an engine, and what an engine reports.
//!
//! Commands take effect under load: a change to a cache waits until none of that cache's flash I/O
//! is in flight, and meanwhile the disk's requests go to the backing. The change is finished when
//! [`Event::Done`] names its id.

use crate::admission::Admission;
use crate::granules::Granules;
use crate::policy::PolicyKind;
use crate::qos::DiskQos;
use crate::regions::Regions;
use crate::units::{CommandId, DatastoreId, DeviceId, DiskId};

/// A run of flash that belongs to one cache. All segments of one cache have the same length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Segment {
    /// The device it lies on.
    pub device: DeviceId,
    /// Its first byte on the device; sector-aligned.
    pub offset: u64,
}

/// A segment that keeps cache data, and what the journal calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DataSegment {
    /// Where.
    pub place: Segment,
    /// Unlike that of any other data segment of the cache, for as long as the cache has it. Means
    /// nothing in a volatile cache.
    pub ordinal: u32,
    /// It takes second copies and nothing else: it lies on another host's flash.
    pub seconds_only: bool,
}

/// What a cache does with writes, and with reads it does not hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Writes go to the backing, and a copy to flash.
    #[default]
    WriteThrough,
    /// Writes go to flash, and to the backing later. Needs a journal.
    WriteBack,
    /// Writes go to the backing only; what flash holds of their range is given up.
    WriteAround,
    /// As `WriteAround`, and reads are served from flash but bring nothing new into it.
    ReadOnlyCache,
    /// Everything goes to the backing; the cache holds nothing.
    PassThrough,
}

/// In which order dirty data goes to the backing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DestageOrder {
    /// As it lies on the disk, round and round.
    #[default]
    Elevator,
    /// What became dirty first goes first, unless it was used since: least recently used, or earliest Inactive.
    Coldest,
}

/// When and how dirty data goes to the backing. Shares are per mille of the cache's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destage {
    /// In which order.
    pub order: DestageOrder,
    /// Destaging starts when more than this share is dirty…
    pub start_permille: u16,
    /// … and stops when no more than this is.
    pub stop_permille: u16,
    /// Above this share, writes to blocks that are not in the cache go through to the backing.
    pub full_permille: u16,
    /// Dirty data goes to the backing within this time, milliseconds; 0: when the shares above say so.
    pub dirty_age_ms_max: u64,
    /// What lies next to each other on the disk is written in one I/O of up to this many bytes.
    pub io_bytes_max: u32,
    /// The backing always holds a state that existed: nothing written after a guest's flush goes
    /// there before everything that was written before it.
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

/// How a cache's blocks are shared between what was read and what was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// One room for both. What has been destaged stays, clean.
    #[default]
    Unified,
    /// A read cache of this share of the blocks, per mille, and a write buffer of the others. What has been destaged is given
    /// up; a read brings it into the read cache.
    Split {
        /// Share of the read cache.
        read_permille: u16,
    },
}

/// How many copies flash keeps of what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Copies {
    /// One of everything.
    #[default]
    One,
    /// Two of what is not on the backing yet, on different devices.
    TwoOfDirty,
    /// Two of everything, on different devices.
    TwoOfAll,
    /// Two of what is not on the backing yet, the second in segments that take second copies only. Without such segments nothing
    /// becomes dirty.
    Peer,
}

/// Settings of one cache. Contents survive a change of `mode`, `destage` and `copies` only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Cache block, bytes: a power of two, 4 KiB to 1 MiB, at most `segment_bytes`.
    pub block_bytes: u32,
    /// Segment, bytes: a power of two.
    pub segment_bytes: u64,
    /// Replacement.
    pub policy: PolicyKind,
    /// What may come in.
    pub admission: Admission,
    /// What happens to writes.
    pub mode: Mode,
    /// Reads and writes together, or apart.
    pub layout: Layout,
    /// When dirty data goes to the backing.
    pub destage: Destage,
    /// Of dirty data, or of all.
    pub copies: Copies,
}

impl CacheConfig {
    /// Of a volatile write-through cache.
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

/// Memory above a disk's cache: an area of the owner's, to which [`BufferCopy`](crate::io::BufferCopy) refers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryConfig {
    /// Bytes of the area: at least [`MEMORY_PAGES_MIN`] pages.
    pub bytes: u64,
    /// Unit of replacement, bytes: a power of two, 4 KiB to 64 KiB.
    pub page_bytes: u32,
}

/// Fewest pages of a memory tier.
pub const MEMORY_PAGES_MIN: u64 = 4;

/// Largest page of a memory tier, bytes.
pub const MEMORY_PAGE_BYTES_MAX: u32 = 64 << 10;

/// A new ring for a persistent cache's journal. See docs/FORMAT.md.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewRing {
    /// The owner of the segments.
    pub cache: [u8; 16],
    /// Higher than that of any ring the cache had before.
    pub number: u32,
    /// What the daemon knows the backing by.
    pub identity: [u8; 32],
    /// The segments of each copy, one or two, in order; as many in each, on different devices. Together
    /// they hold at least [`ring_pages_min`](crate::journal::ring_pages_min) pages.
    pub copies: Vec<Vec<Segment>>,
}

/// A disk as its guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Bytes; a multiple of 512.
    pub size_bytes: u64,
    /// May guests change it?
    pub access: Access,
    /// What its backing shares with others.
    pub datastore: DatastoreId,
}

/// What guests may do to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Everything.
    ReadWrite,
    /// Changes are refused with [`IoError::ReadOnly`](crate::io::IoError::ReadOnly).
    ReadOnly,
}

/// Which host's a disk is. `Engine`'s module `ownership` has the table of what that means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// This host's.
    #[default]
    Here,
    /// Another host's, which is to hand it over to this one. Given to a disk without cache to which nothing has happened yet.
    Standby,
    /// This host's, about to be handed over. Only a disk with nothing dirty, and whose cache does not write back.
    Frozen,
    /// Another host's now.
    Away,
}

/// One instruction.
#[derive(Clone, Debug)]
pub enum Command {
    /// A disk comes under this engine's care, without a cache.
    AddDisk(DiskConfig),
    /// New requests are refused from now on; done when the last one in flight has been answered.
    /// The cache's segments are released.
    RemoveDisk,
    /// Change its cache.
    Cache(CacheChange),
    /// Give the disk memory above its cache, empty, in place of what it had; or none. Done at once: copies that were asked for
    /// before this still refer to the area of before, none after it does.
    Memory(Option<MemoryConfig>),
    /// Give the disk shares, limits and reservations. At once, for what waits already too.
    Qos(DiskQos),
    /// The disk gets another role; done when it has it. [`Role::Frozen`]: when nothing of a guest is in flight.
    Own(Role),
    /// Note where the disk is changed, for [`take_changed`](crate::Engine::take_changed), from nothing on; or no more.
    Watch(bool),
    /// Change what is noted of changes to the disk. Done at once.
    Bitmap(BitmapChange),
    /// Start counting from zero, but for the histograms and the sampler of sizes.
    ResetStats,
    /// Start the histograms anew.
    ResetHistograms,
    /// Start the sampler of sizes anew.
    ResetSizing,
}

/// What is noted of changes to a disk: the granules that they touched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Unlike that of any other of the disk.
    pub name: String,
    /// What was changed.
    pub granules: Granules,
    /// It notes what is changed now. If not, it is *frozen*: it stays as it is.
    pub is_recording: bool,
}

/// A change to a disk's bitmaps. How many there may be is the owner's matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BitmapChange {
    /// One more, empty or as it was kept.
    Add(Box<Bitmap>),
    /// One fewer.
    Remove(String),
    /// What one that records has noted so far is forgotten.
    Clear(String),
    /// What `name` has noted so far is called `frozen` from now on and stays as it is; `name` goes on, empty. No change is lost
    /// between the two.
    Rotate {
        /// One that records.
        name: String,
        /// A name that is free.
        frozen: String,
    },
    /// What is in `from` is put into `into`, which records; `from` is removed.
    Merge {
        /// Either kind.
        from: String,
        /// Another one.
        into: String,
    },
    /// The disk may read differently anywhere, for reasons that the engine cannot know.
    InsertAll(String),
}

/// A change to one disk's cache. Changes of a persistent cache's structure bring a ring for its journal; the
/// old one's segments are among those that are released.
#[derive(Clone, Debug)]
pub enum CacheChange {
    /// The disk is to have a cache again that is being recovered; what may go to its backing meanwhile. With `None` it gets
    /// none after all. At once, and as often as more is known.
    Expect(Option<Box<Expect>>),
    /// Give the disk a cache: empty and volatile, or with a journal, or as it was recovered.
    Enable(Box<Enable>),
    /// Take the cache away. Refused while it holds dirty data.
    Disable,
    /// More room; contents stay.
    Grow(Vec<DataSegment>, Option<NewRing>),
    /// Release that many segments, the emptiest first; blocks elsewhere stay. Refused while dirty data
    /// would be lost.
    Shrink(u32, Option<NewRing>),
    /// Release every segment on a device, and use these in their place. Refused while dirty data would be lost.
    Leave(DeviceId, Vec<DataSegment>, Option<NewRing>),
    /// The disk is so many bytes large from now on, no fewer than before; its backing is already. Contents stay. Bitmaps call
    /// what is new changed. A ring comes with it if, and only if, there is a persistent cache.
    GrowDisk(u64, Option<NewRing>),
    /// Another block size, policy or admission: same room, emptied. Refused while there is dirty data.
    Configure(CacheConfig, Option<NewRing>),
    /// Forget the contents. Refused while there is dirty data.
    Clear(Option<NewRing>),
    /// Another mode, destage or number of copies, at once. Dirty data stays until it is destaged.
    Tune(Mode, Destage, Copies),
    /// Destage until nothing is dirty; meanwhile writes go through. Done then.
    Drain,
    /// Destage what is dirty in these segments, and let nothing new become dirty there; write-back goes on in the others. Done
    /// when nothing is dirty there and a flush of the backing has succeeded meanwhile. The segments then stay so until a
    /// `Shrink` by as many or a `Leave` gives them back, or `StopDrain` takes it back.
    Vacate(Vacate),
    /// Stop a drain or a `Vacate` that is under way, which ends with [`CommandError::Stopped`].
    StopDrain,
    /// Forget what is dirty: acknowledged writes are lost. The backing is not asked for anything.
    DiscardDirty(Discard),
    /// Bring the journal to rest: everything recorded, durable, and marked as closed cleanly. The cache bypasses from
    /// then on what it can, and holds what it cannot.
    Close,
}

/// What guests are told of dirty data that is discarded.
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

/// What is known of a cache that is being recovered. Reads outside of `doubtful` go to the backing. Changes wait until the
/// cache is there, or `is_void`: what they change is remembered, and is not in the cache then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expect {
    /// Whatever flash may hold and the backing may not is in here. While it is not empty, all changes wait, and flushes too.
    pub doubtful: Regions,
    /// No crash from now on leaves anything from which this cache could be recovered: its rings are nobody's any more.
    /// Only with nothing doubtful.
    pub is_void: bool,
}

/// A cache to be.
#[derive(Clone, Debug)]
pub struct Enable {
    /// Settings.
    pub config: CacheConfig,
    /// Room for data. With `recovered`, those segments that were found, all of them.
    pub segments: Vec<DataSegment>,
    /// Makes it persistent.
    pub journal: Option<NewRing>,
    /// What an earlier journal tells.
    pub recovered: Option<crate::journal::Recovered>,
}

impl CacheChange {
    /// An empty volatile cache.
    pub fn enable_volatile(config: CacheConfig, segments: Vec<Segment>) -> CacheChange {
        let segments = DataSegment::without_order(segments);
        CacheChange::Enable(Box::new(Enable { config, segments, journal: None, recovered: None }))
    }

    /// Does the disk read differently after it, or is it to be empty? Then memory above the cache is emptied too.
    pub(crate) fn empties_memory(&self) -> bool {
        use CacheChange::*;
        matches!(self, Enable(_) | Disable | Configure(..) | Clear(_) | DiscardDirty(_))
    }

    /// The ring that it brings.
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
    /// Segments of a volatile cache.
    pub fn without_order(segments: Vec<Segment>) -> Vec<DataSegment> {
        segments.into_iter().map(|place| DataSegment { place, ordinal: 0, seconds_only: false }).collect()
    }
}

/// Why a command was not carried out. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandError {
    /// There is no such disk.
    NoSuchDisk,
    /// A disk of that id exists.
    DiskExists,
    /// The disk has no cache.
    NoCache,
    /// The disk has a cache already.
    CacheExists,
    /// The disk is being removed.
    Removing,
    /// The cache has no more segments than it is asked to release, or none are given.
    TooSmall,
    /// It would lose data that is not on the backing: drain or discard first.
    Dirty,
    /// The mode needs a journal, or the change a new ring for it.
    NoJournal,
    /// Some of the dirty data cannot be read from flash.
    Lost,
    /// Another command ended it.
    Stopped,
    /// A disk of its role cannot have that one, or do that.
    WrongRole,
    /// Disks do not get smaller.
    Shrinks,
    /// Its cache is being recovered.
    Recovering,
    /// The disk has no bitmap of that name.
    NoSuchBitmap,
    /// The disk has a bitmap of that name, or is to merge one with itself.
    BitmapExists,
    /// The bitmap does not record.
    BitmapFrozen,
    /// The journal could not be written.
    JournalFailed,
    /// The backing could not be flushed.
    BackingFailed,
    /// The configuration cannot work: block size not a power of two in range, segment smaller than
    /// a block, a disk of more than 2³² blocks, or more than 2³² − 2 blocks of cache. Or it writes back, and the
    /// engine has no buffer of its own.
    Unworkable,
}

/// Something the daemon should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A command ended.
    Done {
        /// Which.
        command: CommandId,
        /// For which disk.
        disk: DiskId,
        /// Segments that the cache no longer uses, free to be given away.
        result: Result<Vec<Segment>, CommandError>,
    },
    /// A disk is removed, and so many guests were not told that acknowledged writes may be lost. Comes before the end of the command.
    FailuresOwed {
        /// Which disk.
        disk: DiskId,
        /// Number of guests; at least 1.
        count: u32,
    },
    /// A device failed too often. Caches give its segments up by themselves ([`Event::Lost`]).
    Fenced {
        /// Which.
        device: DeviceId,
        /// Failed I/Os that led to it.
        errors: u32,
    },
    /// A cache stopped using segments of a fenced device.
    Lost {
        /// Whose cache.
        disk: DiskId,
        /// Which segments.
        segments: Vec<Segment>,
    },
    /// A flash device has an I/O outstanding for longer than the limit; its caches bypass it.
    Stalled(DeviceId),
    /// A stalled device answered again.
    Resumed(DeviceId),
    /// Dirty data cannot be read from flash, nor its second copy. Its sectors fail until they are written again, or
    /// discarded.
    DirtyLost {
        /// Whose.
        disk: DiskId,
        /// Sectors that cannot be read, in all.
        sectors: u64,
    },
    /// The journal cannot be written any more: the cache takes no dirty data, and what it has goes to the backing. Changes and
    /// flushes wait until its owner gives it another one, or drains it, records that it is gone and disables it; after half
    /// a minute they fail.
    JournalLost(DiskId),
    /// A flush of the backing failed, or the backing reported a restart: acknowledged changes of guests may be lost. The next
    /// flush of each session fails.
    WritesInDoubt(DiskId),
    /// A disk ends, and had these bitmaps: everything that was acknowledged is noted. Comes just before its removal is done.
    Bitmaps {
        /// Whose.
        disk: DiskId,
        /// All of them.
        bitmaps: Vec<Bitmap>,
    },
    /// A change waits: for a cache that is being recovered and has nothing dirty, which it could pass if the rings were made
    /// [void](Expect::is_void); or for another host to hand the disk over. Said once for each.
    ChangeWaits(DiskId),
}
