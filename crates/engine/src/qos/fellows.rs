//! How hosts that share a resource, and know each other, divide it: what a disk is due holds wherever it runs.
//!
//! A window that follows the latency alone (PARDA) comes to windows in the proportion of the hosts' weights, slowly, and knows nothing
//! of reservations, nor of disks that want little. dmClock (Gulati, Merchant, Varman, OSDI 2010) has servers tell each client what others
//! did for it; here it is the resource that is one, and those who send that are many, so they tell each other what they *want*, and
//! each takes its part.
//!
//! The word for it is the *level*: the units a second that a share brings where there is too little for all, the same for every disk of
//! the resource. A disk that is held up wants its shares at that level, or its reservation, whichever is more; one that is not held
//! up wants what it takes. What all disks of a host want together, divided by the level, are the host's *wanted shares*. Every so often each
//! host makes a [`Report`], and out of the latest of everybody's [`agree`] finds the next level, and how many I/Os may be in the
//! resource for each share. All come to the same without anybody in charge, and whose reports stay out is not waited for.

/// What one host says of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// What its disks want, in shares at the level of the last agreement.
    pub wanted_shares: f64,
    /// Units a second that it was served.
    pub rate: f64,
    /// I/Os that it had in the resource, in the mean.
    pub in_flight: f64,
    /// The mean latency that it saw, nanoseconds.
    pub latency_ns: f64,
    /// Did anybody there wait for room?
    pub waits: bool,
}

/// What follows from everybody's reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Agreement {
    /// Units a second for a share.
    pub level: f64,
    /// I/Os in the resource for a share.
    pub in_flight_per_share: f64,
}

/// How much more may be in the resource than there was, at most: what a latency of an idle moment promises is not believed.
const GROWTH_MAX: f64 = 1.25;

/// I/Os by which the resource is filled further than its latency asks for, so that it is never left with too little.
const PROBE: f64 = 1.0;

/// What a resource whose latency is to stay below `threshold_ns` has for everybody. None if nobody waits, or nobody was served: then
/// there is nothing to divide.
pub fn agree(reports: &[Report], threshold_ns: u64) -> Option<Agreement> {
    let sum = |of: fn(&Report) -> f64| reports.iter().map(of).sum::<f64>();
    let (shares, rate, in_flight) = (sum(|r| r.wanted_shares), sum(|r| r.rate), sum(|r| r.in_flight));
    let waits = reports.iter().any(|report| report.waits);
    let latency_ns = sum(|r| r.latency_ns * r.rate) / rate;
    let is_told = [shares, rate, in_flight, latency_ns].iter().all(|x| x.is_finite() && *x > 0.0);
    if !waits || !is_told {
        return None;
    }
    let fitting = in_flight * (threshold_ns as f64 / latency_ns).min(GROWTH_MAX);
    let next = (in_flight + fitting) / 2.0 + PROBE;
    Some(Agreement { level: rate / shares, in_flight_per_share: next / shares })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(wanted_shares: f64, rate: f64, in_flight: f64) -> Report {
        Report { wanted_shares, rate, in_flight, latency_ns: 10e6, waits: true }
    }

    #[test]
    fn a_share_is_worth_the_same_everywhere() {
        let agreement = agree(&[report(1000.0, 50.0, 5.0), report(3000.0, 150.0, 7.0)], 10_000_000).unwrap();
        assert_eq!(agreement.level, 0.05);
        assert_eq!(agreement.in_flight_per_share, 13.0 / 4000.0, "what is in it stays, and one more");
    }

    #[test]
    fn latency_decides_how_much_is_in_it() {
        let late = agree(&[report(1000.0, 50.0, 20.0)], 5_000_000).unwrap();
        assert_eq!(late.in_flight_per_share * 1000.0, 16.0, "half of the way to a half");
        let early = agree(&[report(1000.0, 50.0, 20.0)], 1_000_000_000).unwrap();
        assert_eq!(early.in_flight_per_share * 1000.0, 23.5, "not far at a time");
    }

    #[test]
    fn where_nobody_waits_nothing_is_divided() {
        let idle = Report { waits: false, ..report(1000.0, 50.0, 5.0) };
        assert_eq!(agree(&[idle], 10_000_000), None);
        assert_eq!(agree(&[], 10_000_000), None);
        assert_eq!(agree(&[report(0.0, 0.0, 0.0)], 10_000_000), None);
        let nonsense = Report { rate: f64::NAN, ..report(1.0, 1.0, 1.0) };
        assert_eq!(agree(&[nonsense, report(1000.0, 50.0, 5.0)], 10_000_000), None);
    }
}
