//! Functions that tasks and benchmarks share: they run other programs and install Debian packages.

pub mod executables;
mod failures;
pub mod packages;
pub mod shell;
