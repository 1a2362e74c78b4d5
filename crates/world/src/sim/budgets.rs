//! Simulates a flash write budget that all disks share (docs/decisions/0050). The budget is set,
//! changed and removed under load. The budget's account survives crashes, because the daemon keeps
//! it in a file.
//!
//! The checker counts the bytes that flash receives. The bytes of writes that a budget may refuse
//! must stay within the bound that `hob_engine::flash_budget` promises. The engine must count every
//! byte.
//!
//! A separate random number generator chooses the histories with a budget, so that the budget does
//! not change the random choices of other histories.

use hob_engine::flash_budget::{Counts, DAY_NS, FlashBudget, Member, Settings};
use hob_engine::units::{DiskId, Instant};

use super::{Sabotage, Simulation, trace};
use crate::rng::SimRng;
use crate::{Violation, ensure};

/// Number that is combined with the seed of a history, to seed separate random numbers for
/// histories with a budget.
const SALT: u64 = 0x6275_6467;

/// Bytes by which background work of each disk may exceed the bound. The engine admits this work
/// before the budget is set, and requests its I/O afterwards.
const OVERSHOOT_BYTES: u64 = 256 << 10;

/// The budget of a history.
#[derive(Debug)]
pub(super) struct Budgets {
    rng: SimRng,
    account: Option<FlashBudget>,
    /// Time of the last budget round (see [`hob_engine::flash_budget`]).
    at: Instant,
    /// Flash writes that the engine had counted for each disk when the simulation last read the
    /// counts; `None` for a disk that the engine does not have.
    known: Vec<Option<Counts>>,
    /// Number of bytes of clean data that each disk wrote to flash since the last budget round. If
    /// the disk is removed before the next round, the budget's account is not charged for these
    /// bytes.
    uncharged: Vec<u64>,
    /// Sum of the engine's counts of all disks since the budget was set.
    total: Counts,
    /// Bytes sent to flash since the budget was set.
    sent: u64,
    /// Number of bytes that the present engine process has requested to write to flash. `submitted`
    /// is the number of these bytes that the simulation has sent to flash.
    requested: u64,
    submitted: u64,
    /// Bytes of flash writes that the engine had requested when the budget was set, and that were
    /// not sent to flash yet.
    waiting: u64,
    /// Twice the number of bytes of the requests that were in progress when the budget was set,
    /// because flash may receive two copies of their data. The budget did not limit these requests.
    in_progress: u64,
    /// Maximum number of bytes of clean data that flash may have received, without the budget that
    /// was earned since `at`.
    bound: u64,
}

impl Budgets {
    pub(super) fn draw(seed: u64, permille: u32, disks: usize) -> Option<Budgets> {
        let mut rng = SimRng::new(seed ^ SALT);
        rng.chance(permille).then(|| Budgets {
            rng,
            account: None,
            at: Instant(0),
            known: vec![None; disks],
            uncharged: vec![0; disks],
            total: Counts::default(),
            sent: 0,
            requested: 0,
            submitted: 0,
            waiting: 0,
            in_progress: 0,
            bound: 0,
        })
    }

    fn settings(&mut self) -> Settings {
        let rng = &mut self.rng;
        Settings {
            bytes_per_day: rng.pick(&[1, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 1 << 36]),
            pool_bytes: rng.pick(&[1, 1, 64 << 10, 256 << 10]),
        }
    }

    /// Adds the budget of the time since the last budget round to the bound.
    fn earn(&mut self, now: Instant) {
        if let Some(account) = &self.account {
            let bytes = u128::from(account.settings().bytes_per_day) * u128::from(now - self.at);
            self.bound += (bytes / u128::from(DAY_NS)) as u64 + 1;
        }
        self.at = now;
    }
}

impl Simulation<'_> {
    /// Sometimes sets, changes or removes the budget. Otherwise runs a budget round, which divides
    /// the budget between the disks.
    pub(super) fn maybe_change_budget(&mut self) {
        self.count_flash_writes();
        let now = self.now;
        let in_progress = 2 * self.requests.values().map(|it| it.request.len).sum::<u64>();
        let Some(budgets) = &mut self.budgets else { return };
        budgets.earn(now);
        let draw = budgets.rng.below(100);
        match &mut budgets.account {
            None if draw < 80 => {
                let settings = budgets.settings();
                budgets.account = Some(FlashBudget::new(now, settings));
                (budgets.sent, budgets.total) = (0, Counts::default());
                budgets.waiting = budgets.requested - budgets.submitted;
                budgets.in_progress = in_progress;
                budgets.bound = settings.bytes_per_day / 2 + settings.pool_bytes;
            }
            Some(_) if draw == 0 => budgets.account = None,
            Some(_) if draw == 1 => {
                let settings = budgets.settings();
                let account = budgets.account.as_mut().expect("the budget has an account");
                let before = account.settings();
                account.set(settings);
                budgets.bound += settings.bytes_per_day.saturating_sub(before.bytes_per_day) / 2
                    + settings.pool_bytes.saturating_sub(before.pool_bytes);
            }
            _ => {}
        }
        self.divide_budget();
    }

    /// Runs a budget round, and gives each disk its part of the budget.
    fn divide_budget(&mut self) {
        let is_ignored = self.options.sabotage == Some(Sabotage::IgnoredFlashBudget);
        let Some(budgets) = &mut self.budgets else { return };
        let present: Vec<DiskId> = (0..self.disks.len() as u32)
            .map(DiskId)
            .filter(|disk| self.engine.flash_counts(*disk).is_some())
            .collect();
        let Some(account) = &mut budgets.account else {
            present.iter().for_each(|disk| self.engine.allow_flash_writes(*disk, None));
            return;
        };
        let member = |disk: &DiskId| Member {
            disk: *disk,
            weight: 1 + u64::from(disk.0),
            counts: self.engine.flash_counts(*disk).unwrap_or_default(),
        };
        let members: Vec<Member> = present.iter().map(member).collect();
        let allowances = account.round(self.now, 0, &members);
        budgets.uncharged.fill(0);
        trace!(self, "flash write budget: {:?}", account.status());
        for (disk, allowance) in present.into_iter().zip(allowances) {
            if !is_ignored {
                self.engine.allow_flash_writes(disk, Some(allowance));
            }
        }
    }

    /// Reads the engine's counts of flash writes. The simulation calls this function before each
    /// output of the engine that may remove a disk.
    pub(super) fn count_flash_writes(&mut self) {
        let Some(budgets) = &mut self.budgets else { return };
        let mut has_new = false;
        for (disk, known) in budgets.known.iter_mut().enumerate() {
            let counts = self.engine.flash_counts(DiskId(disk as u32));
            has_new |= counts.is_some() && known.is_none();
            if let Some(counts) = counts {
                let new = counts.since(known.unwrap_or_default());
                budgets.total.written += new.written;
                budgets.requested += new.written;
                budgets.total.clean += new.clean;
                if known.is_none() {
                    // A new cache has no limit until it receives its first part of the budget.
                    budgets.bound += new.clean;
                }
                budgets.uncharged[disk] += new.clean;
                budgets.total.refused += new.refused;
                self.report.flash_writes_refused_bytes += new.refused;
            }
            if counts.is_none() {
                budgets.bound += std::mem::take(&mut budgets.uncharged[disk]);
            }
            *known = counts;
        }
        if has_new {
            self.divide_budget();
        }
    }

    /// Charges the budget's account for all flash writes before the engine process ends.
    pub(super) fn settle_budget(&mut self) {
        self.count_flash_writes();
        let now = self.now;
        if let Some(budgets) = &mut self.budgets {
            budgets.earn(now);
        }
        self.divide_budget();
        if let Some(budgets) = &mut self.budgets {
            budgets.known.fill(None);
            (budgets.requested, budgets.submitted) = (0, 0);
            // Like a real daemon, the next process reads the account from a file.
            budgets.account = budgets
                .account
                .take()
                .map(|account| FlashBudget::restore(now, account.settings(), account.saved()));
        }
    }

    /// Counts a write to flash.
    pub(super) fn note_flash_write(&mut self, bytes: u64) {
        if let Some(budgets) = &mut self.budgets {
            budgets.sent += bytes;
            budgets.submitted += bytes;
        }
    }

    /// Checks that flash writes are counted and within the bound.
    pub(super) fn check_budget(&mut self) -> Result<(), Violation> {
        self.count_flash_writes();
        let now = self.now;
        let Some(budgets) = &mut self.budgets else { return Ok(()) };
        budgets.earn(now);
        let Budgets { account: Some(_), total, sent, waiting, in_progress, bound, .. } = budgets else {
            return Ok(());
        };
        ensure!(*sent <= total.written + *waiting, "{sent} bytes sent to flash, but {total:?} counted");
        let overshoot = *waiting + *in_progress + OVERSHOOT_BYTES * self.disks.len() as u64;
        let unrefusable = total.written - total.clean.min(total.written);
        ensure!(
            *sent <= *bound + unrefusable + overshoot,
            "{sent} bytes sent to flash exceed the budget: {bound} bytes, and {unrefusable} that it may not refuse"
        );
        Ok(())
    }
}
