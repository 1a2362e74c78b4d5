//! vhost-user-blk: hits are read directly into the guest's memory, and the guest's changes to this
//! memory during the read harm no other client.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use conformance::data::{Noise, noise_file};
use conformance::vhost_driver::{DATA, DATA_BYTES, Driver, Kind, SLOTS, Sealing};
use conformance::{Hob, MIB, Scratch, Serve};
use vm_memory::{Bytes, GuestAddress};

const SIZE: u64 = 16 * MIB;

fn serve(scratch: &Scratch) -> Hob {
    noise_file(&scratch.path("disk.img"), SIZE, 5);
    Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "32M", "4K")
        .arg("--vhost-user", &scratch.text("vm.sock"))
        .start(scratch)
}

/// Reads the whole disk, and returns true if all data is correct.
fn is_right(driver: &mut Driver, scratch: &Scratch) -> bool {
    let disk = scratch.read("disk.img");
    let len = DATA_BYTES as usize;
    (0..SIZE / DATA_BYTES).all(|at| {
        let status = driver.run(Kind::Read, at * DATA_BYTES, DATA_BYTES as u32);
        status == Some(0) && driver.data(0, len) == disk[at as usize * len..][..len]
    })
}

/// Reads until flash has the whole disk.
fn warm(driver: &mut Driver, hob: &Hob, scratch: &Scratch) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let before = hob.stats().hits();
        assert!(is_right(driver, scratch), "{}", hob.process.stderr());
        if hob.stats().hits() - before == SIZE / DATA_BYTES {
            return;
        }
        assert!(Instant::now() < deadline, "it does not get warm: {}", hob.stats().text());
    }
}

#[test]
fn a_guest_that_overwrites_its_read_buffer_affects_only_itself() {
    let scratch = Scratch::new();
    let hob = serve(&scratch);
    let mut driver = Driver::connect(&scratch.path("vm.sock")).expect("the server takes a machine");
    warm(&mut driver, &hob, &scratch);
    let before = hob.stats();
    let (memory, is_over) = (driver.memory().clone(), AtomicBool::new(false));
    let mut asked = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut dice = Noise::new(7);
            while !is_over.load(Ordering::Relaxed) {
                let at = DATA + dice.below(u64::from(SLOTS) * DATA_BYTES / 8) * 8;
                memory.write_obj(dice.below(u64::MAX), GuestAddress(at)).expect("inside the memory");
            }
        });
        let mut dice = Noise::new(8);
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end {
            for slot in 0..32 {
                let len = 4096 << dice.below(5);
                driver.submit(slot, Kind::Read, dice.below(SIZE / len) * len, len as u32);
            }
            driver.kick();
            asked += 32;
            let mut answered = 0;
            while answered < 32 {
                match driver.reap() {
                    Some((_, status)) => {
                        assert_eq!(status, 0, "{}", hob.process.stderr());
                        answered += 1;
                    }
                    None => assert!(driver.wait(Duration::from_secs(60)), "{}", hob.process.stderr()),
                }
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let after = hob.stats();
    let number = |name| after.number(name).unwrap_or(0.0) - before.number(name).unwrap_or(0.0);
    assert_eq!((number("reads"), after.hits() - before.hits()), (f64::from(asked), asked as u64));
    assert_eq!((number("checksum_mismatches"), number("flash_errors")), (0.0, 0.0), "{}", after.text());
    assert!(is_right(&mut driver, &scratch), "{}", hob.process.stderr());
    assert_eq!(hob.stats().misses(), after.misses(), "nothing was dropped");
    hob.stop();
}

#[test]
fn a_guest_that_unmaps_its_read_buffer_affects_no_other_guest() {
    let scratch = Scratch::new();
    let hob = serve(&scratch);
    let mut driver = Driver::connect(&scratch.path("vm.sock")).expect("the server takes a machine");
    warm(&mut driver, &hob, &scratch);
    drop(driver);
    let errors = |hob: &Hob| ["checksum_mismatches", "flash_errors"].map(|name| hob.stats().number(name));
    let before = errors(&hob);
    for round in 0..20 {
        // Memory that cannot be sealed can be truncated. The test does not access the memory after
        // that.
        let driver = Driver::prepared(&scratch.path("vm.sock"), Sealing::Impossible).expect("an answer");
        let mut driver = driver.start().expect("the queue starts");
        for slot in 0..SLOTS {
            driver.submit(slot, Kind::Read, u64::from(slot) * DATA_BYTES, DATA_BYTES as u32);
        }
        driver.kick();
        std::thread::sleep(Duration::from_micros(100 * round));
        driver.cut_memory(DATA).expect("it can be cut off");
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut driver = Driver::connect(&scratch.path("vm.sock")).expect("the server takes a machine");
    assert!(is_right(&mut driver, &scratch), "{}", hob.process.stderr());
    assert_eq!(errors(&hob), before, "{}", hob.stats().text());
    hob.stop();
}

/// Shares memory like libblkio: more than eight regions of any size, each in its own message.
#[test]
fn memory_is_added_and_removed_region_by_region() {
    let scratch = Scratch::new();
    let hob = serve(&scratch);
    let regions: Vec<_> = (1..=20_u64)
        .map(|number| {
            let file =
                File::from(rustix::fs::memfd_create("region", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
            file.set_len(100 * number).unwrap();
            (1 << 40 | number << 20, 100 * number, file)
        })
        .collect();
    let driver = Driver::prepared(&scratch.path("vm.sock"), Sealing::Possible).expect("an answer");
    let mut driver = driver.start_in_slots(&regions).expect("the server takes all regions");
    assert!(is_right(&mut driver, &scratch));
    for region in &regions[..10] {
        driver.remove_slot(region).expect("the server forgets a region");
        assert!(is_right(&mut driver, &scratch));
    }
    // An unknown region ends the connection.
    let _ = driver.remove_slot(&regions[0]);
    let deadline = Instant::now() + Duration::from_secs(60);
    while !driver.hung_up().expect("an answer") {
        assert!(Instant::now() < deadline, "the connection goes on");
        std::thread::sleep(Duration::from_millis(5));
    }
    hob.stop();
}
