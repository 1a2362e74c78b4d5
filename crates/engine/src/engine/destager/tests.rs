//! Tests the destager's order with hand-written cases, and its queue with random operations.
//! SYSTEMS is the project's description of other systems, outside this repository.

use proptest::prelude::*;

use super::*;

const ALL: u32 = u32::MAX;

fn coldest(blocks: impl IntoIterator<Item = u32>) -> Destager {
    let mut destager = Destager::default();
    destager.keep_order(DestageOrder::Coldest);
    blocks.into_iter().for_each(|block| assert!(destager.add(BlockNo(block), 0)));
    destager
}

/// Takes the next block as the engine does.
fn go(destager: &mut Destager, newest: u32, was_used: impl FnMut(BlockNo) -> bool) -> Option<u32> {
    let block = destager.next(newest, was_used)?;
    destager.take(block).expect("it is to be destaged");
    destager.cursor = BlockNo(block.0 + 1);
    Some(block.0)
}

fn go_all(destager: &mut Destager) -> Vec<u32> {
    std::iter::from_fn(|| go(destager, ALL, |_| false)).collect()
}

/// Returns blocks in random order, each once.
fn scattered(count: u32) -> Vec<u32> {
    (0..count).map(|n| n * 7919 % 10_007).collect()
}

#[test]
fn the_memory_use_includes_the_queue() {
    let (elevator, queued) = (Destager::default(), coldest([]));
    assert_eq!((elevator.bytes(), queued.bytes()), (0, 0));
    let mut elevator = Destager::default();
    (0..1000).for_each(|block| _ = elevator.add(BlockNo(block), 0));
    let queued = coldest(0..1000);
    let entries = 1000 * size_of::<(BlockNo, u32)>() as u64;
    assert!(queued.bytes() >= elevator.bytes() + entries, "{} {}", queued.bytes(), elevator.bytes());
}

#[test]
fn an_elevator_goes_round() {
    let mut destager = Destager::default();
    [5, 1, 9, 7].into_iter().for_each(|block| _ = destager.add(BlockNo(block), 0));
    destager.cursor = BlockNo(6);
    assert_eq!(go_all(&mut destager), [7, 9, 1, 5]);
    assert!(destager.queue.is_empty(), "it needs none");
}

/// SYSTEMS §2, "Deferring coalesces writes and orders them for the disks": the coldest blocks are
/// destaged first, a few at a time in the disk's order.
#[test]
fn the_coldest_go_first_and_in_order() {
    let blocks = scattered(3000);
    let all_gone = go_all(&mut coldest(blocks.clone()));
    assert_eq!(all_gone.len(), 3000);
    let mut at = 0;
    while at < 3000 {
        let end = at + ((3000 - at) / 16).clamp(1, 64);
        let gone = &all_gone[at..end];
        let turns = gone.windows(2).filter(|pair| pair[0] > pair[1]).count();
        assert!(turns <= 1, "{gone:?}");
        assert_eq!(BTreeSet::from_iter(gone), BTreeSet::from_iter(&blocks[at..end]));
        at = end;
    }
}

#[test]
fn used_blocks_are_destaged_last() {
    let mut destager = coldest(0..200);
    let mut used = BTreeSet::from([3, 40, 199]);
    let mut was_used = |block: BlockNo| used.remove(&block.0);
    let gone: Vec<u32> = std::iter::from_fn(|| go(&mut destager, ALL, &mut was_used)).collect();
    assert_eq!(gone.len(), 200);
    let at = |block: u32| gone.iter().position(|gone| *gone == block).expect("it went");
    assert!([3, 40].iter().all(|block| at(*block) >= 190), "{gone:?}");
    assert!([2, 4, 41].iter().all(|block| at(*block) <= 42), "{gone:?}");
}

#[test]
fn one_that_is_used_after_it_was_picked_is_spared() {
    let mut destager = coldest(0..100);
    assert_eq!(go(&mut destager, ALL, |_| false), Some(0));
    assert!(destager.picked.contains(&BlockNo(1)));
    assert_eq!(go(&mut destager, ALL, |block| block == BlockNo(1)), Some(2));
    let rest = go_all(&mut destager);
    assert_eq!(rest.last(), Some(&1), "{rest:?}");
}

/// The destager finds a cold block behind any number of hot blocks, in several steps.
#[test]
fn a_cold_one_is_found_behind_any_hot_ones() {
    let mut destager = coldest(scattered(10_000));
    let mut steps = 0;
    let gone = loop {
        let (mut looks, cold) = (0, scattered(10_000)[9_999]);
        let is_hot = |block: BlockNo| {
            looks += 1;
            block.0 != cold
        };
        steps += 1;
        match go(&mut destager, ALL, is_hot) {
            None => assert!(destager.is_looking()),
            Some(block) => break block,
        }
        assert!(looks <= LOOKS_MAX);
    };
    assert_eq!(gone, scattered(10_000)[9_999]);
    assert_eq!(steps, 10_000usize.div_ceil(LOOKS_MAX));
}

#[test]
fn where_all_are_hot_those_of_the_first_turns_go_and_few_are_looked_at() {
    let mut destager = coldest(scattered(10_000));
    let (mut looks, mut gone) = (0, BTreeSet::new());
    while gone.len() < 2000 {
        let all_hot = |_| {
            looks += 1;
            true
        };
        match go(&mut destager, ALL, all_hot) {
            Some(block) => assert!(gone.insert(block)),
            None => assert!(destager.is_looking()),
        }
    }
    assert!(looks <= 12_000, "{looks}");
    // The first search moved one block to the end of the queue.
    assert!(gone.is_subset(&BTreeSet::from_iter(scattered(10_000)[1..2065].iter().copied())));
}

#[test]
fn the_queue_of_blocks_that_come_and_go_stays_short() {
    let mut destager = coldest([]);
    for round in 0..1000 {
        assert!(destager.add(BlockNo(7), 0) && destager.add(BlockNo(8 + round), 0));
        destager.take(BlockNo(7));
    }
    assert!(destager.queue.len() <= 2 * destager.todo.len() + STALE_MIN + 1);
    // Only the newest entry of a block is valid, which is the last one.
    destager.add(BlockNo(7), 0);
    assert_eq!(go_all(&mut destager).pop(), Some(7));
    assert!(destager.queue.is_empty());
}

#[test]
fn newer_data_waits_and_old_data_is_destaged_though_hot() {
    let mut destager = coldest(0..10);
    (10..20).for_each(|block| _ = destager.add(BlockNo(block), 5));
    let hot = |block: BlockNo| block.0 < 10;
    let gone: Vec<u32> = std::iter::from_fn(|| go(&mut destager, 4, hot)).collect();
    assert_eq!(gone, Vec::from_iter(0..10));
    assert!(go(&mut destager, 4, |_| false).is_none() && !destager.is_looking());
    assert_eq!(go(&mut destager, 5, |_| false), Some(10));
}

#[test]
fn an_order_that_is_taken_up_later_begins_with_all_there_is() {
    let mut destager = Destager::default();
    scattered(100).into_iter().for_each(|block| _ = destager.add(BlockNo(block), 0));
    destager.keep_order(DestageOrder::Coldest);
    assert_eq!(go_all(&mut destager).len(), 100);
}

#[test]
fn a_restart_keeps_the_turns() {
    let blocks = scattered(200);
    let mut destager = coldest(blocks.clone());
    go(&mut destager, ALL, |_| false);
    let dirty: Vec<BlockNo> = blocks.iter().map(|block| BlockNo(*block)).collect();
    let mut sorted = dirty.clone();
    sorted.sort_unstable();
    destager.restart(Epochs::One, sorted.into_iter());
    let gone = go_all(&mut destager);
    assert!(BTreeSet::from_iter(&gone[..50]).is_subset(&BTreeSet::from_iter(&blocks[..65])), "{gone:?}");
}

proptest! {
    /// After any sequence of operations, each block to destage has one valid queue entry, and all
    /// blocks are destaged at the end.
    #[test]
    fn nothing_is_forgotten(steps in prop::collection::vec((0u32..80, 0u8..8, any::<bool>()), 0..400)) {
        let mut destager = coldest([]);
        for (block, what, flag) in steps {
            match what {
                0..=2 => _ = destager.add(BlockNo(block), u32::from(flag)),
                3 => destager.hurry(BlockNo(block)),
                4 => _ = destager.take(BlockNo(block)),
                5 => destager.keep_order(if flag { DestageOrder::Coldest } else { DestageOrder::Elevator }),
                _ => _ = go(&mut destager, u32::from(flag), |at| at.0 % 5 == block % 5),
            }
            for (block, todo) in &destager.todo {
                let queued = destager.queue.iter().filter(|entry| **entry == (*block, todo.turn)).count();
                let places = queued + usize::from(destager.picked.contains(block));
                let expected = usize::from(destager.order == DestageOrder::Coldest);
                prop_assert_eq!(places, expected, "{:?} of {:?}", block, destager);
            }
            let counted: u32 = destager.epochs.values().sum();
            prop_assert_eq!(counted as usize, destager.todo.len());
        }
        let left = destager.todo.len();
        prop_assert_eq!(go_all(&mut destager).len(), left);
    }
}

#[test]
fn four_billion_flushes_keep_the_order() {
    let mut destager = Destager { flushes: u32::MAX - 1, front: u32::MAX - 3, ..Destager::default() };
    destager.add(BlockNo(9), u32::MAX - 2);
    destager.add(BlockNo(5), u32::MAX - 1);
    for block in [3, 1] {
        destager.flush_point();
        destager.add(BlockNo(block), destager.flushes);
    }
    let blocks = [9, 5, 3, 1].map(BlockNo);
    assert!(blocks.is_sorted_by_key(|block| destager.epoch(*block)));
    assert!(destager.epoch(blocks[0]) > Some(destager.front));
    let epochs: Vec<u32> = destager.epochs.keys().copied().collect();
    assert_eq!(epochs, blocks.map(|block| destager.take(block).expect("it is queued")));
}

/// The oldest data may stay dirty until all epoch numbers are used up.
#[test]
fn epochs_are_renumbered_although_the_first_one_is_in_use() {
    let mut destager = Destager { flushes: u32::MAX - 1, ..Destager::default() };
    destager.add(BlockNo(7), 0);
    for block in [3, 1] {
        destager.flush_point();
        destager.add(BlockNo(block), destager.flushes);
    }
    assert_eq!([7, 3, 1].map(|block| destager.epoch(BlockNo(block))), [Some(0), Some(1), Some(2)]);
    assert_eq!((destager.front, destager.flushes), (0, 2));
}

/// A block that is overwritten during its transfer returns to the queue when the transfer ends.
#[test]
fn blocks_in_transfer_are_older_than_the_start_of_write_order() {
    let mut destager = Destager { flushes: 5, ..Destager::default() };
    destager.begin_write(2, 3, 2..=2);
    destager.add(BlockNo(2), 1000);
    destager.renumber(Epochs::Time(1_000_000), Epochs::Flushes);
    destager.end_write(2, 3, 2..=2);
    assert!(destager.epoch(BlockNo(2)).is_some_and(|epoch| epoch < destager.flushes));
}

/// A new journal ring, for example for another cache size, does not change the write order.
#[test]
fn a_restart_keeps_the_write_order() {
    let mut destager = Destager::default();
    destager.restart(Epochs::Flushes, std::iter::empty());
    for block in [4, 2, 9] {
        destager.add(BlockNo(block), destager.flushes);
        destager.flush_point();
    }
    let epochs = [4, 2, 9].map(|block| destager.epoch(BlockNo(block)));
    assert!(epochs.is_sorted_by(|a, b| a < b));
    // Block 7 was being transferred.
    let before = (destager.front, destager.flushes);
    destager.restart(Epochs::Flushes, [2, 4, 7, 9].map(BlockNo).into_iter());
    assert_eq!([4, 2, 9].map(|block| destager.epoch(BlockNo(block))), epochs);
    assert_eq!((destager.front, destager.flushes), before);
    assert_eq!(destager.epoch(BlockNo(7)), Some(destager.front));
}

/// Data that is dirty when write order begins to be kept is older than all later writes.
#[test]
fn recovered_data_is_older_than_new_writes() {
    let mut destager = Destager::default();
    destager.restart(Epochs::Flushes, [3, 5].map(BlockNo).into_iter());
    assert!([3, 5].iter().all(|block| destager.epoch(BlockNo(*block)) == Some(destager.front)));
    assert!(destager.front < destager.flushes);
}
