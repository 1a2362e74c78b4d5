//! Random input: no panic, however the bytes are cut, and accepted input is valid.

mod common;

use common::option;
use hob_nbd::client::handshake as client;
use hob_nbd::client::reply::{Expected, ReplyDecoder, ReplyEvent, ReplyLimits};
use hob_nbd::server::handshake as server;
use hob_nbd::server::request::{decode_request, validate};
use hob_nbd::uri::Address;
use hob_nbd::{Command, CommandFlags, ExportInfo, NbdUri, Request, TransmissionFlags};
use proptest::prelude::*;

fn negotiated(structured_replies: bool) -> client::Negotiated {
    client::Negotiated {
        size_bytes: 1 << 20,
        flags: TransmissionFlags(1),
        block_size_min: 1,
        block_size_preferred: 4096,
        block_size_max: 1 << 20,
        structured_replies,
        meta_context_id: Some(1),
    }
}

/// Returns chunk headers that are often valid, so that the tests reach all states.
fn chunks() -> impl Strategy<Value = Vec<u8>> {
    let kind = prop_oneof![Just(0_u16), Just(1), Just(2), Just(5), Just(0x8001), Just(0x8002), any::<u16>()];
    let one = (kind, 0..2_u16, 0..4_u64, 0..40_u32, prop::collection::vec(0..8_u8, 0..48)).prop_map(
        |(kind, flags, cookie, length, payload)| {
            let header = hob_nbd::wire::ChunkHeader { kind, flags, cookie, length };
            [&header.encode()[..], &payload].concat()
        },
    );
    prop::collection::vec(one, 1..8).prop_map(|all| all.concat())
}

fn drive_decoder(structured: bool, bytes: &[u8], piece: usize) {
    let table = |cookie| {
        let command = [Command::Read, Command::Write, Command::BlockStatus].get(cookie as usize)?;
        Some(Expected { command: *command, offset: 0, length: 16 })
    };
    let mut decoder = ReplyDecoder::new(&negotiated(structured), ReplyLimits::default());
    let mut pos = 0;
    let mut read_bytes = 0;
    while pos < bytes.len() {
        let shown = &bytes[pos..(pos + piece).min(bytes.len())];
        if decoder.payload_pending() > 0 {
            let taken = shown.len().min(decoder.payload_pending() as usize);
            decoder.payload_received(taken as u32);
            pos += taken;
        } else {
            let Ok(used) = decoder.handle_input(shown, &table) else { return };
            pos += used;
        }
        while let Some(event) = decoder.poll_event() {
            match event {
                ReplyEvent::Data { length, .. } | ReplyEvent::Hole { length, .. } => read_bytes += length,
                ReplyEvent::Done { cookie: 0, error } => {
                    assert!(
                        error.is_some() || read_bytes == 16,
                        "a READ ended with {read_bytes} of 16 bytes"
                    );
                    read_bytes = 0;
                }
                _ => {}
            }
        }
    }
}

proptest! {
    #[test]
    fn server_handshake(bytes in prop::collection::vec(any::<u8>(), 0..200), piece in 1..64_usize) {
        common::serve(&bytes, piece);
    }

    #[test]
    fn server_options(
        all in prop::collection::vec((0..13_u32, prop::collection::vec(0..4_u8, 0..40)), 1..6),
        piece in 1..64_usize,
    ) {
        let options: Vec<u8> = all.iter().flat_map(|(number, payload)| option(*number, payload)).collect();
        let input = [&[0, 0, 0, 3][..], &options].concat();
        prop_assert_eq!(common::serve(&input, piece), common::serve(&input, 1));
    }

    #[test]
    fn server_request(bytes in prop::array::uniform28(any::<u8>()), size in any::<u64>(), min in any::<u32>()) {
        let mut bytes = bytes;
        bytes[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
        bytes[4..7].fill(0);
        let request = decode_request(&bytes).unwrap();
        let info = ExportInfo { block_size_min: min, ..ExportInfo::new(size) };
        let terms = server::Negotiated {
            export: String::new(), info, structured_replies: true, base_allocation: true, contexts: vec![],
        };
        let ranged = !matches!(request.command, Command::Disconnect | Command::Flush);
        if validate(&request, &terms).is_ok() && ranged {
            prop_assert!(request.end().unwrap() <= size && request.length > 0);
        }
    }

    #[test]
    fn accepted_ranges_are_inside(offset in 0..5000_u64, length in 0..5000_u32, size in 0..5000_u64) {
        let terms = server::Negotiated {
            export: String::new(), info: ExportInfo::new(size), structured_replies: false, base_allocation: false, contexts: vec![],
        };
        let request = Request { command: Command::Read, flags: CommandFlags::NONE, cookie: 0, offset, length };
        let inside = length > 0 && offset + u64::from(length) <= size;
        prop_assert_eq!(validate(&request, &terms).is_ok(), inside);
    }

    #[test]
    fn client_handshake(bytes in prop::collection::vec(any::<u8>(), 0..200), list in any::<bool>()) {
        let goal = if list { client::Goal::List } else { client::Goal::Connect("vm".into()) };
        let input = [b"NBDMAGICIHAVEOPT\0\x03", &bytes[..]].concat();
        let mut machine = client::Handshake::new(goal);
        let mut pos = 0;
        loop {
            let used = machine.handle_input(&input[pos..]);
            pos += used;
            if machine.poll_output().is_none() && used == 0 {
                break;
            }
        }
    }

    #[test]
    fn client_reply(bytes in prop::collection::vec(any::<u8>(), 0..200), piece in 1..64_usize) {
        drive_decoder(true, &bytes, piece);
        drive_decoder(false, &bytes, piece);
    }

    #[test]
    fn client_chunks(bytes in chunks(), piece in 1..64_usize) {
        drive_decoder(true, &bytes, piece);
    }

    #[test]
    fn uri_text(text in "(nbd(s|\\+unix)?://)?[a-z0-9:/?&=%@#\\[\\]é.]{0,40}") {
        if let Ok(uri) = text.parse::<NbdUri>() {
            prop_assert_eq!(uri.to_string().parse::<NbdUri>(), Ok(uri));
        }
    }

    #[test]
    fn uri_fields(host in "[a-z0-9.-]{1,20}", port in 1..=u16::MAX, export in "[^\\x00]{0,40}", path in "[^\\x00]{1,20}") {
        let tcp = NbdUri::new(Address::Tcp { host, port }, export.clone());
        prop_assert_eq!(tcp.to_string().parse::<NbdUri>(), Ok(tcp));
        let unix = NbdUri::new(Address::Unix { path: path.into() }, export);
        prop_assert_eq!(unix.to_string().parse::<NbdUri>(), Ok(unix));
    }
}
