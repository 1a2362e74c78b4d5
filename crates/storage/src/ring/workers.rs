//! A bounded pool of threads that make system calls for an I/O ring.
//!
//! Without io_uring, the pool performs all file I/O. With io_uring, it performs changes of a file
//! with a [`Gate`] that would block. io_uring would queue them in the kernel, where they cannot be
//! stopped any more.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use hob_engine::io::Durability;

use super::op::Attempt;
use super::waker::Waker;

/// Decides whether a file may be changed now. The gate is checked just before each system call that
/// changes the file.
pub trait Gate: Send + Sync + std::fmt::Debug {
    /// Returns true if changes may start.
    fn is_open(&self) -> bool;
}

/// A file operation that a thread of the pool performs.
pub(super) struct Job {
    pub(super) op: u32,
    pub(super) fd: RawFd,
    pub(super) attempt: Attempt,
    /// Gate that must be open when the system call is made.
    pub(super) gate: Option<Arc<dyn Gate>>,
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
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    idle: usize,
    threads: usize,
    closing: bool,
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
}

pub(super) struct Workers {
    shared: Arc<Shared>,
    threads_max: usize,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workers").field("threads_max", &self.threads_max).finish_non_exhaustive()
    }
}

impl Workers {
    pub(super) fn new(threads_max: usize, waker: &Waker) -> Workers {
        let shared = Shared {
            queue: Mutex::default(),
            work: Condvar::new(),
            done: Mutex::default(),
            waker: waker.clone(),
        };
        Workers { shared: Arc::new(shared), threads_max: threads_max.max(1) }
    }

    pub(super) fn start(&self, job: Job) {
        let mut queue = lock(&self.shared.queue);
        queue.jobs.push_back(job);
        let short = queue.jobs.len() > queue.idle && queue.threads < self.threads_max;
        if short {
            let shared = self.shared.clone();
            let spawned = std::thread::Builder::new().name("hob-disk-io".into()).spawn(move || work(&shared));
            match spawned {
                Ok(_) => queue.threads += 1,
                Err(error) if queue.threads == 0 => {
                    // If no thread can be started, the calling thread performs the I/O, which is
                    // slow but correct.
                    tracing::warn!(%error, "cannot start a thread for disk I/O; the shard's thread performs the I/O and blocks meanwhile");
                    let jobs = std::mem::take(&mut queue.jobs);
                    drop(queue);
                    return jobs.into_iter().for_each(|job| self.shared.finish(job.run()));
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

/// Main loop of each thread, until the I/O ring is dropped.
fn work(shared: &Shared) {
    let mut queue = lock(&shared.queue);
    loop {
        let Some(job) = queue.jobs.pop_front() else {
            if queue.closing {
                return;
            }
            queue.idle += 1;
            queue = shared.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
            continue;
        };
        drop(queue);
        shared.finish(job.run());
        queue = lock(&shared.queue);
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
