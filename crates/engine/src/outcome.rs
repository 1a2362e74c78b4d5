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
    /// A read with only some data in flash. The backing served all of it, and the missing part was
    /// filled.
    PartialMiss,
    /// A read without data in flash. The backing served it, and its data was filled.
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
    /// A write that went to the backing, with a copy on flash.
    WriteCopied,
    /// A write that went to the backing, without a complete copy on flash.
    WriteNotCopied,
    /// A write to flash; the backing gets the data later.
    WriteBack,
    /// A discard or zeroing, which goes to the backing.
    BypassZeroing,
    /// A flush of the backing.
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
    /// A request during a change of the cache.
    BypassChanging,
    /// A request during the recovery of the cache.
    BypassRecovering,
    /// A request while another host still owned the disk.
    BypassStandby,
    /// A request that bypassed a flash device which exceeds the time limit.
    BypassStalled,
    /// A request that bypassed a cache whose flash devices are all fenced after errors.
    BypassFenced,
    /// A request to a disk without a cache.
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

/// A row of [`OUTCOMES`].
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
    HitPrefetched "hit" "prefetched" "were served from memory, where they had been read ahead"
    PartialMiss "partial-miss" "" "were only partly in flash, so the whole request came from the backing; the missing part is in flash now"
    MissFilled "miss-filled" "" "were not in flash; they came from the backing and are in flash now"
    MissFlashBusy "miss-not-admitted" "flash-busy" "were not in flash and not put there, because flash writes were already queueing up"
    MissNoBlock "miss-not-admitted" "no-block" "were not in flash and not put there, because no block made room: those that could were in use, or admission lets none leave"
    MissSequential "miss-not-admitted" "sequential" "were not in flash and not put there, because they are parts of sequential runs, which admission lets pass by"
    MissUnproven "miss-not-admitted" "unproven" "were not in flash and not put there, because admission waits until blocks are asked for more often"
    WriteCopied "write" "copied" "were writes: written through to the backing, with a copy in flash"
    WriteNotCopied "write" "not-copied" "were writes: written through to the backing, without a complete copy in flash"
    WriteBack "write" "to-flash" "were writes that flash took; the backing gets them later"
    BypassZeroing "bypass" "zeroing" "were discards or zeroing, which concern the backing only"
    BypassFlush "bypass" "flush" "were flushes, which concern the backing only"
    FlushCommitted "flush" "committed" "were flushes that made what flash holds durable"
    BypassUnverified "bypass" "unverified" "went to the backing because what flash has of them is still to be compared with the backing since the restart"
    BypassMode "bypass" "mode" "went past the cache, as its mode says"
    BypassNoPromote "bypass" "no-promote" "were not all in flash and not put there, because their export promotes nothing"
    BypassShared "bypass" "shared" "came from the disk that keeps what clones of one snapshot share, and were not put in flash a second time"
    BypassChanging "bypass" "cache-changing" "bypassed the cache while its settings were being changed"
    BypassRecovering "bypass" "cache-recovering" "went to the backing while the cache was being recovered from its journal"
    BypassStandby "bypass" "standby" "came from the host that still owned the disk"
    BypassStalled "bypass" "flash-stalled" "bypassed the cache because the flash device did not answer in time"
    BypassFenced "bypass" "flash-fenced" "bypassed the cache because its flash devices are fenced after repeated errors"
    CacheOff "cache-off" "" "went to the backing because the disk has no cache"
    FlashFailed "flash-error" "io" "were in flash, but flash failed; the backing served them"
    ChecksumMismatch "flash-error" "checksum" "were in flash, but with a wrong checksum; the backing served them and repaired flash"
    DirtyLost "flash-error" "dirty-lost" "failed because flash lost data that the backing does not have yet"
    BackingError "backing-error" "" "failed because the backing failed"
    Refused "refused" "" "were refused: out of range, or a write to a read-only disk"
}

impl Outcome {
    /// Returns true if the request was served from memory, without any I/O.
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
