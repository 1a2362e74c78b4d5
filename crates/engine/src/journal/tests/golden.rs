//! A ring of format version 1, kept permanently: every page in full, in
//! `tests/golden/journal-v1.txt`.
//!
//! Blocks of 8 KiB, and segments of 4 frames with the ordinals 3 and 1. Some dirty data has two
//! copies; one sector has no checksum; one zone has a bypass mark. In the tail, one sector needs a
//! checksum comparison and another is undone.

use super::*;

const IMAGE: &str = include_str!("../../../tests/golden/journal-v1.txt");
const RING_PAGES: u64 = 20;
const ORDINALS: [u32; 2] = [3, 1];

fn golden() -> Vec<Vec<Option<Vec<u8>>>> {
    let mut ring = vec![None; RING_PAGES as usize];
    for line in IMAGE.lines().filter(|line| !line.starts_with('#')) {
        let (number, hex) = line.split_once(' ').unwrap();
        let digits = hex.as_bytes().chunks(2);
        let mut page: Vec<u8> =
            digits.map(|two| u8::from_str_radix(str::from_utf8(two).unwrap(), 16).unwrap()).collect();
        page.resize(PAGE_BYTES, 0);
        ring[number.parse::<usize>().unwrap()] = Some(page);
    }
    vec![ring]
}

#[test]
fn the_golden_ring_of_version_1_is_read() {
    let ring = golden();
    let Ring::Whole(plan) = survey(&ring) else { panic!("it is whole") };
    assert_eq!(
        (plan.block_bytes, plan.disk_bytes, plan.identity, plan.clean),
        (8192, DISK_BYTES, [7; 32], false)
    );
    assert_eq!((plan.begin, plan.end, plan.committed, plan.dump_end), (23, 24, 23, 23));
    let mut replay = replay(plan, &ring, 4 * 8192, &ORDINALS).unwrap();
    assert_eq!(replay.to_prove(), [(0, 6), (1, 6)]);
    let recovered = replay.finish(&[Some(0x31), Some(0xBAD)]);
    let place = |segment, sector, sum| FlashSector { segment, sector, sum };
    let dirty: Vec<_> = recovered.dirty().collect();
    let expected = [
        DirtySector {
            sector: 0,
            place: place(0, 0, Some(0xA0)),
            second: Some(place(1, 0, Some(0xA0))),
            units: u8::MAX,
        },
        DirtySector { sector: 1, place: place(0, 1, None), second: None, units: u8::MAX },
        DirtySector { sector: 600, place: place(0, 6, Some(0x31)), second: None, units: u8::MAX },
    ];
    assert_eq!(dirty, expected);
    let mut samples = recovered.samples(9);
    samples.sort_unstable();
    assert_eq!(samples, [(1024, 0xC0)]);
    let summary = Summary {
        ring: 3,
        clean: false,
        is_logged: false,
        sectors_valid: 5,
        sectors_dirty: 3,
        sectors_undone: 1,
        sectors_parted: 0,
        sectors_distrusted: 1,
        sectors_missing: 0,
        disk_bytes: DISK_BYTES,
        identity: [7; 32],
        block_bytes: 8192,
    };
    assert_eq!(recovered.summary, summary);
}

/// Writes the golden ring again: only for a new format version, under a new name.
#[test]
#[ignore = "only for a new format version"]
#[allow(clippy::disallowed_methods, reason = "an image is a file")]
fn write_the_golden_ring() {
    let mut restoring = Restoring::new(8, 1);
    for (frame, block, copy) in
        [(0, 0, Copy::First), (4, 0, Copy::Second), (1, 512, Copy::First), (2, 256, Copy::First)]
    {
        restoring.place(FrameNo(frame), BlockNo(block), copy);
    }
    for (sector, sum, dirty) in
        [(0, 0xA0, true), (8, 0xA0, true), (1, 0xA1, true), (2, 0xC0, false), (5, 0xC1, false)]
    {
        restoring.set(sector, sum, dirty);
    }
    restoring.set_unproven(1);
    let index = restoring.finish(8);
    let mut writer = Writer::new(descriptor(1, 4, &ORDINALS), 64);
    writer.set_pages(RING_PAGES);
    let mut ring = vec![None; RING_PAGES as usize];
    let mut seal = |writer: &mut Writer| {
        let mut page = Vec::new();
        let sequence = writer.seal(&index, &mut page);
        ring[(sequence % RING_PAGES) as usize] = Some(page);
        sequence
    };
    let set = |frame, block, sector, sum, dirty| Change::Set {
        frame: FrameNo(frame),
        block: BlockNo(block),
        sector,
        sum,
        dirty,
        second: false,
        units: u8::MAX,
    };
    for _ in 0..22 {
        let sequence = seal(&mut writer);
        writer.committed(sequence);
    }
    writer.mark(Writer::zone_of(DISK_BYTES, 256 * 8192));
    // This block is dropped again before the end.
    writer.push(set(7, 40, 1, 0x77, true));
    writer.push(Change::Clean { frame: FrameNo(7), block: BlockNo(40), first: 1, count: 1 });
    writer.push(Change::Drop { frame: FrameNo(7), block: BlockNo(40), first: 0, count: 2 });
    let committed = seal(&mut writer);
    writer.committed(committed);
    writer.push(set(3, 300, 0, 0x31, true));
    writer.push(set(7, 41, 0, 0x71, true));
    seal(&mut writer);
    let mut text = String::from(
        "# A journal ring of format version 1; see src/journal/tests/golden.rs. Page numbers, and bytes without the zeroes at the end.\n",
    );
    for (number, page) in ring.iter().enumerate() {
        let Some(page) = page else { continue };
        let len = page.iter().rposition(|byte| *byte != 0).unwrap() + 1;
        let hex: String = page[..len].iter().map(|byte| format!("{byte:02x}")).collect();
        text += &format!("{number} {hex}\n");
    }
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/journal-v1.txt");
    std::fs::write(golden, text).unwrap();
}
