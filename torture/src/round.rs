//! Runs one round of the test: a daemon with random disks, guests, faults, and a final check of the
//! backings.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;
use conformance::Unmount;
use conformance::data::Noise;
use conformance::nbd_client::{Address, CMD_FLUSH, Client};
use rustix::process::{Pid, Signal};
use serde_json::json;

use crate::behaviour::{Behaviour, Failing};
use crate::config::{self, CACHE, STATE_BYTES};
use crate::daemon::{Daemon, TimedOut, Upgrade};
use crate::disk::{self, Backing, Disk};
use crate::files::Files;
use crate::guest::{Guest, Habits, Shared};
use crate::journal::Journal;
use crate::lateness::TimeLimit;
use crate::link::Endpoint;
use crate::medium::Sabotage;
use crate::model::Model;
use crate::report::Totals;
use crate::server::Server;
use crate::setup::{BackingKind, Change, DISK_BYTES, Fault, Plan};
use crate::stamp::{Origin, UNIT};

/// Maximum time for guests to finish without faults.
const FINISH_MAX: Duration = Duration::from_secs(240);

/// Maximum time until the daemon, on a busy host, has noticed that a backing has lost data.
const LOSS_NOTICED_MAX: Duration = Duration::from_secs(5);

/// Maximum time for which changes wait for a new journal.
const JOURNAL_WAIT_MAX: Duration = Duration::from_secs(30);

/// Maximum time until the daemon has started another `qemu-nbd` in place of a killed one.
const IMAGE_SERVER_MAX: Duration = Duration::from_secs(10);
/// Time after the end of a pause of the daemon from which the daemon knows that no other program has
/// changed the image of a killed `qemu-nbd`. The daemon needs two seconds.
const PAUSE_OVER: Duration = Duration::from_secs(3);
/// Shortest pause of the daemon after which it cannot know that.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Text in the daemon's log when the daemon stops using an image, because another program may have
/// changed the image while no `qemu-nbd` ran.
const IMAGE_LOST_LINE: &str = "the image is not used any more";

/// Duration of a request flood.
const FLOOD: Duration = Duration::from_secs(8);
/// Number of clients that send requests in a request flood.
const FLOOD_CLIENTS: usize = 32;
/// Maximum number of requests that each client sends in a request flood.
const FLOOD_REQUESTS: usize = 1000;

/// State that all rounds of a run share.
#[derive(Debug)]
pub struct Run {
    /// Path of the hob binary under test.
    pub hob: PathBuf,
    /// Log and violations of the run.
    pub journal: Arc<Journal>,
    /// True after the user has interrupted the run.
    pub interrupted: Arc<AtomicBool>,
    /// Defect of the media, to show that the checks notice a violation.
    pub sabotage: Option<Sabotage>,
    /// Time at which the run ends. No fault is injected after this time.
    pub end: Instant,
}

/// A round; see the module documentation.
struct Round<'a> {
    run: &'a Run,
    plan: &'a Plan,
    dir: PathBuf,
    daemon: Daemon,
    disks: Vec<Disk>,
    threads: Vec<JoinHandle<()>>,
    /// Number of times that the daemon was started. Guests use this number to record to which of
    /// the daemon's processes they are connected.
    life: Arc<AtomicU64>,
    /// End of the last pause of the daemon by SIGSTOP.
    paused_until: Option<Instant>,
    noise: Noise,
    /// The test file system with the pool's device files; `None` if the pool uses other files.
    flash: Option<Files>,
    /// Mount of the daemon's state directory.
    _state: Unmount,
}

/// Runs a round in the empty directory `dir`. Violations go to the journal.
///
/// # Errors
/// Returns errors of the test environment. Errors of hob are violations and not returned.
pub fn run(run: &Run, plan: &Plan, dir: &Path, totals: &mut Totals) -> Result<()> {
    let mut round = Round::prepare(run, plan, dir)?;
    let result = round.live(totals);
    round.disks.iter().flat_map(|disk| &disk.guests).for_each(|guest| guest.abandon());
    round.daemon.kill();
    for thread in std::mem::take(&mut round.threads) {
        let _ = thread.join();
    }
    for disk in &round.disks {
        disk.guests.iter().for_each(|guest| totals.add(&guest.counts));
    }
    result
}

impl<'a> Round<'a> {
    fn prepare(run: &'a Run, plan: &'a Plan, dir: &Path) -> Result<Self> {
        let mut disks = Vec::new();
        for (at, disk) in plan.disks.iter().enumerate() {
            let backing = Backing::create(plan, at, dir, run.sabotage)?;
            let units = DISK_BYTES / UNIT as u64 / disk.guests;
            let origin = Origin { run: plan.seed, disk: at as u64 };
            let guests = (0..disk.guests).map(|number| {
                Shared::new(format!("d{at}.{number}"), Model::new(origin, number * units, units))
            });
            let guests: Vec<Arc<Shared>> = guests.collect();
            if let Some(behaviour) = backing.behaviour() {
                run.journal.watch(&format!("backing of d{at}"), behaviour.lateness());
                let concerned = guests.clone();
                behaviour.on_loss(Box::new(move || {
                    concerned.iter().for_each(|guest| guest.model().loss(Instant::now() + LOSS_NOTICED_MAX))
                }));
            }
            disks.push(Disk { name: format!("d{at}"), backing, guests });
        }
        let daemon = Daemon::new(&run.hob, dir);
        let state = config::mount_state(&dir.join("state"))?;
        let flash =
            plan.volatile_pool.then(|| Files::mount(&dir.join("flash"), plan.seed ^ 0xf1a5)).transpose()?;
        std::fs::create_dir_all(dir.join("flash"))?;
        std::fs::write(dir.join("hob.toml"), config::text(plan, dir, &daemon, &disks))?;
        let (life, noise) = (Arc::new(AtomicU64::new(0)), Noise::new(plan.seed ^ 0xfa17));
        Ok(Self {
            run,
            plan,
            dir: dir.to_owned(),
            daemon,
            disks,
            threads: Vec::new(),
            life,
            paused_until: None,
            noise,
            flash,
            _state: state,
        })
    }

    fn live(&mut self, totals: &mut Totals) -> Result<()> {
        if !self.start_daemon() {
            return Ok(());
        }
        // The daemon has created the files of the pool.
        for file in self.flash.iter().flat_map(Files::all) {
            self.run.journal.watch(file.name(), file.behaviour().lateness());
        }
        self.start_guests();
        let begin = Instant::now();
        let plan = self.plan;
        for (pause, fault) in &plan.faults {
            if !self.sleep(*pause) {
                return Ok(());
            }
            totals.fault(fault.name());
            self.run.journal.fault(&format!("{fault:?}"));
            if !self.inject(fault) {
                return Ok(());
            }
            if begin.elapsed() > plan.load * 2 || Instant::now() > self.run.end {
                // The time for faults is over.
                break;
            }
        }
        self.finish();
        Ok(())
    }

    fn start_daemon(&mut self) -> bool {
        self.life.fetch_add(1, Ordering::Relaxed);
        match self.daemon.start() {
            Ok(()) => true,
            Err(error) => self.failed("start", &error),
        }
    }

    /// Reports an error of the daemon. Returns false, because the round must end.
    fn failed(&self, kind: &'static str, error: &anyhow::Error) -> bool {
        let what = format!("{error:#}");
        match error.downcast_ref::<TimedOut>() {
            Some(timed_out) => self.late(kind, &what, timed_out.checked),
            None => self.broken(kind, &what),
        }
    }

    /// Reports that the daemon exceeded a time limit. Returns false, because the round must end.
    fn late(&self, kind: &'static str, what: &str, checked: TimeLimit) -> bool {
        self.run.journal.timeout(kind, "hob", what, self.daemon.log_tail(12), checked);
        false
    }

    /// Reports a violation that was noticed at the daemon and not by a guest. Returns false,
    /// because the round must end.
    fn broken(&self, kind: &'static str, what: &str) -> bool {
        self.run.journal.violation(kind, "hob", what, self.daemon.log_tail(12));
        false
    }

    fn start_guests(&mut self) {
        for (at, disk) in self.disks.iter().enumerate() {
            for (number, guest) in disk.guests.iter().enumerate() {
                let vhost_user = self.plan.disks[at].vhost_user && number == 0;
                let endpoint = match vhost_user {
                    true => Endpoint::VhostUser { socket: self.dir.join(format!("vhost{at}.sock")) },
                    false => Endpoint::Nbd { socket: self.daemon.nbd_socket(), export: disk.name.clone() },
                };
                let habits = Habits {
                    flush_once_in: [6, 20, 60, 300][self.noise.below(4) as usize],
                    fua_of_ten: [0, 1, 3][self.noise.below(3) as usize] * u64::from(!vhost_user),
                    reads_of_ten: [3, 3, 6, 9][self.noise.below(4) as usize],
                    pause_us_max: [500, 4_000, 12_000][self.noise.below(3) as usize],
                    headers: self.plan.headers
                        && !matches!(self.plan.disks[at].backing, BackingKind::VolatileNbd { .. }),
                    shares_disk: disk.guests.len() > 1,
                    // The daemon waits for ever for files.
                    backing_timeout: matches!(disk.backing, Backing::Server(_) | Backing::Image(_))
                        .then_some(Duration::from_millis(self.plan.backing_wait_ms)),
                };
                let (journal, life) = (Arc::clone(&self.run.journal), Arc::clone(&self.life));
                let seed = self.noise.next_u64();
                let guest = Guest::new(Arc::clone(guest), endpoint, journal, life, seed, habits);
                let thread = std::thread::Builder::new().name("guest".to_owned());
                self.threads.push(thread.spawn(move || guest.live()).expect("start a thread"));
            }
        }
    }

    /// Sleeps for this time. Returns false if the user interrupted the run, or if the daemon ended.
    fn sleep(&mut self, time: Duration) -> bool {
        let until = Instant::now() + time;
        loop {
            if self.run.interrupted.load(Ordering::Relaxed) {
                return false;
            }
            match self.daemon.ended() {
                Ok(None) => {}
                Ok(Some(status)) => return self.broken("ended", &format!("hob ended by itself: {status}")),
                Err(error) => return self.broken("ended", &format!("{error:#}")),
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(Duration::from_millis(50)));
        }
    }

    fn guests(&self) -> impl Iterator<Item = &Arc<Shared>> {
        self.disks.iter().flat_map(|disk| &disk.guests)
    }

    fn inject(&mut self, fault: &Fault) -> bool {
        match *fault {
            Fault::Kill { down } => {
                self.kill_daemon();
                std::thread::sleep(down);
                self.start_daemon()
            }
            Fault::KillTwice { after } => {
                self.kill_daemon();
                if let Err(error) = self.daemon.launch() {
                    return self.broken("start", &format!("{error:#}"));
                }
                std::thread::sleep(after);
                self.kill_daemon();
                self.start_daemon()
            }
            Fault::Restart => self.stop_daemon() && self.start_daemon(),
            Fault::Stop { time } => {
                self.guests().for_each(|guest| guest.excuse(time));
                self.daemon.signal(Signal::STOP);
                std::thread::sleep(time);
                self.daemon.signal(Signal::CONT);
                self.paused_until = Some(Instant::now());
                true
            }
            Fault::Upgrade => match self.daemon.upgrade() {
                Ok(Upgrade::Done) => true,
                Ok(Upgrade::Refused(why)) => {
                    self.run.journal.line("upgrade-refused", json!({ "why": why }));
                    true
                }
                Err(error) => self.failed("upgrade", &error),
            },
            Fault::KillAndCrash { disk } => {
                self.kill_daemon();
                self.crash(disk, Duration::ZERO);
                self.start_daemon()
            }
            Fault::ChangeOffline { disk, kill } => {
                if kill {
                    self.kill_daemon();
                } else if !self.stop_daemon() {
                    return false;
                }
                self.change(disk);
                self.start_daemon()
            }
            Fault::PowerCut => {
                self.cut_power();
                self.start_daemon()
            }
            Fault::MemoryLimit { headroom_kib, time } => self.limit_memory(headroom_kib, time),
            Fault::Interruptions => {
                for _ in 0..100 {
                    self.daemon.signal(Signal::STOP);
                    self.daemon.signal(Signal::CONT);
                    std::thread::sleep(Duration::from_millis(1));
                }
                true
            }
            Fault::FlashSlow { .. } | Fault::FlashHang { .. } | Fault::FlashErrors { .. } => {
                self.trouble_flash(fault);
                true
            }
            Fault::StateFull { time, kill } => self.fill_state(time, kill),
            Fault::LoopDetached { disk, away } => self.detach_loop(disk, away),
            Fault::Flood { disk } => {
                self.flood(disk);
                true
            }
            Fault::FlashRemoved { device } => self.remove_flash(device),
            Fault::KillImageServer { disk } => self.kill_image_server(disk),
            Fault::Change { disk, change } => self.change_cache(disk, change),
            _ => {
                self.trouble_backing(fault);
                true
            }
        }
    }

    /// Sends many requests from many clients to a disk whose backing hangs. During this time the
    /// daemon must serve the guests of other disks.
    fn flood(&self, disk: usize) {
        self.with_behaviour(disk, FLOOD, |it| it.hang(FLOOD));
        let address = Address::Unix(self.daemon.nbd_socket());
        let connect = |_| Client::connect(&address, &self.disks[disk].name).ok();
        let mut clients: Vec<Client> = (0..FLOOD_CLIENTS).filter_map(connect).collect();
        for client in &mut clients {
            // Requests that do not fit into the socket buffer are not sent.
            let _ = (0..FLOOD_REQUESTS).try_for_each(|_| client.send(0, CMD_FLUSH, 0, 0, &[]).map(drop));
        }
        let others = || {
            let others = self.disks.iter().enumerate().filter(|(at, _)| *at != disk);
            others
                .flat_map(|(_, other)| &other.guests)
                .map(|it| (it, it.counts.requests.load(Ordering::Relaxed)))
        };
        std::thread::sleep(FLOOD / 8);
        let before: Vec<_> = others().collect();
        let checked = TimeLimit { since: Instant::now(), limit: FLOOD * 6 / 8 };
        std::thread::sleep(checked.limit);
        for ((guest, before), (_, after)) in before.into_iter().zip(others()) {
            if before == after {
                let what =
                    format!("no request answered for {:?} while the backing of d{disk} hangs", checked.limit);
                let log = self.daemon.log_tail(4);
                self.run.journal.timeout("isolation", &guest.name, &what, log, checked);
            }
        }
    }

    /// Limits the daemon's address space for a while. The daemon may abort, as it does when the
    /// host has no memory left.
    fn limit_memory(&mut self, headroom_kib: u64, time: Duration) -> bool {
        self.guests().for_each(|guest| guest.excuse(time));
        self.daemon.limit_memory(Some(headroom_kib << 10));
        let until = Instant::now() + time;
        while Instant::now() < until && matches!(self.daemon.ended(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.daemon.limit_memory(None);
        if matches!(self.daemon.ended(), Ok(None)) {
            return true;
        }
        self.run.journal.line("aborted", json!({ "log": self.daemon.log_tail(4) }));
        self.kill_daemon();
        self.start_daemon()
    }

    fn trouble_flash(&self, fault: &Fault) {
        let Some(files) = self.flash.as_ref().map(Files::all) else { return };
        match *fault {
            Fault::FlashSlow { device, delay, time } => {
                files.get(device).inspect(|file| file.behaviour().slow(delay, time));
            }
            Fault::FlashHang { device, time } => {
                files.get(device).inspect(|file| file.behaviour().hang(time));
            }
            Fault::FlashErrors { device, operation, error, time } => {
                // Changes wait for a new journal, half a minute at most.
                self.guests().for_each(|guest| guest.excuse(time + JOURNAL_WAIT_MAX));
                let failing = Failing { operation, range: 0..u64::MAX, error, until: Instant::now() + time };
                files.get(device).inspect(|file| file.behaviour().fail(failing));
            }
            _ => unreachable!("not a fault of flash"),
        }
    }

    /// Fills the file system of the state directory for a while. A daemon that starts while the
    /// file system is full serves no disk whose cache needs a new journal.
    fn fill_state(&mut self, time: Duration, kill: bool) -> bool {
        self.guests().for_each(|guest| guest.excuse(time));
        let filler = self.dir.join("state/filler");
        // The write fails when the file system is full.
        let _ = std::fs::write(&filler, vec![0; 2 * STATE_BYTES as usize]);
        let goes_on = if kill {
            self.kill_daemon();
            self.start_daemon()
        } else {
            true
        };
        std::thread::sleep(time);
        let removed = std::fs::remove_file(&filler);
        removed.expect("the filler is there");
        goes_on
    }

    /// Detaches the loop device of a backing while the daemon uses it. The kernel removes the device
    /// when the killed daemon has closed it, and the next daemon does not find it for a while.
    fn detach_loop(&mut self, disk: usize, away: Duration) -> bool {
        self.excuse(disk, away);
        let Backing::Volatile(Some(device), ..) = &self.disks[disk].backing else {
            unreachable!("the plan gives this fault to loop devices")
        };
        let free = device.detach();
        self.kill_daemon();
        let goes_on = self.start_daemon();
        std::thread::sleep(away);
        if let Backing::Volatile(Some(device), _, files) = &self.disks[disk].backing {
            device.attach(&files.path("disk"), true, free);
        }
        goes_on
    }

    /// Simulates a power cut of the host: the daemon is killed, and files of the test file system
    /// lose unflushed data.
    fn cut_power(&mut self) {
        self.kill_daemon();
        self.daemon.lose_crash_logs();
        let mut lost = self.flash.as_ref().map_or(0, Files::lose);
        for (disk, plan) in self.disks.iter().zip(&self.plan.disks) {
            if let Backing::Volatile(_, _, files) = &disk.backing {
                lost += files.lose();
            }
            if plan.backing.loses_power() || plan.cache.writes_back {
                disk.guests.iter().for_each(|guest| guest.model().withdraw());
            }
        }
        self.run.journal.line("lost", json!({ "units": lost }));
    }

    /// Runs a `hob` command and logs a refusal. Returns false if the daemon does not answer.
    fn command(&self, args: &[&str]) -> bool {
        match self.daemon.command(args) {
            Ok((success, said)) => {
                let said = if success { "" } else { said.trim() };
                self.run
                    .journal
                    .line("command", json!({ "args": args.join(" "), "success": success, "said": said }));
                true
            }
            Err(error) => self.failed("control", &error),
        }
    }

    fn remove_flash(&self, device: usize) -> bool {
        let path = self.dir.join(format!("flash/flash{device}")).display().to_string();
        let removed = self.command(&["pool", "remove-device", "pool", &path]);
        std::thread::sleep(Duration::from_millis(300));
        let size = self.plan.pool_device();
        removed && self.command(&["pool", "add-device", "pool", &path, "--size", size, "--force"])
    }

    fn change_cache(&self, disk: usize, change: Change) -> bool {
        let (plan, name) = (&self.plan.disks[disk], self.disks[disk].name.as_str());
        match change {
            Change::Resize(mib) => {
                let resized = self.command(&["cache", "resize", name, &format!("{mib}M")]);
                resized && (!plan.shared || self.command(&["cache", "set", name, "--shared"]))
            }
            Change::Clear => self.command(&["cache", "clear", name]),
            Change::Drain => self.command(&["drain", name]),
            Change::Policy(policy) => self.command(&["cache", "set", name, "--policy", policy]),
            Change::BlockSize(size) => self.command(&["cache", "set", name, "--block-size", size]),
            Change::WriteThrough if !plan.cache.writes_back => true,
            Change::WriteThrough => {
                self.command(&["cache", "set", name, "--mode", "write-through"])
                    && self.command(&["cache", "set", name, "--mode", "write-back"])
            }
            Change::Disable => {
                let enable = ["cache", "enable", name, "--pool", "pool"];
                let size: &[&str] = if plan.shared { &[] } else { &["--size", CACHE] };
                let mode = if plan.cache.writes_back { "write-back" } else { "write-through" };
                self.command(&["cache", "disable", name])
                    && self.command(&[&enable[..], size, &["--mode", mode]].concat())
            }
        }
    }

    fn trouble_backing(&mut self, fault: &Fault) {
        match *fault {
            Fault::Crash { disk, away } => self.crash(disk, away),
            Fault::Cut { disk, away } => self.with_server(disk, away, |server| server.cut(away)),
            Fault::ShutDown { disk, refuses, away } => {
                self.with_server(disk, refuses + away, |server| server.shut_down(refuses, away));
            }
            Fault::Hang { disk, time } => self.with_behaviour(disk, time, |it| it.hang(time)),
            Fault::Slow { disk, delay, time } => {
                self.with_behaviour(disk, time + delay, |it| it.slow(delay, time));
            }
            Fault::LosingFlush { disk } => {
                self.with_behaviour(disk, Duration::ZERO, Behaviour::lose_at_flush);
            }
            Fault::Errors { disk, operation, from, sixteenths, error, time } => {
                let piece = DISK_BYTES / 16;
                let range = from * piece..(from + sixteenths) * piece;
                let failing = Failing { operation, range, error, until: Instant::now() + time };
                self.with_behaviour(disk, time, |it| it.fail(failing));
            }
            _ => unreachable!("not a fault of a backing"),
        }
    }

    /// Records that a fault explains errors of the disk's guests during this time.
    fn excuse(&self, disk: usize, time: Duration) {
        // Requests that wait for the backing may fail as late as their timeout after the end of the
        // fault.
        let time = time + Duration::from_millis(self.plan.backing_wait_ms.min(5_000));
        self.disks[disk].guests.iter().for_each(|guest| guest.excuse(time));
    }

    fn with_behaviour(&self, disk: usize, excuse: Duration, act: impl FnOnce(&Behaviour)) {
        self.excuse(disk, excuse);
        act(self.disks[disk].backing.behaviour().expect("the plan gives this fault to no other disk"));
    }

    fn with_server(&self, disk: usize, excuse: Duration, act: impl FnOnce(&Server)) {
        self.excuse(disk, excuse);
        match &self.disks[disk].backing {
            Backing::Server(server) => act(server),
            _ => unreachable!("the plan gives this fault to servers"),
        }
    }

    /// Kills the daemon with SIGKILL. A killed daemon cannot report earlier losses of data that it
    /// has not reported before the kill.
    fn kill_daemon(&mut self) {
        self.guests().for_each(|guest| guest.model().interrupt());
        self.daemon.kill();
        for (disk, plan) in self.disks.iter().zip(&self.plan.disks) {
            for guest in &disk.guests {
                let mut model = guest.model();
                match model.loss_unreported() || plan.backing.ends_with_daemon() {
                    true => model.withdraw(),
                    false => model.interrupt(),
                }
            }
        }
        self.wait_for_disconnects();
    }

    fn stop_daemon(&mut self) -> bool {
        self.guests().for_each(|guest| guest.model().interrupt());
        let stopped = self.daemon.stop();
        self.guests().for_each(|guest| guest.model().interrupt());
        self.wait_for_disconnects();
        match stopped {
            Ok(()) => true,
            Err(error) => self.failed("stop", &error),
        }
    }

    /// Waits until all guests have noticed the end of their connections, at most 10 seconds. After
    /// that, the guests have received every reply that the daemon sent.
    fn wait_for_disconnects(&self) {
        let start = Instant::now();
        let connected = |guest: &Arc<Shared>| guest.connected_to.load(Ordering::Relaxed) != 0;
        while self.guests().any(connected) && start.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Makes a backing lose the data in its volatile write cache.
    fn crash(&mut self, disk: usize, away: Duration) {
        self.with_server(disk, away, |server| {
            let lost = self.lose(disk, || server.crash(away));
            self.run.journal.line("lost", json!({ "disk": disk, "units": lost }));
        });
    }

    /// Kills the `qemu-nbd` of an image, which loses unflushed data. The daemon must start another
    /// one and report the loss.
    fn kill_image_server(&mut self, disk: usize) -> bool {
        let since_pause = self.paused_until.map_or(PAUSE_OVER, |end| end.elapsed());
        if !self.sleep(PAUSE_OVER.saturating_sub(since_pause)) {
            return false;
        }
        let Backing::Image(image) = &self.disks[disk].backing else {
            unreachable!("the plan gives this fault to images")
        };
        let image = image.clone();
        let lost_before = self.daemon.log().matches(IMAGE_LOST_LINE).count();
        let (start, killed) = (Instant::now(), disk::image_servers(&image));
        self.run.journal.line("kill", json!({ "disk": disk, "qemu-nbd": killed.len() }));
        if killed.is_empty() {
            // The disk is offline, for example because an earlier process still locks the image.
            return true;
        }
        self.excuse(disk, IMAGE_SERVER_MAX);
        self.lose(disk, || disk::kill_all(&killed));
        let is_new = |server: &Pid| !killed.contains(server);
        while start.elapsed() < IMAGE_SERVER_MAX && !disk::image_servers(&image).iter().any(is_new) {
            if self.daemon.log().matches(IMAGE_LOST_LINE).count() > lost_before {
                // The daemon is right if the host has paused it.
                let since = start.checked_sub(PAUSE_OVER).unwrap_or(start);
                let what = format!("d{disk}: hob stopped using the image after its qemu-nbd was killed");
                return self.late("image", &what, TimeLimit { since, limit: PAUSE_MIN * 4 });
            }
            if !self.sleep(Duration::from_millis(50)) {
                return false;
            }
        }
        true
    }

    /// Records in the models of a disk's guests that its backing loses unflushed data in `act`. The
    /// daemon cannot report the loss to a guest that is not connected to the current daemon process.
    fn lose<T>(&self, disk: usize, act: impl FnOnce() -> T) -> T {
        let life = self.life.load(Ordering::Relaxed);
        let guests = &self.disks[disk].guests;
        guests.iter().for_each(|guest| guest.model().loss(Instant::now() + LOSS_NOTICED_MAX));
        let result = act();
        for guest in guests {
            guest.model().loss(Instant::now() + LOSS_NOTICED_MAX);
            if guest.connected_to.load(Ordering::Relaxed) != life {
                guest.model().withdraw();
            }
        }
        result
    }

    /// Changes a few small extents of a backing, bypassing hob, while the daemon is down.
    fn change(&mut self, disk: usize) {
        let disk = &self.disks[disk];
        if let Backing::Server(server) = &disk.backing {
            server.cut(Duration::ZERO);
        }
        // The changes are so small that hob's sample of clean sectors does not include them.
        for _ in 0..[1, 1, 2, 4][self.noise.below(4) as usize] {
            let guest = &disk.guests[self.noise.below(disk.guests.len() as u64) as usize];
            let mut model = guest.model();
            let units = [1, 1, 8, 16][self.noise.below(4) as usize];
            let mut tries = (0..20).map(|_| model.first() + self.noise.below(model.len() / 8 - units));
            // The range must have no unanswered write, because the daemon would execute this write
            // again and overwrite the change.
            let Some(first) = tries.find(|first| model.is_answered(*first, units)) else { continue };
            let bytes = model.replace(first, units);
            disk.backing.change(first * UNIT as u64, &bytes);
            let what = format!("{}: units {first}..{} changed", guest.name, first + units);
            self.run.journal.fault(&what);
        }
    }

    /// Ends all faults and checks the result. Guests flush and read everything, dirty data is
    /// destaged, the daemon stops, and the backings are compared.
    fn finish(&mut self) {
        for disk in &self.disks {
            if let Backing::Server(server) = &disk.backing {
                server.heal();
            }
            disk.backing.behaviour().map(Behaviour::heal);
        }
        self.flash.iter().flat_map(Files::all).for_each(|file| file.behaviour().heal());
        self.run.journal.line("finish", json!({}));
        self.guests().for_each(|guest| guest.finish());
        let start = Instant::now();
        while self.threads.iter().any(|thread| !thread.is_finished()) {
            if !self.sleep(Duration::from_millis(20)) {
                return;
            }
            if start.elapsed() > FINISH_MAX {
                let waiting: Vec<&str> = std::iter::zip(self.guests(), &self.threads)
                    .filter(|(_, thread)| !thread.is_finished())
                    .map(|(guest, _)| guest.name.as_str())
                    .collect();
                let what = format!(
                    "not served for {FINISH_MAX:?} although nothing is broken: {}",
                    waiting.join(", ")
                );
                self.late("unavailable", &what, TimeLimit { since: start, limit: FINISH_MAX });
                return;
            }
        }
        if self.drain() && self.stop_daemon() {
            self.check_backings();
        }
    }

    fn drain(&self) -> bool {
        for (disk, plan) in self.disks.iter().zip(&self.plan.disks) {
            if !plan.cache.writes_back {
                continue;
            }
            match self.daemon.command(&["drain", &disk.name]) {
                Ok((true, _)) => {}
                // An earlier fault disabled the cache, and the pool had no space to enable the
                // cache again.
                Ok((false, said)) if said.contains("has no cache") => {}
                Ok((false, said)) => {
                    return self.broken("drain", &format!("{}: drain failed: {}", disk.name, said.trim()));
                }
                Err(error) => return self.failed("drain", &error),
            }
        }
        true
    }

    fn check_backings(&self) {
        for disk in &self.disks {
            let bytes = disk.backing.contents();
            for guest in &disk.guests {
                let mut model = guest.model();
                let (first, units) = (model.first(), model.len());
                let read = model.begin_read(first, units);
                let range = first as usize * UNIT..(first + units) as usize * UNIT;
                let wrong = model.check(read, &bytes[range]).wrong;
                if let Some(one) = wrong.first() {
                    let count = wrong.len();
                    let what = format!("{count} units of the backing after a drain and a clean end: {one}");
                    self.run.journal.violation("backing-contents", &guest.name, &what, Vec::new());
                }
            }
        }
    }
}
