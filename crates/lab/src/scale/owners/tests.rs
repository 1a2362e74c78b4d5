//! Tests the model with small clusters whose results are known.

use std::convert::Infallible;

use super::*;

const MS: u64 = 1_000_000;

fn small(pacing: Pacing) -> Owners {
    Owners {
        hosts: 4,
        disks: 80,
        known_by: 4,
        killed: 1,
        lease_ns: 10 * SECOND_NS,
        settle_ns: 5 * SECOND_NS,
        pacing,
        etcd: EtcdCosts {
            question_ns: MS / 10,
            change_ns: MS / 10,
            key_ns: MS / 1000,
            news_ns: MS / 100,
            commit_ns: 5 * MS,
            way_ns: MS / 2,
        },
        warm_s: 70,
        steady_s: 60,
        after_s: 60,
        seed: 3,
    }
}

fn played(owners: &Owners) -> Outcome {
    play(owners, || Ok::<_, Infallible>(())).unwrap()
}

#[test]
fn disks_of_a_killed_host_are_away_for_a_lease_settling_and_little_more() {
    for pacing in [Pacing::ClusterEvent, Pacing::Looks] {
        let outcome = played(&small(pacing));
        assert_eq!((outcome.orphans, outcome.away_ns.len(), outcome.leases_lost), (20, 20, 0), "{pacing:?}");
        // Its last renewal was up to a quarter of a lease before.
        let (first, last) = (outcome.away_ns[0], outcome.away_at(100).unwrap());
        assert!(first > 12 * SECOND_NS + SECOND_NS / 2, "{pacing:?}: {first}");
        assert!(last < 18 * SECOND_NS, "{pacing:?}: {last}");
    }
}

#[test]
fn hosts_that_hear_ask_next_to_nothing_however_many_disks_they_wait_for() {
    let hears = played(&small(Pacing::ClusterEvent));
    let looks = played(&small(Pacing::Looks));
    // 80 disks, and three hosts wait for each.
    assert!((looks.steady.looks - 240.0).abs() < 5.0, "{:?}", looks.steady);
    assert!(hears.steady.looks < 8.0, "{:?}", hears.steady);
    // Each host sends two requests for each renewal, and four renewals for each lease.
    for outcome in [&hears, &looks] {
        assert!((outcome.steady.renewals - 3.2).abs() < 0.2, "{:?}", outcome.steady);
        assert!(outcome.steady.takes == 0.0 && outcome.steady.news == 0.0);
    }
    assert!(hears.takes_a_disk < 1.3, "{hears:?}");
}

/// In the first model, each host reads each disk every second, as an earlier version of the daemon
/// did. These are more requests than etcd can answer, so lease renewals time out.
#[test]
fn an_etcd_that_is_asked_too_much_loses_leases_and_one_that_tells_does_not() {
    let slow = |pacing| {
        let owners = small(pacing);
        Owners {
            hosts: 8,
            disks: 400,
            known_by: 8,
            warm_s: 30,
            etcd: EtcdCosts { question_ns: 2 * MS, ..owners.etcd },
            ..owners
        }
    };
    let looks = played(&slow(Pacing::Looks));
    assert!(looks.leases_lost > 0, "{looks:?}");
    let hears = played(&slow(Pacing::ClusterEvent));
    assert_eq!((hears.leases_lost, hears.away_ns.len()), (0, 50), "{hears:?}");
}

#[test]
fn the_same_seed_is_the_same_history() {
    let owners = Owners { warm_s: 5, steady_s: 5, ..small(Pacing::ClusterEvent) };
    assert_eq!(played(&owners), played(&owners));
    assert_ne!(played(&owners), played(&Owners { seed: 4, ..owners }));
}

#[test]
fn late_takeovers_are_reported() {
    let owners = Owners { warm_s: 5, steady_s: 5, after_s: 10, ..small(Pacing::ClusterEvent) };
    let outcome = played(&owners);
    assert_eq!((outcome.orphans, outcome.away_at(50)), (20, None));
}
