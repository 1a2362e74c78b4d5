//! Simulates the daemon's commands at random times. Most commands are valid.

use hob_engine::admission::{Admission, Popularity};
use hob_engine::command::{
    CacheChange, CacheConfig, Command, Copies, DataSegment, Destage, DestageOrder, Discard, DiskConfig,
    Enable, Layout, Mode, NewRing, Segment,
};
use hob_engine::policy::PolicyKind;
use hob_engine::units::{CommandId, DatastoreId, DeviceId, DiskId};

use super::owner::Owner;
use super::pool::Asked;
use super::{Simulation, trace};
use crate::Violation;
use crate::content::UNIT_BYTES;
use crate::rng::SimRng;

impl Simulation<'_> {
    pub(super) fn add_disk(&mut self, disk: usize) {
        let size_bytes = self.disks[disk].units() * UNIT_BYTES;
        let access = self.disks[disk].access;
        self.command(disk, Command::AddDisk(DiskConfig { size_bytes, access, datastore: DatastoreId(0) }));
        // Separate random numbers, so that other decisions of the history stay the same.
        if let Some(seed) = self.stripe_seed {
            let mut rng = SimRng::new(seed ^ self.now.0 ^ (disk as u64) << 48);
            let stripe_bytes = rng.pick(&[0, 64 << 10, 192 << 10, 1 << 20]);
            self.engine.set_stripe(DiskId(disk as u32), stripe_bytes);
        }
        if !self.disks[disk].leaving {
            // The disk may have grown since its removal.
            self.disk_has_size(disk, self.disks[disk].units());
        }
        self.disks[disk].present = true;
        self.disks[disk].refuses_waiting = false;
        if !self.disks[disk].leaving {
            self.disks[disk].tally = Default::default();
            self.give_bitmaps(disk);
        }
    }

    /// Sends a random command for a random disk to the engine.
    pub(super) fn random_command(&mut self) -> Result<(), Violation> {
        let disk = self.rng.below(self.disks.len() as u64) as usize;
        if self.scenario.lives.is_some() {
            return self.random_command_of_many(disk);
        }
        if !self.disks[disk].present {
            self.add_disk(disk);
            return Ok(());
        }
        if self.disks[disk].config.is_none() && self.rng.chance(800) {
            let config = self.draw_config();
            let segments = self.take_free();
            self.command(disk, Command::Cache(CacheChange::enable_volatile(config, segments)));
            return Ok(());
        }
        self.change_volatile(disk);
        Ok(())
    }

    /// Sends a random command for a disk that has a volatile cache or no cache.
    fn change_volatile(&mut self, disk: usize) {
        let change = match self.rng.below(18) {
            0 if self.rng.chance(400) => {
                self.command(disk, Command::RemoveDisk);
                return;
            }
            0 | 1 => {
                self.reset(disk);
                return;
            }
            2..5 => CacheChange::Disable,
            5 => CacheChange::enable_volatile(self.draw_config(), self.take_free()),
            6..9 => CacheChange::Grow(DataSegment::without_order(self.take_free()), None),
            9..12 => CacheChange::Shrink(self.rng.below(5) as u32, None),
            12 => {
                let segments = if self.rng.chance(500) { self.take_free() } else { vec![] };
                CacheChange::Leave(self.any_device(), DataSegment::without_order(segments), None)
            }
            13 => CacheChange::Clear(None),
            _ => CacheChange::Configure(self.draw_config(), None),
        };
        self.command(disk, Command::Cache(change));
    }

    fn any_device(&mut self) -> DeviceId {
        DeviceId(self.rng.below(self.flash.len() as u64) as u16)
    }

    /// Sends a random command to the engine in a history with restarts, where caches may be
    /// persistent.
    fn random_command_of_many(&mut self, disk: usize) -> Result<(), Violation> {
        let state = &self.disks[disk];
        if !state.present {
            return if state.leaving { Ok(()) } else { self.open_disk(disk) };
        }
        if state.recovering.is_some() {
            match self.rng.below(10) {
                0 => _ = self.command(disk, Command::RemoveDisk),
                1 => self.reset(disk),
                _ => {}
            }
            return Ok(());
        }
        let idle = state.config.is_none() && state.owner.is_none();
        if idle && self.rng.chance(850) {
            if self.rng.chance(750) {
                self.enable_persistent(disk);
            } else {
                let (config, segments) = (self.draw_config(), self.take_free());
                self.command(disk, Command::Cache(CacheChange::enable_volatile(config, segments)));
            }
        } else if self.disks[disk].owner.is_some() {
            self.change_persistent(disk);
        } else if self.rng.chance(300) {
            let change = self.tune();
            self.command(disk, Command::Cache(change));
        } else {
            self.change_volatile(disk);
        }
        Ok(())
    }

    /// Creates persistent caches for most disks at the start of a history.
    pub(super) fn begin_with_caches(&mut self) -> Result<(), Violation> {
        for disk in 0..self.disks.len() {
            if self.rng.chance(900) {
                self.enable_persistent(disk);
                self.drain()?;
            }
        }
        Ok(())
    }

    /// Creates a persistent cache if the pool has room for its journal.
    pub(super) fn enable_persistent(&mut self, disk: usize) {
        let config = self.draw_config();
        self.caches += 1;
        let mut cache = [0x5a; 16];
        cache[..8].copy_from_slice(&self.caches.to_le_bytes());
        self.disks[disk].owner = Some(Owner::new(cache, config));
        let segments = self.take_free();
        let segments = self.own(disk, segments);
        match self.make_ring(disk, &config) {
            Some(ring) => {
                let doubled = ring.copies.len() == 2 && config.copies != Copies::One;
                self.disks[disk].owner.as_mut().expect("just made").doubled = doubled;
                let enable = Enable { config, segments, journal: Some(ring), recovered: None };
                self.command(disk, Command::Cache(CacheChange::Enable(Box::new(enable))));
            }
            None => self.disown(disk),
        }
    }

    /// Sends a random command for a disk that has a persistent cache or will have one.
    fn change_persistent(&mut self, disk: usize) {
        let config = self.disks[disk].owner.as_ref().expect("persistent").config;
        let change = match self.rng.below(32) {
            0 => {
                self.reset(disk);
                return;
            }
            1 | 2 => {
                self.command(disk, Command::RemoveDisk);
                return;
            }
            3 | 4 => CacheChange::Disable,
            5..9 => {
                let segments = self.take_free();
                let segments = self.own(disk, segments);
                let Some(ring) = self.ring_or_none(disk, &config) else {
                    return self.take_back(disk, &segments);
                };
                CacheChange::Grow(segments, ring)
            }
            9..12 => {
                let count = self.rng.below(5) as u32;
                let Some(ring) = self.ring_or_none(disk, &config) else { return };
                CacheChange::Shrink(count, ring)
            }
            12 | 13 => {
                let device = self.any_device();
                let mut segments = if self.rng.chance(500) { self.take_free() } else { vec![] };
                self.give(disk, segments.extract_if(.., |segment| segment.device == device).collect());
                let segments = self.own(disk, segments);
                let Some(ring) = self.ring_or_none(disk, &config) else {
                    return self.take_back(disk, &segments);
                };
                CacheChange::Leave(device, segments, ring)
            }
            14 => match self.ring_or_none(disk, &config) {
                Some(ring) => CacheChange::Clear(ring),
                None => return,
            },
            15 | 16 => {
                let config = self.draw_config();
                let Some(ring) = self.ring_or_none(disk, &config) else { return };
                CacheChange::Configure(config, ring)
            }
            17..24 => self.tune(),
            24..28 => CacheChange::Drain,
            28 | 29 => CacheChange::StopDrain,
            30 => CacheChange::DiscardDirty(Discard::Told),
            _ => {
                let (config, segments) = (self.draw_config(), self.take_free());
                // A cache that is being opened cannot be replaced.
                if self.is_being_recovered(disk) {
                    return self.give(disk, segments);
                }
                CacheChange::enable_volatile(config, segments)
            }
        };
        self.command(disk, Command::Cache(change));
    }

    /// Returns a journal ring for a command. Returns `Some(None)` to simulate a daemon that forgets
    /// to pass a ring, and `None` if the pool has no room for a ring.
    #[expect(clippy::option_option, reason = "the outer one is whether the command can be given at all")]
    fn ring_or_none(&mut self, disk: usize, config: &CacheConfig) -> Option<Option<NewRing>> {
        if self.rng.chance(20) {
            return Some(None);
        }
        self.make_ring(disk, config).map(Some)
    }

    /// Returns segments to the pool that were allocated for a disk's cache and are not used.
    fn take_back(&mut self, disk: usize, segments: &[DataSegment]) {
        let owner = self.disks[disk].owner.as_mut().expect("persistent");
        for segment in segments {
            owner.data.remove(&segment.ordinal);
        }
        self.give(disk, segments.iter().map(|segment| segment.place).collect());
    }

    fn give(&mut self, disk: usize, segments: Vec<Segment>) {
        for segment in segments {
            assert!(self.free.insert(segment), "{segment:?} of disk {disk} is free already");
        }
    }

    fn tune(&mut self) -> CacheChange {
        let config = self.draw_config();
        if self.commands.is_multiple_of(3) {
            return CacheChange::Replace(config.policy, config.admission);
        }
        CacheChange::Tune(config.mode, config.destage, config.copies)
    }

    /// Resets the disk's statistics. Every second call also resets the disk's histograms.
    fn reset(&mut self, disk: usize) {
        if self.commands.is_multiple_of(2) {
            self.command(disk, Command::ResetHistograms);
        }
        self.command(disk, Command::ResetStats);
    }

    /// Sends a command for this disk to the engine.
    pub(super) fn command(&mut self, disk: usize, command: Command) -> CommandId {
        self.commands += 1;
        let id = CommandId(self.commands);
        if matches!(command, Command::AddDisk(_)) {
            // The engine may have removed the earlier disk after the last count.
            self.count_flash_writes();
        }
        if matches!(command, Command::RemoveDisk) {
            self.observe_removal(disk);
        }
        if let Command::Cache(change) = &command
            && let Some(ring) = change.ring()
        {
            self.give_crash_log(disk, ring.number);
        }
        let state = &mut self.disks[disk];
        match &command {
            Command::RemoveDisk => {
                state.present = false;
                state.leaving = true;
                state.refuses_waiting = state.recovering.take().is_some();
            }
            Command::ResetStats if !state.leaving => state.tally.reset_stats(),
            Command::ResetHistograms if !state.leaving => state.tally.reset_histograms(),
            Command::Cache(change) => {
                let may_lag = match change {
                    CacheChange::Enable(enable) => enable.config.mode == Mode::WriteBack,
                    CacheChange::Configure(config, _) => config.mode == Mode::WriteBack,
                    CacheChange::Tune(mode, ..) => *mode == Mode::WriteBack,
                    _ => false,
                };
                if may_lag {
                    state.model.set_lags(true);
                    state.writes_through_since = None;
                }
                let copies = match change {
                    CacheChange::Tune(_, _, copies) => Some(*copies),
                    CacheChange::Configure(config, _) => Some(config.copies),
                    _ => None,
                };
                if let (Some(Copies::One), Some(owner)) = (copies, &mut state.owner) {
                    owner.doubled = false;
                }
            }
            _ => {}
        }
        if matches!(command, Command::Cache(CacheChange::Drain)) {
            self.note_quiet(disk);
        }
        if matches!(command, Command::Cache(CacheChange::DiscardDirty(_))) {
            self.report.discards += 1;
            self.forget(disk);
        }
        trace!(self, "command {id} disk {disk}: {command:?}");
        let asked = Asked { disk, given: self.clock, command: command.clone() };
        self.asked.insert(id, asked);
        self.engine.handle_command(self.now, id, DiskId(disk as u32), command);
        id
    }

    /// Tells the model that hob discarded the disk's dirty data. The backing keeps its data, but
    /// may still lose data that no flush has made durable.
    pub(super) fn forget(&mut self, disk: usize) {
        let state = &mut self.disks[disk];
        for held in [state.backing.now(), state.backing.durable()] {
            if let Err(violation) = state.model.forget(held) {
                self.found.get_or_insert(violation);
            }
        }
    }

    pub(super) fn draw_config(&mut self) -> CacheConfig {
        let policies: Vec<PolicyKind> = PolicyKind::all().collect();
        let blocks = 1 + (self.scenario.segment_bytes / 4096).ilog2().min(8);
        let mut config = CacheConfig::write_through(
            match self.rng.below(40) {
                0 => self.rng.pick(&[0, 512, 12_288, 2 << 20]),
                _ => 4096 << self.rng.below(u64::from(blocks)),
            },
            self.scenario.segment_bytes,
            self.rng.pick(&policies),
            self.draw_admission(),
        );
        if self.scenario.lives.is_some() {
            self.draw_write_back(&mut config);
        }
        if let Some(fills) = &mut self.fills {
            config.fill = fills.setting();
        }
        config
    }

    fn draw_write_back(&mut self, config: &mut CacheConfig) {
        use Mode::{PassThrough, ReadOnlyCache, WriteAround, WriteBack, WriteThrough};
        let modes = [
            WriteBack,
            WriteBack,
            WriteBack,
            WriteBack,
            WriteThrough,
            WriteAround,
            ReadOnlyCache,
            PassThrough,
        ];
        config.mode = self.rng.pick(&modes);
        if self.rng.chance(300) {
            config.layout = Layout::Split { read_permille: self.rng.between(100, 900) as u16 };
        }
        if self.flash.len() > 1 {
            config.copies = self.rng.pick(&[Copies::One, Copies::TwoOfDirty, Copies::TwoOfAll]);
            if self.options.peer && config.copies != Copies::One {
                config.copies = Copies::Peer;
            }
        }
        let start = self.rng.pick(&[0, 10, 100, 500, 900]);
        let full = self.rng.between(start, 1000) as u16;
        config.destage = Destage {
            order: self.rng.pick(&[DestageOrder::Elevator, DestageOrder::Coldest]),
            start_permille: start as u16,
            stop_permille: self.rng.between(0, start) as u16,
            full_permille: full,
            dirty_age_ms_max: self.rng.pick(&[0, 1, 100, 30_000]),
            io_bytes_max: self.rng.pick(&[4096, 64 << 10, 1 << 20]),
            ordered: self.rng.chance(200),
        };
    }

    fn draw_admission(&mut self) -> Admission {
        Admission {
            popularity: match self.rng.below(5) {
                0 => Popularity::NthAccess(2 + self.rng.below(3) as u8),
                1 => Popularity::Ghost,
                2 => Popularity::WhileFree,
                3 => Popularity::Auto,
                _ => Popularity::Always,
            },
            sequential_bytes_max: self.rng.chance(250).then(|| 4096 << self.rng.below(6)),
            filling_percent: self.rng.chance(250).then(|| 1 + self.rng.below(100) as u8),
            reads_only: self.rng.chance(200),
        }
    }

    /// Takes some free segments of the pool. The segments are rarely on fenced devices.
    pub(super) fn take_free(&mut self) -> Vec<Segment> {
        let careless = self.rng.chance(50);
        let mut wanted = self.rng.below(6) as usize;
        if self.scenario.lives.is_some() && wanted > 0 {
            wanted += 2;
        }
        let mut taken = vec![];
        while taken.len() < wanted {
            let reserve = self.scenario.lives.as_ref().map_or(0, |lives| lives.ring_reserve);
            let has_room = |device| self.free.iter().filter(|s| s.device == device).count() > reserve;
            let fit = |segment: &&Segment| {
                (careless || !self.fenced.contains(&segment.device)) && has_room(segment.device)
            };
            let fit: Vec<Segment> = self.free.iter().filter(fit).copied().collect();
            if fit.is_empty() {
                break;
            }
            let segment = fit[self.rng.below(fit.len() as u64) as usize];
            self.free.remove(&segment);
            taken.push(segment);
        }
        taken
    }
}
