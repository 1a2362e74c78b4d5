//! Outcomes: how requests were served, and why. Each guest request has exactly one outcome.
//!
//! The table [`OUTCOMES`] is the only source of the outcomes' names and sentences. Statistics, `hob
//! explain`, the API and the docs use it.

/// The outcome of a request. The variants are the rows of [`OUTCOMES`], in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Outcome {
    /// A read that flash served completely.
    Hit,
    /// A read that memory served completely.
    HitMemory,
    /// A read that memory served completely, with some data from read-ahead.
    HitPrefetched,
    /// A read with only some data in flash. The backing served the whole read, and the missing part
    /// was written to flash.
    PartialMiss,
    /// A read without data in flash. The backing served the read, and the data was written to
    /// flash.
    MissFilled,
    /// A read that missed and was not filled, because too many fills are waiting for flash.
    MissFlashBusy,
    /// A read that missed and was not filled, because no block can be evicted. The candidates are
    /// in use, or admission does not permit their eviction.
    MissNoBlock,
    /// A read that missed and was not filled, because it is part of a sequential run.
    MissSequential,
    /// A read that missed and was not filled, because admission requires another access first.
    MissUnproven,
    /// A read that missed and was not filled, because of the pool's flash write budget.
    MissFlashBudget,
    /// A write that went to the backing, with a copy on flash.
    WriteCopied,
    /// A write that went to the backing, without a complete copy on flash.
    WriteNotCopied,
    /// A write to flash. The backing gets the data later.
    WriteBack,
    /// A discard or zeroing that went to the backing.
    BypassZeroing,
    /// A flush for which hob flushed the backing, after a commit of the journal if there is one.
    BypassFlush,
    /// A flush that committed the journal, because the data is on flash.
    FlushCommitted,
    /// A read whose data on flash was not yet compared with the backing since the cache was
    /// recovered.
    BypassUnverified,
    /// A request that bypassed the cache because of the cache's mode.
    BypassMode,
    /// A read that was not completely in flash, through an export that promotes nothing.
    BypassNoPromote,
    /// A read that the cache of the parent's disk served.
    BypassShared,
    /// A request that bypassed the cache because the cache was being changed.
    BypassChanging,
    /// A request that bypassed the cache because the cache was being recovered.
    BypassRecovering,
    /// A request that arrived while another host still owned the disk.
    BypassStandby,
    /// A request that bypassed a flash device which exceeds the time limit.
    BypassStalled,
    /// A request that bypassed a cache whose flash devices are all fenced after errors.
    BypassFenced,
    /// A request that the backing served, because the disk has no cache.
    CacheOff,
    /// A read that the backing served because of an error of flash.
    FlashFailed,
    /// A read that the backing served because of a wrong checksum on flash; flash was repaired.
    ChecksumMismatch,
    /// A read that failed because flash lost data that the backing does not have yet.
    DirtyLost,
    /// A request that failed because the backing failed.
    BackingError,
    /// A request that was refused before any I/O: out of range, read-only, or shutting down.
    Refused,
}

/// Name and description of one outcome: a row of [`OUTCOMES`].
#[derive(Debug)]
pub struct OutcomeInfo {
    /// The outcome.
    pub outcome: Outcome,
    /// Class of the outcome: `hit`, `partial-miss`, `miss-filled`, `miss-not-admitted`, `write`,
    /// `flush`, `bypass`, `cache-off`, `flash-error`, `backing-error` or `refused`.
    pub class: &'static str,
    /// Reason inside the class; empty if the class is sufficient.
    pub reason: &'static str,
    /// Predicate of a sentence that begins with a share of the requests, such as "12 %".
    pub sentence: &'static str,
}

macro_rules! outcomes {
    ($($outcome:ident $class:literal $reason:literal $sentence:literal)*) => {
        /// All outcomes, indexed by `Outcome as usize`.
        pub const OUTCOMES: &[OutcomeInfo] = &[$(OutcomeInfo {
            outcome: Outcome::$outcome,
            class: $class,
            reason: $reason,
            sentence: $sentence,
        }),*];
    };
}

outcomes! {
    Hit "hit" "" "were served from flash"
    HitMemory "hit" "memory" "were served from memory"
    HitPrefetched "hit" "prefetched" "were served from memory, with data that hob had read ahead"
    PartialMiss "partial-miss" "" "had only some of their data on flash; the backing served them completely, and hob wrote the missing data to flash"
    MissFilled "miss-filled" "" "had no data on flash; the backing served them, and hob wrote their data to flash"
    MissFlashBusy "miss-not-admitted" "flash-busy" "missed, and were not written to flash, because too many writes already waited for flash"
    MissNoBlock "miss-not-admitted" "no-block" "missed, and were not written to flash, because no block could be evicted: each candidate was in use, or the admission rule does not permit evictions"
    MissSequential "miss-not-admitted" "sequential" "missed, and were not written to flash, because they belong to a sequential run, which the admission rule rejects"
    MissUnproven "miss-not-admitted" "unproven" "missed, and were not written to flash, because the admission rule requires more accesses to a block first"
    MissFlashBudget "miss-not-admitted" "flash-budget" "missed, and were not written to flash, because of the pool's flash write budget"
    WriteCopied "write" "copied" "were writes to the backing, with a copy on flash"
    WriteNotCopied "write" "not-copied" "were writes to the backing, without a complete copy on flash"
    WriteBack "write" "to-flash" "were writes to flash; hob writes their data to the backing later"
    BypassZeroing "bypass" "zeroing" "were discards or writes of zeroes, which hob sends to the backing only"
    BypassFlush "bypass" "flush" "were flushes for which hob flushed the backing"
    FlushCommitted "flush" "committed" "were flushes that made the data on flash durable"
    BypassUnverified "bypass" "unverified" "went to the backing, because their data on flash has not been compared with the backing since the restart"
    BypassMode "bypass" "mode" "bypassed the cache, because of its mode"
    BypassNoPromote "bypass" "no-promote" "missed, and were not written to flash, because reads through their export do not change the cache"
    BypassShared "bypass" "shared" "were served by the disk that caches the common snapshot of several clones, and were not written to flash again"
    BypassChanging "bypass" "cache-changing" "bypassed the cache while its settings were being changed"
    BypassRecovering "bypass" "cache-recovering" "went to the backing while the cache was being recovered from its journal"
    BypassStandby "bypass" "standby" "were served by the host that still owned the disk, before it handed the disk over to this host"
    BypassStalled "bypass" "flash-stalled" "bypassed the cache, because the flash device did not answer in time"
    BypassFenced "bypass" "flash-fenced" "bypassed the cache, because its flash devices are fenced after repeated errors"
    CacheOff "cache-off" "" "went to the backing, because the disk has no cache"
    FlashFailed "flash-error" "io" "had their data on flash, but the flash I/O failed; the backing served them"
    ChecksumMismatch "flash-error" "checksum" "had their data on flash with a wrong checksum; the backing served them, and hob repaired flash"
    DirtyLost "flash-error" "dirty-lost" "failed, because flash lost dirty data, which the backing does not have"
    BackingError "backing-error" "" "failed, because the backing failed"
    Refused "refused" "" "were refused: out of range, a write to a read-only disk, or during a shutdown"
}

impl Outcome {
    /// Returns true if memory served the whole request, without I/O to flash or to the backing.
    pub fn is_from_memory(self) -> bool {
        matches!(self, Outcome::HitMemory | Outcome::HitPrefetched)
    }

    /// Returns true for a read of the backing whose data goes to flash if admission permits.
    pub(crate) fn would_fill(self) -> bool {
        matches!(self, Outcome::MissFilled | Outcome::PartialMiss | Outcome::BypassUnverified)
    }

    /// Number of outcomes.
    pub const COUNT: usize = OUTCOMES.len();

    /// Returns the row of [`OUTCOMES`].
    pub fn info(self) -> &'static OutcomeInfo {
        &OUTCOMES[self as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_indexed_by_the_enum() {
        for (index, row) in OUTCOMES.iter().enumerate() {
            assert_eq!(row.outcome as usize, index);
        }
        assert_eq!(Outcome::Refused as usize, Outcome::COUNT - 1);
    }

    #[test]
    fn names_are_unique() {
        for (i, a) in OUTCOMES.iter().enumerate() {
            for b in &OUTCOMES[i + 1..] {
                assert!((a.class, a.reason) != (b.class, b.reason), "{}/{} twice", a.class, a.reason);
            }
        }
    }
}
