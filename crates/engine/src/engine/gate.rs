//! Sends I/O to storage, immediately or through the scheduler of its datastore or flash device.
//!
//! Each datastore and each flash device has a gate. The gate is open for a disk while the datastore
//! or device is not throttled and the disk has no rate limit. An I/O at an open gate is sent after
//! one check. At a closed gate, an I/O waits for its turn among the I/Os of all disks (`qos/`). A
//! guest's I/O belongs to its disk's flow. Background I/O of all disks is one flow with
//! [`BACKGROUND_SHARES`]: fills after the reply, extra fills, destaging, cache maintenance, the
//! flushes that belong to this work, and flushes that the daemon requests. Journal I/O bypasses the
//! gates, because guests' flushes wait for journal I/O, and because it is small. The engine treats
//! a waiting I/O as in flight, but the time limit for stalled devices does not include the wait.

use super::disk::Disk;
use super::jobs::JobKind;
use super::{Engine, Owner, Phase};
use crate::io::{Io, Op, Target};
use crate::qos::{
    Control, DiskQos, Entitlement, FlowId, Report, Resource, ResourceState, Scheduler, Window, units,
};
use crate::units::{DiskId, Instant, IoId};

/// Shares of all background work together: as many as those of one disk with low shares. No guest
/// waits for background work.
const BACKGROUND_SHARES: u32 = 500;

const BACKGROUND: FlowId = FlowId(0);

/// The gate of one datastore or flash device.
#[derive(Default)]
struct Gate {
    scheduler: Scheduler<Io>,
    window: Window,
}

/// All gates, indexed by the number of the datastore or flash device.
#[derive(Default)]
pub(super) struct Gates {
    datastores: Vec<Gate>,
    flash: Vec<Gate>,
}

impl Gates {
    fn get(&mut self, resource: Resource) -> &mut Gate {
        let (gates, index) = match resource {
            Resource::Datastore(id) => (&mut self.datastores, usize::from(id.0)),
            Resource::Flash(id) => (&mut self.flash, usize::from(id.0)),
        };
        if gates.len() <= index {
            gates.resize_with(index + 1, Gate::default);
        }
        &mut gates[index]
    }

    fn iter(&self) -> impl Iterator<Item = &Gate> {
        self.datastores.iter().chain(&self.flash)
    }

    /// Returns the next time at which a waiting I/O may be sent.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let waiting = self.iter().filter(|gate| gate.window.has_room());
        waiting.filter_map(|gate| gate.scheduler.next_at()).min()
    }
}

fn flow_of(disk: DiskId) -> FlowId {
    FlowId(disk.0 + 1)
}

impl Engine {
    /// Sets the throttling of a datastore or flash device.
    pub fn control(&mut self, now: Instant, resource: Resource, control: Control) {
        self.gates.get(resource).window.set(now, control);
        self.pump_gate(now, resource);
    }

    /// Returns the window and the queue length of a datastore or flash device.
    pub fn resource(&self, resource: Resource) -> ResourceState {
        let gate = match resource {
            Resource::Datastore(id) => self.gates.datastores.get(usize::from(id.0)),
            Resource::Flash(id) => self.gates.flash.get(usize::from(id.0)),
        };
        let state =
            |gate: &Gate| ResourceState { window: gate.window.state(), waiting: gate.scheduler.len() };
        gate.map_or_else(ResourceState::default, state)
    }

    /// Returns this host's report about a datastore to its peer hosts, for the time since the last
    /// report. `level` is the rate per share (units per second) that the hosts agreed on last, if
    /// there was an agreement. Returns `None` if the datastore is not throttled by latency, or if
    /// too little time has passed.
    pub fn report_on(&mut self, now: Instant, resource: Resource, level: Option<f64>) -> Option<Report> {
        let Gate { scheduler, window } = self.gates.get(resource);
        window.take_report(now, |seconds| scheduler.take_wanted_shares(now, level, seconds))
    }

    /// Sets how many I/Os this host may have in flight at a datastore, as agreed between the hosts.
    /// The number is valid for 5 seconds.
    pub fn take_part(&mut self, now: Instant, resource: Resource, in_flight: f64) {
        self.gates.get(resource).window.settle(now, in_flight);
        self.pump_gate(now, resource);
    }

    /// Sets a disk's shares, limits and reservations.
    pub(super) fn set_qos(&mut self, now: Instant, disk: DiskId, qos: DiskQos) {
        self.disk_mut(disk).qos = qos;
        self.apply_entitlement(now, disk);
    }

    /// Applies a disk's current entitlement to the disk's waiting I/Os.
    pub(super) fn apply_entitlement(&mut self, now: Instant, disk: DiskId) {
        let datastore = self.disk(disk).config.datastore;
        let qos = self.disk(disk).entitlement();
        let flow = flow_of(disk);
        let of_backing = Resource::Datastore(datastore);
        self.gates.get(of_backing).scheduler.set(now, flow, qos.backing);
        self.pump_gate(now, of_backing);
        for index in 0..self.gates.flash.len() {
            self.gates.flash[index].scheduler.set(now, flow, qos.flash);
            self.pump_gate(now, Resource::Flash(crate::units::DeviceId(index as u16)));
        }
    }

    /// Sends an I/O to storage immediately, or queues it in the scheduler of its datastore or flash
    /// device.
    pub(super) fn send_io(&mut self, now: Instant, io: Io) {
        let owner = self.ios[io.id.0].owner;
        if matches!(owner, Owner::Journal(_)) {
            return self.dispatch(now, io);
        }
        let disk = self.ios[io.id.0].disk;
        let resource = self.resource_of(disk, io.target);
        let is_background = self.is_background(owner);
        let qos = self.disk(disk).entitlement();
        let (flow, entitlement) = match (is_background, io.target) {
            (true, _) => (BACKGROUND, Entitlement { shares: BACKGROUND_SHARES, ..Entitlement::default() }),
            (false, Target::Backing(_)) => (flow_of(disk), qos.backing),
            (false, Target::Flash(_)) => (flow_of(disk), qos.flash),
        };
        let unit_bytes = self.limits.qos_unit_bytes;
        let gate = self.gates.get(resource);
        let is_limited = entitlement.limit.is_some() || entitlement.bytes_limit.is_some();
        if !gate.window.is_on() && !is_limited && gate.scheduler.waiting(flow) == 0 {
            return self.dispatch(now, io);
        }
        gate.scheduler.set(now, flow, entitlement);
        gate.scheduler.push(now, flow, units(io.len, unit_bytes), io.len, io);
        self.pump_gate(now, resource);
    }

    /// Removes a completed I/O from the window of its gate, and sends I/Os that wait at that gate.
    pub(super) fn gate_passed(&mut self, now: Instant, io: &super::Pending) {
        if matches!(io.owner, Owner::Journal(_)) {
            return;
        }
        let resource = self.resource_of(io.disk, io.target);
        let unit_bytes = self.limits.qos_unit_bytes;
        let gate = self.gates.get(resource);
        if io.is_counted {
            let waits = !gate.scheduler.is_empty();
            gate.window.ended(now, units(io.bytes, unit_bytes), now - io.issued, waits);
        }
        if !gate.scheduler.is_empty() {
            self.pump_gate(now, resource);
        }
    }

    /// Removes an I/O from its gate's window although the I/O is still in flight.
    pub(super) fn leave_gate(&mut self, now: Instant, id: IoId) {
        let super::Pending { disk, target, is_counted, .. } = &mut self.ios[id.0];
        let (disk, target) = (*disk, *target);
        if std::mem::take(is_counted) {
            let resource = self.resource_of(disk, target);
            self.gates.get(resource).window.left();
            self.pump_gate(now, resource);
        }
    }

    /// Sends the waiting I/Os that may be sent now, at all gates.
    pub(super) fn pump_gates(&mut self, now: Instant) {
        for index in 0..self.gates.datastores.len() {
            self.pump_gate(now, Resource::Datastore(crate::units::DatastoreId(index as u16)));
        }
        for index in 0..self.gates.flash.len() {
            self.pump_gate(now, Resource::Flash(crate::units::DeviceId(index as u16)));
        }
    }

    fn pump_gate(&mut self, now: Instant, resource: Resource) {
        loop {
            let gate = self.gates.get(resource);
            if !gate.window.has_room() {
                return;
            }
            let Some((_, _, io)) = gate.scheduler.pop(now) else { return };
            if gate.window.is_on() {
                gate.window.began();
                self.ios[io.id.0].is_counted = true;
            }
            self.dispatch(now, io);
        }
    }

    fn dispatch(&mut self, now: Instant, io: Io) {
        let pending = &mut self.ios[io.id.0];
        pending.issued = now;
        if let Target::Flash(device) = io.target {
            self.devices.get(device).issued(io.id, pending.serial, now);
        }
        self.io_out.push_back(io);
    }

    fn resource_of(&self, disk: DiskId, target: Target) -> Resource {
        match target {
            Target::Backing(_) => Resource::Datastore(self.disk(disk).config.datastore),
            Target::Flash(device) => Resource::Flash(device),
        }
    }

    /// Returns true if an I/O of background work to the disk's backing would be sent immediately.
    pub(super) fn is_backing_idle(&mut self, disk: DiskId) -> bool {
        let resource = Resource::Datastore(self.disk(disk).config.datastore);
        let gate = self.gates.get(resource);
        match gate.window.is_on() {
            true => gate.window.has_room() && gate.scheduler.is_empty(),
            false => gate.scheduler.waiting(BACKGROUND) == 0,
        }
    }

    /// Returns true if the I/O of this request or job is background work, for which no guest waits.
    fn is_background(&self, owner: Owner) -> bool {
        match owner {
            Owner::Request(slot) => {
                let request = &self.requests[slot];
                request.phase == Phase::Fill || request.request.op == Op::DaemonFlush
            }
            Owner::Job(job) => match self.jobs[job].kind {
                JobKind::Destage
                | JobKind::Flush(_)
                | JobKind::Maintenance(_)
                | JobKind::Verify
                | JobKind::ExtraFill(_)
                | JobKind::Rewrite => true,
                JobKind::Edges(_)
                | JobKind::ReadEdge(..)
                | JobKind::ReadUnits(_)
                | JobKind::ReadAhead
                | JobKind::Merged => false,
            },
            Owner::Journal(_) => true,
        }
    }
}

impl Disk {
    /// Returns the disk's current entitlement: shares, reservation and limits on the rate. The
    /// limits are suspended while a cache with a lost journal is being changed and requests are
    /// still in flight. A write that waits too long for the end of the change fails, and I/Os that
    /// are queued behind a limit would delay that end. New requests wait for the end of the change,
    /// so only I/Os that are queued already exceed the limits.
    fn entitlement(&self) -> DiskQos {
        let DiskQos { backing, flash } = self.qos;
        if !self.holds || !self.journal.as_ref().is_some_and(|journal| journal.dead) {
            return self.qos;
        }
        let unlimited =
            |entitlement: Entitlement| Entitlement { limit: None, bytes_limit: None, ..entitlement };
        DiskQos { backing: unlimited(backing), flash: unlimited(flash) }
    }
}
