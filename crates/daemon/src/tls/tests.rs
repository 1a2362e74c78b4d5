//! A certificate authority for tests, and the use of its certificates in TLS.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    date_time_ymd,
};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

/// A certificate authority that signs the certificates of tests.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "an authority");
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Returns a certificate and its key (PEM) for a server at 127.0.0.1 and hob.example.
    pub(crate) fn server(&self) -> (String, String) {
        let params = CertificateParams::new(["127.0.0.1", "hob.example"].map(str::to_owned)).unwrap();
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    fn client_params(name: &str) -> CertificateParams {
        let mut params = CertificateParams::new(vec![format!("{name}.example")]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params
    }

    /// Returns a certificate of a client with that common name and with `.example` among its DNS
    /// names.
    pub(crate) fn client(&self, name: &str) -> (CertificateDer<'static>, KeyPair) {
        let key = KeyPair::generate().unwrap();
        (Self::client_params(name).signed_by(&key, &self.0).unwrap().der().clone(), key)
    }

    /// Writes a client's certificate and key to files, and returns their paths.
    pub(crate) fn client_files(&self, dir: &Path, name: &str) -> (PathBuf, PathBuf) {
        self.write_client(dir, name, Self::client_params(name))
    }

    /// Writes an expired certificate of a client and its key to files, and returns their paths.
    pub(crate) fn expired_client_files(&self, dir: &Path, name: &str) -> (PathBuf, PathBuf) {
        let mut params = Self::client_params(name);
        params.not_after = date_time_ymd(2020, 1, 1);
        self.write_client(dir, name, params)
    }

    fn write_client(&self, dir: &Path, name: &str, params: CertificateParams) -> (PathBuf, PathBuf) {
        let key = KeyPair::generate().unwrap();
        let pem = params.signed_by(&key, &self.0).unwrap().pem();
        let (cert, key_file) = (dir.join(format!("{name}.crt")), dir.join(format!("{name}.key")));
        std::fs::write(&cert, pem).unwrap();
        write_secret(&key_file, &key.serialize_pem());
        (cert, key_file)
    }

    /// Returns the authority's own certificate as a file.
    pub(crate) fn file(&self, dir: &Path) -> PathBuf {
        let path = dir.join("ca.crt");
        std::fs::write(&path, self.0.pem()).unwrap();
        path
    }

    /// Returns a server's files; clients of this authority are admitted.
    pub(crate) fn server_files(&self, dir: &Path) -> TlsFiles {
        let (cert, key) = self.server();
        let files = TlsFiles {
            cert: dir.join("server.crt"),
            key: dir.join("server.key"),
            client_ca: Some(self.file(dir)),
        };
        std::fs::write(&files.cert, cert).unwrap();
        write_secret(&files.key, &key);
        files
    }
}

/// Writes a file that only its owner can read.
pub(crate) fn write_secret(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// Creates a FIFO that only its owner can read.
pub(crate) fn make_fifo(path: &Path) {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
}

fn error(files: &TlsFiles) -> String {
    let error = Tls::load(files.clone(), WithoutCertificate::Refused).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn unusable_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let files = Authority::new().server_files(dir.path());
    Tls::load(files.clone(), WithoutCertificate::Refused).unwrap();
    let none = TlsFiles { cert: dir.path().join("none"), ..files.clone() };
    assert!(error(&none).contains("/none: No such file"));
    let no_certificate = TlsFiles { cert: files.key.clone(), ..files.clone() };
    assert!(error(&no_certificate).contains("server.key has no certificate"));
    let no_authority = TlsFiles { client_ca: Some(files.key.clone()), ..files.clone() };
    assert!(error(&no_authority).contains("server.key has no certificate"));
    let open = TlsFiles { key: files.cert.clone(), ..files.clone() };
    assert!(error(&open).contains("every user can read"), "{}", error(&open));
    let fifo = dir.path().join("fifo");
    make_fifo(&fifo);
    for unfit in [
        TlsFiles { cert: fifo.clone(), ..files.clone() },
        TlsFiles { key: fifo.clone(), ..files.clone() },
        TlsFiles { client_ca: Some(fifo.clone()), ..files.clone() },
    ] {
        assert!(error(&unfit).ends_with("/fifo: the path leads to a FIFO, not to a regular file"));
    }
    write_secret(&files.key, &KeyPair::generate().unwrap().serialize_pem());
    assert!(error(&files).contains("cannot use"), "{}", error(&files));
    write_secret(&files.key, "nothing");
    assert!(error(&files).contains("no private key"), "{}", error(&files));
}

/// Returns a client that trusts `ca` and supports these versions.
fn connector(
    ca: &Path,
    versions: &[&'static rustls::SupportedProtocolVersion],
) -> tokio_rustls::TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add(pem::certificates(ca).unwrap().remove(0)).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config).into()
}

/// Returns the certificate that a client receives, and the result of the handshake.
async fn meet(
    tls: &Arc<Tls>,
    connector: &tokio_rustls::TlsConnector,
) -> (CertificateDer<'static>, rustls::HandshakeKind) {
    let (near, far) = tokio::io::duplex(1 << 16);
    let server = Arc::clone(tls);
    let served = tokio::spawn(async move {
        let mut stream = server.accept(far).await.unwrap();
        stream.write_all(b"hello").await.unwrap();
        stream.shutdown().await.unwrap();
        assert!(PeerCertificate::of(&stream).is_none());
    });
    let name = ServerName::try_from("hob.example").unwrap();
    let mut stream = connector.connect(name, near).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert_eq!(text, "hello");
    served.await.unwrap();
    let session = stream.get_ref().1;
    (session.peer_certificates().unwrap()[0].clone().into_owned(), session.handshake_kind().unwrap())
}

async fn shown(tls: &Arc<Tls>, ca: &Path) -> CertificateDer<'static> {
    meet(tls, &connector(ca, rustls::ALL_VERSIONS)).await.0
}

#[tokio::test]
async fn each_connection_authenticates_again() {
    let dir = tempfile::tempdir().unwrap();
    let files = TlsFiles { client_ca: None, ..Authority::new().server_files(dir.path()) };
    let tls = Arc::new(Tls::load(files, WithoutCertificate::Refused).unwrap());
    for version in rustls::ALL_VERSIONS {
        // The client would resume its session.
        let connector = connector(&dir.path().join("ca.crt"), &[version]);
        for _ in 0..3 {
            let (_, kind) = meet(&tls, &connector).await;
            assert!(!matches!(kind, rustls::HandshakeKind::Resumed), "{version:?}: {kind:?}");
        }
    }
}

#[tokio::test]
async fn a_renewed_certificate_is_used_and_a_broken_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let files = TlsFiles { client_ca: None, ..authority.server_files(dir.path()) };
    let ca = dir.path().join("ca.crt");
    let tls = Arc::new(Tls::load(files.clone(), WithoutCertificate::Refused).unwrap());
    let first = shown(&tls, &ca).await;
    assert_eq!(first, shown(&tls, &ca).await);
    assert!(tls.is_for("hob.example") && tls.is_for("127.0.0.1"));
    assert!(!tls.is_for("evil.example") && !tls.is_for("127.0.0.2") && !tls.is_for("a b"));
    let (cert, key) = authority.server();
    // A renewal in two steps: in between, the certificate and the key do not match.
    std::fs::remove_file(&files.cert).unwrap();
    std::fs::write(&files.cert, &cert).unwrap();
    assert_eq!(first, shown(&tls, &ca).await);
    std::fs::remove_file(&files.key).unwrap();
    write_secret(&files.key, &key);
    let second = shown(&tls, &ca).await;
    assert_ne!(first, second);
    std::fs::remove_file(&files.cert).unwrap();
    assert_eq!(second, shown(&tls, &ca).await);
}
