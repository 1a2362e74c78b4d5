//! Disks on Ceph RBD, each test on its own cluster.

mod clones;
mod faults;
mod image;
mod moves;
