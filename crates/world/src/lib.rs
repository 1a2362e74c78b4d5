//! Simulations of the engine: virtual time, seeded random numbers, devices with latency, faults and power
//! cuts, and checkers that know how a disk must behave.
//!
//! [`sim::run`] runs one history: guests issue requests, devices answer late, out of order, wrongly or not
//! at all, caches are changed under load, and every answer is compared with a simple model of a disk. One
//! seed is one history, on every machine; a violation names its seed.
//!
//! [`replay`] is the same loop without checks: modelled devices ([`disk_model`], [`flash_model`],
//! [`service`]), no contents, no faults, and a latency for every request.
//!
//! [`hosts::run`] runs a history of several hosts that hand a disk over, with its cache, across a bad
//! network.
//!
//! [`cluster::run`] runs a history of several hosts that decide through a store with leases which of them
//! serves which disk.
//!
//! [`isolation::run`] runs a history of many disks whose datastores hang, and watches one that does not.
//!
//! Nothing here reads a clock, uses the system's random numbers, or accesses a file. Contents are tags, one
//! for each unit of 512 bytes, so a torn sector is a sector whose tags come from two writes.

pub mod cluster;
pub mod content;
pub mod disk_model;
pub mod flash_model;
pub mod hosts;
pub mod isolation;
pub mod media;
pub mod model;
pub mod queue;
pub mod replay;
pub mod rng;
pub mod service;
pub mod sim;

/// A broken promise, described.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

/// Returns a [`Violation`] unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::Violation(format!($($message)+)));
        }
    };
}
pub(crate) use ensure;
