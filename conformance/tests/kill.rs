//! kill -9 of the server under write load: every acknowledged write is in the backing file, and a
//! restarted server on the same flash serves the content of the backing.
//!
//! `HOB_KILLS` is the number of kills (default 20).

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use conformance::data::{Noise, assert_same, empty_file, repeated};
use conformance::nbd_client::{Address, CMD_WRITE, Client, FLAG_FUA};
use conformance::{MIB, Scratch, Serve};

const SIZE: u64 = 32 * MIB;
const SECTOR: usize = 512;
const WRITERS: u64 = 3;
const DEPTH: usize = 8;
/// Maximum time until a round has some load.
const LOAD_MAX: Duration = Duration::from_secs(60);
/// Number of sectors of one writer's part of the disk.
const PART: u64 = SIZE / WRITERS / SECTOR as u64;

/// Possible contents of a sector: the last acknowledged stamp, or the stamp of an unanswered write.
#[derive(Debug, Clone, Copy, Default)]
struct Sector {
    acknowledged: u64,
    asked: u64,
}

/// The stamps that one writer has written to its part of the disk in all rounds.
struct Writer {
    id: u64,
    dice: Noise,
    stamp: u64,
    sectors: Vec<Sector>,
}

impl Writer {
    fn new(id: u64, seed: u64) -> Self {
        Self { id, dice: Noise::new(seed ^ id), stamp: 0, sectors: vec![Sector::default(); PART as usize] }
    }

    /// Returns the bytes of sector `index` with `stamp`; a sector that was never written is zero.
    fn bytes(&self, index: u64, stamp: u64) -> Vec<u8> {
        if stamp == 0 {
            return vec![0; SECTOR];
        }
        repeated(&[self.id, index, stamp], SECTOR)
    }

    fn offset(&self, index: u64) -> u64 {
        (self.id * PART + index) * SECTOR as u64
    }

    /// Writes until the server is killed, with `DEPTH` requests in flight on different sectors.
    /// Returns the number of acknowledged writes.
    fn write_until_death(&mut self, address: &Address, in_all: &AtomicU64) -> u64 {
        let Ok(mut client) = Client::connect(address, "disk") else { return 0 };
        let mut flight: HashMap<u64, (u64, u64, u64)> = HashMap::new();
        let mut acknowledged = 0;
        loop {
            while flight.len() < DEPTH {
                let longest = if self.dice.below(8) == 0 { 256 } else { 16 };
                let count = 1 + self.dice.below(longest);
                let first = self.dice.below(PART - count);
                let meets = |&(start, len, _): &(u64, u64, u64)| start < first + count && first < start + len;
                if flight.values().any(meets) {
                    continue;
                }
                self.stamp += 1;
                let sectors: Vec<_> =
                    (first..first + count).map(|index| self.bytes(index, self.stamp)).collect();
                let data = sectors.concat();
                for index in first..first + count {
                    self.sectors[index as usize].asked = self.stamp;
                }
                let flags = if self.stamp.is_multiple_of(5) { FLAG_FUA } else { 0 };
                let sent = client.send(flags, CMD_WRITE, self.offset(first), data.len() as u32, &data);
                let Ok(cookie) = sent else { return acknowledged };
                flight.insert(cookie, (first, count, self.stamp));
            }
            let Ok(reply) = client.receive() else { return acknowledged };
            assert_eq!(reply.error, 0, "a write failed while the server lived");
            let (first, count, stamp) = flight.remove(&reply.cookie).expect("an answer to a question");
            for sector in &mut self.sectors[first as usize..(first + count) as usize] {
                sector.acknowledged = stamp;
            }
            acknowledged += 1;
            in_all.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Checks that `file` has every acknowledged stamp, and records the results of unanswered
    /// requests.
    fn check(&mut self, file: &File, round: u32) {
        let mut found = vec![0; PART as usize * SECTOR];
        file.read_exact_at(&mut found, self.offset(0)).unwrap();
        for index in 0..PART {
            let Sector { acknowledged, asked } = self.sectors[index as usize];
            let is = &found[index as usize * SECTOR..][..SECTOR];
            let settled = [acknowledged, asked].into_iter().find(|&stamp| is == self.bytes(index, stamp));
            let settled = settled.unwrap_or_else(|| {
                panic!(
                    "round {round}: sector {index} of writer {} holds neither {acknowledged} nor {asked}: {:02x?}",
                    self.id,
                    &is[..24]
                )
            });
            self.sectors[index as usize] = Sector { acknowledged: settled, asked: settled };
        }
    }
}

/// Promise 1 under write-through: acknowledged writes are on the backing whenever the server is
/// killed.
#[test]
fn acknowledged_writes_survive_kill_9() {
    let kills: u32 =
        std::env::var("HOB_KILLS").ok().map_or(20, |n| n.parse().expect("HOB_KILLS is a number"));
    let scratch = Scratch::new();
    empty_file(&scratch.path("disk.img"), SIZE);
    let serve = Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "16M", "8K");
    let mut dice = Noise::new(0x6b69_6c6c);
    let mut writers: Vec<Writer> = (0..WRITERS).map(|id| Writer::new(id, 99)).collect();
    let mut acknowledged = 0;
    let in_all = AtomicU64::new(0);
    for round in 1..=kills {
        let hob = serve.start(&scratch);
        let address = hob.address().clone();
        acknowledged += std::thread::scope(|scope| {
            let running: Vec<_> = writers
                .iter_mut()
                .map(|writer| {
                    let (address, in_all) = (&address, &in_all);
                    scope.spawn(move || writer.write_until_death(address, in_all))
                })
                .collect();
            std::thread::sleep(Duration::from_millis(10 + dice.below(250)));
            // Some rounds end before the first write, but on a slow host not all of them.
            let start = Instant::now();
            while in_all.load(Ordering::Relaxed) <= u64::from(round) * 10 && start.elapsed() < LOAD_MAX {
                std::thread::sleep(Duration::from_millis(5));
            }
            hob.kill();
            running.into_iter().map(|w| w.join().expect("a writer")).sum::<u64>()
        });
        let file = File::open(scratch.path("disk.img")).unwrap();
        for writer in &mut writers {
            writer.check(&file, round);
        }
        // Promise 2: the data left on flash is stale, and must not be served.
        let hob = serve.start(&scratch);
        let mut client = hob.connect();
        for _ in 0..2 {
            let offset = dice.below(SIZE - MIB) / 512 * 512;
            let mut expected = vec![0; MIB as usize];
            file.read_exact_at(&mut expected, offset).unwrap();
            let read = client.read(offset, MIB as u32).unwrap();
            assert_same(&read, &expected, offset, &format!("round {round}: disk and backing"));
        }
        hob.kill();
    }
    println!("{kills} kills, {acknowledged} acknowledged writes, every one of them found");
    assert!(acknowledged > u64::from(kills) * 10, "too little load: {acknowledged} writes");
}
