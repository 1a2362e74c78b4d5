//! Counts of histories, to verify that they cover what they should.

use hob_engine::outcome::Outcome;

/// Counts of a history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Requests answered, by outcome.
    pub outcomes: [u64; Outcome::COUNT],
    /// Hits that were read into a guest's own memory.
    pub direct: u64,
    /// Reads into guest memory that were declined.
    pub declined: u64,
    /// Requests handed back because too many were in flight.
    pub handed_back: u64,
    /// Commands that ended, with or without success.
    pub commands: u64,
    /// Devices fenced.
    pub fences: u64,
    /// Backings that restarted.
    pub restarts: u64,
    /// Failed flushes of backings that lost data.
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
    /// Lives that ended with SIGKILL.
    pub kills: u64,
    /// Lives that ended with every journal closed.
    pub stops: u64,
    /// Caches recovered from their journals.
    pub recoveries: u64,
    /// Recoveries with dirty data.
    pub recoveries_dirty: u64,
    /// Recoveries with sectors in the tail that flash did not have.
    pub recoveries_undone: u64,
    /// Recoveries that dropped clean sectors near writes to the backing.
    pub recoveries_distrusting: u64,
    /// Recoveries of cleanly closed journals.
    pub recoveries_clean: u64,
    /// Disks that were used while their cache was recovered.
    pub early: u64,
    /// Early-used disks whose rings were invalidated for a change.
    pub voided: u64,
    /// Lives that ended before a recovered cache was in service.
    pub crashes_in_recovery: u64,
    /// Lives that ended while a command was in progress.
    pub crashes_in_change: u64,
    /// Lives that ended during a drain.
    pub crashes_in_drain: u64,
    /// Journals that flash had lost.
    pub journals_lost: u64,
    /// Flash devices that had been taken out and returned.
    pub devices_returned: u64,
    /// Backings that changed while no daemon served them.
    pub changed_behind: u64,
    /// Those that changed silently.
    pub changed_silently: u64,
    /// Recoveries with evidence that the backing is unchanged, in histories with silent changes.
    pub recoveries_proved: u64,
    /// Recoveries without evidence, and with clean data.
    pub recoveries_unverified: u64,
    /// Times that dirty data was discarded, by command or because the backing had changed.
    pub discards: u64,
    /// Recoveries that found dirty data after the drain that ended write-back, because of a device's
    /// defect.
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
    /// Caches recovered for a disk that had grown.
    pub recoveries_larger: u64,
    /// Lives that ended while a disk was growing.
    pub crashes_in_growth: u64,
    /// Changes of dirty bitmaps.
    pub bitmaps: u64,
    /// Rotations of bitmaps.
    pub rotations: u64,
    /// Copies between memory and buffers.
    pub copies: u64,
    /// Copies of the rest of a sector next to what a guest wrote of it.
    pub edges_merged: u64,
    /// Of these, parts of sectors that were in memory.
    pub edges_recent: u64,
    /// Requests for zeroes that were written to flash.
    pub zeroes_to_flash: u64,
    /// Writes that went to backings together with others.
    pub writes_merged: u64,
    /// Writes of long runs that bypassed flash because too much was dirty.
    pub bulk_writes: u64,
    /// Bytes read ahead.
    pub read_ahead_bytes: u64,
    /// Bytes written from flash to backings.
    pub destaged_bytes: u64,
    /// Reads of backings that another disk served, completely or in part.
    pub shared: u64,
    /// Duration in nanoseconds of virtual time.
    pub took_ns: u64,
}

impl Report {
    /// Adds another history's counts.
    pub fn add(&mut self, other: &Report) {
        self.outcomes.iter_mut().zip(other.outcomes).for_each(|(a, b)| *a += b);
        let theirs = other.counts();
        for ((_, mine), (_, theirs)) in self.counts_mut().into_iter().zip(theirs) {
            *mine += theirs;
        }
    }

    /// Returns every count except the outcomes, by name.
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
            early voided crashes_in_recovery crashes_in_change crashes_in_drain journals_lost devices_returned changed_behind
            changed_silently recoveries_proved recoveries_unverified discards outdated dirty_lost
            drains growths recoveries_larger crashes_in_growth bitmaps rotations copies edges_merged edges_recent zeroes_to_flash writes_merged bulk_writes read_ahead_bytes destaged_bytes shared took_ns
        }
    }
}
