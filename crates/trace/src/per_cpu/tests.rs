//! Tests the merging of per-CPU files: the order of the records, files of idle processors, and
//! damaged files.

use std::io::Write;
use std::path::Path;

use super::super::{OpenOptions, open as open_trace};
use super::*;

/// Returns a queue event with `more` additional bytes.
fn event(at_ns: u64, sector: u64, more: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(0x6561_7407_u32.to_le_bytes());
    bytes.extend(0_u32.to_le_bytes());
    bytes.extend(at_ns.to_le_bytes());
    bytes.extend(sector.to_le_bytes());
    bytes.extend(4096_u32.to_le_bytes());
    bytes.extend(((1_u32 << 16) | 1).to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend((8_u32 << 20).to_le_bytes());
    bytes.extend([0; 6]);
    bytes.extend((more as u16).to_le_bytes());
    bytes.extend(vec![0xee; more]);
    bytes
}

/// Writes the files of processors 0, 1 (idle), 2 and 10, with the times 0 to 89.
fn written(directory: &Path) {
    let file = |number: u32| directory.join(format!("sda.blktrace.{number}"));
    let of = |remainder: u64| {
        let times = (0..90).filter(move |at| at % 3 == remainder);
        times.flat_map(|at| event(at, at * 8, (at % 5) as usize)).collect::<Vec<u8>>()
    };
    for (number, bytes) in [(0, of(1)), (1, Vec::new()), (2, of(0)), (10, of(2))] {
        std::fs::write(file(number), bytes).unwrap();
    }
    std::fs::write(directory.join("sda.blktrace.x"), "another file").unwrap();
    std::fs::write(directory.join("sdb.blktrace.0"), event(7, 0, 0)).unwrap();
}

#[test]
fn one_file_or_the_common_name_opens_all_in_order_of_time() {
    let directory = tempfile::tempdir().unwrap();
    written(directory.path());
    for name in ["sda.blktrace.0", "sda.blktrace.1", "sda.blktrace.10", "sda.blktrace", "sda"] {
        let mut reader = open_trace(&directory.path().join(name), &OpenOptions::default()).unwrap();
        assert_eq!((reader.files(), reader.format().name), (4, "blktrace"));
        let records: Vec<(u64, u64)> =
            reader.by_ref().map(|record| record.map(|r| (r.at_ns, r.offset)).unwrap()).collect();
        assert_eq!(records, (0..90).map(|at| (at, at * 4096)).collect::<Vec<_>>(), "{name}");
        assert_eq!((reader.skipped().count, reader.late()), (0, 0));
        assert_eq!(reader.bytes(), Some(reader.bytes_read()));
    }
    let alone = open_trace(&directory.path().join("sdb.blktrace.0"), &OpenOptions::default()).unwrap();
    assert_eq!((alone.files(), alone.count()), (1, 1));
    let missing = open_trace(&directory.path().join("sdc"), &OpenOptions::default()).unwrap_err();
    assert!(missing.to_string().contains("cannot open the trace"), "{missing}");
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn compressed_files_are_merged_too() {
    let directory = tempfile::tempdir().unwrap();
    written(directory.path());
    let compress = |number: u32| {
        let plain = directory.path().join(format!("sda.blktrace.{number}"));
        let bytes = gzip(&std::fs::read(&plain).unwrap());
        std::fs::write(directory.path().join(format!("sda.blktrace.{number}.gz")), bytes).unwrap();
        plain
    };
    let check = |names: &[&str]| {
        for name in names {
            let mut reader = open_trace(&directory.path().join(name), &OpenOptions::default()).unwrap();
            let offsets: Vec<u64> = reader.by_ref().map(|record| record.unwrap().offset).collect();
            assert_eq!(offsets, (0..90).map(|at| at * 4096).collect::<Vec<_>>(), "{name}");
            assert_eq!((reader.files(), reader.bytes()), (4, Some(reader.bytes_read())), "{name}");
        }
    };
    // The file of processor 10 stays beside its compressed copy, and counts once.
    compress(10);
    std::fs::remove_file(compress(2)).unwrap();
    check(&["sda.blktrace.0", "sda.blktrace.2.gz", "sda.blktrace.10.gz", "sda.blktrace", "sda"]);
    for number in [0, 1, 10] {
        std::fs::remove_file(compress(number)).unwrap();
    }
    check(&["sda.blktrace.0.gz", "sda.blktrace.1.gz", "sda.blktrace", "sda"]);

    let path = directory.path().join("sda.blktrace.2.gz");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let said = match open_trace(&directory.path().join("sda"), &OpenOptions::default()) {
        Ok(mut reader) => format!("{:#}", reader.find_map(Result::err).unwrap()),
        Err(error) => format!("{error:#}"),
    };
    for part in [" after ", " requests", "sda.blktrace.2.gz cannot be read: the gzip data is cut off"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn a_damaged_file_is_an_error_that_names_it() {
    let read = |damage: &dyn Fn(&mut Vec<u8>)| {
        let directory = tempfile::tempdir().unwrap();
        written(directory.path());
        let path = directory.path().join("sda.blktrace.2");
        let mut bytes = std::fs::read(&path).unwrap();
        damage(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        let mut reader = match open_trace(&directory.path().join("sda"), &OpenOptions::default()) {
            Ok(reader) => reader,
            Err(error) => return (0, format!("{error:#}")),
        };
        let whole = reader.by_ref().map_while(Result::ok).count();
        let found = Merged::new([("x".to_owned(), &std::fs::read(&path).unwrap()[..])]).map(|mut merged| {
            let mut out = Vec::new();
            merged.read_to_end(&mut out).err()
        });
        (whole, found.unwrap().unwrap().to_string())
    };
    let (whole, said) = read(&|bytes| bytes.truncate(bytes.len() - 1));
    assert_eq!((whole, said.contains("record 30 of x is cut off")), (85, true), "{said}");
    // The second record begins behind 48 bytes.
    let (whole, said) = read(&|bytes| bytes[48 + 1] ^= 0xff);
    assert_eq!((whole, said.contains("record 2 of x does not begin")), (1, true), "{said}");
    let (_, said) = read(&|bytes| bytes[..4].reverse());
    assert!(said.contains("sda.blktrace.2 has another byte order"), "{said}");
    let (_, said) = read(&|bytes| bytes[..4].fill(0));
    assert!(said.contains("sda") && said.contains("record 1 of"), "{said}");
}
