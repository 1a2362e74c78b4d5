//! Tests of the memory tier: pages are added, served, updated and evicted.

use super::*;

fn memory(pages: u64, page_bytes: u32) -> Memory {
    let config = MemoryConfig { bytes: pages * u64::from(page_bytes), page_bytes };
    Memory::new(config, 1 << 30).expect("workable")
}

fn pieces(run: impl FnOnce(&mut dyn FnMut(PageRange))) -> Vec<PageRange> {
    let mut pieces = vec![];
    run(&mut |piece| pieces.push(piece));
    pieces
}

#[test]
fn exactly_the_read_sectors_are_in_memory() {
    let mut memory = memory(8, 16 << 10);
    assert!(!memory.holds(5, 6));
    let kept = pieces(|copy| memory.keep(5, 10, copy));
    let counts: Vec<_> = kept.iter().map(|piece| (piece.at, piece.count)).collect();
    assert_eq!(counts, [(0, 3), (3, 2)], "one piece a page");
    assert!(memory.holds(5, 10) && !memory.holds(4, 6) && !memory.holds(9, 11));
    let read = pieces(|copy| assert!(!memory.read(6, 9, Promote::Usual, copy)));
    assert_eq!(read[0], PageRange { offset: kept[0].offset + SECTOR_BYTES, at: 0, count: 2 });
    assert_eq!(read[1], PageRange { offset: kept[1].offset, at: 2, count: 1 });
    assert_eq!(memory.held_bytes(), 5 * SECTOR_BYTES);
    assert_eq!(pieces(|copy| memory.keep(5, 10, copy)), [], "it is there already");
}

#[test]
fn a_write_renews_pages_that_are_there_only() {
    let mut memory = memory(8, 16 << 10);
    memory.keep(0, 4, |_| ());
    memory.invalidate(2, 6);
    assert!(memory.holds(0, 2) && !memory.holds(2, 3));
    let renewed = pieces(|copy| memory.renew(2, 6, copy));
    assert_eq!(renewed.len(), 1);
    assert_eq!((renewed[0].at, renewed[0].count), (0, 2));
    assert!(memory.holds(0, 4) && !memory.holds(4, 5));
}

#[test]
fn the_read_ahead_mark_is_reported_once() {
    let mut memory = memory(8, 64 << 10);
    memory.keep_ahead(0, 32, |_| ());
    assert!(memory.read(4, 8, Promote::Usual, |_| ()));
    assert!(!memory.read(4, 8, Promote::Usual, |_| ()), "the second reader finds it by itself");
    assert!(memory.read(0, 32, Promote::Usual, |_| ()));
    memory.keep_ahead(40, 48, |_| ());
    memory.invalidate(40, 48);
    memory.renew(40, 48, |_| ());
    assert!(!memory.read(40, 48, Promote::Usual, |_| ()), "the guest wrote it");
}

#[test]
fn a_full_memory_evicts_and_large_requests_pass() {
    let mut memory = memory(8, 4 << 10);
    for sector in 0..100 {
        memory.keep(sector, sector + 1, |piece| assert!(piece.offset < 8 * SECTOR_BYTES));
        assert!(memory.holds(sector, sector + 1));
        assert!(memory.held_bytes() <= 8 * SECTOR_BYTES);
    }
    memory.clear();
    assert_eq!(memory.held_bytes(), 0);
    memory.keep(0, 3, |_| panic!("more than a quarter of it"));
    memory.keep(0, 2, |_| ());
    assert!(memory.holds(0, 2));
}

/// The read-ahead mark of an evicted page does not apply to the data that replaces it.
#[test]
fn marks_leave_with_their_page() {
    let mut memory = memory(4, 4 << 10);
    (0..50).for_each(|sector| memory.keep_ahead(sector, sector + 1, |_| ()));
    for sector in 100..150 {
        memory.keep(sector, sector + 1, |_| ());
        assert!(!memory.read(sector, sector + 1, Promote::Usual, |_| ()));
    }
}

#[test]
fn senseless_sizes_are_refused() {
    let new = |bytes, page_bytes| Memory::new(MemoryConfig { bytes, page_bytes }, 1 << 30).err();
    assert_eq!(new(1 << 20, 4096), None);
    assert_eq!(new(3 * 4096, 4096), Some(CommandError::TooSmall));
    assert_eq!(new(1 << 20, 0), Some(CommandError::Unworkable));
    assert_eq!(new(1 << 20, 12 << 10), Some(CommandError::Unworkable));
    assert_eq!(new(1 << 30, 128 << 10), Some(CommandError::Unworkable));
    assert_eq!(new(1 << 50, 4096), Some(CommandError::Unworkable));
}
