//! Style rules as tests: each test lists every violation at once.

mod blocking;
mod crates;
mod docs;
mod files;
mod links;
mod reconnect;
mod snippets;
mod source;

use std::fs;
use std::path::{Path, PathBuf};

use crate::shell;

/// Directories of generated or downloaded files.
const NOT_OURS: [&str; 6] = ["target", ".git", "corpus", "artifacts", "node_modules", "proptest-regressions"];

/// A text file of the repository.
struct Text {
    /// Its path relative to the root, with `/`.
    path: String,
    /// Its content.
    text: String,
}

/// Returns every text file of the workspace, ordered by path.
fn texts() -> Vec<Text> {
    let root = shell::root();
    let mut paths = Vec::new();
    walk(&root, &mut paths);
    paths.sort();
    let read = |path: PathBuf| {
        let text = String::from_utf8(fs::read(&path).ok()?).ok()?;
        let path = path.strip_prefix(&root).ok()?.to_str()?.to_owned();
        Some(Text { path, text })
    };
    paths.into_iter().filter_map(read).collect()
}

/// Returns the Rust sources among them.
fn sources() -> Vec<Text> {
    texts().into_iter().filter(|text| text.path.ends_with(".rs")).collect()
}

fn walk(dir: &Path, paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        if NOT_OURS.iter().any(|n| name == *n) {
            continue;
        }
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            walk(&path, paths);
        } else {
            paths.push(path);
        }
    }
}

/// Fails with all of `broken` if there are any.
#[track_caller]
fn none(rule: &str, broken: &[String]) {
    assert!(broken.is_empty(), "{rule}:\n  {}", broken.join("\n  "));
}
