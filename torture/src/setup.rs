//! The plan of a round, generated from the seed: disks, backings, caches and faults.

mod disks;
mod faults;

use std::time::Duration;

use conformance::MIB;
use conformance::data::Noise;
use serde_json::{Value, json};

pub use self::disks::{BackingKind, CACHES, CacheKind, DiskPlan};
pub use self::faults::{Change, Fault};

/// Size of a disk, bytes.
pub const DISK_BYTES: u64 = 16 * MIB;

/// Plan of a round.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Seed of the round.
    pub seed: u64,
    /// Disks of the round.
    pub disks: Vec<DiskPlan>,
    /// True if the pool devices are files of the test file system, which lose unflushed data.
    pub volatile_pool: bool,
    /// Number of the daemon's shard threads.
    pub shards: u64,
    /// Interface of the daemon for I/O, as in hob.toml: `io_uring` or `threads`.
    pub ring: &'static str,
    /// True if the pool is much smaller than the data that the guests use. All caches that can
    /// share the pool do so.
    pub small_pool: bool,
    /// Timeout of requests to an unavailable backing, milliseconds.
    pub backing_wait_ms: u64,
    /// Duration of the guests' load.
    pub load: Duration,
    /// True if guests of raw files write image headers.
    pub headers: bool,
    /// Faults, each with the time since the start of the previous fault.
    pub faults: Vec<(Duration, Fault)>,
}

/// Minimum and maximum duration of the load in a round, milliseconds.
const LOAD_MS: (u64, u64) = (20_000, 40_000);
/// Number of disks in a round.
const DISKS: usize = 4;

fn pick<T: Copy>(noise: &mut Noise, of: &[T]) -> T {
    of[noise.below(of.len() as u64) as usize]
}

fn ms(noise: &mut Noise, from: u64, to: u64) -> Duration {
    Duration::from_millis(from + noise.below(to - from + 1))
}

/// Selects faults and guest habits by words in their names.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// A fault or guest habit is used only if its name contains one of these words. An empty list
    /// selects all faults and guest habits.
    pub only: Vec<String>,
    /// A fault or guest habit is not used if its name contains one of these words.
    pub without: Vec<String>,
}

impl Filter {
    fn takes(&self, name: &str) -> bool {
        let has = |words: &[String]| words.iter().any(|word| name.contains(word.as_str()));
        !has(&self.without) && (self.only.is_empty() || has(&self.only))
    }
}

/// Seed of the separate random numbers of [`Fault::draw_later`].
const LATER_SALT: u64 = 0x6c61_7465;

/// Seed of the separate random numbers of [`Plan::draw_settings`].
const SETTINGS_SALT: u64 = 0x7365_7474;

/// Mean number of cache changes per later fault: one of this many changes is replaced by another
/// fault ([`Fault::draw_later`]).
const LATER_ONE_IN: u64 = 3;

/// Mean number of cache changes per killed `qemu-nbd` in a round with an image.
const IMAGE_SERVER_ONE_IN: u64 = 3;

/// Maximum number of random draws until a selected fault is found.
const DRAWS: usize = 1000;

impl Plan {
    /// Generates the plan of round `round` of the run with `seed`.
    #[must_use]
    pub fn draw(seed: u64, round: u64, filter: &Filter) -> Self {
        let seed = seed ^ (round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut noise = Noise::new(seed);
        let mut disks: Vec<DiskPlan> = (0..DISKS).map(|at| DiskPlan::draw(&mut noise, at)).collect();
        // These random numbers are separate, so that the other choices of a seed do not depend on
        // this choice.
        let mut sharing = Noise::new(!seed);
        for disk in &mut disks {
            disk.shared = sharing.below(2) == 0 && disk.cache.can_share();
        }
        let load = ms(&mut noise, LOAD_MS.0, LOAD_MS.1);
        let volatile_pool = noise.below(2) == 0;
        let mut faults = Vec::new();
        let mut at = Duration::ZERO;
        loop {
            let pause = ms(&mut noise, 200, 3000);
            at += pause;
            if at > load {
                break;
            }
            let mut drawn = (0..DRAWS).map(|_| Fault::draw(&mut noise, &disks, volatile_pool));
            faults.extend(drawn.find(|fault| filter.takes(fault.name())).map(|fault| (pause, fault)));
        }
        // These random numbers are separate, so that the other choices of a seed do not depend on
        // these faults.
        let mut later = Noise::new(seed ^ LATER_SALT);
        for (_, fault) in &mut faults {
            if matches!(fault, Fault::Change { .. }) && later.below(LATER_ONE_IN) == 0 {
                let drawn = Fault::draw_later(&mut later, &disks, volatile_pool);
                if let Some(drawn) = drawn.filter(|drawn| filter.takes(drawn.name())) {
                    *fault = drawn;
                }
            }
        }
        let shards = 1 + noise.below(2);
        let backing_wait_ms = pick(&mut noise, &[2_000, 30_000, 30_000]);
        let mut plan = Plan {
            seed,
            disks,
            volatile_pool,
            shards,
            ring: "io_uring",
            small_pool: false,
            backing_wait_ms,
            load,
            headers: filter.takes("headers"),
            faults,
        };
        plan.draw_settings(filter);
        plan
    }

    /// Draws the settings that were added last. These random numbers are separate, so that the other
    /// choices of a seed do not depend on these settings.
    fn draw_settings(&mut self, filter: &Filter) {
        let mut noise = Noise::new(self.seed ^ SETTINGS_SALT);
        self.ring = pick(&mut noise, &["io_uring", "io_uring", "io_uring", "threads"]);
        self.small_pool = noise.below(4) == 0;
        if self.small_pool {
            self.disks.iter_mut().for_each(|disk| disk.shared = disk.cache.can_share());
        }
        let file = self.disks.iter().position(|disk| disk.backing == BackingKind::File);
        let kill = file.map(|disk| Fault::KillImageServer { disk });
        if let Some(kill) = kill.filter(|kill| noise.below(2) == 0 && filter.takes(kill.name())) {
            self.use_image(&kill, &mut noise);
        }
    }

    /// Replaces the file of a disk by an image. `kill` is the fault that kills the image's server.
    /// This fault replaces some changes of caches, and all changes of the file while the daemon is
    /// down: the test cannot change the image.
    fn use_image(&mut self, kill: &Fault, noise: &mut Noise) {
        let Fault::KillImageServer { disk: image } = *kill else { unreachable!("not a fault of an image") };
        self.disks[image].backing = BackingKind::Image;
        for (_, fault) in &mut self.faults {
            let is_replaced = match fault {
                Fault::ChangeOffline { disk, .. } => *disk == image,
                Fault::Change { .. } => noise.below(IMAGE_SERVER_ONE_IN) == 0,
                _ => false,
            };
            if is_replaced {
                *fault = kill.clone();
            }
        }
    }

    /// Returns the size of each of the two devices of the pool, as in hob.toml. If caches share the
    /// pool, the size is small, so that the caches compete for space. The data of all disks fills a
    /// small pool twice.
    #[must_use]
    pub fn pool_device(&self) -> &'static str {
        match (self.small_pool, self.disks.iter().any(|disk| disk.shared)) {
            (true, _) => "16M",
            (false, true) => "32M",
            (false, false) => "96M",
        }
    }

    /// Returns the plan as JSON for the log.
    #[must_use]
    pub fn describe(&self) -> Value {
        let disks: Vec<Value> = self
            .disks
            .iter()
            .map(|disk| {
                json!({
                    "backing": format!("{:?}", disk.backing), "cache": disk.cache.name, "guests": disk.guests,
                    "vhost_user": disk.vhost_user, "shared": disk.shared,
                })
            })
            .collect();
        let faults: Vec<String> =
            self.faults.iter().map(|(pause, fault)| format!("+{} ms {fault:?}", pause.as_millis())).collect();
        json!({
            "seed": self.seed, "disks": disks, "volatile_pool": self.volatile_pool, "shards": self.shards, "ring": self.ring,
            "small_pool": self.small_pool, "pool_device": self.pool_device(), "backing_wait_ms": self.backing_wait_ms,
            "load_ms": self.load.as_millis() as u64, "faults": faults,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(seed: u64, round: u64) -> Plan {
        Plan::draw(seed, round, &Filter::default())
    }

    #[test]
    fn a_filter_keeps_the_matching_rounds() {
        let filter = Filter { only: vec!["SIGKILL".to_owned()], without: vec!["starts".to_owned()] };
        let plan = Plan::draw(1, 1, &filter);
        assert!(plan.faults.len() > 5 && !plan.headers);
        assert!(
            plan.faults.iter().all(|(_, it)| it.name().contains("SIGKILL") && !it.name().contains("starts"))
        );
    }

    #[test]
    fn a_seed_determines_the_plan() {
        let (one, two) = (draw(5, 1).describe(), draw(5, 1).describe());
        assert_eq!(one, two);
        assert_ne!(one, draw(5, 2).describe());
        assert_ne!(one, draw(6, 1).describe());
    }

    #[test]
    fn each_ring_and_each_size_of_the_pool_comes() {
        let plans: Vec<Plan> = (0..300).map(|round| draw(1, round)).collect();
        let count = |fits: &dyn Fn(&Plan) -> bool| plans.iter().filter(|plan| fits(plan)).count();
        for ring in ["io_uring", "threads"] {
            assert!(count(&|plan| plan.ring == ring) > 40, "{ring}");
        }
        for size in ["16M", "32M", "96M"] {
            assert!(count(&|plan| plan.pool_device() == size) > 5, "{size}");
        }
        let alone = |disk: &DiskPlan| disk.cache.can_share() && !disk.shared;
        assert_eq!(count(&|plan| plan.small_pool && plan.disks.iter().any(alone)), 0);
    }

    #[test]
    fn an_image_is_used_unless_a_filter_leaves_out_its_fault() {
        let image = |plan: &Plan| plan.disks.iter().position(|disk| disk.backing == BackingKind::Image);
        let plans: Vec<Plan> = (0..300).map(|round| draw(1, round)).collect();
        assert!(plans.iter().filter(|plan| image(plan).is_some()).count() > 40);
        for plan in &plans {
            let image = image(plan);
            for (_, fault) in &plan.faults {
                match fault {
                    Fault::KillImageServer { disk } => assert_eq!(Some(*disk), image),
                    Fault::ChangeOffline { disk, .. } => assert_ne!(Some(*disk), image),
                    _ => {}
                }
            }
        }
        let without = Filter { only: Vec::new(), without: vec!["qemu-nbd".to_owned()] };
        assert!((0..300).all(|round| image(&Plan::draw(1, round, &without)).is_none()));
    }

    #[test]
    fn every_round_writes_back_and_through_and_every_fault_comes() {
        let mut names = std::collections::BTreeSet::new();
        let mut caches = std::collections::BTreeSet::new();
        for round in 0..300 {
            let plan = draw(1, round);
            assert!(plan.disks[0].cache.writes_back && !plan.disks[1].cache.writes_back);
            names.extend(plan.faults.iter().map(|(_, fault)| fault.name()));
            caches.extend(plan.disks.iter().map(|disk| disk.cache.name));
        }
        assert_eq!(names.len(), 32, "{names:?}");
        assert_eq!(caches.len(), CACHES.len());
    }
}
