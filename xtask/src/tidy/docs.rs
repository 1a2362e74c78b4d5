//! Rules about documentation pages: generated pages are current, and faults and guarantees have
//! tests.

use std::collections::BTreeSet;
use std::process::Command;

use super::{Text, none, sources, texts};
use crate::shell;

/// Guarantees of docs/ARCHITECTURE.md that a test must cite.
const PROMISES: [u32; 6] = [1, 2, 3, 4, 5, 6];
/// Maximum number of lines between a comment `Promise N` and its test.
const NEAR: usize = 25;

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

/// Returns the names of all test functions: every `fn name` in a file with tests.
fn test_names(sources: &[Text]) -> BTreeSet<&str> {
    const MARKS: [&str; 3] = ["#[test]", "#[tokio::test", "proptest!"];
    let holds_tests = |s: &&Text| MARKS.iter().any(|mark| s.text.contains(mark));
    let names = |s: &'static str, text| -> Vec<&str> {
        let text: &str = text;
        text.match_indices(s).map(|(at, _)| &text[at + s.len()..]).map(word).collect()
    };
    sources.iter().filter(holds_tests).flat_map(|s| names("fn ", &s.text)).collect()
}

fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

/// Returns the words between backquotes in `cell`, reduced to the last part of each path.
fn cited(cell: &str) -> Vec<&str> {
    let quoted = cell.split('`').skip(1).step_by(2);
    quoted.map(|q| q.rsplit("::").next().unwrap_or(q).trim_end_matches("()")).collect()
}

/// docs/FAULTS.md consists of tables; the last column of each row names the tests that inject the fault,
/// and their files.
#[test]
fn every_fault_cites_a_test_that_exists() {
    let (page, sources) = (page("docs/FAULTS.md"), sources());
    let tests = test_names(&sources);
    let lines: Vec<&str> = page.lines().map(str::trim).collect();
    let mut broken = Vec::new();
    let mut rows = 0;
    for (number, line) in lines.iter().enumerate() {
        let rule = |l: &str| l.starts_with('|') && l.chars().all(|c| "|-: ".contains(c));
        let head = lines.get(number + 1).is_some_and(|next| rule(next));
        if !line.starts_with('|') || rule(line) || head {
            continue;
        }
        rows += 1;
        let cell = line.trim_end_matches('|').rsplit('|').next().unwrap_or_default();
        let is_file = |name: &str| name.ends_with(".rs") && sources.iter().any(|s| s.path.ends_with(name));
        let known = |name: &str| tests.contains(name) || is_file(name);
        let unknown: Vec<&str> = cited(cell).into_iter().filter(|name| !known(name)).collect();
        if cited(cell).is_empty() {
            broken.push(format!("docs/FAULTS.md:{}: cites no test", number + 1));
        } else if !unknown.is_empty() {
            broken.push(format!("docs/FAULTS.md:{}: no test is called {}", number + 1, unknown.join(", ")));
        }
    }
    assert!(rows > 0, "docs/FAULTS.md holds no table");
    none("each fault cites the test that injects it, in the last column", &broken);
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
fn citations_are_read() {
    assert_eq!(cited("`crates/x::tests::it_holds`, `other()`"), ["it_holds", "other"]);
    let text = "/// Promise 3 and promise 5: both.\n#[test]\nfn x() {}\n";
    assert_eq!(promises_cited(text), BTreeSet::from([3, 5]));
    assert!(promises_cited("// Promise 4, but there is no test near").is_empty());
}
