//! Disks on Ceph RBD, each test on a cluster of its own. Needs a hob built with its feature `rbd`.

mod clones;
mod faults;
mod image;
mod moves;
