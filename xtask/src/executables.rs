//! Runs test executables, several at the same time. `cargo test` would run them one after the
//! other, and most black-box tests wait longer than they compute.

use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{WaitId, WaitIdOptions, waitid};
use serde_json::Value;

use crate::failures::{self, Failures};
use crate::shell;

/// Number of executables whose durations the total names.
const SLOWEST: usize = 5;

/// A test executable.
#[derive(Debug, Clone)]
pub struct Executable {
    /// Name of the test target.
    pub name: String,
    path: PathBuf,
    /// Directory of the package, in which cargo runs its tests too.
    package: PathBuf,
}

/// Compiles the test targets that the arguments of `cargo` select, and returns their executables.
pub fn compile(mut cargo: Command) -> Result<Vec<Executable>> {
    cargo.args(["--no-run", "--message-format=json-render-diagnostics"]);
    println!("$ {}", shell::words(&cargo));
    let messages = shell::output(cargo.stderr(Stdio::inherit()))?;
    messages.lines().filter_map(|line| executable(line).transpose()).collect()
}

/// Returns the test executable that a message of cargo names, if it names one.
fn executable(message: &str) -> Result<Option<Executable>> {
    let message: Value = serde_json::from_str(message).context("cannot parse a message of cargo")?;
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let Some(path) = text(&message["executable"]).filter(|_| message["profile"]["test"] == true) else {
        return Ok(None);
    };
    let name = text(&message["target"]["name"]).context("a message of cargo names no target")?;
    let manifest = text(&message["manifest_path"]).context("a message of cargo names no manifest")?;
    let package = Path::new(&manifest).parent().context("the manifest's path has no directory")?.to_owned();
    Ok(Some(Executable { name, path: path.into(), package }))
}

/// Output and exit status of an executable.
struct Ended {
    name: String,
    status: ExitStatus,
    took: Duration,
    /// Processor time of the executable and of those of its child processes that it has waited for.
    computed: Duration,
    output: String,
}

impl Executable {
    /// Runs the tests. The output goes through a file, so that a process that outlives the tests
    /// does not keep the run waiting.
    fn run(&self, arguments: &[&str], environment: &[(&str, &Path)]) -> Result<Ended> {
        let start = Instant::now();
        let mut file = tempfile::tempfile().context("cannot create a file for the output of tests")?;
        let mut command = Command::new(&self.path);
        command.args(arguments).envs(environment.iter().copied()).current_dir(&self.package);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file.try_clone()?);
        let mut child = command.spawn().with_context(|| format!("cannot start {}", self.path.display()))?;
        let computed = processor_time(&child);
        let status = child.wait().with_context(|| format!("cannot wait for {}", self.path.display()))?;
        let mut bytes = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut bytes).context("cannot read the output of tests")?;
        let output = String::from_utf8_lossy(&bytes).into_owned();
        Ok(Ended { name: self.name.clone(), status, took: start.elapsed(), computed, output })
    }
}

/// Waits for the end of a process, and returns its processor time and that of the processes that it
/// waited for. Returns zero if the kernel does not report it.
fn processor_time(child: &Child) -> Duration {
    let pid = rustix::process::Pid::from_child(child);
    // The process remains a zombie, whose times can be read.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let _ = rustix::io::retry_on_intr(|| waitid(WaitId::Pid(pid), options));
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    // See proc_pid_stat(5): utime, stime, cutime and cstime are the fields 14 to 17. The second field is a
    // name in parentheses.
    let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ').skip(11).take(4);
    let ticks: u64 = fields.filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Executables of which some run at the same time.
#[derive(Debug)]
pub struct Queue<'a> {
    /// The executables, in the order in which they start.
    pub executables: &'a [Executable],
    /// Number of executables of this queue that run at the same time, without those that threads of
    /// earlier queues start.
    pub at_once: usize,
}

impl<'a> Queue<'a> {
    /// Runs executables of the queue until all have started, where `next` is the index of the next
    /// one. Prints the output of each executable when it ends, and adds its result to `ended`.
    fn work(
        &self,
        next: &AtomicUsize,
        arguments: &[&str],
        environment: &[(&str, &Path)],
        ended: &Mutex<Vec<(&'a Executable, Result<Ended>)>>,
    ) {
        while let Some(executable) = self.executables.get(next.fetch_add(1, Ordering::Relaxed)) {
            println!("    Starting {}", executable.name);
            let result = executable.run(arguments, environment);
            // The lock prevents that the outputs of two executables mix.
            let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
            if let Ok(it) = &result {
                print(executable, it);
            }
            ended.push((executable, result));
        }
    }
}

/// Runs all executables, `at_once` at the same time, as [`run_queues`] does.
pub fn run(
    executables: &[Executable],
    at_once: usize,
    arguments: &[&str],
    environment: &[(&str, &Path)],
) -> Result<()> {
    run_queues(&[Queue { executables, at_once }], arguments, environment)
}

/// Runs the executables of all queues, each queue beside the others. If all executables of a queue
/// have started, its threads start those of the next queues. Prints the output of each executable
/// as one block when the executable ends, and a total at the end. The error has the failed tests
/// and their messages.
///
/// Tests that failed only because a limit of time passed run once more afterwards, without the other
/// executables: a busy machine can delay everything, so such a failure does not prove a fault of
/// hob. Any other failure is final.
pub fn run_queues(queues: &[Queue<'_>], arguments: &[&str], environment: &[(&str, &Path)]) -> Result<()> {
    let begun = Instant::now();
    let ended = Mutex::new(Vec::new());
    let next: Vec<AtomicUsize> = queues.iter().map(|_| AtomicUsize::new(0)).collect();
    thread::scope(|scope| {
        let ended = &ended;
        for (first, queue) in queues.iter().enumerate() {
            let own_and_next = queues[first..].iter().zip(&next[first..]);
            for _ in 0..queue.at_once {
                let own_and_next = own_and_next.clone();
                scope.spawn(move || {
                    own_and_next.for_each(|(queue, next)| queue.work(next, arguments, environment, ended));
                });
            }
        }
    });
    let ended = ended.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut failed = Vec::new();
    let mut all = Vec::new();
    let mut again = Vec::new();
    for (executable, result) in ended {
        let it = match result {
            Ok(it) => it,
            Err(error) => {
                failed.push(format!("{error:#}"));
                continue;
            }
        };
        if !it.status.success() {
            match failures::too_late(&it.output) {
                late if late.is_empty() => failed.push(failure(&it)),
                late => again.push((executable, late)),
            }
        }
        all.push(it);
    }
    println!("{}, in {:.1} s\n", total(&mut all)?, begun.elapsed().as_secs_f64());
    for (executable, late) in again {
        println!("    Starting {} again, for tests that were too slow: {}", executable.name, late.join(", "));
        let only =
            ["--exact"].into_iter().chain(late.iter().map(String::as_str)).chain(arguments.iter().copied());
        let second = executable.run(&only.collect::<Vec<_>>(), environment)?;
        print(executable, &second);
        if !second.status.success() {
            failed.push(failure(&second));
        }
    }
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    Ok(())
}

/// Prints the output of an executable as one block.
fn print(executable: &Executable, ended: &Ended) {
    let (name, path) = (&ended.name, executable.path.display());
    let [took, computed] = [ended.took, ended.computed].map(|time| time.as_secs_f64());
    println!("     Running {name} ({path}): {took:.1} s, {computed:.1} s of processor time");
    println!("{}", ended.output);
}

/// Returns the sums of all executables' results, and the executables that took longest.
fn total(all: &mut [Ended]) -> Result<String> {
    let mut sums = [("passed", 0), ("failed", 0), ("ignored", 0)];
    for line in all.iter().flat_map(|it| it.output.lines()) {
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            continue;
        };
        for (count, (word, sum)) in counts.split("; ").zip(&mut sums) {
            let count = count
                .strip_suffix(*word)
                .with_context(|| format!("no count of tests in this line: {line}"))?;
            *sum += count
                .trim()
                .parse::<u64>()
                .with_context(|| format!("no count of tests in this line: {line}"))?;
        }
    }
    let mut text = format!("{} test executables:", all.len());
    for (word, sum) in sums {
        write!(text, " {sum} {word};")?;
    }
    write!(text, " longest: {};", most(all, |it| it.took))?;
    let computed: Duration = all.iter().map(|it| it.computed).sum();
    let most_computed = most(all, |it| it.computed);
    write!(text, " {:.0} s of processor time, most: {most_computed}", computed.as_secs_f64())?;
    Ok(text)
}

/// Returns the executables with the most time of a kind.
fn most(all: &mut [Ended], time: impl Fn(&Ended) -> Duration) -> String {
    all.sort_by_key(|it| std::cmp::Reverse(time(it)));
    let first = all.iter().take(SLOWEST);
    first.map(|it| format!("{} {:.0} s", it.name, time(it).as_secs_f64())).collect::<Vec<_>>().join(", ")
}

/// Returns the messages of failed tests. An executable that crashed has none.
fn failure(ended: &Ended) -> String {
    let mut failures = Failures::default();
    ended.output.lines().for_each(|line| failures.take(line));
    format!("{}: {}\n{}", ended.name, ended.status, failures.text())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn ended(name: &str, seconds: u64, status: i32, output: &str) -> Ended {
        let status = ExitStatus::from_raw(status << 8);
        let [took, computed] = [seconds, 2 * seconds].map(Duration::from_secs);
        Ended { name: name.to_owned(), status, took, computed, output: output.to_owned() }
    }

    #[test]
    fn results_are_added() {
        let mut all = [
            ended("a", 1, 0, "test x ... ok\n\ntest result: ok. 3 passed; 0 failed; 1 ignored; 0 measured\n"),
            ended("b", 7, 101, "test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured\n"),
        ];
        let text = total(&mut all).unwrap();
        assert_eq!(
            text,
            "2 test executables: 5 passed; 1 failed; 1 ignored; longest: b 7 s, a 1 s; \
             16 s of processor time, most: b 14 s, a 2 s"
        );
    }

    #[test]
    fn processor_time_includes_children() {
        let busy = "sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done'; exit 3";
        let mut child = Command::new("sh").args(["-c", busy]).spawn().unwrap();
        assert!(processor_time(&child) > Duration::ZERO);
        assert_eq!(child.wait().unwrap().code(), Some(3), "the status is still there");
    }

    #[test]
    fn only_test_executables_are_run() {
        let message = |test: bool| {
            serde_json::json!({
                "reason": "compiler-artifact", "manifest_path": "/crates/t/Cargo.toml", "executable": "/target/t-1",
                "target": { "name": "t" }, "profile": { "test": test },
            })
        };
        let found = executable(&message(true).to_string()).unwrap().unwrap();
        assert_eq!((found.name.as_str(), found.package.as_path()), ("t", Path::new("/crates/t")));
        assert!(executable(&message(false).to_string()).unwrap().is_none());
        assert!(executable(r#"{"reason":"build-finished","success":true}"#).unwrap().is_none());
    }

    #[test]
    fn a_failure_does_not_stop_the_others_and_is_returned() {
        let shell =
            |name: &str, path: &str| Executable { name: name.into(), path: path.into(), package: "/".into() };
        let all =
            [shell("bad", "/bin/false"), shell("absent", "/nowhere/absent"), shell("good", "/bin/true")];
        let said = run(&all, 2, &[], &[]).unwrap_err().to_string();
        assert!(said.contains("bad: exit status: 1") && said.contains("/nowhere/absent"), "{said}");
        assert!(!said.contains("good"), "{said}");
        run(&all[2..], 2, &[], &[]).unwrap();
    }

    /// Creates an executable script in a directory.
    fn script(dir: &Path, name: &str, text: &str) -> Executable {
        let (text_path, path) = (dir.join("text"), dir.join(name));
        fs::write(&text_path, text).unwrap();
        // An executable file cannot be run while a process, such as a child of another test, has the
        // file open for writing.
        let status = Command::new("install").args(["-m", "755"]).args([&text_path, &path]).status().unwrap();
        assert!(status.success());
        Executable { name: name.into(), path, package: dir.into() }
    }

    /// Returns two scripts, each of which waits for the other one. Both succeed only if they run at
    /// the same time.
    fn waiting(dir: &Path) -> [Executable; 2] {
        [("one", "other"), ("other", "one")].map(|(name, other)| {
            let text = format!(
                "#!/bin/sh\n: > {name}.runs\nn=0\nuntil [ -e {other}.runs ]; do\n  sleep 0.1\n  \
                 n=$((n+1))\n  [ $n -lt 600 ] || exit 1\ndone\n"
            );
            script(dir, name, &text)
        })
    }

    #[test]
    fn queues_run_beside_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let scripts = waiting(dir.path());
        let queues = [&scripts[..1], &scripts[1..]].map(|executables| Queue { executables, at_once: 1 });
        run_queues(&queues, &[], &[]).unwrap();
    }

    #[test]
    fn the_thread_of_an_empty_queue_helps_with_the_next_queue() {
        let dir = tempfile::tempdir().unwrap();
        let scripts = waiting(dir.path());
        let none: [Executable; 0] = [];
        let queues = [&none[..], &scripts[..]].map(|executables| Queue { executables, at_once: 1 });
        run_queues(&queues, &[], &[]).unwrap();
    }

    /// The first test is too slow in the first run only. The second test fails for another reason
    /// in the first run only.
    #[test]
    fn only_a_test_that_was_too_slow_runs_again() {
        let dir = tempfile::tempdir().unwrap();
        let script = |name: &str, message: &str| {
            let text = format!(
                "#!/bin/sh\necho \"$@\" >> {name}.calls\n[ $(wc -l < {name}.calls) = 2 ] && exit 0\n\
                 printf '\\n---- a::b stdout ----\\nthread panicked at x.rs:1:2:\\n{message}\\n'\nexit 101\n"
            );
            script(dir.path(), name, &text)
        };
        let late = script("late", "waited 60s in vain for: it");
        run(&[late], 1, &["--test-threads=3"], &[]).unwrap();
        let calls = fs::read_to_string(dir.path().join("late.calls")).unwrap();
        assert_eq!(calls, "--test-threads=3\n--exact a::b --test-threads=3\n");
        run(&[script("wrong", "byte 0 differs")], 1, &[], &[]).unwrap_err();
        assert_eq!(fs::read_to_string(dir.path().join("wrong.calls")).unwrap(), "\n");
    }
}
