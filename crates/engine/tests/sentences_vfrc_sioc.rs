//! Lists the test of each sentence of SYSTEMS §1 (vSphere Flash Read Cache), §5 (Storage I/O
//! Control) and §6 (tools), and checks that the tests exist. `sentences.rs` has §§2–4.

macro_rules! row {
    ($sentence:literal, $file:literal, $test:literal) => {
        ($sentence, include_str!(concat!("../../../", $file)), $file, $test)
    };
}

/// Sentence, text of the test file, path of the test file, and name of the test.
type Row = (&'static str, &'static str, &'static str, &'static str);

/// The sentences that a test of hob can show, with their tests. Not included: the names of the
/// sources' own programs, such as `esxcli`.
const SENTENCES: [Row; 69] = [
    // §1
    row!(
        "devices are aggregated into one flash resource",
        "conformance/tests/daemon.rs",
        "a_device_is_removed_from_a_pool_under_three_disks"
    ),
    row!(
        "flash devices of any type (PCIe card, SAS/SATA SSD)",
        "crates/lab/src/figures/sabotage.rs",
        "hits_miss_the_ratings_on_a_device_of_half_the_speed_and_in_another_order"
    ),
    row!(
        "each device is opted in or left out",
        "conformance/tests/daemon.rs",
        "a_device_of_another_pool_is_refused"
    ),
    row!(
        "the resource is used for read caches of virtual disks",
        "conformance/tests/daemon.rs",
        "a_device_is_removed_from_a_pool_under_three_disks"
    ),
    row!(
        "the resource is used for the host's swap file",
        "conformance/tests/swap.rs",
        "swapped_pages_survive_on_a_pool_without_the_daemon"
    ),
    row!(
        "a disk's cache has its own size",
        "conformance/tests/cold_warm.rs",
        "the_size_in_blocks_is_the_requested_size"
    ),
    row!(
        "its own cache block size (4 KB … 1 MB, power of two)",
        "crates/engine/src/engine/tests/blocks.rs",
        "every_block_size_from_4_kib_to_1_mib_works"
    ),
    row!(
        "its own cache block size (4 KB … 1 MB, power of two)",
        "crates/engine/tests/simulate.rs",
        "impossible_caches_are_refused"
    ),
    row!(
        "space is reserved when the cache is created",
        "crates/daemon/src/services/tests/persistent.rs",
        "a_cache_leaves_space_for_its_journal_and_for_the_next_one"
    ),
    row!(
        "caching can be switched on while the machine runs",
        "crates/engine/src/engine/tests/change.rs",
        "caching_is_switched_on_and_off_under_requests"
    ),
    row!("the guest notices nothing", "conformance/tests/fio_verify.rs", "live_changes_are_invisible"),
    row!(
        "all of it is cached: hit, served from flash",
        "crates/engine/src/engine/tests/reads.rs",
        "a_read_that_is_all_cached_is_served_from_flash"
    ),
    row!(
        "any part is missing: the whole request is read from the backing",
        "crates/engine/src/engine/tests/reads.rs",
        "a_read_that_is_partly_cached_is_read_whole_from_the_backing"
    ),
    row!(
        "returned, and written into the cache at the same time",
        "crates/engine/src/engine/tests/reads.rs",
        "the_reply_does_not_wait_for_the_fill"
    ),
    row!(
        "a write is completed only when the backing disk has the data",
        "crates/engine/src/engine/tests/writes.rs",
        "a_write_is_acknowledged_by_the_backing_and_copied_afterwards"
    ),
    row!(
        "the copy in flash is written asynchronously",
        "crates/engine/src/engine/tests/writes.rs",
        "a_write_is_acknowledged_by_the_backing_and_copied_afterwards"
    ),
    row!(
        "reliability of the disk is unchanged",
        "crates/engine/src/engine/tests/writes.rs",
        "flush_and_fua_reach_the_backing_first"
    ),
    row!(
        "fill and eviction happen in whole cache blocks, I/O does not",
        "crates/engine/src/engine/tests/blocks.rs",
        "one_request_may_evict_several_blocks"
    ),
    row!(
        "a 4 KB miss evicts one whole block and stores 4 KB",
        "crates/engine/src/engine/tests/blocks.rs",
        "a_small_miss_evicts_a_whole_block_and_stores_only_itself"
    ),
    row!(
        "the other 60 KB are invalid, and a later read of an invalid part is a miss",
        "crates/engine/src/engine/tests/blocks.rs",
        "a_small_miss_evicts_a_whole_block_and_stores_only_itself"
    ),
    row!(
        "the unread 60 KB is not fetched",
        "crates/engine/src/engine/tests/blocks.rs",
        "a_small_miss_evicts_a_whole_block_and_stores_only_itself"
    ),
    row!(
        "keeps popular blocks much longer than others",
        "crates/engine/src/policy/tests/zipf.rs",
        "policies_that_count_uses_beat_lru"
    ),
    row!(
        "adapts when the workload changes",
        "crates/engine/src/chooser/tests.rs",
        "the_best_candidate_is_adopted_on_either_kind_of_workload"
    ),
    row!(
        "metadata is in memory, indexed by cache block",
        "crates/engine/tests/memory_per_block.rs",
        "the_index_takes_at_most_24_bytes_per_block"
    ),
    row!(
        "memory falls as the block size grows",
        "crates/lab/src/figures/sabotage.rs",
        "memory_fails_if_blocks_take_ten_times_as_much"
    ),
    row!(
        "the cache is emptied by a cold restart",
        "conformance/tests/cold_warm.rs",
        "a_restart_makes_it_cold"
    ),
    row!(
        "the cache is emptied by suspend/resume",
        "conformance/tests/life_cycle.rs",
        "a_vfrc_cache_is_emptied_by_the_events_of_its_source"
    ),
    row!(
        "the cache is emptied by snapshot consolidation",
        "conformance/tests/life_cycle.rs",
        "a_vfrc_cache_is_emptied_by_the_events_of_its_source"
    ),
    row!(
        "the cache is emptied by migration without the cache",
        "conformance/tests/migrate.rs",
        "a_disk_migrates_without_its_cache"
    ),
    row!(
        "the cache is emptied by snapshot revert",
        "conformance/tests/life_cycle.rs",
        "after_a_revert_the_disk_has_its_earlier_content"
    ),
    row!(
        "the cache is migrated and stays warm",
        "conformance/tests/migrate.rs",
        "a_copied_cache_serves_at_the_other_host"
    ),
    row!(
        "costs time and network in proportion to the size",
        "crates/lab/src/figures/sabotage.rs",
        "a_migration_fails_if_sizes_are_exchanged_or_the_cache_has_other_data"
    ),
    row!(
        "the cache is dropped: cold at the destination",
        "conformance/tests/live_migration.rs",
        "a_cache_is_dropped"
    ),
    row!(
        "statistics: hit %, I/Os, latencies, KB per I/O",
        "crates/engine/src/engine/tests/statistics.rs",
        "the_figures_of_a_known_load"
    ),
    row!(
        "statistics: max IOPS",
        "crates/engine/src/engine/tests/statistics.rs",
        "the_busiest_second_is_remembered"
    ),
    row!(
        "statistics: evictions, usage, numBlocksCurrentlyCached",
        "crates/engine/src/engine/tests/statistics.rs",
        "evictions_and_occupancy"
    ),
    row!(
        "statistics: failed flash I/Os, failed disk I/Os",
        "crates/engine/src/engine/tests/statistics.rs",
        "failed_ios_are_counted_by_side"
    ),
    row!(
        "a 1 GB cache with 8 KB blocks has numBlocks = 131072",
        "crates/lab/src/figures/tests.rs",
        "checks_that_do_not_depend_on_the_workload_pass"
    ),
    row!(
        "start at 20 % of the disk",
        "crates/engine/tests/sizing_by_hand.rs",
        "statistics_show_whether_a_cache_is_too_large_or_too_small"
    ),
    row!(
        "numBlocksCurrentlyCached < numBlocks: over-provisioned",
        "crates/engine/tests/sizing_by_hand.rs",
        "statistics_show_whether_a_cache_is_too_large_or_too_small"
    ),
    row!(
        "numBlocksCurrentlyCached < numBlocks: over-provisioned",
        "crates/lab/src/figures/sabotage.rs",
        "sizing_statistics_fail_with_the_caches_exchanged"
    ),
    row!(
        "equal, with many blocks per eviction and a low hit rate: under-provisioned",
        "crates/engine/tests/sizing_by_hand.rs",
        "statistics_show_whether_a_cache_is_too_large_or_too_small"
    ),
    row!(
        "vary the size and watch",
        "crates/engine/tests/sizing_by_hand.rs",
        "statistics_show_whether_a_cache_is_too_large_or_too_small"
    ),
    row!(
        "(hob must make this unnecessary)",
        "conformance/tests/advise.rs",
        "live_curves_are_those_of_the_trace"
    ),
    row!(
        "(hob must make this unnecessary)",
        "crates/lab/src/advise/live/tests.rs",
        "the_size_for_the_target_and_the_largest_block_as_good"
    ),
    row!(
        "block size: the dominant I/O size, read off a histogram",
        "conformance/tests/histogram.rs",
        "the_daemons_histograms_match_its_trace"
    ),
    row!(
        "figures: mean latencies of the hardware-monitoring and the web-proxy trace",
        "crates/lab/src/figures/sabotage.rs",
        "latencies_fail_with_a_small_cache_and_a_slow_backing"
    ),
    row!(
        "figure: block-size sweep",
        "crates/lab/src/figures/sabotage.rs",
        "block_sizes_fail_in_another_order_and_on_a_slow_backing"
    ),
    row!(
        "figures: decision-support DB and DVD Store",
        "crates/lab/src/figures/sabotage.rs",
        "databases_fail_on_other_arrays_and_with_small_caches"
    ),
    row!(
        "figure: Oracle I/O calibration",
        "crates/lab/src/figures/sabotage.rs",
        "the_calibration_fails_on_fast_disks_and_with_a_tiny_cache"
    ),
    row!(
        "device ratings: PCIe card 750 K random-read IOPS, SATA SSD 39.5 K",
        "crates/lab/src/figures/sabotage.rs",
        "hits_miss_the_ratings_on_a_device_of_half_the_speed_and_in_another_order"
    ),
    // §5
    row!(
        "shares: proportion under contention",
        "crates/engine/src/qos/tests.rs",
        "shares_are_proportional_under_contention"
    ),
    row!(
        "low/normal/high = 500/1000/2000",
        "crates/daemon/src/state/qos.rs",
        "levels_of_shares_are_those_of_storage_io_control"
    ),
    row!(
        "limit: upper bound",
        "crates/engine/src/qos/tests.rs",
        "limits_are_never_passed_by_more_than_the_burst"
    ),
    row!(
        "reservation: lower bound",
        "crates/engine/src/qos/tests.rs",
        "reservations_are_met_whenever_they_can_be"
    ),
    row!(
        "set once, then applied automatically",
        "conformance/tests/qos.rs",
        "qos_settings_are_shown_and_survive_a_restart"
    ),
    row!(
        "applied automatically, when the datastore is late",
        "crates/engine/src/qos/tests.rs",
        "a_resource_is_throttled_when_it_is_late_and_only_then"
    ),
    row!(
        "on flash-backed datastores too",
        "crates/lab/src/figures/sabotage.rs",
        "shares_fail_without_throttling_and_bounds_without_their_settings"
    ),
    row!(
        "IOPS are normalised to 32 KB units",
        "crates/engine/src/engine/tests/limits.rs",
        "the_unit_of_io_can_be_chosen"
    ),
    row!(
        "mClock: reservation, limit and proportional tags",
        "crates/engine/tests/mclock.rs",
        "reservation_limit_and_proportional_tags_hold_together"
    ),
    row!(
        "dmClock spreads it over servers",
        "conformance/tests/qos_hosts.rs",
        "shares_and_reservations_hold_across_hosts"
    ),
    row!(
        "PARDA controls hosts that share an array by latency",
        "crates/engine/src/qos/tests.rs",
        "hosts_that_do_not_know_each_other_share_by_weight"
    ),
    // §6
    row!(
        "I/O histograms per disk: length, seek distance, outstanding, latency, interarrival",
        "conformance/tests/histogram.rs",
        "the_daemons_histograms_match_its_trace"
    ),
    row!("all / reads / writes", "conformance/tests/histogram.rs", "the_daemons_histograms_match_its_trace"),
    row!("all / reads / writes", "crates/engine/src/vscsi/tests.rs", "classes_do_not_see_each_other"),
    row!(
        "accurate trace replay with original timing against a disk",
        "conformance/tests/replay.rs",
        "a_replayed_recording_is_recorded_the_same"
    ),
    row!(
        "accurate trace replay with original timing against a disk",
        "crates/lab/src/replay/tests.rs",
        "time_passes_as_in_the_trace"
    ),
    row!("fio as load generator", "conformance/tests/fio_verify.rs", "an_unchanged_cache_verifies"),
    row!(
        "tile-based mixed load with QoS limits",
        "crates/lab/src/figures/sabotage.rs",
        "tiles_fail_without_a_cache_on_fast_disks_and_with_the_arrays_exchanged"
    ),
];

#[test]
fn every_sentence_has_its_test() {
    for (sentence, text, file, test) in SENTENCES {
        let (before, _) = text
            .split_once(&format!("fn {test}("))
            .unwrap_or_else(|| panic!("{sentence}: there is no {test} in {file}"));
        let attributes = before.rsplit("\n\n").next().expect("a split text has a part");
        assert!(attributes.contains("test"), "{sentence}: {test} in {file} is no test");
    }
}
