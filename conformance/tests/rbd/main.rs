//! Disks on Ceph RBD, each test on its own cluster. Needs a hob with the feature `rbd`.

mod clones;
mod faults;
mod image;
mod moves;
