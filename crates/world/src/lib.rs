//! A world for the engine to live in: virtual time, seeded dice, devices with latency, faults and
//! power cuts, and checkers that know what a disk must do.
//!
//! [`sim::run`] lives one history: guests issue requests, devices answer late, out of order, wrongly
//! or not at all, caches are changed under load, and every answer is held against a plain model of a
//! disk. One seed is one history, on every machine; a violation names its seed.
//!
//! [`replay`] is the same loop without doubts: modelled devices ([`disk_model`], [`flash_model`], [`service`]), no
//! contents, no faults, and a latency for every request.
//!
//! [`hosts::run`] lives one of several hosts that hand a disk over, with its cache, across a bad network.
//!
//! [`cluster::run`] lives one of several hosts that agree through a store with leases on who serves which disk.
//!
//! [`isolation::run`] lives one of many disks whose datastores hang, and watches one that does not.
//!
//! Nothing here reads a clock, rolls the machine's dice, or touches a file. Contents are tags, one
//! for each unit of 512 bytes, so a torn sector is a sector whose tags come from two writes.

pub mod cluster;
pub mod content;
pub mod dice;
pub mod disk_model;
pub mod flash_model;
pub mod hosts;
pub mod isolation;
pub mod media;
pub mod model;
pub mod queue;
pub mod replay;
pub mod service;
pub mod sim;

/// A promise was broken, and how.
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
