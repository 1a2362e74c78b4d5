//! A disk on Ceph RBD while OSDs are killed, paused and restarted: no error and no wrong byte, and
//! hits are served throughout.
//!
//! `HOB_RBD_SECONDS` sets the duration. Each round of faults is completed, and takes half a minute.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use conformance::data::{Noise, assert_same, noise_file};
use conformance::nbd_client::{Client, read_mibs};
use conformance::process::Process;
use conformance::scratch::wait_for;
use conformance::{Cluster, Daemon, MIB, Scratch, Tool};

/// The range that is read repeatedly, and is in the cache from the beginning.
const HOT: Range<u64> = 0..8 * MIB;
/// The range that is read through an export without promotion, so that most reads go to the
/// cluster.
const COLD: Range<u64> = 8 * MIB..40 * MIB;
/// The range that fio writes and verifies.
const WRITTEN: Range<u64> = 40 * MIB..104 * MIB;
const SIZE: u64 = WRITTEN.end;

/// Size of the cache, bytes: enough for the hot and the written range, so that no hot data is
/// evicted.
const CACHE: u64 = 112 * MIB;

/// Time for which an OSD is paused. The others need 6 s to notice.
const STILL: Duration = Duration::from_secs(11);

/// Time for which a killed OSD is stopped.
const AWAY: Duration = Duration::from_secs(3);

/// Maximum time of nearly all hits. A read that waits for the cluster takes most of [`STILL`].
const HIT_MAX: Duration = Duration::from_secs(2);

/// Maximum number of hits of a round that take longer because the kernel is busy.
const LATE_MAX: u64 = 3;

/// Minimum number of hits while the cluster is paused.
const SERVED_MIN: u64 = 500;

const BLOCK: u64 = 4096;

struct Stage {
    // Dropped in this order.
    daemon: Daemon,
    scratch: Scratch,
    cluster: Cluster,
    image: Vec<u8>,
}

impl Stage {
    #[track_caller]
    fn new() -> Stage {
        let cluster = Cluster::start(3);
        let scratch = Scratch::new();
        let file = scratch.path("disk.img");
        noise_file(&file, COLD.end, 61);
        let image = std::fs::read(&file).unwrap();
        std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(SIZE).unwrap();
        cluster.import(&file, "disk");
        std::fs::remove_file(&file).unwrap();
        scratch.configure("");
        let daemon = scratch.start_daemon();
        wait_for("the NBD socket", || scratch.path("nbd.sock").exists());
        daemon.tell(&format!("pool create fast {} --size 192M --segment-size 1M", scratch.text("flash")));
        daemon.ctl(&["disk", "add", "vm", "--backing", &cluster.spec("disk")]);
        let size = format!("{}M", CACHE / MIB);
        daemon.tell(&format!("cache enable vm --pool fast --size {size} --block-size 4K --mode write-back"));
        daemon.ctl(&["export", "add", "vm", "cold", "--read-only", "--no-promote"]);
        Stage { daemon, scratch, cluster, image }
    }

    fn connect(&self) -> Client {
        Client::connect(&self.scratch.nbd(), "vm").unwrap()
    }

    /// Reads the hot range into the cache.
    #[track_caller]
    fn warm_up(&self) {
        let mut client = self.connect();
        let reads = (HOT.end - HOT.start) / MIB;
        wait_for("the hot part to be cached", || {
            let before = self.daemon.stats("vm").hits();
            read_mibs(&mut client, HOT);
            self.daemon.stats("vm").hits() - before >= reads
        });
    }

    fn fio(&self, seconds: u64) -> Process {
        Tool::new("fio")
            .args(["--name=verify", "--ioengine=nbd", "--uri", &self.scratch.nbd().uri("vm")])
            .args(["--rw=randwrite", "--bsrange=512-64k", "--blockalign=512", "--iodepth=16"])
            .args([format!("--offset={}", WRITTEN.start), format!("--size={}", WRITTEN.end - WRITTEN.start)])
            .args([format!("--runtime={seconds}"), "--time_based".into(), "--serialize_overlap=1".into()])
            .args(["--verify=crc32c", "--verify_fatal=1", "--verify_backlog=64", "--verify_state_save=0"])
            .arg("--output-format=terse")
            .start()
    }
}

/// Reads the hot range at random positions, and records the slowest read, and the number of reads
/// that took longer than [`HIT_MAX`].
struct Hits {
    client: Client,
    dice: Noise,
    count: u64,
    late: u64,
    worst: Duration,
}

impl Hits {
    fn new(client: Client) -> Hits {
        Hits { client, dice: Noise::new(5), count: 0, late: 0, worst: Duration::ZERO }
    }

    /// Reads for `period`.
    #[track_caller]
    fn read(&mut self, image: &[u8], period: Duration) {
        let begun = Instant::now();
        while begun.elapsed() < period {
            let at = HOT.start + self.dice.below((HOT.end - HOT.start) / BLOCK) * BLOCK;
            let start = Instant::now();
            let data = self.client.read(at, BLOCK as u32).expect("a hit");
            let took = start.elapsed();
            self.worst = self.worst.max(took);
            self.late += u64::from(took >= HIT_MAX);
            assert_same(&data, &image[at as usize..][..BLOCK as usize], at, "what is hot and the image");
            self.count += 1;
            // Other programs also need the processor.
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Sends reads that need the cluster. They wait for the cluster and return correct data.
fn read_cold(mut client: Client, image: &[u8], over: &AtomicBool) -> u64 {
    let (mut dice, mut count) = (Noise::new(6), 0);
    while !over.load(Ordering::Relaxed) {
        let at = COLD.start + dice.below((COLD.end - COLD.start) / 65536) * 65536;
        let data = client.read(at, 65536).expect("a read that the cluster answers late");
        assert_same(&data, &image[at as usize..][..65536], at, "what is cold and the image");
        count += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    count
}

/// One OSD is killed and restarted, another is paused, then all are paused.
#[track_caller]
fn round(cluster: &mut Cluster, number: usize, hits: &mut Hits, image: &[u8]) {
    let (victim, sleeper) = (number % cluster.osds(), (number + 1) % cluster.osds());
    cluster.kill(victim);
    hits.read(image, AWAY);
    cluster.restart(victim);
    wait_for("the OSD to be back", || {
        hits.read(image, Duration::from_millis(300));
        cluster.is_up(victim)
    });
    cluster.pause(sleeper);
    hits.read(image, STILL);
    cluster.resume(sleeper);
    hits.read(image, Duration::from_secs(1));
    let before = hits.count;
    (0..cluster.osds()).for_each(|osd| cluster.pause(osd));
    for _ in 0..3 {
        hits.read(image, STILL);
        if hits.count - before > SERVED_MIN {
            break;
        }
    }
    let served = hits.count - before;
    (0..cluster.osds()).for_each(|osd| cluster.resume(osd));
    hits.read(image, Duration::from_secs(2));
    assert!(served > SERVED_MIN, "only {served} hits while the cluster stood still");
    assert!(hits.late <= LATE_MAX, "{} hits took long, one of them {:?}", hits.late, hits.worst);
    hits.late = 0;
    assert!(cluster.lives(), "the monitor is gone");
}

/// Promises 2 and 4.
#[test]
fn fio_verifies_while_osds_are_killed_paused_and_restarted() {
    let seconds =
        std::env::var("HOB_RBD_SECONDS").map_or(18, |text| text.parse().expect("a number of seconds"));
    let mut stage = Stage::new();
    stage.warm_up();
    let over = AtomicBool::new(false);
    let mut hits = Hits::new(stage.connect());
    let cold = Client::connect(&stage.scratch.nbd(), "cold").unwrap();
    let mut fio = stage.fio(seconds);
    let (rounds, read) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_cold(cold, &stage.image, &over));
        let mut rounds = 0;
        while fio.poll().is_none() {
            round(&mut stage.cluster, rounds, &mut hits, &stage.image);
            rounds += 1;
        }
        over.store(true, Ordering::Relaxed);
        (rounds, reader.join().expect("a cold read met an error or a wrong byte"))
    });
    let output = fio.finish(Duration::ZERO);
    assert!(output.success() && !output.all().contains("verify:"), "fio: {}", output.all());
    assert!(rounds > 0, "fio ended before anything happened");
    stage.cluster.wait_up();
    println!(
        "{rounds} rounds; {} hits, the slowest took {:?}; {read} cold reads; fio moved {} KiB",
        hits.count,
        hits.worst,
        moved_kib(&output.stdout)
    );
    assert!(read > 20, "only {read} cold reads");
    // The cluster has all acknowledged writes after everything was restored.
    stage.daemon.ctl(&["drain", "vm"]);
    let mut client = stage.connect();
    let disk = read_mibs(&mut client, 0..SIZE);
    assert_same(&disk[..COLD.end as usize], &stage.image, 0, "what nobody wrote and the image");
    assert!(disk[COLD.end as usize..].iter().any(|byte| *byte != 0), "fio wrote nothing");
    drop((client, hits));
    stage.daemon.stop();
    assert_same(&stage.cluster.export("disk"), &disk, 0, "the cluster's image and the disk");
}

/// Returns how much fio wrote and read, from its terse report, KiB.
fn moved_kib(report: &str) -> u64 {
    let fields: Vec<&str> = report.lines().last().unwrap_or_default().split(';').collect();
    let field = |at: usize| fields.get(at).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    field(5) + field(46)
}
