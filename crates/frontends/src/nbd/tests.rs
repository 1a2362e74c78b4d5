//! Tests a connection directly: bytes in, requests out, replies in, bytes out.

use hob_engine::gather::GatherPart;
use hob_engine::io::{Durability, Op, Promote};
use hob_engine::outcome::Outcome;
use hob_nbd::{CommandFlags, ExportInfo};

use super::*;
use crate::payload::PlainBuffers;

struct Rig {
    connection: Connection,
    memory: PlainBuffers,
}

impl Rig {
    fn new(structured_replies: bool) -> Rig {
        let info = ExportInfo { block_size_min: 512, ..ExportInfo::new(1 << 30) };
        let negotiated = Negotiated {
            export: String::new(),
            info,
            structured_replies,
            base_allocation: structured_replies,
            contexts: vec![],
        };
        Rig {
            connection: Connection::new(negotiated, DiskId(3), 7, Promote::Usual),
            memory: PlainBuffers::default(),
        }
    }

    fn receive(&mut self, bytes: &[u8]) -> usize {
        self.connection.handle_received(bytes, &mut self.memory)
    }

    fn command(&mut self, command: Command, flags: CommandFlags, offset: u64, length: u32) {
        let header = hob_nbd::Request { command, flags, cookie: 42, offset, length };
        assert_eq!(self.receive(&header.encode()), REQUEST_BYTES);
    }

    /// Replies as the shard loop does, and drops the engine's reference to the buffer.
    fn answer(&mut self, request: &Request, result: Result<(), IoError>) {
        let reply = Reply { id: request.id, disk: request.disk, result, outcome: Outcome::Hit };
        self.connection.handle_reply(&reply, &mut self.memory);
        request.buffer.into_iter().for_each(|id| self.memory.release(id));
    }

    /// Returns all bytes to send.
    fn sent(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        while let Some(gather) = self.connection.poll_send() {
            for piece in &gather.pieces {
                match piece {
                    GatherPart::Head { start, end } => {
                        bytes.extend_from_slice(&gather.head[*start as usize..*end as usize]);
                    }
                    GatherPart::Payload(slice) => bytes.extend_from_slice(self.memory.bytes(*slice)),
                }
            }
            self.connection.handle_sent(gather, Ok(()), &mut self.memory);
        }
        bytes
    }
}

const NONE: CommandFlags = CommandFlags::NONE;

#[test]
fn a_read_of_odd_sectors_gets_a_buffer_of_whole_ones() {
    let mut rig = Rig::new(false);
    rig.command(Command::Read, NONE, 4096 + 512, 4096);
    let request = rig.connection.poll_request().expect("a request");
    assert_eq!((request.offset, request.len, request.op), (4608, 4096, Op::Read));
    let id = request.buffer.expect("a buffer");
    assert_eq!(rig.memory.buffers[&id.0].0.len(), 8192);
    rig.memory.bytes_mut(BufferSlice { id, offset: 512, len: 4096 }).fill(7);
    rig.answer(&request, Ok(()));
    let sent = rig.sent();
    assert_eq!(sent.len(), 16 + 4096);
    assert!(sent[16..].iter().all(|byte| *byte == 7));
    assert!(rig.memory.buffers.is_empty(), "both references are gone");
}

#[test]
fn zero_sectors_travel_as_holes_unless_the_client_wants_one_chunk() {
    for (flags, expected) in [(NONE, 28 + 4096 + 32 + 28 + 4096), (CommandFlags::DF, 28 + 5 * 4096)] {
        let mut rig = Rig::new(true);
        rig.command(Command::Read, flags, 0, 5 * 4096);
        let request = rig.connection.poll_request().expect("a request");
        let id = request.buffer.expect("a buffer");
        rig.memory.bytes_mut(BufferSlice { id, offset: 4096, len: 3 * 4096 }).fill(0);
        rig.answer(&request, Ok(()));
        assert_eq!(rig.sent().len(), expected, "{flags:?}");
    }
}

#[test]
fn a_write_arrives_in_pieces_of_any_size() {
    for step in [1, 27, 28, 29, 100, 5000] {
        let mut rig = Rig::new(true);
        let payload: Vec<u8> = (0..4096u32).map(|i| (i % 251) as u8).collect();
        let header = hob_nbd::Request {
            command: Command::Write,
            flags: CommandFlags::FUA,
            cookie: 1,
            offset: 512,
            length: 4096,
        };
        let stream = [&header.encode()[..], &payload].concat();
        let mut pending = Vec::new();
        for piece in stream.chunks(step) {
            pending.extend_from_slice(piece);
            let used = rig.receive(&pending);
            pending.drain(..used);
        }
        let request = rig.connection.poll_request().expect("a request");
        assert_eq!(request.op, Op::Write(Durability::Durable));
        let id = request.buffer.expect("a buffer");
        assert_eq!(rig.memory.bytes(BufferSlice { id, offset: 512, len: 4096 }), payload);
        rig.answer(&request, Ok(()));
        assert_eq!(rig.sent().len(), 16);
        assert!(rig.memory.buffers.is_empty());
    }
}

#[test]
fn payload_can_be_received_in_place() {
    let mut rig = Rig::new(true);
    rig.command(Command::Write, NONE, 0, 8192);
    let Receive::Payload(slice) = rig.connection.poll_receive() else { panic!("payload is next") };
    assert_eq!((slice.offset, slice.len), (0, 8192));
    rig.connection.handle_payload(8192, &mut rig.memory);
    assert_eq!(rig.connection.poll_request().expect("a request").len, 8192);
    assert_eq!(rig.connection.poll_receive(), Receive::Bytes);
}

#[test]
fn much_payload_is_received_in_pieces() {
    let mut rig = Rig::new(true);
    rig.command(Command::Write, NONE, 512, (2 << 20) + 512);
    let mut pieces = Vec::new();
    while let Receive::Payload(slice) = rig.connection.poll_receive() {
        pieces.push((slice.offset, slice.len));
        rig.connection.handle_payload(slice.len as usize, &mut rig.memory);
    }
    assert_eq!(pieces, [(512, 1 << 20), (512 + (1 << 20), 1 << 20), (512 + (2 << 20), 512)]);
    let request = rig.connection.poll_request().expect("a request");
    assert_eq!((request.offset, request.len), (512, (2 << 20) + 512));
    // A client that disconnects between two pieces.
    rig.command(Command::Write, NONE, 0, 2 << 20);
    rig.connection.handle_payload(1 << 20, &mut rig.memory);
    rig.connection.handle_payload(7, &mut rig.memory);
    assert_eq!(rig.connection.fault(), Some("the client disconnected during a write"));
    rig.answer(&request, Ok(()));
    assert!(rig.connection.is_over() && rig.memory.buffers.is_empty());
}

#[test]
fn long_commands_without_payload_go_in_pieces() {
    let mut rig = Rig::new(true);
    rig.command(Command::Trim, NONE, 1 << 20, 100 << 20);
    let mut at = 1 << 20;
    while let Some(request) = rig.connection.poll_request() {
        assert_eq!(request.offset, at);
        at += request.len;
        rig.answer(&request, Ok(()));
    }
    assert_eq!(at, 101 << 20);
    assert_eq!(rig.sent().len(), 16, "one answer for all");
}

#[test]
fn an_error_in_a_piece_ends_the_command() {
    let mut rig = Rig::new(true);
    rig.command(Command::WriteZeroes, NONE, 0, 100 << 20);
    let request = rig.connection.poll_request().expect("a request");
    rig.answer(&request, Err(IoError::NoSpace));
    assert!(rig.connection.poll_request().is_none());
    assert_eq!(rig.sent()[4..8], 28u32.to_be_bytes());
}

#[test]
fn a_refused_write_is_read_past() {
    let mut rig = Rig::new(false);
    let write =
        |offset| hob_nbd::Request { command: Command::Write, flags: NONE, cookie: 9, offset, length: 4096 };
    let stream = [&write(1 << 30).encode()[..], &[1; 4096], &write(0).encode(), &[2; 4096]].concat();
    assert_eq!(rig.receive(&stream), stream.len());
    let request = rig.connection.poll_request().expect("the second one");
    assert_eq!(request.offset, 0);
    assert!(rig.connection.poll_request().is_none());
    assert_eq!(rig.sent()[4..8], 28u32.to_be_bytes(), "ENOSPC for a write past the end");
}

/// Some clients read no reply while they send. libnbd ends the connection if the reply to a write
/// arrives before libnbd has sent the payload.
#[test]
fn a_write_is_refused_behind_its_payload() {
    let mut rig = Rig::new(true);
    let write =
        hob_nbd::Request { command: Command::Write, flags: NONE, cookie: 9, offset: 1 << 40, length: 4096 };
    assert_eq!(rig.receive(&write.encode()), REQUEST_BYTES);
    assert!(rig.connection.poll_send().is_none(), "the payload is missing");
    assert_eq!(rig.receive(&[1; 4095]), 4095);
    assert!(rig.connection.poll_send().is_none(), "its last byte is missing");
    assert_eq!(rig.receive(&[1]), 1);
    assert_eq!(rig.sent()[4..8], 28u32.to_be_bytes());
    assert_eq!(rig.connection.poll_receive(), Receive::Bytes);
}

#[test]
fn without_a_free_buffer_a_request_waits_and_then_continues() {
    let mut rig = Rig::new(true);
    rig.memory.full = true;
    rig.command(Command::Read, NONE, 0, 4096);
    assert_eq!(rig.connection.poll_receive(), Receive::AwaitBuffer);
    assert!(!rig.connection.retry_alloc(&mut rig.memory));
    rig.memory.full = false;
    assert!(rig.connection.retry_alloc(&mut rig.memory));
    assert!(rig.connection.poll_request().is_some());
}

#[test]
fn it_stops_listening_at_its_limit() {
    let mut rig = Rig::new(true);
    for _ in 0..COMMANDS_MAX {
        rig.command(Command::Flush, NONE, 0, 0);
    }
    assert_eq!(rig.connection.poll_receive(), Receive::Pause);
    assert_eq!(rig.receive(&[0; 64]), 0);
    let request = rig.connection.poll_request().expect("a request");
    rig.answer(&request, Ok(()));
    assert_eq!(rig.connection.poll_receive(), Receive::Bytes);
}

/// Promise 5: if a client does not read, the server stops reading from it above this limit, however
/// small its answers are.
#[test]
fn it_stops_listening_while_small_answers_wait() {
    let mut rig = Rig::new(false);
    let refused =
        hob_nbd::Request { command: Command::Trim, flags: NONE, cookie: 1, offset: 1 << 40, length: 1 };
    let flood = refused.encode().repeat(1 << 17);
    let mut bytes = 0;
    for left_unread in [1, 2] {
        let used = rig.receive(&flood);
        assert_eq!(used / REQUEST_BYTES * 16, OUTBOX_HEAD_BYTES_MAX, "answers of 16 bytes, one piece");
        assert_eq!(rig.connection.poll_receive(), Receive::Pause);
        if left_unread == 1 {
            // `poll_send` returned the list once, and the socket has not accepted it yet.
            bytes = rig.connection.poll_send().expect("answers").len();
        }
    }
    assert!(rig.connection.poll_send().is_none());
    assert_eq!(bytes, OUTBOX_HEAD_BYTES_MAX);
}

/// Promise 5: answers about ranges are long, so only a few are requested at a time, and none while
/// unread answers wait.
#[test]
fn few_status_queries_are_asked_at_a_time_and_none_while_answers_wait() {
    let mut rig = Rig::new(true);
    for _ in 0..COMMANDS_MAX {
        rig.command(Command::BlockStatus, NONE, 0, 1 << 20);
    }
    let extents = vec![Extent { length: 512, state: 0 }; 1 << 16];
    let asked: Vec<_> = std::iter::from_fn(|| rig.connection.poll_status()).collect();
    assert_eq!(asked.len(), QUERIES_MAX);
    for query in asked {
        rig.connection.handle_status(query.id, Ok(Status { allocation: &extents, maps: &[] }));
    }
    assert!(rig.connection.outbox.head.len() > OUTBOX_HEAD_BYTES_MAX);
    assert!(rig.connection.poll_status().is_none());
    assert_eq!(rig.connection.poll_receive(), Receive::Pause);
    rig.sent();
    assert_eq!(std::iter::from_fn(|| rig.connection.poll_status()).count(), QUERIES_MAX, "read, it goes on");
    // Queries in progress at the end of the connection are still answered.
    rig.connection.abort("gone", &mut rig.memory);
    assert!(!rig.connection.is_over() && rig.connection.poll_status().is_none());
}

#[test]
fn a_goodbye_waits_for_answers() {
    let mut rig = Rig::new(true);
    rig.command(Command::Read, NONE, 0, 4096);
    rig.command(Command::Disconnect, NONE, 0, 0);
    assert_eq!(rig.connection.poll_receive(), Receive::Nothing);
    assert!(!rig.connection.wants_close());
    let request = rig.connection.poll_request().expect("a request");
    rig.answer(&request, Ok(()));
    assert!(!rig.connection.wants_close());
    assert_eq!(rig.sent().len(), 28 + 4096);
    assert!(rig.connection.is_over() && rig.connection.fault().is_none());
}

#[test]
fn a_dead_client_leaves_no_buffer_behind() {
    let mut rig = Rig::new(true);
    rig.command(Command::Read, NONE, 0, 4096);
    rig.command(Command::Read, NONE, 8192, 4096);
    rig.command(Command::Read, NONE, 4096, 4096);
    let first = rig.connection.poll_request().expect("a request");
    let second = rig.connection.poll_request().expect("a request");
    rig.answer(&first, Ok(()));
    rig.command(Command::Write, NONE, 0, 4096);
    rig.connection.abort("gone", &mut rig.memory);
    assert!(rig.connection.wants_close() && !rig.connection.is_over());
    rig.answer(&second, Ok(()));
    assert!(rig.connection.is_over());
    assert_eq!(rig.connection.fault(), Some("gone"));
    assert!(rig.memory.buffers.is_empty(), "{:?}", rig.memory.buffers.keys());
}

#[test]
fn a_broken_stream_ends_the_connection() {
    let mut rig = Rig::new(true);
    rig.receive(&[0xAB; 28]);
    assert!(rig.connection.is_over());
    assert!(rig.connection.fault().is_some_and(|why| why.contains("magic")));
}

#[test]
fn block_status_asks_the_backing() {
    let mut rig = Rig::new(true);
    rig.command(Command::BlockStatus, CommandFlags::REQ_ONE, 0, 1 << 20);
    let query = rig.connection.poll_status().expect("a question");
    assert_eq!((query.offset, query.len), (0, 1 << 20));
    let extents = [Extent { length: 4096, state: 0 }, Extent { length: 8192, state: Extent::HOLE }];
    assert!(query.allocation);
    rig.connection.handle_status(query.id, Ok(Status { allocation: &extents, maps: &[] }));
    assert_eq!(rig.sent().len(), 20 + 4 + 8, "one extent was asked for");
}

/// A connection quiesces between two commands, and another object continues without losing a byte.
#[test]
fn a_quiesced_connection_begins_nothing_and_its_successor_loses_nothing() {
    let mut rig = Rig::new(false);
    let header = |cookie, command, length| {
        hob_nbd::Request { command, flags: NONE, cookie, offset: 0, length }.encode()
    };
    rig.connection.set_resting(true);
    assert!(rig.connection.is_at_rest());
    rig.connection.set_resting(false);
    // Half of a write's payload, and a read after it.
    let mut stream = header(1, Command::Write, 512).to_vec();
    stream.extend([9; 512]);
    stream.extend(header(2, Command::Read, 512));
    assert_eq!(rig.receive(&stream[..300]), 300);
    rig.connection.set_resting(true);
    assert!(rig.connection.awaits_payload() && !rig.connection.is_at_rest());
    let used = 300 + rig.receive(&stream[300..]);
    assert_eq!(used, REQUEST_BYTES + 512, "the payload is taken and the next command is not");
    assert_eq!(rig.connection.poll_receive(), Receive::Pause);
    assert!(!rig.connection.is_at_rest(), "the write is not answered");
    let write = rig.connection.poll_request().expect("the write");
    rig.answer(&write, Ok(()));
    assert!(!rig.connection.is_at_rest(), "the answer is not sent");
    assert_eq!(rig.sent().len(), 16);
    assert!(rig.connection.is_at_rest() && rig.connection.poll_request().is_none());
    let negotiated = rig.connection.negotiated().clone();
    let mut next = Rig { connection: Connection::new(negotiated, DiskId(3), 8, Promote::Usual), ..rig };
    assert_eq!(next.receive(&stream[used..]), REQUEST_BYTES);
    let read = next.connection.poll_request().expect("the read");
    assert_eq!(read.op, Op::Read);
    next.answer(&read, Ok(()));
    assert_eq!(next.sent().len(), 16 + 512);
    // A refused command: its payload is discarded before the connection quiesces.
    let mut refused = header(3, Command::Write, 512);
    refused[16..24].copy_from_slice(&(1u64 << 40).to_be_bytes());
    assert_eq!(next.receive(&refused), REQUEST_BYTES);
    next.connection.set_resting(true);
    assert!(!next.connection.is_at_rest());
    assert_eq!(next.connection.poll_receive(), Receive::Bytes);
    assert_eq!(next.receive(&[0; 512]), 512);
    assert!(!next.connection.is_at_rest(), "the refusal is to be sent");
    next.sent();
    assert!(next.connection.is_at_rest());
}

/// Each context has its own chunk with any number of extents. The last chunk ends the reply.
#[test]
fn block_status_answers_for_each_context() {
    let dirty = vec![Extent { length: 65536, state: Extent::DIRTY }];
    let clean = vec![Extent { length: 512, state: 0 }, Extent { length: 1024, state: Extent::DIRTY }];
    for allocation in [true, false] {
        let mut rig = Rig::new(true);
        rig.connection.negotiated.base_allocation = allocation;
        rig.connection.negotiated.contexts = ["a", "b"].map(str::to_owned).to_vec();
        rig.command(Command::BlockStatus, NONE, 512, 1 << 20);
        let query = rig.connection.poll_status().expect("a question");
        assert_eq!(query.allocation, allocation);
        assert_eq!(rig.connection.status_range(query.id), (512, 1 << 20));
        let holes = [Extent { length: 4096, state: Extent::HOLE }];
        let status = Status { allocation: &holes, maps: &[dirty.clone(), clean.clone()] };
        rig.connection.handle_status(query.id, Ok(status));
        let sent = rig.sent();
        let chunks = [(1u32, &holes[..]), (2, &dirty), (3, &clean)];
        let mut at = 0;
        for (id, extents) in &chunks[usize::from(!allocation)..] {
            let len = 4 + 8 * extents.len();
            let done = u8::from(*id == 3);
            assert_eq!(sent[at + 4..at + 8], [0, done, 0, 5], "flags and type");
            assert_eq!(sent[at + 16..at + 24], [&(len as u32).to_be_bytes()[..], &id.to_be_bytes()].concat());
            at += 20 + len;
        }
        assert_eq!(at, sent.len());
    }
}

#[test]
fn a_context_that_is_gone_is_an_error() {
    let mut rig = Rig::new(true);
    rig.connection.negotiated.contexts = vec!["a".to_owned()];
    rig.command(Command::BlockStatus, NONE, 0, 1 << 20);
    let query = rig.connection.poll_status().expect("a question");
    rig.connection.handle_status(query.id, Err(IoError::Failed));
    assert_eq!(rig.sent()[4..8], [0, 1, 0x80, 1], "an error chunk, and the last");
}
