//! Tests of the model on short histories worked out by hand: what it must accept and reject.

use std::time::Duration;

use super::*;

const ORIGIN: Origin = Origin { run: 1, disk: 0 };

fn model() -> Model {
    Model::new(ORIGIN, 8, 8)
}

/// Writes one unit; returns its bytes.
fn write(model: &mut Model, unit: u64) -> Vec<u8> {
    let write = model.begin_write(unit, 1, Kind::Data);
    let bytes = model.bytes(&write);
    model.acknowledge(write, false);
    bytes
}

fn sees(model: &mut Model, unit: u64, bytes: &[u8]) -> bool {
    let read = model.begin_read(unit, 1);
    model.check(read, bytes).wrong.is_empty()
}

fn flush(model: &mut Model) {
    let flush = model.begin_flush();
    model.flushed(flush);
}

#[test]
fn without_faults_only_the_last_version_will_do() {
    let mut model = model();
    assert!(sees(&mut model, 9, &[0; UNIT]));
    let one = write(&mut model, 9);
    let two = write(&mut model, 9);
    assert!(sees(&mut model, 9, &two));
    assert!(!sees(&mut model, 9, &one), "stale");
    let mut other = self::model();
    write(&mut other, 9);
    assert!(!sees(&mut other, 9, &[0; UNIT]), "lost");
}

#[test]
fn misplaced_and_torn_units_and_those_of_other_disks_are_noticed() {
    for bytes in [
        stamp(ORIGIN, 10, 1),
        stamp(Origin { run: 1, disk: 1 }, 9, 1),
        stamp(Origin { run: 2, disk: 0 }, 9, 1),
    ] {
        let mut model = model();
        write(&mut model, 9);
        assert!(!sees(&mut model, 9, &bytes));
    }
    let mut model = model();
    let mut torn = write(&mut model, 9);
    torn[300] ^= 1;
    assert!(!sees(&mut model, 9, &torn));
}

#[test]
fn a_loss_undoes_what_no_flush_promised_and_a_read_settles_that() {
    let build = || {
        let mut model = model();
        let one = write(&mut model, 9);
        flush(&mut model);
        let (two, three) = (write(&mut model, 9), write(&mut model, 9));
        model.loss(Instant::now());
        (model, [one, two, three])
    };
    for seen in 0..3 {
        let (mut model, versions) = build();
        assert!(sees(&mut model, 9, &versions[seen]), "{seen}");
        for other in (0..3).filter(|other| *other != seen) {
            let (mut model, _) = build();
            assert!(sees(&mut model, 9, &versions[seen]));
            assert!(!sees(&mut model, 9, &versions[other]), "{other} after {seen}");
        }
    }
    let (mut model, _) = build();
    assert!(!sees(&mut model, 9, &[0; UNIT]), "flushed, and lost");
}

#[test]
fn a_flush_after_an_unreported_loss_promises_everything() {
    let mut model = model();
    let one = write(&mut model, 9);
    flush(&mut model);
    write(&mut model, 9);
    model.loss(Instant::now());
    assert!(model.loss_unreported());
    flush(&mut model);
    assert!(!model.loss_unreported());
    assert!(!sees(&mut model, 9, &one), "the flush should have failed");
}

#[test]
fn a_failed_flush_takes_the_promise_back_until_the_data_is_seen_or_written_again() {
    let build = || {
        let mut model = model();
        let one = write(&mut model, 9);
        flush(&mut model);
        let two = write(&mut model, 9);
        let flush = model.begin_flush();
        model.flush_failed(flush);
        (model, one, two)
    };
    let (mut model, one, _) = build();
    flush(&mut model);
    assert!(sees(&mut model, 9, &one), "nothing was promised");
    let (mut model, one, two) = build();
    assert!(sees(&mut model, 9, &two));
    flush(&mut model);
    model.loss(Instant::now());
    assert!(!sees(&mut model, 9, &one), "seen, flushed, and lost");
    let (mut model, one, _) = build();
    write(&mut model, 9);
    flush(&mut model);
    model.loss(Instant::now());
    assert!(!sees(&mut model, 9, &one), "written again, flushed, and lost");
}

#[test]
fn a_flush_promises_what_was_acknowledged_before_it_was_sent() {
    let mut model = model();
    let one = write(&mut model, 9);
    let flying = model.begin_flush();
    write(&mut model, 10);
    model.flushed(flying);
    model.interrupt();
    assert!(sees(&mut model, 10, &[0; UNIT]));
    assert!(!sees(&mut model, 9, &[0; UNIT]));
    let _ = one;
}

#[test]
fn fua_is_durable_by_itself() {
    let mut model = model();
    let write = model.begin_write(9, 1, Kind::Data);
    model.acknowledge(write, true);
    model.withdraw();
    assert!(!sees(&mut model, 9, &[0; UNIT]));
}

#[test]
fn answers_that_meet_a_fault_settle_nothing() {
    let mut model = model();
    let one = write(&mut model, 9);
    flush(&mut model);
    let two = model.begin_write(9, 1, Kind::Data);
    let reading = model.begin_read(10, 1);
    write(&mut model, 11);
    model.interrupt();
    model.acknowledge(two, false);
    assert!(model.check(reading, &[0; UNIT]).wrong.is_empty());
    assert!(sees(&mut model, 9, &one), "it may have happened before the fault");
}

#[test]
fn writes_in_flight_at_a_failed_flush_need_another_flush() {
    let mut model = model();
    let flying = model.begin_write(9, 1, Kind::Data);
    let early = model.begin_flush();
    model.flush_failed(early);
    model.acknowledge(flying, false);
    flush(&mut model);
    assert!(sees(&mut model, 9, &[0; UNIT]));
}

#[test]
fn a_failed_write_may_appear_at_a_later_fault_and_an_interrupted_one_may_not() {
    let build = |fails: bool| {
        let mut model = model();
        let write = model.begin_write(9, 1, Kind::Data);
        let bytes = model.bytes(&write);
        if fails {
            model.fail(&write);
        } else {
            model.interrupt();
        }
        assert!(sees(&mut model, 9, &[0; UNIT]));
        let flickers = sees(&mut model, 9, &bytes);
        assert!(!flickers, "seen to be absent");
        (model, bytes)
    };
    let (..) = build(true);
    let mut model = model();
    let write = model.begin_write(9, 1, Kind::Data);
    let bytes = model.bytes(&write);
    model.fail(&write);
    assert!(sees(&mut model, 9, &[0; UNIT]));
    model.interrupt();
    assert!(sees(&mut model, 9, &bytes));
    let (..) = build(false);
}

#[test]
fn a_discard_leaves_zeroes_or_something_older() {
    let mut model = model();
    let one = write(&mut model, 9);
    let two = write(&mut model, 9);
    flush(&mut model);
    let discard = model.begin_write(9, 1, Kind::Discard);
    model.acknowledge(discard, false);
    for bytes in [&two, &vec![0; UNIT], &one] {
        assert!(sees(&mut model, 9, bytes));
    }
    assert!(!sees(&mut model, 9, &stamp(ORIGIN, 10, 1)));
    let mut model = self::model();
    let discard = model.begin_write(9, 1, Kind::Discard);
    model.acknowledge(discard, false);
    let later = write(&mut model, 9);
    assert!(sees(&mut model, 9, &later));
    assert!(!sees(&mut model, 9, &[0; UNIT]), "written after the discard");
}

#[test]
fn zeroes_after_a_discard_do_not_show_that_other_versions_are_lost() {
    let mut model = model();
    let zeroes = model.begin_write(9, 1, Kind::Zeroes);
    model.acknowledge(zeroes, false);
    let data = write(&mut model, 9);
    model.loss(Instant::now());
    let discard = model.begin_write(9, 1, Kind::Discard);
    model.acknowledge(discard, false);
    model.loss(Instant::now());
    assert!(sees(&mut model, 9, &[0; UNIT]), "of the write of zeroes, or of the discard");
    model.loss(Instant::now());
    assert!(sees(&mut model, 9, &data), "the second fault undid the discard");
}

#[test]
fn a_wrong_unit_is_reported_once() {
    let mut model = model();
    write(&mut model, 9);
    assert!(!sees(&mut model, 9, &[0; UNIT]));
    assert!(sees(&mut model, 9, &[0; UNIT]));
}

#[test]
fn a_write_in_flight_is_unanswered() {
    let mut model = Model::new(ORIGIN, 0, 16);
    let write = model.begin_write(4, 2, Kind::Data);
    assert!(model.is_answered(0, 4) && !model.is_answered(0, 5) && model.is_answered(6, 10));
    model.acknowledge(write, false);
    assert!(model.is_answered(0, 16));
}

#[test]
fn a_flush_that_began_before_a_write_ended_leaves_its_loss_unreported() {
    let mut model = model();
    let flying = model.begin_write(9, 1, Kind::Data);
    let early = model.begin_flush();
    model.acknowledge(flying, false);
    model.loss(Instant::now());
    model.flush_failed(early);
    assert!(model.loss_unreported(), "the next flush may fail too");
    let later = model.begin_flush();
    model.flush_failed(later);
    assert!(!model.loss_unreported());
}

#[test]
fn a_read_before_the_daemon_notices_a_loss_settles_nothing() {
    let mut model = model();
    let one = write(&mut model, 9);
    flush(&mut model);
    let two = write(&mut model, 9);
    model.loss(Instant::now() + Duration::from_secs(3600));
    assert!(sees(&mut model, 9, &two), "the cache returns what the backing has lost");
    assert!(sees(&mut model, 9, &one), "the daemon has noticed the loss");
}
