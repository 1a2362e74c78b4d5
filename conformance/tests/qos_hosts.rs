//! Two hosts of a cluster on one slow store: the disks receive their shares and reservations on
//! whichever host they run (docs/decisions/0021).
//!
//! The store is one nbdkit with a total rate limit. The test compares shares of the store's work
//! during the measurement, so the load of the machine does not matter. Without the cluster, each
//! host would follow its own latency, and both would get half.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use conformance::data::noise_file;
use conformance::nbd_client::Client;
use conformance::scratch::wait_for;
use conformance::{Etcd, MIB, Plan, Scratch, Store, TestHost};

/// Rate of the store, reads of 4 KiB per second. The latency limit corresponds to about 24 reads at
/// once.
const RATE: u64 = 400;
const LATENCY_MS: u64 = 60;
const SIZE: u64 = 64 * MIB;
/// Number of reads in flight of each disk: more than hosts admit.
const DEPTH: usize = 24;
/// Time until the hosts have agreed.
const WARM: Duration = Duration::from_secs(15);
/// Duration of the measurement.
const COUNTED: Duration = Duration::from_secs(20);
/// Maximum number of measurements. Without the cluster's agreement, every measurement would fail.
const MEASUREMENTS_MAX: u32 = 4;

struct Shared {
    _scratch: Scratch,
    etcd: Etcd,
    store: Store,
}

impl Shared {
    #[track_caller]
    fn new() -> Self {
        let scratch = Scratch::new();
        std::fs::create_dir(scratch.path("disks")).unwrap();
        for disk in ["left", "right", "idle"] {
            noise_file(&scratch.path(&format!("disks/{disk}")), SIZE, 7);
        }
        let (disks, bits) = (format!("dir={}", scratch.text("disks")), format!("rate={}", RATE * 4096 * 8));
        let args = ["--filter=rate", "file", &disks, &bits];
        let store = Store::start(&scratch.path("store.sock"), &args);
        Self { _scratch: scratch, etcd: Etcd::start(1), store }
    }

    /// Starts a host with these disks and their shares. The first disk, which is read, has the
    /// host's name.
    #[track_caller]
    fn host(&self, disks: &[(&str, u32)]) -> TestHost {
        let first = disks[0].0;
        let mut plan = Plan::new(first).joins(&self.etcd, "").says(&format!(
            "[[datastore]]\nname = \"array\"\nthrottle = \"auto\"\nlatency_ms = {LATENCY_MS}"
        ));
        for (disk, shares) in disks {
            let qos = format!("datastore = \"array\"\nqos = {{ shares = \"{shares}\" }}");
            plan = plan.disk(disk, &self.store.backing(disk), &qos);
        }
        let host = plan.start();
        wait_for("the disk", || Client::connect(&host.nbd(), first).is_ok());
        host
    }
}

/// Readers of a disk, one for each read in flight. Without a cache, none of their data was read
/// before.
struct Readers {
    stop: Arc<AtomicBool>,
    reads: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Readers {
    #[track_caller]
    fn start(host: &TestHost, disk: &str) -> Self {
        let (stop, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let reader = |number: usize| {
            let mut client = host.connect(disk);
            let (stop, reads) = (stop.clone(), reads.clone());
            std::thread::spawn(move || {
                let sectors = SIZE / 4096;
                for sector in (0..sectors).cycle().skip(number * (sectors as usize / DEPTH)).step_by(7) {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    client.read(sector * 4096, 4096).unwrap();
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let threads = (0..DEPTH).map(reader).collect();
        Self { stop, reads, threads }
    }

    fn count(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

/// Returns the reads per second of each disk, after the hosts have agreed.
fn rates(readers: &[Readers; 2]) -> [f64; 2] {
    std::thread::sleep(WARM);
    let before = readers.each_ref().map(Readers::count);
    let begin = std::time::Instant::now();
    std::thread::sleep(COUNTED);
    let seconds = begin.elapsed().as_secs_f64();
    let after = readers.each_ref().map(Readers::count);
    let rates = [0, 1].map(|host| (after[host] - before[host]) as f64 / seconds);
    eprintln!("left {:.0}, right {:.0} reads a second", rates[0], rates[1]);
    rates
}

/// Measures until the rates are right. While a busy kernel pauses one of the hosts, the other host has the
/// store for itself, so a single measurement may show anything.
fn some_rates(readers: &[Readers; 2], are_right: impl Fn([f64; 2]) -> bool) -> bool {
    (0..MEASUREMENTS_MAX).any(|_| are_right(rates(readers)))
}

#[test]
fn shares_and_reservations_hold_across_hosts() {
    let shared = Shared::new();
    let left = shared.host(&[("left", 2000)]);
    // Without the cluster, the store would give this host as much as the other host, or more.
    let right = shared.host(&[("right", 1000), ("idle", 3000)]);
    let readers = [Readers::start(&left, "left"), Readers::start(&right, "right")];
    // The disks have 2000 and 1000 shares, so the rates are about two to one.
    let is_shared = |[more, less]: [f64; 2]| (1.5..2.7).contains(&(more / less));
    assert!(some_rates(&readers, is_shared), "shares of 2000 and 1000 brought other rates, see above");
    // By its shares the disk should get a fifth of the store's rate; the earlier agreement gave it
    // a third.
    let reserved = RATE * 3 / 4;
    right.ctl(&["qos", "set", "right", "--shares", "500", "--reservation", &reserved.to_string()]);
    let is_reserved = |[others, reserver]: [f64; 2]| {
        let all = others + reserver;
        // The other disk is not starved.
        reserver > 0.62 * all.min(RATE as f64) && others > 0.1 * all
    };
    assert!(some_rates(&readers, is_reserved), "a reservation of {reserved} brought other rates, see above");
    readers.into_iter().for_each(Readers::stop);
    drop((left, right));
}
