//! May what a persistent cache holds be believed? A table over what is known of its backing.
//!
//! A cache that was closed cleanly is believed when the backing is the same and was not changed since. Otherwise, and where it
//! has grown in the middle of the cache's life, the backing is
//! compared with a sample of what the cache holds of it. Clean data that is not believed is given up; dirty data
//! that does not fit is neither written nor lost: the disk stays offline until somebody decides.

/// Is it the backing that the cache was of?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Same {
    /// Size and identity are.
    Yes,
    /// It is larger, and its identity is that of the same backing with the size that it had.
    Grown,
    /// It is another.
    No,
}

/// Has anybody changed it since the cache was closed?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Changed {
    /// No.
    No,
    /// Yes.
    Yes,
    /// Nobody can tell: the cache was not closed, or the backing has no such mark.
    Unknown,
}

/// Does it hold what the cache remembers of it?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sample {
    /// As far as it was looked at.
    Fits,
    /// No.
    Differs,
}

/// What is done with the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is used as it is.
    Believe,
    /// Its data is given up; all of it is on the backing, or on another.
    Empty,
    /// Nothing, until somebody decides.
    Refuse,
}

/// The table. `sample` is asked for where it matters only.
pub(super) fn judge<E>(
    same: Same,
    changed: Changed,
    has_dirty: bool,
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
    Ok(match (fits, has_dirty) {
        (true, _) => Verdict::Believe,
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
        use Verdict::{Believe, Empty, Refuse};
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
            (Same::Yes, Changed::Unknown, Sample::Fits, Believe, Believe),
            (Same::Yes, Changed::Unknown, Sample::Differs, Empty, Refuse),
            (Same::Grown, Changed::No, Sample::Fits, Believe, Believe),
            (Same::Grown, Changed::No, Sample::Differs, Empty, Refuse),
            (Same::Grown, Changed::Yes, Sample::Fits, Empty, Refuse),
            (Same::Grown, Changed::Yes, Sample::Differs, Empty, Refuse),
            (Same::Grown, Changed::Unknown, Sample::Fits, Believe, Believe),
            (Same::Grown, Changed::Unknown, Sample::Differs, Empty, Refuse),
        ];
        for (same, changed, sample, clean, dirty) in table {
            for (has_dirty, verdict) in [(false, clean), (true, dirty)] {
                let judged = judge(same, changed, has_dirty, || Ok::<_, ()>(sample));
                assert_eq!(judged, Ok(verdict), "{same:?} {changed:?} {sample:?} dirty: {has_dirty}");
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
            assert!(judge(same, changed, true, || Err::<Sample, _>("read")).is_ok());
        }
        assert_eq!(judge(Same::Yes, Changed::Unknown, true, || Err::<Sample, _>("read")), Err("read"));
    }
}
