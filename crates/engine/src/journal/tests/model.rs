//! A very simple cache that follows the rules of a [`Writer`], with a power cut at the end. After
//! recovery, the disk must have allowed content: for each sector the last flushed content or a
//! later write, with intact dirty data.

use std::collections::BTreeMap;

use super::*;

/// Content of flash or the backing that is a mixture of two writes.
const TORN: u32 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sector {
    sum: u32,
    dirty: bool,
    unproven: bool,
}

#[derive(Clone, Debug, Default)]
struct Frame {
    block: Option<u32>,
    second: bool,
    sectors: Vec<Option<Sector>>,
}

struct World {
    rng: SimRng,
    shift: u32,
    segment_frames: u32,
    ordinals: Vec<u32>,
    two_copies_of_dirty: bool,
    writer: Writer,
    frames: Vec<Frame>,
    /// Whether each cache sector is held (not overwritten until a commit).
    held: Vec<bool>,
    /// Number of the last change that made each cache sector dirty.
    held_by: Vec<u64>,
    /// Changes after which sectors are not held any more, and these sectors.
    releases: Vec<(u64, usize)>,
    /// Durable content of each cache sector, and other contents that it may have.
    flash: Vec<u32>,
    volatile: BTreeMap<usize, Vec<u32>>,
    /// Copies of the ring: durable pages, and pages that they may have instead.
    ring: Vec<Vec<Option<Vec<u8>>>>,
    in_flight: Vec<(u64, usize, usize, Vec<u8>)>,
    /// For each sealed page, the number of changes that it records.
    recorded: BTreeMap<u64, u64>,
    recorded_durably: u64,
    /// Content of each sector of the disk on the backing.
    backing: Vec<u32>,
    /// Contents that a guest may read, the last flushed content first.
    versions: Vec<Vec<u32>>,
    last: u32,
}

const BLOCKS: usize = 14;

impl World {
    fn new(seed: u64) -> World {
        let mut rng = SimRng(seed);
        let shift = [0, 0, 1, 2][rng.below(4)];
        let segment_frames = [1, 4, 8][rng.below(3)];
        let segments = 2 + rng.below(if segment_frames == 1 { 10 } else { 3 });
        let ordinals: Vec<u32> =
            (0..segments as u32).map(|i| (i * 5 + 2) % (3 * segments as u32 + 1)).collect();
        let ordinals: Vec<u32> = ordinals.iter().enumerate().map(|(i, o)| o * 100 + i as u32).collect();
        let frames = segments * segment_frames as usize;
        let page_frames = [1, 3, 1000][rng.below(3)];
        let dump = (frames as u64).div_ceil(page_frames);
        let limits = Limits {
            changes: [1, 2, 5, CHANGES_MAX][rng.below(4)],
            frames: page_frames as u32,
            uncommitted: 2 + rng.below(6) as u64,
        };
        let pages = 2 * dump + 2 * limits.uncommitted - 1;
        // Relative to these limits, not to those of real rings.
        let of = descriptor(shift, segment_frames, &ordinals);
        let mut writer = Writer::new(of, pages.max(64));
        writer.limits = limits;
        writer.set_pages(pages);
        let copies = 1 + rng.below(2);
        let sectors = frames << shift;
        World {
            two_copies_of_dirty: shift == 0 && rng.one_in(2),
            rng,
            shift,
            segment_frames,
            ordinals,
            writer,
            frames: vec![Frame { sectors: vec![None; 1 << shift], ..Frame::default() }; frames],
            held: vec![false; sectors],
            held_by: vec![0; sectors],
            releases: Vec::new(),
            flash: (0..sectors).map(|i| 1_000_000 + i as u32).collect(),
            volatile: BTreeMap::new(),
            ring: vec![vec![None; pages as usize]; copies],
            in_flight: Vec::new(),
            recorded: BTreeMap::new(),
            recorded_durably: 0,
            backing: (0..BLOCKS << shift).map(|i| 2_000_000 + i as u32).collect(),
            versions: (0..BLOCKS << shift).map(|i| vec![2_000_000 + i as u32]).collect(),
            last: 0,
        }
    }

    /// Returns the block number; blocks are in several zones.
    fn block_no(&self, block: u32) -> BlockNo {
        BlockNo((block % 5 * 256 + block / 5 * 8) >> self.shift)
    }

    fn byte(&self, block: u32) -> u64 {
        u64::from(self.block_no(block).0) * (4096 << self.shift)
    }

    fn index(&self) -> Index {
        let mut restoring = Restoring::new(self.frames.len() as u32, self.shift);
        for (f, frame) in self.frames.iter().enumerate() {
            let Some(block) = frame.block else { continue };
            let copy = if frame.second { Copy::Second } else { Copy::First };
            restoring.place(FrameNo(f as u32), self.block_no(block), copy);
            for (i, sector) in frame.sectors.iter().enumerate() {
                let Some(sector) = sector else { continue };
                let at = ((f << self.shift) + i) as u64;
                restoring.set(at, sector.sum, sector.dirty);
                if sector.unproven {
                    restoring.set_unproven(at);
                }
            }
        }
        restoring.finish(self.frames.len() as u32)
    }

    fn seal(&mut self) {
        if self.writer.must_wait() {
            self.commit_sealed();
        }
        let index = self.index();
        let mut page = Vec::new();
        let sequence = self.writer.seal(&index, &mut page);
        assert_eq!(page.len(), PAGE_BYTES);
        let number = self.writer.page_number(sequence) as usize;
        for copy in 0..self.ring.len() {
            self.in_flight.push((sequence, copy, number, page.clone()));
        }
        self.recorded.insert(sequence, self.writer.recorded());
    }

    /// Makes the sealed pages and all data durable.
    fn commit_sealed(&mut self) {
        self.commit_upto(self.writer.sealed());
    }

    /// Makes pages up to this one and all data durable.
    fn commit_upto(&mut self, upto: u64) {
        for (sequence, copy, number, page) in std::mem::take(&mut self.in_flight) {
            match sequence <= upto {
                true => self.ring[copy][number] = Some(page),
                false => self.in_flight.push((sequence, copy, number, page)),
            }
        }
        for (sector, contents) in std::mem::take(&mut self.volatile) {
            self.flash[sector] = *contents.last().unwrap();
        }
        self.writer.committed(upto);
        self.recorded_durably = self.recorded_durably.max(self.recorded[&upto]);
        let releases = std::mem::take(&mut self.releases);
        for (after, sector) in releases {
            match after <= self.recorded_durably {
                true if after < self.held_by[sector] => {}
                true => self.held[sector] = self.sector(sector).is_some_and(|sector| sector.dirty),
                false => self.releases.push((after, sector)),
            }
        }
    }

    /// Processes a guest's flush.
    fn flush(&mut self) {
        // A page of the daemon has room for these records of one sector.
        if self.writer.limits.changes >= 4 {
            self.record_rewritten();
        }
        while self.writer.pending() > 0 || self.writer.sealed() == 0 {
            self.seal();
        }
        self.commit_sealed();
        self.versions.iter_mut().for_each(|versions| _ = versions.drain(..versions.len() - 1));
    }

    fn create(&mut self) {
        while !self.writer.first_dump_done() {
            self.seal();
        }
        self.commit_sealed();
        self.seal();
        self.commit_sealed();
        assert!(self.writer.exists());
    }

    fn sector(&self, sector: usize) -> Option<Sector> {
        self.frames[sector >> self.shift].sectors[sector % (1 << self.shift)]
    }

    fn frame_of(&self, block: u32, second: bool) -> Option<usize> {
        self.frames.iter().position(|frame| frame.block == Some(block) && frame.second == second)
    }

    fn is_pinned(&self, frame: usize) -> bool {
        self.held[frame << self.shift..(frame + 1) << self.shift].contains(&true)
    }

    /// Returns a free frame, if necessary after the eviction of another block.
    fn free_frame(&mut self, but: u32) -> Option<usize> {
        let start = self.rng.below(self.frames.len());
        let order = (start..self.frames.len()).chain(0..start);
        let free: Vec<usize> =
            order.filter(|f| !self.is_pinned(*f) && self.frames[*f].block != Some(but)).collect();
        let unused = free.iter().copied().find(|f| self.frames[*f].block.is_none());
        let frame = unused.or(free.first().copied())?;
        if self.frames[frame].block.is_some() {
            self.evict(frame);
        }
        Some(frame)
    }

    /// Evicts clean data, and records this at once, because a zone may lose its bypass mark before
    /// the next block's record.
    fn evict(&mut self, frame: usize) {
        let block = self.frames[frame].block.expect("in use");
        self.frames[frame] = Frame { sectors: vec![None; 1 << self.shift], ..Frame::default() };
        self.push_all(frame, block, |frame, block, first, count| Change::Drop { frame, block, first, count });
    }

    fn push_all(&mut self, frame: usize, block: u32, change: impl Fn(FrameNo, BlockNo, u8, u16) -> Change) {
        self.push_range(frame, block, 0, 1 << self.shift, change);
    }

    fn push_range(
        &mut self,
        frame: usize,
        block: u32,
        first: usize,
        count: usize,
        change: impl Fn(FrameNo, BlockNo, u8, u16) -> Change,
    ) {
        let block = self.block_no(block);
        self.writer.push(change(FrameNo(frame as u32), block, first as u8, count as u16));
    }

    fn put(&mut self, frame: usize, block: u32, i: usize, sum: u32, dirty: bool, second: bool) {
        let sector = (frame << self.shift) + i;
        self.volatile.entry(sector).or_default().push(sum);
        let set = self.writer.pushed() + 1;
        let slot = &mut self.frames[frame];
        (slot.block, slot.second) = (Some(block), second);
        if let Some(Sector { unproven: true, sum: before, .. }) = &mut slot.sectors[i] {
            // The journal records that the checksum is unknown.
            assert!(dirty);
            *before = sum;
            return;
        }
        slot.sectors[i] = Some(Sector { sum, dirty, unproven: false });
        if dirty {
            self.held[sector] = true;
            self.held_by[sector] = set;
        }
        let (frame, block, sector) = (FrameNo(frame as u32), self.block_no(block), i as u8);
        self.writer.push(Change::Set { frame, block, sector, sum, dirty, second, units: u8::MAX });
    }

    /// Writes one sector to flash.
    fn write(&mut self, block: u32, i: usize) {
        let copies = [false, true].into_iter().take(if self.two_copies_of_dirty { 2 } else { 1 });
        let mut places: Vec<(usize, bool)> = Vec::new();
        for second in copies {
            let taken = |frame: &usize| places.iter().all(|(other, _)| other != frame);
            let Some(frame) = self.frame_of(block, second).or_else(|| self.free_frame(block).filter(taken))
            else {
                return;
            };
            places.push((frame, second));
        }
        for (frame, _) in &places {
            self.prepare(*frame, block, i);
        }
        self.last += 1;
        for (frame, second) in places {
            if self.sector((frame << self.shift) + i).is_some() {
                self.volatile.entry((frame << self.shift) + i).or_default().push(TORN);
            }
            self.put(frame, block, i, self.last, true, second);
        }
        self.versions[((block as usize) << self.shift) + i].push(self.last);
    }

    /// Prepares a sector so that it may be overwritten.
    fn prepare(&mut self, frame: usize, block: u32, i: usize) {
        let at = (frame << self.shift) + i;
        match self.sector(at) {
            _ if !self.held[at] => {}
            Some(Sector { dirty: true, unproven: true, .. }) => {}
            Some(was) if was.dirty => {
                if !self.writer.is_committed(FrameNo(frame as u32), i as u8) {
                    self.commit_all();
                }
                self.make_unproven(frame, block, i);
                self.make_others_unproven();
                self.commit_all();
            }
            // The sector is clean or invalid, and this is not durable.
            _ => self.commit_all(),
        }
    }

    fn make_unproven(&mut self, frame: usize, block: u32, i: usize) {
        let sector = self.frames[frame].sectors[i].as_mut().expect("dirty");
        sector.unproven = true;
        self.push_range(frame, block, i, 1, unproven(false));
    }

    /// Makes some sectors unproven that are not overwritten now. All copies of a sector become
    /// unproven together.
    fn make_others_unproven(&mut self) {
        for _ in 0..self.rng.below(4) {
            let (block, i) = (self.rng.below(BLOCKS) as u32, self.rng.below(1 << self.shift));
            let frames: Vec<usize> =
                [false, true].into_iter().filter_map(|second| self.frame_of(block, second)).collect();
            let may = frames.iter().all(|frame| {
                self.frames[*frame].sectors[i].is_some_and(|sector| sector.dirty && !sector.unproven)
                    && self.writer.is_committed(FrameNo(*frame as u32), i as u8)
            });
            if may {
                frames.iter().for_each(|frame| self.make_unproven(*frame, block, i));
            }
        }
    }

    /// Records the newest checksums of sectors with two copies that stay unproven.
    fn record_rewritten(&mut self) {
        for at in 0..BLOCKS << self.shift {
            let (block, i) = ((at >> self.shift) as u32, at % (1 << self.shift));
            let [Some(first), Some(second)] = [false, true].map(|second| self.frame_of(block, second)) else {
                continue;
            };
            let copies = [(first, false), (second, true)];
            let sectors = copies.map(|(frame, _)| self.frames[frame].sectors[i]);
            if sectors.iter().any(|sector| sector.is_none_or(|sector| !sector.unproven)) || self.rng.one_in(3)
            {
                continue;
            }
            for (frame, second) in copies {
                let sum = self.frames[frame].sectors[i].expect("unproven").sum;
                self.held_by[(frame << self.shift) + i] = self.writer.pushed() + 1;
                let (block, sector) = (self.block_no(block), i as u8);
                let frame = FrameNo(frame as u32);
                self.writer.push(Change::Set {
                    frame,
                    block,
                    sector,
                    sum,
                    dirty: true,
                    second,
                    units: u8::MAX,
                });
            }
            copies.iter().for_each(|(frame, _)| self.push_range(*frame, block, i, 1, unproven(true)));
        }
    }

    fn commit_all(&mut self) {
        while self.writer.pending() > 0 {
            self.seal();
        }
        self.commit_sealed();
    }

    /// Fills a sector from the backing.
    fn fill(&mut self, block: u32, i: usize) {
        let Some(frame) = self.frame_of(block, false).or_else(|| self.free_frame(block)) else { return };
        let sector = (frame << self.shift) + i;
        if self.sector(sector).is_none() && !self.held[sector] {
            let sum = self.backing[((block as usize) << self.shift) + i];
            self.put(frame, block, i, sum, false, false);
        }
    }

    /// Destages a dirty sector.
    fn destage(&mut self, block: u32, i: usize) {
        let Some(frame) = self.frame_of(block, false) else { return };
        let at = (frame << self.shift) + i;
        let Some(sector) = self.sector(at).filter(|sector| sector.dirty) else { return };
        if !self.writer.is_committed(FrameNo(frame as u32), i as u8) {
            return;
        }
        self.backing[((block as usize) << self.shift) + i] = sector.sum;
        self.frames[frame].sectors[i] = Some(Sector { dirty: false, unproven: false, ..sector });
        let (number, frame_no) = (self.block_no(block), FrameNo(frame as u32));
        self.writer.push(match sector.unproven {
            true => Change::Set {
                frame: frame_no,
                block: number,
                sector: i as u8,
                sum: sector.sum,
                dirty: false,
                second: false,
                units: u8::MAX,
            },
            false => Change::Clean { frame: frame_no, block: number, first: i as u8, count: 1 },
        });
        self.releases.push((self.writer.pushed(), at));
        if let Some(second) = self.frame_of(block, true) {
            self.drop_frame(second);
        }
    }

    fn drop_frame(&mut self, frame: usize) {
        self.evict(frame);
        let number = self.writer.pushed();
        let sectors = frame << self.shift..(frame + 1) << self.shift;
        self.releases.extend(sectors.map(|sector| (number, sector)));
    }

    /// Writes a sector with the cache bypassed.
    fn write_past(&mut self, block: u32, i: usize) {
        let zone = Writer::zone_of(DISK_BYTES, self.byte(block));
        if !self.writer.is_marked(zone) {
            self.writer.mark(zone);
            self.seal();
            self.commit_sealed();
        }
        self.last += 1;
        let at = ((block as usize) << self.shift) + i;
        self.backing[at] = self.last;
        self.versions[at].push(self.last);
        if self.rng.one_in(8) {
            // A power failure in between.
            return;
        }
        if let Some(frame) = self.frame_of(block, false) {
            let sector = (frame << self.shift) + i;
            if self.shift == 0 {
                self.drop_frame(frame);
                self.frame_of(block, true).into_iter().for_each(|second| self.drop_frame(second));
            } else if self.sector(sector).is_some() {
                self.frames[frame].sectors[i] = None;
                self.push_range(frame, block, i, 1, |frame, block, first, count| Change::Drop {
                    frame,
                    block,
                    first,
                    count,
                });
                self.releases.push((self.writer.pushed(), sector));
            }
        }
    }

    /// Runs one step. Returns false if the power must fail now.
    fn step(&mut self) -> bool {
        let block = self.rng.below(BLOCKS) as u32;
        let i = self.rng.below(1 << self.shift);
        match self.rng.below(24) {
            0..=6 => self.write(block, i),
            7..=10 => self.fill(block, i),
            11..=14 => self.destage(block, i),
            15 => {
                let before = self.versions.clone();
                self.write_past(block, i);
                let at = ((block as usize) << self.shift) + i;
                let is_there = self.frame_of(block, false).is_some_and(|frame| {
                    self.frames[frame].sectors[i].is_some() && before[at] != self.versions[at]
                });
                return !is_there;
            }
            16 => {
                let zone = self.rng.below(5);
                self.writer.unmark(zone);
            }
            17..=20 => self.seal(),
            21 => self.commit_some(),
            _ => self.flush(),
        }
        true
    }

    /// Makes some of the pages in flight durable.
    fn commit_some(&mut self) {
        let upto = self.writer.sealed() - self.rng.below(3) as u64;
        if self.in_flight.iter().any(|(sequence, ..)| *sequence <= upto) {
            self.commit_upto(upto);
        }
    }

    /// Simulates a power failure: pages and data in flight may or may not be durable.
    fn cut(&mut self) {
        for (_, copy, number, page) in std::mem::take(&mut self.in_flight) {
            let old = self.ring[copy][number].clone().unwrap_or(vec![0; PAGE_BYTES]);
            self.ring[copy][number] = match self.rng.below(5) {
                0 => continue,
                1 => {
                    let mut mixed = old;
                    for unit in 0..8 {
                        if self.rng.one_in(2) {
                            mixed[unit * 512..][..512].copy_from_slice(&page[unit * 512..][..512]);
                        }
                    }
                    Some(mixed)
                }
                _ => Some(page),
            };
        }
        for (sector, contents) in std::mem::take(&mut self.volatile) {
            match self.rng.below(4) {
                0 => {}
                1 => self.flash[sector] = TORN,
                _ => self.flash[sector] = contents[self.rng.below(contents.len())],
            }
        }
    }

    fn recover(&self) -> Recovered {
        let Ring::Whole(plan) = survey(&self.ring) else { panic!("the ring is not whole") };
        assert_eq!(plan.disk_bytes, DISK_BYTES);
        let doubtful = plan.doubtful.clone();
        let segment_bytes = u64::from(self.segment_frames) * (4096 << self.shift);
        let mut replay = replay(plan, &self.ring, segment_bytes, &self.ordinals).unwrap();
        let per_segment = u64::from(self.segment_frames) << self.shift;
        let sums: Vec<Option<u32>> = replay
            .to_prove()
            .iter()
            .map(|(segment, sector)| {
                let at = u64::from(*segment) * per_segment + sector;
                Some(self.sum_on_flash(at))
            })
            .collect();
        let recovered = replay.finish(&sums);
        let is_known = recovered.dirty().all(|dirty| doubtful.contains(dirty.sector));
        assert!(is_known, "the first reading missed something dirty");
        recovered
    }

    /// Returns the checksum of a sector's content on flash. A mixture of two writes has a checksum
    /// of its own.
    fn sum_on_flash(&self, sector: u64) -> u32 {
        match self.flash[sector as usize] {
            TORN => 3_000_000 + sector as u32,
            sum => sum,
        }
    }

    /// Checks that a guest reads an allowed content.
    fn check(&self, recovered: &Recovered) {
        let index = &recovered.index;
        for block in 0..BLOCKS as u32 {
            let frame = index.find(self.block_no(block));
            for i in 0..1usize << self.shift {
                let at = ((block as usize) << self.shift) + i;
                let sector = frame.map(|frame| index.first_sector(frame) + i as u64);
                let sector = sector.filter(|sector| index.is_valid(*sector));
                let Some(sector) = sector else {
                    assert!(self.versions[at].contains(&self.backing[at]), "block {block} sector {i}: lost");
                    continue;
                };
                let flash = self.flash[sector as usize];
                assert_eq!(index.is_held(sector), index.is_dirty(sector));
                if index.is_unproven(sector) {
                    let known = flash == TORN || self.versions[at].contains(&flash);
                    assert!(index.is_dirty(sector) && known, "block {block} sector {i}: unproven {flash}");
                    let second = index.second_sector(sector).filter(|second| index.is_valid(*second));
                    assert_eq!(second, None, "copies that nothing proves are decided between");
                } else if index.is_dirty(sector) {
                    // One of two copies may be damaged, which its checksum shows.
                    let second = index.second_sector(sector).filter(|second| index.is_valid(*second));
                    let copies = std::iter::once(sector).chain(second);
                    let good: Vec<u64> =
                        copies.filter(|copy| self.sum_on_flash(*copy) == index.sum(sector)).collect();
                    assert!(
                        !good.is_empty(),
                        "block {block} sector {i}: dirty and damaged, flash has {flash}"
                    );
                    // If no copy has a known checksum, even a mixture may be used.
                    let is_mixed = good.iter().any(|copy| self.flash[*copy as usize] == TORN);
                    let known = is_mixed || self.versions[at].contains(&index.sum(sector));
                    assert!(known, "block {block} sector {i}: dirty and stale");
                } else if flash == index.sum(sector) {
                    assert_eq!(flash, self.backing[at], "block {block} sector {i}: clean and stale");
                    assert!(self.versions[at].contains(&flash));
                } else {
                    assert!(self.versions[at].contains(&self.backing[at]));
                }
                if let Some(second) = index.second_of(frame.unwrap()).map(|second| index.first_sector(second))
                {
                    assert!(self.two_copies_of_dirty);
                    if index.is_valid(second) {
                        assert_eq!(index.sum(second), index.sum(sector));
                    }
                }
            }
        }
    }
}

fn unproven(after_set: bool) -> impl Fn(FrameNo, BlockNo, u8, u16) -> Change {
    move |frame, block, first, count| Change::Unproven { frame, block, first, count, after_set }
}

fn run(seed: u64) {
    let mut world = World::new(seed);
    world.create();
    let steps = world.rng.below(400);
    for _ in 0..steps {
        if !world.step() {
            break;
        }
    }
    world.cut();
    let recovered = world.recover();
    world.check(&recovered);
}

#[test]
fn the_recovered_disk_has_allowed_content() {
    for seed in 0..15_000 {
        if let Err(panic) = std::panic::catch_unwind(|| run(seed)) {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
