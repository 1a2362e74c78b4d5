//! The control API over TLS, with `hob` and curl as clients: which clients are admitted, which are
//! refused, and which may only read.

use conformance::authority::{Authority, Files, secret};
use conformance::process::Output;
use conformance::scratch::{free_port, text};
use conformance::{Daemon, MIB, Scratch, Tool, hob};

const ADMIN: &str = "an-admin-token-0123456789abcdef";
const READER: &str = "a-reader-token-0123456789abcdef";

/// A daemon whose API is on TCP, and its clients.
struct Stage {
    scratch: Scratch,
    authority: Authority,
    daemon: Daemon,
    port: u16,
    ca: String,
}

impl Stage {
    fn new() -> Self {
        let scratch = Scratch::new();
        let authority = Authority::new("conformance");
        let server = authority.server(scratch.dir());
        secret(&scratch.path("admin"), ADMIN);
        secret(&scratch.path("reader"), READER);
        let port = free_port();
        let config = format!(
            "state_dir = {:?}\n[control]\nlisten = [\"tcp:127.0.0.1:{port}\", \"unix:{}\"]\n\
             tls = {{ cert = {:?}, key = {:?}, client_ca = {:?} }}\ntoken_file = {:?}\n\
             [[control.token]]\nfile = {:?}\nrole = \"read-only\"\n\
             [[control.client]]\ncertificate = \"cn:ops\"\nrole = \"admin\"\n\
             [[control.client]]\ncertificate = \"cn:watcher\"\nrole = \"read-only\"\n",
            scratch.path("state"),
            scratch.text("ctl.sock"),
            server.cert,
            server.key,
            server.ca,
            scratch.path("admin"),
            scratch.path("reader"),
        );
        scratch.write_config(config);
        let daemon = scratch.start_daemon();
        let ca = text(&server.ca);
        Self { scratch, authority, daemon, port, ca }
    }

    /// Runs `hob` over TLS.
    fn hob(&self, who: &[&str], command: &[&str]) -> Output {
        let url = format!("https://127.0.0.1:{}", self.port);
        hob::command(&[command, &["--url", &url, "--ca", &self.ca], who].concat())
    }

    /// Returns the status and body that curl receives, with the additional options `args`.
    #[track_caller]
    fn curl(&self, args: &[&str], path: &str) -> (u16, String) {
        let said = Tool::new("curl")
            .args(["-sS", "--cacert", &self.ca, "-w", "\n%{http_code}"])
            .args(args)
            .arg(format!("https://127.0.0.1:{}{path}", self.port))
            .run();
        let (body, status) = said.rsplit_once('\n').expect("a status");
        (status.parse().expect("a number"), body.to_owned())
    }

    fn client(&self, name: &str) -> Files {
        self.authority.client(self.scratch.dir(), name)
    }
}

fn shown(files: &Files) -> [String; 4] {
    ["--cert".to_owned(), text(&files.cert), "--key".to_owned(), text(&files.key)]
}

#[track_caller]
fn refused(output: &Output, part: &str) {
    assert!(!output.success(), "this should have been refused: {}", output.all());
    assert!(output.stderr.contains(part), "{part}: {}", output.all());
    assert_eq!(output.stderr.trim().lines().count(), 1, "{}", output.all());
}

#[test]
fn each_role_can_do_its_part_with_tokens_and_with_certificates() {
    let stage = Stage::new();
    let (admin, reader) = (stage.scratch.text("admin"), stage.scratch.text("reader"));
    let (ops, watcher) = (shown(&stage.client("ops")), shown(&stage.client("watcher")));
    let (ops, watcher) = (ops.each_ref().map(String::as_str), watcher.each_ref().map(String::as_str));
    for (name, admin, reader) in [
        ("vm1", &["--token-file", &admin][..], &["--token-file", &reader][..]),
        ("vm2", &ops[..], &watcher[..]),
    ] {
        std::fs::File::create(stage.scratch.path(name)).unwrap().set_len(MIB).unwrap();
        let backing = stage.scratch.text(name);
        let add = ["disk", "add", name, "--backing", &backing];
        refused(&stage.hob(reader, &add), "has the role read-only");
        let output = stage.hob(admin, &add);
        assert!(output.success(), "{}", output.all());
        let output = stage.hob(reader, &["disk", "list"]);
        assert!(output.success() && output.stdout.contains(name), "{}", output.all());
    }
    refused(&stage.hob(&watcher, &["disk", "remove", "vm1"]), "watcher has the role read-only");
    // The Unix socket is for the owner, who needs no certificate.
    stage.daemon.ctl(&["disk", "remove", "vm1"]);
    let log = stage.daemon.stop();
    let change = |line: &str| {
        ["method=POST", "\"/v1/disks\"", "caller=\"cn:ops\"", "status=200"]
            .iter()
            .all(|part| line.contains(part))
    };
    assert!(log.stderr.lines().any(change), "who changed what is logged: {}", log.stderr);
    assert!(!log.all().contains(ADMIN) && !log.all().contains(READER), "and no secret is");
}

#[test]
fn unknown_clients_are_refused_with_one_line() {
    let stage = Stage::new();
    let wrong = stage.scratch.path("wrong");
    secret(&wrong, "a-wrong-token-0123456789abcdefg");
    let list = ["disk", "list"];
    refused(&stage.hob(&[], &list), "--token-file");
    refused(&stage.hob(&["--token-file", &text(&wrong)], &list), "does not know this token");
    let stranger = shown(&stage.client("stranger"));
    refused(&stage.hob(&stranger.each_ref().map(String::as_str), &list), "has no role in this daemon");
    let expired = shown(&stage.authority.expired_client(stage.scratch.dir(), "ops"));
    refused(&stage.hob(&expired.each_ref().map(String::as_str), &list), "Expired");
    let other = Authority::new("another").client(stage.scratch.dir(), "foreign");
    refused(
        &stage.hob(&shown(&other).each_ref().map(String::as_str), &list),
        "the TLS handshake with the daemon",
    );
    let url = format!("https://127.0.0.1:{}", stage.port);
    refused(&hob::command(&["disk", "list", "--url", &url]), "--ca");
    refused(
        &hob::command(&["disk", "list", "--url", &url, "--ca", &text(&other.ca)]),
        "the TLS handshake with the daemon",
    );
    stage.daemon.stop();
}

#[test]
fn another_site_cannot_use_a_browsers_certificate() {
    let stage = Stage::new();
    let ops = shown(&stage.client("ops"));
    let own = ops.each_ref().map(String::as_str);
    let create = ["-X", "POST", "-d", "{\"name\":\"x\",\"backing\":\"/nonexistent\"}"];
    let post = |more: &[&str]| stage.curl(&[&own[..], &create, more].concat(), "/v1/disks").0;
    // 422: the daemon tried to open the file.
    assert_eq!(post(&[]), 422);
    let origin = format!("Origin: https://127.0.0.1:{}", stage.port);
    assert_eq!(post(&["-H", &origin]), 422);
    assert_eq!(post(&["-H", &origin, "-H", "Sec-Fetch-Site: same-origin"]), 422);
    assert_eq!(post(&["-H", "Origin: https://evil.example"]), 403);
    assert_eq!(post(&["-H", "Origin: null"]), 403);
    assert_eq!(post(&["-H", "Sec-Fetch-Site: cross-site"]), 403);
    assert_eq!(post(&["-H", "Sec-Fetch-Site: same-site", "-H", &origin]), 403);
    // The page of another site cannot read responses, show them in a frame, or send preflight
    // requests.
    let get = |more: &[&str]| stage.curl(&[&own[..], more].concat(), "/v1/disks");
    assert_eq!(get(&["-H", "Sec-Fetch-Site: cross-site"]).0, 403);
    let (status, head) = get(&["-i", "-H", "Origin: https://evil.example"]);
    assert_eq!(status, 403);
    assert!(!head.to_lowercase().contains("access-control-"), "{head}");
    let (status, head) = get(&["-i"]);
    let head = head.to_lowercase();
    assert_eq!(status, 200);
    assert!(head.contains("x-frame-options: deny") && head.contains("frame-ancestors 'none'"), "{head}");
    let preflight = ["-i", "-X", "OPTIONS", "-H", "Origin: https://evil.example"];
    let (status, head) = get(&[&preflight[..], &["-H", "Access-Control-Request-Method: DELETE"]].concat());
    assert_eq!(status, 403);
    assert!(!head.to_lowercase().contains("access-control-"), "{head}");
    // The request has the host name of another site, which resolves to this address.
    assert_eq!(get(&["-H", "Host: evil.example"]).0, 403);
    assert_eq!(get(&["-H", "Host: hob.example"]).0, 200);
    stage.daemon.stop();
}

#[test]
fn tcp_without_tls_is_not_to_be_had() {
    let stage = Stage::new();
    let port = free_port().to_string();
    let image = stage.scratch.text("e.img");
    std::fs::File::create(&image).unwrap().set_len(MIB).unwrap();
    let listen = format!("unix:{}", stage.scratch.text("e.sock"));
    let control = format!("tcp:127.0.0.1:{port}");
    let serve = ["serve", "--disk", &image, "--listen", &listen, "--control", &control];
    refused(&hob::command(&serve), "needs TLS; give --cert and --key");
    let token = stage.scratch.text("admin");
    refused(&hob::command(&[&serve[..], &["--token-file", &token]].concat()), "needs TLS");
    let server = stage.authority.server(stage.scratch.dir());
    let (cert, key) = (text(&server.cert), text(&server.key));
    let tls = ["--cert", cert.as_str(), "--key", key.as_str()];
    refused(&hob::command(&[&serve[..], &tls].concat()), "no client could authenticate");
    secret(&server.key, &std::fs::read_to_string(&server.key).unwrap());
    std::fs::set_permissions(&server.key, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let all = [&serve[..], &tls, &["--token-file", &token]].concat();
    refused(&hob::command(&all), "every user can read");
    // Requests without TLS get no reply.
    let plain = format!("http://127.0.0.1:{}/v1/version", stage.port);
    let bearer = format!("Authorization: Bearer {ADMIN}");
    let output = Tool::new("curl").args(["-sS", "-H", &bearer, &plain]).output();
    assert!(!output.stdout.contains("hob"), "{}", output.all());
    stage.daemon.stop();
}

#[test]
fn a_renewed_certificate_is_served_without_a_restart() {
    let stage = Stage::new();
    let token = ["-H", "Authorization: Bearer a-reader-token-0123456789abcdef"];
    assert_eq!(stage.curl(&token, "/v1/version").0, 200);
    // Another authority signs the renewed certificate, so that the test can identify it.
    let renewed = Authority::new("the next").server(stage.scratch.dir());
    let served = Tool::new("curl")
        .args(["-sS", "--cacert", &text(&renewed.ca)])
        .args(token)
        .arg(format!("https://127.0.0.1:{}/v1/version", stage.port))
        .run();
    assert!(served.contains("hob"), "{served}");
    stage.daemon.stop();
}
