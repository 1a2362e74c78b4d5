//! Memory that outlives a killed engine process: the crash logs of journals.
//!
//! In most histories each disk has a crash log, and a killed process then loses no acknowledged
//! write. A power failure empties the crash log. The other histories have no crash logs, and show
//! that hob works without them.

#![allow(clippy::disallowed_types, reason = "engine and simulation share the memory in one thread")]

use std::sync::{Arc, Mutex};

use hob_engine::journal::{CRASH_LOG_BYTES, Plan, SurvivingMemory};
use hob_engine::units::DiskId;

use super::scenario::End;
use super::{Sabotage, Simulation};
use crate::rng::SimRng;
use crate::{Violation, ensure};

/// Number that is combined with the seed of a history, to choose whether the history has crash
/// logs.
const SALT: u64 = 0x6372_6173_686c;

/// The crash log of one disk.
#[derive(Clone, Debug)]
pub(super) struct CrashLog {
    bytes: Arc<Mutex<Vec<u8>>>,
    /// True if the present engine process writes the log.
    is_used: bool,
    /// Number of the first journal ring for which the engine got the log since the last power
    /// failure.
    first_ring: Option<u32>,
    /// True if a recovery used records that only the log has. A power failure loses these records.
    is_relied_on: bool,
}

#[derive(Debug)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl SurvivingMemory for Memory {
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.0.lock().expect("no thread panics")[offset..][..bytes.len()].copy_from_slice(bytes);
    }
}

impl CrashLog {
    /// Returns an empty crash log for a disk, if disks in the history of this seed have crash logs.
    fn of(seed: u64) -> Option<CrashLog> {
        let bytes = Arc::new(Mutex::new(vec![0; CRASH_LOG_BYTES]));
        let log = CrashLog { bytes, is_used: false, first_ring: None, is_relied_on: false };
        SimRng::new(seed ^ SALT).chance(750).then_some(log)
    }

    /// Models the end of an engine process. Returns true if the log saves all acknowledged writes.
    /// A power failure empties the log.
    pub(super) fn crash(&mut self, end: End) -> bool {
        if end == End::PowerCut {
            self.bytes.lock().expect("no thread panics").fill(0);
            self.first_ring = None;
        }
        self.is_relied_on = false;
        std::mem::take(&mut self.is_used) && end != End::PowerCut
    }
}

impl Simulation<'_> {
    /// Gives the disks crash logs, if the history of this seed has them.
    pub(super) fn draw_crash_logs(&mut self, seed: u64) {
        // A crash log may have the only record that a sector is clean. A power cut empties the log, so a
        // flush of flash before the recovery does not keep that record.
        let has_logs = !self.options.cuts_in_recovery;
        for disk in &mut self.disks {
            disk.crash_log = CrashLog::of(seed).filter(|_| has_logs);
        }
    }

    /// Gives the engine the memory of a disk's crash log.
    pub(super) fn give_crash_log(&mut self, disk: usize, ring: u32) {
        if let Some(log) = &mut self.disks[disk].crash_log {
            log.first_ring.get_or_insert(ring);
            let memory = Memory(log.bytes.clone());
            log.is_used = self.engine.keep_records(DiskId(disk as u32), Box::new(memory));
        }
    }

    /// Adds the records of a disk's crash log to the recovered journal.
    pub(super) fn continue_with_log(&mut self, disk: usize, plan: &mut Plan) {
        if self.options.sabotage == Some(Sabotage::IgnoredCrashLog) {
            return;
        }
        if let Some(log) = &mut self.disks[disk].crash_log {
            plan.continue_with(&log.bytes.lock().expect("no thread panics"));
            log.is_relied_on |= plan.relies_on_crash_log();
        }
    }

    /// Returns true if the present recovery of the disk's cache relies on its crash log.
    pub(super) fn relies_on_crash_log(&self, disk: usize) -> bool {
        self.disks[disk].crash_log.as_ref().is_some_and(|log| log.is_relied_on)
    }

    /// Checks that the crash log belongs to the recovered journal ring, if the engine used the log
    /// for this ring. If the log did not belong to this ring, the daemon would report a loss that
    /// did not happen.
    pub(super) fn check_crash_log(&self, disk: usize, plan: &Plan) -> Result<(), Violation> {
        let first = self.disks[disk].crash_log.as_ref().and_then(|log| log.first_ring);
        let is_expected = first.is_some_and(|first| first <= plan.ring) && !plan.clean;
        let is_read = self.options.sabotage != Some(Sabotage::IgnoredCrashLog);
        ensure!(
            plan.is_logged || !is_expected || !is_read,
            "disk {disk}: the crash log does not belong to ring {}",
            plan.ring
        );
        Ok(())
    }
}
