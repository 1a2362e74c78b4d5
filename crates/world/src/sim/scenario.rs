//! What a history is made of, drawn from its seed: sizes, speeds, limits, loads and faults. Each draw
//! switches some of them off, so that rare combinations get histories of their own.

use hob_engine::Limits;
use hob_engine::command::Access;
use hob_engine::units::Instant;

use super::Options;
use super::guest::Guest;
use crate::dice::Dice;
use crate::media::{Ailment, BackingFaults, FlashFaults};

const MS: u64 = 1_000_000;

/// One flash device.
#[derive(Debug)]
pub(super) struct DevicePlan {
    pub(super) segments: u64,
    pub(super) faults: FlashFaults,
    pub(super) ailment: Option<(Instant, Ailment)>,
}

/// One disk and its guests.
#[derive(Debug)]
pub(super) struct DiskPlan {
    pub(super) units: u32,
    pub(super) access: Access,
    pub(super) faults: BackingFaults,
}

/// A whole history.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) limits: Limits,
    pub(super) segment_bytes: u64,
    pub(super) devices: Vec<DevicePlan>,
    pub(super) disks: Vec<DiskPlan>,
    pub(super) guests: Vec<Guest>,
    /// Mean latencies, nanoseconds.
    pub(super) flash_ns: u64,
    pub(super) backing_ns: u64,
    /// Mean time between commands, nanoseconds; `None` for none after the first.
    pub(super) command_ns: Option<u64>,
    pub(super) power_cut: Option<Instant>,
}

impl Scenario {
    pub(super) fn draw(options: &Options, dice: &mut Dice) -> Self {
        let flash_ns = dice.pick(&[2_000, 80_000, 80_000, 5 * MS]);
        let backing_ns = dice.pick(&[20_000, MS, MS, 8 * MS]);
        let span = u64::from(options.requests) * backing_ns / 4;
        let segment_bytes = dice.pick(&[16 << 10, 64 << 10, 256 << 10, 1 << 20]);
        let devices: Vec<DevicePlan> = (0..dice.between(1, 3))
            .map(|_| {
                let segments = dice.between(2, 8);
                let end = dice.below(segments * segment_bytes / 512) as usize;
                let ailments =
                    [Ailment::Dead, Ailment::ReadOnly, Ailment::Scrambled, Ailment::Truncated(end)];
                let ails = options.faults && dice.chance(150);
                let ailment = ails.then(|| (Instant(dice.below(span)), dice.pick(&ailments)));
                let faults = if options.faults { flash_faults(dice) } else { FlashFaults::default() };
                DevicePlan { segments, faults, ailment }
            })
            .collect();
        let disks: Vec<DiskPlan> = (0..dice.between(1, 3))
            .map(|_| {
                let units = dice.pick(&[128, 512, 2048, 8192]);
                DiskPlan {
                    units: (units + dice.pick(&[0, 0, 1, 7, 12])) as u32,
                    access: if dice.chance(30) { Access::ReadOnly } else { Access::ReadWrite },
                    faults: if options.faults && !options.sound_backings {
                        backing_faults(dice)
                    } else {
                        BackingFaults::default()
                    },
                }
            })
            .collect();
        let guests = (0..disks.len() + dice.below(4) as usize)
            .map(|i| {
                let disk = if i < disks.len() { i } else { dice.below(disks.len() as u64) as usize };
                Guest::draw(disk, disks[disk].units, dice)
            })
            .collect();
        Scenario {
            limits: Limits {
                requests_max: dice.pick(&[3, 16, 256, 256]),
                fill_bytes_max: dice.pick(&[0, 64 << 10, 1 << 20, 32 << 20, 32 << 20]),
                flash_errors_max: dice.pick(&[1, 4, 16, 1000]),
                flash_errors_forgive_ms: dice.pick(&[1, 60_000]),
                flash_stall_ms_max: dice.pick(&[1, 50, 1000]),
            },
            segment_bytes,
            devices,
            disks,
            guests,
            flash_ns,
            backing_ns,
            command_ns: (options.commands && dice.chance(800)).then(|| 1 + span / dice.pick(&[1, 4, 12])),
            power_cut: (options.power_cuts && dice.chance(300)).then(|| Instant(dice.below(span))),
        }
    }
}

fn flash_faults(dice: &mut Dice) -> FlashFaults {
    let mut rate = || if dice.chance(300) { dice.pick(&[5, 30, 200]) } else { 0 };
    FlashFaults {
        read_error: rate(),
        write_error: rate(),
        corruption: rate(),
        lost_write: rate(),
        stuck: rate() / 5,
    }
}

fn backing_faults(dice: &mut Dice) -> BackingFaults {
    let mut rate = || if dice.chance(250) { dice.pick(&[5, 30, 200]) } else { 0 };
    BackingFaults { read_error: rate(), write_error: rate(), flush_error: rate() }
}
