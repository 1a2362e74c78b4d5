//! Event counts of simulated histories. Tests use the counts to verify what the histories cover.

use hob_engine::outcome::Outcome;

/// Event counts of one or several histories.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of answered requests, by outcome.
    pub outcomes: [u64; Outcome::COUNT],
    /// Number of hits that were read directly into guest memory.
    pub direct: u64,
    /// Number of reads into guest memory that the engine declined.
    pub declined: u64,
    /// Number of requests that the engine did not accept because too many were in flight.
    pub handed_back: u64,
    /// Number of commands that ended, with or without success.
    pub commands: u64,
    /// Number of flash devices that were fenced.
    pub fences: u64,
    /// Number of backing restarts.
    pub restarts: u64,
    /// Number of failed backing flushes that lost data.
    pub lossy_flushes: u64,
    /// Number of times that the engine reported that acknowledged writes of guests may be lost.
    pub doubts: u64,
    /// Number of failed flushes that began before the last loss.
    pub flushes_failed_early: u64,
    /// Number of changes that failed because the backing lost data each time that the engine sent
    /// the change.
    pub changes_given_up: u64,
    /// Number of times that a cache lost segments because of a device failure.
    pub losses: u64,
    /// Number of times that a device stopped answering in time.
    pub stalls: u64,
    /// Number of times that a stalled device answered again.
    pub resumptions: u64,
    /// Number of evicted blocks.
    pub evictions: u64,
    /// Number of power cuts.
    pub power_cuts: u64,
    /// Number of engine processes that ended with SIGKILL.
    pub kills: u64,
    /// Number of engine processes that closed every journal before they ended.
    pub stops: u64,
    /// Number of caches recovered from their journals.
    pub recoveries: u64,
    /// Number of recoveries with dirty data.
    pub recoveries_dirty: u64,
    /// Number of recoveries in which the journal tail named sectors that flash did not have.
    pub recoveries_undone: u64,
    /// Number of recoveries that dropped clean sectors near foreign writes to the backing.
    pub recoveries_distrusting: u64,
    /// Number of recoveries of cleanly closed journals.
    pub recoveries_clean: u64,
    /// Number of recoveries of a cache during which guests used the disk.
    pub early: u64,
    /// Number of recovering caches whose journal rings were invalidated to let a write bypass the
    /// cache.
    pub voided: u64,
    /// Number of engine processes that ended before a recovered cache was in service.
    pub crashes_in_recovery: u64,
    /// Number of engine processes that ended while a command was in progress.
    pub crashes_in_change: u64,
    /// Number of engine processes that ended during a drain.
    pub crashes_in_drain: u64,
    /// Number of journals that could not be written any more because of flash failures.
    pub journals_lost: u64,
    /// Number of times that a journal lost one of its copies.
    pub journal_copies_lost: u64,
    /// Number of attempts to replace a journal that had lost a copy.
    pub journal_copies_replaced: u64,
    /// Number of journals that lost both copies: the second copy failed before the journal was
    /// replaced.
    pub journal_copies_lost_both: u64,
    /// Number of flash devices that were removed and returned.
    pub devices_returned: u64,
    /// Number of times that a backing changed while no daemon served it.
    pub changed_behind: u64,
    /// Number of silent changes of backings. The backing's identity does not show a silent change,
    /// and a sample of clean sectors may not show it either.
    pub changed_silently: u64,
    /// Number of recoveries in which the daemon had evidence that the backing is unchanged, in
    /// histories with silent changes.
    pub recoveries_proved: u64,
    /// Number of recoveries that had clean data and no evidence that the backing is unchanged.
    pub recoveries_unverified: u64,
    /// Number of times that dirty data was discarded, by command or because the backing had
    /// changed.
    pub discards: u64,
    /// Number of recoveries that found dirty data after write-back was ended with a drain, because
    /// of a device defect.
    pub outdated: u64,
    /// Number of times that a cache reported the loss of dirty data.
    pub dirty_lost: u64,
    /// Number of completed drains.
    pub drains: u64,
    /// Number of times that a cache had destaged all dirty data of the segments that it was to
    /// return.
    pub vacated: u64,
    /// Number of times that a backing was temporarily unavailable.
    pub outages: u64,
    /// Number of times that a disk grew.
    pub growths: u64,
    /// Number of caches recovered for a disk that had grown.
    pub recoveries_larger: u64,
    /// Number of engine processes that ended while a disk was growing.
    pub crashes_in_growth: u64,
    /// Number of commands that changed dirty bitmaps.
    pub bitmaps: u64,
    /// Number of rotations of dirty bitmaps.
    pub rotations: u64,
    /// Number of memory copies that the engine requested: between a memory tier and a buffer,
    /// between two buffers, or of zeroes into a buffer.
    pub copies: u64,
    /// Number of copies that filled up partial sector writes with the other bytes of the sector.
    pub edges_merged: u64,
    /// Number of copies that filled up partial sector writes from the engine's buffer of recently
    /// written sectors.
    pub edges_recent: u64,
    /// Number of zero-write requests that went to flash.
    pub zeroes_to_flash: u64,
    /// Number of writes that went to backings merged with other writes.
    pub writes_merged: u64,
    /// Number of writes in long sequential runs that went directly to the backing, because too much
    /// data was dirty.
    pub bulk_writes: u64,
    /// Number of bytes read ahead.
    pub read_ahead_bytes: u64,
    /// Number of bytes that extra fills read from backings.
    pub extra_read_bytes: u64,
    /// Number of times that a guest used a block that an extra fill had cached.
    pub extra_blocks_used: u64,
    /// Number of bytes that were not written to flash because of a flash write budget.
    pub flash_writes_refused_bytes: u64,
    /// Number of bytes destaged from flash to backings.
    pub destaged_bytes: u64,
    /// Number of backing reads that a parent disk served, completely or in part.
    pub shared: u64,
    /// Duration of the histories, nanoseconds of virtual time.
    pub took_ns: u64,
}

impl Report {
    /// Adds the counts of another history.
    pub fn add(&mut self, other: &Report) {
        self.outcomes.iter_mut().zip(other.outcomes).for_each(|(a, b)| *a += b);
        let theirs = other.counts();
        for ((_, mine), (_, theirs)) in self.counts_mut().into_iter().zip(theirs) {
            *mine += theirs;
        }
    }

    /// Returns every count by name, except the counts by outcome.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        self.clone().counts_mut().into_iter().map(|(name, count)| (name, *count)).collect()
    }

    fn counts_mut(&mut self) -> Vec<(&'static str, &mut u64)> {
        macro_rules! named {
            ($($field:ident)*) => { vec![$((stringify!($field), &mut self.$field)),*] };
        }
        named! {
            vacated outages direct declined handed_back commands fences restarts lossy_flushes doubts flushes_failed_early changes_given_up losses stalls resumptions evictions power_cuts kills stops
            recoveries recoveries_dirty recoveries_undone recoveries_distrusting recoveries_clean
            early voided crashes_in_recovery crashes_in_change crashes_in_drain journals_lost journal_copies_lost journal_copies_replaced journal_copies_lost_both devices_returned changed_behind
            changed_silently recoveries_proved recoveries_unverified discards outdated dirty_lost
            drains growths recoveries_larger crashes_in_growth bitmaps rotations copies edges_merged edges_recent zeroes_to_flash writes_merged bulk_writes read_ahead_bytes extra_read_bytes extra_blocks_used flash_writes_refused_bytes destaged_bytes shared took_ns
        }
    }
}
