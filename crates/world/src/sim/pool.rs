//! The daemon's part: who owns which segments, and commands at random moments.

use std::collections::BTreeSet;

use hob_engine::admission::{Admission, Popularity};
use hob_engine::command::{
    CacheChange, CacheConfig, Command, CommandError, DataSegment, DiskConfig, Event, Segment,
};
use hob_engine::policy::PolicyKind;
use hob_engine::units::{CommandId, DeviceId, DiskId};

use super::World;
use crate::content::UNIT_BYTES;
use crate::{Violation, ensure};

/// First byte of the segments on a device: what is before belongs to nobody.
pub(super) const SEGMENTS_START: u64 = 8192;

/// A command the engine has not ended.
#[derive(Debug)]
pub(super) struct Asked {
    disk: usize,
    command: Command,
}

impl Asked {
    pub(super) fn changes_cache_of(&self, disk: usize) -> bool {
        self.disk == disk && matches!(self.command, Command::Cache(_))
    }

    /// The segments that go to the cache if the command succeeds.
    fn segments(&self) -> Vec<Segment> {
        let data = match &self.command {
            Command::Cache(CacheChange::Enable(enable)) => &enable.segments,
            Command::Cache(CacheChange::Grow(segments, _) | CacheChange::Leave(_, segments, _)) => segments,
            _ => return Vec::new(),
        };
        data.iter().map(|segment| segment.place).collect()
    }
}

impl World<'_> {
    pub(super) fn add_disk(&mut self, disk: usize) {
        let size_bytes = self.disks[disk].units() * UNIT_BYTES;
        let access = self.disks[disk].access;
        self.command(disk, Command::AddDisk(DiskConfig { size_bytes, access }));
        self.disks[disk].present = true;
        if !self.disks[disk].leaving {
            self.disks[disk].tally = Default::default();
        }
    }

    /// Something changes, for a disk at random.
    pub(super) fn random_command(&mut self) {
        let disk = self.dice.below(self.disks.len() as u64) as usize;
        if !self.disks[disk].present {
            return self.add_disk(disk);
        }
        if self.disks[disk].config.is_none() && self.dice.chance(800) {
            let config = self.draw_config();
            let segments = self.take_free();
            return self.command(disk, Command::Cache(CacheChange::enable_volatile(config, segments)));
        }
        let change = match self.dice.below(18) {
            0 if self.dice.chance(400) => return self.command(disk, Command::RemoveDisk),
            0 | 1 => return self.command(disk, Command::ResetStats),
            2..5 => CacheChange::Disable,
            5 => CacheChange::enable_volatile(self.draw_config(), self.take_free()),
            6..9 => CacheChange::Grow(DataSegment::without_order(self.take_free()), None),
            9..12 => CacheChange::Shrink(self.dice.below(5) as u32, None),
            12 => {
                let segments = if self.dice.chance(500) { self.take_free() } else { vec![] };
                let device = DeviceId(self.dice.below(self.flash.len() as u64) as u16);
                CacheChange::Leave(device, DataSegment::without_order(segments), None)
            }
            13 => CacheChange::Clear(None),
            _ => CacheChange::Configure(self.draw_config(), None),
        };
        self.command(disk, Command::Cache(change));
    }

    pub(super) fn command(&mut self, disk: usize, command: Command) {
        self.commands += 1;
        let id = CommandId(self.commands);
        match command {
            Command::RemoveDisk => self.disks[disk].present = false,
            Command::ResetStats if !self.disks[disk].leaving => self.disks[disk].tally = Default::default(),
            _ => {}
        }
        if matches!(command, Command::RemoveDisk) {
            self.disks[disk].leaving = true;
        }
        self.asked.insert(id, Asked { disk, command: command.clone() });
        self.engine.handle_command(self.now, id, DiskId(disk as u32), command);
    }

    fn draw_config(&mut self) -> CacheConfig {
        let policies: Vec<PolicyKind> = PolicyKind::all().collect();
        let blocks = 1 + (self.scenario.segment_bytes / 4096).ilog2().min(8);
        CacheConfig::write_through(
            match self.dice.below(40) {
                0 => self.dice.pick(&[0, 512, 12_288, 2 << 20]),
                _ => 4096 << self.dice.below(u64::from(blocks)),
            },
            self.scenario.segment_bytes,
            self.dice.pick(&policies),
            self.draw_admission(),
        )
    }

    fn draw_admission(&mut self) -> Admission {
        Admission {
            popularity: match self.dice.below(4) {
                0 => Popularity::NthAccess(2 + self.dice.below(3) as u8),
                1 => Popularity::Ghost,
                _ => Popularity::Always,
            },
            sequential_bytes_max: self.dice.chance(250).then(|| 4096 << self.dice.below(6)),
        }
    }

    /// Some free segments, seldom on fenced devices.
    fn take_free(&mut self) -> Vec<Segment> {
        let careless = self.dice.chance(50);
        let fenced = self.fenced.clone();
        let mut fit: Vec<Segment> = self
            .free
            .iter()
            .filter(|segment| careless || !fenced.contains(&segment.device))
            .copied()
            .collect();
        let wanted = self.dice.below(6) as usize;
        let mut taken = vec![];
        while taken.len() < wanted && !fit.is_empty() {
            taken.push(fit.swap_remove(self.dice.below(fit.len() as u64) as usize));
        }
        taken.iter().for_each(|segment| assert!(self.free.remove(segment)));
        taken
    }

    /// Hears what the engine reports.
    pub(super) fn event(&mut self, event: Event) -> Result<(), Violation> {
        if matches!(event, Event::Stalled(_) | Event::Resumed(_)) {
            let clock = self.clock;
            self.disks.iter_mut().for_each(|disk| disk.changed = clock);
        }
        match event {
            Event::Done { command, disk, result } => {
                let asked = self.asked.remove(&command);
                let asked = asked.ok_or_else(|| Violation(format!("command {command} ended twice")))?;
                ensure!(asked.disk == disk.0 as usize, "command {command} ended for disk {disk}");
                self.report.commands += 1;
                self.done(&asked, result)
            }
            Event::Fenced { device, errors } => {
                ensure!(errors >= self.scenario.limits.flash_errors_max, "{device} fenced after {errors}");
                ensure!(self.fenced.insert(device), "{device} fenced twice");
                self.report.fences += 1;
                Ok(())
            }
            Event::Lost { disk, segments } => {
                let fenced = segments.iter().all(|segment| self.fenced.contains(&segment.device));
                ensure!(fenced && !segments.is_empty(), "{segments:?} lost on devices in order");
                self.report.losses += 1;
                self.released(disk.0 as usize, &segments)
            }
            Event::Stalled(_) => {
                self.report.stalls += 1;
                Ok(())
            }
            Event::Resumed(_) => {
                self.report.resumptions += 1;
                Ok(())
            }
            Event::DirtyLost { .. } | Event::JournalLost(_) => Ok(()),
        }
    }

    fn done(&mut self, asked: &Asked, result: Result<Vec<Segment>, CommandError>) -> Result<(), Violation> {
        let (index, clock) = (asked.disk, self.clock);
        self.disks[index].changed = clock;
        let released = match result {
            Ok(released) => released,
            Err(error) => {
                self.free.extend(asked.segments());
                return self.refusal(asked, error);
            }
        };
        let disk = &mut self.disks[index];
        disk.segments.extend(asked.segments());
        match &asked.command {
            Command::Cache(CacheChange::Configure(config, _)) => disk.config = Some(*config),
            Command::Cache(CacheChange::Enable(enable)) => {
                disk.config = Some(enable.config);
            }
            Command::RemoveDisk => disk.leaving = false,
            _ => {}
        }
        self.released(index, &released)?;
        let disk = &mut self.disks[index];
        let ended = matches!(asked.command, Command::Cache(CacheChange::Disable) | Command::RemoveDisk);
        ensure!(!ended || disk.segments.is_empty(), "disk {index} keeps {:?}", disk.segments);
        if let Command::Cache(CacheChange::Shrink(count, _)) = asked.command {
            ensure!(released.len() == count as usize, "shrunk by {}, not {count}", released.len());
        }
        Ok(())
    }

    /// A command failed: it had to.
    fn refusal(&mut self, asked: &Asked, error: CommandError) -> Result<(), Violation> {
        let disk = &self.disks[asked.disk];
        let just = match (error, &asked.command) {
            (CommandError::Removing, _) => disk.leaving,
            (CommandError::NoSuchDisk, _) => !disk.present && !disk.leaving,
            (CommandError::DiskExists, Command::AddDisk(_)) => disk.leaving,
            (CommandError::NoCache, Command::Cache(CacheChange::Leave(device, ..))) => {
                disk.segments.iter().all(|segment| segment.device != *device)
            }
            (CommandError::NoCache, _) => disk.config.is_none(),
            (CommandError::CacheExists, Command::Cache(CacheChange::Enable(..))) => disk.config.is_some(),
            (CommandError::TooSmall, Command::Cache(CacheChange::Shrink(count, _))) => {
                *count as usize >= disk.segments.len()
            }
            (CommandError::TooSmall, _) => asked.segments().is_empty(),
            (CommandError::Unworkable, Command::Cache(change)) => {
                let config = match change {
                    CacheChange::Enable(enable) => enable.config,
                    CacheChange::Configure(config, _) => *config,
                    _ => return Err(Violation(format!("{asked:?} failed with {error:?}"))),
                };
                !config.block_bytes.is_power_of_two()
                    || !(4096..=1 << 20).contains(&config.block_bytes)
                    || u64::from(config.block_bytes) > config.segment_bytes
            }
            _ => false,
        };
        let (cache, segments) = (&disk.config, &disk.segments);
        ensure!(just, "{asked:?} failed with {error:?} on {cache:?} of {segments:?}");
        if matches!(asked.command, Command::AddDisk(_)) {
            self.disks[asked.disk].present = false;
        }
        Ok(())
    }

    /// A cache gave segments up: nothing may be going on there.
    fn released(&mut self, index: usize, segments: &[Segment]) -> Result<(), Violation> {
        let len = self.scenario.segment_bytes;
        self.disks[index].changed = self.clock;
        for segment in segments {
            let disk = &mut self.disks[index];
            ensure!(disk.segments.remove(segment), "disk {index} gives up {segment:?}, which it has not");
            let busy = self.flash[usize::from(segment.device.0)].is_busy(segment.offset, len);
            ensure!(!busy, "disk {index} gives {segment:?} up with I/O in flight");
            ensure!(self.free.insert(*segment), "{segment:?} is free already");
        }
        let disk = &mut self.disks[index];
        if disk.segments.is_empty() {
            disk.config = None;
        }
        Ok(())
    }

    /// Every segment of the pool.
    pub(super) fn all_segments(&self) -> BTreeSet<Segment> {
        let devices = self.scenario.devices.iter().enumerate();
        devices
            .flat_map(|(i, device)| {
                (0..device.segments).map(move |n| (DeviceId(i as u16), n)).collect::<Vec<_>>()
            })
            .map(|(device, n)| Segment { device, offset: SEGMENTS_START + n * self.scenario.segment_bytes })
            .collect()
    }
}
