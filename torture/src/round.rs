//! Runs one round of the test: a daemon with random disks, guests, faults, and a final check of the
//! backings.

mod backings;
mod end;
mod injection;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;
use conformance::Unmount;
use conformance::data::Noise;

use crate::config;
use crate::daemon::{Daemon, TimedOut};
use crate::disk::{Backing, Disk};
use crate::files::Files;
use crate::guest::{Guest, Habits, Shared};
use crate::journal::Journal;
use crate::lateness::TimeLimit;
use crate::link::Endpoint;
use crate::medium::Sabotage;
use crate::model::Model;
use crate::report::Totals;
use crate::setup::{BackingKind, DISK_BYTES, Plan};
use crate::stamp::{Origin, UNIT};

/// Maximum time until the daemon, on a busy host, has noticed that a backing has lost data.
const LOSS_NOTICED_MAX: Duration = Duration::from_secs(5);

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
}
