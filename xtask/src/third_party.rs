//! The crates that hob is made of: their licences as a text, and a software bill of materials (SBOM)
//! as CycloneDX 1.5 (<https://cyclonedx.org/docs/1.5/json/>).
//!
//! Both files list the crates that are linked into hob on Linux, and the crates that run while hob is
//! built. Crates that only tests use are not included.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::shell;

/// The platform of the package. On other platforms, hob depends on other crates.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";

/// Beginnings of the names of licence files.
const LICENCE_FILES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];

/// Options of the command.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Directory for third-party-licences.txt and hob.cdx.json
    #[arg(long, default_value = "target/third-party")]
    out: PathBuf,
    /// Features of the hob program that the files describe
    #[arg(long, default_value = "")]
    features: String,
}

/// A third-party crate, or hob itself.
#[derive(Debug)]
struct Package {
    id: String,
    name: String,
    version: String,
    licence: String,
    repository: Option<String>,
    directory: PathBuf,
    /// Ids of the crates that this crate uses.
    uses: BTreeSet<String>,
}

impl Package {
    fn url(&self) -> String {
        format!("pkg:cargo/{}@{}", self.name, self.version)
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let (licences, sbom) = write(&shell::root().join(&arguments.out), &arguments.features)?;
    println!("{}\n{}", licences.display(), sbom.display());
    Ok(())
}

/// Writes both files to a directory, and returns their paths.
pub(crate) fn write(directory: &Path, features: &str) -> Result<(PathBuf, PathBuf)> {
    let packages = packages(features)?;
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let (licences, sbom) = (directory.join("third-party-licences.txt"), directory.join("hob.cdx.json"));
    fs::write(&licences, licence_text(&packages)?)?;
    fs::write(&sbom, serde_json::to_string_pretty(&bill(&packages, &checksums()?)?)?)?;
    Ok((licences, sbom))
}

/// Returns the crates that hob uses, directly or not, with hob itself as the first one.
fn packages(features: &str) -> Result<Vec<Package>> {
    let mut cargo = shell::cargo(&["metadata", "--locked", "--format-version", "1"]);
    cargo.args(["--filter-platform", PLATFORM, "--manifest-path", "crates/hob/Cargo.toml"]);
    if !features.is_empty() {
        cargo.args(["--features", features]);
    }
    let metadata: Value = serde_json::from_str(&shell::output(&mut cargo)?)?;
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let uses: BTreeMap<String, BTreeSet<String>> =
        list(&metadata["resolve"]["nodes"]).iter().map(|node| (text(&node["id"]), used(node))).collect();
    let all = list(&metadata["packages"]);
    let linked = linked(features)?;
    let is_linked = |package: &Value| linked.contains(&(text(&package["name"]), text(&package["version"])));
    let hob =
        all.iter().find(|package| package["name"] == "hob").context("cargo metadata lists no package hob")?;
    let mut todo = vec![text(&hob["id"])];
    let mut wanted = BTreeSet::new();
    while let Some(id) = todo.pop() {
        todo.extend(uses.get(&id).into_iter().flatten().filter(|used| !wanted.contains(*used)).cloned());
        wanted.insert(id);
    }
    let mut packages: Vec<Package> = all
        .iter()
        .filter(|package| wanted.contains(&text(&package["id"])) && is_linked(package))
        .map(|package| Package {
            id: text(&package["id"]),
            name: text(&package["name"]),
            version: text(&package["version"]),
            licence: text(&package["license"]),
            repository: package["repository"].as_str().map(str::to_owned),
            directory: Path::new(&text(&package["manifest_path"]))
                .parent()
                .map(Path::to_owned)
                .unwrap_or_default(),
            uses: uses[&text(&package["id"])].clone(),
        })
        .collect();
    packages.sort_by_key(|package| (package.name != "hob", package.name.clone(), package.version.clone()));
    Ok(packages)
}

/// Returns the names and versions of the crates in a hob with these features. Cargo's metadata does
/// not show them, because it merges the features that all crates of the workspace request.
fn linked(features: &str) -> Result<BTreeSet<(String, String)>> {
    let mut cargo = shell::cargo(&["tree", "--locked", "--package", "hob", "--target", PLATFORM]);
    cargo.args(["--edges", "normal,build", "--prefix", "none", "--format", "{p}"]);
    if !features.is_empty() {
        cargo.args(["--features", features]);
    }
    // A line is a name, a version with a `v` before it, and remarks in parentheses.
    let crate_of = |line: &str| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.strip_prefix('v')?.to_owned()))
    };
    Ok(shell::output(&mut cargo)?.lines().filter_map(crate_of).collect())
}

/// Returns the ids of the crates that a node of cargo's graph uses, except in its tests.
fn used(node: &Value) -> BTreeSet<String> {
    let dependencies = node["deps"].as_array().into_iter().flatten();
    let is_test = |dependency: &Value| {
        dependency["dep_kinds"].as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind["kind"] == "dev"))
    };
    let linked = dependencies.filter(|dependency| !is_test(dependency));
    linked.filter_map(|dependency| Some(dependency["pkg"].as_str()?.to_owned())).collect()
}

/// Returns true for a crate of the workspace.
fn is_own(package: &Package) -> bool {
    package.directory.starts_with(shell::root())
}

/// Returns the list of crates with their licences, and each text once.
fn licence_text(packages: &[Package]) -> Result<String> {
    let mut list = String::from(
        "hob contains these crates. Each is followed by its licence as an SPDX expression. The texts of the\n\
         licences follow the list, each with the crates that contain it.\n\n",
    );
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in packages.iter().filter(|package| !is_own(package)) {
        if package.licence.is_empty() {
            bail!("{} {} names no licence", package.name, package.version);
        }
        let repository = package.repository.as_deref().unwrap_or_default();
        writeln!(list, "{} {}: {} {repository}", package.name, package.version, package.licence)?;
        for text in licence_files(&package.directory)? {
            texts.entry(text).or_default().push(format!("{} {}", package.name, package.version));
        }
    }
    for (text, crates) in texts {
        write!(list, "\n{}\n{}\n\n{}\n", "=".repeat(80), crates.join(", "), text.trim_end())?;
    }
    Ok(list)
}

/// Returns the texts of a crate's licence files.
fn licence_files(directory: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        path.is_file() && LICENCE_FILES.iter().any(|begin| name.starts_with(begin))
    });
    paths.sort();
    paths.iter().map(|path| Ok(String::from_utf8_lossy(&fs::read(path)?).replace("\r\n", "\n"))).collect()
}

/// Returns the SHA-256 sums of crates by name and version, from Cargo.lock.
fn checksums() -> Result<BTreeMap<(String, String), String>> {
    let lock = fs::read_to_string(shell::root().join("Cargo.lock"))?;
    let value = |block: &str, key: &str| {
        let line =
            block.lines().find_map(|line| line.strip_prefix(&format!("{key} = \""))?.strip_suffix('"'));
        line.map(str::to_owned)
    };
    let blocks = lock.split("[[package]]").skip(1);
    Ok(blocks
        .filter_map(|block| {
            Some(((value(block, "name")?, value(block, "version")?), value(block, "checksum")?))
        })
        .collect())
}

/// Returns the bill of materials.
fn bill(packages: &[Package], checksums: &BTreeMap<(String, String), String>) -> Result<Value> {
    let (hob, others) = packages.split_first().context("the list of packages is empty")?;
    let component = |package: &Package, kind: &str| {
        let mut component = json!({
            "type": kind,
            "bom-ref": package.url(),
            "name": package.name,
            "version": package.version,
            "purl": package.url(),
            "licenses": [{ "expression": package.licence.replace('/', " OR ") }],
        });
        if let Some(sum) = checksums.get(&(package.name.clone(), package.version.clone())) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": sum }]);
        }
        if let Some(repository) = &package.repository {
            component["externalReferences"] = json!([{ "type": "vcs", "url": repository }]);
        }
        component
    };
    let urls: BTreeMap<&str, String> =
        packages.iter().map(|package| (package.id.as_str(), package.url())).collect();
    let dependency = |package: &Package| {
        let uses: Vec<&String> = package.uses.iter().filter_map(|id| urls.get(id.as_str())).collect();
        json!({ "ref": package.url(), "dependsOn": uses })
    };
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": component(hob, "application") },
        "components": others.iter().map(|package| component(package, "library")).collect::<Vec<_>>(),
        "dependencies": packages.iter().map(dependency).collect::<Vec<_>>(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_crate_has_a_licence_and_a_checksum() {
        let packages = packages("").unwrap();
        let text = licence_text(&packages).unwrap();
        let bill = bill(&packages, &checksums().unwrap()).unwrap();
        assert_eq!(bill["metadata"]["component"]["name"], "hob");
        let components = bill["components"].as_array().unwrap();
        for package in packages.iter().skip(1) {
            let component = components.iter().find(|component| component["purl"] == package.url().as_str());
            let component = component.unwrap_or_else(|| panic!("{package:?} is missing"));
            assert!(is_own(package) || component["hashes"][0]["content"].is_string(), "{component}");
            let line = format!("\n{} {}: ", package.name, package.version);
            assert_eq!(text.contains(&line), !is_own(package), "{line}");
        }
        // Only tests of hob use proptest.
        let has = |name: &str| components.iter().any(|component| component["name"] == name);
        assert!(has("serde") && has("hob-engine") && !has("proptest"));
        // Only the feature objects-cloud uses reqwest.
        let with_clouds = linked("hob/objects-cloud").unwrap();
        assert!(!has("reqwest") && with_clouds.iter().any(|(name, _)| name == "reqwest"));
        let dependencies = bill["dependencies"].as_array().unwrap();
        let refs: BTreeSet<String> = dependencies.iter().map(|it| it["ref"].to_string()).collect();
        assert_eq!(refs.len(), packages.len(), "each crate once");
    }
}
