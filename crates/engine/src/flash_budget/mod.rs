//! Flash write budget: keeps the average of a pool's flash writes within a number of bytes a day.
//!
//! Two parts share the work:
//! - [`FlashBudget`] is the account of one pool. Every [`ROUND_NS`], in a *budget round*, the
//!   account earns its part of the daily budget, is charged with the bytes that caches wrote, and
//!   divides the rest among the caches.
//! - [`Allowance`] is the part of one cache. Between two budget rounds the engine charges the
//!   cache's own flash writes to the allowance, and admission becomes stricter as the allowance
//!   gets smaller ([`pressure`], [`limit`]).
//!
//! **Saved budget.** Unused budget is saved, up to the budget of one day. A new budget begins with
//! half a day's budget saved. A block of clean data is refused unless the saved budget covers all
//! of its copies. Other flash writes are never refused, but are charged as well: dirty data,
//! journals, second copies of dirty data, missing second copies that maintenance restores, and data
//! from the cache of another host. These other writes can put an account into debt, by at most one
//! day's budget.
//!
//! **Loan.** An empty cache may fill at once: data for free frames may be written on loan, in total
//! as many bytes as the pool has. When a full day's budget is saved, further unused budget repays
//! the loan.
//!
//! So fills never raise the flash writes of `t` days above
//! `budget × (t + 1) + size of the pool`.
//!
//! **Division.** The weight of a cache is its size times its shares. Each cache receives earned
//! budget in proportion to its weight, and saves the part that it does not use. Budget that a cache
//! cannot save goes to the other caches. Debts are paid first, but one part in [`GUARANTEED_PART`]
//! of the earned budget always goes to all caches, so that the dirty data of one cache does not
//! stop the fills of another (docs/decisions/0050-flash-write-budget.md).

mod history;
pub mod limit;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub use history::History;
pub use limit::pressure;

use crate::units::{DiskId, Instant};

/// Time between two budget rounds, nanoseconds.
pub const ROUND_NS: u64 = 2_000_000_000;

/// Nanoseconds in a day.
pub const DAY_NS: u64 = 86_400_000_000_000;

/// Part of the earned budget that is divided among all caches even if the pool has debts: one in
/// this number.
pub const GUARANTEED_PART: i64 = 8;

/// Largest budget, bytes a day.
pub const BYTES_PER_DAY_MAX: u64 = 1 << 60;

/// Flash writes of a disk's cache since the disk was added, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All flash writes of the cache: data, both copies, and journal.
    pub written: u64,
    /// Copies of clean data, which the budget may refuse; included in `written`.
    pub clean: u64,
    /// Flash writes on loan; included in `clean`.
    pub borrowed: u64,
    /// Copies of clean data that the budget refused; not included in `written`.
    pub refused: u64,
}

impl Counts {
    /// Returns the counts since `earlier`. If a count is smaller than in `earlier`, the counts have
    /// begun again at 0, and all of `self` is returned.
    pub fn since(self, earlier: Counts) -> Counts {
        if self.written < earlier.written || self.clean < earlier.clean || self.refused < earlier.refused {
            return self;
        }
        Counts {
            written: self.written - earlier.written,
            clean: self.clean - earlier.clean,
            borrowed: self.borrowed.saturating_sub(earlier.borrowed),
            refused: self.refused - earlier.refused,
        }
    }
}

/// One cache's part of a flash write budget, computed when the cache's counts were `as_of`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allowance {
    /// Saved budget of the cache, bytes; negative for a debt.
    pub credit: i64,
    /// Maximum amount of budget that the cache can save, bytes.
    pub credit_max: i64,
    /// Number of bytes that may be written on loan.
    pub loan: i64,
    /// Budget that the cache received since its last allowance, bytes.
    pub earned: i64,
    /// The cache's counts at the time of this allowance.
    pub as_of: Counts,
}

impl Allowance {
    /// Returns the saved budget and the loan that remain after the flash writes of `counts`.
    pub(crate) fn remaining(&self, counts: Counts) -> (i64, i64) {
        let Counts { written, borrowed, .. } = counts.since(self.as_of);
        (self.credit - written as i64 + borrowed as i64, self.loan - borrowed as i64)
    }
}

/// A cache of the pool at the start of a budget round.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// The disk that the cache belongs to.
    pub disk: DiskId,
    /// Size of the cache in segments, times its shares.
    pub weight: u64,
    /// The cache's counts.
    pub counts: Counts,
}

/// Settings of a pool's flash write budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The budget, bytes a day: 1 to [`BYTES_PER_DAY_MAX`].
    pub bytes_per_day: u64,
    /// Size of the pool, bytes.
    pub pool_bytes: u64,
}

/// State of a pool's flash write budget that survives a restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// Saved budget of the pool, bytes; negative for a debt.
    pub credit: i64,
    /// Loan that is not repaid, bytes.
    pub loan: u64,
}

/// State of a pool's flash write budget, for display.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The budget, bytes a day.
    pub bytes_per_day: u64,
    /// Saved budget, bytes; negative for a debt.
    pub credit: i64,
    /// Loan that is not repaid, bytes.
    pub loan: u64,
}

#[derive(Clone, Copy, Debug)]
struct Account {
    credit: i64,
    credit_max: i64,
    known: Counts,
}

/// The flash write budget of one pool: the saved budget of each cache, and the loan that is not
/// repaid.
#[derive(Clone, Debug)]
pub struct FlashBudget {
    settings: Settings,
    at: Instant,
    /// Earned budget of less than one byte, which is added at the next budget round, in bytes a day
    /// times nanoseconds.
    remainder: u128,
    /// Budget or debt that belongs to no cache.
    common: i64,
    loan: u64,
    accounts: BTreeMap<DiskId, Account>,
}

impl FlashBudget {
    /// Creates a budget that did not exist before: half a day's budget is saved, and there is no
    /// loan.
    pub fn new(now: Instant, settings: Settings) -> FlashBudget {
        let saved = Saved { credit: day(&settings) / 2, loan: 0 };
        FlashBudget::restore(now, settings, saved)
    }

    /// Creates a budget from its saved state.
    pub fn restore(now: Instant, settings: Settings, saved: Saved) -> FlashBudget {
        let day = day(&settings);
        FlashBudget {
            settings,
            at: now,
            remainder: 0,
            common: saved.credit.clamp(-day, day),
            loan: saved.loan.min(settings.pool_bytes),
            accounts: BTreeMap::new(),
        }
    }

    /// Adds the budget of `idle_ns` nanoseconds in which no cache wrote.
    pub fn earn_idle(&mut self, idle_ns: u64) {
        let day = day(&self.settings);
        let product = u128::from(self.settings.bytes_per_day) * u128::from(idle_ns);
        let earned = i64::try_from(product / u128::from(DAY_NS)).unwrap_or(i64::MAX).min(i64::MAX / 4);
        let over = (self.saved().credit + earned - day).clamp(0, earned);
        self.common += earned - over;
        self.loan = self.loan.saturating_sub(over as u64);
    }

    /// Changes the budget. If the new budget is larger, half of the difference counts as saved
    /// immediately.
    pub fn set(&mut self, settings: Settings) {
        self.settings.pool_bytes = settings.pool_bytes;
        self.loan = self.loan.min(settings.pool_bytes);
        if settings.bytes_per_day != self.settings.bytes_per_day {
            let more = day(&settings) - day(&self.settings);
            self.settings = settings;
            self.common += more.max(0) / 2;
            // The next budget round gives each account its new limit.
        }
    }

    /// Returns the settings.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// Runs a budget round: charges the bytes that the caches wrote, earns the budget of the time
    /// since the last budget round, and divides the saved budget. `unattributed` is the number of
    /// bytes that were written to the pool, and that no member counts. Returns the allowance of
    /// each member, in the same order.
    pub fn round(&mut self, now: Instant, unattributed: u64, members: &[Member]) -> Vec<Allowance> {
        let day = day(&self.settings);
        self.common = self.common.saturating_sub_unsigned(unattributed).max(-day);
        for member in members {
            // Flash writes from before the cache joined were charged to an earlier account.
            let begin = || Account { credit: 0, credit_max: 0, known: member.counts };
            let account = self.accounts.entry(member.disk).or_insert_with(begin);
            let Counts { written, borrowed, .. } = member.counts.since(account.known);
            account.known = member.counts;
            self.loan = self.loan.saturating_add(borrowed);
            let charged = written.saturating_sub(borrowed);
            account.credit = account.credit.saturating_sub_unsigned(charged).max(-day);
        }
        // The saved budget of a removed cache, or its debt, stays with the pool.
        let is_member = |disk: &DiskId| members.iter().any(|member| member.disk == *disk);
        let left: i64 =
            self.accounts.iter().filter(|(disk, _)| !is_member(disk)).map(|(_, gone)| gone.credit).sum();
        self.common = (self.common + left).max(-day);
        self.accounts.retain(|disk, _| is_member(disk));
        let earned = self.earn(now);
        let before: Vec<i64> = members.iter().map(|member| self.accounts[&member.disk].credit).collect();
        self.divide(earned, members);
        let total: u128 = members.iter().map(|member| u128::from(member.weight.max(1))).sum();
        let loan_left = self.settings.pool_bytes.saturating_sub(self.loan);
        let allowance = |(member, before): (&Member, i64)| {
            let account = &self.accounts[&member.disk];
            let loan = u128::from(loan_left) * u128::from(member.weight.max(1)) / total.max(1);
            Allowance {
                credit: account.credit,
                credit_max: account.credit_max,
                loan: loan as i64,
                earned: account.credit - before,
                as_of: member.counts,
            }
        };
        members.iter().zip(before).map(allowance).collect()
    }

    /// Returns the budget that was earned since the last call, in whole bytes.
    fn earn(&mut self, now: Instant) -> i64 {
        let elapsed = now.nanos_since(self.at);
        self.at = self.at.max(now);
        let product = u128::from(self.settings.bytes_per_day) * u128::from(elapsed) + self.remainder;
        self.remainder = product % u128::from(DAY_NS);
        i64::try_from(product / u128::from(DAY_NS)).unwrap_or(i64::MAX).min(i64::MAX / 4)
    }

    /// Divides the budget among the members: `earned`, the part that belongs to no cache, and the
    /// part that a cache has in excess of what it can save.
    fn divide(&mut self, earned: i64, members: &[Member]) {
        let day = day(&self.settings);
        let total: i128 = members.iter().map(|member| i128::from(member.weight.max(1))).sum();
        let part = |member: &Member, of: i64| {
            (i128::from(of) * i128::from(member.weight.max(1)) / total.max(1)) as i64
        };
        let mut pot = self.common.saturating_add(earned);
        for member in members {
            let account = self.accounts.get_mut(&member.disk).expect("each member has an account");
            account.credit_max = part(member, day);
            let over = (account.credit - account.credit_max).max(0);
            account.credit -= over;
            pot = pot.saturating_add(over);
        }
        let mut give = |disk: DiskId, wanted: i64, pot: &mut i64, up_to: i64| {
            let account = self.accounts.get_mut(&disk).expect("each member has an account");
            let given = wanted.min(up_to.min(account.credit_max) - account.credit).max(0);
            account.credit += given;
            *pot -= given;
        };
        for member in members {
            give(member.disk, part(member, earned / GUARANTEED_PART), &mut pot, i64::MAX);
        }
        for member in members {
            let most = pot.max(0);
            give(member.disk, most, &mut pot, 0);
        }
        // Each pass fills at least one account, or gives everything.
        for _ in 0..=members.len() {
            let before = pot.max(0);
            for member in members {
                give(member.disk, part(member, before), &mut pot, i64::MAX);
            }
            if pot <= 0 || pot == before {
                break;
            }
        }
        let saved: i64 = members.iter().map(|member| self.accounts[&member.disk].credit.max(0)).sum();
        let over = (pot - (day - saved).max(0)).max(0);
        self.loan = self.loan.saturating_sub(over as u64);
        self.common = (pot - over).max(-day);
    }

    /// Returns the saved budget and the loan, which the caller stores for the next start.
    pub fn saved(&self) -> Saved {
        let credit = self.accounts.values().map(|account| account.credit).sum::<i64>() + self.common;
        Saved { credit, loan: self.loan }
    }

    /// Returns the budget per day, the saved budget, and the loan that is not repaid.
    pub fn status(&self) -> Status {
        let Saved { credit, loan } = self.saved();
        Status { bytes_per_day: self.settings.bytes_per_day, credit, loan }
    }
}

/// Returns the budget of a day, which is also the maximum that can be saved.
fn day(settings: &Settings) -> i64 {
    settings.bytes_per_day.clamp(1, BYTES_PER_DAY_MAX) as i64
}
