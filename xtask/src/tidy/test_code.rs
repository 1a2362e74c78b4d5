//! Finds the lines of the sources that are tests: test files, and items that are compiled only for
//! tests.

use super::Text;
use super::source::{closing, code_only, identifiers, line_of};

/// Attributes of items that are compiled only for tests.
const ATTRIBUTES: [&str; 4] = ["#[cfg(test)]", "#[test]", "#[tokio::test", "#[cfg(all(test"];

/// Crates that consist of tests.
const TEST_CRATES: [&str; 2] = ["conformance/", "fuzz/"];

/// Files that are compiled only for tests.
#[derive(Debug)]
pub(crate) struct TestFiles {
    /// Modules declared with `#[cfg(test)] mod NAME;`, as paths of their files without `.rs`.
    modules: Vec<String>,
}

impl TestFiles {
    pub(crate) fn new(sources: &[Text]) -> Self {
        let modules = sources.iter().flat_map(|source| {
            let code = code_only(&source.text);
            let items = items(&code);
            let names: Vec<String> = items.into_iter().filter_map(|item| module(&code[item])).collect();
            names.into_iter().map(|name| format!("{}/{name}", directory(&source.path)))
        });
        Self { modules: modules.collect() }
    }

    pub(crate) fn contains(&self, path: &str) -> bool {
        let in_module = |m: &String| {
            path.strip_prefix(m.as_str()).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
        };
        path.contains("/tests/")
            || path.ends_with("/tests.rs")
            || TEST_CRATES.iter().any(|name| path.starts_with(name))
            || self.modules.iter().any(in_module)
    }

    /// Returns for each line of a source whether the line belongs to a test.
    pub(crate) fn lines(&self, source: &Text) -> Vec<bool> {
        let count = source.text.lines().count();
        if self.contains(&source.path) {
            return vec![true; count];
        }
        let code = code_only(&source.text);
        let lines: Vec<&str> = source.text.lines().collect();
        let mut is_test = vec![false; count];
        for item in items(&code) {
            let mut first = line_of(&code, item.start) - 1;
            // Comments and other attributes belong to the item.
            let belongs =
                |line: &str| line.trim_start().starts_with("///") || line.trim_start().starts_with("#[");
            while first > 0 && belongs(lines[first - 1]) {
                first -= 1;
            }
            let last = line_of(&code, item.end.saturating_sub(1));
            is_test[first..last.min(count)].fill(true);
        }
        is_test
    }
}

/// Returns the ranges of items that are compiled only for tests, each from its attribute to its
/// end.
fn items(code: &str) -> Vec<std::ops::Range<usize>> {
    let starts = ATTRIBUTES.iter().flat_map(|attribute| code.match_indices(attribute).map(|(at, _)| at));
    starts.map(|start| start..item_end(code, start)).collect()
}

/// Returns the end of the item at `start`: after its block or semicolon, or the end of the
/// enclosing block.
fn item_end(code: &str, start: usize) -> usize {
    let mut at = start;
    while let Some(byte) = code.as_bytes().get(at) {
        match byte {
            b'{' => return closing(code, at),
            b'(' | b'[' => at = closing(code, at),
            b';' => return at + 1,
            b'}' => return at,
            _ => at += 1,
        }
    }
    code.len()
}

/// Returns the name of the module that an item declares without a block.
fn module(item: &str) -> Option<String> {
    let words: Vec<&str> = identifiers(item).map(|(_, word)| word).collect();
    let at = words.iter().position(|word| *word == "mod")?;
    item.ends_with(';').then(|| words.get(at + 1).map(|name| (*name).to_owned()))?
}

/// Returns the directory of the modules that a file declares.
fn directory(path: &str) -> &str {
    let stem = path.strip_suffix(".rs").unwrap_or(path);
    let (parent, name) = stem.rsplit_once('/').unwrap_or(("", stem));
    if ["mod", "lib", "main"].contains(&name) { parent } else { stem }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Text {
        Text { path: path.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn modules_of_tests_are_found() {
        let sources = [
            source("crates/a/src/b/mod.rs", "#[cfg(test)]\nmod fake;\nmod real;\n"),
            source(
                "crates/a/src/c.rs",
                "#[cfg(test)]\npub(crate) mod judge;\n#[cfg(test)]\nmod d { mod e; }\n",
            ),
        ];
        let files = TestFiles::new(&sources);
        assert_eq!(files.modules, ["crates/a/src/b/fake", "crates/a/src/c/judge"]);
        for path in [
            "crates/a/src/b/fake.rs",
            "crates/a/src/b/fake/x.rs",
            "crates/a/src/tests.rs",
            "conformance/src/lib.rs",
        ] {
            assert!(files.contains(path), "{path}");
        }
        for path in ["crates/a/src/b/real.rs", "crates/a/src/b/fakes.rs", "crates/a/src/c.rs"] {
            assert!(!files.contains(path), "{path}");
        }
    }

    #[test]
    fn lines_of_tests_are_found() {
        let text = "fn a() {}\n\n/// One.\n#[test]\nfn b() {\n    c(\"}\");\n}\nfn d() {}\n#[cfg(test)]\nuse x::{y, z};\nfn e() {}\n";
        let source = source("crates/a/src/b.rs", text);
        let lines = TestFiles::new(&[]).lines(&source);
        let tests: Vec<usize> = (1..=lines.len()).filter(|n| lines[n - 1]).collect();
        assert_eq!(tests, [3, 4, 5, 6, 7, 9, 10]);
    }
}
