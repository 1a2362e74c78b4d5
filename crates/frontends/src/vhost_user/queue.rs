//! One split virtqueue, from the device's side (virtio 1.2, section 2.7).
//!
//! The driver puts heads of descriptor chains into the available ring; the device answers in the used ring. Each side
//! says when it wants to be told of news: with flags, or with an index each (EVENT_IDX).
//!
//! # Refuses
//! Sizes that are no power of two or above [`SIZE_MAX`], rings outside the guest's memory, unaligned ones. While it is
//! served: an index that runs ahead by more than the ring has, heads outside the table. All are values ([`Broken`]).

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::memory::{GuestMap, Part};

/// Most entries of a queue.
pub const SIZE_MAX: u16 = 1024;

/// Bytes of a descriptor.
pub(super) const DESCRIPTOR_BYTES: usize = 16;

/// The driver does not want to be told (available ring), the device neither (used ring).
const NO_NEWS: u16 = 1;

/// Where a queue lies, in the addresses of the process that runs the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Entries.
    pub size: u16,
    /// The table of descriptors.
    pub descriptors: u64,
    /// The ring that the driver writes.
    pub available: u64,
    /// The ring that the device writes.
    pub used: u64,
}

/// Why a queue cannot be served, or any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// Its size makes no sense.
    #[error("a queue of {0} entries: it must be a power of two up to {SIZE_MAX}")]
    Size(u16),
    /// It is not in the guest's memory.
    #[error("a ring lies outside guest memory, across two regions of it, or unaligned")]
    Place,
    /// The driver offers more chains than there can be.
    #[error("the available index runs ahead by {0} entries, more than the queue has")]
    Runaway(u16),
    /// A head outside the table.
    #[error("chain {0} begins outside the table of descriptors")]
    Head(u16),
    /// A chain that cannot be followed, or has no place for its status.
    #[error("a chain {0}")]
    Chain(super::chain::Fault),
}

/// A queue. See the module's text.
#[derive(Debug)]
pub(super) struct Queue {
    size: u16,
    descriptors: Part,
    available: Part,
    used: Part,
    event_idx: bool,
    /// Where the next chain is taken from, and the next answer goes. They count on beyond the size.
    next_available: u16,
    next_used: u16,
    /// Answers up to here have been told of, or the driver does not want to be.
    told_used: u16,
    /// The driver is asked to tell of new chains.
    wants_kicks: bool,
}

impl Queue {
    /// A queue that begins with the chain at `next_available`, and where the used ring ends.
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
            part.filter(|part| part.is_aligned(align)).ok_or(Broken::Place)
        };
        // Each ring has its flags and index in front and the other side's event index behind.
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

    /// Entries.
    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// Bytes of the used ring.
    pub(super) fn used_bytes(&self) -> u64 {
        6 + 8 * u64::from(self.size)
    }

    /// The table of descriptors.
    pub(super) fn descriptors(&self) -> &Part {
        &self.descriptors
    }

    /// Which chain is taken next.
    pub(super) fn next_available(&self) -> u16 {
        self.next_available
    }

    /// Chains that were taken before this queue was set up are in flight: the next one is so much later.
    pub(super) fn skip_to(&mut self, next_available: u16) {
        self.next_available = next_available;
    }

    /// Where the next answer goes.
    pub(super) fn next_used(&self) -> u16 {
        self.next_used
    }

    /// The head of the next chain, which stays the next one until `advance`.
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

    /// The chain of `peek` has been taken.
    #[inline]
    pub(super) fn advance(&mut self) {
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// Answers a chain: the device has written `len` bytes to it.
    pub(super) fn push_used(&mut self, head: u16, len: u32) {
        let slot = usize::from(self.next_used & (self.size - 1));
        self.used.store(4 + 8 * slot, u32::from(head).to_le(), Ordering::Relaxed);
        self.used.store(8 + 8 * slot, len.to_le(), Ordering::Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
        self.used.store(2, self.next_used.to_le(), Ordering::Release);
    }

    /// Does the driver want to be told of the answers since it was last asked?
    pub(super) fn wants_telling(&mut self) -> bool {
        if self.told_used == self.next_used {
            return false;
        }
        let old = std::mem::replace(&mut self.told_used, self.next_used);
        // The driver looks at the used index after it has written what it wants: one of both sees the other's.
        fence(Ordering::SeqCst);
        if !self.event_idx {
            return u16::from_le(self.available.load(0, Ordering::Relaxed)) & NO_NEWS == 0;
        }
        let at = 4 + 2 * usize::from(self.size);
        let event = u16::from_le(self.available.load(at, Ordering::Relaxed));
        self.next_used.wrapping_sub(event).wrapping_sub(1) < self.next_used.wrapping_sub(old)
    }

    /// Asks the driver to tell of new chains, or not to. Having asked for it, look once more: what came before is not told of.
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
            // An index that the driver has passed already: it tells of nothing before it has gone all the way round.
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
