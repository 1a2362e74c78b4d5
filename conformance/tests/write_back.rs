//! Write-back for users: flushed data survives kill -9 and a normal stop, modes change under a
//! guest, drains make the backing current, and a backing that was changed without hob is not
//! overwritten.
//!
//! `HOB_KILLS` is the number of kills (default 10).

use std::os::unix::fs::FileExt;

use conformance::data::{Noise, assert_same, empty_file};
use conformance::nbd_client::Client;
use conformance::{Hob, MIB, Scratch, Serve, Tool};

const SIZE: u64 = 32 * MIB;
const SECTOR: u64 = 512;

/// Serves a disk with a write-back cache that destages nothing by itself.
fn lazy(scratch: &Scratch) -> Serve {
    empty_file(&scratch.path("disk.img"), SIZE);
    Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "16M", "4K")
        .arg("--mode", "write-back")
        .arg("--dirty-age-max", "0")
        .arg("--dirty-start", "60")
}

/// Promise 2 for block status: a hole of the backing is not reported as a hole if flash has dirty
/// data there.
#[test]
fn a_copy_of_a_sparse_disk_has_its_dirty_data() {
    let scratch = Scratch::new();
    let hob = lazy(&scratch).start(&scratch);
    let mut client = hob.connect();
    let mut image = vec![0; SIZE as usize];
    let bytes = Noise::new(9).bytes(64 << 10);
    client.write(MIB, &bytes).unwrap();
    image[MIB as usize..][..bytes.len()].copy_from_slice(&bytes);
    assert!(dirty(&hob) > 0);
    let copy = || {
        let _ = std::fs::remove_file(scratch.path("copy"));
        Tool::new("nbdcopy").args([&hob.uri(), &scratch.text("copy")]).run();
        scratch.read("copy")
    };
    assert_same(&copy(), &image, 0, "while it is dirty");
    hob.ctl(&["drain", "disk"]);
    assert_eq!(dirty(&hob), 0);
    // Now the backing reports its holes, and hob uses the report.
    let map = Tool::new("nbdinfo").args(["--map", &hob.uri()]).run();
    assert!(map.contains("hole"), "{map}");
    assert_same(&copy(), &image, 0, "when it is clean");
    hob.stop();
}

#[track_caller]
fn dirty(hob: &Hob) -> u64 {
    hob.stats().number("dirty_bytes").expect("a count") as u64
}

/// A guest's knowledge of its disk: flushed bytes, and for each sector the later writes.
struct Guest {
    dice: Noise,
    flushed: Vec<u8>,
    since: Vec<(u64, Vec<u8>)>,
}

impl Guest {
    fn new(seed: u64) -> Guest {
        Guest { dice: Noise::new(seed), flushed: vec![0; SIZE as usize], since: Vec::new() }
    }

    fn write(&mut self, client: &mut Client) {
        let longest = if self.dice.below(4) == 0 { 256 } else { 8 };
        let sectors = 1 + self.dice.below(longest);
        let mut first = self.dice.below(SIZE / SECTOR - sectors);
        let mut bytes = self.dice.bytes((sectors * SECTOR) as usize);
        if self.dice.below(2) == 0 {
            // Whole blocks, as filesystems write them, and often the same blocks.
            first = first % 2048 / 8 * 8;
            bytes.resize(4096, 7);
        }
        client.write(first * SECTOR, &bytes).expect("a write");
        for (sector, bytes) in (first..).zip(bytes.chunks(SECTOR as usize)) {
            self.since.push((sector, bytes.to_vec()));
        }
    }

    fn flush(&mut self, client: &mut Client) {
        client.flush().expect("a flush");
        for (sector, bytes) in self.since.drain(..) {
            let at = (sector * SECTOR) as usize;
            self.flushed[at..at + bytes.len()].copy_from_slice(&bytes);
        }
    }

    /// Checks that each sector has the flushed content or one of its later writes, and does not
    /// change afterwards.
    #[track_caller]
    fn check(&mut self, client: &mut Client, what: &str) {
        let disk = client.read(0, SIZE as u32).expect("a read");
        for sector in 0..SIZE / SECTOR {
            let at = (sector * SECTOR) as usize..((sector + 1) * SECTOR) as usize;
            let mut later = self.since.iter().filter(|(other, _)| *other == sector);
            let is_right = disk[at.clone()] == self.flushed[at.clone()]
                || later.any(|(_, bytes)| disk[at.clone()] == bytes[..]);
            assert!(
                is_right,
                "{what}: sector {sector} holds neither what was flushed nor what was written later"
            );
        }
        self.flushed = disk;
        self.since.clear();
    }
}

/// Promise 1: "A write acknowledged after FLUSH or with FUA survives kill -9".
#[test]
fn flushed_writes_survive_kill_9() {
    let kills: u32 =
        std::env::var("HOB_KILLS").ok().map_or(10, |n| n.parse().expect("HOB_KILLS is a number"));
    let scratch = Scratch::new();
    let serve = lazy(&scratch);
    let mut guest = Guest::new(0x6b69_6c6c);
    let mut was_dirty = 0;
    for round in 1..=kills {
        let hob = serve.start(&scratch);
        let mut client = hob.connect();
        guest.check(&mut client, &format!("before kill {round}"));
        for _ in 0..1 + guest.dice.below(60) {
            guest.write(&mut client);
            if guest.dice.below(5) == 0 {
                guest.flush(&mut client);
            }
        }
        was_dirty += dirty(&hob);
        hob.kill();
    }
    let hob = serve.start(&scratch);
    let mut client = hob.connect();
    guest.check(&mut client, "after the last kill");
    assert!(was_dirty > 0, "the backing had everything all the time");
    hob.ctl(&["drain", "disk"]);
    drop(client);
    hob.stop();
    assert_same(&scratch.read("disk.img"), &guest.flushed, 0, "backing and disk");
}

#[test]
fn a_clean_stop_keeps_dirty_data_and_a_drain_leaves_none() {
    let scratch = Scratch::new();
    let serve = lazy(&scratch);
    let bytes = Noise::new(5).bytes(MIB as usize);
    let hob = serve.start(&scratch);
    let mut client = hob.connect();
    client.write(3 * MIB, &bytes).unwrap();
    client.flush().unwrap();
    drop(client);
    hob.stop();
    assert_eq!(scratch.read("disk.img"), vec![0; SIZE as usize], "nothing has reached the backing");
    let hob = serve.clone().flag("--drain-on-shutdown").start(&scratch);
    assert_same(&hob.connect().read(3 * MIB, MIB as u32).unwrap(), &bytes, 3 * MIB, "after a restart");
    hob.stop();
    assert_same(
        &scratch.read("disk.img")[3 * MIB as usize..4 * MIB as usize],
        &bytes,
        3 * MIB,
        "the backing",
    );
}

#[test]
fn modes_change_under_a_guest_and_nothing_is_lost() {
    let scratch = Scratch::new();
    let hob = lazy(&scratch).start(&scratch);
    let mut client = hob.connect();
    let mut guest = Guest::new(9);
    let modes = [
        "write-through",
        "write-back",
        "write-around",
        "write-back",
        "read-only-cache",
        "pass-through",
        "write-back",
    ];
    for mode in modes {
        (0..30).for_each(|_| guest.write(&mut client));
        guest.flush(&mut client);
        hob.ctl(&["cache", "set", "disk", "--mode", mode]);
        assert_eq!(hob.disk()["cache"]["mode"], mode);
        if mode != "write-back" {
            assert_eq!(dirty(&hob), 0, "{mode}");
            assert_same(&scratch.read("disk.img"), &guest.flushed, 0, mode);
        }
        guest.check(&mut client, mode);
    }
    (0..30).for_each(|_| guest.write(&mut client));
    guest.flush(&mut client);
    hob.ctl(&["cache", "disable", "disk"]);
    assert_same(&scratch.read("disk.img"), &guest.flushed, 0, "without the cache");
    guest.check(&mut client, "without the cache");
}

/// `hob serve` keeps no state: its mode at this start says nothing about earlier dirty data.
#[test]
fn dirty_data_of_an_earlier_serve_is_recovered_in_any_mode() {
    let scratch = Scratch::new();
    let hob = lazy(&scratch).start(&scratch);
    let mut client = hob.connect();
    client.write(5 * MIB, &[7; 65536]).unwrap();
    client.flush().unwrap();
    drop(client);
    hob.kill();
    let through = Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "16M", "4K")
        .flag("--persistent")
        .arg("--mode", "write-through");
    // Only the newest page of its journal is readable, and this page says that there are others.
    let pool = std::fs::File::options().read(true).write(true).open(scratch.path("pool")).unwrap();
    let whole = scratch.read("pool");
    let pages = whole.chunks(4096).enumerate().filter(|(_, page)| page.starts_with(b"hobJ"));
    let mut pages: Vec<_> = pages.map(|(at, page)| (page[8..16].to_vec(), at as u64 * 4096)).collect();
    pages.sort_by_key(|(sequence, _)| std::cmp::Reverse(sequence.clone()));
    assert!(pages.len() > 2);
    pages[1..].iter().for_each(|(_, at)| pool.write_all_at(&[0xEE; 4096], *at).unwrap());
    let said = through.refused(&scratch).all();
    assert!(said.contains("the journal of its cache is damaged"), "{said}");
    pool.write_all_at(&whole, 0).unwrap();
    let hob = through.start(&scratch);
    let mut client = hob.connect();
    assert_eq!(client.read(5 * MIB, 65536).unwrap(), vec![7; 65536]);
    client.write(5 * MIB, &[8; 4096]).unwrap();
    assert_eq!(client.read(5 * MIB, 8192).unwrap()[4096..], [7; 4096]);
    hob.ctl(&["drain", "disk"]);
    drop(client);
    hob.stop();
    let expected = [vec![8; 4096], vec![7; 61440]].concat();
    assert_eq!(scratch.read("disk.img")[5 * MIB as usize..][..65536], expected);
}

/// Promise 2: "Stale flash is never served."
#[test]
fn a_backing_changed_behind_hobs_back_is_not_written_over() {
    let scratch = Scratch::new();
    let serve = lazy(&scratch);
    let hob = serve.start(&scratch);
    let mut client = hob.connect();
    // Data that was read is in the cache and clean; data that was written is dirty.
    client.read(0, MIB as u32).unwrap();
    client.write(8 * MIB, &[3; 65536]).unwrap();
    client.flush().unwrap();
    std::thread::sleep(std::time::Duration::from_secs(2));
    drop(client);
    hob.stop();
    let image = std::fs::File::options().write(true).open(scratch.path("disk.img")).unwrap();
    image.write_all_at(&vec![9; 2 * MIB as usize], 0).unwrap();
    let said = serve.refused(&scratch).all();
    assert!(said.contains("does not match the cached data") && said.contains("64 KiB"), "{said}");
    assert_eq!(
        scratch.read("disk.img")[..2 * MIB as usize],
        vec![9; 2 * MIB as usize],
        "nothing was written"
    );
    // After the backing is restored, all data is there.
    image.write_all_at(&vec![0; 2 * MIB as usize], 0).unwrap();
    let hob = serve.start(&scratch);
    assert_eq!(hob.connect().read(8 * MIB, 65536).unwrap(), vec![3; 65536]);
    assert_eq!(dirty(&hob), 65536);
}
