//! Typed parameters of a generator, set from `key=value` text. Each parameter has a default and a
//! description.
//!
//! [`parameters!`] creates the struct, its defaults, ranges and table from one list. Every generator
//! also has `scale` and `seed`. Invalid text or a value out of range is an error in one line with a
//! correct alternative.

use std::fmt;

/// Description of one parameter of a generator.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Parameter {
    /// Name of the parameter that users type.
    pub name: String,
    /// Default value as text.
    pub default: String,
    /// Description of the parameter, with the origin of a default that was not published.
    pub about: &'static str,
}

/// Number of bytes, written as `15GiB`, `8KiB` or `512`. Units are binary, with or without the `i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS.iter().find(|(_, bytes)| self.0 > 0 && self.0.is_multiple_of(*bytes));
        match unit {
            Some((name, bytes)) => write!(f, "{}{name}", self.0 / bytes),
            None => write!(f, "{}", self.0),
        }
    }
}

/// A type of parameter values.
pub(super) trait Value: Sized + fmt::Display {
    /// Description of the expected text form.
    const EXPECTED: &'static str;
    fn parse(text: &str) -> Option<Self>;
}

impl Value for u64 {
    const EXPECTED: &'static str = "a whole number such as 600000";
    fn parse(text: &str) -> Option<u64> {
        text.replace('_', "").parse().ok()
    }
}

impl Value for f64 {
    const EXPECTED: &'static str = "a number such as 0.9";
    fn parse(text: &str) -> Option<f64> {
        text.parse().ok().filter(|number: &f64| number.is_finite())
    }
}

impl Value for Bytes {
    const EXPECTED: &'static str = "a size such as 8KiB or 15GiB";
    fn parse(text: &str) -> Option<Bytes> {
        let digits_end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(digits_end);
        let unit = match unit.trim().to_ascii_uppercase().as_str() {
            "" | "B" => 1,
            "K" | "KB" | "KIB" => 1 << 10,
            "M" | "MB" | "MIB" => 1 << 20,
            "G" | "GB" | "GIB" => 1 << 30,
            "T" | "TB" | "TIB" => 1 << 40,
            _ => return None,
        };
        digits.parse::<u64>().ok()?.checked_mul(unit).map(Bytes)
    }
}

/// Parameters of a generator.
pub(super) trait Parameters: Default {
    /// Returns all parameters with their current values.
    fn list(&self) -> Vec<Parameter>;
    /// Sets a parameter from text.
    fn set(&mut self, name: &str, text: &str) -> Result<(), String>;
    /// Checks that each parameter is within its range. The error describes the first one that is not.
    fn check(&self) -> Result<(), String>;
}

/// Creates a parameter struct; see the module documentation.
macro_rules! parameters {
    ($(#[$doc:meta])* $config:ident {
        $($field:ident: $type:ty = $default:expr, $(in $range:expr,)? $about:literal;)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub(super) struct $config {
            $(#[doc = $about] pub(super) $field: $type,)*
            /// Divisor of footprint, cache and warm-up; rates and devices are not scaled
            pub(super) scale: u64,
            /// Seed of the random numbers
            pub(super) seed: u64,
        }

        impl Default for $config {
            fn default() -> Self {
                $config { $($field: $default,)* scale: 1, seed: 1 }
            }
        }

        impl $crate::generate::parameters::Parameters for $config {
            fn list(&self) -> Vec<$crate::generate::Parameter> {
                use $crate::generate::parameters::row;
                vec![
                    $(row(stringify!($field), &self.$field, $about),)*
                    row("scale", &self.scale, "divisor of footprint, cache and warm-up; rates and devices are not scaled"),
                    row("seed", &self.seed, "the dice"),
                ]
            }

            fn set(&mut self, name: &str, text: &str) -> Result<(), String> {
                use $crate::generate::parameters::value;
                match name.replace('-', "_").as_str() {
                    $(stringify!($field) => self.$field = value(name, text)?,)*
                    "scale" => self.scale = value(name, text)?,
                    "seed" => self.seed = value(name, text)?,
                    _ => {
                        let names: Vec<String> = self.list().into_iter().map(|row| row.name).collect();
                        return Err(format!("there is no parameter {name}; there are {}", names.join(", ")));
                    }
                }
                Ok(())
            }

            fn check(&self) -> Result<(), String> {
                use $crate::generate::parameters::within;
                within("scale", self.scale, 1..=1 << 20)?;
                $($(within(stringify!($field), self.$field, $range)?;)?)*
                Ok(())
            }
        }
    };
}
pub(super) use parameters;

pub(super) fn row(name: &str, value: &impl fmt::Display, about: &'static str) -> Parameter {
    Parameter { name: name.replace('_', "-"), default: value.to_string(), about }
}

pub(super) fn value<V: Value>(name: &str, text: &str) -> Result<V, String> {
    V::parse(text).ok_or_else(|| format!("{name}={text}: expected {}", V::EXPECTED))
}

/// Returns an error for a value outside `range`.
pub(super) fn within<T: PartialOrd + fmt::Display>(
    name: &str,
    value: T,
    range: std::ops::RangeInclusive<T>,
) -> Result<(), String> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(format!("{}={value}: expected {} to {}", name.replace('_', "-"), range.start(), range.end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    parameters! {
        Sample {
            size: Bytes = Bytes(15 << 30), "a size";
            read_percent: f64 = 95.0, in 0.0..=100.0, "a share";
            requests: u64 = 600_000, "a count";
        }
    }

    #[test]
    fn listed_parameters_can_be_set() {
        let mut sample = Sample::default();
        for Parameter { name, default, .. } in Sample::default().list() {
            sample.set(&name, &default).unwrap();
        }
        assert_eq!(sample, Sample::default());
        sample.set("read_percent", "12.5").unwrap();
        sample.set("read-percent", "60").unwrap();
        sample.set("size", "8 kb").unwrap();
        sample.set("requests", "1_000").unwrap();
        assert_eq!((sample.read_percent, sample.size, sample.requests), (60.0, Bytes(8192), 1000));
    }

    #[test]
    fn an_unknown_parameter_is_refused_with_the_valid_ones() {
        let mut sample = Sample::default();
        let mut error = |name, text| sample.set(name, text).unwrap_err();
        assert_eq!(error("size", "8QB"), "size=8QB: expected a size such as 8KiB or 15GiB");
        assert_eq!(
            error("size", "99999999999TiB"),
            "size=99999999999TiB: expected a size such as 8KiB or 15GiB"
        );
        assert_eq!(error("read-percent", "nan"), "read-percent=nan: expected a number such as 0.9");
        assert_eq!(error("requests", "-1"), "requests=-1: expected a whole number such as 600000");
        assert_eq!(
            error("sise", "1"),
            "there is no parameter sise; there are size, read-percent, requests, scale, seed"
        );
        sample.set("read-percent", "101").unwrap();
        assert_eq!(sample.check().unwrap_err(), "read-percent=101: expected 0 to 100");
    }

    #[test]
    fn sizes_are_written_in_the_largest_unit_that_fits() {
        let written: Vec<String> = [0, 512, 4096, 5 << 20, 1536 << 20, 15 << 30, 2 << 40]
            .into_iter()
            .map(|bytes| Bytes(bytes).to_string())
            .collect();
        assert_eq!(written, ["0", "512", "4KiB", "5MiB", "1536MiB", "15GiB", "2TiB"]);
    }
}
