//! The message that passes a record and its descriptors from one program to the next in the same
//! process.
//!
//! Record and descriptors are sent into a socket pair. One end of the pair becomes the next
//! program's standard input, the only descriptor that it can find. All other descriptors are
//! close-on-exec before and after `execve`. So if a message is invalid, its descriptors are closed
//! with the message. The environment variable [`VARIABLE`] announces the message to one process: a
//! child that inherits the variable has no message.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

use super::record::{Record, RecordError};

/// Name of the environment variable, whose value is the id of the process that has a message.
pub(super) const VARIABLE: &str = "HOB_HAND_OVER";

/// Maximum number of descriptors per message. The kernel allows 253.
const MESSAGE_FDS_MAX: usize = 128;

/// Maximum length of a record in bytes.
const RECORD_BYTES_MAX: u64 = 1 << 30;

/// Maximum number of messages.
const MESSAGES_MAX: usize = 4096;

/// Why a message cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub(super) enum MessageError {
    /// A system call failed.
    #[error("{0}")]
    System(#[from] io::Error),
    /// The record is malformed.
    #[error("{0}")]
    Record(#[from] RecordError),
}

impl From<rustix::io::Errno> for MessageError {
    fn from(errno: rustix::io::Errno) -> MessageError {
        MessageError::System(errno.into())
    }
}

/// Returns the value of [`VARIABLE`] that announces a message to this process.
pub(super) fn sign() -> OsString {
    std::process::id().to_string().into()
}

/// Returns true if the previous program has left a message for this process.
pub(super) fn is_announced() -> bool {
    std::env::var_os(VARIABLE) == Some(sign())
}

/// Writes a record and its descriptors into a message. Returns the next program's standard input.
pub(super) fn pack(record: &Record, fds: &[OwnedFd]) -> Result<OwnedFd, MessageError> {
    assert_eq!(record.table.descriptors(), fds.len(), "the table says what the descriptors are");
    let mut text = File::from(memfd_create("hob-hand-over", MemfdFlags::CLOEXEC)?);
    text.write_all(&record.encode()?)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (near, far) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let all: Vec<BorrowedFd<'_>> = [text.as_fd()].into_iter().chain(fds.iter().map(AsFd::as_fd)).collect();
    for some in all.chunks(MESSAGE_FDS_MAX) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(
            control.push(SendAncillaryMessage::ScmRights(some)),
            "the buffer has room for this number of descriptors"
        );
        rustix::net::sendmsg(&near, &[IoSlice::new(b"h")], &mut control, SendFlags::NOSIGNAL)?;
    }
    Ok(far)
}

/// Reads the message of the previous program, if there is one. Later calls return `None`.
pub(super) fn take() -> Result<Option<(Record, Vec<OwnedFd>)>, MessageError> {
    static IS_TAKEN: AtomicBool = AtomicBool::new(false);
    if IS_TAKEN.swap(true, Ordering::Relaxed) || !is_announced() {
        return Ok(None);
    }
    let message = rustix::stdio::stdin().try_clone_to_owned()?;
    // Neither other code nor a child process may find the message at standard input.
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    unpack(&message).map(Some)
}

fn unpack(message: &OwnedFd) -> Result<(Record, Vec<OwnedFd>), MessageError> {
    let mut fds = Vec::new();
    for _ in 0..MESSAGES_MAX {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let message = rustix::net::recvmsg(message, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)?;
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = part {
                fds.extend(some);
            }
        }
        if message.bytes == 0 {
            break;
        }
    }
    if fds.is_empty() {
        return Err(RecordError::Broken("nothing came".to_owned()).into());
    }
    let mut text = File::from(fds.remove(0));
    if text.metadata()?.len() > RECORD_BYTES_MAX {
        return Err(RecordError::Broken("the message is far too long".to_owned()).into());
    }
    let mut bytes = Vec::new();
    text.rewind()?;
    text.take(RECORD_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok((Record::decode(&bytes, fds.len())?, fds))
}

#[cfg(test)]
mod tests {
    use super::super::record::Table;
    use super::*;

    #[test]
    fn descriptors_arrive_in_their_order_and_only_for_the_next_program() {
        let listening = (0..300).map(|number| number.to_string()).collect();
        let record = Record { table: Table { listening, ..Table::default() }, ..Record::default() };
        let fds: Vec<OwnedFd> = (0..300)
            .map(|number: u64| {
                let file = tempfile::tempfile().unwrap();
                file.set_len(number).unwrap();
                file.into()
            })
            .collect();
        let message = pack(&record, &fds).unwrap();
        drop(fds);
        let (found, fds) = unpack(&message).unwrap();
        assert_eq!(found, record);
        for (number, fd) in fds.into_iter().enumerate() {
            let flags = rustix::io::fcntl_getfd(&fd).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
            assert_eq!(File::from(fd).metadata().unwrap().len(), number as u64);
        }
        // The message was taken from the descriptor.
        assert!(unpack(&message).is_err());
    }

    #[test]
    fn an_invalid_message_is_refused() {
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        assert!(matches!(unpack(&file), Err(MessageError::System(_))));
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair =
            || rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let (near, far) = pair();
        rustix::net::send(&near, b"noise", SendFlags::empty()).unwrap();
        drop(near);
        assert!(matches!(unpack(&far), Err(MessageError::Record(_))));
        // A socket pair that is open and has no data.
        let (_near, far) = pair();
        assert!(matches!(unpack(&far), Err(MessageError::System(_))));
    }
}
