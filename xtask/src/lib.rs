//! What tasks and benchmarks share: running other programs, and the packages that they need.

mod failures;
pub mod packages;
pub mod shell;
