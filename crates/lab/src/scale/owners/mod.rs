//! Many hosts of a cluster and one etcd, in virtual time: the idle load of etcd, and how long disks are
//! unavailable when hosts die.
//!
//! Hosts have the state machines of [`hob_engine::cluster`] and pace their requests as the daemon does. The
//! store is the model that cluster histories use, [`hob_world::cluster::store`], behind a server with a
//! service time for each request ([`etcd`]). Every disk is served by one host, and some others wait for it.
//! Then hosts are killed: their leases end, the settling time of their disks passes, and other hosts take
//! them.
//!
//! Not modelled: backings, caches, and the time to open a disk after it is taken. Times are nanoseconds of
//! virtual time.

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

/// Time by which hosts have joined and have their disks.
const JOINED_NS: u64 = 4 * SECOND_NS;

/// How hosts find released disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pacing {
    /// Each host reads each disk that it waits for every second.
    Looks,
    /// They watch changes, and read many disks with one request.
    ClusterEvent,
}

/// Service times of etcd.
#[derive(Clone, Copy, Debug)]
pub struct EtcdCosts {
    /// A request, nanoseconds of its only server.
    pub question_ns: u64,
    /// A change, in addition.
    pub change_ns: u64,
    /// Each key that it reads.
    pub key_ns: u64,
    /// Each watch event.
    pub news_ns: u64,
    /// Time until a majority has stored a change; other requests continue meanwhile.
    pub commit_ns: u64,
    /// Latency from a host to etcd, and back.
    pub way_ns: u64,
}

/// A model.
#[derive(Clone, Copy, Debug)]
pub struct Owners {
    /// Number of hosts.
    pub hosts: usize,
    /// Number of disks of all hosts.
    pub disks: usize,
    /// Number of hosts that know each disk, if there are as many.
    pub known_by: usize,
    /// Number of hosts that are killed at the same time.
    pub killed: usize,
    /// Length of a lease.
    pub lease_ns: u64,
    /// Settling time of a failed owner.
    pub settle_ns: u64,
    /// How hosts find released disks.
    pub pacing: Pacing,
    /// Service times of etcd.
    pub etcd: EtcdCosts,
    /// Seconds of warm-up.
    pub warm_s: u64,
    /// Seconds in which requests are counted.
    pub steady_s: u64,
    /// Maximum number of seconds after the kill.
    pub after_s: u64,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Requests to etcd per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Requests for leases.
    pub renewals: f64,
    /// Reads of one or more disks.
    pub looks: f64,
    /// Transactions.
    pub takes: f64,
    /// Watch events, for each host that gets them.
    pub news: f64,
    /// Bytes of all of that, in both directions.
    pub bytes: f64,
}

impl Traffic {
    /// Returns the number of requests of all kinds.
    pub fn questions(&self) -> f64 {
        self.renewals + self.looks + self.takes
    }
}

/// Result of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Mean of the idle time.
    pub steady: Traffic,
    /// The busiest second after the kill.
    pub busiest: Traffic,
    /// Number of disks of the killed hosts.
    pub orphans: usize,
    /// Times from the kill until another host took the disk, nanoseconds, sorted; only of disks that were
    /// taken.
    pub away_ns: Vec<u64>,
    /// Number of transactions after the kill per disk that was taken.
    pub takes_a_disk: f64,
    /// Number of hosts that lost their lease without being killed.
    pub leases_lost: usize,
    /// Maximum time of a request in etcd, nanoseconds, without those that timed out.
    pub longest_ns: u64,
}

impl Outcome {
    /// Returns the time within which `percent` percent of the killed hosts' disks were taken; `None` if
    /// they were not taken in time.
    pub fn away_at(&self, percent: usize) -> Option<u64> {
        let place = (self.orphans * percent).div_ceil(100).max(1) - 1;
        self.away_ns.get(place).copied()
    }
}

/// A future event.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a model has few at a time")]
enum Event {
    /// A host's lease manager has work to do.
    Keep(usize),
    /// A host checks for disks to try.
    OwnershipSnapshot(usize),
    /// A request reaches etcd.
    Arrives(Asked),
    /// Etcd completes a request.
    Served,
    /// An answer reaches a host; `None`: it timed out.
    Answer { host: usize, number: u64, answer: Option<hob_world::cluster::store::Response>, looks: Looks },
    /// A host gets watch events.
    Watched { host: usize, news: Rc<[(String, u64, ClusterEvent)]> },
    /// The disks get their first owners.
    Settle,
    /// Hosts are killed.
    Kill,
}

/// The answer to a read of many disks.
type Looks = Vec<hob_engine::cluster::OwnershipSnapshot>;

struct Play {
    owners: Owners,
    now: Instant,
    queue: Queue<Event>,
    server: Server,
    hosts: Vec<Host>,
    dice: Prng,
    /// By second.
    traffic: Vec<Traffic>,
    kill_at: Instant,
    /// Disks of the killed hosts, by name, and when a living host took each.
    orphans: BTreeMap<String, Option<Instant>>,
    takes: u64,
    number: u64,
}

/// Runs a model. `check` is called at intervals and can end the run.
///
/// # Errors
/// Those of `check`.
///
/// # Panics
/// If `killed` equals `hosts`.
pub fn play<E>(owners: &Owners, mut check: impl FnMut() -> Result<(), E>) -> Result<Outcome, E> {
    assert!(owners.killed < owners.hosts, "somebody has to be left");
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
        // At any time between two renewals.
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

    /// Etcd begins the next request, if there is one.
    fn serve(&mut self) {
        if let Some(takes_ns) = self.server.begin(self.now) {
            self.queue.push(self.now + takes_ns, Event::Served);
        }
    }

    /// Etcd completes a request: sends its answer and the watch events.
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

    /// Sends the changes to every watching host.
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
        // Evenly spread numbers: disks are not all on adjacent hosts.
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
