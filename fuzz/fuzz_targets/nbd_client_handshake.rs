//! Fuzzes a server's NBD negotiation, for both goals of a client. The first byte chooses how the
//! stream is split, the client's goal, and whether the stream is raw or consists of well-formed
//! replies.
#![no_main]

use hob_nbd::client::handshake::{Goal, Handshake, HandshakeOutcome};
use libfuzzer_sys::fuzz_target;

fn meet(goal: Goal, input: &[u8], piece: usize) -> (Vec<u8>, Option<HandshakeOutcome>, usize) {
    let mut client = Handshake::new(goal);
    let (mut said, mut pos) = (Vec::new(), 0_usize);
    loop {
        let end = pos.saturating_add(piece).min(input.len());
        let used = client.handle_input(&input[pos..end]);
        pos += used;
        let output = client.poll_output();
        if used == 0 && output.is_none() {
            client.handle_end_of_stream();
        }
        said.extend(output.unwrap_or_default());
        if let Some(outcome) = client.poll_outcome() {
            if let HandshakeOutcome::Connected(agreed) = outcome {
                assert!(agreed.size_bytes <= i64::MAX as u64);
                assert!(
                    agreed.block_size_min.is_power_of_two() && agreed.block_size_max >= agreed.block_size_min
                );
            }
            return (said, Some(outcome), input.len() - pos);
        }
    }
}

/// Converts bytes into a greeting and replies: option, kind, payload length, payload.
fn replies(mut bytes: &[u8]) -> Vec<u8> {
    let mut out = b"NBDMAGICIHAVEOPT\x00\x03".to_vec();
    while let [option, kind, length, rest @ ..] = bytes {
        let (payload, after) = rest.split_at(rest.len().min(usize::from(*length)));
        out.extend(0x0003_e889_0455_65a9_u64.to_be_bytes());
        out.extend(u32::from(*option).to_be_bytes());
        out.extend((u32::from(kind & 0x80) << 24 | u32::from(kind & 0x7f)).to_be_bytes());
        out.extend((payload.len() as u32).to_be_bytes());
        out.extend(payload);
        bytes = after;
    }
    out
}

fuzz_target!(|data: &[u8]| {
    let [mode, rest @ ..] = data else { return };
    let input = if mode & 1 == 0 { rest.to_vec() } else { replies(rest) };
    let goal = if mode & 2 == 0 { Goal::Connect("a".into()) } else { Goal::List };
    let piece = 1 + usize::from(mode >> 2);
    assert_eq!(meet(goal.clone(), &input, piece), meet(goal, &input, usize::MAX));
});
