//! NBD over TLS with pre-shared keys (PSK), with the tools of libnbd and QEMU. Needs a hob with the
//! feature `psk`.

use conformance::authority::secret;
use conformance::data::{assert_same_file, noise_file};
use conformance::nbd_client::Address;
use conformance::scratch::{free_port, text, wait_for};
use conformance::{Hob, MIB, Scratch, Serve, Tool};
use serde_json::Value;

const SIZE: u64 = 24 * MIB;
const HOST7: &str = "host7:a6c8f4e01b2d3c4f5061728394a5b6c7d8e9fa0b1c2d3e4f5061728394a5b6c7";
const HOST8: &str = "host8:00112233445566778899aabbccddeeff";

/// Starts a server that knows two clients; host7 may use the disk.
fn start(scratch: &Scratch) -> (Hob, u16) {
    noise_file(&scratch.path("disk.img"), SIZE, 71);
    secret(&scratch.path("server.psk"), &format!("{HOST7}\n{HOST8}\n"));
    let hob = Serve::disk(&scratch.text("disk.img"))
        .cached(&scratch.path("pool"), "16M", "4K")
        .arg("--nbd-psk", &scratch.text("server.psk"))
        .arg("--allow", "psk:host7")
        .tcp()
        .start(scratch);
    let Address::Tcp(port) = *hob.address() else { panic!("TCP") };
    (hob, port)
}

/// Returns a client's key file, and the directory in which QEMU searches for it.
fn keys(scratch: &Scratch, name: &str, line: &str) -> (String, String) {
    let dir = scratch.path(name);
    std::fs::create_dir_all(&dir).unwrap();
    secret(&dir.join("keys.psk"), &format!("{line}\n"));
    (text(&dir.join("keys.psk")), text(&dir))
}

fn uri(port: u16, name: &str, file: &str) -> String {
    format!("nbds://{name}@127.0.0.1:{port}/disk?tls-psk-file={file}")
}

#[test]
fn nbdinfo_and_nbdcopy_connect_with_a_key() {
    let scratch = Scratch::new();
    let (hob, port) = start(&scratch);
    let (file, _) = keys(&scratch, "own", HOST7);
    let uri = uri(port, "host7", &file);
    let info: Value = serde_json::from_str(&Tool::new("nbdinfo").args(["--json", &uri]).run()).unwrap();
    assert_eq!((&info["TLS"], &info["exports"][0]["export-size"]), (&true.into(), &SIZE.into()), "{info}");
    Tool::new("nbdcopy").args(["--connections=4", &uri, &scratch.text("out.img")]).run();
    assert_same_file(&scratch.path("out.img"), &scratch.path("disk.img"));
    noise_file(&scratch.path("in.img"), SIZE, 72);
    Tool::new("nbdcopy").args(["--connections=4", "--flush", &scratch.text("in.img"), &uri]).run();
    hob.stop();
    assert_same_file(&scratch.path("in.img"), &scratch.path("disk.img"));
}

#[test]
fn qemu_img_and_qemu_io_connect_with_a_key() {
    let scratch = Scratch::new();
    let (hob, port) = start(&scratch);
    let (_, dir) = keys(&scratch, "own", HOST7);
    let object = format!("tls-creds-psk,id=tls,endpoint=client,dir={dir},username=host7");
    let image = format!(
        "driver=raw,file.driver=nbd,file.host=127.0.0.1,file.port={port},file.export=disk,file.tls-creds=tls"
    );
    let other = format!("driver=raw,file.driver=file,file.filename={}", scratch.text("disk.img"));
    Tool::new("qemu-io")
        .args(["--object", &object, "--image-opts", &image])
        .args(["-c", "write -P 0x5a 64k 2M", "-c", "flush", "-c", "read -P 0x5a 64k 2M"])
        .run();
    Tool::new("qemu-img").args(["compare", "-U", "--object", &object, "--image-opts", &image, &other]).run();
    hob.stop();
}

#[test]
fn a_backing_with_a_key_is_read_and_written() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), SIZE, 71);
    secret(&scratch.path("server.psk"), &format!("{HOST7}\n{HOST8}\n"));
    let port = free_port();
    let _server = Tool::new("nbdkit")
        .args(["--foreground", "--tls=require", &format!("--tls-psk={}", scratch.text("server.psk"))])
        .args(["--ipaddr", "127.0.0.1", "--port", &port.to_string()])
        .args(["file", &scratch.text("disk.img")])
        .start();
    let connects = || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
    wait_for("nbdkit", connects);
    let (file, _) = keys(&scratch, "own", HOST7);
    let uri = |user: &str| format!("nbds://{user}@127.0.0.1:{port}/?tls-psk-file={file}");
    let serve = |uri: &str| Serve::disk(uri).cached(&scratch.path("pool"), "16M", "4K");
    let hob = serve(&uri("host7")).start(&scratch);
    noise_file(&scratch.path("in.img"), SIZE, 72);
    Tool::new("nbdcopy").args(["--flush", &scratch.text("in.img"), &hob.uri()]).run();
    assert_same_file(&scratch.path("in.img"), &scratch.path("disk.img"));
    Tool::new("nbdcopy").args([&hob.uri(), &scratch.text("out.img")]).run();
    assert_same_file(&scratch.path("out.img"), &scratch.path("disk.img"));
    hob.stop();
    let refused = serve(&uri("host8")).refused(&scratch);
    assert!(refused.all().contains("has no key with the name"), "{}", refused.all());
}

#[test]
fn clients_without_a_key_or_permission_are_refused() {
    let scratch = Scratch::new();
    let (hob, port) = start(&scratch);
    let size = |uri: &str| Tool::new("nbdinfo").args(["--size", uri]);
    let wrong = HOST7.replace("a6c8", "a6c9");
    let (wrong, _) = keys(&scratch, "wrong", &wrong);
    size(&uri(port, "host7", &wrong)).run_failing();
    let (unknown, _) = keys(&scratch, "unknown", &HOST7.replace("host7", "host9"));
    size(&uri(port, "host9", &unknown)).run_failing();
    size(&format!("nbd://127.0.0.1:{port}/disk")).run_failing();
    // This client is admitted, and receives the error that there is no such disk.
    let (other, _) = keys(&scratch, "other", HOST8);
    let output = size(&uri(port, "host8", &other)).run_failing();
    assert!(output.all().contains("no export named"), "{}", output.all());
    let (own, _) = keys(&scratch, "own", HOST7);
    assert_eq!(size(&uri(port, "host7", &own)).run().trim(), SIZE.to_string());
    let log = hob.stop();
    let secrets = [HOST7, HOST8].map(|line| line.split_once(':').unwrap().1);
    assert!(secrets.iter().all(|key| !log.all().contains(key)), "no key is logged");
}
