//! Measures random 4 KiB reads through a ring: `ring_bench FILE [uring|threads] [memory|file]
//! [direct]`.
//!
//! Prints IOPS, mean latency and this process's CPU time per I/O at queue depths 1, 16 and 64. The
//! file must be at least 64 MiB large.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use hob_engine::units::BufferId;
use hob_storage::checksum::sector_sums;
use hob_storage::ring::{FdClass, Ring, RingConfig, RingKind};
use hob_storage::token::Token;

const SECTOR_BYTES: usize = 4096;
const RUN: Duration = Duration::from_secs(2);

fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let nanos = threads.filter_map(|task| {
        let stat = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        stat.split(' ').next()?.parse::<u64>().ok()
    });
    let own = stat.split(' ').next().and_then(|nanos| nanos.parse().ok()).unwrap_or(0);
    Duration::from_nanos(nanos.sum::<u64>().max(own))
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let has = |word: &str| arguments.iter().any(|argument| argument == word);
    let path =
        arguments.get(1).expect("usage: ring_bench FILE [uring|threads] [memory|file] [direct] [spin]");
    let kind = if has("threads") { RingKind::Threads } else { RingKind::IoUring };
    let flags = if has("direct") { 0x4000 } else { 0 };
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).expect("the file opens");
    let sectors = file.metadata().expect("it has a size").len() / SECTOR_BYTES as u64;
    let class = if has("memory") { FdClass::Memory } else { FdClass::File };
    let spin = if has("spin") { Duration::from_micros(50) } else { Duration::ZERO };
    let mut ring = Ring::new(&RingConfig { kind, ..RingConfig::default() }).expect("a ring");
    let fd = ring.attach(std::os::fd::OwnedFd::from(file), class);
    let mut sums = Vec::new();
    let mut rng: u64 = 0x9E37_79B9_7F4A_7C15;
    for depth in [1u32, 16, 64] {
        let buffers: Vec<BufferId> =
            (0..depth).map(|_| ring.arena_mut().alloc(SECTOR_BYTES).expect("room")).collect();
        let mut start_read = |ring: &mut Ring, slot: u32| {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let offset = (rng >> 20) % sectors * SECTOR_BYTES as u64;
            let slice = ring.arena().whole(buffers[slot as usize]);
            ring.read(Token::new(Token::CALLER, 0, slot), fd, offset, slice);
        };
        let (start, cpu) = (Instant::now(), cpu_time());
        (0..depth).for_each(|slot| start_read(&mut ring, slot));
        let mut count = 0u64;
        while start.elapsed() < RUN {
            ring.submit_and_wait(spin, None).expect("a wait");
            // A batch is what has completed now; what it starts belongs to the next one.
            for _ in 0..depth {
                let Some(completion) = ring.next_completion() else { break };
                assert_eq!(completion.result, SECTOR_BYTES as i32);
                let slot = completion.token.index();
                sector_sums(ring.arena().bytes(buffers[slot as usize]), &mut sums);
                count += 1;
                start_read(&mut ring, slot);
            }
        }
        let (wall, cpu) = (start.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64());
        println!(
            "depth {depth:3}: {:9.0} IOPS, {:7.2} us each, {:5.2} us CPU per I/O",
            count as f64 / wall,
            wall / count as f64 * f64::from(depth) * 1e6,
            cpu / count as f64 * 1e6
        );
        while ring.in_flight() > 0 {
            ring.submit_and_wait(Duration::ZERO, None).expect("a wait");
            while ring.next_completion().is_some() {}
        }
        buffers.into_iter().for_each(|id| ring.arena_mut().release(id));
    }
    let block = vec![7u8; 64 * SECTOR_BYTES];
    let bytes = 20_000.0 * block.len() as f64;
    let timed = |name: &str, work: &mut dyn FnMut()| {
        let start = cpu_time();
        (0..20_000).for_each(|_| work());
        println!("CRC-32C {name}: {:.1} GB/s", bytes / (cpu_time() - start).as_secs_f64() / 1e9);
    };
    timed("here", &mut || sector_sums(std::hint::black_box(&block), &mut sums));
    timed("crate", &mut || {
        sums.clear();
        sums.extend(std::hint::black_box(&block).chunks(SECTOR_BYTES).map(crc32c::crc32c));
    });
}
