//! What a lost journal keeps waiting, and what ends that.

use super::write_back::{RING_DEVICE, backing, flash, ring};
use super::*;

/// A cache whose journal was lost under a flush, and nothing of it is dirty any more.
fn lost() -> (Bench, RequestId) {
    let mut bench = Bench::write_back();
    bench.write_alone(0, 4 * KIB);
    let flush = bench.request(Op::Flush, 0, 0);
    while let Some(io) = bench.ios.pop_front() {
        match io.target {
            target if target == flash(RING_DEVICE) => bench.fail(io),
            _ => bench.end(io),
        }
    }
    assert!(bench.events.contains(&Event::JournalLost(DISK)));
    assert_eq!(bench.dirty(), 0, "it goes to the backing by itself");
    (bench, flush)
}

/// Requests of all kinds that do not get on, and nothing on its way to the backing for them.
fn strand(bench: &mut Bench) -> Vec<RequestId> {
    let ops = [(WRITE, 0), (WRITE, 64 * KIB), (Op::Write(Durability::Durable), 128 * KIB)];
    let mut waiting: Vec<RequestId> = ops.map(|(op, offset)| bench.request(op, offset, 4 * KIB)).into();
    waiting.push(bench.request(Op::Discard(Durability::Volatile), 256 * KIB, 4 * KIB));
    waiting.push(bench.request(Op::Flush, 0, 0));
    bench.settle();
    for id in &waiting {
        assert!(!bench.answered(*id), "{id}");
    }
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit, "reads go on");
    waiting
}

#[test]
fn changes_and_flushes_wait_for_another_journal() {
    let (mut bench, flush) = lost();
    let mut waiting = strand(&mut bench);
    waiting.push(flush);
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    bench.settle();
    assert!(bench.result(renew).expect("done").is_ok());
    for id in waiting {
        assert_eq!(bench.reply(id).expect("answered").result, Ok(()), "{id}");
    }
    assert_eq!(bench.write_alone(0, 4 * KIB), Outcome::WriteBack);
}

#[test]
fn or_until_the_cache_is_taken_away() {
    let (mut bench, flush) = lost();
    let mut waiting = strand(&mut bench);
    waiting.push(flush);
    let disable = bench.start_change(CacheChange::Disable);
    bench.settle();
    assert!(bench.result(disable).expect("done").is_ok());
    for id in waiting {
        assert_eq!(bench.reply(id).expect("answered").result, Ok(()), "{id}");
    }
}

/// Not for ever; and the disk goes on with what can be done.
#[test]
fn or_until_nobody_came_for_half_a_minute() {
    let (mut bench, flush) = lost();
    let mut waiting = strand(&mut bench);
    waiting.push(flush);
    bench.wait_ms(29_000);
    assert!(!bench.answered(flush));
    bench.wait_ms(1_000);
    waiting.push(bench.write(0, 4 * KIB));
    for id in waiting {
        assert_eq!(bench.reply(id).expect("answered").result, Err(IoError::Failed), "{id}");
        assert_eq!(bench.outcome(id), Outcome::DirtyLost);
    }
    assert!(!bench.ios.iter().any(|io| io.target == backing()), "what the ring says stays true");
    assert_eq!(bench.read_alone(0, 4 * KIB), Outcome::Hit);
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    bench.settle();
    assert!(bench.result(renew).expect("done").is_ok());
    assert_eq!(bench.write_alone(0, 4 * KIB), Outcome::WriteBack);
}

/// A disk that cannot be closed stays, with those who wait.
#[test]
fn a_disk_is_not_removed_before() {
    let (mut bench, flush) = lost();
    let waiting = strand(&mut bench);
    let remove = bench.start_command(Command::RemoveDisk);
    assert_eq!(bench.result(remove), Some(Err(CommandError::JournalFailed)));
    assert!(!bench.answered(flush) && !bench.answered(waiting[0]));
    let renew = bench.start_change(CacheChange::Shrink(0, Some(ring(2))));
    bench.settle();
    assert!(bench.result(renew).expect("done").is_ok());
    assert_eq!(bench.reply(waiting[0]).expect("answered").result, Ok(()));
}
