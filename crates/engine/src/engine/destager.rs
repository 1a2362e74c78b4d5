//! The dirty data of one cache: what is to go to the backing, what is on its way, and in which order it goes.
//!
//! An *elevator* goes over the disk round and round. *Coldest* keeps a queue of the blocks as they became dirty; a block
//! that was used since goes to its end again when its turn comes, which is LRU nearly (the second chance of Corbató, "A
//! paging experiment with the Multics system", 1968). What has its turn is picked a few blocks at a time, and the elevator goes
//! over these.
//!
//! Block numbers, sectors of the disk and counts; who moves and flushes is `destage.rs`.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::command::{Destage, DestageOrder};
use crate::units::{BlockNo, Instant};

/// Cold blocks that are picked together, to go in the order of the disk: at most so many, and such a part of all.
const PICKED_MAX: usize = 64;
const PICKED_PART: usize = 16;

/// Blocks looked at for them in one go.
const LOOKS_MAX: usize = 256;

/// Where no block is cold, such a part of them goes before all are looked at again.
const HOT_PART: usize = 4;

/// Entries in the queue that are of no use any more, at least, before they are thrown out.
const STALE_MIN: usize = 64;

/// What an epoch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Epochs {
    /// What lies between two flushes of the guest.
    Flushes,
    /// So many nanoseconds.
    Time(u64),
    /// There is only one.
    One,
}

/// A block with dirty sectors that are not on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Todo {
    /// In which it became so.
    epoch: u32,
    /// Tells its entry in the queue from older ones.
    turn: u32,
}

/// The dirty data of one cache.
#[derive(Debug, Default)]
pub(super) struct Destager {
    todo: BTreeMap<BlockNo, Todo>,
    order: DestageOrder,
    /// Where the coldest go first: the blocks to do that are not picked, as their turns come, and entries that stand for
    /// nothing any more.
    queue: VecDeque<(BlockNo, u32)>,
    turns: u32,
    picked: BTreeSet<BlockNo>,
    /// Blocks with dirty data in segments that leave, whether to do or on their way.
    pub(super) leaving: BTreeSet<BlockNo>,
    /// Blocks in a row that were looked at and hot.
    looks_in_vain: usize,
    /// So many go without a look: all were hot.
    all_hot: usize,
    is_looking: bool,
    /// How many of them each epoch has.
    pub(super) epochs: BTreeMap<u32, u32>,
    /// Guest flushes, where write order is kept.
    pub(super) flushes: u32,
    /// The newest epoch whose data may go to the backing now, where write order is kept.
    pub(super) front: u32,
    /// Where the elevator is.
    pub(super) cursor: BlockNo,
    /// More is dirty than was to be, and not yet little enough.
    pub(super) running: bool,
    /// Sectors of the disk that the backing got and that may not be durable there.
    pub(super) written: BTreeSet<u64>,
    /// Of these, those that the flush under way makes durable.
    pub(super) flushing: BTreeSet<u64>,
    pub(super) is_flushing: bool,
    /// When the backing got the first of `written`.
    pub(super) written_since: Option<Instant>,
    pub(super) transfers: u32,
    /// Sectors of the ranges that they look at.
    pub(super) moving: u64,
    pub(super) failures: u32,
    pub(super) rest_until: Option<Instant>,
    /// When there may be something to do though nothing happened.
    pub(super) wake_at: Option<Instant>,
    /// Requests that wait until older data is on the backing.
    pub(super) order_waiters: Vec<u32>,
}

impl Destager {
    /// Did the last attempt fail, and is there another one under way or to come?
    pub(super) fn is_failing(&self) -> bool {
        self.failures > 0 && (self.rest_until.is_some() || self.transfers > 0 || self.is_flushing)
    }

    /// Memory, bytes; of trees, half as much again as their entries take.
    pub(super) fn bytes(&self) -> u64 {
        let blocks = (self.picked.len() + self.leaving.len()) * size_of::<BlockNo>();
        let todo = self.todo.len() * size_of::<(BlockNo, Todo)>() + blocks;
        let moved = (self.written.len() + self.flushing.len()) * size_of::<u64>();
        ((todo + moved) * 3 / 2 + self.queue.capacity() * size_of::<(BlockNo, u32)>()) as u64
    }

    /// The epoch of a block that is to be destaged and not on its way.
    pub(super) fn epoch(&self, block: BlockNo) -> Option<u32> {
        self.todo.get(&block).map(|todo| todo.epoch)
    }

    /// May this block go, when blocks up to `newest` may?
    pub(super) fn may_go(&self, block: BlockNo, newest: u32) -> bool {
        self.epoch(block).is_some_and(|epoch| epoch <= newest)
    }

    /// From now on destages in this order.
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

    /// What a guest's write makes of this block. True if it was not to be destaged before.
    pub(super) fn add(&mut self, block: BlockNo, epoch: u32) -> bool {
        let is_new = self.enqueue(block, epoch);
        if is_new && self.order == DestageOrder::Coldest {
            self.queue.push_back((block, self.turns));
        }
        is_new
    }

    fn enqueue(&mut self, block: BlockNo, epoch: u32) -> bool {
        let Entry::Vacant(entry) = self.todo.entry(block) else { return false };
        self.turns = self.turns.wrapping_add(1);
        entry.insert(Todo { epoch, turn: self.turns });
        *self.epochs.entry(epoch).or_default() += 1;
        true
    }

    /// A block is on its way, or not dirty any more.
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

    /// New data or no data: these sectors are not on their way any more.
    pub(super) fn cut(&mut self, first: u64, end: u64) {
        for set in [&mut self.written, &mut self.flushing] {
            if !set.is_empty() {
                let gone: Vec<u64> = set.range(first..end).copied().collect();
                gone.iter().for_each(|sector| _ = set.remove(sector));
            }
        }
    }

    /// This block is among the oldest: it goes as soon as it may.
    pub(super) fn hurry(&mut self, block: BlockNo) {
        if self.enqueue(block, self.front) && self.order == DestageOrder::Coldest {
            self.queue.push_front((block, self.turns));
        }
    }

    /// A guest flushed.
    pub(super) fn flush_point(&mut self) {
        self.flushes += 1;
    }

    /// Is the backing being flushed for it?
    pub(super) fn is_flushing(&self) -> bool {
        self.is_flushing
    }

    /// A transfer out of so many sectors begins.
    pub(super) fn begin_transfer(&mut self, sectors: u64) {
        self.transfers += 1;
        self.moving += sectors;
    }

    /// It ended.
    pub(super) fn end_transfer(&mut self, sectors: u64) {
        self.transfers -= 1;
        self.moving -= sectors;
    }

    /// Dirty sectors that will not be for long, nearly: they are being moved, or were and are not durable yet.
    pub(super) fn on_their_way(&self) -> u64 {
        self.moving + (self.written.len() + self.flushing.len()) as u64
    }

    /// The backing got these sectors of the disk.
    pub(super) fn moved(&mut self, now: Instant, first: u64, end: u64) {
        if self.written.is_empty() {
            self.written_since = Some(now);
        }
        self.written.extend(first..end);
    }

    /// Forgets which sectors the backing got that are not known to be durable there, and returns them.
    pub(super) fn take_moved(&mut self) -> BTreeSet<u64> {
        let mut moved = std::mem::take(&mut self.written);
        moved.append(&mut self.flushing);
        moved
    }

    /// A flush of the backing has begun.
    pub(super) fn begin_flush(&mut self) {
        assert!(!self.is_flushing);
        self.is_flushing = true;
        self.flushing = std::mem::take(&mut self.written);
    }

    /// Is this sector of the disk on its way, and the backing has it?
    pub(super) fn is_moved(&self, sector: u64) -> bool {
        self.written.contains(&sector) || self.flushing.contains(&sector)
    }

    /// Forgets everything: these blocks are dirty, and have been for long.
    pub(super) fn restart(&mut self, epochs: Epochs, dirty: impl Iterator<Item = BlockNo>) {
        // Transfers that wait for a claim will find out what is dirty when they have it.
        let before = std::mem::take(self);
        let Destager { order, order_waiters, flushes, transfers, moving, is_flushing, .. } = before;
        // A flush under way covers nothing of what is destaged from now on.
        *self =
            Destager { order, order_waiters, flushes, transfers, moving, is_flushing, ..Destager::default() };
        let oldest = self.begin_epochs(epochs);
        // What had its place in the queue keeps it.
        let mut dirty: BTreeSet<BlockNo> = dirty.collect();
        let queued = before
            .queue
            .iter()
            .filter(|(block, turn)| before.todo.get(block).is_some_and(|todo| todo.turn == *turn));
        for block in before.picked.iter().chain(queued.map(|(block, _)| block)) {
            if dirty.remove(block) {
                self.add(*block, oldest);
            }
        }
        dirty.into_iter().for_each(|block| _ = self.add(block, oldest));
    }

    /// Epochs are counted anew. Returns the one of data that has been dirty for long.
    fn begin_epochs(&mut self, epochs: Epochs) -> u32 {
        self.front = if epochs == Epochs::Flushes { self.flushes } else { 0 };
        self.front.saturating_sub(1)
    }

    /// Epochs are something else from now on. Where both are lengths of time, what is dirty keeps its age.
    pub(super) fn renumber(&mut self, before: Epochs, now: Epochs) {
        let oldest = self.begin_epochs(now);
        self.epochs.clear();
        for Todo { epoch, .. } in self.todo.values_mut() {
            *epoch = match (before, now) {
                (Epochs::Time(before), Epochs::Time(now)) => (u64::from(*epoch) * before / now) as u32,
                _ => oldest,
            };
            *self.epochs.entry(*epoch).or_default() += 1;
        }
    }

    /// Is nothing under way?
    pub(super) fn is_idle(&self) -> bool {
        self.transfers == 0 && !self.is_flushing
    }

    /// Is nothing left to be done either?
    pub(super) fn is_done(&self) -> bool {
        self.is_idle() && self.todo.is_empty() && self.written.is_empty()
    }

    /// The next block to go of those in segments that leave, from the cursor on.
    pub(super) fn next_leaving(&self) -> Option<BlockNo> {
        let is_to_do = |block: &&BlockNo| self.todo.contains_key(block);
        let ahead = self.leaving.range(self.cursor..).find(is_to_do);
        ahead.or_else(|| self.leaving.iter().find(is_to_do)).copied()
    }

    /// Is this a block to do in a segment that leaves?
    pub(super) fn is_leaving(&self, block: BlockNo) -> bool {
        self.leaving.contains(&block) && self.todo.contains_key(&block)
    }

    /// The next block to go of those up to this epoch. `was_used` says whether a block was used since that was asked last,
    /// or since it became dirty. `None` though there is one: it has to be looked for further, see
    /// [`is_looking`](Self::is_looking).
    pub(super) fn next(&mut self, newest: u32, was_used: impl FnMut(BlockNo) -> bool) -> Option<BlockNo> {
        self.is_looking = false;
        self.epochs.range(..=newest).next()?;
        if self.order == DestageOrder::Coldest
            && let Some(block) = self.coldest(newest, was_used)
        {
            return Some(block);
        }
        // Age goes before cold: what has to go and did not have its turn goes too.
        if self.is_looking { None } else { self.elevator(newest) }
    }

    /// Did [`next`](Self::next) stop in the middle?
    pub(super) fn is_looking(&self) -> bool {
        self.is_looking
    }

    /// From the cursor on, round and round.
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

    /// The next of those picked. One that was used meanwhile is not picked any more.
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

    /// Picks those that are cold of the first in the queue. If none of all is, those of its first part go as they come.
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
    /// Those of a cache with these settings.
    pub(super) fn of(destage: &Destage) -> Epochs {
        match (destage.ordered, half_age_ns(destage)) {
            (true, _) => Epochs::Flushes,
            (false, Some(half)) => Epochs::Time(half),
            (false, None) => Epochs::One,
        }
    }
}

/// Half of the dirty-age bound, if there is one. Epochs are numbered in 32 bits: they are a millisecond or longer.
pub(super) fn half_age_ns(destage: &Destage) -> Option<u64> {
    let ms = destage.dirty_age_ms_max;
    (ms > 0).then(|| (ms * 500_000).max(1_000_000))
}

#[cfg(test)]
mod tests;
