//! The ratios that issue 26 promises, computed from the tables of all sets.

use std::fmt;

use serde_json::{Value, json};

use super::disk::Way;
use super::table::Table;
use super::workload::{FILL_RANDOM, FLUSHES, SELECT_ONLY, TPC_B, UNPACK};

/// Permitted values of a ratio.
#[derive(Clone, Copy, Debug)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// A promised ratio.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Criterion {
    name: &'static str,
    ratio: Option<f64>,
    bound: Bound,
}

impl Criterion {
    fn is_met(&self) -> bool {
        match (self.ratio, self.bound) {
            (None, _) => false,
            (Some(ratio), Bound::AtLeast(least)) => ratio >= least,
            (Some(ratio), Bound::AtMost(most)) => ratio <= most,
        }
    }

    fn json(&self) -> Value {
        json!({"name": self.name, "ratio": self.ratio, "met": self.is_met()})
    }
}

/// Returns the promised ratios. `usual` is the set without an additional flush delay, and
/// `slow_flush` the set with one.
pub(crate) fn criteria(usual: &Table, slow_flush: &Table) -> [Criterion; 6] {
    let of = |table: &Table, workload, way, base: (&Table, Way)| {
        Some(table.median(workload, way)? / base.0.median(workload, base.1)?)
    };
    let flash = (usual, Way::Flash);
    let none = (usual, Way::NoCache);
    let criterion = |name, ratio, bound| Criterion { name, ratio, bound };
    [
        criterion(
            "select-only: vfrc / local flash",
            of(usual, SELECT_ONLY, Way::Vfrc, flash),
            Bound::AtLeast(0.9),
        ),
        criterion("TPC-B: auto / local flash", of(usual, TPC_B, Way::Auto, flash), Bound::AtLeast(0.85)),
        criterion(
            "TPC-B with auto: 50 ms flush / without",
            of(slow_flush, TPC_B, Way::Auto, (usual, Way::Auto)),
            Bound::AtLeast(0.8),
        ),
        criterion(
            "p99 of flushes while destaging: auto / local flash",
            of(usual, FLUSHES, Way::Auto, flash),
            Bound::AtMost(1.5),
        ),
        criterion(
            "RocksDB fillrandom: auto / no cache",
            of(usual, FILL_RANDOM, Way::Auto, none),
            Bound::AtLeast(0.95),
        ),
        criterion(
            "unpack and sync: auto / no cache",
            of(usual, UNPACK, Way::Auto, none),
            Bound::AtLeast(0.95),
        ),
    ]
}

/// Formats the ratios as a table.
pub(crate) struct Acceptance<'a>(pub(crate) &'a [Criterion]);

impl Acceptance<'_> {
    pub(crate) fn json(&self) -> Value {
        self.0.iter().map(Criterion::json).collect()
    }
}

impl fmt::Display for Acceptance<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Acceptance: ratios of medians")?;
        for criterion in self.0 {
            let ratio = criterion.ratio.unwrap_or(f64::NAN);
            let (sign, bound) = match criterion.bound {
                Bound::AtLeast(bound) => ("≥", bound),
                Bound::AtMost(bound) => ("≤", bound),
            };
            let verdict = if criterion.is_met() { "met" } else { "MISSED" };
            writeln!(f, "{:<52} {ratio:>6.2}  {sign} {bound:.2}  {verdict}", criterion.name)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::Measured;
    use super::*;

    #[test]
    fn ratios_are_of_medians_and_a_missing_result_is_not_met() {
        let table = |runs: &[(&'static str, Way, f64)]| Table {
            set: "a set",
            rounds: 1,
            runs: runs
                .iter()
                .map(|(workload, way, rate)| Measured { workload, way: *way, rate: *rate })
                .collect(),
        };
        let usual = table(&[
            (TPC_B, Way::Auto, 80.0),
            (TPC_B, Way::Flash, 100.0),
            (FLUSHES, Way::Auto, 150.0),
            (FLUSHES, Way::Flash, 100.0),
        ]);
        let slow = table(&[(TPC_B, Way::Auto, 72.0)]);
        let met: Vec<_> = criteria(&usual, &slow).iter().map(|it| (it.ratio, it.is_met())).collect();
        assert_eq!(met[0], (None, false));
        assert_eq!(met[1..4], [(Some(0.8), false), (Some(0.9), true), (Some(1.5), true)]);
    }
}
