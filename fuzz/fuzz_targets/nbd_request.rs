//! Fuzzes NBD request headers. The fuzzer also chooses the export's features, size and block sizes.
//! A valid request is inside the export, is aligned, and moves no more bytes than the negotiated
//! maximum.
#![no_main]

use hob_nbd::server::handshake::Negotiated;
use hob_nbd::server::request::{Refusal, decode_request, validate};
use hob_nbd::{Command, ErrorCode, ExportInfo};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u16, u64, u32, u32, [u8; 24])| {
    let (abilities, size_bytes, block_size_min, block_size_max, fields) = input;
    let on = |bit: u32| abilities & (1 << bit) != 0;
    let info = ExportInfo {
        read_only: on(0),
        can_flush: on(1),
        can_fua: on(2),
        can_trim: on(3),
        can_write_zeroes: on(4),
        can_fast_zero: on(5),
        can_cache: on(6),
        block_size_min,
        block_size_max,
        ..ExportInfo::new(size_bytes)
    };
    let terms = Negotiated { export: String::new(), info, structured_replies: on(7), base_allocation: on(8), contexts: vec![] };
    let mut header = [0; 28];
    header[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
    header[4..].copy_from_slice(&fields);
    if on(9) {
        // Commands and flags have sixteen bits, but few values are valid.
        header[4] = 0;
        header[6] = 0;
    }
    let request = decode_request(&header).expect("the magic is right");
    assert_eq!(request.encode(), header);
    match validate(&request, &terms) {
        Ok(()) if matches!(request.command, Command::Disconnect | Command::Flush) => {}
        Ok(()) => {
            assert!(request.length > 0 && request.end().is_some_and(|end| end <= size_bytes));
            assert!(request.offset % u64::from(block_size_min) == 0 && request.length % block_size_min == 0);
            assert!(request.payload_len() <= block_size_max);
            assert!(!matches!(request.command, Command::Unknown(_)));
            let writes = matches!(request.command, Command::Write | Command::Trim | Command::WriteZeroes);
            assert!(!(writes && terms.info.read_only));
        }
        Err(Refusal::Reply(code)) => assert_ne!(code, ErrorCode::Io),
        Err(Refusal::Close(_)) => assert_eq!(request.command, Command::Write),
    }
});
