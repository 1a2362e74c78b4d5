//! The hob binary. hob keeps the hot blocks of virtual machine disks on local flash.

fn main() -> std::process::ExitCode {
    #[cfg(feature = "objects-cloud")]
    hob_clouds::install();
    #[cfg(feature = "psk")]
    hob_psk::install();
    hob_cli::main().into()
}
