//! Simulations of the cache engine. Time is virtual and random numbers are seeded. Simulated
//! devices have latency, faults and power cuts. Checkers compare the replies and the data of each
//! disk with a model of a disk.
//!
//! [`sim::run`] simulates one history. Guests send requests, and at the same time commands change
//! the caches. Devices answer late, out of order, wrongly or not at all. Every reply to a guest is
//! compared with a reference model of a disk's content. A seed gives the same history on every
//! host. A violation names its seed.
//!
//! [`replay`] simulates a recorded trace on modelled devices ([`disk_model`], [`flash_model`],
//! [`service`]). [`replay`] reports the latency of every request. The modelled devices store no
//! data and have no faults.
//!
//! [`hosts::run`] simulates several hosts that migrate a disk and its cache over an unreliable
//! network.
//!
//! [`cluster::run`] simulates a cluster whose hosts use a key-value store with leases to decide
//! which host serves which disk.
//!
//! [`isolation::run`] simulates many disks whose datastores hang. [`isolation::run`] checks that a
//! disk of a healthy datastore is not affected.
//!
//! The simulations read no clock, use no random numbers of the operating system and access no file.
//! Simulated disk content is one tag per 512 bytes. A torn sector has tags of two writes.

pub mod cluster;
pub mod content;
pub mod disk_model;
pub mod flash_model;
pub mod hosts;
pub mod isolation;
pub mod media;
pub mod model;
pub mod queue;
pub mod remote_model;
pub mod replay;
pub mod rng;
pub mod service;
pub mod sim;

/// A violated guarantee, described in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

/// Returns a [`Violation`] if the condition is false.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::Violation(format!($($message)+)));
        }
    };
}
pub(crate) use ensure;
