//! Reproduces published figures with hob's own engine. A *figure* is a measurement of another
//! system that was published, such as the latency of a flash cache by its block size.
//!
//! A figure is a row of [`FIGURES`]: the published result, the method used here, its runs, and the
//! expected results. [`run()`] runs them in virtual time (generators for workloads, device models
//! for flash and disks, the real engine). [`run()`] writes one page with a picture, a table and a
//! CSV file for each figure.
//!
//! Workloads come from [`generate`](crate::generate), where every fitted parameter is marked. The
//! figures fit no further parameters. A line of a figure *holds*, or it *differs* and a second
//! measurement confirms the reason, or it *fails*. If the result of a line follows from an input,
//! the line is *by construction* and is not a check. Figures that cannot be measured are listed
//! with the reason and not run. [`PUBLISHED`] lists all results of the sources, also those that no
//! figure reproduces.
//!
//! Units: times are in seconds, and sizes in bytes. Shares are from 0 to 1.

mod backings;
mod block_size;
mod calibration;
mod case;
mod desktops;
mod devices;
mod docs;
mod dss;
mod dvdstore;
mod latency;
mod levels;
mod line;
mod measured;
mod memory;
mod migration;
mod neighbours;
mod promotion;
mod publish;
mod query_types;
mod run;
#[cfg(test)]
mod sabotage;
mod sioc;
mod split;
mod statistics;
mod systems;
#[cfg(test)]
mod tests;
mod tiles;
mod written;

use std::fmt;

use anyhow::{Result, bail};
use serde::Serialize;

use case::{Case, Measured};
pub use docs::{section, state_table};
pub(crate) use line::quoted;
pub use line::{Line, Quantity};
pub(crate) use publish::place;
pub use run::{FigureReport, Options, Progress, Report, run};
pub use systems::{PUBLISHED, Published};

/// All figures, in the order of their sources.
pub const FIGURES: &[FigureInfo] = &[
    latency::HM,
    latency::PROXY,
    block_size::INFO,
    dss::INFO,
    query_types::INFO,
    dvdstore::INFO,
    calibration::INFO,
    statistics::INFO,
    memory::INFO,
    migration::INFO,
    devices::INFO,
    promotion::INFO,
    tiles::SHARE,
    tiles::TILES,
    not_yet(
        "fast-cache-score",
        "FAST Cache: VMmark's score",
        "the EMC FAST Cache study",
        "On 20 disks the score rises by 26 % at one tile and by 31 % at two.",
        "needs VMmark's applications: their score cannot be told from disk I/O",
    ),
    desktops::INFO,
    neighbours::INFO,
    split::INFO,
    written::SEQUENTIAL,
    written::RANDOM,
    levels::INFO,
    sioc::INFO,
    backings::INFO,
];

/// A figure that hob reproduces.
pub struct FigureInfo {
    /// Name of the figure that users type, also used for its files.
    pub name: &'static str,
    /// Title of the figure in one line.
    pub title: &'static str,
    /// Publication that has the published result.
    pub source: &'static str,
    /// The published result.
    pub published: &'static str,
    /// Method by which hob reproduces the result.
    pub method: &'static str,
    /// Inputs that were fitted to published results.
    pub fitted: &'static [Fitted],
    work: Work,
}

/// An input that was fitted to a published result. Results that follow from this input are not
/// checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fitted {
    /// Parameter of the workload generator, or part of the device model.
    pub input: &'static str,
    /// Published result to which the input was fitted.
    pub to: &'static str,
}

/// Fitted inputs of the generator hm, which several figures use.
const HM_FITTED: Fitted =
    fitted("spots, theta, disk, warmup-per-spot", "the published latencies by block size");

const fn fitted(input: &'static str, to: &'static str) -> Fitted {
    Fitted { input, to }
}

impl FigureInfo {
    /// Returns the entry of [`FIGURES`] with this name.
    ///
    /// # Errors
    /// Returns an error that lists all figures if no figure has this name.
    pub fn find(name: &str) -> Result<&'static FigureInfo> {
        let Some(info) = FIGURES.iter().find(|info| info.name == name) else {
            let names: Vec<&str> = FIGURES.iter().map(|info| info.name).collect();
            bail!("there is no figure {name}; the figures are {}", names.join(", "));
        };
        Ok(info)
    }

    /// Returns the reason why the figure cannot be measured yet, or `None` if it can be measured.
    pub fn waits_for(&self) -> Option<&'static str> {
        match self.work {
            Work::Play { .. } => None,
            Work::NotYet(why) => Some(why),
        }
    }
}

impl fmt::Debug for FigureInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FigureInfo({})", self.name)
    }
}

/// Length of the workloads that the figures run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Size {
    /// Workloads of a few minutes. The checks apply to this size.
    #[default]
    Full,
    /// Workloads of a few seconds, which show that every figure runs. Checks may fail for lack of
    /// requests.
    Quick,
}

/// Work needed for a figure.
enum Work {
    /// Independent runs and their evaluation.
    Play {
        cases: fn(Size) -> Vec<Case>,
        /// Returns lines, picture and notes from the results of `cases`, in the same order.
        judge: fn(&[Measured]) -> Result<Findings>,
    },
    /// The figure cannot be measured, for this reason.
    NotYet(&'static str),
}

/// Results of a figure's runs: measured values with their checks, a picture, and notes.
struct Findings {
    lines: Vec<Line>,
    /// Limits of the measurement, and reasons of failed checks.
    notes: Vec<String>,
    picture: String,
}

const fn not_yet(
    name: &'static str,
    title: &'static str,
    source: &'static str,
    published: &'static str,
    why: &'static str,
) -> FigureInfo {
    FigureInfo { name, title, source, published, method: "", fitted: &[], work: Work::NotYet(why) }
}
