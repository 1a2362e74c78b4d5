//! Drives a queue of a vhost-user-blk server without a guest, in one thread, like fio does.
//! Latencies are in microseconds.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use conformance::blkio_client::{BlkioClient, Buffer};
use conformance::data::Noise;
use conformance::vhost_driver::{DATA_BYTES, Driver, Kind, QUEUE, SLOTS};

use super::fio::{Figures, Workload};
use crate::shell::Interrupt;

const PATIENCE: Duration = Duration::from_secs(20);

/// The virtio-blk driver that sends the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum DriverKind {
    /// The driver of the black-box tests
    Own,
    /// libblkio
    Blkio,
}

/// A queue of the server, with memory for the data of each slot.
enum Queue {
    Own(Driver),
    Blkio { client: BlkioClient, buffer: Buffer },
}

impl Queue {
    fn connect(kind: DriverKind, socket: &Path) -> Result<Queue> {
        match kind {
            DriverKind::Own => Ok(Queue::Own(Driver::connect(socket)?)),
            DriverKind::Blkio => {
                let mut client = BlkioClient::connect(socket, 1, i32::from(QUEUE))?;
                let buffer = Buffer::share(&mut client.disk, usize::from(SLOTS) * DATA_BYTES as usize)?;
                Ok(Queue::Blkio { client, buffer })
            }
        }
    }

    /// Adds the request of a slot. `wait` sends it.
    fn submit(&mut self, slot: u16, kind: Kind, offset: u64, len: u64) {
        match self {
            Queue::Own(driver) => driver.submit(slot, kind, offset, len as u32),
            Queue::Blkio { client, buffer } => {
                let (id, at) = (usize::from(slot), usize::from(slot) * DATA_BYTES as usize);
                client.queues[0].submit(id, kind, offset, buffer, at..at + len as usize);
            }
        }
    }

    /// Sends the added requests, and waits until at least one request has ended. Calls `ended` with
    /// the slot and the result of each ended request; 0 is success.
    fn wait(&mut self, mut ended: impl FnMut(u16, i32)) -> Result<()> {
        match self {
            Queue::Own(driver) => {
                driver.kick();
                loop {
                    let mut is_reaped = false;
                    while let Some((slot, status)) = driver.reap() {
                        ended(slot, i32::from(status));
                        is_reaped = true;
                    }
                    if is_reaped {
                        return Ok(());
                    }
                    if !driver.wait(PATIENCE) {
                        bail!("no answer in {PATIENCE:?}");
                    }
                }
            }
            Queue::Blkio { client, .. } => {
                client.queues[0].wait(PATIENCE, |id, result| ended(id as u16, result))?;
                Ok(())
            }
        }
    }
}

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
    driver: DriverKind,
    workload: &Workload,
    size: u64,
    seconds: Option<u32>,
    interrupt: &Interrupt,
) -> Result<Figures> {
    let mut queue = Queue::connect(driver, socket)?;
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
    let mut failed = None;
    let mut done = false;
    loop {
        let now = Instant::now();
        done |= end.is_some_and(|end| now >= end);
        while !done && let Some(slot) = free.pop() {
            let Some(offset) = walk.next(size, len, seconds.is_none()) else {
                done = true;
                free.push(slot);
                break;
            };
            begun[usize::from(slot)] = now;
            queue.submit(slot, kind, offset, len);
        }
        if done && free.len() == begun.len() {
            break;
        }
        let waited = queue.wait(|slot, result| {
            failed = failed.or((result != 0).then_some(result));
            latencies.push(begun[usize::from(slot)].elapsed().as_nanos() as f64 / 1e3);
            free.push(slot);
        });
        if let Err(error) = waited {
            interrupt.check()?;
            bail!("{}: {error:#}", workload.name);
        }
        if let Some(result) = failed {
            bail!("{}: a request ended with the result {result}", workload.name);
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
