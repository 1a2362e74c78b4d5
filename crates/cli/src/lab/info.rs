//! `hob lab info TRACE`: properties of a trace.

use std::path::PathBuf;

use clap::Args;
use hob_control::Size;
use hob_lab::picture::{Axis, Curve, CurveChart, Unit, curves};
use hob_trace::TraceReader;
use hob_trace::profile::{ArrivalBucket, Profile, Profiler, SizeBucket};
use serde::Serialize;

use super::{Source, interruption, read_all, remarks, write_if};
use crate::Global;
use crate::output::{duration, pairs, print, table};

/// Show the properties of a trace: requests, footprint, reuse, sizes, arrivals
#[derive(Debug, Args)]
pub(crate) struct Info {
    #[command(flatten)]
    source: Source,
    /// Draw the rate of requests over time into this file, as SVG
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

/// The JSON output.
#[derive(Serialize)]
struct Report {
    trace: String,
    format: &'static str,
    #[serde(flatten)]
    profile: Profile,
    /// Names of the disks, by number.
    disk_names: Vec<String>,
    skipped: u64,
    skipped_first: Vec<String>,
    ignored: u64,
    late: u64,
}

pub(super) fn run(args: &Info, global: &Global) -> anyhow::Result<()> {
    let stop = interruption()?;
    let mut reader = args.source.open()?;
    let mut profiler = Profiler::default();
    read_all(&mut reader, &stop, |record| {
        profiler.add(record);
        Ok(())
    })?;
    let remarks = remarks(&reader);
    let report = report(args.source.trace.display().to_string(), &reader, profiler.finish());
    write_if(args.picture.as_ref(), || draw(&report))?;
    print(global.output, &report, |report| show(report, &remarks))
}

fn report(trace: String, reader: &TraceReader, profile: Profile) -> Report {
    Report {
        trace,
        format: reader.format().name,
        profile,
        disk_names: reader.disks().to_vec(),
        skipped: reader.skipped().count,
        skipped_first: reader.skipped().first.iter().map(ToString::to_string).collect(),
        ignored: reader.ignored(),
        late: reader.late(),
    }
}

fn show(report: &Report, remarks: &[String]) -> String {
    let profile = &report.profile;
    let mut parts = vec![facts(report)];
    if !profile.sizes.buckets.is_empty() {
        let row = |bucket: &SizeBucket| {
            vec![Size(bucket.from_bytes).human(), bucket.reads.to_string(), bucket.writes.to_string()]
        };
        let columns = "SIZE FROM|READS:|WRITES:";
        parts.push(table(columns, profile.sizes.buckets.iter().map(row)));
    }
    if profile.arrivals.buckets.len() > 1 {
        parts.push(format!(
            "requests over time, up to {}\n{}",
            rate(profile.arrivals.peak_per_s),
            sparkline(&profile.arrivals.buckets)
        ));
    }
    if report.disk_names.len() > 1 {
        let names = report.disk_names.iter().enumerate().take(DISKS_SHOWN);
        let rows = names.map(|(disk, name)| vec![disk.to_string(), name.clone()]);
        parts.push(table("DISK:|NAME", rows));
    }
    if !remarks.is_empty() {
        parts.push(remarks.join("\n"));
    }
    parts.join("\n\n")
}

const DISKS_SHOWN: usize = 32;

fn facts(report: &Report) -> String {
    let profile = &report.profile;
    let footprint = &profile.footprint;
    let about = if footprint.estimated { "about " } else { "" };
    let moved = profile.bytes_read + profile.bytes_written;
    let gaps = &profile.gaps;
    let mut facts = vec![
        ("trace", report.trace.clone()),
        ("format", report.format.to_owned()),
        ("requests", requests(profile)),
        ("reads", format!("{:.1} % of reads and writes", profile.read_percent)),
        ("disks", profile.disks.to_string()),
        ("moved", human(moved)),
        ("footprint", format!("{about}{} ({} sectors of 4 KiB)", human(footprint.bytes), footprint.sectors)),
        ("reuse", format!("{about}{:.1} % of the accesses to sectors", footprint.reuse_percent)),
        (
            "request size",
            format!(
                "{} ({:.0} %), {} on average",
                human(u64::from(profile.sizes.dominant_bytes)),
                profile.sizes.dominant_percent,
                human(profile.sizes.mean_bytes as u64)
            ),
        ),
        (
            "sequential",
            format!(
                "{:.1} % of requests, {:.1} % of bytes",
                profile.sequential.requests_percent, profile.sequential.bytes_percent
            ),
        ),
        ("duration", long_duration(profile.duration_ns)),
        (
            "arrivals",
            format!("{}, at most {}", rate(profile.arrivals.mean_per_s), rate(profile.arrivals.peak_per_s)),
        ),
        (
            "gaps",
            format!(
                "{} on average, variation {:.1}; 50 % ≤ {}, 90 % ≤ {}, 99 % ≤ {}",
                duration(gaps.mean_ns as u64),
                gaps.variation,
                duration(gaps.p50_ns),
                duration(gaps.p90_ns),
                duration(gaps.p99_ns)
            ),
        ),
    ];
    if report.ignored > 0 {
        facts.push(("other entries", format!("{} that are not requests", report.ignored)));
    }
    pairs(facts)
}

fn requests(profile: &Profile) -> String {
    let kinds = [
        (profile.reads, "reads"),
        (profile.writes, "writes"),
        (profile.discards, "discards"),
        (profile.flushes, "flushes"),
    ];
    let kinds: Vec<String> =
        kinds.iter().filter(|(count, _)| *count > 0).map(|(count, kind)| format!("{count} {kind}")).collect();
    if kinds.is_empty() { "none".to_owned() } else { format!("{} ({})", profile.requests, kinds.join(", ")) }
}

/// Formats a size with about three digits.
fn human(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value == value.floor() || value >= 100.0 { 0 } else { 1 };
    format!("{value:.digits$} {}", UNITS[unit])
}

fn rate(per_s: f64) -> String {
    match per_s {
        100.0.. => format!("{per_s:.0}/s"),
        1.0.. => format!("{per_s:.1}/s"),
        _ => format!("{:.1}/h", per_s * 3600.0),
    }
}

fn long_duration(nanos: u64) -> String {
    let seconds = nanos as f64 / 1e9;
    match seconds {
        172_800.0.. => format!("{:.1} days", seconds / 86_400.0),
        7_200.0.. => format!("{:.1} hours", seconds / 3_600.0),
        120.0.. => format!("{:.1} minutes", seconds / 60.0),
        _ => duration(nanos),
    }
}

/// Width of the line that shows rates, in characters; the highest rate has a full bar.
const SPARK_COLUMNS: usize = 72;

fn sparkline(buckets: &[ArrivalBucket]) -> String {
    const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let joined = buckets.chunks(buckets.len().div_ceil(SPARK_COLUMNS));
    let counts: Vec<u64> = joined
        .map(|part| part.iter().map(|bucket| bucket.reads + bucket.writes + bucket.others).sum())
        .collect();
    let most = counts.iter().copied().max().unwrap_or(0).max(1);
    // Any rate above 0 is visible.
    let level = |count: u64| (count as f64 / most as f64 * 8.0).ceil() as usize;
    counts.into_iter().map(|count| LEVELS[level(count).min(8)]).collect()
}

/// A function that returns the number of requests of one kind in a time bucket.
type Count = fn(&ArrivalBucket) -> u64;

/// Draws the requests per second over time, by kind.
fn draw(report: &Report) -> String {
    let Profile { arrivals, duration_ns, .. } = &report.profile;
    let end = *duration_ns as f64 / 1e9;
    // Kinds without requests have no line.
    let kinds: [(&str, Count); 3] = [
        ("reads", |bucket| bucket.reads),
        ("writes", |bucket| bucket.writes),
        ("discards, flushes", |bucket| bucket.others),
    ];
    let mut chart = CurveChart::new(
        "Requests over time",
        Axis::new("time", Unit::Seconds),
        Axis::new("requests/s", Unit::Count),
    )
    .subtitle(format!("{}, {} requests", report.trace, report.profile.requests));
    for (name, of) in kinds {
        if arrivals.buckets.iter().all(|bucket| of(bucket) == 0) {
            continue;
        }
        let from = |n: usize| n as f64 * arrivals.bucket_ns as f64 / 1e9;
        let mut points = Vec::with_capacity(arrivals.buckets.len() + 1);
        for (n, bucket) in arrivals.buckets.iter().enumerate() {
            // The last bucket is shorter than the others; a very short one would show a false peak.
            let width = if n == 0 { from(1) } else { (end - from(n)).clamp(from(1) / 2.0, from(1)) };
            points.push((from(n), of(bucket) as f64 / width));
        }
        points.extend(points.last().map(|last| (end.max(last.0), last.1)));
        let curve = Curve::new(name, points).steps();
        chart = chart.curve(if name == "reads" { curve.area() } else { curve });
    }
    curves(&chart)
}

#[cfg(test)]
mod tests {
    use hob_trace::{Op, Record};

    use super::*;

    fn report_of(records: &[Record]) -> Report {
        let mut profiler = Profiler::default();
        records.iter().for_each(|record| profiler.add(record));
        Report {
            trace: "t".to_owned(),
            format: "hob",
            profile: profiler.finish(),
            disk_names: vec![],
            skipped: 0,
            skipped_first: vec![],
            ignored: 0,
            late: 0,
        }
    }

    #[test]
    fn the_picture_shows_the_kinds_that_there_are() {
        let record = |at_ns, op| Record { at_ns, offset: 0, len: 512, op, disk: 0 };
        let some = report_of(&[record(0, Op::Read), record(5_000_000_000, Op::Flush)]);
        let picture = draw(&some);
        assert!(picture.contains("\nreads\n") && picture.contains("\ndiscards, flushes\n"), "{picture}");
        assert!(!picture.contains("\nwrites\n"), "{picture}");
        for nothing in [report_of(&[]), report_of(&[record(7, Op::Write)])] {
            assert!(draw(&nothing).starts_with("<svg "));
        }
    }

    #[test]
    fn sizes_and_durations_are_readable() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (4096, "4 KiB"),
            (6_000, "5.9 KiB"),
            (3 << 40, "3 TiB"),
            (1 << 63, "8 EiB"),
        ] {
            assert_eq!(human(bytes), text);
        }
        assert_eq!([rate(341.4), rate(15.84), rate(0.5)], ["341/s", "15.8/s", "1800.0/h"]);
        assert_eq!(long_duration(60_000_000_000), "60.0 s");
        assert_eq!(long_duration(600_000_000_000), "10.0 minutes");
        assert_eq!(long_duration(604_800_000_000_000), "7.0 days");
    }

    #[test]
    fn a_sparkline_shows_whatever_there_is() {
        let bucket = |reads| ArrivalBucket { reads, ..ArrivalBucket::default() };
        assert_eq!(sparkline(&[bucket(0), bucket(1), bucket(400), bucket(800)]), " ▁▄█");
        let many: Vec<_> = (0..200).map(bucket).collect();
        assert_eq!(sparkline(&many).chars().count(), 67);
    }
}
