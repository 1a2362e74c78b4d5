//! May what a persistent cache holds be believed? A table over what is known of its backing.
//!
//! A cache is used as it is when the backing is the same and there is evidence that nobody changed it. Without evidence, and where
//! the backing has grown, a sample tells whether it is the same disk at all; then clean sectors are compared with the backing before
//! they are served (docs/decisions/0033). Clean data of another backing is given up; dirty data
//! that does not fit is neither written nor lost: the disk stays offline until somebody decides.

use hob_engine::preset::Verify;

/// Is it the backing that the cache was of?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon::manager) enum Same {
    /// Size and identity are.
    Yes,
    /// It is larger, and its identity is that of the same backing with the size that it had.
    Grown,
    /// It is another.
    No,
}

/// Has anybody changed it since the cache was closed?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon::manager) enum Changed {
    /// No.
    No,
    /// Yes.
    Yes,
    /// There is no evidence.
    Unknown,
}

/// Does it hold what the cache remembers of it?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon::manager) enum Sample {
    /// As far as it was looked at.
    Fits,
    /// No.
    Differs,
}

/// What is done with the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon::manager) enum Verdict {
    /// It is used as it is.
    Believe,
    /// It is used, and its clean sectors are compared with the backing before they are served.
    Verify,
    /// Its data is given up; all of it is on the backing, or on another.
    Empty,
    /// Nothing, until somebody decides.
    Refuse,
}

/// The table. `sample` is asked for where it matters only.
pub(in crate::daemon::manager) fn judge<E>(
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
        (Same::Yes, Changed::Unknown) | (Same::Grown, Changed::No | Changed::Unknown) => {
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

    /// Promise 2: a cache is bound to its backing's identity, and dropped when it does not match.
    #[test]
    fn every_case_has_its_verdict() {
        use Verdict::{Believe, Empty, Refuse, Verify as Compare};
        // Same, changed, sample, and the verdicts without and with dirty data.
        let table = [
            (Same::No, Changed::No, Sample::Fits, Empty, Refuse),
            (Same::No, Changed::No, Sample::Differs, Empty, Refuse),
            (Same::No, Changed::Yes, Sample::Fits, Empty, Refuse),
            (Same::No, Changed::Yes, Sample::Differs, Empty, Refuse),
            (Same::No, Changed::Unknown, Sample::Fits, Empty, Refuse),
            (Same::No, Changed::Unknown, Sample::Differs, Empty, Refuse),
            (Same::Yes, Changed::No, Sample::Fits, Believe, Believe),
            (Same::Yes, Changed::No, Sample::Differs, Believe, Believe),
            (Same::Yes, Changed::Yes, Sample::Fits, Empty, Refuse),
            (Same::Yes, Changed::Yes, Sample::Differs, Empty, Refuse),
            (Same::Yes, Changed::Unknown, Sample::Fits, Compare, Compare),
            (Same::Yes, Changed::Unknown, Sample::Differs, Empty, Refuse),
            (Same::Grown, Changed::No, Sample::Fits, Compare, Compare),
            (Same::Grown, Changed::No, Sample::Differs, Empty, Refuse),
            (Same::Grown, Changed::Yes, Sample::Fits, Empty, Refuse),
            (Same::Grown, Changed::Yes, Sample::Differs, Empty, Refuse),
            (Same::Grown, Changed::Unknown, Sample::Fits, Compare, Compare),
            (Same::Grown, Changed::Unknown, Sample::Differs, Empty, Refuse),
        ];
        for (same, changed, sample, clean, dirty) in table {
            for (has_dirty, verdict) in [(false, clean), (true, dirty)] {
                for verify in [Verify::Auto, Verify::Always, Verify::Trust] {
                    let verdict = match (verdict, verify) {
                        (Believe, Verify::Always) => Compare,
                        (Compare, Verify::Trust) => Believe,
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
            (Same::Grown, Changed::Yes),
        ];
        for (same, changed) in known {
            assert!(judge(same, changed, true, Verify::Auto, || Err::<Sample, _>("read")).is_ok());
        }
        let unread = judge(Same::Yes, Changed::Unknown, true, Verify::Auto, || Err::<Sample, _>("read"));
        assert_eq!(unread, Err("read"));
    }
}
