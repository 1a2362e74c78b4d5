//! Tests of the model on short hand-written histories: what it must accept and reject.

use super::*;
use crate::content::tag;

fn initial(units: u32) -> Vec<Tag> {
    (0..units).map(|unit| tag(1, 0, unit)).collect()
}

/// Returns the tag of a written unit of the disk.
fn t(serial: u32, unit: u32) -> Tag {
    tag(serial, 0, unit)
}

#[test]
fn a_read_after_a_write_must_see_it() {
    let mut model = Model::new(0, 4);
    let mut backing = initial(4);
    let reading = model.begin_read(0, 4);
    model.end_read(&reading, &backing, &backing).unwrap();
    let write = model.begin_change(Kind::Data, 1, 2);
    for unit in [1, 2] {
        backing[unit as usize] = t(write, unit);
    }
    model.end_change(write, true, true, &backing, &backing).unwrap();
    let reading = model.begin_read(0, 4);
    assert!(model.end_read(&reading, &initial(4), &initial(4)).is_err(), "stale");
    model.end_read(&reading, &backing, &backing).unwrap();
    let moved = [t(1, 0), t(write, 2), t(write, 1), t(1, 3)];
    assert!(model.end_read(&reading, &moved, &moved).is_err(), "misplaced");
}

#[test]
fn a_read_during_a_write_sees_all_or_nothing_of_it() {
    let mut model = Model::new(0, 2);
    let reading = model.begin_read(0, 2);
    let write = model.begin_change(Kind::Data, 0, 2);
    let (old, new) = (initial(2), [t(write, 0), t(write, 1)]);
    model.end_read(&reading, &old, &old).unwrap();
    model.end_read(&reading, &new, &new).unwrap();
    assert!(model.end_read(&reading, &[new[0], old[1]], &new).is_err());
    assert!(model.end_read(&reading, &[old[0], new[1]], &new).is_err());
}

#[test]
fn a_failed_write_leaves_one_version_that_does_not_change() {
    let mut model = Model::new(0, 1);
    let write = model.begin_change(Kind::Data, 0, 1);
    model.end_change(write, false, false, &initial(1), &initial(1)).unwrap();
    let reading = model.begin_read(0, 1);
    model.end_read(&reading, &[t(write, 0)], &[t(write, 0)]).unwrap();
    assert!(model.end_read(&reading, &initial(1), &initial(1)).is_err(), "seen the new, then the old");
}

#[test]
fn zeroes_and_discards_read_as_zero_only_after_they_began() {
    let mut model = Model::new(0, 1);
    let reading = model.begin_read(0, 1);
    assert!(model.end_read(&reading, &[ZERO], &[ZERO]).is_err());
    let discard = model.begin_change(Kind::Discard, 0, 1);
    model.end_change(discard, true, false, &initial(1), &initial(1)).unwrap();
    let reading = model.begin_read(0, 1);
    model.clone().end_read(&reading, &[ZERO], &[ZERO]).unwrap();
    model.end_read(&reading, &initial(1), &initial(1)).unwrap();
    let zeroes = model.begin_change(Kind::Zero, 0, 1);
    model.end_change(zeroes, true, false, &[ZERO], &initial(1)).unwrap();
    let reading = model.begin_read(0, 1);
    assert!(model.end_read(&reading, &initial(1), &initial(1)).is_err());
}

#[test]
fn flushed_data_survives_a_power_cut() {
    let mut model = Model::new(0, 1);
    let write = model.begin_change(Kind::Data, 0, 1);
    let new = [t(write, 0)];
    model.end_change(write, true, false, &new, &initial(1)).unwrap();
    model.check_power_cut(&initial(1)).unwrap();
    let flush = model.begin_flush();
    assert!(model.clone().end_flush(0, flush, &new, &initial(1)).is_err(), "the flush lied");
    model.end_flush(0, flush, &new, &new).unwrap();
    model.check_power_cut(&new).unwrap();
    assert!(model.check_power_cut(&initial(1)).is_err());
    let next = model.begin_change(Kind::Data, 0, 1);
    model.check_power_cut(&[t(next, 0)]).unwrap();
    let early = model.end_change(next, true, true, &[t(next, 0)], &new);
    assert!(early.is_err(), "FUA acknowledged before it was durable");
}

/// Returns a disk with a write-back cache.
fn lagging(units: u32) -> Model {
    let mut model = Model::new(0, units);
    model.set_lags(true);
    model
}

/// Runs a single read. The backing is not compared.
fn sees(model: &mut Model, seen: &[Tag]) -> Result<(), Violation> {
    let reading = model.begin_read(0, seen.len() as u32);
    model.end_read(&reading, seen, &initial(seen.len() as u32))
}

fn write(model: &mut Model, fua: bool) -> u32 {
    let write = model.begin_change(Kind::Data, 0, 1);
    model.end_change(write, true, fua, &initial(1), &initial(1)).unwrap();
    write
}

#[test]
fn a_lagging_backing_is_not_looked_at_but_reads_are() {
    let mut model = lagging(1);
    let write = write(&mut model, false);
    let flush = model.begin_flush();
    model.end_flush(0, flush, &[t(write, 0)], &initial(1)).unwrap();
    sees(&mut model, &[t(write, 0)]).unwrap();
    assert!(sees(&mut model, &initial(1)).is_err(), "stale");
}

#[test]
fn a_crash_loses_only_unflushed_data() {
    let mut model = lagging(1);
    let flushed = write(&mut model, false);
    let flush = model.begin_flush();
    let (second, third) = (write(&mut model, false), write(&mut model, false));
    model.end_flush(0, flush, &initial(1), &initial(1)).unwrap();
    let open = model.begin_change(Kind::Data, 0, 1);
    for loss in [Loss::Unflushed, Loss::Unrecorded] {
        let mut model = model.clone();
        model.crash(loss);
        for serial in [flushed, second, third, open] {
            sees(&mut model.clone(), &[t(serial, 0)]).unwrap();
        }
        assert!(sees(&mut model, &initial(1)).is_err(), "flushed, and lost");
    }
    model.crash(Loss::Nothing);
    sees(&mut model.clone(), &[t(third, 0)]).unwrap();
    sees(&mut model.clone(), &[t(open, 0)]).unwrap();
    assert!(sees(&mut model, &[t(second, 0)]).is_err(), "acknowledged, and lost with nothing");
}

#[test]
fn data_read_after_a_crash_survives_the_next_crash() {
    let mut model = lagging(1);
    let (first, second) = (write(&mut model, false), write(&mut model, false));
    model.crash(Loss::Unflushed);
    sees(&mut model, &[t(first, 0)]).unwrap();
    assert!(sees(&mut model.clone(), &[t(second, 0)]).is_err(), "flickers");
    model.crash(Loss::Unflushed);
    assert!(sees(&mut model.clone(), &[t(second, 0)]).is_err(), "came back");
    assert!(sees(&mut model.clone(), &initial(1)).is_err(), "read, and lost");
    sees(&mut model, &[t(first, 0)]).unwrap();
}

#[test]
fn data_left_by_a_killed_process_is_durable_after_a_flush() {
    let mut model = lagging(1);
    let first = write(&mut model, false);
    model.crash(Loss::Unrecorded);
    sees(&mut model, &[t(first, 0)]).unwrap();
    let mut flushed = model.clone();
    model.crash(Loss::Unflushed);
    sees(&mut model, &initial(1)).unwrap();
    let flush = flushed.begin_flush();
    flushed.end_flush(0, flush, &initial(1), &initial(1)).unwrap();
    flushed.crash(Loss::Unflushed);
    assert!(sees(&mut flushed, &initial(1)).is_err(), "flushed, and lost");
}

/// A discard may restore any older data. Content that was read stays after a flush.
#[test]
fn data_uncovered_by_a_discard_stays_after_a_flush() {
    let backing = initial(1);
    let discarded = |sees_it: bool, flushes: bool| {
        let mut model = lagging(1);
        let first = write(&mut model, true);
        let discard = model.begin_change(Kind::Discard, 0, 1);
        model.end_change(discard, true, false, &backing, &backing).unwrap();
        if sees_it {
            sees(&mut model, &backing).unwrap();
        }
        if flushes {
            let flush = model.begin_flush();
            model.end_flush(0, flush, &backing, &backing).unwrap();
        }
        model.crash(Loss::Unflushed);
        let same = sees(&mut model.clone(), &backing).is_ok();
        (same, sees(&mut model, &[t(first, 0)]).is_ok())
    };
    assert_eq!(discarded(true, true), (true, false));
    assert_eq!(discarded(true, false), (true, true), "the discard was not flushed");
    assert_eq!(discarded(false, true), (true, true), "no guest has read the result");
}

/// A discard in progress may undo changes that guests write before the discard ends.
#[test]
fn a_discard_undoes_what_was_written_until_it_ends() {
    let backing = initial(1);
    let mut model = lagging(1);
    let discard = model.begin_change(Kind::Discard, 0, 1);
    write(&mut model, true);
    model.end_change(discard, true, false, &backing, &backing).unwrap();
    sees(&mut model.clone(), &backing).unwrap();
    model.crash(Loss::Unflushed);
    sees(&mut model, &backing).unwrap();
    let last = write(&mut model, true);
    model.crash(Loss::Unflushed);
    assert!(sees(&mut model.clone(), &backing).is_err(), "it ended before this");
    sees(&mut model, &[t(last, 0)]).unwrap();
}

/// Two discards of one unit are in progress. The second one may undo changes until it ends, also
/// after the first one has ended.
#[test]
fn the_end_of_one_discard_is_not_the_end_of_another() {
    let backing = initial(1);
    let mut model = lagging(1);
    let [first, second] = [0, 1].map(|_| model.begin_change(Kind::Discard, 0, 1));
    model.end_change(first, true, false, &backing, &backing).unwrap();
    write(&mut model, true);
    sees(&mut model, &backing).unwrap();
    model.end_change(second, true, false, &backing, &backing).unwrap();
    write(&mut model, true);
    assert!(sees(&mut model, &backing).is_err(), "both have ended");
}

#[test]
fn a_discard_may_meet_dirty_data_that_was_not_there_when_it_began() {
    let backing = initial(1);
    let mut model = Model::new(0, 1);
    let discard = model.begin_change(Kind::Discard, 0, 1);
    model.set_lags(true);
    write(&mut model, false);
    model.end_change(discard, true, false, &backing, &backing).unwrap();
    sees(&mut model, &backing).unwrap();
}

#[test]
fn given_up_data_may_read_as_the_backing_or_newer() {
    let mut model = lagging(1);
    let (first, second) = (write(&mut model, true), write(&mut model, true));
    assert!(sees(&mut model.clone(), &[t(first, 0)]).is_err());
    model.forget(&[t(first, 0)]).unwrap();
    assert!(sees(&mut model.clone(), &initial(1)).is_err(), "older than the backing");
    sees(&mut model.clone(), &[t(second, 0)]).unwrap();
    sees(&mut model, &[t(first, 0)]).unwrap();
    model.adopt(&initial(1), &initial(1)).unwrap();
    assert!(sees(&mut model.clone(), &[t(second, 0)]).is_err());
    let behind = model.changed_behind(0, 1);
    assert!(sees(&mut model.clone(), &initial(1)).is_err(), "changed behind");
    sees(&mut model, &[t(behind, 0)]).unwrap();
}

#[test]
fn a_backing_may_lose_given_up_data() {
    let mut model = lagging(1);
    let serial = write(&mut model, true);
    model.adopt(&[t(serial, 0)], &initial(1)).unwrap();
    assert!(sees(&mut model.clone(), &initial(1)).is_err(), "the backing has not lost it yet");
    model.crash(Loss::Nothing);
    model.lose();
    sees(&mut model, &initial(1)).unwrap();
}

#[test]
fn data_may_return_until_it_is_completely_given_up() {
    let mut model = lagging(1);
    let serial = write(&mut model, true);
    model.forget(&initial(1)).unwrap();
    sees(&mut model.clone(), &[t(serial, 0)]).unwrap();
    model.pin(&initial(1));
    assert!(sees(&mut model.clone(), &[t(serial, 0)]).is_err());
    sees(&mut model, &initial(1)).unwrap();
}

/// A flush after a loss makes the earlier acknowledged data durable. The backing may have either of
/// two writes that overlapped in time.
#[test]
fn a_flush_after_a_loss_accepts_either_of_two_overlapping_writes() {
    let mut model = Model::new(0, 1);
    let first = model.begin_change(Kind::Data, 0, 1);
    let second = model.begin_change(Kind::Data, 0, 1);
    let held = [t(first, 0)];
    model.end_change(second, true, false, &held, &held).unwrap();
    model.end_change(first, true, false, &held, &held).unwrap();
    model.lose();
    let flush = model.begin_flush();
    let lost = initial(1);
    model.clone().end_flush(0, flush, &held, &held).unwrap();
    model.clone().end_flush(0, flush, &[t(second, 0)], &held).unwrap();
    sees(&mut model.clone(), &lost).unwrap();
    model.end_flush(0, flush, &held, &held).unwrap();
    assert!(sees(&mut model, &lost).is_err());
}

#[test]
fn a_flush_after_a_loss_promises_a_write_that_overlapped_no_other() {
    let mut model = Model::new(0, 1);
    let serial = model.begin_change(Kind::Data, 0, 1);
    let held = [t(serial, 0)];
    model.end_change(serial, true, false, &held, &initial(1)).unwrap();
    model.lose();
    let flush = model.begin_flush();
    model.clone().end_flush(0, flush, &held, &held).unwrap();
    assert!(model.end_flush(0, flush, &initial(1), &initial(1)).is_err());
}

#[test]
fn a_backing_may_lose_data_uncovered_by_a_discard_after_a_power_cut() {
    let mut model = lagging(1);
    let serial = write(&mut model, true);
    model.crash(Loss::Unflushed);
    model.forget(&initial(1)).unwrap();
    // The data had been destaged, and no flush followed.
    sees(&mut model, &[t(serial, 0)]).unwrap();
    model.lose();
    sees(&mut model, &initial(1)).unwrap();
}
