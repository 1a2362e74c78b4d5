//! The control thread's end: a function for each call. Changes wait for their end, questions for [`PATIENCE`].

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use hob_engine::command::{BitmapChange, CacheChange, DiskConfig, MemoryConfig, Segment};
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

use super::{Answer, AtRest, Counter, FileRights, Gone, Noted, ShardCall, ShardError};
use crate::daemon::hardware::{Area, Backing, DeviceCounts, FlashDevice};
use crate::daemon::nbd_listener::{ConnectionPermit, Transport};
use crate::daemon::request_recorder::Recorder;
use crate::daemon::shard::MachineCall;

/// How long anybody waits for a shard.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

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

    /// Asks the shard to answer. The answer shows that its loop ran after this call.
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

    /// Fails the next flush of `count` guests of a disk once.
    pub(crate) fn owe_failures(&self, id: DiskId, count: u32) -> Result<(), ShardError> {
        self.send(ShardCall::OweFailures { id, count })
    }

    /// Stops serving a disk. A persistent cache is closed and keeps its segments.
    pub(crate) async fn remove_disk(&self, id: DiskId) -> Result<Gone, ShardError> {
        self.ask(|answer| ShardCall::RemoveDisk { id, answer }).await
    }

    /// Fails whatever is asked of a device on another host from now on, and was before.
    pub(crate) fn give_up_device(&self, id: DeviceId) {
        // A shard that is gone asks for nothing.
        let _ = self.send(ShardCall::GiveUpDevice { id });
    }

    /// Changes a disk's cache; gives back the segments that it does not use any more.
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

    /// Changes how long requests wait for a disk's backing.
    pub(crate) fn set_wait_max(&self, id: DiskId, wait_max: Duration) {
        // A shard that is gone waits for nothing.
        let _ = self.send(ShardCall::SetWaitMax { id, wait_max });
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
        self.ask_in_time(|answer| ShardCall::Resource { resource, answer }).await
    }

    /// What it says of a resource to those that share it.
    pub(crate) async fn report_on(
        &self,
        resource: Resource,
        level: Option<f64>,
    ) -> Result<Option<Report>, ShardError> {
        self.ask_in_time(|answer| ShardCall::ReportOn { resource, level, answer }).await
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
        self.ask_in_time(|answer| ShardCall::Bitmaps { id, whole, answer }).await
    }

    /// A disk's figures.
    pub(crate) async fn stats(&self, id: DiskId) -> Result<Box<DiskStats>, ShardError> {
        self.ask_in_time(|answer| ShardCall::Stats { id, answer }).await
    }

    /// What a disk was asked for, and the time.
    pub(crate) async fn histograms(&self, id: DiskId) -> Result<(Instant, Box<Histograms>), ShardError> {
        self.ask_in_time(|answer| ShardCall::Histograms { id, answer }).await
    }

    /// What caches of other sizes would do for a disk.
    pub(crate) async fn sizing(&self, id: DiskId) -> Result<Box<Sizing>, ShardError> {
        self.ask_in_time(|answer| ShardCall::Sizing { id, answer }).await
    }

    /// How many clients and machines use a disk. Files count when they are open for requests, which nobody here knows.
    pub(crate) async fn users(&self, id: DiskId) -> Result<u64, ShardError> {
        self.ask_in_time(|answer| ShardCall::Users { id, answer }).await
    }

    /// Begins to count anew.
    pub(crate) async fn reset(&self, id: DiskId, counter: Counter) -> Result<(), ShardError> {
        self.ask_in_time(|answer| ShardCall::Reset { id, counter, answer }).await
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
        self.ask_in_time(|answer| ShardCall::Record { id, recorder, answer }).await
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
        self.ask_in_time(|answer| ShardCall::HandOver { answer }).await
    }

    /// Ends the shard, waiting for at most [`PATIENCE`].
    pub(crate) async fn stop(&self) -> Result<(), ShardError> {
        self.ask_in_time(|answer| ShardCall::Stop { answer }).await
    }

    /// Is it a handle of the same shard?
    pub(crate) fn is_same(&self, other: &ShardHandle) -> bool {
        Arc::ptr_eq(&self.wake, &other.wake)
    }

    /// Gives up after [`PATIENCE`].
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
