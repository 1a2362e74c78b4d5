//! PostgreSQL on a disk of hob keeps every acknowledged commit during faults of the daemon, the
//! backing and the flash.
//!
//! The database uses hob like a VM, through QEMU's NBD client, which reconnects. Its ext4 is on a
//! loop device over `nbdfuse`, `qemu-storage-daemon`, hob, and an nbdkit that needs 4 ms for each
//! request. A fault happens under load, and no client of the database may see an error. Then the
//! server crashes, the filesystem is unmounted so that the page cache has nothing of it, and the
//! server recovers. No acknowledged commit may be missing, the sums of pgbench must agree, and
//! `pg_amcheck` and `pg_checksums` must report no error.
//!
//! `HOB_POSTGRES_ROUNDS=N` runs the schedule N times, with longer outages and in a different order
//! each time. `HOB_POSTGRES_STEP=TEXT` runs the steps whose names contain TEXT. These tests mount
//! filesystems, and so need root and /dev/fuse.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use conformance::data::{Noise, empty_file};
use conformance::mounts::unmount;
use conformance::process::Process;
use conformance::scratch::{is_listening, wait_for, wait_until};
use conformance::store::{ONE_BY_ONE, nbdkit};
use conformance::{Daemon, Loop, MIB, Postgres, Scratch, Tool, Unmount};
use rustix::process::Signal;

const DISK: u64 = 1024 * MIB;
const FLASH: u64 = 160 * MIB;
const WRITERS: u64 = 2;
/// Number of commits of each writer that show that the database works.
const PROGRESS: u64 = 10;
/// Maximum time until the database works again. QEMU's client tries to connect every few seconds.
const PROGRESS_MAX: Duration = Duration::from_secs(180);
/// Time for which QEMU's client keeps requests without a connection, seconds.
const RECONNECT_S: u32 = 300;
/// Length of a hang of the backing in a run of one round.
const SHORT_HANG: Duration = Duration::from_secs(3);
/// Length of a hang of the backing in a run of several rounds.
const LONG_HANG: Duration = Duration::from_secs(20);

/// One fault under load, and the action that ends it.
struct Step {
    name: &'static str,
    run: fn(&mut Stack),
}

const SCHEDULE: &[Step] = &[
    Step { name: "hob is killed and started", run: hob_is_killed },
    Step { name: "hob is upgraded", run: hob_is_upgraded },
    Step { name: "hob is stopped and started", run: hob_is_stopped },
    Step { name: "the backing does not answer for seconds", run: backing_hangs },
    Step { name: "the backing is killed and started", run: backing_is_killed },
    Step { name: "the backing is stopped and started", run: backing_is_stopped },
    Step { name: "the cache grows and shrinks", run: cache_is_resized },
    Step { name: "the cache changes its mode", run: mode_changes },
    Step { name: "a flash device is removed and added", run: flash_is_removed },
    Step { name: "a flash device fails and is replaced", run: flash_fails },
];

fn hob_is_killed(stack: &mut Stack) {
    stack.daemon.take().expect("the daemon runs").kill();
    stack.outage(Duration::ZERO);
    stack.start_daemon();
}

fn hob_is_upgraded(stack: &mut Stack) {
    let process = &mut stack.daemon().process;
    let count = |process: &Process, what: &str| process.stderr().matches(what).count();
    let [done, refused] = ["the control API is at", "not upgraded"];
    let (before, mut refusals) = (count(process, done), count(process, refused));
    process.signal(Signal::HUP);
    wait_until("the upgrade", PROGRESS_MAX, || {
        assert!(process.poll().is_none(), "the daemon ended: {}", process.stderr());
        // On a busy host, requests may take longer than an upgrade waits for them.
        if count(process, refused) > refusals {
            refusals = count(process, refused);
            process.signal(Signal::HUP);
        }
        count(process, done) > before
    });
}

fn hob_is_stopped(stack: &mut Stack) {
    stack.daemon.take().expect("the daemon runs").stop();
    stack.outage(Duration::ZERO);
    stack.start_daemon();
}

fn backing_hangs(stack: &mut Stack) {
    stack.backing().signal(Signal::STOP);
    std::thread::sleep(if stack.is_long() { LONG_HANG } else { SHORT_HANG });
    stack.backing().signal(Signal::CONT);
}

fn backing_is_killed(stack: &mut Stack) {
    stack.backing().kill();
    stack.outage(Duration::from_millis(500));
    stack.start_backing();
}

/// The server answers NBD_ESHUTDOWN until its clients have disconnected.
fn backing_is_stopped(stack: &mut Stack) {
    stack.backing().signal(Signal::TERM);
    let ended = stack.backing().wait(Duration::from_secs(60));
    assert!(ended.is_some(), "nbdkit still waits for hob to disconnect");
    stack.outage(Duration::from_millis(500));
    stack.start_backing();
}

fn cache_is_resized(stack: &mut Stack) {
    stack.ctl("cache resize db 96M");
    stack.outage(Duration::ZERO);
    stack.ctl("cache resize db 48M");
    stack.ctl("cache resize db 64M");
}

fn mode_changes(stack: &mut Stack) {
    for mode in ["write-through", "write-back"] {
        stack.ctl(&format!("cache set db --mode {mode}"));
        stack.outage(Duration::from_millis(300));
    }
}

fn flash_is_removed(stack: &mut Stack) {
    let device = stack.scratch.text("flash1");
    stack.ctl(&format!("pool remove-device pool {device}"));
    stack.outage(Duration::from_millis(300));
    stack.ctl(&format!("pool add-device pool {device}"));
}

/// The other device has the replica of dirty data.
fn flash_fails(stack: &mut Stack) {
    let device = stack.scratch.text("flash1");
    OpenOptions::new().write(true).open(&device).unwrap().set_len(0).unwrap();
    stack.outage(Duration::from_millis(500));
    stack.ctl(&format!("pool remove-device pool {device}"));
    fs::remove_file(&device).unwrap();
    stack.ctl(&format!("pool add-device pool {device} --size {FLASH}"));
}

/// The daemon, its backing, and the guest's connection to the disk. Fields are in the order in
/// which they must end.
struct Stack {
    guest: Option<Guest>,
    daemon: Option<Daemon>,
    backing: Option<Process>,
    scratch: Scratch,
    rounds: u32,
}

/// The parts of a VM: QEMU's NBD client, and the disk as a block device.
struct Guest {
    _unmount: Unmount,
    device: Loop,
    nbdfuse: Process,
    _unmount_file: Unmount,
    qemu: Process,
}

impl Guest {
    /// Ends the connection to the disk like a crash of the VM: unanswered requests fail.
    fn cut_off(&mut self) {
        self.nbdfuse.kill();
        self.qemu.kill();
    }
}

impl Stack {
    fn new() -> Self {
        let scratch = Scratch::new();
        // The database's user needs access to the mount point.
        Tool::new("chmod").arg("0711").arg(scratch.dir()).run();
        empty_file(&scratch.path("disk.img"), DISK);
        let rounds = std::env::var("HOB_POSTGRES_ROUNDS");
        let rounds = rounds.map_or(1, |n| n.parse().expect("HOB_POSTGRES_ROUNDS is a number"));
        let at = |name: &str| scratch.text(name);
        let config = format!(
            "[[pool]]\nname = \"pool\"\ndevices = [{:?}, {:?}]\nsize = {FLASH}\nsegment_size = \"1M\"\n\
             [[disk]]\nname = \"db\"\nbacking = \"nbd+unix:///?socket={}\"\n\
             [disk.cache]\npool = \"pool\"\nsize = \"64M\"\nmode = \"write-back\"\ncopies = \"2-dirty\"\ndirty_age_max = 2\n",
            at("flash0"),
            at("flash1"),
            at("back.sock"),
        );
        scratch.configure(&config);
        let mut stack = Self { guest: None, daemon: None, backing: None, scratch, rounds };
        stack.start_backing();
        stack.start_daemon();
        stack
    }

    fn start_backing(&mut self) {
        let image = self.scratch.text("disk.img");
        let slow_file = ["--filter=delay", "file", &image, "rdelay=4ms", "wdelay=4ms"];
        self.backing = Some(nbdkit(&self.scratch.path("back.sock"), &[&ONE_BY_ONE[..], &slow_file].concat()));
    }

    fn start_daemon(&mut self) {
        for socket in ["ctl.sock", "nbd.sock"] {
            let _ = fs::remove_file(self.scratch.path(socket));
        }
        let daemon = self.scratch.start_daemon();
        // The daemon's socket answers when its disks exist.
        daemon.ctl(&["disk", "list"]);
        self.daemon = Some(daemon);
    }

    fn start_guest(&mut self) {
        let at = |name: &str| self.scratch.path(name);
        let _ = fs::remove_file(at("vm.sock"));
        let disk = format!(
            "driver=nbd,node-name=disk,server.type=unix,server.path={},export=db,reconnect-delay={RECONNECT_S}",
            self.scratch.text("nbd.sock"),
        );
        let server = format!("addr.type=unix,addr.path={}", self.scratch.text("vm.sock"));
        let qemu = Tool::new("qemu-storage-daemon")
            .args(["--blockdev", &disk, "--nbd-server", &server])
            .args(["--export", "type=nbd,id=export,node-name=disk,name=disk,writable=on"])
            .start();
        wait_for("QEMU's socket", || is_listening(&at("vm.sock")));
        fs::write(at("vm.img"), b"").unwrap();
        let unmount_file = Unmount::at(&at("vm.img"));
        let uri = format!("nbd+unix:///disk?socket={}", self.scratch.text("vm.sock"));
        let nbdfuse = Tool::new("nbdfuse").arg(at("vm.img")).arg(uri).start();
        wait_for("nbdfuse's file", || fs::metadata(at("vm.img")).is_ok_and(|file| file.len() == DISK));
        let device = Loop::on(&at("vm.img"), true);
        let unmount = Unmount::at(&at("mnt"));
        self.guest = Some(Guest { _unmount: unmount, device, nbdfuse, _unmount_file: unmount_file, qemu });
    }

    fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("the daemon runs")
    }

    fn backing(&mut self) -> &mut Process {
        self.backing.as_mut().expect("the backing runs")
    }

    fn device(&self) -> &str {
        self.guest.as_ref().expect("the guest runs").device.device()
    }

    #[track_caller]
    fn ctl(&self, line: &str) {
        let daemon = self.daemon.as_ref().expect("the daemon runs");
        daemon.ctl(&line.split_whitespace().collect::<Vec<_>>());
    }

    /// Waits for `short`, and for much longer in a run of several rounds.
    fn outage(&self, short: Duration) {
        std::thread::sleep(if self.is_long() { short * 6 + Duration::from_secs(1) } else { short });
    }

    /// Returns true if the run has several rounds, with longer outages.
    fn is_long(&self) -> bool {
        self.rounds > 1
    }

    fn mount(&self) {
        let at = self.scratch.path("mnt");
        fs::create_dir_all(&at).unwrap();
        Tool::new("mount").args(["-o", "noatime", self.device()]).arg(at).run();
    }

    fn unmount(&self) {
        self.kernel_saw_no_error();
        unmount(&self.scratch.path("mnt"));
    }

    fn kernel_saw_no_error(&self) {
        let device = self.device().trim_start_matches("/dev/");
        let errors = fs::read_to_string(format!("/sys/fs/ext4/{device}/errors_count")).unwrap();
        assert_eq!(errors.trim(), "0", "ext4 met errors on its disk");
    }
}

/// The commits of one writer, numbered from 1 on.
#[derive(Default)]
struct Writer {
    sent: AtomicU64,
    acknowledged: AtomicU64,
}

/// Clients that write until their server ends.
struct Load {
    pgbench: Process,
    threads: Vec<JoinHandle<std::io::Error>>,
    writers: Arc<[Writer]>,
}

impl Load {
    fn start(postgres: &Postgres, writers: &Arc<[Writer]>) -> Self {
        let pgbench =
            postgres.client("pgbench").args(["--no-vacuum", "--client=2", "--time=100000", "postgres"]);
        let pgbench = pgbench.start();
        let commit = |id: usize| {
            let (mut session, writers) = (postgres.connect().unwrap(), Arc::clone(writers));
            move || {
                let writer = &writers[id];
                loop {
                    let number = writer.sent.fetch_add(1, SeqCst) + 1;
                    let insert =
                        format!("INSERT INTO ledger VALUES ({id}, {number}, repeat('{number} ', 20))");
                    match session.query(&insert) {
                        Ok(_) => writer.acknowledged.store(number, SeqCst),
                        Err(error) => return error,
                    }
                }
            }
        };
        let threads = (0..writers.len()).map(|id| std::thread::spawn(commit(id))).collect();
        Self { pgbench, threads, writers: Arc::clone(writers) }
    }

    /// Waits until each writer has committed further transactions.
    #[track_caller]
    fn goes_on(&mut self, postgres: &Postgres, when: &str) {
        let counts = || self.writers.iter().map(|writer| writer.acknowledged.load(SeqCst));
        let before: Vec<u64> = counts().collect();
        wait_until(&format!("commits when {when}"), PROGRESS_MAX, || {
            let ended = self.pgbench.poll().is_some() || self.threads.iter().any(JoinHandle::is_finished);
            assert!(!ended, "{when}: a client met an error; the server's log: {}", postgres.log());
            counts().zip(&before).all(|(now, before)| now >= before + PROGRESS)
        });
    }

    /// Waits for the end of the clients, which end when the server has crashed.
    fn end(self) {
        for thread in self.threads {
            thread.join().expect("a writer ends");
        }
    }
}

/// Creates a database with pgbench's tables and the writers' tables.
fn database(stack: &Stack) -> Postgres {
    Tool::new("mkfs.ext4").args(["-q", "-F", "-E", "nodiscard", stack.device()]).run();
    stack.mount();
    let postgres = Postgres::create(&stack.scratch.path("mnt/data"));
    postgres.client("pgbench").args(["--initialize", "--quiet", "--scale=2", "postgres"]).run();
    postgres
        .query("CREATE TABLE ledger (writer int, number bigint, text text, PRIMARY KEY (writer, number))");
    postgres
}

/// Checks that each acknowledged commit exists, and that the numbers have no gap.
fn check_ledger(postgres: &Postgres, writers: &[Writer], when: &str) {
    for (id, writer) in writers.iter().enumerate() {
        let found = postgres.query(&format!(
            "SELECT count(*), coalesce(max(number), 0) FROM ledger \
             WHERE writer = {id} AND text = repeat(number || ' ', 20)"
        ));
        let [count, last] = [0, 1].map(|column| found[0][column].parse::<u64>().unwrap());
        let (acknowledged, sent) = (writer.acknowledged.load(SeqCst), writer.sent.load(SeqCst));
        assert!(
            count == last && (acknowledged..=sent).contains(&last),
            "{when}: writer {id} sent {sent} commits, {acknowledged} were acknowledged; found {count}, the last is {last}"
        );
        writer.sent.store(last, SeqCst);
        writer.acknowledged.store(last, SeqCst);
    }
}

/// Checks that the sums that each transaction of pgbench changes are equal.
fn check_sums(postgres: &Postgres, when: &str) {
    let sums = postgres.query(
        "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(bbalance) FROM pgbench_branches), \
         (SELECT sum(tbalance) FROM pgbench_tellers), (SELECT coalesce(sum(delta), 0) FROM pgbench_history)",
    );
    assert!(sums[0].iter().all(|sum| *sum == sums[0][0]), "{when}: pgbench's sums differ: {:?}", sums[0]);
}

/// Recovers a database whose server does not run, checks that nothing is lost or damaged, and stops
/// the server.
fn check(postgres: &mut Postgres, writers: &[Writer], when: &str) {
    postgres.start();
    check_ledger(postgres, writers, when);
    check_sums(postgres, when);
    postgres.check_structure();
    postgres.stop();
    postgres.check_checksums();
    let log = postgres.log();
    for bad in [
        "PANIC",
        "could not read",
        "could not write",
        "could not fsync",
        "invalid page",
        "Input/output error",
    ] {
        assert!(!log.contains(bad), "{when}: the server's log has {bad:?}: {log}");
    }
}

/// Returns the steps of one round; the order differs between rounds.
fn schedule(round: u32) -> Vec<&'static Step> {
    let only = std::env::var("HOB_POSTGRES_STEP").unwrap_or_default();
    let mut steps: Vec<&Step> = SCHEDULE.iter().filter(|step| step.name.contains(&only)).collect();
    assert!(!steps.is_empty(), "no step's name contains {only:?}");
    let mut random = Noise::new(u64::from(round));
    for last in (1..steps.len()).rev().filter(|_| round > 0) {
        steps.swap(last, random.below(last as u64 + 1) as usize);
    }
    steps
}

/// Writes the duration of a run to the output, also if the test succeeds. The test harness captures
/// only what macros print.
fn record_duration(count: u32, what: &str, begun: Instant) {
    let line = format!("postgres: {count} {what} took {:.1} s\n", begun.elapsed().as_secs_f64());
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Promise 1 for a database: faults that a guest does not notice, and a crash of the database after
/// each.
#[test]
fn no_acknowledged_commit_is_lost_and_no_client_sees_an_error() {
    let begun = Instant::now();
    let mut stack = Stack::new();
    stack.start_guest();
    let mut postgres = database(&stack);
    let writers: Arc<[Writer]> = (0..WRITERS).map(|_| Writer::default()).collect();
    for step in (0..stack.rounds).flat_map(schedule) {
        let start = Instant::now();
        let mut load = Load::start(&postgres, &writers);
        load.goes_on(&postgres, "the load starts");
        (step.run)(&mut stack);
        load.goes_on(&postgres, step.name);
        postgres.crash();
        load.end();
        stack.unmount();
        stack.mount();
        check(&mut postgres, &writers, step.name);
        postgres.start();
        println!("{}: {:.1} s", step.name, start.elapsed().as_secs_f64());
    }
    postgres.stop();
    stack.unmount();
    stack.guest = None;
    let commits: u64 = writers.iter().map(|writer| writer.acknowledged.load(SeqCst)).sum();
    println!("{commits} acknowledged commits, every one of them found");
    // Without hob: the backing has all data.
    stack.ctl("drain db");
    stack.daemon.take().expect("the daemon runs").stop();
    stack.backing = None;
    let device = Loop::on(&stack.scratch.path("disk.img"), true);
    Tool::new("e2fsck").args(["-f", "-n", device.device()]).run();
    let mounted = device.mount(&stack.scratch.path("mnt"), "noatime");
    check(&mut postgres, &writers, "the backing without hob");
    mounted.unmount();
    record_duration(stack.rounds, "rounds of faults", begun);
}

/// Promise 1 for a database: the daemon and the guest are killed together, and ext4 and the
/// database recover.
#[test]
fn no_acknowledged_commit_is_lost_when_hob_and_the_guest_are_killed() {
    let begun = Instant::now();
    let mut stack = Stack::new();
    stack.start_guest();
    let mut postgres = database(&stack);
    let writers: Arc<[Writer]> = (0..WRITERS).map(|_| Writer::default()).collect();
    for round in 0..2 * stack.rounds {
        let mut load = Load::start(&postgres, &writers);
        load.goes_on(&postgres, "the load starts");
        stack.daemon.take().expect("the daemon runs").kill();
        // Unanswered requests fail, and ext4 stops.
        stack.guest.as_mut().expect("the guest runs").cut_off();
        postgres.crash();
        load.end();
        stack.guest = None;
        stack.start_daemon();
        stack.start_guest();
        stack.mount();
        let mut recovered = Postgres::existing(&stack.scratch.path("mnt/data"));
        check(&mut recovered, &writers, &format!("crash {round}"));
        recovered.start();
        postgres = recovered;
    }
    postgres.stop();
    stack.unmount();
    record_duration(2 * stack.rounds, "crashes", begun);
}
