//! Generates independent requests with Zipf-distributed locations. Disks of VMs have a similar load
//! with a skew of 0.8–1.2.

use super::common::{Arrivals, FOOTPRINT, PERCENT, RATE, REQUEST, THETA, check_sectors, scaled};
use super::parameters::{Bytes, parameters};
use super::{Experiment, Generate, Load};
use crate::prng::Prng;
use crate::workload::{Workload, WorkloadConfig};
use hob_trace::Record;

parameters! {
    ZipfLoad {
        requests: u64 = 1_000_000, "number of requests";
        footprint: Bytes = Bytes(16 << 30), in FOOTPRINT, "bytes of the disk that the requests cover";
        io: Bytes = Bytes(4096), in REQUEST, "size of a request";
        theta: f64 = 1.0, in THETA, "skew of the Zipf distribution; 0 is uniform";
        read_percent: f64 = 100.0, in PERCENT, "share of reads, rounded to a tenth";
        iops: f64 = 1000.0, in RATE, "mean arrivals a second";
        cache: Bytes = Bytes(16 << 30 >> 3), "cache of the set-up";
    }
}

impl Generate for ZipfLoad {
    const NAME: &'static str = "zipf";
    const SUMMARY: &'static str = "independent requests, places by Zipf's law";
    const SOURCE: &'static str = "the usual model of block popularity";

    fn experiment(&self) -> Result<Experiment, String> {
        check_sectors("io", self.io)?;
        let footprint_bytes = scaled(self.footprint, self.scale, self.io.0);
        let workload = Workload::new(&WorkloadConfig {
            footprint_bytes,
            request_bytes: self.io.0 as u32,
            theta: self.theta,
            read_permille: (self.read_percent * 10.0).round() as u16,
            seed: self.seed,
        });
        let (mut arrivals, mut dice, iops) = (Arrivals::new(), Prng::new(!self.seed), self.iops);
        let requests = usize::try_from(self.requests).unwrap_or(usize::MAX);
        let records = workload.take(requests).map(move |access| Record {
            at_ns: arrivals.next(iops, &mut dice),
            offset: access.offset,
            len: access.len,
            op: access.op,
            disk: 0,
        });
        Ok(Experiment {
            disks: vec![footprint_bytes],
            cache_bytes: self.cache.0 / self.scale,
            block_bytes: 4096,
            warmup: 0,
            load: Load::Open(Box::new(records)),
        })
    }
}
