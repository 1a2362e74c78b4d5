//! `cargo xtask readers` draws random sentences of the project, to test whether readers understand
//! them. See docs/CONTRIBUTING.md.

mod items;
mod markdown;
mod rust;
mod sentence;

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::shell;
use crate::tidy::test_code::TestFiles;
use crate::tidy::{self, GENERATED, Text};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Seed of the draw; the same sources and seed give the same sentences
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Number of sentences to draw
    #[arg(long, value_name = "N", default_value_t = 60)]
    count: usize,
    /// Write the list to this file instead of printing it; the key has the same name with the
    /// extension `key`
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Origin of a sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// A doc comment.
    Comment,
    /// A text for users: log, error, hint, or help of a command.
    Message,
    /// A documentation page.
    Docs,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Comment => "comment",
            Self::Message => "message",
            Self::Docs => "docs",
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Sentence {
    kind: Kind,
    text: String,
    path: String,
    line: usize,
    /// The item or the heading that the sentence belongs to.
    place: String,
    /// The sentence before this sentence; empty for the first sentence of a text.
    before: String,
}

impl Sentence {
    /// Returns the sentence with its context for the reader: file, item or heading, and the
    /// sentence before.
    fn with_context(&self) -> String {
        let place = if self.place.is_empty() { String::new() } else { format!(" › {}", self.place) };
        let mut text = format!("[{}] {}{place}\n", self.kind, self.path);
        if !self.before.is_empty() {
            text += &format!("   before: {}\n", self.before);
        }
        text + &format!("   SENTENCE: {}\n", self.text)
    }
}

/// Draws sentences, and writes the list and its key.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let all = all(&tidy::texts());
    let drawn = draw(&all, arguments.count, arguments.seed);
    if drawn.len() < arguments.count {
        bail!("the project has only {} sentences: pass a smaller --count", all.len());
    }
    let list: String = (1..).zip(&drawn).map(|(n, s)| format!("{n}. {}\n", s.with_context())).collect();
    let key: String =
        (1..).zip(&drawn).map(|(n, s)| format!("{n}. [{}] {}:{}\n", s.kind, s.path, s.line)).collect();
    let key_path = match &arguments.out {
        Some(path) => path.with_extension("key"),
        None => shell::target_dir()?.join(format!("readers-{}.key", arguments.seed)),
    };
    if arguments.out.as_ref() == Some(&key_path) {
        bail!("--out {} is also the name of the key file: pass another extension", key_path.display());
    }
    fs::write(&key_path, key).with_context(|| format!("cannot write {}", key_path.display()))?;
    match &arguments.out {
        Some(path) => fs::write(path, list).with_context(|| format!("cannot write {}", path.display()))?,
        None => print!("{list}"),
    }
    eprintln!("Drawn from {}. The key is in {}.", counts(&all), key_path.display());
    Ok(())
}

fn counts(all: &[Sentence]) -> String {
    let of = |kind| all.iter().filter(|sentence| sentence.kind == kind).count();
    let [comments, messages, docs] = [Kind::Comment, Kind::Message, Kind::Docs].map(of);
    format!("{comments} sentences of comments, {messages} of messages and {docs} of pages")
}

/// Returns all distinct sentences, ordered by path and line.
fn all(texts: &[Text]) -> Vec<Sentence> {
    let is_source = |text: &&Text| text.path.ends_with(".rs");
    let tests = TestFiles::new(texts);
    let in_sources = texts.iter().filter(is_source).filter(|text| !tests.contains(&text.path));
    let mut found: Vec<Sentence> =
        in_sources.flat_map(|text| rust::sentences(text, &tests.lines(text))).collect();
    found.extend(texts.iter().filter(|text| is_page(text)).flat_map(pages));
    found.sort_by(|a, b| (&a.path, a.line).cmp(&(&b.path, b.line)));
    let mut seen = BTreeSet::new();
    found.retain(|sentence| seen.insert(sentence.text.clone()));
    found
}

/// Returns true for README.md and for pages of docs/ that are not generated.
fn is_page(text: &Text) -> bool {
    let in_docs =
        text.path.strip_prefix("docs/").is_some_and(|name| !name.contains('/') && name.ends_with(".md"));
    (text.path == "README.md" || in_docs) && !text.text.starts_with(GENERATED)
}

fn pages(page: &Text) -> Vec<Sentence> {
    let blocks = markdown::blocks((1..).zip(page.text.lines()));
    let found = blocks.iter().flat_map(markdown::Block::sentences);
    let of_page = |found: markdown::Found| Sentence {
        kind: Kind::Docs,
        text: found.text,
        path: page.path.clone(),
        line: found.line,
        place: found.place,
        before: found.before,
    };
    found.map(of_page).collect()
}

/// Draws `count` sentences with equal probability, or all if there are fewer.
fn draw(all: &[Sentence], count: usize, seed: u64) -> Vec<Sentence> {
    let mut left: Vec<&Sentence> = all.iter().collect();
    let mut random = SplitMix64(seed);
    (0..count.min(all.len())).map(|_| left.swap_remove(random.below(left.len())).clone()).collect()
}

/// SplitMix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
/// OOPSLA 2014).
#[derive(Debug)]
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(path: &str, text: &str) -> Text {
        Text { path: path.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn the_generator_gives_the_published_numbers() {
        let mut random = SplitMix64(1_234_567);
        assert_eq!([random.next(), random.next()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }

    #[test]
    fn a_seed_gives_the_same_sentences_once_each() {
        let page: String = (0..200).map(|n| format!("This is sentence number {n} here.\n\n")).collect();
        let all = all(&[text("README.md", &page)]);
        assert_eq!(all.len(), 200);
        let drawn = draw(&all, 60, 1);
        assert_eq!(drawn, draw(&all, 60, 1));
        assert_ne!(drawn, draw(&all, 60, 2));
        let different: BTreeSet<&str> = drawn.iter().map(|s| &*s.text).collect();
        assert_eq!(different.len(), 60);
        assert_eq!(draw(&all, 500, 1).len(), 200);
    }

    #[test]
    fn a_sentence_is_printed_with_its_place() {
        let page = "# Disks\n\nA disk has a name. Its name must not change.\n";
        let all = all(&[text("README.md", page)]);
        let printed = all.iter().map(Sentence::with_context).collect::<Vec<_>>();
        let expected = [
            "[docs] README.md › Disks\n   SENTENCE: A disk has a name.\n",
            "[docs] README.md › Disks\n   before: A disk has a name.\n   SENTENCE: Its name must not change.\n",
        ];
        assert_eq!(printed, expected);
    }

    #[test]
    fn sentences_are_of_pages_by_hand_and_of_code_that_is_no_test() {
        let sentence = "Replies to a request of the guest.\n";
        let comment = format!("//! {sentence}");
        let texts = [
            text("README.md", &format!("\n{sentence}")),
            text(
                "docs/cli.md",
                &format!(
                    "{GENERATED} `hob docs`; do not edit. -->\n{}",
                    sentence.replace("Replies", "Waits")
                ),
            ),
            text("docs/decisions/0001-a.md", &sentence.replace("Replies", "Asks")),
            text("crates/a/src/b.rs", &comment.replace("Replies", "Listens")),
            text("crates/a/src/b/tests.rs", &comment.replace("Replies", "Sends")),
            text("crates/a/src/c.rs", &comment),
        ];
        let found: Vec<_> = all(&texts).into_iter().map(|s| (s.kind, s.path, s.line)).collect();
        let expected = [(Kind::Docs, "README.md", 2), (Kind::Comment, "crates/a/src/b.rs", 1)];
        assert_eq!(found, expected.map(|(kind, path, line)| (kind, path.to_owned(), line)));
    }
}
