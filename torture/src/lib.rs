//! Fault injection against a running hob. docs/TORTURE.md describes the method.
//!
//! The harness's guests put load on the disks of a real daemon and compare every byte with a model of
//! allowed content. Meanwhile the daemon is killed, stopped and replaced, and its backings lose data, hang,
//! fail and disappear. No code is shared with the product.

pub mod behaviour;
pub mod daemon;
pub mod files;
pub mod guest;
pub mod journal;
pub mod link;
pub mod medium;
pub mod model;
pub mod report;
pub mod round;
pub mod server;
pub mod setup;
pub mod stamp;
