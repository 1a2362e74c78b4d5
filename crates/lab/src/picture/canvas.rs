//! Writes an SVG document element by element.
//!
//! Coordinates are in pixels from the upper left corner, rounded to a tenth. A coordinate that is
//! not finite is a bug of the caller and panics. Only the canvas escapes text. No element has an
//! `id`, so several SVG documents can be part of one HTML page. A document has no external
//! references.
//!
//! The project writes SVG itself because the SVG backends of drawing libraries lack features that
//! charts need. The missing features are dashes, tenths of a pixel, text for screen readers, and
//! the removal of characters that XML forbids.

use std::fmt::Write;

use super::palette::{Colour, PAPER};
use crate::markup::escaped;

const FONT: &str = "Helvetica, Arial, DejaVu Sans, sans-serif";

/// A colour with an opacity from 0 to 1.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paint {
    colour: Colour,
    opacity: f64,
}

impl Colour {
    pub(super) fn mix(self, opacity: f64) -> Paint {
        Paint { colour: self, opacity }
    }

    /// Returns a line style of this colour.
    pub(super) fn stroke(self, width: f64) -> Stroke {
        Paint::from(self).stroke(width)
    }
}

impl Paint {
    /// Returns a line style of this paint.
    pub(super) fn stroke(self, width: f64) -> Stroke {
        Stroke { paint: self, width, dash: None, rounded: false }
    }
}

impl From<Colour> for Paint {
    fn from(colour: Colour) -> Paint {
        colour.mix(1.0)
    }
}

/// Style of a line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stroke {
    paint: Paint,
    width: f64,
    dash: Option<&'static str>,
    rounded: bool,
}

impl Stroke {
    /// Returns the line style with this dash pattern; `None` is a solid line.
    pub(super) fn dashed(self, dash: Option<&'static str>) -> Stroke {
        Stroke { dash, ..self }
    }

    /// Returns the line style with round corners. At sharp turns, pointed corners would extend
    /// beyond the line.
    pub(super) fn rounded(self) -> Stroke {
        Stroke { rounded: true, ..self }
    }
}

/// Point of a text that is at the given position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// Style of a text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    size: f64,
    colour: Colour,
    anchor: Anchor,
    bold: bool,
    turned: bool,
    edged: bool,
}

impl Style {
    /// Creates a plain text style with this height in pixels.
    pub(super) fn new(size: f64, colour: Colour, anchor: Anchor) -> Style {
        Style { size, colour, anchor, bold: false, turned: false, edged: false }
    }

    pub(super) fn bold(self) -> Style {
        Style { bold: true, ..self }
    }

    /// Returns the text style rotated to be read from bottom to top.
    pub(super) fn turned(self) -> Style {
        Style { turned: true, ..self }
    }

    /// Returns the text style with a white outline, for text over lines.
    pub(super) fn edged(self) -> Style {
        Style { edged: true, ..self }
    }
}

/// An SVG document that is being written.
#[derive(Debug)]
pub(super) struct Canvas {
    out: String,
}

impl Canvas {
    /// Starts an empty SVG document of this size for a separate file.
    pub(super) fn new(width: i32, height: i32) -> Canvas {
        Canvas::start(width, height, "")
    }

    /// Starts an empty SVG document for an HTML page. Screen readers read `name` and then
    /// `description`.
    pub(super) fn named(width: i32, height: i32, name: &str, description: &str) -> Canvas {
        let mut canvas =
            Canvas::start(width, height, &format!(" role=\"img\" aria-label=\"{}\"", escaped(name)));
        if !description.is_empty() {
            canvas.push(format_args!("<desc>{}</desc>", escaped(description)));
        }
        canvas
    }

    fn start(width: i32, height: i32, more: &str) -> Canvas {
        let mut canvas = Canvas { out: String::new() };
        canvas.push(format_args!(
            "<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             xmlns=\"http://www.w3.org/2000/svg\"{more}>"
        ));
        canvas.rect((0.0, 0.0), (f64::from(width), f64::from(height)), PAPER.into());
        canvas
    }

    /// Returns the complete document.
    pub(super) fn finish(mut self) -> String {
        self.out.push_str("</svg>\n");
        self.out
    }

    /// Draws a filled rectangle between two corners.
    pub(super) fn rect(&mut self, from: (f64, f64), to: (f64, f64), paint: Paint) {
        let (x, y, width, height) =
            (number(from.0), number(from.1), number(to.0 - from.0), number(to.1 - from.1));
        self.push(format_args!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" opacity=\"{}\" fill=\"{}\" stroke=\"none\"/>",
            paint.opacity,
            hex(paint.colour)
        ));
    }

    /// Draws a line through these points.
    pub(super) fn line(&mut self, points: &[(f64, f64)], stroke: Stroke) {
        let dash = stroke.dash.map(|dash| format!(" stroke-dasharray=\"{dash}\"")).unwrap_or_default();
        let join = if stroke.rounded { " stroke-linejoin=\"round\"" } else { "" };
        self.push(format_args!(
            "<polyline fill=\"none\" opacity=\"{}\" stroke=\"{}\" stroke-width=\"{}\"{dash}{join} points=\"{}\"/>",
            stroke.paint.opacity,
            hex(stroke.paint.colour),
            stroke.width,
            list(points)
        ));
    }

    /// Draws a filled polygon with these corners.
    pub(super) fn area(&mut self, corners: &[(f64, f64)], paint: Paint) {
        self.push(format_args!(
            "<polygon opacity=\"{}\" fill=\"{}\" points=\"{}\"/>",
            paint.opacity,
            hex(paint.colour),
            list(corners)
        ));
    }

    /// Draws a dot.
    pub(super) fn dot(&mut self, (x, y): (f64, f64), radius: f64, paint: Paint) {
        self.push(format_args!(
            "<circle cx=\"{}\" cy=\"{}\" r=\"{radius}\" opacity=\"{}\" fill=\"{}\" stroke=\"none\" stroke-width=\"1\"/>",
            number(x),
            number(y),
            paint.opacity,
            hex(paint.colour)
        ));
    }

    /// Writes a line of text, vertically centred at the given position.
    pub(super) fn text(&mut self, text: &str, (x, y): (f64, f64), style: Style) {
        let (x, y) = (number(x), number(y));
        let anchor = match style.anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let bold = if style.bold { " font-weight=\"bold\"" } else { "" };
        let edge = if style.edged {
            format!(
                " paint-order=\"stroke\" stroke=\"{}\" stroke-width=\"5\" stroke-linejoin=\"round\"",
                hex(PAPER)
            )
        } else {
            String::new()
        };
        let turn = if style.turned { format!(" transform=\"rotate(270, {x}, {y})\"") } else { String::new() };
        self.push(format_args!(
            "<text x=\"{x}\" y=\"{y}\" dy=\"0.5ex\" text-anchor=\"{anchor}\" font-family=\"{FONT}\" \
             font-size=\"{}\" opacity=\"1\" fill=\"{}\"{bold}{edge}{turn}>\n{}\n</text>",
            style.size,
            hex(style.colour),
            escaped(text)
        ));
    }

    fn push(&mut self, element: std::fmt::Arguments<'_>) {
        writeln!(self.out, "{element}").expect("a string takes everything");
    }
}

fn list(points: &[(f64, f64)]) -> String {
    points.iter().map(|&(x, y)| format!("{},{} ", number(x), number(y))).collect()
}

/// Rounds a coordinate to tenths of a pixel. Adding zero turns -0 into 0.
fn number(value: f64) -> f64 {
    assert!(value.is_finite(), "a coordinate is a number");
    (value * 10.0).round() / 10.0 + 0.0
}

fn hex(Colour(red, green, blue): Colour) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}
