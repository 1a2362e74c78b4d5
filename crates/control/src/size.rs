//! Byte counts as users write them: `8G`, `512K`, `4096`. Suffixes are binary.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::{Serialize, Serializer};
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, Schema, SchemaType, Type};
use utoipa::openapi::{KnownFormat, RefOr, SchemaFormat};
use utoipa::{PartialSchema, ToSchema};

const SUFFIXES: [(char, u32); 6] = [('E', 60), ('P', 50), ('T', 40), ('G', 30), ('M', 20), ('K', 10)];

/// A number of bytes.
///
/// Accepted forms are `8G`, `8g`, `8GiB`, `8GB`, `4096` and `4096B`. The suffixes K, M, G, T, P, E
/// are always powers of 1024. A size is printed in its shortest exact form. JSON contains sizes as
/// integers; requests may also contain strings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

/// Why a text is not a valid [`Size`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeParseError {
    /// The text is not a number with a suffix.
    #[error("'{0}' is not a size; write it like 64M, 8G or 4096")]
    Malformed(String),
    /// More than 2⁶⁴ − 1 bytes.
    #[error("'{0}' is too large: a size has at most 64 bits")]
    TooLarge(String),
}

impl Size {
    /// Returns the number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Returns the size rounded for users, with at most two decimals: `7.45 GiB`. Sizes of 10 or
    /// more units have at most one decimal, and sizes of 100 or more have none.
    pub fn human(self) -> String {
        for (suffix, shift) in SUFFIXES {
            if self.0 >> shift > 0 {
                let value = self.0 as f64 / (1u64 << shift) as f64;
                let decimals = if value >= 100.0 || value.fract() == 0.0 {
                    0
                } else if value >= 10.0 {
                    1
                } else {
                    2
                };
                return format!("{value:.decimals$} {suffix}iB");
            }
        }
        format!("{} B", self.0)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (suffix, shift) in SUFFIXES {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{suffix}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

impl FromStr for Size {
    type Err = SizeParseError;

    fn from_str(text: &str) -> Result<Size, SizeParseError> {
        let malformed = || SizeParseError::Malformed(text.to_owned());
        let too_large = || SizeParseError::TooLarge(text.to_owned());
        let trimmed = text.trim();
        let digits = trimmed.bytes().take_while(u8::is_ascii_digit).count();
        if digits == 0 {
            return Err(malformed());
        }
        let number: u64 = trimmed[..digits].parse().map_err(|_| too_large())?;
        let unit = trimmed[digits..].trim_start().to_ascii_uppercase();
        let shift = match unit.as_str() {
            "" | "B" => 0,
            _ => {
                let letter = unit.chars().next().ok_or_else(malformed)?;
                let (_, shift) =
                    SUFFIXES.into_iter().find(|(suffix, _)| *suffix == letter).ok_or_else(malformed)?;
                if !matches!(&unit[letter.len_utf8()..], "" | "B" | "IB") {
                    return Err(malformed());
                }
                shift
            }
        };
        number.checked_mul(1u64 << shift).map(Size).ok_or_else(too_large)
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Size, D::Error> {
        struct SizeVisitor;

        impl Visitor<'_> for SizeVisitor {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes or a size like \"64M\"")
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Size, E> {
                Ok(Size(value))
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Size, E> {
                u64::try_from(value).map(Size).map_err(|_| E::custom("a size cannot be negative"))
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<Size, E> {
                value.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(SizeVisitor)
    }
}

impl PartialSchema for Size {
    fn schema() -> RefOr<Schema> {
        let integer = ObjectBuilder::new()
            .schema_type(SchemaType::Type(Type::Integer))
            .format(Some(SchemaFormat::KnownFormat(KnownFormat::Int64)))
            .minimum(Some(0));
        let text = ObjectBuilder::new()
            .schema_type(SchemaType::Type(Type::String))
            .pattern(Some("^[0-9]+ ?([KMGTPEkmgtpe]?([iI]?[bB])?)$"))
            .examples([serde_json::json!("64M"), serde_json::json!("8G")]);
        OneOfBuilder::new()
            .item(integer)
            .item(text)
            .description(Some(
                "Bytes. Answers give an integer; requests may also give a string with a binary suffix.",
            ))
            .into()
    }
}

impl ToSchema for Size {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn people_may_write_sizes_in_these_ways() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("4K", 4096),
            ("4k", 4096),
            ("4KB", 4096),
            ("4KiB", 4096),
            ("64 MiB", 64 << 20),
            (" 8G ", 8 << 30),
            ("1T", 1 << 40),
            ("15E", 15 << 60),
        ] {
            assert_eq!(text.parse::<Size>(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn nothing_else_is_a_size() {
        for text in ["", "G", "-1", "1.5G", "8X", "8GG", "8Gi", "0x10", "8 G B", "8€", "1K1"] {
            assert!(matches!(text.parse::<Size>(), Err(SizeParseError::Malformed(_))), "{text}");
        }
        for text in ["16E", "18446744073709551616", "99999999999999999999K"] {
            assert!(matches!(text.parse::<Size>(), Err(SizeParseError::TooLarge(_))), "{text}");
        }
    }

    #[test]
    fn tables_show_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (4096, "4 KiB"),
            (1536, "1.50 KiB"),
            (8_000_000_000, "7.45 GiB"),
            (12_900_000_000, "12.0 GiB"),
        ] {
            assert_eq!(Size(bytes).human(), text);
        }
    }

    #[test]
    fn json_takes_numbers_and_texts_and_writes_numbers() {
        assert_eq!(serde_json::from_str::<Size>("4096").unwrap(), Size(4096));
        assert_eq!(serde_json::from_str::<Size>("\"4K\"").unwrap(), Size(4096));
        assert_eq!(serde_json::to_string(&Size(4096)).unwrap(), "4096");
        for bad in ["-1", "1.5", "\"x\"", "null", "[]", "true"] {
            assert!(serde_json::from_str::<Size>(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn printed_sizes_are_parsed_again(bytes: u64) {
            let size = Size(bytes);
            prop_assert_eq!(size.to_string().parse::<Size>(), Ok(size));
            prop_assert_eq!(serde_json::from_str::<Size>(&serde_json::to_string(&size).unwrap()).unwrap(), size);
        }

        #[test]
        fn round_numbers_print_short(count in 1u64..1024, shift in prop::sample::select(vec![10u32, 20, 30, 40, 50])) {
            let size = Size(count << shift);
            prop_assert!(size.to_string().len() <= 5, "{size}");
            prop_assert_eq!(size.to_string().parse::<Size>(), Ok(size));
        }

        #[test]
        fn no_text_panics(text in "\\PC*") {
            let _ = text.parse::<Size>();
        }
    }
}
