//! The API over TLS: which clients are admitted, which are refused, and what each may do.

use std::path::PathBuf;

use hob_control::ClientTls;
use tokio::net::TcpStream;

use super::*;
use crate::config::Config;
use crate::listening_sockets::ListeningSockets;
use crate::tls::tests::{Authority, write_secret};

pub(super) const ADMIN: &str = "0123456789abcdef0123456789abcdef";
pub(super) const READER: &str = "fedcba9876543210fedcba9876543210";

/// A daemon's API over TCP, its authority, and the files of both.
pub(super) struct Site {
    dir: tempfile::TempDir,
    authority: Authority,
    pub(super) endpoint: Endpoint,
}

impl Site {
    async fn start() -> Site {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::new();
        let files = authority.server_files(dir.path());
        let (admin, reader) = (dir.path().join("admin.token"), dir.path().join("reader.token"));
        write_secret(&admin, &format!("{ADMIN}\n"));
        write_secret(&reader, READER);
        let config = Config::parse(&format!(
            r#"
            [control]
            listen = ["tcp:127.0.0.1:0"]
            tls = {{ cert = {:?}, key = {:?}, client_ca = {:?} }}
            token_file = {admin:?}
            [[control.token]]
            file = {reader:?}
            role = "read-only"
            [[control.client]]
            certificate = "cn:ops"
            role = "admin"
            [[control.client]]
            certificate = "san:watcher.example"
            role = "read-only"
            "#,
            files.cert,
            files.key,
            files.client_ca.unwrap(),
        ))
        .unwrap();
        let guard = Guard::of_config(&config.control).unwrap();
        let listener =
            ControlListener::bind(config.control.listen[0].clone(), &guard, &ListeningSockets::default())
                .await
                .unwrap();
        let endpoint = listener.endpoint();
        tokio::spawn(listener.serve(router(services())));
        Site { dir, authority, endpoint }
    }

    pub(super) fn client(&self, token: Option<&str>, own: Option<&(PathBuf, PathBuf)>) -> Client {
        let ca = self.authority.file(self.dir.path());
        let own = own.map(|(cert, key)| (cert.as_path(), key.as_path()));
        Client::new(self.endpoint.clone(), token.map(str::to_owned))
            .with_tls(ClientTls::load(&ca, own).unwrap())
    }
}

pub(super) fn site(test: impl AsyncFnOnce(Site)) {
    crate::background::run_in_real_time(async { test(Site::start().await).await });
}

/// Returns the results of a read and of a change: the status, or the TLS error.
async fn may(client: &Client) -> (Result<u16, String>, Result<u16, String>) {
    let of = |result: Result<(), ClientError>| match result {
        Ok(()) => Ok(200),
        Err(ClientError::Refused { status, .. }) => Ok(status),
        Err(ClientError::Untrusted { why, .. }) => Err(why),
        Err(error) => panic!("{error}"),
    };
    // There is no such pool; only clients that may change something receive this error.
    (of(client.version().await.map(|_| ())), of(client.pool_remove("none").await.map(|_| ())))
}

#[test]
fn tokens_open_according_to_their_roles() {
    site(async |site| {
        for (token, question, change) in [
            (Some(ADMIN), 200, 404),
            (Some(READER), 200, 403),
            (None, 401, 401),
            (Some(""), 401, 401),
            (Some("wrong"), 401, 401),
            (Some("0123456789abcdef0123456789abcdeX"), 401, 401),
        ] {
            assert_eq!(may(&site.client(token, None)).await, (Ok(question), Ok(change)), "{token:?}");
        }
        let error = site.client(Some(READER), None).pool_remove("none").await.unwrap_err().to_string();
        assert!(error.contains("reader.token has the role read-only"), "{error}");
    });
}

#[test]
fn certificates_open_according_to_their_roles() {
    site(async |site| {
        for (name, question, change) in [("ops", 200, 404), ("watcher", 200, 403), ("stranger", 401, 401)] {
            let own = site.authority.client_files(site.dir.path(), name);
            assert_eq!(may(&site.client(None, Some(&own))).await, (Ok(question), Ok(change)), "{name}");
        }
        // A token takes precedence over the certificate.
        let ops = site.authority.client_files(site.dir.path(), "ops");
        assert_eq!(may(&site.client(Some(READER), Some(&ops))).await, (Ok(200), Ok(403)));
        assert_eq!(may(&site.client(Some("wrong"), Some(&ops))).await, (Ok(401), Ok(401)));
    });
}

#[test]
fn expired_and_unknown_certificates_do_not_even_get_to_ask() {
    site(async |site| {
        let expired = site.authority.expired_client_files(site.dir.path(), "ops");
        let (question, change) = may(&site.client(Some(ADMIN), Some(&expired))).await;
        assert!(question.unwrap_err().contains("Expired"));
        assert!(change.unwrap_err().contains("Expired"));
        let others = tempfile::tempdir().unwrap();
        let unknown = Authority::new().client_files(others.path(), "ops");
        let (question, change) = may(&site.client(Some(ADMIN), Some(&unknown))).await;
        question.unwrap_err();
        change.unwrap_err();
    });
}

#[test]
fn a_client_does_not_trust_a_daemon_of_another_authority_or_name() {
    site(async |site| {
        let others = tempfile::tempdir().unwrap();
        let ca = Authority::new().file(others.path());
        let client = Client::new(site.endpoint.clone(), Some(ADMIN.to_owned()));
        let no_tls = client.version().await.unwrap_err();
        assert!(matches!(no_tls, ClientError::NoTls { .. }), "{no_tls}");
        let (question, _) = may(&client.with_tls(ClientTls::load(&ca, None).unwrap())).await;
        assert!(question.unwrap_err().contains("invalid peer certificate"));
        // The certificate is for 127.0.0.1, not for localhost.
        let Endpoint::Tcp { port, .. } = site.endpoint else { panic!("TCP") };
        let elsewhere = Site { endpoint: Endpoint::Tcp { host: "localhost".into(), port }, ..site };
        let (question, _) = may(&elsewhere.client(Some(ADMIN), None)).await;
        assert!(question.unwrap_err().contains("not valid for name"));
    });
}

#[test]
fn plain_http_is_not_answered() {
    site(async |site| {
        let Endpoint::Tcp { host, port } = &site.endpoint else { panic!("TCP") };
        let mut stream = TcpStream::connect((host.as_str(), *port)).await.unwrap();
        let request = format!("GET /v1/disks HTTP/1.1\r\nHost: hob\r\nAuthorization: Bearer {ADMIN}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(!answer.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&answer));
        assert_eq!(may(&site.client(Some(ADMIN), None)).await, (Ok(200), Ok(404)));
    });
}

/// The Unix socket also checks the origin of a request, because a proxy may forward requests to it.
#[test]
fn other_sites_are_refused_on_every_socket() {
    run(async |_, endpoint| {
        for (headers, status) in [
            ("", 400),
            ("Origin: http://hob\r\n", 400),
            ("Sec-Fetch-Site: same-origin\r\n", 400),
            ("Origin: https://evil.example\r\n", 403),
            ("Sec-Fetch-Site: cross-site\r\n", 403),
        ] {
            let request =
                format!("POST /v1/disks HTTP/1.1\r\nHost: hob\r\nConnection: close\r\n{headers}\r\n");
            let (got, answer) = raw(&endpoint, &request).await;
            assert_eq!(got, status, "{headers}: {answer}");
        }
    });
}
