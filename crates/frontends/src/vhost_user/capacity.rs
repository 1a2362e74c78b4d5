//! The disk size that vhost-user clients see. When the disk grows, the connected client is
//! notified.
//!
//! The protocol has a message for the notification (`VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`). The
//! client provides a channel for this message with `VHOST_USER_SET_BACKEND_REQ_FD`. The vhost-user
//! library keeps that channel private and does not support the message. So this module duplicates
//! the descriptor when it arrives, and writes the message itself.
//!
//! A client without a channel, or one that does not read it, is not notified. The guest of such a
//! client sees the new size when it initializes the device again.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};

/// Protocol message that contains the notification channel's descriptor.
const SET_BACKEND_REQ_FD: u32 = 21;

/// Protocol message that tells the client to read the configuration again.
const CONFIG_CHANGE_MSG: u32 = 2;

/// Flags of a vhost-user message: protocol version 1, no reply requested.
const VERSION: u32 = 1;

/// Size in bytes of a vhost-user message that has no body.
const HEADER_BYTES: usize = 12;

/// The disk's size and the notification channel to the vhost-user client.
#[derive(Debug)]
pub struct Capacity {
    bytes: AtomicU64,
    /// The channel to the connected vhost-user client.
    channel: Mutex<Option<OwnedFd>>,
}

impl Capacity {
    /// Creates the capacity of a disk of `bytes` bytes.
    pub fn new(bytes: u64) -> Arc<Capacity> {
        Arc::new(Capacity { bytes: AtomicU64::new(bytes), channel: Mutex::new(None) })
    }

    /// Returns the disk's size in bytes, as vhost-user clients read it.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }

    /// Sets the disk's size in bytes. Returns true if a vhost-user client was notified.
    pub fn grow(&self, bytes: u64) -> bool {
        self.bytes.store(bytes, Ordering::SeqCst);
        let channel = self.channel();
        let Some(channel) = channel.as_ref() else { return false };
        let mut message = [0; HEADER_BYTES];
        message[..4].copy_from_slice(&CONFIG_CHANGE_MSG.to_ne_bytes());
        message[4..8].copy_from_slice(&VERSION.to_ne_bytes());
        // A vhost-user client that does not read its channel must not block the caller.
        let sent = send(channel, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        sent == Ok(HEADER_BYTES)
    }

    /// Sets the notification channel of the connected client, or clears it when the client
    /// disconnects.
    pub(super) fn set_channel(&self, channel: Option<OwnedFd>) {
        *self.channel() = channel;
    }

    fn channel(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the next vhost-user message without consuming it. If the message is
/// `VHOST_USER_SET_BACKEND_REQ_FD`, returns a duplicate of the descriptor in it: the channel for
/// notifications to the client.
pub(super) fn peek_channel(socket: &UnixStream) -> Option<OwnedFd> {
    let mut header = [0; HEADER_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut header)], &mut control, flags) {
            Err(Errno::INTR) => {}
            received => break received.ok()?,
        }
    };
    // Descriptors that other messages contain are closed again.
    let mut all = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let first = all.next().and_then(|mut descriptors| descriptors.next());
    let request = u32::from_ne_bytes(*header.first_chunk::<4>().expect("twelve bytes"));
    first.filter(|_| received.bytes == HEADER_BYTES && request == SET_BACKEND_REQ_FD)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};

    use super::*;

    /// A message as a client sends it, with a descriptor.
    fn message(socket: &UnixStream, request: u32, descriptor: &impl AsFd) {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&request.to_ne_bytes());
        bytes[4..8].copy_from_slice(&VERSION.to_ne_bytes());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let sent = sendmsg(socket, &[std::io::IoSlice::new(&bytes)], &mut control, SendFlags::empty());
        assert_eq!(sent, Ok(HEADER_BYTES));
    }

    #[test]
    fn a_client_is_notified_on_its_channel() {
        let (machine, daemon) = UnixStream::pair().unwrap();
        let (mut far, near) = UnixStream::pair().unwrap();
        let capacity = Capacity::new(512);
        assert!(!capacity.grow(1024), "nobody is there");
        message(&machine, 13, &near);
        assert!(peek_channel(&daemon).is_none(), "a queue's eventfd");
        (&daemon).read_exact(&mut [0; HEADER_BYTES]).unwrap();
        message(&machine, SET_BACKEND_REQ_FD, &near);
        let channel = peek_channel(&daemon).expect("it was sent");
        let mut still = [0; HEADER_BYTES];
        (&daemon).read_exact(&mut still).unwrap();
        assert_eq!(still[0], 21, "the message is there for who serves it");
        drop(near);
        capacity.set_channel(Some(channel));
        assert!(capacity.grow(2048));
        let mut told = [0; HEADER_BYTES];
        far.read_exact(&mut told).unwrap();
        assert_eq!(told, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(capacity.bytes(), 2048);
        capacity.set_channel(None);
        assert_eq!(far.read(&mut told).unwrap(), 0, "the channel goes with the machine");
        assert!(!capacity.grow(4096));
    }

    #[test]
    fn a_client_that_does_not_read_notifications_delays_no_other() {
        let (far, near) = UnixStream::pair().unwrap();
        let capacity = Capacity::new(512);
        capacity.set_channel(Some(near.into()));
        let full = (0..1_000_000u64).find(|bytes| !capacity.grow(512 * bytes));
        assert!(full.is_some(), "a socket holds so much");
        drop(far);
        assert!(!capacity.grow(1 << 20), "it is gone");
    }

    #[test]
    fn a_socket_that_ends_brings_nothing() {
        let (mut machine, daemon) = UnixStream::pair().unwrap();
        machine.write_all(&SET_BACKEND_REQ_FD.to_ne_bytes()).unwrap();
        assert!(peek_channel(&daemon).is_none(), "half a header");
        drop(machine);
        (&daemon).read_exact(&mut [0; 4]).unwrap();
        assert!(peek_channel(&daemon).is_none());
    }
}
