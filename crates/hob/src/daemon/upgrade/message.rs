//! How a record and its descriptors get from one program to the next in the same process.
//!
//! They are put into a socket pair as messages, and one end of it becomes the next program's standard input: the one descriptor that it can
//! find without being told. All others are close-on-exec, before and after. So whatever is wrong with a parcel, what was in it is closed with
//! it. [`VARIABLE`] in the environment says that there is a parcel, and for which process: a child that inherits it has none.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

use super::record::{Record, RecordError};

/// The variable: the number of the process that has a parcel.
pub(super) const VARIABLE: &str = "HOB_HAND_OVER";

/// Descriptors in one message; the kernel allows 253.
const MESSAGE_FDS_MAX: usize = 128;

/// Longest record that is read, bytes.
const RECORD_BYTES_MAX: u64 = 1 << 30;

/// Most messages that are read.
const MESSAGES_MAX: usize = 4096;

/// Why a parcel cannot be taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum MessageError {
    /// The system says no.
    #[error("{0}")]
    System(#[from] io::Error),
    /// It is not what it should be.
    #[error("{0}")]
    Record(#[from] RecordError),
}

impl From<rustix::io::Errno> for MessageError {
    fn from(errno: rustix::io::Errno) -> MessageError {
        MessageError::System(errno.into())
    }
}

/// What the variable is for this process.
pub(super) fn sign() -> OsString {
    std::process::id().to_string().into()
}

/// Puts a record and its descriptors into a parcel: what is to be the next program's standard input.
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
        assert!(control.push(SendAncillaryMessage::ScmRights(some)), "there is room for that many");
        rustix::net::sendmsg(&near, &[IoSlice::new(b"h")], &mut control, SendFlags::NOSIGNAL)?;
    }
    Ok(far)
}

/// Takes the parcel that the program before has left, if there is one.
pub(super) fn take() -> Result<Option<(Record, Vec<OwnedFd>)>, MessageError> {
    if std::env::var_os(VARIABLE) != Some(sign()) {
        return Ok(None);
    }
    let message = rustix::stdio::stdin().try_clone_to_owned()?;
    // Nobody else is to find it there, and no child.
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
        return Err(RecordError::Broken("it is far too long".to_owned()).into());
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
        // What was in it has been taken.
        assert!(unpack(&message).is_err());
    }

    #[test]
    fn what_is_no_parcel_is_refused() {
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        assert!(matches!(unpack(&file), Err(MessageError::System(_))));
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair =
            || rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let (near, far) = pair();
        rustix::net::send(&near, b"noise", SendFlags::empty()).unwrap();
        drop(near);
        assert!(matches!(unpack(&far), Err(MessageError::Record(_))));
        // One that nobody has closed, and that is empty.
        let (_near, far) = pair();
        assert!(matches!(unpack(&far), Err(MessageError::System(_))));
    }
}
