//! Splits Markdown of pages and doc comments into paragraphs, list items and table cells.

use super::sentence;

/// A paragraph, list item or table cell, joined to one line.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Block {
    text: String,
    /// Byte offsets at which source lines begin, with their line numbers.
    lines: Vec<(usize, usize)>,
    is_item: bool,
    /// Headings above the block, and the column of a table cell.
    place: String,
    /// Text that a reader sees before the block: the sentence before a paragraph, the introduction
    /// of a list, or the cells on the left.
    before: String,
}

/// A sentence of a block.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) line: usize,
    pub(super) text: String,
    pub(super) place: String,
    pub(super) before: String,
}

impl Block {
    fn push(&mut self, number: usize, text: &str) {
        if !self.text.is_empty() {
            self.text.push(' ');
        }
        self.lines.push((self.text.len(), number));
        self.text.push_str(text);
    }

    fn last_sentence(&self) -> String {
        sentence::split(&self.text).last().map(|(_, text)| plain(text)).unwrap_or_default()
    }

    /// Returns the sentences of the block that are long enough to be explained.
    pub(super) fn sentences(&self) -> Vec<Found> {
        let line = |at: usize| self.lines.iter().rev().find(|(start, _)| *start <= at).map_or(0, |(_, n)| *n);
        let mut before = self.before.clone();
        let mut found = Vec::new();
        for (at, text) in sentence::split(&self.text) {
            let is_one = sentence::is_one(text);
            let text = plain(text);
            let last = std::mem::replace(&mut before, text.clone());
            if is_one {
                found.push(Found { line: line(at), text, place: self.place.clone(), before: last });
            }
        }
        found
    }
}

/// Splits numbered lines into blocks. Headings, code, table heads and HTML comments are left out.
pub(super) fn blocks<'a>(lines: impl Iterator<Item = (usize, &'a str)>) -> Vec<Block> {
    let lines: Vec<(usize, &str)> =
        lines.map(|(n, line)| (n, line.trim().trim_start_matches("> "))).collect();
    let mut parts = Parts::default();
    let (mut is_fenced, mut is_comment) = (false, false);
    for (at, &(number, line)) in lines.iter().enumerate() {
        let is_fence = line.starts_with("```");
        is_fenced ^= is_fence;
        is_comment |= !is_fenced && line.starts_with("<!--");
        let is_text = !is_fenced && !is_fence && !is_comment && !is_definition(line);
        if is_comment {
            is_comment = !line.contains("-->");
        }
        let item = list_item(line);
        if !is_text || line.is_empty() || line.starts_with(['#', '|']) || item.is_some() {
            parts.end();
        }
        if !is_text || line.is_empty() {
            continue;
        }
        if line.starts_with('#') {
            parts.heading(line);
        } else if line.starts_with('|') {
            if lines.get(at + 1).is_some_and(|(_, next)| is_rule(next)) {
                parts.columns = cell_texts(line);
            } else if !is_rule(line) {
                parts.row(number, line);
            }
        } else {
            parts.block.is_item |= item.is_some();
            parts.block.push(number, item.unwrap_or(line));
        }
    }
    parts.end();
    parts.blocks
}

/// The blocks found so far, with the headings and columns that apply to the next one.
#[derive(Debug, Default)]
struct Parts {
    blocks: Vec<Block>,
    block: Block,
    headings: Vec<String>,
    columns: Vec<String>,
    /// The last sentence of the last paragraph.
    before: String,
}

impl Parts {
    /// Ends the paragraph or list item.
    fn end(&mut self) {
        let mut block = std::mem::take(&mut self.block);
        if block.text.is_empty() {
            return;
        }
        block.place = self.headings.join(" › ");
        block.before.clone_from(&self.before);
        if !block.is_item {
            self.before = block.last_sentence();
        }
        self.blocks.push(block);
    }

    fn heading(&mut self, line: &str) {
        let text = line.trim_start_matches('#');
        self.headings.truncate(line.len() - text.len() - 1);
        self.headings.push(plain(text));
        self.before.clear();
    }

    fn row(&mut self, number: usize, line: &str) {
        let cells = cell_texts(line);
        for (n, cell) in cells.iter().enumerate().filter(|(_, cell)| !cell.is_empty()) {
            let mut place = self.headings.clone();
            place.extend(self.columns.get(n).map(|column| format!("column \"{column}\"")));
            let left = plain(&cells[..n].join(" | ")).replace("<br>", " ");
            for part in cell.split("<br>").map(str::trim).filter(|part| !part.is_empty()) {
                self.blocks.push(Block {
                    text: part.to_owned(),
                    lines: vec![(0, number)],
                    is_item: false,
                    place: place.join(" › "),
                    before: left.clone(),
                });
            }
        }
    }
}

/// Returns true for the line below a table head.
fn is_rule(line: &str) -> bool {
    line.starts_with('|') && line.chars().all(|c| "|-: ".contains(c))
}

/// Returns true for a link definition `[name]: target`.
fn is_definition(line: &str) -> bool {
    line.starts_with('[') && line.split_once("]: ").is_some_and(|(name, _)| !name.contains(' '))
}

/// Returns the text of a list item after its marker.
fn list_item(line: &str) -> Option<&str> {
    let behind_number = || {
        let rest = line.trim_start_matches(|c: char| c.is_ascii_digit());
        if rest.len() < line.len() { rest.strip_prefix(". ") } else { None }
    };
    line.strip_prefix("- ").or_else(|| line.strip_prefix("* ")).or_else(behind_number)
}

/// Returns the texts of a table row's cells. A vertical bar after a backslash is part of its cell.
fn cell_texts(row: &str) -> Vec<String> {
    let row = row.replace("\\|", "\u{0}");
    let row = row.trim_start_matches('|').trim_end_matches('|');
    row.split('|').map(|cell| cell.trim().replace('\u{0}', "|")).collect()
}

/// Returns the text without emphasis and images, and with the names of links instead of the links.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once('[') {
        plain.push_str(before);
        let Some((name, after)) = link.split_once(']') else {
            plain.push('[');
            rest = link;
            continue;
        };
        let target = after.strip_prefix('(').and_then(|target| target.split_once(')'));
        let is_item = name.starts_with('`') && name.ends_with('`');
        match target {
            Some((_, behind)) if before.ends_with('!') => {
                plain.pop();
                rest = behind;
            }
            Some((_, behind)) => {
                plain.push_str(name);
                rest = behind;
            }
            None if is_item => {
                plain.push_str(name);
                rest = after;
            }
            None => {
                plain.push('[');
                rest = link;
            }
        }
    }
    plain.push_str(rest);
    plain.replace("**", "").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<Found> {
        blocks((1..).zip(text.lines())).iter().flat_map(Block::sentences).collect()
    }

    #[test]
    fn paragraphs_items_and_cells_are_found() {
        let text = "# A heading of four words\n\nThe first one goes\nover two lines. The second one\nbegins on line four.\n\
            - An item of a list\n  that goes on.\n1. Another item of it.\n\n```\nThis is code, not text.\n```\n<!-- a b c d e -->\n\
            | the head of the table | b |\n|---|---|\n| A cell with \\| five words | short |\n> A quote of some words.\n";
        let expected = [
            (3, "The first one goes over two lines."),
            (4, "The second one begins on line four."),
            (6, "An item of a list that goes on."),
            (8, "Another item of it."),
            (16, "A cell with | five words"),
            (17, "A quote of some words."),
        ];
        let found: Vec<_> = found(text).into_iter().map(|s| (s.line, s.text)).collect();
        assert_eq!(found, expected.map(|(line, text)| (line, text.to_owned())));
    }

    #[test]
    fn a_sentence_has_the_sentence_before_it() {
        let text = "# One\n\nShort. The first one goes on here.\n\n- The item of a list. Its second sentence is here.\n- Another item of the list.\n\n\
            ## Two\n| name | meaning |\n|---|---|\n| `a` | the first of the names |\n# Three\nA sentence below it stands.\n";
        let expected = [
            ("The first one goes on here.", "One", "Short."),
            ("The item of a list.", "One", "The first one goes on here."),
            ("Its second sentence is here.", "One", "The item of a list."),
            ("Another item of the list.", "One", "The first one goes on here."),
            ("the first of the names", "One › Two › column \"meaning\"", "`a`"),
            ("A sentence below it stands.", "Three", ""),
        ];
        let found: Vec<_> = found(text).into_iter().map(|s| (s.text, s.place, s.before)).collect();
        assert_eq!(found, expected.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned())));
    }

    #[test]
    fn links_become_their_names() {
        let text = "![chart](a.svg) See [the page](a.md#b) and **how** [`Disk::read`] takes `a[0]` [sic].";
        assert_eq!(plain(text), "See the page and how `Disk::read` takes `a[0]` [sic].");
    }
}
