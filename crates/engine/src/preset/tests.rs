//! Compares the table of presets with sentences of SYSTEMS (the project's description of other
//! systems). Other tests cover the effects of the settings.

use super::*;

fn row(name: &str) -> &'static Preset {
    preset(name).unwrap()
}

#[test]
fn every_row_stands_for_a_cache_that_can_be() {
    for row in PRESETS {
        let config = row.config(16 << 20);
        assert!(config.policy.info().serves, "{}", row.name);
        assert!(row.block_bytes.is_power_of_two() && (4096..=1 << 20).contains(&row.block_bytes));
        let Destage { start_permille, stop_permille, full_permille, .. } = row.destage;
        assert!(stop_permille <= start_permille && start_permille <= full_permille && full_permille <= 1000);
        assert!(row.persistent || row.mode != Mode::WriteBack, "{}: write-back needs a journal", row.name);
        for text in [row.summary, row.source, row.notes] {
            assert!(!text.is_empty() && !text.ends_with('.') && !text.contains('|'), "{}: {text}", row.name);
        }
        let namesakes = PRESETS.iter().filter(|other| other.name == row.name);
        assert_eq!(namesakes.count(), 1, "{} stands there twice", row.name);
    }
    assert_eq!(DESTAGE, Destage::default());
}

#[test]
fn words_are_read_as_they_are_written() {
    for row in MODES {
        assert_eq!((row.name.parse(), row.value.to_string().as_str()), (Ok(row.value), row.name));
    }
    for row in DESTAGE_ORDERS {
        assert_eq!((row.name.parse(), row.value.to_string().as_str()), (Ok(row.value), row.name));
    }
    for row in COPIES {
        assert_eq!((row.name.parse(), row.value.to_string().as_str()), (Ok(row.value), row.name));
    }
    for layout in ["unified", "split:70", "split:1", "split:99"] {
        assert_eq!(layout.parse::<Layout>().unwrap().to_string(), layout);
    }
    assert_eq!((MODES[0].value, COPIES[0].value), (Mode::default(), Copies::default()));
    assert_eq!(DESTAGE_ORDERS[0].value, DestageOrder::default());
}

#[test]
fn an_unknown_name_is_refused_with_the_valid_names() {
    for wrong in ["split", "split:", "split:0", "split:100", "split:7.5", "split:-1", "unified:1", ""] {
        let error = wrong.parse::<Layout>().unwrap_err().to_string();
        assert!(error.contains("unified, split:PERCENT"), "{error}");
    }
    let error = "writeback".parse::<Mode>().unwrap_err().to_string();
    assert!(error.contains("'writeback'") && error.contains("write-through, write-back"), "{error}");
    let error = "3".parse::<Copies>().unwrap_err().to_string();
    assert!(error.contains("1, 2-dirty, 2"), "{error}");
    let error = preset("emc").unwrap_err().to_string();
    assert!(error.contains("vfrc, fast-cache, vsan, zbs, auto"), "{error}");
}

/// SYSTEMS §2: a page of 64 KiB is promoted as a whole.
#[test]
fn fast_cache_promotes_whole_pages() {
    assert_eq!((row("fast-cache").fill, row("fast-cache").block_bytes), (Fill::Block, 64 << 10));
}

/// SYSTEMS §1: "Write-through: completed to the guest only when the backing disk has the data".
#[test]
fn vfrc_writes_through() {
    assert_eq!(row("vfrc").mode, Mode::WriteThrough);
}

/// SYSTEMS §1: "Volatile. The cache is emptied by a cold restart of the machine".
#[test]
fn vfrc_is_volatile() {
    assert!(!row("vfrc").persistent);
}

/// SYSTEMS §1: "If any part is missing: miss; the *whole* request is read from the backing disk,
/// returned, and written into the cache at the same time". While the cache fills, the first candidate
/// of the chooser admits every accessed block, as the source does. When the cache is full, the
/// chooser's first candidate admits fewer blocks.
#[test]
fn vfrc_and_auto_choose_policy_and_admission() {
    for name in ["vfrc", "auto"] {
        assert_eq!((row(name).admission, row(name).policy), (AUTO, "auto"), "{name}");
    }
}

/// SYSTEMS §2: "A read *and write* cache of 64 KB pages on **mirrored** flash (RAID 1 pairs)".
#[test]
fn fast_cache_has_64_kib_pages_on_mirrored_flash() {
    let row = row("fast-cache");
    assert_eq!((row.mode, row.block_bytes), (Mode::WriteBack, 64 << 10));
    assert_eq!((row.copies, row.one_device), (Copies::TwoOfAll, OneDevice::Refused));
}

/// SYSTEMS §2: "a page is promoted when it has been accessed three times; sequential streams and large
/// I/O thus never populate it."
#[test]
fn fast_cache_promotes_at_the_third_access_and_nothing_sequential() {
    let admission = row("fast-cache").admission;
    assert_eq!(admission.popularity, Popularity::NthAccess(3));
    assert!(admission.sequential_bytes_max.is_some());
}

/// SYSTEMS §2: "a write to a promoted page completes in flash; the page is written to disk when the LRU
/// picks it. Deferring coalesces writes and orders them for the disks."
#[test]
fn fast_cache_destages_the_lru_block_and_defers_it() {
    let row = row("fast-cache");
    assert_eq!((row.policy, row.destage.order), ("lru", DestageOrder::Coldest));
    assert_eq!(row.destage.dirty_age_ms_max, 0, "age alone sends nothing to disk");
    assert!(row.destage.start_permille >= 500 && row.destage.io_bytes_max > row.block_bytes);
}

/// SYSTEMS §3: "The flash is split **70 % read cache, 30 % write buffer**, fixed."
#[test]
fn vsan_is_split_70_to_30() {
    assert_eq!(row("vsan").layout, Layout::Split { read_permille: 700 });
}

/// SYSTEMS §3: "Writes are acknowledged by the buffer; an **elevator** destages them in disk order".
#[test]
fn vsan_writes_back_through_an_elevator() {
    let row = row("vsan");
    assert_eq!((row.mode, row.destage.order), (Mode::WriteBack, DestageOrder::Elevator));
}

/// SYSTEMS §3: "cold reads load the read cache; a full buffer sends writes straight to disk ("cache
/// breakdown")."
#[test]
fn vsan_admits_everything_until_the_buffer_is_full() {
    let row = row("vsan");
    let Layout::Split { read_permille } = row.layout else { panic!("it is split") };
    assert_eq!(row.admission, ALWAYS);
    assert_eq!(row.destage.full_permille, 1000 - read_permille, "the buffer is all that can be dirty");
    assert!(
        row.destage.start_permille > (1000 - read_permille) / 2,
        "destaging waits for the buffer to fill"
    );
}

/// SYSTEMS §3: "The cache serves its own group only and is not redundant inside it."
#[test]
fn vsan_has_one_copy() {
    assert_eq!(row("vsan").copies, Copies::One);
}

/// SYSTEMS §4: "**One unified space** for reads and writes, managed by a **two-level LRU**".
#[test]
fn zbs_has_one_space_under_a_two_level_lru() {
    let row = row("zbs");
    assert_eq!((row.layout, row.policy, row.mode), (Layout::Unified, "two-level-lru", Mode::WriteBack));
}

/// SYSTEMS §4: "Active + Inactive above **20 %** of the cache → write the earliest Inactive data to disk
/// and mark it Clean."
#[test]
fn zbs_writes_the_earliest_inactive_to_disk_above_a_fifth() {
    let destage = row("zbs").destage;
    assert_eq!((destage.start_permille, destage.order), (200, DestageOrder::Coldest));
    assert_eq!(destage.stop_permille, 200, "it stops when there is no more than that");
}

/// SYSTEMS §4: "Write miss: into Free, or to disk when full. […] Read miss: load into the cache when there is room".
#[test]
fn zbs_takes_everything_until_it_is_full() {
    let row = row("zbs");
    assert_eq!((row.destage.full_permille, row.admission.to_string().as_str()), (1000, "while-free"));
}

/// SYSTEMS §4: "At least two flash devices."
#[test]
fn zbs_needs_two_devices() {
    assert_eq!((row("zbs").copies, row("zbs").one_device), (Copies::TwoOfDirty, OneDevice::Refused));
}

/// SYSTEMS §7: "mirroring only what is not yet on disk".
#[test]
fn auto_mirrors_dirty_data_and_limits_its_age() {
    let row = row("auto");
    assert_eq!((row.copies, row.one_device), (Copies::TwoOfDirty, OneDevice::OneCopy));
    assert_eq!((row.destage.order, row.destage.dirty_age_ms_max), (DestageOrder::Elevator, 30_000));
}
