//! Fuzzes trace files. The first byte chooses the format, or requests detection from the content.
//! The rest is the file, compressed or not. The parsed records are valid and in order of time.
#![no_main]

use std::io::Cursor;

use hob_trace::profile::Profiler;
use hob_trace::{FORMATS, Limits, OnBad, OpenOptions, open_stream};
use libfuzzer_sys::fuzz_target;

/// Maximum number of records that the target reads, because a compressed file may contain very
/// many.
const RECORDS_MAX: usize = 20_000;

fuzz_target!(|data: &[u8]| {
    let [choice, file @ ..] = data else { return };
    let choice = usize::from(*choice);
    let options = OpenOptions {
        format: FORMATS.get(choice % (FORMATS.len() + 1)),
        on_bad: if choice & 0x80 == 0 { OnBad::Skip } else { OnBad::Fail },
        disk: None,
        page_bytes: None,
        limits: Limits { line_bytes_max: 256, window_records: 8, skipped_shown_max: 2 },
    };
    let Ok(mut reader) = open_stream(Cursor::new(file.to_vec()), "x", None, &options) else { return };
    let (mut profiler, mut last, mut requests, mut disk_max) = (Profiler::default(), 0, 0, 0);
    for record in reader.by_ref().take(RECORDS_MAX) {
        let Ok(record) = record else {
            assert_eq!(options.on_bad, OnBad::Fail);
            break;
        };
        assert_eq!(record.check(), Ok(()));
        assert!(record.at_ns >= last);
        disk_max = disk_max.max(usize::from(record.disk));
        (last, requests) = (record.at_ns, requests + 1);
        // Larger records only fill the bitmap.
        if record.len < 1 << 20 {
            profiler.add(&record);
        }
    }
    if requests < RECORDS_MAX {
        assert!(reader.next().is_none());
    }
    let skipped = reader.skipped();
    assert!(skipped.first.len() as u64 <= skipped.count.min(2));
    assert!(disk_max == 0 || disk_max < reader.disks().len());
    assert!(reader.late() <= requests as u64);
    profiler.finish();
});
