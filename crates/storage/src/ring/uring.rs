//! The ring's driver over io_uring.
//!
//! Submissions are batched: one `io_uring_enter` submits them, waits, and runs the completions
//! (DEFER_TASKRUN). So a shard under load needs less than one system call per I/O. SQPOLL is not
//! used, because it needs a core per shard. IOPOLL is not used, because it excludes sockets.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use hob_engine::io::Durability;
use io_uring::squeue::{Entry, Flags};
use io_uring::{IoUring, cqueue, opcode, types};

use super::op::{Attempt, Pace};
use super::waker::Waker;
use super::{FdClass, FdEntry};
use crate::buffers::Arena;

/// Number of descriptors in the kernel's table. Registered descriptors save a look-up for each
/// operation.
const FIXED_FILES: u32 = 1024;

/// Maximum number of kernel workers for blocking operations, per I/O ring.
pub(super) const WORKERS_MAX: u32 = 1024;

/// User data of the read that wakes the I/O ring.
const WAKE: u64 = u64::MAX;

/// User data of a cancellation; its completion is ignored.
const CANCEL: u64 = u64::MAX - 1;

/// IORING_RECVSEND_POLL_FIRST: wait for bytes before trying to receive.
const POLL_FIRST: u16 = 1;

/// Number of polls between two reads of the clock.
const LOOKS_PER_CLOCK: u32 = 64;

/// The value written to an eventfd to signal it.
static ONE: [u8; 8] = 1u64.to_ne_bytes();

/// Flag in the user data of inline attempts, which end while they are submitted. The bits above it
/// are the attempt's number, the bits below are its operation's index.
const HASTY: u64 = 1 << 32;

/// Number of values for the number of an inline attempt. After this many attempts, values are
/// reused.
const NUMBERS: u32 = 1 << 30;

/// An inline attempt, which ends while it is submitted.
#[derive(Clone, Copy, Debug)]
struct Hasty {
    op: u32,
    /// Number that distinguishes the attempt from earlier ones with the same operation index.
    number: u32,
    /// Result of the attempt, unless the kernel reports a failure.
    result: i32,
    /// Whether the thread must not sleep before it has seen the attempt's end, because the attempt
    /// uses memory or other operations wait for it.
    is_awaited: bool,
}

impl Hasty {
    fn name(&self) -> u64 {
        HASTY | u64::from(self.number) << 33 | u64::from(self.op)
    }
}

/// Inline attempts, which end while they are submitted. The kernel reports only failures.
#[derive(Debug, Default)]
struct InlineCompletions {
    queued: Vec<Hasty>,
    submitted: VecDeque<Hasty>,
    /// Number of the last inline attempt.
    number: u32,
    /// True if the kernel has reported all failures of the submitted attempts, so that the other
    /// attempts have succeeded.
    is_sure: bool,
}

impl InlineCompletions {
    /// Returns a number that no inline attempt uses.
    fn next_number(&mut self) -> u32 {
        self.number = (self.number + 1) % NUMBERS;
        self.number
    }

    /// Records that an inline attempt failed. Returns false if the attempt already counts as done.
    fn forget(&mut self, name: u64) -> bool {
        let is_it = |hasty: &Hasty| hasty.name() == name;
        let known = self.queued.len() + self.submitted.len();
        self.queued.retain(|queued| !is_it(queued));
        self.submitted.retain(|submitted| !is_it(submitted));
        self.queued.len() + self.submitted.len() < known
    }

    /// Returns true if the thread must see the end of an inline attempt before it sleeps. The
    /// attempt may be submitted or not.
    fn are_awaited(&self) -> bool {
        self.queued.iter().any(|queued| queued.is_awaited) || self.have_ended()
    }

    /// Returns true if an awaited inline attempt has ended.
    fn have_ended(&self) -> bool {
        self.submitted.iter().any(|submitted| submitted.is_awaited)
    }
}

/// A completed attempt of an operation.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) op: u32,
    pub(super) result: i32,
    pub(super) more_to_receive: bool,
}

pub(super) struct Uring {
    ring: IoUring,
    backlog: VecDeque<Entry>,
    waker: Waker,
    /// Memory in which the kernel stores the eventfd's count, which is not used.
    wake_count: *mut u64,
    wake_awaited: bool,
    /// Address range of the arena, if it is registered with the kernel.
    fixed_memory: std::ops::Range<usize>,
    fixed_files: bool,
    poll_first: bool,
    /// Whether this kernel can report only the failures of attempts, without a completion for each
    /// success.
    can_skip: bool,
    hasty: InlineCompletions,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("backlog", &self.backlog.len()).finish_non_exhaustive()
    }
}

impl Uring {
    pub(super) fn new(entries: u32, arena: &Arena, waker: &Waker) -> io::Result<Uring> {
        let modern = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_coop_taskrun()
            .setup_submit_all()
            .setup_cqsize(entries * 4)
            .setup_clamp()
            .build(entries);
        let (ring, poll_first) = match modern {
            Ok(ring) => (ring, true),
            Err(_) => (IoUring::builder().setup_cqsize(entries * 4).setup_clamp().build(entries)?, false),
        };
        // Each operation on a file of a hanging filesystem keeps a kernel worker. The default
        // maximum, four per CPU, would soon be reached, and the fsync of every other disk would
        // wait. Older kernels do not allow a change of the maximum.
        if let Err(error) = ring.submitter().register_iowq_max_workers(&mut [WORKERS_MAX, 0]) {
            tracing::debug!(%error, "the maximum number of io_uring workers cannot be raised");
        }
        // hob needs timed waits (5.11), stable submissions and no dropped completions. On older
        // kernels, hob uses `threads.rs` instead.
        let params = ring.params();
        if !(params.is_feature_ext_arg() && params.is_feature_nodrop() && params.is_feature_fast_poll()) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel is older than 5.11"));
        }
        let can_skip = params.is_feature_skip_cqe_on_success();
        let (base, len) = arena.region();
        let iovec = libc::iovec { iov_base: base.cast(), iov_len: len };
        // SAFETY: the arena's mapping outlives this I/O ring: `Ring` drops the driver first or
        // leaks the arena. Registering only pins pages, so Rust's own use of them is not disturbed.
        let fixed_memory = match unsafe { ring.submitter().register_buffers(&[iovec]) } {
            Ok(()) => base as usize..base as usize + len,
            Err(error) => {
                tracing::debug!(%error, "buffers are not registered with io_uring (RLIMIT_MEMLOCK \
                    is too low), so the kernel pins memory for each I/O");
                0..0
            }
        };
        let fixed_files = ring.submitter().register_files_sparse(FIXED_FILES).is_ok();
        let mut uring = Uring {
            ring,
            backlog: VecDeque::new(),
            waker: waker.clone(),
            wake_count: Box::into_raw(Box::new(0)),
            wake_awaited: false,
            fixed_memory,
            fixed_files,
            poll_first,
            can_skip,
            hasty: InlineCompletions::default(),
        };
        uring.await_wake();
        Ok(uring)
    }

    /// Registers a descriptor in the kernel's table. Returns false if operations must use the
    /// descriptor itself.
    pub(super) fn register(&mut self, index: u16, fd: RawFd) -> bool {
        self.fixed_files
            && u32::from(index) < FIXED_FILES
            && self.ring.submitter().register_files_update(u32::from(index), &[fd]).is_ok()
    }

    pub(super) fn unregister(&mut self, index: u16) {
        let result = self.ring.submitter().register_files_update(u32::from(index), &[-1]);
        assert!(result.is_ok(), "taking a descriptor out of the kernel's table works: {result:?}");
    }

    pub(super) fn start(&mut self, op: u32, index: u16, entry: &FdEntry, attempt: Attempt) {
        let sqe = match entry.fixed {
            true => self.entry(i32::from(index), entry, attempt).flags(Flags::FIXED_FILE),
            false => self.entry(entry.raw(), entry, attempt),
        };
        // FUSE waits for its server even if the kernel asks it not to block.
        let sqe = if entry.class == FdClass::Foreign { sqe.flags(Flags::ASYNC) } else { sqe };
        if let Some(result) = attempt.result_at_once().filter(|_| self.can_skip) {
            // An attempt that has to wait for room in the queue is reported normally.
            let is_awaited = !matches!(attempt, Attempt::Signal(_));
            let hasty = Hasty { op, number: self.hasty.next_number(), result, is_awaited };
            let skipping = sqe.clone().flags(Flags::SKIP_SUCCESS).user_data(hasty.name());
            if self.backlog.is_empty() && self.try_push(&skipping) {
                return self.hasty.queued.push(hasty);
            }
        }
        self.push(sqe.user_data(u64::from(op)));
    }

    fn entry(&self, fd: i32, entry: &FdEntry, attempt: Attempt) -> Entry {
        let fd = types::Fd(fd);
        let send_flags = |pace| {
            libc::MSG_NOSIGNAL
                | libc::MSG_WAITALL
                | match pace {
                    Pace::AtOnce => libc::MSG_DONTWAIT,
                    Pace::Patient => 0,
                }
        };
        match attempt {
            Attempt::Nothing => unreachable!("nothing needs no entry"),
            Attempt::Read { to, len, offset } if self.is_fixed(to) => {
                opcode::ReadFixed::new(fd, to, len, 0).offset(offset).build()
            }
            Attempt::Read { to, len, offset } => opcode::Read::new(fd, to, len).offset(offset).build(),
            Attempt::ReadParts { parts, count, offset } => {
                opcode::Readv::new(fd, parts, count).offset(offset).build()
            }
            Attempt::Write { from, len, offset, durability } => {
                let flags = match durability {
                    Durability::Durable => libc::RWF_DSYNC,
                    Durability::Volatile => 0,
                };
                // A write that would block ends with EAGAIN, instead of in a kernel queue.
                let flags = if entry.gate.is_some() { flags | libc::RWF_NOWAIT } else { flags };
                if self.is_fixed(from) {
                    return opcode::WriteFixed::new(fd, from, len, 0).offset(offset).rw_flags(flags).build();
                }
                opcode::Write::new(fd, from, len).offset(offset).rw_flags(flags).build()
            }
            Attempt::Fsync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            Attempt::Fallocate { mode, offset, len } => {
                opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build()
            }
            Attempt::Recv { to, len } => {
                let first = if self.poll_first && !entry.more_to_receive { POLL_FIRST } else { 0 };
                opcode::Recv::new(fd, to, len).ioprio(first).build()
            }
            Attempt::RecvAll { to, len } => opcode::Recv::new(fd, to, len).flags(libc::MSG_WAITALL).build(),
            Attempt::Send { from, len, pace } => {
                opcode::Send::new(fd, from, len).flags(send_flags(pace)).build()
            }
            Attempt::Poll => opcode::PollAdd::new(fd, libc::POLLIN as u32).build(),
            Attempt::AwaitRoom => opcode::PollAdd::new(fd, libc::POLLOUT as u32).build(),
            Attempt::Signal(pace) => {
                let flags = if pace == Pace::AtOnce { libc::RWF_NOWAIT } else { 0 };
                opcode::Write::new(fd, ONE.as_ptr(), ONE.len() as u32).rw_flags(flags).build()
            }
            Attempt::SendMessage { header, pace, .. } => {
                opcode::SendMsg::new(fd, header).flags(send_flags(pace) as u32).build()
            }
        }
    }

    fn is_fixed(&self, address: *const u8) -> bool {
        self.fixed_memory.contains(&(address as usize))
    }

    fn push(&mut self, entry: Entry) {
        if self.backlog.is_empty() && self.try_push(&entry) {
            return;
        }
        self.backlog.push_back(entry);
        self.push_backlog();
    }

    fn try_push(&mut self, entry: &Entry) -> bool {
        // SAFETY: the addresses in an entry belong to its operation, whose memory stays in place
        // until the kernel reports its end (see `Ring`'s guarantees).
        unsafe { self.ring.submission().push(entry).is_ok() }
    }

    /// Moves waiting entries into the submission queue, as far as the queue has space.
    fn push_backlog(&mut self) {
        while let Some(entry) = self.backlog.pop_front() {
            let pushed =
                self.try_push(&entry) || (self.submit().is_ok_and(|n| n > 0) && self.try_push(&entry));
            if !pushed {
                self.backlog.push_front(entry);
                return;
            }
        }
    }

    /// Submits all queued entries to the kernel.
    fn submit(&mut self) -> io::Result<usize> {
        let result = self.ring.submit();
        self.note_submitted();
        result
    }

    fn note_submitted(&mut self) {
        if self.ring.submission().is_empty() {
            self.hasty.is_sure &= self.hasty.queued.is_empty();
            self.hasty.submitted.extend(self.hasty.queued.drain(..));
        }
    }

    fn await_wake(&mut self) {
        let fd = types::Fd(self.waker.event().as_raw_fd());
        let read = opcode::Read::new(fd, self.wake_count.cast(), 8).build();
        self.push(read.user_data(WAKE));
        self.wake_awaited = true;
    }

    /// Submits the queued entries without waiting.
    pub(super) fn submit_now(&mut self) -> io::Result<()> {
        self.push_backlog();
        quiet(self.submit())
    }

    pub(super) fn wait(&mut self, spin: Duration, timeout: Option<Duration>) -> io::Result<()> {
        self.push_backlog();
        let dont_wait = timeout == Some(Duration::ZERO) || !self.ring.completion().is_empty();
        if dont_wait || !spin.is_zero() || self.hasty.are_awaited() {
            if !self.ring.submission().is_empty() || self.ring.submission().taskrun() {
                quiet(self.submit())?;
            }
            if dont_wait || (!spin.is_zero() && self.spin(spin, || false)) {
                return Ok(());
            }
            // The kernel does not report the end of an inline attempt, so nothing would wake the
            // thread to handle it.
            if self.hasty.have_ended() {
                return Ok(());
            }
        }
        self.enter(1, timeout)
    }

    /// Submits, and waits until `events` completions are available, for at most `nap`.
    pub(super) fn nap(&mut self, events: usize, nap: Duration) -> io::Result<()> {
        self.push_backlog();
        self.enter(events.min(usize::from(u16::MAX)), Some(nap))
    }

    fn enter(&mut self, events: usize, timeout: Option<Duration>) -> io::Result<()> {
        let timespec = timeout.map(types::Timespec::from);
        let result = match &timespec {
            None => self.ring.submit_and_wait(events),
            Some(timespec) => {
                let args = types::SubmitArgs::new().timespec(timespec);
                self.ring.submitter().submit_with_args(events, &args)
            }
        };
        self.note_submitted();
        quiet(result)
    }

    /// Submits, and polls until there are completions or `look` returns true.
    pub(super) fn watch(&mut self, spin: Duration, look: impl FnMut() -> bool) -> bool {
        self.push_backlog();
        let queued = !self.ring.submission().is_empty() || self.ring.submission().taskrun();
        if queued && quiet(self.submit()).is_err() {
            return false;
        }
        self.spin(spin, look)
    }

    /// Polls for completions without a system call. Returns true if there are some, or if `look`
    /// returns true.
    fn spin(&mut self, limit: Duration, mut look: impl FnMut() -> bool) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                if !self.ring.completion().is_empty() {
                    return true;
                }
                if self.ring.submission().taskrun() {
                    // The kernel posts deferred completions only in a system call that requests
                    // them.
                    let _ = self.submit();
                    if !self.ring.completion().is_empty() {
                        return true;
                    }
                }
                if look() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= limit {
                return false;
            }
        }
    }

    pub(super) fn next(&mut self) -> Option<Ended> {
        loop {
            let Some(entry) = self.ring.completion().next() else {
                if self.run_deferred() {
                    continue;
                }
                // The attempt ended while it was submitted. The kernel would have reported a
                // failure by now, so the attempt has succeeded.
                let Hasty { op, result, .. } = self.hasty.submitted.pop_front()?;
                return Some(Ended { op, result, more_to_receive: false });
            };
            let more_to_receive = cqueue::sock_nonempty(entry.flags());
            match entry.user_data() {
                WAKE if entry.result() == -libc::ECANCELED => self.wake_awaited = false,
                WAKE => self.await_wake(),
                CANCEL => {}
                // A late report of an attempt whose operation counts as complete. Another operation
                // may have the same index now.
                name if name & HASTY != 0 && !self.hasty.forget(name) => {}
                name => return Some(Ended { op: name as u32, result: entry.result(), more_to_receive }),
            }
        }
    }

    /// Takes completions that the kernel did not report immediately: the completion queue was full,
    /// or the kernel defers the completion, for example that of a failed write. The caller must
    /// call this function before it counts unreported attempts as successful. Returns false if
    /// there was no such completion.
    fn run_deferred(&mut self) -> bool {
        if self.hasty.submitted.is_empty() || self.hasty.is_sure {
            return false;
        }
        self.hasty.is_sure = true;
        let is_late = self.ring.submission().cq_overflow() || self.ring.submission().taskrun();
        // `is_sure` limits this to one attempt, because the kernel may set the flag for work that
        // it has just completed, and may leave the flag set.
        if is_late && self.submit().is_ok() && !self.ring.completion().is_empty() {
            // There may be more completions than one call handles.
            self.hasty.is_sure = false;
        }
        !self.hasty.is_sure
    }

    /// Requests the cancellation of an operation.
    pub(super) fn cancel(&mut self, op: u32) {
        self.push(opcode::AsyncCancel::new(u64::from(op)).build().user_data(CANCEL));
    }

    /// Requests the cancellation of all operations.
    pub(super) fn cancel_all(&mut self) {
        let all = types::CancelBuilder::any();
        self.push(opcode::AsyncCancel2::new(all).build().user_data(CANCEL));
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The read of the eventfd is still in the I/O ring, and ends when the eventfd is written
        // to. The kernel may write to `wake_count` until then. So `wake_count` is freed only after
        // the completion of the read.
        self.waker.signal();
        let deadline = Instant::now() + Duration::from_secs(1);
        while self.wake_awaited && Instant::now() < deadline {
            let timespec = types::Timespec::from(Duration::from_millis(50));
            let args = types::SubmitArgs::new().timespec(&timespec);
            let _ = self.ring.submitter().submit_with_args(1, &args);
            self.wake_awaited = !self.ring.completion().any(|entry| entry.user_data() == WAKE);
        }
        if !self.wake_awaited {
            // SAFETY: `Box::into_raw` returned this address, and the kernel does not use it any
            // more.
            drop(unsafe { Box::from_raw(self.wake_count) });
        }
    }
}

/// Returns success if a wait was interrupted, timed out, or found the completion queue full. These
/// results are not errors of a wait.
fn quiet(result: io::Result<usize>) -> io::Result<()> {
    match result {
        Ok(_) => Ok(()),
        Err(error) => match error.raw_os_error() {
            Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN) => Ok(()),
            _ => Err(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_completion_is_distinguished_from_a_new_operation_with_the_same_number() {
        let mut inline_completions = InlineCompletions::default();
        let mut new =
            || Hasty { op: 3, number: inline_completions.next_number(), result: 0, is_awaited: false };
        let (late, present) = (new(), new());
        inline_completions.queued.push(present);
        assert!(!inline_completions.forget(late.name()), "that one counts as done");
        assert!(inline_completions.forget(present.name()) && inline_completions.queued.is_empty());
        assert!(!inline_completions.forget(present.name()));
        assert_eq!(late.name() as u32, 3, "the operation is the lower half");
    }
}
