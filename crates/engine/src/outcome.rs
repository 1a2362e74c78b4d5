//! Outcomes: how a request was served, and why. Each guest request has exactly one outcome.
//!
//! The table [`OUTCOMES`] is the only source of their names and sentences; statistics, `hob explain`, the
//! API and the docs use it.

/// The outcome of a request. The variants are the rows of [`OUTCOMES`], in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Outcome {
    /// All of it came from flash.
    Hit,
    /// All of it came from memory.
    HitMemory,
    /// All of it came from memory, some of it read ahead for it.
    HitPrefetched,
    /// Some of it was in flash; all of it was read from the backing, and filled.
    PartialMiss,
    /// None of it was in flash; read from the backing and filled.
    MissFilled,
    /// Missed, and not filled because too many fills wait for flash already.
    MissFlashBusy,
    /// Missed, and not filled because no block can be evicted: the candidates are in use, or admission
    /// allows none.
    MissNoBlock,
    /// Missed, and not filled because it is part of a sequential run.
    MissSequential,
    /// Missed, and not filled because admission requires another access first.
    MissUnproven,
    /// A write, written through to the backing; flash got its copy.
    WriteCopied,
    /// A write, written through to the backing; flash got no (complete) copy.
    WriteNotCopied,
    /// A write, stored on flash; the backing gets it later.
    WriteBack,
    /// Discard or write-zeroes: nothing to serve from flash.
    BypassZeroing,
    /// A flush: nothing to serve.
    BypassFlush,
    /// A flush of data that is in flash: the journal was committed.
    FlushCommitted,
    /// Part of it is in flash and was not compared with the backing since the cache was recovered.
    BypassUnverified,
    /// The cache's mode bypasses the cache.
    BypassMode,
    /// Not completely in flash, and its export promotes nothing.
    BypassNoPromote,
    /// The cache of the disk's parent served it.
    BypassShared,
    /// The cache was being changed at that moment.
    BypassChanging,
    /// The cache is being recovered.
    BypassRecovering,
    /// Another host still owned the disk.
    BypassStandby,
    /// The flash device exceeds the time limit.
    BypassStalled,
    /// All of the cache's flash is fenced after errors.
    BypassFenced,
    /// The disk has no cache.
    CacheOff,
    /// In flash, but flash failed to deliver; served from the backing.
    FlashFailed,
    /// In flash, but its checksum did not match; served from the backing and repaired.
    ChecksumMismatch,
    /// Not on the backing yet, and flash lost it; the guest got the error.
    DirtyLost,
    /// The backing failed; the guest got the error.
    BackingError,
    /// Refused before any I/O: out of range, read-only or shutting down.
    Refused,
}

/// A row of [`OUTCOMES`].
#[derive(Debug)]
pub struct OutcomeInfo {
    /// The outcome.
    pub outcome: Outcome,
    /// Its class: `hit`, `partial-miss`, `miss-filled`, `miss-not-admitted`, `write`, `flush`, `bypass`,
    /// `cache-off`, `flash-error`, `backing-error` or `refused`.
    pub class: &'static str,
    /// The reason inside the class; empty if the class is sufficient.
    pub reason: &'static str,
    /// The rest of a sentence that starts with a share of the requests: "12 % …".
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

    /// Returns true for a read of the backing whose data goes to flash, if admission allows it.
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
