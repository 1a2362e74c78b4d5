//! A disk stored as objects of one size in an object store, such as S3, or in a directory.
//!
//! [Decision 0018](../../../../../docs/decisions/0018-objects.md) has the reasons, and
//! docs/FORMAT.md has the format. Objects are never overwritten. Each flush creates a manifest. The
//! file mod.rs connects the shard with the thread that uses the object store (`worker.rs`).
//!
//! # Durability
//! Writes are collected in memory. A flush writes them to the object store, and completes when its
//! manifest is durable. A durable write is a write and a flush. Unflushed data is lost if the
//! process is killed; the [mark](crate::unflushed_mark) of the disk then fails each guest's next
//! flush.
//!
//! # Writers
//! A disk has one owner. If another owner takes the disk, the former owner detects it at the next
//! flush, or within seconds. Then [`Driver::is_lost`] is true.

mod commit;
mod disk;
mod format;
mod layer;
mod location;
mod map;
mod opening;
mod outage;
mod owner;
mod store;
mod sweep;
#[cfg(test)]
mod tests;
mod worker;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use bytes::Bytes;
use hob_engine::command::Access;
use hob_engine::io::{BufferSlice, Io, IoError, IoOp, Zeroing};
use hob_engine::units::{Instant, IoId};
use tokio::sync::mpsc::UnboundedSender;

use super::evidence::{ChangeDetector, ChangeToken};
use super::{BackingInfo, BackingOptions, ChangeMark, Driver, OpenError, Reader, Status};
use crate::pool::Uuid;
use crate::ring::{Completion, Fd, FdClass, Ring};
use crate::token::TokenSpace;
use disk::Kept;
use format::{Manifest, Shape};
use location::Directory;
pub use location::{OpenCloud, install_clouds};
use opening::Trouble;
use outage::StoreOutage;
use store::RetryingStore;
use worker::{CLOSE_MAX, Ended, Job, What, Worker};

/// Default size of objects, bytes.
pub const OBJECT_BYTES_DEFAULT: u64 = 4 << 20;

/// Longest wait of a synchronous read.
const READ_MAX: Duration = Duration::from_secs(60);

/// Properties of a disk in an object store, from its newest manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectDisk {
    /// Unique id of the disk.
    pub uuid: Uuid,
    /// Size of the disk, bytes.
    pub size_bytes: u64,
    /// Size of each object, bytes.
    pub object_bytes: u64,
    /// Number of the newest manifest.
    pub manifest: u64,
    /// Number of times that a writer has taken the disk.
    pub epoch: u64,
    /// The owner that has the disk open or did not close it, for users.
    pub owner: Option<String>,
    /// Number of existing objects. Each object takes at most `object_bytes`. `None` from
    /// [`check_unlock`] and [`unlock`], which do not count them.
    pub objects: Option<u64>,
}

impl ObjectDisk {
    fn of(manifest: &Manifest, objects: Option<u64>) -> ObjectDisk {
        let Shape { uuid, size_bytes, object_bytes } = manifest.shape;
        let owner = (!manifest.closed).then(|| manifest.owner.to_string());
        let (manifest, epoch) = (manifest.sequence, manifest.epoch);
        ObjectDisk { uuid, size_bytes, object_bytes, manifest, epoch, owner, objects }
    }
}

/// Returns true if `spec` names a disk in an object store.
pub fn recognise(spec: &str) -> bool {
    location::recognise(spec)
}

/// Creates a disk of zeroes. May take seconds.
///
/// # Errors
/// Returns an [`OpenError`], which is `Unfit` if the disk exists already.
pub fn create(
    spec: &str,
    size_bytes: u64,
    object_bytes: u64,
    options: &BackingOptions,
) -> Result<ObjectDisk, OpenError> {
    let mut uuid = [0; 16];
    rustix::rand::getrandom(&mut uuid, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| OpenError::System { path: "random numbers".into(), source: errno.into() })?;
    let shape = Shape { uuid: Uuid(uuid), size_bytes, object_bytes };
    shape.check().map_err(|reason| OpenError::Spec { spec: spec.to_owned(), reason })?;
    let made = converse(spec, Directory::Make, options, async |store| opening::create(&store, shape).await);
    made.map(|manifest| ObjectDisk::of(&manifest, Some(0)))
}

/// Returns the properties of a disk in an object store.
pub fn show(spec: &str, options: &BackingOptions) -> Result<ObjectDisk, OpenError> {
    converse(spec, Directory::Exists, options, async |store| opening::look(&store).await)
        .map(|(manifest, present)| ObjectDisk::of(&manifest, Some(present)))
}

/// Returns the properties of a disk that [`unlock`] would release; they include its owner. Changes
/// nothing.
///
/// # Errors
/// Returns the same errors as [`unlock`].
pub fn check_unlock(spec: &str, options: &BackingOptions) -> Result<ObjectDisk, OpenError> {
    converse(spec, Directory::Exists, options, async |store| opening::check_unlock(&store).await)
        .map(|manifest| ObjectDisk::of(&manifest, None))
}

/// Releases a disk from an owner that did not close it, so that it can be opened again. If that
/// owner still runs, it is fenced. Returns the properties that the disk had before it was unlocked;
/// they include the old owner.
///
/// # Errors
/// Returns an [`OpenError`], which is `Unfit` if no owner has the disk, and `InUse` if the owner is
/// a running process of this host.
pub fn unlock(spec: &str, options: &BackingOptions) -> Result<ObjectDisk, OpenError> {
    converse(spec, Directory::Exists, options, async |store| opening::unlock(&store).await)
        .map(|manifest| ObjectDisk::of(&manifest, None))
}

/// Waits, at most 15 seconds, until all object disks that this process released are closed in their
/// stores. Call it before the process exits. Other hosts cannot open an unclosed disk until it is
/// unlocked.
pub fn await_closed() {
    owner::await_leaving(CLOSE_MAX);
}

/// Runs `work` with an object store on a new thread, and waits for the result.
fn converse<T: Send>(
    spec: &str,
    directory: Directory,
    options: &BackingOptions,
    talk: impl AsyncFnOnce(Arc<RetryingStore>) -> Result<T, Trouble> + Send,
) -> Result<T, OpenError> {
    let place = location::find(spec, directory)
        .map_err(|reason| OpenError::Spec { spec: spec.to_owned(), reason })?;
    let talk = move || {
        let runtime = worker::runtime().map_err(|error| Trouble::Store(error.to_string()))?;
        let store = Arc::new(RetryingStore::new(Box::new(place), options.connect_max));
        let result = runtime.block_on(talk(store));
        runtime.shutdown_background();
        result
    };
    let result = std::thread::scope(|scope| scope.spawn(talk).join().expect("nothing panics"));
    result.map_err(|trouble| refuse(spec, trouble))
}

fn refuse(spec: &str, trouble: Trouble) -> OpenError {
    match trouble {
        Trouble::InUse(owner) => OpenError::Unfit {
            what: spec.to_owned(),
            reason: format!("the disk is in use: {owner}. A disk can have only one writer"),
        },
        Trouble::Unfit(reason) => OpenError::Unfit { what: spec.to_owned(), reason },
        Trouble::Store(reason) => OpenError::Connect { peer: spec.to_owned(), reason },
    }
}

/// Takes the disk for writing, or opens its present content read-only.
pub(super) fn open(
    spec: &str,
    access: Access,
    options: &BackingOptions,
) -> Result<Box<dyn Driver>, OpenError> {
    let place = location::find(spec, Directory::Exists)
        .map_err(|reason| OpenError::Spec { spec: spec.to_owned(), reason })?;
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
        .map_err(|errno| OpenError::System { path: "eventfd".into(), source: errno.into() })?;
    let event = Arc::new(event);
    let write = access == Access::ReadWrite;
    let store = RetryingStore::new(Box::new(place), options.connect_max)
        .reporting(StoreOutage::new(spec, options.monitor.clone()));
    let worker =
        Worker::start(store, write, options, event.clone()).map_err(|trouble| refuse(spec, trouble))?;
    let Shape { uuid, size_bytes, object_bytes } = worker.disk.shape;
    let identity_text = format!("disk of objects {uuid}, {size_bytes} bytes");
    let info = BackingInfo {
        size_bytes,
        block_bytes: 512,
        block_bytes_min: 1,
        can_flush: true,
        can_discard: write,
        can_fast_zero: write,
        read_only: !write,
        description: format!("{spec}, objects of {} KiB", object_bytes >> 10),
        changed: mark(&worker),
        evidence: evidence(&worker),
        ..BackingInfo::identified(identity_text)
    };
    Ok(Box::new(Objects {
        wait_max: options.wait_max,
        info,
        worker,
        event,
        attached: None,
        reads: HashMap::new(),
        in_flight: 0,
        done: VecDeque::new(),
        statuses: VecDeque::new(),
    }))
}

/// Returns the change mark of the disk, with the number of the disk's content in place of a
/// modification time.
fn mark(worker: &Worker) -> Option<ChangeMark> {
    let content = worker.disk.mark()?;
    Some(ChangeMark { size_bytes: worker.disk.shape.size_bytes, modified_ns: content as i64 })
}

/// Returns a hash that shows whether the disk's content has changed: each manifest that changes the
/// content has a new number.
fn evidence(worker: &Worker) -> Option<ChangeToken> {
    worker.disk.mark().map(|content| ChangeToken::of(&format!("objects, content {content}")))
}

struct Attached {
    event: Fd,
    tokens: TokenSpace,
}

struct Objects {
    info: BackingInfo,
    /// Time that requests wait for the object store.
    wait_max: Duration,
    worker: Worker,
    event: Arc<OwnedFd>,
    attached: Option<Attached>,
    /// Buffer of each read in flight.
    reads: HashMap<IoId, BufferSlice>,
    /// Number of unanswered I/Os and queries of the allocation state of a range.
    in_flight: usize,
    done: VecDeque<(IoId, Result<(), IoError>)>,
    statuses: VecDeque<(u64, Status)>,
}

impl Objects {
    fn send(&mut self, job: Job) -> Result<(), IoError> {
        self.worker.jobs.send(job).map_err(|_| IoError::ShuttingDown)?;
        self.in_flight += 1;
        Ok(())
    }

    fn start(&mut self, ring: &Ring, io: &Io) -> Result<(), IoError> {
        let (offset, len) = (io.offset, io.len);
        if self.info.read_only && !matches!(io.op, IoOp::Read | IoOp::Flush) {
            return Err(IoError::ReadOnly);
        }
        let what = match io.op {
            IoOp::Read => What::Read(offset, len),
            IoOp::Write(durability) => {
                let slice = io.slice.expect("writes have data");
                let data = Bytes::copy_from_slice(ring.arena().slice(slice));
                What::Write(offset, data, durability)
            }
            IoOp::Flush => What::Flush,
            IoOp::Discard => What::Discard(offset, len),
            IoOp::WriteZeroes(zeroing) => {
                let keeps = matches!(zeroing, Zeroing::KeepAllocated | Zeroing::FastKeepAllocated);
                What::Zero(offset, len, if keeps { Kept::Yes } else { Kept::No })
            }
            IoOp::WriteJournal => unreachable!("journals are on flash"),
        };
        self.send(Job::Io(io.id, what))?;
        if let (IoOp::Read, Some(slice)) = (io.op, io.slice) {
            self.reads.insert(io.id, slice);
        }
        Ok(())
    }

    fn fetch(&mut self, ring: &mut Ring) {
        for ended in self.worker.completions.take() {
            self.in_flight -= 1;
            match ended {
                Ended::Io(id, result) => {
                    let slice = self.reads.remove(&id);
                    if let (Some(slice), Ok(Some(bytes))) = (slice, &result) {
                        ring.arena_mut().slice_mut(slice).copy_from_slice(bytes);
                    }
                    self.done.push_back((id, result.map(drop)));
                }
                Ended::Status(id, status) => self.statuses.push_back((id, status)),
            }
        }
    }

    fn await_event(&mut self, ring: &mut Ring) {
        if let Some(Attached { event, tokens }) = &self.attached {
            ring.await_event(tokens.token(0), *event);
        }
    }
}

impl Driver for Objects {
    fn info(&self) -> &BackingInfo {
        &self.info
    }

    fn attach(&mut self, ring: &mut Ring, _now: Instant, tokens: TokenSpace) {
        let event = ring.attach(self.event.clone(), FdClass::Event);
        self.attached = Some(Attached { event, tokens });
        self.await_event(ring);
    }

    fn submit(&mut self, ring: &mut Ring, _now: Instant, io: &Io) {
        if let Err(error) = self.start(ring, io) {
            self.done.push_back((io.id, Err(error)));
        }
    }

    fn handle_completion(&mut self, ring: &mut Ring, _now: Instant, _completion: Completion) {
        // `closed` is read before the completions are taken, because no completion follows it.
        let is_closed = self.worker.completions.closed.load(Ordering::Acquire);
        self.fetch(ring);
        match self.attached.take_if(|_| is_closed) {
            Some(Attached { event, .. }) => ring.detach_event(event),
            None => self.await_event(ring),
        }
    }

    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        self.done.pop_front()
    }

    fn submit_status(&mut self, _ring: &mut Ring, _now: Instant, id: u64, offset: u64, len: u64) {
        if let Err(error) = self.send(Job::Status(id, offset, len)) {
            self.statuses.push_back((id, Err(error)));
        }
    }

    fn poll_status(&mut self) -> Option<(u64, Status)> {
        self.statuses.pop_front()
    }

    fn close(&mut self, _ring: &mut Ring) {
        self.worker.close();
    }

    fn is_closed(&self) -> bool {
        self.attached.is_none()
            && self.in_flight == 0
            && self.worker.completions.closed.load(Ordering::Acquire)
    }

    fn read_before_attach(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        Side(self.worker.jobs.clone()).read(offset, bytes)
    }

    fn reader(&self) -> Option<Box<dyn Reader>> {
        Some(Box::new(Side(self.worker.jobs.clone())))
    }

    fn witness(&self) -> Option<ChangeDetector> {
        evidence(&self.worker).map(ChangeDetector::said)
    }

    fn has_lost(&self) -> bool {
        self.worker.completions.has_lost.load(Ordering::Acquire)
    }

    fn memory_id(&self) -> Option<[u8; 16]> {
        (!self.info.read_only).then_some(self.worker.disk.shape.uuid.0)
    }

    fn change_mark(&self) -> Option<ChangeMark> {
        mark(&self.worker)
    }

    fn set_wait_max(&mut self, _now: Instant, wait_max: super::WaitMax) {
        self.wait_max = wait_max.after(self.wait_max);
        let _ = self.worker.jobs.send(Job::Wait(self.wait_max));
    }

    fn is_lost(&self) -> bool {
        self.worker.completions.lost.load(Ordering::Acquire)
    }
}

/// Reads the disk synchronously, without the I/O ring.
struct Side(UnboundedSender<Job>);

impl Reader for Side {
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        let (answer, wait) = mpsc::sync_channel(1);
        let job = Job::Read(offset, bytes.len() as u64, answer);
        self.0.send(job).map_err(|_| IoError::ShuttingDown)?;
        let read = wait.recv_timeout(READ_MAX).map_err(|_| IoError::Failed)??;
        bytes.copy_from_slice(&read);
        Ok(())
    }
}
