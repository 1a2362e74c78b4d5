//! Drives a queue of a vhost-user-blk server without a guest, in one thread, like fio does.
//! Latencies are in microseconds.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use conformance::data::Noise;
use conformance::vhost_driver::{Driver, Kind, SLOTS};

use super::fio::{Figures, Workload};
use crate::shell::Interrupt;

const PATIENCE: Duration = Duration::from_secs(20);

/// Order of the request offsets.
enum Walk {
    Random(Noise),
    Straight(u64),
}

impl Walk {
    /// Returns the next offset, or `None` at the end of a single pass.
    fn next(&mut self, size: u64, len: u64, once: bool) -> Option<u64> {
        let blocks = size / len;
        match self {
            Walk::Random(dice) => Some(dice.below(blocks) * len),
            Walk::Straight(at) if once && *at == blocks => None,
            Walk::Straight(at) => {
                let offset = *at % blocks * len;
                *at += 1;
                Some(offset)
            }
        }
    }
}

/// Runs `workload` on the first `size` bytes of the disk at `socket`, for `seconds` or for one
/// pass.
pub(super) fn run(
    socket: &Path,
    workload: &Workload,
    size: u64,
    seconds: Option<u32>,
    interrupt: &Interrupt,
) -> Result<Figures> {
    let mut driver = Driver::connect(socket)?;
    let len: u64 = match workload.block {
        "4k" => 4 << 10,
        "64k" => 64 << 10,
        other => bail!("no requests of {other}"),
    };
    let kind = if workload.rw.ends_with("write") { Kind::Write } else { Kind::Read };
    let mut walk = match workload.rw.starts_with("rand") {
        true => Walk::Random(Noise::new(u64::from(std::process::id()) ^ size)),
        false => Walk::Straight(0),
    };
    if workload.depth > u32::from(SLOTS) || workload.flushes {
        bail!("{}: the load generator does not support this workload", workload.name);
    }
    let start = Instant::now();
    let end = seconds.map(|seconds| start + Duration::from_secs(u64::from(seconds)));
    let mut begun = vec![start; workload.depth as usize];
    let mut free: Vec<u16> = (0..workload.depth as u16).collect();
    let mut latencies = Vec::with_capacity(1 << 20);
    let mut done = false;
    loop {
        let now = Instant::now();
        done |= end.is_some_and(|end| now >= end);
        let mut offered = false;
        while !done && let Some(slot) = free.pop() {
            let Some(offset) = walk.next(size, len, seconds.is_none()) else {
                done = true;
                free.push(slot);
                break;
            };
            begun[usize::from(slot)] = now;
            driver.submit(slot, kind, offset, len as u32);
            offered = true;
        }
        if offered {
            driver.kick();
        }
        if done && free.len() == begun.len() {
            break;
        }
        let mut reaped = false;
        while let Some((slot, status)) = driver.reap() {
            if status != 0 {
                bail!("{}: a request ended with status {status}", workload.name);
            }
            latencies.push(begun[usize::from(slot)].elapsed().as_nanos() as f64 / 1e3);
            free.push(slot);
            reaped = true;
        }
        if !reaped && !driver.wait(PATIENCE) {
            interrupt.check()?;
            bail!("{}: no answer in {PATIENCE:?}", workload.name);
        }
    }
    let elapsed = start.elapsed().as_secs_f64();
    interrupt.check()?;
    let ios = latencies.len() as u64;
    if ios == 0 {
        bail!("{}: no request was completed", workload.name);
    }
    latencies.sort_by(f64::total_cmp);
    Ok(Figures {
        ios,
        iops: ios as f64 / elapsed,
        mean_us: latencies.iter().sum::<f64>() / ios as f64,
        p99_us: latencies[(latencies.len() - 1) * 99 / 100],
    })
}
