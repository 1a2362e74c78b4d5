//! Injects the faults of a round. This file has the faults of the daemon, flash and caches;
//! `backings.rs` has the faults of backings.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use super::Round;
use crate::behaviour::Failing;
use crate::config::{CACHE, STATE_BYTES};
use crate::daemon::Upgrade;
use crate::disk::Backing;
use crate::files::Files;
use crate::setup::{Change, Fault};

/// Maximum time for which changes wait for a new journal.
const JOURNAL_WAIT_MAX: Duration = Duration::from_secs(30);

impl Round<'_> {
    pub(super) fn inject(&mut self, fault: &Fault) -> bool {
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

    fn remove_flash(&self, device: usize) -> bool {
        let path = self.dir.join(format!("flash/flash{device}")).display().to_string();
        let removed = self.command(&["pool", "remove-device", "pool", &path]);
        std::thread::sleep(Duration::from_millis(300));
        let size = self.plan.pool_device();
        removed && self.command(&["pool", "add-device", "pool", &path, "--size", size, "--force"])
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
}
