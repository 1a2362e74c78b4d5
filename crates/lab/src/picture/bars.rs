//! Bar charts: groups of bars with the value beside each bar, for example published and measured
//! values.
//!
//! Bars always start at zero, so that their lengths can be compared. Vertical bars without room for
//! their names or values become horizontal.

use super::axis::{Axis, AxisScale, Ends};
use super::canvas::{Anchor, Canvas, Style};
use super::frame::{self, Frame, Grid, Legend, Sample};
use super::palette::{FAINT, INK, series};
use super::text_layout;
use super::unit::Unit;

/// Height of a vertical bar chart without its legend, pixels.
const HEIGHT: i32 = 520;
/// Thickness of a horizontal bar, pixels. `GAP` is the distance between groups.
const THICK: f64 = 20.0;
const GAP: f64 = 18.0;
/// Maximum thickness of a vertical bar, pixels.
const THICK_MAX: f64 = 64.0;
const VALUE: f64 = 15.0;
const NAMES_MAX: f64 = 330.0;

/// One bar of a chart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bar {
    /// A bar from zero to this value.
    Value(f64),
    /// A bar from the lower to the upper value of a range, for example "2 to 4 times".
    Span(f64, f64),
    /// A value that was not measured, shown as "–".
    Missing,
}

impl Bar {
    /// Returns the ends of the bar, lower end first.
    fn ends(self, axis: &Axis) -> Option<(f64, f64)> {
        match self {
            Bar::Value(value) => axis.clean(value).map(|value| (value.min(0.0), value.max(0.0))),
            Bar::Span(a, b) => Some((axis.clean(a)?, axis.clean(b)?)).map(|(a, b)| (a.min(b), a.max(b))),
            Bar::Missing => None,
        }
    }

    fn text(self, axis: &Axis) -> String {
        match (self, self.ends(axis)) {
            (_, None) => "–".to_owned(),
            (Bar::Span(..), Some((low, high))) => {
                let (low, high) = (axis.unit.text(low), axis.unit.text(high));
                // The range is "2–4 ×" and not "2 ×–4 ×".
                let short = low.rsplit_once(' ').zip(high.rsplit_once(' ')).filter(|(a, b)| a.1 == b.1);
                short.map_or(format!("{low} – {high}"), |(a, b)| format!("{}–{} {}", a.0, b.0, b.1))
            }
            (Bar::Value(value), Some(_)) => axis.unit.text(value),
            (Bar::Missing, Some(_)) => unreachable!("a missing bar has no ends"),
        }
    }

    fn is_negative(self, axis: &Axis) -> bool {
        self.ends(axis).is_some_and(|(low, high)| low < 0.0 && high <= 0.0)
    }
}

/// A group of bars: one bar per series, in the order of the series.
#[derive(Clone, Debug)]
pub struct BarGroup {
    name: String,
    bars: Vec<Bar>,
}

impl BarGroup {
    /// Creates a group of bars. Series without a bar count as missing.
    pub fn new(name: impl Into<String>, bars: impl Into<Vec<Bar>>) -> BarGroup {
        BarGroup { name: name.into(), bars: bars.into() }
    }
}

/// A bar chart: groups of bars on one axis.
#[derive(Clone, Debug)]
pub struct BarChart {
    title: String,
    subtitle: String,
    axis: Axis,
    series: Vec<String>,
    groups: Vec<BarGroup>,
    upright: bool,
}

impl BarChart {
    /// Creates a chart of horizontal bars without series and groups. `name` and `unit` describe the
    /// length of a bar.
    pub fn new(title: impl Into<String>, name: impl Into<String>, unit: Unit) -> BarChart {
        let (series, groups) = (Vec::new(), Vec::new());
        let axis = Axis::new(name, unit);
        BarChart { title: title.into(), subtitle: String::new(), axis, series, groups, upright: false }
    }

    /// Returns the chart with a subtitle below the title.
    pub fn subtitle(self, subtitle: impl Into<String>) -> BarChart {
        BarChart { subtitle: subtitle.into(), ..self }
    }

    /// Returns the chart with one more series, for example "measured".
    pub fn series(mut self, name: impl Into<String>) -> BarChart {
        self.series.push(name.into());
        self
    }

    /// Returns the chart with one more group.
    pub fn group(mut self, group: BarGroup) -> BarChart {
        self.groups.push(group);
        self
    }

    /// Returns the chart with vertical bars. If names or values do not fit, the bars become
    /// horizontal.
    pub fn upright(self) -> BarChart {
        BarChart { upright: true, ..self }
    }

    fn bar(&self, group: &BarGroup, series: usize) -> Bar {
        group.bars.get(series).copied().unwrap_or(Bar::Missing)
    }

    fn ends(&self) -> impl Iterator<Item = f64> {
        let bars = self.groups.iter().flat_map(|group| group.bars.iter().take(self.count()));
        bars.filter_map(|bar| bar.ends(&self.axis)).flat_map(|(low, high)| [low, high])
    }

    /// Returns the number of bars per group.
    fn count(&self) -> usize {
        self.series.len().max(1)
    }

    fn legend(&self, left: f64) -> Legend {
        let room = f64::from(frame::WIDTH) - frame::MARGIN - left;
        Legend::new(self.series.iter().map(String::as_str), Sample::Field, room)
    }

    fn canvas(&self, height: i32) -> Canvas {
        let words = [self.title.as_str(), self.subtitle.as_str()].join(". ");
        let group = |group: &BarGroup| {
            let bar = |index: usize| {
                let text = self.bar(group, index).text(&self.axis);
                self.series.get(index).map_or(text.clone(), |name| format!("{name} {text}"))
            };
            format!("{}: {}.", group.name, (0..self.count()).map(bar).collect::<Vec<_>>().join(", "))
        };
        let said: Vec<String> = self.groups.iter().take(40).map(group).collect();
        Canvas::named(frame::WIDTH, height, words.trim_matches(['.', ' ']), &said.join(" "))
    }
}

/// Draws the chart as an SVG document without a prolog, for a file or an HTML page.
pub fn bars(chart: &BarChart) -> String {
    let upright = if chart.upright { Upright::fitting(chart) } else { None };
    match upright {
        Some(upright) => upright.draw(chart),
        None => lying(chart),
    }
}

fn lying(chart: &BarChart) -> String {
    let widest =
        chart.groups.iter().map(|group| text_layout::width(&group.name, frame::LABEL)).fold(0.0, f64::max);
    let left = (widest.min(NAMES_MAX) + 52.0).max(84.0);
    let legend = chart.legend(left);
    let each = THICK * chart.count() as f64 + GAP;
    let top = 88.0 + legend.height();
    let bottom = top + (each * chart.groups.len() as f64).max(120.0) + GAP / 2.0;
    let values =
        || (0..chart.count()).flat_map(|i| chart.groups.iter().map(move |group| chart.bar(group, i)));
    let wide = |bar: Bar| text_layout::width(&bar.text(&chart.axis), VALUE);
    let widest = values().map(wide).fold(0.0, f64::max);
    let frame = Frame { left, right: f64::from(frame::WIDTH) - frame::MARGIN - widest, top, bottom };
    // A negative value is written left of its bar and needs room there.
    let negative =
        values().filter(|bar| bar.is_negative(&chart.axis)).map(|bar| wide(bar) + 10.0).fold(0.0, f64::max);
    let ruler = AxisScale::new(&chart.axis, chart.ends(), (left + negative, frame.right), 8, Ends::Round);
    let mut canvas = chart.canvas((bottom + 74.0) as i32);
    frame::heading_cut(&mut canvas, &chart.title, &chart.subtitle, left);
    legend.draw(&mut canvas, (left, 94.0));
    frame::axis_bottom(&mut canvas, frame, &ruler, &chart.axis.name, Grid::Lines);
    let base = ruler.base();
    for (number, group) in chart.groups.iter().enumerate() {
        let first = top + GAP / 2.0 + each * number as f64 + GAP / 2.0;
        let name = text_layout::cut(&group.name, frame::LABEL, NAMES_MAX);
        let middle = first + THICK * chart.count() as f64 / 2.0;
        canvas.text(&name, (left - 12.0, middle), Style::new(frame::LABEL, INK, Anchor::End));
        for index in 0..chart.count() {
            let top = first + THICK * index as f64;
            lying_bar(&mut canvas, chart.bar(group, index), &chart.axis, &ruler, (index, top));
        }
    }
    canvas.line(&[(base, top), (base, bottom)], FAINT.stroke(1.5));
    finish(canvas, chart, frame)
}

/// Draws the horizontal bar of a series, with the value at the end away from zero.
fn lying_bar(canvas: &mut Canvas, bar: Bar, axis: &Axis, ruler: &AxisScale, (index, top): (usize, f64)) {
    let (mut from, mut to) = (ruler.base(), ruler.base());
    if let Some((low, high)) = bar.ends(axis) {
        // A bar of almost zero is still one pixel long.
        (from, to) = (ruler.pixel(low), ruler.pixel(high).max(ruler.pixel(low) + 1.0));
        canvas.rect((from, top + 1.0), (to, top + THICK - 1.0), series(index).0.into());
    }
    let (x, anchor) =
        if bar.is_negative(axis) { (from - 7.0, Anchor::End) } else { (to + 7.0, Anchor::Start) };
    canvas.text(&bar.text(axis), (x, top + THICK / 2.0), Style::new(VALUE, INK, anchor).edged());
}

fn finish(mut canvas: Canvas, chart: &BarChart, frame: Frame) -> String {
    if chart.ends().next().is_none() {
        frame::no_data(&mut canvas, frame);
    }
    canvas.finish()
}

/// Dimensions of vertical bars.
struct Upright {
    frame: Frame,
    ruler: AxisScale,
    legend: Legend,
    slot: f64,
    thick: f64,
}

impl Upright {
    /// Returns dimensions of vertical bars with room for every name and value, or `None` if the
    /// names and values do not fit.
    fn fitting(chart: &BarChart) -> Option<Upright> {
        // The exact left border is unknown here: it depends on labels, which depend on the legend's
        // height. This value is a safe upper limit.
        let legend = chart.legend(200.0);
        let (top, bottom) = (112.0 + legend.height(), f64::from(HEIGHT) - 50.0 + legend.height());
        let below = chart.ends().any(|end| end < 0.0);
        let floor = if below { bottom - 22.0 } else { bottom };
        let ruler = AxisScale::new(&chart.axis, chart.ends(), (floor, top), 7, Ends::Round);
        let widest = ruler
            .ticks()
            .iter()
            .map(|tick| text_layout::width(&tick.label, frame::LABEL))
            .fold(0.0, f64::max);
        let frame = Frame {
            left: (widest + 54.0).max(84.0),
            right: f64::from(frame::WIDTH) - frame::MARGIN,
            top,
            bottom,
        };
        let slot = (frame.right - frame.left) / chart.groups.len().max(1) as f64;
        let thick = (slot * 0.82 / chart.count() as f64).min(THICK_MAX);
        let fits = chart.groups.iter().all(|group| {
            let value =
                |index| text_layout::width(&chart.bar(group, index).text(&chart.axis), VALUE) <= thick + 6.0;
            text_layout::width(&group.name, frame::LABEL) <= slot - 8.0 && (0..chart.count()).all(value)
        });
        fits.then_some(Upright { frame, ruler, legend, slot, thick })
    }

    fn draw(&self, chart: &BarChart) -> String {
        let Frame { left, right, bottom, .. } = self.frame;
        let mut canvas = chart.canvas((bottom + 50.0) as i32);
        frame::heading_cut(&mut canvas, &chart.title, &chart.subtitle, left);
        self.legend.draw(&mut canvas, (left, 94.0));
        frame::axis_left(&mut canvas, self.frame, &self.ruler, &chart.axis.name);
        let base = self.ruler.base();
        for (number, group) in chart.groups.iter().enumerate() {
            let middle = left + self.slot * (number as f64 + 0.5);
            canvas.text(&group.name, (middle, bottom + 22.0), Style::new(frame::LABEL, INK, Anchor::Middle));
            for index in 0..chart.count() {
                let bar = chart.bar(group, index);
                let x = middle + self.thick * (index as f64 - chart.count() as f64 / 2.0);
                let (mut top, mut foot) = (base, base);
                if let Some((low, high)) = bar.ends(&chart.axis) {
                    foot = self.ruler.pixel(low);
                    top = self.ruler.pixel(high).min(foot - 1.0);
                    canvas.rect((x + 1.0, top), (x + self.thick - 1.0, foot), series(index).0.into());
                }
                let y = if bar.is_negative(&chart.axis) { foot + 12.0 } else { top - 12.0 };
                let style = Style::new(VALUE, INK, Anchor::Middle).edged();
                canvas.text(&bar.text(&chart.axis), (x + self.thick / 2.0, y), style);
            }
        }
        canvas.line(&[(left, base), (right, base)], FAINT.stroke(1.5));
        finish(canvas, chart, self.frame)
    }
}

#[cfg(test)]
mod tests;
