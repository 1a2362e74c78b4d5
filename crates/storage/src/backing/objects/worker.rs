//! The thread that reads and writes an object disk, and its queues to and from the shard.
//!
//! The shard sends jobs and continues. Completed jobs are put into a queue, and an eventfd in the
//! shard's I/O ring reports them. The shard never waits for the object store. Each object disk has
//! its own thread, so that an object store that hangs delays no other disk.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use bytes::Bytes;
use hob_engine::io::{Durability, IoError};
use hob_engine::units::IoId;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::disk::{Disk, Kept};
use super::opening::{Trouble, open_to_read, open_to_write};
use super::owner::Here;
use super::store::RetryingStore;
use crate::backing::{BackingOptions, Status};

/// Interval at which the worker checks that this owner still has the disk, and flushes old data.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Maximum time for closing a disk. `CLOSE_WAIT_MAX` is how long the calls that close the disk wait
/// for an object store that does not answer.
pub(super) const CLOSE_MAX: Duration = Duration::from_secs(15);
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(5);

/// Maximum number of files that a directory store reads or writes at once.
const FILES_MAX: usize = 16;

/// A job for the worker thread.
pub(super) enum Job {
    Io(IoId, What),
    Status(u64, u64, u64),
    /// A synchronous read by another thread: offset and length in bytes, and the channel for the
    /// result.
    Read(u64, u64, mpsc::SyncSender<Result<Vec<u8>, IoError>>),
    /// Sets how long calls wait for the object store.
    Wait(Duration),
    Close,
}

/// Operation of an I/O; offsets and lengths are in bytes.
pub(super) enum What {
    Read(u64, u64),
    Write(u64, Bytes, Durability),
    Zero(u64, u64, Kept),
    Discard(u64, u64),
    Flush,
}

/// A completed job of the worker thread.
pub(super) enum Ended {
    /// An I/O has ended, with this result. The result of a successful read has the data.
    Io(IoId, Result<Option<Vec<u8>>, IoError>),
    Status(u64, Status),
}

/// Queue of completed jobs, from the worker thread to the shard.
pub(super) struct CompletionQueue {
    ended: Mutex<VecDeque<Ended>>,
    /// Eventfd that counts completed jobs.
    event: Arc<OwnedFd>,
    /// Whether another writer has taken the disk.
    pub(super) lost: AtomicBool,
    /// True if some acknowledged changes were not stored when the disk was closed.
    pub(super) has_lost: AtomicBool,
    /// Whether the worker has ended, so that no job completes any more.
    pub(super) closed: AtomicBool,
}

impl CompletionQueue {
    fn put(&self, ended: Ended) {
        let was_empty = {
            let mut all = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
            all.push_back(ended);
            all.len() == 1
        };
        if was_empty {
            self.ring();
        }
    }

    fn ring(&self) {
        // The write fails only if 2⁶⁴ − 2 calls are unread.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    pub(super) fn take(&self) -> VecDeque<Ended> {
        std::mem::take(&mut self.ended.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The running worker thread of one object disk.
pub(super) struct Worker {
    pub(super) disk: Arc<Disk>,
    pub(super) completions: Arc<CompletionQueue>,
    pub(super) jobs: UnboundedSender<Job>,
}

impl Worker {
    /// Opens the disk on a new worker thread, and waits for the result. `store` limits how long
    /// calls wait while the disk is opened. `options` limits how long later calls wait.
    pub(super) fn start(
        store: RetryingStore,
        write: bool,
        options: &BackingOptions,
        event: Arc<OwnedFd>,
    ) -> Result<Worker, Trouble> {
        let completions = Arc::new(CompletionQueue {
            ended: Mutex::default(),
            event,
            lost: AtomicBool::new(false),
            has_lost: AtomicBool::new(true),
            closed: AtomicBool::new(false),
        });
        let (jobs, inbox) = unbounded_channel();
        let (opened, result) = mpsc::sync_channel(1);
        let (here, wait) = (completions.clone(), options.wait_max);
        let run = move || {
            let _answers = Answers;
            let runtime = match runtime() {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = opened.send(Err(Trouble::Store(error.to_string())));
                    return;
                }
            };
            runtime.block_on(async {
                let store = Arc::new(store);
                let disk = if write { open_to_write(store).await } else { open_to_read(store).await };
                let disk = match disk {
                    Ok(disk) => Arc::new(disk),
                    Err(trouble) => {
                        let _ = opened.send(Err(trouble));
                        return;
                    }
                };
                disk.store.set_wait(wait);
                let _ = opened.send(Ok(disk.clone()));
                serve(disk, here, inbox).await;
            });
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("hob-objects".into()).spawn(run);
        thread.map_err(|error| Trouble::Store(format!("cannot start a thread: {error}")))?;
        let disk = result
            .recv()
            .unwrap_or_else(|_| Err(Trouble::Store("the thread that uses the object store ended".into())))?;
        Ok(Worker { disk, completions, jobs })
    }

    /// Starts closing the disk without waiting for the object store. If this process opens the disk
    /// again, the opening waits.
    pub(super) fn close(&self) {
        self.disk.here.iter().for_each(Here::begin_leaving);
        // A thread that has ended has set `closed`.
        let _ = self.jobs.send(Job::Close);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.close();
    }
}

/// Ends the process if the worker thread panics. Without this, the shard would wait for ever, and
/// the disk's state could be wrong.
struct Answers;

impl Drop for Answers {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Creates a runtime with one thread, and a few threads for file I/O.
pub(super) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(FILES_MAX).build()
}

/// Runs jobs until the disk is closed.
async fn serve(disk: Arc<Disk>, completions: Arc<CompletionQueue>, mut inbox: UnboundedReceiver<Job>) {
    let (close, closing) = watch::channel(false);
    let mut look = interval(LOOK_EVERY);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut looks = JoinSet::new();
    let mut seen = 0;
    let sweeper = disk.clone();
    let sweep = tokio::spawn(async move { sweeper.sweep().await });
    let cleaner = disk.clone();
    let free = tokio::spawn(async move { cleaner.free_when_full().await });
    let mut jobs = JoinSet::new();
    loop {
        tokio::select! {
            job = inbox.recv() => match job {
                Some(Job::Close) | None => break,
                Some(Job::Wait(wait)) => disk.store.set_wait(wait),
                Some(job) => {
                    let (disk, completions, mut closing) = (disk.clone(), completions.clone(), closing.clone());
                    jobs.spawn(async move {
                        let closed = async move { _ = closing.wait_for(|closing| *closing).await };
                        carry_out(&disk, &completions, job, closed).await;
                    });
                }
            },
            Some(job) = jobs.join_next(), if !jobs.is_empty() => job.expect("jobs do not panic"),
            Some(looked) = looks.join_next(), if !looks.is_empty() => seen = looked.unwrap_or(seen),
            _ = look.tick(), if looks.is_empty() => {
                let disk = disk.clone();
                looks.spawn(async move { disk.look_after(seen).await });
            }
            () = disk.lost.notified() => {
                completions.lost.store(true, Ordering::Release);
                completions.ring();
            }
        }
    }
    sweep.abort();
    let _ = close.send(true);
    while jobs.join_next().await.is_some() {}
    disk.store.set_wait(CLOSE_WAIT_MAX);
    let flush_and_close = async {
        disk.flush().await?;
        completions.has_lost.store(false, Ordering::Release);
        disk.close().await
    };
    match timeout(CLOSE_MAX, flush_and_close).await {
        Ok(Ok(())) => {}
        _ => tracing::warn!(
            "cannot close the disk in the object store; the next host that opens it checks whether \
            this host still runs"
        ),
    }
    free.abort();
    disk.here.iter().for_each(Here::leave);
    completions.closed.store(true, Ordering::Release);
    completions.ring();
}

/// Runs one job, or aborts it when the disk is closed.
async fn carry_out(
    disk: &Arc<Disk>,
    completions: &CompletionQueue,
    job: Job,
    closed: impl Future<Output = ()>,
) {
    let work = async {
        match job {
            Job::Io(id, what) => {
                let result = perform(disk, what);
                tokio::pin!(closed);
                let result = tokio::select! {
                    result = result => result,
                    () = closed => Err(IoError::ShuttingDown),
                };
                completions.put(Ended::Io(id, result));
            }
            Job::Status(id, offset, len) => completions.put(Ended::Status(id, disk.status(offset, len))),
            Job::Read(offset, len, answer) => {
                tokio::pin!(closed);
                let result = tokio::select! {
                    result = disk.read(offset, len) => result,
                    () = closed => Err(IoError::ShuttingDown),
                };
                let _ = answer.send(result);
            }
            Job::Wait(_) | Job::Close => unreachable!("these are no work"),
        }
    };
    work.await;
}

async fn perform(disk: &Arc<Disk>, what: What) -> Result<Option<Vec<u8>>, IoError> {
    match what {
        What::Read(offset, len) => return disk.read(offset, len).await.map(Some),
        What::Write(offset, data, durability) => {
            disk.write(offset, data).await?;
            if durability == Durability::Durable {
                disk.flush().await?;
            }
        }
        What::Zero(offset, len, kept) => disk.zero(offset, len, kept).await?,
        What::Discard(offset, len) => disk.discard(offset, len).await?,
        What::Flush => disk.flush().await?,
    }
    Ok(None)
}
