//! Random histories of reads, writes, zeroes and discards on a cached disk. Each reply is compared
//! with an array in memory, and at the end the backing file is compared too.

use conformance::data::{Noise, assert_same};
use conformance::nbd_client::{CMD_CACHE, CMD_WRITE, FLAG_FUA};
use conformance::{MIB, Scratch, Serve};

const SIZE: u64 = 8 * MIB;
const STEPS: u64 = 3000;
const SECTOR: u64 = 512;

#[track_caller]
fn disk_equals_array(seed: u64, cache: &str, block: &str) {
    println!("seed {seed}, cache {cache}, blocks of {block}");
    let scratch = Scratch::new();
    let mut model = scratch.noise("disk.img", SIZE, seed);
    let hob =
        Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), cache, block).start(&scratch);
    let mut client = hob.connect();
    let mut dice = Noise::new(seed);
    for step in 0..STEPS {
        // Most requests are small and near each other, so that they overlap in blocks.
        let longest = if dice.below(20) == 0 { 2048 } else { 64 };
        let length = (1 + dice.below(longest)) * SECTOR;
        let place = if dice.below(3) == 0 { SIZE } else { MIB };
        let offset = dice.below((place - length) / SECTOR) * SECTOR;
        let range = offset as usize..(offset + length) as usize;
        match dice.below(20) {
            0..=9 => {
                let data = client.read(offset, length as u32).unwrap();
                assert_same(&data, &model[range], offset, &format!("step {step}: disk and array"));
            }
            10..=14 => {
                let data = dice.bytes(length as usize);
                client.write(offset, &data).unwrap();
                model[range].copy_from_slice(&data);
            }
            15 => {
                let data = dice.bytes(length as usize);
                let error = client.call(FLAG_FUA, CMD_WRITE, offset, length as u32, &data).unwrap();
                assert_eq!(error, 0, "FUA write in step {step}");
                model[range].copy_from_slice(&data);
            }
            16..=17 => {
                client.write_zeroes(offset, length as u32).unwrap();
                model[range].fill(0);
            }
            18 => {
                let error = client.call(0, CMD_CACHE, offset, length as u32, &[]).unwrap();
                assert_eq!(error, 0, "prefetch in step {step}");
            }
            _ => {
                client.trim(offset, length as u32).unwrap();
                // A discarded range may have any content, but the content must not change again.
                let after = client.read(offset, length as u32).unwrap();
                model[range].copy_from_slice(&after);
            }
        }
    }
    client.flush().unwrap();
    let whole = client.read(0, SIZE as u32).unwrap();
    assert_same(&whole, &model, 0, "the whole disk and the array");
    drop(client);
    hob.stop();
    assert_same(&scratch.read("disk.img"), &model, 0, "the backing file and the array");
}

/// Promise 2: a read returns the latest acknowledged write, or the backing's data.
#[test]
fn all_of_it_fits_the_cache() {
    disk_equals_array(11, "16M", "4K");
}

#[test]
fn the_cache_is_much_too_small() {
    disk_equals_array(12, "1M", "4K");
}

#[test]
fn blocks_are_larger_than_requests() {
    disk_equals_array(13, "4M", "256K");
}

#[test]
fn blocks_are_as_large_as_they_get() {
    disk_equals_array(14, "4M", "1M");
}
