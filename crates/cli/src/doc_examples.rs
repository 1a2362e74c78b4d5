//! Tests that hob accepts the command lines on the pages of docs/: commands, options, and values.
//! `conformance/tests/doc_snippets.rs` runs them.

use std::fs;
use std::path::Path;

use clap::Parser;

use super::Cli;

/// Least number of examples, so that the test cannot pass because it finds none.
const EXAMPLES_MIN: usize = 100;

/// Returns the pages that are written by hand: their names and texts.
fn pages() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let docs = fs::read_dir(root.join("docs")).expect("docs/").map(|entry| entry.expect("an entry").path());
    let mut paths: Vec<_> = docs.chain([root.join("README.md")]).collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == "md") && !path.ends_with("cli.md"));
    paths.sort();
    let read = |path: &std::path::PathBuf| {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        (name, fs::read_to_string(path).expect("a page"))
    };
    paths.iter().map(read).collect()
}

/// Returns the lines in fenced blocks with their numbers, without prompts. A backslash continues a
/// line.
fn lines(page: &str) -> Vec<(usize, String)> {
    let mut lines = Vec::new();
    let mut is_fenced = false;
    let mut begun = String::new();
    for (number, line) in (1..).zip(page.lines().map(str::trim)) {
        if line.starts_with("```") {
            is_fenced = !is_fenced;
            continue;
        }
        if !is_fenced {
            continue;
        }
        let line = match begun.is_empty() {
            true => line.strip_prefix("$ ").or_else(|| line.strip_prefix("# ")).unwrap_or(line),
            false => line,
        };
        match line.strip_suffix('\\') {
            Some(part) => begun.push_str(part),
            None => lines.push((number, std::mem::take(&mut begun) + line)),
        }
    }
    lines
}

/// Splits a line into commands and their words, as a shell does.
fn commands(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (Some(end), c) if c == end => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, ' ' | ';' | '&' | '|' | '<' | '>') => {
                commands.last_mut().expect("a command").extend(word.take());
                match c {
                    ' ' => {}
                    '<' | '>' => commands.last_mut().expect("a command").push(c.to_string()),
                    _ => commands.push(Vec::new()),
                }
            }
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    commands.last_mut().expect("a command").extend(word);
    for command in &mut commands {
        // Redirections come last.
        let end = command.iter().position(|word| word == "<" || word == ">").unwrap_or(command.len());
        command.truncate(end);
    }
    commands.retain(|command| !command.is_empty());
    commands
}

#[test]
fn hob_accepts_the_command_lines_of_the_pages() {
    let mut refused = Vec::new();
    let mut count = 0;
    for (page, text) in pages() {
        for (number, line) in lines(&text) {
            for command in commands(&line).iter().filter(|command| command[0] == "hob") {
                count += 1;
                if let Err(error) = Cli::try_parse_from(command) {
                    refused.push(format!("{page}:{number}: {line}: {error}"));
                }
            }
        }
    }
    assert!(refused.is_empty(), "hob refuses examples of the pages:\n{}", refused.join("\n"));
    assert!(count >= EXAMPLES_MIN, "the pages have only {count} examples");
}

#[test]
fn command_lines_are_split_as_by_a_shell() {
    let page =
        "hob no\n```console\n# hob stats web   # why\n$ hob disk add \\\n    web --backing 'a b'\n```\n";
    let found = lines(page);
    assert_eq!(found.len(), 2);
    let split = |index: usize| commands(&found[index].1);
    assert_eq!(split(0), [["hob", "stats", "web"]]);
    assert_eq!(split(1), [["hob", "disk", "add", "web", "--backing", "a b"]]);
    let line = "rbd resize x && hob disk resize \"m\" >log; hob health | less &";
    assert_eq!(
        commands(line),
        [vec!["rbd", "resize", "x"], vec!["hob", "disk", "resize", "m"], vec!["hob", "health"], vec!["less"]]
    );
}
