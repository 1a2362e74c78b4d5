//! `guest-load DEVICE HOT_BLOCKS`: the load of a migrating guest. Runs inside the guest, as a separate
//! program.
//!
//! Four threads read and write blocks of 4 KiB with direct I/O. Each thread owns every fourth block
//! of the device, and uses only its own blocks. The thread counts the writes of each block, and checks
//! all data that it reads. Nine of ten requests are reads. Nine of ten reads and half of the writes go
//! to the hot set, which is the first HOT_BLOCKS blocks. Some requests are flushes. Once a second
//! the program prints a line with the number of completed requests, the longest latency in µs, and
//! the age in ms of the oldest request that has not ended. A line on standard input ends the load.
//! Then the program reads and checks the whole device.
//!
//! Exits with 1 if any block is wrong or any request fails.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, Error, stdin};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use conformance::data::Noise;
use conformance::load::{BLOCK_BYTES, Pattern};

const THREADS: u64 = 4;
const O_DIRECT: i32 = 0o40_000;
/// Pause of each thread after a request, so that the rate of requests depends little on the speed
/// of the disk.
const REST: Duration = Duration::from_millis(8);
/// Number of writes after which a thread sends a flush.
const FLUSH_EACH: u64 = 16;
/// Blocks per request when the whole device is read.
const SWEEP_BLOCKS: usize = 64;

/// Aligned memory for reads past the page cache.
#[repr(align(4096))]
struct Aligned<const N: usize>([u8; N]);

/// Counts since the last line.
#[derive(Default)]
struct Tally {
    reads: AtomicU64,
    writes: AtomicU64,
    slowest_read_us: AtomicU64,
    slowest_write_us: AtomicU64,
    wrong: AtomicU64,
    failed: AtomicU64,
}

struct Load {
    device: File,
    blocks: u64,
    hot_blocks: u64,
    pattern: Pattern,
    tally: Tally,
    over: AtomicBool,
    start: Instant,
    /// When each thread's request began, µs after `start`; 0 between requests.
    begun_us: [AtomicU64; THREADS as usize],
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let [_, device, hot_blocks] = &args[..] else {
        eprintln!("guest-load DEVICE HOT_BLOCKS");
        return ExitCode::from(2);
    };
    let hot_blocks = hot_blocks.parse().expect("a number of blocks");
    let device = OpenOptions::new().read(true).write(true).custom_flags(O_DIRECT).open(device);
    let device = device.expect("the device opens");
    let blocks = size(&device) / BLOCK_BYTES as u64;
    let (pattern, tally) = (Pattern::new(), Tally::default());
    let load = Load {
        device,
        blocks,
        hot_blocks,
        pattern,
        tally,
        over: AtomicBool::new(false),
        start: Instant::now(),
        begun_us: Default::default(),
    };
    let versions = load.run();
    load.sweep(load.blocks, &versions);
    let (wrong, failed) = (load.tally.wrong.load(Relaxed), load.tally.failed.load(Relaxed));
    let writes: u64 = versions.iter().flatten().map(|v| u64::from(*v)).sum();
    println!("GUEST-LOAD-END blocks={blocks} writes={writes} wrong={wrong} failed={failed}");
    ExitCode::from(u8::from(wrong + failed > 0))
}

/// Returns the size of a block device, whose metadata has no length.
fn size(device: &File) -> u64 {
    use std::io::{Seek, SeekFrom};
    (&mut &*device).seek(SeekFrom::End(0)).expect("a device has an end")
}

impl Load {
    /// Runs the load until a line arrives on standard input. Returns how often each thread wrote each
    /// of its blocks.
    fn run(&self) -> Vec<Vec<u32>> {
        let versions = vec![vec![0; (self.blocks / THREADS + 1) as usize]; THREADS as usize];
        self.sweep(self.hot_blocks, &versions);
        println!("GUEST-LOAD-BEGINS blocks={} hot={}", self.blocks, self.hot_blocks);
        std::thread::scope(|scope| {
            let owners: Vec<_> = versions
                .into_iter()
                .zip(0..)
                .map(|(mine, owner)| scope.spawn(move || self.own(owner, mine)))
                .collect();
            scope.spawn(|| {
                let mut line = String::new();
                while line.is_empty() && stdin().lock().read_line(&mut line).is_ok() {}
                self.over.store(true, Relaxed);
            });
            let mut second = 0;
            while !owners.iter().all(std::thread::ScopedJoinHandle::is_finished) {
                std::thread::sleep(Duration::from_secs(1));
                second += 1;
                self.say(second);
            }
            owners.into_iter().map(|owner| owner.join().expect("an owner ends")).collect()
        })
    }

    fn say(&self, second: u64) {
        let take = |count: &AtomicU64| count.swap(0, Relaxed);
        let Tally { reads, writes, slowest_read_us, slowest_write_us, wrong, failed } = &self.tally;
        let now = self.start.elapsed().as_micros() as u64;
        let begun = self.begun_us.iter().map(|begun| begun.load(Relaxed)).filter(|begun| *begun > 0).min();
        let oldest_ms = now.saturating_sub(begun.unwrap_or(now)) / 1000;
        println!(
            "GUEST-LOAD second={second} reads={} writes={} slowest_read_us={} slowest_write_us={} wrong={} failed={} oldest_ms={oldest_ms}",
            take(reads),
            take(writes),
            take(slowest_read_us),
            take(slowest_write_us),
            wrong.load(Relaxed),
            failed.load(Relaxed),
        );
    }

    /// Runs the requests of the thread with number `owner`.
    fn own(&self, owner: u64, mut versions: Vec<u32>) -> Vec<u32> {
        let mut dice = Noise::new(owner + 1);
        let mut memory = Box::new(Aligned([0; BLOCK_BYTES]));
        let mut writes = 0_u64;
        while !self.over.load(Relaxed) {
            let read = dice.below(10) > 0;
            let hot = dice.below(10) < if read { 9 } else { 5 };
            let among = if hot { self.hot_blocks } else { self.blocks };
            let place = dice.below(among / THREADS);
            let (block, version) = (place * THREADS + owner, &mut versions[place as usize]);
            let start = Instant::now();
            self.begun_us[owner as usize].store((start - self.start).as_micros() as u64, Relaxed);
            let (done, count, slowest) = if read {
                let done = self.device.read_exact_at(&mut memory.0, block * BLOCK_BYTES as u64);
                let done = done.map(|()| self.check(block, u64::from(*version), &memory.0));
                (done, &self.tally.reads, &self.tally.slowest_read_us)
            } else {
                writes += 1;
                *version += 1;
                self.pattern.fill(block, u64::from(*version), &mut memory.0);
                let flush = writes.is_multiple_of(FLUSH_EACH);
                (self.write(block, &memory.0, flush), &self.tally.writes, &self.tally.slowest_write_us)
            };
            self.begun_us[owner as usize].store(0, Relaxed);
            slowest.fetch_max(start.elapsed().as_micros() as u64, Relaxed);
            count.fetch_add(1, Relaxed);
            self.note(block, done);
            std::thread::sleep(REST);
        }
        versions
    }

    fn write(&self, block: u64, bytes: &[u8], flush: bool) -> Result<(), Error> {
        self.device.write_all_at(bytes, block * BLOCK_BYTES as u64)?;
        if flush { self.device.sync_data() } else { Ok(()) }
    }

    fn check(&self, block: u64, expected: u64, bytes: &[u8; BLOCK_BYTES]) {
        let complaint = match self.pattern.version(block, bytes) {
            Ok(version) if version == expected => return,
            Ok(version) => format!("block {block} is version {version} and not {expected}"),
            Err(complaint) => complaint,
        };
        self.tally.wrong.fetch_add(1, Relaxed);
        println!("GUEST-READ-SOMETHING-ELSE {complaint}");
    }

    fn note(&self, block: u64, done: Result<(), Error>) {
        if let Err(e) = done {
            self.tally.failed.fetch_add(1, Relaxed);
            println!("GUEST-WRITE-FAILED or read, block {block}: {e}");
        }
    }

    /// Reads and checks the first `blocks` blocks in large requests.
    fn sweep(&self, blocks: u64, versions: &[Vec<u32>]) {
        let mut memory = Box::new(Aligned([0; SWEEP_BLOCKS * BLOCK_BYTES]));
        for first in (0..blocks).step_by(SWEEP_BLOCKS) {
            let count = (blocks - first).min(SWEEP_BLOCKS as u64) as usize;
            let bytes = &mut memory.0[..count * BLOCK_BYTES];
            let done = self.device.read_exact_at(bytes, first * BLOCK_BYTES as u64);
            let failed = done.is_err();
            self.note(first, done);
            let (found, _) = bytes.as_chunks::<BLOCK_BYTES>();
            for (block, bytes) in (first..).zip(found).filter(|_| !failed) {
                let version = versions[(block % THREADS) as usize][(block / THREADS) as usize];
                self.check(block, u64::from(version), bytes);
            }
        }
    }
}
