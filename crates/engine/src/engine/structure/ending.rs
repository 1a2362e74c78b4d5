//! The end of a structural change: the new state of the cache, or the previous one after a failure.

use super::Kind;
use crate::command::{CommandError, Copies, Event, Segment};
use crate::engine::Engine;
use crate::units::{CommandId, DiskId, Instant};

impl Engine {
    /// Completes a structural change.
    pub(super) fn complete(&mut self, now: Instant, id: DiskId, kind: Kind) {
        let disk = self.disk_mut(id);
        let opening = disk.opening.take().expect("a complete change is in progress");
        let mut released = opening.released;
        match kind {
            Kind::Ring => {
                let cache = disk.cache.as_mut().expect("the new cache exists");
                cache.index.hold_dirty();
                // The backing was flushed, and the new ring has no bypass marks.
                disk.zones.clear();
                let size_bytes = disk.journal.as_ref().expect("the new journal exists").writer.disk_bytes();
                disk.grow(size_bytes);
                // From now on recovery finds the new ring, and assumes that the crash log belongs
                // to this ring.
                disk.save_records();
                let journal = disk.journal.as_mut().expect("the new journal exists");
                if !journal.has_durable_names() {
                    journal.ask();
                }
                let cache = disk.cache.as_mut().expect("the new cache exists");
                disk.recovering = None;
                if cache.config.copies != Copies::One {
                    disk.maintenance.look_for_missing(cache.index.frames());
                }
                disk.fenced = false;
                disk.restart_destager();
            }
            Kind::Close => {
                disk.closed = true;
                disk.forget_crash_log();
            }
            Kind::Discard(_) => disk.restart_destager(),
            Kind::Void => {
                disk.forget_crash_log();
                let cache = disk.cache.take().expect("the ended cache exists");
                released.extend(cache.segments.iter().map(|segment| segment.place));
                released.extend(disk.journal.take().expect("the ended journal exists").segments());
                disk.restart_destager();
                if let Some(drain) = self.disk_mut(id).draining.take() {
                    self.done(drain, id, Err(CommandError::Stopped));
                }
            }
        }
        match kind {
            Kind::Ring | Kind::Void => {
                // The cache whose segments were to be vacated does not exist any more.
                self.end_vacating(id, Err(CommandError::Stopped));
                self.resume_awaiting_journal(now, id);
            }
            Kind::Discard(_) => {
                self.report_owed(id);
                self.fail_unanswered(now, id);
            }
            Kind::Close => {}
        }
        self.end_change_of_structure(id, opening.command, Ok(released));
    }

    /// Ends a failed structural change and restores the previous cache.
    pub(super) fn abandon(&mut self, now: Instant, id: DiskId, error: CommandError) {
        let disk = self.disk_mut(id);
        let opening = disk.opening.take().expect("it fails");
        if opening.kind == Kind::Ring {
            (disk.cache, disk.journal) = match opening.old {
                Some((cache, journal)) => (Some(cache), journal),
                None => (None, None),
            };
            // Sectors that the destager made clean during the change were clean only in the new
            // cache.
            disk.restart_destager();
            // The command that removes these segments will be repeated.
            let leaving = disk.cache.as_mut().filter(|_| disk.vacating.is_none());
            if let Some(cache) = leaving.filter(|cache| !cache.leaving().is_empty()) {
                cache.set_leaving(Vec::new());
            }
        }
        for (first, end) in opening.forget {
            self.drop_clean(now, id, first, end);
        }
        if opening.distrusted && self.journal_mut(id).is_some() {
            self.lose_journal(now, id);
        } else if opening.has_lost_copy {
            self.event_out.push_back(Event::JournalCopyLost(id));
        }
        let disk = self.disk_mut(id);
        // A drain that was requested during the change has nothing to drain any more.
        if let Some(drain) = disk.draining.take_if(|_| disk.journal.is_none()) {
            self.done(drain, id, Err(CommandError::Stopped));
        }
        self.end_change_of_structure(id, opening.command, Err(error));
    }

    pub(super) fn end_change_of_structure(
        &mut self,
        id: DiskId,
        command: Option<CommandId>,
        result: Result<Vec<Segment>, CommandError>,
    ) {
        if let Some(command) = command {
            self.done(command, id, result);
        }
        // The data for which these requests waited may have been dropped with the cache.
        self.end_order_wait(id);
        self.unhold(id);
        self.unsettled.push(id);
        if self.disk_mut(id).journal.is_some() {
            self.wake(id);
        }
    }

    /// Resumes the requests that waited for changes of the cache, if no change is left.
    pub(in crate::engine) fn unhold(&mut self, id: DiskId) {
        let disk = self.disk_mut(id);
        if disk.holds && disk.changes.is_empty() && disk.opening.is_none() && !disk.closed {
            disk.holds = false;
            let held = std::mem::take(&mut disk.held);
            let edge_waiters = std::mem::take(&mut disk.edge_waiters);
            self.runnable.extend(held.into_iter().chain(edge_waiters));
        }
    }

    /// Makes a request wait until the change of its disk's cache is complete.
    pub(in crate::engine) fn hold(&mut self, slot: u32) {
        self.forget_edges(slot);
        let disk = self.requests[slot].request.disk;
        self.disk_mut(disk).held.push(slot);
        // The request's flash I/O may have been the last one for which the change waited.
        self.unsettled.push(disk);
    }
}
