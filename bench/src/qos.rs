//! Measures shares, limits, reservations and throttling in real time. Three fio clients use three
//! disks whose backings are on one slow server. The rate of each disk is compared with the disk's
//! entitlement.
//!
//! The server is nbdkit with one request at a time and two milliseconds per request. The server
//! thus simulates an array with about 450 IOPS. The first scenario measures the exact value.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use conformance::process::Process;

use super::fio::{self, Figures, Target, Workload};
use crate::shell::{self, Interrupt};

/// Tolerance of a disk's rate, as a fraction of the entitlement.
const WITHIN: f64 = 0.10;

const DISK_BYTES: u64 = 64 << 20;

/// Load of every client. Each client has its own queue depth.
const READS: Workload =
    Workload { name: "4 KiB random read", rw: "randread", block: "4k", depth: 16, flushes: false };

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Duration of each scenario, seconds
    #[arg(long, default_value_t = 15)]
    seconds: u32,
    /// hob binary to measure [default: HOB_BIN, or a new release build]
    #[arg(long)]
    hob: Option<PathBuf>,
    /// Fail if a disk did not get its entitlement
    #[arg(long)]
    strict: bool,
}

/// Entitlement of a disk.
#[derive(Clone, Copy)]
enum Entitlement {
    /// A share of the total rate.
    Part(f64),
    /// A rate in IOPS.
    Iops(f64),
    /// A minimum rate in IOPS.
    AtLeast(f64),
    /// No requirement.
    Any,
}

struct Scenario {
    name: &'static str,
    /// Throttle setting of the datastore.
    control: &'static str,
    /// Settings, queue depth of the client (0 means idle) and entitlement of each disk.
    disks: [(&'static [&'static str], u32, Entitlement); 3],
}

const SCENARIOS: [Scenario; 5] = [
    Scenario {
        name: "shares 1 : 2 : 4",
        control: "depth:2",
        disks: [
            (&["--shares", "500"], 16, Entitlement::Part(1.0 / 7.0)),
            (&["--shares", "1000"], 16, Entitlement::Part(2.0 / 7.0)),
            (&["--shares", "2000"], 16, Entitlement::Part(4.0 / 7.0)),
        ],
    },
    Scenario {
        name: "a limit of 50",
        control: "depth:2",
        disks: [
            (&["--limit", "50"], 16, Entitlement::Iops(50.0)),
            (&["--shares", "normal"], 16, Entitlement::Any),
            (&["--shares", "normal"], 16, Entitlement::Any),
        ],
    },
    Scenario {
        name: "a reservation of 200 beside noisy neighbours",
        control: "depth:2",
        disks: [
            (&["--shares", "low", "--reservation", "200"], 16, Entitlement::AtLeast(200.0)),
            (&["--shares", "high"], 64, Entitlement::Any),
            (&["--shares", "high"], 64, Entitlement::Any),
        ],
    },
    Scenario {
        name: "the share of an idle disk",
        control: "depth:2",
        disks: [
            (&["--shares", "500"], 16, Entitlement::Part(1.0 / 3.0)),
            (&["--shares", "1000"], 16, Entitlement::Part(2.0 / 3.0)),
            (&["--shares", "2000"], 0, Entitlement::Any),
        ],
    },
    Scenario {
        name: "throttled by latency",
        control: "auto",
        disks: [
            (&["--shares", "500"], 32, Entitlement::Part(1.0 / 7.0)),
            (&["--shares", "1000"], 32, Entitlement::Part(2.0 / 7.0)),
            (&["--shares", "2000"], 32, Entitlement::Part(4.0 / 7.0)),
        ],
    },
];

struct Bench {
    binary: PathBuf,
    control: String,
    seconds: u32,
    interrupt: Interrupt,
    /// The processes are killed in this order when the value is dropped: hob first.
    _hob: Process,
    _server: Process,
    directory: tempfile::TempDir,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let bench = Bench::start(arguments)?;
    println!("\nthree disks on one slow datastore, {} s each; IOPS of 4 KiB random reads", bench.seconds);
    let mut missed = 0;
    for scenario in &SCENARIOS {
        missed += bench.play(scenario)?;
    }
    missed += bench.below_the_threshold()?;
    println!("\n{missed} dues missed by more than {:.0} %", WITHIN * 100.0);
    if arguments.strict && missed > 0 {
        bail!("not every disk got its entitlement");
    }
    Ok(())
}

impl Bench {
    fn start(arguments: &Arguments) -> Result<Bench> {
        let interrupt = Interrupt::listen()?;
        let binary = super::hob(arguments.hob.as_deref())?;
        let directory = tempfile::tempdir()?;
        let at = |name: &str| directory.path().join(name);
        let mut command = Command::new("/usr/bin/env");
        command.args(["nbdkit", "--foreground", "--unix"]).arg(at("array.sock"));
        command.args(["--filter=noparallel", "--filter=delay", "memory", "64M"]);
        command.args(["serialize=all-requests", "delay-read=2ms", "delay-write=2ms"]);
        let server = Process::start("nbdkit", &mut command).context("start nbdkit")?;
        wait_for(&at("array.sock"), &interrupt)?;
        let listen = format!("unix:{}", at("hob.sock").display());
        let control = format!("unix:{}", at("hob.ctl").display());
        let mut config = format!(
            "listen = [\"{listen}\"]\nstate_dir = {:?}\n[control]\nlisten = [\"{control}\"]\n",
            at("state").display().to_string()
        );
        for disk in 0..3 {
            let backing = format!("nbd+unix:///?socket={}", at("array.sock").display());
            config +=
                &format!("[[disk]]\nname = \"vm{disk}\"\ndatastore = \"array\"\nbacking = \"{backing}\"\n");
        }
        std::fs::write(at("hob.toml"), config)?;
        let mut command = Command::new(&binary);
        command.arg("daemon").arg("--config").arg(at("hob.toml"));
        let hob = Process::start("hob", &mut command).context("start hob")?;
        wait_for(&at("hob.sock"), &interrupt)?;
        let seconds = arguments.seconds;
        Ok(Bench { binary, control, seconds, interrupt, _hob: hob, _server: server, directory })
    }

    fn ctl(&self, arguments: &[&str]) -> Result<String> {
        shell::output(Command::new(&self.binary).args(arguments).args(["--control", &self.control]))
    }

    /// Runs one scenario. Returns the number of disks whose rate was not their entitlement.
    fn play(&self, scenario: &Scenario) -> Result<u32> {
        println!("\n{} (control {})", scenario.name, scenario.control);
        for (disk, (rules, ..)) in scenario.disks.iter().enumerate() {
            let name = format!("vm{disk}");
            let nothing = ["--shares", "normal", "--reservation", "0", "--limit", "0"];
            self.ctl(&[&["qos", "set", &name][..], &nothing].concat())?;
            self.ctl(&[&["qos", "set", &name][..], rules].concat())?;
        }
        self.ctl(&["datastore", "set", "array", "--throttle", scenario.control])?;
        let received = self.load(scenario.disks.map(|(_, depth, _)| depth))?;
        let all: f64 = received.iter().flatten().map(|figures| figures.iops).sum();
        let mut missed = 0;
        for (disk, ((rules, depth, due), figures)) in scenario.disks.iter().zip(&received).enumerate() {
            let Some(figures) = figures else {
                println!("  vm{disk}  {:36} idle", rules.join(" "));
                continue;
            };
            let iops = figures.iops;
            let (wanted, is_met) = match *due {
                Entitlement::Part(part) => {
                    (format!("{:.0}", part * all), (iops - part * all).abs() <= WITHIN * part * all)
                }
                Entitlement::Iops(wanted) => {
                    (format!("{wanted:.0}"), (iops - wanted).abs() <= WITHIN * wanted)
                }
                Entitlement::AtLeast(least) => {
                    (format!("at least {least:.0}"), iops >= (1.0 - WITHIN) * least)
                }
                Entitlement::Any => ("the rest".to_owned(), true),
            };
            missed += u32::from(!is_met);
            println!(
                "  vm{disk}  {:36} depth {depth:2}  due {wanted:>12}  received {iops:6.1}  mean {:7.1} ms  {}",
                rules.join(" "),
                figures.mean_us / 1e3,
                if is_met { "" } else { "MISSED" }
            );
        }
        println!("  all together {all:.0}; {}", self.datastore()?);
        Ok(missed)
    }

    /// Checks that `auto` does not throttle a small load.
    fn below_the_threshold(&self) -> Result<u32> {
        println!("\nbelow the threshold (control auto)");
        self.ctl(&["datastore", "set", "array", "--throttle", "off"])?;
        self.ctl(&["datastore", "set", "array", "--throttle", "auto"])?;
        let received = self.load([2, 2, 2])?;
        let state: serde_json::Value =
            serde_json::from_str(&self.ctl(&["datastore", "list", "-o", "json"])?)?;
        let is_throttled = state[0].get("window").is_some();
        let all: f64 = received.iter().flatten().map(|figures| figures.iops).sum();
        println!(
            "  all together {all:.0}; {}{}",
            self.datastore()?,
            if is_throttled { "  MISSED" } else { "" }
        );
        Ok(u32::from(is_throttled))
    }

    /// Runs a client for each disk at the disk's queue depth.
    fn load(&self, depths: [u32; 3]) -> Result<[Option<Figures>; 3]> {
        let mut received = [None; 3];
        std::thread::scope(|scope| -> Result<()> {
            let clients = [0, 1, 2].map(|disk: usize| {
                scope.spawn(move || -> Result<Option<Figures>> {
                    let depth = depths[disk];
                    if depth == 0 {
                        return Ok(None);
                    }
                    let socket = self.directory.path().join("hob.sock");
                    let target = Target::Uri(format!("nbd+unix:///vm{disk}?socket={}", socket.display()));
                    let reads = Workload { depth, ..READS };
                    fio::run(&target, &reads, DISK_BYTES, self.seconds, &self.interrupt).map(Some)
                })
            });
            for (received, client) in received.iter_mut().zip(clients) {
                *received = client.join().expect("a client does not panic")?;
            }
            Ok(())
        })?;
        Ok(received)
    }

    fn datastore(&self) -> Result<String> {
        let state: serde_json::Value =
            serde_json::from_str(&self.ctl(&["datastore", "list", "-o", "json"])?)?;
        let latency = state[0]["latency_ns"].as_f64().unwrap_or(0.0) / 1e6;
        Ok(match state[0].get("window") {
            Some(window) => format!("window {window}, latency {latency:.1} ms"),
            None => format!("not throttled, latency {latency:.1} ms"),
        })
    }
}

fn wait_for(socket: &Path, interrupt: &Interrupt) -> Result<()> {
    for _ in 0..1000 {
        if socket.exists() {
            return Ok(());
        }
        interrupt.check()?;
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    bail!("{} did not appear", socket.display())
}
