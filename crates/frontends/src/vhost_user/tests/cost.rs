//! Tests the cost of one request and of one turn of a driver, and queues that cannot be served.

use super::*;

/// A migrating client gets the start index of each queue, also of one that could not be served.
#[test]
fn a_queue_that_was_not_served_begins_where_it_was_to_begin() {
    let mut rig = Rig::new();
    let layout = Layout { size: 3, descriptors: DESCRIPTORS, available: AVAILABLE, used: USED };
    let start = Start::new(1, rig.map.clone(), layout, 77, info().features());
    assert!(rig.device.start(start).is_err(), "a size that is no power of two");
    assert_eq!(rig.device.poll_stopped(1), Some(77));
    assert_eq!(rig.device.poll_stopped(2), Some(0), "a queue that never was");
}

/// One turn takes a limited number of descriptors, however few bytes they name.
#[test]
fn a_machine_with_long_chains_leaves_the_turn_to_others() {
    let mut rig = Rig::new();
    rig.header(8, 0);
    let parts: Vec<_> = [(HEADER, 16, 0)].into_iter().chain(vec![(DATA, 0, 0); 5]).collect();
    rig.chain(DESCRIPTORS, 0, &[&parts[..], &[(STATUS, 1, WRITE)]].concat());
    let mut budget = Budget { left: 20 };
    for _ in 0..4 {
        rig.offer(0);
    }
    let taken = rig.device.take(0, &mut budget, &mut rig.payload).unwrap();
    assert_eq!((taken, budget.left), (3, 0), "seven descriptors each");
    assert!(rig.device.has_work(0));
    assert_eq!(rig.take(), Ok(1));
    assert_eq!(rig.status(), 1, "a name without its twenty bytes");
}

/// A chain of gigabytes is refused, and the dirty log does not mark its memory as changed.
#[test]
fn a_chain_longer_than_any_request_is_refused() {
    let mut rig = Rig::new();
    rig.header(0, 0);
    let long = (DATA, 40 << 20, WRITE);
    rig.chain(DESCRIPTORS, 0, &[(HEADER, 16, 0), long, (STATUS, 1, WRITE)]);
    rig.offer(0);
    assert_eq!(rig.take(), Ok(1));
    assert!(rig.device.poll_request().is_none());
    assert_eq!((rig.status(), rig.device.chain.fault), (1, Some(Fault::Long)));
}
