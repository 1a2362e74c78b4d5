//! The part of the FUSE protocol that serves one file: decodes and checks requests, and encodes
//! answers.
//!
//! Numbers are in the host's byte order. The layouts are those of Linux's `fuse.h`, protocol 7.23
//! and later. A message is one read of /dev/fuse: a header of [`HEADER_BYTES`], the operation's
//! arguments, and the payload of a write. Every length, offset and number is checked before use. An
//! invalid one becomes an errno.

/// Size of a FUSE request's header in bytes.
pub(super) const HEADER_BYTES: usize = 40;

/// Size of a FUSE write's header and arguments in bytes. The payload follows them.
pub(super) const WRITE_HEAD_BYTES: usize = HEADER_BYTES + 40;

/// Maximum length of a read or write in bytes.
pub const TRANSFER_BYTES_MAX: u32 = 1 << 20;

/// Buffer size for one FUSE message in bytes.
pub const MESSAGE_BYTES_MAX: usize = WRITE_HEAD_BYTES + TRANSFER_BYTES_MAX as usize;

/// Inode number of the file, which is also the root of its file system.
const ROOT: u64 = 1;

/// Major version of the FUSE protocol.
const MAJOR: u32 = 7;
/// Oldest minor version that hob supports.
const MINOR_MIN: u32 = 23;
/// Minor version that hob announces.
const MINOR: u32 = 38;

/// Maximum number of background requests in flight. The kernel sends asynchronous direct I/O in the
/// background.
const BACKGROUND_MAX: u16 = 512;

/// Features of FUSE that hob requests if the kernel offers them.
mod flag {
    pub(super) const ASYNC_READ: u64 = 1;
    pub(super) const BIG_WRITES: u64 = 1 << 5;
    pub(super) const ASYNC_DIO: u64 = 1 << 15;
    pub(super) const MAX_PAGES: u64 = 1 << 22;
    pub(super) const INIT_EXT: u64 = 1 << 30;
    /// Allows mmap of files that are opened for direct I/O.
    pub(super) const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub(super) const WANTED: u64 =
        ASYNC_READ | BIG_WRITES | ASYNC_DIO | MAX_PAGES | INIT_EXT | DIRECT_IO_ALLOW_MMAP;
}

/// Flags for the opened file: bypass the page cache, send no flush on close, allow parallel direct
/// writes.
const OPEN_FLAGS: u32 = 1 | 1 << 5 | 1 << 6;

/// Time that the kernel may cache file attributes, seconds. hob does not notify the kernel when
/// another client changes the disk, so the times of the file are outdated for this long.
const ATTRIBUTES_SECONDS: u64 = 1;

const SECOND_NS: u64 = 1_000_000_000;

mod opcode {
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const BATCH_FORGET: u32 = 42;
    pub(super) const FALLOCATE: u32 = 43;
}

mod setattr {
    pub(super) const MODE: u32 = 1;
    pub(super) const UID: u32 = 1 << 1;
    pub(super) const GID: u32 = 1 << 2;
    pub(super) const SIZE: u32 = 1 << 3;
}

mod fallocate {
    pub(super) const KEEP_SIZE: u32 = 1;
    pub(super) const PUNCH_HOLE: u32 = 1 << 1;
    pub(super) const ZERO_RANGE: u32 = 1 << 4;
}

/// `O_DSYNC` on most of Linux's architectures; `O_SYNC` includes this bit.
const O_DSYNC: u32 = 0o10000;

/// A positive errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Errno(pub(super) i32);

impl Errno {
    /// EPERM: the user may not perform the operation, or the file does not allow it.
    pub(super) const PERM: Errno = Errno(1);
    /// EIO: the disk cannot be read or written.
    pub(super) const IO: Errno = Errno(5);
    /// EINVAL: the request is malformed.
    pub(super) const INVAL: Errno = Errno(22);
    /// ENOSPC: a write beyond the end of the file.
    pub(super) const NOSPC: Errno = Errno(28);
    /// EROFS: the file is read-only.
    pub(super) const ROFS: Errno = Errno(30);
    /// ENOSYS: hob does not implement the operation. The kernel does not request it again.
    pub(super) const NOSYS: Errno = Errno(38);
    /// EOPNOTSUPP: not supported for this file.
    pub(super) const OPNOTSUPP: Errno = Errno(95);
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    opcode: u32,
    /// The kernel's id of the request.
    pub(super) unique: u64,
}

/// A decoded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// Negotiate the FUSE version and features.
    Init {
        /// Minor version of the kernel's FUSE protocol.
        minor: u32,
        /// Features that the kernel offers.
        flags: u64,
        /// The kernel's maximum read-ahead in bytes.
        readahead: u32,
    },
    /// Get the file's attributes.
    GetAttributes,
    /// Set some of the file's attributes.
    SetAttributes(Change),
    Open,
    /// Read from the file.
    Read {
        /// First byte.
        offset: u64,
        /// Length in bytes, at most [`TRANSFER_BYTES_MAX`].
        len: u32,
    },
    /// Write to the file. The payload follows the first `WRITE_HEAD_BYTES` of the message.
    Write {
        /// First byte.
        offset: u64,
        /// Length in bytes, at most [`TRANSFER_BYTES_MAX`].
        len: u32,
        /// True if the data must be durable before the answer.
        durable: bool,
    },
    /// Get the file system's size.
    Statfs,
    /// Make all acknowledged writes durable.
    Fsync,
    Zero {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// True if the backing may deallocate the range.
        may_unmap: bool,
        /// True if the part of the range beyond the file's end is ignored. If false, the file would
        /// have to grow.
        keeps_size: bool,
    },
    /// The operation needs no action, and is answered with success.
    Acknowledge,
    /// The operation needs no action and no answer.
    Ignore,
}

/// Attributes of the file to set; an attribute that is `None` does not change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Change {
    /// Size in bytes.
    pub(super) size: Option<u64>,
    /// Permission bits.
    pub(super) mode: Option<u32>,
    /// Owner.
    pub(super) uid: Option<u32>,
    /// Group.
    pub(super) gid: Option<u32>,
}

/// Attributes of the file as reported to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Size in bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// All times of the file, nanoseconds since 1970: that of the mount or of a later change.
    pub time_ns: u64,
}

/// Reads integers at given offsets of a FUSE message's header or arguments. A missing field is an
/// error.
struct Arguments<'a>(&'a [u8]);

impl Arguments<'_> {
    fn u32(&self, at: usize) -> Result<u32, Errno> {
        let bytes = self.0.get(at..at + 4).ok_or(Errno::INVAL)?;
        Ok(u32::from_ne_bytes(bytes.try_into().expect("four bytes")))
    }

    fn u64(&self, at: usize) -> Result<u64, Errno> {
        let bytes = self.0.get(at..at + 8).ok_or(Errno::INVAL)?;
        Ok(u64::from_ne_bytes(bytes.try_into().expect("eight bytes")))
    }
}

/// Decodes a message's header. Returns `None` if the header is invalid: no answer is possible then.
#[inline]
pub(super) fn decode_header(message: &[u8]) -> Option<Header> {
    let head = Arguments(message.get(..HEADER_BYTES)?);
    let len = head.u32(0).ok()?;
    let header = Header { opcode: head.u32(4).ok()?, unique: head.u64(8).ok()? };
    // The kernel never sends a message in parts.
    (len as usize == message.len()).then_some(header)
}

/// Returns true if the answer to the message has the file's attributes.
#[inline]
pub(super) fn asks_for_attributes(message: &[u8]) -> bool {
    let opcode = Arguments(message).u32(4);
    matches!(opcode, Ok(opcode::GETATTR | opcode::SETATTR))
}

/// Decodes the arguments of a FUSE message, after its header.
///
/// # Errors
/// Returns the errno with which the file system answers the request.
#[inline]
pub(super) fn decode(header: Header, message: &[u8]) -> Result<Call, Errno> {
    let node = Arguments(message).u64(16)?;
    let arguments = Arguments(&message[HEADER_BYTES..]);
    let a = &arguments;
    match header.opcode {
        opcode::FORGET | opcode::BATCH_FORGET => return Ok(Call::Ignore),
        // I/O is not cancelled; after ENOSYS the kernel sends no more INTERRUPTs.
        opcode::INTERRUPT => return Err(Errno::NOSYS),
        _ => {}
    }
    if node != ROOT && !matches!(header.opcode, opcode::INIT | opcode::DESTROY) {
        // The file system has only one file.
        return Err(Errno::INVAL);
    }
    match header.opcode {
        opcode::READ => {
            let (offset, len) = (a.u64(8)?, a.u32(16)?);
            if len > TRANSFER_BYTES_MAX {
                return Err(Errno::INVAL);
            }
            Ok(Call::Read { offset, len })
        }
        opcode::WRITE => {
            let (offset, len, flags) = (a.u64(8)?, a.u32(16)?, a.u32(32)?);
            // Check that the last argument is present, and that the payload is complete.
            a.u32(36)?;
            if message.len() != WRITE_HEAD_BYTES + len as usize || len > TRANSFER_BYTES_MAX {
                return Err(Errno::INVAL);
            }
            Ok(Call::Write { offset, len, durable: flags & O_DSYNC != 0 })
        }
        opcode::FSYNC => Ok(Call::Fsync),
        opcode::GETATTR => Ok(Call::GetAttributes),
        opcode::SETATTR => {
            let valid = a.u32(0)?;
            // Check that the structure's last field is present.
            a.u32(84)?;
            let field = |bit, at| (valid & bit != 0).then(|| a.u32(at)).transpose();
            Ok(Call::SetAttributes(Change {
                size: (valid & setattr::SIZE != 0).then(|| a.u64(16)).transpose()?,
                mode: field(setattr::MODE, 68)?,
                uid: field(setattr::UID, 76)?,
                gid: field(setattr::GID, 80)?,
            }))
        }
        opcode::OPEN => Ok(Call::Open),
        opcode::STATFS => Ok(Call::Statfs),
        opcode::FALLOCATE => decode_fallocate(a),
        opcode::INIT => decode_init(a),
        opcode::RELEASE | opcode::FLUSH | opcode::DESTROY => Ok(Call::Acknowledge),
        _ => Err(Errno::NOSYS),
    }
}

fn decode_fallocate(a: &Arguments<'_>) -> Result<Call, Errno> {
    let (offset, len, mode) = (a.u64(8)?, a.u64(16)?, a.u32(24)?);
    if offset.checked_add(len).is_none() || len == 0 {
        return Err(Errno::INVAL);
    }
    let keeps_size = mode & fallocate::KEEP_SIZE != 0;
    match mode & !fallocate::KEEP_SIZE {
        // A hole must read as zeroes, so this is not a discard.
        fallocate::PUNCH_HOLE if keeps_size => Ok(Call::Zero { offset, len, may_unmap: true, keeps_size }),
        fallocate::ZERO_RANGE => Ok(Call::Zero { offset, len, may_unmap: false, keeps_size }),
        // hob cannot reserve space on the backing.
        _ => Err(Errno::OPNOTSUPP),
    }
}

fn decode_init(a: &Arguments<'_>) -> Result<Call, Errno> {
    let (major, minor, readahead) = (a.u32(0)?, a.u32(4)?, a.u32(8)?);
    let low = u64::from(a.u32(12)?);
    if major != MAJOR || minor < MINOR_MIN {
        return Err(Errno(71));
    }
    let high = if low & flag::INIT_EXT != 0 { u64::from(a.u32(16)?) } else { 0 };
    Ok(Call::Init { minor, flags: low | high << 32, readahead })
}

/// An answer to the kernel: its header and fields. The payload of a read is sent after these bytes.
#[derive(Clone, Copy)]
pub struct Answer {
    bytes: [u8; Answer::BYTES_MAX],
    len: u8,
}

impl Answer {
    /// Size of an answer's header in bytes.
    const HEADER_BYTES: usize = 16;
    /// Size of the longest answer in bytes: attributes.
    const BYTES_MAX: usize = Answer::HEADER_BYTES + 104;

    #[inline]
    fn new(unique: u64, error: i32) -> Answer {
        let mut answer = Answer { bytes: [0; Answer::BYTES_MAX], len: Answer::HEADER_BYTES as u8 };
        answer.put(4, &error.to_ne_bytes());
        answer.put(8, &unique.to_ne_bytes());
        answer.seal(0);
        answer
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn put_u32(&mut self, at: usize, value: u32) {
        self.put(Answer::HEADER_BYTES + at, &value.to_ne_bytes());
    }

    fn put_u64(&mut self, at: usize, value: u64) {
        self.put(Answer::HEADER_BYTES + at, &value.to_ne_bytes());
    }

    fn body(mut self, len: usize) -> Answer {
        self.len = (Answer::HEADER_BYTES + len) as u8;
        self.seal(0);
        self
    }

    /// Stores the length of the answer in its header, including `payload` bytes that follow.
    fn seal(&mut self, payload: u32) {
        self.put(0, &(u32::from(self.len) + payload).to_ne_bytes());
    }

    /// Returns the answer's bytes to send before the payload.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Creates a successful answer without data.
    pub(super) fn ok(unique: u64) -> Answer {
        Answer::new(unique, 0)
    }

    /// Creates an answer that reports an error.
    pub(super) fn error(unique: u64, errno: Errno) -> Answer {
        Answer::new(unique, -errno.0)
    }

    /// Creates a successful answer that `len` bytes of payload follow.
    #[inline]
    pub(super) fn data(unique: u64, len: u32) -> Answer {
        let mut answer = Answer::new(unique, 0);
        answer.seal(len);
        answer
    }

    /// Creates the answer to a write of `len` bytes.
    #[inline]
    pub(super) fn written(unique: u64, len: u32) -> Answer {
        let mut answer = Answer::new(unique, 0);
        answer.put_u32(0, len);
        answer.body(8)
    }

    pub(super) fn opened(unique: u64) -> Answer {
        let mut answer = Answer::new(unique, 0);
        answer.put_u32(8, OPEN_FLAGS);
        answer.body(16)
    }

    /// Creates an answer with the file's attributes.
    pub(super) fn attributes(unique: u64, of: &Attributes) -> Answer {
        const REGULAR_FILE: u32 = 0o100_000;
        let mut answer = Answer::new(unique, 0);
        answer.put_u64(0, ATTRIBUTES_SECONDS);
        // The attributes start at byte 16.
        answer.put_u64(16, ROOT);
        answer.put_u64(24, of.size);
        answer.put_u64(32, of.size.div_ceil(512));
        for time in 0..3 {
            answer.put_u64(40 + 8 * time, of.time_ns / SECOND_NS);
            answer.put_u32(64 + 4 * time, (of.time_ns % SECOND_NS) as u32);
        }
        answer.put_u32(76, REGULAR_FILE | (of.mode & 0o7777));
        answer.put_u32(80, 1);
        answer.put_u32(84, of.uid);
        answer.put_u32(88, of.gid);
        answer.put_u32(96, 4096);
        answer.body(104)
    }

    /// Creates a notification that makes the kernel drop the file's cached attributes. Cached
    /// contents stay.
    pub(super) fn attributes_changed() -> Answer {
        const INVALIDATE_INODE: i32 = 2;
        let mut notice = Answer::new(0, INVALIDATE_INODE);
        notice.put_u64(0, ROOT);
        // The negative offset means that no cached contents are dropped.
        notice.put_u64(8, u64::MAX);
        notice.body(24)
    }

    /// Creates an answer with the file system's size, in which no space is free.
    pub(super) fn statfs(unique: u64, size: u64) -> Answer {
        let mut answer = Answer::new(unique, 0);
        answer.put_u64(0, size.div_ceil(4096));
        answer.put_u64(24, 1);
        answer.put_u32(40, 4096);
        answer.put_u32(44, 255);
        answer.put_u32(48, 4096);
        answer.body(80)
    }

    /// Creates the answer to INIT: version, features and limits.
    pub(super) fn init(unique: u64, minor: u32, flags: u64, readahead: u32) -> Answer {
        let agreed = flags & flag::WANTED;
        let mut answer = Answer::new(unique, 0);
        answer.put_u32(0, MAJOR);
        answer.put_u32(4, minor.min(MINOR));
        answer.put_u32(8, readahead);
        answer.put_u32(12, agreed as u32);
        answer.put(Answer::HEADER_BYTES + 16, &BACKGROUND_MAX.to_ne_bytes());
        answer.put(Answer::HEADER_BYTES + 18, &(BACKGROUND_MAX / 4 * 3).to_ne_bytes());
        answer.put_u32(20, TRANSFER_BYTES_MAX);
        // Time granularity: nanoseconds.
        answer.put_u32(24, 1);
        answer.put(Answer::HEADER_BYTES + 28, &((TRANSFER_BYTES_MAX / 4096) as u16).to_ne_bytes());
        answer.put_u32(32, (agreed >> 32) as u32);
        answer.body(64)
    }
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Answer({:?})", self.bytes())
    }
}
