//! Tests hob's client with hob's server, with the stream cut into pieces of many sizes. Also tests
//! the client with old, broken or hostile servers, which are scripts of bytes.

mod common;

use common::{Exports, reply};
use hob_nbd::client::handshake::{
    Goal, Handshake, HandshakeError, HandshakeOutcome, ListedExport, Negotiated,
};
use hob_nbd::server::handshake as server;
use hob_nbd::wire::TransmissionFlags;

const ERROR: u32 = 1 << 31;
const NEWSTYLE: &[u8] = b"NBDMAGICIHAVEOPT\x00\x03";

/// Connects both ends by two pipes that deliver at most `piece` bytes at a time.
fn join(goal: Goal, piece: usize) -> (Option<HandshakeOutcome>, Option<server::HandshakeOutcome>) {
    join_client(Handshake::new(goal), piece)
}

fn join_client(
    mut client: Handshake,
    piece: usize,
) -> (Option<HandshakeOutcome>, Option<server::HandshakeOutcome>) {
    let exports = Exports::sample();
    let mut server = server::Handshake::new(server::HandshakeLimits::default());
    let (mut up, mut down) = (Vec::new(), Vec::new());
    let (mut client_outcome, mut server_outcome) = (None, None);
    loop {
        let mut progress = false;
        while let Some(output) = server.poll_output() {
            down.extend(output);
            progress = true;
        }
        while let Some(output) = client.poll_output() {
            up.extend(output);
            progress = true;
        }
        client_outcome = client_outcome.or_else(|| client.poll_outcome());
        server_outcome = server_outcome.or_else(|| server.poll_outcome());
        let used = client.handle_input(&down[..piece.min(down.len())]);
        down.drain(..used);
        progress |= used > 0;
        let used = server.handle_input(&up[..piece.min(up.len())], &exports);
        up.drain(..used);
        progress |= used > 0;
        if !progress {
            // A client that has its list does not wait for the reply to ABORT.
            let goodbye_left = matches!(client_outcome, Some(HandshakeOutcome::Listed(_)));
            assert!(up.is_empty() && (down.is_empty() || goodbye_left), "nothing may be left on the wire");
            return (client_outcome, server_outcome);
        }
    }
}

#[test]
fn client_and_server_agree_whatever_the_pieces() {
    for piece in 1..=300 {
        let (client, server) = join(Goal::Connect("vm".into()), piece);
        let Some(HandshakeOutcome::Connected(client)) = client else { panic!("{client:?}") };
        let Some(server::HandshakeOutcome::Done(server)) = server else { panic!("{server:?}") };
        assert_eq!(client.size_bytes, server.info.size_bytes);
        assert_eq!(client.flags, server.transmission_flags());
        assert_eq!(
            (client.block_size_min, client.block_size_preferred, client.block_size_max),
            (1, 4096, 32 << 20)
        );
        assert!(client.structured_replies && server.structured_replies && server.base_allocation);
        assert_eq!(client.meta_context_id, Some(server::BASE_ALLOCATION_ID));

        let (client, server) = join(Goal::List, piece);
        let entry = |name: &str, description: &str| ListedExport {
            name: name.into(),
            description: description.into(),
        };
        let want = vec![
            entry("", "a guest's disk"),
            entry("vm", "a guest's disk"),
            entry("iso", ""),
            entry("broken", ""),
        ];
        assert_eq!(client, Some(HandshakeOutcome::Listed(want)));
        assert_eq!(server, Some(server::HandshakeOutcome::Aborted));

        let (client, _) = join(Goal::Connect("gone".into()), piece);
        let Some(HandshakeOutcome::Failed(HandshakeError::UnknownExport { name, .. })) = client else {
            panic!("{client:?}")
        };
        assert_eq!(name, "gone");
    }
}

/// The negotiation gives the client the id of the context that it requested, or no id if the server
/// lacks the context.
#[test]
fn another_context_is_requested_in_place_of_base_allocation() {
    for (export, context, id) in [
        ("iso", "qemu:dirty-bitmap:b", Some(server::CONTEXTS_ID)),
        ("iso", "qemu:allocation-depth", None),
        ("vm", "qemu:dirty-bitmap:b", None),
    ] {
        let handshake = Handshake::new(Goal::Connect(export.into())).for_context(context);
        let (client, server) = join_client(handshake, 7);
        let Some(HandshakeOutcome::Connected(client)) = client else { panic!("{client:?}") };
        let Some(server::HandshakeOutcome::Done(server)) = server else { panic!("{server:?}") };
        assert_eq!(client.meta_context_id, id, "{export} {context}");
        assert!(!server.base_allocation);
        assert_eq!(server.contexts, id.map(|_| context.to_owned()).into_iter().collect::<Vec<_>>());
    }
}

/// Returns the client's output and outcome with a server that sends `script` and ends the stream.
fn meet(goal: Goal, script: &[u8], piece: usize) -> (Vec<u8>, Option<HandshakeOutcome>, usize) {
    let mut client = Handshake::new(goal);
    let (mut said, mut pos) = (Vec::new(), 0);
    loop {
        let used = client.handle_input(&script[pos..(pos + piece).min(script.len())]);
        pos += used;
        let output = client.poll_output();
        let quiet = used == 0 && output.is_none();
        said.extend(output.unwrap_or_default());
        let mut outcome = client.poll_outcome();
        if outcome.is_none() && quiet {
            client.handle_end_of_stream();
            outcome = client.poll_outcome();
        }
        if outcome.is_some() {
            return (said, outcome, script.len() - pos);
        }
    }
}

fn meet_all(goal: &Goal, script: &[u8]) -> (Vec<u8>, Option<HandshakeOutcome>, usize) {
    let whole = meet(goal.clone(), script, usize::MAX >> 1);
    for piece in 1..=48 {
        assert_eq!(meet(goal.clone(), script, piece), whole, "pieces of {piece}");
    }
    whole
}

fn export(size: u64, flags: u16) -> Vec<u8> {
    [&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
}

#[test]
fn servers_of_every_age() {
    let bare = Negotiated {
        size_bytes: 1 << 20,
        flags: TransmissionFlags(5),
        block_size_min: 512,
        block_size_preferred: 4096,
        block_size_max: 32 << 20,
        structured_replies: false,
        meta_context_id: None,
    };
    let odd_size = Negotiated { size_bytes: 1000, block_size_min: 1, ..bare };
    let structured = Negotiated { structured_replies: true, ..bare };
    let blocks = Negotiated { block_size_min: 4096, block_size_max: u32::MAX, ..bare };
    let size = [0, 0, 0, 0, 0, 0x10, 0, 0, 0, 5];
    let zeroes = [0; 124];
    let go = |infos: &[Vec<u8>]| {
        let infos: Vec<u8> = infos.iter().flat_map(|info| reply(7, 3, info)).collect();
        [infos, reply(7, 1, &[])].concat()
    };
    let no_structure = reply(8, ERROR | 1, &[]);
    for (label, script, want) in [
        ("newstyle, not fixed", [b"NBDMAGICIHAVEOPT\0\0", &size[..], &zeroes].concat(), bare),
        ("newstyle, not fixed, no zeroes", [b"NBDMAGICIHAVEOPT\0\x02", &size[..]].concat(), bare),
        ("no GO", [NEWSTYLE, &no_structure, &reply(7, ERROR | 1, b"what?"), &size].concat(), bare),
        (
            "no GO, with zeroes",
            [b"NBDMAGICIHAVEOPT\0\x01", &no_structure[..], &reply(7, ERROR | 1, &[]), &size, &zeroes]
                .concat(),
            bare,
        ),
        ("GO only", [NEWSTYLE, &no_structure, &go(&[export(1 << 20, 5)])].concat(), bare),
        ("size not a multiple of 512", [NEWSTYLE, &no_structure, &go(&[export(1000, 5)])].concat(), odd_size),
        (
            "no metadata",
            [NEWSTYLE, &reply(8, 1, &[]), &reply(10, ERROR | 1, &[]), &go(&[export(1 << 20, 5)])].concat(),
            structured,
        ),
        (
            "metadata, none chosen",
            [NEWSTYLE, &reply(8, 1, &[]), &reply(10, 1, &[]), &go(&[export(1 << 20, 5)])].concat(),
            structured,
        ),
        (
            "block sizes and items nobody asked for",
            [
                NEWSTYLE,
                &no_structure,
                &go(&[
                    vec![0, 1, b'x'],
                    vec![0, 3, 0, 0, 0x10, 0, 0, 0, 0x10, 0, 0xff, 0xff, 0xff, 0xff],
                    vec![0x12, 0x34],
                    export(1 << 20, 5),
                ]),
            ]
            .concat(),
            blocks,
        ),
    ] {
        let (_, outcome, left) = meet_all(&Goal::Connect("vm".into()), &[&script[..], b"more"].concat());
        assert_eq!(outcome, Some(HandshakeOutcome::Connected(want)), "{label}");
        assert_eq!(left, 4, "{label}: replies stay with the caller");
    }
}

#[test]
fn the_client_sends_the_expected_bytes() {
    let script = [
        NEWSTYLE,
        &reply(8, 1, &[]),
        &reply(10, 4, b"\0\0\0\x2abase:allocation"),
        &reply(10, 1, &[]),
        &reply(7, ERROR | 1, &[]),
        &[0, 0, 0, 0, 0, 0x10, 0, 0, 0, 5],
    ]
    .concat();
    let (said, outcome, _) = meet_all(&Goal::Connect("vm".into()), &script);
    let want = [
        &[0, 0, 0, 3][..],
        &common::option(8, &[]),
        &common::option(10, &common::meta_payload(b"vm", &[b"base:allocation"])),
        &common::option(7, &common::info_payload(b"vm", &[3])),
        &common::option(1, b"vm"),
    ];
    assert_eq!(said, want.concat());
    let Some(HandshakeOutcome::Connected(negotiated)) = outcome else { panic!("{outcome:?}") };
    assert_eq!(negotiated.meta_context_id, Some(42));
}

#[test]
fn hostile_servers() {
    use HandshakeError::*;
    let past_structure = [NEWSTYLE, &reply(8, ERROR | 1, &[])].concat();
    let after = |more: &[u8]| [&past_structure[..], more].concat();
    let info = |payload: &[u8]| after(&[reply(7, 3, payload), reply(7, 1, &[])].concat());
    let meta = |payload: &[u8]| [NEWSTYLE, &reply(8, 1, &[]), &reply(10, 4, payload)].concat();
    let many: Vec<u8> = (0..65).flat_map(|_| reply(7, 3, &export(512, 1))).collect();
    let mut long = reply(7, 3, &[]);
    long[16..20].copy_from_slice(&65537_u32.to_be_bytes());
    let mut bad_magic = reply(7, 1, &[]);
    bad_magic[0] = 1;
    let refused =
        |code: u32, message: &str| Refused { option: 7, code: ERROR | code, message: message.into() };
    let go_error = |code: u32, message: &[u8]| after(&reply(7, ERROR | code, message));
    let name = || "vm".to_owned();
    for (label, script, want) in [
        ("silence", vec![], Closed),
        ("a greeting and no more", NEWSTYLE.to_vec(), Closed),
        ("SSH", b"SSH-2.0-OpenSSH_9.9 or so\r\n".to_vec(), NotNbd),
        ("half NBD", b"NBDMAGICxxxxxxxxxx".to_vec(), NotNbd),
        ("oldstyle", [b"NBDMAGIC", &0x0000_4202_8186_1253_u64.to_be_bytes()[..]].concat(), Oldstyle),
        ("wrong magic", after(&bad_magic), Protocol("an option reply does not start with its magic number")),
        (
            "answer to another option",
            after(&reply(3, 1, &[])),
            Protocol("it answered an option that was not sent"),
        ),
        ("64 KiB and a byte", after(&long), Protocol("an option reply is longer than 64 KiB")),
        ("endless answers", after(&many), Protocol("it sent more than 64 replies to one option")),
        ("wrong type", after(&reply(7, 2, &[])), Protocol("its reply to an option has the wrong type")),
        ("no size", after(&reply(7, 1, &[])), Protocol("it started the export without sending its size")),
        ("short size", info(&[0, 0, 1]), Protocol("a message is too short for its type")),
        ("no item number", info(&[]), Protocol("a message is too short for its type")),
        ("huge size", info(&export(1 << 63, 1)), Protocol("the export's size does not fit a file offset")),
        ("no flags", info(&export(512, 0)), Protocol("it did not send the export's transmission flags")),
        (
            "block size 3",
            info(&[0, 3, 0, 0, 0, 3, 0, 0, 0x10, 0, 0, 1, 0, 0]),
            Protocol("its block sizes break the protocol's rules"),
        ),
        (
            "block size 0",
            info(&[0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            Protocol("its block sizes break the protocol's rules"),
        ),
        (
            "another context",
            meta(b"\0\0\0\x01base:else"),
            Protocol("it chose a metadata context that was not requested"),
        ),
        ("TLS at once", [NEWSTYLE, &reply(8, ERROR | 5, &[])].concat(), TlsRequired),
        ("TLS for GO", go_error(5, &[]), TlsRequired),
        (
            "unknown export",
            go_error(6, b"no\nsuch"),
            UnknownExport { name: name(), message: "no such".into() },
        ),
        ("policy", go_error(2, b"\xffno"), refused(2, "\u{fffd}no")),
        ("shutdown", go_error(7, &[]), refused(7, "")),
        ("an error from the future", go_error(4711, &[]), refused(4711, "")),
        (
            "EXPORT_NAME refused by closing",
            go_error(1, &[]),
            UnknownExport { name: name(), message: "it closed the connection".into() },
        ),
    ] {
        let (_, outcome, _) = meet_all(&Goal::Connect(name()), &script);
        assert_eq!(outcome, Some(HandshakeOutcome::Failed(want)), "{label}");
    }
}

#[test]
fn lists() {
    let not_fixed = b"NBDMAGICIHAVEOPT\0\0";
    let server = |payload: &[u8]| [NEWSTYLE, &reply(3, 2, payload), &reply(3, 1, &[])].concat();
    let failed = |error| Some(HandshakeOutcome::Failed(error));
    let utf8 = HandshakeError::Protocol("it listed a name that is not UTF-8");
    let short = HandshakeError::Protocol("a message is too short for its type");
    let endless: Vec<u8> = (0..70_000).flat_map(|_| reply(3, 2, &[0; 4])).collect();
    let too_much = HandshakeError::Protocol("its list of exports takes more than 4 MiB");
    let entry = ListedExport { name: "a".into(), description: "b c".into() };
    for (label, script, want) in [
        ("one", server(b"\0\0\0\x01ab\nc"), Some(HandshakeOutcome::Listed(vec![entry]))),
        ("none", [NEWSTYLE, &reply(3, 1, &[])].concat(), Some(HandshakeOutcome::Listed(vec![]))),
        ("not fixed", not_fixed.to_vec(), failed(HandshakeError::CannotList)),
        ("unknown", [NEWSTYLE, &reply(3, ERROR | 1, &[])].concat(), failed(HandshakeError::CannotList)),
        ("bad name", server(b"\0\0\0\x01\xff"), failed(utf8)),
        ("name longer than the reply", server(b"\xff\xff\xff\xffx"), failed(short)),
        ("endless", [NEWSTYLE, &endless].concat(), failed(too_much)),
    ] {
        assert_eq!(meet(Goal::List, &script, 1 << 16).1, want, "{label}");
    }
}

#[test]
fn a_name_that_cannot_be_sent_is_refused_before_connecting() {
    let mut client = Handshake::new(Goal::Connect("x".repeat(4097)));
    assert_eq!(client.poll_outcome(), Some(HandshakeOutcome::Failed(HandshakeError::NameTooLong(4097))));
    assert_eq!(client.handle_input(NEWSTYLE), 0);
}
