//! The control thread's handle of a shard. Most functions that send a call come from the table in
//! `calls.rs`. This file has the functions that do more than send their arguments.

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use hob_engine::command::{CacheChange, DiskConfig, Segment};
use hob_engine::io::Promote;
use hob_engine::units::{DeviceId, DiskId};
use hob_nbd::server::handshake::Negotiated;
use tokio::sync::oneshot;

use super::surviving::SurvivingFiles;
use super::{Answer, ConnectionPermit, ShardCall, ShardError, Transport};
use hob_storage::backing::Backing;
use hob_storage::flash::DeviceCounts;

/// Maximum time a caller waits for a shard's answer.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Number of equal time slices of a wait; see [`in_time`].
const TURNS: u32 = 40;

/// Returns the result of `work`, or `None` if `work` is not complete after `limit`. The limit is
/// divided into time slices. A pause of this process (SIGSTOP, a suspended VM, a host without a
/// free processor) uses up only one time slice, so that an answer can still arrive after the pause.
pub async fn in_time<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    let mut work = std::pin::pin!(work);
    for _ in 0..TURNS {
        if let Ok(result) = tokio::time::timeout(limit / TURNS, work.as_mut()).await {
            return Some(result);
        }
    }
    None
}

/// Sends calls to one shard. Cheap to clone.
#[derive(Clone)]
pub struct ShardHandle {
    calls: mpsc::Sender<ShardCall>,
    wake: Arc<dyn Fn() + Send + Sync>,
    surviving: SurvivingFiles,
}

impl ShardHandle {
    /// Creates a handle, and the receiver from which the shard gets the calls. `wake` wakes the
    /// shard's thread if it sleeps.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> (ShardHandle, mpsc::Receiver<ShardCall>) {
        let (calls, receiver) = mpsc::channel();
        (ShardHandle { calls, wake: Arc::new(wake), surviving: SurvivingFiles::default() }, receiver)
    }

    /// Sends a call without effect, and returns the receiver of its answer. The answer shows that
    /// the shard's loop ran after this call.
    pub fn ping(&self) -> Result<oneshot::Receiver<Result<(), ShardError>>, ShardError> {
        let (answer, receiver) = oneshot::channel();
        self.send(ShardCall::Ping { answer })?;
        Ok(receiver)
    }

    /// Returns true if the shard answers a call within `wait_max`, and so its loop runs.
    pub async fn responds(&self, wait_max: Duration) -> bool {
        let Ok(answer) = self.ping() else { return false };
        matches!(tokio::time::timeout(wait_max, answer).await, Ok(Ok(Ok(()))))
    }

    /// Adds a disk. Returns when the disk accepts requests.
    pub async fn add_disk(&self, id: DiskId, config: DiskConfig, backing: Backing) -> Result<(), ShardError> {
        let mark = self.surviving.create_mark(id, backing.memory_id().as_ref());
        self.ask(|answer| ShardCall::AddDisk { id, config, backing, mark, answer }).await
    }

    /// Changes a disk's cache. Returns the segments that the cache no longer uses.
    pub async fn change_cache(&self, id: DiskId, change: CacheChange) -> Result<Vec<Segment>, ShardError> {
        let crash_log = change.ring().and_then(|ring| self.surviving.open_crash_log(id, &ring.cache));
        let removes_cache = matches!(change, CacheChange::Disable);
        let changed = self.ask(|answer| ShardCall::ChangeCache { id, change, crash_log, answer }).await;
        if removes_cache && changed.is_ok() {
            self.remove_ended_crash_log(id);
        }
        changed
    }

    /// Removes the crash log of a disk whose cache was closed or removed. If a cache was closed
    /// without the mark of a clean close, its crash log must stay until the saved state says that
    /// the next start needs no crash log. If the process is killed before that, the next start
    /// expects to find the crash log.
    pub fn remove_ended_crash_log(&self, id: DiskId) {
        self.surviving.remove_ended_crash_log(id);
    }

    /// Returns the counters of the shard's flash devices, or `None` if the shard does not answer
    /// within `patience`.
    pub async fn devices(&self, patience: Duration) -> Option<Vec<(DeviceId, DeviceCounts)>> {
        let question = self.ask(|answer| ShardCall::Devices { answer });
        tokio::time::timeout(patience, question).await.ok()?.ok()
    }

    /// Passes a negotiated NBD client to the shard.
    pub fn attach(
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

    /// Returns why the crash log of a disk's persistent cache does not work; `None` if it works.
    pub fn crash_log_problem(&self, id: DiskId) -> Option<String> {
        self.surviving.crash_log_problem(id)
    }

    /// Returns why hob cannot mark the unflushed changes of a disk; `None` if it can, or if the
    /// backing needs no mark.
    pub fn mark_problem(&self, id: DiskId) -> Option<String> {
        self.surviving.mark_problem(id)
    }

    /// Returns true if both handles belong to the same shard.
    pub fn is_same(&self, other: &ShardHandle) -> bool {
        Arc::ptr_eq(&self.wake, &other.wake)
    }

    /// Sends a call and returns its answer. Fails if the shard does not answer within [`PATIENCE`].
    pub(super) async fn ask_in_time<T>(
        &self,
        call: impl FnOnce(Answer<T>) -> ShardCall,
    ) -> Result<T, ShardError> {
        in_time(PATIENCE, self.ask(call)).await.unwrap_or(Err(ShardError::Busy))
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
