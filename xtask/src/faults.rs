//! `cargo xtask faults` writes docs/FAULT_TESTS.md, the index from each fault of docs/FAULTS.md to
//! the tests that inject the fault.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result, bail};

use crate::shell;
use crate::tidy::{self, Text};

const FAULTS: &str = "docs/FAULTS.md";
const PAGE: &str = "docs/FAULT_TESTS.md";
/// List of the tests of each fault, by heading and number of the fault.
const TESTS: &str = include_str!("faults.txt");

/// Id of a fault: a heading of docs/FAULTS.md and a number.
type Id = (String, u32);

/// Writes the index.
pub(crate) fn run() -> Result<()> {
    let page = page(&tidy::texts())?;
    fs::write(shell::root().join(PAGE), page).with_context(|| format!("cannot write {PAGE}"))
}

/// Returns the index page. Returns an error if a fault has no test, or if faults.txt names a test
/// or a fault that does not exist.
fn page(texts: &[Text]) -> Result<String> {
    let faults =
        texts.iter().find(|text| text.path == FAULTS).with_context(|| format!("{FAULTS} is missing"))?;
    let (faults, mut tests) = (rows(&faults.text), listed(TESTS)?);
    let files = test_files(texts);
    let mut page = format!(
        "{} `cargo xtask faults`; do not edit. -->\n# Fault tests\n\nFor developers of hob. This page lists the tests that inject each fault of \
         [Faults](FAULTS.md), with their files.\n",
        tidy::GENERATED
    );
    let (mut heading, mut broken) = (String::new(), Vec::new());
    for ((section, number), fault) in faults {
        if section != heading {
            let _ = write!(page, "\n## {section}\n\n| fault | tests |\n|---|---|\n");
            heading.clone_from(&section);
        }
        let names = tests.remove(&(section.clone(), number)).unwrap_or_default();
        if names.is_empty() {
            broken.push(format!("fault {number} of \"{section}\" has no test"));
        }
        let cells: Vec<String> = names.iter().map(|name| cell(name, &files)).collect();
        broken.extend(names.iter().zip(&cells).filter(|(_, cell)| cell.is_empty()).map(|(name, _)| {
            format!("fault {number} of \"{section}\": no test or file of tests is called {name}")
        }));
        let _ = writeln!(page, "| {number}. {fault} | {} |", cells.join("<br>"));
    }
    broken.extend(tests.keys().map(|(section, number)| format!("\"{section}\" has no fault {number}")));
    if !broken.is_empty() {
        bail!("xtask/src/faults.txt does not match {FAULTS}:\n  {}", broken.join("\n  "));
    }
    Ok(page)
}

/// Returns the table cell of a test with its files, or of a test file. The cell is empty if the
/// test does not exist.
fn cell(name: &str, files: &BTreeMap<&str, BTreeSet<&str>>) -> String {
    if name.ends_with(".rs") {
        let exists = files.values().any(|paths| paths.contains(name));
        return if exists { format!("all tests in `{name}`") } else { String::new() };
    }
    let Some(paths) = files.get(name) else { return String::new() };
    let paths: Vec<String> = paths.iter().map(|path| format!("`{path}`")).collect();
    format!("`{name}` in {}", paths.join(", "))
}

/// Returns the faults in the page's tables: the id and the description of each fault. The first
/// cell of a fault's row has the form `NUMBER. DESCRIPTION`.
fn rows(page: &str) -> Vec<(Id, String)> {
    let (mut heading, mut found) = (String::new(), Vec::new());
    for line in page.lines() {
        if line.starts_with('#') {
            line.trim_start_matches(['#', ' ']).clone_into(&mut heading);
        }
        let cell = line.strip_prefix("| ").and_then(|line| line.split_once(" |"));
        let Some((number, fault)) = cell.and_then(|(cell, _)| cell.split_once(". ")) else { continue };
        if let Ok(number) = number.parse() {
            found.push(((heading.clone(), number), fault.to_owned()));
        }
    }
    found
}

/// Parses faults.txt. Returns the names of the tests and test files of each fault.
fn listed(text: &str) -> Result<BTreeMap<Id, Vec<&str>>> {
    let (mut heading, mut found) = (String::new(), BTreeMap::new());
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            name.clone_into(&mut heading);
            continue;
        }
        let mut words = line.split_whitespace();
        let number = words.next().and_then(|word| word.parse().ok());
        let number = number.with_context(|| format!("faults.txt: `{line}` does not begin with a number"))?;
        if found.insert((heading.clone(), number), words.collect()).is_some() {
            bail!("faults.txt has fault {number} of \"{heading}\" twice");
        }
    }
    Ok(found)
}

/// Returns the files of each test: every `fn name` in a file with tests.
fn test_files(texts: &[Text]) -> BTreeMap<&str, BTreeSet<&str>> {
    const MARKS: [&str; 3] = ["#[test]", "#[tokio::test", "proptest!"];
    let mut found: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let sources = texts.iter().filter(|text| text.path.ends_with(".rs"));
    for source in sources.filter(|source| MARKS.iter().any(|mark| source.text.contains(mark))) {
        for (at, mark) in source.text.match_indices("fn ") {
            let name = &source.text[at + mark.len()..];
            let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
            found.entry(&name[..end]).or_default().insert(&source.path);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tidy_every_fault_has_tests_that_exist() {
        let page = page(&tidy::texts()).unwrap();
        let is = fs::read_to_string(shell::root().join(PAGE)).unwrap_or_default();
        assert!(is == page, "{PAGE} is stale: run `cargo xtask faults`");
    }

    #[test]
    fn rows_and_lists_are_read() {
        let page =
            "## One\n| fault | b |\n|---|---|\n| 1. It fails. | c |\n### Two\n| 3. No. 4 fails. | c |\n";
        let id = |heading: &str, number| (heading.to_owned(), number);
        assert_eq!(
            rows(page),
            [(id("One", 1), "It fails.".to_owned()), (id("Two", 3), "No. 4 fails.".to_owned())]
        );
        let tests = listed("# A comment\n[One]\n1 a b\n\n[Two]\n3 c.rs\n").unwrap();
        assert_eq!(tests, BTreeMap::from([(id("One", 1), vec!["a", "b"]), (id("Two", 3), vec!["c.rs"])]));
        listed("[One]\n1 a\n1 b\n").unwrap_err();
    }

    #[test]
    fn faults_without_tests_and_tests_without_faults_are_errors() {
        let texts =
            [Text { path: FAULTS.to_owned(), text: "## No such heading\n| 1. It fails. | b |\n".to_owned() }];
        let error = page(&texts).unwrap_err().to_string();
        assert!(error.contains("fault 1 of \"No such heading\" has no test"), "{error}");
        assert!(error.contains("\"Flash: single I/Os\" has no fault 1"), "{error}");
    }
}
