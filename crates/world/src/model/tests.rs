//! The model on short histories worked out by hand: what it must let pass, and what not.

use super::*;
use crate::content::tag;

fn initial(units: u32) -> Vec<Tag> {
    (0..units).map(|unit| tag(1, 0, unit)).collect()
}

/// A written unit of the disk.
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
fn a_failed_write_leaves_either_but_does_not_flicker() {
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
fn what_was_flushed_survives_a_power_cut() {
    let mut model = Model::new(0, 1);
    let write = model.begin_change(Kind::Data, 0, 1);
    let new = [t(write, 0)];
    model.end_change(write, true, false, &new, &initial(1)).unwrap();
    model.check_power_cut(&initial(1)).unwrap();
    let flush = model.begin_flush();
    assert!(model.clone().end_flush(flush, &new, &initial(1)).is_err(), "the flush lied");
    model.end_flush(flush, &new, &new).unwrap();
    model.check_power_cut(&new).unwrap();
    assert!(model.check_power_cut(&initial(1)).is_err());
    let next = model.begin_change(Kind::Data, 0, 1);
    model.check_power_cut(&[t(next, 0)]).unwrap();
    let early = model.end_change(next, true, true, &[t(next, 0)], &new);
    assert!(early.is_err(), "FUA acknowledged before it was durable");
}
