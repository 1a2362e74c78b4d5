//! The saved number of guests that have not received the report of a failed flush.

use std::time::Duration;

use super::*;

fn kept(bench: &Bench) -> u32 {
    bench.services.registry.inner().disks["vm"].wanted.flush_failures_owed
}

#[test]
fn numbers_are_kept_at_once_unless_they_go_up_and_down_all_the_time() {
    run(async |bench| {
        bench.disk("vm").await;
        let id = bench.services.registry.inner().disks["vm"].id;
        for count in [2, 1, 0, 1, 0] {
            bench.services.registry.note_owed(id, count);
            assert_eq!(kept(&bench), count);
        }
        // A backing that fails every flush: the next flush reports each failure.
        let mut changes = 0;
        for round in 0..200 {
            let before = kept(&bench);
            let count = 1 + (round + 1) % 2;
            bench.services.registry.note_owed(id, count);
            assert!(kept(&bench) >= count, "a crash now may tell a guest twice, and forgets none");
            changes += u32::from(kept(&bench) != before);
        }
        assert!(changes < 20, "the state changed {changes} times");
        bench.services.registry.note_owed(id, 0);
        assert_eq!(kept(&bench), 2);
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(kept(&bench), 0);
    });
}

#[test]
fn a_number_from_before_a_disk_left_its_shard_is_not_taken_over_later() {
    run(async |bench| {
        bench.disk("vm").await;
        let id = bench.services.registry.inner().disks["vm"].id;
        for count in [3, 2].repeat(20) {
            bench.services.registry.note_owed(id, count);
        }
        assert_eq!(kept(&bench), 3);
        bench.services.registry.inner().disks.get_mut("vm").unwrap().set_owed(1);
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(kept(&bench), 1);
    });
}
