//! Device models that serve I/O in virtual time: a disk array, a flash device, or a device with
//! fixed latency.
//!
//! Each device model returns the completion time at submission, is deterministic, and stores no
//! data.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::disk_model::{Access, ArrayModel};
use crate::flash_model::FlashModel;

/// A device with fixed latencies, for published measurements that have only a mean.
#[derive(Clone, Debug)]
pub struct FixedModel {
    read_ns: u64,
    write_ns: u64,
    parallel_max: usize,
    under_way: BinaryHeap<Reverse<u64>>,
}

impl FixedModel {
    /// Creates a device with fixed latencies. A read takes `read_ns` nanoseconds, a write takes
    /// `write_ns`, and a flush takes no time. At most `parallel_max` I/Os run at a time, and the
    /// others wait in order of arrival.
    ///
    /// # Panics
    /// Panics if `parallel_max` is 0.
    pub fn new(read_ns: u64, write_ns: u64, parallel_max: usize) -> Self {
        assert!(parallel_max > 0, "a device does one thing at a time at least");
        FixedModel { read_ns, write_ns, parallel_max, under_way: BinaryHeap::new() }
    }

    fn submit(&mut self, now: u64, op: Access) -> u64 {
        let takes = match op {
            Access::Read => self.read_ns,
            Access::Write => self.write_ns,
            Access::Flush => return now,
        };
        if self.parallel_max == usize::MAX {
            return now + takes;
        }
        while self.under_way.peek().is_some_and(|&Reverse(done)| done <= now) {
            self.under_way.pop();
        }
        let mut start = now;
        if self.under_way.len() >= self.parallel_max {
            let Reverse(first_done) = self.under_way.pop().expect("a full device is not empty");
            start = first_done;
        }
        self.under_way.push(Reverse(start + takes));
        start + takes
    }
}

/// A device or disk array in virtual time.
#[derive(Clone, Debug)]
pub enum ServiceModel {
    /// Mechanical disks behind an array controller.
    Array(Box<ArrayModel>),
    /// A flash device.
    Flash(Box<FlashModel>),
    /// A device with fixed latencies.
    Fixed(FixedModel),
}

impl ServiceModel {
    /// Submits an I/O that arrives at `now_ns` and returns its completion time, both in nanoseconds
    /// of virtual time.
    ///
    /// # Panics
    /// Panics if a read or write extends beyond [`ServiceModel::capacity_bytes`].
    pub fn submit(&mut self, now_ns: u64, op: Access, offset: u64, len: u64) -> u64 {
        match self {
            ServiceModel::Array(array) => array.submit(now_ns, op, offset, len),
            ServiceModel::Flash(flash) => flash.submit(now_ns, op, offset, len),
            ServiceModel::Fixed(fixed) => fixed.submit(now_ns, op),
        }
    }

    /// Returns the size of the device's address space in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        match self {
            ServiceModel::Array(array) => array.config().capacity_bytes,
            ServiceModel::Flash(_) | ServiceModel::Fixed(_) => u64::MAX,
        }
    }
}

impl From<ArrayModel> for ServiceModel {
    fn from(array: ArrayModel) -> Self {
        ServiceModel::Array(Box::new(array))
    }
}

impl From<FlashModel> for ServiceModel {
    fn from(flash: FlashModel) -> Self {
        ServiceModel::Flash(Box::new(flash))
    }
}

impl From<FixedModel> for ServiceModel {
    fn from(fixed: FixedModel) -> Self {
        ServiceModel::Fixed(fixed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_latency_until_more_come_than_fit() {
        let mut service = ServiceModel::from(FixedModel::new(100, 300, 2));
        let done: Vec<u64> = (0..4).map(|_| service.submit(10, Access::Read, 0, 4096)).collect();
        assert_eq!(done, [110, 110, 210, 210]);
        assert_eq!(service.submit(210, Access::Write, 0, 4096), 510);
        assert_eq!(service.submit(220, Access::Flush, 0, 0), 220);
    }

    #[test]
    fn nobody_waits_for_a_device_without_a_bound() {
        let mut service = ServiceModel::from(FixedModel::new(100, 300, usize::MAX));
        assert!((0..1000).all(|_| service.submit(5, Access::Read, 0, 4096) == 105));
    }
}
