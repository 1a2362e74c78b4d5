//! Duration of the recovery of a large cache: 16 M blocks of 4 KiB, with a full journal.
//!
//! `cargo test --release -p hob-storage --test recovery_time -- --ignored --nocapture`. Needs 20 GB
//! of disk for a short time and 2 GB during the run; TMPDIR sets the directory.

mod common;

use std::fs::OpenOptions;
use std::time::Instant;

use common::journal::{Change, Frame, Journal, put_page};
use hob_engine::journal::ring_pages_min;
use hob_storage::pool::recovery::{Found, recover};
use hob_storage::pool::{DeviceSpec, Overwrite, OwnerId, Pool, device_bytes_for};
use rustix::fs::FallocateFlags;

const SEGMENT: u64 = 16 << 20;
const SEGMENT_FRAMES: u32 = (SEGMENT / 4096) as u32;
const SEGMENTS: u32 = 4096;
const FRAMES: u32 = SEGMENTS * SEGMENT_FRAMES;
const CACHE: OwnerId = OwnerId(1 << 100 | 3);

/// Number of frames of a dump in a page that is full of changes.
const FRAMES_A_PAGE: u32 = 287;

/// Number of pages that were written and not committed at the power failure.
const TAIL_PAGES: u64 = 256;

/// Returns the CPU time of this process, milliseconds.
fn cpu_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

/// Creates a pool for the cache on sparse files.
fn pool(dir: &std::path::Path, ring_segments: u64) -> Pool {
    const DEVICES: u64 = 8;
    let each = u64::from(SEGMENTS).div_ceil(DEVICES) + ring_segments * 2;
    let spec = |number: u64| DeviceSpec {
        path: dir.join(number.to_string()),
        size_bytes: Some(device_bytes_for(each * SEGMENT, SEGMENT)),
    };
    // Space is allocated when a device is created. It is freed at once, so that 64 GiB need not be
    // free.
    let punch = |spec: DeviceSpec| {
        let file = OpenOptions::new().write(true).open(spec.path).unwrap();
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, flags, 4 << 20, spec.size_bytes.unwrap() - (4 << 20)).unwrap();
    };
    let mut pool = Pool::create("large", &[spec(0)], SEGMENT, Overwrite::Refuse).unwrap();
    punch(spec(0));
    for number in 1..DEVICES {
        pool.add_device(&spec(number), Overwrite::Refuse).unwrap();
        punch(spec(number));
    }
    pool
}

#[test]
#[ignore = "takes a minute and 20 GB for a moment"]
fn sixteen_million_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let dump_pages = u64::from(SEGMENTS) * u64::from(SEGMENT_FRAMES.div_ceil(FRAMES_A_PAGE));
    let ring_segments = ((2 * dump_pages + 2 * TAIL_PAGES) * 4096).div_ceil(SEGMENT);
    assert!(ring_segments * SEGMENT / 4096 >= ring_pages_min(u64::from(FRAMES), 4096, SEGMENT));
    let mut pool = pool(dir.path(), ring_segments);
    assert_eq!(pool.allocate_data(CACHE, u64::from(SEGMENTS), 0).unwrap().len(), SEGMENTS as usize);
    for copies in [1, 2] {
        let ring = pool.allocate_ring(CACHE, copies, copies as usize, ring_segments, &[]).unwrap();
        let journal = Journal::new(CACHE.0, copies, ring_segments * SEGMENT / 4096, SEGMENT_FRAMES);
        let dirty = fill(&pool, &ring, journal, dump_pages);
        let (start, cpu) = (Instant::now(), cpu_ms());
        let mut read = 0;
        let found = recover(&pool, CACHE, |done, _| read = done).unwrap();
        let took = start.elapsed();
        let Found::Recovered(recovered, remains) = found else { panic!("{found:?}") };
        assert_eq!(recovered.summary.sectors_valid, u64::from(FRAMES));
        assert_eq!(recovered.summary.sectors_dirty, dirty);
        assert_eq!(recovered.summary.sectors_undone, 0);
        assert_eq!(remains.rings[0].number, copies);
        println!(
            "{FRAMES} blocks, {copies} copies of {} MiB of journal: {} ms, of that {} ms on a CPU; {} MiB read, {dirty} dirty",
            (ring_segments * SEGMENT) >> 20,
            took.as_millis(),
            cpu_ms() - cpu,
            read >> 20
        );
    }
}

/// Fills a journal ring, and writes half of it a second time. Returns the number of dirty blocks.
fn fill(
    pool: &Pool,
    ring: &[Vec<hob_engine::command::Segment>],
    mut journal: Journal,
    dump_pages: u64,
) -> u64 {
    // Flash has zeroes, so the journal's latest records have the checksum of zeroes.
    let zeroes = crc32c::crc32c(&[0; 4096]);
    let block = |frame: u32| frame.wrapping_mul(0x9E37_79B1) % FRAMES;
    let mut dirty = vec![false; FRAMES as usize];
    let mut rng = 1u64;
    let (mut cursor, mut begin) = (0, 1);
    let mut complete: Vec<(u64, u64)> = Vec::new();
    let mut frames = Vec::new();
    for _ in 0..journal.pages + dump_pages / 2 {
        if journal.sequence > TAIL_PAGES {
            let durable = journal.sequence - TAIL_PAGES;
            if let Some((begin, end)) = complete.iter().rfind(|(_, end)| *end <= durable) {
                (journal.committed, journal.dump_begin, journal.dump_end) = (durable, *begin, *end);
            }
        }
        let changes: [Change; 54] = std::array::from_fn(|_| {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let frame = (rng >> 40) as u32 % FRAMES;
            dirty[frame as usize] = true;
            Change::Set { frame, block: block(frame), sum: zeroes, dirty: true }
        });
        if cursor == 0 {
            begin = journal.sequence + 1;
        }
        let end = (cursor + FRAMES_A_PAGE).min((cursor / SEGMENT_FRAMES + 1) * SEGMENT_FRAMES);
        frames.clear();
        frames.extend((cursor..end).map(|frame| match dirty[frame as usize] {
            true => Frame::Dirty { block: block(frame), sum: zeroes },
            false => Frame::Clean { block: block(frame), sum: frame },
        }));
        let (number, page) = journal.page(&changes, &[(cursor, &frames)]);
        for copy in ring {
            put_page(pool, copy, number, &page);
        }
        cursor = end % FRAMES;
        if cursor == 0 {
            complete.push((begin, journal.sequence));
        }
    }
    for info in pool.devices() {
        OpenOptions::new().write(true).open(info.path).unwrap().sync_all().unwrap();
    }
    dirty.iter().filter(|dirty| **dirty).count() as u64
}
