//! Results of a benchmark: medians, ratios, and required ratios that are met or missed.

use std::fmt;
use std::path::Path;

use anyhow::{Result, bail};
use serde_json::{Value, json};

use super::fio::Figures;
use super::server::HOB;

/// Result of one run of a workload on a server.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) round: u32,
    pub(crate) workload: &'static str,
    pub(crate) server: &'static str,
    pub(crate) figures: Figures,
    /// CPU time of the server per request, microseconds; `None` for a target without a server
    /// process.
    pub(crate) cpu_us: Option<f64>,
    /// Share of the reads that were hits, if the server reports hits.
    pub(crate) hits: Option<f64>,
    /// Bytes written to flash including the journal, divided by the bytes written without the
    /// journal; `None` without a journal.
    pub(crate) journal: Option<f64>,
}

/// The result of a run that a required ratio compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Measure {
    Iops,
    Mean,
    P99,
    Cpu,
    Journal,
}

/// Kind of limit of a required ratio: minimum or maximum.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Limit {
    AtLeast(f64),
    AtMost(f64),
}

/// Minimum or maximum ratio of hob's result to another server's result.
#[derive(Debug)]
pub(crate) struct Bar {
    pub(crate) workload: &'static str,
    pub(crate) measure: Measure,
    pub(crate) against: &'static str,
    pub(crate) limit: Limit,
}

/// Results of all runs of one setting.
#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) name: &'static str,
    pub(crate) size: u64,
    pub(crate) seconds: u32,
    pub(crate) runs: Vec<Run>,
    pub(crate) bars: &'static [Bar],
}

/// Results of all settings.
#[derive(Debug)]
pub(crate) struct Report {
    bench: &'static str,
    pub(crate) settings: Vec<Setting>,
}

impl Measure {
    const ALL: [Self; 5] = [Self::Iops, Self::Mean, Self::P99, Self::Cpu, Self::Journal];

    fn name(self) -> &'static str {
        match self {
            Self::Iops => "IOPS",
            Self::Mean => "mean latency µs",
            Self::P99 => "p99 latency µs",
            Self::Cpu => "server CPU µs/IO",
            Self::Journal => "flash writes with the journal",
        }
    }

    fn key(self) -> &'static str {
        match self {
            Self::Iops => "iops",
            Self::Mean => "mean_us",
            Self::P99 => "p99_us",
            Self::Cpu => "cpu_us",
            Self::Journal => "journal_factor",
        }
    }

    fn of(self, run: &Run) -> Option<f64> {
        match self {
            Self::Iops => Some(run.figures.iops),
            Self::Mean => Some(run.figures.mean_us),
            Self::P99 => Some(run.figures.p99_us),
            Self::Cpu => run.cpu_us,
            Self::Journal => run.journal,
        }
    }
}

impl Limit {
    fn met(self, ratio: f64) -> bool {
        match self {
            Self::AtLeast(bar) => ratio >= bar,
            Self::AtMost(bar) => ratio <= bar,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(bar) => write!(f, "≥ {bar}"),
            Self::AtMost(bar) => write!(f, "≤ {bar}"),
        }
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<32} {:<13}", self.workload, self.server)?;
        write!(f, "{:>9.0} IOPS  mean {:>8.1} µs", self.figures.iops, self.figures.mean_us)?;
        write!(f, "  p99 {:>8.1} µs", self.figures.p99_us)?;
        if let Some(cpu) = self.cpu_us {
            write!(f, "  CPU {cpu:>6.2} µs")?;
        }
        if let Some(hits) = self.hits {
            write!(f, "  hits {:.2} %", hits * 100.0)?;
        }
        Ok(())
    }
}

impl Setting {
    /// Returns the different names of all runs (of workloads or servers), in the order of their
    /// first runs.
    fn in_order(&self, name: impl Fn(&Run) -> &'static str) -> Vec<&'static str> {
        let mut names = Vec::new();
        for run in &self.runs {
            if !names.contains(&name(run)) {
                names.push(name(run));
            }
        }
        names
    }

    fn median(&self, workload: &str, server: &str, measure: Measure) -> Option<f64> {
        let runs = self.runs.iter().filter(|r| r.workload == workload && r.server == server);
        super::median(runs.filter_map(|r| measure.of(r)))
    }

    fn ratio(&self, bar: &Bar) -> Option<f64> {
        let own = self.median(bar.workload, HOB, bar.measure)?;
        if bar.measure == Measure::Journal {
            // The journal's factor is already a ratio and is not compared with another server.
            return Some(own);
        }
        let other = self.median(bar.workload, bar.against, bar.measure)?;
        (other > 0.0).then(|| own / other)
    }

    /// Returns true if the workload was measured, because it was not left out.
    fn has_run(&self, workload: &str) -> bool {
        self.runs.iter().any(|r| r.workload == workload)
    }

    /// Returns the lowest hit ratio of hob's runs.
    fn hits_min(&self) -> Option<f64> {
        self.runs.iter().filter_map(|r| r.hits).min_by(f64::total_cmp)
    }

    fn json(&self) -> Value {
        let runs = self.runs.iter().map(|r| {
            let figures: serde_json::Map<String, Value> =
                Measure::ALL.iter().map(|m| (m.key().to_owned(), json!(m.of(r)))).collect();
            let about = json!({ "round": r.round + 1, "workload": r.workload, "server": r.server,
                "ios": r.figures.ios, "hits": r.hits, "figures": figures });
            about
        });
        let mut medians = Vec::new();
        for workload in self.in_order(|r| r.workload) {
            for server in self.in_order(|r| r.server) {
                let figures: serde_json::Map<String, Value> = Measure::ALL
                    .iter()
                    .map(|&m| (m.key().to_owned(), json!(self.median(workload, server, m))))
                    .collect();
                medians.push(json!({ "workload": workload, "server": server, "figures": figures }));
            }
        }
        let bars = self.bars.iter().filter(|bar| self.has_run(bar.workload)).map(|bar| {
            let ratio = self.ratio(bar);
            json!({ "workload": bar.workload, "measure": bar.measure.key(), "against": bar.against,
                "bar": bar.limit.to_string(), "ratio": ratio, "met": ratio.is_some_and(|r| bar.limit.met(r)) })
        });
        json!({ "setting": self.name, "working_set_bytes": self.size, "seconds": self.seconds,
            "hits_min": self.hits_min(), "medians": medians,
            "bars": bars.collect::<Vec<_>>(), "runs": runs.collect::<Vec<_>>() })
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rounds = self.runs.iter().map(|r| r.round + 1).max().unwrap_or(0);
        let (size, seconds) = (self.size >> 20, self.seconds);
        writeln!(f, "{}: {size} MiB, medians of {rounds} rounds of {seconds} s", self.name)?;
        if let Some(hits) = self.hits_min() {
            writeln!(f, "hob's hits in its worst run of reads: {:.2} %", hits * 100.0)?;
        }
        let servers = self.in_order(|r| r.server);
        let others: Vec<&str> = servers.iter().copied().filter(|&s| s != HOB).collect();
        for workload in self.in_order(|r| r.workload) {
            write!(f, "\n{workload:<34}{HOB:>12}")?;
            for other in &others {
                write!(f, "{other:>16}{:>9}", "ratio")?;
            }
            writeln!(f)?;
            let told = |measure: &Measure| self.median(workload, HOB, *measure).is_some();
            for measure in Measure::ALL.into_iter().filter(told) {
                let own = self.median(workload, HOB, measure);
                write!(f, "  {:<32}{}", measure.name(), cell(own, 12))?;
                for other in &others {
                    let theirs = self.median(workload, other, measure);
                    let ratio = own.zip(theirs).filter(|&(_, t)| t > 0.0).map(|(o, t)| o / t);
                    let ratio = ratio.map_or("–".to_owned(), |r| format!("×{r:.2}"));
                    write!(f, "{}{ratio:>9}", cell(theirs, 16))?;
                }
                writeln!(f)?;
            }
        }
        writeln!(f)?;
        for bar in self.bars.iter().filter(|bar| self.has_run(bar.workload)) {
            let ratio = self.ratio(bar);
            let verdict = if ratio.is_some_and(|r| bar.limit.met(r)) { "met" } else { "MISSED" };
            let ratio = ratio.map_or("–".to_owned(), |r| format!("×{r:.2}"));
            let what = format!("{}, {}", bar.workload, bar.measure.name());
            let limit = bar.limit.to_string();
            writeln!(f, "  {what:<50} against {:<13}{ratio:>8}  bar {limit:<6} {verdict}", bar.against)?;
        }
        Ok(())
    }
}

impl Report {
    /// Creates an empty report of a benchmark.
    pub(crate) fn of(bench: &'static str) -> Report {
        Report { bench, settings: Vec::new() }
    }

    /// Returns the number of missed ratios.
    fn missed(&self) -> usize {
        let bars = self.settings.iter().flat_map(|s| s.bars.iter().map(move |bar| (s, bar)));
        bars.filter(|(s, bar)| !s.ratio(bar).is_some_and(|r| bar.limit.met(r))).count()
    }

    /// Returns all results as JSON.
    fn json(&self) -> Value {
        let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let settings: Vec<Value> = self.settings.iter().map(Setting::json).collect();
        json!({ "bench": self.bench, "cpus": cpus, "kernel": kernel.trim(), "settings": settings })
    }

    /// Prints the report, and writes all results to a JSON file, if one is named. Fails if a required
    /// ratio is missed and `strict` is true.
    pub(crate) fn finish(&self, json: Option<&Path>, strict: bool) -> Result<()> {
        println!("\n{self}");
        crate::write_json(json, &self.json())?;
        if strict && self.missed() > 0 {
            bail!("{} bars missed", self.missed());
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for setting in &self.settings {
            writeln!(f, "{setting}")?;
        }
        Ok(())
    }
}

fn cell(value: Option<f64>, width: usize) -> String {
    let text = match value {
        None => "–".to_owned(),
        Some(v) if v >= 1000.0 => format!("{v:.0}"),
        Some(v) => format!("{v:.2}"),
    };
    format!("{text:>width$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(server: &'static str, round: u32, iops: f64) -> Run {
        let figures = Figures { ios: 10, iops, mean_us: 1.0, p99_us: 2.0 };
        Run { round, workload: "w", server, figures, cpu_us: None, hits: None, journal: None }
    }

    const BARS: [Bar; 2] = [
        Bar { workload: "w", measure: Measure::Iops, against: "other", limit: Limit::AtLeast(1.2) },
        Bar { workload: "w", measure: Measure::Cpu, against: "other", limit: Limit::AtMost(0.5) },
    ];

    #[test]
    fn medians_make_ratios_and_a_missing_figure_misses_its_bar() {
        let mut runs = vec![run(HOB, 0, 10.0), run(HOB, 1, 900.0), run(HOB, 2, 150.0)];
        runs.extend([run("other", 0, 100.0), run("other", 1, 110.0)]);
        let setting = Setting { name: "s", size: 1 << 20, seconds: 1, runs, bars: &BARS };
        assert_eq!(setting.median("w", "other", Measure::Iops), Some(105.0));
        assert!((setting.ratio(&BARS[0]).unwrap() - 150.0 / 105.0).abs() < 1e-9);
        assert_eq!(setting.ratio(&BARS[1]), None);
        assert_eq!(Report { settings: vec![setting], ..Report::of("b") }.missed(), 1);
    }
}
