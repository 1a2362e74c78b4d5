//! Formats the medians of a set as a table and as a chart.

use std::fmt;

use hob_lab::picture::{Bar, BarChart, BarGroup, Unit, bars};
use serde_json::{Value, json};

use super::super::median;
use super::disk::Way;
use super::workload::{Better, WORKLOADS, Workload};

/// Result of one run.
pub(crate) struct Measured {
    pub(crate) workload: &'static str,
    pub(crate) way: Way,
    pub(crate) rate: f64,
}

/// All counted runs of a set.
pub(crate) struct Table {
    pub(crate) set: &'static str,
    pub(crate) rounds: u32,
    pub(crate) runs: Vec<Measured>,
}

impl Table {
    pub(crate) fn median(&self, workload: &str, way: Way) -> Option<f64> {
        let runs = self.runs.iter().filter(|run| run.workload == workload && run.way == way);
        median(runs.map(|run| run.rate))
    }

    /// Returns the median relative to that of local flash, as a factor. A value above 1 is better
    /// than local flash, for rates and for latencies.
    fn of_flash(&self, workload: &Workload, way: Way) -> Option<f64> {
        let ratio = self.median(workload.name, way)? / self.median(workload.name, Way::Flash)?;
        Some(if workload.better == Better::More { ratio } else { ratio.recip() })
    }

    /// Returns a chart of the rates relative to local flash, as SVG.
    pub(crate) fn picture(&self) -> String {
        let title = format!("Databases on hob: {}", self.set);
        let mut chart = BarChart::new(
            title,
            "rate (for latencies: its inverse), as a share of local flash without hob",
            Unit::Percent,
        );
        chart = chart.subtitle(format!("Medians of {}; more is better", self.rounds));
        let ways = [Way::NoCache, Way::Vfrc, Way::Auto];
        for way in ways {
            chart = chart.series(way.name());
        }
        for workload in &WORKLOADS {
            let shares = ways.map(|way| self.of_flash(workload, way).map_or(Bar::Missing, Bar::Value));
            chart = chart.group(BarGroup::new(workload.name, shares));
        }
        bars(&chart)
    }

    pub(crate) fn json(&self) -> Value {
        let runs = self.runs.iter();
        let runs =
            runs.map(|run| json!({"workload": run.workload, "disk": run.way.name(), "rate": run.rate}));
        json!({"set": self.set, "rounds": self.rounds, "runs": runs.collect::<Vec<_>>()})
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: medians of {}, and their shares of local flash", self.set, self.rounds)?;
        write!(f, "{:<28}", "")?;
        for way in Way::ALL {
            write!(f, "{:>20}", way.name())?;
        }
        writeln!(f)?;
        for workload in &WORKLOADS {
            write!(f, "{:<28}", workload.name)?;
            for way in Way::ALL {
                let rate = self.median(workload.name, way).unwrap_or(f64::NAN);
                let share = self.of_flash(workload, way).unwrap_or(f64::NAN);
                write!(f, "{:>13}", format!("{rate:.0}"))?;
                write!(f, "{:>7}", format!("{share:.2}"))?;
            }
            writeln!(f, "  {}", workload.unit)?;
        }
        Ok(())
    }
}
