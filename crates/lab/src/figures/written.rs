//! Simulates continuous writers on hob's presets `zbs` and `vsan`: bandwidth by the amount written,
//! before and after the space for writes is full.

use anyhow::Result;
use hob_world::disk_model::{ArrayConfig, DriveConfig, Level};
use hob_world::flash_model::FlashConfig;
use hob_world::replay::CacheSetup;

use super::case::{Backing, Case, CaseCache, Measured, Portion};
use super::line::Line;
use super::{FigureInfo, Findings, Size, Work, fitted};
use crate::picture::{Axis, Curve, CurveChart, Marker, Unit, curves};

const GIB: f64 = 1_073_741_824.0;
const MIB: f64 = 1_048_576.0;

pub(super) const SEQUENTIAL: FigureInfo = FigureInfo {
    name: "zbs-sequential",
    title: "ZBS and vSAN: 256 KB sequential writes",
    source: "the comparison of vSAN and SmartX ZBS",
    published: "vSAN falls from 280 to 75 MB/s when 300 GB have filled its buffer of 268.3 GB; ZBS takes 500 GB without a \
                drop, 100 % of it into its one space of 1.5 TiB a node.",
    method: METHOD,
    fitted: &[
        fitted("disks of the slower run", "a fall to 27 %"),
        fitted("think-us of the paced run", "280 MB/s before the fall"),
    ],
    work: Work::Play { cases: sequential, judge: judge_sequential },
};

pub(super) const RANDOM: FigureInfo = FigureInfo {
    name: "zbs-random",
    title: "ZBS and vSAN: 4 KB random writes",
    source: "the comparison of vSAN and SmartX ZBS",
    published: "vSAN falls from 37 176 to 16 060 IOPS within 300 GB; ZBS takes 500 GB without a drop.",
    method: METHOD,
    fitted: &[fitted("think-us of the paced run", "37 176 writes a second before the fall")],
    work: Work::Play { cases: random, judge: judge_random },
};

const METHOD: &str = "A load like that of fio replaces the original load. Its clients write \
    every block of a range once. One node replaces the source's three. The preset vsan is on one \
    disk group (894 GB of flash, two disks), and the preset zbs on a whole node (1.5 TiB on two \
    flash devices, four disks). vSAN has 300 GB of random writes, as in the source, and 500 GB \
    of sequential writes, to show its rate after the fall. ZBS writes 500 GB, and in a third run \
    it writes until its flash is full. With random writes, ZBS also runs with destaging from 90 \
    % of its flash on instead of 20 %. The source names the drives. The Intel D3-S4610 of 960 GB \
    does 96 000 random reads and 51 000 random writes a second (Intel ARK, product 134917, as \
    others cite it). Its 510 MB/s of writes are from a shop, and 560 MB/s of reads are assumed. \
    No data sheet of the Toshiba SAS disk of 2.4 TB was found. A report on Toshiba gives 10 500 \
    rpm for its series AL15SE, and a test the same for another SAS disk of 2.4 TB (Seagate Exos \
    10E2400). 260 MiB/s at the outer edge are assumed, and the seek times are those of the \
    manual of another 10K disk (Seagate Savvio 10K.4). vSAN therefore also runs on disks that \
    are 20 % slower and 20 % faster. The source gives no queue depth; here, 32 writes of 256 KB, \
    or 128 of 4 KB, are in flight. There is no network, and no copy on another node.";

/// Reason why ZBS is a little slower from 20 % on, as printed on the page.
const DESTAGE_REASON: &str = "When a fifth of the flash is dirty, the preset zbs starts to \
    destage, and reads flash for this. The writers of this run write as fast as the flash \
    permits, so these reads reduce their rate. Writers that pause, and thus write at the rate of \
    the source's vSAN before its fall, leave enough time for the reads, and their rate does not \
    drop.";

/// Returns the reason why ZBS is a little slower with random writes from 20 % on. `paced` is the
/// share of their first rate that writers keep if they pause between writes.
fn random_destage_reason(paced: f64) -> String {
    format!(
        "When a fifth of the flash is dirty, the preset zbs starts to destage, and reads flash \
         for this, which delays the writes. If destaging starts only at 90 %, which 500 GB do \
         not reach, the rate of the same writers does not drop. Writers that pause, and thus \
         write at the rate of the source's vSAN before its fall, keep {} of their rate.",
        Unit::Percent.text(paced)
    )
}

/// Returns the reason why the rate of random writes falls further in hob than in the publication.
/// `slower` and `faster` are the last rate divided by the first on disks that are 20 % slower and
/// 20 % faster.
fn deep_fall_reason(slower: f64, faster: f64) -> String {
    format!(
        "If the buffer is full, hob sends random writes directly to the disks, as the source \
         describes. So the lowest rate depends on the disks, and no data sheet of the source's \
         disks was found. On disks that are 20 % faster than assumed, the rate falls to {}, \
         which is within a fifth of the published value. On disks that are 20 % slower, the rate \
         falls to {}.",
        Unit::Percent.text(faster),
        Unit::Percent.text(slower)
    )
}

/// Reason why the rate of sequential writes falls less in hob than in the publication.
const SMALL_FALL_REASON: &str = "The disks, with their rated speed, write sequential data as \
    fast as the flash. The source's disks were slower: with disks of a quarter of the rated \
    speed, the rate falls as far as in the source. One cause is vSAN's default of one stripe, \
    which leaves up to 255 GB of a volume on one disk. On one disk of the rated speed, the rate \
    falls further than on two disks, but less than in the source. The source does not say what \
    else made its disks slow.";

/// Reason why writes do not become slower when flash is full, as printed on the page.
const FAST_DISKS_NOTE: &str = "Four such disks write sequential data faster than two such flash \
    devices write two copies of it. When its flash is full, the preset zbs sends writes to the \
    disks, and its rate does not drop.";

/// The source's flash device, an Intel D3-S4610 of 960 GB: 96 000 random reads and 51 000 random
/// writes per second, 560 and 510 MB/s. The write buffer survives a power cut.
///
/// Source: Intel ARK, product 134917,
/// <https://ark.intel.com/content/www/us/en/ark/products/134917/intel-ssd-d3s4610-series-960gb-2-5in-sata-6gbs-3d2-tlc.html>,
/// as the repository loganmarchione/loganmarchione.com quotes it (content/posts/2022/10/index.md).
/// The 510 MB/s are from a shop's description, and the 560 MB/s are assumed.
pub(super) const SSD_960: FlashConfig = FlashConfig {
    queue_depth_max: 32,
    lanes: 32,
    page_bytes: 4096,
    read_command_ns: 10_400,
    write_command_ns: 19_600,
    read_page_ns: 90_000,
    program_page_ns: 230_000,
    read_bytes_per_s: 560_000_000,
    write_bytes_per_s: 510_000_000,
    write_buffer_bytes: 32 << 20,
};

/// Returns an array of the source's disks, Toshiba SAS disks of 2.4 TB. No data sheet was found.
/// Toshiba's series AL15SE has 10 500 rpm,
/// <https://www.techfromthenet.it/201905298713/Tech-storage/toshiba-lo-storage-meccanico-ha-ancora-carte-da-giocare.html>,
/// as does the Seagate Exos 10E2400, another SAS disk of 2.4 TB,
/// <https://hwp24.com/articles/seagate_exos_10e2400_testing_a_hybrid_sff_drive_with_an_extended_method/>.
/// The 260 MiB/s at the outer edge are assumed. The seek times are those of the Seagate Savvio
/// 10K.4 (3.8 ms on average, 7.8 ms over the full stroke),
/// <https://manualsdump.com/amp/en/manuals/136758/17>. The capacity of the array is `spare` times
/// `bytes`, and the load uses only the first part of this capacity.
fn disks(count: usize, bytes: u64, spare: u64) -> ArrayConfig {
    let rates = DriveConfig {
        outer_bytes_per_s: 272_600_000,
        inner_bytes_per_s: 136_300_000,
        ..DriveConfig::sas_10k()
    };
    ArrayConfig {
        disks: count,
        rpm: 10_500,
        level: Level::Raid0,
        stripe_bytes: 1 << 20,
        drive: rates,
        ..ArrayConfig::raid5_of_ten_10k(bytes * spare)
    }
}

/// Returns the two disks of a vSAN disk group, with 500 GB of their 4.8 TB in use.
pub(super) fn group(bytes: u64) -> ArrayConfig {
    disks(2, bytes, 9)
}

/// Returns the array with this percentage of its disks' media rate and speed of rotation.
fn at_percent(config: ArrayConfig, media: u64, rotation: u32) -> ArrayConfig {
    let rate = |bytes_per_s: u64| bytes_per_s * media / 100;
    let drive = DriveConfig {
        outer_bytes_per_s: rate(config.drive.outer_bytes_per_s),
        inner_bytes_per_s: rate(config.drive.inner_bytes_per_s),
        ..config.drive
    };
    ArrayConfig { drive, rpm: config.rpm * rotation / 100, ..config }
}

/// Returns the two disks of a vSAN disk group with a quarter of their media rate.
fn slow_group(bytes: u64) -> ArrayConfig {
    at_percent(group(bytes), 25, 100)
}

fn group_20_percent_slower(bytes: u64) -> ArrayConfig {
    at_percent(group(bytes), 80, 80)
}

fn group_20_percent_faster(bytes: u64) -> ArrayConfig {
    at_percent(group(bytes), 120, 120)
}

/// Returns one disk of a vSAN disk group, with 500 GB of its 2.4 TB in use.
fn one_disk(bytes: u64) -> ArrayConfig {
    disks(1, bytes, 5)
}

/// Returns the four disks of a ZBS node, with 500 GB of their 9.6 TB in use.
fn node(bytes: u64) -> ArrayConfig {
    disks(4, bytes, 18)
}

/// Returns the four disks of a ZBS node with 2 TB in use.
fn node_long(bytes: u64) -> ArrayConfig {
    disks(4, bytes, 4)
}

/// Changes a cache so that destaging begins only at 90 % dirty data. In the cache of a ZBS node,
/// 500 GiB of dirty data do not reach this share.
fn destage_late(cache: &mut CacheSetup) {
    let destage = &mut cache.config.destage;
    (destage.start_permille, destage.stop_permille) = (900, 900);
}

/// Maximum difference between the measured and the published fall of vSAN's rate, as a share of the
/// published fall.
const FALL_BOUND: f64 = 0.2;

/// Amount of dirty data that the one space of a ZBS node holds, bytes: 1.5 TiB, with two copies.
const DIRTY_MAX: f64 = 768.0 * GIB;

/// Maximum reduction of a rate that counts as no drop.
const NO_DROP: f64 = 0.05;

/// Maximum reduction of a rate that destaging can explain.
const DESTAGE_DROP: f64 = 0.2;

fn cases(generator: &'static str, scale: &str, depth: &str) -> Vec<Case> {
    let case = |cache, room: &str, span: &str, disks| {
        Case::new(generator, &[scale, depth, room, span], cache, Backing::Array(disks))
    };
    let vsan = CaseCache::Preset(SSD_960, "vsan");
    let zbs = CaseCache::Preset(SSD_960, "zbs");
    // If a larger part of a range is dirty, destaging writes more adjacent blocks in a row. Random
    // writes therefore use the same range as the source.
    let span = if generator == "seq-write" { "span=500GiB" } else { "span=300GiB" };
    let mut cases = vec![
        case(CaseCache::Off, "cache=894GiB", span, group),
        case(vsan, "cache=894GiB", span, group),
        case(zbs, "cache=1536GiB", "span=500GiB", node),
        case(CaseCache::Off, "cache=1536GiB", "span=2000GiB", node_long),
        case(zbs, "cache=1536GiB", "span=2000GiB", node_long),
    ];
    let (other, zbs_pause) = match generator {
        // 32 writers with this pause send 280 MB/s.
        "seq-write" => (case(vsan, "cache=894GiB", span, slow_group), "think-us=27400"),
        // 128 writers with this pause send 37 176 writes a second.
        _ => {
            let zbs = case(zbs, "cache=1536GiB", "span=500GiB", node);
            (Case { adjust: Some(destage_late), ..zbs }, "think-us=3300")
        }
    };
    cases.push(other);
    cases.push(case(zbs, "cache=1536GiB", "span=500GiB", node).set(zbs_pause));
    for disks in [group_20_percent_slower, group_20_percent_faster] {
        cases.push(case(vsan, "cache=894GiB", span, disks));
    }
    if generator == "seq-write" {
        cases.push(case(vsan, "cache=894GiB", span, one_disk));
    }
    cases
}

fn sequential(size: Size) -> Vec<Case> {
    let scale = match size {
        Size::Full => "scale=256",
        Size::Quick => "scale=4096",
    };
    cases("seq-write", scale, "depth=32")
}

fn random(size: Size) -> Vec<Case> {
    let scale = match size {
        Size::Full => "scale=1024",
        Size::Quick => "scale=65536",
    };
    cases("rand-write", scale, "depth=128")
}

/// Results of a run: before the flash space for writes was full, and at the end.
struct Course {
    /// Bandwidth of the first portions, in units per second.
    first: f64,
    last: f64,
    lowest: f64,
    /// Lowest rate of [`ENDS`] portions in a row. Writers that pause write in bursts, so one portion
    /// is too short for their rate.
    lowest_tenth: f64,
    /// Number of bytes written before the first write that went directly to the backing; the number
    /// of all written bytes if no write did.
    full_at: f64,
    to_flash: f64,
}

/// Number of portions in a tenth of a run. The first, the last and the slowest tenth are evaluated.
const ENDS: usize = 10;

fn course(run: &Measured, scale: f64, unit: fn(&Portion) -> f64) -> Course {
    let rate = |portions: &[Portion]| {
        let all = portions.iter().fold(Portion::default(), |sum, portion| Portion {
            bytes: sum.bytes + portion.bytes,
            requests: sum.requests + portion.requests,
            to_flash: sum.to_flash + portion.to_flash,
            ns: sum.ns + portion.ns,
        });
        (unit(&all), all)
    };
    let portions = &run.portions;
    let ends = ENDS.min(portions.len());
    let (_, all) = rate(portions);
    let before_full = portions.iter().take_while(|portion| portion.to_flash == portion.bytes);
    Course {
        first: rate(&portions[..ends]).0,
        last: rate(&portions[portions.len() - ends..]).0,
        lowest_tenth: portions
            .chunks_exact(ends.max(1))
            .map(|tenth| rate(tenth).0)
            .fold(f64::INFINITY, f64::min),
        lowest: portions.iter().map(unit).fold(f64::INFINITY, f64::min),
        full_at: before_full.map(|portion| portion.bytes).sum::<u64>() as f64 * scale,
        to_flash: all.to_flash as f64 / all.bytes as f64,
    }
}

/// Returns the factor by which the runs are smaller than those of the publication. The factor is
/// 500 GiB divided by the bytes that the writers wrote in the first run of preset zbs, rounded.
fn scale(runs: &[Measured]) -> f64 {
    let written: u64 = runs[2].portions.iter().map(|portion| portion.bytes).sum();
    (500.0 * GIB / written as f64).round()
}

fn judge_sequential(runs: &[Measured]) -> Result<Findings> {
    let published = (280.0 * MIB, 75.0 * MIB);
    judge(runs, Unit::BytesPerSecond, "bandwidth", Portion::rate, published)
}

fn judge_random(runs: &[Measured]) -> Result<Findings> {
    let iops = |portion: &Portion| portion.requests as f64 / (portion.ns as f64 / 1e9);
    judge(runs, Unit::Count, "writes a second", iops, (37_176.0, 16_060.0))
}

fn judge(
    runs: &[Measured],
    unit: Unit,
    what: &str,
    rate: fn(&Portion) -> f64,
    published: (f64, f64),
) -> Result<Findings> {
    let scale = scale(runs);
    let courses: Vec<Course> = runs.iter().map(|run| course(run, scale, rate)).collect();
    let [disks, vsan, zbs, node, long, other, paced, slower, faster, rest @ ..] = courses.as_slice() else {
        unreachable!("nine cases")
    };
    let line = |text: &str, value: f64| Line::new(format!("{what}, {text}"), unit, value);
    let share = |text: &str, value: f64| Line::new(text, Unit::Percent, value);
    let is_random = unit == Unit::Count;
    // A second run without the supposed cause confirms the reason for a difference. For the fall of
    // vSAN, the second run has other disks, and its rate must fall as far as in the publication.
    let fall_of = |run: &Course| run.last / run.first;
    let (other_fall, fall_reason) = match is_random {
        true => (fall_of(faster), deep_fall_reason(fall_of(slower), fall_of(faster))),
        false => (other.last / vsan.first, SMALL_FALL_REASON.to_owned()),
    };
    let published_fall = published.1 / published.0;
    let fall = share("vSAN, last against first", fall_of(vsan))
        .published(published_fall)
        .near(FALL_BOUND)
        .explained((published_fall - other_fall).abs() <= FALL_BOUND * published_fall, fall_reason);
    // For the drop of ZBS, the second run does not destage, or its writers pause so that flash has
    // time for destaging.
    let kept_if_paced = paced.lowest_tenth / paced.first;
    let (kept, is_to_flash, drop_reason) = match is_random {
        true => (other.lowest / other.first, other.to_flash == 1.0, random_destage_reason(kept_if_paced)),
        false => (kept_if_paced, paced.to_flash == 1.0, DESTAGE_REASON.to_owned()),
    };
    let is_small_drop = zbs.to_flash == 1.0 && zbs.lowest >= (1.0 - DESTAGE_DROP) * zbs.first;
    let no_drop = share("ZBS, lowest against first", zbs.lowest / zbs.first)
        .published(1.0)
        .near(NO_DROP)
        .explained(is_small_drop && is_to_flash && kept >= 1.0 - NO_DROP, drop_reason);
    let mut lines = vec![
        line("vSAN's two disks alone", disks.last),
        line("vSAN, first tenth", vsan.first)
            .published(published.0)
            .by_construction("the rating of the flash"),
        line("vSAN, last tenth", vsan.last),
        fall,
        Line::new("vSAN, written before the buffer is full", Unit::Bytes, vsan.full_at)
            .published(268.3 * GIB)
            .near(0.05),
        line("ZBS, first tenth", zbs.first),
        line("ZBS, last tenth of 500 GB", zbs.last),
        no_drop,
        line("ZBS, first tenth, writers that pause", paced.first)
            .published(published.0)
            .by_construction("think-us"),
        share("ZBS, lowest tenth against first, writers that pause", kept_if_paced),
        share("ZBS, written to flash of 500 GB", zbs.to_flash)
            .published(1.0)
            .check("100 %", zbs.to_flash == 1.0),
        line("ZBS's four disks alone", node.last),
        line("ZBS, last tenth of 2 TB", long.last),
        share("ZBS, last of 2 TB against first", long.last / long.first),
        Line::new("ZBS, written before the one space is full", Unit::Bytes, long.full_at)
            .published("more than 500 GB")
            .check(
                "768 GiB within 6 %: two copies of dirty data in 1.5 TiB",
                (long.full_at / DIRTY_MAX - 1.0).abs() <= 0.06 && long.to_flash < 1.0,
            ),
    ];
    for (what, run) in [("slower", slower), ("faster", faster)] {
        let text = format!("vSAN, last against first, disks 20 % {what}");
        lines.push(share(&text, fall_of(run)));
    }
    // Only random writes are compared with the disks alone: sequential writes that bypass the buffer
    // are a second stream, and the disks are fastest with one stream.
    match is_random {
        true => lines.extend([
            share("ZBS, lowest against first, destaging from 90 % on", kept),
            share("ZBS, written to flash of 500 GB, destaging from 90 % on", other.to_flash),
            Line::new("vSAN, last against its disks alone", Unit::Times, vsan.last / disks.last)
                .check("more than they do alone", vsan.last > disks.last),
        ]),
        false => lines.extend([
            share("vSAN, last against first, disks of a quarter of the speed", other_fall),
            share("vSAN, written to flash in that run", other.to_flash),
        ]),
    }
    for one_disk in rest {
        lines.push(share("vSAN, last against first, on one disk", one_disk.last / vsan.first));
    }
    let notes = if is_random { vec![] } else { vec![FAST_DISKS_NOTE.to_owned()] };
    Ok(Findings { lines, notes, picture: picture(runs, scale, unit, what, rate) })
}

fn picture(runs: &[Measured], scale: f64, unit: Unit, what: &str, rate: fn(&Portion) -> f64) -> String {
    let points = |run: &Measured| {
        let mut at = 0.0;
        let point = |portion: &Portion| {
            at += portion.bytes as f64 * scale;
            (at, rate(portion))
        };
        run.portions.iter().map(point).collect::<Vec<(f64, f64)>>()
    };
    let (x, y) = (Axis::new("written", Unit::Bytes), Axis::new(what, unit));
    let chart =
        CurveChart::new(format!("{}{} over what was written", what[..1].to_uppercase(), &what[1..]), x, y)
            .subtitle(format!("sizes are those of the source; played at 1/{scale}"))
            .curve(Curve::new("vsan", points(&runs[1])))
            .curve(Curve::new("zbs", points(&runs[4])))
            .curve(Curve::new("vsan's disks alone", points(&runs[0])))
            .marker(Marker::X(268.3 * GIB, "vSAN's buffer".to_owned()))
            .marker(Marker::X(500.0 * GIB, "the source's run of ZBS ends".to_owned()));
    curves(&chart)
}
