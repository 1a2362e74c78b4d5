//! Counts requests over time in at most 200 buckets of equal width, for traces of any duration.
//! When a request is beyond the last bucket, adjacent buckets are joined and the width doubles.

use serde::Serialize;

use crate::{Op, Record};

/// Maximum number of buckets.
pub const ARRIVAL_BUCKETS_MAX: usize = 200;
const WIDTH_NS_MIN: u64 = 1_000;

/// Requests over time.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Arrivals {
    /// Width of a bucket, nanoseconds.
    pub bucket_ns: u64,
    /// Counts per bucket from the start of the trace, at most 200. The trace's end may cut the last
    /// bucket short.
    pub buckets: Vec<ArrivalBucket>,
    /// Mean rate, requests per second; 0 for a trace without duration.
    pub mean_per_s: f64,
    /// Rate in the fullest bucket, requests per second; 0 for a trace without duration.
    pub peak_per_s: f64,
}

/// Counts of one time bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ArrivalBucket {
    /// Number of reads.
    pub reads: u64,
    /// Number of writes.
    pub writes: u64,
    /// Number of discards and flushes.
    pub others: u64,
    /// Total length of the reads and writes, bytes.
    pub bytes: u64,
}

impl ArrivalBucket {
    fn requests(&self) -> u64 {
        self.reads + self.writes + self.others
    }

    fn join(&mut self, other: ArrivalBucket) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.others += other.others;
        self.bytes += other.bytes;
    }
}

#[derive(Debug)]
pub(super) struct ArrivalCounter {
    width_ns: u64,
    buckets: Vec<ArrivalBucket>,
    first_ns: Option<u64>,
    last_ns: u64,
    requests: u64,
}

impl Default for ArrivalCounter {
    fn default() -> Self {
        ArrivalCounter {
            width_ns: WIDTH_NS_MIN,
            buckets: Vec::new(),
            first_ns: None,
            last_ns: 0,
            requests: 0,
        }
    }
}

impl ArrivalCounter {
    pub(super) fn add(&mut self, record: &Record) {
        let first = *self.first_ns.get_or_insert(record.at_ns);
        let at_ns = record.at_ns.saturating_sub(first);
        self.last_ns = self.last_ns.max(at_ns);
        self.requests += 1;
        while at_ns / self.width_ns >= ARRIVAL_BUCKETS_MAX as u64 {
            self.join_neighbours();
        }
        let n = (at_ns / self.width_ns) as usize;
        if self.buckets.len() <= n {
            self.buckets.resize(n + 1, ArrivalBucket::default());
        }
        let bucket = &mut self.buckets[n];
        match record.op {
            Op::Read => bucket.reads += 1,
            Op::Write => bucket.writes += 1,
            Op::Discard | Op::Flush => bucket.others += 1,
        }
        if matches!(record.op, Op::Read | Op::Write) {
            bucket.bytes += u64::from(record.len);
        }
    }

    fn join_neighbours(&mut self) {
        self.width_ns *= 2;
        for n in 0..self.buckets.len().div_ceil(2) {
            let mut bucket = self.buckets[2 * n];
            if let Some(other) = self.buckets.get(2 * n + 1) {
                bucket.join(*other);
            }
            self.buckets[n] = bucket;
        }
        self.buckets.truncate(self.buckets.len().div_ceil(2));
    }

    /// Returns the time from the first request to the last, nanoseconds.
    pub(super) fn duration_ns(&self) -> u64 {
        self.last_ns
    }

    pub(super) fn finish(self) -> Arrivals {
        let seconds = self.last_ns as f64 / 1e9;
        let peak = self.buckets.iter().map(ArrivalBucket::requests).max().unwrap_or(0);
        // A trace that is shorter than a bucket has its peak rate over its own duration.
        let width = (self.width_ns as f64 / 1e9).min(seconds);
        let rate = |requests: u64, seconds: f64| if seconds > 0.0 { requests as f64 / seconds } else { 0.0 };
        Arrivals {
            bucket_ns: self.width_ns,
            buckets: self.buckets,
            mean_per_s: rate(self.requests, seconds),
            peak_per_s: rate(peak, width),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrivals(times: &[u64]) -> Arrivals {
        let mut counter = ArrivalCounter::default();
        for at_ns in times {
            counter.add(&Record { at_ns: *at_ns, offset: 0, len: 512, op: Op::Read, disk: 0 });
        }
        counter.finish()
    }

    #[test]
    fn the_width_adapts_and_nothing_is_lost() {
        let times: Vec<u64> = (0..10_000).map(|n| n * n * 1_000).collect();
        let found = arrivals(&times);
        assert!((100..=200).contains(&found.buckets.len()), "{}", found.buckets.len());
        assert_eq!(found.buckets.iter().map(|bucket| bucket.reads).sum::<u64>(), 10_000);
        for (n, bucket) in found.buckets.iter().enumerate() {
            let (from, to) = (n as u64 * found.bucket_ns, (n as u64 + 1) * found.bucket_ns);
            let expected = times.iter().filter(|at| (from..to).contains(at)).count();
            assert_eq!(bucket.reads, expected as u64, "bucket {n}");
            assert_eq!(bucket.bytes, expected as u64 * 512);
        }
    }

    #[test]
    fn odd_durations_are_no_trouble() {
        assert_eq!(arrivals(&[]).buckets.len(), 0);
        let one = arrivals(&[u64::MAX]);
        assert_eq!((one.buckets.len(), one.mean_per_s, one.peak_per_s), (1, 0.0, 0.0));
        let far = arrivals(&[0, 1 << 61]);
        assert!(far.buckets.len() <= ARRIVAL_BUCKETS_MAX);
        assert_eq!(far.buckets.iter().map(ArrivalBucket::requests).sum::<u64>(), 2);
        let second = arrivals(&[0, 500_000_000, 1_000_000_000]);
        assert_eq!(second.mean_per_s, 3.0);
        let back = arrivals(&[10, 5, 20]);
        assert_eq!(back.buckets[0].reads, 3);
    }
}
