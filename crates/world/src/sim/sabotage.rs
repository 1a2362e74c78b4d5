//! Deliberate defects that the checkers must notice (tests/sabotage.rs).

use crate::media::DeviceDefect;

/// Deliberate defects of the engine or of its simulated environment: devices, daemon and guests.
/// Each defect tests whether the checkers notice a violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A simulated device has this defect.
    Defect(DeviceDefect),
    /// Another program sometimes changes a backing without hob's knowledge, so that flash has stale
    /// data.
    WriteBehind,
    /// The simulation delivers some replies twice.
    RepeatedReply,
    /// The simulation loses some replies.
    LostReply,
    /// The simulation releases some buffers twice.
    RepeatedRelease,
    /// The simulation sends some flash I/O to another segment.
    MisroutedIo,
    /// The simulation omits some requests from its own counts, so they differ from the engine's
    /// statistics.
    Uncounted,
    /// The simulation loses some I/O completions.
    LostCompletion,
    /// Recovery accepts every sector of a journal tail without verification.
    UncheckedTail,
    /// Recovery applies the change records of a journal page in the wrong order.
    ReorderedRecords,
    /// Recovery ignores the journal records which say that a checksum is unknown (*unproven*).
    IgnoredOverwrites,
    /// Recovery treats incomplete sectors as complete, although flash has only some of their
    /// 512-byte units.
    ForgottenUnits,
    /// The daemon does not flush flash before it reads journals.
    UnflushedRecovery,
    /// Recovery ignores the crash log.
    IgnoredCrashLog,
    /// Recovery ignores the newest journal ring, and the pool does not free old rings.
    IgnoredNewestRing,
    /// The cache serves clean data although the backing has changed.
    ServedStale,
    /// The cache serves clean data without comparing it with the backing, although the backing may
    /// have changed.
    TrustedUnproven,
    /// The daemon compares clean data with an earlier content of the backing.
    StaleComparison,
    /// The daemon records that a backing is unchanged before all cached data was compared with the
    /// backing.
    EvidenceTooEarly,
    /// The memory tier does not receive the data of some writes, and keeps older data.
    LostRenewal,
    /// After a guest writes a part of a sector, the simulation sometimes does not copy the rest of
    /// the sector to the buffer.
    LostEdge,
    /// The memory tier sometimes keeps an old copy of a sector that a guest wrote in part.
    OldRecentEdge,
    /// The buffer from which zeroes are written is sometimes not zeroed.
    LostZeroes,
    /// Some dirty bitmaps that a crash lost restart with no granule marked.
    FreshBitmap,
    /// The engine uses journal rings that were invalidated. The daemon invalidates a ring if a
    /// write bypasses the cache before the cache is recovered.
    KeptVoidRings,
    /// The daemon hides that a guest writes to memory into which the engine reads.
    SecretScribbles,
    /// Extra fills read an older content of the backing, as if a write that arrives during an extra
    /// fill did not wait for its end.
    StaleExtraFill,
    /// The daemon does not tell the engine the caches' parts of a flash write budget.
    IgnoredFlashBudget,
    /// The daemon hides that a parent disk serves some of the data that the engine reads.
    UntoldSharing,
    /// The daemon does not tell the engine that a backing restarted.
    UntoldRestart,
    /// The simulation reports a failed flush of a backing that lost data as a success.
    TrustedFlush,
    /// The simulation reports a failed flush of flash that lost data as a success.
    TrustedFlashFlush,
    /// The daemon tells the engine that the loss of a journal is recorded, but does not record it.
    UnrecordedLoss,
    /// The daemon keeps a journal that lost one of its two copies. A correct daemon gives the cache
    /// a new journal.
    IgnoredCopyLoss,
    /// The daemon does not report that a kill lost unflushed data in its memory.
    UnmarkedMemory,
    /// All guests of a disk share one session, so a loss is reported only to the first guest that
    /// flushes.
    OneSession,
    /// The pool frees a segment when destaging of its dirty data begins, not when it ends.
    EarlyGift,
}
