//! Tests of both drivers: each `#[test]` runs its body with io_uring and with threads.

mod shared;

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use hob_engine::gather::Gather;
use hob_engine::io::{BufferSlice, Durability};

use rustix::event::{EventfdFlags, eventfd};

use super::{Completion, Fd, FdClass, Gate, Returned, Ring, RingConfig, RingKind, RxBuf};
use crate::token::Token;

const PATIENCE: Duration = Duration::from_secs(120);

fn with_both(body: impl Fn(&mut Ring)) {
    for kind in [RingKind::IoUring, RingKind::Threads] {
        let config = RingConfig { kind, entries: 8, arena_bytes: 8 << 20, file_threads_max: 3 };
        let mut ring = Ring::new(&config).expect("this system has io_uring");
        assert_eq!(ring.kind(), kind);
        body(&mut ring);
        assert_eq!(ring.in_flight(), 0);
    }
}

fn token(index: u32) -> Token {
    Token::new(Token::CALLER, 0, index)
}

fn next(ring: &mut Ring) -> Completion {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(completion) = ring.next_completion() {
            return completion;
        }
        assert!(Instant::now() < deadline, "nothing completes");
        ring.submit_and_wait(Duration::ZERO, Some(Duration::from_secs(1))).unwrap();
    }
}

fn idle(ring: &mut Ring, time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        ring.submit_and_wait(Duration::ZERO, Some(Duration::from_millis(5))).unwrap();
        assert!(ring.next_completion().is_none());
    }
}

fn pair() -> (OwnedFd, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_read_timeout(Some(PATIENCE)).unwrap();
    (ours.into(), theirs)
}

fn pattern(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32).map(|n| ((n ^ seed).wrapping_mul(0x9E37_79B1) >> 24) as u8).collect()
}

#[test]
fn files_are_written_and_read_in_great_numbers() {
    with_both(|ring| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let fd = ring.attach(OwnedFd::from(file.try_clone().unwrap()), FdClass::File);
        let data = pattern(1 << 20, 1);
        let buffer = ring.arena_mut().alloc(1 << 20).unwrap();
        ring.arena_mut().bytes_mut(buffer).copy_from_slice(&data);
        let slice = |at: u32| BufferSlice { id: buffer, offset: at * 4096, len: 4096 };
        // Many more than the queue has entries.
        for at in 0..256 {
            let durability = if at % 16 == 0 { Durability::Durable } else { Durability::Volatile };
            ring.write(token(at), fd, u64::from(at) * 4096, slice(at), durability);
        }
        let mut seen = [false; 256];
        for _ in 0..256 {
            let completion = next(ring);
            assert_eq!(completion.result, 4096);
            let index = completion.token.index() as usize;
            assert!(!std::mem::replace(&mut seen[index], true));
        }
        ring.fsync(token(0), fd);
        assert_eq!(next(ring).result, 0);
        ring.arena_mut().bytes_mut(buffer).fill(0);
        for at in 0..256 {
            ring.read(token(at), fd, u64::from(at) * 4096, slice(at));
        }
        (0..256).for_each(|_| assert_eq!(next(ring).result, 4096));
        assert!(ring.arena().bytes(buffer) == data);
        ring.fallocate(token(7), fd, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 4096, 4096);
        assert_eq!(next(ring).result, 0);
        ring.read(token(0), fd, 0, ring.arena().whole(buffer));
        assert_eq!(next(ring).result, 1 << 20);
        assert!(ring.arena().bytes(buffer)[4096..8192].iter().all(|byte| *byte == 0));
        assert!(ring.arena().bytes(buffer)[8192..] == data[8192..]);
        ring.detach(fd);
        ring.arena_mut().free(buffer);
    });
}

#[test]
fn device_operations_are_submitted_early_from_a_count_on() {
    let config =
        RingConfig { kind: RingKind::IoUring, entries: 8, arena_bytes: 1 << 20, file_threads_max: 1 };
    let mut ring = Ring::new(&config).expect("this system has io_uring");
    let file = tempfile::tempfile().unwrap();
    let fd = ring.attach(OwnedFd::from(file.try_clone().unwrap()), FdClass::File);
    let buffer = ring.arena_mut().alloc(8192).unwrap();
    ring.arena_mut().bytes_mut(buffer).fill(7);
    let write = |ring: &mut Ring, at: u32| {
        let slice = BufferSlice { id: buffer, offset: at * 4096, len: 4096 };
        ring.write(token(at), fd, u64::from(at) * 4096, slice, Durability::Volatile);
        ring.submit_early(2).unwrap();
    };
    write(&mut ring, 0);
    assert_eq!(ring.unsubmitted(), 1);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(file.metadata().unwrap().len(), 0, "one operation is not submitted");
    write(&mut ring, 1);
    assert_eq!(ring.unsubmitted(), 0);
    let deadline = Instant::now() + PATIENCE;
    while file.metadata().unwrap().len() < 8192 {
        assert!(Instant::now() < deadline, "two operations are submitted without a wait");
    }
    assert_eq!((next(&mut ring).result, next(&mut ring).result), (4096, 4096));
}

#[test]
fn memory_files_complete_at_once_and_a_truncated_file_is_an_error() {
    with_both(|ring| {
        for class in [FdClass::Memory, FdClass::File] {
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            file.write_all_at(&pattern(6000, 2), 0).unwrap();
            let fd = ring.attach(OwnedFd::from(file), class);
            let buffer = ring.arena_mut().alloc(8192).unwrap();
            ring.read(token(1), fd, 0, BufferSlice { id: buffer, offset: 100, len: 4096 });
            if class == FdClass::Memory {
                assert_eq!(ring.next_completion().unwrap().result, 4096);
            } else {
                assert_eq!(next(ring).result, 4096);
            }
            assert!(ring.arena().bytes(buffer)[100..4196] == pattern(6000, 2)[..4096]);
            ring.read(token(2), fd, 4096, BufferSlice { id: buffer, offset: 0, len: 4096 });
            assert_eq!(next(ring).result, -libc::ENODATA);
            ring.read(token(2), fd, 1 << 30, BufferSlice { id: buffer, offset: 0, len: 4096 });
            assert_eq!(next(ring).result, -libc::ENODATA);
            ring.arena_mut().free(buffer);
            ring.detach(fd);
        }
    });
}

#[test]
fn errors_are_reported() {
    with_both(|ring| {
        let file = std::fs::File::open("/dev/zero").unwrap();
        let fd = ring.attach(OwnedFd::from(file), FdClass::File);
        let slice = ring.zeroes(4096);
        ring.write(token(1), fd, 0, slice, Durability::Volatile);
        assert_eq!(next(ring).result, -libc::EBADF);
        ring.detach(fd);
    });
}

#[test]
fn sends_are_complete_and_ordered() {
    with_both(|ring| {
        let (ours, mut theirs) = pair();
        let fd = ring.attach(ours, FdClass::Socket);
        let data = pattern(3 << 20, 3);
        let buffer = ring.arena_mut().alloc(3 << 20).unwrap();
        ring.arena_mut().bytes_mut(buffer).copy_from_slice(&data);
        // More pieces than one message has, and far more bytes than the socket buffers.
        let mut gather = Gather::default();
        let mut expected = Vec::new();
        for at in 0..1500u32 {
            let header = at.to_be_bytes();
            gather.push_head(|head| head.extend_from_slice(&header));
            gather.push_payload(BufferSlice { id: buffer, offset: at * 2000, len: 2000 });
            expected.extend_from_slice(&header);
            expected.extend_from_slice(&data[at as usize * 2000..][..2000]);
        }
        ring.send(token(9), fd, gather);
        let reader = std::thread::spawn(move || {
            let mut received = vec![0; 1500 * 2004];
            std::thread::sleep(Duration::from_millis(20));
            theirs.read_exact(&mut received).unwrap();
            (received, theirs)
        });
        let completion = next(ring);
        assert_eq!(completion.result, 1500 * 2004);
        let Returned::Gather(mut gather) = completion.returned else { panic!("the list comes back") };
        let (received, mut theirs) = reader.join().unwrap();
        assert!(received == expected);
        // One piece, then the end of the stream.
        gather.clear();
        gather.push_head(|head| head.extend_from_slice(b"hello"));
        ring.send(token(10), fd, gather);
        assert_eq!(next(ring).result, 5);
        let mut hello = [0; 5];
        theirs.read_exact(&mut hello).unwrap();
        assert_eq!(&hello, b"hello");
        ring.send(token(11), fd, Gather::default());
        assert_eq!(next(ring).result, 0);
        drop(theirs);
        let mut gather = Gather::default();
        gather.push_payload(ring.arena().whole(buffer));
        ring.send(token(12), fd, gather);
        assert_eq!(next(ring).result, -libc::EPIPE);
        ring.detach(fd);
        ring.arena_mut().free(buffer);
    });
}

#[test]
fn received_data_is_appended() {
    with_both(|ring| {
        let (ours, mut theirs) = pair();
        let fd = ring.attach(ours, FdClass::Socket);
        ring.recv(token(1), fd, RxBuf::new(16));
        idle(ring, Duration::from_millis(20));
        theirs.write_all(b"abcdef").unwrap();
        let completion = next(ring);
        assert_eq!(completion.result, 6);
        let Returned::Rx(mut rx) = completion.returned else { panic!("the buffer comes back") };
        rx.consume(4);
        assert_eq!((rx.filled(), rx.room()), (&b"ef"[..], 14));
        theirs.write_all(b"ghi").unwrap();
        ring.recv(token(2), fd, rx);
        let Returned::Rx(rx) = next(ring).returned else { panic!("the buffer comes back") };
        assert_eq!(rx.filled(), b"efghi");
        // Directly into the arena, in two parts.
        let buffer = ring.arena_mut().alloc(8192).unwrap();
        ring.recv_into(token(3), fd, BufferSlice { id: buffer, offset: 10, len: 8000 });
        let data = pattern(8000, 4);
        theirs.write_all(&data[..3000]).unwrap();
        idle(ring, Duration::from_millis(20));
        theirs.write_all(&data[3000..]).unwrap();
        assert_eq!(next(ring).result, 8000);
        assert!(ring.arena().bytes(buffer)[10..8010] == data);
        ring.recv_into(token(4), fd, BufferSlice { id: buffer, offset: 0, len: 8000 });
        theirs.write_all(&data[..50]).unwrap();
        drop(theirs);
        assert_eq!(next(ring).result, 50);
        ring.recv(token(5), fd, rx);
        assert_eq!(next(ring).result, 0);
        ring.detach(fd);
        ring.arena_mut().free(buffer);
    });
}

#[test]
fn a_receive_that_is_cancelled_loses_no_byte() {
    with_both(|ring| {
        let (ours, mut theirs) = pair();
        let second = ours.try_clone().unwrap();
        let fd = ring.attach(ours, FdClass::Socket);
        let cancelled = |ring: &mut Ring, filled: &[u8]| {
            ring.recv(token(1), fd, RxBuf::with(16, filled));
            idle(ring, Duration::from_millis(20));
            ring.cancel_recv(fd);
            let completion = next(ring);
            assert_eq!(completion.result, -libc::ECANCELED);
            let Returned::Rx(rx) = completion.returned else { panic!("the buffer comes back") };
            assert_eq!(rx.filled(), filled);
        };
        cancelled(ring, b"");
        cancelled(ring, b"abc");
        // Bytes that arrive at the same moment are all received, by one operation or the other.
        let (mut sent, mut received) = (0u8, Vec::new());
        for _ in 0..50 {
            ring.recv(token(2), fd, RxBuf::new(16));
            if sent.is_multiple_of(2) {
                ring.submit_and_wait(Duration::ZERO, Some(Duration::from_micros(50))).unwrap();
            }
            theirs.write_all(&[sent]).unwrap();
            sent += 1;
            ring.cancel_recv(fd);
            let completion = next(ring);
            let Returned::Rx(rx) = completion.returned else { panic!("the buffer comes back") };
            assert!(completion.result > 0 || completion.result == -libc::ECANCELED);
            received.extend_from_slice(rx.filled());
        }
        // Detached without a shutdown: another owner of the socket continues to use it.
        ring.detach(fd);
        let mut rest = std::os::unix::net::UnixStream::from(second);
        theirs.write_all(b"!").unwrap();
        drop(theirs);
        rest.set_nonblocking(false).unwrap();
        rest.read_to_end(&mut received).unwrap();
        assert_eq!(received.pop(), Some(b'!'));
        assert_eq!(received, (0..sent).collect::<Vec<u8>>());
    });
}

#[test]
fn a_shut_down_socket_ends_its_operations_and_is_closed() {
    with_both(|ring| {
        let (ours, mut theirs) = pair();
        let fd = ring.attach(ours, FdClass::Socket);
        let buffer = ring.arena_mut().alloc(4 << 20).unwrap();
        let mut gather = Gather::default();
        gather.push_payload(ring.arena().whole(buffer));
        ring.recv(token(1), fd, RxBuf::new(10));
        ring.send(token(2), fd, gather);
        idle(ring, Duration::from_millis(20));
        ring.shutdown(fd);
        ring.detach(fd);
        let (mut a, mut b) = (next(ring), next(ring));
        if a.token.index() == 2 {
            std::mem::swap(&mut a, &mut b);
        }
        assert_eq!(a.result, 0);
        assert_eq!(b.result, -libc::EPIPE);
        // The peer receives the sent bytes, then the end of the stream: our descriptor is closed.
        let mut rest = Vec::new();
        theirs.read_to_end(&mut rest).unwrap();
        ring.arena_mut().free(buffer);
        // The entry is reused, with another generation.
        let (ours, _theirs) = pair();
        let again = ring.attach(ours, FdClass::Socket);
        assert_ne!(again, fd);
        ring.detach(again);
    });
}

#[test]
fn two_hundred_idle_sockets_cost_no_thread() {
    with_both(|ring| {
        let mut peers = Vec::new();
        for at in 0..200 {
            let (ours, theirs) = pair();
            let fd = ring.attach(ours, FdClass::Socket);
            ring.recv(token(at), fd, RxBuf::new(8));
            peers.push((fd, theirs));
        }
        idle(ring, Duration::from_millis(20));
        assert_eq!(ring.in_flight(), 200);
        // A file is still served, and so is each socket.
        let file = tempfile::tempfile().unwrap();
        let fd = ring.attach(OwnedFd::from(file), FdClass::File);
        ring.write(token(1000), fd, 0, ring.zeroes(4096), Durability::Volatile);
        assert_eq!(next(ring).token, token(1000));
        ring.detach(fd);
        for (at, (fd, peer)) in peers.iter_mut().enumerate().rev() {
            peer.write_all(b"x").unwrap();
            let completion = next(ring);
            assert_eq!((completion.token, completion.result), (token(at as u32), 1));
            ring.detach(*fd);
        }
    });
}

#[test]
fn a_waker_wakes_from_another_thread() {
    with_both(|ring| {
        for _ in 0..50 {
            let (waker, done) = (ring.waker(), Arc::new(AtomicBool::new(false)));
            let told = done.clone();
            let thread = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(1));
                told.store(true, Ordering::Relaxed);
                waker.wake();
            });
            let start = Instant::now();
            while !done.load(Ordering::Relaxed) {
                ring.submit_and_wait(Duration::ZERO, Some(PATIENCE)).unwrap();
                assert!(ring.next_completion().is_none());
            }
            assert!(start.elapsed() < PATIENCE / 2);
            thread.join().unwrap();
        }
        // Called before the wait: no sleep.
        ring.waker().wake();
        let start = Instant::now();
        ring.submit_and_wait(Duration::ZERO, Some(PATIENCE)).unwrap();
        assert!(start.elapsed() < PATIENCE / 2);
    });
}

#[test]
fn waiting_ends_in_time_and_spinning_sees_completions() {
    with_both(|ring| {
        let start = Instant::now();
        let _ = ring.submit_and_wait(Duration::from_micros(100), Some(Duration::from_millis(30)));
        while start.elapsed() < Duration::from_millis(30) {
            ring.submit_and_wait(Duration::ZERO, Some(Duration::from_millis(30))).unwrap();
        }
        assert!(start.elapsed() < PATIENCE);
        let (ours, mut theirs) = pair();
        let fd = ring.attach(ours, FdClass::Socket);
        ring.recv(token(1), fd, RxBuf::new(1));
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            theirs.write_all(b"x").unwrap();
        });
        let completion = loop {
            ring.submit_and_wait(Duration::from_secs(1), Some(PATIENCE)).unwrap();
            if let Some(completion) = ring.next_completion() {
                break completion;
            }
        };
        assert_eq!(completion.result, 1);
        thread.join().unwrap();
        ring.detach(fd);
    });
}

#[test]
fn dropping_a_ring_waits_for_its_operations() {
    for kind in [RingKind::IoUring, RingKind::Threads] {
        // A busy host may delay any of the attempts.
        let is_quick = |_| time_of_a_drop(kind) < Duration::from_secs(4);
        assert!((0..5).any(is_quick), "{kind:?}: the operations are not cancelled");
    }
}

/// Returns how long it takes to drop a ring with an operation that does not end by itself.
fn time_of_a_drop(kind: RingKind) -> Duration {
    let config = RingConfig { kind, arena_bytes: 1 << 20, ..RingConfig::default() };
    let mut ring = Ring::new(&config).unwrap();
    let (ours, _theirs) = pair();
    let fd = ring.attach(ours, FdClass::Socket);
    let file = tempfile::tempfile().unwrap();
    let file_fd = ring.attach(OwnedFd::from(file), FdClass::File);
    let buffer = ring.arena_mut().alloc(4096).unwrap();
    ring.recv_into(token(1), fd, ring.arena().whole(buffer));
    ring.write(token(2), file_fd, 0, ring.zeroes(4096), Durability::Volatile);
    ring.submit_and_wait(Duration::ZERO, Some(Duration::ZERO)).unwrap();
    let start = Instant::now();
    drop(ring);
    start.elapsed()
}

#[test]
fn devices_are_waited_for_and_waits_end() {
    with_both(|ring| {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let fd = ring.attach(read, FdClass::Device);
        for round in 0..3 {
            ring.readable(token(round), fd);
            idle(ring, Duration::from_millis(10));
            rustix::io::write(&write, b"x").unwrap();
            let completion = next(ring);
            assert_eq!(completion.token, token(round));
            assert!(completion.result > 0, "{completion:?}");
            let mut byte = [0];
            rustix::io::read(ring.borrow(fd), &mut byte).unwrap();
        }
        // Data is there already.
        rustix::io::write(&write, b"y").unwrap();
        ring.readable(token(7), fd);
        assert!(next(ring).result > 0);
        rustix::io::read(ring.borrow(fd), &mut [0]).unwrap();
        ring.readable(token(8), fd);
        idle(ring, Duration::from_millis(5));
        ring.shutdown(fd);
        assert_eq!(next(ring).result, -libc::ECANCELED);
        ring.detach(fd);
        // The peer has closed its end.
        assert!(rustix::io::write(&write, b"z").is_err());
    });
}

#[test]
fn events_are_awaited_separately_and_reported() {
    with_both(|ring| {
        // The socket's other owner decides whether reads of it block.
        for flags in [EventfdFlags::NONBLOCK, EventfdFlags::empty()] {
            let theirs = eventfd(0, flags).unwrap();
            let fd = ring.attach(theirs.try_clone().unwrap(), FdClass::Event);
            for round in 0..3 {
                ring.await_event(token(round), fd);
                idle(ring, Duration::from_millis(20));
                // Several writes before the wait count as one.
                for _ in 0..5 {
                    rustix::io::write(&theirs, &1u64.to_ne_bytes()).unwrap();
                }
                let completion = next(ring);
                assert_eq!((completion.token, completion.result), (token(round), 0));
                idle(ring, Duration::from_millis(5));
            }
            ring.signal(token(7), fd);
            ring.signal(token(7), fd);
            assert_eq!((next(ring).result, next(ring).result), (0, 0));
            let mut count = [0; 8];
            rustix::io::read(&theirs, &mut count).unwrap();
            assert_eq!(u64::from_ne_bytes(count), 2);
            ring.await_event(token(8), fd);
            idle(ring, Duration::from_millis(5));
            ring.detach_event(fd);
            let completion = next(ring);
            assert_eq!((completion.token, completion.result), (token(8), -libc::ECANCELED));
        }
    });
}

#[test]
fn an_unread_event_blocks_nothing() {
    with_both(|ring| {
        let theirs = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let fd = ring.attach(theirs.try_clone().unwrap(), FdClass::Event);
        ring.signal(token(1), fd);
        // The operation waits, and blocks no other operation.
        idle(ring, Duration::from_millis(20));
        rustix::io::read(&theirs, &mut [0; 8]).unwrap();
        assert_eq!(next(ring).result, 0);
        rustix::io::write(&theirs, &(u64::MAX - 2).to_ne_bytes()).unwrap();
        ring.signal(token(2), fd);
        idle(ring, Duration::from_millis(20));
        ring.detach_event(fd);
        assert_eq!(next(ring).result, -libc::ECANCELED);
    });
}

/// Operations that end when they are submitted cause no wake-up. Blocked operations cause a wake-up
/// when they end, and do not delay other waits.
#[test]
fn sends_and_signals_that_are_held_up_hold_up_no_wait() {
    with_both(|ring| {
        let (ours, mut theirs) = pair();
        let slow = ring.attach(ours, FdClass::Socket);
        let (ours, mut other) = pair();
        let quick = ring.attach(ours, FdClass::Socket);
        // An eventfd that blocks when it is full, and one that does not.
        let events = [EventfdFlags::empty(), EventfdFlags::NONBLOCK].map(|flags| eventfd(0, flags).unwrap());
        let doors = [0, 1].map(|at: usize| ring.attach(events[at].try_clone().unwrap(), FdClass::Event));
        for event in &events {
            rustix::io::write(event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        }
        let data = pattern(4 << 20, 5);
        let buffer = ring.arena_mut().alloc(data.len()).unwrap();
        ring.arena_mut().bytes_mut(buffer).copy_from_slice(&data);
        let mut gather = Gather::default();
        gather.push_payload(ring.arena().whole(buffer));
        ring.send(token(1), slow, gather);
        doors.iter().for_each(|door| ring.signal(token(2), *door));
        ring.recv(token(3), quick, RxBuf::new(16));
        let writer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            other.write_all(b"hello").unwrap();
            other
        });
        let start = Instant::now();
        assert_eq!(next(ring).token, token(3));
        assert!(start.elapsed() < PATIENCE / 2, "a wait was held up");
        drop(writer.join().unwrap());
        // The peer reads again, and all operations continue without another event here.
        let reader = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            let mut received = vec![0; 4 << 20];
            theirs.read_exact(&mut received).unwrap();
            received
        });
        let sent = next(ring);
        assert_eq!((sent.token, sent.result), (token(1), 4 << 20));
        assert!(reader.join().unwrap() == data);
        for event in &events {
            rustix::io::read(event, &mut [0; 8]).unwrap();
            assert_eq!((next(ring).token, 0), (token(2), 0));
        }
        for door in doors {
            ring.detach_event(door);
        }
        ring.detach(slow);
        ring.detach(quick);
        ring.arena_mut().free(buffer);
    });
}

/// A wait must report the end of a send without sleeping, because the sender may need the memory
/// back first.
#[test]
fn the_end_of_a_send_is_seen_before_a_sleep() {
    with_both(|ring| {
        let (ours, mut theirs) = pair();
        let fd = ring.attach(ours, FdClass::Socket);
        for spin in [Duration::ZERO, Duration::from_micros(50)] {
            let buffer = ring.arena_mut().alloc(4096).unwrap();
            let mut gather = Gather::default();
            gather.push_payload(ring.arena().whole(buffer));
            ring.send(token(1), fd, gather);
            let start = Instant::now();
            let sent = loop {
                if let Some(sent) = ring.next_completion() {
                    break sent;
                }
                ring.submit_and_wait(spin, Some(PATIENCE)).unwrap();
            };
            assert!(start.elapsed() < PATIENCE / 2, "it slept");
            assert_eq!(sent.result, 4096);
            ring.arena_mut().free(buffer);
            theirs.read_exact(&mut [0; 4096]).unwrap();
        }
        ring.detach(fd);
    });
}

/// There are more signals than the queue has space for. A wait without other operations in flight
/// reports the ends of all signals.
#[test]
fn the_ends_of_many_signals_are_seen() {
    with_both(|ring| {
        let theirs = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let fd = ring.attach(theirs.try_clone().unwrap(), FdClass::Event);
        (0..100).for_each(|at| ring.signal(token(at), fd));
        let mut seen: Vec<u32> = (0..100).map(|_| next(ring).token.index()).collect();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..100));
        let mut count = [0; 8];
        rustix::io::read(&theirs, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 100);
        ring.detach_event(fd);
    });
}

/// A gate whose check hangs. It simulates a file whose system calls hang.
#[derive(Debug, Default)]
struct HangingGate {
    asked: AtomicUsize,
    has_ended: Mutex<bool>,
    end: Condvar,
}

impl Gate for HangingGate {
    fn is_open(&self) -> bool {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let ended = self.end.wait_while(self.has_ended.lock().unwrap(), |has_ended| !*has_ended);
        *ended.unwrap()
    }
}

/// A gate that a test opens and closes.
#[derive(Debug)]
struct TestGate(AtomicBool);

impl Gate for TestGate {
    fn is_open(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// The gate is checked just before data is sent, not when the send is started. A send that had to
/// wait for the peer checks the gate again before it continues.
#[test]
fn nothing_is_sent_after_the_gate_has_closed() {
    with_both(|ring| {
        let gate = Arc::new(TestGate(AtomicBool::new(true)));
        let (ours, mut theirs) = pair();
        let fd = ring.attach(ours, FdClass::Socket);
        let buffer = ring.arena_mut().alloc(4 << 20).unwrap();
        let send = |ring: &mut Ring| {
            let mut gather = Gather::default();
            gather.push_payload(ring.arena().whole(buffer));
            ring.send_through(token(1), fd, gather, Some(gate.clone()));
        };
        // A send that waits for the peer several times.
        send(ring);
        let reader = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            theirs.read_exact(&mut vec![0; 4 << 20]).unwrap();
            theirs
        });
        assert_eq!(next(ring).result, 4 << 20);
        let mut theirs = reader.join().unwrap();
        // The gate closes before the system call.
        send(ring);
        gate.0.store(false, Ordering::SeqCst);
        idle(ring, Duration::from_millis(50));
        theirs.set_nonblocking(true).unwrap();
        assert_eq!(theirs.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        theirs.set_nonblocking(false).unwrap();
        // The gate closes again while the send waits for the peer.
        gate.0.store(true, Ordering::SeqCst);
        idle(ring, Duration::from_millis(50));
        gate.0.store(false, Ordering::SeqCst);
        let reader = std::thread::spawn(move || {
            let mut received = 0;
            let mut bytes = vec![0; 64 << 10];
            while let Ok(count @ 1..) = theirs.read(&mut bytes) {
                received += count;
            }
            received
        });
        idle(ring, Duration::from_millis(50));
        ring.shutdown(fd);
        assert_eq!(next(ring).result, -libc::ECANCELED);
        let received = reader.join().unwrap();
        assert!((1..4 << 20).contains(&received), "only the first send was allowed to send: {received}");
        ring.detach(fd);
        ring.arena_mut().free(buffer);
    });
}

#[derive(Debug)]
struct OpenGate;

impl Gate for OpenGate {
    fn is_open(&self) -> bool {
        true
    }
}

/// Attaches a file with a gate, with two descriptors like those of a backing.
fn attach_gated(ring: &mut Ring, gate: &Arc<dyn Gate>) -> [Fd; 2] {
    let number = ring.worker_shares().join(1);
    let file = tempfile::tempfile().unwrap();
    [file.try_clone().unwrap(), file].map(|file| {
        let fd = ring.attach(OwnedFd::from(file), FdClass::File);
        ring.set_gate(fd, number, gate.clone());
        fd
    })
}

#[test]
fn a_file_with_a_gate_that_hangs_delays_no_other_file() {
    for kind in [RingKind::IoUring, RingKind::Threads] {
        files_that_hang_delay_no_other_file(kind);
    }
}

fn files_that_hang_delay_no_other_file(kind: RingKind) {
    let config = RingConfig { kind, entries: 8, arena_bytes: 1 << 20, file_threads_max: 4 };
    let mut ring = Ring::new(&config).expect("this system has io_uring");
    let punch = |ring: &mut Ring, at: u32, file: [Fd; 2]| {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        ring.fallocate(token(at), file[at as usize % 2], mode, 0, 4096);
    };
    let hanging = Arc::new(HangingGate::default());
    let gate: Arc<dyn Gate> = hanging.clone();
    // More files that hang than the number of threads for one file.
    let hung: Vec<_> = (0..5).map(|_| attach_gated(&mut ring, &gate)).collect();
    for file in &hung {
        (0..8).for_each(|at| punch(&mut ring, at, *file));
    }
    let gate: Arc<dyn Gate> = Arc::new(OpenGate);
    let other = attach_gated(&mut ring, &gate);
    for at in 100..104 {
        punch(&mut ring, at, other);
        let completion = next(&mut ring);
        assert_eq!((completion.token, completion.result), (token(at), 0));
    }
    // Flash devices have no gate.
    let flash = ring.attach(OwnedFd::from(tempfile::tempfile().unwrap()), FdClass::File);
    for at in 200..210 {
        ring.write(token(at), flash, u64::from(at) * 4096, ring.zeroes(4096), Durability::Volatile);
    }
    for _ in 200..210 {
        let completion = next(&mut ring);
        assert!(completion.token.index() >= 200 && completion.result == 4096, "{completion:?}");
    }
    ring.detach(flash);
    let asked = hanging.asked.load(Ordering::SeqCst);
    assert!(asked <= 5 * config.blocked_changes_max(), "{asked} changes of five files are in system calls");
    *hanging.has_ended.lock().unwrap() = true;
    hanging.end.notify_all();
    for _ in 0..5 * 8 {
        assert_eq!(next(&mut ring).result, 0);
    }
    for fd in hung.into_iter().chain([other]).flatten() {
        ring.detach(fd);
    }
}
