//! Finds the names of items in a Rust source: the item that a doc comment describes, and the items
//! that contain a line.

use std::ops::Range;

use crate::tidy::source::{Kind, closing, code_only, identifiers, line_of, spans};

/// Maximum length of an item's signature in characters. The rest is cut off.
const LENGTH_MAX: usize = 120;

/// Keywords of items that are named as the place of a sentence inside them.
const KEYWORDS: [&str; 7] = ["fn", "struct", "enum", "trait", "impl", "mod", "union"];

/// The items of one source.
#[derive(Debug)]
pub(super) struct Items<'a> {
    text: &'a str,
    /// The source without comments and literals, but with lifetimes.
    code: String,
    /// Items with braces, in the order of their first lines.
    bodies: Vec<(Range<usize>, String)>,
}

impl<'a> Items<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        let mut code = code_only(text);
        for span in spans(text).into_iter().filter(|s| s.kind == Kind::Character && s.range.len() == 1) {
            code.replace_range(span.range, "'");
        }
        let (mut open, mut bodies, mut head) = (Vec::new(), Vec::new(), 0);
        for (at, byte) in code.bytes().enumerate() {
            match byte {
                b'{' => {
                    open.push(signature(&code[head..at]).map(|name| (line_of(text, at), name)));
                    head = at + 1;
                }
                b'}' => {
                    if let Some(Some((line, name))) = open.pop() {
                        bodies.push((line..line_of(text, at) + 1, name));
                    }
                    head = at + 1;
                }
                b';' => head = at + 1,
                _ => {}
            }
        }
        bodies.sort_by_key(|(lines, _)| lines.start);
        Self { text, code, bodies }
    }

    /// Returns the names of the items that contain a line, outermost first.
    pub(super) fn around(&self, line: usize) -> String {
        let names = self.bodies.iter().filter(|(lines, _)| lines.contains(&line));
        names.map(|(_, name)| format!("`{name}`")).collect::<Vec<_>>().join(" › ")
    }

    /// Returns the item below a doc comment that ends at `line`, after the items that contain it.
    pub(super) fn documented(&self, line: usize) -> String {
        let start: usize = self.text.split_inclusive('\n').take(line).map(str::len).sum();
        let mut rest = self.code[start..].trim_start();
        while rest.starts_with('#') {
            let open = rest.find('[').unwrap_or(0);
            rest = rest[closing(rest, open)..].trim_start();
        }
        let mut depth = 0_usize;
        let end = rest.find(|c: char| {
            match c {
                '(' | '[' | '<' => depth += 1,
                ')' | ']' | '>' => depth = depth.saturating_sub(1),
                _ => {}
            }
            matches!(c, '{' | ';' | '=') || c == ',' && depth == 0
        });
        let item = one_line(&rest[..end.unwrap_or(rest.len())]);
        let around = self.around(line);
        if around.is_empty() { format!("`{item}`") } else { format!("{around} › `{item}`") }
    }
}

/// Returns the item whose head is the text before an opening brace; `None` if the text is not the
/// head of an item.
fn signature(head: &str) -> Option<String> {
    let (_, keyword) = identifiers(head).find(|(_, word)| KEYWORDS.contains(word))?;
    let is_start = |at: &usize| {
        let before = head[..*at].chars().next_back();
        let after = head[*at + keyword.len()..].chars().next();
        !before.is_some_and(|c| c.is_alphanumeric() || c == '_')
            && after.is_some_and(|c| c.is_whitespace() || c == '<')
    };
    let at = head.match_indices(keyword).map(|(at, _)| at).find(is_start)?;
    Some(one_line(&head[at..]))
}

/// Joins the lines of a signature without visibility.
fn one_line(text: &str) -> String {
    let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let joined = joined.replace("( ", "(").replace(", )", ")");
    let bare = ["pub(crate) ", "pub(super) ", "pub "].iter().find_map(|v| joined.strip_prefix(v));
    let bare = bare.unwrap_or(&joined);
    match bare.char_indices().nth(LENGTH_MAX) {
        Some((end, _)) => format!("{}…", &bare[..end]),
        None => bare.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_named_with_their_containers() {
        let text = "/// A\npub struct A {\n    /// B\n    #[serde(default)]\n    pub(crate) b: Map<u8, u8>,\n}\n\
            impl<'a> A for B<'a> {\n    /// C\n    pub fn c(\n        &self,\n    ) -> u8 {\n        if x { log!(\"d\") }\n    }\n}\n\
            /// E\nconst E: u8 = 1;\n/// F\nenum F {\n    /// G\n    G,\n}\n";
        let items = Items::new(text);
        let documented = [1, 3, 8, 15, 17, 19].map(|line| items.documented(line));
        let expected = [
            "`struct A`",
            "`struct A` › `b: Map<u8, u8>`",
            "`impl<'a> A for B<'a>` › `fn c(&self) -> u8`",
            "`const E: u8`",
            "`enum F`",
            "`enum F` › `G`",
        ];
        assert_eq!(documented, expected.map(str::to_owned));
        assert_eq!(items.around(12), "`impl<'a> A for B<'a>` › `fn c(&self) -> u8`");
        assert_eq!(items.around(16), "");
    }
}
