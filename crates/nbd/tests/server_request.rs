//! Tests of the server's request check: every command with every feature, and each way to be out of
//! range.

use hob_nbd::server::handshake::Negotiated;
use hob_nbd::server::request::{Refusal, RequestError, decode_request, validate};
use hob_nbd::wire::TransmissionFlags;
use hob_nbd::{Command, CommandFlags, ErrorCode, ExportInfo, Request};

const SIZE: u64 = 1 << 30;
const ALL: [Command; 9] = [
    Command::Read,
    Command::Write,
    Command::Disconnect,
    Command::Flush,
    Command::Trim,
    Command::Cache,
    Command::WriteZeroes,
    Command::BlockStatus,
    Command::Unknown(8),
];

fn negotiated(info: ExportInfo) -> Negotiated {
    Negotiated {
        export: String::new(),
        info,
        structured_replies: true,
        base_allocation: true,
        contexts: vec![],
    }
}

fn request(command: Command, flags: CommandFlags, offset: u64, length: u32) -> Request {
    Request { command, flags, cookie: 7, offset, length }
}

fn plain(command: Command) -> Request {
    let length = if matches!(command, Command::Flush | Command::Disconnect) { 0 } else { 4096 };
    request(command, CommandFlags::NONE, 0, length)
}

fn code(result: Result<(), Refusal>) -> Option<ErrorCode> {
    match result {
        Ok(()) => None,
        Err(Refusal::Reply(code)) => Some(code),
        Err(Refusal::Close(error)) => panic!("{error}"),
    }
}

#[test]
fn ranges() {
    let terms = negotiated(ExportInfo { block_size_min: 512, ..ExportInfo::new(SIZE) });
    let max = terms.info.block_size_max;
    let none = CommandFlags::NONE;
    use Command::*;
    use ErrorCode::*;
    for (label, request, want) in [
        ("first block", request(Read, none, 0, 512), None),
        ("last block", request(Read, none, SIZE - 512, 512), None),
        ("whole maximum", request(Read, none, 0, max), None),
        ("one block past the end", request(Read, none, SIZE, 512), Some(Inval)),
        ("straddles the end", request(Read, none, SIZE - 512, 1024), Some(Inval)),
        ("offset + length wraps", request(Read, none, u64::MAX - 511, 512), Some(Inval)),
        ("offset + length wraps further", request(Read, none, u64::MAX - 511, 1 << 20), Some(Inval)),
        ("misaligned offset", request(Read, none, 1, 512), Some(Inval)),
        ("misaligned length", request(Read, none, 0, 513), Some(Inval)),
        ("empty read", request(Read, none, 0, 0), Some(Inval)),
        ("empty write", request(Write, none, 0, 0), Some(Inval)),
        ("empty trim", request(Trim, none, 0, 0), Some(Inval)),
        ("empty status", request(BlockStatus, none, 0, 0), Some(Inval)),
        ("read over the maximum", request(Read, none, 0, max + 512), Some(Inval)),
        ("unfragmented read over the maximum", request(Read, CommandFlags::DF, 0, max + 512), Some(Overflow)),
        ("write past the end", request(Write, none, SIZE, 512), Some(NoSpc)),
        ("zeroes past the end", request(WriteZeroes, none, SIZE - 512, 1024), Some(NoSpc)),
        ("trim past the end", request(Trim, none, SIZE, 512), Some(Inval)),
        ("cache past the end", request(Cache, none, SIZE, 512), Some(Inval)),
        ("status past the end", request(BlockStatus, none, SIZE, 512), Some(Inval)),
        ("trim of everything", request(Trim, none, 0, SIZE as u32), None),
        ("zeroes of everything", request(WriteZeroes, none, 0, SIZE as u32), None),
        ("status of everything", request(BlockStatus, none, 0, SIZE as u32), None),
        ("cache of everything", request(Cache, none, 0, SIZE as u32), None),
        ("flush with a length", request(Flush, none, 0, 512), Some(Inval)),
        ("flush with an offset", request(Flush, none, 512, 0), Some(Inval)),
        ("goodbye with nonsense", request(Disconnect, CommandFlags(0xffff), 1, 1), None),
        ("unknown command", request(Unknown(8), none, 0, 512), Some(Inval)),
    ] {
        assert_eq!(code(validate(&request, &terms)), want, "{label}");
    }
}

/// The fuzzer found this error: with a minimum of 3, the alignment mask accepted 4 as a multiple.
#[test]
fn a_block_size_that_negotiation_would_refuse_lets_nothing_pass() {
    for block_size_min in [0, 3, 4097] {
        let terms = negotiated(ExportInfo { block_size_min, ..ExportInfo::new(SIZE) });
        for (offset, length) in [(4, 4), (0, 3), (0, 4096), (4097, 4097)] {
            let request = request(Command::Read, CommandFlags::NONE, offset, length);
            assert_eq!(
                code(validate(&request, &terms)),
                Some(ErrorCode::Inval),
                "{block_size_min}: {offset}+{length}"
            );
        }
    }
}

#[test]
fn an_empty_export_has_no_valid_range() {
    let terms = negotiated(ExportInfo::new(0));
    for command in [Command::Read, Command::Write, Command::Trim, Command::WriteZeroes, Command::BlockStatus]
    {
        assert!(validate(&request(command, CommandFlags::NONE, 0, 1), &terms).is_err());
    }
}

#[test]
fn a_write_over_the_maximum_closes_the_connection() {
    for read_only in [false, true] {
        let terms = negotiated(ExportInfo { read_only, ..ExportInfo::new(SIZE) });
        let max = terms.info.block_size_max;
        let long = request(Command::Write, CommandFlags::NONE, 0, max + 1);
        let want = RequestError::PayloadTooLong { length: max + 1, max };
        assert_eq!(validate(&long, &terms), Err(Refusal::Close(want)));
        assert_eq!(long.payload_len(), max + 1);
    }
}

#[test]
fn flags_are_allowed_where_they_mean_something() {
    let terms = negotiated(ExportInfo::new(SIZE));
    for command in ALL {
        for bit in 0..16 {
            let flag = CommandFlags(1 << bit);
            let allowed = match (command, flag) {
                (Command::Unknown(_), _) => false,
                (Command::Disconnect, _) | (_, CommandFlags::FUA) => true,
                (Command::Read, CommandFlags::DF) => true,
                (Command::WriteZeroes, CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO) => true,
                (Command::BlockStatus, CommandFlags::REQ_ONE) => true,
                _ => false,
            };
            let request = Request { flags: flag, ..plain(command) };
            assert_eq!(validate(&request, &terms).is_ok(), allowed, "{command:?} with flag bit {bit}");
        }
    }
}

/// Announced and accepted commands are computed in two places; this test compares them for every
/// kind of export.
#[test]
fn only_announced_features_are_accepted() {
    for bits in 0..1024_u32 {
        let on = |bit: u32| bits & (1 << bit) != 0;
        let info = ExportInfo {
            read_only: on(0),
            can_flush: on(1),
            can_fua: on(2),
            can_trim: on(3),
            can_write_zeroes: on(4),
            can_fast_zero: on(5),
            can_cache: on(6),
            ..ExportInfo::new(SIZE)
        };
        let terms = Negotiated { structured_replies: on(7), base_allocation: on(8), ..negotiated(info) };
        let contexts = if on(9) { vec!["qemu:dirty-bitmap:x".to_owned()] } else { vec![] };
        let terms = Negotiated { contexts, ..terms };
        let announced = terms.transmission_flags();
        let has = |flag| announced.contains(flag);
        for (command, flags, want) in [
            (Command::Read, CommandFlags::NONE, true),
            (Command::Read, CommandFlags::FUA, has(TransmissionFlags::SEND_FUA)),
            (Command::Read, CommandFlags::DF, has(TransmissionFlags::SEND_DF)),
            (Command::Write, CommandFlags::NONE, !has(TransmissionFlags::READ_ONLY)),
            (Command::Flush, CommandFlags::NONE, has(TransmissionFlags::SEND_FLUSH)),
            (Command::Trim, CommandFlags::NONE, has(TransmissionFlags::SEND_TRIM)),
            (Command::Cache, CommandFlags::NONE, has(TransmissionFlags::SEND_CACHE)),
            (Command::WriteZeroes, CommandFlags::NO_HOLE, has(TransmissionFlags::SEND_WRITE_ZEROES)),
            (Command::WriteZeroes, CommandFlags::FAST_ZERO, has(TransmissionFlags::SEND_FAST_ZERO)),
            (Command::BlockStatus, CommandFlags::NONE, on(8) || on(9)),
        ] {
            let request = Request { flags, ..plain(command) };
            let got = code(validate(&request, &terms));
            assert_eq!(got.is_none(), want, "{command:?} {flags:?} {:?}", terms.info);
            let writes = matches!(command, Command::Write | Command::Trim | Command::WriteZeroes);
            if writes && terms.info.read_only {
                assert_eq!(got, Some(ErrorCode::Perm));
            }
        }
    }
}

#[test]
fn a_wrong_magic_is_fatal_whichever_bit_is_wrong() {
    let good = plain(Command::Read).encode();
    assert!(decode_request(&good).is_ok());
    for bit in 0..32 {
        let mut bad = good;
        bad[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(decode_request(&bad), Err(RequestError::BadMagic));
    }
}
