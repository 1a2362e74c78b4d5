//! The published figures of the systems hob follows, measured again with hob's own engine.
//!
//! A figure is a row of [`FIGURES`]: what was published, how it is made here, the runs it takes and what they must
//! show. [`run()`] plays them in virtual time (generators for workloads, device models for flash and disks, the engine
//! as it is) and writes one page with a picture, a table and a CSV for each.
//!
//! Nothing is fitted here: workloads come from [`generate`](crate::generate), where every fitted parameter says so.
//! Checks are about shape (how many times faster, which order); where hob does not do as the source did, the
//! check is red and a note says why. What cannot be measured here is listed with the reason and not run.
//!
//! Units: seconds, bytes, and shares of one.

mod block_size;
mod calibration;
mod case;
mod desktops;
mod dss;
mod dvdstore;
mod latency;
mod line;
mod memory;
mod promotion;
mod publish;
mod run;
mod split;
mod statistics;
#[cfg(test)]
mod tests;
mod tiles;
mod written;

use std::fmt;

use anyhow::{Result, bail};

use case::{Case, Measured};
pub use line::{Line, Quantity};
pub use run::{FigureReport, Options, Progress, Report, run};

/// Every figure, in the order of the sources.
pub const FIGURES: &[FigureInfo] = &[
    latency::HM,
    latency::PROXY,
    block_size::INFO,
    dss::INFO,
    dvdstore::INFO,
    calibration::INFO,
    statistics::INFO,
    memory::INFO,
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
    split::INFO,
    written::SEQUENTIAL,
    written::RANDOM,
];

/// A row of [`FIGURES`].
pub struct FigureInfo {
    /// As users type it, and what its files are called.
    pub name: &'static str,
    /// One line.
    pub title: &'static str,
    /// Where its numbers were published.
    pub source: &'static str,
    /// What was published.
    pub published: &'static str,
    /// How it is made here.
    pub method: &'static str,
    work: Work,
}

impl FigureInfo {
    /// The figure of that name.
    ///
    /// # Errors
    /// There is none; the message lists those there are.
    pub fn find(name: &str) -> Result<&'static FigureInfo> {
        let Some(info) = FIGURES.iter().find(|info| info.name == name) else {
            let names: Vec<&str> = FIGURES.iter().map(|info| info.name).collect();
            bail!("there is no figure {name}; there are {}", names.join(", "));
        };
        Ok(info)
    }

    /// What it waits for, if it cannot be made yet.
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

/// How large the workloads are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Size {
    /// As large as a few minutes allow: what the checks are for.
    #[default]
    Full,
    /// Seconds: shows that every figure runs. Checks may be red for want of requests.
    Quick,
}

/// What a figure takes.
enum Work {
    /// Runs, each by itself, and what they show together.
    Play {
        /// The runs.
        cases: fn(Size) -> Vec<Case>,
        /// Lines, picture and notes; the runs are handed in, in the order of `cases`.
        judge: fn(&[Measured]) -> Result<Findings>,
    },
    /// It cannot be made, for this reason.
    NotYet(&'static str),
}

/// What runs show.
struct Findings {
    lines: Vec<Line>,
    /// Limits, and why a check is red.
    notes: Vec<String>,
    /// SVG.
    picture: String,
}

const fn not_yet(
    name: &'static str,
    title: &'static str,
    source: &'static str,
    published: &'static str,
    why: &'static str,
) -> FigureInfo {
    FigureInfo { name, title, source, published, method: "", work: Work::NotYet(why) }
}
