//! Admission: decides which blocks enter a cache. The backing serves a refused block, without a
//! flash write and without an eviction.
//!
//! An admission has four parts: the required popularity of a block, the length of a sequential run
//! above which requests bypass the cache, the fill level below which every request is admitted, and
//! whether written blocks are admitted. Users write `always`, `while-free`, `nth-access:3` or
//! `ghost`, each optionally with `+not-sequential:512K`, `+while-filling:80%` and `+reads-only`.

mod popularity;
pub(crate) mod streams;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use crate::units::{BlockNo, SECTOR_BYTES};
use popularity::Recent;
pub(crate) use streams::Streams;

/// Maximum number of accesses that the admission rule `nth-access` can require.
pub const ACCESSES_MAX: u8 = 8;

/// Settings of an admission rule. The default admits every block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// Required popularity of a block.
    pub popularity: Popularity,
    /// Minimum length of a sequential run whose requests are not admitted, bytes.
    pub sequential_bytes_max: Option<u64>,
    /// Every request is admitted until this percentage of the cache's blocks (1 to 100) holds data.
    pub filling_percent: Option<u8>,
    /// True if a write to a block that is not in the cache is not admitted, even while the cache
    /// fills (no write allocation). A write to a cached block updates the cached data. The setting
    /// does not affect dirty data.
    pub reads_only: bool,
}

/// Popularity that a block needs for admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Popularity {
    /// Every block is admitted.
    #[default]
    Always,
    /// Dirty data is always admitted, and all other data only while there are free frames. SmartX
    /// ZBS uses this rule too.
    WhileFree,
    /// The block must have been accessed this number of times (2 to [`ACCESSES_MAX`]), including
    /// the current access. Only recent accesses count: hob forgets an access after the admission
    /// has refused half as many other blocks as the cache has.
    NthAccess(u8),
    /// hob compares admission rules in small simulations and uses the best one; see
    /// [`chooser`](crate::chooser).
    Auto,
    /// The block must have been evicted or refused recently. While there are free frames, every
    /// block is admitted.
    Ghost,
}

/// One form of an admission rule: a row of [`ADMISSIONS`].
#[derive(Debug)]
pub struct AdmissionInfo {
    /// The form that users type.
    pub form: &'static str,
    /// Effect of the admission policy, for help texts.
    pub summary: &'static str,
}

/// The forms that [`Admission`] parses, for help and docs.
pub const ADMISSIONS: &[AdmissionInfo] = &[
    AdmissionInfo {
        form: "auto",
        summary: "simulates several admission rules beside the cache, and uses the one with the best hit ratio; under write-back, all writes go to flash",
    },
    AdmissionInfo { form: "always", summary: "admits each requested block" },
    AdmissionInfo {
        form: "while-free",
        summary: "admits data only while a block is free; a write that makes data dirty may also evict a clean block",
    },
    AdmissionInfo {
        form: "nth-access:N",
        summary: "admits a block at its N-th access (2 to 8); an access is forgotten after half as many later rejections as the cache has blocks",
    },
    AdmissionInfo {
        form: "ghost",
        summary: "once the cache is full, admits only blocks that were recently evicted or rejected",
    },
    AdmissionInfo {
        form: "…+not-sequential:BYTES",
        summary: "in addition, rejects sequential runs from BYTES on (a number, optionally with K or M)",
    },
    AdmissionInfo {
        form: "…+while-filling:PERCENT%",
        summary: "in addition, admits everything until PERCENT of the blocks (1 to 100) have data; sequential runs that are admitted only for this reason are evicted first",
    },
    AdmissionInfo {
        form: "…+reads-only",
        summary: "in addition, rejects writes to blocks that are not cached, unless their data becomes dirty; writes to cached blocks update them",
    },
];

/// Error for a text that is no admission rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownAdmission(String);

impl fmt::Display for UnknownAdmission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let forms: Vec<&str> = ADMISSIONS.iter().map(|row| row.form).collect();
        write!(f, "'{}' is not an admission rule; use one of {}", self.0, forms.join(", "))
    }
}

impl std::error::Error for UnknownAdmission {}

impl FromStr for Admission {
    type Err = UnknownAdmission;

    fn from_str(text: &str) -> Result<Self, UnknownAdmission> {
        let unknown = || UnknownAdmission(text.to_owned());
        let mut admission = Admission::default();
        for (index, part) in text.split('+').enumerate() {
            match part.split_once(':') {
                None if index == 0 && part == "always" => {}
                None if text == "auto" => admission.popularity = Popularity::Auto,
                None if index == 0 && part == "while-free" => admission.popularity = Popularity::WhileFree,
                None if index == 0 && part == "ghost" => admission.popularity = Popularity::Ghost,
                Some(("nth-access", n)) if index == 0 => {
                    let n = n.parse().ok().filter(|n| (2..=ACCESSES_MAX).contains(n));
                    admission.popularity = Popularity::NthAccess(n.ok_or_else(unknown)?);
                }
                Some(("not-sequential", bytes)) if admission.sequential_bytes_max.is_none() => {
                    admission.sequential_bytes_max = Some(parse_bytes(bytes).ok_or_else(unknown)?);
                }
                None if part == "reads-only" && index > 0 && !admission.reads_only => {
                    admission.reads_only = true;
                }
                Some(("while-filling", percent)) if admission.filling_percent.is_none() => {
                    let percent = percent.strip_suffix('%').and_then(|percent| percent.parse().ok());
                    let percent = percent.filter(|percent| (1..=100).contains(percent));
                    admission.filling_percent = Some(percent.ok_or_else(unknown)?);
                }
                _ => return Err(unknown()),
            }
        }
        Ok(admission)
    }
}

impl fmt::Display for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.popularity {
            Popularity::Always => write!(f, "always")?,
            Popularity::WhileFree => write!(f, "while-free")?,
            Popularity::NthAccess(n) => write!(f, "nth-access:{n}")?,
            Popularity::Ghost => write!(f, "ghost")?,
            Popularity::Auto => write!(f, "auto")?,
        }
        match self.sequential_bytes_max {
            None => {}
            Some(bytes) if bytes.is_multiple_of(1 << 20) => write!(f, "+not-sequential:{}M", bytes >> 20)?,
            Some(bytes) if bytes.is_multiple_of(1 << 10) => write!(f, "+not-sequential:{}K", bytes >> 10)?,
            Some(bytes) => write!(f, "+not-sequential:{bytes}")?,
        }
        self.filling_percent.map_or(Ok(()), |percent| write!(f, "+while-filling:{percent}%"))?;
        f.write_str(if self.reads_only { "+reads-only" } else { "" })
    }
}

fn parse_bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' | b'k' => (&text[..text.len() - 1], 10),
        b'M' | b'm' => (&text[..text.len() - 1], 20),
        _ => (text, 0),
    };
    let bytes = digits.parse::<u64>().ok()?.checked_mul(1 << shift)?;
    (bytes >= SECTOR_BYTES).then_some(bytes)
}

/// The admission rule of one cache, with the blocks that the rule remembers.
#[derive(Debug)]
pub(crate) struct Gate {
    popularity: Popularity,
    /// Recently refused blocks, and for `Ghost` also recently evicted ones.
    recent: Option<Recent>,
    sequential: Option<(u64, Streams)>,
    /// While fewer frames than this number are in use, every request is admitted.
    filled: u64,
    reads_only: bool,
    frames: u32,
}

/// The data that an admitted block will hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdmissionEffect {
    /// A copy of data on the backing that was read.
    Clean,
    /// A copy of data that a guest writes to the backing.
    CleanWrite,
    /// Dirty data.
    Dirty,
    /// Data from the cache of another host. Such data is always admitted.
    Pulled,
}

/// State of a cache's frames when a block needs one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) has_free: bool,
    /// Number of frames in use.
    pub(crate) used: u32,
}

/// Whether a request belongs to a sequential run that bypasses the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    /// The request is part of a sequential run that bypasses the cache.
    Sequential,
    /// The request is not part of a sequential run that bypasses the cache.
    Other,
}

impl Gate {
    /// Creates the admission of a cache of `frames` frames.
    pub(crate) fn new(admission: Admission, frames: u32) -> Gate {
        let remembers = matches!(admission.popularity, Popularity::NthAccess(_) | Popularity::Ghost);
        Gate {
            popularity: admission.popularity,
            recent: remembers.then(|| Recent::new(frames)),
            sequential: admission.sequential_bytes_max.map(|bytes| (bytes, Streams::default())),
            filled: u64::from(frames) * u64::from(admission.filling_percent.unwrap_or(0)) / 100,
            reads_only: admission.reads_only,
            frames,
        }
    }

    /// Records a read or write of the disk's sectors `first..end`, hits included.
    #[inline]
    pub(crate) fn observe(&mut self, first: u64, end: u64) -> Run {
        let Some((_, streams)) = &mut self.sequential else { return Run::Other };
        let run_bytes = streams.observe(first, end) * SECTOR_BYTES;
        self.judge(run_bytes)
    }

    /// Classifies a request. `run_bytes` is the length of the request's sequential run, including
    /// the request itself.
    #[inline]
    pub(crate) fn judge(&self, run_bytes: u64) -> Run {
        match &self.sequential {
            Some((bytes_max, _)) if run_bytes >= *bytes_max => Run::Sequential,
            _ => Run::Other,
        }
    }

    /// Changes the admission of a cache of `frames` frames. If both the old and the new admission
    /// remember refused blocks, these blocks stay remembered.
    pub(crate) fn set(&mut self, admission: Admission, frames: u32) {
        let before = std::mem::replace(self, Gate::new(admission, frames));
        if self.recent.is_some() && before.recent.is_some() {
            self.recent = before.recent;
        }
    }

    /// Returns true if a block that was accessed and is not in the cache is admitted. Records the
    /// access if the admission counts accesses.
    pub(crate) fn admit(&mut self, block: BlockNo, effect: AdmissionEffect, room: Room) -> bool {
        self.admit_after(block, effect, room, 1)
    }

    /// Does the same as [`admit`](Self::admit), but also requires `accesses_min` accesses, because
    /// of a flash write budget. The value 1 adds no requirement.
    pub(crate) fn admit_after(
        &mut self,
        block: BlockNo,
        effect: AdmissionEffect,
        room: Room,
        accesses_min: u8,
    ) -> bool {
        let has_free = room.has_free;
        // Refused writes are not counted as accesses. Otherwise a stream of writes would displace
        // the counts of reads.
        if self.reads_only && effect == AdmissionEffect::CleanWrite {
            return false;
        }
        if accesses_min > self.accesses() {
            let recent = self.recent.get_or_insert_with(|| Recent::new(self.frames));
            let is_popular = recent.count(block, accesses_min) >= accesses_min;
            return is_popular && (has_free || self.popularity != Popularity::WhileFree);
        }
        if self.is_filling(room) {
            return true;
        }
        match (self.popularity, &mut self.recent) {
            (Popularity::WhileFree, _) => has_free || effect == AdmissionEffect::Dirty,
            (Popularity::NthAccess(n), Some(recent)) => recent.count(block, n) >= n,
            (Popularity::Ghost, Some(recent)) => has_free || recent.count(block, 2) >= 2,
            _ => true,
        }
    }

    /// Returns the number of accesses that the admission rule requires of a block.
    pub(crate) fn accesses(&self) -> u8 {
        match self.popularity {
            Popularity::NthAccess(n) => n,
            Popularity::Ghost => 2,
            Popularity::Always | Popularity::WhileFree | Popularity::Auto => 1,
        }
    }

    /// Returns true if every request is admitted because the cache is less full than
    /// `while-filling` says.
    #[inline]
    pub(crate) fn is_filling(&self, room: Room) -> bool {
        room.has_free && u64::from(room.used) < self.filled
    }

    /// Returns true if clean data is never evicted for new data.
    pub(crate) fn only_while_free(&self) -> bool {
        self.popularity == Popularity::WhileFree
    }

    /// Records that a block was evicted.
    pub(crate) fn evicted(&mut self, block: BlockNo) {
        if let (Popularity::Ghost, Some(recent)) = (self.popularity, &mut self.recent) {
            recent.remember(block, 1);
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.recent.as_ref().map_or(0, Recent::bytes)
    }
}
