//! Simulates 200 virtual desktops on hob's preset `fast-cache`: the peak rate, and the latency
//! during the peak and overall.

use anyhow::Result;
use hob_world::disk_model::{ArrayConfig, WriteCache};
use hob_world::flash_model::FlashConfig;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, Size, Work, fitted};
use crate::picture::{Bar, BarChart, BarGroup, Unit, bars};

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "fast-cache-desktops",
    title: "FAST Cache: 200 virtual desktops",
    source: "the EMC FAST Cache study",
    published: "200 desktops of 1.34 reads of 14 KB and 7.58 writes of 12 KB a second, RAID 5 of five 15K disks, 100 GB of \
                flash: 3848 IOPS at the peak, mean below 2 ms, 3.17 ms at the peak, hits near 100 %, a mean utilisation of \
                59.7 %. Desktops are \
                comfortable up to a mean of 10 ms and peaks of 20 ms. The array has 12 GB of DRAM, which the flash relieves \
                from 100 desktops to 200.",
    method: "The generator vdi replaces the original desktops. Its boot storm has the published \
             peak. The data of 400 GB is chosen; the source only says that the data was much \
             larger than the cache. The common image is on other storage, so all requests are to \
             the desktops' own data, with the published mix in all phases. Because the source's \
             cache was warm, one day is played before the measured one. The preset fast-cache \
             has 100 GB on a mirrored pair of SATA SSDs. All desktops are on one disk, because \
             the array does not distinguish them. The array has a write cache of 512 MB, as is \
             usual for such arrays. Above the flash, 12 GB of DRAM cache reads. The run with 100 \
             desktops has half the data. One more run has less skew, so that its disks are as \
             busy as the source's.",
    fitted: &[
        fitted("boot-iops", "the peak of 3848 I/Os a second"),
        fitted("theta", "hits near 100 %"),
        fitted("theta of the run with less skew", "a mean utilisation of 59.7 %"),
    ],
    work: Work::Play { cases, judge },
};

/// The published mean utilisation, which is compared with that of the disks.
const UTILISATION: f64 = 0.597;

/// Maximum difference from the published utilisation, as a share of the published utilisation.
const UTILISATION_BOUND: f64 = 0.2;

/// Setting of the generator for a skew at which the disks are as busy as in the source. With less
/// skew, more requests miss flash, and the disks are busier.
const BUSY_THETA: &str = "theta=1.27";

/// Returns the reason why the disks have another utilisation than in the source. `share` is the
/// share of requests that DRAM and flash serve in the run with less skew. `utilisation` is the
/// utilisation of the disks in this run.
fn utilisation_reason(share: f64, utilisation: f64) -> String {
    let [share, utilisation] = [share, utilisation].map(|value| Unit::Percent.text(value));
    format!(
        "The disks serve only the requests that miss flash. With less skew, DRAM and flash serve \
         only {share} of the requests, and the utilisation is {utilisation}, within a fifth of \
         the published one. The source states hits near 100 %. So its disks also had work that \
         it does not describe, and that is not modelled here."
    )
}

/// Factor by which the data, the cache and the array's write cache are smaller than the source's.
const SCALE: u64 = 64;

/// Returns the source's array with its write cache of 512 MB at the scale of the figure.
fn array(bytes: u64) -> ArrayConfig {
    let write_cache = Some(WriteCache { bytes_max: (512 << 20) / SCALE, latency_ns: 300_000 });
    ArrayConfig { write_cache, ..ArrayConfig::raid5_of_five_15k(bytes) }
}

fn cases(size: Size) -> Vec<Case> {
    let settings: &[&str] = match size {
        Size::Full => &["scale=64"],
        Size::Quick => &["scale=64", "boot-s=1", "login-s=1", "work-s=2"],
    };
    let own_data = [
        "data=400GiB",
        "theta=1.6",
        "image-reads-percent=0",
        "boot-read-percent=15",
        "login-read-percent=15",
    ];
    let settings: Vec<&str> = settings.iter().copied().chain(own_data).collect();
    let array = Backing::Array(array);
    let cache = CaseCache::Preset(FlashConfig::sata_ssd(), "fast-cache");
    let case = |cache| Case::new("vdi", &settings, cache, array).on_one_disk();
    let cached = || case(cache).twice().memory(12 << 30);
    let fewer = cached().set("desktops=100").set("data=200GiB");
    vec![case(CaseCache::Off), cached(), fewer, cached().set(BUSY_THETA)]
}

fn judge(runs: &[Measured]) -> Result<Findings> {
    let [without, with, fewer, busy] = runs else { unreachable!("four cases") };
    let [share, busy_share] = [with, busy].map(|run| run.served().both());
    let is_as_busy = (busy.utilisation / UTILISATION - 1.0).abs() <= UTILISATION_BOUND;
    // Share of the reads, for the memory tier serves only reads.
    let of_reads = |run: &Measured| run.served().memory * run.requests as f64 / run.stats.reads as f64;
    let [memory_few, memory_all] = [of_reads(fewer), of_reads(with)];
    let (mean, (peak, peak_mean)) = (with.mean_s(), with.peak);
    let lines = vec![
        Line::new("peak I/Os a second", Unit::Count, peak as f64)
            .published(3848.0)
            .by_construction("boot-iops"),
        Line::new("mean latency", Unit::Seconds, mean)
            .published("below 2 ms")
            .check("below 2 ms", mean < 0.002),
        Line::new("mean latency in the second of the peak", Unit::Seconds, peak_mean)
            .published(0.003_17)
            .check("at most 3.17 ms", peak_mean <= 0.003_17),
        Line::new("mean latency, comfort limit", Unit::Seconds, mean)
            .published("at most 10 ms")
            .check("at most 10 ms", mean <= 0.010),
        Line::new("comfort limit in the second of the peak", Unit::Seconds, peak_mean)
            .published("at most 20 ms")
            .check("at most 20 ms", peak_mean <= 0.020),
        Line::new("served by DRAM and flash", Unit::Percent, share)
            .published("near 100 %")
            .by_construction("theta"),
        Line::new("reads that DRAM serves, 100 desktops", Unit::Percent, memory_few),
        Line::new("reads that DRAM serves, 200 desktops", Unit::Percent, memory_all)
            .published("DRAM is relieved")
            .check("less than with 100, and flash the more", memory_all < memory_few && share >= 0.95),
        Line::new("mean utilisation of the disks, no cache", Unit::Percent, without.utilisation),
        Line::new("mean utilisation of the disks", Unit::Percent, with.utilisation)
            .published(UTILISATION)
            .near(UTILISATION_BOUND)
            .explained(is_as_busy && busy_share < share, utilisation_reason(busy_share, busy.utilisation)),
        Line::new("mean utilisation of the disks, less skew", Unit::Percent, busy.utilisation),
        Line::new("served by DRAM and flash, less skew", Unit::Percent, busy_share),
        Line::new("peak I/Os a second, no cache", Unit::Count, without.peak.0 as f64)
            .check("below the peak of the load", without.peak.0 < peak),
        Line::new("mean latency, no cache", Unit::Seconds, without.mean_s()),
    ];
    let chart = BarChart::new("Peak I/Os a second", "I/Os a second", Unit::Count)
        .subtitle(format!("{} requests of the generator vdi on each", Unit::Count.text(with.requests as f64)))
        .series("published")
        .series("measured")
        .group(BarGroup::new("FAST Cache, 100 GB", [Bar::Value(3848.0), Bar::Value(peak as f64)]))
        .group(BarGroup::new("no cache", [Bar::Missing, Bar::Value(without.peak.0 as f64)]));
    Ok(Findings { lines, notes: vec![], picture: bars(&chart) })
}
