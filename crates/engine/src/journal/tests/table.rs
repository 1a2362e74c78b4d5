//! Every case of the tables of `survey.rs` and `replay.rs`.

use super::*;
use crate::journal::format::{Kind, Page};

type Copies = Vec<Vec<Option<Vec<u8>>>>;

/// Writes `pages` pages to a small ring, with a commit after each page whose bit in `commits` is
/// set. Returns the pages in order, and the last committed page.
fn history(pages: u64, commits: u64, ring_pages: u64) -> (Vec<Vec<u8>>, u64) {
    let mut writer = Writer::new(descriptor(0, 2, &[0]), 64);
    writer.set_pages(ring_pages);
    writer.limits = Limits { changes: 2, frames: 1, uncommitted: 4 };
    let index = Restoring::new(2, 0).finish(2);
    let (mut sealed, mut committed) = (Vec::new(), 0);
    for i in 0..pages {
        if writer.must_wait() || commits >> (i % 64) & 1 == 1 {
            committed = writer.sealed();
            writer.committed(committed);
        }
        let mut page = Vec::new();
        writer.seal(&index, &mut page);
        sealed.push(page);
    }
    (sealed, committed)
}

/// Returns the ring if only the pages for which `is_there` returns true were written, in order.
fn ring_of(sealed: &[Vec<u8>], ring_pages: u64, is_there: impl Fn(u64) -> bool) -> Vec<Option<Vec<u8>>> {
    let mut ring = vec![None; ring_pages as usize];
    for (page, sequence) in sealed.iter().zip(1..).filter(|(_, sequence)| is_there(*sequence)) {
        ring[(sequence % ring_pages) as usize] = Some(page.clone());
    }
    ring
}

/// Returns the end of the journal by its definition.
fn end_of(ring: &[Option<Vec<u8>>]) -> (u64, u64) {
    let pages: Vec<_> =
        ring.iter().flatten().filter_map(|page| Some(Page::read(page, |_| (), |_, _| ())?.header)).collect();
    let is_there = |sequence| pages.iter().any(|page| page.sequence == sequence);
    let ends =
        pages.iter().filter(|page| page.dump_begin > 0 && (page.dump_begin..=page.sequence).all(is_there));
    (
        ends.map(|page| page.sequence).max().unwrap_or(0),
        pages.iter().map(|page| page.committed).max().unwrap_or(0),
    )
}

#[test]
fn any_pages_after_the_last_commit_may_be_missing() {
    const RING: u64 = 2 * 2 + 2 * 4 - 1;
    let mut ends = std::collections::BTreeSet::new();
    for pages in 1..40 {
        for commits in [0, u64::MAX, 0x9249_2492_4924_9249, 0x1111_1111_1111_1111, 0x0f0f_0ff0_3c3c_5a5a] {
            let (sealed, committed) = history(pages, commits, RING);
            let open = pages - committed;
            for kept in 0..1u64 << open {
                let there = |sequence| sequence <= committed || kept >> (sequence - committed - 1) & 1 == 1;
                let ring = ring_of(&sealed, RING, there);
                let (end, durable) = end_of(&ring);
                assert!(durable <= end || end == 0 && durable == 0, "never damaged by a power cut");
                match survey(&[ring]) {
                    Ring::Whole(plan) => {
                        assert_eq!((plan.end, plan.begin > 0), (end, true));
                        assert!(plan.end >= committed && plan.committed <= plan.end);
                        ends.insert(plan.end - committed);
                    }
                    Ring::Unfinished => assert!(end == 0 && committed <= 2, "{pages} {commits:x} {kept:x}"),
                    Ring::Damaged { .. } => panic!("{pages} {commits:x} {kept:x}"),
                }
            }
        }
    }
    assert!(ends.len() > 4, "tails of every length were met");
}

#[test]
fn a_lost_page_that_was_durable_is_not_overlooked() {
    const RING: u64 = 2 * 2 + 2 * 4 - 1;
    let (mut damaged, mut harmless) = (0, 0);
    for pages in 4..40 {
        let (sealed, committed) = history(pages, 0x9249_2492_4924_9249, RING);
        let whole = ring_of(&sealed, RING, |_| true);
        for lost in 0..RING as usize {
            let Some(sequence) =
                whole[lost].as_ref().map(|page| Page::read(page, |_| (), |_, _| ()).unwrap().header.sequence)
            else {
                continue;
            };
            let mut ring = whole.clone();
            ring[lost].as_mut().unwrap()[100] ^= 1;
            // The other copy has it.
            let Ring::Whole(plan) = survey(&[ring.clone(), whole.clone()]) else {
                panic!("one copy is whole")
            };
            assert!(plan.end == pages);
            replay(plan, &[ring.clone(), whole.clone()], 2 * 4096, &[0]).unwrap();
            match survey(&[ring.clone()]) {
                Ring::Whole(plan) => {
                    harmless += 1;
                    assert!(plan.end < sequence || plan.begin > sequence);
                    // No existing page confirms that this page was durable.
                    let told = end_of(&ring).1;
                    assert!(
                        plan.begin > sequence || told < sequence,
                        "{pages}: page {sequence} of {committed}"
                    );
                }
                Ring::Damaged { missing } => {
                    damaged += 1;
                    assert_eq!(missing, sequence);
                }
                Ring::Unfinished => assert!(end_of(&ring).1 == 0),
            }
        }
    }
    assert!(damaged > 50 && harmless > 50);
}

/// Content of a sector of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    Nothing,
    Clean(u32),
    Dirty(u32),
    Unproven,
    OtherBlock,
}

const BLOCK: BlockNo = BlockNo(9);
const OTHER: BlockNo = BlockNo(10);
const OLD: u32 = 77;
const NEW: u32 = 88;

/// Replays a committed state and then these records in the tail, after a power cut; `flash` is the
/// sector's content then.
fn after(before: Holds, tail: &[Change], flash: Option<u32>) -> (Holds, Summary) {
    after_end(before, tail, flash, false)
}

/// Replays a committed state and then these records in the tail, after a power cut or after the
/// process was killed.
fn after_end(before: Holds, tail: &[Change], flash: Option<u32>, was_killed: bool) -> (Holds, Summary) {
    let mut restoring = Restoring::new(2, 1);
    let frame = FrameNo(1);
    match before {
        Holds::Nothing => {}
        Holds::OtherBlock => {
            restoring.place(frame, OTHER, Copy::First);
            restoring.set(2, OLD, false);
        }
        Holds::Clean(sum) | Holds::Dirty(sum) => {
            restoring.place(frame, BLOCK, Copy::First);
            restoring.set(2, sum, before == Holds::Dirty(sum));
        }
        Holds::Unproven => {
            restoring.place(frame, BLOCK, Copy::First);
            restoring.set(2, OLD, true);
            restoring.set_unproven(2);
        }
    }
    let index = restoring.finish(2);
    let mut writer = Writer::new(descriptor(1, 2, &[5]), 64);
    let mut ring = vec![None; 64];
    let mut seal = |writer: &mut Writer| {
        let mut page = Vec::new();
        let sequence = writer.seal(&index, &mut page);
        ring[sequence as usize] = Some(page);
        sequence
    };
    while !writer.first_dump_done() {
        seal(&mut writer);
    }
    writer.committed(writer.sealed());
    let named = seal(&mut writer);
    writer.committed(named);
    // Dumps in the tail are ignored.
    tail.iter().for_each(|change| writer.push(*change));
    seal(&mut writer);
    let ring: Copies = vec![ring];
    let Ring::Whole(mut plan) = survey(&ring) else { panic!("it is whole") };
    plan.was_killed = was_killed;
    let mut replay = replay(plan, &ring, 2 * 8192, &[5]).unwrap();
    let sums: Vec<_> =
        replay.to_prove().iter().map(|place| [flash, None][usize::from(*place != (0, 2))]).collect();
    let recovered = replay.finish(&sums);
    let index = &recovered.index;
    let holds = match index.find(BLOCK) {
        _ if index.find(OTHER).is_some() => Holds::OtherBlock,
        Some(found) if index.is_valid(2) => {
            assert_eq!(found, frame);
            match (index.is_unproven(2), index.is_dirty(2)) {
                (true, dirty) => {
                    assert!(dirty && index.is_sum_unknown(2));
                    Holds::Unproven
                }
                (false, true) => Holds::Dirty(index.sum(2)),
                (false, false) => Holds::Clean(index.sum(2)),
            }
        }
        _ => Holds::Nothing,
    };
    (holds, recovered.summary)
}

#[test]
fn every_record_in_the_tail_over_every_state() {
    use Holds::*;
    let (frame, block) = (FrameNo(1), BLOCK);
    let set = |dirty| Change::Set { frame, block, sector: 0, sum: NEW, dirty, second: false, units: u8::MAX };
    let clean = Change::Clean { frame, block, first: 0, count: 2 };
    let drop = Change::Drop { frame, block, first: 0, count: 2 };
    let unproven = Change::Unproven { frame, block, first: 0, count: 2, after_set: false };
    for before in [Nothing, Clean(OLD), Dirty(OLD), Unproven, OtherBlock] {
        for flash in [Some(OLD), Some(NEW), Some(5), None] {
            let case = format!("{before:?} {flash:?}");
            // A clean sector with a different checksum on flash is dropped.
            let undone = match before {
                Clean(_) | OtherBlock if flash != Some(OLD) => Nothing,
                other => other,
            };
            let (holds, summary) = after(before, &[set(true)], flash);
            let proven = flash == Some(NEW);
            // Unreadable data was written, and is lost.
            let applied = proven || flash.is_none() && before != Unproven;
            assert_eq!(holds, if applied { Dirty(NEW) } else { undone }, "{case}");
            assert_eq!(summary.sectors_undone, u64::from(!applied), "{case}");
            // A killed process has written all data that its records describe.
            let (holds, summary) = after_end(before, &[set(true)], flash, true);
            let applied_after_kill = proven || before != Unproven;
            assert_eq!(holds, if applied_after_kill { Dirty(NEW) } else { undone }, "{case}");
            assert_eq!(summary.sectors_undone, u64::from(!applied_after_kill), "{case}");

            let holds_block = !matches!(before, Nothing | OtherBlock);
            let (holds, _) = after(before, &[set(false)], flash);
            assert_eq!(holds, if holds_block { Clean(NEW) } else { before }, "{case}");

            let cleaned = match before {
                // For unknown checksums the dump has arbitrary values, so flash does not match a
                // clean sector's checksum.
                Dirty(sum) => Clean(sum),
                Unproven => Clean(OLD),
                other => other,
            };
            assert_eq!(after(before, &[clean], flash).0, cleaned, "{case}");
            let dropped = if holds_block { Nothing } else { before };
            assert_eq!(after(before, &[drop], flash).0, dropped, "{case}");
            let doubted = if matches!(before, Dirty(_) | Unproven) { Unproven } else { before };
            assert_eq!(after(before, &[unproven], flash).0, doubted, "{case}");

            // The backing has newer data than flash.
            for record in [clean, drop, set(false)] {
                let (holds, summary) = after(before, &[set(true), record], flash);
                let expected = match (record == set(false), record == clean, applied || holds_block) {
                    (true, _, true) if flash == Some(NEW) => Clean(NEW),
                    // The sector's checksum had to be compared, and flash has different data.
                    (true, _, true) => Nothing,
                    (false, true, _) if proven => Clean(NEW),
                    (_, _, true) => Nothing,
                    _ => undone,
                };
                assert_eq!(holds, expected, "{case} {record:?}");
                assert_eq!(summary.sectors_undone, 0);
            }
        }
    }
}

/// The last commit before a crash is in the tail. Its data on a missing device is missing, not undone.
#[test]
fn records_of_the_tail_on_a_missing_segment_are_counted() {
    let index = Restoring::new(4, 1).finish(4);
    let mut writer = Writer::new(descriptor(1, 2, &[5, 6]), 64);
    let mut ring = vec![None; 64];
    let mut seal = |writer: &mut Writer| {
        let mut page = Vec::new();
        let sequence = writer.seal(&index, &mut page);
        ring[sequence as usize] = Some(page);
    };
    while !writer.first_dump_done() {
        seal(&mut writer);
    }
    writer.committed(writer.sealed());
    for (frame, block) in [(FrameNo(0), BLOCK), (FrameNo(3), OTHER)] {
        writer.push(Change::Set {
            frame,
            block,
            sector: 0,
            sum: NEW,
            dirty: true,
            second: false,
            units: u8::MAX,
        });
    }
    seal(&mut writer);
    let ring: Copies = vec![ring];
    for (present, sectors, missing) in [(&[5, 6][..], 4, 0), (&[5], 2, 1)] {
        let Ring::Whole(plan) = survey(&ring) else { panic!("it is whole") };
        let mut replay = replay(plan, &ring, 2 * 8192, present).unwrap();
        let sums = vec![Some(NEW); replay.to_prove().len()];
        let summary = replay.finish(&sums).summary;
        assert_eq!((summary.sectors_dirty, summary.sectors_missing), (sectors / 2, missing));
        assert_eq!(summary.sectors_undone, 0);
    }
}

/// If a crash leaves one of two pages, both copies of a sector are recorded, or none.
#[test]
fn the_two_copies_of_a_sector_are_set_in_one_page() {
    let index = Restoring::new(8, 0).finish(8);
    for changes in 2..5 {
        let mut writer = Writer::new(descriptor(0, 2, &[0, 1, 2, 3]), 64);
        writer.limits = Limits { changes, frames: 8, uncommitted: 4 };
        writer.push(Change::Drop { frame: FrameNo(7), block: BlockNo(9), first: 0, count: 1 });
        for sector in 0..3 {
            for second in [false, true] {
                let (frame, block) = (FrameNo(sector * 2 + u32::from(second)), BlockNo(sector));
                writer.push(Change::Set {
                    frame,
                    block,
                    sector: 0,
                    sum: sector,
                    dirty: true,
                    second,
                    units: u8::MAX,
                });
            }
        }
        while writer.pending() > 0 {
            let mut bytes = Vec::new();
            writer.seal(&index, &mut bytes);
            writer.committed(writer.sealed());
            let mut sets = 0;
            let page = Page::read(&bytes, |_| (), |_, _| ()).expect("it is one");
            page.records(|record| sets += usize::from(record.kind != Kind::Drop));
            assert!(sets.is_multiple_of(2), "{sets} in a page of {changes}");
        }
    }
}

/// Each page lists the incomplete sectors of its own time. A sector that was dropped since is still
/// incomplete in an earlier part of the dump, until the page with the *drop* record is there.
#[test]
fn a_sector_is_incomplete_until_a_page_records_its_drop() {
    let mut restoring = Restoring::new(4, 0);
    for frame in 0..4 {
        restoring.place(FrameNo(frame), BlockNo(frame), Copy::First);
        restoring.set(u64::from(frame), NEW, true);
    }
    restoring.set_units(1, 0b100);
    let mut index = restoring.finish(4);
    let mut writer = Writer::new(descriptor(0, 4, &[0]), 64);
    writer.limits = Limits { changes: 1, frames: 2, uncommitted: 4 };
    let mut ring = vec![None; 64];
    let mut seal = |writer: &mut Writer, index: &Index| {
        let mut page = Vec::new();
        let sequence = writer.seal(index, &mut page);
        ring[sequence as usize] = Some(page);
    };
    seal(&mut writer, &index);
    index.clear_dirty(0, 1);
    index.clear_valid(1, 1);
    index.clear_dirty(2, 1);
    for frame in [0, 2] {
        let (frame, block) = (FrameNo(frame), BlockNo(frame));
        writer.push(Change::Clean { frame, block, first: 0, count: 1 });
    }
    writer.push(Change::Drop { frame: FrameNo(1), block: BlockNo(1), first: 0, count: 1 });
    seal(&mut writer, &index);
    writer.committed(writer.sealed());
    // This page makes the dump valid.
    seal(&mut writer, &index);
    let dirty = |ring: &[Option<Vec<u8>>]| {
        let ring: Copies = vec![ring.to_vec()];
        let Ring::Whole(plan) = survey(&ring) else { panic!("it is whole") };
        let mut replay = replay(plan, &ring, 4 * 4096, &[0]).unwrap();
        let sums = vec![Some(NEW); replay.to_prove().len()];
        let recovered = replay.finish(&sums);
        recovered.dirty().map(|dirty| (dirty.sector, dirty.units)).collect::<Vec<_>>()
    };
    let before = ring.clone();
    writer.committed(writer.sealed());
    let mut page = Vec::new();
    let sequence = writer.seal(&index, &mut page);
    ring[sequence as usize] = Some(page);
    assert_eq!(dirty(&before), [(1, 0b100), (3, u8::MAX)]);
    assert_eq!(dirty(&ring), [(3, u8::MAX)]);
}
