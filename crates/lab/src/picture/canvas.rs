//! An SVG document, written element by element.
//!
//! Coordinates are pixels from the upper left corner, rounded to a tenth; a coordinate that is not finite is a bug of
//! the caller's and asserted. Words are escaped here and nowhere else. Nothing has an `id`, so that several pictures
//! can stand in one HTML page, and nothing refers to anything outside.
//!
//! It is written by hand because the little that pictures need (dashes, tenths of a pixel, words for those who cannot
//! see the picture, characters XML forbids) is what drawing libraries' SVG backends leave out.

use std::fmt::Write;

use super::palette::{Colour, PAPER};
use crate::markup::escaped;

const FONT: &str = "Helvetica, Arial, DejaVu Sans, sans-serif";

/// A colour and how much of what is below it hides, 0 to 1.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paint {
    colour: Colour,
    opacity: f64,
}

impl Colour {
    /// The colour as thin paint.
    pub(super) fn mix(self, opacity: f64) -> Paint {
        Paint { colour: self, opacity }
    }

    /// A line of this colour.
    pub(super) fn stroke(self, width: f64) -> Stroke {
        Paint::from(self).stroke(width)
    }
}

impl Paint {
    /// A line of this paint.
    pub(super) fn stroke(self, width: f64) -> Stroke {
        Stroke { paint: self, width, dash: None, rounded: false }
    }
}

impl From<Colour> for Paint {
    fn from(colour: Colour) -> Paint {
        colour.mix(1.0)
    }
}

/// How a line is drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stroke {
    paint: Paint,
    width: f64,
    dash: Option<&'static str>,
    rounded: bool,
}

impl Stroke {
    /// The line with this dash pattern, `None` for a solid one.
    pub(super) fn dashed(self, dash: Option<&'static str>) -> Stroke {
        Stroke { dash, ..self }
    }

    /// The line with round corners: where it turns sharply, a pointed one would stick out.
    pub(super) fn rounded(self) -> Stroke {
        Stroke { rounded: true, ..self }
    }
}

/// Which point of a text is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// How a text looks.
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
    /// Plain text of this height in pixels.
    pub(super) fn new(size: f64, colour: Colour, anchor: Anchor) -> Style {
        Style { size, colour, anchor, bold: false, turned: false, edged: false }
    }

    /// The same in bold.
    pub(super) fn bold(self) -> Style {
        Style { bold: true, ..self }
    }

    /// The same, read from below.
    pub(super) fn turned(self) -> Style {
        Style { turned: true, ..self }
    }

    /// The same with an edge of paper, to be read over lines.
    pub(super) fn edged(self) -> Style {
        Style { edged: true, ..self }
    }
}

/// The document so far.
#[derive(Debug)]
pub(super) struct Canvas {
    out: String,
}

impl Canvas {
    /// An empty picture of this size, for a file of its own.
    pub(super) fn new(width: i32, height: i32) -> Canvas {
        Canvas::start(width, height, "")
    }

    /// An empty picture that a page can take in: `name` is read out in its place, `description` after it.
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

    /// The finished document.
    pub(super) fn finish(mut self) -> String {
        self.out.push_str("</svg>\n");
        self.out
    }

    /// A filled rectangle between two corners.
    pub(super) fn rect(&mut self, from: (f64, f64), to: (f64, f64), paint: Paint) {
        let (x, y, width, height) =
            (number(from.0), number(from.1), number(to.0 - from.0), number(to.1 - from.1));
        self.push(format_args!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" opacity=\"{}\" fill=\"{}\" stroke=\"none\"/>",
            paint.opacity,
            hex(paint.colour)
        ));
    }

    /// A line through these points.
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

    /// A filled area with these corners.
    pub(super) fn area(&mut self, corners: &[(f64, f64)], paint: Paint) {
        self.push(format_args!(
            "<polygon opacity=\"{}\" fill=\"{}\" points=\"{}\"/>",
            paint.opacity,
            hex(paint.colour),
            list(corners)
        ));
    }

    /// A dot.
    pub(super) fn dot(&mut self, (x, y): (f64, f64), radius: f64, paint: Paint) {
        self.push(format_args!(
            "<circle cx=\"{}\" cy=\"{}\" r=\"{radius}\" opacity=\"{}\" fill=\"{}\" stroke=\"none\" stroke-width=\"1\"/>",
            number(x),
            number(y),
            paint.opacity,
            hex(paint.colour)
        ));
    }

    /// A line of text, its middle at the height given.
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

/// The coordinate in tenths of a pixel; adding zero turns -0 into 0.
fn number(value: f64) -> f64 {
    assert!(value.is_finite(), "a coordinate is a number");
    (value * 10.0).round() / 10.0 + 0.0
}

fn hex(Colour(red, green, blue): Colour) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}
