//! Simulates memory tiers: their memory areas, their commands, and the copies that the engine
//! requests.
//!
//! A separate random number generator chooses the histories with memory tiers, so that memory tiers
//! do not change the random choices of other histories.

use hob_engine::command::{Command, MEMORY_PAGE_BYTES_MAX, MEMORY_PAGES_MIN, MemoryConfig, Segment};
use hob_engine::io::{BufferCopy, CopyEnd, Io, Op, Target};
use hob_engine::units::SECTOR_BYTES;

use super::guest::Stream;
use super::{Sabotage, Simulation, trace};
use crate::content::{self, Tag, UNIT_BYTES};
use crate::rng::SimRng;
use crate::{Violation, ensure};

/// Number that is combined with the seed of a history, to seed separate random numbers for
/// histories with memory tiers.
const SALT: u64 = 0x6d65_6d6f_7279;

#[derive(Debug)]
pub(super) struct Ram {
    rng: SimRng,
}

impl Ram {
    pub(super) fn draw(seed: u64, permille: u32) -> Option<Ram> {
        let mut rng = SimRng::new(seed ^ SALT);
        rng.chance(permille).then_some(Ram { rng })
    }

    /// Returns a random memory tier configuration. Most tiers are small, so that they evict pages.
    /// Some configurations are invalid. `None` means no memory tier.
    fn config(&mut self) -> Option<MemoryConfig> {
        let rng = &mut self.rng;
        if rng.chance(150) {
            return None;
        }
        let page_bytes = match rng.below(40) {
            0 => rng.pick(&[0, 512, 12_288, 128 << 10]),
            _ => rng.pick(&[4096, 4096, 8192, 16 << 10, 64 << 10]),
        };
        let pages = if rng.chance(30) { rng.below(4) } else { 4 << rng.below(6) };
        Some(MemoryConfig {
            bytes: pages * u64::from(page_bytes.max(4096)) + rng.pick(&[0, 0, 512]),
            page_bytes,
        })
    }
}

impl Simulation<'_> {
    /// Makes some guests sequential, and gives the engine buffers for read-ahead.
    pub(super) fn prepare_memory(&mut self) {
        let Some(Ram { rng }) = &mut self.ram else { return };
        for guest in &mut self.scenario.guests {
            if rng.chance(500) {
                let count = rng.pick(&[1, 8, 8, 16, 32, 100]);
                guest.stream = Some(Stream { writes: rng.chance(400), at: 0, count });
            }
        }
        let buffers = if self.scenario.lives.is_none() { rng.below(5) } else { 0 };
        (0..buffers).for_each(|_| self.lend(1 << 20));
    }

    /// Counts flash I/O on the engine's own buffers that is certainly read-ahead or an extra fill.
    pub(super) fn tally_lent(&mut self, io: &Io, failed: bool) {
        let Target::Flash(device) = io.target else { return };
        if self.scenario.lives.is_some() {
            return;
        }
        let inside = (io.offset - super::pool::SEGMENTS_START) % self.scenario.segment_bytes;
        let segment = Segment { device, offset: io.offset - inside };
        let disk = self.disks.iter_mut().find(|disk| disk.segments.contains(&segment));
        disk.expect("checked at submission").tally.flash_io(failed);
    }

    /// Gives all disks their first memory tiers.
    pub(super) fn begin_with_memory(&mut self) -> Result<(), Violation> {
        (0..self.disks.len()).try_for_each(|disk| self.change_memory(disk))
    }

    /// Sometimes changes a disk's memory tier.
    pub(super) fn maybe_change_memory(&mut self) -> Result<(), Violation> {
        let disks = self.disks.len() as u64;
        let Some(Ram { rng }) = &mut self.ram else { return Ok(()) };
        if !rng.chance(300) {
            return Ok(());
        }
        let disk = rng.below(disks) as usize;
        self.change_memory(disk)
    }

    fn change_memory(&mut self, disk: usize) -> Result<(), Violation> {
        if let Some(ram) = &mut self.ram {
            let config = ram.config();
            // Copies that the engine requested earlier refer to the old memory area.
            self.drain()?;
            self.command(disk, Command::Memory(config));
            self.drain()?;
        }
        Ok(())
    }

    /// Records a disk's new memory tier, or its removal.
    pub(super) fn memory_changed(&mut self, disk: usize, config: Option<MemoryConfig>) {
        let units = config.map_or(0, |config| config.bytes / UNIT_BYTES);
        self.disks[disk].memory = (0..units).map(|unit| content::garbage(unit ^ SALT)).collect();
    }

    /// Returns true if the memory tier configuration is invalid.
    pub(super) fn is_senseless(config: &MemoryConfig) -> bool {
        let page = u64::from(config.page_bytes);
        !page.is_power_of_two()
            || !(SECTOR_BYTES..=u64::from(MEMORY_PAGE_BYTES_MAX)).contains(&page)
            || config.bytes / page < MEMORY_PAGES_MIN
    }

    /// Copies data between buffers and memory tier, as the engine requested.
    pub(super) fn copy(&mut self, copy: BufferCopy) -> Result<(), Violation> {
        trace!(self, "{copy:?}");
        let between =
            !matches!(copy.from, CopyEnd::Memory { .. }) && matches!(copy.to, CopyEnd::Buffer { .. });
        let unit = if between { UNIT_BYTES } else { SECTOR_BYTES };
        ensure!(
            copy.len > 0 && u64::from(copy.len).is_multiple_of(unit),
            "{copy:?} does not copy whole sectors"
        );
        let units = (u64::from(copy.len) / UNIT_BYTES) as usize;
        let tags: Vec<Tag> = match copy.from {
            CopyEnd::Zeroes => {
                self.report.zeroes_to_flash += 1;
                if self.strikes(Sabotage::LostZeroes, 500) {
                    return Ok(());
                }
                vec![content::ZERO; units]
            }
            from => self.end_of_copy(&copy, from, units, unit)?.to_vec(),
        };
        if matches!(copy.to, CopyEnd::Memory { .. })
            && self.is_of_write(copy.from)
            && self.strikes(Sabotage::LostRenewal, 300)
        {
            return Ok(());
        }
        let edge_buffer = self.edge_buffer;
        let is_recent = |end| matches!(end, CopyEnd::Buffer { id, .. } if Some(id) == edge_buffer);
        self.report.edges_recent += u64::from(is_recent(copy.from));
        if is_recent(copy.to) && self.strikes(Sabotage::OldRecentEdge, 500) {
            return Ok(());
        }
        let is_lent = |end| matches!(end, CopyEnd::Buffer { id, .. } if self.lent.contains_key(&id));
        let is_of_zeroes = is_lent(copy.to) && !is_recent(copy.to) && is_lent(copy.from);
        let is_edge = between && (is_of_zeroes || self.is_of_write(copy.to));
        self.report.edges_merged += u64::from(is_edge);
        if is_edge && self.strikes(Sabotage::LostEdge, 300) {
            return Ok(());
        }
        self.report.copies += 1;
        self.end_of_copy(&copy, copy.to, units, unit)?.copy_from_slice(&tags);
        Ok(())
    }

    fn is_of_write(&self, end: CopyEnd) -> bool {
        let CopyEnd::Buffer { id, .. } = end else { return false };
        let request = self.buffers.get(&id).and_then(|buffer| self.requests.get(&buffer.request));
        request.is_some_and(|in_flight| matches!(in_flight.request.op, Op::Write(_)))
    }

    fn end_of_copy(
        &mut self,
        copy: &BufferCopy,
        end: CopyEnd,
        units: usize,
        align: u64,
    ) -> Result<&mut [Tag], Violation> {
        let (tags, start) = match end {
            CopyEnd::Memory { disk, offset } => {
                ensure!(offset.is_multiple_of(SECTOR_BYTES), "{copy:?} is not aligned");
                (&mut self.disks[disk.0 as usize].memory, (offset / UNIT_BYTES) as usize)
            }
            CopyEnd::Buffer { id, offset } => {
                ensure!(u64::from(offset).is_multiple_of(align), "{copy:?} is not aligned");
                let start = (u64::from(offset) / UNIT_BYTES) as usize;
                if let Some(lent) = self.lent.get_mut(&id) {
                    let in_use = lent
                        .ios
                        .iter()
                        .find(|(_, other, _)| other.start < start + units && start < other.end);
                    ensure!(in_use.is_none(), "{copy:?} while {in_use:?} uses the buffer");
                    (&mut lent.tags, start)
                } else {
                    let buffer = self.buffers.get_mut(&id);
                    let buffer =
                        buffer.ok_or_else(|| Violation(format!("{copy:?} uses a released buffer")))?;
                    ensure!(buffer.ios == 0 && !buffer.replied, "{copy:?} with {buffer:?}");
                    (&mut buffer.tags, start)
                }
            }
            CopyEnd::Zeroes => {
                return Err(Violation(format!("{copy:?} copies data to the source of zeroes")));
            }
        };
        let there = tags.len();
        let part = tags.get_mut(start..start + units);
        part.ok_or_else(|| Violation(format!("{copy:?} extends beyond the {there} units of {end:?}")))
    }
}
