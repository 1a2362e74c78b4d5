//! Second copies on another host's flash: what is written where, and what happens when that host
//! fails.

use super::write_back::{RING_DEVICE, VOLATILE, backing, flash, lazy};
use super::*;
use crate::command::{Copies, Destage, Enable, Mode, NewRing};

/// The peer's device, which also has a copy of the journal.
const PEER: u16 = 5;

fn ring(number: u32, at_peer: bool) -> NewRing {
    let on = |device| (0..8).map(|i| segment(device, 16 * MIB + i * MIB)).collect();
    let mut copies = vec![on(RING_DEVICE)];
    copies.extend(at_peer.then(|| on(PEER)));
    NewRing { cache: [7; 16], number, identity: [0; 32], copies }
}

fn here(device: u16, ordinal: u32) -> DataSegment {
    DataSegment { place: segment(device, 0), ordinal, seconds_only: false }
}

fn there(ordinal: u32) -> DataSegment {
    DataSegment { place: segment(PEER, u64::from(ordinal) * MIB), ordinal, seconds_only: true }
}

/// Creates a cache with two segments on two devices of this host, and one segment on the peer.
fn bench(segments: Vec<DataSegment>, at_peer: bool) -> Bench {
    let mut bench = Bench::bare(Limits::default());
    bench.engine.lend(BufferId(1 << 20), 1 << 20);
    let config = CacheConfig {
        mode: Mode::WriteBack,
        destage: Destage { full_permille: 1000, ..lazy() },
        copies: Copies::Peer,
        ..config(MIB, 4 * KIB)
    };
    let enable = Enable { config, segments, journal: Some(ring(1, at_peer)), recovered: None };
    bench.start_change(CacheChange::Enable(Box::new(enable)));
    bench.settle();
    bench
}

/// Waits until the maintenance has checked all frames.
fn look_after(bench: &mut Bench) {
    for _ in 0..5 {
        bench.wait_ms(1100);
        bench.settle();
    }
}

#[test]
fn the_peer_has_dirty_data_and_no_clean_data() {
    let mut bench = bench(vec![here(0, 0), here(1, 1), there(2)], true);
    let write = bench.write(0, 8 * KIB);
    let targets: Vec<_> = bench.ios.iter().map(|io| io.target).collect();
    assert_eq!((targets.len(), targets[1]), (2, flash(PEER)));
    assert_ne!(targets[0], flash(PEER));
    bench.end_of(targets[0]);
    assert_eq!(bench.reply(write), None, "both have to have it");
    bench.settle();
    assert_eq!(bench.outcome(write), Outcome::WriteBack);
    // Reads fill this host's flash completely, and nothing is written to the peer.
    for block in 2..600 {
        bench.read(block * 4 * KIB, 4 * KIB);
        while let Some(io) = bench.ios.pop_front() {
            let is_page = io.op == IoOp::WriteJournal || io.op == IoOp::Flush;
            assert!(io.target != flash(PEER) || is_page, "{io:?}");
            bench.end(io);
        }
    }
    // A hit on dirty data reads only this host's flash.
    let hit = bench.read(0, 4 * KIB);
    assert!(bench.ios.iter().all(|io| io.target != flash(PEER)));
    bench.settle();
    assert_eq!(bench.outcome(hit), Outcome::Hit);
}

#[test]
fn without_room_at_a_peer_nothing_becomes_dirty() {
    for (segments, at_peer) in [
        (vec![here(0, 0), here(1, 1)], true),
        // A second device of this host is no peer, and a device without a journal is not used for
        // data.
        (vec![here(0, 0), here(1, 1), there(2)], false),
    ] {
        let mut bench = bench(segments, at_peer);
        let outcome = bench.write_alone(0, 8 * KIB);
        assert_ne!(outcome, Outcome::WriteBack);
        assert_eq!(bench.stats().sectors_dirty, 0);
        look_after(&mut bench);
        assert!(!bench.stats().doubled);
    }
}

#[test]
fn a_peer_that_is_full_takes_no_more_and_evicts_nothing() {
    let mut bench = bench(vec![here(0, 0), here(1, 1), there(2)], true);
    for block in 0..256 {
        assert_eq!(bench.write_alone(block * 4 * KIB, 4 * KIB), Outcome::WriteBack, "{block}");
    }
    let before = bench.stats().evictions.blocks;
    assert_ne!(bench.write_alone(300 * 4 * KIB, 4 * KIB), Outcome::WriteBack);
    assert_eq!((bench.stats().evictions.blocks, bench.stats().sectors_dirty), (before, 256));
    // Sectors that are dirty already may be overwritten.
    assert_eq!(bench.write_alone(0, 4 * KIB), Outcome::WriteBack);
}

#[test]
fn doubled_is_said_when_everything_has_been_looked_at() {
    let mut bench = bench(vec![here(0, 0), there(1)], true);
    bench.write_alone(0, 8 * KIB);
    look_after(&mut bench);
    assert!(bench.stats().doubled);
    bench.write_alone(64 * KIB, 8 * KIB);
    assert!(bench.stats().doubled, "what comes is doubled when it comes");
    // The peer fails suddenly.
    bench.engine.give_up_device(DeviceId(PEER));
    bench.drain();
    assert!(
        bench.events.iter().any(|event| matches!(event, Event::Fenced { device: DeviceId(PEER), errors: 0 }))
    );
    let leave = CacheChange::Leave(DeviceId(PEER), vec![], Some(ring(2, false)));
    let left = bench.start_change(leave);
    bench.settle();
    assert!(bench.result(left).expect("done").is_ok(), "dirty data has its first copy here");
    assert_eq!((bench.stats().doubled, bench.stats().sectors_dirty), (false, 4));
    assert_ne!(bench.write_alone(128 * KIB, 4 * KIB), Outcome::WriteBack);
    // Another device is added, and dirty data is written there before this is recorded.
    let again = DataSegment { place: segment(PEER + 1, 0), ordinal: 1, seconds_only: true };
    let mut copies = ring(3, false);
    copies.copies.push((0..8).map(|i| segment(PEER + 1, 16 * MIB + i * MIB)).collect());
    let grown = bench.start_change(CacheChange::Grow(vec![again], Some(copies)));
    while bench.result(grown).is_none() {
        assert!(!bench.stats().doubled);
        let io = bench.ios.pop_front().expect("the ring is written");
        bench.end(io);
    }
    assert!(!bench.stats().doubled, "nobody has looked yet");
    look_after(&mut bench);
    assert!(bench.stats().doubled);
    assert_eq!(bench.write_alone(128 * KIB, 4 * KIB), Outcome::WriteBack);
}

/// This host's devices are lost: dirty data is read from the peer and destaged at once, because no
/// more data can become dirty.
#[test]
fn data_that_this_host_lost_is_read_from_the_peer() {
    let mut bench = bench(vec![here(0, 0), here(1, 1), there(2)], true);
    bench.write_alone(0, 8 * KIB);
    let (mut written, mut read) = (0, 0);
    for device in [0, 1] {
        bench.engine.give_up_device(DeviceId(device));
        let ring = ring(2 + u32::from(device), true);
        let left = bench.start_change(CacheChange::Leave(DeviceId(device), vec![], Some(ring)));
        let mut idle = 0;
        while idle < 20 {
            let Some(io) = bench.ios.pop_front() else {
                idle += 1;
                bench.wait_ms(100);
                continue;
            };
            written += if io.target == backing() && io.op == VOLATILE { io.len } else { 0 };
            read += if io.target == flash(PEER) && io.op == IoOp::Read { io.len } else { 0 };
            bench.end(io);
        }
        assert!(bench.result(left).expect("done").is_ok(), "{device}");
    }
    assert_eq!((written, bench.stats().sectors_dirty, bench.stats().sectors_lost), (8 * KIB, 0, 0));
    assert!(read >= 8 * KIB, "{read}");
    let hit = bench.read(0, 8 * KIB);
    assert!(!bench.ios.is_empty() && bench.ios.iter().all(|io| io.target == flash(PEER)), "{:?}", bench.ios);
    bench.settle();
    assert_eq!(bench.outcome(hit), Outcome::Hit);
    assert_ne!(bench.write_alone(0, 8 * KIB), Outcome::WriteBack);
}

impl Bench {
    /// Completes the first I/O to this target.
    fn end_of(&mut self, target: Target) {
        let at = self.ios.iter().position(|io| io.target == target).expect("there is one");
        let io = self.ios.remove(at).expect("as just seen");
        self.end(io);
    }
}
