//! Measures the memory for a cache's metadata, by block size.

use anyhow::{Result, anyhow};
use hob_engine::admission::Admission;
use hob_engine::granularity::Fill;
use hob_engine::policy::PolicyKind;
use hob_engine::{CacheSim, SimConfig};

use super::line::Line;
use super::{FigureInfo, Findings, Work};
use crate::picture::{Axis, Curve, CurveChart, Marker, Unit, curves};

const CACHE_BYTES: u64 = 1 << 30;
/// Memory as a share of the cache size at 4 KB blocks, lower bound, according to the study.
const PUBLISHED_4K: f64 = 0.02;
/// Upper limit for a share that counts as the published "over 2 %".
const OVER_4K: f64 = 0.03;
/// Bytes of a cache's checksums for each sector of 4 KiB.
const SECTOR_SHARE: f64 = 4.0 / 4096.0;
/// Maximum difference between the measured share of memory and the share computed from the memory
/// of one block.
const APART_MAX: f64 = 0.05;
/// Limit for hob's share of memory: a tenth of the published share.
const NEAR_NOTHING: f64 = 0.002;

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "metadata-memory",
    title: "Memory of a cache's metadata by block size",
    source: "the vSphere Flash Read Cache study",
    published: "Over 2 % of the cache's size with blocks of 4 KB, less with each larger block, near 0 with 512 KB.",
    method: "A cache of 1 GiB is set up with each block size, as the daemon does. The memory of \
             its index, policy, validity and checksums is counted. A cache allocates all of this \
             memory at its start.",
    fitted: &[],
    work: Work::Play { cases: |_| vec![], judge: |_| judge(1.0) },
};

/// Evaluates hob's memory use for metadata, multiplied by `factor`. The factor is 1 except in
/// tests.
pub(super) fn judge(factor: f64) -> Result<Findings> {
    let mut shares = Vec::new();
    for shift in 12..20 {
        let block_bytes = 1u32 << shift;
        let blocks = (CACHE_BYTES >> shift) as u32;
        let (policy, admission) = (PolicyKind::default(), Admission::default());
        let cache = CacheSim::new(&SimConfig { blocks, block_bytes, policy, admission, fill: Fill::Sectors });
        let cache = cache.map_err(|_| anyhow!("a cache cannot have blocks of {block_bytes} bytes"))?;
        shares.push((f64::from(block_bytes), factor * cache.bytes() as f64 / CACHE_BYTES as f64));
    }
    let mut lines: Vec<Line> = shares
        .iter()
        .map(|(bytes, share)| {
            Line::new(format!("blocks of {}", Unit::Bytes.text(*bytes)), Unit::Percent, *share)
        })
        .collect();
    let (first, last) = (0, shares.len() - 1);
    lines[last] = lines[last]
        .clone()
        .published("near 0")
        .check(format!("below {}", Unit::Percent.text(NEAR_NOTHING)), shares[last].1 < NEAR_NOTHING);
    lines[first] = lines[first].clone().published("over 2 %").within(PUBLISHED_4K, OVER_4K);
    // The memory of one block, from two sizes, must explain the other sizes.
    let per_block = (shares[first].1 - shares[last].1) / (1.0 / shares[first].0 - 1.0 / shares[last].0);
    let follows = |(bytes, share): &(f64, f64)| {
        let expected = per_block / bytes + SECTOR_SHARE;
        (share / expected - 1.0).abs() <= APART_MAX
    };
    let is_per_block = shares.iter().all(follows);
    lines[first] = lines[first].clone().explained(
        is_per_block && shares[first].1 < PUBLISHED_4K,
        format!(
            "hob uses {per_block:.0} bytes for each block and 4 for each sector. These two \
             numbers give the memory for every block size. The published share is more than 82 \
             bytes for each block of 4 KB."
        ),
    );
    lines.push(Line::new("memory of one block, without checksums", Unit::Bytes, per_block));
    let falls = shares.is_sorted_by(|a, b| a.1 > b.1);
    lines.push(
        Line::new("from block to larger block", Unit::Count, if falls { "falling" } else { "not in order" })
            .published("falling")
            .check("falling", falls),
    );
    let floor = "hob keeps a checksum of four bytes for each 4 KiB sector, whatever the block size: with large blocks \
                 that is nearly all that is left, a thousandth of the cache.";
    let (x, y) =
        (Axis::new("cache block", Unit::Bytes).log(), Axis::new("share of the cache", Unit::Percent));
    let chart = CurveChart::new("Memory of the metadata, as a share of the cache", x, y)
        .subtitle("a cache of 1 GiB")
        .curve(Curve::new("measured", shares.clone()).dots())
        .marker(Marker::Y(PUBLISHED_4K, "published at 4 KB: over 2 %".to_owned()));
    Ok(Findings { lines, notes: vec![floor.to_owned()], picture: curves(&chart) })
}
