//! Tests of the binary format: the fixed bytes of each version, reading in blocks and from pipes,
//! truncated traces, and invalid input.

use std::io::Cursor;

use super::*;

fn record(at_ns: u64, op: Op, offset: u64, len: u32, disk: u16) -> Record {
    Record { at_ns, offset, len, op, disk }
}

fn four() -> [Record; 4] {
    [
        record(0, Op::Read, 4096, 8192, 0),
        record(1_000, Op::Write, (1 << 63) - 512, 512, 1),
        record(1_000, Op::Discard, 0, u32::MAX, 0),
        record(u64::MAX, Op::Flush, 0, 0, 258),
    ]
}

fn written(records: &[Record]) -> Vec<u8> {
    let mut writer = Writer::new(Cursor::new(Vec::new())).unwrap();
    for record in records {
        writer.push(record).unwrap();
    }
    writer.finish_counted(7).unwrap().into_inner()
}

/// The bytes of version 1. The bytes of a version may never change: old traces stay readable.
const GOLDEN_1: &str = "686f627472616365 01000000 00000000 0400000000000000 07000000000000000000000000000000 \
03010000 00000000000000000000000000000000000000000000000000000000 0010000000000000 00200000 00 00 \
0000e803000000000000 00feffffffffff7f 00020000 01 00 0100e803000000000000 0000000000000000 ffffffff 02 00 \
0000ffffffffffffffff 0000000000000000 00000000 03 00 0201";

/// The bytes of version 2, with the checksums of another implementation of CRC-32C.
const GOLDEN_2: &str = "686f627472616365 02000000 00000000 0400000000000000 07000000000000000000000000000000 \
03010000 71932102 000000000000000000000000000000000000000000000000 0010000000000000 00200000 00 00 \
0000e803000000000000 00feffffffffff7f 00020000 01 00 0100e803000000000000 0000000000000000 ffffffff 02 00 \
0000ffffffffffffffff 0000000000000000 00000000 03 00 02010400000000000000 fc536a18 0000000000000000 ff 01 \
0000";

fn bytes_of(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn read_all(bytes: &[u8]) -> anyhow::Result<Vec<Record>> {
    Reader::new(bytes)?.collect()
}

#[test]
fn the_bytes_are_those_of_the_specification() {
    assert_eq!(written(&four()), bytes_of(GOLDEN_2));
    for (version, golden) in [(1, GOLDEN_1), (2, GOLDEN_2)] {
        let bytes = bytes_of(golden);
        let mut reader = Reader::new(&bytes[..]).unwrap();
        let header = Header { version, records: 4, disks: 259, dropped: 7, started_unix_ns: 0 };
        assert_eq!(*reader.header(), header);
        assert_eq!(reader.by_ref().map(Result::unwrap).collect::<Vec<_>>(), four());
        assert_eq!((reader.torn_bytes(), reader.missing(), reader.truncation()), (0, 0, None));
    }
}

#[test]
fn every_changed_bit_of_a_complete_trace_is_found() {
    let records: Vec<Record> =
        (0..GROUP_RECORDS as u64 + 3).map(|n| record(n, Op::Read, n * 512, 512, 0)).collect();
    let bytes = written(&records);
    // Both headers and seals, the first and last records of both groups, and some in between.
    for at in (0..200).chain(GROUP_BYTES - 100..bytes.len()) {
        for bit in 0..8 {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            let mut reader = match Reader::new(&damaged[..]) {
                Ok(reader) => reader,
                Err(_) => continue,
            };
            let is_found = reader.by_ref().any(|record| record.is_err()) || reader.truncation().is_some();
            assert!(is_found, "bit {bit} of byte {at}");
        }
    }
    let mut damaged = bytes.clone();
    damaged[HEADER_BYTES + GROUP_BYTES + 30] ^= 1;
    let mut reader = Reader::new(&damaged[..]).unwrap();
    assert_eq!(reader.read_block().unwrap(), &records[..GROUP_RECORDS]);
    let error = format!("{:#}", reader.read_block().unwrap_err());
    assert!(error.contains("the checksum of records 1024 to 1026 is wrong"), "{error}");
    assert!(reader.read_block().unwrap().is_empty());
    // Traces cannot be joined with `cat`.
    let error = read_all(&[bytes.clone(), bytes].concat()).unwrap_err();
    assert!(format!("{error:#}").contains("checksum"), "{error:#}");
}

const BLOCK: usize = GROUPS_A_BLOCK * GROUP_RECORDS;

#[test]
fn more_than_a_block_goes_through_a_pipe() {
    let records: Vec<Record> =
        (0..2 * BLOCK as u64 + 3).map(|n| record(n, Op::Read, n * 512, 512, 0)).collect();
    let mut writer = Writer::new(Vec::new()).unwrap();
    records.iter().for_each(|record| writer.push(record).unwrap());
    let bytes = writer.finish().unwrap();
    let mut reader = Reader::new(&bytes[..]).unwrap();
    assert_eq!(reader.header().records, 0);
    assert_eq!(reader.by_ref().map(Result::unwrap).collect::<Vec<_>>(), records);

    let mut reader = Reader::new(&bytes[..]).unwrap();
    let mut sizes = Vec::new();
    while let block @ [_, ..] = reader.read_block().unwrap() {
        sizes.push(block.len());
    }
    assert_eq!(sizes, [BLOCK, BLOCK, 3]);
}

#[test]
fn a_truncated_end_is_reported_and_the_records_before_it_are_valid() {
    for golden in [GOLDEN_1, GOLDEN_2] {
        let bytes = bytes_of(golden);
        for cut in HEADER_BYTES..bytes.len() {
            let mut reader = Reader::new(&bytes[..cut]).unwrap();
            let whole = ((cut - HEADER_BYTES) / RECORD_BYTES).min(4);
            assert_eq!(reader.by_ref().map(Result::unwrap).collect::<Vec<_>>(), four()[..whole]);
            assert_eq!(reader.torn_bytes(), (cut - HEADER_BYTES) % RECORD_BYTES);
            assert_eq!(reader.missing(), 4 - whole as u64);
            assert!(reader.truncation().is_some());
        }
    }
    let bytes = bytes_of(GOLDEN_2);
    for cut in 0..HEADER_BYTES {
        let error = Reader::new(&bytes[..cut]).unwrap_err().to_string();
        assert!(error.contains("within its header"), "{error}");
    }
}

#[test]
fn invalid_input_is_refused_with_its_name() {
    let cases: [(usize, &[u8], &str); 8] = [
        (0, b"H", "not a hob trace"),
        (8, &[3], "version 3"),
        (15, &[1], "features"),
        (0x2a, &[2], "disks"),
        (64 + 20, &[4], "record 1 of the trace: this hob does not know the operation"),
        (64 + 24 + 15, &[0x80], "record 2 of the trace: the offset"),
        (64 + 16, &[0, 0, 0, 0], "record 1 of the trace: the length is 0"),
        (64 + 3 * 24 + 8, &[1], "record 4 of the trace: a flush with a range"),
    ];
    for (at, patch, expected) in cases {
        let mut bytes = bytes_of(GOLDEN_1);
        bytes[at..at + patch.len()].copy_from_slice(patch);
        let error = Reader::new(&bytes[..])
            .and_then(|mut reader| reader.try_for_each(|record| record.map(drop)))
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}, not {expected}");
    }
    let mut writer = Writer::new(Vec::new()).unwrap();
    let refused = writer.push(&record(0, Op::Read, 1 << 63, 512, 0)).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
    assert_eq!(writer.records(), 0);
}

#[test]
fn flags_that_may_be_ignored_are_ignored() {
    let mut bytes = bytes_of(GOLDEN_1);
    bytes[12..14].copy_from_slice(&[0xff, 0xff]);
    bytes[0x2c..0x40].fill(0xff);
    assert_eq!(Reader::new(&bytes[..]).unwrap().map(Result::unwrap).collect::<Vec<_>>(), four());
}
