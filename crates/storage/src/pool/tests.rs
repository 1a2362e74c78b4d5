//! Invalid bytes never cause a panic, and data is used only with a correct checksum.

use proptest::prelude::*;

use super::device::recognise;
use super::format::*;

fn superblock() -> Superblock {
    let layout = Layout::fitting(64 << 20, 1 << 20).unwrap();
    Superblock {
        generation: 7,
        pool_uuid: Uuid([1; 16]),
        device_uuid: Uuid([2; 16]),
        ordinal: 3,
        next_ordinal: 9,
        flags: SuperblockFlags::OUT,
        device_bytes: 64 << 20,
        segment_bytes: 1 << 20,
        layout,
        features: Features::JOURNAL,
        name: "größer".to_owned(),
    }
}

fn page() -> (PageHeader, Vec<Entry>) {
    let owned = |n: u32| Entry::Owned {
        owner: OwnerId(u128::from(n) << 90 | 5),
        ordinal: n,
        kind: match n % 3 {
            0 => Kind::Volatile,
            1 => Kind::Data { since: n * 7 },
            _ => Kind::Ring { number: n << 20, copy: (n % 2) as u8 },
        },
    };
    let entries = (0..100u32).map(|n| if n.is_multiple_of(7) { Entry::Free } else { owned(n) }).collect();
    (PageHeader { generation: 4, device_uuid: Uuid([2; 16]), index: 1 }, entries)
}

#[test]
fn encoded_tables_are_decoded_again() {
    assert_eq!(Superblock::decode(&superblock().encode()), Ok(superblock()));
    let (header, entries) = page();
    let bytes = encode_page(header, &entries);
    assert_eq!(decode_page(&bytes, Uuid([2; 16]), 1, 100), Some((header, entries)));
    assert_eq!(decode_page(&bytes, Uuid([3; 16]), 1, 100), None, "another device's");
    assert_eq!(decode_page(&bytes, Uuid([2; 16]), 0, 100), None, "another page");
    assert_eq!(decode_page(&bytes, Uuid([2; 16]), 1, 99), None, "another size");
}

/// A superblock with invalid numbers and a correct checksum counts as damaged.
#[test]
fn senseless_superblocks_are_damaged() {
    let changes: &[fn(&mut Superblock)] = &[
        |s| s.segment_bytes = 3 << 20,
        |s| s.segment_bytes = 0,
        |s| s.segment_bytes = 1 << 62,
        |s| s.layout.segments = 0,
        |s| s.layout.segments = u64::MAX,
        |s| s.layout.table_pages = u64::MAX,
        |s| s.layout.table_offset = 0,
        |s| s.layout.table_offset = u64::MAX - 4095,
        |s| s.layout.data_offset = 4096,
        |s| s.layout.data_offset = u64::MAX - 4095,
        |s| s.layout.data_offset += 512,
        |s| s.device_bytes = 1 << 20,
        |s| s.next_ordinal = 0,
    ];
    for (number, change) in changes.iter().enumerate() {
        let mut superblock = superblock();
        change(&mut superblock);
        let decoded = Superblock::decode(&superblock.encode());
        assert!(matches!(decoded, Err(NotSuperblock::Damaged(_))), "change {number}: {decoded:?}");
    }
}

#[test]
fn layouts_fit_and_waste_little() {
    for segment_bytes in [1 << 20, 16 << 20, 1 << 30] {
        for cache_bytes in [1, segment_bytes, segment_bytes * 126, segment_bytes * 127, 1 << 40] {
            let bytes = device_bytes_for(cache_bytes, segment_bytes);
            let layout = Layout::fitting(bytes, segment_bytes).unwrap();
            assert_eq!(layout.segments, cache_bytes.div_ceil(segment_bytes));
            assert!(layout.data_offset + layout.segments * segment_bytes <= bytes);
            assert!(bytes - layout.segments * segment_bytes <= (2 << 20) + bytes / 1000);
            let less = Layout::fitting(bytes - 1, segment_bytes).map_or(0, |layout| layout.segments);
            assert_eq!(less, layout.segments - 1);
        }
    }
    assert_eq!(Layout::fitting(0, 1 << 20), None);
    assert!(Layout::fitting(u64::MAX, 1 << 20).unwrap().segments == SEGMENTS_MAX);
}

proptest! {
    #[test]
    fn a_changed_superblock_is_refused(at in 0usize..4096, bit in 0u8..8) {
        let mut bytes = superblock().encode();
        bytes[at] ^= 1 << bit;
        prop_assert!(Superblock::decode(&bytes).is_err());
    }

    #[test]
    fn random_pages_are_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..8192)) {
        prop_assert!(Superblock::decode(&bytes).is_err());
        prop_assert!(decode_page(&bytes, Uuid([2; 16]), 1, 100).is_none());
        let _ = recognise(&bytes);
    }

    #[test]
    fn a_changed_table_page_is_refused(at in 0usize..4096, bit in 0u8..8) {
        let (header, entries) = page();
        let mut bytes = encode_page(header, &entries);
        bytes[at] ^= 1 << bit;
        prop_assert!(decode_page(&bytes, Uuid([2; 16]), 1, 100).is_none());
    }

    /// Random data with a correct checksum is read or refused, never panics, and never reads past
    /// the end.
    #[test]
    fn sealed_garbage_is_survived(writes in proptest::collection::vec((0usize..160, any::<u8>()), 0..20)) {
        let mut bytes = superblock().encode();
        for (at, value) in writes {
            bytes[at] = value;
        }
        bytes[0xC..0x10].fill(0);
        let crc = crc32c::crc32c(&bytes).to_le_bytes();
        bytes[0xC..0x10].copy_from_slice(&crc);
        if let Ok(read) = Superblock::decode(&bytes) {
            let layout = read.layout;
            prop_assert!(layout.segments <= SEGMENTS_MAX);
            prop_assert!(layout.data_offset + layout.segments * read.segment_bytes <= read.device_bytes);
        }
    }
}
