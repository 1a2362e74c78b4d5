//! Measures shares, limits and reservations of disks that compete for one array, with the daemon's
//! scheduler and throttle.

use anyhow::Result;
use hob_engine::command::CommandError;
use hob_engine::qos::{Control, DiskQos, Entitlement, Late};
use hob_world::disk_model::ArrayConfig;
use hob_world::flash_model::FlashConfig;
use hob_world::replay::Replay;

use super::case::{Backing, Case, CaseCache, Measured};
use super::line::Line;
use super::{FigureInfo, Findings, Size, Work};
use crate::picture::{Bar, BarChart, BarGroup, Unit, bars};

/// Shares of the levels low, normal and high.
pub(super) const SHARES: [u32; 3] = [500, 1000, 2000];
/// Limit of the first disk in one run, units per second.
const LIMIT: u32 = 100;
/// Reservation of the first disk in one run, units per second.
const RESERVATION: u32 = 700;
/// Latency above which the datastore is throttled, nanoseconds.
const LATE_NS: u64 = 30_000_000;

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "sioc",
    title: "Storage I/O Control: shares, limits and reservations",
    source: "the documentation of Storage I/O Control",
    published: "Shares low, normal and high are 500, 1000 and 2000, and divide the datastore under contention; a limit is \
                an upper and a reservation a lower bound of I/Os a second. They are set once and apply automatically, on \
                flash-backed datastores too. I/Os count in units of 32 KB.",
    method: "The generator contenders replaces the original load. It has three disks with 32 \
             random readers of 8 KB each, on RAID 5 of five 15K disks. The engine's scheduler \
             divides the I/O, and throttles at a latency of 30 ms. With flash, each disk has a \
             cache of half its data. Hits use no I/O of the datastore, so the limit and the \
             reservation are compared with the reads of the datastore.",
    fitted: &[],
    work: Work::Play { cases, judge },
};

fn throttled(replay: &mut Replay) {
    replay.throttle(Control::Latency { late: Late::Above(LATE_NS), weight_milli: 1000 });
}

fn entitle(replay: &mut Replay, of: impl Fn(u32) -> Entitlement) -> Result<(), CommandError> {
    (0..3).try_for_each(|disk| {
        let qos = DiskQos { backing: of(disk), ..DiskQos::default() };
        replay.set_qos(disk, qos)
    })
}

fn of_shares(disk: u32) -> Entitlement {
    Entitlement { shares: SHARES[disk as usize], ..Entitlement::default() }
}

pub(super) fn shares_alone(replay: &mut Replay) -> Result<(), CommandError> {
    entitle(replay, of_shares)
}

fn shares(replay: &mut Replay) -> Result<(), CommandError> {
    throttled(replay);
    entitle(replay, of_shares)
}

/// Gives the first disk this limit and reservation, and all disks the same shares.
fn bounds(replay: &mut Replay, limit: Option<u32>, reservation: u32) -> Result<(), CommandError> {
    throttled(replay);
    entitle(replay, |disk| match disk {
        0 => Entitlement { limit, reservation, ..Entitlement::default() },
        _ => Entitlement::default(),
    })
}

fn limit(replay: &mut Replay) -> Result<(), CommandError> {
    bounds(replay, Some(LIMIT), 0)
}

fn reservation(replay: &mut Replay) -> Result<(), CommandError> {
    bounds(replay, None, RESERVATION)
}

pub(super) fn equal(replay: &mut Replay) -> Result<(), CommandError> {
    bounds(replay, None, 0)
}

fn cases(size: Size) -> Vec<Case> {
    let (requests, footprint, cache_size) = match size {
        Size::Full => ("requests=60000", "footprint=256MiB", "cache=384MiB"),
        Size::Quick => ("requests=3000", "footprint=16MiB", "cache=24MiB"),
    };
    let array = Backing::Array(ArrayConfig::raid5_of_five_15k);
    let case = |begin| Case::new("contenders", &["scale=1", requests], CaseCache::Off, array).begin(begin);
    let flash = |begin| Case {
        cache: CaseCache::Planned(FlashConfig::sata_ssd()),
        ..case(begin).set(cache_size).set(footprint).set("sweeps=1")
    };
    vec![
        case(shares_alone),
        case(shares),
        flash(shares),
        case(shares).set("depth=1"),
        case(limit),
        case(reservation),
        case(equal).set("last-io=64KiB"),
        flash(limit),
        flash(reservation),
    ]
}

fn judge(runs: &[Measured]) -> Result<Findings> {
    let [off, shared, flash, light, limited, reserved, large, flash_limited, flash_reserved] = runs else {
        unreachable!("nine cases")
    };
    // Number of reads per second that the first disk sends to the datastore. Hits are not included.
    let of_datastore = |run: &Measured| run.stats.backing.ios as f64 / (run.elapsed_ns as f64 / 1e9);
    let ratios = |run: &Measured| [run.rate(1) / run.rate(0), run.rate(2) / run.rate(1)];
    let times = |text: &str, value: f64| Line::new(text, Unit::Times, value);
    let count = |text: &str, value: f64| Line::new(text, Unit::Count, value);
    let mut lines = Vec::new();
    for (what, run) in [("", shared), (", with flash", flash)] {
        let [normal, high] = ratios(run);
        lines.push(times(&format!("normal shares against low{what}"), normal).published(2.0).near(0.1));
        lines.push(times(&format!("high shares against normal{what}"), high).published(2.0).near(0.1));
    }
    let hits = flash.stats.read_hit_ratio();
    let [light_normal, light_high] = ratios(light);
    lines.extend([
        Line::new("read hits, with flash", Unit::Percent, hits),
        times("high shares against low, not throttled", off.rate(2) / off.rate(0)),
        times("high shares against low, without contention", light_normal * light_high)
            .published("shares apply under contention")
            .within(0.95, 1.05),
        count("I/Os a second of the disk with a limit of 100", limited.rate(0))
            .published(f64::from(LIMIT))
            .near(0.05),
        count("I/Os a second of the others together", limited.rate(1) + limited.rate(2)),
        count("I/Os a second of the disk with a reservation of 700", reserved.rate(0))
            .published("at least 700")
            .check("at least 693", reserved.rate(0) >= 0.99 * f64::from(RESERVATION)),
        count("I/Os a second of each of the others", (reserved.rate(1) + reserved.rate(2)) / 2.0),
        count("datastore reads a second with a limit of 100 and flash", of_datastore(flash_limited))
            .published(f64::from(LIMIT))
            .near(0.05),
        count("I/Os a second of this disk, with its hits", flash_limited.rate(0)),
        count("datastore reads a second with a reservation of 700 and flash", of_datastore(flash_reserved))
            .published("at least 700")
            .check("at least 693", of_datastore(flash_reserved) >= 0.99 * f64::from(RESERVATION)),
        count("I/Os a second of this disk, with its hits, reserved", flash_reserved.rate(0)),
        times("I/Os of 64 KB against I/Os of 8 KB, equal shares", large.rate(2) / large.rate(0))
            .published(0.5)
            .near(0.1),
    ]);
    let mut chart = BarChart::new("I/Os a second by shares", "I/Os a second", Unit::Count)
        .subtitle(format!(
            "{} requests of the generator contenders on each",
            Unit::Count.text(shared.requests as f64)
        ))
        .series("low: 500")
        .series("normal: 1000")
        .series("high: 2000");
    let bars_of = |run: &Measured| [0, 1, 2].map(|disk| Bar::Value(run.rate(disk)));
    for (name, run) in [("not throttled", off), ("throttled", shared), ("with flash", flash)] {
        chart = chart.group(BarGroup::new(name, bars_of(run)));
    }
    Ok(Findings { lines, notes: vec![], picture: bars(&chart) })
}
