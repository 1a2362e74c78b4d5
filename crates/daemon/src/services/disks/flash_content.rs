//! Decides whether flash has all data that a persistent cache should have according to the saved
//! state.
//!
//! Flash may have less data than the cache had, because a device is missing, was replaced by an
//! older copy of itself, or is damaged. A cache that may have had dirty data is then refused,
//! because the backing lacks that data. A cache without dirty data starts empty.

use hob_storage::pool::recovery::Found;

use crate::state::JournalSpec;

/// The saved state of a cache, and whether all devices of its pool are present.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    pub(super) journal: JournalSpec,
    /// True if flash may have data that the backing lacks: the saved mode permits dirty data, or
    /// the saved state is older than the data on flash.
    pub(super) may_be_dirty: bool,
    /// True if the saved mode permits dirty data.
    pub(super) was_write_back: bool,
    /// True if a device of the pool is missing.
    pub(super) lacks_device: bool,
}

/// Kind of content that the recovery found on flash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Flash has a valid journal of the cache.
    Journal {
        /// Number of the journal's ring.
        ring: u32,
        /// Highest number of a journal ring that has segments on flash.
        newest: u32,
        /// Number of dirty sectors in segments that no present device has.
        sectors_missing: u64,
    },
    /// Flash has no page of a valid journal of the cache.
    NoJournal {
        /// Highest number of a journal ring that has segments on flash; 0 if none has.
        newest: u32,
        /// True if flash has segments of the cache.
        has_segments: bool,
    },
    /// Flash has a journal of the cache, and the journal's content cannot be trusted.
    Damaged,
}

/// Decision about a cache after its recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// Use the cache, because its journal describes all dirty data.
    Use,
    StartEmpty(Empty),
    Refuse(Lack),
}

/// Reason why a cache starts empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Empty {
    /// The cache has never had data.
    IsNew,
    /// Flash has no data of the cache that can be recovered.
    NoData,
    /// Flash has only an older journal. hob has removed the newest journal, or an operator has
    /// removed the device of the newest journal from the pool.
    Outdated,
    Damaged,
}

/// Reason why a cache that may have had dirty data is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// A missing device may have the newest journal or dirty data.
    Device,
    /// Flash has an older journal than the newest one that the saved state names.
    NewestJournal,
    /// This number of dirty sectors is in segments that no device of the pool has, although no
    /// device is missing.
    Sectors(u64),
    Journal,
    Damaged,
}

impl Content {
    pub(super) fn of(found: &Found) -> Content {
        let remains = found.remains();
        let newest = remains.rings.first().map_or(0, |ring| ring.number);
        match found {
            Found::Recovered(recovered, _) => Content::Journal {
                ring: recovered.summary.ring,
                newest,
                sectors_missing: recovered.summary.sectors_missing,
            },
            Found::Nothing(_) => Content::NoJournal {
                newest,
                has_segments: !(remains.rings.is_empty() && remains.data.is_empty()),
            },
            Found::Damaged { .. } => Content::Damaged,
        }
    }

    /// Returns true if the content is the newest journal that the saved state names, and flash has
    /// all data that this journal describes.
    fn is_whole(self, journal: JournalSpec) -> bool {
        matches!(self, Content::Journal { newest, sectors_missing: 0, .. } if newest >= journal.required_ring())
    }
}

/// Returns the decision about a cache from the saved state and from the content of flash.
pub(super) fn judge(expected: &Expected, content: Content) -> Decision {
    let Expected { journal, may_be_dirty, was_write_back, lacks_device } = *expected;
    let nothing =
        |has_segments| Decision::StartEmpty(if has_segments { Empty::NoData } else { Empty::IsNew });
    if !may_be_dirty {
        return match content {
            Content::Journal { .. } => Decision::Use,
            Content::NoJournal { has_segments, .. } => nothing(has_segments),
            Content::Damaged => Decision::StartEmpty(Empty::Damaged),
        };
    }
    if lacks_device && was_write_back && !content.is_whole(journal) {
        return Decision::Refuse(Lack::Device);
    }
    // The saved state names a complete journal that neither hob nor an operator has discarded.
    let is_owed = journal.written > 0 && !journal.ended;
    match content {
        Content::Journal { ring, .. } if ring < journal.written && journal.ended => {
            Decision::StartEmpty(Empty::Outdated)
        }
        Content::Journal { ring, .. } if ring < journal.written => Decision::Refuse(Lack::NewestJournal),
        Content::Journal { sectors_missing, .. } if is_owed && !lacks_device && sectors_missing > 0 => {
            Decision::Refuse(Lack::Sectors(sectors_missing))
        }
        Content::Journal { .. } => Decision::Use,
        // A ring that hob made invalid has a higher number.
        Content::NoJournal { newest, .. } if is_owed && newest <= journal.ring => {
            Decision::Refuse(Lack::Journal)
        }
        Content::NoJournal { has_segments, .. } => nothing(has_segments),
        Content::Damaged => Decision::Refuse(Lack::Damaged),
    }
}

impl Lack {
    /// Returns the reason as text for the operator. `missing` lists the missing devices, and `what`
    /// describes the damage.
    pub(super) fn reason(self, pool: &str, missing: &[String], what: &str) -> String {
        match self {
            Lack::Device => {
                format!(
                    "{} of pool {pool} is missing, and may have dirty data of its cache",
                    missing.join(", ")
                )
            }
            Lack::NewestJournal => {
                "flash has only an older journal of its cache, which may have had dirty data \
                                    since; was a device of the pool replaced by an older copy?"
                    .to_owned()
            }
            Lack::Sectors(sectors) => format!(
                "{} of dirty data are in segments that no device of pool {pool} has; was a device replaced by \
                 an older copy?",
                super::recover::bytes(sectors)
            ),
            Lack::Journal => {
                "flash has no valid page of the journal of its cache, which may have had dirty data"
                    .to_owned()
            }
            Lack::Damaged => format!("the journal of its cache is damaged ({what})"),
        }
    }

    /// Returns true if a device that is not connected now may have the missing data.
    pub(super) fn may_return(self) -> bool {
        matches!(self, Lack::NewestJournal | Lack::Sectors(_))
    }
}

#[cfg(test)]
mod tests {
    use super::Empty::{IsNew, NoData, Outdated};
    use super::*;

    /// A saved state that names journal ring 3 as complete and journal ring 4 as begun.
    fn expected() -> Expected {
        let mut journal = JournalSpec::new();
        (journal.ring, journal.written) = (4, 3);
        Expected { journal, may_be_dirty: true, was_write_back: true, lacks_device: false }
    }

    fn ring(ring: u32) -> Content {
        Content::Journal { ring, newest: ring, sectors_missing: 0 }
    }

    const INCOMPLETE: Content = Content::Journal { ring: 3, newest: 4, sectors_missing: 5 };
    const SEGMENTS: Content = Content::NoJournal { newest: 3, has_segments: true };
    const INVALID: Content = Content::NoJournal { newest: 5, has_segments: true };
    const NOTHING: Content = Content::NoJournal { newest: 0, has_segments: false };

    #[test]
    fn a_cache_with_dirty_data_is_used_only_with_its_newest_journal_and_all_segments() {
        let table = [
            (ring(4), Decision::Use),
            (ring(3), Decision::Use),
            (ring(5), Decision::Use),
            (ring(2), Decision::Refuse(Lack::NewestJournal)),
            (INCOMPLETE, Decision::Refuse(Lack::Sectors(5))),
            (SEGMENTS, Decision::Refuse(Lack::Journal)),
            (NOTHING, Decision::Refuse(Lack::Journal)),
            (INVALID, Decision::StartEmpty(NoData)),
            (Content::Damaged, Decision::Refuse(Lack::Damaged)),
        ];
        for (content, decision) in table {
            assert_eq!(judge(&expected(), content), decision, "{content:?}");
        }
    }

    #[test]
    fn a_missing_device_matters_unless_the_newest_journal_needs_none() {
        let expected = Expected { lacks_device: true, ..expected() };
        let table = [
            (ring(4), Decision::Use),
            (Content::Journal { ring: 3, newest: 4, sectors_missing: 0 }, Decision::Use),
            (ring(3), Decision::Refuse(Lack::Device)),
            (INCOMPLETE, Decision::Refuse(Lack::Device)),
            (SEGMENTS, Decision::Refuse(Lack::Device)),
            (NOTHING, Decision::Refuse(Lack::Device)),
            (Content::Damaged, Decision::Refuse(Lack::Device)),
        ];
        for (content, decision) in table {
            assert_eq!(judge(&expected, content), decision, "{content:?}");
        }
    }

    #[test]
    fn what_remains_of_a_cache_that_was_removed_or_given_up_is_no_loss() {
        let mut expected = expected();
        expected.journal.ended = true;
        let table = [
            (ring(4), Decision::Use),
            (ring(2), Decision::StartEmpty(Outdated)),
            (INCOMPLETE, Decision::Use),
            (SEGMENTS, Decision::StartEmpty(NoData)),
            (NOTHING, Decision::StartEmpty(IsNew)),
        ];
        for (content, decision) in table {
            assert_eq!(judge(&expected, content), decision, "{content:?}");
        }
    }

    #[test]
    fn a_ring_that_was_never_in_use_is_not_missed() {
        let mut expected = Expected { lacks_device: true, ..expected() };
        expected.journal.unused = 4;
        assert_eq!(judge(&expected, ring(3)), Decision::Use);
        assert_eq!(judge(&expected, ring(2)), Decision::Refuse(Lack::Device));
        expected.journal.ring = 5;
        assert_eq!(judge(&expected, ring(3)), Decision::Refuse(Lack::Device));
    }

    #[test]
    fn a_cache_without_dirty_data_is_never_refused() {
        let expected =
            Expected { may_be_dirty: false, was_write_back: false, lacks_device: true, ..expected() };
        for content in [ring(1), INCOMPLETE, SEGMENTS, INVALID, NOTHING, Content::Damaged] {
            assert!(!matches!(judge(&expected, content), Decision::Refuse(_)), "{content:?}");
        }
    }
}
