//! Tests of the explanations for caches in every state.

use hob_control::{BackingState, Cache, Evictions};

use super::*;
use crate::services::observe::figures;

const BLOCKS: u64 = 1000;

fn disk(state: CacheState, reason: Option<&str>) -> Disk {
    Disk {
        name: "vm".into(),
        state: DiskState::Online,
        backing: "/vm.img".into(),
        backing_state: Some(BackingState::Connected),
        size: Size(1 << 30),
        cache: Some(Cache {
            pool: "p".into(),
            state,
            reason: reason.map(str::to_owned),
            size: Size(64 << 20),
            room: Size(64 << 20),
            block_size: Size(65536),
            policy: "lru".into(),
            mode: "write-through".into(),
            layout: "unified".into(),
            admission: "always".into(),
            fill: "sectors".into(),
            destage_order: "elevator".into(),
            dirty_start: 10,
            dirty_stop: 5,
            dirty_full: 70,
            dirty_age_max: 30,
            copies: "1".into(),
            verify: "auto".into(),
            ..Cache::default()
        }),
        ..Disk::default()
    }
}

/// Returns statistics of a disk with these requests, whose cache has that many blocks.
fn figures(cache: CacheState, counts: &[(Outcome, u64)], blocks_cached: u64) -> DiskStats {
    let mut engine = hob_engine::Engine::new(hob_engine::Limits::default());
    let config = hob_engine::command::DiskConfig {
        size_bytes: 4096,
        access: hob_engine::command::Access::ReadOnly,
        datastore: hob_engine::units::DatastoreId(0),
    };
    let add = hob_engine::command::Command::AddDisk(config);
    let (now, id) = (hob_engine::units::Instant(0), hob_engine::units::DiskId(0));
    engine.handle_command(now, hob_engine::units::CommandId(0), id, add);
    let mut stats = figures::report("vm", Size(65536), &engine.stats(now, id).unwrap());
    stats.requests = counts.iter().map(|(_, count)| count).sum();
    for (outcome, count) in counts {
        stats.outcomes[*outcome as usize].count = *count;
        stats.outcomes[*outcome as usize].percent = percent(*count, stats.requests);
    }
    stats.reads = stats.requests;
    stats.hit_percent = stats.outcomes[Outcome::Hit as usize].percent;
    stats.cache = cache;
    stats.blocks = BLOCKS;
    stats.blocks_cached = blocks_cached;
    stats.sectors_valid = blocks_cached * 16;
    stats
}

fn said(disk: &Disk, stats: &DiskStats) -> String {
    explain(disk, Some(stats)).sentences.join(" ")
}

#[test]
fn each_state_has_its_sentence() {
    let none = Disk { cache: None, ..disk(CacheState::None, None) };
    assert!(said(&none, &figures(CacheState::None, &[], 0)).contains("'hob cache enable vm'"));
    let clone = Disk { parent: Some("golden".into()), ..none.clone() };
    assert!(said(&clone, &figures(CacheState::None, &[], 0)).contains("the disk golden serves the data"));
    let alone = Disk { parent_reason: Some("it has changed".into()), ..clone };
    assert!(said(&alone, &figures(CacheState::None, &[], 0)).contains("'hob cache enable vm'"));
    for (state, reason, part) in [
        (
            CacheState::None,
            Some("pool p has space for only 0 of 64M"),
            "has none of its configured cache: pool p has space for only 0",
        ),
        (CacheState::Changing, None, "is being changed"),
        (CacheState::Stalled, None, "hob pool show p"),
        (CacheState::Fenced, None, "hob pool remove-device p"),
        (CacheState::Active, None, "of 64 MiB is empty"),
        (CacheState::Active, Some("2 of its 4 segments were lost"), "The cache is degraded: 2 of its 4"),
    ] {
        let said = said(&disk(state, reason), &figures(state, &[], 0));
        assert!(said.contains(part), "{state:?}: {said}");
    }
    let away = BackingState::Reconnecting {
        since_seconds: 9,
        last_error: "Connection refused".into(),
        waiting_requests: 1,
    };
    let waiting = Disk { backing_state: Some(away), ..disk(CacheState::Active, None) };
    let text = said(&waiting, &figures(CacheState::Active, &[], 0));
    assert!(text.contains(" is reconnecting for 9 s: Connection refused; 1 request waits;"), "{text}");
    let offline = Disk { state: DiskState::Offline, reason: Some("no such file".into()), ..none };
    assert_eq!(explain(&offline, None).sentences, ["vm is not served: no such file."]);
}

#[test]
fn the_choice_of_an_automatic_cache_is_named_with_its_alternatives() {
    let candidate = |admission: &str, hit_percent, flash_write_percent| CacheCandidate {
        policy: "s3-fifo".into(),
        admission: admission.into(),
        hit_percent,
        flash_write_percent,
    };
    let choice = CacheChoice {
        policy: "s3-fifo".into(),
        admission: "ghost".into(),
        phase: "warm".into(),
        changes: 1,
        candidates: vec![candidate("ghost", 34.76, 12.0), candidate("always", 4.9, 71.0)],
    };
    let mut stats =
        DiskStats { choice: Some(choice), ..figures(CacheState::Active, &[(Outcome::Hit, 9)], 10) };
    let active = disk(CacheState::Active, None);
    let text = said(&active, &stats);
    let expected = "hob has chosen policy s3-fifo and admission ghost for this workload. hob simulates a sample of the \
                    latest accesses, to about 16 times as many blocks as the cache has. It expects 34.8 % hits, and 12 bytes \
                    written to flash per 100 bytes of requests. The alternatives: s3-fifo always: 4.9 % and 71 bytes.";
    assert!(text.contains(expected) && !text.contains("differ from this"), "{text}");
    // Measured hits that are near the expected ones, and hits that are far off.
    (stats.recent.reads, stats.recent.hit_percent) = (20_000, 40.0);
    assert!(!said(&active, &stats).contains("differ from this"));
    stats.recent.hit_percent = 70.0;
    let text = said(&active, &stats);
    assert!(
        text.contains("The 70.0 % of the last 20000 reads differ from this, because the simulation"),
        "{text}"
    );
    (stats.recent.latest_reads, stats.recent.latest_hit_percent) = (5000, 36.0);
    let text = said(&active, &stats);
    assert!(
        text.contains("because they include older reads; of the latest 5000 reads, 36.0 % were hits."),
        "{text}"
    );
    stats.recent.latest_hit_percent = 80.0;
    stats.choice.as_mut().unwrap().phase = "changed".into();
    let text = said(&active, &stats);
    assert!(text.contains("because the cache still has the blocks of its previous policy"), "{text}");
    // While the cache fills, there is no expectation.
    stats.choice.as_mut().unwrap().phase = "filling".into();
    stats.blocks_cached = 370;
    let text = said(&active, &stats);
    assert!(text.contains("not known yet") && text.contains("37 % of its blocks have data."), "{text}");
    assert!(!text.contains("34.8 %") && !text.contains("4.9 %"), "{text}");
}

/// In mode pass-through, a cache is not warming, and keeps its data for the next mode.
#[test]
fn a_passed_through_cache_is_said_to_keep_its_data() {
    let stats =
        DiskStats { mode: "pass-through".into(), ..figures(CacheState::Active, &[(Outcome::Hit, 9)], 370) };
    let text = said(&disk(CacheState::Active, None), &stats);
    assert!(text.contains("37 % of the 1000 blocks of the cache of 64 MiB have data"), "{text}");
    assert!(text.contains("the cache keeps its data"), "{text}");
    assert!(!text.contains("empty") && !text.contains("warming"), "{text}");
}

#[test]
fn extra_data_of_misses_is_named_with_its_uses() {
    let none = figures(CacheState::Active, &[(Outcome::Hit, 9)], 10);
    assert!(!said(&disk(CacheState::Active, None), &none).contains("Beside"));
    let stats = DiskStats { extra_read_bytes: 3 << 20, extra_blocks_used: 12, ..none };
    let said = said(&disk(CacheState::Active, None), &stats);
    let expected = "misses brought 3 MiB into the cache (fill sectors). Guests used these blocks 12 times.";
    assert!(said.contains(expected), "{said}");
}

#[test]
fn memory_hits_are_distinguished_from_flash_hits() {
    let counts = [
        (Outcome::Hit, 50),
        (Outcome::HitMemory, 20),
        (Outcome::HitPrefetched, 10),
        (Outcome::MissFilled, 20),
    ];
    let stats = DiskStats { memory_hit_percent: 30.0, ..figures(CacheState::Active, &counts, 10) };
    let explanation = explain(&disk(CacheState::Active, None), Some(&stats));
    let shares = (explanation.served_from_flash_percent, explanation.served_from_memory_percent);
    assert_eq!(shares, (50.0, 30.0));
    let said = explanation.sentences.join(" ");
    assert!(said.contains("50.0 % were served from flash"), "{said}");
    assert!(said.contains("30.0 % were served from memory; of the reads alone, 30.0 %"), "{said}");
    assert_eq!(explanation.not_served.len(), 1, "only the misses");
}

#[test]
fn a_cache_is_warming_then_full_and_perhaps_too_small() {
    let active = disk(CacheState::Active, None);
    let warming = said(&active, &figures(CacheState::Active, &[(Outcome::Hit, 10)], 370));
    assert!(warming.contains("is warming: 37 % of its 1000 blocks"), "{warming}");
    // The data is smaller than the cache, so the cache is not filled further.
    let mut warm = figures(CacheState::Active, &[(Outcome::Hit, 7700), (Outcome::MissFilled, 2300)], 370);
    warm.recent = hob_control::RecentReads {
        reads: 2000,
        hit_percent: 98.0,
        first_percent: 0.5,
        ..hob_control::RecentReads::default()
    };
    let smaller = said(&active, &warm);
    assert!(
        smaller.contains("is warm: few recent reads asked for new data") && !smaller.contains("warming"),
        "{smaller}"
    );
    assert!(smaller.contains("Of the last 2000 reads, 98.0 %"), "{smaller}");
    for still in [
        hob_control::RecentReads { first_percent: 20.0, ..warm.recent },
        hob_control::RecentReads { reads: 500, ..warm.recent },
    ] {
        warm.recent = still;
        assert!(said(&active, &warm).contains("is warming: 37 %"), "{still:?}");
    }
    // The recent reads include the reads of the warm-up, and the latest minute does not.
    warm.recent.first_percent = 20.0;
    (warm.recent.latest_reads, warm.recent.latest_hit_percent) = (1500, 99.5);
    let smaller = said(&active, &warm);
    assert!(smaller.contains("is warm: 99.5 % of the latest 1500 reads were hits, and 37 %"), "{smaller}");
    warm.recent.latest_hit_percent = 94.0;
    assert!(said(&active, &warm).contains("is warming: 37 %"));
    let full = figures(CacheState::Active, &[(Outcome::Hit, 9000), (Outcome::MissFilled, 1000)], BLOCKS);
    assert!(said(&active, &full).contains("no block has been evicted yet"), "{}", said(&active, &full));
    let evictions = Evictions { operations: 100, blocks: 800, last_operation_at_ns: 1, last_blocks: 8 };
    let mut evicting = DiskStats { evictions, ..full };
    evicting.vsphere.evict_avg_num_blocks_per_op = 8.0;
    let busy = said(&active, &evicting);
    assert!(busy.contains("800 blocks were evicted, 8.0 at a time") && !busy.contains("too small"), "{busy}");
    let small = DiskStats { hit_percent: 12.0, ..evicting.clone() };
    assert!(said(&active, &small).contains("only 12 % of the reads hit; try 'hob cache resize vm 128M'"));
    let mut sharing = disk(CacheState::Active, None);
    sharing.cache.as_mut().unwrap().shared = Some(SharedCache {
        disk: "vm".into(),
        size: Size(64 << 20),
        target: Size(0),
        limits: hob_control::SharedLimits { min: Size(0), max: Size(0), shares: 1000, pin: false },
        reads_per_second: 100,
        hit_permille: 120,
        more_hits_per_second: 1,
        gained_hits_per_second: 0,
    });
    let shared = said(&sharing, &small);
    assert!(shared.contains("'hob cache set vm --min 128M'") && !shared.contains("resize"), "{shared}");
    let sparse = DiskStats { sectors_valid: BLOCKS, ..evicting };
    assert!(
        said(&active, &sparse).contains("Its blocks of 64K are only 6 % filled"),
        "{}",
        said(&active, &sparse)
    );
}

#[test]
fn reasons_come_most_frequent_first_and_hits_are_none() {
    let counts = [
        (Outcome::Hit, 5000),
        (Outcome::MissFilled, 3000),
        (Outcome::WriteCopied, 1999),
        (Outcome::BypassFlush, 1),
    ];
    let explanation =
        explain(&disk(CacheState::Active, None), Some(&figures(CacheState::Active, &counts, 10)));
    assert_eq!((explanation.requests, explanation.served_from_flash_percent), (10_000, 50.0));
    let reasons: Vec<_> = explanation.not_served.iter().map(|share| share.class.as_str()).collect();
    assert_eq!(reasons, ["miss-filled", "write", "bypass"]);
    let row = Outcome::MissFilled.info();
    assert_eq!(explanation.not_served[0].sentence, format!("30.0 % (3000) {}.", row.sentence));
    assert!(explanation.not_served[2].sentence.starts_with("Less than 0.1 % (1) "));
}

#[test]
fn a_mode_other_than_write_through_is_explained_with_its_dirty_data() {
    let active = disk(CacheState::Active, None);
    let stats = figures(CacheState::Active, &[(Outcome::Hit, 10)], 10);
    let with = |mode: &str, dirty_bytes: u64| DiskStats { mode: mode.into(), dirty_bytes, ..stats.clone() };
    assert!(!said(&active, &with("write-through", 0)).contains("mode"));
    assert!(
        said(&active, &with("write-around", 0))
            .contains("in mode write-around: writes go to the backing only")
    );
    let text = said(&active, &with("write-back", 8192));
    assert!(
        text.contains("in mode write-back") && text.contains("8 KiB are not on the backing yet."),
        "{text}"
    );
    let mut draining = active.clone();
    let dirty = |eta_seconds, why: Option<&str>| hob_control::Dirty {
        size: Size(8192),
        lost: Size(0),
        draining: true,
        rate: Size(1),
        eta_seconds,
        why: why.map(str::to_owned),
    };
    draining.cache.as_mut().unwrap().dirty = Some(dirty(Some(9), None));
    assert!(said(&draining, &with("write-back", 8192)).contains("in about 9 s"));
    draining.cache.as_mut().unwrap().dirty =
        Some(dirty(None, Some("the backing has completed no write for 7 s")));
    let text = said(&draining, &with("write-back", 8192));
    assert!(text.contains("completed no write for 7 s") && !text.contains("ordered"), "{text}");
    draining.cache.as_mut().unwrap().ordered = true;
    let text = said(&draining, &with("write-back", 8192));
    assert!(text.contains("because destaging is ordered, a guest's write waits for the backing"), "{text}");
}

#[test]
fn a_flash_write_budget_is_explained() {
    let part = |saved, pressure_percent| CacheFlashWrites {
        part: Size(10 << 30),
        saved,
        pressure_percent,
        written: Size(1 << 30),
        refused: Size(2 << 30),
    };
    let said = about_budget(&part(7 << 30, 0), "flash");
    assert!(said.contains("10 GiB a day, of which 7 GiB is left: it does not limit"), "{said}");
    let said = about_budget(&part(1 << 30, 80), "flash");
    assert!(said.contains("stricter, by 80 %") && said.contains("kept 2 GiB from flash"), "{said}");
    let said = about_budget(&part(-1 << 30, 100), "flash");
    assert!(said.contains("a debt of 1 GiB") && said.contains("used up"), "{said}");
}
