//! NBD over TLS with common clients: the tools of libnbd and QEMU, both with GnuTLS.

use conformance::authority::{Authority, Files, secret};
use conformance::data::{Noise, assert_same_file, noise_file};
use conformance::nbd_client::{Address, Client};
use conformance::scratch::{free_port, text, wait_for};
use conformance::{Daemon, Hob, MIB, Scratch, Serve, Tool};
use serde_json::Value;
use std::time::Duration;

const SIZE: u64 = 24 * MIB;

/// Directories and certificates of both sides.
struct Stage {
    scratch: Scratch,
    authority: Authority,
    server: Files,
    client: Files,
}

impl Stage {
    fn new() -> Self {
        let scratch = Scratch::new();
        noise_file(&scratch.path("disk.img"), SIZE, 61);
        let authority = Authority::new("conformance");
        let (server, client) = (authority.server(scratch.dir()), authority.client(scratch.dir(), "host7"));
        Self { scratch, authority, server, client }
    }

    /// Returns a server with TLS; clients need certificates.
    fn serve(&self) -> Serve {
        Serve::disk(&self.scratch.text("disk.img"))
            .cached(&self.scratch.path("pool"), "16M", "4K")
            .arg("--nbd-cert", &text(&self.server.cert))
            .arg("--nbd-key", &text(&self.server.key))
            .arg("--nbd-client-ca", &text(&self.server.ca))
            .tcp()
    }

    fn start(&self) -> Hob {
        self.serve().start(&self.scratch)
    }
}

fn port(hob: &Hob) -> u16 {
    match hob.address() {
        Address::Tcp(port) => *port,
        Address::Unix(path) => panic!("{}", path.display()),
    }
}

/// Returns the URI for libnbd.
fn uri(port: u16, export: &str, client: &Files) -> String {
    format!("nbds://127.0.0.1:{port}/{export}?tls-certificates={}", text(&client.dir))
}

/// Returns the options for QEMU: the TLS object and the image.
fn qemu(port: u16, client: &Files) -> [String; 2] {
    [
        format!("tls-creds-x509,id=tls,endpoint=client,dir={}", text(&client.dir)),
        format!(
            "driver=raw,file.driver=nbd,file.host=127.0.0.1,file.port={port},file.export=disk,file.tls-creds=tls"
        ),
    ]
}

fn size(uri: &str) -> Tool {
    Tool::new("nbdinfo").args(["--size", uri])
}

#[test]
fn nbdinfo_sees_the_same_disk_inside_tls() {
    let stage = Stage::new();
    let hob = stage.start();
    let uri = uri(port(&hob), "disk", &stage.client);
    let info: Value = serde_json::from_str(&Tool::new("nbdinfo").args(["--json", &uri]).run()).unwrap();
    assert_eq!(info["TLS"], true, "{info}");
    assert_eq!(info["structured"], true, "{info}");
    let export = &info["exports"][0];
    assert_eq!(export["export-size"], SIZE, "{info}");
    assert_eq!(export["can_multi_conn"], true, "{info}");
    assert!(export["contexts"].as_array().unwrap().iter().any(|c| c == "base:allocation"), "{info}");
    hob.stop();
}

#[test]
fn nbdcopy_moves_a_whole_disk_out_and_in_over_many_connections() {
    let stage = Stage::new();
    let hob = stage.start();
    let uri = uri(port(&hob), "disk", &stage.client);
    let out = stage.scratch.text("out.img");
    Tool::new("nbdcopy").args(["--connections=4", &uri, &out]).run();
    assert_same_file(&stage.scratch.path("out.img"), &stage.scratch.path("disk.img"));
    noise_file(&stage.scratch.path("in.img"), SIZE, 62);
    Tool::new("nbdcopy").args(["--connections=4", "--flush", &stage.scratch.text("in.img"), &uri]).run();
    hob.stop();
    assert_same_file(&stage.scratch.path("in.img"), &stage.scratch.path("disk.img"));
}

#[test]
fn qemu_img_and_qemu_io_work_inside_tls() {
    let stage = Stage::new();
    let hob = stage.start();
    let [object, image] = qemu(port(&hob), &stage.client);
    let disk = stage.scratch.text("disk.img");
    let other = format!("driver=raw,file.driver=file,file.filename={disk}");
    Tool::new("qemu-img").args(["compare", "-U", "--object", &object, "--image-opts", &image, &other]).run();
    let commands = [
        "write -P 0xa5 4096 1048576",
        "flush",
        "read -P 0xa5 4096 1048576",
        "discard 2M 1M",
        "write -z 4M 64k",
    ];
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let said = Tool::new("qemu-io").args(["--object", &object, "--image-opts", &image]).args(commands).run();
    assert!(!said.contains("failed"), "{said}");
    Tool::new("qemu-img").args(["compare", "-U", "--object", &object, "--image-opts", &image, &other]).run();
    hob.stop();
}

#[test]
fn clients_without_tls_get_no_information() {
    let stage = Stage::new();
    let hob = stage.start();
    for export in ["disk", "", "nobody"] {
        let plain = format!("nbd://127.0.0.1:{}/{export}", port(&hob));
        let output = Tool::new("nbdinfo").args(["--size", &plain]).run_failing();
        assert!(output.all().contains("TLS"), "{}", output.all());
    }
    Tool::new("nbdinfo").args(["--list", &format!("nbd://127.0.0.1:{}", port(&hob))]).run_failing();
    size(&uri(port(&hob), "disk", &stage.client)).run();
}

#[test]
fn clients_without_a_valid_certificate_are_refused() {
    let stage = Stage::new();
    let hob = stage.start();
    let dir = stage.scratch.dir();
    let unknown = Authority::new("somebody else").client(dir, "unknown");
    // The client trusts the server, but shows a certificate that the server does not trust.
    std::fs::copy(&stage.client.ca, &unknown.ca).unwrap();
    let expired = stage.authority.expired_client(dir, "host7");
    let without = stage.authority.client(dir, "without");
    std::fs::remove_file(&without.cert).unwrap();
    std::fs::remove_file(&without.key).unwrap();
    for (client, what) in [(&unknown, "unknown"), (&expired, "expired"), (&without, "none")] {
        let output = size(&uri(port(&hob), "disk", client)).run_failing();
        assert!(!output.stdout.contains(&SIZE.to_string()), "{what}: {}", output.all());
        let [object, image] = qemu(port(&hob), client);
        Tool::new("qemu-img").args(["info", "--object", &object, "--image-opts", &image]).run_failing();
    }
    // The client does not trust the server's authority.
    let strange = Authority::new("a third").client(dir, "strange");
    size(&uri(port(&hob), "disk", &strange)).run_failing();
    size(&uri(port(&hob), "disk", &stage.client)).run();
    let log = hob.stop();
    assert!(
        log.stderr.contains("a client at 127.0.0.1: connection closed before an export was chosen"),
        "{}",
        log.stderr
    );
}

#[test]
fn a_server_without_tls_refuses_it_and_one_with_optional_tls_accepts_both() {
    let stage = Stage::new();
    let hob = Serve::disk(&stage.scratch.text("disk.img")).tcp().start(&stage.scratch);
    size(&uri(port(&hob), "disk", &stage.client)).run_failing();
    size(&format!("nbd://127.0.0.1:{}/disk", port(&hob))).run();
    hob.stop();
    let port = free_port();
    let (cert, key) = (text(&stage.server.cert), text(&stage.server.key));
    let daemon = daemon(
        &stage,
        port,
        &format!(
            "[[nbd]]\nlisten = \"tcp:127.0.0.1:{port}\"\n\
             tls = {{ cert = \"{cert}\", key = \"{key}\", required = false }}\n"
        ),
    );
    size(&uri(port, "vm1", &stage.client)).run();
    size(&format!("nbd://127.0.0.1:{port}/vm1")).run();
    daemon.stop();
}

/// Starts a daemon with two disks and the configuration `more`, which makes it listen on `port`.
fn daemon(stage: &Stage, port: u16, more: &str) -> Daemon {
    let scratch = &stage.scratch;
    noise_file(&scratch.path("disk2.img"), 2 * SIZE, 63);
    let config = format!(
        "{more}\n[[disk]]\nname = \"vm1\"\nbacking = \"{}\"\n[[disk]]\nname = \"vm2\"\nbacking = \"{}\"\n",
        scratch.text("disk.img"),
        scratch.text("disk2.img"),
    );
    scratch.configure(&config);
    let daemon = scratch.start_daemon();
    // Clients can connect when the disks exist, first at the sockets of `listen`. The caller has
    // waited for the control socket.
    wait_for("clients can connect", || Address::Tcp(port).open().is_ok());
    daemon
}

#[test]
fn an_export_is_visible_only_to_permitted_clients() {
    let stage = Stage::new();
    let (dir, port) = (stage.scratch.dir(), free_port());
    let host8 = stage.authority.client(dir, "host8");
    let (cert, key, ca) = (&stage.server.cert, &stage.server.key, &stage.server.ca);
    let daemon = daemon(
        &stage,
        port,
        &format!(
            "[[nbd]]\nlisten = \"tcp:127.0.0.1:{port}\"\n\
             tls = {{ cert = {cert:?}, key = {key:?}, client_ca = {ca:?} }}\n\
             [[allow]]\ndisks = [\"vm1\"]\nclients = [\"cn:host7\"]\n\
             [[allow]]\ndisks = [\"vm2\"]\nclients = [\"cn:host7\", \"san:host8.example\"]\n"
        ),
    );
    let list = |uri: &str| -> Vec<String> {
        let text = Tool::new("nbdinfo").args(["--list", "--json", uri]).run();
        let list: Value = serde_json::from_str(&text).unwrap();
        let exports = list["exports"].as_array().unwrap();
        exports.iter().map(|export| export["export-name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(list(&uri(port, "", &stage.client)), ["vm1", "vm2"]);
    assert_eq!(list(&uri(port, "", &host8)), ["vm2"]);
    assert_eq!(size(&uri(port, "vm2", &host8)).run().trim(), (2 * SIZE).to_string());
    // host8 sees only the default export; vm1 is as unknown to it as any other name.
    assert_eq!(size(&uri(port, "", &host8)).run().trim(), (2 * SIZE).to_string());
    let refusal =
        |export: &str| size(&uri(port, export, &host8)).run_failing().stderr.replace(export, "NAME");
    assert_eq!(refusal("vm1"), refusal("vm9"));
    // A client on the Unix socket has no name, so it is not host7.
    let address = stage.scratch.nbd();
    assert!(Client::connect(&address, "vm1").is_err() && Client::connect(&address, "vm2").is_err());
    daemon.stop();
}

/// The default build has no OpenSSL, so it has no pre-shared keys.
#[test]
fn keys_instead_of_certificates_need_another_build() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), MIB, 65);
    secret(&scratch.path("keys"), "host7:00112233445566778899aabbccddeeff\n");
    let serve = Serve::disk(&scratch.text("disk.img")).arg("--nbd-psk", &scratch.text("keys"));
    let output = serve.refused(&scratch);
    assert!(output.stderr.contains("built without the feature 'psk'"), "{}", output.all());
}

#[test]
fn clients_that_disconnect_in_any_phase_affect_no_other_client() {
    use std::io::{Read, Write};

    let stage = Stage::new();
    let hob = stage.start();
    let address = format!("127.0.0.1:{}", port(&hob));
    let start_tls = [&[0, 0, 0, 3][..], b"IHAVEOPT", &5u32.to_be_bytes(), &0u32.to_be_bytes()].concat();
    let go = [&start_tls[..], b"IHAVEOPT\0\0\0\x07\0\0\0\x0a\0\0\0\x04disk\0\0"].concat();
    let garbage = [&start_tls[..], &[0x16; 3000]].concat();
    let mut idle = Vec::new();
    for (bytes, answer) in [(&start_tls, true), (&go, false), (&garbage, false), (&start_tls, true)] {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(bytes).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        if answer {
            let mut acknowledged = [0; 20];
            stream.read_exact(&mut acknowledged).unwrap();
            assert_eq!(acknowledged[12..16], [0, 0, 0, 1]);
            idle.push(stream);
        } else {
            // Plaintext data sent with the STARTTLS option ends the connection, before or after the
            // reply.
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest);
            assert!(rest.len() <= 20, "only the acknowledgement: {rest:?}");
        }
    }
    // A client is killed while it copies.
    let uri = uri(port(&hob), "disk", &stage.client);
    let mut copy = Tool::new("nbdcopy").args([uri.as_str(), "null:"]).start();
    std::thread::sleep(Duration::from_millis(30));
    copy.kill();
    assert_eq!(size(&uri).run().trim(), SIZE.to_string());
    drop(idle);
    hob.stop();
}

#[test]
fn data_is_not_on_the_wire() {
    use std::io::{Read, Write};

    let stage = Stage::new();
    let hob = stage.start();
    // A proxy that keeps a copy of the traffic.
    let wire = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (wire_port, far) = (wire.local_addr().unwrap().port(), port(&hob));
    let heard = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let ear = heard.clone();
    std::thread::spawn(move || {
        for near in wire.incoming() {
            let near = near.unwrap();
            let far = std::net::TcpStream::connect(("127.0.0.1", far)).unwrap();
            for (mut from, mut to) in [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)] {
                let ear = ear.clone();
                std::thread::spawn(move || {
                    let mut bytes = [0; 1 << 14];
                    while let Ok(length @ 1..) = from.read(&mut bytes) {
                        ear.lock().unwrap().extend_from_slice(&bytes[..length]);
                        if to.write_all(&bytes[..length]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    let known = Noise::new(64).bytes(64);
    let mut block = vec![0; 4096];
    block[..64].copy_from_slice(&known);
    std::fs::write(stage.scratch.path("block"), &block).unwrap();
    let [object, image] = qemu(wire_port, &stage.client);
    let write = format!("write -s {} 8192 4096", stage.scratch.text("block"));
    Tool::new("qemu-io")
        .args(["--object", &object, "--image-opts", &image, "-c", &write, "-c", "read 8192 4096"])
        .run();
    let heard = heard.lock().unwrap();
    assert!(heard.len() > 2 * 4096, "{} bytes went past", heard.len());
    let holds = |what: &[u8]| heard.windows(what.len()).any(|window| window == what);
    assert!(holds(b"NBDMAGIC"), "the wire does carry this");
    assert!(!holds(&known) && !holds(b"\0\0\0\x04disk"), "neither data nor the export's name");
    hob.stop();
    let file = stage.scratch.read("disk.img");
    assert_eq!(file[8192..8256], known);
}
