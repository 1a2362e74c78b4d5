//! `qemu-io`: patterns are written, zeroed, discarded, flushed, and read back across the boundaries
//! of cached ranges.

use conformance::data::empty_file;
use conformance::{MIB, Scratch, Serve, Tool};

const SIZE: u64 = 64 * MIB;

/// A purpose, and a sequence of `qemu-io` commands for it. Reads check their pattern.
const SESSIONS: &[(&str, &[&str])] = &[
    (
        "aligned blocks, read twice: from the backing, then from flash",
        &[
            "write -P 0x11 0 1M",
            "read -P 0x11 0 1M",
            "read -P 0x11 0 1M",
            "read -P 0x11 64k 4k",
            "read -P 0 1M 1M",
        ],
    ),
    (
        "512-byte sectors inside one 4 KiB sector",
        &[
            "write -P 0x21 4096 4096",
            "read -P 0x21 4096 4096",
            "write -P 0x22 4608 512",
            "read -P 0x21 4096 512",
            "read -P 0x22 4608 512",
            "read -P 0x21 5120 3072",
            "write -P 0x23 7680 1024",
            "read -P 0x23 7680 1024",
            "read -P 0 8704 512",
        ],
    ),
    (
        "a read that begins in cached data and ends in uncached data",
        &[
            "write -P 0x31 0 256k",
            "read -P 0x31 0 64k",
            "read -P 0x31 32k 128k",
            "read -P 0x31 60k 512",
            "read -P 0x31 0 256k",
            "read -P 0x31 512 130048",
        ],
    ),
    (
        "write zeroes over cached data, keeping and giving up the space",
        &[
            "write -P 0x41 0 512k",
            "read -P 0x41 0 512k",
            "write -z 64k 64k",
            "read -P 0 64k 64k",
            "read -P 0x41 0 64k",
            "read -P 0x41 128k 64k",
            "write -z -u 256k 128k",
            "read -P 0 256k 128k",
            "write -z 513k 512",
            "write -z 4608 512",
            "read -P 0 4608 512",
            "read -P 0x41 4096 512",
            "read -P 0x41 5120 512",
        ],
    ),
    (
        "discard of cached data: reads zero from a file, and neighbours stay",
        &[
            "write -P 0x51 0 1M",
            "read -P 0x51 0 1M",
            "discard 256k 256k",
            "read -P 0 256k 256k",
            "read -P 0x51 0 256k",
            "read -P 0x51 512k 512k",
            "write -P 0x52 300k 4k",
            "read -P 0x52 300k 4k",
            "read -P 0 304k 4k",
        ],
    ),
    (
        "FUA and flush",
        &[
            "write -f -P 0x61 0 64k",
            "flush",
            "read -P 0x61 0 64k",
            "write -f -P 0x62 1536 512",
            "flush",
            "read -P 0x62 1536 512",
            "write -z -f 0 4k",
            "read -P 0 0 4k",
        ],
    ),
    (
        "many requests at once on the same blocks",
        &[
            "write -P 0x71 0 2M",
            "aio_read -P 0x71 0 1M",
            "aio_read -P 0x71 4k 1M",
            "aio_read -P 0x71 512 64k",
            "aio_read -P 0x71 0 1M",
            "aio_flush",
            "aio_write -P 0x72 2M 1M",
            "aio_write -P 0x73 3M 1M",
            "aio_flush",
            "read -P 0x72 2M 1M",
            "read -P 0x73 3M 1M",
            "read -P 0x71 1M 1M",
        ],
    ),
    (
        "the largest request and the end of the disk",
        &[
            "write -P 0x81 32M 32M",
            "read -P 0x81 32M 32M",
            "read -P 0x81 67108352 512",
            "write -P 0x82 67104768 4k",
            "read -P 0x82 67104768 4k",
            "read -P 0x81 67100672 4k",
        ],
    ),
];

#[track_caller]
fn sessions_pass(make: impl Fn(&Scratch) -> Serve) {
    for (why, commands) in SESSIONS {
        let scratch = Scratch::new();
        empty_file(&scratch.path("disk.img"), SIZE);
        let hob = make(&scratch).start(&scratch);
        let calls = commands.iter().flat_map(|c| ["-c", *c]);
        let nbd = hob.uri();
        let said = Tool::new("qemu-io").args(["-f", "raw", "-d", "unmap"]).args(calls).arg(&nbd).output();
        let text = said.all();
        let unhappy = ["failed", "error", "Error", "panicked"].iter().any(|word| text.contains(word));
        assert!(said.success() && !unhappy, "{why}: {text}");
        hob.stop();
        // A second reader must find the same content in the file without a cache.
        let reads = commands.iter().rev().take_while(|c| c.starts_with("read")).flat_map(|c| ["-c", *c]);
        let said =
            Tool::new("qemu-io").args(["-f", "raw"]).args(reads).arg(scratch.text("disk.img")).output();
        assert!(said.success() && !said.all().contains("failed"), "{why}, in the file: {}", said.all());
    }
}

#[test]
fn patterns_without_a_cache() {
    sessions_pass(|s| Serve::disk(&s.text("disk.img")));
}

#[test]
fn patterns_with_4_kib_blocks() {
    sessions_pass(|s| Serve::disk(&s.text("disk.img")).cached(&s.path("pool"), "128M", "4K"));
}

#[test]
fn patterns_with_64_kib_blocks_in_a_small_cache() {
    sessions_pass(|s| Serve::disk(&s.text("disk.img")).cached(&s.path("pool"), "2M", "64K"));
}

#[test]
fn patterns_with_1_mib_blocks_and_lru() {
    let lru = |s: &Scratch| {
        Serve::disk(&s.text("disk.img")).cached(&s.path("pool"), "16M", "1M").arg("--policy", "lru")
    };
    sessions_pass(lru);
}

#[test]
fn patterns_with_fifo() {
    let fifo = |s: &Scratch| {
        Serve::disk(&s.text("disk.img")).cached(&s.path("pool"), "4M", "8K").arg("--policy", "fifo")
    };
    sessions_pass(fifo);
}
