//! Simulates changes of QoS settings: shares, limits, reservations and throttles. A separate random
//! number generator chooses the histories with QoS changes, so that these changes do not affect the
//! random choices of other histories. `tests/qos.rs` measures the scheduler's guarantees. The
//! simulation checks that no request is lost or blocked.

use hob_engine::command::Command;
use hob_engine::qos::{Control, DiskQos, Entitlement, Late, Report, Resource, agree};
use hob_engine::units::{DatastoreId, DeviceId};

use super::Simulation;
use crate::Violation;
use crate::rng::SimRng;

/// Number that is combined with the seed of a history, to seed separate random numbers for
/// histories with QoS.
const SALT: u64 = 0x716f_7321;

/// QoS settings of a history.
#[derive(Debug)]
pub(super) struct Qos {
    rng: SimRng,
    /// Rate per share of the last agreement with peer hosts.
    level: Option<f64>,
}

impl Qos {
    pub(super) fn draw(seed: u64, permille: u32) -> Option<Qos> {
        let mut rng = SimRng::new(seed ^ SALT);
        rng.chance(permille).then_some(Qos { rng, level: None })
    }

    fn due(&mut self) -> Entitlement {
        let rng = &mut self.rng;
        let limit = rng.chance(300).then(|| rng.pick(&[20, 100, 1000, 100_000]));
        let bytes_limit = rng.chance(200).then(|| rng.pick(&[1 << 20, 100 << 20]));
        let reservation = if rng.chance(300) { rng.pick(&[1, 50, 1000]) } else { 0 };
        Entitlement { shares: rng.pick(&[1, 500, 1000, 2000, 1_000_000]), reservation, limit, bytes_limit }
    }

    fn control(&mut self) -> Control {
        let rng = &mut self.rng;
        match rng.below(4) {
            0 => Control::Off,
            1 | 2 => Control::Depth(rng.pick(&[1, 2, 4, 32])),
            _ => {
                let threshold_ns = rng.pick(&[100_000, 1_000_000, 30_000_000]);
                let late =
                    if rng.chance(500) { Late::Above(threshold_ns) } else { Late::PastKnee(threshold_ns) };
                Control::Latency { late, weight_milli: rng.pick(&[1, 1000, 4000]) }
            }
        }
    }
}

impl Simulation<'_> {
    /// Sets a throttle for every shared resource.
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
        match qos.rng.below(10) {
            0 => self.set_control(Resource::Datastore(DatastoreId(0))),
            1 => {
                let device = qos.rng.below(devices) as u16;
                self.set_control(Resource::Flash(DeviceId(device)));
            }
            2 | 3 => {
                let disk = qos.rng.below(disks) as usize;
                let given = DiskQos { backing: qos.due(), flash: qos.due() };
                self.command(disk, Command::Qos(given));
            }
            4 => self.meet_a_fellow(),
            _ => {}
        }
        self.drain()
    }

    /// Delivers a peer host's report about the datastore, with valid or invalid numbers.
    fn meet_a_fellow(&mut self) {
        let Some(qos) = &mut self.qos else { return };
        let rng = &mut qos.rng;
        let figure = |rng: &mut SimRng| rng.pick(&[0.0, 0.5, 10.0, 1e3, 1e9, f64::INFINITY, f64::NAN]);
        let fellow = Report {
            wanted_shares: figure(rng),
            rate: figure(rng),
            in_flight: figure(rng),
            latency_ns: figure(rng),
            waits: rng.chance(500),
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
