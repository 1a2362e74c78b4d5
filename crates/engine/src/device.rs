//! Health of the flash devices: errors lead to a fence, silence to a stall.

use std::collections::VecDeque;

use crate::units::{DeviceId, Instant, IoId};

/// What one device did lately.
#[derive(Debug, Default)]
pub(crate) struct Device {
    errors: u32,
    last_error: Instant,
    fenced: bool,
    stalled: bool,
    /// I/Os in order of issue, with those that completed still among them until they reach the front.
    outstanding: VecDeque<(IoId, u64, Instant)>,
}

/// What changed with an observation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    None,
    Fenced(u32),
    Stalled,
    Resumed,
}

/// Limits of one device's health.
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

    /// An I/O was issued. `serial` tells it from earlier I/Os that had the same id.
    pub(crate) fn issued(&mut self, id: IoId, serial: u64, now: Instant) {
        self.outstanding.push_back((id, serial, now));
    }

    /// Counts a failed I/O. Errors are forgiven after a while without any.
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

    /// Whoever knows says that nothing is to be had of it any more.
    pub(crate) fn give_up(&mut self) -> Change {
        if std::mem::replace(&mut self.fenced, true) { Change::None } else { Change::Fenced(self.errors) }
    }

    /// Looks whether the oldest I/O is overdue. `is_outstanding` tells which have not completed.
    pub(crate) fn check(
        &mut self,
        now: Instant,
        health: &Health,
        is_outstanding: impl Fn(IoId, u64) -> bool,
    ) -> Change {
        while self.outstanding.front().is_some_and(|(id, serial, _)| !is_outstanding(*id, *serial)) {
            self.outstanding.pop_front();
        }
        let overdue = self.outstanding.front().is_some_and(|(.., at)| now - *at >= health.stall_ns_max);
        match (self.stalled, overdue) {
            (false, true) => {
                self.stalled = true;
                Change::Stalled
            }
            (true, false) => {
                self.stalled = false;
                Change::Resumed
            }
            _ => Change::None,
        }
    }

    /// When to look next.
    pub(crate) fn deadline(&self, health: &Health) -> Option<Instant> {
        let (.., at) = self.outstanding.front()?;
        (!self.stalled).then(|| *at + health.stall_ns_max)
    }
}

/// Ids are small numbers that the caller chose; devices are found by index.
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
