//! Configuration of a disk's cache in the state file. Defaults for older files: write-through,
//! volatile, everything is admitted.

use std::fmt;
use std::str::FromStr;

use hob_control::Size;
use hob_engine::admission::Admission;
use hob_engine::command::{Copies, Destage, DestageOrder, Layout, Mode};
use hob_engine::granularity::Fill;
use hob_engine::partition::{Limits, SHARES_DEFAULT};
use hob_engine::preset::Verify;
use hob_engine::units::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::hardware::ChangeToken;

/// The configured cache of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CacheSpec {
    /// Name of the pool that has the cache's segments.
    pub(crate) pool: String,
    /// Size of the cache, a multiple of the segment size.
    pub(crate) size: Size,
    pub(crate) block_size: Size,
    /// Name of the replacement policy.
    pub(crate) policy: String,
    /// Write mode.
    #[serde(default, with = "word")]
    pub(crate) mode: Mode,
    /// Division of the cache's blocks between data that was read and data that was written.
    #[serde(default, with = "word")]
    pub(crate) layout: Layout,
    /// Admission rule.
    #[serde(default, with = "word")]
    pub(crate) admission: Admission,
    /// How much data a read miss brings into the cache.
    #[serde(default, with = "word", skip_serializing_if = "is_default")]
    pub(crate) fill: Fill,
    /// When dirty data is written to the backing.
    #[serde(default)]
    pub(crate) destage: DestageSpec,
    /// Number of copies of dirty data, or of all data.
    #[serde(default, with = "word")]
    pub(crate) copies: Copies,
    /// When the cache is verified against its backing after a restart.
    #[serde(default, with = "word", skip_serializing_if = "is_default")]
    pub(crate) verify: Verify,
    /// Size of the memory tier; 0 for none.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) ram: Size,
    /// The journal of a persistent cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) journal: Option<JournalSpec>,
    /// Limits of a shared cache, whose `size` hob chooses; `None` for a fixed size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) shared: Option<SharedSize>,
}

/// Limits of a cache that shares the rest of its pool with other such caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SharedSize {
    /// Minimum size; at least one segment.
    pub(crate) min: Size,
    /// Maximum size; 0 for no maximum.
    pub(crate) max: Size,
    /// Factor by which the value of the cache's hits is multiplied when hob divides the pool.
    pub(crate) shares: u32,
    /// True if the cache keeps its size.
    pub(crate) pin: bool,
}

impl Default for SharedSize {
    fn default() -> SharedSize {
        SharedSize { min: Size(0), max: Size(0), shares: SHARES_DEFAULT, pin: false }
    }
}

impl SharedSize {
    pub(crate) fn in_segments(&self, segment_bytes: u64) -> Limits {
        let segments = |size: Size| size.bytes().div_ceil(segment_bytes);
        Limits {
            min: segments(self.min).max(1),
            max: if self.max.bytes() == 0 { u64::MAX } else { segments(self.max) },
            shares: self.shares,
            pinned: self.pin,
        }
    }
}

impl CacheSpec {
    /// Returns the settings whose change empties the cache.
    pub(crate) fn structure(&self) -> impl PartialEq + use<> {
        let owner = self.journal.as_ref().map(|journal| journal.owner);
        (self.block_size, self.layout, owner)
    }

    /// Returns an error if a numeric setting is out of range.
    pub(crate) fn check(&self) -> Result<(), String> {
        let bytes = self.block_size.bytes();
        if !bytes.is_power_of_two() || !(BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&bytes) {
            return Err(format!("a cache block is a power of two from 4K to 1M, not {}", self.block_size));
        }
        let DestageSpec { dirty_start, dirty_stop, dirty_full, .. } = self.destage;
        if dirty_stop <= dirty_start && dirty_start <= dirty_full && (1..=100).contains(&dirty_full) {
            return Ok(());
        }
        Err(format!(
            "dirty_stop ({dirty_stop}) must be at most dirty_start ({dirty_start}), dirty_start at \
            most dirty_full ({dirty_full}), and dirty_full 1 to 100 percent"
        ))
    }
}

pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// When and in which order dirty data is written to the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DestageSpec {
    /// Order of destaging.
    #[serde(with = "word")]
    pub(crate) order: DestageOrder,
    /// Destaging starts when more than this percentage of the cache's capacity is dirty.
    pub(crate) dirty_start: u8,
    /// Destaging stops when at most this percentage of the cache's capacity is dirty.
    pub(crate) dirty_stop: u8,
    /// When at least this percentage of the cache's capacity is dirty, writes to uncached blocks
    /// bypass the cache. In a split cache, the size of the write buffer has this effect.
    pub(crate) dirty_full: u8,
    /// Maximum age of dirty data in seconds; 0 for no limit.
    pub(crate) dirty_age_max: u32,
    /// True if writes are destaged in order, so that the backing always has a content that the disk
    /// had at some time.
    pub(crate) ordered: bool,
}

impl Default for DestageSpec {
    fn default() -> DestageSpec {
        DestageSpec::of(&Destage::default())
    }
}

impl DestageSpec {
    /// Converts the engine's settings, and rounds shares of the capacity to whole percent.
    pub(crate) fn of(destage: &Destage) -> DestageSpec {
        let percent = |permille: u16| u8::try_from(permille / 10).unwrap_or(100);
        DestageSpec {
            order: destage.order,
            dirty_start: percent(destage.start_permille),
            dirty_stop: percent(destage.stop_permille),
            dirty_full: percent(destage.full_permille),
            dirty_age_max: u32::try_from(destage.dirty_age_ms_max / 1000).unwrap_or(u32::MAX),
            ordered: destage.ordered,
        }
    }

    /// Converts the settings into the engine's type.
    pub(crate) fn engine(&self) -> Destage {
        Destage {
            order: self.order,
            start_permille: u16::from(self.dirty_start) * 10,
            stop_permille: u16::from(self.dirty_stop) * 10,
            full_permille: u16::from(self.dirty_full) * 10,
            dirty_age_ms_max: u64::from(self.dirty_age_max) * 1000,
            ordered: self.ordered,
            ..Destage::default()
        }
    }
}

/// State of a persistent cache's journal, as hob last saved it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JournalSpec {
    /// Owner id that the cache's segments have on flash.
    #[serde(with = "word")]
    pub(crate) owner: CacheOwner,
    /// Number of the journal's newest ring. Each new ring gets the next number, and no number is
    /// used twice. The newest ring may not exist, if hob could not make it.
    #[serde(default)]
    pub(crate) ring: u32,
    /// Recovery must not use clean data of journal rings up to this number, because one of these
    /// rings was lost.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) lost_ring: u32,
    /// Recovery must discard dirty data of journal rings up to this number: a command discarded it
    /// when the journal could not be written any more.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) discarded_ring: u32,
    /// Number of the journal ring with which the cache was in use last, if the cache had no dirty
    /// data when its disk was closed or lost; otherwise 0, or the number of an earlier ring. A
    /// cache that is used again gets a new ring first, so an old number proves nothing.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) clean_ring: u32,
    /// State of the backing when the cache was closed; `None` after the cache is opened again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) closed: Option<Closed>,
    /// Recorded evidence that the backing matches the cache. The evidence belongs to the journal
    /// ring with the number `ring`, and exists only if all sectors were verified.
    #[serde(default, with = "evidence", skip_serializing_if = "Option::is_none")]
    pub(crate) evidence: Option<ChangeToken>,
    /// Boot of the host in which the cache was used last. This boot decides whether the cache must
    /// have a crash log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) used: Option<UsedIn>,
    /// True if another program took over the backing while hob served it, which invalidates all
    /// cached data.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) foreign: bool,
    /// The last complete ring of the journal, or 0. If flash has neither this ring nor a later one,
    /// the ring was lost, or the flash was replaced by an older copy.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) written: u32,
    /// Highest number of a ring that hob could not make, so that the ring was never in use; 0 if
    /// hob made all rings. If only the last write of the ring failed, flash may have the whole ring.
    /// Then the ring before it counts as lost, so both rings describe the same data.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) unused: u32,
    /// True if hob has begun to remove the cache from flash, or if an operator has removed a
    /// missing device, which may have the journal, from the pool. Then the journal does not count
    /// as lost if it is absent, and an older ring counts as outdated.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) ended: bool,
    /// True if the last write mode is unknown, because `hob serve` saves no state.
    #[serde(skip)]
    pub(crate) mode_unknown: bool,
}

/// State of the backing when its cache was closed cleanly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Closed {
    /// Size in bytes of the file or device that has the backing's data. The file may be an image.
    pub(crate) size_bytes: u64,
    /// Time of the last change of this file or device, in nanoseconds since 1970.
    pub(crate) modified_ns: i64,
}

/// A boot of the host in which a cache was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UsedIn {
    /// The kernel's boot id.
    #[serde(with = "word")]
    pub(crate) boot: BootId,
    /// The first journal ring of the cache in this boot.
    pub(crate) first_ring: u32,
}

impl JournalSpec {
    /// Records that the cache gets the journal ring `ring` in this boot of the host.
    pub(crate) fn note_use(&mut self, boot: Option<BootId>) {
        let first_ring = self.ring;
        let known = self.used.filter(|used| Some(used.boot) == boot);
        self.used = known.or(boot.map(|boot| UsedIn { boot, first_ring }));
    }

    /// Returns true if the journal ring `ring` was used in this boot of the host. Then the crash
    /// log of the ring still exists, unless the cache was closed or the crash log was removed.
    pub(crate) fn expects_crash_log(&self, boot: Option<BootId>, ring: u32) -> bool {
        self.used.is_some_and(|used| Some(used.boot) == boot && used.first_ring <= ring)
    }

    /// Records that the cache, which is not used any more, has no dirty data.
    pub(crate) fn note_clean(&mut self) {
        self.clean_ring = self.ring;
    }

    /// Returns true if the cache had no dirty data when it was in use last.
    pub(crate) fn is_known_clean(&self) -> bool {
        self.ring > 0 && self.clean_ring == self.ring
    }

    /// Returns the number of the newest ring that may have been in use. Flash must have this ring
    /// or a later one.
    pub(crate) fn required_ring(&self) -> u32 {
        if self.ring == self.unused { self.written } else { self.ring }
    }

    pub(crate) fn new() -> JournalSpec {
        JournalSpec {
            owner: CacheOwner::random(),
            ring: 0,
            lost_ring: 0,
            discarded_ring: 0,
            clean_ring: 0,
            closed: None,
            evidence: None,
            used: None,
            foreign: false,
            written: 0,
            unused: 0,
            ended: false,
            mode_unknown: false,
        }
    }
}

/// Id of a boot of the host's kernel: 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BootId(u128);

impl BootId {
    /// Returns the id of the current boot. `None` in unit tests, which have no crash logs.
    pub(crate) fn current() -> Option<BootId> {
        if cfg!(test) { None } else { hob_storage::crash_log::boot_id().map(BootId) }
    }
}

impl fmt::Display for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for BootId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<BootId, std::num::ParseIntError> {
        u128::from_str_radix(text, 16).map(BootId)
    }
}

/// Serializes an optional boot id as text.
pub(crate) mod boot {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::BootId;

    pub(crate) fn serialize<S: Serializer>(boot: &Option<BootId>, to: S) -> Result<S::Ok, S::Error> {
        boot.map(|boot| boot.to_string()).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<BootId>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse().map_err(serde::de::Error::custom)).transpose()
    }
}

/// Owner of the segments of a persistent cache: random, 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CacheOwner(pub(crate) u128);

impl CacheOwner {
    pub(crate) fn random() -> CacheOwner {
        let mut bytes = [0; 16];
        let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        assert_eq!(filled, Ok(16), "the kernel has random bytes");
        // Ids of volatile caches have an upper half of at most 1.
        CacheOwner(u128::from_le_bytes(bytes) | 1 << 127)
    }
}

impl fmt::Display for CacheOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for CacheOwner {
    type Err = String;

    fn from_str(text: &str) -> Result<CacheOwner, String> {
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = digits.then(|| u128::from_str_radix(text, 16).ok()).flatten();
        number
            .map(CacheOwner)
            .ok_or_else(|| format!("'{text}' is not an owner id; an owner id has 32 hexadecimal digits"))
    }
}

/// Serializes the hash of the backing's state (`ChangeToken`) as 32 hexadecimal digits.
mod evidence {
    use super::{ChangeToken, Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(evidence: &Option<ChangeToken>, to: S) -> Result<S::Ok, S::Error> {
        evidence.map(|ChangeToken(number)| format!("{number:032x}")).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<ChangeToken>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        let number = text.map(|text| u128::from_str_radix(&text, 16)).transpose();
        Ok(number.map_err(serde::de::Error::custom)?.map(ChangeToken))
    }
}

/// Serializes settings as the words that users type.
pub(super) mod word {
    use super::{Deserialize, Deserializer, FromStr, Serializer, fmt};

    pub(in super::super) fn serialize<T: fmt::Display, S: Serializer>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(in super::super) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: fmt::Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A restart of the host removes all crash logs, so no crash log is expected for older rings.
    #[test]
    fn a_crash_log_is_expected_for_the_rings_of_this_boot() {
        let (first, second) = (Some(BootId(1)), Some(BootId(2)));
        let mut journal = JournalSpec { ring: 4, ..JournalSpec::new() };
        assert!(!journal.expects_crash_log(first, 4));
        journal.note_use(first);
        journal.ring = 5;
        journal.note_use(first);
        assert_eq!([3, 4, 5].map(|ring| journal.expects_crash_log(first, ring)), [false, true, true]);
        assert!(!journal.expects_crash_log(second, 5) && !journal.expects_crash_log(None, 5));
        journal.ring = 6;
        journal.note_use(second);
        assert_eq!([5, 6].map(|ring| journal.expects_crash_log(second, ring)), [false, true]);
        let used = journal.used.unwrap();
        let text = serde_json::to_string(&used).unwrap();
        assert_eq!(serde_json::from_str::<UsedIn>(&text).unwrap(), used);
    }
}
