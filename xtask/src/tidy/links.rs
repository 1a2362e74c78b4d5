//! Rules about the documentation site: each page is in the table of contents, and each link and
//! anchor exists.

use std::collections::{BTreeMap, BTreeSet};

use super::{none, texts};
use crate::shell;

/// The table of contents of the site.
const CONTENTS: &str = "docs/SUMMARY.md";

/// Returns the Markdown files of the repository and the site, by path.
fn pages() -> BTreeMap<String, String> {
    let is_page = |path: &str| path.ends_with(".md") && (path.starts_with("docs/") || !path.contains('/'));
    texts().into_iter().filter(|text| is_page(&text.path)).map(|text| (text.path, text.text)).collect()
}

/// Returns the text without code. Fenced blocks become empty lines, and code spans lose their
/// content.
fn prose(text: &str) -> String {
    let mut fenced = false;
    let mut prose = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            // Every second part is between backquotes.
            prose.extend(line.split('`').step_by(2));
        }
        prose.push('\n');
    }
    prose
}

/// Returns the targets of inline links and images with their line numbers, without links to other
/// sites.
fn links(text: &str) -> Vec<(usize, String)> {
    let prose = prose(text);
    let mut found = Vec::new();
    for (number, line) in prose.lines().enumerate() {
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        for (target, _) in targets {
            let is_elsewhere = target.contains("://") || target.starts_with("mailto:");
            if !is_elsewhere && !target.is_empty() {
                found.push((number + 1, target.to_owned()));
            }
        }
    }
    found
}

/// Returns the anchors of a page's headings, as mdBook and GitHub generate them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut fenced = false;
    let mut anchors = BTreeSet::new();
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let title = line.trim_start_matches('#');
        if fenced || title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let kept = title.trim().chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
        let anchor: String =
            kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect();
        // A repeated heading has a number at the end of its anchor.
        let repeated = (1..).map(|n| format!("{anchor}-{n}"));
        let free = std::iter::once(anchor.clone()).chain(repeated).find(|a| !anchors.contains(a));
        anchors.extend(free);
    }
    anchors
}

/// Returns the path of `target`, a link in the file `from`, relative to the repository's root.
/// Returns `None` if the link leaves the repository.
fn resolved(from: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "." | "" => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Returns the reason why a link is broken, if so.
fn broken(pages: &BTreeMap<String, String>, from: &str, link: &str) -> Option<String> {
    let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
    let path = if target.is_empty() { Some(from.to_owned()) } else { resolved(from, target) };
    let Some(path) = path else { return Some(format!("{link} leaves the repository")) };
    if !shell::root().join(&path).exists() {
        return Some(format!("{link}: there is no {path}"));
    }
    if anchor.is_empty() {
        return None;
    }
    let known = pages.get(&path).is_some_and(|text| anchors(text).contains(anchor));
    (!known).then(|| format!("{link}: {path} has no heading for #{anchor}"))
}

#[test]
fn every_link_resolves() {
    let pages = pages();
    let mut found = Vec::new();
    let mut count = 0;
    for (path, text) in &pages {
        for (number, link) in links(text) {
            count += 1;
            found.extend(broken(&pages, path, &link).map(|why| format!("{path}:{number}: {why}")));
        }
    }
    assert!(count > 100, "the pages have only {count} links");
    none("each relative link and anchor of a page resolves", &found);
}

#[test]
fn every_page_is_in_the_table_of_contents_once() {
    let pages = pages();
    let contents = pages.get(CONTENTS).expect("docs/SUMMARY.md");
    let mut listed = BTreeMap::new();
    for (_, link) in links(contents) {
        *listed.entry(resolved(CONTENTS, &link).expect("a page below docs/")).or_insert(0) += 1;
    }
    let mut found: Vec<String> = listed
        .iter()
        .filter(|(_, times)| **times > 1)
        .map(|(path, _)| format!("{path} is listed twice"))
        .collect();
    let absent =
        pages.keys().filter(|p| p.starts_with("docs/") && *p != CONTENTS && !listed.contains_key(*p));
    found.extend(absent.map(|path| format!("{path} is not listed")));
    none("each page of docs/ is in docs/SUMMARY.md once", &found);
}

#[test]
fn links_and_anchors_are_read() {
    let text = "[a](b.md#c) ![d](e.svg)\n```\n[no](x)\n```\n`[no](y)` [z](https://example.org) [t]()\n";
    assert_eq!(links(text), [(1, "b.md#c".to_owned()), (1, "e.svg".to_owned())]);
    let found = anchors("# A map: of `hob`\n## QEMU\n```\n# no\n```\n## QEMU\n");
    assert_eq!(found, BTreeSet::from(["a-map-of-hob", "qemu", "qemu-1"].map(str::to_owned)));
    assert_eq!(resolved("docs/a.md", "../b/c").as_deref(), Some("b/c"));
    assert_eq!(resolved("a.md", "../c"), None);
    let pages = BTreeMap::from([("README.md".to_owned(), "# One\n[x](#one) [y](#two)".to_owned())]);
    assert_eq!(broken(&pages, "README.md", "#one"), None);
    assert!(broken(&pages, "README.md", "#two").is_some());
    assert!(broken(&pages, "README.md", "no-such-file.md").is_some());
}
