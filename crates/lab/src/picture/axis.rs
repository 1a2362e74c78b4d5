//! Numeric axes of charts: the range of an axis, the position of a value, and the labelled values.
//!
//! Labels are at round values: 1, 2 and 5 times powers of ten, powers of two for bytes, and
//! minutes, quarters of a day and days for long times. The range of an axis is never empty: a
//! single value gets space around it.

use super::unit::{Unit, time_unit};

/// Maximum absolute value that is drawn. The lab measures no values near this limit.
const VALUE_MAX: f64 = 1e24;
/// Values nearer to zero than this limit count as zero.
const VALUE_MIN: f64 = 1e-24;

/// One axis of a chart.
#[derive(Clone, Debug)]
pub struct Axis {
    pub(super) name: String,
    pub(super) unit: Unit,
    pub(super) scale: Scale,
    fitted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    Linear,
    Log,
}

impl Axis {
    /// Creates a linear axis that includes zero.
    pub fn new(name: impl Into<String>, unit: Unit) -> Axis {
        Axis { name: name.into(), unit, scale: Scale::Linear, fitted: false }
    }

    /// Returns the axis with a logarithmic scale. Values of zero and less have no position and are
    /// left out.
    pub fn log(self) -> Axis {
        Axis { scale: Scale::Log, ..self }
    }

    /// Returns the linear axis without zero, so that small differences between large values are
    /// visible.
    pub fn fitted(self) -> Axis {
        Axis { fitted: true, ..self }
    }

    /// Returns the value as it is drawn, or `None` if the value has no position on the axis.
    pub(super) fn clean(&self, value: f64) -> Option<f64> {
        let value = if value.abs() < VALUE_MIN { 0.0 } else { value };
        let placed = value.abs() <= VALUE_MAX && (self.scale == Scale::Linear || value > 0.0);
        placed.then_some(value)
    }
}

/// Rule for the values at which an axis begins and ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    /// The axis ends at the lowest and highest data value.
    Exact,
    /// The axis ends at the next label.
    Round,
}

/// A labelled position on an axis.
#[derive(Clone, Debug)]
pub(super) struct Tick {
    pub(super) at: f64,
    pub(super) label: String,
}

/// Position of a value on an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Place {
    Before,
    At(f64),
    After,
}

/// An axis scaled to pixels.
#[derive(Clone, Debug)]
pub(super) struct AxisScale {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    ticks: Vec<Tick>,
    minor: Vec<f64>,
}

impl AxisScale {
    /// Creates the axis for these values between two pixels, with at most `labels_max` labels.
    pub(super) fn new(
        axis: &Axis,
        values: impl Iterator<Item = f64>,
        (from, to): (f64, f64),
        labels_max: usize,
        ends: Ends,
    ) -> AxisScale {
        let clean = values.filter_map(|value| axis.clean(value));
        let span = clean.fold(None, |span: Option<(f64, f64)>, value| {
            Some(span.map_or((value, value), |(low, high)| (low.min(value), high.max(value))))
        });
        let Some((low, high)) = span else {
            return AxisScale::bare(Scale::Linear, (0.0, 1.0), (from, to));
        };
        match axis.scale {
            Scale::Linear => AxisScale::linear(axis, (low, high), (from, to), labels_max, ends),
            Scale::Log => AxisScale::log(axis.unit, (low, high), (from, to), labels_max, ends),
        }
    }

    fn linear(axis: &Axis, span: (f64, f64), pixels: (f64, f64), labels_max: usize, ends: Ends) -> AxisScale {
        let (mut low, mut high) = if axis.fitted { span } else { (span.0.min(0.0), span.1.max(0.0)) };
        let size = low.abs().max(high.abs());
        if high - low <= size * 1e-9 {
            let room = if size == 0.0 { 1.0 } else { size * 0.1 };
            (low, high) =
                if axis.fitted && size > 0.0 { (low - room, high + room) } else { (low, low + room) };
        }
        let step = step(axis.unit, high - low, low.abs().max(high.abs()), labels_max);
        if ends == Ends::Round {
            low = (low / step + 1e-9).floor() * step;
            high = (high / step - 1e-9).ceil() * step;
        }
        let most = low.abs().max(high.abs());
        let (first, last) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
        let values = (0..=(last - first).max(0.0) as usize).map(|i| (first + i as f64) * step);
        let mut ruler = AxisScale::bare(Scale::Linear, (low, high), pixels);
        ruler.ticks = values
            .map(|value| Tick { at: ruler.pixel(value), label: axis.unit.label(value, step, most) })
            .collect();
        ruler
    }

    fn log(unit: Unit, span: (f64, f64), pixels: (f64, f64), labels_max: usize, ends: Ends) -> AxisScale {
        let (mut low, mut high) = span;
        if high < low * 4.0 {
            (low, high) = (low / 2.0, high * 2.0);
        }
        let binary = matches!(unit, Unit::Bytes | Unit::BytesPerSecond);
        if ends == Ends::Round {
            let stones = if binary {
                powers_of_two(low / 2.0, high * 2.0, 1)
            } else {
                tens(low / 10.0, high * 10.0, &[1, 2, 5], 1)
            };
            low = stones.iter().copied().rfind(|&stone| stone <= low * 1.000_001).unwrap_or(low);
            high = stones.iter().copied().find(|&stone| stone >= high * 0.999_999).unwrap_or(high);
        }
        let choices: Vec<Vec<f64>> = if binary {
            [1, 2, 5, 10, 20, 40].map(|step| powers_of_two(low, high, step)).into()
        } else {
            let digits: [&[u32]; 4] = [&[1, 2, 3, 4, 5, 6, 7, 8, 9], &[1, 2, 3, 5], &[1, 2, 5], &[1]];
            let within = digits.map(|digits| tens(low, high, digits, 1));
            within.into_iter().chain([2, 3, 5, 10, 20].map(|step| tens(low, high, &[1], step))).collect()
        };
        let fine = if binary || choices[3].len() <= labels_max { &choices[0] } else { &choices[3] };
        let chosen = choices.iter().find(|choice| choice.len() <= labels_max).cloned().unwrap_or_default();
        let mut ruler = AxisScale::bare(Scale::Log, (low, high), pixels);
        ruler.minor = fine.iter().map(|&value| ruler.pixel(value)).collect();
        ruler.ticks = chosen
            .iter()
            .map(|&value| Tick { at: ruler.pixel(value), label: power_label(unit, value) })
            .collect();
        ruler
    }

    fn bare(scale: Scale, (low, high): (f64, f64), (from, to): (f64, f64)) -> AxisScale {
        AxisScale { scale, low, high, from, to, ticks: Vec::new(), minor: Vec::new() }
    }

    /// Returns the labelled positions in order.
    pub(super) fn ticks(&self) -> &[Tick] {
        &self.ticks
    }

    /// Returns the positions of the small ticks of a logarithmic scale.
    pub(super) fn minor(&self) -> &[f64] {
        &self.minor
    }

    /// Returns the pixel of zero, or of the lower end if the axis has no zero.
    pub(super) fn base(&self) -> f64 {
        if self.scale == Scale::Linear && self.low < 0.0 && self.high > 0.0 {
            self.pixel(0.0)
        } else if self.scale == Scale::Linear && self.high <= 0.0 {
            self.to
        } else {
            self.from
        }
    }

    /// Returns the pixel of a value, limited to the ends of the axis.
    pub(super) fn pixel(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    /// Returns the position of a value that may be outside the axis.
    pub(super) fn place(&self, value: f64) -> Place {
        let tolerance = (self.high - self.low) * 1e-6;
        match value {
            _ if value < self.low - tolerance => Place::Before,
            _ if value > self.high + tolerance => Place::After,
            _ => Place::At(self.pixel(value)),
        }
    }
}

/// Returns the smallest round step that needs at most `labels_max` labels for this range.
fn step(unit: Unit, span: f64, most: f64, labels_max: usize) -> f64 {
    let least = span / labels_max.max(2) as f64;
    let enough = |step: &f64| *step >= least * (1.0 - 1e-9);
    if matches!(unit, Unit::Bytes | Unit::BytesPerSecond) && least > 0.5 {
        return 2f64.powi(least.log2().ceil() as i32);
    }
    let part = if unit == Unit::Seconds { time_unit(most).0 } else { 1.0 };
    let clock: &[f64] = match part {
        3600.0 => &[0.5, 1.0, 2.0, 3.0, 6.0, 12.0, 24.0],
        60.0 => &[1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0],
        1.0 if unit == Unit::Seconds => &[0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0],
        _ => &[],
    };
    if let Some(step) = clock.iter().map(|step| step * part).find(|step| enough(step) && step / 10.0 <= least)
    {
        return step;
    }
    let ten = 10f64.powf((least / part).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|digit| digit * ten * part)
        .into_iter()
        .find(enough)
        .unwrap_or(ten * part * 10.0)
}

/// Returns the powers of two from `low` to `high` whose exponent is a multiple of `step`.
fn powers_of_two(low: f64, high: f64, step: i32) -> Vec<f64> {
    let step = f64::from(step);
    let (first, last) = ((low.log2() / step - 1e-9).ceil(), (high.log2() / step + 1e-9).floor());
    (first as i32..=last as i32).map(|i| 2f64.powf(f64::from(i) * step)).collect()
}

/// Returns the one-digit multiples of powers of ten from `low` to `high`, in every `step`-th
/// decade.
fn tens(low: f64, high: f64, digits: &[u32], step: i32) -> Vec<f64> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let decades = (first..=last).filter(|power| power.rem_euclid(step) == 0);
    let numbers =
        decades.flat_map(|power| digits.iter().map(move |&digit| f64::from(digit) * 10f64.powi(power)));
    numbers.filter(|&n| n >= low * (1.0 - 1e-9) && n <= high * (1.0 + 1e-9)).collect()
}

/// Returns the label of a power of ten. Long times are in seconds, because 10ⁿ seconds are not a
/// round number of minutes.
fn power_label(unit: Unit, value: f64) -> String {
    match unit {
        Unit::Seconds if value >= 1000.0 => format!("{} s", Unit::Count.text(value)),
        _ => unit.text(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis, low: f64, high: f64, ends: Ends) -> String {
        let ruler = AxisScale::new(axis, [low, high].into_iter(), (0.0, 1000.0), 9, ends);
        let ticks = ruler.ticks();
        assert!(ticks.len() <= 10 && ticks.windows(2).all(|pair| pair[0].at < pair[1].at), "{ticks:?}");
        assert!(ticks.iter().all(|tick| (0.0..=1000.0).contains(&tick.at)), "{ticks:?}");
        ticks.iter().map(|tick| tick.label.as_str()).collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn labels_stand_at_values_people_count_in() {
        const MIB: f64 = 1048576.0;
        let axis = |unit| Axis::new("", unit);
        let table = [
            (axis(Unit::Count), 0.0, 17.0, "0, 2, 4, 6, 8, 10, 12, 14, 16"),
            (axis(Unit::Count), 0.0, 2_300_000.0, "0, 0.5 M, 1 M, 1.5 M, 2 M"),
            (axis(Unit::Count), -3.0, 8.0, "−2, 0, 2, 4, 6, 8"),
            (
                axis(Unit::Count).fitted(),
                1003.0,
                1005.0,
                "1\u{2009}003, 1\u{2009}003.5, 1\u{2009}004, 1\u{2009}004.5, 1\u{2009}005",
            ),
            (axis(Unit::Percent), 0.03, 1.0, "0 %, 20 %, 40 %, 60 %, 80 %, 100 %"),
            (axis(Unit::Percent), 0.0, 0.03, "0 %, 0.5 %, 1 %, 1.5 %, 2 %, 2.5 %, 3 %"),
            (axis(Unit::Bytes), 0.0, 3.2 * MIB, "0, 512 KiB, 1 MiB, 1.5 MiB, 2 MiB, 2.5 MiB, 3 MiB"),
            (axis(Unit::Seconds), 0.0, 604_800.0, "0, 1 d, 2 d, 3 d, 4 d, 5 d, 6 d, 7 d"),
            (axis(Unit::Seconds), 0.0, 86_400.0, "0, 3 h, 6 h, 9 h, 12 h, 15 h, 18 h, 21 h, 24 h"),
            (axis(Unit::Seconds), 0.0, 3000.0, "0, 10 min, 20 min, 30 min, 40 min, 50 min"),
            (axis(Unit::Seconds), 0.0, 0.004, "0, 0.5 ms, 1 ms, 1.5 ms, 2 ms, 2.5 ms, 3 ms, 3.5 ms, 4 ms"),
            (
                axis(Unit::Bytes).log(),
                MIB,
                4096.0 * MIB,
                "1 MiB, 4 MiB, 16 MiB, 64 MiB, 256 MiB, 1 GiB, 4 GiB",
            ),
            (axis(Unit::Bytes).log(), 4096.0, 65_536.0, "4 KiB, 8 KiB, 16 KiB, 32 KiB, 64 KiB"),
            (axis(Unit::Seconds).log(), 1e-5, 1e-1, "10 µs, 100 µs, 1 ms, 10 ms, 100 ms"),
            (axis(Unit::Count).log(), 3.0, 300.0, "3, 5, 10, 20, 30, 50, 100, 200, 300"),
            (axis(Unit::Count).log(), 1.0, 1e20, "1, 1\u{2009}000, 1 M, 1 G, 1 T, 1 P, 1\u{2009}000 P"),
        ];
        for (axis, low, high, expected) in table {
            assert_eq!(labels(&axis, low, high, Ends::Exact), expected, "{axis:?}");
        }
        assert_eq!(
            labels(&Axis::new("", Unit::Count), 0.0, 17.0, Ends::Round).rsplit(", ").next(),
            Some("18")
        );
        assert_eq!(
            labels(&Axis::new("", Unit::Count).log(), 3.0, 300.0, Ends::Round),
            "2, 5, 10, 20, 50, 100, 200, 500"
        );
    }

    #[test]
    fn every_span_gets_an_axis() {
        let odd = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            1e-30,
            1e-24,
            1e24,
            -1e24,
            1e300,
            f64::MIN_POSITIVE,
            f64::INFINITY,
            f64::NAN,
            1e15 + 1.0,
            1e15,
        ];
        let units =
            [Unit::Count, Unit::Percent, Unit::Times, Unit::Bytes, Unit::BytesPerSecond, Unit::Seconds];
        for unit in units {
            for axis in [Axis::new("", unit), Axis::new("", unit).fitted(), Axis::new("", unit).log()] {
                for low in odd {
                    for high in odd {
                        for ends in [Ends::Exact, Ends::Round] {
                            labels(&axis, low, high, ends);
                            let ruler = AxisScale::new(&axis, [low, high].into_iter(), (10.0, 20.0), 6, ends);
                            let inside = |pixel: f64| (10.0..=20.0).contains(&pixel);
                            assert!(inside(ruler.base()));
                            let clean = [low, high].map(|value| axis.clean(value));
                            assert!(
                                clean.into_iter().flatten().all(|value| inside(ruler.pixel(value))),
                                "{axis:?} {low} {high}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn values_outside_are_distinguished() {
        let ruler = AxisScale::new(
            &Axis::new("", Unit::Count).log(),
            [1.0, 100.0].into_iter(),
            (0.0, 100.0),
            9,
            Ends::Exact,
        );
        assert_eq!(ruler.place(10.0), Place::At(50.0));
        assert_eq!((ruler.place(0.5), ruler.place(101.0)), (Place::Before, Place::After));
    }
}
