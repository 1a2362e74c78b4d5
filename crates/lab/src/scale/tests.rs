//! Tests small models of a datastore whose results are known.

use std::convert::Infallible;

use super::*;

const REPORTS: Knowledge = Knowledge::Reports { every_ns: SECOND_NS, delay_ns: 20_000_000 };

fn small(knowledge: Knowledge) -> Scale {
    Scale {
        hosts: 4,
        disks: 80,
        servers: 40,
        service_ns: 5_000_000,
        threshold_ns: 10_000_000,
        knowledge,
        warm_s: 20,
        seconds: 30,
        seed: 3,
    }
}

fn played(scale: &Scale) -> Outcome {
    play(scale, || Ok::<_, Infallible>(())).unwrap()
}

#[test]
fn hosts_that_know_each_other_give_disks_their_due() {
    let told = played(&small(REPORTS));
    let alone = played(&small(Knowledge::Latency));
    let free = played(&small(Knowledge::Unthrottled));
    for (name, outcome) in [("told", &told), ("alone", &alone), ("free", &free)] {
        eprintln!(
            "{name}: rate {:.0} latency {:.2} errors {:.3} {:.3} {:.3} missed {}/{}",
            outcome.rate,
            outcome.latency_ms,
            outcome.error_at(50),
            outcome.error_at(95),
            outcome.error_at(100),
            outcome.missed,
            outcome.reserved
        );
    }
    assert!(told.error_at(50) < 0.05 && told.error_at(95) < 0.15, "{:?}", told.errors);
    assert!(told.error_at(95) < alone.error_at(95) / 2.0 && told.error_at(95) < free.error_at(95) / 2.0);
    assert_eq!(told.missed, 0);
}

#[test]
fn the_same_seed_is_the_same_history() {
    let scale = Scale { warm_s: 1, seconds: 2, ..small(REPORTS) };
    assert_eq!(played(&scale), played(&scale));
}

#[test]
fn remaining_rate_is_distributed() {
    let disk = |shares, reservation, demand| Disk {
        host: 0,
        due: Entitlement { shares, reservation, ..Entitlement::default() },
        demand,
    };
    let all = Demand::Depth(8);
    let disks =
        [disk(1000, 0, all), disk(2000, 0, all), disk(500, 500, all), disk(1000, 0, Demand::Rate(50))];
    let due: Vec<f64> = entitlement::due(&disks, 1000.0).iter().map(|due| due.round()).collect();
    assert_eq!(due, [150.0, 300.0, 500.0, 50.0]);
}
