//! Tests replays to files. The tests of the driver and the conformance suite test replays to NBD
//! exports.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use super::*;
use hob_trace::Op;

const SIZE: u64 = 1 << 20;
static GO: AtomicBool = AtomicBool::new(false);

const ASAP: Options = Options { pace: Pace::Asap, depth: 4, changes: Changes::Allow, wrap: false };

fn file(dir: &tempfile::TempDir) -> PathBuf {
    let path = dir.path().join("disk.img");
    std::fs::write(&path, vec![0xaa; SIZE as usize]).unwrap();
    path
}

fn record(at_ns: u64, op: Op, offset: u64, len: u32) -> Record {
    Record { at_ns, offset, len, op, disk: 0 }
}

fn run_with(
    path: &std::path::Path,
    access: FileAccess,
    records: &[Record],
    options: &Options,
    stop: &AtomicBool,
    progress: impl FnMut(&Progress),
) -> Result<Report> {
    let target = Target::open(path.to_str().unwrap(), access, options.changes)?;
    let survey = Survey::of(records.iter().copied().map(Ok))?;
    replay(target, records.iter().copied().map(Ok), &survey, options, stop, progress)
}

fn run(path: &std::path::Path, records: &[Record], options: &Options) -> Result<Report> {
    run_with(path, FileAccess::Buffered, records, options, &GO, |_| {})
}

fn all_kinds() -> Vec<Record> {
    let mut records = Vec::new();
    for i in 0..40 {
        let op = [Op::Read, Op::Write, Op::Discard, Op::Flush][i as usize % 4];
        let (offset, len) = if op == Op::Flush { (0, 0) } else { (i * 8192, 512 * (1 + i as u32 % 5)) };
        records.push(record(i * 1_000, op, offset, len));
    }
    records
}

#[test]
fn a_file_is_read_written_and_flushed() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let records = all_kinds();
    for depth in [1, 4, 64] {
        let options = Options { depth, ..ASAP };
        let answered = AtomicU64::new(0);
        let report = run_with(&path, FileAccess::Buffered, &records, &options, &GO, |progress| {
            assert_eq!(progress.answered, answered.fetch_add(1, Ordering::Relaxed) + 1);
            assert_eq!(progress.total, 30);
        })
        .unwrap();
        assert_eq!((report.requests, report.left_out, report.answered, report.errors), (40, 10, 30, 0));
        assert_eq!((report.interrupted, &report.failure, report.lateness), (false, &None, None));
        let classes: Vec<_> = report.classes.iter().map(|class| (class.class, class.requests)).collect();
        assert_eq!(classes, [("read", 10), ("write", 10), ("flush", 10)], "files take no discards");
        let bytes = |op| records.iter().filter(|it| it.op == op).map(|it| u64::from(it.len)).sum::<u64>();
        assert_eq!(report.classes[0].bytes, bytes(Op::Read));
        assert_eq!(report.classes[1].bytes, bytes(Op::Write));
    }
    let now = std::fs::read(&path).unwrap();
    assert_eq!(now.len() as u64, SIZE);
    let written = |at: u64| {
        records
            .iter()
            .any(|it| it.op == Op::Write && (it.offset..it.offset + u64::from(it.len)).contains(&at))
    };
    for (sector, bytes) in (0..).zip(now.chunks(512)) {
        let untouched = bytes.iter().all(|byte| *byte == 0xaa);
        assert_eq!(untouched, !written(sector * 512), "sector {sector}");
    }
}

#[test]
fn without_leave_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let refuse = Options { changes: Changes::Refuse, ..ASAP };
    let said = run(&path, &all_kinds(), &refuse).unwrap_err().to_string();
    assert!(said.contains("10 writes and 10 discards") && said.contains("--allow-writes"), "{said}");
    let report = run(&path, &all_kinds(), &Options { changes: Changes::LeaveOut, ..ASAP }).unwrap();
    assert_eq!((report.left_out, report.answered, report.classes.len()), (30, 10, 1));
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 0xaa));
}

#[test]
fn time_passes_as_in_the_trace() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    // From the fifth second on, two requests every four milliseconds.
    let records: Vec<Record> =
        (0..60).map(|i| record(5_000_000_000 + i / 2 * 4_000_000, Op::Read, i * 4096, 4096)).collect();
    for (pace, span_ns) in [(Pace::Original, 116_000_000), (Pace::Times(2.0), 58_000_000)] {
        let report = run(&path, &records, &Options { pace, depth: 2, ..ASAP }).unwrap();
        assert_eq!(report.answered, 60);
        assert!(report.elapsed_ns >= span_ns && report.elapsed_ns < 5_000_000_000, "{}", report.elapsed_ns);
        let lateness = report.lateness.unwrap();
        assert!(lateness.mean_ns <= lateness.max_ns);
    }
}

#[test]
fn a_stop_leaves_a_report() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let mut records: Vec<Record> = (0..20).map(|i| record(0, Op::Read, i * 512, 512)).collect();
    records.push(record(3_600_000_000_000, Op::Read, 0, 512));
    let stop = AtomicBool::new(false);
    let start = Instant::now();
    let options = Options { pace: Pace::Original, ..ASAP };
    let report = run_with(&path, FileAccess::Buffered, &records, &options, &stop, |progress| {
        stop.store(progress.answered == 20, Ordering::Relaxed);
    })
    .unwrap();
    assert!(start.elapsed() < Duration::from_secs(600));
    assert_eq!((report.answered, report.interrupted, report.failure), (20, true, None));
}

#[test]
fn errors_of_the_kernel_are_counted_and_an_early_end_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let records: Vec<Record> =
        (0..10).map(|i| record(0, Op::Read, i * (SIZE / 10) / 512 * 512, 512)).collect();
    let target = Target::open(path.to_str().unwrap(), FileAccess::Buffered, Changes::Refuse).unwrap();
    let survey = Survey::of(records.iter().copied().map(Ok)).unwrap();
    // The file shrinks between the check and the run.
    std::fs::File::options().write(true).open(&path).unwrap().set_len(SIZE / 2).unwrap();
    let broken = records.iter().copied().map(Ok).chain([Err(anyhow::anyhow!("torn"))]);
    let report = replay(target, broken, &survey, &ASAP, &GO, |_| {}).unwrap();
    assert_eq!((report.answered, report.errors), (10, 4));
    assert!(report.first_error.is_some());
    assert_eq!(report.failure.as_deref(), Some("torn"));
}

/// Bypasses the page cache if the filesystem supports this. Otherwise opening returns an error.
#[test]
fn direct_access_has_aligned_buffers() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let path = file(&dir);
    let records: Vec<Record> = (0..16)
        .map(|i| record(0, [Op::Read, Op::Write][i as usize % 2], i * 16384, 4096 * (1 + i as u32 % 4)))
        .collect();
    match run_with(&path, FileAccess::Direct, &records, &ASAP, &GO, |_| {}) {
        Ok(report) => assert_eq!((report.answered, report.errors), (16, 0), "{:?}", report.first_error),
        Err(error) => assert!(format!("{error:#}").contains("cannot open"), "{error:#}"),
    }
    let odd = [record(0, Op::Read, 100, 512)];
    if let Err(error) = run_with(&path, FileAccess::Direct, &odd, &ASAP, &GO, |_| {}) {
        let said = format!("{error:#}");
        assert!(said.contains("units of 512") || said.contains("cannot open"), "{said}");
    } else {
        panic!("not made of 512-byte units");
    }
}

#[test]
fn targets_that_are_none_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let open = |spec: &str| {
        let target = Target::open(spec, FileAccess::Buffered, Changes::Refuse);
        format!("{:#}", target.err().unwrap_or_else(|| panic!("{spec} is no target")))
    };
    assert!(open("/nonexistent/disk").contains("/nonexistent/disk"));
    assert!(open(dir.path().to_str().unwrap()).contains("directory"));
    assert!(open("gopher://x/y").contains("gopher"));
    assert!(open("nbd+unix:///x?socket=/nonexistent.sock").contains("nonexistent.sock"));
    let path = file(&dir);
    for depth in [0, 257] {
        let error = run(&path, &[], &Options { depth, ..ASAP }).unwrap_err().to_string();
        assert!(error.contains("between 1 and 256"), "{error}");
    }
}

#[test]
fn a_part_is_a_window_of_the_trace() {
    let all = || (0..10).map(|i| Ok(record(i * 100, Op::Read, i * 512, 512)));
    let places = |part: Part| part.of(all()).map(|it| it.unwrap().offset / 512).collect::<Vec<_>>();
    assert_eq!(places(Part { from_ns: 0, requests_max: u64::MAX }), (0..10).collect::<Vec<_>>());
    assert_eq!(places(Part { from_ns: 301, requests_max: 3 }), [4, 5, 6]);
    assert_eq!(places(Part { from_ns: 1_000, requests_max: 3 }), [0_u64; 0]);
}
