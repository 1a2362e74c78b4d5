//! Converts a trace for the player in the guest.
//!
//! Requests are widened to whole blocks of 4 KiB, as for Open CAS. MiB that the trace never accesses
//! are left out, so the guest's disk is small. Long gaps between requests are shortened, and a trace
//! that is still too long is sped up.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use hob_trace::{Op, Record};

const BLOCK_BYTES: u64 = 4096;
const EXTENT_BYTES: u64 = 1 << 20;

/// Limits of virtual time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Maximum time between two requests, seconds.
    pub(super) gap_s_max: f64,
    /// Maximum duration of a trace, seconds.
    pub(super) duration_s_max: f64,
}

/// A trace as the player reads it.
#[derive(Debug)]
pub(super) struct Converted {
    /// Three numbers of 32 bits for each request: the gap in µs since the previous request, the
    /// first block, and twice the number of blocks plus 1 for a write.
    pub(super) bytes: Vec<u8>,
    /// Size of the disk, bytes.
    pub(super) disk_bytes: u64,
    /// Duration in virtual time, seconds.
    pub(super) seconds: f64,
    /// Factor by which the trace is sped up after its gaps were shortened.
    pub(super) speed_up: f64,
}

/// Converts the reads and writes among `records`.
///
/// # Errors
/// Returns an error if there is no such request, or if the accessed part of the disk is too large.
pub(super) fn convert(records: &[Record], pace: Pace) -> Result<Converted> {
    let is_used = |record: &&Record| matches!(record.op, Op::Read | Op::Write);
    let used: Vec<&Record> = records.iter().filter(is_used).collect();
    ensure!(!used.is_empty(), "the trace has no read and no write");
    let blocks = |record: &Record| {
        let end = record.offset + u64::from(record.len);
        (record.offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES))
    };
    const PER_EXTENT: u64 = EXTENT_BYTES / BLOCK_BYTES;
    let mut extents = BTreeSet::new();
    for record in &used {
        let (start, end) = blocks(record);
        extents.extend(start / PER_EXTENT..end.div_ceil(PER_EXTENT));
    }
    // Sorted, so that the position of an extent is its number on the smaller disk.
    let extents: Vec<u64> = extents.into_iter().collect();
    let gaps = gaps(&used, pace.gap_s_max);
    let total: f64 = gaps.iter().sum();
    let speed_up = (total / pace.duration_s_max).max(1.0);

    let mut bytes = Vec::with_capacity(used.len() * 12);
    let mut seconds = 0.0;
    for (record, gap) in used.iter().zip(gaps) {
        let (start, end) = blocks(record);
        let extent = extents.binary_search(&(start / PER_EXTENT)).expect("collected above") as u64;
        let block = extent * PER_EXTENT + start % PER_EXTENT;
        // Differences of rounded times, so that rounding errors do not add up.
        let before = (seconds * 1e6) as u64;
        seconds += gap / speed_up;
        let gap_us = (seconds * 1e6) as u64 - before;
        let blocks_op = (end - start) << 1 | u64::from(record.op == Op::Write);
        for number in [gap_us, block, blocks_op] {
            let number = u32::try_from(number).context("the trace is too large for the guest")?;
            bytes.extend_from_slice(&number.to_le_bytes());
        }
    }
    Ok(Converted { bytes, disk_bytes: extents.len() as u64 * EXTENT_BYTES, seconds, speed_up })
}

/// Returns the time before each request, seconds.
fn gaps(records: &[&Record], gap_s_max: f64) -> Vec<f64> {
    let mut gaps = vec![0.0];
    gaps.extend(records.windows(2).map(|pair| {
        let ns = pair[1].at_ns.saturating_sub(pair[0].at_ns);
        (ns as f64 / 1e9).min(gap_s_max)
    }));
    gaps
}

#[cfg(test)]
mod tests {
    use hob_trace::{Op, Record};

    use super::{Converted, Pace, convert};

    const SLOW: Pace = Pace { gap_s_max: 5.0, duration_s_max: 300.0 };

    fn record(at_ms: u64, op: Op, offset: u64, len: u32) -> Record {
        Record { at_ns: at_ms * 1_000_000, offset, len, op, disk: 0 }
    }

    /// Returns gap, block, number of blocks and "is a write" of each request.
    fn requests(converted: &Converted) -> Vec<(u32, u32, u32, bool)> {
        let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let request = |bytes: &[u8]| {
            let blocks_op = number(&bytes[8..]);
            (number(&bytes[..4]), number(&bytes[4..8]), blocks_op >> 1, blocks_op & 1 == 1)
        };
        converted.bytes.chunks(12).map(request).collect()
    }

    #[test]
    fn requests_are_widened_to_blocks() {
        let records = [record(0, Op::Read, 512, 512), record(1, Op::Write, 4095, 2)];
        let converted = convert(&records, SLOW).expect("a valid trace");
        assert_eq!(requests(&converted), [(0, 0, 1, false), (1000, 0, 2, true)]);
    }

    #[test]
    fn parts_without_access_are_left_out() {
        let (mib, far) = (1 << 20, 7 << 40);
        let records = [
            record(0, Op::Read, far + mib - 4096, 8192),
            record(0, Op::Read, 3 * mib, 4096),
            record(0, Op::Read, far + 8192, 4096),
        ];
        let converted = convert(&records, SLOW).expect("a valid trace");
        assert_eq!(converted.disk_bytes, 3 * mib);
        // A request across two extents stays in one piece.
        assert_eq!(requests(&converted), [(0, 511, 2, false), (0, 0, 1, false), (0, 258, 1, false)]);
    }

    #[test]
    fn only_reads_and_writes_are_converted() {
        let records = [record(0, Op::Flush, 0, 0), record(1, Op::Discard, 0, 4096)];
        assert!(convert(&records, SLOW).is_err());
        let records = [records[0], records[1], record(2, Op::Read, 0, 4096)];
        assert_eq!(requests(&convert(&records, SLOW).expect("one read")), [(0, 0, 1, false)]);
    }

    #[test]
    fn long_gaps_are_shortened_and_long_traces_sped_up() {
        let records = [
            record(0, Op::Read, 0, 4096),
            record(60_000, Op::Read, 0, 4096),
            record(61_000, Op::Read, 0, 4096),
        ];
        let converted = convert(&records, SLOW).expect("a valid trace");
        assert_eq!(requests(&converted).map_gaps(), [0, 5_000_000, 1_000_000]);
        assert_eq!((converted.seconds, converted.speed_up), (6.0, 1.0));
        let fast = convert(&records, Pace { gap_s_max: 5.0, duration_s_max: 3.0 }).expect("a valid trace");
        assert_eq!(requests(&fast).map_gaps(), [0, 2_500_000, 500_000]);
        assert_eq!((fast.seconds, fast.speed_up), (3.0, 2.0));
    }

    trait Gaps {
        fn map_gaps(&self) -> Vec<u32>;
    }

    impl Gaps for Vec<(u32, u32, u32, bool)> {
        fn map_gaps(&self) -> Vec<u32> {
            self.iter().map(|request| request.0).collect()
        }
    }
}
