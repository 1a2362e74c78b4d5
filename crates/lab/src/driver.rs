//! Sends requests through a real NBD connection and measures their latencies.
//!
//! One connection, blocking sockets, two threads: one sends while fewer than the wanted number of requests
//! are in flight and the next one is due, the caller's own receives. With one thread, a server that waits
//! for the client to take replies could meet a client that waits for the server to take writes. A request's
//! latency is measured from just before it is passed to the socket until its whole reply has been read.
//! Data is not checked, and written data has no meaning.
//!
//! [`drive`] takes a list and sends as fast as answers arrive. [`Connection::run`] takes requests one by
//! one, each with a time at which it is due, for [`replay`](crate::replay). Refused before anything is
//! sent: a depth of zero; in a list also accesses outside the export or against its block sizes, and writes
//! to a read-only export.

mod connection;
mod dialogue;
mod flight;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use hob_nbd::client::handshake::Negotiated;
use hob_nbd::{ErrorCode, NbdUri, TransmissionFlags};

use crate::summary::Sample;
use crate::workload::{Access, Op};
pub use connection::Connection;
pub use dialogue::{Answer, Ask, Dialogue, Lost};

/// Maximum queue depth.
pub const DEPTH_MAX: usize = 4096;

/// A request with its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timed {
    /// Nanoseconds from the run's start; 0 for as soon as possible.
    pub due_ns: u64,
    /// The request.
    pub access: Access,
}

/// A request that was answered.
#[derive(Debug)]
pub struct Done {
    /// Number in the order of sending, from 0.
    pub number: u64,
    /// The request.
    pub timed: Timed,
    /// Time of sending, nanoseconds from the run's start.
    pub sent_ns: u64,
    /// Latency of the answer.
    pub latency_ns: u64,
    /// Why it failed, if it did.
    pub fault: Option<Fault>,
}

/// Why a request failed.
#[derive(Debug)]
pub enum Fault {
    /// An error of the NBD server.
    Server(ErrorCode),
    /// An error of the kernel.
    System(io::Error),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Server(code) => write!(f, "{code}"),
            Fault::System(error) => write!(f, "{error}"),
        }
    }
}

/// Result of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// Successful requests, in the order of the accesses; times from the run's start, hits unknown.
    pub samples: Vec<Sample>,
    /// Number of requests that the server answered with an error.
    pub errors: u64,
    /// The first of those errors.
    pub first_error: Option<ErrorCode>,
    /// True if the stop flag ended the run before every access was answered.
    pub stopped: bool,
    /// Time from the first request to the last answer.
    pub elapsed_ns: u64,
}

/// Runs `accesses` against an NBD export with up to `depth` of them in flight, in order of sending.
///
/// `progress` is called on this thread for every answer with (answered, all). When `stop` becomes true nothing
/// more is sent, what is in flight is waited for a few seconds, and the run so far is returned.
///
/// # Errors
/// The server cannot be reached, refuses the export, breaks the protocol or goes away; or the accesses do not fit
/// the export. A request that the server answers with an error is counted, not fatal.
pub fn drive(
    target: &NbdUri,
    accesses: &[Access],
    depth: usize,
    stop: &AtomicBool,
    mut progress: impl FnMut(u64, u64),
) -> Result<Run> {
    check_depth(depth)?;
    let connection = Connection::open(target)?;
    check(accesses, connection.negotiated())?;

    let total = accesses.len() as u64;
    let mut samples = vec![None; accesses.len()];
    let (mut run, mut answered) = (Run::default(), 0);
    let source = accesses.iter().map(|access| Ok(Timed { due_ns: 0, access: *access }));
    let ended = connection.run(source, depth, stop, |done| {
        let (at_ns, latency_ns) = (done.sent_ns, done.latency_ns);
        match &done.fault {
            None => samples[done.number as usize] = Some(Sample { at_ns, latency_ns, hit: None }),
            Some(fault) => {
                run.errors += 1;
                if let (Fault::Server(code), None) = (fault, run.first_error) {
                    run.first_error = Some(*code);
                }
            }
        }
        run.elapsed_ns = at_ns + latency_ns;
        answered += 1;
        progress(answered, total);
    });
    ended.with_context(|| format!("after {answered} of {total} requests"))?;
    Ok(Run { samples: samples.into_iter().flatten().collect(), stopped: answered < total, ..run })
}

impl Connection {
    /// Sends what `source` yields, in that order, each request when it is due and when fewer than `depth` are in
    /// flight. `done` is called on this thread for every answer. When `stop` becomes true nothing more is sent, and
    /// what is in flight is waited for a few seconds.
    ///
    /// # Errors
    /// The server breaks the protocol or goes away, or `source` fails, which ends the sending; `done` has heard of
    /// what was answered before. A request that the server answers with an error is not an error of the run. The
    /// caller has seen to it that requests suit what was [negotiated](Connection::negotiated).
    pub fn run(
        self,
        source: impl Iterator<Item = Result<Timed>> + Send,
        depth: usize,
        stop: &AtomicBool,
        done: impl FnMut(&Done),
    ) -> Result<()> {
        check_depth(depth)?;
        flight::fly(self, source, depth, stop, done)
    }
}

fn check_depth(depth: usize) -> Result<()> {
    ensure!((1..=DEPTH_MAX).contains(&depth), "the depth must lie between 1 and {DEPTH_MAX}, not {depth}");
    Ok(())
}

fn check(accesses: &[Access], negotiated: &Negotiated) -> Result<()> {
    let (size, unit) = (negotiated.size_bytes, u64::from(negotiated.block_size_min));
    let read_only = negotiated.flags.contains(TransmissionFlags::READ_ONLY);
    for (index, access) in accesses.iter().enumerate() {
        let Access { offset, len, op } = *access;
        if op == Op::Flush {
            continue;
        }
        let end = offset.checked_add(u64::from(len)).filter(|&end| end <= size);
        ensure!(end.is_some(), "access {index} ({offset}+{len}) is beyond the export's {size} bytes");
        ensure!(len > 0 && len <= negotiated.block_size_max, "access {index} has a length of {len} bytes");
        let aligned = offset.is_multiple_of(unit) && u64::from(len).is_multiple_of(unit);
        ensure!(aligned, "access {index} ({offset}+{len}) is not made of the export's {unit}-byte units");
        ensure!(op == Op::Read || !read_only, "access {index} changes the disk, and the export is read-only");
    }
    Ok(())
}
