//! Tests which backing receives which requests. The clone's own backing is simulated and moves no
//! data.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use hob_engine::io::{Durability, Target, Zeroing};
use hob_engine::units::{BufferId, DiskId};
use proptest::prelude::*;

use super::*;
use crate::ring::RingConfig;
use crate::token::Token;

const OBJECT: u64 = 16 << 10;
const SECTOR: u64 = SECTOR_BYTES;

type Done = Arc<Mutex<VecDeque<(IoId, Result<(), IoError>)>>>;

#[derive(Default)]
struct Asked {
    ios: Vec<Io>,
    common_bytes: u64,
}

/// A simulated backing that completes nothing by itself.
struct Fake {
    info: BackingInfo,
    asked: Arc<Mutex<Asked>>,
    done: Done,
    closed: bool,
}

impl Driver for Fake {
    fn info(&self) -> &BackingInfo {
        &self.info
    }
    fn attach(&mut self, _: &mut Ring, _: Instant, _: TokenSpace) {}
    fn submit(&mut self, _: &mut Ring, _: Instant, io: &Io) {
        self.asked.lock().unwrap().ios.push(*io);
    }
    fn handle_completion(&mut self, _: &mut Ring, _: Instant, _: Completion) {}
    fn poll_done(&mut self) -> Option<(IoId, Result<(), IoError>)> {
        self.done.lock().unwrap().pop_front()
    }
    fn submit_status(&mut self, _: &mut Ring, _: Instant, _: u64, _: u64, _: u64) {}
    fn poll_status(&mut self) -> Option<(u64, Status)> {
        None
    }
    fn close(&mut self, _: &mut Ring) {
        self.closed = true;
    }
    fn is_closed(&self) -> bool {
        self.closed
    }
    fn common_bytes(&self) -> u64 {
        self.asked.lock().unwrap().common_bytes
    }
}

struct Bench {
    clone: Overlay,
    ring: Ring,
    asked: Arc<Mutex<Asked>>,
    done: Done,
    next: u32,
}

impl Bench {
    /// Creates a linked clone of eight objects, of which six are shared with the parent and the
    /// second was written.
    fn new() -> Bench {
        let info = BackingInfo::simulated(8 * OBJECT, 512);
        let asked = Arc::new(Mutex::new(Asked { ios: vec![], common_bytes: 6 * OBJECT }));
        let done = Arc::new(Mutex::new(VecDeque::new()));
        let own = Fake { info, asked: asked.clone(), done: done.clone(), closed: false };
        let mut map = OwnMap::new(OBJECT, 6 * OBJECT);
        map.take(OBJECT, 1);
        let mut clone = Overlay::new(Box::new(own), map);
        let mut ring = Ring::new(&RingConfig::default()).unwrap();
        clone.attach(&mut ring, Instant(0), TokenSpace::new(Token::BACKING, 0));
        clone.link_parent(Some(8 * OBJECT));
        Bench { clone, ring, asked, done, next: 0 }
    }

    fn submit(&mut self, op: IoOp, offset: u64, len: u64) -> IoId {
        self.next += 1;
        let id = IoId(self.next);
        let has_buffer = matches!(op, IoOp::Read | IoOp::Write(_));
        let slice = has_buffer.then_some(BufferSlice { id: BufferId(7), offset: 4096, len: len as u32 });
        let io = Io { id, target: Target::Backing(DiskId(0)), op, offset, len, slice };
        self.clone.submit(&mut self.ring, Instant(0), &io);
        id
    }

    fn read(&mut self, offset: u64, len: u64) -> IoId {
        self.submit(IoOp::Read, offset, len)
    }

    /// Returns the requests to the own backing since the last call.
    fn own(&mut self) -> Vec<Io> {
        std::mem::take(&mut self.asked.lock().unwrap().ios)
    }

    fn end_own(&mut self, io: &Io, result: Result<(), IoError>) {
        self.done.lock().unwrap().push_back((io.id, result));
    }

    fn parents(&mut self) -> Vec<ParentRead> {
        std::iter::from_fn(|| self.clone.poll_parent_read()).collect()
    }

    fn end_parents(&mut self, read: &ParentRead, result: Result<(), IoError>) {
        self.clone.handle_parent_read(&mut self.ring, Instant(0), read.number, result);
    }
}

#[test]
fn a_read_of_unwritten_data_is_served_by_the_parent_and_marked() {
    let mut bench = Bench::new();
    let id = bench.read(2 * OBJECT, 2 * OBJECT);
    let reads = bench.parents();
    assert_eq!(reads.len(), 1, "{reads:?}");
    assert_eq!((reads[0].io, reads[0].offset, reads[0].len), (id, 2 * OBJECT, 2 * OBJECT));
    assert_eq!(reads[0].slice, BufferSlice { id: BufferId(7), offset: 4096, len: 2 * OBJECT as u32 });
    assert!(bench.own().is_empty() && bench.clone.poll_done().is_none());
    bench.end_parents(&reads[0], Ok(()));
    assert_eq!(bench.clone.poll_done(), Some((id, Ok(()))));
    let object = OBJECT / SECTOR;
    assert_eq!(bench.clone.take_shared(id), [(2 * object, 4 * object)]);
    assert!(bench.clone.take_shared(id).is_empty(), "once");
}

#[test]
fn a_read_of_both_is_split_at_objects() {
    let mut bench = Bench::new();
    let id = bench.read(OBJECT - SECTOR, OBJECT + 2 * SECTOR);
    let (reads, own) = (bench.parents(), bench.own());
    assert_eq!((reads.len(), own.len()), (2, 1));
    assert_eq!((own[0].offset, own[0].len), (OBJECT, OBJECT));
    let slice = BufferSlice { id: BufferId(7), offset: 8192, len: OBJECT as u32 };
    assert_eq!(own[0].slice, Some(slice));
    assert_ne!(own[0].id, id);
    assert_eq!((reads[1].offset, reads[1].slice.offset), (2 * OBJECT, (8192 + OBJECT) as u32));
    bench.end_parents(&reads[1], Ok(()));
    bench.end_own(&own[0], Ok(()));
    assert_eq!(bench.clone.poll_done(), None);
    bench.end_parents(&reads[0], Ok(()));
    assert_eq!(bench.clone.poll_done(), Some((id, Ok(()))));
    let object = OBJECT / SECTOR;
    assert_eq!(bench.clone.take_shared(id), [(2 * object, 2 * object + 1), (object - 1, object)]);
}

#[test]
fn written_ranges_are_the_clones_before_the_backing_has_them() {
    let changes = [IoOp::Write(Durability::Volatile), IoOp::Discard, IoOp::WriteZeroes(Zeroing::MayUnmap)];
    for op in changes {
        let mut bench = Bench::new();
        bench.submit(op, 3 * OBJECT - 512, 1024);
        assert_eq!(bench.own().len(), 1);
        // No request has completed.
        bench.read(2 * OBJECT, 2 * OBJECT);
        assert_eq!((bench.own().len(), bench.parents()), (1, vec![]), "{op:?}");
        bench.read(4 * OBJECT, OBJECT);
        assert_eq!((bench.own().len(), bench.parents().len()), (0, 1), "{op:?}");
    }
    let mut bench = Bench::new();
    bench.submit(IoOp::Flush, 0, 0);
    bench.read(0, OBJECT);
    assert_eq!((bench.own().len(), bench.parents().len()), (1, 1));
}

#[test]
fn reads_that_fail_in_the_parents_disk_use_the_own_backing() {
    let mut bench = Bench::new();
    let id = bench.read(0, 2 * SECTOR);
    let read = bench.parents()[0];
    bench.end_parents(&read, Err(IoError::ShuttingDown));
    let own = bench.own();
    assert_eq!((own[0].offset, own[0].len), (0, 2 * SECTOR));
    bench.end_own(&own[0], Ok(()));
    assert_eq!(bench.clone.poll_done(), Some((id, Ok(()))));
    assert!(bench.clone.take_shared(id).is_empty(), "it is promoted as ever");
    // If the own backing fails too, the read fails, once.
    let id = bench.read(0, 2 * OBJECT);
    let (read, mixed) = (bench.parents()[0], bench.own());
    bench.end_own(&mixed[0], Err(IoError::Failed));
    assert_eq!(bench.clone.poll_done(), None);
    bench.end_parents(&read, Ok(()));
    assert_eq!(bench.clone.poll_done(), Some((id, Err(IoError::Failed))));
    assert!(bench.clone.take_shared(id).is_empty());
}

#[test]
fn without_a_parents_disk_the_backing_is_used_directly() {
    let mut bench = Bench::new();
    bench.clone.link_parent(None);
    let id = bench.read(0, 2 * OBJECT);
    let own = bench.own();
    assert_eq!((own.len(), own[0].id, own[0].len), (1, id, 2 * OBJECT));
    // Writes in the meantime are known when the parent's disk is available again.
    bench.submit(IoOp::Discard, 0, SECTOR);
    bench.clone.link_parent(Some(8 * OBJECT));
    bench.own();
    bench.read(0, SECTOR);
    assert_eq!((bench.own().len(), bench.parents().len()), (1, 0));
    bench.read(5 * OBJECT, SECTOR);
    assert_eq!((bench.own().len(), bench.parents().len()), (0, 1));
    // Flattened or cut off: the clone uses nothing of its parent any more.
    bench.asked.lock().unwrap().common_bytes = 5 * OBJECT;
    bench.read(5 * OBJECT, SECTOR);
    assert_eq!((bench.own().len(), bench.parents().len()), (1, 0));
    bench.asked.lock().unwrap().common_bytes = 8 * OBJECT;
    bench.read(5 * OBJECT, SECTOR);
    assert_eq!((bench.own().len(), bench.parents().len()), (1, 0));
}

/// The parent may be smaller than the clone, and end inside a sector.
#[test]
fn past_the_end_of_the_parent_the_backing_is_used() {
    let mut bench = Bench::new();
    bench.clone.link_parent(Some(4 * OBJECT + SECTOR + 512));
    let id = bench.read(4 * OBJECT, OBJECT);
    let (reads, own) = (bench.parents(), bench.own());
    assert_eq!((reads.len(), reads[0].offset, reads[0].len), (1, 4 * OBJECT, SECTOR));
    assert_eq!((own.len(), own[0].offset, own[0].len), (1, 4 * OBJECT + SECTOR, OBJECT - SECTOR));
    bench.end_parents(&reads[0], Ok(()));
    bench.end_own(&own[0], Ok(()));
    assert_eq!(bench.clone.poll_done(), Some((id, Ok(()))));
    // A larger parent later does not change that.
    bench.clone.link_parent(Some(8 * OBJECT));
    bench.read(5 * OBJECT, SECTOR);
    assert_eq!((bench.own().len(), bench.parents().len()), (1, 0));
}

#[test]
fn closing_waits_for_reads_in_the_parents_disk() {
    let mut bench = Bench::new();
    let (first, second) = (bench.read(0, SECTOR), bench.read(2 * OBJECT, SECTOR));
    let taken = bench.clone.poll_parent_read().unwrap();
    bench.clone.close(&mut bench.ring);
    assert_eq!(bench.clone.poll_done(), Some((second, Err(IoError::ShuttingDown))));
    assert!(!bench.clone.is_closed());
    bench.end_parents(&taken, Err(IoError::Failed));
    assert_eq!(bench.clone.poll_done(), Some((first, Err(IoError::ShuttingDown))));
    assert!(bench.clone.is_closed() && bench.own().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// For any requests in any order with any results: every read ends once, all of its sectors
    /// come from one backing, and never from the parent if the object was changed before.
    #[test]
    fn every_sector_comes_from_one_place(
        steps in prop::collection::vec((0u8..8, 0u64..32, 1u64..12, any::<bool>()), 1..60),
    ) {
        let mut bench = Bench::new();
        let mut touched = BTreeSet::from([1u64]);
        let mut wanted = std::collections::BTreeMap::new();
        let (mut at_own, mut at_parent) = (Vec::<Io>::new(), Vec::<ParentRead>::new());
        for (what, first, sectors, good) in steps {
            let sectors = sectors.min(32 - first);
            let result = if good { Ok(()) } else { Err(IoError::Failed) };
            let range = first..first + sectors;
            match what {
                0..=3 => {
                    let id = bench.read(first * SECTOR, sectors * SECTOR);
                    wanted.insert(id.0, (range, touched.clone()));
                }
                4 => {
                    bench.submit(IoOp::Discard, first * SECTOR, sectors * SECTOR);
                    touched.extend(range.map(|sector| sector * SECTOR / OBJECT));
                }
                5 => bench.clone.link_parent(good.then_some(8 * OBJECT)),
                6 if !at_own.is_empty() => {
                    let io = at_own.remove(first as usize % at_own.len());
                    bench.end_own(&io, result);
                }
                _ if !at_parent.is_empty() => {
                    let read = at_parent.remove(first as usize % at_parent.len());
                    bench.end_parents(&read, result);
                }
                _ => {}
            }
            at_own.extend(bench.own().into_iter().filter(|io| io.op == IoOp::Read));
            for read in bench.parents() {
                let (range, touched) = &wanted[&read.io.0];
                let (from, to) = (read.offset / SECTOR, (read.offset + read.len) / SECTOR);
                prop_assert!(range.start <= from && to <= range.end);
                prop_assert!((from..to).all(|sector| !touched.contains(&(sector * SECTOR / OBJECT))));
                at_parent.push(read);
            }
            while let Some((id, result)) = bench.clone.poll_done() {
                let Some((range, _)) = wanted.remove(&id.0) else { continue };
                let shared = bench.clone.take_shared(id);
                prop_assert!(result.is_ok() || shared.is_empty());
                let mut seen = BTreeSet::new();
                for sector in shared.iter().flat_map(|(from, to)| *from..*to) {
                    prop_assert!(range.contains(&sector) && seen.insert(sector));
                }
            }
        }
        // All requests end.
        while !at_own.is_empty() || !at_parent.is_empty() {
            at_own.drain(..).for_each(|io| bench.end_own(&io, Ok(())));
            for read in std::mem::take(&mut at_parent) {
                bench.end_parents(&read, Err(IoError::Failed));
            }
            while let Some((id, _)) = bench.clone.poll_done() {
                wanted.remove(&id.0);
                bench.clone.take_shared(id);
            }
            at_own.extend(bench.own().into_iter().filter(|io| io.op == IoOp::Read));
        }
        prop_assert!(wanted.is_empty(), "{:?}", wanted);
        prop_assert!(bench.clone.splits.is_empty() && bench.clone.pieces.is_empty() && bench.clone.shared.is_empty());
    }
}
