//! Results of `cargo xtask bench peers`: table, verdicts, JSON, and a page with charts.

use std::collections::BTreeSet;

use hob_lab::page::{self, Figure, Page, Section, Table};
use hob_lab::picture::{Axis, Curve, CurveChart, Unit, curves};
use serde_json::{Value, json};

use super::linux::Kind;
use super::ocf::{OCF, OCF_NHIT};

pub(super) const HOB: &str = "hob";
/// Order of the caches in tables and charts.
const CACHES: [&str; 6] =
    [HOB, OCF, OCF_NHIT, Kind::DmCache.name(), Kind::Bcache.name(), Kind::DmWritecache.name()];

/// Maximum number of points by which hob may have fewer hits than OCF.
const BEHIND_OCF_MAX: f64 = 0.5;
/// Maximum number of points by which hob may have fewer hits than dm-cache or bcache.
const BEHIND_LINUX_MAX: f64 = 2.0;
/// Minimum number of points by which hob has more hits, if it writes more than OCF's default.
const HITS_AHEAD_MIN: f64 = 5.0;
/// Maximum ratio of hob's flash writes to dm-cache's, each summed over the rows with results of both.
const LINUX_WRITES_MAX: f64 = 1.5;

/// Limits of the results, for the reader.
const CAVEATS: [&str; 7] = [
    "Every cache starts empty and plays each request of a trace once, one request at a time. Requests \
     are widened to whole blocks of 4 KiB. A read is a hit if the cache had all of it.",
    "hob and OCF write through; their MiB are data without metadata. hob is simulated with the code that \
     decides in the daemon.",
    "The caches of Linux run in a guest with virtual time: one instruction takes 1 ns. Gaps between \
     requests are shortened and long traces sped up. smq acts by time, so its results depend on both.",
    "A single run of dm-cache varies by up to 5 points, and by more on traces of a few thousand reads.",
    "dm-cache writes through, with smq and blocks of 32 KiB. Its metadata is on another device, and is \
     in neither its size nor its MiB. The size of the caches of Linux is rounded to 32 KiB.",
    "bcache writes through, without its limits for sequential and congested I/O. Its buckets are reduced \
     to 8 KiB at least until there are 1024. Its metadata is in its size and in its MiB. It needs more \
     than 512 buckets, so it has no cache of 4 MiB or less.",
    "dm-writecache caches only writes and returns them later. Its metadata is in its size and in its MiB.",
];

/// Result of a cache on a trace.
#[derive(Clone, Debug)]
pub(super) struct Played {
    pub(super) cache: &'static str,
    pub(super) cache_bytes: u64,
    pub(super) reads: u64,
    pub(super) read_hits: u64,
    pub(super) flash_write_bytes: u64,
    /// Bytes written to a separate device for metadata.
    pub(super) metadata_write_bytes: Option<u64>,
    /// Memory for each 4 KiB of the cache, bytes; `None` if it was not measured.
    pub(super) memory_bytes_per_block: Option<f64>,
    /// CPU time of a request, if it was measured.
    pub(super) ns_per_request: Option<f64>,
}

impl Played {
    fn hits(&self) -> f64 {
        if self.reads == 0 { 0.0 } else { 100.0 * self.read_hits as f64 / self.reads as f64 }
    }
}

/// Results of one trace and cache size.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) trace: String,
    pub(super) cache_bytes: u64,
    /// hob, and the other caches that have this size.
    pub(super) played: Vec<Played>,
}

impl Row {
    fn of(&self, cache: &str) -> Option<&Played> {
        self.played.iter().find(|played| played.cache == cache)
    }

    /// Returns a text with the requirements that hob does not meet; empty if hob meets all.
    fn verdict(&self) -> String {
        let Some(hob) = self.of(HOB) else { return String::new() };
        let best = |caches: [&str; 2]| {
            let found = caches.iter().filter_map(|cache| self.of(cache));
            found.max_by(|a, b| a.hits().total_cmp(&b.hits()))
        };
        let mut missed = Vec::new();
        if let Some(ocf) = best([OCF, OCF_NHIT]) {
            let ahead = hob.hits() - ocf.hits();
            if ahead < -BEHIND_OCF_MAX {
                missed.push(format!("fewer hits than {}", ocf.cache));
            }
            let default = self.of(OCF).map_or(u64::MAX, |default| default.flash_write_bytes);
            if hob.flash_write_bytes > default && ahead < HITS_AHEAD_MIN {
                missed.push(format!("more writes than {OCF}"));
            }
        }
        if let Some(linux) = best([Kind::DmCache.name(), Kind::Bcache.name()])
            && hob.hits() < linux.hits() - BEHIND_LINUX_MAX
        {
            missed.push(format!("fewer hits than {}", linux.cache));
        }
        missed.join(", ")
    }
}

/// Facts about one playback of a trace.
#[derive(Clone, Debug)]
pub(super) struct TracePlayed {
    pub(super) trace: String,
    pub(super) requests: u64,
    /// Duration of the trace in the guest, seconds of virtual time, and the factor by which the trace
    /// was sped up. `None` if no guest played the trace.
    pub(super) guest: Option<(f64, f64)>,
    /// Maximum delay of a request in the guest, milliseconds of virtual time.
    pub(super) late_ms: u64,
    pub(super) troubles: Vec<String>,
}

/// Results of all traces.
#[derive(Debug, Default)]
pub(super) struct Results {
    pub(super) rows: Vec<Row>,
    pub(super) traces: Vec<TracePlayed>,
    /// Versions of the caches.
    pub(super) versions: Vec<String>,
    /// Caches that did not run, and how to get what is missing.
    pub(super) left_out: Vec<String>,
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

impl Results {
    /// Returns the caches that have results.
    fn caches(&self) -> Vec<&'static str> {
        let found: BTreeSet<_> = self.rows.iter().flat_map(|row| &row.played).map(|p| p.cache).collect();
        CACHES.into_iter().filter(|cache| found.contains(cache)).collect()
    }

    fn with_memory(&self) -> Vec<&'static str> {
        let has = |cache: &&str| {
            let mut all = self.rows.iter().filter_map(|row| row.of(cache));
            all.any(|played| played.memory_bytes_per_block.is_some())
        };
        self.caches().into_iter().filter(has).collect()
    }

    /// Returns heads and rows of the table: hits and MiB of each cache, memory, and the verdict.
    fn cells(&self) -> (Vec<String>, Vec<Vec<String>>) {
        let (caches, with_memory) = (self.caches(), self.with_memory());
        let mut heads = vec!["trace".to_owned(), "cache MiB".to_owned()];
        heads.extend(caches.iter().map(|cache| (*cache).to_owned()));
        heads.extend(with_memory.iter().map(|cache| format!("{cache} B")));
        heads.push("missed".to_owned());
        let row = |row: &Row| {
            let mut cells = vec![row.trace.clone(), format!("{:.1}", mib(row.cache_bytes))];
            cells.extend(caches.iter().map(|cache| {
                let text = |p: &Played| format!("{:.1} / {:.0}", p.hits(), mib(p.flash_write_bytes));
                row.of(cache).map_or("–".to_owned(), text)
            }));
            cells.extend(with_memory.iter().map(|cache| {
                let memory = row.of(cache).and_then(|played| played.memory_bytes_per_block);
                memory.map_or("–".to_owned(), |bytes| format!("{bytes:.0}"))
            }));
            cells.push(row.verdict());
            cells
        };
        (heads, self.rows.iter().map(row).collect())
    }

    /// Returns the results as text.
    pub(super) fn text(&self) -> String {
        let (heads, rows) = self.cells();
        let mut out = "read hits in percent / MiB written to flash\n\n".to_owned();
        let widths: Vec<usize> = (0..heads.len())
            .map(|n| rows.iter().chain([&heads]).map(|cells| cells[n].chars().count()).max().unwrap_or(0))
            .collect();
        for cells in [&heads].into_iter().chain(&rows) {
            let padded = cells.iter().zip(&widths).enumerate().map(|(n, (cell, &width))| {
                if n == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
            out += padded.collect::<Vec<_>>().join("  ").trim_end();
            out.push('\n');
        }
        out.push('\n');
        for line in self.notes() {
            out += &format!("{line}\n");
        }
        out
    }

    /// Returns the text below the table: summary, versions, failures and caveats.
    fn notes(&self) -> Vec<String> {
        let mut notes = vec![
            "B: bytes of memory for each 4 KiB of the cache, with fixed structures, which dominate in small \
             caches; of the caches of Linux: not measured"
                .to_owned(),
            format!(
                "required: hits at least those of OCF less {BEHIND_OCF_MAX} points and of dm-cache and bcache \
                 less {BEHIND_LINUX_MAX}, no more writes than OCF's default unless hits are {HITS_AHEAD_MIN} \
                 points higher; met in {} of {} rows",
                self.rows.iter().filter(|row| row.verdict().is_empty()).count(),
                self.rows.len()
            ),
        ];
        if let Some(ratio) = self.writes_to_dm_cache() {
            notes.push(format!(
                "hob's writes divided by dm-cache's, in all rows with both: {ratio:.2} (required: at most \
                 {LINUX_WRITES_MAX})"
            ));
        }
        for trace in &self.traces {
            if let Some((seconds, speed_up)) = trace.guest {
                notes.push(format!(
                    "{}: {} requests in {seconds:.0} s of virtual time, sped up {speed_up:.2} times, at most {} \
                     ms late",
                    trace.trace, trace.requests, trace.late_ms
                ));
            }
            notes.extend(trace.troubles.iter().map(|text| format!("{}: {text}", trace.trace)));
        }
        notes.push(format!("versions: {}", self.versions.join("; ")));
        notes.extend(self.left_out.iter().map(|text| format!("left out: {text}")));
        notes.extend(CAVEATS.map(|text| format!("- {text}")));
        notes
    }

    fn writes_to_dm_cache(&self) -> Option<f64> {
        let pairs = self.rows.iter().filter_map(|row| row.of(HOB).zip(row.of(Kind::DmCache.name())));
        let (hob, dm_cache) = pairs.fold((0, 0), |sum, (hob, dm_cache)| {
            (sum.0 + hob.flash_write_bytes, sum.1 + dm_cache.flash_write_bytes)
        });
        (dm_cache > 0).then(|| hob as f64 / dm_cache as f64)
    }

    pub(super) fn json(&self) -> Value {
        let played = |played: &Played| {
            json!({
                "cache": played.cache, "cache_bytes": played.cache_bytes,
                "reads": played.reads, "read_hits_percent": played.hits(),
                "flash_write_bytes": played.flash_write_bytes,
                "metadata_write_bytes": played.metadata_write_bytes,
                "memory_bytes_per_block": played.memory_bytes_per_block,
                "ns_per_request": played.ns_per_request,
            })
        };
        let row = |row: &Row| {
            json!({
                "trace": row.trace, "cache_bytes": row.cache_bytes, "missed": row.verdict(),
                "caches": row.played.iter().map(played).collect::<Vec<_>>(),
            })
        };
        let trace = |trace: &TracePlayed| {
            json!({
                "trace": trace.trace, "requests": trace.requests,
                "guest_seconds": trace.guest.map(|guest| guest.0),
                "guest_speed_up": trace.guest.map(|guest| guest.1),
                "late_ms": trace.late_ms, "troubles": trace.troubles,
            })
        };
        json!({
            "versions": self.versions, "left_out": self.left_out, "caveats": CAVEATS,
            "traces": self.traces.iter().map(trace).collect::<Vec<_>>(),
            "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
        })
    }

    /// Returns an HTML page: for each trace a chart of hits against flash writes, and the table.
    pub(super) fn page(&self, made_by: &str) -> String {
        let mut page = Page::new("hob and other caches on real traces")
            .lead("Read hits against flash writes: a cache is better the further up and left it is.")
            .made_by(made_by);
        for trace in &self.traces {
            let caption = "Each dot is a cache size; a line connects the sizes of a cache.";
            let figure = Figure::new(self.chart(trace), caption);
            page = page.section(Section::new(&trace.trace).figure(figure));
        }
        let (heads, rows) = self.cells();
        let mut table = Table::new(heads).caption("Read hits in percent / MiB written to flash");
        for cells in rows {
            table = table.row(
                cells
                    .into_iter()
                    .enumerate()
                    .map(|(n, cell)| if n == 0 { page::Cell::text(cell) } else { page::Cell::number(cell) }),
            );
        }
        page = page.section(Section::new("All results").table(table));
        let notes = self.notes().into_iter();
        page.section(notes.fold(Section::new("Method and limits"), Section::paragraph)).render()
    }

    fn chart(&self, trace: &TracePlayed) -> String {
        let mut chart = CurveChart::new(
            format!("{}: hits and flash writes", trace.trace),
            Axis::new("written to flash", Unit::Bytes).log(),
            Axis::new("read hits", Unit::Percent),
        )
        .subtitle(format!("{} requests; every cache has the same sizes", trace.requests));
        for cache in self.caches() {
            let rows = self.rows.iter().filter(|row| row.trace == trace.trace);
            let mut points: Vec<(f64, f64)> = rows
                .filter_map(|row| row.of(cache))
                .map(|played| (played.flash_write_bytes as f64, played.hits() / 100.0))
                .collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            chart = chart.curve(Curve::new(cache, points).dots());
        }
        curves(&chart)
    }
}

#[cfg(test)]
mod tests {
    use super::{HOB, OCF, Played, Results, Row, TracePlayed};

    fn played(cache: &'static str, read_hits: u64, mib: u64) -> Played {
        let memory_bytes_per_block = (cache == HOB || cache == OCF).then_some(23.0);
        Played {
            cache,
            cache_bytes: 8 << 20,
            reads: 1000,
            read_hits,
            flash_write_bytes: mib << 20,
            metadata_write_bytes: None,
            memory_bytes_per_block,
            ns_per_request: None,
        }
    }

    fn row(played: &[Played]) -> Row {
        Row { trace: "web".to_owned(), cache_bytes: 8 << 20, played: played.to_vec() }
    }

    #[test]
    fn verdicts_follow_the_limits() {
        let hob = played(HOB, 400, 100);
        let verdict = |others: &[Played]| row(&[std::slice::from_ref(&hob), others].concat()).verdict();
        assert_eq!(verdict(&[]), "");
        assert_eq!(verdict(&[played(OCF, 405, 100)]), "");
        assert_eq!(verdict(&[played(OCF, 406, 99)]), "fewer hits than OCF, more writes than OCF");
        assert_eq!(verdict(&[played(OCF, 350, 99)]), "");
        assert_eq!(verdict(&[played("OCF nhit", 406, 1)]), "fewer hits than OCF nhit");
        assert_eq!(verdict(&[played("dm-cache", 420, 1), played("bcache", 100, 1)]), "");
        assert_eq!(verdict(&[played("dm-cache", 421, 1)]), "fewer hits than dm-cache");
        assert_eq!(verdict(&[played("dm-writecache", 900, 1)]), "");
    }

    #[test]
    fn text_json_and_page_have_all_results() {
        let trace = TracePlayed {
            trace: "web".to_owned(),
            requests: 1500,
            guest: Some((12.0, 1.0)),
            late_ms: 0,
            troubles: vec!["bcache.0: too small".to_owned()],
        };
        let results = Results {
            rows: vec![row(&[played(HOB, 400, 100), played("dm-cache", 200, 50)])],
            traces: vec![trace],
            versions: vec!["Linux 6.1".to_owned()],
            left_out: vec!["OCF: no source".to_owned()],
        };
        let text = results.text();
        for part in [
            "40.0 / 100",
            "20.0 / 50",
            "hob B",
            "not measured",
            "web: bcache.0: too small",
            "left out: OCF: no source",
            "versions: Linux 6.1",
            "up to 5 points",
            "dm-cache's, in all rows with both: 2.00",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let json = results.json();
        assert_eq!(json["rows"][0]["caches"][1]["read_hits_percent"], 20.0);
        assert!(json["rows"][0]["caches"][1]["memory_bytes_per_block"].is_null());
        let page = results.page("cargo xtask bench peers");
        assert!(page.contains("<svg ") && page.contains("dm-cache"));
    }
}
