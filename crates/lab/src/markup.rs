//! Escapes untrusted text for SVG and HTML.
//!
//! Names come from traces, files and users. The five characters with a meaning in markup are
//! escaped. Characters that XML forbids and characters that reverse or hide adjacent text are
//! replaced by U+FFFD. A name can thus neither break a document nor imitate another name.

/// Returns the text, escaped for an element's content or a quoted attribute's value.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            other => out.push(plain(other)),
        }
    }
    out
}

/// Returns the character, or the replacement character if a document may not contain the character.
fn plain(char: char) -> char {
    match char {
        '\t' | '\n' | '\r' => char,
        '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => '\u{fffd}',
        '\u{fdd0}'..='\u{fdef}' => '\u{fffd}',
        _ if char.is_control() || u32::from(char) & 0xfffe == 0xfffe => '\u{fffd}',
        _ => char,
    }
}

/// Checks in tests that generated SVG and HTML documents are well-formed.
#[cfg(test)]
pub(crate) mod judge {
    /// HTML elements without an end tag.
    const VOID: [&str; 4] = ["meta", "br", "hr", "link"];

    /// Returns the first error of the document, if any. Tags must nest, attributes must be quoted
    /// and unique, `&` must start one of the five entities, and text must not contain `<` or
    /// forbidden characters.
    pub(crate) fn flaw(document: &str) -> Option<String> {
        let mut rest = document.strip_prefix("<!doctype html>").unwrap_or(document);
        let mut open: Vec<&str> = Vec::new();
        let mut roots = 0;
        while let Some(start) = rest.find('<') {
            let (text, tail) = rest.split_at(start);
            if let Some(flaw) = text_flaw(text, open.is_empty()) {
                return Some(flaw);
            }
            let Some(end) = tag_end(tail) else { return Some("a tag without an end".to_owned()) };
            let tag = &tail[1..end];
            rest = &tail[end + 1..];
            if let Some(name) = tag.strip_prefix('/') {
                if open.pop() != Some(name) {
                    return Some(format!("</{name}> closes something else"));
                }
                continue;
            }
            let closed = tag.ends_with('/');
            let body = tag.trim_end_matches('/').trim_end();
            let (name, attributes) = body.split_once(char::is_whitespace).unwrap_or((body, ""));
            if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric()) {
                return Some(format!("a tag named {name:?}"));
            }
            if let Some(flaw) = attributes_flaw(attributes) {
                return Some(format!("<{name}>: {flaw}"));
            }
            roots += usize::from(open.is_empty());
            if !closed && !VOID.contains(&name) {
                open.push(name);
            }
        }
        let left =
            text_flaw(rest, true).or_else(|| open.pop().map(|name| format!("<{name}> is never closed")));
        left.or_else(|| (roots != 1).then(|| format!("{roots} root elements")))
    }

    /// Returns the end of the tag that starts here. A `>` in quotes does not end the tag.
    fn tag_end(tail: &str) -> Option<usize> {
        let mut quoted = false;
        tail.char_indices().find_map(|(at, char)| {
            quoted ^= char == '"';
            (char == '>' && !quoted).then_some(at)
        })
    }

    fn text_flaw(text: &str, outside: bool) -> Option<String> {
        if outside && !text.trim().is_empty() {
            return Some(format!("text outside of the root: {text:?}"));
        }
        if text.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\t' | '\r')) {
            return Some("a control character".to_owned());
        }
        let entities = ["amp;", "lt;", "gt;", "quot;", "apos;"];
        let bare = text.split('&').skip(1).find(|after| !entities.iter().any(|e| after.starts_with(e)));
        bare.map(|after| format!("a bare & before {:?}", after.chars().take(12).collect::<String>()))
    }

    fn attributes_flaw(attributes: &str) -> Option<String> {
        let (mut rest, mut seen) = (attributes.trim(), Vec::new());
        while !rest.is_empty() {
            let Some((name, tail)) = rest.split_once("=\"") else {
                return Some(format!("not quoted: {rest}"));
            };
            let Some((value, tail)) = tail.split_once('"') else { return Some(format!("{name} has no end")) };
            if value.contains('<') || seen.contains(&name) || name.contains(char::is_whitespace) {
                return Some(format!("attribute {name}: {value:?}"));
            }
            if let Some(flaw) = text_flaw(value, false) {
                return Some(format!("{name}: {flaw}"));
            }
            seen.push(name);
            rest = tail.trim_start();
        }
        None
    }

    #[test]
    fn the_judge_knows_good_from_bad() {
        for good in
            ["<a/>", "<a b=\"1\" c=\"2 &lt; 3\"><b>x &amp; y</b><c/></a>", "<!doctype html><p><br></p>"]
        {
            assert_eq!(flaw(good), None, "{good}");
        }
        let bad = [
            "<a>",
            "<a></b>",
            "<a b=1/>",
            "<a b=\"1\" b=\"2\"/>",
            "<a>x & y</a>",
            "<a>\u{1}</a>",
            "<a/><b/>",
            "x",
            "<a b=\"<\"/>",
            "<a",
            "<a>1 < 2</a>",
        ];
        for bad in bad {
            assert!(flaw(bad).is_some(), "{bad}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_foreign_survives_as_markup() {
        let hostile = "<script>alert('x')</script> & \"q\"\u{0}\u{1b}[2J\u{202e}gpj\u{ffff}é 漢";
        let text = escaped(hostile);
        assert_eq!(
            text,
            "&lt;script&gt;alert(&apos;x&apos;)&lt;/script&gt; &amp; &quot;q&quot;\u{fffd}\u{fffd}[2J\u{fffd}gpj\u{fffd}é 漢"
        );
        assert_eq!(judge::flaw(&format!("<p class=\"{text}\">{text}</p>")), None);
    }
}
