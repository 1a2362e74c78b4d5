//! `cargo xtask tidy --report` prints the sizes of the crates, their dependencies, and how often
//! the sources and pages still use names and words that have to be replaced (`vocabulary.rs`).

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::Value;

use super::source::{Kind, code_only, identifiers, spans};
use super::test_code::TestFiles;
use super::vocabulary::{PAGE, Vocabulary, Word};
use super::{Text, sources, texts};
use crate::shell;

/// Number of longest files in the report.
const LONGEST: usize = 10;

pub(super) fn print() -> Result<()> {
    let texts = texts();
    let sources = sources();
    print_lines(&sources);
    print_longest(&sources);
    print_dependencies(&shell::metadata()?)?;
    let vocabulary = Vocabulary::read(&texts)?;
    print_names(&vocabulary.in_code, &sources);
    println!("{} names are replaced: the tidy test rejects them", vocabulary.replaced.len());
    let in_sources: Vec<String> = sources.iter().map(|source| prose(&source.text)).collect();
    let pages: Vec<String> = texts.iter().filter(|text| is_page(text)).map(|text| flat(&text.text)).collect();
    print_words(&vocabulary.in_text, &in_sources, &pages);
    Ok(())
}

/// Number of non-empty lines of a crate.
#[derive(Debug, Default, PartialEq, Eq)]
struct Lines {
    code: usize,
    comments: usize,
    /// Number of lines of test code and its comments.
    tests: usize,
}

impl Lines {
    fn add(&mut self, tests: &TestFiles, source: &Text) {
        let (code, is_test) = (without_comments(&source.text), tests.lines(source));
        for ((line, code), is_test) in source.text.lines().zip(code.lines()).zip(is_test) {
            match (line.trim().is_empty(), code.trim().is_empty()) {
                (true, _) => {}
                _ if is_test => self.tests += 1,
                (_, true) => self.comments += 1,
                (_, false) => self.code += 1,
            }
        }
    }
}

/// Returns the source with blanks instead of comments. Lines of long strings count as code.
fn without_comments(text: &str) -> String {
    let mut code = text.to_owned();
    for span in spans(text).into_iter().filter(|span| span.kind == Kind::Comment) {
        let blank: String =
            text[span.range.clone()].bytes().map(|b| if b == b'\n' { '\n' } else { ' ' }).collect();
        code.replace_range(span.range, &blank);
    }
    code
}

/// Returns the crate of a source: the directory above `src` or `tests`.
fn crate_of(path: &str) -> &str {
    let depth = if path.starts_with("crates/") { 1 } else { 0 };
    let end = path.match_indices('/').nth(depth).map_or(path.len(), |(at, _)| at);
    &path[..end]
}

fn print_lines(sources: &[Text]) {
    let tests = TestFiles::new(sources);
    let mut crates: BTreeMap<&str, Lines> = BTreeMap::new();
    for source in sources {
        crates.entry(crate_of(&source.path)).or_default().add(&tests, source);
    }
    println!("Lines that are not empty\n{:<20} {:>8} {:>8} {:>8}", "crate", "code", "comments", "tests");
    let mut all = Lines::default();
    for (name, lines) in &crates {
        println!("{name:<20} {:>8} {:>8} {:>8}", lines.code, lines.comments, lines.tests);
        all.code += lines.code;
        all.comments += lines.comments;
        all.tests += lines.tests;
    }
    println!("{:<20} {:>8} {:>8} {:>8}", "all", all.code, all.comments, all.tests);
}

fn print_longest(sources: &[Text]) {
    let mut lengths: Vec<(usize, &str)> =
        sources.iter().map(|s| (s.text.lines().count(), &*s.path)).collect();
    lengths.sort_by_key(|&(lines, path)| (std::cmp::Reverse(lines), path));
    println!("\nLongest files");
    for (lines, path) in lengths.into_iter().take(LONGEST) {
        println!("{lines:>5} {path}");
    }
}

/// Prints the workspace crates on which each crate depends.
fn print_dependencies(metadata: &Value) -> Result<()> {
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let name = |value: &Value| value["name"].as_str().unwrap_or_default().to_owned();
    let ours: Vec<String> = packages.iter().map(name).collect();
    println!("\nDependencies between crates; in parentheses those of tests alone");
    for package in packages {
        let dependencies = package["dependencies"]
            .as_array()
            .context("a package in cargo metadata has no list of dependencies")?;
        let of_ours = dependencies.iter().filter(|d| ours.contains(&name(d)));
        let written = of_ours.map(|d| if d["kind"] == "dev" { format!("({})", name(d)) } else { name(d) });
        let written: Vec<String> = written.collect();
        let list = if written.is_empty() { "–".to_owned() } else { written.join(", ") };
        println!("{:<14} -> {list}", name(package));
    }
    Ok(())
}

/// Prints how often the code, including tests, has each old name: in the files that the vocabulary
/// page names, and in all files, where the name may have another meaning.
fn print_names(words: &[Word], sources: &[Text]) {
    let codes: Vec<(&str, String)> = sources.iter().map(|s| (&*s.path, code_only(&s.text))).collect();
    let used = |word: &Word, code: &str| identifiers(code).filter(|(_, name)| *name == word.old).count();
    println!("\nOld names that remain in code ({PAGE})");
    println!("{:<14} {:>6} {:>10}  {:<34} new", "old", "there", "everywhere", "where");
    let (mut all, mut left) = (0, 0);
    for word in words {
        let uses = codes.iter().map(|(path, code)| (word.scope.contains(path), used(word, code)));
        let (there, everywhere) = uses.fold((0, 0), |(there, everywhere), (is_there, n)| {
            (there + if is_there { n } else { 0 }, everywhere + n)
        });
        all += there;
        left += usize::from(there > 0);
        let new = if there == 0 { "gone: move its row to \"Names replaced\"" } else { &*word.new };
        println!("{:<14} {there:>6} {everywhere:>10}  {:<34} {new}", word.old, word.scope.text);
    }
    println!("{left} of {} names, {all} times", words.len());
}

/// Returns the comments and strings of a source in lower case, without line breaks.
fn prose(text: &str) -> String {
    let kept = spans(text).into_iter().filter(|span| span.kind != Kind::Character);
    let texts = kept.map(|span| text[span.range].trim_start_matches(['/', '!']));
    flat(&texts.collect::<Vec<_>>().join(" "))
}

/// Returns the text in lower case with single blanks, so that phrases are found across line breaks.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase()
}

/// Returns true for hand-written pages that are not decisions.
fn is_page(text: &Text) -> bool {
    let is_here =
        text.path == "README.md" || (text.path.starts_with("docs/") && !text.path.contains("/decisions/"));
    is_here && text.path.ends_with(".md") && !text.text.starts_with(super::GENERATED)
}

/// Returns how often the text has the word, in singular or plural.
fn occurrences(text: &str, word: &str) -> usize {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let stands_alone = |at: usize| {
        let rest = &text[at + word.len()..];
        !part(text[..at].chars().next_back()) && !part(rest.strip_prefix('s').unwrap_or(rest).chars().next())
    };
    text.match_indices(word).filter(|(at, _)| stands_alone(*at)).count()
}

fn print_words(words: &[Word], sources: &[String], pages: &[String]) {
    println!(
        "\nOld words in text, legitimate uses included: comments and strings of sources; pages without decisions"
    );
    println!("{:<16} {:>8} {:>6}  new", "old", "sources", "pages");
    let (mut in_sources, mut in_pages) = (0, 0);
    for word in words {
        let count = |texts: &[String]| texts.iter().map(|text| occurrences(text, &word.old)).sum::<usize>();
        let (here, there) = (count(sources), count(pages));
        println!("{:<16} {here:>8} {there:>6}  {}", word.old, word.new);
        in_sources += here;
        in_pages += there;
    }
    println!("{:<16} {in_sources:>8} {in_pages:>6}", "all");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_by_what_they_hold() {
        let text = "//! A.\n\nfn a() {} // b\n/* c\n\nd */\nlet e = \"\n// f\";\n#[test]\nfn g() {}\n";
        let source = Text { path: "crates/a/src/b.rs".to_owned(), text: text.to_owned() };
        let mut lines = Lines::default();
        lines.add(&TestFiles::new(&[]), &source);
        assert_eq!(lines, Lines { code: 3, comments: 3, tests: 2 });
        assert_eq!((crate_of(&source.path), crate_of("torture/src/a.rs")), ("crates/a", "torture"));
    }

    #[test]
    fn words_are_counted_alone_and_in_the_plural() {
        let text = prose("let machine = \"Machine\"; // machines, machinery\n");
        assert_eq!(occurrences(&text, "machine"), 2);
        assert_eq!(occurrences(&prose("/// It ends in\n/// Peace.\n"), "in peace"), 1);
    }
}
