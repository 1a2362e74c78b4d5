//! Tests of the account and of the limit.

use super::limit::{Limit, PRESSURE_MAX, Place, Verdict};
use super::*;
use crate::admission::AdmissionEffect;
use crate::units::BlockNo;

const MIB: u64 = 1 << 20;
const PER_DAY: u64 = 43_200 * MIB;
const HOUR_NS: u64 = DAY_NS / 24;

fn settings(bytes_per_day: u64) -> Settings {
    Settings { bytes_per_day, pool_bytes: 10 * PER_DAY }
}

fn member(disk: u32, weight: u64, written: u64) -> Member {
    Member { disk: DiskId(disk), weight, counts: Counts { written, clean: written, ..Counts::default() } }
}

#[test]
fn a_new_budget_has_half_a_day_and_earns_the_rest() {
    let mut budget = FlashBudget::new(Instant(0), settings(PER_DAY));
    let allowances = budget.round(Instant(ROUND_NS), 0, &[member(0, 1, 0)]);
    let [allowance] = allowances[..] else { panic!("{allowances:?}") };
    assert_eq!(allowance.credit as u64, PER_DAY / 2 + MIB);
    assert_eq!((allowance.credit_max as u64, allowance.loan as u64), (PER_DAY, 10 * PER_DAY));
    let saved =
        |budget: &mut FlashBudget, at| budget.round(Instant(at), 0, &[member(0, 1, 0)])[0].credit as u64;
    assert_eq!(saved(&mut budget, DAY_NS / 4), PER_DAY * 3 / 4);
    assert_eq!(saved(&mut budget, 3 * DAY_NS), PER_DAY, "one day is saved at most");
}

#[test]
fn each_cache_gets_its_part_and_what_others_do_not_need() {
    let mut budget = FlashBudget::new(Instant(0), settings(PER_DAY));
    let first = budget.round(Instant(0), 0, &[member(0, 3, 0), member(1, 1, 0)]);
    assert_eq!(first.iter().map(|it| it.credit as u64).collect::<Vec<_>>(), [PER_DAY * 3 / 8, PER_DAY / 8]);
    // Disk 1 writes three quarters of the budget, and disk 0 writes nothing.
    let mut written = 0;
    for hour in 1..=24 {
        written += PER_DAY / 24 * 3 / 4;
        budget.round(Instant(hour * HOUR_NS), 0, &[member(0, 3, 0), member(1, 1, written)]);
    }
    let last = budget.round(Instant(24 * HOUR_NS), 0, &[member(0, 3, 0), member(1, 1, written)]);
    assert!(last[0].credit > last[0].credit_max / 100 * 99, "{last:?}");
    assert!(last[1].credit > 0, "a quarter of the budget would not have sufficed: {last:?}");
    // A cache that leaves gives what it saved to the others.
    let alone = budget.round(Instant(24 * HOUR_NS), 0, &[member(1, 1, written)]);
    let both = last[0].credit + last[1].credit;
    assert!(alone[0].credit.abs_diff(both) <= 1, "only a rounded byte may stay with the pool");
}

#[test]
fn dirty_data_of_one_cache_reduces_the_others_but_does_not_stop_them() {
    let mut budget = FlashBudget::new(Instant(0), settings(PER_DAY));
    let (mut dirty, mut clean, mut earned) = (0, 0, 0);
    for round in 1..=24 * 30 {
        dirty += PER_DAY / 24 * 2;
        let now = Instant(round * HOUR_NS);
        let allowances = budget.round(now, 0, &[member(0, 1, dirty), member(1, 1, clean)]);
        let may = allowances[1].credit.max(0) as u64;
        clean += may;
        if round > 48 {
            earned += may;
        }
        assert!(allowances[0].credit >= -(PER_DAY as i64), "{allowances:?}");
    }
    let part = earned as f64 / (PER_DAY as f64 * 28.0);
    assert!((part - 1.0 / 16.0).abs() < 0.001, "the guaranteed eighth is divided by two: {part}");
    assert!(budget.status().credit < 0);
}

#[test]
fn unattributed_writes_and_removed_caches_are_charged() {
    let mut budget = FlashBudget::new(Instant(0), settings(PER_DAY));
    budget.round(Instant(0), 0, &[member(0, 1, 0)]);
    let after = budget.round(Instant(0), MIB, &[member(0, 1, 2 * MIB)]);
    assert_eq!(budget.saved().credit, (PER_DAY / 2 - 3 * MIB) as i64);
    assert!(after[0].credit <= (PER_DAY / 2 - 2 * MIB) as i64);
    budget.round(Instant(0), 0, &[]);
    assert_eq!(budget.saved().credit, (PER_DAY / 2 - 3 * MIB) as i64);
    let restored = FlashBudget::restore(Instant(7), settings(PER_DAY), budget.saved());
    assert_eq!(restored.saved(), budget.saved());
}

#[test]
fn a_loan_is_repaid_by_what_cannot_be_saved() {
    let mut budget = FlashBudget::new(Instant(0), settings(PER_DAY));
    let with = |borrowed| Member {
        disk: DiskId(0),
        weight: 1,
        counts: Counts { written: borrowed, clean: borrowed, borrowed, refused: 0 },
    };
    budget.round(Instant(0), 0, &[with(0)]);
    let after = budget.round(Instant(0), 0, &[with(PER_DAY * 2)]);
    assert_eq!((after[0].credit as u64, after[0].loan as u64), (PER_DAY / 2, 8 * PER_DAY));
    budget.round(Instant(DAY_NS / 2), 0, &[with(PER_DAY * 2)]);
    assert_eq!(budget.saved(), Saved { credit: PER_DAY as i64, loan: 2 * PER_DAY });
    budget.round(Instant(DAY_NS), 0, &[with(PER_DAY * 2)]);
    assert_eq!(budget.saved().loan, PER_DAY * 3 / 2);
    budget.earn_idle(DAY_NS);
    assert_eq!(budget.saved(), Saved { credit: PER_DAY as i64, loan: PER_DAY / 2 });
}

#[test]
fn idle_time_is_earned_and_repays() {
    let saved = Saved { credit: 0, loan: PER_DAY };
    let mut budget = FlashBudget::restore(Instant(0), settings(PER_DAY), saved);
    budget.earn_idle(DAY_NS + DAY_NS / 2);
    assert_eq!(budget.saved(), Saved { credit: PER_DAY as i64, loan: PER_DAY / 2 });
}

#[test]
fn a_budget_changes_at_once() {
    let mut budget = FlashBudget::new(Instant(0), settings(PER_DAY));
    budget.round(Instant(0), 0, &[member(0, 1, 0)]);
    budget.set(settings(PER_DAY * 3));
    let more = budget.round(Instant(0), 0, &[member(0, 1, 0)]);
    assert_eq!(more[0].credit as u64, PER_DAY * 3 / 2);
    budget.set(settings(PER_DAY / 8));
    let less = budget.round(Instant(0), 0, &[member(0, 1, 0)]);
    assert_eq!((less[0].credit, less[0].credit), (less[0].credit_max, PER_DAY as i64 / 8));
}

/// The bound of the module's text, for any history of copies of clean data.
#[test]
fn clean_copies_stay_within_the_bound() {
    let settings = Settings { bytes_per_day: PER_DAY, pool_bytes: PER_DAY / 2 };
    let mut budget = FlashBudget::new(Instant(0), settings);
    let mut counts = [Counts::default(); 3];
    let mut random = 1u64;
    for round in 1..=20_000u64 {
        let now = Instant(round * ROUND_NS * 10);
        let members: Vec<Member> = (0..3)
            .map(|i| Member { disk: DiskId(i), weight: 1 + u64::from(i), counts: counts[i as usize] })
            .collect();
        let allowances = budget.round(now, 0, &members);
        for (counts, allowance) in counts.iter_mut().zip(allowances) {
            for _ in 0..200 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let block = BlockNo((random >> 32) as u32);
                let place = if random.is_multiple_of(3) { Place::Free } else { Place::Evicts };
                let mut limit = Limit::new(&allowance, *counts);
                if limit.judge(block, AdmissionEffect::Clean, 64, place) == Verdict::Accesses(1) {
                    limit.charge(64);
                    counts.written += limit.counts.clean;
                    counts.clean += limit.counts.clean;
                    counts.borrowed += limit.counts.borrowed;
                }
            }
        }
        let written: u64 = counts.iter().map(|counts| counts.written).sum();
        let days = now.0 as f64 / DAY_NS as f64;
        let bound = PER_DAY as f64 * (days + 1.0) + settings.pool_bytes as f64;
        assert!(written as f64 <= bound, "{written} bytes in {days} days");
    }
    let written: u64 = counts.iter().map(|counts| counts.written).sum();
    assert!(written as f64 > PER_DAY as f64 * 4.0, "the budget is used: {written}");
}

#[test]
fn pressure_grows_as_the_saved_budget_shrinks() {
    assert_eq!((pressure(100, 100), pressure(50, 100), pressure(25, 100)), (0, 0, 512));
    assert_eq!((pressure(0, 100), pressure(-7, 100), pressure(0, 0)), (1024, 1024, 1024));
    assert_eq!((pressure(1, 1), pressure(i64::MAX, i64::MAX), pressure(i64::MIN, i64::MAX)), (0, 0, 1024));
}

#[test]
fn stricter_with_less_saved_budget() {
    let at = |pressure_permille: i64, loan: i64| {
        let credit = 500_000_000 * (1000 - pressure_permille) / 1000;
        let allowance = Allowance { credit, credit_max: 1_000_000_000, loan, ..Allowance::default() };
        Limit::new(&allowance, Counts::default())
    };
    let share = |mut limit: Limit, effect, place, wanted: fn(Verdict) -> bool| {
        let passed = |i: &u32| wanted(limit.judge(BlockNo(*i), effect, 1, place));
        (0..1000).filter(passed).count()
    };
    let free = |verdict| verdict == Verdict::Accesses(1);
    let kept = |verdict| verdict != Verdict::Refused;
    let (clean, write) = (AdmissionEffect::Clean, AdmissionEffect::CleanWrite);
    let extra = |limit: Limit| (0..1000).filter(|i| limit.allows_extra(BlockNo(*i))).count();
    assert_eq!((extra(at(0, 0)), extra(at(130, 0))), (1000, 0));
    assert!((400..600).contains(&extra(at(62, 0))));
    // Popularity.
    assert_eq!(share(at(100, 0), clean, Place::Evicts, free), 1000);
    assert!((350..650).contains(&share(at(187, 0), clean, Place::Evicts, free)));
    assert_eq!(share(at(300, 0), clean, Place::Evicts, free), 0);
    assert_eq!(share(at(300, 0), clean, Place::Evicts, kept), 1000);
    assert_eq!(share(at(300, 0), clean, Place::Cached, free), 1000, "it is cached already");
    assert_eq!(share(at(300, 0), write, Place::Evicts, kept), 0);
    let most = |verdict| verdict == Verdict::Accesses(8);
    assert!(share(at(740, 0), clean, Place::Evicts, most) > 700);
    // Everything.
    let cached = share(at(875, 0), clean, Place::Cached, kept);
    assert!((400..600).contains(&cached), "{cached}");
    assert_eq!(share(at(1000, 0), clean, Place::Cached, kept), 0);
    assert_eq!(share(at(1000, 0), clean, Place::Free, kept), 0);
    assert_eq!(share(at(1000, 4096), clean, Place::Free, free), 1000, "on loan");
    for never_refused in [AdmissionEffect::Dirty, AdmissionEffect::Pulled] {
        assert_eq!(share(at(1000, 0), never_refused, Place::Evicts, free), 1000);
    }
    assert_eq!(at(1000, 0).pressure(), PRESSURE_MAX);
}

#[test]
fn a_loan_is_charged_only_under_pressure() {
    let allowance =
        Allowance { credit: 6000, credit_max: 10_000, loan: 8192, earned: 0, as_of: Counts::default() };
    let mut limit = Limit::new(&allowance, Counts::default());
    limit.judge(BlockNo(1), AdmissionEffect::Clean, 1, Place::Free);
    limit.charge(1);
    assert_eq!((limit.counts.clean, limit.counts.borrowed), (4096, 0));
    // Two copies.
    limit.judge(BlockNo(1), AdmissionEffect::Clean, 2, Place::Free);
    limit.charge(2);
    assert_eq!((limit.counts.clean, limit.counts.borrowed), (12288, 8192));
    limit.charge_extra(1);
    assert_eq!((limit.counts.clean, limit.counts.borrowed), (16384, 8192), "extra data is never on loan");
    let counts = Counts { written: 12288, clean: 12288, borrowed: 4096, refused: 0 };
    assert_eq!(allowance.remaining(counts), (6000 - 8192, 4096));
}

#[test]
fn a_block_that_the_saved_budget_does_not_cover_is_refused() {
    use AdmissionEffect::{Clean, CleanWrite, Dirty};
    let with = |loan| {
        let allowance = Allowance { credit: 16384, credit_max: 16384, loan, ..Allowance::default() };
        Limit::new(&allowance, Counts::default())
    };
    let verdict = |loan, effect, sectors, place| with(loan).judge(BlockNo(1), effect, sectors, place);
    let free = Verdict::Accesses(1);
    for place in [Place::Cached, Place::Free, Place::Evicts] {
        assert_eq!(verdict(0, Clean, 4, place), free);
        assert_eq!(verdict(0, Clean, 5, place), Verdict::Refused, "{place:?}");
        assert_eq!(verdict(0, CleanWrite, 5, place), Verdict::Refused, "{place:?}");
        assert_eq!(verdict(0, Dirty, 5, place), free);
    }
    assert_eq!(verdict(20_480, Clean, 5, Place::Free), free, "on loan");
    assert_eq!(verdict(20_480, Clean, 5, Place::Evicts), Verdict::Refused);
    assert_eq!(verdict(20_479, Clean, 5, Place::Free), Verdict::Refused);
}
