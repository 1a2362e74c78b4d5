//! A certificate authority for one test, and certificate files in the form that programs expect.
//!
//! GnuTLS programs (qemu, libnbd) use a directory with `ca-cert.pem`, `client-cert.pem` and
//! `client-key.pem`.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

/// Signs certificates.
#[derive(Debug)]
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// Paths of a certificate and of the certificate's key.
#[derive(Debug, Clone)]
pub struct Files {
    /// The directory with both, and with the authority's certificate.
    pub dir: PathBuf,
    /// The certificate of the authority, with which each side verifies the certificate of the other
    /// side.
    pub ca: PathBuf,
    /// The certificate.
    pub cert: PathBuf,
    /// Path of the certificate's key, which only the owner can read.
    pub key: PathBuf,
}

impl Authority {
    /// Creates a new authority. No program trusts the authority yet.
    ///
    /// # Panics
    /// Panics if the system returns no random numbers.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    /// Creates a certificate for a server at 127.0.0.1, in a directory of its own below `dir`.
    #[must_use]
    pub fn server(&self, dir: &Path) -> Files {
        let params = CertificateParams::new(["127.0.0.1", "hob.example"].map(str::to_owned)).expect("names");
        self.write(&dir.join("tls-server"), "server", params)
    }

    /// Creates a certificate for the daemon of a host at `address`, for use as a server and, with
    /// the common name `name`, as a client. The files are in the directory `tls-NAME` below `dir`.
    #[must_use]
    pub fn host(&self, dir: &Path, name: &str, address: &str) -> Files {
        let mut params = CertificateParams::new(vec![address.to_owned()]).expect("an address");
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        self.write(&dir.join(format!("tls-{name}")), "host", params)
    }

    /// Creates a certificate for a client with the common name `name`, in its own directory below
    /// `dir`.
    #[must_use]
    pub fn client(&self, dir: &Path, name: &str) -> Files {
        self.write(&dir.join(format!("tls-{name}")), "client", client(name))
    }

    /// Like `client`, but the certificate expired in 2020.
    #[must_use]
    pub fn expired_client(&self, dir: &Path, name: &str) -> Files {
        let mut params = client(name);
        params.not_before = date_time_ymd(2019, 1, 1);
        params.not_after = date_time_ymd(2020, 1, 1);
        self.write(&dir.join(format!("tls-expired-{name}")), "client", params)
    }

    fn write(&self, dir: &Path, role: &str, params: CertificateParams) -> Files {
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.0).expect("a certificate");
        std::fs::create_dir_all(dir).expect("a directory");
        let files = Files {
            dir: dir.to_owned(),
            ca: dir.join("ca-cert.pem"),
            cert: dir.join(format!("{role}-cert.pem")),
            key: dir.join(format!("{role}-key.pem")),
        };
        std::fs::write(&files.ca, self.0.pem()).expect("write");
        std::fs::write(&files.cert, certificate.pem()).expect("write");
        secret(&files.key, &key.serialize_pem());
        files
    }
}

fn client(name: &str) -> CertificateParams {
    let mut params = CertificateParams::new(vec![format!("{name}.example")]).expect("a name");
    params.distinguished_name.push(DnType::CommonName, name);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params
}

/// Writes a file that only its owner can read.
///
/// # Panics
/// Panics if the file cannot be written.
pub fn secret(path: &Path, text: &str) {
    std::fs::write(path, text).expect("write");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("chmod");
}
