//! Common parts of all charts: heading, grid, axes and legend.

use super::axis::AxisScale;
use super::canvas::{Anchor, Canvas, Style};
use super::palette::{FAINT, GRID, INK, series};
use super::text_layout;

/// Width of all charts, pixels.
pub(super) const WIDTH: i32 = 1200;
/// Width of the right margin, pixels.
pub(super) const MARGIN: f64 = 36.0;
/// Font height of tick labels, pixels.
pub(super) const LABEL: f64 = 16.0;
/// Font height of axis names, pixels.
const NAME: f64 = 16.0;

/// Rectangle of the data, in pixels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    pub(super) left: f64,
    pub(super) right: f64,
    pub(super) top: f64,
    pub(super) bottom: f64,
}

/// Returns the font size for this line height.
pub(super) fn size(line: i32) -> f64 {
    f64::from(line) / 1.24
}

/// Draws title and subtitle.
pub(super) fn heading(canvas: &mut Canvas, title: &str, subtitle: &str, left: f64) {
    canvas.text(title, (left, 34.0), Style::new(size(27), INK, Anchor::Start).bold());
    canvas.text(subtitle, (left, 62.0), Style::new(size(18), FAINT, Anchor::Start));
}

/// Draws title and subtitle, cut at the right margin.
pub(super) fn heading_cut(canvas: &mut Canvas, title: &str, subtitle: &str, left: f64) {
    let room = f64::from(WIDTH) - MARGIN - left;
    let title = text_layout::cut(title, size(27) * 1.08, room);
    heading(canvas, &title, &text_layout::cut(subtitle, size(18), room), left);
}

/// Writes "no data" in the middle of the rectangle.
pub(super) fn no_data(canvas: &mut Canvas, frame: Frame) {
    let middle = ((frame.left + frame.right) / 2.0, (frame.top + frame.bottom) / 2.0);
    canvas.text("no data", middle, Style::new(20.0, FAINT, Anchor::Middle));
}

/// Draws the vertical axis at the left: grid lines, labels and name.
pub(super) fn axis_left(canvas: &mut Canvas, frame: Frame, ruler: &AxisScale, name: &str) {
    for &y in ruler.minor() {
        canvas.line(&[(frame.left, y), (frame.left + 5.0, y)], FAINT.mix(0.6).stroke(1.0));
    }
    for tick in ruler.ticks() {
        canvas.line(&[(frame.left, tick.at), (frame.right, tick.at)], GRID.stroke(1.0));
        canvas.text(&tick.label, (frame.left - 10.0, tick.at), Style::new(LABEL, INK, Anchor::End));
    }
    let name = text_layout::cut(name, NAME, frame.bottom - frame.top + 60.0);
    let middle = (20.0, (frame.top + frame.bottom) / 2.0);
    canvas.text(&name, middle, Style::new(NAME, FAINT, Anchor::Middle).turned());
}

/// Draws the horizontal axis at the bottom: ticks or grid lines, labels and name.
pub(super) fn axis_bottom(canvas: &mut Canvas, frame: Frame, ruler: &AxisScale, name: &str, grid: Grid) {
    for &x in ruler.minor() {
        canvas.line(&[(x, frame.bottom), (x, frame.bottom + 4.0)], FAINT.mix(0.6).stroke(1.0));
    }
    let mut free = f64::MIN;
    for tick in ruler.ticks() {
        let x = tick.at;
        if grid == Grid::Lines {
            canvas.line(&[(x, frame.top), (x, frame.bottom)], GRID.stroke(1.0));
        }
        canvas.line(&[(x, frame.bottom), (x, frame.bottom + 6.0)], FAINT.stroke(1.0));
        let half = text_layout::width(&tick.label, LABEL) / 2.0;
        if x - half < free {
            continue;
        }
        free = x + half + 8.0;
        canvas.text(&tick.label, (x, frame.bottom + 20.0), Style::new(LABEL, INK, Anchor::Middle));
    }
    let name = text_layout::cut(name, NAME, frame.right - frame.left);
    canvas.text(&name, (frame.right, frame.bottom + 46.0), Style::new(NAME, FAINT, Anchor::End));
}

/// Tells whether an axis draws grid lines through the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grid {
    Ticks,
    Lines,
}

/// Layout of the legend: names of series in rows.
pub(super) struct Legend {
    /// Number of each series, distance from the legend's left end, and row.
    places: Vec<(usize, f64, usize)>,
    names: Vec<String>,
    sample: Sample,
}

/// Symbol before a name that shows the series' colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sample {
    /// A piece of the series' line.
    Line,
    /// A rectangle of the series' colour.
    Field,
}

impl Sample {
    fn width(self) -> f64 {
        match self {
            Sample::Line => 34.0,
            Sample::Field => 18.0,
        }
    }

    fn draw(self, canvas: &mut Canvas, index: usize, (x, y): (f64, f64)) {
        let (colour, dash) = series(index);
        let to = x + self.width();
        match self {
            Sample::Line => canvas.line(&[(x, y), (to, y)], colour.stroke(3.0).dashed(dash)),
            Sample::Field => canvas.rect((x, y - 7.0), (to, y + 7.0), colour.into()),
        }
    }
}

impl Legend {
    /// Height of a row of the legend, pixels.
    pub(super) const ROW: f64 = 26.0;

    /// Lays out the names in as many rows as the width `room` requires. Empty names need no space.
    pub(super) fn new<'a>(names: impl Iterator<Item = &'a str>, sample: Sample, room: f64) -> Legend {
        let names: Vec<String> = names.map(|name| text_layout::cut(name, LABEL, 300.0)).collect();
        let (mut x, mut row, mut places) = (0.0, 0, Vec::new());
        for (index, name) in names.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
            let wide = sample.width() + 8.0 + text_layout::width(name, LABEL);
            if x > 0.0 && x + wide > room {
                (x, row) = (0.0, row + 1);
            }
            places.push((index, x, row));
            x += wide + 26.0;
        }
        Legend { places, names, sample }
    }

    /// Returns the height of the legend, pixels.
    pub(super) fn height(&self) -> f64 {
        self.places.last().map_or(0.0, |&(_, _, row)| (row + 1) as f64 * Legend::ROW)
    }

    /// Draws the legend. The point is the left end of the first row, vertically centred.
    pub(super) fn draw(&self, canvas: &mut Canvas, (left, y): (f64, f64)) {
        for &(index, x, row) in &self.places {
            let (x, y) = (left + x, y + row as f64 * Legend::ROW);
            self.sample.draw(canvas, index, (x, y));
            let at = (x + self.sample.width() + 8.0, y);
            canvas.text(&self.names[index], at, Style::new(LABEL, INK, Anchor::Start));
        }
    }
}
