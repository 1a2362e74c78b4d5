//! Damage to the flash file under load. The guest continues to read and write: no error, no wrong
//! byte, and the backing is correct at the end.

use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use conformance::data::{Noise, assert_same, noise_file};
use conformance::nbd_client::{Client, read_mibs};
use conformance::{Hob, KIB, MIB, Scratch, Serve};

const SIZE: u64 = 32 * MIB;
const GUESTS: u64 = 2;
const PART: u64 = SIZE / GUESTS;
/// Minimum time of the load.
const LOAD: Duration = Duration::from_millis(2500);
/// Minimum number of requests of the load.
const REQUESTS_MIN: u64 = 200;
/// Maximum time of the load.
const LOAD_MAX: Duration = Duration::from_secs(90);

/// Reads and writes in the guest's own part of the disk, and checks each byte.
fn guest(mut client: Client, id: u64, mut model: Vec<u8>, stop: &AtomicBool, done: &AtomicU64) -> Vec<u8> {
    let mut dice = Noise::new(id);
    while !stop.load(Ordering::Relaxed) {
        let length = (1 + dice.below(128)) * 512;
        let offset = dice.below((PART - length) / 512) * 512;
        let range = offset as usize..(offset + length) as usize;
        if dice.below(4) == 0 {
            let data = dice.bytes(length as usize);
            client.write(id * PART + offset, &data).expect("no write may fail");
            model[range].copy_from_slice(&data);
        } else {
            let data = client.read(id * PART + offset, length as u32).expect("no read may fail");
            assert_same(&data, &model[range], id * PART + offset, "the guest's disk and its memory of it");
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
    model
}

/// Runs guests, calls `harm` for the pool file repeatedly meanwhile, and checks everything.
#[track_caller]
fn guests_do_not_notice(harm: impl Fn(&Path, u64)) -> (Scratch, Hob) {
    let scratch = Scratch::new();
    let (disk, pool) = (scratch.path("disk.img"), scratch.path("pool"));
    noise_file(&disk, SIZE, 20);
    let hob = Serve::disk(&scratch.text("disk.img")).cached(&pool, "24M", "16K").start(&scratch);
    // First fill the cache, so that data in use is damaged.
    let mut client = hob.connect();
    read_mibs(&mut client, 0..SIZE);
    let image = std::fs::read(&disk).unwrap();
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let guests: Vec<_> = (0..GUESTS)
            .map(|id| {
                let (client, stop, done) = (hob.connect(), &stop, &done);
                let model = image[(id * PART) as usize..((id + 1) * PART) as usize].to_vec();
                scope.spawn(move || guest(client, id, model, stop, done))
            })
            .collect();
        let start = Instant::now();
        let mut times = 0;
        let is_enough = || start.elapsed() > LOAD && done.load(Ordering::Relaxed) > REQUESTS_MIN;
        while !is_enough() && start.elapsed() < LOAD_MAX && !guests.iter().any(|g| g.is_finished()) {
            std::thread::sleep(Duration::from_millis(150));
            harm(&pool, times);
            times += 1;
        }
        stop.store(true, Ordering::Relaxed);
        guests.into_iter().map(|g| g.join().expect("a guest met an error or a wrong byte")).collect()
    });
    let requests = done.load(Ordering::Relaxed);
    println!("{requests} requests while the flash was harmed");
    assert!(requests > REQUESTS_MIN, "too little load to mean anything: {requests} requests");
    let whole = client.read(0, SIZE as u32).unwrap();
    assert_same(&whole, &models.concat(), 0, "the disk and the guests' memory");
    client.flush().unwrap();
    assert_same(&std::fs::read(&disk).unwrap(), &models.concat(), 0, "the backing and the guests' memory");
    (scratch, hob)
}

fn writable(pool: &Path) -> Option<File> {
    OpenOptions::new().write(true).open(pool).ok()
}

/// Promise 3: a pool file that is truncated while the cache uses it causes no guest error.
#[test]
fn truncated() {
    let (_scratch, hob) = guests_do_not_notice(|pool, times| {
        let file = writable(pool).expect("the pool file");
        let length = file.metadata().unwrap().len();
        file.set_len(if times < 4 { length / 2 } else { 0 }).unwrap();
    });
    hob.ctl(&["explain", "disk"]);
    hob.stop();
}

/// Promises 3 and 5: the checksums detect noise in the flash file, and the data is read from the
/// backing.
#[test]
fn filled_with_noise() {
    let (_scratch, hob) = guests_do_not_notice(|pool, times| {
        let file = writable(pool).expect("the pool file");
        let length = file.metadata().unwrap().len();
        let mut dice = Noise::new(times);
        let mut buffer = vec![0; 256 * KIB as usize];
        for at in (0..length).step_by(buffer.len()) {
            dice.fill(&mut buffer);
            let now = buffer.len().min((length - at) as usize);
            file.write_all_at(&buffer[..now], at).unwrap();
        }
    });
    hob.ctl(&["explain", "disk"]);
    hob.stop();
}

#[test]
fn single_bits_flipped() {
    let (_scratch, hob) = guests_do_not_notice(|pool, times| {
        let file = OpenOptions::new().read(true).write(true).open(pool).expect("the pool file");
        let length = file.metadata().unwrap().len();
        let mut dice = Noise::new(times);
        for _ in 0..400 {
            let (at, mut byte) = (dice.below(length), [0]);
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1 << dice.below(8)], at).unwrap();
        }
    });
    hob.stop();
}

#[test]
fn made_read_only() {
    let (scratch, hob) = guests_do_not_notice(|pool, _| {
        std::fs::set_permissions(pool, Permissions::from_mode(0o444)).unwrap();
    });
    hob.stop();
    assert!(scratch.path("pool").exists());
}

#[test]
fn replaced_by_another_file_and_removed() {
    let (_scratch, hob) = guests_do_not_notice(|pool, times| {
        let other = pool.with_extension("other");
        if times % 2 == 0 {
            std::fs::write(&other, Noise::new(times).bytes(MIB as usize)).unwrap();
            std::fs::rename(&other, pool).unwrap();
        } else {
            std::fs::remove_file(pool).unwrap();
        }
    });
    hob.stop();
}

/// Returns a pool with the data of an earlier run, and the disk's image.
fn used_pool(scratch: &Scratch) -> (Serve, Vec<u8>) {
    noise_file(&scratch.path("disk.img"), SIZE, 21);
    let serve = Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "24M", "16K");
    let hob = serve.start(scratch);
    hob.connect().read(0, SIZE as u32).unwrap();
    hob.stop();
    (serve, scratch.read("disk.img"))
}

#[track_caller]
fn noise_from(pool: &Path, start: u64) {
    let length = std::fs::metadata(pool).unwrap().len();
    let noise = Noise::new(5).bytes((length - start) as usize);
    writable(pool).unwrap().write_all_at(&noise, start).unwrap();
}

#[track_caller]
fn serves_the_image(hob: &Hob, image: &[u8]) {
    for _ in 0..2 {
        let whole = hob.connect().read(0, SIZE as u32).unwrap();
        assert_same(&whole, image, 0, "the disk and its backing");
    }
}

/// Promise 2 across a restart: data that was damaged while hob was stopped is not served.
#[test]
fn noise_in_the_data_between_two_runs() {
    let scratch = Scratch::new();
    let (serve, image) = used_pool(&scratch);
    // docs/FORMAT.md: the first 2 MiB of a pool of this size are metadata.
    noise_from(&scratch.path("pool"), 2 * MIB);
    let hob = serve.start(&scratch);
    serves_the_image(&hob, &image);
    hob.stop();
}

/// Promise 5: a pool whose metadata is noise is refused, and the message says what to do.
#[test]
fn noise_in_the_segment_table_between_two_runs() {
    let scratch = Scratch::new();
    let (serve, image) = used_pool(&scratch);
    noise_from(&scratch.path("pool"), MIB);
    let said = serve.refused(&scratch);
    assert!(said.stderr.contains("--force") && !said.stderr.contains("panicked"), "{}", said.stderr);
    let hob = serve.clone().flag("--force").start(&scratch);
    serves_the_image(&hob, &image);
    hob.stop();
}
