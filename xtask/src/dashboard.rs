//! Checks that the dashboard's bundle in the repository matches its sources, and runs the
//! dashboard's tests in a browser.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{shell, suite};

/// Number of test files that run at the same time. A test file uses half a processor on average:
/// daemons, guests and a browser, whose figures the test waits for.
const FILES_AT_ONCE: u32 = 2;

/// Runs all dashboard checks against hob without optional features.
pub(crate) fn run() -> Result<()> {
    let dir = shell::root().join("dashboard");
    let at = |program: &str, args: &[&str]| {
        let mut command = Command::new(program);
        command.args(args).current_dir(&dir);
        command
    };
    // npm packages must not run scripts during their installation.
    shell::run(&mut at("npm", &["ci", "--ignore-scripts", "--no-audit", "--no-fund"]))?;
    shell::run(&mut at("node", &["node_modules/typescript/bin/tsc", "--noEmit"]))?;
    let target = shell::target_dir()?;
    let fresh = target.join("dashboard/dist");
    let out = fresh.to_string_lossy().into_owned();
    shell::run(&mut at("node", &["build.mjs", "--out", &out]))?;
    compare(&fresh, &dir.join("dist"))?;
    let at_once = format!("--test-concurrency={FILES_AT_ONCE}");
    let mut tests = at("node", &["--test", &at_once, "--test-reporter=spec"]);
    for file in test_files(&dir.join("tests"))? {
        tests.arg(format!("tests/{file}"));
    }
    tests.env("HOB_BIN", suite::plain()?).env("PICTURES", target.join("dashboard/pictures"));
    shell::run(&mut tests)
}

/// Checks that both directories have the same files.
fn compare(fresh: &Path, kept: &Path) -> Result<()> {
    let names = |dir: &Path| -> Result<Vec<String>> {
        let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        names.sort();
        Ok(names)
    };
    let read =
        |dir: &Path, name: &str| fs::read(dir.join(name)).with_context(|| format!("cannot read {name}"));
    let mut stale = names(fresh)? != names(kept)?;
    for name in names(fresh)?.iter().filter(|name| kept.join(name).exists()) {
        stale |= read(fresh, name)? != read(kept, name)?;
    }
    if stale {
        bail!(
            "dashboard/dist does not match its sources: run `npm run build` in dashboard/ and \
            commit the result"
        );
    }
    println!("dashboard/dist matches its sources");
    Ok(())
}

fn test_files(dir: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut files: Vec<String> = names.filter(|name| name.ends_with(".test.mjs")).collect();
    files.sort();
    if files.is_empty() {
        bail!("dashboard/tests holds no test");
    }
    Ok(files)
}
