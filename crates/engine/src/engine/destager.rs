//! The dirty blocks of one cache: which are to be destaged, which are being destaged, and in which
//! order.
//!
//! The *elevator* order passes over the disk in ascending order, again and again. The *coldest*
//! order keeps a queue of blocks in the order in which they became dirty. A block that was used
//! since then returns to the end of the queue, which approximates LRU (the second chance of
//! Corbató, "A paging experiment with the Multics system", 1968). The destager picks a few cold
//! blocks at a time, and destages the picked blocks in elevator order.
//!
//! This module uses only block numbers, sectors of the disk and counts; `destage.rs` does the I/O.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::RangeInclusive;

use crate::command::{Destage, DestageOrder};
use crate::units::{BlockNo, Instant};

/// Maximum number of cold blocks that are picked together, to be destaged in the order of the disk.
/// At most one in `PICKED_PART` of all dirty blocks is picked.
const PICKED_MAX: usize = 64;
const PICKED_PART: usize = 16;

/// Maximum number of queue entries that one search for cold blocks examines.
const LOOKS_MAX: usize = 256;

/// A block is cold if it was not used since it was queued or last examined. If no block is cold,
/// the destager destages about one in `HOT_PART` of the blocks before it examines blocks again.
const HOT_PART: usize = 4;

/// Minimum number of outdated queue entries before they are removed.
const STALE_MIN: usize = 64;

/// The period that one epoch of dirty data covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Epochs {
    /// An epoch is the period between two flushes or durable writes of the guest.
    Flushes,
    /// An epoch is a period of this number of nanoseconds.
    Time(u64),
    /// All dirty data is in one epoch, because neither its age nor the order of writes matters.
    One,
}

/// A block with dirty sectors that are not being transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Todo {
    /// Epoch in which the block became dirty.
    epoch: u32,
    /// Number that distinguishes the block's current queue entry from outdated entries.
    turn: u32,
}

/// The dirty data of one cache.
#[derive(Debug, Default)]
pub(super) struct Destager {
    todo: BTreeMap<BlockNo, Todo>,
    order: DestageOrder,
    /// For the order *coldest*: the blocks that wait to be destaged and are not picked, in the
    /// order in which they will be picked. The queue may contain outdated entries.
    queue: VecDeque<(BlockNo, u32)>,
    turns: u32,
    picked: BTreeSet<BlockNo>,
    /// Blocks with dirty data in segments that are being vacated, including blocks being
    /// transferred.
    pub(super) leaving: BTreeSet<BlockNo>,
    /// Number of consecutive queue entries that were examined and whose blocks were not cold.
    looks_in_vain: usize,
    /// Number of blocks to pick without an examination, because no block was cold.
    all_hot: usize,
    is_looking: bool,
    /// Number of blocks to destage in each epoch.
    pub(super) epochs: BTreeMap<u32, u32>,
    /// Number of flushes and durable writes of the guest, if write order is kept.
    pub(super) flushes: u32,
    /// The newest epoch whose data may be destaged now, if write order is kept.
    pub(super) front: u32,
    pub(super) cursor: BlockNo,
    /// True while the destager reduces the amount of dirty data from its upper to its lower limit.
    pub(super) running: bool,
    /// Sectors of the disk that were destaged but are perhaps not durable on the backing.
    pub(super) written: BTreeSet<u64>,
    /// Destaged sectors that the flush in progress makes durable.
    pub(super) flushing: BTreeSet<u64>,
    pub(super) is_flushing: bool,
    /// Time at which the backing got the first sector of `written`.
    pub(super) written_since: Option<Instant>,
    pub(super) transfers: u32,
    /// Ranges of sectors that transfers (see `jobs.rs`) are writing to the backing. The ranges are
    /// disjoint; the key is the first sector and the value is the end.
    writing: BTreeMap<u64, u64>,
    /// Blocks in the ranges of `writing`. The value is the block's epoch if the block must be
    /// destaged again after its transfer.
    writing_blocks: BTreeMap<BlockNo, Option<u32>>,
    /// Sectors in `writing` that were overwritten on flash since their transfer read them.
    overwritten: BTreeSet<u64>,
    /// Request slots of changes that must go to the backing, and wait until a transfer of some of
    /// the same sectors has ended. During this wait each change keeps its range lock.
    pub(super) write_waiters: Vec<u32>,
    /// Number of sectors in the ranges of the transfers in progress.
    pub(super) moving: u64,
    pub(super) failures: u32,
    pub(super) rest_until: Option<Instant>,
    /// Time until which transfers wait for a buffer of whole stripes of the backing. The time stays
    /// set until such a buffer is free.
    pub(super) stripe_wait_until: Option<Instant>,
    /// Time at which the destager must check for work, even if no event occurs.
    pub(super) wake_at: Option<Instant>,
    /// The period that each epoch covers. `None` before the first start.
    period: Option<Epochs>,
    /// Requests that wait until older data is on the backing.
    pub(super) order_waiters: Vec<u32>,
}

impl Destager {
    /// Returns true if the last attempt to destage failed and another one is in progress or
    /// planned.
    pub(super) fn is_failing(&self) -> bool {
        self.failures > 0 && (self.rest_until.is_some() || self.transfers > 0 || self.is_flushing)
    }

    /// Returns the memory use in bytes. Trees count as 1.5 times the size of their entries.
    pub(super) fn bytes(&self) -> u64 {
        let blocks = (self.picked.len() + self.leaving.len()) * size_of::<BlockNo>();
        let todo = self.todo.len() * size_of::<(BlockNo, Todo)>() + blocks;
        let moved = (self.written.len() + self.flushing.len() + self.overwritten.len()) * size_of::<u64>();
        ((todo + moved) * 3 / 2 + self.queue.capacity() * size_of::<(BlockNo, u32)>()) as u64
    }

    /// Returns the epoch (age group) of a block that is to be destaged and is not being
    /// transferred.
    pub(super) fn epoch(&self, block: BlockNo) -> Option<u32> {
        self.todo.get(&block).map(|todo| todo.epoch)
    }

    /// Returns true if a block may be destaged when blocks up to epoch `newest` may.
    pub(super) fn may_go(&self, block: BlockNo, newest: u32) -> bool {
        self.epoch(block).is_some_and(|epoch| epoch <= newest)
    }

    /// Changes the order of destaging.
    pub(super) fn keep_order(&mut self, order: DestageOrder) {
        if self.order == order {
            return;
        }
        self.order = order;
        self.queue.clear();
        self.picked.clear();
        (self.looks_in_vain, self.all_hot) = (0, 0);
        if order == DestageOrder::Coldest {
            self.queue.extend(self.todo.iter().map(|(block, todo)| (*block, todo.turn)));
        }
    }

    /// Records a guest's write to a block. Returns true if the block was not in the destage queue
    /// before.
    pub(super) fn add(&mut self, block: BlockNo, epoch: u32) -> bool {
        let is_new = self.enqueue(block, epoch);
        if is_new && self.order == DestageOrder::Coldest {
            self.queue.push_back((block, self.turns));
        }
        is_new
    }

    fn enqueue(&mut self, block: BlockNo, epoch: u32) -> bool {
        if let Some(again) = self.writing_blocks.get_mut(&block) {
            // If the block were queued now, its next transfer would wait for the present transfer,
            // and later writes of guests would wait for that next transfer.
            *again = Some(again.map_or(epoch, |other| other.min(epoch)));
            return false;
        }
        let Entry::Vacant(entry) = self.todo.entry(block) else { return false };
        self.turns = self.turns.wrapping_add(1);
        entry.insert(Todo { epoch, turn: self.turns });
        *self.epochs.entry(epoch).or_default() += 1;
        true
    }

    /// Removes a block from the destage queue, because it is being transferred or is not dirty any
    /// more. Returns the block's epoch, or `None` if the block was not in the queue.
    pub(super) fn take(&mut self, block: BlockNo) -> Option<u32> {
        let Todo { epoch, .. } = self.todo.remove(&block)?;
        self.picked.remove(&block);
        if self.queue.len() > 2 * self.todo.len() + STALE_MIN {
            let todo = &self.todo;
            self.queue.retain(|(block, turn)| todo.get(block).is_some_and(|todo| todo.turn == *turn));
        }
        let count = self.epochs.get_mut(&epoch).expect("each block is counted");
        *count -= 1;
        if *count == 0 {
            self.epochs.remove(&epoch);
        }
        Some(epoch)
    }

    /// Removes sectors from the set of destaged sectors, because they were written again or
    /// dropped.
    pub(super) fn cut(&mut self, first: u64, end: u64) {
        let written = self.writing_in(first, end).map(|(from, to)| (from.max(first), to.min(end)));
        written.collect::<Vec<_>>().into_iter().for_each(|(from, to)| self.overwritten.extend(from..to));
        for set in [&mut self.written, &mut self.flushing] {
            if !set.is_empty() {
                let gone: Vec<u64> = set.range(first..end).copied().collect();
                gone.iter().for_each(|sector| _ = set.remove(sector));
            }
        }
    }

    /// Records that a transfer writes the sectors `first..end`, which are in `blocks`, to the
    /// backing.
    pub(super) fn begin_write(&mut self, first: u64, end: u64, blocks: RangeInclusive<u32>) {
        assert!(!self.is_writing(first, end), "the backing has one write of a sector at a time");
        self.writing.insert(first, end);
        self.writing_blocks.extend(blocks.map(|block| (BlockNo(block), None)));
    }

    /// Records the end of a write that [`begin_write`](Self::begin_write) recorded. Blocks that
    /// were overwritten during the write return to the destage queue.
    pub(super) fn end_write(&mut self, first: u64, end: u64, blocks: RangeInclusive<u32>) {
        if self.writing.remove(&first).is_none() {
            // These sectors are a request's edges, and the request's range lock excludes other
            // uses.
            return;
        }
        self.overwritten.retain(|sector| !(first..end).contains(sector));
        for block in blocks.map(BlockNo) {
            if let Some(Some(epoch)) = self.writing_blocks.remove(&block) {
                self.add(block, epoch);
            }
        }
    }

    /// Returns true if a transfer writes any of these sectors to the backing.
    pub(super) fn is_writing(&self, first: u64, end: u64) -> bool {
        self.writing_in(first, end).next().is_some()
    }

    fn writing_in(&self, first: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
        let ranges = self.writing.range(..end).rev().map(|(from, to)| (*from, *to));
        ranges.take_while(move |(_, to)| *to > first)
    }

    /// Moves a block to the oldest epoch, so that it is destaged as soon as possible.
    pub(super) fn hurry(&mut self, block: BlockNo) {
        if self.enqueue(block, self.front) && self.order == DestageOrder::Coldest {
            self.queue.push_front((block, self.turns));
        }
    }

    /// Ends the current epoch, if write order is kept: data that becomes dirty from now on is newer
    /// than a flush or a durable write of the guest.
    pub(super) fn flush_point(&mut self) {
        if self.flushes == u32::MAX {
            self.restart_numbering();
        }
        self.flushes = self.flushes.saturating_add(1);
    }

    /// Makes the numbers of all epochs as small as possible, and keeps their order. If write order
    /// is not kept, epoch numbers are times, so smaller numbers make hob destage the data earlier.
    fn restart_numbering(&mut self) {
        let overwritten = self.writing_blocks.values().flatten();
        let used = self.epochs.keys().chain(overwritten).chain([&self.front, &self.flushes]);
        let used: BTreeSet<u32> = used.copied().collect();
        let numbers: BTreeMap<u32, u32> = used.into_iter().zip(0..).collect();
        let renumber = |epoch: &mut u32| *epoch = numbers[&*epoch];
        renumber(&mut self.front);
        renumber(&mut self.flushes);
        self.todo.values_mut().for_each(|todo| renumber(&mut todo.epoch));
        self.writing_blocks.values_mut().flatten().for_each(renumber);
        self.epochs = self.epochs.iter().map(|(epoch, count)| (numbers[epoch], *count)).collect();
    }

    /// Returns true if a flush of the backing for destaged data is in progress.
    pub(super) fn is_flushing(&self) -> bool {
        self.is_flushing
    }

    /// Records the start of a transfer of `sectors` sectors.
    pub(super) fn begin_transfer(&mut self, sectors: u64) {
        self.transfers += 1;
        self.moving += sectors;
    }

    /// Records the end of a transfer of `sectors` sectors.
    pub(super) fn end_transfer(&mut self, sectors: u64) {
        self.transfers -= 1;
        self.moving -= sectors;
    }

    /// Returns the approximate number of dirty sectors that will soon be clean: those in transfer,
    /// and those that are destaged but not durable yet.
    pub(super) fn on_their_way(&self) -> u64 {
        self.moving + (self.written.len() + self.flushing.len()) as u64
    }

    /// Records that the backing got these sectors of the disk.
    pub(super) fn moved(&mut self, now: Instant, first: u64, end: u64) {
        if self.written.is_empty() {
            self.written_since = Some(now);
        }
        let overwritten = &self.overwritten;
        self.written.extend((first..end).filter(|sector| !overwritten.contains(sector)));
    }

    /// Returns and forgets the sectors that were destaged but are perhaps not durable.
    pub(super) fn take_moved(&mut self) -> BTreeSet<u64> {
        let mut moved = std::mem::take(&mut self.written);
        moved.append(&mut self.flushing);
        moved
    }

    /// Records the start of a flush of the backing.
    pub(super) fn begin_flush(&mut self) {
        assert!(!self.is_flushing);
        self.is_flushing = true;
        self.flushing = std::mem::take(&mut self.written);
    }

    /// Returns true if a sector of the disk was destaged but is perhaps not durable.
    pub(super) fn is_moved(&self, sector: u64) -> bool {
        self.written.contains(&sector) || self.flushing.contains(&sector)
    }

    /// Restarts the destager with these dirty blocks. If write order is kept and was kept before, the
    /// blocks keep their epochs. All other blocks are in the oldest epoch.
    pub(super) fn restart(&mut self, epochs: Epochs, dirty: impl Iterator<Item = BlockNo>) {
        // Transfers that wait for their range lock check again which sectors are dirty.
        let before = std::mem::take(self);
        let Destager { order, order_waiters, flushes, transfers, moving, is_flushing, .. } = before;
        let Destager { writing, writing_blocks, overwritten, write_waiters, .. } = before;
        // A flush in progress does not cover data that is destaged from now on.
        *self = Destager {
            order,
            order_waiters,
            flushes,
            transfers,
            moving,
            is_flushing,
            writing,
            writing_blocks,
            overwritten,
            write_waiters,
            front: before.front,
            period: before.period,
            ..Destager::default()
        };
        let keeps = epochs == Epochs::Flushes && before.period == Some(epochs);
        if !keeps {
            self.begin_epochs(epochs);
        }
        let oldest = self.front;
        let epoch = |block: &BlockNo| match before.todo.get(block) {
            Some(todo) if keeps => todo.epoch,
            _ => oldest,
        };
        // Queued blocks keep their position.
        let mut dirty: BTreeSet<BlockNo> = dirty.collect();
        let queued = before
            .queue
            .iter()
            .filter(|(block, turn)| before.todo.get(block).is_some_and(|todo| todo.turn == *turn));
        for block in before.picked.iter().chain(queued.map(|(block, _)| block)) {
            if dirty.remove(block) {
                self.add(*block, epoch(block));
            }
        }
        dirty.into_iter().for_each(|block| _ = self.add(block, epoch(&block)));
    }

    /// Starts a new numbering of epochs. Returns the epoch of the oldest dirty data.
    fn begin_epochs(&mut self, epochs: Epochs) -> u32 {
        self.period = Some(epochs);
        if epochs == Epochs::Flushes {
            // The next write belongs to a later epoch than all data that is dirty now.
            self.flushes = self.flushes.max(1);
            self.front = self.flushes - 1;
        } else {
            self.front = 0;
        }
        self.front
    }

    /// Changes the period that one epoch covers. If both periods are durations, dirty data keeps
    /// its age.
    pub(super) fn renumber(&mut self, before: Epochs, now: Epochs) {
        let oldest = self.begin_epochs(now);
        let renumber = |epoch: &mut u32| {
            *epoch = match (before, now) {
                (Epochs::Time(before), Epochs::Time(now)) => (u64::from(*epoch) * before / now) as u32,
                _ => oldest,
            };
        };
        self.writing_blocks.values_mut().flatten().for_each(renumber);
        self.epochs.clear();
        for Todo { epoch, .. } in self.todo.values_mut() {
            renumber(epoch);
            *self.epochs.entry(*epoch).or_default() += 1;
        }
    }

    /// Returns true if no transfer or flush is in progress.
    pub(super) fn is_idle(&self) -> bool {
        self.transfers == 0 && !self.is_flushing
    }

    /// Returns true if no transfer or flush is in progress and nothing is left to destage.
    pub(super) fn is_done(&self) -> bool {
        self.is_idle() && self.todo.is_empty() && self.written.is_empty()
    }

    /// Returns the next block to destage in segments that are being vacated: the first such block
    /// at or after `cursor`, or else the first one of the disk.
    pub(super) fn next_leaving(&self) -> Option<BlockNo> {
        let is_to_do = |block: &&BlockNo| self.todo.contains_key(block);
        let ahead = self.leaving.range(self.cursor..).find(is_to_do);
        ahead.or_else(|| self.leaving.iter().find(is_to_do)).copied()
    }

    /// Returns true if the block is to be destaged and no transfer has taken it.
    pub(super) fn is_to_do(&self, block: BlockNo) -> bool {
        self.todo.contains_key(&block)
    }

    /// Returns true if the block is to be destaged and is in a segment that is being vacated.
    pub(super) fn is_leaving(&self, block: BlockNo) -> bool {
        self.leaving.contains(&block) && self.todo.contains_key(&block)
    }

    /// Returns the next block to destage, of those up to epoch `newest`. `was_used` returns true if
    /// a block was used since the last call for this block, or since the block became dirty. `None`
    /// may also mean that the search must continue later, see [`is_looking`](Self::is_looking).
    pub(super) fn next(&mut self, newest: u32, was_used: impl FnMut(BlockNo) -> bool) -> Option<BlockNo> {
        self.is_looking = false;
        self.epochs.range(..=newest).next()?;
        if self.order == DestageOrder::Coldest
            && let Some(block) = self.coldest(newest, was_used)
        {
            return Some(block);
        }
        // Age takes precedence over coldness: a block up to epoch `newest` is destaged even if it
        // was not picked as cold.
        if self.is_looking { None } else { self.elevator(newest) }
    }

    /// Returns true if [`next`](Self::next) stopped before the end of its search.
    pub(super) fn is_looking(&self) -> bool {
        self.is_looking
    }

    /// Returns the next block to destage up to epoch `newest`: the first such block at or after
    /// `cursor`, or else the first one of the disk.
    fn elevator(&self, newest: u32) -> Option<BlockNo> {
        let may = |(_, todo): &(&BlockNo, &Todo)| todo.epoch <= newest;
        let ahead = self.todo.range(self.cursor..).find(may);
        ahead.or_else(|| self.todo.iter().find(may)).map(|(block, _)| *block)
    }

    fn coldest(&mut self, newest: u32, mut was_used: impl FnMut(BlockNo) -> bool) -> Option<BlockNo> {
        if let Some(block) = self.next_picked(newest, &mut was_used) {
            return Some(block);
        }
        self.pick(newest, was_used);
        self.next_picked(newest, |_| false)
    }

    /// Returns the next picked block. A block that was used since it was picked returns to the
    /// queue.
    fn next_picked(&mut self, newest: u32, mut was_used: impl FnMut(BlockNo) -> bool) -> Option<BlockNo> {
        loop {
            let may = |block: &&BlockNo| self.may_go(**block, newest);
            let ahead = self.picked.range(self.cursor..).find(may);
            let block = *ahead.or_else(|| self.picked.iter().find(may))?;
            if self.all_hot > 0 || !was_used(block) {
                return Some(block);
            }
            self.picked.remove(&block);
            self.queue.push_back((block, self.todo[&block].turn));
        }
    }

    /// Picks the cold blocks among the first entries of the queue. If no block is cold, the first
    /// part of the queue is picked in order.
    fn pick(&mut self, newest: u32, mut was_used: impl FnMut(BlockNo) -> bool) {
        let most = (self.todo.len() / PICKED_PART).clamp(1, PICKED_MAX);
        for _ in 0..LOOKS_MAX {
            if self.picked.len() >= most {
                return;
            }
            let Some((block, turn)) = self.queue.pop_front() else { return };
            let Some(todo) = self.todo.get(&block).filter(|todo| todo.turn == turn) else { continue };
            if todo.epoch > newest {
                return self.queue.push_front((block, turn));
            }
            if self.all_hot > 0 {
                self.all_hot -= 1;
                self.picked.insert(block);
            } else if was_used(block) {
                self.queue.push_back((block, turn));
                self.looks_in_vain += 1;
                if self.looks_in_vain > self.queue.len() {
                    (self.looks_in_vain, self.all_hot) = (0, self.queue.len() / HOT_PART + most);
                }
            } else {
                self.looks_in_vain = 0;
                self.picked.insert(block);
            }
        }
        self.is_looking = self.picked.is_empty();
    }
}

impl Epochs {
    /// Returns the period that one epoch covers in a cache with these settings.
    pub(super) fn of(destage: &Destage) -> Epochs {
        match (destage.ordered, half_age_ns(destage)) {
            (true, _) => Epochs::Flushes,
            (false, Some(half)) => Epochs::Time(half),
            (false, None) => Epochs::One,
        }
    }
}

/// Returns half of the dirty-age limit in nanoseconds, if there is one. The result is at least one
/// millisecond, because epochs are numbered in 32 bits.
pub(super) fn half_age_ns(destage: &Destage) -> Option<u64> {
    let ms = destage.dirty_age_ms_max;
    (ms > 0).then(|| (ms * 500_000).max(1_000_000))
}

#[cfg(test)]
mod tests;
