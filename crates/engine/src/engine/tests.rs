//! The engine driven by hand.
