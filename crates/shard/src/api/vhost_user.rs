//! Calls of vhost-user sessions to their shard.

use std::os::fd::OwnedFd;
use std::sync::mpsc;

use hob_engine::io::Promote;
use hob_engine::units::DiskId;
use hob_frontends::vhost_user::Start;
use hob_frontends::vhost_user::block::Info;

/// A call of a vhost-user session to its shard.
#[derive(Debug)]
pub enum VhostUserCall {
    /// Add a vhost-user client of a disk.
    Open {
        /// The disk.
        disk: DiskId,
        /// The disk's properties as the guest sees them.
        info: Info,
        /// How reads of this client promote blocks into the cache.
        promote: Promote,
        /// Receives the number of the new client; dropped if the disk does not exist.
        answer: mpsc::Sender<u16>,
    },
    /// Start to serve a virtqueue.
    Start {
        /// Number of the client.
        client: u16,
        /// Number, layout, start index and features of the virtqueue.
        start: Box<Start>,
        /// Eventfd of the driver's notifications.
        kick: OwnedFd,
        /// Eventfd that notifies the driver of replies.
        call: Option<OwnedFd>,
    },
    /// Replace the eventfd that notifies a driver.
    SetCall {
        /// Number of the client.
        client: u16,
        /// Number of the virtqueue.
        queue: u16,
        /// The new eventfd; `None` if the driver polls.
        call: Option<OwnedFd>,
    },
    /// Stop serving a virtqueue.
    Stop {
        /// Number of the client.
        client: u16,
        /// Number of the virtqueue.
        queue: u16,
        /// Receives the index of the next request, after all requests in flight have ended.
        answer: mpsc::Sender<u16>,
    },
    /// Remove a client whose queues are all stopped.
    Close {
        /// Number of the client.
        client: u16,
    },
}
