//! `hob advise DISK`: the recommended cache, from miss-ratio curves that the daemon has recorded
//! for the disk.

use anyhow::Context;
use clap::Args;
use hob_control::{BlockCurve, CacheFlashWrites, DiskCurve, Pool, Size};
use hob_engine::sizing::{Curve, CurvePoint};
use hob_lab::advise::{Endurance, Live, LiveCache, LiveCurve, LiveOptions, LiveRecent, live, live_text};

use super::Global;
use super::lab::share_of_reads;
use super::output::print;
use super::remote::ask;

/// Recommend a cache for a disk, from miss-ratio curves of its requests
///
/// The daemon keeps miss-ratio curves of each disk's requests, also for a disk without a cache. The
/// curves assume the policy LRU and blocks of at most 64 KiB. For advice about policies, admission,
/// latencies and larger blocks, record a trace with 'hob record' and run 'hob lab advise' on it.
#[derive(Debug, Args)]
pub(crate) struct Advise {
    /// The disk
    disk: String,
    /// Share of the reads that flash should serve, for example 85% [default: 90 % of the share that
    /// the best cache could serve]
    #[arg(long, value_name = "PERCENT", value_parser = share_of_reads)]
    target_hit: Option<f64>,
    /// Endurance of the flash: drive writes per day over five years, for a device of the cache's
    /// size, or total terabytes, like 600TBW [default: 1DWPD]
    #[arg(long, value_name = "RATING")]
    endurance: Option<Endurance>,
    /// Clear the miss-ratio curves after printing the advice; use this option when the load has changed
    #[arg(long)]
    reset: bool,
}

pub(super) fn run(args: &Advise, global: &Global) -> anyhow::Result<()> {
    let (learnt, pool, is_shared) = ask(global, async |client| {
        let learnt = client.curve(&args.disk).await?;
        let cache = client.disk(&args.disk).await?.cache;
        let pool = match &cache {
            Some(cache) => Some((client.pool(&cache.pool).await?, cache.flash_writes)),
            None => None,
        };
        if args.reset {
            client.curve_reset(&args.disk).await?;
        }
        Ok((learnt, pool, cache.is_some_and(|cache| cache.shared.is_some())))
    })?;
    let options = LiveOptions { target_hit: args.target_hit, endurance: args.endurance.unwrap_or_default() };
    let mut learnt = taken(&learnt).context("the daemon's response is invalid")?;
    if let Some(cache) = &mut learnt.cache {
        cache.is_shared = is_shared;
    }
    let mut advice = live(&learnt, &options);
    let per_day = advice.wear.as_ref().map(|wear| wear.flash_write_bytes_per_day);
    if let Some((pool, part)) = &pool {
        advice.why.extend(about_budget(pool, part.as_ref(), per_day));
    }
    print(global.output, &advice, live_text)
}

/// Describes the flash write budget of the disk's pool, and whether the recommended cache fits into
/// the budget. `per_day` is the number of bytes that the recommended cache would write to flash
/// each day, if it is known.
fn about_budget(pool: &Pool, part: Option<&CacheFlashWrites>, per_day: Option<f64>) -> Option<String> {
    let writes = pool.flash_writes.as_ref()?;
    let written = writes.written_day.human();
    let name = &pool.name;
    let Some(budget) = writes.budget else {
        let is_much = writes.written_day > pool.size;
        return is_much.then(|| {
            format!(
                "The caches of pool {name} wrote {written} to flash in the last 24 hours, which is more than the \
                 size of the pool. To limit flash writes, run 'hob pool set {name} --flash-writes \"1 DWPD\"'."
            )
        });
    };
    let fits = match (part, per_day) {
        (Some(part), Some(per_day)) if per_day > part.part.bytes() as f64 => format!(
            " The recommended cache would write up to {} a day, and its part of the budget is {}. hob will \
             therefore not promote all the data that the cache would promote without a budget.",
            Size(per_day as u64).human(),
            part.part.human()
        ),
        _ => String::new(),
    };
    let pressure = match part.map_or(0, |part| part.pressure_percent) {
        0 => String::new(),
        percent => {
            format!(" The budget limits the cache now, by {percent} % (100 %: no copies of clean data).")
        }
    };
    Some(format!(
        "The flash write budget of pool {name} is {} a day ({budget}); its caches wrote {written} in the last 24 \
         hours.{pressure}{fits}",
        writes.bytes_per_day.human()
    ))
}

/// Converts the daemon's answer into the lab's type. The answer does not say whether the cache is
/// shared.
fn taken(learnt: &DiskCurve) -> anyhow::Result<Live> {
    let cache = learnt.cache.as_ref().map(|cache| LiveCache {
        cache_bytes: cache.size.0,
        block_bytes: cache.block_size.0,
        policy: cache.policy.clone(),
        is_shared: false,
    });
    Ok(Live {
        disk: learnt.disk.clone(),
        elapsed_ns: learnt.elapsed_ns,
        reads: learnt.reads,
        read_bytes: learnt.read_bytes,
        read_hit_ratio: learnt.hit_percent / 100.0,
        writes: learnt.writes,
        write_bytes: learnt.write_bytes,
        recent: LiveRecent {
            reads: learnt.recent.reads,
            read_hit_ratio: learnt.recent.hit_percent / 100.0,
            first_share: learnt.recent.first_percent / 100.0,
            read_bytes: learnt.recent.read_bytes,
            write_bytes: learnt.recent.write_bytes,
            latest_reads: learnt.recent.latest_reads,
            latest_hit_ratio: learnt.recent.latest_hit_percent / 100.0,
        },
        cache,
        block_sizes: learnt.block_sizes.iter().map(curve).collect::<anyhow::Result<_>>()?,
    })
}

fn curve(learnt: &BlockCurve) -> anyhow::Result<LiveCurve> {
    let block_bytes = learnt.block_size.0;
    anyhow::ensure!(block_bytes > 0, "a curve has a block size of 0 bytes");
    let points = learnt
        .points
        .iter()
        .map(|point| CurvePoint { blocks: point.cache_bytes / block_bytes, miss_ratio: point.miss_ratio });
    Ok(LiveCurve {
        block_bytes,
        footprint_bytes: learnt.footprint_bytes,
        sample_rate: learnt.sample_rate,
        misses: Curve::checked(points.collect())?,
    })
}

#[cfg(test)]
mod tests {
    use hob_control::CurvePoint;

    use super::*;

    fn learnt(points: &[(u64, f64)], block_size: u64) -> DiskCurve {
        let points =
            points.iter().map(|&(cache_bytes, miss_ratio)| CurvePoint { cache_bytes, miss_ratio }).collect();
        DiskCurve {
            disk: "vm".into(),
            elapsed_ns: 1_000_000_000,
            reads: 20_000,
            read_bytes: 20_000 << 12,
            hit_percent: 12.5,
            writes: 0,
            write_bytes: 0,
            recent: hob_control::RecentReads {
                reads: 20_000,
                hit_percent: 12.5,
                first_percent: 1.0,
                read_bytes: 20_000 << 12,
                ..hob_control::RecentReads::default()
            },
            memory_bytes: 0,
            cache: None,
            block_sizes: vec![BlockCurve {
                block_size: Size(block_size),
                accesses: 20_000,
                samples: 1,
                sample_rate: 0.5,
                footprint_bytes: 64 << 20,
                points,
            }],
        }
    }

    #[test]
    fn an_answer_becomes_advice() {
        let live = taken(&learnt(&[(0, 1.0), (8 << 20, 0.25)], 4096)).unwrap();
        assert_eq!((live.read_hit_ratio, live.block_sizes[0].misses.miss_ratio_at(2048)), (0.125, 0.25));
        let advice = super::live(&live, &LiveOptions::default());
        let json = serde_json::to_value(&advice).unwrap();
        assert_eq!(
            (&json["verdict"], &json["recommendation"]["cache_bytes"]),
            (&"cache".into(), &(8 << 20).into())
        );
        assert_eq!(json["target"]["best_read_hit_ratio"], 0.75);
        assert!(json["confidence"] == "steady" && json["data_missing_ns"].is_null(), "{json}");
    }

    #[test]
    fn an_answer_with_few_reads_says_for_how_long_data_is_missing() {
        let mut learnt = learnt(&[(0, 1.0), (8 << 20, 0.25)], 4096);
        learnt.reads = 2000;
        let advice = super::live(&taken(&learnt).unwrap(), &LiveOptions::default());
        let json = serde_json::to_value(&advice).unwrap();
        // 8000 more reads at 2000 reads a second.
        assert!(json["confidence"] == "low" && json["data_missing_ns"] == 4_000_000_000_u64, "{json}");
        let reason = json["confidence_reason"].as_str().unwrap();
        assert!(reason.contains("2000 reads in 1 s") && reason.contains("about 4 s more"), "{reason}");
    }

    #[test]
    fn an_invalid_answer_is_refused() {
        for (points, block) in
            [(&[][..], 4096), (&[(0, 1.0)], 0), (&[(0, 0.5), (4096, 0.7)], 4096), (&[(0, 7.0)], 4096)]
        {
            assert!(taken(&learnt(points, block)).is_err(), "{points:?}");
        }
    }
}
