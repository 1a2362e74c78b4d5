//! A temporary Ceph cluster on the loopback interface: one monitor and some OSDs, whose data are sparse
//! files in a scratch directory.
//!
//! The cluster has no Ceph manager, because a manager only gathers statistics and takes seconds to
//! start. All processes end with the last test that uses them, even if the test fails or is killed.
//! The cluster uses free ports, so that several clusters can run at the same time.
//!
//! An OSD can be killed, paused, and started again with its data. Tests that do none of this share
//! a cluster, each with its own pool.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::process::Process;
use crate::scratch::{Scratch, free_port, wait_until};
use crate::tool::{Tool, find};

/// Timeout of each step.
const STEP_MAX: Duration = Duration::from_secs(120);

/// Maximum number of ports that are tried for a monitor, since another process may take a free port first.
const PORTS_MAX: u32 = 5;

/// Number of copies of each object.
const COPIES: usize = 3;

/// Size of an OSD's sparse file in bytes.
const OSD_BYTES: u64 = 4 << 30;

/// Number of OSDs of the cluster that tests share.
const SHARED_OSDS: usize = 3;

/// The processes of the cluster that tests share, while a test uses them.
static SHARED: Mutex<Weak<Daemons>> = Mutex::new(Weak::new());

/// Number of pools in shared clusters so far.
static POOLS: AtomicU32 = AtomicU32::new(0);

/// The processes of a cluster. Dropping the value ends them and deletes their files.
#[derive(Debug)]
struct Daemons {
    // The OSDs, in the order in which they must end.
    osds: Vec<Process>,
    monitor: Process,
    scratch: Scratch,
}

impl Daemons {
    #[track_caller]
    fn start(osds: usize) -> Self {
        let scratch = Scratch::new();
        for directory in ["run", "log", "crash"] {
            std::fs::create_dir(scratch.path(directory)).expect("a directory in the scratch directory");
        }
        let id = std::fs::read_to_string("/proc/sys/kernel/random/uuid").expect("Linux has random ids");
        keys(&scratch, osds);
        let monitor = (0..PORTS_MAX)
            .find_map(|_| start_monitor(&scratch, id.trim(), osds))
            .expect("a monitor that finds its port free");
        let made: Vec<Process> = (0..osds).map(|osd| make_osd(&scratch, osd)).collect();
        for mut osd in made {
            let output = osd.finish(STEP_MAX);
            assert!(output.success(), "an OSD was not made ({:?}): {}", output.status, output.all());
        }
        let osds = (0..osds).map(|osd| start_osd(&scratch, osd)).collect();
        Self { osds, monitor, scratch }
    }

    /// Returns the processes of the shared cluster, which are started if no test uses them.
    ///
    /// # Panics
    /// Panics if the cluster does not start.
    fn shared() -> Arc<Self> {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let (sender, receiver) = mpsc::channel();
            // The kernel kills the processes when the thread that started them ends. The thread of a
            // test ends before other tests.
            thread::spawn(move || {
                if sender.send(Self::start(SHARED_OSDS)).is_ok() {
                    loop {
                        thread::park();
                    }
                }
            });
            let daemons = Arc::new(receiver.recv().expect("a cluster that starts"));
            *shared = Arc::downgrade(&daemons);
            daemons
        })
    }
}

/// A pool in a cluster. Dropping the last value of a cluster ends the processes of the cluster and
/// deletes their files.
#[derive(Debug)]
pub struct Cluster {
    daemons: Arc<Daemons>,
    pool: String,
    /// Directory of exported images.
    scratch: Scratch,
}

impl Cluster {
    /// Starts a monitor and `osds` OSDs, and waits until the pool `rbd` accepts writes.
    ///
    /// # Panics
    /// Panics if a program is missing, or the cluster does not start.
    #[must_use]
    #[track_caller]
    pub fn start(osds: usize) -> Self {
        Self::with_pool(Arc::new(Daemons::start(osds)), "rbd".to_owned())
    }

    /// Returns a new pool in a cluster that other tests use too. The cluster has three OSDs.
    ///
    /// # Panics
    /// Panics in the same cases as [`Self::start`].
    #[must_use]
    #[track_caller]
    pub fn shared() -> Self {
        Self::with_pool(Daemons::shared(), format!("rbd{}", POOLS.fetch_add(1, Ordering::Relaxed)))
    }

    #[track_caller]
    fn with_pool(daemons: Arc<Daemons>, pool: String) -> Self {
        let cluster = Self { daemons, pool, scratch: Scratch::new() };
        cluster.ceph(&["osd", "pool", "create", &cluster.pool, "8", "8", "replicated"]);
        // The pool's first write ends when all placement groups are active.
        cluster.rbd(&["pool", "init", &cluster.pool]);
        cluster
    }

    /// Returns the name of the pool.
    #[must_use]
    pub fn pool(&self) -> &str {
        &self.pool
    }

    /// Returns the path of the cluster's configuration, for clients.
    #[must_use]
    pub fn conf(&self) -> String {
        self.daemons.scratch.text("ceph.conf")
    }

    /// Returns hob's name for an image of the pool, or a snapshot of one.
    #[must_use]
    pub fn spec(&self, image: &str) -> String {
        format!("rbd:{}/{image}:conf={}", self.pool, self.conf())
    }

    /// Runs `ceph`, and returns its output.
    #[track_caller]
    pub fn ceph(&self, args: &[&str]) -> String {
        Tool::new("ceph").args(["--conf", &self.conf()]).args(args).limit(STEP_MAX).run()
    }

    /// Runs `rbd`, and returns its output. `rbd/` at the beginning of an argument stands for the
    /// cluster's pool.
    #[track_caller]
    pub fn rbd(&self, args: &[&str]) -> String {
        let in_pool = |arg: &&str| match arg.strip_prefix("rbd/") {
            Some(image) => format!("{}/{image}", self.pool),
            None => (*arg).to_owned(),
        };
        let args = args.iter().map(in_pool);
        Tool::new("rbd").args(["--conf", &self.conf()]).args(args).limit(STEP_MAX).run()
    }

    /// Creates an image from a file.
    #[track_caller]
    pub fn import(&self, file: &Path, image: &str) {
        self.rbd(&[
            "import",
            "--no-progress",
            "--dest-pool",
            &self.pool,
            file.to_str().expect("scratch paths are ASCII"),
            image,
        ]);
    }

    /// Returns the bytes of an image or a snapshot.
    #[must_use]
    #[track_caller]
    pub fn export(&self, image: &str) -> Vec<u8> {
        let file = self.scratch.path("exported");
        let _ = std::fs::remove_file(&file);
        self.rbd(&["export", "--no-progress", &format!("rbd/{image}"), &self.scratch.text("exported")]);
        std::fs::read(file).expect("what was exported")
    }

    /// Breaks the lock on an image, which fences its holder.
    ///
    /// # Panics
    /// Panics if the image is not locked.
    #[track_caller]
    pub fn break_lock(&self, image: &str) {
        let locks = self.rbd(&["lock", "list", "--format", "json", &format!("rbd/{image}")]);
        let locks: Value = serde_json::from_str(&locks).expect("rbd speaks JSON");
        let lock = locks.get(0).unwrap_or_else(|| panic!("nobody has locked {image}: {locks}"));
        let word = |name: &str| lock[name].as_str().unwrap_or_else(|| panic!("no {name}: {lock}")).to_owned();
        self.rbd(&["lock", "remove", &format!("rbd/{image}"), &word("id"), &word("locker")]);
    }

    /// Returns the number of OSDs.
    #[must_use]
    pub fn osds(&self) -> usize {
        self.daemons.osds.len()
    }

    /// Returns the processes, which no other test may use.
    #[track_caller]
    fn own(&mut self) -> &mut Daemons {
        Arc::get_mut(&mut self.daemons).expect("a cluster that is not shared")
    }

    /// Kills an OSD with SIGKILL, as in a crash.
    pub fn kill(&mut self, osd: usize) {
        self.own().osds[osd].kill();
    }

    /// Pauses an OSD. A paused OSD does not answer, and its connections stay open.
    pub fn pause(&mut self, osd: usize) {
        self.own().osds[osd].signal(Signal::STOP);
    }

    /// Resumes a paused OSD.
    pub fn resume(&mut self, osd: usize) {
        self.own().osds[osd].signal(Signal::CONT);
    }

    /// Starts a killed OSD again.
    #[track_caller]
    pub fn restart(&mut self, osd: usize) {
        let daemons = self.own();
        daemons.osds[osd] = start_osd(&daemons.scratch, osd);
    }

    /// Returns true if the monitor reports the OSD as up.
    #[must_use]
    #[track_caller]
    pub fn is_up(&self, osd: usize) -> bool {
        let map: Value =
            serde_json::from_str(&self.ceph(&["osd", "dump", "--format", "json"])).expect("JSON");
        map["osds"].as_array().into_iter().flatten().any(|of| of["osd"] == osd && of["up"] == 1)
    }

    /// Waits until the monitor reports all OSDs as up.
    #[track_caller]
    pub fn wait_up(&self) {
        wait_until("all OSDs to be up", STEP_MAX, || (0..self.osds()).all(|osd| self.is_up(osd)));
    }

    /// Returns true if the monitor is running.
    #[must_use]
    pub fn lives(&mut self) -> bool {
        self.own().monitor.poll().is_none()
    }
}

/// Creates all keys in one file, which only this user can read.
#[track_caller]
fn keys(scratch: &Scratch, osds: usize) {
    let all = [("mon.", "mon allow *"), ("client.admin", "mon allow *,mgr allow *,osd allow *")];
    let all = all.map(|(name, may)| (name.to_owned(), may));
    let osds = (0..osds).map(|osd| (format!("osd.{osd}"), "mon allow profile osd,osd allow *"));
    let file = scratch.text("keyring");
    Tool::new("ceph-authtool").args(["--create-keyring", &file]).run();
    for (name, may) in all.into_iter().chain(osds) {
        let mut tool = Tool::new("ceph-authtool").args([&file, "--gen-key", "--name", &name]);
        for cap in may.split(',') {
            let (service, what) = cap.split_once(' ').expect("a service and what may be done there");
            tool = tool.args(["--cap", service, what]);
        }
        tool.run();
    }
}

/// Starts a monitor with a new map of the cluster, and waits until the monitor answers. Returns
/// `None` if another program uses the monitor's port.
#[track_caller]
fn start_monitor(scratch: &Scratch, id: &str, osds: usize) -> Option<Process> {
    let address = format!("[v2:127.0.0.1:{}]", free_port());
    std::fs::write(scratch.path("ceph.conf"), configuration(scratch, id, &address)).expect("ceph.conf");
    let conf = scratch.text("ceph.conf");
    let (monmap, osdmap) = (scratch.text("monmap"), scratch.text("osdmap"));
    let _ = std::fs::remove_dir_all(scratch.path("mon"));
    Tool::new("monmaptool")
        .args(["--create", "--clobber", "--fsid", id, "--addv", "a", &address, &monmap])
        .run();
    // The map has an entry for each OSD, so that no OSD must be created later.
    Tool::new("osdmaptool")
        .args(["--conf", &conf, "--createsimple", &osds.to_string(), "--clobber", &osdmap])
        .run();
    let keyring = scratch.text("keyring");
    Tool::new("ceph-mon")
        .args(["--conf", &conf, "--id", "a", "--mkfs", "--monmap", &monmap, "--osdmap", &osdmap])
        .args(["--keyring", &keyring])
        .run();
    let mut monitor = daemon(scratch, "ceph-mon", "a");
    let mut ceph =
        Tool::new("ceph").args(["--conf", &conf, "--connect-timeout", "60", "mon", "stat"]).start();
    loop {
        if ceph.poll().is_some_and(|status| status.success()) {
            return Some(monitor);
        }
        if monitor.poll().is_some() {
            let said = monitor.stderr();
            assert!(said.contains("unable to bind"), "the monitor ended: {said}");
            return None;
        }
        assert!(ceph.poll().is_none(), "the monitor does not answer: {}", ceph.stderr());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[track_caller]
fn make_osd(scratch: &Scratch, osd: usize) -> Process {
    std::fs::create_dir(scratch.path(&format!("osd.{osd}"))).expect("a directory for an OSD");
    Tool::new("ceph-osd")
        .args(["--conf", &scratch.text("ceph.conf"), "--id", &osd.to_string(), "--mkfs", "--no-mon-config"])
        .args(["--monmap", &scratch.text("monmap")])
        .start()
}

#[track_caller]
fn start_osd(scratch: &Scratch, osd: usize) -> Process {
    daemon(scratch, "ceph-osd", &osd.to_string())
}

/// Starts one of Ceph's daemons as a child process that does not detach itself.
#[track_caller]
fn daemon(scratch: &Scratch, program: &str, id: &str) -> Process {
    let mut command = Command::new(find(program));
    command.args(["--foreground", "--conf", &scratch.text("ceph.conf"), "--id", id]);
    Process::start(program, &mut command).unwrap_or_else(|error| panic!("start {program}: {error}"))
}

/// Returns a configuration with short intervals and little memory.
fn configuration(scratch: &Scratch, id: &str, monitor: &str) -> String {
    let at = |name: &str| scratch.text(name);
    format!(
        "[global]
fsid = {id}
mon_host = {monitor}
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
ms_async_op_threads = 2
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
keyring = {keyring}
run_dir = {run}
crash_dir = {crash}
osd_pool_default_size = {COPIES}
osd_pool_default_min_size = 2
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
# An OSD that is silent for so long is out of it.
osd_heartbeat_interval = 1
osd_heartbeat_grace = 6
mon_osd_min_down_reporters = 1
mon_osd_down_out_interval = 3600

[client]
log_file =
admin_socket =

[mon]
mon_data = {mon}
log_file = {log}/$name.log
admin_socket =
auth_allow_insecure_global_id_reclaim = false
# The disk of the test host may be nearly full.
mon_data_avail_warn = 2
mon_data_avail_crit = 1
paxos_propose_interval = 0.05
paxos_min_wait = 0.01

[osd]
osd_data = {osd}
log_file = {log}/$name.log
admin_socket =
osd_objectstore = bluestore
bluestore_block_size = {OSD_BYTES}
bluestore_fsck_on_mkfs = false
bluestore_cache_autotune = false
bluestore_cache_size = 67108864
osd_crush_update_on_start = false
osd_class_update_on_start = false
osd_op_num_shards = 2
osd_op_num_threads_per_shard = 1
osd_recovery_sleep = 0
",
        keyring = at("keyring"),
        run = at("run"),
        crash = at("crash"),
        log = at("log"),
        mon = at("mon"),
        osd = at("osd.$id"),
    )
}
