//! The calls to a shard. A row of the table is a variant of [`ShardCall`] and the function of
//! [`ShardHandle`] that sends it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use hob_engine::command::{BitmapChange, CacheChange, DiskConfig, MemoryConfig, Segment};
use hob_engine::flash_budget::{Allowance, Counts};
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

use super::{
    Answer, AtRest, ConnectionPermit, Counter, CountsAsked, FileRights, Gone, Noted, ShardError, ShardHandle,
    TransferCall, Transport, VhostUserCall,
};
use crate::lease_clock::LeaseClock;
use crate::request_recorder::Recorder;
use hob_storage::area::Area;
use hob_storage::backing::Backing;
use hob_storage::flash::DeviceCounts;
use hob_storage::pool::FlashFile as FlashDevice;

/// Defines [`ShardCall`] and the functions that send its variants. The first word of a row is the
/// kind of its function:
///
/// | word | the function |
/// |---|---|
/// | `change` | waits until the change is complete |
/// | `query` | waits for at most [`PATIENCE`](super::PATIENCE) |
/// | `send` | does not wait; fails if the shard has ended |
/// | `order` | does not wait; a shard that has ended has nothing to do |
/// | `call` | is not generated: another module has it |
macro_rules! calls {
    ($(
        $(#[$about:meta])*
        $kind:ident $name:ident: $Call:ident {
            $($(#[$note:meta])* $field:ident: $Type:ty),* $(,)?
        } $(-> $Answer:ty)?;
    )+) => {
        /// A call to a shard. A call with an answer is answered once.
        #[derive(Debug)]
        pub enum ShardCall {
            $(
                $(#[$about])*
                $Call {
                    $($(#[$note])* #[allow(missing_docs, reason = "the call's description names it")] $field: $Type,)*
                    $(
                        /// Receives the answer.
                        answer: Answer<$Answer>,
                    )?
                },
            )+
        }

        impl ShardHandle {
            $(calls! { @$kind $(#[$about])* $name $Call ($($field: $Type),*) $($Answer)? })+
        }
    };
    (@change $(#[$about:meta])* $name:ident $Call:ident ($($field:ident: $Type:ty),*) $Answer:ty) => {
        $(#[$about])*
        pub async fn $name(&self, $($field: $Type),*) -> Result<$Answer, ShardError> {
            self.ask(|answer| ShardCall::$Call { $($field,)* answer }).await
        }
    };
    (@query $(#[$about:meta])* $name:ident $Call:ident ($($field:ident: $Type:ty),*) $Answer:ty) => {
        $(#[$about])*
        pub async fn $name(&self, $($field: $Type),*) -> Result<$Answer, ShardError> {
            self.ask_in_time(|answer| ShardCall::$Call { $($field,)* answer }).await
        }
    };
    (@send $(#[$about:meta])* $name:ident $Call:ident ($($field:ident: $Type:ty),*)) => {
        $(#[$about])*
        pub fn $name(&self, $($field: $Type),*) -> Result<(), ShardError> {
            self.send(ShardCall::$Call { $($field),* })
        }
    };
    (@order $(#[$about:meta])* $name:ident $Call:ident ($($field:ident: $Type:ty),*)) => {
        $(#[$about])*
        pub fn $name(&self, $($field: $Type),*) {
            let _ = self.send(ShardCall::$Call { $($field),* });
        }
    };
    (@call $($row:tt)*) => {};
}

calls! {
    /// Has no effect. The answer shows that the shard's loop runs.
    call ping: Ping {} -> ();

    /// Opens a flash device for the caches of this shard.
    change add_device: AddDevice {
        id: DeviceId,
        /// The flash device and its segments.
        device: Box<FlashDevice>,
    } -> ();

    /// Closes a flash device that no cache of this shard uses any more.
    change remove_device: RemoveDevice { id: DeviceId } -> ();

    /// Fails all I/O to a flash device on another host, including I/O in flight, and does not trust
    /// its content any more.
    order give_up_device: GiveUpDevice { id: DeviceId };

    /// Adds a disk. The shard answers the call when the disk accepts requests.
    call add_disk: AddDisk {
        id: DiskId,
        /// Size and other properties of the disk.
        config: DiskConfig,
        backing: Backing,
        /// Mark that records unflushed changes of a backing which loses these changes if the
        /// process is killed.
        mark: Option<UnflushedMark>,
    } -> ();

    /// Fails the next flush of this many guests once, because acknowledged writes may have been
    /// lost before the disk was opened.
    send owe_failures: OweFailures { id: DiskId, count: u32 };

    /// Closes a disk's connections and its backing. A persistent cache is closed and keeps its
    /// segments. Returns the resources of the disk when its last request has been answered.
    change remove_disk: RemoveDisk { id: DiskId } -> Gone;

    /// Serves a disk under this lease of the host in etcd from now on. The shard applies the lease
    /// before all later calls (docs/decisions/0019).
    send set_lease: SetLease { id: DiskId, clock: Arc<LeaseClock> };

    /// Fails all requests of a disk that another host owns.
    order lose: Lose { id: DiskId };

    /// Lets another disk of this shard serve reads of a clone's parent. With `None`, the clone's
    /// own backing serves these reads again.
    order link_parent: LinkParent {
        id: DiskId,
        /// The parent's disk.
        parent: Option<DiskId>,
    };

    /// Ends a [check](super::ShardEvent::ParentUnchecked) of the files of a parent's disk, because
    /// they are unchanged. The clones of the parent read shared data from its disk again, unless a
    /// later check is required.
    order parent_checked: ParentChecked {
        id: DiskId,
        /// Number of the check.
        check: u64,
    };

    /// Changes a disk's cache, or grows the disk to the size of its backing. Returns the segments
    /// that the cache no longer uses, when the change is complete.
    call change_cache: ChangeCache {
        id: DiskId,
        change: CacheChange,
        /// Memory for the crash log of a new journal ring.
        crash_log: Option<Box<dyn SurvivingMemory>>,
    } -> Vec<Segment>;

    /// Replaces or removes the RAM tier of a disk's cache. Returns the memory of the previous RAM
    /// tier, if there was one.
    change set_memory: SetMemory {
        id: DiskId,
        /// Settings and memory of the RAM tier.
        memory: Option<(MemoryConfig, Area)>,
    } -> Option<Area>;

    /// Fails immediately all requests that are waiting for a disk's backing.
    order expire_requests: ExpireRequests { id: DiskId };

    /// Closes a disk's connections, refuses new requests and stops using its backing. Requests that
    /// the backing does not complete within a second are abandoned. The caller removes the disk
    /// next.
    order abandon: Abandon { id: DiskId };

    /// Abandons the backing of a disk that is being removed, because the backing does not answer.
    /// Has no effect while acknowledged changes are only on the backing and no flush covers them,
    /// unless a flush has failed since.
    order stop_waiting: StopWaiting { id: DiskId };

    /// Changes how long requests wait for a disk's backing.
    order set_wait_max: SetWaitMax { id: DiskId, wait_max: Duration };

    /// Sets the size of a full stripe of a disk's backing, bytes; 0 if it is unknown.
    order set_stripe: SetStripe { id: DiskId, bytes: u32 };

    /// Sets the shares, the reservations and the limits of a disk's I/O.
    change set_qos: SetQos { id: DiskId, qos: DiskQos } -> ();

    /// Sets how the I/O in flight of a datastore or flash device is limited.
    order control: Control { resource: Resource, control: Control };

    /// Returns the use of a datastore or flash device by this shard.
    query resource: Resource { resource: Resource } -> ResourceState;

    /// Returns the shard's report about a resource, for the hosts that share it; `None` if the
    /// resource is not shared.
    query report_on: ReportOn {
        resource: Resource,
        /// Rate per share on which the hosts agreed last.
        level: Option<f64>,
    } -> Option<Report>;

    /// Sets the shard's part of a resource that several hosts share.
    order take_part: TakePart {
        resource: Resource,
        /// Number of I/Os that the shard may have in flight.
        in_flight: f64,
    };

    /// Changes a disk's dirty bitmaps.
    change change_bitmaps: ChangeBitmaps { id: DiskId, change: BitmapChange } -> ();

    /// Returns the counters of a disk's dirty bitmaps.
    query bitmaps: Bitmaps {
        id: DiskId,
        /// Name of a bitmap whose whole content is returned.
        whole: Option<String>,
    } -> Noted;

    /// Returns a disk's statistics.
    query stats: Stats { id: DiskId } -> Box<DiskStats>;

    /// Returns the statistics of disks, in the order of `ids`; `None` for a disk that does not
    /// exist.
    query stats_of: StatsOf { ids: Vec<DiskId> } -> Vec<Option<Box<DiskStats>>>;

    /// Returns the number of checksum mismatches of each disk, in the order of `ids`; `None` for a
    /// disk that does not exist.
    query checksum_mismatches: ChecksumMismatches { ids: Vec<DiskId> } -> Vec<Option<u64>>;

    /// Returns the histograms of a disk's requests, and the current time.
    query histograms: Histograms { id: DiskId } -> (Instant, Box<Histograms>);

    /// Returns predicted hit ratios of other cache sizes for a disk.
    query sizing: Sizing { id: DiskId } -> Box<Sizing>;

    /// Returns the counts of disks for the division of their pool, in the order of `asked`; `None`
    /// for a disk that does not exist.
    query disk_counts: DiskCounts { asked: Vec<CountsAsked> } -> Vec<Option<DiskCounts>>;

    /// Returns the flash writes of each disk's cache; `None` for a disk that does not exist.
    query flash_counts: FlashCounts { ids: Vec<DiskId> } -> Vec<Option<Counts>>;

    /// Sets the parts of flash write budgets that caches have from now on.
    order allow_flash_writes: AllowFlashWrites { allowances: Vec<(DiskId, Option<Allowance>)> };

    /// Returns the number of NBD and vhost-user clients of a disk. A mounted file counts as one
    /// client while it is served, because hob does not know the file's users.
    query users: Users { id: DiskId } -> u64;

    /// Returns the process ids of a disk's NBD clients on Unix sockets, as this process sees them.
    /// Clients over TCP or TLS, and clients outside the process's namespace, are left out.
    query client_pids: ClientPids { id: DiskId } -> Vec<u32>;

    /// Resets a statistic of a disk.
    query reset: Reset { id: DiskId, counter: Counter } -> ();

    /// Returns the counters of the flash devices that the shard has open. The answer also shows
    /// that the shard's loop runs.
    call devices: Devices {} -> Vec<(DeviceId, DeviceCounts)>;

    /// Returns the regions of a disk that were written while its cache recovers; `None` without a
    /// recovery.
    change changed_meanwhile: ChangedMeanwhile { id: DiskId } -> Option<Box<Regions>>;

    /// Starts to record a disk's requests, with this recorder instead of an earlier one.
    query record: Record { id: DiskId, recorder: Recorder } -> ();

    /// Drops a disk's recorder if no client reads it.
    order end_recording: EndRecording { id: DiskId };

    /// Serves an NBD client that has completed the negotiation.
    call attach: Attach {
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
    };

    /// Serves a disk through a file that the kernel has mounted.
    send attach_file: AttachFile {
        id: DiskId,
        /// The non-blocking FUSE connection.
        device: OwnedFd,
        /// Attributes of the file.
        file: Attributes,
        rights: FileRights,
    };

    /// Passes on a call of a vhost-user session. The answer is sent through the call's own channel.
    send vhost_user: VhostUser { call: VhostUserCall };

    /// Passes on a call about a migrating disk. The answer is sent through the call's own channel.
    call transfer: Transfer { id: DiskId, call: TransferCall };

    /// Closes the NBD connections to an export that was removed.
    order close_export: CloseExport {
        id: DiskId,
        /// Name of the export.
        export: String,
    };

    /// Quiesces the shard until [`ShardHandle::resume`]: it accepts no new request, and answers all
    /// accepted ones.
    change rest: Rest {} -> ();

    /// Ends the quiesced state, so that the shard accepts requests again.
    order resume: Resume {};

    /// Hands over the quiesced connections. The shard keeps connections that are busy or that
    /// cannot be handed over.
    query hand_over: HandOver {} -> AtRest;

    /// Stops the shard: it closes every connection, finishes requests in flight, and closes all
    /// devices and backings.
    query stop: Stop {} -> ();
}
