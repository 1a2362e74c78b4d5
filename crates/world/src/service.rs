//! Device models that serve I/O in virtual time: a disk array, a flash device, a remote volume, or a
//! device with fixed latency.
//!
//! Each device model returns the completion time at submission, is deterministic, and stores no
//! data.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::disk_model::{Access, ArrayModel};
use crate::flash_model::FlashModel;
use crate::remote_model::RemoteModel;

/// A device with fixed latencies, for published measurements that state only mean latencies.
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
        assert!(parallel_max > 0, "parallel_max must not be 0");
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

/// LUNs on separate disks of one array. The address space is divided into equal ranges, and each
/// range lies on one LUN.
#[derive(Clone, Debug)]
pub struct LunModel {
    luns: Vec<ArrayModel>,
    range_bytes: u64,
    /// For each range: index of its LUN, and offset of the range on this LUN in bytes.
    ranges: Vec<(usize, u64)>,
}

impl LunModel {
    /// Creates an array of LUNs. `lun_of` has the index of the LUN of each range; the ranges have
    /// `range_bytes` bytes each.
    ///
    /// # Panics
    /// Panics if there is no range, `range_bytes` is 0, or a range lies on no LUN.
    pub fn new(luns: Vec<ArrayModel>, range_bytes: u64, lun_of: &[usize]) -> Self {
        assert!(!lun_of.is_empty() && range_bytes > 0, "an array needs a range of at least one byte");
        let mut used = vec![0; luns.len()];
        let place = |&lun: &usize| {
            let start = used[lun];
            used[lun] += range_bytes;
            (lun, start)
        };
        let ranges = lun_of.iter().map(place).collect();
        LunModel { luns, range_bytes, ranges }
    }

    fn submit(&mut self, now: u64, op: Access, offset: u64, len: u64) -> u64 {
        if op == Access::Flush {
            return self.luns.iter_mut().map(|lun| lun.submit(now, op, 0, 0)).fold(now, u64::max);
        }
        let (mut at, end, mut done) = (offset, offset + len, now);
        while at < end {
            let (range, within) = (at / self.range_bytes, at % self.range_bytes);
            let part = (self.range_bytes - within).min(end - at);
            let (lun, start) = self.ranges[range as usize];
            done = done.max(self.luns[lun].submit(now, op, start + within, part));
            at += part;
        }
        done
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
    /// LUNs on separate disks.
    Luns(Box<LunModel>),
    /// A volume behind a network.
    Remote(RemoteModel),
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
            ServiceModel::Luns(luns) => luns.submit(now_ns, op, offset, len),
            ServiceModel::Remote(remote) => remote.submit(now_ns, op, len),
        }
    }

    /// Returns the total time that disks were busy so far, nanoseconds, and the number of disks.
    /// Returns zeroes for a device that is not an array of disks.
    pub fn busy_ns(&self) -> (u64, usize) {
        let array = |array: &ArrayModel| (array.busy_ns(), array.config().disks);
        match self {
            ServiceModel::Array(model) => array(model),
            ServiceModel::Luns(luns) => {
                let luns = luns.luns.iter().map(array);
                luns.fold((0, 0), |sum, lun| (sum.0 + lun.0, sum.1 + lun.1))
            }
            ServiceModel::Flash(_) | ServiceModel::Fixed(_) | ServiceModel::Remote(_) => (0, 0),
        }
    }

    /// Returns the size of the device's address space in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        match self {
            ServiceModel::Array(array) => array.config().capacity_bytes,
            ServiceModel::Luns(luns) => luns.range_bytes * luns.ranges.len() as u64,
            ServiceModel::Flash(_) | ServiceModel::Fixed(_) | ServiceModel::Remote(_) => u64::MAX,
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

impl From<LunModel> for ServiceModel {
    fn from(luns: LunModel) -> Self {
        ServiceModel::Luns(Box::new(luns))
    }
}

impl From<RemoteModel> for ServiceModel {
    fn from(remote: RemoteModel) -> Self {
        ServiceModel::Remote(remote)
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
    fn ranges_lie_on_their_luns_and_luns_do_not_wait_for_each_other() {
        use crate::disk_model::{ArrayConfig, Level};
        let lun = || {
            let config =
                ArrayConfig { disks: 1, level: Level::Raid0, ..ArrayConfig::raid5_of_ten_10k(2 << 20) };
            ArrayModel::new(config)
        };
        let mut two = ServiceModel::from(LunModel::new(vec![lun(), lun()], 1 << 20, &[0, 1, 0, 1]));
        assert_eq!(two.capacity_bytes(), 4 << 20);
        let alone = lun().submit(0, Access::Read, 4096, 4096);
        assert_eq!(two.submit(0, Access::Read, 4096, 4096), alone);
        let other = two.submit(0, Access::Read, (1 << 20) + 4096, 4096);
        let mut first = lun();
        first.submit(0, Access::Read, 4096, 4096);
        let waited = first.submit(0, Access::Read, (1 << 20) + 4096, 4096);
        assert_eq!(
            two.submit(0, Access::Read, (2 << 20) + 4096, 4096),
            waited,
            "range 3 is on the first LUN"
        );
        assert_eq!(other, alone, "range 2 is on the second LUN");
        assert!(two.submit(0, Access::Write, (1 << 20) - 4096, 8192) > alone, "a part on each LUN");
    }

    #[test]
    fn a_device_without_a_limit_delays_no_request() {
        let mut service = ServiceModel::from(FixedModel::new(100, 300, usize::MAX));
        assert!((0..1000).all(|_| service.submit(5, Access::Read, 0, 4096) == 105));
    }
}
