//! The chooser under a flash write budget: determines which candidates write so little that the
//! cache's part of the budget covers their flash writes.

use super::{BUDGET_CANDIDATES, CANDIDATES, Chooser, Combination, Miniature, WINDOW_SHIFT, Window};
use crate::flash_budget::{Allowance, pressure};
use crate::policy::PolicyKind;
use crate::units::SECTOR_BYTES;

/// Minimum number of comparisons before the chooser relies on the received budget, in the
/// fixed-point format of [`Window`].
const COMPARISONS_MIN: i64 = super::COMPARISONS as i64 * Window::UNIT;

/// Maximum number of candidates. If the settings fix the admission and only the policy is `auto`,
/// there are fewer candidates.
const CANDIDATES_MAX: usize = CANDIDATES.len() + BUDGET_CANDIDATES.len();

/// Whether each candidate may be chosen, in the order of the miniatures.
pub(super) type Affordable = [bool; CANDIDATES_MAX];

/// The part of a flash write budget that a cache received. Older amounts lose weight at the same
/// rate as the results of the miniatures.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ChoiceBudget {
    /// Bytes of budget that the cache received since the last comparison.
    new: i64,
    /// Decaying sum of the received budget, sectors, in the fixed-point format of [`Window`].
    sectors: i64,
    /// Decaying number of comparisons, in the fixed-point format of [`Window`].
    comparisons: i64,
    /// True if the cache's unused budget is less than half of the amount that the cache can save.
    pub(super) is_binding: bool,
}

impl ChoiceBudget {
    fn compare(&mut self) {
        self.sectors += self.new / SECTOR_BYTES as i64 * Window::UNIT - (self.sectors >> WINDOW_SHIFT);
        self.comparisons += Window::UNIT - (self.comparisons >> WINDOW_SHIFT);
        self.new %= SECTOR_BYTES as i64;
    }
}

impl Chooser {
    /// Takes a new part of a flash write budget into account; `None` ends the budget.
    pub(crate) fn note_allowance(&mut self, allowance: Option<&Allowance>) {
        let Some(allowance) = allowance else {
            self.budget = None;
            return;
        };
        if self.budget.is_none() {
            self.add_strict_candidates();
        }
        let budget = self.budget.get_or_insert_default();
        budget.new = budget.new.saturating_add(allowance.earned.max(0));
        budget.is_binding = pressure(allowance.credit, allowance.credit_max) > 0;
    }

    fn add_strict_candidates(&mut self) {
        if !self.chooses_admission {
            return;
        }
        let policy = self.miniatures[0].combination.policy;
        let is_only_policy = self.miniatures.iter().all(|mini| mini.combination.policy == policy);
        for (name, admission) in BUDGET_CANDIDATES {
            let named = PolicyKind::from_name(name).expect("candidates name policies");
            let combination = Combination {
                policy: if is_only_policy { policy } else { named },
                admission: admission.parse().expect("candidates name admissions"),
            };
            if self.miniatures.iter().all(|mini| mini.combination != combination) {
                let blocks = self.blocks as u32;
                self.miniatures.push(Miniature::new(blocks, self.block_shift, combination, true));
            }
        }
    }

    /// Returns for each candidate whether it may be chosen. Unless a budget is running out, every
    /// candidate may be chosen. Otherwise only candidates that write no more than the budget allows
    /// may be chosen, or, if there are none, the candidate that writes least.
    pub(super) fn affordable(&mut self) -> Affordable {
        let all = [true; CANDIDATES_MAX];
        let threshold = self.threshold;
        let Some(budget) = &mut self.budget else { return all };
        budget.compare();
        if !budget.is_binding || budget.comparisons < COMPARISONS_MIN {
            return all;
        }
        // The miniatures see a sample of the disk. Their windows may be older than the budget.
        let paid = i128::from(budget.sectors) * i128::from(threshold) / i128::from(u32::MAX);
        let since = i128::from(budget.comparisons);
        let rate = |window: &Window| {
            (i128::from(window.sectors_written), i128::from(window.comparisons.max(Window::UNIT)))
        };
        let is_paid = |mini: &Miniature| {
            let (written, comparisons) = rate(&mini.window);
            written * since <= paid * comparisons
        };
        let mut affordable = [false; CANDIDATES_MAX];
        self.miniatures.iter().zip(&mut affordable).for_each(|(mini, paid)| *paid = is_paid(mini));
        if !affordable.contains(&true) {
            let least = (0..self.miniatures.len()).min_by_key(|at| {
                let (written, comparisons) = rate(&self.miniatures[*at].window);
                (written << 16) / comparisons
            });
            least.into_iter().for_each(|at| affordable[at] = true);
        }
        affordable
    }

    /// Returns the candidate with the highest hit ratio among those that may be chosen.
    pub(super) fn best_of(&self, affordable: &Affordable) -> usize {
        let allowed = (0..self.miniatures.len()).filter(|at| affordable[*at]);
        allowed.max_by_key(|at| self.miniatures[*at].window.hit_ppm()).unwrap_or(self.current)
    }
}
