//! libblkio as a vhost-user client: requests, memory regions, sizes of queues, and a killed daemon. libblkio
//! is a separate implementation of virtqueues and of the client's side of vhost-user.

use std::time::Duration;

use blkio::{Blkio, Errno, ReqFlags, iovec};
use conformance::blkio_client::{BlkioClient, BlkioQueue, Buffer};
use conformance::data::{Noise, assert_same, noise_file};
use conformance::vhost_driver::Kind;
use conformance::{KIB, MIB, Scratch, Serve};

const SIZE: u64 = 16 * MIB;

/// Size of small requests in bytes.
const PAGE: usize = 4096;

const NO_FLAGS: ReqFlags = ReqFlags::empty();

/// Properties as libblkio sees them: docs/VHOST_USER.md describes the disk.
const PROPERTIES: [(&str, &str); 11] = [
    ("capacity", "16777216"),
    ("request-alignment", "512"),
    ("optimal-io-alignment", "4096"),
    ("optimal-io-size", "4096"),
    ("discard-alignment", "4096"),
    ("max-discard-len", "1073741824"),
    ("max-write-zeroes-len", "1073741824"),
    ("max-segments", "126"),
    ("max-queues", "64"),
    ("max-mem-regions", "512"),
    ("flush-needed", "true"),
];

fn serve(scratch: &Scratch) -> Serve {
    noise_file(&scratch.path("disk.img"), SIZE, 5);
    Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "32M", "4K")
        .arg("--vhost-user", &scratch.text("vm.sock"))
}

#[track_caller]
fn connect(scratch: &Scratch, queues: i32, entries: i32) -> BlkioClient {
    BlkioClient::connect(&scratch.path("vm.sock"), queues, entries).expect("hob serves libblkio")
}

/// Result of a request that the device answers with an I/O error.
fn io_error() -> i32 {
    -Errno::IO.raw_os_error()
}

/// Reads the whole disk through all queues in turn.
#[track_caller]
fn assert_disk(queues: &mut [BlkioQueue], buffer: &Buffer, image: &[u8]) {
    let count = queues.len();
    for (number, expected) in image.chunks(MIB as usize).enumerate() {
        let (queue, offset) = (&mut queues[number % count], number as u64 * MIB);
        queue.submit(0, Kind::Read, offset, buffer, 0..expected.len());
        assert_eq!(queue.run(), 0, "a read at {offset}");
        assert_same(&buffer.read(0..expected.len()), expected, offset, "the disk and the array");
    }
}

#[test]
fn libblkio_reads_and_changes_a_disk() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    let mut image = scratch.read("disk.img");
    let mut client = connect(&scratch, 2, 128);
    for (name, value) in PROPERTIES {
        assert_eq!(client.disk.get_str(name).expect("libblkio has the property"), value, "{name}");
    }
    let BlkioClient { queues, disk } = &mut client;
    let buffer = Buffer::share(disk, MIB as usize).expect("hob maps a region");
    let mut noise = Noise::new(6);
    for (number, flags) in [NO_FLAGS, ReqFlags::FUA].into_iter().enumerate() {
        let (offset, data) = ((3 + number as u64) * MIB + 512, noise.bytes(200 * KIB as usize));
        buffer.write(0, &data);
        let queue = &mut queues[number];
        queue.queue.write(offset, buffer.address(&(0..data.len())), data.len(), 0, flags);
        assert_eq!(queue.run(), 0, "a write with {flags:?}");
        image[offset as usize..][..data.len()].copy_from_slice(&data);
    }
    let queue = &mut queues[1];
    for (offset, flags) in [(5 * MIB, NO_FLAGS), (6 * MIB, ReqFlags::NO_UNMAP), (7 * MIB, ReqFlags::FUA)] {
        let len = 300 * KIB + 512;
        queue.queue.write_zeroes(offset, len, 0, flags);
        assert_eq!(queue.run(), 0, "write zeroes with {flags:?}");
        image[offset as usize..][..len as usize].fill(0);
    }
    queue.queue.discard(8 * MIB, MIB, 0, NO_FLAGS);
    assert_eq!(queue.run(), 0, "a discard");
    // A discarded range may have any content, but the content must not change again.
    queue.submit(0, Kind::Read, 8 * MIB, &buffer, 0..MIB as usize);
    assert_eq!(queue.run(), 0, "a read of the discarded range");
    image[(8 * MIB) as usize..][..MIB as usize].copy_from_slice(&buffer.read(0..MIB as usize));
    queue.submit(0, Kind::Read, SIZE, &buffer, 0..PAGE);
    assert_eq!(queue.run(), io_error(), "a read after the end of the disk");
    queue.queue.flush(0, NO_FLAGS);
    assert_eq!(queue.run(), 0, "a flush");
    // The first pass fills the cache.
    for _ in 0..2 {
        assert_disk(queues, &buffer, &image);
    }
    let nbd = hob.connect().read(0, SIZE as u32).expect("an NBD client reads the disk");
    assert_same(&nbd, &image, 0, "the disk over NBD and the array");
    drop(client);
    hob.stop();
    assert_same(&scratch.read("disk.img"), &image, 0, "the backing file and the array");
}

/// Reads into all regions with one request.
#[track_caller]
fn assert_all_receive(queue: &mut BlkioQueue, regions: &[Buffer], image: &[u8]) {
    // Each number of regions reads another part of the disk, so that earlier data is not taken for
    // new.
    let offset = regions.len() * 128 * KIB as usize;
    let parts: Vec<iovec> = regions
        .iter()
        .map(|region| iovec { iov_base: region.address(&(0..PAGE)).cast(), iov_len: PAGE })
        .collect();
    queue.queue.readv(offset as u64, parts.as_ptr(), parts.len() as u32, 0, NO_FLAGS);
    assert_eq!(queue.run(), 0, "a read into {} regions", regions.len());
    for (number, (region, expected)) in regions.iter().zip(image[offset..].chunks(PAGE)).enumerate() {
        let at = (offset + number * PAGE) as u64;
        assert_same(&region.read(0..PAGE), expected, at, &format!("region {number} and the array"));
    }
}

/// Shares more regions than the eight of a memory table, of any size, and ends the sharing of one after
/// the other.
fn share_and_unshare(disk: &mut Blkio, queue: &mut BlkioQueue, image: &[u8]) {
    let mut regions = Vec::new();
    for number in 1..=20 {
        regions.push(Buffer::share(disk, PAGE + 100 * number).expect("hob maps a region"));
        assert_all_receive(queue, &regions, image);
    }
    while regions.len() > 1 {
        let unshared = regions.swap_remove(regions.len() / 2);
        unshared.unshare(disk);
        queue.submit(0, Kind::Read, 0, &unshared, 0..PAGE);
        assert_eq!(queue.run(), io_error(), "a read into memory that is not shared any more");
        unshared.free(disk);
        assert_all_receive(queue, &regions, image);
    }
}

#[test]
fn libblkio_adds_and_removes_memory_while_requests_are_in_flight() {
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    let image = scratch.read("disk.img");
    let mut client = connect(&scratch, 2, 128);
    let BlkioClient { queues, disk } = &mut client;
    let [busy, queue] = &mut queues[..] else { panic!("two queues") };
    let buffer = Buffer::share(disk, PAGE).expect("hob maps a region");
    std::thread::scope(|scope| {
        let changes = scope.spawn(|| share_and_unshare(disk, queue, &image));
        let mut noise = Noise::new(8);
        let mut count = 0;
        while count == 0 || !changes.is_finished() {
            let offset = noise.below(SIZE / PAGE as u64) * PAGE as u64;
            busy.submit(0, Kind::Read, offset, &buffer, 0..PAGE);
            assert_eq!(busy.run(), 0, "a read at {offset}");
            assert_same(&buffer.read(0..PAGE), &image[offset as usize..][..PAGE], offset, "disk and array");
            count += 1;
        }
    });
    drop(client);
    hob.stop();
}

/// Sends more requests than the largest queue has entries, so that each ring wraps around.
#[test]
fn libblkio_uses_queues_of_all_sizes() {
    const REQUESTS: usize = 1100;
    let scratch = Scratch::new();
    let hob = serve(&scratch).start(&scratch);
    let image = scratch.read("disk.img");
    for entries in [4, 64, 1024] {
        let too_many = BlkioClient::connect(&scratch.path("vm.sock"), 1, 2048);
        assert!(too_many.is_err(), "a queue has at most 1024 entries");
        let mut client = connect(&scratch, 1, entries);
        let buffer = Buffer::share(&mut client.disk, REQUESTS * PAGE).expect("hob maps a region");
        let queue = &mut client.queues[0];
        for number in 0..REQUESTS {
            let range = number * PAGE..(number + 1) * PAGE;
            queue.submit(number, Kind::Read, range.start as u64, &buffer, range);
        }
        let mut is_answered = vec![false; REQUESTS];
        while is_answered.contains(&false) {
            let answer = |number: usize, result: i32| {
                assert_eq!(result, 0, "read {number} in a queue of {entries} entries");
                assert!(
                    !std::mem::replace(&mut is_answered[number], true),
                    "read {number} is answered twice"
                );
            };
            queue.wait(Duration::from_secs(60), answer).expect("the queue is served");
        }
        let read = buffer.read(0..REQUESTS * PAGE);
        assert_same(&read, &image[..REQUESTS * PAGE], 0, &format!("a queue of {entries} and the array"));
    }
    hob.stop();
}

/// libblkio does not reconnect. A new client finds the data that the former one has flushed.
#[test]
fn flushed_writes_of_libblkio_survive_a_kill() {
    let scratch = Scratch::new();
    let serve = serve(&scratch).arg("--mode", "write-back");
    let hob = serve.start(&scratch);
    let mut image = scratch.read("disk.img");
    let mut client = connect(&scratch, 1, 64);
    let buffer = Buffer::share(&mut client.disk, MIB as usize).expect("hob maps a region");
    let data = Noise::new(9).bytes(MIB as usize);
    buffer.write(0, &data);
    let queue = &mut client.queues[0];
    for (number, start) in (0..data.len()).step_by(64 * KIB as usize).enumerate() {
        let (offset, range) = (number as u64 * MIB, start..start + 64 * KIB as usize);
        image[offset as usize..][..range.len()].copy_from_slice(&data[range.clone()]);
        queue.submit(number, Kind::Write, offset, &buffer, range);
        assert_eq!(queue.run(), 0, "a write at {offset}");
    }
    queue.queue.flush(0, NO_FLAGS);
    assert_eq!(queue.run(), 0, "a flush");
    hob.kill();
    assert!(client.disk.get_u64("capacity").is_err(), "the connection has ended");
    drop(client);
    let hob = serve.start(&scratch);
    let mut client = connect(&scratch, 1, 64);
    let buffer = Buffer::share(&mut client.disk, MIB as usize).expect("hob maps a region");
    assert_disk(&mut client.queues, &buffer, &image);
    drop(client);
    hob.stop();
}
