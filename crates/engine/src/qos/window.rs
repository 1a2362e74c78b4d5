//! Limits the number of I/Os in flight in a datastore or flash device.
//!
//! A resource (a datastore or flash device) whose latency is low gets all I/O at once. When its
//! latency exceeds a threshold, the resource is throttled, as in Storage I/O Control: a window
//! bounds the I/Os in flight. I/O beyond the window waits in the [`Scheduler`](super::Scheduler),
//! where shares and reservations apply. The window follows PARDA's control law, which has two parts. One part
//! holds the latency at the threshold. The other part makes the windows of hosts that share the
//! resource without communication converge to the ratio of their weights. Throttling ends when no
//! I/O had to wait for some seconds and the latency is below the threshold.
//!
//! Hosts that communicate agree on the window size ([`super::agree`]). The window size then follows
//! the agreement instead of the measured latency, until no agreement has arrived for some time. A
//! window size need not be an integer. A window of 2.5 I/Os permits two I/Os half of the time and
//! three I/Os the other half.

use super::Report;
use super::knee::Knee;
use crate::units::Instant;

/// Time between two adjustments of the window, nanoseconds, if enough I/Os completed.
const EPOCH_NS: u64 = 250_000_000;

/// Minimum number of completed I/Os for an adjustment of the window. `EPOCH_NS_MAX` is the maximum
/// time to wait for this number, nanoseconds.
const SEEN_MIN: u64 = 16;
const EPOCH_NS_MAX: u64 = 1_000_000_000;

/// Throttling ends when for this time no I/O had to wait and the latency was not above the
/// threshold, nanoseconds.
const CALM_NS: u64 = 4_000_000_000;

/// Minimum and maximum size of a window, I/Os.
const SIZE_MIN: u64 = 2;
const SIZE_MAX: u64 = 4096;

/// Number of parts into which one I/O is divided, because a window's size need not be a whole
/// number.
const PART: u64 = 1024;

/// Number that each I/O adds to `phase`: `PART` divided by the golden ratio. Phases that differ by
/// this step are evenly distributed, so that the window alternates between two whole sizes in the
/// right ratio.
const DITHER: u64 = 633;

/// Minimum time between two [`Report`]s of this host, seconds.
const REPORT_SECONDS_MIN: f64 = 0.01;

/// Time for which an agreed size is valid, nanoseconds.
const SETTLED_NS: u64 = 5_000_000_000;

/// Method that limits the I/Os in flight in a datastore or flash device (a *resource*).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Control {
    /// The number of I/Os in flight is not limited. Limits of disks apply, but reservations and
    /// shares do not.
    #[default]
    Off,
    /// A fixed number of I/Os in flight, for a resource whose best queue depth is known.
    Depth(u32),
    /// A window that follows the latency.
    Latency {
        /// Threshold of throttling.
        late: Late,
        /// Weight of this host among the hosts that share the resource, thousandths. The weight is
        /// 1000 if no other host uses the resource. While the latency equals the threshold, each
        /// adjustment enlarges the window by half of the weight, in thousandths of an I/O.
        weight_milli: u32,
    },
}

/// Threshold of a resource's latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Late {
    /// A fixed threshold, nanoseconds.
    Above(u64),
    /// The latency at the knee of the resource's throughput. Until the knee is known, the threshold
    /// is this number of nanoseconds.
    PastKnee(u64),
}

/// The window of a resource (maximum I/Os in flight) and its use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowState {
    /// Number of I/Os in flight in the resource.
    pub in_flight: u32,
    /// Size of the window, I/Os; `None` while the resource is not throttled.
    pub size: Option<u32>,
    /// Smoothed mean latency, nanoseconds; 0 before the first measurement.
    pub latency_ns: u64,
    /// Highest measured throughput, units per second.
    pub peak: u32,
    /// Latency at the knee, nanoseconds, if the knee is used and known.
    pub knee_ns: Option<u64>,
}

/// How a resource was used in a period: the start of the period, the completed I/Os, and whether
/// I/O had to wait.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    began: Instant,
    ended: u64,
    units: u64,
    sum_ns: u64,
    waited: bool,
}

impl Use {
    /// Creates the use of a period that starts at `began`, without I/Os.
    fn from(began: Instant) -> Use {
        Use { began, ..Use::default() }
    }

    fn note(&mut self, units: u32, latency_ns: u64, waits: bool) {
        self.ended += 1;
        self.units += u64::from(units);
        self.sum_ns = self.sum_ns.saturating_add(latency_ns);
        self.waited |= waits;
    }
}

/// The window of one datastore or flash device.
#[derive(Debug, Default)]
pub struct Window {
    control: Control,
    in_flight: u32,
    /// Size of a throttled resource's window, in [`PART`]s of an I/O.
    size: Option<u64>,
    latency_ns: u64,
    /// Completed I/Os since the last adjustment of the window.
    epoch: Use,
    /// Highest rate of a measuring interval, units per second.
    peak: u32,
    knee: Knee,
    /// Time until which `size` is the window size on which the hosts agreed. `None` if no agreement is
    /// valid.
    settled: Option<Instant>,
    /// Phase of the alternation between two whole sizes.
    phase: u64,
    /// Completed I/Os since the last [`Report`].
    since: Use,
    /// Time at which I/O last had to wait, or the latency was above the threshold.
    needed: Instant,
}

impl Window {
    /// Changes the method of control. I/Os in flight are not affected.
    pub fn set(&mut self, now: Instant, control: Control) {
        assert!(control != Control::Depth(0), "a queue depth of 0");
        if control != self.control {
            let in_flight = self.in_flight;
            let (epoch, since) = (Use::from(now), Use::from(now));
            *self = Window { control, in_flight, needed: now, epoch, since, ..Window::default() };
        }
    }

    /// Returns true if another I/O may start.
    pub fn has_room(&self) -> bool {
        let size = match self.control {
            Control::Off => None,
            Control::Depth(depth) => Some(depth),
            Control::Latency { .. } => self.size.map(|size| ((size + self.phase) / PART) as u32),
        };
        size.is_none_or(|size| self.in_flight < size)
    }

    /// Returns true if the I/Os in flight must be counted, because the control may limit them.
    pub fn is_on(&self) -> bool {
        self.control != Control::Off
    }

    /// Records the start of an I/O.
    pub fn began(&mut self) {
        self.in_flight += 1;
        if self.settled.is_some() {
            self.phase = (self.phase + DITHER) % PART;
        }
    }

    /// Records the end of an I/O of `units` units after `latency_ns`. `waits` is true if other I/Os
    /// wait for room.
    pub fn ended(&mut self, now: Instant, units: u32, latency_ns: u64, waits: bool) {
        self.in_flight -= 1;
        let Control::Latency { late, weight_milli } = self.control else { return };
        for of in [&mut self.epoch, &mut self.since] {
            of.note(units, latency_ns, waits);
        }
        let age = now - self.epoch.began;
        if age >= EPOCH_NS && (self.epoch.ended >= SEEN_MIN || age >= EPOCH_NS_MAX) {
            self.adjust(now, age, late, weight_milli);
        }
    }

    /// Removes an I/O from the window without a measurement, because another disk serves it.
    pub fn left(&mut self) {
        self.in_flight -= 1;
    }

    /// Sets the window's size to `size` I/Os, on which the hosts agreed. Has no effect unless the
    /// control is [`Control::Latency`].
    pub fn settle(&mut self, now: Instant, size: f64) {
        if matches!(self.control, Control::Latency { .. }) {
            // An agreement never reduces the window below one I/O.
            let parts = ((size * PART as f64) as u64).clamp(PART, SIZE_MAX * PART);
            self.settled = Some(now + SETTLED_NS);
            self.size = Some(parts);
        }
    }

    /// Returns the report about the use since the last report. The function `wanted_shares`
    /// receives the length of that time in seconds and returns the demand. Returns `None` if less
    /// than [`REPORT_SECONDS_MIN`] has passed since the last report.
    pub fn take_report(&mut self, now: Instant, wanted_shares: impl FnOnce(f64) -> f64) -> Option<Report> {
        let seconds = (now - self.since.began) as f64 / 1e9;
        if seconds < REPORT_SECONDS_MIN {
            return None;
        }
        let Use { ended, units, sum_ns, waited, .. } = self.since;
        self.since = Use::from(now);
        Some(Report {
            wanted_shares: wanted_shares(seconds),
            rate: units as f64 / seconds,
            in_flight: sum_ns as f64 / 1e9 / seconds,
            latency_ns: sum_ns as f64 / ended.max(1) as f64,
            waits: waited && self.size.is_some(),
        })
    }

    /// Returns the window's size and use, for display.
    pub fn state(&self) -> WindowState {
        let size = match self.control {
            Control::Depth(depth) => Some(depth),
            _ => self.size.map(|size| (size / PART) as u32),
        };
        let knee_ns = match self.control {
            Control::Latency { late: Late::PastKnee(_), .. } => self.knee.latency_ns(),
            _ => None,
        };
        let Window { in_flight, latency_ns, peak, .. } = *self;
        WindowState { in_flight, size, latency_ns, peak, knee_ns }
    }

    fn adjust(&mut self, now: Instant, age: u64, late: Late, weight_milli: u32) {
        let mean_ns = self.epoch.sum_ns / self.epoch.ended;
        self.latency_ns = if self.latency_ns == 0 { mean_ns } else { (self.latency_ns + mean_ns) / 2 };
        let rate = u128::from(self.epoch.units) * 1_000_000_000 / u128::from(age);
        let rate = u32::try_from(rate).unwrap_or(u32::MAX);
        self.peak = self.peak.max(rate);
        let threshold_ns = match late {
            Late::Above(threshold_ns) => threshold_ns,
            Late::PastKnee(at_first_ns) => {
                self.knee.note(now, rate, mean_ns);
                self.knee.latency_ns().unwrap_or(at_first_ns)
            }
        };
        let is_late = self.latency_ns > threshold_ns;
        if is_late || self.epoch.waited {
            self.needed = now;
        }
        // The window size that fits the threshold if latency were proportional to the size.
        let fitting = |size: u64| {
            let fitting = u128::from(size) * u128::from(threshold_ns) / u128::from(self.latency_ns.max(1));
            fitting.min(u128::from(SIZE_MAX * PART)) as u64
        };
        let clamp = |size: u64| size.clamp(SIZE_MIN * PART, SIZE_MAX * PART);
        if self.settled.is_some_and(|until| until <= now) {
            (self.settled, self.phase) = (None, 0);
        }
        self.size = match self.size {
            Some(_) if now - self.needed >= CALM_NS => None,
            Some(size) if self.settled.is_some() => Some(size),
            // By Little's law, this was the number of I/Os in flight in the resource.
            None if is_late => {
                let in_it = u128::from(self.epoch.sum_ns) * u128::from(PART) / u128::from(age);
                Some(clamp(fitting(in_it.min(u128::from(SIZE_MAX * PART)) as u64)))
            }
            None => None,
            // The window was not full, so the latency did not depend on its size.
            Some(size) if !is_late && !self.epoch.waited => Some(size),
            Some(size) => {
                let weight = u64::from(weight_milli) * PART / 1000;
                Some(clamp((size + fitting(size) + weight) / 2))
            }
        };
        self.epoch = Use::from(now);
    }
}
