//! kill -9 of a daemon in write-back under load: acknowledged writes survive, content that was read
//! after a restart does not change, and fio verifies too. With two copies of dirty data, one of the
//! flash files is filled with noise between two runs.
//!
//! After a kill of the process, the kernel still has the process's writes; `selftest.rs` tests
//! power cuts. `HOB_KILLS` is the number of kills of each test (default 6).

use std::collections::{HashMap, VecDeque};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use conformance::data::{Noise, empty_file, repeated};
use conformance::hob::command;
use conformance::nbd_client::{Address, CMD_FLUSH, CMD_WRITE, Client, FLAG_FUA};
use conformance::{Daemon, MIB, Scratch, Serve, Tool};

const SECTOR: usize = 512;
const WRITERS: u64 = 2;
const DEPTH: usize = 8;
/// Maximum time until a round has some load.
const LOAD_MAX: Duration = Duration::from_secs(60);
/// Size of one writer's part of the disk, bytes. After the writers' parts, fio has a part as large
/// as all of them.
const PART: u64 = 8 * MIB;
const SIZE: u64 = 2 * WRITERS * PART;
/// Number of kills between two runs of fio.
const FIO_EVERY: u32 = 5;
/// Offset of a small pool's segments (docs/FORMAT.md).
const DATA_OFFSET: u64 = 2 * MIB;
const POOL_FILE: u64 = 48 * MIB;

/// Possible contents of a sector of 512 bytes: the stamp that was flushed or read, or one that was
/// written since.
#[derive(Debug, Clone, Default)]
struct Sector {
    sure: u64,
    open: Vec<u64>,
}

impl Sector {
    fn promise(&mut self, stamp: u64) {
        self.sure = self.sure.max(stamp);
        self.open.retain(|open| *open > stamp);
    }
}

#[derive(Debug, Clone, Copy)]
enum Flying {
    Write {
        first: u64,
        count: u64,
        stamp: u64,
        durable: bool,
    },
    /// Number of writes that were answered before the flush was sent, and that the flush must make
    /// durable.
    Flush {
        covers: u64,
    },
}

/// The stamps that one writer has written to its part of the disk in all rounds.
struct Writer {
    id: u64,
    /// True if a kill loses no acknowledged write, flushed or not.
    keeps_acknowledged: bool,
    dice: Noise,
    stamp: u64,
    sectors: Vec<Sector>,
    /// Number of answered writes without FUA.
    answered: u64,
    /// Unflushed writes without FUA: number, first sector, sectors, stamp.
    unflushed: VecDeque<(u64, u64, u64, u64)>,
    promised: u64,
}

impl Writer {
    fn new(id: u64, keeps_acknowledged: bool) -> Self {
        let sectors = vec![Sector::default(); (PART / SECTOR as u64) as usize];
        Self {
            id,
            keeps_acknowledged,
            dice: Noise::new(7 + id),
            stamp: 0,
            sectors,
            answered: 0,
            unflushed: VecDeque::new(),
            promised: 0,
        }
    }

    /// Returns the bytes of sector `index` with `stamp`; a sector that was never written is zero.
    fn bytes(&self, index: u64, stamp: u64) -> Vec<u8> {
        if stamp == 0 {
            return vec![0; SECTOR];
        }
        repeated(&[self.id + 1, index, stamp], SECTOR)
    }

    /// Writes and flushes until the server is killed, without two requests in flight on one sector.
    /// Adds the writes that hob has promised to keep to `in_all`.
    fn write_until_death(&mut self, address: &Address, in_all: &AtomicU64) {
        self.unflushed.clear();
        let Ok(mut client) = Client::connect(address, "disk") else { return };
        let mut flight: HashMap<u64, Flying> = HashMap::new();
        loop {
            while flight.len() < DEPTH {
                let Some(sent) = self.send_one(&mut client, &flight) else { continue };
                let Ok((cookie, flying)) = sent else { return };
                flight.insert(cookie, flying);
            }
            let Ok(reply) = client.receive() else { return };
            assert_eq!(reply.error, 0, "a request failed while the server lived");
            let before = self.promised;
            match flight.remove(&reply.cookie).expect("an answer to a question") {
                Flying::Write { first, count, stamp, durable } if durable || self.keeps_acknowledged => {
                    self.promise(first, count, stamp);
                }
                Flying::Write { first, count, stamp, .. } => {
                    self.answered += 1;
                    self.unflushed.push_back((self.answered, first, count, stamp));
                }
                Flying::Flush { covers } => {
                    while let Some(&(number, first, count, stamp)) = self.unflushed.front()
                        && number <= covers
                    {
                        self.promise(first, count, stamp);
                        self.unflushed.pop_front();
                    }
                }
            }
            in_all.fetch_add(self.promised - before, Ordering::Relaxed);
        }
    }

    /// Returns `None` if the random request overlaps one in flight.
    fn send_one(
        &mut self,
        client: &mut Client,
        flight: &HashMap<u64, Flying>,
    ) -> Option<std::io::Result<(u64, Flying)>> {
        if self.dice.below(16) == 0 {
            let covers = self.answered;
            let sent = client.send(0, CMD_FLUSH, 0, 0, &[]);
            return Some(sent.map(|cookie| (cookie, Flying::Flush { covers })));
        }
        let sectors = self.sectors.len() as u64;
        // Mostly whole blocks of 4 KiB; some requests have other sizes.
        let (first, count) = match self.dice.below(6) {
            0 => (self.dice.below(sectors - 64), 1 + self.dice.below(64)),
            n => (self.dice.below(sectors / 8 - n) * 8, n * 8),
        };
        let meets = |flying: &Flying| match *flying {
            Flying::Write { first: other, count: its, .. } => other < first + count && first < other + its,
            Flying::Flush { .. } => false,
        };
        if flight.values().any(meets) {
            return None;
        }
        self.stamp += 1;
        let stamp = self.stamp;
        let data = (first..first + count).map(|index| self.bytes(index, stamp)).collect::<Vec<_>>().concat();
        for sector in &mut self.sectors[first as usize..(first + count) as usize] {
            sector.open.push(stamp);
        }
        let durable = self.dice.below(8) == 0;
        let offset = self.id * PART + first * SECTOR as u64;
        let flags = if durable { FLAG_FUA } else { 0 };
        let sent = client.send(flags, CMD_WRITE, offset, data.len() as u32, &data);
        Some(sent.map(|cookie| (cookie, Flying::Write { first, count, stamp, durable })))
    }

    fn promise(&mut self, first: u64, count: u64, stamp: u64) {
        self.sectors[first as usize..(first + count) as usize].iter_mut().for_each(|s| s.promise(stamp));
        self.promised += 1;
    }

    /// Checks that every sector has an allowed stamp, and records which one.
    fn check(&mut self, read: impl Fn(u64, u64) -> Vec<u8>, when: &str) {
        for start in (0..PART).step_by(MIB as usize) {
            let found = read(self.id * PART + start, MIB);
            for (index, is) in (start / SECTOR as u64..).zip(found.chunks(SECTOR)) {
                let Sector { sure, open } = &self.sectors[index as usize];
                let may_be = [*sure].into_iter().chain(open.iter().copied());
                let stamp = may_be.into_iter().find(|stamp| is == self.bytes(index, *stamp));
                let stamp = stamp.unwrap_or_else(|| {
                    panic!(
                        "{when}: sector {index} of writer {} holds none of {sure}, {open:?}: {:02x?}",
                        self.id,
                        &is[..24]
                    )
                });
                self.sectors[index as usize] = Sector { sure: stamp, open: Vec::new() };
            }
        }
    }
}

struct Stage {
    scratch: Scratch,
    devices: u64,
    backing: String,
}

impl Stage {
    /// Creates a stage with a raw file.
    fn new(devices: u64, settings: &str) -> Self {
        let scratch = Scratch::new();
        empty_file(&scratch.path("disk.img"), SIZE);
        let backing = scratch.text("disk.img");
        Self::over(scratch, backing, devices, settings)
    }

    /// Creates a stage with objects in a directory.
    fn on_objects(object_size: &str, settings: &str) -> Self {
        let scratch = Scratch::new();
        let backing = format!("objects+file://{}", scratch.text("objects"));
        let made = command(&[
            "objects",
            "create",
            &backing,
            "--size",
            &SIZE.to_string(),
            "--object-size",
            object_size,
        ]);
        assert!(made.success(), "{}", made.all());
        Self::over(scratch, backing, 1, settings)
    }

    fn over(scratch: Scratch, backing: String, devices: u64, settings: &str) -> Self {
        let flash: Vec<String> =
            (0..devices).map(|n| format!("{:?}", scratch.text(&format!("flash{n}")))).collect();
        let ring = std::env::var("HOB_RING").unwrap_or_else(|_| "auto".to_owned());
        let config = format!(
            "ring = \"{ring}\"\n{}\
             [[pool]]\nname = \"pool\"\ndevices = [{}]\nsize = {POOL_FILE}\nsegment_size = \"1M\"\n\
             [[disk]]\nname = \"disk\"\nbacking = {:?}\n\
             [disk.cache]\npool = \"pool\"\nsize = \"24M\"\nmode = \"write-back\"\ndirty_age_max = 2\n{settings}\n",
            scratch.daemon_config(),
            flash.join(", "),
            backing,
        );
        scratch.write_config(config);
        Self { scratch, devices, backing }
    }

    #[track_caller]
    fn start(&self) -> Daemon {
        let _ = std::fs::remove_file(self.scratch.path("ctl.sock"));
        let daemon = self.scratch.start_daemon();
        let shown = daemon.ctl(&["disk", "show", "disk", "-o", "json"]);
        assert!(shown.contains("write-back"), "the disk has no cache that writes back: {shown}");
        daemon
    }

    #[track_caller]
    fn connect(&self) -> Client {
        Client::connect(&self.scratch.nbd(), "disk").unwrap_or_else(|e| panic!("connect to hob: {e}"))
    }

    /// Runs fio on its half of the disk: writes and flushes with `seed`, or verifies what was
    /// written with it.
    #[track_caller]
    fn fio(&self, seed: u32, more: &[&str]) {
        let output = Tool::new("fio")
            .args(["--name=verify", "--ioengine=nbd", "--uri", &self.scratch.nbd().uri("disk")])
            .args(["--rw=randwrite", "--bsrange=4k-64k", "--iodepth=16", "--serialize_overlap=1"])
            .args([&format!("--offset={}", SIZE / 2), &format!("--size={}", SIZE / 2)])
            .args(["--verify=crc32c", "--verify_fatal=1", "--output-format=terse"])
            .args([&format!("--randseed={seed}"), "--allrandrepeat=0"])
            .args(more)
            .limit(Duration::from_secs(600))
            .output();
        assert!(output.success() && !output.all().contains("verify:"), "fio: {}", output.all());
    }

    /// Kills the daemon repeatedly. With `damage`, damages one of the flash files while the daemon
    /// is stopped.
    fn kill_again_and_again(&self, damage: bool) {
        let kills: u32 =
            std::env::var("HOB_KILLS").ok().map_or(6, |n| n.parse().expect("HOB_KILLS is a number"));
        let keeps_acknowledged = !self.backing.starts_with("objects");
        let mut writers: Vec<Writer> = (0..WRITERS).map(|id| Writer::new(id, keeps_acknowledged)).collect();
        let mut dice = Noise::new(0x6b69_6c6c);
        let mut verified = None;
        let in_all = AtomicU64::new(0);
        for round in 0..kills {
            let daemon = self.start();
            self.check(&mut writers, &format!("round {round}"));
            if let Some(seed) = verified {
                self.fio(seed, &["--verify_only=1"]);
            }
            if round % FIO_EVERY == 0 {
                self.fio(round, &["--do_verify=1", "--end_fsync=1"]);
                verified = Some(round);
            }
            if damage {
                // After the drain, no dirty data is left whose other copy was damaged last time.
                daemon.ctl(&["drain", "disk"]);
            }
            let address = self.scratch.nbd();
            std::thread::scope(|scope| {
                for writer in &mut writers {
                    let (address, in_all) = (&address, &in_all);
                    scope.spawn(move || writer.write_until_death(address, in_all));
                }
                std::thread::sleep(Duration::from_millis(20 + dice.below(400)));
                // Some rounds end before the first write, but on a slow host not all of them.
                let start = Instant::now();
                let enough = u64::from(round + 1) * 10;
                while in_all.load(Ordering::Relaxed) <= enough && start.elapsed() < LOAD_MAX {
                    std::thread::sleep(Duration::from_millis(5));
                }
                // Dropping the daemon kills it with SIGKILL.
                drop(daemon);
            });
            if damage {
                let name = format!("flash{}", u64::from(round) % self.devices);
                spoil(&self.scratch.path(&name), &mut dice);
            }
        }
        let daemon = self.start();
        self.check(&mut writers, "at the end");
        daemon.ctl(&["drain", "disk"]);
        daemon.stop();
        // Without the cache.
        let alone = Serve::disk(&self.backing).flag("--read-only").start(&self.scratch);
        for writer in &mut writers {
            let client = std::cell::RefCell::new(alone.connect());
            let read = |offset, len| client.borrow_mut().read(offset, len as u32).expect("no read may fail");
            writer.check(read, "the backing after a drain");
        }
        let promised: u64 = writers.iter().map(|writer| writer.promised).sum();
        println!("{kills} kills, {promised} writes that hob had promised to keep, every one of them found");
        assert!(promised > u64::from(kills) * 10, "too little load: {promised} writes");
    }

    #[track_caller]
    fn check(&self, writers: &mut [Writer], when: &str) {
        // Twice: content that was read once must not change.
        for _ in 0..2 {
            for writer in &mut *writers {
                let client = std::cell::RefCell::new(self.connect());
                let read =
                    |offset, len| client.borrow_mut().read(offset, len as u32).expect("no read may fail");
                writer.check(read, when);
            }
        }
    }
}

/// Overwrites all of the caches' data and journals on a flash file with noise.
fn spoil(path: &Path, dice: &mut Noise) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    for offset in (DATA_OFFSET..POOL_FILE).step_by(MIB as usize) {
        file.write_all_at(&dice.bytes(MIB as usize), offset).unwrap();
    }
}

/// Promise 1 under write-back: acknowledged writes survive whenever the process is killed, because a
/// guest that reconnects expects them.
#[test]
fn acknowledged_write_back_survives_kill_9() {
    Stage::new(1, "block_size = \"4K\"").kill_again_and_again(false);
}

/// Promise 1 under write-back with large blocks, in which sectors are overwritten in place.
#[test]
fn acknowledged_write_back_survives_kill_9_in_large_blocks() {
    Stage::new(1, "block_size = \"32K\"").kill_again_and_again(false);
}

/// Promise 3 with dirty data: any one of the flash files may be lost.
#[test]
fn acknowledged_write_back_survives_kill_9_and_the_loss_of_either_copy() {
    Stage::new(2, "block_size = \"4K\"\ncopies = \"2-dirty\"").kill_again_and_again(true);
}

/// A disk of objects has no data in the kernel. Unflushed data is lost with the process, and the
/// rest is the state of the disk at one moment.
#[test]
fn flushed_writes_to_objects_survive_kill_9() {
    Stage::on_objects("256K", "block_size = \"4K\"").kill_again_and_again(false);
}
