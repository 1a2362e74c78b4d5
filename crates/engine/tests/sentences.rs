//! Lists the test of each sentence of SYSTEMS §§2–4 (see `presets.rs`), and checks that the tests
//! exist.

const HERE: &str = include_str!("presets.rs");
const TABLE: &str = include_str!("../src/preset/tests.rs");
const POLICY: &str = include_str!("../src/policy/tests/two_level_lru.rs");
const ADMISSION: &str = include_str!("../src/admission/tests.rs");
const DESTAGER: &str = include_str!("../src/engine/destager/tests.rs");
const ENGINE: &str = include_str!("../src/engine/tests/write_back.rs");
const MEMORY: &str = include_str!("memory_per_block.rs");
const WORLD: &str = include_str!("../../world/tests/presets.rs");
const DAEMON: &str = include_str!("../../daemon/src/cache_settings/tests.rs");

/// The sentences of SYSTEMS §§2–4 that a test of a cache can show, with their tests. Not included:
/// the number of groups of a host, the behaviour of other nodes, and the memory above the cache,
/// which is not part of a preset.
const SENTENCES: [(&str, &str, &str); 33] = [
    // §2
    (
        "A read and write cache of 64 KB pages on mirrored flash",
        TABLE,
        "fast_cache_has_64_kib_pages_on_mirrored_flash",
    ),
    ("mirrored flash", ENGINE, "dirty_data_is_written_to_two_devices_and_read_from_the_one_that_works"),
    ("Works on disk addresses", HERE, "fast_cache_goes_by_address"),
    (
        "a page is promoted when it has been accessed three times",
        HERE,
        "fast_cache_promotes_at_the_third_access_and_not_before",
    ),
    ("a page is promoted when it has been accessed three times", ADMISSION, "the_third_access_promotes"),
    (
        "sequential streams and large I/O thus never populate it",
        HERE,
        "sequential_streams_never_populate_fast_cache",
    ),
    ("a write to a promoted page completes in flash", ENGINE, "a_write_completes_in_flash"),
    (
        "the page is written to disk when the LRU picks it",
        HERE,
        "fast_cache_writes_a_page_to_disk_when_the_lru_picks_it",
    ),
    (
        "Deferring coalesces writes and orders them for the disks",
        DESTAGER,
        "the_coldest_go_first_and_in_order",
    ),
    ("Other writes go to disk", HERE, "fast_cache_writes_a_page_to_disk_when_the_lru_picks_it"),
    ("The flash cache's directory takes DRAM", MEMORY, "the_index_takes_at_most_24_bytes_per_block"),
    // §3
    ("The flash is split 70 % read cache, 30 % write buffer, fixed", TABLE, "vsan_is_split_70_to_30"),
    ("70 % read cache", HERE, "vsan_reads_have_seventy_percent"),
    ("30 % write buffer, fixed", HERE, "a_full_vsan_buffer_sends_writes_straight_to_disk"),
    ("Writes are acknowledged by the buffer", HERE, "vsan_destages_in_disk_order"),
    ("an elevator destages them in disk order", HERE, "vsan_destages_in_disk_order"),
    ("cold reads load the read cache", HERE, "vsan_reads_have_seventy_percent"),
    ("a full buffer sends writes straight to disk", HERE, "a_full_vsan_buffer_sends_writes_straight_to_disk"),
    ("cache breakdown", WORLD, "vsan_falls_to_its_disks_when_the_buffer_is_full"),
    ("is not redundant inside it", TABLE, "vsan_has_one_copy"),
    // §4
    ("One unified space for reads and writes", WORLD, "zbs_does_not_fall_before_its_one_space_is_exhausted"),
    ("managed by a two-level LRU", POLICY, "by_hand"),
    ("First write → Inactive. Re-access → Active", HERE, "zbs_destages_the_earliest_inactive_above_a_fifth"),
    ("not accessed for a while", POLICY, "formerly_popular_blocks_are_evicted"),
    (
        "rank Active by access frequency, move the least accessed",
        HERE,
        "zbs_destages_the_least_accessed_when_all_is_active",
    ),
    (
        "above 20 % of the cache → write the earliest Inactive data to disk",
        HERE,
        "zbs_finds_the_earliest_inactive_behind_any_clean",
    ),
    ("mark it Clean", HERE, "zbs_destages_the_earliest_inactive_above_a_fifth"),
    (
        "Access to Clean → Active; otherwise Clean is reclaimed for new writes",
        HERE,
        "clean_that_is_accessed_stays_in_zbs_and_other_clean_makes_room",
    ),
    (
        "Write hit: in cache. Write miss: into Free, or to disk when full",
        HERE,
        "a_full_zbs_reads_and_writes_the_disk",
    ),
    ("Read hit: Active, Inactive or Clean", HERE, "a_full_zbs_reads_and_writes_the_disk"),
    (
        "Read miss: load into the cache when there is room and serve from it",
        HERE,
        "a_zbs_full_of_clean_reads_the_disk_and_takes_writes",
    ),
    ("when full, read the disk directly", ADMISSION, "while_free_only_dirty_data_evicts"),
    ("At least two flash devices", DAEMON, "one_device_is_said_refused_or_overruled"),
];

#[test]
fn every_sentence_has_its_test() {
    for (sentence, file, test) in SENTENCES {
        assert!(file.contains(&format!("fn {test}(")), "{sentence}: there is no {test}");
    }
}
