//! Compares the arena with a naive model of the allocated pages.

use hob_engine::io::BufferSlice;
use hob_engine::units::BufferId;
use proptest::prelude::*;

use super::buddy::Buddy;
use super::{Arena, PAGE_BYTES, Traffic};

#[derive(Clone, Debug)]
enum Step {
    Alloc(usize),
    Release(usize),
    Retain(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = prop_oneof![Just(4096usize), Just(8192), 1usize..300_000, 200_000usize..1_200_000];
    let step = prop_oneof![
        3 => bytes.prop_map(Step::Alloc),
        2 => any::<usize>().prop_map(Step::Release),
        1 => any::<usize>().prop_map(Step::Retain),
    ];
    proptest::collection::vec(step, 1..200)
}

proptest! {
    /// No two buffers share a byte, contents stay, and an allocation fails only if there was no run
    /// of free pages.
    #[test]
    fn buffers_never_overlap(steps in steps()) {
        const PAGES: usize = 300;
        let mut arena = Arena::new(PAGES * PAGE_BYTES).unwrap();
        let base = arena.region().0 as usize;
        let mut taken = vec![false; PAGES];
        let mut live: Vec<(BufferId, u32, u8)> = Vec::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Alloc(len) => {
                    let pages = len.div_ceil(PAGE_BYTES);
                    let Some(id) = arena.alloc(len) else {
                        let longest = taken.split(|taken| *taken).map(<[bool]>::len).max().unwrap();
                        prop_assert!(longest < pages, "{longest} free pages in a row, {pages} refused");
                        continue;
                    };
                    let fill = number as u8;
                    arena.bytes_mut(id).fill(fill);
                    prop_assert_eq!(arena.len(id), len);
                    let first = (arena.bytes(id).as_ptr() as usize - base) / PAGE_BYTES;
                    for page in &mut taken[first..first + pages] {
                        prop_assert!(!*page);
                        *page = true;
                    }
                    live.push((id, 1, fill));
                }
                Step::Retain(pick) if !live.is_empty() => {
                    let at = pick % live.len();
                    arena.retain(live[at].0);
                    live[at].1 += 1;
                }
                Step::Release(pick) if !live.is_empty() => {
                    let at = pick % live.len();
                    let (id, refs, fill) = live[at];
                    prop_assert!(arena.bytes(id).iter().all(|byte| *byte == fill));
                    let first = (arena.bytes(id).as_ptr() as usize - base) / PAGE_BYTES;
                    let pages = arena.len(id).div_ceil(PAGE_BYTES);
                    arena.release(id);
                    live[at].1 -= 1;
                    if refs == 1 {
                        live.swap_remove(at);
                        taken[first..first + pages].fill(false);
                    }
                }
                Step::Retain(_) | Step::Release(_) => {}
            }
            prop_assert_eq!(arena.used() / PAGE_BYTES, taken.iter().filter(|taken| **taken).count());
        }
    }

    #[test]
    fn everything_joins_again(lens in proptest::collection::vec(1u32..40, 1..50)) {
        let mut buddy = Buddy::new(1000);
        let runs: Vec<_> = lens.iter().filter_map(|len| Some((buddy.alloc(*len)?, *len))).collect();
        let sum: u32 = runs.iter().map(|(_, len)| len).sum();
        prop_assert_eq!(buddy.free_pages(), 1000 - sum);
        runs.into_iter().for_each(|(page, len)| buddy.free(page, len));
        prop_assert_eq!(buddy.alloc(512), Some(0));
        prop_assert_eq!(buddy.alloc_anywhere(488), Some(512));
        prop_assert_eq!(buddy.free_pages(), 0);
    }
}

#[test]
fn the_largest_request_fits_beside_others() {
    let mut arena = Arena::new(64 << 20).unwrap();
    let small: Vec<_> = (0..100).map(|_| arena.alloc(5000).unwrap()).collect();
    let large = arena.alloc((32 << 20) + 8192).expect("a run of that length is free");
    assert!(arena.alloc(40 << 20).is_none());
    small.into_iter().for_each(|id| arena.free(id));
    arena.free(large);
    assert_eq!(arena.used(), 0);
    let all = arena.alloc(64 << 20).expect("all of it");
    arena.free(all);
}

#[test]
fn senseless_sizes_are_refused() {
    let mut arena = Arena::new(8192).unwrap();
    assert!(arena.alloc(0).is_none());
    assert!(arena.alloc(8193).is_none());
    assert!(Arena::new(0).is_err());
    assert!(Arena::new(2 << 30).is_err());
}

#[test]
fn a_pinned_buffer_outlives_its_owner() {
    let mut arena = Arena::new(8192).unwrap();
    let id = arena.alloc(8192).unwrap();
    let slice = BufferSlice { id, offset: 4096, len: 4096 };
    arena.pin(slice, Traffic::KernelWrites);
    arena.slice(BufferSlice { id, offset: 0, len: 4096 });
    arena.release(id);
    assert!(arena.alloc(4096).is_none());
    arena.unpin(slice, Traffic::KernelWrites);
    assert!(arena.alloc(8192).is_some());
}

#[test]
#[should_panic(expected = "is being filled")]
fn memory_that_the_kernel_fills_is_inaccessible() {
    let mut arena = Arena::new(8192).unwrap();
    let id = arena.alloc(8192).unwrap();
    arena.pin(BufferSlice { id, offset: 4096, len: 4096 }, Traffic::KernelWrites);
    arena.bytes(id);
}
