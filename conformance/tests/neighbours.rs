//! Several clients write, zero and read neighbouring units of 512 bytes of the same sectors of a
//! disk in write-back, with FUA and flushes, while the daemon is killed: each client's changes are
//! kept, and no other unit changes.
//!
//! Each unit belongs to one client, which knows the allowed contents. Runs of one and of three
//! units alternate, so sectors of 4 KiB are shared by up to eight clients, and runs cross sector
//! boundaries. `HOB_KILLS` is the number of kills (default 4).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use conformance::data::{Noise, noise_file, repeated};
use conformance::nbd_client::{Address, CMD_WRITE, CMD_WRITE_ZEROES, Client, FLAG_FUA};
use conformance::scratch::wait_for;
use conformance::store::{ONE_BY_ONE, nbdkit};
use conformance::{MIB, Scratch};

const UNIT: u64 = 512;
const CLIENTS: u64 = 8;
const SIZE: u64 = 8 * MIB;
const UNITS: u64 = SIZE / UNIT;
/// Number of units that receive half of all requests.
const HOT_UNITS: u64 = 64 * 8;
/// Number of requests of all clients before each kill.
const REQUESTS_MIN: u64 = 100;

/// Content of a unit: zeroes, or a version that its owner wrote. The backing has zeroes at first.
type Version = u64;

/// Allowed contents of a unit.
#[derive(Debug, Clone, Default)]
struct Unit {
    /// The version that was flushed, or was read after a restart and then flushed.
    durable: Version,
    /// Later versions, acknowledged or with unknown result, oldest first.
    since: Vec<Version>,
}

impl Unit {
    fn now(&self) -> Version {
        self.since.last().copied().unwrap_or(self.durable)
    }

    fn settle(&mut self, version: Version) {
        *self = Unit { durable: version, since: Vec::new() };
    }
}

/// Returns the length of the runs around `unit`, and the number of the unit's run.
fn run_of(unit: u64) -> (u64, u64) {
    let length = if (unit / HOT_UNITS).is_multiple_of(2) { 1 } else { 3 };
    (length, unit / length)
}

fn owner(unit: u64) -> u64 {
    run_of(unit).1 % CLIENTS
}

fn bytes(unit: u64, version: Version) -> Vec<u8> {
    if version == 0 {
        return vec![0; UNIT as usize];
    }
    repeated(&[unit + 1, version], UNIT as usize)
}

/// Returns the version that a unit's data has; `None` if no client wrote this data.
fn version_in(unit: u64, data: &[u8]) -> Option<Version> {
    let version = u64::from_le_bytes(data[8..16].try_into().expect("eight bytes"));
    (data == bytes(unit, version)).then_some(version)
}

struct Guest {
    id: u64,
    address: Address,
    dice: Noise,
    last: Version,
    units: Vec<Unit>,
}

impl Guest {
    fn connect(&self) -> Client {
        // The daemon may be killed again just after a connection, so a second one may fail.
        let mut client = None;
        wait_for("the export", || {
            client = Client::connect(&self.address, "vm").ok();
            client.is_some()
        });
        client.expect("the export is there")
    }

    /// Selects a run of this guest: its first unit and its length.
    fn pick(&mut self) -> (u64, u64) {
        loop {
            let span = if self.dice.below(2) == 0 { HOT_UNITS } else { UNITS };
            let unit = self.dice.below(span);
            let (length, run) = run_of(unit);
            let first = run * length;
            let is_whole = (first..first + length).all(|unit| unit < UNITS && run_of(unit) == (length, run));
            if owner(unit) == self.id && is_whole {
                return (first, length);
            }
        }
    }

    /// Checks data that was read from unit `first` on. Units of other guests may change; each of
    /// them must be one complete version.
    fn compare(&self, first: u64, data: &[u8], is_restarted: bool) {
        for (unit, data) in (first..).zip(data.chunks(UNIT as usize)) {
            let found = version_in(unit, data);
            let id = self.id;
            let found =
                found.unwrap_or_else(|| panic!("client {id}, unit {unit}: a mixture: {:?}", &data[..32]));
            let known = &self.units[unit as usize];
            if owner(unit) == id {
                let may_be = known.now() == found
                    || is_restarted && (known.durable == found || known.since.contains(&found));
                assert!(
                    may_be,
                    "client {id}, unit {unit}: holds {found}, and may hold {known:?} ({is_restarted})"
                );
            }
        }
    }

    /// Sends one request; an error means that the daemon was killed.
    fn step(&mut self, client: &mut Client) -> std::io::Result<()> {
        let (first, length) = self.pick();
        let kind = self.dice.below(10);
        if kind == 0 {
            client.flush()?;
            self.units.iter_mut().for_each(|unit| unit.settle(unit.now()));
            return Ok(());
        }
        if kind < 4 {
            let from = first.saturating_sub(self.dice.below(12));
            let count = (length + self.dice.below(20) + first - from).min(UNITS - from);
            let data = client.read(from * UNIT, (count * UNIT) as u32)?;
            self.compare(from, &data, false);
            return Ok(());
        }
        self.last += 1;
        let is_zero = kind == 4;
        let version = if is_zero { 0 } else { self.last };
        let flags = if self.dice.below(4) == 0 { FLAG_FUA } else { 0 };
        let range = first as usize..(first + length) as usize;
        self.units[range.clone()].iter_mut().for_each(|unit| unit.since.push(version));
        let data = (first..first + length).map(|unit| bytes(unit, version)).collect::<Vec<_>>().concat();
        let (command, payload): (_, &[u8]) =
            if is_zero { (CMD_WRITE_ZEROES, &[]) } else { (CMD_WRITE, &data) };
        let error = client.call(flags, command, first * UNIT, (length * UNIT) as u32, payload)?;
        assert_eq!(error, 0, "client {}: the disk works", self.id);
        if flags == FLAG_FUA {
            self.units[range].iter_mut().for_each(|unit| unit.settle(version));
        }
        Ok(())
    }

    /// Reads all units after a restart, and flushes.
    fn check_all(&mut self, client: &mut Client) -> std::io::Result<()> {
        let mut found = Vec::new();
        for offset in (0..SIZE).step_by(MIB as usize) {
            let data = client.read(offset, MIB as u32)?;
            self.compare(offset / UNIT, &data, true);
            found.extend(
                (offset / UNIT..).zip(data.chunks(UNIT as usize)).map(|(unit, data)| version_in(unit, data)),
            );
        }
        for (unit, found) in self.units.iter_mut().zip(found) {
            // Content that was read once must not change, even after another kill before the flush.
            unit.settle(found.expect("compared"));
        }
        client.flush()
    }

    /// Sends requests until the end, and counts them.
    fn live(mut self, is_over: &AtomicBool, requests: &AtomicU64) {
        loop {
            let mut client = self.connect();
            let mut result = self.check_all(&mut client);
            while result.is_ok() {
                if is_over.load(Ordering::Relaxed) {
                    client.flush().expect("nobody kills the daemon any more");
                    self.units.iter_mut().for_each(|unit| unit.settle(unit.now()));
                    self.check_all(&mut client).expect("the disk works");
                    return;
                }
                requests.fetch_add(1, Ordering::Relaxed);
                result = self.step(&mut client);
            }
        }
    }
}

#[test]
fn clients_of_the_same_sectors_keep_their_own_units_over_kills() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("flash"), 64 * MIB, 1);
    std::fs::File::create(scratch.path("disk.img")).unwrap().set_len(SIZE).unwrap();
    let image = scratch.text("disk.img");
    let slow_file = ["--filter=delay", "file", &image, "rdelay=1ms", "wdelay=1ms"];
    let _backing = nbdkit(&scratch.path("backing.sock"), &[&ONE_BY_ONE[..], &slow_file].concat());
    let config = format!(
        "[[pool]]\nname = \"p\"\ndevices = [\"{}\"]\nsegment_size = \"1M\"\nforce = true\n\
         [[disk]]\nname = \"vm\"\nbacking = \"nbd+unix:///?socket={}\"\n\
         [disk.cache]\npool = \"p\"\nsize = \"4M\"\nmode = \"write-back\"\n",
        scratch.text("flash"),
        scratch.text("backing.sock"),
    );
    scratch.configure(&config);
    let mut daemon = scratch.start_daemon();
    let address = scratch.nbd();
    let kills = std::env::var("HOB_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(4);
    let (is_over, requests) = (AtomicBool::new(false), AtomicU64::new(0));
    let daemon = std::thread::scope(|scope| {
        let guest = |id| Guest {
            id,
            address: address.clone(),
            dice: Noise::new(100 + id),
            last: 0,
            units: vec![Unit::default(); UNITS as usize],
        };
        let (is_over, requests) = (&is_over, &requests);
        let live = |guest: Guest| scope.spawn(move || guest.live(is_over, requests));
        let guests: Vec<_> = (0..CLIENTS).map(guest).map(live).collect();
        // On a busy host, clients have only compared their units after some seconds.
        let wait_for_requests = || {
            let before = requests.load(Ordering::Relaxed);
            wait_for("requests of the clients", || {
                requests.load(Ordering::Relaxed) >= before + REQUESTS_MIN
                    || guests.iter().any(|guest| guest.is_finished())
            });
        };
        for round in 0..kills {
            std::thread::sleep(Duration::from_millis(1500 + 300 * (round % 3)));
            wait_for_requests();
            if guests.iter().any(|guest| guest.is_finished()) {
                break;
            }
            daemon.kill();
            daemon = scratch.start_daemon();
        }
        std::thread::sleep(Duration::from_secs(2));
        wait_for_requests();
        is_over.store(true, Ordering::Relaxed);
        guests.into_iter().for_each(|guest| guest.join().expect("a client saw something else"));
        daemon
    });
    println!("{} requests", requests.into_inner());
    daemon.stop();
}
