//! Checks the permitted dependencies between services of the daemon
//! (docs/decisions/0049-services.md).

use super::source::{code_only, identifiers};
use super::{none, sources};

const MANAGER: &str = "crates/hob/src/daemon/manager/";

/// A service or shared module in `manager/`, and the other modules that it may use.
struct Rule {
    /// Name of a folder or file, without `.rs`.
    name: &'static str,
    may_use: &'static [&'static str],
}

const RULES: &[Rule] = &[
    // Disk entries have fields whose types belong to the services disks, exports, observe and
    // pools.
    Rule {
        name: "registry",
        may_use: &["api_error", "disks", "exports", "flash", "observe", "pools", "stalls"],
    },
    Rule { name: "tasks", may_use: &["api_error", "registry"] },
    Rule { name: "qos", may_use: &["api_error", "registry", "tasks", "definitions"] },
    Rule {
        name: "disks",
        may_use: &[
            "api_error",
            "exports",
            "flash",
            "observe",
            "peer_access",
            "pools",
            "qos",
            "registry",
            "settings",
            "tasks",
        ],
    },
    Rule { name: "exports", may_use: &["api_error", "flash", "registry", "tasks"] },
    Rule { name: "peer_access", may_use: &["api_error"] },
    Rule {
        name: "pools",
        may_use: &[
            "api_error",
            "flash",
            "observe",
            "peer_access",
            "registry",
            "remote_flash",
            "settings",
            "swap",
            "tasks",
        ],
    },
    Rule {
        name: "remote_flash",
        may_use: &["api_error", "flash", "peer_access", "qos", "registry", "tasks"],
    },
    Rule {
        name: "observe",
        may_use: &["api_error", "peer_access", "qos", "registry", "settings", "swap", "tasks"],
    },
    Rule { name: "swap", may_use: &["api_error", "flash", "registry", "tasks"] },
];

/// Maximum number of remaining `impl Manager` blocks. A commit that moves blocks into a service
/// must lower this number.
const MANAGER_BLOCKS_MAX: usize = 22;

/// Returns the names of modules and items directly below `manager` that a file uses. `path` is
/// relative to `manager/`.
fn used(path: &str, text: &str) -> Vec<String> {
    let code = code_only(text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text));
    let parts = path.trim_end_matches(".rs").split('/');
    let depth = parts.filter(|part| *part != "mod").count();
    let mut found = Vec::new();
    for (at, _) in code.match_indices("daemon::manager::") {
        found.extend(first_names(&code[at + "daemon::manager::".len()..]));
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
        let files = sources.iter().filter_map(|s| Some((s.path.strip_prefix(MANAGER)?, &s.text)));
        let mut files = files.filter(|(path, _)| is_below(path, rule.name)).peekable();
        assert!(files.peek().is_some(), "{MANAGER}{} is gone", rule.name);
        for (path, text) in files {
            let is_wrong = |name: &String| name != rule.name && !rule.may_use.contains(&name.as_str());
            let names = used(path, text).into_iter().filter(is_wrong);
            broken.extend(names.map(|name| format!("{path} uses {name}")));
            if identifiers(&code_only(text)).any(|(_, name)| name == "Manager") {
                broken.push(format!("{path} names Manager"));
            }
        }
    }
    none("a service uses only what RULES permits (docs/decisions/0049-services.md)", &broken);
}

#[test]
fn the_manager_shrinks() {
    let sources = sources();
    let below = sources.iter().filter(|s| s.path.starts_with(MANAGER.trim_end_matches('/')));
    let blocks: usize = below.map(|s| code_only(&s.text).matches("impl Manager {").count()).sum();
    assert!(
        blocks <= MANAGER_BLOCKS_MAX,
        "{blocks} `impl Manager` blocks, {MANAGER_BLOCKS_MAX} are allowed: put the new methods into a service"
    );
}

#[test]
fn uses_are_found() {
    let text = "use super::super::flash;\nuse super::{Place, work};\nuse crate::daemon::manager::pools::{a, b};\n\
        fn f() { super::super::tasks::g() }\n";
    assert_eq!(used("swap/work.rs", text), ["flash", "pools", "tasks"]);
    assert_eq!(
        used("swap/mod.rs", "use super::registry::{A, B};\nuse super::{c::{d, e}, f};"),
        ["c", "f", "registry"]
    );
    assert_eq!(used("tasks.rs", "use super::api_error::ApiError;"), ["api_error"]);
}
