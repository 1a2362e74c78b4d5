//! Tests the server's negotiation with correct, confused and hostile clients. Each case runs with
//! several sizes of input pieces, which must not change the result.

mod common;

use common::{counted, info_payload, meta_payload, option, reply, serve};
use hob_nbd::server::handshake::{HandshakeError, HandshakeOutcome, Negotiated};

const FLAGS: [u8; 4] = [0, 0, 0, 3];
const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\x00\x03";
const ERROR: u32 = 1 << 31;

/// Runs with many piece sizes, checks that the results are equal, and returns the output after the
/// greeting.
fn run(input: &[u8]) -> (Vec<u8>, Option<HandshakeOutcome>, usize) {
    let whole = serve(input, usize::MAX >> 1);
    for piece in (1..=40).chain([1000, 65536]) {
        assert_eq!(serve(input, piece), whole, "pieces of {piece}");
    }
    let (said, outcome, left) = whole;
    assert_eq!(&said[..18], GREETING);
    (said[18..].to_vec(), outcome, left)
}

/// Runs options after valid client flags.
fn options(options: &[Vec<u8>]) -> (Vec<u8>, Option<HandshakeOutcome>, usize) {
    run(&[&FLAGS[..], &options.concat()].concat())
}

fn done(outcome: Option<HandshakeOutcome>) -> Negotiated {
    match outcome {
        Some(HandshakeOutcome::Done(negotiated)) => negotiated,
        other => panic!("expected Done, got {other:?}"),
    }
}

/// Returns the types of the replies in order; the replies must be well-formed.
fn kinds(mut said: &[u8]) -> Vec<u32> {
    let mut kinds = Vec::new();
    while !said.is_empty() {
        assert_eq!(said[..8], 0x0003_e889_0455_65a9_u64.to_be_bytes());
        kinds.push(u32::from_be_bytes(said[12..16].try_into().unwrap()));
        let length = u32::from_be_bytes(said[16..20].try_into().unwrap()) as usize;
        said = &said[20 + length..];
    }
    kinds
}

#[test]
fn go_with_everything() {
    let (said, outcome, left) = options(&[
        option(8, &[]),
        option(10, &meta_payload(b"vm", &[b"qemu:dirty-bitmap:x", b"base:allocation"])),
        option(7, &info_payload(b"vm", &[1, 2, 3, 99, 1])),
        b"next".to_vec(),
    ]);
    let want = [
        reply(8, 1, &[]),
        reply(10, 4, b"\0\0\0\x01base:allocation"),
        reply(10, 1, &[]),
        reply(7, 3, &[0, 0, 0, 0, 0, 0, 0, 0xa0, 0, 0, 0x0d, 0xed]),
        reply(7, 3, &[0, 3, 0, 0, 0, 1, 0, 0, 0x10, 0, 2, 0, 0, 0]),
        reply(7, 3, b"\0\x01vm"),
        reply(7, 3, b"\0\x02a guest's disk"),
        reply(7, 1, &[]),
    ];
    assert_eq!(said, want.concat());
    let negotiated = done(outcome);
    assert_eq!(negotiated.export, "vm");
    assert!(negotiated.structured_replies && negotiated.base_allocation);
    assert_eq!(left, 4, "the first request stays with the caller");
}

#[test]
fn export_name_with_and_without_zeroes() {
    let size_and_flags = [0, 0, 0, 0, 0, 0xa0, 0, 0, 0x0d, 0x6d];
    for (flags, zeroes) in [(3, 0), (2, 0), (1, 124), (0, 124)] {
        let (said, outcome, left) = run(&[&[0, 0, 0, flags][..], &option(1, b"vm"), b"next"].concat());
        assert_eq!(said, [&size_and_flags[..], &vec![0; zeroes]].concat(), "flags {flags}");
        let negotiated = done(outcome);
        assert_eq!((negotiated.export.as_str(), negotiated.structured_replies, left), ("vm", false, 4));
    }
}

#[test]
fn list_info_abort() {
    let (said, outcome, left) =
        options(&[option(3, &[]), option(6, &info_payload(b"iso", &[])), option(2, &[])]);
    let want = [
        reply(3, 2, b"\0\0\0\0a guest's disk"),
        reply(3, 2, b"\0\0\0\x02vma guest's disk"),
        reply(3, 2, b"\0\0\0\x03iso"),
        reply(3, 2, b"\0\0\0\x06broken"),
        reply(3, 1, &[]),
        reply(6, 3, &[0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0x05, 0x07]),
        reply(6, 3, &[0, 3, 0, 0, 0x10, 0, 0, 0, 0x10, 0, 2, 0, 0, 0]),
        reply(6, 1, &[]),
        reply(2, 1, &[]),
    ];
    assert_eq!(said, want.concat());
    assert_eq!((outcome, left), (Some(HandshakeOutcome::Aborted), 0));
}

#[test]
fn metadata_contexts() {
    let structured = option(8, &[]);
    type Case<'a> = (&'a str, u32, &'a [&'a [u8]], &'a [u32]);
    let all: &[Case<'_>] = &[
        ("list: no query means all", 9, &[], &[4, 1]),
        ("list: namespace", 9, &[b"base:"], &[4, 1]),
        (
            "list: exact, thrice, answered once",
            9,
            &[b"base:allocation", b"base:", b"base:allocation"],
            &[4, 1],
        ),
        ("list: other", 9, &[b"qemu:"], &[1]),
        ("set: none", 10, &[], &[1]),
        ("set: exact", 10, &[b"base:allocation"], &[4, 1]),
        ("set: the namespace is for listing only", 10, &[b"base:"], &[1]),
        ("set: other", 10, &[b"x-hob:none"], &[1]),
    ];
    for (label, number, queries, want) in all {
        let (said, ..) = options(&[structured.clone(), option(*number, &meta_payload(b"vm", queries))]);
        assert_eq!(kinds(&said)[1..], **want, "{label}");
        let (said, ..) = options(&[option(*number, &meta_payload(b"vm", queries))]);
        assert_eq!(kinds(&said), [ERROR | 3], "{label}, before structured replies");
        let (said, ..) = options(&[structured.clone(), option(*number, &meta_payload(b"gone", queries))]);
        assert_eq!(kinds(&said)[1..], [ERROR | 6], "{label}, unknown export");
    }
}

/// A client can list contexts other than `base:allocation` by name or by namespace, or list all.
/// The client can choose these contexts by name, and each context has its own id.
#[test]
fn further_metadata_contexts() {
    let (a, b) = ("qemu:dirty-bitmap:a", "qemu:dirty-bitmap:b");
    let listed = |queries: &[&[u8]]| {
        let (said, ..) = options(&[option(8, &[]), option(9, &meta_payload(b"iso", queries))]);
        let context = |name: &str| reply(9, 4, &[&[0; 4], name.as_bytes()].concat());
        let of = |names: &[&str]| names.iter().flat_map(|name| context(name)).collect::<Vec<_>>();
        let said = said[reply(8, 1, &[]).len()..].to_vec();
        let known = [&["base:allocation", a, b][..], &[a, b], &[a], &["base:allocation", b], &[]];
        let found = known.iter().find(|names| said == [of(names), reply(9, 1, &[])].concat());
        found.unwrap_or_else(|| panic!("{queries:?}: {said:?}")).to_vec()
    };
    assert_eq!(listed(&[]), ["base:allocation", a, b]);
    assert_eq!(listed(&[b"qemu:"]), [a, b]);
    assert_eq!(listed(&[b"qemu:dirty-bitmap:"]), [a, b]);
    assert_eq!(listed(&[b"qemu:", b"base:"]), ["base:allocation", a, b]);
    assert_eq!(listed(&[a.as_bytes(), a.as_bytes()]), [a]);
    assert_eq!(listed(&[b.as_bytes(), b"base:allocation"]), ["base:allocation", b]);
    for nothing in [&b"qemu:dirty-bitmap:c"[..], b"qemu", b"qemu:dirty", b"", b"qemu:allocation-depth"] {
        assert_eq!(listed(&[nothing]), [""; 0], "{nothing:?}");
    }

    let choose = |queries: &[&[u8]]| {
        let go = option(7, &info_payload(b"iso", &[]));
        let (said, outcome, _) = options(&[option(8, &[]), option(10, &meta_payload(b"iso", queries)), go]);
        (said[reply(8, 1, &[]).len()..].to_vec(), done(outcome))
    };
    let (said, chosen) = choose(&[b.as_bytes(), b"base:allocation", a.as_bytes()]);
    let base = reply(10, 4, b"\0\0\0\x01base:allocation");
    let want = [
        base,
        reply(10, 4, b"\0\0\0\x02qemu:dirty-bitmap:a"),
        reply(10, 4, b"\0\0\0\x03qemu:dirty-bitmap:b"),
    ];
    assert!(said.starts_with(&want.concat()));
    assert_eq!((chosen.base_allocation, chosen.contexts.len()), (true, 2));
    let (said, chosen) = choose(&[b.as_bytes()]);
    assert!(said.starts_with(&reply(10, 4, b"\0\0\0\x02qemu:dirty-bitmap:b")));
    assert_eq!((chosen.base_allocation, &chosen.contexts[..]), (false, &[b.to_owned()][..]));
    assert!(chosen.has_contexts());
    assert!(!choose(&[b"qemu:"]).1.has_contexts(), "a namespace is for listing only");
}

#[test]
fn a_context_counts_only_for_its_export_and_until_the_next_choice() {
    let set = |name: &[u8]| option(10, &meta_payload(name, &[b"base:allocation"]));
    let go = option(7, &info_payload(b"vm", &[]));
    for (label, between, want) in [
        ("same export", vec![set(b"vm")], true),
        ("other export", vec![set(b"iso")], false),
        ("default export is another", vec![set(b"")], false),
        ("nothing chosen later", vec![set(b"vm"), option(10, &meta_payload(b"vm", &[]))], false),
        ("a failed choice voids the earlier", vec![set(b"vm"), set(b"gone")], false),
        ("a failed GO does not", vec![set(b"vm"), option(7, &info_payload(b"gone", &[]))], true),
    ] {
        let (_, outcome, _) = options(&[option(8, &[]), between.concat(), go.clone()]);
        assert_eq!(done(outcome).base_allocation, want, "{label}");
    }
}

/// Each of these options gets an error reply, and the negotiation continues.
#[test]
fn polite_refusals() {
    let huge_name = vec![b'x'; 4097];
    let cases: Vec<(&str, Vec<u8>, u32)> = vec![
        ("STARTTLS", option(5, &[]), 1),
        ("PEEK_EXPORT", option(4, b"vm"), 1),
        ("EXTENDED_HEADERS", option(11, &[]), 1),
        ("unknown option", option(0xdead_beef, &[1, 2, 3]), 1),
        ("LIST with payload", option(3, b"x"), 3),
        ("STRUCTURED_REPLY with payload", option(8, b"x"), 3),
        ("GO without payload", option(7, &[]), 3),
        ("GO with half a length", option(7, &[0, 0]), 3),
        ("GO whose name is longer than the payload", option(7, &[0xff, 0xff, 0xff, 0xff, 0, 0]), 3),
        ("GO without item count", option(7, &counted(b"vm")), 3),
        ("GO with missing items", option(7, &[counted(b"vm"), vec![0, 2, 0, 1]].concat()), 3),
        ("GO with spare bytes", option(7, &[info_payload(b"vm", &[]), vec![0]].concat()), 3),
        ("GO, name not UTF-8", option(7, &info_payload(b"\xff", &[])), 3),
        ("GO, name with NUL", option(7, &info_payload(b"vm\0", &[])), 3),
        ("GO, long name", option(7, &info_payload(&huge_name, &[])), 9),
        ("GO, unknown export", option(7, &info_payload(b"gone", &[])), 6),
        ("INFO, unknown export", option(6, &info_payload(b"gone", &[])), 6),
        ("GO, export that NBD cannot express", option(7, &info_payload(b"broken", &[])), 4),
        ("payload over 64 KiB", option(7, &vec![0; 65537]), 9),
        ("unknown option over 64 KiB", option(77, &vec![0; 1 << 20]), 9),
    ];
    for (label, bytes, error) in cases {
        let (said, outcome, _) = options(&[bytes, option(7, &info_payload(b"vm", &[]))]);
        assert_eq!(kinds(&said), [ERROR | error, 3, 3, 1], "{label}");
        assert_eq!(done(outcome).export, "vm", "{label}");
    }
    let long_query = meta_payload(b"vm", &[&[b'q'; 4097]]);
    let missing_query = [counted(b"vm"), vec![0xff; 4]].concat();
    let spare = [meta_payload(b"vm", &[b"base:"]), vec![0]].concat();
    for payload in [long_query, missing_query, spare] {
        let (said, ..) = options(&[option(8, &[]), option(10, &payload), option(9, &payload)]);
        assert_eq!(kinds(&said), [1, ERROR | 3, ERROR | 3]);
    }
}

#[test]
fn an_unknown_export_is_refused_with_the_names_that_the_client_may_list() {
    let refusal = |names: &[&'static str], wanted: &[u8]| {
        let info = hob_nbd::ExportInfo::new(1 << 20);
        let exports = common::Exports(names.iter().map(|name| (*name, info.clone())).collect());
        let mut server = hob_nbd::server::handshake::Handshake::new(Default::default());
        server.poll_output().unwrap();
        server.handle_input(&[&FLAGS[..], &option(7, &info_payload(wanted, &[]))].concat(), &exports);
        let said = server.poll_output().unwrap();
        assert_eq!(kinds(&said), [ERROR | 6]);
        String::from_utf8(said[20..].to_vec()).unwrap()
    };
    for (names, wanted, message) in [
        (&["disk"][..], "d", "there is no export \"d\"; this server has \"disk\""),
        (&["a", "b"][..], "", "there is no default export; this server has \"a\", \"b\""),
        (
            &["a", "b", "c", "d"][..],
            "e",
            "there is no export \"e\"; this server has \"a\", \"b\", \"c\" and 1 more",
        ),
        (&[][..], "e", "there is no export \"e\""),
        (&["a"][..], "x\n", "there is no export \"x\\n\"; this server has \"a\""),
    ] {
        assert_eq!(refusal(names, wanted.as_bytes()), message);
    }
    let long = "n".repeat(4096);
    let message = refusal(&[], long.as_bytes());
    assert_eq!(message.len(), "there is no export \"\"".len() + 256, "{message}");
}

/// Each of these inputs closes the connection.
#[test]
fn hostile_input() {
    let name_error = |name: &str, reason: &'static str| HandshakeError::ExportName {
        name: name.into(),
        reason: reason.into(),
    };
    let mut too_many = FLAGS.to_vec();
    (0..257).for_each(|_| too_many.extend(option(5, &[])));
    let over_drain = [&FLAGS[..], b"IHAVEOPT", &[0, 0, 0, 7, 0xff, 0xff, 0xff, 0xff]].concat();
    let long_export_name = [&FLAGS[..], b"IHAVEOPT", &[0, 0, 0, 1, 0, 1, 0, 1]].concat();
    let cases = [
        ("flags from the future", vec![0, 0, 0, 7], HandshakeError::ClientFlags(7)),
        ("an HTTP client", b"GET / HTTP/1.1\r\n\r\n".to_vec(), HandshakeError::ClientFlags(0x4745_5420)),
        ("wrong magic", [&FLAGS[..], &[0x55; 16]].concat(), HandshakeError::OptionMagic),
        ("not fixed newstyle", [&[0; 4][..], &option(3, &[])].concat(), HandshakeError::NotFixedNewstyle(3)),
        ("endless options", too_many, HandshakeError::TooManyOptions(256)),
        ("4 GiB option", over_drain, HandshakeError::OptionTooBig { option: 7, length: u32::MAX }),
        ("long EXPORT_NAME", long_export_name, HandshakeError::OptionTooBig { option: 1, length: 65537 }),
        (
            "unknown EXPORT_NAME",
            [&FLAGS[..], &option(1, b"gone")].concat(),
            name_error("gone", "there is no export \"gone\"; this server has \"vm\", \"iso\", \"broken\""),
        ),
        (
            "EXPORT_NAME not UTF-8",
            [&FLAGS[..], &option(1, b"\xff")].concat(),
            name_error("\u{fffd}", "an export name must be UTF-8 without NUL"),
        ),
    ];
    for (label, input, want) in cases {
        let (said, outcome, _) = run(&input);
        assert_eq!(outcome, Some(HandshakeOutcome::Failed(want)), "{label}");
        if label == "4 GiB option" {
            assert_eq!(kinds(&said), [ERROR | 9], "{label}: the client is told first");
        }
    }
}

#[test]
fn nothing_is_consumed_while_an_answer_waits() {
    let exports = common::Exports::sample();
    let mut server = hob_nbd::server::handshake::Handshake::new(Default::default());
    assert_eq!(server.handle_input(&FLAGS, &exports), 0, "the greeting was not taken");
    server.poll_output().unwrap();
    let two = [&FLAGS[..], &option(3, &[]), &option(3, &[])].concat();
    assert_eq!(server.handle_input(&two, &exports), 20, "one option is answered at a time");
    assert_eq!(server.handle_input(&two[20..], &exports), 0);
    server.poll_output().unwrap();
    assert_eq!(server.handle_input(&two[20..], &exports), 16);
}

#[test]
fn a_cut_off_client_leaves_no_outcome() {
    let input = [&FLAGS[..], &option(7, &info_payload(b"vm", &[]))].concat();
    for cut in 0..input.len() {
        let (_, outcome, left) = run(&input[..cut]);
        assert_eq!((outcome, left), (None, 0), "cut at {cut}");
    }
}
