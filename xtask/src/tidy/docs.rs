//! Rules about documentation pages: generated pages are current, and guarantees have tests.
//! `crate::faults` has the rule that each fault has a test.

use std::collections::BTreeSet;
use std::process::Command;

use super::{GENERATED, Text, none, sources, texts};
use crate::shell;

/// Guarantees of docs/ARCHITECTURE.md that a test must cite.
const PROMISES: [u32; 6] = [1, 2, 3, 4, 5, 6];
/// Maximum number of lines between a comment `Promise N` and its test.
const NEAR: usize = 25;
/// Maximum length of a line of prose.
const COLUMNS_MAX: usize = 100;

fn page(path: &str) -> String {
    let found = texts().into_iter().find(|t| t.path == path);
    found.unwrap_or_else(|| panic!("{path} is missing")).text
}

#[test]
fn the_changelog_exists_and_says_something() {
    assert!(
        page("CHANGELOG.md").lines().filter(|l| l.starts_with("- ")).count() > 0,
        "CHANGELOG.md has no line"
    );
}

#[test]
fn generated_pages_are_fresh() {
    // `cargo xtask test` has already built a binary.
    let mut command = match std::env::var_os("HOB_BUILT") {
        Some(hob) => Command::new(hob),
        None => shell::cargo(&["run", "--quiet", "-p", "hob", "--"]),
    };
    command.args(["docs", "--out", "docs", "--check"]).current_dir(shell::root());
    let output = command.output().expect("start it");
    assert!(
        output.status.success(),
        "the generated pages are stale: run `cargo run -p hob -- docs --out docs`\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
}

/// Returns the numbers of a page's lines that could end before column 100 and do not. Tables, headings,
/// images, quotes and lists of links cannot.
fn long_lines(text: &str) -> Vec<usize> {
    let mut fenced = false;
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        fenced ^= line.trim_start().starts_with("```");
        let is_whole =
            ["|", "#", "!", ">", "<", "- ["].iter().any(|mark| line.trim_start().starts_with(mark));
        let mut in_span = false;
        let may_break = |(column, c): (usize, char)| {
            in_span ^= c == '`';
            (c == ' ' && !in_span).then_some(column)
        };
        let breaks: Vec<usize> = line.chars().enumerate().filter_map(may_break).collect();
        if !fenced && !is_whole && line.chars().count() > COLUMNS_MAX && breaks.iter().any(|at| *at > 60) {
            found.push(number + 1);
        }
    }
    found
}

#[test]
fn lines_of_pages_end_at_100_columns() {
    let is_page = |text: &Text| text.path.ends_with(".md") && !text.text.starts_with(GENERATED);
    let is_ours = |text: &Text| !text.path.ends_with("THIRD-PARTY.md");
    let long: Vec<String> = texts()
        .iter()
        .filter(|text| is_page(text) && is_ours(text))
        .flat_map(|text| long_lines(&text.text).into_iter().map(|line| format!("{}:{line}", text.path)))
        .collect();
    none("lines of pages end at 100 columns", &long);
}

#[test]
fn only_lines_that_can_be_shorter_are_long() {
    let words = "word ".repeat(21);
    let span = format!("see `{words}`");
    for allowed in [format!("| {words}|"), format!("```\n{words}\n```"), span, "x".repeat(120)] {
        assert_eq!(long_lines(&allowed), [0; 0], "{allowed}");
    }
    assert_eq!(long_lines(&format!("short\n{words}")), [2]);
}

/// Returns the numbers of the guarantees that comments near tests cite.
fn promises_cited(text: &str) -> BTreeSet<u32> {
    let lines: Vec<&str> = text.lines().collect();
    let is_test = |line: &&str| line.contains("#[test]") || line.contains("proptest!");
    let mut found = BTreeSet::new();
    for (number, line) in lines.iter().enumerate() {
        let Some((_, comment)) = line.split_once("//") else { continue };
        let comment = comment.to_lowercase();
        let Some((_, after)) = comment.split_once("promise") else { continue };
        let near = &lines[number.saturating_sub(NEAR)..lines.len().min(number + NEAR)];
        if near.iter().any(is_test) {
            // "Promise 3", "promises 1 and 2", "Promise 3 and promise 5".
            let numbers = after.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<u32>().ok());
            found.extend(numbers.filter(|n| (1..10).contains(n)));
        }
    }
    found
}

#[test]
fn every_promise_is_cited_by_a_test() {
    let sources = sources();
    let ours = |s: &&Text| !s.path.starts_with("xtask/");
    let cited: BTreeSet<u32> = sources.iter().filter(ours).flat_map(|s| promises_cited(&s.text)).collect();
    let bare: Vec<String> =
        PROMISES.iter().filter(|n| !cited.contains(n)).map(|n| format!("promise {n}")).collect();
    none("each promise of docs/ARCHITECTURE.md is cited (`Promise N`) by the test that shows it", &bare);
}

#[test]
fn promises_are_read() {
    let text = "/// Promise 3 and promise 5: both.\n#[test]\nfn x() {}\n";
    assert_eq!(promises_cited(text), BTreeSet::from([3, 5]));
    assert!(promises_cited("// Promise 4, but there is no test near").is_empty());
}
