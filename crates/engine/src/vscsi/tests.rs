//! Tests of the request histograms: the bounds of all buckets, the distances between requests, the
//! numbers of outstanding requests, and the times between requests.

use super::*;
use crate::io::{Durability, PayloadMemory, Promote};
use crate::units::{BufferId, DiskId, RequestId};

const READ: Op = Op::Read;
const WRITE: Op = Op::Write(Durability::Volatile);

fn request(op: Op, offset: u64, len: u64) -> Request {
    let buffer = op.has_buffer().then_some(BufferId(0));
    Request {
        id: RequestId(0),
        disk: DiskId(0),
        op,
        offset,
        len,
        buffer,
        promote: Promote::Usual,
        memory: PayloadMemory::Daemon,
    }
}

/// Returns the bucket's bound for a value; `None` for the last bucket.
#[track_caller]
fn bucket_of(metric: Metric, value: i64) -> Option<i64> {
    let mut distribution = Distribution::new(metric);
    distribution.record_among(metric.search(), value);
    let found: Vec<_> = distribution.buckets().filter(|(_, count)| *count > 0).collect();
    assert_eq!(found.len(), 1, "{value}");
    found[0].0
}

/// Returns the counts of a metric, as (bound, count).
fn counted(histograms: &Histograms, class: Class, metric: Metric) -> Vec<(Option<i64>, u64)> {
    histograms.get(class, metric).buckets().filter(|(_, count)| *count > 0).collect()
}

#[test]
fn tables_are_in_the_order_of_their_enums() {
    assert!(METRICS.iter().enumerate().all(|(i, row)| row.metric as usize == i));
    assert!(CLASSES.iter().enumerate().all(|(i, (class, _))| *class as usize == i));
    for row in METRICS {
        assert!(row.bounds.windows(2).all(|pair| pair[0] < pair[1]), "{}", row.name);
        assert!(row.bounds.len() < BUCKETS_MAX, "{}", row.name);
        let mut stream = Stream::new();
        stream.record(row.metric, row.bounds[1]);
        let found = stream.distributions[row.metric as usize].buckets().nth(1);
        assert_eq!(found, Some((Some(row.bounds[1]), 1)), "{} is counted by its own bounds", row.name);
    }
}

#[test]
fn the_search_without_branches_finds_the_bucket_of_a_binary_search() {
    for row in METRICS {
        let powers = (0..63).map(|bits| 1i64 << bits).chain([i64::MAX]);
        let interesting = row.bounds.iter().copied().chain(powers);
        let near = interesting.flat_map(|x| [x.saturating_sub(1), x, x.saturating_add(1)]);
        for value in near.flat_map(|x| [x, x.saturating_neg()]).chain([0, i64::MIN]) {
            let expected = row.bounds.partition_point(|bound| *bound < value);
            assert_eq!(row.metric.search().bucket_of(value), expected, "{} {value}", row.name);
        }
    }
}

#[test]
fn a_bound_is_the_largest_value_of_its_bucket() {
    for row in METRICS {
        for (i, bound) in row.bounds.iter().enumerate() {
            assert_eq!(bucket_of(row.metric, *bound), Some(*bound), "{} {bound}", row.name);
            let next = row.bounds.get(i + 1).copied();
            assert_eq!(bucket_of(row.metric, bound + 1), next, "{} {bound} + 1", row.name);
        }
        assert_eq!(bucket_of(row.metric, i64::MIN + 1), Some(row.bounds[0]), "{}", row.name);
        assert_eq!(bucket_of(row.metric, i64::MAX), None, "{}", row.name);
    }
}

#[test]
fn lengths_and_extremes() {
    let mut histograms = Histograms::new(Instant(5));
    for len in [512, 4096, 4097, 4096, 1 << 20] {
        histograms.arrive(Instant(5), &request(READ, 0, len));
    }
    let counts = [(Some(512), 1), (Some(4096), 2), (Some(8191), 1), (None, 1)];
    assert_eq!(counted(&histograms, Class::All, Metric::Length), counts);
    assert_eq!(counted(&histograms, Class::Reads, Metric::Length), counts);
    let length = histograms.get(Class::All, Metric::Length);
    assert_eq!((length.count(), length.min(), length.max()), (5, Some(512), Some(1 << 20)));
    assert_eq!(length.mean(), Some((512 + 2 * 4096 + 4097 + (1 << 20)) as f64 / 5.0));
    let none = histograms.get(Class::Writes, Metric::Length);
    assert_eq!((none.count(), none.min(), none.max(), none.mean()), (0, None, None, None));
}

/// Returns the values in order, found from one bucket at a time.
fn values(requests: &[(Op, u64, u64)], class: Class, metric: Metric) -> Vec<i64> {
    let mut histograms = Histograms::new(Instant(0));
    let mut sum = 0;
    let mut values = Vec::new();
    for (i, (op, offset, len)) in requests.iter().enumerate() {
        histograms.arrive(Instant(i as u64), &request(*op, *offset, *len));
        let now = histograms.get(class, metric);
        if now.count() as usize > values.len() {
            values.push((now.sum - sum) as i64);
            sum = now.sum;
        }
    }
    values
}

#[test]
fn seeks_count_from_the_last_sector_of_the_request_before() {
    let requests = [
        (READ, 1 << 20, 4096),
        // The next block; the same again; back to the start; a request in the same sector.
        (READ, (1 << 20) + 4096, 4096),
        (READ, (1 << 20) + 4096, 4096),
        (READ, 0, 100),
        (READ, 200, 100),
    ];
    let (first, last) = (1 << 11, (1 << 11) + 7);
    let expected = [1, first + 8 - (last + 8), -(last + 8), 0];
    assert_eq!(values(&requests, Class::All, Metric::Seek), expected);
    assert_eq!(values(&requests, Class::Reads, Metric::Seek), expected);
    assert_eq!(values(&requests, Class::Writes, Metric::Seek), []);
}

#[test]
fn classes_do_not_see_each_other() {
    // Two streams, each sequential by itself.
    let requests: Vec<_> = (0..20)
        .flat_map(|i| [(READ, i * 4096, 4096), (WRITE, (1 << 30) + i * 4096, 4096), (Op::Flush, 0, 0)])
        .collect();
    for class in [Class::Reads, Class::Writes] {
        assert_eq!(values(&requests, class, Metric::Seek), [1; 19]);
    }
    let all = values(&requests, Class::All, Metric::Seek);
    assert!(all.iter().all(|seek| seek.abs() > 1_000_000) && all.len() == 39);
    // The distance to the nearest of the last sixteen requests recognizes both streams; the first
    // write has none near.
    let nearest = values(&requests, Class::All, Metric::SeekNearest);
    assert!(nearest[1..].iter().all(|seek| *seek == 1) && nearest.len() == 39, "{nearest:?}");
}

#[test]
fn the_nearest_is_one_of_sixteen() {
    let near = |others: u64| {
        let mut requests = vec![(READ, 0, 512)];
        requests.extend((0..others).map(|i| (READ, (1 << 40) + (i << 30), 512)));
        requests.push((READ, 512, 512));
        *values(&requests, Class::All, Metric::SeekNearest).last().unwrap()
    };
    assert_eq!(near(15), 1);
    assert!(near(16) < -1_000_000, "sixteen others have pushed it out");
    // At equal distance from below and from above, the later request counts.
    let between = [(READ, 0, 512), (READ, 8 * 512, 512), (READ, 4 * 512, 512)];
    assert_eq!(values(&between, Class::All, Metric::SeekNearest)[1], -4);
}

#[test]
fn outstanding_requests_and_their_duration_are_counted() {
    let mut histograms = Histograms::new(Instant(0));
    for _ in 0..3 {
        histograms.arrive(Instant(0), &request(READ, 0, 512));
    }
    histograms.arrive(Instant(7_000), &request(WRITE, 0, 512));
    histograms.arrive(Instant(7_000), &request(Op::Flush, 0, 0));
    histograms.arrive(Instant(7_000), &request(Op::Prefetch, 0, 512));
    histograms.arrive(Instant(17_001), &request(READ, 0, 512));
    let outstanding = |class| counted(&histograms, class, Metric::Outstanding);
    assert_eq!(outstanding(Class::All), [(Some(1), 2), (Some(2), 1), (Some(4), 2)]);
    assert_eq!(outstanding(Class::Reads), [(Some(1), 2), (Some(2), 1), (Some(4), 1)]);
    assert_eq!(outstanding(Class::Writes), [(Some(1), 1)]);
    let gaps = |class| counted(&histograms, class, Metric::Interarrival);
    assert_eq!(gaps(Class::All), [(Some(1), 2), (Some(10), 1), (Some(100), 1)]);
    assert_eq!(gaps(Class::Reads), [(Some(1), 2), (Some(100), 1)]);
    assert_eq!(gaps(Class::Writes), []);

    for (latency_ns, op) in
        [(1000, READ), (1001, READ), (100_000_000, WRITE), (5, Op::Flush), (100_000_001, READ)]
    {
        histograms.answer(latency_ns, op);
    }
    let latencies = counted(&histograms, Class::All, Metric::Latency);
    assert_eq!(latencies, [(Some(1), 1), (Some(10), 1), (Some(100_000), 1), (None, 1)]);
    assert_eq!(histograms.get(Class::Reads, Metric::Latency).count(), 3);
}

#[test]
fn after_a_reset_only_outstanding_requests_are_known() {
    let mut histograms = Histograms::new(Instant(0));
    (0..5).for_each(|_| histograms.arrive(Instant(1), &request(READ, 1 << 20, 512)));
    histograms.reset(Instant(9));
    assert_eq!(histograms.since(), Instant(9));
    let all = |histograms: &Histograms| {
        METRICS.iter().map(|row| histograms.get(Class::All, row.metric).count()).sum::<u64>()
    };
    assert_eq!(all(&histograms), 0);
    histograms.arrive(Instant(20), &request(READ, 0, 512));
    assert_eq!(counted(&histograms, Class::All, Metric::Outstanding), [(Some(6), 1)]);
    assert_eq!(all(&histograms), 2, "its length and the five others, but no distance and no gap");
    (0..6).for_each(|_| histograms.answer(1, READ));
    assert_eq!(histograms.get(Class::Reads, Metric::Latency).count(), 6);
}

#[test]
fn they_are_small() {
    let bytes = size_of::<Histograms>();
    assert!(bytes <= 8 << 10, "{bytes} bytes");
}
