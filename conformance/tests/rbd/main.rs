//! Disks on Ceph RBD, each test on a cluster of its own. Needs a hob built with its feature `rbd`.

mod faults;
mod image;
