//! Cache settings as options of `hob serve`, `hob cache enable` and `hob cache set`. The names of
//! the options come from the engine's tables.

use clap::builder::{PossibleValue, PossibleValuesParser};
use hob_control::{CacheSettings, Size};
use hob_engine::admission::Admission;
use hob_engine::command::Layout;
use hob_engine::granularity::FILLS;
use hob_engine::preset::{COPIES, DESTAGE_ORDERS, MODES, PRESETS, VERIFY, Word};

use super::options::options;

options! {
    /// Settings of a cache.
    #[derive(Clone, Debug, Default, clap::Args)]
    #[group(id = "settings", multiple = true)]
    pub(super) struct Settings for CacheSettings {
        /// A named set of cache settings, which other options override; see docs/presets.md
        #[arg(long, value_name = "NAME", value_parser = presets())]
        preset: Option<String>,
        /// Write mode
        #[arg(long, value_parser = words(MODES))]
        mode: Option<String>,
        /// Keep the cache across restarts; write-back implies it
        #[arg(long, value_name = "YES", num_args = 0..=1, default_missing_value = "true")]
        persistent: Option<bool>,
        /// Division of the cache: reads and writes share all blocks (unified), or PERCENT of the blocks
        /// are for reads and the others for writes (split:PERCENT)
        #[arg(long, value_parser = checked::<Layout>)]
        layout: Option<String>,
        /// Admission rule: auto, or always, while-free, nth-access:N, ghost, each with
        /// +not-sequential:BYTES, +while-filling:PERCENT% and +reads-only
        #[arg(long, value_parser = checked::<Admission>)]
        admission: Option<String>,
        /// Amount of data that a read miss brings into the cache
        #[arg(long, value_name = "HOW", value_parser = fills())]
        fill: Option<String>,
        /// Replacement policy
        #[arg(long, value_parser = super::cache::policy_names())]
        policy: Option<String>,
        /// Unit of fill and eviction, a power of two from 4K to 1M
        #[arg(long, value_name = "SIZE")]
        block_size: Option<Size>,
        /// Order in which dirty data is written to the backing
        #[arg(long, value_name = "ORDER", value_parser = words(DESTAGE_ORDERS))]
        destage_order: Option<String>,
        /// Start destaging when more than this percentage of the cache is dirty
        #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
        dirty_start: Option<u8>,
        /// Stop destaging when at most this percentage of the cache is dirty
        #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
        dirty_stop: Option<u8>,
        /// When at least this percentage of the cache is dirty, writes to uncached blocks bypass
        /// the cache; in a split cache, the size of the write buffer is the limit instead
        #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
        dirty_full: Option<u8>,
        /// Maximum age of dirty data, seconds; 0: only the percentages start destaging
        #[arg(long, value_name = "SECONDS")]
        dirty_age_max: Option<u32>,
        /// Number of copies on flash, of all data or only of dirty data
        #[arg(long, value_name = "N", value_parser = words(COPIES))]
        copies: Option<String>,
        /// Destage in write order, so that the backing has a past state of the disk; destaging is
        /// slower. After a restart of hob, this is true only when the data that was dirty at the
        /// restart is destaged
        #[arg(long, value_name = "YES", num_args = 0..=1, default_missing_value = "true")]
        ordered: Option<bool>,
        /// After which restarts a persistent cache is compared with its backing
        #[arg(long, value_name = "WHEN", value_parser = words(VERIFY))]
        verify: Option<String>,
        /// Size of the memory tier above the cache, for recently read data and read-ahead; 0 for none
        #[arg(long, value_name = "SIZE")]
        ram: Option<Size>,
    }
}

/// Settings of a shared cache: one without a size of its own.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
#[group(id = "sharing", multiple = true)]
pub(super) struct Sharing {
    /// Minimum size of a shared cache
    #[arg(long, value_name = "SIZE")]
    min: Option<Size>,
    /// Maximum size of a shared cache; 0 for none
    #[arg(long, value_name = "SIZE")]
    max: Option<Size>,
    /// Weight of a shared cache's hits: low, normal, high or a number [default: 1000]
    #[arg(long, value_name = "NUMBER", value_parser = hob_control::parse_shares)]
    shares: Option<u32>,
    /// Keep the present size of a shared cache
    #[arg(long, value_name = "YES", num_args = 0..=1, default_missing_value = "true")]
    pin: Option<bool>,
}

impl Sharing {
    /// Adds the settings of a shared cache to the cache's other settings.
    pub(super) fn add_to(self, settings: Settings) -> CacheSettings {
        let Sharing { min, max, shares, pin } = self;
        CacheSettings { min, max, shares, pin, ..settings.into() }
    }
}

/// Returns the ids of a group of options.
pub(super) fn ids<T: clap::Args>() -> Vec<clap::Id> {
    let command = T::augment_args(clap::Command::new("hob"));
    command.get_arguments().map(|option| option.get_id().clone()).collect()
}

fn presets() -> PossibleValuesParser {
    let values = PRESETS.iter().map(|row| PossibleValue::new(row.name).help(row.summary));
    PossibleValuesParser::new(values)
}

fn fills() -> PossibleValuesParser {
    PossibleValuesParser::new(FILLS.iter().map(|row| PossibleValue::new(row.name).help(row.summary)))
}

fn words<T>(table: &'static [Word<T>]) -> PossibleValuesParser {
    let values = table.iter().map(|row| PossibleValue::new(row.name).help(row.summary));
    PossibleValuesParser::new(values)
}

/// Checks a word that the daemon must understand, and returns it unchanged.
fn checked<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> Result<String, String> {
    text.parse::<T>().map(|_| text.to_owned()).map_err(|error| error.to_string())
}
