//! Fault injection test of a running hob daemon. docs/TORTURE.md describes the method.
//!
//! Test guests send requests to the disks of a real daemon and compare every byte with a model of
//! the allowed content. Meanwhile the test kills, stops and replaces the daemon. The test also
//! makes backings lose data, hang, fail and disappear. The test shares no code with hob.

pub mod behaviour;
mod config;
pub mod daemon;
mod disk;
pub mod files;
pub mod guest;
pub mod journal;
pub mod lateness;
pub mod link;
pub mod medium;
pub mod model;
pub mod report;
pub mod round;
pub mod server;
pub mod setup;
pub mod stamp;
