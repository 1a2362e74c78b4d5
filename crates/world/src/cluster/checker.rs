//! Checks the data that guests see of a disk on any host, and which host may serve the disk.

use std::collections::BTreeMap;

use crate::{Violation, ensure};

/// Expected state of one disk. Values of blocks are unique numbers.
#[derive(Default)]
pub(super) struct Checker {
    /// The latest generation of the disk in which a host acknowledged a request, and the number of
    /// this host.
    acknowledged: Option<(u64, usize)>,
    blocks: BTreeMap<u32, Block>,
}

#[derive(Default)]
struct Block {
    /// The value in the last acknowledged write or answered read of the block.
    settled: u64,
    /// Values that were written after `settled` and are not acknowledged. A read may return any of
    /// them.
    in_doubt: Vec<u64>,
}

impl Checker {
    /// Records that a host has accepted a write.
    pub(super) fn begin_write(&mut self, block: u32, value: u64) {
        self.blocks.entry(block).or_default().in_doubt.push(value);
    }

    /// Records that a host acknowledges a write.
    pub(super) fn end_write(
        &mut self,
        host: usize,
        generation: u64,
        block: u32,
        value: u64,
    ) -> Result<(), Violation> {
        self.acknowledge(host, generation)?;
        let block = self.blocks.entry(block).or_default();
        // Later reads must not return unacknowledged values that were written before this one.
        // Later reads may return unacknowledged values that were written later.
        let at = block.in_doubt.iter().position(|other| *other == value);
        block.in_doubt.drain(..at.map_or(0, |at| at + 1));
        block.settled = value;
        Ok(())
    }

    /// Checks a host's reply to a read.
    pub(super) fn end_read(
        &mut self,
        host: usize,
        generation: u64,
        number: u32,
        value: u64,
    ) -> Result<(), Violation> {
        self.acknowledge(host, generation)?;
        let block = self.blocks.entry(number).or_default();
        let known = value == block.settled || block.in_doubt.contains(&value);
        ensure!(
            known,
            "host {host} in generation {generation} reads {value} from block {number}; it can be {} or one of {:?}",
            block.settled,
            block.in_doubt
        );
        if value != block.settled {
            block.in_doubt.retain(|other| *other != value);
            block.settled = value;
        }
        Ok(())
    }

    /// Checks the ownership generation of a write that reaches the backing: no host may have
    /// acknowledged a request in a later generation before.
    pub(super) fn change(&self, host: usize, generation: u64) -> Result<(), Violation> {
        if let Some((latest, by)) = self.acknowledged {
            ensure!(
                generation >= latest,
                "a write of host {host} in generation {generation} reaches the backing after host {by} acknowledged a request in generation {latest}"
            );
        }
        Ok(())
    }

    /// Returns true if a read of the block may return this value now.
    pub(super) fn may_have(&self, number: u32, value: u64) -> bool {
        let block = self.blocks.get(&number);
        block.map_or(value == 0, |block| value == block.settled || block.in_doubt.contains(&value))
    }

    /// Records a forced takeover, which loses all data that is not on the backing: from now on
    /// reads must return the backing's values.
    pub(super) fn give_up(&mut self, backing: &BTreeMap<u32, u64>) {
        for (number, block) in &mut self.blocks {
            let there = backing.get(number).copied().unwrap_or(0);
            block.in_doubt.retain(|value| *value != there);
            block.settled = there;
        }
    }

    /// Checks that a host may reply to the guest. No other host may have replied in this ownership
    /// generation, and no host may have replied in a later generation.
    pub(super) fn acknowledge(&mut self, host: usize, generation: u64) -> Result<(), Violation> {
        if let Some((latest, by)) = self.acknowledged {
            ensure!(
                generation > latest || (generation == latest && host == by),
                "host {host} acknowledges a request in generation {generation} after host {by} did so in generation {latest}"
            );
        }
        self.acknowledged = Some((generation, host));
        Ok(())
    }
}
