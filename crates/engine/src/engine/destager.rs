//! The dirty data of one cache: what is to go to the backing, what is on its way, and in which order it goes.
//!
//! Block numbers, sectors of the disk and counts; who moves and flushes is `destage.rs`.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use crate::units::{BlockNo, Instant};

/// The dirty data of one cache.
#[derive(Debug, Default)]
pub(super) struct Destager {
    /// Blocks with dirty sectors that are not on their way, and the epoch in which they became so.
    pub(super) todo: BTreeMap<BlockNo, u32>,
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
    pub(super) transfers: u32,
    pub(super) failures: u32,
    pub(super) rest_until: Option<Instant>,
    /// When there may be something to do though nothing happened.
    pub(super) wake_at: Option<Instant>,
    /// Requests that wait until older data is on the backing.
    pub(super) order_waiters: Vec<u32>,
}

impl Destager {
    /// What a guest's write makes of this block.
    pub(super) fn add(&mut self, block: BlockNo, epoch: u32) {
        if let Entry::Vacant(entry) = self.todo.entry(block) {
            entry.insert(epoch);
            *self.epochs.entry(epoch).or_default() += 1;
        }
    }

    pub(super) fn take(&mut self, block: BlockNo) -> Option<u32> {
        let epoch = self.todo.remove(&block)?;
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

    /// This block is to be destaged at once, or as soon as its turn comes.
    pub(super) fn hurry(&mut self, block: BlockNo) {
        self.add(block, self.front);
    }

    /// A guest flushed.
    pub(super) fn flush_point(&mut self) {
        self.flushes += 1;
    }

    /// Is the backing being flushed for it?
    pub(super) fn is_flushing(&self) -> bool {
        self.is_flushing
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
    pub(super) fn restart(&mut self, dirty: impl Iterator<Item = BlockNo>) {
        // Transfers that wait for a claim will find out what is dirty when they have it.
        let (order_waiters, flushes) = (std::mem::take(&mut self.order_waiters), self.flushes);
        let transfers = self.transfers;
        *self = Destager { order_waiters, flushes, front: flushes, transfers, ..Destager::default() };
        let epoch = if flushes > 0 { flushes - 1 } else { 0 };
        dirty.for_each(|block| self.add(block, epoch));
    }

    /// Is nothing under way?
    pub(super) fn is_idle(&self) -> bool {
        self.transfers == 0 && !self.is_flushing
    }

    /// Is nothing left to be done either?
    pub(super) fn is_done(&self) -> bool {
        self.is_idle() && self.todo.is_empty() && self.written.is_empty()
    }

    /// The next block of which the epoch may go, from the cursor on, round and round.
    pub(super) fn elevator(&self, newest: u32) -> Option<BlockNo> {
        self.epochs.range(..=newest).next()?;
        let may = |(_, epoch): &(&BlockNo, &u32)| **epoch <= newest;
        let ahead = self.todo.range(self.cursor..).find(may);
        ahead.or_else(|| self.todo.iter().find(may)).map(|(block, _)| *block)
    }
}
