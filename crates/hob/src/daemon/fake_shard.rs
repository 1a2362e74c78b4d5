//! A shard for tests: a real engine that decides, and nothing that moves bytes.
//!
//! It is a task of the test's own runtime, so that tests can let time-outs pass in no time. It can
//! be told to hang, and to report events.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, mpsc};

use hob_engine::command::{Command, CommandError, Event, Segment};
use hob_engine::units::{CommandId, DeviceId, DiskId, Instant};
use hob_engine::{Engine, Limits};
use tokio::sync::Notify;

use super::hardware::{Backing, FlashDevice};
use super::shard_api::{Gone, ShardCall, ShardError, ShardHandle};
use super::tape::Recorder;
use hob_control::TraceRecord;

/// The test's end.
#[derive(Clone)]
pub(crate) struct FakeShard {
    state: Arc<Mutex<State>>,
    calls: Arc<Notify>,
}

#[derive(Default)]
struct State {
    hangs: bool,
    devices: BTreeMap<DeviceId, FlashDevice>,
    backings: BTreeMap<DiskId, Backing>,
    recorders: BTreeMap<DiskId, Recorder>,
}

impl FakeShard {
    /// Starts one. Call it inside a runtime.
    pub(crate) fn start() -> (ShardHandle, FakeShard) {
        let calls = Arc::new(Notify::new());
        let waker = calls.clone();
        let (handle, receiver) = ShardHandle::new(move || waker.notify_one());
        let fake = FakeShard { state: Arc::default(), calls };
        tokio::spawn(fake.clone().run(receiver));
        (handle, fake)
    }

    /// Answers nothing from now on, or answers what has piled up.
    pub(crate) fn set_hangs(&self, hangs: bool) {
        self.state.lock().unwrap().hangs = hangs;
        self.calls.notify_one();
    }

    /// Closes everything, as a shard does at its end.
    pub(crate) fn stop(&self) {
        *self.state.lock().unwrap() = State::default();
    }

    /// Devices that it has open.
    pub(crate) fn devices(&self) -> Vec<DeviceId> {
        self.state.lock().unwrap().devices.keys().copied().collect()
    }

    /// Takes a request of a guest, if somebody records them.
    pub(crate) fn request(&self, id: DiskId, record: &TraceRecord) -> bool {
        let mut state = self.state.lock().unwrap();
        state.recorders.get_mut(&id).map(|recorder| recorder.push(record)).is_some()
    }

    async fn run(self, receiver: mpsc::Receiver<ShardCall>) {
        let mut engine = Engine::new(Limits::default());
        loop {
            self.calls.notified().await;
            let mut state = self.state.lock().unwrap();
            while !state.hangs {
                match receiver.try_recv() {
                    Ok(call) => state.call(&mut engine, call),
                    Err(mpsc::TryRecvError::Empty) => break,
                    Err(mpsc::TryRecvError::Disconnected) => return,
                }
            }
        }
    }
}

impl State {
    fn call(&mut self, engine: &mut Engine, call: ShardCall) {
        match call {
            ShardCall::AddDevice { id, device, answer } => {
                assert!(self.devices.insert(id, device).is_none(), "device {id} twice");
                let _ = answer.send(Ok(()));
            }
            ShardCall::RemoveDevice { id, answer } => {
                assert!(self.devices.remove(&id).is_some(), "no device {id}");
                let _ = answer.send(Ok(()));
            }
            ShardCall::AddDisk { id, config, backing, answer } => {
                self.backings.insert(id, backing);
                let _ = answer.send(command(engine, id, Command::AddDisk(config)).map(drop));
            }
            ShardCall::RemoveDisk { id, answer } => {
                self.backings.remove(&id);
                self.recorders.remove(&id);
                let released = command(engine, id, Command::RemoveDisk);
                let _ = answer.send(released.map(|released| Gone { released, changed: None }));
            }
            ShardCall::ChangeCache { id, change, answer } => {
                let _ = answer.send(command(engine, id, Command::Cache(change)));
            }
            ShardCall::Stats { id, answer } => {
                let stats = engine.stats(Instant(1_000_000_000), id).map(Box::new);
                let _ = answer.send(stats.ok_or(ShardError::Command(CommandError::NoSuchDisk)));
            }
            ShardCall::Record { id, recorder, answer } => {
                self.recorders.insert(id, recorder);
                let _ = answer.send(Ok(()));
            }
            ShardCall::EndRecording { id } => self.recorders.retain(|of, it| *of != id || !it.is_abandoned()),
            ShardCall::Attach { .. } => {}
            ShardCall::Stop { answer } => {
                let _ = answer.send(Ok(()));
            }
        }
    }
}

/// With no I/O in flight, every command ends at once.
fn command(engine: &mut Engine, id: DiskId, command: Command) -> Result<Vec<Segment>, ShardError> {
    engine.handle_command(Instant(0), CommandId(1), id, command);
    match engine.poll_event() {
        Some(Event::Done { result, .. }) => result.map_err(ShardError::Command),
        other => panic!("the engine says {other:?} instead of being done"),
    }
}
