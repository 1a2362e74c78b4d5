//! The control thread's interface to a shard: one function per call. Changes wait until they are
//! complete, queries for at most [`PATIENCE`].

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use hob_engine::command::{BitmapChange, CacheChange, DiskConfig, MemoryConfig, Segment};
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
use hob_storage::crash_log::{CrashLogFile, DIRECTORY_VARIABLE};
use hob_storage::unflushed_mark::UnflushedMark;
use tokio::sync::oneshot;

use super::{Answer, AtRest, Counter, CountsAsked, FileRights, Gone, Noted, ShardCall, ShardError};
use crate::hardware::{Area, Backing, DeviceCounts, FlashDevice};
use crate::nbd_listener::{ConnectionPermit, Transport};
use crate::request_recorder::Recorder;
use crate::shard::VhostUserCall;

/// Maximum time a caller waits for a shard's answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Sends calls to one shard. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ShardHandle {
    calls: mpsc::Sender<ShardCall>,
    wake: Arc<dyn Fn() + Send + Sync>,
}

/// Opens the crash log of a cache. The log is on a tmpfs, so opening it does not wait for a device.
fn open_crash_log(cache: &[u8; 16]) -> Option<Box<dyn SurvivingMemory>> {
    if cfg!(test) {
        // Unit tests make no crash logs, because nothing would remove the files.
        return None;
    }
    match CrashLogFile::open(cache) {
        Ok(log) => Some(Box::new(log)),
        Err(error) => {
            tracing::warn!(
                "if hob is killed, a write-back cache loses unflushed writes, because there is no memory for \
                 its crash log: {error}; free space in /dev/shm, or set {DIRECTORY_VARIABLE}"
            );
            None
        }
    }
}

/// Creates the mark of a backing that loses unflushed changes if the process is killed. The mark is
/// on a tmpfs, so creating it does not wait for a device.
fn create_mark(backing: &[u8; 16]) -> Option<UnflushedMark> {
    if cfg!(test) {
        return None;
    }
    UnflushedMark::create(backing)
        .inspect_err(|error| {
            tracing::warn!(
                "if hob is killed, it cannot report lost writes to guests: {error}; free space in /dev/shm, \
                 or set {DIRECTORY_VARIABLE}"
            );
        })
        .ok()
}

impl ShardHandle {
    /// Makes a handle, and the receiver of the shard. `wake` wakes a sleeping shard.
    pub(crate) fn new(wake: impl Fn() + Send + Sync + 'static) -> (ShardHandle, mpsc::Receiver<ShardCall>) {
        let (calls, receiver) = mpsc::channel();
        (ShardHandle { calls, wake: Arc::new(wake) }, receiver)
    }

    /// Asks the shard to answer. The answer shows that the shard's loop ran after this call.
    pub(crate) fn ping(&self) -> Result<oneshot::Receiver<Result<(), ShardError>>, ShardError> {
        let (answer, receiver) = oneshot::channel();
        self.send(ShardCall::Ping { answer })?;
        Ok(receiver)
    }

    /// Returns whether the shard's loop runs, after at most `wait_max`.
    pub(crate) async fn responds(&self, wait_max: Duration) -> bool {
        let Ok(answer) = self.ping() else { return false };
        matches!(tokio::time::timeout(wait_max, answer).await, Ok(Ok(Ok(()))))
    }

    pub(crate) async fn add_device(&self, id: DeviceId, device: FlashDevice) -> Result<(), ShardError> {
        self.ask(|answer| ShardCall::AddDevice { id, device: Box::new(device), answer }).await
    }

    /// Closes a flash device that no cache uses.
    pub(crate) async fn remove_device(&self, id: DeviceId) -> Result<(), ShardError> {
        self.ask(|answer| ShardCall::RemoveDevice { id, answer }).await
    }

    pub(crate) async fn add_disk(
        &self,
        id: DiskId,
        config: DiskConfig,
        backing: Backing,
    ) -> Result<(), ShardError> {
        let mark = backing.memory_id().and_then(|backing| create_mark(&backing));
        self.ask(|answer| ShardCall::AddDisk { id, config, backing, mark, answer }).await
    }

    /// Fails the next flush of `count` guests of a disk once.
    pub(crate) fn owe_failures(&self, id: DiskId, count: u32) -> Result<(), ShardError> {
        self.send(ShardCall::OweFailures { id, count })
    }

    /// Stops serving a disk. A persistent cache is closed and keeps its segments.
    pub(crate) async fn remove_disk(&self, id: DiskId) -> Result<Gone, ShardError> {
        self.ask(|answer| ShardCall::RemoveDisk { id, answer }).await
    }

    /// Fails all I/O to a flash device on another host, including I/O in flight.
    pub(crate) fn give_up_device(&self, id: DeviceId) {
        // A shard that has ended has no I/O.
        let _ = self.send(ShardCall::GiveUpDevice { id });
    }

    /// Changes a disk's cache. Returns the segments that the cache no longer uses.
    pub(crate) async fn change_cache(
        &self,
        id: DiskId,
        change: CacheChange,
    ) -> Result<Vec<Segment>, ShardError> {
        let crash_log = change.ring().and_then(|ring| open_crash_log(&ring.cache));
        self.ask(|answer| ShardCall::ChangeCache { id, change, crash_log, answer }).await
    }

    /// Sets or removes the RAM tier of a disk's cache. Returns its previous memory.
    pub(crate) async fn set_memory(
        &self,
        id: DiskId,
        memory: Option<(MemoryConfig, Area)>,
    ) -> Result<Option<Area>, ShardError> {
        self.ask(|answer| ShardCall::SetMemory { id, memory, answer }).await
    }

    /// Sets or removes the disk that serves a clone's reads of its parent.
    pub(crate) fn link_parent(&self, id: DiskId, parent: Option<DiskId>) {
        // A shard that has ended serves no disk.
        let _ = self.send(ShardCall::LinkParent { id, parent });
    }

    /// Changes how long requests wait for a disk's backing.
    pub(crate) fn set_wait_max(&self, id: DiskId, wait_max: Duration) {
        // A shard that has ended has no requests.
        let _ = self.send(ShardCall::SetWaitMax { id, wait_max });
    }

    pub(crate) async fn set_qos(&self, id: DiskId, qos: DiskQos) -> Result<(), ShardError> {
        self.ask(|answer| ShardCall::SetQos { id, qos, answer }).await
    }

    /// Sets or removes the throttle of a resource.
    pub(crate) fn control(&self, resource: Resource, control: Control) {
        // A shard that has ended throttles nothing.
        let _ = self.send(ShardCall::Control { resource, control });
    }

    /// Returns the load and the state of a resource.
    pub(crate) async fn resource(&self, resource: Resource) -> Result<ResourceState, ShardError> {
        self.ask_in_time(|answer| ShardCall::Resource { resource, answer }).await
    }

    /// Returns the shard's report about a resource, for the hosts that share it.
    pub(crate) async fn report_on(
        &self,
        resource: Resource,
        level: Option<f64>,
    ) -> Result<Option<Report>, ShardError> {
        self.ask_in_time(|answer| ShardCall::ReportOn { resource, level, answer }).await
    }

    /// Sets the shard's part of a shared resource.
    pub(crate) fn take_part(&self, resource: Resource, in_flight: f64) {
        // A shard that has ended uses no resource.
        let _ = self.send(ShardCall::TakePart { resource, in_flight });
    }

    pub(crate) async fn change_bitmaps(&self, id: DiskId, change: BitmapChange) -> Result<(), ShardError> {
        self.ask(|answer| ShardCall::ChangeBitmaps { id, change, answer }).await
    }

    /// Returns the counters of a disk's bitmaps, and the whole content of the bitmap `whole`.
    pub(crate) async fn bitmaps(&self, id: DiskId, whole: Option<String>) -> Result<Noted, ShardError> {
        self.ask_in_time(|answer| ShardCall::Bitmaps { id, whole, answer }).await
    }

    pub(crate) async fn stats(&self, id: DiskId) -> Result<Box<DiskStats>, ShardError> {
        self.ask_in_time(|answer| ShardCall::Stats { id, answer }).await
    }

    /// Returns the histograms of a disk's requests, and the current time.
    pub(crate) async fn histograms(&self, id: DiskId) -> Result<(Instant, Box<Histograms>), ShardError> {
        self.ask_in_time(|answer| ShardCall::Histograms { id, answer }).await
    }

    /// Returns predicted hit ratios of other cache sizes for a disk.
    pub(crate) async fn sizing(&self, id: DiskId) -> Result<Box<Sizing>, ShardError> {
        self.ask_in_time(|answer| ShardCall::Sizing { id, answer }).await
    }

    /// Returns the counts of disks for the division of their pool, in the order of `asked`; `None`
    /// for a disk that does not exist.
    pub(crate) async fn disk_counts(
        &self,
        asked: Vec<CountsAsked>,
    ) -> Result<Vec<Option<DiskCounts>>, ShardError> {
        self.ask_in_time(|answer| ShardCall::DiskCounts { asked, answer }).await
    }

    /// Returns the number of NBD and vhost-user clients of a disk. A mounted file counts as one
    /// while it is served, because its users are unknown.
    pub(crate) async fn users(&self, id: DiskId) -> Result<u64, ShardError> {
        self.ask_in_time(|answer| ShardCall::Users { id, answer }).await
    }

    pub(crate) async fn reset(&self, id: DiskId, counter: Counter) -> Result<(), ShardError> {
        self.ask_in_time(|answer| ShardCall::Reset { id, counter, answer }).await
    }

    /// Returns the counters of the shard's flash devices, or `None` after `patience`.
    pub(crate) async fn devices(&self, patience: Duration) -> Option<Vec<(DeviceId, DeviceCounts)>> {
        let question = self.ask(|answer| ShardCall::Devices { answer });
        tokio::time::timeout(patience, question).await.ok()?.ok()
    }

    /// Returns the regions of a disk that were written while its cache recovers.
    pub(crate) async fn changed_meanwhile(&self, id: DiskId) -> Result<Option<Box<Regions>>, ShardError> {
        self.ask(|answer| ShardCall::ChangedMeanwhile { id, answer }).await
    }

    /// Starts to record a disk's requests.
    pub(crate) async fn record(&self, id: DiskId, recorder: Recorder) -> Result<(), ShardError> {
        self.ask_in_time(|answer| ShardCall::Record { id, recorder, answer }).await
    }

    /// Drops a disk's recorder after its reader has ended.
    pub(crate) fn end_recording(&self, id: DiskId) {
        // A shard that has ended records nothing.
        let _ = self.send(ShardCall::EndRecording { id });
    }

    /// Passes a negotiated NBD client to the shard.
    pub(crate) fn attach(
        &self,
        id: DiskId,
        socket: OwnedFd,
        negotiated: Negotiated,
        leftover: Vec<u8>,
        promote: Promote,
        (transport, permit): (Transport, ConnectionPermit),
    ) -> Result<(), ShardError> {
        self.send(ShardCall::Attach {
            id,
            socket,
            negotiated: Box::new(negotiated),
            leftover,
            promote,
            transport,
            permit,
        })
    }

    /// Passes a file that the kernel has mounted to the shard.
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
        // A shard that has ended has no connections.
        let _ = self.send(ShardCall::CloseExport { id, export });
    }

    /// Passes a call of a vhost-user session to the shard. The answer is sent through the call's
    /// own channel.
    pub(crate) fn vhost_user(&self, call: VhostUserCall) -> Result<(), ShardError> {
        self.send(ShardCall::VhostUser(call))
    }

    /// Quiesces the shard until [`ShardHandle::resume`]: answers every request and accepts no new
    /// one.
    pub(crate) async fn rest(&self) -> Result<(), ShardError> {
        self.ask(|answer| ShardCall::Rest { answer }).await
    }

    pub(crate) fn resume(&self) {
        // A shard that has ended accepts no request.
        let _ = self.send(ShardCall::Resume);
    }

    /// Takes over the connections of a quiesced shard.
    pub(crate) async fn hand_over(&self) -> Result<AtRest, ShardError> {
        self.ask_in_time(|answer| ShardCall::HandOver { answer }).await
    }

    /// Ends the shard, waiting for at most [`PATIENCE`].
    pub(crate) async fn stop(&self) -> Result<(), ShardError> {
        self.ask_in_time(|answer| ShardCall::Stop { answer }).await
    }

    /// Returns true if both handles belong to the same shard.
    pub(crate) fn is_same(&self, other: &ShardHandle) -> bool {
        Arc::ptr_eq(&self.wake, &other.wake)
    }

    /// Sends a call, and fails if it is not answered within [`PATIENCE`].
    async fn ask_in_time<T>(&self, call: impl FnOnce(Answer<T>) -> ShardCall) -> Result<T, ShardError> {
        tokio::time::timeout(PATIENCE, self.ask(call)).await.unwrap_or(Err(ShardError::Busy))
    }

    pub(super) async fn ask<T>(&self, call: impl FnOnce(Answer<T>) -> ShardCall) -> Result<T, ShardError> {
        let (answer, receiver) = oneshot::channel();
        self.send(call(answer))?;
        receiver.await.unwrap_or(Err(ShardError::Gone))
    }

    pub(super) fn send(&self, call: ShardCall) -> Result<(), ShardError> {
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
