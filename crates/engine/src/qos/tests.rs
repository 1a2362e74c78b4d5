//! Runs schedulers and windows with a resource that serves a number of units per second, and flows
//! that want more or less of it. The rules give each flow's share, and the test counts what each
//! flow received.

use std::collections::BTreeMap;

use super::*;
use crate::units::Instant;

const SECOND: u64 = 1_000_000_000;

/// Pseudo-random numbers, the same in each run.
struct SimRng(u64);

impl SimRng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }
}

/// The load of a flow.
#[derive(Clone, Copy, Debug)]
enum Demand {
    /// A constant number of I/Os is always outstanding.
    Depth(u64),
    /// I/Os arrive irregularly, at this mean rate per second.
    Rate(u64),
    /// Like `Depth`, but only in every other half second.
    Bursts(u64),
}

#[derive(Clone, Copy, Debug)]
struct Guest {
    entitlement: Entitlement,
    demand: Demand,
    /// Units of each I/O.
    units: u32,
}

impl Guest {
    fn new(demand: Demand, shares: u32) -> Guest {
        Guest { entitlement: Entitlement { shares, ..Entitlement::default() }, demand, units: 1 }
    }

    fn reserves(self, reservation: u32) -> Guest {
        Guest { entitlement: Entitlement { reservation, ..self.entitlement }, ..self }
    }

    fn limited(self, limit: u32) -> Guest {
        Guest { entitlement: Entitlement { limit: Some(limit), ..self.entitlement }, ..self }
    }

    fn of_units(self, units: u32) -> Guest {
        Guest { units, ..self }
    }
}

/// Results of a simulated run of the scheduler.
#[derive(Default)]
struct Outcome {
    /// For each flow, the time of each admission and the number of units.
    served: Vec<Vec<(u64, u32)>>,
    /// Maximum waiting time of each flow's I/Os.
    waited_max: Vec<u64>,
}

impl Outcome {
    /// Returns the units per second of a flow after the first second.
    fn rate(&self, flow: usize, seconds: u64) -> f64 {
        let units =
            self.served[flow].iter().filter(|(at, _)| *at >= SECOND).map(|(_, units)| u64::from(*units));
        units.sum::<u64>() as f64 / (seconds - 1) as f64
    }

    /// Returns the maximum number of units in any second.
    fn most_in_a_second(&self, flow: usize) -> u64 {
        let (mut first, mut sum, mut most) = (0, 0, 0);
        let served = &self.served[flow];
        for (at, units) in served {
            sum += u64::from(*units);
            while served[first].0 + SECOND <= *at {
                sum -= u64::from(served[first].1);
                first += 1;
            }
            most = most.max(sum);
        }
        most
    }
}

/// Simulates a resource that has up to `depth` I/Os in flight and serves `capacity` units per
/// second.
fn play(guests: &[Guest], capacity: u64, depth: usize, seconds: u64, seed: u64) -> Outcome {
    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    enum Event {
        Arrival(usize),
        Done(usize),
        Look,
    }
    let (mut rng, mut scheduler) = (SimRng(seed), Scheduler::default());
    let mut queue: BTreeMap<(u64, u64), Event> = BTreeMap::new();
    let mut serial = 0;
    let mut later = |queue: &mut BTreeMap<(u64, u64), Event>, at: u64, event: Event| {
        serial += 1;
        queue.insert((at, serial), event);
    };
    let mut outcome = Outcome { served: vec![vec![]; guests.len()], waited_max: vec![0; guests.len()] };
    for (flow, guest) in guests.iter().enumerate() {
        scheduler.set(Instant(0), FlowId(flow as u32), guest.entitlement);
        let first = match guest.demand {
            Demand::Depth(depth) | Demand::Bursts(depth) => depth,
            Demand::Rate(_) => 1,
        };
        (0..first).for_each(|_| later(&mut queue, rng.below(SECOND / 100), Event::Arrival(flow)));
    }
    let (mut in_flight, mut looks_at) = (0, u64::MAX);
    while let Some(((now, _), event)) = queue.pop_first().filter(|((at, _), _)| *at < seconds * SECOND) {
        match event {
            Event::Arrival(flow) => {
                let guest = guests[flow];
                if let Demand::Rate(rate) = guest.demand {
                    let pause = rng.between(SECOND / rate / 2, SECOND / rate * 3 / 2);
                    later(&mut queue, now + pause, Event::Arrival(flow));
                }
                let bytes = u64::from(guest.units) * u64::from(UNIT_BYTES_DEFAULT);
                scheduler.push(Instant(now), FlowId(flow as u32), guest.units, bytes, now);
            }
            Event::Done(flow) => {
                in_flight -= 1;
                let next = match guests[flow].demand {
                    Demand::Depth(_) => Some(now),
                    Demand::Bursts(_) => {
                        let half = now / (SECOND / 2);
                        Some(if half.is_multiple_of(2) { now } else { (half + 1) * (SECOND / 2) })
                    }
                    Demand::Rate(_) => None,
                };
                next.into_iter().for_each(|at| later(&mut queue, at, Event::Arrival(flow)));
            }
            Event::Look => looks_at = u64::MAX,
        }
        while in_flight < depth
            && let Some((flow, units, came)) = scheduler.pop(Instant(now))
        {
            in_flight += 1;
            let index = flow.0 as usize;
            outcome.served[index].push((now, units));
            outcome.waited_max[index] = outcome.waited_max[index].max(now - came);
            let takes = depth as u64 * SECOND * u64::from(units) / capacity;
            later(&mut queue, now + rng.between(takes / 2, takes * 3 / 2), Event::Done(index));
        }
        if in_flight < depth
            && let Some(at) = scheduler.next_at().filter(|at| at.0 < looks_at)
        {
            looks_at = at.0.max(now + 1);
            later(&mut queue, at.0.max(now + 1), Event::Look);
        }
    }
    outcome
}

fn is_near(value: f64, wanted: f64, part: f64) -> bool {
    (value - wanted).abs() <= wanted * part
}

#[test]
fn shares_are_proportional_under_contention() {
    for seed in 0..20 {
        let mut rng = SimRng(seed);
        let guests: Vec<Guest> = (0..rng.between(2, 8))
            .map(|_| {
                let shares = [500, 1000, 2000, rng.between(100, 4000) as u32][rng.below(4) as usize];
                let guest = Guest::new(Demand::Depth(rng.between(16, 64)), shares);
                guest.of_units([1, 1, 1, 2, 8][rng.below(5) as usize])
            })
            .collect();
        let depth = rng.between(1, 12) as usize;
        let outcome = play(&guests, 2000, depth, 31, seed);
        let all: u32 = guests.iter().map(|guest| guest.entitlement.shares).sum();
        let total: f64 = (0..guests.len()).map(|flow| outcome.rate(flow, 31)).sum();
        for (flow, guest) in guests.iter().enumerate() {
            let (rate, fair) =
                (outcome.rate(flow, 31), total * f64::from(guest.entitlement.shares) / f64::from(all));
            assert!(is_near(rate, fair, 0.05), "seed {seed}: flow {flow} of {guests:?}: {rate} for {fair}");
        }
    }
}

#[test]
fn reservations_are_met_whenever_they_can_be() {
    for seed in 0..30 {
        let mut rng = SimRng(seed);
        let capacity = rng.between(500, 5000);
        let mut left = capacity * 9 / 10;
        let guests: Vec<Guest> = (0..rng.between(2, 9))
            .map(|_| {
                let reservation = rng.below(left / 2 + 1);
                left -= reservation;
                let demand = match rng.below(3) {
                    0 => Demand::Depth(rng.between(16, 64)),
                    1 => Demand::Rate((reservation * rng.between(30, 300) / 100).max(1)),
                    _ => Demand::Rate(rng.between(1, capacity)),
                };
                Guest::new(demand, rng.between(1, 3000) as u32).reserves(reservation as u32)
            })
            .collect();
        let outcome = play(&guests, capacity, rng.between(1, 8) as usize, 31, seed);
        for (flow, guest) in guests.iter().enumerate() {
            let reservation = f64::from(guest.entitlement.reservation);
            let wanted = match guest.demand {
                Demand::Rate(rate) => reservation.min(rate as f64),
                _ => reservation,
            };
            let rate = outcome.rate(flow, 31);
            assert!(
                rate >= wanted * 0.98 - 0.2,
                "seed {seed}: flow {flow} of {guests:?}: {rate} for {wanted}"
            );
        }
    }
}

/// I/O for a reservation counts as part of the flow's share: a flow with few shares gets no more
/// than its reservation.
#[test]
fn a_reservation_is_not_on_top_of_shares() {
    let guests = [
        Guest::new(Demand::Depth(16), 500).reserves(200),
        Guest::new(Demand::Depth(64), 2000),
        Guest::new(Demand::Depth(64), 2000),
    ];
    let outcome = play(&guests, 470, 2, 21, 1);
    let rates: Vec<f64> = (0..3).map(|flow| outcome.rate(flow, 21)).collect();
    assert!(is_near(rates[0], 200.0, 0.03) && is_near(rates[1], rates[2], 0.05), "{rates:?}");
}

/// When a reservation ends, its flow gets its part by shares from then on. The flow does not get
/// less because it had more before.
#[test]
fn a_reservation_that_ends_leaves_no_debt() {
    let mut scheduler = Scheduler::default();
    let (one, other) = (FlowId(0), FlowId(1));
    let entitlement = |reservation| Entitlement { shares: 500, reservation, ..Entitlement::default() };
    scheduler.set(Instant(0), one, entitlement(200));
    scheduler.set(Instant(0), other, Entitlement { shares: 2000, ..Entitlement::default() });
    for flow in [one, other] {
        (0..16).for_each(|item| scheduler.push(Instant(0), flow, 1, 4096, item));
    }
    // 400 I/Os per second: 200 are reserved, and 80 would be its part by shares.
    let served = |from: u64, seconds: u64, scheduler: &mut Scheduler<i32>| {
        let mut counts = [0; 2];
        for i in 0..400 * seconds {
            let now = Instant(from + i * SECOND / 400);
            let (flow, _, item) = scheduler.pop(now).expect("all of them wait");
            scheduler.push(now, flow, 1, 4096, item);
            counts[flow.0 as usize] += 1;
        }
        counts
    };
    let reserved = served(0, 20, &mut scheduler);
    assert!(is_near(f64::from(reserved[0]), 4000.0, 0.03), "{reserved:?}");
    scheduler.set(Instant(20 * SECOND), one, entitlement(0));
    let shared = served(20 * SECOND, 5, &mut scheduler);
    assert!(is_near(f64::from(shared[0]), 400.0, 0.05), "{shared:?}");
}

#[test]
fn limits_are_never_passed_by_more_than_the_burst() {
    for seed in 0..30 {
        let mut rng = SimRng(seed);
        let guests: Vec<Guest> = (0..rng.between(1, 6))
            .map(|_| {
                let demand = match rng.below(3) {
                    0 => Demand::Rate(rng.between(1, 2000)),
                    1 => Demand::Bursts(rng.between(1, 64)),
                    _ => Demand::Depth(rng.between(1, 64)),
                };
                let limit = rng.between(5, 1000) as u32;
                let reservation = rng.below(u64::from(limit) + 1) as u32;
                let guest = Guest::new(demand, rng.between(1, 3000) as u32).limited(limit);
                guest.reserves(reservation).of_units(rng.between(1, 4) as u32)
            })
            .collect();
        let outcome = play(&guests, rng.between(100, 20_000), rng.between(1, 64) as usize, 21, seed);
        for (flow, guest) in guests.iter().enumerate() {
            let limit = u64::from(guest.entitlement.limit.expect("all have one"));
            let bound = limit + limit / 10 + u64::from(guest.units);
            let most = outcome.most_in_a_second(flow);
            assert!(most <= bound, "seed {seed}: flow {flow} of {guests:?}: {most} in a second");
        }
    }
}

#[test]
fn a_limit_in_bytes_is_kept_too() {
    let entitlement =
        Entitlement { limit: Some(1000), bytes_limit: Some(10 << 20), ..Entitlement::default() };
    let guest = Guest { entitlement, demand: Demand::Depth(16), units: 4 };
    let outcome = play(&[guest], 100_000, 16, 11, 1);
    // 10 MiB are 320 units.
    assert!(is_near(outcome.rate(0, 11), 320.0, 0.01), "{}", outcome.rate(0, 11));
}

#[test]
fn a_limit_is_reached_where_there_is_room() {
    let outcome = play(&[Guest::new(Demand::Depth(8), 1000).limited(300)], 10_000, 8, 11, 1);
    assert!(is_near(outcome.rate(0, 11), 300.0, 0.01), "{}", outcome.rate(0, 11));
}

#[test]
fn unused_shares_go_to_the_other_flows() {
    // Shares 1 : 2 : 4, and the third flow wants almost nothing.
    let guests = [
        Guest::new(Demand::Depth(32), 500),
        Guest::new(Demand::Depth(32), 1000),
        Guest::new(Demand::Rate(70), 2000),
    ];
    let outcome = play(&guests, 700, 4, 31, 3);
    let rates: Vec<f64> = (0..3).map(|flow| outcome.rate(flow, 31)).collect();
    assert!(is_near(rates[2], 70.0, 0.03), "{rates:?}");
    assert!(is_near(rates[0], 210.0, 0.05) && is_near(rates[1], 420.0, 0.05), "{rates:?}");
}

/// A flow that was idle gets no more than its share when it returns, and the other flows get no
/// less than their shares.
#[test]
fn an_idle_flow_saves_up_no_shares() {
    let guests = [Guest::new(Demand::Bursts(32), 1000), Guest::new(Demand::Depth(32), 1000)];
    let outcome = play(&guests, 1000, 4, 21, 5);
    for second in 1..20 {
        let busy = |(at, _): &&(u64, u32)| (second * SECOND..second * SECOND + SECOND / 2).contains(at);
        let counts: Vec<usize> =
            outcome.served.iter().map(|served| served.iter().filter(busy).count()).collect();
        assert!(is_near(counts[0] as f64, 250.0, 0.1) && is_near(counts[1] as f64, 250.0, 0.1), "{counts:?}");
    }
}

#[test]
fn no_flow_starves() {
    for seed in 0..20 {
        let mut rng = SimRng(seed);
        let mut guests: Vec<Guest> = (0..6)
            .map(|_| {
                Guest::new(Demand::Depth(64), rng.between(1000, 4000) as u32).reserves(rng.below(150) as u32)
            })
            .collect();
        guests.push(Guest::new(Demand::Depth(1), 100));
        let outcome = play(&guests, 1000, 4, 21, seed);
        // All shares are at most 24 100: one unit in 241 of the units without reservations.
        let longest = outcome.waited_max[6];
        assert!(longest < 4 * SECOND && !outcome.served[6].is_empty(), "seed {seed}: waited {longest} ns");
    }
}

#[test]
fn ten_thousand_flows_share_one_resource() {
    let guests: Vec<Guest> = (0..10_000)
        .map(|flow| Guest::new(Demand::Depth(2), if flow % 2 == 0 { 500 } else { 1500 }))
        .collect();
    let outcome = play(&guests, 100_000, 64, 3, 9);
    let sum = |odd: usize| (odd..10_000).step_by(2).map(|flow| outcome.rate(flow, 3)).sum::<f64>();
    assert!(is_near(sum(1) / sum(0), 3.0, 0.05), "{} and {}", sum(0), sum(1));
}

#[test]
fn rules_change_while_flows_wait() {
    let mut scheduler = Scheduler::default();
    let (now, flow) = (Instant(SECOND), FlowId(3));
    scheduler.set(now, flow, Entitlement { limit: Some(1), ..Entitlement::default() });
    (0..4).for_each(|item| scheduler.push(now, flow, 1, 4096, item));
    assert_eq!(scheduler.pop(now), Some((flow, 1, 0)));
    assert_eq!(scheduler.pop(now), None, "one a second");
    assert_eq!(scheduler.next_at(), Some(Instant(2 * SECOND)));
    assert_eq!(scheduler.pop(Instant(2 * SECOND)), Some((flow, 1, 1)));
    scheduler.set(Instant(2 * SECOND), flow, Entitlement::default());
    assert_eq!(scheduler.pop(Instant(2 * SECOND)), Some((flow, 1, 2)), "nothing holds it any more");
    assert_eq!((scheduler.len(), scheduler.waiting(flow)), (1, 1));
}

/// Simulates a resource with a latency of `base_ns` per I/O in flight.
fn drive(window: &mut Window, wanted: u32, base_ns: u64, from: u64, seconds: u64) -> f64 {
    let (mut now, mut in_it, mut sum, mut steps) = (from, window.state().in_flight, 0_u64, 0_u64);
    while now < from + seconds * SECOND {
        while in_it < wanted && window.has_room() {
            window.began();
            in_it += 1;
        }
        let latency = base_ns * u64::from(in_it);
        now += base_ns;
        window.ended(Instant(now), 1, latency, in_it < wanted);
        in_it -= 1;
        (sum, steps) = (sum + u64::from(in_it) + 1, steps + 1);
    }
    sum as f64 / steps as f64
}

#[test]
fn a_resource_is_throttled_when_it_is_late_and_only_then() {
    let mut window = Window::default();
    window.set(Instant(0), Control::Latency { late: Late::Above(30_000_000), weight_milli: 1000 });
    // 10 in flight: 10 ms.
    drive(&mut window, 10, 1_000_000, 0, 10);
    assert_eq!(window.state().size, None);
    // 100 in flight would be 100 ms.
    drive(&mut window, 100, 1_000_000, 10 * SECOND, 10);
    let state = window.state();
    assert!(state.size.is_some_and(|size| (28..=34).contains(&size)), "{state:?}");
    assert!(is_near(state.latency_ns as f64, 31e6, 0.1), "{state:?}");
    assert!(is_near(f64::from(state.peak), 1000.0, 0.05), "{state:?}");
    // The flows want less again, and after a while nothing limits them.
    drive(&mut window, 10, 1_000_000, 20 * SECOND, 10);
    assert_eq!(window.state().size, None);
}

/// A resource of 1000 units per second and at least 10 ms: above its knee, a threshold of 30 ms
/// would allow three times the latency without more throughput.
#[test]
fn the_knee_of_throughput_may_say_when_a_resource_is_late() {
    let mut window = Window::default();
    window.set(Instant(0), Control::Latency { late: Late::PastKnee(30_000_000), weight_milli: 1000 });
    let (mut now, mut in_it, mut done) = (0_u64, 0_u32, 0_u64);
    for second in 0..60 {
        let wanted = if second < 20 { 2 + second * 4 } else { 100 };
        if second == 40 {
            done = 0;
        }
        while now < (second + 1) as u64 * SECOND {
            while in_it < wanted as u32 && window.has_room() {
                window.began();
                in_it += 1;
            }
            // Ten at a time, each 10 ms.
            now += 10_000_000 / u64::from(in_it.min(10));
            let latency = 1_000_000 * u64::from(in_it.max(10));
            window.ended(Instant(now), 1, latency, in_it < wanted as u32);
            (in_it, done) = (in_it - 1, done + 1);
        }
    }
    let state = window.state();
    assert!(state.knee_ns.is_some_and(|knee| (10_000_000..13_000_000).contains(&knee)), "{state:?}");
    assert!(state.latency_ns < 15_000_000, "{state:?}");
    assert!(done >= 19_000, "and nothing is lost by that: {done} in 20 s");
}

#[test]
fn hosts_that_do_not_know_each_other_share_by_weight() {
    let control = |weight_milli| Control::Latency { late: Late::Above(30_000_000), weight_milli };
    let mut windows = [Window::default(), Window::default()];
    windows[0].set(Instant(0), control(1000));
    windows[1].set(Instant(0), control(3000));
    let mut in_it = [0_u32, 0];
    let mut rng = SimRng(4);
    let (mut now, mut sums) = (0_u64, [0_u64, 0]);
    while now < 120 * SECOND {
        for (window, in_it) in windows.iter_mut().zip(&mut in_it) {
            while *in_it < 200 && window.has_room() {
                window.began();
                *in_it += 1;
            }
        }
        let all = in_it[0] + in_it[1];
        now += 500_000;
        let host = usize::from(rng.below(u64::from(all)) >= u64::from(in_it[0]));
        windows[host].ended(Instant(now), 1, 500_000 * u64::from(all), true);
        in_it[host] -= 1;
        if now > 60 * SECOND {
            (0..2).for_each(|host| sums[host] += u64::from(in_it[host]));
        }
    }
    let ratio = sums[1] as f64 / sums[0] as f64;
    assert!(is_near(ratio, 3.0, 0.15), "{ratio}");
}

#[test]
fn a_fixed_depth_is_kept() {
    let mut window = Window::default();
    window.set(Instant(0), Control::Depth(4));
    assert!(drive(&mut window, 100, 1_000_000, 0, 1) <= 4.0);
    window.set(Instant(SECOND), Control::Off);
    assert!(window.has_room());
}

/// A flow with one share can count 2³⁴ units in 64 bits: two days at 100 000 per second. These I/Os
/// have the largest possible size.
#[test]
fn shares_are_kept_over_a_long_time() {
    let mut scheduler = Scheduler::default();
    let mut served = [0_u32; 2];
    for (flow, shares) in [(0, 1), (1, 3)] {
        scheduler.set(Instant(0), FlowId(flow), Entitlement { shares, ..Entitlement::default() });
        (0..400).for_each(|_| scheduler.push(Instant(0), FlowId(flow), u32::MAX, 1, ()));
    }
    for turn in 1..=400 {
        let (flow, ..) = scheduler.pop(Instant(0)).expect("both wait");
        served[flow.0 as usize] += 1;
        assert!(served[0].abs_diff(turn / 4) <= 1, "{served:?}");
    }
}
