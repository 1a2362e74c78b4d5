//! Fill granularity: how much of the backing a read miss brings into the cache.
//!
//! A miss can fill more than the guest read: the uncached sectors next to the request, back to a
//! multiple of 16 KiB and forward to a multiple of 64 KiB, or to the borders of a larger block
//! (docs/decisions/0059-fill-granularity.md). These sectors are called *extra*.

use std::fmt;
use std::str::FromStr;

/// How much data a read miss brings into the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fill {
    /// The sectors that the guest read.
    #[default]
    Sectors,
    /// Also the uncached sectors next to the request.
    Block,
    /// The same as `Block` while guests use enough of the blocks that were filled only as extra
    /// data, and otherwise the same as `Sectors`. In caches with blocks of 64 KiB or more, always
    /// the same as `Sectors`.
    Auto,
}

/// One fill granularity: a row of [`FILLS`].
#[derive(Debug)]
pub struct FillInfo {
    /// The setting.
    pub fill: Fill,
    /// The name that users type.
    pub name: &'static str,
    /// Effect of the setting, for help texts.
    pub summary: &'static str,
}

/// The names of [`Fill`], for parsers, help and docs.
pub const FILLS: &[FillInfo] = &[
    FillInfo { fill: Fill::Sectors, name: "sectors", summary: "fills the sectors that the guest read" },
    FillInfo {
        fill: Fill::Block,
        name: "block",
        summary: "also fills uncached data next to the request, from a multiple of 16 KiB to a multiple of 64 KiB, or the block if that is larger",
    },
    FillInfo {
        fill: Fill::Auto,
        name: "auto",
        summary: "like block while guests use enough of the extra data, otherwise like sectors",
    },
];

impl Fill {
    fn info(self) -> &'static FillInfo {
        FILLS.iter().find(|row| row.fill == self).expect("each setting has a row")
    }

    /// Returns the name that users type.
    pub fn name(self) -> &'static str {
        self.info().name
    }
}

impl fmt::Display for Fill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Error for a text that is no fill granularity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownFill(String);

impl fmt::Display for UnknownFill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = FILLS.iter().map(|row| row.name).collect();
        write!(f, "'{}' is not a fill granularity; use one of {}", self.0, names.join(", "))
    }
}

impl std::error::Error for UnknownFill {}

impl FromStr for Fill {
    type Err = UnknownFill;

    fn from_str(text: &str) -> Result<Self, UnknownFill> {
        let found = FILLS.iter().find(|row| row.name == text);
        found.map(|row| row.fill).ok_or_else(|| UnknownFill(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_to_their_setting() {
        for row in FILLS {
            assert_eq!(row.name.parse(), Ok(row.fill));
            assert_eq!(row.fill.to_string(), row.name);
        }
        let error = "blocks".parse::<Fill>().expect_err("unknown").to_string();
        assert!(error.contains("sectors, block, auto"), "{error}");
    }
}
