//! Flash write budgets on a real daemon: writes to the pool stay within a small budget while hits go
//! on, the account survives a restart and a kill, and dirty data that exceeds a budget is reported.

use std::time::Duration;

use conformance::data::{Noise, noise_file};
use conformance::hob::command;
use conformance::nbd_client::Client;
use conformance::scratch::wait_for;
use conformance::{Daemon, MIB, Scratch};
use serde_json::Value;

const DISK: u64 = 128 * MIB;
const CACHE: u64 = 16 * MIB;
const HOT: u64 = 8 * MIB;
const BLOCK: u64 = 16384;

struct Stage {
    scratch: Scratch,
    daemon: Daemon,
}

impl Stage {
    /// Starts a daemon with one disk and a cache with these settings. The pool has this budget.
    fn new(budget: &str, cache: &str) -> Stage {
        let scratch = Scratch::new();
        noise_file(&scratch.path("disk.img"), DISK, 7);
        let config = format!(
            "[[pool]]\nname = \"flash\"\ndevices = [\"{}\"]\nsize = \"40M\"\nsegment_size = \"1M\"\n{budget}\n\
             [[disk]]\nname = \"vm\"\nbacking = \"{}\"\ncache = {{ pool = \"flash\", size = {CACHE}, {cache} }}\n",
            scratch.text("pool"),
            scratch.text("disk.img"),
        );
        scratch.configure(&config);
        let daemon = scratch.start_daemon();
        Stage { scratch, daemon }
    }

    fn connect(&self) -> Client {
        self.scratch.connect_when_served("vm")
    }

    fn json(&self, args: &[&str]) -> Value {
        self.daemon.json(args)
    }

    fn writes(&self) -> Value {
        self.json(&["pool", "show", "flash"])["flash_writes"].clone()
    }

    /// Returns a number of the pool's flash writes.
    fn number(&self, name: &str) -> u64 {
        self.writes()[name].as_u64().unwrap_or_else(|| panic!("{name} in {}", self.writes()))
    }

    /// Waits until the cache has its part of the budget.
    fn until_divided(&self) {
        wait_for("the cache's part of the budget", || {
            self.json(&["disk", "show", "vm"])["cache"]["flash_writes"].is_object()
        });
    }

    /// Waits until the daemon has counted everything that was written.
    fn until_counted(&self) {
        let mut last = u64::MAX;
        wait_for("the end of flash writes", || {
            std::thread::sleep(Duration::from_millis(2500));
            let now = self.number("written");
            std::mem::replace(&mut last, now) == now
        });
    }

    /// Reads the first 8 MiB, and as much again at random places.
    fn read_hot_and_cold(&self, guest: &mut Client, dice: &mut Noise) {
        for at in 0..HOT / BLOCK {
            guest.read(at * BLOCK, BLOCK as u32).unwrap();
            let cold = dice.below(DISK / BLOCK) * BLOCK;
            guest.read(cold, BLOCK as u32).unwrap();
            if at % 64 == 0 {
                // The second read waits until flash has the data of the first one. With too many
                // fills in flight, hob starts no more fills.
                guest.read(cold, BLOCK as u32).unwrap();
            }
        }
    }

    /// Returns the share of the reads of the first 8 MiB that hit, percent.
    fn hot_hits(&self, guest: &mut Client) -> u64 {
        let before = self.daemon.stats("vm").hits();
        (0..HOT / BLOCK).for_each(|at| _ = guest.read(at * BLOCK, BLOCK as u32).unwrap());
        (self.daemon.stats("vm").hits() - before) * 100 / (HOT / BLOCK)
    }

    /// Ends the daemon, and starts it again.
    fn restart(self, end: fn(Daemon)) -> Stage {
        let Stage { scratch, daemon } = self;
        end(daemon);
        let daemon = scratch.start_daemon();
        Stage { scratch, daemon }
    }
}

/// Without a budget, these reads would write several times the cache's size to flash. With the budget
/// they write the cache about once, and hot reads are still hits.
#[test]
fn flash_writes_stay_within_a_small_budget_while_hits_go_on() {
    let stage = Stage::new(
        "flash_writes = \"1M/day\"",
        "preset = \"vfrc\", admission = \"always\", fill = \"sectors\"",
    );
    let (mut guest, mut dice) = (stage.connect(), Noise::new(1));
    stage.until_divided();
    for _ in 0..8 {
        stage.read_hot_and_cold(&mut guest, &mut dice);
    }
    stage.until_counted();
    // The limit is half a day's budget, and the size of the pool, which an empty cache may fill
    // beyond the budget.
    let bound = MIB / 2 + stage.json(&["pool", "show", "flash"])["size"].as_u64().unwrap();
    let limited = stage.number("written");
    assert!(limited <= bound, "{} exceed {bound}", stage.writes());
    assert!(limited >= HOT, "the empty cache filled: {}", stage.writes());
    assert!(stage.number("refused") > 16 * MIB, "{}", stage.writes());
    assert!(stage.daemon.stats("vm").reason("miss-not-admitted", "flash-budget") > 0);
    let hits = stage.hot_hits(&mut guest);
    let explained = stage.daemon.ctl(&["explain", "vm"]);
    assert!(explained.contains("flash write budget of pool flash"), "{explained}");
    let shown = stage.daemon.ctl(&["pool", "show", "flash"]);
    assert!(shown.contains("1 MiB a day (1M/day)"), "{shown}");
    // The same load without a budget writes several times as much.
    stage.daemon.ctl(&["pool", "set", "flash", "--flash-writes", "off"]);
    wait_for("the end of the limit", || {
        stage.json(&["disk", "show", "vm"])["cache"]["flash_writes"].is_null()
    });
    for _ in 0..8 {
        stage.read_hot_and_cold(&mut guest, &mut dice);
    }
    stage.until_counted();
    let unlimited = stage.number("written") - limited;
    assert!(unlimited > 2 * limited, "{unlimited} bytes without a budget, {limited} with one");
    let without = stage.hot_hits(&mut guest);
    assert!(hits + 10 >= without, "{hits} % of the hot reads hit with the budget, {without} % without");
}

/// A restart and a kill keep the account of the used budget.
#[test]
fn the_account_survives_the_end_of_the_daemon() {
    let stage = Stage::new("flash_writes = \"1M/day\"", "admission = \"always\"");
    let mut guest = stage.connect();
    stage.until_divided();
    (0..HOT / BLOCK).for_each(|at| _ = guest.read(at * BLOCK, BLOCK as u32).unwrap());
    drop(guest);
    stage.until_counted();
    let (day, loan) = (stage.number("written_day"), stage.number("loan"));
    assert!(day >= HOT && loan >= HOT - MIB, "{}", stage.writes());
    let stage = stage.restart(|daemon| _ = daemon.stop());
    assert!(stage.number("written_day") >= day, "{}", stage.writes());
    assert!(stage.number("loan").abs_diff(loan) < MIB, "{}", stage.writes());
    assert_eq!(stage.number("written"), 0);
    // The saved account is at most a minute old.
    let stage = stage.restart(Daemon::kill);
    assert!(stage.number("written_day") >= day, "{}", stage.writes());
    assert!(stage.number("loan").abs_diff(loan) < MIB, "{}", stage.writes());
    // A budget that was set by command is kept as well.
    stage.daemon.ctl(&["pool", "set", "flash", "--flash-writes", "5 years at 600 TBW"]);
    let stage = stage.restart(|daemon| _ = daemon.stop());
    assert_eq!(stage.writes()["budget"], "5 years at 600 TBW");
}

/// Dirty data is never refused; health reports that it exceeds the budget.
#[test]
fn dirty_data_that_exceeds_the_budget_is_written_and_reported() {
    let stage = Stage::new("flash_writes = \"1M/day\"", "mode = \"write-back\", persistent = true");
    let mut guest = stage.connect();
    stage.until_divided();
    // The command fails if the host of the test has another problem.
    let output = || stage.daemon.try_ctl(&["health", "-o", "json"]).stdout;
    assert!(!output().contains("flash-writes-exceeded"), "{}", output());
    let before = stage.daemon.stats("vm").reason("write", "to-flash");
    (0..4 * MIB / BLOCK).for_each(|at| guest.write(at * BLOCK, &[1; BLOCK as usize]).unwrap());
    assert_eq!(stage.daemon.stats("vm").reason("write", "to-flash") - before, 4 * MIB / BLOCK);
    wait_for("a health problem", || output().contains("flash-writes-exceeded"));
    // The problem begins when hob has counted a part of the writes.
    wait_for("the count of all writes", || stage.number("unrefusable") >= 4 * MIB);
    assert!(stage.number("debt") > 0, "{}", stage.writes());
    stage.daemon.ctl(&["pool", "set", "flash", "--flash-writes", "1000 DWPD"]);
    wait_for("the end of the problem", || !output().contains("flash-writes-exceeded"));
}

/// hob refuses an invalid budget with one line that shows the valid forms.
#[test]
fn an_invalid_budget_is_refused_in_one_line() {
    let stage = Stage::new("", "admission = \"always\"");
    for bad in ["5", "500G", "1 DWPD/day", "0/day"] {
        let said = stage.daemon.try_ctl(&["pool", "set", "flash", "--flash-writes", bad]);
        assert!(!said.success() && said.all().contains("500G/day"), "{bad}: {}", said.all());
        let file = std::fs::read_to_string(stage.scratch.path("hob.toml")).unwrap();
        let wrong = file.replace("segment_size", &format!("flash_writes = \"{bad}\"\nsegment_size"));
        std::fs::write(stage.scratch.path("wrong.toml"), wrong).unwrap();
        let checked = command(&["daemon", "--config", &stage.scratch.text("wrong.toml"), "--check"]);
        let lines: Vec<String> = checked
            .all()
            .lines()
            .filter(|line| line.contains("flash write budget"))
            .map(str::to_owned)
            .collect();
        assert!(!checked.success() && lines.len() == 1, "{bad}: {}", checked.all());
    }
}
