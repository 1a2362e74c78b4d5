//! Tests a session directly: messages in, requests out, replies in, answers out.

use hob_engine::outcome::Outcome;

use super::*;
use crate::payload::PlainBuffers;

const SIZE: u64 = (1 << 30) - 512;

struct Rig {
    session: Session,
    memory: PlainBuffers,
}

impl Rig {
    fn new(read_only: bool) -> Rig {
        let file = Attributes { size: SIZE, mode: 0o600, uid: 1, gid: 2, time_ns: 1_700_000_000_000_000_000 };
        Rig { session: Session::new(DiskId(3), 5, file, read_only), memory: PlainBuffers::default() }
    }

    fn send(&mut self, message: &[u8]) -> Taken {
        self.session.handle_message(message, &mut self.memory)
    }

    /// Returns the immediate answer: the error, and the bytes after the header.
    #[track_caller]
    fn asked(&mut self, message: &[u8]) -> (i32, Vec<u8>) {
        assert_eq!(self.send(message), Taken::Done);
        self.answered()
    }

    #[track_caller]
    fn answered(&mut self) -> (i32, Vec<u8>) {
        let (answer, payload) = self.session.poll_answer().expect("an answer");
        let mut bytes = answer.bytes().to_vec();
        if let Some(slice) = payload {
            bytes.extend_from_slice(self.memory.bytes(slice));
        }
        self.session.handle_written(payload, &mut self.memory);
        assert_eq!(bytes[..4], (bytes.len() as u32).to_ne_bytes(), "the length is that of everything");
        assert_eq!(bytes[8..16], UNIQUE.to_ne_bytes());
        (i32::from_ne_bytes(bytes[4..8].try_into().unwrap()), bytes[16..].to_vec())
    }

    /// Replies as the shard loop does, and drops the engine's reference to the buffer.
    fn reply(&mut self, request: &Request, result: Result<(), IoError>) {
        let reply = Reply { id: request.id, disk: request.disk, result, outcome: Outcome::Hit };
        self.session.handle_reply(&reply, &mut self.memory);
        request.buffer.into_iter().for_each(|id| self.memory.release(id));
    }

    #[track_caller]
    fn is_idle(&mut self) {
        assert_eq!((self.session.in_flight(), self.session.held_bytes()), (0, 0));
        assert!(self.memory.buffers.is_empty(), "every buffer came back");
        assert!(self.session.poll_request().is_none() && self.session.poll_answer().is_none());
    }
}

const UNIQUE: u64 = 0x1234_5678_9ABC_DEF0;

fn message_to(node: u64, opcode: u32, arguments: &[u8]) -> Vec<u8> {
    let mut message = vec![0; 40];
    message[..4].copy_from_slice(&(40 + arguments.len() as u32).to_ne_bytes());
    message[4..8].copy_from_slice(&opcode.to_ne_bytes());
    message[8..16].copy_from_slice(&UNIQUE.to_ne_bytes());
    message[16..24].copy_from_slice(&node.to_ne_bytes());
    message.extend_from_slice(arguments);
    message
}

fn message(opcode: u32, arguments: &[u8]) -> Vec<u8> {
    message_to(1, opcode, arguments)
}

fn transfer(opcode: u32, offset: u64, len: u32, open_flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut arguments = vec![0; 40];
    arguments[8..16].copy_from_slice(&offset.to_ne_bytes());
    arguments[16..20].copy_from_slice(&len.to_ne_bytes());
    arguments[32..36].copy_from_slice(&open_flags.to_ne_bytes());
    arguments.extend_from_slice(payload);
    message(opcode, &arguments)
}

fn read(offset: u64, len: u32) -> Vec<u8> {
    transfer(15, offset, len, 0, &[])
}

fn write(offset: u64, payload: &[u8], open_flags: u32) -> Vec<u8> {
    transfer(16, offset, payload.len() as u32, open_flags, payload)
}

fn fallocate(mode: u32, offset: u64, len: u64) -> Vec<u8> {
    let mut arguments = vec![0; 32];
    arguments[8..16].copy_from_slice(&offset.to_ne_bytes());
    arguments[16..24].copy_from_slice(&len.to_ne_bytes());
    arguments[24..28].copy_from_slice(&mode.to_ne_bytes());
    message(43, &arguments)
}

fn set_attributes(valid: u32, size: u64, mode: u32, uid: u32, gid: u32) -> Vec<u8> {
    let mut arguments = vec![0; 88];
    arguments[..4].copy_from_slice(&valid.to_ne_bytes());
    arguments[16..24].copy_from_slice(&size.to_ne_bytes());
    for (at, value) in [(68, mode), (76, uid), (80, gid)] {
        arguments[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }
    message(4, &arguments)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}

#[test]
fn version_and_features_are_agreed_on() {
    let mut rig = Rig::new(false);
    let mut arguments = vec![0; 64];
    for (at, value) in [(0, 7), (4, 45), (8, 131_072), (12, u32::MAX), (16, u32::MAX)] {
        arguments[at..at + 4].copy_from_slice(&u32::to_ne_bytes(value));
    }
    let (error, out) = rig.asked(&message_to(0, 26, &arguments));
    assert_eq!((error, out.len()), (0, 64));
    assert_eq!((u32_at(&out, 0), u32_at(&out, 4)), (7, 38));
    assert_eq!(u32_at(&out, 20), 1 << 20, "the longest write");
    assert_eq!(u32_at(&out, 24), 1, "times in nanoseconds");
    let (low, high) = (u32_at(&out, 12), u32_at(&out, 32));
    assert_eq!(low & 1 << 16, 0, "nothing is written back later");
    assert_eq!((low & 1 << 15, high & 1 << 4), (1 << 15, 1 << 4), "asynchronous direct I/O, and mappings");
    // A truncated INIT message, an old kernel, and versions that are not supported.
    let (error, out) = rig.asked(&message_to(0, 26, &arguments[..16]));
    assert_eq!(error, -22, "it promises more than it sends: {out:?}");
    arguments[12..16].copy_from_slice(&1u32.to_ne_bytes());
    let (error, out) = rig.asked(&message_to(0, 26, &arguments[..16]));
    assert_eq!((error, u32_at(&out, 12), u32_at(&out, 32)), (0, 1, 0));
    for version in [[6u32, 45], [8, 0], [7, 22]] {
        arguments[..4].copy_from_slice(&version[0].to_ne_bytes());
        arguments[4..8].copy_from_slice(&version[1].to_ne_bytes());
        assert_eq!(rig.asked(&message_to(0, 26, &arguments)).0, -71);
    }
    rig.is_idle();
}

#[test]
fn reads_are_cut_at_the_end() {
    let mut rig = Rig::new(true);
    for (offset, len, expected) in [(8192, 4096, 4096), (1000, 9000, 9000), (SIZE - 100, 4096, 100)] {
        assert_eq!(rig.send(&read(offset, len)), Taken::Done);
        let request = rig.session.poll_request().unwrap();
        assert_eq!((request.op, request.offset, request.len), (Op::Read, offset, expected));
        assert_eq!(Session::number_of(request.id), Some(5));
        let command = rig.session.command_begun_by(&request).unwrap();
        assert_eq!(command, Command { op: Op::Read, offset, len: expected });
        let id = request.buffer.unwrap();
        let slice = BufferSlice { id, offset: (offset % 4096) as u32, len: expected as u32 };
        rig.memory.bytes_mut(slice).fill(9);
        rig.reply(&request, Ok(()));
        assert!(!rig.session.is_at_rest(), "the answer is not written");
        assert!(rig.session.held_bytes() > 0, "its buffer is needed until the answer is written");
        assert_eq!(rig.answered(), (0, vec![9; expected as usize]));
        rig.is_idle();
        assert!(rig.session.is_at_rest());
    }
    for offset in [SIZE, SIZE + 1, u64::MAX] {
        assert_eq!(rig.asked(&read(offset, 4096)), (0, Vec::new()));
    }
    assert_eq!(rig.asked(&read(0, 0)), (0, Vec::new()));
    rig.is_idle();
}

/// Reads through a file for backups do not stay in the cache. Writes are treated like any others.
#[test]
fn a_file_for_backups_promotes_nothing() {
    for promote in [Promote::Usual, Promote::Never] {
        let mut rig = Rig::new(false);
        rig.session = rig.session.promoting(promote);
        for message in [read(0, 4096), write(0, &[1; 512], 0)] {
            rig.send(&message);
            let request = rig.session.poll_request().unwrap();
            assert_eq!(request.promote, promote);
            assert_eq!(request.passes_by(), request.op == Op::Read && promote == Promote::Never);
            rig.reply(&request, Ok(()));
            assert_eq!(rig.answered().0, 0);
        }
        rig.is_idle();
    }
}

#[test]
fn writes_reach_the_engine_with_their_bytes() {
    let mut rig = Rig::new(false);
    for (offset, len, flags, durability, taken) in [
        (4096, 4096, 0, Durability::Volatile, 4096),
        (5000, 10_000, 0o10000, Durability::Durable, 10_000),
        (SIZE - 10, 4096, 0o4010000, Durability::Durable, 10),
    ] {
        let payload: Vec<u8> = (0..len).map(|n| n as u8).collect();
        rig.send(&write(offset, &payload, flags));
        let request = rig.session.poll_request().unwrap();
        assert_eq!((request.op, request.offset, request.len), (Op::Write(durability), offset, taken));
        let id = request.buffer.unwrap();
        let slice = BufferSlice { id, offset: (offset % 4096) as u32, len: taken as u32 };
        assert_eq!(rig.memory.bytes(slice), &payload[..taken as usize]);
        rig.reply(&request, Ok(()));
        let (error, out) = rig.answered();
        assert_eq!((error, u32_at(&out, 0), out.len()), (0, taken as u32, 8));
        rig.is_idle();
    }
    assert_eq!(rig.asked(&write(SIZE, b"x", 0)).0, -28);
    assert_eq!(rig.asked(&write(u64::MAX, b"x", 0)).0, -28);
    assert_eq!(rig.asked(&write(SIZE, b"", 0)).0, 0);
    let mut read_only = Rig::new(true);
    assert_eq!(read_only.asked(&write(0, b"x", 0)).0, -30);
    assert_eq!(read_only.asked(&fallocate(0x10, 0, 1)).0, -30);
    rig.is_idle();
}

#[test]
fn a_long_range_is_zeroed_piece_by_piece() {
    let mut rig = Rig::new(false);
    for (mode, zeroing) in [(0x3, Zeroing::MayUnmap), (0x11, Zeroing::KeepAllocated)] {
        rig.send(&fallocate(mode, 512, SIZE));
        let mut at = 512;
        while at < SIZE {
            let request = rig.session.poll_request().unwrap();
            assert_eq!(request.op, Op::WriteZeroes(Durability::Volatile, zeroing));
            assert_eq!((request.offset, request.buffer), (at, None));
            assert!(request.len <= REQUEST_BYTES_MAX);
            let recorded = rig.session.command_begun_by(&request);
            assert_eq!(recorded.map(|command| command.len), (at == 512).then_some(SIZE - 512));
            at += request.len;
            rig.reply(&request, Ok(()));
        }
        assert_eq!(at, SIZE);
        assert_eq!(rig.answered(), (0, Vec::new()));
    }
    // Beyond the end, zeroing does nothing and allocation fails.
    assert_eq!(rig.asked(&fallocate(0x3, SIZE, 4096)).0, 0);
    assert_eq!(rig.asked(&fallocate(0x10, SIZE - 1, 2)).0, -28);
    for mode in [0, 1, 2, 8, 0x20, 0x13, u32::MAX] {
        assert_eq!(rig.asked(&fallocate(mode, 0, 4096)).0, -95, "{mode:x}");
    }
    assert_eq!(rig.asked(&fallocate(0x3, u64::MAX, 2)).0, -22);
    assert_eq!(rig.asked(&fallocate(0x3, 0, 0)).0, -22);
    rig.is_idle();
}

#[test]
fn the_file_has_one_size_and_changing_owners() {
    let mut rig = Rig::new(false);
    let (error, out) = rig.asked(&message(3, &[0; 16]));
    assert_eq!((error, out.len()), (0, 104));
    assert_eq!((u64_at(&out, 24), u32_at(&out, 76)), (SIZE, 0o100_600));
    for size in [0, SIZE - 1, SIZE + 1, u64::MAX] {
        assert_eq!(rig.asked(&set_attributes(1 << 3, size, 0, 0, 0)).0, -1);
    }
    assert_eq!(rig.asked(&set_attributes(1 << 3, SIZE, 0, 0, 0)).0, 0);
    let (_, out) = rig.asked(&set_attributes(0b111, 0, 0o100_640, 107, 108));
    assert_eq!((u32_at(&out, 76), u32_at(&out, 84), u32_at(&out, 88)), (0o100_640, 107, 108));
    assert_eq!(u64_at(&rig.asked(&message(17, &[])).1, 0), SIZE.div_ceil(4096));
    let (_, out) = rig.asked(&message(14, &[0; 8]));
    assert_eq!(u32_at(&out, 8) & 1, 1, "direct I/O");
    assert_eq!(rig.asked(&message(18, &[0; 24])), (0, Vec::new()));
    rig.is_idle();
}

/// Backup programs skip a file whose times are those of the last backup.
#[test]
fn a_change_of_the_disk_changes_the_times() {
    let mut rig = Rig::new(false);
    let asks = message(3, &[0; 16]);
    assert!(Session::asks_for_times(&asks) && Session::asks_for_times(&set_attributes(1, 0, 0, 0, 0)));
    assert!(!Session::asks_for_times(&read(0, 512)) && !Session::asks_for_times(&asks[..7]));
    let mut times = |changes, now_ns| {
        rig.session.note_changes(changes, now_ns);
        let (_, out) = rig.asked(&asks);
        let [one, second, third] = [0, 1, 2].map(|number| {
            let (seconds, ns) = (u64_at(&out, 40 + 8 * number), u32_at(&out, 64 + 4 * number));
            seconds * 1_000_000_000 + u64::from(ns)
        });
        assert_eq!((second, third), (one, one));
        one
    };
    let first = 1_700_000_100_123_456_789;
    assert_eq!(times(0, first), first);
    assert_eq!(times(0, first + 50), first, "nothing has changed");
    assert_eq!(times(1, first + 60), first + 60);
    assert_eq!(times(2, first + 60), first + 61, "two changes at one time of the clock");
    assert_eq!(times(3, 5), first + 62, "the clock was set back");
    // Times do not drift into the future.
    for change in 0..1_000 {
        assert_eq!(times(4 + change, first + 100 + change), first + 100 + change);
    }
}

/// When the disk grows, the kernel is notified to read the attributes again. Later requests are cut
/// at the new end.
#[test]
fn the_file_grows_with_its_disk() {
    let mut rig = Rig::new(false);
    let before = rig.session.file().size;
    rig.session.grow(before + 8192);
    let (notice, payload) = rig.session.poll_answer().expect("for the kernel");
    let bytes = notice.bytes();
    assert!(payload.is_none());
    assert_eq!(
        (u32_at(bytes, 0), u32_at(bytes, 4), u64_at(bytes, 8)),
        (40, 2, 0),
        "a notice, FUSE_NOTIFY_INVAL_INODE"
    );
    assert_eq!(
        (u64_at(bytes, 16), u64_at(bytes, 24), u64_at(bytes, 32)),
        (1, u64::MAX, 0),
        "attributes only"
    );
    let (error, found) = rig.asked(&message(3, &[0; 16]));
    assert_eq!((error, u64_at(&found, 24)), (0, before + 8192));
    rig.send(&write(before, &[7; 4096], 0));
    let request = rig.session.poll_request().expect("it fits now");
    assert_eq!((request.offset, request.len), (before, 4096));
    rig.reply(&request, Ok(()));
    assert_eq!(rig.answered().0, 0);
    rig.is_idle();
}

#[test]
fn flushes_and_errors_are_passed_on() {
    let mut rig = Rig::new(false);
    for (result, error) in [
        (Ok(()), 0),
        (Err(IoError::Failed), -5),
        (Err(IoError::NoSpace), -28),
        (Err(IoError::ReadOnly), -30),
        (Err(IoError::Unsupported), -95),
    ] {
        for message in [message(20, &[0; 16]), read(0, 4096), write(0, &[1; 512], 0)] {
            rig.send(&message);
            let request = rig.session.poll_request().unwrap();
            rig.reply(&request, result);
            assert_eq!(rig.answered().0, error);
        }
    }
    rig.is_idle();
}

#[test]
fn unknown_or_unexpected_requests_are_harmless() {
    let mut rig = Rig::new(false);
    // FORGET and BATCH_FORGET have no answer.
    for opcode in [2, 42] {
        assert_eq!(rig.send(&message(opcode, &[0; 16])), Taken::Done);
    }
    assert!(rig.session.poll_answer().is_none());
    // LOOKUP, POLL, IOCTL, LSEEK, INTERRUPT, and unknown opcodes.
    for opcode in [1, 36, 39, 40, 46, 0, 9999, u32::MAX] {
        assert_eq!(rig.asked(&message(opcode, &[0; 48])).0, -38, "{opcode}");
    }
    assert_eq!(rig.asked(&message_to(2, 15, &read(0, 512)[40..])).0, -22, "there is no second file");
    rig.is_idle();
}

/// Promise 5: any input gets at most one answer, and no buffer leaks.
#[test]
fn hostile_messages_get_an_errno() {
    let whole = [
        read(0, 4096),
        write(0, &[1; 600], 0),
        fallocate(3, 0, 4096),
        set_attributes(0xF, SIZE, 0, 0, 0),
        message(20, &[0; 16]),
        message_to(0, 26, &[0xFF; 64]),
    ];
    let mut rig = Rig::new(false);
    let mut dice = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = || {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        dice
    };
    // Headers that are cut off, or announce a different length than the message has, get no answer.
    for len in 0..40 {
        assert_eq!(rig.send(&whole[0][..len]), Taken::Done);
    }
    assert_eq!(rig.send(&whole[1][..100]), Taken::Done);
    assert!(rig.session.poll_answer().is_none() && rig.session.poll_request().is_none());
    // Missing arguments.
    for message in &whole[..5] {
        for len in 40..message.len().min(120) {
            let mut cut = message[..len].to_vec();
            cut[..4].copy_from_slice(&(len as u32).to_ne_bytes());
            rig.send(&cut);
            settle(&mut rig);
        }
    }
    // A transfer that is too long, and one whose payload has a different length than announced.
    assert_eq!(rig.asked(&read(0, TRANSFER_BYTES_MAX + 1)).0, -22);
    assert_eq!(rig.asked(&read(0, u32::MAX)).0, -22);
    assert_eq!(rig.asked(&transfer(16, 0, 700, 0, &[0; 600])).0, -22);
    assert_eq!(rig.asked(&transfer(16, 0, 500, 0, &[0; 600])).0, -22);
    // Random changes of bytes.
    for _ in 0..20_000 {
        let mut message = whole[next() as usize % whole.len()].clone();
        for _ in 0..1 + next() % 4 {
            let at = 16 + next() as usize % (message.len() - 16);
            message[at] = next() as u8;
        }
        if next() % 4 == 0 {
            let opcode = next() as u32 % 60;
            message[4..8].copy_from_slice(&opcode.to_ne_bytes());
        }
        rig.send(&message);
        settle(&mut rig);
    }
    rig.is_idle();
}

/// Replies to all engine requests, and takes at most one answer.
#[track_caller]
fn settle(rig: &mut Rig) {
    while let Some(request) = rig.session.poll_request() {
        assert!(request.len <= REQUEST_BYTES_MAX && request.offset + request.len <= SIZE);
        assert_eq!(request.buffer.is_some(), request.op.has_buffer());
        rig.reply(&request, Ok(()));
    }
    if rig.session.in_flight() == 0 && rig.session.answers.is_empty() {
        return;
    }
    assert_eq!(rig.session.answers.len(), 1);
    let (_, payload) = rig.session.poll_answer().unwrap();
    rig.session.handle_written(payload, &mut rig.memory);
}

#[test]
fn without_a_buffer_the_message_comes_again() {
    let mut rig = Rig::new(false);
    rig.memory.full = true;
    for message in [read(0, 4096), write(0, &[3; 4096], 0)] {
        assert_eq!(rig.send(&message), Taken::NoBuffer);
        rig.is_idle();
    }
    rig.memory.full = false;
    assert_eq!(rig.send(&read(0, 4096)), Taken::Done);
    assert!(rig.session.is_full(), "the engine is to have the request first");
    let request = rig.session.poll_request().unwrap();
    rig.session.unpoll_request(request);
    assert_eq!(rig.session.poll_request(), Some(request));
    rig.reply(&request, Ok(()));
    rig.answered();
    rig.is_idle();
}

#[test]
fn the_end_gives_every_buffer_back() {
    let mut rig = Rig::new(false);
    let mut with_engine = Vec::new();
    for n in 0..6 {
        rig.send(&if n % 2 == 0 { read(n * 4096, 4096) } else { write(n * 4096, &[1; 4096], 0) });
        if n < 4 {
            with_engine.push(rig.session.poll_request().unwrap());
        }
    }
    let answered = with_engine.remove(0);
    rig.reply(&answered, Ok(()));
    rig.session.end(&mut rig.memory);
    assert!(rig.session.is_dead() && rig.session.is_full());
    assert_eq!(rig.session.in_flight(), 3, "the engine still has these");
    for request in with_engine {
        rig.reply(&request, Err(IoError::ShuttingDown));
    }
    rig.is_idle();
}
