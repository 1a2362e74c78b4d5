//! `hob advise DISK`: the curves that a served disk measures differ by at most 0.02 from the exact
//! curves, which the test computes with its own LRU stack from a trace of the same run.

use std::time::Duration;

use conformance::data::noise_file;
use conformance::nbd_client::Client;
use conformance::trace::{Request, Trace};
use conformance::{MIB, Scratch, Serve};
use rustix::process::Signal;
use serde_json::Value;

const SIZE: u64 = 256 * MIB;
const SECTOR: u64 = 4096;
const OFF_MAX: f64 = 0.02;
const REQUESTS: u64 = 14_000;

/// Sends requests. Half of them go to an eighth of the disk, and some go to a few sectors. Some
/// requests cover several blocks.
fn load(client: &mut Client) {
    let mut state = 4711_u64;
    let mut dice = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    for i in 0..REQUESTS {
        let len = [4096, 4096, 4096, 8192, 65_536][dice(5) as usize];
        let span = [SIZE, SIZE / 8, SIZE / 8, SIZE / 64][dice(4) as usize];
        let offset = dice((span - len) / SECTOR) * SECTOR;
        match dice(20) {
            0 => client.trim(offset, len as u32).unwrap(),
            1 => client.write(offset + 512, &vec![i as u8; 512]).unwrap(),
            2..6 => client.write(offset, &vec![i as u8; len as usize]).unwrap(),
            _ => drop(client.read(offset, len as u32).unwrap()),
        }
    }
}

/// A block of the stack: its number, and for each sector the smallest cache in which the sector is
/// valid.
struct Block {
    number: u64,
    valid_from: Vec<Option<usize>>,
}

/// Returns, for each read and each block that it touches, the size in blocks of the smallest LRU
/// cache that serves it; `None` if no cache does.
fn hits_from(requests: &[Request], block_bytes: u64) -> Vec<Option<usize>> {
    let sectors = (block_bytes / SECTOR) as usize;
    // The most recent block is last.
    let mut stack: Vec<Block> = Vec::new();
    let mut hits = Vec::new();
    for request in requests {
        let end = request.offset + u64::from(request.len);
        for number in request.offset / block_bytes..end.div_ceil(block_bytes) {
            let start = number * block_bytes;
            let (first, last) = (request.offset.max(start) - start, end.min(start + block_bytes) - start);
            let covered = (first / SECTOR) as usize..last.div_ceil(SECTOR) as usize;
            let whole = first.div_ceil(SECTOR) as usize..(last / SECTOR) as usize;
            let at = stack.iter().rposition(|block| block.number == number);
            if request.op == 'D' || request.op == 'W' && whole.is_empty() {
                if let Some(at) = at {
                    stack[at].valid_from[covered].fill(None);
                }
                continue;
            }
            let distance = at.map_or(0, |at| stack.len() - at);
            let mut block =
                at.map_or_else(|| Block { number, valid_from: vec![None; sectors] }, |at| stack.remove(at));
            for from in block.valid_from.iter_mut().flatten() {
                *from = distance.max(*from);
            }
            if request.op == 'R' {
                let valid = &block.valid_from[covered.clone()];
                hits.push(
                    valid.iter().copied().collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().max()),
                );
            }
            block.valid_from[covered].fill(Some(1));
            stack.push(block);
        }
    }
    hits
}

#[test]
fn live_curves_are_those_of_the_trace() {
    let scratch = Scratch::new();
    noise_file(&scratch.path("disk.img"), SIZE, 92);
    let hob =
        Serve::disk(&scratch.text("disk.img")).cached(&scratch.path("pool"), "16M", "4K").start(&scratch);
    let mut client = hob.connect();
    let before = hob.ctl(&["advise", "disk", "--reset"]);
    assert!(before.contains("nothing was read"), "{before}");
    let mut recording = hob.record(&scratch.path("trace"), &[]);
    load(&mut client);
    recording.signal(Signal::INT);
    let ended = recording.finish(Duration::from_secs(60));
    assert!(ended.success(), "{}", ended.all());
    let trace = Trace::read(&scratch.path("trace"));
    assert_eq!((trace.requests.len() as u64, trace.dropped), (REQUESTS, 0));

    let advice: Value = hob.json(&["advise", "disk"]);
    let block_sizes = advice["block_sizes"].as_array().unwrap();
    assert_eq!(block_sizes.len(), 3);
    for learnt in block_sizes {
        let block_bytes = learnt["block_bytes"].as_u64().unwrap();
        let exact = hits_from(&trace.requests, block_bytes);
        let points = learnt["curve"].as_array().unwrap();
        assert!(points.len() > 20, "{points:?}");
        for point in points {
            let blocks = (point["cache_bytes"].as_u64().unwrap() / block_bytes) as usize;
            let hits = exact.iter().filter(|from| from.is_some_and(|from| from <= blocks)).count();
            let expected = hits as f64 / exact.len() as f64;
            let found = point["read_hit_ratio"].as_f64().unwrap();
            assert!(
                (found - expected).abs() <= OFF_MAX,
                "blocks of {block_bytes}, {blocks} of them: {found} of the reads hit, not {expected}"
            );
        }
    }

    // The advice can be applied, and the text gives the same advice.
    assert_eq!(advice["verdict"], "cache");
    assert_eq!(advice["writes"].as_f64(), hob.stats().number("writes"));
    let few = hob.ctl(&["advise", "disk", "--target-hit", "30%"]);
    assert!(few.contains("Confidence: low"), "{few}");
    assert!(few.contains("hob does not know yet whether a smaller cache is"), "{few}");
    assert!(!few.contains("hob cache resize"), "{few}");
    let text = hob.ctl(&["advise", "disk", "--target-hit", "99%"]);
    let resize = text.lines().find(|line| line.trim().starts_with("hob cache resize")).map(str::trim);
    let command = resize.unwrap_or_else(|| panic!("no command in {text}"));
    let args: Vec<&str> = command.split(' ').skip(1).collect();
    let output = hob.try_ctl(&args);
    assert!(output.success() || output.all().contains("pool"), "{command}: {}", output.all());
    hob.stop();
}
