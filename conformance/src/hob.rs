//! Starts and controls `hob`.
//!
//! The binary is the one in `HOB_BIN`, or else the release or debug build in the target directory.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::hosts::Host;
use crate::nbd_client::{Address, Client};
use crate::process::{Output, Process};
use crate::scratch::{Scratch, free_port, text, wait_for};
use crate::stats::Stats;

/// Maximum time until a server's socket answers.
const READY_MAX: Duration = Duration::from_secs(120);
/// Maximum time for a daemon to open its disks. Some tests have disks that cannot be opened.
const OPENING_MAX: Duration = Duration::from_secs(20);
/// Reason that a daemon gives for not serving a disk that it is still opening.
const OPENING: &str = "the disk is being opened";
/// Maximum time of a stop after SIGTERM.
const STOP_MAX: Duration = Duration::from_secs(120);
/// Maximum time of a command.
const COMMAND_MAX: Duration = Duration::from_secs(180);

/// Returns the program under test.
///
/// # Panics
/// Panics if there is no binary.
#[must_use]
#[track_caller]
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("HOB_BIN") {
        let path = PathBuf::from(path);
        assert!(path.is_file(), "HOB_BIN names {}, which does not exist", path.display());
        return path.canonicalize().expect("HOB_BIN has an absolute path");
    }
    // A test program is in TARGET/PROFILE/deps/.
    let me = std::env::current_exe().expect("the test knows its own path");
    let target = me.ancestors().nth(3).expect("a target directory");
    ["release/hob", "debug/hob"]
        .iter()
        .map(|name| target.join(name))
        .find(|path| path.is_file())
        .unwrap_or_else(|| {
            panic!(
                "build hob first (cargo build --release -p hob) or set HOB_BIN; nothing in {}",
                target.display()
            )
        })
}

/// Runs `hob` with `args` until it ends.
#[must_use]
#[track_caller]
pub fn command(args: &[&str]) -> Output {
    let mut process =
        Process::start("hob", Command::new(binary()).args(args)).unwrap_or_else(|e| panic!("start hob: {e}"));
    process.finish(COMMAND_MAX)
}

/// Environment variable with the directory of crash logs, which a killed daemon leaves.
pub const CRASH_LOG_DIR: &str = "HOB_CRASH_LOG_DIR";

/// Environment variable with the default of `flash_stall_ms_max` in milliseconds, and the value for
/// tests. With the real default, hob would bypass the cache after one second and refuse to open a
/// pool after five seconds. The host of the tests may stall for longer.
const FLASH_STALL: (&str, &str) = ("HOB_TEST_FLASH_STALL_MS_MAX", "20000");

/// A builder for a call of `hob serve`.
#[derive(Debug, Clone)]
pub struct Serve {
    args: Vec<String>,
    env: Vec<(String, String)>,
    listen: Listen,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listen {
    Unix,
    Tcp,
}

impl Serve {
    /// Serves `disk`, a path or an NBD URI, without a cache.
    #[must_use]
    pub fn disk(disk: &str) -> Self {
        let mut serve =
            Self { args: vec!["--disk".into(), disk.into()], env: Vec::new(), listen: Listen::Unix };
        if let Ok(ring) = std::env::var("HOB_RING") {
            serve = serve.arg("--ring", &ring);
        }
        serve
    }

    /// Puts a cache of `size` (`64M`) with blocks of `block_size` (`4K`) on the pool file `pool`.
    #[must_use]
    pub fn cached(self, pool: &Path, size: &str, block_size: &str) -> Self {
        self.arg("--pool", &text(pool)).arg("--size", size).arg("--block-size", block_size)
    }

    /// Adds an option with its value.
    #[must_use]
    pub fn arg(mut self, name: &str, value: &str) -> Self {
        self.args.extend([name.to_owned(), value.to_owned()]);
        self
    }

    /// Adds an option without a value.
    #[must_use]
    pub fn flag(mut self, name: &str) -> Self {
        self.args.push(name.to_owned());
        self
    }

    /// Chooses `io_uring` or `threads`; the last call takes effect.
    #[must_use]
    pub fn ring(mut self, ring: &str) -> Self {
        if let Some(at) = self.args.iter().position(|a| a == "--ring") {
            self.args.drain(at..at + 2);
        }
        self.arg("--ring", ring)
    }

    /// Sets a variable in the server's environment.
    #[must_use]
    pub fn env(mut self, key: &str, value: &str) -> Self {
        self.env.push((key.to_owned(), value.to_owned()));
        self
    }

    /// Listens on a TCP port of the loopback interface instead of a Unix socket.
    #[must_use]
    pub fn tcp(mut self) -> Self {
        self.listen = Listen::Tcp;
        self
    }

    /// Starts the server with its sockets in `scratch` and waits until it answers.
    ///
    /// # Panics
    /// Panics if the server ends or does not answer.
    #[must_use]
    #[track_caller]
    pub fn start(&self, scratch: &Scratch) -> Hob {
        let (mut process, address, control) = self.start_process(scratch);
        wait_until_listening(&mut process, &address);
        Hob { process, address, control }
    }

    /// Starts a server that must refuse to serve. Returns the server's output.
    ///
    /// # Panics
    /// Panics if the server serves the disk, or exits with status 0.
    #[track_caller]
    pub fn refused(&self, scratch: &Scratch) -> Output {
        let mut process = self.launch(scratch);
        let output = process.finish(READY_MAX);
        let failed = output.status.is_some_and(|s| !s.success());
        assert!(failed, "hob should have refused {:?}; it said: {}", self.args, output.all());
        output
    }

    /// Starts the server like [`start`](Self::start), but does not wait until it answers.
    #[must_use]
    #[track_caller]
    pub fn launch(&self, scratch: &Scratch) -> Process {
        self.start_process(scratch).0
    }

    #[track_caller]
    fn start_process(&self, scratch: &Scratch) -> (Process, Address, String) {
        let address = match self.listen {
            Listen::Unix => {
                let socket = scratch.path("nbd.sock");
                let _ = std::fs::remove_file(&socket);
                Address::Unix(socket)
            }
            Listen::Tcp => Address::Tcp(free_port()),
        };
        let listen = match &address {
            Address::Unix(path) => format!("unix:{}", text(path)),
            Address::Tcp(port) => format!("tcp:127.0.0.1:{port}"),
        };
        let control = format!("unix:{}", scratch.text("ctl.sock"));
        let _ = std::fs::remove_file(scratch.path("ctl.sock"));
        let mut command = Command::new(binary());
        command.arg("serve").args(&self.args).args(["--listen", &listen, "--control", &control]);
        command.env(CRASH_LOG_DIR, scratch.dir()).env(FLASH_STALL.0, FLASH_STALL.1);
        command.envs(self.env.iter().map(|(k, v)| (k, v)));
        let process = Process::start("hob serve", &mut command).unwrap_or_else(|e| panic!("start hob: {e}"));
        (process, address, control)
    }
}

/// A running `hob serve`. Dropping the value kills the process.
#[derive(Debug)]
pub struct Hob {
    /// The process.
    pub process: Process,
    address: Address,
    control: String,
}

impl Hob {
    /// Returns the URI of the export.
    #[must_use]
    pub fn uri(&self) -> String {
        self.address.uri("disk")
    }

    /// Returns the NBD address of the server.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Returns the control address, `unix:/path`.
    #[must_use]
    pub fn control(&self) -> &str {
        &self.control
    }

    /// Opens a new NBD connection to the disk.
    #[must_use]
    #[track_caller]
    pub fn connect(&self) -> Client {
        Client::connect(&self.address, "disk").unwrap_or_else(|e| panic!("connect to hob: {e}"))
    }

    /// Runs a client command (`["cache", "resize", "disk", "8M"]`), which must succeed.
    #[track_caller]
    pub fn ctl(&self, args: &[&str]) -> String {
        succeed(args, self.try_ctl(args))
    }

    /// Runs a client command, which must succeed and return JSON.
    #[must_use]
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Value {
        parse(args, &self.ctl(&[args, &["-o", "json"]].concat()))
    }

    /// Runs a client command with any result.
    #[must_use]
    #[track_caller]
    pub fn try_ctl(&self, args: &[&str]) -> Output {
        run_client(&binary(), &self.control, args)
    }

    /// Returns the disk, as `hob disk show` reports it.
    #[must_use]
    #[track_caller]
    pub fn disk(&self) -> Value {
        self.json(&["disk", "show", "disk"])
    }

    /// Returns the disk's counters.
    #[must_use]
    #[track_caller]
    pub fn stats(&self) -> Stats {
        let out = self.ctl(&["stats", "disk", "-o", "json"]);
        Stats::parse(&out).unwrap_or_else(|e| panic!("hob stats: {e}"))
    }

    /// Starts `hob record` of the disk into the file `out`, which is replaced, with these further
    /// options.
    #[must_use]
    #[track_caller]
    pub fn start_record(&self, out: &Path, options: &[&str]) -> Process {
        let _ = std::fs::remove_file(out);
        let mut command = Command::new(binary());
        command.args(["record", "disk", "--out", &text(out), "--control", &self.control]).args(options);
        Process::start("hob record", &mut command).unwrap_or_else(|e| panic!("start hob: {e}"))
    }

    /// Like `start_record`, and waits until the recording has begun. The daemon ends an earlier recording
    /// only after the program has ended, so it might be taken for the new one.
    #[must_use]
    #[track_caller]
    pub fn record(&self, out: &Path, options: &[&str]) -> Process {
        wait_for("the end of an earlier recording", || !self.is_recorded());
        let process = self.start_record(out, options);
        wait_for("a recording", || self.is_recorded());
        process
    }

    /// Returns true during a recording of the disk.
    #[must_use]
    #[track_caller]
    pub fn is_recorded(&self) -> bool {
        self.disk()["recording"].is_object()
    }

    /// Sends SIGTERM, and checks the end: status 0, sockets removed.
    #[track_caller]
    pub fn stop(mut self) -> Output {
        let output = stop(&mut self.process);
        if let Address::Unix(path) = &self.address {
            assert!(!path.exists(), "the socket {} outlived the server", path.display());
        }
        output
    }

    /// Kills the process with SIGKILL.
    pub fn kill(mut self) {
        self.process.kill();
    }
}

/// A running `hob daemon`. Dropping the value kills the process.
#[derive(Debug)]
pub struct Daemon {
    /// The process.
    pub process: Process,
    control: String,
    /// The program for client commands; `None` for [`binary`].
    client: Option<PathBuf>,
}

impl Daemon {
    /// Runs client commands with this program instead of [`binary`], for benchmarks that are given
    /// a program.
    #[must_use]
    pub fn with_client(mut self, program: &Path) -> Self {
        self.client = Some(program.to_owned());
        self
    }

    /// Starts the daemon with the configuration file `config`, whose control socket is `control`.
    ///
    /// # Panics
    /// Panics if the control socket does not appear.
    #[must_use]
    #[track_caller]
    pub fn start(config: &Path, control: &Path) -> Self {
        Self::start_program(&binary(), config, control)
    }

    /// Like `start`, with the program at `program`.
    ///
    /// # Panics
    /// Panics if the control socket does not appear.
    #[must_use]
    #[track_caller]
    pub fn start_program(program: &Path, config: &Path, control: &Path) -> Self {
        let mut command = Command::new(program);
        command.args(["daemon", "--config", &text(config)]);
        Self::run(command, control)
    }

    /// Like `start`, but on a separate host. All hosts have the same files, so commands on every
    /// host can use the daemon's control socket.
    ///
    /// # Panics
    /// Panics if the control socket does not appear.
    #[must_use]
    #[track_caller]
    pub fn start_inside(host: &Host, config: &Path, control: &Path) -> Self {
        let mut command = Command::new(binary());
        command.args(["daemon", "--config", &text(config)]);
        Self::run(host.wrap(&command), control)
    }

    /// Starts the daemon with `command`, for example through a program that sets limits first.
    ///
    /// # Panics
    /// Panics if the control socket does not appear.
    #[must_use]
    #[track_caller]
    pub fn run(mut command: Command, control: &Path) -> Self {
        command.env(CRASH_LOG_DIR, control.parent().expect("sockets are in a directory"));
        command.env(FLASH_STALL.0, FLASH_STALL.1);
        // A child of a killed daemon listens on the daemon's socket until the child executes its own
        // program. The new daemon replaces the socket only later.
        wait_for("the end of a killed daemon's socket", || UnixStream::connect(control).is_err());
        let mut process =
            Process::start("hob daemon", &mut command).unwrap_or_else(|e| panic!("start hob: {e}"));
        let start = Instant::now();
        while UnixStream::connect(control).is_err() {
            alive_or_panic(&mut process, start);
        }
        wait_for_disks(control);
        Self { process, control: format!("unix:{}", text(control)), client: None }
    }

    /// Runs a client command, which must succeed.
    #[track_caller]
    pub fn ctl(&self, args: &[&str]) -> String {
        succeed(args, self.try_ctl(args))
    }

    /// Upgrades the daemon like [`upgrade`], and waits until its disks are open. The next program waits
    /// only some seconds for its disks before it answers.
    #[track_caller]
    pub fn upgrade(&mut self) {
        upgrade(&mut self.process);
        self.wait_for_disks();
    }

    /// Waits until no disk is being opened any more.
    #[track_caller]
    pub fn wait_for_disks(&self) {
        wait_for("the opening of the disks", || !self.disk_list().to_string().contains(OPENING));
    }

    /// Like `ctl`, for a command that needs a file that the test has closed. A process that another
    /// thread has just started may have the file open until it executes its own program.
    ///
    /// # Panics
    /// Panics if the command fails for another reason, or the file stays in use.
    #[track_caller]
    pub fn ctl_when_unused(&self, args: &[&str]) {
        wait_for("the end of a file's use", || {
            let output = self.try_ctl(args);
            assert!(output.success() || output.all().contains("in use"), "hob {args:?}: {}", output.all());
            output.success()
        });
    }

    /// Like `ctl`, but with the command line as one text. Its words must not contain spaces.
    #[track_caller]
    pub fn tell(&self, line: &str) -> String {
        self.ctl(&line.split_whitespace().collect::<Vec<_>>())
    }

    /// Runs a client command, which must succeed and return JSON.
    #[must_use]
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Value {
        parse(args, &self.ctl(&[args, &["-o", "json"]].concat()))
    }

    /// Runs a client command with any result.
    #[must_use]
    #[track_caller]
    pub fn try_ctl(&self, args: &[&str]) -> Output {
        let program = self.client.clone().unwrap_or_else(binary);
        run_client(&program, &self.control, args)
    }

    /// Returns the control API's answer to a GET request; `None` if there is no answer with the status
    /// 200. Tests that wait for a state need no program for each request.
    fn get(&self, path: &str) -> Option<Value> {
        let answer = get(Path::new(self.control.strip_prefix("unix:")?), path).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        head.starts_with("HTTP/1.1 200 ").then(|| serde_json::from_str(body).ok()).flatten()
    }

    /// Returns the counters of `disk`, as `hob stats` has them.
    #[must_use]
    #[track_caller]
    pub fn stats(&self, disk: &str) -> Stats {
        let stats = self.get(&format!("/v1/disks/{disk}/stats"));
        let out = stats.map_or_else(|| self.ctl(&["stats", disk, "-o", "json"]), |stats| stats.to_string());
        Stats::parse(&out).unwrap_or_else(|e| panic!("hob stats: {e}"))
    }

    /// Returns a whole number of `disk` by name, for example `backing_read_bytes`.
    ///
    /// # Panics
    /// Panics if the disk has no such number.
    #[must_use]
    #[track_caller]
    pub fn number(&self, disk: &str, name: &str) -> u64 {
        let stats = self.stats(disk);
        stats.number(name).unwrap_or_else(|| panic!("no {name}: {}", stats.text())) as u64
    }

    /// Returns a disk, as `hob disk show` reports it.
    #[must_use]
    #[track_caller]
    pub fn disk(&self, name: &str) -> Value {
        self.json(&["disk", "show", name])
    }

    /// Returns a pool, as `hob pool show` reports it.
    #[must_use]
    #[track_caller]
    pub fn pool(&self, name: &str) -> Value {
        self.json(&["pool", "show", name])
    }

    /// Returns the disks, as `hob disk list -o json` prints them.
    #[must_use]
    #[track_caller]
    pub fn disk_list(&self) -> Value {
        self.get("/v1/disks").unwrap_or_else(|| self.json(&["disk", "list"]))
    }

    /// Returns the names of all disks.
    ///
    /// # Panics
    /// Panics if the answer is not a list of disks.
    #[must_use]
    #[track_caller]
    pub fn disks(&self) -> Vec<String> {
        let disks = self.json(&["disk", "list"]);
        let name = |disk: &Value| disk["name"].as_str().expect("a name").to_owned();
        disks.as_array().expect("a list").iter().map(name).collect()
    }

    /// Kills the process with SIGKILL.
    #[track_caller]
    pub fn kill(mut self) {
        self.process.kill();
    }

    /// Sends SIGTERM to the daemon, which must end with status 0.
    #[track_caller]
    pub fn stop(mut self) -> Output {
        stop(&mut self.process)
    }
}

/// Requests an upgrade with SIGHUP, and waits until the next program is ready. On a busy host, hob may
/// refuse an upgrade because a step takes longer than its time limit. An operator would then try again.
///
/// # Panics
/// Panics if the daemon ends, or refuses the upgrade for another reason.
#[track_caller]
pub fn upgrade(process: &mut Process) {
    let done = |process: &Process| process.stderr().matches("the control API is at").count();
    let refusals = |process: &Process| process.stderr().matches("not upgraded").count();
    let (before, mut refused) = (done(process), refusals(process));
    process.signal(Signal::HUP);
    wait_for("the upgrade", || {
        assert!(process.poll().is_none(), "the daemon ended: {}", process.stderr());
        if refusals(process) > refused {
            let log = process.stderr();
            let why = log.lines().rfind(|line| line.contains("not upgraded")).unwrap_or_default();
            assert!(why.contains(" within "), "{log}");
            refused = refusals(process);
            process.signal(Signal::HUP);
        }
        done(process) > before
    });
}

#[track_caller]
fn parse(args: &[&str], said: &str) -> Value {
    serde_json::from_str(said).unwrap_or_else(|e| panic!("hob {args:?}: {e}: {said}"))
}

/// Returns the standard output of a client command, which must have succeeded.
#[track_caller]
fn succeed(args: &[&str], output: Output) -> String {
    assert!(output.success(), "hob {args:?} failed ({:?}): {}", output.status, output.all());
    output.stdout
}

#[track_caller]
fn run_client(program: &Path, address: &str, args: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(args).args(["--control", address]);
    let mut process = Process::start("hob", &mut command).unwrap_or_else(|e| panic!("start hob: {e}"));
    process.finish(COMMAND_MAX)
}

#[track_caller]
fn stop(process: &mut Process) -> Output {
    assert!(process.poll().is_none(), "hob ended before it was asked to: {}", process.stderr());
    process.signal(Signal::TERM);
    let output = process.finish(STOP_MAX);
    assert!(output.success(), "SIGTERM should end in status 0, not {:?}: {}", output.status, output.stderr);
    output
}

#[track_caller]
fn wait_until_listening(process: &mut Process, address: &Address) {
    let start = Instant::now();
    loop {
        let listening = match address {
            // The server creates the socket only when the disk is ready, so a client can use the
            // socket as soon as it exists.
            Address::Unix(path) => path.exists(),
            Address::Tcp(_) => address.open().is_ok(),
        };
        if listening {
            break;
        }
        alive_or_panic(process, start);
    }
}

/// Waits until a daemon has opened its disks, at most for [`OPENING_MAX`]. The daemon itself waits
/// only some seconds for its disks, and then lists the slow disks as offline.
fn wait_for_disks(control: &Path) {
    let start = Instant::now();
    while start.elapsed() < OPENING_MAX {
        match get(control, "/v1/disks") {
            Ok(list) if list.contains(OPENING) => {}
            _ => return,
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Returns a daemon's answer to a GET request, with its head.
fn get(control: &Path, path: &str) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(control)?;
    stream.set_read_timeout(Some(READY_MAX))?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: hob\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[track_caller]
fn alive_or_panic(process: &mut Process, start: Instant) {
    if let Some(status) = process.poll() {
        panic!("hob ended ({status}) instead of serving: {}", process.stderr());
    }
    assert!(start.elapsed() < READY_MAX, "hob is silent after {READY_MAX:?}: {}", process.stderr());
    std::thread::sleep(Duration::from_millis(5));
}
