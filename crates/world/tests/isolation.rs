//! A datastore that hangs delays no disk of another datastore, however many requests it receives.

use hob_world::isolation::{Sabotage, run};

#[test]
fn hung_datastores_delay_no_other_disk() {
    let (mut hung, mut answered) = (0, 0);
    for seed in 0..40 {
        let report = run(seed, None).unwrap_or_else(|noticed| panic!("seed {seed}: {noticed}"));
        hung += usize::from(report.held > 0) * report.hung;
        answered += report.answered;
    }
    assert!(hung > 40 && answered > 2_000, "{hung} datastores hung, {answered} requests were answered");
}

#[test]
fn a_disk_that_is_delayed_is_noticed() {
    for sabotage in [Sabotage::OneShare, Sabotage::OneQueue] {
        let noticed = (0..100).find(|seed| run(*seed, Some(sabotage)).is_err());
        assert!(noticed.is_some(), "{sabotage:?}");
    }
}
