//! Simulates how hob's preset `vsan` divides the flash of a disk group into a read cache and a
//! write buffer.

use anyhow::Result;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::written::{SSD_960, group};
use super::{FigureInfo, Findings, Size, Work};
use crate::picture::{Axis, Curve, CurveChart, Marker, Unit, curves};

const GIB: f64 = 1_073_741_824.0;
/// Flash of the source's disk group. 5 GB of this flash are neither read cache nor write buffer.
const FLASH: f64 = 894.0 * GIB;
const READ: f64 = 620.6 * GIB;
const WRITE: f64 = 268.3 * GIB;

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "vsan-split",
    title: "vSAN hybrid: the read cache and the write buffer",
    source: "the comparison of vSAN and SmartX ZBS",
    published: "Of 894 GB of flash in a group 620.6 GB cache reads and 268.3 GB buffer writes.",
    method: "The preset vsan has the source's 894 GB. The generator zipf, without skew and over \
             2 TB, replaces the original load. One run only reads, and one only writes. Dirty \
             and clean blocks on flash are counted every 500 requests. The highest count is what \
             reads, or writes, can use of the flash.",
    fitted: &[],
    work: Work::Play { cases, judge },
};

fn cases(size: Size) -> Vec<Case> {
    let settings = |percent: &'static str| match size {
        Size::Full => [
            "scale=1024",
            "footprint=2TiB",
            "requests=800000",
            "cache=894GiB",
            "theta=0",
            "iops=20000",
            percent,
        ],
        Size::Quick => [
            "scale=65536",
            "footprint=2TiB",
            "requests=14000",
            "cache=894GiB",
            "theta=0",
            "iops=20000",
            percent,
        ],
    };
    let cache = CaseCache::Preset(SSD_960, "vsan");
    let case = |percent| Case::new("zipf", &settings(percent), cache, Backing::Array(group));
    vec![case("read-percent=100"), case("read-percent=0")]
}

fn judge(runs: &[Measured]) -> Result<Findings> {
    let scale = FLASH / (runs[0].stats.blocks * 4096) as f64;
    let most = |run: &Measured, bytes: fn(&hob_world::replay::Sample) -> u64| {
        run.samples.iter().map(bytes).max().unwrap_or(0) as f64 * scale
    };
    let read = most(&runs[0], |sample| sample.valid_bytes - sample.dirty_bytes);
    let written = most(&runs[1], |sample| sample.dirty_bytes);
    let line = |text: &str, bytes: f64, published: f64| {
        Line::new(text, Unit::Bytes, bytes).published(published).within(0.98 * published, 1.02 * published)
    };
    let lines = vec![
        line("most that reads had of the flash", read, READ),
        line("most that writes had of the flash", written, WRITE),
        Line::new("reads' share", Unit::Percent, read / FLASH),
        Line::new("writes' share", Unit::Percent, written / FLASH),
    ];
    let points = |run: &Measured, bytes: fn(&hob_world::replay::Sample) -> u64| {
        let point =
            |sample: &hob_world::replay::Sample| (sample.requests as f64, bytes(sample) as f64 * scale);
        run.samples.iter().map(point).collect::<Vec<(f64, f64)>>()
    };
    let (x, y) = (Axis::new("requests", Unit::Count), Axis::new("held by flash", Unit::Bytes));
    let chart = CurveChart::new("What reads and writes have of the flash", x, y)
        .subtitle("sizes are those of the source")
        .curve(Curve::new(
            "only reads: clean",
            points(&runs[0], |sample| sample.valid_bytes - sample.dirty_bytes),
        ))
        .curve(Curve::new("only writes: dirty", points(&runs[1], |sample| sample.dirty_bytes)))
        .marker(Marker::Y(READ, "published read cache".to_owned()))
        .marker(Marker::Y(WRITE, "published write buffer".to_owned()));
    Ok(Findings { lines, notes: vec![], picture: curves(&chart) })
}
