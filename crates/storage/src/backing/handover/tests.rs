//! Tests which of the two backings receives which requests. The drivers are simulated and move no
//! data.

use hob_engine::io::{BufferSlice, Durability, Target};
use hob_engine::units::{BufferId, DiskId};

use super::*;
use crate::ring::RingConfig;

/// Records its requests, and completes them when the test says so.
struct Fake {
    info: BackingInfo,
    asked: std::sync::Arc<std::sync::Mutex<Vec<Io>>>,
    answer: std::sync::Arc<std::sync::Mutex<Option<Result<(), IoError>>>>,
    open: Vec<IoId>,
    done: VecDeque<(IoId, Result<(), IoError>)>,
    closed: bool,
}

#[derive(Clone)]
struct Handle {
    asked: std::sync::Arc<std::sync::Mutex<Vec<Io>>>,
    answer: std::sync::Arc<std::sync::Mutex<Option<Result<(), IoError>>>>,
}

impl Handle {
    fn answers(&self, answer: Option<Result<(), IoError>>) {
        *self.answer.lock().unwrap() = answer;
    }

    fn take(&self) -> Vec<u32> {
        std::mem::take(&mut *self.asked.lock().unwrap()).iter().map(|io| io.id.0).collect()
    }
}

fn fake() -> (Box<Fake>, Handle) {
    let handle = Handle {
        asked: Default::default(),
        answer: std::sync::Arc::new(std::sync::Mutex::new(Some(Ok(())))),
    };
    let info = BackingInfo::simulated(1 << 20, 1);
    let fake = Fake {
        info,
        asked: handle.asked.clone(),
        answer: handle.answer.clone(),
        open: vec![],
        done: VecDeque::new(),
        closed: false,
    };
    (Box::new(fake), handle)
}

impl Driver for Fake {
    fn info(&self) -> &BackingInfo {
        &self.info
    }
    fn attach(&mut self, _: &mut Ring, _: Instant, _: TokenSpace) {}
    fn submit(&mut self, _: &mut Ring, _: Instant, io: &Io) {
        assert!(!self.closed, "nothing is asked of a backing that was closed");
        self.asked.lock().unwrap().push(*io);
        match *self.answer.lock().unwrap() {
            Some(answer) => self.done.push_back((io.id, answer)),
            None => self.open.push(io.id),
        }
    }
    fn handle_completion(&mut self, _: &mut Ring, _: Instant, _: Completion) {}
    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        self.done.pop_front()
    }
    fn submit_status(&mut self, _: &mut Ring, _: Instant, _: u64, _: u64, _: u64) {}
    fn poll_status(&mut self) -> Option<(u64, Status)> {
        None
    }
    fn close(&mut self, _: &mut Ring) {
        self.closed = true;
        self.done.extend(self.open.drain(..).map(|io| (io, Err(IoError::ShuttingDown))));
    }
    fn is_closed(&self) -> bool {
        self.closed
    }
}

struct Bench {
    both: Handover,
    ring: Ring,
    own: Handle,
    next: u32,
    now: Instant,
}

impl Bench {
    fn new() -> Bench {
        let (own, own_handle) = fake();
        let mut ring = Ring::new(&RingConfig::default()).unwrap();
        let mut both = Handover::new(own, WAIT_MAX);
        both.attach(&mut ring, Instant(0), TokenSpace::new(Token::BACKING, 0));
        Bench { both, ring, own: own_handle, next: 0, now: Instant(0) }
    }

    fn peer(&mut self) -> Handle {
        let (peer, handle) = fake();
        self.both.set_peer(&mut self.ring, self.now, peer);
        handle
    }

    fn submit(&mut self, op: IoOp, first: u64, sectors: u64) -> u32 {
        self.next += 1;
        let (offset, len) = (first * SECTOR_BYTES, sectors * SECTOR_BYTES);
        let slice = Some(BufferSlice { id: BufferId(0), offset: 0, len: len as u32 });
        let io = Io { id: IoId(self.next), target: Target::Backing(DiskId(0)), op, offset, len, slice };
        self.both.submit(&mut self.ring, self.now, &io);
        self.next
    }

    fn done(&mut self) -> Vec<(u32, Result<(), IoError>)> {
        std::iter::from_fn(|| self.both.poll_done()).map(|(io, result)| (io.0, result)).collect()
    }

    fn take_over(&mut self) {
        self.both.take_over(&mut self.ring, self.now);
    }

    fn pass(&mut self, ns: u64) {
        self.now = self.now + ns;
        self.both.handle_timeout(&mut self.ring, self.now);
    }
}

/// The limit of the waits at the start of a test.
const WAIT_MAX: Duration = Duration::from_secs(30);
const WAIT_NS_MAX: u64 = 30_000_000_000;

const WRITE: IoOp = IoOp::Write(Durability::Volatile);

#[test]
fn in_standby_the_owner_is_read_and_nothing_is_written() {
    let mut bench = Bench::new();
    let early = bench.submit(IoOp::Read, 0, 4);
    assert!(bench.done().is_empty(), "it waits for the owner");
    let peer = bench.peer();
    assert_eq!((peer.take(), bench.own.take(), bench.done()), (vec![early], vec![], vec![(early, Ok(()))]));
    let write = bench.submit(WRITE, 0, 4);
    let flush = bench.submit(IoOp::Flush, 0, 0);
    assert_eq!(bench.own.take(), [flush], "an earlier life may have written");
    assert_eq!(bench.done(), [(write, Err(IoError::ShuttingDown)), (flush, Ok(()))]);
    peer.answers(Some(Err(IoError::Unsupported)));
    let read = bench.submit(IoOp::Read, 0, 4);
    assert!(bench.done().is_empty(), "who is not the owner any more is not believed");
    peer.answers(Some(Ok(())));
    bench.pass(RETRY_NS);
    assert_eq!((bench.done(), bench.own.take()), (vec![(read, Ok(()))], vec![]));
}

#[test]
fn in_standby_nothing_waits_for_ever() {
    let mut bench = Bench::new();
    let peer = bench.peer();
    peer.answers(Some(Err(IoError::Failed)));
    let read = bench.submit(IoOp::Read, 0, 4);
    for _ in 0..WAIT_NS_MAX / RETRY_NS - 1 {
        bench.pass(RETRY_NS);
        assert!(bench.done().is_empty());
    }
    bench.pass(RETRY_NS);
    assert_eq!(bench.done(), [(read, Err(IoError::Failed))]);
    assert!(bench.own.take().is_empty() && bench.both.poll_timeout().is_none());
}

/// The disk's backing timeout is also the limit for reads in standby, and may change while reads
/// wait.
#[test]
fn in_standby_reads_wait_as_long_as_for_a_backing() {
    let mut bench = Bench::new();
    bench.both.set_wait_max(bench.now, WaitMax::Set(crate::backing::WAIT_FOREVER));
    let waits = bench.submit(IoOp::Read, 0, 4);
    let peer = bench.peer();
    assert_eq!((peer.take(), bench.done()), (vec![waits], vec![(waits, Ok(()))]));
    peer.answers(Some(Err(IoError::Failed)));
    let retried = bench.submit(IoOp::Read, 0, 4);
    for _ in 0..10 {
        bench.pass(WAIT_NS_MAX);
        assert!(bench.done().is_empty());
    }
    peer.answers(Some(Ok(())));
    bench.pass(RETRY_NS);
    assert_eq!(bench.done(), [(retried, Ok(()))]);
    peer.answers(Some(Err(IoError::Failed)));
    for change in [WaitMax::AtMost(Duration::from_millis(50)), WaitMax::Expired] {
        let ends = bench.submit(IoOp::Read, 0, 4);
        bench.pass(RETRY_NS / 2);
        bench.both.set_wait_max(bench.now, change);
        assert!(bench.both.poll_timeout().is_some_and(|at| at <= bench.now));
        bench.pass(0);
        assert_eq!(bench.done(), [(ends, Err(IoError::Failed))]);
        bench.both.set_wait_max(bench.now, WaitMax::Set(WAIT_MAX));
    }
    assert!(bench.own.take().is_empty());
}

#[test]
fn after_the_hand_over_unchanged_ranges_are_read_from_the_peer() {
    let mut bench = Bench::new();
    bench.both.peer_has(10, 20);
    bench.take_over();
    let before = bench.submit(IoOp::Read, 12, 4);
    assert_eq!(bench.own.take(), [before], "nobody is there yet");
    let peer = bench.peer();
    let inside = bench.submit(IoOp::Read, 12, 4);
    let half = bench.submit(IoOp::Read, 18, 4);
    assert_eq!((peer.take(), bench.own.take()), (vec![inside], vec![half]));
    for (op, at) in
        [(WRITE, 12), (IoOp::Discard, 14), (IoOp::WriteZeroes(hob_engine::io::Zeroing::MayUnmap), 16)]
    {
        let change = bench.submit(op, at, 1);
        let read = bench.submit(IoOp::Read, at, 1);
        assert_eq!((peer.take(), bench.own.take()), (vec![], vec![change, read]));
    }
    let beside = bench.submit(IoOp::Read, 13, 1);
    assert_eq!(peer.take(), [beside]);
    assert!(bench.done().iter().all(|(_, result)| result.is_ok()));
}

#[test]
fn a_peer_that_fails_is_left_and_costs_the_guest_nothing() {
    let mut bench = Bench::new();
    bench.both.peer_has(0, 100);
    bench.take_over();
    let peer = bench.peer();
    peer.answers(Some(Err(IoError::Unsupported)));
    let uncached = bench.submit(IoOp::Read, 1, 1);
    assert!(bench.both.has_peer(), "that it has not cached something is no failure");
    peer.answers(None);
    let waits = bench.submit(IoOp::Read, 2, 1);
    peer.answers(Some(Err(IoError::Failed)));
    let fails = bench.submit(IoOp::Read, 3, 1);
    assert!(!bench.both.has_peer());
    let after = bench.submit(IoOp::Read, 4, 1);
    bench.both.collect(&mut bench.ring, bench.now);
    let mut own = bench.own.take();
    own.sort_unstable();
    assert_eq!(own, [uncached, waits, fails, after]);
    assert_eq!(bench.done().len(), 4);
}

#[test]
fn reads_that_wait_for_the_owner_are_served_by_the_backing_after_the_hand_over() {
    let mut bench = Bench::new();
    let peer = bench.peer();
    peer.answers(None);
    let waits = bench.submit(IoOp::Read, 2, 1);
    bench.take_over();
    assert_eq!((bench.own.take(), bench.done()), (vec![waits], vec![(waits, Ok(()))]));
    bench.both.close(&mut bench.ring);
    assert!(bench.both.is_closed());
}

#[test]
fn written_ranges_are_never_read_from_the_peer_again() {
    let mut bench = Bench::new();
    bench.both.peer_has(10, 12);
    bench.take_over();
    let before = bench.submit(WRITE, 14, 1);
    let peer = bench.peer();
    let after = bench.submit(WRITE, 16, 1);
    // The rest of the list, and then the whole list again, as after a lost connection.
    for _ in 0..2 {
        bench.both.peer_has(10, 20);
        let written = [bench.submit(IoOp::Read, 14, 1), bench.submit(IoOp::Read, 15, 3)];
        let others = [bench.submit(IoOp::Read, 10, 4), bench.submit(IoOp::Read, 15, 1)];
        assert_eq!(peer.take(), others);
        let own = bench.own.take();
        assert!(own.ends_with(&written), "{own:?}, after {before} and {after}");
    }
    let peer = bench.peer();
    bench.both.peer_has(0, 100);
    let (written, other) = (bench.submit(IoOp::Read, 14, 1), bench.submit(IoOp::Read, 13, 1));
    assert_eq!((bench.own.take(), peer.take()), (vec![written], vec![other]));
    bench.both.leave_peer(&mut bench.ring, bench.now);
    bench.both.peer_has(0, 100);
    let peer = bench.peer();
    let read = bench.submit(IoOp::Read, 13, 1);
    assert_eq!((bench.own.take(), peer.take()), (vec![read], vec![]), "it was left for good");
}
