//! Swap areas with real pools and a simulated kernel that only records its calls.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use hob_control::{DevicePatch, ProblemKind, Swap, SwapCreate, SwapPatch, SwapState};
use hob_engine::units::DeviceId;
use tokio::sync::oneshot;

use super::*;
use crate::swap::{Active, Area, FileId, Memory, Range, Spot, SwapError, SwapKernel};

/// The simulated kernel's behaviour.
#[derive(Debug, Default)]
struct FakeKernel {
    /// Areas that are on, by the offset of their first byte on the device.
    on: Mutex<BTreeMap<u64, (Spot, Active)>>,
    used: Mutex<u64>,
    memory: Mutex<Memory>,
    bad_ground: AtomicBool,
    /// While this is set, preparing an area and turning it off do not end, unless they are stopped.
    slow: AtomicBool,
    asked_to_turn_on: AtomicUsize,
    /// The next query of the kernel's state sends a notification and waits for the reply, unless
    /// the test is not waiting.
    next_look: Mutex<Option<(oneshot::Sender<()>, mpsc::Receiver<()>)>>,
}

impl FakeKernel {
    fn linger(&self, mut goes_on: impl FnMut() -> bool) -> Result<(), SwapError> {
        while self.slow.load(Ordering::Relaxed) {
            if !goes_on() {
                return Err(SwapError::Stopped);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

impl SwapKernel for FakeKernel {
    fn check_able(&self) -> Result<(), SwapError> {
        Ok(())
    }

    fn check_ground(&self, _: &OwnedFd) -> Result<(), SwapError> {
        match self.bad_ground.load(Ordering::Relaxed) {
            true => Err(SwapError::Unsafe("lies on sand".to_owned())),
            false => Ok(()),
        }
    }

    fn look(&self, spot: Spot) -> Result<Option<Active>, SwapError> {
        let next = self.next_look.lock().unwrap().take();
        if let Some((looks, may_look)) = next {
            let _ = looks.send(());
            let _ = may_look.recv();
        }
        let on = self.on.lock().unwrap();
        let found = on.get(&spot.range.offset).filter(|(there, _)| *there == spot);
        Ok(found.map(|(_, active)| Active { used: *self.used.lock().unwrap(), ..active.clone() }))
    }

    fn prepare(
        &self,
        _: &OwnedFd,
        _: &Area<'_>,
        goes_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(), SwapError> {
        self.linger(|| goes_on(MIB))
    }

    fn turn_on(&self, device: &OwnedFd, range: Range, priority: Option<u16>) -> Result<PathBuf, SwapError> {
        self.asked_to_turn_on.fetch_add(1, Ordering::Relaxed);
        let path = PathBuf::from(format!("/dev/loop{}", range.offset / MIB));
        let spot = Spot { file: FileId::of(device).unwrap(), range };
        let priority = priority.map_or(-2, i32::from);
        let active = Active { path: path.clone(), used: 0, priority };
        self.on.lock().unwrap().insert(range.offset, (spot, active));
        Ok(path)
    }

    fn turn_off(&self, path: &Path, stop: &AtomicBool) -> Result<(), SwapError> {
        self.linger(|| !stop.load(Ordering::Relaxed))?;
        self.on.lock().unwrap().retain(|_, (_, active)| active.path != path);
        Ok(())
    }

    fn memory(&self) -> std::io::Result<Memory> {
        Ok(*self.memory.lock().unwrap())
    }
}

/// Services whose state is kept over restarts, and a simulated kernel that keeps its swap areas
/// over these restarts.
struct Stage {
    bench: Bench,
    kernel: Arc<FakeKernel>,
}

impl Stage {
    async fn start(dir: TempDir, kernel: Arc<FakeKernel>) -> (Stage, State) {
        // The previous services close their files when their last task has ended.
        let (store, kept) = loop {
            match Store::open_now(&dir.path().join("state")) {
                Ok(opened) => break opened,
                Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        };
        let (handle, shard) = FakeShard::start();
        let (exports, options) = (Exports::default(), BackingOptions::default());
        let services = Services::with_swap_kernel(vec![handle], exports, options, store, kernel.clone());
        (Stage { bench: Bench { dir, services, shard }, kernel }, kept)
    }

    async fn new() -> Stage {
        let memory = Memory { total: 1 << 30, available: 1 << 29, swap_free: 0 };
        let kernel = Arc::new(FakeKernel { memory: Mutex::new(memory), ..FakeKernel::default() });
        let stage = Stage::start(tempfile::tempdir().unwrap(), kernel).await.0;
        stage.bench.services.registry.set_restored();
        stage
    }

    /// Simulates a kill of the daemon, and starts another one.
    async fn restart(self) -> Stage {
        let Stage { bench: Bench { dir, services, shard }, kernel } = self;
        shard.stop();
        drop((services, shard));
        let (stage, kept) = Stage::start(dir, kernel).await;
        stage.bench.services.startup.start(kept, &config()).await.unwrap();
        stage
    }

    async fn create(&self, name: &str, mib: u64) -> Result<Swap> {
        self.create_as(SwapCreate { name: Some(name.into()), size: Size(mib * MIB), ..SwapCreate::default() })
            .await
    }

    async fn create_as(&self, create: SwapCreate) -> Result<Swap> {
        Ok(self.bench.services.swap.create(create).await?.swap.unwrap())
    }

    async fn set(&self, name: &str, on: bool, force: bool) -> Result<(SwapState, Vec<String>)> {
        let changed = self.bench.services.swap.set(name.into(), SwapPatch { on, force }).await?;
        Ok((changed.swap.unwrap().state, changed.notes))
    }

    async fn show(&self, name: &str) -> Swap {
        self.bench.services.swap.one(name).await.unwrap()
    }

    async fn remove(&self, name: &str) -> Result<()> {
        self.bench.services.pools.swap_remove(name.into()).await.map(drop)
    }

    async fn wait_for(&self, name: &str, state: SwapState) {
        for _ in 0..60_000 {
            if self.show(name).await.state == state {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("{name} does not get {state:?}: {:?}", self.show(name).await);
    }
}

fn play(test: impl AsyncFnOnce(Stage)) {
    crate::background::run_in_real_time(async { test(Stage::new().await).await });
}

fn config() -> Config {
    Config::parse("").unwrap()
}

/// Returns true if the pool's files can be used for swap according to the daemon.
fn is_direct(stage: &Stage) -> bool {
    let pool = stage.bench.services.observe.pool("p").unwrap();
    let is_direct = pool.devices[0].io == Some(hob_control::IoMode::Direct);
    if !is_direct {
        eprintln!("temporary files have no direct I/O here; nothing is tested");
    }
    is_direct
}

#[test]
fn an_area_comes_on_goes_off_and_gives_its_room_back() {
    play(async |stage| {
        stage.bench.pool(&["a", "b"], 8).await;
        if !is_direct(&stage) {
            return;
        }
        stage.bench.disk("vm").await;
        stage.bench.cache("vm", 10).await.unwrap();
        let swap = stage.create("s", 3).await.unwrap();
        assert_eq!((swap.state, swap.at_start, swap.size), (SwapState::On, true, Size(3 * MIB)));
        assert!(swap.loop_device.is_some() && swap.priority == Some(-2) && swap.reason.is_none(), "{swap:?}");
        let pool = stage.bench.services.observe.pool("p").unwrap();
        assert_eq!((pool.free, pool.swap.len(), pool.swap[0].size), (Size(3 * MIB), 1, Size(3 * MIB)));
        assert_eq!((pool.orphans, pool.caches), (vec![], vec!["vm".to_owned()]));
        // A cache that grows gets the remaining space, and no more.
        stage.bench.resize("vm", 16).await.unwrap_err();
        stage.bench.resize("vm", 13).await.unwrap();
        assert_eq!(stage.bench.free(), 0);
        let refused = stage.remove("s").await.unwrap_err().to_string();
        assert!(refused.contains("hob swap off s"), "{refused}");
        assert_eq!(stage.set("s", false, false).await.unwrap(), (SwapState::Off, vec![]));
        assert!(!stage.show("s").await.at_start);
        stage.remove("s").await.unwrap();
        assert_eq!((stage.bench.free(), stage.bench.services.swap.all().await.unwrap().len()), (3, 0));
        assert!(stage.remove("s").await.unwrap_err().to_string().contains("hob swap list"));
    });
}

/// Another owner may get the segments of a swap area that is being removed, so the kernel must not
/// swap to them.
#[test]
fn an_area_that_is_being_removed_is_not_turned_on() {
    play(async |stage| {
        stage.bench.pool(&["a"], 8).await;
        if !is_direct(&stage) {
            return;
        }
        stage
            .create_as(SwapCreate {
                name: Some("s".into()),
                size: Size(3 * MIB),
                off: true,
                ..SwapCreate::default()
            })
            .await
            .unwrap();
        let ((looks, looked), (go_on, may_look)) = (oneshot::channel(), mpsc::channel());
        *stage.kernel.next_look.lock().unwrap() = Some((looks, may_look));
        let meanwhile = async {
            looked.await.unwrap();
            for on in [true, false] {
                let refused = stage.set("s", on, false).await.unwrap_err().to_string();
                assert!(refused.contains("is being removed"), "{refused}");
            }
            stage.remove("s").await.unwrap_err();
            go_on.send(()).unwrap();
        };
        let (removed, ()) = tokio::join!(stage.remove("s"), meanwhile);
        removed.unwrap();
        assert!(stage.kernel.on.lock().unwrap().is_empty());
        assert_eq!((stage.bench.free(), stage.bench.services.swap.all().await.unwrap().len()), (8, 0));
    });
}

/// The kernel continues to swap, whatever happens to the daemon. After a restart of the host, areas
/// that were on are turned on.
#[test]
fn areas_outlive_the_daemon() {
    play(async |stage| {
        stage.bench.pool(&["a"], 16).await;
        if !is_direct(&stage) {
            return;
        }
        stage.create("s", 3).await.unwrap();
        stage.create_as(SwapCreate { size: Size(1), off: true, ..SwapCreate::default() }).await.unwrap_err();
        let off = SwapCreate { size: Size(MIB + 1), off: true, priority: Some(9), ..SwapCreate::default() };
        assert_eq!(stage.create_as(off).await.unwrap().size, Size(2 * MIB));
        let stage = stage.restart().await;
        stage.wait_for("s", SwapState::On).await;
        assert_eq!(stage.kernel.asked_to_turn_on.load(Ordering::Relaxed), 1, "it was on");
        let other = stage.show("swap0").await;
        assert_eq!((other.state, other.priority, other.size), (SwapState::Off, Some(9), Size(2 * MIB)));
        assert_eq!(stage.bench.free(), 11);
        // The host restarts.
        stage.kernel.on.lock().unwrap().clear();
        let stage = stage.restart().await;
        stage.wait_for("s", SwapState::On).await;
        assert_eq!(stage.kernel.asked_to_turn_on.load(Ordering::Relaxed), 2);
        assert_eq!(stage.show("swap0").await.state, SwapState::Off);
        // Another program turns the area off: the daemon detects this, and does not undo it.
        stage.kernel.on.lock().unwrap().clear();
        let swap = stage.show("s").await;
        assert_eq!((swap.state, swap.at_start), (SwapState::Off, true));
        assert!(swap.reason.unwrap().contains("hob swap on s"));
    });
}

/// After a loss of the state directory, hob finds the swap areas by their segments.
#[test]
fn swap_areas_that_the_state_does_not_have_are_found() {
    play(async |stage| {
        stage.bench.pool(&["a"], 8).await;
        if !is_direct(&stage) {
            return;
        }
        stage.create("s", 3).await.unwrap();
        let Stage { bench: Bench { dir, services, shard }, kernel } = stage;
        shard.stop();
        drop((services, shard));
        std::fs::remove_file(dir.path().join("state/state.json")).unwrap();
        let (stage, _) = Stage::start(dir, kernel).await;
        let pool = PoolState {
            name: "p".into(),
            devices: vec![stage.bench.path("a").into()],
            segment_size: Size(SEGMENT),
            ..PoolState::default()
        };
        let again = State { pools: vec![pool], ..State::default() };
        stage.bench.services.startup.start(again, &config()).await.unwrap();
        let found = stage.bench.services.swap.all().await.unwrap();
        assert_eq!((found.len(), found[0].state, found[0].at_start), (1, SwapState::On, false));
        assert!(found[0].name.starts_with("found-"), "{found:?}");
        let name = found[0].name.clone();
        stage.set(&name, false, false).await.unwrap();
        stage.remove(&name).await.unwrap();
        assert_eq!(stage.bench.free(), 8);
    });
}

#[test]
fn what_would_be_unsafe_is_refused_and_leaves_nothing() {
    play(async |stage| {
        let sized = |mib| SwapCreate { size: Size(mib * MIB), ..SwapCreate::default() };
        let said = async |create: SwapCreate| stage.create_as(create).await.unwrap_err().to_string();
        assert!(said(sized(2)).await.contains("hob pool create"));
        stage.bench.pool(&["a", "b"], 8).await;
        if !is_direct(&stage) {
            return;
        }
        let device = |name: &str| SwapCreate { device: Some(stage.bench.path(name)), ..sized(2) };
        for (create, wrong) in [
            (SwapCreate { size: Size(4096), ..sized(0) }, "has 1M to"),
            (SwapCreate { name: Some("a/b".into()), ..sized(2) }, "cannot be a swap area's name"),
            (SwapCreate { pool: Some("q".into()), ..sized(2) }, "no pool 'q'"),
            (SwapCreate { priority: Some(40_000), ..sized(2) }, "at most 32767"),
            (device("c"), "has no device"),
            (sized(9), "no device has 9 MiB free in one piece; the longest free piece is 8 MiB"),
        ] {
            let said = said(create).await;
            assert!(said.contains(wrong), "{said}");
        }
        let out = DevicePatch { admission: Admission::Out };
        stage.bench.services.pools.device_set("p".into(), stage.bench.path("a"), out).await.unwrap();
        assert!(said(device("a")).await.contains("--admission in"));
        assert_eq!(stage.create("s", 2).await.unwrap().device, stage.bench.path("b"));
        assert!(stage.create("s", 2).await.unwrap_err().to_string().contains("already"));
        let events = [ShardEvent::Stalled(DeviceId(1)), ShardEvent::Resumed(DeviceId(1))];
        for (event, wrong) in events.into_iter().zip(["does not answer", "lies on sand"]) {
            stage.bench.services.events.handle(event);
            stage.kernel.bad_ground.store(true, Ordering::Relaxed);
            let said = said(device("b")).await;
            assert!(said.contains(wrong), "{said}");
        }
        assert_eq!(stage.bench.services.swap.all().await.unwrap().len(), 1);
        // Commands that remove the space of an area.
        for refused in [
            stage.bench.services.pools.pool_remove("p".into()).await,
            stage.bench.services.pools.device_remove("p".into(), stage.bench.path("b")).await,
        ] {
            let said = refused.unwrap_err().to_string();
            assert!(said.contains("has a swap area of the host: s"), "{said}");
        }
        stage.bench.services.pools.device_remove("p".into(), stage.bench.path("a")).await.unwrap();
        // A kernel that has forgotten its areas.
        let (services, _shard) = services(Store::Memory);
        let refused = services.swap.create(sized(2)).await.unwrap_err().to_string();
        assert!(refused.contains("hob daemon"), "{refused}");
    });
}

#[test]
fn long_work_is_shown_and_can_be_stopped() {
    play(async |stage| {
        stage.bench.pool(&["a"], 8).await;
        if !is_direct(&stage) {
            return;
        }
        stage.kernel.slow.store(true, Ordering::Relaxed);
        let swap = stage.create("s", 3).await.unwrap();
        assert_eq!((swap.state, swap.left), (SwapState::Preparing, Some(Size(2 * MIB))));
        assert!(stage.remove("s").await.unwrap_err().to_string().contains("hob swap off s"));
        let (state, notes) = stage.set("s", false, false).await.unwrap();
        assert_eq!((state, notes.len()), (SwapState::Off, 1));
        stage.kernel.slow.store(false, Ordering::Relaxed);
        assert_eq!(stage.set("s", true, false).await.unwrap().0, SwapState::On);
        stage.kernel.slow.store(true, Ordering::Relaxed);
        *stage.kernel.used.lock().unwrap() = 2 * MIB;
        assert_eq!(stage.set("s", false, false).await.unwrap().0, SwapState::TurningOff);
        assert_eq!(stage.show("s").await.left, Some(Size(2 * MIB)));
        assert!(stage.remove("s").await.unwrap_err().to_string().contains("being turned off"));
        assert_eq!(stage.set("s", false, false).await.unwrap().1, ["the area is already being turned off"]);
        let (state, notes) = stage.set("s", true, false).await.unwrap();
        assert_eq!((state, notes.len()), (SwapState::On, 1));
        assert!(stage.show("s").await.at_start && stage.show("s").await.reason.is_none());
        stage.set("s", false, false).await.unwrap();
        stage.kernel.slow.store(false, Ordering::Relaxed);
        stage.wait_for("s", SwapState::Off).await;
        assert!(!stage.show("s").await.at_start);
    });
}

#[test]
fn an_area_is_not_turned_off_into_memory_that_is_not_there() {
    play(async |stage| {
        stage.bench.pool(&["a"], 8).await;
        if !is_direct(&stage) {
            return;
        }
        stage.create("s", 4).await.unwrap();
        *stage.kernel.used.lock().unwrap() = 3 * MIB;
        // 20 MiB are used, and 1 MiB of the free swap space is the area's own.
        let memory = |available, swap_free| Memory { total: 1000 * MIB, available, swap_free };
        for (memory, room) in [
            (memory(22 * MIB, MIB), "only 2 MiB free"),
            (memory(19 * MIB, 3 * MIB), "only 2 MiB free"),
            (memory(0, 0), "only 0 B free"),
        ] {
            *stage.kernel.memory.lock().unwrap() = memory;
            let said = stage.set("s", false, false).await.unwrap_err().to_string();
            assert!(said.contains("3 MiB are swapped out to s") && said.contains(room), "{said}");
            assert!(said.contains("--force"), "{said}");
        }
        assert_eq!(stage.show("s").await.state, SwapState::On);
        assert_eq!(stage.set("s", false, true).await.unwrap().0, SwapState::Off);
        stage.set("s", true, false).await.unwrap();
        *stage.kernel.memory.lock().unwrap() = memory(22 * MIB, 2 * MIB);
        assert_eq!(stage.set("s", false, false).await.unwrap().0, SwapState::Off);
    });
}

/// The device of a swap area fails and returns. Meanwhile the area is offline, and then hob turns
/// it on again.
#[test]
fn an_area_waits_for_its_device() {
    play(async |stage| {
        stage.bench.pool(&["a"], 8).await;
        if !is_direct(&stage) {
            return;
        }
        stage.create("s", 3).await.unwrap();
        let (here, away) = (stage.bench.path("a"), stage.bench.path("away"));
        std::fs::rename(&here, &away).unwrap();
        stage.kernel.on.lock().unwrap().clear();
        let stage = stage.restart().await;
        let swap = stage.show("s").await;
        assert_eq!((swap.state, swap.at_start), (SwapState::Unavailable, true));
        assert!(swap.reason.unwrap().contains("hob pool show p"));
        let problems = stage.bench.services.observe.problems(&[true]);
        assert!(problems.iter().any(|found| found.kind == ProblemKind::SwapOff && found.subject == "s"));
        let refused = stage.set("s", true, false).await.unwrap_err().to_string();
        assert!(refused.contains("hob pool show p"), "{refused}");
        let refused =
            stage.bench.services.pools.device_remove("p".into(), here.clone()).await.unwrap_err().to_string();
        assert!(refused.contains("has a swap area of the host"), "{refused}");
        std::fs::rename(&away, &here).unwrap();
        stage.kernel.bad_ground.store(true, Ordering::Relaxed);
        stage.bench.services.pools.retry_devices("p").await;
        stage.wait_for("s", SwapState::Off).await;
        while stage.show("s").await.state != SwapState::Off || stage.bench.services.swap.missing().is_empty()
        {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let problems = stage.bench.services.observe.problems(&[true]);
        assert!(problems.len() == 1 && problems[0].reason.contains("lies on sand"), "{problems:?}");
        stage.kernel.bad_ground.store(false, Ordering::Relaxed);
        stage.set("s", true, false).await.unwrap();
        assert!(stage.bench.services.observe.problems(&[true]).is_empty());
        assert_eq!(stage.bench.free(), 5);
    });
}
