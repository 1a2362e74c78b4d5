//! Axes of latency charts: the position of times and latencies, the labelled values, and the text
//! of labels.

/// A linear time axis from zero, nanoseconds.
pub(super) struct TimeAxis {
    total_ns: u64,
    left: i32,
    right: i32,
}

impl TimeAxis {
    pub(super) fn new(total_ns: u64, left: i32, right: i32) -> Self {
        TimeAxis { total_ns: total_ns.max(1), left, right }
    }

    pub(super) fn x(&self, at_ns: u64) -> i32 {
        let share = at_ns.min(self.total_ns) as f64 / self.total_ns as f64;
        self.left + (share * f64::from(self.right - self.left)).round() as i32
    }

    /// Returns the unit of the labels in words.
    pub(super) fn unit(&self) -> &'static str {
        self.unit_and_ns().0
    }

    fn unit_and_ns(&self) -> (&'static str, u64) {
        match self.total_ns {
            0..2_000_000 => ("microseconds", 1_000),
            2_000_000..2_000_000_000 => ("milliseconds", 1_000_000),
            _ => ("seconds", 1_000_000_000),
        }
    }

    /// Returns at most eleven round times with their labels.
    pub(super) fn ticks(&self) -> Vec<(u64, String)> {
        let (_, unit_ns) = self.unit_and_ns();
        let steps = (0..).flat_map(|power| [1, 2, 5].map(|digit| digit * 10u64.pow(power) * unit_ns));
        let step = steps.into_iter().find(|step| self.total_ns / step <= 10).unwrap_or(self.total_ns);
        let at = (0..=self.total_ns / step).map(|i| i * step);
        at.map(|at_ns| (at_ns, (at_ns / unit_ns).to_string())).collect()
    }
}

/// A logarithmic latency axis over whole decades.
pub(super) struct LatencyAxis {
    first: u32,
    last: u32,
    bottom: i32,
    top: i32,
}

impl LatencyAxis {
    /// Creates the axis with all decades from `least_ns` to `most_ns`, at least two.
    pub(super) fn new(least_ns: u64, most_ns: u64, bottom: i32, top: i32) -> Self {
        let first = least_ns.max(1).ilog10();
        let last = (most_ns.max(2) - 1).ilog10() + 1;
        LatencyAxis { first, last: last.max(first + 2), bottom, top }
    }

    pub(super) fn y(&self, latency_ns: u64) -> i32 {
        let decades = (latency_ns.max(1) as f64).log10() - f64::from(self.first);
        let share = decades / f64::from(self.last - self.first);
        self.bottom - (share.clamp(0.0, 1.0) * f64::from(self.bottom - self.top)).round() as i32
    }

    /// Returns the powers of ten on the axis, including both ends.
    pub(super) fn decades(&self) -> impl Iterator<Item = u64> + use<> {
        (self.first..=self.last).map(|power| 10u64.saturating_pow(power))
    }

    /// Returns the latency at the upper end of the axis, nanoseconds.
    pub(super) fn end_ns(&self) -> u64 {
        10u64.saturating_pow(self.last)
    }
}

/// Formats a latency with up to three digits in ns, µs, ms or s.
pub(super) fn latency_text(ns: u64) -> String {
    let (value, unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..999_500 => (ns as f64 / 1e3, "µs"),
        999_500..999_500_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    let whole = (value - value.round()).abs() < 0.005;
    match value {
        _ if whole || value >= 99.95 => format!("{value:.0} {unit}"),
        _ if value >= 9.995 => format!("{value:.1} {unit}"),
        _ => format!("{value:.2} {unit}"),
    }
}

/// Formats a count with thousands separators.
pub(super) fn count_text(count: f64) -> String {
    let digits = format!("{count:.0}");
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            text.push('\u{2009}');
        }
        text.push(digit);
    }
    text
}
