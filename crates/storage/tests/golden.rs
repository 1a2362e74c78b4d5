//! Devices that earlier versions wrote, kept permanently. Each line of an image is an offset and
//! bytes in hexadecimal; zeroes up to the end of the 4 KiB are left out.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use common::journal::{Change, Frame, Journal, put_page, put_sector};
use hob_engine::units::DeviceId;
use hob_storage::pool::recovery::{Found, recover};
use hob_storage::pool::{Admission, DeviceSpec, Overwrite, OwnerId, Pool, SwapArea, device_bytes_for};

const MIB: u64 = 1 << 20;

/// Creates a device with that many segments from an image.
fn restore(dir: &Path, image: &str, segments: u64) -> PathBuf {
    let path = dir.join("golden");
    let file = File::create(&path).unwrap();
    file.set_len(device_bytes_for(segments * MIB, MIB)).unwrap();
    for line in image.lines().filter(|line| !line.starts_with('#')) {
        let (offset, hex) = line.split_once(' ').unwrap();
        let digits = |two: &[u8]| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap();
        let bytes: Vec<u8> = hex.as_bytes().chunks(2).map(digits).collect();
        file.write_all_at(&bytes, offset.parse().unwrap()).unwrap();
    }
    path
}

/// Writes a device's image into the source tree.
fn keep(device: &Path, name: &str, what: &str) {
    let mut text = format!("# {what}; see tests/golden.rs.\n");
    let bytes = std::fs::read(device).unwrap();
    for (number, sector) in bytes.chunks(4096).enumerate() {
        let used = sector.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        if used > 0 {
            let hex: String = sector[..used].iter().map(|byte| format!("{byte:02x}")).collect();
            text.push_str(&format!("{} {hex}\n", number * 4096));
        }
    }
    std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name), text).unwrap();
}

fn offsets(pool: &Pool, owner: OwnerId) -> Vec<u64> {
    pool.segments_of(owner).iter().map(|segment| segment.offset / MIB).collect()
}

/// Opens a pool that hob 0.1.0 created, with two persistent segments and a volatile one.
#[test]
fn version_1_opens() {
    let dir = tempfile::tempdir().unwrap();
    let path = restore(dir.path(), include_str!("golden/pool-v1.txt"), 5);
    let pool = Pool::open(&[path]).unwrap();
    assert_eq!(pool.name(), "golden");
    assert_eq!(pool.segment_bytes(), MIB);
    let infos = pool.devices();
    assert_eq!((infos[0].id, infos[0].segments, infos[0].admission), (DeviceId(0), 5, Admission::In));
    assert_eq!(pool.free_segments(), 3);
    assert_eq!(offsets(&pool, OwnerId(0xFEED)), [2, 3]);
    let data = pool.data_of(OwnerId(0xFEED));
    assert_eq!(data.iter().map(|segment| segment.ordinal).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(pool.rings_of(OwnerId(0xFEED)), []);
    assert_eq!(pool.segments_of(OwnerId(0xBEEF)), [], "that cache was volatile");
}

/// Opens a pool with a journal: data segments 0, 1 and 3 (2 was released), two rings, and a
/// volatile cache. Ring 7 is complete: a dump, then a page of the tail with two writes, of which
/// one reached flash. The other ring has only begun.
#[test]
fn version_1_with_journal_opens() {
    let dir = tempfile::tempdir().unwrap();
    let path = restore(dir.path(), include_str!("golden/journal-v1.txt"), 9);
    let pool = Pool::open(&[path]).unwrap();
    assert_eq!((pool.name(), pool.free_segments()), ("golden", 3));
    let cache = OwnerId(0xFEED);
    assert_eq!(pool.owners(), [cache]);
    let data: Vec<_> = pool.data_of(cache).iter().map(|s| (s.ordinal, s.place.offset / MIB)).collect();
    assert_eq!(data, [(0, 2), (1, 3), (3, 5)]);
    let rings: Vec<_> = pool.rings_of(cache).into_iter().map(|ring| (ring.number, ring.copies)).collect();
    assert_eq!(rings.len(), 2);
    let at = |ring: usize| rings[ring].1[0].iter().map(|s| s.offset / MIB).collect::<Vec<_>>();
    assert_eq!((rings[0].0, at(0), rings[1].0, at(1)), (0x0102_0304, vec![7, 8], 7, vec![6]));
    assert_eq!((rings[0].1.len(), rings[1].1.len()), (1, 1));
    let Found::Recovered(recovered, remains) = recover(&pool, cache, |_, _| {}).unwrap() else {
        panic!("ring 7 is whole");
    };
    assert_eq!(remains.data.len(), 3);
    let summary = recovered.summary;
    assert!(!summary.clean);
    assert_eq!((summary.sectors_valid, summary.sectors_dirty, summary.sectors_undone), (4, 2, 1));
    assert_eq!((summary.disk_bytes, summary.identity, summary.block_bytes), (1 << 40, [9; 32], 4096));
    let dirty: Vec<_> =
        recovered.dirty().map(|found| (found.sector, found.place.segment, found.place.sector)).collect();
    assert_eq!(dirty, [(2000, 0, 1), (5000, 2, 200)]);
    let mut clean = recovered.samples(10);
    clean.sort_unstable();
    assert_eq!(clean, [(1000, 0xAAAA_0001), (4000, 0xAAAA_0003)]);
}

/// Opens a pool with two swap areas: a complete one, and one that a crash left incomplete. Between
/// them is a persistent cache.
#[test]
fn version_1_with_swap_opens() {
    let dir = tempfile::tempdir().unwrap();
    let path = restore(dir.path(), include_str!("golden/swap-v1.txt"), 9);
    let pool = Pool::open(&[path]).unwrap();
    assert_eq!((pool.name(), pool.free_segments()), ("golden", 3));
    let area = |owner, mib, segments, whole| SwapArea {
        owner: OwnerId(owner),
        device: DeviceId(0),
        offset: mib * MIB,
        segments,
        whole,
    };
    assert_eq!(pool.swap_areas(), [area(0x0ABA, 5, 1, false), area(0x5A5A, 8, 3, true)]);
    assert_eq!(pool.owners(), [OwnerId(0xFEED)]);
    assert_eq!(offsets(&pool, OwnerId(0x5A5A)), [8, 9, 10]);
}

fn spec(dir: &Path, name: &str, segments: u64) -> DeviceSpec {
    DeviceSpec { path: dir.join(name), size_bytes: Some(device_bytes_for(segments * MIB, MIB)) }
}

/// Writes the image with swap areas again: only for a new format version, under a new name.
#[test]
#[ignore = "writes into the source tree"]
fn write_the_golden_image_with_swap() {
    let dir = tempfile::tempdir().unwrap();
    let mut pool = Pool::create("golden", &[spec(dir.path(), "swap", 9)], MIB, Overwrite::Refuse).unwrap();
    let cache = pool.allocate_data(OwnerId(0xFEED), 2, 0).unwrap();
    pool.allocate_swap(OwnerId(0x5A5A), 3, None, &[]).unwrap();
    pool.allocate_swap(OwnerId(0x0ABA), 3, None, &[]).unwrap();
    let parts = pool.segments_of(OwnerId(0x0ABA));
    pool.release(&parts[1..]).unwrap();
    assert_eq!(cache.len(), 2);
    drop(pool);
    keep(&dir.path().join("swap"), "swap-v1.txt", "A pool device of format version 1 with swap areas");
}

/// Writes the images again: only for a new format version, under a new name.
#[test]
#[ignore = "writes into the source tree"]
fn write_the_golden_images() {
    let dir = tempfile::tempdir().unwrap();
    let mut pool = Pool::create("golden", &[spec(dir.path(), "journal", 9)], MIB, Overwrite::Refuse).unwrap();
    let cache = OwnerId(0xFEED);
    let data = pool.allocate_data(cache, 4, 0).unwrap();
    let old = pool.allocate_ring(cache, 7, 1, 1, &[]).unwrap();
    let new = pool.allocate_ring(cache, 0x0102_0304, 1, 2, &[]).unwrap();
    let mut journal = Journal::new(cache.0, 7, 256, 256);
    let first = [
        Frame::Clean { block: 1000, sum: 0xAAAA_0001 },
        Frame::Dirty { block: 2000, sum: 0xAAAA_0002 },
        Frame::Empty,
    ];
    let second = [Frame::Clean { block: 3000, sum: 0 }, Frame::Clean { block: 4000, sum: 0xAAAA_0003 }];
    let dump = journal.page(&[], &[(0, &first), (256 + 17, &second)]);
    (journal.committed, journal.dump_begin, journal.dump_end) = (1, 1, 1);
    let named = journal.page(&[Change::Drop { frame: 256 + 17, block: 3000 }], &[]);
    journal.committed = 2;
    let durable = journal.page(&[], &[]);
    let written = vec![0x5A; 4096];
    put_sector(&pool, data[3].place, 200, &written);
    let sum = crc32c::crc32c(&written);
    let set = |frame, block| Change::Set { frame, block, sum, dirty: true };
    let tail = journal.page(&[set(3 * 256 + 200, 5000), set(3 * 256 + 201, 6000)], &[]);
    for (number, page) in [dump, named, durable, tail] {
        put_page(&pool, &old[0], number, &page);
    }
    let mut unfinished = Journal::new(cache.0, 0x0102_0304, 512, 256);
    let (number, page) = unfinished.page(&[], &[(0, &first)]);
    put_page(&pool, &new[0], number, &page);
    pool.allocate(OwnerId(0xBEEF), 1, 0).unwrap();
    pool.release(&[data[2].place]).unwrap();
    drop(pool);
    keep(&dir.path().join("journal"), "journal-v1.txt", "A pool device of format version 1 with journals");
}
