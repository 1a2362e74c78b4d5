//! Compares the journal with models of it.

mod bytes;
mod copies;
mod golden;
mod model;
mod ring;
mod table;

use super::writer::Limits;
use super::*;
use crate::index::Index;
use crate::index::restore::{Copy, Restoring};
use crate::units::{BlockNo, DeviceId, FrameNo};

const CACHE: [u8; 16] = *b"cache of a test!";
const RING: u32 = 3;
const DISK_BYTES: u64 = 64 << 20;

/// Random numbers for tests (SplitMix64), from a seed.
struct SimRng(u64);

impl SimRng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Returns true once in `n` times.
    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

fn descriptor(block_shift: u32, segment_frames: u32, ordinals: &[u32]) -> Descriptor {
    Descriptor {
        cache: CACHE,
        ring: RING,
        block_shift,
        disk_bytes: DISK_BYTES,
        identity: [7; 32],
        segment_frames,
        ordinals: ordinals.to_vec(),
    }
}

/// Returns the state of a journal ring with these pages.
fn survey(copies: &[Vec<Option<Vec<u8>>>]) -> Ring {
    let mut survey = Survey::new(CACHE, RING, copies.len(), copies[0].len() as u64);
    for (copy, pages) in copies.iter().enumerate() {
        for (number, page) in pages.iter().enumerate().filter_map(|(n, page)| Some((n, page.as_ref()?))) {
            survey.page(copy, number as u64, page);
        }
    }
    survey.finish()
}

/// Returns segments with these ordinals, each on its own device.
fn on_own_devices(ordinals: &[u32]) -> Vec<(u32, DeviceId)> {
    (0..).map(DeviceId).zip(ordinals).map(|(device, ordinal)| (*ordinal, device)).collect()
}

/// Replays a plan up to the verification of checksums.
fn replay(
    plan: Plan,
    copies: &[Vec<Option<Vec<u8>>>],
    segment_bytes: u64,
    ordinals: &[u32],
) -> Result<Replay, ReplayError> {
    let reads: Vec<_> = plan.reads().collect();
    let mut replay = Replay::new(plan, segment_bytes, &on_own_devices(ordinals))?;
    for (copy, number) in reads {
        replay.page(copies[copy][number as usize].as_ref().expect("planned after it was seen"))?;
    }
    Ok(replay)
}
