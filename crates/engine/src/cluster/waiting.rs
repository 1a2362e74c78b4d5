//! Schedules attempts to take disks that other hosts have.
//!
//! A cluster has many disks, and each disk is known to many hosts. If every host read every disk's
//! keys each second, etcd would be overloaded. So a host *watches* changes
//! ([`Waiting::handle_news`]) and tries to take a disk when the disk's lock is released. Watch
//! events are only hints: an attempt first reads the keys, and takes the disk in a transaction.
//! Events may be late, repeated, reordered or missing. Each host delays its attempts by a different
//! time. So one host takes the disk first, and most other hosts learn about this before their own
//! attempts are due.
//!
//! Call [`Waiting::handle_waits`] with all disks that the host waits for, at intervals. Call
//! [`Waiting::poll`] until it returns `None`, and again at [`Waiting::poll_timeout`]. Report the
//! results of an attempt with [`Waiting::handle_look`] and [`Waiting::handle_tried`].

use std::collections::{BTreeMap, BTreeSet};

use super::{Member, OwnershipSnapshot};
use crate::units::Instant;

/// Time over which attempts on a released disk are spread, nanoseconds.
pub const SPREAD_NS: u64 = 1_000_000_000;

/// Mean interval between two reads of a disk's etcd keys while watch events arrive, but none for
/// this disk, nanoseconds.
pub const CHECK_NS: u64 = 60_000_000_000;

/// Number of batches per [`CHECK_NS`] in which the host reads the etcd keys of disks without watch
/// events.
const CHECKS: u64 = 12;

/// Mean interval between two reads of a disk's etcd keys while no watch events arrive, nanoseconds.
/// The interval is longer with more than 200 disks ([`LOOKS_PER_SECOND_MAX`]).
pub const LOOK_NS: u64 = 1_000_000_000;

/// Maximum number of disks whose etcd keys are read per second while no watch events arrive.
pub const LOOKS_PER_SECOND_MAX: u64 = 200;

/// Maximum number of disks whose etcd keys are read per second after watch events were missed.
const CATCH_UP_PER_SECOND_MAX: u64 = 1000;

/// Pause before the next attempt if the result of an attempt is unknown, nanoseconds.
const AGAIN_NS: u64 = 1_000_000_000;

/// Time after which an attempt without a result counts as failed, nanoseconds.
const TRY_NS_MAX: u64 = 10_000_000_000;

/// A watch event of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterEvent {
    /// The ownership record was written: the disk was taken if `taken` is true, or else given back.
    OwnershipRecord {
        /// See [`OwnershipRecord::taken`](super::OwnershipRecord::taken).
        taken: bool,
    },
    /// The ownership lock was released, or the lease of its owner has ended.
    HoldGone,
}

/// Result of an attempt to take a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried {
    /// This host has the disk.
    Taken,
    /// Another host has the disk, or has data that this host needs.
    OtherOwner,
    /// The disk can be taken from this time on, because the failed owner's writes have settled
    /// then.
    Settles(Instant),
    /// The result of the attempt is unknown.
    Unknown,
}

#[derive(Clone, Debug, Default)]
struct Wait {
    /// Time of the next attempt to take the disk. [`Waiting`] sorts the disks by this time.
    due: Instant,
    /// Newest known revision of the disk's record.
    title: u64,
    /// Last deletion of the disk's lock: the revision, and the time of the event.
    hold_gone: Option<(u64, Instant)>,
    /// Newest revision of etcd at which the disk's keys were read.
    looked: u64,
}

impl Wait {
    /// Returns the revision of the newest etcd event about the disk that this host has received.
    fn heard(&self) -> u64 {
        self.hold_gone.map_or(0, |(revision, _)| revision).max(self.title)
    }
}

/// The scheduled attempts of one host.
#[derive(Clone, Debug)]
pub struct Waiting {
    seed: u64,
    settle_ns: u64,
    hears: bool,
    disks: BTreeMap<String, Wait>,
    due: BTreeSet<(Instant, String)>,
}

impl Waiting {
    /// Creates an empty schedule. After an owner has failed, other hosts wait `settle_ns`, until
    /// the owner's writes in flight have reached the backing or are lost.
    pub fn new(me: &Member, settle_ns: u64) -> Self {
        Waiting {
            seed: scatter(0, &me.id),
            settle_ns,
            hears: false,
            disks: BTreeMap::new(),
            due: BTreeSet::new(),
        }
    }

    /// Sets the disks that the host waits for. Events of other disks are not kept.
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

    /// Returns true if the host waits for no disk.
    pub fn is_idle(&self) -> bool {
        self.disks.is_empty()
    }

    /// Records that watch events arrive from now on (`hears`), or no longer arrive. In both cases,
    /// events before `now` may have been missed.
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

    /// Handles a watch event of a disk. `revision` is the event's revision in etcd.
    pub fn handle_news(&mut self, now: Instant, disk: &str, revision: u64, news: ClusterEvent) {
        let Some(wait) = self.disks.get_mut(disk) else { return };
        match news {
            ClusterEvent::OwnershipRecord { taken } if revision > wait.title => {
                wait.title = revision;
                let is_gone = wait.hold_gone.is_some_and(|(gone, _)| gone > revision);
                match taken {
                    false => self.try_within(now, disk, SPREAD_NS),
                    true if !is_gone => self.check_later(now, disk),
                    true => {}
                }
            }
            ClusterEvent::HoldGone if revision > wait.heard() => {
                let is_known = wait.title > 0;
                wait.hold_gone = Some((revision, now));
                let from = if is_known { now + self.settle_ns } else { now };
                self.try_within(from, disk, SPREAD_NS);
            }
            _ => {}
        }
    }

    /// Handles the keys that an attempt read.
    pub fn handle_look(&mut self, disk: &str, look: &OwnershipSnapshot) {
        let Some(wait) = self.disks.get_mut(disk) else { return };
        let title = look.title.as_ref().map_or(0, |title| title.revision);
        wait.title = wait.title.max(title);
        wait.looked = wait.looked.max(title).max(look.hold.as_ref().map_or(0, |hold| hold.revision));
    }

    /// Handles the result of an attempt.
    pub fn handle_tried(&mut self, now: Instant, disk: &str, tried: Tried) {
        let Some(wait) = self.disks.get(disk) else { return };
        match tried {
            // An event that arrived during this attempt has already scheduled the next attempt.
            Tried::OtherOwner if wait.heard() > wait.looked => {}
            Tried::OtherOwner => self.check_later(now, disk),
            Tried::Taken => self.forget(disk),
            Tried::Settles(at) => self.try_within(at, disk, SPREAD_NS),
            Tried::Unknown => self.try_within(now + AGAIN_NS, disk, AGAIN_NS),
        }
    }

    /// Returns the revision of the disk's ownership record, and the time at which etcd reported the
    /// later deletion of the ownership lock. Returns `None` if this host knows of no such deletion.
    /// See [`OwnershipState::saw_gone`](super::OwnershipState::saw_gone).
    pub fn gone(&self, disk: &str) -> Option<(u64, Instant)> {
        let wait = self.disks.get(disk)?;
        let (revision, at) = wait.hold_gone?;
        (wait.title > 0 && revision > wait.title).then_some((wait.title, at))
    }

    /// Returns true if a newer record than this revision is known. Then a transaction based on this
    /// revision cannot succeed.
    pub fn has_moved(&self, disk: &str, title_revision: u64) -> bool {
        self.disks.get(disk).is_some_and(|wait| wait.title > title_revision)
    }

    /// Returns a disk whose attempt is due now.
    pub fn poll(&mut self, now: Instant) -> Option<String> {
        let (at, disk) = self.due.first()?;
        if *at > now {
            return None;
        }
        let disk = disk.clone();
        self.try_at(now + TRY_NS_MAX, &disk);
        Some(disk)
    }

    /// Returns the time of the next attempt.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Schedules the next attempt for a disk of another host, after an event or a periodic read.
    fn check_later(&mut self, now: Instant, disk: &str) {
        let every = if self.hears { CHECK_NS } else { self.look_ns() };
        let at = now + every / 2 + self.part(disk, now.0, every);
        // Disks are read in batches, with one request for many disks.
        let together = every / CHECKS;
        let phase = self.seed % together;
        self.try_at(Instant((at.0 - phase.min(at.0)).next_multiple_of(together) + phase), disk);
    }

    /// Returns the interval between two reads of each disk's etcd keys while no watch events arrive,
    /// nanoseconds.
    fn look_ns(&self) -> u64 {
        LOOK_NS.max(self.disks.len() as u64 * 1_000_000_000 / LOOKS_PER_SECOND_MAX)
    }

    fn try_within(&mut self, from: Instant, disk: &str, spread_ns: u64) {
        self.try_at(from + self.part(disk, from.0, spread_ns), disk);
    }

    fn try_at(&mut self, at: Instant, disk: &str) {
        let wait = self.disks.get_mut(disk).expect("the host waits for this disk");
        self.due.remove(&(wait.due, disk.to_owned()));
        wait.due = at;
        self.due.insert((at, disk.to_owned()));
    }

    /// Returns a delay of at most `of_ns` nanoseconds, which looks random: a hash of the host, the
    /// disk and `once` (a number that differs for each attempt).
    fn part(&self, disk: &str, once: u64, of_ns: u64) -> u64 {
        ((u128::from(scatter(self.seed ^ once, disk)) * u128::from(of_ns)) >> 64) as u64
    }
}

/// Hashes a text with FNV-1a and the finalizer of SplitMix64, whose upper bits are well
/// distributed.
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

    /// A host that gets watch events, and waits for disks that another host has.
    fn waiting(name: &str, disks: &[&str]) -> Waiting {
        let mut waiting = Waiting::new(&member(name), SETTLE);
        waiting.handle_waits(at(0), disks.iter().copied());
        waiting.handle_hearing(at(0), true);
        for _ in disks {
            let disk = waiting.poll(at(1)).expect("each is looked at once");
            waiting.handle_look(&disk, &held(3));
            waiting.handle_tried(at(1), &disk, Tried::OtherOwner);
        }
        assert_eq!(waiting.poll(at(1)), None);
        waiting
    }

    fn held(revision: u64) -> OwnershipSnapshot {
        let found = |value| Found { value, revision, lease: LeaseId(1) };
        let title = crate::cluster::OwnershipRecord {
            member: member("o"),
            generation: 1,
            taken: true,
            dirty: false,
            copy: None,
            adopts: None,
            adopted: Vec::new(),
        };
        let title = Found { value: title, revision, lease: LeaseId(0) };
        OwnershipSnapshot { title: Some(title), hold: Some(found(member("o"))) }
    }

    /// Returns the time from `from` to the next attempt.
    fn next_ns(waiting: &Waiting, from: Instant) -> u64 {
        waiting.poll_timeout().expect("something is waited for").nanos_since(from)
    }

    #[test]
    fn disks_of_other_hosts_wait_for_a_notification() {
        let mut waiting = waiting("a", &["d", "e"]);
        assert!(next_ns(&waiting, at(1)) >= CHECK_NS / 2);
        waiting.handle_news(at(9), "d", 7, ClusterEvent::OwnershipRecord { taken: false });
        assert!(next_ns(&waiting, at(9)) < SPREAD_NS);
        assert_eq!(waiting.poll(at(10)).as_deref(), Some("d"));
        assert_eq!(waiting.poll(at(10)), None);
        // Another host took the disk first.
        waiting.handle_news(at(9), "e", 8, ClusterEvent::OwnershipRecord { taken: false });
        waiting.handle_news(at(9), "e", 9, ClusterEvent::OwnershipRecord { taken: true });
        assert!(next_ns(&waiting, at(9)) > SPREAD_NS);
        waiting.handle_news(at(9), "unknown", 9, ClusterEvent::HoldGone);
    }

    #[test]
    fn a_disk_without_lock_is_tried_after_the_settle_time() {
        let mut waiting = waiting("a", &["d"]);
        assert_eq!(waiting.gone("d"), None);
        waiting.handle_news(at(20), "d", 7, ClusterEvent::HoldGone);
        assert_eq!(waiting.gone("d"), Some((3, at(20))));
        assert!((SETTLE..SETTLE + SPREAD_NS).contains(&next_ns(&waiting, at(20))));
        // Repeated and older events.
        waiting.handle_news(at(24), "d", 7, ClusterEvent::HoldGone);
        waiting.handle_news(at(24), "d", 2, ClusterEvent::OwnershipRecord { taken: true });
        assert_eq!(waiting.gone("d"), Some((3, at(20))));
        waiting.handle_news(at(25), "d", 8, ClusterEvent::OwnershipRecord { taken: true });
        assert_eq!(waiting.gone("d"), None, "another host took the disk");
        assert!(waiting.has_moved("d", 3) && !waiting.has_moved("d", 8) && !waiting.has_moved("e", 3));
        assert!(next_ns(&waiting, at(25)) >= CHECK_NS / 2);
    }

    #[test]
    fn news_in_another_order_is_understood() {
        let mut waiting = waiting("a", &["d", "e"]);
        // Given back: both changes have one revision.
        waiting.handle_news(at(20), "d", 7, ClusterEvent::HoldGone);
        waiting.handle_news(at(20), "d", 7, ClusterEvent::OwnershipRecord { taken: false });
        assert_eq!(waiting.gone("d"), None);
        assert!(next_ns(&waiting, at(20)) < SPREAD_NS);
        waiting.handle_news(at(20), "d", 6, ClusterEvent::HoldGone);
        assert_eq!(waiting.gone("d"), None, "that was before the title");
        // Taken and lost: the end is heard first.
        waiting.handle_news(at(20), "e", 12, ClusterEvent::HoldGone);
        waiting.handle_news(at(21), "e", 11, ClusterEvent::OwnershipRecord { taken: true });
        assert_eq!(waiting.gone("e"), Some((11, at(20))));
    }

    #[test]
    fn news_that_comes_while_a_disk_is_tried_is_not_forgotten() {
        let mut waiting = waiting("a", &["d"]);
        waiting.handle_news(at(20), "d", 5, ClusterEvent::OwnershipRecord { taken: false });
        let disk = waiting.poll(at(21)).unwrap();
        waiting.handle_look(&disk, &held(6));
        waiting.handle_news(at(21), "d", 7, ClusterEvent::OwnershipRecord { taken: false });
        waiting.handle_tried(at(22), "d", Tried::OtherOwner);
        assert!(waiting.poll(at(22)).is_some(), "it was given back after the look");
    }

    #[test]
    fn hosts_try_at_moments_of_their_own() {
        let names: Vec<String> = (0..50).map(|name| format!("host-{name}")).collect();
        let mut times: Vec<u64> = names
            .iter()
            .map(|name| {
                let mut waiting = waiting(name, &["d"]);
                waiting.handle_news(at(20), "d", 7, ClusterEvent::OwnershipRecord { taken: false });
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
                waiting.handle_tried(at(second), &disk, Tried::OtherOwner);
            }
        }
        let first = names.len() as u64;
        assert!((15_000 + first..25_000 + first).contains(&looks), "{looks}");
        // Few disks are read every second.
        waiting.handle_waits(at(102), names[..2].iter().map(String::as_str));
        waiting.handle_hearing(at(102), false);
        assert!(next_ns(&waiting, at(102)) <= LOOK_NS);
    }

    #[test]
    fn unneeded_disks_are_forgotten_and_unknown_states_are_retried() {
        let mut waiting = waiting("a", &["d", "e"]);
        waiting.handle_waits(at(2), ["e"].into_iter());
        waiting.handle_news(at(3), "d", 9, ClusterEvent::HoldGone);
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
