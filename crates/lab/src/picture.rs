//! Pictures for people, as SVG text: latency over time, curves, bars.
//!
//! | picture | for |
//! |---|---|
//! | [`latency_over_time`] | every request of a run as a dot, phases side by side |
//! | [`curves`] | miss-ratio curves, sweeps, rates over time: lines, steps, areas; linear or logarithmic |
//! | [`bars`] | figures side by side, such as published and measured |
//!
//! All are 1200 pixels wide on white paper, so they read in a light and in a dark page, and scale with it. Whatever
//! the numbers are, a picture is drawn: values that are not finite, or beyond ±10²⁴, are gaps, and where nothing is
//! left the picture says "no data". Names are escaped and cut to their room; a picture's size does not grow with the
//! number of points.

mod axis;
mod bars;
mod canvas;
mod curves;
mod frame;
mod latency;
mod palette;
mod scale;
mod thin;
mod unit;
mod words;

pub use axis::Axis;
pub use bars::{Bar, BarChart, BarGroup, bars};
pub use curves::{Curve, CurveChart, Marker, curves};
pub use latency::{ChartText, Phase, latency_over_time};
pub use unit::Unit;

#[cfg(test)]
mod tests;
