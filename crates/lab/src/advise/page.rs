//! Renders the advice as an HTML page.

use super::sentences::{bytes, ms, percent, years};
use super::text::{footprint, through_ns};
use super::{Advice, BlockSize, Setting, Trial};
use crate::page::{Card, Cell, Figure, Page, Section, Table};
use crate::picture::{Axis, Bar, BarChart, BarGroup, Curve, CurveChart, Marker, Unit, bars, curves};

/// Returns the advice as a self-contained HTML page. `made_by` is the command that created the
/// page.
pub fn page(advice: &Advice, made_by: &str) -> String {
    let mut page = Page::new(format!("A cache for {}?", advice.trace)).lead(&advice.summary).made_by(made_by);
    for card in cards(advice) {
        page = page.card(card);
    }
    if !advice.command.is_empty() {
        let section = Section::new("What to do")
            .paragraph("Replace DISK and POOL by the names of the disk and of a pool with enough space:")
            .command(&advice.command);
        page = page.section(section);
    }
    page = page.section(advice.why.iter().fold(Section::new("Why"), Section::paragraph));
    if !advice.caveats.is_empty() {
        page = page.section(advice.caveats.iter().fold(Section::new("Mind"), Section::note));
    }
    page = page.section(size_section(advice));
    if !advice.runners_up.is_empty() {
        page = page.section(runner_up_section(advice));
    }
    if !advice.policies.is_empty() {
        page = page.section(policy_section(advice)).section(admission_section(advice));
    }
    page = page.section(block_section(advice));
    if let Some(section) = latency_section(advice) {
        page = page.section(section);
    }
    page.section(trace_section(advice)).render()
}

fn cards(advice: &Advice) -> Vec<Card> {
    let best = percent(advice.target.best_read_hit_ratio);
    let Some(advised) = &advice.recommendation else {
        return vec![Card::new("best hit ratio of any cache", best).note("of reads")];
    };
    let (cache, setting) = (&advised.cache, &advised.cache.setting);
    let size = Card::new("cache size", bytes(setting.cache_bytes));
    let blocks = Card::new("blocks", bytes(setting.block_bytes.into()));
    let mut cards = vec![
        size.note(format!("{} of what is touched", percent(advised.of_footprint))),
        blocks.note(format!("policy {}", setting.policy.info().name)),
        Card::new("reads from flash", percent(cache.read_hit_ratio)).note(format!("no cache exceeds {best}")),
    ];
    if let Some(latency) = &advice.latency {
        let mean = Card::new("mean read", ms(latency.with_ns));
        cards.push(mean.note(format!("without a cache {}", ms(latency.without_ns))));
    }
    if let Some(wear) = &advice.wear {
        let writes = Card::new("flash writes a day", bytes(wear.flash_write_bytes_per_day as u64));
        cards.push(writes.note(format!("flash lasts {}", years(wear.life_years))));
    }
    cards
}

/// Returns the block sizes whose curves are drawn: the advised block size, a quarter and four times
/// of that size, and 4 KiB. The curves of other block sizes would lie between these curves and hide
/// them. The table has all block sizes.
pub(super) fn curves_shown(advice: &Advice) -> impl Iterator<Item = &BlockSize> {
    let advised = advice.recommendation.as_ref().map(|advised| advised.cache.setting.block_bytes);
    let middle = advised.map_or(64 << 10, u64::from);
    let shown = [4096, middle / 4, middle, middle * 4];
    advice.block_sizes.iter().filter(move |size| shown.contains(&size.block_bytes))
}

fn size_section(advice: &Advice) -> Section {
    let sizes = Axis::new("cache size", Unit::Bytes).log();
    let mut chart = CurveChart::new(
        "Reads from flash by cache size",
        sizes,
        Axis::new("reads from flash", Unit::Percent),
    )
    .subtitle(format!("{}; LRU, by block size", advice.trace));
    for size in curves_shown(advice) {
        let points = size.curve.iter().map(|point| (point.cache_bytes as f64, point.read_hit_ratio));
        chart = chart.curve(Curve::new(bytes(size.block_bytes), points.collect()));
    }
    if let Some(knee) = advice.knee {
        chart = chart.marker(Marker::X(knee.cache_bytes as f64, format!("knee {}", bytes(knee.cache_bytes))));
    }
    if let Some(advised) = &advice.recommendation {
        let size = advised.cache.setting.cache_bytes;
        chart = chart.marker(Marker::X(size as f64, format!("advised {}", bytes(size))));
        chart = chart.marker(Marker::Y(advice.target.read_hit_ratio, "aim".to_owned()));
    }
    let caption =
        "Share of the reads that an LRU cache of each size would have served, from one pass over the trace.";
    let section = Section::new("Size").figure(Figure::new(curves(&chart), caption));
    if advice.sizes.is_empty() {
        return section;
    }
    let heads = [
        "cache size",
        "of what is touched",
        "best policy",
        "read hits",
        "bytes of reads",
        "flash writes",
        "index in memory",
    ];
    let rows = advice.sizes.iter().map(|trial| {
        let share = percent(trial.setting.cache_bytes as f64 / footprint(advice));
        [
            vec![
                named(bytes(trial.setting.cache_bytes), advice, |advised| *advised == trial.setting),
                Cell::number(share),
                Cell::text(trial.setting.policy.info().name),
            ],
            figures(trial),
        ]
        .concat()
    });
    section.table(
        rows.fold(
            Table::new(heads)
                .caption("The advised cache in other sizes, each with the best policy there")
                .copyable(),
            Table::row,
        ),
    )
}

/// Returns a row's name, with a note if the row is the recommended cache.
fn named(name: String, advice: &Advice, is_same: impl Fn(&Setting) -> bool) -> Cell {
    let advised = advice.recommendation.as_ref().is_some_and(|advised| is_same(&advised.cache.setting));
    Cell::text(if advised { format!("{name} (advised)") } else { name })
}

fn figures(trial: &Trial) -> Vec<Cell> {
    vec![
        Cell::number(percent(trial.read_hit_ratio)),
        Cell::number(percent(trial.read_hit_byte_ratio)),
        Cell::number(bytes(trial.flash_write_bytes)),
        Cell::number(bytes(trial.memory_bytes)),
    ]
}

fn runner_up_section(advice: &Advice) -> Section {
    let heads = ["property changed", "value", "mean request"].into_iter().chain(FIGURES);
    let mean = |ns: Option<u64>| ns.map_or(Cell::Missing, |ns| Cell::number(ms(ns)));
    let rows = advice.runners_up.iter().map(|other| {
        let named = vec![Cell::text(other.property), Cell::text(&*other.value), mean(other.mean_ns)];
        [named, figures(&other.trial)].concat()
    });
    let mut table =
        Table::new(heads).caption("The best alternative for each property, write-through").copyable();
    if let Some(advised) = &advice.recommendation {
        let named = vec![Cell::text("none"), Cell::text("as advised"), mean(through_ns(advice))];
        table = table.row([named, figures(&advised.write_through)].concat());
    }
    Section::new("Runners-up").table(rows.fold(table, Table::row))
}

const FIGURES: [&str; 4] = ["read hits", "bytes of reads", "flash writes", "index in memory"];

fn policy_section(advice: &Advice) -> Section {
    let mut chart = BarChart::new("Reads from flash by policy", "reads from flash", Unit::Percent)
        .subtitle("at the advised size and block size");
    for trial in &advice.policies {
        let bar = Bar::Value(trial.read_hit_ratio);
        chart = chart.group(BarGroup::new(trial.setting.policy.info().name, [bar]));
    }
    let heads = ["policy"].into_iter().chain(FIGURES).chain(["what it does"]);
    let rows = advice.policies.iter().map(|trial| {
        let info = trial.setting.policy.info();
        [vec![Cell::text(info.name)], figures(trial), vec![Cell::text(info.summary)]].concat()
    });
    Section::new("Policy")
        .figure(Figure::new(bars(&chart), "Simulated with the daemon's own code."))
        .table(rows.fold(Table::new(heads).caption("Policies that the daemon has").copyable(), Table::row))
}

fn admission_section(advice: &Advice) -> Section {
    let heads = ["admission"].into_iter().chain(FIGURES);
    let rows = advice.admissions.iter().map(|trial| {
        [
            vec![named(trial.setting.admission.to_string(), advice, |advised| {
                advised.admission == trial.setting.admission
            })],
            figures(trial),
        ]
        .concat()
    });
    Section::new("Admission").paragraph("The admission decides how much data is written to flash.").table(
        rows.fold(
            Table::new(heads).caption("The advised cache with other admissions").copyable(),
            Table::row,
        ),
    )
}

fn block_section(advice: &Advice) -> Section {
    let aim = format!("size for {}", percent(advice.target.read_hit_ratio));
    let heads = ["block".to_owned(), "read hits at that size".to_owned(), aim, "knee".to_owned()];
    let row = |size: &BlockSize| {
        let cell = |bytes_of: Option<u64>| bytes_of.map_or(Cell::Missing, |value| Cell::number(bytes(value)));
        [
            Cell::text(bytes(size.block_bytes)),
            Cell::number(percent(size.read_hit_ratio)),
            cell(size.target_bytes),
            cell(size.knee.map(|knee| knee.cache_bytes)),
        ]
    };
    Section::new("Block size")
        .paragraph(
            "Larger blocks need less memory for their index, and waste room where little of a block is used. \
             In these figures, a miss brings in only the sectors that were asked for, as with --fill sectors.",
        )
        .table(
            advice
                .block_sizes
                .iter()
                .map(row)
                .fold(Table::new(heads).caption("LRU by block size").copyable(), Table::row),
        )
}

fn latency_section(advice: &Advice) -> Option<Section> {
    let latency = advice.latency.as_ref()?;
    let row = |name: &str, ns: u64| [Cell::text(name), Cell::number(ms(ns))];
    let table = Table::new(["mean read", "latency"])
        .caption("Expected, on models")
        .row(row("without a cache", latency.without_ns))
        .row(row("with the advised cache", latency.with_ns))
        .row(row("of these, from flash", latency.hit_ns))
        .row(row("of these, from the backing", latency.miss_ns))
        .copyable();
    Some(Section::new("Latency").table(table).paragraph(format!(
        "From {} requests at the end of the trace in virtual time, after {} that warmed the cache, on {} and {}. \
         Hits and misses are weighed with the hit ratio over the whole trace.",
        latency.requests, latency.warmup, latency.backing, latency.flash,
    )))
}

fn trace_section(advice: &Advice) -> Section {
    let profile = &advice.profile;
    let row = |name: &str, value: String| [Cell::text(name), Cell::number(value)];
    let table = Table::new(["of the trace", ""])
        .row(row("requests", profile.requests.to_string()))
        .row(row("reads", percent(profile.read_percent / 100.0)))
        .row(row("bytes read", bytes(profile.bytes_read)))
        .row(row("bytes written", bytes(profile.bytes_written)))
        .row(row("touched", bytes(profile.footprint.bytes)))
        .row(row("touches that return", percent(profile.footprint.reuse_percent / 100.0)))
        .row(row("mean request", bytes(profile.sizes.mean_bytes as u64)))
        .row(row("sequential requests", percent(profile.sequential.requests_percent / 100.0)))
        .row(row("duration", Unit::Seconds.text(profile.duration_ns as f64 / 1e9)))
        .copyable();
    Section::new("The trace").table(table)
}
