//! Reads the tables of docs/decisions/0040-vocabulary.md: old names that code must not use again,
//! and old words and names that are still in use and have to be replaced.

use anyhow::{Context, Result};

use super::Text;

pub(super) const PAGE: &str = "docs/decisions/0040-vocabulary.md";
const IN_TEXT: &str = "## Words in text";
const IN_CODE: &str = "## Names in code";
const REPLACED: &str = "## Names replaced";

/// An old word and its replacement.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) old: String,
    pub(super) new: String,
    pub(super) scope: Scope,
}

/// Files in which a word has the replaced meaning.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Scope {
    /// Text of the scope on the page.
    pub(super) text: String,
    /// Path prefixes of the files, each with a part that the rest of the path must contain. An
    /// empty list means all files.
    paths: Vec<(String, String)>,
    /// Parts of paths that are exempt.
    except: Vec<String>,
}

impl Scope {
    pub(super) fn contains(&self, path: &str) -> bool {
        let matches = |(start, part): &(String, String)| {
            path.strip_prefix(start.as_str()).is_some_and(|rest| rest.contains(part.as_str()))
        };
        (self.paths.is_empty() || self.paths.iter().any(matches))
            && !self.except.iter().any(|part| path.contains(part.as_str()))
    }

    /// Parses a scope such as "several", "hob", "hob: shard/clients, upgrade" or "engine, hob:
    /// services".
    fn of_modules(text: &str) -> Self {
        let mut name = "";
        let mut paths = Vec::new();
        for part in text.split(", ").filter(|_| text != "several") {
            let is_crate = CRATES.contains(&part);
            let (of, module) =
                part.split_once(": ").unwrap_or(if is_crate { (part, "") } else { (name, part) });
            name = of;
            let module = if module.is_empty() { String::new() } else { format!("/{module}") };
            paths.push((format!("crates/{name}"), module));
        }
        Self { text: text.to_owned(), paths, except: Vec::new() }
    }

    /// Parses a scope such as "`crates/daemon/src` except `daemon/state`, `services/swap`".
    fn of_paths(text: &str) -> Self {
        let (paths, except) = text.split_once(" except ").unwrap_or((text, ""));
        let quoted =
            |text: &str| -> Vec<String> { text.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
        let paths = quoted(paths).into_iter().map(|path| (path, String::new())).collect();
        Self { text: text.replace('`', ""), paths, except: quoted(except) }
    }
}

const CRATES: [&str; 12] = [
    "cli",
    "control",
    "daemon",
    "engine",
    "frontends",
    "hob",
    "lab",
    "nbd",
    "shard",
    "storage",
    "trace",
    "world",
];

/// Tables of the vocabulary page: old words in text and old names in code that have to be replaced,
/// and names that are replaced already.
#[derive(Debug)]
pub(super) struct Vocabulary {
    pub(super) in_text: Vec<Word>,
    pub(super) in_code: Vec<Word>,
    pub(super) replaced: Vec<Word>,
}

impl Vocabulary {
    pub(super) fn read(texts: &[Text]) -> Result<Self> {
        let page =
            texts.iter().find(|text| text.path == PAGE).with_context(|| format!("{PAGE} is missing"))?;
        Ok(Self::parse(&page.text))
    }

    fn parse(page: &str) -> Self {
        let in_text = rows(page, IN_TEXT).filter_map(|cells| match cells[..] {
            [old, new] => Some(words(old, new, &Scope::default)),
            _ => None,
        });
        let named = |heading, scope: fn(&str) -> Scope| {
            let words = rows(page, heading).filter_map(move |cells| match cells[..] {
                [old, at, new] => Some(words(old, new, &|| scope(at))),
                _ => None,
            });
            words.flatten().collect()
        };
        Self {
            in_text: in_text.flatten().collect(),
            in_code: named(IN_CODE, Scope::of_modules),
            replaced: named(REPLACED, Scope::of_paths),
        }
    }
}

/// Returns the rows of the table below a heading, without the table head.
fn rows<'a>(page: &'a str, heading: &str) -> impl Iterator<Item = Vec<&'a str>> {
    let lines = page.lines().skip_while(move |line| *line != heading).skip(1);
    let table = lines.take_while(|line| !line.starts_with("## ")).filter(|line| line.starts_with('|'));
    table.skip(2).map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
}

/// Returns the words of one row. A row with several old words has one new word for each of them, or
/// one new word for all.
fn words(old: &str, new: &str, scope: &dyn Fn() -> Scope) -> Vec<Word> {
    let old: Vec<String> = old.split(", ").map(bare).collect();
    let each: Vec<&str> = new.split(", ").collect();
    let pairs = old.iter().enumerate().map(|(n, word)| {
        let new = if each.len() == old.len() { each[n] } else { new };
        Word { old: word.clone(), new: new.replace('`', ""), scope: scope() }
    });
    pairs.collect()
}

/// Returns the word without backquotes, type and remark in parentheses.
fn bare(cell: &str) -> String {
    let cell = cell.split(" (").next().unwrap_or(cell).trim_matches('`');
    cell.rsplit("::").next().unwrap_or(cell).to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::source::{code_only, identifiers};
    use super::super::{none, sources, texts};
    use super::*;

    /// Returns where the code of a file uses a replaced name.
    fn returned(replaced: &[Word], path: &str, text: &str) -> Vec<String> {
        let here: Vec<&Word> = replaced.iter().filter(|word| word.scope.contains(path)).collect();
        let code = code_only(text);
        let find = |(line, name): (usize, &str)| {
            let word = here.iter().find(|word| word.old == name)?;
            Some(format!("{path}:{line}: {name}: write {}", word.new))
        };
        if here.is_empty() { Vec::new() } else { identifiers(&code).filter_map(find).collect() }
    }

    #[test]
    fn replaced_names_do_not_return() {
        let vocabulary = Vocabulary::read(&texts()).expect("the page");
        assert!(vocabulary.replaced.len() >= 14, "{PAGE} has only {} names", vocabulary.replaced.len());
        let sources = sources();
        let applies = |word: &Word| sources.iter().any(|s| word.scope.contains(&s.path));
        let lost: Vec<String> =
            vocabulary.replaced.iter().filter(|w| !applies(w)).map(|w| w.old.clone()).collect();
        none(&format!("each name of \"Names replaced\" in {PAGE} has a path that exists"), &lost);
        let found: Vec<String> =
            sources.iter().flat_map(|s| returned(&vocabulary.replaced, &s.path, &s.text)).collect();
        none(&format!("these names were replaced ({PAGE})"), &found);
    }

    const PAGE_OF_TEST: &str = "# 40\n## Words in text\n\n| old | new |\n|---|---|\n| rest, at rest | quiesced |\n| ground (swap) | device stack |\n\
        \n## Names in code\n\n| old | where | new |\n|---|---|---|\n| `Due`, `DiskQos::due` | engine: qos, lent, hob | `Entitlement` |\n\
        | `lose`, `give_up` | several | `revoke`, `abandon` |\n\
        \n## Names replaced\n\n| old | where | new |\n|---|---|---|\n| `Hall` | `crates/daemon` except `daemon/src/http` | `Listener` |\n";

    #[test]
    fn replaced_names_are_found_in_code_alone() {
        let replaced = Vocabulary::parse(PAGE_OF_TEST).replaced;
        let text = "/// A Hall.\nstruct Halls;\nfn a(b: Hall) { c(\"Hall\") }\n";
        assert_eq!(
            returned(&replaced, "crates/daemon/src/a.rs", text),
            ["crates/daemon/src/a.rs:3: Hall: write Listener"]
        );
        assert!(returned(&replaced, "crates/daemon/src/http/a.rs", text).is_empty());
        assert!(returned(&replaced, "crates/lab/src/a.rs", text).is_empty());
    }

    #[test]
    fn tables_of_the_page_are_read() {
        let vocabulary = Vocabulary::parse(PAGE_OF_TEST);
        let old = |words: &[Word]| words.iter().map(|w| w.old.clone()).collect::<Vec<_>>();
        assert_eq!(old(&vocabulary.in_text), ["rest", "at rest", "ground"]);
        assert_eq!(old(&vocabulary.in_code), ["Due", "due", "lose", "give_up"]);
        assert_eq!((&*vocabulary.in_code[0].new, &*vocabulary.in_code[3].new), ("Entitlement", "abandon"));
        let scope = &vocabulary.in_code[0].scope;
        for path in
            ["crates/engine/src/qos/mod.rs", "crates/engine/src/engine/lent.rs", "crates/hob/src/main.rs"]
        {
            assert!(scope.contains(path), "{path}");
        }
        assert!(!scope.contains("crates/engine/src/index.rs") && !scope.contains("crates/lab/src/qos.rs"));
        assert!(vocabulary.in_code[2].scope.contains("torture/src/main.rs"));
    }
}
