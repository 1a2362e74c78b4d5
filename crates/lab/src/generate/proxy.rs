//! Generates the load of a web proxy: small hot spots, with a third of the requests being writes.
//! The model is the MSR Cambridge trace `prxy`, as used in the Flash Read Cache study.
//!
//! Published: about 5 million requests, 67 % reads, mostly 4 KB. A cache of 16 GB with 4 KB blocks
//! has 83 % hits. Number and popularity of the spots are fitted to this hit ratio of a warm cache.
//! [`hm`](super::hm) explains why the cache is warm.

use super::common::{FOOTPRINT, PERCENT, RATE, THETA, WARMUP};
use super::hm::Hm;
use super::parameters::{Bytes, parameters};
use super::{Experiment, Generate};

parameters! {
    Proxy {
        requests: u64 = 5_000_000, "requests measured";
        read_percent: f64 = 67.0, in PERCENT, "share of reads";
        small_percent: f64 = 95.0, in PERCENT, "share of hot spots of 4 KiB; the others have 8 or 16 KiB (published: mostly 4 KB)";
        spots: u64 = 5_500_000, "hot spots (fitted)";
        theta: f64 = 0.6, in THETA, "skew of the hot spots' popularity (fitted)";
        disk: Bytes = Bytes(512 << 30), in FOOTPRINT, "size of the disk over which the hot spots are scattered (fitted)";
        iops: f64 = 300.0, in RATE, "mean arrivals a second (published: a week of about eight)";
        cache: Bytes = Bytes(16 << 30), "cache of the set-up";
        warmup_per_spot: f64 = 4.0, in WARMUP, "warm-up requests for each hot spot (fitted)";
    }
}

impl Generate for Proxy {
    const NAME: &'static str = "proxy";
    const SUMMARY: &'static str = "web proxy: small scattered hot spots, 67 % reads";
    const SOURCE: &'static str = "vSphere Flash Read Cache study, MSR Cambridge prxy";

    fn experiment(&self) -> Result<Experiment, String> {
        let Proxy { requests, read_percent, small_percent, spots, theta, disk, .. } = *self;
        let Proxy { iops, cache, warmup_per_spot, scale, seed, .. } = *self;
        let load = Hm {
            requests,
            read_percent,
            small_percent,
            spots,
            theta,
            disk,
            iops,
            cache,
            warmup_per_spot,
            scale,
            seed,
        };
        load.experiment()
    }
}
