//! NBD servers with TLS as backings (`nbds://`), with nbdkit.

use conformance::authority::{Authority, Files};
use conformance::data::{assert_same_file, noise_file};
use conformance::process::Process;
use conformance::scratch::{free_port, text, wait_for};
use conformance::store::ONE_BY_ONE;
use conformance::{Hob, MIB, Scratch, Serve, Tool};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;

const SIZE: u64 = 24 * MIB;
/// A disk that nbdkit exports with TLS, and certificates for both sides.
struct Stage {
    scratch: Scratch,
    authority: Authority,
    server: Files,
    client: Files,
    port: u16,
}

impl Stage {
    fn new() -> Stage {
        let scratch = Scratch::new();
        noise_file(&scratch.path("disk.img"), SIZE, 61);
        let authority = Authority::new("conformance");
        let (server, client) = (authority.server(scratch.dir()), authority.client(scratch.dir(), "host7"));
        Stage { scratch, authority, server, client, port: free_port() }
    }

    /// Starts nbdkit, which accepts clients with certificates only.
    fn nbdkit(&self) -> Process {
        let certificates = format!("--tls-certificates={}", text(&self.server.dir));
        let server = Tool::new("nbdkit")
            .args(["--foreground", "--tls=require", "--tls-verify-peer", &certificates])
            .args(["--ipaddr", "127.0.0.1", "--port", &self.port.to_string()])
            .args(ONE_BY_ONE)
            .args(["file", &self.scratch.text("disk.img")])
            .start();
        wait_for("nbdkit", || TcpStream::connect(("127.0.0.1", self.port)).is_ok());
        server
    }

    fn uri(&self, client: &Files) -> String {
        format!("nbds://127.0.0.1:{}/?tls-certificates={}", self.port, text(&client.dir))
    }

    fn serve(&self) -> Serve {
        Serve::disk(&self.uri(&self.client)).cached(&self.scratch.path("pool"), "16M", "4K")
    }

    /// Copies a file to the disk through hob, with a flush.
    fn write(&self, hob: &Hob, file: &str) {
        let file = self.scratch.text(file);
        Tool::new("nbdcopy").args(["--connections=4", "--flush", &file, &hob.uri()]).run();
    }

    /// Starts hob with another URI and returns its only line of output.
    fn refusal(&self, uri: &str) -> String {
        let output = Serve::disk(uri).refused(&self.scratch);
        let lines = output.all();
        assert_eq!(lines.trim().lines().count(), 1, "{lines}");
        lines
    }
}

#[test]
fn an_encrypted_backing_is_read_and_written_and_reconnects() {
    let stage = Stage::new();
    let mut server = stage.nbdkit();
    let hob = stage.serve().start(&stage.scratch);
    Tool::new("nbdcopy").args([&hob.uri(), &stage.scratch.text("out.img")]).run();
    assert_same_file(&stage.scratch.path("out.img"), &stage.scratch.path("disk.img"));

    noise_file(&stage.scratch.path("in.img"), SIZE, 62);
    stage.write(&hob, "in.img");
    assert_same_file(&stage.scratch.path("in.img"), &stage.scratch.path("disk.img"));

    server.kill();
    let server = stage.nbdkit();
    noise_file(&stage.scratch.path("in.img"), SIZE, 63);
    // Writes of the killed server that were not flushed may be lost. hob reports this by one failed
    // flush.
    let _ = Tool::new("nbdcopy").args(["--flush", &stage.scratch.text("in.img"), &hob.uri()]).output();
    stage.write(&hob, "in.img");
    assert_same_file(&stage.scratch.path("in.img"), &stage.scratch.path("disk.img"));
    hob.stop();
    drop(server);
}

#[test]
fn what_is_wrong_with_tls_is_said_in_one_line() {
    let stage = Stage::new();
    let server = stage.nbdkit();
    let refusal = |uri: &str| stage.refusal(uri);

    let foreign = Authority::new("another").client(stage.scratch.dir(), "foreign");
    assert!(refusal(&stage.uri(&foreign)).contains("UnknownIssuer"));
    let other_name = format!("{}&tls-hostname=other.example", stage.uri(&stage.client));
    assert!(refusal(&other_name).contains("certificate"), "{}", refusal(&other_name));
    let without = stage.authority.client(stage.scratch.dir(), "without");
    std::fs::remove_file(&without.cert).unwrap();
    refusal(&stage.uri(&without));
    let exposed = stage.authority.client(stage.scratch.dir(), "exposed");
    std::fs::set_permissions(&exposed.key, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(refusal(&stage.uri(&exposed)).contains("chmod"));
    let plain = format!("nbd://127.0.0.1:{}/", stage.port);
    assert!(refusal(&plain).contains("use nbds://"));
    let missing = format!("nbds://127.0.0.1:{}/?tls-certificates=/nonexistent", stage.port);
    assert!(refusal(&missing).contains("/nonexistent/ca-cert.pem"));
    drop(server);

    let clear = Tool::new("nbdkit")
        .args(["--foreground", "--ipaddr", "127.0.0.1", "--port", &stage.port.to_string(), "memory", "1M"])
        .start();
    wait_for("nbdkit", || TcpStream::connect(("127.0.0.1", stage.port)).is_ok());
    assert!(refusal(&stage.uri(&stage.client)).contains("does not offer TLS"));
    drop(clear);
}

#[test]
fn cached_data_stays_when_the_certificates_move() {
    let stage = Stage::new();
    let _server = stage.nbdkit();
    let serve = |uri: &str| {
        Serve::disk(uri)
            .cached(&stage.scratch.path("pool"), "32M", "4K")
            .flag("--persistent")
            .arg("--verify", "trust")
            .arg("--admission", "always")
    };
    let hob = serve(&stage.uri(&stage.client)).start(&stage.scratch);
    stage.write(&hob, "disk.img");
    // A slow flash device does not take every write at once.
    wait_for("a pass that consists of hits", || {
        let before = hob.stats().misses();
        Tool::new("nbdcopy").args([hob.uri().as_str(), "null:"]).run();
        hob.stats().misses() == before
    });
    hob.stop();
    let moved = Files { dir: stage.scratch.path("moved"), ..stage.client.clone() };
    std::fs::rename(&stage.client.dir, &moved.dir).unwrap();
    let hob = serve(&stage.uri(&moved)).start(&stage.scratch);
    Tool::new("nbdcopy").args([&hob.uri(), &stage.scratch.text("out.img")]).run();
    assert_same_file(&stage.scratch.path("out.img"), &stage.scratch.path("disk.img"));
    let stats = hob.stats();
    assert!(stats.hits() > 0 && stats.misses() == 0, "{}", stats.text());
    hob.stop();
}
