//! Messages as bytes, computed by hand from the protocol's tables. The tests check that encoding
//! gives exactly these bytes, and that decoding accepts them. Constants are spelled out on purpose,
//! so that a wrong one in `wire` is detected.

use hob_nbd::client::request as ask;
use hob_nbd::server::reply::{self, Position};
use hob_nbd::wire::{ChunkHeader, OptionHeader, OptionReplyHeader};
use hob_nbd::{Command, CommandFlags, ErrorCode, Extent, Request};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

#[test]
fn requests() {
    let cookie = 0x0102_0304_0506_0708;
    let offset = 0x1122_3344_5566_7788;
    for (label, sent, want) in [
        (
            "READ with DF",
            ask::read(cookie, offset, 0x1000, CommandFlags::DF),
            "25609513 0004 0000 0102030405060708 1122334455667788 00001000",
        ),
        (
            "WRITE with FUA",
            ask::write_header(cookie, offset, 0x200, CommandFlags::FUA),
            "25609513 0001 0001 0102030405060708 1122334455667788 00000200",
        ),
        ("DISC", ask::disconnect(), "25609513 0000 0002 0000000000000000 0000000000000000 00000000"),
        ("FLUSH", ask::flush(cookie), "25609513 0000 0003 0102030405060708 0000000000000000 00000000"),
        (
            "TRIM",
            ask::trim(cookie, offset, 1, CommandFlags::NONE),
            "25609513 0000 0004 0102030405060708 1122334455667788 00000001",
        ),
        (
            "CACHE",
            ask::cache(cookie, offset, 1),
            "25609513 0000 0005 0102030405060708 1122334455667788 00000001",
        ),
        (
            "WRITE_ZEROES with FUA, NO_HOLE, FAST_ZERO",
            ask::write_zeroes(
                cookie,
                offset,
                u32::MAX,
                CommandFlags::FUA | CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO,
            ),
            "25609513 0013 0006 0102030405060708 1122334455667788 ffffffff",
        ),
        (
            "BLOCK_STATUS with REQ_ONE",
            ask::block_status(cookie, offset, 1, CommandFlags::REQ_ONE),
            "25609513 0008 0007 0102030405060708 1122334455667788 00000001",
        ),
    ] {
        assert_eq!(sent.to_vec(), hex(want), "{label}");
        let decoded = hob_nbd::server::request::decode_request(&sent).unwrap();
        assert_eq!(decoded.encode(), sent, "{label}");
    }
}

#[test]
fn every_command_number_survives() {
    for number in 0..=u16::MAX {
        let command = Command::from_wire(number);
        assert_eq!(command.to_wire(), number);
        assert_eq!(matches!(command, Command::Unknown(_)), number > 7);
    }
    let odd = Request {
        command: Command::Unknown(0xbeef),
        flags: CommandFlags(0xffff),
        cookie: 0,
        offset: u64::MAX,
        length: u32::MAX,
    };
    assert_eq!(Request::decode(&odd.encode()), Some(odd));
    assert_eq!((odd.payload_len(), odd.end()), (0, None));
}

#[test]
fn replies() {
    let cookie = 0x0102_0304_0506_0708;
    let offset = 0x1122_3344_5566_7788;
    type Push<'a> = &'a dyn Fn(&mut Vec<u8>);
    let cases: &[(&str, Push<'_>, &str)] = &[
        ("simple success", &|o| reply::push_simple_ok(o, cookie), "67446698 00000000 0102030405060708"),
        (
            "simple EINVAL",
            &|o| reply::push_simple_error(o, cookie, ErrorCode::Inval),
            "67446698 00000016 0102030405060708",
        ),
        ("NONE", &|o| reply::push_done(o, cookie), "668e33ef 0001 0000 0102030405060708 00000000"),
        (
            "OFFSET_DATA, last",
            &|o| reply::push_data_header(o, cookie, offset, 0x1000, Position::Last),
            "668e33ef 0001 0001 0102030405060708 00001008 1122334455667788",
        ),
        (
            "OFFSET_HOLE, more",
            &|o| reply::push_hole(o, cookie, offset, 0x1000, Position::More),
            "668e33ef 0000 0002 0102030405060708 0000000c 1122334455667788 00001000",
        ),
        (
            "ERROR",
            &|o| reply::push_error(o, cookie, ErrorCode::Io, "bad", Position::Last),
            "668e33ef 0001 8001 0102030405060708 00000009 00000005 0003 626164",
        ),
        (
            "ERROR_OFFSET",
            &|o| reply::push_error_offset(o, cookie, ErrorCode::NoSpc, "", offset, Position::More),
            "668e33ef 0000 8002 0102030405060708 0000000e 0000001c 0000 1122334455667788",
        ),
        (
            "BLOCK_STATUS",
            &|o| {
                let extents = [
                    Extent { length: 0x1000, state: 0 },
                    Extent { length: 0x2000, state: Extent::HOLE | Extent::ZERO },
                ];
                reply::push_block_status(o, cookie, 1, &extents, Position::Last);
            },
            "668e33ef 0001 0005 0102030405060708 00000014 00000001 00001000 00000000 00002000 00000003",
        ),
    ];
    for (label, push, want) in cases {
        let mut out = vec![0xaa];
        push(&mut out);
        assert_eq!(out[0], 0xaa, "{label}: appends");
        assert_eq!(out[1..], hex(want), "{label}");
    }
    assert_eq!(reply::simple_ok_header(cookie).to_vec(), hex("67446698 00000000 0102030405060708"));
}

#[test]
fn long_messages_are_clipped_between_characters() {
    let mut out = Vec::new();
    reply::push_error(&mut out, 1, ErrorCode::Io, &"é".repeat(3000), Position::Last);
    assert_eq!(out.len(), 20 + 6 + 4096);
    let mut out = Vec::new();
    reply::push_error(&mut out, 1, ErrorCode::Io, &format!("x{}", "é".repeat(3000)), Position::Last);
    assert_eq!(out.len(), 20 + 6 + 4095);
}

#[test]
fn headers() {
    let option = OptionHeader { option: 7, length: 0x1234 };
    assert_eq!(option.encode().to_vec(), hex("49484156454f5054 00000007 00001234"));
    assert_eq!(OptionHeader::decode(&option.encode()), Some(option));
    let reply = OptionReplyHeader { option: 7, reply: 0x8000_0006, length: 2 };
    assert_eq!(reply.encode().to_vec(), hex("0003e889045565a9 00000007 80000006 00000002"));
    assert_eq!(OptionReplyHeader::decode(&reply.encode()), Some(reply));
    let chunk = ChunkHeader { flags: 1, kind: 5, cookie: 9, length: 12 };
    assert_eq!(ChunkHeader::decode(&chunk.encode()), Some(chunk));
    for short in [0, 1, 7, 8, 15] {
        assert_eq!(OptionHeader::decode(&option.encode()[..short]), None);
        assert_eq!(OptionReplyHeader::decode(&reply.encode()[..short]), None);
        assert_eq!(ChunkHeader::decode(&chunk.encode()[..short]), None);
    }
}

#[test]
fn error_numbers() {
    for (number, code) in [
        (1, ErrorCode::Perm),
        (5, ErrorCode::Io),
        (12, ErrorCode::NoMem),
        (22, ErrorCode::Inval),
        (28, ErrorCode::NoSpc),
        (75, ErrorCode::Overflow),
        (95, ErrorCode::NotSup),
        (108, ErrorCode::Shutdown),
    ] {
        assert_eq!((code.to_wire(), ErrorCode::from_wire(number)), (number, Some(code)));
    }
    assert_eq!(ErrorCode::from_wire(0), None);
    assert_eq!(ErrorCode::from_wire(4711), Some(ErrorCode::Inval));
}
