//! hob-world
