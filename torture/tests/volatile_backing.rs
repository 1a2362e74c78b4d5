//! Backings with a volatile write cache: hob flushes them before an upgrade and when it opens a
//! disk, so that writes which an earlier program acknowledged are not lost without a report.
//!
//! These tests need root and /dev/fuse.

use std::sync::Arc;
use std::time::Duration;

use conformance::data::{Noise, assert_same};
use conformance::hob::Daemon;
use conformance::nbd_client::Client;
use conformance::scratch::wait_for;
use conformance::{KIB, MIB, Scratch};
use rustix::process::Signal;
use torture::behaviour::Behaviour;
use torture::files::{File, Files};
use torture::medium::Medium;
use torture::server::Server;

const SIZE: u64 = 8 * MIB;

/// Distance between two writes.
const STEP: u64 = MIB;

/// Size of a write.
const WRITE: u64 = 64 * KIB;

/// A backing that loses unflushed data on request.
enum Backing {
    Server(Server),
    File(Files, Arc<File>),
}

impl Backing {
    fn server(scratch: &Scratch) -> Backing {
        let medium = Medium::new(SIZE, 1);
        Backing::Server(Server::start(&scratch.path("backing.sock"), medium, true).expect("a socket"))
    }

    fn file(scratch: &Scratch) -> Backing {
        let files = Files::mount(&scratch.path("mnt"), 1).expect("this test needs root and /dev/fuse");
        let file = files.add("disk.img", Medium::new(SIZE, 1));
        Backing::File(files, file)
    }

    fn spec(&self) -> String {
        match self {
            Backing::Server(server) => server.uri(),
            Backing::File(files, _) => files.path("disk.img").display().to_string(),
        }
    }

    fn behaviour(&self) -> &Behaviour {
        match self {
            Backing::Server(server) => server.behaviour(),
            Backing::File(_, file) => file.behaviour(),
        }
    }

    /// Returns the number of units that a power cut may lose.
    fn unflushed(&self) -> usize {
        match self {
            Backing::Server(server) => server.medium().unflushed(),
            Backing::File(_, file) => file.medium().unflushed(),
        }
    }

    /// Returns true if all data is durable and the daemon was told so.
    fn is_flushed(&self) -> bool {
        self.unflushed() == 0
            && match self {
                Backing::Server(server) => server.is_idle(),
                Backing::File(..) => true,
            }
    }

    /// Loses unflushed data. A server closes its connections too. Returns the number of lost units.
    fn lose(&self) -> usize {
        match self {
            Backing::Server(server) => server.crash(Duration::ZERO),
            Backing::File(files, _) => files.lose(),
        }
    }
}

/// A daemon with the disk `vm`, and the content that its guest wrote.
struct Stage {
    // Dropped before the backing, and the backing before the directory.
    daemon: Option<Daemon>,
    backing: Backing,
    scratch: Scratch,
    written: Vec<(u64, Vec<u8>)>,
    noise: Noise,
}

impl Stage {
    fn new(make: impl FnOnce(&Scratch) -> Backing) -> Stage {
        let scratch = Scratch::new();
        let backing = make(&scratch);
        let disk = format!("[[disk]]\nname = \"vm\"\nbacking = \"{}\"\n", backing.spec());
        scratch.configure(&disk);
        let (written, noise) = (Vec::new(), Noise::new(3));
        let mut stage = Stage { daemon: None, backing, scratch, written, noise };
        stage.start();
        stage
    }

    fn start(&mut self) {
        self.daemon = Some(self.scratch.start_daemon());
    }

    fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("it runs")
    }

    #[track_caller]
    fn connect(&self) -> Client {
        self.scratch.connect_when_served("vm")
    }

    /// Writes everywhere on the disk, without a flush. The backing may lose these writes.
    #[track_caller]
    fn write(&mut self, client: &mut Client) {
        self.written.clear();
        for at in (0..SIZE).step_by(STEP as usize) {
            let data = self.noise.bytes(WRITE as usize);
            client.write(at, &data).expect("a write");
            self.written.push((at, data));
        }
        assert!(self.backing.unflushed() > 0, "the backing has no volatile cache");
    }

    /// Checks that the disk has the guest's last writes.
    #[track_caller]
    fn has_all(&self, client: &mut Client) {
        for (at, data) in &self.written {
            assert_same(
                &client.read(*at, WRITE as u32).expect("a read"),
                data,
                *at,
                "the disk and the write",
            );
        }
    }

    fn count(&mut self, what: &str) -> usize {
        self.daemon().process.stderr().matches(what).count()
    }

    /// Requests an upgrade. Returns true once it is done, and false if it is refused. On a busy host, a
    /// step may take longer than its time limit, and then the upgrade is requested again.
    #[track_caller]
    fn upgrade(&mut self) -> bool {
        let starts = "the control API is at";
        let (started, mut refused) = (self.count(starts), self.count("not upgraded"));
        self.daemon().process.signal(Signal::HUP);
        let mut done = false;
        wait_for("the end of the upgrade", || {
            assert!(self.daemon().process.poll().is_none(), "the daemon ended");
            if self.count("not upgraded") > refused {
                let log = self.daemon().process.stderr();
                let why = log.lines().rfind(|line| line.contains("not upgraded")).unwrap_or_default();
                if !why.contains(" within ") {
                    return true;
                }
                refused += 1;
                self.daemon().process.signal(Signal::HUP);
            }
            done = self.count(starts) > started;
            done
        });
        done
    }
}

/// The server loses unflushed data when the old program closes its connection, so a flush by the
/// next program would be too late.
#[test]
fn a_server_is_flushed_before_an_upgrade() {
    let mut stage = Stage::new(Backing::server);
    let mut client = stage.connect();
    let Backing::Server(server) = &stage.backing else { unreachable!("a server") };
    server.lose_at_close();
    for _ in 0..2 {
        stage.write(&mut client);
        assert!(stage.upgrade(), "the upgrade was refused");
        stage.has_all(&mut client);
        assert_eq!(stage.backing.lose(), 0, "the writes before the upgrade are durable");
        stage.has_all(&mut client);
        client.flush().expect("nothing was lost");
    }
    stage.daemon.take().expect("it runs").stop();
}

/// A failed flush before the hand-over refuses the upgrade, because the next program could not
/// report the loss.
fn refuses_an_upgrade_and_reports_the_loss(make: impl FnOnce(&Scratch) -> Backing) {
    let mut stage = Stage::new(make);
    let mut client = stage.connect();
    stage.write(&mut client);
    stage.backing.behaviour().lose_at_flush();
    assert!(!stage.upgrade(), "the backing lost writes, and the upgrade was not refused");
    assert_eq!(stage.count("its backing could not be flushed"), 1);
    client.flush().expect_err("acknowledged writes may be lost");
    client.flush().expect("the loss was reported");
    // The daemon serves, and the next upgrade is possible.
    stage.write(&mut client);
    assert!(stage.upgrade(), "the second upgrade was refused");
    assert_eq!(stage.backing.lose(), 0, "the writes before the upgrade are durable");
    stage.has_all(&mut client);
    client.flush().expect("nothing was lost");
    stage.daemon.take().expect("it runs").stop();
}

#[test]
fn an_upgrade_is_refused_while_a_server_cannot_be_flushed() {
    refuses_an_upgrade_and_reports_the_loss(Backing::server);
}

#[test]
fn an_upgrade_is_refused_while_a_file_cannot_be_flushed() {
    refuses_an_upgrade_and_reports_the_loss(Backing::file);
}

/// Checks that hob flushes the backing when it opens the disk. No client is connected that could send
/// a flush.
fn flushes_at_the_opening(make: impl FnOnce(&Scratch) -> Backing) {
    let mut stage = Stage::new(make);
    let mut client = stage.connect();
    stage.write(&mut client);
    stage.daemon.take().expect("it runs").kill();
    assert!(stage.backing.unflushed() > 0, "a killed program flushes nothing");
    stage.start();
    wait_for("the flush of the opened disk", || stage.backing.is_flushed());
    assert_eq!(stage.backing.lose(), 0);
    let mut client = stage.connect();
    stage.has_all(&mut client);
    client.flush().expect("nothing was lost");
    // If that flush fails, the next flush of a guest fails.
    stage.write(&mut client);
    stage.daemon.take().expect("it runs").kill();
    stage.backing.behaviour().lose_at_flush();
    stage.start();
    wait_for("the failed flush", || stage.backing.is_flushed());
    let mut client = stage.connect();
    client.flush().expect_err("acknowledged writes may be lost");
    client.flush().expect("the loss was reported");
    stage.daemon.take().expect("it runs").stop();
}

#[test]
fn a_server_is_flushed_when_its_disk_is_opened_after_kill_9() {
    flushes_at_the_opening(Backing::server);
}

#[test]
fn a_file_is_flushed_when_its_disk_is_opened_after_kill_9() {
    flushes_at_the_opening(Backing::file);
}
