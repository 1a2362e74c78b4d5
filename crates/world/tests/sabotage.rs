//! Tests of the checkers: each test breaks the simulation in one way and expects histories to fail for the
//! right reason.

use hob_world::Violation;
use hob_world::media::DeviceDefect;
use hob_world::sim::{Options, Sabotage, run};

/// Runs histories with the sabotage until one fails, and returns why.
fn caught(sabotage: Sabotage) -> String {
    let options = Options { requests: 150, faults: false, sabotage: Some(sabotage), ..Options::default() };
    (0..400)
        .find_map(|seed| run(seed, &options).err())
        .unwrap_or_else(|| panic!("{sabotage:?} was not noticed in 400 histories"))
        .0
}

/// Runs histories with the sabotage until one fails. The violation's text must contain one of
/// `reasons`.
fn expect(sabotage: Sabotage, reasons: &[&str]) {
    let what = caught(sabotage);
    assert!(reasons.iter().any(|reason| what.contains(reason)), "{sabotage:?} was noticed as: {what}");
}

#[test]
fn without_sabotage_the_same_histories_pass() {
    let options = Options { requests: 150, faults: false, ..Options::default() };
    for seed in 0..400 {
        run(seed, &options).unwrap();
    }
}

#[test]
fn wrong_data_with_right_checksums_is_noticed() {
    expect(
        Sabotage::Defect(DeviceDefect::ForgedChecksums),
        &["never written there", "stale", "backing holds"],
    );
}

#[test]
fn a_flush_that_makes_nothing_durable_is_noticed() {
    expect(Sabotage::Defect(DeviceDefect::EmptyFlush), &["not durable", "durable change lost"]);
}

#[test]
fn a_fua_write_that_is_not_durable_is_noticed() {
    expect(Sabotage::Defect(DeviceDefect::IgnoredFua), &["is not durable"]);
}

#[test]
fn a_write_acknowledged_before_the_backing_has_it_is_noticed() {
    expect(Sabotage::Defect(DeviceDefect::EarlyAcknowledgement), &["acknowledged, backing holds"]);
}

#[test]
fn half_a_write_is_noticed() {
    expect(Sabotage::Defect(DeviceDefect::HalfWrite), &["acknowledged, backing holds"]);
}

#[test]
fn stale_flash_is_noticed() {
    expect(Sabotage::WriteBehind, &["stale"]);
}

#[test]
fn a_second_reply_is_noticed() {
    expect(Sabotage::RepeatedReply, &["to no request, or a second one"]);
}

#[test]
fn a_missing_reply_is_noticed() {
    expect(Sabotage::LostReply, &["never answered", "before the reply"]);
}

#[test]
fn a_missing_completion_is_noticed() {
    expect(Sabotage::LostCompletion, &["never answered", "never given back", "never ended"]);
}

#[test]
fn a_second_release_is_noticed() {
    expect(Sabotage::RepeatedRelease, &["given back twice"]);
}

#[test]
fn flash_io_outside_the_cache_is_noticed() {
    expect(Sabotage::MisroutedIo, &["outside the cache"]);
}

#[test]
fn a_request_counted_wrongly_is_noticed() {
    expect(Sabotage::Uncounted, &["counts"]);
}

/// Runs histories with restarts, the sabotage and no other faults until one fails. Returns the
/// violation's text.
fn caught_over_crashes(sabotage: Sabotage) -> String {
    caught_with(sabotage, Options::lives())
}

fn caught_with(sabotage: Sabotage, options: Options) -> String {
    let options = Options { faults: false, sabotage: Some(sabotage), ..options };
    let seed = (0..1000).find_map(|seed| Some((seed, run(seed, &options).err()?)));
    let (seed, violation) = seed.unwrap_or_else(|| panic!("{sabotage:?} was not noticed in 1000 histories"));
    println!("{sabotage:?}: seed {seed}: {}", violation.0);
    violation.0
}

fn expect_over_crashes(sabotage: Sabotage, reasons: &[&str]) {
    let what = caught_over_crashes(sabotage);
    assert!(reasons.iter().any(|reason| what.contains(reason)), "{sabotage:?} was noticed as: {what}");
}

#[test]
fn without_sabotage_the_same_histories_with_restarts_pass() {
    let options = Options { faults: false, ..Options::lives() };
    for seed in 0..1000 {
        run(seed, &options).unwrap();
    }
}

/// Promise 2 for the memory tier: reads from memory return the content of the latest write.
#[test]
fn memory_that_does_not_follow_writes_is_noticed() {
    expect(Sabotage::LostRenewal, &["stale", "was never written there", "backing holds", "but not at unit"]);
}

/// Promise 2 for sectors that a guest writes in part: the rest of the sector keeps its content.
#[test]
fn a_partial_sector_that_is_not_merged_is_noticed() {
    expect_over_crashes(
        Sabotage::LostEdge,
        &["never written there", "stale", "backing holds", "but not at unit"],
    );
}

#[test]
fn an_older_version_of_a_sector_in_memory_is_noticed() {
    expect_over_crashes(
        Sabotage::OldRecentEdge,
        &["never written there", "stale", "backing holds", "but not at unit"],
    );
}

#[test]
fn zeroes_that_are_none_are_noticed() {
    expect_over_crashes(
        Sabotage::LostZeroes,
        &["never written there", "stale", "backing holds", "but not at unit"],
    );
}

/// Messages about a recovery that lost data.
const LOST: &[&str] = &[
    "stale",
    "durable change lost",
    "dirty sectors",
    "is missing",
    "no ring is whole",
    "replay failed",
    "is not the backing's",
    "DirtyLost",
    "backing holds",
    "and found open",
];

#[test]
fn a_flush_of_flash_that_makes_nothing_durable_is_noticed() {
    expect_over_crashes(Sabotage::Defect(DeviceDefect::EmptyFlashFlush), LOST);
}

#[test]
fn a_lost_page_of_the_journal_is_noticed() {
    expect_over_crashes(Sabotage::Defect(DeviceDefect::LostJournalPage), LOST);
}

#[test]
fn a_tail_that_is_not_proved_is_noticed() {
    expect_over_crashes(Sabotage::UncheckedTail, LOST);
}

#[test]
fn records_applied_in_the_wrong_order_are_noticed() {
    expect_over_crashes(Sabotage::ReorderedRecords, LOST);
}

#[test]
fn incomplete_sectors_that_recovery_takes_for_complete_are_noticed() {
    expect_over_crashes(Sabotage::ForgottenUnits, &["never written there"]);
}

#[test]
fn an_overwrite_that_the_journal_does_not_record_is_noticed() {
    expect_over_crashes(Sabotage::IgnoredOverwrites, LOST);
}

#[test]
fn a_recovery_from_an_old_ring_is_noticed() {
    expect_over_crashes(Sabotage::IgnoredNewestRing, LOST);
}

#[test]
fn stale_clean_data_is_noticed() {
    expect_over_crashes(Sabotage::ServedStale, LOST);
}

#[test]
fn a_bitmap_that_begins_empty_after_a_crash_is_noticed() {
    let reasons = ["is not in bitmap", "other data than when bitmap"];
    expect_over_crashes(Sabotage::FreshBitmap, &reasons);
}

#[test]
fn use_of_an_invalidated_ring_is_noticed() {
    expect_over_crashes(Sabotage::KeptVoidRings, LOST);
}

#[test]
fn guest_writes_to_a_read_buffer_are_noticed() {
    expect(Sabotage::SecretScribbles, &["never written there", "was believed", "after a power cut"]);
}

#[test]
fn promoted_data_of_a_parent_disk_is_noticed() {
    expect(Sabotage::UntoldSharing, &["another disk keeps it"]);
}

/// Tests that a violation is found if an extra fill stores data that is older than a guest's write
/// during the fill.
#[test]
fn an_extra_fill_that_ignores_a_write_is_noticed() {
    let options = Options { fill_permille: 1000, ..Options::lives() };
    let what = caught_with(Sabotage::StaleExtraFill, options);
    assert!(LOST.iter().any(|reason| what.contains(reason)), "it was noticed as: {what}");
}

/// Tests that a violation is found if copies of clean data exceed the flash write budget.
#[test]
fn a_flash_write_budget_that_is_ignored_is_noticed() {
    let options = Options { flash_budget_permille: 1000, requests: 2000, ..Options::lives() };
    let what = caught_with(Sabotage::IgnoredFlashBudget, options);
    assert!(what.contains("exceed the budget"), "it was noticed as: {what}");
}

/// Options with restarts of backings, and failing flushes that lose data.
fn losing() -> Options {
    Options { faults: false, restart_permille: 1000, requests: 150, ..Options::lives() }
}

/// Runs histories with failing flushes and the sabotage until one fails. The violation's text must
/// contain one of `reasons`.
fn expect_where_flushes_fail(sabotage: Sabotage, reasons: &[&str]) {
    let options = Options { sabotage: Some(sabotage), ..losing() };
    let caught = (0..1000).find_map(|seed| Some((seed, run(seed, &options).err()?)));
    let (seed, Violation(what)) = caught.unwrap_or_else(|| panic!("{sabotage:?} went unnoticed"));
    println!("{sabotage:?}: seed {seed}: {what}");
    assert!(reasons.iter().any(|reason| what.contains(reason)), "{sabotage:?} was noticed as: {what}");
}

/// Messages about lost data that was flushed.
const GONE: &[&str] =
    &["a flush says it is there", "stale", "durable change lost", "not durable", "backing holds"];

#[test]
fn without_sabotage_the_same_losses_pass() {
    for seed in 0..600 {
        run(seed, &losing()).unwrap();
    }
}

#[test]
fn an_unreported_restart_of_a_backing_is_noticed() {
    expect_where_flushes_fail(Sabotage::UntoldRestart, GONE);
}

#[test]
fn an_unreported_loss_of_data_in_a_killed_daemon_is_noticed() {
    let in_memory = Options { in_memory_permille: 1000, ..Options::lives() };
    for seed in 0..300 {
        run(seed, &in_memory).unwrap();
    }
    let sabotaged = Options { sabotage: Some(Sabotage::UnmarkedMemory), ..in_memory };
    let caught = (0..1000).find_map(|seed| run(seed, &sabotaged).err());
    let Violation(what) = caught.expect("the loss is noticed");
    assert!(GONE.iter().any(|reason| what.contains(reason)), "{what}");
}

/// A flush also covers data that an earlier process wrote to the backing.
#[test]
fn a_flush_that_omits_the_writes_of_a_killed_daemon_is_noticed() {
    let what = caught_over_crashes(Sabotage::Defect(DeviceDefect::EmptyFirstFlush));
    let reasons = [GONE, &["is not the backing's"]].concat();
    assert!(reasons.iter().any(|reason| what.contains(reason)), "it was noticed as: {what}");
}

#[test]
fn an_ignored_flush_error_of_a_backing_is_noticed() {
    // In this case destaged data counts as clean, and a recovery compares this data with a backing
    // that has lost it.
    let reasons = [GONE, &["is not the backing's"]].concat();
    expect_where_flushes_fail(Sabotage::TrustedFlush, &reasons);
}

#[test]
fn a_failed_flush_reported_to_only_one_guest_is_noticed() {
    expect_where_flushes_fail(Sabotage::OneSession, &["a flush says it is there", "stale"]);
}

/// Options with working flash devices whose flushes fail: unflushed data can be read until a power
/// failure.
fn flaky() -> Options {
    Options { flash_flush_permille: 1000, ..Options::lives() }
}

fn expect_flaky(sabotage: Sabotage, requests: u32) {
    let what = caught_with(sabotage, Options { requests, ..flaky() });
    // If the journal has no checksum of a sector, recovery cannot detect that flash has other data.
    let reasons = [LOST, &["was never written there", "dirty after a drain", " before "]].concat();
    assert!(reasons.iter().any(|reason| what.contains(reason)), "{sabotage:?} was noticed as: {what}");
}

#[test]
fn without_sabotage_the_same_flushes_of_flash_fail_and_nothing_is_lost() {
    let options = Options { faults: false, ..flaky() };
    let mut lost = 0;
    for seed in 0..1000 {
        lost += run(seed, &options).unwrap().journals_lost;
    }
    assert!(lost > 100, "only {lost}");
}

#[test]
fn a_failed_flush_of_flash_that_is_believed_is_noticed() {
    expect_flaky(Sabotage::TrustedFlashFlush, 400);
}

#[test]
fn a_lost_journal_that_is_not_recorded_as_lost_is_noticed() {
    expect_flaky(Sabotage::UnrecordedLoss, 400);
}

/// Options in which journals lose one of two copies, and another device fails later.
fn losing_copies() -> Options {
    Options { copy_loss_permille: 1000, faults: false, ..Options::lives() }
}

/// Promise 3: a journal that lost a copy is replaced, so a second copy exists again.
#[test]
fn without_sabotage_the_same_copies_of_journals_are_lost_and_replaced() {
    let options = losing_copies();
    let (mut lost, mut replaced) = (0, 0);
    for seed in 0..1000 {
        let report = run(seed, &options).unwrap();
        lost += report.journal_copies_lost;
        replaced += report.journal_copies_replaced;
    }
    assert!(lost > 200 && replaced > 100, "{lost} lost, {replaced} replaced");
}

#[test]
fn a_journal_that_keeps_one_copy_is_noticed() {
    let what = caught_with(Sabotage::IgnoredCopyLoss, losing_copies());
    assert!(LOST.iter().any(|reason| what.contains(reason)), "it was noticed as: {what}");
}

#[test]
fn a_crash_log_that_recovery_ignores_is_noticed() {
    let what = caught_over_crashes(Sabotage::IgnoredCrashLog);
    assert!(what.contains("stale") || what.contains("lost"), "noticed as: {what}");
}

/// Options in which a killed daemon starts again, another program changes data that was destaged just
/// before the kill, and the power fails during the recovery.
fn cut_in_recovery() -> Options {
    let lives = Options { requests: 400, early: false, ..Options::lives() };
    Options { cuts_in_recovery: true, silent_permille: 1000, faults: false, ..lives }
}

#[test]
fn without_sabotage_power_cuts_in_the_same_recoveries_lose_nothing() {
    let (mut changed, mut cuts) = (0, 0);
    for seed in 0..300 {
        let report = run(seed, &cut_in_recovery()).unwrap();
        changed += report.changed_silently;
        cuts += report.power_cuts;
    }
    assert!(changed > 100 && cuts > 100, "{changed} changed, {cuts} cuts");
}

/// Promise 2: flash is flushed before a journal is read (docs/decisions/0065).
#[test]
fn a_recovery_from_flash_that_was_not_flushed_is_noticed() {
    let what = caught_with(Sabotage::UnflushedRecovery, cut_in_recovery());
    assert!(LOST.iter().any(|reason| what.contains(reason)), "it was noticed as: {what}");
}

/// Runs histories with silent changes of backings and the sabotage until one fails. The violation's
/// text must contain one of `reasons`.
fn expect_silent(sabotage: Sabotage, reasons: &[&str]) {
    let what = caught_with(sabotage, Options { silent_permille: 1000, ..Options::lives() });
    assert!(reasons.iter().any(|reason| what.contains(reason)), "{sabotage:?} was noticed as: {what}");
}

/// Promise 2: clean data of a backing without evidence is compared before it is served.
#[test]
fn clean_data_that_is_trusted_without_evidence_is_noticed() {
    expect_silent(Sabotage::TrustedUnproven, LOST);
}

#[test]
fn a_comparison_with_old_content_of_the_backing_is_noticed() {
    expect_silent(Sabotage::StaleComparison, LOST);
}

#[test]
fn evidence_that_is_recorded_before_all_is_compared_is_noticed() {
    // Stale data must survive two crashes before it is read, so there are few requests.
    let options = Options { silent_permille: 1000, requests: 60, ..Options::lives() };
    let what = caught_with(Sabotage::EvidenceTooEarly, options);
    assert!(LOST.iter().any(|reason| what.contains(reason)), "it was noticed as: {what}");
}
