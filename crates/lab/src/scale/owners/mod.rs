//! Models a cluster of many hosts and one etcd in virtual time. The results are the load of etcd in
//! an idle cluster, and the time for which disks are unavailable after hosts fail.
//!
//! Hosts run the state machines of [`hob_engine::cluster`] and pace their requests as the daemon
//! does. The model of etcd is [`hob_world::cluster::store`] behind a server with a service time per
//! request ([`etcd`]). Each disk is served by one host, and some other hosts wait for it. The model
//! then kills some hosts. After the leases of the killed hosts and the settling time have ended,
//! other hosts acquire the disks.
//!
//! The model does not include backings, caches, and the time to open an acquired disk. Times are in
//! nanoseconds of virtual time.

mod etcd;
mod host;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::rc::Rc;

use hob_engine::cluster::ClusterEvent;
use hob_engine::units::Instant;
use hob_world::queue::Queue;

use crate::prng::Prng;
use etcd::{Asked, Server, Work};
use host::Host;

const SECOND_NS: u64 = 1_000_000_000;

/// Time by which all hosts have joined the cluster and own their first disks, nanoseconds.
const JOINED_NS: u64 = 4 * SECOND_NS;

/// Method by which hosts find released disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pacing {
    /// Once per second, each host reads the etcd keys of each disk for which it waits.
    Looks,
    /// etcd notifies the hosts of changes. A host reads the keys of many disks with one request.
    ClusterEvent,
}

/// Service times of etcd.
#[derive(Clone, Copy, Debug)]
pub struct EtcdCosts {
    /// Service time of a request on etcd's only server, nanoseconds.
    pub question_ns: u64,
    /// Additional service time of a change, nanoseconds.
    pub change_ns: u64,
    /// Service time per key that a request reads, nanoseconds.
    pub key_ns: u64,
    /// Service time per watch event, nanoseconds.
    pub news_ns: u64,
    /// Time until a majority of etcd's members has stored a change, nanoseconds. Other requests
    /// continue during this time.
    pub commit_ns: u64,
    /// Network latency between a host and etcd in one direction, nanoseconds.
    pub way_ns: u64,
}

/// Parameters of a modelled cluster with one etcd.
#[derive(Clone, Copy, Debug)]
pub struct Owners {
    /// Number of hosts.
    pub hosts: usize,
    /// Total number of disks on all hosts.
    pub disks: usize,
    /// Number of hosts that are configured with each disk, limited to the number of hosts.
    pub known_by: usize,
    /// Number of hosts that are killed at the same time.
    pub killed: usize,
    /// Length of a lease, nanoseconds.
    pub lease_ns: u64,
    /// Time after the end of a failed owner's lease in which no host acquires its disks,
    /// nanoseconds.
    pub settle_ns: u64,
    /// Method by which hosts find released disks.
    pub pacing: Pacing,
    /// Service times of etcd.
    pub etcd: EtcdCosts,
    /// Duration of the warm-up, seconds.
    pub warm_s: u64,
    /// Duration of the idle measurement, seconds.
    pub steady_s: u64,
    /// Maximum duration after the kill, seconds.
    pub after_s: u64,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Load of etcd, per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Number of lease requests per second.
    pub renewals: f64,
    /// Number of read requests per second. One request reads the keys of one or more disks.
    pub looks: f64,
    /// Number of transactions per second.
    pub takes: f64,
    /// Number of watch events per second. An event counts once for each host that receives it.
    pub news: f64,
    /// Number of bytes per second of all requests, responses and events, in both directions.
    pub bytes: f64,
}

impl Traffic {
    /// Returns the number of requests of all kinds per second.
    pub fn questions(&self) -> f64 {
        self.renewals + self.looks + self.takes
    }
}

/// Results of a model: the load of etcd, and how long disks were unavailable.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Mean load while the cluster is idle.
    pub steady: Traffic,
    /// Load in the busiest second after the kill.
    pub busiest: Traffic,
    /// Number of disks of the killed hosts.
    pub orphans: usize,
    /// Times from the kill until another host acquired the disk, sorted, nanoseconds. Only acquired
    /// disks are included.
    pub away_ns: Vec<u64>,
    /// Number of transactions after the kill per acquired disk.
    pub takes_a_disk: f64,
    /// Number of hosts that lost their lease without being killed.
    pub leases_lost: usize,
    /// Longest time that a request spent inside the etcd server, nanoseconds: the time in the
    /// server's queue and the time of its execution. Requests that timed out in the queue are not
    /// included.
    pub longest_ns: u64,
}

impl Outcome {
    /// Returns the time within which `percent` % of the killed hosts' disks were acquired, or
    /// `None` if they were not acquired in time.
    pub fn away_at(&self, percent: usize) -> Option<u64> {
        let place = (self.orphans * percent).div_ceil(100).max(1) - 1;
        self.away_ns.get(place).copied()
    }
}

/// A future event of the model.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a model has few at a time")]
enum Event {
    /// A host's lease manager must be called.
    Keep(usize),
    /// A host checks for disks to acquire.
    OwnershipSnapshot(usize),
    /// A request arrives at etcd.
    Arrives(Asked),
    /// etcd completes a request.
    Served,
    /// A response arrives at a host; `None` is a timeout.
    Answer { host: usize, number: u64, answer: Option<hob_world::cluster::store::Response>, looks: Looks },
    /// Watch events arrive at a host.
    Watched { host: usize, news: Rc<[(String, u64, ClusterEvent)]> },
    /// The first owner of each disk acquires the disk.
    Settle,
    /// Hosts are killed.
    Kill,
}

/// Response to a read of many disks.
type Looks = Vec<hob_engine::cluster::OwnershipSnapshot>;

struct Play {
    owners: Owners,
    now: Instant,
    queue: Queue<Event>,
    server: Server,
    hosts: Vec<Host>,
    dice: Prng,
    /// Load of etcd by second.
    traffic: Vec<Traffic>,
    kill_at: Instant,
    /// Disks of the killed hosts, with the time at which another host acquired each disk.
    orphans: BTreeMap<String, Option<Instant>>,
    takes: u64,
    number: u64,
}

/// Runs the model of a cluster. `check` is called at intervals, and the run ends if it returns an
/// error.
///
/// # Errors
/// Returns the errors of `check`.
///
/// # Panics
/// Panics if `killed` is not less than `hosts`.
pub fn play<E>(owners: &Owners, mut check: impl FnMut() -> Result<(), E>) -> Result<Outcome, E> {
    assert!(owners.killed < owners.hosts, "at least one host must survive");
    let mut play = Play::new(owners);
    let mut steps = 0_u64;
    while let Some((at, event)) = play.queue.pop() {
        play.now = at;
        if at >= play.kill_at + owners.after_s * SECOND_NS || play.is_over() {
            break;
        }
        steps += 1;
        if steps.is_multiple_of(1 << 16) {
            check()?;
        }
        play.handle(event);
    }
    Ok(play.outcome())
}

impl Play {
    fn new(owners: &Owners) -> Play {
        let mut dice = Prng::new(owners.seed);
        let mut queue = Queue::default();
        let known_by = owners.known_by.clamp(2, owners.hosts.max(2)).min(owners.hosts);
        let mut told: Vec<Vec<String>> = vec![Vec::new(); owners.hosts];
        let mut owned: Vec<Vec<String>> = vec![Vec::new(); owners.hosts];
        for disk in 0..owners.disks {
            let home = disk % owners.hosts;
            let name = format!("disk-{disk:05}");
            let mut others: Vec<usize> = (0..owners.hosts).filter(|host| *host != home).collect();
            for _ in 1..known_by {
                let other = others.swap_remove(dice.below(others.len() as u64) as usize);
                told[other].push(name.clone());
            }
            owned[home].push(name);
        }
        let hosts = told.into_iter().zip(owned).enumerate();
        let hosts: Vec<Host> =
            hosts.map(|(host, (told, owned))| Host::new(host, owners, told, owned)).collect();
        for host in 0..owners.hosts {
            queue.push(Instant(dice.below(SECOND_NS)), Event::Keep(host));
        }
        let kill_at = Instant(JOINED_NS + (owners.warm_s + owners.steady_s) * SECOND_NS);
        queue.push(Instant(JOINED_NS), Event::Settle);
        // The kill happens at a random time between two renewals.
        queue.push(kill_at + dice.below(SECOND_NS), Event::Kill);
        Play {
            owners: *owners,
            now: Instant(0),
            queue,
            server: Server::new(owners.etcd),
            hosts,
            dice,
            traffic: Vec::new(),
            kill_at,
            orphans: BTreeMap::new(),
            takes: 0,
            number: 0,
        }
    }

    fn is_over(&self) -> bool {
        !self.orphans.is_empty() && self.orphans.values().all(Option::is_some)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Keep(host) => self.keep(host),
            Event::OwnershipSnapshot(host) => self.look(host),
            Event::Arrives(asked) => {
                let is_idle = self.server.arrive(self.now, asked);
                if is_idle {
                    self.serve();
                }
            }
            Event::Served => {
                self.answer();
                self.serve();
            }
            Event::Answer { host, number, answer, looks } if self.hosts[host].is_up => {
                self.answered(host, number, answer, looks);
            }
            Event::Watched { host, news } if self.hosts[host].is_up => {
                for (disk, revision, what) in news.iter() {
                    self.hosts[host].waiting.handle_news(self.now, disk, *revision, *what);
                }
                self.look_when_due(host);
            }
            Event::Answer { .. } | Event::Watched { .. } => {}
            Event::Settle => self.settle(),
            Event::Kill => self.kill(),
        }
    }

    /// Starts the next request of etcd, if any.
    fn serve(&mut self) {
        if let Some(takes_ns) = self.server.begin(self.now) {
            self.queue.push(self.now + takes_ns, Event::Served);
        }
    }

    /// Completes a request of etcd: sends its response and the watch events.
    fn answer(&mut self) {
        let Some(Work { asked, response, looks }) = self.server.end(self.now) else { return };
        let mut at = self.now + self.way();
        if asked.changes() {
            at = at + self.owners.etcd.commit_ns;
        }
        let bytes = etcd::answer_bytes(&asked, &looks);
        self.count(|traffic| traffic.bytes += bytes);
        let answer = Event::Answer { host: asked.host, number: asked.number, answer: Some(response), looks };
        self.queue.push(at, answer);
        self.tell();
    }

    /// Sends watch events to every running host that waits for a disk.
    fn tell(&mut self) {
        let news: Rc<[_]> = self.server.store.take_news().into();
        if news.is_empty() || self.owners.pacing == Pacing::Looks || self.now.0 <= JOINED_NS {
            return;
        }
        for (host, at) in (0..self.hosts.len()).map(|host| (host, self.now + self.way())).collect::<Vec<_>>()
        {
            if self.hosts[host].is_up && !self.hosts[host].waiting.is_idle() {
                let told_ns = self.server.tell(news.len());
                let news = news.clone();
                self.count(|traffic| {
                    traffic.news += news.len() as f64;
                    traffic.bytes += etcd::news_bytes(news.len());
                });
                let at = at + self.owners.etcd.commit_ns + told_ns;
                self.queue.push(at, Event::Watched { host, news });
            }
        }
    }

    fn way(&mut self) -> u64 {
        let way = self.owners.etcd.way_ns;
        way / 2 + self.dice.below(way + 1)
    }

    fn count(&mut self, count: impl FnOnce(&mut Traffic)) {
        let second = (self.now.0 / SECOND_NS) as usize;
        if self.traffic.len() <= second {
            self.traffic.resize(second + 1, Traffic::default());
        }
        count(&mut self.traffic[second]);
    }

    fn kill(&mut self) {
        self.kill_at = self.now;
        // Evenly spaced host numbers avoid that the disks are all on adjacent hosts.
        let every = self.hosts.len() / self.owners.killed;
        for host in (0..self.owners.killed).map(|killed| killed * every) {
            self.hosts[host].is_up = false;
            for disk in std::mem::take(&mut self.hosts[host].held) {
                self.orphans.insert(disk, None);
            }
        }
        self.takes = 0;
    }

    fn outcome(mut self) -> Outcome {
        let from = (JOINED_NS / SECOND_NS + self.owners.warm_s) as usize;
        let to = from + self.owners.steady_s as usize;
        self.traffic.resize(self.traffic.len().max(to), Traffic::default());
        let steady = &self.traffic[from..to];
        let parts = steady.len() as f64;
        let mean = |of: fn(&Traffic) -> f64| steady.iter().map(of).sum::<f64>() / parts;
        let after = self.traffic.iter().skip((self.kill_at.0 / SECOND_NS) as usize);
        let busiest = after.max_by(|a, b| a.questions().total_cmp(&b.questions()));
        let away = self.orphans.values().flatten().map(|at| at.nanos_since(self.kill_at));
        let mut away_ns: Vec<u64> = away.collect();
        away_ns.sort_unstable();
        Outcome {
            steady: Traffic {
                renewals: mean(|it| it.renewals),
                looks: mean(|it| it.looks),
                takes: mean(|it| it.takes),
                news: mean(|it| it.news),
                bytes: mean(|it| it.bytes),
            },
            busiest: busiest.copied().unwrap_or_default(),
            orphans: self.orphans.len(),
            takes_a_disk: self.takes as f64 / away_ns.len().max(1) as f64,
            away_ns,
            leases_lost: self.hosts.iter().filter(|host| host.is_up && host.lost_lease).count(),
            longest_ns: self.server.longest_ns,
        }
    }
}
