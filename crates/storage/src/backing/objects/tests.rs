//! Disks of objects in a store that fails, forgets, delays and is lost between any two puts.
