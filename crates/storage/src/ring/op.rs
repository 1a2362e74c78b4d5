//! One operation of the I/O ring: its memory, its attempts, and its result.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use hob_engine::gather::{Gather, GatherPart};
use hob_engine::io::{BufferSlice, Durability};
use rustix::io::Errno;

use super::{Fd, Gate};
use crate::buffers::{Arena, Part};
use crate::token::Token;

/// Maximum number of iovecs in one sendmsg; the kernel's UIO_MAXIOV.
const IOVECS_MAX: usize = 1024;

/// Alignment of O_DIRECT transfers. If the length of a short read is not a multiple of this
/// alignment, the read has reached the end of the file.
const DIRECT_BYTES_MIN: u32 = 512;

/// A receive buffer: received bytes, and space for more.
#[derive(Debug, Default)]
pub struct RxBuf {
    // A `Vec` and not a `Box<[u8]>`: the kernel writes to it while it is moved, which the aliasing
    // rules forbid for boxes.
    bytes: Vec<u8>,
    filled: usize,
}

impl RxBuf {
    /// Creates a buffer of `capacity` bytes.
    pub fn new(capacity: usize) -> RxBuf {
        RxBuf { bytes: vec![0; capacity], filled: 0 }
    }

    /// Creates a buffer of `capacity` bytes that starts with `received`.
    pub fn with(capacity: usize, received: &[u8]) -> RxBuf {
        let mut rx = RxBuf::new(capacity.max(received.len()));
        rx.bytes[..received.len()].copy_from_slice(received);
        rx.filled = received.len();
        rx
    }

    /// Returns the received bytes that were not consumed.
    pub fn filled(&self) -> &[u8] {
        &self.bytes[..self.filled]
    }

    /// Removes the first `count` received bytes and moves the others to the front.
    pub fn consume(&mut self, count: usize) {
        assert!(count <= self.filled, "only what was received can be consumed");
        self.bytes.copy_within(count..self.filled, 0);
        self.filled -= count;
    }

    /// Returns the free space in the receive buffer, bytes.
    pub fn room(&self) -> usize {
        self.bytes.len() - self.filled
    }
}

/// Memory that a completion hands back to the caller.
#[derive(Debug)]
pub enum Returned {
    /// The completion returns no memory.
    None,
    /// The buffer of a receive.
    Rx(RxBuf),
    /// The list of buffers of a send.
    Gather(Gather),
}

/// A completed operation of the I/O ring.
#[derive(Debug)]
pub struct Completion {
    /// The token of the operation.
    pub token: Token,
    /// Number of bytes transferred, or a negative errno.
    pub result: i32,
    /// Memory that the operation returns to the caller.
    pub returned: Returned,
}

/// An operation in flight. The operation's memory must stay in place until the attempt has ended.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) token: Token,
    pub(super) fd: Fd,
    /// Number of bytes that earlier attempts have transferred.
    pub(super) done: u32,
    /// Whether the next attempt may block. This matters only for sends, signals, and writes to a
    /// file that has a [`Gate`](super::Gate).
    pub(super) pace: Pace,
    pub(super) work: Work,
}

/// Whether an attempt may block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// The attempt does not block: it ends while it is submitted. If the kernel supports this, the
    /// kernel reports the end of such a send or signal only if the attempt failed or was
    /// incomplete.
    AtOnce,
    /// The attempt may block: an earlier attempt was incomplete, or the descriptor does not support
    /// attempts that do not block.
    Patient,
}

#[derive(Debug)]
pub(super) enum Work {
    Vacant,
    /// A read. If the buffer is outside the arena, `parts` has space for the list of its parts.
    Read {
        slice: BufferSlice,
        offset: u64,
        parts: Option<Box<Message>>,
    },
    Write {
        slice: BufferSlice,
        offset: u64,
        durability: Durability,
    },
    Fsync,
    Fallocate {
        mode: i32,
        offset: u64,
        len: u64,
    },
    Recv(RxBuf),
    RecvInto(BufferSlice),
    Readable,
    Send {
        gather: Gather,
        message: Box<Message>,
        total: usize,
        /// Gate that must be open when data is sent. A send with a gate waits for room in the
        /// socket with a poll. If it waited in the send itself, the kernel could continue the send
        /// after the gate has closed.
        gate: Option<Arc<dyn Gate>>,
    },
    AwaitEvent,
    Signal,
}

/// One system call. The addresses in an attempt belong to the operation with the same index.
#[derive(Clone, Copy, Debug)]
pub(super) enum Attempt {
    /// No system call is needed.
    Nothing,
    Read {
        to: *mut u8,
        len: u32,
        offset: u64,
    },
    /// Reads as many of the operation's parts as one system call accepts.
    ReadParts {
        parts: *const libc::iovec,
        count: u32,
        offset: u64,
    },
    Write {
        from: *const u8,
        len: u32,
        offset: u64,
        durability: Durability,
    },
    Fsync,
    Fallocate {
        mode: i32,
        offset: u64,
        len: u64,
    },
    /// Receives into memory outside the arena.
    Recv {
        to: *mut u8,
        len: u32,
    },
    /// Receives exactly `len` bytes, or fewer if the peer closes the connection.
    RecvAll {
        to: *mut u8,
        len: u32,
    },
    Send {
        from: *const u8,
        len: u32,
        pace: Pace,
    },
    SendMessage {
        header: *const libc::msghdr,
        len: usize,
        pace: Pace,
    },
    /// Waits until the descriptor is readable or has an error.
    Poll,
    /// Waits until a socket has room for data to send, or has an error.
    AwaitRoom,
    /// Adds one to an eventfd.
    Signal(Pace),
}

impl Attempt {
    /// Returns true if the attempt changes a file.
    pub(super) fn is_change(&self) -> bool {
        matches!(self, Attempt::Write { .. } | Attempt::Fallocate { .. })
    }

    /// Returns true if the attempt sends data.
    pub(super) fn is_send(&self) -> bool {
        matches!(self, Attempt::Send { .. } | Attempt::SendMessage { .. })
    }

    /// Returns the result that a non-blocking send or signal has after its submission, unless the
    /// attempt fails. Returns `None` for all other attempts.
    pub(super) fn result_at_once(&self) -> Option<i32> {
        match *self {
            Attempt::Send { len, pace: Pace::AtOnce, .. } => Some(len as i32),
            Attempt::SendMessage { len, pace: Pace::AtOnce, .. } => Some(len as i32),
            Attempt::Signal(Pace::AtOnce) => Some(0),
            _ => None,
        }
    }
}

/// Meaning of an attempt's result for the operation.
pub(super) enum Verdict {
    /// The operation continues with another attempt.
    Again,
    /// The operation has ended with this result.
    Ended(i32),
}

/// A message header and the buffers that it points to, boxed so that their addresses do not change.
#[derive(Debug)]
pub(super) struct Message {
    header: libc::msghdr,
    iovecs: Vec<libc::iovec>,
}

impl Default for Message {
    fn default() -> Message {
        // SAFETY: a msghdr consists of integers and pointers, all of which may be zero.
        Message { header: unsafe { std::mem::zeroed() }, iovecs: Vec::with_capacity(16) }
    }
}

impl Message {
    /// Fills the header with the parts of `gather` after its first `skip` bytes, at most
    /// `IOVECS_MAX` parts. Returns the number of bytes in these parts.
    fn describe(&mut self, gather: &Gather, skip: usize, arena: &Arena) -> usize {
        let (mut skip, mut described) = (skip, 0);
        self.iovecs.clear();
        for piece in &gather.pieces {
            if skip >= piece.len() {
                skip -= piece.len();
                continue;
            }
            if self.iovecs.len() == IOVECS_MAX {
                break;
            }
            let (from, len) = piece_address(piece, gather, arena);
            let base = from.wrapping_add(skip).cast_mut().cast();
            self.iovecs.push(libc::iovec { iov_base: base, iov_len: len - skip });
            described += len - skip;
            skip = 0;
        }
        self.header.msg_iov = self.iovecs.as_mut_ptr();
        self.header.msg_iovlen = self.iovecs.len();
        described
    }

    /// Returns the memory of a part of a buffer outside the arena, as at most `IOVECS_MAX` pieces.
    fn describe_shared(&mut self, slice: BufferSlice, arena: &Arena) -> &[libc::iovec] {
        let parts = arena.shared_parts(slice).take(IOVECS_MAX);
        self.iovecs.clear();
        self.iovecs.extend(parts.map(|part| libc::iovec { iov_base: part.to.cast(), iov_len: part.len }));
        &self.iovecs
    }
}

fn piece_address(piece: &GatherPart, gather: &Gather, arena: &Arena) -> (*const u8, usize) {
    match piece {
        GatherPart::Head { start, end } => {
            let bytes = &gather.head[*start as usize..*end as usize];
            (bytes.as_ptr(), bytes.len())
        }
        GatherPart::Payload(slice) => (arena.pinned_address(*slice), slice.len as usize),
    }
}

impl Op {
    /// Returns the operation's next attempt.
    pub(super) fn attempt(&mut self, arena: &Arena) -> Attempt {
        let (done, pace) = (self.done, self.pace);
        let rest = |slice: &BufferSlice| {
            (arena.pinned_address(*slice).wrapping_add(done as usize), slice.len - done)
        };
        match &mut self.work {
            Work::Vacant => unreachable!("only an operation in flight is attempted"),
            Work::Read { slice, offset, parts: None } => {
                let (to, len) = rest(slice);
                Attempt::Read { to, len, offset: *offset + u64::from(done) }
            }
            Work::Read { slice, offset, parts: Some(message) } => {
                let rest = BufferSlice { offset: slice.offset + done, len: slice.len - done, ..*slice };
                let offset = *offset + u64::from(done);
                match message.describe_shared(rest, arena) {
                    [part] => Attempt::Read { to: part.iov_base.cast(), len: part.iov_len as u32, offset },
                    parts => Attempt::ReadParts { parts: parts.as_ptr(), count: parts.len() as u32, offset },
                }
            }
            Work::Write { slice, offset, durability } => {
                let (to, len) = rest(slice);
                Attempt::Write { from: to, len, offset: *offset + u64::from(done), durability: *durability }
            }
            Work::Fsync => Attempt::Fsync,
            Work::Fallocate { mode, offset, len } => {
                Attempt::Fallocate { mode: *mode, offset: *offset, len: *len }
            }
            Work::Recv(rx) => {
                let free = &mut rx.bytes[rx.filled..];
                Attempt::Recv { to: free.as_mut_ptr(), len: free.len().min(i32::MAX as usize) as u32 }
            }
            Work::RecvInto(slice) => {
                let (to, len) = rest(slice);
                Attempt::RecvAll { to, len }
            }
            Work::Readable | Work::AwaitEvent => Attempt::Poll,
            Work::Signal => Attempt::Signal(pace),
            Work::Send { total: 0, .. } => Attempt::Nothing,
            Work::Send { gate: Some(_), .. } if pace == Pace::Patient => Attempt::AwaitRoom,
            Work::Send { gather, message, .. } => match &gather.pieces[..] {
                // A single piece needs no message header, which saves kernel time.
                [piece] => {
                    let (from, len) = piece_address(piece, gather, arena);
                    Attempt::Send { from: from.wrapping_add(done as usize), len: len as u32 - done, pace }
                }
                _ => {
                    let len = message.describe(gather, done as usize, arena);
                    Attempt::SendMessage { header: &raw const message.header, len, pace }
                }
            },
        }
    }

    /// Returns the gate of a send that may only start while its gate is open.
    pub(super) fn send_gate(&self) -> Option<&Arc<dyn Gate>> {
        match &self.work {
            Work::Send { gate, .. } => gate.as_ref(),
            _ => None,
        }
    }

    fn is_hasty_write(&self) -> bool {
        matches!(self.work, Work::Signal | Work::Write { .. }) && self.pace == Pace::AtOnce
    }

    /// Decides whether the operation continues or has ended after an attempt with this result.
    pub(super) fn judge(&mut self, result: i32) -> Verdict {
        // EOPNOTSUPP: an eventfd of a kernel, or a file, that does not support non-blocking writes.
        if result == -libc::EAGAIN || (result == -libc::EOPNOTSUPP && self.is_hasty_write()) {
            self.pace = Pace::Patient;
            return Verdict::Again;
        }
        if result == -libc::EINTR {
            return Verdict::Again;
        }
        if result < 0 {
            return Verdict::Ended(result);
        }
        let moved = result as u32;
        match &mut self.work {
            Work::Vacant => unreachable!("only an operation in flight is judged"),
            Work::Fsync | Work::Fallocate { .. } | Work::Readable => Verdict::Ended(result),
            Work::AwaitEvent | Work::Signal => Verdict::Ended(0),
            Work::Recv(rx) => {
                rx.filled += moved as usize;
                assert!(rx.filled <= rx.bytes.len(), "the kernel received at most what fits");
                Verdict::Ended(result)
            }
            Work::Read { slice, .. } => {
                self.done += moved;
                let at_end = moved == 0 || !self.done.is_multiple_of(DIRECT_BYTES_MIN);
                match at_end {
                    _ if self.done == slice.len => Verdict::Ended(slice.len as i32),
                    true => Verdict::Ended(-libc::ENODATA),
                    false => Verdict::Again,
                }
            }
            Work::Write { slice, .. } => {
                self.done += moved;
                match moved {
                    _ if self.done == slice.len => Verdict::Ended(slice.len as i32),
                    0 => Verdict::Ended(-libc::EIO),
                    _ => Verdict::Again,
                }
            }
            Work::RecvInto(slice) => {
                self.done += moved;
                if self.done == slice.len || moved == 0 {
                    return Verdict::Ended(self.done as i32);
                }
                Verdict::Again
            }
            // The socket has room now.
            Work::Send { gate: Some(_), .. } if self.pace == Pace::Patient => {
                self.pace = Pace::AtOnce;
                Verdict::Again
            }
            Work::Send { total, .. } => {
                self.done += moved;
                match moved {
                    _ if self.done as usize == *total => Verdict::Ended(self.done as i32),
                    0 => Verdict::Ended(-libc::EPIPE),
                    _ => {
                        self.pace = Pace::Patient;
                        Verdict::Again
                    }
                }
            }
        }
    }
}

/// Sets an eventfd's count to zero, without blocking.
pub(super) fn clear_event(event: &OwnedFd) {
    let mut count = [0; 8];
    let mut parts = [std::io::IoSliceMut::new(&mut count)];
    // Another process shares the descriptor, so its blocking mode must neither be changed nor
    // relied on.
    let _ = rustix::io::preadv2(event, &mut parts, u64::MAX, rustix::io::ReadWriteFlags::NOWAIT);
}

/// Reads from a file into `bytes` on the calling thread.
pub(crate) fn read_now(file: &OwnedFd, offset: u64, bytes: &mut [u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pread(file, &mut bytes[done..], offset + done as u64) {
            Ok(0) => return Err(Errno::NODATA),
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Reads from a file into memory outside the arena, on the calling thread.
pub(super) fn read_shared_now(
    file: &OwnedFd,
    offset: u64,
    slice: BufferSlice,
    arena: &Arena,
) -> Result<(), Errno> {
    let mut offset = offset;
    for Part { to, len } in arena.shared_parts(slice) {
        let mut done = 0;
        while done < len {
            let to = to.wrapping_add(done).cast();
            // SAFETY: the address is inside a part, which is mapped while the buffer lives, and
            // there is no reference to its bytes.
            match unsafe { libc::pread(file.as_raw_fd(), to, len - done, offset as libc::off_t) } {
                0 => return Err(Errno::NODATA),
                count if count > 0 => {
                    done += count as usize;
                    offset += count as u64;
                }
                _ => match std::io::Error::last_os_error().raw_os_error() {
                    Some(libc::EINTR) => {}
                    errno => return Err(Errno::from_raw_os_error(errno.unwrap_or(libc::EIO))),
                },
            }
        }
    }
    Ok(())
}

/// Writes `bytes` to a file on the calling thread.
pub(super) fn write_now(file: &OwnedFd, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(file, &bytes[done..], offset + done as u64) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
