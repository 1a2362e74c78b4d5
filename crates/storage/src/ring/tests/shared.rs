//! Tests of reads into memory outside the arena.
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use hob_engine::io::BufferSlice;
use hob_engine::units::BufferId;
use vm_memory::VolatileSlice;

use super::{next, pattern, token, with_both};
use crate::checksum::sector_sums;
use crate::memory::Memory;
use crate::ring::{FdClass, Ring, RingConfig, RingKind};

/// Adopts memory in pieces of a page, the last page first.
fn adopt(ring: &mut Ring, owner: &Arc<Memory>, pages: usize) -> BufferId {
    let adopted = ring.arena_mut().adopt(owner, |memory, pieces| {
        for page in (0..pages).rev() {
            // SAFETY: inside a mapping that lives as long as its borrow; there is no reference to
            // its bytes.
            pieces.push(&unsafe { VolatileSlice::new(memory.address(page * 4096, 4096), 4096) });
        }
    });
    adopted.expect("whole pages")
}

fn page_of(owner: &Memory, page: usize) -> Vec<u8> {
    // SAFETY: nothing is being read into it.
    unsafe { owner.bytes(page * 4096, 4096) }.to_vec()
}

#[test]
fn files_are_read_into_shared_memory() {
    // More pieces than one system call takes.
    const PAGES: usize = 1100;
    with_both(|ring| {
        for class in [FdClass::Memory, FdClass::File] {
            let data = pattern(PAGES * 4096, 3);
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            file.write_all_at(&data, 0).unwrap();
            let fd = ring.attach(OwnedFd::from(file), class);
            let owner = Arc::new(Memory::map(PAGES * 4096).unwrap());
            let used = ring.arena().used();
            let id = adopt(ring, &owner, PAGES);
            assert_eq!((ring.arena().used(), Arc::strong_count(&owner)), (used, 2));
            ring.read(token(1), fd, 0, ring.arena().whole(id));
            assert_eq!(next(ring).result as usize, PAGES * 4096);
            for page in 0..PAGES {
                assert!(page_of(&owner, PAGES - 1 - page) == data[page * 4096..][..4096], "page {page}");
            }
            let (mut sums, mut expected) = (vec![], vec![]);
            ring.arena().sector_sums(ring.arena().whole(id), &mut sums);
            sector_sums(&data, &mut expected);
            assert!(sums == expected);
            // A part of the memory, from another offset.
            let slice = BufferSlice { id, offset: 8192, len: 3 * 4096 };
            ring.read(token(2), fd, 4096, slice);
            // Released before the read ends: the operation still has a reference.
            ring.arena_mut().release(id);
            assert_eq!(next(ring).result, 3 * 4096);
            assert!(page_of(&owner, PAGES - 3) == data[4096..8192]);
            assert!(page_of(&owner, PAGES - 5) == data[3 * 4096..4 * 4096]);
            assert!(page_of(&owner, PAGES - 6) == data[5 * 4096..6 * 4096]);
            assert_eq!(Arc::strong_count(&owner), 1);
            ring.detach(fd);
        }
    });
}

#[test]
fn memory_that_is_gone_makes_a_read_fail() {
    with_both(|ring| {
        for class in [FdClass::Memory, FdClass::File] {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            file.set_len(1 << 20).unwrap();
            let fd = ring.attach(OwnedFd::from(file), class);
            let owner = Arc::new(Memory::map(8 * 4096).unwrap());
            // SAFETY: no code accesses that page.
            unsafe { libc::mprotect(owner.address(3 * 4096, 4096).cast(), 4096, libc::PROT_NONE) };
            let id = adopt(ring, &owner, 8);
            ring.read(token(1), fd, 0, ring.arena().whole(id));
            assert_eq!(next(ring).result, -libc::EFAULT);
            ring.arena_mut().free(id);
            ring.detach(fd);
        }
    });
}

#[test]
fn memory_that_is_not_whole_pages_is_not_taken() {
    let mut ring = Ring::new(&RingConfig { kind: RingKind::Threads, ..RingConfig::default() }).unwrap();
    let owner = Arc::new(Memory::map(8 * 4096).unwrap());
    for parts in [&[(512, 4096)][..], &[(0, 512)], &[(0, 4096), (8192, 100)], &[]] {
        let adopted = ring.arena_mut().adopt(&owner, |memory, pieces| {
            for (at, len) in parts {
                // SAFETY: as in `adopt`.
                pieces.push(&unsafe { VolatileSlice::new(memory.address(*at, *len), *len) });
            }
        });
        assert_eq!((adopted, Arc::strong_count(&owner)), (None, 1), "{parts:?}");
    }
}

#[test]
#[should_panic(expected = "not borrowed")]
fn shared_memory_is_not_borrowed() {
    let mut ring = Ring::new(&RingConfig { kind: RingKind::Threads, ..RingConfig::default() }).unwrap();
    let owner = Arc::new(Memory::map(4096).unwrap());
    let id = adopt(&mut ring, &owner, 1);
    ring.arena().bytes(id);
}
