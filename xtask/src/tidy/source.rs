//! Splits a Rust source into code, comments and literals, for rules and reports.

use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A line comment from `//` to the end of the line, or a whole block comment.
    Comment,
    /// A string literal with quotes and hashes, without a prefix `b` or `c`.
    String,
    /// A character literal with quotes, or the quote of a lifetime.
    Character,
}

/// A part of a source that is not code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) kind: Kind,
    /// Byte range in the source.
    pub(crate) range: Range<usize>,
}

/// Returns all comments and literals of a source in order.
pub(crate) fn spans(text: &str) -> Vec<Span> {
    let bytes = text.as_bytes();
    let mut spans = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let (kind, length) = match rest[0] {
            b'/' if rest.starts_with(b"//") => {
                (Kind::Comment, rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len()))
            }
            b'/' if rest.starts_with(b"/*") => (Kind::Comment, block_comment(rest)),
            b'"' => (Kind::String, string(rest)),
            b'r' if starts_raw(rest) && !word_before(bytes, at) => (Kind::String, raw_string(rest)),
            b'\'' => (Kind::Character, character(rest)),
            _ => {
                at += 1;
                continue;
            }
        };
        spans.push(Span { kind, range: at..at + length });
        at += length;
    }
    spans
}

/// Replaces comments and literals in a source with blanks. Line breaks and offsets do not change.
pub(crate) fn code_only(text: &str) -> String {
    let mut code = text.as_bytes().to_vec();
    for span in spans(text) {
        for byte in &mut code[span.range] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
    }
    String::from_utf8_lossy(&code).into_owned()
}

/// Returns the identifiers and keywords in `code` with their line numbers.
pub(crate) fn identifiers(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    let of_line = move |line| str::split(line, move |c| !part(c)).filter(|word| !word.is_empty());
    code.lines().enumerate().flat_map(move |(n, line)| of_line(line).map(move |word| (n + 1, word)))
}

/// Returns the offset after the bracket that closes the one at `open`. An unclosed bracket ends at
/// the end of the code.
pub(crate) fn closing(code: &str, open: usize) -> usize {
    let mut depth = 0_usize;
    for (at, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    code.len()
}

/// Returns the line number of byte `at` in `text`, counted from 1.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at].iter().filter(|&&b| b == b'\n').count() + 1
}

/// Returns true if `code` has `word` as a whole word.
#[cfg(test)]
pub(crate) fn has_word(code: &str, word: &str) -> bool {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    code.match_indices(word)
        .any(|(at, _)| !part(code[..at].chars().next_back()) && !part(code[at + word.len()..].chars().next()))
}

fn word_before(bytes: &[u8], at: usize) -> bool {
    // `br"…"` is a raw string too. Any other letter before the r makes it part of a name.
    let before = if at > 0 && bytes[at - 1] == b'b' { at.checked_sub(2) } else { at.checked_sub(1) };
    before.is_some_and(|i| bytes[i].is_ascii_alphanumeric() || bytes[i] == b'_')
}

fn starts_raw(rest: &[u8]) -> bool {
    let hashes = rest[1..].iter().take_while(|&&b| b == b'#').count();
    rest.get(1 + hashes) == Some(&b'"')
}

fn raw_string(rest: &[u8]) -> usize {
    let hashes = rest[1..].iter().take_while(|&&b| b == b'#').count();
    let end = [&b"\""[..], &vec![b'#'; hashes]].concat();
    let body = 2 + hashes;
    let found = rest[body..].windows(end.len()).position(|w| w == end);
    found.map_or(rest.len(), |n| body + n + end.len())
}

fn string(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != b'"' {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

fn character(rest: &[u8]) -> usize {
    // A lifetime has no closing quote nearby. A literal has one after one character or an escape.
    match rest.get(1) {
        Some(b'\\') => rest[2..].iter().skip(1).position(|&b| b == b'\'').map_or(1, |n| n + 4),
        Some(_) => {
            let text = String::from_utf8_lossy(&rest[1..rest.len().min(6)]);
            let width = text.chars().next().map_or(1, char::len_utf8);
            if rest.get(1 + width) == Some(&b'\'') { width + 2 } else { 1 }
        }
        None => 1,
    }
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

#[test]
fn comments_and_literals_are_not_code() {
    let text = r###"
let a = "an unsafe word"; // unsafe
/* unsafe /* unsafe */ still */ let b = r#"unsafe "quoted" "#;
let c = '"'; let d = '\''; fn e<'a>(x: &'a str) { danger() }
"###;
    let code = code_only(text);
    assert!(!has_word(&code, "unsafe"), "{code}");
    assert!(has_word(&code, "danger"), "{code}");
    assert!(has_word("an unsafe block", "unsafe") && !has_word("deny(unsafe_code)", "unsafe"));
}

#[test]
fn spans_and_identifiers_have_their_places() {
    let text = "let a = \"b\"; // c\nlet d = [e('f')];\n";
    let found: Vec<_> = spans(text).into_iter().map(|s| (s.kind, &text[s.range])).collect();
    assert_eq!(found, [(Kind::String, "\"b\""), (Kind::Comment, "// c"), (Kind::Character, "'f'")]);
    let code = code_only(text);
    let found: Vec<_> = identifiers(&code).collect();
    assert_eq!(found, [(1, "let"), (1, "a"), (2, "let"), (2, "d"), (2, "e")]);
    let open = code.find('[').unwrap();
    assert_eq!(&text[open..closing(&code, open)], "[e('f')]");
    assert_eq!(line_of(text, open), 2);
}
