//! Compares two-level LRU with LRU: hits of popular data while other data is read only once.

use anyhow::{Context, Result, anyhow};
use hob_engine::admission::Admission;
use hob_engine::granularity::Fill;
use hob_engine::policy::PolicyKind;
use hob_engine::{CacheSim, SimConfig};

use super::line::Line;
use super::{FigureInfo, Findings, Work};
use crate::picture::{Bar, BarChart, BarGroup, Unit, bars};
use crate::prng::Prng;
use crate::workload::{Scatter, Zipf};

const BLOCK: u64 = 4096;
/// Number of blocks of the cache. `POPULAR` is the number of popular blocks.
const BLOCKS: u32 = 10_000;
const POPULAR: u64 = 20_000;
/// Number of reads of each load. `MEASURED` is the number of reads at the end of the load that are
/// measured.
pub(super) const READS: u64 = 1_000_000;
pub(super) const MEASURED: u64 = 200_000;
/// Parameter of the Zipf distribution of reads over the popular blocks.
const THETA: f64 = 0.8;

pub(super) const INFO: FigureInfo = FigureInfo {
    name: "two-level-lru",
    title: "ZBS: two-level LRU against LRU",
    source: "the comparison of vSAN and SmartX ZBS",
    published: "ZBS uses a two-level LRU: data enters as inactive, and only repeated access makes it active. Data that is \
                accessed once does not displace active data, as it does with LRU.",
    method: "Caches of 10 000 blocks, one with each policy, serve a million reads of 20 000 \
             popular blocks. The reads follow Zipf's law with a skew of 0.8. In the first load, \
             there are no other reads. In the second, each read is followed by a read of a block \
             that is never read again. In the third, the reads move to other blocks halfway, to \
             show whether the policy adapts. The result is the share of hits among the last \
             fifth of the reads of popular blocks.",
    fitted: &[],
    work: Work::Play { cases: |_| vec![], judge: |_| judge(READS / 2) },
};

/// A load of the figure.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Mix {
    Popular,
    PassingToo,
    Moved,
}

/// Returns the share of the reads of popular blocks that are hits. In the load `Mix::Moved`, other
/// blocks become the popular ones at read number `moved_at`.
pub(super) fn hits(policy: &str, load: Mix, moved_at: u64) -> Result<f64> {
    let policy = PolicyKind::from_name(policy).context("a policy")?;
    let config = SimConfig {
        blocks: BLOCKS,
        block_bytes: BLOCK as u32,
        policy,
        admission: Admission::default(),
        fill: Fill::Sectors,
    };
    let mut cache = CacheSim::new(&config)
        .map_err(|_| anyhow!("{BLOCKS} blocks of {BLOCK} bytes are not a valid cache"))?;
    let (law, order, mut dice) = (Zipf::new(POPULAR, THETA), Scatter::new(POPULAR, 1), Prng::new(1));
    let (mut popular, mut hit) = (0.0, 0.0);
    for n in 0..READS {
        let start = if load == Mix::Moved && n >= moved_at { POPULAR } else { 0 };
        let block = start + order.place(law.rank(&mut dice));
        let before = cache.stats().read_hits;
        cache.read(block * BLOCK, BLOCK);
        if n >= READS - MEASURED {
            popular += 1.0;
            hit += (cache.stats().read_hits - before) as f64;
        }
        if load == Mix::PassingToo {
            cache.read((4 * POPULAR + n) * BLOCK, BLOCK);
        }
    }
    Ok(hit / popular)
}

/// Evaluates the hits of LRU and two-level LRU. In one of the loads, other blocks become the popular
/// ones at read number `moved_at`.
fn judge(moved_at: u64) -> Result<Findings> {
    judge_hits(["lru", "two-level-lru"], |policy, load| hits(policy, load, moved_at))
}

/// Evaluates the hits of two policies, which are LRU and two-level LRU except in tests. `hits` returns
/// the hits of a policy with a load.
pub(super) fn judge_hits<'a>(
    [lru, levels]: [&'a str; 2],
    mut hits: impl FnMut(&'a str, Mix) -> Result<f64>,
) -> Result<Findings> {
    let mut lines = Vec::new();
    let mut measured = Vec::new();
    let mut chart = BarChart::new("Hits of popular data", "read hits", Unit::Percent)
        .subtitle("a cache of half the popular data")
        .series("LRU")
        .series("two-level LRU");
    let loads = [
        ("popular data alone", Mix::Popular),
        ("other data passes once", Mix::PassingToo),
        ("popular data moved", Mix::Moved),
    ];
    for (name, load) in loads {
        let both = [hits(lru, load)?, hits(levels, load)?];
        for (policy, value) in ["LRU", "two-level LRU"].into_iter().zip(both) {
            lines.push(Line::new(format!("hits, {policy}, {name}"), Unit::Percent, value));
        }
        chart = chart.group(BarGroup::new(name, both.map(Bar::Value)));
        measured.push(both);
    }
    let [alone, passing, moved] = measured[..] else { unreachable!("three loads") };
    let line = |text: &str, value: f64| Line::new(text, Unit::Times, value);
    let (gain, kept) = (passing[1] / passing[0], passing[1] / alone[1]);
    lines.extend([
        line("two-level LRU against LRU while other data passes", gain)
            .published("more hits")
            .check("at least 1.1 ×", gain >= 1.1),
        line("two-level LRU while other data passes against alone", kept)
            .published("active data is not displaced")
            .check("at least 0.85 ×", kept >= 0.85),
        line("two-level LRU against LRU, popular data alone", alone[1] / alone[0])
            .check("at least 0.97 ×", alone[1] >= 0.97 * alone[0]),
        line("two-level LRU after a move against before", moved[1] / alone[1])
            .published("Active that is no longer accessed becomes inactive")
            .check("at least 0.95 ×", moved[1] >= 0.95 * alone[1]),
    ]);
    Ok(Findings { lines, notes: vec![], picture: bars(&chart) })
}
