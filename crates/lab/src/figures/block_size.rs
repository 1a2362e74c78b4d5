//! Measures the mean latency by the cache's block size. Blocks larger than the requests waste cache
//! space.

use anyhow::Result;
use hob_world::flash_model::FlashConfig;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, Size, Work, fitted};
use crate::picture::{Axis, Curve, CurveChart, Unit, curves};

/// Block sizes of the cache, bytes, and their published mean latencies, microseconds.
const PUBLISHED: [(u32, f64); 8] = [
    (4 << 10, 321.0),
    (8 << 10, 584.0),
    (16 << 10, 702.0),
    (32 << 10, 855.0),
    (64 << 10, 927.0),
    (128 << 10, 1088.0),
    (256 << 10, 1130.0),
    (512 << 10, 1185.0),
];

/// Block sizes whose latencies fix the three fitted parameters. The latencies of the other sizes
/// are checks.
const FITTED_BYTES: [u32; 3] = [4 << 10, 8 << 10, 512 << 10];

/// Published mean latency without a cache, nanoseconds. [`INFO`] names the publication.
const BASELINE_NS: u64 = 1_269_000;

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "block-size",
    title: "Block-size sweep on hardware monitoring",
    source: "the vSphere Flash Read Cache study",
    published: "The trace of the hardware-monitoring server on a cache of 4 GB: 321 µs with blocks of 4 KB, then \
                slower with each larger block, up to 1185 µs with 512 KB; 1269 µs without a cache.",
    method: "The generator hm replaces the original trace. Its hot spots are fitted to this \
             curve. The model of the backing answers every request after the published 1.269 ms. \
             The flash is a model of a SATA SSD with the rating that the source states.",
    fitted: &[fitted(
        "spots, theta, disk, warmup-per-spot",
        "the mean latencies with 4, 8 and 512 KB blocks",
    )],
    work: Work::Play { cases, judge },
};

fn cases(size: Size) -> Vec<Case> {
    let settings = match size {
        Size::Full => ["scale=1", "requests=600000"],
        Size::Quick => ["scale=256", "requests=6000"],
    };
    let case = |cache| Case::new("hm", &settings, cache, Backing::FixedNs(BASELINE_NS));
    let blocks = PUBLISHED.map(|(bytes, _)| case(CaseCache::Blocks(FlashConfig::sata_ssd(), bytes)));
    std::iter::once(case(CaseCache::Off).set("warmup-per-spot=0")).chain(blocks).collect()
}

fn judge(runs: &[Measured]) -> Result<Findings> {
    let baseline_s = BASELINE_NS as f64 / 1e9;
    let without = runs[0].mean_s();
    let means: Vec<f64> = runs[1..].iter().map(Measured::mean_s).collect();
    let mut lines = vec![
        Line::new("no cache", Unit::Seconds, without)
            .published(baseline_s)
            .by_construction("the modelled backing's fixed latency"),
    ];
    for ((bytes, micros), mean) in PUBLISHED.iter().zip(&means) {
        let what = format!("blocks of {}", Unit::Bytes.text(f64::from(*bytes)));
        let line = Line::new(what, Unit::Seconds, *mean).published(micros / 1e6);
        lines.push(match FITTED_BYTES.contains(bytes) {
            true => line.by_construction("spots, theta and disk"),
            false => line.near(0.15),
        });
    }
    let rises = means.is_sorted();
    lines.push(
        Line::new(
            "from block to larger block",
            Unit::Count,
            if rises { "never faster" } else { "not in order" },
        )
        .published("slower each time")
        .check("never faster", rises),
    );
    let best = means.iter().copied().fold(f64::INFINITY, f64::min);
    let is_best = |index: &usize| means[*index] == best;
    let best_bytes = (0..means.len()).find(is_best).map_or(f64::NAN, |index| f64::from(PUBLISHED[index].0));
    let best_is_smallest = means[1..].iter().all(|mean| *mean > means[0]);
    lines.push(
        Line::new("best block size", Unit::Bytes, best_bytes)
            .published(4096.0)
            .check("4 KiB", best_is_smallest),
    );
    Ok(Findings { lines, notes: vec![], picture: picture(without, &means, runs[1].requests) })
}

fn picture(without: f64, means: &[f64], requests: u64) -> String {
    let sizes = || PUBLISHED.iter().map(|(bytes, _)| f64::from(*bytes));
    let published = sizes().zip(PUBLISHED.map(|(_, micros)| micros / 1e6)).collect();
    let measured = sizes().zip(means.iter().copied()).collect();
    let (x, y) = (Axis::new("cache block", Unit::Bytes).log(), Axis::new("mean latency", Unit::Seconds));
    let chart = CurveChart::new("Mean latency by cache block", x, y)
        .subtitle(format!("{} requests of the generator hm on each", Unit::Count.text(requests as f64)))
        .curve(Curve::new("published", published).dots())
        .curve(Curve::new("measured", measured).dots())
        .curve(Curve::new("no cache", sizes().map(|bytes| (bytes, without)).collect()));
    curves(&chart)
}
