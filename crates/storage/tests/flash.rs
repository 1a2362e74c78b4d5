//! Flash I/O as the shard does it: pool, ring, checksums.

use std::time::Duration;

use hob_engine::io::{BufferSlice, Durability, Io, IoError, IoOp, Target};
use hob_engine::units::{DeviceId, IoId};
use hob_storage::flash::Flash;
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
            let segment = pool.allocate(OwnerId(1), 1).unwrap()[0];
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
                flash.submit(&mut ring, &io(id, op));
                let completion = next(&mut ring);
                let done = flash.handle_completion(&ring, &completion);
                assert_eq!((done.io, done.result, done.sums), (IoId(id), Ok(()), &expected[..]));
                ring.arena_mut().bytes_mut(buffer).fill(0);
            }
            let other = |op, device| Io { target: Target::Flash(device), slice: None, len: 0, ..io(3, op) };
            for (op, device, result) in [
                (IoOp::Flush, segment.device, Ok(())),
                (IoOp::Discard, segment.device, Ok(())),
                (IoOp::Flush, DeviceId(9), Err(IoError::Failed)),
            ] {
                flash.submit(&mut ring, &other(op, device));
                let completion = next(&mut ring);
                let done = flash.handle_completion(&ring, &completion);
                assert_eq!((done.result, done.sums), (result, &[][..]));
            }
            // A truncated device is an error, not zeroes; and a write repairs it.
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
            flash.submit(&mut ring, &io(4, IoOp::Read));
            let completion = next(&mut ring);
            assert_eq!(flash.handle_completion(&ring, &completion).result, Err(IoError::Failed));
            flash.submit(&mut ring, &io(5, IoOp::Write(Durability::Volatile)));
            let completion = next(&mut ring);
            assert_eq!(flash.handle_completion(&ring, &completion).result, Ok(()));
            flash.detach(&mut ring, segment.device);
            ring.arena_mut().free(buffer);
        }
    }
}
