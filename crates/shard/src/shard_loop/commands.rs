//! Calls of the control thread to a shard, and the answers that are still outstanding.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hob_engine::command::{
    Bitmap, CacheChange, Command, CommandError, DiskConfig, Event, MemoryConfig, Segment,
};
use hob_engine::units::{CommandId, DiskId, Instant};
use hob_frontends::nbd::Connection;
use hob_storage::area::Area;
use hob_storage::backing::{Backing, ChangeDetector, ChangeMark, WaitMax};
use hob_storage::unflushed_mark::UnflushedMark;

use super::Shard;
use super::clients::{ClientAttachment, ClientKind};
use crate::api::VhostUserCall;
use crate::api::{Answer, EventSender, Gone, NO_SUCH_DISK, Noted, ShardCall, ShardError, ShardEvent, reply};

/// Calls that are not answered yet, and disks that are being removed.
pub(super) struct Commands {
    events: EventSender,
    last: u64,
    waiting: BTreeMap<CommandId, Waiting>,
    /// Bitmaps that the engine returned when disks were removed.
    bitmaps: BTreeMap<DiskId, Vec<Bitmap>>,
    /// Number of guests of each disk to which an error must still be reported, because acknowledged
    /// writes may be lost.
    failures_owed: BTreeMap<DiskId, u32>,
    /// Disks that the engine has removed and whose backing is being closed.
    closing: BTreeMap<DiskId, Option<Farewell>>,
    /// Removed disks whose abandoned backing is still open. No caller waits for these.
    left_behind: BTreeSet<DiskId>,
    stop: Option<Answer<()>>,
    over: bool,
}

/// Answer to the removal of a disk, and the resources to return with it.
type Farewell = (Answer<Gone>, Gone);

pub(super) enum Waiting {
    /// A change without a result other than an error.
    Plain(Answer<()>),
    Change(Answer<Vec<Segment>>),
    /// Growth of a disk to this size, which the front ends also learn.
    Growth(Answer<Vec<Segment>>, u64),
    /// Replacement of a disk's RAM tier with this memory.
    Memory(Answer<Option<Area>>, Option<Area>),
    /// Removal of a disk, whose backing is closed next. There is no answer channel when the shard
    /// stops.
    Remove(Option<Answer<Gone>>),
}

impl Commands {
    pub(super) fn new(events: EventSender) -> Self {
        Commands {
            events,
            last: 0,
            waiting: BTreeMap::new(),
            bitmaps: BTreeMap::new(),
            failures_owed: BTreeMap::new(),
            closing: BTreeMap::new(),
            left_behind: BTreeSet::new(),
            stop: None,
            over: false,
        }
    }

    /// Returns true if all disks and devices are closed, so that the shard may end.
    pub(super) fn is_over(&self) -> bool {
        self.over
    }

    fn next(&mut self, waiting: Waiting) -> CommandId {
        self.last += 1;
        let id = CommandId(self.last);
        self.waiting.insert(id, waiting);
        id
    }

    /// Returns the number of guests of a disk that need a report if this process is killed, as the
    /// services know it.
    pub(super) fn failures_owed(&self, disk: DiskId) -> u32 {
        self.failures_owed.get(&disk).copied().unwrap_or(0)
    }

    /// Reports an event to the services. The event is dropped when the services have ended.
    pub(super) fn report(&self, event: ShardEvent) {
        let _ = self.events.send(event);
    }

    /// Completes a removal after the backing has closed. `changed` has the backing's size and
    /// modification time, if they are only known now.
    pub(super) fn backing_closed(&mut self, disk: DiskId, changed: Option<ChangeMark>) {
        if let Some(Some((answer, mut gone))) = self.closing.remove(&disk) {
            gone.changed = gone.changed.or(changed);
            reply(answer, Ok(gone));
        }
        if self.left_behind.remove(&disk) {
            self.report(ShardEvent::BackingClosed(disk));
        }
        self.check_over();
    }

    /// Answers the removal of a disk whose abandoned backing is still open.
    pub(super) fn leave_behind(&mut self, disk: DiskId) {
        let Some(farewell) = self.closing.remove(&disk) else { return };
        self.left_behind.insert(disk);
        if let Some((answer, gone)) = farewell {
            reply(answer, Ok(Gone { is_closing: true, ..gone }));
        }
        self.check_over();
    }

    fn check_over(&mut self) {
        let removing = self.waiting.values().any(|waiting| matches!(waiting, Waiting::Remove(_)));
        if self.stop.is_some() && !removing && self.closing.is_empty() {
            self.over = true;
            let _ = self.stop.take().expect("checked").send(Ok(()));
        }
    }
}

/// Maximum wait of requests for the backing while a disk is removed or the daemon stops. This limit
/// is shorter than the time that the daemon has to close a disk when it stops, so that a failed
/// flush is recorded.
const LEAVING_WAIT_MAX: Duration = Duration::from_secs(20);

impl Shard {
    /// Executes a call, or starts its execution.
    pub(super) fn call(&mut self, now: Instant, call: ShardCall) {
        // A new session may reuse the number of an ended one.
        self.end_sessions();
        match call {
            ShardCall::Ping { answer } => reply(answer, Ok(())),
            ShardCall::AddDevice { id, device, answer } => {
                self.flash.attach(&mut self.ring, id, *device);
                reply(answer, Ok(()));
            }
            ShardCall::GiveUpDevice { id } => {
                self.flash.give_up(&mut self.ring, id);
                self.engine.give_up_device(id);
                self.collect_flash(now);
            }
            ShardCall::RemoveDevice { id, answer } => {
                self.flash.detach(&mut self.ring, id);
                self.collect_flash(now);
                reply(answer, Ok(()));
            }
            ShardCall::AddDisk { id, config, backing, mark, answer } => {
                self.add_disk(now, id, config, backing, mark, answer);
            }
            ShardCall::OweFailures { id, count } => self.engine.owe_failures(id, count),
            ShardCall::RemoveDisk { id, answer } => self.remove_disk(now, id, Some(answer)),
            ShardCall::ChangeCache { id, change, crash_log, answer } => {
                let waiting = match change {
                    CacheChange::GrowDisk(size_bytes, _) => Waiting::Growth(answer, size_bytes),
                    _ => Waiting::Change(answer),
                };
                if let Some(crash_log) = crash_log {
                    self.engine.keep_records(id, crash_log);
                }
                self.start_command(now, id, waiting, Command::Cache(change));
            }
            ShardCall::SetMemory { id, memory, answer } => self.set_memory(now, id, memory, answer),
            ShardCall::ExpireRequests { id } => self.expire_requests(now, id),
            ShardCall::Abandon { id } => self.abandon_disk(now, id),
            ShardCall::StopWaiting { id } => self.stop_waiting(now, id),
            ShardCall::SetWaitMax { id, wait_max } => {
                if let Some(backing) = self.backings.get_mut(id) {
                    backing.set_wait_max(now, WaitMax::Set(wait_max));
                }
            }
            ShardCall::SetStripe { id, bytes } => self.engine.set_stripe(id, bytes),
            ShardCall::SetQos { id, qos, answer } => {
                self.start_command(now, id, Waiting::Plain(answer), Command::Qos(qos));
            }
            ShardCall::Control { resource, control } => self.engine.control(now, resource, control),
            ShardCall::Resource { resource, answer } => reply(answer, Ok(self.engine.resource(resource))),
            ShardCall::ReportOn { resource, level, answer } => {
                reply(answer, Ok(self.engine.report_on(now, resource, level)))
            }
            ShardCall::TakePart { resource, in_flight } => self.engine.take_part(now, resource, in_flight),
            ShardCall::ChangeBitmaps { id, change, answer } => {
                self.start_command(now, id, Waiting::Plain(answer), Command::Bitmap(change));
            }
            ShardCall::Bitmaps { id, whole, answer } => {
                reply(answer, Ok(Noted::of(self.engine.bitmaps(id), whole.as_deref())))
            }
            ShardCall::Stats { id, answer } => {
                let stats = self.engine.stats(now, id).map(Box::new);
                reply(answer, stats.ok_or(NO_SUCH_DISK));
            }
            ShardCall::StatsOf { ids, answer } => {
                let stats = ids.into_iter().map(|id| self.engine.stats(now, id).map(Box::new));
                reply(answer, Ok(stats.collect()));
            }
            ShardCall::ChecksumMismatches { ids, answer } => {
                let stats = ids.into_iter().map(|id| self.engine.stats(now, id));
                reply(answer, Ok(stats.map(|stats| Some(stats?.checksum_mismatches)).collect()));
            }
            ShardCall::Histograms { id, answer } => {
                let found = self.engine.histograms(id).map(|found| (now, Box::new(found.clone())));
                reply(answer, found.ok_or(NO_SUCH_DISK));
            }
            ShardCall::Sizing { id, answer } => {
                let found = self.engine.sizing(now, id).map(Box::new);
                reply(answer, found.ok_or(NO_SUCH_DISK));
            }
            ShardCall::DiskCounts { asked, answer } => {
                let counts = asked.into_iter().map(|asked| asked.of(&self.engine)).collect();
                reply(answer, Ok(counts));
            }
            ShardCall::FlashCounts { ids, answer } => {
                let counts = ids.into_iter().map(|id| self.engine.flash_counts(id)).collect();
                reply(answer, Ok(counts));
            }
            ShardCall::AllowFlashWrites { allowances } => {
                for (id, allowance) in allowances {
                    self.engine.allow_flash_writes(id, allowance);
                }
            }
            ShardCall::Users { id, answer } => {
                reply(answer, Ok(self.clients.guests(id) + self.vhost_user.of(id)))
            }
            ShardCall::ClientPids { id, answer } => reply(answer, Ok(self.clients.pids(id))),
            ShardCall::Reset { id, counter, answer } => {
                self.start_command(now, id, Waiting::Plain(answer), counter.command());
            }
            ShardCall::Devices { answer } => reply(answer, Ok(self.flash.counts().collect())),
            ShardCall::ChangedMeanwhile { id, answer } => {
                reply(answer, Ok(self.engine.changed_meanwhile(id).cloned().map(Box::new)))
            }
            ShardCall::Record { id, recorder, answer } => {
                let is_served = self.serves(id);
                if is_served {
                    self.clients.recorders.begin(id, recorder);
                }
                reply(answer, is_served.then_some(()).ok_or(NO_SUCH_DISK));
            }
            ShardCall::EndRecording { id } => self.clients.recorders.end_if_abandoned(id),
            ShardCall::CloseExport { id, export } => {
                let is_of =
                    |connection: &Connection| connection.disk() == id && connection.export() == export;
                self.clients.close("the export was removed", &mut self.ring, is_of);
            }
            ShardCall::Attach { id, socket, negotiated, leftover, promote, transport, permit } => {
                // If the disk was removed in the meantime, the connection is dropped.
                if self.serves(id) {
                    let attachment =
                        ClientAttachment { socket, promote, transport, permit, kind: ClientKind::Guest };
                    let session =
                        self.clients.attach(now, &mut self.ring, id, attachment, *negotiated, &leftover);
                    self.engine.begin_session(id, session);
                }
            }
            ShardCall::AttachFile { id, device, file, rights } => {
                // If the disk was removed in the meantime, the file is dropped.
                if self.serves(id) {
                    let before = file.size;
                    let session = self.files.attach(&mut self.ring, id, device, file, rights);
                    self.engine.begin_session(id, session);
                    if let Some(size) = self.size_of(id).filter(|size| *size > before) {
                        // An earlier daemon mounted the file when the disk was smaller.
                        self.files.grow(id, size);
                    }
                }
            }
            ShardCall::VhostUser { mut call } => {
                if let VhostUserCall::Open { disk, info, .. } = &mut call
                    && let Some(size) = self.size_of(*disk)
                {
                    // The disk may have grown since its socket was created.
                    info.size_bytes = size;
                }
                let Shard { vhost_user, commands, backings, ring, .. } = self;
                let serves = |id: DiskId| {
                    let backing = backings.get(id);
                    commands.stop.is_none() && backing.is_some_and(|backing| !backing.is_abandoned())
                };
                if let Some((id, session)) = vhost_user.call(call, serves, ring) {
                    self.engine.begin_session(id, session);
                }
            }
            ShardCall::Transfer { id, call } => self.transfer(now, id, call),
            ShardCall::SetLease { id, clock } => self.set_lease(id, clock),
            ShardCall::Lose { id } => self.lose_disk(now, id),
            ShardCall::LinkParent { id, parent } => self.link_parent(id, parent),
            ShardCall::ParentChecked { id, check } => self.parent_checked(id, check),
            ShardCall::Rest { answer } => self.rest(now, answer),
            ShardCall::Resume {} => self.resume(),
            ShardCall::HandOver { answer } => reply(answer, Ok(self.hand_over())),
            ShardCall::Stop { answer } => self.stop(now, answer),
        }
    }

    /// Passes a command to the engine. `waiting` is answered when the command is complete.
    pub(super) fn start_command(&mut self, now: Instant, id: DiskId, waiting: Waiting, command: Command) {
        let number = self.commands.next(waiting);
        self.engine.handle_command(now, number, id, command);
    }

    pub(super) fn serves(&self, id: DiskId) -> bool {
        self.commands.stop.is_none() && self.backings.get(id).is_some() && !self.is_abandoned(id)
    }

    fn add_disk(
        &mut self,
        now: Instant,
        id: DiskId,
        config: DiskConfig,
        mut backing: Backing,
        mark: Option<UnflushedMark>,
        answer: Answer<()>,
    ) {
        let Ok(owner) = u16::try_from(id.0) else {
            let why = "the shard already serves the maximum number of disks".to_owned();
            return reply(answer, Err(ShardError::Unusable(why)));
        };
        if self.backings.get(id).is_some() {
            return reply(answer, Err(ShardError::Command(CommandError::DiskExists)));
        }
        backing.attach(&mut self.ring, now, owner);
        self.backings.insert(id, backing);
        self.marks.extend(mark.map(|mark| (id, mark)));
        self.gate_backing(id);
        self.ring.arena_mut().join(id, config.datastore);
        self.start_command(now, id, Waiting::Plain(answer), Command::AddDisk(config));
    }

    fn set_memory(
        &mut self,
        now: Instant,
        id: DiskId,
        memory: Option<(MemoryConfig, Area)>,
        answer: Answer<Option<Area>>,
    ) {
        let (config, area) = memory.unzip();
        // Copies that were ordered before refer to the old memory, and later copies to the new
        // memory.
        self.make_copies();
        self.start_command(now, id, Waiting::Memory(answer, area), Command::Memory(config));
        self.drain_events(now);
    }

    /// Reports sessions of disconnected clients, and ended sessions, to the engine.
    pub(super) fn end_sessions(&mut self) {
        let Shard { clients, files, vhost_user, engine, .. } = self;
        clients.left.drain(..).for_each(|(disk, session)| engine.leave_session(disk, session));
        let ended = clients.ended.drain(..).chain(files.ended.drain(..)).chain(vhost_user.ended.drain(..));
        ended.for_each(|(disk, session)| engine.end_session(disk, session));
    }

    fn remove_disk(&mut self, now: Instant, id: DiskId, answer: Option<Answer<Gone>>) {
        let is_of = |connection: &Connection| connection.disk() == id;
        self.clients.close("the disk was removed", &mut self.ring, is_of);
        self.files.close(&mut self.ring, id);
        self.vhost_user.close_all(id, &mut self.ring);
        self.clients.recorders.end(id);
        self.transfers.remove(id);
        self.leave_lease(now, id);
        self.unlink_parent(id);
        if let Some(backing) = self.backings.get_mut(id) {
            // The removal must not wait forever for these requests.
            backing.set_wait_max(now, WaitMax::AtMost(LEAVING_WAIT_MAX));
        }
        self.start_command(now, id, Waiting::Remove(answer), Command::RemoveDisk);
    }

    fn stop(&mut self, now: Instant, answer: Answer<()>) {
        self.commands.stop = Some(answer);
        let left_behind = &self.commands.left_behind;
        let disks: Vec<DiskId> = self.backings.disks().filter(|disk| !left_behind.contains(disk)).collect();
        for disk in disks {
            self.remove_disk(now, disk, None);
        }
        self.commands.check_over();
    }

    /// Tells the services to how many guests of a disk an error must still be reported. Guests
    /// whose changes are only in this process's memory are included: a kill of the process would
    /// lose these changes, and then only the record of the services could show the loss.
    pub(super) fn report_exposure(&mut self, disk: DiskId) {
        let backing = self.backings.get_mut(disk);
        let Some(is_exposed) = backing.and_then(|backing| backing.poll_exposure()) else { return };
        let at_risk = if is_exposed { self.engine.guests_at_risk(disk).unwrap_or(0) } else { 0 };
        let count = self.engine.failures_owed(disk) + at_risk;
        self.commands.failures_owed.insert(disk, count);
        self.commands.report(ShardEvent::FailuresOwed { disk, count });
    }

    /// Forwards an event of the engine to the services.
    pub(super) fn handle_event(&mut self, now: Instant, event: Event) {
        let report = match event {
            Event::Done { command, disk, result } => return self.command_done(now, command, disk, result),
            Event::FailuresOwed { disk, count } => {
                self.commands.failures_owed.insert(disk, count);
                ShardEvent::FailuresOwed { disk, count }
            }
            Event::Fenced { device, errors: 0 } => {
                tracing::error!(
                    device = device.0,
                    "hob stops using a remote flash device, because the lending host does not \
                    answer; caches continue without it"
                );
                ShardEvent::Fenced { device, errors: 0 }
            }
            Event::Fenced { device, errors } => {
                tracing::error!(device = device.0, errors, "flash device fenced after repeated errors");
                ShardEvent::Fenced { device, errors }
            }
            Event::Lost { disk, segments } => {
                tracing::error!(
                    disk = disk.0,
                    segments = segments.len(),
                    "a cache lost its segments on a fenced device"
                );
                ShardEvent::Lost { disk, segments }
            }
            Event::Stalled(device) => {
                tracing::debug!(device = device.0, "a flash device does not answer in time");
                ShardEvent::Stalled(device)
            }
            Event::Resumed(device) => {
                tracing::debug!(device = device.0, "flash device answers again");
                ShardEvent::Resumed(device)
            }
            Event::DirtyLost { disk, sectors } => ShardEvent::DirtyLost { disk, sectors },
            Event::Bitmaps { disk, bitmaps } => {
                self.commands.bitmaps.insert(disk, bitmaps);
                return;
            }
            Event::ChangeWaits(disk) => ShardEvent::ChangeWaits(disk),
            Event::WritesInDoubt(disk) => ShardEvent::WritesInDoubt(disk),
            Event::JournalLost(disk) => {
                tracing::error!(
                    disk = disk.0,
                    "cannot write the journal of the disk's cache; see 'hob health'"
                );
                ShardEvent::JournalLost(disk)
            }
            Event::DiscardUnrecorded(disk, ring) => ShardEvent::DiscardUnrecorded(disk, ring),
            Event::JournalCopyLost(disk) => ShardEvent::JournalCopyLost(disk),
        };
        self.commands.report(report);
    }

    fn command_done(
        &mut self,
        now: Instant,
        command: CommandId,
        disk: DiskId,
        result: Result<Vec<Segment>, CommandError>,
    ) {
        match (self.commands.waiting.remove(&command).expect("commands end once"), result) {
            (Waiting::Plain(answer), result) => reply(answer, result.map(drop).map_err(ShardError::Command)),
            (Waiting::Change(answer), result) => reply(answer, result.map_err(ShardError::Command)),
            (Waiting::Growth(answer, size_bytes), Ok(released)) => {
                if let Some(backing) = self.backings.get_mut(disk) {
                    backing.grow(size_bytes);
                }
                self.files.grow(disk, size_bytes);
                self.clients.grow(disk, size_bytes);
                self.vhost_user.grow(disk, size_bytes);
                self.transfers.grow(disk, size_bytes);
                reply(answer, Ok(released));
            }
            (Waiting::Growth(answer, _), Err(error)) => reply(answer, Err(ShardError::Command(error))),
            (Waiting::Memory(answer, area), Ok(_)) => reply(answer, Ok(self.areas.replace(disk, area))),
            (Waiting::Memory(answer, _), Err(error)) => reply(answer, Err(ShardError::Command(error))),
            (Waiting::Remove(Some(answer)), Err(error)) => {
                if error == CommandError::JournalFailed {
                    self.leases.stay(disk);
                }
                reply(answer, Err(ShardError::Command(error)));
            }
            (Waiting::Remove(None), Err(_)) => self.commands.check_over(),
            (Waiting::Remove(answer), Ok(released)) => {
                self.ring.arena_mut().leave(disk);
                let backing = self.backings.get(disk);
                let changed = backing.and_then(|backing| backing.change_mark());
                let witness = backing.and_then(|backing| backing.witness()).map(ChangeDetector::keep_open);
                let is_unflushed =
                    backing.is_none_or(|backing| backing.is_abandoned() || backing.is_unflushed());
                let is_unanswered = backing.is_some_and(Backing::may_change_later);
                let bitmaps = self.commands.bitmaps.remove(&disk).unwrap_or_default();
                let memory = self.areas.replace(disk, None);
                let failures_owed = self.commands.failures_owed.remove(&disk).unwrap_or(0);
                let gone = Gone {
                    released,
                    changed,
                    witness,
                    memory,
                    bitmaps,
                    failures_owed,
                    is_unflushed,
                    is_unanswered,
                    is_closing: false,
                };
                self.commands.closing.insert(disk, answer.map(|answer| (answer, gone)));
                if let Some(backing) = self.backings.get_mut(disk) {
                    backing.close(&mut self.ring);
                }
                self.collect(now, disk);
                if self.is_abandoned(disk) {
                    self.commands.leave_behind(disk);
                }
            }
        }
    }
}
