//! `torture`: runs rounds of the fault injection test until the time is over, and prints a report.
//! `cargo xtask torture` builds hob and starts this program.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;
use serde_json::json;
use torture::journal::Journal;
use torture::lateness::Watchdog;
use torture::medium::Sabotage;
use torture::report::Totals;
use torture::round::{self, Run};
use torture::setup::{Filter, Plan};

/// Inject faults into a running hob, and check every byte that its guests read
#[derive(Debug, Parser)]
#[command(max_term_width = 100)]
struct Arguments {
    /// Stop after this time; the current round is checked to its end without further faults
    #[arg(long, value_name = "M", default_value_t = 10.0)]
    minutes: f64,
    /// Seed of all rounds [default: the time]
    #[arg(long)]
    seed: Option<u64>,
    /// First round
    #[arg(long, default_value_t = 0)]
    round: u64,
    /// Stop after this many rounds
    #[arg(long, value_name = "N")]
    rounds: Option<u64>,
    /// Print the plan of the first round and exit
    #[arg(long)]
    plan: bool,
    /// Stop at the first violation
    #[arg(long)]
    fail_fast: bool,
    /// Program to test [default: HOB_BIN, or the release build, or the debug build]
    #[arg(long, value_name = "FILE")]
    hob: Option<PathBuf>,
    /// Directory for scratch files; files of rounds with violations stay there [default: /var/tmp]
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    dir: PathBuf,
    /// Use only faults and guest habits whose names contain one of these words
    #[arg(long, value_name = "WORD", value_delimiter = ',')]
    only: Vec<String>,
    /// Leave out faults and guest habits whose names contain one of these words (`upgrade`,
    /// `headers`, ...)
    #[arg(long, value_name = "WORD", value_delimiter = ',')]
    without: Vec<String>,
    /// Give the backings a defect, to test that the checks notice it
    #[arg(long, value_enum)]
    sabotage: Option<Sabotage>,
}

impl Arguments {
    fn filter(&self) -> Filter {
        Filter { only: self.only.clone(), without: self.without.clone() }
    }
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(violations) => {
            complain(&format!("{violations} violations"));
            ExitCode::FAILURE
        }
        Err(error) => {
            complain(&format!("torture: {error:#}"));
            ExitCode::from(2)
        }
    }
}

/// Writes a line to standard output. A closed standard output is ignored, because the log has all
/// information.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn complain(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn run(arguments: &Arguments) -> Result<usize> {
    let seed = arguments.seed.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |time| time.as_secs() % 1_000_000)
    });
    if arguments.plan {
        say(&format!("{:#}", Plan::draw(seed, arguments.round, &arguments.filter()).describe()));
        return Ok(0);
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).context("listen for signals")?;
    }
    let hob = match &arguments.hob {
        Some(path) => path.canonicalize().with_context(|| format!("{}", path.display()))?,
        None => conformance::hob::binary(),
    };
    let base = tempfile::Builder::new().prefix("torture-").tempdir_in(&arguments.dir)?;
    let journal = Arc::new(Journal::new(Some(&base.path().join("log.jsonl")))?);
    let _watchdog = Watchdog::start(journal.own_lateness())?;
    say(&format!("seed {seed}, {}, log and scratch files in {}", hob.display(), base.path().display()));
    let end = Instant::now() + Duration::from_secs_f64(arguments.minutes * 60.0);
    let sabotage = arguments.sabotage;
    let run = Run { hob, journal: Arc::clone(&journal), interrupted, sabotage, end };
    let mut totals = Totals::default();
    let result = rounds(arguments, seed, &run, base.path(), &mut totals);
    let violations = journal.violations();
    let count = journal.violation_count();
    say(totals.report(&journal).trim_end_matches('\n'));
    say(&format!("repeat with: cargo xtask torture --seed {seed} --minutes {}", arguments.minutes));
    if !violations.is_empty() || result.is_err() {
        say(&format!("evidence is in {}", base.keep().display()));
    }
    result.map(|()| count)
}

fn rounds(arguments: &Arguments, seed: u64, run: &Run, base: &Path, totals: &mut Totals) -> Result<()> {
    let begin = Instant::now();
    let last = arguments.rounds.map(|count| arguments.round + count);
    for number in arguments.round.. {
        if Instant::now() >= run.end || last == Some(number) || run.interrupted.load(Ordering::Relaxed) {
            break;
        }
        let plan = Plan::draw(seed, number, &arguments.filter());
        run.journal.begin_round(number);
        run.journal.line("round", json!({ "plan": plan.describe() }));
        let dir = base.join(format!("r{number}"));
        std::fs::create_dir(&dir)?;
        let before = run.journal.violation_count();
        round::run(run, &plan, &dir, totals)?;
        totals.rounds += 1;
        let found = run.journal.violation_count() - before;
        if found == 0 {
            std::fs::remove_dir_all(&dir)?;
        }
        say(&totals.line(begin.elapsed(), &run.journal));
        for violation in run.journal.violations().iter().filter(|it| it.round == number) {
            say(&format!("        {}: {}: {}", violation.kind, violation.subject, violation.what));
        }
        if found > 0 && arguments.fail_fast {
            break;
        }
    }
    Ok(())
}
