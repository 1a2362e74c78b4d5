//! Comparisons of small traces, refused input, and the recommended pool.

use super::*;

fn row(division: &'static str, cache_bytes: u64, read_hit_ratio: f64) -> Row {
    Row {
        division,
        cache_bytes,
        cache_share: 0.1,
        read_hit_ratio,
        difference_to_optimum: None,
        flash_write_bytes: 0,
        moved_bytes: 0,
        dropped_bytes: 0,
        sizes: vec![cache_bytes / 2; 2],
        disks: Vec::new(),
        history: Vec::new(),
    }
}

fn source(trace: &str) -> Source {
    Source { trace: trace.into(), format: None, disk: None, on_bad: Bad::Fail, page_size: None }
}

fn comparison(sources: Vec<Source>, sizes: &[CacheSize]) -> Comparison<'_> {
    Comparison {
        sources,
        duration: None,
        sizes,
        segment_bytes: 16 << 10,
        block_bytes: BLOCK_BYTES,
        policy: PolicyKind::default(),
        admission: Admission::default(),
        shares: Vec::new(),
        threads: Some(2),
        target_hit: None,
        csv: None,
    }
}

/// Returns the path of a trace of these disks, each of which reads 64 blocks twice.
fn trace(directory: &tempfile::TempDir, name: &str, disks: &[&str]) -> String {
    let mut text = String::from("ts_us,op,offset,size,disk\n");
    for at in 0..128 {
        for disk in disks {
            text.push_str(&format!("{},R,{},4096,{disk}\n", at * 1000, at % 64 * 4096));
        }
    }
    let path = directory.path().join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn all_disks_of_all_traces_are_compared_by_their_names() {
    let directory = tempfile::tempdir().unwrap();
    let (one, two) = (trace(&directory, "one.csv", &["7"]), trace(&directory, "two.csv", &["0", "1"]));
    let sizes = [CacheSize::Share(0.5), CacheSize::Share(0.5), CacheSize::Share(0.001)];
    let compared =
        simulate(&comparison(vec![source(&one), source(&two)], &sizes), &AtomicBool::default()).unwrap();
    let Compared { report, duration_ns } = compared;
    assert_eq!((report.disks, report.requests, duration_ns), (3, 384, 127_000_000));
    let names: Vec<&str> = report.results[0].disks.iter().map(|disk| disk.disk.as_str()).collect();
    assert_eq!(names, ["one.csv", "two.csv:0", "two.csv:1"]);
    let rows: Vec<_> = report.results.iter().map(|row| (row.division, row.cache_bytes >> 10)).collect();
    let of_pool = |kib| Share::ALL.map(|share| (share.name(), kib));
    assert_eq!(rows, [of_pool(384), of_pool(48)].concat(), "each size once, with a segment for each disk");
    let notes = &report.notes;
    assert!(notes.iter().any(|note| note.contains("smaller pools were enlarged")), "{notes:?}");
    let json = serde_json::to_value(&report).unwrap();
    for key in ["division", "difference_to_optimum", "read_hit_ratio", "sizes", "disks"] {
        assert!(!json["results"][0][key].is_null(), "{key}");
    }
    let lru = &json["results"][2];
    assert_eq!(lru["division"], "one-lru");
    assert!(lru["disks"][0]["cache_bytes"].is_null(), "{lru}");
}

#[test]
fn unusable_input_is_refused_with_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let good = trace(&directory, "good.csv", &["0"]);
    let empty = directory.path().join("flushes.csv").display().to_string();
    std::fs::write(&empty, "ts_us,op,offset,size,disk\n").unwrap();
    let sizes = [CacheSize::Share(0.5)];
    let refused = |comparison: Comparison<'_>| match simulate(&comparison, &AtomicBool::default()) {
        Err(error) => format!("{error:#}"),
        Ok(_) => panic!("accepted"),
    };
    for bad in [empty.as_str(), "/nowhere/t.csv"] {
        let said = refused(comparison(vec![source(&good), source(bad)], &sizes));
        assert!(said.contains(bad), "{said}");
    }
    let good = || vec![source(&good)];
    let said = refused(Comparison { block_bytes: 5000, ..comparison(good(), &sizes) });
    assert!(said.contains("not 5000 bytes"), "{said}");
    let said = refused(Comparison { segment_bytes: 5000, ..comparison(good(), &sizes) });
    assert!(said.contains("not 5000 bytes"), "{said}");
    let said = refused(Comparison { threads: Some(0), ..comparison(good(), &sizes) });
    assert!(said.contains("--threads 0"), "{said}");
    let huge = [CacheSize::Bytes(1 << 40)];
    let said = refused(comparison(good(), &huge));
    assert!(said.contains("--segment-size"), "{said}");
}

#[test]
fn per_cpu_files_of_one_trace_are_read_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| {
        std::fs::write(directory.path().join(name), "").unwrap();
        source(&directory.path().join(name).display().to_string())
    };
    let sources = ["sda.blktrace.0", "sda.blktrace.1", "sdb.blktrace.0", "t.csv", "t.csv"].map(path);
    let (kept, notes) = distinct(&sources).unwrap();
    assert_eq!(file_names(&kept[..3]), ["sda.blktrace.0", "sdb.blktrace.0", "t.csv"]);
    assert_eq!((kept.len(), notes.len()), (4, 1));
    assert!(notes[0].contains("sda.blktrace.1"), "{notes:?}");
}

#[test]
fn each_way_is_simulated_once() {
    assert_eq!(ways(&[]), Share::ALL);
    assert_eq!(ways(&[Share::Auto, Share::Static, Share::Auto]), [Share::Auto, Share::Static]);
}

#[test]
fn files_of_the_same_name_have_their_directories() {
    assert_eq!(file_names(&[source("a/t.csv"), source("b/u.csv")]), ["t.csv", "u.csv"]);
    assert_eq!(file_names(&[source("a/t.csv"), source("b/t.csv")]), ["a/t.csv", "b/t.csv"]);
}

#[test]
fn the_smallest_pool_that_reaches_the_target_is_recommended() {
    let rows = [row("static", 4 << 20, 0.4), row("auto", 4 << 20, 0.6), row("auto", 8 << 20, 0.65)];
    let pool = recommended(&rows, 0.0).pool.unwrap();
    assert_eq!((pool.division, pool.cache_bytes), ("auto", 4 << 20));
    assert_eq!(recommended(&rows, 0.62).pool.unwrap().cache_bytes, 8 << 20);
    assert!(advice(&recommended(&rows, 0.62)).contains("4 MiB, 4 MiB at the end"));
    assert!(advice(&recommended(&rows, 0.9)).contains("None of these pools"));
}
