//! The scenario of a history, generated from the seed: sizes, latencies, limits, loads and faults.
//! Each scenario omits some of the faults and features, so that rare combinations occur too.

use hob_engine::Limits;
use hob_engine::command::Access;
use hob_engine::units::Instant;

use super::Options;
use super::guest::Guest;
use crate::media::{BackingFaults, DeviceFailure, FlashFaults};
use crate::rng::SimRng;

const MS: u64 = 1_000_000;

/// Configuration of one simulated flash device.
#[derive(Debug)]
pub(super) struct DevicePlan {
    pub(super) segments: u64,
    pub(super) faults: FlashFaults,
    pub(super) failure: Option<(Instant, DeviceFailure)>,
    /// True if the flash device refuses writes, but its data can be read.
    pub(super) refuses: bool,
    /// True if a failure of the device is a removal: the device returns after the next restart with
    /// its content at that time.
    pub(super) returns: bool,
}

impl DevicePlan {
    /// Returns true if the device may lose data.
    pub(super) fn is_bad(&self) -> bool {
        let FlashFaults { read_error, write_error, corruption, lost_write, .. } = self.faults;
        self.failure.is_some() || read_error + write_error + corruption + lost_write > 0
    }
}

/// The way in which an engine process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    PowerCut,
    Kill,
    /// The daemon shuts down: it closes the caches and then ends.
    Stop,
}

/// Parameters of a history with several engine processes.
#[derive(Debug)]
pub(super) struct Lives {
    /// Duration of each engine process but the last, nanoseconds, and how the process ends.
    pub(super) ends: Vec<(u64, End)>,
    /// Number of guest requests per engine process.
    pub(super) requests: u32,
    /// Sizes of the engine's own buffers, bytes.
    pub(super) lent: Vec<u32>,
    /// Number of segments on each device that only journals may use.
    pub(super) ring_reserve: usize,
    /// Share of the disks whose backing a foreign writer changes while the disk is offline, per
    /// mille.
    pub(super) behind: u32,
    /// True if guest requests wait until the recovered cache is in service.
    pub(super) careful: bool,
    /// True if guests use disks while their caches are being recovered.
    pub(super) early: bool,
    /// True if the power fails at the end of the present engine process or of a later one.
    pub(super) power_fails: bool,
}

/// Configuration of one disk and its guests.
#[derive(Debug)]
pub(super) struct DiskPlan {
    pub(super) units: u32,
    pub(super) access: Access,
    pub(super) faults: BackingFaults,
}

/// Parameters of a simulated history.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) limits: Limits,
    pub(super) segment_bytes: u64,
    pub(super) devices: Vec<DevicePlan>,
    pub(super) disks: Vec<DiskPlan>,
    pub(super) guests: Vec<Guest>,
    /// Mean latency of flash, nanoseconds.
    pub(super) flash_ns: u64,
    pub(super) backing_ns: u64,
    /// Mean time between commands, nanoseconds. `None` means no commands after the first.
    pub(super) command_ns: Option<u64>,
    pub(super) power_cut: Option<Instant>,
    /// Times at which a device refuses journal pages.
    pub(super) refusals: Vec<super::journal_copies::Refusal>,
    /// Parameters of restarts. `None` means one engine process and only volatile caches.
    pub(super) lives: Option<Lives>,
}

impl Scenario {
    pub(super) fn draw(options: &Options, rng: &mut SimRng) -> Self {
        let flash_ns = rng.pick(&[2_000, 80_000, 80_000, 5 * MS]);
        let backing_ns = rng.pick(&[20_000, MS, MS, 8 * MS]);
        let span = u64::from(options.requests) * backing_ns / 4;
        let segment_bytes = rng.pick(&[16 << 10, 64 << 10, 256 << 10, 1 << 20]);
        let devices: Vec<DevicePlan> = (0..rng.between(1, 3))
            .map(|_| {
                let segments = rng.between(2, 8);
                let end = rng.below(segments * segment_bytes / 512) as usize;
                let failures = [
                    DeviceFailure::Dead,
                    DeviceFailure::ReadOnly,
                    DeviceFailure::Scrambled,
                    DeviceFailure::Truncated(end),
                ];
                let ails = options.faults && rng.chance(150);
                let failure = ails.then(|| (Instant(rng.below(span)), rng.pick(&failures)));
                let faults = if options.faults { flash_faults(rng) } else { FlashFaults::default() };
                DevicePlan { segments, faults, failure, refuses: false, returns: false }
            })
            .collect();
        let disks: Vec<DiskPlan> = (0..rng.between(1, 3))
            .map(|_| {
                let units = rng.pick(&[128, 512, 2048, 8192]);
                DiskPlan {
                    units: (units + rng.pick(&[0, 0, 1, 7, 12])) as u32,
                    access: if rng.chance(30) { Access::ReadOnly } else { Access::ReadWrite },
                    faults: if options.faults && !options.sound_backings {
                        backing_faults(rng)
                    } else {
                        BackingFaults::default()
                    },
                }
            })
            .collect();
        let guests = (0..disks.len() + rng.below(4) as usize)
            .map(|i| {
                let disk = if i < disks.len() { i } else { rng.below(disks.len() as u64) as usize };
                Guest::draw(disk, disks[disk].units, rng)
            })
            .collect();
        let mut scenario = Scenario {
            lives: None,
            refusals: Vec::new(),
            limits: Limits {
                requests_max: rng.pick(&[3, 16, 256, 256]),
                fill_bytes_max: rng.pick(&[0, 64 << 10, 1 << 20, 32 << 20, 32 << 20]),
                flash_errors_max: rng.pick(&[1, 4, 16, 1000]),
                flash_errors_forgive_ms: rng.pick(&[1, 60_000]),
                flash_stall_ms_max: rng.pick(&[1, 50, 1000]),
                scrub_frames_per_s: rng.pick(&[0, 8, 64]),
                ..Limits::default()
            },
            segment_bytes,
            devices,
            disks,
            guests,
            flash_ns,
            backing_ns,
            command_ns: (options.commands && rng.chance(800)).then(|| 1 + span / rng.pick(&[1, 4, 12])),
            power_cut: (options.power_cuts && rng.chance(300)).then(|| Instant(rng.below(span))),
        };
        if options.lives {
            scenario.add_lives(options, span, rng);
        }
        scenario
    }

    /// Adds restarts to the scenario. Also makes segments and disks smaller, so that requests
    /// overlap more, and reserves room for journals in the pool.
    fn add_lives(&mut self, options: &Options, span: u64, rng: &mut SimRng) {
        self.segment_bytes = rng.pick(&[16 << 10, 64 << 10, 64 << 10, 256 << 10]);
        self.power_cut = None;
        let ring_reserve = if self.segment_bytes < 64 << 10 { 24 } else { 10 } * self.disks.len();
        let spared =
            (options.faults && rng.chance(500)).then(|| rng.below(self.devices.len() as u64) as usize);
        for (i, device) in self.devices.iter_mut().enumerate() {
            device.segments += ring_reserve as u64 + rng.below(8);
            if options.faults && spared != Some(i) {
                device.faults = FlashFaults::default();
                device.failure = None;
            }
            if let Some((_, DeviceFailure::Truncated(end))) = &mut device.failure {
                *end = rng.below(device.segments * self.segment_bytes / 512) as usize;
            }
        }
        for disk in &mut self.disks {
            disk.units = disk.units.min(2048 + disk.units % 128);
        }
        self.guests = (0..self.disks.len() + rng.below(3) as usize)
            .map(|i| {
                let disk = if i < self.disks.len() { i } else { rng.below(self.disks.len() as u64) as usize };
                let mut guest = Guest::draw(disk, self.disks[disk].units, rng);
                guest.flush = rng.pick(&[0, 30, 150]);
                guest
            })
            .collect();
        let lives = rng.between(2, 5);
        let span = span / lives;
        let ends = (1..lives).map(|_| {
            let life = match rng.below(8) {
                0 | 1 => rng.below(1 + 40 * self.flash_ns),
                2..6 => rng.below(span),
                6 => rng.below(4 * span),
                // Some lives are long enough for events that occur after about a second.
                _ => rng.below(span + 3000 * MS),
            };
            (life, rng.pick(&[End::PowerCut, End::PowerCut, End::PowerCut, End::Kill, End::Stop]))
        });
        let mut ends: Vec<(u64, End)> = ends.collect();
        if options.cuts_in_recovery {
            // The last element belongs to the first life.
            for (number, end) in ends.iter_mut().rev().enumerate() {
                *end = match number % 2 {
                    0 => (end.0, End::Kill),
                    _ => (rng.below(1 + 2 * self.flash_ns), End::PowerCut),
                };
            }
        }
        let requests = options.requests / lives as u32;
        let lent = match rng.below(8) {
            0 | 1 => vec![1 << 20],
            2 => vec![256 << 10; 2],
            _ => vec![1 << 20; 4],
        };
        let behind = rng.pick(&[0, 0, 0, 200]);
        self.lives = Some(Lives {
            ends,
            requests,
            lent,
            ring_reserve,
            behind,
            careful: rng.chance(300),
            early: false,
            power_fails: false,
        });
    }
}

fn flash_faults(rng: &mut SimRng) -> FlashFaults {
    let mut rate = || if rng.chance(300) { rng.pick(&[5, 30, 200]) } else { 0 };
    FlashFaults {
        read_error: rate(),
        write_error: rate(),
        corruption: rate(),
        lost_write: rate(),
        flush_error: 0,
        stuck: rate() / 5,
    }
}

fn backing_faults(rng: &mut SimRng) -> BackingFaults {
    let mut rate = || if rng.chance(250) { rng.pick(&[5, 30, 200]) } else { 0 };
    BackingFaults { read_error: rate(), write_error: rate(), flush_error: rate() }
}
