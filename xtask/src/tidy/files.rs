//! Rules about single files: length, first lines, forbidden content.

use super::source::{code_only, has_word};
use super::{none, sources, texts};

/// Number of lines above which the report lists a file.
const LINES_WARN: usize = 500;
/// Maximum number of lines of a file.
const LINES_MAX: usize = 800;
/// Directories and files where `unsafe` is permitted. The crate `blkio` has no safe way to read the
/// results of requests.
const UNSAFE_ALLOWED: [&str; 3] = ["crates/storage/", "crates/frontends/", "conformance/src/blkio_client.rs"];

#[test]
fn no_file_is_too_long() {
    let lengths = sources().into_iter().map(|s| (s.text.lines().count(), s.path));
    let (too_long, long): (Vec<_>, Vec<_>) =
        lengths.filter(|&(n, _)| n > LINES_WARN).partition(|&(n, _)| n > LINES_MAX);
    let say = |list: Vec<(usize, String)>| -> Vec<String> {
        list.into_iter().map(|(n, path)| format!("{path}: {n} lines")).collect()
    };
    for line in say(long) {
        println!("warning: longer than {LINES_WARN} lines: {line}");
    }
    none(&format!("a source file has at most {LINES_MAX} lines; split it by concern"), &say(too_long));
}

#[test]
fn every_file_says_what_it_is_for() {
    // A fuzz target must begin with an attribute.
    let begins = |text: &str| {
        let first = text.lines().find(|l| !l.starts_with("#!["));
        first.is_some_and(|l| l.starts_with("//!") && l.len() > 8)
    };
    let silent: Vec<_> = sources().into_iter().filter(|s| !begins(&s.text)).map(|s| s.path).collect();
    none("a source file begins with `//!` and says what it is for", &silent);
}

#[test]
fn unsafe_stands_only_where_it_must() {
    let elsewhere =
        sources().into_iter().filter(|s| !UNSAFE_ALLOWED.iter().any(|dir| s.path.starts_with(dir)));
    let mut broken = Vec::new();
    for source in elsewhere {
        let code = code_only(&source.text);
        for (number, line) in code.lines().enumerate() {
            let lifted = line.contains("unsafe_code") && !line.contains("deny") && !line.contains("forbid");
            if has_word(line, "unsafe") || lifted {
                broken.push(format!("{}:{}", source.path, number + 1));
            }
        }
    }
    none(&format!("`unsafe` is permitted only in {}", UNSAFE_ALLOWED.join(", ")), &broken);
}

/// Crates whose examples in documentation are tested. All other crates have no examples, and have
/// `doctest = false`, because otherwise rustdoc would read each whole crate to find no example.
const WITH_EXAMPLES: [&str; 1] = ["crates/lab/"];

#[test]
fn examples_in_documentation_are_tested() {
    let mut broken = Vec::new();
    let is_tested = |path: &str| WITH_EXAMPLES.iter().any(|dir| path.starts_with(dir));
    for source in sources().into_iter().filter(|source| !is_tested(&source.path)) {
        let mut is_inside = false;
        for (number, line) in source.text.lines().enumerate() {
            let line = line.trim_start();
            let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
            let Some(language) = doc.and_then(|doc| doc.trim_start().strip_prefix("```")) else { continue };
            if !is_inside && language != "text" {
                broken.push(format!("{}:{}", source.path, number + 1));
            }
            is_inside = !is_inside;
        }
    }
    none("an example is in a crate of WITH_EXAMPLES, which has doc tests, or begins with ```text", &broken);
}

#[test]
fn no_file_names_a_place_on_one_machine() {
    let forbidden = [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];
    let mut broken = Vec::new();
    for text in texts() {
        for (number, line) in text.text.lines().enumerate() {
            if forbidden.iter().any(|word| line.contains(word)) {
                broken.push(format!("{}:{}: {}", text.path, number + 1, line.trim()));
            }
        }
    }
    none("no path of one developer's machine", &broken);
}

/// Maximum size of all committed fuzz corpora, bytes.
const SEEDS_BYTES_MAX: u64 = 1 << 20;

#[test]
fn every_fuzz_target_has_a_small_committed_corpus() {
    let dir = crate::shell::root().join("fuzz");
    let entries = |path: &str| std::fs::read_dir(dir.join(path)).into_iter().flatten().flatten();
    let (mut bytes, mut without) = (0, Vec::new());
    for target in entries("fuzz_targets") {
        let name = target.path().file_stem().expect("a file").to_string_lossy().into_owned();
        let seeds: Vec<u64> =
            entries(&format!("seeds/{name}")).map(|seed| seed.metadata().expect("a file").len()).collect();
        bytes += seeds.iter().sum::<u64>();
        if seeds.is_empty() {
            without.push(name);
        }
    }
    none("each fuzz target has inputs in fuzz/seeds", &without);
    assert!(bytes > 0 && bytes <= SEEDS_BYTES_MAX, "fuzz/seeds holds {bytes} bytes");
}
