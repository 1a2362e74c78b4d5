//! A pool of threads that make system calls for an I/O ring.
//!
//! Without io_uring, the pool performs all file I/O. With io_uring, it performs changes of a file
//! with a [`Gate`] that would block. io_uring would queue these changes in the kernel, where they
//! cannot be stopped any more.
//!
//! The number of operations on one descriptor that are in system calls is limited, as is the number
//! of changes of one file with a gate. Further operations wait in order of arrival. If an operation
//! within the limits finds all threads busy, the pool starts another thread. So a file that hangs
//! delays no other file. The pool itself has no maximum number of threads. The
//! operations on all backings together are limited by [`WorkerShares`], and the number of flash
//! devices is small. Idle threads end after [`IDLE_MAX`].
//!
//! [`WorkerShares`]: super::WorkerShares
#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_engine::io::Durability;

use super::op::Attempt;
use super::waker::Waker;
use super::worker_shares::FileNumber;

/// Time after which an idle thread ends.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// Decides whether a file may be changed now. The gate is checked just before each system call that
/// changes the file.
pub trait Gate: Send + Sync + std::fmt::Debug {
    /// Returns true if changes may start.
    fn is_open(&self) -> bool;
}

/// The gate of a file.
#[derive(Clone, Debug)]
pub(super) struct FileGate {
    pub(super) file: FileNumber,
    pub(super) gate: Arc<dyn Gate>,
}

impl FileGate {
    pub(super) fn is_open(&self) -> bool {
        self.gate.is_open()
    }
}

/// A file operation that a thread of the pool performs.
pub(super) struct Job {
    pub(super) op: u32,
    pub(super) fd: RawFd,
    pub(super) attempt: Attempt,
    /// Gate that must be open when the system call is made.
    pub(super) gate: Option<FileGate>,
}

// SAFETY: the addresses in an attempt belong to an operation that stays in place until its end has
// been taken from `done`; until then only the thread that runs the job uses them.
unsafe impl Send for Job {}

impl Job {
    /// Makes the job's system call. The result is that of the I/O ring: ECANCELED if the gate is
    /// closed.
    fn run(self) -> (u32, i32) {
        let may_run = self.gate.is_none_or(|gate| gate.is_open());
        (self.op, if may_run { run(self.fd, self.attempt) } else { -libc::ECANCELED })
    }

    /// Returns the group of jobs whose limit applies to the job.
    fn group(&self) -> Group {
        match &self.gate {
            Some(gate) => Group::Changes(gate.file),
            None => Group::Descriptor(self.fd),
        }
    }
}

/// Names a group of jobs with a common limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    /// Changes of a file with a gate, over all its descriptors.
    Changes(FileNumber),
    /// Operations on a descriptor, except changes of a file with a gate.
    Descriptor(RawFd),
}

/// Jobs of a group.
#[derive(Default)]
struct GroupJobs {
    /// Number of jobs that are in [`Queue::jobs`] or that a thread performs.
    admitted: usize,
    waiting: VecDeque<Job>,
}

#[derive(Default)]
struct Queue {
    /// Jobs that any thread may perform.
    jobs: VecDeque<Job>,
    /// Jobs of each group that ever had a job. Numbers of files and descriptors are reused, so the
    /// map stays small.
    groups: BTreeMap<Group, GroupJobs>,
    idle: usize,
    threads: usize,
    /// Whether the log has a warning that no further thread can be started.
    has_warned: bool,
    closing: bool,
}

impl Queue {
    /// Adds a job. Returns false if the job waits for other jobs of its group.
    fn add(&mut self, job: Job, limits: WorkerLimits) -> bool {
        let group = job.group();
        let admitted_max = match group {
            Group::Changes(_) => limits.changes_max,
            Group::Descriptor(_) => limits.operations_max,
        };
        let of_group = self.groups.entry(group).or_default();
        if of_group.admitted == admitted_max {
            of_group.waiting.push_back(job);
            return false;
        }
        of_group.admitted += 1;
        self.jobs.push_back(job);
        true
    }

    /// Handles the end of a job of a group: admits the group's next waiting job.
    fn end_job(&mut self, group: Group) {
        let of_group = self.groups.get_mut(&group).expect("the group of a job in a thread has an entry");
        match of_group.waiting.pop_front() {
            Some(next) => self.jobs.push_back(next),
            None => of_group.admitted -= 1,
        }
    }
}

struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
    done: Mutex<Vec<(u32, i32)>>,
    waker: Waker,
}

impl Shared {
    fn finish(&self, result: (u32, i32)) {
        let mut done = lock(&self.done);
        done.push(result);
        if done.len() == 1 {
            self.waker.signal();
        }
    }

    /// Performs a job, and then moves the next waiting job of the same group to the queue. Returns
    /// the locked queue, so that the caller can take a job next.
    fn perform(&self, job: Job) -> MutexGuard<'_, Queue> {
        let group = job.group();
        self.finish(job.run());
        let mut queue = lock(&self.queue);
        queue.end_job(group);
        queue
    }
}

/// Limits of a thread pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerLimits {
    /// Maximum number of operations on a descriptor that are in system calls, except changes of a
    /// file with a gate.
    pub(super) operations_max: usize,
    /// Maximum number of changes of a file with a gate that are in system calls.
    pub(super) changes_max: usize,
}

pub(super) struct Workers {
    shared: Arc<Shared>,
    limits: WorkerLimits,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workers").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Workers {
    pub(super) fn new(limits: WorkerLimits, waker: &Waker) -> Workers {
        let shared = Shared {
            queue: Mutex::default(),
            work: Condvar::new(),
            done: Mutex::default(),
            waker: waker.clone(),
        };
        Workers { shared: Arc::new(shared), limits }
    }

    pub(super) fn start(&self, job: Job) {
        let mut queue = lock(&self.shared.queue);
        if !queue.add(job, self.limits) {
            return;
        }
        if queue.jobs.len() > queue.idle {
            let shared = self.shared.clone();
            let spawned = std::thread::Builder::new().name("hob-disk-io".into()).spawn(move || work(&shared));
            match spawned {
                Ok(_) => queue.threads += 1,
                Err(error) if queue.threads == 0 => {
                    // If no thread can be started, the calling thread performs the I/O, which is
                    // slow but correct.
                    tracing::warn!(%error, "cannot start a thread for disk I/O; the shard's thread performs the I/O and blocks meanwhile");
                    while let Some(job) = queue.jobs.pop_front() {
                        drop(queue);
                        queue = self.shared.perform(job);
                    }
                    return;
                }
                Err(error) if !queue.has_warned => {
                    queue.has_warned = true;
                    tracing::warn!(%error, threads = queue.threads, "cannot start another thread for disk I/O, so a disk that hangs may delay others; raise the maximum number of processes (TasksMax=, --pids-limit)");
                }
                Err(_) => {}
            }
        }
        drop(queue);
        self.shared.work.notify_one();
    }

    /// Takes the operations that have ended since the last call, with their results.
    pub(super) fn take_done(&self) -> Vec<(u32, i32)> {
        std::mem::take(&mut *lock(&self.shared.done))
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        lock(&self.shared.queue).closing = true;
        self.shared.work.notify_all();
    }
}

/// Main loop of each thread, until the thread is idle for too long or the I/O ring is dropped.
fn work(shared: &Shared) {
    let mut queue = lock(&shared.queue);
    loop {
        let Some(job) = queue.jobs.pop_front() else {
            if queue.closing {
                return;
            }
            queue.idle += 1;
            let (woken, wait) =
                shared.work.wait_timeout(queue, IDLE_MAX).unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            queue.idle -= 1;
            if wait.timed_out() && queue.jobs.is_empty() {
                queue.threads -= 1;
                return;
            }
            continue;
        };
        drop(queue);
        queue = shared.perform(job);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing between lock and unlock leaves a half-changed state behind.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns 1 if a descriptor is ready, or -1 with EAGAIN.
fn ready(fd: RawFd, events: i16) -> isize {
    let mut poll = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one entry, on our stack, for the length of the call.
    match unsafe { libc::poll(&raw mut poll, 1, 0) } {
        0 => {
            // SAFETY: errno belongs to this thread.
            unsafe { *libc::__errno_location() = libc::EAGAIN };
            -1
        }
        result => result as isize,
    }
}

/// Makes the attempt's system call. Socket operations do not block.
pub(super) fn run(fd: RawFd, attempt: Attempt) -> i32 {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: addresses and lengths belong to an operation in flight, whose memory stays; the
    // descriptor is kept open by the I/O ring until then. The system calls check everything else.
    let result = unsafe {
        match attempt {
            Attempt::Nothing => 0,
            Attempt::Read { to, len, offset } => {
                libc::pread(fd, to.cast(), len as usize, offset as libc::off_t)
            }
            Attempt::ReadParts { parts, count, offset } => {
                libc::preadv(fd, parts, count as libc::c_int, offset as libc::off_t)
            }
            Attempt::Write { from, len, offset, durability } => {
                let iovec = libc::iovec { iov_base: from.cast_mut().cast(), iov_len: len as usize };
                let flags = match durability {
                    Durability::Durable => libc::RWF_DSYNC,
                    Durability::Volatile => 0,
                };
                libc::pwritev2(fd, &raw const iovec, 1, offset as libc::off_t, flags)
            }
            Attempt::Fsync => libc::fdatasync(fd) as isize,
            Attempt::Fallocate { mode, offset, len } => {
                libc::fallocate(fd, mode, offset as libc::off_t, len as libc::off_t) as isize
            }
            Attempt::Recv { to, len } | Attempt::RecvAll { to, len } => {
                libc::recv(fd, to.cast(), len as usize, libc::MSG_DONTWAIT)
            }
            Attempt::Send { from, len, .. } => libc::send(fd, from.cast(), len as usize, flags),
            Attempt::SendMessage { header, .. } => libc::sendmsg(fd, header, flags),
            Attempt::Poll => ready(fd, libc::POLLIN),
            Attempt::AwaitRoom => ready(fd, libc::POLLOUT),
            // A write would block if the count is at its maximum.
            Attempt::Signal(_) => match ready(fd, libc::POLLOUT) {
                1 => libc::write(fd, 1u64.to_ne_bytes().as_ptr().cast(), 8),
                not_now => not_now,
            },
        }
    };
    match result {
        -1 => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        moved => moved as i32,
    }
}

#[cfg(test)]
mod tests {
    use super::super::worker_shares::WorkerShares;
    use super::*;

    #[derive(Debug)]
    struct AlwaysOpen;

    impl Gate for AlwaysOpen {
        fn is_open(&self) -> bool {
            true
        }
    }

    /// Adds jobs of two files, of which two of each may be in system calls, and performs them.
    #[track_caller]
    fn wait_in_their_order(limits: WorkerLimits, job: impl Fn(u32, usize) -> Job) {
        let mut queue = Queue::default();
        for (op, file) in [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 0)] {
            assert_eq!(queue.add(job(op, file), limits), op < 2 || file == 1);
        }
        let mut started = Vec::new();
        while let Some(job) = queue.jobs.pop_front() {
            started.push(job.op);
            queue.end_job(job.group());
        }
        assert_eq!(started, [0, 1, 4, 2, 3, 5]);
        assert!(queue.groups.values().all(|of_group| of_group.admitted == 0 && of_group.waiting.is_empty()));
    }

    #[test]
    fn changes_of_a_file_wait_in_their_order_and_behind_no_other_file() {
        let mut shares = WorkerShares::of_kernel();
        let files = [shares.join(1), shares.join(1)];
        wait_in_their_order(WorkerLimits { operations_max: 1, changes_max: 2 }, |op, file| {
            let gate = FileGate { file: files[file], gate: Arc::new(AlwaysOpen) };
            Job { op, fd: -1, attempt: Attempt::Nothing, gate: Some(gate) }
        });
    }

    #[test]
    fn operations_on_a_descriptor_wait_in_their_order_and_behind_no_other_descriptor() {
        wait_in_their_order(WorkerLimits { operations_max: 2, changes_max: 1 }, |op, file| Job {
            op,
            fd: file as RawFd,
            attempt: Attempt::Nothing,
            gate: None,
        });
    }
}
