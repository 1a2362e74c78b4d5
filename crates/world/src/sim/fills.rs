//! Simulates caches that fill more than guests read (docs/decisions/0059-fill-granularity.md). The
//! amount of extra fills is drawn at random for each cache configuration, and sometimes changes.
//!
//! A separate random number generator chooses the histories with extra fills, so that extra fills
//! do not change the random choices of other histories.

use hob_engine::command::{CacheChange, Command};
use hob_engine::granularity::Fill;
use hob_engine::io::{IoOp, Promote, Target};

use super::{Sabotage, Simulation};
use crate::Violation;
use crate::content::{Tag, UNIT_BYTES};
use crate::media::Done;
use crate::rng::SimRng;

/// Number that is combined with the seed of a history, to seed separate random numbers for
/// histories with extra fills.
const SALT: u64 = 0x6669_6c6c;

/// State of the extra fills in a history. An *extra fill* reads more than a guest requested.
#[derive(Debug)]
pub(super) struct Fills {
    rng: SimRng,
    /// Content of each disk's backing at the disk's last extra fill.
    before: Vec<Vec<Tag>>,
}

impl Fills {
    pub(super) fn draw(seed: u64, permille: u32, disks: usize) -> Option<Fills> {
        let mut rng = SimRng::new(seed ^ SALT);
        rng.chance(permille).then_some(Fills { rng, before: vec![vec![]; disks] })
    }

    pub(super) fn setting(&mut self) -> Fill {
        self.rng.pick(&[Fill::Sectors, Fill::Block, Fill::Block, Fill::Block, Fill::Auto, Fill::Auto])
    }
}

impl Simulation<'_> {
    /// Gives the engine buffers for extra fills, in a history without persistent caches.
    pub(super) fn prepare_fills(&mut self) {
        let is_volatile = self.scenario.lives.is_none();
        if let Some(Fills { rng, .. }) = self.fills.as_mut().filter(|_| is_volatile) {
            let buffers = rng.pick(&[1, 1, 2]);
            (0..buffers).for_each(|_| self.lend(1 << 20));
        }
    }

    /// Sometimes changes how much more than the requested data a disk's cache fills.
    pub(super) fn maybe_change_fill(&mut self) -> Result<(), Violation> {
        let disks = self.disks.len() as u64;
        let Some(fills) = &mut self.fills else { return Ok(()) };
        if !fills.rng.chance(200) {
            return Ok(());
        }
        let (disk, fill) = (fills.rng.below(disks) as usize, fills.setting());
        let state = &self.disks[disk];
        if state.present && !state.leaving && state.config.is_some() {
            self.command(disk, Command::Cache(CacheChange::Fill(fill)));
        }
        self.drain()
    }

    /// Forgets the stored earlier content of a disk's backing, because a crash may have changed the
    /// backing.
    pub(super) fn forget_extra_reads(&mut self, disk: usize) {
        if let Some(fills) = &mut self.fills {
            fills.before[disk].clear();
        }
    }

    /// Performs a sabotage: an extra fill receives the content from before the latest writes, as if
    /// the engine had not ordered the fill with these writes.
    pub(super) fn make_extra_stale(&mut self, done: &mut Done) {
        let Target::Backing(disk) = done.io.target else { return };
        let is_extra = done.io.op == IoOp::Read && self.engine.promote_of(done.io.id) == Promote::Never;
        let is_meant = self.options.sabotage == Some(Sabotage::StaleExtraFill);
        let Some(fills) = self.fills.as_mut().filter(|_| is_meant && is_extra) else { return };
        let disk = disk.0 as usize;
        let now = self.disks[disk].backing.now().to_vec();
        let before = std::mem::replace(&mut fills.before[disk], now);
        let first = (done.io.offset / UNIT_BYTES) as usize;
        done.tags.iter_mut().zip(before.iter().skip(first)).for_each(|(tag, before)| *tag = *before);
    }
}
