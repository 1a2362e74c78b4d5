//! Reads of clones that the disk of their parent serves (docs/decisions/0020).
//!
//! The backing of a clone passes reads of the parent's data to the shard. The shard turns each read
//! into a request to the parent's disk, which is on the same shard. The request has its own buffer,
//! because the parent's disk may fill its cache from that buffer after the clone's reply. The data
//! is then copied into the clone's buffer. If no buffer is free or the parent's disk fails, the
//! clone's own backing reads the data.
//!
//! The clone's own backing also serves the read if the parent's disk does not answer in time.
//! Requests to this backing obey the `backing_timeout` of the clone. A late answer of the parent's
//! disk is ignored.
//!
//! # Checks of the parents' files
//! The files of a parent may have changed while this thread was paused, or while the backing of the
//! parent or of a clone had lost its connection. In both cases the parent must be checked: the
//! daemon compares the files with their recorded state. Until the check has ended, the backings of
//! the clones read the data themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hob_engine::Engine;
use hob_engine::io::{BufferCopy, BufferSlice, CopyEnd, IoError, Op, PayloadMemory, Reply, Request};
use hob_engine::units::{BufferId, DiskId, Instant, RequestId};
use hob_storage::backing::ParentRead;
use hob_storage::ring::Ring;

use super::Shard;
use crate::api::ShardEvent;

/// Bit in the upper half of a request id that marks reads for clones. Session numbers of clients
/// are smaller.
const OWN: u32 = 1 << 28;

/// Maximum wait of a clone for its parent's disk, or the clone's `backing_timeout` if that is
/// shorter.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Maximum wait of a clone for its parent's disk, if an earlier read is unanswered after its time
/// limit. The parent's cache can still answer hits in this time.
const LATER_ANSWER_MAX: Duration = Duration::from_secs(1);

/// If a parent's disk has not answered this number of reads in time, hob sends only reads of cached
/// data to this disk. Each of these reads keeps a buffer.
const UNANSWERED_MAX: u32 = 16;

/// Interval at which the shard wakes up to notice its own pauses while it serves clones,
/// nanoseconds.
const BEAT_NS: u64 = 250_000_000;

/// Shortest pause of the shard after which the files of its clones' parents must be checked,
/// nanoseconds.
const PAUSE_MIN_NS: u64 = 2_000_000_000;

/// A read that was sent to a parent's disk.
struct Asked {
    clone: DiskId,
    parent: DiskId,
    number: u32,
    slice: BufferSlice,
    buffer: BufferId,
    /// Time at which the clone's own backing reads the data; `None` after that.
    gives_up_at: Option<Instant>,
}

/// Which disk is the parent of which clone, and the reads in flight to parents.
#[derive(Default)]
pub(super) struct Parents {
    /// The parent's disk of each clone.
    links: BTreeMap<DiskId, DiskId>,
    asked: BTreeMap<u32, Asked>,
    last: u32,
    /// Number of reads that each parent's disk has not answered, although their time limit has
    /// passed.
    unanswered: BTreeMap<DiskId, u32>,
    /// Time of the next check for reads that were not answered in time.
    check_at: Option<Instant>,
    /// The parents whose files must be checked, each with the number of the latest check.
    unchecked: BTreeMap<DiskId, u64>,
    last_check: u64,
    /// For each clone and parent, the number of connection changes of its backing when the parent
    /// was linked, or when a check was last required.
    connections: BTreeMap<DiskId, u64>,
    /// Latest time at which the shard ran.
    ran_at: Instant,
}

impl Parents {
    /// Returns true if the request id belongs to a read for a clone.
    pub(super) fn owns(id: RequestId) -> bool {
        (id.0 >> 32) as u32 & OWN != 0
    }

    /// Sends the read to the parent's disk. Returns `None` if that is not possible now, for example
    /// because no buffer is free or the parent must be checked. The caller then lets the clone's
    /// own backing read the data.
    fn ask(
        &mut self,
        now: Instant,
        ring: &mut Ring,
        engine: &mut Engine,
        clone: DiskId,
        read: &ParentRead,
        wait_max: Option<Duration>,
    ) -> Option<()> {
        let parent = *self.links.get(&clone)?;
        if self.is_unchecked(parent) {
            return None;
        }
        let answer_max = self.answer_max(engine, parent, read)?;
        let gives_up_at = now + wait_max.map_or(answer_max, |own| own.min(answer_max)).as_nanos() as u64;
        let buffer = ring.arena_mut().alloc_for(parent, read.len as usize)?;
        self.last = self.last.wrapping_add(1);
        let id = RequestId(u64::from(OWN) << 32 | u64::from(self.last));
        let request = Request {
            id,
            disk: parent,
            op: Op::Read,
            offset: read.offset,
            len: read.len,
            buffer: Some(buffer),
            promote: engine.promote_of(read.io),
            memory: PayloadMemory::Daemon,
        };
        if engine.handle_request(now, request).is_err() {
            ring.arena_mut().release(buffer);
            return None;
        }
        let ParentRead { number, slice, .. } = *read;
        self.insert(
            self.last,
            Asked { clone, parent, number, slice, buffer, gives_up_at: Some(gives_up_at) },
        );
        Some(())
    }

    fn insert(&mut self, id: u32, asked: Asked) {
        self.check_at = self.check_at.into_iter().chain(asked.gives_up_at).min();
        let before = self.asked.insert(id, asked);
        assert!(before.is_none(), "as many requests cannot be in flight");
    }

    /// Returns how long a read may wait for a parent's disk; `None` if the read must not be sent to
    /// this disk.
    fn answer_max(&self, engine: &Engine, parent: DiskId, read: &ParentRead) -> Option<Duration> {
        let Some(count) = self.unanswered.get(&parent) else { return Some(ANSWER_MAX) };
        let is_sent = *count < UNANSWERED_MAX || engine.would_read_flash(parent, read.offset, read.len);
        is_sent.then_some(LATER_ANSWER_MAX)
    }

    /// Returns the time at which to call [`Shard::give_up_parents`].
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let beat = (!self.links.is_empty()).then(|| self.ran_at + BEAT_NS);
        self.check_at.into_iter().chain(beat).min()
    }

    /// Records that the shard runs. Returns true if the shard was paused while it served clones.
    fn ends_pause(&mut self, now: Instant) -> bool {
        let before = std::mem::replace(&mut self.ran_at, now);
        !self.links.is_empty() && now.0.saturating_sub(before.0) > PAUSE_MIN_NS
    }

    /// Requires a check of a parent's files. Returns the number of the check, to be reported to the
    /// daemon.
    fn require_check(&mut self, parent: DiskId) -> u64 {
        self.last_check += 1;
        self.unchecked.insert(parent, self.last_check);
        self.last_check
    }

    /// Ends a check that found no change. If another check of the same parent was required since
    /// then, the parent remains unchecked until that check has ended.
    fn end_check(&mut self, parent: DiskId, check: u64) {
        if self.unchecked.get(&parent) == Some(&check) {
            self.unchecked.remove(&parent);
        }
    }

    fn is_unchecked(&self, parent: DiskId) -> bool {
        self.unchecked.contains_key(&parent)
    }

    /// Returns the result that a clone gets for a read that hob sent to the disk of the clone's
    /// parent. While the parent's files must be checked for changes, the result is an error,
    /// because the read may have returned changed data.
    fn result_of(&self, asked: &Asked, result: Result<(), IoError>) -> Result<(), IoError> {
        if self.is_unchecked(asked.parent) { Err(IoError::ShuttingDown) } else { result }
    }

    /// Records the number of connection changes of the backing of a clone or of a parent. Returns
    /// true if the number differs from the recorded one.
    fn has_reconnected(&mut self, disk: DiskId, changes: u64) -> bool {
        self.connections.insert(disk, changes).is_some_and(|before| before != changes)
    }

    /// Returns the parents that have clones.
    fn linked_parents(&self) -> BTreeSet<DiskId> {
        self.links.values().copied().collect()
    }

    /// Stops waiting for the reads that were not answered in time. Returns the clone of each read,
    /// and the number of the read in the clone's backing.
    fn give_up_late(&mut self, now: Instant) -> Vec<(DiskId, u32)> {
        let mut late = Vec::new();
        for asked in self.asked.values_mut() {
            if asked.gives_up_at.take_if(|at| *at <= now).is_none() {
                continue;
            }
            late.push((asked.clone, asked.number));
            let count = self.unanswered.entry(asked.parent).or_default();
            if *count == 0 {
                tracing::warn!(
                    disk = asked.parent.0,
                    "the disk of a parent does not answer, so its clones read the data themselves"
                );
            }
            *count += 1;
        }
        self.check_at = self.asked.values().filter_map(|asked| asked.gives_up_at).min();
        late
    }

    /// Removes and returns a read that the parent's disk has answered. Returns `None` if the answer
    /// is late: the clone's own backing already reads the data.
    fn take_answered(&mut self, id: u32) -> Option<Asked> {
        let asked = self.asked.remove(&id).expect("requests are answered once");
        if asked.gives_up_at.is_some() {
            return Some(asked);
        }
        let count = self.unanswered.get_mut(&asked.parent).expect("each read that was given up counts");
        *count -= 1;
        if *count == 0 {
            self.unanswered.remove(&asked.parent);
            tracing::info!(disk = asked.parent.0, "the disk of the parent answers again");
        }
        None
    }
}

impl Shard {
    /// Ends a check of the files of a parent, because they are unchanged.
    pub(super) fn parent_checked(&mut self, parent: DiskId, check: u64) {
        self.parents.end_check(parent, check);
    }

    /// Sets or removes the disk that serves a clone's reads of its parent.
    pub(super) fn link_parent(&mut self, clone: DiskId, parent: Option<DiskId>) {
        let parent = parent.filter(|parent| *parent != clone && self.serves(*parent));
        match parent {
            Some(parent) => self.parents.links.insert(clone, parent),
            None => self.parents.links.remove(&clone),
        };
        self.check_connections(clone);
        let parent_bytes = parent.and_then(|parent| {
            let backing = self.backings.get(parent)?;
            Some(backing.info().size_bytes)
        });
        if let Some(backing) = self.backings.get_mut(clone) {
            backing.link_parent(parent_bytes);
        }
    }

    /// Prepares the removal of a disk. Clones of the disk then read their parent's data through
    /// their own backings.
    pub(super) fn unlink_parent(&mut self, id: DiskId) {
        self.parents.links.remove(&id);
        self.parents.connections.remove(&id);
        self.parents.unchecked.remove(&id);
        let links = self.parents.links.iter().filter(|(_, parent)| **parent == id);
        let clones: Vec<DiskId> = links.map(|(clone, _)| *clone).collect();
        clones.into_iter().for_each(|clone| self.link_parent(clone, None));
    }

    /// If this thread was paused, asks the daemon to compare the files of all parents with their
    /// recorded state, because the files may have changed. Until the daemon has compared them, the
    /// backings of the clones read the data themselves. Call this function at the start of each
    /// turn of the shard's loop.
    pub(super) fn notice_pause(&mut self, now: Instant) {
        if self.parents.ends_pause(now) {
            for parent in self.parents.linked_parents() {
                self.require_parent_check(parent);
            }
        }
    }

    /// Requires a check of a clone's parent if a connection of the clone's or the parent's backing
    /// was lost since the last check was required: while the connection was lost, programs could
    /// write the files.
    fn check_connections(&mut self, clone: DiskId) {
        let Some(parent) = self.parents.links.get(&clone).copied() else { return };
        let mut is_changed = false;
        for disk in [clone, parent] {
            if let Some(backing) = self.backings.get(disk) {
                is_changed |= self.parents.has_reconnected(disk, backing.connection_changes());
            }
        }
        if is_changed {
            self.require_parent_check(parent);
        }
    }

    fn require_parent_check(&mut self, parent: DiskId) {
        let check = self.parents.require_check(parent);
        self.commands.report(ShardEvent::ParentUnchecked { parent, check });
    }

    /// Takes the reads of parent data from a clone's backing, and sends them to the parent's disk.
    /// Returns false if there were none.
    pub(super) fn ask_parent(&mut self, now: Instant, clone: DiskId) -> bool {
        let mut progress = false;
        let mut is_checked = false;
        while let Some(backing) = self.backings.get_mut(clone)
            && let Some(read) = backing.poll_parent_read()
        {
            progress = true;
            let wait_max = backing.wait_max();
            if !std::mem::replace(&mut is_checked, true) {
                self.check_connections(clone);
            }
            let Shard { parents, ring, engine, backings, .. } = self;
            let backing = backings.get_mut(clone).expect("it has just passed on a read");
            match parents.ask(now, ring, engine, clone, &read, wait_max) {
                Some(()) => engine.pass_on(now, read.io),
                None => backing.handle_parent_read(ring, now, read.number, Err(IoError::ShuttingDown)),
            }
        }
        progress
    }

    /// Lets the clones' own backings read the data that the parents' disks have not returned in
    /// time.
    pub(super) fn give_up_parents(&mut self, now: Instant) {
        for (clone, number) in self.parents.give_up_late(now) {
            let backing = self.backings.get_mut(clone).expect("a clone's backing waits for its reads");
            backing.handle_parent_read(&mut self.ring, now, number, Err(IoError::Failed));
            self.collect(now, clone);
        }
    }

    /// Handles the reply of a parent's disk.
    pub(super) fn parent_replied(&mut self, now: Instant, reply: &Reply) {
        // The clone's own backing may already have read the data. The clone's buffer may then have
        // another use, so the late data must not be copied into it.
        let Some(asked) = self.parents.take_answered(reply.id.0 as u32) else { return };
        let result = self.parents.result_of(&asked, reply.result);
        let Asked { clone, number, slice, buffer, .. } = asked;
        if result.is_ok() {
            let from = CopyEnd::Buffer { id: buffer, offset: 0 };
            let to = CopyEnd::Buffer { id: slice.id, offset: slice.offset };
            self.areas.copy(self.ring.arena_mut(), &BufferCopy { from, to, len: slice.len });
        }
        let backing = self.backings.get_mut(clone).expect("a clone's backing waits for its reads");
        backing.handle_parent_read(&mut self.ring, now, number, result);
        self.collect(now, clone);
        self.make_copies();
    }
}

#[cfg(test)]
mod tests {
    use hob_engine::Limits;
    use hob_engine::units::IoId;

    use super::*;

    const PARENT: DiskId = DiskId(1);
    const CLONE: DiskId = DiskId(2);

    fn slice() -> BufferSlice {
        BufferSlice { id: BufferId(7), offset: 0, len: 4096 }
    }

    fn asked(number: u32, gives_up_at: u64) -> Asked {
        let gives_up_at = Some(Instant(gives_up_at));
        Asked { clone: CLONE, parent: PARENT, number, slice: slice(), buffer: BufferId(8), gives_up_at }
    }

    #[test]
    fn a_read_that_is_not_answered_in_time_is_given_up_once() {
        let mut parents = Parents::default();
        assert_eq!(parents.poll_timeout(), None);
        for (id, number, at) in [(1, 11, 200), (2, 12, 100), (3, 13, 300)] {
            parents.insert(id, asked(number, at));
        }
        assert_eq!(parents.poll_timeout(), Some(Instant(100)));
        assert!(parents.give_up_late(Instant(99)).is_empty());
        // The first one is answered in time.
        assert_eq!(parents.take_answered(1).map(|asked| asked.number), Some(11));
        assert_eq!(parents.give_up_late(Instant(200)), [(CLONE, 12)]);
        assert_eq!((parents.poll_timeout(), parents.unanswered[&PARENT]), (Some(Instant(300)), 1));
        assert_eq!(parents.give_up_late(Instant(300)), [(CLONE, 13)]);
        assert_eq!((parents.poll_timeout(), parents.unanswered[&PARENT]), (None, 2));
        assert!(parents.give_up_late(Instant(400)).is_empty());
        // Late answers are ignored.
        assert!(parents.take_answered(3).is_none() && parents.take_answered(2).is_none());
        assert!(parents.unanswered.is_empty() && parents.asked.is_empty());
    }

    #[test]
    fn a_pause_and_each_change_of_a_connection_require_a_check() {
        let mut parents = Parents::default();
        let at = |ns| Instant(PAUSE_MIN_NS * 10 + ns);
        assert!(!parents.ends_pause(at(0)), "there are no clones");
        parents.links.insert(CLONE, PARENT);
        assert_eq!(parents.poll_timeout(), Some(at(BEAT_NS)));
        assert!(!parents.ends_pause(at(PAUSE_MIN_NS)));
        assert!(parents.ends_pause(at(2 * PAUSE_MIN_NS + 1)));
        assert!(!parents.ends_pause(at(2 * PAUSE_MIN_NS + 1)), "it is noticed once");
        assert_eq!(parents.linked_parents(), BTreeSet::from([PARENT]));
        assert!(!parents.has_reconnected(CLONE, 4), "this is the first look");
        assert!(!parents.has_reconnected(CLONE, 4));
        assert!(parents.has_reconnected(CLONE, 5), "the connection was lost");
        assert!(parents.has_reconnected(CLONE, 6), "and is there again");
    }

    #[test]
    fn a_parents_disk_gets_no_reads_until_the_latest_check_ends() {
        let mut parents = Parents::default();
        parents.links.insert(CLONE, PARENT);
        assert!(!parents.is_unchecked(PARENT));
        let sent = asked(1, 100);
        assert_eq!(parents.result_of(&sent, Ok(())), Ok(()));
        let (first, second) = (parents.require_check(PARENT), parents.require_check(PARENT));
        parents.end_check(PARENT, first);
        assert!(parents.is_unchecked(PARENT), "the files may have changed after the first comparison");
        let result = parents.result_of(&sent, Ok(()));
        assert_eq!(result, Err(IoError::ShuttingDown), "the clone reads the data itself");
        parents.end_check(PARENT, second);
        assert!(!parents.is_unchecked(PARENT));
        assert_eq!(parents.result_of(&sent, Ok(())), Ok(()));
    }

    #[test]
    fn a_parents_disk_that_does_not_answer_gets_few_reads() {
        let engine = Engine::new(Limits::default());
        let read = ParentRead { number: 1, io: IoId(1), offset: 0, len: 4096, slice: slice() };
        let mut parents = Parents::default();
        assert_eq!(parents.answer_max(&engine, PARENT, &read), Some(ANSWER_MAX));
        for id in 1..=UNANSWERED_MAX {
            parents.insert(id, asked(id, 100));
            parents.give_up_late(Instant(100));
            let answer_max = (id < UNANSWERED_MAX).then_some(LATER_ANSWER_MAX);
            assert_eq!(parents.answer_max(&engine, PARENT, &read), answer_max, "{id}");
        }
        assert!(parents.take_answered(1).is_none());
        assert_eq!(parents.answer_max(&engine, PARENT, &read), Some(LATER_ANSWER_MAX));
    }
}
