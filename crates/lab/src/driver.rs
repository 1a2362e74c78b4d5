//! Sends requests through a real NBD connection and measures their latencies.
//!
//! The driver uses one connection with blocking sockets and two threads. One thread sends the next
//! request when its time is reached and the queue depth allows. The caller's thread receives
//! replies. With a single thread, client and server could deadlock, each waiting for the other to
//! read. The latency of a request starts just before the request is passed to the socket and ends
//! when the whole reply has been read. Read data is not checked, and writes send noise.
//!
//! [`drive`] sends a list of requests as fast as replies arrive. [`Connection::run`] sends requests
//! one by one, each at its own time, for [`replay`](crate::replay). Before the first request, the
//! driver refuses a queue depth of zero. [`drive`] also refuses accesses outside the export or
//! against the export's block sizes, and writes to a read-only export.

mod client;
mod connection;
mod flight;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use hob_nbd::client::handshake::Negotiated;
use hob_nbd::{ErrorCode, NbdUri, TransmissionFlags};

use crate::summary::Sample;
use crate::workload::{Access, Op};
pub use client::{ClientReply, ClientRequest, ConnectionError, NbdClient};
pub use connection::Connection;

/// Maximum queue depth of a run.
pub const DEPTH_MAX: usize = 4096;

/// A request and the time at which to send it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timed {
    /// Time to send the request, nanoseconds from the start of the run. 0 means as soon as
    /// possible.
    pub due_ns: u64,
    /// The request.
    pub access: Access,
}

/// A completed request.
#[derive(Debug)]
pub struct Done {
    /// Number of the request in the order of sending, from 0.
    pub number: u64,
    /// The request.
    pub timed: Timed,
    /// Time of sending, nanoseconds from the start of the run.
    pub sent_ns: u64,
    /// Latency of the reply, nanoseconds.
    pub latency_ns: u64,
    /// Error of the request; `None` if the request succeeded.
    pub fault: Option<Fault>,
}

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The NBD server returned this error.
    #[error("{0}")]
    Server(ErrorCode),
    /// The kernel returned this error.
    #[error("{0}")]
    System(io::Error),
}

/// Result of a run of the load driver against an NBD server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// Successful requests, in the order of the accesses. Times count from the start of the run,
    /// and hits are unknown.
    pub samples: Vec<Sample>,
    /// Number of requests that the server answered with an error.
    pub errors: u64,
    /// First error that the server returned.
    pub first_error: Option<ErrorCode>,
    /// True if the stop flag ended the run before all accesses were answered.
    pub stopped: bool,
    /// Time from the first request to the last reply, nanoseconds.
    pub elapsed_ns: u64,
}

/// Sends `accesses` in order to an NBD export, with up to `depth` requests in flight.
///
/// `progress` is called on this thread after every reply, with the numbers of answered requests and
/// of all requests. When `stop` becomes true, the driver sends no more requests, waits a few
/// seconds for the requests in flight, and returns the results so far.
///
/// # Errors
/// Returns an error if the server cannot be reached, refuses the export, violates the protocol or
/// closes the connection. Accesses that do not fit the export are also an error. Requests that the
/// server answers with an error are only counted.
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
    /// Sends the requests of `source` in order, each at its own time and with up to `depth`
    /// requests in flight. `done` is called on this thread for every reply. When `stop` becomes
    /// true, the driver sends no more requests and waits a few seconds for the requests in flight.
    ///
    /// # Errors
    /// Returns an error if the server violates the protocol or closes the connection, or if
    /// `source` fails. `done` has been called for all earlier replies. A request that the server
    /// answers with an error is not an error of the run. The caller must check that requests fit
    /// the [negotiated](Connection::negotiated) export.
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
    ensure!(
        (1..=DEPTH_MAX).contains(&depth),
        "the queue depth must be between 1 and {DEPTH_MAX}, not {depth}"
    );
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
        ensure!(
            aligned,
            "access {index} ({offset}+{len}) is not a multiple of the export's block size of {unit} bytes"
        );
        ensure!(op == Op::Read || !read_only, "access {index} changes the disk, and the export is read-only");
    }
    Ok(())
}
