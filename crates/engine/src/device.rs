//! Health of flash devices. After too many errors the engine fences a device, which means that it
//! stops using the device. While an I/O is overdue the device is stalled, and requests bypass the
//! device.
//!
//! The time limit of a stall adapts to the device. A *pause* is the time from the issue of an
//! overdue I/O to its completion. A pause of at most [`PAUSE_LIMITS_MAX`] times the configured
//! limit counts as normal latency of that device. For the next [`PAUSE_REMEMBERED_NS`], the time
//! limit is twice the length of this pause, but at most [`PAUSE_LIMITS_MAX`] times the configured
//! limit. A longer pause is a hang, and does not change the time limit.

use std::collections::VecDeque;

use crate::units::{DeviceId, Instant, IoId};

/// Longest pause that raises the time limit of its device, and the highest raised limit: multiples
/// of the configured limit.
const PAUSE_LIMITS_MAX: u64 = 4;
/// Time for which a pause raises the limit, nanoseconds.
const PAUSE_REMEMBERED_NS: u64 = 600_000_000_000;

/// Recent I/O of one device.
#[derive(Debug, Default)]
pub(crate) struct Device {
    errors: u32,
    last_error: Instant,
    fenced: bool,
    stalled: bool,
    /// Issue time of the I/O that last stalled the device.
    stalled_at: Instant,
    /// Length of the longest recent pause (from the issue of an overdue I/O to its completion), and
    /// the time of the end of this pause.
    pause_ns: u64,
    pause_ended: Instant,
    /// I/Os in order of issue. A completed I/O stays in the list until it is the first one.
    outstanding: VecDeque<(IoId, u64, Instant)>,
}

/// Effect of an observation (a failed I/O, an overdue I/O or its end) on a device's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    None,
    Fenced(u32),
    Stalled,
    Resumed,
}

/// Limits for the health checks of one flash device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Health {
    pub(crate) errors_max: u32,
    pub(crate) forgive_ns: u64,
    pub(crate) stall_ns_max: u64,
}

impl Device {
    pub(crate) fn is_fenced(&self) -> bool {
        self.fenced
    }

    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Records that an I/O was issued. `serial` distinguishes the I/O from earlier I/Os with the
    /// same id.
    pub(crate) fn issued(&mut self, id: IoId, serial: u64, now: Instant) {
        self.outstanding.push_back((id, serial, now));
    }

    /// Counts a failed I/O. Earlier errors no longer count after `forgive_ns` without an error.
    pub(crate) fn failed(&mut self, now: Instant, health: &Health) -> Change {
        if now - self.last_error > health.forgive_ns {
            self.errors = 0;
        }
        self.last_error = now;
        self.errors += 1;
        if self.errors < health.errors_max || self.fenced {
            return Change::None;
        }
        self.fenced = true;
        Change::Fenced(self.errors)
    }

    /// Fences a device that the daemon reported as unusable.
    pub(crate) fn give_up(&mut self) -> Change {
        if std::mem::replace(&mut self.fenced, true) { Change::None } else { Change::Fenced(self.errors) }
    }

    /// Checks whether the oldest I/O of the device is overdue. `is_outstanding` returns true for an
    /// I/O in flight.
    pub(crate) fn check(
        &mut self,
        now: Instant,
        health: &Health,
        is_outstanding: impl Fn(IoId, u64) -> bool,
    ) -> Change {
        while self.outstanding.front().is_some_and(|(id, serial, _)| !is_outstanding(*id, *serial)) {
            self.outstanding.pop_front();
        }
        let oldest = self.outstanding.front().map(|(.., at)| *at);
        let overdue = oldest.filter(|at| now - *at >= self.stall_ns(*at, health));
        match (self.stalled, overdue) {
            (false, Some(at)) => {
                (self.stalled, self.stalled_at) = (true, at);
                Change::Stalled
            }
            (true, None) => {
                self.stalled = false;
                self.note_pause(now, health);
                Change::Resumed
            }
            _ => Change::None,
        }
    }

    /// Returns the time limit of an I/O that was issued at `at`, nanoseconds.
    fn stall_ns(&self, at: Instant, health: &Health) -> u64 {
        let is_recent = self.pause_ns > 0 && at - self.pause_ended < PAUSE_REMEMBERED_NS;
        let raised = if is_recent { 2 * self.pause_ns } else { 0 };
        raised.clamp(health.stall_ns_max, PAUSE_LIMITS_MAX * health.stall_ns_max)
    }

    fn note_pause(&mut self, now: Instant, health: &Health) {
        let length = now - self.stalled_at;
        if length <= PAUSE_LIMITS_MAX * health.stall_ns_max {
            let before = if now - self.pause_ended < PAUSE_REMEMBERED_NS { self.pause_ns } else { 0 };
            (self.pause_ns, self.pause_ended) = (before.max(length), now);
        }
    }

    /// Returns the time of the next check for an overdue I/O.
    pub(crate) fn deadline(&self, health: &Health) -> Option<Instant> {
        let (.., at) = self.outstanding.front()?;
        (!self.stalled).then(|| *at + self.stall_ns(*at, health))
    }
}

/// All flash devices, indexed by id.
#[derive(Debug, Default)]
pub(crate) struct Devices(Vec<Device>);

impl Devices {
    pub(crate) fn get(&mut self, id: DeviceId) -> &mut Device {
        let index = usize::from(id.0);
        if index >= self.0.len() {
            self.0.resize_with(index + 1, Device::default);
        }
        &mut self.0[index]
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (DeviceId, &mut Device)> {
        self.0.iter_mut().enumerate().map(|(i, device)| (DeviceId(i as u16), device))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Device> {
        self.0.iter()
    }
}
