//! Tests of TLS negotiation: the server does not trust messages from before TLS, and required TLS
//! cannot be bypassed.

mod common;

use common::{info_payload, meta_payload, option, reply, serve_tls};
use hob_nbd::server::handshake::{HandshakeError, HandshakeOutcome, Tls};
use proptest::prelude::*;

const FLAGS: [u8; 4] = [0, 0, 0, 3];
const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\x00\x03";
const ERR_UNSUP: u32 = 1 << 31 | 1;
const ERR_INVALID: u32 = 1 << 31 | 3;
const ERR_TLS_REQD: u32 = 1 << 31 | 5;

type Side = (Vec<u8>, Option<HandshakeOutcome>, usize);

/// Sends options without TLS and then inside TLS, in pieces of several sizes. The result must be
/// the same for all sizes.
fn run(tls: Tls, clear: &[Vec<u8>], inside: &[Vec<u8>]) -> [Side; 2] {
    let (clear, inside) = ([&FLAGS[..], &clear.concat()].concat(), inside.concat());
    let whole = serve_tls(tls, &clear, &inside, usize::MAX >> 1);
    for piece in (1..=40).chain([1000]) {
        assert_eq!(serve_tls(tls, &clear, &inside, piece), whole, "pieces of {piece}");
    }
    let [(said, outcome, left), inside] = whole;
    assert_eq!(&said[..18], GREETING);
    [(said[18..].to_vec(), outcome, left), inside]
}

/// Type of each reply.
fn kinds(mut said: &[u8]) -> Vec<u32> {
    let mut kinds = Vec::new();
    while !said.is_empty() {
        kinds.push(u32::from_be_bytes(said[12..16].try_into().unwrap()));
        let length = u32::from_be_bytes(said[16..20].try_into().unwrap()) as usize;
        said = &said[20 + length..];
    }
    kinds
}

#[test]
fn tls_is_acknowledged_and_negotiation_continues_inside_without_a_greeting() {
    for tls in [Tls::Offered, Tls::Required] {
        let [clear, inside] =
            run(tls, &[option(5, &[])], &[option(7, &info_payload(b"vm", &[])), b"next".to_vec()]);
        assert_eq!(clear, (reply(5, 1, &[]), Some(HandshakeOutcome::StartTls), 0));
        assert_eq!(kinds(&inside.0), [3, 3, 1]);
        let Some(HandshakeOutcome::Done(negotiated)) = inside.1 else { panic!("{:?}", inside.1) };
        assert_eq!((negotiated.export.as_str(), inside.2), ("vm", 4));
    }
}

#[test]
fn nothing_said_in_the_clear_counts_inside_but_the_flags() {
    let clear = [option(8, &[]), option(10, &meta_payload(b"vm", &[b"base:allocation"])), option(5, &[])];
    let [_, inside] = run(Tls::Offered, &clear, &[option(1, b"vm")]);
    let Some(HandshakeOutcome::Done(negotiated)) = inside.1 else { panic!("{:?}", inside.1) };
    assert!(!negotiated.structured_replies && !negotiated.base_allocation);
    assert_eq!(inside.0.len(), 10, "the client said that it wants no zeroes");
}

#[test]
fn plaintext_after_starttls_is_refused() {
    let injected = option(7, &info_payload(b"vm", &[]));
    let [clear, _] = run(Tls::Required, &[option(5, &[]), injected.clone()], &[]);
    assert_eq!((clear.1, clear.2), (Some(HandshakeOutcome::StartTls), injected.len()));
}

#[test]
fn without_required_tls_no_information_is_sent() {
    let all = [
        option(3, &[]),
        option(6, &info_payload(b"vm", &[])),
        option(6, &info_payload(b"nobody", &[])),
        option(7, &info_payload(b"vm", &[])),
        option(8, &[]),
        option(9, &meta_payload(b"vm", &[])),
        option(10, &meta_payload(b"vm", &[b"base:allocation"])),
        option(99, b"x"),
    ];
    let [clear, _] = run(Tls::Required, &all, &[]);
    assert_eq!(kinds(&clear.0), [ERR_TLS_REQD; 8]);
    assert_eq!(clear.1, None);
    let [clear, _] = run(Tls::Required, &[option(1, b"vm")], &[]);
    assert_eq!(clear.1, Some(HandshakeOutcome::Failed(HandshakeError::NoTls)));
    let [clear, _] = run(Tls::Required, &[option(2, &[])], &[]);
    assert_eq!((kinds(&clear.0), clear.1), (vec![1], Some(HandshakeOutcome::Aborted)));
}

#[test]
fn tls_that_is_offered_may_be_left_alone() {
    let [clear, _] = run(Tls::Offered, &[option(7, &info_payload(b"vm", &[]))], &[]);
    assert!(matches!(clear.1, Some(HandshakeOutcome::Done(_))), "{:?}", clear.1);
}

#[test]
fn tls_is_refused_at_an_invalid_time() {
    let [clear, _] = run(Tls::Absent, &[option(5, &[])], &[]);
    assert_eq!((kinds(&clear.0), clear.1), (vec![ERR_UNSUP], None));
    let [clear, _] = run(Tls::Required, &[option(5, b"x")], &[]);
    assert_eq!((kinds(&clear.0), clear.1), (vec![ERR_INVALID], None));
    let [_, inside] = run(Tls::Required, &[option(5, &[])], &[option(5, &[]), option(3, &[])]);
    assert_eq!(kinds(&inside.0)[0], ERR_INVALID);
    assert_eq!(kinds(&inside.0).last(), Some(&1), "and goes on");
}

#[test]
fn options_are_counted_over_both_halves() {
    let before = vec![option(99, &[]); 199];
    let [_, inside] =
        run(Tls::Offered, &[before.concat(), option(5, &[])], &[vec![option(99, &[]); 57].concat()]);
    assert_eq!(inside.1, Some(HandshakeOutcome::Failed(HandshakeError::TooManyOptions(256))));
}

proptest! {
    /// No input reaches an export without the required TLS.
    #[test]
    fn required_tls_cannot_be_bypassed(
        flags in 0u8..4,
        options in proptest::collection::vec((0u32..14, proptest::collection::vec(any::<u8>(), 0..24)), 0..12),
    ) {
        let options: Vec<u8> = options
            .iter()
            .filter(|(number, payload)| *number != 5 || !payload.is_empty())
            .flat_map(|(number, payload)| option(*number, payload))
            .collect();
        let bytes = [&[0, 0, 0, flags][..], &options].concat();
        let [(said, outcome, _), _] = serve_tls(Tls::Required, &bytes, &[], 7);
        prop_assert!(!matches!(outcome, Some(HandshakeOutcome::Done(_) | HandshakeOutcome::StartTls)));
        let told = kinds(&said[18..]);
        prop_assert!(told.iter().all(|kind| [1, ERR_TLS_REQD, ERR_INVALID].contains(kind)), "{told:x?}");
    }
}
