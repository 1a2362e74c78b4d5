//! Draws charts as SVG text: latency over time, curves and bars.
//!
//! | picture | for |
//! |---|---|
//! | [`latency_over_time`] | every request of a run as a dot, phases side by side |
//! | [`curves`] | miss-ratio curves, sweeps, rates over time: lines, steps, areas |
//! | [`bars`] | values side by side, such as published and measured ones |
//!
//! All charts are 1200 pixels wide on a white background, so they are readable in light and dark
//! pages, and scale with the page. A chart is drawn for any numbers. Values that are not finite or
//! beyond ±10²⁴ are gaps, and a chart without values says "no data". Names are escaped and cut to
//! the available width. The size of a chart does not grow with the number of points.
//!
//! ```
//! use hob_lab::picture::{Axis, Bar, BarChart, BarGroup, Curve, CurveChart, Marker, Unit};
//! use hob_lab::picture::{bars, curves};
//!
//! const MIB: f64 = 1048576.0;
//! let sizes = Axis::new("cache size", Unit::Bytes).log();
//! let ratios = Axis::new("miss ratio", Unit::Percent);
//! let lru = vec![(4.0 * MIB, 0.9), (64.0 * MIB, 0.4), (1024.0 * MIB, 0.1)];
//! let misses = CurveChart::new("Miss ratio by cache size", sizes, ratios)
//!     .subtitle("web.csv, 4 KiB blocks")
//!     .curve(Curve::new("lru", lru).dots())
//!     .marker(Marker::X(64.0 * MIB, "knee 64 MiB".to_owned()));
//! assert!(curves(&misses).starts_with("<svg "));
//!
//! let times = Axis::new("time", Unit::Seconds);
//! let rate = CurveChart::new("Arrivals", times, Axis::new("requests/s", Unit::Count))
//!     .curve(Curve::new("reads", vec![(0.0, 120.0), (60.0, 80.0), (120.0, 80.0)]).steps().area());
//! assert!(curves(&rate).contains("<polygon"));
//! let shapes = BarChart::new("Published and measured", "speed-up", Unit::Times)
//!     .series("published")
//!     .series("measured")
//!     .group(BarGroup::new("DSS", [Bar::Span(1.6, 2.2), Bar::Value(1.9)]));
//! assert!(bars(&shapes).contains("1.6–2.2 ×"));
//! ```

mod axis;
mod bars;
mod canvas;
mod curves;
mod frame;
mod latency;
mod palette;
mod scale;
mod text_layout;
mod thin;
mod unit;

pub use axis::Axis;
pub use bars::{Bar, BarChart, BarGroup, bars};
pub use curves::{Curve, CurveChart, Marker, curves};
pub use latency::{ChartText, Phase, latency_over_time};
pub use unit::Unit;

#[cfg(test)]
mod tests;
