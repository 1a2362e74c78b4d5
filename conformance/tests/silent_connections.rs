//! Clients that connect and send nothing, or occupy every connection of a listener, keep no other
//! client waiting.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use conformance::authority::{Authority, Files, secret};
use conformance::data::noise_file;
use conformance::hob::{Daemon, command};
use conformance::nbd_client::{Address, Client};
use conformance::scratch::{free_port, text, wait_for};
use conformance::{MIB, Scratch, Tool};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Number of silent connections, more than a listener accepts.
const SILENT: usize = 600;

/// Maximum time until a real client is served. hob closes a silent connection only after 5 s, so a
/// client that waits for this end takes longer.
const SERVED_MAX: Duration = Duration::from_secs(2);

/// Maximum number of attempts per client. A busy host may delay any of them.
const ATTEMPTS_MAX: u32 = 20;

/// Maximum number of NBD connections of each listener in `occupied_listeners_…`.
const CONNECTIONS_MAX: usize = 8;

/// Maximum number of connections of each control listener, a constant of hob.
const CONTROL_CONNECTIONS_MAX: usize = 64;

const TOKEN: &str = "an-admin-token-0123456789abcdef";

/// Listeners of the daemon.
#[derive(Debug, Clone, Copy)]
enum Kind {
    NbdUnix,
    NbdTcp,
    NbdTls,
    ControlUnix,
    ControlTls,
}

impl Kind {
    const ALL: [Kind; 5] = [Kind::NbdUnix, Kind::NbdTcp, Kind::NbdTls, Kind::ControlUnix, Kind::ControlTls];
}

/// A daemon that listens everywhere: NBD and the control API, each on a Unix socket and over TLS,
/// and NBD on plain TCP.
struct Stage {
    daemon: Daemon,
    nbd_port: u16,
    nbd_tls_port: u16,
    control_port: u16,
    server: Files,
    client: Files,
    scratch: Scratch,
}

impl Stage {
    fn new(settings: &str) -> Stage {
        // Another limit than the usual 1024, because this process has one end of each connection.
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).expect("raise the soft limit");
        let scratch = Scratch::new();
        noise_file(&scratch.path("disk.img"), MIB, 1);
        secret(&scratch.path("token"), TOKEN);
        let authority = Authority::new("conformance");
        let (server, client) = (authority.server(scratch.dir()), authority.client(scratch.dir(), "host7"));
        let (nbd_port, nbd_tls_port, control_port) = (free_port(), free_port(), free_port());
        let config = format!(
            "state_dir = {:?}\nlisten = [\"unix:{}\", \"tcp:127.0.0.1:{nbd_port}\"]\n\
             [control]\nlisten = [\"unix:{}\", \"tcp:127.0.0.1:{control_port}\"]\n\
             tls = {{ cert = {:?}, key = {:?}, client_ca = {:?} }}\ntoken_file = {:?}\n\
             [[nbd]]\nlisten = \"tcp:127.0.0.1:{nbd_tls_port}\"\n\
             tls = {{ cert = {:?}, key = {:?}, client_ca = {:?} }}\n\
             [[disk]]\nname = \"vm\"\nbacking = {:?}\n{settings}",
            scratch.path("state"),
            scratch.text("nbd.sock"),
            scratch.text("ctl.sock"),
            server.cert,
            server.key,
            server.ca,
            scratch.path("token"),
            server.cert,
            server.key,
            server.ca,
            scratch.path("disk.img"),
        );
        scratch.write_config(config);
        let daemon = scratch.start_daemon();
        let stage = Stage { daemon, nbd_port, nbd_tls_port, control_port, server, client, scratch };
        let ready = || Client::connect(&Address::Tcp(nbd_port), "vm").is_ok();
        wait_for("the disk", ready);
        stage
    }

    /// Checks that a client of each of these kinds is served in time while the connections that
    /// `occupy` opens exist. A new attempt gets new connections, because hob may have closed the
    /// old ones.
    #[track_caller]
    fn serves<T>(&self, kinds: &[Kind], meanwhile: &str, occupy: impl Fn() -> T) {
        let mut occupied = occupy();
        for kind in kinds {
            let mut attempts = 1;
            loop {
                let start = Instant::now();
                self.serve(*kind);
                let took = start.elapsed();
                if took < SERVED_MAX {
                    break;
                }
                assert!(attempts < ATTEMPTS_MAX, "{kind:?}: a client waited {took:?} ({meanwhile})");
                attempts += 1;
                drop(occupied);
                occupied = occupy();
            }
        }
        drop(occupied);
    }

    /// Serves one client.
    #[track_caller]
    fn serve(&self, kind: Kind) {
        match kind {
            Kind::NbdUnix => read(&self.scratch.nbd()),
            Kind::NbdTcp => read(&Address::Tcp(self.nbd_port)),
            Kind::NbdTls => {
                let (port, files) = (self.nbd_tls_port, text(&self.client.dir));
                let uri = format!("nbds://127.0.0.1:{port}/vm?tls-certificates={files}");
                Tool::new("nbdinfo").args(["--size", &uri]).run();
            }
            Kind::ControlUnix => list(&["--control", &format!("unix:{}", self.scratch.text("ctl.sock"))]),
            Kind::ControlTls => {
                let url = format!("https://127.0.0.1:{}", self.control_port);
                let (ca, token) = (text(&self.server.ca), self.scratch.text("token"));
                list(&["--url", &url, "--ca", &ca, "--token-file", &token]);
            }
        }
    }
}

fn read(address: &Address) {
    let mut client = Client::connect(address, "vm").expect("a connection");
    client.read(0, 4096).expect("a read");
}

#[track_caller]
fn list(how: &[&str]) {
    let listed = command(&[&["disk", "list"], how].concat());
    assert!(listed.success() && listed.stdout.contains("vm"), "{}", listed.all());
}

fn unix(path: &Path) -> Box<dyn Read> {
    Box::new(UnixStream::connect(path).expect("a connection"))
}

fn tcp(port: u16) -> Box<dyn Read> {
    Box::new(TcpStream::connect(("127.0.0.1", port)).expect("a connection"))
}

#[test]
fn hundreds_of_silent_connections_delay_no_client() {
    let stage = Stage::new("");
    let (nbd, control) = (stage.scratch.path("nbd.sock"), stage.scratch.path("ctl.sock"));
    for flooded in Kind::ALL {
        let connect = || match flooded {
            Kind::NbdUnix => unix(&nbd),
            Kind::NbdTcp => tcp(stage.nbd_port),
            Kind::NbdTls => tcp(stage.nbd_tls_port),
            Kind::ControlUnix => unix(&control),
            Kind::ControlTls => tcp(stage.control_port),
        };
        let silent = || -> Vec<_> { (0..SILENT).map(|_| connect()).collect() };
        stage.serves(&Kind::ALL, &format!("{SILENT} silent connections to {flooded:?}"), silent);
    }
    stage.daemon.stop();
}

/// Well-behaved clients use all connections of one listener.
#[test]
fn an_occupied_listener_delays_no_client_of_another() {
    let stage = Stage::new(&format!("[limits]\nconnections_max = {CONNECTIONS_MAX}\n"));
    let nbd = stage.scratch.nbd();
    let control = stage.scratch.path("ctl.sock");
    let occupy = || -> (Vec<Client>, Vec<UnixStream>) {
        let clients = (0..CONNECTIONS_MAX).map(|_| {
            let mut client = Client::connect(&nbd, "vm").expect("a connection");
            client.read(0, 4096).expect("a read");
            client
        });
        let requests = (0..CONTROL_CONNECTIONS_MAX).map(|_| established(&control));
        (clients.collect(), requests.collect())
    };
    stage.serves(&[Kind::NbdTcp, Kind::NbdTls, Kind::ControlTls], "both Unix sockets are occupied", occupy);
    stage.serves(&Kind::ALL, "all connections have ended", || ());
    stage.daemon.stop();
}

/// Returns a connection to the control API whose first request was answered, and which stays open.
fn established(control: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(control).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    stream.write_all(b"GET /v1/version HTTP/1.1\r\nHost: hob\r\n\r\n").expect("a request");
    let mut start = [0; 12];
    stream.read_exact(&mut start).expect("a response");
    assert_eq!(&start, b"HTTP/1.1 200");
    stream
}
