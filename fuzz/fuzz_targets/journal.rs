//! Fuzzes pages of a journal ring, unchanged and with corrected checksums, and records of a crash
//! log. Recovery does not panic, and its memory is limited by the size of the input. The recovered
//! index can be sampled, exported and discarded.
#![no_main]

use hob_engine::journal::replay_bytes;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    replay_bytes(input, false);
    replay_bytes(input, true);
});
