//! Tests the client's reply decoder with replies of hob's server, of other servers, and invalid
//! ones.

use std::collections::BTreeMap;

use hob_nbd::client::handshake::Negotiated;
use hob_nbd::client::reply::{Expected, ReplyDecoder, ReplyError, ReplyEvent, ReplyLimits};
use hob_nbd::server::reply::{self, Position};
use hob_nbd::wire::ChunkHeader;
use hob_nbd::{Command, ErrorCode, Extent, TransmissionFlags};

const READ: u64 = 1;
const WRITE: u64 = 2;
const STATUS: u64 = 3;
const CONTEXT: u32 = 42;

fn in_flight(cookie: u64) -> Option<Expected> {
    let command = match cookie {
        READ => Command::Read,
        WRITE => Command::Write,
        STATUS => Command::BlockStatus,
        _ => return None,
    };
    Some(Expected { command, offset: 1000, length: 100 })
}

fn decoder(structured_replies: bool) -> ReplyDecoder {
    let negotiated = Negotiated {
        size_bytes: 1 << 20,
        flags: TransmissionFlags(1),
        block_size_min: 1,
        block_size_preferred: 4096,
        block_size_max: 1 << 20,
        structured_replies,
        meta_context_id: Some(CONTEXT),
    };
    ReplyDecoder::new(&negotiated, ReplyLimits { extents_max: 50 })
}

type Told = (Vec<ReplyEvent>, BTreeMap<u64, u8>, Option<ReplyError>);

/// Feeds `bytes` in pieces of `piece`; returns the events, the payload by its offset on the disk,
/// and the result.
fn feed(structured: bool, bytes: &[u8], piece: usize) -> Told {
    let mut decoder = decoder(structured);
    let (mut events, mut disk, mut pos) = (Vec::new(), BTreeMap::new(), 0);
    let mut place = 0;
    while pos < bytes.len() {
        let shown = &bytes[pos..(pos + piece).min(bytes.len())];
        let pending = decoder.payload_pending();
        if pending > 0 {
            let taken = shown.len().min(pending as usize);
            shown[..taken].iter().for_each(|&byte| {
                disk.insert(place, byte);
                place += 1;
            });
            decoder.payload_received(taken as u32);
            pos += taken;
        } else {
            match decoder.handle_input(shown, &in_flight) {
                Ok(used) => pos += used,
                Err(error) => {
                    assert_eq!(decoder.handle_input(shown, &in_flight), Err(error), "errors are for ever");
                    return (events, disk, Some(error));
                }
            }
        }
        while let Some(event) = decoder.poll_event() {
            if let ReplyEvent::Data { offset, .. } = event {
                place = offset;
            }
            events.push(event);
        }
    }
    (events, disk, None)
}

fn feed_all(structured: bool, bytes: &[u8]) -> Told {
    let whole = feed(structured, bytes, usize::MAX >> 1);
    for piece in 1..=40 {
        assert_eq!(feed(structured, bytes, piece), whole, "pieces of {piece}");
    }
    whole
}

type Part<'a> = &'a dyn Fn(&mut Vec<u8>);

fn build(parts: &[Part<'_>]) -> Vec<u8> {
    let mut out = Vec::new();
    parts.iter().for_each(|part| part(&mut out));
    out
}

fn data(offset: u64, length: u32, position: Position) -> Vec<u8> {
    let mut out = reply::data_header(READ, offset, length, position).to_vec();
    out.extend((0..length).map(|i| (offset + u64::from(i)) as u8));
    out
}

fn hole(offset: u64, length: u32, position: Position) -> Vec<u8> {
    build(&[&|o| reply::push_hole(o, READ, offset, length, position)])
}

fn chunk(kind: u16, flags: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    let header = ChunkHeader { flags, kind, cookie, length: payload.len() as u32 };
    [&header.encode()[..], payload].concat()
}

fn done(cookie: u64, error: Option<ErrorCode>) -> ReplyEvent {
    ReplyEvent::Done { cookie, error }
}

#[test]
fn simple_replies() {
    let bytes = build(&[
        &|o| reply::push_simple_ok(o, WRITE),
        &|o| reply::push_simple_ok(o, READ),
        &|o| o.extend(0..100_u8),
        &|o| reply::push_simple_error(o, READ, ErrorCode::Io),
    ]);
    let (events, disk, end) = feed_all(false, &bytes);
    let error = ReplyEvent::Error { cookie: READ, code: ErrorCode::Io, message: String::new(), offset: None };
    let want = vec![
        done(WRITE, None),
        ReplyEvent::Data { cookie: READ, offset: 1000, length: 100 },
        done(READ, None),
        error,
        done(READ, Some(ErrorCode::Io)),
    ];
    assert_eq!((events, end), (want, None));
    assert!(disk.iter().map(|(at, byte)| (*at, *byte)).eq((0..100).map(|i| (1000 + u64::from(i), i))));
}

#[test]
fn structured_reads_in_any_order() {
    use Position::*;
    let all: &[(&str, Vec<Vec<u8>>)] = &[
        ("one chunk", vec![data(1000, 100, Last)]),
        ("one hole", vec![hole(1000, 100, Last)]),
        ("data, then NONE", vec![data(1000, 100, More), build(&[&|o| reply::push_done(o, READ)])]),
        ("in order", vec![data(1000, 40, More), hole(1040, 20, More), data(1060, 40, Last)]),
        ("backwards", vec![data(1060, 40, More), hole(1040, 20, More), data(1000, 40, Last)]),
        (
            "another request in between",
            vec![data(1000, 40, More), build(&[&|o| reply::push_done(o, WRITE)]), data(1040, 60, Last)],
        ),
        ("unknown chunk flags are ignored", {
            let mut odd = data(1000, 100, Last);
            odd[4] = 0xff;
            vec![odd]
        }),
    ];
    for (label, chunks) in all {
        let (events, disk, end) = feed_all(true, &chunks.concat());
        assert_eq!(end, None, "{label}");
        assert_eq!(events.last(), Some(&done(READ, None)), "{label}");
        let covered: u64 = events
            .iter()
            .map(|event| match event {
                ReplyEvent::Data { length, .. } | ReplyEvent::Hole { length, .. } => u64::from(*length),
                _ => 0,
            })
            .sum();
        assert_eq!(covered, 100, "{label}");
        assert!(disk.iter().all(|(at, byte)| *at as u8 == *byte), "{label}");
    }
}

#[test]
fn errors_and_extents() {
    // States of other contexts than base:allocation are numbers, not bits.
    let extents = [Extent { length: 60, state: 0 }, Extent { length: 4000, state: 0x8000_0004 }];
    let bytes = build(&[
        &|o| reply::push_error_offset(o, READ, ErrorCode::Io, "bad\tspot", 1050, Position::More),
        &|o| reply::push_error(o, READ, ErrorCode::NoMem, "", Position::More),
        &|o| reply::push_done(o, READ),
        &|o| reply::push_error(o, WRITE, ErrorCode::NoSpc, "full", Position::Last),
        &|o| o.extend(chunk(0x8abc, 1, WRITE, b"\0\0\x12\x67\0\x02hisome more fields")),
        &|o| reply::push_block_status(o, STATUS, CONTEXT, &extents, Position::Last),
        &|o| reply::push_block_status(o, STATUS, CONTEXT, &extents[..1], Position::More),
        &|o| reply::push_done(o, STATUS),
    ]);
    let error = |cookie, code, message: &str, offset| ReplyEvent::Error {
        cookie,
        code,
        message: message.into(),
        offset,
    };
    let want = vec![
        error(READ, ErrorCode::Io, "bad spot", Some(1050)),
        error(READ, ErrorCode::NoMem, "", None),
        done(READ, Some(ErrorCode::Io)),
        error(WRITE, ErrorCode::NoSpc, "full", None),
        done(WRITE, Some(ErrorCode::NoSpc)),
        error(WRITE, ErrorCode::Inval, "hi", None),
        done(WRITE, Some(ErrorCode::Inval)),
        ReplyEvent::BlockStatus { cookie: STATUS, extents: extents.to_vec() },
        done(STATUS, None),
        ReplyEvent::BlockStatus { cookie: STATUS, extents: extents[..1].to_vec() },
        done(STATUS, None),
    ];
    let (events, _, end) = feed_all(true, &bytes);
    assert_eq!((events, end), (want, None));
}

/// Each of these replies ends the connection.
#[test]
fn hostile_replies() {
    use Position::*;
    let status = |payload: &[u32]| {
        let payload: Vec<u8> = payload.iter().flat_map(|word| word.to_be_bytes()).collect();
        chunk(5, 1, STATUS, &payload)
    };
    let at = |kind, cookie, payload: &[u8]| chunk(kind, 1, cookie, payload);
    let many: Vec<u32> = std::iter::once(CONTEXT).chain([1, 0].repeat(51)).collect();
    let mut endless_error = at(0x8001, WRITE, &[]);
    endless_error[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
    let simple = |cookie| build(&[&|o: &mut Vec<u8>| reply::push_simple_ok(o, cookie)]);
    let cases: Vec<(&str, bool, Vec<u8>, &str)> = vec![
        ("garbage", true, vec![0xff; 16], "not an NBD magic number"),
        ("a request comes back", true, vec![0x25, 0x60, 0x95, 0x13], "not an NBD magic number"),
        ("unknown cookie, simple", true, simple(99), "not in flight"),
        ("unknown cookie, chunk", true, at(0, 99, &[]), "not in flight"),
        ("chunk without agreement", false, at(0, WRITE, &[]), "not negotiated"),
        ("simple READ despite agreement", true, simple(READ), "simple reply although"),
        ("simple BLOCK_STATUS", true, simple(STATUS), "without extents"),
        ("simple after a chunk", true, [data(1000, 1, More), simple(READ)].concat(), "continues as a simple"),
        ("unknown kind", true, at(77, READ, &[]), "a type that was not negotiated"),
        ("NONE with payload", true, at(0, WRITE, &[0]), "wrong length or flag"),
        ("NONE that is not the last", true, chunk(0, 0, WRITE, &[]), "wrong length or flag"),
        ("NONE for a READ", true, at(0, READ, &[]), "before all data was sent"),
        ("NONE for a BLOCK_STATUS", true, at(0, STATUS, &[]), "before all data was sent"),
        ("data without data", true, at(1, READ, &[0; 8]), "wrong length or flag"),
        ("data for a WRITE", true, at(1, WRITE, &[0; 16]), "does not match"),
        ("data before the request", true, data(999, 2, More), "outside the request"),
        ("data after the request", true, data(1100, 1, More), "outside the request"),
        ("data across the end", true, data(1099, 2, More), "outside the request"),
        ("data that wraps", true, hole(u64::MAX, 2, More), "outside the request"),
        (
            "4 GiB of data",
            true,
            reply::data_header(READ, 1000, u32::MAX - 8, Last).to_vec(),
            "outside the request",
        ),
        ("the same byte twice", true, [data(1000, 10, More), data(1009, 1, More)].concat(), "sent twice"),
        ("the whole twice", true, [data(1000, 100, More), data(1000, 100, Last)].concat(), "sent twice"),
        ("done too early", true, data(1000, 99, Last), "before all data was sent"),
        ("hole of nothing", true, at(2, READ, &[0, 0, 0, 0, 0, 0, 3, 0xe8, 0, 0, 0, 0]), "is empty"),
        ("short hole", true, at(2, READ, &[0; 11]), "wrong length or flag"),
        ("long hole", true, at(2, READ, &[0; 13]), "wrong length or flag"),
        ("error that is success", true, at(0x8001, WRITE, &[0; 6]), "means success"),
        ("short error", true, at(0x8001, WRITE, &[0; 5]), "wrong length or flag"),
        ("endless error", true, endless_error, "wrong length or flag"),
        ("message beyond the chunk", true, at(0x8001, WRITE, &[0, 0, 0, 5, 0, 1]), "too short for its type"),
        ("error without its offset", true, at(0x8002, WRITE, &[0, 0, 0, 5, 0, 0]), "too short for its type"),
        ("no extents", true, status(&[CONTEXT]), "wrong length or flag"),
        ("half an extent", true, status(&[CONTEXT, 1]), "wrong length or flag"),
        ("too many extents", true, status(&many), "wrong length or flag"),
        ("empty extent", true, status(&[CONTEXT, 0, 0]), "extent is empty"),
        ("extent after the end", true, status(&[CONTEXT, 100, 0, 1, 0]), "begins after"),
        ("another context", true, status(&[CONTEXT + 1, 1, 0]), "context that was not negotiated"),
        ("extents for a READ", true, at(5, READ, &[0; 12]), "does not match"),
        (
            "extents twice",
            true,
            [chunk(5, 0, STATUS, b"\0\0\0\x2a\0\0\0\x01\0\0\0\0"), status(&[CONTEXT, 1, 0])].concat(),
            "in two chunks",
        ),
    ];
    for (label, structured, bytes, want) in cases {
        let (events, _, end) = feed_all(structured, &bytes);
        let error = end.unwrap_or_else(|| panic!("{label}: accepted as {events:?}"));
        assert!(error.to_string().contains(want), "{label}: {error}");
    }
}

#[test]
fn payload_bypasses_the_decoder() {
    let mut decoder = decoder(false);
    let bytes = build(&[&|o| reply::push_simple_ok(o, READ), &|o| o.extend([7; 100]), &|o| {
        reply::push_simple_ok(o, WRITE)
    }]);
    assert_eq!(decoder.handle_input(&bytes, &in_flight), Ok(16));
    assert_eq!(decoder.handle_input(&bytes[16..], &in_flight), Ok(0), "an event waits");
    assert!(matches!(decoder.poll_event(), Some(ReplyEvent::Data { length: 100, .. })));
    assert_eq!(decoder.poll_event(), None, "Done comes after the payload");
    assert_eq!(decoder.handle_input(&bytes[16..], &in_flight), Ok(0), "payload waits");
    decoder.payload_received(60);
    assert_eq!(decoder.payload_pending(), 40);
    decoder.payload_received(40);
    assert_eq!(decoder.poll_event(), Some(done(READ, None)));
    assert_eq!(decoder.handle_input(&bytes[116..], &in_flight), Ok(16));
    assert_eq!(decoder.poll_event(), Some(done(WRITE, None)));
}

#[test]
#[should_panic(expected = "more payload was taken")]
fn taking_too_much_payload_is_a_bug_of_the_caller() {
    decoder(false).payload_received(1);
}
