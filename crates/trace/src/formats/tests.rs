//! Tests each format with synthetic data: detection by content, correct parsing, errors for invalid
//! lines, and truncation at any position.

use std::io::Cursor;

use super::super::{OnBad, OpenOptions, Record, open_stream};
use super::*;

fn read_with(bytes: &[u8], options: OpenOptions) -> (Vec<Record>, super::super::TraceReader) {
    let mut reader = open_stream(Cursor::new(bytes.to_vec()), "x", None, &options).unwrap();
    let records = reader.by_ref().map(Result::unwrap).collect();
    (records, reader)
}

fn record(at_us: u64, op: Op, offset: u64, len: u32, disk: u16) -> Record {
    Record { at_ns: at_us * 1_000, offset, len, op, disk }
}

/// A text format's sample, its expected records, and an invalid line.
struct Sample {
    format: &'static str,
    text: &'static str,
    records: Vec<Record>,
    disks: &'static [&'static str],
    ignored: u64,
    bad: &'static [(&'static str, &'static str)],
}

use crate::Op::{Discard, Flush, Read, Write};

fn samples() -> Vec<Sample> {
    vec![
        Sample {
            format: "csv",
            text: "ts_us,op,offset,size\n10,R,4096,8192\n10.5,w,0,512\n12,D,0,65536\n13,F,0,0\n",
            records: vec![
                record(0, Read, 4096, 8192, 0),
                Record { at_ns: 500, ..record(0, Write, 0, 512, 0) },
                record(2, Discard, 0, 65536, 0),
                record(3, Flush, 0, 0, 0),
            ],
            disks: &[],
            ignored: 0,
            bad: &[("13,R,1", "3 columns instead of 4"), ("ts_us,size", "the first line is neither")],
        },
        Sample {
            format: "msr",
            text: "128166372003061629,hm,1,Read,383496192,32768,413\n\
                   128166372016382155,hm,0,Write,2822144,4096,541\n",
            records: vec![
                record(0, Read, 383_496_192, 32_768, 0),
                Record { at_ns: 1_332_052_600, ..record(0, Write, 2_822_144, 4_096, 1) },
            ],
            disks: &["hm_1", "hm_0"],
            ignored: 0,
            bad: &[
                ("128166372003061629,hm,1,Seek,0,512,1", "the operation is unknown: 'Seek'"),
                ("128166372003061629,hm,x,Read,0,512,1", "the disk is no number: 'x'"),
                ("1281663720030616290,hm,1,Read,0,512,1", "the time is too large"),
            ],
        },
        Sample {
            format: "spc",
            text: "0,20941264,8192,W,0.551706\n1,20939840,8192,r,0.554041,x\n",
            records: vec![
                record(0, Write, 20_941_264 * 512, 8192, 0),
                record(2_335, Read, 20_939_840 * 512, 8192, 1),
            ],
            disks: &["0", "1"],
            ignored: 0,
            bad: &[("0,36028797018963968,512,R,0.6", "the offset is too large")],
        },
        Sample {
            format: "blkparse",
            text: "  8,0    3        1     0.000000000   697  G   W 223490 + 8 [kjournald]\n\
                   \x20 8,0    3        2     0.000001829   697  Q   W 223490 + 8 [kjournald]\n\
                   \x20 8,0    0        0     0.000002000     0  m   N cfq697 insert_request\n\
                   \x20 8,16   1        7     0.000003829   800  Q  RA 64 + 16 [cat]\n\
                   \x20 8,0    1        8     0.000004829   800  Q   D 0 + 2048 [fstrim]\n\
                   \x20 8,0    1        9     0.000005829   800  Q FWS [sync]\n\
                   \x20 8,0    1       10     0.000006829   800  Q FWFSM 8 + 8 [sync]\n\
                   \x20 8,0    3        3     0.000009829     0  C   W 223490 + 8 [0]\n\
                   CPU0 (8,0):\n Reads Queued:           0,        0KiB\n\nTotal (8,0):\n",
            records: vec![
                record(0, Write, 223_490 * 512, 4096, 0),
                record(2, Read, 64 * 512, 8192, 1),
                record(3, Discard, 0, 1 << 20, 0),
                record(4, Flush, 0, 0, 0),
                record(5, Write, 4096, 4096, 0),
            ],
            disks: &["8,0", "8,16"],
            ignored: 3,
            bad: &[],
        },
        Sample {
            format: "fio2",
            text: "fio version 2 iolog\n/dev/sdb add\n/dev/sdb open\n/dev/sdb read 4096 8192\n/dev/sdb wait 250 0\n\
                   /dev/sdb write 0 512\n/dev/sdb sync 0 0\n/dev/sdb trim 65536 4096\n/dev/sdb close\n",
            records: vec![
                record(0, Read, 4096, 8192, 0),
                record(250, Write, 0, 512, 0),
                record(250, Flush, 0, 0, 0),
                record(250, Discard, 65536, 4096, 0),
            ],
            disks: &["/dev/sdb"],
            ignored: 4,
            bad: &[
                ("/dev/sdb read 0", "the length is missing"),
                ("/dev/sdb jump 0 0", "the action is unknown"),
            ],
        },
        Sample {
            format: "fio3",
            text: "fio version 3 iolog\n0 a add\n1 b add\n100 a read 4096 8192\n350 b write 0 512\n351 b datasync 0 0\n",
            records: vec![
                record(0, Read, 4096, 8192, 0),
                record(250, Write, 0, 512, 1),
                record(251, Flush, 0, 0, 1),
            ],
            disks: &["a", "b"],
            ignored: 2,
            bad: &[
                ("352 a wait 10 0", "the action is unknown"),
                ("x a read 0 512", "the time is no number: 'x'"),
            ],
        },
        Sample {
            format: "alibaba",
            text: "419,W,8792731648,16384,1577808144360767\n725,R,59110326272,360448,1577808144360813\n",
            records: vec![
                record(0, Write, 8_792_731_648, 16_384, 0),
                record(46, Read, 59_110_326_272, 360_448, 1),
            ],
            disks: &["419", "725"],
            ignored: 0,
            bad: &[("419,W,8792731648,16384", "4 columns instead of 5")],
        },
        Sample {
            format: "tencent",
            text: "1538323200,4247200,128,1,1058\n1538323199,13896880,8,0,1063\n",
            records: vec![
                record(0, Read, 13_896_880 * 512, 4096, 1),
                record(1_000_000, Write, 4_247_200 * 512, 65_536, 0),
            ],
            disks: &["1058", "1063"],
            ignored: 0,
            bad: &[("1538323200,4247200,128,2,1058", "the type is unknown: '2'")],
        },
        Sample {
            format: "systor17",
            text: "Timestamp,Response,IOType,LUN,Offset,Size\n1456095145.133076000,0.000806000,R,0,899056122368,131072\n\
                   1456095145.126285000,0.008044000,W,0,4256049987072,122880\n1456095145.2,0.1,,0,0,0\n",
            records: vec![
                record(0, Write, 4_256_049_987_072, 122_880, 0),
                record(6_791, Read, 899_056_122_368, 131_072, 0),
            ],
            disks: &["0"],
            ignored: 1,
            bad: &[("-1456095145.1,0.1,R,0,0,512", "the time is negative")],
        },
        Sample {
            format: "blkreplay",
            text: "Copyright holder; all rights\n\nany text\n\
                   start ; sector; length ; op ;  replay_delay ; replay_duration=0\n\
                   \x20     0.000000000 ;     37766853 ;   64 ; W ; 0.0 ; 0.0\n\
                   \x20     0.449518165 ;     37766917 ;   14 ; RA ; 0.0 ; 0.0\n",
            records: vec![
                record(0, Write, 37_766_853 * 512, 32_768, 0),
                Record { at_ns: 449_518_165, ..record(0, Read, 37_766_917 * 512, 7_168, 0) },
            ],
            disks: &[],
            ignored: 0,
            bad: &[("0.5 ; x ; 8 ; W ; 0.0 ; 0.0", "the sector is no number: 'x'")],
        },
        Sample {
            format: "disksim",
            text: "0.000 0 657729 16 1\n11.565 1 31244784 8 0\n12.000 0 512 8 3\n",
            records: vec![
                record(0, Read, 657_729 * 512, 8192, 0),
                record(11_565, Write, 31_244_784 * 512, 4096, 1),
                record(12_000, Read, 512 * 512, 4096, 0),
            ],
            disks: &["0", "1"],
            ignored: 0,
            bad: &[("13.0 0 0 8 g", "the flags are not a hexadecimal number")],
        },
        Sample {
            format: "mqsim",
            text: "11413000 0 657728 16 1\n11565000 1 31244784 64 0\n",
            records: vec![
                record(0, Read, 657_728 * 512, 8192, 0),
                record(152, Write, 31_244_784 * 512, 32_768, 1),
            ],
            disks: &["0", "1"],
            ignored: 0,
            bad: &[("11565000 1 31244784 64 2", "the type is unknown: '2'")],
        },
        Sample {
            format: "replayer",
            text: "0.000 0 200626176 4096 0\n223.412 0 3159347200 36864 1\n",
            records: vec![
                record(0, Write, 200_626_176, 4096, 0),
                record(223_412, Read, 3_159_347_200, 36_864, 0),
            ],
            disks: &["0"],
            ignored: 0,
            bad: &[("223.412 0 3159347200 36864", "4 columns instead of 5")],
        },
        Sample {
            format: "arc",
            text: "110765 64 0 0\n64 1 0 1\n",
            records: vec![record(0, Read, 110_765 * 512, 32_768, 0), record(1_000, Read, 64 * 512, 512, 0)],
            disks: &[],
            ignored: 0,
            bad: &[
                ("1 2 3", "3 columns instead of 4"),
                ("1 2 3 x", "the request's number is no number: 'x'"),
            ],
        },
    ]
}

#[test]
fn each_text_format_is_detected_and_parsed() {
    for sample in samples() {
        for text in
            [sample.text.to_owned(), sample.text.replace('\n', "\r\n"), sample.text.replace('\n', "\n\r")]
        {
            let (records, reader) = read_with(text.as_bytes(), OpenOptions::default());
            assert_eq!(reader.format().name, sample.format);
            assert_eq!(records, sample.records, "{}", sample.format);
            assert_eq!(reader.disks(), sample.disks, "{}", sample.format);
            assert_eq!(reader.ignored(), sample.ignored, "{}", sample.format);
            assert_eq!((reader.skipped().count, reader.late()), (0, 0), "{}", sample.format);
        }
    }
}

#[test]
fn each_text_format_names_its_bad_lines() {
    for sample in samples() {
        for (line, reason) in sample.bad {
            let text = format!("{}{line}\n", sample.text);
            let number = text.lines().count() as u64;
            let format = Some(FormatInfo::named(sample.format).unwrap());
            let (records, reader) =
                read_with(text.as_bytes(), OpenOptions { format, ..OpenOptions::default() });
            assert_eq!(records, sample.records, "{}", sample.format);
            assert_eq!(reader.skipped().count, 1, "{}: {line}", sample.format);
            let said = reader.skipped().first[0].to_string();
            assert!(said.starts_with(&format!("line {number}: {reason}")), "{}: {said}", sample.format);

            let options = OpenOptions { format, on_bad: OnBad::Fail, ..OpenOptions::default() };
            let mut reader = open_stream(Cursor::new(text.into_bytes()), "x", None, &options).unwrap();
            let error = reader.find_map(Result::err).unwrap().to_string();
            assert!(error.starts_with(&format!("x, line {number}: {reason}")), "{error}");
            assert!(reader.next().is_none());
        }
    }
}

#[test]
fn each_text_format_may_be_cut_off_anywhere() {
    for sample in samples() {
        let format = Some(FormatInfo::named(sample.format).unwrap());
        for cut in 0..sample.text.len() {
            if !sample.text.is_char_boundary(cut) {
                continue;
            }
            let (bytes, options) =
                (&sample.text.as_bytes()[..cut], OpenOptions { format, ..OpenOptions::default() });
            let opened = open_stream(Cursor::new(bytes.to_vec()), "x", None, &options);
            if opened.is_err_and(|error| error.to_string().contains("a header line and no requests")) {
                continue;
            }
            let (records, reader) = read_with(bytes, options);
            let whole = sample.text[..cut].lines().count() as u64;
            assert!(
                records.len() as u64 + reader.skipped().count + reader.ignored() <= whole,
                "{}",
                sample.format
            );
        }
    }
}

#[test]
fn tectonic_blocks_have_places_and_counts() {
    let head = "op_time,block_id,block_id_size,io_size,io_offset,user_name,user_namespace,op_name,op_count,host_name,rs_shard_id\n";
    let text = format!(
        "{head}100,aa,40,4096,8192,1,2,getChunkData.Permanent,1,77,4\n101,aa,40,100,0,1,2,putChunk.NotInitialized,3,77,4\n\
         102,aa,40,100,0,1,2,getChunkData.Permanent,1,77,5\n103,bb,40,100,0,1,2,listBlocks,1,78,5\n\
         104,bb,40,100,16777200,1,2,putChunk.X,1,78,5\n105,bb,40,100,0,1,2,putChunk.X,0,78,5\n"
    );
    let (records, reader) = read_with(text.as_bytes(), OpenOptions::default());
    assert_eq!(reader.format().name, "tectonic");
    let base = records[0].offset - 8192;
    assert_eq!(base % (1 << 24), 0);
    assert_eq!(records[..4], {
        let write = record(1_000_000, Write, base, 100, 0);
        [record(0, Read, base + 8192, 4096, 0), write, write, write]
    });
    assert_eq!(records.len(), 5);
    assert_ne!(records[4].offset, base, "another shard is another block");
    assert_eq!((reader.ignored(), reader.disks()), (1, &["77".to_owned()][..]));
    let reasons: Vec<_> = reader.skipped().first.iter().map(ToString::to_string).collect();
    assert_eq!(reasons[0], "line 6: the request ends beyond 16 MiB of its block");
    assert!(reasons[1].starts_with("line 7: the count is not 1"), "{}", reasons[1]);
}

#[test]
fn pages_may_be_larger_than_512_bytes() {
    let options = OpenOptions { page_bytes: Some(4096), ..OpenOptions::default() };
    let (records, _) = read_with(b"10 2 0 0\n11 1 0 1\n", options);
    assert_eq!(records[0], record(0, Read, 40_960, 8192, 0));
    let (records, _) = read_with(b"0,10,8192,W,0.5\n0,11,512,R,0.6\n", options);
    assert_eq!((records[0].offset, records[0].len), (40_960, 8192));
}

#[test]
fn blkparse_falls_back_on_other_events() {
    let text = "8,0 3 1 0.1 697 D W 8 + 8 [a]\n8,0 3 2 0.2 697 C W 8 + 8 [0]\nnonsense\n";
    let (records, reader) = read_with(text.as_bytes(), OpenOptions::default());
    assert_eq!(records, [record(0, Write, 4096, 4096, 0)]);
    assert_eq!(
        reader.skipped().first[0].to_string(),
        "line 3: the line does not begin with a device, like 8,0"
    );
}

fn vscsi1(command: u16, block: u64, len: u32, time_us: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(7_u32.to_le_bytes());
    bytes.extend(len.to_le_bytes());
    bytes.extend(1_u32.to_le_bytes());
    bytes.extend(command.to_le_bytes());
    bytes.extend(0x0100_u16.to_le_bytes());
    bytes.extend(block.to_le_bytes());
    bytes.extend(time_us.to_le_bytes());
    bytes
}

fn vscsi2(command: u16, block: u64, len: u32, time_us: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(command.to_le_bytes());
    bytes.extend(0x0200_u16.to_le_bytes());
    bytes.extend(7_u32.to_le_bytes());
    bytes.extend(len.to_le_bytes());
    bytes.extend(1_u32.to_le_bytes());
    bytes.extend(block.to_le_bytes());
    bytes.extend(time_us.to_le_bytes());
    bytes.extend(300_u64.to_le_bytes());
    bytes
}

#[test]
fn vscsi_records_of_both_versions_are_read() {
    for (name, make) in [("vscsi1", vscsi1 as fn(u16, u64, u32, u64) -> Vec<u8>), ("vscsi2", vscsi2)] {
        let records = [
            make(0x2a, 100, 4096, 1_000_000),
            make(0x88, 200, 8192, 1_000_010),
            make(0x35, 0, 0, 1_000_020),
            make(0x12, 0, 36, 1_000_030),
            make(0x28, u64::MAX, 512, 1_000_040),
        ];
        let bytes = records.concat();
        let (found, reader) = read_with(&bytes, OpenOptions::default());
        assert_eq!(reader.format().name, name);
        assert_eq!(
            found,
            [
                record(0, Write, 51_200, 4096, 0),
                record(10, Read, 102_400, 8192, 0),
                record(20, Flush, 0, 0, 0)
            ]
        );
        assert_eq!(reader.ignored(), 1);
        assert!(reader.skipped().first[0].to_string().starts_with("record 5: the offset is too large"));
        let size = bytes.len() / records.len();
        let (found, reader) = read_with(&bytes[..2 * size + 5], OpenOptions::default());
        assert_eq!(found.len(), 2);
        let said = reader.skipped().first[0].to_string();
        assert_eq!(said, format!("record 3: the trace was cut off after 5 of {size} bytes"));
    }
}

fn oracle(time: u32, object: u64, size: u32, next: i64) -> Vec<u8> {
    [&time.to_le_bytes()[..], &object.to_le_bytes(), &size.to_le_bytes(), &next.to_le_bytes()].concat()
}

#[test]
fn oracle_general_is_detected_and_parsed() {
    let mut bytes = [oracle(5, 10, 4096, 2), oracle(6, 11, 512, -1), oracle(9, 10, 4096, -1)].concat();
    let (records, reader) = read_with(&bytes, OpenOptions::default());
    assert_eq!(reader.format().name, "oracle-general");
    assert_eq!(
        records,
        [
            record(0, Read, 5120, 4096, 0),
            record(1_000_000, Read, 5632, 512, 0),
            record(4_000_000, Read, 5120, 4096, 0)
        ]
    );
    bytes.extend(oracle(9, u64::MAX, 1, -1));
    bytes.extend([1, 2]);
    let (records, reader) = read_with(&bytes, OpenOptions::default());
    assert_eq!((records.len(), reader.skipped().count), (3, 2));
}

struct Blk {
    at_ns: u64,
    sector: u64,
    bytes: u32,
    action: u32,
    more: &'static [u8],
}

fn blktrace(little: bool, records: &[Blk]) -> Vec<u8> {
    let mut out = Vec::new();
    let device: u32 = 8 << 20 | 16;
    for Blk { at_ns, sector, bytes, action, more } in records {
        let start = out.len();
        let words = |words: &[u32], out: &mut Vec<u8>| {
            words
                .iter()
                .for_each(|word| out.extend(if little { word.to_le_bytes() } else { word.to_be_bytes() }));
        };
        let long = |long: u64| if little { long.to_le_bytes() } else { long.to_be_bytes() };
        words(&[0x6561_7407, 1], &mut out);
        out.extend(long(*at_ns));
        out.extend(long(*sector));
        words(&[*bytes, *action, 697, device, 0], &mut out);
        out.extend([0, 0]);
        let length = more.len() as u16;
        out.extend(if little { length.to_le_bytes() } else { length.to_be_bytes() });
        assert_eq!(out.len() - start, 48);
        out.extend(*more);
    }
    out
}

fn blk_sample() -> Vec<Blk> {
    let blk = |at_ns, sector, bytes, action| Blk { at_ns, sector, bytes, action, more: b"" };
    vec![
        Blk { more: b"process!", ..blk(0, 0, 0, 1 << 26) },
        blk(5_000, 8, 4096, 1 << 20 | 1 << 16 | 1),
        Blk { more: b"cgroup id", ..blk(6_000, 16, 512, 1 << 20 | 1 << 17 | 1 << 8 | 1) },
        blk(6_500, 16, 512, 1 << 22 | 1 << 17 | 7),
        blk(7_000, 0, 1 << 20, 1 << 29 | 1 << 17 | 1),
        blk(8_000, 0, 0, 1 << 18 | 1 << 17 | 1),
    ]
}

#[test]
fn blktrace_is_read_in_both_byte_orders() {
    for little in [true, false] {
        let bytes = blktrace(little, &blk_sample());
        let (records, reader) = read_with(&bytes, OpenOptions::default());
        assert_eq!(reader.format().name, "blktrace");
        assert_eq!(
            records,
            [
                record(0, Read, 4096, 4096, 0),
                record(1, Write, 8192, 512, 0),
                record(2, Discard, 0, 1 << 20, 0),
                record(3, Flush, 0, 0, 0)
            ]
        );
        assert_eq!((reader.ignored(), reader.disks()), (2, &["8,16".to_owned()][..]));
        let cut = &bytes[..bytes.len() - 10];
        let (records, reader) = read_with(cut, OpenOptions::default());
        assert_eq!((records.len(), reader.skipped().count), (3, 1));
        let mut wrong = bytes.clone();
        wrong[48 + 8] ^= 0xff;
        let (records, reader) = read_with(&wrong, OpenOptions::default());
        assert!(records.is_empty());
        let said = reader.skipped().first[0].to_string();
        assert_eq!(said, "record 2: the magic number is wrong; the rest of the trace is not read");
        let mut version = bytes;
        version[if little { 0 } else { 3 }] = 8;
        let error = open_stream(Cursor::new(version), "x", None, &OpenOptions::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "x is not a trace in the format blktrace: its version is 8; hob reads only version 7"
        );
    }
}

const SRT_HEADER: &str = "$$TR_IOREC-1.3 (a test)\0\nversion = 1.3;\ndisks = {\n 0 -> {\n disktype = hp335h,\n sectorsize  = 256,\n \
    sections = {\n 8 -> {\n \"/\",\n size = (0 1)\n }\n }\n },\n 1 -> {\n disktype = x,\n sectorsize = 1024,\n }\n};\n\x0c";

fn srt(seconds: u32, micros: u32, bytes: u32, block: u32, disk: u32, flags: u32) -> Vec<u8> {
    let words =
        [56, 0x0004_0001, seconds, micros, 1, 2, bytes, block, 8 << 24 | disk << 8 | 7, 4, 0, flags, 0, 1];
    words.into_iter().flat_map(u32::to_be_bytes).collect()
}

#[test]
fn srt_knows_its_sectors() {
    let mut bytes = SRT_HEADER.as_bytes().to_vec();
    bytes.extend(srt(10, 5, 1024, 100, 1, 0x8010a));
    bytes.extend(srt(10, 9, 8192, 100, 0, 0x1b));
    let (records, reader) = read_with(&bytes, OpenOptions::default());
    assert_eq!(reader.format().name, "srt");
    assert_eq!(records, [record(0, Write, 102_400, 1024, 1), record(4, Read, 25_600, 8192, 0)]);
    assert_eq!(reader.disks(), ["0", "1"]);
    let (records, reader) = read_with(&bytes[..bytes.len() - 1], OpenOptions::default());
    assert_eq!(
        (records.len(), reader.skipped().first[0].to_string()),
        (1, "record 2: the trace was cut off within the record".into())
    );
    bytes.extend([0, 0, 0, 3, 9, 9]);
    let (records, reader) = read_with(&bytes, OpenOptions::default());
    assert_eq!(records.len(), 2);
    let said = reader.skipped().first[0].to_string();
    assert_eq!(said, "record 3: its size of 3 bytes is invalid; the rest of the trace is not read");
}

/// Traces in the binary formats, which tests damage.
pub(in super::super) fn binary_samples() -> Vec<(&'static str, Vec<u8>)> {
    let mut hob = super::super::binary::Writer::new(Vec::new()).unwrap();
    (0..20).for_each(|n| hob.push(&record(n, Write, n * 512, 512, 1)).unwrap());
    let srt = [SRT_HEADER.as_bytes().to_vec(), (0..20).flat_map(|n| srt(n, 0, 512, n, 0, 1)).collect()];
    vec![
        ("hob", hob.finish().unwrap()),
        ("vscsi1", (0..20).flat_map(|n| vscsi1(0x2a, n, 512, n)).collect()),
        ("vscsi2", (0..20).flat_map(|n| vscsi2(0x2a, n, 512, n)).collect()),
        ("oracle-general", (0..20).flat_map(|n| oracle(n, u64::from(n), 512, -1)).collect()),
        ("blktrace", blktrace(true, &blk_sample()).repeat(4)),
        ("srt", srt.concat()),
    ]
}

#[test]
fn names_are_unique_and_every_row_is_filled() {
    let mut names: Vec<_> = FORMATS.iter().map(|format| format.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), FORMATS.len());
    for format in FORMATS {
        assert!(
            format
                .name
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        );
        assert!(!format.summary.is_empty() && !format.source.is_empty());
        assert_eq!(FormatInfo::named(format.name).unwrap().name, format.name);
    }
}

/// The header line is sufficient to detect hob's CSV format, even if the trace has no valid record
/// or no record at all.
#[test]
fn the_header_of_hobs_csv_settles_its_format() {
    let text = "ts_us,op,offset,size\nx\n-1,R,0,1\n1,R,9223372036854775808,1\n5,R,0\r\n";
    let (records, reader) = read_with(text.as_bytes(), OpenOptions::default());
    assert_eq!((records.len(), reader.format().name, reader.skipped().count), (0, "csv", 4));
}
