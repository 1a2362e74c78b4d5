//! Tests the behaviour of presets. Each test cites a sentence of SYSTEMS, the project's description
//! of other systems, which is outside this repository. The engine's I/O completes at once and in
//! order, so the tests can list when data goes to the backing. Sentences about time are tested in
//! virtual time by `world/tests/presets.rs`. `sentences.rs` lists the test of each sentence.

use hob_engine::command::{
    Access, CacheChange, CacheConfig, Command, Copies, DataSegment, DiskConfig, Enable, Event, NewRing,
    Segment,
};
use hob_engine::io::{Durability, Io, IoOp, Op, PayloadMemory, Promote, Request, Target};
use hob_engine::journal::ring_pages_min;
use hob_engine::outcome::Outcome;
use hob_engine::preset::preset;
use hob_engine::units::{
    BufferId, CommandId, DatastoreId, DeviceId, DiskId, Instant, RequestId, SECTOR_BYTES,
};
use hob_engine::{Engine, Limits};

const DISK: DiskId = DiskId(0);
const DISK_BYTES: u64 = 1 << 30;
const WRITE: Op = Op::Write(Durability::Volatile);
const KIB: u64 = 1024;
const PAGE: u64 = 64 * KIB;

/// A disk whose cache has the settings of a preset, and the writes to its backing.
struct Rig {
    engine: Engine,
    requests: u64,
    /// Number of seconds without requests.
    rested: u64,
    /// Offset and length of each destaging write, in order.
    destaged: Vec<(u64, u64)>,
    /// True while the backing accepts no destaging writes.
    holds: bool,
    held: Vec<Io>,
}

/// Returns the next I/O, after copies between buffers. This test does not use the data.
fn next_io(engine: &mut Engine) -> Option<Io> {
    while engine.poll_copy().is_some() {}
    engine.poll_io()
}

impl Rig {
    /// Creates a cache with space for `blocks` blocks, including second copies.
    fn new(name: &str, blocks: u32) -> Rig {
        Rig::of(parts(name), blocks)
    }

    fn of(config: CacheConfig, blocks: u32) -> Rig {
        let mut rig = Rig {
            engine: Engine::new(Limits::default()),
            requests: 0,
            rested: 0,
            destaged: vec![],
            holds: false,
            held: vec![],
        };
        (1..=2).for_each(|buffer| rig.engine.lend(BufferId(buffer), 1 << 20));
        let disk =
            DiskConfig { size_bytes: DISK_BYTES, access: Access::ReadWrite, datastore: DatastoreId(0) };
        rig.command(Command::AddDisk(disk));
        let enable = enable(config, blocks);
        rig.command(Command::Cache(CacheChange::Enable(Box::new(enable))));
        rig
    }

    fn now(&self) -> Instant {
        Instant(self.requests * 1000 + self.rested * 1_000_000_000)
    }

    /// Lets `seconds` seconds pass.
    fn rest(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.rested += 1;
            self.engine.handle_timeout(self.now());
            self.settle();
        }
    }

    fn command(&mut self, command: Command) {
        self.engine.handle_command(self.now(), CommandId(1), DISK, command);
        self.settle();
        let done = self.engine.poll_event();
        assert!(matches!(done, Some(Event::Done { result: Ok(_), .. })), "{done:?}");
    }

    fn ask(&mut self, op: Op, offset: u64, len: u64) -> Outcome {
        self.requests += 1;
        let request = Request {
            id: RequestId(self.requests),
            disk: DISK,
            op,
            offset,
            len,
            buffer: Some(BufferId(0)),
            promote: Promote::Usual,
            memory: PayloadMemory::Daemon,
        };
        self.engine.handle_request(self.now(), request).expect("one at a time");
        self.settle();
        let reply = self.engine.poll_reply().expect("answered");
        assert_eq!(reply.result, Ok(()));
        reply.outcome
    }

    /// Completes all I/O of the engine.
    fn settle(&mut self) {
        while let Some(io) = next_io(&mut self.engine) {
            let of_destager = io.slice.is_some_and(|slice| slice.id != BufferId(0));
            let is_destaged =
                of_destager && matches!((io.target, io.op), (Target::Backing(_), IoOp::Write(_)));
            match is_destaged && self.holds {
                true => self.held.push(io),
                false => self.complete(&io, is_destaged),
            }
        }
        while self.engine.poll_release().is_some() {}
    }

    fn complete(&mut self, io: &Io, is_destaged: bool) {
        if is_destaged {
            self.destaged.push((io.offset, io.len));
        }
        let sums = match io.target {
            Target::Flash(_) => vec![0; (io.len / SECTOR_BYTES) as usize],
            Target::Backing(_) => vec![],
        };
        self.engine.handle_completion(self.now(), io.id, Ok(()), &sums);
    }

    fn write(&mut self, block: u64) -> Outcome {
        self.ask(WRITE, block * 4 * KIB, 4 * KIB)
    }

    fn read(&mut self, block: u64) -> Outcome {
        self.ask(Op::Read, block * 4 * KIB, 4 * KIB)
    }

    fn read_page(&mut self, page: u64) -> Outcome {
        self.ask(Op::Read, page * PAGE, PAGE)
    }

    /// Returns the 4 KiB blocks that were destaged since the last call, in order.
    fn destaged_blocks(&mut self) -> Vec<u64> {
        self.destaged.drain(..).map(|(offset, _)| offset / (4 * KIB)).collect()
    }

    fn dirty_sectors(&self) -> u64 {
        self.engine.stats(self.now(), DISK).expect("the disk").sectors_dirty
    }
}

/// Returns the cache settings of a preset.
fn parts(name: &str) -> CacheConfig {
    let row = preset(name).expect("a preset");
    row.config(row.block_bytes.into())
}

fn enable(config: CacheConfig, blocks: u32) -> Enable {
    let segment_bytes = config.segment_bytes;
    let mut free = [0; 2];
    let mut segment = |device: usize| {
        free[device] += segment_bytes;
        Segment { device: DeviceId(device as u16), offset: free[device] - segment_bytes }
    };
    let devices = if config.copies == Copies::One { 1 } else { 2 };
    let data = |ordinal: u32| DataSegment {
        place: segment(ordinal as usize % devices),
        ordinal,
        seconds_only: false,
    };
    let segments = (0..blocks).map(data).collect();
    let pages = ring_pages_min(blocks.into(), config.block_bytes, segment_bytes);
    let count = pages.div_ceil(segment_bytes / 4096);
    let copies = (0..devices).map(|device| (0..count).map(|_| segment(device)).collect()).collect();
    let ring = NewRing { cache: [1; 16], number: 1, identity: [0; 32], copies };
    Enable { config, segments, journal: Some(ring), recovered: None }
}

/// Returns blocks that are not adjacent, in random order, each once.
fn scattered(count: u64) -> Vec<u64> {
    (0..count).map(|n| 2 * (n * 7919 % 10_007)).collect()
}

/// Returns true if `these` are the first of `others`; the last few may be among the next twelve.
fn are_the_first(these: &[u64], others: &[u64]) -> bool {
    let count = these.len();
    these.iter().all(|block| others[..count + 12].contains(block))
        && others[..count - 12].iter().all(|block| these.contains(block))
}

fn sorted(blocks: &[u64]) -> Vec<u64> {
    let mut blocks = blocks.to_vec();
    blocks.sort_unstable();
    blocks
}

/// SYSTEMS §2: "a page is promoted when it has been accessed three times".
#[test]
fn fast_cache_promotes_at_the_third_access_and_not_before() {
    for op in [Op::Read, WRITE] {
        let mut rig = Rig::new("fast-cache", 256);
        let outcomes: Vec<Outcome> = (0..4).map(|_| rig.ask(op, 10 * PAGE, PAGE)).collect();
        let expected = match op {
            // The third read promotes the page, and the fourth is a hit.
            Op::Read => [Outcome::MissUnproven, Outcome::MissUnproven, Outcome::MissFilled, Outcome::Hit],
            _ => {
                let [past, taken] = [Outcome::WriteNotCopied, Outcome::WriteBack];
                [past, past, taken, taken]
            }
        };
        assert_eq!(outcomes, expected);
    }
    // Reads and writes count equally.
    let mut rig = Rig::new("fast-cache", 256);
    let outcomes = [WRITE, Op::Read, WRITE, Op::Read].map(|op| rig.ask(op, 10 * PAGE, PAGE));
    let [past, miss] = [Outcome::WriteNotCopied, Outcome::MissUnproven];
    assert_eq!(outcomes, [past, miss, Outcome::WriteBack, Outcome::Hit]);
}

/// SYSTEMS §2: "Works on disk addresses, so it helps new machines that reuse old blocks.": earlier
/// accesses count, even if the data was overwritten since.
#[test]
fn fast_cache_goes_by_address() {
    let mut rig = Rig::new("fast-cache", 256);
    rig.read_page(10);
    assert_eq!(rig.ask(WRITE, 10 * PAGE, PAGE), Outcome::WriteNotCopied);
    assert_eq!([rig.read_page(10), rig.read_page(10)], [Outcome::MissFilled, Outcome::Hit]);
    assert_eq!(rig.ask(WRITE, 10 * PAGE, PAGE), Outcome::WriteBack, "and the next machine's data too");
}

/// SYSTEMS §2: "sequential streams and large I/O thus never populate it."
#[test]
fn sequential_streams_never_populate_fast_cache() {
    for op in [Op::Read, WRITE] {
        let mut rig = Rig::new("fast-cache", 256);
        for _ in 0..5 {
            // A stream is detected after 512 KiB, so its first pages may be promoted.
            let served = (0..64).map(|n| rig.ask(op, (1000 + n) * PAGE, PAGE));
            let flash = |outcome| matches!(outcome, Outcome::Hit | Outcome::WriteBack | Outcome::MissFilled);
            let taken: Vec<bool> = served.map(flash).collect();
            assert!(!taken[8..].contains(&true), "{taken:?}");
            // A large I/O is a sequential run by itself.
            assert!(!flash(rig.ask(op, 0, 1 << 20)));
        }
    }
}

/// SYSTEMS §2: "a write to a promoted page completes in flash; the page is written to disk when the LRU picks it.
/// Deferring coalesces writes and orders them for the disks. Other writes go to disk."
#[test]
fn fast_cache_writes_a_page_to_disk_when_the_lru_picks_it() {
    let mut rig = Rig::new("fast-cache", 200);
    let pages: Vec<u64> = (0..100).map(|n| 2 * (n * 37 % 101)).collect();
    let write = |rig: &mut Rig, page: u64| (0..3).map(|_| rig.ask(WRITE, page * PAGE, PAGE)).last();
    for page in &pages[..90] {
        assert_eq!(write(&mut rig, *page), Some(Outcome::WriteBack));
    }
    assert_eq!(rig.destaged, [], "up to 90 % of its 100 pages nothing is written to disk");
    // The page was written often and is destaged once, which is the purpose of deferring. It is now
    // the last page that the LRU selects.
    (0..50).for_each(|_| _ = rig.ask(WRITE, pages[0] * PAGE, PAGE));
    for page in &pages[90..95] {
        assert_eq!(write(&mut rig, *page), Some(Outcome::WriteBack));
    }
    let destaged: Vec<u64> = rig.destaged.iter().map(|(offset, _)| offset / PAGE).collect();
    assert!(destaged.len() >= 5, "{destaged:?}");
    assert_eq!(destaged[..5], *sorted(&pages[1..6]), "the coldest, in the order of the disk");
    assert!(!destaged.contains(&pages[0]), "{destaged:?}");
    assert_eq!(rig.ask(WRITE, 5000 * PAGE, PAGE), Outcome::WriteNotCopied, "other writes go to disk");
}

/// SYSTEMS §3: "Writes are acknowledged by the buffer; an **elevator** destages them in disk order".
#[test]
fn vsan_destages_in_disk_order() {
    let mut rig = Rig::new("vsan", 1000);
    for block in scattered(240) {
        assert_eq!(rig.write(block), Outcome::WriteBack);
    }
    assert_eq!(rig.destaged, []);
    // The elevator continues at its position, and from the end to the start.
    let mut order = Vec::new();
    for (n, block) in scattered(1240).into_iter().skip(240).enumerate() {
        rig.write(block);
        let now = rig.destaged_blocks();
        assert!(n > 0 || now.len() >= 30, "the buffer is emptied to 21 %: {now:?}");
        order.extend(now);
    }
    let turns = order.windows(2).filter(|pair| pair[0] > pair[1]).count();
    assert!(order.len() > 900 && turns <= 6, "{turns} turns: {order:?}");
    // Adjacent blocks are written in one I/O.
    let mut rig = Rig::new("vsan", 1000);
    (0..241).rev().for_each(|block| _ = rig.write(block));
    assert!(rig.destaged.len() <= 2, "{:?}", rig.destaged);
}

/// SYSTEMS §3: "a full buffer sends writes straight to disk", and the buffer is "30 % write buffer, fixed".
#[test]
fn a_full_vsan_buffer_sends_writes_straight_to_disk() {
    let mut rig = Rig::new("vsan", 1000);
    rig.holds = true;
    let blocks = scattered(600);
    for block in &blocks[..300] {
        assert_eq!(rig.write(*block), Outcome::WriteBack);
    }
    for block in &blocks[300..] {
        let outcome = rig.write(*block);
        assert!(matches!(outcome, Outcome::WriteCopied | Outcome::WriteNotCopied), "{outcome:?}");
    }
    // Space of the read cache does not become space for the buffer.
    for block in &blocks[300..] {
        rig.write(*block);
    }
    assert_eq!(rig.dirty_sectors(), 300);
    assert_eq!(rig.write(blocks[5]), Outcome::WriteBack, "what is in the buffer is written there");
}

/// SYSTEMS §3: "The flash is split **70 % read cache**"; "cold reads load the read cache".
#[test]
fn vsan_reads_have_seventy_percent() {
    let mut rig = Rig::new("vsan", 1000);
    for block in scattered(2000) {
        assert_eq!(rig.read(block), Outcome::MissFilled);
    }
    let stats = rig.engine.stats(rig.now(), DISK).expect("the disk");
    assert_eq!(stats.blocks_cached, 700);
    // Destaged data leaves the buffer; a read loads it into the read cache.
    for block in scattered(300) {
        rig.write(50_000 + block);
    }
    let gone = rig.destaged_blocks()[0];
    assert_eq!([rig.read(gone), rig.read(gone)], [Outcome::MissFilled, Outcome::Hit]);
}

/// SYSTEMS §4: "First write → Inactive. Re-access → Active. […] Active + Inactive above **20 %** of the cache →
/// write the earliest Inactive data to disk and mark it Clean."
#[test]
fn zbs_destages_the_earliest_inactive_above_a_fifth() {
    let mut rig = Rig::new("zbs", 1000);
    let blocks = scattered(300);
    for block in &blocks[..200] {
        assert_eq!(rig.write(*block), Outcome::WriteBack);
    }
    assert_eq!(rig.destaged, [], "a fifth is not above a fifth");
    // These become Active.
    assert_eq!([rig.read(blocks[0]), rig.write(blocks[1])], [Outcome::Hit, Outcome::WriteBack]);
    for block in &blocks[200..] {
        assert_eq!(rig.write(*block), Outcome::WriteBack);
    }
    let destaged = rig.destaged_blocks();
    assert_eq!(destaged.len(), 100);
    assert!(are_the_first(&destaged, &blocks[2..]), "{destaged:?}");
    rig.rest(1);
    assert_eq!(rig.dirty_sectors(), 200);
    // Clean blocks are still cached.
    assert_eq!(rig.read(blocks[50]), Outcome::Hit);
}

/// The earliest Inactive data is found although the rest of the cache is full of Clean blocks.
#[test]
fn zbs_finds_the_earliest_inactive_behind_any_clean() {
    let mut rig = Rig::new("zbs", 4000);
    let blocks = scattered(3500);
    (0..3000).for_each(|block| _ = rig.read(100_000 + block));
    for block in &blocks[..800] {
        rig.write(*block);
    }
    // Data that is dirty and Active.
    blocks[..400].iter().for_each(|block| _ = rig.read(*block));
    for block in &blocks[800..1200] {
        rig.write(*block);
    }
    let destaged = rig.destaged_blocks();
    assert!(
        destaged.len() >= 390 && destaged.iter().all(|block| blocks[400..850].contains(block)),
        "{destaged:?}"
    );
    assert!(are_the_first(&destaged[..50], &blocks[400..]), "{destaged:?}");
}

/// SYSTEMS §4: "Active larger than Inactive → rank Active by access frequency, move the least accessed to Inactive until they
/// are equal", and so to disk.
#[test]
fn zbs_destages_the_least_accessed_when_all_is_active() {
    let mut rig = Rig::new("zbs", 1000);
    let blocks = scattered(200);
    blocks.iter().for_each(|block| _ = rig.write(*block));
    let (often, seldom) = blocks.split_at(80);
    blocks.iter().for_each(|block| _ = rig.read(*block));
    (0..3).for_each(|_| often.iter().for_each(|block| _ = rig.read(*block)));
    // The others are written when a fifth is dirty, and become Active too, so the share stays a
    // fifth.
    for block in 0..80 {
        (0..6).for_each(|_| _ = rig.write(50_000 + 2 * block));
    }
    let destaged = rig.destaged_blocks();
    assert!(destaged.len() >= 80 && destaged.iter().all(|block| seldom.contains(block)), "{destaged:?}");
}

/// SYSTEMS §4: "Access to Clean → Active; otherwise Clean is reclaimed for new writes."
#[test]
fn clean_that_is_accessed_stays_in_zbs_and_other_clean_makes_room() {
    let mut rig = Rig::new("zbs", 1000);
    let blocks = scattered(1500);
    for block in &blocks[..300] {
        rig.write(*block);
    }
    rig.rest(2);
    assert!(are_the_first(&rig.destaged_blocks(), &blocks));
    assert_eq!(rig.read(blocks[0]), Outcome::Hit);
    for block in &blocks[300..] {
        assert_eq!(rig.write(*block), Outcome::WriteBack, "there is room as long as there is Clean");
    }
    assert_eq!(rig.read(blocks[0]), Outcome::Hit);
    assert_eq!(rig.read(blocks[1]), Outcome::MissFilled);
}

/// SYSTEMS §4: "Read miss: load into the cache when there is room and serve from it; when full, read the disk directly."
/// and "Clean is reclaimed for new writes."
#[test]
fn a_zbs_full_of_clean_reads_the_disk_and_takes_writes() {
    let mut rig = Rig::new("zbs", 1000);
    let blocks = scattered(1200);
    for block in &blocks[..1000] {
        assert_eq!([rig.read(*block), rig.read(*block)], [Outcome::MissFilled, Outcome::Hit]);
    }
    assert_eq!([rig.read(blocks[1000]), rig.read(blocks[1000])], [Outcome::MissNoBlock; 2]);
    for block in &blocks[1001..1100] {
        assert_eq!(rig.write(*block), Outcome::WriteBack);
    }
    assert_eq!(rig.read(blocks[1050]), Outcome::Hit);
}

/// With this admission in a split cache, reads that have used up their share take no space from the
/// write buffer.
#[test]
fn while_free_keeps_to_the_read_share() {
    let mut rig = Rig::of(CacheConfig { admission: parts("zbs").admission, ..parts("vsan") }, 1000);
    let outcomes: Vec<Outcome> = scattered(800).into_iter().map(|block| rig.read(block)).collect();
    assert!(outcomes[..700].iter().all(|outcome| *outcome == Outcome::MissFilled));
    assert!(outcomes[700..].iter().all(|outcome| *outcome == Outcome::MissNoBlock));
    assert_eq!(rig.write(50_000), Outcome::WriteBack);
}

/// SYSTEMS §4: "Write miss: into Free, or to disk when full. […] Read miss: load into the cache when there is room and
/// serve from it; when full, read the disk directly." and "Write hit: in cache. […] Read hit: Active, Inactive or Clean".
#[test]
fn a_full_zbs_reads_and_writes_the_disk() {
    let mut rig = Rig::new("zbs", 1000);
    rig.holds = true;
    let blocks = scattered(600);
    // With their second copies, 500 dirty blocks fill the cache.
    for block in &blocks[..500] {
        assert_eq!(rig.write(*block), Outcome::WriteBack);
    }
    assert_eq!(rig.write(blocks[500]), Outcome::WriteNotCopied);
    assert_eq!([rig.read(blocks[501]), rig.read(blocks[501])], [Outcome::MissNoBlock; 2]);
    assert_eq!([rig.write(blocks[480]), rig.read(blocks[481])], [Outcome::WriteBack, Outcome::Hit]);
    // The disk accepts data again, and the cache has space again.
    rig.holds = false;
    for io in std::mem::take(&mut rig.held) {
        rig.complete(&io, true);
    }
    rig.settle();
    rig.rest(3);
    assert_eq!([rig.read(blocks[501]), rig.read(blocks[501])], [Outcome::MissFilled, Outcome::Hit]);
    assert_eq!(rig.write(blocks[502]), Outcome::WriteBack);
}
