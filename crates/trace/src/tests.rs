//! Tests of the whole trace reader: order of records, invalid times, disks, limits, compression. No
//! input causes a panic.

use std::io::{Cursor, Write};
use std::path::Path;

use proptest::prelude::*;

use super::profile::Profiler;
use super::*;

/// Complete result of a stream's reader.
#[derive(Debug)]
struct Read {
    records: Vec<Record>,
    error: Option<String>,
    skipped: Skipped,
    late: u64,
    disks: Vec<String>,
}

fn try_read(bytes: impl Into<Vec<u8>>, name: &str, options: &OpenOptions) -> anyhow::Result<Read> {
    let mut reader = open_stream(Cursor::new(bytes.into()), name, None, options)?;
    let (mut records, mut error) = (Vec::new(), None);
    for record in &mut reader {
        match record {
            Ok(record) => records.push(record),
            Err(found) => error = Some(found.to_string()),
        }
    }
    let (skipped, disks) = (reader.skipped().clone(), reader.disks().to_vec());
    Ok(Read { records, error, skipped, late: reader.late(), disks })
}

fn read(bytes: impl Into<Vec<u8>>, options: &OpenOptions) -> Read {
    try_read(bytes, "trace", options).unwrap()
}

fn refused(bytes: impl Into<Vec<u8>>, name: &str, options: &OpenOptions) -> String {
    try_read(bytes, name, options).unwrap_err().to_string()
}

fn csv(times_us: &[u64]) -> String {
    let lines = times_us.iter().enumerate().map(|(n, time)| format!("{time},R,{},512\n", n * 4096));
    format!("ts_us,op,offset,size\n{}", lines.collect::<String>())
}

fn at(read: &Read) -> Vec<u64> {
    read.records.iter().map(|record| record.at_ns / 1_000).collect()
}

fn order(read: &Read) -> Vec<u64> {
    read.records.iter().map(|record| record.offset / 4096).collect()
}

const SKIP: OpenOptions = OpenOptions {
    format: None,
    on_bad: OnBad::Skip,
    disk: None,
    page_bytes: None,
    limits: Limits { line_bytes_max: 100, window_records: 4, skipped_shown_max: 3 },
};

#[test]
fn time_begins_at_the_first_request_and_disorder_is_mended_within_the_window() {
    let found = read(csv(&[1_000, 1_003, 1_001, 1_001, 1_010, 1_005]), &SKIP);
    assert_eq!(at(&found), [0, 1, 1, 3, 5, 10]);
    assert_eq!(order(&found), [0, 2, 3, 1, 5, 4]);
    assert_eq!(found.late, 0);
}

#[test]
fn a_late_record_gets_the_previous_records_time() {
    let found = read(csv(&[100, 200, 300, 400, 500, 600, 150, 90, 700]), &SKIP);
    assert_eq!(at(&found), [0, 100, 200, 200, 200, 300, 400, 500, 600]);
    assert_eq!(order(&found), [0, 1, 2, 6, 7, 3, 4, 5, 8]);
    assert_eq!(found.late, 2);
}

#[test]
fn absurd_times_are_bad_wherever_they_stand() {
    let now = 1_700_000_000_000_000;
    for (n, times) in [
        [0, now, now + 1, now + 2, now + 3, now + 4],
        [now, now + 1, 0, now + 2, now + 3, now + 4],
        [now, now + 1, now + 2, now + 3, now + 4, 0],
        [now, now + 1, now + 2, now + 3, now + 4, 10 * now],
        [10 * now, now, now + 1, now + 2, now + 3, now + 4],
    ]
    .into_iter()
    .enumerate()
    {
        let found = read(csv(&times), &SKIP);
        assert_eq!(at(&found), [0, 1, 2, 3, 4], "{n}");
        assert_eq!((found.skipped.count, found.late), (1, 0), "{n}");
        let entry = &found.skipped.first[0];
        let line = times.iter().position(|time| *time == 0 || *time == 10 * now).unwrap() as u64 + 2;
        assert_eq!(entry.place, Place::Line(line), "{n}");
        assert!(entry.reason.starts_with("the time is implausible: "), "{}", entry.reason);
        let found = read(csv(&times), &OpenOptions { on_bad: OnBad::Fail, ..SKIP });
        let error = found.error.unwrap();
        assert!(error.starts_with(&format!("trace, line {line}: the time is implausible")), "{error}");
    }
}

#[test]
fn bad_entries_are_counted_and_the_first_few_shown() {
    let text = "ts_us,op,offset,size\n0,R,0,512\n1,R,-5,512\n2,R,9223372036854775808,512\n3,R,0,0\n\
                4,R,0,4294967296\n5,R,9223372036854775296,1024\n6,W,9223372036854775296,512\n7,X,0,512\n8,R,0\n";
    let found = read(text, &SKIP);
    assert_eq!(found.records.len(), 2);
    assert_eq!(found.skipped.count, 7);
    let shown: Vec<_> = found.skipped.first.iter().map(ToString::to_string).collect();
    assert_eq!(
        shown,
        [
            "line 3: the offset is negative: '-5'",
            "line 4: the offset is 2^63 or more",
            "line 5: the length is 0"
        ]
    );
    let found = read(text, &OpenOptions { on_bad: OnBad::Fail, ..SKIP });
    assert_eq!(found.records.len(), 1, "what precedes the error is handed over");
    assert_eq!(found.error.unwrap(), "trace, line 3: the offset is negative: '-5'");
}

#[test]
fn line_ends_may_be_mixed_and_lines_have_a_limit() {
    let long = format!("2,R,0,{:0>200}", 512);
    let text = format!("ts_us,op,offset,size\r\n0,R,0,512\r1,R,4096,512\n\r\n{long}\r\n3,R,8192,512");
    let found = read(text, &SKIP);
    assert_eq!(at(&found), [0, 1, 3]);
    assert_eq!(found.skipped.first[0].to_string(), "line 5: the line has 206 bytes, of at most 100");
}

#[test]
fn one_disk_of_several_keeps_its_number_and_begins_at_0() {
    let text = "5,R,0,512,1000\n7,W,0,512,2000\n5,R,4096,512,3000\n7,R,0,512,4000\n";
    let found = read(text, &OpenOptions { disk: Some(1), ..SKIP });
    assert_eq!(found.disks, ["5", "7"]);
    assert_eq!(at(&found), [0, 2_000]);
    assert!(found.records.iter().all(|record| record.disk == 1));
}

#[test]
fn a_file_that_is_no_trace_is_refused_by_name() {
    assert_eq!(refused("", "a.csv", &SKIP), "a.csv is empty");
    let error = refused("hello\nworld\n", "a.csv", &SKIP);
    assert!(error.starts_with("cannot detect the format of a.csv: pass one of hob, csv, msr"), "{error}");
    let error = refused("Timestamp,Hostname,Type,Offset\n", "a.csv", &SKIP);
    assert_eq!(error, "a.csv has a header line and no requests");
    let csv_format = OpenOptions { format: Some(FormatInfo::named("csv").unwrap()), ..SKIP };
    for header in
        ["ts_us,op,offset,size", "ts_us,op,offset,size\r\n", "\u{feff}ts_us,op,offset,size,disk\n\n"]
    {
        for options in [&SKIP, &csv_format] {
            assert_eq!(refused(header, "A.csv", options), "A.csv has a header line and no requests");
        }
    }
    assert_eq!(read("ts_us,op,offset,size\n0,R,0,512", &SKIP).records.len(), 1);
    let semicolons = "ts_us;op;offset;size\n1;R;0;512\n2;W;0;512\n";
    let error = refused(semicolons, "a.csv", &SKIP);
    assert!(error.contains("separated by semicolons: replace them with commas"), "{error}");
    for format in ["csv", "msr", "alibaba", "fio2"] {
        let named = OpenOptions { format: Some(FormatInfo::named(format).unwrap()), ..SKIP };
        let error = refused(semicolons, "A.csv", &named);
        let expected = format!("A.csv is not a trace in the format {format}: its columns are separated by");
        assert!(error.starts_with(&expected), "{error}");
    }
    // The columns of this format are separated by semicolons.
    let named = OpenOptions { format: Some(FormatInfo::named("blkreplay").unwrap()), ..SKIP };
    assert!(read(semicolons, &named).records.is_empty());
    assert_eq!(read("0.5; 8; 8; R; 0\n", &named).records.len(), 1);
    let mut tar = vec![0; 512];
    tar[257..262].copy_from_slice(b"ustar");
    assert!(refused(tar, "a.tar", &SKIP).contains("is a tar archive: unpack it"));
    assert!(refused("PK\u{3}\u{4}", "a", &SKIP).contains("zip"));
    assert!(open(Path::new("/"), &SKIP).unwrap_err().to_string().contains("directory"));
    let error = open(Path::new("/no/such/file"), &SKIP).unwrap_err().to_string();
    assert_eq!(error, "cannot open the trace /no/such/file");
    let error = FormatInfo::named("nonsense").unwrap_err().to_string();
    assert!(error.starts_with("'nonsense' is not a trace format; the formats are hob, csv"), "{error}");
    // If the format is given and has no header, an empty file is an empty trace.
    let named = OpenOptions { format: Some(FormatInfo::named("msr").unwrap()), ..SKIP };
    assert!(read("", &named).records.is_empty());
    let named = OpenOptions { format: Some(FormatInfo::named("hob").unwrap()), ..SKIP };
    assert_eq!(
        refused("", "a", &named),
        "a is not a trace in the format hob: it ends within its header, after 0 bytes of 64"
    );
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn compressed_data_that_is_cut_off_is_an_error_after_the_intact_records() {
    let times: Vec<u64> = (0..50_000).map(|n| n * 7919 % 1_000_003 + n * 1_000_000).collect();
    let whole = gzip(csv(&times).as_bytes());
    let found = read(whole.clone(), &SKIP);
    assert_eq!((found.records.len(), found.skipped.count), (50_000, 0));
    for on_bad in [OnBad::Skip, OnBad::Fail] {
        let found = read(&whole[..whole.len() / 2], &OpenOptions { on_bad, ..SKIP });
        let (requests, error) = (found.records.len(), found.error.unwrap());
        assert!(requests > 10_000, "{requests}");
        assert!(
            error.contains(&format!("after {requests} requests (line {}): the gzip", requests + 1)),
            "{error}"
        );
    }
    let error = refused(&whole[..15], "a.gz", &SKIP);
    assert!(
        error.starts_with("cannot read the trace a.gz after 0 requests: the gzip data is cut off"),
        "{error}"
    );
}

#[test]
fn damage_of_small_files_has_a_number_of_requests_and_a_plain_reason() {
    let text = csv(&(0..300).map(|n| n * n).collect::<Vec<u64>>());
    let zstd =
        ruzstd::encoding::compress_to_vec(text.as_bytes(), ruzstd::encoding::CompressionLevel::Fastest);
    let mut bzip2 = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    bzip2.write_all(text.as_bytes()).unwrap();
    let mut xz = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(1)).unwrap();
    xz.write_all(text.as_bytes()).unwrap();
    let compressed = [
        ("gzip", gzip(text.as_bytes())),
        ("zstd", zstd),
        ("bzip2", bzip2.finish().unwrap()),
        ("xz", xz.finish().unwrap()),
    ];
    for (name, bytes) in compressed {
        let mut changed = bytes.clone();
        changed[bytes.len() / 2] ^= 0x55;
        for damaged in [bytes[..bytes.len() / 2].to_vec(), changed] {
            let said = match try_read(damaged, "t", &SKIP) {
                Ok(found) => found.error.unwrap(),
                Err(error) => error.to_string(),
            };
            assert!(said.starts_with("cannot read the trace t after "), "{name}: {said}");
            assert!(said.contains(&format!(": the {name} data is cut off")), "{name}: {said}");
        }
    }
}

#[test]
fn a_name_of_compressed_data_with_other_content_is_an_error() {
    let error = refused("BZ\u{1}91AY", "t.csv.bz2", &SKIP);
    assert_eq!(
        error,
        "cannot read the trace t.csv.bz2 after 0 requests: it does not begin like compressed data"
    );
    assert_eq!(refused("", "t.csv.bz2", &SKIP), "t.csv.bz2 is empty");
    assert_eq!(try_read(csv(&[1, 2]), "t.csv.gz", &SKIP).unwrap().records.len(), 2);
}

#[test]
fn progress_is_known() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), gzip(csv(&[1, 2, 3]).as_bytes())).unwrap();
    let mut reader = open(file.path(), &SKIP).unwrap();
    assert_eq!((reader.format().name, reader.compression()), ("csv", Compression::Gzip));
    assert_eq!(reader.by_ref().count(), 3);
    assert_eq!(Some(reader.bytes_read()), reader.bytes());
    assert!(reader.next().is_none());
}

#[test]
fn written_records_are_read_back() {
    let records: Vec<Record> = (0..10_000_u64)
        .map(|n| {
            let op = [Op::Read, Op::Write, Op::Discard, Op::Flush][n as usize % 4];
            let (offset, len) = if op == Op::Flush { (0, 0) } else { (n * 512, 512 + n as u32) };
            Record { at_ns: n * 3_000, offset, len, op, disk: (n % 3) as u16 }
        })
        .collect();
    let mut binary = binary::Writer::new(Vec::new()).unwrap();
    let mut csv = csv::Writer::with_disks(Vec::new()).unwrap();
    for record in &records {
        binary.push(record).unwrap();
        csv.push(record).unwrap();
    }
    for bytes in [binary.finish().unwrap(), csv.finish().unwrap()] {
        let found = read(bytes, &SKIP);
        assert_eq!(found.records, records);
        assert_eq!((found.disks.len(), found.skipped.count), (3, 0));
    }
}

#[test]
fn a_binary_trace_is_read_forgivingly() {
    let mut writer = binary::Writer::new(Cursor::new(Vec::new())).unwrap();
    for n in 0..5 {
        writer.push(&Record { at_ns: n, offset: n * 512, len: 512, op: Op::Read, disk: 0 }).unwrap();
    }
    let mut bytes = writer.finish_counted(0).unwrap().into_inner();
    bytes.truncate(bytes.len() - 24 - 24 - 1);
    bytes[64 + 24 + 20] = 9;
    let found = read(bytes, &SKIP);
    assert_eq!(found.records.len(), 2);
    let shown: Vec<_> = found.skipped.first.iter().map(ToString::to_string).collect();
    assert_eq!(
        shown,
        [
            "record 2: this hob does not know the operation",
            "record 3: the trace was cut off within the next record, after 23 bytes of it",
            "record 3: the trace ends after 3 records; its header says 5"
        ]
    );
}

#[test]
fn a_wrong_checksum_ends_a_trace_with_an_error_even_if_it_is_compressed() {
    let mut writer = binary::Writer::new(Vec::new()).unwrap();
    for n in 0..2000 {
        writer.push(&Record { at_ns: n, offset: n * 512, len: 512, op: Op::Read, disk: 0 }).unwrap();
    }
    let mut bytes = writer.finish().unwrap();
    bytes[64 + 1500 * 24] ^= 1;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&bytes).unwrap();
    for bytes in [bytes, gzip.finish().unwrap()] {
        let found = read(bytes, &SKIP);
        assert_eq!(found.records.len(), 1023);
        assert_eq!(
            found.error.unwrap(),
            "cannot read the trace trace after 1023 requests (record 1023): the checksum of records 1024 to 2000 \
             is wrong: the file is damaged; record or copy the trace again"
        );
    }
    let found = read(binary::Header::default().encode(), &SKIP);
    assert!(found.skipped.first[0].reason.contains("cut off"), "{:?}", found.skipped.first);
}

/// Checks that every record has the properties that [`Record`] promises, and that the records are
/// in order of time.
fn check_promises(bytes: &[u8], format: Option<&'static FormatInfo>) -> Result<(), TestCaseError> {
    let options = OpenOptions { format, ..SKIP };
    let Ok(mut reader) = open_stream(Cursor::new(bytes.to_vec()), "x", None, &options) else { return Ok(()) };
    let (mut profiler, mut last) = (Profiler::default(), 0);
    for record in &mut reader {
        // Invalid entries are skipped, but a wrong checksum ends the trace.
        let Ok(record) = record else { break };
        prop_assert_eq!(record.check(), Ok(()));
        prop_assert!(record.at_ns >= last);
        last = record.at_ns;
        // A request of 4 GiB touches a million sectors.
        if record.len < 1 << 24 {
            profiler.add(&record);
        }
    }
    profiler.finish();
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        check_promises(&bytes, None)?;
        for format in FORMATS {
            check_promises(&bytes, Some(format))?;
        }
    }

    #[test]
    fn lines_of_random_numbers_never_panic(
        lines in proptest::collection::vec(
            (
                proptest::collection::vec(
                    prop_oneof![
                        any::<u64>().prop_map(|n| n.to_string()),
                        any::<i16>().prop_map(|n| n.to_string()),
                        any::<f64>().prop_map(|n| n.to_string()),
                        "[RWQDF+]|Read|Write|8,0|getChunkData|trim|wait|start",
                    ],
                    1..12,
                ),
                prop_oneof![Just(","), Just(" "), Just(" ; ")],
                prop_oneof![Just("\n"), Just("\r\n"), Just("\r")],
            ),
            0..20,
        )
    ) {
        let text: String = lines.iter().map(|(words, separator, end)| words.join(separator) + end).collect();
        for format in FORMATS {
            check_promises(text.as_bytes(), Some(format))?;
        }
    }

    #[test]
    fn binary_formats_survive_any_change(
        changes in proptest::collection::vec((0_usize..2_000, any::<u8>()), 0..20),
        cut in 0_usize..2_000,
    ) {
        for (name, mut bytes) in formats::binary_samples() {
            for (at, byte) in &changes {
                let at = at % bytes.len();
                bytes[at] = *byte;
            }
            bytes.truncate(bytes.len().min(cut));
            check_promises(&bytes, Some(FormatInfo::named(name).unwrap()))?;
        }
    }
}

/// Reads the traces of the directory that `HOB_TRACES` names, and prints their properties.
#[test]
fn traces_at_hand_can_be_read() {
    let Some(directory) = std::env::var_os("HOB_TRACES") else {
        println!("skipped: HOB_TRACES names no directory with traces");
        return;
    };
    let mut paths: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let mut read = 0;
    for path in paths.iter().filter(|path| path.is_file()) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let mut reader = match open(path, &OpenOptions::default()) {
            Ok(reader) => reader,
            Err(error) => {
                println!("{name}: {error}");
                continue;
            }
        };
        let mut profiler = Profiler::default();
        (&mut reader).for_each(|record| profiler.add(&record.unwrap()));
        let found = profiler.finish();
        let (moved, ws) = (found.bytes_read + found.bytes_written, found.footprint.sectors);
        println!(
            "{name}: {} {} requests, {:.1} % reads, {ws} sectors, {:.2} GiB, {} ({:.1} %), {:.1} s, reuse {:.1} %, \
             sequential {:.1} %, {} disks; skipped {}, ignored {}, late {}{}",
            reader.format().name,
            found.requests,
            found.read_percent,
            moved as f64 / (1_u64 << 30) as f64,
            found.sizes.dominant_bytes,
            found.sizes.dominant_percent,
            found.duration_ns as f64 / 1e9,
            found.footprint.reuse_percent,
            found.sequential.requests_percent,
            found.disks,
            reader.skipped().count,
            reader.ignored(),
            reader.late(),
            reader.skipped().first.first().map(|entry| format!(", {entry}")).unwrap_or_default(),
        );
        assert!(found.requests > 0 && reader.skipped().count == 0, "{name}: {:?}", reader.skipped());
        read += 1;
    }
    assert!(read > 0, "no trace in the directory could be read");
}
