//! The limit of one cache's flash writes: the less unused budget the cache has saved, the more
//! copies of clean data are refused.
//!
//! The *pressure* is 0 while the cache has saved at least half of the budget that it can save, and
//! [`PRESSURE_MAX`] when nothing is saved. Between two rows of the table, the hash of a block
//! decides which row applies to the block, so that the number of refused blocks grows evenly with
//! the pressure:
//!
//! | pressure, of 1024 | refused |
//! |---|---|
//! | 0 to 128 | more and more extra data (fill granularity) |
//! | 128 to 768 | also writes to uncached blocks; and blocks with fewer than 2, 3, 4, 6, 8 accesses |
//! | 768 to 1024 | also more and more of all other blocks of clean data, then all of them |
//!
//! At any pressure, a block is refused if the saved budget does not cover all bytes that would be
//! written for the block, both copies included. Data for free frames may be written on loan instead
//! (see [`super`]).

use super::{Allowance, Counts};
use crate::admission::AdmissionEffect;
use crate::index::hash;
use crate::units::{BlockNo, SECTOR_BYTES};

/// Pressure at which no clean data is copied into flash.
pub const PRESSURE_MAX: u32 = 1024;

/// Pressure from which all extra data is refused, and a block needs a minimum number of accesses.
const POPULARITY_FROM: u32 = 128;

/// Pressure from which some blocks are refused whatever their number of accesses.
const REFUSAL_FROM: u32 = 768;

/// Numbers of accesses after which a block is admitted. The first entry applies at
/// [`POPULARITY_FROM`], the last at [`REFUSAL_FROM`], and the others at equal distances between.
const ACCESSES: [u8; 6] = [1, 2, 3, 4, 6, 8];

/// Number that is XORed with a block's number before it is hashed, so that the choice of blocks is
/// independent of the index and of the samples of miniatures.
const SALT: u32 = 0x6275_6467;

/// Returns the pressure for a cache with this saved budget.
pub fn pressure(credit: i64, credit_max: i64) -> u32 {
    let half = credit_max / 2;
    if credit >= half && credit > 0 {
        return 0;
    }
    let missing = i128::from(half.max(1) - credit.max(0)) * i128::from(PRESSURE_MAX);
    (missing / i128::from(half.max(1))).clamp(0, PRESSURE_MAX.into()) as u32
}

/// Verdict about a copy of clean data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The copy may be written if the block had at least this number of accesses.
    Accesses(u8),
    /// The budget refuses the copy.
    Refused,
}

/// The limit that the flash write budget sets for one cache during one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    credit: i64,
    credit_max: i64,
    loan: i64,
    /// Number of copies of clean data that the request writes: 1 or 2.
    pub(crate) copies: u64,
    /// True if the block that was judged last will be charged to the pool's loan instead of the
    /// saved budget.
    is_on_loan: bool,
    /// Counts of clean data that was copied or refused since the limit was created.
    pub(crate) counts: Counts,
}

impl Limit {
    pub(crate) fn new(allowance: &Allowance, counts: Counts) -> Limit {
        let (credit, loan) = allowance.remaining(counts);
        let credit_max = allowance.credit_max;
        let counts = Counts::default();
        Limit { credit, credit_max, loan, copies: 1, is_on_loan: false, counts }
    }

    /// Returns the limit of a request that writes two copies of clean data.
    pub(crate) fn of_two_copies(self) -> Limit {
        Limit { copies: 2, ..self }
    }

    pub(crate) fn pressure(&self) -> u32 {
        pressure(self.credit, self.credit_max)
    }

    /// Returns true if the saved budget suffices to write this number of sectors.
    pub(crate) fn covers(&self, sectors: u64) -> bool {
        self.credit >= (sectors * SECTOR_BYTES) as i64
    }

    /// Decides whether `sectors` sectors of this block, in all copies, may be written.
    pub(crate) fn judge(
        &mut self,
        block: BlockNo,
        effect: AdmissionEffect,
        sectors: u64,
        place: Place,
    ) -> Verdict {
        self.is_on_loan = false;
        if !is_refusable(effect) {
            return Verdict::Accesses(1);
        }
        let (pressure, is_covered) = (self.pressure(), self.covers(sectors));
        if pressure == 0 && is_covered {
            return Verdict::Accesses(1);
        }
        if place == Place::Free && self.loan >= (sectors * SECTOR_BYTES) as i64 {
            self.is_on_loan = true;
            return Verdict::Accesses(1);
        }
        if !is_covered {
            return Verdict::Refused;
        }
        let at = position(block);
        let share = |from: u32, to: u32| ((pressure - from) << 16) / (to - from);
        if pressure >= REFUSAL_FROM && (pressure == PRESSURE_MAX || at < share(REFUSAL_FROM, PRESSURE_MAX)) {
            return Verdict::Refused;
        }
        if place == Place::Cached || pressure <= POPULARITY_FROM {
            return Verdict::Accesses(1);
        }
        if effect == AdmissionEffect::CleanWrite {
            return Verdict::Refused;
        }
        let scaled = share(POPULARITY_FROM, REFUSAL_FROM).min(1 << 16) * (ACCESSES.len() as u32 - 1);
        let step = (scaled >> 16) as usize + usize::from(at < scaled & 0xffff);
        Verdict::Accesses(ACCESSES[step.min(ACCESSES.len() - 1)])
    }

    /// Returns true if extra data next to this block may be written.
    pub(crate) fn allows_extra(&self, block: BlockNo) -> bool {
        let pressure = self.pressure();
        pressure < POPULARITY_FROM && position(block) >= (pressure << 16) / POPULARITY_FROM
    }

    /// Deducts clean data that is written from the saved budget or the loan: all copies of the
    /// block that was judged last.
    pub(crate) fn charge(&mut self, sectors: u64) {
        let bytes = sectors * SECTOR_BYTES;
        self.counts.clean += bytes;
        if std::mem::take(&mut self.is_on_loan) {
            self.counts.borrowed += bytes;
            self.loan -= bytes as i64;
        } else {
            self.credit -= bytes as i64;
        }
    }

    /// Deducts extra data that is written from the saved budget. Extra data is never written on
    /// loan.
    pub(crate) fn charge_extra(&mut self, sectors: u64) {
        self.is_on_loan = false;
        self.charge(sectors);
    }

    /// Adds a refused copy of `sectors` sectors to the counts.
    pub(crate) fn refuse(&mut self, sectors: u64) {
        self.counts.refused += sectors * SECTOR_BYTES;
    }
}

/// Whether the block of a copy has a frame, or which frame it would get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The block has a frame.
    Cached,
    /// A frame is free.
    Free,
    /// Another block would be evicted.
    Evicts,
}

/// Returns true if a budget may refuse this data.
pub(crate) fn is_refusable(effect: AdmissionEffect) -> bool {
    matches!(effect, AdmissionEffect::Clean | AdmissionEffect::CleanWrite)
}

/// Returns a number from 0 to 65535, the same for each request of a block.
fn position(block: BlockNo) -> u32 {
    (hash(BlockNo(block.0 ^ SALT)) >> 48) as u32
}
