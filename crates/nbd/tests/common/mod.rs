//! Shared by the tests: a directory of exports, and loops that drive client and server.
#![allow(dead_code, unreachable_pub)]

use hob_nbd::server::handshake::{Handshake, HandshakeLimits, HandshakeOutcome, Tls};
use hob_nbd::{ExportDirectory, ExportInfo};

pub struct Exports(pub Vec<(&'static str, ExportInfo)>);

impl Exports {
    /// Returns a default export, a read-only export with 4 KiB blocks, and an export whose block
    /// sizes break the rules.
    pub fn sample() -> Self {
        let vm = ExportInfo { description: "a guest's disk".into(), ..ExportInfo::new(10 << 20) };
        let contexts = ["qemu:dirty-bitmap:a", "qemu:dirty-bitmap:b"].map(str::to_owned).to_vec();
        let iso = ExportInfo { read_only: true, block_size_min: 4096, contexts, ..ExportInfo::new(1 << 20) };
        let broken = ExportInfo { block_size_min: 3, ..ExportInfo::new(1 << 20) };
        Self(vec![("", vm.clone()), ("vm", vm), ("iso", iso), ("broken", broken)])
    }
}

impl ExportDirectory for Exports {
    fn find(&self, name: &str) -> Option<ExportInfo> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, info)| info.clone())
    }

    fn list(&self) -> Vec<(String, String)> {
        self.0.iter().map(|(name, info)| ((*name).to_owned(), info.description.clone())).collect()
    }
}

/// Returns the server's output and outcome after `input` in pieces of `piece` bytes, and the number
/// of unconsumed bytes.
pub fn serve(input: &[u8], piece: usize) -> (Vec<u8>, Option<HandshakeOutcome>, usize) {
    serve_with(&mut Handshake::new(HandshakeLimits::default()), input, piece)
}

/// Calls [`serve`] with input outside TLS, and with input inside TLS if the client starts TLS.
/// Returns both results.
pub fn serve_tls(
    tls: Tls,
    clear: &[u8],
    inside: &[u8],
    piece: usize,
) -> [(Vec<u8>, Option<HandshakeOutcome>, usize); 2] {
    let mut server = Handshake::with_tls(HandshakeLimits::default(), tls);
    let first = serve_with(&mut server, clear, piece);
    if first.1 != Some(HandshakeOutcome::StartTls) {
        return [first, (Vec::new(), None, inside.len())];
    }
    let second = serve_with(&mut server.inside_tls(), inside, piece);
    [first, second]
}

fn serve_with(
    server: &mut Handshake,
    input: &[u8],
    piece: usize,
) -> (Vec<u8>, Option<HandshakeOutcome>, usize) {
    let exports = Exports::sample();
    let mut said = Vec::new();
    let mut pos = 0;
    let mut shown = 0;
    loop {
        while let Some(output) = server.poll_output() {
            said.extend(output);
        }
        if let Some(outcome) = server.poll_outcome() {
            return (said, Some(outcome), input.len() - pos);
        }
        let used = server.handle_input(&input[pos..shown], &exports);
        pos += used;
        if used == 0 && shown == input.len() {
            return (said, None, input.len() - pos);
        }
        if pos == shown || used == 0 {
            shown = (shown + piece).min(input.len());
        }
    }
}

pub fn option(number: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = b"IHAVEOPT".to_vec();
    out.extend(number.to_be_bytes());
    out.extend((payload.len() as u32).to_be_bytes());
    out.extend(payload);
    out
}

pub fn counted(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text].concat()
}

pub fn info_payload(name: &[u8], items: &[u16]) -> Vec<u8> {
    let mut out = counted(name);
    out.extend((items.len() as u16).to_be_bytes());
    items.iter().for_each(|item| out.extend(item.to_be_bytes()));
    out
}

pub fn meta_payload(name: &[u8], queries: &[&[u8]]) -> Vec<u8> {
    let mut out = counted(name);
    out.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| out.extend(counted(query)));
    out
}

pub fn reply(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend((payload.len() as u32).to_be_bytes());
    out.extend(payload);
    out
}
