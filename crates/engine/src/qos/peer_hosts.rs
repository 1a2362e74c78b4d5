//! Division of a datastore among hosts by agreement, so that a disk's entitlement is the same on
//! any host.
//!
//! A window that follows latency alone (PARDA) converges slowly to windows in proportion to the
//! hosts' weights. Such a window ignores reservations and disks with little demand. In dmClock
//! (Gulati, Merchant, Varman, OSDI 2010), a client uses many servers, and tells each server how
//! many of its requests the other servers have completed. In hob, many hosts use one datastore. The
//! hosts report to each other how much I/O per second their disks need (their *demand*). From all
//! reports, each host computes its own part of the datastore's rate.
//!
//! The *level* is the rate per share: the units per second that one share receives when the
//! datastore is overloaded. The level is equal for every disk of the datastore. A throttled disk
//! demands its shares times the rate per share, or its reservation, whichever is more. A disk that
//! is not throttled demands the rate that it uses. The demand of all disks of a host, divided by
//! the rate per share, is the host's *wanted shares*. Each host makes a [`Report`] at intervals.
//! From the latest reports of all hosts, [`agree`] computes the next rate per share, and the number
//! of I/Os per share that may be in flight in the datastore. All hosts compute the same result
//! without a coordinator, and do not wait for missing reports.

/// One host's report about a datastore.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Demand of the host's disks, in shares, at the rate per share that the hosts agreed on last.
    pub wanted_shares: f64,
    /// Rate at which the host's I/O was served, units per second.
    pub rate: f64,
    /// Mean number of the host's I/Os in flight in the datastore.
    pub in_flight: f64,
    /// Mean latency that the host measured, nanoseconds.
    pub latency_ns: f64,
    /// True if some I/O of the host had to wait for room in the window.
    pub waits: bool,
}

/// Agreement computed from the reports of all hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedDatastore {
    /// Rate per share, units per second.
    pub level: f64,
    /// Number of I/Os in flight in the datastore per share.
    pub in_flight_per_share: f64,
}

/// Maximum factor by which a low latency may raise the number of I/Os in flight in one agreement.
/// Without this limit, the low latency of an idle time would raise the number too far.
const GROWTH_MAX: f64 = 1.25;

/// Number of I/Os in flight added to the number that the latency suggests, so that the datastore is
/// never underused.
const PROBE: f64 = 1.0;

/// Computes the agreement for a datastore whose latency should stay below `threshold_ns`. Returns
/// `None` if no I/O waits or none was served, because then there is nothing to divide.
pub fn agree(reports: &[Report], threshold_ns: u64) -> Option<SharedDatastore> {
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
    Some(SharedDatastore { level: rate / shares, in_flight_per_share: next / shares })
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
    fn without_waiting_io_nothing_is_divided() {
        let idle = Report { waits: false, ..report(1000.0, 50.0, 5.0) };
        assert_eq!(agree(&[idle], 10_000_000), None);
        assert_eq!(agree(&[], 10_000_000), None);
        assert_eq!(agree(&[report(0.0, 0.0, 0.0)], 10_000_000), None);
        let nonsense = Report { rate: f64::NAN, ..report(1.0, 1.0, 1.0) };
        assert_eq!(agree(&[nonsense, report(1000.0, 50.0, 5.0)], 10_000_000), None);
    }
}
