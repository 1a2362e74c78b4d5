//! `hob histogram DISK`: the distribution of a disk's requests, as bars.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use clap::builder::PossibleValuesParser;
use hob_control::{DiskHistograms, RequestHistogram};
use hob_engine::vscsi::{CLASSES, METRICS};

use super::Global;
use super::output::{duration, print, table, write};
use super::remote::ask;

/// Length of the longest bar in characters.
const BAR_CELLS: u64 = 40;

/// Show histograms of a disk's requests: lengths, seek distances, queue depths, latencies and
/// intervals, in the buckets of vscsiStats
///
/// Only a guest's reads and writes are counted. Histograms of reads ignore writes, and histograms
/// of writes ignore reads: for example, the distance of a read is measured from the previous read.
#[derive(Debug, Args)]
pub(crate) struct Histogram {
    /// The disk
    disk: String,
    /// Show only this histogram; may be given more than once [default: all]
    #[arg(long, value_name = "METRIC", value_parser = PossibleValuesParser::new(METRICS.iter().map(|row| row.name)))]
    kind: Vec<String>,
    /// Kind of requests
    #[arg(long, value_name = "CLASS", default_value = "all", value_parser = PossibleValuesParser::new(CLASSES.map(|(_, name)| name)))]
    class: String,
    /// Also write all histograms to this file as CSV; - writes only the CSV to standard output
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Reset the counters after printing them
    #[arg(long)]
    reset: bool,
}

pub(super) fn run(args: &Histogram, global: &Global) -> anyhow::Result<()> {
    let found = ask(global, async |client| {
        let found = client.histograms(&args.disk).await?;
        if args.reset {
            client.histograms_reset(&args.disk).await?;
        }
        Ok(found)
    })?;
    match &args.csv {
        Some(path) if path.as_os_str() == "-" => return write(found.to_csv().as_bytes()),
        Some(path) => std::fs::write(path, found.to_csv())
            .with_context(|| format!("cannot write {}", path.display()))?,
        None => {}
    }
    let is_wanted = |histogram: &RequestHistogram| {
        histogram.class == args.class && (args.kind.is_empty() || args.kind.contains(&histogram.metric))
    };
    print(global.output, &found, |found| show(found, is_wanted))
}

fn show(found: &DiskHistograms, is_wanted: impl Fn(&RequestHistogram) -> bool) -> String {
    let head = format!("{}, counting for {}", found.disk, duration(found.elapsed_ns));
    let shown = found.histograms.iter().filter(|histogram| is_wanted(histogram)).map(show_one);
    [head].into_iter().chain(shown).collect::<Vec<_>>().join("\n\n")
}

fn show_one(histogram: &RequestHistogram) -> String {
    let RequestHistogram { metric, title, unit, class, count, .. } = histogram;
    let whose = if class == "all" { "reads and writes" } else { class };
    let head = format!("{metric}: {title}, {unit}; {whose}");
    let (Some(min), Some(max), Some(mean)) = (histogram.min, histogram.max, histogram.mean) else {
        return format!("{head}\nnone yet");
    };
    let most = histogram.buckets.iter().map(|bucket| bucket.count).max().unwrap_or(0);
    let is_used = |index: &usize| histogram.buckets[*index].count > 0;
    let used: Vec<usize> = (0..histogram.buckets.len()).filter(is_used).collect();
    // Empty buckets are shown only between others.
    let (first, last) = (used[0], used[used.len() - 1]);
    let rows = (first..=last).map(|index| {
        let bucket = histogram.buckets[index];
        let before = index.checked_sub(1).and_then(|before| histogram.buckets[before].up_to);
        let bound = match (bucket.up_to, before) {
            (Some(bound), _) => format!("≤ {bound}"),
            (None, Some(before)) => format!("> {before}"),
            (None, None) => "any".to_owned(),
        };
        let share = 100.0 * bucket.count as f64 / *count as f64;
        let share = match share {
            share if share > 0.0 && share < 0.05 => "< 0.1 %".to_owned(),
            share => format!("{share:.1} %"),
        };
        vec![bound, bucket.count.to_string(), share, bar(bucket.count, most)]
    });
    let columns = "VALUE:|COUNT:|SHARE:|";
    format!("{head}\n{count} values from {min} to {max}, mean {mean:.1}\n{}", table(columns, rows))
}

/// Returns a bar proportional to the largest count, with a resolution of an eighth of a character.
/// A count above 0 is always visible.
fn bar(count: u64, most: u64) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = u128::from(count) * u128::from(BAR_CELLS) * 8 / u128::from(most.max(1));
    let eighths = eighths.max(u128::from(count > 0)) as usize;
    format!("{}{}", "█".repeat(eighths / 8), PARTS[eighths % 8])
}

#[cfg(test)]
mod tests {
    use hob_control::RequestBucket;

    use super::*;

    fn histogram(counts: &[u64]) -> RequestHistogram {
        let bounds = [Some(-5), Some(0), Some(5), None];
        let buckets =
            bounds.iter().zip(counts).map(|(up_to, count)| RequestBucket { up_to: *up_to, count: *count });
        let count = counts.iter().sum();
        let any = |value| (count > 0).then_some(value);
        RequestHistogram {
            metric: "seek".into(),
            title: "distance".into(),
            unit: "sectors".into(),
            class: "all".into(),
            count,
            min: any(-1),
            max: any(9),
            mean: (count > 0).then_some(2.0),
            buckets: buckets.collect(),
        }
    }

    #[test]
    fn bars_are_as_long_as_their_share() {
        for (count, expected) in [(0, 0), (1, 1), (500, 20), (999, 40), (1000, 40)] {
            assert_eq!(bar(count, 1000).chars().count(), expected, "{count}");
        }
        assert_eq!(bar(1, u64::MAX), "▏");
        assert_eq!(bar(u64::MAX, u64::MAX), "█".repeat(40));
        assert_eq!(bar(0, 0), "");
    }

    #[test]
    fn buckets_between_the_used_ones_are_shown() {
        let text = show_one(&histogram(&[0, 30, 0, 10]));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "seek: distance, sectors; reads and writes");
        assert_eq!(lines[1], "40 values from -1 to 9, mean 2.0");
        assert!(
            lines[3].starts_with("  ≤ 0") && lines[3].contains("75.0 %") && lines[3].ends_with('█'),
            "{text}"
        );
        assert!(lines[4].contains("≤ 5") && lines[4].ends_with("0.0 %"), "{text}");
        assert!(lines[5].contains("> 5") && lines.len() == 6, "{text}");
        assert!(show_one(&histogram(&[1, 0, 0, 99_999])).contains("< 0.1 %"));
        assert!(show_one(&histogram(&[0; 4])).ends_with("none yet"));
    }
}
