//! Errors of the TOML and JSON parsers for people: without the names of Rust types.

/// Text before the expected value in a parser's message.
const EXPECTED: &str = ", expected ";

/// Names of Rust's integers that may be settings, with their ranges.
const INTEGERS: [(&str, i128, i128); 10] = [
    ("u8", 0, u8::MAX as i128),
    ("u16", 0, u16::MAX as i128),
    ("u32", 0, u32::MAX as i128),
    ("u64", 0, u64::MAX as i128),
    ("usize", 0, usize::MAX as i128),
    ("i8", i8::MIN as i128, i8::MAX as i128),
    ("i16", i16::MIN as i128, i16::MAX as i128),
    ("i32", i32::MIN as i128, i32::MAX as i128),
    ("i64", i64::MIN as i128, i64::MAX as i128),
    ("isize", isize::MIN as i128, isize::MAX as i128),
];

/// Describes the expected value in a parser's message without the name of its Rust type. `table` is
/// the format's word for named values: `a table` or `an object`.
pub fn without_type_names(message: &str, table: &str) -> String {
    // The text before the last `EXPECTED` may quote the user's text; the text after it does not.
    let Some((found, expected)) = message.rsplit_once(EXPECTED) else { return message.to_owned() };
    // Numbers beyond 64 bits are reported with their Rust type.
    let found = [" as i128", " as u128"].into_iter().find_map(|of| found.strip_suffix(of)).unwrap_or(found);
    let (expected, position) = match expected.find(" at line ") {
        Some(at) => expected.split_at(at),
        None => (expected, ""),
    };
    let expected = described(expected, table).unwrap_or_else(|| expected.to_owned());
    format!("{found}{EXPECTED}{expected}{position}")
}

/// Returns words for the value that a parser expected; `None` if `expected` names no known Rust
/// type.
fn described(expected: &str, table: &str) -> Option<String> {
    let is_one_of = |kinds: &[&str]| kinds.iter().any(|kind| expected.starts_with(kind));
    if let Some((_, least, most)) = INTEGERS.iter().find(|(name, ..)| *name == expected) {
        Some(format!("an integer from {least} to {most}"))
    } else if ["f32", "f64"].contains(&expected) {
        Some("a number".to_owned())
    } else if expected == "path string" {
        Some("a path".to_owned())
    } else if is_one_of(&["struct ", "internally tagged enum ", "adjacently tagged enum "]) {
        Some(table.to_owned())
    } else if is_one_of(&["tuple struct ", "tuple variant "]) {
        Some("a list".to_owned())
    } else if expected == "a sequence" {
        Some("a list in square brackets".to_owned())
    } else if is_one_of(&["enum "]) {
        Some(format!("a name or {table}"))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;

    use super::*;
    use crate::{CacheEnable, PlannedChange, QosPatch};

    fn refused<T: DeserializeOwned + std::fmt::Debug>(json: &str) -> String {
        without_type_names(&serde_json::from_str::<T>(json).unwrap_err().to_string(), "an object")
    }

    #[test]
    fn values_are_described_instead_of_their_rust_types() {
        for (said, plain) in [
            (refused::<CacheEnable>("7"), "integer `7`, expected an object at line 1 column 1"),
            (refused::<QosPatch>("\"high\""), "string \"high\", expected an object at line 1 column 6"),
            (refused::<PlannedChange>("true"), "expected an object at line 1 column 4"),
            (refused::<u8>("300"), "integer `300`, expected an integer from 0 to 255 at line 1 column 3"),
            (refused::<u64>("-1"), "expected an integer from 0 to 18446744073709551615 at line"),
            (refused::<Vec<u8>>("7"), "integer `7`, expected a list in square brackets at line 1 column 1"),
        ] {
            assert!(said.contains(plain), "{plain}: {said}");
        }
        for (message, plain) in [
            (
                "invalid type: integer `99999999999999999999` as i128, expected usize",
                "invalid type: integer `99999999999999999999`, expected an integer from 0 to 18446744073709551615",
            ),
            ("invalid length 1, expected struct Pair with 2 elements", "invalid length 1, expected a table"),
            ("invalid type: map, expected enum Role", "invalid type: map, expected a name or a table"),
            ("invalid type: integer `7`, expected path string", "invalid type: integer `7`, expected a path"),
        ] {
            assert_eq!(without_type_names(message, "a table"), plain);
        }
    }

    #[test]
    fn other_messages_stay() {
        for message in [
            "unclosed table, expected `]`",
            "unknown field `u8`, expected one of `u16`, `size`",
            "unknown variant `struct Pool`, expected `in` or `out`",
            "invalid type: string \"x, expected u8\", expected a boolean",
            "missing field `name`",
            "'a, expected u8' is not a size",
        ] {
            assert_eq!(without_type_names(message, "a table"), message);
        }
    }
}
