//! A split virtqueue, as the device uses it (virtio 1.2, section 2.7).
//!
//! The driver puts heads of descriptor chains into the available ring, and the device answers in
//! the used ring. Driver and device each request notifications with flags, or with an index
//! (EVENT_IDX).
//!
//! # Refused queues
//! The queue's size must be a power of two up to [`SIZE_MAX`]. The queue's rings must be aligned
//! and inside guest memory. While the queue is served, the available index must not be ahead by
//! more than the ring's size. Heads must be inside the descriptor table. Violations are returned as
//! [`Broken`].

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::memory::{GuestMap, Part};

/// Maximum number of entries of a virtqueue.
pub const SIZE_MAX: u16 = 1024;

/// Size of a descriptor in bytes.
pub(super) const DESCRIPTOR_BYTES: usize = 16;

/// Flag in the available ring (from the driver) or used ring (from the device): no notification
/// wanted.
const NO_NEWS: u16 = 1;

/// Addresses of a queue in the vhost-user client's address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Number of entries.
    pub size: u16,
    /// Address of the descriptor table.
    pub descriptors: u64,
    /// Address of the ring that the driver writes.
    pub available: u64,
    /// Address of the ring that the device writes.
    pub used: u64,
}

/// Why a virtqueue cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The queue's size is not a power of two, or is too large.
    #[error("a queue of {0} entries: it must be a power of two up to {SIZE_MAX}")]
    Size(u16),
    /// The queue is not in guest memory.
    #[error("a ring of the queue is unaligned, outside guest memory, or in two memory regions")]
    Rings,
    /// The driver offers more chains than the queue has entries.
    #[error("the driver offers {0} chains, more than the queue has entries")]
    Runaway(u16),
    /// The head of a chain is outside the descriptor table.
    #[error("the head {0} is outside the descriptor table")]
    Head(u16),
    /// The device cannot read a descriptor chain, or the chain has no byte for its status.
    #[error("a chain {0}")]
    Chain(super::chain::Fault),
}

/// A split virtqueue, as the device sees it.
#[derive(Debug)]
pub(super) struct Queue {
    size: u16,
    descriptors: Part,
    available: Part,
    used: Part,
    event_idx: bool,
    /// Index of the next chain to take, not reduced modulo the queue's size.
    next_available: u16,
    next_used: u16,
    /// Value of the used index when the device last checked whether the driver wants a
    /// notification.
    told_used: u16,
    /// Whether the driver should kick for new chains.
    wants_kicks: bool,
}

impl Queue {
    /// Creates a queue that starts with the chain at `next_available`, and at the current end of
    /// the used ring.
    pub(super) fn new(
        map: &Arc<GuestMap>,
        layout: &Layout,
        next_available: u16,
        event_idx: bool,
    ) -> Result<Queue, Broken> {
        let size = layout.size;
        if !size.is_power_of_two() || size > SIZE_MAX {
            return Err(Broken::Size(size));
        }
        let entries = usize::from(size);
        let part = |user: u64, len: usize, align: usize| {
            let part = map.guest_address(user).and_then(|address| map.part(address, len));
            part.filter(|part| part.is_aligned(align)).ok_or(Broken::Rings)
        };
        // Each ring starts with its flags and index, and ends with the other side's event index.
        let descriptors = part(layout.descriptors, entries * DESCRIPTOR_BYTES, 16)?;
        let available = part(layout.available, 6 + 2 * entries, 2)?;
        let used = part(layout.used, 6 + 8 * entries, 4)?;
        let next_used = u16::from_le(used.load(2, Ordering::Acquire));
        let queue = Queue {
            size,
            descriptors,
            available,
            used,
            event_idx,
            next_available,
            next_used,
            told_used: next_used,
            wants_kicks: false,
        };
        queue.ask_for_kicks(false);
        Ok(queue)
    }

    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// Returns the size of the used ring in bytes.
    pub(super) fn used_bytes(&self) -> u64 {
        6 + 8 * u64::from(self.size)
    }

    pub(super) fn descriptors(&self) -> &Part {
        &self.descriptors
    }

    /// Returns the index of the next chain to take.
    pub(super) fn next_available(&self) -> u16 {
        self.next_available
    }

    /// Moves the next available index past chains that are in flight and were taken before this
    /// queue was set up.
    pub(super) fn skip_to(&mut self, next_available: u16) {
        self.next_available = next_available;
    }

    /// Returns the used index at which the next answer will be written.
    pub(super) fn next_used(&self) -> u16 {
        self.next_used
    }

    /// Returns the head of the next chain. The chain stays in the queue until `advance`.
    #[inline]
    pub(super) fn peek(&self) -> Result<Option<u16>, Broken> {
        let index = u16::from_le(self.available.load(2, Ordering::Acquire));
        let ahead = index.wrapping_sub(self.next_available);
        if ahead == 0 {
            return Ok(None);
        }
        if ahead > self.size {
            return Err(Broken::Runaway(ahead));
        }
        let slot = usize::from(self.next_available & (self.size - 1));
        let head = u16::from_le(self.available.load(4 + 2 * slot, Ordering::Relaxed));
        if head >= self.size { Err(Broken::Head(head)) } else { Ok(Some(head)) }
    }

    /// Consumes the chain that `peek` returned.
    #[inline]
    pub(super) fn advance(&mut self) {
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// Answers a chain into which the device wrote `len` bytes.
    pub(super) fn push_used(&mut self, head: u16, len: u32) {
        let slot = usize::from(self.next_used & (self.size - 1));
        self.used.store(4 + 8 * slot, u32::from(head).to_le(), Ordering::Relaxed);
        self.used.store(8 + 8 * slot, len.to_le(), Ordering::Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
        self.used.store(2, self.next_used.to_le(), Ordering::Release);
    }

    /// Returns true if the driver wants a notification of the answers that were added since the
    /// last call of this function.
    pub(super) fn wants_telling(&mut self) -> bool {
        if self.told_used == self.next_used {
            return false;
        }
        let old = std::mem::replace(&mut self.told_used, self.next_used);
        // The driver checks the used index after it writes its event index. The fence ensures that
        // driver or device sees the other's write.
        fence(Ordering::SeqCst);
        if !self.event_idx {
            return u16::from_le(self.available.load(0, Ordering::Relaxed)) & NO_NEWS == 0;
        }
        let at = 4 + 2 * usize::from(self.size);
        let event = u16::from_le(self.available.load(at, Ordering::Relaxed));
        self.next_used.wrapping_sub(event).wrapping_sub(1) < self.next_used.wrapping_sub(old)
    }

    /// Enables or disables the driver's kicks. After enabling kicks, check the queue once more,
    /// because the driver sends no kick for chains that it added before.
    #[inline]
    pub(super) fn set_wants_kicks(&mut self, wants: bool) {
        if wants || self.wants_kicks {
            self.wants_kicks = wants;
            self.ask_for_kicks(wants);
        }
    }

    fn ask_for_kicks(&self, wants: bool) {
        match (self.event_idx, wants) {
            (true, true) => {
                let at = 4 + 8 * usize::from(self.size);
                self.used.store(at, self.next_available.to_le(), Ordering::Relaxed);
            }
            // The driver has passed this index already, so it sends no kick until the index wraps
            // around.
            (true, false) => {
                let at = 4 + 8 * usize::from(self.size);
                let passed = self.next_available.wrapping_sub(1);
                self.used.store(at, passed.to_le(), Ordering::Relaxed);
            }
            (false, _) => {
                let flags = if wants { 0 } else { NO_NEWS };
                self.used.store(0, flags.to_le(), Ordering::Relaxed);
            }
        }
        if wants {
            fence(Ordering::SeqCst);
        }
    }
}
