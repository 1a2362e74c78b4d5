//! A Rust source without its comments, strings and character literals, for rules about code.

/// Replaces comments and literals in `text` by blanks; line breaks stay where they are.
pub(super) fn code_only(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let length = match rest[0] {
            b'/' if rest.starts_with(b"//") => rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len()),
            b'/' if rest.starts_with(b"/*") => block_comment(rest),
            b'"' => string(rest),
            b'r' if starts_raw(rest) && !word_before(bytes, at) => raw_string(rest),
            b'\'' => character(rest),
            _ => 0,
        };
        for byte in &mut code[at..at + length] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at += length.max(1);
    }
    String::from_utf8_lossy(&code).into_owned()
}

/// Returns true if `code` contains `word` as a whole word.
pub(super) fn has_word(code: &str, word: &str) -> bool {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    code.match_indices(word)
        .any(|(at, _)| !part(code[..at].chars().next_back()) && !part(code[at + word.len()..].chars().next()))
}

fn word_before(bytes: &[u8], at: usize) -> bool {
    // `br"…"` is a raw string too; any other letter before the r makes it part of a name.
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
    // A lifetime has no closing quote nearby; a literal has one after one character or an escape.
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
