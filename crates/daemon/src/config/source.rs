//! Reads hob.toml. Finds every syntax error, unknown key and wrong type in one pass, and the line
//! of each key.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use hob_control::without_type_names;
use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue, Deserializer};

use super::Config;

/// Maximum number of reported errors.
pub(super) const FINDINGS_MAX: usize = 100;

/// An error in the file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    /// Line number from 1; `None` if the error concerns no line.
    pub(crate) line: Option<usize>,
    /// Message: the error, the key or value of hob.toml that has it, and the allowed values.
    pub(crate) what: String,
}

impl Finding {
    /// Returns true for an unknown key. The rest of the file is valid without it.
    pub(super) fn is_unknown_key(&self) -> bool {
        self.what.starts_with("unknown field")
    }
}

/// The line of each key, by its path: `disk.0.cache.mode`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lines(BTreeMap<String, usize>);

impl Lines {
    /// Returns the line of a key, or of the innermost enclosing table in the file.
    pub(crate) fn of(&self, path: &str) -> Option<usize> {
        let mut path = path;
        loop {
            if let Some(line) = self.0.get(path) {
                return Some(*line);
            }
            path = path.rsplit_once('.')?.0;
        }
    }
}

/// Parses a text. The configuration is the part without errors; `None` if no part could be parsed.
pub(super) fn read(text: &str) -> (Option<Config>, Vec<Finding>) {
    let line_ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
    let line_of = |offset: usize| line_ends.partition_point(|end| *end < offset) + 1;
    let finding = |error: &toml::de::Error| Finding {
        line: error.span().map(|span| line_of(span.start)),
        what: without_type_names(&error.message().lines().collect::<Vec<_>>().join(" "), "a table"),
    };
    let (mut root, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        return (None, errors.iter().take(FINDINGS_MAX).map(finding).collect());
    }
    let (mut findings, mut removed) = (Vec::new(), BTreeSet::new());
    while findings.len() < FINDINGS_MAX {
        match Config::deserialize(Deserializer::from(root.clone())) {
            Ok(mut config) => {
                let mut lines = Lines::default();
                note_table(&mut lines, "", root.get_ref(), &line_of);
                config.lines = lines;
                return (Some(config), findings);
            }
            Err(error) => {
                let finding = finding(&error);
                // A value that was removed because it is invalid must not be reported as missing.
                let missing =
                    finding.what.strip_prefix("missing field `").and_then(|rest| rest.split_once('`'));
                if !missing.is_some_and(|(key, _)| removed.contains(key)) {
                    findings.push(finding);
                }
                // The invalid entry is removed, and the rest is parsed again.
                let span = error.span().filter(|span| !span.is_empty());
                let Some(key) = span.and_then(|span| remove(root.get_mut(), &span)) else { break };
                removed.insert(key);
            }
        }
    }
    (None, findings)
}

/// Removes the innermost entry that contains the error's position in its key or value. Returns the
/// key of the removed entry; for an item of an array, the key of the array.
fn remove(table: &mut DeTable<'_>, span: &Range<usize>) -> Option<String> {
    let covers = |outer: Range<usize>| outer.start <= span.start && span.end <= outer.end;
    for (key, value) in table.iter_mut() {
        if let Some(inner) = remove_inside(value, span) {
            return Some(inner.unwrap_or_else(|| key.get_ref().to_string()));
        }
    }
    let hit = table.iter().find(|(key, value)| covers(key.span()) || covers(value.span()));
    let key = hit.map(|(key, _)| key.clone())?;
    table.remove(&key);
    Some(key.get_ref().to_string())
}

/// Removes an entry inside a value. Returns `None` if no entry was removed, and otherwise the key
/// of the removed entry; `Some(None)` for an item of an array, which has no key.
fn remove_inside(value: &mut Spanned<DeValue<'_>>, span: &Range<usize>) -> Option<Option<String>> {
    match value.get_mut() {
        DeValue::Table(table) => remove(table, span).map(Some),
        DeValue::Array(array) => {
            if let Some(removed) = array.iter_mut().find_map(|item| remove_inside(item, span)) {
                return Some(removed);
            }
            let hit =
                |item: &&Spanned<DeValue<'_>>| item.span().start <= span.start && span.end <= item.span().end;
            let kept: DeArray<'_> = array.iter().filter(|item| !hit(item)).cloned().collect();
            let is_shorter = kept.len() < array.len();
            *array = kept;
            is_shorter.then_some(None)
        }
        _ => None,
    }
}

fn note_table(lines: &mut Lines, path: &str, table: &DeTable<'_>, line_of: &dyn Fn(usize) -> usize) {
    for (key, value) in table {
        let path =
            if path.is_empty() { key.get_ref().to_string() } else { format!("{path}.{}", key.get_ref()) };
        lines.0.insert(path.clone(), line_of(key.span().start));
        note(lines, &path, value, line_of);
    }
}

fn note(lines: &mut Lines, path: &str, value: &Spanned<DeValue<'_>>, line_of: &dyn Fn(usize) -> usize) {
    match value.get_ref() {
        DeValue::Table(table) => note_table(lines, path, table, line_of),
        DeValue::Array(array) => {
            for (index, item) in array.iter().enumerate() {
                let path = format!("{path}.{index}");
                lines.0.insert(path.clone(), line_of(item.span().start));
                note(lines, &path, item, line_of);
            }
        }
        _ => {}
    }
}
