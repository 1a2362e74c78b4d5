//! `cargo xtask config-reference` generates docs/config.md and packaging/hob.toml.5 from the types
//! of hob.toml.
//!
//! The generator reads the Rust sources as text. A struct is a section, each field is a key, and
//! the doc comment is the key's description. Types from other files are values.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result};

use crate::shell;

const PAGE: &str = "docs/config.md";
const MANUAL: &str = "packaging/hob.toml.5";

/// Source files with the types of hob.toml. The first struct of the first file is the whole
/// configuration file.
const SOURCES: [&str; 12] = [
    "crates/daemon/src/config.rs",
    "crates/daemon/src/config/control.rs",
    "crates/daemon/src/config/nbd.rs",
    "crates/daemon/src/config/migrate.rs",
    "crates/daemon/src/config/peers.rs",
    "crates/daemon/src/config/cluster.rs",
    "crates/daemon/src/allow.rs",
    "crates/daemon/src/tls/mod.rs",
    "crates/control/src/changes.rs",
    "crates/control/src/settings.rs",
    "crates/control/src/export.rs",
    "crates/control/src/qos.rs",
];

/// Replacements for declared types that serde reads in another form.
const TYPES: [(&str, &str); 10] = [
    ("String", "text"),
    ("PathBuf", "path"),
    ("Endpoint", "address"),
    ("Size", "size"),
    ("FlashWrites", "text"),
    ("RingKind", "text"),
    ("BackingTimeout", "text"),
    ("Role", "text"),
    ("CertificateMatch", "text"),
    ("ClientMatch", "text"),
];

#[derive(Debug, PartialEq, Eq)]
struct Key {
    name: String,
    /// Type of the key without `Option` and `Vec`.
    of: String,
    is_list: bool,
    is_required: bool,
    text: String,
}

#[derive(Debug)]
struct Section {
    name: String,
    text: String,
    keys: Vec<Key>,
}

/// A table of hob.toml: path, keys and description.
type Table<'a> = (String, &'a Section, String);

/// Writes the page and the manual.
pub(crate) fn run() -> Result<()> {
    let (page, manual) = files()?;
    fs::write(shell::root().join(PAGE), page).with_context(|| format!("cannot write {PAGE}"))?;
    fs::write(shell::root().join(MANUAL), manual).with_context(|| format!("cannot write {MANUAL}"))?;
    println!("wrote {PAGE} and {MANUAL}");
    Ok(())
}

/// Returns the content of the page and of the manual.
fn files() -> Result<(String, String)> {
    let mut sections = Vec::new();
    for path in SOURCES {
        let text =
            fs::read_to_string(shell::root().join(path)).with_context(|| format!("cannot read {path}"))?;
        sections.extend(parse(&text));
    }
    let root = sections.first().context("the first source file of hob.toml's types has no struct")?;
    let mut all = vec![(String::new(), root, String::new())];
    let mut next = 0;
    while next < all.len() {
        let (path, section) = (all[next].0.clone(), all[next].1);
        for key in &section.keys {
            let Some(of) = sections.iter().find(|section| section.name == key.of) else { continue };
            let inner = if path.is_empty() { key.name.clone() } else { format!("{path}.{}", key.name) };
            // The doc comment of an API type describes a request.
            let text = if of.text.starts_with('`') { &key.text } else { &of.text };
            all.push((if key.is_list { format!("{inner}[]") } else { inner }, of, text.clone()));
        }
        next += 1;
    }
    all[1..].sort_by(|a, b| a.0.cmp(&b.0));
    Ok((page(&all, &sections), manual(&all, &sections)))
}

/// Returns the structs of a source that have at least one key.
fn parse(text: &str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    let (mut doc, mut attributes, mut inside) = (String::new(), String::new(), false);
    let mut has_defaults = false;
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.starts_with("#[cfg(test)]") {
            break;
        }
        if let Some(comment) = trimmed.strip_prefix("///") {
            doc = format!("{doc} {}", comment.trim()).trim().to_owned();
            continue;
        }
        if trimmed.starts_with("#[") {
            attributes.push_str(trimmed);
            continue;
        }
        let (text, serde) = (std::mem::take(&mut doc), std::mem::take(&mut attributes));
        let declared = trimmed.split("struct ").nth(1).filter(|_| trimmed.ends_with('{'));
        let opens = trimmed == "settings! {";
        if declared.is_some() || opens {
            // The macro's fields are those of a cache, except pool and size.
            let name = declared
                .map_or("CacheSettings".to_owned(), |rest| rest.trim_end_matches([' ', '{']).to_owned());
            sections.push(Section { name, text, keys: Vec::new() });
            (inside, has_defaults) = (true, serde.contains("default)"));
        } else if trimmed == "}" {
            inside = false;
        } else if inside
            && let Some(mut key) = key(trimmed, &serde, text)
            && let Some(section) = sections.last_mut()
        {
            key.is_required &= !has_defaults;
            section.keys.push(key);
        }
    }
    let settings =
        sections.iter().position(|section| section.name == "CacheSettings" && !section.keys.is_empty());
    let settings = settings.map(|at| sections.remove(at).keys).unwrap_or_default();
    for section in sections.iter_mut().filter(|section| section.name == "CacheEnable") {
        let copied = settings.iter().map(|key| Key {
            is_required: false,
            text: key.text.clone(),
            name: key.name.clone(),
            of: key.of.clone(),
            ..*key
        });
        section.keys.extend(copied);
    }
    sections.retain(|section| !section.keys.is_empty());
    sections
}

/// Parses a struct field, unless the field is skipped or flattened.
fn key(line: &str, serde: &str, text: String) -> Option<Key> {
    let (name, declared) = line.strip_suffix(',')?.split_once(": ")?;
    let name = name.rsplit(' ').next()?;
    let is_name = name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    if !is_name || serde.contains("skip)") || serde.contains("flatten") {
        return None;
    }
    let inner = |declared: &str, around: &str| {
        declared.strip_prefix(around).and_then(|rest| rest.strip_suffix('>')).map(str::to_owned)
    };
    let optional = inner(declared, "Option<");
    let declared = optional.clone().unwrap_or_else(|| declared.to_owned());
    let list = inner(&declared, "Vec<");
    let renamed = serde.split("rename = \"").nth(1).and_then(|rest| rest.split('"').next());
    Some(Key {
        name: renamed.unwrap_or(name).to_owned(),
        is_list: list.is_some(),
        is_required: optional.is_none() && !serde.contains("default"),
        of: list.unwrap_or(declared),
        text,
    })
}

fn of_key(key: &Key, sections: &[Section]) -> String {
    let known = TYPES.iter().find(|(declared, _)| *declared == key.of).map(|(_, written)| *written);
    let of = match known {
        Some(written) => written,
        None if sections.iter().any(|section| section.name == key.of) => "table",
        None if key.of == "bool" => "true or false",
        None => "number",
    };
    if key.is_list { format!("list: {of}") } else { of.to_owned() }
}

fn title(path: &str) -> String {
    match path.strip_suffix("[]") {
        Some(path) => format!("[[{}]]", path.replace("[]", "")),
        None => format!("[{}]", path.replace("[]", "")),
    }
}

fn page(all: &[Table<'_>], sections: &[Section]) -> String {
    let mut page = "<!-- Written by `cargo xtask config-reference`; do not edit. -->\n# hob.toml\n\nFor administrators who configure the daemon.\n\nThe daemon reads `/etc/hob/hob.toml`, or the file given with `--config`. Unknown keys are errors.\n\
        `hob daemon --check` checks the file, and `hob config apply` applies it to a running daemon. Sizes are\n\
        numbers of bytes or texts such as `\"64G\"`. This page is generated from the types of the configuration.\n"
        .to_owned();
    for (path, section, text) in all {
        let heading = if path.is_empty() { "Top level".to_owned() } else { format!("`{}`", title(path)) };
        let _ = write!(page, "\n## {heading}\n\n");
        if !path.is_empty() {
            let _ = write!(page, "{text}\n\n");
        }
        page.push_str("| key | value | meaning |\n|---|---|---|\n");
        for key in &section.keys {
            let required = if key.is_required && !path.is_empty() { " (required)" } else { "" };
            let text = key.text.replace('|', "\\|");
            let _ = writeln!(page, "| `{}` | {}{required} | {text} |", key.name, of_key(key, sections));
        }
    }
    page
}

/// Returns the reference as a manual page (man(7)).
fn manual(all: &[Table<'_>], sections: &[Section]) -> String {
    let escape =
        |text: &str| text.replace('\\', "\\e").replace('`', "").replace('-', "\\-").replace("\n.", "\n\\&.");
    let mut manual =
        ".TH HOB.TOML 5\n.SH NAME\nhob.toml \\- configuration of the hob daemon\n.SH DESCRIPTION\n\
        The daemon reads /etc/hob/hob.toml, or the file given with \\-\\-config. Unknown keys are errors.\n\
        .B hob daemon \\-\\-check\nchecks the file;\n.B hob config apply\napplies it to a running daemon.\n\
        Sizes are numbers of bytes or texts such as \"64G\".\n"
            .to_owned();
    for (path, section, text) in all {
        let heading = if path.is_empty() { "TOP LEVEL".to_owned() } else { title(path) };
        let _ = writeln!(manual, ".SH \"{}\"", escape(&heading));
        if !path.is_empty() {
            let _ = writeln!(manual, "{}", escape(text));
        }
        for key in &section.keys {
            let _ = writeln!(
                manual,
                ".TP\n.BR {} \" ({})\"\n{}",
                escape(&key.name),
                of_key(key, sections),
                escape(&key.text)
            );
        }
    }
    manual.push_str(".SH SEE ALSO\nhob(1), hob\\-daemon(1)\n");
    manual
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tidy_config_reference_is_fresh() {
        let (page, manual) = files().unwrap();
        let is = |path: &str| fs::read_to_string(shell::root().join(path)).unwrap_or_default();
        assert!(
            is(PAGE) == page && is(MANUAL) == manual,
            "{PAGE} or {MANUAL} is stale: run `cargo xtask config-reference`"
        );
    }

    #[test]
    fn tidy_config_reference_describes_every_key() {
        let (page, _) = files().unwrap();
        let empty: Vec<&str> =
            page.lines().filter(|line| line.starts_with("| `") && line.ends_with("|  |")).collect();
        assert!(empty.is_empty(), "these keys have no description: {empty:#?}");
        for heading in
            ["`[limits]`", "`[[disk]]`", "`[disk.cache]`", "`[control.tls]`", "`[[nbd]]`", "`[cluster]`"]
        {
            assert!(page.contains(&format!("\n## {heading}\n")), "{heading} is missing");
        }
    }

    #[test]
    fn fields_become_keys() {
        let text = "/// Limits.\npub struct Limits {\n    /// How many\n    /// at once.\n    #[serde(default, rename = \"max\")]\n    \
            pub(crate) most: Vec<Size>,\n    #[serde(skip)]\n    path: PathBuf,\n}\n";
        let sections = parse(text);
        assert_eq!((sections.len(), &*sections[0].name, &*sections[0].text), (1, "Limits", "Limits."));
        let key = &sections[0].keys[0];
        assert_eq!(
            (sections[0].keys.len(), &*key.name, &*key.of, &*key.text),
            (1, "max", "Size", "How many at once.")
        );
        assert!(key.is_list && !key.is_required);
    }
}
