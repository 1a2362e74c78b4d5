//! A daemon of one row: its configuration and start, loads on its disks, its CPU time and memory.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{Read, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use conformance::hob::CRASH_LOG_DIR;
use conformance::nbd_client::{Address, Client};
use conformance::process::Process;
use conformance::stats::Stats;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::Bench;
use super::flash::{Flash, Kind};
use crate::data_path::scratch;
use crate::fio::{self, Clients, Figures, Workload};
use crate::{median, server};

/// Maximum time of a start in which no further disk is served.
const NO_PROGRESS_MAX: Duration = Duration::from_secs(600);
/// Maximum time of a stop after SIGTERM.
const STOP_MAX: Duration = Duration::from_secs(300);
/// Shortest and longest pause between two checks whether a daemon is ready.
const PAUSES: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(500)];
/// Number of lines of a daemon's log in messages.
const LOG_LINES: usize = 20;
/// Hit ratio of a warm cache.
const WARM_MIN: f64 = 0.999;

/// Loads that read and write an area once.
const READ_ALL: Workload = Workload { name: "read", rw: "read", block: "64k", depth: 8, flushes: false };
const WRITE_ALL: Workload = Workload { name: "write", rw: "write", block: "64k", depth: 8, flushes: false };

/// Disks and caches of a daemon.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) disks: u32,
    /// Size of each disk, bytes.
    pub(super) disk_bytes: u64,
    pub(super) pool_bytes: u64,
    pub(super) segment_bytes: u64,
    pub(super) flash: Kind,
    /// Lines of each `[disk.cache]`, without the pool.
    pub(super) cache: String,
}

impl Setup {
    /// Returns hob.toml with all files in `directory`.
    fn config(&self, directory: &Path, flash: &Flash) -> String {
        let at = |name: &str| directory.join(name).display().to_string();
        let mut text = format!(
            "state_dir = {:?}\nlisten = [\"unix:{}\"]\n[control]\nlisten = [\"unix:{}\"]\n\
             [[pool]]\nname = \"flash\"\n{}segment_size = {}\n",
            at("state"),
            at("nbd.sock"),
            at("ctl.sock"),
            flash.config(),
            self.segment_bytes,
        );
        for number in 0..self.disks {
            let (name, backing) = (disk(number), at(&image(number)));
            let _ = write!(
                text,
                "[[disk]]\nname = {name:?}\nbacking = {backing:?}\n[disk.cache]\npool = \"flash\"\n{}",
                self.cache
            );
        }
        text
    }
}

fn disk(number: u32) -> String {
    format!("disk{number}")
}

fn image(number: u32) -> String {
    format!("disk{number}.img")
}

/// The part of the disks that a load uses, and the number of its clients.
#[derive(Debug, Clone, Copy)]
pub(super) struct Area {
    /// Number of disks, from the first one.
    pub(super) disks: u32,
    /// Number of connections to each disk.
    pub(super) connections: u32,
    /// Start of the area in each disk, bytes.
    pub(super) offset: u64,
    /// Length of the area in each disk, bytes.
    pub(super) size: u64,
}

impl Area {
    /// Returns this range of the first disk, for one client.
    pub(super) fn new(offset: u64, size: u64) -> Self {
        Self { disks: 1, connections: 1, offset, size }
    }
}

/// Medians of the rounds of a load.
#[derive(Debug)]
pub(super) struct Medians {
    pub(super) iops: f64,
    /// CPU time of the daemon for each request, seconds.
    pub(super) cpu_s: f64,
    /// Mean latency, seconds.
    pub(super) mean_s: f64,
    /// Share of the requests that were hits.
    pub(super) hits: f64,
}

/// End of a daemon.
#[derive(Debug, Clone, Copy)]
pub(super) enum End {
    /// A clean stop by SIGTERM.
    Stop,
    /// SIGKILL.
    Kill,
}

/// Durations of a start, and the memory that it needed.
#[derive(Debug)]
pub(super) struct Start {
    /// Time until the first disk answered a read.
    pub(super) first_reply: Duration,
    /// Time until all disks were served with their caches.
    pub(super) complete: Duration,
    /// Highest resident memory until then, bytes.
    pub(super) peak_bytes: u64,
}

/// A running daemon. The fields are dropped in their order: the process first, its files last.
pub(super) struct Host<'a> {
    bench: &'a Bench,
    process: Process,
    disks: u32,
    _flash: Flash,
    scratch: TempDir,
}

impl<'a> Host<'a> {
    /// Starts a daemon with a new pool and new disks, and waits until all disks are served.
    pub(super) fn new(bench: &'a Bench, setup: &Setup) -> Result<Self> {
        let scratch = scratch(&bench.dir)?;
        for number in 0..setup.disks {
            let path = scratch.path().join(image(number));
            File::create(&path)
                .and_then(|file| file.set_len(setup.disk_bytes))
                .with_context(|| format!("create {}", path.display()))?;
        }
        let flash = Flash::new(scratch.path(), setup.pool_bytes, setup.flash)?;
        let config = setup.config(scratch.path(), &flash);
        fs::write(scratch.path().join("hob.toml"), config).context("write a configuration")?;
        let process = launch(bench, scratch.path())?;
        let mut host = Self { bench, process, disks: setup.disks, _flash: flash, scratch };
        host.wait(Instant::now())?;
        Ok(host)
    }

    /// Ends the daemon, and starts it again.
    pub(super) fn restart(&mut self, end: End) -> Result<Start> {
        match end {
            End::Stop => {
                self.process.signal(Signal::TERM);
                let bench = self.bench;
                let status = wait_for_end(&mut self.process, STOP_MAX, || bench.interrupt.check())?;
                if !status.is_some_and(|status| status.success()) {
                    bail!("hob did not stop after SIGTERM ({status:?}): {}", self.log());
                }
            }
            End::Kill => self.process.kill(),
        }
        let begun = Instant::now();
        self.process = launch(self.bench, self.scratch.path())?;
        self.wait(begun)
    }

    /// Waits until the present process serves all disks with their caches.
    fn wait(&mut self, begun: Instant) -> Result<Start> {
        self.wait_for("answers no read", 1, Self::replies)?;
        let first_reply = begun.elapsed();
        self.wait_for("does not serve all disks with their caches", self.disks as usize, Self::served)?;
        Ok(Start { first_reply, complete: begun.elapsed(), peak_bytes: self.memory("VmHWM")? })
    }

    /// Waits until `count` reaches `goal`. `failure` is the message if it does not.
    fn wait_for(&mut self, failure: &str, goal: usize, count: fn(&Self) -> usize) -> Result<()> {
        let (mut last, mut since) = (0, Instant::now());
        loop {
            let asked = Instant::now();
            let now = count(self);
            // The list of many disks takes long, and must not slow the start down.
            let pause = (asked.elapsed() * 4).clamp(PAUSES[0], PAUSES[1]);
            if now >= goal {
                return Ok(());
            }
            self.bench.interrupt.check()?;
            if let Some(status) = self.process.poll() {
                bail!("hob ended ({status}) instead of serving: {}", self.log());
            }
            if now != last {
                (last, since) = (now, Instant::now());
            }
            if since.elapsed() > NO_PROGRESS_MAX {
                bail!("hob {failure} ({now} of {goal}): {}", self.log());
            }
            thread::sleep(pause);
        }
    }

    /// Returns 1 if the first disk answers a read. The read is at the end of the disk, which has no
    /// dirty data.
    fn replies(&self) -> usize {
        let address = Address::Unix(self.at("nbd.sock"));
        let read = |mut client: Client| client.read(client.size() - 4096, 4096);
        usize::from(Client::connect(&address, &disk(0)).and_then(read).is_ok())
    }

    /// Returns the number of disks that are served with their caches.
    fn served(&self) -> usize {
        let Ok((list, _)) = self.get("/v1/disks") else { return 0 };
        serde_json::from_str(&list).map_or(0, |list: Value| served(&list))
    }

    /// Returns the end of the daemon's log.
    fn log(&self) -> String {
        let log = self.process.stderr();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Returns the answer to a GET request of the control API, and the time until it was complete.
    pub(super) fn get(&self, path: &str) -> Result<(String, Duration)> {
        let begun = Instant::now();
        let mut stream = UnixStream::connect(self.at("ctl.sock")).context("connect to the control API")?;
        stream.set_read_timeout(Some(Duration::from_secs(120)))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: hob\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let time = begun.elapsed();
        let (head, body) = answer.split_once("\r\n\r\n").context("hob's answer has no head")?;
        if !head.starts_with("HTTP/1.1 200 ") {
            bail!("GET {path}: {head}");
        }
        Ok((body.to_owned(), time))
    }

    /// Returns the counters of a disk.
    fn stats(&self, number: u32) -> Result<Stats> {
        let (text, _) = self.get(&format!("/v1/disks/{}/stats", disk(number)))?;
        Stats::parse(&text).map_err(|error| anyhow::anyhow!("statistics of a disk: {error}"))
    }

    /// Returns a number from the statistics of the first disk, for example `index_bytes`.
    pub(super) fn number(&self, name: &str) -> Result<f64> {
        self.stats(0)?.number(name).with_context(|| format!("no {name} in the statistics of a disk"))
    }

    /// Returns the number of hits of the first disks.
    fn hits(&self, disks: u32) -> Result<u64> {
        let mut hits = 0;
        for number in 0..disks {
            hits += self.stats(number)?.class("hit");
        }
        Ok(hits)
    }

    /// Returns the CPU time of the daemon.
    pub(super) fn cpu(&self) -> Result<Duration> {
        server::cpu(self.process.pid())
    }

    /// Returns a value of the daemon's `/proc/PID/status`, for example `VmRSS`, bytes.
    pub(super) fn memory(&self, name: &str) -> Result<u64> {
        let status =
            fs::read_to_string(format!("/proc/{}/status", self.process.pid())).context("hob has died")?;
        status_bytes(&status, name).with_context(|| format!("no {name} in /proc/PID/status"))
    }

    fn fio(&self, area: Area, workload: &Workload, time: Option<Duration>) -> Result<Figures> {
        let address = Address::Unix(self.at("nbd.sock"));
        let uris: Vec<String> = (0..area.disks).map(|number| address.uri(&disk(number))).collect();
        let clients =
            Clients { uris: &uris, connections: area.connections, offset: area.offset, size: area.size };
        fio::run_clients(&clients, workload, time, &self.at("load.fio"), &self.bench.interrupt)
    }

    /// Reads an area until nearly all reads of a pass are hits, with a pause between two passes. hob
    /// fills the cache after its replies, so one pass is not enough.
    pub(super) fn warm(&self, area: Area, pause: Duration) -> Result<()> {
        let area = Area { connections: 1, ..area };
        for pass in 1..=self.bench.scale.warm_passes_max {
            let before = self.hits(area.disks)?;
            let figures = self.fio(area, &READ_ALL, None)?;
            let share = (self.hits(area.disks)? - before) as f64 / figures.ios as f64;
            println!("  warming, pass {pass}: {:.1} % hits", share * 100.0);
            if share >= WARM_MIN {
                break;
            }
            self.bench.pause(pause)?;
        }
        Ok(())
    }

    /// Writes an area once.
    pub(super) fn write(&self, area: Area) -> Result<()> {
        self.fio(area, &WRITE_ALL, None).map(drop)
    }

    /// Runs all rounds of a load.
    pub(super) fn measure(&self, area: Area, workload: &Workload) -> Result<Medians> {
        let mut rounds = Vec::new();
        for round in 1..=self.bench.scale.rounds {
            let (hits, cpu) = (self.hits(area.disks)?, self.cpu()?);
            let figures = self.fio(area, workload, Some(self.bench.scale.time))?;
            let (cpu, ios) = (self.cpu()?.saturating_sub(cpu), figures.ios as f64);
            let hits = (self.hits(area.disks)? - hits) as f64 / ios;
            let cpu_us = cpu.as_secs_f64() * 1e6 / ios;
            println!("  {}, round {round}: {:.0} IOPS, CPU {cpu_us:.2} µs", workload.name, figures.iops);
            rounds.push([figures.iops, cpu_us / 1e6, figures.mean_us / 1e6, hits]);
        }
        let of = |column: usize| median(rounds.iter().map(|round| round[column])).context("no round");
        Ok(Medians { iops: of(0)?, cpu_s: of(1)?, mean_s: of(2)?, hits: of(3)? })
    }
}

/// Starts a daemon with the hob.toml of `directory`.
fn launch(bench: &Bench, directory: &Path) -> Result<Process> {
    let mut command = Command::new(&bench.hob);
    command.arg("daemon").arg("--config").arg(directory.join("hob.toml")).env(CRASH_LOG_DIR, directory);
    Process::start("hob", &mut command).context("start hob")
}

/// Waits for the end of a process, at most `limit`. Returns `None` if the process still runs then.
/// `check` returns an error after an interrupt.
fn wait_for_end(
    process: &mut Process,
    limit: Duration,
    check: impl Fn() -> Result<()>,
) -> Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        check()?;
        if let Some(status) = process.poll() {
            return Ok(Some(status));
        }
        if begun.elapsed() > limit {
            return Ok(None);
        }
        thread::sleep(PAUSES[0]);
    }
}

/// Returns the number of disks of a list that are served with their caches.
fn served(list: &Value) -> usize {
    let is_served = |disk: &&Value| disk["state"] == "online" && disk["cache"]["state"] == "active";
    list.as_array().map_or(0, |list| list.iter().filter(is_served).count())
}

/// Returns a size from the text of a `/proc/PID/status`, bytes.
fn status_bytes(status: &str, name: &str) -> Option<u64> {
    let value = |line: &str| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned());
    let kib: u64 = status.lines().find_map(value)?.strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_configuration_has_all_disks() {
        let setup = Setup {
            disks: 2,
            disk_bytes: 1 << 20,
            pool_bytes: 1 << 30,
            segment_bytes: 1 << 20,
            flash: Kind::File,
            cache: "block_size = 4096\n".to_owned(),
        };
        let flash = Flash::new(Path::new("/d"), setup.pool_bytes, setup.flash).unwrap();
        let text = setup.config(Path::new("/d"), &flash);
        assert!(text.starts_with("state_dir = \"/d/state\"\nlisten = [\"unix:/d/nbd.sock\"]\n"), "{text}");
        assert!(
            text.contains("devices = [\"/d/flash\"]\nsize = 1073741824\nsegment_size = 1048576\n"),
            "{text}"
        );
        for disk in ["0", "1"] {
            let lines = format!(
                "[[disk]]\nname = \"disk{disk}\"\nbacking = \"/d/disk{disk}.img\"\n[disk.cache]\npool = \
                 \"flash\"\nblock_size = 4096\n"
            );
            assert!(text.contains(&lines), "{text}");
        }
    }

    #[test]
    fn an_interrupt_ends_the_wait_for_the_end_of_a_process() {
        let mut process = Process::start("sleep", Command::new("sleep").arg("60")).unwrap();
        let begun = Instant::now();
        let error = wait_for_end(&mut process, STOP_MAX, || bail!("interrupted")).unwrap_err();
        assert_eq!(error.to_string(), "interrupted");
        assert_eq!(wait_for_end(&mut process, Duration::ZERO, || Ok(())).unwrap(), None);
        assert!(begun.elapsed() < Duration::from_secs(60));
        process.kill();
        assert!(wait_for_end(&mut process, STOP_MAX, || Ok(())).unwrap().is_some());
    }

    #[test]
    fn disks_are_served_when_their_caches_are_recovered() {
        let list = |cache: &str| json!([{ "state": "online", "cache": { "state": cache } }]);
        assert_eq!(served(&list("active")), 1);
        assert_eq!(served(&list("recovering")), 0);
        assert_eq!(served(&json!([{ "state": "offline" }, list("active")[0]])), 1);
        assert_eq!(served(&json!({})), 0);
    }

    #[test]
    fn sizes_of_processes_are_in_kib() {
        let status = "Name:\thob\nVmHWM:\t    2048 kB\nVmRSS:\t     12 kB\nThreads:\t4\n";
        assert_eq!(status_bytes(status, "VmRSS"), Some(12 << 10));
        assert_eq!(status_bytes(status, "VmHWM"), Some(2 << 20));
        assert_eq!(status_bytes(status, "Vm"), None);
        assert_eq!(status_bytes(status, "Threads"), None);
    }
}
