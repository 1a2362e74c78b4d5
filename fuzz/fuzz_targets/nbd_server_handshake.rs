//! Fuzzes a client's NBD negotiation. The first byte chooses how the stream is split, and whether
//! it is raw or has well-formed option headers. Without well-formed headers, the fuzzer would
//! mostly test the magic number. The server's replies and outcome do not depend on the split.
#![no_main]

use hob_nbd::server::handshake::{Handshake, HandshakeLimits, HandshakeOutcome};
use hob_nbd::{ExportDirectory, ExportInfo};
use libfuzzer_sys::fuzz_target;

struct Exports;

impl ExportDirectory for Exports {
    fn find(&self, name: &str) -> Option<ExportInfo> {
        let contexts = vec!["x:y".to_owned(), "x:z".to_owned()];
        let info = ExportInfo { description: "one".into(), contexts, ..ExportInfo::new(1 << 20) };
        matches!(name, "" | "a").then_some(info)
    }

    fn list(&self) -> Vec<(String, String)> {
        vec![("a".into(), "one".into())]
    }
}

fn serve(input: &[u8], piece: usize) -> (Vec<u8>, Option<HandshakeOutcome>, usize) {
    let mut server =
        Handshake::new(HandshakeLimits { drain_bytes_max: 1 << 17, ..HandshakeLimits::default() });
    let (mut said, mut pos) = (Vec::new(), 0_usize);
    loop {
        let end = pos.saturating_add(piece).min(input.len());
        let used = server.handle_input(&input[pos..end], &Exports);
        pos += used;
        let output = server.poll_output();
        let quiet = used == 0 && output.is_none();
        let output = output.unwrap_or_default();
        assert!(output.len() < 1 << 14, "one option makes {} bytes of answer", output.len());
        said.extend(output);
        let outcome = server.poll_outcome();
        if outcome.is_some() || quiet {
            return (said, outcome, input.len() - pos);
        }
    }
}

/// Converts bytes into options: number, payload length, payload.
fn options(mut bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![0, 0, 0, 3];
    while let [number, length, rest @ ..] = bytes {
        let (payload, after) = rest.split_at(rest.len().min(usize::from(*length)));
        out.extend(b"IHAVEOPT");
        out.extend(u32::from(*number).to_be_bytes());
        out.extend((payload.len() as u32).to_be_bytes());
        out.extend(payload);
        bytes = after;
    }
    out
}

fuzz_target!(|data: &[u8]| {
    let [mode, rest @ ..] = data else { return };
    let input = if mode & 1 == 0 { rest.to_vec() } else { options(rest) };
    let piece = 1 + usize::from(mode >> 1);
    assert_eq!(serve(&input, piece), serve(&input, usize::MAX));
});
