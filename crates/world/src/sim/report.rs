//! What histories contained, to see that they contain what they are for.

use hob_engine::outcome::Outcome;

/// What a history contained.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Requests answered, by outcome.
    pub outcomes: [u64; Outcome::COUNT],
    /// Hits that were read into a guest's own memory.
    pub direct: u64,
    /// Reads that were to be, and were declined.
    pub declined: u64,
    /// Requests handed back because too many were in flight.
    pub handed_back: u64,
    /// Commands that ended, well or not.
    pub commands: u64,
    /// Devices fenced.
    pub fences: u64,
    /// Backings that restarted.
    pub restarts: u64,
    /// Flushes of backings that failed and lost something.
    pub lossy_flushes: u64,
    /// Times that acknowledged changes of guests were in doubt.
    pub doubts: u64,
    /// Caches that lost segments by themselves.
    pub losses: u64,
    /// Devices that stopped answering in time.
    pub stalls: u64,
    /// Devices that answered again.
    pub resumptions: u64,
    /// Blocks evicted.
    pub evictions: u64,
    /// Power cuts.
    pub power_cuts: u64,
    /// Lives that ended with the process killed.
    pub kills: u64,
    /// Lives that ended with every journal brought to rest.
    pub stops: u64,
    /// Caches recovered from their journals.
    pub recoveries: u64,
    /// Of these, with dirty data.
    pub recoveries_dirty: u64,
    /// Of these, with sectors that a tail spoke of and flash did not have.
    pub recoveries_undone: u64,
    /// Of these, with clean sectors given up near writes to the backing.
    pub recoveries_distrusting: u64,
    /// Of these, closed cleanly.
    pub recoveries_clean: u64,
    /// Disks that were used while their cache was recovered.
    pub early: u64,
    /// Of these, with rings made void for a change.
    pub voided: u64,
    /// Lives that ended while a recovered cache was not yet in service.
    pub crashes_in_recovery: u64,
    /// Lives that ended while a command was under way.
    pub crashes_in_change: u64,
    /// Lives that ended during a drain.
    pub crashes_in_drain: u64,
    /// Journals that flash had not kept.
    pub journals_lost: u64,
    /// Backings that changed while nobody looked after them.
    pub changed_behind: u64,
    /// Of these, without a trace.
    pub changed_silently: u64,
    /// Recoveries with evidence that the backing is unchanged, in histories where some change silently.
    pub recoveries_proved: u64,
    /// Recoveries without, and with clean data.
    pub recoveries_unverified: u64,
    /// Times that dirty data was given up, by command or because the backing had changed.
    pub discards: u64,
    /// Recoveries that found something dirty after the drain that ended write-back: a device lied.
    pub outdated: u64,
    /// Times that a cache reported dirty data lost.
    pub dirty_lost: u64,
    /// Drains that ended with nothing dirty.
    pub drains: u64,
    /// Times that segments of caches were emptied of dirty data.
    pub vacated: u64,
    /// Times that backings were away.
    pub outages: u64,
    /// Disks that got larger.
    pub growths: u64,
    /// Caches recovered for a disk that was larger than they knew.
    pub recoveries_larger: u64,
    /// Lives that ended while a disk was getting larger.
    pub crashes_in_growth: u64,
    /// Changes of dirty bitmaps.
    pub bitmaps: u64,
    /// Of these, rotations.
    pub rotations: u64,
    /// Copies between memory and buffers.
    pub copies: u64,
    /// Copies of the rest of a sector next to what a guest wrote of it.
    pub edges_merged: u64,
    /// Requests for zeroes that were written to flash.
    pub zeroes_to_flash: u64,
    /// Writes that went to backings together with others.
    pub writes_merged: u64,
    /// Bytes read ahead.
    pub read_ahead_bytes: u64,
    /// Bytes written from flash to backings.
    pub destaged_bytes: u64,
    /// Reads of backings that another disk served, all or in part.
    pub shared: u64,
    /// How long it took, nanoseconds of virtual time.
    pub took_ns: u64,
}

impl Report {
    /// Adds another history's figures.
    pub fn add(&mut self, other: &Report) {
        self.outcomes.iter_mut().zip(other.outcomes).for_each(|(a, b)| *a += b);
        let theirs = other.counts();
        for ((_, mine), (_, theirs)) in self.counts_mut().into_iter().zip(theirs) {
            *mine += theirs;
        }
    }

    /// Every count but the outcomes, by name.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        self.clone().counts_mut().into_iter().map(|(name, count)| (name, *count)).collect()
    }

    fn counts_mut(&mut self) -> Vec<(&'static str, &mut u64)> {
        macro_rules! named {
            ($($field:ident)*) => { vec![$((stringify!($field), &mut self.$field)),*] };
        }
        named! {
            vacated outages direct declined handed_back commands fences restarts lossy_flushes doubts losses stalls resumptions evictions power_cuts kills stops
            recoveries recoveries_dirty recoveries_undone recoveries_distrusting recoveries_clean
            early voided crashes_in_recovery crashes_in_change crashes_in_drain journals_lost changed_behind
            changed_silently recoveries_proved recoveries_unverified discards outdated dirty_lost
            drains growths recoveries_larger crashes_in_growth bitmaps rotations copies edges_merged zeroes_to_flash writes_merged read_ahead_bytes destaged_bytes shared took_ns
        }
    }
}
