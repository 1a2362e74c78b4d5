//! Ends a round: all faults end, guests and the daemon finish, and the backings are checked.

use std::time::{Duration, Instant};

use serde_json::json;

use super::Round;
use crate::behaviour::Behaviour;
use crate::disk::Backing;
use crate::files::Files;
use crate::lateness::TimeLimit;
use crate::stamp::UNIT;

/// Maximum time for guests to finish without faults.
const FINISH_MAX: Duration = Duration::from_secs(240);

impl Round<'_> {
    /// Ends all faults and checks the result. Guests flush and read everything, dirty data is
    /// destaged, the daemon stops, and the backings are compared.
    pub(super) fn finish(&mut self) {
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
