//! Shared parts of the black-box tests: scratch directories, processes that end with the test that
//! started them, and a builder that starts `hob`. The crate also runs other programs and reports
//! all their output. Its small NBD client shares no code with hob.
//!
//! The tests in `tests/` use only the product's command line, sockets and files. So this crate depends on
//! no crate of the workspace. A missing program is a failure, never a skip: a suite that passes because
//! nothing ran proves nothing.

pub mod attach_stage;
pub mod authority;
pub mod blkio_client;
pub mod ceph;
pub mod data;
pub mod etcd;
pub mod freezer;
pub mod guest;
pub mod hob;
pub mod hosts;
pub mod libvirt;
pub mod load;
pub mod mounts;
pub mod nbd_client;
pub mod postgres;
pub mod process;
pub mod qmp;
pub mod scratch;
pub mod slow_server;
pub mod stats;
pub mod store;
pub mod test_host;
pub mod tool;
pub mod trace;
pub mod vhost_driver;
pub mod written;

pub use authority::Authority;
pub use ceph::Cluster;
pub use etcd::Etcd;
pub use freezer::Freezer;
pub use hob::{Daemon, Hob, Serve};
pub use hosts::Host;
pub use mounts::{Loop, Unmount};
pub use postgres::Postgres;
pub use scratch::Scratch;
pub use slow_server::{Delays, SlowServer};
pub use store::Store;
pub use test_host::{Plan, TestHost};
pub use tool::Tool;
pub use written::Written;

/// One KiB in bytes.
pub const KIB: u64 = 1 << 10;
/// One MiB in bytes.
pub const MIB: u64 = 1 << 20;
