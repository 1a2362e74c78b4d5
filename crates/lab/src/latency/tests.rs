//! Tests the measured latencies of synthetic traces.

use hob_engine::policy::PolicyKind;

use super::*;
use crate::prng::Prng;
use crate::workload::Zipf;
use hob_trace::Op as TraceOp;

const BLOCK: u32 = 4096;
const PLACES: u64 = 500;
const MS: u64 = 1_000_000;

/// Returns Zipf requests over 500 blocks with intervals of about `gap_ns`. One in `writes` is a
/// write.
fn zipf(requests: u64, gap_ns: u64, writes: Option<u64>) -> Material {
    let (zipf, mut dice) = (Zipf::new(PLACES, 0.9), Prng::new(7));
    let mut material = Material::new(1 << 20);
    let mut at_ns = 5 * gap_ns;
    for index in 0..requests {
        let rank = if index < PLACES { index } else { zipf.rank(&mut dice) };
        let op = if writes.is_some_and(|n| index % n == 1) { TraceOp::Write } else { TraceOp::Read };
        material.add(&Record {
            at_ns,
            offset: rank * 977 % PLACES * u64::from(BLOCK),
            len: BLOCK,
            op,
            disk: 0,
        });
        at_ns += gap_ns / 2 + gap_ns * (index % 11) / 10;
    }
    material
}

fn options(blocks: Option<u64>) -> Options {
    let bytes = |blocks| blocks * u64::from(BLOCK);
    let policy = PolicyKind::from_name("lru").expect("a policy");
    Options {
        cache: blocks.map(|blocks| CacheSetup::volatile(bytes(blocks), BLOCK, policy)),
        backing: Backing::default(),
        flash: Flash::default(),
        pace: None,
        warm: true,
    }
}

fn played(material: Material, options: &Options) -> Latencies {
    measure(material, options, &mut |_, _| true).expect("it plays")
}

#[test]
fn a_warm_cache_of_everything_is_as_fast_as_its_flash() {
    let options = options(Some(PLACES));
    let answer = played(zipf(2000, 50 * MS, None), &options);
    let with = answer.with.expect("a run with the cache");
    assert_eq!((with.all.requests, with.read_hit_ratio), (2000, Some(1.0)));
    assert_eq!(with.classes, [Class { class: "hit", ..with.all.clone() }]);
    assert_eq!((with.backing.ios, with.flash.read_bytes), (0, 2000 * u64::from(BLOCK)));
    // The SATA model: 25 µs for the command, 55 for the page, 15 for the transfer; nothing queues.
    assert!((90_000..105_000).contains(&with.all.mean_ns), "{}", with.all.mean_ns);
    assert!((2 * MS..20 * MS).contains(&answer.without.all.mean_ns), "{}", answer.without.all.mean_ns);
    assert_eq!((answer.without.read_hit_ratio, answer.without.flash), (Some(0.0), DeviceIo::default()));
    assert_eq!(answer.without.classes[0].class, "cache-off");
    assert_eq!((answer.arrivals, answer.notes), (Arrivals::Timed, vec![]));

    let cold = played(zipf(2000, 50 * MS, None), &Options { warm: false, ..options });
    let ratio = cold.with.expect("a run with the cache").read_hit_ratio.expect("reads");
    assert!((ratio - 0.75).abs() < 1e-9, "each of 500 places misses once: {ratio}");
}

#[test]
fn a_fixed_backing_is_met_to_the_nanosecond() {
    let backing = Backing::Fixed { read_ms: 8.0, write_ms: 2.5 };
    let answer = played(zipf(1000, 50 * MS, Some(4)), &Options { backing, ..options(None) });
    let without = answer.without;
    let (reads, writes) = (without.reads.expect("reads"), without.writes.expect("writes"));
    assert_eq!((reads.requests, reads.mean_ns, reads.max_ns), (750, 8 * MS, 8 * MS));
    assert_eq!((writes.requests, writes.mean_ns, writes.max_ns), (250, 2_500_000, 2_500_000));
    assert_eq!(without.all.mean_ns, (750 * 8 * MS + 250 * 2_500_000) / 1000);
    assert!(answer.with.is_none());
}

#[test]
fn percentiles_rise_and_intervals_add_up() {
    let answer = played(zipf(3000, 50 * MS, Some(5)), &options(Some(50)));
    let with = answer.with.as_ref().expect("a run with the cache");
    for row in [&answer.without.all, &with.all].into_iter().chain(&with.classes) {
        let rising = [row.p50_ns, row.p90_ns, row.p99_ns, row.p999_ns, row.max_ns];
        assert!(rising.is_sorted() && row.p50_ns > 0 && row.mean_ns <= row.max_ns, "{row:?}");
    }
    assert!(with.classes.iter().any(|row| row.class == "hit"));
    assert!(with.classes.iter().any(|row| row.class == "write"));
    assert_eq!(with.classes.iter().map(|row| row.requests).sum::<u64>(), 3000);
    let ratio = with.read_hit_ratio.expect("reads");
    assert!(ratio > 0.1 && ratio < 0.9, "{ratio}");
    for run in [&answer.without, with] {
        assert_eq!(run.series.len(), INTERVALS_MAX);
        assert_eq!(run.series.iter().map(|interval| interval.requests).sum::<u64>(), 3000);
        assert!(run.series.is_sorted_by(|one, next| one.start_s < next.start_s));
        for pair in run.series.windows(2) {
            assert_eq!(pair[1].first_request - pair[0].first_request, pair[0].requests);
        }
    }
    assert_eq!(
        answer,
        played(zipf(3000, 50 * MS, Some(5)), &options(Some(50))),
        "it depends on nothing else"
    );
}

#[test]
fn a_pace_too_fast_is_an_overload_that_is_said() {
    let fast = Options { pace: Some(Pace::Times(100.0)), ..options(Some(PLACES)) };
    let answer = played(zipf(10_000, 50 * MS, None), &fast);
    let with = answer.with.as_ref().expect("a run with the cache");
    assert!(answer.without.is_overloaded && !with.is_overloaded);
    assert!(answer.without.all.mean_ns > 10 * with.all.mean_ns);
    let [note] = answer.notes.as_slice() else { panic!("{:?}", answer.notes) };
    assert!(note.contains("without the cache the backing is overloaded"), "{note}");
    // Its advice is slow enough.
    let pace: Pace = note.split(' ').find(|word| word.starts_with('x')).expect("a pace")[..]
        .trim_end_matches(',')
        .parse()
        .expect("a pace");
    let Pace::Times(factor) = pace else { panic!("{pace}") };
    assert!((0.5..50.0).contains(&factor), "{factor}");
    let slower = played(zipf(10_000, 50 * MS, None), &Options { pace: Some(pace), ..fast });
    assert!(!slower.without.is_overloaded, "{note}");
    // Later requests wait longer.
    let mean = |index: usize| answer.without.series[index].mean_ns.expect("requests");
    assert!(mean(0) < mean(100) && mean(100) < mean(199));

    let slowly = Options { pace: Some(Pace::Asap), ..fast };
    let answer = played(zipf(1000, 1, None), &slowly);
    assert_eq!((answer.arrivals, answer.span_s, answer.without.waited), (Arrivals::OneAtATime, None, 0));
    assert!(!answer.without.is_overloaded && answer.without.in_flight_max == 1);
    assert_eq!(answer.notes, Vec::<String>::new());
}

#[test]
fn a_trace_without_times_is_played_one_at_a_time() {
    let mut material = Material::new(3);
    for (index, len) in [4096, 8192, 64 << 20, 4096].into_iter().enumerate() {
        let offset = index as u64 * 8192;
        material.add(&Record { at_ns: 0, offset, len, op: TraceOp::Read, disk: 0 });
    }
    let answer = played(material, &options(Some(8)));
    assert_eq!((answer.arrivals, answer.requests), (Arrivals::OneAtATime, 2));
    assert_eq!((answer.left_out, answer.too_long), (1, 1));
    for said in ["after the first 3", "longer than 32 MiB", "does not say when"] {
        assert!(answer.notes.iter().any(|note| note.contains(said)), "{said}: {:?}", answer.notes);
    }
}

#[test]
fn an_invalid_plan_is_an_error() {
    let said = |material, options: &Options| {
        format!("{:#}", measure(material, options, &mut |_, _| true).expect_err("no answer"))
    };
    assert!(said(Material::new(9), &options(None)).contains("no read and no write"));
    let mut odd = options(Some(8));
    odd.cache.as_mut().expect("a cache").config.block_bytes = 5000;
    assert!(said(zipf(10, MS, None), &odd).contains("cannot set up the cache"));
    let years = |at_ns| Record { at_ns, offset: 0, len: BLOCK, op: TraceOp::Read, disk: 0 };
    let mut endless = Material::new(9);
    [0, u64::MAX / 2].into_iter().for_each(|at_ns| endless.add(&years(at_ns)));
    let pace = Some(Pace::Original);
    assert!(said(endless, &Options { pace, ..options(None) }).contains("a hundred years"));
    let stopped = measure(zipf(10, MS, None), &options(None), &mut |_, _| false).expect_err("stopped");
    assert_eq!(stopped.to_string(), "interrupted");
}

#[test]
fn writes_of_a_write_back_cache_take_its_flashs_time() {
    let mut options = options(Some(PLACES));
    let through = played(zipf(2000, 50 * MS, Some(2)), &options).with.expect("a run with the cache");
    options.warm = false;
    let preset = hob_engine::preset::preset("zbs").expect("a preset");
    options.cache = Some(CacheSetup::preset(8 * PLACES * u64::from(BLOCK), preset));
    let answer = played(zipf(2000, 50 * MS, Some(2)), &options);
    let back = answer.with.expect("a run with the cache");
    let mean = |played: &Played| played.writes.as_ref().expect("writes").mean_ns;
    assert!(mean(&through) > MS && mean(&back) < MS / 4, "{} and {}", mean(&through), mean(&back));
    assert_eq!(through.dirty_bytes, 0);
    // Less than a fifth of the space is dirty, so no data has been destaged.
    assert!(back.dirty_bytes > 100 * u64::from(BLOCK) && back.backing.write_bytes == 0, "{back:?}");
    assert!(answer.notes.iter().any(|note| note.contains("not on the backing yet")), "{:?}", answer.notes);
}
