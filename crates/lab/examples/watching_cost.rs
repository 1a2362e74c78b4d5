//! Measures the cost of histograms and sampler, nanoseconds per request.
//!
//! Run it with `cargo run -p hob-lab --example watching_cost`. The engine is optimized in the
//! development profile too.

use std::hint::black_box;
use std::time::Instant as Clock;

use hob_engine::io::{Op, PayloadMemory, Promote, Request};
use hob_engine::sizing::Live;
use hob_engine::units::{BufferId, DiskId, Instant, RequestId};
use hob_engine::vscsi::Histograms;
use hob_lab::prng::Prng;
use hob_lab::workload::Zipf;

const REQUESTS: usize = 2_000_000;
const RUN: usize = 1000;

fn main() {
    let mut dice = Prng::new(3);
    let zipf = Zipf::new(1 << 22, 0.9);
    let loads: [(&str, Vec<(u64, u64)>); 5] = [
        ("4 KiB at random in 8 MiB", make(|_| (dice.below(2048) * 4096, 4096))),
        ("4 KiB at random in 1 GiB", make(|_| (dice.below(1 << 18) * 4096, 4096))),
        (
            "4 KiB by zipf 0.9 in 16 GiB",
            make(|_| (zipf.rank(&mut dice).wrapping_mul(0x9e37_79b1) % (1 << 22) * 4096, 4096)),
        ),
        ("64 KiB at random in 64 GiB", make(|_| (dice.below(1 << 20) * 65_536, 65_536))),
        ("4 KiB one after the other in 64 GiB", make(|i| (i as u64 % (1 << 24) * 4096, 4096))),
    ];
    println!("{:<40} {:>14} {:>14}", "", "histograms ns", "sampler ns");
    for (name, requests) in loads {
        let mut histograms = Histograms::new(Instant(0));
        let watched = each(&requests, |i, request| {
            histograms.arrive(Instant(i as u64 * 1000), request);
            histograms.answer(i as u64 % 100_000, request.op);
        });
        black_box(&histograms);
        let mut live = Live::new(Instant(0));
        // The sampler must reach its final rate before its cost is representative.
        each(&requests, |_, request| live.note(request));
        let sampled = each(&requests, |_, request| live.note(request));
        black_box(&live);
        println!("{name:<40} {watched:>14.1} {sampled:>14.1}");
    }
}

fn make(next: impl FnMut(usize) -> (u64, u64)) -> Vec<(u64, u64)> {
    (0..REQUESTS).map(next).collect()
}

/// Returns nanoseconds per request: the median of many short runs, to exclude other load of the host.
fn each(requests: &[(u64, u64)], mut work: impl FnMut(usize, &Request)) -> f64 {
    let mut runs: Vec<f64> = Vec::new();
    for (number, run) in requests.chunks(RUN).enumerate() {
        let began = Clock::now();
        for (i, (offset, len)) in run.iter().enumerate() {
            let request = Request {
                id: RequestId(i as u64),
                disk: DiskId(0),
                op: Op::Read,
                offset: *offset,
                len: *len,
                buffer: Some(BufferId(0)),
                promote: Promote::Usual,
                memory: PayloadMemory::Daemon,
            };
            work(number * RUN + i, black_box(&request));
        }
        runs.push(began.elapsed().as_nanos() as f64 / run.len() as f64);
    }
    runs.sort_by(f64::total_cmp);
    runs[runs.len() / 2]
}
