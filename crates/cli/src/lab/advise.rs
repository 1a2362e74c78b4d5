//! `hob lab advise TRACE`: the recommended cache for a disk, from a trace.

use std::path::PathBuf;

use clap::Args;
use hob_lab::advise::{Backing, Endurance, Flash, Options, advise, page, text};

use super::share::{BLOCK_BYTES, Comparison, Division, compare};
use super::sim::CacheSize;
use super::{Source, interruption, read_material, with_progress, write_if};
use crate::Global;
use crate::output::print;

/// Recommend a cache for a disk: size, block size and policy, with the expected effect
///
/// Computes miss-ratio curves of the trace, simulates the promising caches with the daemon's engine, and replays a part
/// of the trace in virtual time on models of backing and flash. Also reports if no cache helps. With --share:
/// recommends the size of one pool for all disks of the traces, with the policy s3-fifo.
#[derive(Debug, Args)]
pub(crate) struct Advise {
    #[command(flatten)]
    source: Source,
    /// Share of the reads that flash should serve, for example 85% [default: 90 % of the share that
    /// the best cache could serve]
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    target_hit: Option<f64>,
    /// Type of the backing: 7.2k-raid5, 10k-raid5, 15k-raid5, ceph, nfs, cloud-general,
    /// cloud-provisioned or fixed:READ_MS,WRITE_MS [default: 7.2k-raid5]
    #[arg(long, conflicts_with = "share")]
    backing: Option<Backing>,
    /// Type of the cache's flash: sata, pcie, sata-current, nvme4 or nvme5 [default: sata]
    #[arg(long, conflicts_with = "share")]
    flash: Option<Flash>,
    /// Endurance of the flash: drive writes per day over five years, for a device of the cache's
    /// size, or total terabytes, like 600TBW [default: 1DWPD]
    #[arg(long, value_name = "RATING", conflicts_with = "share")]
    endurance: Option<Endurance>,
    /// Maximum number of requests to use, from the trace's start; a million requests need 24 MB of
    /// memory
    #[arg(
        long,
        value_name = "N",
        default_value_t = 20_000_000,
        value_parser = clap::value_parser!(u32).range(1..),
        conflicts_with = "share"
    )]
    requests_max: u32,
    #[command(flatten)]
    division: Division,
    /// Also write the advice with plots as an HTML page
    #[arg(long, value_name = "FILE", conflicts_with = "share")]
    html: Option<PathBuf>,
}

/// Parses a share: 85%, 85 % or 0.85.
pub(crate) fn percent(text: &str) -> Result<f64, String> {
    let (number, whole) = text.trim().strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    let share = number.trim().parse::<f64>().ok().map(|number| number / whole);
    share
        .filter(|share| *share > 0.0 && *share <= 1.0)
        .ok_or_else(|| format!("'{text}' is not a share of the reads; write a percentage such as 85%"))
}

/// Sizes of the pool to try, as shares of the bytes that the disks access.
const POOLS: [f64; 10] = [0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0];

/// Recommends one pool for all disks of the trace.
fn divide(args: &Advise, global: &Global) -> anyhow::Result<()> {
    let sizes = POOLS.map(CacheSize::Share);
    let comparison = Comparison {
        target_hit: Some(args.target_hit.unwrap_or(0.0)),
        ..args.division.comparison(&args.source, &sizes, BLOCK_BYTES)
    };
    compare(&comparison, global)
}

pub(super) fn run(args: &Advise, global: &Global) -> anyhow::Result<()> {
    if args.division.is_wanted() {
        return divide(args, global);
    }
    let stop = interruption()?;
    let (material, remarks) = read_material(&args.source, args.requests_max, &stop)?;
    let name = args.source.trace.file_name().unwrap_or(args.source.trace.as_os_str());
    let options = Options {
        trace: name.to_string_lossy().into_owned(),
        target_hit: args.target_hit,
        backing: args.backing.unwrap_or_default(),
        flash: args.flash.unwrap_or_default(),
        endurance: args.endurance.unwrap_or_default(),
        threads: std::thread::available_parallelism().map_or(2, usize::from),
        ..Options::default()
    };
    let bar = "{bar:40} {percent:>3} %  {msg}";
    let mut advice = with_progress(bar, &stop, |progress| advise(material, &options, progress))?;
    advice.caveats.extend(remarks);
    write_if(args.html.as_ref(), || {
        page(&advice, &format!("hob {} lab advise {}", env!("CARGO_PKG_VERSION"), options.trace))
    })?;
    print(global.output, &advice, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_read_as_people_write_them() {
        assert_eq!(percent("85%"), Ok(0.85));
        assert_eq!(percent("85 %"), Ok(0.85));
        assert_eq!(percent("0.5"), Ok(0.5));
        for text in ["", "%", "0%", "101%", "85", "-1", "NaN", "x"] {
            assert!(percent(text).unwrap_err().contains("85%"), "{text}");
        }
    }

    #[test]
    fn json_has_all_values() {
        use hob_lab::advise::Material;
        use hob_trace::{Op, Record};

        let mut material = Material::new(1000);
        for i in 0..500_u64 {
            let record = Record {
                at_ns: i * i * 1_000_000,
                offset: (i % 50) * 8192,
                len: 8192,
                op: Op::Read,
                disk: 0,
            };
            material.add(&record);
        }
        let advice = advise(material, &Options::default(), &mut |_, _| true).unwrap();
        let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&advice).unwrap()).unwrap();
        assert_eq!(json["verdict"], "cache");
        assert_eq!(json["recommendation"]["preset"], "vfrc");
        assert_eq!(json["recommendation"]["admission"], "always");
        assert_eq!(json["recommendation"]["cache_bytes"], 1 << 20);
        let advised = advice.recommendation.unwrap();
        assert_eq!(json["recommendation"]["policy"], advised.cache.setting.policy.info().name);
        assert_eq!(json["recommendation"]["read_hit_ratio"], 0.9);
        assert_eq!(json["target"]["best_read_hit_ratio"], 0.9);
        assert_eq!(json["profile"]["requests"], 500);
        assert!(json["latency"]["with_ns"].as_u64() < json["latency"]["without_ns"].as_u64());
        assert!(json["block_sizes"][0]["curve"][0]["read_hit_ratio"].is_number());
    }
}
