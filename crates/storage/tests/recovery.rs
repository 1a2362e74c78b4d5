//! Recovery of persistent caches from flash. tests/common/journal.rs writes the journals according
//! to the format's page.

mod common;

use std::collections::BTreeMap;
use std::path::PathBuf;

use common::journal::{Change, Frame, Journal, device_file, put_page, put_sector};
use common::pattern;
use hob_engine::command::{DataSegment, Segment};
use hob_storage::pool::recovery::{Found, Recovery, recover};
use hob_storage::pool::{DeviceSpec, Overwrite, OwnerId, Pool, SectorReader, device_bytes_for};

const MIB: u64 = 1 << 20;
const CACHE: OwnerId = OwnerId(0x1234_5678_9ABC_DEF0_0F1E_2D3C_4B5A_6978);
/// Number of frames of a segment.
const FRAMES: u32 = 256;

/// A pool with a cache of three data segments (ordinals 0, 2 and 3) and one ring.
struct Bench {
    dir: tempfile::TempDir,
    paths: Vec<PathBuf>,
    pool: Pool,
    data: Vec<DataSegment>,
    ring: Vec<Vec<Segment>>,
    journal: Journal,
    /// The journal's records by frame on flash, and whether they are dirty.
    index: BTreeMap<u32, (u32, u32, bool)>,
}

fn content(block: u32, version: u32) -> Vec<u8> {
    pattern(4096, block.wrapping_mul(31) + version)
}

fn sum(block: u32, version: u32) -> u32 {
    crc32c::crc32c(&content(block, version))
}

impl Bench {
    fn new(copies: usize) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = ["a", "b"].iter().map(|name| dir.path().join(name)).collect();
        let spec = |path: &PathBuf| DeviceSpec {
            path: path.clone(),
            size_bytes: Some(device_bytes_for(8 * MIB, MIB)),
        };
        let specs: Vec<_> = paths.iter().map(spec).collect();
        let mut pool = Pool::create("p", &specs, MIB, Overwrite::Refuse).unwrap();
        let data = pool.allocate_data(CACHE, 4, 0).unwrap();
        pool.release(&[data[1].place]).unwrap();
        let ring = pool.allocate_ring(CACHE, 5, copies, 1, &[]).unwrap();
        let data = pool.data_of(CACHE);
        let journal = Journal::new(CACHE.0, 5, MIB / 4096, FRAMES);
        Bench { dir, paths, pool, data, ring, journal, index: BTreeMap::new() }
    }

    /// Appends a page to all copies.
    fn page(&mut self, changes: &[Change], dump: &[(u32, &[Frame])]) -> u64 {
        let (number, page) = self.journal.page(changes, dump);
        for copy in &self.ring {
            put_page(&self.pool, copy, number, &page);
        }
        number
    }

    /// Writes a ring: every third frame is clean, every fifth is dirty, both with the correct data
    /// on flash.
    fn start(&mut self) {
        for segment in self.data.clone() {
            let first = segment.ordinal * FRAMES;
            let mut frames = Vec::new();
            for frame in first..first + FRAMES {
                let (block, dirty) = (frame * 7, frame.is_multiple_of(5));
                if !dirty && !frame.is_multiple_of(3) {
                    frames.push(Frame::Empty);
                    continue;
                }
                let sum = sum(block, 0);
                frames.push(if dirty { Frame::Dirty { block, sum } } else { Frame::Clean { block, sum } });
                self.index.insert(frame, (block, sum, dirty));
                put_sector(&self.pool, segment.place, u64::from(frame - first), &content(block, 0));
            }
            self.page(&[], &[(first, &frames)]);
        }
        let end = self.journal.sequence;
        (self.journal.committed, self.journal.dump_begin, self.journal.dump_end) = (end, 1, end);
        self.page(&[], &[]);
    }

    fn recover(&self) -> Found {
        recover(&self.pool, CACHE, |_, _| {}).unwrap()
    }

    fn expect_recovered(&self) -> hob_engine::journal::Recovered {
        match self.recover() {
            Found::Recovered(recovered, remains) => {
                assert_eq!(remains.data, self.data);
                let dirty = self.index.values().filter(|(.., dirty)| *dirty).count() as u64;
                assert_eq!(recovered.summary.sectors_valid, self.index.len() as u64);
                assert_eq!(recovered.summary.sectors_dirty, dirty);
                *recovered
            }
            other => panic!("{other:?}"),
        }
    }

    fn place(&self, frame: u32) -> (Segment, u64) {
        let segment = self.data.iter().find(|segment| segment.ordinal == frame / FRAMES).unwrap();
        (segment.place, u64::from(frame % FRAMES))
    }

    /// Makes data of the first copy unreadable, by truncating the copy's device at this data.
    fn cut(&self, segment: Segment, at: u64) {
        device_file(&self.pool, segment).set_len(segment.offset + at).unwrap();
    }
}

#[test]
fn a_cache_comes_back_as_its_journal_has_it() {
    for copies in [1, 2] {
        let mut bench = Bench::new(copies);
        bench.start();
        // Committed changes, then the tail.
        bench.page(&[Change::Clean { frame: 0, block: 0 }, Change::Drop { frame: 3, block: 21 }], &[]);
        bench.index.get_mut(&0).unwrap().2 = false;
        bench.index.remove(&3);
        bench.journal.committed = bench.journal.sequence;
        bench.page(&[], &[]);
        let recovered = bench.expect_recovered();
        let summary = recovered.summary;
        assert!(!summary.clean);
        assert_eq!((summary.disk_bytes, summary.identity, summary.block_bytes), (1 << 40, [9; 32], 4096));
        assert_eq!((summary.sectors_undone, summary.sectors_distrusted), (0, 0));
        bench.journal.clean = true;
        bench.page(&[], &[]);
        assert!(bench.expect_recovered().summary.clean);
        // Recovery writes nothing: a second recovery gives the same result, also after a restart.
        drop(bench.pool);
        bench.pool = Pool::open(&bench.paths).unwrap();
        assert_eq!(bench.expect_recovered().summary, recovered_summary(&bench));
    }
}

fn recovered_summary(bench: &Bench) -> hob_engine::journal::Summary {
    bench.expect_recovered().summary
}

#[test]
fn the_tail_counts_where_flash_has_its_bytes() {
    let mut bench = Bench::new(2);
    bench.start();
    let mut changes = Vec::new();
    // Frames 1, 4, 7 … are free. The data of every second record never reached flash.
    for (number, frame) in (1..100).step_by(3).filter(|frame| frame % 5 != 0).enumerate() {
        let block = 10_000 + frame;
        changes.push(Change::Set { frame, block, sum: sum(block, 1), dirty: true });
        if number.is_multiple_of(2) {
            let (place, sector) = bench.place(frame);
            put_sector(&bench.pool, place, sector, &content(block, 1));
            bench.index.insert(frame, (block, sum(block, 1), true));
        }
    }
    let lost = changes.len() as u64 / 2;
    assert!(changes.len() > 20 && changes.len() <= 54);
    bench.page(&changes, &[]);
    let recovered = bench.expect_recovered();
    assert_eq!(recovered.summary.sectors_undone, lost);
    // Dirty data can be extracted by command.
    let mut reader = SectorReader::new(&bench.pool).unwrap();
    let dirty: Vec<_> = recovered.dirty().collect();
    assert_eq!(dirty.len() as u64, recovered.summary.sectors_dirty);
    for sector in &dirty {
        let version = u32::from(sector.sector > 10_000);
        assert_eq!(reader.read_dirty(&bench.data, sector), Ok(&content(sector.sector as u32, version)[..]));
    }
    for (disk_sector, sum) in recovered.samples(1000) {
        assert!(
            bench
                .index
                .values()
                .any(|(block, s, dirty)| (u64::from(*block), *s, *dirty) == (disk_sector, sum, false))
        );
    }
}

#[test]
fn data_that_cannot_be_read_is_lost_and_not_undone() {
    let mut bench = Bench::new(2);
    bench.start();
    let last = bench.data[2];
    let frame = last.ordinal * FRAMES + 251;
    assert!(!bench.index.contains_key(&frame), "a free frame");
    let (place, sector) = bench.place(frame);
    put_sector(&bench.pool, place, sector, &content(99, 1));
    bench.page(
        &[Change::Set { frame, block: 99_999, sum: crc32c::crc32c(&content(99, 1)), dirty: true }],
        &[],
    );
    let summary = |bench: &mut Bench| match bench.recover() {
        Found::Recovered(recovered, _) => recovered.summary,
        other => panic!("{other:?}"),
    };
    let whole = summary(&mut bench);
    assert_eq!(whole.sectors_undone, 0);
    // The ring on that device is behind the data and is lost with it; the other copy exists.
    bench.cut(place, sector * 4096);
    let cut = summary(&mut bench);
    assert_eq!((cut.sectors_undone, cut.sectors_dirty), (0, whole.sectors_dirty));
}

#[test]
fn two_copies_make_one_whole_journal() {
    let mut bench = Bench::new(2);
    bench.start();
    for page in 1..=bench.journal.sequence {
        let copy = bench.ring[page as usize % 2].clone();
        put_page(&bench.pool, &copy, page, &pattern(4096, page as u32));
    }
    bench.expect_recovered();
}

#[test]
fn a_device_that_is_away_takes_its_data_along_and_no_more() {
    let mut bench = Bench::new(2);
    bench.start();
    let (valid, dirty) = match bench.recover() {
        Found::Recovered(recovered, _) => (recovered.summary.sectors_valid, recovered.summary.sectors_dirty),
        other => panic!("{other:?}"),
    };
    drop(bench.pool);
    let (mut valid_here, mut missing) = (0, 0);
    for path in &bench.paths {
        let pool = Pool::open(std::slice::from_ref(path)).unwrap();
        match recover(&pool, CACHE, |_, _| {}).unwrap() {
            Found::Recovered(recovered, remains) => {
                assert!(remains.data.len() < 3 && remains.rings[0].copies.len() == 1);
                valid_here += recovered.summary.sectors_valid;
                missing += recovered.summary.sectors_missing;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((valid_here, missing), (valid, dirty), "what one has, the other misses");
}

#[test]
fn a_copy_that_cannot_be_read_at_all_is_not_missed() {
    let mut bench = Bench::new(2);
    bench.start();
    let copy = bench.ring[1][0];
    let mut told = Vec::new();
    // Only its first page exists.
    bench.cut(copy, 4096);
    match recover(&bench.pool, CACHE, |done, all| told.push((done, all))).unwrap() {
        Found::Recovered(..) => {}
        other => panic!("{other:?}"),
    }
    assert!(told.windows(2).all(|two| two[0].0 <= two[1].0 && two[0].1 <= two[1].1));
    assert!(told.iter().all(|(done, all)| done <= all));
    let (done, all) = *told.last().unwrap();
    assert_eq!(done, all);
    assert!(all > 2 * MIB, "both copies, and the pages that count once more: {all}");
}

#[test]
fn an_unfinished_ring_leaves_the_one_before_it() {
    let mut bench = Bench::new(1);
    bench.start();
    let newer = bench.pool.allocate_ring(CACHE, 6, 1, 1, &[]).unwrap();
    // First no pages, then pages of an incomplete dump.
    bench.expect_recovered();
    let mut journal = Journal::new(CACHE.0, 6, MIB / 4096, FRAMES);
    for _ in 0..3 {
        let (number, page) = journal.page(&[], &[(0, &[Frame::Empty; 100])]);
        put_page(&bench.pool, &newer[0], number, &page);
    }
    bench.expect_recovered();
    match bench.recover() {
        Found::Recovered(_, remains) => {
            assert_eq!(remains.rings.iter().map(|ring| ring.number).collect::<Vec<_>>(), [6, 5]);
        }
        other => panic!("{other:?}"),
    }
    // Pages of another cache and of another ring are ignored.
    for (cache, ring) in [(CACHE.0 + 1, 6), (CACHE.0, 7)] {
        let mut foreign = Journal::new(cache, ring, MIB / 4096, FRAMES);
        (foreign.committed, foreign.dump_begin, foreign.dump_end) = (1, 1, 1);
        foreign.sequence = 10;
        let (number, page) = foreign.page(&[], &[]);
        put_page(&bench.pool, &newer[0], number, &page);
    }
    bench.expect_recovered();
    // When it is complete, it is valid.
    (journal.committed, journal.dump_begin, journal.dump_end) = (3, 1, 3);
    let (number, page) = journal.page(&[], &[]);
    put_page(&bench.pool, &newer[0], number, &page);
    bench.index.clear();
    bench.expect_recovered();
}

/// A cache can be invalidated before its recovery, because its backing is about to be changed.
/// After a crash, an invalidated cache is not recovered. A recovery in progress ends normally.
#[test]
fn an_invalidated_cache_is_not_recovered() {
    for copies in [1, 2] {
        let mut bench = Bench::new(copies);
        bench.start();
        let newer = bench.pool.allocate_ring(CACHE, 6, 1, 1, &[]).unwrap();
        let under_way = Recovery::of(&bench.pool, CACHE).unwrap();
        // A ring that is created for a cache in recovery is a different one.
        let next = bench.pool.allocate_ring(CACHE, 7, 1, 1, &[]).unwrap();
        bench.pool.make_void(CACHE, 6).unwrap();
        let mut doubtful = None;
        let found = under_way.run(|_, _| {}, |plan| doubtful = Some(plan.doubtful.clone())).unwrap();
        assert!(matches!(found, Found::Recovered(..)));
        let is_dirty = |block: u32| bench.index.values().any(|(other, _, dirty)| *other == block && *dirty);
        let doubtful = doubtful.expect("the first reading is told");
        assert!(
            (0..7 * 4 * FRAMES).filter(|block| is_dirty(*block)).all(|block| doubtful.contains(block.into()))
        );
        for _ in 0..2 {
            assert!(matches!(bench.recover(), Found::Nothing(_)));
            // All segments still belong to the owner.
            let segments = bench.pool.segments_of(CACHE);
            assert!(
                bench.ring.concat().iter().chain(&newer[0]).chain(&next[0]).all(|s| segments.contains(s))
            );
            drop(bench.pool);
            bench.pool = Pool::open(&bench.paths).unwrap();
        }
        // A ring that is created later is valid.
        let mut journal = Journal::new(CACHE.0, 7, MIB / 4096, FRAMES);
        let (number, page) = journal.page(&[], &[(0, &[Frame::Empty; 4])]);
        put_page(&bench.pool, &next[0], number, &page);
        (journal.committed, journal.dump_begin, journal.dump_end) = (1, 1, 1);
        let (number, page) = journal.page(&[], &[]);
        put_page(&bench.pool, &next[0], number, &page);
        bench.index.clear();
        bench.expect_recovered();
    }
}

/// A start that was interrupted left an unfinished ring, and the pool has no space for another one.
#[test]
fn an_unfinished_ring_makes_room_for_the_next() {
    let mut bench = Bench::new(1);
    bench.start();
    let in_use = bench.pool.ring_number_max(CACHE);
    let free = bench.pool.free_segments();
    bench.pool.allocate_ring(CACHE, in_use + 1, 1, 1, &[]).unwrap();
    bench.pool.allocate(OwnerId(8), free - 1, 0).unwrap();
    bench.pool.allocate_ring(CACHE, in_use + 2, 1, 1, &[]).unwrap_err();
    bench.pool.free_rings_besides(CACHE, in_use);
    // A crash before the allocation changes nothing, so the number in use stays known.
    drop(bench.pool);
    bench.pool = Pool::open(&bench.paths).unwrap();
    assert_eq!(bench.pool.ring_number_max(CACHE), in_use + 1);
    bench.pool.free_rings_besides(CACHE, in_use);
    bench.pool.allocate_ring(CACHE, in_use + 2, 1, 1, &[]).unwrap();
    drop(bench.pool);
    bench.pool = Pool::open(&bench.paths).unwrap();
    assert_eq!(bench.pool.ring_number_max(CACHE), in_use + 2);
    bench.expect_recovered();
}

#[test]
fn without_a_journal_there_is_nothing() {
    let bench = Bench::new(2);
    match bench.recover() {
        Found::Nothing(remains) => assert_eq!((remains.data, remains.rings.len()), (bench.data.clone(), 1)),
        other => panic!("{other:?}"),
    }
    match recover(&bench.pool, OwnerId(77), |_, _| {}).unwrap() {
        Found::Nothing(remains) => assert_eq!((remains.data.len(), remains.rings.len()), (0, 0)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_journal_with_a_hole_is_damaged() {
    let mut bench = Bench::new(2);
    bench.start();
    // The last page proves that the previous page was durable.
    bench.page(&[], &[]);
    bench.journal.committed = bench.journal.sequence;
    let hole = bench.journal.sequence;
    bench.page(&[], &[]);
    bench.expect_recovered();
    for copy in bench.ring.clone() {
        put_page(&bench.pool, &copy, hole, &[0; 4096]);
    }
    match bench.recover() {
        Found::Damaged { ring: 5, what, remains } => {
            assert!(what.contains(&hole.to_string()), "{what}");
            assert_eq!(remains.data, bench.data);
        }
        other => panic!("{other:?}"),
    }
    assert!(bench.dir.path().exists());
}
