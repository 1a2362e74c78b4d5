//! `cargo xtask bench small-writes` measures the latency of small and unaligned changes under
//! write-back, over a backing with 4 ms per request.
//!
//! One client with one request in flight sends each kind of change in turn. The result of a kind is
//! the median latency, as a ratio of an aligned write of 4 KiB. Kinds with a flush after each
//! change are compared with an aligned write of 4 KiB and a flush. Issue 26 promises ratios of at
//! most 1.5.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use conformance::data::Noise;
use conformance::nbd_client::{Address, Client};
use conformance::{Daemon, Delays, SlowServer};

use super::data_path::scratch;
use crate::shell::{self, Interrupt};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

const DISK_BYTES: u64 = 512 * MIB;
const CACHE_BYTES: u64 = 512 * MIB;
const RATIO_MAX: f64 = 1.5;

/// Distance between two changes in the clean or the dirty area, bytes.
const BLOCK_BYTES: u64 = 16 * KIB;

/// Size of the clean area, at the start of the disk: cached and clean before each round, bytes.
const CLEAN_BYTES: u64 = 32 * MIB;
/// Size of the dirty area, after the clean area: dirty data that the journal records, bytes.
const DIRTY_BYTES: u64 = 32 * MIB;
/// Start of the rest of the disk, bytes. Its sectors are not cached at first.
const REST: u64 = CLEAN_BYTES + DIRTY_BYTES;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Run one short round, to test the benchmark itself
    #[arg(long)]
    quick: bool,
    /// Number of rounds
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Number of changes of each kind and round
    #[arg(long, default_value_t = 400)]
    count: u32,
    /// Directory on local flash for disks and pools [default: the target directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// hob binary to measure [default: HOB_BIN, or a new release build]
    #[arg(long)]
    hob: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Write(u64),
    Zeroes(u64),
    Trim(u64),
}

/// Position of a kind's changes.
#[derive(Clone, Copy, Debug)]
enum At {
    /// Sectors that are cached and clean.
    Clean,
    /// Dirty sectors.
    Dirty,
    /// Anywhere in the rest of the disk.
    Random,
    /// The changes follow each other in the rest of the disk.
    Sequential,
}

/// A kind of change.
struct Kind {
    name: &'static str,
    change: Change,
    at: At,
    flushes: bool,
}

const fn kind(name: &'static str, change: Change, at: At) -> Kind {
    Kind { name, change, at, flushes: false }
}

/// The kinds of changes. The first kind, and the first kind with flushes, are the bases of the
/// ratios.
const KINDS: [Kind; 15] = [
    kind("write of 4 KiB", Change::Write(4 * KIB), At::Random),
    kind("write of 4 KiB, clean sector", Change::Write(4 * KIB), At::Clean),
    kind("write of 4 KiB, dirty sector", Change::Write(4 * KIB), At::Dirty),
    kind("write of 512 bytes, clean sector", Change::Write(512), At::Clean),
    kind("write of 512 bytes, dirty sector", Change::Write(512), At::Dirty),
    kind("write of 8 KiB at offset 512", Change::Write(8 * KIB), At::Clean),
    kind("zeroes, 4 KiB", Change::Zeroes(4 * KIB), At::Random),
    kind("zeroes, 64 KiB", Change::Zeroes(64 * KIB), At::Random),
    kind("zeroes, 256 KiB", Change::Zeroes(256 * KIB), At::Random),
    kind("zeroes, 512 bytes, clean sector", Change::Zeroes(512), At::Clean),
    kind("trim, 4 KiB", Change::Trim(4 * KIB), At::Random),
    kind("trim, 64 KiB", Change::Trim(64 * KIB), At::Random),
    kind("trim, 4 KiB of dirty data", Change::Trim(4 * KIB), At::Dirty),
    Kind { name: "write of 4 KiB, flush", change: Change::Write(4 * KIB), at: At::Random, flushes: true },
    Kind { name: "log of 512 bytes, flush", change: Change::Write(512), at: At::Sequential, flushes: true },
];

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let hob = super::hob(arguments.hob.as_deref())?;
    let dir = arguments.dir.clone().map_or_else(shell::target_dir, Ok)?;
    let scratch = scratch(&dir)?;
    let interrupt = Interrupt::listen()?;
    let (rounds, count) =
        if arguments.quick { (1, 40) } else { (arguments.rounds.max(1), arguments.count.max(1)) };
    let mut bench = SmallWrites::start(&hob, scratch.path())?;
    let mut medians = vec![Vec::new(); KINDS.len()];
    for _ in 0..rounds {
        bench.prepare()?;
        for (kind, medians) in KINDS.iter().zip(&mut medians) {
            interrupt.check()?;
            medians.push(bench.measure(kind, count).with_context(|| kind.name)?);
        }
    }
    let medians: Vec<f64> =
        medians.into_iter().filter_map(|of_rounds| super::median(of_rounds.into_iter())).collect();
    let base =
        |flushes| KINDS.iter().position(|kind| kind.flushes == flushes).map_or(f64::NAN, |at| medians[at]);
    println!("{:<36}{:>12}{:>8}", "medians over a backing of 4 ms", "µs", "ratio");
    for (kind, median) in KINDS.iter().zip(&medians) {
        let ratio = median / base(kind.flushes);
        let verdict = if ratio <= RATIO_MAX { "" } else { "  above 1.5" };
        println!("{:<36}{median:>12.0}{ratio:>8.2}{verdict}", kind.name);
    }
    Ok(())
}

struct SmallWrites {
    client: Client,
    daemon: Daemon,
    dice: Noise,
    /// Unused blocks of the clean and of the dirty area.
    clean: Vec<u64>,
    dirty: Vec<u64>,
    _backing: SlowServer,
}

impl SmallWrites {
    fn start(hob: &Path, dir: &Path) -> Result<Self> {
        let at = |name: &str| dir.join(name);
        fs::File::create(at("image"))?.set_len(DISK_BYTES)?;
        let ms = Duration::from_millis;
        let delays = Delays { read: ms(4), write: ms(4), flush: ms(4) };
        let backing = SlowServer::start(&at("backing.sock"), &at("image"), delays);
        let text = |name: &str| at(name).display().to_string();
        let config = format!(
            "state_dir = {:?}\nlisten = [\"unix:{}\"]\n[control]\nlisten = [\"unix:{}\"]\n\
             [[pool]]\nname = \"flash\"\ndevices = [{:?}]\nsize = {}\n\
             [[disk]]\nname = \"disk\"\nbacking = \"nbd+unix:///?socket={}\"\n\
             [disk.cache]\npool = \"flash\"\nsize = {CACHE_BYTES}\npreset = \"auto\"\n\
             dirty_start = 50\ndirty_age_max = 0\n",
            text("state"),
            text("nbd.sock"),
            text("ctl.sock"),
            text("pool"),
            CACHE_BYTES + CACHE_BYTES / 4 + 256 * MIB,
            text("backing.sock"),
        );
        fs::write(at("hob.toml"), config)?;
        let daemon = Daemon::start_program(hob, &at("hob.toml"), &at("ctl.sock")).with_client(hob);
        daemon.ctl(&["disk", "list"]);
        let client = Client::connect(&Address::Unix(at("nbd.sock")), "disk").context("connect to hob")?;
        Ok(Self { client, daemon, dice: Noise::new(1), clean: vec![], dirty: vec![], _backing: backing })
    }

    /// Makes the clean area cached and clean, and the dirty area dirty and recorded in the journal.
    fn prepare(&mut self) -> Result<()> {
        let data = vec![1; MIB as usize];
        for at in (0..CLEAN_BYTES).step_by(MIB as usize) {
            self.client.write(at, &data)?;
        }
        // Changing the mode to write-through drains the cache.
        self.daemon.ctl(&["cache", "set", "disk", "--mode", "write-through"]);
        self.daemon.ctl(&["cache", "set", "disk", "--mode", "write-back"]);
        for at in (CLEAN_BYTES..CLEAN_BYTES + DIRTY_BYTES).step_by(MIB as usize) {
            self.client.write(at, &data)?;
        }
        self.clean = shuffled(&mut self.dice, CLEAN_BYTES / BLOCK_BYTES);
        self.dirty = shuffled(&mut self.dice, DIRTY_BYTES / BLOCK_BYTES);
        Ok(self.client.flush()?)
    }

    /// Returns the median latency of a kind, microseconds.
    fn measure(&mut self, kind: &Kind, count: u32) -> Result<f64> {
        let data = vec![2; (8 * KIB) as usize];
        let blocks = self.blocks(kind, count);
        let mut latencies = Vec::new();
        for (number, block) in blocks.into_iter().enumerate() {
            let offset = match kind.at {
                At::Random => REST + block * 64 * KIB / alignment(kind) * alignment(kind),
                At::Clean => block * BLOCK_BYTES + lead(kind),
                At::Dirty => CLEAN_BYTES + block * BLOCK_BYTES + lead(kind),
                At::Sequential => REST + number as u64 * 512,
            };
            let start = Instant::now();
            match kind.change {
                Change::Write(bytes) => self.client.write(offset, &data[..bytes as usize])?,
                Change::Zeroes(bytes) => self.client.write_zeroes(offset, bytes as u32)?,
                Change::Trim(bytes) => self.client.trim(offset, bytes as u32)?,
            }
            if kind.flushes {
                self.client.flush()?;
            }
            latencies.push(start.elapsed().as_nanos() as f64 / 1e3);
        }
        // The next kind starts without discards in progress.
        self.client.flush()?;
        std::thread::sleep(Duration::from_millis(100));
        super::median(latencies.into_iter()).context("no change was measured")
    }

    /// Returns `count` blocks for a kind of change, in random order. A block of the clean or the
    /// dirty area is used only once in a round.
    fn blocks(&mut self, kind: &Kind, count: u32) -> Vec<u64> {
        let mut rest = shuffled(&mut self.dice, (DISK_BYTES - REST) / (64 * KIB));
        let all = match kind.at {
            At::Clean => &mut self.clean,
            At::Dirty => &mut self.dirty,
            At::Random | At::Sequential => &mut rest,
        };
        all.split_off(all.len().saturating_sub(count as usize))
    }
}

/// Returns the offset of a change in its block, bytes.
fn lead(kind: &Kind) -> u64 {
    match kind.change {
        Change::Write(bytes) if bytes != 4 * KIB => 512,
        Change::Zeroes(512) => 512,
        _ => 0,
    }
}

/// Returns the alignment of changes anywhere in the rest of the disk, bytes.
fn alignment(kind: &Kind) -> u64 {
    let (Change::Write(bytes) | Change::Zeroes(bytes) | Change::Trim(bytes)) = kind.change;
    bytes.max(4 * KIB)
}

/// Returns the numbers below `count` in random order.
fn shuffled(dice: &mut Noise, count: u64) -> Vec<u64> {
    let mut blocks: Vec<u64> = (0..count).collect();
    for at in (1..blocks.len()).rev() {
        blocks.swap(at, dice.below(at as u64 + 1) as usize);
    }
    blocks
}
