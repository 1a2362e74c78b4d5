//! Recovery of a sector with two copies, if the content of flash differs from the journal in one
//! copy or in both.

use super::*;
use crate::journal::DirtySector;

const BLOCK: BlockNo = BlockNo(1);
/// Frames of the two copies, each on its own device.
const COPIES: [(FrameNo, bool); 2] = [(FrameNo(0), false), (FrameNo(4), true)];

/// A copy in the dump of a journal ring.
#[derive(Clone, Copy)]
enum Dumped {
    Dirty(u32),
    Clean(u32),
    Unproven(u32),
}

/// Recovers from a durable dump with these copies, and a journal tail that sets the checksums `set`
/// of the first and the second copy. Flash has the content `on_flash`.
fn recover(copies: [Dumped; 2], set: [Option<u32>; 2], on_flash: [Option<u32>; 2]) -> Recovered {
    recover_after(&[], copies, set, on_flash)
}

/// Like [`recover`], but the devices of these segments failed a flush.
fn recover_after(
    failed: &[u32],
    copies: [Dumped; 2],
    set: [Option<u32>; 2],
    on_flash: [Option<u32>; 2],
) -> Recovered {
    let mut restoring = Restoring::new(8, 0);
    for ((frame, second), copy) in COPIES.into_iter().zip(copies) {
        let at = u64::from(frame.0);
        restoring.place(frame, BLOCK, if second { Copy::Second } else { Copy::First });
        match copy {
            Dumped::Dirty(sum) => restoring.set(at, sum, true),
            Dumped::Clean(sum) => restoring.set(at, sum, false),
            Dumped::Unproven(sum) => {
                restoring.set(at, sum, true);
                restoring.set_unproven(at);
            }
        }
    }
    let index = restoring.finish(8);
    let mut writer = Writer::new(descriptor(0, 4, &[0, 1]), 64);
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
    for ((frame, second), sum) in COPIES.into_iter().zip(set) {
        let record =
            |sum| Change::Set { frame, block: BLOCK, sector: 0, sum, dirty: true, second, units: u8::MAX };
        sum.map(record).into_iter().for_each(|record| writer.push(record));
    }
    failed.iter().for_each(|segment| assert!(writer.name_failed(*segment)));
    seal(&mut writer);
    let ring = vec![ring];
    let Ring::Whole(plan) = survey(&ring) else { panic!("it is whole") };
    let mut replay = replay(plan, &ring, 4 * 4096, &[0, 1]).unwrap();
    let sums: Vec<_> = replay.to_prove().iter().map(|(segment, _)| on_flash[*segment as usize]).collect();
    replay.finish(&sums)
}

/// Recovers a dirty sector whose copies have the durable checksums `before`. Returns the dirty
/// sector that recovery finds.
fn recovered(before: [u32; 2], set: [Option<u32>; 2], on_flash: [u32; 2]) -> DirtySector {
    let recovered = recover(before.map(Dumped::Dirty), set, on_flash.map(Some));
    let mut dirty = recovered.dirty();
    let found = dirty.next().expect("it is dirty");
    assert_eq!((found.sector, dirty.next()), (1, None));
    found
}

/// Returns the segments of the copies, and the checksum of the first.
fn places(found: DirtySector) -> (u32, Option<u32>, u32) {
    (found.place.segment, found.second.map(|second| second.segment), found.place.sum.expect("it is known"))
}

#[test]
fn the_copy_that_reached_flash_is_the_first_and_the_other_is_dropped() {
    let after = |on_flash| places(recovered([11, 11], [Some(21), Some(21)], on_flash));
    assert_eq!(after([21, 21]), (0, Some(1), 21));
    assert_eq!(after([21, 99]), (0, None, 21));
    assert_eq!(after([99, 21]), (1, None, 21));
    assert_eq!(after([11, 11]), (0, Some(1), 11), "neither write happened");
    assert_eq!(after([99, 11]), (1, None, 11), "the second has the older data");
    assert_eq!(after([11, 99]), (0, None, 11));
}

/// If both copies are damaged, both stay, so that the loss is reported when they are read.
#[test]
fn two_damaged_copies_stay() {
    assert_eq!(places(recovered([11, 11], [Some(21), Some(21)], [99, 98])), (0, Some(1), 11));
}

/// A second copy of another version does not replace the first.
#[test]
fn a_copy_of_another_version_does_not_count() {
    assert_eq!(places(recovered([11, 31], [Some(21), None], [99, 31])), (0, None, 11));
    assert_eq!(places(recovered([11, 31], [None, Some(21)], [11, 99])), (0, None, 11));
}

/// Recovers from a dump alone.
fn agreed(copies: [Dumped; 2], on_flash: [Option<u32>; 2]) -> Recovered {
    recover(copies, [None, None], on_flash)
}

/// The sum of each copy that is dirty after recovery; `Some(None)` if it is unknown.
fn dirty(recovered: &Recovered) -> [Option<Option<u32>>; 2] {
    let index = &recovered.index;
    [0, 4].map(|at| index.is_dirty(at).then(|| (!index.is_sum_unknown(at)).then(|| index.sum(at))))
}

#[test]
fn copies_that_the_journal_describes_differently_agree_after_recovery() {
    use Dumped::{Clean, Dirty, Unproven};
    let sound = |copies: [Dumped; 2]| dirty(&agreed(copies, [Some(11), Some(11)]));
    assert_eq!(sound([Dirty(11), Dirty(11)]), [Some(Some(11)); 2]);
    assert_eq!(sound([Dirty(11), Clean(11)]), [Some(Some(11)); 2], "both have the dirty data");
    assert_eq!(sound([Dirty(11), Clean(31)]), [Some(Some(11)), None]);
    assert_eq!(sound([Dirty(11), Unproven(5)]), [Some(Some(11)); 2]);
    assert_eq!(sound([Unproven(5), Dirty(11)]), [Some(Some(11)); 2]);
    assert_eq!(sound([Unproven(5), Unproven(5)]), [Some(Some(11)); 2]);
    assert_eq!(sound([Unproven(5), Clean(31)]), [Some(None), None], "the clean copy proves nothing");
    assert_eq!(sound([Clean(31), Unproven(5)]), [None, None], "the first copy is clean");
}

/// If neither copy can be read and neither has a checksum, one copy stays, so that the loss is
/// reported.
#[test]
fn two_unreadable_copies_without_a_checksum_are_counted() {
    let unproven = [Dumped::Unproven(5), Dumped::Unproven(5)];
    let recovered = agreed(unproven, [None, None]);
    assert_eq!((recovered.summary.sectors_parted, recovered.parted()), (1, &[1][..]));
    assert_eq!(dirty(&recovered), [Some(None), None]);
    let recovered = agreed(unproven, [None, Some(11)]);
    assert_eq!(recovered.summary.sectors_parted, 1);
    assert!(dirty(&recovered).contains(&Some(Some(11))));
    assert_eq!(agreed(unproven, [Some(11), Some(11)]).summary.sectors_parted, 0);
}

/// The cache excludes such a device again, and a copy on another device is chosen.
#[test]
fn recovery_names_the_devices_that_failed_a_flush() {
    use Dumped::{Dirty, Unproven};
    let after = |failed: &[u32], copies, on_flash: [u32; 2]| {
        let recovered = recover_after(failed, copies, [None, None], on_flash.map(Some));
        (recovered.failed_segments.clone(), dirty(&recovered).map(Option::flatten))
    };
    let same = [Dirty(11), Dirty(11)];
    assert_eq!(after(&[], same, [11, 11]), (vec![], [Some(11); 2]));
    assert_eq!(after(&[1, 0, 1], same, [11, 11]), (vec![1, 0], [Some(11); 2]));
    assert_eq!(after(&[7], same, [11, 11]), (vec![], [Some(11); 2]), "the segment is missing");
    let unproven = [Unproven(5), Unproven(5)];
    assert_eq!(after(&[0], unproven, [21, 22]), (vec![0], [None, Some(22)]));
    assert_eq!(after(&[1], unproven, [21, 22]), (vec![1], [Some(21), None]));
    assert_eq!(after(&[1], unproven, [21, 5]), (vec![1], [None, Some(5)]), "the data of the last commit");
}

#[test]
fn a_page_names_up_to_four_devices() {
    let mut writer = Writer::new(descriptor(0, 4, &[0, 1]), 64);
    assert!([3, 0, 9, 3, 7].into_iter().all(|segment| writer.name_failed(segment)));
    assert!(!writer.name_failed(8) && writer.name_failed(9));
}

/// A page without the name has all records of the changes before the device was trusted again.
#[test]
fn a_device_is_named_until_earlier_changes_are_recorded() {
    let index = Restoring::new(8, 0).finish(8);
    let mut writer = Writer::new(descriptor(0, 4, &[0, 1]), 64);
    let mut pages = Vec::new();
    let mut seal = |writer: &mut Writer| {
        let sequence = writer.seal(&index, &mut pages);
        let page = &pages[pages.len() - PAGE_BYTES..];
        (
            sequence,
            format::Page::read(page, |_| (), |_, _| ()).expect("it is valid").header.failed_segments[0],
        )
    };
    while !writer.first_dump_done() {
        seal(&mut writer);
    }
    writer.committed(writer.sealed());
    assert!(writer.name_failed(1));
    let (sequence, named) = seal(&mut writer);
    assert_eq!(named, 2);
    writer.committed(sequence);
    for sector in 0..=CHANGES_MAX {
        let (frame, block) = (FrameNo((sector % 8) as u32), BlockNo(sector as u32));
        writer.push(Change::Drop { frame, block, first: 0, count: 1 });
    }
    writer.unname_failed(1);
    assert_eq!((seal(&mut writer).1, seal(&mut writer).1), (2, 0));
}
