//! How much may be in a resource at once.
//!
//! A resource that nobody else shares, and that is not late, takes all there is. When its latency passes a threshold it is
//! throttled, as Storage I/O Control does: from then on a window bounds the I/Os in it, what does not fit waits in the
//! [`Scheduler`](super::Scheduler), and there shares and reservations have their say. The window follows PARDA's law: of two
//! parts, one holds the latency at the threshold and the other, in proportion to the host's weight, makes hosts that share
//! the resource and do not know each other come to windows in the proportion of their weights. Throttling ends when for
//! some seconds nobody has had to wait and the latency is below the threshold.
//!
//! Hosts that know each other settle the size between them ([`super::agree`]); then the law rests, until they have not been heard of for
//! a while. A size need not be whole: of its I/Os the last comes and goes, so that in the mean there are as many as it says.

use super::Report;
use super::knee::Knee;
use crate::units::Instant;

/// Time between two adjustments, nanoseconds, if enough was seen.
const EPOCH_NS: u64 = 250_000_000;

/// What is enough, I/Os; and the longest time to wait for it, nanoseconds.
const SEEN_MIN: u64 = 16;
const EPOCH_NS_MAX: u64 = 1_000_000_000;

/// Throttling ends after so much time without need, nanoseconds.
const CALM_NS: u64 = 4_000_000_000;

/// The smallest and the largest window, I/Os.
const SIZE_MIN: u64 = 2;
const SIZE_MAX: u64 = 4096;

/// Parts of an I/O in which a window is counted.
const PART: u64 = 1024;

/// The golden section of a part: steps of that length come to lie evenly.
const DITHER: u64 = 633;

/// A report tells of no less than that.
const REPORT_SECONDS_MIN: f64 = 0.01;

/// How long what hosts settled holds, nanoseconds.
const SETTLED_NS: u64 = 5_000_000_000;

/// What bounds the I/Os in a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Control {
    /// Nothing: limits are kept; reservations and shares have no say.
    #[default]
    Off,
    /// A number of I/Os, for a resource whose right depth is known.
    Depth(u32),
    /// Its latency.
    Latency {
        /// When it is throttled.
        late: Late,
        /// The weight of this host among those that share the resource: how many I/Os its window grows in a step, thousandths.
        /// 1000 where nobody else uses it.
        weight_milli: u32,
    },
}

/// When a resource is late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Late {
    /// Above so many nanoseconds.
    Above(u64),
    /// Past the knee of its throughput. Until that is known, above so many nanoseconds.
    PastKnee(u64),
}

/// What a window has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowState {
    /// I/Os in the resource.
    pub in_flight: u32,
    /// I/Os that may be; none while it is not throttled.
    pub size: Option<u32>,
    /// Smoothed mean latency, nanoseconds; 0 before anything was seen.
    pub latency_ns: u64,
    /// The most units a second that it has done, as far as that was looked at.
    pub peak: u32,
    /// The latency at the knee of its throughput, nanoseconds, if that decides and is known.
    pub knee_ns: Option<u64>,
}

/// What became of a resource in some time: its begin, what ended in it, and whether anybody had to wait.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    began: Instant,
    ended: u64,
    units: u64,
    sum_ns: u64,
    waited: bool,
}

impl Use {
    /// Nothing yet.
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

/// See the module's text.
#[derive(Debug, Default)]
pub struct Window {
    control: Control,
    in_flight: u32,
    /// Of a throttled resource, [`PART`]s of an I/O.
    size: Option<u64>,
    latency_ns: u64,
    /// Since the last adjustment.
    epoch: Use,
    /// The most units a second that an epoch has seen.
    peak: u32,
    knee: Knee,
    /// Until when what was settled holds.
    settled: Option<Instant>,
    /// Where between two whole sizes the next I/O finds the window.
    phase: u64,
    /// Since the last report.
    since: Use,
    /// When somebody last had to wait, or the latency was above the threshold.
    needed: Instant,
}

impl Window {
    /// Takes another control. What is in flight stays so.
    pub fn set(&mut self, now: Instant, control: Control) {
        assert!(control != Control::Depth(0), "a window of nothing");
        if control != self.control {
            let in_flight = self.in_flight;
            let (epoch, since) = (Use::from(now), Use::from(now));
            *self = Window { control, in_flight, needed: now, epoch, since, ..Window::default() };
        }
    }

    /// May another I/O begin?
    pub fn has_room(&self) -> bool {
        let size = match self.control {
            Control::Off => None,
            Control::Depth(depth) => Some(depth),
            Control::Latency { .. } => self.size.map(|size| ((size + self.phase) / PART) as u32),
        };
        size.is_none_or(|size| self.in_flight < size)
    }

    /// Is there anything to be bounded? If not, I/Os need not be counted.
    pub fn is_on(&self) -> bool {
        self.control != Control::Off
    }

    /// An I/O has begun.
    pub fn began(&mut self) {
        self.in_flight += 1;
        if self.settled.is_some() {
            self.phase = (self.phase + DITHER) % PART;
        }
    }

    /// An I/O of so many units that had begun ended after `latency_ns`. `waits`: others wait for room.
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

    /// An I/O that had begun is elsewhere now, and says nothing of this.
    pub fn left(&mut self) {
        self.in_flight -= 1;
    }

    /// Takes the size that hosts have settled on, I/Os. Of no effect unless the latency bounds it.
    pub fn settle(&mut self, now: Instant, size: f64) {
        if matches!(self.control, Control::Latency { .. }) {
            // Nothing that others say brings it below one.
            let parts = ((size * PART as f64) as u64).clamp(PART, SIZE_MAX * PART);
            self.settled = Some(now + SETTLED_NS);
            self.size = Some(parts);
        }
    }

    /// What it was used for since the last report; `wanted_shares` says what is wanted of it, and is told how many seconds that was.
    /// None if hardly any time has passed.
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

    /// What it has come to.
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
        // What the window would be if latency were proportional to it.
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
            // By Little's law, so much was in the resource.
            None if is_late => {
                let in_it = u128::from(self.epoch.sum_ns) * u128::from(PART) / u128::from(age);
                Some(clamp(fitting(in_it.min(u128::from(SIZE_MAX * PART)) as u64)))
            }
            None => None,
            // Nobody fills it: the latency says nothing of its size.
            Some(size) if !is_late && !self.epoch.waited => Some(size),
            Some(size) => {
                let weight = u64::from(weight_milli) * PART / 1000;
                Some(clamp((size + fitting(size) + weight) / 2))
            }
        };
        self.epoch = Use::from(now);
    }
}
