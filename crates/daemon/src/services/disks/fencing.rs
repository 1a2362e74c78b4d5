//! Decides whether a recovered persistent cache may be used.
//!
//! A cache is used without checks if the backing is the same and there is evidence that the backing
//! is unchanged. Without evidence, or if the backing has grown, the daemon compares a sample of
//! sectors to check whether the backing has the disk's data at all. If the sample matches, clean
//! sectors are verified against the backing before they are served (docs/decisions/0033).
//!
//! The cache is not used if the backing is another one, if another program has changed it, or if a
//! sampled sector differs. Without dirty data, the cache then starts empty. Dirty data is neither
//! written nor discarded: the disk stays offline until an operator decides.

use hob_engine::preset::Verify;

/// Whether the cache belongs to the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::services) enum Same {
    /// The backing has the size and the identity that the journal recorded.
    Yes,
    /// The backing is the same one, and is larger than the journal recorded.
    Grown,
    /// The size or the identity differs: the cache belongs to another backing.
    No,
}

/// Whether another program has changed the backing since the cache was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::services) enum Changed {
    No,
    Yes,
    /// The cache was not closed, and the times of the backing's file show a change after hob last
    /// served the disk. The change may concern only attributes of the file, so an operator can
    /// accept the change.
    Later,
    /// There is no evidence whether the backing changed.
    Unknown,
}

/// Whether the backing holds the data that the cache recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::services) enum Sample {
    /// All sampled sectors match.
    Fits,
    /// A sampled sector differs.
    Differs,
}

/// The decision about a recovered cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::services) enum Verdict {
    /// Use the cache without verification.
    Believe,
    /// Use the cache, and verify its clean sectors against the backing before they are served.
    Verify,
    /// Discard the cache's data, which is clean and may differ from the backing.
    Empty,
    /// Keep the disk offline until an operator decides.
    Refuse,
}

/// Returns the decision about a recovered cache. Calls `sample`, which compares sampled sectors
/// with the backing, only if the decision depends on its result.
pub(in crate::services) fn judge<E>(
    same: Same,
    changed: Changed,
    has_dirty: bool,
    verify: Verify,
    sample: impl FnOnce() -> Result<Sample, E>,
) -> Result<Verdict, E> {
    let fits = match (same, changed) {
        (Same::No, _) => false,
        (Same::Yes, Changed::No) => true,
        (Same::Yes | Same::Grown, Changed::Yes) => false,
        (Same::Yes | Same::Grown, Changed::Later) if has_dirty && verify != Verify::Trust => false,
        (Same::Yes | Same::Grown, Changed::Later | Changed::Unknown) | (Same::Grown, Changed::No) => {
            sample()? == Sample::Fits
        }
    };
    let is_proved = same == Same::Yes && changed == Changed::No;
    let is_believed = verify == Verify::Trust || is_proved && verify == Verify::Auto;
    Ok(match (fits, has_dirty) {
        (true, _) if is_believed => Verdict::Believe,
        (true, _) => Verdict::Verify,
        (false, false) => Verdict::Empty,
        (false, true) => Verdict::Refuse,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Promise 2: a cache is bound to its backing's identity, and is not used if the identity does
    /// not match.
    #[test]
    fn every_case_has_its_verdict() {
        use Verdict::{Believe, Empty, Refuse, Verify as Compare};
        // Each row: whether the backing is the same, whether it changed, whether the sample fits,
        // and the decisions without and with dirty data.
        let table = [
            (Same::No, Changed::No, Sample::Fits, Empty, Refuse),
            (Same::No, Changed::No, Sample::Differs, Empty, Refuse),
            (Same::No, Changed::Yes, Sample::Fits, Empty, Refuse),
            (Same::No, Changed::Yes, Sample::Differs, Empty, Refuse),
            (Same::No, Changed::Later, Sample::Fits, Empty, Refuse),
            (Same::No, Changed::Later, Sample::Differs, Empty, Refuse),
            (Same::No, Changed::Unknown, Sample::Fits, Empty, Refuse),
            (Same::No, Changed::Unknown, Sample::Differs, Empty, Refuse),
            (Same::Yes, Changed::No, Sample::Fits, Believe, Believe),
            (Same::Yes, Changed::No, Sample::Differs, Believe, Believe),
            (Same::Yes, Changed::Yes, Sample::Fits, Empty, Refuse),
            (Same::Yes, Changed::Yes, Sample::Differs, Empty, Refuse),
            (Same::Yes, Changed::Later, Sample::Fits, Compare, Refuse),
            (Same::Yes, Changed::Later, Sample::Differs, Empty, Refuse),
            (Same::Yes, Changed::Unknown, Sample::Fits, Compare, Compare),
            (Same::Yes, Changed::Unknown, Sample::Differs, Empty, Refuse),
            (Same::Grown, Changed::No, Sample::Fits, Compare, Compare),
            (Same::Grown, Changed::No, Sample::Differs, Empty, Refuse),
            (Same::Grown, Changed::Yes, Sample::Fits, Empty, Refuse),
            (Same::Grown, Changed::Yes, Sample::Differs, Empty, Refuse),
            (Same::Grown, Changed::Later, Sample::Fits, Compare, Refuse),
            (Same::Grown, Changed::Later, Sample::Differs, Empty, Refuse),
            (Same::Grown, Changed::Unknown, Sample::Fits, Compare, Compare),
            (Same::Grown, Changed::Unknown, Sample::Differs, Empty, Refuse),
        ];
        for (same, changed, sample, clean, dirty) in table {
            for (has_dirty, verdict) in [(false, clean), (true, dirty)] {
                for verify in [Verify::Auto, Verify::Always, Verify::Trust] {
                    let is_accepted = changed == Changed::Later && same != Same::No && sample == Sample::Fits;
                    let verdict = match (verdict, verify) {
                        (Believe, Verify::Always) => Compare,
                        (Compare, Verify::Trust) => Believe,
                        (Refuse, Verify::Trust) if is_accepted => Believe,
                        _ => verdict,
                    };
                    let judged = judge(same, changed, has_dirty, verify, || Ok::<_, ()>(sample));
                    let case = format!("{same:?} {changed:?} {sample:?} dirty: {has_dirty} {verify:?}");
                    assert_eq!(judged, Ok(verdict), "{case}");
                }
            }
        }
    }

    #[test]
    fn nothing_is_read_where_it_does_not_matter() {
        let known = [
            (Same::No, Changed::Unknown),
            (Same::Yes, Changed::No),
            (Same::Yes, Changed::Yes),
            (Same::Yes, Changed::Later),
            (Same::Grown, Changed::Yes),
        ];
        for (same, changed) in known {
            assert!(judge(same, changed, true, Verify::Auto, || Err::<Sample, _>("read")).is_ok());
        }
        let unread = judge(Same::Yes, Changed::Unknown, true, Verify::Auto, || Err::<Sample, _>("read"));
        assert_eq!(unread, Err("read"));
    }
}
