//! Extracts doc comments and messages from a Rust source.

use std::ops::Range;

use super::items::Items;
use super::markdown::{Block, blocks};
use super::sentence::{is_one, split};
use super::{Kind, Sentence};
use crate::tidy::Text;
use crate::tidy::source::{self, closing, code_only, line_of, spans};

/// Texts before the parenthesis or bracket of a message.
const CALLS: [&str; 17] = [
    "tracing::error!",
    "tracing::warn!",
    "tracing::info!",
    "tracing::debug!",
    "tracing::trace!",
    "bail!",
    "anyhow!",
    ".hint",
    ".with_hint",
    "ApiError::conflict",
    "ApiError::busy",
    "ApiError::failed",
    "ApiError::invalid",
    "ApiError::not_found",
    "#[command",
    "#[arg",
    "#[error",
];

/// Maximum number of lines from an error to its hint.
const HINT_LINES_MAX: usize = 6;

/// Derives of types whose doc comments are help texts.
const HELP: [&str; 4] = ["Args", "Parser", "Subcommand", "ValueEnum"];

/// Returns the sentences of all lines that are not tests.
pub(super) fn sentences(source: &Text, is_test: &[bool]) -> Vec<Sentence> {
    let code = code_only(&source.text);
    let items = Items::new(&source.text);
    let mut found = comments(source, &code, &items);
    found.extend(messages(source, &code, &items));
    found.retain(|sentence| !is_test.get(sentence.line - 1).is_some_and(|is_test| *is_test));
    found
}

/// Returns the sentences of doc comments. Doc comments in types that clap reads are messages.
fn comments(source: &Text, code: &str, items: &Items<'_>) -> Vec<Sentence> {
    let help: Vec<Range<usize>> =
        help(code).into_iter().map(|r| line_of(code, r.start)..line_of(code, r.end)).collect();
    // Lines of one comment are consecutive and begin with the same marker.
    let mut groups: Vec<(&str, Vec<(usize, &str)>)> = Vec::new();
    for (line, text) in doc_lines(source) {
        let mark = &text[..3];
        match groups.last_mut() {
            Some((last, lines)) if *last == mark && lines.last().is_some_and(|(n, _)| n + 1 == line) => {
                lines.push((line, &text[3..]));
            }
            _ => groups.push((mark, vec![(line, &text[3..])])),
        }
    }
    let kind =
        |line: usize| if help.iter().any(|h| h.contains(&line)) { Kind::Message } else { Kind::Comment };
    let mut found = Vec::new();
    for (mark, lines) in groups {
        let last = lines.last().map_or(0, |(line, _)| *line);
        let item = if mark == "//!" { "this file".to_owned() } else { items.documented(last) };
        let sentences = blocks(lines.into_iter());
        let sentences = sentences.iter().flat_map(Block::sentences);
        found.extend(sentences.map(|sentence| {
            let heading = if sentence.place.is_empty() { "" } else { " › " };
            Sentence {
                kind: kind(sentence.line),
                text: sentence.text,
                path: source.path.clone(),
                line: sentence.line,
                place: format!("{item}{heading}{}", sentence.place),
                before: sentence.before,
            }
        }));
    }
    found
}

/// Returns the doc comments of a source, line by line.
fn doc_lines(source: &Text) -> Vec<(usize, &str)> {
    let comments = spans(&source.text).into_iter().filter(|span| span.kind == source::Kind::Comment);
    let texts = comments.map(|span| (line_of(&source.text, span.range.start), &source.text[span.range]));
    let is_doc =
        |text: &str| text.starts_with("//!") || (text.starts_with("///") && !text.starts_with("////"));
    texts.filter(|(_, text)| is_doc(text)).collect()
}

/// Returns the bodies of types that clap reads.
fn help(code: &str) -> Vec<Range<usize>> {
    let bodies = code.match_indices("derive(").filter_map(|(at, _)| {
        let end = closing(code, at + "derive".len());
        let is_help = source::identifiers(&code[at..end]).any(|(_, name)| HELP.contains(&name));
        let open = end + code[end..].find('{')?;
        is_help.then(|| open..closing(code, open))
    });
    bodies.collect()
}

/// Returns the sentences of strings for users in calls and attributes.
fn messages(source: &Text, code: &str, items: &Items<'_>) -> Vec<Sentence> {
    let calls: Vec<(&str, Range<usize>)> =
        CALLS.iter().flat_map(|name| arguments(code, name).into_iter().map(move |r| (*name, r))).collect();
    let strings = spans(&source.text).into_iter().filter(|span| span.kind == source::Kind::String);
    let mut found = Vec::new();
    // The call, line and last sentence of the string before.
    let mut last = (0, 0, String::new());
    for span in strings {
        // The innermost call is the one that begins last.
        let in_calls = calls.iter().filter(|(_, call)| call.contains(&span.range.start));
        let Some((name, call)) = in_calls.max_by_key(|(_, call)| call.start) else { continue };
        let line = line_of(&source.text, span.range.start);
        let text = unescaped(&source.text[span.range]);
        let is_hint = name.ends_with("hint") && line - last.1 <= HINT_LINES_MAX;
        let mut before = if is_hint || last.0 == call.start { last.2 } else { String::new() };
        let place = format!("{} › `{name}`", items.around(line));
        for paragraph in text.lines() {
            for (_, part) in split(paragraph.trim()) {
                let before = std::mem::replace(&mut before, part.to_owned());
                if is_one(part) {
                    found.push(Sentence {
                        kind: Kind::Message,
                        text: part.to_owned(),
                        path: source.path.clone(),
                        line,
                        place: place.clone(),
                        before,
                    });
                }
            }
        }
        last = (call.start, line, before);
    }
    found
}

/// Returns the argument ranges of all calls of `name`.
fn arguments(code: &str, name: &str) -> Vec<Range<usize>> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let found = code.match_indices(name).filter_map(|(at, _)| {
        let open = at + name.len();
        let is_whole = !name.starts_with(is_part) || !code[..at].ends_with(is_part);
        let is_call = code[open..].starts_with(['(', '{', '[']);
        (is_whole && is_call).then(|| open..closing(code, open))
    });
    found.collect()
}

/// Returns the text of a string literal. Doubled braces become single braces, as in a format
/// string.
fn unescaped(literal: &str) -> String {
    let is_raw = literal.starts_with('r');
    let inner = literal.trim_start_matches('r').trim_matches('#');
    let inner = inner.strip_prefix('"').and_then(|s| s.strip_suffix('"')).unwrap_or(inner);
    let mut text = String::new();
    let mut rest = inner.chars();
    while let Some(c) = rest.next() {
        if c != '\\' || is_raw {
            text.push(c);
            continue;
        }
        match rest.next() {
            Some('n') => text.push('\n'),
            Some('t' | 'r') => text.push(' '),
            Some('\n') => {
                let trimmed = rest.as_str().trim_start();
                rest = trimmed.chars();
            }
            Some(c) => text.push(c),
            None => {}
        }
    }
    text.replace("{{", "{").replace("}}", "}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(Kind, usize, String)> {
        let source = Text { path: "crates/a/src/b.rs".to_owned(), text: text.to_owned() };
        let mut is_test = vec![false; text.lines().count()];
        is_test[text.lines().count() - 1] = text.ends_with("// test\n");
        let mut found: Vec<_> =
            sentences(&source, &is_test).into_iter().map(|s| (s.kind, s.line, s.text)).collect();
        found.sort_by_key(|(_, line, _)| *line);
        found
    }

    #[test]
    fn doc_comments_are_found_and_help_is_a_message() {
        let text = "//! What this file is for.\n//! And a second sentence\n//! of it.\n\n/// The disk that waits here.\n\
            // Not this comment of four words.\n#[derive(Debug, Args)]\nstruct A {\n    /// Do not ask for confirmation\n    yes: bool,\n}\n\
            //// Not this one of five.\nlet a = \"/// nor this string here\";\n/// Tests are left out here. // test\n";
        let expected = [
            (Kind::Comment, 1, "What this file is for."),
            (Kind::Comment, 2, "And a second sentence of it."),
            (Kind::Comment, 5, "The disk that waits here."),
            (Kind::Message, 9, "Do not ask for confirmation"),
        ];
        assert_eq!(found(text), expected.map(|(kind, line, text)| (kind, line, text.to_owned())));
    }

    #[test]
    fn a_sentence_has_its_item_and_the_sentence_before_it() {
        let text = "//! What this file is for. And what it is not for.\n\nimpl A {\n    /// Short. Returns the sum of both.\n    #[must_use]\n\
            \x20   fn a(&self) -> u8 {\n        bail!(\"the pool {a} is full\").hint(\"add a device to the pool\")\n    }\n}\n\n";
        let source = Text { path: "a.rs".to_owned(), text: text.to_owned() };
        let found: Vec<_> =
            sentences(&source, &[]).into_iter().map(|s| (s.text, s.place, s.before)).collect();
        let function = "`impl A` › `fn a(&self) -> u8`";
        let expected = [
            ("What this file is for.", "this file", ""),
            ("And what it is not for.", "this file", "What this file is for."),
            ("Returns the sum of both.", function, "Short."),
            ("the pool {a} is full", &format!("{function} › `bail!`"), ""),
            ("add a device to the pool", &format!("{function} › `.hint`"), "the pool {a} is full"),
        ];
        assert_eq!(found, expected.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned())));
    }

    #[test]
    fn messages_are_found_in_their_calls_alone() {
        let text = "fn a() {\n    tracing::warn!(disk = %name, \"the backing {} \\\n        closed the connection\", b);\n\
            \n    bail!(\"a \\\"quoted\\\" word of {{four}} here. And a second one (here)\");\n    other(\"not this one of five\");\n\
            \n    e.hint(format!(\"run this command once more\"))\n}\n#[error(\"the pool {0} is full\")]\n\
            fn rail() { rail_bail!(\"no call of ours here\"); ApiError::conflict(r#\"it is \"in use\" now\"#) }\n";
        let expected = [
            (2, "the backing {} closed the connection"),
            (5, "a \"quoted\" word of {four} here."),
            (5, "And a second one (here)"),
            (8, "run this command once more"),
            (10, "the pool {0} is full"),
            (11, "it is \"in use\" now"),
        ];
        assert_eq!(found(text), expected.map(|(line, text)| (Kind::Message, line, text.to_owned())));
    }
}
