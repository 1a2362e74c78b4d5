//! Invalid bytes: whatever a ring contains, recovery ends, within bounds, without a panic.

use proptest::prelude::*;

use super::*;
use crate::journal::format::{FrameState, Header, Kind, Page, PageBuilder, Record};
use crate::journal::replay_bytes;

/// Returns a small valid ring, page after page.
fn sound(block_shift: u32) -> Vec<u8> {
    let mut restoring = Restoring::new(8, block_shift);
    for frame in 0..7 {
        restoring.place(FrameNo(frame), BlockNo(frame), Copy::First);
        restoring.set(u64::from(frame) << block_shift, frame, frame % 2 == 0);
    }
    let index = restoring.finish(8);
    let mut writer = Writer::new(descriptor(block_shift, 4, &[0, 1]), 64);
    let mut ring = Vec::new();
    for frame in 0..6 {
        let block = BlockNo(frame);
        let frame = FrameNo(frame);
        writer.push(Change::Set {
            frame,
            block,
            sector: 0,
            sum: 9,
            dirty: true,
            second: false,
            units: u8::MAX,
        });
        writer.push(Change::Unproven { frame, block, first: 0, count: 1 << block_shift, after_set: false });
        let sequence = writer.seal(&index, &mut ring);
        if block.0 < 3 {
            writer.committed(sequence);
        }
    }
    ring
}

#[test]
fn sound_pages_are_found() {
    for shift in 0..9 {
        let found = replay_bytes(&sound(shift), false).expect("it is sound");
        assert!(found.sectors_valid >= 3 && found.sectors_missing > 0);
    }
}

proptest! {
    #[test]
    fn arbitrary_pages(bytes in prop::collection::vec(any::<u8>(), 0..4 * PAGE_BYTES)) {
        replay_bytes(&bytes, true);
        replay_bytes(&bytes, false);
    }

    /// Returns valid pages with some bytes changed, and with correct checksums.
    #[test]
    fn almost_sound_pages(shift in 0u32..9,
        changes in prop::collection::vec((0usize..6 * PAGE_BYTES, any::<u8>()), 0..8),
        near in prop::collection::vec((0usize..6, 0usize..0x90, any::<u8>()), 0..4)) {
        let mut bytes = sound(shift);
        changes.into_iter().for_each(|(at, byte)| bytes[at] = byte);
        near.into_iter().for_each(|(page, at, byte)| bytes[page * PAGE_BYTES + at] = byte);
        replay_bytes(&bytes, true);
    }

    /// A page that was written and parsed equals the original page.
    #[test]
    fn pages_come_back(block_shift in 0u32..9, seed in any::<u64>(), clean in any::<bool>()) {
        let mut rng = SimRng(seed);
        let sectors = 1usize << block_shift;
        let header = Header {
            sequence: 100, cache: CACHE, ring: 9, block_shift, clean, committed: 90, dump_begin: 3, dump_end: 80,
            disk_bytes: 1 << 40, identity: [3; 32], segment_frames: 4, failed_segments: [1, u32::MAX, 0, 9], zones: [0xA5; 512],
        };
        let records: Vec<Record> = (0..rng.below(CHANGES_MAX + 1)).map(|_| {
            let kind = match rng.below(4) {
                0 => Kind::Set { sum: rng.next() as u32, dirty: rng.one_in(2), second: rng.one_in(2), units: u8::MAX },
                1 => Kind::Clean,
                2 => Kind::Drop,
                _ => Kind::Unproven,
            };
            let first = rng.below(sectors);
            let count = if matches!(kind, Kind::Set { .. }) { 1 } else { 1 + rng.below(sectors - first) };
            let (frame, block) = (rng.next() as u32, rng.below(1 << 20) as u32);
            Record { kind, first: first as u8, count: count as u16, frame, block }
        }).collect();
        let frames: Vec<(u32, FrameState)> = (0..rng.below(9)).map(|i| {
            let mut state = FrameState::new();
            if rng.one_in(4) {
                return (8 + i as u32, state);
            }
            state.clear(rng.below(1 << 20) as u32, rng.one_in(2));
            for sector in 0..sectors {
                if sector == 0 || rng.one_in(3) {
                    state.valid.set(sector);
                    state.sums[sector] = rng.next() as u32;
                    if rng.one_in(2) {
                        state.dirty.set(sector);
                        if rng.one_in(2) {
                            state.unproven.set(sector);
                        }
                    }
                }
            }
            (8 + i as u32, state)
        }).collect();
        let mut bytes = Vec::new();
        let mut page = PageBuilder::new(&header, &mut bytes);
        records.iter().for_each(|record| page.record(record));
        let fitting = frames.iter().take_while(|(number, state)| page.frame(*number, state)).count();
        page.finish();

        let page = Page::read(&bytes, |_| (), |_, _| ()).expect("it is sound");
        prop_assert_eq!(&page.header, &header);
        let mut read = Vec::new();
        page.records(|record| read.push(record));
        prop_assert_eq!(read, records);
        let mut at = 0;
        page.dump(&mut FrameState::new(), |number, state| {
            let (expected, was) = &frames[at];
            assert_eq!((number, state.is_empty()), (*expected, was.is_empty()));
            if !was.is_empty() {
                assert_eq!((state.block, state.second), (was.block, was.second));
                assert_eq!((state.valid, state.dirty, state.unproven), (was.valid, was.dirty, was.unproven));
                let valid = (0..sectors).filter(|i| was.valid.get(*i));
                valid.for_each(|i| assert_eq!(state.sums[i], was.sums[i]));
            }
            at += 1;
        });
        prop_assert_eq!(at, fitting);
        let flip = rng.below(PAGE_BYTES);
        bytes[flip] ^= 1 << rng.below(8);
        prop_assert!(Page::read(&bytes, |_| (), |_, _| ()).is_none(), "any bit is noticed");
    }
}
