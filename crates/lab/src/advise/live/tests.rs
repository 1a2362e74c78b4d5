//! Tests the advice for disks in service, with curves for which the best advice is known.

use hob_engine::sizing::CurvePoint;

use super::*;

const MIB: u64 = 1 << 20;
const HOUR_NS: u64 = 3_600_000_000_000;

fn curve(block_bytes: u64, points: &[(u64, f64)]) -> LiveCurve {
    let points = points
        .iter()
        .map(|&(cache_bytes, hits)| CurvePoint { blocks: cache_bytes / block_bytes, miss_ratio: 1.0 - hits });
    LiveCurve {
        block_bytes,
        footprint_bytes: 1024 * MIB,
        sample_rate: 0.1,
        misses: Curve::new(points.collect()),
    }
}

/// Returns measurements of a disk. A hot set of 64 MiB has 70 % of the reads, and colder data has
/// 10 % more. Blocks of 64 KiB are half empty.
fn disk(cache: Option<LiveCache>) -> Live {
    Live {
        disk: "vm".into(),
        elapsed_ns: 30 * HOUR_NS,
        reads: 1_000_000,
        read_bytes: 4096 * 1_000_000,
        read_hit_ratio: if cache.is_some() { 0.4 } else { 0.0 },
        writes: 500_000,
        write_bytes: 4096 * 500_000,
        recent: LiveRecent {
            reads: 20_000,
            read_hit_ratio: 0.7,
            first_share: 0.01,
            read_bytes: 4096 * 20_000,
            write_bytes: 4096 * 10_000,
            ..LiveRecent::default()
        },
        cache,
        block_sizes: vec![
            curve(4096, &[(0, 0.0), (64 * MIB, 0.7), (960 * MIB, 0.8)]),
            curve(16_384, &[(0, 0.0), (64 * MIB, 0.698), (960 * MIB, 0.8)]),
            curve(65_536, &[(0, 0.0), (128 * MIB, 0.7), (1920 * MIB, 0.8)]),
        ],
    }
}

fn advice(disk: &Live, target_hit: Option<f64>) -> LiveAdvice {
    live(disk, &LiveOptions { target_hit, ..LiveOptions::default() })
}

#[test]
fn the_size_for_the_target_and_the_largest_block_as_good() {
    let advice = advice(&disk(None), None);
    assert_eq!((advice.verdict, advice.target.best_read_hit_ratio), (Verdict::Cache, 0.8));
    let advised = advice.recommendation.unwrap();
    // 72 % need 64 MiB and a fifth of the colder data, rounded up.
    assert_eq!((advised.cache_bytes, advised.block_bytes), (rounded((64.0 + 179.2) * MIB as f64), 16_384));
    assert!((advised.read_hit_ratio - 0.72).abs() < 0.005, "{advised:?}");
    assert_eq!(advice.knee.unwrap().cache_bytes, 64 * MIB);
    assert_eq!(advice.command, "hob cache enable vm --pool POOL --size 244M --block-size 16K");
    assert!(advice.sizes.iter().any(|size| size.cache_bytes == 64 * MIB), "the knee is shown");
    // 1 % of first reads, 8 % that the curve has above this size, and a write for every second of a
    // million reads in 30 hours.
    let per_day = (0.09 + 0.5) * 4096e6 * 24.0 / 30.0;
    let wear = advice.wear.as_ref().unwrap();
    assert!((wear.flash_write_bytes_per_day / per_day - 1.0).abs() < 0.01, "{wear:?}");
    let text = live_text(&advice);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "now: none",
        "knee of the curve is at 64 MiB",
        "> 244 MiB",
        "'hob record'",
        "10 % of the disk's 4 KiB blocks",
    ] {
        assert!(words.contains(part), "{part}: {text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
}

#[test]
fn a_cache_that_is_there_is_resized_or_left_alone() {
    let own = |cache_bytes, block_bytes| {
        Some(LiveCache { cache_bytes, block_bytes, policy: "lru".into(), is_shared: false })
    };
    let small = advice(&disk(own(32 * MIB, 4096)), Some(0.7));
    assert_eq!(small.command, "hob cache resize vm 64M");
    assert!(
        small.summary.starts_with("Enlarge") && small.summary.contains("32 MiB to 64 MiB"),
        "{}",
        small.summary
    );
    // The measured hits are those of all reads, and the table's are an estimate.
    assert!(small.summary.contains("(measured for all its reads so far: 40"), "{}", small.summary);
    assert!(live_text(&small).contains("Sizes, with the read hits that LRU would have"));
    assert!(!small.caveats.iter().any(|caveat| caveat.contains("where LRU")), "{:?}", small.caveats);
    let right = advice(&disk(own(68 * MIB, 4096)), Some(0.7));
    assert!(right.command.is_empty() && right.summary.starts_with("Leave"), "{}", right.summary);
    assert!(right.caveats.iter().any(|caveat| caveat.contains("where LRU")), "it serves 40 % of 70 %");
    assert!(live_text(&right).contains("68 MiB (now)"));
    let large = advice(&disk(own(512 * MIB, 65_536)), Some(0.7));
    assert_eq!(large.command, "hob cache resize vm 64M");
    assert!(large.why.iter().any(|why| why.contains("--block-size 16K'")), "{:?}", large.why);
    let other = advice(&disk(own(64 * MIB, 1 << 20)), Some(0.7));
    assert!(
        other.caveats.iter().any(|caveat| caveat.contains("1 MiB, which the cache has")),
        "{:?}",
        other.caveats
    );
}

/// The flash writes of the warm-up do not count: since the warm-up, all reads are hits.
#[test]
fn wear_is_that_of_the_recent_requests() {
    let own = Some(LiveCache {
        cache_bytes: 250 * MIB,
        block_bytes: 16_384,
        policy: "lru".into(),
        is_shared: false,
    });
    let mut warm = disk(own);
    let quiet = LiveRecent { read_hit_ratio: 1.0, first_share: 0.0, write_bytes: 0, ..warm.recent };
    warm.recent = quiet;
    let kept = advice(&warm, None);
    let wear = kept.wear.as_ref().unwrap();
    assert_eq!((kept.command.as_str(), wear.flash_write_bytes_per_day), ("", 0.0));
    assert!(kept.why.iter().any(|why| why.contains("more than 50 years")), "{:?}", kept.why);
    // Half of the reads miss, and each has 4 KiB.
    warm.recent = LiveRecent { read_hit_ratio: 0.5, ..quiet };
    let per_day = advice(&warm, None).wear.unwrap().flash_write_bytes_per_day;
    assert!((per_day / (0.5 * 4096e6 * 24.0 / 30.0) - 1.0).abs() < 1e-9, "{per_day}");
    // A daemon before this version does not count the bytes of recent reads.
    warm.recent = LiveRecent { read_bytes: 0, ..quiet };
    assert!(advice(&warm, None).wear.is_none());
}

/// The advice for a shared cache sets a minimum size, because a fixed size would end the sharing.
#[test]
fn a_shared_cache_gets_a_minimum_instead_of_a_size() {
    let own = |cache_bytes| {
        Some(LiveCache { cache_bytes, block_bytes: 4096, policy: "lru".into(), is_shared: true })
    };
    let small = advice(&disk(own(32 * MIB)), Some(0.7));
    assert_eq!(small.command, "hob cache set vm --min 64M");
    for part in ["shares its pool and has 32 MiB now", "--shares NUMBER", "add flash"] {
        assert!(small.summary.contains(part), "{part}: {}", small.summary);
    }
    for (cache_bytes, target) in [(512 * MIB, Some(0.7)), (2048 * MIB, None), (66 * MIB, Some(0.7))] {
        let large = advice(&disk(own(cache_bytes)), target);
        assert!(large.command.is_empty() && large.summary.starts_with("Leave"), "{}", large.summary);
    }
}

#[test]
fn a_useless_cache_is_reported() {
    let mut idle = disk(None);
    (idle.reads, idle.read_bytes) = (0, 0);
    idle.block_sizes = vec![curve(4096, &[(0, 0.0)])];
    let nothing = advice(&idle, None);
    assert!(nothing.summary.contains("nothing was read"));
    assert_eq!((nothing.confidence, nothing.data_missing_ns), (Confidence::Low, None));
    let mut cold = disk(None);
    cold.block_sizes = vec![curve(4096, &[(0, 0.0), (960 * MIB, 0.03)])];
    let advice = advice(&cold, None);
    assert_eq!((advice.verdict, advice.recommendation), (Verdict::NoCache, None));
    assert!(advice.summary.contains("3.0 %") && advice.command.is_empty(), "{}", advice.summary);
}

#[test]
fn unknown_values_are_reported() {
    let mut young = disk(None);
    (young.elapsed_ns, young.reads) = (5_000_000_000, 900);
    let advice = advice(&young, Some(0.95));
    assert_eq!(advice.recommendation.unwrap().read_hit_ratio, 0.8);
    assert!(advice.wear.is_none(), "5 s are no day");
    assert_eq!(advice.confidence, Confidence::Low);
    assert!(live_text(&advice).starts_with("Confidence: low, too little data. There were 900 reads in "));
    // 9100 reads more at 180 reads a second.
    assert_eq!(advice.data_missing_ns, Some(50_555_555_555));
    assert!(advice.confidence_reason.ends_with("which takes about 50.6 s more at the present rate."));
    for part in ["95 % you asked for: 80 %", "measured for 5 s"] {
        assert!(advice.caveats.iter().any(|caveat| caveat.contains(part)), "{part}: {:?}", advice.caveats);
    }
}

/// The advice is to shrink a cache of 512 MiB to 64 MiB, the knee. The advice does not say so while
/// the cache is cold, or if the smaller cache would have fewer hits.
#[test]
fn a_young_cache_is_not_made_smaller() {
    let own =
        Some(LiveCache { cache_bytes: 512 * MIB, block_bytes: 4096, policy: "lru".into(), is_shared: false });
    let mut young = disk(own);
    young.elapsed_ns = HOUR_NS;
    young.recent.first_share = 0.3;
    for target in [None, Some(0.7)] {
        let advice = advice(&young, target);
        assert_eq!((advice.confidence, advice.command.as_str()), (Confidence::WarmingUp, ""));
        assert!(advice.summary.contains("at 512 MiB for now"), "{}", advice.summary);
        assert_eq!(advice.data_missing_ns, Some(23 * HOUR_NS));
        assert!(advice.wear.is_none(), "the writes of a warm-up are no day's writes");
        assert!(!live_text(&advice).contains("scarce"), "the knee of a warm-up is no choice");
        assert!(live_text(&advice).starts_with("Confidence: low while the load warms up. 30"));
        let words = live_text(&advice).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            words.contains("5.0 % or less, and in any case after a day of requests, which takes 23 h more")
        );
    }
    // All data is in the cache, and the recent reads have the warm-up yet.
    (young.recent.latest_reads, young.recent.latest_hit_ratio) = (1500, 0.992);
    let fits = advice(&young, Some(0.7));
    assert_eq!((fits.confidence, fits.command.as_str()), (Confidence::Steady, "hob cache resize vm 64M"));
    assert_eq!(fits.data_missing_ns, None);
    assert!(fits.wear.is_none(), "the recent requests are those of the warm-up");
    let text = live_text(&fits);
    assert!(text.starts_with("Confidence: good. 99.2 % of the latest 1500 reads were served"), "{text}");
    // The cache serves more than the curves, which count each first read.
    assert!(!text.contains("no cache"), "{text}");
    let explained = |advice: &LiveAdvice| {
        let says = |caveat: &String| {
            caveat.starts_with("99.2 % of the latest 1500 reads")
                && caveat.contains("The 80 % are of all reads")
        };
        advice.caveats.iter().any(says)
    };
    assert!(explained(&fits), "{:?}", fits.caveats);
    let aimed = advice(&young, None);
    let why = "nine tenths of the 80 % of reads that ask for data requested before";
    assert!(aimed.why[0].contains(why) && explained(&aimed), "{:?}", aimed.why);
    young.recent.latest_hit_ratio = 0.9;
    assert_eq!(advice(&young, Some(0.7)).confidence, Confidence::WarmingUp);
    // Enlarging a young cache costs no hits.
    young.cache =
        Some(LiveCache { cache_bytes: 16 * MIB, block_bytes: 4096, policy: "lru".into(), is_shared: false });
    assert_eq!(advice(&young, Some(0.7)).command, "hob cache resize vm 64M");
    // After a day, a load that always reads new data is considered steady.
    young.elapsed_ns = 30 * HOUR_NS;
    let aged = advice(&young, None);
    assert_eq!(aged.confidence, Confidence::Steady);
    assert!(live_text(&aged).contains("scarce"), "{:?}", aged.why);
}

#[test]
fn hits_are_lost_only_with_a_target() {
    let own =
        Some(LiveCache { cache_bytes: 512 * MIB, block_bytes: 4096, policy: "lru".into(), is_shared: false });
    let warm = disk(own);
    let kept = advice(&warm, None);
    assert!(kept.command.is_empty() && kept.summary.contains("would go to the backing"), "{}", kept.summary);
    assert_eq!(advice(&warm, Some(0.7)).command, "hob cache resize vm 64M");
    // Above 64 MiB the curve is flat: more cache adds nothing.
    let flat = Some(LiveCache {
        cache_bytes: 2048 * MIB,
        block_bytes: 4096,
        policy: "lru".into(),
        is_shared: false,
    });
    let mut level = disk(flat);
    level.block_sizes.truncate(1);
    level.block_sizes[0] = curve(4096, &[(0, 0.0), (64 * MIB, 0.8)]);
    let level = advice(&level, None);
    assert_eq!(level.command, "hob cache resize vm 64M");
    assert!(level.summary.contains("the same share"), "{}", level.summary);
}
