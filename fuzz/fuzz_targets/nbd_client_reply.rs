//! Fuzzes an NBD server's replies. The first byte chooses how the stream is split, whether
//! structured replies were negotiated, and whether the stream is raw or has well-formed headers. A
//! successful READ gets each of its bytes exactly once. Events do not depend on the split.
#![no_main]

use hob_nbd::client::handshake::Negotiated;
use hob_nbd::client::reply::{Expected, ReplyDecoder, ReplyError, ReplyEvent, ReplyLimits};
use hob_nbd::wire::ChunkHeader;
use hob_nbd::{Command, TransmissionFlags};
use libfuzzer_sys::fuzz_target;

const OFFSET: u64 = 16;
const LENGTH: u32 = 32;

fn in_flight(cookie: u64) -> Option<Expected> {
    let command = match cookie {
        0 | 1 => Command::Read,
        2 => Command::BlockStatus,
        3 => Command::Write,
        4 => Command::Flush,
        _ => return None,
    };
    Some(Expected { command, offset: OFFSET, length: LENGTH })
}

fn decode(structured_replies: bool, input: &[u8], piece: usize) -> (Vec<ReplyEvent>, Option<ReplyError>) {
    let negotiated = Negotiated {
        size_bytes: 1 << 20,
        flags: TransmissionFlags(1),
        block_size_min: 1,
        block_size_preferred: 4096,
        block_size_max: 1 << 20,
        structured_replies,
        meta_context_id: Some(1),
    };
    let mut decoder = ReplyDecoder::new(&negotiated, ReplyLimits { extents_max: 8 });
    let (mut events, mut pos) = (Vec::new(), 0_usize);
    let mut seen = [[0_u8; LENGTH as usize]; 2];
    while pos < input.len() {
        let shown = &input[pos..pos.saturating_add(piece).min(input.len())];
        let pending = decoder.payload_pending() as usize;
        if pending > 0 {
            let taken = shown.len().min(pending);
            decoder.payload_received(taken as u32);
            pos += taken;
        } else {
            match decoder.handle_input(shown, &in_flight) {
                Ok(used) => pos += used,
                Err(error) => return (events, Some(error)),
            }
        }
        while let Some(event) = decoder.poll_event() {
            match &event {
                ReplyEvent::Data { cookie, offset, length } | ReplyEvent::Hole { cookie, offset, length } => {
                    let start = (offset - OFFSET) as usize;
                    seen[*cookie as usize][start..start + *length as usize].iter_mut().for_each(|n| *n += 1);
                }
                ReplyEvent::BlockStatus { extents, .. } => assert!((1..=8).contains(&extents.len())),
                ReplyEvent::Done { cookie: cookie @ (0 | 1), error } => {
                    let seen = std::mem::replace(&mut seen[*cookie as usize], [0; LENGTH as usize]);
                    assert!(seen.iter().all(|n| *n == 1 || (error.is_some() && *n == 0)));
                }
                _ => {}
            }
            events.push(event);
        }
    }
    (events, None)
}

/// Converts bytes into replies: kind and flags, cookie, payload length, payload.
fn replies(mut bytes: &[u8]) -> Vec<u8> {
    const KINDS: [u16; 8] = [0, 1, 2, 5, 0x8001, 0x8002, 0x8fff, 99];
    let mut out = Vec::new();
    while let [what, cookie, length, rest @ ..] = bytes {
        let (payload, after) = rest.split_at(rest.len().min(usize::from(*length)));
        let cookie = u64::from(cookie % 6);
        if what & 0x80 == 0 {
            let kind = KINDS[usize::from(what % 8)];
            let header =
                ChunkHeader { flags: u16::from(what >> 3 & 1), kind, cookie, length: payload.len() as u32 };
            out.extend(header.encode());
        } else {
            out.extend(0x6744_6698_u32.to_be_bytes());
            out.extend(u32::from(what & 0x7f).to_be_bytes());
            out.extend(cookie.to_be_bytes());
        }
        out.extend(payload);
        bytes = after;
    }
    out
}

fuzz_target!(|data: &[u8]| {
    let [mode, rest @ ..] = data else { return };
    let input = if mode & 1 == 0 { rest.to_vec() } else { replies(rest) };
    let structured = mode & 2 == 0;
    let piece = 1 + usize::from(mode >> 2);
    assert_eq!(decode(structured, &input, piece), decode(structured, &input, usize::MAX));
});
