//! The ring's driver without io_uring: threads for files, epoll for sockets.
//!
//! A file operation occupies a thread of a bounded pool for as long as the device takes; a socket
//! operation is tried at once and, if it would wait, again when epoll says so. Sockets therefore
//! cost no thread, however many are idle. A wait does not spin here: the threads need the CPU.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hob_engine::io::Durability;
use rustix::event::{Timespec, epoll};

use super::FdEntry;
use super::op::Attempt;
use super::uring::Ended;
use super::waker::Waker;

/// epoll's name for the eventfd; descriptors are named by their index.
const EVENT: u64 = u64::MAX;

/// Readiness reports taken per call.
const REPORTS: usize = 128;

/// One file operation for a thread.
struct Job {
    op: u32,
    fd: RawFd,
    attempt: Attempt,
}

// SAFETY: the addresses in an attempt belong to an operation that stays in place until its end has
// been taken from `done`; until then only the thread that runs the job uses them.
unsafe impl Send for Job {}

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

/// Operations of one socket that wait for it to become ready.
#[derive(Clone, Copy, Default)]
struct Waiting {
    receive: Option<u32>,
    send: Option<u32>,
    /// epoll knows the socket.
    watched: bool,
}

pub(super) struct Threads {
    shared: Arc<Shared>,
    threads_max: usize,
    epoll: OwnedFd,
    sockets: Vec<Waiting>,
    ended: VecDeque<Ended>,
    reports: Vec<epoll::Event>,
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Threads").field("threads_max", &self.threads_max).finish_non_exhaustive()
    }
}

impl Threads {
    pub(super) fn new(threads_max: usize, waker: &Waker) -> io::Result<Threads> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, waker.event(), epoll::EventData::new_u64(EVENT), epoll::EventFlags::IN)?;
        let shared = Shared {
            queue: Mutex::default(),
            work: Condvar::new(),
            done: Mutex::default(),
            waker: waker.clone(),
        };
        Ok(Threads {
            shared: Arc::new(shared),
            threads_max: threads_max.max(1),
            epoll,
            sockets: Vec::new(),
            ended: VecDeque::new(),
            reports: Vec::with_capacity(REPORTS),
        })
    }

    pub(super) fn register(&mut self, index: u16) -> bool {
        let index = usize::from(index);
        if self.sockets.len() <= index {
            self.sockets.resize(index + 1, Waiting::default());
        }
        self.sockets[index] = Waiting::default();
        false
    }

    pub(super) fn unregister(&mut self, index: u16, fd: RawFd) {
        if std::mem::take(&mut self.sockets[usize::from(index)]).watched {
            // SAFETY: the caller closes the descriptor only after this call.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            let _ = epoll::delete(&self.epoll, fd);
        }
    }

    pub(super) fn start(&mut self, op: u32, index: u16, entry: &FdEntry, attempt: Attempt) {
        let fd = entry.raw();
        let waiting = &mut self.sockets[usize::from(index)];
        let slot = match attempt {
            Attempt::Recv { .. } | Attempt::RecvAll { .. } | Attempt::Poll => &mut waiting.receive,
            Attempt::Send { .. } | Attempt::SendMessage { .. } | Attempt::Signal(_) => &mut waiting.send,
            _ => return self.queue(Job { op, fd, attempt }),
        };
        let mut result = run(fd, attempt);
        if result == -libc::EAGAIN {
            assert!(slot.is_none(), "one receive and one send per socket at a time");
            *slot = Some(op);
            if waiting.watched {
                return;
            }
            match self.watch(index, fd) {
                Ok(()) => return,
                Err(error) => result = -error.raw_os_error(),
            }
            let waiting = &mut self.sockets[usize::from(index)];
            (waiting.receive, waiting.send) = (None, None);
        }
        self.ended.push_back(Ended { op, result, more_to_receive: false });
    }

    fn watch(&mut self, index: u16, fd: RawFd) -> Result<(), rustix::io::Errno> {
        // SAFETY: the ring keeps the descriptor open while an operation of it is being started.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(u64::from(index)), flags)?;
        self.sockets[usize::from(index)].watched = true;
        Ok(())
    }

    fn queue(&mut self, job: Job) {
        let mut queue = lock(&self.shared.queue);
        queue.jobs.push_back(job);
        let short = queue.jobs.len() > queue.idle && queue.threads < self.threads_max;
        if short {
            let shared = self.shared.clone();
            let spawned = std::thread::Builder::new().name("hob-disk-io".into()).spawn(move || work(&shared));
            match spawned {
                Ok(_) => queue.threads += 1,
                Err(error) if queue.threads == 0 => {
                    // Slow, but right: the calling thread does it.
                    tracing::warn!(%error, "no thread for disk I/O; the shard waits for its disks");
                    let jobs = std::mem::take(&mut queue.jobs);
                    drop(queue);
                    for job in jobs {
                        let result = run(job.fd, job.attempt);
                        self.ended.push_back(Ended { op: job.op, result, more_to_receive: false });
                    }
                    return;
                }
                Err(_) => {}
            }
        }
        drop(queue);
        self.shared.work.notify_one();
    }

    pub(super) fn wait(&mut self, _spin: Duration, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = if self.ended.is_empty() { timeout } else { Some(Duration::ZERO) };
        let timespec = timeout
            .map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) as _ });
        self.reports.clear();
        let waited =
            epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut self.reports), timespec.as_ref());
        match waited {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        for at in 0..self.reports.len() {
            let epoll::Event { flags, data } = self.reports[at];
            if data.u64() == EVENT {
                self.take_done();
                continue;
            }
            let waiting = &mut self.sockets[data.u64() as usize];
            let end = epoll::EventFlags::HUP | epoll::EventFlags::ERR | epoll::EventFlags::RDHUP;
            let receive = waiting.receive.take_if(|_| flags.intersects(epoll::EventFlags::IN | end));
            let send = waiting.send.take_if(|_| flags.intersects(epoll::EventFlags::OUT | end));
            for op in receive.into_iter().chain(send) {
                // EAGAIN makes the ring try again.
                self.ended.push_back(Ended { op, result: -libc::EAGAIN, more_to_receive: true });
            }
        }
        Ok(())
    }

    fn take_done(&mut self) {
        let _ = rustix::io::read(self.shared.waker.event(), &mut [0u8; 8]);
        let done = std::mem::take(&mut *lock(&self.shared.done));
        let ended = done.into_iter().map(|(op, result)| Ended { op, result, more_to_receive: false });
        self.ended.extend(ended);
    }

    /// Ends what waits for a descriptor.
    pub(super) fn cancel(&mut self, index: u16) {
        let Waiting { receive, send, .. } = &mut self.sockets[usize::from(index)];
        for op in receive.take().into_iter().chain(send.take()) {
            self.ended.push_back(Ended { op, result: -libc::ECANCELED, more_to_receive: false });
        }
    }

    /// Ends a receive that waits.
    pub(super) fn cancel_receive(&mut self, index: u16) {
        if let Some(op) = self.sockets[usize::from(index)].receive.take() {
            self.ended.push_back(Ended { op, result: -libc::ECANCELED, more_to_receive: false });
        }
    }

    pub(super) fn next(&mut self) -> Option<Ended> {
        self.ended.pop_front()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        lock(&self.shared.queue).closing = true;
        self.shared.work.notify_all();
    }
}

/// What each thread of the pool does until the ring is gone.
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
        let result = run(job.fd, job.attempt);
        let mut done = lock(&shared.done);
        done.push((job.op, result));
        if done.len() == 1 {
            shared.waker.signal();
        }
        drop(done);
        queue = lock(&shared.queue);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing between lock and unlock leaves a half-changed state behind.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// 1 if a descriptor is ready, or -1 and EAGAIN.
fn ready(fd: RawFd, events: i16) -> isize {
    let mut poll = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one entry, on our stack, for the length of the call.
    match unsafe { libc::poll(&raw mut poll, 1, 0) } {
        0 => {
            // SAFETY: errno is this thread's own.
            unsafe { *libc::__errno_location() = libc::EAGAIN };
            -1
        }
        result => result as isize,
    }
}

/// Makes the system call; sockets do not wait.
fn run(fd: RawFd, attempt: Attempt) -> i32 {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: addresses and lengths belong to an operation in flight, whose memory stays; the
    // descriptor is kept open by the ring until then. The system calls check everything else.
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
            // A count that is at its highest would make the write wait.
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
