//! Generates the load of a hardware-monitoring server: small hot spots far apart, with 95 % reads.
//! The model is the MSR Cambridge trace `hm_1`, as used in the Flash Read Cache study.
//!
//! Published: 600 000 requests, 95 % reads, mostly 4 KB. A cache of 4 GB with 4 KB blocks has 85 %
//! hits. Larger blocks in the same space have fewer hits, and 512 KB blocks are hardly better than
//! no cache. 600 000 requests of 4 KB cannot fill 4 GB, so the published hit ratio must be that of
//! a warm cache. The generator therefore starts with a warm-up that accesses the same spots.
//! Number, popularity and spread of the spots are fitted to the published curve over block sizes.

use super::common::{
    Arrivals, FOOTPRINT, HotSpots, PERCENT, RATE, SLOT_BYTES, THETA, WARMUP, draw_op, scaled,
};
use super::parameters::{Bytes, parameters};
use super::{Experiment, Generate, Load};
use crate::prng::Prng;
use hob_trace::Record;

parameters! {
    Hm {
        requests: u64 = 600_000, "requests measured";
        read_percent: f64 = 95.0, in PERCENT, "share of reads";
        small_percent: f64 = 95.0, in PERCENT, "share of hot spots of 4 KiB; the others have 8 or 16 KiB (published: mostly 4 KB)";
        spots: u64 = 1_280_000, "hot spots (fitted)";
        theta: f64 = 0.58, in THETA, "skew of the hot spots' popularity (fitted)";
        disk: Bytes = Bytes(128 << 30), in FOOTPRINT, "size of the disk over which the hot spots are scattered (fitted)";
        iops: f64 = 100.0, in RATE, "mean arrivals a second (published: a week of about one)";
        cache: Bytes = Bytes(4 << 30), "cache of the set-up";
        warmup_per_spot: f64 = 4.0, in WARMUP, "warm-up requests for each hot spot (fitted)";
    }
}

impl Generate for Hm {
    const NAME: &'static str = "hm";
    const SUMMARY: &'static str = "hardware monitoring: small scattered hot spots, 95 % reads";
    const SOURCE: &'static str = "vSphere Flash Read Cache study, MSR Cambridge hm_1";

    fn experiment(&self) -> Result<Experiment, String> {
        let disk_bytes = scaled(self.disk, self.scale, SLOT_BYTES);
        let count = (self.spots / self.scale).max(1);
        let spots = HotSpots::new(count, disk_bytes, self.theta, self.small_percent, self.seed)?;
        let warmup = (self.warmup_per_spot * count as f64) as u64;
        let (iops, read_percent) = (self.iops, self.read_percent);
        let (mut dice, mut arrivals) = (Prng::new(self.seed), Arrivals::new());
        let records = (0..warmup.saturating_add(self.requests)).map(move |_| {
            let at_ns = arrivals.next(iops, &mut dice);
            let (offset, len) = spots.draw(&mut dice);
            Record { at_ns, offset, len, op: draw_op(read_percent, &mut dice), disk: 0 }
        });
        Ok(Experiment {
            disks: vec![disk_bytes],
            cache_bytes: self.cache.0 / self.scale,
            block_bytes: 4096,
            warmup,
            load: Load::Open(Box::new(records)),
        })
    }
}
