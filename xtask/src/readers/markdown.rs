//! Splits Markdown of pages and doc comments into paragraphs, list items and table cells.

use super::sentence;

/// A paragraph, list item or table cell, joined to one line.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Block {
    text: String,
    /// Byte offsets at which source lines begin, with their line numbers.
    lines: Vec<(usize, usize)>,
}

impl Block {
    fn push(&mut self, number: usize, text: &str) {
        if !self.text.is_empty() {
            self.text.push(' ');
        }
        self.lines.push((self.text.len(), number));
        self.text.push_str(text);
    }

    /// Returns the sentences of the block, each with its line number.
    pub(super) fn sentences(&self) -> Vec<(usize, String)> {
        let line = |at: usize| self.lines.iter().rev().find(|(start, _)| *start <= at).map_or(0, |(_, n)| *n);
        let found = sentence::split(&self.text).into_iter().filter(|(_, text)| sentence::is_one(text));
        found.map(|(at, text)| (line(at), plain(text))).collect()
    }
}

/// Splits numbered lines into blocks. Headings, code, table heads and HTML comments are left out.
pub(super) fn blocks<'a>(lines: impl Iterator<Item = (usize, &'a str)>) -> Vec<Block> {
    let lines: Vec<(usize, &str)> =
        lines.map(|(n, line)| (n, line.trim().trim_start_matches("> "))).collect();
    let (mut blocks, mut block) = (Vec::new(), Block::default());
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
            blocks.push(std::mem::take(&mut block));
        }
        if !is_text || line.is_empty() || line.starts_with('#') {
            continue;
        }
        if line.starts_with('|') {
            let is_head = lines.get(at + 1).is_some_and(|(_, next)| is_rule(next));
            if !is_head && !is_rule(line) {
                blocks.extend(cells(number, line));
            }
        } else {
            block.push(number, item.unwrap_or(line));
        }
    }
    blocks.push(block);
    blocks.retain(|block| !block.text.is_empty());
    blocks
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

fn cells(number: usize, row: &str) -> Vec<Block> {
    // A vertical bar after a backslash is part of its cell.
    let row = row.replace("\\|", "\u{0}");
    let cells = row.split('|').flat_map(|cell| cell.split("<br>"));
    let texts = cells.map(|cell| cell.trim().replace('\u{0}', "|")).filter(|cell| !cell.is_empty());
    texts.map(|text| Block { text, lines: vec![(0, number)] }).collect()
}

/// Returns the text without emphasis, and with the names of links instead of the links.
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

    fn found(text: &str) -> Vec<(usize, String)> {
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
        assert_eq!(found(text), expected.map(|(line, text)| (line, text.to_owned())));
    }

    #[test]
    fn links_become_their_names() {
        let text = "See [the page](a.md#b) and **how** [`Disk::read`] takes `a[0]` [sic].";
        assert_eq!(plain(text), "See the page and how `Disk::read` takes `a[0]` [sic].");
    }
}
