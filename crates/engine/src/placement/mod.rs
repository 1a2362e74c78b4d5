//! Placement advice: finds disks that other hosts would serve better, based on miss-ratio curves.
//! All hosts must be able to reach the backings.
//!
//! The value of a host's flash is the rate of reads that it serves, if it is divided optimally
//! among the host's disks. When a disk moves, its reads move to the new host. The gain of a move is
//! the sum of the changes in value at the old host and the new host. The search is greedy: it
//! repeatedly chooses the move with the largest gain, and exchanges two disks if no single move has
//! a gain. The price of flash (the gain of one more byte at a host) gives an estimate for each
//! move. The estimate selects the few moves that are computed exactly.
//!
//! Sizes are in bytes. Read rates are per second, and each read is of one block. Networks,
//! processors and the clients of disks are not considered. A host's load decides only between hosts
//! whose flash would serve equally many reads. The curves describe LRU caches and past requests.

mod share;
#[cfg(test)]
mod tests;

use crate::sizing::Curve;
use share::{Share, hull, share};

/// Number of moves whose gains are computed exactly before one move is chosen.
const SHORTLIST: usize = 24;

/// Maximum number of disks among which the search tries exchanges.
const EXCHANGED: usize = 24;

/// Two moves of a disk count as equally good if their gains differ by at most this part of the
/// disk's reads.
const AS_GOOD: f64 = 0.005;

/// A host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Host {
    /// Size of the host's flash for caches, used or not, bytes.
    pub flash_bytes: u64,
    /// Number of requests per second that the host serves.
    pub load: f64,
    /// True if disks may move to the host.
    pub takes: bool,
    /// True if every disk must leave the host.
    pub empties: bool,
}

/// A disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Disk {
    /// Index of the disk's host.
    pub host: usize,
    /// Reads per second.
    pub reads: f64,
    /// Requests per second, including writes.
    pub load: f64,
    /// Miss ratio of the disk's reads by cache size.
    pub curve: Curve,
    /// Block size of the curve, bytes.
    pub block_bytes: u64,
    /// True if the disk can move.
    pub moves: bool,
}

impl Disk {
    /// Returns the hit ratio of a cache of `cache_bytes` bytes, from 0 to 1.
    pub fn hit_ratio(&self, cache_bytes: u64) -> f64 {
        1.0 - self.curve.miss_ratio_at(cache_bytes / self.block_bytes.max(1))
    }

    fn hits(&self, cache_bytes: u64) -> f64 {
        self.reads * self.hit_ratio(cache_bytes)
    }
}

/// Limits of the placement advice: number of moves, and the gain that a move must have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Maximum number of moves, not counting moves from hosts that every disk must leave.
    pub moves_max: usize,
    /// Minimum gain of a move as a part of all reads, from 0 to 1.
    pub gain_min: f64,
}

/// A proposed move of a disk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Move {
    /// The disk.
    pub disk: usize,
    /// Index of the destination host.
    pub to: usize,
    /// Gain in reads per second that flash serves on all hosts, if the earlier moves are made
    /// first.
    pub gain: f64,
}

/// The proposed placement.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// Proposed moves, in the order in which they should be made.
    pub moves: Vec<Move>,
    /// Best cache size of each disk on its current host, bytes.
    pub sizes_here: Vec<u64>,
    /// Host of each disk after the moves.
    pub hosts: Vec<usize>,
    /// Best cache size of each disk after the moves, bytes.
    pub sizes: Vec<u64>,
}

impl Placement {
    /// Returns the reads per second that flash serves with these cache sizes.
    pub fn hits(disks: &[Disk], sizes: &[u64]) -> f64 {
        disks.iter().zip(sizes).map(|(disk, size)| disk.hits(*size)).sum()
    }
}

/// Computes the placement.
///
/// # Panics
/// Panics if a disk's host does not exist.
pub fn place(hosts: &[Host], disks: &[Disk], bounds: Bounds) -> Placement {
    assert!(disks.iter().all(|disk| disk.host < hosts.len()), "a disk is on one of the hosts");
    let mut search = Search::new(hosts, disks);
    let sizes_here = search.sizes();
    let mut moves = search.empty_hosts();
    let all_reads: f64 = disks.iter().map(|disk| disk.reads).sum();
    let gain_min = (all_reads * bounds.gain_min).max(f64::MIN_POSITIVE);
    let mut left = bounds.moves_max;
    while left > 0 {
        if let Some(best) = search.best_move(gain_min) {
            search.go(best.disk, best.to);
            moves.push(best);
            left -= 1;
        } else if left > 1
            && let Some((one, other)) = search.best_exchange(2.0 * gain_min)
        {
            search.go(one.disk, one.to);
            search.go(other.disk, other.to);
            moves.extend([one, other]);
            left -= 2;
        } else {
            break;
        }
    }
    let (hosts, sizes) = (search.at.clone(), search.sizes());
    Placement { moves: without_detours(moves, disks), sizes_here, hosts, sizes }
}

/// Replaces several moves of a disk by one move to its last host.
fn without_detours(moves: Vec<Move>, disks: &[Disk]) -> Vec<Move> {
    let mut kept: Vec<Move> = Vec::with_capacity(moves.len());
    for one in moves {
        match kept.iter().position(|before| before.disk == one.disk) {
            Some(before) => {
                let gain = kept.remove(before).gain + one.gain;
                kept.push(Move { gain, ..one });
            }
            None => kept.push(one),
        }
    }
    kept.retain(|one| disks[one.disk].host != one.to);
    kept
}

struct Search<'a> {
    hosts: &'a [Host],
    disks: &'a [Disk],
    hulls: Vec<Vec<share::Step>>,
    /// Current host of each disk.
    at: Vec<usize>,
    /// Current division of each host's flash.
    shares: Vec<Share>,
    loads: Vec<f64>,
}

impl<'a> Search<'a> {
    fn new(hosts: &'a [Host], disks: &'a [Disk]) -> Search<'a> {
        let hulls = disks.iter().map(hull).collect();
        let at = disks.iter().map(|disk| disk.host).collect();
        let loads = hosts.iter().map(|host| host.load).collect();
        let mut search = Search { hosts, disks, hulls, at, shares: Vec::new(), loads };
        search.shares = (0..hosts.len()).map(|host| search.share(host, &search.on(host))).collect();
        search
    }

    /// Returns the disks of a host, in order.
    fn on(&self, host: usize) -> Vec<usize> {
        (0..self.at.len()).filter(|disk| self.at[*disk] == host).collect()
    }

    fn share(&self, host: usize, on: &[usize]) -> Share {
        share(self.hosts[host].flash_bytes, self.disks, &self.hulls, on)
    }

    fn sizes(&self) -> Vec<u64> {
        let mut sizes = vec![0; self.disks.len()];
        for (disk, size) in self.shares.iter().flat_map(|share| &share.sizes) {
            sizes[*disk] = *size;
        }
        sizes
    }

    fn go(&mut self, disk: usize, to: usize) {
        let from = std::mem::replace(&mut self.at[disk], to);
        for host in [from, to] {
            self.shares[host] = self.share(host, &self.on(host));
        }
        self.loads[from] -= self.disks[disk].load;
        self.loads[to] += self.disks[disk].load;
    }

    /// Returns the additional reads per second that flash serves on all hosts if a disk moves.
    fn gain(&self, disk: usize, to: usize) -> f64 {
        let from = self.at[disk];
        let mut left = self.on(from);
        left.retain(|other| *other != disk);
        let mut there = self.on(to);
        there.push(disk);
        let after = self.share(from, &left).hits + self.share(to, &there).hits;
        after - self.shares[from].hits - self.shares[to].hits
    }

    /// Returns the value of a disk minus the cost of its flash, in reads per second. The value is
    /// the rate of reads that flash serves. `price` is the gain of one more byte at a host, in
    /// reads per second. The estimate gives the disk flash as long as one more byte gains more than
    /// this price.
    fn surplus(&self, disk: usize, price: f64) -> f64 {
        let steps = self.hulls[disk].iter().take_while(|step| step.slope() > price);
        self.disks[disk].hits(0) + steps.map(|step| step.hits - price * step.bytes as f64).sum::<f64>()
    }

    /// Estimates the gain of a move from the prices of flash. The estimate is accurate if the move
    /// changes the prices little.
    fn estimate(&self, disk: usize, to: usize) -> f64 {
        let price =
            |host: usize| if self.hosts[host].flash_bytes == 0 { f64::MAX } else { self.shares[host].price };
        self.surplus(disk, price(to)) - self.surplus(disk, price(self.at[disk]))
    }

    fn may_take(&self, host: usize) -> bool {
        self.hosts[host].takes && !self.hosts[host].empties
    }

    /// Returns the move with the largest exact gain. Among equally good moves, returns the one to
    /// the host with the least load.
    fn best_of(&self, some: impl IntoIterator<Item = (usize, usize)>) -> Option<Move> {
        let moves = some.into_iter().map(|(disk, to)| Move { disk, to, gain: self.gain(disk, to) });
        moves.reduce(|best, next| {
            let margin = AS_GOOD * self.disks[best.disk].reads.min(self.disks[next.disk].reads);
            let is_lighter = self.loads[next.to].total_cmp(&self.loads[best.to]).is_lt();
            match next.gain - best.gain {
                more if more > margin => next,
                less if less < -margin => best,
                _ if best.disk == next.disk && is_lighter => next,
                more if best.disk != next.disk && more > 0.0 => next,
                _ => best,
            }
        })
    }

    fn best_move(&self, gain_min: f64) -> Option<Move> {
        let movable =
            (0..self.disks.len()).filter(|disk| self.disks[*disk].moves && self.disks[*disk].reads > 0.0);
        let mut all: Vec<(f64, usize, usize)> = movable
            .flat_map(|disk| (0..self.hosts.len()).map(move |to| (disk, to)))
            .filter(|(disk, to)| self.may_take(*to) && *to != self.at[*disk])
            .map(|(disk, to)| (self.estimate(disk, to), disk, to))
            .collect();
        shorten(&mut all, SHORTLIST);
        self.best_of(all.into_iter().map(|(_, disk, to)| (disk, to))).filter(|best| best.gain >= gain_min)
    }

    /// Returns two disks that should exchange hosts.
    fn best_exchange(&self, gain_min: f64) -> Option<(Move, Move)> {
        let can = |disk: &usize| {
            self.disks[*disk].moves && self.disks[*disk].reads > 0.0 && self.may_take(self.at[*disk])
        };
        // Candidates are disks that miss most of their possible hits, and disks with most flash.
        let sizes = self.sizes();
        let misses = |disk: usize| self.disks[disk].hits(u64::MAX) - self.disks[disk].hits(sizes[disk]);
        let mut wanting: Vec<(f64, usize, usize)> =
            (0..self.disks.len()).filter(can).map(|disk| (misses(disk), disk, 0)).collect();
        shorten(&mut wanting, EXCHANGED);
        let mut having: Vec<(f64, usize, usize)> =
            (0..self.disks.len()).filter(can).map(|disk| (sizes[disk] as f64, disk, 0)).collect();
        shorten(&mut having, EXCHANGED);
        let mut best: Option<(Move, Move)> = None;
        for (_, one, _) in &wanting {
            for (_, other, _) in &having {
                let (here, there) = (self.at[*one], self.at[*other]);
                if here == there {
                    continue;
                }
                let with = |host: usize, out: usize, into: usize| {
                    let mut on = self.on(host);
                    on.retain(|disk| *disk != out);
                    on.push(into);
                    self.share(host, &on).hits
                };
                let before = self.shares[here].hits + self.shares[there].hits;
                let gain = with(here, *one, *other) + with(there, *other, *one) - before;
                if gain >= best.map_or(gain_min, |(first, second)| first.gain + second.gain) {
                    let halves = |disk, to| Move { disk, to, gain: gain / 2.0 };
                    best = Some((halves(*one, there), halves(*other, here)));
                }
            }
        }
        best
    }

    /// Moves every disk off hosts that must be emptied. Disks that lose most on other hosts are
    /// moved first.
    fn empty_hosts(&mut self) -> Vec<Move> {
        let goes = |disk: &usize| self.hosts[self.at[*disk]].empties && self.disks[*disk].moves;
        let mut going: Vec<usize> = (0..self.disks.len()).filter(goes).collect();
        let best = |disk: usize| self.disks[disk].hits(u64::MAX);
        going.sort_by(|one, other| best(*other).total_cmp(&best(*one)).then(one.cmp(other)));
        let mut moves = Vec::with_capacity(going.len());
        for disk in going {
            let places = (0..self.hosts.len()).filter(|to| self.may_take(*to)).map(|to| (disk, to));
            let Some(best) = self.best_of(places) else { break };
            self.go(best.disk, best.to);
            moves.push(best);
        }
        moves
    }
}

/// Keeps the `most` entries with the largest first fields, and sorts them in descending order.
fn shorten(all: &mut Vec<(f64, usize, usize)>, most: usize) {
    let falling = |one: &(f64, usize, usize), other: &(f64, usize, usize)| {
        other.0.total_cmp(&one.0).then((one.1, one.2).cmp(&(other.1, other.2)))
    };
    if all.len() > most {
        all.select_nth_unstable_by(most, falling);
        all.truncate(most);
    }
    all.sort_by(falling);
}
