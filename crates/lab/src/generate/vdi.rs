//! Generates the load of virtual desktops: a boot storm, a login storm, and then the working day.
//!
//! Published: 200 desktops on 100 GB. Each desktop does 1.34 reads of 14 KB and 7.58 writes of 12
//! KB per second (15 and 85 %), and the peak is 3848 I/Os per second. The generator assumes that
//! the peak is the boot storm. Desktops are linked clones: all boot from one image (disk 0), and
//! each writes to its own disk (disks 1, 2 …). The lengths and read shares of the storms, the image
//! and the skew are assumptions.

use super::common::{Arrivals, FOOTPRINT, PERCENT, RATE, SECONDS, SECTOR, THETA, draw_op, draw_size, scaled};
use super::parameters::{Bytes, parameters, within};
use super::{Experiment, Generate, Load};
use crate::prng::Prng;
use crate::workload::{Scatter, Zipf};
use hob_trace::{Op, Record};

parameters! {
    Vdi {
        desktops: u64 = 200, in 1..=60_000, "desktops";
        read_iops: f64 = 1.34, in RATE, "reads a second of a desktop at work";
        write_iops: f64 = 7.58, in RATE, "writes a second of a desktop at work";
        read_size: Bytes = Bytes(14 << 10), in Bytes(SECTOR)..=Bytes(PAGE / 2), "mean size of a read";
        write_size: Bytes = Bytes(12 << 10), in Bytes(SECTOR)..=Bytes(PAGE / 2), "mean size of a write";
        boot_s: f64 = 60.0, in SECONDS, "length of the boot storm, seconds (chosen)";
        boot_iops: f64 = 19.24, in RATE, "I/Os a second of a booting desktop: the published peak over all of them";
        boot_read_percent: f64 = 85.0, in PERCENT, "share of reads while booting (chosen)";
        login_s: f64 = 120.0, in SECONDS, "length of the log-in storm, seconds (chosen)";
        login_iops: f64 = 14.0, in RATE, "I/Os a second of a desktop whose user logs in (chosen)";
        login_read_percent: f64 = 50.0, in PERCENT, "share of reads while logging in (chosen)";
        image_reads_percent: f64 = 100.0, in PERCENT, "share of the storms' reads that go to the image (chosen)";
        work_s: f64 = 600.0, in SECONDS, "length of the working day after the storms, seconds";
        data: Bytes = Bytes(100 << 30), in FOOTPRINT, "size of the image and the data of all desktops together";
        image: Bytes = Bytes(4 << 30), "size of the image that all desktops share (chosen)";
        theta: f64 = 1.0, in THETA, "skew over the pages of 64 KiB of the image and of a desktop (chosen)";
        cache: Bytes = Bytes(100 << 30), "cache of the set-up";
    }
}

const PAGE: u64 = 64 << 10;

impl Generate for Vdi {
    const NAME: &'static str = "vdi";
    const SUMMARY: &'static str = "virtual desktops: boot storm, log-in storm, then mostly small writes";
    const SOURCE: &'static str = "EMC FAST Cache study, 200 virtual desktops";

    fn experiment(&self) -> Result<Experiment, String> {
        within("image", self.image, Bytes(PAGE)..=Bytes(self.data.0 - PAGE))?;
        let image = scaled(self.image, self.scale, PAGE);
        let own = scaled(Bytes((self.data.0 - self.image.0) / self.desktops), self.scale, PAGE);
        let desktops = Desktops {
            config: self.clone(),
            image: Pages::new(image / PAGE, self.theta, self.seed),
            own: Pages::new(own / PAGE, self.theta, self.seed.wrapping_add(1)),
            arrivals: Arrivals::new(),
            dice: Prng::new(self.seed),
        };
        let disks = std::iter::once(image).chain((0..self.desktops).map(|_| own)).collect();
        Ok(Experiment {
            disks,
            cache_bytes: self.cache.0 / self.scale,
            block_bytes: PAGE as u32,
            warmup: 0,
            load: Load::Open(Box::new(desktops)),
        })
    }
}

/// Pages of a disk. Their popularity follows Zipf's law.
struct Pages {
    popularity: Zipf,
    places: Scatter,
}

impl Pages {
    fn new(pages: u64, theta: f64, seed: u64) -> Self {
        Pages { popularity: Zipf::new(pages, theta), places: Scatter::new(pages, seed) }
    }

    /// Returns the offset of `len` bytes inside a random page.
    fn draw(&self, len: u32, dice: &mut Prng) -> u64 {
        let page = self.places.place(self.popularity.rank(dice));
        page * PAGE + dice.below((PAGE - u64::from(len)) / SECTOR + 1) * SECTOR
    }
}

struct Desktops {
    config: Vdi,
    image: Pages,
    own: Pages,
    arrivals: Arrivals,
    dice: Prng,
}

impl Desktops {
    /// Returns the I/Os per second of one desktop in the present phase of the day, the share of
    /// reads, and true if the reads go to the image. Returns `None` at the end of the day.
    fn phase(&self) -> Option<(f64, f64, bool)> {
        let c = &self.config;
        let now = self.arrivals.now_s();
        let work = c.read_iops + c.write_iops;
        [
            (c.boot_s, (c.boot_iops, c.boot_read_percent, true)),
            (c.boot_s + c.login_s, (c.login_iops, c.login_read_percent, true)),
            (c.boot_s + c.login_s + c.work_s, (work, c.read_iops / work * 100.0, false)),
        ]
        .into_iter()
        .find_map(|(until, phase)| (now < until).then_some(phase))
    }
}

impl Iterator for Desktops {
    type Item = Record;

    fn next(&mut self) -> Option<Record> {
        let (iops, read_percent, from_image) = self.phase()?;
        let at_ns = self.arrivals.next(iops * self.config.desktops as f64, &mut self.dice);
        let dice = &mut self.dice;
        let desktop = dice.below(self.config.desktops);
        let op = draw_op(read_percent, dice);
        let mean = if op == Op::Read { self.config.read_size } else { self.config.write_size };
        let len = draw_size(mean.0, dice);
        let image_percent = self.config.image_reads_percent;
        // If the share is 100 %, no random number is drawn.
        let from_image = from_image && (image_percent == 100.0 || dice.unit() * 100.0 < image_percent);
        Some(if op == Op::Read && from_image {
            Record { at_ns, offset: self.image.draw(len, dice), len, op, disk: 0 }
        } else {
            Record { at_ns, offset: self.own.draw(len, dice), len, op, disk: 1 + desktop as u16 }
        })
    }
}
