//! Pages of a journal ring, as they are and with their checksums made right. Recovery neither panics nor takes memory
//! beyond what the pages account for, and what it finds can be sampled, exported and given up.
#![no_main]

use hob_engine::journal::replay_bytes;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    replay_bytes(input, false);
    replay_bytes(input, true);
});
