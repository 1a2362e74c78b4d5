//! Disks that a host waits for because another one has them: when is each to be tried?
//!
//! A cluster has many disks and each is known to many hosts; if all of them looked at each every second, the store would do nothing else. So a
//! host *hears* of what changes ([`Waiting::handle_news`]) and tries a disk when it has come free. What is heard is a hint and no more: whoever tries looks
//! first, and takes in a transaction. News may be late, twice, in another order, or missing. Tries are spread, differently on each host: most
//! hosts hear that a disk was taken before it is their turn.
//!
//! Call order: [`Waiting::handle_waits`] with all disks that are waited for, now and then; [`Waiting::poll`] until it has nothing, and again at
//! [`Waiting::poll_timeout`]; [`Waiting::handle_look`] and [`Waiting::handle_tried`] with what came of a try.

use std::collections::{BTreeMap, BTreeSet};

use super::{Look, Member};
use crate::units::Instant;

/// Those who wait for a disk that has come free try it within so long, nanoseconds.
pub const SPREAD_NS: u64 = 1_000_000_000;

/// A disk of which nothing is heard is looked at that often, nanoseconds.
pub const CHECK_NS: u64 = 60_000_000_000;

/// Disks are looked at together, so many times in that.
const CHECKS: u64 = 12;

/// Where no news can be had, every disk is looked at that often, nanoseconds, ...
pub const LOOK_NS: u64 = 1_000_000_000;

/// ... but no more of them in a second.
pub const LOOKS_PER_SECOND_MAX: u64 = 200;

/// So many disks in a second are looked at because news had been missed.
const CATCH_UP_PER_SECOND_MAX: u64 = 1000;

/// Pause after a try that found nothing out, nanoseconds.
const AGAIN_NS: u64 = 1_000_000_000;

/// A try of which nothing is heard came to nothing, nanoseconds.
const TRY_NS_MAX: u64 = 10_000_000_000;

/// What is heard of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// Its title was put: it is `taken`, or given back.
    Title {
        /// See [`Title::taken`](super::Title::taken).
        taken: bool,
    },
    /// Its hold is gone: given back, or its lease has ended.
    HoldGone,
}

/// What came of a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried {
    /// It is this host's.
    Taken,
    /// Another host has it, or something that it cannot do without.
    Elsewhere,
    /// It may be had at that moment.
    Settles(Instant),
    /// Nobody knows.
    Unknown,
}

#[derive(Clone, Debug, Default)]
struct Wait {
    /// In `due`.
    due: Instant,
    /// The newest revision of its title that was seen or heard of.
    title: u64,
    /// When its hold was deleted last: the revision, and when that was heard.
    hold_gone: Option<(u64, Instant)>,
    /// The newest revision at which it was looked at.
    looked: u64,
}

impl Wait {
    /// The newest that was heard.
    fn heard(&self) -> u64 {
        self.hold_gone.map_or(0, |(revision, _)| revision).max(self.title)
    }
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Waiting {
    seed: u64,
    settle_ns: u64,
    hears: bool,
    disks: BTreeMap<String, Wait>,
    due: BTreeSet<(Instant, String)>,
}

impl Waiting {
    /// Nothing is waited for. Whoever vanishes is given `settle_ns`.
    pub fn new(me: &Member, settle_ns: u64) -> Self {
        Waiting {
            seed: scatter(0, &me.id),
            settle_ns,
            hears: false,
            disks: BTreeMap::new(),
            due: BTreeSet::new(),
        }
    }

    /// All disks that are waited for. News of others is not kept.
    pub fn handle_waits<'a>(&mut self, now: Instant, disks: impl Iterator<Item = &'a str>) {
        let mut gone: BTreeSet<String> = self.disks.keys().cloned().collect();
        for disk in disks {
            if !gone.remove(disk) && !self.disks.contains_key(disk) {
                self.disks.insert(disk.to_owned(), Wait::default());
                self.try_within(now, disk, SPREAD_NS);
            }
        }
        for disk in gone {
            self.forget(&disk);
        }
    }

    fn forget(&mut self, disk: &str) {
        if let Some(wait) = self.disks.remove(disk) {
            self.due.remove(&(wait.due, disk.to_owned()));
        }
    }

    /// Is anything waited for?
    pub fn is_idle(&self) -> bool {
        self.disks.is_empty()
    }

    /// News is heard from now on, or not any more. What happened before is not known.
    pub fn handle_hearing(&mut self, now: Instant, hears: bool) {
        self.hears = hears;
        let spread = match hears {
            true => self.disks.len() as u64 * 1_000_000_000 / CATCH_UP_PER_SECOND_MAX,
            false => self.look_ns(),
        };
        let disks: Vec<String> = self.disks.keys().cloned().collect();
        for disk in disks {
            let at = now + self.part(&disk, now.0, spread.max(SPREAD_NS));
            if at < self.disks[&disk].due {
                self.try_at(at, &disk);
            }
        }
    }

    /// Something happened to a disk, at that revision.
    pub fn handle_news(&mut self, now: Instant, disk: &str, revision: u64, news: News) {
        let Some(wait) = self.disks.get_mut(disk) else { return };
        match news {
            News::Title { taken } if revision > wait.title => {
                wait.title = revision;
                let is_gone = wait.hold_gone.is_some_and(|(gone, _)| gone > revision);
                match taken {
                    false => self.try_within(now, disk, SPREAD_NS),
                    true if !is_gone => self.check_later(now, disk),
                    true => {}
                }
            }
            News::HoldGone if revision > wait.heard() => {
                let is_known = wait.title > 0;
                wait.hold_gone = Some((revision, now));
                let from = if is_known { now + self.settle_ns } else { now };
                self.try_within(from, disk, SPREAD_NS);
            }
            _ => {}
        }
    }

    /// This was seen of a disk by whoever tries it.
    pub fn handle_look(&mut self, disk: &str, look: &Look) {
        let Some(wait) = self.disks.get_mut(disk) else { return };
        let title = look.title.as_ref().map_or(0, |title| title.revision);
        wait.title = wait.title.max(title);
        wait.looked = wait.looked.max(title).max(look.hold.as_ref().map_or(0, |hold| hold.revision));
    }

    /// A disk was tried.
    pub fn handle_tried(&mut self, now: Instant, disk: &str, tried: Tried) {
        let Some(wait) = self.disks.get(disk) else { return };
        match tried {
            // What was heard meanwhile has said already when it is to be tried.
            Tried::Elsewhere if wait.heard() > wait.looked => {}
            Tried::Elsewhere => self.check_later(now, disk),
            Tried::Taken => self.forget(disk),
            Tried::Settles(at) => self.try_within(at, disk, SPREAD_NS),
            Tried::Unknown => self.try_within(now + AGAIN_NS, disk, AGAIN_NS),
        }
    }

    /// Since when nobody has had a disk, as far as was heard, with that revision of its title. See [`Seat::saw_gone`](super::Seat::saw_gone).
    pub fn gone(&self, disk: &str) -> Option<(u64, Instant)> {
        let wait = self.disks.get(disk)?;
        let (revision, at) = wait.hold_gone?;
        (wait.title > 0 && revision > wait.title).then_some((wait.title, at))
    }

    /// Has it been heard that a disk's title was put after this revision of it was seen? Then nothing that was decided by that can happen.
    pub fn has_moved(&self, disk: &str, title_revision: u64) -> bool {
        self.disks.get(disk).is_some_and(|wait| wait.title > title_revision)
    }

    /// A disk that is to be tried now.
    pub fn poll(&mut self, now: Instant) -> Option<String> {
        let (at, disk) = self.due.first()?;
        if *at > now {
            return None;
        }
        let disk = disk.clone();
        self.try_at(now + TRY_NS_MAX, &disk);
        Some(disk)
    }

    /// When [`poll`](Self::poll) has something.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// It is somebody's: nothing is to be done before something is heard of it.
    fn check_later(&mut self, now: Instant, disk: &str) {
        let every = if self.hears { CHECK_NS } else { self.look_ns() };
        let at = now + every / 2 + self.part(disk, now.0, every);
        // Not one by one: many are looked at in one question.
        let together = every / CHECKS;
        let phase = self.seed % together;
        self.try_at(Instant((at.0 - phase.min(at.0)).next_multiple_of(together) + phase), disk);
    }

    /// How often each disk is looked at where no news can be had.
    fn look_ns(&self) -> u64 {
        LOOK_NS.max(self.disks.len() as u64 * 1_000_000_000 / LOOKS_PER_SECOND_MAX)
    }

    fn try_within(&mut self, from: Instant, disk: &str, spread_ns: u64) {
        self.try_at(from + self.part(disk, from.0, spread_ns), disk);
    }

    fn try_at(&mut self, at: Instant, disk: &str) {
        let wait = self.disks.get_mut(disk).expect("it is waited for");
        self.due.remove(&(wait.due, disk.to_owned()));
        wait.due = at;
        self.due.insert((at, disk.to_owned()));
    }

    /// This host's part of a time, for this disk and this once: other hosts have others.
    fn part(&self, disk: &str, once: u64, of_ns: u64) -> u64 {
        ((u128::from(scatter(self.seed ^ once, disk)) * u128::from(of_ns)) >> 64) as u64
    }
}

/// FNV-1a, with splitmix64's end, whose upper bits are good.
fn scatter(seed: u64, text: &str) -> u64 {
    let hash = text.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let word = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Found, LeaseId};

    const S: u64 = 1_000_000_000;
    const SETTLE: u64 = 5 * S;

    fn at(seconds: u64) -> Instant {
        Instant(seconds * S)
    }

    fn member(name: &str) -> Member {
        Member { name: name.to_owned(), id: format!("{name}-id") }
    }

    /// A host that hears, and waits for disks that another one has.
    fn waiting(name: &str, disks: &[&str]) -> Waiting {
        let mut waiting = Waiting::new(&member(name), SETTLE);
        waiting.handle_waits(at(0), disks.iter().copied());
        waiting.handle_hearing(at(0), true);
        for _ in disks {
            let disk = waiting.poll(at(1)).expect("each is looked at once");
            waiting.handle_look(&disk, &held(3));
            waiting.handle_tried(at(1), &disk, Tried::Elsewhere);
        }
        assert_eq!(waiting.poll(at(1)), None);
        waiting
    }

    fn held(revision: u64) -> Look {
        let found = |value| Found { value, revision, lease: LeaseId(1) };
        let title = crate::cluster::Title {
            member: member("o"),
            generation: 1,
            taken: true,
            dirty: false,
            copy: None,
            adopts: None,
            adopted: Vec::new(),
        };
        let title = Found { value: title, revision, lease: LeaseId(0) };
        Look { title: Some(title), hold: Some(found(member("o"))) }
    }

    /// When the next one is tried, from then on.
    fn next_ns(waiting: &Waiting, from: Instant) -> u64 {
        waiting.poll_timeout().expect("something is waited for").nanos_since(from)
    }

    #[test]
    fn what_another_host_has_is_left_alone_until_something_is_heard() {
        let mut waiting = waiting("a", &["d", "e"]);
        assert!(next_ns(&waiting, at(1)) >= CHECK_NS / 2);
        waiting.handle_news(at(9), "d", 7, News::Title { taken: false });
        assert!(next_ns(&waiting, at(9)) < SPREAD_NS);
        assert_eq!(waiting.poll(at(10)).as_deref(), Some("d"));
        assert_eq!(waiting.poll(at(10)), None);
        // Somebody was faster.
        waiting.handle_news(at(9), "e", 8, News::Title { taken: false });
        waiting.handle_news(at(9), "e", 9, News::Title { taken: true });
        assert!(next_ns(&waiting, at(9)) > SPREAD_NS);
        waiting.handle_news(at(9), "unknown", 9, News::HoldGone);
    }

    #[test]
    fn what_vanished_is_tried_when_it_has_settled_and_not_looked_at_before() {
        let mut waiting = waiting("a", &["d"]);
        assert_eq!(waiting.gone("d"), None);
        waiting.handle_news(at(20), "d", 7, News::HoldGone);
        assert_eq!(waiting.gone("d"), Some((3, at(20))));
        assert!((SETTLE..SETTLE + SPREAD_NS).contains(&next_ns(&waiting, at(20))));
        // The same again, and what is older.
        waiting.handle_news(at(24), "d", 7, News::HoldGone);
        waiting.handle_news(at(24), "d", 2, News::Title { taken: true });
        assert_eq!(waiting.gone("d"), Some((3, at(20))));
        waiting.handle_news(at(25), "d", 8, News::Title { taken: true });
        assert_eq!(waiting.gone("d"), None, "somebody took it");
        assert!(waiting.has_moved("d", 3) && !waiting.has_moved("d", 8) && !waiting.has_moved("e", 3));
        assert!(next_ns(&waiting, at(25)) >= CHECK_NS / 2);
    }

    #[test]
    fn news_in_another_order_is_understood() {
        let mut waiting = waiting("a", &["d", "e"]);
        // Given back: both changes are of one moment.
        waiting.handle_news(at(20), "d", 7, News::HoldGone);
        waiting.handle_news(at(20), "d", 7, News::Title { taken: false });
        assert_eq!(waiting.gone("d"), None);
        assert!(next_ns(&waiting, at(20)) < SPREAD_NS);
        waiting.handle_news(at(20), "d", 6, News::HoldGone);
        assert_eq!(waiting.gone("d"), None, "that was before the title");
        // Taken and lost: the end is heard first.
        waiting.handle_news(at(20), "e", 12, News::HoldGone);
        waiting.handle_news(at(21), "e", 11, News::Title { taken: true });
        assert_eq!(waiting.gone("e"), Some((11, at(20))));
    }

    #[test]
    fn news_that_comes_while_a_disk_is_tried_is_not_forgotten() {
        let mut waiting = waiting("a", &["d"]);
        waiting.handle_news(at(20), "d", 5, News::Title { taken: false });
        let disk = waiting.poll(at(21)).unwrap();
        waiting.handle_look(&disk, &held(6));
        waiting.handle_news(at(21), "d", 7, News::Title { taken: false });
        waiting.handle_tried(at(22), "d", Tried::Elsewhere);
        assert!(waiting.poll(at(22)).is_some(), "it was given back after the look");
    }

    #[test]
    fn hosts_try_at_moments_of_their_own() {
        let names: Vec<String> = (0..50).map(|name| format!("host-{name}")).collect();
        let mut times: Vec<u64> = names
            .iter()
            .map(|name| {
                let mut waiting = waiting(name, &["d"]);
                waiting.handle_news(at(20), "d", 7, News::Title { taken: false });
                next_ns(&waiting, at(20))
            })
            .collect();
        times.sort_unstable();
        assert!(times[0] < SPREAD_NS / 10 && times[49] > SPREAD_NS / 10 * 9, "{times:?}");
        assert!(times[25] > SPREAD_NS / 4 && times[25] < SPREAD_NS / 4 * 3, "{times:?}");
    }

    #[test]
    fn without_news_looks_are_bounded_in_number() {
        let names: Vec<String> = (0..4000).map(|name| format!("d{name}")).collect();
        let mut waiting = Waiting::new(&member("a"), SETTLE);
        waiting.handle_waits(at(0), names.iter().map(String::as_str));
        waiting.handle_hearing(at(0), false);
        let mut looks = 0;
        for second in 2..102 {
            while let Some(disk) = waiting.poll(at(second)) {
                looks += 1;
                waiting.handle_look(&disk, &held(3));
                waiting.handle_tried(at(second), &disk, Tried::Elsewhere);
            }
        }
        let first = names.len() as u64;
        assert!((15_000 + first..25_000 + first).contains(&looks), "{looks}");
        // Few disks are looked at every second.
        waiting.handle_waits(at(102), names[..2].iter().map(String::as_str));
        waiting.handle_hearing(at(102), false);
        assert!(next_ns(&waiting, at(102)) <= LOOK_NS);
    }

    #[test]
    fn what_is_not_waited_for_any_more_is_forgotten_and_what_is_unknown_is_tried_again() {
        let mut waiting = waiting("a", &["d", "e"]);
        waiting.handle_waits(at(2), ["e"].into_iter());
        waiting.handle_news(at(3), "d", 9, News::HoldGone);
        assert_eq!(waiting.gone("d"), None);
        waiting.handle_tried(at(3), "e", Tried::Unknown);
        assert!(next_ns(&waiting, at(3)) <= 2 * AGAIN_NS);
        waiting.handle_tried(at(3), "e", Tried::Settles(at(8)));
        assert!((5 * S..6 * S).contains(&next_ns(&waiting, at(3))));
        assert_eq!(waiting.poll(at(9)).as_deref(), Some("e"));
        assert!(next_ns(&waiting, at(9)) == TRY_NS_MAX, "nothing came of it");
        waiting.handle_tried(at(10), "e", Tried::Taken);
        assert!(waiting.is_idle() && waiting.poll_timeout().is_none());
    }
}
