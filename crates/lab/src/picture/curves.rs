//! Line charts of named series on a common axis: miss-ratio curves, parameter sweeps, and rates
//! over time.
//!
//! Each series has its name at the right end of its line. If the names do not fit there, they are
//! in rows below the chart. If a series has more points than pixels, each pixel column keeps its
//! first, lowest, highest and last point. So no peak is lost.

use super::axis::{Axis, AxisScale, Ends, Place, Tick};
use super::canvas::{Anchor, Canvas, Style};
use super::frame::{self, Frame, Grid, Legend, Sample};
use super::palette::{Colour, FAINT, INK, PAPER, series};
use super::{text_layout, thin};

const HEIGHT: i32 = 520;
const LABELS_X: usize = 9;
const LABELS_Y: usize = 7;
/// Height of a series name at the end of its line, pixels.
const ROW: i32 = 21;
/// Maximum width of the column of names, pixels.
const NAMES_MAX: f64 = 250.0;
/// Minimum distance between two dots, pixels.
const DOTS_APART: f64 = 12.0;
/// Maximum number of series that the description for screen readers includes.
const DESCRIBED_MAX: usize = 20;

/// A line chart: curves, axes and markers.
#[derive(Clone, Debug)]
pub struct CurveChart {
    title: String,
    subtitle: String,
    x: Axis,
    y: Axis,
    curves: Vec<Curve>,
    markers: Vec<Marker>,
}

impl CurveChart {
    /// Creates a chart without curves.
    pub fn new(title: impl Into<String>, x: Axis, y: Axis) -> CurveChart {
        let (title, subtitle) = (title.into(), String::new());
        CurveChart { title, subtitle, x, y, curves: Vec::new(), markers: Vec::new() }
    }

    /// Returns the chart with a subtitle below the title: what was measured, and how.
    pub fn subtitle(self, subtitle: impl Into<String>) -> CurveChart {
        CurveChart { subtitle: subtitle.into(), ..self }
    }

    /// Returns the chart with one more curve.
    pub fn curve(mut self, curve: Curve) -> CurveChart {
        self.curves.push(curve);
        self
    }

    /// Returns the chart with one more marker.
    pub fn marker(mut self, marker: Marker) -> CurveChart {
        self.markers.push(marker);
        self
    }
}

/// One series of a line chart.
#[derive(Clone, Debug)]
pub struct Curve {
    name: String,
    points: Vec<(f64, f64)>,
    dots: bool,
    steps: bool,
    area: bool,
}

impl Curve {
    /// Creates a line through these points (x, y), sorted by x. A y that is not a number makes a
    /// gap. The name may be empty.
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Curve {
        Curve { name: name.into(), points, dots: false, steps: false, area: false }
    }

    /// Returns the curve with a dot at each point, except where dots would overlap.
    pub fn dots(self) -> Curve {
        Curve { dots: true, ..self }
    }

    /// Returns the curve as steps: each value is valid until the next point, for example the rate
    /// of an interval. The last point ends the last step.
    pub fn steps(self) -> Curve {
        Curve { steps: true, ..self }
    }

    /// Returns the curve with the area down to the axis filled.
    pub fn area(self) -> Curve {
        Curve { area: true, ..self }
    }
}

/// A value marked by a line across the chart. The marker never changes the scale. If the value is
/// outside the axis, the label is at the border with an arrow.
#[derive(Clone, Debug)]
pub enum Marker {
    /// A vertical line with a label above the data.
    X(f64, String),
    /// A horizontal line with a label inside the chart.
    Y(f64, String),
}

/// A series in pixels, as parts without gaps.
type Runs = Vec<Vec<(f64, f64)>>;

/// Draws the chart as an SVG document without a prolog, for a file or an HTML page.
pub fn curves(chart: &CurveChart) -> String {
    Drawing::new(chart).draw()
}

struct Drawing<'a> {
    chart: &'a CurveChart,
    canvas: Canvas,
    frame: Frame,
    x: AxisScale,
    y: AxisScale,
    runs: Vec<Runs>,
    legend: Legend,
    names_at_ends: bool,
}

impl<'a> Drawing<'a> {
    fn new(chart: &'a CurveChart) -> Self {
        let marked = chart.markers.iter().any(|marker| matches!(marker, Marker::X(..)));
        let (top, bottom) = (if marked { 116.0 } else { 92.0 }, f64::from(HEIGHT) - 74.0);
        let drawn = || chart.curves.iter().flat_map(|curve| &curve.points).filter(|&&point| chart.has(point));
        let y = AxisScale::new(&chart.y, drawn().map(|point| point.1), (bottom, top), LABELS_Y, Ends::Round);
        let widest =
            y.ticks().iter().map(|tick| text_layout::width(&tick.label, frame::LABEL)).fold(0.0, f64::max);
        let named: Vec<&str> =
            chart.curves.iter().map(|c| c.name.as_str()).filter(|n| !n.is_empty()).collect();
        let names_at_ends = named.len() as i32 * ROW <= (bottom - top) as i32 + ROW;
        let names_wide = named.iter().map(|name| text_layout::width(name, frame::LABEL)).fold(0.0, f64::max);
        let names = if names_at_ends && !named.is_empty() { names_wide.min(NAMES_MAX) + 46.0 } else { 0.0 };
        let left = (widest + 54.0).max(84.0);
        let border = f64::from(frame::WIDTH) - frame::MARGIN;
        let ruler = |right| {
            AxisScale::new(&chart.x, drawn().map(|point| point.0), (left, right), LABELS_X, Ends::Exact)
        };
        // The last label is centred on its tick and must not extend beyond the chart.
        let half = |tick: &Tick| text_layout::width(&tick.label, frame::LABEL) / 2.0;
        let over = ruler(border).ticks().last().map_or(0.0, |tick| half(tick) - frame::MARGIN + 4.0).max(0.0);
        let right = border - names.max(over);
        let (frame, x) = (Frame { left, right, top, bottom }, ruler(right));
        let below = chart.curves.iter().map(|curve| if names_at_ends { "" } else { curve.name.as_str() });
        let legend = Legend::new(below, Sample::Line, border - left);
        let height = HEIGHT + legend.height() as i32;
        let canvas = Canvas::named(frame::WIDTH, height, &chart.spoken(), &chart.described());
        let runs = chart.curves.iter().map(|curve| chart.runs(curve, &x, &y)).collect();
        Drawing { chart, canvas, frame, x, y, runs, legend, names_at_ends }
    }

    fn draw(mut self) -> String {
        let chart = self.chart;
        frame::heading_cut(&mut self.canvas, &chart.title, &chart.subtitle, self.frame.left);
        frame::axis_left(&mut self.canvas, self.frame, &self.y, &chart.y.name);
        frame::axis_bottom(&mut self.canvas, self.frame, &self.x, &chart.x.name, Grid::Ticks);
        self.draw_areas();
        let Frame { left, right, top, bottom } = self.frame;
        self.canvas.line(&[(left, top), (left, bottom), (right, bottom)], FAINT.stroke(1.0));
        if self.runs.iter().all(Vec::is_empty) {
            frame::no_data(&mut self.canvas, self.frame);
            return self.canvas.finish();
        }
        self.draw_vertical_lines();
        for index in 0..chart.curves.len() {
            self.draw_curve(index);
        }
        self.draw_vertical_labels();
        self.draw_horizontal_markers();
        if self.names_at_ends {
            self.draw_names();
        } else {
            self.legend.draw(&mut self.canvas, (self.frame.left, f64::from(HEIGHT)));
        }
        self.canvas.finish()
    }

    fn draw_areas(&mut self) {
        let base = self.y.base();
        for (index, curve) in self.chart.curves.iter().enumerate().filter(|(_, curve)| curve.area) {
            for run in &self.runs[index] {
                let (first, last) = (run[0].0, run[run.len() - 1].0);
                let mut corners = vec![(first, base)];
                corners.extend(traced(run, curve.steps));
                corners.push((last, base));
                self.canvas.area(&corners, series(index).0.mix(0.22));
            }
        }
    }

    fn draw_curve(&mut self, index: usize) {
        let curve = &self.chart.curves[index];
        let (colour, dash) = series(index);
        let width = if curve.area { 1.6 } else { 2.6 };
        for run in &self.runs[index] {
            if run.len() > 1 {
                self.canvas.line(&traced(run, curve.steps), colour.stroke(width).dashed(dash).rounded());
            }
            if curve.dots || run.len() == 1 {
                draw_dots(&mut self.canvas, run, colour);
            }
        }
    }

    /// Writes the names at the right border, each as near to the end of its line as possible
    /// without overlap.
    fn draw_names(&mut self) {
        let curves = &self.chart.curves;
        let middle = |runs: &Runs| {
            let (sum, count) = runs.iter().flatten().fold((0.0, 0), |(sum, n), point| (sum + point.1, n + 1));
            if count == 0 { f64::MAX } else { sum / f64::from(count) }
        };
        let last = |runs: &Runs| runs.last().and_then(|run| run.last().copied());
        let mut named: Vec<(usize, f64, f64)> = (0..curves.len())
            .filter(|&index| !curves[index].name.is_empty())
            .map(|index| {
                (index, last(&self.runs[index]).map_or(self.frame.bottom, |p| p.1), middle(&self.runs[index]))
            })
            .collect();
        named
            .sort_by(|a, b| (a.1.round(), a.2).partial_cmp(&(b.1.round(), b.2)).expect("pixels are numbers"));
        let heights: Vec<i32> = named.iter().map(|&(_, y, _)| y.round() as i32).collect();
        let (top, bottom) = (self.frame.top as i32 - ROW / 2, self.frame.bottom as i32 + ROW / 2);
        let rows = text_layout::spread(&heights, &vec![ROW; named.len()], top, bottom);
        let (border, x) = (self.frame.right, self.frame.right + 28.0);
        for (&(index, end, _), row) in named.iter().zip(rows) {
            let (colour, dash) = series(index);
            let y = f64::from(row);
            if last(&self.runs[index]).is_some_and(|point| point.0 > border - 6.0) {
                self.canvas.line(&[(border + 2.0, end), (x - 3.0, y)], colour.mix(0.55).stroke(1.0));
            }
            self.canvas.line(&[(x, y), (x + 26.0, y)], colour.stroke(3.0).dashed(dash));
            let name = text_layout::cut(&curves[index].name, frame::LABEL, NAMES_MAX);
            self.canvas.text(&name, (x + 32.0, y), Style::new(frame::LABEL, INK, Anchor::Start));
        }
    }

    /// Returns the vertical markers as pixel, border position and label, sorted by pixel. Markers
    /// outside the axis are at its border.
    fn vertical(&self) -> Vec<(Option<f64>, f64, String)> {
        let mut marked: Vec<_> = self
            .chart
            .markers
            .iter()
            .filter_map(|marker| match marker {
                Marker::X(value, label) => Some((self.chart.x.clean(*value)?, label)),
                Marker::Y(..) => None,
            })
            .map(|(value, label)| {
                let label = text_layout::cut(label, frame::LABEL, 300.0);
                match self.x.place(value) {
                    Place::At(x) => (Some(x), x, label),
                    Place::Before => (None, self.frame.left, format!("← {label}")),
                    Place::After => (None, self.frame.right, format!("{label} →")),
                }
            })
            .collect();
        marked.sort_by(|a, b| a.1.total_cmp(&b.1));
        marked
    }

    fn draw_vertical_lines(&mut self) {
        for x in self.vertical().into_iter().filter_map(|(x, ..)| x) {
            let line = [(x, self.frame.top - 4.0), (x, self.frame.bottom)];
            self.canvas.line(&line, INK.mix(0.75).stroke(1.5).dashed(Some("5 4")));
        }
    }

    fn draw_vertical_labels(&mut self) {
        let marked = self.vertical();
        let middles: Vec<i32> = marked.iter().map(|&(_, x, _)| x as i32).collect();
        let wide = |label: &str| text_layout::bold_width(label, frame::LABEL) as i32 + 16;
        let widths: Vec<i32> = marked.iter().map(|(_, _, label)| wide(label)).collect();
        let borders = (self.frame.left as i32 - 40, frame::WIDTH - 8);
        let centres = text_layout::spread(&middles, &widths, borders.0, borders.1);
        for ((x, _, label), centre) in marked.iter().zip(centres) {
            let centre = f64::from(centre);
            if let Some(x) = *x {
                let foot = [(centre, self.frame.top - 12.0), (x, self.frame.top - 4.0)];
                self.canvas.line(&foot, INK.mix(0.75).stroke(1.0));
            }
            let style = Style::new(frame::LABEL, INK, Anchor::Middle).bold();
            self.canvas.text(label, (centre, self.frame.top - 21.0), style);
        }
    }

    fn draw_horizontal_markers(&mut self) {
        let Frame { left, right, top, bottom } = self.frame;
        for marker in &self.chart.markers {
            let Marker::Y(value, label) = marker else { continue };
            let Some(value) = self.chart.y.clean(*value) else { continue };
            let label = text_layout::cut(label, frame::LABEL, right - left - 60.0);
            let wide = text_layout::bold_width(&label, frame::LABEL);
            let (label, y) = match self.y.place(value) {
                Place::At(y) => {
                    let line = [(left, y), (right, y)];
                    self.canvas.line(&line, INK.mix(0.75).stroke(1.5).dashed(Some("5 4")));
                    (label, y)
                }
                Place::Before => (format!("{label} ↓"), bottom),
                Place::After => (format!("{label} ↑"), top),
            };
            let places = [
                (right - wide - 12.0, y - 13.0),
                (left + 12.0, y - 13.0),
                (right - wide - 12.0, y + 14.0),
                (left + 12.0, y + 14.0),
            ];
            let inside = places.into_iter().filter(|place| place.1 > top && place.1 < bottom);
            let best =
                inside.min_by_key(|&(x, y)| self.crowd((x - 8.0, x + wide + 8.0), (y - 13.0, y + 13.0)));
            let Some(at) = best else { continue };
            self.canvas.text(&label, at, Style::new(frame::LABEL, INK, Anchor::Start).bold().edged());
        }
    }

    /// Returns how much of the curves is in a box: the number of crossings of the curves with
    /// eleven vertical lines through the box.
    fn crowd(&self, (left, right): (f64, f64), (top, bottom): (f64, f64)) -> usize {
        let probes = (0..=10).map(|i| left + (right - left) * f64::from(i) / 10.0);
        let pairs = || self.runs.iter().flatten().flat_map(|run| run.windows(2));
        let crosses = |x: f64, pair: &[(f64, f64)]| {
            let [(x0, y0), (x1, y1)] = [pair[0], pair[1]];
            let y = if x1 > x0 { y0 + (y1 - y0) * (x - x0) / (x1 - x0) } else { y0 };
            (x0..=x1).contains(&x) && (top..=bottom).contains(&y)
        };
        probes.map(|x| pairs().filter(|pair| crosses(x, pair)).count()).sum()
    }
}

impl CurveChart {
    fn has(&self, (x, y): (f64, f64)) -> bool {
        self.x.clean(x).is_some() && self.y.clean(y).is_some()
    }

    fn runs(&self, curve: &Curve, x: &AxisScale, y: &AxisScale) -> Runs {
        let mut points: Vec<(f64, Option<f64>)> = curve
            .points
            .iter()
            .filter_map(|&(at, value)| {
                Some((x.pixel(self.x.clean(at)?), self.y.clean(value).map(|v| y.pixel(v))))
            })
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let runs = points.split(|point| point.1.is_none()).filter(|run| !run.is_empty());
        runs.map(|run| thin::columns(&run.iter().map(|&(x, y)| (x, y.unwrap_or(0.0))).collect::<Vec<_>>()))
            .collect()
    }

    /// Returns the text that screen readers read for the chart.
    fn spoken(&self) -> String {
        let words = [self.title.as_str(), self.subtitle.as_str()];
        let said: Vec<&str> = words.into_iter().filter(|text| !text.is_empty()).collect();
        if said.is_empty() { "chart".to_owned() } else { said.join(". ") }
    }

    /// Returns the first and last value of each series in words.
    fn described(&self) -> String {
        let sentence = |curve: &Curve| {
            let drawn = || curve.points.iter().copied().filter(|&point| self.has(point));
            let first = drawn().min_by(|a, b| a.0.total_cmp(&b.0))?;
            let last = drawn().max_by(|a, b| a.0.total_cmp(&b.0))?;
            let at = |(x, y): (f64, f64)| format!("{} at {}", self.y.unit.text(y), self.x.unit.text(x));
            Some(format!("{}: {}, {}.", curve.name, at(first), at(last)))
        };
        let sentences: Vec<String> = self.curves.iter().take(DESCRIBED_MAX).filter_map(sentence).collect();
        sentences.join(" ")
    }
}

/// Draws a dot at each point, without dots that would overlap the previous one.
fn draw_dots(canvas: &mut Canvas, run: &[(f64, f64)], colour: Colour) {
    let mut drawn: Option<(f64, f64)> = None;
    for &(x, y) in run {
        if drawn.is_some_and(|before| (x - before.0).hypot(y - before.1) < DOTS_APART) {
            continue;
        }
        drawn = Some((x, y));
        canvas.dot((x, y), 5.0, PAPER.into());
        canvas.dot((x, y), 3.8, colour.into());
    }
}

/// Returns the points of a line, including the corners of steps.
fn traced(run: &[(f64, f64)], steps: bool) -> Vec<(f64, f64)> {
    if !steps {
        return run.to_vec();
    }
    let corners = run.windows(2).flat_map(|pair| [(pair[1].0, pair[0].1), pair[1]]);
    std::iter::once(run[0]).chain(corners).collect()
}

#[cfg(test)]
mod tests;
