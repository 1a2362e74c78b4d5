//! Requests that a simulated driver never completes, or completes late.

use std::sync::{Arc, Mutex};

use hob_engine::io::{Durability, Io, IoOp, Target};
use hob_engine::units::DiskId;

use super::*;
use crate::backing::{BackingInfo, Driver, Status};
use crate::ring::{Completion, RingConfig};
use crate::token::TokenSpace;

#[derive(Default)]
struct CompletionQueue {
    open: Vec<IoId>,
    done: VecDeque<(IoId, Result<(), IoError>)>,
    is_lost: bool,
    is_closing: bool,
}

/// Completes requests when the test says so.
struct Fake(BackingInfo, Arc<Mutex<CompletionQueue>>);

impl Driver for Fake {
    fn info(&self) -> &BackingInfo {
        &self.0
    }
    fn attach(&mut self, _: &mut Ring, _: Instant, _: TokenSpace) {}
    fn submit(&mut self, _: &mut Ring, _: Instant, io: &Io) {
        let mut desk = self.1.lock().unwrap();
        assert!(!desk.is_lost, "nothing is asked of a backing that was abandoned");
        desk.open.push(io.id);
    }
    fn handle_completion(&mut self, _: &mut Ring, _: Instant, _: Completion) {}
    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        self.1.lock().unwrap().done.pop_front()
    }
    fn poll_timeout(&self) -> Option<Instant> {
        None
    }
    fn handle_timeout(&mut self, _: &mut Ring, _: Instant) {}
    fn submit_status(&mut self, _: &mut Ring, _: Instant, _: u64, _: u64, _: u64) {}
    fn poll_status(&mut self) -> Option<(u64, Status)> {
        None
    }
    fn revoke(&mut self, _: &mut Ring, _: Instant) {
        self.1.lock().unwrap().is_lost = true;
    }
    fn close(&mut self, _: &mut Ring) {
        self.1.lock().unwrap().is_closing = true;
    }
    fn is_closed(&self) -> bool {
        let desk = self.1.lock().unwrap();
        desk.is_closing && desk.open.is_empty() && desk.done.is_empty()
    }
}

struct Bench {
    backing: Backing,
    desk: Arc<Mutex<CompletionQueue>>,
    ring: Ring,
}

impl Bench {
    fn new() -> Bench {
        let info = BackingInfo::simulated(1 << 20, 1);
        let desk = Arc::<Mutex<CompletionQueue>>::default();
        let mut ring = Ring::new(&RingConfig::default()).unwrap();
        let mut backing = Backing::of(Box::new(Fake(info, desk.clone())));
        backing.attach(&mut ring, Instant(0), 0);
        Bench { backing, desk, ring }
    }

    fn write(&mut self, id: u32) -> BufferSlice {
        let buffer = self.ring.arena_mut().alloc(4096).unwrap();
        let slice = self.ring.arena().whole(buffer);
        let op = IoOp::Write(Durability::Volatile);
        let target = Target::Backing(DiskId(0));
        let io = Io { id: IoId(id), target, op, offset: 0, len: 4096, slice: Some(slice) };
        self.backing.submit(&mut self.ring, Instant(0), &io);
        slice
    }

    fn end(&mut self, id: u32) {
        let mut desk = self.desk.lock().unwrap();
        desk.open.retain(|open| *open != IoId(id));
        desk.done.push_back((IoId(id), Ok(())));
    }

    fn abandon(&mut self) {
        self.backing.abandon(&mut self.ring, Instant(0));
    }

    fn time(&mut self, ns: u64) {
        self.backing.handle_timeout(&mut self.ring, Instant(ns));
    }
}

#[test]
fn cancellable_requests_end_normally_and_later_ones_are_refused() {
    let mut bench = Bench::new();
    bench.write(1);
    bench.abandon();
    assert_eq!(bench.backing.poll_timeout(), Some(Instant(WAIT_NS)));
    bench.write(2);
    assert_eq!(bench.backing.poll_done(), Some((IoId(2), Err(IoError::ShuttingDown))));
    bench.time(WAIT_NS - 1);
    assert_eq!(bench.backing.poll_abandoned(), None);
    bench.end(1);
    assert_eq!(bench.backing.poll_done(), Some((IoId(1), Ok(()))));
    bench.time(WAIT_NS);
    assert_eq!((bench.backing.poll_abandoned(), bench.backing.poll_timeout()), (None, None));
    bench.backing.close(&mut bench.ring);
    assert!(bench.backing.is_closed());
}

#[test]
fn a_request_that_hangs_is_abandoned_and_its_memory_stays_until_it_ends() {
    let mut bench = Bench::new();
    let slice = bench.write(1);
    bench.abandon();
    bench.time(WAIT_NS);
    assert_eq!(bench.backing.poll_abandoned(), Some(IoId(1)));
    assert_eq!((bench.backing.poll_abandoned(), bench.backing.poll_done()), (None, None));
    assert_eq!(bench.backing.monitor().condition(), crate::backing::Condition::Connected, "none waits");
    // The caller does not need its memory any more.
    bench.ring.arena_mut().release(slice.id);
    let used = bench.ring.arena().used();
    bench.backing.close(&mut bench.ring);
    assert!(!bench.backing.is_closed());
    bench.end(1);
    assert_eq!(bench.backing.poll_done(), None, "nobody hears of it twice");
    assert!(!bench.backing.is_closed());
    assert_eq!(bench.backing.poll_returned(), Some(slice));
    bench.ring.arena_mut().release(slice.id);
    assert_eq!(used - bench.ring.arena().used(), 4096, "free only now");
    assert!(bench.backing.is_closed());
}

/// The backing may still execute changes that have no reply, so another host must wait before it
/// uses the backing.
#[test]
fn changes_that_are_not_answered_may_be_made_later() {
    let submit = |bench: &mut Bench, id: u32, op: IoOp| {
        let target = Target::Backing(DiskId(0));
        let io = Io { id: IoId(id), target, op, offset: 0, len: 0, slice: None };
        bench.backing.submit(&mut bench.ring, Instant(0), &io);
    };
    let flush = |bench: &mut Bench, id: u32| {
        submit(bench, id, IoOp::Flush);
        bench.end(id);
        assert_eq!(bench.backing.poll_done(), Some((IoId(id), Ok(()))));
    };
    let mut bench = Bench::new();
    bench.write(1);
    bench.end(1);
    assert_eq!(bench.backing.poll_done(), Some((IoId(1), Ok(()))));
    submit(&mut bench, 2, IoOp::Read);
    bench.desk.lock().unwrap().done.push_back((IoId(2), Err(IoError::Failed)));
    assert!(bench.backing.poll_done().is_some());
    submit(&mut bench, 3, IoOp::Read);
    bench.abandon();
    assert!(!bench.backing.may_change_later(), "all changes are answered");

    let mut bench = Bench::new();
    bench.write(1);
    bench.abandon();
    bench.time(WAIT_NS);
    assert!(bench.backing.may_change_later(), "a write hangs");

    let mut bench = Bench::new();
    bench.write(1);
    flush(&mut bench, 2);
    assert!(bench.backing.is_unflushed(), "the flush does not cover the write");
    bench.abandon();
    bench.time(WAIT_NS);
    assert!(bench.backing.may_change_later(), "a write hangs, although the server answers flushes");

    let mut bench = Bench::new();
    bench.write(1);
    bench.backing.set_wait_max(Instant(0), WaitMax::Expired);
    bench.end(1);
    assert!(bench.backing.poll_done().is_some());
    assert!(bench.backing.may_change_later(), "the write failed for hob only");
    flush(&mut bench, 2);
    assert!(bench.backing.may_change_later(), "the flush does not cover a write that is not answered");

    let mut bench = Bench::new();
    bench.write(1);
    bench.end(1);
    assert!(bench.backing.poll_done().is_some());
    bench.backing.monitor().note_outage(std::time::Duration::ZERO, "Connection refused");
    assert!(bench.backing.may_change_later(), "the server may have an earlier copy of the write");
    flush(&mut bench, 2);
    assert!(!bench.backing.may_change_later(), "a flush covers the answered write");

    let mut bench = Bench::new();
    bench.write(1);
    bench.desk.lock().unwrap().done.push_back((IoId(1), Err(IoError::Failed)));
    assert!(bench.backing.poll_done().is_some());
    assert!(bench.backing.may_change_later(), "the driver may have waited in vain");
}
