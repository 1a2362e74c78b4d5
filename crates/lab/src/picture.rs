//! Latency over time as an SVG: every request a dot, phases side by side on one time axis, a median line, and a
//! legend with each phase's figures.
//!
//! The picture is drawn through the SVG backend of `plotters` on a grid of its own: latencies on a logarithmic
//! axis labelled in µs, ms and s. Colours are from the palette of Okabe and Ito, which people with any kind of
//! colour vision can tell apart. Runs of more than some thousand requests are thinned, so a file stays below 500 KB.

mod scale;
mod thin;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, PathElement, Rectangle};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontStyle, FontTransform, IntoFont, RGBColor, ShapeStyle, TextStyle};

use crate::summary::{Sample, Summary};
use scale::{LatencyAxis, TimeAxis, latency_text};

/// The words of a chart.
#[derive(Clone, Copy, Debug)]
pub struct ChartText<'a> {
    /// The heading.
    pub title: &'a str,
    /// One line below it, smaller: what was measured, and how.
    pub subtitle: &'a str,
    /// What the vertical axis is.
    pub latency_axis: &'a str,
    /// What the horizontal axis is; its unit is added.
    pub time_axis: &'a str,
}

impl<'a> ChartText<'a> {
    /// A chart with the usual names for its axes.
    pub fn new(title: &'a str, subtitle: &'a str) -> Self {
        ChartText { title, subtitle, latency_axis: "latency of each request, log scale", time_axis: "time" }
    }
}

/// One run of the chart; phases are drawn in order, each where the one before ended.
#[derive(Clone, Copy, Debug)]
pub struct Phase<'a> {
    /// Short name, such as "cold pass".
    pub name: &'a str,
    /// Its requests, times counted from the phase's start.
    pub samples: &'a [Sample],
    /// What else the legend should say of it, such as "89 % hits"; may be empty.
    pub note: &'a str,
}

const WIDTH: i32 = 1200;
const PLOT: Frame = Frame { left: 108, right: WIDTH - 36, top: 124, bottom: 490 };
const LEGEND_ROW: i32 = 26;
const DOTS_MAX: usize = 4_000;

const INK: RGBColor = RGBColor(0x1f, 0x23, 0x28);
const FAINT: RGBColor = RGBColor(0x5f, 0x67, 0x70);
const GRID: RGBColor = RGBColor(0xd8, 0xdc, 0xe0);
const PAPER: RGBColor = RGBColor(0xff, 0xff, 0xff);
const BANDS: [RGBColor; 2] = [RGBColor(0xf4, 0xf6, 0xf8), RGBColor(0xfb, 0xfb, 0xfc)];
const GREY: RGBColor = RGBColor(0x6e, 0x6e, 0x6e);
const VERMILION: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
const BLUE: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const GREEN: RGBColor = RGBColor(0x00, 0x9e, 0x73);
const PURPLE: RGBColor = RGBColor(0xcc, 0x79, 0xa7);
const PHASES: [RGBColor; 5] = [GREY, VERMILION, BLUE, GREEN, PURPLE];

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The plot's rectangle in pixels.
#[derive(Clone, Copy)]
struct Frame {
    left: i32,
    right: i32,
    top: i32,
    bottom: i32,
}

/// A phase with its place on the time axis.
struct Band<'a> {
    phase: Phase<'a>,
    summary: Summary,
    start_ns: u64,
    end_ns: u64,
    colour: RGBColor,
}

/// Draws the phases into an SVG file, replacing what was there.
///
/// Dots take their phase's colour. Where requests say whether they were hits, dots show that instead.
///
/// # Errors
/// When no phase has a request, or the file cannot be written.
pub fn latency_over_time(path: &Path, text: &ChartText<'_>, phases: &[Phase<'_>]) -> Result<()> {
    let svg = render(text, phases)?;
    std::fs::write(path, svg).with_context(|| format!("cannot write the picture to {}", path.display()))
}

fn render(text: &ChartText<'_>, phases: &[Phase<'_>]) -> Result<String> {
    let bands = lay_out(phases);
    ensure!(!bands.is_empty(), "no phase has a request to draw");
    let height = PLOT.bottom + 76 + LEGEND_ROW * (bands.len() as i32 + 1);
    let mut svg = String::new();
    {
        let canvas = SVGBackend::with_string(&mut svg, (WIDTH as u32, height as u32)).into_drawing_area();
        Chart::new(&canvas, text, &bands).draw().map_err(|error| anyhow::anyhow!("cannot draw: {error}"))?;
        canvas.present()?;
    }
    Ok(svg)
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

struct Chart<'a, 'b> {
    canvas: &'a Canvas<'b>,
    text: &'a ChartText<'a>,
    bands: &'a [Band<'a>],
    /// Whether any request says if it was a hit; dots show it then.
    hits_known: bool,
    time: TimeAxis,
    latency: LatencyAxis,
}

type Drawn = Result<(), Box<dyn std::error::Error + Send + Sync>>;

impl<'a, 'b> Chart<'a, 'b> {
    fn new(canvas: &'a Canvas<'b>, text: &'a ChartText<'a>, bands: &'a [Band<'a>]) -> Self {
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

    fn draw(&self) -> Drawn {
        self.canvas.fill(&PAPER)?;
        self.write(self.text.title, (PLOT.left, 34), 27, INK, Weight::Bold, HPos::Left)?;
        self.write(self.text.subtitle, (PLOT.left, 62), 18, FAINT, Weight::Plain, HPos::Left)?;
        self.draw_bands()?;
        self.draw_axes()?;
        self.draw_dots()?;
        self.draw_medians()?;
        self.draw_names()?;
        self.draw_keys(62)?;
        self.draw_legend()
    }

    fn draw_bands(&self) -> Drawn {
        for (index, band) in self.bands.iter().enumerate() {
            let corners = [(self.time.x(band.start_ns), PLOT.top), (self.time.x(band.end_ns), PLOT.bottom)];
            self.canvas.draw(&Rectangle::new(corners, BANDS[index % 2].filled()))?;
        }
        Ok(())
    }

    fn draw_axes(&self) -> Drawn {
        for decade in self.latency.decades() {
            let y = self.latency.y(decade);
            self.line(vec![(PLOT.left, y), (PLOT.right, y)], GRID.stroke_width(1))?;
            self.write(&latency_text(decade), (PLOT.left - 10, y), 17, INK, Weight::Plain, HPos::Right)?;
            for part in (2..10).map(|n| decade.saturating_mul(n)).filter(|&part| part < self.latency.end_ns())
            {
                let y = self.latency.y(part);
                self.line(vec![(PLOT.left, y), (PLOT.left + 5, y)], FAINT.mix(0.6).stroke_width(1))?;
            }
        }
        for (at_ns, label) in self.time.ticks() {
            let x = self.time.x(at_ns);
            self.line(vec![(x, PLOT.bottom), (x, PLOT.bottom + 6)], FAINT.stroke_width(1))?;
            self.write(&label, (x, PLOT.bottom + 19), 17, INK, Weight::Plain, HPos::Center)?;
        }
        for band in &self.bands[1..] {
            let x = self.time.x(band.start_ns);
            self.line(vec![(x, PLOT.top), (x, PLOT.bottom)], FAINT.mix(0.7).stroke_width(1))?;
        }
        self.line(
            vec![(PLOT.left, PLOT.top), (PLOT.left, PLOT.bottom), (PLOT.right, PLOT.bottom)],
            FAINT.stroke_width(1),
        )?;
        let axis = format!("{}, {}", self.text.time_axis, self.time.unit());
        self.write(&axis, (PLOT.right, PLOT.bottom + 42), 16, FAINT, Weight::Plain, HPos::Right)?;
        let beside = (20, (PLOT.top + PLOT.bottom) / 2);
        let style = style(16, FAINT, Weight::Plain, HPos::Center).transform(FontTransform::Rotate270);
        Ok(self.canvas.draw_text(self.text.latency_axis, &style, beside)?)
    }

    fn draw_dots(&self) -> Drawn {
        let total: usize = self.bands.iter().map(|band| band.phase.samples.len()).sum();
        let opacity = if total > DOTS_MAX / 2 { 0.35 } else { 0.55 };
        for band in self.bands {
            // By time, not by number: a fast phase must not crowd the slow ones out.
            let width = (self.time.x(band.end_ns) - self.time.x(band.start_ns)).max(1) as usize;
            let share = (DOTS_MAX * width).div_ceil((PLOT.right - PLOT.left) as usize);
            for sample in thin::thinned(band.phase.samples, share) {
                let at = (self.time.x(band.start_ns + sample.at_ns), self.latency.y(sample.latency_ns));
                let colour = self.dot_colour(band, sample.hit);
                self.canvas.draw(&Circle::new(at, 2, colour.mix(opacity).filled()))?;
            }
        }
        Ok(())
    }

    fn dot_colour(&self, band: &Band<'_>, hit: Option<bool>) -> RGBColor {
        match hit {
            Some(true) => BLUE,
            Some(false) => VERMILION,
            None if self.hits_known => GREY,
            None => band.colour,
        }
    }

    /// A white edge below the dark line keeps it readable on a cloud of dots.
    fn draw_medians(&self) -> Drawn {
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
                self.line(points.clone(), PAPER.stroke_width(5))?;
                self.line(points, INK.stroke_width(2))?;
            }
        }
        Ok(())
    }

    /// Phase names above their bands; neighbours of a narrow band make room.
    fn draw_names(&self) -> Drawn {
        let middles = self.bands.iter().map(|band| self.time.x((band.start_ns + band.end_ns) / 2));
        let widths: Vec<i32> = self.bands.iter().map(|band| name_width(band.phase.name)).collect();
        let centres = scale::spread(&middles.collect::<Vec<_>>(), &widths, PLOT.left, PLOT.right);
        for (band, centre) in self.bands.iter().zip(centres) {
            let colour = if self.hits_known { INK } else { band.colour };
            self.write(band.phase.name, (centre, PLOT.top - 18), 19, colour, Weight::Bold, HPos::Center)?;
            let (from, to) = (self.time.x(band.start_ns) + 1, self.time.x(band.end_ns) - 1);
            self.line(vec![(from, PLOT.top - 3), (to, PLOT.top - 3)], colour.stroke_width(3))?;
        }
        Ok(())
    }

    fn draw_legend(&self) -> Drawn {
        let (mut y, left) = (PLOT.bottom + 66, PLOT.left);
        let columns = [left + 330, left + 440, left + 550, left + 660, left + 740];
        let heads = ["requests/s", "mean", "median", "p99", if self.hits_known { "hits" } else { "" }];
        for (head, x) in heads.iter().zip(columns) {
            self.write(head, (x, y), 16, FAINT, Weight::Plain, HPos::Right)?;
        }
        for band in self.bands {
            y += LEGEND_ROW;
            if !self.hits_known {
                self.canvas.draw(&Circle::new((left + 6, y), 5, band.colour.filled()))?;
            }
            self.write(band.phase.name, (left + 20, y), 17, INK, Weight::Bold, HPos::Left)?;
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
                self.write(cell, (x, y), 17, INK, Weight::Plain, HPos::Right)?;
            }
            let note_x = if self.hits_known { columns[4] } else { columns[3] } + 32;
            self.write(band.phase.note, (note_x, y), 17, INK, Weight::Plain, HPos::Left)?;
        }
        Ok(())
    }

    /// What the marks mean, from the right border leftwards.
    fn draw_keys(&self, y: i32) -> Drawn {
        let mut x = PLOT.right;
        self.write("median", (x, y), 16, FAINT, Weight::Plain, HPos::Right)?;
        x -= 62;
        self.line(vec![(x - 26, y), (x, y)], INK.stroke_width(2))?;
        x -= 50;
        let hits: &[(&str, RGBColor)] = &[("miss", VERMILION), ("hit", BLUE)];
        let keys = if self.hits_known { hits } else { &[("one request", GREY)] };
        for &(key, colour) in keys {
            self.write(key, (x, y), 16, FAINT, Weight::Plain, HPos::Right)?;
            x -= 7 * key.len() as i32 + 14;
            self.canvas.draw(&Circle::new((x, y), 4, colour.filled()))?;
            x -= 24;
        }
        Ok(())
    }

    fn line(&self, points: Vec<(i32, i32)>, style: ShapeStyle) -> Drawn {
        Ok(self.canvas.draw(&PathElement::new(points, style))?)
    }

    fn write(&self, text: &str, at: (i32, i32), size: i32, colour: RGBColor, w: Weight, h: HPos) -> Drawn {
        Ok(self.canvas.draw_text(text, &style(size, colour, w, h), at)?)
    }
}

#[derive(Clone, Copy)]
enum Weight {
    Plain,
    Bold,
}

fn style(size: i32, colour: RGBColor, weight: Weight, anchor: HPos) -> TextStyle<'static> {
    let font = ("Helvetica, Arial, DejaVu Sans, sans-serif", size).into_font();
    let font = match weight {
        Weight::Plain => font,
        Weight::Bold => font.style(FontStyle::Bold),
    };
    font.color(&colour).pos(Pos::new(anchor, VPos::Center))
}

/// Pixels a phase's name takes above its band, roughly: no font is measured.
fn name_width(name: &str) -> i32 {
    name.chars().count() as i32 * 10 + 12
}

#[cfg(test)]
mod tests;
