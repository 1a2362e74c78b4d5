//! Placement of disks within the cluster: publishing data about this host's flash and disks, and
//! advice from the data of all hosts (docs/decisions/0024). [`hob_engine::placement`] makes the
//! decisions.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use hob_control::{
    AdvisedDisk, AdvisedHost, AdvisedMove, AdvisedStay, ClusterAdvice, ClusterDiskState, Size,
};
use hob_engine::placement::{Bounds, Disk, Host, place};
use hob_engine::sizing::{BlockSizing, Sizing};
use tokio::time::Instant;

use super::ClusterService;
use crate::api_error::{ApiError, Result, not_found};
use crate::cluster::{Cluster, DiskPlacement, HostPlacement};

/// Maximum number of moves in one advice. Advice for further moves is more accurate after these
/// moves.
const MOVES_MAX: usize = 16;

/// Minimum gain of an advised move, as a fraction of all reads.
const GAIN_MIN: f64 = 0.01;

/// Maximum difference of hit ratio (0 to 1) at which a smaller cache of a disk counts as equally
/// useful as a larger one.
const USEFUL_OFF: f64 = 0.005;

/// Minimum rate of reads for advice, in reads per second.
const READS_TELLING: f64 = 0.5;

/// Weight of the newest sample in the moving average of a rate, 0 to 1.
const NEWEST: f64 = 0.3;

/// Request counters of each disk at the last sample, and moving averages of its rates.
#[derive(Debug, Default)]
pub(super) struct Rates(Mutex<BTreeMap<String, Rate>>);

#[derive(Clone, Copy, Debug)]
struct Rate {
    at: Instant,
    reads: u64,
    all: u64,
    reads_a_second: f64,
    all_a_second: f64,
}

impl Rates {
    /// Adds a sample of a disk's request counters. Returns the moving averages of reads and
    /// requests per second.
    fn note(&self, disk: &str, now: Instant, sizing: &Sizing) -> (f64, f64) {
        let (reads, all) = (sizing.seen.reads, sizing.seen.reads + sizing.seen.writes);
        let mut rates = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let whole = (sizing.elapsed_ns as f64 / 1e9).max(1.0);
        let before = rates.get(disk).copied().filter(|before| before.reads <= reads && before.all <= all);
        let (reads_a_second, all_a_second) = match before {
            None => (reads as f64 / whole, all as f64 / whole),
            Some(before) => {
                let seconds = (now - before.at).as_secs_f64().max(0.1);
                let mean = |old: f64, count: u64| NEWEST * count as f64 / seconds + (1.0 - NEWEST) * old;
                (
                    mean(before.reads_a_second, reads - before.reads),
                    mean(before.all_a_second, all - before.all),
                )
            }
        };
        rates.insert(disk.to_owned(), Rate { at: now, reads, all, reads_a_second, all_a_second });
        (reads_a_second, all_a_second)
    }

    fn keep(&self, disks: &[String]) {
        let mut rates = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        rates.retain(|name, _| disks.contains(name));
    }
}

impl ClusterService {
    /// Publishes the placement data of this host and its disks.
    pub(super) async fn tell(self: &Arc<Self>, cluster: &Cluster) {
        let host = self.learnt().await;
        if let Err(error) = cluster.tell(&host).await {
            tracing::debug!("cannot publish the placement data of this host: {error}");
        }
    }

    async fn learnt(self: &Arc<Self>) -> HostPlacement {
        let names = self.registry.served();
        self.rates.keep(&names);
        let mut disks = Vec::with_capacity(names.len());
        for name in &names {
            disks.extend(self.disk_learnt(name, names.len()).await);
        }
        let free: u64 = self.observe.pools().iter().map(|pool| pool.free.bytes()).sum();
        let used: u64 = disks.iter().map(|disk| disk.cache).sum();
        HostPlacement { name: String::new(), flash: free + used, free, disks }
    }

    async fn disk_learnt(self: &Arc<Self>, name: &str, disks: usize) -> Option<DiskPlacement> {
        let (shard, id) = self.registry.shard_of(name).ok()?;
        let sizing = shard.sizing(id).await.ok()?;
        let users = shard.users(id).await.ok()?;
        let shown = self.observe.disk(name).ok()?;
        let block_size = shown.cache.as_ref().map_or(u64::MAX, |cache| cache.block_size.bytes());
        let curve = best_curve(&sizing, block_size)?;
        let (reads, load) = self.rates.note(name, Instant::now(), &sizing);
        let hits = sizing.seen.read_hits as f64 / (sizing.seen.reads.max(1)) as f64;
        let mut learnt = DiskPlacement {
            name: name.to_owned(),
            cache: shown.cache.as_ref().map_or(0, |cache| cache.room.bytes()),
            block: curve.block_bytes,
            users,
            reads,
            load,
            hits,
            fixed: shown.migration.is_some().then(|| "the disk is already being moved".to_owned()),
            curve: Vec::new(),
        };
        learnt.set_curve(&curve.curve, disks);
        Some(learnt)
    }

    /// Returns the hosts of the cluster, and the advised moves of disks. If `leaving` is set, all
    /// disks of that host are to move.
    pub(crate) async fn advice(&self, leaving: Option<&str>) -> Result<ClusterAdvice> {
        let cluster = self.ownership.cluster_or_refuse()?;
        let failed = |error: &dyn std::fmt::Display| ApiError::failed(error.to_string());
        let members = cluster.hosts().await.map_err(|error| failed(&error))?;
        if let Some(host) = leaving.filter(|host| !members.iter().any(|member| member.name == **host)) {
            return Err(not_found!("'{host}' is not a member of the cluster now").hint(
                "other hosts acquire the disks of a failed host by themselves, unless it has their dirty \
                 data; 'hob cluster disks' shows the owners",
            ));
        }
        let held = cluster.disks().await.map_err(|error| failed(&error))?;
        let held: Vec<_> = held.into_iter().filter(|disk| disk.state == ClusterDiskState::Held).collect();
        let mut told = cluster.told().await.map_err(|error| failed(&error))?;
        for host in &mut told {
            // A disk that has moved is ignored until its new host publishes it.
            host.disks
                .retain(|told| held.iter().any(|disk| disk.name == told.name && disk.host == host.name));
        }
        let silent = members.iter().filter(|member| !told.iter().any(|host| host.name == member.name));
        let silent: Vec<String> = silent.map(|member| member.name.clone()).collect();
        let mut advice = advise(&told, leaving);
        if !silent.is_empty() {
            advice.caveats.push(format!(
                "The flash of {} is unknown: hosts report it some seconds after they join the cluster.",
                silent.join(", ")
            ));
        }
        if let Some(host) = leaving {
            let known = |name: &str| advice.disks.iter().any(|disk| disk.name == name);
            let unheard = held.iter().filter(|disk| disk.host == host && !known(&disk.name));
            let why = format!("{host} has not published this disk yet; try again in a few seconds");
            let stays: Vec<AdvisedStay> =
                unheard.map(|disk| AdvisedStay { disk: disk.name.clone(), why: why.clone() }).collect();
            advice.stays.extend(stays);
        }
        Ok(advice)
    }
}

/// Returns the requests per second of all disks of a host. `sum()` would return -0 for a host
/// without disks.
fn load_of(host: &HostPlacement) -> f64 {
    host.disks.iter().map(|disk| disk.load).fold(0.0, |sum, load| sum + load)
}

/// Returns the miss-ratio curve for the largest block size that is not above the cache's.
fn best_curve(sizing: &Sizing, block_bytes: u64) -> Option<&BlockSizing> {
    let not_larger = sizing.block_sizes.iter().rfind(|size| size.block_bytes <= block_bytes);
    // Without a cache, the smallest blocks give the most hits per byte.
    match block_bytes {
        u64::MAX => sizing.block_sizes.first(),
        _ => not_larger.or(sizing.block_sizes.first()),
    }
}

/// Computes the advice from the placement data of the hosts.
fn advise(told: &[HostPlacement], leaving: Option<&str>) -> ClusterAdvice {
    let learnt: Vec<(usize, &DiskPlacement)> = told
        .iter()
        .enumerate()
        .flat_map(|(host, one)| one.disks.iter().map(move |disk| (host, disk)))
        .collect();
    let hosts: Vec<Host> = told
        .iter()
        .map(|host| Host {
            flash_bytes: host.flash,
            load: load_of(host),
            takes: true,
            empties: leaving == Some(host.name.as_str()),
        })
        .collect();
    let disks: Vec<Disk> = learnt
        .iter()
        .map(|(host, disk)| Disk {
            host: *host,
            reads: disk.reads,
            load: disk.load,
            curve: disk.curve(),
            block_bytes: disk.block,
            moves: disk.fixed.is_none(),
        })
        .collect();
    // To empty a host, only its disks move.
    let moves_max = if leaving.is_some() { 0 } else { MOVES_MAX };
    let placed = place(&hosts, &disks, Bounds { moves_max, gain_min: GAIN_MIN });
    let percent = |ratio: f64| 100.0 * ratio;
    let rows = learnt.iter().zip(&disks).enumerate().map(|(number, ((host, told_of), disk))| AdvisedDisk {
        name: told_of.name.clone(),
        host: told[*host].name.clone(),
        users: told_of.users,
        reads: disk.reads,
        cache: Size(told_of.cache),
        hit_percent_measured: percent(told_of.hits),
        hit_percent: percent(disk.hit_ratio(told_of.cache)),
        useful: Size(useful(disk)),
        cache_here: Size(placed.sizes_here[number]),
        hit_percent_here: percent(disk.hit_ratio(placed.sizes_here[number])),
        host_then: told[placed.hosts[number]].name.clone(),
        cache_then: Size(placed.sizes[number]),
        hit_percent_then: percent(disk.hit_ratio(placed.sizes[number])),
    });
    let rows: Vec<AdvisedDisk> = rows.collect();
    let mut free: Vec<u64> = told.iter().map(|host| host.free).collect();
    let moves = placed.moves.iter().map(|one| {
        let (disk, told_of) = (&disks[one.disk], learnt[one.disk].1);
        let at_once = told_of.cache.min(free[one.to]);
        free[one.to] -= at_once;
        AdvisedMove {
            disk: told_of.name.clone(),
            from: told[disk.host].name.clone(),
            to: told[one.to].name.clone(),
            hit_percent: percent(disk.hit_ratio(told_of.cache)),
            hit_percent_at_once: percent(disk.hit_ratio(at_once)),
            hit_percent_then: percent(disk.hit_ratio(placed.sizes[one.disk])),
            gain: one.gain,
        }
    });
    let moves: Vec<AdvisedMove> = moves.collect();
    let hits = |sizes: &dyn Fn(usize) -> u64| -> f64 {
        let hits = disks.iter().enumerate().map(|(number, disk)| disk.reads * disk.hit_ratio(sizes(number)));
        hits.fold(0.0, |sum, hits| sum + hits)
    };
    let reads = disks.iter().fold(0.0, |sum, disk| sum + disk.reads);
    ClusterAdvice {
        hosts: told
            .iter()
            .enumerate()
            .map(|(number, host)| host_row(number, host, &disks, &placed.hosts, &rows))
            .collect(),
        stays: stays(told, leaving, &moves),
        hits_now: hits(&|number| learnt[number].1.cache),
        hits_here: hits(&|number| placed.sizes_here[number]),
        hits_then: hits(&|number| placed.sizes[number]),
        reads,
        caveats: caveats(&learnt, reads),
        disks: rows,
        moves,
    }
}

fn host_row(
    number: usize,
    host: &HostPlacement,
    disks: &[Disk],
    at: &[usize],
    rows: &[AdvisedDisk],
) -> AdvisedHost {
    let own = || disks.iter().zip(rows).filter(|(disk, _)| disk.host == number);
    let unused: u64 = own().map(|(_, row)| row.cache.bytes().saturating_sub(row.useful.bytes())).sum();
    let mean = |some: &mut dyn Iterator<Item = (f64, f64)>| {
        let (reads, hits) =
            some.fold((0.0, 0.0), |(reads, hits), (of, percent)| (reads + of, hits + of * percent));
        if reads > 0.0 { hits / reads } else { 0.0 }
    };
    let then = disks.iter().zip(rows).zip(at).filter(|(_, at)| **at == number);
    AdvisedHost {
        name: host.name.clone(),
        flash: Size(host.flash),
        free: Size(host.free),
        to_spare: Size(host.free.saturating_add(unused)),
        disks: host.disks.len() as u64,
        load: load_of(host),
        hit_percent: mean(&mut own().map(|(disk, row)| (disk.reads, row.hit_percent))),
        hit_percent_then: mean(&mut then.map(|((disk, row), _)| (disk.reads, row.hit_percent_then))),
    }
}

/// Returns the size in bytes of the smallest cache whose hit ratio is at most [`USEFUL_OFF`] below
/// the best one.
fn useful(disk: &Disk) -> u64 {
    let best = disk.curve.points().last().map_or(0.0, |point| 1.0 - point.miss_ratio);
    if disk.reads <= 0.0 || best <= USEFUL_OFF {
        return 0;
    }
    disk.curve.size_for(best - USEFUL_OFF).unwrap_or(0).saturating_mul(disk.block_bytes)
}

fn stays(told: &[HostPlacement], leaving: Option<&str>, moves: &[AdvisedMove]) -> Vec<AdvisedStay> {
    let Some(host) = told.iter().find(|host| leaving == Some(host.name.as_str())) else { return Vec::new() };
    let left = host.disks.iter().filter(|disk| !moves.iter().any(|one| one.disk == disk.name));
    let why = |disk: &DiskPlacement| match &disk.fixed {
        Some(why) => why.clone(),
        None => "no other host can serve the disk".to_owned(),
    };
    left.map(|disk| AdvisedStay { disk: disk.name.clone(), why: why(disk) }).collect()
}

fn caveats(learnt: &[(usize, &DiskPlacement)], reads: f64) -> Vec<String> {
    let mut caveats = Vec::new();
    if reads < READS_TELLING {
        caveats.push("There are almost no reads, so there is no advice.".to_owned());
    }
    let unread = learnt.iter().filter(|(_, disk)| disk.curve.len() < 2).count();
    if unread > 0 && reads >= READS_TELLING {
        caveats.push(format!(
            "Disks without a known miss-ratio curve, to which the advice gives no flash: {unread}."
        ));
    }
    caveats.push(
        "Hit ratios are estimates for LRU caches, which each host measures from the time when it \
        begins to serve a disk; the estimate for a disk that was just moved is uncertain."
            .to_owned(),
    );
    caveats
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn disk(name: &str, cache_mib: u64, reads: f64, useful_mib: u64) -> DiskPlacement {
        DiskPlacement {
            name: name.to_owned(),
            cache: cache_mib * MIB,
            block: MIB,
            reads,
            load: reads,
            curve: vec![(0, 10_000), (useful_mib, 1000)],
            ..DiskPlacement::default()
        }
    }

    fn two_hosts() -> Vec<HostPlacement> {
        let a = vec![disk("one", 50, 1000.0, 100), disk("two", 50, 900.0, 100)];
        let b = vec![disk("three", 100, 10.0, 10)];
        vec![
            HostPlacement { name: "a".into(), flash: 100 * MIB, free: 0, disks: a },
            HostPlacement { name: "b".into(), flash: 150 * MIB, free: 50 * MIB, disks: b },
        ]
    }

    #[test]
    fn free_flash_is_listed_and_a_move_has_its_gain() {
        let advice = advise(&two_hosts(), None);
        let spare: Vec<u64> = advice.hosts.iter().map(|host| host.to_spare.bytes() / MIB).collect();
        assert_eq!(spare, [0, 140], "50 free and 90 of its cache that hardly serve: {advice:?}");
        assert_eq!(advice.moves.len(), 1, "{advice:?}");
        let one = &advice.moves[0];
        assert_eq!((one.from.as_str(), one.to.as_str()), ("a", "b"));
        let near = |percent: f64, wanted: f64| (percent - wanted).abs() < 1.0;
        assert!(near(one.hit_percent, 45.0) && near(one.hit_percent_at_once, 45.0), "{one:?}");
        assert!(near(one.hit_percent_then, 90.0), "{one:?}");
        assert!(advice.hits_now < advice.hits_then && advice.hits_here < advice.hits_then, "{advice:?}");
        assert!(advice.stays.is_empty());
        let then = advice.disks.iter().find(|disk| disk.name == one.disk).unwrap();
        assert_eq!((then.host_then.as_str(), then.cache_then.bytes() / MIB), ("b", 100));
    }

    #[test]
    fn an_evacuated_host_keeps_fixed_disks_and_no_other_host_changes() {
        let mut told = two_hosts();
        told[0].disks[1].fixed = Some("the disk is already being moved".to_owned());
        let advice = advise(&told, Some("a"));
        assert_eq!(advice.moves.len(), 1);
        assert_eq!((advice.moves[0].disk.as_str(), advice.moves[0].to.as_str()), ("one", "b"));
        assert_eq!(
            advice.stays,
            [AdvisedStay { disk: "two".into(), why: "the disk is already being moved".into() }]
        );
        let advice = advise(&told[..1], Some("a"));
        assert_eq!((advice.moves.len(), advice.stays.len()), (0, 2));
        assert!(advice.stays[0].why.contains("no other host"));
    }

    #[test]
    fn without_reads_nothing_is_advised() {
        let told = vec![HostPlacement {
            name: "a".into(),
            flash: 9,
            free: 9,
            disks: vec![DiskPlacement { block: 1, ..DiskPlacement::default() }],
        }];
        let advice = advise(&told, None);
        assert!(advice.moves.is_empty() && advice.caveats[0].contains("there is no advice"), "{advice:?}");
        assert_eq!(advise(&[], None).hosts, []);
    }
}
