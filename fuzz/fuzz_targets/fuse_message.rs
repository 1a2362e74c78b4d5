//! Fuzzes messages of an untrusted kernel to a FUSE file. The fuzzer also chooses the file's size
//! and rights. Every engine request is inside the disk and has a buffer. Each message has at most
//! one answer, and no buffer leaks.
#![no_main]

use hob_engine::REQUEST_BYTES_MAX;
use hob_engine::io::Reply;
use hob_engine::outcome::Outcome;
use hob_engine::units::DiskId;
use hob_frontends::fuse::{Attributes, Session};
use hob_frontends::{Payload, PlainBuffers};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u32, bool, Vec<(u8, Vec<u8>)>)| {
    let (sectors, read_only, messages) = input;
    let size = u64::from(sectors) * 512;
    let file = Attributes { size, mode: 0o600, uid: 0, gid: 0, time_ns: 0 };
    let mut session = Session::new(DiskId(1), 1, file, read_only);
    let mut memory = PlainBuffers::default();
    for (number, (opcode, mut message)) in messages.into_iter().enumerate() {
        // Sometimes no buffer is free.
        memory.full = number % 8 == 7;
        if message.len() >= 40 && opcode < 128 {
            // Sets the right length, an existing operation, and the file's inode number.
            let len = message.len() as u32;
            message[..4].copy_from_slice(&len.to_ne_bytes());
            message[4..8].copy_from_slice(&u32::from(opcode % 64).to_ne_bytes());
            message[16..24].copy_from_slice(&1u64.to_ne_bytes());
        }
        session.handle_message(&message, &mut memory);
        while let Some(request) = session.poll_request() {
            assert!(request.len <= REQUEST_BYTES_MAX && request.offset + request.len <= size);
            assert_eq!(request.buffer.is_some(), request.op.has_buffer());
            assert!(!(read_only && request.op.modifies()));
            let reply = Reply { id: request.id, disk: request.disk, result: Ok(()), outcome: Outcome::Hit };
            session.handle_reply(&reply, &mut memory);
            request.buffer.into_iter().for_each(|id| memory.release(id));
        }
        let answer = session.poll_answer();
        assert!(session.poll_answer().is_none());
        if let Some((answer, payload)) = answer {
            let len = answer.bytes().len() + payload.map_or(0, |slice| memory.bytes(slice).len());
            assert_eq!(answer.bytes()[..4], (len as u32).to_ne_bytes());
            session.handle_written(payload, &mut memory);
        }
        assert_eq!((session.in_flight(), session.held_bytes()), (0, 0));
        assert!(memory.buffers.is_empty());
    }
});
