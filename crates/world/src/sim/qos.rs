//! Shares, limits, reservations and windows. Only some histories have them, chosen by separate random
//! numbers, so that the others do not change. `tests/qos.rs` measures the scheduler's promises; here no
//! request may be lost or blocked.

use hob_engine::command::Command;
use hob_engine::qos::{Control, DiskQos, Due, Late, Report, Resource, agree};
use hob_engine::units::{DatastoreId, DeviceId};

use super::World;
use crate::Violation;
use crate::dice::Dice;

/// Separates the random numbers from all others.
const SALT: u64 = 0x716f_7321;

/// State of a history with QoS.
#[derive(Debug)]
pub(super) struct Qos {
    dice: Dice,
    /// Rate per share of the last agreement with other hosts.
    level: Option<f64>,
}

impl Qos {
    /// Returns the state if this history has QoS.
    pub(super) fn draw(seed: u64, permille: u32) -> Option<Qos> {
        let mut dice = Dice::new(seed ^ SALT);
        dice.chance(permille).then_some(Qos { dice, level: None })
    }

    fn due(&mut self) -> Due {
        let dice = &mut self.dice;
        let limit = dice.chance(300).then(|| dice.pick(&[20, 100, 1000, 100_000]));
        let bytes_limit = dice.chance(200).then(|| dice.pick(&[1 << 20, 100 << 20]));
        let reservation = if dice.chance(300) { dice.pick(&[1, 50, 1000]) } else { 0 };
        Due { shares: dice.pick(&[1, 500, 1000, 2000, 1_000_000]), reservation, limit, bytes_limit }
    }

    fn control(&mut self) -> Control {
        let dice = &mut self.dice;
        match dice.below(4) {
            0 => Control::Off,
            1 | 2 => Control::Depth(dice.pick(&[1, 2, 4, 32])),
            _ => {
                let threshold_ns = dice.pick(&[100_000, 1_000_000, 30_000_000]);
                let late =
                    if dice.chance(500) { Late::Above(threshold_ns) } else { Late::PastKnee(threshold_ns) };
                Control::Latency { late, weight_milli: dice.pick(&[1, 1000, 4000]) }
            }
        }
    }
}

impl World<'_> {
    /// Sets a window for every shared resource.
    pub(super) fn begin_with_qos(&mut self) {
        for device in 0..self.scenario.devices.len() {
            self.set_control(Resource::Flash(DeviceId(device as u16)));
        }
        self.set_control(Resource::Datastore(DatastoreId(0)));
    }

    /// Sometimes changes a QoS setting.
    pub(super) fn maybe_change_qos(&mut self) -> Result<(), Violation> {
        let (disks, devices) = (self.disks.len() as u64, self.scenario.devices.len() as u64);
        let Some(qos) = &mut self.qos else { return Ok(()) };
        match qos.dice.below(10) {
            0 => self.set_control(Resource::Datastore(DatastoreId(0))),
            1 => {
                let device = qos.dice.below(devices) as u16;
                self.set_control(Resource::Flash(DeviceId(device)));
            }
            2 | 3 => {
                let disk = qos.dice.below(disks) as usize;
                let given = DiskQos { backing: qos.due(), flash: qos.due() };
                self.command(disk, Command::Qos(given));
            }
            4 => self.meet_a_fellow(),
            _ => {}
        }
        self.drain()
    }

    /// Handles another host's report on the datastore, valid or not.
    fn meet_a_fellow(&mut self) {
        let Some(qos) = &mut self.qos else { return };
        let dice = &mut qos.dice;
        let figure = |dice: &mut Dice| dice.pick(&[0.0, 0.5, 10.0, 1e3, 1e9, f64::INFINITY, f64::NAN]);
        let fellow = Report {
            wanted_shares: figure(dice),
            rate: figure(dice),
            in_flight: figure(dice),
            latency_ns: figure(dice),
            waits: dice.chance(500),
        };
        let store = Resource::Datastore(DatastoreId(0));
        let Some(own) = self.engine.report_on(self.now, store, qos.level) else { return };
        if let Some(agreement) = agree(&[own, fellow], 1_000_000) {
            qos.level = Some(agreement.level);
            self.engine.take_part(self.now, store, own.wanted_shares * agreement.in_flight_per_share);
        }
    }

    fn set_control(&mut self, resource: Resource) {
        let Some(qos) = &mut self.qos else { return };
        let control = qos.control();
        self.engine.control(self.now, resource, control);
    }
}
