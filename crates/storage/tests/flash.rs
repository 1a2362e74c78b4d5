//! Flash I/O like that of the shard: pool, ring, checksums.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use hob_engine::io::{BufferSlice, Durability, Io, IoError, IoOp, Target};
use hob_engine::units::{DeviceId, IoId};
use hob_storage::flash::{DeviceCounts, Flash};
use hob_storage::pool::{DeviceSpec, Overwrite, OwnerId, Pool, device_bytes_for};
use hob_storage::ring::{Completion, Ring, RingConfig, RingKind};
use hob_storage::token::Token;

fn next(ring: &mut Ring) -> Completion {
    loop {
        if let Some(completion) = ring.next_completion() {
            assert_eq!((completion.token.kind(), completion.token.owner()), (Token::FLASH, 2));
            return completion;
        }
        ring.submit_and_wait(Duration::ZERO, Some(Duration::from_secs(5))).unwrap();
    }
}

#[test]
fn transfers_bring_their_checksums() {
    for kind in [RingKind::IoUring, RingKind::Threads] {
        for place in ["/tmp", "/dev/shm"] {
            let dir = tempfile::tempdir_in(place).unwrap();
            let path = dir.path().join("pool");
            let spec =
                DeviceSpec { path: path.clone(), size_bytes: Some(device_bytes_for(4 << 20, 1 << 20)) };
            let mut pool = Pool::create("p", &[spec], 1 << 20, Overwrite::Refuse).unwrap();
            assert_eq!(pool.devices()[0].access == "memory", place == "/dev/shm");
            let segment = pool.allocate(OwnerId(1), 1, 0).unwrap()[0];
            let mut ring = Ring::new(&RingConfig { kind, ..RingConfig::default() }).unwrap();
            let mut flash = Flash::new(2);
            flash.attach(&mut ring, segment.device, pool.file(segment.device).unwrap());
            let buffer = ring.arena_mut().alloc(12288).unwrap();
            for (at, byte) in ring.arena_mut().bytes_mut(buffer).iter_mut().enumerate() {
                *byte = (at / 100) as u8;
            }
            let expected: Vec<u32> =
                ring.arena().bytes(buffer)[4096..].chunks(4096).map(crc32c::crc32c).collect();
            let io = |id, op| Io {
                id: IoId(id),
                target: Target::Flash(segment.device),
                op,
                offset: segment.offset + 4096,
                len: 8192,
                slice: Some(BufferSlice { id: buffer, offset: 4096, len: 8192 }),
            };
            for (id, op) in [(1, IoOp::Write(Durability::Volatile)), (2, IoOp::Read)] {
                flash.submit(&mut ring, &io(id, op), &[]);
                let completion = next(&mut ring);
                let done = flash.handle_completion(&mut ring, &completion).unwrap();
                assert_eq!((done.io, done.result, done.sums), (IoId(id), Ok(()), &expected[..]));
                ring.arena_mut().bytes_mut(buffer).fill(0);
            }
            let other = |op, device| Io { target: Target::Flash(device), slice: None, len: 0, ..io(3, op) };
            for (op, device, result) in [
                (IoOp::Flush, segment.device, Ok(())),
                (IoOp::Discard, segment.device, Ok(())),
                (IoOp::Flush, DeviceId(9), Err(IoError::Failed)),
            ] {
                flash.submit(&mut ring, &other(op, device), &[]);
                let completion = next(&mut ring);
                let done = flash.handle_completion(&mut ring, &completion).unwrap();
                assert_eq!((done.result, done.sums), (result, &[][..]));
            }
            // A truncated device returns an error instead of zeroes, and a write repairs it.
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
            flash.submit(&mut ring, &io(4, IoOp::Read), &[]);
            let completion = next(&mut ring);
            assert_eq!(flash.handle_completion(&mut ring, &completion).unwrap().result, Err(IoError::Failed));
            flash.submit(&mut ring, &io(5, IoOp::Write(Durability::Volatile)), &[]);
            let in_flight: Vec<u64> = flash.counts().map(|(_, counts)| counts.in_flight).collect();
            assert_eq!(in_flight, [1]);
            let completion = next(&mut ring);
            assert_eq!(flash.handle_completion(&mut ring, &completion).unwrap().result, Ok(()));
            // Two writes, a read, a flush, and a read that failed.
            let counts =
                DeviceCounts { ios: 5, errors: 1, read_bytes: 8192, written_bytes: 16384, in_flight: 0 };
            assert_eq!(flash.counts().collect::<Vec<_>>(), [(segment.device, counts)]);
            flash.detach(&mut ring, segment.device);
            assert_eq!(flash.counts().count(), 0);
            ring.arena_mut().free(buffer);
        }
    }
}

/// Many more simultaneous journal writes than the ring's buffer has space for, while guests use all
/// other memory.
#[test]
fn journals_are_written_in_any_number_and_without_free_buffers() {
    for kind in [RingKind::IoUring, RingKind::Threads] {
        for place in ["/tmp", "/dev/shm"] {
            let dir = tempfile::tempdir_in(place).unwrap();
            let path = dir.path().join("pool");
            let spec =
                DeviceSpec { path: path.clone(), size_bytes: Some(device_bytes_for(8 << 20, 1 << 20)) };
            let mut pool = Pool::create("p", &[spec], 1 << 20, Overwrite::Refuse).unwrap();
            let ring_segments = pool.allocate_ring(OwnerId(1), 1, 1, 4, &[]).unwrap().remove(0);
            let config = RingConfig { kind, arena_bytes: 1 << 20, ..RingConfig::default() };
            let mut ring = Ring::new(&config).unwrap();
            while ring.arena_mut().alloc(4096).is_some() {}
            let mut flash = Flash::new(2);
            let device = ring_segments[0].device;
            flash.attach(&mut ring, device, pool.file(device).unwrap());
            let start = ring_segments[0].offset;
            let len = |n: u64| if n.is_multiple_of(3) { 4096 } else { 64 << 10 };
            let pages = |n: u64| -> Vec<u8> { (0..len(n)).map(|at| (at / 7 + n * 31) as u8).collect() };
            let io = |n: u64| Io {
                id: IoId(n as u32),
                target: Target::Flash(device),
                op: IoOp::WriteJournal,
                offset: start + n * (64 << 10),
                len: len(n),
                slice: None,
            };
            for round in 0..2 {
                let mut left: Vec<u64> = (0..40).collect();
                for n in &left {
                    // The caller may change the data as soon as it has been passed.
                    let mut bytes = pages(*n + round);
                    flash.submit(&mut ring, &Io { len: bytes.len() as u64, ..io(*n) }, &bytes);
                    bytes.fill(0);
                }
                while !left.is_empty() {
                    let completion = next(&mut ring);
                    let done = flash.handle_completion(&mut ring, &completion).unwrap();
                    assert_eq!((done.result, done.sums), (Ok(()), &[][..]));
                    let at = left.iter().position(|n| *n == u64::from(done.io.0)).expect("each ends once");
                    left.swap_remove(at);
                }
                let flush = Io { op: IoOp::Flush, offset: 0, len: 0, ..io(99) };
                flash.submit(&mut ring, &flush, &[]);
                let completion = next(&mut ring);
                assert_eq!(flash.handle_completion(&mut ring, &completion).unwrap().result, Ok(()));
                let written: u64 = (0..=round).flat_map(|round| (0..40).map(move |n| len(n + round))).sum();
                let counts = flash.counts().next().expect("a device").1;
                assert_eq!(
                    (counts.ios, counts.written_bytes, counts.in_flight),
                    ((round + 1) * 41, written, 0)
                );
                let file = std::fs::File::open(&path).unwrap();
                for n in 0..40 {
                    let mut found = vec![0; len(n + round) as usize];
                    file.read_exact_at(&mut found, start + n * (64 << 10)).unwrap();
                    assert!(found == pages(n + round), "journal write {n}");
                }
            }
            // When a device leaves, its waiting I/Os are dropped.
            (0..40).for_each(|n| flash.submit(&mut ring, &io(n), &pages(n)));
            flash.detach(&mut ring, device);
            let results: Vec<_> = (0..40)
                .map(|_| {
                    let completion = next(&mut ring);
                    flash.handle_completion(&mut ring, &completion).unwrap().result
                })
                .collect();
            assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 8);
        }
    }
}
