//! Injects the faults of backings, and records in the models of guests which data a fault may lose.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use conformance::nbd_client::{Address, CMD_FLUSH, Client};
use rustix::process::Pid;
use serde_json::json;

use super::{LOSS_NOTICED_MAX, Round};
use crate::behaviour::{Behaviour, Failing};
use crate::disk::{self, Backing};
use crate::lateness::TimeLimit;
use crate::server::Server;
use crate::setup::{DISK_BYTES, Fault};
use crate::stamp::UNIT;

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

impl Round<'_> {
    pub(super) fn trouble_backing(&mut self, fault: &Fault) {
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

    /// Sends many requests from many clients to a disk whose backing hangs. During this time the
    /// daemon must serve the guests of other disks.
    pub(super) fn flood(&self, disk: usize) {
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

    /// Detaches the loop device of a backing while the daemon uses it. The kernel removes the device
    /// when the killed daemon has closed it, and the next daemon does not find it for a while.
    pub(super) fn detach_loop(&mut self, disk: usize, away: Duration) -> bool {
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

    /// Makes a backing lose the data in its volatile write cache.
    pub(super) fn crash(&mut self, disk: usize, away: Duration) {
        self.with_server(disk, away, |server| {
            let lost = self.lose(disk, || server.crash(away));
            self.run.journal.line("lost", json!({ "disk": disk, "units": lost }));
        });
    }

    /// Kills the `qemu-nbd` of an image, which loses unflushed data. The daemon must start another
    /// one and report the loss.
    pub(super) fn kill_image_server(&mut self, disk: usize) -> bool {
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
    pub(super) fn change(&mut self, disk: usize) {
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
}
