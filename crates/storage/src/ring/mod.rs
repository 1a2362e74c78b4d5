//! The ring: asynchronous file and socket operations of one shard.
//!
//! # Two implementations, one interface
//! `uring.rs` uses io_uring. `threads.rs` uses a pool of threads for files and epoll for sockets,
//! for hosts on which io_uring is missing or forbidden. The file mod.rs is the common part: the
//! table of operations in flight, their memory, and the rules for their completion. An operation
//! consists of one or more attempts, and an attempt is one system call. The implementation starts
//! an attempt and reports its result. After a short transfer, this file starts the next attempt.
//!
//! # Call order
//! [`Ring::attach`] a descriptor, start operations, call [`Ring::submit_and_wait`], then
//! [`Ring::next_completion`] until it returns `None`. Repeat these steps. Operations reach the
//! kernel in `submit_and_wait`. The exception is I/O of [`FdClass::Memory`], which is performed
//! immediately, because memory never blocks.
//!
//! # Guarantees
//! * Every operation has exactly one completion. No operation is lost or refused because queues are
//!   full.
//! * A read ends with all requested bytes, or with an error. A file that ends too early is an error
//!   (ENODATA), because it was truncated. A write or send ends with all bytes, or with an error.
//!   [`Ring::recv_into`] receives all bytes, or fewer if the peer closed the connection.
//! * A socket has at most one send and one receive in flight. The caller ensures this, because two
//!   sends could mix their bytes.
//! * Memory of an operation in flight stays valid: buffers are referenced and descriptors kept
//!   open. Dropping the I/O ring waits, or leaks memory that the kernel still uses.
//! * The ring stays on the thread that created it. Only its [`Waker`]s move between threads.

mod config;
mod fds;
mod op;
mod threads;
mod uring;
mod volatile;
mod waker;
mod worker_shares;
mod workers;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use hob_engine::gather::{Gather, GatherPart};
use hob_engine::io::{BufferSlice, Durability};
use hob_engine::units::BufferId;

use crate::buffers::{Arena, Traffic};
use crate::memory::Memory;
use crate::token::Token;
use crate::volatile::SimRng;
pub use config::{RingConfig, RingError, RingKind};
use fds::FdEntry;
pub use fds::{Fd, FdClass};
pub(crate) use op::read_now;
use op::{Attempt, Message, Op, Pace, Work};
pub use op::{Completion, Returned, RxBuf};
pub use waker::Waker;
pub(crate) use worker_shares::{FileNumber, WorkerShares};
#[cfg(test)]
pub(crate) use worker_shares::{WORKERS_FOR_FILES, WORKERS_PER_FILE_MAX};
pub use workers::Gate;
use workers::{Job, WorkerLimits, Workers};

/// Length of the buffer of [`Ring::zeroes`], bytes.
pub const ZEROES_BYTES: u32 = 64 << 10;

/// Size of each I/O ring's buffer for journal writes, in addition to [`RingConfig::arena_bytes`],
/// bytes.
pub const JOURNAL_ROOM_BYTES: u32 = 512 << 10;

/// Interval at which the gate of a send that waits is checked.
const GATE_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum time for which dropping an I/O ring waits for operations in flight.
const DRAIN_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
enum Driver {
    Uring(Box<uring::Uring>),
    Threads(Box<threads::Threads>),
}

/// The ring of one shard: its operations in flight and its payload buffers.
#[derive(Debug)]
pub struct Ring {
    driver: Driver,
    arena: Arena,
    /// The arena's mapping. The mapping is stored separately, so that no use of `arena_mut` can
    /// unmap memory that the kernel uses.
    memory: Option<Arc<Memory>>,
    fds: Vec<FdEntry>,
    free_fds: Vec<u16>,
    ops: Vec<Op>,
    free_ops: Vec<u32>,
    /// Spare message headers for reuse. Boxed, because the kernel gets their addresses.
    #[allow(clippy::vec_box)]
    messages: Vec<Box<Message>>,
    ready: VecDeque<Completion>,
    waker: Waker,
    in_flight: usize,
    /// Reads and writes that were started since the last submission.
    unsubmitted: usize,
    /// Operations on files of the power-cut layer that are not performed yet.
    held: Vec<u32>,
    /// Random numbers that select the next operation on a volatile file.
    rng: SimRng,
    /// Writes and sends whose gate is checked before the next system call.
    gated: Vec<u32>,
    /// Threads in addition to io_uring. The threads are started when a change of a file with a gate
    /// would block.
    workers: Option<Workers>,
    /// Operations that the additional threads have ended, with their results.
    worked: VecDeque<(u32, i32)>,
    worker_limits: WorkerLimits,
    worker_shares: WorkerShares,
    /// A buffer of zeroes, which is never written or released.
    zeroes: BufferId,
    /// The buffer for journal writes; `None` after [`Ring::take_journal_room`].
    journal_room: Option<BufferId>,
    /// Marker that keeps the I/O ring on its thread, because the kernel accepts submissions from
    /// one task only.
    _not_send: PhantomData<*const ()>,
}

impl Ring {
    /// Creates an I/O ring for the calling thread.
    ///
    /// # Errors
    /// Returns a [`RingError`]. `RingKind::Auto` does not return `NoUring`, but uses threads and
    /// logs a warning.
    pub fn new(config: &RingConfig) -> Result<Ring, RingError> {
        let resources = |source| RingError::Resources { arena_bytes: config.arena_bytes, source };
        let own_bytes = (ZEROES_BYTES + JOURNAL_ROOM_BYTES) as usize;
        let mut arena = Arena::new(config.arena_bytes + own_bytes).map_err(resources)?;
        let zeroes = arena.alloc(ZEROES_BYTES as usize).expect("a fresh arena has room");
        let journal_room = arena.alloc(JOURNAL_ROOM_BYTES as usize);
        let waker = Waker::new().map_err(resources)?;
        let uring = match config.kind {
            RingKind::Threads => None,
            kind => match uring::Uring::new(config.entries, &arena, &waker) {
                Ok(uring) => Some(uring),
                Err(error) if kind == RingKind::IoUring => return Err(RingError::NoUring(error)),
                Err(error) => {
                    tracing::warn!(%error, "io_uring is not available; a thread pool performs the I/O, with several times the CPU time");
                    None
                }
            },
        };
        let worker_limits = config.worker_limits();
        let (driver, worker_shares) = match uring {
            Some(uring) => (Driver::Uring(Box::new(uring)), WorkerShares::of_kernel()),
            None => {
                let threads = threads::Threads::new(worker_limits, &waker).map_err(resources)?;
                let shares = WorkerShares::of_threads(worker_limits.operations_max);
                (Driver::Threads(Box::new(threads)), shares)
            }
        };
        Ok(Ring {
            driver,
            memory: Some(arena.memory().clone()),
            arena,
            fds: Vec::new(),
            free_fds: Vec::new(),
            ops: Vec::new(),
            free_ops: Vec::new(),
            messages: Vec::new(),
            ready: VecDeque::with_capacity(config.entries as usize),
            waker,
            in_flight: 0,
            unsubmitted: 0,
            held: Vec::new(),
            rng: SimRng::new(0),
            gated: Vec::new(),
            workers: None,
            worked: VecDeque::new(),
            worker_limits,
            worker_shares,
            zeroes,
            journal_room,
            _not_send: PhantomData,
        })
    }

    /// Returns the implementation in use; never `Auto`.
    pub fn kind(&self) -> RingKind {
        match self.driver {
            Driver::Uring(_) => RingKind::IoUring,
            Driver::Threads(_) => RingKind::Threads,
        }
    }

    /// Returns the payload buffers.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Returns the payload buffers for writing. Two rings must not swap their buffers; operations
    /// check that and panic.
    pub fn arena_mut(&mut self) -> &mut Arena {
        &mut self.arena
    }

    /// Returns `len` zero bytes as the source of a write; at most [`ZEROES_BYTES`].
    pub fn zeroes(&self, len: u32) -> BufferSlice {
        BufferSlice { id: self.zeroes, offset: 0, len: len.min(ZEROES_BYTES) }
    }

    /// Returns the buffer of [`JOURNAL_ROOM_BYTES`], which is reserved even if the arena is full.
    /// Only the first call returns it.
    pub(crate) fn take_journal_room(&mut self) -> Option<BufferId> {
        self.journal_room.take()
    }

    /// Returns a waker, with which any thread can end a `submit_and_wait`.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Returns the division of worker threads among the files of backings.
    pub(crate) fn worker_shares(&mut self) -> &mut WorkerShares {
        &mut self.worker_shares
    }

    /// Returns the number of operations without a completion.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Returns the number of operations on a descriptor without a completion.
    pub(crate) fn in_flight_of(&self, fd: Fd) -> usize {
        let entry = &self.fds[usize::from(fd.index)];
        if entry.generation == fd.generation { entry.in_flight as usize } else { 0 }
    }

    /// Reads from a file into `slice`. The completion's result is `slice.len`. Only for this
    /// operation, the buffer may be [outside the arena](Arena::adopt). If that memory was removed,
    /// the read fails.
    pub fn read(&mut self, token: Token, fd: Fd, offset: u64, slice: BufferSlice) {
        if self.entry_mut(fd).class == FdClass::Memory {
            return self.run_now(token, fd, offset, slice, Traffic::KernelWrites);
        }
        self.arena_mut().pin(slice, Traffic::KernelWrites);
        self.unsubmitted += 1;
        let is_shared = self.arena.is_shared(slice.id);
        let parts = is_shared.then(|| self.messages.pop().unwrap_or_default());
        self.start(token, fd, Work::Read { slice, offset, parts });
    }

    /// Writes `slice` to a file. The completion's result is `slice.len`.
    pub fn write(&mut self, token: Token, fd: Fd, offset: u64, slice: BufferSlice, durability: Durability) {
        if self.entry_mut(fd).class == FdClass::Memory {
            return self.run_now(token, fd, offset, slice, Traffic::KernelReads);
        }
        self.arena_mut().pin(slice, Traffic::KernelReads);
        self.unsubmitted += 1;
        self.start(token, fd, Work::Write { slice, offset, durability });
    }

    /// Makes a file's contents durable, as fdatasync does. The completion's result is 0.
    pub fn fsync(&mut self, token: Token, fd: Fd) {
        if self.entry_mut(fd).class == FdClass::Memory {
            return self.post(token, 0);
        }
        self.start(token, fd, Work::Fsync);
    }

    /// Calls fallocate(2) with its `mode` bits. The completion's result is 0.
    pub fn fallocate(&mut self, token: Token, fd: Fd, mode: i32, offset: u64, len: u64) {
        self.start(token, fd, Work::Fallocate { mode, offset, len });
    }

    /// Receives bytes and appends them to those in `rx`. The completion's result is the number of
    /// bytes, or 0 if the peer closed the connection. The completion returns `rx`.
    pub fn recv(&mut self, token: Token, fd: Fd, rx: RxBuf) {
        assert!(rx.room() > 0, "no room to receive into");
        self.start(token, fd, Work::Recv(rx));
    }

    /// Receives exactly `slice`. The completion's result is `slice.len`, or less if the peer closed
    /// the connection.
    pub fn recv_into(&mut self, token: Token, fd: Fd, slice: BufferSlice) {
        self.arena_mut().pin(slice, Traffic::KernelWrites);
        self.start(token, fd, Work::RecvInto(slice));
    }

    /// Waits until a [`FdClass::Device`] has a message or an error. The completion's result is not
    /// negative, or is -ECANCELED after [`Ring::shutdown`]. A device can have one such wait at a
    /// time.
    pub fn readable(&mut self, token: Token, fd: Fd) {
        assert!(self.entry_mut(fd).class == FdClass::Device, "only devices are waited for");
        self.start(token, fd, Work::Readable);
    }

    /// Sends everything in `gather`. The completion's result is the number of bytes. The completion
    /// returns `gather`.
    pub fn send(&mut self, token: Token, fd: Fd, gather: Gather) {
        self.send_through(token, fd, gather, None);
    }

    /// Sends everything in `gather` while `gate` is open, and waits while the gate is closed. The
    /// gate is checked just before each system call, and no part of the data waits in the kernel
    /// for room in the socket. So a process that was stopped sends nothing after its gate has
    /// closed. After [`Ring::shutdown`], a send that waits for its gate ends with -ECANCELED.
    pub(crate) fn send_through(&mut self, token: Token, fd: Fd, gather: Gather, gate: Option<Arc<dyn Gate>>) {
        let arena = &mut self.arena;
        for piece in &gather.pieces {
            if let GatherPart::Payload(slice) = piece {
                arena.pin(*slice, Traffic::KernelReads);
            }
        }
        let total = gather.len();
        let message = self.messages.pop().unwrap_or_default();
        self.start(token, fd, Work::Send { gather, message, total, gate });
    }

    /// Waits until an eventfd is signalled, and resets its count to zero. The completion's result
    /// is 0, or -ECANCELED after [`Ring::detach_event`]. An eventfd can have one such wait at a
    /// time.
    pub fn await_event(&mut self, token: Token, fd: Fd) {
        self.start(token, fd, Work::AwaitEvent);
    }

    /// Detaches an eventfd, as [`Ring::detach`] does. The operations that wait for the eventfd
    /// complete.
    pub fn detach_event(&mut self, fd: Fd) {
        self.end_waits(fd);
        self.detach(fd);
    }

    /// Adds one to an eventfd. The completion's result is 0. The completion of a signal does not
    /// wake a waiting ring.
    pub fn signal(&mut self, token: Token, fd: Fd) {
        self.start(token, fd, Work::Signal);
    }

    /// Creates a completion without an operation, for callers that already know the result.
    pub fn post(&mut self, token: Token, result: i32) {
        self.ready.push_back(Completion { token, result, returned: Returned::None });
    }

    /// Submits started operations and waits until one completes, a [`Waker`] wakes, or `timeout`
    /// expires; `None` waits for ever. Before it sleeps, the function polls for up to `spin`.
    /// Polling avoids the latency of a wake-up at the cost of CPU time. The function may return
    /// early.
    ///
    /// # Errors
    /// Returns an error of the kernel. No such error is known, and the ring remains usable after
    /// one.
    pub fn submit_and_wait(&mut self, spin: Duration, timeout: Option<Duration>) -> io::Result<()> {
        self.run_waiting();
        let awake = self.waker.take() || !self.ready.is_empty();
        let (spin, timeout) = match awake {
            true => (Duration::ZERO, Some(Duration::ZERO)),
            false if self.gated.is_empty() => (spin, timeout),
            // A send waits until its gate opens.
            false => (spin, Some(timeout.map_or(GATE_INTERVAL, |timeout| timeout.min(GATE_INTERVAL)))),
        };
        let result = match &mut self.driver {
            Driver::Uring(uring) => uring.wait(spin, timeout),
            Driver::Threads(threads) => threads.wait(spin, timeout),
        };
        self.waker.take();
        result
    }

    /// Returns the number of reads and writes of devices that were started and not submitted.
    pub fn unsubmitted(&self) -> usize {
        self.unsubmitted
    }

    /// Submits started operations without waiting if at least `count` of them read or write a
    /// device. Then the device works while the caller prepares more operations.
    ///
    /// # Errors
    /// Returns the same errors as [`Ring::submit_and_wait`].
    pub fn submit_early(&mut self, count: usize) -> io::Result<()> {
        match &mut self.driver {
            Driver::Uring(uring) if self.unsubmitted >= count => {
                self.unsubmitted = 0;
                uring.submit_now()
            }
            _ => Ok(()),
        }
    }

    /// Submits started operations and polls, for at most `spin`, until one completes or `look`
    /// returns true. Returns false if neither happened within `spin`. With the thread pool, this
    /// function checks once and does not poll, because the pool's threads need the CPU.
    pub fn watch(&mut self, spin: Duration, mut look: impl FnMut() -> bool) -> bool {
        if self.waker.take() || !self.ready.is_empty() || look() {
            return true;
        }
        // An operation whose gate is open must be submitted before the gate can close.
        self.run_waiting();
        let has_ended = !self.ready.is_empty();
        let spin = if has_ended { Duration::ZERO } else { spin };
        match &mut self.driver {
            Driver::Uring(uring) => uring.watch(spin, look) || has_ended,
            Driver::Threads(_) => has_ended,
        }
    }

    /// Submits started operations and sleeps until `events` operations have completed, for at most
    /// `nap`. The caller then handles these operations together: fewer wake-ups and longer sends,
    /// at the cost of latency. The thread pool waits as usual.
    ///
    /// # Errors
    /// Returns the same errors as [`Ring::submit_and_wait`].
    pub fn submit_and_nap(&mut self, events: usize, nap: Duration) -> io::Result<()> {
        self.run_waiting();
        match &mut self.driver {
            Driver::Uring(uring) if self.ready.is_empty() && !self.waker.take() => uring.nap(events, nap),
            _ => self.submit_and_wait(Duration::ZERO, Some(nap)),
        }
    }

    /// Returns the next completed operation; `None` if there is none.
    pub fn next_completion(&mut self) -> Option<Completion> {
        loop {
            if let Some(completion) = self.ready.pop_front() {
                return Some(completion);
            }
            let ended = match &mut self.driver {
                Driver::Uring(uring) => uring.next(),
                Driver::Threads(threads) => threads.next(),
            };
            let Some(ended) = ended else {
                let (op, result) = self.next_worked()?;
                self.advance(op, result);
                continue;
            };
            self.fds[self.ops[ended.op as usize].fd.index as usize].more_to_receive = ended.more_to_receive;
            self.advance(ended.op, ended.result);
        }
    }

    /// Performs I/O of a file in memory synchronously.
    fn run_now(&mut self, token: Token, fd: Fd, offset: u64, slice: BufferSlice, traffic: Traffic) {
        let arena = &mut self.arena;
        let file = self.fds[usize::from(fd.index)].file.as_ref().expect("an entry in use has a file");
        let result = match traffic {
            Traffic::KernelWrites if arena.is_shared(slice.id) => {
                op::read_shared_now(file, offset, slice, arena)
            }
            Traffic::KernelWrites => op::read_now(file, offset, arena.slice_mut(slice)),
            Traffic::KernelReads => op::write_now(file, offset, arena.slice(slice)),
        };
        let result = match result {
            Ok(()) => slice.len as i32,
            Err(errno) => -errno.raw_os_error(),
        };
        self.post(token, result);
    }

    fn start(&mut self, token: Token, fd: Fd, work: Work) {
        let entry = self.entry_mut(fd);
        entry.in_flight += 1;
        let pace = if entry.patient { Pace::Patient } else { Pace::AtOnce };
        self.in_flight += 1;
        let op = Op { token, fd, done: 0, pace, work };
        let index = match self.free_ops.pop() {
            Some(index) => {
                self.ops[index as usize] = op;
                index
            }
            None => {
                self.ops.push(op);
                self.ops.len() as u32 - 1
            }
        };
        self.attempt(index);
    }

    /// Checks that the arena is the I/O ring's own, because operations contain its addresses.
    fn assert_own_arena(&self) {
        let own = self.memory.as_ref().is_some_and(|memory| Arc::ptr_eq(memory, self.arena.memory()));
        assert!(own, "the ring's arena was exchanged");
    }

    /// Starts an operation, or its remaining part.
    fn attempt(&mut self, index: u32) {
        self.assert_own_arena();
        let op = &mut self.ops[index as usize];
        let entry = &self.fds[usize::from(op.fd.index)];
        if entry.volatile.is_some() {
            return self.held.push(index);
        }
        if entry.detached && matches!(op.work, Work::AwaitEvent | Work::Signal) {
            return self.complete(index, -libc::ECANCELED);
        }
        let arena = &self.arena;
        let attempt = op.attempt(arena);
        if matches!(attempt, Attempt::Nothing) {
            return self.advance(index, 0);
        }
        let gate = entry.gate.clone().filter(|_| attempt.is_change());
        match (&mut self.driver, gate) {
            _ if attempt.is_send() && op.send_gate().is_some() => self.gated.push(index),
            (Driver::Threads(threads), _) => threads.start(index, op.fd.index, entry, attempt),
            (Driver::Uring(uring), None) => uring.start(index, op.fd.index, entry, attempt),
            (Driver::Uring(_), Some(_))
                if matches!(attempt, Attempt::Write { .. }) && op.pace == Pace::AtOnce =>
            {
                self.gated.push(index);
            }
            (Driver::Uring(_), gate) => {
                let (limits, waker) = (self.worker_limits, &self.waker);
                let workers = self.workers.get_or_insert_with(|| Workers::new(limits, waker));
                workers.start(Job { op: index, fd: entry.raw(), attempt, gate });
            }
        }
    }

    /// Starts operations that wait for the next system call, such as writes with a gate.
    fn run_waiting(&mut self) {
        self.unsubmitted = 0;
        self.run_held();
        for index in std::mem::take(&mut self.gated) {
            let op = &mut self.ops[index as usize];
            let entry = &self.fds[usize::from(op.fd.index)];
            let attempt = op.attempt(&self.arena);
            let is_open = match op.send_gate() {
                Some(gate) => gate.is_open(),
                None => entry.gate.as_ref().is_none_or(|gate| gate.is_open()),
            };
            match &mut self.driver {
                _ if !is_open && op.send_gate().is_some() && !entry.is_shut => self.gated.push(index),
                _ if !is_open => self.advance(index, -libc::ECANCELED),
                Driver::Uring(uring) => uring.start(index, op.fd.index, entry, attempt),
                Driver::Threads(threads) => threads.start(index, op.fd.index, entry, attempt),
            }
        }
    }

    /// Returns the next operation that an additional thread has ended.
    fn next_worked(&mut self) -> Option<(u32, i32)> {
        if let Some(workers) = self.workers.as_ref().filter(|_| self.worked.is_empty()) {
            self.worked.extend(workers.take_done());
        }
        self.worked.pop_front()
    }

    /// Handles the end of an attempt: continues or completes the operation. `result` is the result
    /// of the system call.
    fn advance(&mut self, index: u32, result: i32) {
        let op = &mut self.ops[index as usize];
        match op.judge(result) {
            op::Verdict::Again => {
                if matches!(op.work, Work::Signal) && op.pace == Pace::Patient {
                    self.fds[usize::from(op.fd.index)].patient = true;
                }
                self.attempt(index)
            }
            op::Verdict::Ended(result) => self.complete(index, result),
        }
    }

    fn complete(&mut self, index: u32, result: i32) {
        self.assert_own_arena();
        let op = &mut self.ops[index as usize];
        let (token, fd) = (op.token, op.fd);
        let arena = &mut self.arena;
        let returned = match std::mem::replace(&mut op.work, Work::Vacant) {
            Work::Vacant => unreachable!("an operation completes once"),
            Work::Fsync | Work::Fallocate { .. } | Work::Readable | Work::Signal => Returned::None,
            Work::AwaitEvent => {
                if let Some(event) = self.fds[usize::from(fd.index)].file.as_ref().filter(|_| result == 0) {
                    op::clear_event(event);
                }
                Returned::None
            }
            Work::Read { slice, parts, .. } => {
                arena.unpin(slice, Traffic::KernelWrites);
                self.messages.extend(parts);
                Returned::None
            }
            Work::RecvInto(slice) => {
                arena.unpin(slice, Traffic::KernelWrites);
                Returned::None
            }
            Work::Write { slice, .. } => {
                arena.unpin(slice, Traffic::KernelReads);
                Returned::None
            }
            Work::Recv(rx) => Returned::Rx(rx),
            Work::Send { gather, message, .. } => {
                for piece in &gather.pieces {
                    if let GatherPart::Payload(slice) = piece {
                        arena.unpin(*slice, Traffic::KernelReads);
                    }
                }
                self.messages.push(message);
                Returned::Gather(gather)
            }
        };
        self.free_ops.push(index);
        self.in_flight -= 1;
        let entry = &mut self.fds[usize::from(fd.index)];
        entry.in_flight -= 1;
        if entry.detached && entry.in_flight == 0 {
            self.close(fd.index);
        }
        self.ready.push_back(Completion { token, result, returned });
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for index in 0..self.fds.len() {
            let entry = &self.fds[index];
            match (entry.class, &entry.file) {
                (FdClass::Socket, Some(file)) => {
                    let _ = rustix::net::shutdown(file, rustix::net::Shutdown::Both);
                    self.fds[index].is_shut = true;
                }
                (FdClass::Device | FdClass::Event, Some(_)) => {
                    self.end_waits(Fd { index: index as u16, generation: entry.generation });
                }
                _ => {}
            }
        }
        let deadline = std::time::Instant::now() + DRAIN_MAX;
        while self.in_flight > 0 {
            while self.next_completion().is_some() {}
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            if self.in_flight == 0 || left.is_zero() {
                break;
            }
            if let Driver::Uring(uring) = &mut self.driver {
                uring.cancel_all();
            }
            let _ = self.submit_and_wait(Duration::ZERO, Some(left.min(Duration::from_millis(50))));
        }
        if self.in_flight > 0 {
            // A device that does not answer may write into these buffers later. Leaking them
            // ensures that its data never appears in reused memory.
            tracing::warn!(
                operations = self.in_flight,
                "dropping a ring with I/O in flight; its buffers are leaked"
            );
            std::mem::forget(self.memory.take());
            self.arena.leak_shared();
            std::mem::forget(std::mem::take(&mut self.ops));
            std::mem::forget(std::mem::take(&mut self.fds));
        }
    }
}
