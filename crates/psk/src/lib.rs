//! TLS for NBD with pre-shared keys (external PSK, RFC 8446 section 2.2), by OpenSSL. This code is
//! a separate crate, because rustls does not support such keys, and hob can be built without a C
//! library (docs/decisions/0010-tls.md).
//!
//! Only TLS 1.3 is used, with an additional key exchange, so that a key that leaks later cannot
//! decrypt recorded traffic. Sessions are not resumed.

mod client;
mod server;

/// Enables pre-shared keys in this process, for NBD clients of hob and for NBD servers that hob
/// uses.
pub fn install() {
    hob_storage::backing::nbd_psk::install(client::connect);
    hob_daemon::psk::install(server::new);
}

/// Cipher suites of TLS 1.3 with SHA-256, which is the hash function of keys that specify none.
const CIPHERSUITES: &str = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
