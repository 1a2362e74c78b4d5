//! The hob binary. hob keeps the hot blocks of virtual machine disks on local flash.

fn main() -> std::process::ExitCode {
    // The object store's client uses the process-wide provider; all other code names the same one
    // explicitly.
    #[cfg(feature = "objects-cloud")]
    let _ = rustls::crypto::ring::default_provider().install_default();
    hob_cli::main().into()
}
