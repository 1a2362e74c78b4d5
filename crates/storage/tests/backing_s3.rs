//! A disk in an S3 bucket whose store refuses requests for a while.

mod common;

use std::time::{Duration, Instant};

use common::s3::{Outage, Store};
use common::{PATIENCE, Rig, options, pattern};
use hob_engine::command::Access;
use hob_engine::io::{Durability, IoError, IoOp};
use hob_storage::backing::{Backing, BackingOptions, Condition, objects};
use hob_storage::ring::RingKind;

const OBJECT: u64 = 64 << 10;
const PLAIN: IoOp = IoOp::Write(Durability::Volatile);

/// A disk of 8 MiB in a new store, with one flushed object.
fn stage(wait_max: Duration) -> (Store, Rig, Vec<u8>) {
    hob_clouds::install();
    let store = Store::start();
    let options = BackingOptions { wait_max, ..options() };
    objects::create(&store.spec(), 8 << 20, OBJECT, &options).unwrap();
    let backing = Backing::open(&store.spec(), Access::ReadWrite, &options).unwrap();
    let mut rig = Rig::of(RingKind::IoUring, backing);
    let data = pattern(OBJECT as usize, 1);
    rig.write(PLAIN, 0, &data).unwrap();
    rig.run(IoOp::Flush, 0, 0).unwrap();
    (store, rig, data)
}

/// Requests wait, and do not fail, while the store replies 503 SlowDown, refuses expired credentials
/// or has no bucket.
#[test]
fn requests_wait_while_the_store_is_overloaded_or_refuses_the_credentials() {
    for outage in [Outage::SlowDown, Outage::Forbidden, Outage::ExpiredToken, Outage::NoBucket] {
        let (store, mut rig, data) = stage(Duration::from_secs(25));
        let other = pattern(OBJECT as usize, 2);
        for number in 0..2u64 {
            // A read of the store, and then a write and a flush.
            let refused = store.refused();
            store.refuse(outage);
            let (ends, end) = (store.clone(), Duration::from_secs(3));
            let start = Instant::now();
            let healer = std::thread::spawn(move || {
                while ends.refused() == refused {
                    std::thread::sleep(Duration::from_millis(10));
                }
                std::thread::sleep(end);
                ends.heal();
            });
            match number {
                0 => assert!(rig.read(0, OBJECT as usize).unwrap() == data, "{outage:?}"),
                _ => {
                    rig.write(PLAIN, OBJECT, &other).unwrap();
                    rig.run(IoOp::Flush, 0, 0).unwrap();
                }
            }
            assert!(start.elapsed() >= end, "{outage:?}: it waits");
            assert!(store.refused() > refused, "{outage:?}: the store was asked meanwhile");
            healer.join().unwrap();
        }
        rig.close();
        let mut rig = Rig::open(RingKind::Threads, &store.spec(), Access::ReadWrite);
        assert!(rig.read(OBJECT, OBJECT as usize).unwrap() == other, "{outage:?}: it was stored");
        rig.close();
    }
}

/// Credentials that never worked are refused without further attempts.
#[test]
fn wrong_credentials_are_refused_at_once() {
    hob_clouds::install();
    let store = Store::start();
    store.refuse(Outage::Forbidden);
    let error = objects::create(&store.spec(), 8 << 20, OBJECT, &options()).unwrap_err().to_string();
    assert!(error.contains("denied access"), "{error}");
    assert_eq!(store.refused(), 1);
}

/// Runs the shard loop until the disk's backing is in a state that `is_wanted` accepts.
#[track_caller]
fn await_condition(rig: &mut Rig, is_wanted: impl Fn(&Condition) -> bool) -> Condition {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let condition = rig.backing.monitor().condition();
        if is_wanted(&condition) {
            return condition;
        }
        assert!(Instant::now() < deadline, "the backing is {condition:?}");
        rig.turn();
    }
}

/// An outage is reported with its start, its last error and the number of waiting requests, and
/// ends when the store answers. This also holds for a disk without requests.
#[test]
fn an_outage_of_the_store_is_reported_until_it_ends() {
    for (outage, code) in [
        (Outage::SlowDown, "503"),
        (Outage::Forbidden, "403"),
        (Outage::ExpiredToken, "ExpiredToken"),
        (Outage::NoBucket, "the bucket does not exist"),
    ] {
        let (store, mut rig, data) = stage(PATIENCE);
        // An idle disk notices the outage only after some seconds.
        let loads: &[bool] = if outage == Outage::Forbidden { &[false, true] } else { &[false] };
        for is_idle in loads.iter().copied() {
            assert_eq!(rig.backing.monitor().condition(), Condition::Connected, "{outage:?}");
            store.refuse(outage);
            let read = (!is_idle).then(|| rig.start(IoOp::Read, 0, OBJECT, None));
            let is_outage = |condition: &Condition| matches!(condition, Condition::Reconnecting { .. });
            let condition = await_condition(&mut rig, is_outage);
            let Condition::Reconnecting { outage: length, error, waiting } = condition else {
                unreachable!("the condition is an outage")
            };
            assert!(error.contains(code), "{outage:?}: {error}");
            assert_eq!(waiting, u64::from(!is_idle), "{outage:?}");
            assert!(length >= Duration::from_secs(1), "{outage:?}: {length:?}");
            store.heal();
            if let Some(read) = read {
                rig.wait(read).unwrap();
                assert!(rig.take(read, 0, OBJECT as usize) == data, "{outage:?}");
            }
            await_condition(&mut rig, |condition| *condition == Condition::Connected);
        }
        rig.close();
    }
}

/// After the limit requests fail, and nothing that was written is forgotten.
#[test]
fn requests_fail_after_the_disks_limit_and_later_flushes_store_the_data() {
    let (store, mut rig, _) = stage(Duration::from_secs(2));
    let other = pattern(OBJECT as usize, 2);
    store.refuse(Outage::SlowDown);
    rig.write(PLAIN, OBJECT, &other).unwrap();
    let start = Instant::now();
    assert_eq!(rig.run(IoOp::Flush, 0, 0), Err(IoError::Failed));
    assert!(start.elapsed() >= Duration::from_secs(1));
    store.heal();
    rig.run(IoOp::Flush, 0, 0).unwrap();
    rig.close();
    let mut rig = Rig::open(RingKind::IoUring, &store.spec(), Access::ReadWrite);
    assert!(rig.read(OBJECT, OBJECT as usize).unwrap() == other);
    rig.close();
}
