//! Checks the dependencies between modules of the daemon: which services may use which others
//! (docs/decisions/0049-services.md), and that the modules of the crate form no cycle.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{code_only, identifiers};
use super::test_code::TestFiles;
use super::{none, sources};

/// The sources of the daemon.
const DAEMON: &str = "crates/daemon/src/";

const SERVICES: &str = "crates/daemon/src/services/";

/// The path of the module of services.
const BELOW: &str = "crate::services::";

/// A service or shared module in `services/`, and the other modules that it may use.
struct Rule {
    /// Name of a folder or file, without `.rs`.
    name: &'static str,
    /// Names separated by spaces.
    may_use: &'static str,
}

/// All modules from the lowest layer to the highest one. A module may use only modules that the
/// list has before it.
#[rustfmt::skip]
const RULES: &[Rule] = &[
    Rule { name: "ending", may_use: "" },
    Rule { name: "flash", may_use: "" },
    Rule { name: "peer_access", may_use: "" },
    Rule { name: "registry", may_use: "flash" },
    Rule { name: "tasks", may_use: "registry" },
    Rule { name: "qos", may_use: "registry tasks" },
    Rule { name: "exports", may_use: "flash registry tasks" },
    Rule { name: "swap", may_use: "flash registry tasks" },
    Rule { name: "remote_flash", may_use: "flash peer_access qos registry tasks" },
    Rule { name: "observe", may_use: "peer_access qos registry swap tasks" },
    Rule { name: "pools", may_use: "flash observe peer_access registry remote_flash swap tasks" },
    Rule { name: "disks", may_use: "exports flash observe peer_access pools qos registry tasks" },
    Rule { name: "ownership", may_use: "peer_access pools registry" },
    Rule { name: "migration", may_use: "disks exports flash observe ownership peer_access pools qos registry tasks" },
    Rule { name: "moves", may_use: "disks exports flash migration observe ownership pools registry" },
    Rule { name: "cluster", may_use: "disks ending flash migration moves observe ownership registry remote_flash tasks" },
    Rule { name: "hob_toml", may_use: "disks flash pools qos registry tasks" },
    Rule { name: "startup", may_use: "disks exports flash hob_toml migration pools qos registry remote_flash swap tasks" },
    Rule { name: "shutdown", may_use: "disks ending exports flash migration pools registry tasks" },
    Rule { name: "events", may_use: "disks exports migration observe peer_access pools qos registry remote_flash" },
];

/// Modules whose types are fields of entries in the registry. The type of such a field shows which
/// service changes the field.
const FIELDS_OF_ENTRIES: [&str; 4] = ["disks", "exports", "observe", "pools"];

/// Maximum number of `impl Services` blocks. New methods belong into a service.
const CONNECTING_BLOCKS_MAX: usize = 1;

/// Maximum number of methods of `Services`: this type only connects the services, and sets values
/// before the start.
const CONNECTING_METHODS_MAX: usize = 5;

impl Rule {
    fn may_use(&self, name: &str) -> bool {
        let is_field = self.name == "registry" && FIELDS_OF_ENTRIES.contains(&name);
        name == self.name || is_field || self.may_use.split_whitespace().any(|other| other == name)
    }
}

/// Returns the names of modules and items directly below the module `root` that a file uses. `path`
/// is relative to the folder of `root`, which is a path such as `crate::services::`.
fn used(root: &str, path: &str, text: &str) -> Vec<String> {
    let code = code_only(text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text));
    let parts = path.trim_end_matches(".rs").split('/');
    let depth = parts.filter(|part| *part != "mod").count();
    let mut found = Vec::new();
    for (at, _) in code.match_indices(root) {
        found.extend(first_names(&code[at + root.len()..]));
    }
    for (at, _) in code.match_indices("super::") {
        if code[..at].ends_with("super::") {
            continue;
        }
        let mut rest = &code[at..];
        let mut levels = 0;
        while let Some(next) = rest.strip_prefix("super::") {
            (rest, levels) = (next, levels + 1);
        }
        if levels == depth {
            found.extend(first_names(rest));
        }
    }
    found.sort();
    found.dedup();
    found
}

/// Returns the first name of a path, or the first names of a group in braces.
fn first_names(path: &str) -> Vec<String> {
    let name = |text: &str| -> String {
        text.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let Some(group) = path.strip_prefix('{') else { return vec![name(path)] };
    let (mut level, mut start, mut names) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => level += 1,
            ',' if level == 0 => {
                names.push(name(&group[start..at]));
                start = at + 1;
            }
            '}' if level == 0 => {
                names.push(name(&group[start..at]));
                break;
            }
            '}' => level -= 1,
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

fn is_below(path: &str, name: &str) -> bool {
    path.strip_prefix(name).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

#[test]
fn services_use_only_lower_layers() {
    let sources = sources();
    let mut broken = Vec::new();
    for rule in RULES {
        let files = sources.iter().filter_map(|s| Some((s.path.strip_prefix(SERVICES)?, &s.text)));
        let mut files = files.filter(|(path, _)| is_below(path, rule.name)).peekable();
        assert!(files.peek().is_some(), "{SERVICES}{} is gone", rule.name);
        for (path, text) in files {
            let names = used(BELOW, path, text).into_iter().filter(|name| !rule.may_use(name));
            broken.extend(names.map(|name| format!("{path} uses {name}")));
            if identifiers(&code_only(text)).any(|(_, name)| name == "Services") {
                broken.push(format!("{path} names Services"));
            }
        }
    }
    none("a service uses only what RULES permits (docs/decisions/0049-services.md)", &broken);
}

#[test]
fn every_module_has_a_rule_and_uses_only_earlier_ones() {
    let sources = sources();
    let root = format!("{}.rs", SERVICES.trim_end_matches('/'));
    let root = sources.iter().find(|s| s.path == root).expect("the file that connects the services");
    let code = code_only(&root.text);
    let modules = code.lines().filter_map(|line| line.trim_start_matches("pub(crate) ").strip_prefix("mod "));
    let modules = modules.map(|name| name.trim_end_matches(';')).filter(|name| *name != "tests");
    let has_rule = |name: &&str| RULES.iter().any(|rule| rule.name == *name);
    let mut broken: Vec<String> =
        modules.filter(|name| !has_rule(name)).map(|name| format!("{name} has no rule")).collect();
    for (layer, rule) in RULES.iter().enumerate() {
        let is_lower = |name: &&str| RULES[..layer].iter().any(|lower| lower.name == *name);
        let higher = rule.may_use.split_whitespace().filter(|name| !is_lower(name));
        broken.extend(higher.map(|name| format!("{} may use {name}, which is not below it", rule.name)));
    }
    none("RULES lists all modules from the lowest layer to the highest one", &broken);
}

/// Returns the cycles of modules: removes the lowest and highest modules until none can be removed.
fn cycles(mut uses: BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let is_end = |uses: &BTreeMap<String, BTreeSet<String>>, name: &String| {
        uses[name].is_empty() || !uses.values().any(|used| used.contains(name))
    };
    while let Some(end) = uses.keys().find(|name| is_end(&uses, name)).cloned() {
        uses.remove(&end);
        uses.values_mut().for_each(|used| _ = used.remove(&end));
    }
    uses.into_iter().map(|(name, used)| format!("{name} uses {used:?}")).collect()
}

#[test]
fn the_modules_of_the_daemon_form_no_cycle() {
    let sources = sources();
    let tests = TestFiles::new(&sources);
    let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in sources.iter().filter(|source| !tests.contains(&source.path)) {
        let Some(path) = source.path.strip_prefix(DAEMON).filter(|path| *path != "lib.rs") else { continue };
        let name = path.split('/').next().unwrap_or(path).trim_end_matches(".rs");
        uses.entry(name.to_owned()).or_default().extend(used("crate::", path, &source.text));
    }
    let modules: BTreeSet<String> = uses.keys().cloned().collect();
    for (name, used) in &mut uses {
        used.retain(|other| other != name && modules.contains(other));
    }
    assert!(uses["http"].contains("services"), "no uses are found");
    none("a module of the daemon uses no module that uses it in turn", &cycles(uses));
}

#[test]
fn the_struct_services_only_connects_the_services() {
    let sources = sources();
    let below = sources.iter().filter(|s| s.path.starts_with(SERVICES.trim_end_matches('/')));
    let code: Vec<String> = below.map(|s| code_only(&s.text)).collect();
    let blocks: usize = code.iter().map(|code| code.matches("impl Services {").count()).sum();
    let block = |code: &String| Some(code.split("impl Services {").nth(1)?.split("\n}\n").next()?.to_owned());
    let methods: usize = code.iter().filter_map(block).map(|block| block.matches(" fn ").count()).sum();
    assert!(
        blocks <= CONNECTING_BLOCKS_MAX && methods <= CONNECTING_METHODS_MAX,
        "{blocks} `impl Services` blocks with {methods} methods; {CONNECTING_BLOCKS_MAX} with \
         {CONNECTING_METHODS_MAX} are allowed: put the new methods into a service"
    );
}

#[test]
fn uses_are_found() {
    let text = "use super::super::flash;\nuse super::{Place, work};\nuse crate::services::pools::{a, b};\n\
        fn f() { super::super::tasks::g() }\n";
    assert_eq!(used(BELOW, "swap/work.rs", text), ["flash", "pools", "tasks"]);
    assert_eq!(
        used(BELOW, "swap/mod.rs", "use super::registry::{A, B};\nuse super::{c::{d, e}, f};"),
        ["c", "f", "registry"]
    );
    assert_eq!(used(BELOW, "tasks.rs", "use super::api_error::ApiError;"), ["api_error"]);
}
