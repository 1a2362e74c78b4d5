//! Draws latency over time as SVG. Each request is a dot, and the phases of a run follow each other
//! on the time axis. The chart also has a line of the median latency, and a legend with the results
//! of each phase.
//!
//! Latencies are on a logarithmic axis with labels in µs, ms and s. Runs of more than a few
//! thousand requests are thinned, so an SVG file stays below 500 KB.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::canvas::{Anchor, Canvas, Stroke, Style};
use super::frame;
use super::palette::{BANDS, BLUE, Colour, FAINT, GREEN, GREY, GRID, INK, PAPER, PURPLE, VERMILION};
use super::scale::{self, LatencyAxis, TimeAxis, latency_text};
use super::{text_layout, thin};
use crate::summary::{Sample, Summary};

/// Texts of a latency chart.
#[derive(Clone, Copy, Debug)]
pub struct ChartText<'a> {
    /// Title of the chart.
    pub title: &'a str,
    /// Subtitle below the title: what was measured, and how.
    pub subtitle: &'a str,
    /// Name of the vertical axis.
    pub latency_axis: &'a str,
    /// Name of the horizontal axis. The unit is added to the name.
    pub time_axis: &'a str,
}

impl<'a> ChartText<'a> {
    /// Creates the texts with the default names of the axes.
    pub fn new(title: &'a str, subtitle: &'a str) -> Self {
        ChartText { title, subtitle, latency_axis: "latency of each request, log scale", time_axis: "time" }
    }
}

/// One phase of the measured run, such as the first pass over the data. The chart shows the phases
/// in order, each to the right of the previous one.
#[derive(Clone, Copy, Debug)]
pub struct Phase<'a> {
    /// Short name of the phase, for example "cold pass".
    pub name: &'a str,
    /// Requests of the phase. Times count from the start of the phase.
    pub samples: &'a [Sample],
    /// Additional text in the legend, for example "89 % hits"; may be empty.
    pub note: &'a str,
}

const WIDTH: i32 = 1200;
const PLOT: Plot = Plot { left: 108, right: WIDTH - 36, top: 124, bottom: 490 };
const LEGEND_ROW: i32 = 26;
const DOTS_MAX: usize = 4_000;

const PHASES: [Colour; 5] = [GREY, VERMILION, BLUE, GREEN, PURPLE];

/// Rectangle of the data, in whole pixels.
struct Plot {
    left: i32,
    right: i32,
    top: i32,
    bottom: i32,
}

/// A phase with its position on the time axis.
struct Band<'a> {
    phase: Phase<'a>,
    summary: Summary,
    start_ns: u64,
    end_ns: u64,
    colour: Colour,
}

/// Draws the phases into an SVG file. An existing file is replaced.
///
/// Dots have the colour of their phase. If hits are known, the colour shows hit or miss instead.
///
/// # Errors
/// Returns an error if no phase has a request, or if the file cannot be written.
pub fn latency_over_time(path: &Path, text: &ChartText<'_>, phases: &[Phase<'_>]) -> Result<()> {
    let svg = render(text, phases)?;
    std::fs::write(path, svg).with_context(|| format!("cannot write the picture to {}", path.display()))
}

fn render(text: &ChartText<'_>, phases: &[Phase<'_>]) -> Result<String> {
    let bands = lay_out(phases);
    ensure!(!bands.is_empty(), "no phase has a request to draw");
    let height = PLOT.bottom + 76 + LEGEND_ROW * (bands.len() as i32 + 1);
    let mut chart = Chart::new(Canvas::new(WIDTH, height), text, &bands);
    chart.draw();
    Ok(chart.canvas.finish())
}

fn lay_out<'a>(phases: &[Phase<'a>]) -> Vec<Band<'a>> {
    let mut start_ns = 0;
    let drawn = phases.iter().filter(|phase| !phase.samples.is_empty()).enumerate();
    drawn
        .map(|(index, &phase)| {
            let last = phase.samples.iter().map(|sample| sample.at_ns + sample.latency_ns).max();
            let end_ns = start_ns + last.unwrap_or(0).max(1);
            let summary = Summary::of(phase.samples);
            let band = Band { phase, summary, start_ns, end_ns, colour: PHASES[index % PHASES.len()] };
            start_ns = end_ns;
            band
        })
        .collect()
}

struct Chart<'a> {
    canvas: Canvas,
    text: &'a ChartText<'a>,
    bands: &'a [Band<'a>],
    /// True if any request has a known hit or miss. The dots of the chart then show hits and
    /// misses.
    hits_known: bool,
    time: TimeAxis,
    latency: LatencyAxis,
}

impl<'a> Chart<'a> {
    fn new(canvas: Canvas, text: &'a ChartText<'a>, bands: &'a [Band<'a>]) -> Self {
        let all = || bands.iter().flat_map(|band| band.phase.samples);
        let least = all().map(|sample| sample.latency_ns).min().unwrap_or(1);
        let most = bands.iter().map(|band| band.summary.max_ns).max().unwrap_or(1);
        let total = bands.last().map_or(1, |band| band.end_ns);
        Chart {
            canvas,
            text,
            bands,
            hits_known: all().any(|sample| sample.hit.is_some()),
            time: TimeAxis::new(total, PLOT.left, PLOT.right),
            latency: LatencyAxis::new(least, most, PLOT.bottom, PLOT.top),
        }
    }

    fn draw(&mut self) {
        frame::heading(&mut self.canvas, self.text.title, self.text.subtitle, f64::from(PLOT.left));
        self.draw_bands();
        self.draw_axes();
        self.draw_dots();
        self.draw_medians();
        self.draw_names();
        self.draw_keys(62);
        self.draw_legend();
    }

    fn draw_bands(&mut self) {
        for (index, band) in self.bands.iter().enumerate() {
            let corners = [(self.time.x(band.start_ns), PLOT.top), (self.time.x(band.end_ns), PLOT.bottom)];
            let [from, to] = corners.map(pixel);
            self.canvas.rect(from, to, BANDS[index % 2].into());
        }
    }

    fn draw_axes(&mut self) {
        for decade in self.latency.decades() {
            let y = self.latency.y(decade);
            self.line(vec![(PLOT.left, y), (PLOT.right, y)], GRID.stroke(1.0));
            self.write(&latency_text(decade), (PLOT.left - 10, y), 17, INK, Weight::Plain, Anchor::End);
            let end_ns = self.latency.end_ns();
            for part in (2..10).map(|n| decade.saturating_mul(n)).filter(|&part| part < end_ns) {
                let y = self.latency.y(part);
                self.line(vec![(PLOT.left, y), (PLOT.left + 5, y)], FAINT.mix(0.6).stroke(1.0));
            }
        }
        for (at_ns, label) in self.time.ticks() {
            let x = self.time.x(at_ns);
            self.line(vec![(x, PLOT.bottom), (x, PLOT.bottom + 6)], FAINT.stroke(1.0));
            self.write(&label, (x, PLOT.bottom + 19), 17, INK, Weight::Plain, Anchor::Middle);
        }
        for band in &self.bands[1..] {
            let x = self.time.x(band.start_ns);
            self.line(vec![(x, PLOT.top), (x, PLOT.bottom)], FAINT.mix(0.7).stroke(1.0));
        }
        self.line(
            vec![(PLOT.left, PLOT.top), (PLOT.left, PLOT.bottom), (PLOT.right, PLOT.bottom)],
            FAINT.stroke(1.0),
        );
        let axis = format!("{}, {}", self.text.time_axis, self.time.unit());
        self.write(&axis, (PLOT.right, PLOT.bottom + 42), 16, FAINT, Weight::Plain, Anchor::End);
        let beside = (20, (PLOT.top + PLOT.bottom) / 2);
        let style = Style::new(frame::size(16), FAINT, Anchor::Middle).turned();
        self.canvas.text(self.text.latency_axis, pixel(beside), style);
    }

    fn draw_dots(&mut self) {
        let total: usize = self.bands.iter().map(|band| band.phase.samples.len()).sum();
        let opacity = if total > DOTS_MAX / 2 { 0.35 } else { 0.55 };
        for band in self.bands {
            // The number of dots depends on a phase's duration and not on its number of requests,
            // so a fast phase does not crowd out slow ones.
            let width = (self.time.x(band.end_ns) - self.time.x(band.start_ns)).max(1) as usize;
            let share = (DOTS_MAX * width).div_ceil((PLOT.right - PLOT.left) as usize);
            for sample in thin::thinned(band.phase.samples, share) {
                let at = (self.time.x(band.start_ns + sample.at_ns), self.latency.y(sample.latency_ns));
                let colour = self.dot_colour(band, sample.hit);
                self.canvas.dot(pixel(at), 2.0, colour.mix(opacity));
            }
        }
    }

    fn dot_colour(&self, band: &Band<'_>, hit: Option<bool>) -> Colour {
        match hit {
            Some(true) => BLUE,
            Some(false) => VERMILION,
            None if self.hits_known => GREY,
            None => band.colour,
        }
    }

    /// Draws the median lines. A white edge around a line keeps it readable on many dots.
    fn draw_medians(&mut self) {
        for band in self.bands {
            let (from, to) = (self.time.x(band.start_ns), self.time.x(band.end_ns));
            let buckets = ((to - from) / 20).max(1) as u64;
            let medians = thin::medians(band.phase.samples, band.end_ns - band.start_ns, buckets);
            for run in medians.split(Option::is_none).filter(|run| !run.is_empty()) {
                let points: Vec<(i32, i32)> = run
                    .iter()
                    .flatten()
                    .flat_map(|&(start, end, median)| {
                        let y = self.latency.y(median);
                        [(self.time.x(band.start_ns + start), y), (self.time.x(band.start_ns + end), y)]
                    })
                    .collect();
                self.line(points.clone(), PAPER.stroke(5.0));
                self.line(points, INK.stroke(2.0));
            }
        }
    }

    /// Writes the phase names above the phases, moved apart where phases are narrow.
    fn draw_names(&mut self) {
        let middles = self.bands.iter().map(|band| self.time.x((band.start_ns + band.end_ns) / 2));
        let widths: Vec<i32> = self.bands.iter().map(|band| name_width(band.phase.name)).collect();
        let centres = text_layout::spread(&middles.collect::<Vec<_>>(), &widths, PLOT.left, PLOT.right);
        for (band, centre) in self.bands.iter().zip(centres) {
            let colour = if self.hits_known { INK } else { band.colour };
            self.write(band.phase.name, (centre, PLOT.top - 18), 19, colour, Weight::Bold, Anchor::Middle);
            let (from, to) = (self.time.x(band.start_ns) + 1, self.time.x(band.end_ns) - 1);
            self.line(vec![(from, PLOT.top - 3), (to, PLOT.top - 3)], colour.stroke(3.0));
        }
    }

    fn draw_legend(&mut self) {
        let (mut y, left) = (PLOT.bottom + 66, PLOT.left);
        let columns = [left + 330, left + 440, left + 550, left + 660, left + 740];
        let heads = ["requests/s", "mean", "median", "p99", if self.hits_known { "hits" } else { "" }];
        for (head, x) in heads.iter().zip(columns) {
            self.write(head, (x, y), 16, FAINT, Weight::Plain, Anchor::End);
        }
        for band in self.bands {
            y += LEGEND_ROW;
            if !self.hits_known {
                self.canvas.dot(pixel((left + 6, y)), 5.0, band.colour.into());
            }
            self.write(band.phase.name, (left + 20, y), 17, INK, Weight::Bold, Anchor::Start);
            let figures = &band.summary;
            let hits = figures.hit_ratio.map_or("–".to_owned(), |ratio| format!("{:.1} %", ratio * 100.0));
            let cells = [
                scale::count_text(figures.iops),
                latency_text(figures.mean_ns),
                latency_text(figures.p50_ns),
                latency_text(figures.p99_ns),
                if self.hits_known { hits } else { String::new() },
            ];
            for (cell, x) in cells.iter().zip(columns) {
                self.write(cell, (x, y), 17, INK, Weight::Plain, Anchor::End);
            }
            let note_x = if self.hits_known { columns[4] } else { columns[3] } + 32;
            self.write(band.phase.note, (note_x, y), 17, INK, Weight::Plain, Anchor::Start);
        }
    }

    /// Draws the legend of dots and lines, from the right border to the left.
    fn draw_keys(&mut self, y: i32) {
        let mut x = PLOT.right;
        self.write("median", (x, y), 16, FAINT, Weight::Plain, Anchor::End);
        x -= 62;
        self.line(vec![(x - 26, y), (x, y)], INK.stroke(2.0));
        x -= 50;
        let hits: &[(&str, Colour)] = &[("miss", VERMILION), ("hit", BLUE)];
        let keys = if self.hits_known { hits } else { &[("one request", GREY)] };
        for &(key, colour) in keys {
            self.write(key, (x, y), 16, FAINT, Weight::Plain, Anchor::End);
            x -= 7 * key.len() as i32 + 14;
            self.canvas.dot(pixel((x, y)), 4.0, colour.into());
            x -= 24;
        }
    }

    fn line(&mut self, points: Vec<(i32, i32)>, stroke: Stroke) {
        let points: Vec<(f64, f64)> = points.into_iter().map(pixel).collect();
        self.canvas.line(&points, stroke);
    }

    fn write(
        &mut self,
        text: &str,
        at: (i32, i32),
        size: i32,
        colour: Colour,
        weight: Weight,
        anchor: Anchor,
    ) {
        let style = Style::new(frame::size(size), colour, anchor);
        let style = if weight == Weight::Bold { style.bold() } else { style };
        self.canvas.text(text, pixel(at), style);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Weight {
    Plain,
    Bold,
}

fn pixel((x, y): (i32, i32)) -> (f64, f64) {
    (f64::from(x), f64::from(y))
}

/// Returns the approximate width of a phase's name, pixels. No font is measured.
fn name_width(name: &str) -> i32 {
    name.chars().count() as i32 * 10 + 12
}

#[cfg(test)]
mod tests;
