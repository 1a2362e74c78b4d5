//! Parses `hob stats -o json`; only this file knows its format.
//!
//! The document may be one disk, a list of disks, or an object with the list. Unknown fields are ignored. A
//! missing outcome has the count 0.

use serde_json::Value;

/// The counters of one disk since it was opened.
#[derive(Debug, Clone)]
pub struct Stats {
    disk: Value,
}

impl Stats {
    /// Parses the output of `hob stats DISK -o json`; uses the first disk.
    ///
    /// # Errors
    /// Returns an error if the text is not JSON or has no disk; the error contains the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|e| format!("not JSON ({e}): {text}"))?;
        let disk = first_disk(&value).ok_or_else(|| format!("no disk in: {text}"))?;
        Ok(Self { disk: disk.clone() })
    }

    /// Returns the number of requests of a class, for any reason: `hit`, `partial-miss`, `miss-filled`,
    /// `miss-not-admitted`, `write`, `bypass`, `cache-off`, `flash-error`, `backing-error`, `refused`.
    #[must_use]
    pub fn class(&self, name: &str) -> u64 {
        let outcomes = self.disk["outcomes"].as_array().into_iter().flatten();
        outcomes.filter(|o| o["class"] == name).filter_map(|o| o["count"].as_u64()).sum()
    }

    /// Returns the number of requests of a class with a reason.
    #[must_use]
    pub fn reason(&self, class: &str, reason: &str) -> u64 {
        let outcomes = self.disk["outcomes"].as_array().into_iter().flatten();
        outcomes
            .filter(|o| o["class"] == class && o["reason"] == reason)
            .filter_map(|o| o["count"].as_u64())
            .sum()
    }

    /// Returns the number of requests served completely from flash.
    #[must_use]
    pub fn hits(&self) -> u64 {
        self.reason("hit", "")
    }

    /// Returns the number of reads that were not hits although the cache was on.
    #[must_use]
    pub fn misses(&self) -> u64 {
        ["partial-miss", "miss-filled", "miss-not-admitted", "flash-error"]
            .iter()
            .map(|c| self.class(c))
            .sum()
    }

    /// Returns the number of evicted blocks.
    #[must_use]
    pub fn evicted_blocks(&self) -> u64 {
        self.disk["evictions"]["blocks"].as_u64().unwrap_or(0)
    }

    /// Returns a counter or gauge of the disk by name, searched at every depth; `None` if there is none.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<f64> {
        search(&self.disk, name)
    }

    /// Returns the document, for failure messages.
    #[must_use]
    pub fn text(&self) -> String {
        self.disk.to_string()
    }
}

fn first_disk(value: &Value) -> Option<&Value> {
    match value {
        Value::Array(items) => items.first().and_then(first_disk),
        Value::Object(map) => match map.get("disks") {
            Some(disks) => first_disk(disks),
            None => Some(value),
        },
        _ => None,
    }
}

fn search(value: &Value, name: &str) -> Option<f64> {
    match value {
        Value::Object(map) => {
            let here = map.iter().find(|(key, value)| *key == name && value.is_number());
            here.and_then(|(_, v)| v.as_f64()).or_else(|| map.values().find_map(|v| search(v, name)))
        }
        Value::Array(items) => items.iter().find_map(|v| search(v, name)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::Stats;

    #[test]
    fn counts_are_found_alone_and_in_lists() {
        let disk = r#"{"disk":"disk","outcomes":[{"class":"hit","reason":"","count":7},
            {"class":"miss-filled","count":2},{"class":"miss-not-admitted","reason":"flash-busy","count":1},
            {"class":"miss-not-admitted","reason":"no-block","count":1}]}"#;
        for text in [disk.to_owned(), format!("[{disk}]"), format!(r#"{{"disks":[{disk}]}}"#)] {
            let stats = Stats::parse(&text).unwrap();
            assert_eq!((stats.hits(), stats.misses(), stats.class("write")), (7, 4, 0), "{text}");
        }
    }

    #[test]
    fn a_gauge_is_found_below_the_top() {
        let stats = Stats::parse(r#"{"vflash":{"numBlocks":131072}}"#).unwrap();
        assert_eq!(stats.number("numBlocks"), Some(131_072.0));
        assert_eq!(stats.number("absent"), None);
    }

    #[test]
    fn invalid_input_is_refused() {
        assert!(Stats::parse("no disk").is_err());
        assert!(Stats::parse("[]").is_err());
    }
}
