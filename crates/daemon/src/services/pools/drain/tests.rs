//! Reports about dirty data, from a shard's statistics.

use super::*;

const MIB: u64 = 1 << 20;

/// Returns statistics with these amounts. According to the statistics, destaging fails if there is
/// dirty data, there were errors, and nothing was destaged.
fn figures(dirty: u64, destaged: u64, errors: u64) -> DiskStats {
    let mut engine = hob_engine::Engine::new(hob_engine::Limits::default());
    let config = hob_engine::command::DiskConfig {
        size_bytes: 4096,
        access: hob_engine::command::Access::ReadWrite,
        datastore: hob_engine::units::DatastoreId(0),
    };
    let (now, id) = (hob_engine::units::Instant(0), DiskId(0));
    let add = hob_engine::command::Command::AddDisk(config);
    engine.handle_command(now, hob_engine::units::CommandId(0), id, add);
    let mut stats = engine.stats(now, id).unwrap();
    stats.sectors_dirty = dirty / SECTOR_BYTES;
    stats.destaged_bytes = destaged;
    stats.destage_errors = errors;
    stats.destage_failing = dirty > 0 && errors > 0 && destaged == 0;
    stats
}

/// Returns a watch that has seen these statistics, one each second, and the time of the last
/// statistics.
fn watch(seen: &[(u64, u64, u64)]) -> (Watch, Instant) {
    let mut watch = Watch::default();
    let mut now = Instant::now();
    for (dirty, destaged, errors) in seen {
        now += Duration::from_secs(1);
        watch.note(&figures(*dirty, *destaged, *errors), now);
    }
    (watch, now)
}

#[test]
fn rate_and_remaining_time_follow_the_progress() {
    let (watch, now) = watch(&[(100 * MIB, 0, 0), (90 * MIB, 10 * MIB, 0), (80 * MIB, 20 * MIB, 0)]);
    let dirty = watch.view(true, now);
    assert_eq!((dirty.size, dirty.rate, dirty.eta_seconds), (Size(80 * MIB), Size(10 * MIB), Some(8)));
    assert_eq!((dirty.draining, dirty.why), (true, None));
}

#[test]
fn no_time_is_estimated_while_nothing_moves() {
    let (mut watch, mut now) = watch(&[(100 * MIB, 0, 0), (90 * MIB, 10 * MIB, 0)]);
    for _ in 0..10 {
        now += Duration::from_secs(1);
        watch.note(&figures(90 * MIB, 10 * MIB, 0), now);
    }
    let dirty = watch.view(true, now);
    assert_eq!((dirty.size, dirty.rate, dirty.eta_seconds), (Size(90 * MIB), Size(0), None));
    now += Duration::from_secs(1);
    watch.note(&figures(80 * MIB, 20 * MIB, 0), now);
    assert!(watch.view(true, now).eta_seconds.is_some(), "it moves again");
}

#[test]
fn no_time_is_estimated_while_a_drain_waits() {
    let (mut watch, now) = watch(&[(100 * MIB, 0, 0), (90 * MIB, 10 * MIB, 0)]);
    assert!(watch.view(true, now).eta_seconds.is_some());
    watch.pending_drain = Some(PendingDrain::waiting("the backing reconnects"));
    let dirty = watch.view(true, now);
    assert_eq!((dirty.rate, dirty.eta_seconds), (Size(0), None));
    assert_eq!(dirty.why.as_deref(), Some("the backing reconnects"));
}

#[test]
fn two_looks_at_once_make_no_rate() {
    let (mut watch, now) = watch(&[(100 * MIB, 0, 0), (90 * MIB, 10 * MIB, 0)]);
    watch.note(&figures(89 * MIB, 11 * MIB, 0), now + Duration::from_millis(1));
    assert_eq!(watch.view(true, now).rate, Size(10 * MIB));
    watch.note(&figures(80 * MIB, 20 * MIB, 0), now + Duration::from_secs(1));
    assert_eq!(watch.view(true, now).rate, Size(10 * MIB));
}

#[test]
fn nothing_dirty_has_no_time_left() {
    let (watch, now) = watch(&[(MIB, 0, 0), (0, MIB, 0)]);
    assert_eq!((watch.view(false, now).eta_seconds, watch.view(false, now).why), (Some(0), None));
}

#[test]
fn why_a_drain_does_not_get_on_is_said() {
    let (failing, now) = watch(&[(MIB, 0, 0), (MIB, 0, 3), (MIB, 0, 3)]);
    let dirty = failing.view(true, now);
    assert!(dirty.why.unwrap().contains("3 writes to the backing failed"));
    assert_eq!(dirty.eta_seconds, None);
    let (stuck, now) = watch(&[(MIB, 0, 0); 8]);
    assert!(stuck.view(true, now).why.unwrap().contains("completed no write for 7 s"));
    assert_eq!(stuck.view(false, now).why, None, "no drain runs");
    let (mended, now) = watch(&[(2 * MIB, 0, 0), (2 * MIB, 0, 3), (MIB, MIB, 3)]);
    assert_eq!(mended.view(true, now).why, None);
}

/// An error and a success happen between two polls, and no data is dirty after that.
#[test]
fn failures_that_are_over_are_no_reason_when_nothing_is_dirty() {
    let (watch, now) = watch(&[(MIB, 0, 0), (0, MIB, 2), (0, MIB, 2)]);
    assert_eq!((watch.stuck(false, now), watch.stuck(true, now)), (None, None));
    let dirty = watch.view(false, now);
    assert_eq!((dirty.size, dirty.why), (Size(0), None));
}

#[test]
fn the_end_of_a_drain_that_was_not_done_is_remembered() {
    let (mut watch, now) = watch(&[(MIB, 0, 0)]);
    watch.ended = Some("the drain was stopped".into());
    assert_eq!(watch.view(false, now).why.unwrap(), "the last drain ended early: the drain was stopped");
    watch.note(&figures(0, MIB, 0), now + Duration::from_secs(1));
    assert_eq!(watch.view(false, now).why, None);
}

#[test]
fn a_cache_with_one_copy_waits_for_no_second_copies() {
    assert_eq!(until_complete(Copies::One), "until its journal is complete again");
    for copies in [Copies::TwoOfDirty, Copies::TwoOfAll] {
        assert!(until_complete(copies).contains("second copies"));
    }
}
