//! Checks which crates may depend on which, with `cargo metadata`.

use serde_json::Value;

use super::none;
use crate::shell;

/// A crate of the workspace, and the workspace crates on which it may depend.
struct Rule {
    name: &'static str,
    may_name: &'static [&'static str],
}

const RULES: &[Rule] = &[
    Rule { name: "hob-engine", may_name: &[] },
    Rule { name: "hob-nbd", may_name: &[] },
    Rule { name: "hob-world", may_name: &["hob-engine"] },
    // Tests of the storage use an object store.
    Rule { name: "hob-storage", may_name: &["hob-engine", "hob-nbd", "hob-clouds"] },
    Rule { name: "hob-clouds", may_name: &["hob-storage"] },
    Rule { name: "hob-frontends", may_name: &["hob-engine", "hob-nbd"] },
    Rule { name: "hob-control", may_name: &[] },
    Rule { name: "hob-trace", may_name: &[] },
    Rule { name: "hob-lab", may_name: &["hob-engine", "hob-nbd", "hob-world", "hob-trace"] },
    Rule {
        name: "hob-shard",
        may_name: &["hob-engine", "hob-nbd", "hob-storage", "hob-frontends", "hob-control"],
    },
    Rule {
        name: "hob-daemon",
        may_name: &["hob-engine", "hob-nbd", "hob-storage", "hob-frontends", "hob-control", "hob-shard"],
    },
    Rule {
        name: "hob-cli",
        may_name: &[
            "hob-engine",
            "hob-nbd",
            "hob-world",
            "hob-storage",
            "hob-control",
            "hob-trace",
            "hob-lab",
            "hob-daemon",
        ],
    },
    Rule { name: "hob-psk", may_name: &["hob-storage", "hob-daemon"] },
    Rule { name: "hob", may_name: &["hob-cli", "hob-clouds", "hob-psk"] },
    Rule { name: "conformance", may_name: &[] },
    Rule { name: "torture", may_name: &["conformance"] },
    Rule { name: "xtask", may_name: &[] },
    // Benchmarks read traces, use the lab's charts, and compare all policies of the engine.
    Rule { name: "bench", may_name: &["conformance", "hob-engine", "hob-trace", "hob-lab", "xtask"] },
];

/// Crates that may use JSON and HTTP. Test programs parse the JSON of other programs and are not
/// part of the product.
const MAY_SPEAK_HTTP: [&str; 7] =
    ["hob-control", "hob-daemon", "hob-cli", "xtask", "bench", "conformance", "torture"];
const HTTP: [&str; 6] = ["serde_json", "axum", "hyper", "hyper-util", "http-body-util", "utoipa"];

fn packages() -> Vec<Value> {
    let metadata = shell::metadata().expect("cargo metadata");
    metadata["packages"].as_array().expect("a list of packages").clone()
}

fn name(value: &Value) -> &str {
    value["name"].as_str().expect("a name")
}

fn dependencies(package: &Value) -> Vec<&str> {
    package["dependencies"].as_array().expect("a list of dependencies").iter().map(name).collect()
}

#[test]
fn every_crate_has_a_rule() {
    let packages = packages();
    let unruly: Vec<String> = packages
        .iter()
        .map(|p| name(p).to_owned())
        .filter(|n| !RULES.iter().any(|rule| rule.name == n))
        .collect();
    none("every crate of the workspace has a rule in RULES", &unruly);
}

/// Checks dependencies between crates, including development dependencies.
#[test]
fn crates_name_only_whom_they_may() {
    let packages = packages();
    let ours: Vec<&str> = packages.iter().map(name).collect();
    let mut broken = Vec::new();
    for package in &packages {
        let allowed = RULES.iter().find(|r| r.name == name(package)).map_or(&[][..], |r| r.may_name);
        for dependency in dependencies(package) {
            if ours.contains(&dependency) && !allowed.contains(&dependency) {
                broken.push(format!("{} names {dependency}", name(package)));
            }
        }
    }
    none("crate directions (docs/ARCHITECTURE.md)", &broken);
}

#[test]
fn only_control_and_hob_know_json_and_http() {
    let mut broken = Vec::new();
    for package in packages().iter().filter(|p| !MAY_SPEAK_HTTP.contains(&name(p))) {
        for dependency in dependencies(package).into_iter().filter(|d| HTTP.contains(d)) {
            broken.push(format!("{} depends on {dependency}", name(package)));
        }
    }
    none("only control and hob know JSON and HTTP", &broken);
}

/// Checks that clippy forbids nondeterministic calls in the crates whose runs must be reproducible.
#[test]
fn the_deterministic_crates_are_fenced() {
    for name in ["engine", "nbd", "world"] {
        let path = shell::root().join("crates").join(name).join("clippy.toml");
        let rules = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        for call in ["std::time::Instant::now", "std::thread::spawn", "std::fs::read", "std::net::TcpStream"]
        {
            assert!(rules.contains(call), "{} does not forbid {call}", path.display());
        }
    }
}
