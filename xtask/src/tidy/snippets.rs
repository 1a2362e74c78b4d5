//! Checks that examples on pages use existing commands and options of `hob`, as listed in the
//! generated docs/cli.md.

use std::collections::{BTreeMap, BTreeSet};

use super::{none, texts};

/// Returns the options of each command, by the command's full name. Global options have the name
/// "".
fn commands(cli: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut commands = BTreeMap::from([(String::new(), BTreeSet::new())]);
    let mut command = String::new();
    for line in cli.lines() {
        if let Some(name) =
            line.trim_start_matches('#').strip_prefix(" hob ").filter(|_| line.starts_with('#'))
        {
            command = name.to_owned();
            commands.entry(command.clone()).or_default();
        }
        let Some(cell) = line.strip_prefix("| `") else { continue };
        let names = cell.split('`').next().unwrap_or_default().split([' ', ',', '=']);
        let options = names.filter(|n| n.starts_with('-')).map(str::to_owned);
        commands.entry(command.clone()).or_default().extend(options);
    }
    commands
}

/// Returns the `hob` commands in fenced blocks, without comments, with their line numbers.
fn calls(text: &str) -> Vec<(usize, String)> {
    let mut calls = Vec::new();
    let mut fenced = false;
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        let line = line.trim_start();
        let line = line.strip_prefix("$ ").or_else(|| line.strip_prefix("# ")).unwrap_or(line);
        if fenced && line.starts_with("hob ") {
            let ends = [" #", " |", " &", ";", " >"].map(|end| line.find(end).unwrap_or(line.len()));
            calls.push((number + 1, line[..ends.into_iter().min().unwrap_or(0)].to_owned()));
        }
    }
    calls
}

/// Returns the reason why `hob` would refuse the command, if so.
fn wrong(commands: &BTreeMap<String, BTreeSet<String>>, call: &str) -> Option<String> {
    let words: Vec<&str> = call.split_whitespace().skip(1).collect();
    let known = |n: &usize| commands.contains_key(&words[..*n].join(" "));
    let Some(length) = (1..=words.len().min(3)).rev().find(known) else {
        return Some(format!("there is no command: {call}"));
    };
    let (own, all) = (&commands[&words[..length].join(" ")], &commands[""]);
    let options = words[length..].iter().filter(|w| w.starts_with("--") && w.len() > 2);
    let names = options.map(|option| option.split('=').next().unwrap_or(option));
    let unknown: Vec<&str> =
        names.filter(|n| !own.contains(*n) && !all.contains(*n) && *n != "--help").collect();
    (!unknown.is_empty()).then(|| format!("no option {}: {call}", unknown.join(", ")))
}

#[test]
fn examples_use_commands_and_options_that_exist() {
    let pages: Vec<_> = texts().into_iter().filter(|t| t.path.ends_with(".md")).collect();
    let cli = pages.iter().find(|t| t.path == "docs/cli.md").expect("docs/cli.md");
    let commands = commands(&cli.text);
    let mut found = Vec::new();
    let mut count = 0;
    let by_hand = |path: &str| path == "README.md" || (path.starts_with("docs/") && path != "docs/cli.md");
    for page in pages.iter().filter(|t| by_hand(&t.path)) {
        for (number, call) in calls(&page.text) {
            count += 1;
            found.extend(wrong(&commands, &call).map(|why| format!("{}:{number}: {why}", page.path)));
        }
    }
    assert!(count > 50, "the pages have only {count} examples");
    none("examples use commands and options of docs/cli.md", &found);
}

#[test]
fn wrong_examples_are_found() {
    let cli = "| `-o, --output <O>` | x |\n## hob disk\n### hob disk add\n| `--backing <S>` | x |\n";
    let commands = commands(cli);
    assert_eq!(wrong(&commands, "hob disk add web --backing x --output json"), None);
    assert!(wrong(&commands, "hob disk add web --size 1G").is_some());
    assert!(wrong(&commands, "hob cache").is_some());
    let text = "hob no\n```\n$ hob a --b # c\nhobby\n```\n";
    assert_eq!(calls(text), [(3, "hob a --b".to_owned())]);
}
