//! A shard for tests, with a real engine, that moves no payload.
//!
//! The shard is a task of the test's runtime, whose time tests can advance. Tests can make the
//! shard hang, make backings fail, and send writes as a guest. Guests write only zeroes, which the
//! test files contain anyway. Journal pages are really written, so that caches can be recovered.

mod cache_transfer;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use hob_control::TraceRecord;
use hob_engine::command::{Bitmap, CacheChange, Command, CommandError, Event, Segment};
use hob_engine::io::{Durability, Io, IoError, IoOp, Op, PayloadMemory, Promote, Request, Target};
use hob_engine::units::{BufferId, CommandId, DeviceId, DiskId, Instant, RequestId, SECTOR_BYTES};
use hob_engine::{Engine, Limits};
use tokio::sync::Notify;

use super::hardware::{Area, Backing, ChangeDetector, DeviceCounts, LocalFlash};
use super::request_recorder::Recorder;
use super::shard_api::{Answer, AtRest, Gone, Noted, ShardCall, ShardError, ShardEvent, ShardHandle};

/// Interval at which the fake shard tells the engine the time.
const TICK: Duration = Duration::from_millis(50);

/// The test's handle of the shard.
#[derive(Clone)]
pub(crate) struct FakeShard {
    state: Arc<Mutex<State>>,
    calls: Arc<Notify>,
}

struct State {
    engine: Engine,
    origin: tokio::time::Instant,
    hangs: bool,
    users: u64,
    refuses_devices: bool,
    keeps_disks: bool,
    /// Disks that another host may own.
    lost: BTreeSet<DiskId>,
    refuses_qos: bool,
    /// True if removals of disks wait in `held` until the backing of a disk is abandoned.
    holds_removals: bool,
    /// How long requests of each disk wait for its backing, as the daemon set it last.
    waits: BTreeMap<DiskId, Duration>,
    stripes: BTreeMap<DiskId, u32>,
    /// True if calls that enable a recovered cache wait in `held`.
    holds_recovered: bool,
    held: Vec<ShardCall>,
    writes_crash_logs: bool,
    /// Caches that may have crash logs. Dropping this value removes the crash logs.
    crash_logs: BTreeSet<[u8; 16]>,
    backings_fail: bool,
    /// The flash device that refuses all writes.
    sick: Option<DeviceId>,
    /// The flash device that completes no I/O. The next field has the I/O that was sent to this
    /// device.
    silent: Option<DeviceId>,
    kept: Vec<Io>,
    /// Events that the shard would report to the daemon.
    events: Vec<ShardEvent>,
    devices: BTreeMap<DeviceId, LocalFlash>,
    backings: BTreeMap<DiskId, Backing>,
    recorders: BTreeMap<DiskId, Recorder>,
    areas: BTreeMap<DiskId, Area>,
    bitmaps: BTreeMap<DiskId, Vec<Bitmap>>,
    failures_owed: BTreeMap<DiskId, u32>,
    commands: u64,
    /// Parents whose files were reported to be unchanged, each with the number of the check.
    checked_parents: Vec<(DiskId, u64)>,
    /// Names of the changes that were made to caches.
    changes: Vec<&'static str>,
    /// Number of calls since a test last asked.
    received: usize,
    waiting: BTreeMap<CommandId, Waiting>,
    requests: u64,
    /// Results of requests that no test has taken yet.
    replies: BTreeMap<RequestId, Result<(), IoError>>,
}

enum Waiting {
    Add(Answer<()>),
    Change(Answer<Vec<Segment>>),
    Memory(Answer<Option<Area>>, Option<Area>),
    Remove(Answer<Gone>, DiskId),
}

impl State {
    fn new() -> State {
        let mut engine = Engine::new(Limits::default());
        engine.lend(BufferId(u32::MAX), 1 << 20);
        State {
            engine,
            origin: tokio::time::Instant::now(),
            hangs: false,
            users: 0,
            refuses_devices: false,
            keeps_disks: false,
            lost: BTreeSet::new(),
            refuses_qos: false,
            holds_removals: false,
            waits: BTreeMap::new(),
            stripes: BTreeMap::new(),
            holds_recovered: false,
            held: Vec::new(),
            writes_crash_logs: false,
            crash_logs: BTreeSet::new(),
            backings_fail: false,
            sick: None,
            silent: None,
            kept: Vec::new(),
            events: Vec::new(),
            devices: BTreeMap::new(),
            backings: BTreeMap::new(),
            recorders: BTreeMap::new(),
            areas: BTreeMap::new(),
            bitmaps: BTreeMap::new(),
            failures_owed: BTreeMap::new(),
            commands: 0,
            checked_parents: Vec::new(),
            changes: Vec::new(),
            received: 0,
            waiting: BTreeMap::new(),
            requests: 0,
            replies: BTreeMap::new(),
        }
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.crash_logs.iter().for_each(hob_storage::crash_log::remove);
    }
}

impl FakeShard {
    /// Starts a fake shard. The caller must be inside a runtime.
    pub(crate) fn start() -> (ShardHandle, FakeShard) {
        let calls = Arc::new(Notify::new());
        let waker = calls.clone();
        let (handle, receiver) = ShardHandle::new(move || waker.notify_one());
        let fake = FakeShard { state: Arc::new(Mutex::new(State::new())), calls };
        tokio::spawn(fake.clone().run(receiver));
        (handle, fake)
    }

    /// Makes the shard hang (`true`), or makes it continue and answer the calls that have waited.
    pub(crate) fn set_hangs(&self, hangs: bool) {
        self.state.lock().unwrap().hangs = hangs;
        self.calls.notify_one();
    }

    /// Sets the number of clients that use each disk.
    pub(crate) fn set_users(&self, users: u64) {
        self.state.lock().unwrap().users = users;
    }

    /// Makes the shard refuse new devices, or accept them again.
    pub(crate) fn set_refuses_devices(&self, refuses: bool) {
        self.state.lock().unwrap().refuses_devices = refuses;
    }

    /// Makes the shard keep disks and persistent caches that are to be removed, as if their
    /// journals could not be written.
    pub(crate) fn set_keeps_disks(&self, keeps: bool) {
        self.state.lock().unwrap().keeps_disks = keeps;
    }

    /// Returns true if the daemon has reported to the shard that another host may own the disk.
    pub(crate) fn is_lost(&self, disk: DiskId) -> bool {
        self.state.lock().unwrap().lost.contains(&disk)
    }

    /// Makes removals of disks wait until a backing is abandoned, as if backings did not answer.
    pub(crate) fn set_holds_removals(&self) {
        self.state.lock().unwrap().holds_removals = true;
    }

    /// Makes the shard refuse entitlements of disks, or accept them again.
    pub(crate) fn set_refuses_qos(&self, refuses: bool) {
        self.state.lock().unwrap().refuses_qos = refuses;
    }

    /// Returns the maximum time that a disk's requests wait for the backing, as the daemon set it
    /// last.
    pub(crate) fn wait_max(&self, disk: DiskId) -> Option<Duration> {
        self.state.lock().unwrap().waits.get(&disk).copied()
    }

    /// Returns the stripe size of a disk in bytes, as the daemon set it last.
    pub(crate) fn stripe(&self, disk: DiskId) -> Option<u32> {
        self.state.lock().unwrap().stripes.get(&disk).copied()
    }

    /// With true, calls that enable a recovered cache wait. With false, the waiting calls are
    /// handled.
    pub(crate) fn set_holds_recovered(&self, holds: bool) {
        let mut state = self.state.lock().unwrap();
        state.holds_recovered = holds;
        let held = std::mem::take(&mut state.held);
        held.into_iter().for_each(|call| state.call(call));
    }

    /// Returns the changes that were made to caches since the last call: `drain`, `clear`,
    /// `discard`, `another`.
    pub(crate) fn take_changes(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.state.lock().unwrap().changes)
    }

    /// Returns the number of calls that the shard has received since this function was last used.
    pub(crate) fn take_received(&self) -> usize {
        std::mem::take(&mut self.state.lock().unwrap().received)
    }

    /// Returns the parents whose files were reported to be unchanged since the last call, each with
    /// the number of the check.
    pub(crate) fn take_checked_parents(&self) -> Vec<(DiskId, u64)> {
        std::mem::take(&mut self.state.lock().unwrap().checked_parents)
    }

    /// From now on, a cache that gets a new journal ring also writes its crash log.
    pub(crate) fn set_writes_crash_logs(&self) {
        self.state.lock().unwrap().writes_crash_logs = true;
    }

    /// Makes backings refuse writes, or accept them again.
    pub(crate) fn set_backings_fail(&self, fail: bool) {
        self.state.lock().unwrap().backings_fail = fail;
    }

    /// Makes all writes to a flash device fail.
    pub(crate) fn set_sick(&self, device: DeviceId) {
        self.state.lock().unwrap().sick = Some(device);
    }

    /// Lets all flash devices accept writes again.
    pub(crate) fn set_none_sick(&self) {
        self.state.lock().unwrap().sick = None;
    }

    /// Makes a flash device complete no I/O (`Some`), or completes the I/O that has waited
    /// (`None`).
    pub(crate) fn set_silent(&self, device: Option<DeviceId>) {
        let mut state = self.state.lock().unwrap();
        state.silent = device;
        for io in std::mem::take(&mut state.kept) {
            state.complete(&io);
        }
        state.settle();
    }

    /// Returns the events that the shard has not reported yet.
    pub(crate) fn take_events(&self) -> Vec<ShardEvent> {
        std::mem::take(&mut self.state.lock().unwrap().events)
    }

    /// Closes everything immediately, like a shard that is killed.
    pub(crate) fn stop(&self) {
        *self.state.lock().unwrap() = State::new();
    }

    /// Returns the size of a disk's memory area, bytes.
    pub(crate) fn area_bytes(&self, id: DiskId) -> u64 {
        self.state.lock().unwrap().areas.get(&id).map_or(0, Area::len)
    }

    pub(crate) fn devices(&self) -> Vec<DeviceId> {
        self.state.lock().unwrap().devices.keys().copied().collect()
    }

    /// Adds a guest's request to the recording of a disk, if the disk is being recorded.
    pub(crate) fn request(&self, id: DiskId, record: &TraceRecord) -> bool {
        let mut state = self.state.lock().unwrap();
        state.recorders.get_mut(&id).map(|recorder| recorder.push(record)).is_some()
    }

    /// Writes zeroes as a guest, then flushes.
    pub(crate) fn write(&self, disk: DiskId, offset: u64, len: u64) -> Result<(), IoError> {
        let mut state = self.state.lock().unwrap();
        state.guest(disk, Op::Write(Durability::Volatile), offset, len)?;
        state.guest(disk, Op::Flush, 0, 0)
    }

    /// Begins a write of zeroes, or a read, as a guest. The request may have to wait.
    pub(crate) fn begin(&self, disk: DiskId, op: Op, offset: u64, len: u64) -> RequestId {
        self.state.lock().unwrap().begin(disk, op, offset, len)
    }

    pub(crate) fn reply(&self, id: RequestId) -> Option<Result<(), IoError>> {
        self.state.lock().unwrap().replies.remove(&id)
    }

    /// Reads as a guest.
    pub(crate) fn read(&self, disk: DiskId, offset: u64, len: u64) -> Result<(), IoError> {
        self.state.lock().unwrap().guest(disk, Op::Read, offset, len)
    }

    async fn run(self, receiver: mpsc::Receiver<ShardCall>) {
        let mut tick = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                () = self.calls.notified() => {}
                _ = tick.tick() => {}
            }
            let mut state = self.state.lock().unwrap();
            while !state.hangs {
                match receiver.try_recv() {
                    Ok(call) => {
                        state.received += 1;
                        state.call(call);
                    }
                    Err(mpsc::TryRecvError::Empty) => break,
                    Err(mpsc::TryRecvError::Disconnected) => return,
                }
            }
            let now = state.now();
            if !state.hangs && state.engine.poll_timeout().is_some_and(|at| at <= now) {
                state.engine.handle_timeout(now);
                state.settle();
            }
        }
    }
}

impl State {
    fn now(&self) -> Instant {
        Instant(self.origin.elapsed().as_nanos() as u64)
    }

    fn call(&mut self, call: ShardCall) {
        match call {
            ShardCall::Ping { answer } => {
                let _ = answer.send(Ok(()));
            }
            ShardCall::AddDevice { answer, .. } if self.refuses_devices => {
                let _ = answer.send(Err(ShardError::Busy));
            }
            ShardCall::AddDevice { id, device, answer } => {
                let device = device.here().expect("devices of this host");
                assert!(self.devices.insert(id, device).is_none(), "device {id} twice");
                let _ = answer.send(Ok(()));
            }
            ShardCall::GiveUpDevice { id } => self.engine.give_up_device(id),
            ShardCall::RemoveDevice { id, answer } => {
                assert!(self.devices.remove(&id).is_some(), "no device {id}");
                let _ = answer.send(Ok(()));
            }
            ShardCall::AddDisk { id, config, backing, answer, .. } => {
                self.backings.insert(id, backing);
                self.command(id, Command::AddDisk(config), Waiting::Add(answer));
            }
            ShardCall::OweFailures { id, count } => self.engine.owe_failures(id, count),
            ShardCall::RemoveDisk { answer, .. } if self.keeps_disks => {
                let _ = answer.send(Err(ShardError::Command(CommandError::JournalFailed)));
            }
            ShardCall::RemoveDisk { .. } if self.holds_removals => self.held.push(call),
            ShardCall::RemoveDisk { id, answer } => {
                self.recorders.remove(&id);
                self.command(id, Command::RemoveDisk, Waiting::Remove(answer, id));
            }
            ShardCall::ChangeCache { change: CacheChange::Disable, answer, .. } if self.keeps_disks => {
                let _ = answer.send(Err(ShardError::Command(CommandError::JournalFailed)));
            }
            ShardCall::ChangeCache { change: CacheChange::Enable(ref enable), .. }
                if self.holds_recovered && enable.recovered.is_some() =>
            {
                self.held.push(call);
            }
            ShardCall::ChangeCache { id, change, crash_log, answer } => {
                self.crash_logs.extend(change.ring().map(|ring| ring.cache));
                if let Some(crash_log) = crash_log.filter(|_| self.writes_crash_logs) {
                    self.engine.keep_records(id, crash_log);
                }
                self.changes.push(match change {
                    CacheChange::Drain => "drain",
                    CacheChange::Clear(_) => "clear",
                    CacheChange::DiscardDirty(_) => "discard",
                    _ => "another",
                });
                self.command(id, Command::Cache(change), Waiting::Change(answer));
            }
            ShardCall::SetMemory { id, memory, answer } => {
                let (config, area) = memory.unzip();
                let area = match area {
                    Some(area) => self.areas.insert(id, area),
                    None => self.areas.remove(&id),
                };
                self.command(id, Command::Memory(config), Waiting::Memory(answer, area));
            }
            ShardCall::SetWaitMax { id, wait_max } => _ = self.waits.insert(id, wait_max),
            ShardCall::SetStripe { id, bytes } => {
                self.stripes.insert(id, bytes);
                self.engine.set_stripe(id, bytes);
            }
            ShardCall::ExpireRequests { .. } => {}
            ShardCall::Abandon { id } => {
                self.engine.revoke(self.now(), id);
                self.settle();
                if std::mem::take(&mut self.holds_removals) {
                    std::mem::take(&mut self.held).into_iter().for_each(|call| self.call(call));
                }
            }
            ShardCall::StopWaiting { id } => {
                if self.engine.guests_at_risk(id).unwrap_or(0) <= self.engine.failures_owed(id) {
                    self.engine.revoke(self.now(), id);
                    self.engine.handle_loss(self.now(), id);
                    self.settle();
                }
            }
            ShardCall::SetQos { answer, .. } if self.refuses_qos => {
                let _ = answer.send(Err(ShardError::Busy));
            }
            ShardCall::SetQos { id, qos, answer } => {
                self.command(id, Command::Qos(qos), Waiting::Add(answer));
            }
            ShardCall::Control { resource, control } => self.engine.control(self.now(), resource, control),
            ShardCall::Resource { resource, answer } => {
                let _ = answer.send(Ok(self.engine.resource(resource)));
            }
            ShardCall::ReportOn { resource, level, answer } => {
                let _ = answer.send(Ok(self.engine.report_on(self.now(), resource, level)));
            }
            ShardCall::TakePart { resource, in_flight } => {
                self.engine.take_part(self.now(), resource, in_flight)
            }
            ShardCall::ChangeBitmaps { id, change, answer } => {
                self.command(id, Command::Bitmap(change), Waiting::Add(answer));
            }
            ShardCall::Bitmaps { id, whole, answer } => {
                let _ = answer.send(Ok(Noted::of(self.engine.bitmaps(id), whole.as_deref())));
            }
            ShardCall::Stats { id, answer } => {
                let stats = self.engine.stats(self.now(), id).map(Box::new);
                let _ = answer.send(stats.ok_or(ShardError::Command(CommandError::NoSuchDisk)));
            }
            ShardCall::StatsOf { ids, answer } => {
                let stats = ids.into_iter().map(|id| self.engine.stats(self.now(), id).map(Box::new));
                let _ = answer.send(Ok(stats.collect()));
            }
            ShardCall::ChecksumMismatches { ids, answer } => {
                let stats = ids.into_iter().map(|id| self.engine.stats(self.now(), id));
                let _ = answer.send(Ok(stats.map(|stats| Some(stats?.checksum_mismatches)).collect()));
            }
            ShardCall::Histograms { id, answer } => {
                let found = self.engine.histograms(id).map(|found| (self.now(), Box::new(found.clone())));
                let _ = answer.send(found.ok_or(ShardError::Command(CommandError::NoSuchDisk)));
            }
            ShardCall::Sizing { id, answer } => {
                let found = self.engine.sizing(self.now(), id).map(Box::new);
                let _ = answer.send(found.ok_or(ShardError::Command(CommandError::NoSuchDisk)));
            }
            ShardCall::DiskCounts { asked, answer } => {
                let counts = asked.into_iter().map(|asked| asked.of(&self.engine)).collect();
                let _ = answer.send(Ok(counts));
            }
            ShardCall::FlashCounts { ids, answer } => {
                let counts = ids.into_iter().map(|id| self.engine.flash_counts(id)).collect();
                let _ = answer.send(Ok(counts));
            }
            ShardCall::AllowFlashWrites { allowances } => {
                for (id, allowance) in allowances {
                    self.engine.allow_flash_writes(id, allowance);
                }
            }
            ShardCall::Users { answer, .. } => {
                let _ = answer.send(Ok(self.users));
            }
            ShardCall::ClientPids { answer, .. } => {
                let _ = answer.send(Ok((0..self.users).map(|_| std::process::id()).collect()));
            }
            ShardCall::Reset { id, counter, answer } => {
                self.command(id, counter.command(), Waiting::Add(answer));
            }
            ShardCall::Devices { answer } => {
                // The fake shard does no I/O, but returns numbers that the tests can recognise.
                let counts =
                    |id: &DeviceId| DeviceCounts { ios: 1000 + u64::from(id.0), ..DeviceCounts::default() };
                let _ = answer.send(Ok(self.devices.keys().map(|id| (*id, counts(id))).collect()));
            }
            ShardCall::ChangedMeanwhile { id, answer } => {
                let _ = answer.send(Ok(self.engine.changed_meanwhile(id).cloned().map(Box::new)));
            }
            ShardCall::Record { id, recorder, answer } => {
                self.recorders.insert(id, recorder);
                let _ = answer.send(Ok(()));
            }
            ShardCall::EndRecording { id } => self.recorders.retain(|of, it| *of != id || !it.is_abandoned()),
            ShardCall::Attach { .. } | ShardCall::AttachFile { .. } | ShardCall::CloseExport { .. } => {}
            ShardCall::Transfer { id, call } => self.transfer(id, call),
            ShardCall::VhostUser { .. } | ShardCall::Resume {} => {}
            ShardCall::SetLease { .. } => {}
            ShardCall::Lose { id } => _ = self.lost.insert(id),
            ShardCall::LinkParent { .. } => {}
            ShardCall::ParentChecked { id, check } => self.checked_parents.push((id, check)),
            ShardCall::Rest { answer } => {
                let _ = answer.send(Ok(()));
            }
            ShardCall::HandOver { answer } => {
                let _ = answer.send(Ok(AtRest::default()));
            }
            ShardCall::Stop { answer } => {
                let _ = answer.send(Ok(()));
            }
        }
    }

    fn command(&mut self, id: DiskId, command: Command, waiting: Waiting) {
        self.commands += 1;
        self.waiting.insert(CommandId(self.commands), waiting);
        self.engine.handle_command(self.now(), CommandId(self.commands), id, command);
        self.settle();
    }

    fn guest(&mut self, disk: DiskId, op: Op, offset: u64, len: u64) -> Result<(), IoError> {
        let id = self.begin(disk, op, offset, len);
        // No test waits for requests that a real shard would answer later, because of a lost
        // journal or a device that does not answer.
        self.replies.remove(&id).unwrap_or(Err(IoError::Failed))
    }

    fn begin(&mut self, disk: DiskId, op: Op, offset: u64, len: u64) -> RequestId {
        self.begin_in(0, disk, op, offset, len)
    }

    fn begin_in(&mut self, session: u32, disk: DiskId, op: Op, offset: u64, len: u64) -> RequestId {
        self.requests += 1;
        let buffer = op.has_buffer().then_some(BufferId(self.requests as u32));
        let request = Request {
            id: RequestId(u64::from(session) << 32 | self.requests),
            disk,
            op,
            offset,
            len,
            buffer,
            promote: Promote::Usual,
            memory: PayloadMemory::Daemon,
        };
        self.engine.handle_request(self.now(), request).expect("the engine takes requests");
        self.settle();
        request.id
    }

    /// Performs the engine's I/O, and passes on the engine's events and replies.
    fn settle(&mut self) {
        while self.engine.poll_copy().is_some() {}
        while let Some(io) = self.engine.poll_io() {
            match io.target {
                Target::Flash(device) if self.silent == Some(device) => self.kept.push(io),
                _ => self.complete(&io),
            }
            while self.engine.poll_copy().is_some() {}
        }
        while let Some(reply) = self.engine.poll_reply() {
            self.replies.insert(reply.id, reply.result);
        }
        while self.engine.poll_release().is_some() {}
        while let Some(event) = self.engine.poll_event() {
            let (command, result) = match event {
                Event::Done { command, result, .. } => (command, result),
                Event::Fenced { device, errors } => {
                    self.events.push(ShardEvent::Fenced { device, errors });
                    continue;
                }
                Event::Bitmaps { disk, bitmaps } => {
                    self.bitmaps.insert(disk, bitmaps);
                    continue;
                }
                Event::FailuresOwed { disk, count } => {
                    self.failures_owed.insert(disk, count);
                    continue;
                }
                Event::ChangeWaits(disk) => {
                    self.events.push(ShardEvent::ChangeWaits(disk));
                    continue;
                }
                Event::JournalLost(disk) => {
                    self.events.push(ShardEvent::JournalLost(disk));
                    continue;
                }
                Event::DiscardUnrecorded(disk, ring) => {
                    self.events.push(ShardEvent::DiscardUnrecorded(disk, ring));
                    continue;
                }
                Event::JournalCopyLost(disk) => {
                    self.events.push(ShardEvent::JournalCopyLost(disk));
                    continue;
                }
                Event::Stalled(device) => {
                    self.events.push(ShardEvent::Stalled(device));
                    continue;
                }
                Event::Resumed(device) => {
                    self.events.push(ShardEvent::Resumed(device));
                    continue;
                }
                _ => continue,
            };
            let result = result.map_err(ShardError::Command);
            match self.waiting.remove(&command).expect("commands end once") {
                Waiting::Add(answer) => drop(answer.send(result.map(drop))),
                Waiting::Change(answer) => drop(answer.send(result)),
                Waiting::Memory(answer, area) => drop(answer.send(result.map(|_| area))),
                Waiting::Remove(answer, id) => {
                    let backing = self.backings.remove(&id);
                    let changed = backing.as_ref().and_then(|backing| backing.change_mark());
                    let witness =
                        backing.as_ref().and_then(|backing| backing.witness()).map(ChangeDetector::keep_open);
                    let memory = self.areas.remove(&id);
                    let bitmaps = self.bitmaps.remove(&id).unwrap_or_default();
                    let failures_owed = self.failures_owed.remove(&id).unwrap_or(0);
                    drop(answer.send(result.map(|released| Gone {
                        is_closing: false,
                        is_unflushed: self.backings_fail,
                        is_unanswered: false,
                        failures_owed,
                        released,
                        changed,
                        witness,
                        memory,
                        bitmaps,
                    })));
                }
            }
        }
    }

    fn complete(&mut self, io: &Io) {
        let result = self.perform(io);
        let sums = vec![zero_sum(); (io.len / SECTOR_BYTES) as usize];
        self.engine.handle_completion(self.now(), io.id, result, &sums);
    }

    fn perform(&self, io: &Io) -> Result<(), IoError> {
        match io.target {
            Target::Backing(_) if self.backings_fail && io.op != IoOp::Read => Err(IoError::Failed),
            Target::Flash(device) if self.sick == Some(device) && io.op != IoOp::Read => Err(IoError::Failed),
            Target::Flash(device) if io.op == IoOp::WriteJournal => {
                let pages = self.engine.journal_pages(io.id);
                assert_eq!(pages.len() as u64, io.len);
                let file = self.devices[&device].file.try_clone().map(std::fs::File::from);
                write_aligned(&file.unwrap(), pages, io.offset);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Writes from an aligned buffer, because the file may be open with O_DIRECT.
fn write_aligned(file: &std::fs::File, bytes: &[u8], offset: u64) {
    let mut memory = vec![0; bytes.len() + 4096];
    let skip = memory.as_ptr().align_offset(4096);
    memory[skip..skip + bytes.len()].copy_from_slice(bytes);
    file.write_all_at(&memory[skip..skip + bytes.len()], offset).unwrap();
}

/// Returns the checksum of a sector of zeroes.
fn zero_sum() -> u32 {
    let mut sums = Vec::new();
    hob_storage::checksum::sector_sums(&[0; SECTOR_BYTES as usize], &mut sums);
    sums[0]
}
