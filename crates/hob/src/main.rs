//! hob keeps the hot blocks of virtual machine disks on local flash: the binary.

mod cli;
mod daemon;

fn main() -> std::process::ExitCode {
    cli::main().into()
}
