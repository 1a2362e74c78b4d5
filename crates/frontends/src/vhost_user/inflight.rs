//! Records of requests in flight, in memory that outlives the daemon.
//!
//! The vhost-user client keeps this memory while the daemon restarts, and passes it to the new
//! daemon. The new daemon then executes the requests that the old one had taken and not answered.
//! The layout is that of the vhost-user specification ("Inflight I/O tracking", split virtqueues):
//!
//! | bytes | per queue |
//! |---|---|
//! | 0…8 | features, 0 |
//! | 8…10 | version, 1 |
//! | 10…12 | descriptors |
//! | 12…14 | head whose answer was the last one begun |
//! | 14…16 | used index when the last answer was complete |
//! | 16… | 16 bytes for each descriptor: in flight (1), padding (5), next (2), counter (8) |
//!
//! # Refused memory
//! Memory that is not sealed against shrinking, or is too short, is refused. The content of
//! in-flight memory is used only if it is valid: heads must be below the queue's size.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::{Bytes, MmapRegion, VolatileMemory, VolatileSlice};

use super::block::QUEUES_MAX;
use super::memory::{Mapping, map_file};
use super::queue::SIZE_MAX;

const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
const VERSION: u16 = 1;

/// Alignment of each queue's region in the in-flight memory, bytes.
const ALIGNMENT: usize = 64;

/// Why in-flight memory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the memory for requests in flight {0}")]
pub struct InflightError(&'static str);

/// The in-flight memory of all queues of a device.
#[derive(Debug)]
pub(super) struct Inflight {
    memory: MmapRegion,
    /// The mapping of the in-flight file; `memory` points into it, so it is dropped later. The
    /// mapping reads as zeroes where the kernel has no page for the client's file.
    _mapping: Mapping,
    queue_size: u16,
    queues: u16,
}

fn queue_bytes(queue_size: u16) -> usize {
    (HEADER_BYTES + ENTRY_BYTES * usize::from(queue_size)).next_multiple_of(ALIGNMENT)
}

impl Inflight {
    /// Creates empty in-flight memory for `queues` queues. Returns the memory, its file, and its
    /// size in bytes.
    pub(super) fn create(queues: u16, queue_size: u16) -> Result<(Arc<Inflight>, File, u64), InflightError> {
        check(queues, queue_size)?;
        let bytes = queue_bytes(queue_size) * usize::from(queues);
        let failed = |_| InflightError("cannot be allocated");
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("hob-inflight", flags).map_err(failed)?;
        rustix::fs::ftruncate(&file, bytes as u64).map_err(failed)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(failed)?;
        let file = File::from(file);
        let copy = file.try_clone().map_err(|_| InflightError("cannot be shared"))?;
        let inflight = Inflight::open(copy.into(), 0, bytes as u64, queues, queue_size)?;
        for queue in 0..queues {
            let region = inflight.region(queue);
            put(&region, 8, VERSION);
            put(&region, 10, queue_size);
        }
        Ok((inflight, file, bytes as u64))
    }

    /// Maps the in-flight memory that a vhost-user client kept during a restart of the daemon.
    pub(super) fn open(
        file: OwnedFd,
        offset: u64,
        bytes: u64,
        queues: u16,
        queue_size: u16,
    ) -> Result<Arc<Inflight>, InflightError> {
        check(queues, queue_size)?;
        let needed = queue_bytes(queue_size) * usize::from(queues);
        let seals = rustix::fs::fcntl_get_seals(file.as_fd()).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return Err(InflightError("is not sealed against shrinking"));
        }
        let size = rustix::fs::fstat(&file).map_or(0, |stat| stat.st_size as u64);
        if bytes < needed as u64 || offset.checked_add(needed as u64).is_none_or(|end| end > size) {
            return Err(InflightError("is too short"));
        }
        let mapped = map_file(&File::from(file), offset, needed as u64);
        let (mapping, memory) = mapped.map_err(|_| InflightError("cannot be mapped"))?;
        Ok(Arc::new(Inflight { memory, _mapping: mapping, queue_size, queues }))
    }

    fn region(&self, queue: u16) -> VolatileSlice<'_> {
        let bytes = queue_bytes(self.queue_size);
        self.memory.get_slice(usize::from(queue) * bytes, bytes).expect("the size was checked")
    }

    /// Returns the in-flight records of a queue with `size` descriptors. Returns `None` if the
    /// in-flight memory has no such queue, has fewer descriptors per queue, or has an invalid
    /// header for the queue.
    pub(super) fn queue(self: &Arc<Self>, queue: u16, size: u16) -> Option<QueueInflight> {
        if queue >= self.queues || size > self.queue_size {
            return None;
        }
        let region = self.region(queue);
        let usable = get::<u16>(&region, 8) == VERSION && get::<u16>(&region, 10) == self.queue_size;
        usable.then(|| QueueInflight { inflight: Arc::clone(self), queue, size, counter: 0 })
    }
}

fn check(queues: u16, queue_size: u16) -> Result<(), InflightError> {
    match (1..=QUEUES_MAX).contains(&queues) && (1..=SIZE_MAX).contains(&queue_size) {
        true => Ok(()),
        false => Err(InflightError("is for too many queues, or for queues that are too large")),
    }
}

fn get<T: vm_memory::AtomicAccess>(region: &VolatileSlice<'_>, at: usize) -> T {
    region.load(at, Ordering::Acquire).expect("inside the region and aligned")
}

fn put<T: vm_memory::AtomicAccess>(region: &VolatileSlice<'_>, at: usize, value: T) {
    region.store(value, at, Ordering::Release).expect("inside the region and aligned");
}

/// Records of the requests in flight in one queue.
#[derive(Debug)]
pub(crate) struct QueueInflight {
    inflight: Arc<Inflight>,
    queue: u16,
    size: u16,
    /// Counter of the last request that was taken from the queue.
    counter: u64,
}

impl QueueInflight {
    fn entry(head: u16) -> usize {
        HEADER_BYTES + ENTRY_BYTES * usize::from(head)
    }

    /// Returns the heads of chains that were taken and not answered, in the order of taking. `used`
    /// is the queue's used index.
    pub(super) fn recover(&mut self, used: u16) -> Vec<u16> {
        let region = self.inflight.region(self.queue);
        if get::<u16>(&region, 14) != used {
            // The daemon ended after it had written the answer to the used ring, and before it
            // recorded this step.
            let last = get::<u16>(&region, 12);
            if last < self.size {
                put(&region, Self::entry(last), 0u8);
            }
            put(&region, 14, used);
        }
        let taken = |head: &u16| get::<u8>(&region, Self::entry(*head)) == 1;
        let mut heads: Vec<(u64, u16)> = (0..self.size)
            .filter(taken)
            .map(|head| (get::<u64>(&region, Self::entry(head) + 8), head))
            .collect();
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |(counter, _)| *counter);
        heads.into_iter().map(|(_, head)| head).collect()
    }

    /// Records that a chain was taken from the queue.
    pub(super) fn take(&mut self, head: u16) {
        self.counter = self.counter.wrapping_add(1);
        let region = self.inflight.region(self.queue);
        put(&region, Self::entry(head) + 8, self.counter);
        put(&region, Self::entry(head), 1u8);
    }

    /// Records that the device is about to answer a chain.
    pub(super) fn begin_answer(&self, head: u16) {
        put(&self.inflight.region(self.queue), 12, head);
    }

    /// Records that a chain's answer is in the used ring, whose index is now `used`.
    pub(super) fn end_answer(&self, head: u16, used: u16) {
        let region = self.inflight.region(self.queue);
        put(&region, Self::entry(head), 0u8);
        put(&region, 14, used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unanswered_chains_are_taken_again_in_their_order() {
        let (first, file, bytes) = Inflight::create(2, 8).unwrap();
        let mut queue = first.queue(1, 8).unwrap();
        assert!(queue.recover(0).is_empty());
        [5, 2, 7, 0].into_iter().for_each(|head| queue.take(head));
        queue.begin_answer(2);
        queue.end_answer(2, 1);
        // The daemon ends after it wrote the used ring, and before that was recorded.
        queue.begin_answer(7);
        drop((queue, first));
        let again = Inflight::open(file.into(), 0, bytes, 2, 8).unwrap();
        let mut queue = again.queue(1, 8).unwrap();
        assert_eq!(queue.recover(2), [5, 0]);
        assert_eq!(queue.recover(2), [5, 0]);
        assert!(again.queue(0, 8).unwrap().recover(0).is_empty());
        assert!(again.queue(2, 8).is_none() && again.queue(0, 16).is_none());
    }

    #[test]
    fn memory_that_may_shrink_or_is_short_is_refused() {
        let plain = || rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        let file = plain();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        assert!(Inflight::open(file, 0, 1 << 20, 1, 8).is_err());
        let short = plain();
        rustix::fs::ftruncate(&short, 100).unwrap();
        rustix::fs::fcntl_add_seals(&short, SealFlags::SHRINK).unwrap();
        for (offset, bytes) in [(0, 1 << 20), (u64::MAX, 4096), (0, 100)] {
            let copy = short.try_clone().unwrap();
            assert!(Inflight::open(copy, offset, bytes, 1, 8).is_err(), "{offset} {bytes}");
        }
        assert!(Inflight::create(0, 8).is_err() && Inflight::create(1, 2048).is_err());
    }
}
