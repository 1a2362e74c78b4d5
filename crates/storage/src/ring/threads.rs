//! The ring's driver without io_uring: threads for files, epoll for sockets.
//!
//! A file operation occupies a thread until the device answers. The number of threads that one file
//! may occupy is limited, so that a file that hangs delays no other file (see `workers.rs`). A
//! socket operation is tried immediately. If it would block, it is tried again when epoll reports
//! that the socket is ready. So idle sockets need no threads. The shard's thread does not poll
//! while it waits, because the other threads need the CPU.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{Timespec, epoll};

use super::FdEntry;
use super::op::Attempt;
use super::uring::Ended;
use super::waker::Waker;
use super::workers::{Job, WorkerLimits, Workers, run};

/// epoll data of the eventfd. The epoll data of other descriptors is their index.
const EVENT: u64 = u64::MAX;

/// Maximum number of ready descriptors that one epoll call reports.
const REPORTS: usize = 128;

/// Operations of one socket that wait until the socket is ready.
#[derive(Clone, Copy, Default)]
struct Waiting {
    receive: Option<u32>,
    send: Option<u32>,
    /// Whether the socket is registered with epoll.
    watched: bool,
}

pub(super) struct Threads {
    workers: Workers,
    waker: Waker,
    epoll: OwnedFd,
    sockets: Vec<Waiting>,
    ended: VecDeque<Ended>,
    reports: Vec<epoll::Event>,
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Threads").field("workers", &self.workers).finish_non_exhaustive()
    }
}

impl Threads {
    pub(super) fn new(limits: WorkerLimits, waker: &Waker) -> io::Result<Threads> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, waker.event(), epoll::EventData::new_u64(EVENT), epoll::EventFlags::IN)?;
        Ok(Threads {
            workers: Workers::new(limits, waker),
            waker: waker.clone(),
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
            Attempt::Send { .. } | Attempt::SendMessage { .. } | Attempt::AwaitRoom | Attempt::Signal(_) => {
                &mut waiting.send
            }
            _ => {
                let gate = entry.gate.clone().filter(|_| attempt.is_change());
                return self.workers.start(Job { op, fd, attempt, gate });
            }
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
        // SAFETY: the I/O ring keeps the descriptor open while an operation of it is being started.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(u64::from(index)), flags)?;
        self.sockets[usize::from(index)].watched = true;
        Ok(())
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
                // EAGAIN makes the I/O ring try again.
                self.ended.push_back(Ended { op, result: -libc::EAGAIN, more_to_receive: true });
            }
        }
        Ok(())
    }

    fn take_done(&mut self) {
        let _ = rustix::io::read(self.waker.event(), &mut [0u8; 8]);
        let ended = self.workers.take_done().into_iter().map(|(op, result)| Ended {
            op,
            result,
            more_to_receive: false,
        });
        self.ended.extend(ended);
    }

    /// Ends all waits for a descriptor.
    pub(super) fn cancel(&mut self, index: u16) {
        let Waiting { receive, send, .. } = &mut self.sockets[usize::from(index)];
        for op in receive.take().into_iter().chain(send.take()) {
            self.ended.push_back(Ended { op, result: -libc::ECANCELED, more_to_receive: false });
        }
    }

    /// Ends a waiting receive.
    pub(super) fn cancel_receive(&mut self, index: u16) {
        if let Some(op) = self.sockets[usize::from(index)].receive.take() {
            self.ended.push_back(Ended { op, result: -libc::ECANCELED, more_to_receive: false });
        }
    }

    pub(super) fn next(&mut self) -> Option<Ended> {
        self.ended.pop_front()
    }
}
