//! Tests a profile that was computed by hand, and extreme values.

use super::*;

fn record(at_ns: u64, op: Op, offset: u64, len: u32, disk: u16) -> Record {
    Record { at_ns, offset, len, op, disk }
}

fn profile(records: &[Record]) -> Profile {
    Profile::of(records.iter().copied().map(Ok)).unwrap()
}

#[test]
fn a_hand_made_trace_has_the_profile_worked_out_by_hand() {
    let found = profile(&[
        record(0, Op::Read, 0, 8192, 0),
        record(1_000, Op::Read, 8192, 4096, 0),
        record(2_000, Op::Write, 4000, 512, 0),
        record(4_000, Op::Write, 12288, 4096, 1),
        record(4_000, Op::Discard, 0, 1 << 20, 1),
        record(9_000, Op::Flush, 0, 0, 0),
        record(10_000, Op::Read, 12288, 4096, 0),
    ]);
    assert_eq!((found.requests, found.reads, found.writes, found.discards, found.flushes), (7, 3, 2, 1, 1));
    assert_eq!(found.read_percent, 60.0);
    assert_eq!((found.bytes_read, found.bytes_written), (16384, 4608));
    assert_eq!((found.disks, found.duration_ns), (2, 10_000));
    // Sectors 0 to 3 of disk 0 and 3 of disk 1; 4000…4511 touches 0 and 1 again.
    assert_eq!((found.footprint.sectors, found.footprint.touches), (5, 7));
    assert!((found.footprint.reuse_percent - 200.0 / 7.0).abs() < 1e-9);
    assert_eq!((found.sizes.dominant_bytes, found.sizes.dominant_percent), (4096, 60.0));
    let buckets: Vec<_> =
        found.sizes.buckets.iter().map(|bucket| (bucket.from_bytes, bucket.reads, bucket.writes)).collect();
    assert_eq!(buckets, [(512, 0, 1), (1024, 0, 0), (2048, 0, 0), (4096, 2, 1), (8192, 1, 0)]);
    // The second read follows the first; the last follows the second, not the write to the other
    // disk.
    assert_eq!(found.sequential.requests_percent, 40.0);
    assert!((found.sequential.bytes_percent - 8192.0 / 20992.0 * 100.0).abs() < 1e-9);
    assert_eq!(found.gaps.max_ns, 5_000);
    assert!((found.gaps.mean_ns - 10_000.0 / 6.0).abs() < 1e-6);
}

#[test]
fn sixteen_streams_are_distinguished_and_a_seventeenth_is_not() {
    let streams = |count: u64| -> Vec<Record> {
        (0..20)
            .flat_map(|n| {
                (0..count).map(move |stream| record(0, Op::Read, (stream << 30) + n * 4096, 4096, 0))
            })
            .collect()
    };
    assert_eq!(profile(&streams(16)).sequential.requests_percent, 95.0);
    assert_eq!(profile(&streams(17)).sequential.requests_percent, 0.0);
}

#[test]
fn nothing_has_a_profile_too() {
    let found = profile(&[]);
    assert_eq!((found.requests, found.read_percent, found.footprint.reuse_percent), (0, 0.0, 0.0));
    assert!(found.sizes.buckets.is_empty() && found.arrivals.buckets.is_empty());
    assert_eq!((found.sizes.dominant_bytes, found.gaps.p50_ns), (0, 0));
}

#[test]
fn the_ends_of_the_scale_are_counted() {
    let found = profile(&[
        record(0, Op::Read, (1 << 63) - u64::from(u32::MAX), u32::MAX, u16::MAX),
        record(u64::MAX, Op::Write, 0, 1, 0),
    ]);
    assert_eq!(found.footprint.sectors, (1 << 20) + 1);
    assert_eq!(found.sizes.buckets.len(), 32);
    assert_eq!(found.duration_ns, u64::MAX);
}

#[test]
fn an_error_among_the_records_is_handed_on() {
    let records = [Ok(record(0, Op::Read, 0, 1, 0)), Err(anyhow::anyhow!("line 2"))];
    assert_eq!(Profile::of(records).unwrap_err().to_string(), "line 2");
}
