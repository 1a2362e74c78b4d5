//! Fault injection against a running hob. See docs/TORTURE.md for the method.
//!
//! Guests of ours put load on the disks of a real daemon and compare every byte with a model of what is allowed, while
//! the daemon is killed, stopped and replaced, and its backings lose data, hang, fail and go away. No line is shared
//! with the product.

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
