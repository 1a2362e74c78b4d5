//! Tests sentences of SYSTEMS about bandwidth. The tests measure the write bandwidth of presets in
//! virtual time, by the amount of data written so far. SYSTEMS is the project's description of
//! other systems, outside this repository. `engine/tests/presets.rs` tests the destination and
//! order of data.

use hob_engine::command::Copies;
use hob_engine::io::{Durability, Op};
use hob_engine::outcome::Outcome;
use hob_engine::preset::preset;
use hob_world::disk_model::{ArrayConfig, ArrayModel};
use hob_world::flash_model::{FlashConfig, FlashModel};
use hob_world::replay::{Ask, CacheSetup, Replay, Setup};

const ROOM: u64 = 256 << 20;
const SPAN: u64 = 400 << 20;
const IO: u64 = 4096;
const CLIENTS: u32 = 64;

/// Measurements of one of forty successive parts of the written data.
#[derive(Clone, Copy, Debug, Default)]
struct Portion {
    per_second: f64,
    /// Share of the writes that flash accepted.
    to_flash: f64,
    /// Share of the cache that is dirty at the end of this part.
    dirty: f64,
}

/// Writes every block of the disk once, at random, and returns forty portions. If `name` is `None`,
/// the disk has no cache.
fn written(name: Option<&str>) -> Vec<Portion> {
    const PORTIONS: u64 = 40;
    let cache = name.map(|name| CacheSetup::preset(ROOM, preset(name).expect("a preset")));
    let array = ArrayModel::new(ArrayConfig::raid5_of_four_7200(SPAN));
    let flash = FlashModel::new(FlashConfig::pcie_card());
    let mut replay = Replay::new(Setup::one_disk(SPAN, cache, flash, array)).expect("it works");
    let blocks = SPAN / IO;
    let each = blocks / PORTIONS;
    replay.watch(0, each);
    let mut next = 0..blocks;
    let mut portions: Vec<Portion> = Vec::new();
    let (mut began, mut count, mut flash) = (replay.now().0, 0, 0);
    replay.closed(
        CLIENTS,
        |_, _| {
            // An odd factor visits every block once.
            let block = next.next()? * 48_271 % blocks;
            let op = Op::Write(Durability::Volatile);
            Some((0, Ask { disk: 0, op, offset: block * IO, len: IO, tag: 0 }))
        },
        |served| {
            count += 1;
            flash += u64::from(served.outcome == Outcome::WriteBack);
            if count == each {
                let ended = served.at.0 + served.latency_ns;
                let per_second = each as f64 / ((ended - began) as f64 / 1e9);
                portions.push(Portion { per_second, to_flash: flash as f64 / each as f64, dirty: 0.0 });
                (began, count, flash) = (ended, 0, 0);
            }
        },
    );
    for (portion, sample) in portions.iter_mut().zip(replay.samples()) {
        portion.dirty = sample.dirty_bytes as f64 / ROOM as f64;
    }
    portions
}

fn mean(portions: &[Portion]) -> f64 {
    let seconds: f64 = portions.iter().map(|portion| 1.0 / portion.per_second).sum();
    portions.len() as f64 / seconds
}

/// Tests a figure of SYSTEMS §4, and a sentence of §3: "Writes are acknowledged by the buffer […] a
/// full buffer sends writes straight to disk ("cache breakdown")". Writes are as fast as flash
/// until 30 % of the cache are full. Then they are as slow as the disks.
#[test]
fn vsan_falls_to_its_disks_when_the_buffer_is_full() {
    let (vsan, disks) = (written(Some("vsan")), written(None));
    let full = vsan.iter().position(|portion| portion.to_flash < 1.0).expect("the buffer gets full");
    assert!(vsan[full - 1].dirty <= 0.301 && vsan[full].dirty >= 0.295, "{vsan:?}");
    assert!(vsan[..full].iter().all(|portion| portion.to_flash == 1.0 && portion.per_second > 20_000.0));
    let (after, alone) = (mean(&vsan[full + 1..]), mean(&disks));
    // Destaging writes blocks in the order of their addresses, so it is faster than random writes
    // to the disks.
    assert!((1.5..5.0).contains(&(after / alone)), "{after} a second after the fall, {alone} by the disks");
    assert!(after < 0.1 * mean(&vsan[..full]));
}

/// Tests a sentence of SYSTEMS §4: "**One unified space** for reads and writes". ZBS slows down
/// later than vSAN: when dirty data and its second copies occupy the whole cache.
#[test]
fn zbs_does_not_fall_before_its_one_space_is_exhausted() {
    assert_eq!(preset("zbs").expect("it is there").copies, Copies::TwoOfDirty);
    let zbs = written(Some("zbs"));
    let full = zbs.iter().position(|portion| portion.to_flash < 1.0).expect("it gets full at last");
    assert!(zbs[full].dirty >= 0.49, "half of the room is data, half second copies: {:?}", zbs[full]);
    assert!(zbs[..full].iter().all(|portion| portion.per_second > 0.8 * zbs[0].per_second), "{zbs:?}");
    assert!(mean(&zbs[full + 1..]) < 0.1 * zbs[0].per_second, "{zbs:?}");
}
