//! Tests that the layer loses and keeps the correct data, and writes any part of the rest.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use hob_engine::io::{BufferSlice, Durability};
use rustix::fs::FallocateFlags;

use super::file::UNIT_BYTES;
use super::{Flushes, SimRng, VolatileFile, VolatileOptions, adopt};
use crate::ring::{FdClass, Ring, RingConfig, RingKind};
use crate::token::Token;

const UNIT: usize = UNIT_BYTES as usize;
const BYTES: usize = 256 << 10;

/// Returns a file of zeroes, and its volatile file.
fn files(seed: u64, flushes: Flushes) -> (File, VolatileFile) {
    let file = tempfile::tempfile().unwrap();
    file.set_len(BYTES as u64).unwrap();
    let volatile = VolatileFile::new(file.try_clone().unwrap(), seed, flushes);
    (file, volatile)
}

fn on_file(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn through(volatile: &VolatileFile) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    volatile.read(0, &mut bytes).unwrap();
    bytes
}

/// Writes a random range, also to the memory with the expected content.
fn write_somewhere(volatile: &VolatileFile, expected: &mut [u8], rng: &mut SimRng, durability: Durability) {
    let len = 1 + rng.below(9000);
    let offset = rng.below(BYTES - len);
    let data: Vec<u8> = (0..len).map(|_| 1 + rng.below(255) as u8).collect();
    volatile.write(offset as u64, &data, durability).unwrap();
    expected[offset..offset + len].copy_from_slice(&data);
}

#[test]
fn reads_return_written_data_and_a_flush_writes_it_to_the_file() {
    for seed in 0..20 {
        let (file, volatile) = files(seed, Flushes::Honest);
        let (mut expected, mut rng) = (vec![0; BYTES], SimRng::new(seed));
        for _ in 0..60 {
            write_somewhere(&volatile, &mut expected, &mut rng, Durability::Volatile);
            assert!(through(&volatile) == expected, "seed {seed}");
        }
        assert!(on_file(&file) != expected, "seed {seed}: nothing is held back");
        volatile.flush().unwrap();
        assert_eq!(volatile.held(), 0);
        assert!(on_file(&file) == expected, "seed {seed}");
    }
}

#[test]
fn a_cut_drops_some_units_and_keeps_others_whole() {
    let (mut kept, mut dropped, mut torn) = (0, 0, 0);
    for seed in 0..200 {
        let (file, volatile) = files(seed, Flushes::Honest);
        volatile.write(0, &[1; 64 << 10], Durability::Volatile).unwrap();
        volatile.flush().unwrap();
        for block in 0..16 {
            volatile.write(block * 4096, &[2; 4096], Durability::Volatile).unwrap();
        }
        volatile.cut();
        let found = on_file(&file);
        for block in found[..64 << 10].chunks(4096) {
            let new = block.chunks(UNIT).filter(|unit| unit.iter().all(|byte| *byte == 2)).count();
            let old = block.chunks(UNIT).filter(|unit| unit.iter().all(|byte| *byte == 1)).count();
            assert_eq!(new + old, 4096 / UNIT, "seed {seed}: a unit is neither new nor old");
            match new {
                0 => dropped += 1,
                8 => kept += 1,
                _ => torn += 1,
            }
        }
        assert!(through(&volatile) == found, "seed {seed}: reads see the dropped units");
    }
    // Of 3200 blocks.
    assert!(dropped > 1500 && kept > 200 && torn > 200, "{dropped} dropped, {kept} kept, {torn} torn");
}

#[test]
fn later_writes_get_through_before_earlier_ones() {
    let overtaken = (0..200).filter(|seed| {
        let (file, volatile) = files(*seed, Flushes::Honest);
        volatile.write(0, &[1; UNIT], Durability::Volatile).unwrap();
        volatile.write(8192, &[2; UNIT], Durability::Volatile).unwrap();
        volatile.cut();
        let found = on_file(&file);
        found[0] == 0 && found[8192] == 2
    });
    assert!(overtaken.count() > 5);
}

#[test]
fn a_durable_write_survives_and_takes_no_other_along() {
    let mut lost = 0;
    for seed in 0..50 {
        let (file, volatile) = files(seed, Flushes::Honest);
        volatile.write(0, &[1; 4096], Durability::Volatile).unwrap();
        volatile.write(8192, &[2; 1000], Durability::Durable).unwrap();
        volatile.cut();
        let found = on_file(&file);
        assert!(found[8192..9192].iter().all(|byte| *byte == 2), "seed {seed}");
        assert!(found[9192..].iter().all(|byte| *byte == 0), "seed {seed}");
        lost += usize::from(found[..4096].iter().all(|byte| *byte == 0));
    }
    assert!(lost > 20, "{lost}");
}

#[test]
fn a_lying_device_loses_flushed_data() {
    let lost = (0..50).filter(|seed| {
        let (file, volatile) = files(*seed, Flushes::Ignored);
        volatile.write(0, &[1; 4096], Durability::Volatile).unwrap();
        volatile.flush().unwrap();
        volatile.write(8192, &[2; 4096], Durability::Durable).unwrap();
        volatile.cut();
        on_file(&file).iter().all(|byte| *byte == 0)
    });
    assert!(lost.count() > 20);
    let (file, volatile) = files(1, Flushes::Ignored);
    volatile.write(0, &[1; 4096], Durability::Volatile).unwrap();
    volatile.settle().unwrap();
    assert_eq!(on_file(&file)[..4096], [1; 4096]);
}

#[test]
fn punched_holes_take_held_units_along() {
    for seed in 0..20 {
        let (file, volatile) = files(seed, Flushes::Honest);
        let mut expected = vec![7; BYTES];
        volatile.write(0, &expected, Durability::Volatile).unwrap();
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for (offset, len) in [(100, 50), (4000, 9000), (65536, 8192), (100_000, 1)] {
            volatile.fallocate(mode, offset as u64, len as u64).unwrap();
            expected[offset..offset + len].fill(0);
        }
        assert!(through(&volatile) == expected, "seed {seed}");
        volatile.flush().unwrap();
        assert!(on_file(&file) == expected, "seed {seed}");
    }
}

#[test]
fn memory_is_bounded() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(80 << 20).unwrap();
    let volatile = VolatileFile::new(file, 3, Flushes::Ignored);
    let data = vec![1; 1 << 20];
    let mut most = 0;
    for at in 0..80 {
        volatile.write(at << 20, &data, Durability::Volatile).unwrap();
        most = most.max(volatile.held());
    }
    assert!(most > (32 << 20) / UNIT && most <= (64 << 20) / UNIT, "{most} units");
}

#[test]
fn reading_behind_the_end_is_an_error() {
    let (_, volatile) = files(0, Flushes::Honest);
    let error = volatile.read(BYTES as u64 - 100, &mut [0; 200]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
}

/// Returns the ring's operations by token, in the order in which they ended.
fn all_ended(ring: &mut Ring, count: usize) -> Vec<(u32, i32)> {
    let mut ended = Vec::new();
    while ended.len() < count {
        assert!(ring.in_flight() > 0, "{ended:?}");
        ring.submit_and_wait(Duration::ZERO, None).unwrap();
        while let Some(completion) = ring.next_completion() {
            ended.push((completion.token.index(), completion.result));
        }
    }
    ended
}

#[test]
fn the_ring_moves_volatile_files_bytes_in_any_order() {
    for kind in [RingKind::IoUring, RingKind::Threads] {
        let config = RingConfig { kind, entries: 8, arena_bytes: 1 << 20, file_threads_max: 1 };
        let mut ring = Ring::new(&config).expect("this system has io_uring");
        let file = tempfile::tempfile().unwrap();
        file.set_len(BYTES as u64).unwrap();
        let volatile = adopt(&file, VolatileOptions { seed: 5, ..VolatileOptions::default() }).unwrap();
        let token = |index| Token::new(Token::CALLER, 0, index);
        let fd = ring.attach(OwnedFd::from(file.try_clone().unwrap()), FdClass::Volatile);
        let buffer = ring.arena_mut().alloc(64 << 10).unwrap();
        ring.arena_mut()
            .bytes_mut(buffer)
            .iter_mut()
            .enumerate()
            .for_each(|(at, byte)| *byte = (at >> 9) as u8);
        let part = |at: u32| BufferSlice { id: buffer, offset: at * 4096, len: 4096 };
        for at in 0..16 {
            ring.write(token(at), fd, u64::from(at) * 4096, part(at), Durability::Volatile);
        }
        assert_eq!(volatile.held(), 0, "nothing happens before the ring is asked to wait");
        let order = all_ended(&mut ring, 16);
        assert!(order.iter().all(|(_, result)| *result == 4096), "{order:?}");
        assert!(!order.is_sorted(), "{order:?}");
        let written = ring.arena().bytes(buffer).to_vec();
        assert!(on_file(&file)[..64 << 10] != written, "some of it is held back");

        // The same file through a second descriptor, and into another buffer.
        let second = ring.attach(OwnedFd::from(file.try_clone().unwrap()), FdClass::Volatile);
        let other = ring.arena_mut().alloc(64 << 10).unwrap();
        ring.read(token(0), second, 0, ring.arena().whole(other));
        assert_eq!(all_ended(&mut ring, 1), [(0, 64 << 10)]);
        assert!(ring.arena().bytes(other) == written);
        ring.read(token(1), second, BYTES as u64 - 512, BufferSlice { id: other, offset: 0, len: 1024 });
        assert_eq!(all_ended(&mut ring, 1), [(1, -libc::ENODATA)]);

        ring.fsync(token(2), second);
        assert_eq!(all_ended(&mut ring, 1), [(2, 0)]);
        assert!(on_file(&file)[..64 << 10] == written);
        let punch = (FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE).bits() as i32;
        ring.fallocate(token(3), fd, punch, 0, 8192);
        assert_eq!(all_ended(&mut ring, 1), [(3, 0)]);
        assert!(through(&volatile)[..8192].iter().all(|byte| *byte == 0));
        ring.arena_mut().free(buffer);
        ring.arena_mut().free(other);
        ring.detach(fd);
        // Operations in flight when the ring is dropped still run.
        let last = ring.arena_mut().alloc(512).unwrap();
        ring.arena_mut().bytes_mut(last).fill(9);
        ring.write(token(4), second, 4096, ring.arena().whole(last), Durability::Durable);
        drop(ring);
        assert_eq!(on_file(&file)[4096..4608], [9; 512]);
    }
}
