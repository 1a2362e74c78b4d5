//! hob keeps the hot blocks of virtual machine disks on local flash: the binary.

mod cli;
mod daemon;

fn main() -> std::process::ExitCode {
    // The object store's client takes what the process has; everybody else here names the same one.
    #[cfg(feature = "objects-cloud")]
    let _ = rustls::crypto::ring::default_provider().install_default();
    cli::main().into()
}
