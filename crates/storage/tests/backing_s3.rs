//! A disk in an S3 bucket whose store refuses requests for a while.

mod common;

use std::time::{Duration, Instant};

use common::s3::{Outage, Store};
use common::{Rig, options, pattern};
use hob_engine::command::Access;
use hob_engine::io::{Durability, IoError, IoOp};
use hob_storage::backing::{Backing, BackingOptions, objects};
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

/// Requests wait, and do not fail, while the store replies 503 SlowDown or refuses expired
/// credentials.
#[test]
fn requests_wait_while_the_store_is_overloaded_or_refuses_the_credentials() {
    for outage in [Outage::SlowDown, Outage::Forbidden, Outage::ExpiredToken] {
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
