//! A ring and its writer: sizes, bypass marks, and the positions of records.

use super::*;
use crate::journal::format::Page;

/// Returns an index in which everything is valid.
fn full(frames: u32, block_shift: u32) -> Index {
    let mut restoring = Restoring::new(frames, block_shift);
    for frame in 0..frames {
        restoring.place(FrameNo(frame), BlockNo(frame), Copy::First);
        for i in 0..1u64 << block_shift {
            restoring.set((u64::from(frame) << block_shift) + i, frame, i % 3 == 0);
        }
    }
    restoring.finish(frames)
}

/// Makes as many changes as possible, with commits as late as possible: no needed page is ever
/// overwritten (`seal` asserts this).
#[test]
fn a_ring_of_the_least_length_is_long_enough() {
    for (block_shift, segment_frames, segments) in [
        (0, 16384, 1),
        (0, 1, 900),
        (0, 256, 5),
        (1, 64, 9),
        (4, 8, 40),
        (8, 1, 30),
        (8, 4, 4),
        (0, 1, 1),
        (3, 2, 1),
    ] {
        let frames = segments * segment_frames;
        let block_bytes = 4096u32 << block_shift;
        let pages = ring_pages_min(
            u64::from(frames),
            block_bytes,
            u64::from(block_bytes) * u64::from(segment_frames),
        );
        let ordinals: Vec<u32> = (0..segments).collect();
        let mut of = descriptor(block_shift, segment_frames, &ordinals);
        of.disk_bytes = 1 << 40;
        let index = full(frames, block_shift);
        let mut writer = Writer::new(of, pages);
        let change = Change::Drop { frame: FrameNo(0), block: BlockNo(0), first: 0, count: 1 };
        let mut page = Vec::new();
        while writer.sealed() < 6 * pages {
            (0..CHANGES_MAX).for_each(|_| writer.push(change));
            if writer.must_wait() {
                writer.committed(writer.sealed());
            }
            page.clear();
            writer.seal(&index, &mut page);
            assert!(page.len() == PAGE_BYTES && writer.pending() == 0);
        }
        assert!(writer.exists());
        assert!(writer.bytes() > 0);
    }
}

/// A journal ring takes about 0.7 % of a cache with 4 KiB blocks.
#[test]
fn a_ring_is_small() {
    let pages = ring_pages_min(16 << 20, 4096, 64 << 20);
    let permyriad = pages * 10_000 / (16 << 20);
    assert!((65..72).contains(&permyriad), "{permyriad}");
}

/// Bypass marks are set at once, and removed when the earlier records are in pages. The flag of a
/// clean close is in the last page.
#[test]
fn marks_and_the_end() {
    let index = full(2, 0);
    let mut writer = Writer::new(descriptor(0, 2, &[0]), 64);
    let change = Change::Clean { frame: FrameNo(0), block: BlockNo(0), first: 0, count: 1 };
    let next = |writer: &mut Writer| {
        let mut page = Vec::new();
        let sequence = writer.seal(&index, &mut page);
        writer.committed(sequence);
        let header = Page::read(&page, |_| (), |_, _| ()).unwrap().header;
        (header.zones[1] >> 3 & 1 == 1, header.clean)
    };
    assert_eq!(next(&mut writer), (false, false));
    writer.mark(11);
    assert!(writer.is_marked(11) && !writer.is_marked(10));
    assert_eq!(next(&mut writer), (true, false));
    (0..2 * CHANGES_MAX).for_each(|_| writer.push(change));
    writer.unmark(11);
    assert!(!writer.is_marked(11));
    writer.push(change);
    writer.set_clean();
    assert_eq!(next(&mut writer), (true, false));
    assert_eq!(next(&mut writer), (false, false));
    writer.mark(11);
    assert_eq!(next(&mut writer), (true, true));
    writer.unmark(11);
    writer.mark(11);
    assert_eq!(next(&mut writer), (true, true));
}

#[test]
fn zones_are_the_smallest_that_are_enough() {
    assert_eq!(Writer::zone_of(1 << 30, (1 << 20) - 1), 0);
    assert_eq!(Writer::zone_of(1 << 30, 1 << 20), 1);
    assert_eq!(Writer::zone_of(4 << 30, (4 << 30) - 1), ZONES - 1);
    assert_eq!(Writer::zone_of((4 << 30) + 1, 4 << 30), ZONES / 2);
    assert_eq!(Writer::zone_of(u64::MAX, u64::MAX - 1), ZONES - 1);
}

/// Returns a ring with one complete dump of this index.
fn ring_of(index: &Index, of: Descriptor, change: impl FnOnce(&mut Writer)) -> Vec<Vec<Option<Vec<u8>>>> {
    let mut writer = Writer::new(of, 64);
    let mut ring = vec![None; 64];
    let mut seal = |writer: &mut Writer| {
        let mut page = Vec::new();
        let sequence = writer.seal(index, &mut page);
        ring[sequence as usize] = Some(page);
        writer.committed(sequence);
    };
    while !writer.first_dump_done() {
        seal(&mut writer);
    }
    change(&mut writer);
    seal(&mut writer);
    vec![ring]
}

fn recover(ring: &[Vec<Option<Vec<u8>>>], segment_bytes: u64, ordinals: &[u32]) -> Recovered {
    let Ring::Whole(plan) = survey(ring) else { panic!("it is whole") };
    replay(plan, ring, segment_bytes, ordinals).unwrap().finish(&[])
}

/// Compares two indexes block by block and sector by sector.
fn assert_same(left: &Index, right: &Index) {
    assert_eq!(left.frames(), right.frames());
    assert_eq!(left.used(), right.used());
    assert_eq!((left.sectors_valid(), left.dirty_sectors()), (right.sectors_valid(), right.dirty_sectors()));
    assert_eq!(left.blocks_holding_data(), right.blocks_holding_data());
    for frame in (0..left.frames()).map(FrameNo) {
        let first = left.first_sector(frame);
        assert_eq!(left.block_is_empty(first), right.block_is_empty(first));
        assert_eq!(
            (left.second_of(frame), left.first_of(frame)),
            (right.second_of(frame), right.first_of(frame))
        );
        if left.block_is_empty(first) {
            continue;
        }
        assert_eq!(left.block(frame), right.block(frame));
        assert_eq!(left.find(left.block(frame)), right.find(left.block(frame)));
        for sector in first..first + left.sectors_in_block() as u64 {
            assert_eq!(left.is_valid(sector), right.is_valid(sector));
            assert_eq!(left.is_dirty(sector), right.is_dirty(sector));
            assert_eq!(left.is_unproven(sector), right.is_unproven(sector));
            assert!(!left.is_valid(sector) || left.sum(sector) == right.sum(sector));
        }
    }
}

/// An index without damage is the same after its recovery from the journal, and can be used.
#[test]
fn an_index_comes_back() {
    for seed in 0..60 {
        let mut rng = SimRng(seed);
        let block_shift = [0, 0, 1, 3, 8][rng.below(5)];
        let mut index = Index::new(12, block_shift);
        index.keep_marks();
        for block in 0..rng.below(13) as u32 {
            let frame = index.insert(BlockNo(block * 3)).unwrap();
            for i in 0..1u64 << block_shift {
                let sector = index.first_sector(frame) + i;
                if i == 0 || rng.one_in(2) {
                    index.set_valid(sector, rng.next() as u32);
                    if rng.one_in(2) {
                        index.set_dirty(sector);
                        index.set_unproven(sector, rng.one_in(4));
                    }
                }
            }
        }
        for frame in (0..12).map(FrameNo) {
            if !index.block_is_empty(index.first_sector(frame)) && rng.one_in(3) {
                index.clear_valid(index.first_sector(frame), 1 << block_shift);
                index.remove(frame);
            }
        }
        let of = descriptor(block_shift, 4, &[7, 0, 3]);
        let ring = ring_of(&index, of, |_| ());
        let mut recovered = recover(&ring, 4 * (4096 << block_shift), &[7, 0, 3]);
        assert_same(&recovered.index, &index);
        assert_eq!(recovered.summary.sectors_missing, 0);
        let dirty: Vec<_> = recovered.dirty().collect();
        assert_eq!(dirty.len() as u64, index.dirty_sectors());
        assert!(dirty.is_sorted_by_key(|dirty| dirty.sector));
        let clean = index.sectors_valid() - index.dirty_sectors();
        for count in [0, 1, 3, 1000] {
            let mut samples = recovered.samples(count);
            assert_eq!(samples.len() as u64, clean.min(count as u64));
            samples.dedup();
            for (sector, sum) in samples {
                let frame = index.find(BlockNo((sector >> block_shift) as u32)).unwrap();
                assert_eq!(index.sum(index.first_sector(frame) + sector % (1 << block_shift)), sum);
            }
        }
        // Free frames are handed out once each.
        let free = 12 - recovered.index.used();
        let taken: Vec<_> = (0..12).map_while(|i| recovered.index.insert(BlockNo(100 + i))).collect();
        assert_eq!(taken.len() as u32, free);
        // Positions on flash depend on ordinals.
        let mut moved = recover(&ring, 4 * (4096 << block_shift), &[3, 7, 0]);
        let place = |index: &Index, block| index.find(BlockNo(block)).map(|frame| frame.0);
        for block in (0..13).map(|block| block * 3) {
            let there = place(&index, block).map(|frame| (frame + 4) % 12);
            assert_eq!(place(&moved.index, block), there);
        }
        moved.drop_clean();
        assert_eq!(moved.summary.sectors_valid, index.dirty_sectors());
        assert_eq!(moved.index.dirty_sectors(), index.dirty_sectors());
        moved.discard_dirty();
        assert_eq!((moved.index.used(), moved.index.sectors_valid()), (0, 0));
        assert!((0..12).all(|frame| !moved.index.is_pinned(FrameNo(frame))));
        assert_eq!((0..20).map_while(|i| moved.index.insert(BlockNo(i))).count(), 12);
    }
}

/// Two copies: equal copies remain a pair, different versions do not, and a remaining copy becomes
/// the first.
#[test]
fn second_copies() {
    let mut restoring = Restoring::new(12, 1);
    let frame = FrameNo;
    for (at, block, copy, sums) in [
        (0, 1, Copy::First, [11, 12]),
        (4, 1, Copy::Second, [11, 12]),
        (1, 2, Copy::First, [21, 22]),
        (5, 2, Copy::Second, [21, 99]),
        (6, 3, Copy::Second, [31, 32]),
        (8, 4, Copy::First, [41, 42]),
        (7, 4, Copy::Second, [41, 42]),
        (9, 5, Copy::First, [51, 52]),
    ] {
        restoring.place(frame(at), BlockNo(block), copy);
        restoring.set(u64::from(at) * 2, sums[0], true);
        restoring.set(u64::from(at) * 2 + 1, sums[1], true);
    }
    let index = restoring.finish(12);
    assert_eq!(index.second_of(frame(1)), Some(frame(5)));
    assert_eq!(index.find(BlockNo(3)), Some(frame(6)));
    let ring = ring_of(&index, descriptor(1, 4, &[0, 1, 2]), |_| ());
    let there = recover(&ring, 4 * 8192, &[0, 1, 2]);
    assert_eq!(there.index.second_of(frame(0)), Some(frame(4)));
    assert_eq!(there.index.find(BlockNo(1)), Some(frame(0)));
    assert_eq!(there.index.first_of(frame(5)), Some(frame(1)));
    assert!(there.index.is_valid(10) && !there.index.is_valid(11), "of another version");
    assert_eq!(there.index.find(BlockNo(3)), Some(frame(6)));
    assert_eq!(there.dirty().filter(|dirty| dirty.second.is_some()).count(), 5);
    assert_eq!(there.summary.sectors_missing, 0);

    // The device with the third segment is lost: blocks 4 and 5 were there, and block 4 also
    // elsewhere.
    let mut left = recover(&ring, 4 * 8192, &[0, 1]);
    assert_eq!(left.index.frames(), 8);
    assert_eq!((left.index.find(BlockNo(4)), left.index.find(BlockNo(5))), (Some(frame(7)), None));
    assert_eq!(left.index.first_of(frame(7)), None);
    assert_eq!(left.summary.sectors_missing, 2);
    left.discard_dirty();
    assert_eq!((0..20).map_while(|i| left.index.insert(BlockNo(i))).count(), 8);

    // The device with the second segment is lost: only block 3 was nowhere else.
    let middle = recover(&ring, 4 * 8192, &[0, 2]);
    assert_eq!(middle.summary.sectors_missing, 2);
    assert_eq!(
        (middle.index.find(BlockNo(2)), middle.index.find(BlockNo(4))),
        (Some(frame(1)), Some(frame(4)))
    );
    assert_eq!((middle.index.find(BlockNo(3)), middle.index.second_of(frame(1))), (None, None));

    // For blocks 1 and 2, at least one copy exists.
    let right = recover(&ring, 4 * 8192, &[1, 2]);
    assert_eq!(right.index.find(BlockNo(1)), Some(frame(0)));
    // Both copies had one sector of block 2; only the lost copy had the other sector, in its last
    // version.
    assert_eq!(right.summary.sectors_missing, 0);
    assert!(right.index.is_valid(2) && right.index.is_dirty(3));
}

/// Scrubbing records the checksums of two copies one after the other.
#[test]
fn a_checksum_that_only_one_copy_has_applies_to_both() {
    for unproven in [0, 4] {
        let mut restoring = Restoring::new(8, 0);
        for (at, copy) in [(0, Copy::First), (4, Copy::Second)] {
            restoring.place(FrameNo(at), BlockNo(1), copy);
            restoring.set(u64::from(at), 11, true);
        }
        restoring.set_unproven(unproven);
        let ring = ring_of(&restoring.finish(8), descriptor(0, 4, &[0, 1]), |_| ());
        let Ring::Whole(plan) = survey(&ring) else { panic!("it is whole") };
        let mut replay = replay(plan, &ring, 4 * 4096, &[0, 1]).unwrap();
        let sums = vec![Some(11); replay.to_prove().len()];
        let index = replay.finish(&sums).index;
        assert_eq!(index.second_sector(0), Some(4), "the sector {unproven} is unproven");
        assert!(
            [0, 4].iter().all(|at| index.is_dirty(*at) && index.sum(*at) == 11 && !index.is_unproven(*at))
        );
    }
}

/// Recovers a sector of two copies whose durable checksum is 11, and which is unproven. The journal
/// tail commits these checksums one after the other, each followed by an overwrite. Returns the
/// checksum that recovery chooses if flash has `on_flash` in the two copies.
fn chosen_after(committed: &[u32], on_flash: [u32; 2]) -> u32 {
    let mut restoring = Restoring::new(8, 0);
    for (at, copy) in [(0, Copy::First), (4, Copy::Second)] {
        restoring.place(FrameNo(at), BlockNo(1), copy);
        restoring.set(u64::from(at), 11, true);
        restoring.set_unproven(u64::from(at));
    }
    let index = restoring.finish(8);
    let mut ring = ring_of(&index, descriptor(0, 4, &[0, 1]), |_| ());
    let mut writer = Writer::new(descriptor(0, 4, &[0, 1]), 64);
    while !writer.first_dump_done() {
        writer.seal(&index, &mut Vec::new());
        writer.committed(writer.sealed());
    }
    writer.seal(&index, &mut Vec::new());
    writer.committed(writer.sealed());
    let copies = [(FrameNo(0), false), (FrameNo(4), true)];
    let block = BlockNo(1);
    for sum in committed {
        for (frame, second) in copies {
            writer.push(Change::Set {
                frame,
                block,
                sector: 0,
                sum: *sum,
                dirty: true,
                second,
                units: u8::MAX,
            });
        }
        for (frame, _) in copies {
            writer.push(Change::Unproven { frame, block, first: 0, count: 1, after_set: true });
        }
    }
    let mut page = Vec::new();
    let sequence = writer.seal(&index, &mut page);
    ring[0][sequence as usize] = Some(page);
    let Ring::Whole(plan) = survey(&ring) else { panic!("it is whole") };
    let mut replay = replay(plan, &ring, 4 * 4096, &[0, 1]).unwrap();
    let sums: Vec<_> =
        replay.to_prove().iter().map(|(segment, _)| Some(on_flash[*segment as usize])).collect();
    assert!(sums.len() >= 2, "both copies are read");
    let recovered = replay.finish(&sums);
    recovered.dirty().next().expect("one copy is right").place.sum.expect("it was read")
}

/// The tail committed newer checksums than the rest of the journal has, and the sector was
/// overwritten again after that. So neither copy has the last committed checksum, and a copy with an
/// older one is wrong.
#[test]
fn an_undone_checksum_supersedes_the_earlier_ones() {
    // The last commit before the tail had the checksum 11.
    assert_eq!(chosen_after(&[], [11, 31]), 11);
    assert_eq!(chosen_after(&[], [31, 11]), 11);
    assert_eq!(chosen_after(&[21], [11, 31]), 31, "11 was superseded by 21");
    assert_eq!(chosen_after(&[21], [31, 11]), 31);
    assert_eq!(chosen_after(&[21], [21, 31]), 21, "the last commit");
    assert_eq!(chosen_after(&[21], [31, 21]), 21);
    assert_eq!(chosen_after(&[21, 22], [21, 31]), 31, "21 was superseded by 22");
    assert_eq!(chosen_after(&[21, 22], [11, 31]), 31);
    assert_eq!(chosen_after(&[21, 22], [31, 22]), 22);
    assert_eq!(chosen_after(&[21, 11], [31, 11]), 11, "11 was written again");
    assert_eq!(chosen_after(&[21], [32, 31]), 32, "nothing is known of either");
}

#[test]
fn marked_zones_are_not_trusted_after_a_crash() {
    let mut restoring = Restoring::new(4, 0);
    for (at, block) in [(0, 0), (1, 1), (2, 256), (3, 512)] {
        restoring.place(FrameNo(at), BlockNo(block), Copy::First);
        restoring.set(u64::from(at), at, at == 1);
    }
    let index = restoring.finish(4);
    let marks = |writer: &mut Writer| [0, 2].into_iter().for_each(|zone| writer.mark(zone));
    let crashed = recover(&ring_of(&index, descriptor(0, 4, &[0]), marks), 4 * 4096, &[0]);
    assert_eq!(crashed.summary.sectors_distrusted, 2);
    assert!(crashed.index.is_dirty(1) && crashed.index.is_valid(2) && !crashed.index.is_valid(0));
    let closed = |writer: &mut Writer| {
        marks(writer);
        writer.set_clean();
    };
    let closed = recover(&ring_of(&index, descriptor(0, 4, &[0]), closed), 4 * 4096, &[0]);
    assert!(closed.summary.clean && closed.summary.sectors_distrusted == 0);
    assert_same(&closed.index, &index);
}

#[test]
fn a_ring_is_refused_with_the_wrong_segments() {
    let index = full(4, 0);
    let ring = ring_of(&index, descriptor(0, 4, &[1]), |_| ());
    let with = |segment_bytes, ordinals: &[u32]| {
        let Ring::Whole(plan) = survey(&ring) else { panic!("it is whole") };
        replay(plan, &ring, segment_bytes, ordinals).err()
    };
    assert_eq!(with(8192, &[1]), Some(ReplayError::SegmentBytes { expected: 16384 }));
    assert_eq!(with(16384, &[]), Some(ReplayError::NoSegments));
    assert_eq!(with(16384, &[1, 2, 1]), Some(ReplayError::SegmentTwice(1)));
    assert_eq!(with(16384, &[1, 2]), None);
    let Ring::Whole(plan) = survey(&ring) else { panic!("it is whole") };
    let mut replay = Replay::new(plan, 16384, &on_own_devices(&[1])).unwrap();
    assert_eq!(replay.page(&[0; PAGE_BYTES]), Err(ReplayError::Changed { sequence: 1 }));
}

/// Measures the duration of recovery for 16 Mi full frames and a ring of twice the dump's size, in
/// release mode on one core.
#[test]
#[ignore = "a measurement"]
#[allow(clippy::disallowed_methods, reason = "a measurement has a clock, and the system knows it")]
fn sixteen_million_blocks() {
    let (segment_frames, segments) = (16384, 1024);
    let frames = segment_frames * segments;
    let ordinals: Vec<u32> = (0..segments).collect();
    let pages = ring_pages_min(u64::from(frames), 4096, 64 << 20);
    let mut of = descriptor(0, segment_frames, &ordinals);
    of.disk_bytes = 1 << 40;
    let mut restoring = Restoring::new(frames, 0);
    for frame in 0..frames {
        restoring.place(FrameNo(frame), BlockNo(frame.wrapping_mul(0x9e37_79b1) >> 4), Copy::First);
        restoring.set(u64::from(frame), frame, frame % 8 == 0);
    }
    let index = restoring.finish(frames);
    let mut writer = Writer::new(of, pages);
    let mut ring = vec![0; pages as usize * PAGE_BYTES];
    let mut page = Vec::new();
    let change = |n: u32| {
        let frame = FrameNo(n.wrapping_mul(0x85eb_ca6b) % frames);
        let block = index.block(frame);
        Change::Set {
            frame,
            block,
            sector: 0,
            sum: index.sum(index.first_sector(frame)),
            dirty: true,
            second: false,
            units: u8::MAX,
        }
    };
    let mut n = 0;
    while writer.sealed() < pages + pages / 3 {
        if writer.must_wait() {
            writer.committed(writer.sealed());
        }
        if writer.exists() {
            (n..n + CHANGES_MAX as u32).for_each(|n| writer.push(change(n)));
            n += CHANGES_MAX as u32;
        }
        page.clear();
        let sequence = writer.seal(&index, &mut page);
        ring[writer.page_number(sequence) as usize * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(&page);
    }
    let (ring, _) = ring.as_chunks::<PAGE_BYTES>();
    // CPU time of this thread, nanoseconds.
    let cpu = || -> u64 {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        text.split(' ').next().unwrap().parse().unwrap()
    };
    let start = cpu();
    let mut survey = Survey::new(CACHE, RING, 1, pages);
    ring.iter().zip(0..).for_each(|(page, number)| survey.page(0, number, page));
    let Ring::Whole(plan) = survey.finish() else { panic!("it is whole") };
    let surveyed = cpu();
    let reads: Vec<_> = plan.reads().collect();
    let mut replay = Replay::new(plan, 64 << 20, &on_own_devices(&ordinals)).unwrap();
    reads.iter().for_each(|(_, number)| replay.page(&ring[*number as usize]).unwrap());
    let replayed = cpu();
    let sums: Vec<_> = vec![None; replay.to_prove().len()];
    let recovered = replay.finish(&sums);
    eprintln!(
        "{pages} pages, {} read twice, {} sectors to prove: survey {} ms, replay {} ms, end {} ms of processor time",
        reads.len(),
        sums.len(),
        (surveyed - start) / 1_000_000,
        (replayed - surveyed) / 1_000_000,
        (cpu() - replayed) / 1_000_000
    );
    assert!(recovered.summary.sectors_valid > u64::from(frames) * 9 / 10);
}
