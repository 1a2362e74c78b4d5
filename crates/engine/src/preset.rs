//! Presets: the systems whose caching hob reproduces. Each preset is a row of one table of
//! independent settings, and every setting can also be set by itself. Parsers, output and
//! documentation use the tables of this file. If a number is hob's own choice instead of a
//! published value, [`Preset::notes`] says so.

use std::fmt;
use std::str::FromStr;

use crate::admission::{Admission, Popularity};
use crate::command::{CacheConfig, Copies, Destage, DestageOrder, Layout, Mode};
use crate::granularity::Fill;
use crate::policy::PolicyKind;

/// A word that users type for a setting, with the setting's value and a one-line summary.
#[derive(Debug)]
pub struct Word<T: 'static> {
    /// The word.
    pub name: &'static str,
    /// The value that the name stands for.
    pub value: T,
    /// One line that describes the effect of the value.
    pub summary: &'static str,
}

/// Every [`Mode`], the default first.
pub const MODES: &[Word<Mode>] = &[
    Word {
        name: "write-through",
        value: Mode::WriteThrough,
        summary: "writes go to the backing, with a copy on flash",
    },
    Word {
        name: "write-back",
        value: Mode::WriteBack,
        summary: "writes go to flash, and to the backing later; the cache is persistent",
    },
    Word {
        name: "write-around",
        value: Mode::WriteAround,
        summary: "writes go to the backing only, and cached data of the same range is dropped",
    },
    Word {
        name: "read-only-cache",
        value: Mode::ReadOnlyCache,
        summary: "like write-around, and reads do not add data to flash either",
    },
    Word {
        name: "pass-through",
        value: Mode::PassThrough,
        summary: "all requests go to the backing; the cache keeps its data, except what writes change",
    },
];

/// Every [`DestageOrder`], the default first.
pub const DESTAGE_ORDERS: &[Word<DestageOrder>] = &[
    Word {
        name: "elevator",
        value: DestageOrder::Elevator,
        summary: "in order of disk addresses, from the first to the last and again from the first (elevator)",
    },
    Word {
        name: "coldest",
        value: DestageOrder::Coldest,
        summary: "least recently used data first; with `two-level-lru`, the data that has been Inactive for longest",
    },
];

/// Every [`Copies`], the default first.
pub const COPIES: &[Word<Copies>] = &[
    Word { name: "1", value: Copies::One, summary: "one copy of all data" },
    Word {
        name: "2-dirty",
        value: Copies::TwoOfDirty,
        summary: "two copies of dirty data, on different devices",
    },
    Word { name: "2", value: Copies::TwoOfAll, summary: "two copies of all data, on different devices" },
    Word {
        name: "peer",
        value: Copies::Peer,
        summary: "two copies of dirty data, the second one on another host's flash",
    },
];

/// Condition for comparing a recovered cache with its backing before the cache serves
/// (docs/decisions/0033-unverified-blocks.md).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// A recovered cache is compared with its backing if there is no evidence that the backing is
    /// unchanged.
    #[default]
    Auto,
    /// A recovered cache is compared with its backing after each restart.
    Always,
    /// A recovered cache is never compared with its backing.
    Trust,
}

/// Every [`Verify`], the default first.
pub const VERIFY: &[Word<Verify>] = &[
    Word {
        name: "auto",
        value: Verify::Auto,
        summary: "after a restart, unless there is evidence that the backing is unchanged",
    },
    Word { name: "always", value: Verify::Always, summary: "after each restart" },
    Word {
        name: "trust",
        value: Verify::Trust,
        summary: "never; if another program writes to the backing while hob is down, guests can read stale data",
    },
];

/// The forms of a [`Layout`], for help and docs.
pub const LAYOUTS: &[Word<&str>] = &[
    Word { name: "unified", value: "unified", summary: "reads and writes use all blocks" },
    Word {
        name: "split:PERCENT",
        value: "split:70",
        summary: "PERCENT of the blocks (1 to 99) are a read cache, and the other blocks are a write buffer",
    },
];

/// Error for a word that is not in a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownWord {
    what: &'static str,
    text: String,
    names: Vec<&'static str>,
}

impl fmt::Display for UnknownWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' is not a {}; use one of {}", self.text, self.what, self.names.join(", "))
    }
}

impl std::error::Error for UnknownWord {}

macro_rules! words {
    ($($type:ident $table:ident $what:literal)*) => {$(
        impl $type {
            /// Returns the word that users type.
            pub fn name(self) -> &'static str {
                $table.iter().find(|row| row.value == self).expect("every value has a row").name
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $type {
            type Err = UnknownWord;

            fn from_str(text: &str) -> Result<Self, UnknownWord> {
                let row = $table.iter().find(|row| row.name == text);
                row.map(|row| row.value).ok_or_else(|| UnknownWord {
                    what: $what,
                    text: text.to_owned(),
                    names: $table.iter().map(|row| row.name).collect(),
                })
            }
        }
    )*};
}

words! {
    Mode MODES "mode"
    DestageOrder DESTAGE_ORDERS "destage order"
    Copies COPIES "number of copies"
    Verify VERIFY "value of verify"
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Layout::Unified => f.write_str("unified"),
            Layout::Split { read_permille } => write!(f, "split:{}", read_permille / 10),
        }
    }
}

impl FromStr for Layout {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let percent = |percent: &str| percent.parse().ok().filter(|percent: &u16| (1..=99).contains(percent));
        let layout = match text.split_once(':') {
            None if text == "unified" => Some(Layout::Unified),
            Some(("split", share)) => {
                percent(share).map(|percent| Layout::Split { read_permille: percent * 10 })
            }
            _ => None,
        };
        layout.ok_or_else(|| UnknownWord {
            what: "layout",
            text: text.to_owned(),
            names: LAYOUTS.iter().map(|row| row.name).collect(),
        })
    }
}

/// Behaviour of a preset with two copies in a pool that has one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OneDevice {
    /// The cache keeps one copy.
    OneCopy,
    /// hob refuses the preset, because two devices are part of the reproduced system.
    Refused,
}

/// One preset: a row of [`PRESETS`].
#[derive(Debug)]
pub struct Preset {
    /// The name that users type.
    pub name: &'static str,
    /// A one-line summary.
    pub summary: &'static str,
    /// The system that the preset reproduces, for help and docs.
    pub source: &'static str,
    /// Write mode.
    pub mode: Mode,
    /// True if the cache survives a restart.
    pub persistent: bool,
    /// Division of the cache's blocks between data that was read and data that was written.
    pub layout: Layout,
    /// Size of a cache block in bytes.
    pub block_bytes: u32,
    /// Admission rule.
    pub admission: Admission,
    /// Fill granularity.
    pub fill: Fill,
    /// Name of the replacement policy.
    pub policy: &'static str,
    /// Settings of destaging.
    pub destage: Destage,
    /// Number of copies on flash.
    pub copies: Copies,
    /// Behaviour in a pool that has one device only.
    pub one_device: OneDevice,
    /// Settings that the reproduced system does not have or has not published, and other remarks.
    pub notes: &'static str,
}

/// All presets. A cache without a preset has the settings of the first row.
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "vfrc",
        summary: "a write-through cache, which adds no risk of data loss, and is empty after a restart",
        source: "Modelled on VMware vSphere Flash Read Cache",
        mode: Mode::WriteThrough,
        persistent: false,
        layout: Layout::Unified,
        block_bytes: 4 << 10,
        admission: AUTO,
        fill: Fill::Auto,
        policy: "auto",
        destage: DESTAGE,
        copies: Copies::One,
        one_device: OneDevice::OneCopy,
        notes: "VMware has not published the replacement policy, except that popular blocks stay longer; hob chooses policy and admission while the cache is used, and admits everything while it fills",
    },
    Preset {
        name: "fast-cache",
        summary: "64 KiB blocks on mirrored flash; a whole block is filled at its third access, and destaged when it is the least recently used",
        source: "Modelled on EMC FAST Cache",
        mode: Mode::WriteBack,
        persistent: true,
        layout: Layout::Unified,
        block_bytes: 64 << 10,
        admission: Admission {
            popularity: Popularity::NthAccess(3),
            sequential_bytes_max: Some(512 << 10),
            filling_percent: None,
            reads_only: false,
        },
        fill: Fill::Block,
        policy: "lru",
        destage: Destage {
            order: DestageOrder::Coldest,
            start_permille: 900,
            stop_permille: 850,
            full_permille: 1000,
            dirty_age_ms_max: 0,
            ..DESTAGE
        },
        copies: Copies::TwoOfAll,
        one_device: OneDevice::Refused,
        notes: "in FAST Cache, dirty pages stay until the LRU policy selects them; hob starts destaging at 90 % dirty blocks instead, and does not fill sequential runs of 512 KiB or more",
    },
    Preset {
        name: "vsan",
        summary: "70 % read cache and 30 % write buffer; hob destages in order of disk addresses when the buffer fills",
        source: "Modelled on VMware vSAN 7 hybrid",
        mode: Mode::WriteBack,
        persistent: true,
        layout: Layout::Split { read_permille: 700 },
        block_bytes: 4 << 10,
        admission: ALWAYS,
        fill: Fill::Sectors,
        policy: "lru",
        destage: Destage {
            order: DestageOrder::Elevator,
            start_permille: 240,
            stop_permille: 210,
            full_permille: 300,
            dirty_age_ms_max: 0,
            ..DESTAGE
        },
        copies: Copies::One,
        one_device: OneDevice::OneCopy,
        notes: "destaging starts when 80 % of the buffer (24 % of the cache) is dirty, and stops at 70 % of the buffer (21 % of the cache)",
    },
    Preset {
        name: "zbs",
        summary: "reads and writes share all blocks under a two-level LRU; above 20 % dirty blocks, hob destages the data that has been Inactive for longest",
        source: "Modelled on SmartX ZBS",
        mode: Mode::WriteBack,
        persistent: true,
        layout: Layout::Unified,
        block_bytes: 4 << 10,
        admission: Admission {
            popularity: Popularity::WhileFree,
            sequential_bytes_max: None,
            filling_percent: None,
            reads_only: false,
        },
        fill: Fill::Sectors,
        policy: "two-level-lru",
        destage: Destage {
            order: DestageOrder::Coldest,
            start_permille: 200,
            stop_permille: 200,
            full_permille: 1000,
            dirty_age_ms_max: 0,
            ..DESTAGE
        },
        copies: Copies::TwoOfDirty,
        one_device: OneDevice::Refused,
        notes: "a write may evict a clean block and a read may not; a write bypasses the cache only if all blocks are dirty",
    },
    Preset {
        name: "auto",
        summary: "write-back with the recommended settings; dirty data is destaged after at most 30 seconds",
        source: "A preset of hob's own",
        mode: Mode::WriteBack,
        persistent: true,
        layout: Layout::Unified,
        block_bytes: 4 << 10,
        admission: AUTO,
        fill: Fill::Auto,
        policy: "auto",
        destage: DESTAGE,
        copies: Copies::TwoOfDirty,
        one_device: OneDevice::OneCopy,
        notes: "dirty data has two copies if the pool has two devices",
    },
];

/// The admission rule `always`, which admits every block.
const ALWAYS: Admission = Admission {
    popularity: Popularity::Always,
    sequential_bytes_max: None,
    filling_percent: None,
    reads_only: false,
};

/// The admission rule `auto`: the cache's chooser selects the rule (docs/decisions/0053). All dirty
/// data is admitted.
const AUTO: Admission = Admission {
    popularity: Popularity::Auto,
    sequential_bytes_max: None,
    filling_percent: None,
    reads_only: false,
};

/// The settings of [`Destage::default`], repeated here because a constant cannot call that
/// function.
const DESTAGE: Destage = Destage {
    order: DestageOrder::Elevator,
    start_permille: 100,
    stop_permille: 50,
    full_permille: 700,
    dirty_age_ms_max: 30_000,
    io_bytes_max: 1 << 20,
    ordered: false,
};

/// Returns the preset of that name.
pub fn preset(name: &str) -> Result<&'static Preset, UnknownWord> {
    PRESETS.iter().find(|row| row.name == name).ok_or_else(|| UnknownWord {
        what: "preset",
        text: name.to_owned(),
        names: PRESETS.iter().map(|row| row.name).collect(),
    })
}

impl Preset {
    /// Returns the preset's settings as the [`CacheConfig`] of the engine.
    pub fn config(&self, segment_bytes: u64) -> CacheConfig {
        CacheConfig {
            block_bytes: self.block_bytes,
            segment_bytes,
            policy: PolicyKind::from_name(self.policy).expect("presets name policies"),
            admission: self.admission,
            fill: self.fill,
            mode: self.mode,
            layout: self.layout,
            destage: self.destage,
            copies: self.copies,
        }
    }
}

#[cfg(test)]
mod tests;
