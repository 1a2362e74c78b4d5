//! The number of guests that have not been told of a failed flush, as the state keeps it.

use std::time::Duration;

use super::*;

fn kept(bench: &Bench) -> u32 {
    bench.manager.inner().disks["vm"].wanted.flush_failures_owed
}

#[test]
fn a_higher_number_is_kept_at_once_and_a_lower_one_after_a_while() {
    run(async |bench| {
        bench.disk("vm").await;
        let id = bench.manager.inner().disks["vm"].id;
        bench.manager.note_owed(id, 2);
        assert_eq!(kept(&bench), 2);
        // A backing that fails every flush: each failure is told by the next flush.
        for _ in 0..100 {
            bench.manager.note_owed(id, 1);
            bench.manager.note_owed(id, 2);
            assert_eq!(kept(&bench), 2, "a crash now may tell a guest twice, and forgets none");
        }
        bench.manager.note_owed(id, 0);
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(kept(&bench), 2);
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(kept(&bench), 0);
    });
}

#[test]
fn a_number_from_before_a_disk_left_its_shard_is_not_taken_over_later() {
    run(async |bench| {
        bench.disk("vm").await;
        let id = bench.manager.inner().disks["vm"].id;
        bench.manager.note_owed(id, 3);
        bench.manager.note_owed(id, 1);
        bench.manager.inner().disks.get_mut("vm").unwrap().set_owed(2);
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(kept(&bench), 2);
    });
}
